"""The bytes of a pack: header, entry headers, directory and trailer; and hints, which save readers requests.

Invariant: every part carries its own check, so that damage is found where it is, the directory alone rebuilds the index
rows of a pack, and intact entries can be found again after damage (each begins with a magic and has its own length).
Hints that are read are well-formed and within limits, before memory is taken for them; whether they are true is for the
reader to find out: a commit by its id, a directory by its own trailer, a name of a pack by looking. Pure bytes: knows
nothing of files.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

from blake3 import blake3

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CorruptionError, UnsupportedVersionError
from cas_ckpt.objects.digest import (
    DIGEST_BYTES,
    LEAF_BYTES,
    Digest,
    ObjectKind,
    chunk_id,
    pack_canonical,
    unpack_canonical,
)

VERSION = 1
PACK_PREFIX = "packs/"
"""The prefix of the keys of packs."""

NAME_BYTES = 16
CHECK_BYTES = 8

HEADER_MAGIC = b"CASCKPAK"
ENTRY_MAGIC = b"CKE\x01"
TRAILER_MAGIC = b"CASCKEND"

_HEADER = struct.Struct("<8sHH4x16s24x")
_ENTRY = struct.Struct("<4sHHIIQQII32s32s")
_DIRECTORY = struct.Struct("<32s32sQQQIIIIHH4x")
_TRAILER = struct.Struct("<8sHH4x16sQQQ32s")

HEADER_BYTES = _HEADER.size + CHECK_BYTES
TRAILER_BYTES = _TRAILER.size + CHECK_BYTES
DIRECTORY_ENTRY_BYTES = _DIRECTORY.size
TAIL_GUESS_BYTES = 64 * 1024
"""How much of the end is read first: trailer and directory of most packs."""

MAX_NODE_BYTES = 128 * 1024 * 1024
"""No writer writes a longer node, so a reader takes no more memory for one, whatever a pack claims."""

MAX_DIRECTORY_BYTES = 64 * 1024 * 1024
"""The same of the directory of a pack: some 466,000 entries, which take 160 MB."""

FULL_ENTRIES = 250_000
"""A pack is closed once it holds so many, however short they are."""

COALESCE_GAP_BYTES = 64 * 1024
COALESCE_SPAN_BYTES = 8 * 1024 * 1024
"""Extents that are near each other in one pack are read by one request, up to this long."""

_PACK_KEY = re.compile(rf"{PACK_PREFIX}([0-9a-f]{{2}})/(\1[0-9a-f]{{30}})\.(data|meta)")
_NO_BASE = bytes(DIGEST_BYTES)
_MOST_HEADER_BYTES = 16 * 1024 * 1024
_KNOWN_KINDS = {int(kind): kind for kind in ObjectKind}
_K = TypeVar("_K", bound=IntEnum)
_T = TypeVar("_T")
_P = TypeVar("_P", bound="Stretch")


def is_pack(key: str) -> bool:
    """Whether a pack may be called so."""
    return _PACK_KEY.fullmatch(key) is not None


class PackKind(IntEnum):
    """Data packs hold chunks, meta packs hold nodes.

    Attributes:
        suffix: How keys of such packs end.
    """

    suffix: str

    DATA = 1
    META = 2

    def __init__(self, _: int) -> None:
        self.suffix = self.name.lower()


@dataclass(frozen=True, slots=True)
class ExtentInfo:
    """An entry of a pack: a node, or a run of a chunk's leaves.

    Attributes:
        num_bytes: Plain bytes of the whole object (of the whole chunk, not of the extent).
        stored_bytes: Bytes of the payload as stored.
        leaf_bytes: Bytes of a full leaf of the chunk; 0 for nodes.
        first_leaf, num_leaves: The leaves in this extent; 0, 0 for nodes.
        offset: Where the entry's header begins in the pack.
        header_bytes: Length of the entry's header; the payload follows.
        base: Id of the chunk that a delta is against, or None.
    """

    digest: Digest
    kind: ObjectKind
    encoding: int
    num_bytes: int
    stored_bytes: int
    leaf_bytes: int
    first_leaf: int
    num_leaves: int
    offset: int
    header_bytes: int
    base: Digest | None = None

    @property
    def chunk_leaves(self) -> int:
        """Leaves of the whole chunk."""
        return -(-self.num_bytes // self.leaf_bytes) if self.leaf_bytes else 0

    @property
    def plain_bytes(self) -> int:
        """Plain bytes of this extent alone."""
        if not self.leaf_bytes:
            return self.num_bytes
        stop = (self.first_leaf + self.num_leaves) * self.leaf_bytes
        return min(stop, self.num_bytes) - self.first_leaf * self.leaf_bytes

    @property
    def end(self) -> int:
        """The offset behind the entry in the pack."""
        return self.offset + self.header_bytes + self.stored_bytes


class Location(NamedTuple):
    """The place of one extent of an object: the pack's name and the fields of its `ExtentInfo`.

    A named tuple because there are a hundred thousand of them at a time, and making a frozen
    dataclass costs four times as much.
    """

    pack: str
    kind: ObjectKind
    num_bytes: int
    first_leaf: int
    num_leaves: int
    leaf_bytes: int
    offset: int
    header_bytes: int
    stored_bytes: int
    encoding: int
    base: bytes | None

    @property
    def end(self) -> int:
        """The offset behind the extent in the pack."""
        return self.offset + self.header_bytes + self.stored_bytes


class Stretch(Protocol):
    """Consecutive bytes of a pack."""

    @property
    def offset(self) -> int: ...

    @property
    def end(self) -> int: ...


def entry_header_bytes(num_leaves: int) -> int:
    """Length of the header of an entry of a chunk with `num_leaves` leaves (0: a node)."""
    return _ENTRY.size + num_leaves * DIGEST_BYTES + CHECK_BYTES


def _sealed(data: bytes) -> bytes:
    return data + blake3(data).digest(length=CHECK_BYTES)


def _unsealed(data: Buffer, what: str) -> bytes:
    body, check = bytes(data[:-CHECK_BYTES]), bytes(data[-CHECK_BYTES:])
    if blake3(body).digest(length=CHECK_BYTES) != check:
        raise CorruptionError(f"{what} is damaged (its checksum does not match): restore it from a copy")
    return body


def encode_header(name: bytes, kind: PackKind) -> bytes:
    """The header of the pack called `name` (16 bytes)."""
    return _sealed(_HEADER.pack(HEADER_MAGIC, VERSION, kind, name))


def decode_header(data: Buffer) -> tuple[bytes, PackKind]:
    """Name and kind from a pack's header.

    Raises:
        CorruptionError: no intact header.
        UnsupportedVersionError: a newer pack format.
    """
    if len(data) != HEADER_BYTES or bytes(data[:8]) != HEADER_MAGIC:
        raise CorruptionError("no pack header where one should be")
    _, version, kind, name = _HEADER.unpack(_unsealed(data, "a pack header"))
    _check_version(version)
    return name, _kind(PackKind, kind, "pack")


def encode_entry_header(info: ExtentInfo, digests: bytes) -> bytes:
    """The header of an entry; `digests` are all leaf digests of the chunk, joined (none for nodes)."""
    fixed = _ENTRY.pack(
        ENTRY_MAGIC, info.kind, info.encoding, info.header_bytes, info.leaf_bytes, info.num_bytes, info.stored_bytes,
        info.first_leaf, info.num_leaves, info.digest, info.base or _NO_BASE,
    )  # fmt: skip
    return _sealed(fixed + digests)


def claimed_header_bytes(data: Buffer) -> int | None:
    """How long the entry header that begins with `data` says it is; None if nothing here begins like one.

    Proves nothing: it says how much to read before `decode_entry_header` can.
    """
    if len(data) < _ENTRY.size or bytes(data[:4]) != ENTRY_MAGIC:
        return None
    length: int = _ENTRY.unpack_from(data)[3]
    return length if _ENTRY.size + CHECK_BYTES <= length <= _MOST_HEADER_BYTES else None


def decode_entry_header(data: Buffer, *, offset: int) -> tuple[ExtentInfo, bytes]:
    """The decoded header of an entry, and the joined leaf digests of its chunk, verified against the chunk id.

    Args:
        data: At least the whole header.
        offset: Where it is in the pack (for the answer and for messages).
    Raises:
        CorruptionError: no intact header, or digests that do not make the id.
    """
    what = f"the pack entry at offset {offset}"
    if len(data) < _ENTRY.size or bytes(data[:4]) != ENTRY_MAGIC:
        raise CorruptionError(f"{what} does not begin like one: restore it from a copy")
    fields = _ENTRY.unpack_from(data)
    _, kind, encoding, header_bytes, leaf_bytes, num_bytes, stored_bytes, first_leaf, num_leaves, digest, base = fields
    if not _ENTRY.size + CHECK_BYTES <= header_bytes <= len(data):
        raise CorruptionError(f"{what} has an impossible header length: restore it from a copy")
    body = _unsealed(data[:header_bytes], what)
    info = ExtentInfo(
        Digest(digest), _kind(ObjectKind, kind, "entry"), encoding, num_bytes, stored_bytes, leaf_bytes,
        first_leaf, num_leaves, offset, header_bytes, None if base == _NO_BASE else Digest(base),
    )  # fmt: skip
    digests = body[_ENTRY.size :]
    is_chunk, chunk_leaves = kind == ObjectKind.CHUNK, info.chunk_leaves
    if is_chunk != bool(leaf_bytes) or leaf_bytes > LEAF_BYTES:
        raise CorruptionError(f"{what} has leaves of {leaf_bytes} bytes")
    if header_bytes != entry_header_bytes(chunk_leaves):
        raise CorruptionError(f"{what} holds {len(digests) // DIGEST_BYTES} leaf digests, not {chunk_leaves}")
    if is_chunk != bool(num_leaves) or first_leaf + num_leaves > chunk_leaves:
        raise CorruptionError(f"{what} claims leaves that its chunk does not have")
    if is_chunk and chunk_id(num_bytes, digests) != digest:
        raise CorruptionError(f"{what}: its leaf digests do not make the id that it claims")
    return info, digests


def encode_directory(entries: Sequence[ExtentInfo]) -> bytes:
    """The directory: one fixed record an entry, sorted by (id, first leaf)."""
    ordered = sorted(entries, key=attrgetter("digest", "first_leaf"))
    return b"".join([
        _DIRECTORY.pack(
            entry.digest, entry.base or _NO_BASE, entry.offset, entry.num_bytes, entry.stored_bytes, entry.header_bytes,
            entry.leaf_bytes, entry.first_leaf, entry.num_leaves, entry.kind, entry.encoding,
        )
        for entry in ordered
    ])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trailer:
    """The end of a pack: where its directory is and what it must hash to."""

    name: bytes
    kind: PackKind
    directory_offset: int
    num_entries: int
    size_bytes: int
    directory_digest: bytes


def encode_trailer(name: bytes, kind: PackKind, directory: bytes, *, directory_offset: int) -> bytes:
    """The trailer of a pack whose `directory` begins at `directory_offset`."""
    size = directory_offset + len(directory) + TRAILER_BYTES
    num_entries = len(directory) // DIRECTORY_ENTRY_BYTES
    digest = blake3(directory).digest()
    return _sealed(_TRAILER.pack(TRAILER_MAGIC, VERSION, kind, name, directory_offset, num_entries, size, digest))


def decode_trailer(data: Buffer, *, size_bytes: int, key: str) -> Trailer:
    """The trailer in the last `TRAILER_BYTES` of the pack at `key`, `size_bytes` long.

    Raises:
        CorruptionError: truncated or damaged.
        UnsupportedVersionError: a newer pack format.
    """
    if len(data) != TRAILER_BYTES or bytes(data[:8]) != TRAILER_MAGIC:
        raise CorruptionError(f"{key}: no trailer at its end, so it is truncated or damaged: restore it from a copy")
    fields = _TRAILER.unpack(_unsealed(data, f"the trailer of {key}"))
    _, version, kind, name, directory_offset, num_entries, size, digest = fields
    _check_version(version)
    trailer = Trailer(name, _kind(PackKind, kind, "pack"), directory_offset, num_entries, size, digest)
    if size != size_bytes or directory_offset + num_entries * DIRECTORY_ENTRY_BYTES + TRAILER_BYTES != size:
        raise CorruptionError(f"{key}: {size_bytes} bytes long where its trailer says {size}: restore it from a copy")
    if num_entries * DIRECTORY_ENTRY_BYTES > MAX_DIRECTORY_BYTES:
        raise CorruptionError(f"{key} claims {num_entries} entries, more than any writer puts into a pack")
    return trailer


def claimed_pack(trailer: Buffer) -> tuple[bytes, int]:
    """The name and the length of the pack that a trailer says it is of. Proves nothing: `decode_trailer` does.

    Raises:
        CorruptionError: not as long as a trailer is.
    """
    if len(trailer) != TRAILER_BYTES:
        raise CorruptionError(f"a trailer of {len(trailer)} bytes")
    fields = _TRAILER.unpack_from(trailer)
    return fields[3], fields[6]


def decode_directory(data: Buffer, trailer: Trailer, *, key: str) -> list[ExtentInfo]:
    """The entries of a pack, sorted by (id, first leaf).

    Raises:
        CorruptionError: not the directory that the trailer names, or entries outside the pack.
    """
    if len(data) != trailer.num_entries * DIRECTORY_ENTRY_BYTES or blake3(data).digest() != trailer.directory_digest:
        raise CorruptionError(f"the directory of {key} is damaged: restore it from a copy")
    entries = []
    for fields in _DIRECTORY.iter_unpack(data):
        digest, base, offset, num_bytes, stored, header, leaf, first, count, kind, encoding = fields
        known = _KNOWN_KINDS.get(kind)
        if known is None:
            continue  # of a later version; whoever needs it gets an error that it is in no pack
        entry = ExtentInfo(
            Digest(digest), known, encoding, num_bytes, stored, leaf, first, count,
            offset, header, None if base == _NO_BASE else Digest(base),
        )  # fmt: skip
        if offset < HEADER_BYTES or entry.end > trailer.directory_offset:
            raise CorruptionError(f"the directory of {key} names an entry outside the pack: restore it from a copy")
        if known is not ObjectKind.CHUNK and stored > MAX_NODE_BYTES:
            raise CorruptionError(f"{key} claims a {known.label} of {stored} bytes, which no writer writes")
        entries.append(entry)
    return entries


def coalesced(
    items: Iterable[tuple[str, _P, _T]], *, gap_bytes: int = COALESCE_GAP_BYTES, span_bytes: int = COALESCE_SPAN_BYTES
) -> Iterator[list[tuple[str, _P, _T]]]:
    """(pack, stretch, whatever), ordered by pack and offset, in groups that one read each can answer.

    Args:
        gap_bytes: Bytes between two stretches that are read in vain, at most, to save a request.
        span_bytes: Bytes of a group, at most, unless it is of one stretch.
    """
    group: list[tuple[str, _P, _T]] = []
    start = stop = 0
    for item in items:
        pack, place, _ = item
        end = place.end
        if group and (pack != group[0][0] or place.offset - stop > gap_bytes or max(end, stop) - start > span_bytes):
            yield group
            group = []
        if not group:
            start = stop = place.offset
        stop = max(stop, end)
        group.append(item)
    if group:
        yield group


def _check_version(version: int) -> None:
    if version > VERSION:
        raise UnsupportedVersionError(
            f"a pack of format {version}, this cas_ckpt reads up to {VERSION}: upgrade cas_ckpt"
        )


def _kind(enum: type[_K], value: int, what: str) -> _K:
    try:
        return enum(value)
    except ValueError as error:
        raise UnsupportedVersionError(f"{what} kind {value} is not known to this cas_ckpt: upgrade it") from error


# --- hints of a meta pack: redundant data that saves a reader requests ----------------------
#
#    | entries | hints | directory | trailer |         hints = payload | footer
#
# They are between the last entry and the directory, and no entry names them: they are no objects, nothing refers to
# them, and whoever copies what is needed out of a pack leaves them behind.

_HINTS_VERSION = 1
_HINTS_MAGIC = b"CASCHINT"
_FOOTER = struct.Struct("<8sHH4xQQ")
_FOOTER_BYTES = _FOOTER.size + CHECK_BYTES

MOST_HINTS_BYTES = 16 * 1024 * 1024
"""Plain bytes of hints, at most: a reader takes no more memory for what is only a hint."""

_MOST_COMMITS = 4096
_MOST_NAMES = 65536


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
        "commits": [(each.data, each.pack, each.others) for each in hints.commits],
        "others": hints.others,
        "directories": hints.directories,
        "packs": hints.packs,
    })  # fmt: skip
    if len(payload) > MOST_HINTS_BYTES:
        return b""
    from cas_ckpt.objects import codec  # brings zstandard, which a log does not need

    encoded = codec.encode_extent(payload, policy="zstd", item_bytes=1)
    body = bytes(encoded.payload)
    return _sealed(body + _FOOTER.pack(_HINTS_MAGIC, _HINTS_VERSION, encoded.encoding, len(body), len(payload)))


def hints_bytes(tail: Buffer) -> int | None:
    """How long the hints are that `tail` ends with, by what their footer claims; None if it ends with none."""
    if len(tail) < _FOOTER_BYTES:
        return None
    magic, _, _, stored, plain = _FOOTER.unpack_from(memoryview(tail)[len(tail) - _FOOTER_BYTES :])
    if magic != _HINTS_MAGIC or stored > MOST_HINTS_BYTES or plain > MOST_HINTS_BYTES:
        return None
    return int(stored) + _FOOTER_BYTES


def decode_hints(data: Buffer) -> Hints:
    """The hints in `data`, which is as long as they are.

    Raises:
        CorruptionError: damaged, malformed or beyond limits. UnsupportedVersionError: of a later version.
    """
    if hints_bytes(data) != len(data):
        raise CorruptionError("the hints of a pack are not as long as they say")
    body = bytes(data[:-CHECK_BYTES])
    if _sealed(body) != data:
        raise CorruptionError("the hints of a pack are damaged: their checksum does not match")
    _, version, encoding, stored, plain = _FOOTER.unpack_from(body, len(body) - _FOOTER.size)
    if version > _HINTS_VERSION:
        raise UnsupportedVersionError(f"hints of version {version}: this cas_ckpt reads up to {_HINTS_VERSION}")
    from cas_ckpt.objects import codec

    payload = unpack_canonical(codec.decode_extent(encoding, memoryview(body)[:stored], num_bytes=plain))
    try:
        depth = payload["depth"]
        if type(depth) is not int or not 0 <= depth < 1 << 63:
            raise CorruptionError("the hints of a pack tell no depth")
        return Hints(
            depth,
            tuple(
                PageCommit(_bytes(node), _name(pack), _others(others))
                for node, pack, others in _list(payload["commits"], _MOST_COMMITS)
            ),
            _others(payload["others"]),
            tuple(
                (_bytes(trailer, TRAILER_BYTES), _bytes(directory))
                for trailer, directory in _list(payload["directories"], _MOST_NAMES)
            ),
            tuple(_name(name) for name in _list(payload["packs"], _MOST_NAMES)),
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
    return tuple((Digest(_bytes(digest, DIGEST_BYTES)), _name(pack)) for digest, pack in _list(value, _MOST_NAMES))
