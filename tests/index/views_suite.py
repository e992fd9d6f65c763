"""The views, whatever the database: the same columns, and in them what the verbs say of the same repository."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import read_pack
from cas_ckpt.core.records import Lineage
from cas_ckpt.errors import TooLargeError
from cas_ckpt.index import contents, integrity, remembered, usage
from cas_ckpt.index.index import Index
from cas_ckpt.index.integrity import Scrub
from cas_ckpt.index.manifests import kept_data
from cas_ckpt.index.query import Answer, QueryLimits, run_query
from cas_ckpt.index.rows import PackRecord, RefState
from cas_ckpt.index.views import MOST_CONTAINERS, VIEWS
from cas_ckpt.objects.layouts import Division, compose_layout, layout_node
from cas_ckpt.objects.nodes import ValueEntry
from cas_ckpt.objects.pack import PACK_PREFIX, PackKind
from cas_ckpt.objects.spec import Box, BoxPlacement, Mesh
from cas_ckpt.objects.state import Container
from cas_ckpt.objects.values import encode_value
from cas_ckpt.ops.history.find import list_commit
from cas_ckpt.ops.history.log import log_commits
from cas_ckpt.ops.history.usage import usage_rows
from cas_ckpt.ops.refs import create_branch, create_pin, create_tag
from cas_ckpt.signing import sign
from tests.builders import commit, doubling_nodes, numbers, state, tensor
from tests.committing import new_store, on
from tests.divided import mesh, over
from tests.index.building import commit_row, digest, extent, meta_pack
from tests.index.layouts_suite import layout_pack
from tests.index.plans_suite import SHAPES, loads, plan
from tests.index.restores_suite import restore
from tests.index.tree_states import pack_of
from tests.signing.keys import key_file

LIMITS = QueryLimits(100_000, 1 << 26, 20.0)

COLUMNS = {
    "about": "views_version integer, schema_revision text, store_id text",
    "commits": "commit_id text, commit_no integer, root_id text, root_no integer, layout_id text, layout_no integer, "
    "parent_id text, message text, author text, time text, time_s float, step integer, metrics text, "
    "world_size integer, mesh text, total_bytes integer, new_bytes integer, stored_bytes integer, num_entries integer, "
    "num_tensors integer, num_chunks integer, num_new_chunks integer, continued_from text, is_forgotten integer, "
    "meta text, provenance text, signed_by text",
    "completeness": "commit_id text, commit_no integer, num_missing integer",
    "parents": "commit_id text, commit_no integer, position integer, parent_id text, parent_no integer",
    "refs": "name text, kind text, full_name text, commit_id text, commit_no integer, message text, reason text",
    "reflog": "name text, kind text, full_name text, position integer, number integer, old_id text, old_no integer, "
    "new_id text, new_no integer, action text, author text, time text, time_s float",
    "history": "name text, kind text, commit_id text, commit_no integer",
    "metrics": "commit_id text, commit_no integer, name text, value float, is_nan integer",
    "lineage": "commit_id text, commit_no integer, position integer, kind text, target_id text, target_no integer",
    "entries": "commit_id text, commit_no integer, key text, kind text, dtype text, shape text, num_bytes integer, "
    "num_chunks integer, object_id text, object_no integer, content text, value text",
    "changes": "commit_id text, commit_no integer, changed integer, new_entries integer, gone_entries integer",
    "key_changes": "commit_id text, commit_no integer, key text, change text",
    "tensors": "object_id text, object_no integer, dtype text, shape text, num_dims integer, num_bytes integer, "
    "num_chunks integer, cell text",
    "chunks": "object_id text, object_no integer, chunk_id text, chunk_no integer, num_bytes integer, "
    "stored_bytes integer, num_packs integer",
    "holders": "object_id text, object_no integer, commit_id text, commit_no integer",
    "gained": "commit_id text, commit_no integer, object_id text, object_no integer, num_bytes integer",
    "objects": "object_id text, object_no integer, kind text, num_bytes integer, stored_bytes integer, "
    "num_packs integer",
    "locations": "object_id text, object_no integer, kind text, pack text, begins_at integer, num_bytes integer, "
    "stored_bytes integer, first_leaf integer, num_leaves integer, encoding text",
    "packs": "pack text, pack_no integer, kind text, num_bytes integer, num_entries integer, seen text, seen_s float, "
    "read text, read_s float, damage text",
    "layouts": "layout_id text, layout_no integer, world_size integer, mesh text, num_meshes integer, num_keys integer",
    "layout_axes": "layout_id text, layout_no integer, mesh integer, axis integer, name text, size integer",
    "placements": "layout_id text, layout_no integer, key text, position integer, kind text, num_ranks integer, "
    "num_replicas integer, mesh integer, axis integer, name text, size integer, placement text, dim integer, "
    "stride integer",
    "shards": "layout_id text, layout_no integer, key text, position integer, rank integer, kind text, axis integer, "
    "name text, coordinate integer, dim integer, part integer, num_parts integer, offsets text, sizes text",
    "ties": "layout_id text, layout_no integer, tie integer, key text",
    "plans": "plan_no integer, root_id text, root_no integer, mesh text, world_size integer, rules text, "
    "num_tensors integer, num_chunks integer, chunk_bytes integer, wanted_bytes integer, read_bytes integer, "
    "sent_bytes integer, most_read_bytes integer, most_sent_bytes integer, most_received_bytes integer, "
    "planner_version integer, made text, made_s float, wants text",
    "plan_ranks": "plan_no integer, rank integer, read_bytes integer, num_requests integer, sent_bytes integer, "
    "received_bytes integer, metadata_bytes integer, num_straddled integer",
    "restores": "restore_no integer, commit_id text, commit_no integer, root_id text, verb text, mesh text, "
    "world_size integer, started text, started_s float, seconds float, num_bytes integer, author text, host text, "
    "is_whole integer, error text, wants text",
    "branch_bytes": "name text, num_bytes integer, unique_bytes integer, shared_bytes integer",
}
"""The views of version 1. What is here stays: a later version adds columns behind these, and views."""

TYPES = {"text": str, "integer": int, "float": float}

NOT_KNOWN = {("restores", "commit_no"), ("plans", "root_no"), ("commits", "continued_from")}
"""Null in the rows below: they are of commits and states that are nowhere."""

NAMES = [
    "it's",
    'say "x"',
    "back\\slash",
    "new\nline",
    "tab\t",
    "å∫ç漢字🎉",
    "a/b",
    "~",
    "",
    "12",
    7,
    "%s :x $1",
    "[0]",
    "\x7f",
]


@dataclass(frozen=True)
class Sample:
    """A repository with a bit of everything, and its packs as the index takes them in."""

    handle: RepositoryHandle
    records: list[PackRecord]


@cache
def sample() -> Sample:
    handle = on(new_store())
    many = {f"layer {number}": numbers(20, 20, seed=number % 3) for number in range(700)}
    sparse = Container(
        "sparse_coo",
        {"indices": tensor(np.zeros((2, 300), "int64")), "values": tensor(numbers(300))},
        {"shape": [9, 9]},
    )
    odd = {name: numbers(3, seed=at) for at, name in enumerate(NAMES)}
    base = {
        "many": state(many), "sparse": sparse, "odd": odd, "step": 1, "large": numbers(1200, 1200), "empty": {},
        "long": "x" * 5000, "list": Container("list", {0: state({"w": numbers(500)}), 1: tensor(numbers(2, 3))}),
        "torch": tensor(numbers(400, dtype="float64"), flavor="torch"),
        "structured": Container("structured", {"items": tensor(np.zeros((40, 16), "uint8"))}, {"descr": "x"}),
    }  # fmt: skip
    first = commit(handle, base, message="first", step=1, metrics={"loss": 2.5, "acc": 0.1}, author="ann")
    changed = base | {"large": numbers(1200, 1200, seed=9), "step": 2}
    commit(handle, changed, message="second\nline", step=2, metrics={"loss": 1.5})
    create_branch(handle, "ft", start="main~1")
    commit(
        handle, base | {"adapter": numbers(100, 100, seed=5)}, branch="ft", parents=("main",),
        lineage=(Lineage("fine-tune-of", first.id), Lineage("merged-from", "ab" * 32)),
    )  # fmt: skip
    create_tag(handle, "v1", first.id)
    create_pin(handle, "main", name="keep")
    records = [read_pack(handle.store, key) for key, _ in handle.store.list(PACK_PREFIX)]
    return Sample(handle, records)


def filled(index: Index) -> Index:
    """`index` with the rows of the sample."""
    index.add_packs(sample().records)
    index.write(remembered.write_refs, sample().handle.index.read(remembered.read_refs).values())
    return index


def ask(index: Index, query: str, **parameters: Any) -> Answer:
    return run_query(index, query, parameters, LIMITS)


def rows(index: Index, query: str, **parameters: Any) -> list[tuple[Any, ...]]:
    return ask(index, query, **parameters).rows


class ViewTests:
    def test_the_columns_of_the_views_stay_as_they_are(self, index: Index) -> None:
        declared = {view.name: ", ".join(f"{each.name} {each.kind}" for each in view.columns) for view in VIEWS}
        assert declared == COLUMNS
        for name, columns in COLUMNS.items():
            there = ask(index, f"SELECT * FROM {name} WHERE 1 = 0").columns
            assert list(there) == [column.split()[0] for column in columns.split(", ")]

    def test_values_are_of_the_kinds_that_columns_say(self, index: Index) -> None:
        with_everything(filled(index))
        for view in VIEWS:
            found = rows(index, f"SELECT * FROM {view.name}")
            assert found, view.name
            for at, column in enumerate(view.columns):
                values = [row[at] for row in found if row[at] is not None]
                assert values or (view.name, column.name) in NOT_KNOWN, (view.name, column.name)
                assert {type(value) for value in values} <= {TYPES[column.kind]}, (view.name, column.name)

    def test_the_entries_of_each_commit_are_those_that_ls_lists(self, index: Index) -> None:
        filled(index)
        handle = sample().handle
        for revision in ("main", "main~1", "ft"):
            listed = [
                (each.key, each.kind, each.dtype, each.shape, each.num_bytes) for each in list_commit(handle, revision)
            ]
            found = [
                (key, kind, dtype, None if shape is None else tuple(json.loads(shape)), num_bytes)
                for key, kind, dtype, shape, num_bytes in rows(
                    index,
                    "SELECT key, kind, dtype, shape, num_bytes FROM entries WHERE commit_id = :commit",
                    commit=handle_commit(revision),
                )
            ]
            composite = {"sparse": (9, 9)}  # their shape is in what only Python reads
            listed = [
                (key, kind, dtype, None if key in composite else shape, size)
                for key, kind, dtype, shape, size in listed
            ]
            assert sorted(found) == sorted(listed)
            assert len(found) > 700

    def test_entries_of_a_state_that_doubles_end_the_query_before_they_fill_memory(self, index: Index) -> None:
        entries = next(view for view in VIEWS if view.name == "entries")

        def make(connection: Connection) -> None:
            """The view as it is, but for a lower bound: to reach the real one takes seconds."""
            text = entries.text(connection.dialect.name).replace("VIEW entries", "VIEW some_entries")
            assert str(MOST_CONTAINERS) in text
            text = text.replace(str(MOST_CONTAINERS + 1), "1001").replace(str(MOST_CONTAINERS), "1000")
            connection.exec_driver_sql(text, execution_options={"no_parameters": True})

        index.write(make)
        for name, depth in (("small", 8), ("large", 40)):
            nodes = doubling_nodes(depth, ValueEntry("x", b"\xc0"))
            row = commit_row(name, root=nodes[-1].digest)
            index.add_packs([pack_of(name, nodes, [row])])
        query = "SELECT count(*), count(DISTINCT e.key) FROM commits c JOIN some_entries e USING (commit_no)"
        assert rows(index, f"{query} WHERE c.message = 'small'") == [(256, 256)]
        with pytest.raises(TooLargeError, match="sql: a state of more than 1000 containers, .*, has no entries here$"):
            rows(index, f"{query} WHERE c.message = 'large'")
        index.write(lambda connection: connection.exec_driver_sql("DROP VIEW some_entries"))

    def test_a_key_reads_the_same_in_every_script(self, index: Index) -> None:
        filled(index)
        query = "SELECT key FROM refs r JOIN entries e USING (commit_no) WHERE r.name = 'main' AND key LIKE :key"
        keys = {key for (key,) in rows(index, query, key="odd/%")}
        assert keys == {entry.key for entry in list_commit(sample().handle, "main", keys="odd")}
        assert {"odd/it's", "odd/new\nline", "odd/å∫ç漢字🎉", "odd/~=12", "odd/7", "odd/~="} <= keys

    def test_what_changed_between_two_commits_follows_from_content(self, index: Index) -> None:
        filled(index)
        query = """
            WITH a AS (SELECT key, content FROM refs r JOIN entries e USING (commit_no) WHERE r.name = 'v1'),
                b AS (SELECT key, content FROM refs r JOIN entries e USING (commit_no) WHERE r.name = 'main')
            SELECT key FROM a JOIN b USING (key) WHERE a.content <> b.content ORDER BY key
        """
        assert rows(index, query) == [("large",), ("step",)]

    def test_refs_have_short_names_and_those_that_were_deleted_are_gone(self, index: Index) -> None:
        filled(index)
        query = "SELECT name, kind, full_name, commit_id FROM refs ORDER BY kind, name"
        main, first, ft = map(handle_commit, ("main", "main~1", "ft"))
        assert rows(index, query) == [
            ("ft", "branch", "refs/heads/ft", ft),
            ("main", "branch", "refs/heads/main", main),
            ("keep", "pin", "refs/pins/keep", main),
            ("v1", "tag", "refs/tags/v1", first),
        ]
        gone = index.read(remembered.read_refs)["refs/tags/v1.ref"]._replace(target=b"")
        index.write(remembered.write_refs, [gone])
        assert rows(index, "SELECT name FROM refs WHERE kind = 'tag'") == []

    def test_the_history_of_a_ref_is_its_log(self, index: Index) -> None:
        filled(index)
        for ref in ("main", "ft", "v1"):
            found = rows(index, "SELECT commit_id FROM history WHERE name = :ref", ref=ref)
            assert sorted(found) == sorted((row.id,) for row in log_commits(sample().handle, [ref]))

    def test_commits_say_what_the_log_says(self, index: Index) -> None:
        filled(index)
        query = "SELECT commit_id, root_id, message, author, time, time_s, step, total_bytes, num_chunks FROM commits"
        found = {row[0]: row[1:] for row in rows(index, query)}
        logged = list(log_commits(sample().handle, all_refs=True))
        assert len(found) == len(logged) == 3
        for info in logged:
            stats, time_s = info.stats, pytest.approx(info.time_s, abs=1e-5)
            assert found[info.id] == (
                info.root, info.message, info.author, f"{info.time:%Y-%m-%d %H:%M:%S}", time_s, info.step,
                stats.total_bytes, stats.num_chunks,
            )  # fmt: skip

    @pytest.mark.parametrize("time_us", [-1, 2**63 - 1, -(2**63), 253_402_300_800_000_000])
    def test_a_time_that_no_calendar_has_is_a_number_alone(self, index: Index, time_us: int) -> None:
        index.add_packs([meta_pack("m", {}, commit=commit_row("c", time_us=time_us))])
        assert rows(index, "SELECT time, time_s FROM commits") == [(None, time_us / 1e6)]

    @pytest.mark.parametrize(
        "name", ['new_bytes":7,"', '{"new_bytes', ',"new_bytes', 'x"new_bytes', "\ud800", "\0", "new_bytes"]
    )
    def test_stats_of_any_names_are_read(self, index: Index, name: str) -> None:
        stats = {name: 1, "new_bytes": 2**63 - 1, "num_chunks": -(2**63), "stored_bytes": 10**18}
        index.add_packs([meta_pack("m", {}, commit=commit_row("c", stats=stats))])
        query = "SELECT new_bytes, num_chunks, stored_bytes, total_bytes FROM commits"
        assert rows(index, query) == [(2**63 - 1, -(2**63), 10**18, None)]

    def test_the_first_commit_of_a_history_has_no_parent(self, index: Index) -> None:
        filled(index)
        query = "SELECT commit_id FROM commits WHERE parent_id IS NULL"
        assert rows(index, query) == [(handle_commit("main~1"),)]

    def test_what_a_commit_gained_is_what_its_first_parent_has_not(self, index: Index) -> None:
        filled(index)
        found: dict[str, set[str]] = {}
        for commit_id, object_id in rows(index, "SELECT commit_id, object_id FROM gained"):
            assert object_id not in found.setdefault(commit_id, set())
            found[commit_id].add(object_id)
        edges = {parent: children for record in sample().records for parent, children in record.edges}

        def below(node: bytes) -> set[str]:
            return {node.hex()}.union(*map(below, edges.get(node, ())))

        known = {row.digest: row for record in sample().records for row in record.commits}
        assert found == {
            row.digest.hex(): below(row.root) - (below(known[row.parents[0]].root) if row.parents else set())
            for row in known.values()
        }

    def test_values_are_read_as_people_write_them(self, index: Index) -> None:
        values = {
            "step": 500, "lr": 1e-3, "name": "it's", "fast": True, "none": None, "nan": float("nan"), "pair": [1, "é"],
            "raw": b"ab", "set": {1}, "long": "x" * 16, "sixteen": "x" * 15, "inline": "é" * 510, "chunk": "é" * 520,
            "betas": (0.9, float("inf")), "config": [{"b": "x" * 20, 1: [b"y"]}],
            "path": PurePosixPath("/data/long/name"), "hash": "xxxxxxxxxxxxxxxxx9927",
            "as the hash": [25, 91, 89, 94, -5, -9, -7, 65, 47, -27, 97, -20, 10, 124, -9],
        }  # fmt: skip
        handle = on(new_store())
        commit(handle, values | {"w": tensor(numbers(2))})
        index.add_packs([read_pack(handle.store, key) for key, _ in handle.store.list(PACK_PREFIX)])
        assert dict(rows(index, "SELECT key, value FROM entries")) == {
            "step": "500", "lr": "0.001", "name": "it's", "fast": "true", "none": "null", "nan": "nan",
            "pair": '[1, "é"]', "raw": None, "set": "[1]", "long": "x" * 16, "sixteen": "x" * 15, "w": None,
            "inline": "é" * 510, "chunk": None, "betas": '[0.9, "inf"]',
            "config": f'[{{"1": ["b\'y\'"], "b": "{"x" * 20}"}}]', "path": "/data/long/name",
            "hash": values["hash"], "as the hash": str(values["as the hash"]),
        }  # fmt: skip
        assert kept_data(encode_value(values["hash"], key="")) == encode_value(values["as the hash"], key="")
        with index.writing() as connection:
            assert integrity.differences(connection, [read_pack(handle.store, key) for key in index.packs()]) == {}

    def test_parents_metrics_and_lineage_are_rows(self, index: Index) -> None:
        filled(index)
        main, first, ft = map(handle_commit, ("main", "main~1", "ft"))
        query = "SELECT position, parent_id FROM parents WHERE commit_id = :c ORDER BY position"
        assert rows(index, query, c=ft) == [(0, first), (1, main)]
        best = "SELECT commit_id, value FROM metrics WHERE name = 'loss' ORDER BY value LIMIT 1"
        assert rows(index, best) == [(main, 1.5)]
        query = "SELECT kind, target_id, target_no IS NULL FROM lineage WHERE commit_id = :c ORDER BY position"
        assert rows(index, query, c=ft) == [("fine-tune-of", first, 0), ("merged-from", "ab" * 32, 1)]

    def test_the_holders_of_a_tensor_are_the_commits_that_have_it(self, index: Index) -> None:
        filled(index)
        query = (
            "SELECT object_no, object_id FROM refs r JOIN entries e USING (commit_no) "
            "WHERE r.name = :r AND key = 'large'"
        )
        for ref, expected in (("main", {"main"}), ("v1", {"main~1", "ft"})):
            ((number, object_id),) = rows(index, query, r=ref)
            found = {row[0] for row in rows(index, "SELECT commit_id FROM holders WHERE object_no = :n", n=number)}
            assert found == {row.hex() for row in index.read(usage.commits_holding, bytes.fromhex(object_id))}
            assert found == set(map(handle_commit, expected))

    def test_the_chunks_of_a_tensor_are_all_that_it_refers_to(self, index: Index) -> None:
        filled(index)
        query = """
            SELECT e.num_chunks, e.num_bytes, count(*), sum(c.num_bytes), min(c.num_packs), max(t.num_chunks)
            FROM refs r JOIN entries e USING (commit_no) JOIN chunks c ON c.object_no = e.object_no
            JOIN tensors t ON t.object_no = e.object_no
            WHERE r.name = 'main' AND e.key = :key GROUP BY e.num_chunks, e.num_bytes
        """
        for key, num_chunks, num_bytes in (("large", 4, 1200 * 1200 * 4), ("list/0/w", 1, 2000)):
            assert rows(index, query, key=key) == [(num_chunks, num_bytes, num_chunks, num_bytes, 1, num_chunks)]

    def test_stored_bytes_are_those_of_the_packs(self, index: Index) -> None:
        filled(index)
        ((stored, copies),) = rows(index, "SELECT sum(stored_bytes), max(num_packs) FROM objects")
        assert rows(index, "SELECT sum(stored_bytes) FROM locations") == [(stored,)]
        ((packs, entries),) = rows(index, "SELECT sum(num_bytes), sum(num_entries) FROM packs")
        assert stored < packs == sum(index.packs().values())
        assert (copies, entries) == (1, sum(len(record.entries) for record in sample().records))

    def test_the_bytes_of_branches_are_those_of_du(self, index: Index) -> None:
        filled(index)
        found = {row[0]: row[1:] for row in rows(index, "SELECT * FROM branch_bytes")}
        told = {row.name: (row.unique_bytes, row.shared_bytes) for row in usage_rows(sample().handle, "branch")}
        assert {name: values[1:] for name, values in found.items()} == told
        assert found["ft"][0] == sum(told["ft"])

    def test_a_commit_lacks_what_was_in_a_pack_that_is_gone(self, index: Index) -> None:
        filled(index)
        query = "SELECT num_missing FROM completeness WHERE commit_id = :c"
        main = handle_commit("main")
        assert rows(index, query, c=main) == [(0,)]
        located = (
            "SELECT pack FROM refs r JOIN entries e USING (commit_no) JOIN chunks c ON c.object_no = e.object_no "
            "JOIN locations l ON l.object_no = c.chunk_no WHERE r.name = 'main' AND e.key = 'large'"
        )
        index.drop_packs({pack for (pack,) in rows(index, located)})
        assert rows(index, query, c=main)[0][0] >= 2
        assert index.read(contents.chunks_at_most) > 0

    @pytest.mark.parametrize(
        ("parts", "is_missing"),
        [
            ([(0, 4)], False), ([(0, 2), (2, 2)], False), ([(0, 3), (1, 3)], False), ([(0, 2), (0, 4)], False),
            ([(1, 1), (0, 1), (3, 1), (2, 1)], False), ([(0, 2), (3, 1)], True), ([(1, 3)], True), ([(0, 3)], True),
            ([(0, 1), (2, 2), (0, 2)], False), ([], True),
        ],
    )  # fmt: skip
    def test_a_chunk_in_parts_is_missing_where_they_are_not_all_of_it(
        self, index: Index, parts: list[tuple[int, int]], is_missing: bool
    ) -> None:
        index.add_packs([meta_pack("m", {"tree": ["x"]}, commit=commit_row("c", root=digest("tree")))])
        for at, (first, count) in enumerate(parts):
            extents = [extent("x", first_leaf=first, num_leaves=count, leaf_bytes=300)]  # the last leaf is shorter
            index.add_packs([PackRecord(f"p{at}", PackKind.DATA, 10_000, extents)])
        assert rows(index, "SELECT num_missing FROM completeness") == [(int(is_missing),)]

    def test_a_commit_without_its_layout_lacks_something(self, index: Index) -> None:
        node = layout_node(compose_layout({}, world_size=2))
        row = commit_row("c", root=digest("tree"), layout=node.digest)
        index.add_packs([meta_pack("m", {"tree": []}, commit=row)])
        assert rows(index, "SELECT num_missing FROM completeness") == [(1,)]
        index.add_packs([layout_pack("l", [node])])
        assert rows(index, "SELECT num_missing FROM completeness") == [(0,)]

    def test_layouts_and_what_they_say_of_keys_are_rows(self, index: Index) -> None:
        grid = mesh(4, 2, names=("dp", "tp"))
        layout = compose_layout(
            {"wq": Division((over(grid, "R", "S(1)"),)), "head": Division((), (0, 5))}, world_size=8
        )
        index.add_packs([layout_pack("l", [layout_node(layout)], ["c"])])
        query = (
            "SELECT c.message FROM commits c JOIN layout_axes a USING (layout_no) WHERE c.world_size = 8 "
            "AND a.name = :axis AND a.size = 2"
        )
        assert rows(index, query, axis="tp") == [("c",)]
        assert rows(index, query, axis="dp") == []
        assert rows(index, "SELECT mesh, num_keys FROM layouts") == [("dp=4,tp=2", 2)]
        query = "SELECT kind, num_replicas, name, placement, dim FROM placements WHERE key = :key ORDER BY axis"
        assert rows(index, query, key="wq") == [("mesh", 4, "dp", "R", None), ("mesh", 4, "tp", "S(1)", 1)]
        assert rows(index, query, key="head") == [("whole", 2, None, None, None)]

    def test_shards_say_which_rank_had_which_part(self, index: Index) -> None:
        order = Mesh(("dp", "tp"), (2, 4), (8, 3, 5, 7, 9, 10, 0, 1))  # in no order
        boxes = BoxPlacement(((Box((0, 0), (2, 3)), (1, 4)), (Box((2, 0), (1, 3)), (2,))))
        held = {
            "wq": Division((over(order, "S(1)", "S(0)"),)), "wk": Division((over(order, "R", "S(1)"),)),
            "odd": Division((boxes,), (11,)), "head": Division((), (0, 2, 4, 6, 7)),
        }  # fmt: skip
        index.add_packs([layout_pack("l", [layout_node(compose_layout(held, world_size=12))])])
        query = "SELECT rank, name, part, num_parts, dim FROM shards WHERE key = 'wq' ORDER BY rank, axis"
        found = rows(index, query)
        assert found == [
            row
            for place, rank in sorted(enumerate(order.ranks), key=lambda pair: pair[1])
            for row in ((rank, "dp", place // 4, 2, 1), (rank, "tp", place % 4, 4, 0))
        ]
        replicas = """
            SELECT o.rank FROM shards m JOIN shards o USING (layout_no, key, axis)
            WHERE key = 'wk' AND m.rank = 5 AND m.num_parts IS NOT NULL AND o.part = m.part ORDER BY o.rank
        """
        assert rows(index, replicas) == [(0,), (5,)]
        query = "SELECT rank, kind, offsets, sizes FROM shards WHERE key = :key ORDER BY rank"
        assert rows(index, query, key="odd") == [
            (1, "boxes", "[0, 0]", "[2, 3]"), (2, "boxes", "[2, 0]", "[1, 3]"), (4, "boxes", "[0, 0]", "[2, 3]"),
            (11, "whole", None, None),
        ]  # fmt: skip
        assert [rank for rank, kind, _, _ in rows(index, query, key="head") if kind == "whole"] == [0, 2, 4, 6, 7]

    def test_plans_and_restores_are_rows(self, index: Index) -> None:
        index.write(remembered.write_plan, plan("root", "dp=2"), loads(2), SHAPES)
        index.write(remembered.write_plan, plan("root", "dp=4", 4), loads(4, read=30), SHAPES)
        cheapest = "SELECT mesh, read_bytes, most_read_bytes FROM plans WHERE root_id = :root ORDER BY most_read_bytes"
        found = rows(index, cheapest, root=digest("root").hex())
        assert found == [("dp=2", 21, 11), ("dp=4", 121, 31)]
        assert rows(index, "SELECT count(*) FROM plan_ranks JOIN plans USING (plan_no) WHERE mesh = 'dp=4'") == [(4,)]
        index.write(remembered.write_restore, restore("a", "root", at_s=1_700_000_000))
        query = "SELECT commit_id, started, started_s, is_whole, error FROM restores"
        assert rows(index, query) == [(digest("a").hex(), "2023-11-14 22:13:20", 1_700_000_000.0, 1, None)]


def handle_commit(revision: str) -> str:
    return next(iter(log_commits(sample().handle, [revision], limit=1))).id


def with_everything(index: Index) -> None:
    """Rows that the sample has none of."""
    grid = mesh(4, 2, names=("dp", "tp"))
    boxes = BoxPlacement(((Box((0,), (2,)), (1,)),))
    layout = compose_layout(
        {"wq": Division((over(grid, "R", "S(1)"),)), "b": Division((boxes,))}, world_size=8, aliases=(("b", "c"),)
    )
    index.add_packs([layout_pack("l", [layout_node(layout)], ["divided"])])
    index.write(remembered.write_plan, plan("root", "dp=2"), loads(2), SHAPES)
    index.write(remembered.write_restore, restore("a"))
    index.write(remembered.write_restore, restore("a", num_bytes=None, error="CorruptionError: x"))
    index.write(integrity.write_scrub, Scrub(min(index.packs()), 1_700_000_000_000_000, 10, "a flipped bit"))
    told = {"meta": encode_value({"lr": 1}, key=""), "provenance": encode_value({"host": "a"}, key="")}
    index.add_packs([meta_pack("told", {}, commit=commit_row("told", ["a"], signature=signature(), **told))])
    moves = [(0, 2**70, None, digest("told"), "tag: set to main", "ann"), (1, 5, digest("told"), None, "gone\0", "")]
    records = [("refs/tags/v1.ref", "released\0"), ("refs/pins/keep.ref", "the paper"), ("refs/heads/main.ref", "")]
    states = [RefState(name, b"hash", digest("told"), note, moves) for name, note in records]
    index.write(remembered.write_states, states)
    index.write(remembered.write_forgotten, [digest("told"), digest("b")])
    index.write(remembered.write_forgotten, [digest("told"), digest("c")])


@cache
def signature() -> bytes:
    return sign(str(key_file()), b"what it signs is not asked")
