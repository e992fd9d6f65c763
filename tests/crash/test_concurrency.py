"""Threads that share a repository, and repositories that share a place: nobody loses a commit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.errors import ConflictError
from cas_ckpt.index.index import Index
from cas_ckpt.ops.commit import request
from tests.effects import CrashNow

NUM_THREADS, NUM_COMMITS = 4, 5


def state(number: int) -> dict[str, Any]:
    """A tensor of its own, one that all share, a value."""
    own = torch.rand(30_000, generator=torch.Generator().manual_seed(number))
    return {"own": own, "shared": torch.arange(20_000), "number": number}


def holds(repo: Repository, ref: str, number: int) -> bool:
    found, wanted = repo.load(ref), state(number)
    return found["number"] == number and all(torch.equal(found[name], wanted[name]) for name in ("own", "shared"))


def in_threads(work: Callable[[int], None]) -> None:
    """`work(0)`, `work(1)`, ... at once; raises what the first of them raised."""
    barrier, failures = threading.Barrier(NUM_THREADS), []

    def run(number: int) -> None:
        try:
            barrier.wait()
            work(number)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.fixture(params=["memory", "file"])
def url(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    return f"memory://{tmp_path.name}" if request.param == "memory" else str(tmp_path / "repo")


def test_threads_commit_to_branches_of_their_own(url: str) -> None:
    repo = Repository.init(url)
    handles = [Repository.open(url) for _ in range(NUM_THREADS)]  # an object follows one live state

    def work(thread: int) -> None:
        for number in range(NUM_COMMITS):
            handles[thread].commit(
                state(10 * thread + number), branch=f"b{thread}", step=number, options=CommitOptions(orphan=True)
            )
            assert holds(repo, f"b{thread}", 10 * thread + number)

    in_threads(work)
    for thread in range(NUM_THREADS):
        assert [info.step for info in repo.log(f"b{thread}")] == [4, 3, 2, 1, 0]
        assert all(holds(repo, f"b{thread}~{back}", 10 * thread + 4 - back) for back in range(NUM_COMMITS))


def test_threads_that_share_a_repository_and_a_branch_lose_no_commit(url: str) -> None:
    repo = Repository.init(url)
    in_threads(lambda thread: [repo.commit(state(10 * thread + n), step=10 * thread + n) for n in range(NUM_COMMITS)])  # type: ignore[arg-type,return-value]
    steps = [info.step for info in repo.log("main", first_parent=True)]
    assert sorted(steps) == sorted(10 * thread + n for thread in range(NUM_THREADS) for n in range(NUM_COMMITS))  # type: ignore[type-var]
    assert all(steps.index(10 * t + n) > steps.index(10 * t + n + 1) for t in range(NUM_THREADS) for n in range(4))


def test_repositories_of_one_place_lose_no_commit(url: str) -> None:
    Repository.init(url).close()
    repos = [Repository.open(url) for _ in range(NUM_THREADS)]
    in_threads(lambda thread: [repos[thread].commit(state(10 * thread + n), step=n) for n in range(NUM_COMMITS)])  # type: ignore[arg-type,return-value]
    logs = [[info.id for info in repo.log()] for repo in repos]
    assert len(set(logs[0])) == NUM_THREADS * NUM_COMMITS
    assert all(log == logs[0] for log in logs)


def test_a_branch_that_another_begins_between_two_looks_is_gone_on_with(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Repository.init(url), Repository.open(url)
    check_free = request.check_free

    def begun_meanwhile(*args: Any) -> None:
        monkeypatch.setattr(request, "check_free", check_free)
        other.commit(state(1), step=1)
        check_free(*args)

    monkeypatch.setattr(request, "check_free", begun_meanwhile)
    one.commit(state(2), step=2)
    assert [info.step for info in one.log("main")] == [2, 1]


def test_a_branch_and_a_tag_that_many_create_belong_to_one_of_them(url: str) -> None:
    repo = Repository.init(url)
    for number in range(NUM_THREADS):
        repo.commit(state(number), step=number)
    repos = [Repository.open(url) for _ in range(NUM_THREADS)]
    won: list[tuple[str, int]] = []

    def work(thread: int) -> None:
        for name, verb in (("new", repos[thread].branch), ("v1", repos[thread].tag)):
            try:
                verb(name, **{"start" if name == "new" else "ref": f"main~{thread}"})
                won.append((name, thread))
            except ConflictError:
                pass

    in_threads(work)
    assert sorted(name for name, _ in won) == ["new", "v1"]
    assert all(repo.log(name)[0].step == NUM_THREADS - 1 - thread for name, thread in won)


def test_readers_see_whole_commits_while_others_are_made(url: str) -> None:
    repo = Repository.init(url)
    repo.commit(state(0), step=0)

    def work(thread: int) -> None:
        for number in range(1, 4):
            if thread == 0:
                repo.commit(state(number), step=number)
            else:
                head = repo.log(limit=1)[0]
                assert head.step is not None
                assert holds(repo, head.id, head.step)

    in_threads(work)


def test_a_log_is_whole_when_others_commit_between_ones_own_commits(tmp_path: Path) -> None:
    """Each has an index of its own, as machines that share a folder do."""
    ours = Repository.init(tmp_path / "repo")
    theirs = Repository.open(tmp_path / "repo", index_url=str(tmp_path / "elsewhere.sqlite"))
    ids = [repo.commit({"x": number}).id for number, repo in enumerate([ours, theirs, ours, theirs, ours])]
    assert [info.id for info in ours.log()] == [info.id for info in theirs.log()] == ids[::-1]


def test_a_log_is_whole_when_somebody_died_before_telling_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = Repository.init(tmp_path / "repo")
    first = repo.commit(state(1))

    def die(self: Index, records: object, **named: object) -> int:
        raise CrashNow

    with monkeypatch.context() as patched:
        patched.setattr(Index, "add_packs", die)
        with pytest.raises(CrashNow):
            Repository.open(tmp_path / "repo").commit(state(2))
    third = repo.commit(state(3))
    for one in (repo, Repository.open(tmp_path / "repo")):
        assert [info.id for info in one.log()] == [third.id, *third.parents, first.id]
        assert holds(one, "main~1", 2)
