"""Checks that tiers have the commits whose last local copy is about to be deleted: they are asked each time.

    1. can it be reached, is it the repository that it was when it was first asked, and not this one
    2. do its refs lead to the commit, and has it not forgotten it
    3. is every object of the commit whole in packs that are listed there, with the sizes that they had
    4. if asked for: are the bytes intact, all of them read

Asked by `forget` before it writes anything down, and by garbage collection before it takes what was forgotten earlier.

Invariant: a commit that a tier is to have (of a branch that it wants, or that it was seen to have) is passed only if
that tier was seen to have it. Only reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from fnmatch import fnmatchcase
from typing import TypeAlias

from cas_ckpt.core.forgotten import read_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import Graph, graph_behind, graph_with
from cas_ckpt.core.refs import Ref, RefKind
from cas_ckpt.core.settings import Remote, read_settings
from cas_ckpt.errors import CkptError, ConflictError
from cas_ckpt.index.integrity import IntegrityView, UnusableParts
from cas_ckpt.objects.digest import Digest
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.store import Store

Damaged: TypeAlias = Callable[[RepositoryHandle], Iterable[str]]


def not_at_tiers(
    handle: RepositoryHandle, refs: Iterable[Ref], going: Collection[Digest], *, damaged: Damaged = lambda _: ()
) -> dict[Digest, str]:
    """Commits of `going` that a tier is to have, and has not -> why not, in words.

    Args:
        refs: At least all branches and remote-tracking branches.
        damaged: Ids of commits of a tier that are found damaged there by reading every byte, if that is asked for.
    """
    tiers = read_settings(handle.store).tiers if going else ()
    refs = list(refs) if tiers else []
    found: dict[Digest, str] = {}
    for tier in tiers:
        ours = [ref.target for ref in refs if ref.target is not None and _is_for(tier, ref)]
        asked = graph_behind(handle, ours).ancestors(ours).intersection(going)
        if asked:
            found |= _not_there(handle, tier, [Digest(one) for one in asked], damaged)
    return found


def _is_for(tier: Remote, ref: Ref) -> bool:
    """Whether the tier is to have what the ref leads to: a branch, or one that it had, and that may be gone here."""
    own = f"{tier.name}/" if ref.kind is RefKind.REMOTE else ""
    if ref.kind not in (RefKind.BRANCH, RefKind.REMOTE) or not ref.name.startswith(own):
        return False
    return not tier.push or any(fnmatchcase(ref.name.removeprefix(own), one) for one in tier.push)


def _not_there(
    handle: RepositoryHandle, tier: Remote, commits: Collection[Digest], damaged: Damaged
) -> dict[Digest, str]:
    try:
        place = tier.place(handle.store)
        with closing(RepositoryHandle.open(place, read_only=True, cache=handle.cache_place)) as other:
            if _is_same_place(handle.store, other.store):
                return dict.fromkeys(commits, f"{tier.name} is this repository itself")
            tier.require_same(other.config.store_id)
            return _lacking(other, tier.name, commits, damaged)
    except ConflictError as error:
        return dict.fromkeys(commits, str(error))
    except CkptError as error:
        return dict.fromkeys(commits, f"{tier.name} cannot be asked whether it still has it: {error}")


def _is_same_place(one: Store, other: Store) -> bool:
    if isinstance(one, FileStore) and isinstance(other, FileStore):
        return one.root.samefile(other.root)  # a link, or a mount, may have put it there
    return one.url == other.url


def _lacking(other: RepositoryHandle, name: str, commits: Collection[Digest], damaged: Damaged) -> dict[Digest, str]:
    other.sync()
    refs = list(other.refs.list())
    heads = [ref.target for ref in refs if ref.target is not None]
    graph = graph_with(other, heads)
    kept, forgotten = graph.reached(heads), read_forgotten(other.store).difference(heads)
    whole = whole_commits(other, graph, commits)
    hit = frozenset(damaged(other))
    found: dict[Digest, str] = {}
    for commit in commits:
        if commit in forgotten:
            found[commit] = f"forgotten at {name}, too"
        elif commit not in kept:
            found[commit] = f"no ref at {name} leads to it any more"
        elif commit not in whole:
            found[commit] = f"some of its data is gone at {name}"
        elif commit.hex() in hit:
            found[commit] = f"damaged at {name}: repo.fsck(read_data=True) there says what"
    return found


def whole_commits(handle: RepositoryHandle, graph: Graph, commits: Iterable[Digest]) -> set[Digest]:
    """Those of `commits` of which every object is whole in packs that the index knows."""
    integrity = IntegrityView(handle.index)
    wrong = integrity.above(integrity.incomplete(integrity.referred_only() | integrity.in_parts(), UnusableParts()))
    parts = {one: (one, graph.commits[one].root, graph.commits[one].layout) for one in commits if one in graph}
    numbers = integrity.numbers(part for each in parts.values() for part in each if part is not None)
    return {
        one for one, each in parts.items()
        if all(part in numbers and numbers[part] not in wrong for part in each if part is not None)
    }  # fmt: skip
