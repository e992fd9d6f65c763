"""The answer of a diff: entries that differ, fields of the commits that differ, and sums.

Invariant: plain frozen values; `entries` is in the order of keys, each key once. Knows nothing
of how differences are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cas_ckpt.core.records import Brief, CommitInfo
from cas_ckpt.objects.spec import Box, Grid
from cas_ckpt.objects.state import parse_key, render_key


class Change(StrEnum):
    """The kinds of changes of an entry. MOVED: the same content has another key now."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    MOVED = "moved"


@dataclass(frozen=True, slots=True)
class EntrySide:
    """An entry as one of the two commits has it.

    Attributes:
        kind: "tensor", "array", "value", or the kind of a container ("dict", "list", "sparse_coo" ...).
        dtype, shape: Of a tensor or array, else None.
        num_bytes: Plain bytes (of a value: as it is encoded; of a container: 0).
        text: A value, or the attributes of a container, as Python shows them, cut where they are
            long; None if it was not asked for, or is too long to be read for this.
    """

    kind: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    num_bytes: int = 0
    text: str | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor or an array."""
        return self.dtype is not None


@dataclass(frozen=True, slots=True)
class ChunkChange:
    """Which chunks of a tensor are not what they were.

    Where the cells are the same on both sides, a chunk changed if its cell has another id now;
    where they are not (the shape changed), if the tensor did not have this chunk anywhere.
    A tensor whose bytes are in its tree node has no chunks; its bytes count all the same.

    Attributes:
        num_changed, num_chunks: Chunks of the tensor as it is now that changed, and all of them.
        num_bytes: Plain bytes of the changed ones.
        runs: The cells of the changed ones as (first, count), ascending.
        grid: The cut that the cells are numbered in; None if there are no chunks.
    """

    num_changed: int
    num_chunks: int
    num_bytes: int
    runs: tuple[tuple[int, int], ...] = ()
    grid: Grid | None = None

    def cells(self) -> Iterator[int]:
        """Numbers of the changed cells, ascending."""
        for first, count in self.runs:
            yield from range(first, first + count)

    def regions(self) -> Iterator[Box]:
        """The changed cells as boxes of the tensor, in elements."""
        if self.grid is not None:
            yield from map(self.grid.box, self.cells())


@dataclass(frozen=True, slots=True)
class TensorNumbers:
    """By how much a tensor changed.

    Elements outside the changed chunks are the same on both sides: their difference is 0, so
    what is said of differences is true of the whole tensor. What needs the elements themselves
    (`relative_norm`, `cosine`, NaN and infinity) is said of the changed chunks only, which are the
    whole tensor where `compared_elements` equals `num_elements`. Pairs of which one is NaN or
    infinite are counted, and left out of everything else.

    Attributes:
        num_elements: Elements of the tensor.
        compared_elements: Those in its changed chunks.
        changed_elements: Those whose bits differ (of another dtype: whose numbers differ).
        max_delta, mean_delta: Of |after - before|; the mean is over the whole tensor.
        delta_norm: The L2 norm of after - before.
        relative_norm: `delta_norm` over the L2 norm of before in the changed chunks.
        cosine: Of the angle between before and after in the changed chunks.
        nan_before, nan_after, inf_before, inf_after: Elements in the changed chunks.
            None of any of these: the dtype holds no numbers, or (the last two) a norm is 0 or
            beyond float64.
    """

    num_elements: int
    compared_elements: int
    changed_elements: int
    max_delta: float | None = None
    mean_delta: float | None = None
    delta_norm: float | None = None
    relative_norm: float | None = None
    cosine: float | None = None
    nan_before: int | None = None
    nan_after: int | None = None
    inf_before: int | None = None
    inf_after: int | None = None

    @property
    def changed_share(self) -> float:
        """Changed elements of all, 0..1."""
        return self.changed_elements / self.num_elements if self.num_elements else 0.0


@dataclass(frozen=True, slots=True, repr=False)
class EntryDiff(Brief):
    """One entry that is not what it was.

    Attributes:
        key: Its key (of a moved one: the new key).
        before, after: The two sides; None where there is none.
        differs: What is different: of "kind", "dtype", "shape", "data", "value", "attrs". Empty
            unless `change` is CHANGED.
        moved_from: The old key of a moved entry.
        chunks: Of tensors that are on both sides and changed.
        numbers: The same, if they were asked for and the shapes are equal.
    """

    key: str
    change: Change
    before: EntrySide | None
    after: EntrySide | None
    differs: tuple[str, ...] = ()
    moved_from: str | None = None
    chunks: ChunkChange | None = None
    numbers: TensorNumbers | None = None


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field of the commits that differs: "step", "message", "author", "meta", "metrics/loss" ...

    Attributes:
        before, after: None: that commit has none.
    """

    name: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class DiffSums:
    """Entries and bytes added up; tensors that are tied count each time they are named.

    Attributes:
        added_bytes, removed_bytes: Plain bytes of the entries added and removed.
        changed_bytes: Plain bytes of what changed in the changed ones: chunks of tensors, whole values.
        changed_chunks, num_chunks: Chunks that changed in changed tensors, and all that those tensors have.
    """

    added: int = 0
    removed: int = 0
    changed: int = 0
    moved: int = 0
    added_bytes: int = 0
    removed_bytes: int = 0
    changed_bytes: int = 0
    changed_chunks: int = 0
    num_chunks: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Diff(Brief):
    """All that differs between two commits.

    Attributes:
        before: The commit that was compared with; None: `after` is the first of its history, and all of it is new.
        after: The commit that was looked at.
        fields: What the commits themselves say otherwise (apart from time and ids).
        entries: The entries that differ, by key.
    """

    before: CommitInfo | None
    after: CommitInfo
    fields: tuple[FieldChange, ...]
    entries: tuple[EntryDiff, ...]

    @property
    def added(self) -> tuple[EntryDiff, ...]:
        """Entries that only `after` has."""
        return self._with(Change.ADDED)

    @property
    def removed(self) -> tuple[EntryDiff, ...]:
        """Entries that only `before` has."""
        return self._with(Change.REMOVED)

    @property
    def changed(self) -> tuple[EntryDiff, ...]:
        """Entries that both have, and that differ."""
        return self._with(Change.CHANGED)

    @property
    def moved(self) -> tuple[EntryDiff, ...]:
        """Tensors of equal content that have another key now."""
        return self._with(Change.MOVED)

    def _with(self, change: Change) -> tuple[EntryDiff, ...]:
        return tuple(entry for entry in self.entries if entry.change is change)

    @property
    def sums(self) -> DiffSums:
        """All of it in numbers."""
        return add_up(self.entries)

    @property
    def by_name(self) -> dict[str, DiffSums]:
        """The same for each top-level name of the states."""
        groups: dict[str, list[EntryDiff]] = {}
        for entry in self.entries:
            groups.setdefault(render_key(parse_key(entry.key)[:1]), []).append(entry)
        return {name: add_up(entries) for name, entries in groups.items()}


def add_up(entries: Iterable[EntryDiff]) -> DiffSums:
    """The sums of some entries."""
    counts = dict.fromkeys(DiffSums.__slots__, 0)
    for entry in entries:
        counts[entry.change.value] += 1
        if entry.change is Change.ADDED and entry.after is not None:
            counts["added_bytes"] += entry.after.num_bytes
        elif entry.change is Change.REMOVED and entry.before is not None:
            counts["removed_bytes"] += entry.before.num_bytes
        elif entry.chunks is not None:
            counts["changed_bytes"] += entry.chunks.num_bytes
            counts["changed_chunks"] += entry.chunks.num_changed
            counts["num_chunks"] += entry.chunks.num_chunks
        elif entry.change is Change.CHANGED and entry.after is not None:
            counts["changed_bytes"] += entry.after.num_bytes
    return DiffSums(**counts)


def changed_fields(before: CommitInfo | None, after: CommitInfo) -> tuple[FieldChange, ...]:
    """The fields of two commits that differ; nothing where there is only one."""
    if before is None:
        return ()
    found = [
        FieldChange(name, getattr(before, name), getattr(after, name)) for name in ("step", "message", "author", "meta")
    ]
    names = dict.fromkeys((*before.metrics, *after.metrics))
    found += [FieldChange(f"metrics/{name}", before.metrics.get(name), after.metrics.get(name)) for name in names]
    # By what is shown of them: metadata may hold arrays, which do not compare to one answer.
    return tuple(field for field in found if repr(field.before) != repr(field.after))
