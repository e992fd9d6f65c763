"""What a call may take: memory beyond the state, threads, and what a stored state may unfold into; and how it is used.

`limits` sets it for a block, which threads and processes that work for a call inherit. Memory, if no limit is set:

    1. what is left of the machine (MemAvailable), and of every control group from that of this process up to the top
       (v1 and v2: the lowest limit less what is in use; page cache can be dropped, so it counts as free)
    2. half of that, divided by the ranks on this machine that do the same at the same time
    3. at most `DEFAULT_BYTES`, and never so little that nothing works

Invariant: what is given is never exceeded for want of room: who needs more refuses it before anything is done
(`check_memory`). Must not know: what the memory is for.

Buffers that a disk reads into or writes from are of large pages (`new_buffer`); what lies side by side in one begins
aligned (`aligned`). Python does not search what is made of many small objects (`python_gc_paused`).
"""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

from cas_ckpt.arguments import check_whole
from cas_ckpt.errors import InvalidInputError, MemoryBudgetError, TooLargeError

T = TypeVar("T")

DEFAULT_BYTES = 300 * 1000**2
"""Default memory budget of a call, on each rank."""

LEAST_DEFAULT_BYTES = 64 * 1000**2
"""Least memory budget, also where the machine has less left: no call works with less."""

ALIGN_BYTES = 64
"""What lies side by side in memory begins at multiples of this, so that items of any width are aligned: parts of a
message, cells in a buffer, staged tensors. It is a line of the processor's cache, too."""

PROC = Path("/proc")
"""Where Linux says what the machine has and which control groups this process is in."""

_RELEASING_BYTES = 256 * 1024
"""A copy at least this large is worth letting other threads run meanwhile."""

_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
_IN_USE = ("memory.current", "memory.usage_in_bytes")
_DROPPED = frozenset({"active_file", "inactive_file", "total_active_file", "total_inactive_file"})
"""In `memory.stat`: page cache, of v1 with all groups below (`total_`), which v2 counts anyway."""


MOST_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What a call may take; see `limits`.

    Equal containers are stored once: a tree of 40 small nodes, each naming the next one twice, stands for
    more entries than any memory holds. So what unfolds is counted while it is made; a limit is never
    reached by work that grows with what is stored, only by what it unfolds into.
    """

    max_entries: int = 1 << 21
    max_bytes: int | None = None
    max_refs: int = 100_000
    memory_bytes: int | None = None
    num_threads: int = 0


_current: ContextVar[Limits] = ContextVar("limits", default=Limits())  # noqa: B039 - it is frozen


def current_limits() -> Limits:
    """The limits of this call."""
    return _current.get()


@contextmanager
def limits(
    *, max_entries: int | None = None, max_bytes: int | None = None, max_refs: int | None = None,
    memory_bytes: int | None = None, num_threads: int | None = None,
) -> Iterator[None]:  # fmt: skip
    """Other limits for the calls inside, in this thread and in the threads and worker processes that work for them.

    They hold for commits in the background that are begun there, too.

        with cas_ckpt.limits(memory_bytes=10**9, num_threads=4):
            repo.commit(state)

    Args:
        max_entries: Entries of one state, containers among them, each as often as it occurs: 2,097,152 by default.
        max_bytes: Bytes of new tensors and arrays in host memory; by default what the system has available.
        max_refs: Refs of each kind that a listing takes, those that were deleted among them; and so many times 16 KiB
            of their records, together. 100,000 by default.
        memory_bytes: Most memory that a call takes beyond the state, or beyond what it returns, on this rank. By
            default what the machine, its control group and the other ranks on it leave, and 300 MB at most.
        num_threads: Threads that hash, copy and compress. 0, the default: one per core, 16 at most.
    What is not given stays as it is.
    Raises:
        InvalidInputError: a limit that is no whole number, or below 1 (num_threads: below 0).
    """
    given = {"max_entries": max_entries, "max_bytes": max_bytes, "max_refs": max_refs, "memory_bytes": memory_bytes}
    wanted = {name: check_whole(name, value, least=1) for name, value in given.items() if value is not None}
    if num_threads is not None:
        wanted["num_threads"] = check_whole("num_threads", num_threads)
        if wanted["num_threads"] > MOST_THREADS:
            raise InvalidInputError(f"num_threads is {num_threads}: give a whole number up to {MOST_THREADS}")
    with holding(replace(_current.get(), **wanted)):
        yield


@contextmanager
def holding(held: Limits) -> Iterator[None]:
    """All of these limits, which held for a call in another thread or process."""
    before = _current.set(held)
    try:
        yield
    finally:
        with suppress(ValueError):  # a Ctrl-C in contextlib left it to Python's collector, which another thread ran
            _current.reset(before)


def inheriting(call: Callable[[], T]) -> Callable[[], T]:
    """`call` with the limits that hold now, for another thread."""
    return holding(_current.get())(call)


def check_entries(count: int, what: str, *, times: int = 1, instead: str = "restore it from a copy") -> None:
    """Raise TooLargeError if `count` is more than `times` the entries that this call may make of a state.

    Args:
        instead: What can be done besides raising the limit.
    """
    most = times * _current.get().max_entries
    if count > most:
        raise TooLargeError(
            f"{what} for more than {most} entries, equal containers counted each time: {instead}, or "
            "raise the limit if it is meant to be so large: with cas_ckpt.limits(max_entries=...)"
        )


def memory_budget(*, num_ranks: int = 1) -> int:
    """Bytes that a call may take on this rank beyond the state.

    Args:
        num_ranks: Ranks on this machine that do the same, this one among them.
    """
    given = _current.get().memory_bytes
    return default_budget(available_bytes(), num_ranks=num_ranks) if given is None else given


def default_budget(left_bytes: int, *, num_ranks: int = 1) -> int:
    """The same where no limit is set and `available_bytes` says `left_bytes`."""
    return max(LEAST_DEFAULT_BYTES, min(DEFAULT_BYTES, left_bytes // (2 * num_ranks)))


def check_memory(least_bytes: int, what: str) -> None:
    """Raise if the memory limit of the call is too small for `what`; without a limit nothing is.

    Raises:
        MemoryBudgetError: says how much is needed.
    """
    given = _current.get().memory_bytes
    if given is not None and given < least_bytes:
        raise MemoryBudgetError(
            f"memory_bytes is {given}: {what} needs {least_bytes} at least; give so much, or leave it out",
            least_bytes=least_bytes,
        )


@contextmanager
def python_gc_paused() -> Iterator[None]:
    """Python's cyclic garbage collector does not run inside the block (in any thread); afterwards all is as before.

    For blocks that make many small objects. What is built there is a tree without cycles: searching it again
    and again finds nothing and costs up to half of the time. Reference counting goes on as always.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def new_buffer(num_bytes: int) -> mmap.mmap:
    """So many zeros, of this process alone, in large pages; given back to the system as soon as they are dropped.

    Raises:
        MemoryError: the system has none, as wherever Python makes something.
    """
    try:  # private, which mmap is not by itself: buffers may outlive a fork, and two processes must not share one
        buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"a buffer of {num_bytes} bytes: {error.strerror}") from error
    ask_for_large_pages(buffer)
    return buffer


def ask_for_large_pages(mapping: mmap.mmap) -> None:
    """Let the kernel use pages of 2 MiB for `mapping`, where it can: one piece for a disk where 4 KiB are 512.

    O_DIRECT is several times faster then (docs/decisions/013), and memory that is new to the process comes faster.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them: slower, not wrong
            mapping.madvise(mmap.MADV_HUGEPAGE)


def aligned(num_bytes: int) -> int:
    """The room that so many bytes take: what comes next begins aligned."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy flat bytes; other threads run meanwhile where that is worth it."""
    if source.nbytes < _RELEASING_BYTES:
        target[:] = source
    else:  # numpy gives up the interpreter's lock, a memoryview does not
        import numpy as np  # not above: reading a log needs none of it

        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def available_bytes() -> int:
    """Host memory that can be filled without others losing theirs; all there is where the system does not say."""
    left = _of_machine()
    for folder in _groups():
        left = min(left, _of_group(folder, left))
    return left


def _of_machine() -> int:
    for line in _lines(PROC / "meminfo"):
        name, _, value = line.partition(":")
        number = value.split()[:1]
        if name == "MemAvailable" and number and number[0].isdecimal():
            return int(number[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _of_group(folder: Path, most: int) -> int:
    """Memory left in a control group; `most` if it has no limit."""
    limits = [number for name in _LIMITS if (number := _number(folder / name)) is not None]
    in_use = next((number for name in _IN_USE if (number := _number(folder / name)) is not None), 0)
    left = min(limits, default=most + in_use) - in_use
    if left >= most:
        return most
    stated = (line.split() for line in _lines(folder / "memory.stat"))
    cached = {fields[0]: int(fields[1]) for fields in stated if len(fields) == 2 and fields[0] in _DROPPED}
    total = [value for name, value in cached.items() if name.startswith("total_")]
    return max(0, left + sum(total or cached.values()))


def _groups() -> Iterator[Path]:
    """The folders of the control groups of memory that this process is in, each with all above it."""
    own = {}
    for line in _lines(PROC / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            own["cgroup"] = path
        elif number == "0" and not controllers:
            own["cgroup2"] = path
    for line in _lines(PROC / "self" / "mountinfo"):
        before, _, after = line.partition(" - ")
        kind, options, fields = after.split()[:1], after.split()[2:3], before.split()
        of_memory = kind == ["cgroup2"] or (kind == ["cgroup"] and "memory" in ",".join(options).split(","))
        if of_memory and len(fields) > 4 and kind[0] in own:
            yield from _upwards(Path(fields[4]), root=PurePosixPath(fields[3]), own=PurePosixPath(own[kind[0]]))


def _upwards(mounted: Path, *, root: PurePosixPath, own: PurePosixPath) -> Iterator[Path]:
    """From the group `own` up to the one whose folder is `mounted`, which is called `root` in this hierarchy."""
    # A container may be told a path that is not below what is mounted for it: then what is mounted is its own group.
    inside = own.relative_to(root) if own.is_relative_to(root) and ".." not in own.parts else PurePosixPath()
    yield from (mounted / each for each in (inside, *inside.parents))


def _number(file: Path) -> int | None:
    """The number in a file; None: there is none, or it says that there is no limit."""
    text = "".join(_lines(file)[:1]).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []  # not Linux, or not that version of control groups: the system does not say
