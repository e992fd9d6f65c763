"""The storage contract as running checks: one suite for every store, ours and yours.

In a test file (pytest finds the inherited `test_...` methods; `docs/adding-a-store.md`):

    class TestMyStore(StoreConformance):
        def store(self) -> Store:
            return MyStore(...)

On a store as it is, for example somebody's bucket: `run_store_checks(open_store(url))`.

Invariant: both ways run the same checks, under keys of their own, which the second way deletes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from unittest import SkipTest

from cas_ckpt.errors import CkptError
from cas_ckpt.storage.store import Store
from cas_ckpt.testing.store_case import StoreCase
from cas_ckpt.testing.store_conditions import ConditionChecks
from cas_ckpt.testing.store_ranges import RangeChecks
from cas_ckpt.testing.store_values import ListChecks, ValueChecks
from cas_ckpt.testing.store_writers import WriterChecks

_GROUPS: tuple[type[StoreCase], ...] = (ValueChecks, ListChecks, RangeChecks, WriterChecks, ConditionChecks)


class StoreConformance(ValueChecks, ListChecks, RangeChecks, WriterChecks, ConditionChecks):
    """Every check of the contract; override `store()`, and `reopened()` where it makes sense."""


class Outcome(enum.Enum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check of one store.

    Attributes:
        name: The rule, as a sentence.
        detail: What was wanted and found when it failed, why when it was skipped, else empty.
    """

    name: str
    outcome: Outcome
    detail: str = ""

    @property
    def ok(self) -> bool:
        """True unless the store broke the rule."""
        return self.outcome is not Outcome.FAILED


def check_names() -> list[str]:
    """Names of the check methods, in the order in which they are read and run."""
    return [name for group in _GROUPS for name in vars(group) if name.startswith("test_")]


def run_store_checks(
    store: Store, *, progress: Callable[[CheckResult], None] | None = None, num_listed: int = StoreCase.num_listed
) -> list[CheckResult]:
    """The result of every check on `store`; its other keys are left alone, those of the checks deleted.

    Args:
        store: Any store that can be written.
        progress: Called with each result as it comes.
        num_listed: Keys to make for the check of a long listing.
    """
    results = []
    for name in check_names():
        results.append(_run(_OnStore(store, num_listed), name))
        if progress is not None:
            progress(results[-1])
    return results


class _OnStore(StoreConformance):
    def __init__(self, given: Store, num_listed: int) -> None:
        self.given = given
        self.num_listed = num_listed

    def store(self) -> Store:
        return self.given


def _run(case: _OnStore, name: str) -> CheckResult:
    sentence = name.removeprefix("test_").replace("_", " ")
    try:
        try:
            getattr(case, name)()
        finally:
            _tidy(case)
    except SkipTest as reason:
        return CheckResult(sentence, Outcome.SKIPPED, str(reason))
    except Exception as error:  # noqa: BLE001 - whatever a store raises is a result
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return CheckResult(sentence, Outcome.FAILED, f"{kind}{error}")
    return CheckResult(sentence, Outcome.PASSED)


def _tidy(case: _OnStore) -> None:
    """Delete the keys of one check; a store that cannot even do that shows it in other checks."""
    try:
        for key, _ in list(case.given.list(case.prefix)):
            case.given.delete(key)
    except CkptError:
        return
