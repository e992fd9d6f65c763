"""What the index says about garbage, found by reading everything: the model that the tests compare with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from cas_ckpt.index.rows import CommitRow, PackRecord, Usage
from cas_ckpt.objects.digest import ObjectKind
from cas_ckpt.objects.pack import ExtentInfo


def covered(entries: Iterable[ExtentInfo]) -> bool:
    """Whether these extents of one object hold every leaf of it."""
    held: set[int] = set()
    total = None
    for entry in entries:
        total = entry.chunk_leaves
        held.update(range(entry.first_leaf, entry.first_leaf + entry.num_leaves))
    return total is not None and len(held) >= total


@dataclass
class Model:
    """Packs in the order in which they came, and what a drop once left without a parent."""

    packs: dict[str, PackRecord] = field(default_factory=dict)
    orphaned: set[bytes] = field(default_factory=set)

    def add(self, record: PackRecord) -> None:
        self.packs.setdefault(record.name, record)

    def drop(self, names: Collection[str]) -> None:
        before = self.referred()
        for name in names:
            self.packs.pop(name, None)
        self.orphaned = (self.orphaned | (before - self.referred())) & self.extents().keys()

    # --- what the packs say ---------------------------------------------------------------

    def extents(self) -> dict[bytes, list[tuple[str, ExtentInfo]]]:
        found: dict[bytes, list[tuple[str, ExtentInfo]]] = {}
        for name, record in self.packs.items():
            for entry in record.entries:
                found.setdefault(entry.digest, []).append((name, entry))
        return found

    def commits(self) -> dict[bytes, CommitRow]:
        return {row.digest: row for record in self.packs.values() for row in record.commits}

    def targets(self) -> dict[bytes, set[bytes]]:
        """Object -> what it refers to: children, and bases of its deltas."""
        found: dict[bytes, set[bytes]] = {}
        for record in self.packs.values():
            for parent, children in record.edges:
                found.setdefault(parent, set()).update(children)
            for entry in record.entries:
                if entry.base is not None:
                    found.setdefault(entry.digest, set()).add(entry.base)
        return found

    def referred(self) -> set[bytes]:
        roots = {digest for row in self.commits().values() for digest in (row.root, row.layout) if digest}
        return roots.union(*self.targets().values()) if self.targets() else roots

    def reached(self, starts: Iterable[bytes]) -> set[bytes]:
        targets, found, todo = self.targets(), set(), list(starts)
        while todo:
            digest = todo.pop()
            if digest not in found:
                found.add(digest)
                todo += targets.get(digest, ())
        return found

    # --- answers --------------------------------------------------------------------------

    def dead(self, guarded: Iterable[bytes]) -> set[bytes]:
        return self.extents().keys() - self.reached(guarded)

    def missing(self, guarded: Collection[bytes]) -> set[bytes]:
        extents = self.extents()
        return {each for each in self.reached(guarded) if not covered(e for _, e in extents.get(each, ()))}

    def fresh(self, guarded: Collection[bytes], published: Collection[bytes]) -> set[bytes]:
        dead, starts = self.dead(guarded), set()
        for row in self.commits().values():
            if row.digest in dead and row.digest not in published:
                starts |= {row.digest, row.root, row.layout or b""}
        starts |= self.extents().keys() - self.referred() - self.commits().keys() - self.orphaned
        targets, found, todo = self.targets(), set(), list(starts & dead)
        while todo:
            digest = todo.pop()
            if digest not in found:
                found.add(digest)
                todo += [each for each in self.children().get(digest, ()) if each in dead]
        del targets
        return found

    def children(self) -> dict[bytes, set[bytes]]:
        return {parent: set(children) for record in self.packs.values() for parent, children in record.edges}

    def pack_rows(
        self, guarded: Collection[bytes], published: Collection[bytes]
    ) -> dict[str, tuple[int, int, int, bool]]:
        """Pack -> (dead entries, dead bytes, duplicate bytes, unpublished)."""
        dead, fresh, extents = self.dead(guarded), self.fresh(guarded, published), self.extents()
        found = {}
        for name, record in self.packs.items():
            gone = [entry for entry in record.entries if entry.digest in dead]
            spare = [
                entry for entry in record.entries
                if entry.digest not in dead and covered(e for pack, e in extents[entry.digest] if pack != name)
            ]  # fmt: skip
            if gone or spare:
                unpublished = any(entry.digest in fresh for entry in record.entries)
                found[name] = (len(gone), _stored(gone), _stored(spare), unpublished)
        return found

    def live_entries(self, guarded: Collection[bytes], name: str) -> list[ExtentInfo]:
        dead = self.dead(guarded)
        entries = [entry for entry in self.packs[name].entries if entry.digest not in dead]
        return sorted(entries, key=lambda entry: entry.offset)

    def needed(self, guarded: Collection[bytes], condemned: Collection[str]) -> set[str]:
        dead, found = self.dead(guarded), set()
        for digest, places in self.extents().items():
            if digest not in dead and not covered(entry for pack, entry in places if pack not in condemned):
                found |= {pack for pack, _ in places if pack in condemned}
        return found

    def freed(self, now: Collection[bytes], then: Collection[bytes]) -> Usage:
        gone, extents = self.reached(now) - self.reached(then), self.extents()
        entries = {digest: [entry for _, entry in extents[digest]] for digest in gone if digest in extents}
        chunks = [own[0].num_bytes for own in entries.values() if own[0].kind == ObjectKind.CHUNK]
        nodes = [own[0].num_bytes for own in entries.values() if own[0].kind != ObjectKind.CHUNK]
        stored = sum(_stored(own) for own in entries.values())
        return Usage(len(chunks), sum(chunks), len(nodes), sum(nodes), stored)

    def below(self, digest: bytes) -> set[bytes]:
        """All that an object leads to by edges, itself included."""
        children, found, todo = self.children(), set(), [digest]
        while todo:
            each = todo.pop()
            if each not in found:
                found.add(each)
                todo += children.get(each, ())
        return found

    def holding(self, digest: bytes) -> set[bytes]:
        return {
            row.digest for row in self.commits().values()
            if digest in (row.digest, row.layout) or digest in self.below(row.root)
        }  # fmt: skip

    def shared(self, digests: Collection[bytes]) -> set[tuple[bytes, int, int]]:
        extents, found = self.extents(), set()
        for row in self.commits().values():
            own = [extents[each][0][1].num_bytes for each in self.below(row.root) & set(digests) if each in extents]
            if own:
                found.add((row.digest, len(own), sum(own)))
        return found


def _stored(entries: Sequence[ExtentInfo]) -> int:
    return sum(entry.stored_bytes + entry.header_bytes for entry in entries)
