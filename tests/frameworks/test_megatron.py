"""dist_checkpointing of megatron-core with a `CasStrategy`: what is killed goes on as if it had not been."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from cas_ckpt import CommitInfo, Repository
from tests import processes
from tests.ranks import Outcome, results, run_processes

CASES, STEPS = "tests.frameworks.megatron_cases", 6
processes.IMPORTED.append(CASES)  # by the server alone: Megatron warns when it is imported
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of the framework
]


def run(folder: Path, *, size: int = 1, kill_at: tuple[int, str | None] | None = None, **given: Any) -> list[Outcome]:
    hanging = () if kill_at is None else range(1, size)
    return run_processes(size, f"{CASES}:train", str(folder), kill_at, given, hanging=hanging)


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
    return results(run_processes(size, f"{CASES}:{case}", *args))[0]


def roots(commits: list[CommitInfo]) -> list[tuple[int | None, str]]:
    return [(each.step, each.root) for each in commits]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uninterrupted")


@pytest.fixture(scope="module")
def uninterrupted(place: Path) -> list[CommitInfo]:
    return train(place)


@pytest.fixture(scope="module")
def tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> list[CommitInfo]:
    return train(tmp_path_factory.mktemp("tensor-parallel"), size=2, tp=2)


# ------------------------------------------------------------ resuming


def test_a_folder_names_a_commit_and_holds_nothing_else(place: Path, uninterrupted: list[CommitInfo]) -> None:
    assert [each.step for each in uninterrupted] == [STEPS, 4, 2]
    for commit in uninterrupted:
        folder = place / "out" / commit.message
        assert sorted(each.name for each in folder.iterdir()) == ["cas_ckpt.json", "metadata.json"]
        assert json.loads((folder / "cas_ckpt.json").read_text()) == {"commit": commit.id}


def test_a_training_that_is_killed_between_saves_goes_on_exactly(
    tmp_path: Path, uninterrupted: list[CommitInfo]
) -> None:
    assert kill(tmp_path, 5) == 4
    assert roots(train(tmp_path)) == roots(uninterrupted)


@pytest.mark.parametrize("path", [".meta", "refs/heads"])  # before the commit and the ref are there
def test_a_training_that_is_killed_inside_a_save_goes_on_exactly(
    tmp_path: Path, uninterrupted: list[CommitInfo], path: str
) -> None:
    assert kill(tmp_path, 4, path) == 2
    assert roots(train(tmp_path)) == roots(uninterrupted)


@pytest.mark.parametrize("path", ["cas_ckpt.json", "metadata.json"])
def test_a_training_that_is_killed_between_the_commit_and_its_folder_saves_the_step_again(
    tmp_path: Path, uninterrupted: list[CommitInfo], path: str
) -> None:
    assert kill(tmp_path, 4, path) == 4
    last, again, first, *before = roots(train(tmp_path))
    assert again == first
    assert [last, again, *before] == roots(uninterrupted)


def test_commits_in_the_background_have_the_same_roots_and_go_on_after_a_kill(
    tmp_path: Path, uninterrupted: list[CommitInfo]
) -> None:
    assert kill(tmp_path, 4, "refs/heads", asynchronous=True) in (None, 2)
    assert roots(train(tmp_path, asynchronous=True)) == roots(uninterrupted)


def test_the_program_of_the_docs_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    found = []
    for kill_at, folder in ((None, tmp_path / "a"), (3, tmp_path / "b")):
        for number in [None] if kill_at is None else [kill_at, None]:
            outcome = run_processes(1, f"{CASES}:run_program", str(folder), number, default_backend=None)[0]
            assert outcome.error == (None if number is None else "killed by SIGKILL"), outcome.trace
        with Repository.open(folder / "runs" / "ckpts", group=None) as repository:
            found.append(roots(repository.log()))
    assert found[0] == found[1]
    assert [step for step, _ in found[0]] == [20, 15, 10, 5]


# ------------------------------------------------------------ ranks


@pytest.mark.parametrize("path", [None, "refs/heads"])
def test_two_tensor_parallel_ranks_of_which_one_is_killed_go_on_exactly(
    tmp_path: Path, tensor_parallel: list[CommitInfo], path: str | None
) -> None:
    assert kill(tmp_path, 4, path, size=2, tp=2) == 2
    assert roots(train(tmp_path, size=2, tp=2)) == roots(tensor_parallel)


def test_two_ranks_commit_in_the_background(tmp_path: Path, tensor_parallel: list[CommitInfo]) -> None:
    assert roots(train(tmp_path, size=2, tp=2, asynchronous=True)) == roots(tensor_parallel)


@pytest.mark.parametrize(("saved", "loaded"), [((2, 2), (1, 1)), ((1, 1), (2, 2)), ((2, 1), (2, 2))])
def test_what_is_saved_by_some_ranks_and_loaded_by_others_has_the_same_root(
    tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    commit = train(tmp_path, size=saved[0], tp=saved[1], steps=2, with_rng=False)[0]
    root, found = call("save_again", str(tmp_path), {"tp": loaded[1], "with_rng": False}, size=loaded[0])
    assert root == commit.root
    assert found["iteration"] == commit.step == 2
    assert (found["args"].lr, found["here"], found["content_metadata"]) == (0.01, 0, {"sharding": "fully_reshardable"})


def test_replicas_that_save_and_load_a_part_each_give_the_same_root(tmp_path: Path) -> None:
    commit = train(tmp_path / "whole", size=2, steps=2, with_rng=False)[0]
    root, same = call("save_and_load_fully_parallel", str(tmp_path / "parts"), size=2)
    assert root == commit.root
    assert len(same) > 20
    assert all(same)


def test_stages_of_a_pipeline_have_the_root_of_the_whole_model(tmp_path: Path) -> None:
    found = [call("save_stages", str(tmp_path), number, size=size) for number, size in ((1, 1), (2, 2), (3, 1))]
    assert len(set(found)) == 1


def test_buckets_of_the_distributed_optimizer_are_saved_and_loaded(tmp_path: Path) -> None:
    given: dict[str, Any] = {"sharding": "dp_reshardable", "dtype": torch.bfloat16, "size": 2}
    train(tmp_path / "twice", steps=2, **given)
    for folder in ("twice", "once"):
        train(tmp_path / folder, steps=4, **given)
    weights = []
    for folder in ("twice", "once"):  # of roots the padding is a part, of which Megatron saves what was in memory
        with Repository.open(tmp_path / folder / "ckpts", group=None) as repository:
            weights.append(repository.load("main", keys="decoder.layers*"))
    assert len(weights[0]) > 8
    for key, value in weights[0].items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, weights[1][key])


# ------------------------------------------------------------ failures


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_is_logged_and_its_folder_names_the_commit_before_it(
    tmp_path: Path, asynchronous: bool
) -> None:
    error, raised, loaded, told = call("save_without_a_repository", str(tmp_path), "warn", asynchronous, size=2)
    assert (raised, loaded) == ("", 2)
    assert error != "NoneType"
    assert any("a save failed" in each and each.startswith("ERROR") for each in told)
    assert any("its save failed" in each and each.startswith("WARNING") for each in told)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_is_raised_if_asked_for(tmp_path: Path, asynchronous: bool) -> None:
    error, raised, _, _ = call("save_without_a_repository", str(tmp_path), "raise", asynchronous, size=2)
    assert error == raised != ""
    assert not (tmp_path / "out" / "iter_0000004" / "cas_ckpt.json").exists()


# ------------------------------------------------------------ what Megatron asks of a folder


def test_a_commit_that_is_named_by_its_branch_is_loaded_and_described(
    place: Path, uninterrupted: list[CommitInfo]
) -> None:
    iteration, content, about, missing, unexpected, plain = call("look", str(place))
    assert (iteration, content) == (4, {"sharding": "fully_reshardable"})
    assert about["decoder.layers.mlp.linear_fc1.weight"] == ((2, 64, 16), torch.float32)
    assert plain == about.keys()
    assert (missing, unexpected) == ({"output_layer.weight", "decoder.final_layernorm.bias"}, {"nowhere"})


def test_what_does_not_fit_is_refused_by_name(place: Path, uninterrupted: list[CommitInfo]) -> None:
    (shape, text), (absent, key) = call("errors_of", str(place))
    assert (shape, absent) == ("MismatchError", "NotFoundError")
    assert text.startswith("output_layer.weight: the commit has it in the shape (64, 16)")
    assert key.startswith("nowhere: the commit ")


def test_a_vocabulary_that_is_padded_otherwise_is_cut_or_gets_zeros(
    place: Path, uninterrupted: list[CommitInfo]
) -> None:
    with Repository.open(place / "ckpts", group=None) as repository:
        whole = repository.read("main", "embedding.word_embeddings.weight")
    assert torch.equal(call("load_another_vocabulary", str(place), 48), whole[:48])
    longer = call("load_another_vocabulary", str(place), 80)
    assert torch.equal(longer[:64], whole)
    assert not longer[64:].any()


@pytest.mark.parametrize("given", [{}, {"sharding": "dp_reshardable", "dtype": torch.bfloat16}])
def test_a_folder_of_megatron_itself_is_imported_whole_and_gone_on_with(tmp_path: Path, given: dict[str, Any]) -> None:
    call("save_by_megatron", str(tmp_path), given)
    assert (tmp_path / "out" / "iter_0000001" / "common.pt").exists()
    left_out, changed, is_enum, num_tensors = call("import_and_go_on", str(tmp_path), given)
    assert (left_out, is_enum, num_tensors > 15) == ((), True, True)
    assert [key for key in changed if "gbuf" not in key] == ["files/metadata.json"]
