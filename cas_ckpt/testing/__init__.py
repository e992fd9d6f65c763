"""The conformance suite of stores, shipped so that others can run it on theirs.

    store_suite.py    the suite: streams, conditional writes, and running all of it
    store_values.py   its checks of values, listings and ranges, and what all checks share

    from cas_ckpt.testing import StoreConformance      # subclass it in a pytest file
    from cas_ckpt.testing import run_store_checks      # or run it on a store: `cas-ckpt store check URL`

May not know: packs, commits, the index.
"""

from cas_ckpt.testing.store_suite import CheckResult, Outcome, StoreConformance, run_store_checks

__all__ = ["CheckResult", "Outcome", "StoreConformance", "run_store_checks"]
