"""Expectations that hold under `python -O` too, and calls made at the same moment.

Invariant: a check that finds nothing to check says so (skip), it never passes in silence.
Needs no pytest, so that `cas-ckpt store check` runs where only the package is installed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar
from unittest import SkipTest

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


class ExpectationFailed(AssertionError):
    """A store does not keep a rule of the contract."""


def expect(condition: bool, rule: str) -> None:
    """Raise, quoting `rule`, unless `condition` holds."""
    if not condition:
        raise ExpectationFailed(rule)


def expect_same(found: object, wanted: object, rule: str) -> None:
    """Raise unless both are equal; long values are cut short in the message."""
    if found != wanted:
        raise ExpectationFailed(f"{rule}: wanted {wanted!r:.100}, found {found!r:.100}")


def expect_raises(kind: type[E], rule: str, call: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> E:
    """The error that `call(*arguments, **named)` raised, which must be of `kind`."""
    try:
        answer = call(*arguments, **named)
    except kind as error:
        return error
    except Exception as error:
        raise ExpectationFailed(f"{rule}: wanted {kind.__name__}, found {error!r:.200}") from error
    raise ExpectationFailed(f"{rule}: wanted {kind.__name__}, found the answer {answer!r:.100}")


def skip(reason: str) -> None:
    """Leave this check: it is not about this store (pytest reports it as skipped)."""
    raise SkipTest(reason)


def at_once(call: Callable[[A], T], arguments: Sequence[A]) -> list[T | Exception]:
    """What `call` answered or raised for each argument, all calls let go at the same moment."""
    start = threading.Barrier(len(arguments))

    def run(argument: A) -> T | Exception:
        start.wait()
        try:
            return call(argument)
        except Exception as error:  # noqa: BLE001 - handed to the check, which judges it
            return error

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(run, arguments))
