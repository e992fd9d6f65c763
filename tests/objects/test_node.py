"""Nodes: canonical, paged so that a change stays small, and refused when malformed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt.errors import CkptError, CorruptionError, UnsupportedVersionError
from cas_ckpt.objects import nodes as tensor_node
from cas_ckpt.objects import nodes as tree_node
from cas_ckpt.objects.digest import Digest, ObjectKind, leaf_digest, pack_canonical, unpack_canonical
from cas_ckpt.objects.layouts import LayoutObject, decode_layout, layout_node
from cas_ckpt.objects.nodes import (
    CommitObject,
    ContainerEntry,
    Entry,
    LineageEdge,
    Node,
    TensorEntry,
    ValueEntry,
    commit_node,
    decode_commit,
    make_node,
)
from cas_ckpt.objects.spec import Grid, Spec, shared_spec
from cas_ckpt.objects.state import parse_key

names = st.one_of(st.integers(-(2**63), 2**63 - 1), st.text(max_size=12))
digests = st.binary(min_size=32, max_size=32).map(Digest)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    name = draw(names)
    match draw(st.integers(0, 3)):
        case 0:
            return ContainerEntry(name, draw(digests))
        case 1:
            return TensorEntry(name, Spec("bfloat16", (4096, 11)), "torch", draw(digests), None, draw(st.booleans()))
        case 2:
            inline = draw(st.binary(max_size=16).filter(lambda data: len(data) % 2 == 0))
            return TensorEntry(name, Spec("int16", (len(inline) // 2,)), "numpy", None, inline)
    return ValueEntry(name, draw(st.binary(max_size=600)))


def collect(nodes: list[Node]) -> list[Entry]:
    """The entries of a tree, read back from its nodes."""
    by_digest = {made.digest: made.data for made in nodes}
    root = tree_node.decode_tree(nodes[-1].data)
    level = [root]
    while level[0].height:
        level = [tree_node.decode_tree(by_digest[page.node], page=True) for tree in level for page in tree.pages]
    return [entry for tree in level for entry in tree.entries]


@given(st.lists(entries(), max_size=40, unique_by=lambda entry: (type(entry.name), entry.name)), st.randoms())
def test_a_tree_is_read_back_and_does_not_depend_on_the_order_of_its_entries(
    given_entries: list[Entry], rng: random.Random
) -> None:
    nodes = tree_node.tree_nodes("dict", None, given_entries)
    shuffled = list(given_entries)
    rng.shuffle(shuffled)
    assert tree_node.tree_nodes("dict", None, shuffled)[-1].digest == nodes[-1].digest
    assert collect(nodes) == sorted(given_entries, key=lambda entry: tree_node.name_order(entry.name))


def many(count: int) -> list[Entry]:
    return [ValueEntry(f"layer.{number:06d}.weight", b"%d" % number) for number in range(count)]


@pytest.mark.parametrize("count", [1, 255, 256, 257, 5000, 40000])
def test_a_long_tree_is_paged_and_comes_back_whole(count: int) -> None:
    nodes = tree_node.tree_nodes("dict", None, many(count))
    assert collect(nodes) == many(count)
    assert max(len(made.data) for made in nodes) < 40_000


@pytest.mark.parametrize("at", [0, 1, 9_999, 20_000, 39_999])
def test_inserting_one_entry_into_a_long_tree_rewrites_a_few_pages(at: int) -> None:
    before = {made.digest for made in tree_node.tree_nodes("dict", None, many(40_000))}
    inserted = [*many(40_000), ValueEntry(f"layer.{at:06d}.weightx", b"new")]
    new = [made for made in tree_node.tree_nodes("dict", None, inserted) if made.digest not in before]
    assert len(new) <= 6
    assert sum(len(made.data) for made in new) < 48_000


def test_entries_of_a_kilobyte_make_pages_of_bounded_weight() -> None:
    heavy: list[Entry] = [ValueEntry(number, bytes(1000)) for number in range(2000)]
    nodes = tree_node.tree_nodes("list", None, heavy)
    assert max(len(made.data) for made in nodes) < 20_000
    assert collect(nodes) == heavy


def test_one_changed_chunk_rewrites_one_page_of_a_tensor() -> None:
    spec = Spec("float32", (2000, 1 << 20))
    grid = Grid(spec.shape, (1, 1 << 20), 65536)
    chunks = [leaf_digest(b"%d" % number) for number in range(2000)]
    before = {made.digest for made in tensor_node.tensor_nodes(spec, grid, chunks)}
    chunks[700] = leaf_digest(b"changed")
    new = [made for made in tensor_node.tensor_nodes(spec, grid, chunks) if made.digest not in before]
    assert [made.kind for made in new] == [ObjectKind.CHUNK_PAGE, ObjectKind.TENSOR]
    decoded = tensor_node.decode_tensor(new[-1].data)
    assert len(decoded.pages) == 8 and decoded.pages[2] == new[0].digest


@given(st.data())
def test_a_mutated_node_raises_only_typed_errors(data: st.DataObject) -> None:
    nodes = tree_node.tree_nodes("dict", b"attrs", [ValueEntry("a", b"1"), ContainerEntry(3, leaf_digest(b""))])
    raw = bytearray(nodes[-1].data)
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = tree_node.decode_tree(bytes(raw))
    except CkptError:
        return
    again = tree_node.tree_nodes(decoded.kind, decoded.attrs, decoded.entries)
    assert again[-1].data == bytes(raw)


def test_a_node_of_a_newer_version_is_refused_as_newer() -> None:
    with pytest.raises(UnsupportedVersionError, match="upgrade"):
        tree_node.decode_tree(pack_canonical(["tree", 2, {}]))


def test_names_that_come_twice_or_out_of_order_are_refused() -> None:
    rows = [["b", 4, b""], ["a", 4, b""]]
    payload = {"height": 0, "kind": "dict", "attrs": None, "entries": rows}
    with pytest.raises(CorruptionError, match="out of order"):
        tree_node.decode_tree(pack_canonical(["tree", 1, payload]))
    with pytest.raises(CorruptionError, match="out of order"):
        tree_node.decode_tree(pack_canonical(["tree", 1, payload | {"entries": [rows[0], rows[0]]}]))


def test_a_tensor_node_with_too_few_chunks_is_refused() -> None:
    spec = Spec("float32", (4, 4))
    made = tensor_node.tensor_nodes(spec, Grid((4, 4), (1, 4), 16), [leaf_digest(b"x")] * 3)
    with pytest.raises(CorruptionError, match="4 chunks"):
        tensor_node.decode_tensor(made[-1].data)


def commit_object() -> CommitObject:
    return CommitObject(
        leaf_digest(b"root"), (leaf_digest(b"parent"),), "message", "author", 1, 7, {"loss": 1.5}, b"\xc0",
        leaf_digest(b"layout"), {"new_bytes": 5},
        (LineageEdge("fine-tune-of", leaf_digest(b"base"), b"\xc0"),), b"\xc3",
    )  # fmt: skip


def test_commits_and_layouts_are_read_back() -> None:
    commit = commit_object()
    assert decode_commit(commit_node(commit).data) == commit
    plain = replace(commit, lineage=(), provenance=None)
    assert decode_commit(commit_node(plain).data) == plain
    assert b"lineage" not in commit_node(plain).data
    layout = LayoutObject(8, (("dp", 4), ("tp", 2)), {"w": ["S(0)", "R"]}, (("a", "b"),))
    assert decode_layout(layout_node(layout).data) == layout


@pytest.mark.parametrize(
    "rows",
    [[], [["tuned", b"short", None]], [["Upper", bytes(32), None]], [["a", bytes(32)]], [["-a", bytes(32), None]], [7]],
)
def test_a_lineage_that_is_none_is_refused(rows: list[Any]) -> None:
    payload = unpack_canonical(commit_node(commit_object()).data)[2] | {"lineage": rows}
    with pytest.raises(CorruptionError, match="lineage"):
        decode_commit(make_node(ObjectKind.COMMIT, payload).data)


@given(st.data())
def test_a_mutated_commit_raises_only_typed_errors(data: st.DataObject) -> None:
    raw = bytearray(commit_node(commit_object()).data)
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert commit_node(decode_commit(bytes(raw))).data == bytes(raw)
    except CkptError:
        pass


def test_what_a_stranger_calls_a_dtype_is_remembered_only_if_it_is_short() -> None:
    remembered = shared_spec.cache_info
    for name, more in (("a later one", 1), ("x" * 1_000_000, 0)):
        before = remembered().currsize
        entry = tree_node.decode_entry(["k", 1, name, [2, 3, 5, 7, 11], 0, bytes(32)])
        assert isinstance(entry, TensorEntry)
        assert entry.spec == Spec(name, (2, 3, 5, 7, 11))
        assert remembered().currsize == before + more


def test_a_key_of_five_thousand_digits_is_not_read_as_a_number() -> None:
    assert parse_key("9" * 5000) == ("9" * 5000,)
