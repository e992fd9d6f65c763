"""Snapshots that were replaced or deleted give their space back, and nothing else goes."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.torchsnapshot import Snapshot, StateDict, close_repositories, delete_snapshot
from cas_ckpt.torchsnapshot.failures import NotInSnapshotError
from tests.processes import Forked

SIZE = 250_000


def state(number: int) -> dict[str, StateDict]:
    torch.manual_seed(number)
    return {"state": StateDict(t=torch.randn(SIZE), number=number)}


def stored(folder: Path, repository: str = ".cas_ckpt") -> int:
    """Snapshots that the repository has bytes for."""
    files = [path for path in (folder / repository / "packs").rglob("*") if path.is_file()]
    return round(sum(path.stat().st_size for path in files) / (4 * SIZE))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_taking_to_one_path_again_and_again_takes_the_space_of_two(tmp_path: Path, asynchronous: bool) -> None:
    taken = []
    for number in range(5):
        if asynchronous:
            taken.append(Snapshot.async_take(str(tmp_path / "latest"), state(number)).wait())
        else:
            taken.append(Snapshot.take(str(tmp_path / "latest"), state(number)))
        assert stored(tmp_path) <= 2
    for number in (3, 4):
        assert torch.equal(taken[number].read_object("0/state/t"), state(number)["state"]["t"])
    with pytest.raises(KeyError, match="was forgotten"):
        taken[0].read_object("0/state/t")


def test_snapshots_at_other_paths_and_what_people_name_stays(tmp_path: Path) -> None:
    Snapshot.take(str(tmp_path / "other"), state(7))
    for number in range(4):
        Snapshot.take(str(tmp_path / "latest"), state(number))
        if number == 0:
            with Repository.open(tmp_path / ".cas_ckpt") as repo:
                repo.pin("latest", name="kept")
                options = CommitOptions(create=True, orphan=True)
                mine = repo.commit(
                    {"t": state(8)["state"]["t"]}, message="snapshot latest", branch="run-mine", options=options
                )
                repo.commit({"t": torch.zeros(2)}, branch="run-mine")
    assert stored(tmp_path) == 5  # other, the pinned one, what a user committed, the replaced one, latest
    assert Snapshot(str(tmp_path / "other")).read_object("0/state/number") == 7
    with Repository.open(tmp_path / ".cas_ckpt") as repo:
        assert not repo.log(mine)[0].forgotten
        assert repo.load("refs/pins/kept")["state"]["number"] == 0 and repo.fsck(read_data=True).ok


def replaced(path: str) -> None:
    """What another process does that goes on from a snapshot, and takes to its path."""
    Snapshot(path).restore({})
    for number in range(3):
        Snapshot.take(path, state(number))


def test_snapshots_are_taken_after_that_which_was_restored_is_gone(tmp_path: Path) -> None:
    path = str(tmp_path / "latest")
    Snapshot.take(path, state(7))
    own = state(0)
    Snapshot(path).restore(own)
    with Forked(replaced, path) as process:
        process.wait(60)
    assert process.returncode == 0
    for number in range(2):
        own = state(10 + number)
        Snapshot.take(str(tmp_path / f"own-{number}"), own)
        assert Snapshot(str(tmp_path / f"own-{number}")).read_object("0/state/number") == 10 + number
    close_repositories()


@pytest.mark.parametrize("repository", [None, "beside"])
def test_a_folder_that_was_renamed_keeps_its_snapshot(tmp_path: Path, repository: str | None) -> None:
    options = None if repository is None else {"repository": str(tmp_path / repository)}
    Snapshot.take(str(tmp_path / "latest"), state(0), storage_options=options)
    Snapshot.take(str(tmp_path / "latest"), state(1), storage_options=options)
    (tmp_path / "latest").rename(tmp_path / "kept")
    for number in range(2, 6):
        Snapshot.take(str(tmp_path / "latest"), state(number), storage_options=options)
    assert stored(tmp_path, repository or ".cas_ckpt") == 3
    kept = Snapshot(str(tmp_path / "kept"), storage_options=options).read_object("0/state/t")
    assert torch.equal(kept, state(1)["state"]["t"])
    close_repositories()
    delete_snapshot(str(tmp_path / "kept"), options)
    assert stored(tmp_path, repository or ".cas_ckpt") == 2 and not (tmp_path / "kept").exists()
    assert Snapshot(str(tmp_path / "latest"), storage_options=options).read_object("0/state/number") == 5


def test_a_deleted_snapshot_gives_its_space_back(tmp_path: Path) -> None:
    for number in range(3):
        Snapshot.take(str(tmp_path / f"step-{number}"), state(number))
    (tmp_path / "step-1" / "mine.txt").touch()
    close_repositories()
    for number in range(2):
        delete_snapshot(str(tmp_path / f"step-{number}"))
        assert stored(tmp_path) == 2 - number
    assert sorted(os.listdir(tmp_path)) == [".cas_ckpt", "step-1", "step-2"]
    assert os.listdir(tmp_path / "step-1") == ["mine.txt"]
    with pytest.raises(NotInSnapshotError, match="to be deleted"):
        delete_snapshot(str(tmp_path / "step-0"))
    assert Snapshot(str(tmp_path / "step-2")).read_object("0/state/number") == 2


def test_a_collection_that_fails_is_told_and_fails_no_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "cas_ckpt")
    for number in range(2):
        Snapshot.take(str(tmp_path / "latest"), state(number))
    damaged = tmp_path / ".cas_ckpt" / "refs" / "pins" / "x.ref"
    damaged.parent.mkdir(parents=True, exist_ok=True)
    damaged.write_bytes(b"damaged")
    Snapshot.take(str(tmp_path / "latest"), state(2))
    assert [record.getMessage() for record in caplog.records if "was not given back" in record.getMessage()]
    damaged.unlink()
    assert Snapshot(str(tmp_path / "latest")).read_object("0/state/number") == 2
    Snapshot.take(str(tmp_path / "latest"), state(3))
    assert stored(tmp_path) <= 2
