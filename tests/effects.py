"""Effects on a medium: counted, with the fault that a plan gives to one of them; and a disk whose power fails.

The story of a crash test:
    1. run the work once over `FaultyStore(inner)` and read `effects.count`: it has n effects;
    2. for every k up to n, run it over `FaultyStore(fresh inner, die_before(k))` (and
       `die_after(k)`) and catch `CrashNow`: from there on every call raises, as a dead process
       makes no calls;
    3. open the inner store again, as the next process would, and check what must hold.
An effect is what changes the medium: put, put_if_absent, compare_and_swap, delete, and write
and commit of a writer. Work that has effects elsewhere (the index) shares the count through
`Effects.perform`.

The story of a power test:
    1. `with watching(folder) as disk:` the work is done over `FileStore(folder)`; every primitive
       operation on files below it (create, write, sync, link, rename, unlink, mkdir, sync of a
       folder) is noted, in order, beside being done;
    2. for any moment `at` up to `disk.num_operations`, `disk.survivors(at, fate)` are the files
       that a computer finds whose power failed right then;
    3. put them into a store, open that as the next process would, and check what must hold.

Invariant: the same plan and the same work give the same outcome.
Must not know: what is stored. The index is not part of it: it is derived.
"""

from __future__ import annotations

import enum
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from cas_ckpt.errors import CkptError, OutOfSpaceError, StorageError, TransientStorageError
from cas_ckpt.storage import disk, file

T = TypeVar("T")

WRITES = frozenset({"put", "put_if_absent", "compare_and_swap", "write", "commit"})
"""Effects that need space."""

CONDITIONALS = frozenset({"put_if_absent", "compare_and_swap"})
"""Effects whose reply says who won."""


class CrashNow(BaseException):
    """The process "died" here; a BaseException, so that no handler of errors survives it."""


class Fault(enum.Enum):
    """Kinds of faults of an effect."""

    FAIL = "not done, raises"
    DIE_BEFORE = "not done, nothing happens any more"
    DIE_AFTER = "done, nothing happens any more"
    LOSE_REPLY = "done, raises as if it was not"


@dataclass(frozen=True, slots=True)
class Effect:
    """One effect that was asked for: the method's name, and the key."""

    name: str
    where: str


def _refuse(where: str) -> CkptError:
    return StorageError(f"{where}: refused by a fault that the test planned")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Which effect goes wrong, and how.

    Attributes:
        at: Number of the effect, counted from 1; 0 for none.
        fault: What happens to it.
        counted: Names of the effects that count; None for all.
        lasting: Every counted effect after it fares the same (a full disk stays full).
        error: What FAIL and LOSE_REPLY raise, given the key.
    """

    at: int = 0
    fault: Fault = Fault.FAIL
    counted: frozenset[str] | None = None
    lasting: bool = False
    error: Callable[[str], Exception] = _refuse

    def strikes(self, number: int) -> bool:
        """True if counted effect `number` goes wrong."""
        return 0 < self.at == number or (self.lasting and 0 < self.at < number)


def die_before(k: int) -> FaultPlan:
    """Die instead of doing effect `k`."""
    return FaultPlan(k, Fault.DIE_BEFORE)


def die_after(k: int) -> FaultPlan:
    """Do effect `k`, then die before anybody hears of it."""
    return FaultPlan(k, Fault.DIE_AFTER)


def fail_at(k: int, error: Callable[[str], Exception] = _refuse) -> FaultPlan:
    """Raise `error(key)` instead of doing effect `k`."""
    return FaultPlan(k, Fault.FAIL, error=error)


def no_space_from(k: int) -> FaultPlan:
    """The disk is full from the `k`-th write on; deleting still works."""
    return FaultPlan(
        k, Fault.FAIL, WRITES, lasting=True, error=lambda where: OutOfSpaceError(f"writing {where}: no space left")
    )


def lose_reply(k: int) -> FaultPlan:
    """Do the `k`-th conditional write, then raise as if the connection had broken."""
    return FaultPlan(
        k, Fault.LOSE_REPLY, CONDITIONALS, error=lambda where: TransientStorageError(f"{where}: the reply was lost")
    )


class Effects:
    """Counts effects and gives one its fault; may be shared by a store and an index."""

    def __init__(self, plan: FaultPlan | None = None) -> None:
        self.plan = plan or FaultPlan()
        self.log: list[Effect] = []
        self.dead = False
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Counted effects so far, the one that went wrong included."""
        return len(self.log)

    def require_alive(self) -> None:
        """Raise CrashNow once the plan has struck dead: a dead process does not even read."""
        if self.dead:
            raise CrashNow("this process died at an earlier effect")

    def perform(self, name: str, where: str, action: Callable[[], T]) -> T:
        """Do `action` as effect `name` on `where`, with the fault that the plan gives to it, if any."""
        self.require_alive()
        fault = self._fault_of(Effect(name, where))
        if fault is Fault.DIE_BEFORE:
            self._die(where)
        if fault is Fault.FAIL:
            raise self.plan.error(where)
        result = action()
        if fault is Fault.DIE_AFTER:
            self._die(where)
        if fault is Fault.LOSE_REPLY:
            raise self.plan.error(where)
        return result

    def _fault_of(self, effect: Effect) -> Fault | None:
        if self.plan.counted is not None and effect.name not in self.plan.counted:
            return None
        with self._lock:
            self.log.append(effect)
            return self.plan.fault if self.plan.strikes(len(self.log)) else None

    def _die(self, where: str) -> None:
        self.dead = True
        raise CrashNow(f"died at effect {self.count}, {where}")


# --- a disk whose power fails ---------------------------------------------------------------

_MODULES: tuple[ModuleType, ...] = (disk, file)
"""The modules whose operations on files are watched."""


@dataclass(eq=False, slots=True)
class _File:
    """A file, whatever its names: its bytes, and how many of its first writes were synced."""

    is_folder: bool = False
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


Operation = Callable[["_Medium"], None]

Fate = Callable[[int], int]
"""Of `n` possibilities, counted from 0 (all that was not synced is lost) to n - 1, the one that comes true."""


def lose_all(possibilities: int) -> int:
    """The fate in which nothing survives that was not synced."""
    return 0


def keep_all(possibilities: int) -> int:
    """The fate in which everything survives, as when only the process died."""
    return possibilities - 1


def by_chance(seed: int) -> Fate:
    """A fate in which anything may happen; the same for the same seed."""
    return random.Random(seed).randrange


class _Medium:
    """Files as the operations leave them: names that are durable, and changes of names that are not yet."""

    def __init__(self) -> None:
        self.durable: dict[str, int | None] = {}
        self.pending: dict[str, list[int | None]] = {}
        self.files: dict[int, _File] = {}

    def name(self, path: str, number: int | None) -> None:
        """Let `path` be a name of a file, or of none."""
        self.pending.setdefault(path, []).append(number)

    def sync_folder(self, folder: str) -> None:
        """Make the names in `folder` durable."""
        for path in [path for path in self.pending if os.path.dirname(path) == folder]:
            self.durable[path] = self.pending.pop(path)[-1]

    def survivors(self, fate: Fate) -> dict[str, bytes]:
        """Path -> bytes of the files that are found after the power failed."""
        names = dict(self.durable)
        for path, changes in self.pending.items():
            came_true = fate(len(changes) + 1)
            if came_true:
                names[path] = changes[came_true - 1]
        found = {}
        for path, number in names.items():
            if number is not None and not self.files[number].is_folder and self._is_reached(path, names):
                found[path] = self._content(self.files[number], fate)
        return found

    def _is_reached(self, path: str, names: dict[str, int | None]) -> bool:
        """Whether every folder above `path` has its name."""
        while path := os.path.dirname(path):
            if names.get(path) is None:
                return False
        return True

    def _content(self, one: _File, fate: Fate) -> bytes:
        now = bytes(one.data)
        if now == one.synced:
            return now
        return (one.synced, bytes(len(now)), now[: len(now) // 2], now)[fate(4)]


class WatchedDisk:
    """Records changes to the files below `root`, and which of them survive a power failure.

    The model is as strict as POSIX allows: bytes are on the medium once their file was synced, a name
    (new, changed or removed) once its folder was; a file's sync says nothing of its name. Until then
    every subset of the changes of names may survive, in any order between different names, and of the
    bytes of a file nothing, all, a part, or zeros in their place. What was synced before survives always.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.fspath(root)
        self._lock = threading.RLock()
        self._journal: list[Operation] = []
        self._numbers: dict[str, int] = {}
        self._open: dict[int, int | str] = {}
        self._num_files = 0

    @property
    def num_operations(self) -> int:
        """Operations so far; also the moment that is now, for `survivors`."""
        return len(self._journal)

    def survivors(self, at: int, fate: Fate) -> dict[str, bytes]:
        """Path below the root -> bytes of every file that is found if the power failed after `at` operations."""
        medium = _Medium()
        for operation in self._journal[:at]:
            operation(medium)
        return medium.survivors(fate)

    # --- what the store calls in place of os ----------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        with self._lock:
            fd = os.open(path, flags, mode)
            inside = self._inside(path)
            self._open.pop(fd, None)
            if inside is None:
                return fd
            if flags & os.O_DIRECTORY:
                self._open[fd] = inside
            elif flags & os.O_CREAT and inside not in self._numbers:
                self._open[fd] = self._created(inside, is_folder=False)
            elif inside in self._numbers:
                self._open[fd] = self._numbers[inside]
            return fd

    def write(self, fd: int, data: Any) -> int:
        with self._lock:
            number, done = self._open.get(fd), os.write(fd, data)
            if isinstance(number, int):
                written = bytes(memoryview(data).cast("B")[:done])
                self._journal.append(lambda medium: medium.files[number].data.extend(written))
            return done

    def fsync(self, fd: int) -> None:
        with self._lock:
            os.fsync(fd)
            what = self._open.get(fd)
            if isinstance(what, str):
                self._journal.append(lambda medium: medium.sync_folder(what))
            elif what is not None:
                self._journal.append(lambda medium: _sync(medium.files[what]))

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        with self._lock:
            os.mkdir(path, mode)
            if inside := self._inside(path):
                self._created(inside, is_folder=True)

    def link(self, source: Any, target: Any) -> None:
        with self._lock:
            os.link(source, target)
            self._named(self._inside(target), self._numbers.get(self._inside(source) or ""))

    def replace(self, source: Any, target: Any) -> None:
        with self._lock:
            os.replace(source, target)
            before = self._inside(source)
            self._named(self._inside(target), self._numbers.get(before or ""))
            self._named(before, None)

    rename = replace

    def unlink(self, path: Any) -> None:
        with self._lock:
            os.unlink(path)
            self._named(self._inside(path), None)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    # --- the journal ----------------------------------------------------------------------

    def _inside(self, path: Any) -> str | None:
        """The path below the root ("" for the root itself); None if it is elsewhere."""
        whole = os.fspath(path)
        if whole == self._root:
            return ""
        return whole[len(self._root) + 1 :] if whole.startswith(self._root + os.sep) else None

    def _created(self, inside: str, *, is_folder: bool) -> int:
        self._num_files += 1
        number = self._num_files
        self._journal.append(lambda medium: medium.files.__setitem__(number, _File(is_folder)))
        self._named(inside, number)
        return number

    def _named(self, inside: str | None, number: int | None) -> None:
        if inside is None:
            return
        if number is None:
            self._numbers.pop(inside, None)
        else:
            self._numbers[inside] = number
        self._journal.append(lambda medium: medium.name(inside, number))


def _sync(one: _File) -> None:
    one.synced = bytes(one.data)


@contextmanager
def watching(root: str | os.PathLike[str]) -> Iterator[WatchedDisk]:
    """Note what stores of files do below `root`, a folder that is there and empty, inside the block.

    All file stores of the process go through it meanwhile; one block at a time.
    """
    watched = WatchedDisk(Path(root).absolute())
    for module in _MODULES:
        module.os = watched  # type: ignore[attr-defined]
    try:
        yield watched
    finally:
        for module in _MODULES:
            module.os = os  # type: ignore[attr-defined]
