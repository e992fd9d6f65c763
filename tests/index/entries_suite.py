"""What every index answers about the entries of states."""

from __future__ import annotations

from itertools import count, pairwise
from operator import attrgetter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from cas_ckpt.errors import CorruptionError, NotFoundError, TooLargeError
from cas_ckpt.index import entries, tree_diff, trees
from cas_ckpt.index.index import Index
from cas_ckpt.index.rows import CommitRow, ListedEntry, storable
from cas_ckpt.index.tree_diff import TooManyRowsError, changed_commits
from cas_ckpt.index.trees import RowsMissingError
from cas_ckpt.memory import limits
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.nodes import Node, ValueEntry, tensor_nodes
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import Spec, grid_for
from cas_ckpt.objects.state import (
    Container,
    EncodedValue,
    Flavor,
    Item,
    Name,
    Path,
    StoredTensor,
    parse_key,
    render_key,
    walk,
)
from tests.builders import doubling_nodes
from tests.index.building import digest, empty
from tests.index.tree_states import (
    HOSTILE,
    LONG,
    inline,
    listed,
    matched,
    nodes_of,
    pack_of,
    sorted_state,
    states,
    tensor,
)
from tests.searches import tries

_NUMBERS = count()

PIECES = st.sampled_from(
    ["*", "**", "?", "/", ".", "model", "layers", "layers.1", "12", "w", "bias", "0", "~", "n*", "/**/"]
)
MOST_STARS = tries(3, 4)
PATTERNS = st.lists(PIECES, min_size=1, max_size=6).map("".join).filter(lambda pattern: pattern.count("*") < MOST_STARS)
"""More of them take the regular expressions of Python long for names of thousands of characters."""

MANY = settings(max_examples=tries(10, 30), deadline=None, suppress_health_check=list(HealthCheck))
"""One index for all examples: states are added to what is there."""


def add(index: Index, state: Container) -> Digest:
    """Add the nodes of `state` as a pack; the id of its root."""
    nodes = nodes_of(state)
    index.add_packs([pack_of(f"pack {next(_NUMBERS)}", nodes)])
    return nodes[-1].digest


def dict_of(**children: Item) -> Container:
    return Container("dict", dict(children))


def many(number: int, name: str = "layers.{}.weight") -> Container:
    """A container that needs pages."""
    return Container("dict", {name.format(at): tensor(at) for at in range(number)})


_num_bytes = attrgetter("num_bytes")


def summed(listed: list[ListedEntry]) -> list[tuple[str, entries.Sum]]:
    """The summary of a state, from all its entries."""
    parts: dict[str, list[ListedEntry]] = {}
    for entry in listed:
        parts.setdefault(render_key(parse_key(entry.key)[:1]), []).append(entry)
    return [
        (name, entries.Sum(len(those), sum(each.dtype is not None for each in those), sum(map(_num_bytes, those))))
        for name, those in parts.items()
    ]


class EntriesTests:
    @MANY
    @given(state=states(), patterns=st.lists(PATTERNS, max_size=3))
    def test_rows_say_what_the_nodes_say(self, index: Index, state: Container, patterns: list[str]) -> None:
        root = add(index, state)
        every = index.read(entries.manifest, root)
        assert every == listed(state)
        for some in ([], patterns, patterns[:1], [entry.key for entry in every[:2]]):
            assert index.read(entries.manifest, root, KeyPatterns(some)) == listed(state, some)
        for entry in every[:3] + every[-3:]:
            assert index.read(entries.entry, root, entry.key) == entry
        assert index.read(entries.summary, root) == summed(every)
        parts = [(render_key(path), part) for path, part in walk(sorted_state(state)) if isinstance(part, StoredTensor)]
        found = index.read(entries.stored_parts, root)
        assert [(one.key, one.spec, one.flavor, one.node, one.single) for one in found] == [
            (key, part.spec, part.flavor, part.node, part.single) for key, part in parts
        ]
        leaves = [
            (render_key(path), leaf) for path, leaf in walk(sorted_state(state)) if not isinstance(leaf, Container)
        ]
        assert [(one.key, one.spec.shape) for one in index.read(entries.stored_leaves, root)] == [
            (key, leaf.spec.shape if isinstance(leaf, StoredTensor) else (len(leaf.data),)) for key, leaf in leaves
        ]

    def test_tensors_and_values_come_with_their_grids_and_owners(self, index: Index) -> None:
        spec = Spec("float32", (3000, 700))
        cut = tensor_nodes(spec, grid_for(spec), [digest("chunk", at) for at in range(grid_for(spec).num_cells)])
        own = {rank: dict_of(seed=EncodedValue(b"\xc0"), noise=tensor(rank)) for rank in (0, 12)}
        large = StoredTensor(spec, Flavor.TORCH, cut[-1].digest, None)
        state = dict_of(w=large, one=tensor("one"), few=inline(b"1234"), loader=Container("ranks", dict(own)))
        nodes = [*cut, *nodes_of(state)]
        index.add_packs([pack_of(f"pack {next(_NUMBERS)}", nodes)])
        found = index.read(entries.stored_leaves, nodes[-1].digest)
        assert [(leaf.key, leaf.cell, leaf.owner) for leaf in found] == [
            ("few", None, None),
            ("loader/0/noise", (4096,), 0),
            ("loader/0/seed", None, 0),
            ("loader/12/noise", (4096,), 12),
            ("loader/12/seed", None, 12),
            ("one", (4096,), None),
            ("w", (1024, 700), None),
        ]
        assert [
            leaf.key for leaf in index.read(entries.stored_leaves, nodes[-1].digest, KeyPatterns("loader/*/seed"))
        ] == ["loader/0/seed", "loader/12/seed"]
        with index.writing() as connection:
            connection.execute(text("DELETE FROM t_tensors"))
        with pytest.raises(RowsMissingError) as raised:
            index.read(entries.stored_leaves, nodes[-1].digest)
        assert raised.value.digests == (cut[-1].digest,)

    def test_a_tensor_node_of_another_tensor_is_not_taken(self, index: Index) -> None:
        spec, other = Spec("float32", (3000, 700)), Spec("float32", (3000, 701))
        cut = tensor_nodes(spec, grid_for(spec), [digest("chunk", at) for at in range(grid_for(spec).num_cells)])
        nodes = [*cut, *nodes_of(dict_of(w=StoredTensor(other, Flavor.TORCH, cut[-1].digest, None)))]
        index.add_packs([pack_of(f"pack {next(_NUMBERS)}", nodes)])
        with pytest.raises(CorruptionError, match="w: its node is of another tensor"):
            index.read(entries.stored_leaves, nodes[-1].digest)

    @pytest.mark.parametrize("number", [1, 255, 256, 257, 2_000])
    def test_pages_are_put_together_in_order(self, index: Index, number: int) -> None:
        state = dict_of(model=many(number), values=Container("list", {at: tensor(at) for at in range(number)}))
        root = add(index, state)
        assert index.read(entries.manifest, root) == listed(state)
        for pattern in (
            "model/layers.17.*",
            "model/layers.25*",
            "values/1?",
            "values/12",
            "**/*.weight",
            "model",
            "*/25?",
        ):
            assert index.read(entries.manifest, root, KeyPatterns(pattern)) == listed(state, pattern), pattern
        last = f"model/layers.{number - 1}.weight"
        assert index.read(entries.entry, root, last).key == last
        assert index.read(entries.object_of, root, f"values/{number - 1}") == digest("chunk", number - 1)
        for key in ("model/layers.x.weight", f"values/{number}", "values/-1", f"{last}/more", "model/~0"):
            with pytest.raises(NotFoundError, match="repo.ls"):
                index.read(entries.entry, root, key)

    def test_pages_of_pages_are_followed(self, index: Index) -> None:
        state = dict_of(m=many(60, LONG + "{}"), n=tensor("n"))
        nodes = nodes_of(state)
        root = add(index, state)
        assert max(decoded_height(node) for node in nodes) >= 3
        assert index.read(entries.manifest, root) == listed(state)
        for at in range(60):
            assert index.read(entries.entry, root, f"m/{LONG}{at}").shape == (4096,)
        assert index.read(entries.manifest, root, KeyPatterns(f"m/{LONG}1?")) == listed(state, f"m/{LONG}1?")

    def test_every_name_is_told_as_it_is(self, index: Index) -> None:
        children: dict[Name, Item] = {name: tensor(name) for name in (*HOSTILE, 5, -3)}
        state = dict_of(inside=Container("dict", dict(children)))
        root = add(index, state)
        found = index.read(entries.manifest, root)
        assert found == listed(state)
        assert len({entry.key for entry in found}) == len(children)
        for name in children:
            key = render_key(("inside", name))
            assert index.read(entries.entry, root, key).key == key
            assert index.read(entries.object_of, root, key) == digest("chunk", name)
            assert key in [
                entry.key for entry in index.read(entries.manifest, root, KeyPatterns(["inside/" + "?" * 12, key]))
            ]

    def test_every_character_of_a_name_may_be_left_open(self, index: Index) -> None:
        names = [name for name in (*HOSTILE, "50%", "a_b", "a\\b", "\\%_", "a?b", "x\udc80y") if len(name) < 20]
        inexact = {name for name in names if storable(render_key((name,))) != render_key((name,))}
        assert inexact and len(inexact) < len(names)
        # Names that a database cannot hold let all names beside them through.
        parts = {"exact": [name for name in names if name not in inexact], "inexact": sorted(inexact)}
        state = dict_of(
            **{part: Container("dict", {name: tensor(name) for name in some}) for part, some in parts.items()}
        )
        root = add(index, state)
        for part, name in ((part, name) for part, some in parts.items() for name in some):
            key = render_key((name,))
            for at in range(len(key)):
                for wild in "?*":
                    pattern = f"{part}/{key[:at]}{wild}{key[at + 1 :]}"
                    found = index.read(entries.manifest, root, KeyPatterns(pattern))
                    assert found == listed(state, pattern), pattern

    def test_a_tensor_in_parts_is_one_entry_and_counts_all_of_them(self, index: Index) -> None:
        parts = Container("sparse_coo", {"values": tensor("v"), "indices": inline(bytes(40))}, {"shape": (7, 9)})
        odd = Container("quantized", {"scales": tensor("s")}, None)
        state = dict_of(emb=parts, odd=odd, none=Container("list", {}), deep=dict_of(none=Container("sparse_csr", {})))
        root = add(index, state)
        found = {entry.key: entry for entry in index.read(entries.manifest, root)}
        assert list(found.values()) == listed(state)
        assert (found["emb"].shape, found["emb"].dtype, found["emb"].num_bytes) == ((7, 9), "float32", 4 * 4096 + 40)
        assert index.read(entries.manifest, root, KeyPatterns("emb/values")) == []
        assert index.read(entries.entry, root, "emb") == found["emb"]
        assert index.read(entries.entry, root, "emb/indices").num_bytes == 40
        assert [part.key for part in index.read(entries.stored_parts, root, KeyPatterns("e*"))] == [
            "emb/indices",
            "emb/values",
        ]

    def test_a_shape_that_is_none_is_a_typed_error(self, index: Index) -> None:
        root = add(index, dict_of(emb=Container("sparse_coo", {"values": tensor("v")}, {"shape": 7})))
        with pytest.raises(CorruptionError, match="emb: the shape"):
            index.read(entries.manifest, root)

    def test_a_container_has_the_bytes_of_all_tensors_below_it(self, index: Index) -> None:
        state = dict_of(m=dict_of(a=tensor("a"), deep=dict_of(b=inline(b"12"))), v=EncodedValue(b"\xc0"))
        root = add(index, state)
        entry = index.read(entries.entry, root, "m")
        assert (entry.kind, entry.dtype, entry.num_bytes) == ("dict", None, 4 * 4096 + 2)
        assert index.read(entries.entry, root, "").num_bytes == 4 * 4096 + 2

    def test_long_plain_values_are_values(self, index: Index) -> None:
        state = dict_of(text=tensor("t", flavor=Flavor.VALUE), array=tensor("a", flavor=Flavor.NUMPY))
        root = add(index, state)
        assert [(entry.kind, entry.dtype) for entry in index.read(entries.manifest, root)] == [
            ("array", "float32"), ("value", None),
        ]  # fmt: skip

    @pytest.mark.parametrize("depth", [22, 60])
    def test_a_state_that_doubles_is_refused_before_it_is_made(self, index: Index, depth: int) -> None:
        nodes = doubling_nodes(depth, ValueEntry("x", b"\xc0"))
        index.add_packs([pack_of("bomb", nodes)])
        root = nodes[-1].digest
        with limits(max_entries=5_000):
            for keys in (None, KeyPatterns("**/x")):
                with pytest.raises(TooLargeError, match="max_entries"):
                    index.read(entries.manifest, root, keys)
            with pytest.raises(TooLargeError, match="max_entries"):
                index.read(entries.entry, root, "a")
            assert len(index.read(entries.manifest, root, KeyPatterns("/".join(["a"] * depth) + "/x"))) == 1
        assert sum(part.num_entries for _, part in index.read(entries.summary, root)) == 2**depth

    def test_a_state_that_is_deeper_than_any_is_refused(self, index: Index) -> None:
        state = tensor("leaf")
        for _ in range(220):
            state = dict_of(a=state)
        assert isinstance(state, Container)
        root = add(index, state)
        for question in (entries.manifest, entries.summary):
            with pytest.raises(CorruptionError, match="deeper"):
                index.read(question, root)

    def test_a_state_of_which_rows_are_missing_is_never_a_shorter_list(self, index: Index) -> None:
        state = dict_of(model=many(600), other=dict_of(w=tensor("w")))
        with pytest.raises(RowsMissingError) as missing:
            index.read(entries.manifest, digest("never seen"))
        assert missing.value.digests == (digest("never seen"),)
        damages = (
            "DELETE FROM t_trees WHERE height = 0 AND num_entries > 20 AND kind = ''",
            "DELETE FROM t_trees WHERE height > 0",
            "DELETE FROM t_trees WHERE num_entries = 1",
            "DELETE FROM t_entries WHERE form = 5 AND position = 0",
            "DELETE FROM t_entries WHERE name = 'layers.100.weight'",
            "DELETE FROM t_entries",
        )
        for damage in damages:
            empty(index)
            root = add(index, state)
            index.write(lambda connection, damage=damage: connection.execute(text(damage)))
            for question in (entries.manifest, entries.summary):
                with pytest.raises(RowsMissingError, match="index rebuild") as missing:
                    index.read(question, root)
                assert missing.value.digests

    def test_a_state_whose_packs_went_is_not_listed_and_one_that_came_back_is(self, index: Index) -> None:
        one, two = dict_of(model=many(600), step=tensor("one")), dict_of(model=many(600), step=tensor("two"))
        index.add_packs([pack_of("one", nodes_of(one))])
        index.add_packs([pack_of("two", nodes_of(two)[-1:])])
        roots = [nodes_of(state)[-1].digest for state in (one, two)]
        assert index.read(entries.manifest, roots[1]) == listed(two)
        index.drop_packs(["one"])
        for root in roots:
            with pytest.raises(RowsMissingError):
                index.read(entries.manifest, root)
        index.add_packs([pack_of("others", nodes_of(dict_of(a=tensor("a"))))])  # may get their numbers
        index.add_packs([pack_of("one again", nodes_of(one))])
        assert [index.read(entries.manifest, root) for root in roots] == [listed(one), listed(two)]


class KeyChangeTests:
    @MANY
    @given(data=st.data(), patterns=st.lists(PATTERNS, min_size=1, max_size=2))
    def test_commits_that_changed_what_matches_are_those_whose_states_differ_in_it(
        self, index: Index, data: st.DataObject, patterns: list[str]
    ) -> None:
        some = data.draw(st.lists(states(), min_size=1, max_size=3))
        some += [Container("dict", {"x": one, "model": two}) for one, two in pairwise(some)]
        some += [Container("dict", {"x": Container("list", one.children), "model": one}) for one in some[:1]]
        some += [Container("dict", {"x": one, "model": Container("quantized", one.children)}) for one in some[:1]]
        history = data.draw(st.lists(st.sampled_from(some), min_size=2, max_size=8))
        begin, rows = next(_NUMBERS), list[CommitRow]()
        for number, state in enumerate(history):
            root, parents = nodes_of(state)[-1].digest, [rows[-1].digest] if rows else []
            rows.append(CommitRow(digest(begin, number), root, tuple(parents)))
        index.add_packs([pack_of(f"history {begin}", [node for state in some for node in nodes_of(state)], rows)])
        expected = []
        for before, state, row in zip([Container("dict", {}), *history], history, rows, strict=False):
            old, new = (matched(one, KeyPatterns(patterns)) for one in (before, state))
            expected += [row] if old != new else []
        keys = KeyPatterns(patterns)
        assert index.read(changed_commits, rows=rows[::-1], keys=keys, forgotten=()) == expected[::-1]
        assert index.read(changed_commits, rows=rows[1:2], keys=keys, forgotten=()) == [
            x for x in expected if x in rows[1:2]
        ]

    def test_a_container_that_matches_changes_with_its_kind_and_attributes(self, index: Index) -> None:
        parts = {"values": tensor("v")}
        history = [
            dict_of(emb=Container("sparse_coo", parts, {"shape": (3, 4)}), none=Container("dict", {})),
            dict_of(emb=Container("sparse_coo", parts, {"shape": (4, 3)}), none=Container("dict", {})),
            dict_of(emb=Container("quantized", parts, {"shape": (4, 3)}), none=Container("list", {})),
            dict_of(emb=Container("quantized", parts, {"shape": (4, 3)})),
            dict_of(emb=Container("dict", parts)),
            dict_of(emb=Container("list", parts)),
        ]
        rows: list[CommitRow] = []
        for number, state in enumerate(history):
            rows.append(CommitRow(digest(number), add(index, state), tuple(row.digest for row in rows[-1:])))
        index.add_packs([pack_of("commits", [], rows)])
        every = [0, 1, 2, 3, 4, 5]
        for pattern, changed in (("emb", [0, 1, 2, 4, 5]), ("emb/*", [4]), ("none", [0, 2, 3]), ("*", every)):
            found = index.read(changed_commits, rows=rows, keys=KeyPatterns(pattern), forgotten=())
            assert found == [rows[number] for number in changed], pattern

    def test_one_commit_alone_may_have_more_rows_than_many_together(
        self, index: Index, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = []
        for number in range(4):
            state = dict_of(model=many(100 + number))
            nodes = nodes_of(state)
            rows.append(CommitRow(digest(number), nodes[-1].digest, tuple(row.digest for row in rows[-1:])))
            index.add_packs([pack_of(f"pack {next(_NUMBERS)}", nodes, rows[-1:])])
        monkeypatch.setattr(tree_diff, "MOST_ROWS", 150)
        keys = KeyPatterns("**/weight")
        with pytest.raises(TooManyRowsError):
            index.read(changed_commits, rows=rows, keys=keys, forgotten=())
        assert index.read(changed_commits, rows=rows[2:3], keys=keys, forgotten=()) == rows[2:3]
        with limits(max_entries=50), pytest.raises(TooLargeError, match="max_entries"):
            index.read(changed_commits, rows=rows[2:3], keys=keys, forgotten=())

    def test_a_state_of_which_rows_are_missing_is_named(self, index: Index) -> None:
        nodes = nodes_of(dict_of(model=many(300), w=tensor("w")))
        row = CommitRow(digest("c"), nodes[-1].digest)
        index.add_packs([pack_of("nodes", nodes[:-1]), pack_of("root", nodes[-1:], [row])])
        index.drop_packs(["nodes"])
        assert index.read(changed_commits, rows=[row], keys=KeyPatterns("w"), forgotten=()) == [row]
        with pytest.raises(RowsMissingError):
            index.read(changed_commits, rows=[row], keys=KeyPatterns("model/*"), forgotten=())
        assert index.read(changed_commits, rows=[row], keys=KeyPatterns("model/*"), forgotten={row.digest}) == []


class TreeDiffTests:
    @MANY
    @given(data=st.data())
    def test_paths_under_which_two_states_differ_are_those_with_other_leaves(
        self, index: Index, data: st.DataObject
    ) -> None:
        one = data.draw(states())
        name, other = data.draw(st.tuples(st.sampled_from(["model", "x", 3]), states()))
        two = data.draw(st.sampled_from([other, Container("dict", one.children | {name: other})]))
        roots = add(index, one), add(index, two)
        for before, after, asked in (
            (one, two, roots),
            (two, one, roots[::-1]),
            (Container("dict", {}), two, roots[1:]),
        ):
            old, new = (leaves_of(state) for state in (before, after))
            found = index.read(tree_diff.differences, *asked)
            differing = {one.path for one in found for side in one[1:] if isinstance(side, tree_diff.Leaf)}
            assert differing == {path for path in old.keys() | new.keys() if old.get(path) != new.get(path)}
        assert index.read(tree_diff.differences, roots[0], roots[0]) == []

    def test_only_pages_that_differ_are_opened(self, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
        one, two = many(3_000), many(3_000)
        two.children["layers.77.weight"] = tensor("other")
        roots = add(index, dict_of(model=one)), add(index, dict_of(model=two))
        num_rows = 0
        read = trees._read_rows

        def counted(*args: Any, **how: Any) -> Any:
            nonlocal num_rows
            found = read(*args, **how)
            num_rows += sum(map(len, found.values()))
            return found

        monkeypatch.setattr(trees, "_read_rows", counted)
        (only,) = index.read(tree_diff.differences, *roots)
        assert only.path == ("model", "layers.77.weight")
        assert num_rows < 2 * 256 + 4


def leaves_of(state: Container) -> dict[Path, Item]:
    """Path -> every tensor and value, parts of tensors too."""
    return {path: item for path, item in walk(state) if not isinstance(item, Container)}


def decoded_height(node: Node) -> int:
    from cas_ckpt.core.records import node_content
    from cas_ckpt.objects.nodes import RawTree

    content = node_content(node.kind, node.data)[1]
    assert isinstance(content, RawTree)
    return content.height
