"""The safetensors format: its header read with suspicion and written as the library writes it.

The parser is our own. The safetensors library gives tensors, not file offsets: it maps the
file (see formats/folders.py for why we do not), keeps the last of two tensors of one name, and
cannot give numpy the dtypes that numpy lacks. The format is small: a length (8 bytes, little
endian), that much JSON, then the bytes of all tensors without a gap.

Invariant: of a header that is accepted, every byte of the file belongs to exactly one tensor
or to the header. Must not know: folders, commits.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.formats.folders import InputFile
from cas_ckpt.objects.nodes import MAX_DIMENSIONS
from cas_ckpt.objects.spec import Spec

MAX_HEADER_BYTES = 100_000_000
"""Limit of the format itself."""

MAX_NAME_BYTES = 4000
"""UTF-8 bytes of a tensor's name, so that it fits in a key."""

METADATA_NAME = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_MAX_ELEMENTS = 1 << 58

DTYPES: dict[str, str] = {
    "BOOL": "bool", "F4": "float4_e2m1fn_x2", "U8": "uint8", "I8": "int8",
    "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32",
    "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
"""Our names by those of the format, in the order in which the library ranks them."""

NAMES: dict[str, str] = {ours: theirs for theirs, ours in DTYPES.items()}
_RANK = {ours: rank for rank, ours in enumerate(DTYPES.values())}
_PACKED = "F4"


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor of a file: where in the file its bytes begin."""

    name: str
    spec: Spec
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file: its tensors by rising offset, and its text metadata (None: it has none)."""

    tensors: tuple[TensorSlot, ...]
    metadata: Mapping[str, str] | None


# --- reading ------------------------------------------------------------------------------


def read_header(file: InputFile) -> Header:
    """The header of `file`, every claim of it checked against the others and the file's size.

    Raises:
        InvalidInputError: names the file and what is wrong with it.
    """
    try:
        return _read_header(file)
    except _MalformedError as error:
        raise InvalidInputError(
            f"{file.path}: not a valid safetensors file: {error}; fetch or write it again"
        ) from error


class _MalformedError(Exception):
    """A header is malformed; the message says how."""


def _read_header(file: InputFile) -> Header:
    if file.size < _LENGTH.size:
        raise _MalformedError(f"it has {file.size} bytes, fewer than the {_LENGTH.size} of the header's length")
    (length,) = _LENGTH.unpack(file.read(0, _LENGTH.size))
    if length > MAX_HEADER_BYTES or length > file.size - _LENGTH.size:
        raise _MalformedError(f"its header is said to be {length} bytes, of {file.size} (at most {MAX_HEADER_BYTES})")
    content = _parse(bytes(file.read(_LENGTH.size, length)))
    metadata = content.pop(METADATA_NAME, None)
    data_start = _LENGTH.size + length
    tensors = [_slot(name, claim) for name, claim in content.items()]
    _check_cover([(name, begin, end) for name, _, begin, end in tensors], file.size - data_start)
    ordered = sorted(tensors, key=lambda slot: (slot[2], slot[3]))
    slots = tuple(TensorSlot(name, spec, data_start + begin) for name, spec, begin, _ in ordered)
    return Header(slots, None if metadata is None else _checked_metadata(metadata))


def _parse(data: bytes) -> dict[str, Any]:
    if not data.startswith(b"{"):
        raise _MalformedError("its header does not begin with '{'")
    try:
        return read_json_object(data)
    except ValueError as error:
        raise _MalformedError(f"its header {error}") from error


def read_json_object(data: bytes) -> dict[str, Any]:
    """The object that a stranger's JSON holds.

    Raises:
        ValueError: says how it is malformed; of an object that has a name twice, too.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) != len(pairs):
            raise ValueError("a name is in it twice")
        return content

    try:
        content = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError as error:
        raise ValueError("nests too deep") from error
    except ValueError as error:  # of the encoding too, and of numbers of thousands of digits
        raise ValueError(f"is not JSON: {str(error)[:200]}") from error
    if not isinstance(content, dict):
        raise ValueError("is not a JSON object")  # noqa: TRY004  # of the text, not of a type
    return content


def _slot(name: str, claim: Any) -> tuple[str, Spec, int, int]:
    _check_name(name, "the tensor name")
    if not isinstance(claim, dict) or claim.keys() != {"dtype", "shape", "data_offsets"}:
        raise _MalformedError(f"tensor {name!r} wants exactly dtype, shape and data_offsets")
    dtype, shape = claim["dtype"], _whole_numbers(claim["shape"], name, "shape")
    offsets = _whole_numbers(claim["data_offsets"], name, "data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _MalformedError(f"tensor {name!r} has the dtype {str(dtype)[:40]!r}, which this version does not know")
    if len(offsets) != 2 or len(shape) > MAX_DIMENSIONS:
        raise _MalformedError(f"tensor {name!r} has {len(offsets)} offsets and {len(shape)} dimensions")
    spec = _spec(name, dtype, shape)
    begin, end = offsets
    if end - begin != spec.num_bytes:
        raise _MalformedError(f"tensor {name!r} ({spec}) needs {spec.num_bytes} bytes, its offsets give {end - begin}")
    return name, spec, begin, end


def _whole_numbers(value: Any, name: str, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(number) is not int or not 0 <= number < 1 << 63 for number in value):
        raise _MalformedError(f"the {what} of tensor {name!r} is not a list of whole numbers below 2^63")
    return tuple(value)


def _spec(name: str, dtype: str, shape: tuple[int, ...]) -> Spec:
    count = 1
    for size in shape:
        count *= size or 1  # a size of 0 must not hide an overflow of the others
        if count > _MAX_ELEMENTS:
            raise _MalformedError(f"the shape of tensor {name!r} is too large for any memory")
    if dtype != _PACKED:
        return Spec(DTYPES[dtype], shape)
    if not shape or shape[-1] % 2:
        raise _MalformedError(f"tensor {name!r} ends inside a byte: 4-bit elements come in pairs")
    return Spec(DTYPES[dtype], (*shape[:-1], shape[-1] // 2))


def _check_name(text: str, what: str) -> None:
    """Refuse `text` that cannot be part of a key."""
    if _num_bytes(text, what) > MAX_NAME_BYTES or "\0" in text:
        raise _MalformedError(f"{what} {text[:40]!r}... is longer than {MAX_NAME_BYTES} bytes or holds NUL")


def _num_bytes(text: str, what: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise _MalformedError(f"{what} {text[:40]!r} is not Unicode text") from error


def _check_cover(ranges: list[tuple[str, int, int]], num_bytes: int) -> None:
    """Refuse ranges that do not follow one another without gap or overlap, or do not end where the file does."""
    at = 0
    for name, begin, end in sorted(ranges, key=lambda found: found[1:]):
        if begin != at:
            raise _MalformedError(f"tensor {name!r} begins at {begin}, wanted {at}: a gap or an overlap")
        at = end
    if at != num_bytes:
        raise _MalformedError(f"its tensors take {at} bytes, {num_bytes} are there: truncated, or more was added")


def _checked_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _MalformedError(f"its {METADATA_NAME} is not a mapping of text to text")
    for name, value in metadata.items():
        _check_name(name, "the metadata name")
        _num_bytes(value, f"the metadata {name[:40]!r}")
    return metadata


# --- writing ------------------------------------------------------------------------------


def is_expressible(spec: Spec) -> bool:
    """Whether the format has the dtype (a single element of half a byte it has not)."""
    name = NAMES.get(spec.dtype)
    return name is not None and (name != _PACKED or bool(spec.shape))


def ranked(tensors: Sequence[tuple[str, Spec]]) -> list[tuple[str, Spec]]:
    """The order in which the library writes tensors: widest dtype first, then by name."""
    return sorted(tensors, key=lambda tensor: (-_RANK[tensor[1].dtype], tensor[0].encode()))


def encode_header(tensors: Sequence[tuple[str, Spec]], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file that holds `tensors` in this order; data follows at a multiple of 8."""
    content: dict[str, Any] = {METADATA_NAME: dict(metadata)} if metadata else {}
    at = 0
    for name, spec in tensors:
        content[name] = _claim(spec, at)
        at += spec.num_bytes
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def _claim(spec: Spec, begin: int) -> dict[str, Any]:
    name = NAMES[spec.dtype]
    shape = [*spec.shape[:-1], spec.shape[-1] * 2] if name == _PACKED else list(spec.shape)
    return {"dtype": name, "shape": shape, "data_offsets": [begin, begin + spec.num_bytes]}
