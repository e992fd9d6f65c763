"""Builds the native core, `cas_ckpt._native`; everything else about the package is in pyproject.toml.

It is optional: without a compiler the package is installed all the same, and does the same work in Python
(docs/native.md). Neither torch nor NumPy is needed to build it.
"""

import platform
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

SOURCES = ["core.c", "module.c", *(f"blake3/{name}.c" for name in ("blake3", "blake3_dispatch", "blake3_portable"))]
MACROS = [("BLAKE3_NO_SSE2", None)]  # of x86-64 without SSE4.1 there are none that run torch
MACHINE = platform.machine()
if MACHINE in ("x86_64", "AMD64"):
    SOURCES += [f"blake3/blake3_{each}_x86-64_unix.S" for each in ("sse41", "avx2", "avx512")]
elif MACHINE == "aarch64" or MACHINE == "arm64":
    SOURCES += ["blake3/blake3_neon.c"]
else:
    MACROS += [("BLAKE3_USE_NEON", "0")]

# The stable ABI of one Python serves all later ones; builds without the interpreter's lock have none.
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")


class BuildNative(build_ext):
    """Takes assembler sources, too."""

    def build_extensions(self) -> None:
        """Let the C compiler assemble them."""
        self.compiler.src_extensions.append(".S")
        super().build_extensions()


setup(
    # Inside the wheel the migrations lie in the package, so that an installed user can upgrade an index.
    packages=[*find_packages(include=["cas_ckpt*"]), "cas_ckpt.migrations", "cas_ckpt.migrations.versions"],
    package_dir={"cas_ckpt.migrations": "migrations"},
    ext_modules=[
        Extension(
            "cas_ckpt._native",
            [f"native/{name}" for name in SOURCES],
            define_macros=MACROS,
            depends=[str(path) for path in Path("native").rglob("*.h")],
            extra_compile_args=["-std=gnu11", "-O3", "-fvisibility=hidden", "-Werror=implicit-function-declaration"],
            extra_link_args=["-Wl,-Bsymbolic"],
            py_limited_api=STABLE,
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)
