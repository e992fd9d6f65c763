"""The local cache of repositories on stores that are not local, which saves requests.

    <place>/urls/<hash of the URL>       what is known of a URL: the config that was found there
    <place>/<name>/index.sqlite          the index of a repository, as every repository has one
    <place>/<name>/refs                  records of refs, each with the version tag that it had
    <place>/<name>/blobs/<nn>/...        values and ranges of values of packs, which never change
    <place>/limit                        how many bytes all of it may take

Every file but the index begins with the BLAKE3 hash of the rest; one that is damaged, torn by a crash, no plain file or
too long is removed, and the store is asked. What is inside is verified by its reader, as if it came from the
store: nothing here is believed for being here.

Invariant: a folder belongs to one repository at one URL: it has its name by both. So two repositories that were at one
URL, one after the other, are never mixed; nor are two that claim the same id, as a copy does, or somebody who means
harm: a version tag, which the server makes up, says that a record is unchanged only where it was read. Losing all of
this loses time. Processes and threads share it without locks: files appear whole, by renaming, and any of them may be
gone at any time. Whatever the disk refuses makes the cache forgetful, and no verb fail. Knows nothing of packs and refs
but their bytes.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import stat
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgpack
from blake3 import blake3

from cas_ckpt import clock
from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CkptError, InvalidInputError
from cas_ckpt.objects.digest import DIGEST_BYTES
from cas_ckpt.storage.store import Store

DEFAULT_PLACE = "~/.cache/cas_ckpt"

AUTO = "auto"
"""As a place: where `cache_at` says, else `DEFAULT_PLACE`."""

DEFAULT_LIMIT_BYTES = 10_000_000_000
"""Bytes of all files together; what was not used for longest goes first. Indexes count, and are not removed."""

MOST_FILE_BYTES = 64 * 1024 * 1024
"""A longer file is none of ours."""

_PRUNED_TO = 0.9
_LOOK_AGAIN = 16
"""A process looks at the size of everything when it begins to write, and after each 16th of the limit."""

_TOUCH_S = 3600.0
"""A file's time says when it was used, to the hour: a look costs no write."""

_STALE_S = 24 * 3600.0
"""An unfinished file that is so old was left by a process that died."""

_ID_HEX = 32
_FOLDER = re.compile(rf"[0-9a-f]{{{_ID_HEX}}}-[0-9a-f]{{32}}\Z")
_SIZE = struct.Struct("<Q")
_LOGGER = logging.getLogger("cas_ckpt")

_place: str | os.PathLike[str] | None = DEFAULT_PLACE


@contextmanager
def cache_at(place: str | os.PathLike[str] | None) -> Iterator[None]:
    """Repositories that are opened inside the block, in any thread, keep what they know at `place`; None: nowhere."""
    global _place
    before, _place = _place, place
    try:
        yield
    finally:
        _place = before


@dataclass(frozen=True, slots=True)
class CachedRepository:
    """The cached parts of one repository.

    Attributes:
        name: Of its folder; begins with its id.
        url: Where it is; None if another repository was found there since.
        num_bytes: Of all files, the index included.
        used_s: When something of it was last used, in seconds since 1970, to the hour.
    """

    name: str
    url: str | None
    num_bytes: int
    used_s: float

    @property
    def store_id(self) -> str:
        """The id that the repository says it has."""
        return self.name[:_ID_HEX]


class HostCache:
    """The folder of all repositories. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.RLock()
        self._put_bytes = 0
        self._limit: int | None = None

    @staticmethod
    def open(place: str | os.PathLike[str] | None = AUTO) -> HostCache | None:
        """The cache at `place`, made if need be; None if there is to be none, or none can be had."""
        place = _place if place == AUTO else place
        if place is None:
            return None
        try:
            folder = Path(place).expanduser().absolute()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            seen = folder.stat()
            if seen.st_uid != os.geteuid() or not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(f"it belongs to user {seen.st_uid}, or may not be written")
        except (OSError, RuntimeError) as error:
            _LOGGER.info("no cache at %s, every look goes to the store: %s", place, error)
            return None
        if seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):  # commits believe the index that is in it
            _LOGGER.warning("%s is not used as a cache, as others may write into it: chmod go-w, after a look", folder)
            return None
        return HostCache(folder)

    # --- what is known of a URL --------------------------------------------------------------

    def config_at(self, url: str) -> bytes | None:
        """The record of the config that was last found at `url`."""
        found = _read(self._url_path(url))
        if found is None:
            return None
        try:
            known, record = msgpack.unpackb(found)
        except (ValueError, TypeError, msgpack.UnpackException):
            return None
        return record if known == url and isinstance(record, bytes) else None

    def note_config(self, url: str, record: bytes | None) -> None:
        """Remember the record of the config that is at `url` now; None: forget it."""
        path = self._url_path(url)
        if record is None:
            with suppress(OSError):
                path.unlink()
        elif self.config_at(url) != record:
            self._write(path, msgpack.packb([url, record]))

    def _url_path(self, url: str) -> Path:
        return self.folder / "urls" / _name_of(url)

    # --- repositories --------------------------------------------------------------------------

    def repository(self, store_id: str, url: str) -> RepositoryCache | None:
        """The cache of the repository of this id at `url`; None if there can be no folder, or the id is malformed."""
        name = _folder_name(store_id, url)
        if not _FOLDER.match(name):
            return None
        folder = self.folder / name
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            (folder / "blobs").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            _LOGGER.info("no cache at %s: %s", folder, error)
            return None
        return RepositoryCache(self, folder)

    def repositories(self) -> list[CachedRepository]:
        """Cached repositories, the last used first."""
        urls: dict[str, str] = {}
        for path in _files(self.folder / "urls"):
            with suppress(ValueError, TypeError, KeyError, msgpack.UnpackException):
                url, record = msgpack.unpackb(_read(path) or b"")
                # The seal of the config is not looked at: only lists are made of its id.
                payload = msgpack.unpackb(record[len(b"CASCKREC") + DIGEST_BYTES :])[-1]
                urls[_folder_name(str(payload["store_id"]), url)] = url
        found = []
        for folder in self._folders():
            used_s = max((seen.st_mtime for path in _files(folder) if (seen := _stat(path)) is not None), default=0.0)
            found.append(CachedRepository(folder.name, urls.get(folder.name), _bytes_below(folder), used_s))
        return sorted(found, key=lambda each: (-each.used_s, each.name))

    def _folders(self) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if _FOLDER.match(path.name) and path.is_dir())
        except OSError:
            return []

    # --- bounds --------------------------------------------------------------------------------

    @property
    def limit_bytes(self) -> int:
        """How many bytes all files together may take."""
        if self._limit is None:
            found = _read(self.folder / "limit")
            self._limit = int(found) if found is not None and found.isdigit() else DEFAULT_LIMIT_BYTES
        return self._limit

    def set_limit(self, num_bytes: int) -> None:
        """Keep at most so many bytes from now on, in every process.

        Raises:
            InvalidInputError: less than nothing.
        """
        if num_bytes < 0:
            raise InvalidInputError(f"a cache of {num_bytes} bytes: give a number from 0 on")
        self._write(self.folder / "limit", b"%d" % num_bytes)
        self._limit = num_bytes
        self.shrink()

    def shrink(self) -> int:
        """Remove what was not used for longest until the limit holds; the bytes that went. Indexes stay."""
        total, blobs = 0, []
        now_s = clock.now_s()
        for path in _files(self.folder):
            seen = _stat(path)
            if seen is None:
                continue
            total += seen.st_size
            if path.parent.name == "tmp":
                if now_s - seen.st_mtime > _STALE_S:
                    blobs.append((0.0, seen.st_size, path))
            elif path.parent.parent.name == "blobs":
                blobs.append((seen.st_mtime, seen.st_size, path))
        freed = 0
        wanted = total - self.limit_bytes * _PRUNED_TO if total > self.limit_bytes else 0
        for used_s, size, path in sorted(blobs, key=lambda each: (each[0], str(each[2]))):
            if freed >= wanted and used_s:
                break
            with suppress(OSError):
                path.unlink()
                freed += size
        return freed

    def clear(self, name: str | None = None) -> tuple[int, list[str]]:
        """Remove what is kept of the repository in the folder `name`, or of all.

        Returns:
            Bytes that went, and folders whose index stays because a process has it open.
        """
        from cas_ckpt.index.index import Index  # brings SQLAlchemy, which most looks at the cache do not need

        freed, busy = 0, list[str]()
        for each in self.repositories():
            if name is not None and each.name != name:
                continue
            folder = self.folder / each.name
            try:
                Index.discard(folder / INDEX_NAME, store_id=each.store_id)
            except CkptError:
                busy.append(each.name)
            for path in list(_files(folder)):
                if not path.name.startswith(INDEX_NAME):
                    _remove(path)
            if each.name not in busy:
                shutil.rmtree(folder, ignore_errors=True)
            freed += each.num_bytes - _bytes_below(folder)
        if name is None:
            shutil.rmtree(self.folder / "urls", ignore_errors=True)
        return freed, busy

    # --- files -----------------------------------------------------------------------------------

    def _write(self, path: Path, data: bytes) -> bool:
        """Let `data` appear at `path`, whole; False if the disk refuses."""
        folder = self.folder / "tmp"
        temporary = folder / f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                with open(fd, "wb") as file:
                    file.write(blake3(data).digest())
                    file.write(data)
                os.rename(temporary, path)  # not synced: the hash tells what a power failure tore
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                raise
        except OSError as error:
            _LOGGER.info("the cache cannot keep %s: %s", path, error)
            return False
        with self._lock:
            first, before = not self._put_bytes, self._put_bytes
            self._put_bytes += len(data) + DIGEST_BYTES
            step = max(self.limit_bytes // _LOOK_AGAIN, 1)
            look = first or before // step != self._put_bytes // step
        if look:
            self.shrink()
        return True


INDEX_NAME = "index.sqlite"


class RepositoryCache:
    """The cached parts of one repository. Threads may share it."""

    def __init__(self, host: HostCache, folder: Path) -> None:
        self._host = host
        self._folder = folder

    @property
    def index_place(self) -> str:
        """Where the index is."""
        return str(self._folder / INDEX_NAME)

    def get(self, name: str) -> bytes | None:
        """The bytes that were put under `name`, or None."""
        path = self._path(name)
        found = _read(path)
        if found is not None:
            seen, now_s = _stat(path), clock.now_s()
            if seen is not None and abs(now_s - seen.st_mtime) > _TOUCH_S:  # it is in use
                with suppress(OSError):
                    os.utime(path, (now_s, now_s))
        return found

    def put(self, name: str, data: bytes | bytearray | memoryview) -> None:
        """Keep `data`, which never changes, under `name`."""
        if len(data) + DIGEST_BYTES <= min(MOST_FILE_BYTES, self._host.limit_bytes):
            self._host._write(self._path(name), bytes(data))

    def drop(self, name: str) -> None:
        """Forget what is under `name`: it was not what it should be."""
        with suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        hashed = _name_of(name)
        return self._folder / "blobs" / hashed[:2] / hashed

    def refs(self) -> dict[str, tuple[str, bytes]]:
        """Key of a ref -> the version tag that it had, and its record then."""
        found = _read(self._folder / "refs")
        try:
            rows = msgpack.unpackb(found, strict_map_key=False) if found is not None else {}
            return {str(key): (str(version), bytes(record)) for key, (version, record) in rows.items()}
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException):
            return {}

    def note_refs(self, refs: Mapping[str, tuple[str, bytes]]) -> None:
        """Remember these in the place of all that were; of processes that do so at once, one wins."""
        self._host._write(self._folder / "refs", msgpack.packb({key: list(each) for key, each in refs.items()}))


def _name_of(text: str) -> str:
    return blake3(text.encode()).hexdigest(length=16)


def _folder_name(store_id: str, url: str) -> str:
    return f"{store_id}-{_name_of(url)}"


def _files(folder: Path) -> Iterator[Path]:
    """Every file below `folder`, whatever else goes on there."""
    for parent, _, names in os.walk(folder):
        for name in names:
            yield Path(parent) / name


def _bytes_below(folder: Path) -> int:
    return sum(seen.st_size for path in _files(folder) if (seen := _stat(path)) is not None)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None


def _read(path: Path) -> bytes | None:
    """The bytes in the file, if it is whole; one that is not is removed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            _remove(path)
        return None
    try:
        with open(fd, "rb") as file:
            seen = os.fstat(fd)
            data = b""
            if stat.S_ISREG(seen.st_mode) and DIGEST_BYTES <= seen.st_size <= MOST_FILE_BYTES:
                data = file.read(MOST_FILE_BYTES + 1)
    except OSError:
        return None
    check, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if not check or blake3(body).digest() != check:
        _LOGGER.info("%s is damaged: it is removed, and the store is asked", path)
        _remove(path)
        return None
    return body


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


class CachedReads:
    """A store whose packs are read from the cache where it has them; everything else goes to the store itself.

    Ranges of packs never change: a pack is written once, under a name that is never used again. So what was read once
    need not be read again, whoever verifies it. A pack that was deleted may still be answered from the cache: readers
    verify what they get by its id, and nothing that decides what is stored looks here.

    Args:
        most_bytes: Longer ranges are neither kept nor looked for.
    """

    def __init__(self, store: Store, cache: RepositoryCache, *, most_bytes: int) -> None:
        self._store = store
        self._cache = cache
        self._most_bytes = most_bytes
        self._answered: set[str] = set()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def get_range(self, key: str, offset: int, length: int) -> bytes | memoryview | bytearray:
        """As `Store.get_range`."""
        if length > self._most_bytes or not key.startswith("packs/"):
            return self._store.get_range(key, offset, length)
        whole = self._cache.get(key) if key.endswith(".meta") else None
        if whole is not None and offset + length <= len(whole):
            self._answered.add(key)
            return memoryview(whole)[offset : offset + length]
        name = f"{key} {offset} {length}"
        found = self._cache.get(name)
        if found is not None and len(found) == length:
            self._answered.add(name)
            return found
        data = self._store.get_range(key, offset, length)
        self._cache.put(name, data)
        return data

    def put(self, key: str, data: Buffer) -> None:
        """As `Store.put`; a meta pack is kept here, too, once it is durable there."""
        self._store.put(key, data)
        if key.startswith("packs/") and key.endswith(".meta"):
            self._cache.put(key, data)

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        """As `Store.get_tail`; a value that is not longer than that is kept whole."""
        whole = self._cache.get(key)
        if whole is not None:
            return len(whole), whole[max(0, len(whole) - length) :]
        name = f"{key} tail {length}"
        kept = self._cache.get(name)
        if kept is not None and len(kept) > _SIZE.size:
            return int(_SIZE.unpack_from(kept)[0]), kept[_SIZE.size :]
        size, tail = self._store.get_tail(key, length)
        if len(tail) == size:
            self._cache.put(key, tail)
        else:
            self._cache.put(name, _SIZE.pack(size) + tail)
        return size, tail

    def drop_tail(self, key: str, length: int) -> None:
        """Forget what was answered for this tail: it is not what it should be."""
        self._cache.drop(key)
        self._cache.drop(f"{key} tail {length}")

    def whole(self, key: str, size: int) -> tuple[bytes, bool]:
        """All of the pack, which is `size` bytes long, and whether it comes from the cache."""
        found = self._cache.get(key)
        if found is not None and len(found) == size:
            return found, True
        data = bytes(self._store.get_range(key, 0, size))
        self._cache.put(key, data)
        return data, False

    def distrust(self) -> bool:
        """Forget everything that was answered from the cache: some of it was wrong. Whether there was any."""
        answered, self._answered = self._answered, set()
        for name in answered:
            self._cache.drop(name)
        return bool(answered)

    def drop(self, key: str, offset: int, length: int) -> None:
        """Forget what was answered for this range: it is not what it should be."""
        self._cache.drop(key)
        self._cache.drop(f"{key} {offset} {length}")

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        """As `Store.read_into`."""
        if target.nbytes > self._most_bytes or not key.startswith("packs/"):
            return self._store.read_into(key, offset, target, cached_only=cached_only)
        if cached_only:
            return False
        target.cast("B")[:] = self.get_range(key, offset, target.nbytes)
        return True
