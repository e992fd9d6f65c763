"""Copies of derived tensors, as copies of the stored tensors that have their elements.

    1. Each piece of a target that this rank holds is cut by the parts of the derived tensor.
    2. What a part and a piece have in common is a box of the stored tensor, and a view of the target, whose dimensions
       are in the order of the stored ones.
    3. Where the box is not copied as it is (every second row, another dtype), it is copied into memory of its own, one
       cell at a time, and from there into the view.

Invariant: each element of a target is written by one copy. Knows no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cas_ckpt.layout.key_map import within
from cas_ckpt.objects.digest import leaf_digest
from cas_ckpt.objects.spec import Box, BoxPlacement, as_raw, raw_dtype
from cas_ckpt.objects.state import ArrayTarget, Cast, DerivedTensor, Path, Stretch, TensorCopy, TensorPart


def without_derived(copies: Iterable[TensorCopy]) -> list[TensorCopy]:
    """`copies` with those of derived tensors replaced: what is wanted of a stored tensor is the `box` of a copy."""
    found: list[TensorCopy] = []
    for copy in copies:
        if isinstance(copy.stored, DerivedTensor):
            found += _of_parts(copy, copy.stored)
        else:
            found.append(copy)
    return found


def _of_parts(copy: TensorCopy, derived: DerivedTensor) -> Iterator[TensorCopy]:
    target: Any = copy.target
    box = copy.box or derived.spec.box
    held = [(box, target)] if copy.placement is None else list(target.by_pieces())
    for part in derived.parts:
        for box, piece in held:
            if (found := _common(part, box)) is not None:
                yield _copied(TensorCopy(copy.path, part.stored, piece), found, derived)


def _common(part: TensorPart, box: Box) -> list[Stretch] | None:
    """What is in `box` of the part, counted from the corner of the box."""
    found = []
    for stretch, offset, size in zip(part.stretches, box.offsets, box.sizes, strict=True):
        common = within(stretch, offset, 1, size)
        if common is None:
            return None
        found.append(common)
    return found


def _copied(copy: TensorCopy, stretches: Sequence[Stretch], derived: DerivedTensor) -> TensorCopy:
    target: Any = copy.target
    index = [slice(each.at, each.at + (each.size - 1) * each.stride + 1, each.stride) for each in stretches]
    order = sorted(range(len(stretches)), key=lambda at: stretches[at].dim)
    view = target.rearranged((*index, ...), order)
    ordered = [stretches[at] for at in order]
    box = Box(
        tuple(each.start for each in ordered), tuple((each.size - 1) * each.step + 1 for each in ordered)
    )  # fmt: skip
    dtypes = (copy.stored.spec.dtype, derived.spec.dtype)
    steps = tuple(each.step for each in ordered)
    if any(step > 1 for step in steps) or dtypes[0] != dtypes[1]:
        view = _Converted(view, steps, copy.stored.spec.item_bytes, derived.cast, dtypes)
    return replace(copy, target=view, box=box)


@dataclass(frozen=True, slots=True)
class _Converted:
    """A target for a box of a stored tensor, of which every `steps`-th element is wanted, or all as another dtype."""

    view: ArrayTarget
    steps: tuple[int, ...]
    item_bytes: int
    cast: Cast | None
    dtypes: tuple[str, str]

    def open(self, box: Box) -> np.ndarray[Any, Any]:
        """The array is the caller's own until `done`."""
        return np.empty(box.sizes, raw_dtype(self.item_bytes))

    def done(self, box: Box, array: np.ndarray[Any, Any]) -> None:
        """The elements are in place when this returns."""
        first = [-(-offset // step) for offset, step in zip(box.offsets, self.steps, strict=True)]
        starts = [at * step - offset for at, step, offset in zip(first, self.steps, box.offsets, strict=True)]
        index: Any = tuple(slice(start, None, step) for start, step in zip(starts, self.steps, strict=True))
        items = array[(*index, ...)]
        if items.size and self.cast is not None and self.dtypes[0] != self.dtypes[1]:
            items = self.cast(items, *self.dtypes)
        if items.size:
            place = Box(tuple(first), items.shape)
            opened = self.view.open(place)
            as_raw(opened, items.itemsize)[...] = as_raw(items, items.itemsize)
            self.view.done(place, opened)


@dataclass(frozen=True, slots=True)
class _Shifted:
    """A target for one box, which takes the coordinates of the whole tensor."""

    target: ArrayTarget
    box: Box

    def open(self, box: Box) -> np.ndarray[Any, Any]:
        return self.target.open(box.relative_to(self.box))

    def done(self, box: Box, array: np.ndarray[Any, Any]) -> None:
        self.target.done(box.relative_to(self.box), array)


def placed_boxes(copies: Iterable[TensorCopy], rank: int) -> list[TensorCopy]:
    """`copies` with those of a `box` as others are that are divided over ranks: `rank` holds that box.

    They get paths of their own, which are equal on two ranks only for the same stored tensor.
    """
    found = []
    times: Counter[Path] = Counter()
    for copy in copies:
        if copy.box is not None:
            stored = (*copy.path, (copy.stored.node or leaf_digest(copy.stored.inline or b"")).hex())
            path, target = (*stored, times[stored]), _Shifted(copy.target, copy.box)
            times[stored] += 1
            copy = TensorCopy(path, copy.stored, target, BoxPlacement(((copy.box, (rank,)),)))
        found.append(copy)
    return found
