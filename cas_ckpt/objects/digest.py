"""BLAKE3 names of things: leaves, chunks and structured objects.

Invariant: an id depends on plain bytes alone, never on encoding, placement or time.
Knows nothing of tensors, files or SQL.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import NewType, cast

from blake3 import blake3

from cas_ckpt.arguments import Buffer

Digest = NewType("Digest", bytes)

DIGEST_BYTES = 32
"""Length of every id."""

LEAF_BYTES = 64 * 1024
"""Upper bound of a leaf: the unit of hashing, verification and exchange."""

SHORT_HEX = 12
"""Digits of an id that people are shown."""

_CHUNK_CONTEXT = "cas_ckpt 2026-11 chunk v1"
_OBJECT_CONTEXT = "cas_ckpt 2026-11 object v1: "


def leaf_digest(data: Buffer) -> Digest:
    """The BLAKE3 hash of one leaf's bytes."""
    return Digest(blake3(data).digest())


def leaf_digests(data: memoryview, leaf_bytes: int) -> list[Digest]:
    """Digests of the consecutive leaves of `data`; the last leaf may be shorter.

    The hot loop of the project: one Python call per leaf, the GIL released inside it.
    """
    starts = range(0, len(data), leaf_bytes)
    # Not Digest(...): calling a NewType costs a hundredth of the hash.
    digests = [blake3(data[start : start + leaf_bytes]).digest() for start in starts]
    return cast("list[Digest]", digests)


def chunk_id(num_bytes: int, digests: Iterable[bytes]) -> Digest:
    """The id of a chunk, from its length in bytes and its leaf digests in order."""
    hasher = blake3(derive_key_context=_CHUNK_CONTEXT)
    hasher.update(struct.pack("<Q", num_bytes))
    hasher.update(b"".join(digests))
    return Digest(hasher.digest())


def object_id(kind: str, data: Buffer) -> Digest:
    """The id of a structured object of `kind`: one derive-key context per kind."""
    return Digest(blake3(data, derive_key_context=_OBJECT_CONTEXT + kind).digest())


def short(digest: bytes) -> str:
    """The leading hexadecimal digits that stand for `digest` in messages."""
    return digest.hex()[:SHORT_HEX]


class ObjectKind(IntEnum):
    """What an entry of a pack is, with its number in packs and in the index.

    `CHUNK` is data; everything else is a structured object.

    Attributes:
        label: The name that heads the object's bytes and enters its id.
    """

    label: str

    CHUNK = 1
    TENSOR = 2
    CHUNK_PAGE = 3
    TREE = 4
    TREE_PAGE = 5
    LAYOUT = 6
    COMMIT = 7

    def __init__(self, _: int) -> None:
        self.label = self.name.lower().replace("_", "-")
