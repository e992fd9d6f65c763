"""What a commit holds that a checkout into the same state will refuse: tensors that share memory without being one.

A state may hold `b`, `b[:4]` and `b[2:6]`: a commit stores each by itself, but to fill one is to overwrite another.

Invariant: only a warning, and only of what shares a storage with something else is anything asked.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from cas_ckpt.objects.state import Container, TensorItem, render_key, walk
from cas_ckpt.training.capture.sharded import ShardElements
from cas_ckpt.training.capture.tensors import SPARSE_LAYOUTS, ArrayView, HostTensor, overlaps_itself
from cas_ckpt.training.restore.draft import SHOWN, overlaps_self
from cas_ckpt.training.restore.memory import Memory, memory_of_array, memory_of_tensor, overlapping

_LOGGER = logging.getLogger("cas_ckpt")


def warn_of_overlaps(tree: Container) -> None:
    """Log a warning, once in a process for the same keys, of tensors in a captured `tree` that overlap in memory."""
    found = list(_storages(tree))
    addresses = [address for address, _, _ in found]
    if len(set(addresses)) == len(found):
        return
    counts = Counter(addresses)
    # One of each that is tied: those are one tensor.
    shared = {item.identity and item.identity[0]: (source, item) for at, source, item in found if counts[at] > 1}
    placed = [(memory, item) for source, item in shared.values() for memory in _memory(source)]
    marked = set()
    for pair in overlapping([memory for memory, _ in placed]):
        (memory, item), (other_memory, other) = (placed[at] for at in pair)
        if item.spec != other.spec or not memory.is_same(other_memory):
            marked |= {id(item), id(other)}
    if marked:
        _warn(tuple(sorted(render_key(path) for path, item in walk(tree) if id(item) in marked)))


def _storages(tree: Container) -> Iterator[tuple[int, Any, TensorItem]]:
    """The address of the storage of each tensor and array, and what is read of it; several of a divided tensor."""
    for item in tree.children.values():
        if type(item) is Container:
            if item.kind not in SPARSE_LAYOUTS and item.kind != "quantized":  # those get new memory
                yield from _storages(item)
        elif type(item) is TensorItem and item.identity is not None:
            source: Any = item.source
            if type(source) is HostTensor:
                yield item.identity[0][1], source, item
            elif isinstance(source, ArrayView):
                owner = source.bits if source.bits.base is None else source.bits.base
                yield id(owner), source, item
            else:
                for part in source.locals if isinstance(source, ShardElements) else (source,):
                    yield part.tensor.untyped_storage().data_ptr(), part, item


def _memory(source: Any) -> tuple[Memory, ...]:
    """Where it is, unless it overlaps itself: then a checkout does not fill it."""
    if isinstance(source, ArrayView):
        bits = source.bits
        return () if overlaps_itself(bits.shape, bits.strides, bits.itemsize) else memory_of_array(bits)
    return () if overlaps_self(source.tensor) else memory_of_tensor(source.tensor)


@lru_cache(maxsize=64)
def _warn(keys: tuple[str, ...]) -> None:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    _LOGGER.warning(
        "%s overlap in memory without being one tensor: each is committed, but a checkout into this state will refuse "
        "them, since one would overwrite the other: clone() one, or leave one out",
        ", ".join(keys[:SHOWN]) + more,
    )
