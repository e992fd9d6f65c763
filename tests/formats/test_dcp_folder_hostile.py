"""A folder of a stranger is refused with one typed error: nothing in it runs, nothing is committed."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import InvalidInputError, UnsupportedValueError
from cas_ckpt.formats import pickles
from cas_ckpt.formats.dcp_import import _described
from cas_ckpt.formats.dcp_metadata import ALLOWED_NAMES
from cas_ckpt.formats.pickles import read_pickle
from cas_ckpt.formats.verbs import import_any
from cas_ckpt.objects.spec import Box
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.storage.stored_zip import Member
from tests.formats.dcp_folders import change_metadata, move_item, read_metadata, save_boxes, save_folder
from tests.formats.import_files import assert_refused, import_file, try_import
from tests.searches import tries

RAN = Path("/tmp/cas-ckpt-test-this-must-never-exist")


class Code:
    """A pickle of this runs a command when it is loaded."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {RAN}",)


@pytest.fixture
def repo() -> RepositoryHandle:
    return init_repository("memory://")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tensors, one of them in two chunks, and a value."""
    tensors = {"w": torch.randn(60, 40), "v": torch.randn(50)}
    halves = [("w", Box((0, 0), (30, 40))), ("w", Box((30, 0), (30, 40)))]
    return save_boxes(tmp_path / "checkpoint", tensors, [[halves[0], ("v", Box((0,), (50,)))], [halves[1]]])


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_link_that_leads_out_of_the_folder_is_refused(repo: RepositoryHandle, folder: Path, name: str) -> None:
    elsewhere = folder.parent / "elsewhere"
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    assert_refused(repo, folder, "symbolic link to .*elsewhere, outside the folder: copy .*follow_links=True")
    import_any(repo, folder, CommitRequest(), follow_links=True)
    elsewhere.rename(folder / "kept")
    (folder / name).unlink()
    (folder / name).symlink_to("kept")
    import_file(repo, folder)
    (folder.parent / "link").symlink_to(folder)
    import_file(repo, folder.parent / "link")


# --- what the metadata says -----------------------------------------------------------------


def chunks_of(metadata: Metadata, key: str = "w") -> list[ChunkStorageMetadata]:
    return metadata.state_dict_metadata[key].chunks  # type: ignore[union-attr]


def set_chunk(number: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Callable[[Metadata], object]:
    def change(metadata: Metadata) -> None:
        old = chunks_of(metadata)[number]
        for index in [index for index in metadata.storage_data if index.fqn == "w" and index.offset == old.offsets]:
            moved = dataclasses.replace(index, offset=offsets)
            metadata.storage_data[moved] = metadata.storage_data.pop(index)
        chunks_of(metadata)[number] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    return change


def set_size(size: tuple[int, ...]) -> Callable[[Metadata], object]:
    return lambda metadata: setattr(metadata.state_dict_metadata["w"], "size", torch.Size(size))


def huge(metadata: Metadata) -> None:
    size = (1 << 40, 1 << 20)
    set_size(size)(metadata)
    del chunks_of(metadata)[1]
    set_chunk(0, (0, 0), size)(metadata)


def path_of(path: Any) -> Callable[[Metadata], object]:
    return lambda metadata: metadata.planner_data.update(w=path)


def place(**fields: Any) -> Callable[[Metadata], object]:
    return lambda metadata: move_item(metadata, "v", **fields)


LIES: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "a hole": (lambda m: chunks_of(m).pop(0), r"w: no saved chunk holds \[0:30, 0:40\]"),
    "an overlap": (set_chunk(1, (29, 0), (30, 40)), r"w: two saved chunks hold \[29:30, 0:40\]"),
    "a chunk outside": (set_chunk(1, (31, 0), (30, 40)), "w: a chunk at .31, 0. .* is not inside"),
    "a chunk of other rank": (set_chunk(1, (30,), (30,)), "w: a chunk at .30. .* is not inside"),
    "a larger shape": (set_size((61, 40)), r"w: no saved chunk holds \[60:61, 0:40\]"),
    "a huge shape": (huge, "w: the chunk at .0, 0. has 4611686018427387904 bytes, but only"),
    "a long chunk": (lambda m: [set_size((10**6, 40))(m), set_chunk(1, (30, 0), (10**6 - 30, 40))(m)], "w: .* only"),
    "a negative size": (lambda m: setattr(m.state_dict_metadata["w"], "size", (-60, 40)), "wanted a size"),
    "a huge number": (set_size((1 << 62, 1 << 62)), "w: .* no memory"),
    "huge numbers without elements": (
        lambda m: [set_size((0, 1 << 62))(m), set_chunk(0, (0, 0), (0, 1 << 62))(m), chunks_of(m).pop()],
        "w: .* no memory",
    ),
    "many dimensions": (set_size((1,) * 100), "100 dimensions"),
    "no dtype": (lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", None), "w: a tensor without dtype"),
    "sparse": (lambda m: setattr(m.state_dict_metadata["w"].properties, "layout", torch.sparse_coo), "w: a sparse"),
    "no place": (lambda m: m.storage_data.clear(), "in no file"),
    "no storage": (lambda m: setattr(m, "storage_data", None), "storage_data is not a dict"),
    "no entries": (lambda m: setattr(m, "state_dict_metadata", [1]), "state_dict_metadata is not a dict"),
    "another folder": (place(relative_path="../checkpoint/__0_0.distcp"), "v: is said to be in '../"),
    "an absolute path": (place(relative_path="/etc/passwd"), "v: is said to be in '/etc"),
    "a way out": (place(relative_path="a/../../b"), "v: is said to be in"),
    "no name": (place(relative_path=b"x"), "v: is said to be in something without"),
    "no such file": (place(relative_path="__9_9.distcp"), "__9_9.distcp: no file can be opened"),
    "the metadata as data": (place(relative_path=".metadata", offset=0, length=500), "v in .metadata"),
    "behind the end": (place(offset=1 << 40), "__0_0.distcp: an item ends at byte"),
    "longer than the file": (place(length=1 << 40), "an item ends at byte"),
    "a negative offset": (place(offset=-1), "wanted a size"),
    "shared bytes": (place(offset=100), "two items are said to share bytes"),
    "a cut item": (place(length=700), "v in __0_0.distcp"),
    "an unknown transform": (place(transform_descriptors=["stream.rot13/1"]), "v in .*rot13"),
    "a transform that is not there": (place(transform_descriptors=["stream.zstd/1"]), "v in .*no zstd stream"),
    "a path in the way": (path_of(("v", "x")), "v(/x)?: another key has the same path"),
    "one path": (path_of(("v",)), "two keys have one path"),
    "a long list": (path_of(("l", 10**12)), "l: a list of 1000000000001"),
    "a negative place": (path_of(("l", -1)), "l: a list of"),
    "a number at the top": (path_of((0,)), "the first name of a path is a number"),
    "a deep path": (path_of(tuple("x" * 5000)), "deeper than 100"),
    "no path": (path_of(()), "not a row of names"),
    "an odd path": (path_of((1.5,)), "not a row of names"),
    "a bad name": (path_of(("a\0b",)), "name"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_metadata_that_cannot_be_true_is_refused(repo: RepositoryHandle, folder: Path, name: str) -> None:
    change, reason = LIES[name]
    assert_refused(repo, change_metadata(folder, change), reason)


def test_a_save_that_did_not_finish_is_refused(repo: RepositoryHandle, folder: Path) -> None:
    (folder / ".metadata").unlink()
    assert_refused(repo, folder, "no .metadata: the save did not finish")


@pytest.mark.parametrize("make", [lambda path: os.mkfifo(path), lambda path: path.mkdir()], ids=["FIFO", "folder"])
def test_data_files_are_plain_files(repo: RepositoryHandle, folder: Path, make: Callable[[Path], None]) -> None:
    (folder / "__1_0.distcp").unlink()
    make(folder / "__1_0.distcp")
    assert_refused(repo, folder, "wanted a plain file|folder")


# --- what the pickle of the metadata is -----------------------------------------------------


@pytest.mark.parametrize("where", ["top", "planner_data", "storage_meta", "key"])
def test_code_in_the_metadata_is_named_and_never_run(repo: RepositoryHandle, folder: Path, where: str) -> None:
    metadata: Any = read_metadata(folder)
    if where == "top":
        metadata = Code()
    elif where == "key":
        metadata.storage_data[Code()] = 1
    else:
        setattr(metadata, where, Code())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_refused(repo, folder, "wants to run 'posix.system'")
    assert not RAN.exists()


ODD_PICKLES: dict[str, bytes] = {
    "empty": b"",
    "no pickle": b"hello",
    "old protocol": pickle.dumps({"a": 1}, protocol=0),
    "only a dict": pickle.dumps({"a": 1}),
    "a memo of many gigabytes": b"\x80\x02Nr\xff\xff\xff\xff.",
    "text longer than the file": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
    "an endless number": b"\x80\x04\x8b" + struct.pack("<i", 1 << 30) + b"1.",
    "a class that is changed": b"\x80\x02ctorch\nSize\n}X\x01\x00\x00\x00xK\x01sb.",
    "a call of a call": b"\x80\x02ctorch\nSize\n)R)R.",
    "deep": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a deep key": b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"Ns.",
    "a deep key of an OrderedDict": b"\x80\x02ccollections\nOrderedDict\n](" + b")" + b"\x85" * 100_000 + b"NtaR.",
    "an empty stack": b"\x80\x02.",
    "no mark": b"\x80\x02t.",
}


@pytest.mark.parametrize("name", ODD_PICKLES)
def test_a_pickle_that_is_no_metadata_is_refused(repo: RepositoryHandle, folder: Path, name: str) -> None:
    (folder / ".metadata").write_bytes(ODD_PICKLES[name])
    assert_refused(repo, folder)


def test_what_is_read_is_data_alone() -> None:
    with pytest.raises(InvalidInputError, match="wants to run 'builtins.eval'"):
        read_pickle(b"\x80\x02cbuiltins\neval\n.", allowed=ALLOWED_NAMES, what="x")
    assert not any(name.startswith(("builtins", "os", "posix", "sys")) for name in ALLOWED_NAMES)


@given(st.data())
@settings(max_examples=tries(45, 150), deadline=None)
def test_damage_anywhere_gives_one_kind_of_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    repo = init_repository("memory://")
    folder = save_folder(tmp_path_factory.mktemp("d") / "c", {"a": {"w": torch.ones(40)}, "n": [1, (torch.ones(2),)]})
    name = data.draw(st.sampled_from([".metadata", "__0_0.distcp"]))
    content = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):  # the length differs by a few bytes from run to run
        content[data.draw(st.integers(0, 10_000)) % len(content)] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, 10_000)) % len(content) :]
    (folder / name).write_bytes(content)
    try_import(repo, folder)


# --- what the data files hold ---------------------------------------------------------------


def replace_item(folder: Path, key: str, data: bytes) -> Path:
    """Put other bytes where an item is, in a file of their own."""
    (folder / "other.distcp").write_bytes(data)
    fields = {"relative_path": "other.distcp", "offset": 0, "length": len(data)}
    return change_metadata(folder, lambda metadata: move_item(metadata, key, **fields))


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def deflated(data: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return stream.getvalue()


def without_storage(data: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name)[: 8 if "/data/" in name else None])
    return stream.getvalue() + b"\0" * 400


ITEMS: dict[str, tuple[bytes, str]] = {
    "code": (saved(Code()), "v in other.distcp: .*posix.system"),
    "another shape": (saved(torch.ones(10, 5)), r"holds float32\[10, 5\], the metadata says float32\[50\]"),
    "another dtype": (saved(torch.ones(50, dtype=torch.int32)), r"holds int32\[50\]"),
    "no tensor": (saved([1] * 100), "a list where a tensor should be"),
    "a sparse tensor": (saved(torch.ones(50).to_sparse()), "sparse"),
    "compressed": (deflated(saved(torch.zeros(50))), "is compressed"),
    "a short storage": (without_storage(saved(torch.ones(50))), "too short|zip"),
    "nothing": (b"\0" * 1000, "v in other.distcp"),
    "text": (b"hello" * 1000, "v in other.distcp"),
    "an expanded tensor": (saved(torch.ones(1).expand(10**12)) + b"\0" * 100, "v in other.distcp"),
}


@pytest.mark.parametrize("name", ITEMS)
def test_an_item_that_is_not_what_the_metadata_says_is_refused(repo: RepositoryHandle, folder: Path, name: str) -> None:
    data, reason = ITEMS[name]
    assert_refused(repo, replace_item(folder, "v", data), reason)
    assert not RAN.exists()


@pytest.mark.parametrize("value", [Code(), io.BytesIO(b"x")], ids=["code", "a class"])
def test_an_object_that_needs_code_is_unsupported_and_named(repo: RepositoryHandle, tmp_path: Path, value: Any) -> None:
    folder = save_folder(tmp_path / "checkpoint", {"a": {"state": value}, "w": torch.ones(3)})
    with pytest.raises(UnsupportedValueError, match=r"a\.state in __0_0\.distcp"):
        import_file(repo, folder)
    assert not RAN.exists()


def test_a_bomb_in_an_object_is_refused(repo: RepositoryHandle, tmp_path: Path) -> None:
    value: Any = [torch.ones(1).expand(1000, 1000)] * 50
    for _ in range(10):
        value = [value] * 50
    folder = save_folder(tmp_path / "checkpoint", {"a": 1})
    assert_refused(repo, replace_item(folder, "a", saved(value)), "a bomb")


def test_a_stream_that_grows_too_much_is_refused(repo: RepositoryHandle, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "checkpoint", {"v": torch.ones(50)}, _extensions=[ZStandard()])
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (64 << 20))
    assert_refused(repo, replace_item(folder, "v", bomb), "decompresses to more than")


def test_compressed_objects_have_one_budget(
    repo: RepositoryHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "FREE_BYTES", 5 << 20)
    monkeypatch.setattr(pickles, "MAX_GROWTH", 1)
    values = {name: [torch.zeros(1 << 21, dtype=torch.uint8), name] for name in "abc"}
    objects = {name: (value,) for name, value in values.items()}
    folder = save_folder(tmp_path / "checkpoint", {"x": objects}, _extensions=[ZStandard()])
    assert_refused(repo, folder, r"x\.c in .*decompresses to more than")


def test_a_long_pickle_of_a_chunk_is_not_read_to_find_where_its_tensor_is() -> None:
    def read(_at: int, _size: int) -> bytes:
        raise AssertionError("it is read")

    assert _described({"data.pkl": Member(0, 100 << 20, 0)}, read, "x") is None
