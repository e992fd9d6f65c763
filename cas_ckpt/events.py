"""Handlers that are called when a verb of an open repository has ended: what a monitor needs, without wrapping calls.

    remove = cas_ckpt.on_event(lambda event: print(event.verb, event.seconds, event.error))

A package brings one by an entry point of the group `cas_ckpt.event_handlers`: a function of one `Event`. It is loaded
when a process that has imported torch opens its first repository; the command line loads none.

Invariant: a handler changes nothing of what a verb gives or raises; what it raises itself is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from cas_ckpt.clock import monotonic_s
from cas_ckpt.errors import out_of_memory

T = TypeVar("T")
P = ParamSpec("P")

_LOGGER = logging.getLogger("cas_ckpt")

EVENT_HANDLERS = "cas_ckpt.event_handlers"
"""The group of entry points by which a package brings handlers."""


@dataclass(frozen=True, slots=True)
class Event:
    """A call of a method of `Repository` that has ended.

    Attributes:
        verb: The name of the method: "commit", "checkout", "push" ...
        repository: Its URL, without secrets; empty for a `clone` that failed.
        seconds: How long the call took.
        error: What it raised, or None.
        result: What it returned: of `commit` a `CommitInfo`, of `commit_async` the `PendingCommit`, whose
            `add_done_callback` says when the commit is made. None if it raised.
    """

    verb: str
    repository: str
    seconds: float
    error: BaseException | None
    result: Any


Handler = Callable[[Event], object]

_handlers: list[Handler] = []


def on_event(handler: Handler) -> Callable[[], None]:
    """Call `handler` with each `Event` from now on, in the thread of the call that has ended, after its end.

    A handler that takes long makes calls long. On many ranks each process has its own. What it raises is logged.

    Returns:
        A function that takes the handler away again.
    """
    _handlers.append(handler)
    return lambda: _handlers.remove(handler) if handler in _handlers else None


def reported(call: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A verb, of whose end handlers are told; a `MemoryError` in it is a `TooLargeError`."""

    @wraps(call)
    def called(repository: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        begun = monotonic_s()
        try:
            result = call(repository, *args, **kwargs)
        except MemoryError as error:
            raised = out_of_memory(error)
            _tell(call.__name__, repository, begun, raised, None)
            raise raised from error
        except BaseException as error:
            _tell(call.__name__, repository, begun, error, None)
            raise
        _tell(call.__name__, repository, begun, None, result)
        return result

    return called


def _tell(verb: str, repository: Any, begun: float, error: BaseException | None, result: Any) -> None:
    if not _handlers:
        return
    opened = result if isinstance(repository, type) else repository  # a clone is called on the class
    event = Event(verb, getattr(opened, "url", ""), monotonic_s() - begun, error, result)
    for handler in tuple(_handlers):
        try:
            handler(event)
        except Exception:
            _LOGGER.exception("a handler of events failed at the end of %s", verb)


@cache
def load_handlers() -> None:
    """Take the handlers of installed packages; the first call alone does. One that cannot be imported is logged."""
    from importlib.metadata import entry_points  # takes 15 ms

    for point in entry_points(group=EVENT_HANDLERS):
        try:
            on_event(point.load())
        except Exception:
            _LOGGER.exception("the handler of events %s cannot be imported", point.value)
