"""The reader's half of hints: commits, nodes and places that a reader finds out before it has looked at all packs.

    1. a ref that was looked at says which meta pack held its target; that pack is read by one request, if it is small
    2. it has the nodes of its commit, copies of the directories of the data packs, and a page: the commits before it,
       as nodes, and the meta packs that hold them
    3. what is not found there is looked for in the packs that pages name, some at a time; then `sync` looks at all

A question about the contents of a state, which is put to the index, brings the packs that hold it there, whole
(`records`): then the index knows some packs and not others, as it does wherever another process commits.

Invariant: commits of pages, and places that are only said, are kept apart from the index, which so never seems to know
a pack of which it knows a part: garbage collection, fsck and writers do not ask here, and from the first `sync` of a
handle on none does. Nodes are proven by their ids; what is read at a place is verified. Packs that are read, and
memory, are limited: what a page claims can cost a reader no more than that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from threading import RLock
from typing import TYPE_CHECKING

from cas_ckpt.core.packs import LoadedPack, copied_records, load_pack
from cas_ckpt.core.records import commit_row
from cas_ckpt.errors import CkptError
from cas_ckpt.index import contents
from cas_ckpt.index.rows import CommitRow, PackRecord
from cas_ckpt.objects.digest import Digest, ObjectKind, object_id
from cas_ckpt.objects.pack import ExtentInfo, Location
from cas_ckpt.parallel.workers import map_all

if TYPE_CHECKING:
    from cas_ckpt.core.handle import RepositoryHandle

MOST_LOADED = 64
"""Packs that are read for hints, before a look at all packs is no dearer."""

MOST_LOOKED_AT = 4
"""Refs that were looked at last, in whose packs a node is looked for."""

AT_ONCE = 16
"""Packs of earlier commits that are looked through for a node, at most."""

MOST_NODE_BYTES = 64 * 1024 * 1024
MOST_PLACES = 200_000

_LOGGER = logging.getLogger("cas_ckpt")


class Preview:
    """Data from hints, for one handle. Thread-safe."""

    def __init__(self, handle: RepositoryHandle) -> None:
        self._handle = handle
        self._lock = RLock()
        self._ended = handle.store.abilities.local
        self._loaded: dict[bytes, LoadedPack | None] = {}
        self._nodes: dict[Digest, bytes] = {}
        self._node_bytes = 0
        self._places: dict[Digest, list[Location]] = {}
        self._brought: set[str] = set()
        # Where a commit is said to be, and, of one that is not known yet, where the page is that has it.
        self._packs: dict[Digest, bytes] = {}
        self._pages: dict[Digest, bytes] = {}

    def end(self) -> None:
        """Forget all of it, and answer nothing any more: the index knows."""
        with self._lock:
            self._ended = True
            for kept in (self._loaded, self._nodes, self._places, self._packs, self._pages):
                kept.clear()

    # --- questions -----------------------------------------------------------------------------

    def nodes(self, digests: Iterable[Digest]) -> dict[Digest, bytes]:
        """Those of these nodes that were read already."""
        with self._lock:
            return {digest: self._nodes[digest] for digest in digests if digest in self._nodes} if self._nodes else {}

    def locate(self, digests: Sequence[Digest]) -> Mapping[bytes, Sequence[Location]]:
        """Where those of these objects are said to be that hints tell of."""
        with self._lock:
            if self._ended:
                return {}
            for look in (self._load_named, self._load_further, self._load_looked_at, self._load_earlier):
                missing = [digest for digest in digests if digest not in self._places]
                if not missing:
                    break
                look(missing)
            return {digest: self._places[digest] for digest in digests if digest in self._places}

    def commits_behind(self, starts: Iterable[Digest]) -> dict[bytes, CommitRow]:
        """The commits that `starts` lead to and the index does not know, as far as pages tell."""
        with self._lock:
            found: dict[bytes, CommitRow] = {}
            level = list(dict.fromkeys(starts))
            while level and not self._ended:
                known = self._handle.index.read(contents.known, level)
                missing = [digest for digest in level if digest not in known and digest not in found]
                unread = [digest for digest in missing if digest not in self._nodes]
                if unread:
                    self._load_named(unread)
                if any(digest not in self._nodes for digest in missing):
                    break
                level = []
                for digest in missing:
                    row = commit_row(digest, self._nodes[digest])
                    found[digest] = row
                    if row.parents and digest in self._packs:  # its page goes on behind it
                        self._pages[Digest(row.parents[0])] = self._packs[digest]
                    level += map(Digest, row.parents)
            return found

    def records(self, digests: Sequence[Digest]) -> list[PackRecord]:
        """Records to add to the index so that it knows more of these nodes; each pack once, and whole."""
        with self._lock:
            keys = {place.pack for places in self.locate(digests).values() for place in places}
            found: list[PackRecord] = []
            for loaded in self._loaded.values():
                if loaded is None or loaded.key not in keys or loaded.key in self._brought:
                    continue
                record = loaded.record()
                if record is not None:
                    self._brought.add(loaded.key)
                    found += copied_records(loaded.hints.directories if loaded.hints is not None else ())
                    found.append(record)
            return found

    # --- reading packs ---------------------------------------------------------------------------

    def _load_named(self, digests: Sequence[Digest]) -> None:
        """Read the packs in which refs and pages say that these commits are, or the page that has them."""
        places = (self._pages, self._handle.refs.packs, self._packs)
        self._load(
            name
            for digest in digests
            if (name := next((at[digest] for at in places if digest in at), None)) is not None
        )

    def _load_looked_at(self, digests: Sequence[Digest]) -> None:
        """Read the packs of the refs that were looked at last, for what is not a commit."""
        self._load(list(self._handle.refs.packs.values())[-MOST_LOOKED_AT:])
        self._load_further(digests)

    def _load_further(self, digests: Sequence[Digest]) -> None:
        """Read what else was written for the commits that are known."""
        loaded = [each for each in self._loaded.values() if each is not None and each.hints is not None]
        self._load([name for each in loaded for name in (each.hints.packs if each.hints is not None else ())])

    def _load_earlier(self, digests: Sequence[Digest]) -> None:
        """Read the packs of the commits before the known ones, the youngest first, if these are not too many."""
        loaded = [each for each in self._loaded.values() if each is not None]
        names = [page.pack for each in loaded if each.hints is not None for page in each.hints.commits]
        names = [name for name in dict.fromkeys(names) if name not in self._loaded]
        if len(names) <= AT_ONCE:
            self._load(names)
            self._load_further(digests)

    def _load(self, names: Iterable[bytes]) -> None:
        wanted = [name for name in dict.fromkeys(names) if name not in self._loaded]
        wanted = wanted[: max(MOST_LOADED - len(self._loaded), 0)]
        if not wanted or self._ended:
            return
        for name, found in zip(wanted, map_all(self._read, wanted, num_threads=self._handle.num_requests), strict=True):
            self._loaded[name] = found
            if found is not None:
                self._take_in(name, found)

    def _read(self, name: bytes) -> LoadedPack | None:
        try:
            return load_pack(self._handle.cached_store, name)
        except CkptError as error:
            _LOGGER.info("a hint led to nothing: %s", error)
            return None

    def _take_in(self, name: bytes, loaded: LoadedPack) -> None:
        for digest, data in loaded.nodes.items():
            self._add_node(digest, data)
        self._add_places(loaded.key, loaded.entries)
        self._packs.update((entry.digest, name) for entry in loaded.entries if entry.kind == ObjectKind.COMMIT)
        hints = loaded.hints
        if hints is None:
            return
        for record in copied_records(hints.directories):
            self._add_places(record.name, record.entries)
        for other, pack in hints.others:
            self._packs.setdefault(other, pack)
        for page in hints.commits:
            self._packs.setdefault(self._add_node(object_id(ObjectKind.COMMIT.label, page.data), page.data), page.pack)
            for other, pack in page.others:
                self._packs.setdefault(other, pack)

    def _add_node(self, digest: Digest, data: bytes) -> Digest:
        if digest not in self._nodes and self._node_bytes + len(data) <= MOST_NODE_BYTES:
            self._nodes[digest] = data
            self._node_bytes += len(data)
        return digest

    def _add_places(self, key: str, entries: Sequence[ExtentInfo]) -> None:
        if len(self._places) + len(entries) > MOST_PLACES:
            return
        for e in entries:
            self._places.setdefault(e.digest, []).append(
                Location(
                    key, e.kind, e.num_bytes, e.first_leaf, e.num_leaves, e.leaf_bytes, e.offset, e.header_bytes,
                    e.stored_bytes, e.encoding, e.base,
                )
            )  # fmt: skip
