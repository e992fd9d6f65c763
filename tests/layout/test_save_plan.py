"""Who hashes and writes what: everything once, about as much on every rank."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.errors import MismatchError
from cas_ckpt.layout import save_plan
from cas_ckpt.layout.holdings import Shard, holdings, whole
from cas_ckpt.layout.save_plan import Held, SavePlan
from cas_ckpt.objects.spec import Box, Placement, Spec, grid_for
from tests.divided import mesh, over, written_bytes
from tests.searches import tries


def held(key: str, shape: tuple[int, ...], *placements: Placement, dtype: str = "float32") -> Held:
    spec = Spec(dtype, shape)
    return Held(key, spec, grid_for(spec), holdings(shape, placements))


def _pieces(tensor: Held, rank: int) -> list[Box]:
    return [piece for shard in tensor.shards if rank in shard.ranks for piece in shard.pieces]


def everything(plan: SavePlan, size: int, tensors: list[Held]) -> None:
    """Every element of every tensor is written by exactly one rank, which holds it."""
    written = [np.zeros(tensor.spec.shape, int) for tensor in tensors]
    holds = [[_pieces(tensor, rank) for rank in range(size)] for tensor in tensors]
    cells = set()
    for rank in range(size):
        for number, mine in plan.whole_cells(rank).items():
            for cell in mine:
                box = tensors[number].grid.box(cell)
                assert any(piece.intersect(box) == box for piece in holds[number][rank])
                written[number][box.slices] += 1
        for batch in range(plan.num_batches):
            for each in plan.straddling_cells(rank, batch):
                assert rank in each.ranks
                for part, owner in zip(each.parts, each.ranks, strict=True):
                    assert any(piece.intersect(part) == part for piece in holds[each.tensor][owner])
                if each.home == rank:
                    cells.add((each.tensor, each.cell))
                    owned = Counter(leaf for leaves in each.leaves_by_rank().values() for leaf in leaves)
                    assert set(owned.values()) == {1} and len(owned) == len(each.owners)
                    for part in each.parts:
                        written[each.tensor][part.slices] += 1
    assert all((counts == 1).all() for counts in written)
    assert len(cells) + sum(len(c) for rank in range(size) for c in plan.whole_cells(rank).values()) == sum(
        tensor.grid.num_cells for tensor in tensors
    )


@st.composite
def tensors_over_ranks(draw: st.DrawFn) -> tuple[int, list[Held]]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    size = int(np.prod(shape))
    found = []
    for number in range(draw(st.integers(1, 4))):
        extents = tuple(draw(st.sampled_from([(3000,), (700, 900), (5, 300, 90), (2100, 512)])))
        splits = [draw(st.sampled_from(["R", "S(0)", f"S({len(extents) - 1})", "SS(0,2)"])) for _ in shape]
        dtype = draw(st.sampled_from(["float32", "bfloat16"]))
        found.append(held(f"w{number}", extents, over(mesh(*shape), *splits), dtype=dtype))
    return size, found


@settings(max_examples=tries(10, 40), deadline=None)
@given(tensors_over_ranks())
def test_everything_is_written_once_by_a_rank_that_holds_it(case: tuple[int, list[Held]]) -> None:
    size, tensors = case
    everything(SavePlan(tensors, size), size, tensors)


def test_batches_are_bounded_and_leave_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_plan, "BATCH_BYTES", 1 << 20)
    tensors = [held(f"w{n}", (900, 700), over(mesh(3), "S(0)")) for n in range(7)]
    plan = SavePlan(tensors, 3)
    assert plan.num_batches > 5
    everything(plan, 3, tensors)


@pytest.mark.parametrize("size", [2, 3, 8, 64])
def test_replicas_share_the_writing_evenly(size: int) -> None:
    tensors = [held(f"w{n}", (4096, 2048), over(mesh(size), "R")) for n in range(40)]
    tensors += [held(f"b{n}", (30_000,), over(mesh(size), "R")) for n in range(40)]
    written = written_bytes(SavePlan(tensors, size), size)
    assert max(written) <= 1.1 * sum(written) / size


def test_hybrid_shards_share_the_writing_evenly() -> None:
    tensors = [held(f"w{n}", (1000, 3000), over(mesh(4, 8), "R", "S(0)")) for n in range(60)]
    written = written_bytes(SavePlan(tensors, 32), 32)
    assert max(written) <= 1.1 * sum(written) / 32


def test_holders_of_all_and_holders_of_parts_write_everything_once() -> None:
    spec = Spec("float32", (900, 700))
    shards = (*whole(spec.shape, [3]), *holdings(spec.shape, [over(mesh(3), "S(0)")]))
    tensors = [Held("w", spec, grid_for(spec), shards)]
    everything(SavePlan(tensors, 4), 4, tensors)


def test_two_groups_that_cut_a_tensor_differently_write_it_once() -> None:
    tensors = [held("w", (900, 700), over(mesh(2), "S(0)"), over(mesh(3, first=2), "S(0)"))]
    everything(SavePlan(tensors, 5), 5, tensors)


def test_what_nobody_holds_is_named_with_its_region() -> None:
    spec = Spec("float32", (900, 700))
    shards = (Shard((Box((0, 0), (400, 700)),), ((0, 0),), (0,)),)
    with pytest.raises(MismatchError, match=r"w: the ranks do not hold all of .*region"):
        SavePlan([Held("w", spec, grid_for(spec), shards)], 1)
