"""A repository in memory for tests: capture, read every byte, keep it inline, fetch from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cas_ckpt.errors import CkptError
from cas_ckpt.objects.spec import Box, raw_dtype
from cas_ckpt.objects.state import Container, Item, Path, StoredTensor, TensorCopy, TensorItem, ValueItem, render_key
from cas_ckpt.objects.values import decode_value, encode_value
from cas_ckpt.training.capture.capture import capture_state
from cas_ckpt.training.restore.materialize import materialize
from cas_ckpt.training.restore.restore import RestorePlan, plan_restore


def commit(state: Mapping[str, Any]) -> Container:
    """What a repository would hold of `state`."""
    stored = store(capture_state(state))
    assert isinstance(stored, Container)
    return stored


def store(item: Item, path: Path = ()) -> Item:
    """An item with its bytes read and its values encoded and decoded again."""
    if isinstance(item, Container):
        children = {name: store(child, (*path, name)) for name, child in item.children.items()}
        attrs = decode_value(encode_value(item.attrs, key=render_key(path)))
        return Container(item.kind, children, attrs)
    if isinstance(item, TensorItem):
        return StoredTensor(item.spec, item.flavor, None, read_bytes(item))
    assert isinstance(item, ValueItem)
    return ValueItem(decode_value(encode_value(item.value, key=render_key(path))))


def boxes(shape: tuple[int, ...]) -> list[Box]:
    """The whole of a tensor in two boxes, cut along the last dimension."""
    if not shape or shape[-1] < 2:
        return [Box((0,) * len(shape), shape)]
    half = shape[-1] // 2
    start, zeros = (*shape[:-1], half), (0,) * (len(shape) - 1)
    return [Box((*zeros, 0), start), Box((*zeros, half), (*shape[:-1], shape[-1] - half))]


def read_bytes(item: TensorItem) -> bytes:
    """All elements in C order."""
    whole = np.empty(item.spec.shape, raw_dtype(item.spec.item_bytes))
    for box in boxes(item.spec.shape):
        part = item.source.read(box)
        assert part.shape == box.sizes
        whole[box.slices] = part.view(whole.dtype)
    return whole.tobytes()


def fetch(copies: Sequence[TensorCopy]) -> None:
    """Fill all targets, box by box."""
    for copy in copies:
        stored, target = copy.stored, copy.target
        assert stored.inline is not None
        whole = np.frombuffer(stored.inline, raw_dtype(stored.spec.item_bytes)).reshape(stored.spec.shape)
        for box in boxes(stored.spec.shape):
            array = target.open(box)
            np.copyto(array.view(whole.dtype), whole[box.slices])
            target.done(box, array)


def checkout(tree: Container, into: Mapping[str, Any], **options: Any) -> RestorePlan:
    """Restore `tree` into live objects."""
    plan = plan_restore(into, tree, **options)
    fetch(plan.copies)
    plan.finish()
    return plan


def load(tree: Container, **options: Any) -> Any:
    """New objects for `tree`."""
    return materialize(tree, fetch, **options)


def same_state(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two states would be committed as the same bytes under the same keys."""
    return canonical(capture_state(a)) == canonical(capture_state(b))


def canonical(item: Item) -> Any:
    """An item as something to compare: order of keys left out."""
    if isinstance(item, Container):
        inside = {name: canonical(child) for name, child in item.children.items()}
        return (item.kind, encode_value(item.attrs, key="attrs"), inside)
    if isinstance(item, TensorItem):
        return (item.spec, item.flavor, read_bytes(item))
    assert isinstance(item, ValueItem)
    return encode_value(item.value, key="value")


def failure_of(call: Any) -> CkptError:
    """The error that `call()` raises."""
    try:
        call()
    except CkptError as error:
        return error
    raise AssertionError("nothing was raised")
