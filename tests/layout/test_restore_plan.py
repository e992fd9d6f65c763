"""Restore plans: every element of every shard once, every wanted chunk read by one rank, in balance."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings

from benchmarks.shapes import llama
from cas_ckpt.errors import InternalError, MismatchError
from cas_ckpt.layout.holdings import PLANNER_VERSION, Shard, holdings, whole
from cas_ckpt.layout.restore_plan import (
    NUMBER_BYTES,
    ReadPlan,
    RestoreRequest,
    Template,
    plan_restore_reads,
    rank_totals,
    summarize,
)
from cas_ckpt.objects.layouts import runs_of
from cas_ckpt.objects.spec import Box, Mesh, MeshPlacement, Spec, Split, grid_for
from tests.layout.drawing import wants
from tests.searches import tries


def mesh(*shape: int) -> Mesh:
    return Mesh(("",) * len(shape), shape, tuple(range(int(np.prod(shape)))))


def held(shape: tuple[int, ...], over: Mesh, *splits: Split) -> tuple[Shard, ...]:
    return holdings(shape, [MeshPlacement(over, splits)])


@settings(deadline=None, max_examples=tries(20, 60))
@given(wants())
def test_every_element_of_every_shard_is_delivered_once(drawn: tuple[list[RestoreRequest], int]) -> None:
    wanted, world_size = drawn
    plan = plan_restore_reads(wanted, world_size)
    plan.check()
    for rank in range(world_size):
        received: dict[int, np.ndarray] = {}
        for part in plan.receives(rank):
            tensor = wanted[part.tensor]
            counts = received.setdefault(part.tensor, np.zeros(tensor.spec.shape, np.uint8))
            counts[part.box.slices] += 1
        for number, tensor in enumerate(wanted):
            expected = np.zeros(tensor.spec.shape, np.uint8)
            for shard in tensor.shards:
                for piece in shard.pieces if rank in shard.ranks else ():
                    expected[piece.slices] += 1
            assert (received.get(number, np.zeros_like(expected)) == expected).all()


@settings(deadline=None, max_examples=tries(20, 60))
@given(wants())
def test_reads_and_receives_agree_and_nothing_is_read_twice(drawn: tuple[list[RestoreRequest], int]) -> None:
    wanted, world_size = drawn
    plan = plan_restore_reads(wanted, world_size)
    delivered, readers = [], {}
    for rank in range(world_size):
        order = [(read.tensor, read.cell) for read in plan.reads(rank)]
        assert order == sorted(order)
        for read in plan.reads(rank):
            assert readers.setdefault((read.tensor, read.cell), rank) == rank == plan.reader(read.tensor, read.cell)
            assert [to.rank for to in read.deliveries] == sorted(to.rank for to in read.deliveries)
            cell = grid_for(wanted[read.tensor].spec).box(read.cell)
            assert read.deliveries
            assert all(to.box.intersect(cell) == to.box for to in read.deliveries)
            delivered += [(read.tensor, read.cell, to.rank, rank, to.box) for to in read.deliveries]
        assert len(order) == len(set(order))
    received = []
    for rank in range(world_size):
        parts = list(plan.receives(rank))
        assert [(part.tensor, part.cell) for part in parts] == sorted((part.tensor, part.cell) for part in parts)
        received += [(part.tensor, part.cell, rank, part.reader, part.box) for part in parts]
    assert sorted(delivered, key=repr) == sorted(received, key=repr)


@settings(deadline=None, max_examples=tries(10, 40))
@given(wants())
def test_the_summary_counts_what_the_ranks_do(drawn: tuple[list[RestoreRequest], int]) -> None:
    wanted, world_size = drawn
    plan = plan_restore_reads(wanted, world_size)
    read, requests, sent, got = ([0] * world_size for _ in range(4))
    for rank in range(world_size):
        for each in plan.reads(rank):
            spec = wanted[each.tensor].spec
            read[rank] += grid_for(spec).box(each.cell).num_elements * spec.item_bytes
            requests[rank] += 1
            for to in each.deliveries:
                if to.rank != rank:
                    sent[rank] += to.box.num_elements * spec.item_bytes
                    got[to.rank] += to.box.num_elements * spec.item_bytes
    summary = summarize(plan)
    for spread, values in (
        (summary.read_bytes, read),
        (summary.num_requests, requests),
        (summary.sent_bytes, sent),
        (summary.received_bytes, got),
    ):
        assert (spread.least, spread.mean, spread.most) == (min(values), sum(values) / world_size, max(values))
    assert summary.num_chunks == sum(requests)
    assert summary.wanted_bytes == sum(
        part.box.num_elements * wanted[part.tensor].spec.item_bytes
        for rank in range(world_size)
        for part in plan.receives(rank)
    )
    assert summary.read_amplification == pytest.approx(1)
    totals = rank_totals(plan)
    assert [totals.read_bytes, totals.sent_bytes, totals.received_bytes] == [read, sent, got]
    assert totals.num_requests == requests
    assert totals.num_straddled == [straddled(plan, rank) for rank in range(world_size)]
    assert totals.metadata_bytes == [known_bytes(plan, rank) for rank in range(world_size)]


def known_bytes(plan: ReadPlan, rank: int) -> int:
    """What the rank has to know of the plan, part by part: of each template that it has a part in."""
    numbers = names = 0
    for each in plan.templates:
        wants, reads = each.wanted_by(rank), each.runs_of.get(rank, ())
        for cell, box in wants:  # and who reads it
            numbers += 1 + 2 * len(box.sizes) + 2 * len(each.shares[cell])
        for cell, _, _ in reads:
            gets = [len(runs_of(each.shards[touch.shard].ranks)) * 3 + 2 * len(touch.box.sizes)
                    for touch in each.touches[cell]]  # fmt: skip
            numbers += 3 + sum(gets)
        for tensor in (plan.requests[number] for number in each.members if wants or reads):
            names += len(tensor.key.encode("utf-8", "surrogatepass")) + len(tensor.spec.dtype)
        numbers += 2 * len(each.grid.shape) if wants or reads else 0
    return NUMBER_BYTES * numbers + names


def straddled(plan: ReadPlan, rank: int) -> int:
    """Chunks of which the rank gets a part, but not all, counted part by part."""
    have: dict[tuple[int, int], int] = {}
    for part in plan.receives(rank):
        have[part.tensor, part.cell] = have.get((part.tensor, part.cell), 0) + part.box.num_elements
    return sum(
        num_elements < grid_for(plan.requests[tensor].spec).cell_elements(cell)
        for (tensor, cell), num_elements in have.items()
    )


_LLAMA = [
    ("wq", (2048, 1024), 300),
    ("w2", (1000, 3000), 17),
    ("norm", (70_000,), 2),
    ("v", (), 1),
    ("é\0\ud800", (9, 9), 1),
]


@pytest.mark.parametrize(
    ("over", "splits"),
    [
        (mesh(1), (Split(),)),
        (mesh(300), (Split(0),)),
        (mesh(7), (Split(),)),
        (mesh(12, 3), (Split(), Split(0))),
        (mesh(5, 4), (Split(0, 4), Split(0))),
        (mesh(2, 3, 4), (Split(), Split(0), Split(1))),
        (mesh(3, 40), (Split(1), Split())),
    ],
)
def test_what_each_rank_has_to_know_is_known_to_the_byte(over: Mesh, splits: tuple[Split, ...]) -> None:
    wanted = []
    for name, shape, copies in _LLAMA:
        own = [split if split.dim is None or split.dim < len(shape) else Split() for split in splits]
        shards = held(shape, over, *own)
        wanted += [RestoreRequest(f"layers.{copy}.{name}", Spec("float32", shape), shards) for copy in range(copies)]
    plan = plan_restore_reads(wanted, len(over.ranks) + 1)  # and a rank that wants nothing
    found = rank_totals(plan).metadata_bytes
    assert found == [known_bytes(plan, rank) for rank in range(plan.world_size)]
    assert rank_totals(plan).num_straddled == [straddled(plan, rank) for rank in range(plan.world_size)]


def test_what_a_plan_counts_is_that_of_this_version_of_the_planner() -> None:
    # A kept plan is taken in the place of a new one: who changes a number here raises the version.
    shards = held((3000, 1000), mesh(2, 2), Split(0), Split())
    plan = plan_restore_reads([RestoreRequest("w", Spec("float32", (3000, 1000)), shards)], 4)
    assert (PLANNER_VERSION, rank_totals(plan).rows()) == (3, [
        (4096000, 1, 4096000, 1904000, 120, 1), (4096000, 1, 6288000, 4096000, 148, 1),
        (3808000, 1, 3808000, 2192000, 120, 1), (0, 0, 0, 6000000, 80, 1),
    ])  # fmt: skip


def test_a_rank_with_several_shards_straddles_what_they_do_not_fill_together() -> None:
    shape = (8, 8)  # one cell

    def rows(first: int, count: int, *ranks: int) -> Shard:
        return Shard((Box((first, 0), (count, 8)),), ((0, 0),), ranks)

    wanted = [
        RestoreRequest(f"{at}", Spec("float32", shape), (rows(0, 4, 0, 1), rows(4, last, 0, 2)))
        for last in (4, 3)
        for at in range(5)
    ]
    plan = plan_restore_reads(wanted, 3)
    assert rank_totals(plan).num_straddled == [5, 10, 10]
    assert [straddled(plan, rank) for rank in range(3)] == [5, 10, 10]


def test_like_tensors_are_planned_once_and_each_rank_reads_some_that_follow_one_another() -> None:
    shards = held((1024, 1024), mesh(4), Split())
    plan = plan_restore_reads([RestoreRequest(str(at), Spec("float32", (1024, 1024)), shards) for at in range(12)], 4)
    assert len(plan.templates) == 1
    assert [plan.reader(tensor, 0) for tensor in range(12)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_equal_shards_are_recognised_although_they_are_other_objects() -> None:
    spec = Spec("float32", (512, 512))
    wanted = [RestoreRequest(str(at), spec, held((512, 512), mesh(2), Split(0))) for at in range(3)]
    assert len(plan_restore_reads(wanted, 2).templates) == 1
    assert len(plan_restore_reads([*wanted, RestoreRequest("x", spec, whole((512, 512), range(2)))], 2).templates) == 2


def test_replicas_share_the_reading_of_a_small_llama() -> None:
    """1/8-scale Llama-8B with moments, 64 ranks: 8 replicas of 8 shards."""
    weights = llama(1024, 3584, layers=16, kv=256, vocab=32064)
    for over, splits in ((mesh(64), (Split(),)), (mesh(8, 8), (Split(), Split(0)))):
        shards = {weight.shape: held(weight.shape, over, *splits) for weight in weights}
        wanted = [
            RestoreRequest(f"{weight.name} {copy} {state}", Spec("float32", weight.shape), shards[weight.shape])
            for weight in weights
            for copy in range(weight.copies)
            for state in range(3)
        ]
        summary = summarize(plan_restore_reads(wanted, 64))
        assert summary.read_amplification <= 1.01
        assert summary.read_bytes.balance <= 1.05


def test_one_rank_that_wants_all_is_helped_by_the_others() -> None:
    plan = plan_restore_reads([RestoreRequest("w", Spec("float32", (4096, 4096)), whole((4096, 4096), [2]))], 4)
    assert summarize(plan).read_bytes.balance <= 1.05
    assert [sum(1 for _ in plan.receives(rank)) for rank in range(4)] == [0, 0, 16, 0]


def test_nothing_wanted_is_a_plan_of_nothing() -> None:
    plan = plan_restore_reads([], 3)
    plan.check()
    assert (list(plan.reads(0)), list(plan.receives(2)), summarize(plan).num_chunks) == ([], [], 0)


def test_a_rank_needs_little_of_a_large_plan() -> None:
    shards = held((16384, 4096), mesh(512), Split(0))
    wanted = [RestoreRequest(f"layers.{at}.w", Spec("float32", (16384, 4096)), shards) for at in range(300)]
    plan = plan_restore_reads(wanted, 512)
    assert 0 < known_bytes(plan, 7) <= summarize(plan).metadata_bytes.most < 20_000


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (
            (Shard((Box((0, 8), (4, 4)),), ((0, 0),), (1,)),),
            r"w: ranks 1 want the region \[0:4, 8:12\].*float32\[8, 8\]",
        ),
        ((Shard((Box((0,), (4,)),), ((0,),), (1,)),), r"w: ranks 1 want the region \[0:4\], .*not inside"),
        (
            (Shard((Box((0, 0), (4, 4)), Box((2, 2), (4, 4))), ((0, 0), (4, 4)), (1,)),),
            r"w: rank 1 .*\[2:4, 2:4\].*once",
        ),
        (
            (Shard((Box((0, 0), (8, 4)),), ((0, 0),), (0, 1)), Shard((Box((0, 3), (8, 1)),), ((0, 0),), (1,))),
            r"w: rank 1 .*\[0:8, 3:4\].*more than once",
        ),
        (whole((8, 8), [4]), "w: rank 4 wants a part of it, but the world has 4 ranks"),
    ],
)
def test_a_target_that_cannot_be_filled_is_refused_with_key_and_region(shards: tuple[Shard, ...], message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        plan_restore_reads([RestoreRequest("w", Spec("float32", (8, 8)), shards)], 4)


def test_many_boxes_of_one_rank_are_compared_without_comparing_all_pairs() -> None:
    boxes = tuple(Box((row, column), (1, 1)) for row in range(100) for column in range(100))
    shard = Shard(boxes, tuple(box.offsets for box in boxes), (0,))
    plan_restore_reads([RestoreRequest("w", Spec("float32", (100, 100)), (shard,))], 1).check()
    twice = dataclasses.replace(shard, pieces=(*boxes, boxes[777]), local=(*shard.local, (0, 0)))
    with pytest.raises(MismatchError, match=r"\[7:8, 77:78\]"):
        plan_restore_reads([RestoreRequest("w", Spec("float32", (100, 100)), (twice,))], 1)


class TestTheProof:
    """`check` finds plans that are wrong in any of the ways in which a plan can be wrong."""

    @staticmethod
    def plan() -> ReadPlan:
        shards = held((2048, 2048), mesh(3), Split(0))
        return plan_restore_reads(
            [RestoreRequest(str(at), Spec("float32", (2048, 2048)), shards) for at in range(4)], 3
        )

    def broken(self, **changes: object) -> ReadPlan:
        plan = self.plan()
        template: Template = dataclasses.replace(plan.templates[0], **changes)  # type: ignore[arg-type]
        spoiled = ReadPlan(plan.requests, plan.world_size, plan.templates)
        spoiled.templates = (template,)
        return spoiled

    def refuses(self, **changes: object) -> bool:
        with pytest.raises(InternalError):
            self.broken(**changes).check()
        return True

    def test_a_plan_is_right(self) -> None:
        self.broken().check()

    def test_a_missing_part_is_found(self) -> None:
        found = self.plan().templates[0].touches
        assert self.refuses(touches=[found[0][1:], *found[1:]])

    def test_a_part_that_comes_twice_is_found(self) -> None:
        found = self.plan().templates[0].touches
        assert self.refuses(touches=[(*found[0], found[0][0]), *found[1:]])

    def test_a_part_that_comes_twice_in_the_place_of_another_is_found(self) -> None:
        found = self.plan().templates[0].touches
        first, other = found[0][0], found[1][0]
        assert (first.shard, first.box.sizes) == (other.shard, other.box.sizes)  # so that the volume is right
        with pytest.raises(InternalError, match="delivered twice"):
            self.broken(touches=[(*found[0], first), found[1][1:], *found[2:]]).check()

    def test_a_part_of_another_cell_is_found(self) -> None:
        found = self.plan().templates[0].touches
        assert self.refuses(touches=[found[1], found[0], *found[2:]])

    @pytest.mark.parametrize("wrong", [((0, 3),), ((0, 5),), ((0, 2), (0, 2)), ((0, 3), (9, 1)), ((0, 5), (1, -1)), ()])
    def test_wrong_readers_are_found(self, wrong: Sequence[tuple[int, int]]) -> None:
        shares = self.plan().templates[0].shares
        assert self.refuses(shares=[wrong, *shares[1:]])

    def test_a_tensor_that_was_left_out_is_found(self) -> None:
        assert self.refuses(members=(0, 1, 2))
        assert self.refuses(members=(0, 1, 2, 2))


def test_totals_leave_nothing_in_a_plan_that_is_kept() -> None:
    size = 256
    wanted = [
        RestoreRequest(f"{rows}", spec := Spec("uint8", (rows,)), whole(spec.shape, range(size)))
        for rows in range(1000, 1100)
    ]
    plan = plan_restore_reads(wanted, size)
    tracemalloc.start()
    try:
        totals = rank_totals(plan)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(totals.rows()) == size
    assert kept < 500_000  # bytes; what ranks want is by rank in each of the 100 templates: 3 MB
