"""Folders of DeepSpeed, imported and exported again: an engine resumes from what is exported.

DeepSpeed is in no file of requirements, as it compiles a part of it when it is first used: install it to run this.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

import torch

from cas_ckpt import Repository
from tests.ranks import results, run_processes

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize(("size", "stage", "dtype"), [(1, 1, "fp32"), (2, 2, "bf16"), (2, 3, "bf16")])
def test_an_engine_resumes_exactly_from_an_exported_folder(tmp_path: Path, size: int, stage: int, dtype: str) -> None:
    case = "tests.frameworks.folders_cases:deepspeed"
    whole = results(run_processes(size, case, str(tmp_path / "in"), False, 1, stage, dtype))
    with Repository.init(tmp_path / "repo") as repo:
        imported = repo.import_file(tmp_path / "in")
        assert imported.left_out == ()
        repo.export(imported, tmp_path / "out", format="deepspeed")
    names = [sorted(path.relative_to(top) for path in top.rglob("*")) for top in (tmp_path / "in", tmp_path / "out")]
    assert names[0] == names[1]
    assert results(run_processes(size, case, str(tmp_path / "out"), True, 9, stage, dtype)) == whole


def test_a_trainer_over_deepspeed_resumes_exactly_from_an_exported_checkpoint(tmp_path: Path) -> None:
    case = "tests.frameworks.folders_cases:trainer_over_deepspeed"
    (whole,) = results(run_processes(1, case, str(tmp_path / "whole"), None, 1))
    with Repository.init(tmp_path / "repo") as repo:
        imported = repo.import_file(tmp_path / "whole" / "checkpoint-2")
        assert [each.name for each in imported.left_out] == ["training_args.bin"]
        info = repo.export(imported, tmp_path / "checkpoint-2", format="trainer")
    assert str(tmp_path / "checkpoint-2" / "global_step2" / "mp_rank_00_model_states.pt") in info.files
    (resumed,) = results(run_processes(1, case, str(tmp_path / "out"), str(tmp_path / "checkpoint-2"), 9))
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
