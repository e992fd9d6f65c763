"""numpy arrays in and out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt.errors import CorruptionError, MismatchError, UnsupportedValueError
from cas_ckpt.objects.state import Container, StoredTensor
from cas_ckpt.training.capture.capture import capture_state
from tests.training.roundtrip import checkout, commit, failure_of, load

ALIGNED = np.dtype([("a", "i1"), ("b", "f8", (2,)), ("c", [("d", "S3"), ("e", ">u2")])], align=True)

ARRAYS: dict[str, Any] = {
    "bool": np.array([True, False]),
    "int8": np.array([[-1, 2]], np.int8),
    "uint64": np.array(2**63, np.uint64),
    "float16": np.array([1.5, np.nan], np.float16),
    "complex128": np.array([1 + 2j]),
    "big-endian": np.arange(5, dtype=">f4"),
    "long double": np.arange(3, dtype=np.longdouble),
    "dates": np.array(["2020-01-01", "NaT"], "M8[ns]"),
    "spans": np.array([5], "m8[s]"),
    "text": np.array(["a", "snow \u2603"]),
    "bytes": np.array([b"a", b"bcd"]),
    "void": np.array([b"abc", b"def"], "V3"),
    "structured": np.array([(1, (2.0, 3.0), (b"x", 4))], ALIGNED),
    "transposed": np.arange(6.0).reshape(2, 3).T,
    "reversed": np.arange(6)[::-2],
    "0-d": np.array(3.25),
    "empty": np.empty((0, 4)),
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_every_kind_of_array_comes_back_with_its_dtype(name: str) -> None:
    array = ARRAYS[name]
    made = load(commit({"x": array}))["x"]
    assert type(made) is np.ndarray
    assert made.dtype == array.dtype
    assert made.shape == array.shape
    assert made.tobytes() == array.tobytes()


def test_a_dtype_is_stored_under_its_own_name_whatever_equal_one_was_committed_before() -> None:
    for name in ("m8[1000as]", "m8[fs]"):  # equal for NumPy
        assert load(commit({"x": np.arange(3).view(name)}))["x"].dtype.str == f"<{name}"


@pytest.mark.parametrize("name", sorted(ARRAYS.keys() - {"broadcast"}))
def test_every_kind_of_array_is_filled_in_place(name: str) -> None:
    array = ARRAYS[name]
    target = np.zeros_like(array)
    state = {"x": target}
    checkout(commit({"x": array}), state)
    assert state["x"] is target
    assert target.tobytes() == array.tobytes()


def test_arrays_are_read_without_a_copy() -> None:
    array = np.arange(4.0)
    item = capture_state({"x": array}).children["x"]
    assert np.shares_memory(item.source.read(item.spec.box), array)  # type: ignore[union-attr]


def test_a_memory_map_is_an_array(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", np.int32, "w+", shape=(3,))
    mapped[:] = 7
    assert load(commit({"x": mapped}))["x"].tolist() == [7, 7, 7]
    checkout(commit({"x": np.arange(3, dtype=np.int32)}), {"x": mapped})
    assert mapped.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.array([(1, None)], [("a", "i4"), ("b", "O")]),
        np.ma.masked_array([1, 2], [True, False]),
        np.zeros(2, [("a", "i4")]).view(np.recarray),
        np.zeros(3, np.dtype([])),
    ],
)
def test_arrays_that_bytes_cannot_express_are_refused_by_key(array: Any) -> None:
    with pytest.raises(UnsupportedValueError, match=r"^deep/x: "):
        capture_state({"deep": {"x": array}})


def test_object_arrays_are_left_to_pickle_if_that_is_allowed() -> None:
    array = np.array([None])
    item = capture_state({"x": array}, allow_pickle=True).children["x"]
    assert item.value is array  # type: ignore[union-attr]


def test_a_read_only_array_is_refused_before_anything_is_touched() -> None:
    locked, first = np.zeros(3), np.zeros(3)
    locked.flags.writeable = False
    tree = commit({"first": np.ones(3), "locked": np.ones(3)})
    error = failure_of(lambda: checkout(tree, {"first": first, "locked": locked}))
    assert isinstance(error, MismatchError)
    assert "locked: the target is a read-only" in str(error)
    assert first.sum() == 0


@pytest.mark.parametrize("dtype", ["f8", ">f4", [("a", "f4")], "V4", "U1"])
def test_an_array_of_another_dtype_is_refused(dtype: Any) -> None:
    target = np.zeros(3, dtype)
    with pytest.raises(MismatchError, match="x: the target is"):
        checkout(commit({"x": np.ones(3, np.float32)}), {"x": target})
    assert not target.tobytes().strip(b"\0")


def test_other_fields_of_the_same_size_are_refused() -> None:
    tree = commit({"x": np.ones(3, [("a", "i4"), ("b", "i4")])})
    with pytest.raises(MismatchError, match="x: the target is an array"):
        checkout(tree, {"x": np.zeros(3, [("a", "i4"), ("c", "i4")])})


@pytest.mark.parametrize("descr", [None, "O", [("a", "O")], [("a", "i4", (3,))], 7])
def test_malformed_fields_are_corruption(descr: Any) -> None:
    tree = commit({"x": np.ones(2, [("a", "i4"), ("b", "i4")])})
    items = tree.children["x"].children  # type: ignore[union-attr]
    bad = Container("dict", {"x": Container("structured", items, {"descr": descr})})
    with pytest.raises(CorruptionError, match=r"^x: "):
        load(bad)


def test_a_dtype_that_numpy_does_not_have_is_corruption() -> None:
    spec = commit({"x": np.ones(2, np.float32)}).children["x"].spec  # type: ignore[union-attr]
    odd = type(spec)("bfloat16", (2,))
    with pytest.raises(CorruptionError, match=r"^x: no numpy array"):
        load(Container("dict", {"x": StoredTensor(odd, "numpy", None, b"1234")}))
