"""fsck: is all that commits need there, and intact?

    1. records: config, refs, gc state, forgotten commits, sessions      (ops/fsck/records.py)
    2. packs and nodes, and whether the index agrees                     (ops/fsck/packs.py)
    3. if asked for: every byte of the packs, or of some of them; of a job's share of them this comes first, and mostly
       alone
    4. damaged entries and packs become objects that no intact extents hold completely; by the index's edges, all nodes
       above these; the live commits whose trees are among them; the keys on the way down from their roots to the damage
    5. of what remotes promised, and if asked for whether they have it
    6. commits that nothing leads to, and what is left of writers that died

Invariant: nothing is changed but the scrub log, and an index of an older version, which is upgraded. Works without an
open repository: that is when people need it. Writers may go on meanwhile: refs are read before packs. Damage is
reported once, at the pack where it is; what is in no pack at all is one problem of its own. An object with another
intact copy is not lost. A commit is named if, and only if, it is live and needs an object that has no intact copy. When
it is not known which commits are live, all that are stored count. Only nodes that lead to damage are read, each once
however many commits share it; of one that cannot be read, all keys below it are named.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from cas_ckpt import clock
from cas_ckpt.core.config import read_config
from cas_ckpt.core.handle import RepositoryHandle, usual_index_place
from cas_ckpt.core.host_cache import AUTO
from cas_ckpt.core.live import LOOKS, Graph, logged, orphan_name, promised_commits, promisors
from cas_ckpt.core.packs import filled, wants_maintainer
from cas_ckpt.core.shared_index import note_folder
from cas_ckpt.core.units import BEFORE_ALL_US
from cas_ckpt.errors import (
    CkptError,
    ConflictError,
    CorruptionError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    UnsupportedVersionError,
)
from cas_ckpt.index import contents, garbage, history
from cas_ckpt.index.garbage import covers
from cas_ckpt.index.index import Index, may_replace
from cas_ckpt.index.integrity import IntegrityView, UnusableParts
from cas_ckpt.objects.digest import Digest, ObjectKind, object_id, short
from cas_ckpt.objects.graph import CommitGraph
from cas_ckpt.objects.nodes import ContainerEntry, TensorEntry, TreeNode, decode_tree
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.objects.state import CONTAINER_KINDS, render_name
from cas_ckpt.ops.fsck.packs import DataOptions, Structure, catch_up, check_share, checked_structure, read_data
from cas_ckpt.ops.fsck.records import Records, check_lost_refs, check_records, remembered_refs, reread_names
from cas_ckpt.ops.fsck.report import Effect, Findings, FsckReport, Hit, ProblemKind
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.storage.store import RESERVED_PART, Store, exists, sweep_temporaries
from cas_ckpt.storage.url import open_store, without_secrets

ALL_BELOW = "**"
LAYOUT_KEY = "(layout)"
RECORD_KEY = "(commit)"
"""Of a forgotten commit, which has nothing else that could be lost."""

_Keys: TypeAlias = tuple[str, ...]
_MAX_DEPTH = 200
_MOST_KEYS = 10_000
"""Of one container; one with more is named as a whole."""

_MOST_NAMED = 3


# --- commits that must be there -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LiveCommits:
    """Commits that must be there.

    Attributes:
        graph: Every stored commit.
        complete: Commits whose data must be there as well.
        only_logged: Those of them that only logs of refs name: a collection may have taken their data.
        record_only: Forgotten commits, of which only the object must be there.
        missing: Commits that a ref or a live commit names and that are in no pack -> who names them.
        refs: Commit -> the refs that name it.
    """

    graph: Graph
    complete: frozenset[bytes]
    only_logged: frozenset[bytes]
    record_only: frozenset[bytes]
    missing: Mapping[bytes, str]
    refs: Mapping[bytes, tuple[str, ...]]

    @property
    def stored(self) -> frozenset[bytes]:
        """All of them that are in a pack."""
        return self.complete | self.record_only

    def roots(self, commits: Iterable[bytes]) -> set[bytes]:
        """Trees and layouts of these commits."""
        links = [self.graph.commits[digest] for digest in commits]
        return {root for link in links for root in (link.root, link.layout) if root is not None}


def live_commits(graph: Graph, records: Records) -> LiveCommits:
    """Commits that refs keep, and orphans, which a person may want again; not those of logs whose commits are gone."""
    refs: dict[bytes, tuple[str, ...]] = {}
    for ref in records.refs:
        if ref.target is not None:
            refs[ref.target] = (*refs.get(ref.target, ()), f"{ref.kind.label} {ref.name}")
    missing: dict[bytes, str] = {head: ", ".join(names) for head, names in refs.items() if head not in graph}
    orphans = graph.ancestors(graph.orphans(records.named, records.remembered, packs_lost=records.packs_lost))
    kept = graph.ancestors(refs) | orphans
    for parent, child in graph.unknown_parents(kept).items():
        missing.setdefault(parent, f"commit {child.hex()[:12]}")
    live = kept | graph.ancestors(logged(records.refs, BEFORE_ALL_US))
    if not records.all_known or missing:
        live |= graph.commits.keys()
    without_data = {digest for digest in live if digest in records.forgotten and digest not in refs}
    return LiveCommits(
        graph, frozenset(live - without_data), frozenset(live - kept), frozenset(without_data), missing, refs
    )


# --- problems -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Impact:
    """Commits, refs and keys that some damage hits.

    Attributes:
        objects: Ids of objects that are damaged or at risk.
        hits: Live commits that need them.
        refs: Refs that lead to these commits.
    """

    objects: tuple[str, ...] = ()
    hits: tuple[Hit, ...] = ()
    refs: tuple[str, ...] = ()


class ProblemFinder:
    """Finds the problems of one structure, by one state of its index.

    Attributes:
        gone: Packs that nothing may rely on: those that are not there any more, and those to be left out.
        promised: Chunks that are in no pack, and that remotes promised, as of the last look for what is missing.
    """

    def __init__(self, store: Store, structure: Structure, records: Records, *, without: Iterable[str] = ()) -> None:
        self._store = store
        self._index = structure.index
        self._structure = structure
        self._without = frozenset(without)
        catch_up(store, structure)
        # One for all looks: its answers end when the index is made anew, whose numbers mean other objects.
        self.integrity = IntegrityView(structure.index)
        self.promised: set[int] = set()
        self._look(records)

    def _look(self, records: Records) -> None:
        """Update what is live and which packs are gone; the packs were listed after `records`, so that all is there."""
        structure = self._structure
        self._records = records
        self.live: LiveCommits = live_commits(CommitGraph(self._index.read(history.read_links)), records)
        self.gone = self._without.union(self._index.packs().keys() - structure.packs.keys())
        self._not_found: dict[str, dict[int, int]] = {}  # offset -> object that the index knows and the pack has not
        for key, finding in structure.broken.items():
            found = {info.offset for info in finding.entries}
            places = self.integrity.places(key)
            self._not_found[key] = {offset: number for offset, number in places.items() if offset not in found}
        unlisted = {key for key in structure.broken if not structure.is_listed(key)}
        damaged = {(key, extent.info.offset) for key, found in structure.bad.items() for extent in found}
        damaged.update((key, offset) for key, offsets in self._not_found.items() for offset in offsets)
        self._unusable = UnusableParts(self.gone, frozenset(damaged))
        self._unusable_after_rebuild = UnusableParts(self.gone | unlisted, frozenset(damaged))

    def add_problems(self, findings: Findings) -> None:
        """Add all problems to `findings`."""
        reported: set[int] = set()
        for key in self._structure.damaged:
            reported |= self._add_pack_problem(key, findings)
        self._add_missing_problem(reported, findings)

    # --- in packs -------------------------------------------------------------------------

    def lost_in(self, key: str) -> set[int]:
        """Objects that are damaged in this pack and have no other intact copy."""
        digests = {extent.info.digest for extent in self._structure.bad.get(key, ())}
        damaged = {*self.integrity.numbers(digests).values(), *self._not_found.get(key, {}).values()}
        return self.integrity.incomplete(damaged, self._unusable)

    def _add_pack_problem(self, key: str, findings: Findings) -> set[int]:
        """Add what is wrong with one pack; the objects that are lost with it."""
        broken, bad = self._structure.broken.get(key), self._structure.bad.get(key, ())
        lost = self.lost_in(key)
        needed = lost
        if not self._structure.is_listed(key):  # a new index would not find what only this pack holds
            needed = lost | self.integrity.incomplete(self.integrity.in_packs({key}), self._unusable_after_rebuild)
        impact = self._impact(needed)
        lost_hits = impact.hits if lost == needed else self._impact(lost).hits
        effect = Effect.LOST if lost and lost_hits else Effect.AT_RISK if impact.hits else Effect.HARMLESS
        parts = [broken.broken] if broken is not None and broken.broken else []
        parts += [extent.what for extent in bad[:_MOST_NAMED]]
        if len(bad) > _MOST_NAMED:
            parts.append(f"{len(bad) - _MOST_NAMED} more entries are damaged")
        if not_found := self._not_found.get(key):
            parts.append(f"{len(not_found)} of its entries cannot be found")
        findings.problem(
            ProblemKind.ENTRIES if broken is None else ProblemKind.PACK, key, "; ".join(parts), effect=effect,
            repair="chunks" if effect is Effect.LOST else "packs",
            objects=tuple(sorted(digest.hex() for digest in self.integrity.digests(lost).values())),
            hits=impact.hits, refs=impact.refs,
        )  # fmt: skip
        return lost

    # --- in no pack -----------------------------------------------------------------------

    def incomplete(self, digests: Iterable[bytes]) -> set[bytes]:
        """Those of the objects that no pack holds, whole and intact."""
        wanted = set(digests)
        numbers = self.integrity.numbers(wanted)
        incomplete = self.integrity.incomplete(numbers.values(), self._unusable)
        return {digest for digest in wanted if digest not in numbers or numbers[digest] in incomplete}

    def is_needed(self, digests: Collection[bytes]) -> bool:
        """Whether some live commit needs one of these objects."""
        numbers = self.integrity.numbers(digests)
        return bool(self._impact(set(numbers.values()), set(digests) - numbers.keys()).hits)

    def impact(self, numbers: set[int]) -> Impact:
        """The impact of losing these objects."""
        return self._impact(numbers, excused=self.live.only_logged)

    def needed_missing(self, reported: Collection[int] = ()) -> set[bytes]:
        """Ids of all that is in no pack, if some live commit needs something of it."""
        impact = self._impact_of_missing(reported)
        return {bytes.fromhex(digest) for digest in impact.objects} if impact.hits else set()

    def _impact_of_missing(self, reported: Collection[int], *, excused: Collection[bytes] = frozenset()) -> Impact:
        """Of all that is in no pack, whole, although something names it; without what is reported already."""
        integrity, live = self.integrity, self.live
        candidates = integrity.referred_only() | integrity.in_parts() | integrity.in_packs(self.gone)
        numbers = integrity.incomplete(candidates, self._unusable).difference(reported)
        self.promised = set()
        if numbers:  # remotes promise states of commits whose data must be there
            commits = promised_commits(live.graph, self._records.refs, promisors(self._store)) & live.complete
            self.promised = integrity.promised(numbers, {live.graph.commits[commit].root for commit in commits})
        numbers -= self.promised
        # Trees and layouts that live commits name and that no pack ever brought into the index.
        roots = live.roots(live.complete - live.only_logged)
        unknown = {*(roots - integrity.numbers(roots).keys()), *live.missing}
        known = integrity.numbers(unknown)
        unknown = {digest for digest in unknown if known.get(digest) not in reported}
        return self._impact(numbers, unknown, excused=excused)

    def _add_missing_problem(self, reported: set[int], findings: Findings) -> None:
        impact = self._impact_of_missing(reported, excused=self.live.only_logged)
        for _ in range(LOOKS):
            # If names changed: what is missing may have been forgotten and collected.
            now = reread_names(self._store, self._records) if impact.hits else self._records
            if (now.refs, now.named) == (self._records.refs, self._records.named):
                break
            catch_up(self._store, self._structure)
            self._look(now)
            impact = self._impact_of_missing(reported, excused=self.live.only_logged)
        if not impact.hits:
            return
        named = list(self.live.missing.items())[:_MOST_NAMED]
        names = "; ".join(f"commit {short(digest)}, which {who} names" for digest, who in named)
        findings.problem(
            ProblemKind.MISSING, PACK_PREFIX,
            f"{len(impact.objects)} objects that commits need are in no pack{': ' if names else ''}{names}",
            effect=Effect.LOST, repair="chunks", objects=impact.objects, hits=impact.hits, refs=impact.refs,
        )  # fmt: skip

    # --- what damage reaches --------------------------------------------------------------

    def _impact(
        self, numbers: set[int], unknown: Collection[bytes] = (), *, excused: Collection[bytes] = frozenset()
    ) -> Impact:
        """The impact of losing the objects `numbers`.

        Args:
            unknown: Objects of which the index has no number, that are needed too.
            excused: Commits that may do without.
        """
        if not numbers and not unknown:
            return Impact()
        live = self.live
        digests = self.integrity.digests(self.integrity.above(numbers))
        affected = {digest: number in numbers for number, digest in digests.items()}
        affected.update(dict.fromkeys(unknown, True))
        finder = KeyFinder(self._store, self._index, affected)
        commits = sorted((live.stored | (live.missing.keys() & affected.keys())).difference(excused))
        hits = {commit: keys for commit in commits if (keys := self._keys(commit, affected, finder))}
        objects = sorted(digest.hex() for digest, damaged in affected.items() if damaged)
        reached = live.graph.descendants(hits, among=live.stored)
        refs = sorted({name for digest in reached for name in live.refs.get(digest, ())})
        return Impact(tuple(objects), tuple(Hit(commit.hex(), keys) for commit, keys in hits.items()), tuple(refs))

    def _keys(self, commit: bytes, affected: Mapping[bytes, bool], finder: KeyFinder) -> _Keys:
        """Keys of `commit` that need something damaged."""
        live = self.live
        if commit not in live.graph:
            return (ALL_BELOW,) if commit in live.missing else ()
        if affected.get(commit):
            return (RECORD_KEY,) if commit in live.record_only else (ALL_BELOW,)
        if commit in live.record_only:
            return ()
        link = live.graph.commits[commit]
        keys = finder.keys(link.root)
        return (*keys, LAYOUT_KEY) if link.layout is not None and affected.get(link.layout) else keys


@dataclass(slots=True)
class KeyFinder:
    """Finds the keys of states that need damaged objects: down from a root, along affected nodes alone.

    Attributes:
        affected: Objects that are damaged or lead to damage -> whether they themselves are damaged.
    """

    store: Store
    index: Index
    affected: Mapping[bytes, bool]
    _below: dict[tuple[bytes, str], _Keys] = field(default_factory=dict)

    def keys(self, digest: bytes, kind: ObjectKind = ObjectKind.TREE, until: str = "", depth: int = 0) -> _Keys:
        """Keys below the tree node `digest`, or a page of one, that need something damaged; `**` is all of them.

        Args:
            until: For a page, the name from which on another page holds the entries ("" at the end).
        """
        if digest not in self.affected:
            return ()
        if (digest, until) not in self._below:
            node = None if self.affected[digest] or depth > _MAX_DEPTH else self._read(digest, kind)
            self._below[digest, until] = (ALL_BELOW,) if node is None else self._entries(node, until, depth + 1)
        return self._below[digest, until]

    def _read(self, digest: bytes, kind: ObjectKind) -> TreeNode | None:
        """The node, from any intact copy. Not through the handle, which would change the index on the way."""
        for place in self.index.read(contents.locate, [digest]).get(digest, ()):
            try:
                data = bytes(self.store.get_range(place.pack, place.offset + place.header_bytes, place.stored_bytes))
                if object_id(kind.label, data) == digest:
                    return decode_tree(data, page=kind == ObjectKind.TREE_PAGE)
            except (CorruptionError, NotFoundError, StorageError, UnsupportedVersionError):
                continue
        return None

    def _entries(self, node: TreeNode, until: str, depth: int) -> _Keys:
        if node.kind and node.kind not in CONTAINER_KINDS:
            return ("",)  # people see a composite tensor as one entry
        found: list[str] = []
        for entry in node.entries:
            name = render_name(entry.name)
            if isinstance(entry, TensorEntry) and entry.node in self.affected:
                found.append(name)
            elif isinstance(entry, ContainerEntry):
                found += [f"{name}/{key}" if key else name for key in self.keys(entry.node, depth=depth)]
        firsts = [render_name(page.first) for page in node.pages]
        for page, first, end in zip(node.pages, firsts, [*firsts[1:], until], strict=False):
            below = self.keys(page.node, ObjectKind.TREE_PAGE, end, depth)
            found += [f"[{first}..{end})" if key == ALL_BELOW else key for key in below]
        return tuple(dict.fromkeys(found)) if len(found) <= _MOST_KEYS else (ALL_BELOW,)


# --- the check --------------------------------------------------------------------------------------


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
            condemned = [key for key in (records.gc.condemned if records.gc else ()) if key in structure.packs]
            if condemned:
                more = f"{len(condemned)} packs are condemned by a collection, this one among them"
                findings.note(condemned[0], more)
            finder.add_problems(findings)
            if finder.promised:
                names = ", ".join(remote.name for remote in promisors(store))
                findings.count("num_promised", len(finder.promised))
                findings.note(
                    PACK_PREFIX,
                    f"{len(finder.promised)} chunks are not here, and promised by {names}: they are brought when they "
                    "are read; cas-ckpt fsck --remote asks whether they are still there",
                )
            if self.remote:
                ask_promisors(store, finder, findings, cache=self.cache)
            if records.all_known:
                _add_orphans_problem(store, structure, records, findings)
            if structure.is_own and not structure.index.read_only and not findings.problems:
                _note_packs_nobody_needs(structure.index, finder.live, findings)
        left = sweep_temporaries(store, clock.now_s(), dry_run=True)
        if left.num_files:
            findings.note(
                RESERVED_PART,
                f"{left.num_files} unfinished files ({left.num_bytes} bytes) are left of writers that were killed: "
                "cas-ckpt gc removes those that are older than its --min-age",
            )
        return findings.report()


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
            with closing(RepositoryHandle.open(remote.place(store), read_only=True, cache=cache)) as other:
                other.sync()
                located = other.index.read(contents.locate, list(left))
            left = {digest for digest in left if not covers(located.get(digest, ()))}
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
