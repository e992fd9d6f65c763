"""fsck of the small records: config, gc state, refs, forgotten commits, sessions, and whatever else is sealed.

Invariant: every key of the store is looked at, or noted as unknown; a damaged record never ends the
check. Refs are read before packs: what a ref names when it is read is durable already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cas_ckpt.core import forgotten, protocol
from cas_ckpt.core.config import CONFIG_KEY, POLICY_KEY, Config, read_config
from cas_ckpt.core.live import ASIDE_PREFIX, known_commits
from cas_ckpt.core.protocol import GC_STATE_KEY, GcPhase, GcState, read_gc_state, require_current, require_not_older
from cas_ckpt.core.ref_store import DEFAULT_CHANGED_KEY, NAMES_PREFIX, RefStore, name_key
from cas_ckpt.core.refs import Ref, RefKind
from cas_ckpt.core.settings import SETTINGS_KEY, TIERS_KEY
from cas_ckpt.core.signatures import SIGNERS_KEY
from cas_ckpt.errors import CkptError, CorruptionError, InvalidInputError, NotFoundError
from cas_ckpt.index import history, remembered
from cas_ckpt.index.db_errors import REBUILD
from cas_ckpt.index.index import Index
from cas_ckpt.index.rows import RefRow
from cas_ckpt.objects.digest import DIGEST_BYTES, MAGIC, Digest, object_id, unpack_canonical, unseal
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.ops.fsck.report import Effect, Findings, ProblemKind
from cas_ckpt.storage.file import IN_ITS_PLACE, FileStore, is_no_file
from cas_ckpt.storage.store import Store, exists, few_keys, is_key

ROOT_RECORDS = (POLICY_KEY, SETTINGS_KEY, SIGNERS_KEY, TIERS_KEY)
"""Optional records in the root beside the config."""

_INDEX_PREFIX = "index/"
_REF_SUFFIX = ".ref"
_RECORD_BYTES = 16 * 1024 * 1024
"""No record is longer: longer files are not read to find out what they are."""


@dataclass(frozen=True, slots=True)
class Records:
    """The decoded records.

    Attributes:
        config, gc: None where they are damaged.
        refs: Of all kinds, placeholders and deleted ones too; without the damaged.
        forgotten: Commits that keep no data.
        named: Commits that refs, their logs, and records of forgotten and released commits name.
        remembered: Commits that a ref named when the index last heard of it.
        all_known: No ref and no record of forgotten commits is damaged, so that what is live is known.
        packs_lost: Packs cannot be read, or were set aside: commits that are not there may have been in them.
    """

    config: Config | None
    gc: GcState | None
    refs: tuple[Ref, ...]
    forgotten: frozenset[Digest]
    named: frozenset[bytes]
    all_known: bool
    remembered: frozenset[bytes] = frozenset()
    packs_lost: bool = False


def check_records(store: Store, findings: Findings) -> Records:
    """Look at every record of the store.

    Raises:
        NoRepositoryError: there is nothing that looks like a repository.
        UnsupportedVersionError: it is of a newer version.
    """
    config = _check_config(store, findings)
    refs, refs_known = read_refs(store, findings)
    gc = _check_gc_state(store, refs, findings)
    gone, gone_known = _check_forgotten(store, findings)
    _check_harmless(store, findings)
    packs_lost = _check_others(store, findings)
    findings.count("num_refs", sum(ref.target is not None for ref in refs))
    named = frozenset(known_commits(store, refs, gone))
    return Records(config, gc, tuple(refs), gone, named, refs_known and gone_known, packs_lost=packs_lost)


def reread_names(store: Store, records: Records) -> Records:
    """`records` with the refs and forgotten commits as they are now."""
    quiet = Findings(store)
    refs, refs_known = read_refs(store, quiet)
    gone, gone_known = _check_forgotten(store, quiet)
    named = frozenset(known_commits(store, refs, gone))
    return replace(records, refs=tuple(refs), forgotten=gone, named=named, all_known=refs_known and gone_known)


# --- config and gc/state --------------------------------------------------------------------


def _check_config(store: Store, findings: Findings) -> Config | None:
    try:
        return read_config(store)
    except NotFoundError as error:
        if not any(True for _ in store.list(PACK_PREFIX)):
            raise
        what = f"it is missing: {error}"
    except CorruptionError as error:
        what = str(error)
    findings.problem(ProblemKind.CONFIG, CONFIG_KEY, what, effect=Effect.AT_RISK, repair="config")
    return None


def _check_gc_state(store: Store, refs: Sequence[Ref], findings: Findings) -> GcState | None:
    """gc/state as it is after `refs` were read: it has to know the generations of all of them."""
    try:
        state = read_gc_state(store)
        for ref in refs:
            require_current(state, ref.generation, key=ref.key)
    except CorruptionError as error:
        _add_gc_state_problem(findings, error)
        return None
    if state.phase != GcPhase.IDLE:
        findings.note(
            GC_STATE_KEY,
            f"a collection is in phase {state.phase.value!r} with {len(state.condemned)} condemned packs: "
            "if none is running, cas-ckpt gc finishes it",
        )
    return state


def _add_gc_state_problem(findings: Findings, error: CorruptionError) -> None:
    """Of a gc/state that is damaged or lost, or was put back from an older copy."""
    findings.problem(ProblemKind.GC_STATE, GC_STATE_KEY, str(error), effect=Effect.AT_RISK, repair="state")


# --- refs -----------------------------------------------------------------------------------


def read_refs(store: Store, findings: Findings) -> tuple[list[Ref], bool]:
    """All intact refs, and whether there are no others."""
    found: list[Ref] = []
    all_known = True
    refs = RefStore(store)
    for kind, key, name in ref_keys(store):
        try:
            if name is None:
                findings.note(key, f"not a ref: its name does not end in {_REF_SUFFIX}")
            else:
                found.append(refs.get(kind, name))
        except CorruptionError as error:
            all_known = False
            _add_ref_problem(findings, key, str(error), f"{kind.label} {name}")
        except InvalidInputError as error:
            findings.note(key, f"not a ref: {error}")
        except NotFoundError:
            continue
    return found, all_known


def _add_ref_problem(findings: Findings, key: str, what: str, name: str) -> None:
    findings.problem(ProblemKind.REF, key, what, effect=Effect.AT_RISK, repair="refs", refs=(name,))


def ref_keys(store: Store) -> list[tuple[RefKind, str, str | None]]:
    """(kind, key, name) of all that is stored where refs are; without a name what has none of a ref."""
    keys = [(kind, key) for kind in RefKind for key, _ in store.list(kind.value)]
    return [(kind, key, ref_name(kind, key) if key.endswith(_REF_SUFFIX) else None) for kind, key in keys]


def ref_name(kind: RefKind, key: str) -> str:
    """The name of the ref that is stored under `key`."""
    return key.removeprefix(kind.value).removesuffix(_REF_SUFFIX)


def check_lost_refs(store: Store, index: Index | None, records: Records, findings: Findings) -> Records:
    """`records`, in the light of the refs that the index remembers: a deleted ref leaves its record, so none may go."""
    lost = sorted(key for key in refs_ever_made(store, index) if not exists(store, key))
    for key in lost:
        _add_ref_problem(findings, key, "it is gone, and was not deleted: what it named would be collected", key)
    if index is not None:
        if records.gc is not None:
            try:
                require_not_older(store, records.gc, index.generation)
            except CorruptionError as error:
                _add_gc_state_problem(findings, error)
        nothing = not lost and not records.refs and records.all_known and index.read(history.read_links)
        if nothing and not any(name for _, _, name in ref_keys(store)):  # a push may have begun some since
            lost = ["refs/"]
            what = "there are commits, and no branch, tag or pin, nor any trace of one: the refs are lost"
            _add_ref_problem(findings, lost[0], what, "all")
    remembered = frozenset(row.target for row in remembered_refs(index).values())
    return replace(records, all_known=records.all_known and not lost, remembered=remembered)


def refs_ever_made(store: Store, index: Index | None) -> set[str]:
    """Keys of the refs that were made, as the store or the index remembers."""
    return RefStore(store).announced() | remembered_refs(index).keys()


def remembered_refs(index: Index | None) -> dict[str, RefRow]:
    """Key -> ref, as the index last knew it.

    Raises:
        CorruptionError: it is damaged, or has a key that no ref can have.
    """
    if index is None:
        return {}
    found = index.read(remembered.read_refs)
    for key in found:
        if not is_key(key):
            raise CorruptionError(f"index {index.place}: it remembers {key!r}, a name that no ref can have; {REBUILD}")
    return found


# --- forgotten commits, names, sessions, and all others -------------------------------------


def _check_forgotten(store: Store, findings: Findings) -> tuple[frozenset[Digest], bool]:
    """Forgotten commits, and whether every record of them could be read."""
    found: set[Digest] = set()
    all_known = True
    for key, record in _read_all(store, forgotten.PREFIX):
        if not forgotten.is_record(key):
            findings.note(key, "not a record of forgotten commits: none has such a name; it is passed by, delete it")
            continue
        try:
            found.update(forgotten.decode_forgotten(key, record))
        except CorruptionError as error:
            all_known = False
            findings.problem(ProblemKind.RECORD, key, str(error), effect=Effect.AT_RISK, repair="records")
    return frozenset(found), all_known


def _check_harmless(store: Store, findings: Findings) -> None:
    """Records that no data depends on: sessions, names of refs, commits that logs released."""
    for key, record in _read_all(store, protocol.PREFIX):
        try:
            unseal("session", record, version=protocol.VERSION, key=key)
        except CkptError as error:
            findings.note(key, f"a session that cannot be read; nothing depends on it, delete it: {error}")
    announced = {name_key(key) for key in RefStore(store).announced()}
    for key, record in _read_all(store, NAMES_PREFIX):
        if key not in announced:
            findings.note(key, "not the record of a name: no ref is called so; it is passed by, delete it")
        elif not is_sealed(key, record):
            what = f"{len(record)} bytes that are not the intact record of a name"
            findings.problem(ProblemKind.RECORD, key, what, effect=Effect.HARMLESS, repair="refs")
    for key, record in _read_all(store, forgotten.RELEASED_PREFIX):
        if not is_sealed(key, record):
            what = "commits that logs once named, unreadable: delete it; what it named may be reported as orphaned"
            findings.note(key, what)


def _check_others(store: Store, findings: Findings) -> bool:
    """Every other key: a sealed record is checked, anything else is noted; whether packs were set aside."""
    named = (forgotten.PREFIX, forgotten.RELEASED_PREFIX, NAMES_PREFIX)
    known = (PACK_PREFIX, *named, protocol.PREFIX, _INDEX_PREFIX, *(kind.value for kind in RefKind))
    for key in ROOT_RECORDS:
        if isinstance(store, FileStore) and is_no_file(store.root / key):
            findings.problem(ProblemKind.RECORD, key, IN_ITS_PLACE, effect=Effect.HARMLESS, repair="records")
    aside, packs_lost = 0, False
    for key, size in store.list(""):
        if key.startswith(ASIDE_PREFIX):
            aside += 1
            packs_lost |= key.startswith(ASIDE_PREFIX + PACK_PREFIX)
        elif key not in (CONFIG_KEY, GC_STATE_KEY, DEFAULT_CHANGED_KEY) and not key.startswith(known):
            _check_other(store, findings, key, size)
    if aside:
        findings.note(ASIDE_PREFIX, f"{aside} damaged files that repair set aside: delete them once all is well")
    return packs_lost


def _check_other(store: Store, findings: Findings, key: str, size: int) -> None:
    try:
        record = store.get(key) if size <= _RECORD_BYTES else b""
    except NotFoundError:
        return
    if not should_be_sealed(key, record):
        findings.note(key, "not a file of cas_ckpt, as far as this version knows")
    elif not is_sealed(key, record):
        what = f"{size} bytes that are not an intact record of this key"
        findings.problem(ProblemKind.RECORD, key, what, effect=Effect.HARMLESS, repair="records")


def should_be_sealed(key: str, record: bytes) -> bool:
    """Whether `key`, which is none of those with checks of their own, is that of a sealed record, damaged or not."""
    return "/" not in key and (record.startswith(MAGIC) or key in ROOT_RECORDS)


def is_sealed(key: str, record: bytes) -> bool:
    """Whether `record` is an intact sealed record of some kind that was written for `key`."""
    head = len(MAGIC) + DIGEST_BYTES
    try:
        body = unpack_canonical(record[head:])
    except CkptError:
        return False
    if not isinstance(body, list) or len(body) != 4 or not isinstance(body[0], str) or body[2] != key:
        return False
    return record[:head] == MAGIC + object_id(f"record {body[0]}", record[head:])


def _read_all(store: Store, prefix: str) -> Iterator[tuple[str, bytes]]:
    for key in few_keys(store, prefix):
        try:
            yield key, store.get(key)
        except NotFoundError:
            continue
        except CorruptionError:  # longer than any record
            yield key, b""
