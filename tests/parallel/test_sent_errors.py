"""Errors that are sent to another process keep what they hold, and bring nothing else."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cas_ckpt import errors
from cas_ckpt.errors import (
    CkptError,
    CorruptionError,
    InternalError,
    MemoryBudgetError,
    PartialRestoreError,
    PeerError,
    reworded,
)
from cas_ckpt.index.trees import RowsMissingError
from cas_ckpt.parallel.child_process import packed_error, unpacked_error
from cas_ckpt.storage.bucket import ConditionFailed
from cas_ckpt.storage.gcs_requests import NotThere
from cas_ckpt.storage.object_parts import EndsBefore

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CkptError)]


def sent(error: BaseException) -> Any:
    return unpacked_error(packed_error(error))


def test_attributes_come_back_as_they_were() -> None:
    assert sent(MemoryBudgetError("little", least_bytes=5)).least_bytes == 5
    assert sent(PeerError("gone", (1, 2))).ranks == (1, 2)
    found = sent(PartialRestoreError("half", key="model", restored=("a", "b")))
    assert (str(found), found.key, found.restored) == ("half", "model", ("a", "b"))


def test_an_error_of_another_module_comes_back_as_the_nearest_that_both_processes_know() -> None:
    class OutOfDeviceMemory(RuntimeError):
        pass

    class Odd(Exception):
        pass

    found = sent(OutOfDeviceMemory("64 GiB"))
    assert (type(found), str(found)) == (RuntimeError, "64 GiB")
    assert type(sent(RowsMissingError([b"1" * 32]))) is CorruptionError
    assert (type(sent(Odd("x"))), str(sent(Odd("x")))) == (InternalError, "Odd: x")
    error = MemoryBudgetError("little", least_bytes=1)
    error.held = threading.Lock()  # type: ignore[attr-defined]
    assert (type(sent(error)), str(sent(error))) == (InternalError, "MemoryBudgetError: little")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_of_error_comes_back_with_its_causes(kind: type[CkptError]) -> None:
    error = kind("first")
    error.__cause__, error.__cause__.__context__ = OSError(2, "No such file", "/x"), KeyError("k")
    found = sent(error)
    assert (type(found), str(found), vars(found)) == (kind, str(error), vars(error))
    assert (found.__cause__.errno, found.__cause__.filename) == (2, "/x")
    assert found.__cause__.__cause__.args == ("k",)


@pytest.mark.parametrize(
    "error",
    [
        *(kind("w: cut short") for kind in KINDS),
        ConditionFailed("w: cut short", retried=True),
        EndsBefore("w", 5),
        NotThere("w: cut short", is_bucket=True),
        RowsMissingError([b"1" * 32]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_reworded_error_is_of_the_same_kind_and_keeps_what_it_has(error: CkptError) -> None:
    before = str(error)
    error.overwritten = ("w",)
    error.ranks = (1, 2)  # type: ignore[attr-defined]
    made = reworded(error, "repo: w: cut short")
    assert type(made) is type(error) and str(made) == "repo: w: cut short"
    assert vars(made) == vars(error) and str(error) == before
