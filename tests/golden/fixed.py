"""Fixed objects of every kind, and how today's code writes them.

What stands here may grow, but an entry that was released is never changed: its bytes are
frozen in test_golden_bytes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cas_ckpt import clock
from cas_ckpt.core.config import Config
from cas_ckpt.core.create import write_config
from cas_ckpt.core.protocol import GcState, encode_gc_state
from cas_ckpt.core.ref_store import RefStore
from cas_ckpt.core.refs import Generation, RefKind, new_move
from cas_ckpt.objects import pack
from cas_ckpt.objects.codec import Encoding
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.layouts import InBoxes, LayoutMesh, LayoutObject, OverMesh, Whole, layout_node
from cas_ckpt.objects.nodes import (
    CommitObject,
    ContainerEntry,
    Entry,
    Node,
    TensorEntry,
    ValueEntry,
    commit_node,
    tensor_nodes,
    tree_nodes,
)
from cas_ckpt.objects.spec import Box, Spec, Split, grid_for
from cas_ckpt.objects.structures import Named
from cas_ckpt.objects.values import encode_value
from cas_ckpt.storage.memory import MemoryStore


def an_id(number: int) -> Digest:
    """32 bytes that are easy to recognize."""
    return Digest(bytes([number]) * 32)


NAME = bytes(range(16))
"""Name of a pack, and the nonce of every record here."""

# --- nodes -----------------------------------------------------------------------------------

ENTRIES: list[Entry] = [
    ValueEntry("step", encode_value(7, key="")),
    ContainerEntry("optim", an_id(1)),
    TensorEntry("chunked", Spec("bfloat16", (4096, 4096)), "torch", an_id(2), None),
    TensorEntry("single", Spec("float32", (30, 40)), "torch", an_id(3), None, single=True),
    TensorEntry("inline", Spec("float8_e4m3fn", (3,)), "torch", None, b"\x01\x02\x03"),
    TensorEntry("array", Spec("np:<M8[ns]", (1,)), "numpy", None, bytes(8)),
    TensorEntry("long", Spec("uint8", (2000,)), "value", an_id(4), None, single=True),
    TensorEntry(0, Spec("bool", ()), "torch", None, b"\x01"),
    ValueEntry(-5, encode_value(None, key="")),
    ValueEntry("ü/~", encode_value("text", key="")),
    ValueEntry("\ud800", encode_value(b"", key="")),
]
MANY: list[Entry] = [ValueEntry(f"name {number}", b"\xc0") for number in range(300)]
IDS = [an_id(number % 256) for number in range(257)]

COMMIT = CommitObject(
    root=an_id(10), parents=(an_id(11), an_id(12)), message="first ü", author="me@here", time_us=1_790_000_000_123_456,
    step=100, metrics={"loss": 1.5, "acc": 0.25}, meta=encode_value({"lr": 0.1}, key=""), layout=an_id(13),
    stats={"total_bytes": 1 << 33, "num_entries": 3},
)  # fmt: skip
FIRST_COMMIT = CommitObject(an_id(10), (), "", "", 0, None, {}, None, an_id(13), {})
LAYOUT = LayoutObject(aliases=(("model/a", "model/b"), ("x", "y", "z")))
SHARDED_LAYOUT = LayoutObject(8, (("dp", 4), ("tp", 2)), {"model/w": ["replicate", "shard(0)"]}, ())
PIPELINE_LAYOUT = LayoutObject(
    8, (("dp", 2), ("tp", 2)),
    {"a": ["S(0)", "R"], "b": ["@2"], "c": ["@0"], "d": ["@1"], "e": ["@3"]}, (),
    ranks=((0, 2, 1), (4, 2, 1)),
    meshes=(LayoutMesh((("dp", 2),), ((3, 1, 1), (2, 1, 1))), LayoutMesh((("tp", 3),), ((1, 3, 3),))),
    divisions=(
        (InBoxes(((Box((0, 0), (2, 4)), ((7, 1, 1),)), (Box((2, 0), (1, 4)), ((0, 4, 2),)))),),
        (Whole(((2, 2, 1), (6, 2, 1))),),
        (OverMesh(1, (Split(1),)),),
        (OverMesh(0, (Split(0, 2), Split(0))), OverMesh(2, (Split(),)), Whole(((0, 1, 1),))),
    ),
)  # fmt: skip
"""Two stages, a tensor over three ranks at equal distances, boxes, and ranks that have all of a tensor."""

FORMS_LAYOUT = LayoutObject(
    orders={"model/conv.weight": (0, 2, 3, 1), "w": (1, 0), "b": (1, 0)},
    versions={"model": {"": 3, "layers.0.bn": 2}, "other": {}},
)


def tree() -> Node:
    return tree_nodes("dict", None, ENTRIES)[-1]


def sparse_tree() -> Node:
    attrs = encode_value({"shape": (4, 4), "coalesced": True}, key="")
    parts = [TensorEntry("indices", Spec("int64", (2, 0)), "torch", None, b"")]
    return tree_nodes("sparse_coo", attrs, parts)[-1]


def ranks_tree() -> Node:
    attrs = encode_value({"world_size": 2}, key="")
    values = [ValueEntry(rank, encode_value({"at": rank}, key="")) for rank in range(2)]
    return tree_nodes("ranks", attrs, values)[-1]


def dataclass_tree() -> Node:
    attrs = encode_value({"name": "train:Progress", "fields": ["step", "best"]}, key="")
    best = TensorEntry("best", Spec("uint8", (2,)), "torch", None, b"ab")
    parts = [ValueEntry("step", encode_value(3, key="")), best]
    return tree_nodes("dataclass", attrs, parts)[-1]


def generator_tree() -> Node:
    attrs = encode_value({"device": "cuda"}, key="")
    parts = [TensorEntry("state", Spec("uint8", (16,)), "torch", None, bytes(16))]
    return tree_nodes("generator", attrs, parts)[-1]


def paged_tree() -> list[Node]:
    return tree_nodes("dict", None, MANY)


def tensor(shape: tuple[int, ...], num_chunks: int) -> list[Node]:
    spec = Spec("float32", shape)
    assert grid_for(spec).num_cells == num_chunks
    return tensor_nodes(spec, grid_for(spec), IDS[:num_chunks])


NODES: dict[str, Callable[[], Node]] = {
    "tree": tree,
    "tree of a sparse tensor": sparse_tree,
    "tree of ranks": ranks_tree,
    "tree of a dataclass": dataclass_tree,
    "tree of a generator": generator_tree,
    "empty tree": lambda: tree_nodes("dict", None, [])[-1],
    "tree over pages": lambda: paged_tree()[-1],
    "tree page": lambda: min(paged_tree()[:-1], key=lambda page: len(page.data)),
    "tensor": lambda: tensor((3000, 700), 3)[-1],
    "tensor over pages": lambda: tensor((257 << 20,), 257)[-1],
    "chunk-page": lambda: tensor((257 << 20,), 257)[1],
    "layout": lambda: layout_node(LAYOUT),
    "layout of a mesh": lambda: layout_node(SHARDED_LAYOUT),
    "layout of several meshes": lambda: layout_node(PIPELINE_LAYOUT),
    "layout of orders and versions": lambda: layout_node(FORMS_LAYOUT),
    "commit": lambda: commit_node(COMMIT),
    "first commit": lambda: commit_node(FIRST_COMMIT),
}

# --- packs -----------------------------------------------------------------------------------

CHUNK = bytes(range(256)) * 512
"""128 KiB: two leaves."""

LEAVES = [CHUNK[:65536], CHUNK[65536:]]


def extents(chunk: Digest, digests: bytes) -> list[pack.ExtentInfo]:
    """A node, a chunk, and the second leaf of a chunk as a delta."""
    head, long = pack.entry_header_bytes(0), pack.entry_header_bytes(len(digests) // 32)
    second = 64 + head + 40
    third = second + long + 131072
    return [
        pack.ExtentInfo(an_id(20), ObjectKind.TREE, Encoding.RAW, 40, 40, 0, 0, 0, 64, head),
        pack.ExtentInfo(chunk, ObjectKind.CHUNK, Encoding.RAW, 131072, 131072, 65536, 0, 2, second, long),
        pack.ExtentInfo(chunk, ObjectKind.CHUNK, Encoding.ZSTD, 131072, 99, 65536, 1, 1, third, long, an_id(21)),
    ]


# --- records ---------------------------------------------------------------------------------


def records(patched: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Every record as today's code writes it, with a nonce and a clock that stand still."""
    patched.setattr("secrets.token_bytes", lambda size: NAME[:size])
    store = MemoryStore()
    with clock.fixed(lambda: 1_790_000_000.5):
        write_config(store, Config("0123456789abcdef" * 2, "main", "auto", 1 << 29, "honoured"))
        refs = RefStore(store)
        placeholder = refs.create_placeholder(RefKind.BRANCH, "main")
        found = {"config": store.get("config"), "placeholder": placeholder.record}
        branch = refs.swap(placeholder, an_id(30), generation=Generation(3, NAME))
        move = new_move(None, an_id(31), "tag: set to main", "me@here")
        fourth = Generation(4, NAME)
        tag = refs.swap(refs.create_placeholder(RefKind.TAG, "v1"), an_id(31), generation=fourth, move=move)
    found["name"] = store.get("names/heads/main.ref")
    found |= {"branch": branch.record, "tag": tag.record, "gc-state": store.get("gc/state")}
    condemned = GcState(Generation(9, NAME), "condemned", ("packs/00/" + "0" * 32 + ".data",))
    return found | {"gc-state condemned": encode_gc_state(condemned)}


# --- values ---------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "none": None, "true": True, "int": -7, "large int": 1 << 70, "float": 0.1, "nan": float("nan"), "complex": 1 - 2j,
    "str": "ü", "bytes": b"\x00\xff", "list": [1, [2.0]], "tuple": (1, ()), "dict": {"b": 1, "a": {3: None}},
    "set": {3, 1, 2}, "float32": np.float32(1.5), "range": range(0, 10, 2),
    "named tuple": Named("namedtuple", "train:Pair", {"b": 1, "a": (2,)}),
    "dataclass": Named("dataclass", "train:Config", {"lr": 0.5}),
}  # fmt: skip
