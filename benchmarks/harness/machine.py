"""What the figures were measured on: processor, memory, kernel, disk, versions, commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    "torch", "numpy", "blake3", "safetensors", "torchsnapshot-nightly", "moonclip", "torch_checkpointing",
    "SQLAlchemy", "msgpack", "zstandard",
)  # fmt: skip


def describe(scratch: Path) -> dict[str, str]:
    """Everything worth naming, as texts."""
    return {
        "processor": f"{_cpu_model()}, {os.cpu_count()} cores",
        "memory": f"{_meminfo_bytes('MemTotal') / 2**30:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "disk": _disk(scratch),
        "python": platform.python_version(),
        "packages": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        "commit": _commit(),
    }


def available_memory() -> int:
    """Bytes that can be had without swapping."""
    return _meminfo_bytes("MemAvailable")


def free_disk(folder: Path) -> int:
    """Bytes free on the filesystem of `folder`."""
    return shutil.disk_usage(folder).free


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _meminfo_bytes(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _disk(folder: Path) -> str:
    found = subprocess.run(
        ["df", "--output=source,fstype,size", "-B1G", str(folder)], capture_output=True, text=True, check=True
    )
    device, kind, size = found.stdout.splitlines()[1].split()
    return f"{device} ({kind}, {size} GiB)"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    head = _git("rev-parse", "--short=12", "HEAD")
    changes = _git("status", "--porcelain", "--", "cas_ckpt", "migrations", "benchmarks")
    return (head or "no commit yet") + (" with uncommitted changes" if changes else "")


def _git(*arguments: str) -> str:
    root = Path(__file__).parents[2]
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=root).stdout.strip()
