"""Where refs are stored, listed, remembered and swapped.

Invariant: a ref moves by one compare-and-swap of its whole record; what is remembered of a look is believed only as
long as the store shows the same version. The protocol that decides *when* a ref may move is in core/publish.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar, cast

from cas_ckpt.core.config import require_there
from cas_ckpt.core.forgotten import write_released
from cas_ckpt.core.refs import (
    MAX_LOG,
    PLACEHOLDER_GENERATION,
    REF_SUFFIX,
    REFS,
    VERSION,
    Generation,
    Move,
    Ref,
    RefKind,
    TagSignature,
    check_name,
    decode_ref,
    encode_ref,
    ref_key,
)
from cas_ckpt.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    TooLargeError,
)
from cas_ckpt.memory import current_limits
from cas_ckpt.objects.digest import Digest, seal, unseal
from cas_ckpt.parallel.workers import map_all
from cas_ckpt.storage.store import ListsVersions, Store, exists, few_keys

if TYPE_CHECKING:
    from cas_ckpt.core.host_cache import RepositoryCache

_T = TypeVar("_T")

NAMES_PREFIX = "names/"
"""A record for each ref that ever named something, outside of `refs/`: it shows when the ref itself is lost."""

DEFAULT_CHANGED_KEY = REFS + "default-changed"
"""There once the default branch was changed, and seen in every listing of refs: a config that a host remembers is not
to be believed then."""

REF_BYTES = 16 * 1024
"""Of a record, on average over a listing, for each of the refs that there may be (`cas_ckpt.limits(max_refs=)`): twice
what one with a full log takes, and long names and a note in it."""

REFS_AT_ONCE = 1_000
"""Records that are read together, and are in memory together, where requests wait for a network."""

KNOWN_BYTES = 64 * 1024 * 1024
"""Records that are remembered from look to look: what is beyond is read again. They may be a stranger's."""

_MOST_ATTEMPTS = 100

MOST_PACKS = 10_000
"""Hints of refs that are remembered at a time."""


def name_key(key: str) -> str:
    """Where it is written down that the ref under `key` exists."""
    return NAMES_PREFIX + key.removeprefix(REFS)


def name_record(key: str) -> bytes:
    """The record under `key` that says that a ref exists: its key is all that it says."""
    return seal("name", VERSION, {}, key=key)


class RefStore:
    """Reads and swaps refs in a store.

    `get` asks the store, always. Where a listing shows the versions of values (`ListsVersions`), refs that are only
    looked at (`list`, `seen`) take one listing, and one request for each that changed since the last look.

    Args:
        cache: Where records of earlier looks are kept, with their versions.
        num_requests: How many requests at once are of use.
        look: Called, before anything is returned, with whether what was found proves that this is the repository
            that the cache knows.

    Attributes:
        packs: Target of a ref that was looked at -> the meta pack that the ref says holds it: a hint.
    """

    def __init__(
        self, store: Store, *, cache: RepositoryCache | None = None, num_requests: int = 1,
        look: Callable[[bool], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._store = store
        self._cache = cache
        self._num_requests = num_requests
        self._tell = look
        self._lists_versions = not store.abilities.local and isinstance(store, ListsVersions)
        self._known: dict[str, tuple[str, bytes]] | None = None
        self.packs: dict[Digest, bytes] = {}
        self._lock = threading.RLock()
        self._thread = threading.local()

    def get(self, kind: RefKind, name: str) -> Ref:
        """The ref as it is now, also when it is a placeholder.

        Raises:
            NotFoundError: no such ref. CorruptionError: its record is damaged.
        """
        found = self.find(kind, name)
        if found is None:
            raise NotFoundError(f"there is no {kind.label} {name!r}")
        return found

    def find(self, kind: RefKind, name: str) -> Ref | None:
        """The ref as `get` gives it; None if there is none."""
        key = ref_key(kind, name)
        try:
            record = self._store.get(key)
        except NotFoundError:
            self._tell(False)
            return None
        self._tell(self._lists_versions and self._remembered().get(key, ("", b""))[1] == record)
        return self._noted(decode_ref(kind, name, key, record))

    def seen(self, kinds: Sequence[RefKind], name: str) -> list[Ref]:
        """The refs of this name that have a target, of these kinds, in their order; for readers."""
        keys = [ref_key(kind, name) for kind in kinds]
        if self._lists_versions and (len(keys) > 1 or self._one_look() is not None):
            versions, read = self._versions(), dict[str, bytes]()
            records = self._records(versions, keys, _Totals(self._store.url), read)
            self._note(versions, read)
        else:
            records = None
        found = []
        for kind, key in zip(kinds, keys, strict=True):
            if records is not None:
                ref = self._decoded(kind, name, key, records) if key in records else None
            elif (ref := self.find(kind, name)) is not None:
                self._remember(ref)
            if ref is not None and ref.target is not None:
                found.append(ref)
        return found

    def list(self, *kinds: RefKind) -> Iterator[Ref]:
        """All refs of `kinds` that have a target, kind by kind, by name; without an argument, of all kinds.

        Files of other names are not refs. These have neither log nor record (`whole` gives them): who looks at
        thousands keeps what they name, and not some ten thousand bytes of each.
        """
        return (replace(ref, log=(), record=b"") for ref in self.whole(*kinds))

    def whole(self, *kinds: RefKind) -> Iterator[Ref]:
        """The same with logs, and with records to swap."""
        return (ref for ref in self.deleted_too(*kinds) if ref.target is not None)

    def deleted_too(self, *kinds: RefKind) -> Iterator[Ref]:
        """The same with those that were deleted, and those that never had a target."""
        if not self._lists_versions:
            return (ref for kind in kinds or RefKind for ref in self._each(kind))
        versions = self._versions()
        named = [each for kind in kinds or RefKind for each in _names(kind, versions)]
        return self._looked(versions, named)

    def every(self) -> Iterator[Ref]:
        """All refs of all kinds, placeholders and deleted ones too: what garbage collection looks at.

        Raises:
            CorruptionError: a file that this version cannot take for a ref: it may keep something.
        """
        for kind in RefKind:
            yield from self._each(kind, strict=True)

    def _each(self, kind: RefKind, *, strict: bool = False) -> Iterator[Ref]:
        total = _Total(self._store.url)
        named = _names(kind, (total.counted(key) for key, _ in self._store.list(kind.value)), strict=strict)

        def get(each: tuple[RefKind, str, str]) -> Ref:
            ref = self.get(kind, each[1])
            total.counted(ref, num_bytes=len(ref.record or b""))
            return ref

        if self._num_requests == 1:
            return map(get, named)
        return chain.from_iterable(map_all(get, some, num_threads=self._num_requests) for some in _runs(named))

    # --- looks that ask once -----------------------------------------------------------------

    @contextmanager
    def one_look(self) -> Iterator[None]:
        """Inside the block, refs that this thread only looks at are all of one moment, that of its first look."""
        before = self._one_look()
        self._thread.look = {} if before is None else before
        try:
            yield
        finally:
            self._thread.look = before

    def _one_look(self) -> dict[str, str] | None:
        """The versions of this thread's look, empty before the first; None outside of `one_look`."""
        found: dict[str, str] | None = getattr(self._thread, "look", None)
        return found

    def require_there(self) -> None:
        """Raise NoRepositoryError if the repository is gone; asks nothing if this look has seen refs."""
        if not self._one_look():
            require_there(self._store)

    def _versions(self) -> dict[str, str]:
        """Key of every ref -> its version."""
        look = self._one_look()
        if look:
            return look
        totals = _Totals(self._store.url)
        listed = cast(ListsVersions, self._store).list_versions(REFS)
        found = {each.key: totals.of(each.key).counted(each.version) for each in listed}
        known = self._remembered()
        self._tell(any(known[key][0] == version for key, version in found.items() if key in known))
        if look is not None:
            look.update(found)
        return found

    def default_may_have_changed(self) -> bool:
        """Whether the default branch may be another one than at init; for all that is known where nothing is listed."""
        return not self._lists_versions or DEFAULT_CHANGED_KEY in self._versions()

    def _looked(self, versions: Mapping[str, str], named: Sequence[tuple[RefKind, str, str]]) -> Iterator[Ref]:
        """These refs, in their order; no more records are in memory than those that are remembered, and some."""
        totals, read = _Totals(self._store.url), dict[str, bytes]()
        try:
            for some in _runs(named):
                records = self._records(versions, [key for _, _, key in some], totals, read)
                yield from (self._decoded(*each, records) for each in some if each[2] in records)
        finally:
            self._note(versions, read)

    def _records(
        self, versions: Mapping[str, str], keys: Iterable[str], totals: _Totals, read: dict[str, bytes]
    ) -> dict[str, bytes]:
        """The records under those of `keys` that are there; only what changed is read, and added to `read`.

        A record that is replaced between the listing and its reading is remembered under a version that it does not
        have. The next listing shows another version then, and it is read again.
        """
        known = self._remembered()
        wanted = [key for key in keys if key in versions]
        changed = [key for key in wanted if key not in known or known[key][0] != versions[key]]

        def read_one(key: str) -> bytes:
            record = self._store.get(key)
            return totals.of(key).counted(record, num_bytes=len(record))

        found = dict(zip(changed, map_all(read_one, changed, num_threads=self._num_requests), strict=True))
        if sum(map(len, read.values())) + sum(map(len, found.values())) <= KNOWN_BYTES:
            read.update(found)
        return {key: found[key] if key in found else known[key][1] for key in wanted}

    def _note(self, versions: Mapping[str, str], read: Mapping[str, bytes]) -> None:
        """Remember what was read, here and for the next process, beside what else is still there."""
        if not read:
            return
        kept = {key: each for key, each in self._remembered().items() if key in versions and key not in read}
        now = {key: (versions[key], record) for key, record in read.items()}
        left = KNOWN_BYTES - sum(map(len, read.values()))
        for key, each in kept.items():
            left -= len(each[1])
            if left < 0:
                break
            now[key] = each
        with self._lock:
            self._known = now
        if self._cache is not None:
            self._cache.note_refs(now)

    def _decoded(self, kind: RefKind, name: str, key: str, records: Mapping[str, bytes]) -> Ref:
        """The ref in a record that may be from the cache; if that is damaged, as the store has it now."""
        try:
            return self._noted(decode_ref(kind, name, key, records[key]))
        except CorruptionError:
            return self.get(kind, name)

    def _remember(self, ref: Ref) -> None:
        """Let the next process know the record again; its version is not known, so a listing reads it."""
        known, record = self._remembered(), ref.record
        if self._cache is None or not self._lists_versions or record is None:
            return
        if known.get(ref.key, ("", b""))[1] != record:
            now = {**known, ref.key: ("", record)}
            with self._lock:
                self._known = now
            self._cache.note_refs(now)

    def _noted(self, ref: Ref) -> Ref:
        """`ref`, of which is remembered where its target is said to be."""
        if ref.target is not None and ref.pack is not None:
            with self._lock:
                if len(self.packs) >= MOST_PACKS:
                    self.packs.clear()
                self.packs[ref.target] = ref.pack
        return ref

    def _remembered(self) -> dict[str, tuple[str, bytes]]:
        with self._lock:
            if self._known is None:
                self._known = {} if self._cache is None else self._cache.refs()
            return self._known

    # --- what shows that refs exist -------------------------------------------------------------

    def announced(self) -> set[str]:
        """Keys of all refs that ever named something, also of those whose record is lost."""
        most = len(RefKind) * current_limits().max_refs
        keys = few_keys(self._store, NAMES_PREFIX, most=most, instead=f"if they are meant, {_RAISE}")
        named = [REFS + key.removeprefix(NAMES_PREFIX) for key in keys]
        return {key for kind in RefKind for _, _, key in _names(kind, named)}  # no writer of ours made others

    def was_announced(self, key: str) -> bool:
        """Whether the ref under `key` ever named something."""
        return exists(self._store, name_key(key))

    def announce(self, keys: Iterable[str]) -> None:
        """Write down, beside the refs, that these exist: before they name anything, and for good."""
        for key in keys:
            if not self.was_announced(key):
                with suppress(ConflictError):  # another process announced it at the same time, with the same record
                    self._store.put_if_absent(name_key(key), name_record(name_key(key)))

    def create_placeholder(self, kind: RefKind, name: str) -> Ref:
        """A new ref without a target (step w2 of the writer protocol).

        Raises:
            ConflictError: it exists already.
        """
        key = ref_key(kind, name)
        record = encode_ref(Ref(kind, name, None, PLACEHOLDER_GENERATION, (), b""))
        self._store.put_if_absent(key, record)
        return decode_ref(kind, name, key, record)

    def swap(
        self, ref: Ref, target: Digest | None, *, generation: Generation, move: Move | None = None,
        note: str | None = None, signature: TagSignature | None = None, signed_only: bool | None = None,
        pack: bytes | None = None,
    ) -> Ref:  # fmt: skip
        """Let `ref` name `target`, if it still is as it was read: this is THE commit point.

        A target of None makes it a placeholder again: the ref is deleted, its log stays.

        Args:
            move: Entry for the ref's log; None for the ordinary commit on top of the head.
            note: Message of an annotated tag, reason of a pin; None leaves it as it is, and the signature.
            signature: Of the tag with this note; the one that it had goes with the old note.
            signed_only: Whether the branch takes signed commits only; None leaves that as it is.
            pack: Name of the meta pack that holds `target`, for readers who know nothing else; None: not said.
        Raises:
            ConflictError: it was moved meanwhile.
        """
        if ref.target is None and target is not None:
            self.announce([ref.key])
        log = (*ref.log, move) if move else ref.log
        if len(log) > MAX_LOG:
            dropped = {one for left in log[:-MAX_LOG] for one in (left.old, left.new) if one is not None}
            write_released(self._store, dropped)
            log = log[-MAX_LOG:]
        if pack is None and target == ref.target:
            pack = ref.pack
        wanted = replace(ref, target=target, generation=generation, log=log, pack=pack)
        if note is not None:
            wanted = replace(wanted, note=note, signature=signature)
        if signed_only is not None:
            wanted = replace(wanted, signed_only=signed_only)
        return self._replace(ref, wanted)

    def fence(self, ref: Ref, *, generation: Generation, log: tuple[Move, ...]) -> Ref:
        """Give `ref` a new generation and log, and nothing else: a process that read it before cannot swap it any more.

        Raises:
            ConflictError: it was moved meanwhile.
        """
        return self._replace(ref, replace(ref, generation=generation, log=log))

    def _replace(self, ref: Ref, wanted: Ref) -> Ref:
        record = encode_ref(wanted)
        swap_record(self._store, ref.key, ref.record, record)
        return replace(wanted, record=record)


class _Total:
    """How much of a listing of refs of one kind came so far, whatever the store says of its length.

    Threads may share it. The limit is that of the thread which makes it.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._most = current_limits().max_refs
        self._number = self._num_bytes = 0

    def counted(self, found: _T, *, num_bytes: int = 0) -> _T:
        """`found`, which is one more, as long as these may be the refs of one repository.

        Raises:
            TooLargeError: hardly anybody has so many: they are endless, or made to fill memory.
        """
        self._number += not num_bytes
        self._num_bytes += num_bytes
        if self._number > self._most or self._num_bytes > self._most * REF_BYTES:
            raise TooLargeError(
                f"{self._url} has more than {self._most} refs of one kind, deleted ones among them, or more than "
                f"{self._most * REF_BYTES >> 20} MiB of them: if they are meant, {_RAISE}"
            )
        return found


class _Totals:
    """A total for each kind of refs, and one for files below `refs/` that are of none.

    In a store far away all are listed together.
    """

    def __init__(self, url: str) -> None:
        self._kinds = {kind.value: _Total(url) for kind in RefKind}
        self._others = _Total(url)

    def of(self, key: str) -> _Total:
        """The one that the ref under `key` counts in."""
        return next((total for prefix, total in self._kinds.items() if key.startswith(prefix)), self._others)


_RAISE = "raise the limit: with cas_ckpt.limits(max_refs=...)"


def _runs(named: Iterable[_T]) -> Iterator[Sequence[_T]]:
    """`named` in runs of what is read together."""
    waiting = iter(named)
    while some := tuple(islice(waiting, REFS_AT_ONCE)):
        yield some


def _names(kind: RefKind, keys: Iterable[str], *, strict: bool = False) -> Iterator[tuple[RefKind, str, str]]:
    """(kind, name, key) of those of `keys` that are refs of this kind, in their order.

    Raises:
        CorruptionError: `strict`, and one has a name that no ref has.
    """
    for key in keys:
        if not key.startswith(kind.value) or not key.endswith(REF_SUFFIX):
            continue
        name = key.removeprefix(kind.value).removesuffix(REF_SUFFIX)
        try:
            check_name(name)
        except InvalidInputError as error:  # no writer makes or swaps such a ref: a stray file
            if strict:
                raise CorruptionError(
                    f"{key} has a name that no {kind.label} has: move the file away, or upgrade cas_ckpt"
                ) from error
            continue
        yield kind, name, key


def swap_record(store: Store, key: str, expected: bytes | None, record: bytes) -> None:
    """Put `record`, which holds a nonce, in the place of `expected` (None: of nothing).

    Raises:
        ConflictError: it was changed meanwhile.
    """
    try:
        if expected is None:
            store.put_if_absent(key, record)
        else:
            store.compare_and_swap(key, expected, record)
    except (ConflictError, StorageError):
        # The reply may be lost although the swap was done: the nonce shows it.
        with suppress(NotFoundError):  # then it was not done
            if store.get(key) == record:
                return
        raise


def read_record(
    store: Store, key: str, decode: Callable[[Mapping[str, Any]], _T], none: _T, *, version: int
) -> tuple[_T, bytes | None]:
    """The sealed record of the kind `key` under `key`, decoded, and its bytes to swap; `none` where there is none.

    Raises:
        CorruptionError: it is damaged. UnsupportedVersionError: of a later version. Whatever `decode` raises.
    """
    try:
        record = store.get(key)
    except NotFoundError:
        return none, None
    return decode(unseal(key, record, version=version, key=key)), record


def change_record(
    store: Store, key: str, read: Callable[[Store], tuple[_T, bytes | None]], encode: Callable[[_T], bytes],
    change: Callable[[_T], _T],
) -> _T:  # fmt: skip
    """Put what `change` makes of a record in its place, and return it; `change` is called again after a conflict.

    Raises:
        ConflictError: others change it all the time. Whatever `change` raises.
    """
    for _ in range(_MOST_ATTEMPTS):
        held, record = read(store)
        wanted = change(held)
        try:
            swap_record(store, key, record, encode(wanted))
            return wanted
        except ConflictError:
            continue
    raise ConflictError(f"{key} was changed {_MOST_ATTEMPTS} times meanwhile: look at it, then try again")
