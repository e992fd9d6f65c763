"""Verbs take what people pass: numbers of NumPy and torch, a live loss, None, a step as a revision."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from cas_ckpt import CommitOptions, Policy, Repository, limits
from cas_ckpt.errors import InvalidInputError, NotFoundError
from cas_ckpt.ops.retention.policy import Retention

LIMITED: dict[str, dict[str, object]] = {
    "log": {}, "metrics": {}, "best": {"metric": "loss"}, "nearest": {"what": "main"}, "reflog": {}, "du": {},
}  # fmt: skip
"""The verbs that take a limit, and what else they need."""


@pytest.fixture
def repo() -> Iterator[Repository]:
    with Repository.init("memory://plain-arguments-" + np.random.default_rng().bytes(8).hex()) as repo:
        yield repo


@pytest.mark.parametrize("step", [np.int64(4), np.array(4), torch.tensor(4), 4], ids=repr)
def test_a_step_is_any_whole_number(repo: Repository, step: object) -> None:
    commit = repo.commit({"x": 1}, step=step)  # type: ignore[arg-type]
    assert (commit.step, type(commit.step)) == (4, int)


@pytest.mark.parametrize("step", [torch.tensor(4.0), torch.tensor([1, 2]), True, torch.tensor(True), -1], ids=repr)
def test_a_step_that_is_no_whole_number_is_refused(repo: Repository, step: object) -> None:
    with pytest.raises(InvalidInputError, match="step"):
        repo.commit({"x": 1}, step=step)  # type: ignore[arg-type]


def test_a_loss_that_belongs_to_a_graph_is_a_metric(repo: Repository, recwarn: pytest.WarningsRecorder) -> None:
    loss = torch.ones(2, requires_grad=True).sum()
    metrics = {"loss": loss, "acc": np.float32(0.5), "n": torch.tensor(3)}
    assert repo.commit({"x": 1}, metrics=metrics).metrics == {"loss": 2.0, "acc": 0.5, "n": 3.0}  # type: ignore[dict-item]
    assert loss.requires_grad and list(recwarn) == []


def test_no_message_is_an_empty_one(repo: Repository) -> None:
    assert repo.commit({"x": 1}, message=None).message == ""


def test_a_step_alone_is_a_revision(repo: Repository) -> None:
    commits = [repo.commit({"x": number}, step=step) for number, step in enumerate((10, 20, 10))]
    assert repo.resolve("step:20") == commits[1].id
    assert repo.resolve("step:10") == commits[2].id, "the latest of that step"
    assert repo.load("step:10~1")["x"] == 1
    with pytest.raises(NotFoundError, match="11"):
        repo.resolve("step:11")


def test_a_ref_wins_over_an_id_that_begins_like_it(repo: Repository) -> None:
    first = repo.commit({"x": 1})
    second = repo.commit({"x": 2})
    name = second.id[:4]
    repo.tag(name, first)
    assert repo.resolve(name) == first.id
    assert repo.resolve(second.id[:12]) == second.id


def test_a_log_is_filtered_by_one_comparison_or_by_several(repo: Repository) -> None:
    for number in range(4):
        repo.commit({"x": number}, step=number, metrics={"loss": float(number)})
    assert [commit.step for commit in repo.log(where="loss<2")] == [1, 0]
    assert [commit.step for commit in repo.log(where=["loss<3", "loss>0"])] == [2, 1]
    assert repo.log(where="loss<0") == []


def test_a_metric_that_no_commit_has_is_refused_by_log_as_by_best(repo: Repository) -> None:
    repo.commit({"x": 1}, metrics={"loss": 1.0})
    for verb in (lambda: repo.log(where="lose<2"), lambda: repo.best("lose"), lambda: repo.metrics(names="lose")):
        with pytest.raises(
            NotFoundError, match=r"no commit has a metric 'lose' \(did you mean 'loss'\?\): there are loss"
        ):
            verb()


@pytest.mark.parametrize(
    ("verb", "wrong", "said"),
    [
        ("gc", {"min_age_s": "1h"}, "min_age_s is '1h': give a finite number"),
        ("gc", {"min_age_s": float("nan")}, "min_age_s is nan: give a finite number"),
        ("gc", {"max_repack_bytes": True}, "max_repack_bytes is True: give a whole number"),
        ("forget", {"policy": Policy(keep_last=1), "branches": 3}, "branches is 3: give text or a list of texts"),
        ("find", {"min_bytes": True}, "min_bytes is True: give a whole number"),
        ("log", {"world_size": "2"}, "world_size is '2': give a whole number"),
        ("log", {"grep": [None]}, "grep holds None: give a list of texts"),
        ("log", {"author": ["Ann"]}, r"author is \['Ann'\]: give text"),
        ("best", {"metric": ["loss"]}, r"metric is \['loss'\]: give text"),
        *((verb, {"ref": "main", "key": None}, "key is None: give text") for verb in ("read", "entry", "holders")),
        ("gc", {"merge": "no"}, "merge is 'no': give True or False"),
        *((verb, {"tags": "no"}, "tags is 'no': give True or False") for verb in ("fetch", "pull")),
        ("compare_plans", {"ref": "main", "targets": [2], "most_ranks": "4"}, "most_ranks is '4': give a whole"),
        ("plan", {"ref": "main", "target": 2, "storage_bandwidth": "1e9"}, "storage_bandwidth is '1e9': give a finite"),
        *(("fsck", {"read_data": True, name: "5"}, f"{name} is '5'") for name in ("max_duration_s", "max_age_s")),
        *(("push", {"remote": "memory://x", "max_bandwidth": speed}, "max_bandwidth is") for speed in (0, np.nan, "3")),
        ("add_remote", {"name": "x", "url": ""}, "path is '': give a path"),
        ("add_remote", {"name": "x", "url": "a\ud800"}, "cannot be a path"),
        ("import_file", {"path": "a\ud800"}, "cannot be a path"),
        ("push", {"remote": "memory://x", "force_with_lease": 3}, "^3 is not a revision"),
        ("unpin", {"name": None}, "name is None: give text"),
        ("forget", {"policy": Retention(Policy(keep_last=1))}, "policy is .*: give rules such as"),
        ("set_policy", {"policy": Policy(keep_last=1), "branch": ["ft/*"]}, r"branch is \['ft/\*'\]: give text"),
        ("du", {"by": "week"}, "by is 'week': give 'commit' or 'branch' or"),
        ("export", {"ref": "main", "path": "x", "format": "pickle"}, "format is 'pickle': give 'safetensors' or"),
        ("load", {"keys": 3}, "keys is 3: give text or a list of texts"),
        ("load", {"keys": ["x", 3]}, "keys holds 3: give a list of texts"),
        ("log", {"limit": 1.5}, "limit is 1.5: give a whole number"),
        *((verb, {**more, "limit": -1}, "limit is -1: give a whole number from 0") for verb, more in LIMITED.items()),
        ("log", {"limit": True}, "limit is True: give a whole number"),
        ("log", {"limit": 2**70}, "limit is .*: give a whole number of 64 bits"),
        *(
            ("commit", {"state": {}, "options": CommitOptions(**{name: given})}, f"{name} is {said}")
            for name, given, said in (
                ("frozen_audit", "all", "'all': give a finite number"), ("frozen_audit", 2, "2: give a number from 0"),
                ("replica_audit", float("nan"), "nan: give a finite"), ("parents", "main", "'main': give a list"),
                ("max_in_flight", "2", "'2': give a whole number"), ("staging_bytes", 1.5, "1.5: give a whole number"),
                ("orphan", "no", "'no': give True or False"), ("on_divergence", "shout", "'shout': give 'raise' or"),
            )
        ),
        ("commit", {"state": {}, "options": {"orphan": True}}, "options is a dict of 1: give CommitOptions"),
        ("import_file", {"path": "x.pt", "options": CommitOptions()}, "options is .*: give ImportOptions"),
        ("tag", {"name": b"v1"}, "b'v1' is not a name"),
        *(("repair", {"refs": {"main": no}}, r"refs\['main'\] is .*: give text$") for no in (3, ["v1"])),
        ("export", {"ref": "main", "path": 3}, "path is 3: give a path"),
        ("export", {"ref": "main", "path": "a\0b"}, "cannot be a path: it holds a NUL"),
    ],
    ids=str,
)  # fmt: skip
def test_an_argument_of_the_wrong_kind_is_refused(
    repo: Repository, verb: str, wrong: dict[str, object], said: str
) -> None:
    repo.commit({"x": 1})
    with pytest.raises(InvalidInputError, match=said):
        getattr(repo, verb)(**wrong)
    assert len(repo.log()) == 1


@pytest.mark.parametrize("name", ["max_rows", "max_bytes", "timeout_s"])
def test_a_limit_of_an_answer_that_is_no_number_is_refused(repo: Repository, name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} is '5': give a"):
        repo.sql("SELECT 1", **{name: "5"})  # type: ignore[arg-type]


def test_numbers_and_lists_of_other_libraries_are_taken(repo: Repository) -> None:
    for number in range(3):
        repo.commit({"x": number, "y": 0})
    repo.forget(Policy(keep_last=9), branches="main")
    assert repo.find(min_bytes=np.int64(1)) == repo.find(min_bytes=1)  # type: ignore[arg-type]
    assert len(repo.log(limit=np.int64(2))) == len(repo.log(limit=torch.tensor(2))) == 2  # type: ignore[arg-type]
    assert repo.load(keys={"x"}) == {"x": 2}  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [-1, -20, 1.5, "2", True, 1025], ids=repr)
def test_a_number_of_threads_that_no_machine_has_is_refused(number: object) -> None:
    with pytest.raises(InvalidInputError, match="num_threads"), limits(num_threads=number):  # type: ignore[arg-type]
        raise AssertionError("it was taken")


@pytest.mark.parametrize("number", [0, -1, 0.5, "2", True, float("nan")], ids=repr)
def test_a_limit_that_is_no_number_from_1_on_is_refused(number: object) -> None:
    for name in ("max_entries", "max_bytes", "max_refs", "memory_bytes"):
        with pytest.raises(InvalidInputError, match=name), limits(**{name: number}):  # type: ignore[arg-type]
            raise AssertionError("it was taken")


@pytest.mark.parametrize("given", ["no", 1, None])
def test_a_pickle_is_loaded_for_true_alone(repo: Repository, given: object) -> None:
    repo.commit({"odd": functools.partial(int, base=2)}, options=CommitOptions(allow_pickle=True))
    error = InvalidInputError
    for verb in (lambda: repo.load("main", allow_pickle=given), lambda: repo.read("main", "odd", allow_pickle=given)):  # type: ignore[arg-type]
        with pytest.raises(error):
            verb()
