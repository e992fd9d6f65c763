"""The older ShardedTensor as an item: boxes of all ranks, several shards of this one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed._shard.sharded_tensor import Shard as OldShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

from cas_ckpt.errors import UnsupportedValueError
from cas_ckpt.objects.spec import Box, BoxPlacement, Spec
from cas_ckpt.training.capture.tensors import host_bits
from tests.training.fake_world import fake_world
from tests.training.shards import captured, reads_as, some

RANK = 2


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """Rank 2 of 8; the process group is gone after every test."""
    with fake_world(RANK, 8):
        yield


def old_sharded(
    local: dict[tuple[int, ...], torch.Tensor], others: list[ShardMetadata], *size: int, dtype: torch.dtype
) -> ShardedTensor:
    """A ShardedTensor of which this rank has the shards `local`, by their offsets."""
    mine = [
        OldShard(tensor, ShardMetadata(list(at), list(tensor.shape), f"rank:{RANK}/cpu"))
        for at, tensor in local.items()
    ]
    metadata = ShardedTensorMetadata(
        [*(shard.metadata for shard in mine), *others], torch.Size(size), TensorProperties(dtype=dtype)
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(mine, metadata)


def test_a_sharded_tensor_says_the_boxes_of_all_ranks_and_reads_several_shards_of_its_own() -> None:
    whole = some(torch.bfloat16, 6, 4)
    local = {(0, 0): whole[:2].clone(), (4, 2): whole[4:, 2:].clone()}
    others = [ShardMetadata([2, 0], [2, 4], "rank:0/cpu"), ShardMetadata([4, 0], [2, 2], "rank:5/cpu")]
    item = captured(old_sharded(local, others, 6, 4, dtype=torch.bfloat16))
    assert item.spec == Spec("bfloat16", (6, 4))
    assert isinstance(item.placement, BoxPlacement)
    assert dict(item.placement.boxes) == {
        Box((0, 0), (2, 4)): (RANK,),
        Box((4, 2), (2, 2)): (RANK,),
        Box((2, 0), (2, 4)): (0,),
        Box((4, 0), (2, 2)): (5,),
    }
    assert reads_as(item, whole, RANK)
    assert item.source.read(Box((5, 3), (1, 1))).tobytes() == host_bits(whole[5:, 3:].clone()).tobytes()


def test_a_sharded_tensor_without_shards_here_still_says_what_the_others_hold() -> None:
    item = captured(old_sharded({}, [ShardMetadata([0], [4], "rank:0/cpu")], 4, dtype=torch.float32))
    assert item.placement == BoxPlacement(((Box((0,), (4,)), (0,)),))
    assert item.identity is None


def test_a_sharded_tensor_whose_metadata_do_not_say_who_holds_a_shard_is_refused_by_key() -> None:
    tensor = old_sharded({}, [ShardMetadata([0], [4], "rank:0/cpu")], 4, dtype=torch.float32)
    tensor.metadata().shards_metadata[0].placement = None
    with pytest.raises(UnsupportedValueError, match="^x: .*do not say which rank holds it"):
        captured(tensor)


def test_a_shard_that_is_not_what_its_metadata_say_is_refused_by_key() -> None:
    tensor = old_sharded({(0,): torch.ones(4)}, [], 4, dtype=torch.float32)
    tensor.local_shards()[0].tensor = torch.ones(3)
    with pytest.raises(UnsupportedValueError, match=r"^x: .*shape \(3,\).*\(4,\)"):
        captured(tensor)
