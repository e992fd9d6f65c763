"""A bucket in memory: what a vendor's file is to `ObjectStore`, without a server, a connection or a client.

It keeps to every word of `Bucket`, in its most exacting form: pages of three names, parts of 64 KiB, bodies that come
in pieces, and versions that the same bytes share (as S3's ETags) or no two writes (as generations of Cloud Storage).
What a vendor's own file does is tested on servers, in tests/storage.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cas_ckpt import clock
from cas_ckpt.errors import CkptError, NotFoundError, PermissionDeniedError
from cas_ckpt.storage.bucket import (
    ABSENT,
    Answer,
    ConditionFailed,
    Head,
    Listed,
    Page,
    RangeNotThere,
    Upload,
    UploadGone,
)

PAGE = 3
PIECE_BYTES = 16 << 10


class _Object(NamedTuple):
    data: bytes
    version: str
    nonce: str


@dataclass
class _Upload:
    name: str
    nonce: str
    begun_s: float
    parts: dict[int, bytes] = field(default_factory=dict)


class MemoryBucket:
    """A `Bucket`.

    Args:
        generations: Each write has a version of its own; else the same bytes have the same one.

    Attributes:
        requests: (method, name) of all that was asked for.
        refuse_from: From this request on, counted from 0, nothing is allowed any more; None: all is.
        lose_reply: The last request before that is done all the same; its answer is what is refused.
    """

    part_bytes = 64 << 10
    max_parts = 10_000
    parallel = 2
    deleted_at_once = 5

    def __init__(self, *, generations: bool = False) -> None:
        self.objects: dict[str, _Object] = {}
        self.unfinished: dict[str, _Upload] = {}
        self.requests: list[tuple[str, str]] = []
        self.refuse_from: int | None = None
        self.lose_reply = False
        self._generations = generations
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    def read(self, name: str, first: int = 0, length: int | None = None, *, if_version: str | None = None) -> Answer:
        self._ask("read", name)
        found = self._there(name, if_version)
        if first and first >= len(found.data):
            raise RangeNotThere(f"{name}: ends before {first}")
        data = found.data[first:] if length is None else found.data[first : first + length]
        return Answer(len(found.data), found.version, first, len(data), _Body(data))

    def read_tail(self, name: str, length: int) -> Answer:
        self._ask("read_tail", name)
        found = self._there(name)
        if not found.data:
            raise RangeNotThere(f"{name}: is empty")
        data = found.data[-length:]
        return Answer(len(found.data), found.version, len(found.data) - len(data), len(data), _Body(data))

    def head(self, name: str) -> Head:
        self._ask("head", name)
        found = self._there(name)
        return Head(len(found.data), found.version, found.nonce)

    def put(self, name: str, data: memoryview, *, nonce: str, if_version: str | None = None) -> str:
        self._ask("put", name)
        return self._write("put", name, bytes(data), nonce, if_version)

    def list_page(self, prefix: str, after: str) -> Page:
        self._ask("list_page", prefix)
        with self._lock:
            names = sorted(name for name in self.objects if name.startswith(prefix) and name > after)
            items = [Listed(name, len(self.objects[name].data), self.objects[name].version) for name in names[:PAGE]]
        return Page(items, len(names) > PAGE)

    def delete(self, names: Sequence[str]) -> dict[str, CkptError]:
        assert len(names) <= self.deleted_at_once
        try:
            self._ask("delete", names[0])
        except PermissionDeniedError as error:
            return dict.fromkeys(names, error)
        with self._lock:
            for name in names:
                self.objects.pop(name, None)
        try:
            self._answer("delete", names[0])
        except PermissionDeniedError as error:
            return dict.fromkeys(names, error)
        return {}

    def begin(self, name: str, *, nonce: str) -> str:
        self._ask("begin", name)
        with self._lock:
            upload = f"upload-{next(self._numbers)}"
            self.unfinished[upload] = _Upload(name, nonce, clock.now_s())
        self._answer("begin", name)
        return upload

    def put_part(self, name: str, upload: str, number: int, data: memoryview) -> str:
        self._ask("put_part", name)
        assert 0 < len(data) <= self.part_bytes
        with self._lock:
            self._of(name, upload).parts[number] = bytes(data)
        self._answer("put_part", name)
        return hashlib.md5(data).hexdigest()

    def complete(self, name: str, upload: str, tags: Sequence[str], *, if_version: str | None = None) -> str:
        self._ask("complete", name)
        with self._lock:
            begun = self._of(name, upload)
            parts = [begun.parts[number] for number in range(1, len(tags) + 1)]
            assert [hashlib.md5(part).hexdigest() for part in parts] == list(tags)
            assert all(len(part) == self.part_bytes for part in parts[:-1]), "only the last part is short"
            version = self._write("complete", name, b"".join(parts), begun.nonce, if_version)
            del self.unfinished[upload]
        return version

    def abort(self, name: str, upload: str) -> None:
        self._ask("abort", name)
        self.unfinished.pop(upload, None)
        self._answer("abort", name)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        self._ask("uploads", prefix)
        now_s = clock.now_s()
        with self._lock:
            found = list(self.unfinished.items())
        return iter([Upload(one.name, id_, now_s - one.begun_s) for id_, one in found if one.name.startswith(prefix)])

    def upload_bytes(self, name: str, upload: str) -> int:
        self._ask("upload_bytes", name)
        with self._lock:
            return sum(map(len, self._of(name, upload).parts.values()))

    def close(self) -> None:
        """Nothing is open."""

    def after_fork(self) -> None:
        self._lock = threading.RLock()

    # --- what a request meets ------------------------------------------------------------------------

    def _ask(self, method: str, name: str) -> None:
        """Note a request, which may be refused."""
        with self._lock:
            self.requests.append((method, name))
            if self.refuse_from is not None and len(self.requests) > self.refuse_from + self.lose_reply:
                raise PermissionDeniedError(f"{method} {name}: denied from here on")

    def _answer(self, method: str, name: str) -> None:
        """What a request that was done says, unless its reply is lost and it is refused when it is sent again."""
        if self.lose_reply and self.refuse_from is not None and len(self.requests) > self.refuse_from:
            raise PermissionDeniedError(f"{method} {name}: denied, after its reply was lost")

    def _there(self, name: str, if_version: str | None = None) -> _Object:
        found = self.objects.get(name)
        if found is None:
            raise NotFoundError(f"{name}: there is no such object")
        if if_version is not None and found.version != if_version:
            raise ConditionFailed(f"{name}: is not of version {if_version}")
        return found

    def _of(self, name: str, upload: str) -> _Upload:
        begun = self.unfinished.get(upload)
        if begun is None or begun.name != name:
            raise UploadGone(f"{name}: there is no such upload")
        return begun

    def _write(self, method: str, name: str, data: bytes, nonce: str, if_version: str | None) -> str:
        with self._lock:
            found = self.objects.get(name)
            if if_version is not None and (found.version if found else ABSENT) != if_version:
                raise ConditionFailed(f"{name}: is not of version {if_version!r}")
            version = str(next(self._numbers)) if self._generations else hashlib.md5(data).hexdigest()
            self.objects[name] = _Object(data, version, nonce)
        self._answer(method, name)
        return version


class _Body:
    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)

    def readinto(self, target: memoryview) -> int:
        piece = self._left[: min(PIECE_BYTES, len(target))]
        target[: len(piece)] = piece
        self._left = self._left[len(piece) :]
        return len(piece)

    def close(self) -> None:
        self._left = memoryview(b"")
