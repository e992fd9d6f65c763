"""The repository's own tests, run again with the repositories in buckets, or with the index in PostgreSQL.

`again("tests.ops.refs.test_refs_verbs")` gives a module the tests of another one. The fixture `in_buckets` of
conftest.py puts an object store wherever the code opens a folder, and where a schedule copies its world.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def again(module: str, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
    """Names of `module` for the namespace of another: its tests whose names are `wanted`, and its fixtures."""
    found = vars(importlib.import_module(module))
    return {
        name: value
        for name, value in found.items()
        if (name.startswith("test_") and wanted(name)) or type(value).__name__ == "FixtureFunctionDefinition"
    }
