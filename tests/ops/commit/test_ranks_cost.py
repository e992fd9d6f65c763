"""What a commit by many ranks costs: who hashes what, what is sent to compare copies, how large a batch gets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cas_ckpt.layout.holdings import whole
from cas_ckpt.layout.save_plan import BATCH_BYTES, Held, SavePlan
from cas_ckpt.objects.digest import LEAF_BYTES
from cas_ckpt.objects.nodes import decode_tree
from cas_ckpt.objects.spec import Box, BoxPlacement, Placement, Spec, grid_for
from cas_ckpt.objects.state import Container, TensorItem, render_key
from cas_ckpt.ops.commit.merge_states import describe, merge_states
from cas_ckpt.ops.commit.ranks import Divergence, PerRankValues, compare_replicas
from cas_ckpt.ops.commit.save import Draft
from cas_ckpt.parallel.peers import Peers
from tests.builders import ArrayMemory, numbers
from tests.builders import state as state_alone
from tests.committing import TIMEOUT_S, one
from tests.divided import holdings, mesh, over
from tests.thread_peers import run_ranks


def test_three_hundred_ranks_make_the_node_that_one_process_would_make() -> None:
    children: dict[Any, Any] = {rank: state_alone({"position": rank, "text": "x" * 300}) for rank in range(300)}
    alone = Draft(one(Container("ranks", children, {"world_size": 300})))
    list(alone.works())
    wanted_nodes, wanted = alone.nodes()
    united = Draft(one(Container("ranks", {}, {"world_size": 300})))
    list(united.works())
    made = set()
    for rank in range(300):
        own = one(Container("ranks", {rank: children[rank]}, {"world_size": 300}))
        nodes = PerRankValues(own, [("w",)], rank).nodes()[0]
        united.containers[render_key(("w",))].entries.extend(decode_tree(nodes[-1].data).entries)
        made.update(node.digest for node in nodes[:-1])
    nodes, root = united.nodes()
    assert root == wanted
    assert made | {node.digest for node in nodes} == {node.digest for node in wanted_nodes}


@pytest.mark.parametrize(
    ("shape", "size", "split"), [((4096, 4096), 16, "S(1)"), ((64, 64), 8, "S(0)"), ((300, 800), 4, "S(1)")]
)
def test_straddling_cells_give_every_rank_about_as_much_to_do(shape: tuple[int, ...], size: int, split: str) -> None:
    spec = Spec("float32", shape)
    shards = holdings(shape, [over(mesh(size), split)])
    plan = SavePlan([Held(f"w{at}", spec, grid_for(spec), shards) for at in range(16)], size)
    leaves, homes = [0] * size, [0] * size
    for rank in range(size):
        for cell in plan.straddling_cells(rank, 0):
            leaves[rank] += len(cell.leaves_by_rank().get(rank, ()))
            homes[rank] += cell.home == rank
    assert max(leaves) <= 2 * sum(leaves) / size
    assert max(homes) <= 2 * max(1, sum(homes) / size)


class _Watched(ArrayMemory):
    most = 0

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        self.most = max(self.most, box.num_elements * self.array.itemsize)
        return super().read(box)


def test_the_audit_reads_short_stretches_also_of_long_rows() -> None:
    array = numbers(2, 1 << 20)
    held = [Held("w", Spec("float32", array.shape), grid_for(Spec("float32", array.shape)), whole(array.shape, (0, 1)))]
    sources = [_Watched(array), _Watched(array)]

    def work(peers: Peers) -> list[Divergence]:
        return compare_replicas(held, [sources[peers.rank]], peers, checksums=None, share=0.01, seed=b"seed")

    run_ranks(2, work, timeout_s=TIMEOUT_S)
    assert sources[0].most <= 2 * LEAF_BYTES


def test_to_compare_replicas_takes_few_bytes_also_when_all_is_compared() -> None:
    array = numbers(1024, 1024)
    spec = Spec("float32", array.shape)
    held = [Held("w", spec, grid_for(spec), whole(array.shape, range(3)))]

    def work(peers: Peers) -> int:
        sent = []
        exchange = peers.exchange

        def counted(messages: Any) -> Any:
            sent.append(sum(map(len, messages)))
            return exchange(messages)

        peers.exchange = counted  # type: ignore[method-assign]
        assert not compare_replicas(held, [ArrayMemory(array)], peers, checksums=None, share=1.0, seed=b"seed")
        return sum(sent)

    assert max(run_ranks(3, work, timeout_s=TIMEOUT_S)) <= 256


@pytest.mark.parametrize("split", ["S(0)", None])
def test_tensors_that_are_divided_alike_share_one_account_of_who_holds_what(split: str | None) -> None:
    placement: Placement | None = None if split is None else over(mesh(64), split)
    spec = Spec("float32", (640, 64))
    items = {f"w{at}": TensorItem(spec, ArrayMemory(np.empty(0)), "numpy", None, placement) for at in range(3)}
    described = describe(Container("dict", {**items}))
    merged = merge_states([(tuple(range(64)), described)], {})
    assert merged.shards["w0"] is merged.shards["w1"]


def _skewed() -> tuple[Spec, Placement, int]:
    """Of 64 ranks the first one holds nearly all columns."""
    spec, size = Spec("float32", (512, 128 * 1024)), 64
    edges = [0, *range(128 * 1024 - size + 1, 128 * 1024 + 1)]
    pairs: Iterator[tuple[int, int]] = itertools.pairwise(edges)
    boxes = tuple((Box((0, at), (512, end - at)), (rank,)) for rank, (at, end) in enumerate(pairs))
    return spec, BoxPlacement(boxes), size


def test_a_batch_is_bounded_on_every_rank_also_where_one_holds_nearly_all() -> None:
    spec, placement, size = _skewed()
    held = Held("w", spec, grid_for(spec), holdings(spec.shape, [placement]))
    plan = SavePlan([held, *[Held(f"w{at}", spec, held.grid, held.shards) for at in range(16)]], size)
    most = 0
    for batch in range(plan.num_batches):
        cells = plan.straddling_cells(0, batch)
        own = sum(part.num_elements for cell in cells for part, rank in zip(cell.parts, cell.ranks) if rank == 0)  # noqa: B905
        most = max(most, own * 4)
    assert most <= 2 * BATCH_BYTES
