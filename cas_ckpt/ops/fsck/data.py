"""fsck --read-data: which packs are read whole this time, and reading them.

Invariant: choosing is pure but for the dice that it is given; a pack counts as checked only when
every byte of every entry was read and hashed, and only then does the scrub log say so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Lock
from types import MappingProxyType

from cas_ckpt import clock
from cas_ckpt.core.units import PackShard, parse_part, parse_share, parse_size
from cas_ckpt.errors import CkptError, CorruptionError, InvalidInputError, NotFoundError, UnsupportedVersionError
from cas_ckpt.index import integrity, restores
from cas_ckpt.index.index import Index
from cas_ckpt.index.integrity import Scrub
from cas_ckpt.objects.pack import PACK_PREFIX, ExtentInfo, is_pack
from cas_ckpt.ops.fsck.report import Findings
from cas_ckpt.ops.fsck.structure import Structure, scan_all
from cas_ckpt.parallel.workers import map_all, thread_count
from cas_ckpt.progress import Progress, phase
from cas_ckpt.storage.store import Store, exists
from cas_ckpt.transfer.scan import BadExtent, ScanUnit, scan_units, unit_bytes_of, verify_units
from cas_ckpt.transfer.sources import requests_at_once


@dataclass(frozen=True, slots=True)
class Subset:
    """A part of the packs: part `part` of `parts`, a share of them, or some bytes of them, in restic's words."""

    part: int = 0
    parts: int = 0
    share: float | None = None
    num_bytes: int | None = None


def parse_subset(text: str) -> Subset:
    """The subset that `text` ("5%", "2/7", "10G") means.

    Raises:
        InvalidInputError: another form, or nothing at all.
    """
    if "/" in text:
        subset = Subset(*parse_part(text) or ())
    elif text.endswith("%"):
        subset = Subset(share=parse_share(text) or None)
    else:
        subset = Subset(num_bytes=parse_size(text) or None)
    if subset == Subset():
        raise InvalidInputError(
            f"{text!r} is not a part of the data: give 5%, 2/7 (the second of seven) or a size such as 10GB"
        )
    return subset


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How much data is read.

    Attributes:
        shard: Only these packs, of which the other options are about; None: all.
        subset: Only this part of the packs; None: all.
        max_duration_s: No pack is begun after so many seconds.
        max_age_s: Packs that were read whole, and found intact, since then are passed over.
        dice: Draws the packs of a random subset.
    """

    subset: Subset | None = None
    max_duration_s: float | None = None
    max_age_s: float | None = None
    dice: random.Random = field(default_factory=random.SystemRandom)
    shard: PackShard | None = None

    def __post_init__(self) -> None:
        if self.shard is not None and self.subset is not None and self.subset.parts:
            raise InvalidInputError("a shard and a part of N divide packs in the same way: give one of them")


def choose_packs(
    packs: Mapping[str, int],
    options: DataOptions,
    scrubs: Mapping[str, Scrub],
    *,
    now_us: int,
    proven: Mapping[str, int] = MappingProxyType({}),
    remembers: bool = True,
) -> list[str]:
    """The packs to read, those first that were read whole longest ago, or never; a clock that was ahead does not count.

    Args:
        scrubs: When each pack was checked.
        proven: When restores had last read all that is in a pack: that counts as well for the order, not for
            `max_age_s`, as a restore reads one copy of each chunk, and no nodes.
        remembers: What is read now will be in `scrubs` next time; else a share is drawn by chance alone, so that it is
            not the same each time.
    """
    if options.shard is not None:
        packs = {key: packs[key] for key in options.shard.of(packs)}
    read_us = ((key, (scrubs[key].checked_us if key in scrubs else 0, proven.get(key, 0))) for key in packs)
    last_us = {key: max((moment for moment in moments if moment <= now_us), default=0) for key, moments in read_us}
    chosen = _choose_subset(packs, options.subset, options.dice, last_us if remembers else {})
    if options.max_age_s is not None:
        since_us = now_us - int(options.max_age_s * 1e6)
        intact = {key for key, scrub in scrubs.items() if scrub.damage is None}
        chosen = [key for key in chosen if key not in intact or not since_us <= scrubs[key].checked_us <= now_us]
    return sorted(chosen, key=lambda key: (last_us[key], key))


def _choose_subset(
    packs: Mapping[str, int], subset: Subset | None, dice: random.Random, last_us: Mapping[str, int]
) -> list[str]:
    """The packs of the subset; of a share or a size those that come first by `last_us`, among equals by chance."""
    ordered = sorted(packs)
    dice.shuffle(ordered)
    ordered.sort(key=lambda key: last_us.get(key, 0))
    if subset is None:
        return ordered
    if subset.parts:  # a pack belongs to one part for ever: by its name, which is random
        return PackShard(subset.part, subset.parts).of(ordered)
    if subset.share is not None:
        return ordered[: math.ceil(len(ordered) * subset.share)]
    before = accumulate((packs[key] for key in ordered), initial=0)
    return [key for key, num_bytes in zip(ordered, before, strict=False) if num_bytes < (subset.num_bytes or 0)]


def read_data(
    store: Store, structure: Structure, packs: Mapping[str, int], findings: Findings, options: DataOptions, *,
    progress: Progress,
) -> None:  # fmt: skip
    """Read and verify every entry of those of `packs` that are chosen; what is damaged goes into `structure`."""
    log = structure.index if structure.is_own else None
    scrubs = {} if log is None else log.read(integrity.read_scrubs)
    proven = {} if log is None else log.read(restores.proven_packs)
    remembers = log is not None and not log.read_only
    chosen = choose_packs(packs, options, scrubs, now_us=_now_us(), proven=proven, remembers=remembers)
    reading = _Reading(store, structure, log, options)
    with phase(progress, "reading data", sum(packs[key] for key in chosen)):
        num_threads = thread_count()
        verify_units(store, reading.units(chosen), done=reading.done, num_threads=num_threads, progress=progress)
    findings.count("read_bytes", reading.read_bytes)
    findings.count("read_packs", reading.read_packs)
    own = packs if options.shard is None else options.shard.of(packs)
    findings.count("skipped_packs", len(own) - reading.read_packs)


def _now_us() -> int:
    return int(clock.now_s() * 1e6)


@dataclass(slots=True)
class _PackInProgress:
    """A pack that is being read.

    Attributes:
        left: Units that are not read yet, as far as they are handed out; one more until all are.
    """

    left: int = 1
    num_bytes: int = 0
    damage: list[BadExtent] = field(default_factory=list)


class _Reading:
    """Hands out the units of packs and gathers what was found. Threads call `done`."""

    def __init__(self, store: Store, structure: Structure, log: Index | None, options: DataOptions) -> None:
        self._store = store
        self._structure = structure
        self._log = log
        self._ends_s = None if options.max_duration_s is None else clock.monotonic_s() + options.max_duration_s
        self._lock = Lock()
        self._open: dict[str, _PackInProgress] = {}
        self.read_bytes = self.read_packs = 0

    def units(self, keys: Sequence[str]) -> Iterator[ScanUnit]:
        """The units of these packs, until time is up."""
        unit_bytes, at_once = unit_bytes_of(self._store), requests_at_once(self._store)
        for first in range(0, len(keys), at_once):
            batch = keys[first : first + at_once]  # their directories together: meanwhile nothing else is handed out
            for key, entries in zip(batch, map_all(self._entries, batch, num_threads=at_once), strict=True):
                if self._ends_s is not None and clock.monotonic_s() >= self._ends_s:
                    return
                if entries is None:
                    continue
                with self._lock:
                    self._open[key] = _PackInProgress()
                for unit in scan_units(key, entries, unit_bytes=unit_bytes):
                    with self._lock:
                        self._open[key].left += 1
                    yield unit
                self._finish(key, 0, [])

    def _entries(self, key: str) -> Sequence[ExtentInfo] | None:
        """The entries of a pack; None if its structure was reported as damaged, or it was collected since."""
        try:
            return self._structure.entries(self._store, key)
        except (CorruptionError, NotFoundError, UnsupportedVersionError):
            return None

    def done(self, unit: ScanUnit, bad: list[BadExtent]) -> None:
        """One unit was read."""
        self._finish(unit.pack, unit.num_bytes, bad)

    def _finish(self, key: str, num_bytes: int, bad: list[BadExtent]) -> None:
        with self._lock:
            state = self._open[key]
            state.left -= 1
            state.num_bytes += num_bytes
            state.damage += bad
            if state.left:
                return
            del self._open[key]
            self.read_bytes += state.num_bytes
            self.read_packs += 1
            self._structure.add_bad(state.damage)
        damage = state.damage[0].what if state.damage else None
        if key in self._structure.broken:
            damage = damage or self._structure.broken[key].broken
        if self._log is None or self._log.read_only:
            return
        try:
            self._log.write(integrity.write_scrub, Scrub(key, _now_us(), state.num_bytes, damage))
        except CkptError:
            self._log = None  # the log only saves time: that it cannot be written is not an error


# --- one job's share --------------------------------------------------------------------------
#
# What a job does grows with its share alone: no ref is read, and no index is needed but for the log of readings. Shard
# 1 looks at the rest besides its own share: records, refs, the structure of all packs, the index, and what is in no
# pack. Only a job that found damage looks at the structure of all packs too, to say whom that hits (check.py).


def check_share(
    store: Store, index: Index | None, shard: PackShard, data: DataOptions, findings: Findings, *, progress: Progress
) -> Structure:
    """Check the packs of `shard`, for shards from 2 on; together all jobs find what one check of everything finds.

    Args:
        index: Has the log of readings; None: nothing is remembered.
    """
    share = Structure({key: size for key, size in store.list(PACK_PREFIX) if is_pack(key) and shard.has(key)})
    findings.count("num_packs", len(share.packs))
    scan_all(store, None, share, findings, progress)
    if index is not None:
        try:
            index.read(integrity.read_scrubs)
            share.index, share.is_own = index, True
        except CkptError as error:  # shard 1 says more of it
            findings.note(index.place, f"the log of readings cannot be used: {error}")
    read_data(store, share, share.packs, findings, data, progress=progress)
    share.drop([key for key in share.damaged if not exists(store, key)])  # collected meanwhile
    return share
