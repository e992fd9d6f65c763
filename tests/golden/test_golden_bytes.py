"""The bytes of format 1, those of docs/format-vectors.json: never regenerated, only added to.

What a test here holds against the code is what repositories in the world hold: if one fails,
the code is wrong, or the format has a new version.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cas_ckpt.native import leaf_digests
from cas_ckpt.objects import nodes as tensor_node
from cas_ckpt.objects import nodes as tree_node
from cas_ckpt.objects import pack
from cas_ckpt.objects.codec import Encoding, decode_extent, encode_extent
from cas_ckpt.objects.digest import Digest, chunk_id, object_id, unseal
from cas_ckpt.objects.layouts import decode_layout
from cas_ckpt.objects.nodes import ValueEntry, decode_commit, name_order
from cas_ckpt.objects.spec import Spec, grid_for
from cas_ckpt.objects.state import parse_key, render_key
from cas_ckpt.objects.values import decode_value, encode_value
from tests.golden.fixed import (
    CHUNK,
    COMMIT,
    ENTRIES,
    FIRST_COMMIT,
    FORMS_LAYOUT,
    IDS,
    LAYOUT,
    MANY,
    NAME,
    NODES,
    PIPELINE_LAYOUT,
    SHARDED_LAYOUT,
    VALUES,
    an_id,
    extents,
    paged_tree,
    records,
)

VECTORS = json.loads((Path(__file__).parents[2] / "docs" / "format-vectors.json").read_text())
"""The vectors that ship with docs/format.md."""


def literal(kind: str, name: str, field: str = "bytes") -> bytes:
    return bytes.fromhex(VECTORS[kind][name][field])


def packed(name: str) -> bytes:
    return bytes.fromhex(VECTORS["packs"][name])


CHUNK_NAME = "128 KiB: bytes 0..255, repeated"


# --- nodes and their ids ---------------------------------------------------------------------


@pytest.mark.parametrize("name", NODES)
def test_a_node_has_these_bytes_and_this_id(name: str) -> None:
    made = NODES[name]()
    assert made.data == literal("nodes", name)
    assert made.digest.hex() == VECTORS["nodes"][name]["id"]
    assert object_id(VECTORS["nodes"][name]["label"], literal("nodes", name)).hex() == VECTORS["nodes"][name]["id"]


def test_every_page_of_a_long_tree_has_this_id() -> None:
    assert [made.digest.hex()[:16] for made in paged_tree()] == VECTORS["pages of a long tree (first 16 digits of ids)"]


def test_trees_are_read_from_these_bytes() -> None:
    found = tree_node.decode_tree(literal("nodes", "tree"))
    assert (found.kind, found.attrs, found.height) == ("dict", None, 0)
    assert found.entries == tuple(sorted(ENTRIES, key=lambda entry: name_order(entry.name)))
    sparse = tree_node.decode_tree(literal("nodes", "tree of a sparse tensor"))
    assert sparse.kind == "sparse_coo"
    assert decode_value(sparse.attrs or b"") == {"shape": (4, 4), "coalesced": True}
    assert tree_node.decode_tree(literal("nodes", "empty tree")).entries == ()


def test_values_of_ranks_are_read_from_these_bytes() -> None:
    found = tree_node.decode_tree(literal("nodes", "tree of ranks"))
    assert (found.kind, decode_value(found.attrs or b"")) == ("ranks", {"world_size": 2})
    assert found.entries == tuple(ValueEntry(rank, encode_value({"at": rank}, key="")) for rank in range(2))


def test_pages_are_read_from_these_bytes() -> None:
    top = tree_node.decode_tree(literal("nodes", "tree over pages"))
    assert (top.height, [page.node for page in top.pages]) == (1, [made.digest for made in paged_tree()[:-1]])
    page = tree_node.decode_tree(literal("nodes", "tree page"), page=True)
    assert page.height == 0
    assert set(page.entries) <= set(MANY)


def test_tensors_are_read_from_these_bytes() -> None:
    found = tensor_node.decode_tensor(literal("nodes", "tensor"))
    assert (str(found.spec), found.chunks, found.pages) == ("float32[3000, 700]", tuple(IDS[:3]), ())
    assert (found.grid.cell, found.grid.leaf_bytes) == ((1024, 700), 89600)
    paged = tensor_node.decode_tensor(literal("nodes", "tensor over pages"))
    assert (paged.chunks, len(paged.pages), paged.grid.cell) == ((), 2, (1 << 20,))
    assert tensor_node.decode_chunk_page(literal("nodes", "chunk-page")) == (IDS[256],)


def test_commits_and_layouts_are_read_from_these_bytes() -> None:
    assert decode_commit(literal("nodes", "commit")) == COMMIT
    assert decode_commit(literal("nodes", "first commit")) == FIRST_COMMIT
    assert decode_layout(literal("nodes", "layout")) == LAYOUT
    assert decode_layout(literal("nodes", "layout of a mesh")) == SHARDED_LAYOUT
    assert decode_layout(literal("nodes", "layout of several meshes")) == PIPELINE_LAYOUT
    assert decode_layout(literal("nodes", "layout of orders and versions")) == FORMS_LAYOUT


# --- chunks ----------------------------------------------------------------------------------


def test_known_data_has_these_leaf_digests_and_this_chunk_id() -> None:
    digests = leaf_digests(memoryview(CHUNK), 65536)
    assert digests == literal("chunks", CHUNK_NAME, "leaf_digests")
    assert chunk_id(len(CHUNK), digests).hex() == VECTORS["chunks"][CHUNK_NAME]["id"]
    assert chunk_id(0, b"").hex() == VECTORS["chunks"]["of nothing"]["id"]


# --- packs -----------------------------------------------------------------------------------


def chunk_extents() -> tuple[list[pack.ExtentInfo], bytes]:
    digests = literal("chunks", CHUNK_NAME, "leaf_digests")
    return extents(Digest(bytes.fromhex(VECTORS["chunks"][CHUNK_NAME]["id"])), digests), digests


@pytest.mark.parametrize("kind", pack.PackKind)
def test_a_pack_header_has_these_bytes(kind: pack.PackKind) -> None:
    assert pack.encode_header(NAME, kind) == packed(f"header of a {kind.suffix} pack")
    assert pack.decode_header(packed(f"header of a {kind.suffix} pack")) == (NAME, kind)


def test_entry_headers_have_these_bytes() -> None:
    infos, digests = chunk_extents()
    for name, info in zip(("node", "chunk", "delta"), infos, strict=True):
        theirs = digests if name != "node" else b""
        assert pack.encode_entry_header(info, theirs) == packed(f"entry header of a {name}")
        found = pack.decode_entry_header(packed(f"entry header of a {name}"), offset=info.offset)
        assert found == (info, theirs)


def test_directory_and_trailer_have_these_bytes() -> None:
    infos, _ = chunk_extents()
    directory, trailer = packed("directory"), packed("trailer")
    assert pack.encode_directory(infos) == directory
    assert pack.encode_trailer(NAME, pack.PackKind.DATA, directory, directory_offset=infos[-1].end) == trailer
    size = infos[-1].end + len(directory) + len(trailer)
    found = pack.decode_trailer(trailer, size_bytes=size, key="pack")
    assert sorted(pack.decode_directory(directory, found, key="pack"), key=lambda info: info.offset) == infos


# --- records ---------------------------------------------------------------------------------


def test_records_have_these_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = records(monkeypatch)
    assert {name: data.hex() for name, data in made.items()} == {
        name: vector["bytes"] for name, vector in VECTORS["records"].items()
    }


def test_records_are_read_from_these_bytes() -> None:
    config = unseal("config", literal("records", "config"), version=1, key="config")
    assert config == {
        "store_id": "0123456789abcdef" * 2, "default_branch": "main", "encoding": "auto", "pack_bytes": 1 << 29,
        "conditional_writes": "honoured", "nonce": NAME,
    }  # fmt: skip
    placeholder = unseal("ref", literal("records", "placeholder"), version=1, key="refs/heads/main.ref")
    assert placeholder == {"target": None, "generation": -1, "generation_nonce": b"", "nonce": NAME, "log": []}
    branch = unseal("ref", literal("records", "branch"), version=1, key="refs/heads/main.ref")
    assert branch == {
        "target": an_id(30), "generation": 3, "generation_nonce": NAME, "nonce": NAME, "log": []
    }  # fmt: skip
    assert unseal("name", literal("records", "name"), version=1, key="names/heads/main.ref") == {}
    tag = unseal("ref", literal("records", "tag"), version=1, key="refs/tags/v1.ref")
    assert tag["log"] == [[1_790_000_000_500_000, None, an_id(31), "tag: set to main", "me@here"]]
    gc = unseal("gc-state", literal("records", "gc-state condemned"), version=1, key="gc/state")
    assert gc == {
        "generation": 9, "generation_nonce": NAME, "phase": "condemned",
        "condemned": ["packs/00/" + "0" * 32 + ".data"], "nonce": NAME,
    }  # fmt: skip


# --- extents and values ----------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS["extents"].values(), ids=VECTORS["extents"])
def test_an_extent_is_read_from_these_bytes(vector: dict[str, Any]) -> None:
    payload = bytes.fromhex(vector["payload"])
    assert bytes(decode_extent(vector["encoding"], payload, num_bytes=vector["num_bytes"])).hex() == vector["plain"]


def test_every_encoding_has_its_bytes() -> None:
    assert {vector["encoding"] for vector in VECTORS["extents"].values()} == set(Encoding)


@pytest.mark.parametrize("name", ["raw", "zero", "constant"])
def test_an_extent_that_no_library_compresses_has_these_bytes(name: str) -> None:
    made = encode_extent(literal("extents", name, "plain"), policy="raw", item_bytes=4)
    assert (made.encoding, bytes(made.payload)) == (
        VECTORS["extents"][name]["encoding"], literal("extents", name, "payload")
    )  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_a_value_has_these_bytes(name: str) -> None:
    data = literal("values", name)
    assert encode_value(VALUES[name], key="") == data
    back = decode_value(data)
    assert type(back) is type(VALUES[name])
    assert encode_value(back, key="") == data


@pytest.mark.parametrize("vector", VECTORS["grids"], ids=lambda vector: f"{vector['shape']} x {vector['item']}")
def test_a_shape_has_this_grid(vector: dict[str, Any]) -> None:
    dtype = {1: "int8", 2: "bfloat16", 4: "float32", 16: "complex128"}[vector["item"]]
    grid = grid_for(Spec(dtype, tuple(vector["shape"])))
    assert (list(grid.cell), grid.leaf_bytes) == (vector["cell"], vector["leaf"])


@pytest.mark.parametrize("vector", VECTORS["keys"], ids=lambda vector: vector["key"])
def test_a_path_has_this_key(vector: dict[str, Any]) -> None:
    assert render_key(tuple(vector["path"])) == vector["key"]
    assert parse_key(vector["key"]) == tuple(vector["path"])
