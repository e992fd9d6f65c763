"""The copies that dcp.async_save works on: whose memory they are, and for how long."""

from __future__ import annotations

import gc
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from cas_ckpt.dcp import writer
from cas_ckpt.dcp.writer import stage_state


@pytest.fixture(autouse=True)
def _own_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setattr(writer, "_arenas", writer._Arenas())


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_a_copy_has_other_memory_and_the_same_structure_views_and_ties() -> None:
    base = torch.arange(3000.0)
    model = torch.nn.Linear(30, 40)
    state = {
        "base": base, "view": base[100:200], "strided": torch.arange(12.0).view(3, 4).t(), "empty": torch.empty(0, 3),
        "nested": [{"a": (torch.ones(5, dtype=torch.bfloat16), 1.5)}], "model": model.state_dict(), "text": "x",
        "scalar": torch.tensor(7), "sparse": torch.eye(3).to_sparse(),
    }  # fmt: skip
    copy = stage_state(state)
    assert copy["base"] is not base and torch.equal(copy["base"], base)
    assert address(copy["view"]) == address(copy["base"]) != address(base)
    assert torch.equal(copy["view"], base[100:200]) and copy["strided"].stride() == state["strided"].stride()  # type: ignore[attr-defined]
    assert torch.equal(copy["strided"], state["strided"]) and copy["empty"].shape == (0, 3)  # type: ignore[arg-type]
    assert copy["nested"][0]["a"][1] == 1.5 and copy["nested"][0]["a"][0].dtype == torch.bfloat16
    assert type(copy["model"]) is OrderedDict and hasattr(copy["model"], "_metadata")
    assert torch.equal(copy["sparse"].to_dense(), torch.eye(3))
    with torch.no_grad():
        base.zero_(), model.weight.zero_()
    assert copy["base"].sum() and copy["view"].sum() and copy["model"]["weight"].abs().sum()


def test_copies_that_overlap_in_time_keep_their_own_values() -> None:
    weights = torch.zeros(100_000)
    copies = []
    for step in range(4):
        weights.fill_(step)
        copies.append(stage_state({"w": weights}))
    weights.fill_(-1)
    assert [copy["w"].unique().tolist() for copy in copies] == [[0], [1], [2], [3]]


def test_memory_is_used_again_once_nobody_looks_at_it_and_not_before() -> None:
    state = {"w": torch.ones(1_000_000), "v": torch.ones(1_000_000)}
    copy: Any = stage_state(state)
    kept, first = copy["v"][:1], address(copy["w"])
    del copy
    second: Any = stage_state({"w": torch.zeros(1_000_000), "v": torch.zeros(1_000_000)})
    assert kept.item() == 1.0 and address(second["w"]) != first
    del kept
    third: Any = stage_state(state)
    assert address(third["w"]) == first and third["w"].sum() == 1_000_000 and not second["w"].any()


def test_a_forked_child_reads_what_was_staged_and_stages_by_itself() -> None:
    copy: Any = stage_state({"w": torch.full((1_000_000,), 2.0)})
    del copy
    copy = stage_state({"w": torch.full((1_000_000,), 3.0)})
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        own: Any = stage_state({"w": torch.full((1_000_000,), 4.0)})
        os._exit(0 if bool((copy["w"] == 3).all() and (own["w"] == 4).all()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_memory_of_which_two_threads_drop_the_last_parts_at_once_is_given_back_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = threading.Barrier(2)

    class Left(list[int]):
        def pop(self, *at: Any) -> int:
            found = super().pop(*at)
            both.wait(10)
            return found

    monkeypatch.setattr(writer._arenas, "_over", over := [])
    left, arena = Left(range(2)), object()
    threads = [threading.Thread(target=writer._arenas._gone, args=(arena, left)) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert over == [arena]


def test_what_is_warm_does_not_grow_from_save_to_save() -> None:
    state = {"w": torch.ones(1_000_000)}
    held = []
    for _ in range(4):
        stage_state(state)
        held.append(writer._arenas._pool.held_bytes)
    assert held == held[:1] * 4


def test_a_tensor_inside_of_an_object_that_is_not_looked_into_is_copied_all_the_same() -> None:
    class Holder:
        def __init__(self) -> None:
            self.tensor = torch.ones(5)

    holder = Holder()
    copy = stage_state({"it": holder})
    holder.tensor.zero_()
    assert copy["it"].tensor.sum() == 5


@pytest.fixture
def _one_rank(tmp_path: Any) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_of_a_divided_tensor_the_local_part_is_copied() -> None:
    mesh = init_device_mesh("cpu", (1,))
    divided = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    copy = stage_state({"d": divided})["d"]
    assert isinstance(copy, DTensor) and copy.placements == divided.placements
    divided._local_tensor.zero_()
    assert torch.equal(copy.to_local(), torch.arange(8.0))
    assert writer._arenas._taken_bytes > 0
