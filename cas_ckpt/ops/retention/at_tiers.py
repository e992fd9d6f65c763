"""What tiers still have of commits that are about to be forgotten here: they are asked, not remembered.

    1. is it another repository, and can it be reached
    2. do its refs lead to the commit, and has it not forgotten it
    3. is every object of the commit whole in packs that are listed there, with the sizes that they had
    4. if asked for: are the bytes intact, all of them read

Invariant: a commit of a branch that a tier is to have is passed only if that tier was seen to have it. Only reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import closing
from fnmatch import fnmatchcase

from cas_ckpt.core.forgotten import read_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import graph_with, read_graph
from cas_ckpt.core.refs import Ref, RefKind
from cas_ckpt.core.settings import Remote, read_settings
from cas_ckpt.errors import CkptError
from cas_ckpt.index.integrity import IntegrityView, UnusableParts
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.fsck.data import DataOptions
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.store import Store


def not_at_tiers(
    handle: RepositoryHandle, refs: Iterable[Ref], going: Collection[Digest], *, read_data: bool = False
) -> dict[Digest, str]:
    """Commits of `going` that a tier is to have, and has not -> why not, in words.

    Args:
        refs: At least all branches.
        read_data: Read and verify every byte that the tiers hold.
    """
    tiers = read_settings(handle.store).tiers if going else ()
    branches = [ref for ref in refs if ref.kind is RefKind.BRANCH and ref.target is not None]
    found: dict[Digest, str] = {}
    for tier in tiers:
        ours = [ref.target for ref in branches if not tier.push or any(fnmatchcase(ref.name, one) for one in tier.push)]
        asked = read_graph(handle).ancestors(ours).intersection(going)  # type: ignore[arg-type]
        if asked:
            found |= _not_there(handle, tier, [Digest(one) for one in asked], read_data=read_data)
    return found


def _not_there(
    handle: RepositoryHandle, tier: Remote, commits: Collection[Digest], *, read_data: bool
) -> dict[Digest, str]:
    try:
        place = tier.place(handle.store)
        with closing(RepositoryHandle.open(place, read_only=True, cache=handle.cache_place)) as other:
            if _is_same_place(handle.store, other.store):
                return dict.fromkeys(commits, f"{tier.name} is this repository itself")
            return _lacking(other, tier.name, commits, read_data=read_data)
    except CkptError as error:
        return dict.fromkeys(commits, f"{tier.name} cannot be asked whether it still has it: {error}")


def _is_same_place(one: Store, other: Store) -> bool:
    if isinstance(one, FileStore) and isinstance(other, FileStore):
        return one.root.samefile(other.root)  # a link, or a mount, may have put it there
    return one.url == other.url


def _lacking(other: RepositoryHandle, name: str, commits: Collection[Digest], *, read_data: bool) -> dict[Digest, str]:
    other.sync()
    refs = list(other.refs.list())
    heads = [ref.target for ref in refs if ref.target is not None]
    graph = graph_with(other, heads)
    kept, forgotten = graph.reached(heads), read_forgotten(other.store).difference(heads)
    integrity = IntegrityView(other.index)
    incomplete = integrity.incomplete(integrity.referred_only() | integrity.in_parts(), UnusableParts())
    damaged = set[str]()
    if read_data:
        damaged = {hit.commit for each in check_open(other, DataOptions()).problems for hit in each.hits}
    parts = {one: (one, graph.commits[one].root, graph.commits[one].layout) for one in commits if one in graph}
    numbers = integrity.numbers(part for each in parts.values() for part in each if part is not None)
    wrong = integrity.above(incomplete)
    found: dict[Digest, str] = {}
    for commit in commits:
        if commit in forgotten:
            found[commit] = f"forgotten at {name}, too"
        elif commit not in kept:
            found[commit] = f"no ref at {name} leads to it any more"
        elif any(part not in numbers or numbers[part] in wrong for part in parts[commit] if part is not None):
            found[commit] = f"some of its data is gone at {name}"
        elif commit.hex() in damaged:
            found[commit] = f"damaged at {name}: repo.fsck(read_data=True) there says what"
    return found
