"""Opening, closing and losing a repository: every verb that cannot work says so, with a typed error."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from cas_ckpt import CkptError, InvalidInputError, NoRepositoryError, PermissionDeniedError, Repository
from cas_ckpt.core.config import CONFIG_KEY, encode_config, read_config
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.protocol import GC_STATE_KEY, GcState, encode_gc_state, read_gc_state
from cas_ckpt.core.refs import Generation
from cas_ckpt.errors import ConflictError, UnsupportedVersionError
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.url import open_store
from tests.processes import PIPE, Forked

pytestmark = pytest.mark.slow

VERBS: list[Callable[[Repository], object]] = [
    lambda repo: repo.commit({"x": 3}), lambda repo: repo.checkout(into={"x": 0}), lambda repo: repo.load(),
    lambda repo: repo.read("main", "x"), lambda repo: repo.log(), lambda repo: repo.log(all_refs=True),
    lambda repo: repo.branches(), lambda repo: repo.tags(), lambda repo: repo.pins(), lambda repo: repo.show(),
    lambda repo: repo.branch("ft"), lambda repo: repo.tag("v1"), lambda repo: repo.pin(), lambda repo: repo.latest(),
    lambda repo: repo.stats(), lambda repo: repo.du(), lambda repo: repo.resolve("main"), lambda repo: repo.reflog(),
    lambda repo: repo.gc(), lambda repo: repo.best("loss"), lambda repo: repo.metrics(),
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"x": 1})
        repo.commit({"x": 2}, metrics={"loss": 1.0})
    return tmp_path / "repo"


def test_an_encoding_of_a_later_version_is_no_bar_to_reading_and_a_commit_says_what_to_do(place: Path) -> None:
    store = FileStore(place)
    store.put(CONFIG_KEY, encode_config(replace(read_config(store), encoding="later")))
    with Repository.open(place) as repo:
        assert repo.load() == {"x": 2}
        with pytest.raises(UnsupportedVersionError, match="'later', .* install the package .* or upgrade cas_ckpt"):
            repo.commit({"x": 3})
        assert len(repo.log()) == 2


@pytest.mark.parametrize("verb", VERBS, ids=map(str, range(len(VERBS))))
def test_a_closed_repository_refuses_every_verb(place: Path, verb: Callable[[Repository], object]) -> None:
    repo = Repository.open(place)
    repo.close()
    repo.close()
    with pytest.raises(InvalidInputError, match="closed"):
        verb(repo)
    assert repr(repo) and repo.url
    with Repository.open(place) as other:
        assert len(other.log()) == 2


@pytest.mark.parametrize("verb", VERBS, ids=map(str, range(len(VERBS))))
def test_a_folder_that_was_deleted_is_no_empty_repository(place: Path, verb: Callable[[Repository], object]) -> None:
    with Repository.open(place) as repo:
        shutil.rmtree(place)
        with pytest.raises(NoRepositoryError, match="moved or deleted"):
            verb(repo)
    assert not (place / "packs").exists()


def test_what_may_not_be_written_is_opened_only_to_be_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cas_ckpt.storage.file._may_write", lambda _: False)  # root may write everywhere
    assert FileStore(place).abilities.read_only
    for no in (False, np.False_):
        with pytest.raises(PermissionDeniedError, match="read_only=True"):
            Repository.open(place, read_only=no)  # type: ignore[arg-type,unused-ignore]
    with Repository.open(place, read_only=True) as repo:
        assert len(repo.log()) == 2
        with pytest.raises(PermissionDeniedError, match="may not be written by this process"):
            repo.commit({"x": 3})


def test_what_was_opened_to_be_read_says_so(place: Path) -> None:
    with Repository.open(place, read_only=True) as repo, pytest.raises(PermissionDeniedError, match="read_only=False"):
        repo.commit({"x": 3})


def test_open_makes_what_is_not_there_if_it_is_asked_to(tmp_path: Path) -> None:
    for wanted in ([], [1]):
        with Repository.open(tmp_path / "repo", create=True) as repo:
            found = [] if repo.latest() is None else [repo.load("main")["x"]]
            assert found == wanted
            repo.commit({"x": 1})
    with pytest.raises(NoRepositoryError):
        Repository.open(tmp_path / "other")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "somebody's").touch()
    with pytest.raises(CkptError, match="not an empty folder"):
        Repository.open(tmp_path / "full", create=True)


FILE_EVENTS = {"open", "os.mkdir", "os.link", "os.rename", "os.remove", "os.rmdir", "sqlite3.connect"}
"""Events of Python's audit before something happens to a file."""


def open_killed_at_every_event(folder: Path, index_name: str) -> None:
    """Make the repository folder/N in a process that is killed before its N-th event in there, for every N."""
    Repository.init("memory://").close()  # imports all that the others would have to, each anew
    for number in count():
        place = folder / str(number)
        if (process := os.fork()) == 0:
            seen = count()

            def hook(event: str, args: tuple[object, ...], seen: count[int] = seen, number: int = number) -> None:
                if event in FILE_EVENTS and str(folder) in str(args[0]) and next(seen) == number:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            Repository.open(place, create=True, index_url=str(folder / index_name) if index_name else None).close()
            os._exit(0)
        if os.waitpid(process, 0)[1] == 0:
            return
        print(number, flush=True)


@pytest.mark.parametrize("index_name", ["", "index.sqlite"])
def test_open_makes_what_another_was_making_when_it_was_killed(tmp_path: Path, index_name: str) -> None:
    with Forked(open_killed_at_every_event, tmp_path, index_name, stdout=PIPE) as process:
        numbers = process.stdout.read().split()
    assert process.returncode == 0
    assert len(numbers) >= 38
    refused = {}
    for number in numbers:
        try:
            Repository.open(tmp_path / number, create=True).close()
        except CkptError as error:
            refused[number] = str(error)
    assert not refused
    left = {probe.parent for probe in tmp_path.glob("*/probe-*")}
    assert left
    for place in left:
        with Repository.open(place) as repo:
            repo.gc()
    assert not list(tmp_path.glob("*/probe-*"))
    with Repository.open(tmp_path / numbers[20], create=True) as repo:
        repo.commit({"x": 1})
        assert repo.fsck().ok


@pytest.mark.parametrize(
    "name", ["tmp/somebody's", "gc/other", "gc/state/x", "probe-1", "probe-" + "0" * 32 + "/x", "tmp"]
)
def test_what_is_not_a_beginning_of_ours_is_left_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / "repo" / name
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    with pytest.raises(ConflictError, match="not an empty folder"):
        Repository.open(tmp_path / "repo", create=True)
    assert path.read_text() == "precious" and len(list((tmp_path / "repo").iterdir())) == 1


def open_at_once(place: Path, index_name: str) -> None:
    """Open what is not there in three processes at the same moment, again and again."""
    Repository.init("memory://").close()
    for number in range(10):
        ready, gate = os.pipe()
        processes = []
        for _ in range(3):
            if (process := os.fork()) == 0:
                os.close(gate)
                os.read(ready, 1)  # until it is closed by the other side
                index_url = f"{place}/{number}.{index_name}" if index_name else None
                Repository.open(place / str(number), create=True, index_url=index_url).close()
                os._exit(0)
            processes.append(process)
        os.close(gate)
        assert not any(os.waitpid(process, 0)[1] for process in processes)
        os.close(ready)


@pytest.mark.parametrize("index_name", ["", "index.sqlite"])
def test_processes_that_make_one_repository_at_once_all_have_it(tmp_path: Path, index_name: str) -> None:
    with Forked(open_at_once, tmp_path, index_name, stderr=PIPE) as process:
        _, errors = process.communicate()
    assert process.returncode == 0, errors


@pytest.mark.parametrize("index", [None, "index.sqlite"])
def test_a_store_that_only_its_opener_has_is_made_too(tmp_path: Path, index: str | None) -> None:
    with Repository.open("memory://", create=True, index_url=index and str(tmp_path / index)) as repo:
        assert repo.commit({"x": 1}).id == repo.log()[0].id
    assert [path.name for path in tmp_path.glob("*.sqlite")] == [index] * (index is not None)


def test_what_is_made_if_need_be_cannot_be_opened_only_to_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="create=True"):
        Repository.open(tmp_path / "repo", create=True, read_only=True)
    assert not (tmp_path / "repo").exists()


def test_latest_is_the_head_of_a_branch_or_nothing(place: Path) -> None:
    with Repository.open(place) as repo:
        latest = repo.latest()
        assert latest is not None and latest == repo.log()[0] == repo.latest("main")
        assert repo.latest("ft") is None
        with pytest.raises(InvalidInputError, match="did you mean 'main'"):
            repo.latest("mian")


def test_a_missing_repository_is_one_traceback(tmp_path: Path) -> None:
    with pytest.raises(NoRepositoryError) as caught:
        Repository.open(tmp_path / "nothing")
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback (most recent call last)") == 1
    assert "Repository.init" in str(caught.value) and "cas-ckpt" not in str(caught.value)


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    Repository.init(Path("~/repo")).close()
    assert (tmp_path / "repo" / "config").exists()
    Repository.open("~/repo").close()


def test_a_refused_init_leaves_the_gc_state_of_the_repository_that_is_there() -> None:
    init_repository("memory://review-init").close()
    store = open_store("memory://review-init")
    store.put(GC_STATE_KEY, encode_gc_state(GcState(Generation(7))))
    with pytest.raises(ConflictError):
        init_repository("memory://review-init")
    assert read_gc_state(store).generation.number == 7
