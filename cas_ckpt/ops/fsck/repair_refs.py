"""repair of refs: a damaged or lost one is made again, naming a commit that is known to be right.

    1. what the caller chose
    2. else, in another copy of this repository (same store id), the ref of that name; in a clone, what it remembers of
       the branch (`origin/main`), or its own ref of that name. A clone with one remote has tags of
       this repository: the log of each says that it was fetched
    3. else nothing: the candidates are reported, with the command that chooses one

Invariant: as in core/publish.py: the ref's stored bytes are read, then gc/state, then the target is seen to
be whole, then the bytes are swapped. A guess is never written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cas_ckpt.core.forgotten import read_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import (
    Graph,
    known_commits,
    orphan_name,
    packs_were_set_aside,
    promised_commits,
    promisors,
    read_graph,
)
from cas_ckpt.core.protocol import read_gc_state
from cas_ckpt.core.publish import publish_lost_ref
from cas_ckpt.core.ref_store import NAMES_PREFIX, name_record
from cas_ckpt.core.refs import (
    PLACEHOLDER_GENERATION,
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
from cas_ckpt.errors import CkptError, ConflictError, CorruptionError, NotFoundError
from cas_ckpt.index import history
from cas_ckpt.index.integrity import IntegrityView, UnusableParts
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.ops.fsck.records import read_refs, ref_keys, ref_name, refs_ever_made, remembered_refs
from cas_ckpt.ops.fsck.report import Findings, RepairLog, repair_command
from cas_ckpt.storage.file import FileStore

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
