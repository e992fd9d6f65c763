"""fsck of structure: every pack and node once, and whether the index says what they say.

    1. every pack: header, trailer, directory, and its nodes by id       (ops/fsck_packs.py)
    2. the index's rows of that pack are the same                       (index/agreement.py)
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

from cas_ckpt.collector import collector_paused
from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError
from cas_ckpt.index.agreement import UNKNOWN
from cas_ckpt.index.catalog import Index
from cas_ckpt.objects.pack import DIRECTORY_ENTRY_BYTES, PACK_PREFIX, ExtentInfo
from cas_ckpt.ops.fsck_packs import PackFinding, scan_packs
from cas_ckpt.ops.fsck_report import Effect, Findings, ProblemKind, RepairKind
from cas_ckpt.pack_index import pack_batches
from cas_ckpt.progress import Progress
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.scan import BadExtent

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
        structure.differing.update(index.differences([finding.record for finding in found]))
        return True
    except CorruptionError as error:
        index_problem(findings, index.place, str(error))
        return False


def _agrees(index: Index, structure: Structure, findings: Findings) -> bool:
    """Whether the index can be relied on; if not, that is told."""
    try:
        known = index.packs()
        disorder = index.disorder()
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
    return found <= index.soundness().places(key).keys()


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
