"""The kernels in Triton's interpreter: what a GPU would compute, on the CPU."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import cas_ckpt.training.device as device

triton = pytest.importorskip("triton")


@cache
def interpreted_kernels() -> ModuleType:
    """kernels.py, loaded a second time with Triton set to interpret it."""
    from triton.runtime import interpreter

    path = Path(device.__file__).with_name("kernels.py")
    spec = importlib.util.spec_from_file_location("interpreted_kernels", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["interpreted_kernels"] = importlib.util.module_from_spec(spec)
    before = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = True
    try:
        spec.loader.exec_module(module)
    finally:
        triton.knobs.runtime.interpret = before
    # Sums wrap around, as they shall; looking at each takes two thirds of the interpreter's time.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    return module
