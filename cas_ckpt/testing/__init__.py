"""Public tools for testing stores and code over them.

    store_suite.py    the conformance suite: what every store must do
    store_values.py   its checks of values, listings and ranges, and what all checks share
    faults.py         stores that fail on purpose, and that count
    effects.py        which effect fails, and how; a disk whose power fails

    from cas_ckpt.testing import StoreConformance      # subclass it in a pytest file
    from cas_ckpt.testing import run_store_checks      # or run it on a store: `cas-ckpt store check URL`

May not know: packs, commits, the index.
"""

from cas_ckpt.testing.effects import (
    CrashNow,
    Effect,
    Effects,
    Fault,
    FaultPlan,
    WatchedDisk,
    by_chance,
    die_after,
    die_before,
    fail_at,
    keep_all,
    lose_all,
    lose_reply,
    no_space_from,
    watching,
)
from cas_ckpt.testing.faults import CountingStore, FaultyStore, Tally, flip_bit, truncate
from cas_ckpt.testing.store_suite import CheckResult, Outcome, StoreConformance, run_store_checks

__all__ = [
    "CheckResult",
    "CountingStore",
    "CrashNow",
    "Effect",
    "Effects",
    "Fault",
    "FaultPlan",
    "FaultyStore",
    "Outcome",
    "StoreConformance",
    "Tally",
    "WatchedDisk",
    "by_chance",
    "die_after",
    "die_before",
    "fail_at",
    "flip_bit",
    "keep_all",
    "lose_all",
    "lose_reply",
    "no_space_from",
    "run_store_checks",
    "truncate",
    "watching",
]
