"""Objects that are not here, or damaged here, brought from a remote that has them: promisors first, then tiers.

    1. a reader asks the index, then the packs, as always (handle.py); what neither has is asked for here
    2. the remotes that may have it are asked one after another, each for all that is still missing
    3. what one has is copied, verified on its way (transfer/copying.py), into new packs of this repository, which the
       index learns of: the next read finds it here

Where nothing can be kept, for the repository was opened to be read or its disk is full, what is wanted is read from the
remote's own packs and kept nowhere (`lent`): readers verify it by its id, as they do with all that they read.

So a commit that was forgotten here is read from the tier that keeps it; a later collection takes again what no other
commit needs. Commits themselves are never brought: one that is not here comes by `fetch`.

Invariant: nothing relies on a remote: what is not here counts as not stored for those who commit, move refs or collect.
To a repository that is not local nothing is brought: it stands before nothing slower, and whoever made it does not say
what this machine connects to.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

from cas_ckpt.core.records import node_children, pack_record
from cas_ckpt.core.settings import Remote, read_settings
from cas_ckpt.errors import (
    CkptError,
    CorruptionError,
    NoRepositoryError,
    NotFoundError,
    OutOfSpaceError,
    PermissionDeniedError,
    TransientStorageError,
)
from cas_ckpt.index import contents
from cas_ckpt.index.garbage import covers
from cas_ckpt.index.rows import batches
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import Node
from cas_ckpt.objects.pack import Location
from cas_ckpt.progress import phase
from cas_ckpt.storage.disk import in_turn
from cas_ckpt.storage.store import ReadsPastCache, Store
from cas_ckpt.storage.url import without_secrets

if TYPE_CHECKING:
    from cas_ckpt.core.handle import RepositoryHandle

NODES_TOGETHER = 2048
"""Nodes in memory at a time: some 16 MB."""

TURN = "elsewhere"
"""Name of the turn that processes of one machine take."""

MOST_LENT = 200_000
"""Objects whose places at remotes are held in memory at most, before that begins anew (some 100 MB)."""

_LOGGER = logging.getLogger("cas_ckpt")

_NODES = (ObjectKind.LAYOUT, ObjectKind.TREE, ObjectKind.TREE_PAGE, ObjectKind.TENSOR, ObjectKind.CHUNK_PAGE)


class LentPacks:
    """A store beside which packs of others can be read under their own names, which no two packs have in common."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.lent: dict[str, Store] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def get_range(self, key: str, offset: int, length: int) -> bytes | memoryview | bytearray:
        """As `Store.get_range`."""
        return self.lent.get(key, self._store).get_range(key, offset, length)

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        """As `Store.read_into`."""
        return self.lent.get(key, self._store).read_into(key, offset, target, cached_only=cached_only)

    def read_leaves(self, key: str, *where: Any) -> int:
        """As `ReadsLeaves`."""
        from cas_ckpt.transfer.chunk_reader import leaf_reader  # here: `cas-ckpt log` has no use for NumPy

        return leaf_reader(self.lent.get(key, self._store))(key, *where)

    def read_past_cache(self, key: str, offset: int, target: memoryview) -> int | None:
        """As `ReadsPastCache`."""
        store = self.lent.get(key, self._store)
        return store.read_past_cache(key, offset, target) if isinstance(store, ReadsPastCache) else None

    def prefetch(self, key: str, offset: int, length: int) -> None:
        """As `Store.prefetch`."""
        self.lent.get(key, self._store).prefetch(key, offset, length)


class Elsewhere:
    """Brings objects to one handle from remotes. May be shared by threads: one brings, the others wait.

    Attributes:
        num_packs: New packs with what was brought.
    """

    def __init__(self, handle: RepositoryHandle) -> None:
        self._handle = handle
        self._lock = threading.RLock()
        self._opened: dict[str, RepositoryHandle] = {}
        self._lent: dict[bytes, Sequence[Location]] = {}
        self.num_packs = 0

    def lent(self, digests: Iterable[Digest]) -> dict[bytes, Sequence[Location]]:
        """Where those of these objects are that are read from remotes and not kept."""
        found = self._lent
        return {digest: found[digest] for digest in digests if digest in found} if found else {}

    def bring(self, still_missing: Callable[[], Sequence[Digest]], *, lend: bool = False) -> str:
        """Bring what is missing here, as far as remotes have it; what they said about the rest, for an error.

        Args:
            still_missing: What is missing by now: asked again after another thread, or a remote, brought something.
            lend: What cannot be kept here may be read from a remote: the caller asks `lent`, then the handle's store.
        Raises:
            StorageError: the last remote that may have the rest cannot be reached, or bytes cannot be stored here.
        """
        with self._lock:
            remotes = self.remotes() if still_missing() else []
            if not remotes:
                return ""
            keep = not (self._handle.read_only or self._handle.store.abilities.read_only)
            if not keep and not lend:
                names = ", ".join(remote.name for remote in remotes)
                return f"; it may be at {names}: open this repository to write, so that it can be brought here"
            # Of the processes of this machine, such as the ranks of a job, one brings what all want.
            with in_turn(self._handle.store, TURN) if keep else nullcontext():
                return self._ask(remotes, still_missing, keep=keep, lend=lend)

    def _ask(
        self, remotes: Sequence[Remote], still_missing: Callable[[], Sequence[Digest]], *, keep: bool, lend: bool
    ) -> str:
        said: list[str] = []
        unreached: CkptError | None = None
        for remote in remotes:
            missing = still_missing()
            if not missing:
                return ""
            place = f"remote {remote.name!r} ({without_secrets(remote.url)})"
            try:
                there = remote.place(self._handle.store)
                if there not in self._opened:
                    self._opened[there] = type(self._handle).open(there, read_only=True, cache=self._handle.cache_place)
                self._get(self._opened[there], missing, keep=keep, lend=lend)
                said.append(f"{place} does not have it")
            except (CorruptionError, NotFoundError) as error:
                said.append(f"{place}: {error.args[0]}")
                if isinstance(error, NoRepositoryError):
                    unreached = error
            except CkptError as error:
                said.append(f"{place} cannot be asked: {error}")
                unreached = error
        missing = still_missing()
        if not missing:
            return ""
        if unreached is not None:
            kind = TransientStorageError if isinstance(unreached, NotFoundError) else type(unreached)
            raise kind(
                f"{len(missing)} objects are in no intact pack of {self._handle.store.url}, and {'; '.join(said)}: "
                "try again when it can be reached"
            ) from unreached
        return f"; {'; '.join(said)}"

    def close(self) -> None:
        """Close what was opened. Idempotent."""
        with self._lock:
            while self._opened:
                self._opened.popitem()[1].close()

    def remotes(self) -> list[Remote]:
        """Those that may be asked, in the order in which they are."""
        if not self._handle.store.abilities.local:
            return []
        found = [remote for remote in read_settings(self._handle.store).remotes if remote.promisor or remote.tier]
        return sorted(found, key=lambda remote: not remote.promisor)

    def _get(self, other: RepositoryHandle, missing: Sequence[Digest], *, keep: bool, lend: bool) -> None:
        """Copy to here what `other` has of these, or let it be read there."""
        located: Mapping[bytes, Sequence[Location]] = other.index.read(contents.locate, missing)
        if len(located) < len(set(missing)):
            other.sync()
            located = other.index.read(contents.locate, missing)
        if keep:
            try:
                self._bring(other, missing, located)
                return
            except (OutOfSpaceError, PermissionDeniedError) as error:
                if not lend:
                    raise
                _LOGGER.warning("what is read from %s is not kept here: %s", other.store.url, error)
        self._lend(other, located)

    def _lend(self, other: RepositoryHandle, located: Mapping[bytes, Sequence[Location]]) -> None:
        handle = self._handle
        own = handle.index.packs().keys()  # packs of others with these names replace none of ours
        located = {
            digest: places for digest, places in located.items()
            if covers(places) and own.isdisjoint(place.pack for place in places)
        }  # fmt: skip
        if not isinstance(handle.store, LentPacks):
            handle.store = cast(Store, LentPacks(handle.store))
        packs = {place.pack for places in located.values() for place in places}
        cast(LentPacks, handle.store).lent.update(dict.fromkeys(packs, other.store))
        if len(self._lent) > MOST_LENT:
            self._lent = {}
        self._lent.update(located)

    def _bring(
        self, other: RepositoryHandle, missing: Sequence[Digest], located: Mapping[bytes, Sequence[Location]]
    ) -> None:
        from cas_ckpt.transfer.chunk_reader import cover  # brings numpy, which a log does not need
        from cas_ckpt.transfer.pack_writer import write_nodes

        of_kind: dict[ObjectKind, list[Digest]] = {}
        for digest in dict.fromkeys(missing):
            if located.get(digest):
                of_kind.setdefault(ObjectKind(located[digest][0].kind), []).append(digest)
        for kind in _NODES:
            for part in batches(of_kind.get(kind, []), NODES_TOGETHER):
                found = other.read_nodes(kind, part)
                nodes = [Node(kind, digest, data, node_children(kind, data)) for digest, data in found.items()]
                self._handle.index.add_packs([pack_record(write_nodes(self._handle.store, nodes), nodes)])
                self.num_packs += 1
        chunks = of_kind.get(ObjectKind.CHUNK, [])
        if chunks:
            # One of which it has only a part is left for another remote.
            whole = ((digest, cover(located[digest], located[digest][0].num_bytes)) for digest in chunks)
            self._bring_chunks(other, [(digest, place) for digest, places in whole for place in places])

    def _bring_chunks(self, other: RepositoryHandle, extents: Sequence[tuple[Digest, Location]]) -> None:
        from cas_ckpt.transfer.copying import Throttle, copy_extents, plan_copies

        handle = self._handle
        units = plan_copies(extents, pack_bytes=handle.config.pack_bytes)
        with phase(handle.progress, "fetching what is missing", sum(unit.num_bytes for unit in units)):
            packs = copy_extents(
                other.store, handle.store, units, relocate=other.relocate,
                num_threads=max(other.num_requests, handle.num_requests), progress=handle.progress,
                throttle=Throttle(None), on_pack=lambda: None,
            )  # fmt: skip
        handle.index.add_packs([pack_record(pack, ()) for pack in packs])
        self.num_packs += len(packs)
