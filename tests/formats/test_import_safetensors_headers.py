"""Headers that lie are refused, and nothing else: the safetensors library is the judge of the rest."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.formats.folders import InputFile
from cas_ckpt.formats.safetensors import DTYPES, MAX_HEADER_BYTES, encode_header, ranked, read_header
from tests.builders import numbers, stored_arrays
from tests.formats.import_files import assert_refused, claim, raw_file, try_import

GOOD = claim("F32", [2], 0, 8)


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> RepositoryHandle:
    return init_repository(tmp_path_factory.mktemp("headers") / "repo")


BAD_HEADERS: dict[str, Any] = {
    "no JSON": "{oops}",
    "no object": "[1]",
    "nested": '{"a":' * 100_000,
    "nested lists": '{"a":' + "[" * 100_000,
    "not UTF-8": b'{"\xff\xfe": 1}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "space before": ' {"a":' + json.dumps(GOOD) + "}",
    "two objects": "{}{}",
    "a name twice": '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":' + json.dumps(GOOD) + "}",
    "a field twice": '{"a":{"dtype":"U8","dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
    "NaN": '{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,8]}}',
    "many digits": '{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,' + "9" * 5000 + "]}}",
    "overlap": {"a": claim("F32", [2], 0, 8), "b": claim("F32", [1], 4, 8)},
    "same range twice": {"a": GOOD, "b": GOOD},
    "gap": {"a": claim("U8", [2], 0, 2), "b": claim("U8", [4], 4, 8)},
    "gap at the start": {"a": claim("U8", [6], 2, 8)},
    "data left over": {"a": claim("U8", [4], 0, 4)},
    "data missing": {"a": claim("F32", [4], 0, 16)},
    "backwards": {"a": claim("F32", [2], 8, 0)},
    "negative offset": {"a": claim("U8", [16], -8, 8)},
    "size of another shape": {"a": claim("F32", [3], 0, 8)},
    "unknown dtype": {"a": claim("F33", [2], 0, 8)},
    "dtype no text": {"a": {**GOOD, "dtype": ["F32"]}},
    "six-bit dtype": {"a": claim("F6_E2M3", [8], 0, 6), "b": claim("U8", [2], 6, 8)},
    "odd half bytes": {"a": claim("F4", [15], 0, 8)},
    "negative shape": {"a": claim("F32", [-2, -1], 0, 8)},
    "shape of fractions": {"a": claim("F32", [2.0], 0, 8)},
    "shape of truths": {"a": claim("F64", [True], 0, 8)},
    "shape of texts": {"a": claim("F32", ["2"], 0, 8)},
    "shape no list": {"a": {**GOOD, "shape": 2}},
    "shape overflows to its size": {"a": claim("F32", [2**32, 2**32 + 2], 0, 8)},
    "huge shape behind a zero": {"a": claim("U8", [8], 0, 8), "b": claim("U8", [2**62, 2**62, 0], 8, 8)},
    "sixty-five dimensions": {"a": claim("F32", [1] * 64 + [2], 0, 8)},
    "three offsets": {"a": {**GOOD, "data_offsets": [0, 4, 8]}},
    "no offsets": {"a": {"dtype": "F32", "shape": [2]}},
    "a field too many": {"a": {**GOOD, "more": 1}},
    "claim no object": {"a": 7},
    "metadata no object": {"__metadata__": [], "a": GOOD},
    "metadata no text": {"__metadata__": {"x": 1}, "a": GOOD},
    "metadata half a character": '{"__metadata__":{"x":"\\ud800"},"a":' + json.dumps(GOOD) + "}",
    "name half a character": '{"\\ud800":' + json.dumps(GOOD) + "}",
    "name with NUL": {"a\0b": GOOD},
    "endless name": {"a" * 5000: GOOD},
}


@pytest.mark.parametrize("what", BAD_HEADERS)
def test_a_header_with_false_claims_is_refused(repo: RepositoryHandle, tmp_path: Path, what: str) -> None:
    assert_refused(
        repo, raw_file(tmp_path / "m.safetensors", BAD_HEADERS[what], b"12345678"), "not a valid safetensors"
    )


@pytest.mark.parametrize("length", [0, 1, 7, 2**20, MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_a_header_length_that_is_not_there_is_refused(repo: RepositoryHandle, tmp_path: Path, length: int) -> None:
    assert_refused(repo, raw_file(tmp_path / "m.safetensors", {"a": GOOD}, b"12345678", length=length))


def test_a_header_longer_than_the_format_allows_is_refused_unread(repo: RepositoryHandle, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1))
    with path.open("r+b") as file:
        file.truncate(2 * MAX_HEADER_BYTES)  # a hole: no such space is needed
    assert_refused(repo, path, "at most")


def test_a_file_cut_anywhere_is_refused(repo: RepositoryHandle, tmp_path: Path) -> None:
    whole = save({"a": numbers(3), "b": numbers(2)})
    for length in range(len(whole)):
        (tmp_path / "m.safetensors").write_bytes(whole[:length])
        assert_refused(repo, tmp_path / "m.safetensors")
    (tmp_path / "m.safetensors").write_bytes(whole + b"x")
    assert_refused(repo, tmp_path / "m.safetensors")


names = st.sampled_from(["a", "b", "__metadata__", "model/x", "", "0", "é"])
numbers_in_headers = st.sampled_from([0, 1, 2, 4, 8, 12, 16, -1, 2**40, 2**63, 2**64, 1.5, None, True, "8"])
claims = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPES, "F33", 3, None]),
        "shape": st.lists(numbers_in_headers, max_size=3) | st.sampled_from([None, 4, "[]"]),
        "data_offsets": st.lists(numbers_in_headers, max_size=3) | st.just([0, 8]) | st.just([8, 16]),
        "x": st.just(1),
    },
)
headers = st.dictionaries(names, claims | st.dictionaries(names, st.text(max_size=3)) | st.integers(), max_size=3)


def judge(data: bytes) -> dict[str, tuple[list[int], bytes]] | None:
    """What the library finds in a file, or None if it refuses it."""
    try:
        return {name: (found["shape"], bytes(found["data"])) for name, found in deserialize(data)}
    except (SafetensorError, ValueError):
        return None


def check_like_the_library(data: bytes) -> None:
    """We refuse with one typed error, or import what the library finds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"
        path.write_bytes(data)
        repo = init_repository("memory://")
        found = try_import(repo, path)
        if isinstance(found, str):
            assert "m.safetensors" in found
            return
        wanted = judge(data)
        assert wanted is not None
        back = stored_arrays(repo, found.root)
        assert len(wanted) == len(back)
        assert sorted(content for _, content in wanted.values()) == sorted(array.tobytes() for array in back.values())


@given(headers, st.sampled_from([0, 8, 16]))
def test_any_header_is_refused_or_understood_as_the_library_does(header: dict[str, Any], num_bytes: int) -> None:
    text = json.dumps(header).encode()
    check_like_the_library(struct.pack("<Q", len(text)) + text + bytes(range(num_bytes)))


SEED = save({"w": numbers(2, 3), "b": numbers(2), "e": numbers(0)}, metadata={"format": "pt"})


@given(st.integers(0, len(SEED) - 1), st.binary(min_size=1, max_size=4), st.booleans())
def test_any_bytes_in_a_good_file_are_refused_or_understood(at: int, patch: bytes, insert: bool) -> None:
    check_like_the_library(SEED[:at] + patch + SEED[at if insert else at + len(patch) :])


@given(st.binary(max_size=60))
def test_any_bytes_at_all_are_refused_or_understood(data: bytes) -> None:
    check_like_the_library(data)


def test_good_headers_are_accepted_so_that_the_fuzzing_means_something() -> None:
    check_like_the_library(SEED)
    assert judge(SEED) is not None


def test_a_header_that_we_write_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(SEED)
    header = read_header(InputFile(path))
    order = ranked([(slot.name, slot.spec) for slot in header.tensors])
    assert SEED.startswith(encode_header(order, header.metadata or {}))
