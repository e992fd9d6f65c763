"""A commit in the background that dies, meets a full disk, or meets a collection: the branch is as it was, or moved."""

from __future__ import annotations

import signal
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.core.config import Config
from cas_ckpt.core.create import new_store_id, write_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import BackgroundCommitError, OutOfSpaceError
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Store
from tests.effects import CrashNow, Effects, FaultPlan, die_after, die_before, no_space_from
from tests.processes import PIPE, Forked, run_program
from tests.wrapped_stores import FaultyStore

MOST_EFFECTS = 22


def state_of(step: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(step)
    return {"v": torch.randn(500, 700, generator=made), "w": torch.randn(700, 500, generator=made), "step": step}


def opened(inner: Store, plan: FaultPlan | None = None) -> tuple[Repository, Effects]:
    effects = Effects(plan)
    handle = RepositoryHandle.on_store(FaultyStore(inner, effects=effects), index_url=":memory:")
    return Repository(handle), effects


def begun() -> Store:
    store = MemoryStore()
    write_config(store, Config(new_store_id(), pack_bytes=1 << 20))
    repo, _ = opened(store)
    with repo:
        repo.commit(state_of(1), step=1)
    return store


def spoil(state: dict[str, Any]) -> None:
    state["v"].zero_()
    state["w"].zero_()


def holds(repo: Repository, step: int) -> bool:
    wanted, found = state_of(step), repo.load("main")
    return found["step"] == step and all(torch.equal(found[name], wanted[name]) for name in ("v", "w"))


def check(inner: Store) -> int:
    """What the next process finds is whole; the step of the branch."""
    repo, _ = opened(inner)
    with repo:
        found = repo.latest("main")
        assert found is not None and found.step is not None
        assert holds(repo, found.step)
        state = state_of(9)
        repo.checkout("main", into=state_of(9))
        pending = repo.commit_async(state, step=9)
        spoil(state)
        pending.result()
        assert holds(repo, 9)
    return found.step


@pytest.mark.parametrize("staging_bytes", [None, 1_500_000])
def test_the_cases_here_cover_every_effect_of_a_commit_in_the_background(staging_bytes: int | None) -> None:
    repo, effects = opened(begun())
    repo.checkout("main", into=state_of(2))
    before = effects.count
    repo.commit_async(state_of(2), options=CommitOptions(staging_bytes=staging_bytes)).result()
    assert 8 <= effects.count - before <= MOST_EFFECTS
    repo.close()


@pytest.mark.parametrize("k", range(1, MOST_EFFECTS + 1))
@pytest.mark.parametrize("plan", [die_before, die_after])
def test_dying_at_any_effect_loses_nothing(k: int, plan: Any) -> None:
    inner, state = begun(), state_of(2)
    repo, effects = opened(inner, plan(k))
    head = None
    try:
        pending = repo.commit_async(
            state, step=2, branch="main", options=CommitOptions(on_conflict="retry", staging_bytes=1_500_000)
        )
        spoil(state)
        head = pending.result().step
    except CrashNow:
        assert effects.count >= k
    assert check(inner) in ((2,) if head else (1, 2))


@pytest.mark.parametrize("k", range(1, MOST_EFFECTS + 1, 2))
def test_a_full_disk_is_told_and_the_next_commit_works_once_there_is_space(k: int) -> None:
    inner, state = begun(), state_of(2)
    repo, _ = opened(inner, no_space_from(k))
    pending = repo.commit_async(state, step=2)
    spoil(state)
    error = pending.exception()
    assert error is None or isinstance(error, OutOfSpaceError)
    assert check(inner) == (2 if error is None else 1)


def test_a_full_disk_that_nobody_asked_about_is_told_by_the_next_commit(caplog: pytest.LogCaptureFixture) -> None:
    repo, _ = opened(begun(), no_space_from(1))
    repo.commit_async(state_of(2), step=2)
    with pytest.raises(BackgroundCommitError, match="of step 2.*OutOfSpaceError"):
        repo.commit(state_of(3), step=3)
    assert "of step 2" in caplog.text
    assert "OutOfSpaceError" in caplog.text


# ------------------------------------------------------------ real processes

PROGRAM = """
    import os, signal, sys, threading, torch
    from concurrent.futures import ThreadPoolExecutor

    import cas_ckpt
    from cas_ckpt import Repository
    from tests.crash.test_background import state_of, spoil

    repo = Repository.open(sys.argv[1], group=None)
    state = state_of(2)
    other = ThreadPoolExecutor(1)  # has the turn of the repository, where a commit is not to begin
"""


def run(path: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Run a program that has opened the repository."""
    text = textwrap.dedent(PROGRAM) + textwrap.dedent(body)
    with Forked(run_program, text, str(path), stdout=PIPE, stderr=PIPE) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(text, process.wait(), out, err)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit(state_of(1), step=1)
    return tmp_path / "repo"


@pytest.mark.slow
def test_the_interpreter_ends_after_what_is_pending_and_says_so(path: Path) -> None:
    done = run(path, """
        import cas_ckpt.training.verbs
        repo.commit_async(state, step=2, branch="main", options=cas_ckpt.CommitOptions(create=True))
        spoil(state)
    """)  # fmt: skip
    assert done.returncode == 0, done.stderr
    with Repository.open(path) as repo:
        assert repo.latest("main").step == 2  # type: ignore[union-attr]
        assert holds(repo, 2)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_what_is_not_made_before_the_interpreter_ends_is_named(path: Path) -> None:
    done = run(path, """
        from cas_ckpt.training.background import pending
        pending.EXIT_TIMEOUT_S = 0.5
        other.submit(repo._committing.acquire).result()  # so that it never gets its turn
        repo.commit_async(state, step=2)
    """)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "waits up to 0.5 s for the commit of step 2" in done.stderr
    assert "not made, for the interpreter ends: the commit of step 2" in done.stderr


@pytest.mark.slow
def test_a_child_has_nothing_of_its_parents_pending_commits(path: Path) -> None:
    done = run(path, """
        from cas_ckpt import InvalidInputError
        other.submit(repo._committing.acquire).result()
        pending = repo.commit_async(state, step=2)
        pid = os.fork()
        if not pid:
            for ask in (pending.result, pending.wait_staged, pending.cancel):
                try:
                    ask()
                except InvalidInputError as error:
                    assert "forked" in str(error)
            assert repo.drain()
            with Repository.open(sys.argv[1], group=None) as own:
                own.checkout("main", into=state_of(5))
                own.commit_async(state_of(3), step=3, branch="child").result()
            repo.commit(state_of(4), step=4, branch="heir", options=cas_ckpt.CommitOptions(orphan=True))
            sys.exit(0)  # as ends that run what is left to be done at the end
        assert os.waitpid(pid, 0)[1] == 0
        other.submit(repo._committing.release).result()
        spoil(state)
        pending.result()
        repo.close()
    """)  # fmt: skip
    assert done.returncode == 0, done.stderr
    with Repository.open(path) as repo:
        assert holds(repo, 2)
        assert repo.latest("child").step == 3  # type: ignore[union-attr]
        assert repo.latest("heir").step == 4  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_child_that_is_forked_while_a_commit_is_pending_commits_in_the_background_by_itself(path: Path) -> None:
    done = run(path, """
        other.submit(repo._committing.acquire).result()
        pending = repo.commit_async(state, step=2)
        pid = os.fork()
        if not pid:
            signal.alarm(30)  # rather than wait for a thread that is not there
            own = state_of(3)
            made = repo.commit_async(own, step=3, branch="child", options=cas_ckpt.CommitOptions(orphan=True))
            spoil(own)
            assert made.result().step == 3
            repo.close()
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        other.submit(repo._committing.release).result()
        assert status == 0
        spoil(state)
        pending.result()
        repo.close()
    """)  # fmt: skip
    assert done.returncode == 0, done.stderr
    with Repository.open(path) as repo:
        assert holds(repo, 2)
        assert all(torch.equal(repo.load("child")[name], state_of(3)[name]) for name in ("v", "w"))


@pytest.mark.slow
def test_a_preempted_job_drains_and_ends(path: Path) -> None:
    done = run(path, """
        asked = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: asked.set())
        step = 2
        while not asked.is_set():
            state = state_of(step)
            repo.commit_async(state, step=step)
            spoil(state)
            if step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            step += 1
        assert repo.drain(60)
        print(step - 1)
        os.kill(os.getpid(), signal.SIGKILL)
    """)  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    with Repository.open(path) as repo:
        assert holds(repo, int(done.stdout))
