"""What torch's own DCP planners take for the same shapes.

Save: `DefaultSavePlanner.create_global_plan`, which the coordinator runs over the plans of all ranks
(these are made by hand from the shapes, outside of the clock). Load: `create_read_items_for_chunk_list`,
the resharding that `create_default_local_load_plan` runs for every tensor on every rank. Both are
called as DCP calls them; DTensors, gathering and pickling are left out, in DCP's favour.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from benchmarks.scale_shapes import Tensor
from cas_ckpt.layout.holdings import Shard

_PROPERTIES = TensorProperties(dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class DcpTimes:
    """Seconds of DCP's planning."""

    all_ranks_s: float
    most_per_rank_s: float
    num_items: int


def plan_save(tensors: Sequence[Tensor], world_size: int) -> DcpTimes:
    """The coordinator's part of planning a save; all ranks wait for it."""
    plans = _local_plans(tensors, world_size)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    start = time.process_time()
    planner.create_global_plan(plans)
    seconds = time.process_time() - start
    return DcpTimes(seconds, seconds, sum(len(plan.items) for plan in plans))


def plan_load(saved: Sequence[Tensor], wanted: Sequence[Tensor], ranks: Sequence[int]) -> DcpTimes:
    """Planning a load on these ranks, one after the other."""
    metadata = {tensor.key: _storage_metadata(tensor) for tensor in saved}
    chunks_of = _ChunksOfRanks()
    num_items, total, most = 0, 0.0, 0.0
    for rank in ranks:
        local = [(tensor.key, chunks_of.get(tensor.shards, rank)) for tensor in wanted]
        start = time.process_time()
        for key, chunks in local:
            num_items += len(create_read_items_for_chunk_list(key, metadata[key], chunks))
        seconds = time.process_time() - start
        total, most = total + seconds, max(most, seconds)
    return DcpTimes(total, most, num_items)


def metadata_bytes(saved: Sequence[Tensor]) -> int:
    """Length of the `.metadata` that every rank reads before it plans, without places in files."""
    return len(pickle.dumps(Metadata({tensor.key: _storage_metadata(tensor) for tensor in saved})))


class _ChunksOfRanks:
    def __init__(self) -> None:
        self._found: dict[int, dict[int, list[ChunkStorageMetadata]]] = {}

    def get(self, shards: tuple[Shard, ...], rank: int) -> list[ChunkStorageMetadata]:
        by_rank = self._found.get(id(shards))
        if by_rank is None:
            by_rank = self._found[id(shards)] = {}
            for shard in shards:
                for each in shard.ranks:
                    by_rank.setdefault(each, []).extend(_chunks(shard))
        return by_rank.get(rank, [])


def _chunks(shard: Shard) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in shard.pieces]


def _storage_metadata(tensor: Tensor) -> TensorStorageMetadata:
    chunks = [chunk for shard in tensor.shards for chunk in _chunks(shard)]
    return TensorStorageMetadata(_PROPERTIES, torch.Size(tensor.spec.shape), chunks)


def _local_plans(tensors: Sequence[Tensor], world_size: int) -> list[SavePlan]:
    items: list[list[WriteItem]] = [[] for _ in range(world_size)]
    for tensor in tensors:
        size = torch.Size(tensor.spec.shape)
        for shard in tensor.shards:
            for chunk in _chunks(shard):
                data = TensorWriteData(chunk, _PROPERTIES, size)
                item = WriteItem(MetadataIndex(tensor.key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
                for rank in shard.ranks:
                    items[rank].append(item)
    return [SavePlan(each) for each in items]
