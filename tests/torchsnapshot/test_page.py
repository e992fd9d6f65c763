"""The program of docs/integrations.md on torchsnapshot runs, and leaves what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas_ckpt import Repository
from tests.frameworks.programs import program, run
from tests.processes import PIPE, Forked


@pytest.mark.slow
def test_the_program_of_the_page_takes_three_snapshots_into_one_repository(tmp_path: Path) -> None:
    with Forked(run, program("torchsnapshot"), str(tmp_path), None, stdout=PIPE, stderr=PIPE) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.startswith("3 ['0/model', ")
    with Repository.open(tmp_path / "runs" / "a" / ".cas_ckpt") as repo:
        assert sorted(repo.tags()) == ["step-1", "step-2", "step-3"] and len(repo.log()) == 3
