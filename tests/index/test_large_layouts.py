"""Rows of which there are very many go into the index and out of it some at a time."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cas_ckpt.index import contents, manifests, remembered, usage
from cas_ckpt.index.index import Index
from cas_ckpt.objects.layouts import Division, compose_layout, holders_of, layout_node
from tests.divided import mesh, over
from tests.index.building import commit_row, data_pack, digest, meta_pack
from tests.index.layouts_suite import layout_pack
from tests.index.plans_suite import SHAPES, loads, plan

NUM_KEYS = 60_000


def _bytes_beside(ask: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """The answer, and how many bytes more than it takes were in memory meanwhile."""
    tracemalloc.start()
    try:
        answer = ask(*args)
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return answer, most - held


def test_the_ids_of_all_chunks_are_read_one_by_one(tmp_path: Path) -> None:
    """As rows they would take as much as the answer once more."""
    chunks = range(15_000)
    with Index.open(tmp_path / "index", store_id="store") as index:
        index.add_packs([data_pack("d", chunks)])
        found, beside = _bytes_beside(index.read, contents.chunk_digests)
        assert found == set(map(digest, chunks))
        assert beside < 10 * len(chunks)


def test_parents_that_many_chunks_have_in_common_are_in_memory_once(tmp_path: Path) -> None:
    """What hardly changes is in every commit: some hundred chunks have as many parents each as there are commits."""
    chunks = range(200)
    nodes: dict[object, Any] = {f"node {at}": chunks for at in range(400)} | {"root of a": ["node 0"]}
    with Index.open(tmp_path / "index", store_id="store") as index:
        index.add_packs([data_pack("d", chunks), meta_pack("m", nodes, commit=commit_row("a"))])
        found, beside = _bytes_beside(index.read, usage.nearest, list(map(digest, chunks)))
        assert found == [(digest("a"), len(chunks), 1000 * len(chunks))]
        assert beside < 500 * len(nodes)


def test_a_plan_of_many_ranks_is_looked_for_once_where_plans_may_be_incomplete(tmp_path: Path) -> None:
    with Index.open(tmp_path / "index", store_id="store") as index:
        index.write(remembered.write_plan, plan("root", "dp=20000", 20_000), loads(20_000), SHAPES)
        assert _bytes_beside(index.write, remembered.drop_incomplete)[1] < 200_000
        assert len(index.read(remembered.read_plans)) == 1


@pytest.mark.slow
def test_rows_of_many_keys_are_never_in_memory_together(tmp_path: Path) -> None:
    """A million keys took 5 s to add, 3 s to read, and no more memory than they have in the node."""
    ways = [Division((over(mesh(8), "S(0)"),)), Division((), (1, 2))]
    layout = compose_layout({f"layers/{at}": ways[at % 2] for at in range(NUM_KEYS)}, world_size=8)
    record = layout_pack("m", [layout_node(layout)])
    with Index.open(tmp_path / "index", store_id="store") as index:
        tracemalloc.start()
        try:
            index.add_packs([record])
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < 100 * NUM_KEYS  # as rows they take 250 bytes each
        assert index.read(manifests.read_holders, record.contents[0][0]) == holders_of(layout)
        assert index.drop_packs(["m"]) == 1
