"""By how much tensors differ, as numpy says it of whole arrays; streamed, verified, in bounded memory."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt import limits
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import CorruptionError
from cas_ckpt.objects.spec import DTYPE_BYTES, Spec
from cas_ckpt.objects.state import TensorItem
from cas_ckpt.ops.diff import numbers as diff_numbers
from cas_ckpt.ops.diff.diff import DiffRequest, diff_commits
from cas_ckpt.ops.diff.numbers import measure, widening
from cas_ckpt.ops.diff.walk import Diff, TensorNumbers
from cas_ckpt.storage.file import FileStore
from tests.builders import ArrayMemory, commit, new_repository, numbers, tensor
from tests.searches import tries
from tests.wrapped_stores import CountingStore

WITHOUT_NUMBERS = sorted(
    {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    | {"float4_e2m1fn_x2", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}
)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[RepositoryHandle]:
    made = new_repository(tmp_path / "repo")
    yield made
    made.close()


def raw(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def as_dtype(array: np.ndarray[Any, Any], dtype: str) -> TensorItem:
    """Raw items as a tensor of a dtype that numpy does not have."""
    return TensorItem(Spec(dtype, array.shape), ArrayMemory(array), "torch")


def compare(handle: RepositoryHandle, a: Any, b: Any, **request: Any) -> Diff:
    old, new = commit(handle, {"w": a}), commit(handle, {"w": b})
    return diff_commits(handle, old.id, new.id, DiffRequest(numbers=True, **request))


def numbers_of(handle: RepositoryHandle, a: Any, b: Any, **request: Any) -> TensorNumbers:
    (entry,) = compare(handle, a, b, **request).entries
    assert entry.numbers is not None
    return entry.numbers


# --- from bits to numbers -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(set(DTYPE_BYTES) - set(WITHOUT_NUMBERS) - {"qint8", "quint8", "qint32"}))
def test_every_bit_pattern_is_the_number_that_torch_says(dtype: str) -> None:
    width = DTYPE_BYTES[dtype]
    if width == 1:
        codes = np.arange(2 if dtype == "bool" else 256, dtype=np.uint8)
    elif width == 2:
        codes = np.arange(1 << 16, dtype=np.uint16)
    else:
        codes = np.random.default_rng(0).integers(0, 256, 4096 * width, dtype=np.uint8)
    wide = widening(dtype)
    assert wide is not None
    with np.errstate(invalid="ignore"):  # signalling NaNs
        found = wide(codes.view(np.uint8))
        kind = torch.complex128 if dtype.startswith("complex") else torch.float64
        theirs = torch.from_numpy(codes.view(np.uint8).copy()).view(getattr(torch, dtype)).to(kind).numpy()
        np.testing.assert_array_equal(found, theirs)
    assert found.dtype in (np.float64, np.complex128)


def test_dtypes_without_numbers_are_told_apart() -> None:
    assert [dtype for dtype in WITHOUT_NUMBERS if widening(dtype) is not None] == []
    assert set(DTYPE_BYTES) - {dtype for dtype in DTYPE_BYTES if widening(dtype)} == set(WITHOUT_NUMBERS)
    assert [name for name in ("np:<M8[ns]", "np:<U3", "np:|V3") if widening(name) is not None] == []
    swapped = widening("np:>f4")
    assert swapped is not None
    assert swapped(raw(np.array([1.5, -2], ">f4"))).tolist() == [1.5, -2]


# --- sums ---------------------------------------------------------------------------------

DTYPES = ["float16", "float32", "float64", "int8", "uint16", "int32", "int64", "uint64", "bool", "complex64"]


@st.composite
def arrays(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    dtype, size = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 300))
    source = np.random.default_rng(draw(st.integers(0, 1000)))
    bits = draw(st.booleans())

    def made() -> np.ndarray[Any, Any]:
        if dtype == "bool":
            return source.integers(0, 2, size).astype(bool)
        if bits and dtype != "float64":  # any bit pattern, NaN and infinity among them
            return source.integers(0, 256, size * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype)
        return (source.standard_normal(size) * 50).astype(dtype)

    before, other = made(), made()
    return before, np.where(source.random(size) < draw(st.sampled_from([0, 0.1, 1])), other, before)


@given(arrays())
@settings(max_examples=tries(80, 300), deadline=None)
def test_sums_over_blocks_are_what_numpy_says_of_the_whole(pair: tuple[np.ndarray[Any, Any], ...]) -> None:
    before, after = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diff_numbers, "BLOCK_ELEMENTS", 64)
        name, width = before.dtype.name, before.dtype.itemsize
        sums = measure(raw(before), raw(after), (name, name), (width, width))
    found = sums.numbers(len(before), are_numbers=True)
    bits = raw(before).reshape(-1, width) != raw(after).reshape(-1, width)
    assert (found.compared_elements, found.changed_elements) == (len(before), np.count_nonzero(bits.any(axis=1)))
    wide = np.clongdouble if before.dtype.kind == "c" else np.longdouble  # holds integers of 64 bits exactly
    with np.errstate(invalid="ignore"):  # signalling NaNs
        x, y = before.astype(wide), after.astype(wide)
    assert (found.nan_before, found.nan_after) == (np.count_nonzero(np.isnan(x)), np.count_nonzero(np.isnan(y)))
    assert found.inf_before == np.count_nonzero(np.isinf(x) & ~np.isnan(x))
    assert found.inf_after == np.count_nonzero(np.isinf(y) & ~np.isnan(y))
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    delta = np.abs(y - x)
    assert found.max_delta == pytest.approx(float(delta.max(initial=0)), rel=1e-12)
    assert found.mean_delta == pytest.approx(float(delta.mean()) if len(delta) else 0, rel=1e-12)
    assert found.delta_norm == pytest.approx(_norm(delta), rel=1e-12)
    if _norm(x):
        assert found.relative_norm == pytest.approx(_norm(delta) / _norm(x), rel=1e-9)
    else:
        assert found.relative_norm is None
    if _norm(x) and _norm(y):
        cosine = float((x.conj() * y).real.sum() / (np.longdouble(_norm(x)) * np.longdouble(_norm(y))))
        assert found.cosine == pytest.approx(cosine, abs=1e-9)
        assert abs(found.cosine or 0) <= 1
    else:
        assert found.cosine is None


def _norm(array: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt((np.abs(array) ** 2).sum()))


def test_integers_of_64_bits_differ_exactly() -> None:
    before = np.array([2**62, -(2**63), 5, 2**53], "int64")
    after = np.array([2**62 + 1, 2**63 - 1, 5, 2**53 + 1], "int64")
    found = measure(raw(before), raw(after), ("int64", "int64"), (8, 8)).numbers(4, are_numbers=True)
    assert (found.changed_elements, found.max_delta) == (3, float(2**64))
    close = measure(raw(before[[0, 3]]), raw(after[[0, 3]]), ("int64", "int64"), (8, 8)).numbers(2, are_numbers=True)
    assert (close.max_delta, close.mean_delta) == (1.0, 1.0)


def test_a_complex_number_with_any_part_that_is_nan_is_nan() -> None:
    odd = np.array([complex(np.inf, np.nan), complex(np.nan, 0), complex(0, -np.inf), 1j], "complex64")
    found = measure(raw(odd), raw(odd[::-1]), ("complex64", "complex64"), (8, 8)).numbers(4, are_numbers=True)
    assert (found.nan_before, found.nan_after, found.inf_before, found.inf_after) == (2, 2, 1, 1)


def test_numbers_beyond_float64_are_undefined_not_wrong() -> None:
    before, after = np.full(4, 1e300), np.full(4, -1e300)
    found = measure(raw(before), raw(after), ("float64", "float64"), (8, 8)).numbers(4, are_numbers=True)
    assert (found.max_delta, found.relative_norm, found.cosine) == (2e300, None, None)


# --- tensors in commits -------------------------------------------------------------------


def test_only_changed_chunks_are_compared_and_differences_are_of_the_whole(tmp_path: Path) -> None:
    repo = new_repository(tmp_path / "repo")
    before = numbers(2100, 1000, seed=1)
    after = before.copy()
    after[1030:1040] *= 1.5
    after[1500, 7] = np.nan
    a, b = commit(repo, {"w": before}), commit(repo, {"w": after})
    repo.close()
    store = CountingStore(FileStore(tmp_path / "repo"))
    repo = RepositoryHandle.on_store(store, index_url=str(tmp_path / "index"))
    repo.sync()
    store.reset()
    (entry,) = diff_commits(repo, a.id, b.id, DiffRequest(numbers=True)).entries
    assert store.bytes_read < 2 * 1024 * 4000 * 1.02
    found = entry.numbers
    assert found is not None
    x, y = before[1024:2048].astype("f8"), after[1024:2048].astype("f8")
    finite = np.isfinite(y)
    x, y = x[finite], y[finite]
    assert (found.num_elements, found.compared_elements) == (2_100_000, 1_024_000)
    assert found.changed_elements == 10_001
    assert found.changed_share == 10_001 / 2_100_000
    assert (found.nan_before, found.nan_after, found.inf_before, found.inf_after) == (0, 1, 0, 0)
    assert found.max_delta == np.abs(y - x).max()
    assert found.mean_delta == pytest.approx(np.abs(y - x).sum() / 2_099_999, rel=1e-12)
    assert found.delta_norm == pytest.approx(np.linalg.norm(y - x), rel=1e-12)
    assert found.relative_norm == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-12)
    assert found.cosine == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-12)
    repo.close()


def test_the_answer_does_not_depend_on_threads(repo: RepositoryHandle) -> None:
    before = numbers(2100, 1000, seed=1)
    with limits(num_threads=1):
        found = numbers_of(repo, before, before * 2)
    assert found.compared_elements == found.num_elements == found.changed_elements
    for count in (2, 3):
        with limits(num_threads=count):
            assert numbers_of(repo, before, before * 2) == found


def test_the_answer_does_not_depend_on_how_the_work_is_cut(
    repo: RepositoryHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {"w": numbers(2100, 1000, seed=1), "x": numbers(500, seed=2), "y": numbers(700, seed=3)}
    old, new = commit(repo, arrays), commit(repo, {name: array * 2 for name, array in arrays.items()})
    wanted = diff_commits(repo, old.id, new.id, DiffRequest(numbers=True))
    for name in ("CELLS_PER_STRETCH", "STRETCHES_AT_A_TIME", "CHUNKS_AT_A_TIME"):
        monkeypatch.setattr(diff_numbers, name, 1)
    assert diff_commits(repo, old.id, new.id, DiffRequest(numbers=True)) == wanted


def test_bits_decide_what_changed(repo: RepositoryHandle) -> None:
    other_nan = np.array([0x7FC00001], "u4").view("f4")[0]
    before = np.array([0.0, np.nan, np.nan, 1.0], "float32")
    after = np.array([-0.0, np.nan, other_nan, 1.0], "float32")
    assert before.view("u4")[2] != after.view("u4")[2]
    found = numbers_of(repo, before, after)
    assert (found.changed_elements, found.max_delta) == (2, 0.0)
    assert (found.nan_before, found.nan_after) == (2, 2)


def test_bfloat16_is_compared_as_the_numbers_that_it_is(repo: RepositoryHandle) -> None:
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = x * 1.25
    a, b = (as_dtype(each.view(torch.int16).numpy().view("uint16"), "bfloat16") for each in (x, y))
    found = numbers_of(repo, a, b)
    assert found.max_delta == (y.double() - x.double()).abs().max().item()
    assert found.relative_norm == pytest.approx(((y.double() - x.double()).norm() / x.double().norm()).item())


def test_another_dtype_is_compared_by_value(repo: RepositoryHandle) -> None:
    for shape in ((40,), (30, 100), (2100, 1000)):
        before = numbers(*shape, seed=3)
        found = numbers_of(repo, before, before.astype("float64"))
        assert (found.changed_elements, found.max_delta, found.cosine) == (0, 0.0, pytest.approx(1.0))
        found = numbers_of(repo, before, before.view("int32"))
        assert (found.compared_elements, found.changed_elements) == (before.size, before.size)
        half = before.astype("float16")
        found = numbers_of(repo, before, half)
        delta = np.abs(half.astype("f8") - before.astype("f8"))
        assert found.compared_elements == before.size
        assert found.changed_elements == np.count_nonzero(delta)
        assert found.max_delta == delta.max()
        assert found.mean_delta == pytest.approx(delta.mean())


@pytest.mark.parametrize("count", [1, 2, 4000])
def test_real_and_complex_numbers_are_compared_by_value(repo: RepositoryHandle, count: int) -> None:
    real = numbers(count)
    turned = real + 1j * numbers(count, seed=1).astype("complex64")
    for a, b in ((real, turned), (turned, real)):
        found = numbers_of(repo, tensor(a), tensor(b))
        assert found.changed_elements == count
        assert found.max_delta == pytest.approx(np.abs(turned - real).max())
        assert found.delta_norm == pytest.approx(np.linalg.norm((turned - real).astype("complex128")))
        assert found.relative_norm == pytest.approx(found.delta_norm / np.linalg.norm(a.astype("complex128")))
        norms = np.linalg.norm(real.astype("float64")) * np.linalg.norm(turned.astype("complex128"))
        assert found.cosine == pytest.approx(float((real.astype("float64") ** 2).sum()) / norms)


def test_dtypes_without_numbers_have_changed_elements_only(repo: RepositoryHandle) -> None:
    before = np.arange(3000, dtype=np.uint8)
    after = before.copy()
    after[[1, 2999]] ^= 1
    found = numbers_of(repo, as_dtype(before, "float4_e2m1fn_x2"), as_dtype(after, "float4_e2m1fn_x2"))
    assert found == TensorNumbers(3000, 3000, 2)
    times = np.arange(400).astype("M8[s]")
    later = times.copy()
    later[7] += 1
    found = numbers_of(repo, as_dtype(times, "np:<M8[s]"), as_dtype(later, "np:<M8[s]"))
    assert (found.changed_elements, found.max_delta) == (1, None)


def test_tensors_of_other_shapes_have_no_numbers_and_empty_ones_have_zeros(repo: RepositoryHandle) -> None:
    (entry,) = compare(repo, numbers(10), numbers(11)).entries
    assert entry.numbers is None
    found = numbers_of(repo, np.zeros((0, 3), "float32"), np.zeros((0, 3), "int32"))
    assert (found.num_elements, found.changed_elements, found.changed_share) == (0, 0, 0.0)
    scalar = numbers_of(repo, np.array(2.0), np.array(3.0))
    assert (scalar.num_elements, scalar.max_delta, scalar.relative_norm) == (1, 1.0, 0.5)


def test_tied_tensors_have_the_same_numbers(repo: RepositoryHandle) -> None:
    a, b = (tensor(numbers(900, seed=seed), identity=("memory", seed)) for seed in (1, 2))
    old, new = commit(repo, {"x": a, "y": a}), commit(repo, {"x": b, "y": b})
    x, y = diff_commits(repo, old.id, new.id, DiffRequest(numbers=True)).entries
    assert x.numbers == y.numbers
    assert x.numbers is not None
    assert math.isfinite(x.numbers.mean_delta or math.nan)


def test_a_damaged_chunk_is_found_and_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "repo"
    repo = new_repository(path, encoding="raw")
    state = {"m": {"fine": numbers(900, seed=1), "hurt": numbers(2100, 1000, seed=2)}}
    commit(repo, state)
    after = {"m": {"fine": state["m"]["fine"] + 1, "hurt": state["m"]["hurt"] + 1}}
    commit(repo, after)
    for file in (path / "packs").glob("*/*.data"):
        data = bytearray(file.read_bytes())
        at = data.find(after["m"]["hurt"][1500].tobytes())
        if at >= 0:
            data[at + 17] ^= 4
            file.write_bytes(bytes(data))
    repo.close()
    repo = RepositoryHandle.open(path)
    assert len(diff_commits(repo, "main").entries) == 2
    with pytest.raises(CorruptionError, match="^m/hurt: "):
        diff_commits(repo, "main", None, DiffRequest(numbers=True))
    only_fine = diff_commits(repo, "main", None, DiffRequest("m/fine", numbers=True))
    assert [entry.key for entry in only_fine.entries] == ["m/fine"]
    repo.close()


def test_memory_does_not_grow_with_the_tensor(repo: RepositoryHandle) -> None:
    before, after = (np.full((12_000, 1000), at, "float32") for at in (1, 2))
    old, new = commit(repo, {"w": before}), commit(repo, {"w": after})
    with limits(num_threads=1):
        diff_commits(repo, old.id, new.id, DiffRequest(numbers=True))
    tracemalloc.start()
    with limits(num_threads=1):
        found = diff_commits(repo, old.id, new.id, DiffRequest(numbers=True))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.sums.changed_bytes == before.nbytes
    assert peak < 30_000_000 < before.nbytes  # two cells of 4 MiB, each as it is read and as it is handed on
