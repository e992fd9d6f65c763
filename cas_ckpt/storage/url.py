"""From a URL to the store that it names.

Invariant: one memory:// name is one store within a process.
Must not know: what is in the store; whether a repository is there.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from cas_ckpt.arguments import check_path
from cas_ckpt.errors import InvalidInputError, shown_value
from cas_ckpt.storage.bucket_url import without_secrets
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Store

_named: dict[str, MemoryStore] = {}
_lock = threading.RLock()


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store at `url`: a path, `file:///path`, `memory://name`, or `s3://` or `gs://bucket/prefix?setting=value`.

    Nothing is created or read. A `~` is the home.

    `memory://name` is the same store for every caller of this process; `memory://` a new one.

    Raises:
        InvalidInputError: empty, malformed, or a scheme that this version has no store for.
    """
    if not isinstance(url, str | os.PathLike):
        raise InvalidInputError(f"a store is a path or a URL, found a {type(url).__name__}")
    text = os.fspath(url)
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidInputError(f"a store is a path or a URL, found {shown_value(text)}")
    check_path(text)
    if "://" not in text:
        reject_single_slash_url(text)
        try:
            return FileStore(Path(text).expanduser())
        except RuntimeError as error:
            raise InvalidInputError(f"{text!r}: {error}: write ./~ for a folder of that name") from error
    parts = _split(text)
    if parts.scheme == "file":
        return FileStore(path_of_url(text))
    if parts.scheme == "memory":
        name = parts.netloc + parts.path
        with _lock:
            return _named.setdefault(name, MemoryStore(url=f"memory://{name}")) if name else MemoryStore()
    if parts.scheme == "s3":
        return _open_s3(text)
    if parts.scheme == "gs":
        return _open_gcs(text)
    raise InvalidInputError(
        f"{without_secrets(text)}: no store for {parts.scheme!r}; known are a path, file://, memory://, s3:// and gs://"
    )


def reject_single_slash_url(text: str) -> None:
    """Refuse `s3:/bucket`: taken for a path, it would fill the local disk instead of the bucket.

    Raises:
        InvalidInputError: `text` is such a one.
    """
    if text.startswith(("s3:/", "gs:/")) and "://" not in text:
        raise InvalidInputError(
            f"{without_secrets(text)!r:.200}: a URL has '://'; write ./{text[:3]}... for a folder of that name"
        )


def _open_s3(text: str) -> Store:
    try:
        from cas_ckpt.storage.s3 import open_s3  # brings boto3, which takes 0.2 s, and is an extra
    except ImportError as error:
        raise InvalidInputError(
            f"s3:// needs boto3, which is not installed ({error}): pip install 'cas-ckpt[s3]'"
        ) from error
    return open_s3(text)


def _open_gcs(text: str) -> Store:
    try:
        from cas_ckpt.storage.gcs import open_gcs  # brings google-cloud-storage, which takes a second, and is an extra
    except ImportError as error:
        raise InvalidInputError(
            f"gs:// needs google-cloud-storage, which is not installed ({error}): pip install 'cas-ckpt[gcs]'"
        ) from error
    return open_gcs(text)


def _split(text: str) -> SplitResult:
    try:
        return urlsplit(text)
    except ValueError as error:
        raise InvalidInputError(f"{without_secrets(text)!r} cannot be read as a URL: {error}") from None


def path_of_url(text: str) -> Path:
    """The path that a file:// URL names.

    Raises:
        InvalidInputError: none of this computer, or one that no path can be.
    """
    parts = _split(text)
    path = os.fsdecode(unquote_to_bytes(os.fsencode(parts.path)))  # as the bytes that they are: not all names are UTF-8
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or parts.query or parts.fragment:
        raise InvalidInputError(
            f"{without_secrets(text)}: a file URL is file:///absolute/path (with '?' and '#' as %3F and %23)"
        )
    if "\0" in path:
        raise InvalidInputError(f"{text}: a path holds no NUL")
    return Path(path)
