"""Checkouts and loads are logged: what was restored, how it ended, and what had been planned for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut

from cas_ckpt import PerRank, Repository, RNGState, StateDict, limits
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import CkptError, CorruptionError, MismatchError, NotFoundError
from cas_ckpt.index import history, index
from cas_ckpt.index.remembered import proven_packs
from cas_ckpt.layout.holdings import Shard
from cas_ckpt.layout.restore_plan import RestoreRequest, plan_restore_reads
from cas_ckpt.objects.digest import leaf_digest
from cas_ckpt.objects.spec import Box, Spec
from cas_ckpt.objects.state import Container, Flavor, StoredTensor
from cas_ckpt.ops.checkout.restores import RestoreNote, logged
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.training.verbs import checkout_state, commit_state
from tests.ops.fsck.fsck_cases import flip
from tests.ranks import results, run_processes
from tests.thread_peers import run_ranks
from tests.training.fake_world import fake_world
from tests.training.restore_log_cases import PLANNED

CASES = "tests.training.restore_log_cases"


def training(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 200))
    return {"model": model, "array": np.arange(1000.0), "progress": StateDict(step=seed), "rng": RNGState()}


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with Repository.init(tmp_path / "repo") as made:
        made.commit(training(), message="first")
        yield made


def damage_data(path: Path) -> None:
    """Change one byte in the middle of every data pack."""
    for pack in (path / "packs").rglob("*.data"):
        flip(pack, pack.stat().st_size // 2)


def test_a_checkout_and_a_load_are_in_the_log(repo: Repository) -> None:
    (commit,) = repo.log()
    assert commit.restored_s is None
    repo.checkout("main", into=training(seed=5))
    repo.load("main")
    load, checkout = repo.restores()
    assert (checkout.verb, load.verb) == ("checkout", "load")
    for each in (checkout, load):
        assert (each.commit, each.root, each.world_size, each.mesh) == (commit.id, commit.root, 1, "")
        assert (each.complete, each.error, each.author) == (True, None, commit.author)
        assert each.num_bytes == 4 * (2 * 200 * 300 + 300) + 8 * 1000 + 5056 + 2496  # torch's and numpy's generators
        assert 0 < each.seconds < 60
        assert each.host
    assert repo.restores(limit=1) == [load]
    assert repo.restores(commit) == [load, checkout]
    restored_s = repo.log()[0].restored_s
    assert restored_s == repo.show().commit.restored_s == load.time_s
    assert repo.log()[0] == commit


def test_a_plan_and_what_happened_stand_side_by_side(repo: Repository) -> None:
    repo.load("main")
    assert repo.restores()[0].estimated_s is None
    plan = repo.plan("main", "dp=1")
    repo.checkout("main", into=training(seed=5))
    assert [each.estimated_s for each in repo.restores()] == [plan.summary.estimated_s] * 2
    assert plan.summary.chunk_bytes == repo.restores()[0].num_bytes
    other = repo.plan("main", "dp=2")
    assert other.summary.estimated_s < plan.summary.estimated_s
    repo.load("main", keys="model")
    assert repo.restores()[0].estimated_s is None


def test_a_part_of_a_state_proves_nothing_of_the_whole(repo: Repository) -> None:
    repo.checkout("main", into=training(seed=5), keys="model")
    repo.load("main", keys=["array"])
    target = training(seed=5)
    del target["array"]
    repo.checkout("main", into=target, strict=False)
    assert [each.complete for each in repo.restores()] == [False] * 3
    assert repo.log()[0].restored_s is None


@pytest.mark.parametrize(("committed", "restored"), [(2, 1), (1, 2), (3, 2), (2, 2), (1, 1)])
def test_a_restore_that_leaves_values_of_other_ranks_alone_proves_nothing_of_them(
    tmp_path: Path, committed: int, restored: int
) -> None:
    path = tmp_path / "of ranks"
    Repository.init(path).close()

    def state(rank: int) -> dict[str, Any]:
        return {"w": torch.ones(500, 500), "own": PerRank(torch.full((3000,), float(rank))), "few": PerRank(rank)}

    def commits(peers: Peers) -> None:
        with closing(RepositoryHandle.open(path)) as handle, limits(num_threads=1):
            commit_state(handle, state(peers.rank), CommitRequest(), peers=peers)

    def restores(peers: Peers) -> None:
        with closing(RepositoryHandle.open(path)) as handle:
            checkout_state(handle, "main", into=state(7), peers=peers)

    run_ranks(committed, commits, timeout_s=60)
    run_ranks(restored, restores, timeout_s=60)
    with Repository.open(path) as repo:
        is_whole = committed == restored
        assert [(each.complete, each.error) for each in repo.restores()] == [(is_whole, None)]
        assert (repo.log()[0].restored_s is not None) == is_whole
        assert bool(repo._handle.index.read(proven_packs)) == is_whole
        assert len(repo.plans()) == (restored > 1)  # of all that was asked for


@pytest.mark.parametrize(("last_row", "left_alone"), [(1500, False), (1030, False), (1000, True)])
def test_a_chunk_that_no_rank_wants_is_left_alone_though_some_want_others_of_its_tensor(
    last_row: int, left_alone: bool
) -> None:
    spec = Spec("float32", (1500, 700))  # two chunks, of 1,024 rows and the rest
    stored = StoredTensor(spec, Flavor.TORCH, leaf_digest(b"its node"), None)
    own = Shard((Box((0, 0), (last_row, 700)),), ((0, 0),), (0,))
    note = RestoreNote(complete=True)
    note.planned(plan_restore_reads([RestoreRequest("w", spec, (own,))], 2), [stored])
    note.check_complete(Container("dict", {"w": stored}))
    assert note.left_alone == left_alone


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("cut", "size"), [(Cut(0), 8), (Cut(0), 200_000), (Replicate(), 200_000)], ids=str)
def test_of_a_process_that_is_alone_in_a_job_the_part_that_it_holds_is_not_the_whole(
    repo: Repository, rank: int, cut: Any, size: int
) -> None:
    commit = repo.commit({"w": torch.arange(float(size))})
    with fake_world(rank, 2), Repository.open(repo.url, group=None) as alone:
        target = distribute_tensor(torch.zeros(size), init_device_mesh("cpu", (2,)), [cut], src_data_rank=None)
        alone.checkout(into={"w": target})
    wanted = torch.arange(float(size)).chunk(2)[rank] if cut.is_shard() else torch.arange(float(size))
    assert torch.equal(target.to_local(), wanted)
    assert [each.complete for each in repo.restores(commit)] == [cut.is_replicate()]
    assert (repo.log()[0].restored_s is not None) == cut.is_replicate()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("size", [8, 200_000])
def test_after_the_job_a_process_fills_the_part_that_it_held_in_it(repo: Repository, rank: int, size: int) -> None:
    commit = repo.commit({"w": torch.arange(float(size))})
    with fake_world(rank, 2):
        target = distribute_tensor(torch.zeros(size), init_device_mesh("cpu", (2,)), [Cut(0)], src_data_rank=None)
    repo.checkout(into={"w": target})
    assert torch.equal(target._local_tensor, torch.arange(float(size)).chunk(2)[rank])
    assert [each.complete for each in repo.restores(commit)] == [False]


def test_the_state_is_what_is_proven_and_not_the_commit(repo: Repository) -> None:
    repo.checkout("main", into=training())
    again = repo.commit(training(), message="the same state again")
    assert [each.restored_s is None for each in repo.log()] == [False, False]
    assert len(repo.restores(again)) == 1
    other = repo.commit(training(seed=1))
    assert repo.restores(other) == []
    assert repo.log()[0].restored_s is None


def test_a_restore_that_fails_is_logged_with_what_failed(repo: Repository, tmp_path: Path) -> None:
    damage_data(tmp_path / "repo")
    with pytest.raises(CorruptionError):
        repo.checkout("main", into=training(seed=5))
    with pytest.raises(CorruptionError):
        repo.load("main")
    with pytest.raises(MismatchError):
        repo.checkout("main", into={"model": torch.nn.Linear(3, 3)})
    mismatch, load, checkout = repo.restores()
    for each in (load, checkout):
        assert each.error is not None
        assert each.error.startswith("CorruptionError: ")
        assert "\n" not in each.error
        assert each.num_bytes is None
    assert mismatch.error is not None
    assert mismatch.error.startswith("MismatchError: ")
    assert repo.log()[0].restored_s is None


def test_what_is_not_there_is_not_logged(repo: Repository) -> None:
    with pytest.raises(NotFoundError):
        repo.load("nowhere")
    with pytest.raises(NotFoundError):
        repo.restores("nowhere")
    assert repo.restores() == []


def test_a_repository_that_is_only_read_logs_nothing(
    repo: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Repository.open(tmp_path / "repo", read_only=True) as reader:
        reader.load("main")
        reader.checkout("main", into=training(seed=5))
        assert reader.restores() == []
    assert repo.restores() == []
    assert caplog.text == ""  # and nobody is told that it was not


def test_a_log_that_cannot_be_written_fails_no_restore(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    repo._handle.index.write(lambda connection: connection.exec_driver_sql("DROP TABLE t_restores"))
    target = training(seed=5)
    with caplog.at_level(logging.WARNING, "cas_ckpt"):
        repo.checkout("main", into=target)
        assert repo.load("main")["progress"] == {"step": 0}
    assert target["progress"]["step"] == 0
    assert "this checkout is not in the log of restores" in caplog.text
    assert "this load is not in the log of restores" in caplog.text


def test_a_restore_does_not_wait_for_others_who_write_into_the_index(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(index, "SOON_S", 0.01)
    with Repository.open(tmp_path / "repo") as other, other._handle.index.writing():
        repo.load("main")
        repo.checkout("main", into=training(seed=5))
        assert [plan.reused for plan in repo.compare_plans("main", ["dp=2", "dp=4"])] == [False, False]
    assert caplog.text.count("is not in the log of restores") == 2
    assert caplog.text.count("the plan is not kept") == 1  # of the second nobody tries
    assert (repo.restores(), repo.plans()) == ([], [])
    repo.load("main")
    assert len(repo.restores()) == 1


class OddError(Exception):
    def __str__(self) -> str:
        raise OSError("no words")


def test_an_error_that_cannot_be_told_is_still_the_one_that_is_raised(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    commit = repo._handle.index.read(history.read_commit, bytes.fromhex(repo.resolve("main")))
    assert commit is not None
    with pytest.raises(OddError), logged(repo._handle, commit, verb="load", complete=True):
        raise OddError
    assert "this load is not in the log of restores: no words" in caplog.text


def test_a_new_index_keeps_the_log(repo: Repository) -> None:
    repo.plan("main", "dp=1")
    repo.load("main")
    before, plans = repo.restores(), repo.plans()
    repo.rebuild_index()
    assert (repo.restores(), repo.plans()) == (before, plans)
    assert before[0].estimated_s is not None


# --- several ranks ----------------------------------------------------------------------------

PLANS: dict[str, tuple[str, str, dict[str, list[str]]]] = {
    "fsdp over four": ("shard=4", "dp=4", {}),
    "hybrid": ("replicate=2,shard=2", "ddp=2,fsdp=2", {}),
    "fsdp and tensor parallel": (
        "dp=2,tp=2", "dp=2,tp=2", {"**/0/*": ["SS(0,2)", "S(0)"], "**/2/*": ["S(0)", "S(1)"]},
    ),
    "ddp": ("", "ddp=4", {}),
}  # fmt: skip
"""The mesh that the log has of each kind, and a plan that somebody may have made for it."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    path = tmp_path_factory.mktemp("ranks") / "repo"
    Repository.init(path).close()
    found = results(run_processes(4, f"{CASES}:checks_out_every_division", str(path), timeout_s=110))
    assert all(each == found[0] for each in found)
    return path, found[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANS)
def test_a_checkout_of_ranks_is_logged_once_and_meets_the_plan_that_one_makes_for_it(
    ranks: tuple[Path, dict[str, str]], kind: str
) -> None:
    path, commits = ranks
    mesh, target, shapes = PLANS[kind]
    with Repository.open(path) as repo:
        logged = repo.restores(commits[kind])[-1]
        assert (logged.verb, logged.world_size, logged.mesh, logged.complete) == ("checkout", 4, mesh, True)
        (kept,) = repo.plans(commits[kind])
        assert (kept.mesh, logged.num_bytes) == ("fsdp=4" if kind == PLANNED else mesh, kept.summary.chunk_bytes)
        assert logged.estimated_s == kept.summary.estimated_s
        planned = repo.plan(commits[kind], target, shapes=shapes)
        assert not planned.reused
        # In the place of the checkout's, or beside what somebody had asked for before it.
        assert [each.mesh for each in repo.plans(commits[kind])] == [target, *(["fsdp=4"] if kind == PLANNED else [])]
        assert planned.summary.read_bytes == kept.summary.read_bytes
        assert repo.restores(commits[kind])[-1].estimated_s == planned.summary.estimated_s
        restored_s = repo.show(commits[kind]).commit.restored_s
        assert restored_s is not None
        assert restored_s >= logged.time_s


@pytest.mark.slow
def test_of_a_part_and_of_a_load_by_every_rank_there_is_one_row_each(ranks: tuple[Path, dict[str, str]]) -> None:
    path, commits = ranks
    with Repository.open(path) as repo:
        load, part, whole = repo.restores(commits["ddp"])
        assert (load.verb, load.complete, load.world_size) == ("load", True, 1)
        assert (part.verb, part.complete, part.world_size, part.estimated_s) == ("checkout", False, 4, None)
        assert whole.complete
        assert len(repo.restores()) == len(PLANS) + 2


@pytest.mark.slow
def test_a_checkout_of_ranks_that_fails_is_logged_with_what_failed(ranks: tuple[Path, dict[str, str]]) -> None:
    path, commits = ranks
    damage_data(path)
    told = results(run_processes(4, f"{CASES}:checks_out_what_is_damaged", str(path), timeout_s=60))
    assert all("CorruptionError" in each for each in told), told
    with Repository.open(path) as repo:
        last = repo.restores()[0]
        assert last.commit == commits["fsdp over four"]
        assert last.error is not None
        assert "CorruptionError" in last.error
        assert (last.num_bytes, last.mesh, last.complete) == (None, "shard=4", False)


def test_errors_of_any_length_and_letters_are_logged_in_one_line(repo: Repository) -> None:
    class Refuses(StateDict):
        def load_state_dict(self, state: Any) -> None:
            raise ValueError("no\0\n\ud800 " + "x" * 100_000)

    target = training(seed=5) | {"progress": Refuses(step=0)}
    with pytest.raises(CkptError):
        repo.checkout("main", into=target)
    (last,) = repo.restores()
    assert last.error is not None
    assert last.error.startswith("PartialRestoreError: progress: ")
    assert len(last.error) <= 1000
    assert "\n" not in last.error
