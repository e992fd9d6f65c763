"""Bundles: commits in one file, whole or refused."""

from __future__ import annotations

import os
import random
import resource
import tracemalloc
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import pytest

from cas_ckpt import Repository
from cas_ckpt.errors import CkptError, ConflictError, CorruptionError, InvalidInputError, NotFoundError, StorageError
from cas_ckpt.objects.digest import seal
from cas_ckpt.ops.sync.bundle import BundleStore, BundleWriter, read_bundle
from cas_ckpt.ops.sync.send import Moved
from cas_ckpt.storage.stored_zip import stored_members
from tests.builders import commit, numbers, weights
from tests.cli.running import call, ok
from tests.ops.sync.test_push_and_pull import require_same, require_sound


@pytest.fixture
def here(tmp_path: Path) -> Repository:
    repo = Repository.init(tmp_path / "here")
    for step in range(4):
        commit(repo._handle, {"w": weights(step), "big": numbers(900, 900), "step": step})
    repo.tag("v1", "main~1", message="as released")
    return repo


def test_a_bundle_carries_commits_into_a_new_repository(here: Repository, tmp_path: Path) -> None:
    made = here.create_bundle(tmp_path / "all.bundle", ["main", "v1"])
    assert (made.num_commits, made.prerequisites) == (4, ())
    assert made.refs == {"refs/heads/main": here.resolve("main"), "refs/tags/v1": here.resolve("v1")}
    assert made.num_bytes == (tmp_path / "all.bundle").stat().st_size
    assert read_bundle(tmp_path / "all.bundle") == made
    with Repository.init(tmp_path / "there") as there:
        assert there.verify_bundle(tmp_path / "all.bundle") == made
        assert there.unbundle(tmp_path / "all.bundle").num_commits == 4
        require_same(here._handle, there._handle, "main~3")
        require_same(here._handle, there._handle, "main")
        assert there.tag_messages() == {"v1": "as released"}
        assert there.unbundle(tmp_path / "all.bundle").num_commits == 0
    require_sound(str(tmp_path / "there"))
    assert not list(tmp_path.glob("*.tmp"))


def test_a_bundle_since_a_commit_carries_what_came_after_it(here: Repository, tmp_path: Path) -> None:
    whole = here.create_bundle(tmp_path / "first.bundle", "main~2:main")
    made = here.create_bundle(tmp_path / "second.bundle", "main", since=["main~2"])
    assert made.prerequisites == (here.resolve("main~2"),)
    assert (whole.num_commits, made.num_commits) == (2, 2)
    assert made.num_bytes < whole.num_bytes / 10
    with Repository.init(tmp_path / "there") as there:
        with pytest.raises(NotFoundError, match="the bundle before it"):
            there.unbundle(tmp_path / "second.bundle")
        there.unbundle(tmp_path / "first.bundle")
        there.verify_bundle(tmp_path / "second.bundle")
        there.unbundle(tmp_path / "second.bundle")
        require_same(here._handle, there._handle, "main")
        require_same(here._handle, there._handle, "main~1")
    require_sound(str(tmp_path / "there"))
    with pytest.raises(InvalidInputError, match="nothing to bundle"):
        here.create_bundle(tmp_path / "x", "main~1:x", since=["main"])


def test_a_bundle_becomes_branches_of_a_remote_or_is_refused_where_both_sides_went_on(
    here: Repository, tmp_path: Path
) -> None:
    here.create_bundle(tmp_path / "b", "main")
    with Repository.init(tmp_path / "there") as there:
        commit(there._handle, {"w": weights(9)})
        with pytest.raises(ConflictError):
            there.unbundle(tmp_path / "b")
        there.unbundle(tmp_path / "b", remote="usb")
        require_same(here._handle, there._handle, "main", "usb/main")


def test_a_pack_that_does_not_fit_lets_the_next_one_begin(tmp_path: Path) -> None:
    """A full disk: no file may be longer than nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(BundleWriter(tmp_path / "b")) as bundle:
        writer = bundle.open_writer("packs/aa/1.data")
        writer.write(b"x" * 100)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            for work in (writer.commit, lambda: bundle.open_writer("packs/aa/2.data")):
                with pytest.raises(StorageError, match="writing"):
                    work()
                assert not bundle.turn.locked()
            writer.abort()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        with pytest.raises(StorageError, match="not whole"):
            bundle.finish([])
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_is_not_replaced(here: Repository, tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"mine")
    with pytest.raises(ConflictError):
        here.create_bundle(tmp_path / "b")
    here.create_bundle(tmp_path / "b", force=True)
    assert read_bundle(tmp_path / "b").num_commits == 4


def test_forgotten_commits_travel_without_their_data(here: Repository, tmp_path: Path) -> None:
    here.forget(revisions=["main~2"], gc=True)
    here.create_bundle(tmp_path / "b", "main")
    with Repository.init(tmp_path / "there") as there:
        there.unbundle(tmp_path / "b")
        assert [info.forgotten for info in there.log()] == [False, False, True, False]
    require_sound(str(tmp_path / "there"))


def test_a_bundle_that_is_cut_or_changed_is_refused_and_leaves_nothing(here: Repository, tmp_path: Path) -> None:
    here.create_bundle(tmp_path / "b", "main")
    data = (tmp_path / "b").read_bytes()
    chance = random.Random(1)
    cuts = [data[:length] for length in (0, 5, 16, 40, len(data) // 2, len(data) - 1)]
    flips = []
    for _ in range(60):
        at = chance.randrange(len(data))
        flips.append(data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :])
    seen = 0
    there = Repository.init("memory://there")
    for odd in [*cuts, *flips]:
        (tmp_path / "odd").write_bytes(odd)
        try:
            there.verify_bundle(tmp_path / "odd")
        except CorruptionError:
            seen += 1
        try:
            there.unbundle(tmp_path / "odd")
        except CkptError:
            assert not there.branches()
        else:  # a byte that nobody reads, such as one of the headers in front of entries
            require_same(here._handle, there._handle, "main")
            there = Repository.init(f"memory://there-{seen}")
    assert seen >= len(cuts) + len(flips) - 3


def written(
    path: Path, values: Mapping[str, bytes] = MappingProxyType({}), *, prerequisites: object = (),
    change: Callable[[ZipInfo], object] = lambda info: None,
) -> Path:  # fmt: skip
    """A zip with these members beside those of a bundle; `change` is made to what its directory says of the last."""
    record = seal("bundle", 1, {"prerequisites": prerequisites}, key="bundle")
    with ZipFile(path, "w") as archive:
        for name, data in {"bundle": record, "a": b"abc", **values}.items():
            archive.writestr(ZipInfo(name), data)
        change(archive.filelist[-1])
    return path


ODD_ZIPS: dict[str, dict[str, Any]] = {
    "a way out": {"values": {"../../etc/passwd": b"x"}},
    "a root": {"values": {"/x": b"x"}},
    "a reserved name": {"values": {"tmp/a": b"x"}},
    "a folder": {"values": {"a/": b""}},
    "a name twice": {"change": lambda info: setattr(info, "filename", "bundle")},
    "shared bytes": {"change": lambda info: setattr(info, "header_offset", 0)},
    "bytes elsewhere": {"change": lambda info: setattr(info, "header_offset", 7)},
    "long": {"change": lambda info: [setattr(info, name, 1 << 40) for name in ("file_size", "compress_size")]},
    "compressed": {"change": lambda info: setattr(info, "compress_type", ZIP_DEFLATED)},
    "grows": {"change": lambda info: setattr(info, "file_size", 4)},
    "encrypted": {"change": lambda info: setattr(info, "flag_bits", 1)},
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_ZIPS)
def test_a_zip_whose_members_are_not_where_they_say_is_refused(tmp_path: Path, name: str) -> None:
    BundleStore(written(tmp_path / "good")).close()
    with pytest.raises(CorruptionError):
        BundleStore(written(tmp_path / "odd", **ODD_ZIPS[name]))


def test_a_zip_that_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "z", "w") as archive:
        archive.writestr("a", b"x")
    with pytest.raises(CorruptionError, match="not a bundle"):
        BundleStore(tmp_path / "z")


def test_a_directory_longer_than_any_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path / "b")
    end = path.read_bytes()[-22:]
    with path.open("r+b") as file:
        file.truncate(200 << 20)
        file.seek(-22, 2)
        file.write(end[:12] + (100 << 20).to_bytes(4, "little") + end[16:])
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError, match="a directory of 104857600 bytes"):
            BundleStore(path)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_a_bundle_unzips_to_the_folder_of_a_repository(here: Repository, tmp_path: Path) -> None:
    here.create_bundle(tmp_path / "b", "main")
    with ZipFile(tmp_path / "b") as archive:
        assert archive.testzip() is None
        archive.extractall(tmp_path / "there")
    with Repository.open(tmp_path / "there") as there:
        require_same(here._handle, there._handle, "main")


def test_bundles_on_the_command_line(here: Repository, tmp_path: Path) -> None:
    place, file = str(tmp_path / "here"), str(tmp_path / "b")
    assert ok("-C", place, "bundle", "create", file, "main", "v1").startswith(f"Wrote {file}: 4 commits, ")
    assert call("-C", place, "bundle", "create", file).code == 14
    listed = ok("bundle", "list", file, cwd=tmp_path).splitlines()
    assert [line.split()[1] for line in listed[:2]] == ["refs/heads/main", "refs/tags/v1"]
    Repository.init(tmp_path / "there").close()
    assert "is whole" in ok("-C", tmp_path / "there", "bundle", "verify", file)
    assert "4 commits" in ok("-C", tmp_path / "there", "bundle", "unbundle", file)
    assert ok("-C", tmp_path / "there", "resolve", "v1") == ok("-C", place, "resolve", "main~1")
    assert call("bundle", "list", tmp_path / "nothing").code == 15


@pytest.mark.parametrize("prerequisite", [1 << 40, "a" * 32, [0] * 32, b"short"], ids=["int", "text", "list", "short"])
def test_a_bundle_with_odd_prerequisites_is_refused_before_memory_is_taken(
    tmp_path: Path, prerequisite: object
) -> None:
    path = written(tmp_path / "b", prerequisites=[prerequisite])
    with pytest.raises(CorruptionError, match="odd form"):
        BundleStore(path)


def test_a_bundle_is_fetched_pulled_and_cloned_like_a_repository(here: Repository, tmp_path: Path) -> None:
    whole, second = tmp_path / "all.bundle", tmp_path / "second.bundle"
    here.create_bundle(whole, ["main", "v1"])
    with Repository.clone(whole, tmp_path / "clone") as clone:
        require_same(here._handle, clone._handle, "main")
        assert clone.tags() == here.tags()
        assert clone.remotes()[0].url == str(whole)
        assert clone.ls_remote() == {"refs/heads/main": here.resolve("main"), "refs/tags/v1": here.resolve("v1")}
        before = here.resolve("main")
        commit(here._handle, {"w": weights(9)})
        here.create_bundle(second, "main", since=[before])
        assert clone.pull(second).num_commits == 1
        require_same(here._handle, clone._handle, "main")
    require_sound(str(tmp_path / "clone"))
    with Repository.init(tmp_path / "third") as third:
        third.fetch(whole)
        assert third.resolve("FETCH_HEAD") == before
        with pytest.raises(InvalidInputError, match="is a file"):
            here.push(whole)
    with Repository.init(tmp_path / "fourth") as fourth, pytest.raises(NotFoundError, match="continues from commit"):
        fourth.fetch(second)
    with pytest.raises(NotFoundError, match="continues from commit"):
        Repository.clone(second, tmp_path / "fifth")
    assert not (tmp_path / "fifth").exists()


@pytest.mark.parametrize("rebase", [False, True])
def test_a_branch_behind_what_a_bundle_continues_from_goes_forward(
    here: Repository, tmp_path: Path, rebase: bool
) -> None:
    with Repository.clone(here.url, tmp_path / "clone") as clone:
        clone.branch("main", start="main~2", force=True)
        commit(here._handle, {"w": weights(9)})
        here.create_bundle(tmp_path / "last.bundle", "main", since=["main~1"])
        for dry_run in (True, False):
            report = clone.pull(tmp_path / "last.bundle", rebase=rebase, dry_run=dry_run)
            assert report.refs[-1].how is Moved.FORWARD
        require_same(here._handle, clone._handle, "main")


def test_a_damaged_bundle_is_refused_by_fetch_and_clone(here: Repository, tmp_path: Path) -> None:
    path = tmp_path / "all.bundle"
    here.create_bundle(path, "main")
    path.write_bytes(path.read_bytes()[:-1000])
    with Repository.init(tmp_path / "there") as there, pytest.raises(CorruptionError):
        there.fetch(path)
    with pytest.raises(CorruptionError):
        Repository.clone(path, tmp_path / "clone")


def test_a_medium_that_fails_while_a_bundle_is_read_is_an_error_of_storage(here: Repository, tmp_path: Path) -> None:
    here.create_bundle(tmp_path / "all.bundle")
    end, other = os.pipe()
    with closing(BundleStore(tmp_path / "all.bundle")) as store, open(end, "rb"), open(other, "wb"):
        os.dup2(end, store.fd)  # no read at an offset succeeds there
        with pytest.raises(StorageError, match="reading bundle://.*all.bundle"):
            store.get("config")


@pytest.mark.parametrize("kind", [CorruptionError, MemoryError])
def test_what_a_reader_of_a_zip_raises_is_not_said_to_be_the_zips_fault(kind: type[BaseException]) -> None:
    def read(offset: int, length: int) -> bytes:
        raise kind("the file ends")

    with pytest.raises(kind, match="the file ends"):
        stored_members(read, 1000)
