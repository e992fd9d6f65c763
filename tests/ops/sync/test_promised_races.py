"""What comes with a filter, or on demand, beside collections: each goes on after the other at every request.

At every third and at each swap in each run, at all of them in `make search`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import ConflictError, NotFoundError
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.store import Store
from tests.searches import tries
from tests.wrapped_stores import CountingStore

EVERY = tries(3, 1)


class Interrupted(CountingStore):
    """A store before whose request number `at` somebody else does something."""

    def __init__(self, inner: Store, at: int, meanwhile: Callable[[], None]) -> None:
        super().__init__(inner)
        self._at, self._meanwhile = at, meanwhile
        self.requests: list[str] = []

    def _ask(self, request: str, key: str, ask: Callable[[Store], Any], **given: Any) -> Any:
        self.requests.append(request)
        if len(self.requests) == self._at:
            self._meanwhile()
        return super()._ask(request, key, ask, **given)


def state(step: int) -> dict[str, object]:
    return {
        "model": {"w": np.arange(3000, dtype=np.float32) + step},
        "opt": {"m": np.arange(3000) * 2.0 + step, "all": np.arange(5000.0)},
    }


def flat(found: Any, key: str = "") -> dict[str, bytes]:
    """Every tensor by its key, as bytes."""
    if not isinstance(found, dict):
        return {key: np.asarray(found).tobytes()}
    return {name: data for each, below in found.items() for name, data in flat(below, f"{key}/{each}").items()}


def prepared(folder: Path) -> None:
    """A clone with a filter, with garbage, whose origin went on since."""
    with Repository.init(folder / "there") as there:
        for step in range(3):
            there.commit(state(step), step=step)
        with Repository.clone(folder / "there", folder / "here", filter="model/**") as here:
            here.commit({"mine": np.ones(4000)}, branch="mine", options=CommitOptions(orphan=True))
            here.load("main~2")
            here.delete_branch("mine", force=True)
        there.commit(state(3), step=3)


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    place = folder / "try"
    shutil.copytree(folder / "here", place)
    yield place
    shutil.rmtree(place)


def collect(place: Path) -> None:
    with Repository.open(place) as other:
        other.gc(min_age_s=0, reflog_expire_s=0, max_unused=0)


def check(place: Path, num_commits: int) -> None:
    """All is whole or promised, and what is promised comes."""
    with Repository.open(place) as here:
        assert here.fsck(read_data=True, remote=True).ok
        here.gc(min_age_s=0, reflog_expire_s=0, max_unused=0)
        commits = here.log("origin/main")
        assert len(commits) == num_commits
        for info in commits:
            assert info.step is not None
            assert flat(here.load(info.id)) == flat(state(info.step))
        assert here.fsck(read_data=True).ok


def at_every_request(
    folder: Path, deed: Callable[[Repository], Any], meanwhile: Callable[[Path], Any], num: int
) -> None:
    prepared(folder)

    def stopped(at: int, checked: bool = True) -> list[str]:
        """The requests of the deed if the other one came before number `at` of them; at 0: behind all of them."""
        with copied(folder) as place:
            store = Interrupted(FileStore(place), at, lambda: meanwhile(place))
            with Repository(RepositoryHandle.on_store(store, cache=None)) as repo:
                try:
                    deed(repo)
                except (ConflictError, NotFoundError):  # refused: the other one was faster
                    deed(repo)
            if not at:
                meanwhile(place)
            if checked:
                check(place, num)
        return store.requests

    requests = stopped(0)
    assert "get" in requests
    for at, request in enumerate(requests, 1):
        if at % EVERY == 0 or request == "compare_and_swap":
            stopped(at, checked=at % 6 == 0 or request == "compare_and_swap")


def test_19_a_collection_at_any_moment_of_a_fetch_with_a_filter(tmp_path: Path) -> None:
    at_every_request(tmp_path, lambda repo: repo.pull(), collect, 4)


def test_19_a_fetch_with_a_filter_at_any_moment_of_a_collection(tmp_path: Path) -> None:
    def fetch(place: Path) -> None:
        with Repository.open(place) as other:
            other.pull()

    at_every_request(tmp_path, lambda repo: repo.gc(min_age_s=0, reflog_expire_s=0, max_unused=0), fetch, 4)


def test_19_a_collection_at_any_moment_of_a_read_on_demand(tmp_path: Path) -> None:
    def read(repo: Repository) -> None:
        assert flat(repo.load("main")) == flat(state(2))

    at_every_request(tmp_path, read, collect, 3)


def test_19_a_read_on_demand_at_any_moment_of_a_collection(tmp_path: Path) -> None:
    def read(place: Path) -> None:
        with Repository.open(place) as other:
            assert flat(other.load("main~1")) == flat(state(1))

    at_every_request(tmp_path, lambda repo: repo.gc(min_age_s=0, reflog_expire_s=0, max_unused=0), read, 3)
