"""rebase: commits of a branch are made anew on top of another one, as `pull --rebase` does.

    1. own commits: those that first parents lead to from the branch, up to what the other side has
    2. each is made again with the same state, words and numbers, behind the one before it
    3. the branch names the last of them, if it is where it was

No state changes: each root stays what it was. The first of the new commits names in its lineage what its state came
from (`continued-from`), since that is no longer its parent. A signature is of the commit that was; the new ones have
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cas_ckpt.core.completeness import require_complete
from cas_ckpt.core.forgotten import forgotten_view
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import graph_with
from cas_ckpt.core.records import CONTINUED_FROM
from cas_ckpt.core.refs import RefKind
from cas_ckpt.errors import NotFoundError
from cas_ckpt.objects.digest import Digest, ObjectKind, short
from cas_ckpt.objects.nodes import LineageEdge, Node, commit_node, decode_commit
from cas_ckpt.ops.sync.send import Moved, MovedRef, RefUpdate, SendOptions, send
from cas_ckpt.transfer.pack_writer import write_nodes


def rebase(handle: RepositoryHandle, branch: str, ours: Digest, theirs: Digest) -> MovedRef:
    """Make the commits of `branch`, which is at `ours`, that `theirs` does not lead to anew on top of `theirs`.

    Both sides are in this repository. The former commits stay in the branch's log.

    Raises:
        ConflictError: the branch moved meanwhile. NotFoundError: the data of one of the commits was forgotten.
        SignatureError: the branch takes signed commits only.
    """
    own = _own_commits(handle, ours, theirs)
    forgotten = forgotten_view(handle)
    without_data = next((digest for digest in own if digest in forgotten), None)
    if without_data is not None:
        raise NotFoundError(f"commit {short(without_data)} was forgotten: it cannot be made anew without its data")
    generation = handle.begin_writing()
    require_complete(handle, ours, generation)
    nodes = _made_anew(handle, own, theirs)
    ordered, hints = handle.hints.copies(nodes, [])
    packs = [write_nodes(handle.cached_store, ordered, hints=hints)]
    handle.add_written(packs, ordered, generation=generation)
    update = RefUpdate(RefKind.BRANCH, branch, nodes[-1].digest, force=True, expected=ours)
    send(handle, handle, [update], SendOptions("rebase"), near=handle)
    anew = {digest.hex(): node.digest.hex() for digest, node in zip(own, nodes, strict=True)}
    if handle.head.commit in anew:  # the live state is that of the new commit as well: the next one follows that
        handle.head = replace(handle.head, commit=anew[handle.head.commit])
    return MovedRef(update.key, ours.hex(), nodes[-1].digest.hex(), Moved.REBASED)


def _own_commits(handle: RepositoryHandle, ours: Digest, theirs: Digest) -> list[Digest]:
    """The commits to be made anew, the eldest first."""
    graph = graph_with(handle, [ours, theirs])
    there = graph.reached([theirs])
    found: list[Digest] = []
    at: bytes | None = ours
    while at is not None and at not in there:
        found.append(Digest(at))
        commit = graph.commits.get(at)
        at = commit.parents[0] if commit is not None and commit.parents else None
    return found[::-1]


def _made_anew(handle: RepositoryHandle, own: Sequence[Digest], onto: Digest) -> list[Node]:
    made: dict[Digest, Node] = {}
    parent = onto
    for digest in own:
        commit = decode_commit(handle.read_node(ObjectKind.COMMIT, digest))
        lineage = commit.lineage
        if not made and commit.parents:
            lineage = (*lineage, LineageEdge(CONTINUED_FROM, commit.parents[0]))
        others = [made[other].digest if other in made else other for other in commit.parents[1:]]
        parents = tuple(dict.fromkeys((parent, *others)))
        made[digest] = commit_node(replace(commit, parents=parents, lineage=lineage, signature=None))
        parent = made[digest].digest
    return list(made.values())
