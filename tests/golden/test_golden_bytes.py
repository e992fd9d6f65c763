"""The bytes of format 1, one literal per kind of object: never regenerated, only added to.

What a test here holds against the code is what repositories in the world hold: if one fails,
the code is wrong, or the format has a new version.
"""

from __future__ import annotations

import pytest

from cas_ckpt.objects import pack, tensor_node, tree_node
from cas_ckpt.objects.codec import EncodingPolicy, decode_extent, encode_extent
from cas_ckpt.objects.commit import decode_commit, decode_layout
from cas_ckpt.objects.digest import Digest, chunk_id, leaf_digests, object_id
from cas_ckpt.objects.record import unseal
from cas_ckpt.objects.tree_node import name_order
from cas_ckpt.objects.values import decode_value, encode_value
from tests.golden.fixed import (
    CHUNK,
    COMMIT,
    ENTRIES,
    FIRST_COMMIT,
    IDS,
    LAYOUT,
    MANY,
    NAME,
    NODES,
    PLAIN,
    SHARDED_LAYOUT,
    VALUES,
    an_id,
    extents,
    paged_tree,
    records,
)

BYTES: dict[str, str] = {}

IDENTITIES: dict[str, str] = {}


def literal(name: str) -> bytes:
    return bytes.fromhex(BYTES[name])


# --- nodes and their ids ---------------------------------------------------------------------


@pytest.mark.parametrize("name", NODES)
def test_a_node_has_these_bytes_and_this_id(name: str) -> None:
    made = NODES[name]()
    assert made.data == literal(name)
    assert made.digest.hex() == IDENTITIES[name]
    assert object_id(made.kind.label, literal(name)).hex() == IDENTITIES[name]


def test_every_page_of_a_long_tree_has_this_id() -> None:
    assert [made.digest.hex()[:16] for made in paged_tree()] == IDENTITIES["pages of a long tree"].split()


def test_trees_are_read_from_these_bytes() -> None:
    found = tree_node.decode_tree(literal("tree"))
    assert (found.kind, found.attrs, found.height) == ("dict", None, 0)
    assert found.entries == tuple(sorted(ENTRIES, key=lambda entry: name_order(entry.name)))
    sparse = tree_node.decode_tree(literal("tree of a sparse tensor"))
    assert sparse.kind == "sparse_coo"
    assert decode_value(sparse.attrs or b"") == {"shape": (4, 4), "coalesced": True}
    assert tree_node.decode_tree(literal("empty tree")).entries == ()


def test_pages_are_read_from_these_bytes() -> None:
    top = tree_node.decode_tree(literal("tree over pages"))
    assert (top.height, [page.node for page in top.pages]) == (1, [made.digest for made in paged_tree()[:-1]])
    page = tree_node.decode_tree(literal("tree page"), page=True)
    assert page.height == 0
    assert set(page.entries) <= set(MANY)


def test_tensors_are_read_from_these_bytes() -> None:
    found = tensor_node.decode_tensor(literal("tensor"))
    assert (str(found.spec), found.chunks, found.pages) == ("float32[3000, 700]", tuple(IDS[:3]), ())
    assert (found.grid.cell, found.grid.leaf_bytes) == ((1024, 700), 44800)
    paged = tensor_node.decode_tensor(literal("tensor over pages"))
    assert (paged.chunks, len(paged.pages), paged.grid.cell) == ((), 2, (1 << 20,))
    assert tensor_node.decode_chunk_page(literal("chunk-page")) == (IDS[256],)


def test_commits_and_layouts_are_read_from_these_bytes() -> None:
    assert decode_commit(literal("commit")) == COMMIT
    assert decode_commit(literal("first commit")) == FIRST_COMMIT
    assert decode_layout(literal("layout")) == LAYOUT
    assert decode_layout(literal("layout of a mesh")) == SHARDED_LAYOUT


# --- chunks ----------------------------------------------------------------------------------


def test_known_data_has_these_leaf_digests_and_this_chunk_id() -> None:
    digests = leaf_digests(memoryview(CHUNK), 65536)
    assert b"".join(digests) == literal("leaf digests")
    assert chunk_id(len(CHUNK), digests).hex() == IDENTITIES["chunk"]
    assert chunk_id(0, []).hex() == IDENTITIES["chunk of nothing"]


# --- packs -----------------------------------------------------------------------------------


def chunk_extents() -> tuple[list[pack.ExtentInfo], list[Digest]]:
    data = literal("leaf digests")
    digests = [Digest(data[:32]), Digest(data[32:])]
    return extents(Digest(bytes.fromhex(IDENTITIES["chunk"])), digests), digests


@pytest.mark.parametrize("kind", pack.PackKind)
def test_a_pack_header_has_these_bytes(kind: pack.PackKind) -> None:
    assert pack.encode_header(NAME, kind) == literal(f"header of a {kind.suffix} pack")
    assert pack.decode_header(literal(f"header of a {kind.suffix} pack")) == (NAME, kind)


def test_entry_headers_have_these_bytes() -> None:
    infos, digests = chunk_extents()
    for name, info in zip(("node", "chunk", "delta"), infos, strict=True):
        theirs = digests if name != "node" else []
        assert pack.encode_entry_header(info, theirs) == literal(f"entry header of a {name}")
        found = pack.decode_entry_header(literal(f"entry header of a {name}"), offset=info.offset)
        assert found == (info, theirs)


def test_directory_and_trailer_have_these_bytes() -> None:
    infos, _ = chunk_extents()
    directory, trailer = literal("directory"), literal("trailer")
    assert pack.encode_directory(infos) == directory
    assert pack.encode_trailer(NAME, pack.PackKind.DATA, directory, directory_offset=infos[-1].end) == trailer
    size = infos[-1].end + len(directory) + len(trailer)
    found = pack.decode_trailer(trailer, size_bytes=size, key="pack")
    assert sorted(pack.decode_directory(directory, found, key="pack"), key=lambda info: info.offset) == infos


# --- records ---------------------------------------------------------------------------------


def test_records_have_these_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = records(monkeypatch)
    assert {name: data.hex() for name, data in made.items()} == {name: BYTES[f"record {name}"] for name in made}


def test_records_are_read_from_these_bytes() -> None:
    config = unseal("config", literal("record config"), version=1, key="config")
    assert config == {
        "store_id": "0123456789abcdef" * 2, "default_branch": "main", "encoding": "auto", "pack_bytes": 1 << 29,
        "conditional_writes": "honoured", "nonce": NAME,
    }  # fmt: skip
    placeholder = unseal("ref", literal("record placeholder"), version=1, key="ref")
    assert placeholder == {"target": None, "generation": -1, "nonce": NAME, "log": []}
    branch = unseal("ref", literal("record branch"), version=1, key="ref")
    assert branch == {"target": an_id(30), "generation": 3, "nonce": NAME, "log": []}
    tag = unseal("ref", literal("record tag"), version=1, key="ref")
    assert tag["log"] == [[1_790_000_000_500_000, None, an_id(31), "tag: set to main", "me@here"]]
    gc = unseal("gc-state", literal("record gc-state condemned"), version=1, key="gc/state")
    assert gc == {
        "generation": 9, "phase": "condemned", "condemned": ["packs/00/" + "0" * 32 + ".data"], "nonce": NAME,
    }  # fmt: skip


# --- extents and values ----------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_an_extent_is_read_from_these_bytes(name: str) -> None:
    encoding, plain = PLAIN[name]
    assert bytes(decode_extent(encoding, literal(f"extent {name}"), num_bytes=len(plain))) == plain


@pytest.mark.parametrize("name", ["raw", "zero", "constant"])
def test_an_extent_that_no_library_compresses_has_these_bytes(name: str) -> None:
    encoding, plain = PLAIN[name]
    made = encode_extent(plain, policy=EncodingPolicy.RAW, item_bytes=4)
    assert (made.encoding, bytes(made.payload)) == (encoding, literal(f"extent {name}"))


@pytest.mark.parametrize("name", VALUES)
def test_a_value_has_these_bytes(name: str) -> None:
    data = literal(f"value {name}")
    assert encode_value(VALUES[name], key="") == data
    back = decode_value(data)
    assert type(back) is type(VALUES[name])
    assert encode_value(back, key="") == data
