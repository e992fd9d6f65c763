"""From a URL to a store, from an errno to an error, and the verdict on conditional writes."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cas_ckpt.errors import (
    ConflictError,
    InvalidInputError,
    NotFoundError,
    OutOfSpaceError,
    PermissionDeniedError,
    StorageError,
)
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.probe import probe_conditions
from cas_ckpt.storage.store import reading, translated, writing
from cas_ckpt.storage.url import open_store


def test_a_path_and_its_file_url_are_the_same_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a folder % ä?"
    by_path = open_store(str(folder))
    by_path.put("a", b"x")
    assert folder.is_dir()
    assert open_store(by_path.url).get("a") == b"x"
    assert open_store(folder).get("a") == b"x"


def test_opening_makes_nothing(tmp_path: Path) -> None:
    assert isinstance(open_store(str(tmp_path / "x")), FileStore)
    assert list(tmp_path.iterdir()) == []


def test_a_memory_name_is_one_store_and_no_name_is_a_new_one() -> None:
    open_store("memory://test-url/a").put("a", b"x")
    assert open_store("memory://test-url/a").get("a") == b"x"
    assert open_store(open_store("memory://test-url/a").url).get("a") == b"x"
    assert list(open_store("memory://test-url/b").list("")) == []
    open_store("memory://").put("a", b"x")
    assert list(open_store("memory://").list("")) == []


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://host/x", "no store for 'ftp'"),
        ("file://host/x", "file:///absolute"),
        ("file:///x?y", "file:///absolute"),
        ("file:///a%00b", "NUL"),
        ("file://[", "cannot be read"),
        ("://x", "no store for ''"),
        ("", "path or a URL"),
        ("a\0b", "path or a URL"),
    ],
)
def test_a_url_without_a_store_says_what_would_do(url: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        open_store(url)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EACCES, PermissionDeniedError),
        (errno.EPERM, PermissionDeniedError),
        (errno.EROFS, PermissionDeniedError),
        (errno.ENOSPC, OutOfSpaceError),
        (errno.EDQUOT, OutOfSpaceError),
        (errno.EIO, StorageError),
        (errno.EMFILE, StorageError),
    ],
)
def test_an_error_of_the_system_is_told_by_kind_with_the_key(code: int, kind: type[StorageError]) -> None:
    error = translated(OSError(code, "why"), "writing", "refs/main")
    assert type(error) is kind
    assert "refs/main" in str(error)
    assert "why" in str(error)


def test_the_cause_is_chained_and_a_missing_file_is_a_missing_key() -> None:
    with pytest.raises(NotFoundError, match="refs/main") as found, reading("refs/main"):
        raise FileNotFoundError(errno.ENOENT, "gone")
    assert isinstance(found.value.__cause__, FileNotFoundError)
    with pytest.raises(StorageError, match="refs/main"), writing("refs/main"):
        raise FileNotFoundError(errno.ENOENT, "the folder went away while it was written to")


class CreatesTwice(MemoryStore):
    def put_if_absent(self, key: str, data: object) -> None:
        self.put(key, data)  # type: ignore[arg-type]


class SwapsBlindly(MemoryStore):
    def compare_and_swap(self, key: str, expected: bytes, data: object) -> None:
        self.put(key, data)  # type: ignore[arg-type]


class SwapsNever(MemoryStore):
    def compare_and_swap(self, key: str, expected: bytes, data: object) -> None:
        raise ConflictError("always")


class HasNoConditions(MemoryStore):
    def put_if_absent(self, key: str, data: object) -> None:
        raise StorageError("not implemented")

    def compare_and_swap(self, key: str, expected: bytes, data: object) -> None:
        raise StorageError("not implemented")


@pytest.mark.parametrize(
    ("kind", "exclusive_create", "checked_swap"),
    [
        (MemoryStore, True, True),
        (CreatesTwice, False, True),
        (SwapsBlindly, True, False),
        (SwapsNever, True, False),
        (HasNoConditions, False, False),
    ],
)
def test_the_probe_finds_out_which_conditions_hold(
    kind: type[MemoryStore], exclusive_create: bool, checked_swap: bool
) -> None:
    store = kind()
    verdict = probe_conditions(store)
    assert (verdict.exclusive_create, verdict.checked_swap) == (exclusive_create, checked_swap)
    assert verdict.conditional == (exclusive_create and checked_swap)
    assert ("NOT" in verdict.detail) != verdict.conditional
    assert list(store.list("")) == [], "a probe leaves nothing behind"


def test_a_folder_keeps_conditions(tmp_path: Path) -> None:
    assert probe_conditions(FileStore(tmp_path)).conditional


@pytest.mark.parametrize("url", ["s3:/bucket/run", "gs:/bucket/run", "file:/data/run"])
def test_a_url_that_lacks_a_slash_is_not_taken_for_a_folder(url: str) -> None:
    """A run would go on for a month, onto the local disk."""
    with pytest.raises(InvalidInputError, match="a URL has '://'; write ./"):
        open_store(url)
    assert isinstance(open_store(f"./{url}"), FileStore)
