"""fsck of structure: every pack and node once, and whether the index says what they say.

    1. every pack: header, trailer, directory, and its nodes by id       (ops/fsck/structure.py)
    2. the index's rows of that pack are the same                       (index/integrity.py)
    3. an index that agrees is used for the questions that follow; else one is made for the check,
       in a temporary folder, from what the packs said

Invariant: nothing of the repository is changed, but that the index takes in packs that it did not know, as
with any command. Memory grows with the damage and with one batch
of packs, not with the repository.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cas_ckpt.core.packs import collector_paused, commit_row, node_children, pack_batches, read_directory
from cas_ckpt.errors import (
    CkptError,
    CorruptionError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    UnsupportedVersionError,
)
from cas_ckpt.index import integrity
from cas_ckpt.index.index import Index
from cas_ckpt.index.integrity import UNKNOWN
from cas_ckpt.index.rows import CommitRow, PackRecord
from cas_ckpt.objects import pack
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import decode_layout
from cas_ckpt.objects.pack import DIRECTORY_ENTRY_BYTES, PACK_PREFIX, ExtentInfo, PackKind
from cas_ckpt.ops.fsck.report import Effect, Findings, ProblemKind, RepairKind
from cas_ckpt.progress import Progress
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.scan import BadExtent, ExtentScanner, ScanUnit, find_entries

# DOC of cas_ckpt.ops.fsck.structure:
# fsck of packs: header, trailer and directory of each, and every node in it, verified by id.
#
# Invariant: what a pack says is told as far as anything in it can be believed: where its directory is
# lost, its entries are found again by their own headers. One pack at a time in memory.
#

_WITH_EDGES = (ObjectKind.TREE, ObjectKind.TREE_PAGE, ObjectKind.TENSOR, ObjectKind.CHUNK_PAGE)


@dataclass(slots=True)
class PackFinding:
    """What one pack holds and what is wrong with it.

    Attributes:
        broken: Why its structure (header, trailer, directory) cannot be relied on; None if it can.
        is_listed: Its directory is intact, so that a new index would know its entries.
        entries: What its directory names, or what was found in it without one.
        bad: Entries that are damaged: nodes only.
        edges, commits: What its intact nodes say.
    """

    key: str
    size_bytes: int
    kind: PackKind
    broken: str | None = None
    is_listed: bool = True
    entries: list[ExtentInfo] = field(default_factory=list)
    bad: list[BadExtent] = field(default_factory=list)
    edges: list[tuple[bytes, tuple[bytes, ...]]] = field(default_factory=list)
    commits: list[CommitRow] = field(default_factory=list)

    @property
    def num_nodes(self) -> int:
        """How many of its entries are nodes."""
        return sum(info.kind != ObjectKind.CHUNK for info in self.entries)

    @property
    def record(self) -> PackRecord:
        """The rows that the index should have of it."""
        return PackRecord(self.key, self.kind, self.size_bytes, self.entries, self.edges, self.commits)


def scan_packs(store: Store, packs: Iterable[tuple[str, int]]) -> Iterator[PackFinding]:
    """What each pack holds; packs that are gone meanwhile, or of a newer version, are left out."""
    scanner = ExtentScanner(store)
    held = MemoryStore(url=store.url)
    of_held = ExtentScanner(held)
    for key, size in packs:
        try:
            if size <= pack.TAIL_GUESS_BYTES and _hold(store, key, held):
                yield scan_pack(held, key, size, of_held)
                held.delete(key)
            else:
                yield scan_pack(store, key, size, scanner)
        except (NotFoundError, UnsupportedVersionError):
            held.delete(key)


def _hold(store: Store, key: str, held: MemoryStore) -> bool:
    """Put a small pack into memory by one read, where header, directory and nodes would take one each.

    False if the medium refuses, for parts of it may still be read, or if it is larger than was listed.
    """
    try:
        size, data = store.get_tail(key, pack.TAIL_GUESS_BYTES)
    except (NotFoundError, PermissionDeniedError):
        raise
    except StorageError:
        return False
    if len(data) == size:
        held.put(key, data)
    return len(data) == size


def scan_pack(store: Store, key: str, size: int, scanner: ExtentScanner) -> PackFinding:
    """What the pack `key` of `size` bytes holds.

    Raises:
        NotFoundError: it is gone. UnsupportedVersionError: it is of a newer version.
    """
    finding = PackFinding(key, size, kind_of_key(key))
    try:
        finding.kind, _, finding.entries = read_directory(store, key)
        finding.broken = _header_trouble(store, key, finding.kind)
    except (CorruptionError, StorageError) as error:
        _refuse_denied(error)
        finding.broken, finding.is_listed = str(error), False
        finding.entries = list(find_entries(store, key, size))
    _read_nodes(finding, scanner)
    return finding


def kind_of_key(key: str) -> PackKind:
    """The kind that a pack's key tells."""
    return PackKind.META if key.endswith(f".{PackKind.META.suffix}") else PackKind.DATA


def _refuse_denied(error: Exception) -> None:
    if isinstance(error, PermissionDeniedError):
        raise error


def _header_trouble(store: Store, key: str, kind: PackKind) -> str | None:
    try:
        name, told = pack.decode_header(store.get_range(key, 0, pack.HEADER_BYTES))
    except (CorruptionError, StorageError) as error:
        _refuse_denied(error)
        return f"its header: {error}"
    if name.hex() not in key or told is not kind:
        return f"its header says that it is {name.hex()}.{told.suffix}"
    return None


def _read_nodes(finding: PackFinding, scanner: ExtentScanner) -> None:
    nodes = sorted((info for info in finding.entries if info.kind != ObjectKind.CHUNK), key=lambda info: info.offset)
    malformed: list[BadExtent] = []

    def seen(info: ExtentInfo, data: bytes) -> None:
        try:
            _add_node(finding, info, data)
        except CorruptionError as error:
            malformed.append(BadExtent(finding.key, info, f"{info.kind.label} {info.digest.hex()[:12]}: {error}"))
        except UnsupportedVersionError:
            return

    finding.bad = scanner.check(ScanUnit(finding.key, nodes), seen=seen) + malformed


def _add_node(finding: PackFinding, info: ExtentInfo, data: bytes) -> None:
    if info.kind == ObjectKind.COMMIT:
        finding.commits.append(commit_row(info.digest, data))
    elif info.kind in _WITH_EDGES:
        children: tuple[Digest, ...] = node_children(info.kind, data)
        finding.edges.append((info.digest, children))
    elif info.kind == ObjectKind.LAYOUT:
        decode_layout(data)


_MOST_NAMED = 5
_NAME = re.compile(r"packs/([0-9a-f]{2})/(\1[0-9a-f]{30})\.(data|meta)")


@dataclass(slots=True)
class Structure:
    """What the packs said.

    Attributes:
        packs: Every pack -> its size.
        broken: Packs whose header, trailer or directory is damaged, with what was found in them.
        bad: Damaged entries, by pack.
        differing: Packs of which the index says other things -> what.
        index: An index that agrees with the intact packs.
        is_own: It is the repository's own, not one made for this check.
    """

    packs: dict[str, int]
    broken: dict[str, PackFinding] = field(default_factory=dict)
    bad: dict[str, list[BadExtent]] = field(default_factory=dict)
    differing: dict[str, str] = field(default_factory=dict)
    index: Index | None = None
    is_own: bool = False

    def add_bad(self, found: Iterable[BadExtent]) -> None:
        """Add damaged entries, each once."""
        for extent in found:
            known = self.bad.setdefault(extent.pack, [])
            if all(other.info.offset != extent.info.offset for other in known):
                known.append(extent)

    def entries(self, key: str) -> Sequence[ExtentInfo] | None:
        """Entries of a broken pack, as they were found in it; None for others."""
        return self.broken[key].entries if key in self.broken else None


@contextmanager
def checked_structure(
    store: Store, index: Index | None, findings: Findings, *, progress: Progress
) -> Iterator[Structure]:
    """Look at all packs; what they said, with an index that agrees as long as the block lasts.

    Args:
        index: The repository's own; None if it cannot be opened.
    """
    structure = Structure(_list_packs(store, findings))
    own = _scan(store, index, structure, findings, progress)
    if own and index is not None and _agrees(index, structure, findings):
        structure.index, structure.is_own = index, True
        yield structure
        return
    with (
        tempfile.TemporaryDirectory(prefix="cas-ckpt-fsck-") as folder,
        Index.open(Path(folder) / "index.sqlite", store_id="fsck") as made,
    ):
        for batch in pack_batches(structure.packs.items()):
            made.add_packs([finding.record for finding in scan_packs(store, batch)])
        structure.index = made
        yield structure


def _list_packs(store: Store, findings: Findings) -> dict[str, int]:
    packs = {}
    for key, size in store.list(PACK_PREFIX):
        if is_pack(key):
            packs[key] = size
        else:
            findings.note(key, "no pack: its name is not that of one")
    findings.count("num_packs", len(packs))
    return packs


def is_pack(key: str) -> bool:
    """Whether `key` is where a pack is stored."""
    return _NAME.fullmatch(key) is not None


@collector_paused()
def _scan(store: Store, index: Index | None, structure: Structure, findings: Findings, progress: Progress) -> bool:
    """Fill `structure`; whether the index could be asked about all of it."""
    usable = index is not None
    progress.start("checking packs", None)
    try:
        for batch in pack_batches(structure.packs.items()):
            found = list(scan_packs(store, batch))
            for finding in found:
                _count(finding, structure, findings)
            progress.advance(sum(_looked_at(finding) for finding in found))
            if usable and index is not None:
                usable = _compare(index, found, structure, findings)
    finally:
        progress.finish()
    return usable


def _count(finding: PackFinding, structure: Structure, findings: Findings) -> None:
    findings.count("num_entries", len(finding.entries))
    findings.count("num_nodes", finding.num_nodes)
    structure.add_bad(finding.bad)
    if finding.broken is not None:
        structure.broken[finding.key] = finding


def _looked_at(finding: PackFinding) -> int:
    """Bytes that the look at a pack took: its directory and its nodes."""
    nodes = sum(info.stored_bytes for info in finding.entries if not info.leaf_bytes)
    return nodes + len(finding.entries) * DIRECTORY_ENTRY_BYTES


def _compare(index: Index, found: Sequence[PackFinding], structure: Structure, findings: Findings) -> bool:
    try:
        structure.differing.update(index.read(integrity.differences, [finding.record for finding in found]))
        return True
    except CorruptionError as error:
        index_problem(findings, index.place, str(error))
        return False


def _agrees(index: Index, structure: Structure, findings: Findings) -> bool:
    """Whether the index can be relied on; if not, that is told."""
    try:
        known = index.packs()
        disorder = index.read(integrity.disorder)
        clean = not structure.differing or _tell_differing(index, structure, findings)
        extra = [key for key in known if key not in structure.packs and not _is_there(key, findings.store)]
        if extra:
            _tell_gone(extra, findings)
        if disorder:
            index_problem(findings, index.place, f"the database finds itself damaged: {'; '.join(disorder[:3])}")
        return clean and not disorder
    except CkptError as error:
        index_problem(findings, index.place, str(error))
        return False


def _is_there(key: str, store: Store) -> bool:
    """Whether the pack is in the store after all: written since the listing."""
    try:
        store.head(key)
        return True
    except NotFoundError:
        return False


def _tell_differing(index: Index, structure: Structure, findings: Findings) -> bool:
    """Tell of rows that differ; whether the index may be used all the same.

    A pack that was unknown when it was compared is only behind, though somebody may have added it since: what
    the index knows now says nothing about the moment of the comparison.
    """
    intact = {key: what for key, what in structure.differing.items() if _is_listed(structure, key)}
    behind = [key for key, what in intact.items() if what == UNKNOWN]
    wrong = [key for key, what in intact.items() if what != UNKNOWN]
    if behind:
        findings.note(index.place, f"{len(behind)} packs were not in it yet")
    if behind and not wrong and not index.read_only:
        for batch in pack_batches((key, structure.packs[key]) for key in behind):
            index.add_packs([finding.record for finding in scan_packs(findings.store, batch)])
        behind = []
    if wrong:
        shown = "; ".join(f"{key}: {intact[key]}" for key in wrong[:_MOST_NAMED])
        more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        index_problem(findings, index.place, f"it does not say what {len(wrong)} packs say: {shown}{more}")
    broken = [key for key in structure.differing if not _is_listed(structure, key)]
    return not behind and not wrong and all(_knows_more(index, structure, key) for key in broken)


def _is_listed(structure: Structure, key: str) -> bool:
    return key not in structure.broken or structure.broken[key].is_listed


def _knows_more(index: Index, structure: Structure, key: str) -> bool:
    """Whether the index knows all that was found in a pack without its directory."""
    found = {info.offset for info in structure.broken[key].entries}
    return found <= integrity.Soundness(index).places(key).keys()


def _tell_gone(extra: Sequence[str], findings: Findings) -> None:
    findings.note(
        extra[0],
        f"{len(extra)} packs that the index knows are gone from the store, this one among them: "
        "the index forgets them with the next command",
    )


def index_problem(findings: Findings, place: str, what: str) -> None:
    """Tell, once, that the index is damaged."""
    if not any(problem.kind is ProblemKind.INDEX for problem in findings.problems):
        repair = findings.command(RepairKind.INDEX)
        findings.problem(ProblemKind.INDEX, place, what, effect=Effect.HARMLESS, repair=repair)
