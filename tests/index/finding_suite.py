"""What every index finds of entries and states, by what they are."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt.errors import NotFoundError, TooLargeError
from cas_ckpt.index import finding
from cas_ckpt.index.finding import EntryFilter, Match
from cas_ckpt.index.index import Index
from cas_ckpt.index.rows import ListedEntry
from cas_ckpt.index.trees import RowsMissingError
from cas_ckpt.memory import limits
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.nodes import ContainerEntry, Node, tree_nodes
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import Spec
from cas_ckpt.objects.state import Container, EncodedValue, Flavor, Item, StoredTensor, walk
from tests.index.building import digest
from tests.index.entries_suite import MANY, PATTERNS, add, dict_of, many
from tests.index.tree_states import inline, nodes_of, pack_of, shown_entries, states, tensor

SHAPES = st.sampled_from(
    [(4096,), (None, 300), (...,), (..., 400), (3, ..., 400), (64, None), (None,), (), (4096, ..., None)]
)

DTYPES = ("float32", "bfloat16", "int64")


@st.composite
def filters(draw: st.DrawFn) -> EntryFilter:
    """Conditions of every kind, few at a time."""
    return EntryFilter(
        KeyPatterns(draw(st.lists(PATTERNS, max_size=1))),
        draw(st.none() | st.none() | st.sampled_from(["float32", "bfloat16", "*int*", "float*"])),
        draw(st.none() | st.none() | SHAPES),
        draw(st.none() | st.none() | st.sampled_from([0, 1, 9_000, 40_000])),
        draw(st.none() | st.none() | st.none() | st.sampled_from([0, 5, 20_000])),
        draw(st.none() | st.none() | st.builds(lambda number: digest("chunk", number), st.integers(0, 5))),
    )


def expected(history: list[Container], wanted: EntryFilter) -> dict[tuple[ListedEntry, object], tuple[int, int, int]]:
    """The entries that a look at every state finds."""
    found: dict[tuple[ListedEntry, object], tuple[int, int, int]] = {}
    for at, state in enumerate(history):
        for entry, item in shown_entries(state):
            if wanted.keys and not wanted.keys.matches(entry.key):
                continue
            if not wanted.admits(entry.dtype, entry.shape, entry.num_bytes):
                continue
            if wanted.holding is not None and wanted.holding not in _ids(item):
                continue
            same = entry, repr(item)
            first, _, count = found.get(same, (at, at, 0))
            found[same] = first, at, count + 1
    return found


def _ids(item: Item) -> set[Digest | None]:
    inside = {part.node for _, part in walk(item) if isinstance(part, StoredTensor)}
    return inside | ({node.digest for node in nodes_of(item)} if isinstance(item, Container) else set())


class FindTests:
    @MANY
    @given(data=st.data(), wanted=filters())
    def test_what_is_found_is_what_a_look_at_every_state_finds(
        self, index: Index, data: st.DataObject, wanted: EntryFilter
    ) -> None:
        some = data.draw(st.lists(states(), min_size=1, max_size=3))
        some += [dict_of(model=some[0], again=some[-1]), dict_of(model=some[-1])]
        history = data.draw(st.lists(st.sampled_from(some), min_size=1, max_size=6))
        roots = {repr(state): add(index, state) for state in some}
        add(index, dict_of(**{dtype: tensor(dtype, Spec(dtype, (700,))) for dtype in DTYPES}))  # there are such tensors
        given_roots = [roots[repr(state)] for state in history]
        found = index.read(finding.find_entries, roots=given_roots, wanted=wanted)
        model = expected(history, wanted)
        shown = [(one.entry, one.first, one.last, one.num_states) for one in found]
        assert sorted(shown, key=repr) == sorted(((entry, *span) for (entry, _), span in model.items()), key=repr)
        holding = {root for state, root in zip(history, given_roots, strict=True) if expected([state], wanted)}
        for few in (0, len(history)):
            with mock.patch.object(finding, "FEW_STATES", few):
                assert index.read(finding.find_states, roots=given_roots, wanted=wanted) == holding

    def test_an_entry_is_found_with_its_content_and_the_states_that_have_it(self, index: Index) -> None:
        roots = []
        for number in range(5):
            model = many(600)
            model.children["layers.7.weight"] = tensor(f"new {number // 2}")
            roots.append(add(index, dict_of(model=model, step=EncodedValue(bytes([number])))))
        wanted = EntryFilter(KeyPatterns("model/layers.7.*"))
        entry = ListedEntry("model/layers.7.weight", "tensor", "float32", (4096,), 4 * 4096)
        found = index.read(finding.find_entries, roots=roots, wanted=wanted)
        assert sorted(found, key=lambda one: one.first) == [
            Match(entry, digest("chunk", "new 0"), 0, 1, 2),
            Match(entry, digest("chunk", "new 1"), 2, 3, 2),
            Match(entry, digest("chunk", "new 2"), 4, 4, 1),
        ]
        every = index.read(finding.find_entries, roots=roots, wanted=EntryFilter(KeyPatterns(None), dtype="float32"))
        assert len(every) == 599 + 3
        holding = EntryFilter(KeyPatterns(None), holding=digest("chunk", "new 1"))
        assert index.read(finding.find_states, roots=roots, wanted=holding) == set(roots[2:4])

    def test_what_is_stored_in_parts_is_found_as_it_is_shown(self, index: Index) -> None:
        parts = {"values": tensor("v", Spec("bfloat16", (4096,))), "indices": tensor("i", Spec("int64", (2, 4096)))}
        roots = [add(index, dict_of(emb=Container("sparse_coo", parts, {"shape": (9, 9)}), w=tensor("w"))),
                 add(index, dict_of(w=tensor("w")))]  # fmt: skip
        for how, keys in (
            ({"dtype": "bfloat16"}, ["emb"]),
            ({"shape": (9, None)}, ["emb"]),
            ({"dtype": "int64"}, []),
            ({"shape": (2, 4096)}, []),
            ({"min_bytes": 3 * 8192}, ["emb"]),
            ({"holding": digest("chunk", "i")}, ["emb"]),
        ):
            wanted = EntryFilter(KeyPatterns(None), **how)  # type: ignore[arg-type]
            found = index.read(finding.find_entries, roots=roots, wanted=wanted)
            assert [one.entry.key for one in found] == keys, how
            assert index.read(finding.find_states, roots=roots, wanted=wanted) == set(roots[:1] if keys else [])

    def test_values_have_no_dtype_and_no_shape(self, index: Index) -> None:
        long = tensor("t", Spec("uint8", (5000,)), Flavor.VALUE)
        roots = [add(index, dict_of(text=long, v=EncodedValue(b"\xc0"))), add(index, dict_of(a=inline(bytes(50))))]
        for how in ({"dtype": "uint8"}, {"shape": (None,)}, {"dtype": "uint8", "min_bytes": 10}):
            wanted = EntryFilter(KeyPatterns(None), **how)  # type: ignore[arg-type]
            assert index.read(finding.find_states, roots=roots, wanted=wanted) == {roots[1]}, how
            found = index.read(finding.find_entries, roots=roots, wanted=wanted)
            assert [one.entry.key for one in found] == ["a"]
        long_ones = EntryFilter(KeyPatterns(None), min_bytes=1000)
        assert index.read(finding.find_states, roots=roots, wanted=long_ones) == {roots[0]}

    @pytest.mark.parametrize("num_bytes", [1, 15, 16, 17, 18])
    def test_values_are_found_by_length_however_short_they_are(self, index: Index, num_bytes: int) -> None:
        values = {f"v{n}": EncodedValue(b"\xc4" + bytes([n - 2]) + bytes(n - 2)) for n in (15, 16, 17, 18)}
        roots = [add(index, dict_of(**{name: value})) for name, value in values.items()]
        wanted = EntryFilter(KeyPatterns(None), min_bytes=num_bytes)
        expected = [root for root, name in zip(roots, values, strict=True) if int(name[1:]) >= num_bytes]
        assert index.read(finding.find_states, roots=roots, wanted=wanted) == set(expected)
        assert len(index.read(finding.find_entries, roots=roots, wanted=wanted)) == len(expected)

    def test_a_dtype_that_no_tensor_has_is_told_with_those_that_there_are(self, index: Index) -> None:
        root = add(index, dict_of(a=tensor("a"), b=inline(b"1")))
        with pytest.raises(NotFoundError, match="no tensor has the dtype 'flaot32': there are float32, uint8"):
            index.read(finding.find_entries, roots=[root], wanted=EntryFilter(KeyPatterns(None), dtype="flaot32"))

    def test_what_unfolds_into_too_much_is_refused_before_it_is_made(self, index: Index) -> None:
        nodes = _doubling(40)
        index.add_packs([pack_of("bomb", nodes)])
        root = nodes[-1].digest
        with limits(max_entries=2_000):
            rare = EntryFilter(KeyPatterns(None), dtype="float32")
            assert index.read(finding.find_states, roots=[root], wanted=rare) == {root}  # by what lists such a tensor
            for how in ({}, {"dtype": "float32"}, {"holding": digest("chunk", "x")}):
                with pytest.raises(TooLargeError, match="max_entries"):
                    index.read(finding.find_entries, roots=[root], wanted=EntryFilter(KeyPatterns(None), **how))  # type: ignore[arg-type]

    def test_states_are_found_however_much_is_in_all_of_them_together(self, index: Index) -> None:
        states = [dict_of(model=Container("dict", {f"w{at}": tensor((at, n)) for at in range(20)})) for n in range(9)]
        roots = [add(index, state) for state in states] + [add(index, dict_of(model=tensor("none")))]
        wanted = EntryFilter(KeyPatterns("model/w*"), min_bytes=1)
        with limits(max_entries=50):
            assert index.read(finding.find_states, roots=roots, wanted=wanted) == set(roots[:-1])
            with pytest.raises(TooLargeError, match="in fewer commits"):
                index.read(finding.find_entries, roots=roots, wanted=wanted)
            assert len(index.read(finding.find_entries, roots=roots[:2], wanted=wanted)) == 40

    def test_states_that_are_not_there_are_not_passed_over(self, index: Index) -> None:
        root = add(index, dict_of(a=tensor("a")))
        for question in (finding.find_entries, finding.find_states):
            with pytest.raises(RowsMissingError):
                index.read(question, roots=[root, digest("never")], wanted=EntryFilter(KeyPatterns(None)))  # type: ignore[operator]


def _doubling(depth: int) -> list[Node]:
    nodes = nodes_of(dict_of(x=tensor("x")))
    for _ in range(depth):
        below = nodes[-1].digest
        nodes += tree_nodes("dict", None, [ContainerEntry("a", below), ContainerEntry("b", below)])
    return nodes
