"""Canonical msgpack: one object has one form, and every other form is refused as corrupt."""

from __future__ import annotations

import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cas_ckpt.errors import CorruptionError, InvalidInputError
from cas_ckpt.objects import digest
from cas_ckpt.objects.digest import MAX_DEPTH, pack_canonical, unpack_canonical
from tests.processes import PIPE, Forked
from tests.searches import tries

ATOMS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
)
KEYS = st.text() | st.binary() | st.integers(-(2**63), 2**64 - 1)
EXTS = st.builds(msgpack.ExtType, st.integers(0, 127), st.binary())
OBJECTS = st.recursive(ATOMS | EXTS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=30)


@given(OBJECTS)
@settings(deadline=None)
def test_an_object_comes_back_and_has_one_form(obj: Any) -> None:
    data = pack_canonical(obj)
    again = unpack_canonical(data)
    assert again == obj
    assert pack_canonical(again) == data


@given(st.dictionaries(KEYS, st.integers(0, 9)), st.randoms())
def test_the_order_of_keys_does_not_reach_the_bytes(obj: dict[Any, int], random: Any) -> None:
    items = list(obj.items())
    random.shuffle(items)
    assert pack_canonical(dict(items)) == pack_canonical(obj)


@given(OBJECTS, st.data())
@settings(max_examples=tries(100, 400), deadline=None)
def test_mutated_bytes_are_refused_or_are_the_form_of_another_object(obj: Any, data: Any) -> None:
    packed = bytearray(pack_canonical(obj))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(packed)))
        packed[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    assert_refused_or_canonical(bytes(packed))


@given(st.binary(max_size=40))
@example(b"\xd6\xff\0\0\0\0")
@example(b"\xc7\x0c\xff\xff\xff\xff\xff\0\0\0\0\0\0\0\0")
@settings(max_examples=tries(100, 400))
def test_any_bytes_are_refused_or_are_the_form_of_an_object(data: bytes) -> None:
    assert_refused_or_canonical(data)


def assert_refused_or_canonical(data: bytes) -> None:
    try:
        obj = unpack_canonical(data)
    except CorruptionError:
        return
    assert pack_canonical(obj) == data


LITERALS = [
    (None, "c0"), (False, "c2"), (True, "c3"), (0, "00"), (127, "7f"), (128, "cc80"), (255, "ccff"), (256, "cd0100"),
    (65536, "ce00010000"), (2**32, "cf0000000100000000"), (-1, "ff"), (-32, "e0"), (-33, "d0df"), (-129, "d1ff7f"),
    (-32769, "d2ffff7fff"), (-(2**31) - 1, "d3ffffffff7fffffff"), (1.0, "cb3ff0000000000000"),
    (-0.0, "cb8000000000000000"),
    ("", "a0"), ("a" * 32, "d920" + "61" * 32), (b"", "c400"), ([], "90"), ([1, [2]], "92019102"), ({}, "80"),
    ({"b": 1, "a": 2, 3: 4}, "83" + "0304" + "a16102" + "a16201"), (msgpack.ExtType(5, b"\x90"), "d40590"),
    (tuple(range(16)), "dc0010" + bytes(range(16)).hex()),
]  # fmt: skip


@pytest.mark.parametrize(("obj", "literal"), LITERALS, ids=[literal[:12] for _, literal in LITERALS])
def test_the_bytes_of_an_object_are_these(obj: Any, literal: str) -> None:
    assert pack_canonical(obj).hex() == literal


FOREIGN = {
    "nothing": "",
    "two objects": "c0c0",
    "cut": "a261",
    "unused code": "c1",
    "long int": "cc01",
    "int64 of 1": "d300" + "00" * 6 + "01",
    "float32": "ca3f800000",
    "str8 of one": "d90161",
    "bin16": "c5000161",
    "array16": "dc000101",
    "map16": "de0000",
    "unsorted keys": "82a16201a16102",
    "equal keys": "82010101" + "02",
    "none as key": "81c000",
    "list as key": "819000",
    "float as key": "81cb3ff000000000000000",
    "true as key": "81c300",
    "timestamp": "d6ff00000000",
    "timestamp inside": "8100d6ff00000000",
    "long timestamp": "c70cff" + "00" * 4 + "7f" + "ff" * 7,
    "map with a damaged tail of keys": "82a16100a16100",
    "negative code": "d4fe00",
    "ext8 of one": "c7010500",
    "broken utf-8": "a1ff",
    "surrogate": "a3eda080",
    "array of 2^32": "ddffffffff",
    "endless nesting": "91" * 5000 + "c0",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_form_is_refused(name: str) -> None:
    with pytest.raises(CorruptionError, match="msgpack"):
        unpack_canonical(bytes.fromhex(FOREIGN[name]))


def test_the_depth_that_can_be_packed_is_the_depth_that_can_be_unpacked() -> None:
    deepest = b"\x91" * MAX_DEPTH + b"\xc0"
    assert pack_canonical(unpack_canonical(deepest)) == deepest
    with pytest.raises(CorruptionError, match="nests"):
        unpack_canonical(b"\x91" + deepest)


@pytest.mark.parametrize(
    "obj",
    [object(), {1.5: 0}, {True: 0}, 2**64, "\ud800", {"a": {1, 2}}, bytearray(b"")],
    ids=["object", "float key", "bool key", "huge int", "surrogate", "set", "bytearray"],
)
def test_what_has_no_canonical_form_cannot_be_packed(obj: Any) -> None:
    with pytest.raises(InvalidInputError):
        pack_canonical(obj)


def test_a_refused_object_leaves_nothing_behind_in_the_next_one() -> None:
    with pytest.raises(InvalidInputError):
        pack_canonical(["fine", "\ud800"])
    assert pack_canonical("x") == b"\xa1x"


def test_every_thread_has_a_packer_of_its_own() -> None:
    # A packer is not promised to be thread-safe; a race would show too rarely to be a test.
    seen = [digest._local.packer]
    for _ in range(2):
        thread = threading.Thread(target=lambda: seen.append(digest._local.packer))
        thread.start()
        thread.join()
    assert len({id(packer) for packer in seen}) == 3


def test_a_memoryview_is_read_like_bytes() -> None:
    assert unpack_canonical(memoryview(b"\x92\x01\x02")) == [1, 2]


def _pack_with_little_memory() -> None:
    """Pack much until there is no memory for what comes out; then print what a few objects are packed to."""
    much = bytes(900_000)
    pack_canonical(much)  # the packer's buffer is there now
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    kept = []
    resource.setrlimit(resource.RLIMIT_AS, (mapped, resource.RLIM_INFINITY))
    try:
        while True:
            kept.append(pack_canonical(much))
    except MemoryError:
        pass
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print([pack_canonical(obj) for obj in (7, [], {})], flush=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space")
def test_what_could_not_be_packed_for_want_of_memory_is_not_in_what_is_packed_next() -> None:
    with Forked(_pack_with_little_memory, stdout=PIPE, stderr=PIPE) as process:
        out, err = process.communicate()
    assert out == "[b'\\x07', b'\\x90', b'\\x80']\n", (out[:200], err)
