"""A bundle: the values of a repository in one zip, to be carried where no network goes (docs/format.md, "Bundles").

    BundleWriter       a store whose packs go into a new file; `create_bundle` (push.py) pushes into it
    BundleStore        the values of such a file, only to be read; `take_bundle` (fetch.py) fetches from it
    read_bundle        what one says that it carries
    verify_bundle      every byte of it is read and hashed, and what it needs is looked for here

Each member is a value, stored under its key; the member `bundle` is a sealed record of the commits that the taker must
have. `unzip` makes of a bundle that carries everything the folder of a repository.

Invariant: the file is under its name whole, or not at all. What is read of one is believed no more than what any store
gives: names and places are checked when it is opened, and values prove themselves.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from zipfile import ZipFile, ZipInfo

from cas_ckpt.arguments import Buffer, check_path
from cas_ckpt.core.config import Config, read_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import read_graph
from cas_ckpt.core.packs import read_directory
from cas_ckpt.core.refs import RefKind
from cas_ckpt.errors import CorruptionError, InvalidInputError, NotFoundError, PermissionDeniedError, StorageError
from cas_ckpt.index.database import IN_MEMORY
from cas_ckpt.index.index import Index
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest, seal, short, unseal
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.ops.sync.send import RefUpdate, SendOptions, send
from cas_ckpt.parallel.workers import thread_count
from cas_ckpt.progress import SILENT, Progress, phase
from cas_ckpt.storage.disk import UnnamedFile, sync_file, sync_folder
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import (
    MOST_VALUE_BYTES,
    Abilities,
    Store,
    StreamWriter,
    byte_view,
    check_key,
    check_range,
    reading,
    too_long,
    too_short,
    writing,
)
from cas_ckpt.storage.stored_zip import stored_members
from cas_ckpt.transfer.scan import BadExtent, scan_units, verify_units

VERSION = 1
RECORD = "bundle"
"""Key and kind of the record that is in bundles only."""


class _FileValues(MemoryStore):
    """A store of values some of which are in a file, at `places`: (offset, length) by key."""

    def __init__(self, path: str | os.PathLike[str], fd: int) -> None:
        super().__init__(url=f"bundle://{os.fspath(path)}")
        self.fd = fd
        self.places: dict[str, tuple[int, int]] = {}

    def get(self, key: str) -> bytes:
        """The whole value."""
        if key not in self.places:
            return super().get(key)
        if (size := self.places[key][1]) > MOST_VALUE_BYTES:
            raise too_long(key, size)
        return bytes(self.get_range(key, 0, size))

    def get_range(self, key: str, offset: int, length: int) -> memoryview:
        """Bytes of a value."""
        if key not in self.places:
            return super().get_range(key, offset, length)
        check_range(key, offset, length)
        start, size = self.places[key]
        if offset + length > size:
            raise too_short(key, offset, length, size)
        return self._bytes(start + offset, length)

    def _bytes(self, offset: int, length: int) -> memoryview:
        data = memoryview(bytearray(length))
        done = 0
        while done < length:
            with reading(self.url):
                count = os.preadv(self.fd, [data[done:]], offset + done)
            if not count:
                raise CorruptionError(f"{self.url}: it ends at {offset + done} bytes: copy the file again")
            done += count
        return data.toreadonly()

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        """Length and end of a value."""
        if key not in self.places:
            return super().get_tail(key, length)
        size = self.places[key][1]
        return size, bytes(self.get_range(key, max(size - length, 0), min(length, size)))

    def head(self, key: str) -> int:
        """Length of a value."""
        return self.places[key][1] if key in self.places else super().head(key)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Key and length of each value below `prefix`, by key."""
        placed = [(key, size) for key, (_, size) in self.places.items() if key.startswith(prefix)]
        return iter(sorted([*super().list(prefix), *placed]))


class _Appending(StreamWriter):
    """One pack that is being written to the end of a bundle; a `StreamWriter`."""

    def __init__(self, bundle: BundleWriter, key: str) -> None:
        self._bundle, self._key, self._is_open = bundle, key, True
        try:
            with writing(bundle.url):
                self._member = bundle.zip.open(ZipInfo(key), "w", force_zip64=True)
                self._start = bundle.file.tell()
        except BaseException:
            self._end(is_whole=False)
            raise

    def write(self, data: Buffer) -> None:
        """Append to the member."""
        self._require_open()
        with writing(self._bundle.url):
            self._member.write(byte_view(data))

    def commit(self) -> None:
        """End the member: the pack is whole."""
        self._require_open()
        is_whole = False
        try:
            with writing(self._bundle.url):
                num_bytes = self._bundle.file.tell() - self._start
                self._member.close()
                self._bundle.file.flush()
            self._bundle.places[self._key] = self._start, num_bytes
            is_whole = True
        finally:
            self._end(is_whole=is_whole)

    def abort(self) -> None:
        """Leave the member as it is: the bundle cannot be finished any more."""
        if self._is_open:
            try:
                with suppress(OSError):  # what could not be written is thrown away
                    self._member.close()
            finally:
                self._end(is_whole=False)

    def _end(self, *, is_whole: bool) -> None:
        """Let the next pack be written."""
        self._is_open = False
        self._bundle.is_broken |= not is_whole
        self._bundle.turn.release()

    def _require_open(self) -> None:
        if not self._is_open:
            raise StorageError(f"{self._key}: this writer has ended")


class BundleWriter(_FileValues):
    """A store whose packs go straight into a new bundle, one at a time; records stay in memory until it is finished.

    Attributes:
        turn: Held while a pack is being written.
        is_broken: A pack was begun and is not whole.
    """

    def __init__(self, path: Path) -> None:
        with writing(str(path)):
            self._unnamed = UnnamedFile(path)
        super().__init__(path, self._unnamed.fd)
        self._folder = path.parent
        self.file = open(self.fd, "w+b", closefd=False)  # noqa: SIM115 - until `close`
        self.zip = ZipFile(self.file, "w")
        self.turn = threading.Lock()
        self.is_broken = False

    def open_writer(self, key: str) -> Any:
        """A writer of a value; of a pack it waits while another one is being written."""
        if not check_key(key).startswith(PACK_PREFIX):
            return super().open_writer(key)
        self.turn.acquire()
        return _Appending(self, key)

    def put(self, key: str, data: Buffer) -> None:
        """Store a whole value."""
        if not key.startswith(PACK_PREFIX):
            super().put(key, data)
            return
        with self.open_writer(key) as writer:
            writer.write(data)
            writer.commit()

    def finish(self, prerequisites: Iterable[Digest]) -> int:
        """Write the records, and let the file have its name; its length in bytes."""
        if self.is_broken:
            raise StorageError(f"{self.url}: a pack in it is not whole: make the bundle again")
        super().put(RECORD, seal(RECORD, VERSION, {"prerequisites": sorted(set(prerequisites))}, key=RECORD))
        with writing(self.url):
            for key, _ in MemoryStore.list(self, ""):
                self.zip.writestr(ZipInfo(key), self.get(key))
            self.zip.close()
            num_bytes = self.file.tell()
            self.file.close()
            sync_file(self.fd)
            self._unnamed.publish(replace=True)
            sync_folder(self._folder)
        return num_bytes

    def close(self) -> None:
        """Leave nothing of a bundle that was not finished. Idempotent."""
        for part in (self.zip, self.file):
            with suppress(OSError):  # what could not be written is thrown away
                part.close()
        self._unnamed.discard()


class BundleStore(_FileValues):
    """The values of a bundle, to be read.

    Attributes:
        prerequisites: Commits that whoever takes it must have, with all that they need.
    """

    abilities = Abilities(durable=True, local=True, read_only=True)

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open it.

        Raises:
            NotFoundError: there is no such file. CorruptionError: it is not a whole bundle.
            UnsupportedVersionError: of a newer version.
        """
        try:
            super().__init__(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except FileNotFoundError:
            raise NotFoundError(f"{os.fspath(path)}: there is no such file") from None
        except OSError as error:
            raise StorageError(f"reading {os.fspath(path)}: {error.strerror}") from error
        try:
            status = os.fstat(self.fd)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidInputError(f"{os.fspath(path)} is not a file: give that of a bundle")
            self.size_bytes = status.st_size
            self.prerequisites = self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> tuple[Digest, ...]:
        try:
            members = stored_members(self._bytes, self.size_bytes)
            self.places = {check_key(key): (member.start, member.size) for key, member in members.items()}
        except ValueError as error:
            raise CorruptionError(f"{self.url}: no whole bundle of cas_ckpt: {error}: copy the file again") from error
        if RECORD not in self.places:
            raise CorruptionError(f"{self.url}: this is not a bundle of cas_ckpt")
        prerequisites = unseal(RECORD, self.get(RECORD), version=VERSION, key=RECORD)["prerequisites"]
        if type(prerequisites) is not list or any(
            type(one) is not bytes or len(one) != DIGEST_BYTES for one in prerequisites
        ):
            raise CorruptionError(f"{self.url}: prerequisites of odd form: copy the file again")
        return tuple(prerequisites)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise PermissionDeniedError(f"{self.url}: a bundle is never changed: make a new one")

    put = open_writer = put_if_absent = compare_and_swap = delete = _refuse

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


# --- as a repository -------------------------------------------------------------------------


@contextmanager
def opened_bundle(path: str | os.PathLike[str]) -> Iterator[tuple[BundleStore, RepositoryHandle]]:
    """The bundle, and what it carries as a repository that is only read.

    Raises:
        NotFoundError: there is no such file. CorruptionError: it is not a whole bundle.
    """
    with closing(BundleStore(check_path(path))) as store, closing(handle_on(store, read_config(store))) as source:
        source.sync()
        if source.damaged:
            raise CorruptionError(f"{store.url}: {next(iter(source.damaged.values()))}: copy the file again")
        yield store, source


def handle_on(store: Store, config: Config) -> RepositoryHandle:
    """A repository on the store of a bundle; its index is in memory."""
    return RepositoryHandle(store, config, Index.open(IN_MEMORY, store_id=config.store_id))


def require_whole(source: RepositoryHandle) -> None:
    """Raise NotFoundError if `source` is a bundle that continues from commits which are not in it."""
    if isinstance(source.store, BundleStore) and source.store.prerequisites:
        raise NotFoundError(
            f"{source.store.url} continues from commit {short(source.store.prerequisites[0])}, which is not in it: "
            "clone the bundle before it first, then fetch this one"
        )


def require_prerequisites(handle: RepositoryHandle, store: BundleStore) -> None:
    """Raise NotFoundError if `handle` lacks a commit that the bundle continues from."""
    lacking = [one for one in store.prerequisites if one not in read_graph(handle)]
    if lacking:
        handle.sync()
        lacking = [one for one in lacking if one not in read_graph(handle)]
    if lacking:
        raise NotFoundError(
            f"{store.url} continues from commit {short(lacking[0])}, which is not here ({len(lacking)} of "
            f"{len(store.prerequisites)} are not): take the bundle before it first"
        )


# --- what is in it -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BundleInfo:
    """The content of a bundle; ids are whole.

    Attributes:
        refs: Whole name of each ref -> the commit that it names.
        prerequisites: Commits that whoever takes it must have.
        num_commits, num_packs, num_bytes: What it carries, and its length.
    """

    path: str
    refs: dict[str, str]
    prerequisites: tuple[str, ...]
    num_commits: int
    num_packs: int
    num_bytes: int


def read_bundle(path: str | os.PathLike[str]) -> BundleInfo:
    """The content of a bundle, as it says itself.

    Raises:
        NotFoundError: there is no such file. CorruptionError: it is not a whole bundle.
    """
    with opened_bundle(path) as (store, source):
        return _info(store, source)


def _info(store: BundleStore, source: RepositoryHandle) -> BundleInfo:
    refs = {f"{ref.kind.value}{ref.name}": ref.target.hex() for ref in source.refs.list() if ref.target is not None}
    wanted = tuple(sorted(one.hex() for one in store.prerequisites))
    num_commits = len(read_graph(source).commits)
    return BundleInfo(
        store.url.removeprefix("bundle://"), refs, wanted, num_commits, len(source.present_packs()), store.size_bytes
    )


def verify_bundle(handle: RepositoryHandle, path: str | os.PathLike[str], *, progress: Progress = SILENT) -> BundleInfo:
    """Read and hash every byte of a bundle, and see that it and this repository have all that its commits need.

    Raises:
        CorruptionError: it is damaged. NotFoundError: it needs commits that are not here, or lacks something.
    """
    with opened_bundle(path) as (store, source):
        require_prerequisites(handle, store)
        bad: list[BadExtent] = []
        with phase(progress, "verifying", store.size_bytes):
            packs = ((key, read_directory(store, key)[1]) for key, _ in store.list(PACK_PREFIX))
            units = (unit for key, entries in packs for unit in scan_units(key, entries))
            verify_units(
                store, units, done=lambda _, found: bad.extend(found), num_threads=thread_count(), progress=progress
            )
        if bad:
            raise CorruptionError(f"{store.url}: {len(bad)} objects are damaged: {bad[0].what}: copy the file again")
        refs = [ref for ref in source.refs.list() if ref.target is not None]
        updates = [RefUpdate(RefKind.REMOTE, f"bundle/{ref.name}", ref.target, force=True) for ref in refs]
        send(source, handle, updates, SendOptions("verify", dry_run=True), near=handle)
        return _info(store, source)
