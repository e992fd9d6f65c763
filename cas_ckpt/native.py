"""The loops over bytes: by the native core, without the interpreter's lock, or in Python where there is none.

    `leaf_digests`   the digests of the leaves of an array, which may be copied on the way
    `read_leaves`    leaves from a file or from memory, verified and put into place
    `word_sums`      sums of rows and columns of 64-bit words

Each is one call for a few megabytes. The core (`native/`, built with the package) is taken if it is there, and if its
hashes are those of the `blake3` package; else the functions of this file do the same work, slower, and a warning says
so once. CAS_CKPT_NATIVE=0 in the environment switches the core off. docs/native.md.

Invariant: what they return, and which bytes they write, does not depend on which of both does it.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from blake3 import blake3

from cas_ckpt.arguments import Buffer

if TYPE_CHECKING:
    import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"
Part: TypeAlias = "Array | tuple[Array, tuple[int, ...], tuple[int, ...]]"
"""Where bytes of a cell go to: an array that is the cell, or (array, sizes of the cell, where in it the array begins).
The array may have any strides."""

DIGEST_BYTES = 32
WORD_BYTES = 8
STEP_BYTES = 2 * 1024 * 1024
"""Bytes that are read at a time in Python: few enough to be in the processor's cache still when they are hashed, and
enough that the interpreter's lock is seldom wanted (docs/decisions/005)."""


class LeafDigests(Protocol):
    """Signature of `leaf_digests`."""

    def __call__(self, array: Any, leaf_bytes: int, copy: Buffer | None = None, /) -> bytes: ...


class ReadLeaves(Protocol):
    """Signature of `read_leaves`."""

    def __call__(
        self, source: int | Buffer, offset: int, first: int, size: int, leaf_bytes: int, digests: Buffer | None,
        parts: Sequence[Part], cached_only: bool = False,
    ) -> int: ...  # fmt: skip


class WordSums(Protocol):
    """Signature of `word_sums`."""

    def __call__(self, array: Array, row_words: int, /) -> bytes: ...


# --- the same in Python ---------------------------------------------------------------------


def leaf_digests_in_python(array: Any, leaf_bytes: int, copy: Buffer | None = None, /) -> bytes:
    """Implements `leaf_digests`."""
    data = memoryview(array)
    _check_lengths(leaf_bytes)
    if not leaf_bytes or leaf_bytes % data.itemsize:
        raise ValueError("leaves must have whole items")
    if copy is not None:
        data = _copied(array, data, copy)
    else:
        data = _as_bytes(data if data.c_contiguous else memoryview(data.tobytes()))
    leaves = [data[start : start + leaf_bytes] for start in range(0, len(data), leaf_bytes)]
    # One call of BLAKE3 a leaf, the lock released inside it. Between the calls it runs in C: the longer a thread has
    # the lock, the more often another one that hashes finds it taken, and sleeps.
    return b"".join(map(blake3.digest, map(blake3, leaves)))


def _check_lengths(*lengths: int) -> None:
    if not all(0 <= each <= sys.maxsize for each in lengths):
        raise ValueError("a length that is negative, or more than memory can have")


def _as_bytes(data: memoryview) -> memoryview:
    if data.format == "B" or not data.nbytes:
        return data.cast("B") if data.nbytes else memoryview(bytearray())
    import numpy as np  # here, so that looking at a history does not wait for it

    return np.frombuffer(data, np.uint8).data  # items of any kind, as `cast` does not take them


def _copied(array: Any, data: memoryview, copy: Buffer) -> memoryview:
    import numpy as np

    room = _as_bytes(memoryview(copy))
    if room.readonly or len(room) < data.nbytes:
        raise ValueError("less room for the copy than the array has bytes, or none that can be written to")
    if data.nbytes:
        found = array if isinstance(array, np.ndarray) else np.asarray(data)
        np.copyto(np.frombuffer(room[: data.nbytes], found.dtype).reshape(found.shape), found)
    return room[: data.nbytes]


def read_leaves_in_python(
    source: int | Buffer, offset: int, first: int, size: int, leaf_bytes: int, digests: Buffer | None,
    parts: Sequence[Part], cached_only: bool = False,
) -> int:  # fmt: skip
    """See `read_leaves`."""
    _check_lengths(offset, first, size, leaf_bytes, offset + size)
    if not leaf_bytes:
        raise ValueError("leaves without bytes")
    places = [_place(part, first, size, leaf_bytes) for part in parts]
    wanted = None if digests is None else bytes(digests)
    if wanted is not None and len(wanted) // DIGEST_BYTES < -(-size // leaf_bytes):
        raise ValueError("fewer digests than leaves")
    step = max(STEP_BYTES // leaf_bytes, 1) * leaf_bytes
    scratch = memoryview(bytearray(min(step, size))) if isinstance(source, int) else _as_bytes(memoryview(source))
    if not isinstance(source, int) and len(scratch) < offset + size:
        raise ValueError("more bytes than the memory has")
    done = 0
    for start in range(0, size, step):
        length = got = min(step, size - start)
        if isinstance(source, int):
            data = scratch[:length]
            got, ended = _read_all(source, offset + start, data, cached_only)
        else:
            data = scratch[offset + start : offset + start + length]
        if got < length:
            data = data[: got // leaf_bytes * leaf_bytes]
        intact = -(-len(data) // leaf_bytes)
        if wanted is not None:
            found = leaf_digests_in_python(data, leaf_bytes)
            own = wanted[done * DIGEST_BYTES : done * DIGEST_BYTES + len(found)]
            if found != own:
                places_of = range(0, len(found), DIGEST_BYTES)
                intact = next(
                    at for at, p in enumerate(places_of) if found[p : p + DIGEST_BYTES] != own[p : p + DIGEST_BYTES]
                )
        for place in places:
            _scatter(*place, first + start, data[: intact * leaf_bytes])
        done += intact
        if intact * leaf_bytes < len(data):
            return done
        if got < length:
            if ended:
                raise EOFError("the file ends before what is wanted of it")
            return done
    return done


def _read_all(fd: int, offset: int, target: memoryview, cached_only: bool) -> tuple[int, bool]:
    """How many bytes of `target` were filled, and whether the file ended; else the page cache has no more."""
    done = 0
    while done < len(target):
        try:
            got = os.preadv(fd, [target[done:]], offset + done, os.RWF_NOWAIT if cached_only else 0)
        except OSError:
            if cached_only:  # it is not there, or this file system cannot tell
                return done, False
            raise
        if not got:
            return done, True
        done += got
    return done, False


def _place(part: Part, first: int, size: int, leaf_bytes: int) -> tuple[Array, tuple[int, ...], tuple[int, ...]]:
    """The part, spelled out, if bytes first .. first + size of the cell can be put there."""
    array, cell, offsets = part if isinstance(part, tuple) else (part, part.shape, (0,) * part.ndim)
    if not array.flags.writeable:
        raise ValueError("a target that must not be written to")
    if len(cell) != array.ndim or len(offsets) != array.ndim:
        raise ValueError("another number of dimensions")
    _check_lengths(*cell, *offsets)
    if any(first + own > all_ for first, own, all_ in zip(offsets, array.shape, cell, strict=True)):
        raise ValueError("a part that reaches beyond its cell")
    all_bytes = math.prod(cell) * array.itemsize
    if (
        all_bytes > sys.maxsize
        or first + size > all_bytes
        or any(n % array.itemsize for n in (first, size, leaf_bytes))
    ):
        raise ValueError("leaves that are not whole items of the cell")
    return array, tuple(cell), tuple(offsets)


def _scatter(array: Array, cell: tuple[int, ...], offsets: tuple[int, ...], start: int, data: memoryview) -> None:
    """Put the bytes `data` of the cell, which begin at `start`, to their places."""
    import numpy as np

    if not array.size or not len(data):
        return
    found = np.frombuffer(data, array.dtype)
    for at, sizes in runs_of_boxes(cell, start // array.itemsize, start // array.itemsize + len(found)):
        own, found = found[: math.prod(sizes)].reshape(sizes), found[math.prod(sizes) :]
        there, here = [], []
        for begin, num, first, length in zip(at, sizes, offsets, array.shape, strict=True):
            low, high = max(begin, first), min(begin + num, first + length)
            there.append(slice(low - first, max(high, low) - first))
            here.append(slice(low - begin, max(high, low) - begin))
        place: tuple[Any, ...] = (..., *there)  # a view, even of an array without dimensions
        np.copyto(array[place], own[tuple(here)])


def runs_of_boxes(sizes: tuple[int, ...], first: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of boxes that are each consecutive in the C order of a cell, together elements first .. stop."""
    if len(sizes) < 2:
        yield (first,) * len(sizes), (stop - first,) * len(sizes)
        return
    row = math.prod(sizes[1:])
    while first < stop:
        at, begin = divmod(first, row)
        num_rows = (stop - first) // row
        if begin or not num_rows:
            end = min(row, begin + stop - first)
            for offsets, inner in runs_of_boxes(sizes[1:], begin, end):
                yield (at, *offsets), (1, *inner)
            first += end - begin
        else:
            yield (at, *[0] * len(sizes[1:])), (num_rows, *sizes[1:])
            first += num_rows * row


def word_sums_in_python(array: Array, row_words: int, /) -> bytes:
    """See `word_sums`."""
    import numpy as np

    if not 0 < row_words <= sys.maxsize // 64:
        raise ValueError("a row without words, or of more than memory can have")
    row_bytes = row_words * WORD_BYTES
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    num_rows, rest = divmod(len(data), row_bytes)
    if data.ctypes.data % WORD_BYTES:
        data = data.copy()
    sums = np.empty(num_rows + bool(rest) + row_words, np.uint64)
    columns = sums[-row_words:]
    columns[:] = 0
    whole = data[: num_rows * row_bytes].view(np.uint64).reshape(num_rows, row_words)
    block_rows = max(1, (1 << 20) // row_bytes)  # a block stays in the processor's cache between its two sums
    for start in range(0, num_rows, block_rows):
        block = whole[start : start + block_rows]
        np.add.reduce(block, 1, out=sums[start : start + len(block)])
        columns += np.add.reduce(block, 0)
    if rest:
        last = np.zeros(row_bytes, np.uint8)
        last[:rest] = data[num_rows * row_bytes :]
        columns += last.view(np.uint64)
        sums[num_rows] = np.add.reduce(last.view(np.uint64))
    return sums.tobytes()


# --- which of both ----------------------------------------------------------------------------

leaf_digests: LeafDigests = leaf_digests_in_python
"""The BLAKE3 hashes of the leaves of an array in C order, joined: 32 bytes a leaf, the last of which may be shorter.

Args:
    array: Anything with a buffer, of any strides.
    leaf_bytes: A multiple of the item size.
    copy: Writable memory of at least as many bytes: each leaf is copied there in C order, and the copy is hashed.
"""

read_leaves: ReadLeaves = read_leaves_in_python
"""How many leaves were read, have the digests that they should have, and are in place: the next one has not.

Args:
    source: Number of an open file, or memory.
    offset: Where in it the bytes begin.
    first: Where they begin in the cell, in C order.
    size: How many they are: whole leaves, but for the last.
    digests: Of these leaves, joined; None: they are put into place unseen.
    parts: What gets them, as far as it has room for them; none: they are verified only.
    cached_only: Stop where the page cache of the system does not have them.
Raises:
    OSError: as reads do. EOFError: the file ends before. ValueError: lengths that do not fit together.
"""

word_sums: WordSums = word_sums_in_python
"""The sums modulo 2^64 of all rows, then of all columns, of the words of an array, in this machine's byte order.

Args:
    array: Of any strides; its words are those of its bytes in C order, the last filled up with zeros.
    row_words: Words in a row.
"""

_PROOFS = (0, 1, 64, 1024, 1025, 2048, 16 * 1024 + 1, 128 * 1024)
"""Lengths that the core has to hash as the `blake3` package does before it is believed."""


def _take_core() -> str:
    """Take the native core, if it can be believed; what of it `cas-ckpt --version` says."""
    global leaf_digests, read_leaves, word_sums
    if os.environ.get("CAS_CKPT_NATIVE") == "0":
        return "no native core: CAS_CKPT_NATIVE is 0"
    data = (bytes(range(251)) * 523)[: _PROOFS[-1]]
    try:
        from cas_ckpt import _native as core

        found = core.leaf_digests, core.read_leaves, core.word_sums
        bad = [size for size in _PROOFS if core.leaf_digests(data[:size], _PROOFS[-1]) != _digest(data[:size])]
    except ImportError as error:
        why = f"it is not there ({error})"
    except (AttributeError, TypeError, ValueError, MemoryError) as error:  # as of another version
        why = f"it is not of this version ({error})"
    else:
        if not bad:
            leaf_digests, read_leaves, word_sums = found
            return f"native core: {core.SIMD}"
        why = f"what it makes of {bad[0]} bytes is not their BLAKE3 hash"
    warnings.warn(
        f"cas_ckpt has no native core: {why}; commits and checkouts are right, but slower. Install it anew where there "
        "is a C compiler, or set CAS_CKPT_NATIVE=0 to hear no more of this",
        RuntimeWarning, stacklevel=2,
    )  # fmt: skip
    return f"no native core: {why}"


def _digest(data: bytes) -> bytes:
    return blake3(data).digest() if data else b""


STATE = _take_core()
"""Which of both it is, in words."""
