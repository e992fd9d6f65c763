"""Folders of torch_checkpointing, imported and exported again: it resumes from what is exported."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch_checkpointing")

from cas_ckpt import Repository
from tests.ranks import results, run_processes

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("size", [1, 2])
def test_it_resumes_exactly_from_an_exported_folder(tmp_path: Path, size: int) -> None:
    case = "tests.frameworks.folders_cases:torch_checkpointing"
    whole = results(run_processes(size, case, str(tmp_path / "in"), False, 1))
    with Repository.init(tmp_path / "repo") as repo:
        imported = repo.import_file(tmp_path / "in")
        assert imported.left_out == ()
        info = repo.export(imported, tmp_path / "out", format="torch_checkpointing")
    assert sorted(Path(file).name for file in info.files) == sorted(path.name for path in (tmp_path / "in").iterdir())
    assert results(run_processes(size, case, str(tmp_path / "out"), True, 9)) == whole
