"""The kernels in Triton's interpreter: what a GPU would compute, on the CPU."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

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
    # Before Triton 3.7 the bound of a loop is an array of one element, which NumPy does not take for a number any more.
    theirs = interpreter._patch_lang_tensor

    def patch(tensor: Any, *scope: Any) -> None:
        theirs(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch
    return module


def lowered(name: str, arguments: dict[str, str], constants: dict[str, Any]) -> str:
    """A kernel as Triton's compiler sees it for a Hopper GPU, before any code is made: what it refuses, raises here."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime import interpreter

    from cas_ckpt.training.device import kernels

    if interpreted_kernels.cache_info().currsize and not hasattr(interpreter, "_LangPatchScope"):
        pytest.skip("the interpreter of Triton before 3.6 changes the language for good: nothing can be compiled after")
    target = GPUTarget("cuda", 90, 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    kernel = getattr(kernels, name)
    signature = {each: arguments.get(each, "constexpr") for each in kernel.arg_names}
    options = backend.parse_options({"num_warps": 4})
    source = ASTSource(kernel, signature, constants)
    module = source.make_ir(target, options, backend.get_codegen_implementation(options),
                            backend.get_module_map(), context)  # fmt: skip
    return str(module)
