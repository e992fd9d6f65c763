"""Builders of folders of torch.distributed.checkpoint, made by torch itself, with one rank or many."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from cas_ckpt.objects.spec import Box


def training_state() -> dict[str, Any]:
    """A state with something of everything that DCP holds, larger tensors among it."""
    model = torch.nn.Sequential(torch.nn.Linear(900, 700), torch.nn.Linear(700, 5))
    return {
        "model": dict(model.state_dict()),
        "optim": {"state": {"w": {"step": torch.tensor(3.0), "exp_avg": torch.randn(700, 900)}},
                  "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["a", "b"]}]},
        "transposed": torch.randn(500, 600).t(), "empty": torch.empty(0, 3), "scalar": torch.tensor(7),
        "bf16": torch.randn(300, 40).bfloat16(), "fp8": torch.randn(8192).to(torch.float8_e4m3fn),
        "bits": torch.rand(99) > 0.5, "complex": torch.randn(50, 60, dtype=torch.complex64),
        "conj": torch.randn(40, 50, dtype=torch.complex64).conj(), "parameter": torch.nn.Parameter(torch.randn(90, 90)),
        "list": [torch.ones(2), {"a": 1}], "plain": [1, [2, 3]], "none": None, "pair": (torch.ones(2), 3), "text": "ü",
        "no.path": 1, "bytes": b"\0\xff", "empty list": [], "lists": [[torch.zeros(3)], [torch.ones(1), "x"]],
    }  # fmt: skip


@contextmanager
def quietly() -> Iterator[None]:
    """Torch warns that it is alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_folder(path: Path, state: Mapping[str, Any], *, planner: SavePlanner | None = None, **options: Any) -> Path:
    """What `dcp.save` of one process writes."""
    with quietly():
        writer = dcp.FileSystemWriter(path, sync_files=False, **options)
        dcp.save(dict(state), storage_writer=writer, planner=planner, no_dist=True)
    return path


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank of a group that does nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def save_by_ranks(path: Path, shape: tuple[int, ...], make: Callable[[DeviceMesh], Mapping[str, Any]]) -> Path:
    """What `dcp.save` on a mesh of `shape` writes; `make` gives the state of the rank that it is called on."""
    world_size = 1
    for size in shape:
        world_size *= size
    planners, plans = [], []
    with quietly():
        for rank in range(world_size):
            with fake_rank(rank, world_size):
                mesh = DeviceMesh("cpu", torch.arange(world_size).reshape(shape), _init_backend=False)
                planner = DefaultSavePlanner()
                planner.set_up_planner(dict(make(mesh)), is_coordinator=rank == 0)
                planners.append(planner)
                plans.append(planner.create_local_plan())
        _write(path, planners, plans)
    return path


class _BoxPlanner(DefaultSavePlanner):
    """A rank that holds some boxes of whole tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], boxes: Sequence[tuple[str, Box]], first: bool) -> None:
        super().__init__()
        self.tensors, self.boxes = tensors, boxes
        self.set_up_planner({}, is_coordinator=first)

    def create_local_plan(self) -> SavePlan:
        return SavePlan([self._item(key, box) for key, box in self.boxes], planner_data={k: (k,) for k in self.tensors})

    def _item(self, key: str, box: Box) -> WriteItem:
        tensor = self.tensors[key]
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        data = TensorWriteData(chunk, TensorProperties(tensor.dtype), tensor.size())
        return WriteItem(MetadataIndex(key, box.offsets), WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        return self.tensors[write_item.index.fqn][Box(tuple(chunk.offsets), tuple(chunk.sizes)).slices]


def save_boxes(
    path: Path, tensors: Mapping[str, torch.Tensor], ranks: Sequence[Sequence[tuple[str, Box]]], **options: Any
) -> Path:
    """A folder whose rank `r` wrote the boxes `ranks[r]`."""
    planners = [_BoxPlanner(tensors, boxes, rank == 0) for rank, boxes in enumerate(ranks)]
    with quietly():
        _write(path, planners, [planner.create_local_plan() for planner in planners], **options)
    return path


def _write(path: Path, planners: Sequence[Any], plans: Sequence[SavePlan], **options: Any) -> None:
    global_plans, metadata = planners[0].create_global_plan(list(plans))
    writer = dcp.FileSystemWriter(path, sync_files=False, **options)
    writer.set_up_storage_writer(True)
    results = []
    for planner, plan in zip(planners, writer.prepare_global_plan(global_plans), strict=True):
        plan = writer.prepare_local_plan(planner.finish_plan(plan))
        results.append(writer.write_data(plan, planner).value())
    writer.finish(metadata, results)


def read_metadata(folder: Path) -> Metadata:
    """The metadata as torch reads it."""
    return pickle.loads((folder / ".metadata").read_bytes())


def change_metadata(folder: Path, change: Callable[[Metadata], object]) -> Path:
    """Make the metadata say something else."""
    metadata = read_metadata(folder)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def move_item(metadata: Metadata, key: str, **fields: Any) -> None:
    """Say that the first item of `key` is elsewhere."""
    index = next(index for index in metadata.storage_data if index.fqn == key)
    metadata.storage_data[index] = dataclasses.replace(metadata.storage_data[index], **fields)
