"""Errors of a save that DCP's protocol alone would let the other ranks wait for.

DCP calls planners and writers on each rank and then gathers, over its own process group, what came of it. While
the ranks commit together over ours, that leaves two gaps, and DCP offers no hook for either:

- A planner that raises in `finish_plan` keeps its rank from ever coming to our commit. `watch_finish_plan` tells the
  others, who are in it already.
- After a rank has died, the others would go on to DCP's gather, which waits for the dead one until the timeout of the
  process group (30 minutes unless said otherwise). `RankLost` ends the save instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from cas_ckpt.errors import PeerError

_MOST_FRAMES = 3
"""Calls between DCP, which has the planner, and a writer's hook that looks for it."""


class RankLost(PeerError):
    """A `PeerError` about a rank that is dead, as a writer raises it inside dcp.save.

    DCP takes whatever a writer raises, pickles it, and gathers it with what the other ranks have. Pickling this error
    raises it again: out of dcp.save, on every rank that is left, before anybody waits for the dead one.
    """

    def __reduce__(self) -> NoReturn:
        raise PeerError(str(self), self.ranks)


class _Watched:
    """Stands for the `finish_plan` of one planner during one save."""

    def __init__(self, planner: SavePlanner, writer: object, tell: Callable[[BaseException], None]) -> None:
        before: Any = vars(planner).get("finish_plan")
        self._before: Any = before._before if isinstance(before, _Watched) else before
        self._planner = planner
        self._writer = writer
        self._tell = tell

    def __call__(self, new_plan: SavePlan) -> Any:
        is_ours = _local(sys._getframe(1), "storage_writer") is self._writer
        self._take_back()
        try:
            return self._planner.finish_plan(new_plan)
        except BaseException as error:
            if is_ours:  # not a later save of this planner, with another writer
                self._tell(error)
            raise

    def _take_back(self) -> None:
        if self._before is None:
            vars(self._planner).pop("finish_plan", None)
        else:
            vars(self._planner)["finish_plan"] = self._before


def watch_finish_plan(writer: object, tell: Callable[[BaseException], None]) -> None:
    """Have `tell` called with what the planner of this save raises in `finish_plan`; for `set_up_storage_writer`.

    The planner is found in the frames of DCP, which gives it to writers only when the plan is final. Where it is not
    there (another version of torch), nothing is watched, and the others wait until their timeout.
    """
    planner = _local(sys._getframe(2), "planner")
    if isinstance(planner, SavePlanner) and hasattr(planner, "__dict__"):
        vars(planner)["finish_plan"] = _Watched(planner, writer, tell)


def _local(frame: FrameType | None, name: str) -> Any:
    """The variable of this name in a frame or in one of those that called it."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        if name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back
    return None
