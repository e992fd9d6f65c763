"""Writes whose outcome must be found out, and uploads of parts, with those that writers left when they died.

The story of a conditional write: 1. it carries a nonce in the metadata of the object; 2. where the vendor's retry may
have met our own write (`ConditionFailed.retried`), or a reply was lost, the object is looked at: our nonce says that it
was written; 3. what stays unknown is raised as `TransientStorageError`, as the contract wants.

Invariant: nothing of an upload is visible before its completion, which carries the condition, if there is one.
Must not know: keys, reads, vendors.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from cas_ckpt.errors import (
    CkptError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    TooLargeError,
    TransientStorageError,
)
from cas_ckpt.storage.bucket import ABSENT, Bucket, ConditionFailed, Head, UploadGone
from cas_ckpt.storage.part_workers import Parts, PartWorkers
from cas_ckpt.storage.store import is_key

MIN_UPLOAD_AGE_S = 3600.0
"""A younger upload may belong to a writer that is running on another machine: a pack takes minutes."""

_live_uploads: set[str] = set()
"""Ids of the uploads that this process has under way: they are not swept, however old."""

os.register_at_fork(after_in_child=_live_uploads.clear)  # they are the parent's


def new_nonce() -> str:
    """A token that identifies our own write."""
    return secrets.token_hex(16)


def settle(bucket: Bucket, name: str, nonce: str, error: CkptError, refused: CkptError) -> str:
    """The version of our own write, whose outcome `error` leaves open.

    Raises:
        TransientStorageError: it cannot be decided. `refused`: it was not done.
    """
    if isinstance(error, ConditionFailed) and not error.retried:
        raise refused from error
    found = _look(bucket, name, error)
    if found.nonce == nonce:
        return found.version
    if isinstance(error, TransientStorageError):
        raise error
    raise TransientStorageError(
        f"{name}: a reply was lost and the object is another one now, so it is not known whether ours was there "
        "in between; read it again"
    ) from error


def _look(bucket: Bucket, name: str, error: CkptError) -> Head:
    """The object that is there after `error`; without a version if there is none.

    Raises:
        TransientStorageError: it cannot be decided.
    """
    try:
        return bucket.head(name)
    except NotFoundError:
        return Head(0, "")
    except StorageError as failed:
        raise TransientStorageError(
            f"{name}: a reply was lost, and then the object could not be looked at ({failed}), so it is not known "
            "whether it was written; read it again"
        ) from error


class PartUpload:
    """One upload of parts, sent by the store's threads. One thread at a time calls it.

    Attributes:
        id: Empty before the first part, and once the upload was completed or aborted.
    """

    def __init__(self, bucket: Bucket, workers: PartWorkers, name: str) -> None:
        self._bucket = bucket
        self.name = name
        self.id = ""
        self._nonce = new_nonce()
        self._parts = Parts[str](workers)

    def send(self, data: memoryview, *, done: Callable[[], None] = lambda: None) -> None:
        """Have the next part sent; `done` is called when `data` is not needed any more.

        Raises:
            StorageError: a part before it could not be sent.
        """
        bucket = self._bucket
        if not self.id:
            self.id = bucket.begin(self.name, nonce=self._nonce)
            _live_uploads.add(self.id)
        number = len(self._parts) + 1
        if number > bucket.max_parts:
            raise TooLargeError(
                f"{self.name}: longer than {bucket.max_parts} parts of {bucket.part_bytes} bytes: open the store with "
                "larger parts (part_bytes), or write smaller packs"
            )
        self._parts.run(partial(bucket.put_part, self.name, self.id, number, data), done=done)
        self._parts.check()

    def check(self) -> None:
        """Raise what a part that is through raised."""
        self._parts.check()

    def complete(self, if_version: str | None) -> str:
        """Wait for the parts and make the object of them; its version.

        Raises:
            ConditionFailed: of the condition. TransientStorageError: the outcome is unknown.
        """
        tags = self._parts.results()
        try:
            version = self._bucket.complete(self.name, self.id, tags, if_version=if_version)
        except (ConditionFailed, TransientStorageError) as error:
            refused = ConditionFailed(f"{self.name}: the condition does not hold")
            version = settle(self._bucket, self.name, self._nonce, error, refused)
        except UploadGone as error:
            version = self._completed_before(error, if_version)
        self._finished()
        return version

    def _completed_before(self, error: UploadGone, if_version: str | None) -> str:
        """The version, if an attempt whose reply was lost has completed the upload."""
        found = _look(self._bucket, self.name, error)
        if found.nonce == self._nonce:
            return found.version
        if found.version and if_version == ABSENT:
            raise ConditionFailed(f"{self.name}: exists already") from error
        raise StorageError(
            f"{self.name}: the upload is gone, removed for its age by a lifecycle rule or a collection: write again"
        ) from error

    def abort(self) -> None:
        """Stop, and let the server forget the parts; harmless when called twice, or after `complete`."""
        self._parts.stop()
        if self.id:
            with suppress(CkptError):  # the server keeps the parts; `sweep_uploads` removes them later
                self._bucket.abort(self.name, self.id)
            self._finished()

    def _finished(self) -> None:
        _live_uploads.discard(self.id)
        self.id = ""


def sweep_uploads(bucket: Bucket, prefix: str, min_age_s: float, *, dry_run: bool) -> Iterator[int]:
    """Abort the uploads of keys under `prefix` that are older; the size of each in bytes, once it is gone.

    Those of this process that go on stay; those of others cannot be told from orphans but by their age, so none is
    aborted before `MIN_UPLOAD_AGE_S`.
    """
    min_age_s = max(min_age_s, MIN_UPLOAD_AGE_S)
    for upload in bucket.uploads(prefix):
        is_ours = upload.name.startswith(prefix) and is_key(upload.name.removeprefix(prefix))
        if not is_ours or upload.id in _live_uploads or upload.age_s <= min_age_s:
            continue
        try:
            size = bucket.upload_bytes(upload.name, upload.id)
            if not dry_run:
                bucket.abort(upload.name, upload.id)
        except (UploadGone, PermissionDeniedError):  # completed meanwhile, or not ours to remove
            continue
        yield size
