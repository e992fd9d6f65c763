"""What every index must answer about garbage, whatever database it lies in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings

from cas_ckpt import clock
from cas_ckpt.index import garbage, usage
from cas_ckpt.index.garbage import Garbage, PackLiveness
from cas_ckpt.index.index import Index
from cas_ckpt.index.rows import PackRecord, Usage, objects_by_id
from cas_ckpt.objects.digest import ObjectKind
from cas_ckpt.objects.nodes import LineageEdge
from cas_ckpt.objects.pack import PackKind
from tests.index.building import commit_row, data_pack, digest, extent, meta_pack
from tests.index.histories import Steps, histories, play


def _commit(name: str, chunks: Sequence[object], parents: Sequence[str] = ()) -> list[PackRecord]:
    """Data pack `d NAME` and meta pack `m NAME` of a commit on the tree `root of NAME`."""
    row = commit_row(name, parents)
    return [data_pack(f"d {name}", chunks), meta_pack(f"m {name}", {f"root of {name}": chunks}, commit=row)]


def _packs(index: Index, commits: Sequence[str], kept: Sequence[str] | None = None) -> dict[str, PackLiveness]:
    """Pack -> what is wrong with it while `commits` live and `kept` of them keep their data."""
    roots = [digest(f"root of {name}") for name in (commits if kept is None else kept)]
    with garbage.living(index, commits=[digest(name) for name in commits], roots=roots, published=()) as living:
        return {pack.name: pack for pack in living.packs()}


def _live(names: Sequence[str]) -> tuple[list[bytes], list[bytes]]:
    return [digest(name) for name in names], [digest(f"root of {name}") for name in names]


class LivenessTests:
    def test_nothing_is_wrong_with_packs_whose_commits_live(self, index: Index) -> None:
        index.add_packs([*_commit("a", ["x", "s"]), *_commit("b", ["y"], ["a"])])
        assert _packs(index, ["a", "b"]) == {}

    def test_a_commit_that_lives_without_its_data_keeps_its_own_object(self, index: Index) -> None:
        index.add_packs([*_commit("a", ["x"]), *_commit("b", ["y"], ["a"])])
        found = _packs(index, ["a", "b"], kept=["b"])
        assert found.keys() == {"d a", "m a"}
        assert (found["d a"].dead_entries, found["d a"].dead_bytes) == (1, 450)
        assert (found["m a"].dead_entries, found["m a"].num_entries) == (1, 2)

    def test_what_another_commit_refers_to_is_not_dead(self, index: Index) -> None:
        second = meta_pack("m b", {"root of b": ["x"]}, commit=commit_row("b"))
        index.add_packs([*_commit("a", ["x", "y"]), second])
        assert _packs(index, ["b"])["d a"].dead_entries == 1

    def test_garbage_that_is_referred_to_again_lives_again(self, index: Index) -> None:
        index.add_packs(_commit("a", ["x"]))
        assert _packs(index, [])["d a"].dead_entries == 1
        index.add_packs([meta_pack("m b", {"root of b": ["x"]}, commit=commit_row("b"))])
        assert "d a" not in _packs(index, ["b"])

    def test_a_pack_that_takes_the_number_of_a_dropped_one_is_examined(self, index: Index) -> None:
        index.add_packs(_commit("a", ["x"]))
        index.add_packs([data_pack("last", ["y"])])
        assert _packs(index, ["a"]).keys() == {"last"}
        index.drop_packs(["last"])
        index.add_packs([data_pack("successor", ["z"])])
        assert _packs(index, ["a"]).keys() == {"successor"}

    def test_leftovers_of_dropped_packs_are_found_although_nobody_ever_names_them_again(self, index: Index) -> None:
        index.add_packs([*_commit("a", ["x", "y"]), data_pack("new", ["waiting"])])
        assert _packs(index, ["a"])["new"].unpublished
        index.drop_packs(["m a"])
        found = _packs(index, [])
        assert (found["d a"].dead_entries, found["d a"].unpublished) == (2, False)
        assert found["new"].unpublished

    def test_what_waits_for_its_commit_to_be_published_is_said(self, index: Index) -> None:
        row = commit_row("a", layout=digest("layout"))
        index.add_packs([data_pack("d", ["x"]), meta_pack("m", {"root of a": ["x"]}, commit=row)])
        index.add_packs([PackRecord("l", PackKind.META, 1, [extent("layout", ObjectKind.LAYOUT)])])
        for published, expected in (([], True), ([digest("a")], False)):
            with garbage.living(index, commits=[], roots=[], published=published) as living:
                assert {pack.name: pack.unpublished for pack in living.packs()} == dict.fromkeys("dml", expected)

    def test_the_bytes_of_a_second_copy_are_said_and_one_of_both_packs_may_go(self, index: Index) -> None:
        index.add_packs([*_commit("a", ["x", "y"]), data_pack("copy", ["x"])])
        assert {name: pack.duplicate_bytes for name, pack in _packs(index, ["a"]).items()} == {"d a": 450, "copy": 450}
        commits, roots = _live(["a"])
        with garbage.living(index, commits=commits, roots=roots) as living:
            assert living.needed(["copy"]) == set()
            assert living.needed(["copy", "d a"]) == {"copy", "d a"}

    def test_parts_in_several_packs_are_needed_together(self, index: Index) -> None:
        parts = [extent("x", num_leaves=1), extent("x", first_leaf=1, num_leaves=1)]
        index.add_packs([PackRecord(f"part {i}", PackKind.DATA, 1, [part]) for i, part in enumerate(parts)])
        index.add_packs([meta_pack("m a", {"root of a": ["x"]}, commit=commit_row("a")), data_pack("whole", ["x"])])
        commits, roots = _live(["a"])
        with garbage.living(index, commits=commits, roots=roots) as living:
            assert living.needed(["whole"]) == set()
            assert living.needed(["whole", "part 0"]) == {"whole", "part 0"}
            assert living.missing() == []
        index.drop_packs(["whole", "part 1"])
        with garbage.living(index, commits=commits, roots=roots) as living:
            assert living.missing() == [digest("x")]

    def test_what_loses_a_part_after_it_was_examined_is_missing(self, index: Index) -> None:
        parts = [extent("x", num_leaves=1), extent("x", first_leaf=1, num_leaves=1)]
        index.add_packs([PackRecord(f"part {i}", PackKind.DATA, 1, [part]) for i, part in enumerate(parts)])
        index.add_packs([meta_pack("m a", {"root of a": ["x"]}, commit=commit_row("a"))])
        assert _packs(index, ["a"]) == {}
        index.drop_packs(["part 1"])
        commits, roots = _live(["a"])
        with garbage.living(index, commits=commits, roots=roots) as living:
            assert living.missing() == [digest("x")]

    def test_live_objects_in_no_pack_are_missing(self, index: Index) -> None:
        index.add_packs([meta_pack("m a", {"root of a": ["x", "y"]}, commit=commit_row("a")), data_pack("d", ["y"])])
        for live, expected in ((["a"], {digest("x")}), (["a", "b"], {digest("x"), digest("b"), digest("root of b")})):
            commits, roots = _live(live)
            with garbage.living(index, commits=commits, roots=roots) as living:
                assert set(living.missing()) == expected
                assert len(living.missing(1)) == 1
        with garbage.living(index, commits=[digest("a")], roots=[]) as living:
            assert living.missing() == []

    def test_a_chunk_that_a_promised_state_leads_to_is_not_missing_and_no_node_is_promised(self, index: Index) -> None:
        page, tensor = digest("page"), digest("tensor")
        nodes = [extent(page, ObjectKind.CHUNK_PAGE), extent(tensor, ObjectKind.TENSOR)]
        edges = [(tensor, [page, digest("lost page")]), (page, [digest("x"), digest("y")])]
        index.add_packs([PackRecord("nodes", PackKind.META, 1, nodes, edges, [])])
        index.add_packs([meta_pack("m a", {"root of a": ["tensor"]}, commit=commit_row("a")), data_pack("d", ["y"])])
        index.add_packs([meta_pack("m b", {"root of b": ["z"]}, commit=commit_row("b"))])
        commits, roots = _live(["a", "b"])
        lost = {digest("lost page"), digest("z")}  # of z nobody says that it is a chunk
        with garbage.living(index, commits=commits, roots=roots) as living:
            assert set(living.missing()) == {digest("x"), *lost}
            assert set(living.missing(promised=roots)) == lost
            assert set(living.missing(promised=[digest("root of b")])) == {digest("x"), *lost}
            assert len(living.missing(1, promised=roots)) == 1
        assert index.read(garbage.promised, [digest("x"), *lost], roots) == {digest("x")}
        assert index.read(garbage.promised, [digest("x")], []) == set()

    def test_the_base_of_a_live_delta_lives(self, index: Index) -> None:
        delta = PackRecord("delta", PackKind.DATA, 1, [extent("x", base=digest("old"))])
        index.add_packs([*_commit("a", ["old"]), delta, meta_pack("m b", {"root of b": ["x"]}, commit=commit_row("b"))])
        assert _packs(index, ["a", "b"], kept=["b"]).keys() == {"m a"}
        index.drop_packs(["d a", "m a"])
        index.add_packs([PackRecord("delta 2", PackKind.DATA, 1, [extent("x", base=digest("never seen"))])])
        commits, roots = _live(["b"])
        with garbage.living(index, commits=commits, roots=roots) as living:
            assert set(living.missing()) == {digest("old"), digest("never seen")}

    def test_live_entries_are_what_a_copy_of_the_pack_has_to_hold(self, index: Index) -> None:
        entries = [extent("y", offset=900), extent("dead", offset=500), extent("x", offset=64, base=digest("y"))]
        index.add_packs([PackRecord("d", PackKind.DATA, 1, entries)])
        index.add_packs([meta_pack("m a", {"root of a": ["x", "y"]}, commit=commit_row("a"))])
        commits, roots = _live(["a"])
        with garbage.living(index, commits=commits, roots=roots) as living:
            assert living.live_entries(["d"]) == {"d": [entries[2], entries[0]]}
            assert living.live_entries(["never seen"]) == {"never seen": []}
            assert living.summary() == Garbage(1, 450)

    def test_others_may_read_and_write_while_the_answers_are_asked_for(self, index: Index) -> None:
        index.add_packs(_commit("a", ["x"]))
        with garbage.living(index, commits=[], roots=[]) as living:
            index.add_packs(_commit("b", ["y"]))
            assert index.packs().keys() == {"d a", "m a", "d b", "m b"}
            assert {pack.name for pack in living.packs()} == {"d a", "m a"}
            index.drop_packs(["d a", "m a"])
            assert living.live_entries(["d a"]) == {"d a": []}
        assert _packs(index, ["b"]) == {}

    def test_a_pack_says_when_it_was_first_seen(self, index: Index) -> None:
        with clock.fixed(lambda: 1_700_000_000.5):
            index.add_packs(_commit("a", ["x"]))
        with clock.fixed(lambda: 1_800_000_000.0):
            index.add_packs(_commit("a", ["x"]))
        assert {pack.first_seen_us for pack in _packs(index, []).values()} == {1_700_000_000_500_000}

    def test_what_would_be_freed_is_what_nobody_else_holds(self, index: Index) -> None:
        index.add_packs([*_commit("a", ["x", "s"]), *_commit("b", ["y", "s"], ["a"]), data_pack("stray", ["z"])])
        index.add_packs([meta_pack("m stray", {"a tree of no commit": ["x"]})])
        both, one = _live(["a", "b"]), _live(["b"])
        assert garbage.freed(index, both, one) == Usage(1, 1000, 2, 2000, 3 * 450)
        assert garbage.freed(index, both, (both[0], one[1])) == Usage(1, 1000, 1, 1000, 2 * 450)
        assert garbage.freed(index, _live(["a"]), one) == garbage.freed(index, both, one)
        assert garbage.freed(index, one, both) == garbage.freed(index, both, both) == Usage()
        assert garbage.unique(index, [digest("a")], [digest("b")]) == Usage(1, 1000, 2, 2000, 3 * 450)

    def test_the_commits_that_hold_something_are_found_through_all_that_refers_to_it(self, index: Index) -> None:
        index.add_packs([*_commit("a", ["x", "page"]), *_commit("b", ["page", "tree"], ["a"])])
        index.add_packs([meta_pack("m", {"page": ["deep"], "tree": ["page"]})])
        assert index.read(usage.commits_holding, digest("deep")) == [digest("a"), digest("b")]
        assert index.read(usage.commits_holding, digest("x")) == [digest("a")]
        assert index.read(usage.commits_holding, digest("tree")) == [digest("b")]
        assert (
            index.read(usage.commits_holding, digest("root of a"))
            == index.read(usage.commits_holding, digest("a"))
            == [digest("a")]
        )
        assert index.read(usage.commits_holding, digest("never")) == []

    def test_the_nearest_commit_shares_the_most_bytes(self, index: Index) -> None:
        index.add_packs([*_commit("a", ["x", "y", "z"]), *_commit("b", ["x", "w"], ["a"]), *_commit("c", ["v"])])
        sought = [digest(name) for name in ("x", "y", "w", "never")]
        assert index.read(usage.nearest, sought) == [(digest("b"), 2, 2000), (digest("a"), 2, 2000)]
        assert index.read(usage.nearest, sought, limit=1) == [(digest("b"), 2, 2000)]
        assert index.read(usage.nearest, [digest("y"), digest("x"), digest("z")])[0] == (digest("a"), 3, 3000)
        assert index.read(usage.nearest, []) == index.read(usage.nearest, [digest("never")]) == []

    def test_of_commits_that_are_equally_near_the_youngest_comes_first(self, index: Index) -> None:
        """Whenever the index came to know them: a rebuild reads packs in another order."""
        index.add_packs([data_pack("d", ["x"])])
        for name, time_us in (("b", 7), ("c", 9), ("a", 8)):
            row = commit_row(name, time_us=time_us)
            index.add_packs([meta_pack(f"m {name}", {f"root of {name}": ["x"]}, commit=row)])
        found = index.read(usage.nearest, [digest("x")])
        assert [one.commit for one in found] == [digest("c"), digest("a"), digest("b")]

    def test_some_chunks_of_each_tensor_are_chosen_from_all_that_it_has(self, index: Index) -> None:
        names = [f"chunk {number}" for number in range(10)]
        index.add_packs([data_pack("d", [*names, "one", "two"])])
        nodes = {"large": names, "small": ["one", "two"], "empty": [], "lost": ["never stored"]}
        extents = [extent(digest(name), ObjectKind.TENSOR) for name in nodes]
        edges = [(digest(name), tuple(map(digest, chunks))) for name, chunks in nodes.items()]
        index.add_packs([PackRecord("tensors", PackKind.META, 1000, extents, edges)])
        found = index.read(usage.some_chunks, [*map(digest, nodes), digest("one"), digest("unknown")], most=3)
        with index.reading() as connection:
            rows = list(objects_by_id(connection, map(digest, names)))
        numbered = {number: one for one, number, _ in rows}
        spread = [one in found for _, one in sorted(numbered.items())]
        assert [any(spread[:4]), any(spread[4:7]), any(spread[7:])] == [True] * 3 and spread.count(True) == 3
        assert not spread[0]  # the oldest of a tensor is the likeliest to be in its base too
        assert found.keys() - numbered.values() == {digest("one"), digest("two")}
        assert set(found.values()) == {1000}
        assert len(index.read(usage.some_chunks, [digest("large")], most=100)) == 10
        assert index.read(usage.some_chunks, [], most=1) == {}

    def test_chunks_are_chosen_behind_the_pages_of_a_large_tensor(self, index: Index) -> None:
        names = [f"chunk {number}" for number in range(600)]
        pages = {"page a": names[:256], "page b": names[256:512], "page c": names[512:]}
        index.add_packs([data_pack("d", names)])
        extents = [extent(digest(page), ObjectKind.CHUNK_PAGE, num_bytes=77) for page in pages]
        edges = [(digest(page), tuple(map(digest, chunks))) for page, chunks in pages.items()]
        tensors = {"whole": list(pages), "other": ["page a", "page c"]}
        extents += [extent(digest(name), ObjectKind.TENSOR) for name in tensors]
        edges += [(digest(name), tuple(map(digest, its))) for name, its in tensors.items()]
        index.add_packs([PackRecord("tensors", PackKind.META, 1000, extents, edges)])
        found = index.read(usage.some_chunks, [digest("whole")], most=4)
        assert len(found) == 4 and set(found.values()) == {1000}
        assert sum(any(digest(name) in found for name in its) for its in pages.values()) > 1
        both = index.read(usage.some_chunks, [digest("whole"), digest("other")], most=4)
        assert found.keys() <= both.keys() and 4 < len(both) <= 8
        assert both.keys() <= set(map(digest, names))

    def test_lineage_of_a_dropped_commit_goes_with_it(self, index: Index) -> None:
        lineage = (LineageEdge("fine-tune-of", digest("base"), b"\x01"), LineageEdge("merged-from", digest("other")))
        pack = meta_pack("m", {}, commit=commit_row("a", lineage=lineage))
        index.add_packs([pack])
        with index._database.reading() as connection:
            rows = connection.exec_driver_sql("SELECT position, kind, target, note FROM t_lineage ORDER BY position")
            assert [tuple(row) for row in rows] == [(i, e.kind, e.target, e.note) for i, e in enumerate(lineage)]
        index.drop_packs(["m"])
        with index._database.reading() as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM t_lineage").scalar() == 0

    def test_nothing_is_suspect_where_all_is_well(self, index: Index) -> None:
        index.add_packs(_commit("a", ["x"])[:1])
        assert _packs(index, []).keys() == {"d a"}
        index.add_packs(_commit("a", ["x"])[1:])
        assert _packs(index, ["a"]) == {}
        with index._database.reading() as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM t_suspects").scalar() == 0

    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
    @given(steps=histories())
    def test_it_agrees_with_the_model(self, index: Index, steps: Steps) -> None:
        play(index, steps)


class ReadOnlyLivenessTests:
    @pytest.mark.parametrize("examined", [False, True])
    def test_an_index_that_cannot_be_written_answers_as_well(self, open_index: object, examined: bool) -> None:
        with open_index() as index:  # type: ignore[operator]
            index.add_packs([*_commit("a", ["x"]), *_commit("b", ["y"]), data_pack("stray", ["z"])])
            if examined:
                _packs(index, ["a", "b"])
        with open_index(read_only=True) as index:  # type: ignore[operator]
            assert _packs(index, ["b"]).keys() == {"d a", "m a", "stray"}
            assert garbage.freed(index, _live(["a", "b"]), _live(["b"])).num_chunks == 1
