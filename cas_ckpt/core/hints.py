"""Hints: data beside the nodes in the meta pack of a commit, on a store that is not local. What a commit writes:

    1. the directories of the data packs that were written for the commit: their tails need not be read
    2. a page of history: the commits before it, so that a log of thousands takes few reads. The page of a commit goes
       back to the last one whose depth is a multiple of `NEAR`; of such a commit, to the last one whose depth is a
       multiple of `FAR`. So a page costs a commit some kilobytes on average, however long the history is
    3. names of packs that hold the further parents of merges, of further meta packs of this commit, and of those that
       hold what it shares with earlier ones

What the next page is made of is remembered by the handle; the first commit of a process, or one after a commit of
somebody else, reads the page of its parent.

Invariant: a page holds what its writer has proven: nodes by their ids, each named as first parent by the one before.
Nothing depends on hints: where they end, or are missing, a reader looks at all packs. Making them fails no commit.

A reader (`Preview`) finds out commits, nodes and places from them, before it has looked at all packs:

    1. a ref that was looked at says which meta pack held its target; that pack is read by one request, if it is small
    2. it has the nodes of its commit, copies of the directories of the data packs, and a page: the commits before it,
       as nodes, and the meta packs that hold them
    3. what is not found there is looked for in the packs that pages name, some at a time; then `sync` looks at all

A question about the contents of a state, which is put to the index, brings the packs that hold it there, whole
(`records`): then the index knows some packs and not others, as it does wherever another process commits.

Commits of pages, and places that are only said, are kept apart from the index, which so never seems to know
a pack of which it knows a part: garbage collection, fsck and writers do not ask here, and from the first `sync` of a
handle on none does. Nodes are proven by their ids; what is read at a place is verified. Packs that are read, and
memory, are limited: what a page claims can cost a reader no more than that.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from threading import RLock
from typing import TYPE_CHECKING, TypeAlias

from cas_ckpt.core.packs import LoadedPack, copied_records, load_pack, pack_name
from cas_ckpt.core.records import commit_row
from cas_ckpt.errors import CkptError, NotFoundError
from cas_ckpt.index import contents
from cas_ckpt.index.rows import CommitRow, PackRecord
from cas_ckpt.objects.digest import Digest, ObjectKind, object_id
from cas_ckpt.objects.nodes import Node, decode_commit
from cas_ckpt.objects.pack import (
    TRAILER_BYTES,
    ExtentInfo,
    Hints,
    Location,
    PackKind,
    PageCommit,
    encode_directory,
    encode_hints,
    encode_trailer,
)
from cas_ckpt.parallel.workers import map_all
from cas_ckpt.transfer.pack_writer import WrittenPack

if TYPE_CHECKING:
    from cas_ckpt.core.handle import RepositoryHandle


NEAR = 32
FAR = 1024

MOST_PAGE_BYTES = 4 * 1024 * 1024
"""Of nodes in a page: commits with long messages have shorter pages."""

MOST_DIRECTORY_BYTES = 8 * 1024 * 1024
"""Of directories in hints: of a commit of more new chunks (some 70,000), readers read the tails of the packs."""

MOST_SHARED, MOST_EARLIER = 256, 8
"""Nodes of earlier commits that are looked for, and packs that are named for them."""

_REMEMBERED = 2 * NEAR
"""Commits whose pages are remembered: those that are written, and the one whose page the next long one goes on with."""

_LOGGER = logging.getLogger("cas_ckpt")

_Stored: TypeAlias = tuple[PageCommit, int, tuple[PageCommit, ...]]
"""A commit that is stored, its depth, and its page."""


class HintsWriter:
    """Makes hints for the commits of one handle. Threads may share it."""

    def __init__(self, handle: RepositoryHandle) -> None:
        self._handle = handle
        self._lock = RLock()
        self._known: OrderedDict[Digest, _Stored] = OrderedDict()

    def hints(
        self, parents: Sequence[Digest], packs: Sequence[WrittenPack], *, seen: tuple[Digest | None, bytes | None],
        shared: Sequence[Digest] = (),
    ) -> Hints:  # fmt: skip
        """The hints of a commit that is about to be written to a store that is not local.

        Args:
            packs: All that was written for it so far.
            seen: A commit, and the name of the pack that a ref says holds it.
            shared: Its nodes that were stored before, those first that every reader needs.
        """
        try:
            depth, page = self._page_after(parents[0], seen) if parents else (0, ())
            others, earlier = self._others(parents[1:]), self._packs_of(shared)
        except CkptError as error:
            _LOGGER.info("a commit is made without a page of its history: %s", error)
            depth, page, others, earlier = 0, (), (), ()
        names = dict.fromkeys((*(pack_name(each.key) for each in packs if each.kind == PackKind.META), *earlier))
        return Hints(depth, page, others, _directories(packs), tuple(names))

    def note(self, digest: Digest, data: bytes, pack: str, hints: Hints) -> None:
        """Remember what a commit was written with, for the next one."""
        self._remember(digest, (PageCommit(data, pack_name(pack), hints.others), hints.depth, hints.commits))

    def _remember(self, digest: Digest, found: _Stored) -> _Stored:
        with self._lock:
            self._known[digest] = found
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return found

    def copies(self, nodes: Sequence[Node], packs: Sequence[WrittenPack]) -> tuple[list[Node], bytes]:
        """Nodes that were copied from elsewhere in the order of their pack, commits last, and its encoded hints.

        The page goes on behind the commits in `nodes`: a reader has those by the pack itself.

        Args:
            packs: Data packs that were written with them.
        """
        others = [node for node in nodes if node.kind != ObjectKind.COMMIT]
        commits = {node.digest: node for node in nodes if node.kind == ObjectKind.COMMIT}
        if self._handle.store.abilities.local:
            return list(nodes), b""
        before: Digest | None = None
        if commits:
            named = {parent for node in commits.values() for parent in decode_commit(node.data).parents}
            before = next((digest for digest in commits if digest not in named), None)
            while before in commits:
                parents = decode_commit(commits[before].data).parents
                before = parents[0] if parents else None
        hints = self.hints([] if before is None else [before], packs, seen=(None, None))
        return [*others, *commits.values()], encode_hints(hints)

    def pack_of(self, digest: Digest) -> bytes | None:
        """The name of a meta pack that holds this commit, for the ref that is to name it; None: no need, or not known.

        A branch that goes on from an old commit has the same hint as the one that made it.
        """
        if self._handle.store.abilities.local:
            return None
        try:
            places = self._handle.index.read(contents.locate, [digest]).get(digest)
        except CkptError:
            return None
        return pack_name(places[0].pack) if places else None

    def _packs_of(self, shared: Sequence[Digest]) -> tuple[bytes, ...]:
        """Names of packs that hold the first of these nodes; not of too many, which would cost more than they spare."""
        digests = shared[:MOST_SHARED]
        located = self._handle.index.read(contents.locate, digests) if digests else {}
        names = dict.fromkeys(pack_name(located[digest][0].pack) for digest in digests if located.get(digest))
        return tuple(names)[:MOST_EARLIER]

    # --- pages ---------------------------------------------------------------------------

    def _page_after(
        self, parent: Digest, seen: tuple[Digest | None, bytes | None]
    ) -> tuple[int, tuple[PageCommit, ...]]:
        """Depth and page of a commit on top of `parent`."""
        first, depth, behind = self._stored(parent, seen[1] if seen[0] == parent else None)
        page = [first, *behind] if depth % NEAR else [first]
        if (depth + 1) % NEAR == 0 and (depth + 1 - NEAR) % FAR and len(page) == NEAR:
            page += self._stored(_id(page[-1]), page[-1].pack)[2]
        return depth + 1, _bounded(page)

    def _stored(self, digest: Digest, name: bytes | None) -> _Stored:
        """A commit that is stored, its depth, and its page, which is as long as its commits prove one another.

        Without a page, history begins anew there: what is before it is found by looking at all packs.

        Args:
            name: Of the meta pack that is said to hold it; None: the index knows.
        """
        with self._lock:
            known = self._known.get(digest)
        if known is not None:
            return known
        name = name or self.pack_of(digest)
        if name is None:
            raise NotFoundError(f"{digest.hex()} is in no pack that the index knows")
        try:
            loaded = load_pack(self._handle.cached_store, name)
            data, hints = loaded.nodes.get(digest), loaded.hints
        except CkptError as error:
            _LOGGER.info("a page of history ends at %s: %s", digest.hex(), error)
            data = hints = None
        if data is None:
            data = self._handle.read_node(ObjectKind.COMMIT, digest)
        parents = decode_commit(data).parents
        found = PageCommit(data, name, self._others(parents[1:])), *_proven(hints or Hints(), parents)
        return self._remember(digest, found)

    def _others(self, parents: Sequence[Digest]) -> tuple[tuple[Digest, bytes], ...]:
        """Further parents of a merge, with the packs that hold them, as far as the index knows."""
        if not parents:
            return ()
        located = self._handle.index.read(contents.locate, parents)
        return tuple((parent, pack_name(located[parent][0].pack)) for parent in parents if located.get(parent))


def _proven(hints: Hints, parents: Sequence[Digest]) -> tuple[int, tuple[PageCommit, ...]]:
    """Depth and page that hints give for a commit of these parents; 0 and nothing, if that is not its history."""
    for each in hints.commits:
        if not parents or _id(each) != parents[0]:
            return 0, ()
        parents = decode_commit(each.data).parents
    return (hints.depth, hints.commits) if hints.commits else (0, ())


def _id(commit: PageCommit) -> Digest:
    return object_id(ObjectKind.COMMIT.label, commit.data)


def _bounded(page: Sequence[PageCommit]) -> tuple[PageCommit, ...]:
    """The youngest of `page`, as many as may be together."""
    total = 0
    for at, each in enumerate(page):
        total += len(each.data)
        if total > MOST_PAGE_BYTES:
            return tuple(page[:at])
    return tuple(page)


def _directories(packs: Sequence[WrittenPack]) -> tuple[tuple[bytes, bytes], ...]:
    """(trailer, directory) of each data pack; none if they are too long together."""
    found, total = [], 0
    for each in packs:
        if each.kind != PackKind.DATA:
            continue
        directory = encode_directory(each.entries)
        total += len(directory)
        if total > MOST_DIRECTORY_BYTES:
            return ()
        offset = each.size_bytes - len(directory) - TRAILER_BYTES
        found.append((encode_trailer(pack_name(each.key), each.kind, directory, directory_offset=offset), directory))
    return tuple(found)


# --- the reader's half ----------------------------------------------------------------------------


MOST_LOADED = 64
"""Packs that are read for hints, before a look at all packs is no dearer."""

MOST_LOOKED_AT = 4
"""Refs that were looked at last, in whose packs a node is looked for."""

AT_ONCE = 16
"""Packs of earlier commits that are looked through for a node, at most."""

MOST_NODE_BYTES = 64 * 1024 * 1024
MOST_PLACES = 200_000


class Preview:
    """Data from hints, for one handle of a store that is not local. Thread-safe."""

    def __init__(self, handle: RepositoryHandle) -> None:
        self._handle = handle
        self._lock = RLock()
        self._loaded: dict[bytes, LoadedPack | None] = {}
        self._nodes: dict[Digest, bytes] = {}
        self._node_bytes = 0
        self._places: dict[Digest, list[Location]] = {}
        self._brought: set[str] = set()
        # Where a commit is said to be, and, of one that is not known yet, where the page is that has it.
        self._packs: dict[Digest, bytes] = {}
        self._pages: dict[Digest, bytes] = {}

    # --- questions -----------------------------------------------------------------------------

    def nodes(self, digests: Iterable[Digest]) -> dict[Digest, bytes]:
        """Those of these nodes that were read already."""
        with self._lock:
            return {digest: self._nodes[digest] for digest in digests if digest in self._nodes}

    def locate(self, digests: Sequence[Digest]) -> Mapping[bytes, Sequence[Location]]:
        """Where those of these objects are said to be that hints tell of."""
        with self._lock:
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
            while level:
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
