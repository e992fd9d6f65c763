"""Tests of a framework are collected where that framework is installed, as `make test-frameworks` has them all.

`test_torchtitan.py` needs the package torchtitan, and so on: `NEEDED` has those whose names differ.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

NEEDED = {
    "hf": "transformers", "folders": "transformers", "data": "torch", "key_maps": "transformers",
    "megatron": "megatron",
}  # fmt: skip


def _framework(path: Path) -> str:
    name = path.stem.removeprefix("test_")
    return NEEDED.get(name, name.removeprefix("folders_"))


collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if find_spec(_framework(path)) is None]
