"""An index in plain dicts: what the SQL index answers, by looking at everything each time.

Schedules are about the order of store requests; with this index a hundred times as many of them
can be played. tests/schedule/test_plain_index.py shows that it answers as the real one does, and
part of all schedules are played with the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cas_ckpt import clock
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import add_all_packs
from cas_ckpt.index import contents, garbage, history, remembered, usage
from cas_ckpt.index.garbage import Garbage, PackLiveness
from cas_ckpt.index.history import CommitLinks
from cas_ckpt.index.index import Index
from cas_ckpt.index.rows import CommitRow, PackRecord, RefRow
from cas_ckpt.objects.digest import ObjectKind
from cas_ckpt.objects.pack import ExtentInfo, Location, PackKind
from cas_ckpt.ops.fsck.repair import refill_index


@dataclass(frozen=True)
class _Seen:
    record: PackRecord
    first_seen_us: int
    number: int


class PlainIndex:
    """The part of `Index` that writers, readers and collections ask for."""

    in_memory, read_only, matches, place = True, False, True, "plain"
    newer_pack, is_shared, is_behind = None, False, False

    def __init__(self, store_id: str, packs: dict[str, _Seen] | None = None) -> None:
        self.store_id = store_id
        self.generation = 0
        self._packs = packs or {}
        self._refs: dict[str, RefRow] = {}
        self._located: dict[bytes, list[Location]] | None = None

    def copy(self) -> PlainIndex:
        made = PlainIndex(self.store_id, dict(self._packs))
        made._refs = dict(self._refs)
        return made

    def close(self) -> None:
        pass

    def set_generation(self, generation: int) -> None:
        self.generation = generation

    def take(self, made: PlainIndex) -> None:
        """Be what `made` is, in one step, as a rebuild does; refs as last seen stay."""
        self._packs, self._located = made._packs, None

    def read(self, question: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The answer to a question that the real index answers from its rows."""
        return _ANSWERS[question](self, *args, **kwargs)

    write = read

    def stats(self) -> None:
        return None

    # --- packs -----------------------------------------------------------------------------

    def packs(self) -> dict[str, int]:
        return {name: seen.record.size_bytes for name, seen in self._packs.items()}

    def refs(self) -> dict[str, RefRow]:
        return dict(self._refs)

    def known_refs(self, names: Iterable[str]) -> set[str]:
        return self.refs().keys() & set(names)

    def set_refs(self, refs: Iterable[RefRow]) -> None:
        self._refs.update((ref.name, ref) for ref in refs)

    def add_packs(self, records: Sequence[PackRecord], *, ref: RefRow | None = None) -> int:
        if ref is not None:
            self.set_refs([ref])
        now_us = int(clock.now_s() * 1e6)
        fresh = [record for record in records if record.name not in self._packs]
        first = max((seen.number for seen in self._packs.values()), default=0) + 1
        new = {record.name: _Seen(record, now_us, number) for number, record in enumerate(fresh, first)}
        self._packs.update(new)
        self._located = None
        return len(new)

    def drop_packs(self, names: Iterable[str]) -> int:
        self._located = None
        return sum(self._packs.pop(name, None) is not None for name in list(names))

    def packs_in_parts(self) -> set[str]:
        return {name for name, seen in self._packs.items() if any(map(_is_part, seen.record.entries))}

    # --- objects ---------------------------------------------------------------------------

    def _all(self) -> dict[bytes, list[Location]]:
        if self._located is None:
            self._located = {}
            for name, seen in self._packs.items():
                for entry in sorted(seen.record.entries, key=lambda entry: entry.first_leaf):
                    self._located.setdefault(entry.digest, []).append(_location(name, entry))
        return self._located

    def locate(self, digests: Iterable[bytes]) -> dict[bytes, list[Location]]:
        located = self._all()
        return {digest: list(located[digest]) for digest in digests if digest in located}

    def num_chunks(self) -> int:
        return sum(places[0].kind == ObjectKind.CHUNK for places in self._all().values())

    def chunks_and_packs(self) -> tuple[set[bytes], dict[str, int]]:
        return self.all_chunk_digests(), {name: seen.number for name, seen in self._packs.items()}

    def data_packs_since(self, number: int) -> dict[str, int]:
        found = ((name, seen) for name, seen in self._packs.items() if seen.record.kind is PackKind.DATA)
        return {name: seen.number for name, seen in found if seen.number > number}

    def all_chunk_digests(self) -> set[bytes]:
        entries = [entry for seen in self._packs.values() for entry in seen.record.entries]
        chunks = {entry.digest for entry in entries if entry.kind == ObjectKind.CHUNK}
        return chunks - {entry.digest for entry in entries if _is_part(entry)}

    def resolve_prefix(
        self, prefix: str, kinds: Collection[ObjectKind] = (ObjectKind.COMMIT,), *, limit: int = 16
    ) -> list[bytes]:
        found = (digest for digest, places in self._all().items() if places[0].kind in kinds)
        return sorted(digest for digest in found if digest.hex().startswith(prefix))[:limit]

    # --- commits ---------------------------------------------------------------------------

    def commits(self) -> Iterator[CommitRow]:
        return (commit for seen in self._packs.values() for commit in seen.record.commits)

    def commit(self, digest: bytes) -> CommitRow | None:
        return next((commit for commit in self.commits() if commit.digest == digest), None)

    def commits_of_root(self, root: bytes) -> list[bytes]:
        return sorted({commit.digest for commit in self.commits() if commit.root == root})

    def commit_links(self) -> dict[bytes, CommitLinks]:
        return {commit.digest: CommitLinks(commit.root, commit.layout, commit.parents) for commit in self.commits()}

    def links_and_packs(self) -> tuple[dict[bytes, CommitLinks], set[str]]:
        return self.commit_links(), set(self.packs())

    def line(self, start: bytes, *, most: int, until: bytes | None = None) -> list[bytes]:
        links = self.commit_links()
        found = [start] if start in links else []
        while found and len(found) < most and found[-1] in links and links[found[-1]].parents and found[-1] != until:
            found.append(links[found[-1]].parents[0])
        return found

    @contextmanager
    def living(
        self, *, commits: Iterable[bytes], roots: Iterable[bytes], published: Iterable[bytes] = ()
    ) -> Iterator[PlainLiving]:
        yield PlainLiving(dict(self._packs), set(commits), set(roots), set(published))


_ANSWERS: dict[Callable[..., Any], Callable[..., Any]] = {
    usage.read_stats: PlainIndex.stats,
    remembered.read_refs: PlainIndex.refs,
    remembered.known_refs: PlainIndex.known_refs,
    remembered.write_refs: PlainIndex.set_refs,
    contents.packs_in_parts: PlainIndex.packs_in_parts,
    contents.locate: PlainIndex.locate,
    contents.chunks_at_most: PlainIndex.num_chunks,
    contents.chunks_and_packs: PlainIndex.chunks_and_packs,
    contents.data_packs_since: PlainIndex.data_packs_since,
    contents.chunk_digests: PlainIndex.all_chunk_digests,
    contents.resolve_prefix: PlainIndex.resolve_prefix,
    history.read_commit: PlainIndex.commit,
    history.commits_of_root: PlainIndex.commits_of_root,
    history.read_links: PlainIndex.commit_links,
    history.read_links_and_packs: PlainIndex.links_and_packs,
    history.read_line: PlainIndex.line,
}

_living_of_rows = garbage.living


def _living(index: Index | PlainIndex, **asked: Any) -> AbstractContextManager[Any]:
    return index.living(**asked) if isinstance(index, PlainIndex) else _living_of_rows(index, **asked)


garbage.living = _living  # callers ask the module, so that both kinds of index may be played in one process


class PlainLiving:
    """`Living` of the real index, found by marking everything."""

    def __init__(self, packs: dict[str, _Seen], commits: set[bytes], roots: set[bytes], published: set[bytes]) -> None:
        self._packs = packs
        self._edges = {parent: children for seen in packs.values() for parent, children in seen.record.edges}
        self._rows = {row.digest: row for seen in packs.values() for row in seen.record.commits}
        self._live = commits | self._below(roots)
        self._published = published | commits

    def _below(self, starts: Iterable[bytes]) -> set[bytes]:
        found = set(starts)
        todo = list(found)
        while todo:
            for child in self._edges.get(todo.pop(), ()):
                if child not in found:
                    found.add(child)
                    todo.append(child)
        return found

    def _whole(self, packs: Iterable[str]) -> set[bytes]:
        leaves: dict[bytes, set[int]] = {}
        found: set[bytes] = set()
        for name in packs:
            for entry in self._packs[name].record.entries:
                have = leaves.setdefault(entry.digest, set())
                have.update(range(entry.first_leaf, entry.first_leaf + entry.num_leaves))
                if len(have) == entry.chunk_leaves:
                    found.add(entry.digest)
        return found

    @cached_property
    def _fresh(self) -> set[bytes]:
        """What some commit may be about to need."""
        named = {child for children in self._edges.values() for child in children}
        for row in self._rows.values():
            named |= {row.root} if row.layout is None else {row.root, row.layout}
        strangers = self._objects() - named - self._rows.keys()
        waiting = [row for row in self._rows.values() if row.digest not in self._published]
        starts = {node for row in waiting for node in (row.root, row.layout) if node is not None}
        return {row.digest for row in waiting} | self._below(strangers | starts)

    def _objects(self) -> set[bytes]:
        return {entry.digest for seen in self._packs.values() for entry in seen.record.entries}

    def missing(self, limit: int = 100) -> list[bytes]:
        return sorted(self._live - self._whole(self._packs))[:limit]

    def pack_names(self) -> set[str]:
        return set(self._packs)

    def packs(self) -> list[PackLiveness]:
        found = []
        for name, seen in self._packs.items():
            record = seen.record
            dead = [entry for entry in record.entries if entry.digest not in self._live]
            elsewhere = self._whole(other for other in self._packs if other != name)
            spare = [entry for entry in record.entries if entry.digest in self._live and entry.digest in elsewhere]
            if dead or spare:
                found.append(
                    PackLiveness(
                        name, record.kind, record.size_bytes, len(record.entries), seen.first_seen_us, len(dead),
                        _stored(dead), _stored(spare), any(entry.digest in self._fresh for entry in dead),
                    )
                )  # fmt: skip
        return found

    def live_entries(self, packs: Iterable[str]) -> dict[str, list[ExtentInfo]]:
        return {pack: self._live_entries(pack) for pack in packs}

    def _live_entries(self, pack: str) -> list[ExtentInfo]:
        if pack not in self._packs:
            return []
        entries = [entry for entry in self._packs[pack].record.entries if entry.digest in self._live]
        return sorted(entries, key=lambda entry: entry.offset)

    def needed(self, condemned: Collection[str]) -> set[str]:
        outside = self._whole(name for name in self._packs if name not in condemned)
        wanted = self._live - outside
        return {
            name
            for name in condemned
            if name in self._packs and any(entry.digest in wanted for entry in self._packs[name].record.entries)
        }

    def summary(self) -> Garbage:
        dead = [e for seen in self._packs.values() for e in seen.record.entries if e.digest not in self._live]
        return Garbage(len({entry.digest for entry in dead}), _stored(dead))


def _is_part(entry: ExtentInfo) -> bool:
    return entry.num_leaves < entry.chunk_leaves


def _stored(entries: Iterable[ExtentInfo]) -> int:
    return sum(entry.header_bytes + entry.stored_bytes for entry in entries)


def _location(pack: str, entry: ExtentInfo) -> Location:
    return Location(
        pack, entry.kind, entry.num_bytes, entry.first_leaf, entry.num_leaves, entry.leaf_bytes, entry.offset,
        entry.header_bytes, entry.stored_bytes, entry.encoding, entry.base,
    )  # fmt: skip


def rebuilt(handle: RepositoryHandle) -> None:
    """The index of `handle` anew, in place, whichever kind it is."""
    if not isinstance(handle.index, PlainIndex):
        refill_index(handle)
        return
    made = PlainIndex(handle.config.store_id)
    add_all_packs(handle.store, made)  # type: ignore[arg-type]
    handle.index.take(made)
    handle.forget_chunks()
