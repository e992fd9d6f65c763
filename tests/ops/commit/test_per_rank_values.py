"""Values that each rank keeps for itself are stored once where they are equal, and keep their ties."""

from __future__ import annotations

import pytest

from cas_ckpt.core.packs import read_pack
from cas_ckpt.core.records import commit_of as commit_row_of
from cas_ckpt.core.revisions import resolve
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.layouts import decode_layout
from cas_ckpt.objects.state import Container
from tests.builders import numbers, same_bytes, tensor
from tests.committing import new_store, on, one, stored, together
from tests.divided import state_of


def test_equal_values_of_all_ranks_are_in_the_pack_once() -> None:
    store = new_store()

    def state(rank: int) -> Container:
        own = Container("dict", {"x": tensor(numbers(900)), "inner": state_of({"n": 1}, {}, rank)})
        return one(Container("ranks", {rank: own}, {"world_size": 3}))

    infos = together(store, 3, state)
    handle = on(store)
    handle.sync()
    meta = [key for key, _ in store.list("packs/") if key.endswith(".meta")]
    for key in meta:
        digests = [entry.digest for entry in read_pack(store, key).entries]
        assert len(digests) == len(set(digests))
    assert same_bytes(stored(store, infos[0].root)["w/2/x"], numbers(900))


@pytest.mark.parametrize("size", [1, 2])
def test_ties_within_what_each_rank_keeps_are_remembered(size: int) -> None:
    def state(rank: int) -> Container:
        children = {name: tensor(numbers(900), identity=("memory", 1)) for name in "ab"}
        return one(Container("ranks", {rank: Container("dict", {**children})}, {"world_size": size}))

    store = new_store()
    together(store, size, state)
    handle = on(store)
    handle.sync()
    layout = commit_row_of(handle, resolve(handle, "main")).layout
    assert layout is not None
    aliases = decode_layout(handle.read_node(ObjectKind.LAYOUT, Digest(layout))).aliases
    assert aliases == tuple((f"w/{rank}/a", f"w/{rank}/b") for rank in range(size))
