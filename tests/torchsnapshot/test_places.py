"""From paths to repositories and tags, and the file that says so."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cas_ckpt import InvalidInputError, Repository
from cas_ckpt.torchsnapshot import Snapshot, StateDict
from cas_ckpt.torchsnapshot.failures import NotInSnapshotError
from cas_ckpt.torchsnapshot.places import FILE_NAME, place_of, tag_of

STATE = {"state": StateDict(step=1)}


def test_snapshots_beside_one_another_share_a_repository(tmp_path: Path) -> None:
    for name in ("step-1", "step-2"):
        Snapshot.take(str(tmp_path / "runs" / name), STATE)
    assert sorted(os.listdir(tmp_path / "runs")) == [".cas_ckpt", "step-1", "step-2"]
    assert os.listdir(tmp_path / "runs" / "step-1") == [FILE_NAME]
    with Repository.open(tmp_path / "runs" / ".cas_ckpt") as repo:
        assert sorted(repo.tags()) == ["step-1", "step-2"]
        assert repo.load("step-2") == {"state": {"step": 1}}


def test_a_repository_further_up_is_shared_by_folders(tmp_path: Path) -> None:
    Repository.init(tmp_path / ".cas_ckpt").close()
    Snapshot.take(f"fs://{tmp_path}/epoch-1/snapshot", STATE)
    Snapshot.take(f"{tmp_path}/epoch-2/snapshot", STATE)
    with Repository.open(tmp_path / ".cas_ckpt") as repo:
        assert sorted(repo.tags()) == ["epoch-1/snapshot", "epoch-2/snapshot"]


def test_in_everybodys_folder_the_repository_is_inside_of_the_snapshot(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    Snapshot.take(str(shared / "one"), STATE)
    assert sorted(os.listdir(shared / "one")) == [".cas_ckpt", FILE_NAME] and os.listdir(shared) == ["one"]
    (shared / ".cas_ckpt").mkdir()  # somebody else's
    Snapshot.take(str(shared / "mine" / "two"), STATE)
    assert (shared / "mine" / ".cas_ckpt").is_dir() and os.listdir(shared / ".cas_ckpt") == []
    Snapshot.take(str(shared / "one" / "one"), {"state": StateDict(step=2)})
    assert [Snapshot(f"{shared}/one{name}").read_object("0/state/step") for name in ("", "/one")] == [1, 2]
    with Repository.open(shared / "one" / ".cas_ckpt") as repo:
        assert len(repo.tags()) == 2


def test_the_repository_can_be_named(tmp_path: Path) -> None:
    options = {"repository": tmp_path / "all" / "ckpts", "timeout_s": 20.0}
    Snapshot.take(str(tmp_path / "runs" / "one"), STATE, storage_options=options)
    assert os.listdir(tmp_path / "runs") == ["one"]
    assert Snapshot(str(tmp_path / "runs" / "one")).read_object("0/state/step") == 1  # the file says where
    with pytest.raises(InvalidInputError, match="reposit"):
        Snapshot.take(str(tmp_path / "runs" / "two"), STATE, storage_options={"reposit": "x"})


def test_a_folder_that_is_moved_with_its_repository_or_renamed_is_still_a_snapshot(tmp_path: Path) -> None:
    Snapshot.take(str(tmp_path / "runs" / "one"), STATE)
    os.rename(tmp_path / "runs" / "one", tmp_path / "runs" / "best")
    os.rename(tmp_path / "runs", tmp_path / "moved")
    assert Snapshot(str(tmp_path / "moved" / "best")).read_object("0/state/step") == 1


@pytest.mark.parametrize("keep", [os.rename, shutil.copytree])
def test_a_folder_that_is_renamed_or_copied_stays_what_it_is_when_another_snapshot_is_taken_to_its_path(
    tmp_path: Path, keep: Callable[[Path, Path], object]
) -> None:
    newest, best = tmp_path / "runs" / "newest", tmp_path / "runs" / "best"

    def steps() -> list[int]:
        return [Snapshot(str(path)).read_object("0/state/step") for path in (best, newest)]

    Snapshot.take(str(newest), {"state": StateDict(step=1)})
    keep(newest, best)
    Snapshot.take(str(newest), {"state": StateDict(step=2)})
    assert steps() == [1, 2]
    Snapshot.take(str(best), {"state": StateDict(step=3)})
    assert steps() == [3, 2]
    with Repository.open(tmp_path / "runs" / ".cas_ckpt") as repo:
        assert sorted(repo.tags()) == ["best", "newest"]


def test_a_repository_that_was_deleted_meanwhile_is_made_anew(tmp_path: Path) -> None:
    for _ in range(2):
        Snapshot.take(str(tmp_path / "runs" / "one"), STATE)
        Snapshot(str(tmp_path / "runs" / "one")).restore({"state": StateDict()})
        shutil.rmtree(tmp_path / "runs")
    Snapshot.take(str(tmp_path / "runs" / "one"), STATE)
    shutil.rmtree(tmp_path / "runs")
    Repository.init(tmp_path / "runs" / ".cas_ckpt").close()  # as another process may
    Snapshot.take(str(tmp_path / "runs" / "two"), STATE)
    with Repository.open(tmp_path / "runs" / ".cas_ckpt") as repo:
        assert [*repo.tags()] == ["two"] and repo.fsck(read_data=True).ok
    with pytest.raises(NotInSnapshotError):
        Snapshot(str(tmp_path / "runs" / "one")).read_object("0/state/step")


def test_urls_go_to_a_repository_beside_the_snapshot() -> None:
    Snapshot.take("memory://torchsnapshot-place/step-1", STATE)
    assert Snapshot("memory://torchsnapshot-place/step-1").read_object("0/state/step") == 1
    place = place_of("s3://bucket/run/step-1?region=x", {"endpoint": "http://localhost:9", "cache": None})
    assert place.repository == "s3://bucket/run/.cas_ckpt?region=x&endpoint=http%3A%2F%2Flocalhost%3A9"
    assert (place.tag, place.file, place.options) == ("step-1", None, {"cache": None})
    assert place_of("gs://bucket/one").repository == "gs://bucket/.cas_ckpt"
    with pytest.raises(InvalidInputError, match="a name behind the bucket"):
        place_of("s3://bucket")


def test_every_name_has_a_tag_of_its_own_that_a_repository_takes(tmp_path: Path) -> None:
    names = ["step-1", "a/b", "main", "HEAD", "refs/heads/x", "run-1", "with space", "with_space", "ümlaut", ".hidden"]
    names += ["a..b", "a.", "x.lock", "x.ref", "-x", "f" * 64, "e" * 300, "e" * 301, "odd/x", "feed", "deadbeef1"]
    assert len({tag_of(name) for name in names}) == len(names)
    assert [tag_of(name) for name in names[:2]] == names[:2]
    for name in names:
        if name != "e" * 300 and name != "e" * 301 and name != "run-1":
            Snapshot.take(str(tmp_path / name), {"state": StateDict(name=name)})
    for name in ("main", "HEAD", "with space", "with_space", "ümlaut", "f" * 64, "deadbeef1", "a..b"):
        assert Snapshot(str(tmp_path / name)).read_object("0/state/name") == name


def test_a_snapshot_of_torchsnapshot_is_neither_read_nor_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    theirs = json.dumps({"version": "0.1.0", "world_size": 1, "manifest": {}})
    (folder / FILE_NAME).write_text(theirs)
    for verb in (lambda: Snapshot(str(folder)).get_manifest(), lambda: Snapshot.take(str(folder), STATE)):
        with pytest.raises(NotInSnapshotError, match="import_snapshot"):
            verb()
    assert (folder / FILE_NAME).read_text() == theirs
