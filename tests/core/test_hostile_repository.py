"""What a malicious repository holds is refused with a typed error; it never restores wrong bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import find_entry, load_tree
from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError, TooLargeError
from cas_ckpt.native import leaf_digests
from cas_ckpt.objects import codec, pack
from cas_ckpt.objects.digest import LEAF_BYTES, Digest, ObjectKind, chunk_id, leaf_digest
from cas_ckpt.objects.layouts import decode_layout
from cas_ckpt.objects.nodes import (
    ContainerEntry,
    Node,
    TensorEntry,
    ValueEntry,
    decode_commit,
    decode_tensor,
    decode_tree,
    make_node,
    tensor_nodes,
    tree_nodes,
)
from cas_ckpt.objects.pack import ExtentInfo, PackKind
from cas_ckpt.objects.spec import Box, Grid, Spec, raw_dtype
from cas_ckpt.objects.state import StoredTensor, TensorCopy
from cas_ckpt.objects.values import encode_value
from cas_ckpt.ops.checkout.checkout import fetch_tensors, read_array
from cas_ckpt.transfer.pack_writer import EncodedChunk, PackWriter, write_nodes
from tests.builders import ArrayMemory, new_repository, numbers

SPEC = Spec("float32", (512,))
DATA = numbers(512).tobytes()
LEAVES = leaf_digests(memoryview(DATA), LEAF_BYTES)
CHUNK = chunk_id(len(DATA), LEAVES)


@pytest.fixture
def repo(tmp_path: Path) -> RepositoryHandle:
    return new_repository(tmp_path / "repo")


def store_nodes(repo: RepositoryHandle, nodes: list[Node]) -> Digest:
    repo.add_written([write_nodes(repo.store, nodes)], nodes, generation=repo.begin_writing())
    return nodes[-1].digest


def store_entry(repo: RepositoryHandle, info: ExtentInfo, digests: list[Digest], payload: bytes) -> None:
    """One pack entry whose header says just what `info` says."""
    writer = PackWriter(repo.store.open_writer, PackKind.DATA)
    placed = ExtentInfo(**{name: getattr(info, name) for name in ExtentInfo.__slots__} | {"offset": writer.size_bytes})
    writer._append(placed, digests, payload)
    other = numbers(4096, seed=9).tobytes()
    leaves = leaf_digests(memoryview(other), LEAF_BYTES)
    name = chunk_id(len(other), leaves)
    writer.add_chunk(EncodedChunk(name, len(other), LEAF_BYTES, leaves, codec.RAW, other))
    repo.add_written([writer.finish()], [], generation=repo.begin_writing())


def store_chunk(repo: RepositoryHandle, data: bytes) -> Digest:
    leaves = leaf_digests(memoryview(data), LEAF_BYTES)
    writer = PackWriter(repo.store.open_writer, PackKind.DATA)
    digest = chunk_id(len(data), leaves)
    writer.add_chunk(EncodedChunk(digest, len(data), LEAF_BYTES, leaves, codec.RAW, data))
    repo.add_written([writer.finish()], [], generation=repo.begin_writing())
    return digest


def entry_of(**changed: Any) -> ExtentInfo:
    fields: dict[str, Any] = {
        "digest": CHUNK, "kind": ObjectKind.CHUNK, "encoding": codec.RAW, "num_bytes": len(DATA),
        "stored_bytes": len(DATA), "leaf_bytes": LEAF_BYTES, "first_leaf": 0, "num_leaves": 1, "offset": 0,
        "header_bytes": pack.entry_header_bytes(1), "base": None,
    }  # fmt: skip
    return ExtentInfo(**fields | changed)


def fetch(repo: RepositoryHandle, *tensors: StoredTensor) -> list[np.ndarray[Any, Any]]:
    arrays = [np.full(tensor.spec.shape, 7, raw_dtype(tensor.spec.item_bytes)) for tensor in tensors]
    paths = [(f"t{number}",) for number in range(len(tensors))]
    fetch_tensors(repo, [TensorCopy(p, t, ArrayMemory(a)) for p, t, a in zip(paths, tensors, arrays, strict=True)])
    return arrays


# --- chunks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "payload"),
    [
        ({"stored_bytes": 0}, b""),
        ({"stored_bytes": 512}, DATA[:512]),
        ({"num_leaves": 0}, DATA),
        ({"kind": ObjectKind.TREE}, DATA),
    ],
    ids=["no payload", "half a payload", "no leaves", "a node"],
)
def test_a_raw_extent_that_holds_less_than_it_claims_is_never_restored(
    repo: RepositoryHandle, changed: dict[str, Any], payload: bytes
) -> None:
    store_entry(repo, entry_of(**changed), LEAVES, payload)
    with pytest.raises(CkptError):
        fetch(repo, StoredTensor(SPEC, "torch", CHUNK, None, single=True))


def test_a_zero_extent_that_claims_more_than_the_cell_is_not_decoded(repo: RepositoryHandle) -> None:
    leaf = leaf_digest(bytes(LEAF_BYTES))
    many = 1 << 16
    digest = chunk_id(many * LEAF_BYTES, leaf * many)
    info = entry_of(
        digest=digest, encoding=codec.Encoding.ZERO, num_bytes=many * LEAF_BYTES, stored_bytes=0, num_leaves=many,
        header_bytes=pack.entry_header_bytes(many),
    )  # fmt: skip
    store_entry(repo, info, leaf * many, b"")
    import tracemalloc

    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError, match="t0"):
            fetch(repo, StoredTensor(SPEC, "torch", digest, None, single=True))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_leaves_of_four_gigabytes_are_refused() -> None:
    info = entry_of(leaf_bytes=(1 << 32) - 1)
    with pytest.raises(CorruptionError):
        pack.decode_entry_header(pack.encode_entry_header(info, LEAVES), offset=0)


def test_cells_of_two_sizes_do_not_share_a_chunk(repo: RepositoryHandle) -> None:
    digest = store_chunk(repo, DATA)
    longer = StoredTensor(Spec("float32", (1024,)), "torch", digest, None, single=True)
    with pytest.raises(CorruptionError, match="t1"):
        fetch(repo, StoredTensor(SPEC, "torch", digest, None, single=True), longer)


def test_a_chunk_that_is_nowhere_is_reported_with_its_tensor(repo: RepositoryHandle) -> None:
    with pytest.raises(NotFoundError, match="t0"):
        fetch(repo, StoredTensor(SPEC, "torch", CHUNK, None, single=True))


# --- trees ------------------------------------------------------------------------------


def test_a_tree_that_doubles_at_every_level_is_refused(repo: RepositoryHandle) -> None:
    nodes = tree_nodes("dict", None, [ValueEntry("x", encode_value(1, key=""))])
    for _ in range(60):
        below = nodes[-1].digest
        nodes += tree_nodes("dict", None, [ContainerEntry("a", below), ContainerEntry("b", below)])
    root = store_nodes(repo, nodes)
    with pytest.raises(TooLargeError, match="entries"):
        load_tree(repo, root)


def pages_of(names: list[list[str]], firsts: list[str]) -> list[Node]:
    value = encode_value(1, key="")
    pages = [make_node(ObjectKind.TREE_PAGE, {"height": 0, "entries": [[n, 4, value] for n in part]}) for part in names]
    rows = [[first, 5, page.digest] for first, page in zip(firsts, pages, strict=True)]
    return [*pages, make_node(ObjectKind.TREE, {"height": 1, "kind": "dict", "attrs": None, "entries": rows})]


@pytest.mark.parametrize(
    ("names", "firsts"),
    [([["a", "d"], ["c", "e"]], ["a", "c"]), ([["a", "b"], ["c", "d"]], ["a", "b2"])],
    ids=["overlapping", "another first name"],
)
def test_pages_out_of_order_are_refused_by_every_way_of_reading(
    repo: RepositoryHandle, names: list[list[str]], firsts: list[str]
) -> None:
    root = store_nodes(repo, pages_of(names, firsts))
    with pytest.raises(CorruptionError):
        load_tree(repo, root)


def test_entries_behind_a_false_first_name_are_not_found_by_key(repo: RepositoryHandle) -> None:
    root = store_nodes(repo, pages_of([["a", "b"], ["c", "d"]], ["a", "b2"]))
    with pytest.raises(CorruptionError):
        find_entry(repo, root, "c")


def tree_of(row: list[Any], **changed: Any) -> bytes:
    head = {"height": 0, "kind": "dict", "attrs": None, "entries": [row]}
    return make_node(ObjectKind.TREE, head | changed).data


ID = bytes(32)


@pytest.mark.parametrize(
    "row",
    [
        ["x", False, ID],
        ["x", 0.0, ID],
        [b"plain", 0, ID],
        ["x", 1, "float32", [512], -1, ID],
        ["x", 1, "float32", [512], True, ID],
        ["x", 1, "float32", [8], 0, ID],
        ["x", 2, "float32", [1 << 40], 0, ID],
        ["x", 2, "float32", [1 << 64 - 1, 4], 0, ID],
        ["x", 3, "float32", [512], 0, DATA],
        ["x", 3, "float32", [1], True, bytes(4)],
        ["x", 4, bytes(2000)],
    ],
    ids=str,
)
def test_an_entry_in_another_form_than_is_written_is_refused(row: list[Any]) -> None:
    with pytest.raises(CorruptionError):
        decode_tree(tree_of(row))


@pytest.mark.parametrize(
    "changed",
    [{"more": 1}, {"height": 1, "entries": []}, {"height": "1"}, {"entries": [[n, 4, b"\xc0"] for n in range(300)]}],
    ids=["field", "empty", "height", "300 entries"],
)
def test_a_tree_in_another_form_than_is_written_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(CorruptionError):
        decode_tree(tree_of(["x", 4, b"\xc0"], **changed))


# --- tensor nodes -----------------------------------------------------------------------


def tensor_of(**changed: Any) -> bytes:
    payload = {"dtype": "float32", "shape": [1024], "cell": [512], "leaf": 1024, "chunks": ID * 2}
    return make_node(ObjectKind.TENSOR, payload | changed).data


@pytest.mark.parametrize(
    "changed",
    [
        {"more": 1},
        {"pages": b""},
        {"cell": [1024], "chunks": ID},
        {"cell": [4096], "chunks": ID},
        {"shape": [1 << 40], "cell": [1 << 39]},
        {"leaf": 1 << 20},
        {"cell": [0]},
        {"cell": [-1]},
    ],
    ids=str,
)
def test_a_tensor_node_in_another_form_than_is_written_is_refused(changed: dict[str, Any]) -> None:
    decode_tensor(tensor_of())
    with pytest.raises(CorruptionError):
        decode_tensor(tensor_of(**changed))


def test_pages_of_uneven_length_do_not_shift_the_chunks(repo: RepositoryHandle) -> None:
    chunk = store_chunk(repo, DATA)
    cells = 511
    grid = Grid((512 * cells,), (512,), LEAF_BYTES)
    pages = [make_node(ObjectKind.CHUNK_PAGE, chunk * length, [chunk]) for length in (255, 256)]
    payload = {
        "dtype": "float32", "shape": [512 * cells], "cell": [512], "leaf": LEAF_BYTES,
        "pages": b"".join(page.digest for page in pages),
    }  # fmt: skip
    node = make_node(ObjectKind.TENSOR, payload, [page.digest for page in pages])
    store_nodes(repo, [*pages, node])
    stored = StoredTensor(Spec("float32", grid.shape), "torch", node.digest, None)
    with pytest.raises(CorruptionError):
        fetch(repo, stored)
    with pytest.raises(CorruptionError):
        read_array(repo, stored, Box((255 * 512,), (1,)))


def test_pages_as_they_are_written_are_read_both_ways(repo: RepositoryHandle) -> None:
    chunk = store_chunk(repo, DATA)
    cells = 511
    grid = Grid((512 * cells,), (512,), LEAF_BYTES)
    nodes = tensor_nodes(Spec("float32", grid.shape), grid, [chunk] * cells)
    store_nodes(repo, nodes)
    stored = StoredTensor(Spec("float32", grid.shape), "torch", nodes[-1].digest, None)
    assert fetch(repo, stored)[0].tobytes() == DATA * cells
    assert read_array(repo, stored, Box((510 * 512,), (512,))).tobytes() == DATA


# --- commits, layouts, versions ---------------------------------------------------------


COMMIT: dict[str, Any] = {
    "root": ID, "parents": [], "message": "", "author": "", "time_us": 0, "step": None, "metrics": [], "meta": None,
    "layout": ID, "stats": {},
}  # fmt: skip
LAYOUT: dict[str, Any] = {"world_size": 1, "mesh": [], "placements": {}, "aliases": []}


@pytest.mark.parametrize(
    "changed",
    [
        {"metrics": [["loss", "low"]]},
        {"metrics": [["loss", -float("nan")]]},
        {"metrics": [["loss", 1]]},
        {"metrics": [[1, 1.0]]},
        {"metrics": [["loss", 1.0], ["loss", 1.0]]},
        {"metrics": {"loss": 1.0}},
        {"stats": {"num_entries": "many"}},
        {"step": (1 << 64) - 1},
        {"time_us": 1 << 63},
    ],
    ids=str,
)
def test_a_commit_that_no_index_could_hold_is_refused(changed: dict[str, Any]) -> None:
    decode_commit(make_node(ObjectKind.COMMIT, COMMIT).data)
    with pytest.raises(CorruptionError):
        decode_commit(make_node(ObjectKind.COMMIT, COMMIT | changed).data)


@pytest.mark.parametrize(
    "changed", [{"mesh": [1]}, {"mesh": [["dp", "two"]]}, {"aliases": [3]}, {"placements": {"w": 1}}], ids=str
)
def test_a_layout_of_odd_form_is_refused(changed: dict[str, Any]) -> None:
    decode_layout(make_node(ObjectKind.LAYOUT, LAYOUT).data)
    with pytest.raises(CorruptionError):
        decode_layout(make_node(ObjectKind.LAYOUT, LAYOUT | changed).data)


def version_zero(kind: ObjectKind, payload: Any) -> bytes:
    from cas_ckpt.objects.digest import pack_canonical

    return pack_canonical([kind.label, 0, payload])


@pytest.mark.parametrize(
    ("kind", "payload", "decode"),
    [(ObjectKind.COMMIT, COMMIT, decode_commit), (ObjectKind.LAYOUT, LAYOUT, decode_layout)],
    ids=["commit", "layout"],
)
def test_a_version_that_never_was_is_refused(kind: ObjectKind, payload: Any, decode: Callable[[bytes], Any]) -> None:
    with pytest.raises(CorruptionError):
        decode(version_zero(kind, payload))


def test_a_tensor_of_one_chunk_is_read_as_it_was(repo: RepositoryHandle) -> None:
    nodes = tree_nodes("dict", None, [TensorEntry("w", SPEC, "torch", store_chunk(repo, DATA), None, single=True)])
    stored = load_tree(repo, store_nodes(repo, nodes)).children["w"]
    assert isinstance(stored, StoredTensor)
    assert fetch(repo, stored)[0].tobytes() == DATA
