"""Encodings of extents: how the bytes of chunks are written in a pack.

Invariant: `decode_extent` gives back the bytes that `encode_extent` was given, from the
encoding, the payload and the length alone, and never allocates more than that length (plus
the payload). An encoding never enters an id. Thread-safe. Knows no packs and no tensors.
docs/format.md, "Encodings of extents"; the choice of the default: docs/decisions/002-encodings.md.
"""

from __future__ import annotations

import enum
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast, get_args

import zstandard

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CorruptionError, InvalidInputError, UnsupportedVersionError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    import numpy as np

ENCODINGS = "cas_ckpt.encodings"
"""The group of entry points by which a package brings an encoding: the name is the policy, the object has `number`,
`encode` and `decode`, as `Codec` has."""

OF_PACKAGES = range(128, 256)
"""Numbers of encodings that packages bring."""

ZSTD_LEVEL = 1
"""Level of both zstd encodings; higher ones gain little on weights (docs/benchmarks/codec.md)."""

MIN_SAVING = 0.03
"""Share of an extent that an encoding must save; below it, the extent stays raw."""

MAX_PATTERN_BYTES = 16
_GLANCE_BYTES = 4096
_TILE_BYTES = 64 * 1024
_SAMPLE_BYTES = 16 * 1024
_LEAST_SAMPLE_BYTES = 4 * 1024
_SAMPLED_SHARE = 64
_SAMPLE_SLICES = 4
_SAMPLE_RATIO = 0.5
_PLANE = struct.Struct("<BI")
_PLANE_RAW, _PLANE_ZSTD = 0, 1


class Encoding(enum.IntEnum):
    """How an extent's bytes are stored; the number is in the pack."""

    RAW = 0
    ZERO = 1
    CONSTANT = 2
    ZSTD = 3
    PLANES_ZSTD = 4


RAW = Encoding.RAW
"""The encoding whose payload is the extent itself, so that parts of it can be read in place."""


EncodingPolicy: TypeAlias = Literal["raw", "auto", "zstd", "planes"]
"""What is tried on an extent that is neither zero nor constant.

"raw": nothing; "auto", the default: "zstd" or "planes" where a sample promises to halve the extent (indices, masks,
moments of rows that were never seen); any other: the one of that name in `CODECS`. Packages bring more (`ENCODINGS`).
"""


@dataclass(frozen=True, slots=True)
class Encoded:
    """An extent as it is to be stored. A raw payload is the caller's own buffer."""

    encoding: int
    payload: Buffer


class Codec(NamedTuple):
    """How the bytes of an extent become a payload, and back.

    Attributes:
        encode: From the extent and the bytes of an element.
        decode: From the payload and the length of the extent, of which it allocates no more; it raises CorruptionError
            for whatever is not the payload of an extent of that length.
    """

    encoding: int
    encode: Callable[[memoryview, int], Buffer]
    decode: Callable[[memoryview, int], Buffer]


class _Contexts(threading.local):
    """zstd contexts, one pair per thread: they are costly to make and not thread-safe."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()

_NO_MEMORY = "not enough memory"
"""zstd's words for it: its errors have no number here."""


def known_policy(name: str) -> EncodingPolicy:
    """The policy called `name`, as the config of a repository has it.

    Raises:
        UnsupportedVersionError: one of a later version, or of a package that is not installed.
    """
    if not has_policy(name):
        raise UnsupportedVersionError(
            f"new chunks here are to be stored as {name!r:.40}, which neither this version nor an installed package "
            "can write: install the package that has this encoding, or upgrade cas_ckpt"
        )
    return cast(EncodingPolicy, name)


def has_policy(name: str) -> bool:
    """Whether this version, or an installed package, has a policy called `name`."""
    return name in get_args(EncodingPolicy) or name in _brought()


def encode_extent(data: Buffer, *, policy: EncodingPolicy, item_bytes: int) -> Encoded:
    """The extent in the form that `policy` chooses; raw unless another form saves 3 %.

    Args:
        data: The extent, contiguous.
        item_bytes: Bytes per element of the tensor, for constants and planes.
    Raises:
        InvalidInputError: the encoding of a package failed, or does not give back what it was given.
    """
    view = memoryview(data).cast("B")
    pattern = _repeated_item(view, item_bytes)
    if pattern is not None:
        return Encoded(Encoding.CONSTANT, pattern) if any(pattern) else Encoded(Encoding.ZERO, b"")
    codec = _choice(view, policy, item_bytes)
    if codec is None:
        return Encoded(Encoding.RAW, data)
    payload = codec.encode(view, item_bytes)
    small = len(payload) <= len(view) * (1 - MIN_SAVING)
    return Encoded(codec.encoding, payload) if small else Encoded(Encoding.RAW, data)


def _repeated_item(view: memoryview, item_bytes: int) -> bytes | None:
    """The element that all of `view` repeats, if there is one."""
    if not 0 < item_bytes <= MAX_PATTERN_BYTES or not len(view) or len(view) % item_bytes:
        return None
    pattern = bytes(view[:item_bytes])
    glance = min(_GLANCE_BYTES, len(view)) // item_bytes * item_bytes
    if view[:glance].tobytes() != pattern * (glance // item_bytes):
        return None
    tile = pattern * (_TILE_BYTES // item_bytes)
    for start in range(0, len(view), len(tile)):
        block = view[start : start + len(tile)]
        if block.tobytes() != (tile if len(block) == len(tile) else tile[: len(block)]):
            return None
    return pattern


def _choice(view: memoryview, policy: EncodingPolicy, item_bytes: int) -> Codec | None:
    """What to try; None: the extent stays raw."""
    if policy == "raw" or not len(view):
        return None
    if policy == "auto":
        if _compressed_ratio(_sample(view)) > _SAMPLE_RATIO:
            return None
        # Elements of 8 bytes are integers nearly always: planes shrink them more than zstd does, and faster.
        policy = "planes" if item_bytes == 8 else "zstd"
    if policy == "planes" and not (1 < item_bytes <= MAX_PATTERN_BYTES and len(view) % item_bytes == 0):
        policy = "zstd"
    return CODECS.get(policy) or _brought()[policy]


def _sample(view: memoryview) -> Buffer:
    """All of a short extent, a few slices from all over a long one: a 64th of it, but 4 to 16 KiB."""
    if len(view) <= _SAMPLE_BYTES:
        return view
    size = min(max(len(view) // _SAMPLED_SHARE, _LEAST_SAMPLE_BYTES), _SAMPLE_BYTES) // _SAMPLE_SLICES
    step = (len(view) - size) // (_SAMPLE_SLICES - 1)
    return b"".join([view[k * step : k * step + size] for k in range(_SAMPLE_SLICES)])


def _compressed_ratio(sample: Buffer) -> float:
    return len(_compressed(sample)) / len(sample)


def _compressed(data: Buffer) -> bytes:
    return _with_memory(lambda: _contexts.compressor.compress(data))


def _with_memory(work: Callable[[], bytes]) -> bytes:
    """The output of zstd. Raises MemoryError if it gets no memory: that is no fault of the bytes."""
    try:
        return work()
    except zstandard.ZstdError as error:
        if _NO_MEMORY in str(error):
            raise MemoryError(str(error)) from error
        raise


def _planes(view: memoryview, item_bytes: int) -> bytes:
    """Byte k of every element in plane k: exponents compress, mantissas are kept as they are."""
    import numpy as np  # here, so that looking at a history does not wait for it

    elements = np.frombuffer(view, np.uint8).reshape(-1, item_bytes)
    planes = [_plane(np.ascontiguousarray(elements[:, k])) for k in range(item_bytes)]
    heads = [_PLANE.pack(method, len(body)) for method, body in planes]
    return b"".join([bytes([item_bytes]), *heads, *(body for _, body in planes)])


def _plane(plane: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[int, Buffer]:
    if _compressed_ratio(_sample(plane.data)) > 1 - MIN_SAVING:
        return _PLANE_RAW, plane.data
    packed = _compressed(plane.data)
    return (_PLANE_ZSTD, packed) if len(packed) < len(plane) else (_PLANE_RAW, plane.data)


def decode_extent(encoding: int, payload: Buffer, *, num_bytes: int) -> Buffer:
    """The `num_bytes` bytes of an extent. A raw payload is given back as it is, not copied.

    The caller re-hashes what it gets: no encoding carries a checksum.

    Raises:
        CorruptionError: the payload does not stand for exactly `num_bytes` bytes.
        UnsupportedVersionError: an encoding of a later version, or of a package that is not installed.
    """
    view = memoryview(payload).cast("B")
    match encoding:
        case Encoding.RAW:
            if len(view) != num_bytes:
                raise _corrupt(Encoding.RAW, num_bytes, f"{len(view)} bytes")
            return view
        case Encoding.ZERO:
            if len(view):
                raise _corrupt(Encoding.ZERO, num_bytes, f"a payload of {len(view)} bytes where none belongs")
            return bytes(num_bytes)
        case Encoding.CONSTANT:
            if not 0 < len(view) <= MAX_PATTERN_BYTES or num_bytes % len(view):
                raise _corrupt(Encoding.CONSTANT, num_bytes, f"a pattern of {len(view)} bytes")
            return bytes(view) * (num_bytes // len(view))
    for codec in (_brought() if encoding in OF_PACKAGES else CODECS).values():
        if codec.encoding == encoding:
            return codec.decode(view, num_bytes)
    wanted = "upgrade cas_ckpt"
    if encoding in OF_PACKAGES:
        known = ", ".join(f"{name!r} ({codec.encoding})" for name, codec in _brought().items()) or "none"
        wanted = f"install the package that brings it (installed: {known})"
    raise UnsupportedVersionError(f"extent encoding {encoding} is not known to this version: {wanted}")


def _corrupt(encoding: Encoding | str, num_bytes: int, found: str) -> CorruptionError:
    name = encoding if isinstance(encoding, str) else encoding.name
    return CorruptionError(f"an extent of {num_bytes} bytes, as {name}, has {found}; restore it from a copy")


def _decompressed(frame: memoryview, num_bytes: int, encoding: Encoding = Encoding.ZSTD) -> bytes:
    """One zstd frame whose head promises exactly `num_bytes`: nothing larger is ever allocated."""
    try:
        promised = zstandard.frame_content_size(frame)
        if promised != num_bytes:
            raise _corrupt(encoding, num_bytes, f"a zstd frame for {promised} bytes where {num_bytes} belong")
        decompress = _contexts.decompressor.decompress
        data = _with_memory(lambda: decompress(frame, max_output_size=num_bytes, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise _corrupt(encoding, num_bytes, f"a broken zstd frame ({error})") from error
    if len(data) != num_bytes:
        raise _corrupt(encoding, num_bytes, f"a zstd frame of {len(data)} bytes")
    return data


def _read_planes(payload: memoryview, num_bytes: int) -> Buffer:
    import numpy as np

    encoding = Encoding.PLANES_ZSTD
    item_bytes = payload[0] if len(payload) else 0
    start = 1 + item_bytes * _PLANE.size
    if not 1 < item_bytes <= MAX_PATTERN_BYTES or num_bytes % item_bytes or len(payload) < start:
        raise _corrupt(encoding, num_bytes, f"no proper head for planes of {item_bytes}-byte elements")
    heads = list(_PLANE.iter_unpack(payload[1:start]))
    if start + sum(size for _, size in heads) != len(payload):
        raise _corrupt(encoding, num_bytes, "planes that do not fill the payload")
    elements = np.empty((num_bytes // item_bytes, item_bytes), np.uint8)
    for k, (method, size) in enumerate(heads):
        plane: Buffer = payload[start : start + size]
        if method == _PLANE_ZSTD:
            plane = _decompressed(payload[start : start + size], len(elements), encoding)
        elif method != _PLANE_RAW or size != len(elements):
            raise _corrupt(encoding, len(elements), f"a plane of method {method} and {size} bytes")
        elements[:, k] = np.frombuffer(plane, np.uint8)
        start += size
    return elements.reshape(-1).data


CODECS: dict[str, Codec] = {
    "zstd": Codec(Encoding.ZSTD, lambda view, _: _compressed(view), _decompressed),
    "planes": Codec(Encoding.PLANES_ZSTD, _planes, _read_planes),
}
"""By policy. How to add one: docs/adding.md."""


@cache
def _brought() -> dict[str, Codec]:
    """The encodings of installed packages, by policy.

    Raises:
        InvalidInputError: one cannot be imported, has a number of others, or two have one name or number.
    """
    from importlib.metadata import entry_points  # takes 15 ms

    found: dict[str, Codec] = {}
    packages: dict[str | int, str] = {}
    for point in entry_points(group=ENCODINGS):
        package, codec = point.dist.name if point.dist else "?", _codec_of(point)
        for key in (point.name, codec.encoding):
            if key in packages:
                raise InvalidInputError(
                    f"the packages {packages[key]} and {package} both have an encoding {key!r}: leave one installed"
                )
            packages[key] = package
        found[point.name] = codec
    return found


def _kept(data: Buffer) -> memoryview:
    """`data` in memory that nobody changes: a package may use its own again, also in another thread."""
    view = memoryview(data).cast("B")
    return view if type(data) is bytes else memoryview(view.tobytes())


def _codec_of(point: EntryPoint) -> Codec:
    """The encoding that a package brings; what it gives back is never believed."""
    name = point.name
    try:
        brought = point.load()
        number, encode, decode = brought.number, brought.encode, brought.decode
    except Exception as error:  # whatever a package raises as it is imported
        raise InvalidInputError(f"the encoding {name!r} ({point.value}) cannot be imported: {error}") from error
    if type(number) is not int or number not in OF_PACKAGES:
        raise InvalidInputError(f"the encoding {name!r} ({point.value}) has the number {number!r}: 128 to 255 are free")

    def encoded(view: memoryview, item_bytes: int) -> Buffer:
        try:
            payload = _kept(encode(view.toreadonly(), item_bytes))
        except MemoryError:
            raise
        except Exception as error:
            raise InvalidInputError(f"the encoding {name!r} ({point.value}) cannot store an extent: {error}") from error
        is_same = False
        with suppress(CorruptionError):
            is_same = bytearray(decoded(payload, len(view))) == view  # by memcmp, which two views would not be
        if not is_same:
            raise InvalidInputError(f"the encoding {name!r} ({point.value}) does not give back what it was given")
        return payload

    def decoded(payload: memoryview, num_bytes: int) -> memoryview:
        try:
            data = _kept(decode(payload.toreadonly(), num_bytes))
        except MemoryError:
            raise
        except Exception as error:
            raise _corrupt(name, num_bytes, f"a payload that it cannot decode ({error})") from error
        if len(data) != num_bytes:
            raise _corrupt(name, num_bytes, f"a payload for {len(data)} bytes")
        return data

    return Codec(number, encoded, decoded)
