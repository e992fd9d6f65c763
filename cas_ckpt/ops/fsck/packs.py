"""fsck of packs: every pack and node once, whether the index says what they say, and, if asked for, every byte.

    1. every pack: header, trailer, directory, and its nodes, verified by id
    2. the index's rows of that pack are the same                       (index/integrity.py)
    3. an index that agrees is used for the questions that follow; else one is made for the check,
       in a temporary folder, from what the packs say
    4. of the data, the packs that are read whole this time are chosen, and read

Invariant: nothing of the repository is changed, but that the index takes in intact packs that it did not know, as with
any command, and the log of readings. What a pack says is reported as far as anything in it can be believed: where its
directory is lost, its entries are found again by their own headers. A pack counts as read only when every byte of every
entry was read and hashed, and only then does the log say so; choosing is pure but for the dice that it is given. Memory
grows with the damage and with one batch of packs, not with the repository.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from threading import Lock
from types import MappingProxyType

from cas_ckpt import clock
from cas_ckpt.arguments import check_real, one_text
from cas_ckpt.core.packs import WHOLE_BYTES, hints_problem, is_meta, pack_batches, read_directory
from cas_ckpt.core.records import NodeRows
from cas_ckpt.core.units import PackShard, parse_part, parse_share, parse_size
from cas_ckpt.errors import (
    CkptError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
    UnsupportedVersionError,
)
from cas_ckpt.index import integrity, remembered
from cas_ckpt.index.index import Index, disorder
from cas_ckpt.index.integrity import UNKNOWN, Scrub
from cas_ckpt.index.rows import PackRecord
from cas_ckpt.memory import python_gc_paused
from cas_ckpt.objects import pack
from cas_ckpt.objects.digest import ObjectKind
from cas_ckpt.objects.pack import DIRECTORY_ENTRY_BYTES, PACK_PREFIX, ExtentInfo, PackKind, is_pack
from cas_ckpt.ops.fsck.report import Findings
from cas_ckpt.parallel.workers import map_all, thread_count
from cas_ckpt.progress import Progress, phase
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Store, exists
from cas_ckpt.transfer.scan import (
    BadExtent,
    ExtentScanner,
    ScanUnit,
    find_entries,
    scan_units,
    unit_bytes_of,
    verify_units,
)
from cas_ckpt.transfer.sources import requests_at_once

_MOST_NAMED = 5


@dataclass(slots=True)
class PackFinding:
    """Entries of one pack, and its damage.

    Attributes:
        broken: Why its structure (header, trailer, directory) cannot be relied on; None if it can.
        is_listed: Its directory is intact, so that a new index would know its entries.
        entries: What its directory names, or what was found in it without one.
        bad: Entries that are damaged: nodes only.
        rows: What its intact nodes say.
        hints: Why its hints cannot be used; None if they can, or there are none.
    """

    key: str
    size_bytes: int
    kind: PackKind
    broken: str | None = None
    is_listed: bool = True
    entries: list[ExtentInfo] = field(default_factory=list)
    bad: list[BadExtent] = field(default_factory=list)
    rows: NodeRows = field(default_factory=NodeRows)
    hints: str | None = None

    @property
    def record(self) -> PackRecord:
        """The rows that the index should have of it."""
        edges, commits, contents = self.rows.edges, self.rows.commits, self.rows.contents
        return PackRecord(self.key, self.kind, self.size_bytes, self.entries, edges, commits, contents=contents)


@dataclass(slots=True)
class Structure:
    """Structure of all packs.

    Attributes:
        packs: Every pack -> its size.
        broken: Packs whose header, trailer or directory is damaged, with what was found in them.
        bad: Damaged entries, by pack.
        differing: Packs of which the index says other things -> what.
        index: An index that agrees with the intact packs.
        is_own: It is the repository's own, not one made for this check.
    """

    packs: dict[str, int]
    index: Index = field(init=False)
    broken: dict[str, PackFinding] = field(default_factory=dict)
    bad: dict[str, list[BadExtent]] = field(default_factory=dict)
    differing: dict[str, str] = field(default_factory=dict)
    is_own: bool = False

    @property
    def damaged(self) -> list[str]:
        """Packs in which something is damaged, sorted."""
        return sorted(self.broken.keys() | self.bad.keys())

    def add_bad(self, found: Iterable[BadExtent]) -> None:
        """Add damaged entries, each once."""
        for extent in found:
            known = self.bad.setdefault(extent.pack, [])
            if all(other.info.offset != extent.info.offset for other in known):
                known.append(extent)

    def add(self, other: Structure) -> None:
        """Add what is damaged in packs of `other`, which were looked at before."""
        self.broken.update(other.broken)
        for found in other.bad.values():
            self.add_bad(found)

    def entries(self, store: Store, key: str) -> Sequence[ExtentInfo]:
        """Entries of a pack by its directory, or as found by their headers if that is broken.

        Raises:
            NotFoundError: it is gone. CorruptionError, UnsupportedVersionError: of a pack that is damaged since.
        """
        return self.broken[key].entries if key in self.broken else read_directory(store, key)[1]

    def is_listed(self, key: str) -> bool:
        """Whether the directory of a pack is intact."""
        return key not in self.broken or self.broken[key].is_listed

    def drop(self, keys: Iterable[str]) -> None:
        """Leave out packs that are gone, with what was found in them."""
        for key in keys:
            self.packs.pop(key, None)
            self.broken.pop(key, None)
            self.bad.pop(key, None)


@contextmanager
def checked_structure(
    store: Store, index: Index | None, findings: Findings, *, progress: Progress
) -> Iterator[Structure]:
    """Look at all packs; what they say, with an index that agrees as long as the block lasts.

    Args:
        index: The repository's own; None if it cannot be opened.
    """
    listed = dict(store.list(PACK_PREFIX))
    structure = Structure({key: size for key, size in listed.items() if is_pack(key)})
    for key in sorted(listed.keys() - structure.packs.keys()):
        findings.note(key, "not a pack: no pack has such a name")
    findings.count("num_packs", len(structure.packs))
    usable = scan_all(store, index, structure, findings, progress)
    if usable and index is not None and _agrees(index, structure, findings):
        structure.index, structure.is_own = index, True
        yield structure
        return
    with (
        tempfile.TemporaryDirectory(prefix="cas-ckpt-fsck-") as folder,
        Index.open(Path(folder) / "index.sqlite", store_id="fsck") as made,
    ):
        add_scanned(store, made, structure.packs.items())
        structure.index = made
        yield structure


def catch_up(store: Store, structure: Structure) -> None:
    """Take in packs that were written while others were looked at: a collection may have moved things there."""
    listed = [(key, size) for key, size in store.list(PACK_PREFIX) if is_pack(key)]
    new = [(key, size) for key, size in listed if key not in structure.packs]
    known = structure.index.packs()
    if not structure.index.read_only:
        found = [finding for finding in scan_packs(store, new) if finding.key not in known]
        whole = [finding for finding in found if not finding.bad and finding.is_listed]
        structure.index.add_packs([finding.record for finding in (whole if structure.is_own else found)])
    structure.packs.update(new)


def add_scanned(store: Store, index: Index, packs: Iterable[tuple[str, int]]) -> None:
    """Add to `index` what these packs say, damaged ones as far as anything in them can be believed."""
    for batch in pack_batches(packs):
        index.add_packs([finding.record for finding in scan_packs(store, batch)])


# --- what the packs say ---------------------------------------------------------------------


@python_gc_paused()
def scan_all(store: Store, index: Index | None, structure: Structure, findings: Findings, progress: Progress) -> bool:
    """Fill `structure`; whether the index could be asked about all of it."""
    usable = index is not None
    with phase(progress, "checking packs", None):
        for batch in pack_batches(structure.packs.items()):
            found = list(scan_packs(store, batch))
            read_bytes = 0
            for finding in found:
                nodes = [info.stored_bytes for info in finding.entries if info.kind != ObjectKind.CHUNK]
                findings.count("num_entries", len(finding.entries))
                findings.count("num_nodes", len(nodes))
                structure.add_bad(finding.bad)
                if finding.hints is not None:
                    findings.note(
                        finding.key,
                        f"its hints cannot be used ({finding.hints}): nothing is lost, readers look at all packs "
                        "instead; repack leaves them out",
                    )
                if finding.broken is not None:
                    structure.broken[finding.key] = finding
                read_bytes += sum(nodes) + len(finding.entries) * DIRECTORY_ENTRY_BYTES
            progress.advance(read_bytes)
            if usable and index is not None:
                try:
                    records = [each.record for each in found]
                    structure.differing.update(index.read(integrity.differences, records))
                except CorruptionError as error:
                    findings.index_problem(index.place, str(error))
                    usable = False
    return usable


def scan_packs(store: Store, packs: Iterable[tuple[str, int]]) -> Iterator[PackFinding]:
    """Findings of each pack; packs that are gone meanwhile, or of a newer version, are left out.

    Raises:
        PermissionDeniedError: they may not be read. TransientStorageError: the store cannot be reached.
    """
    at_once, waiting = requests_at_once(store), iter(packs)
    while batch := list(islice(waiting, at_once)):
        for finding in map_all(partial(_scan_one, store), batch, num_threads=at_once):
            if finding is not None:
                yield finding


def _scan_one(store: Store, listed: tuple[str, int]) -> PackFinding | None:
    key, size = listed
    memory = MemoryStore(url=store.url)
    most = WHOLE_BYTES if is_meta(key) and not store.abilities.local else pack.TAIL_GUESS_BYTES
    try:
        if size <= most and _copy_to_memory(store, key, memory):
            return _scan_pack(memory, key, size, ExtentScanner(memory))
        return _scan_pack(store, key, size, ExtentScanner(store))
    except (NotFoundError, UnsupportedVersionError):
        return None


def _copy_to_memory(store: Store, key: str, memory: MemoryStore) -> bool:
    """Copy a small pack into memory by one read, where header, directory and nodes would take one each.

    False if the medium refuses, for parts of it may still be read, or if it is larger than was listed.
    """
    try:
        size, data = store.get_tail(key, WHOLE_BYTES)
    except (NotFoundError, PermissionDeniedError, TransientStorageError):
        raise
    except StorageError:
        return False
    if len(data) == size:
        memory.put(key, data)
    return len(data) == size


def _scan_pack(store: Store, key: str, size: int, scanner: ExtentScanner) -> PackFinding:
    """Findings of the pack `key` of `size` bytes.

    Raises:
        NotFoundError: it is gone. UnsupportedVersionError: it is of a newer version.
    """
    finding = PackFinding(key, size, PackKind.META if is_meta(key) else PackKind.DATA)
    try:
        trailer, finding.entries = read_directory(store, key)
        finding.kind = trailer.kind
        finding.broken = _header_problem(store, key, finding.kind)
        finding.hints = hints_problem(store, key, trailer, finding.entries)
    except (PermissionDeniedError, TransientStorageError):
        raise
    except (CorruptionError, StorageError) as error:
        finding.broken, finding.is_listed = str(error), False
        finding.entries = list(find_entries(store, key, size))
    _scan_nodes(finding, scanner)
    return finding


def _header_problem(store: Store, key: str, kind: PackKind) -> str | None:
    try:
        name, header_kind = pack.decode_header(store.get_range(key, 0, pack.HEADER_BYTES))
    except (PermissionDeniedError, TransientStorageError):
        raise
    except (CorruptionError, StorageError) as error:
        return f"its header: {error}"
    if name.hex() not in key or header_kind is not kind:
        return f"its header says that it is {name.hex()}.{header_kind.suffix}"
    return None


def _scan_nodes(finding: PackFinding, scanner: ExtentScanner) -> None:
    nodes = sorted((info for info in finding.entries if info.kind != ObjectKind.CHUNK), key=lambda info: info.offset)
    malformed: list[BadExtent] = []

    def add_node(info: ExtentInfo, data: bytes) -> None:
        try:
            finding.rows.add(info.kind, info.digest, data)
        except CorruptionError as error:
            malformed.append(BadExtent(finding.key, info, f"{info.kind.label} {info.digest.hex()[:12]}: {error}"))
        except UnsupportedVersionError:
            return

    finding.bad = scanner.check(ScanUnit(finding.key, nodes), seen=add_node) + malformed


# --- what the index says --------------------------------------------------------------------


def _agrees(index: Index, structure: Structure, findings: Findings) -> bool:
    """Whether the index can be relied on; if not, that becomes a problem or a note."""
    try:
        known = index.packs()
        damage = index.read(disorder)
        stray = index.read(integrity.stray_rows)
        clean = not structure.differing or _agrees_except_differences(index, structure, findings)
        gone = [key for key in known if key not in structure.packs and not exists(findings.store, key)]
        if gone:
            findings.note(
                gone[0],
                f"{len(gone)} packs that the index knows are gone from the store, this one among them: "
                "the index forgets them with the next command",
            )
        if damage:
            findings.index_problem(index.place, f"the database finds itself damaged: {'; '.join(damage[:3])}")
        if stray:
            findings.index_problem(index.place, f"it says more than packs say: {'; '.join(stray)}")
        return clean and not damage and not stray
    except CkptError as error:
        findings.index_problem(index.place, str(error))
        return False


def _agrees_except_differences(index: Index, structure: Structure, findings: Findings) -> bool:
    """Report rows that differ; whether the index may be used all the same.

    A pack that was unknown when it was compared is only behind, though another process may have added it since: what
    the index knows now says nothing about the moment of the comparison.
    """
    intact = {key: what for key, what in structure.differing.items() if structure.is_listed(key)}
    behind = [key for key, what in intact.items() if what == UNKNOWN]
    wrong = [key for key, what in intact.items() if what != UNKNOWN]
    if behind:
        findings.note(index.place, f"{len(behind)} packs were not in it yet")
    if behind and not wrong and not index.read_only:
        whole = [key for key in behind if key not in structure.bad]  # others have no rows of what is damaged in them
        add_scanned(findings.store, index, [(key, structure.packs[key]) for key in whole])
        behind = [key for key in behind if key in structure.bad]
    if wrong:
        shown = "; ".join(f"{key}: {intact[key]}" for key in wrong[:_MOST_NAMED])
        more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        findings.index_problem(index.place, f"it does not say what {len(wrong)} packs say: {shown}{more}")
    if behind or wrong:
        return False
    # Of a pack without its directory, the index has to know all that was found in it.
    unlisted = [
        finding for key, finding in structure.broken.items() if key in structure.differing and key not in intact
    ]
    view = integrity.IntegrityView(index)
    return all({info.offset for info in each.entries} <= view.places(each.key).keys() for each in unlisted)


# --- the data: which packs are read this time, and reading them -------------------------------


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
    if "/" in one_text("subset", text):
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
        for name in ("max_duration_s", "max_age_s"):
            if getattr(self, name) is not None:
                check_real(name, getattr(self, name))


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
    proven = {} if log is None else log.read(remembered.proven_packs)
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
# pack. Only a job that found damage looks at the structure of all packs too, to say which commits that hits (check.py).


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
