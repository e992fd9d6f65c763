"""Ids, and the canonical bytes that they are made of: leaves, chunks, structured objects, sealed records.

Canonical msgpack: `pack_canonical(unpack_canonical(data)) == data` for every `data` that is accepted; everything else
is refused as corrupt. Rules: shortest forms, maps sorted by the encoded bytes of their keys, floats always 64 bits, no
timestamps (docs/format.md, "Canonical msgpack"). Sealed records are the small mutable values of a repository (config,
refs, gc state, sessions, policy). A record is read whole and checked, or refused; a flipped bit is never obeyed, and
neither is an intact record that was put under another key than the one that it was written for.

Invariant: an id depends on plain bytes alone, never on encoding, placement or time.
Knows nothing of tensors, files or SQL, nor of what the objects mean.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import Any, NewType

import msgpack
from blake3 import blake3

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CorruptionError, InvalidInputError, TooLargeError, UnsupportedVersionError

Digest = NewType("Digest", bytes)

DIGEST_BYTES = 32
"""Length of every id."""

LEAF_BYTES = 128 * 1024
"""Upper bound of a leaf: the unit of hashing, verification and exchange."""

SHORT_HEX = 12
"""Digits of an id that people are shown."""

_CHUNK_CONTEXT = "cas_ckpt 2026-11 chunk v1"
_OBJECT_CONTEXT = "cas_ckpt 2026-11 object v1: "


def leaf_digest(data: Buffer) -> Digest:
    """The BLAKE3 hash of one leaf's bytes."""
    return Digest(blake3(data).digest())


def chunk_id(num_bytes: int, digests: bytes) -> Digest:
    """The id of a chunk, from its length in bytes and its leaf digests in order, joined."""
    return Digest(blake3(num_bytes.to_bytes(8, "little") + digests, derive_key_context=_CHUNK_CONTEXT).digest())


def object_id(kind: str, data: Buffer) -> Digest:
    """The id of a structured object of `kind`: one derive-key context per kind."""
    return Digest(blake3(data, derive_key_context=_OBJECT_CONTEXT + kind).digest())


def short(digest: bytes) -> str:
    """The leading hexadecimal digits that stand for `digest` in messages."""
    return digest.hex()[:SHORT_HEX]


class ObjectKind(IntEnum):
    """Kinds of entries of a pack, with their numbers in packs and in the index.

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


# --- canonical msgpack ----------------------------------------------------------------------

MAX_DEPTH = 128
"""Arrays and maps inside one another, at most."""

ATOMS = frozenset({type(None), bool, int, float, str, bytes})
"""Exact types that are one msgpack item without children."""

KEY_TYPES = frozenset({str, int, bytes})
"""Exact types that may be keys of a map."""

_NESTING = frozenset({list, dict})

_FEW_BYTES = 64 * 1024
_BYTES_PER_CONTAINER = 3
"""Of more than a few bytes: no writer's lists and maps are shorter on average, and an empty one takes 70 in memory."""

_KEPT_BUFFER_BYTES = 1 << 20
_MALFORMED = (ValueError, TypeError, OverflowError, RecursionError)
"""Exceptions of msgpack for malformed bytes (its own errors are ValueErrors)."""


class _Local(threading.local):
    """One packer per thread: packers are fast to use, slow to make and not thread-safe."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer(use_bin_type=True, strict_types=True)


_local = _Local()


def pack_atom(value: Any) -> bytes:
    """The shortest form of an atom, of an ExtType, or of lists (inside one another) of atoms.

    Raises:
        OverflowError: an integer outside -2^63 .. 2^64-1.
        UnicodeEncodeError: a string with lone surrogates.
        ValueError: longer than 2^32-1 bytes or items.
    """
    packer = _local.packer
    try:
        packed: bytes = packer.pack(value)
    except BaseException:
        packer.reset()  # what it packed and had no memory to hand out would come before what is packed next
        raise
    if len(packed) > _KEPT_BUFFER_BYTES:
        _local.__init__()  # type: ignore[misc]  # the packer keeps its buffer: do not hold on to a huge one
    return packed


def pack_ext(code: int, payload: bytes) -> bytes:
    """An extension item; `code` is 0..127."""
    return pack_atom(msgpack.ExtType(code, payload))


@lru_cache(maxsize=4096)
def _array_header(count: int) -> bytes:
    header: bytes = msgpack.Packer().pack_array_header(count)
    return header


@lru_cache(maxsize=4096)
def _map_header(count: int) -> bytes:
    header: bytes = msgpack.Packer().pack_map_header(count)
    return header


def pack_array(items: Sequence[bytes]) -> bytes:
    """An array of items that are packed already."""
    return _array_header(len(items)) + b"".join(items)


def pack_map(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A map of (key, value) pairs that are packed already, in any order."""
    ordered = sorted(pairs)
    return _map_header(len(ordered)) + b"".join(chain.from_iterable(ordered))


def all_atoms(items: Iterable[Any]) -> bool:
    """Whether every item is an atom, so that `pack_atom` takes the list whole."""
    return ATOMS.issuperset(map(type, items))


def pack_canonical(obj: Any) -> bytes:
    """The canonical bytes of `obj`: atoms, lists or tuples (arrays), dicts, `msgpack.ExtType`.

    Raises:
        InvalidInputError: another type, a key that is not str, int or bytes, an integer beyond
            64 bits, a string with lone surrogates, or more than MAX_DEPTH levels.
    """
    try:
        return _pack(obj, MAX_DEPTH)
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidInputError(f"cannot be written as canonical msgpack: {error}") from error


def _pack(obj: Any, depth: int) -> bytes:
    kind = type(obj)
    if kind in ATOMS or kind is msgpack.ExtType:
        return pack_atom(obj)
    if depth == 0:
        raise InvalidInputError(f"canonical msgpack nests at most {MAX_DEPTH} levels; this goes deeper")
    if kind is list or kind is tuple:
        if ATOMS.issuperset(map(type, obj)):
            return pack_atom(list(obj))
        return pack_array([_pack(item, depth - 1) for item in obj])
    if kind is dict:
        return pack_map([(_pack_key(key), _pack(value, depth - 1)) for key, value in obj.items()])
    raise InvalidInputError(f"canonical msgpack has no form for {kind.__module__}.{kind.__qualname__}")


def _pack_key(key: Any) -> bytes:
    if type(key) not in KEY_TYPES:
        raise InvalidInputError(f"a canonical map has str, int or bytes as keys, not {type(key).__name__}")
    return pack_atom(key)


def _sorted_map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """The map of `pairs`, if their keys are of a type that a map may have, in canonical order."""
    before = b""
    for key, _ in pairs:
        packed = _pack_key(key)
        if packed <= before:
            raise ValueError("the keys of a map are out of order")
        before = packed
    return dict(pairs)


def _unpacked(data: Buffer) -> Any:
    """The object in `data`; of many bytes in small lists and maps, which take much memory, none is made."""
    left = len(data) // _BYTES_PER_CONTAINER

    def counted(made: list[Any]) -> list[Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("too many lists and maps for its length")
        return made

    # timestamp=3 makes datetimes of timestamps, which the packer then refuses.
    if len(data) <= _FEW_BYTES:
        return msgpack.unpackb(data, strict_map_key=False, object_pairs_hook=_sorted_map, timestamp=3)
    return msgpack.unpackb(
        data, strict_map_key=False, list_hook=counted, object_pairs_hook=lambda pairs: _sorted_map(counted(pairs)),
        timestamp=3,
    )  # fmt: skip


def unpack_canonical(data: Buffer) -> Any:
    """The object whose canonical bytes are `data`; arrays become lists, extensions `msgpack.ExtType`.

    Raises:
        CorruptionError: `data` is anything but the one canonical form of one object.
    """
    try:
        obj = _unpacked(data)
        level = [obj] if type(obj) in _NESTING else []
        for _ in range(MAX_DEPTH):
            level = [
                item
                for part in level
                for item in (part.values() if type(part) is dict else part)
                if type(item) in _NESTING
            ]
            if not level:
                break
        else:
            raise ValueError(f"it nests more than {MAX_DEPTH} levels")
        again = pack_atom(obj)  # the maps are sorted already, so this is `pack_canonical` at the speed of C
    except _MALFORMED as error:
        raise CorruptionError(
            f"{len(data)} bytes are not canonical msgpack: {error}; restore it from a copy"
        ) from error
    if again != data:
        raise CorruptionError(f"{len(data)} bytes of msgpack are not in canonical form; restore it from a copy")
    return obj


# --- sealed records -------------------------------------------------------------------------

MAGIC = b"CASCKREC"
_HEAD_BYTES = len(MAGIC) + DIGEST_BYTES

FIELDS: Mapping[str, frozenset[str]] = MappingProxyType({
    "config": frozenset({"store_id", "default_branch", "encoding", "pack_bytes", "conditional_writes", "nonce"}),
    "gc-state": frozenset({"generation", "generation_nonce", "phase", "condemned", "nonce"}),
    "ref": frozenset({"target", "generation", "generation_nonce", "log", "nonce"}),
    "name": frozenset(),
    "forgotten": frozenset({"commits", "time_us", "author"}),
    "released": frozenset({"commits"}),
    "session": frozenset({"host", "process", "started_us", "heard_us"}),
    "policy": frozenset({"default", "branches", "time_us", "author", "nonce"}),
    "signers": frozenset({"branches", "time_us", "author", "nonce"}),
    "bundle": frozenset({"prerequisites"}),
    "settings": frozenset({"remotes", "index_url", "nonce"}),
    "tiers": frozenset({"failures", "nonce"}),
})  # fmt: skip
"""Kind of record -> the fields that it has in version 1."""

OPTIONAL_FIELDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {"ref": frozenset({"note", "pack", "signature", "signed_only"})}
)

MOST_RECORD_BYTES = 1024 * 1024
"""Longest record, of most kinds: a listing holds many in memory."""

_MOST_BYTES: Mapping[str, int] = MappingProxyType(
    {"ref": 256 * 1024} | dict.fromkeys(("config", "name", "session"), 64 * 1024)
    | dict.fromkeys(("gc-state", "forgotten", "released", "bundle"), 8 * 1024 * 1024)
)  # fmt: skip
"""The others: what names many commits or packs is longer, and takes up to twenty times its bytes in memory."""

MOST_NAMED = 100_000
"""Commits or packs that a writer names in one record: they fit into the longest."""

_REPAIRS = {"gc-state": "state", "ref": "refs"}
"""Kind of record -> what `repair` calls it; all others are "records"."""


def seal(kind: str, version: int, payload: dict[str, Any], *, key: str) -> bytes:
    """The bytes of the record that is stored under `key`: magic, digest, canonical [kind, version, key, payload].

    Raises:
        TooLargeError: longer than any reader takes.
    """
    body = pack_canonical([kind, version, key, payload])
    if _HEAD_BYTES + len(body) > most_bytes(kind):
        raise TooLargeError(
            f"{key}: a {kind} record of {_HEAD_BYTES + len(body)} bytes; it may have {most_bytes(kind)}: shorten what "
            "it is to say"
        )
    return MAGIC + object_id(f"record {kind}", body) + body


def most_bytes(kind: str) -> int:
    """How long a record of `kind` may be."""
    return _MOST_BYTES.get(kind, MOST_RECORD_BYTES)


def unseal(kind: str, data: bytes, *, version: int, key: str) -> dict[str, Any]:
    """The payload of the record of `kind` that is stored under `key`.

    Raises:
        CorruptionError: truncated, flipped, another kind of record, the record of another key, or one with
            other fields than its version has (what a writer meant is never passed over).
        UnsupportedVersionError: written in a newer version than `version`.
    """
    if len(data) > most_bytes(kind):
        raise CorruptionError(
            f"{key}: {len(data)} bytes, and a {kind} record has {most_bytes(kind)} at most: restore it from a backup "
            "or another copy"
        )
    body = data[_HEAD_BYTES:]
    if data[: len(MAGIC)] != MAGIC or data[len(MAGIC) : _HEAD_BYTES] != object_id(f"record {kind}", body):
        raise CorruptionError(
            f"{key}: {len(data)} bytes that are not an intact {kind} record: restore it from a backup or another copy"
        )
    head = unpack_canonical(body)
    if not isinstance(head, list) or head[:1] != [kind] or len(head) < 2 or type(head[1]) is not int or head[1] < 1:
        raise CorruptionError(f"{key}: a sealed record, but of another kind than {kind}")
    if head[1] > version:
        raise UnsupportedVersionError(
            f"{key}: {kind} record of version {head[1]}, this cas_ckpt reads up to {version}: upgrade cas_ckpt"
        )
    if len(head) != 4 or not isinstance(head[2], str) or not isinstance(head[3], dict):
        raise CorruptionError(f"{key}: a {kind} record of odd form")
    if head[2] != key:
        repair = f'repo.repair("{_REPAIRS.get(kind, "records")}")'
        if kind == "config":  # without it no Repository opens
            repair = "on the command line: cas-ckpt fsck --repair config --from OTHER"
        raise CorruptionError(
            f"{key} holds the {kind} record that was written for {head[2]}: files were swapped or copied. Put back "
            f"the file that belongs there, or run {repair}"
        )
    payload: dict[str, Any] = head[3]
    found = frozenset(payload)
    if not FIELDS[kind] <= found <= FIELDS[kind] | OPTIONAL_FIELDS.get(kind, frozenset()):
        odd = sorted(map(str, found ^ FIELDS[kind]))
        raise CorruptionError(f"{key}: a {kind} record has other fields than version {version} has: {', '.join(odd)}")
    return payload
