"""What names who wants what: equal however it is said, and for nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.layout.holdings import Shard, holdings, whole
from cas_ckpt.layout.restore_plan import RestoreRequest
from cas_ckpt.objects.digest import Digest, leaf_digest
from cas_ckpt.objects.spec import Mesh, MeshPlacement, Split
from cas_ckpt.ops.checkout import restores as module
from cas_ckpt.ops.checkout.restores import wants_id
from tests.layout.drawing import wants
from tests.searches import tries

Wanted = list[tuple[Digest, tuple[Shard, ...]]]


def node(name: str) -> Digest:
    return leaf_digest(name.encode())


def over(shape: tuple[int, ...], sizes: tuple[int, ...], *splits: Split) -> tuple[Shard, ...]:
    count = 1
    for size in sizes:
        count *= size
    names = tuple(f"d{at}" for at in range(len(sizes)))
    return holdings(shape, [MeshPlacement(Mesh(names, sizes, tuple(range(count))), splits)])


def test_names_of_dimensions_and_ways_to_write_a_placement_do_not_matter() -> None:
    shape = (12, 8)
    fsdp = [(node("w"), over(shape, (4,), Split(0)))]
    hybrid = [(node("w"), over(shape, (1, 4), Split(), Split(0)))]
    nested = [(node("w"), over(shape, (2, 2), Split(0), Split(0)))]
    assert wants_id(fsdp, 4) == wants_id(hybrid, 4) == wants_id(nested, 4)
    replicas = [(node("w"), over(shape, (4,), Split()))]
    assert wants_id(replicas, 4) == wants_id([(node("w"), whole(shape, range(4)))], 4)
    assert wants_id(fsdp, 4) != wants_id(replicas, 4)


def test_whoever_wants_something_else_has_another_name() -> None:
    shape = (12, 8)
    shards = over(shape, (4,), Split(0))
    base = wants_id([(node("w"), shards)], 4)
    others = [
        wants_id([(node("w"), shards)], 5),
        wants_id([(node("v"), shards)], 4),
        wants_id([(node("w"), shards), (node("v"), shards)], 4),
        wants_id([(node("w"), over(shape, (4,), Split(1)))], 4),
        wants_id([(node("w"), over(shape, (2, 2), Split(0, 2), Split(0)))], 4),
        wants_id([(node("w"), tuple(replace(shard, ranks=(3 - shard.ranks[0],)) for shard in shards))], 4),
        wants_id([], 4),
    ]
    assert len({base, *others}) == len(others) + 1


def test_another_planner_gives_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [(node("w"), whole((8,), [0]))]
    before = wants_id(wanted, 1)
    monkeypatch.setattr(module, "PLANNER_VERSION", 10_000)
    assert wants_id(wanted, 1) != before


@settings(deadline=None, max_examples=tries(10, 40))
@given(wants(), st.randoms(use_true_random=False))
def test_the_order_and_the_objects_do_not_matter(
    drawn: tuple[list[RestoreRequest], int], random: st.DataObject
) -> None:
    requests, world_size = drawn
    wanted: Wanted = [(node(each.key), each.shards) for each in requests]
    name = wants_id(wanted, world_size)
    parted: Wanted = []
    for digest, shards in random.sample(wanted * 2, 2 * len(wanted)):  # each twice, as tied tensors are
        split = [replace(shard, ranks=(rank,), local=()) for shard in shards for rank in shard.ranks]
        parted.append((digest, tuple(random.sample(split, len(split)))))
    assert wants_id(parted, world_size) == name
