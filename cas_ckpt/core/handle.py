"""The handle of a repository: store + config + refs + index, and reading of stored objects.

Invariant: what it hands out was verified since it was read, and the index is never believed
against the store: a miss, or a pack that is gone, leads to a sync and a second look.
Knows nothing of torch, and none of the verbs (they are in ops/).
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import filterfalse
from operator import not_
from typing import TYPE_CHECKING, Any, cast

from cas_ckpt import clock
from cas_ckpt.core.config import INDEX_PATH, Config, adapt_store, config_record, decode_config, require_there
from cas_ckpt.core.elsewhere import Elsewhere
from cas_ckpt.core.hints import HintsWriter, Preview
from cas_ckpt.core.host_cache import AUTO, CachedReads, HostCache, RepositoryCache
from cas_ckpt.core.packs import (
    PACKS_PER_BATCH,
    ListedPack,
    copied_records,
    data_first,
    filled,
    is_meta,
    pack_batches,
    read_in_parts,
    read_listed_pack,
    read_nodes,
    record_batches,
)
from cas_ckpt.core.protocol import GcState, read_gc_state, require_not_older
from cas_ckpt.core.records import pack_record
from cas_ckpt.core.ref_store import RefStore
from cas_ckpt.core.refs import Generation, Head, Ref
from cas_ckpt.core.settings import read_settings, require_trusted
from cas_ckpt.core.shared_index import note_folder
from cas_ckpt.errors import (
    CkptError,
    ConflictError,
    CorruptionError,
    NoRepositoryError,
    NotFoundError,
    OutOfSpaceError,
    PermissionDeniedError,
    StorageError,
    UnsupportedVersionError,
)
from cas_ckpt.index import contents, postgres, remembered
from cas_ckpt.index.database import IN_MEMORY
from cas_ckpt.index.garbage import covers
from cas_ckpt.index.index import Index
from cas_ckpt.index.rows import PackRecord, RefRow
from cas_ckpt.objects.digest import Digest, ObjectKind, short
from cas_ckpt.objects.nodes import Node
from cas_ckpt.objects.pack import PACK_PREFIX, Location, PackKind, is_pack
from cas_ckpt.parallel.workers import ahead, map_all
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.store import Closed, Store, exists
from cas_ckpt.storage.url import open_store
from cas_ckpt.uncopied import Uncopied

if TYPE_CHECKING:
    from cas_ckpt.signing import Trust
    from cas_ckpt.transfer.pack_writer import WrittenPack

_LOGGER = logging.getLogger("cas_ckpt")

MOST_KNOWN = 1_000_000
"""Ids that a handle holds in memory at most, before it begins anew (some 100 MB)."""

CACHED_BYTES = 8 * 1024 * 1024
"""Longer ranges of packs are not cached on this host: such reads are large, and seldom repeated."""

WHOLE_SET_CHUNKS = 500_000
"""Up to this many chunks, their ids are held in memory while the handle commits (some 50 MB)."""


class RepositoryHandle(Uncopied):
    """An open repository. May be shared by threads.

    Attributes:
        index_place: Path or URL of the index, also while another one in memory stands in for it; None: not known.
        cache: What this host keeps of the repository; None: nothing.
        cache_place: Where this host keeps what it knows of others that are opened on behalf of this one, as `open` was
            told for itself.
        damaged: Packs that the last `sync`, or filling of the index, could not read -> why; the index leaves them out.
        kept_history: A record of gc/state, idle, and commits that refs kept with their history under it.
        instance: Random bytes of this handle alone.
        seen_by: Stands for the handles of all ranks that were found to see this very store; b"": for none.
        hints: What the next commit says beside its nodes.
        preview: What hints say of commits that the index does not know yet; asked before the first `sync`. None
            after that, and of a local store.
        elsewhere: Brings what is lost or damaged here from remotes.
        trust: Whose signature every commit needs that is read through this handle; None: see core/signatures.py.
        progress: Receives the progress of implicit long work: the first question after an upgrade of the index, and
            what is brought from remotes.
    """

    def __init__(
        self, store: Store, config: Config, index: Index, *, read_only: bool = False, index_place: str | None = None,
        cache: RepositoryCache | None = None,
    ) -> None:  # fmt: skip
        self._unconfirmed: HostCache | None = None
        self._config_from: HostCache | None = None
        self._head: Head | None = None
        adapt_store(store, config)
        self.store = store
        self.config = config
        self._index: Index
        self.index = index
        self.read_only = read_only
        self.index_place = index_place
        self.cache = cache
        self.cache_place: str | os.PathLike[str] | None = AUTO
        self._cached: tuple[Store, Store] | None = None
        self.refs = RefStore(store, cache=cache, num_requests=self.num_requests, look=self._confirm)
        self.hints = HintsWriter(self)
        self.preview = None if store.abilities.local else Preview(self)
        self.elsewhere = Elsewhere(self)
        self.progress: Progress = SILENT
        self.trust: Trust | None = None
        self._lock = threading.RLock()
        self.damaged: dict[str, str] = {}
        self.instance, self.seen_by = secrets.token_bytes(8), b""
        # Some of what is stored. All chunks that were stored up to the pack of a number, if each was stored once and
        # whole (else None), and all of the packs of these names, that came since.
        self._known: set[bytes] | None = None
        self._known_up_to: int | None = None
        self._known_since: set[str] = set()
        # Packs that this handle saw in its own store, those of them that may be relied on, and those never again.
        self._present: dict[str, int] = {}
        self._live: set[str] = set()
        self._condemned: set[str] = set()
        # What the last reader asked for: if one of it is lost, all of it that is lost is brought.
        self._asked: Sequence[Digest] = ()
        self._synced_generation: Generation | None = None
        self.kept_history: tuple[bytes, Collection[bytes]] = (b"", ())

    @staticmethod
    def open(
        url: str | os.PathLike[str], *, index_url: str | None = None, read_only: bool = False,
        cache: str | os.PathLike[str] | None = AUTO, lazy: bool = False,
    ) -> RepositoryHandle:  # fmt: skip
        """The repository at `url`.

        Args:
            index_url: Where the index is, if not inside the repository (a path or a URL of SQLAlchemy).
            cache: Where this host keeps what it knows of repositories on stores that are not local; None: nowhere.
            lazy: Believe for now what the cache says of the URL, and ask nothing. The first look at a ref, the index or
                the packs finds out whether it is so, and raises what opening would have raised.
        Raises: NoRepositoryError, UnsupportedVersionError, CorruptionError.
        """
        store = open_store(url)
        try:
            return RepositoryHandle.on_store(store, index_url=index_url, read_only=read_only, cache=cache, lazy=lazy)
        except BaseException:
            store.close()
            raise

    @staticmethod
    def on_store(
        store: Store, *, index_url: str | None = None, read_only: bool = False,
        cache: str | os.PathLike[str] | None = AUTO, lazy: bool = False,
    ) -> RepositoryHandle:  # fmt: skip
        """The repository in `store`; arguments and errors as for `open`."""
        read_only = read_only or store.abilities.read_only
        host = None if store.abilities.local else HostCache.open(cache)
        remembered_record = None if host is None or not lazy else host.config_at(store.url)
        config = None
        with suppress(CorruptionError):
            config = None if remembered_record is None else decode_config(remembered_record)
        confirmed = config is None
        if config is None:
            record = config_record(store)
            config = decode_config(record)
            if host is not None:
                host.note_config(store.url, record)
        kept = None if host is None else host.repository(config.store_id, store.url)
        asks = confirmed or store.abilities.local
        noted = configured_index(store, read_only=read_only) if asks and not index_url else None
        place = index_url or noted or index_place(store, kept)
        if kept is not None and place == kept.index_place:
            index = _open_cached_index(place, config.store_id)
        else:
            index = _open_index(place, config.store_id, read_only)
            try:
                note_folder(index, store)
            except BaseException as error:
                index.close()
                if not (noted and read_only and isinstance(error, ConflictError)):
                    raise
                _LOGGER.warning("%s. It is read without that index", error)
                place = index_place(store, kept)
                index = _open_index(place, config.store_id, read_only)
        made = RepositoryHandle(store, config, index, read_only=read_only, index_place=place, cache=kept)
        made.cache_place = cache
        if not confirmed:
            made._unconfirmed = made._config_from = host
        return made

    # --- the repository is the one that the cache knows ---------------------------------

    @property
    def index(self) -> Index:
        """The index; the first to ask for it sees to it that the repository is the one that it is about."""
        if self._unconfirmed is not None:
            self._confirm(False)
        if self._index.is_behind:
            with self._lock:
                if self._index.is_behind:  # in this thread's turn
                    # Filled anew, as an older version made it; where it may not be, one in memory takes its place.
                    self._index, damaged = filled(self.store, self._index, progress=self.progress)
                    self.damaged.update(damaged)
        return self._index

    @index.setter
    def index(self, index: Index) -> None:
        self._index = index

    def _confirm(self, proven: bool) -> None:
        """Compare the repository with the one that the cache knew at this URL, unless that is proven already.

        Raises:
            NoRepositoryError: there is none any more. ConflictError: there is another one.
        """
        host = self._unconfirmed
        if host is None or proven:
            self._unconfirmed = None
            return
        self._look_at_config(host)

    def _look_at_config(self, host: HostCache) -> None:
        url = self.store.url
        try:
            record = config_record(self.store)
        except NoRepositoryError:
            host.note_config(url, None)
            raise
        found = decode_config(record)
        host.note_config(url, record)
        if found.store_id != self.config.store_id:
            raise ConflictError(f"{url} holds another repository than when this host last looked: open it again")
        self.config = found
        self._unconfirmed = self._config_from = None

    @property
    def believes_config(self) -> bool:
        """Whether the config is what the cache knows, and a listing of refs has to say if that still holds."""
        return self._config_from is not None

    @property
    def default_branch(self) -> str:
        """The default branch as the store had it since this handle was opened.

        Refs prove that the repository is the one that the cache knows (`_confirm`), and only a listing of them that its
        default branch is, too.
        """
        host = self._config_from
        if host is not None:
            if self.refs.default_may_have_changed() and self._config_from is not None:
                self._look_at_config(host)
            self._config_from = None
        return self.config.default_branch

    @property
    def head(self) -> Head:
        """Where the live state came from that is committed through this handle; first, the default branch."""
        return Head(self.default_branch) if self._head is None else self._head

    @head.setter
    def head(self, head: Head) -> None:
        self._head = head

    def close(self) -> None:
        """Close index and store; whatever is asked of them afterwards is refused. Idempotent."""
        self._unconfirmed = self._config_from = None
        self.elsewhere.close()
        self._index.close()
        self.store.close()
        self.store, self.index, self.refs = (cast(Any, Closed(self.store.url)),) * 3

    @property
    def cached_store(self) -> Store:
        """The store, answering from the cache what it has of packs: for readers that verify what they get."""
        if self.cache is None:
            return self.store
        if self._cached is None or self._cached[0] is not self.store:
            self._cached = self.store, cast(Store, CachedReads(self.store, self.cache, most_bytes=CACHED_BYTES))
        return self._cached[1]

    # --- the index follows the store ---------------------------------------------------

    def sync(self) -> int:
        """Make the index agree with the packs of the store; how many packs that changed.

        Packs that the index does not know are read (their directories, and nodes); packs that are gone, or have
        another size, are dropped from it. A damaged pack is left out, and the log says so: training must go on.
        """
        with self._lock:
            known = dict(self.index.packs())  # before the listing: it confirms what is listed
            stored = {key: size for key, size in self.store.list(PACK_PREFIX) if is_pack(key)}
            if known and not stored:
                require_there(self.store)
            gone = [key for key, size in known.items() if stored.get(key) != size]
            new = [key for key in stored if known.get(key) != stored[key]]
            if self.index.read_only and self.index.is_shared:
                gone = []
                if new:
                    # Filled from the packs, in memory: a database that may only be read lags behind.
                    _LOGGER.warning(
                        "index %s lacks packs, and may only be read here: all packs are read", self.index.place
                    )
                    self.index.close()
                    self.index = Index.open(IN_MEMORY, store_id=self.config.store_id)
                    new = list(stored)
            elif (gone or new) and self.index.read_only:
                self.detach_index()
            if gone:
                try:
                    self.index.drop_packs(gone)
                except PermissionDeniedError:
                    if not self.index.is_shared:
                        raise
                    # Left to the role that collects garbage. Their rows do no harm: what is only in packs that are not
                    # there is neither relied on nor found.
                    gone = []
            self.damaged = {key: why for key, why in self.damaged.items() if key in stored}
            added = 0
            batches = record_batches(self._read_packs(new, stored))
            for batch in ahead(batches) if len(new) > PACKS_PER_BATCH else batches:
                self.index.add_packs(batch)
                added += len(batch)
            if gone or added:
                self._known = None
            self.preview = None  # the index knows all that is stored
            self._present = stored
            self._live = stored.keys() - self._condemned - self.damaged.keys()
            return len(gone) + added

    def detach_index(self) -> None:
        """Go on with a copy of the index in memory, which may be written: its own medium may not.

        Raises:
            InvalidInputError: it is not in a file.
        """
        with self._lock:
            self.index = self.index.detached()

    @property
    def num_requests(self) -> int:
        """How many requests to the store at once are of use."""
        return self.store.abilities.parallel

    def present_packs(self) -> dict[str, int]:
        """Every pack that the last `sync` saw in the store -> its size, damaged and condemned ones too."""
        with self._lock:
            return dict(self._present)

    def _read_packs(self, keys: Sequence[str], stored: dict[str, int]) -> Iterator[PackRecord]:
        """Records of these packs; those that are gone, or damaged (which is logged), are left out.

        Where requests are dear, meta packs come first: they may have copies of the directories of data packs, whose
        tails need not be read then. Each copy comes before the nodes that refer to what is in it.
        """
        parts = [data_first((key, stored[key]) for key in keys)]
        if not self.store.abilities.local:
            parts = [[each for each in parts[0] if is_meta(each[0]) == meta] for meta in (True, False)]
        sizes, copied = {key: stored[key] for key in keys}, set[str]()
        for part in parts:
            for batch in pack_batches(each for each in part if each[0] not in copied):
                found = map_all(self._read_stored, batch, num_threads=self.num_requests)
                for (key, _), one in zip(batch, found, strict=True):
                    if isinstance(one, CkptError):
                        self._note_unread(key, one, stored)
                        continue
                    own = self._read_alone(key, stored) if one.record is None else one.record
                    for record in (*copied_records(one.directories, sizes), *([] if own is None else [own])):
                        self.damaged.pop(record.name, None)
                        copied.add(record.name)
                        yield record

    def _read_alone(self, key: str, stored: dict[str, int]) -> PackRecord | None:
        """The rows of a long pack; None if it is gone, or damaged."""
        try:
            try:
                return read_in_parts(self.cached_store, key)
            except CorruptionError:
                if self.cached_store is self.store:
                    raise
                return read_in_parts(self.store, key)  # perhaps it is damaged in the cache alone
        except CkptError as error:
            self._note_unread(key, error, stored)
            return None

    def _note_unread(self, key: str, error: CkptError, stored: dict[str, int]) -> None:
        """A pack that was listed cannot be read.

        Raises:
            CkptError: for another reason than that it is gone, or damaged.
        """
        if isinstance(error, NotFoundError):
            del stored[key]  # collected since the listing
            self.damaged.pop(key, None)
        elif isinstance(error, CorruptionError):
            if key not in self.damaged:
                _LOGGER.warning("%s is left out, nothing new relies on it: %s", key, error)
            self.damaged[key] = str(error)
        else:
            raise error

    def _read_stored(self, listed: tuple[str, int]) -> ListedPack | CkptError:
        """The rows of a pack that was listed, or why there are none."""
        try:
            return read_listed_pack(self.cached_store, *listed)
        except CkptError as error:
            return error

    def begin_writing(self) -> Generation:
        """Check, before a commit relies on the index, that it agrees with the store.

        Every pack that a commit may refer to instead of writing is seen to be there, whole, once per handle and gc
        generation. Returns the generation (w3, w4: read after the ref, compared again before the ref is swapped).

        Raises:
            PermissionDeniedError: the repository was opened read-only.
        """
        self.require_writable()
        self._confirm(self._unconfirmed is None)
        with self._lock:
            state = read_gc_state(self.store)  # inside, so that no thread brings back a generation that another left
            if self._synced_generation is None or not self.is_current(state, self._synced_generation):
                require_not_older(self.store, state, self.index.generation)
                # Never relied on again by this handle, not even if they are rescued. Their rows stay in
                # the index, which says what the store holds and may be shared with the collector.
                self._condemned.update(state.condemned)
                self.sync()
                self._known = None  # also where the index agrees: another process may have brought it up to date
                self.index.set_generation(state.generation.number)
                self._synced_generation = state.generation
        return state.generation

    def is_current(self, state: GcState, generation: Generation) -> bool:
        """Whether what was found out under `generation` still holds: no packs were condemned since.

        None are within one generation, unless an older gc/state was put back.
        """
        with self._lock:
            return state.generation == generation and self._condemned.issuperset(state.condemned)

    def require_writable(self) -> None:
        """Raise PermissionDeniedError if the repository was opened read-only."""
        if self.read_only:
            denied = self.store.abilities.read_only
            why = "may not be written by this process" if denied else "was opened to be read: use read_only=False"
            raise PermissionDeniedError(f"{self.store.url} {why}")

    def add_written(
        self, packs: Sequence[WrittenPack], nodes: Sequence[Node], *, generation: Generation, ref: Ref | None = None
    ) -> None:
        """Add packs that are durable now to the index; `nodes` are those of the meta packs.

        What was published is valid without the index: if that refuses, the next commit or miss
        brings the rows (and then raises, should it refuse again).

        Args:
            generation: That under which they were written (`begin_writing`).
            ref: The ref that was swapped to name what they hold.
        """
        try:
            records = [pack_record(pack, nodes) for pack in packs]
            row = None if ref is None else RefRow(ref.key, ref.target or b"", ref.generation.number, clock.now_s())
            self.index.add_packs(records, ref=row)
        except CkptError:
            self.forget_chunks()
            return
        self.note_written(packs, generation=generation)

    def note_written(self, packs: Sequence[WrittenPack], *, generation: Generation) -> None:
        """Rely on packs that are durable now and whose rows another process adds to this very index.

        If another thread has seen a later generation meanwhile, they may be collected already: then
        they are looked for in the store like any others.
        """
        with self._lock:
            if self._synced_generation != generation:
                self._known = None
                return
            known = self._known
            for pack in packs:
                if pack.key not in self._condemned:
                    self._live.add(pack.key)
                    if known is not None:
                        whole = [entry.digest for entry in pack.entries if entry.num_leaves == entry.chunk_leaves]
                        known.update(whole)
                        if (
                            self._known_up_to is not None
                            and pack.kind is PackKind.DATA
                            and len(whole) == len(pack.entries)
                        ):
                            self._known_since.add(pack.key)
            if known is not None and len(known) > MOST_KNOWN:
                self._known = None

    def note_refs(self, refs: Iterable[Ref]) -> None:
        """Remember that these refs exist: their records are never removed, so one that is gone later was lost.

        They are valid without the index: if that refuses, the next collection that sees them adds them.
        """
        try:
            refs = list(refs)
            known = self.index.read(remembered.known_refs, [ref.key for ref in refs])
            now_s = clock.now_s()
            rows = [
                RefRow(ref.key, ref.target or b"", ref.generation.number, now_s) for ref in refs if ref.key not in known
            ]
            if rows and not self.index.read_only:
                self.index.write(remembered.write_refs, rows)
        except CkptError as error:
            _LOGGER.warning("the index does not remember some refs yet: %s", error)

    def forget_chunks(self) -> None:
        """Ask the index again which chunks are known: it was changed behind this handle's back."""
        with self._lock:
            self._known = None
            self._synced_generation = None

    # --- looking up --------------------------------------------------------------------

    def known(self, digests: Sequence[Digest]) -> list[bool]:
        """Which of these objects are in packs that this handle saw in its own store and that were never condemned."""
        known = self._known_set()
        missing = list(filterfalse(known.__contains__, digests))
        if not missing:
            return [True] * len(digests)
        located = self.index.read(contents.locate, missing)
        absent = set()
        for digest in missing:
            if digest not in located or not self._is_complete(located[digest]):
                absent.add(digest)
        with self._lock:
            if self._known is known:
                known.update(filterfalse(absent.__contains__, missing))
        return list(map(not_, map(absent.__contains__, digests)))

    def known_to_commit(self) -> Callable[[Sequence[Digest]], list[bool]]:
        """`known` for one commit, which asks the index only if it has, at the first miss, chunks that memory has not.

        A query for each chunk that is new takes as much of the interpreter's lock as all else that is done for it.
        """
        has_all: list[bool] = []

        def known(digests: Sequence[Digest]) -> list[bool]:
            found = self._known_set()
            answers = list(map(found.__contains__, digests))
            if all(answers):
                return answers
            if not has_all:
                has_all.append(self._knows_all())
            return answers if has_all[0] else self.known(digests)

        return known

    def _knows_all(self) -> bool:
        """Whether `_known` has every chunk of the index. Costs as much as packs came since the last time."""
        with self._lock:
            if self._known_up_to is None:
                return False
            since = self.index.read(contents.data_packs_since, self._known_up_to)
            if not since.keys() <= self._known_since:
                return False
            self._known_up_to = max(since.values(), default=self._known_up_to)
            self._known_since.difference_update(since)
            return True

    def all_stored(self, digests: Sequence[Digest]) -> bool:
        """Whether all of these objects are in packs that a commit may rely on: `known` for few, asked one by one."""
        located = self.index.read(contents.locate, digests)
        return all(self._is_complete(located.get(digest, ())) for digest in digests)

    def holds_chunks(self) -> bool:
        """Whether the index knows any chunk; else all chunks of a commit are new."""
        return bool(self._known_set()) or self.index.read(contents.chunks_at_most) > 0

    def _known_set(self) -> set[bytes]:
        with self._lock:
            if self._known is None:
                self._known, self._known_up_to, self._known_since = set(), None, set()
                num_extents = self.index.read(contents.chunks_at_most)
                if num_extents <= WHOLE_SET_CHUNKS:
                    # Of one moment: no id may come from a pack whose rows come or go between two looks.
                    chunks, packs = self.index.read(contents.chunks_and_packs)
                    if packs.keys() <= self._live:
                        self._known = chunks
                        if num_extents == len(chunks):
                            self._known_up_to = max(packs.values(), default=0)
            return self._known

    def _is_complete(self, places: Sequence[Location]) -> bool:
        """Whether live packs hold every leaf: of a commit that died, some ranks' parts may be all there is."""
        return covers(place for place in places if self._is_live(place.pack))

    def _is_live(self, pack: str) -> bool:
        with self._lock:
            if pack in self._condemned or pack in self._live:
                return pack not in self._condemned
            if not exists(self.store, pack):
                return False
            self._live.add(pack)
            return True

    def locate(self, digests: Iterable[Digest], *, here: bool = False) -> Mapping[bytes, Sequence[Location]]:
        """Where these objects are stored; syncs once if some are not known, and brings what remotes are to have.

        Args:
            here: Ask no remote: for those who want to know what is stored, not to read it.
        Raises:
            NotFoundError: some are in no pack. StorageError: a remote that may have them cannot be reached.
        """
        wanted = list(dict.fromkeys(digests))
        located: Mapping[bytes, Sequence[Location]] = self.index.read(contents.locate, wanted)
        missing = [digest for digest in wanted if not located.get(digest)]
        if missing:
            preview = self.preview
            said_of = {} if preview is None else preview.locate(missing)
            located = {**located, **said_of, **({} if here else self.elsewhere.lent(missing))}
            missing = [digest for digest in missing if not located.get(digest)]
        if missing:
            self.sync()  # whatever it answers: another thread may have brought them a moment ago
            located = {**located, **self.index.read(contents.locate, missing)}
            missing = [digest for digest in missing if not located.get(digest)]
        said = ""
        if not here and len(wanted) > 1:
            self._asked = wanted
        if missing and not here:
            absent = list(missing)
            said = self.elsewhere.bring(lambda: self._absent(absent), lend=True)
            located = {**located, **self.elsewhere.lent(missing), **self.index.read(contents.locate, missing)}
            missing = [digest for digest in missing if not located.get(digest)]
        if missing and self.damaged:
            key, why = next(iter(self.damaged.items()))
            raise CorruptionError(
                f"object {short(missing[0])} is in no intact pack of {self.store.url}, and "
                f"{len(self.damaged)} packs are damaged, such as {key}: {why}{said}"
            )
        if missing:
            raise NotFoundError(
                f"object {short(missing[0])} is in no pack of {self.store.url} "
                f"({len(missing)} of {len(wanted)} objects are missing): "
                f"repo.fsck() says which commits need them{said}"
            )
        return located

    def _absent(self, digests: Sequence[Digest]) -> list[Digest]:
        located = {**self.elsewhere.lent(digests), **self.index.read(contents.locate, digests)}
        return [digest for digest in digests if not located.get(digest)]

    def bring(self, digests: Sequence[Digest]) -> bool:
        """Bring packs into the index that hints say hold these nodes; whether there were any. Not after a `sync`."""
        with self._lock:
            records = [] if self.index.read_only or self.preview is None else self.preview.records(digests)
            if records:
                self.index.add_packs(records)
            return bool(records)

    def relocate(self, digest: Digest, tried: Collection[str], *, here: bool = False) -> Sequence[Location]:
        """Where an object is stored now that one of the packs `tried` is gone: a collection may have copied it.

        Where no other pack has it either, it is brought from a remote: the copies in `tried` are damaged or lost.

        Args:
            here: Ask no remote.
        Raises:
            NotFoundError: remotes that are to have it have not. StorageError: one of them cannot be reached.
        """

        def places() -> Sequence[Location]:
            return self.index.read(contents.locate, [digest]).get(digest, [])

        def is_new(found: Sequence[Location]) -> bool:
            return not {place.pack for place in found}.issubset(tried)

        with self._lock:
            found = places()
            if not is_new(found):
                self.sync()
                found = places()
        if here or is_new(found):
            return found

        def still_missing() -> Sequence[Digest]:
            if is_new(places()):
                return []
            return [digest, *(one for one in self._absent(self._asked) if one != digest)]

        said = self.elsewhere.bring(still_missing)
        found = places()
        if said and not is_new(found):
            raise NotFoundError(f"object {short(digest)} is in no intact pack of {self.store.url}{said}")
        return found

    def reads_of(self, num_bytes: int) -> Store:
        """The store that so many bytes of chunks are to be read from: behind the cache of this host if they are few."""
        if self.cache is None or num_bytes > CACHED_BYTES:
            return self.store
        return cast(Store, CachedReads(self.store, self.cache, most_bytes=CACHED_BYTES))

    def read_node(self, kind: ObjectKind, digest: Digest) -> bytes:
        """The bytes of one node, verified.

        Raises:
            NotFoundError, CorruptionError.
        """
        return self.read_nodes(kind, [digest])[digest]

    def read_nodes(self, kind: ObjectKind, digests: Sequence[Digest]) -> dict[Digest, bytes]:
        """The bytes of many nodes of one kind, verified; near ones are read together.

        Raises:
            NotFoundError, CorruptionError.
        """
        preview = self.preview
        found = {} if preview is None else preview.nodes(digests)
        if found:
            digests = [digest for digest in digests if digest not in found]
        return {**found, **(read_nodes(self, kind, digests) if digests else {})}


def _open_index(place: str, store_id: str, read_only: bool) -> Index:
    try:
        index = Index.open(place, store_id=store_id, read_only=read_only)
    except (NotFoundError, OutOfSpaceError):
        # Without an index where none may be written, or with a disk too full to open one: what
        # is stored can still be read, and an index in memory will do.
        return Index.open(IN_MEMORY, store_id=store_id)
    except PermissionDeniedError:  # of a colleague, who lets it be read: enough to read the repository
        if read_only or "://" in place:
            raise
        return _open_index(place, store_id, True)
    if index.matches:
        return index
    index.close()
    if index.is_shared:
        raise ConflictError(
            f"index {index.place}: the schema of this repository has tables of another repository ({index.store_id}): "
            "let its owner give it back its name, or repo.rebuild_index() removes them"
        )
    if read_only:
        return Index.open(IN_MEMORY, store_id=store_id)
    Index.discard(place, store_id=store_id)  # left over by another repository; refused if that is using it
    return Index.open(place, store_id=store_id)


def _open_cached_index(place: str, store_id: str) -> Index:
    """The index in the cache of this host, which is written by those who only read, too; one in memory if it cannot be.

    One that is damaged, or of a later version, is made anew, for nothing is lost; not while a process has it open.
    """
    for _ in range(2):
        try:
            index = Index.open(place, store_id=store_id)
            if index.matches:
                return index
            index.close()
        except (StorageError, NotFoundError, PermissionDeniedError, OutOfSpaceError):
            break
        except (CorruptionError, UnsupportedVersionError, ConflictError) as error:
            _LOGGER.info("the index in the cache is made anew: %s", error)
        try:
            Index.discard(place, store_id=store_id)
        except CkptError:
            break
    return Index.open(IN_MEMORY, store_id=store_id)


def configured_index(store: Store, *, read_only: bool = False) -> str | None:
    """The database that the repository's own settings name for its index; None: none, or they are damaged.

    Args:
        read_only: The caller can do without.
    Raises:
        PermissionDeniedError: it is at a host that these settings may not name (core/settings.py).
    """
    try:
        url = read_settings(store).index_url
    except (CorruptionError, UnsupportedVersionError) as error:
        _LOGGER.warning("the index is looked for where it usually is: %s", error)
        return None
    if "://" not in url:  # the repository of another user does not say which files of this machine are opened
        return None
    place = postgres.from_settings(url)
    try:
        require_trusted(store, postgres.hosts_of(place), "the index", "name the index (index_url=)")
    except PermissionDeniedError as error:
        if not read_only:
            raise
        _LOGGER.warning("%s. It is read without that index", error)
        return None
    return place


def index_place(store: Store, kept: RepositoryCache | None = None) -> str:
    """Where the index of the repository in `store` is unless its opener says otherwise.

    Args:
        kept: What this host keeps of it, if it is not local.
    """
    if isinstance(store, FileStore):
        return str(store.root / INDEX_PATH)
    return IN_MEMORY if kept is None else kept.index_place


def usual_index_place(store: Store, store_id: str, *, read_only: bool = False) -> str:
    """The same without opening the repository; arguments and errors as of `configured_index`."""
    if (configured := configured_index(store, read_only=read_only)) is not None:
        return configured
    host = None if store.abilities.local else HostCache.open()
    return index_place(store, None if host is None else host.repository(store_id, store.url))
