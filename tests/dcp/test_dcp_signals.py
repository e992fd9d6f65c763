"""Signals in a save or load of DCP: what is called in a handler, and what it interrupts, is done or told; a Ctrl-C
leaves no turn taken."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from cas_ckpt import ConflictError, InvalidInputError, Repository
from cas_ckpt.dcp import CasStorageReader, CasStorageWriter
from tests.dcp.states import alone, load, save
from tests.interrupts import interrupted, places_in
from tests.repository.test_signals import Signalling, calling, handled

STATE = {"w": torch.arange(500.0)}
WITH_LOCKS = ("dcp/group.py", "dcp/writer.py")


def saved(repo: Repository) -> None:
    save(STATE, CasStorageWriter(repo))


def saved_in_background(repo: Repository) -> None:
    with alone():
        dcp.async_save(STATE, storage_writer=CasStorageWriter(repo), no_dist=True).result()


def loaded(repo: Repository) -> None:
    load({"w": torch.zeros(500)}, CasStorageReader(repo, ref="main"))


def done_or_told(work: Callable[[], object]) -> bool:
    """Whether `work` was done. If not, it is told that there is another save: of the same thread, or begun later."""
    try:
        work()
    except (CheckpointException, InvalidInputError) as error:
        inner = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        assert isinstance(inner, InvalidInputError | ConflictError), inner
        return False
    return True


@pytest.mark.parametrize("inner", [saved, saved_in_background, loaded])
@pytest.mark.parametrize("outer", [saved, saved_in_background, loaded])
def test_a_handler_that_saves_or_loads_inside_of_a_save_or_load_has_done_it_or_is_told(
    repo: Repository, outer: Callable[[Repository], None], inner: Callable[[Repository], None]
) -> None:
    def work() -> None:
        outer(repo)

    def handle() -> None:
        done_or_told(lambda: inner(repo))

    repo.commit(STATE)
    work()
    of = ("dcp/reader.py",) if outer is loaded else WITH_LOCKS
    noted = [places_in(work, of=lambda path: path.endswith(of)) for _ in range(3)]
    places = [place for place in noted[0] if all(place in each for each in noted)]  # not what a collection comes to
    assert len(places) > 10
    for place in places[:: 1 if outer is saved is inner else 4]:
        with calling(handle) as done:
            done_or_told(partial(interrupted, work, place))
        assert done or outer is saved_in_background  # whose waits go by how far the other thread has come
        work()


def test_saves_inside_of_each_other_have_their_tags_if_they_were_made(repo: Repository) -> None:
    made, outer = ["first"], iter(range(1000))

    def saved_as(name: str) -> None:
        if done_or_told(lambda: save({"name": name}, CasStorageWriter(repo), checkpoint_id=name)):
            made.append(name)

    def work() -> None:
        saved_as(f"outer-{next(outer)}")

    save({"name": "first"}, CasStorageWriter(repo), checkpoint_id="first")
    places = places_in(work, of=lambda path: path.endswith("dcp/writer.py"))
    assert len(places) > 10
    came = 0
    for number, place in enumerate(places):
        with calling(lambda number=number: saved_as(f"inner-{number}")) as done:  # type: ignore[misc]
            interrupted(work, place)
        came += bool(done)
    assert came and any(name.startswith("inner") for name in made)
    assert set(repo.tags()) == set(made)
    assert [repo.load(name)["name"] for name in made] == made


@pytest.mark.parametrize("verb", ["commit", "commit_async", "checkout"])
def test_a_handler_whose_save_would_wait_for_the_commit_that_it_interrupted_is_told(
    repo: Repository, verb: str
) -> None:
    state = Signalling()
    repo.commit({"x": state})
    calls: dict[str, Callable[[], Any]] = {
        "commit": lambda: repo.commit({"x": state}),
        "commit_async": lambda: repo.commit_async({"x": state}).result(),
        "checkout": lambda: repo.checkout("HEAD", into={"x": state}),
    }
    state.armed = True
    with (
        calling(lambda: saved(repo)),
        pytest.raises(CheckpointException, match="dcp.save was called inside of a commit, "),
    ):
        calls[verb]()
    calls[verb]()


def test_a_ctrl_c_in_a_save_leaves_the_turn_to_the_next_one(repo: Repository) -> None:
    def work() -> None:
        saved(repo)

    work()
    found = places_in(work, of=lambda path: path.endswith(("contextlib.py", "dcp/group.py")))
    places = [place for place in found if any("cas_ckpt/dcp/" in code.co_filename for code in place[::2] if code)]
    assert len(places) > 10
    with handled(signal.default_int_handler):
        for place in places:
            with pytest.raises((KeyboardInterrupt, CheckpointException)):
                interrupted(work, place)
            work()
