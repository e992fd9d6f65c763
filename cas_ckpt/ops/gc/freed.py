"""Preview of what a collection would free if a ref were deleted, or commits were forgotten.

Invariant: only asked, never changed. It is the difference of what is dead afterwards and what is dead already, as
garbage collection would see both: other refs and their logs keep what they lead to, and a ref that names a commit
keeps it although it is forgotten. The size of packs does not enter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cas_ckpt import clock
from cas_ckpt.arguments import did_you_mean
from cas_ckpt.core.forgotten import read_forgotten_leniently
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import LiveSets, live_sets
from cas_ckpt.core.records import Brief
from cas_ckpt.core.refs import Ref, RefKind
from cas_ckpt.core.revisions import HEAD_NAMES, Revision, current_branch, resolve
from cas_ckpt.errors import InvalidInputError, NotFoundError
from cas_ckpt.index import liveness
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.gc.plan import GcOptions


@dataclass(frozen=True, slots=True, repr=False)
class Freed(Brief):
    """Objects and bytes that a collection would free.

    Attributes:
        commits: Ids of the commits whose data nothing would keep.
        num_chunks, num_bytes: Chunks, and their plain bytes.
        num_nodes: Other objects.
        stored_bytes: What all of it takes in packs.
        kept: Ids of commits that were asked for and would stay: a branch, tag or pin names them.
    """

    commits: tuple[str, ...]
    num_chunks: int
    num_bytes: int
    num_nodes: int
    stored_bytes: int
    kept: tuple[str, ...] = ()


def unique_to(handle: RepositoryHandle, name: str, *, with_remotes: bool = False) -> Freed:
    """Objects that only the branch, tag or pin `name` leads to, its log included.

    Args:
        with_remotes: What other remote-tracking branches lead to is not its own. Else these hold nothing, or a branch
            that was pushed would have nothing for itself.
    Raises:
        NotFoundError: no such ref.
    """
    refs = list(handle.refs.every())
    ours = _named(refs, current_branch(handle) if name in HEAD_NAMES else name)
    others = [ref for ref in refs if ref is not ours and (with_remotes or ref.kind is not RefKind.REMOTE)]
    return _difference(handle, live_sets(handle, refs=[ours, *others]), live_sets(handle, refs=others))


def _named(refs: Sequence[Ref], name: str) -> Ref:
    for kind in RefKind:
        for ref in refs:
            if ref.kind is kind and ref.target is not None and name in (ref.name, f"{kind.value}{ref.name}"):
                return ref
    similar = did_you_mean(name, (ref.name for ref in refs if ref.target is not None))
    raise NotFoundError(
        f"there is no branch, tag or pin {name!r}{similar}: see repo.branches(), repo.tags() and repo.pins()"
    )


def freed_by(handle: RepositoryHandle, revisions: Sequence[Revision]) -> Freed:
    """Objects that the next collection would free if these commits were forgotten.

    Raises:
        NotFoundError: no such revision. InvalidInputError: none was given.
    """
    if not revisions:
        raise InvalidInputError("what would be freed by forgetting nothing is nothing: give revisions")
    wanted = {resolve(handle, revision) for revision in revisions}
    refs = list(handle.refs.every())
    named = {ref.target for ref in refs if ref.target is not None}
    now, then = _without(handle, wanted, refs)
    return _difference(handle, now, then, kept=tuple(sorted(digest.hex() for digest in wanted & named)))


def stored_bytes_freed(
    handle: RepositoryHandle, commits: Collection[Digest], *, refs: Sequence[Ref] | None = None
) -> int:
    """Bytes, encoded as they are in packs, that die with these commits.

    Args:
        refs: As they were read, placeholders and deleted ones too; None: read them now.

    Raises:
        CorruptionError: a ref leads to a commit that is in no intact pack.
    """
    if not commits:
        return 0
    now, then = _without(handle, commits, list(handle.refs.every()) if refs is None else refs)
    return liveness.freed(handle.index, (now.commits, now.roots), (then.commits, then.roots)).stored_bytes


def _without(handle: RepositoryHandle, commits: Collection[Digest], refs: Sequence[Ref]) -> tuple[LiveSets, LiveSets]:
    """Live objects now, and if `commits` were forgotten."""
    expired_us = int((clock.now_s() - GcOptions().reflog_expire_s) * 1e6)
    forgotten = read_forgotten_leniently(handle.store)
    return (
        live_sets(handle, refs=refs, forgotten=forgotten, expire_before_us=expired_us),
        live_sets(handle, refs=refs, forgotten=forgotten.union(commits), expire_before_us=expired_us),
    )


def _difference(handle: RepositoryHandle, now: LiveSets, then: LiveSets, *, kept: tuple[str, ...] = ()) -> Freed:
    usage = liveness.freed(handle.index, (now.commits, now.roots), (then.commits, then.roots))
    lost = (now.commits - now.forgotten) - (then.commits - then.forgotten)
    return Freed(
        tuple(sorted(digest.hex() for digest in lost)), usage.num_chunks, usage.num_bytes, usage.num_nodes,
        usage.stored_bytes, kept,
    )  # fmt: skip
