"""From a URL to the store that it names.

Invariant: nothing but `SCHEMES` says which stores there are.
Must not know: what is in the store; whether a repository is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from cas_ckpt.arguments import check_path
from cas_ckpt.errors import InvalidInputError, shown_value
from cas_ckpt.storage.bucket_url import without_secrets
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.memory import open_memory
from cas_ckpt.storage.store import Store


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store at `url`: a path, or a URL of one of `SCHEMES`. Nothing is created or read. A `~` is the home.

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
    scheme = _split(text).scheme
    if scheme not in SCHEMES:
        known = ", ".join(f"{each}://" for each in SCHEMES)
        raise InvalidInputError(f"{without_secrets(text)}: no store for {scheme!r}; known are a path, {known}")
    return SCHEMES[scheme](text)


def reject_single_slash_url(text: str) -> None:
    """Refuse `s3:/bucket`: taken for a path, it would fill the local disk instead of the bucket.

    Raises:
        InvalidInputError: `text` is such a one.
    """
    scheme, _, rest = text.partition(":")
    if scheme in SCHEMES and rest.startswith("/") and not rest.startswith("//"):
        raise InvalidInputError(
            f"{without_secrets(text)!r:.200}: a URL has '://'; write ./{scheme}:... for a folder of that name"
        )


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


def _needing(package: str, extra: str) -> Callable[[str], Store]:
    """`open_EXTRA` of the module of that name, which imports `package`: that takes long, and may not be installed."""

    def opened(url: str) -> Store:
        try:
            module = import_module(f"cas_ckpt.storage.{extra}")
        except ImportError as error:
            raise InvalidInputError(
                f"{url.partition('://')[0]}:// needs {package}, which is not installed ({error}): "
                f"pip install 'cas-ckpt[{extra}]'"
            ) from error
        store: Store = getattr(module, f"open_{extra}")(url)
        return store

    return opened


SCHEMES: dict[str, Callable[[str], Store]] = {
    "file": lambda url: FileStore(path_of_url(url)),
    "memory": open_memory,
    "s3": _needing("boto3", "s3"),
    "gs": _needing("google-cloud-storage", "gcs"),
}
"""What opens the URLs of each scheme. How to add one: docs/adding.md."""
