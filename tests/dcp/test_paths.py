"""Frameworks that know folders only save into a repository and load from it."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from cas_ckpt import Repository
from cas_ckpt.dcp import CheckpointPaths
from cas_ckpt.errors import InvalidInputError
from tests.dcp.states import alone, same


@pytest.fixture
def paths(tmp_path: Path) -> CheckpointPaths:
    Repository.init(tmp_path / "repo").close()
    return CheckpointPaths(tmp_path / "repo", root=tmp_path / "out", branch="run")


def test_checkpoint_ids_that_are_folders_become_tags(paths: CheckpointPaths, tmp_path: Path) -> None:
    """As torchtitan and Lightning call DCP: a folder, no writer."""
    with paths.installed(), alone():
        for step in (1, 2):
            dcp.save({"w": torch.full((600,), step)}, checkpoint_id=tmp_path / "out" / f"step={step}", no_dist=True)
        target = {"w": torch.zeros(600, dtype=torch.int64)}
        dcp.load(target, checkpoint_id=str(tmp_path / "out" / "step=1"), no_dist=True)
        with pytest.raises(CheckpointException, match="step-1' is a tag already"):
            dcp.save(target, checkpoint_id=tmp_path / "out" / "step=1", no_dist=True)
    assert same(target, {"w": torch.full((600,), 1)})
    assert not (tmp_path / "out").exists()
    with Repository.open(tmp_path / "repo") as repo:
        assert repo.resolve("step-2") == repo.resolve("run") and repo.resolve("run~1") == repo.resolve("step-1")


def test_file_system_writers_and_readers_are_ours(paths: CheckpointPaths, tmp_path: Path) -> None:
    """As Accelerate calls DCP: a FileSystemWriter of its own."""
    theirs = dcp.FileSystemWriter
    with paths.installed(), alone():
        inside, outside = tmp_path / "out" / "a" / "b", tmp_path / "elsewhere"
        for folder in (inside, outside):
            dcp.save({"w": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
            target = {"w": torch.zeros(3)}
            dcp.load(target, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
            assert target["w"].all()
        assert (outside / ".metadata").exists() and not inside.exists()
    assert dcp.FileSystemWriter is theirs
    with Repository.open(tmp_path / "repo") as repo:
        assert same(repo.load("a/b"), {"w": torch.ones(3)})


def test_a_writer_of_a_folder_pickles(paths: CheckpointPaths, tmp_path: Path) -> None:
    again = pickle.loads(pickle.dumps(paths.writer(tmp_path / "out" / "x")))
    again.reset(tmp_path / "out" / "y")
    assert again.checkpoint_id == "y"


def test_a_folder_elsewhere_has_no_tag(paths: CheckpointPaths, tmp_path: Path) -> None:
    for path in (tmp_path / "other", tmp_path / "out"):
        with pytest.raises(InvalidInputError, match="is not a folder below"):
            paths.tag(path)


def test_a_module_that_is_first_imported_meanwhile_has_the_classes_of_dcp_afterwards(
    paths: CheckpointPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_meanwhile.py").write_text(
        "from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter\n"
        "kept = [FileSystemWriter]\n"
        "class Mine(FileSystemWriter): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    theirs = dcp.FileSystemWriter, dcp.FileSystemReader
    with paths.installed():
        module = importlib.import_module("imported_meanwhile")
    monkeypatch.delitem(sys.modules, "imported_meanwhile")
    assert (module.FileSystemWriter, module.FileSystemReader) == theirs
    inside = tmp_path / "out" / "x"
    assert type(module.kept[0](inside)) is theirs[0] and issubclass(module.Mine, theirs[0])
    for name, make in (("one", *module.kept), ("two", module.Mine)):
        with alone():
            dcp.save({"w": torch.ones(3)}, storage_writer=make(inside / name), no_dist=True)
        assert (inside / name / ".metadata").exists()


def test_the_stand_in_is_a_class(paths: CheckpointPaths, tmp_path: Path) -> None:
    theirs = dcp.FileSystemWriter
    with paths.installed():
        ours, files = dcp.FileSystemWriter(tmp_path / "out" / "a"), dcp.FileSystemWriter(tmp_path / "b")
        assert isinstance(ours, dcp.FileSystemWriter) and isinstance(files, dcp.FileSystemWriter)
        assert isinstance(dcp.FileSystemReader(tmp_path / "out" / "a"), dcp.FileSystemReader)
        assert not isinstance(ours, dcp.FileSystemReader) and not isinstance(3, dcp.FileSystemWriter)
        assert isinstance(dcp.FileSystemWriter, type) and issubclass(dcp.FileSystemWriter, theirs)
        assert type(files) is theirs and pickle.loads(pickle.dumps(files)).path == tmp_path / "b"

        class Mine(dcp.FileSystemWriter):
            pass

        assert isinstance(Mine(tmp_path / "c"), theirs) and not isinstance(files, Mine)
