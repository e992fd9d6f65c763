"""What a review of commits by several ranks looked at: what is frozen, what each rank keeps, and what it costs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cas_ckpt.core.packs import read_pack
from cas_ckpt.core.records import commit_of as commit_row_of
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import FrozenChangedError, PeerError
from cas_ckpt.layout.grid import grid_for
from cas_ckpt.layout.holdings import whole
from cas_ckpt.layout.save_plan import BATCH_BYTES, Held, SavePlan
from cas_ckpt.objects.digest import LEAF_BYTES, Digest, ObjectKind
from cas_ckpt.objects.nodes import decode_layout, decode_tree
from cas_ckpt.objects.spec import Box, BoxPlacement, Placement, Spec
from cas_ckpt.objects.state import Container, TensorItem, render_key
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.draft import Draft
from cas_ckpt.ops.commit.frozen import FrozenMemory
from cas_ckpt.ops.commit.merge_states import describe, merge_states
from cas_ckpt.ops.commit.ranks import PerRankValues
from cas_ckpt.ops.commit.replicas import Divergence, compare_replicas
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.transfer.peers import Peers
from tests.builders import ArrayMemory, numbers, same_bytes, tensor
from tests.builders import state as state_alone
from tests.committing import TIMEOUT_S, new_store, on, one, root_alone, stored, together
from tests.divided import divided, holdings, mesh, over, state_of
from tests.thread_peers import run_ranks

# --- frozen ------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["S(0)", "S(1)"])
def test_frozen_tensors_that_changed_are_found_however_they_are_divided(split: str) -> None:
    store, kept = new_store(), [FrozenMemory(), FrozenMemory()]
    placement, array = over(mesh(2), split), numbers(2048, 1024)
    sources = [divided(array, placement, rank).source for rank in range(2)]

    def work(peers: Peers) -> Any:
        item = TensorItem(Spec("float32", array.shape), sources[peers.rank], "numpy", ("memory", 1), placement)
        request = CommitRequest(frozen="w", frozen_audit=1.0, num_threads=1)
        return commit_tree(on(store), one(item), request, peers=peers, memory=kept[peers.rank])

    run_ranks(2, work, timeout_s=TIMEOUT_S)
    sources[1].pieces[0][1][:] += 1  # type: ignore[attr-defined]
    found = run_ranks(2, work, timeout_s=TIMEOUT_S, outcomes=True)
    assert all(isinstance(error, (FrozenChangedError, PeerError)) and "frozen" in str(error) for error in found)


def test_a_frozen_pattern_may_name_what_each_rank_keeps() -> None:
    store = new_store()

    def work(peers: Peers) -> Any:
        own = Container("ranks", {peers.rank: tensor(numbers(900))}, {"world_size": 2})
        return commit_tree(on(store), one(own, "own"), CommitRequest(frozen="own/*"), peers=peers)

    assert len({getattr(info, "root", info) for info in run_ranks(2, work, timeout_s=TIMEOUT_S, outcomes=True)}) == 1


def test_frozen_cells_that_move_to_another_rank_are_hashed_there() -> None:
    store, kept = new_store(), [FrozenMemory(), FrozenMemory()]
    w, big = numbers(2048, 1024), numbers(1100, 1024, seed=3)

    def commit_of(items: dict[str, np.ndarray[Any, Any]]) -> str:
        def work(peers: Peers) -> Any:
            children = {name: tensor(array, identity=(name, 1)) for name, array in items.items()}
            request = CommitRequest(frozen="w", frozen_audit=0.0, num_threads=1)
            state = Container("dict", {**children})
            return commit_tree(on(store), state, request, peers=peers, memory=kept[peers.rank])

        return str(run_ranks(2, work, timeout_s=TIMEOUT_S)[0].root)

    for items in ({"w": w}, {"a": big, "w": w}, {"w": w, "x": big[:7], "y": big[:1050]}):
        assert commit_of(items) == root_alone(items)


def test_a_rank_trusts_frozen_memory_only_for_what_it_hashed_there_itself() -> None:
    store, kept = new_store(), [FrozenMemory(), FrozenMemory()]
    arrays = [numbers(2048, 1024), numbers(2048, 1024)]
    arrays[1][1500:] += 1  # cells that rank 1 hashes: not what rank 0 has there

    def commit_of(names: dict[int, str]) -> str:
        def work(peers: Peers) -> Any:
            children = {name: tensor(arrays[peers.rank], identity=(name, 1)) for name in names[peers.rank]}
            children["x"] = tensor(numbers(7))
            request = CommitRequest(frozen="w", frozen_audit=0.0, replica_check="sample", replica_audit=0.0)
            state = Container("dict", {**children})
            return commit_tree(on(store), state, request, peers=peers, memory=kept[peers.rank])

        return str(run_ranks(2, work, timeout_s=TIMEOUT_S)[0].root)

    commit_of({0: "w", 1: "w"})
    assert commit_of({0: "w", 1: ""}) == root_alone({"w": arrays[0], "x": numbers(7)})


# --- what each rank keeps ----------------------------------------------------------------------


def test_equal_values_of_all_ranks_stand_in_the_pack_once() -> None:
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


# --- cost --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "size", "split"), [((4096, 4096), 16, "S(1)"), ((64, 64), 8, "S(0)"), ((300, 800), 4, "S(1)")]
)
def test_straddled_cells_give_every_rank_about_as_much_to_do(shape: tuple[int, ...], size: int, split: str) -> None:
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
