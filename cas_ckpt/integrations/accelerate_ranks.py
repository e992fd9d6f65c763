"""What ranks that Accelerate has started tell one another beside a commit: what one of them found, and what failed.

Invariant: what fails on one rank raises on all, so that none waits for another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from cas_ckpt import CkptError, StorageError

T = TypeVar("T")


def of_first(look: Callable[[], T]) -> T:
    """What `look` gives on the first rank, where alone it is called; all ranks raise what it raises there."""
    told: tuple[T | None, CkptError | None] = (None, None)
    if PartialState().is_main_process:
        try:
            told = look(), None
        except CkptError as error:
            told = None, error
    found, failed = broadcast_object_list([told])[0]
    if failed is not None:
        raise failed
    return cast(T, found)


def together(work: Callable[[], object], what: str) -> None:
    """Call `work` on each rank.

    Args:
        what: What is said if it fails, before the reasons of the ranks.
    Raises:
        CkptError: what `work` raised here. StorageError: it failed on any rank.
    """
    error: Exception | None = None
    try:
        work()
    except Exception as caught:  # noqa: BLE001 - torch has RuntimeErrors of its own for a full disk
        error = caught
    failed = {rank: each for rank, each in enumerate(gather_object([error and str(error)])) if each}
    if isinstance(error, CkptError):
        raise error
    if failed:
        raise StorageError(f"{what}, by rank: {failed}") from error
