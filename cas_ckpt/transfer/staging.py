"""Memory into which a state is copied, so that a commit can go on while the state changes; kept warm between commits.

    1. `StagingPool.take` gives an arena with room for so many bytes: a warm one, grown if need be, or a new one.
    2. `Arena.room` hands out arrays in it, one for each piece of a tensor, in C order.
    3. `copy_all` copies into them by several threads; NumPy releases the interpreter's lock while it copies.
    4. `StagingPool.give` takes the arena back, once those arrays are not used any more.

Invariant: an arena belongs to one taker until it is given back, so nothing is copied over bytes that a commit still
reads. What all takers of a pool hold together never exceeds the largest budget that one of them named.

Hooks: `StagingPool(shared=True)` makes arenas that another process can map (`Arena.fd`); `prepare=` sees every new
mapping before it is used (to pin it for a device), and `dismiss=` before it is unmapped; a source that can write its
elements elsewhere by itself (from a device, on a stream of its own) has `copy_into`. Knows nothing of tensors' keys, of
commits or of torch.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from cas_ckpt.errors import InternalError, TooLargeError
from cas_ckpt.memory import aligned, ask_for_large_pages
from cas_ckpt.objects.spec import Box, as_raw, raw_dtype
from cas_ckpt.objects.state import ArraySource
from cas_ckpt.parallel.workers import run_all
from cas_ckpt.transfer.hashing import stretches
from cas_ckpt.uncopied import Uncopied

Array: TypeAlias = np.ndarray[Any, Any]

GRANULE_BYTES = 2 << 20
"""Arenas are made and grown in multiples of this: the size of a huge page."""

COPY_BYTES = 16 << 20
"""Bytes that a thread copies at a time: many small pieces, or a stretch of a large one."""


_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK of Linux, which `mmap` has no name for."""


class Arena(Uncopied):
    """One mapping of memory.

    Attributes:
        shared: Other processes can map it, by `fd`.
        kept_by_children: A process that is forked has its bytes, as they are then; else it has zeros.
        fd: The memory as a file, if it is shared; else -1.
    """

    def __init__(self, num_bytes: int, *, shared: bool = False, kept_by_children: bool = False) -> None:
        """Map at least `num_bytes`, untouched.

        Raises:
            TooLargeError: the system gives no such mapping.
        """
        size = -(-max(num_bytes, 1) // GRANULE_BYTES) * GRANULE_BYTES
        self.shared = shared
        self.kept_by_children = kept_by_children
        self.fd = -1
        try:
            if shared:
                self.fd = os.memfd_create("cas-ckpt-staging", os.MFD_CLOEXEC)
                # Its pages are there as long as it is open, also if nobody closes this.
                self._fd_closed = weakref.finalize(self, os.close, self.fd)
                self._fd_closed.atexit = False
                os.ftruncate(self.fd, size)
                self._map = mmap.mmap(self.fd, size)
            else:
                self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            self._close_fd()
            raise _too_large(size, error) from error
        self._advise()
        self._view()

    def _advise(self) -> None:
        ask_for_large_pages(self._map)
        if not self.shared and not self.kept_by_children:
            # A child never looks at it. Were its bytes the child's too, every page would be copied once more after each
            # fork, such as for the workers of a data loader. The mapping itself stays: the child has this object too,
            # and what it unmaps must not be what it put there meanwhile.
            with suppress(OSError):
                self._map.madvise(_WIPE_ON_FORK)

    def _view(self) -> None:
        self._memory: Array | None = np.frombuffer(self._map, np.uint8)
        self._used = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the mapping."""
        return len(self._map)

    @property
    def left_bytes(self) -> int:
        """Bytes that have not been handed out."""
        return len(self._map) - self._used

    @property
    def place(self) -> tuple[int, int]:
        """Address and bytes of the mapping, for registering it with a device."""
        return (0 if self._memory is None else self._memory.ctypes.data), len(self._map)

    def room(self, num_bytes: int) -> tuple[int, Array]:
        """Bytes that nobody else was handed since `clear`: where they begin in the mapping, and they themselves."""
        at, memory = self._used, self._memory
        if memory is None or at + num_bytes > len(memory):
            raise InternalError(f"an arena has no room for {num_bytes} bytes more")
        self._used = at + aligned(num_bytes)
        return at, memory[at : at + num_bytes]

    def clear(self) -> None:
        """Forget what was handed out."""
        self._used = 0

    def grow(self, num_bytes: int) -> bool:
        """Make it at least `num_bytes` long; what is warm stays warm. False: somebody looks at it, so it stays.

        Raises:
            TooLargeError: the system gives no such mapping.
        """
        size = -(-num_bytes // GRANULE_BYTES) * GRANULE_BYTES
        if size <= self.num_bytes:
            return True
        self._memory = None
        try:
            self._map.resize(size)
            self._advise()
        except BufferError:
            return False
        except (OSError, ValueError, SystemError) as error:
            raise _too_large(size, error) from error
        finally:
            self._view()
        return True

    def close(self) -> None:
        """Unmap it; arrays that somebody still has keep the memory until they are gone. Idempotent."""
        self._memory = None
        with suppress(BufferError):
            self._map.close()
        self._close_fd()

    def _close_fd(self) -> None:
        if self.fd >= 0:
            self._fd_closed()
            self.fd = -1


def _too_large(num_bytes: int, error: Exception) -> TooLargeError:
    return TooLargeError(
        f"there are no {num_bytes} bytes of memory to stage a state in ({error}): give CommitOptions(staging_bytes=)"
    )


def _nothing(arena: Arena) -> None:
    """No device needs to know of the memory."""


class StagingPool:
    """Arenas of one repository. Threads may share it.

    Args:
        shared: Other processes can map the arenas.
        kept_by_children: Forked processes may read what is in the arenas.
        prepare: Called with every mapping before it is used, also of one that was grown.
        dismiss: Called with it before it is unmapped or grown.
    """

    def __init__(
        self, *, shared: bool = False, kept_by_children: bool = False,
        prepare: Callable[[Arena], object] = _nothing, dismiss: Callable[[Arena], object] = _nothing,
    ) -> None:  # fmt: skip
        self.shared, self._kept_by_children = shared, kept_by_children
        self._prepare, self._dismiss = prepare, dismiss
        self._lock = threading.RLock()
        self._free: list[Arena] = []
        self._taken: list[Arena] = []
        self._closed = False

    @property
    def held_bytes(self) -> int:
        """Bytes of all mappings, unused ones too."""
        with self._lock:
            return sum(each.num_bytes for each in (*self._free, *self._taken))

    @property
    def free_bytes(self) -> int:
        """Bytes of the largest unused mapping."""
        with self._lock:
            return max((each.num_bytes for each in self._free), default=0)

    def take(self, num_bytes: int, *, budget_bytes: int) -> Arena | None:
        """An arena with room for `num_bytes`, or for as many as the budget leaves; None: it leaves nothing.

        Args:
            budget_bytes: What all that is taken of this pool may hold together; the rest of it is unmapped.
        Raises:
            TooLargeError: the system gives no such mapping.
        """
        with self._lock:
            left = budget_bytes - sum(each.num_bytes for each in self._taken)
            size = min(-(-num_bytes // GRANULE_BYTES), left // GRANULE_BYTES) * GRANULE_BYTES
            if size <= 0:
                return None
            self._free.sort(key=lambda each: each.num_bytes)
            fitting = [each for each in self._free if size <= each.num_bytes <= left]
            growing = [each for each in self._free if each.num_bytes < size]
            arena = fitting[0] if fitting else self._grown(growing[-1], size) if growing else None
            if arena is not None:
                self._free.remove(arena)
            self._drop(left - (size if arena is None else arena.num_bytes))
            if arena is None:
                arena = Arena(size, shared=self.shared, kept_by_children=self._kept_by_children)
                self._prepare(arena)
            arena.clear()
            self._taken.append(arena)
            return arena

    def _grown(self, arena: Arena, size: int) -> Arena | None:
        self._dismiss(arena)
        found = arena.grow(size)
        self._prepare(arena)
        return arena if found else None

    def _drop(self, keep_bytes: int) -> None:
        """Unmap free arenas, the largest first, until they hold `keep_bytes` at most."""
        while self._free and sum(each.num_bytes for each in self._free) > keep_bytes:
            self._unmap(self._free.pop())

    def _unmap(self, arena: Arena) -> None:
        self._dismiss(arena)
        arena.close()

    def give(self, arena: Arena) -> None:
        """Take `arena` back; what it handed out must not be used any more."""
        with self._lock:
            self._taken.remove(arena)
            if self._closed:
                self._unmap(arena)
            else:
                self._free.append(arena)

    def close(self) -> None:
        """Unmap what is free, and the rest when it is given back."""
        with self._lock:
            self._closed = True
            self._drop(-1)


# ------------------------------------------------------------ copying


@dataclass(frozen=True, slots=True)
class Copy:
    """A box of a source, and the array of its shape, raw items, that it is copied to."""

    source: ArraySource
    box: Box
    target: Array


def new_copy(source: ArraySource, box: Box, item_bytes: int, memory: Array) -> Copy:
    """The copy of `box` into bytes of an arena."""
    return Copy(source, box, memory.view(raw_dtype(item_bytes)).reshape(box.sizes))


def elements_of(pieces: Iterable[tuple[Box, Array]], box: Box, item_bytes: int) -> Array:
    """The elements of `box`, which lies inside of one piece that was staged: its box, and raw items of its shape.

    Raises:
        InternalError: it does not.
    """
    seen = []
    for held, array in pieces:
        if held.sizes == box.sizes and held.offsets == box.offsets:
            return array
        if held.intersect(box) == box:
            return array[box.relative_to(held).slices]
        seen.append(held)
    if not box.num_elements:
        return np.empty(box.sizes, raw_dtype(item_bytes))
    raise InternalError(f"{box} is not inside of one piece that was staged: {seen}")


def copy_all(copies: Sequence[Copy], *, num_threads: int) -> None:
    """Copy all of them.

    Raises:
        Whatever a source raised first; no thread copies any more then.
    """
    run_all(_portions(copies), lambda: _copy_portion, num_threads=num_threads)


def _portions(copies: Iterable[Copy]) -> Iterator[list[Copy]]:
    """What one thread copies at a time, about `COPY_BYTES`; each copy is that of a stretch at most."""
    portion: list[Copy] = []
    num_bytes = 0
    for copy in copies:
        for part in _parts(copy):
            if portion and num_bytes + part.target.nbytes > COPY_BYTES:
                yield portion
                portion, num_bytes = [], 0
            portion.append(part)
            num_bytes += part.target.nbytes
    if portion:
        yield portion


def _parts(copy: Copy) -> Iterator[Copy]:
    if copy.target.nbytes <= COPY_BYTES:
        yield copy
        return
    for box in stretches(copy.box, max(1, COPY_BYTES // copy.target.itemsize)):
        yield Copy(copy.source, box, copy.target[box.relative_to(copy.box).slices])


def _copy_portion(portion: list[Copy]) -> None:
    for copy in portion:
        copy_into = getattr(copy.source, "copy_into", None)  # one test for many small ones: isinstance takes longer
        if copy_into is not None:
            copy_into(copy.box, copy.target)
        else:
            np.copyto(copy.target, as_raw(copy.source.read(copy.box), copy.target.itemsize))
