"""Which ranks held which region of a commit: what its ranks had when they committed, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection

from cas_ckpt import limits
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import CorruptionError, InvalidInputError, NotFoundError, TooLargeError
from cas_ckpt.index import manifests
from cas_ckpt.layout.holdings import held_by
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.layouts import Division, compose_layout, decode_layout, holders_of, layout_node
from cas_ckpt.objects.nodes import ContainerEntry, Node, TensorEntry, decode_commit, make_node, tree_nodes
from cas_ckpt.objects.spec import Box, BoxPlacement, Placement, Spec
from cas_ckpt.objects.state import Container, ValueItem, parse_key
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.ops.history.shards import ShardRow, shards_of
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.storage.store import Store
from tests.builders import commit, numbers, publish_nodes
from tests.committing import new_store, on
from tests.divided import boxes_by_rank, divided, mesh, over, state_of
from tests.objects.divisions import SHAPE, WORLD, placements
from tests.searches import tries
from tests.thread_peers import run_ranks
from tests.wrapped_stores import CountingStore


def together(store: Store, size: int, state: Callable[[int], Container]) -> CommitInfo:
    """Every rank commits what `state(rank)` gives."""

    def work(peers: Peers) -> CommitInfo:
        with limits(num_threads=1):
            return commit_tree(on(store), state(peers.rank), CommitRequest(), peers=peers)

    made: CommitInfo = run_ranks(size, work, timeout_s=20)[0]
    return made


def committed(size: int, items: Mapping[str, Any], placed: Mapping[str, Placement]) -> RepositoryHandle:
    """A repository in memory whose head holds `items`, divided over `size` ranks."""
    store = new_store()
    together(store, size, lambda rank: state_of(items, placed, rank))
    handle = on(store)
    handle.sync()
    return handle


def rows(handle: RepositoryHandle, *keys: str, **options: Any) -> list[ShardRow]:
    return list(shards_of(handle, "main", keys=keys or None, **options))


def shown(found: list[ShardRow]) -> list[tuple[str, str, str, str]]:
    """(ranks, region, ranks that share its chunks, key) of every row."""
    return [(str(row.ranks), row.region, str(row.shared_with), row.key) for row in found]


# --- of real commits --------------------------------------------------------------------------------


LARGE = {"w": numbers(1500, 700), "b": numbers(700)}
"""Six chunks of 256 rows, and an entry of one chunk."""


def test_a_commit_of_one_process_is_held_by_rank_0() -> None:
    handle = on(new_store())
    commit(handle, LARGE | {"step": 7, "none": numbers(0, 5)})
    assert shown(rows(handle)) == [
        ("0", "0:700", "", "b"), ("0", "0:0,0:5", "", "none"), ("0", "0:1", "", "step"), ("0", "0:1500,0:700", "", "w"),
    ]  # fmt: skip
    assert [(row.num_bytes, row.num_chunks) for row in rows(handle, "w", "b")] == [(2800, 1), (4_200_000, 2)]


def test_rows_over_ranks_share_the_chunks_at_their_borders() -> None:
    handle = committed(4, LARGE, {"w": over(mesh(2, 2), "R", "S(0)")})
    assert shown(rows(handle)) == [
        ("0-3", "0:700", "", "b"),
        ("0,2", "0:750,0:700", "1,3", "w"),
        ("1,3", "750:1500,0:700", "0,2", "w"),
    ]
    assert [(row.num_bytes, row.num_chunks) for row in rows(handle, "w")] == [(2_100_000, 1), (2_100_000, 2)]


def test_one_rank_has_its_own_rows_and_knows_which_replica_it_is() -> None:
    handle = committed(4, LARGE, {"w": over(mesh(2, 2), "R", "S(0)")})
    assert [(row.key, row.region, row.replica) for row in rows(handle, rank=2)] == [
        ("b", "0:700", 2), ("w", "0:750,0:700", 1),
    ]  # fmt: skip
    assert [row.replica for row in rows(handle)] == [None] * 3
    with pytest.raises(InvalidInputError, match="rank 4: .* by 4 ranks: give one from 0 to 3"):
        rows(handle, rank=4)
    with pytest.raises(InvalidInputError, match="rank -1"):
        rows(handle, rank=-1)


def test_who_held_an_entry_whose_key_no_layout_can_name_is_not_guessed() -> None:
    items = {"a": LARGE["b"], "b\ud800": numbers(900)}
    handle = committed(2, items, {"b\ud800": over(mesh(2), "S(0)")})
    assert shown(rows(handle, "a")) == [("0-1", "0:700", "", "a")]
    with pytest.raises(NotFoundError, match="the layout of this commit does not say which ranks held it"):
        rows(handle)
    alone = committed(1, items, {})
    assert {row.key for row in rows(alone)} == {*items}


def test_keys_choose_entries_and_a_key_that_is_not_there_is_named() -> None:
    handle = committed(2, {"model": LARGE}, {"model/w": over(mesh(2), "S(0)")})
    assert {row.key for row in rows(handle, "model/w")} == {"model/w"}
    assert {row.key for row in rows(handle, "model")} == {"model/w", "model/b"}
    with pytest.raises(NotFoundError, match="no entry matches x"):
        shards_of(handle, "main", keys="x")
    with pytest.raises(NotFoundError):
        shards_of(handle, "nothing")


def test_stages_of_a_pipeline_hold_their_own_layers() -> None:
    """Two stages of four ranks, each over a mesh of its own: ranks 0-3, and 4-7."""

    def state(rank: int) -> Container:
        at = rank // 4
        items = {f"layer{at}": {"w": numbers(64, 64, seed=at), "norm": numbers(300, seed=at)}, "step": 1}
        items |= {"head": numbers(300), "lr": 0.5} if at else {}
        grid = mesh(2, 2, names=["dp", "tp"], first=4 * at)
        return state_of(items, {f"layer{at}/w": over(grid, "R", "S(0)")}, rank)

    store = new_store()
    together(store, 8, state)
    handle = on(store)
    handle.sync()
    assert shown(rows(handle)) == [
        ("4-7", "0:300", "", "head"),
        ("0-3", "0:300", "", "layer0/norm"),
        ("0,2", "0:32,0:64", "1,3", "layer0/w"),
        ("1,3", "32:64,0:64", "0,2", "layer0/w"),
        ("4-7", "0:300", "", "layer1/norm"),
        ("4,6", "0:32,0:64", "5,7", "layer1/w"),
        ("5,7", "32:64,0:64", "4,6", "layer1/w"),
        ("4-7", "0:9", "", "lr"),
        ("0-7", "0:1", "", "step"),
    ]


def test_values_of_each_rank_are_held_by_that_rank() -> None:
    def state(rank: int) -> Container:
        own = Container(
            "dict", {"position": ValueItem(rank), "noise": divided(numbers(900), over(mesh(1, first=rank), "R"), rank)}
        )
        return Container("dict", {"loader": Container("ranks", {rank: own}, {"world_size": 3}), "x": ValueItem(1)})

    store = new_store()
    together(store, 3, state)
    handle = on(store)
    handle.sync()
    found = {row.key: str(row.ranks) for row in rows(handle)}
    assert found == {"x": "0-2"} | {f"loader/{at}/{name}": f"{at}" for at in range(3) for name in ("noise", "position")}
    assert [row.key for row in rows(handle, rank=1)] == ["loader/1/noise", "loader/1/position", "x"]


def test_values_of_each_rank_that_one_process_commits_are_its_own() -> None:
    handle = on(new_store())
    own = {rank: ValueItem(rank) for rank in range(3)}
    state = Container("dict", {"loader": Container("ranks", dict(own), {"world_size": 3})})
    commit_tree(handle, state, CommitRequest())
    assert {str(row.ranks) for row in rows(handle)} == {"0"}


def named_by(placement: Placement) -> set[int]:
    if isinstance(placement, BoxPlacement):
        return {rank for _, ranks in placement.boxes for rank in ranks}
    return set(placement.mesh.ranks)


@given(st.lists(placements(), min_size=1, max_size=3), st.booleans())
@settings(max_examples=tries(10, 30), deadline=None)
def test_every_element_is_held_by_those_who_held_it(given_ones: list[Placement], everywhere: bool) -> None:
    """Ranks describe one tensor each by a placement of its own, as jobs with meshes of groups do."""
    array = numbers(*SHAPE)
    by_rank: dict[int, Placement] = {}
    for placement in given_ones:
        for rank in named_by(placement):
            by_rank.setdefault(rank, placement)
    wanted: dict[int, set[Box]] = defaultdict(set)
    for placement in dict.fromkeys(by_rank.values()):
        for rank in range(WORLD):
            wanted[rank] |= {box for box, _ in held_by(rank, SHAPE, placement)}
    whole = [rank for rank in range(WORLD) if rank not in by_rank and everywhere]
    wanted |= {rank: {Box((0, 0), SHAPE)} for rank in whole}
    held = [box for boxes in wanted.values() for box in boxes]
    covered = np.zeros(SHAPE, bool)
    for box in held:
        covered[box.slices] = True
    if not covered.all():
        return  # a state of which something is missing cannot be committed

    def state(rank: int) -> Container:
        if rank in by_rank:
            item = divided(array, by_rank[rank], rank)
            item.source.pieces = [(box, array[box.slices]) for box in wanted[rank]]  # type: ignore[attr-defined]
            return Container("dict", {"w": item})
        return state_of({"w": array} if rank in whole else {}, {}, rank)

    store = new_store()
    together(store, WORLD, state)
    handle = on(store)
    handle.sync()
    found: dict[int, set[Box]] = defaultdict(set)
    for row in rows(handle):
        for rank in row.ranks:
            found[rank].add(Box(row.offsets, row.sizes))
    assert found == {rank: boxes for rank, boxes in wanted.items() if boxes}


def test_boxes_that_follow_no_rule_are_held_as_they_were() -> None:
    handle = committed(3, LARGE, {"w": boxes_by_rank((1500, 700), [(1400,), (333,)], 3)})
    assert shown(rows(handle, "w")) == [
        ("0", "0:1400,0:333", "1-2", "w"),
        ("1", "0:1400,333:700", "0,2", "w"),
        ("2", "1400:1500,0:333", "0-1", "w"),
        ("0", "1400:1500,333:700", "1-2", "w"),
    ]


# --- of the index alone -------------------------------------------------------------------------------


def test_the_index_and_the_node_say_the_same() -> None:
    placed = {"w": over(mesh(2, 2, names=["dp", "tp"]), "S(0)", "S(1)"), "b": over(mesh(4), "R")}
    handle = committed(4, LARGE, placed)
    head = decode_commit(handle.read_node(ObjectKind.COMMIT, resolve(handle, "main")))
    node = holders_of(decode_layout(handle.read_node(ObjectKind.LAYOUT, head.layout)))
    assert handle.index.read(manifests.read_holders, head.layout) == node
    before = rows(handle)
    with handle.index.writing() as connection:
        connection.exec_driver_sql("DELETE FROM t_layouts")
    assert rows(handle) == before


def test_no_pack_is_read() -> None:
    store = CountingStore(new_store())
    together(store, 2, lambda rank: state_of(LARGE, {"w": over(mesh(2), "S(0)")}, rank))
    handle = on(store)
    handle.sync()
    store.reset()
    assert len(rows(handle)) == 3
    assert [store.tally(method).calls for method in ("get_range", "get_tail", "read_into")] == [0, 0, 0]


def test_a_commit_that_another_process_made_is_found() -> None:
    store = new_store()
    handle = on(store)
    commit(handle, {"w": numbers(3)})
    together(store, 2, lambda rank: state_of(LARGE, {"w": over(mesh(2), "S(0)")}, rank))
    assert len(rows(handle)) == 3


def test_rows_come_as_they_are_asked_for_and_tensors_that_are_alike_are_looked_at_once() -> None:
    """1,024 ranks and 3,402 tensors have 3.5 million rows; the first comes before the last is made."""
    grid = mesh(16, 64, names=("dp", "tp"))
    keys = [f"layers/{at}" for at in range(3402)]
    layout = compose_layout(dict.fromkeys(keys, Division((over(grid, "S(0)", "S(1)"),))), world_size=1024)
    handle = on(new_store())
    publish(handle, keys, layout_node(layout))
    found = shards_of(handle, "main")
    first = next(found)
    assert (str(first.ranks), first.region, first.num_bytes) == ("0", "0:4,0:2", 32)
    assert sum(1 for _ in islice(found, 5000)) == 5000
    of_one = list(shards_of(handle, "main", rank=1023))
    assert len(of_one) == 3402
    assert {row.region for row in of_one} == {"60:64,126:128"}


def test_a_key_that_no_database_can_hold_is_found_all_the_same() -> None:
    key, handle = "layers/x\0y", on(new_store())
    layout = compose_layout({key: Division((over(mesh(2), "S(0)"),))}, world_size=2)
    publish(handle, [key], layout_node(layout))
    assert shown(rows(handle)) == [("0", "0:32,0:128", "1", key), ("1", "32:64,0:128", "0", key)]


# --- of layouts that do not fit ------------------------------------------------------------------------


def publish(handle: RepositoryHandle, keys: Sequence[str], layout: Node) -> None:
    """Commit float32[64, 128] under each of `keys`, in one invented chunk, under this layout."""
    spec, chunk = Spec("float32", (64, 128)), Digest(bytes(32))
    below = [TensorEntry(parse_key(key)[-1], spec, "torch", chunk, None, single=True) for key in keys]
    layers = tree_nodes("dict", None, below)
    tree = [*layers, *tree_nodes("dict", None, [ContainerEntry("layers", layers[-1].digest)])]
    publish_nodes(handle, tree, layout)


PLAIN: dict[str, Any] = {"world_size": 4, "mesh": [["dp", 4]], "placements": {}, "aliases": []}


def with_layout(**changes: Any) -> RepositoryHandle:
    handle = on(new_store())
    publish(handle, ["layers/0"], make_node(ObjectKind.LAYOUT, PLAIN | changes))
    return handle


@pytest.mark.parametrize(
    "changes",
    [
        {"placements": {"layers/0": ["S(2)"]}},
        {"placements": {"layers/0": ["SS(0,0)"]}},
        {"placements": {"layers/0": ["@0"]}, "divisions": [[["boxes", [[[0], [64], [0, 1, 1]]]]]]},
        {"placements": {"layers/0": ["@0"]}, "divisions": [[["boxes", [[[0, 0], [65, 128], [0, 1, 1]]]]]]},
        {"placements": {"layers/0": ["@0"]}, "divisions": [[["boxes", [[[1 << 62, 0], [1, 1], [0, 1, 1]]]]]]},
        {"world_size": 1 << 60},
        {"mesh": [["dp", 5]]},
        {"more": 1},
    ],
    ids=str,
)
def test_a_layout_that_does_not_fit_its_state_is_an_error(changes: dict[str, Any]) -> None:
    assert shown(rows(with_layout(placements={"layers/0": ["S(0)"]})))[3] == ("3", "48:64,0:128", "0-2", "layers/0")
    with pytest.raises(CorruptionError):
        rows(with_layout(**changes))


@pytest.mark.parametrize("texts", [["@tp=2", "S(0)"], ["boxes"], ["S(0)", "R"], ["Partial"], []], ids=str)
def test_a_layout_that_does_not_say_who_held_a_tensor_is_not_guessed(texts: list[str]) -> None:
    handle = with_layout(placements={"layers/0": texts})
    with pytest.raises(NotFoundError, match="layers/0: the layout of this commit does not say"):
        rows(handle)
    handle.index.write(layouts_gone)
    with pytest.raises(NotFoundError, match="layers/0: the layout of this commit does not say"):
        rows(handle)


def layouts_gone(connection: Connection) -> None:
    connection.exec_driver_sql("DELETE FROM t_layouts")


def test_what_a_layout_merely_claims_is_not_made() -> None:
    boxes = [[[at % 64, 0], [1, 128], [0, 1 << 20, 1]] for at in range(64)]
    changes = {"placements": {"layers/0": ["@0"]}, "divisions": [[["boxes", boxes]]], "world_size": 1 << 20}
    with pytest.raises(TooLargeError):
        rows(with_layout(**changes))


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE t_division_axes SET placement = 'x'",
        "DELETE FROM t_division_axes",
        "UPDATE t_divisions SET mesh = 7",
        "UPDATE t_placements SET division_id = 9",
        "UPDATE t_layout_meshes SET ranks = '0-9'",
        "UPDATE t_layout_meshes SET ranks = '0-1,0-1'",
        "UPDATE t_layout_axes SET size = 3",
        "DELETE FROM t_layout_axes",
        "DELETE FROM t_divisions",
        "UPDATE t_layouts SET num_divisions = 0",
    ],
)
def test_rows_that_were_damaged_are_an_error(damage: str) -> None:
    handle = with_layout(placements={"layers/0": ["S(0)"]})
    assert len(rows(handle)) == 4
    with handle.index.writing() as connection:
        assert connection.exec_driver_sql(damage).rowcount
    with pytest.raises(CorruptionError):
        rows(handle)
