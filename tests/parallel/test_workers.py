"""Worker threads: all of the work is done, or the first error reaches the caller."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import pytest

from cas_ckpt.parallel.workers import ahead, one_ahead, run_all


def collector(into: list[int]) -> Callable[[], Callable[[int], None]]:
    return lambda: into.append


@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_every_item_is_worked_on_once(num_threads: int) -> None:
    done: list[int] = []
    run_all(range(500), collector(done), num_threads=num_threads)
    assert sorted(done) == list(range(500))


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_of_any_kind_in_any_thread_reaches_the_caller(error: BaseException) -> None:
    def work(item: int) -> None:
        if item == 250:
            raise error

    with pytest.raises(type(error)):
        run_all(range(500), lambda: work, num_threads=4)


def test_after_an_error_the_rest_is_left_and_no_thread_goes_on() -> None:
    done: list[int] = []

    def work(item: int) -> None:
        if item == 3:
            raise ValueError("three")
        done.append(item)

    with pytest.raises(ValueError, match="three"):
        run_all(range(100_000), lambda: work, num_threads=3)
    assert len(done) < 100_000
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cas-ckpt-")]


def test_what_the_workers_held_is_not_kept_by_their_error() -> None:
    class Held:
        """Something that workers use."""

    held = Held()
    kept = weakref.ref(held)

    def fails(held: Held) -> Callable[[int], None]:
        def work(item: int) -> None:
            raise ValueError(held)

        return work

    gc.disable()
    try:
        with suppress(ValueError):
            run_all(range(5), partial(fails, held), num_threads=2)
        del held
        assert kept() is None
    finally:
        gc.enable()


def test_an_error_of_the_list_of_work_itself_reaches_the_caller() -> None:
    def items() -> object:
        yield 1
        raise LookupError

    with pytest.raises(LookupError):
        run_all(items(), lambda: lambda item: None, num_threads=3)  # type: ignore[arg-type]


def test_a_worker_that_cannot_be_made_reaches_the_caller() -> None:
    def make() -> Callable[[int], None]:
        raise OSError("no worker")

    with pytest.raises(OSError, match="no worker"):
        run_all(range(5), make, num_threads=3)


def test_while_one_is_used_the_next_is_worked_on() -> None:
    begun: list[int] = []
    second = threading.Event()

    def work(item: int) -> int:
        begun.append(item)
        if len(begun) > 1:
            second.set()
        return item * item

    found = one_ahead(work, range(5))
    assert next(found) == 0
    assert second.wait(10), "the second is begun before it is asked for"
    assert list(found) == [1, 4, 9, 16]
    assert sorted(begun) == list(range(5))


def test_what_is_worked_on_ahead_raises_in_its_turn_and_no_thread_goes_on() -> None:
    def work(item: int) -> int:
        if item == 1:
            raise ValueError("one")
        return item

    found = one_ahead(work, range(5))
    assert next(found) == 0
    with pytest.raises(ValueError, match="one"):
        next(found)
    left = one_ahead(work, [0, 2, 3])
    assert next(left) == 0
    left.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "cas-ckpt-ahead"]


def test_what_an_iterator_makes_is_made_while_what_came_before_is_used() -> None:
    second = threading.Event()

    def numbers() -> Iterator[int]:
        yield 0
        second.set()
        yield 1
        raise ValueError("two")

    assert list(ahead([])) == []
    assert list(ahead(range(5))) == [0, 1, 2, 3, 4]
    found = ahead(numbers())
    assert next(found) == 0
    assert second.wait(10), "the second is made before it is asked for"
    assert next(found) == 1
    with pytest.raises(ValueError, match="two"):
        next(found)
