"""What a review of commits by several ranks looked at: each test is one way to lose a byte, an error or a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cas_ckpt.config import GC_STATE_KEY, Config, GcState, encode_gc_state, new_store_id, write_config
from cas_ckpt.errors import CkptError, FrozenChangedError, PeerError, PermissionDeniedError
from cas_ckpt.layout.grid import grid_for
from cas_ckpt.layout.holdings import whole
from cas_ckpt.layout.save_plan import BATCH_BYTES, Held, SavePlan
from cas_ckpt.objects.digest import LEAF_BYTES
from cas_ckpt.objects.placement import BoxPlacement, Placement
from cas_ckpt.objects.spec import Box, Spec
from cas_ckpt.objects.state import Container, TensorItem, ValueItem, render_key
from cas_ckpt.objects.tree_node import decode_tree
from cas_ckpt.objects.values import encode_value
from cas_ckpt.ops.commit import commit_tree
from cas_ckpt.ops.description import describe
from cas_ckpt.ops.draft import Draft, draft_nodes
from cas_ckpt.ops.frozen import FrozenMemory
from cas_ckpt.ops.own_values import OwnValues
from cas_ckpt.ops.replicas import diverged_replicas
from cas_ckpt.ops.request import CommitRequest
from cas_ckpt.ops.union import unite
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.peers import Peers
from cas_ckpt.transfer.thread_peers import run_ranks
from tests.builders import ArrayMemory, commit, numbers, same_bytes, stored_arrays, tensor
from tests.builders import state as state_alone
from tests.divided import LocalPieces, boxes_by_rank, divided, holdings, mesh, over, state_of

_TIMEOUT_S = 8


def new_store() -> MemoryStore:
    store = MemoryStore()
    write_config(store, Config(new_store_id(), pack_bytes=1 << 20))
    return store


def on(store: Store, **options: Any) -> RepositoryHandle:
    return RepositoryHandle.on_store(store, index_url=":memory:", **options)


def together(store: Store, size: int, state: Callable[[int], Container], **request: Any) -> list[Any]:
    """What every rank gets, its error included, when it commits `state(rank)` on a handle of its own."""

    def work(peers: Peers) -> Any:
        return commit_tree(on(store), state(peers.rank), CommitRequest(num_threads=1, **request), peers=peers)

    return run_ranks(size, work, timeout_s=_TIMEOUT_S, outcomes=True)


def stored(store: Store, root: str) -> dict[str, np.ndarray[Any, Any]]:
    handle = on(store)
    handle.sync()
    return stored_arrays(handle, root)


def root_alone(items: dict[Any, Any]) -> str:
    return commit(on(new_store()), items).root


def one(item: Any, name: Any = "w") -> Container:
    return Container("dict", {name: item})


def first_fails_then_works(size: int, bad: Callable[[int], Container], **request: Any) -> list[tuple[Any, Any]]:
    """(error of a commit of `bad`, root of the commit that follows it on the same group) of every rank."""
    store = new_store()

    def work(peers: Peers) -> tuple[Any, Any]:
        handle = on(store)
        try:
            commit_tree(handle, bad(peers.rank), CommitRequest(num_threads=1, **request), peers=peers)
            found: Any = None
        except BaseException as error:
            found = error
        return found, commit_tree(handle, state_of({"a": 1}, {}, peers.rank), CommitRequest(), peers=peers).root

    return run_ranks(size, work, timeout_s=_TIMEOUT_S)


# --- bytes -------------------------------------------------------------------------------------


def test_tensors_that_are_tied_on_one_rank_alone_keep_the_bytes_of_the_others() -> None:
    placement = over(mesh(2), "S(0)")
    a, b = numbers(40, 50, seed=1), numbers(40, 50, seed=2)
    b[:20] = a[:20]  # rank 0 holds the same rows of both: one memory

    def state(rank: int) -> Container:
        children: dict[Any, Any] = {}
        for name, array in (("a", a), ("b", b)):
            item = divided(array, placement, rank)
            memory = ("one memory", 1) if rank == 0 else (f"memory of {name}", 1)
            children[name] = TensorItem(item.spec, item.source, "numpy", memory, placement)
        return Container("dict", children)

    store = new_store()
    infos = together(store, 2, state)
    arrays = stored(store, infos[0].root)
    assert same_bytes(arrays["a"], a)
    assert same_bytes(arrays["b"], b)
    assert infos[0].root == root_alone({"a": a, "b": b})


def test_after_a_warning_the_tensor_is_that_of_one_rank_and_no_mixture() -> None:
    arrays = [numbers(2048, 1024, seed=rank) for rank in range(2)]
    store = new_store()
    infos = together(store, 2, lambda rank: state_of({"w": arrays[rank]}, {}, rank), on_divergence="warn")
    assert same_bytes(stored(store, infos[0].root)["w"], arrays[0])


def test_small_tensors_that_every_rank_of_a_mesh_holds_are_compared() -> None:
    placement = over(mesh(2), "R")
    found = together(new_store(), 2, lambda rank: one(divided(numbers(7, seed=rank), placement, rank)))
    assert all(isinstance(error, PeerError) and "w" in str(error) for error in found)


def test_a_whole_copy_is_compared_with_the_shards_of_other_ranks() -> None:
    placement = over(mesh(2, first=1), "S(0)")

    def state(rank: int) -> Container:
        array = numbers(64, 64, seed=0 if rank == 0 else 1)
        return one(tensor(array) if rank == 0 else divided(array, placement, rank))

    found = together(new_store(), 3, state, replica_audit=1.0)
    assert all(isinstance(error, PeerError) and "w" in str(error) for error in found)


def test_a_rank_may_hold_whole_what_others_hold_in_shards() -> None:
    array, placement = numbers(500, 700), over(mesh(2, first=1), "S(1)")
    store = new_store()
    infos = together(store, 3, lambda rank: one(tensor(array) if rank == 0 else divided(array, placement, rank)))
    assert infos[2].root == root_alone({"w": array})
    assert same_bytes(stored(store, infos[0].root)["w"], array)


def test_parts_that_overlap_and_cover_the_tensor_are_taken() -> None:
    array = numbers(30, 50)
    placement = BoxPlacement((((Box((0, 0), (20, 50))), (0,)), (Box((10, 0), (20, 50)), (1,))))
    infos = together(new_store(), 2, lambda rank: one(divided(array, placement, rank)))
    assert [getattr(info, "root", info) for info in infos] == [root_alone({"w": array})] * 2


@pytest.mark.parametrize("name", ["w\udc80", "", "7", 7, -3, "a/b~"], ids=ascii)
def test_any_name_may_be_divided(name: Any) -> None:
    array, placement = numbers(60, 70), over(mesh(2), "S(0)")
    infos = together(new_store(), 2, lambda rank: one(divided(array, placement, rank), name))
    assert infos[1].root == root_alone({name: array})


def test_lists_of_different_lengths_are_a_disagreement() -> None:
    def state(rank: int) -> Container:
        items = {at: tensor(numbers(300, seed=at)) for at in range(1 + rank)}
        return one(Container("list", {**items}))

    found = together(new_store(), 2, state)
    assert all(isinstance(error, PeerError) and "w" in str(error) for error in found)


def test_what_nobody_has_a_part_of_is_refused() -> None:
    def state(rank: int) -> Container:
        return one(TensorItem(Spec("float32", (900,)), LocalPieces(numbers(900), (), rank), "numpy", None, NOWHERE))

    found = together(new_store(), 2, state)
    assert all(isinstance(error, CkptError) and "do not hold all of" in str(error) for error in found)


NOWHERE = BoxPlacement(())


# --- ranks in step -----------------------------------------------------------------------------


def test_a_hole_in_a_small_tensor_is_told_on_all_ranks_and_the_group_goes_on() -> None:
    hole = BoxPlacement(((Box((0,), (4,)), (0,)), (Box((5,), (3,)), (1,))))
    found = first_fails_then_works(2, lambda rank: one(divided(numbers(8), hole, rank)))
    assert all("do not hold all of" in str(error) for error, _ in found)
    assert found[0][1] == found[1][1]


def test_an_error_that_is_raised_twice_is_told_twice() -> None:
    broken = OSError("the same object each time")

    class Broken:
        def read(self, box: Box) -> np.ndarray[Any, Any]:
            raise broken

    def state(rank: int) -> Container:
        memory: Any = Broken() if rank == 1 else ArrayMemory(numbers(3))
        return one(TensorItem(Spec("float32", (3,)), memory, "numpy"))

    store = new_store()

    def work(peers: Peers) -> list[Any]:
        handle, outcomes = on(store), []
        for items in (state(peers.rank), state(peers.rank), one(ValueItem(1))):
            try:
                outcomes.append(commit_tree(handle, items, CommitRequest(num_threads=1), peers=peers).root)
            except (PeerError, OSError) as error:
                outcomes.append(type(error))
        return outcomes

    found = run_ranks(2, work, timeout_s=_TIMEOUT_S, outcomes=True)
    root = root_alone({"w": 1})
    assert found == [[PeerError, PeerError, root], [OSError, OSError, root]]


def test_an_interrupted_rank_lets_the_others_go() -> None:
    class Interrupted(ArrayMemory):
        def read(self, box: Box) -> np.ndarray[Any, Any]:
            raise KeyboardInterrupt

    def bad(rank: int) -> Container:
        source = Interrupted(numbers(900)) if rank == 1 else ArrayMemory(numbers(900))
        return one(TensorItem(Spec("float32", (900,)), source, "numpy", None, over(mesh(1, first=rank), "R")), rank)

    found = first_fails_then_works(3, bad)
    assert [type(error) for error, _ in found] == [PeerError, KeyboardInterrupt, PeerError]
    assert all("rank 1 failed: KeyboardInterrupt" in str(found[rank][0]) for rank in (0, 2))
    assert len({root for _, root in found}) == 1


def test_a_writer_thread_that_fails_on_one_rank_fails_the_commit_on_all() -> None:
    class Full(MemoryStore):
        def open_writer(self, key: str) -> Any:
            raise OSError("no space")

    base = new_store()
    full = Full()
    full.__dict__.update(base.__dict__)

    def work(peers: Peers) -> Any:
        array, placement = numbers(300, 700), over(mesh(2), "S(0)")
        handle = on(full if peers.rank == 1 else base)
        return commit_tree(handle, one(divided(array, placement, peers.rank)), CommitRequest(), peers=peers)

    found = run_ranks(2, work, timeout_s=_TIMEOUT_S, outcomes=True)
    assert isinstance(found[0], PeerError)
    assert "no space" in str(found[0])
    assert "no space" in str(found[1])
    assert not list(base.list("refs/"))
    infos = together(base, 2, lambda rank: one(divided(numbers(300, 700), over(mesh(2), "S(0)"), rank)))
    assert same_bytes(stored(base, infos[0].root)["w"], numbers(300, 700))


def test_a_rank_that_may_not_write_makes_all_raise() -> None:
    store = new_store()

    def work(peers: Peers) -> Any:
        handle = on(store, read_only=peers.rank == 1)
        return commit_tree(handle, state_of({"a": 1}, {}, peers.rank), CommitRequest(), peers=peers)

    found = run_ranks(2, work, timeout_s=_TIMEOUT_S, outcomes=True)
    assert isinstance(found[0], PeerError)
    assert isinstance(found[1], PermissionDeniedError)


def test_ranks_that_fail_after_the_branch_moved_are_told_so() -> None:
    store = new_store()

    def work(peers: Peers) -> Any:
        handle = on(store)
        if peers.rank == 0:
            handle.add_written = _interrupted  # type: ignore[method-assign]
        return commit_tree(handle, state_of({"a": 1}, {}, peers.rank), CommitRequest(), peers=peers)

    found = run_ranks(2, work, timeout_s=_TIMEOUT_S, outcomes=True)
    assert isinstance(found[0], KeyboardInterrupt)
    assert isinstance(found[1], PeerError)
    assert "branch" in str(found[1])


def _interrupted(*args: Any) -> None:
    raise KeyboardInterrupt


def test_a_garbage_collection_that_begins_meanwhile_makes_all_ranks_begin_anew() -> None:
    store, array = new_store(), numbers(2048, 1024)
    split, cut = over(mesh(2), "S(0)"), over(mesh(2), "S(1)")
    items = {"w": array, "v": array[:301, :700].copy()}
    together(store, 2, lambda rank: state_of(items, {"w": split, "v": cut}, rank))
    condemned = tuple(key for key, _ in store.list("packs/"))
    begun: list[int] = []

    class Collected(LocalPieces):
        def read(self, box: Box) -> np.ndarray[Any, Any]:
            if not begun:
                begun.append(1)
                store.put(GC_STATE_KEY, encode_gc_state(GcState(1, "condemned", condemned)))
            return super().read(box)

    def state(rank: int) -> Container:
        made = state_of(items, {"w": split, "v": cut}, rank)
        item = made.children["w"]
        assert isinstance(item, TensorItem)
        source = Collected(array, holdings(array.shape, [split]), rank) if rank == 1 else item.source
        made.children["w"] = TensorItem(item.spec, source, "numpy", None, split)
        return made

    infos = together(store, 2, state)
    assert infos[0].id == infos[1].id
    for key in condemned:
        store.delete(key)
    arrays = stored(store, infos[0].root)
    assert all(same_bytes(arrays[key], items[key]) for key in items)


# --- errors say what is wrong ------------------------------------------------------------------


def test_a_missing_key_of_a_small_divided_tensor_is_named_and_the_group_goes_on() -> None:
    placement = over(mesh(3), "S(0)")
    full, less = {"w": numbers(9)}, {"v": 1}
    found = first_fails_then_works(3, lambda rank: state_of(less if rank == 2 else full, {"w": placement}, rank))
    assert all("w: ranks [2] do not have this key" in str(error) for error, _ in found)


def test_small_divided_tensors_of_different_shapes_are_named_and_the_group_goes_on() -> None:
    placement = over(mesh(2), "S(0)")
    found = first_fails_then_works(2, lambda rank: one(divided(numbers(8 + 4 * rank), placement, rank)))
    assert all("w: rank 0: numpy tensor" in str(error) for error, _ in found)


def test_a_divided_tensor_among_what_each_rank_keeps_is_refused_with_its_key() -> None:
    def state(rank: int) -> Container:
        item = divided(numbers(900), over(mesh(2), "S(0)"), rank)
        return one(Container("ranks", {rank: item}, {"world_size": 2}), "own")

    found = together(new_store(), 2, state)
    assert all(isinstance(error, CkptError) and "own/" in str(error) for error in found)


def test_metrics_that_differ_in_the_sign_of_zero_are_named() -> None:
    store = new_store()

    def work(peers: Peers) -> Any:
        request = CommitRequest(metrics={"loss": -0.0 if peers.rank else 0.0})
        return commit_tree(on(store), state_of({"a": 1}, {}, peers.rank), request, peers=peers)

    found = run_ranks(2, work, timeout_s=_TIMEOUT_S, outcomes=True)
    assert all(isinstance(error, PeerError) and "disagree on the metrics" in str(error) for error in found)


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

    run_ranks(2, work, timeout_s=_TIMEOUT_S)
    sources[1].pieces[0][1][:] += 1  # type: ignore[attr-defined]
    found = run_ranks(2, work, timeout_s=_TIMEOUT_S, outcomes=True)
    assert all(isinstance(error, (FrozenChangedError, PeerError)) and "frozen" in str(error) for error in found)


def test_a_frozen_pattern_may_name_what_each_rank_keeps() -> None:
    store = new_store()

    def work(peers: Peers) -> Any:
        own = Container("ranks", {peers.rank: tensor(numbers(900))}, {"world_size": 2})
        return commit_tree(on(store), one(own, "own"), CommitRequest(frozen="own/*"), peers=peers)

    assert len({getattr(info, "root", info) for info in run_ranks(2, work, timeout_s=_TIMEOUT_S, outcomes=True)}) == 1


def test_frozen_cells_that_move_to_another_rank_are_hashed_there() -> None:
    store, kept = new_store(), [FrozenMemory(), FrozenMemory()]
    w, big = numbers(2048, 1024), numbers(3000, 1024, seed=3)

    def commit_of(items: dict[str, np.ndarray[Any, Any]]) -> str:
        def work(peers: Peers) -> Any:
            children = {name: tensor(array, identity=(name, 1)) for name, array in items.items()}
            request = CommitRequest(frozen="w", frozen_audit=0.0, num_threads=1)
            state = Container("dict", {**children})
            return commit_tree(on(store), state, request, peers=peers, memory=kept[peers.rank])

        return str(run_ranks(2, work, timeout_s=_TIMEOUT_S)[0].root)

    for items in ({"w": w}, {"a": big, "w": w}, {"w": w, "x": big[:7], "y": big[:1999]}):
        assert commit_of(items) == root_alone(items)


# --- what each rank keeps ----------------------------------------------------------------------


def test_equal_values_of_all_ranks_stand_in_the_pack_once() -> None:
    store = new_store()

    def state(rank: int) -> Container:
        own = Container("dict", {"x": tensor(numbers(900)), "inner": state_of({"n": 1}, {}, rank)})
        return one(Container("ranks", {rank: own}, {"world_size": 3}))

    infos = together(store, 3, state)
    handle = on(store)
    handle.sync()
    from cas_ckpt.pack_index import read_pack

    meta = [key for key, _ in store.list("packs/") if key.endswith(".meta")]
    for key in meta:
        digests = [entry.digest for entry in read_pack(store, key).entries]
        assert len(digests) == len(set(digests))
    assert same_bytes(stored(store, infos[0].root)["w/2/x"], numbers(900))


def test_three_hundred_ranks_make_the_node_that_one_process_would_make() -> None:
    def encode(value: Any, key: str) -> bytes:
        return encode_value(value, key=key)

    children: dict[Any, Any] = {rank: state_alone({"position": rank, "text": "x" * 300}) for rank in range(300)}
    alone = Draft(one(Container("ranks", children, {"world_size": 300})), encode_value=encode)
    list(alone.works())
    wanted_nodes, wanted = draft_nodes(alone)
    united = Draft(one(Container("ranks", {}, {"world_size": 300})), encode_value=encode)
    list(united.works())
    made = set()
    for rank in range(300):
        own = one(Container("ranks", {rank: children[rank]}, {"world_size": 300}))
        nodes = OwnValues(own, [("w",)], rank, encode).nodes()[0]
        united.containers[render_key(("w",))].entries.extend(decode_tree(nodes[-1].data).entries)
        made.update(node.digest for node in nodes[:-1])
    nodes, root = draft_nodes(united)
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
        for cell in plan.straddled_cells(rank, 0):
            leaves[rank] += len(cell.leaves_of(rank))
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

    def work(peers: Peers) -> list[str]:
        return diverged_replicas(held, [sources[peers.rank]], peers, share=0.01, seed=b"seed")

    run_ranks(2, work, timeout_s=_TIMEOUT_S)
    assert sources[0].most <= 2 * LEAF_BYTES


def _encode(value: Any, key: str) -> bytes:
    return encode_value(value, key=key)


@pytest.mark.parametrize("split", ["S(0)", None])
def test_tensors_that_are_divided_alike_share_one_account_of_who_holds_what(split: str | None) -> None:
    placement: Placement | None = None if split is None else over(mesh(64), split)
    spec = Spec("float32", (640, 64))
    items = {f"w{at}": TensorItem(spec, ArrayMemory(np.empty(0)), "numpy", None, placement) for at in range(3)}
    described = describe(Container("dict", {**items}), _encode)
    union = unite([(tuple(range(64)), described)], {}, small={})
    assert union.shards["w0"] is union.shards["w1"]


def _skewed() -> tuple[Spec, Placement, int]:
    """Of 64 ranks the first one holds nearly all columns."""
    spec, size = Spec("float32", (512, 128 * 1024)), 64
    edges = [0, *range(128 * 1024 - size + 1, 128 * 1024 + 1)]
    pairs: Iterator[tuple[int, int]] = zip(edges, edges[1:], strict=False)
    boxes = tuple((Box((0, at), (512, end - at)), (rank,)) for rank, (at, end) in enumerate(pairs))
    return spec, BoxPlacement(boxes), size


def test_a_batch_is_bounded_on_every_rank_also_where_one_holds_nearly_all() -> None:
    spec, placement, size = _skewed()
    held = Held("w", spec, grid_for(spec), holdings(spec.shape, [placement]))
    plan = SavePlan([held, *[Held(f"w{at}", spec, held.grid, held.shards) for at in range(16)]], size)
    most = 0
    for batch in range(plan.num_batches):
        cells = plan.straddled_cells(0, batch)
        own = sum(part.num_elements for cell in cells for part, rank in zip(cell.parts, cell.ranks) if rank == 0)  # noqa: B905
        most = max(most, own * 4)
    assert most <= 2 * BATCH_BYTES


def test_boxes_that_follow_no_rule_have_the_root_of_the_whole() -> None:
    array = numbers(90, 80)
    placement = boxes_by_rank(array.shape, [(7, 50), (1, 30)], 3)
    own = [BoxPlacement(tuple(box for box in placement.boxes if rank in box[1])) for rank in range(3)]
    infos = together(new_store(), 3, lambda rank: one(divided(array, own[rank], rank)))
    assert [getattr(info, "root", info) for info in infos] == [root_alone({"w": array})] * 3
