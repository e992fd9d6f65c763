"""The native core and its twin in Python: the same answers, the same refusals; and which of both is believed."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt import native
from tests.searches import tries

OFF = os.environ.get("CAS_CKPT_NATIVE") == "0"
if not OFF:
    from cas_ckpt import _native

needs_core = pytest.mark.skipif(OFF, reason="CAS_CKPT_NATIVE=0")
HUGE = [2**31, 2**32 + 1, 2**60, 2**62, 2**63 - 1, 2**63, 2**64, 2**70, -1, -(2**63), -(2**70)]
LEAF_DIGESTS = [native.leaf_digests_in_python] + ([] if OFF else [_native.leaf_digests])
READ_LEAVES = [native.read_leaves_in_python] + ([] if OFF else [_native.read_leaves])
WORD_SUMS = [native.word_sums_in_python] + ([] if OFF else [_native.word_sums])


def answer(function: Callable[..., Any], *given: Any) -> Any:
    """What it returns, or the kind of its error."""
    try:
        return function(*given)
    except (ValueError, BufferError):  # which of both refuses memory depends on whose memory it is
        return ValueError
    except MemoryError:
        return MemoryError
    except Exception as error:  # noqa: BLE001
        return type(error)


def answers(functions: list[Any], *given: Any) -> Any:
    """What all of them answer."""
    found = [answer(each, *given) for each in functions]
    assert found.count(found[0]) == len(found), found
    return found[0]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Arrays of any strides."""
    dtype = draw(st.sampled_from(["u1", "f2", "f4", "f8", "c16", ">i4", "V3", "V16", "V48"]))
    shape = draw(st.lists(st.integers(0, 9) | st.just(64), max_size=4))
    seed = np.random.default_rng(draw(st.integers(0, 99)))
    steps = draw(st.lists(st.sampled_from([1, 2, 3, -1, -2]), min_size=len(shape), max_size=len(shape)))
    room = [size * abs(step) for size, step in zip(shape, steps, strict=True)]
    base = np.frombuffer(seed.bytes(math.prod(room) * np.dtype(dtype).itemsize) or b"", "u1").copy()
    array = base.view(dtype).reshape(room)[(..., *(slice(None, None, step) for step in steps))]
    return array.transpose(draw(st.permutations(range(len(shape)))))


@settings(max_examples=tries(20, 60), deadline=None)
@given(array=arrays(), leaf=st.integers(-1, 40) | st.sampled_from([1024, 2048, 5000, *HUGE]), spare=st.integers(-1, 2))
def test_leaves_of_any_array_have_the_digests_of_their_bytes(
    array: np.ndarray[Any, Any], leaf: int, spare: int
) -> None:
    leaf_bytes = leaf * array.itemsize if 0 <= leaf < 99 else leaf
    found = answers(LEAF_DIGESTS, array, leaf_bytes)
    data = array.tobytes()
    if leaf_bytes <= 0 or leaf_bytes % array.itemsize or leaf_bytes > sys.maxsize:
        assert found is ValueError
        return
    assert found == b"".join(blake3(data[at : at + leaf_bytes]).digest() for at in range(0, len(data), leaf_bytes))
    copies = [bytearray(max(len(data) + spare, 0)) for _ in LEAF_DIGESTS]
    got = [answer(each, array, leaf_bytes, copy) for each, copy in zip(LEAF_DIGESTS, copies, strict=True)]
    assert got == [found if len(copies[0]) >= len(data) else ValueError] * len(got)
    assert found is ValueError or len(copies[0]) < len(data) or all(copy[: len(data)] == data for copy in copies)


@settings(max_examples=tries(10, 40), deadline=None)
@given(array=arrays(), words=st.integers(-1, 40) | st.sampled_from(HUGE[2:]))
def test_words_of_any_array_have_the_same_sums(array: np.ndarray[Any, Any], words: int) -> None:
    found = answers(WORD_SUMS, array, words)
    if not 0 < words < 99:
        assert found in (ValueError, MemoryError)
        return
    data = array.tobytes()
    rows = -(-len(data) // (8 * words))
    table = np.frombuffer(data.ljust(rows * words * 8, b"\0"), np.uint64).reshape(rows, words)
    assert found == table.sum(1, np.uint64).tobytes() + table.sum(0, np.uint64).tobytes()


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """Sizes of a cell, and (offsets, sizes) of boxes of it."""
    cell = draw(st.lists(st.integers(1, 8) | st.just(96), max_size=3))
    found = []
    for _ in range(draw(st.integers(0, 3))):
        offsets = [draw(st.integers(0, size)) for size in cell]
        found.append((offsets, [draw(st.integers(0, size - at)) for size, at in zip(cell, offsets, strict=True)]))
    return cell, found


@settings(max_examples=tries(25, 80), deadline=None)
@given(data=st.data(), drawn=boxes(), item=st.sampled_from([1, 2, 4, 8, 3, 16]))
def test_leaves_are_read_verified_and_put_into_place_alike(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, drawn: Any, item: int
) -> None:
    cell, places = drawn
    count = math.prod(cell)
    first = data.draw(st.integers(0, count)) * item
    size = data.draw(st.integers(0, count - first // item)) * item
    leaf_bytes = data.draw(st.integers(1, 70)) * item
    stored = np.random.default_rng(count).bytes(size)
    digests = bytearray(native.leaf_digests_in_python(stored, leaf_bytes))
    if digests and data.draw(st.booleans()):
        digests[data.draw(st.integers(0, len(digests) - 1))] ^= 1
    cut = data.draw(st.just(0) | st.integers(0, size))
    checked = data.draw(st.booleans())
    flips = [data.draw(st.sampled_from([1, -1])) for _ in cell]
    file = tmp_path_factory.getbasetemp() / "leaves"
    file.write_bytes(b"some" + stored[: size - cut])
    fd = os.open(file, os.O_RDONLY)
    for source, offset in ((fd, 4), (b"me" + stored[: size - cut], 2)):
        found, memories = [], []
        for each in READ_LEAVES:
            targets = [
                np.zeros(sizes, f"V{item}")[(..., *(slice(None, None, flip) for flip in flips))] for _, sizes in places
            ]
            parts = [(target, tuple(cell), tuple(at)) for target, (at, _) in zip(targets, places, strict=True)]
            found.append(answer(each, source, offset, first, size, leaf_bytes, digests if checked else None, parts))
            whole = len(places) == 1 and targets[0].shape == tuple(cell)
            # Where the cell is all there, the leaf that is wrong may have been read to its place.
            memories.append([target.tobytes() for target in targets] if not whole or found[0] == size else [])
        assert found.count(found[0]) == len(found), found
        assert memories.count(memories[0]) == len(memories)
    os.close(fd)


def test_intact_leaves_are_in_place_when_the_next_one_is_not_or_the_file_ends(tmp_path: Path) -> None:
    stored = bytes(range(200)) * 5
    (tmp_path / "cut").write_bytes(stored[:950])
    digests = bytearray(native.leaf_digests(stored, 100))
    with (tmp_path / "cut").open("rb") as file:
        for each in READ_LEAVES:
            target = np.zeros((2, 10, 50), "u1")
            with pytest.raises(EOFError):
                each(file.fileno(), 0, 0, 1000, 100, digests, [target.transpose(0, 1, 2)[:, ::-1]])
            assert target[:, ::-1].tobytes()[:900] == stored[:900]
            assert each(file.fileno(), 0, 0, 900, 100, digests[:64] + bytes(32) + digests[96:], [target]) == 2


@pytest.mark.parametrize("kind", ["closed", "folder", "for writing", "negative"])
def test_a_file_that_cannot_be_read_is_the_error_of_the_system(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    fd = os.open(tmp_path, os.O_RDONLY) if kind == "folder" else os.open(tmp_path / "file", os.O_WRONLY)
    if kind == "closed":
        os.close(fd)
    found = []
    for each in READ_LEAVES:
        with pytest.raises(OSError, match=r"Errno") as caught:
            each(-1 if kind == "negative" else fd, 0, 0, 8, 8, None, [np.zeros(8, "u1")])
        found.append(caught.value.errno)
    assert len(set(found)) == 1
    if kind != "closed":
        os.close(fd)


def test_a_target_that_must_not_be_written_to_is_refused_unchanged() -> None:
    fixed = np.zeros(8, "u1")
    fixed.flags.writeable = False
    assert answers(READ_LEAVES, b"12345678", 0, 0, 8, 8, None, [fixed]) is ValueError
    assert answers(LEAF_DIGESTS, b"12345678", 8, bytes(8)) is ValueError
    assert answers(LEAF_DIGESTS, b"12345678", 8, fixed) is ValueError
    assert fixed.tolist() == [0] * 8


@settings(max_examples=tries(45, 150), deadline=None)
@given(data=st.data())
def test_numbers_that_cannot_be_are_refused_alike(data: st.DataObject) -> None:
    some = st.integers(0, 16) | st.sampled_from(HUGE)
    offset, first, size, leaf_bytes = (data.draw(some) for _ in range(4))
    target = np.zeros((2, 8), "u1")
    shapes = st.tuples(some, some) | st.lists(some, max_size=3).map(tuple)
    parts = [data.draw(st.just(target) | st.tuples(st.just(target), shapes, shapes)) for _ in range(2)]
    digests = data.draw(st.none() | st.binary(max_size=64))
    answers(READ_LEAVES, bytes(16), offset, first, size, leaf_bytes, digests, parts)


@pytest.mark.parametrize("big", HUGE)
def test_a_file_is_not_read_beyond_what_files_can_have(big: int) -> None:
    with Path(__file__).open("rb") as file:
        targets: list[list[Any]] = [[], [np.zeros(16, "u1")], [(np.zeros(0, "u1"), (big,), (0,))]]
        tried = itertools.product([(big, 0, 8, 8), (0, big, 8, 8), (0, 0, big, 8)], targets)
        for given, parts in [*tried, ((big, big, big, big), [])]:  # the last one takes as much memory as it says
            found = answers(READ_LEAVES, file.fileno(), *given, None, parts)
            assert found in (1, ValueError, EOFError, OSError, MemoryError), (given, found)


def test_elements_that_repeat_beyond_all_memory_are_an_error_and_no_crash() -> None:
    array = np.broadcast_to(np.uint8(0), (2**62,))
    assert answers(LEAF_DIGESTS, array, 1) is MemoryError
    assert answers(WORD_SUMS, array, 1) in (MemoryError, ValueError)


# --- which of both ----------------------------------------------------------------------------


def in_a_process(*lines: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "CAS_CKPT_NATIVE"}
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False, env=kept | environment
    )


@needs_core
@pytest.mark.parametrize("size", [0, 1025, 128 * 1024])
def test_a_core_that_lies_is_not_believed_and_that_is_said_once(size: int) -> None:
    ran = in_a_process(
        "from cas_ckpt import _native",
        "right = _native.leaf_digests",
        f"_native.leaf_digests = lambda data, leaf: bytes(32) if len(data) == {size} else right(data, leaf)",
        "from cas_ckpt import native",
        "import cas_ckpt.objects.digest, cas_ckpt.transfer.hashing",
        "assert native.leaf_digests is native.leaf_digests_in_python",
        "assert native.read_leaves is native.read_leaves_in_python",
        "print(native.STATE)",
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"no native core: what it makes of {size} bytes is not their BLAKE3 hash\n"
    assert ran.stderr.count("RuntimeWarning: cas_ckpt has no native core: ") == 1


@needs_core
@pytest.mark.parametrize("broken", ["del _native.word_sums", "_native.leaf_digests = lambda data: b''"])
def test_a_core_of_another_version_is_not_taken(broken: str) -> None:
    ran = in_a_process("from cas_ckpt import _native", broken, "from cas_ckpt import native", "print(native.STATE)")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("no native core: it is not of this version (")
    assert ran.stderr.count("RuntimeWarning: cas_ckpt has no native core: ") == 1


def test_without_a_core_all_works_and_that_is_said_once() -> None:
    program = (
        "import sys",
        "sys.modules['cas_ckpt._native'] = None",
        "import cas_ckpt, numpy",
        "with cas_ckpt.Repository.init('memory://none') as repo:",
        "    repo.commit({'w': numpy.arange(9)}, message='one')",
        "    print(repo.load('main')['w'].sum(), cas_ckpt.native.STATE)",
    )
    ran = in_a_process(*program)
    assert ran.stdout.startswith("36 no native core: it is not there"), ran.stderr
    assert ran.stderr.count("RuntimeWarning: cas_ckpt has no native core: ") == 1


def test_a_core_that_is_switched_off_is_not_looked_for_and_nothing_is_warned_of() -> None:
    program = "import sys, cas_ckpt.native as n; print('cas_ckpt._native' in sys.modules, n.STATE)"
    ran = in_a_process(program, CAS_CKPT_NATIVE="0")
    assert (ran.stdout, ran.stderr) == ("False no native core: CAS_CKPT_NATIVE is 0\n", "")


@needs_core
def test_the_core_that_was_built_is_the_one_in_use() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native._take_core() == native.STATE == f"native core: {_native.SIMD}"
    assert native.leaf_digests is _native.leaf_digests
