"""The hints of a meta pack: redundant data that saves a reader requests.

    | entries | hints | directory | trailer |         hints = payload | footer

They are between the last entry and the directory, and no entry names them: they are no objects, nothing refers to
them, and whoever copies what is needed out of a pack leaves them behind.

Invariant: what is read here is well-formed and within limits, before memory is taken for it; whether it is true is for
the reader to find out: a commit by its id, a directory by its own trailer, a name of a pack by looking.
Pure bytes: knows nothing of stores.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CorruptionError, UnsupportedVersionError
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest, pack_canonical, unpack_canonical
from cas_ckpt.objects.pack import CHECK_BYTES, NAME_BYTES, TRAILER_BYTES

VERSION = 1
MAGIC = b"CASCHINT"
_FOOTER = struct.Struct("<8sHH4xQQ")
FOOTER_BYTES = _FOOTER.size + CHECK_BYTES

MOST_BYTES = 16 * 1024 * 1024
"""Plain bytes of hints, at most: a reader takes no more memory for what is only a hint."""

MOST_COMMITS = 4096
MOST_NAMES = 65536


@dataclass(frozen=True, slots=True)
class PageCommit:
    """A commit of a page.

    Attributes:
        data: Its node: the id follows from it, and is not said.
        pack: Name of the meta pack that holds it.
        others: Its further parents, and names of the packs that hold those.
    """

    data: bytes
    pack: bytes
    others: tuple[tuple[Digest, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Hints:
    """The data of a meta pack besides its nodes.

    Attributes:
        depth: How many first parents lead from the commit of this pack to the first one that pages know.
        commits: Its first parent, the first parent of that one, and so on.
        others: Further parents of the commit itself, and names of the packs that hold those.
        directories: (trailer, directory) of data packs that were written for the commit: their bytes.
        packs: Names of further meta packs that were written for it.
    """

    depth: int = 0
    commits: tuple[PageCommit, ...] = ()
    others: tuple[tuple[Digest, bytes], ...] = ()
    directories: tuple[tuple[bytes, bytes], ...] = ()
    packs: tuple[bytes, ...] = ()


def encode_hints(hints: Hints) -> bytes:
    """The bytes of `hints`; empty if they would be longer than a reader takes."""
    payload = pack_canonical({
        "depth": hints.depth,
        "commits": [[each.data, each.pack, [list(other) for other in each.others]] for each in hints.commits],
        "others": [list(other) for other in hints.others],
        "directories": [list(each) for each in hints.directories],
        "packs": list(hints.packs),
    })  # fmt: skip
    if len(payload) > MOST_BYTES:
        return b""
    encoded = codec.encode_extent(payload, policy=codec.EncodingPolicy.ZSTD, item_bytes=1)
    body = bytes(encoded.payload)
    footer = _FOOTER.pack(MAGIC, VERSION, encoded.encoding, len(body), len(payload))
    return body + footer + blake3(body + footer).digest(length=CHECK_BYTES)


def hints_bytes(tail: Buffer) -> int | None:
    """How long the hints are that `tail` ends with, by what their footer claims; None if it ends with none."""
    if len(tail) < FOOTER_BYTES:
        return None
    magic, _, _, stored, plain = _FOOTER.unpack_from(memoryview(tail)[len(tail) - FOOTER_BYTES :])
    if magic != MAGIC or stored > MOST_BYTES or plain > MOST_BYTES:
        return None
    return int(stored) + FOOTER_BYTES


def decode_hints(data: Buffer) -> Hints:
    """The hints in `data`, which is as long as they are.

    Raises:
        CorruptionError: damaged, malformed or beyond limits. UnsupportedVersionError: of a later version.
    """
    if hints_bytes(data) != len(data):
        raise CorruptionError("the hints of a pack are not as long as they say")
    view = memoryview(data)
    if blake3(view[:-CHECK_BYTES]).digest(length=CHECK_BYTES) != bytes(view[-CHECK_BYTES:]):
        raise CorruptionError("the hints of a pack are damaged: their checksum does not match")
    _, version, encoding, stored, plain = _FOOTER.unpack_from(view[len(data) - FOOTER_BYTES :])
    if version > VERSION:
        raise UnsupportedVersionError(f"hints of version {version}: this cas_ckpt reads up to {VERSION}")
    payload = unpack_canonical(codec.decode_extent(encoding, view[:stored], num_bytes=plain))
    try:
        depth = payload["depth"]
        if type(depth) is not int or not 0 <= depth < 1 << 63:
            raise CorruptionError("the hints of a pack tell no depth")
        return Hints(
            depth,
            tuple(
                PageCommit(_bytes(node), _name(pack), _others(others))
                for node, pack, others in _list(payload["commits"], MOST_COMMITS)
            ),
            _others(payload["others"]),
            tuple(
                (_bytes(trailer, TRAILER_BYTES), _bytes(directory))
                for trailer, directory in _list(payload["directories"], MOST_NAMES)
            ),
            tuple(_name(name) for name in _list(payload["packs"], MOST_NAMES)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"the hints of a pack are of an odd form: {error!r}") from error


def _list(value: Any, most: int) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise CorruptionError("the hints of a pack have no list, or one that is too long")
    return value


def _bytes(value: Any, length: int | None = None) -> bytes:
    if not isinstance(value, bytes) or (length is not None and len(value) != length):
        raise CorruptionError("the hints of a pack have other bytes than they should")
    return value


def _name(value: Any) -> bytes:
    return _bytes(value, NAME_BYTES)


def _others(value: Any) -> tuple[tuple[Digest, bytes], ...]:
    return tuple((Digest(_bytes(digest, DIGEST_BYTES)), _name(pack)) for digest, pack in _list(value, MOST_NAMES))
