"""Which memory of a state only optimizers change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from cas_ckpt import StateDict
from cas_ckpt.training.background.changes import TrainedMemory
from cas_ckpt.training.stateful import with_names


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.tied = torch.nn.Linear(8, 8)
        self.tied.weight = self.first.weight


def stepped(model: torch.nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(model.parameters(), **options)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def is_trained(memory: TrainedMemory, tensor: torch.Tensor) -> bool:
    return bool(memory.counting(tensor.detach()))


def test_parameters_and_the_state_of_optimizers_are_and_buffers_are_not() -> None:
    model = Net()
    optimizer = stepped(model)
    state = {"nested": [{"model": model}], "optim": StateDict(it=optimizer)}
    for memory in (TrainedMemory(state), TrainedMemory(with_names(state))):
        assert all(is_trained(memory, param) for param in model.parameters())
        assert not any(is_trained(memory, buffer) for buffer in model.buffers())
        assert all(is_trained(memory, each) for values in optimizer.state.values() for each in values.values())
        assert not is_trained(memory, torch.zeros(8, 8))


def test_the_counter_that_is_named_is_the_one_that_moves() -> None:
    model = Net()
    memory = TrainedMemory({"model": model})
    (counting,) = {id(each): each for each in memory.counting(model.first.weight.detach())}.values()
    before = counting._version
    with torch.no_grad():
        model.first.weight.zero_()
    assert counting._version == before + 1


def test_only_the_whole_of_a_parameter_is() -> None:
    model = Net()
    memory = TrainedMemory({"model": model})
    weight = model.first.weight.detach()
    for part in (weight[:4], weight[0], weight.t(), weight.view(64), weight.view(torch.int32), weight[:0]):
        assert not memory.counting(part)


def test_a_parameter_whose_memory_is_also_that_of_a_buffer_is_not() -> None:
    model = Net()
    model.register_buffer("alias", model.first.weight.data[0])
    memory = TrainedMemory({"model": model})
    assert not is_trained(memory, model.first.weight) and is_trained(memory, model.first.bias)


def test_a_table_that_the_forward_rescales_is_not() -> None:
    model = torch.nn.ModuleList([torch.nn.Embedding(9, 4, max_norm=1.0), torch.nn.EmbeddingBag(9, 4)])
    memory = TrainedMemory({"model": model})
    assert [is_trained(memory, param) for param in model.parameters()] == [False, True]


def test_a_parameter_without_a_version_counter_is_not() -> None:
    with torch.inference_mode():
        model = torch.nn.Linear(4, 4)
    memory = TrainedMemory({"model": model})
    assert not any(is_trained(memory, param) for param in model.parameters())


def test_what_lists_of_an_optimizer_hold_is() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 4)) ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    (kept,) = optimizer.state.values()
    memory = TrainedMemory({"optim": optimizer})
    assert kept["old_dirs"] and all(is_trained(memory, each) for each in kept["old_dirs"])


def test_a_rate_of_learning_that_is_a_tensor_is_not() -> None:
    """Schedulers change it, when they like."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=torch.tensor(0.1))
    assert not is_trained(TrainedMemory({"optim": optimizer}), optimizer.param_groups[0]["lr"])


def test_what_a_caller_took_from_an_object_cannot_be_told_from_loose_tensors() -> None:
    model = Net()
    assert not is_trained(TrainedMemory({"model": model.state_dict()}), model.first.weight)


def test_odd_parameters_are_left_out() -> None:
    model = torch.nn.Module()
    model.sparse = torch.nn.Parameter(torch.eye(3).to_sparse())
    model.empty = torch.nn.Parameter(torch.empty(0, 3))
    model.meta = torch.nn.Parameter(torch.empty(3, device="meta"))
    memory = TrainedMemory({"model": model})
    assert not memory.counting(torch.empty(0, 3)) and not memory.counting(torch.ones(3))


@pytest.fixture(scope="module")
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_of_a_divided_parameter_its_local_part_is_and_both_counters_count() -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Linear(8, 4, bias=False)
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    captured: Any = model.state_dict()["weight"]
    assert isinstance(captured, DTensor)
    counting = TrainedMemory({"model": model}).counting(captured._local_tensor)
    for change in (lambda: model.weight.add_(1), lambda: model.weight.to_local().add_(1)):  # type: ignore[operator]
        before = [each._version for each in counting]
        with torch.no_grad():
            change()
        assert [each._version for each in counting] != before
