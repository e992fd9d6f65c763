"""Errors that are sent to another process keep what they hold, and bring nothing else."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from cas_ckpt import errors
from cas_ckpt.errors import CkptError, MemoryBudgetError, PartialRestoreError, PeerError, reworded
from cas_ckpt.index.trees import RowsMissingError
from cas_ckpt.storage.bucket import ConditionFailed
from cas_ckpt.storage.gcs_requests import NotThere
from cas_ckpt.storage.object_reads import EndsBefore
from cas_ckpt.transfer.sent_errors import pack_error, unpack_error

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CkptError)]


def sent(error: BaseException) -> Any:
    return unpack_error(msgpack.unpackb(msgpack.packb(pack_error(error))))


def test_attributes_come_back_as_they_were() -> None:
    assert sent(MemoryBudgetError("little", least_bytes=5)).least_bytes == 5
    assert sent(PeerError("gone", (1, 2))).ranks == (1, 2)
    found = sent(PartialRestoreError("half", key="model", restored=("a", "b")))
    assert (str(found), found.key, found.restored) == ("half", "model", ("a", "b"))


def test_what_is_not_plain_or_is_large_is_left_out() -> None:
    error = MemoryBudgetError("little", least_bytes=1 << 80)
    vars(error).update(obj=object(), text="x" * 100_000, many=tuple(range(10_000)), nested=((1,),), kept=("a",))
    found = sent(error)
    assert vars(found) == {"least_bytes": 0, "kept": ("a",)}


def test_names_that_are_no_attributes_of_an_error_are_refused() -> None:
    names, text, arguments, _, trace, below = pack_error(CkptError("x"))
    for held in (
        {"__class__": 1},
        {"__cause__": 1, "args": [1], "exit_code": [2], "ok": [1]},
        {"ok": {"a": 1}},
        [1],
        None,
    ):
        found = unpack_error([names, text, arguments, held, trace, below])
        assert type(found) is CkptError and found.args == ("x",) and found.exit_code == 1
        assert found.__cause__ is None and set(vars(found)) <= {"ok"}
        assert getattr(found, "ok", (1,)) == (1,)


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
