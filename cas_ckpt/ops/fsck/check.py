"""fsck: is all that commits need there, and intact?

    1. records: config, refs, gc state, forgotten commits, sessions      (ops/fsck/records.py)
    2. packs and nodes, and whether the index agrees                     (ops/fsck/packs.py)
    3. if asked for: every byte of the packs, or of some of them; of a job's share of them this comes first, and mostly
       alone
    4. what is damaged or missing: which commits, refs and keys it hits  (ops/fsck/problems.py)
       of what remotes promised, and if asked for whether they have it
    5. commits that nothing leads to, and what is left of writers that died

Invariant: nothing is changed but the scrub log, and an index of an older version, which is upgraded. Works without an
open repository: that is when people need it. Writers may go on meanwhile: refs are read before packs.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from cas_ckpt import clock
from cas_ckpt.core.config import read_config
from cas_ckpt.core.handle import RepositoryHandle, usual_index_place
from cas_ckpt.core.host_cache import AUTO
from cas_ckpt.core.live import LOOKS, Graph, orphan_name, promisors
from cas_ckpt.core.packs import filled, wants_maintainer
from cas_ckpt.core.shared_index import note_folder
from cas_ckpt.errors import CkptError, ConflictError, CorruptionError, NotFoundError, PermissionDeniedError
from cas_ckpt.index import contents, garbage, history
from cas_ckpt.index.garbage import covers
from cas_ckpt.index.index import Index, may_replace
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.graph import CommitGraph
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.ops.fsck.packs import DataOptions, Structure, catch_up, check_share, checked_structure, read_data
from cas_ckpt.ops.fsck.problems import LiveCommits, ProblemFinder
from cas_ckpt.ops.fsck.records import Records, check_lost_refs, check_records, remembered_refs, reread_names
from cas_ckpt.ops.fsck.report import Effect, Findings, FsckReport, ProblemKind
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.storage.store import RESERVED_PART, Store, exists, sweep_temporaries
from cas_ckpt.storage.url import open_store, without_secrets

_MOST_ORPHANS = 8
"""Branches that one command proposes."""


def check_url(
    url: str | os.PathLike[str],
    data: DataOptions | None = None,
    *,
    index_url: str | None = None,
    remote: bool = False,
    progress: Progress = SILENT,
) -> FsckReport:
    """Check the repository at `url`, also one that is too damaged to be opened.

    Args:
        data: How much of the packs is read beyond their structure; None: nothing.
        remote: Ask promisors whether they still have what they promised.
    Raises:
        NoRepositoryError, UnsupportedVersionError, PermissionDeniedError.
    """
    store = open_store(url)
    findings = Findings(store)
    index = open_index(store, index_url, findings, progress=progress)
    with nullcontext() if index is None else closing(index):
        return _Check(store, index, data, progress, remote=remote).run(findings)


def check_open(
    handle: RepositoryHandle, data: DataOptions | None = None, *, remote: bool = False, progress: Progress = SILENT
) -> FsckReport:
    """Check an open repository; arguments as above."""
    check = _Check(handle.store, handle.index, data, progress, remote=remote, cache=handle.cache_place)
    return check.run(Findings(handle.store))


def open_index(store: Store, index_url: str | None, findings: Findings, *, progress: Progress = SILENT) -> Index | None:
    """The repository's index, if there is one that can be read; what is wrong with it goes into `findings`.

    One that an older version made is filled before it is checked, in memory where it may only be read.
    """
    try:
        store_id = read_config(store).store_id
    except CkptError:
        return None  # reported when the records are checked
    place = index_url or usual_index_place(store, store_id, read_only=True)
    try:
        try:
            index = Index.open(place, store_id=store_id)  # for writing, for the scrub log
        except PermissionDeniedError:
            index = Index.open(place, store_id=store_id, read_only=True)
    except NotFoundError:
        findings.note(place, "there is no index, and none can be made here: one in a temporary folder will do")
        return None
    except CkptError as error:
        findings.index_problem(place, str(error))
        return None
    if not index.matches:
        findings.index_problem(place, "it is the index of another repository")
        index.close()
        return None
    try:
        note_folder(index, store)
    except BaseException:  # of a copy: its findings would be about the other folder
        index.close()
        raise
    try:  # what the check of the records asks; larger tables are read, and their damage found, with the packs
        remembered_refs(index), index.made(), index.generation
        if index.is_behind:
            if index.is_shared and not may_replace(index):
                findings.note(place, wants_maintainer(index))
                index.close()
                return None
            index, _ = filled(store, index, progress=progress)
    except BaseException as error:
        index.close()
        if not isinstance(error, CorruptionError):
            raise
        findings.index_problem(place, str(error))
        return None
    return index


@dataclass(frozen=True, slots=True)
class _Check:
    """One check: what it looks at."""

    store: Store
    index: Index | None
    data: DataOptions | None
    progress: Progress
    remote: bool
    cache: str | os.PathLike[str] | None = AUTO

    def run(self, findings: Findings) -> FsckReport:
        """Check, and check again if the index was made anew meanwhile."""
        store, index = self.store, self.index
        for _ in range(LOOKS):
            made = None if index is None else index.made()
            found = Findings(store, list(findings.problems), list(findings.notes), dict(findings.counts))
            try:
                report = self._once(found)
                shard = None if self.data is None else self.data.shard
                return report if shard is None else replace(report, shard=str(shard))
            except ConflictError:
                if index is None or index.made() == made:
                    raise
        raise ConflictError(f"index of {store.url}: others make it anew while it is checked; try again")

    def _once(self, findings: Findings) -> FsckReport:
        store, index, data = self.store, self.index, self.data
        share: Structure | None = None
        if data is not None and data.shard is not None and data.shard.part > 1:
            found = Findings(store)
            share = check_share(store, index, data.shard, data, found, progress=self.progress)
            if not share.damaged:
                return found.report()
            findings.counts |= {name: found.counts[name] for name in ("read_bytes", "read_packs", "skipped_packs")}
        records = check_lost_refs(store, index, check_records(store, findings), findings)
        with checked_structure(store, index, findings, progress=self.progress) as structure:
            if share is not None:
                structure.add(share)
            elif data is not None:
                read_data(store, structure, structure.packs, findings, data, progress=self.progress)
            structure.drop(key for key in structure.damaged if not exists(store, key))  # collected meanwhile
            records = replace(records, packs_lost=records.packs_lost or bool(structure.damaged))
            finder = ProblemFinder(store, structure, records)
            findings.count("num_commits", len(finder.live.stored))
            _note_condemned(structure, records, findings)
            finder.add_problems(findings)
            if finder.promised:
                note_promised(store, finder, findings)
            if self.remote:
                ask_promisors(store, finder, findings, cache=self.cache)
            if records.all_known:
                _add_orphans_problem(store, structure, records, findings)
            if structure.is_own and not structure.index.read_only and not findings.problems:
                _note_packs_nobody_needs(structure.index, finder.live, findings)
        _note_leftovers(store, findings)
        return findings.report()


def _note_condemned(structure: Structure, records: Records, findings: Findings) -> None:
    condemned = [key for key in (records.gc.condemned if records.gc else ()) if key in structure.packs]
    if condemned:
        findings.note(condemned[0], f"{len(condemned)} packs are condemned by a collection, this one among them")


def _note_leftovers(store: Store, findings: Findings) -> None:
    left = sweep_temporaries(store, clock.now_s(), dry_run=True)
    if left.num_files:
        findings.note(
            RESERVED_PART,
            f"{left.num_files} unfinished files ({left.num_bytes} bytes) are left of writers that were killed: "
            "cas-ckpt gc removes those that are older than its --min-age",
        )


# --- commits that nothing leads to ----------------------------------------------------------


def _add_orphans_problem(store: Store, structure: Structure, records: Records, findings: Findings) -> None:
    """Report commits that were published and that nothing leads to: collections keep them until a person decides.

    Another process may have committed since the refs were read, so findings are checked again with the current refs.
    """
    graph: Graph = CommitGraph(structure.index.read(history.read_links))
    orphans = partial(graph.orphans, packs_lost=records.packs_lost)
    if not orphans(records.named, records.remembered):
        return
    records = reread_names(store, records)
    catch_up(store, structure)
    found = orphans(records.named, records.remembered, now=CommitGraph(structure.index.read(history.read_links)))
    if not found:
        return
    tips = graph.tips(found)
    named = ", ".join(digest.hex()[:12] for digest in tips[:_MOST_ORPHANS])
    lost = {bytes.fromhex(hit.commit) for each in findings.problems if each.effect is Effect.LOST for hit in each.hits}
    spoiled = graph.descendants(found & (lost | set(graph.unknown_parents(found).values())), among=found)
    chosen = graph.tips(found - spoiled)[:_MOST_ORPHANS]
    if spoiled:
        ends = ", ".join(f"cas-ckpt forget {digest.hex()[:12]}" for digest in tips if digest in spoiled)
        named += (
            f". {len(spoiled)} of them are damaged, or follow what is lost, and can have a branch once that is "
            f"repaired; to give those up: {ends}"
        )
    wanted = " ".join(f"--ref {orphan_name(digest)}={digest.hex()[:12]}" for digest in chosen)
    findings.problem(
        ProblemKind.REF, "refs/",
        f"{len(found)} commits were published and nothing leads to them any more: a ref was lost, or put back from an "
        f"older copy. Collections keep them. Last of their lines: {named}. The repair gives them branches; to give one "
        "up with what it follows, cas-ckpt forget COMMIT",
        effect=Effect.AT_RISK, repair="refs" if chosen else "chunks", options=wanted,
    )  # fmt: skip


def _note_packs_nobody_needs(index: Index, live: LiveCommits, findings: Findings) -> None:
    """Note packs that hold nothing that is needed: left by writers that died, or by commits that are gone."""
    commits, roots = live.stored, live.roots(live.complete)
    with garbage.living(index, commits=commits, roots=roots, published=commits) as living:
        unneeded = [pack for pack in living.packs() if pack.dead_entries == pack.num_entries]
    if unneeded:
        num_bytes = sum(pack.size_bytes for pack in unneeded)
        findings.note(
            unneeded[0].name,
            f"{len(unneeded)} packs, this one among them, hold nothing that a commit needs ({num_bytes} bytes): "
            "cas-ckpt gc deletes them",
        )


# --- chunks that remotes promised -------------------------------------------------------------
#
# What a promisor was not seen to lack is no problem: one that cannot be reached is noted. Nothing is fetched.


def note_promised(store: Store, finder: ProblemFinder, findings: Findings) -> None:
    """Note how many chunks are not here because a remote keeps them."""
    names = ", ".join(remote.name for remote in promisors(store))
    findings.count("num_promised", len(finder.promised))
    findings.note(
        PACK_PREFIX,
        f"{len(finder.promised)} chunks are not here, and promised by {names}: they are brought when they are read; "
        "cas-ckpt fsck --remote asks whether they are still there",
    )


def ask_promisors(
    store: Store, finder: ProblemFinder, findings: Findings, *, cache: str | os.PathLike[str] | None
) -> None:
    """Add to `findings` the promised chunks that no promisor has any more; note promisors that do not answer.

    Args:
        cache: As for `RepositoryHandle.open`, of the promisors.
    """
    numbers = {Digest(digest): number for number, digest in finder.integrity.digests(finder.promised).items()}
    left, unreached = set(numbers), False
    for remote in promisors(store) if left else ():
        try:
            left -= _there(remote.place(store), left, cache)
        except CkptError as error:
            unreached = True
            place = f"remote {remote.name} ({without_secrets(remote.url)})"
            findings.note(PACK_PREFIX, f"{place} cannot be asked for what it promised: {error}")
    if not left or unreached:
        return
    impact = finder.impact({numbers[digest] for digest in left})
    findings.problem(
        ProblemKind.MISSING, PACK_PREFIX,
        f"{len(left)} chunks that commits need are not here, and the remotes that promised them do not have them",
        effect=Effect.LOST, repair="chunks", objects=impact.objects, hits=impact.hits, refs=impact.refs,
    )  # fmt: skip


def _there(place: str, digests: Collection[Digest], cache: str | os.PathLike[str] | None) -> set[Digest]:
    """Those of these objects that are whole in packs of the repository at `place`."""
    with closing(RepositoryHandle.open(place, read_only=True, cache=cache)) as other:
        other.sync()
        located = other.index.read(contents.locate, list(digests))
    return {digest for digest in digests if covers(located.get(digest, ()))}
