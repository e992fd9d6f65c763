"""What every index must do, whatever database it lies in."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import pytest
from sqlalchemy import select

from cas_ckpt.errors import InvalidInputError, NotFoundError, PermissionDeniedError
from cas_ckpt.index import contents, history, remembered, usage
from cas_ckpt.index.index import Index
from cas_ckpt.index.rows import PackRecord, RefRow, Usage
from cas_ckpt.index.schema import OBJECTS
from cas_ckpt.objects.digest import ObjectKind
from cas_ckpt.objects.pack import Location, PackKind
from tests.index.building import (
    STORE,
    all_commits,
    commit_pack,
    commit_row,
    data_pack,
    digest,
    empty,
    extent,
    meta_pack,
    remove_ref,
)
from tests.index.entries_suite import EntriesTests, KeyChangeTests, TreeDiffTests
from tests.index.finding_suite import FindTests
from tests.index.layouts_suite import LayoutTests
from tests.index.liveness_suite import LivenessTests, ReadOnlyLivenessTests
from tests.index.plans_suite import PlanTests
from tests.index.queries_suite import QueryTests
from tests.index.restores_suite import RestoreTests
from tests.index.scores_suite import ScoreTests
from tests.index.views_suite import ViewTests

Open = Callable[..., Index]


class PackTests:
    def test_a_chunk_is_found_where_its_pack_says(self, index: Index) -> None:
        info = extent("a", offset=128, encoding=3, base=digest("b"))
        index.add_packs([PackRecord("p", PackKind.DATA, 999, [info])])
        expected = Location("p", ObjectKind.CHUNK, 1000, 0, 2, 500, 128, 50, 400, 3, digest("b"))
        assert index.read(contents.locate, [digest("a"), digest("never seen")]) == {digest("a"): [expected]}
        assert index.packs() == {"p": 999}

    def test_all_extents_of_a_chunk_are_found_in_order(self, index: Index) -> None:
        tail = extent("a", first_leaf=1, num_leaves=1)
        index.add_packs([PackRecord("p", PackKind.DATA, 1, [tail, extent("a", num_leaves=1)])])
        index.add_packs([data_pack("q", ["a"])])
        found = [(place.pack, place.first_leaf) for place in index.read(contents.locate, [digest("a")])[digest("a")]]
        assert found == [("p", 0), ("p", 1), ("q", 0)]
        assert index.read(contents.chunks_at_most) == 3

    def test_objects_are_numbered_in_the_order_in_which_packs_hold_them(self, index: Index) -> None:
        """So rows of neighbours are near one another in every table, and B-trees are written at few places."""
        index.add_packs([data_pack("d2", range(50, 80)), data_pack("d1", range(60))])
        with index.reading() as connection:
            found = connection.execute(select(OBJECTS.c.digest).order_by(OBJECTS.c.object_id)).scalars().all()
        assert found == [digest(chunk) for chunk in range(80)]

    def test_adding_a_pack_twice_changes_nothing(self, index: Index) -> None:
        packs = [data_pack("d", ["a", "b"]), meta_pack("m", {"root": ["a", "b"]}, commit=commit_row("c"))]
        assert index.add_packs(packs) == 2
        before = index.read(usage.read_stats)
        assert index.add_packs(packs) == 0
        assert index.read(usage.read_stats) == before

    def test_known_and_all_digests_agree_with_what_was_added(self, index: Index) -> None:
        names = [f"chunk {number}" for number in range(700)]
        index.add_packs([data_pack("d", names), meta_pack("m", {"root": names})])
        chunks = {digest(name) for name in names}
        assert index.read(contents.chunk_digests) == chunks
        assert index.read(contents.known, [*chunks, digest("root"), digest("other")]) == chunks | {digest("root")}
        assert index.read(contents.locate, chunks).keys() == chunks

    def test_the_order_in_which_packs_come_makes_no_difference(self, index: Index) -> None:
        packs = [data_pack("d", ["a", "b"]), meta_pack("m", {"root": ["node"]}), meta_pack("n", {"node": ["a", "b"]})]
        for pack in (packs[1], packs[2], packs[0]):
            index.add_packs([pack])
        assert index.read(usage.reachable, [digest("root")]) == Usage(2, 2000, 2, 2000, 1800)
        assert index.read(usage.read_stats).num_missing == 0

    def test_what_is_only_referred_to_is_not_known(self, index: Index) -> None:
        index.add_packs([meta_pack("m", {"root": ["a"]})])
        assert index.read(contents.known, [digest("a")]) == set()
        assert index.read(contents.locate, [digest("a")]) == {}
        assert index.read(contents.chunk_digests) == set()
        assert index.read(contents.resolve_prefix, digest("a").hex(), list(ObjectKind)) == []
        assert index.read(usage.read_stats).num_missing == 1

    def test_dropping_a_pack_forgets_what_lay_in_it_alone(self, index: Index) -> None:
        index.add_packs([data_pack("d", ["a", "b"]), data_pack("e", ["b"]), data_pack("f", ["c"])])
        assert index.drop_packs(["d", "never seen"]) == 1
        assert index.read(contents.chunk_digests) == {digest("b"), digest("c")}
        assert [place.pack for place in index.read(contents.locate, [digest("b")])[digest("b")]] == ["e"]
        assert index.packs().keys() == {"e", "f"}

    def test_dropping_a_meta_pack_forgets_its_commit(self, index: Index) -> None:
        metrics = {"loss": 1.0}
        index.add_packs([commit_pack("c", metrics=metrics), commit_pack("d", ["c", "x"], metrics=metrics)])
        index.drop_packs(["pack of d"])
        assert [row.message for row in all_commits(index)] == ["c"]
        assert index.read(history.read_commit, digest("d")) is None
        index.add_packs([commit_pack("d", ["c"], metrics=metrics)])
        assert index.read(history.read_commit, digest("d")) == commit_row("d", ["c"], metrics=metrics)

    def test_dropping_a_meta_pack_forgets_what_its_nodes_refer_to(self, index: Index) -> None:
        index.add_packs([data_pack("d", ["a"]), meta_pack("m", {"root": ["a", "never seen"]})])
        index.drop_packs(["m"])
        stats = index.read(usage.read_stats)
        assert (stats.num_edges, stats.num_missing) == (0, 0)
        assert index.add_packs([data_pack("e", ["b"])]) == 1
        assert index.read(usage.under, [digest("b")]) == {digest("b"): Usage(1, 1000, 0, 0, 450)}

    def test_a_dropped_pack_can_come_back(self, index: Index) -> None:
        packs = [data_pack("d", ["a", "b"]), meta_pack("m", {"root": ["a", "b"]})]
        index.add_packs(packs)
        before = index.read(usage.read_stats)
        index.drop_packs(["d"])
        assert index.read(usage.read_stats).num_missing == 2
        assert index.add_packs(packs) == 1
        assert index.read(usage.read_stats) == before
        assert index.read(usage.reachable, [digest("root")]).num_chunks == 2

    def test_numbers_are_not_mixed_up_after_a_drop(self, index: Index) -> None:
        index.add_packs([meta_pack("m", {"root": ["a"]}), data_pack("d", ["a"])])
        index.drop_packs(["d"])
        index.add_packs([data_pack("e", ["b"]), meta_pack("n", {"root 2": ["b", "z"]})])
        index.add_packs([data_pack("f", ["a"])])
        assert index.read(usage.reachable, [digest("root")]).num_chunks == 1
        assert index.read(usage.reachable, [digest("root 2")]).num_chunks == 1
        assert [place.pack for place in index.read(contents.locate, [digest("a")])[digest("a")]] == ["f"]

    def test_an_error_in_the_middle_adds_nothing(self, index: Index) -> None:
        with pytest.raises(InvalidInputError, match="outside of what"):
            index.add_packs([data_pack("d", ["a"]), commit_pack("c", step=2**70)])
        assert index.packs() == {}
        assert index.read(contents.chunk_digests) == set()
        assert index.add_packs([data_pack("d", ["a"])]) == 1

    def test_threads_may_write_and_read_at_once(self, index: Index) -> None:
        failures: list[BaseException] = []

        def work(worker: int) -> None:
            try:
                for number in range(5):
                    index.add_packs([data_pack(f"{worker}-{number}", [f"{worker}-{number}", "common"])])
                    assert digest(f"{worker}-{number}") in index.read(contents.known, [digest(f"{worker}-{number}")])
                    assert index.read(contents.locate, [digest("common")])
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert index.read(contents.chunks_at_most) == 40
        assert len(index.read(contents.locate, [digest("common")])[digest("common")]) == 20


class PrefixTests:
    def test_a_prefix_finds_all_ids_that_begin_with_it(self, index: Index) -> None:
        ids = [bytes.fromhex(head.ljust(64, "0")) for head in ("ab1", "ab2", "abf", "ac", "aa")]
        entries = [extent(name, ObjectKind.COMMIT) for name in ids[:4]] + [extent(ids[4], ObjectKind.TREE)]
        index.add_packs([PackRecord("m", PackKind.META, 1, entries)])
        assert index.read(contents.resolve_prefix, "ab") == ids[:3]
        assert index.read(contents.resolve_prefix, "AB2") == [ids[1]]
        assert index.read(contents.resolve_prefix, "a", (ObjectKind.TREE,)) == [ids[4]]
        assert index.read(contents.resolve_prefix, ids[0].hex()) == [ids[0]]
        assert len(index.read(contents.resolve_prefix, "a", limit=2)) == 2

    @pytest.mark.parametrize("prefix", ["", "xyz", "ab ", "a" * 65, "-1", "٣"])
    def test_a_prefix_that_is_no_hexadecimal_number_is_refused(self, index: Index, prefix: str) -> None:
        with pytest.raises(InvalidInputError, match="hexadecimal"):
            index.read(contents.resolve_prefix, prefix)


class HistoryTests:
    def test_a_commit_comes_back_as_it_was_given(self, index: Index) -> None:
        row = replace(
            commit_row("c", ["a", "b", "x"]), layout=digest("layout"), author="Ann <a@b>", time_us=1_700_000_000_123,
            step=-5, branch="ft/math", metrics={"loss": 0.1, "epoch": 3}, meta=b"\x00\xff", stats={"new_bytes": 2**60},
        )  # fmt: skip
        index.add_packs([meta_pack("m", {}, commit=row), commit_pack("plain")])
        assert index.read(history.read_commit, digest("c")) == row
        assert index.read(history.read_commit, digest("plain")) == commit_row("plain")
        assert index.read(history.read_commit, digest("never")) is None

    def test_text_that_no_database_takes_is_shown_with_replacements(self, index: Index) -> None:
        index.add_packs([commit_pack("c", message="a\0b \udc80 é", author="\0")])
        row = index.read(history.read_commit, digest("c"))
        assert row is not None
        assert row.message == "a\ufffdb \ufffd\ufffd\ufffd é"
        assert row.author == "\ufffd"

    def test_the_log_shows_children_first_and_then_the_youngest(self, index: Index) -> None:
        graph = {"a": [], "b": ["a"], "c": ["a"], "d": ["c"], "merge": ["b", "d"], "apart": []}
        times = {"a": 1, "b": 5, "c": 9, "d": 3, "merge": 0, "apart": 99}  # clocks that went wrong
        index.add_packs([commit_pack(n, parents, time_us=times[n]) for n, parents in graph.items()])
        assert _messages(history.log(index, [digest("merge")])) == ["merge", "b", "d", "c", "a"]
        assert _messages(history.log(index, [digest("b"), digest("d"), digest("b")])) == ["b", "d", "c", "a"]
        assert _messages(history.log(index, [digest("merge")], first_parent=True)) == ["merge", "b", "a"]
        assert _messages(history.log(index, [digest("merge")], limit=2)) == ["merge", "b"]
        assert _messages(history.log(index, [digest("merge"), digest("d")], limit=3)) == ["merge", "b", "d"]

    @pytest.mark.parametrize("seed", range(6))
    def test_a_log_with_a_limit_is_the_beginning_of_the_whole_one(self, index: Index, seed: int) -> None:
        rng = random.Random(seed)
        names: list[str] = []
        for number in range(20):
            merged = seed % 2 and number > 2 and rng.random() < 0.3
            parents = [*names[-1:], *([rng.choice(names)] if merged else [])]
            row = commit_row(f"c{number}", list(dict.fromkeys(parents)), time_us=number - 5 * rng.randrange(2))
            index.add_packs([meta_pack(f"m{number}", {f"root of c{number}": []}, commit=row)])
            names.append(f"c{number}")
        for start in (names[-1], names[4]):
            for first_parent in (False, True):
                whole = _messages(history.log(index, [digest(start)], first_parent=first_parent))
                for limit in (1, 2, 3, 7, 19, 20, 50):
                    log = history.log(index, [digest(start)], first_parent=first_parent, limit=limit, whole=True)
                    assert _messages(log) == whole[:limit]

    def test_the_first_commits_of_a_line_are_found_without_the_rest(self, index: Index) -> None:
        for number in range(1, 30):
            row = commit_row(f"c{number}", [f"c{number - 1}"] if number > 1 else ["lost"])
            index.add_packs([meta_pack(f"m{number}", {f"root of c{number}": []}, commit=row)])
        with mock.patch.object(history, "walk", side_effect=AssertionError("all commits were read")):
            assert len(list(history.log(index, [digest("c29")], limit=10, whole=True))) == 10
        with pytest.raises(NotFoundError, match="parent"):
            history.log(index, [digest("c29")], limit=30, whole=True)
        assert len(list(history.log(index, [digest("c29")], limit=30))) == 29

    def test_a_parent_that_is_not_known_ends_the_log(self, index: Index) -> None:
        index.add_packs([commit_pack("b", ["a"])])
        assert _messages(history.log(index, [digest("b")])) == ["b"]

    def test_a_start_that_is_not_known_is_refused_at_once(self, index: Index) -> None:
        with pytest.raises(NotFoundError, match=digest("b").hex()[:12]):
            history.log(index, [digest("b")])

    def test_a_long_history_is_shown_whole(self, index: Index) -> None:
        names = [f"commit {number}" for number in range(1200)]
        index.add_packs([commit_pack(n, names[i - 1 : i], time_us=i) for i, n in enumerate(names)])
        assert _messages(history.log(index, [digest(names[-1])])) == names[::-1]

    def test_another_commit_may_come_while_the_log_is_read(self, index: Index) -> None:
        index.add_packs([commit_pack("a"), commit_pack("b", ["a"])])
        log = history.log(index, [digest("b")])
        assert next(log).message == "b"
        index.add_packs([commit_pack("c", ["b"])])
        assert _messages(log) == ["a"]


def _messages(rows: Iterator[object]) -> list[str]:
    return [row.message for row in rows]  # type: ignore[attr-defined]


class UsageTests:
    def test_shared_objects_count_once_and_belong_to_nobody_alone(self, index: Index) -> None:
        _two_trees(index)
        one, two = digest("one"), digest("two")
        assert index.read(usage.reachable, [one]) == Usage(3, 3000, 2, 2000, 5 * 450)
        assert index.read(usage.reachable, [one, two]).num_chunks == 4
        assert index.read(usage.exclusive, {"this": [one], "those": [two]})["this"] == Usage(1, 1000, 1, 1000, 900)
        assert index.read(usage.exclusive, {"this": [one], "those": [two, one]})["this"] == Usage()
        assert index.read(usage.reachable, []) == Usage()

    def test_groups_own_what_no_other_group_leads_to(self, index: Index) -> None:
        _two_trees(index)
        index.add_packs([data_pack("d3", ["z"]), meta_pack("m3", {"three": ["z", "shared node"]})])
        groups = {"main": [digest("one"), digest("two")], "ft": [digest("three")], "empty": [digest("never")]}
        owned = index.read(usage.exclusive, groups)
        assert owned["main"] == Usage(2, 2000, 2, 2000, 4 * 450)
        assert owned["ft"] == Usage(1, 1000, 1, 1000, 2 * 450)
        assert owned["empty"] == Usage()

    def test_what_three_groups_share_below_a_shared_node_belongs_to_none(self, index: Index) -> None:
        index.add_packs([data_pack("d", ["x"]), meta_pack("m", {"a": ["n"], "b": ["n"], "c": ["x"], "n": ["x"]})])
        owned = index.read(usage.exclusive, {name: [digest(name)] for name in "abc"})
        assert [owned[name].num_chunks for name in "abc"] == [0, 0, 0]
        assert [owned[name].num_nodes for name in "abc"] == [1, 1, 1]

    def test_what_is_kept_by_many_is_told_by_who_they_are(self, index: Index) -> None:
        below = {"a": ["n"], "b": ["n"], "c": ["x"], "n": ["x", "y"]}
        index.add_packs([data_pack("d", ["x", "y"]), meta_pack("m", below)])
        far = 1 << 700  # more holders than a number of a database has bits
        held = index.read(usage.by_holders, {digest("a"): 1, digest("b"): 2, digest("c"): far, digest("never"): 4})
        assert held == {
            1: Usage(0, 0, 1, 1000, 450),
            2: Usage(0, 0, 1, 1000, 450),
            far: Usage(0, 0, 1, 1000, 450),
            1 | 2: Usage(1, 1000, 1, 1000, 900),
            1 | 2 | far: Usage(1, 1000, 0, 0, 450),
        }

    def test_a_label_that_comes_by_a_longer_way_is_passed_on_too(self, index: Index) -> None:
        below = {"a": ["x", "n"], "n": ["m"], "b": ["m"], "m": ["x"]}
        index.add_packs([data_pack("d", ["x"]), meta_pack("m", below)])
        held = index.read(usage.by_holders, {digest("a"): 1, digest("b"): 2})
        assert {holders: (usage.num_chunks, usage.num_nodes) for holders, usage in held.items()} == {
            1: (0, 2), 2: (0, 1), 3: (1, 1),
        }  # fmt: skip

    def test_each_node_says_what_is_under_it(self, index: Index) -> None:
        _two_trees(index)
        under = index.read(usage.under, [digest("one"), digest("shared node"), digest("x"), digest("never")])
        assert under[digest("one")].num_bytes == 3000
        assert under[digest("shared node")] == Usage(2, 2000, 1, 1000, 3 * 450)
        assert under[digest("x")] == Usage(1, 1000, 0, 0, 450)
        assert under[digest("never")] == Usage()

    def test_a_second_copy_counts_as_stored_but_not_as_content(self, index: Index) -> None:
        _two_trees(index)
        index.add_packs([data_pack("copy", ["x"])])
        assert index.read(usage.under, [digest("x")]) == {digest("x"): Usage(1, 1000, 0, 0, 900)}
        assert index.read(usage.read_stats).objects == {ObjectKind.CHUNK: (4, 4000), ObjectKind.TREE: (3, 3000)}

    def test_asking_twice_gives_the_same_answer(self, index: Index) -> None:
        _two_trees(index)
        assert index.read(usage.reachable, [digest("one")]) == index.read(usage.reachable, [digest("one")])


def _two_trees(index: Index) -> None:
    """Trees `one` and `two` share a node with chunks s and t; x is of one, y of two."""
    nodes = {"one": ["x", "shared node"], "two": ["y", "shared node"], "shared node": ["s", "t"]}
    index.add_packs([data_pack("d", ["x", "y", "s", "t"]), meta_pack("m", nodes)])


class OwnershipTests:
    def test_an_index_of_another_store_is_noticed(self, open_index: Open) -> None:
        with open_index() as index:
            assert index.matches
            index.add_packs([data_pack("d", ["a"]), commit_pack("c", metrics={"loss": 1})])
            index.set_generation(4)
        with open_index(store_id="store-2") as index:
            assert not index.matches
            assert index.store_id == STORE
            empty(index)
            assert index.matches
            assert (index.packs(), index.read(contents.chunk_digests), all_commits(index)) == ({}, set(), [])
            assert index.generation == 0
        with open_index(store_id="store-2") as index:
            assert index.matches

    def test_refs_and_generation_are_remembered(self, open_index: Open) -> None:
        refs = {name: RefRow(name, digest(name), 3, 1.5) for name in ("heads/main", "tags/v1")}
        with open_index() as index:
            index.write(remembered.write_refs, [refs["tags/v1"]._replace(generation=1, target=digest("before"))])
            for ref in refs.values():
                index.write(remembered.write_refs, [ref])
            index.set_generation(6)
            index.set_generation(7)
        with open_index() as index:
            assert index.read(remembered.read_refs) == refs
            assert index.generation == 7
            remove_ref(index, "heads/main")
            assert index.read(remembered.read_refs).keys() == {"tags/v1"}

    def test_a_ref_name_that_is_no_text_is_refused(self, open_index: Open) -> None:
        with open_index() as index, pytest.raises(InvalidInputError):
            index.write(remembered.write_refs, [RefRow("heads/\udc80", digest("a"), 0, 0.0)])

    def test_nothing_can_be_written_when_it_was_opened_for_reading(self, open_index: Open) -> None:
        with open_index() as index:
            index.add_packs([data_pack("d", ["a"])])
        with open_index(read_only=True) as index:
            assert index.read(contents.known, [digest("a")]) == {digest("a")}
            assert index.read(usage.reachable, [digest("a")]).num_chunks == 1
            with pytest.raises(PermissionDeniedError, match="reading only"):
                index.add_packs([data_pack("e", ["b"])])

    def test_a_discarded_index_is_gone(self, open_index: Open) -> None:
        with open_index() as index:
            index.add_packs([data_pack("d", ["a"])])
            place = getattr(open_index, "place")  # noqa: B009
        Index.discard(place, store_id=STORE)
        Index.discard(place, store_id=STORE)
        with open_index() as index:
            assert index.packs() == {}


class ExtentTests:
    def test_extents_are_counted_once_for_each_chunk_and_not_for_copies(self, index: Index) -> None:
        parts = [extent("a", num_leaves=1), extent("a", first_leaf=1, num_leaves=1), extent("b")]
        index.add_packs([PackRecord("p", PackKind.DATA, 1, parts), data_pack("copies", ["b", "elsewhere"])])
        index.add_packs([meta_pack("m", {"root": ["page", "b"], "page": ["a", "b"]})])
        assert index.read(usage.count_extents, digest("root")) == (2, 3)
        assert index.read(usage.count_extents, digest("never seen")) == (0, 0)


class IndexSuite(
    PackTests, PrefixTests, HistoryTests, ScoreTests, UsageTests, OwnershipTests, ExtentTests, PlanTests,
    RestoreTests, LivenessTests, ReadOnlyLivenessTests, LayoutTests, EntriesTests, KeyChangeTests, ViewTests,
    QueryTests, FindTests, TreeDiffTests,
):  # fmt: skip
    """Everything above; the test file of a database gives the fixture `open_index`."""

    @pytest.fixture
    def index(self, open_index: Open) -> Iterator[Index]:
        with open_index() as index:
            yield index
