"""What is declared frozen is still checked against the packs that are really there."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cas_ckpt.core.protocol import GC_STATE_KEY, GcState, Generation, encode_gc_state
from cas_ckpt.objects.state import Container, Item, Name
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.frozen import FrozenMemory
from cas_ckpt.ops.commit.request import CommitRequest
from tests.builders import ArrayMemory, new_repository, numbers, same_bytes, stored_arrays, tensor


def test_a_frozen_tensor_whose_packs_were_collected_is_written_again(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    memory = FrozenMemory()
    base = numbers(1 << 20)
    request = CommitRequest(frozen="base", frozen_audit=0)

    def again(head: float) -> str:
        items: dict[Name, Item] = {"base": tensor(base, identity=("here", 1)), "head": tensor(np.full(1000, head))}
        return commit_tree(handle, Container("dict", items), request, memory=memory).root

    again(1.0)
    for key, _ in list(handle.store.list("packs/")):
        if key.endswith(".data"):
            handle.store.delete(key)
    handle.store.put(GC_STATE_KEY, encode_gc_state(GcState(Generation(1))))
    root = again(2.0)
    assert same_bytes(stored_arrays(handle, root)["base"], base)


def test_frozen_memory_that_is_believed_is_not_read_while_its_packs_are_there(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    memory = FrozenMemory()
    base = numbers(1 << 20)
    boxes: list[object] = []

    class Counting(ArrayMemory):
        def read(self, box):  # type: ignore[no-untyped-def]
            boxes.append(box)
            return super().read(box)

    for _ in range(2):
        boxes.clear()
        item = tensor(base, identity=("here", 1))
        item = type(item)(item.spec, Counting(base), item.flavor, item.identity)
        commit_tree(
            handle, Container("dict", {"base": item}),
            CommitRequest(frozen="base", frozen_check="version", frozen_audit=0), memory=memory,
        )  # fmt: skip
    assert boxes == []
