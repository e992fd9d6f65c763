"""fsck: is all that commits need there, and intact?

    1. records: config, gc state, refs, forgotten commits, sessions      (ops/fsck/records.py)
    2. packs and nodes, and whether the index agrees                     (ops/fsck/structure.py)
    3. if asked for: every byte of the packs, or of some of them         (ops/fsck/data.py)
    4. what is damaged or missing: which commits, refs and keys it hits   (ops/fsck/problems.py)

Invariant: nothing is changed but the scrub log. Works without an open repository: that is when
people need it. Writers may go on meanwhile: refs are read before packs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from cas_ckpt import clock
from cas_ckpt.core.config import read_config
from cas_ckpt.core.handle import RepositoryHandle, index_place
from cas_ckpt.core.live import LOOKS, known_commits, orphan_name
from cas_ckpt.errors import CkptError, ConflictError, InvalidInputError, NotFoundError, PermissionDeniedError
from cas_ckpt.index import history, liveness, meta
from cas_ckpt.index.index import Index
from cas_ckpt.objects.graph import CommitGraph
from cas_ckpt.ops.fsck.data import DataOptions, read_data
from cas_ckpt.ops.fsck.impact import LiveCommits
from cas_ckpt.ops.fsck.problems import Judge, catch_up, drop_vanished
from cas_ckpt.ops.fsck.records import Records, check_records, missing_refs, read_names
from cas_ckpt.ops.fsck.report import Effect, Findings, FsckReport, ProblemKind, RepairKind
from cas_ckpt.ops.fsck.structure import Structure, checked_structure, index_problem
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.storage.store import RESERVED_PART, Store, sweep_temporaries
from cas_ckpt.storage.url import open_store

_MOST_ORPHANS = 8
"""Branches that one command proposes."""


@dataclass(frozen=True, slots=True)
class FsckOptions:
    """What is checked beyond structure: `data` None reads no payloads of chunks."""

    data: DataOptions | None = None


def check_url(
    url: str | os.PathLike[str],
    options: FsckOptions = FsckOptions(),
    *,
    index_url: str | None = None,
    progress: Progress = SILENT,
) -> FsckReport:
    """Check the repository at `url`, also one that is too damaged to be opened.

    Raises:
        NoRepositoryError, UnsupportedVersionError, PermissionDeniedError.
    """
    store = open_store(url)
    findings = Findings(store)
    index = open_index(store, index_url, findings)
    try:
        return _checked(store, index, options, findings, progress)
    finally:
        if index is not None:
            index.close()


def check_open(
    handle: RepositoryHandle, options: FsckOptions = FsckOptions(), *, progress: Progress = SILENT
) -> FsckReport:
    """Check an open repository."""
    return _checked(handle.store, handle.index, options, Findings(handle.store), progress)


def open_index(store: Store, index_url: str | None, findings: Findings) -> Index | None:
    """The repository's index, if there is one that can be read; what is wrong with it is told."""
    try:
        store_id = read_config(store).store_id
    except CkptError:
        return None  # told as what it is when the records are checked
    try:
        place = index_url or index_place(store)
    except InvalidInputError as error:
        findings.note(store.url, f"it is checked without an index: {error}")
        return None
    try:
        index = _opened(place, store_id)
    except NotFoundError:
        findings.note(place, "there is no index, and none can be made here: one in a temporary folder will do")
        return None
    except CkptError as error:
        index_problem(findings, place, str(error))
        return None
    if not index.matches:
        index_problem(findings, place, "it is the index of another repository")
        index.close()
        return None
    return index


def _opened(place: str, store_id: str) -> Index:
    """Open for writing, for the scrub log; where that is not possible, for reading."""
    try:
        return Index.open(place, store_id=store_id)
    except PermissionDeniedError:
        return Index.open(place, store_id=store_id, read_only=True)


def _checked(
    store: Store, index: Index | None, options: FsckOptions, findings: Findings, progress: Progress
) -> FsckReport:
    """Check, and check again if the index was made anew meanwhile."""
    for _ in range(LOOKS):
        made = None if index is None else index.made()
        found = Findings(store, list(findings.problems), list(findings.notes), dict(findings.counts))
        try:
            return _check(store, index, options, found, progress)
        except ConflictError:
            if index is None or index.made() == made:
                raise
    raise ConflictError(f"index of {store.url}: others make it anew while it is checked; try again")


def _check(
    store: Store, index: Index | None, options: FsckOptions, findings: Findings, progress: Progress
) -> FsckReport:
    records = missing_refs(store, index, check_records(store, findings), findings)
    with checked_structure(store, index, findings, progress=progress) as structure:
        if options.data is not None:
            read_data(store, structure, findings, options.data, progress=progress)
        drop_vanished(store, structure)
        _judge(store, index, structure, records, findings)
    _note_temporaries(store, findings)
    return findings.report()


def _judge(store: Store, index: Index | None, structure: Structure, records: Records, findings: Findings) -> None:
    if structure.index is None:
        return
    judge = Judge(store, structure, structure.index, records)
    findings.count("num_commits", len(judge.live.whole | judge.live.bare))
    condemned = [key for key in (records.gc.condemned if records.gc else ()) if key in structure.packs]
    if condemned:
        findings.note(condemned[0], f"{len(condemned)} packs are condemned by a collection, this one among them")
    judge.tell(findings)
    if records.all_known:
        _tell_orphans(store, index, structure, records, findings)
    if structure.is_own and not structure.index.read_only and not findings.problems:
        _note_orphans(structure.index, judge.live, findings)


def _note_temporaries(store: Store, findings: Findings) -> None:
    left = sweep_temporaries(store, clock.now_s(), dry_run=True)
    if left.num_files:
        findings.note(
            RESERVED_PART,
            f"{left.num_files} unfinished files ({left.num_bytes} bytes) are left of writers that were killed: "
            "cas-ckpt gc removes those that are older than its --min-age",
        )


def _tell_orphans(store: Store, own: Index | None, structure: Structure, records: Records, findings: Findings) -> None:
    """Tell of commits that were published and that nothing leads to: collections keep them until a person decides.

    Somebody may have committed since the refs were read, so what is found is looked for again, with the refs of now.
    """
    index = structure.index
    if index is None:
        return
    graph = CommitGraph(index.read(history.read_links))
    remembered = set() if own is None else {row.target for row in own.read(meta.read_refs).values()}
    if not graph.orphans(known_commits(store, records.refs, records.forgotten), remembered):
        return
    records = read_names(store, records)
    known = known_commits(store, records.refs, records.forgotten)
    catch_up(store, structure, index)
    found = graph.orphans(known, remembered, now=CommitGraph(index.read(history.read_links)))
    if not found:
        return
    chosen = graph.tips(found)
    named = ", ".join(f"{digest.hex()[:12]}" for digest in chosen[:_MOST_ORPHANS])
    wanted = " ".join(f"--ref {orphan_name(digest)}={digest.hex()[:12]}" for digest in chosen[:_MOST_ORPHANS])
    findings.problem(
        ProblemKind.REF, "refs/",
        f"{len(found)} commits were published and nothing leads to them any more: a ref was lost, or put back from an "
        f"older copy. Collections keep them. Last of their lines: {named}. The repair gives them branches; to give one "
        "up with what it follows, cas-ckpt forget COMMIT",
        effect=Effect.AT_RISK, repair=findings.command(RepairKind.REFS, wanted),
    )  # fmt: skip


def _note_orphans(index: Index, live: LiveCommits, findings: Findings) -> None:
    """Tell of packs that hold nothing that is needed: left by writers that died, or by commits that are gone."""
    roots = {one for digest in live.whole for one in (live.links[digest].root, live.links[digest].layout) if one}
    commits = live.whole | live.bare
    with liveness.living(index, commits=commits, roots=roots, published=commits) as living:
        orphans = [pack for pack in living.packs() if pack.dead_entries == pack.num_entries]
    if orphans:
        num_bytes = sum(pack.size_bytes for pack in orphans)
        findings.note(
            orphans[0].name,
            f"{len(orphans)} packs, this one among them, hold nothing that a commit needs ({num_bytes} bytes): "
            "cas-ckpt gc deletes them",
        )
