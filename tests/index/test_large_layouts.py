"""A layout that names very many keys goes into the index and out of it some rows at a time."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from cas_ckpt.index import manifests
from cas_ckpt.index.index import Index
from cas_ckpt.objects.layouts import Division, compose_layout, holders_of, layout_node
from tests.divided import mesh, over
from tests.index.layouts_suite import layout_pack

NUM_KEYS = 60_000


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
