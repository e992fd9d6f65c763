"""repair of refs: a damaged or lost one is made again, naming a commit that is known to be right.

    1. in another copy of this repository (same store id), or any that is given, the ref of that name
    2. else what the caller chose
    3. else nothing: the candidates are told, with the command that chooses one

Invariant: as in core/publish.py: the ref's stored bytes are read, then gc/state, then the target is seen to
be whole, then the bytes are swapped. A guess is never written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from cas_ckpt.core.forgotten import read_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import Graph, known_commits, orphan_name, read_graph
from cas_ckpt.core.protocol import read_gc_state
from cas_ckpt.core.publish import publish_ref
from cas_ckpt.core.refs import (
    NAMES_PREFIX,
    PLACEHOLDER_GENERATION,
    Move,
    Ref,
    RefKind,
    default_author,
    name_record,
    new_move,
    ref_key,
)
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import CkptError, ConflictError, CorruptionError, NotFoundError
from cas_ckpt.index import history, integrity, meta
from cas_ckpt.index.integrity import Soundness, Unusable
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.ops.fsck.report import RepairKind, RepairLog, repair_command

_SUFFIX = ".ref"
_ATTEMPTS = 10
_MOST_NAMED = 5


def repair_refs(
    handle: RepositoryHandle, sources: Sequence[RepositoryHandle], choices: Mapping[str, str], log: RepairLog
) -> None:
    """Make damaged refs again, and those that another copy of this repository has and this one has not.

    Args:
        choices: Key of a ref ("refs/heads/main", "main" for a branch) -> revision that it is to name.
    """
    chosen = {_full_name(name): revision for name, revision in choices.items()}
    broken = [*_damaged(handle), *_lost(handle, sources), *_chosen_only(handle, chosen), *_remembered(handle)]
    for kind, name, record in {(each[0], each[1]): each for each in reversed(broken)}.values():
        _repair_one(handle, kind, name, record, sources, chosen, log)
    _repair_names(handle, log)
    _tell_orphans(handle, log)


def _repair_names(handle: RepositoryHandle, log: RepairLog) -> None:
    """Write the damaged records of names anew: their key is all that they say."""
    for key in [key for key, _ in handle.store.list(NAMES_PREFIX)]:
        if handle.store.get(key) != name_record(key):
            if not log.dry_run:
                handle.store.put(key, name_record(key))
            log.did(RepairKind.REFS, key, "says again that the ref exists")


def _tell_orphans(handle: RepositoryHandle, log: RepairLog) -> None:
    """Commits that nothing leads to: a person decides."""
    handle.sync()
    graph = read_graph(handle)
    remembered = {row.target for row in handle.index.read(meta.read_refs).values()}
    try:
        known = known_commits(handle.store, list(handle.refs.every()), read_forgotten(handle.store))
    except CorruptionError:
        return  # what is known is not known yet: that is told already
    handle.sync()
    orphans = graph.orphans(known, remembered, now=read_graph(handle))
    for digest in graph.tips(orphans):
        row = handle.index.read(history.read_commit, digest)
        what = "" if row is None else f" {row.message[:40]!r}"
        keep = repair_command(handle.store, RepairKind.REFS, f"--ref {orphan_name(digest)}={digest.hex()[:12]}")
        log.leave(
            RepairKind.REFS, f"commit {short(digest)}",
            f"nothing leads to it{what}: to keep it and what it follows, {keep}; to give it up, cas-ckpt forget "
            f"{short(digest)}",
        )  # fmt: skip


def _full_name(name: str) -> str:
    return name if name.startswith("refs/") else RefKind.BRANCH.value + name


def _damaged(handle: RepositoryHandle) -> Iterator[tuple[RefKind, str, bytes]]:
    """Refs whose record cannot be read, and the bytes that stand there."""
    for kind, name in _names(handle):
        try:
            handle.refs.get(kind, name)
        except CorruptionError:
            yield kind, name, handle.store.get(ref_key(kind, name))
        except CkptError:
            continue  # gone, or of a name or version that is not for this repair: fsck tells of it


def _names(handle: RepositoryHandle) -> list[tuple[RefKind, str]]:
    return [
        (kind, key.removeprefix(kind.value).removesuffix(_SUFFIX))
        for kind in RefKind
        for key, _ in handle.store.list(kind.value)
        if key.endswith(_SUFFIX)
    ]


def _lost(handle: RepositoryHandle, sources: Sequence[RepositoryHandle]) -> Iterator[tuple[RefKind, str, bytes | None]]:
    """Refs of which another copy of this repository has a record, and this one none, not even a deleted one."""
    here = set(_names(handle))
    for source in sources:
        if source.config.store_id == handle.config.store_id:
            for kind, name in _names(source):
                if (kind, name) not in here:
                    here.add((kind, name))
                    yield kind, name, None


def _remembered(handle: RepositoryHandle) -> Iterator[tuple[RefKind, str, bytes | None]]:
    """Refs that the store or the index says were made and that have no record, not even a deleted one."""
    here = {ref_key(kind, name) for kind, name in _names(handle)}
    for key in sorted((handle.refs.announced() | handle.index.read(meta.read_refs).keys()) - here):
        for kind in RefKind:
            if key.startswith(kind.value):
                yield kind, key.removeprefix(kind.value).removesuffix(_SUFFIX), None


def _chosen_only(handle: RepositoryHandle, chosen: Mapping[str, str]) -> Iterator[tuple[RefKind, str, bytes | None]]:
    """Refs that the caller names and that are not there at all."""
    here = {kind.value + name for kind, name in _names(handle)}
    for full in chosen:
        kind = next((kind for kind in RefKind if full.startswith(kind.value)), None)
        if kind is not None and full not in here:
            yield kind, full.removeprefix(kind.value), None


def _repair_one(
    handle: RepositoryHandle, kind: RefKind, name: str, record: bytes | None,
    sources: Sequence[RepositoryHandle], chosen: Mapping[str, str], log: RepairLog,
) -> None:  # fmt: skip
    key = ref_key(kind, name)
    full = kind.value + name
    try:
        target, moves, note, why = _decide(handle, kind, name, sources, chosen.get(full))
    except NotFoundError as error:
        log.leave(RepairKind.REFS, key, f"{error}; {_candidates(handle, full)}")
        return
    what = f"names {short(target) if target else 'nothing, as a deleted ref does'} ({why})"
    if not log.dry_run:
        try:
            _write(handle, kind, name, record, target, moves, note, why)
        except NotFoundError as error:
            log.leave(RepairKind.REFS, key, f"{error}; repair chunks first, with --from")
            return
    log.did(RepairKind.REFS, key, what)


def _decide(
    handle: RepositoryHandle, kind: RefKind, name: str, sources: Sequence[RepositoryHandle], choice: str | None
) -> tuple[Digest | None, tuple[Move, ...], str, str]:
    """(target, log, note, where that is known from).

    Raises:
        NotFoundError: nobody knows for certain.
    """
    if choice is not None:
        return resolve(handle, choice), (), "", f"chosen: {choice}"
    for source in sources:
        try:
            ref = source.refs.get(kind, name)
        except CkptError:
            continue
        if ref.target is not None or source.config.store_id == handle.config.store_id:
            return ref.target, _known_moves(handle, ref), ref.note, f"as in {source.store.url}"
    raise NotFoundError(f"nothing tells for certain what {kind.label} {name!r} named")


def _known_moves(handle: RepositoryHandle, ref: Ref) -> tuple[Move, ...]:
    graph = read_graph(handle)
    return tuple(move for move in ref.log if all(one is None or one in graph for one in (move.old, move.new)))


def _write(
    handle: RepositoryHandle, kind: RefKind, name: str, record: bytes | None, target: Digest | None,
    moves: tuple[Move, ...], note: str, why: str,
) -> None:  # fmt: skip
    move = new_move(None, target, f"repaired: {why}", default_author())
    if record is None:
        if target is None:
            return
        publish_ref(handle, kind, name, target, move=move, note=note or None, lost=True)
        return
    for _ in range(_ATTEMPTS):
        generation = handle.begin_writing()
        if handle.store.get(ref_key(kind, name)) != record:
            raise ConflictError(f"{kind.label} {name!r} was written by somebody else meanwhile: check again")
        state = read_gc_state(handle.store)  # asked AFTER the ref was read
        if not handle.is_current(state, generation):
            continue
        if target is not None:
            _require_kept(handle, target, state.condemned)
        old = Ref(kind, name, None, PLACEHOLDER_GENERATION, moves, record)
        handle.refs.swap(old, target, generation=generation, move=move, note=note)
        return
    raise ConflictError(f"garbage collections began {_ATTEMPTS} times while {name!r} was set: try again")


def _require_kept(handle: RepositoryHandle, target: Digest, condemned: Collection[str]) -> None:
    """Refuse a commit that is not whole, or of whose history something is about to be collected.

    Other refs may be damaged too, so none of them is asked (as `require_complete` would).

    Raises:
        NotFoundError: the one or the other.
    """
    graph = read_graph(handle)
    sound = integrity.Soundness(handle.index)
    if target not in graph:
        raise NotFoundError(f"commit {short(target)} is not here")
    torn = sound.above(sound.broken(sound.referred_only() | sound.in_parts(), Unusable()))
    if not _clear(sound, graph, [target], torn):
        raise NotFoundError(f"commit {short(target)} is not whole")
    dying = sound.broken(sound.in_packs(condemned), Unusable(frozenset(condemned)))
    if not _clear(sound, graph, graph.ancestors([target]), sound.above(dying), absent=True):
        raise NotFoundError(f"commit {short(target)} needs what is about to be collected")


def _clear(
    sound: Soundness, graph: Graph, commits: Iterable[bytes], wrong: set[int], *,
    absent: bool = False,
) -> bool:  # fmt: skip
    """Whether none of the commits, nor their trees and layouts, is among the objects `wrong`.

    Args:
        absent: Objects that the index does not know at all do not matter.
    """
    links = graph.commits
    named = [one for digest in commits for one in (digest, links[digest].root, links[digest].layout) if one]
    numbers = sound.numbers(named)
    return all(numbers.get(one) not in wrong and (absent or one in numbers) for one in named)


def _candidates(handle: RepositoryHandle, full: str) -> str:
    """Commits that nothing follows and that no ref names, the youngest first, and how to choose one."""
    graph = read_graph(handle)
    rows = sorted(
        filter(None, (handle.index.read(history.read_commit, head) for head in graph.tips(graph.commits))),
        key=lambda row: -row.time_us,
    )
    shown = ", ".join(f"{row.digest.hex()[:12]} ({row.message[:40]!r})" for row in rows[:_MOST_NAMED])
    best = rows[0].digest.hex()[:12] if rows else "COMMIT"
    command = repair_command(handle.store, RepairKind.REFS, f"--ref {full}={best}")
    return f"commits that no other follows: {shown or 'none'}. Choose one: {command}"
