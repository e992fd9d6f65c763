"""torchtitan's Trainer with a `CasCheckpointManager`: what is killed goes on as if it had not been."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("torchtitan")

from cas_ckpt import CommitInfo, Repository
from tests.frameworks import torchtitan_cases as cases
from tests.frameworks.torchtitan_cases import STEPS
from tests.ranks import Outcome, results, run_processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of the framework
]


def run(folder: Path, *, size: int = 1, kill_at: tuple[int, str | None] | None = None, **given: Any) -> list[Outcome]:
    hanging = () if kill_at is None else range(1, size)
    return run_processes(size, f"{cases.__name__}:train", str(folder), kill_at, given, hanging=hanging)


def train(folder: Path, *, size: int = 1, **given: Any) -> list[CommitInfo]:
    commits: list[CommitInfo] = results(run(folder, size=size, **given))[0]
    return commits


def kill(folder: Path, step: int, path: str | None = None, **given: Any) -> int | None:
    """Train until rank 0 is killed; the step of the newest commit."""
    assert run(folder, kill_at=(step, path), **given)[0].exit_code == -signal.SIGKILL
    with Repository.open(folder / "ckpts", group=None) as repository:
        newest = repository.latest()
        return newest.step if newest else None


def call(case: str, *args: Any, size: int = 1) -> Any:
    """What the function of the cases returns on rank 0."""
    return results(run_processes(size, f"{cases.__name__}:{case}", *args))[0]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def model_of(folder: Path, ref: str) -> dict[str, torch.Tensor]:
    with Repository.open(folder / "ckpts", group=None) as repository:
        model: dict[str, torch.Tensor] = repository.load(ref, keys="model")["model"]
        return model


def roots(commits: list[CommitInfo]) -> list[tuple[int | None, str]]:
    return [(each.step, each.root) for each in commits]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[CommitInfo]:
    return train(tmp_path_factory.mktemp("uninterrupted"))


# ------------------------------------------------------------ resuming


@pytest.mark.parametrize("step", [3, 6])
def test_a_training_that_is_killed_between_saves_goes_on_exactly(
    tmp_path: Path, uninterrupted: list[CommitInfo], step: int
) -> None:
    assert kill(tmp_path, step) == 2 * ((step - 1) // 2)
    commits = train(tmp_path)
    assert roots(commits) == roots(uninterrupted)
    assert [each.step for each in commits] == [STEPS, 6, 4, 2]


@pytest.mark.parametrize("path", [".data", ".meta", "refs/heads"])  # before the pack, the commit and the ref are there
def test_a_training_that_is_killed_inside_a_save_goes_on_exactly(
    tmp_path: Path, uninterrupted: list[CommitInfo], path: str
) -> None:
    assert kill(tmp_path, 6, path) == 4
    assert roots(train(tmp_path)) == roots(uninterrupted)


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_commits_in_the_background_have_the_same_roots_and_go_on_after_a_kill(
    tmp_path: Path, uninterrupted: list[CommitInfo], mode: str
) -> None:
    assert kill(tmp_path, 6, "refs/heads", async_mode=mode) == 4
    assert roots(train(tmp_path, async_mode=mode)) == roots(uninterrupted)


# ------------------------------------------------------------ ranks


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> list[CommitInfo]:
    return train(tmp_path_factory.mktemp("sharded"), size=2)


@pytest.mark.parametrize(("step", "path"), [(5, None), (6, "refs/heads")])
def test_two_ranks_with_shards_of_which_one_is_killed_go_on_exactly(
    tmp_path: Path, sharded: list[CommitInfo], step: int, path: str | None
) -> None:
    assert kill(tmp_path, step, path, size=2) == 4
    assert roots(train(tmp_path, size=2)) == roots(sharded)


def test_two_ranks_commit_in_the_background(tmp_path: Path, sharded: list[CommitInfo]) -> None:
    assert kill(tmp_path, 6, ".meta", size=2, async_mode="async") == 4
    assert roots(train(tmp_path, size=2, async_mode="async")) == roots(sharded)


def test_one_process_goes_on_with_what_two_ranks_committed_but_for_the_place_in_the_data(tmp_path: Path) -> None:
    train(tmp_path, size=2, steps=4)
    found, step, epoch, at, _, weights = call("load_and_look", str(tmp_path), {"exclude_from_loading": ["dataloader"]})
    assert (found, step, epoch, at) == (True, 4, 4, 2)
    assert same(weights, model_of(tmp_path, "main"))
    [(name, told)] = call("errors_of", str(tmp_path), {})
    assert name == "PartialRestoreError" and "dp_degree is inconsistent" in told
    assert [each.step for each in train(tmp_path, exclude_from_loading=["dataloader"])] == [8, 6, 4, 2]


def test_stages_of_a_pipeline_make_one_commit_which_one_process_goes_on_with(tmp_path: Path) -> None:
    # torch 2.13 runs no schedule of torchtitan 0.3: nothing is trained.
    given = {"parallel": {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 1}}
    assert call("save_once", str(tmp_path), 2, False, given, size=2) is True
    model = model_of(tmp_path, "main")
    assert {"tok_embeddings.weight", "layers.0.attention.wo.weight", "lm_head.weight"} <= model.keys()
    stages = results(run_processes(2, f"{cases.__name__}:load_and_look", str(tmp_path), given))
    assert [stage[:2] for stage in stages] == [(True, 2), (True, 2)]
    assert same(stages[0][-1] | stages[1][-1], model) and stages[0][-1].keys() != stages[1][-1].keys()
    found, step, *_, weights = call("load_and_look", str(tmp_path), {})
    assert (found, step) == (True, 2) and same(weights, model)
    assert [each.step for each in train(tmp_path, steps=4)] == [4, 2]


# ------------------------------------------------------------ settings of torchtitan


def test_a_step_that_is_asked_for_is_gone_back_to_and_nothing_is_lost(
    tmp_path: Path, uninterrupted: list[CommitInfo]
) -> None:
    before = train(tmp_path)
    after = train(tmp_path, load_step=4)
    assert [each.step for each in after] == [8, 6, 8, 6, 4, 2]
    assert roots(after)[:2] == roots(uninterrupted)[:2]
    assert [(edge.kind, edge.target) for edge in after[1].lineage] == [("continued-from", before[2].id)]
    assert after[0].lineage == () and after[1].parents == (before[0].id,)
    assert train(tmp_path)[0].id == after[0].id  # the newest is at the last step: nothing to do
    [(name, told)] = call("errors_of", str(tmp_path), {"load_step": 5})
    assert name == "NotFoundError" and "has the steps [8, 6, 8, 6, 4, 2]" in told


def test_the_latest_commits_are_kept_and_what_others_committed(tmp_path: Path) -> None:
    with Repository.open(tmp_path / "ckpts", create=True) as repository:
        other = repository.commit({"x": 1}, branch="other")
    train(tmp_path, steps=2)
    with Repository.open(tmp_path / "ckpts") as repository:
        repository.tag("mine", "main")
    commits = train(tmp_path, keep_latest_k=2)
    assert [each.step for each in commits if not each.forgotten] == [8, 6, 2]
    with Repository.open(tmp_path / "ckpts") as repository:
        assert repository.load(other)["x"] == 1
        assert repository.fsck().ok


def test_the_last_save_of_the_model_alone_is_not_what_training_resumes_from(
    tmp_path: Path, uninterrupted: list[CommitInfo]
) -> None:
    given = {"last_save_model_only": True, "export_dtype": "bfloat16"}
    commits = train(tmp_path, **given)
    assert [each.step for each in commits] == [8, 6, 4, 2]
    with Repository.open(tmp_path / "ckpts") as repository:
        state = repository.load()
    assert set(state) == {"model"} and {value.dtype for value in state["model"].values()} == {torch.bfloat16}
    assert call("load_and_look", str(tmp_path), {})[:2] == (True, 6)
    again = train(tmp_path, **given)
    assert [each.step for each in again] == [8, 8, 6, 4, 2] and again[0].root == again[1].root
    assert [edge.kind for edge in again[0].lineage] == ["continued-from"]


def test_of_a_finished_training_that_is_started_again_the_last_whole_commit_stays(tmp_path: Path) -> None:
    given = {"last_save_model_only": True, "keep_latest_k": 2}
    for _ in range(2):
        train(tmp_path, **given)
    commits = train(tmp_path, **given)
    assert [each.step for each in commits if not each.forgotten] == [8, 8, 6]
    assert call("load_and_look", str(tmp_path), {})[:2] == (True, 6)


def test_a_seed_is_loaded_as_a_model_by_any_number_of_ranks(tmp_path: Path) -> None:
    assert call("save_once", str(tmp_path), 0, True, {"last_save_model_only": True}) is True
    found, step, *_, weights = call("load_and_look", str(tmp_path), {})
    assert (found, step) == (True, 0) and same(weights, model_of(tmp_path, "main"))
    assert [each.step for each in train(tmp_path, size=2, steps=2)] == [2, 0]


def test_what_torchtitan_saved_itself_is_gone_on_with_where_there_is_no_commit_yet(tmp_path: Path) -> None:
    call("train_by_files", str(tmp_path), 4)
    assert call("load_and_look", str(tmp_path), {"exclude_from_loading": ["rng"]})[:3] == (True, 4, 4)
    assert [each.step for each in train(tmp_path)] == [8, 6]


def test_an_initial_checkpoint_gives_the_model_alone(tmp_path: Path) -> None:
    call("train_by_files", str(tmp_path / "base"), 2)
    path = str(tmp_path / "base" / "outputs" / "checkpoint" / "step-2")
    assert call("load_and_look", str(tmp_path), {"initial_load_path": path})[:3] == (True, 0, 0)
    assert [each.step for each in train(tmp_path, steps=2, initial_load_path=path)] == [2]


def test_the_last_save_is_written_in_the_names_of_hugging_face_and_loaded_as_initial_weights(tmp_path: Path) -> None:
    train(tmp_path / "base", steps=2, size=2, last_save_model_only=True, last_save_in_hf=True)
    folder = tmp_path / "base" / "outputs" / "checkpoint" / "step-2"
    files = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    assert "model.layers.0.self_attn.q_proj.weight" in files
    assert torch.equal(files["lm_head.weight"], model_of(tmp_path / "base", "main")["lm_head.weight"])
    given = {"initial_load_path": str(folder), "initial_load_in_hf": True}
    found, step, *_, weights = call("load_and_look", str(tmp_path), given)
    assert (found, step) == (True, 0) and same(weights, model_of(tmp_path / "base", "main"))


def test_what_is_excluded_from_loading_stays(tmp_path: Path) -> None:
    train(tmp_path, steps=4)
    given = {"exclude_from_loading": ["lr_scheduler", "rng"], "load_only": True}
    assert call("load_and_look", str(tmp_path), given)[:5] == (True, 4, 0, 10, True)
    assert call("load_and_look", str(tmp_path), {})[:5] == (True, 4, 4, 10, False)


def test_the_first_step_is_saved_if_asked_for_and_nothing_where_saves_are_disabled(tmp_path: Path) -> None:
    assert [each.step for each in train(tmp_path, steps=3, enable_first_step_checkpoint=True)] == [3, 2, 1]
    assert [each.step for each in train(tmp_path, steps=6, load_only=True, on_save_error="raise")] == [3, 2, 1]
    assert call("load_and_look", str(tmp_path / "new"), {"enable": False})[:2] == (False, 0)
    assert not (tmp_path / "new" / "ckpts").exists()


def test_another_branch_is_another_training(tmp_path: Path) -> None:
    train(tmp_path, steps=4)
    train(tmp_path, steps=2, branch="retry")
    with Repository.open(tmp_path / "ckpts") as repository:
        assert [each.step for each in repository.log("retry")] == [2]
        repository.branch("fork", start="main~1")
    train(tmp_path, steps=4, branch="fork")
    with Repository.open(tmp_path / "ckpts") as repository:
        assert [each.step for each in repository.log("fork")] == [4, 2]
        assert [each.step for each in repository.log("main")] == [4, 2]


def test_settings_come_from_the_command_line(tmp_path: Path) -> None:
    named = ["--module", "tests.frameworks.torchtitan_cases", "--config", "llama3_committed"]
    parsed = cases.parse([*named, "--checkpoint.repository", "s3://bucket/run", "--checkpoint.keep_latest_k", "3"])
    assert isinstance(parsed, cases.CasCheckpointManager.Config)
    assert (parsed.repository, parsed.keep_latest_k, parsed.interval) == ("s3://bucket/run", 3, 100)


# ------------------------------------------------------------ failures


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_save_that_fails_is_logged_and_training_goes_on(tmp_path: Path, mode: str) -> None:
    error, saved, reached, told = call("train_into_failure", str(tmp_path), "warn", mode)
    assert (error, saved, reached) == ("NoRepositoryError", 2, STEPS)
    assert sum("a save failed, training goes on" in each for each in told) == 3
    assert [each.step for each in train(tmp_path)] == [8, 6, 4, 2]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_save_that_fails_ends_the_training_if_asked_for(tmp_path: Path, mode: str) -> None:
    outcome = run_processes(1, f"{cases.__name__}:train_into_failure", str(tmp_path), "raise", mode)[0]
    assert outcome.error is not None and outcome.error.startswith("NoRepositoryError")


MISUSE = [
    ({"repository": ""}, "InvalidInputError", "give the path or URL of a repository"),
    ({"on_save_error": "ignore"}, "InvalidInputError", "give 'warn' or 'raise'"),
    ({"async_mode": "sometimes"}, "InvalidInputError", "wanted one of"),
    ({"exclude_from_loading": ["loader"]}, "InvalidInputError", "there are ['dataloader',"),
    ({"load_only": True}, "NoRepositoryError", "holds no cas_ckpt repository"),
    ({"load_step": 3}, "NotFoundError", "has the steps []"),
]
"""Settings, and the error that says what is wrong with them."""


def test_misuse_is_told(tmp_path: Path) -> None:
    found = call("errors_of", str(tmp_path), *(given for given, *_ in MISUSE))
    for (given, error, told), (name, message) in zip(MISUSE, found, strict=True):
        assert name == error and told in message, given


def test_importing_the_package_imports_no_framework() -> None:
    program = "import sys, cas_ckpt, cas_ckpt.integrations; sys.exit('torchtitan' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
