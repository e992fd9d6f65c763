"""repair: makes whole what fsck found, as far as intact copies reach.

    1. config, gc state, records: without these nothing can be opened
    2. packs, chunks                                                  (ops/fsck/repair_packs.py)
    3. refs, whose targets must be whole by now
    4. index: a new one is made beside the old one from the directories of all packs and the nodes of meta packs; it
       catches up with what came or went meanwhile, and takes the place of the old one, in one step. What the old one
       remembers and packs do not say (refs, scrubs, plans) is kept

**config** is put back as it is in another copy of *this* repository: the other one has the same store
id as our index says, or a pack of the same random name. Another repository's config would make this one
pass for that one, and indexes and caches would be believed that are about other packs.

**gc state** is made anew, idle, if it is damaged, lost or older than what refs and index have seen, and only
when it is asked for by name, because it cannot be known whether a collection was at work:
  - the new generation is far above that of every ref and of the index, so it is one that no writer has read:
    each of them starts its deduplication again, and none relies on what it knew before;
  - nothing is condemned any more. What a dead collector had condemned and not deleted is simply there again;
  - a collector that is ALIVE can swap nothing any more, for its record is gone; but if it was deleting when
    the record was damaged, it goes on deleting packs that writers now rely on. So no `cas-ckpt gc` may be
    running anywhere: only people can know that. While the record is damaged none can start.

**A ref** that is damaged or lost is made again, naming a commit that is known to be right: what the caller chose; else,
in another copy of this repository (same store id), the ref of that name; in a clone, what it remembers of the branch
(`origin/main`), or its own ref of that name. A clone with one remote has tags of this repository: the log of each says
that it was fetched. Else the candidates are reported, with the command that chooses one: a guess is never written. As
in core/publish.py the ref's stored bytes are read, then gc/state, then the target is seen to be whole, then the bytes
are swapped.

Invariant: everything is additive until it is verified, nothing intact is ever removed, damaged bytes are replaced
only if they still are what was read. Whatever dies on the way leaves a repository no worse than it was, which can be
repaired again. At any moment others see the old index or the new one. Works on one that cannot be opened.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from cas_ckpt.arguments import RepairKind
from cas_ckpt.core.config import CONFIG_KEY, read_config
from cas_ckpt.core.forgotten import PREFIX as FORGOTTEN_PREFIX
from cas_ckpt.core.forgotten import decode_forgotten, read_forgotten
from cas_ckpt.core.handle import RepositoryHandle, usual_index_place
from cas_ckpt.core.live import (
    ASIDE_PREFIX,
    Graph,
    known_commits,
    orphan_name,
    packs_were_set_aside,
    promised_commits,
    promisors,
    read_graph,
)
from cas_ckpt.core.packs import add_all_packs, catching_up, refill
from cas_ckpt.core.protocol import GC_STATE_KEY, GcPhase, GcState, encode_gc_state, read_gc_state, require_current
from cas_ckpt.core.publish import publish_lost_ref
from cas_ckpt.core.ref_store import NAMES_PREFIX, name_record
from cas_ckpt.core.refs import (
    PLACEHOLDER_GENERATION,
    Generation,
    Move,
    Ref,
    RefKind,
    TagSignature,
    default_author,
    new_move,
    ref_key,
)
from cas_ckpt.core.revisions import resolve
from cas_ckpt.core.settings import read_settings
from cas_ckpt.core.shared_index import note_folder
from cas_ckpt.errors import (
    CkptError,
    ConflictError,
    CorruptionError,
    NotFoundError,
    PermissionDeniedError,
    UnsupportedVersionError,
)
from cas_ckpt.index import history, remembered, usage
from cas_ckpt.index.database import IN_MEMORY
from cas_ckpt.index.index import CatchUp, Index, index_beside, replace_file, replace_rows
from cas_ckpt.index.integrity import IntegrityView, UnusableParts
from cas_ckpt.index.rows import IndexStats
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.ops.fsck.check import open_index
from cas_ckpt.ops.fsck.records import (
    ROOT_RECORDS,
    check_lost_refs,
    check_records,
    is_sealed,
    read_refs,
    ref_keys,
    ref_name,
    refs_ever_made,
    remembered_refs,
    should_be_sealed,
)
from cas_ckpt.ops.fsck.repair_packs import open_source, repair_packs
from cas_ckpt.ops.fsck.report import Findings, RepairLog, RepairReport, RepairRequest, repair_command
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.storage.file import FileStore, is_no_file, move_aside
from cas_ckpt.storage.store import Store, is_key
from cas_ckpt.storage.url import open_store

# --- refs -----------------------------------------------------------------------------------

CLONED_FROM = "origin"
"""Name that a clone gives to the repository that it copied."""

_ATTEMPTS = 10
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class _BrokenRef:
    """A ref that cannot be read; `record` are the bytes that are stored, None if it is lost."""

    kind: RefKind
    name: str
    record: bytes | None

    @property
    def key(self) -> str:
        return ref_key(self.kind, self.name)

    @property
    def full_name(self) -> str:
        return self.kind.value + self.name


@dataclass(frozen=True, slots=True)
class _Content:
    """The new content of a ref, and its source."""

    target: Digest | None
    origin: str
    moves: tuple[Move, ...] = ()
    note: str = ""
    signature: TagSignature | None = None


def repair_refs(
    handle: RepositoryHandle, sources: Sequence[RepositoryHandle], choices: Mapping[str, str], log: RepairLog
) -> None:
    """Make damaged refs again, and those that another copy of this repository has and this one has not.

    Args:
        choices: Key of a ref ("refs/heads/main", "main" for a branch) -> revision that it is to name.
    """
    chosen = {
        name if name.startswith("refs/") else RefKind.BRANCH.value + name: revision
        for name, revision in choices.items()
    }
    handle.sync()  # the index may be new, for the old one may be lost, too
    broken: dict[str, _BrokenRef] = {}
    for ref in _broken_refs(handle, sources, chosen):
        broken.setdefault(ref.full_name, ref)
    for ref in reversed(broken.values()):
        _repair_ref(handle, ref, sources, chosen, log)
    _repair_names(handle, log)
    _report_orphans(handle, log)


def _broken_refs(
    handle: RepositoryHandle, sources: Sequence[RepositoryHandle], chosen: Mapping[str, str]
) -> Iterator[_BrokenRef]:
    """Refs whose record cannot be read; then those that have none, not even that of a deleted ref.

    These are the ones that another copy of this repository has, or a clone remembers, that the caller names, and that
    the store or the index says were made.
    """
    stored = _names(handle)
    for kind, name in stored:
        try:
            handle.refs.get(kind, name)
        except CorruptionError:
            yield _BrokenRef(kind, name, handle.store.get(ref_key(kind, name)))
        except CkptError:
            continue  # gone, or of a name or version that is not for this repair: fsck reports it
    for source in sources:
        if source.config.store_id == handle.config.store_id:
            yield from (_BrokenRef(kind, name, None) for kind, name in _names(source) if (kind, name) not in stored)
        for name in _remembered(handle, source):
            if (RefKind.BRANCH, name) not in stored:
                yield _BrokenRef(RefKind.BRANCH, name, None)
        for name in _fetched_tags(handle, source):
            if (RefKind.TAG, name) not in stored:
                yield _BrokenRef(RefKind.TAG, name, None)
    for full in chosen:
        for kind in RefKind:
            if full.startswith(kind.value) and (kind, full.removeprefix(kind.value)) not in stored:
                yield _BrokenRef(kind, full.removeprefix(kind.value), None)
    for key in sorted(refs_ever_made(handle.store, handle.index) - {ref_key(*each) for each in stored}):
        for kind in RefKind:
            if key.startswith(kind.value):
                yield _BrokenRef(kind, ref_name(kind, key), None)


def _remembered(handle: RepositoryHandle, source: RepositoryHandle) -> dict[str, Ref]:
    """Branch of this repository -> what `source`, a clone of it, remembers of it, if that commit is here."""
    if source.config.store_id == handle.config.store_id:
        return {}
    place = handle.store.root if isinstance(handle.store, FileStore) else None
    try:
        remotes = read_settings(source.store).remotes
        refs = list(source.refs.list(RefKind.REMOTE))
    except CkptError:
        return {}
    ours = [one.name for one in remotes if one.url in (handle.store.url, str(place))] or [CLONED_FROM]
    graph = read_graph(handle)
    return {
        ref.name.removeprefix(f"{name}/"): ref
        for name in ours for ref in refs if ref.name.startswith(f"{name}/") and ref.target and ref.target in graph
    }  # fmt: skip


def _fetched_tags(handle: RepositoryHandle, source: RepositoryHandle) -> list[str]:
    """Tags that `source`, a clone of this repository alone, fetched and did not move since."""
    if source.config.store_id == handle.config.store_id:
        return []
    try:
        if len(read_settings(source.store).remotes) != 1:
            return []
        refs = list(source.refs.whole(RefKind.TAG))
    except CkptError:
        return []
    graph = read_graph(handle)
    came = [ref for ref in refs if ref.log and ref.log[-1].action.startswith(("fetch: ", "clone: ", "pull: "))]
    return [ref.name for ref in came if ref.target is not None and ref.target in graph]


def _names(handle: RepositoryHandle) -> dict[tuple[RefKind, str], None]:
    return {(kind, name): None for kind, _, name in ref_keys(handle.store) if name is not None}


def _repair_ref(
    handle: RepositoryHandle, ref: _BrokenRef, sources: Sequence[RepositoryHandle], chosen: Mapping[str, str],
    log: RepairLog,
) -> None:  # fmt: skip
    try:
        content = _decide(handle, ref, sources, chosen.get(ref.full_name))
    except NotFoundError as error:
        log.leave("refs", ref.key, f"{error}; {_candidates(handle, ref.full_name)}")
        return
    if not log.dry_run:
        try:
            _write(handle, ref, content)
        except NotFoundError as error:
            log.leave("refs", ref.key, f"{error}; repair chunks first, with --from")
            return
    target = short(content.target) if content.target else "nothing, as a deleted ref does"
    log.did("refs", ref.key, f"names {target} ({content.origin})")


def _decide(
    handle: RepositoryHandle, ref: _BrokenRef, sources: Sequence[RepositoryHandle], choice: str | None
) -> _Content:
    """The new content of the ref.

    Raises:
        NotFoundError: that is not known for certain.
    """
    if choice is not None:
        return _Content(resolve(handle, choice), f"chosen: {choice}")
    for source in sources:
        try:
            remembered = _remembered(handle, source) if ref.kind is RefKind.BRANCH else {}
            found = remembered.get(ref.name) or source.refs.get(ref.kind, ref.name)
        except CkptError:
            continue
        if found.target is not None or source.config.store_id == handle.config.store_id:
            graph = read_graph(handle)
            known = [move for move in found.log if all(one is None or one in graph for one in (move.old, move.new))]
            what = f"as in {source.store.url}" if found.kind is ref.kind else f"as {found.name} of {source.store.url}"
            return _Content(
                found.target, what, tuple(known) if found.kind is ref.kind else (), found.note, found.signature
            )
    raise NotFoundError(f"nothing says for certain what {ref.kind.label} {ref.name!r} named")


def _candidates(handle: RepositoryHandle, full_name: str) -> str:
    """Commits that nothing follows, the youngest first, and how to choose one."""
    graph = read_graph(handle)
    found = (handle.index.read(history.read_commit, digest) for digest in graph.tips(graph.commits))
    rows = sorted(filter(None, found), key=lambda row: -row.time_us)
    shown = ", ".join(f"{row.digest.hex()[:12]} ({row.message[:40]!r})" for row in rows[:_MOST_NAMED])
    best = rows[0].digest.hex()[:12] if rows else "COMMIT"
    command = repair_command(handle.store, "refs", f"--ref {full_name}={best}")
    return f"commits that no other follows: {shown or 'none'}. Choose one: {command}"


def _write(handle: RepositoryHandle, ref: _BrokenRef, content: _Content) -> None:
    kind, name, target = ref.kind, ref.name, content.target
    move = new_move(None, target, f"repaired: {content.origin}", default_author())
    if ref.record is None:
        if target is not None:
            publish_lost_ref(
                handle, kind, name, target, move=move, note=content.note or None, signature=content.signature
            )
        return
    for _ in range(_ATTEMPTS):
        generation = handle.begin_writing()
        if handle.store.get(ref.key) != ref.record:
            raise ConflictError(f"{kind.label} {name!r} was written by another process meanwhile: check again")
        state = read_gc_state(handle.store)  # asked AFTER the ref was read
        if not handle.is_current(state, generation):
            continue
        if target is not None:
            _require_kept(handle, target, state.condemned)
        old = Ref(kind, name, None, PLACEHOLDER_GENERATION, content.moves, ref.record)
        handle.refs.swap(old, target, generation=generation, move=move, note=content.note, signature=content.signature)
        return
    raise ConflictError(f"garbage collections began {_ATTEMPTS} times while {name!r} was set: try again")


def _require_kept(handle: RepositoryHandle, target: Digest, condemned: Collection[str]) -> None:
    """Refuse a commit that is not whole, or of whose history something is about to be collected.

    Other refs may be damaged too, so none of them is asked (as `require_complete` would).

    Raises:
        NotFoundError: the one or the other.
    """
    graph = read_graph(handle)
    integrity = IntegrityView(handle.index)
    if target not in graph:
        raise NotFoundError(f"commit {short(target)} is not here")
    incomplete = integrity.incomplete(integrity.referred_only() | integrity.in_parts(), UnusableParts())
    refs, _ = read_refs(handle.store, Findings(handle.store))
    commits = promised_commits(graph, refs, promisors(handle.store))
    incomplete -= integrity.promised(incomplete, {graph.commits[commit].root for commit in commits})
    if not _need_none(integrity, graph, [target], integrity.above(incomplete)):
        raise NotFoundError(f"commit {short(target)} is not whole")
    dying = integrity.incomplete(integrity.in_packs(condemned), UnusableParts(frozenset(condemned)))
    if not _need_none(integrity, graph, graph.ancestors([target]), integrity.above(dying), may_be_unknown=True):
        raise NotFoundError(f"commit {short(target)} needs what is about to be collected")


def _need_none(
    integrity: IntegrityView, graph: Graph, commits: Iterable[bytes], wrong: set[int], *, may_be_unknown: bool = False
) -> bool:
    """Whether none of the commits, nor their trees and layouts, is among the objects `wrong`.

    Args:
        may_be_unknown: Objects that the index does not know at all do not matter.
    """
    links = graph.commits
    named = [one for digest in commits for one in (digest, links[digest].root, links[digest].layout) if one]
    numbers = integrity.numbers(named)
    return all(numbers.get(one) not in wrong and (may_be_unknown or one in numbers) for one in named)


# --- names, and commits that nothing leads to -----------------------------------------------


def _repair_names(handle: RepositoryHandle, log: RepairLog) -> None:
    """Write the damaged records of names anew: their key is all that they say."""
    for key in [key for key, _ in handle.store.list(NAMES_PREFIX)]:
        if handle.store.get(key) != name_record(key):
            if not log.dry_run:
                handle.store.put(key, name_record(key))
            log.did("refs", key, "says again that the ref exists")


def _report_orphans(handle: RepositoryHandle, log: RepairLog) -> None:
    """Report commits that nothing leads to: a person decides."""
    handle.sync()
    graph = read_graph(handle)
    remembered = {row.target for row in remembered_refs(handle.index).values()}
    try:
        known = known_commits(handle.store, list(handle.refs.every()), read_forgotten(handle.store))
    except CorruptionError:
        return  # records are damaged still, which is reported already: so it is not known what is named
    handle.sync()
    lost = bool(handle.damaged) or packs_were_set_aside(handle.store)
    for digest in graph.tips(graph.orphans(known, remembered, now=read_graph(handle), packs_lost=lost)):
        row = handle.index.read(history.read_commit, digest)
        message = "" if row is None else f" {row.message[:40]!r}"
        keep = repair_command(handle.store, "refs", f"--ref {orphan_name(digest)}={digest.hex()[:12]}")
        if ref_key(RefKind.BRANCH, orphan_name(digest)) in {one.where for one in log.left}:
            keep = "repair what was said of its branch first"
        elif holes := graph.unknown_parents(graph.ancestors([digest])):
            missing = short(next(iter(holes)))
            keep = f"bring {missing}, which is in no pack, first: {repair_command(handle.store, 'chunks')}"
        log.leave(
            "refs", f"commit {short(digest)}",
            f"nothing leads to it{message}: to keep it and what it follows, {keep}; to give it up, cas-ckpt forget "
            f"{short(digest)}",
        )  # fmt: skip


# --- the whole ------------------------------------------------------------------------------

GENERATION_MARGIN = 1000
"""How many more collections may have begun than refs and index have seen."""


def repair_url(
    url: str | os.PathLike[str], request: RepairRequest, *, index_url: str | None = None, progress: Progress = SILENT
) -> RepairReport:
    """Repair the repository at `url`, also one that is too damaged to be opened.

    Raises:
        NoRepositoryError, PermissionDeniedError, ConflictError: see the parts.
    """
    return repair_store(open_store(url), request, index_url=index_url, progress=progress)


def repair_store(
    store: Store, request: RepairRequest, *, index_url: str | None = None, progress: Progress = SILENT
) -> RepairReport:
    """The same on an open store; if the index is damaged, nothing else in this process may have it open."""
    if store.abilities.read_only and not request.dry_run:
        raise PermissionDeniedError(f"{store.url} cannot be written: repair where it can")
    log = RepairLog(request.dry_run)
    if "config" in request.kinds:
        _make_room(store, "config", [CONFIG_KEY], log)
        _repair_config(store, request.sources, index_url, log)
    if "index" in request.kinds:
        _make_room_for_index(store, index_url, log)
    index = open_index(store, index_url, Findings(store))
    with nullcontext() if index is None else closing(index):
        _repair_all_but_index(store, index, request, log, progress)
    if "index" in request.kinds:
        if not request.dry_run:
            for pack, why in rebuild_index(store.url, index_url=index_url, progress=progress).damaged:
                log.leave("index", pack, f"it is left out: {why}; repair packs")
        log.did("index", store.url, "the index is made anew from the packs")
    return log.report()


def repair_open(handle: RepositoryHandle, request: RepairRequest, *, progress: Progress = SILENT) -> RepairReport:
    """Repair an open repository; its index is filled anew in place."""
    handle.require_writable()
    log = RepairLog(request.dry_run)
    if "config" in request.kinds:
        _repair_config(handle.store, request.sources, None, log)
    _repair_all_but_index(handle.store, handle.index, request, log, progress)
    if "index" in request.kinds:
        if not request.dry_run:
            refill_index(handle, progress=progress)
        log.did("index", handle.index.place, "the index is made anew from the packs")
    handle.forget_chunks()
    return log.report()


def _repair_all_but_index(
    store: Store, index: Index | None, request: RepairRequest, log: RepairLog, progress: Progress
) -> None:
    kinds = request.kinds
    with ExitStack() as stack:
        sources = [stack.enter_context(closing(open_source(url))) for url in request.sources]
        if "state" in kinds:
            _make_room(store, "state", [GC_STATE_KEY], log)
            _repair_gc_state(store, index, log)
        if "records" in kinds:
            moved = _make_room(store, "records", ROOT_RECORDS, log)
            _repair_records(store, sources, moved, log)
        if "packs" in kinds or "chunks" in kinds:
            records = check_lost_refs(store, index, check_records(store, Findings(store)), Findings(store))
            if records.config is None:
                advice = 'repair it first, with repo.repair("config", sources=[OTHER])'
                raise CorruptionError(f"the config is damaged: {advice}")
            repair_packs(store, index, records.config, records, request, sources, log, progress=progress)
        if "refs" in kinds:
            config = read_config(store)
            if index is None:
                index = stack.enter_context(Index.open(IN_MEMORY, store_id=config.store_id))
                add_all_packs(store, index, progress=progress)
            _make_room(store, "refs", sorted(refs_ever_made(store, index)), log)
            repair_refs(RepositoryHandle(store, config, index), sources, request.refs, log)


# --- what is in the place of a file ---------------------------------------------------------


def _make_room(store: Store, kind: RepairKind, keys: Iterable[str], log: RepairLog) -> list[str]:
    """Move folders and links away that are where the records `keys` belong: none can be written there; their keys."""
    if not isinstance(store, FileStore):
        return []
    taken = [key for key in keys if is_no_file(store.root / key)]
    for key in taken:
        _move_aside(store, kind, store.root / key, key, log)
    return taken


def _make_room_for_index(store: Store, index_url: str | None, log: RepairLog) -> None:
    """Likewise for the files of an index that is one; a link to one stays."""
    place = index_url or usual_index_place(store, read_config(store).store_id)
    if isinstance(store, FileStore) and "://" not in place and place != IN_MEMORY:
        for path in (Path(f"{place}{end}") for end in ("", "-wal", "-shm", "-journal")):
            if is_no_file(path, links=True):
                _move_aside(store, "index", path, f"index/{path.name}", log)


def _move_aside(store: FileStore, kind: RepairKind, path: Path, key: str, log: RepairLog) -> None:
    if not log.dry_run:
        move_aside(path, store.root / ASIDE_PREFIX / key)
    log.did(kind, key, f"a folder or link that was in its place is in {ASIDE_PREFIX} now")


# --- config -------------------------------------------------------------------------------


def _repair_config(store: Store, sources: Sequence[str], index_url: str | None, log: RepairLog) -> None:
    """Put back a damaged or lost config from another copy of this repository."""
    try:
        read_config(store)
        return
    except (CorruptionError, NotFoundError) as error:
        damaged, why = _read_any(store, CONFIG_KEY), str(error)
    for url in sources:
        other = open_store(url)
        try:
            config = read_config(other)
        except CkptError as error:
            log.leave("config", CONFIG_KEY, f"{url} does not help: {error}")
            continue
        if not _is_copy(store, other, config.store_id, index_url):
            log.leave("config", CONFIG_KEY, f"{url} is another repository, not a copy of this one")
            continue
        if not log.dry_run:
            _replace_damaged(store, CONFIG_KEY, damaged, other.get(CONFIG_KEY))
        log.did("config", CONFIG_KEY, f"as in {url}")
        return
    log.leave("config", CONFIG_KEY, f"{why}; give a copy of this very repository (--from)")


def _is_copy(store: Store, other: Store, store_id: str, index_url: str | None) -> bool:
    """Whether `other`, which has this store id, is a copy of the repository in `store`."""
    try:
        with Index.open(index_url or usual_index_place(store, store_id), store_id=store_id, read_only=True) as index:
            if index.store_id:
                return index.matches
    except CkptError:
        pass  # no index that could say
    return not {key for key, _ in store.list(PACK_PREFIX)}.isdisjoint(key for key, _ in other.list(PACK_PREFIX))


# --- gc state -----------------------------------------------------------------------------


def _repair_gc_state(store: Store, index: Index | None, log: RepairLog) -> None:
    """Make gc state anew if it is damaged, lost or older than a ref or the index: see above when that is safe.

    Raises:
        ConflictError: it was written meanwhile.
    """
    try:
        seen = 0 if index is None else index.generation
    except CorruptionError:
        seen = 0  # a damaged index says nothing: what the refs have seen decides
    refs, _ = read_refs(store, Findings(store))
    damaged = _read_any(store, GC_STATE_KEY)  # after the refs: so it has to know all of their generations
    try:
        state = read_gc_state(store)
        if state.record == damaged and state.generation.number >= seen:
            for ref in refs:
                require_current(state, ref.generation, key=ref.key)
            return
    except CorruptionError:
        pass  # damaged, lost or too old: that is what is made anew below
    highest = max((ref.generation.number for ref in refs), default=0)
    new = Generation(max(highest, seen, 0) + GENERATION_MARGIN - 1).next()
    if not log.dry_run:
        _replace_damaged(store, GC_STATE_KEY, damaged, encode_gc_state(GcState(new, GcPhase.IDLE)))
    log.did("state", GC_STATE_KEY, f"idle, at generation {new.number}; no cas-ckpt gc may have been running")


# --- forgotten commits, policy ------------------------------------------------------------


def _repair_records(store: Store, sources: Sequence[RepositoryHandle], moved: Collection[str], log: RepairLog) -> None:
    """Put back damaged records of forgotten commits, and the policy, from another copy of this repository.

    A clone has a policy and settings of its own: it is no copy.

    Args:
        moved: Keys of records in whose place was something else, and nothing is now.
    """
    try:
        own = read_config(store).store_id
    except CkptError:
        own = ""  # which copies are of this repository is not known
    sources = [source for source in sources if source.config.store_id == own]
    for key in [*moved, *(key for key, _ in store.list(""))]:
        is_forgotten = key.startswith(FORGOTTEN_PREFIX)
        if not is_forgotten and ("/" in key or key == CONFIG_KEY):
            continue
        record = _read_any(store, key)
        if record is None and key not in moved:
            continue
        if record is not None and (not (is_forgotten or should_be_sealed(key, record)) or _is_intact(key, record)):
            continue
        copies = (_read_any(source.store, key) for source in sources)
        intact = next((copy for copy in copies if copy is not None and _is_intact(key, copy)), None)
        if intact is None:
            if record is None:
                continue  # there may have been none
            forget = "forget the same commits again (cas-ckpt forget), then delete this file"
            advice = forget if is_forgotten else "write it again, or delete this file"
            log.leave("records", key, f"no other copy has it (a clone is none): {advice}")
            continue
        if not log.dry_run:
            try:
                _replace_damaged(store, key, record, intact)
            except ConflictError:
                continue  # repaired by another process
        log.did("records", key, "as in another copy")


def _is_intact(key: str, record: bytes) -> bool:
    if not key.startswith(FORGOTTEN_PREFIX):
        return is_sealed(key, record)
    try:
        decode_forgotten(key, record)
    except CorruptionError:
        return False
    return True


# --- of any record --------------------------------------------------------------------------


def _read_any(store: Store, key: str) -> bytes | None:
    """The bytes under `key`, whatever they are; None if there are none."""
    try:
        return store.get(key)
    except NotFoundError:
        return None


def _replace_damaged(store: Store, key: str, damaged: bytes | None, record: bytes) -> None:
    """Put `record` where `damaged` (None: nothing) still is.

    Raises:
        ConflictError: another process wrote there meanwhile.
    """
    if damaged is None:
        store.put_if_absent(key, record)
    else:
        store.compare_and_swap(key, damaged, record)


# --- index: a new one from the packs ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """Result of a rebuild.

    Attributes:
        stats: The new index in numbers.
        damaged: (pack, what is wrong) of packs that could not be read; objects that only
            these hold are missing.
    """

    stats: IndexStats
    damaged: tuple[tuple[str, str], ...]


def rebuild_index(
    url: str | os.PathLike[str], *, index_url: str | None = None, progress: Progress = SILENT
) -> RebuildReport:
    """Make the index of the repository at `url` anew, whatever state it is in. Works without an open handle.

    Raises:
        NoRepositoryError, UnsupportedVersionError: nothing was touched.
        PermissionDeniedError, StorageError: the medium refused.
        ConflictError: the index is damaged and another process has it open, or what is there is not an index of ours.
    """
    store = open_store(url)
    store_id = read_config(store).store_id
    place = index_url or usual_index_place(store, store_id)
    report = rebuild_at(store, store_id, place, progress=progress)
    if "://" in place:
        with Index.open(place, store_id=store_id) as index:
            note_folder(index, store, take=True)
    return report


def rebuild_at(store: Store, store_id: str, place: str, *, progress: Progress = SILENT) -> RebuildReport:
    """The same for an open store, and the index at `place`."""
    with index_beside(place, store_id=store_id) as made:
        damaged = add_all_packs(store, made, progress=progress)
        catch_up = catching_up(store, damaged)
        try:
            return RebuildReport(_replace(place, made, catch_up), tuple(damaged))
        except (CorruptionError, UnsupportedVersionError) as error:
            unusable = error
        if "://" not in place and place != IN_MEMORY:
            own = place == usual_index_place(store, store_id, read_only=True)
            replace_file(Path(place), made, catch_up, only_sqlite=not own)
        elif isinstance(unusable, CorruptionError):
            Index.discard(place, store_id=store_id)  # of a shared database: our own tables alone
            _replace(place, made, catch_up)
        else:
            raise unusable
    with Index.open(place, store_id=store_id) as index:
        _drop_impossible_refs(index)
        return RebuildReport(index.read(usage.read_stats), tuple(damaged))


def _replace(place: str, made: Index, catch_up: CatchUp) -> IndexStats:
    with Index.open(place, store_id=made.store_id) as index:
        if not index.matches:
            raise CorruptionError(f"index {index.place}: it is the index of another repository")
        _drop_impossible_refs(index)
        replace_rows(index, made, catch_up)
        return index.read(usage.read_stats)


def _drop_impossible_refs(index: Index) -> None:
    """Forget refs of names that none can have: what an index remembers of refs stays, but for what is damaged."""
    index.write(remembered.drop_refs, [key for key in index.read(remembered.read_refs) if not is_key(key)])


def refill_index(handle: RepositoryHandle, *, progress: Progress = SILENT) -> RebuildReport:
    """The same for the index of an open repository, which this and other processes may go on using meanwhile.

    Raises:
        PermissionDeniedError: the repository was opened read-only, or its index cannot be written.
        CorruptionError: it is damaged: close the repository, then `rebuild_index` replaces the file.
    """
    handle.require_writable()
    if handle.index.in_memory and handle.index_place not in (None, IN_MEMORY):  # it is a stand-in in memory
        report = rebuild_at(handle.store, handle.config.store_id, str(handle.index_place), progress=progress)
        handle.index = Index.open(str(handle.index_place), store_id=handle.config.store_id)
        handle.forget_chunks()
        return report
    damaged = refill(handle.store, handle.index, progress=progress)
    _drop_impossible_refs(handle.index)
    handle.forget_chunks()
    return RebuildReport(handle.index.read(usage.read_stats), tuple(damaged))
