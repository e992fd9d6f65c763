"""From a URL to the store that it names; and URLs of buckets, `scheme://bucket/prefix?setting=value`.

Invariant: nothing but `SCHEMES`, and the entry points of installed packages, says which stores there are. What a URL
must not hold (credentials) is refused without being repeated.
Must not know: what is in the store; whether a repository is there; vendors, and which settings they have.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, parse_qsl, quote, unquote, unquote_to_bytes, urlencode, urlsplit

from cas_ckpt.arguments import check_path
from cas_ckpt.errors import InvalidInputError, shown_value
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.memory import open_memory
from cas_ckpt.storage.store import Store, check_key

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_SECRET = re.compile(
    r"secret|token|password|passwd|credential|signature|access[-_]?key|api[-_]?key|private[-_]?key|^sig$|^x-(amz|goog)-",
    re.IGNORECASE,
)
"""Names of settings that would hold a secret."""

SECRET = re.compile(
    r"pass(word|wd)?\b|secret|token|credential|signature|(access|api|private|customer|sse)[-_]?key|\bsig\b",
    re.IGNORECASE,
)
"""Names of parameters of any URL that would."""

_PASSWORD = re.compile(r"(:/+[^\s:/@]*:)\S*@")
_PARAMETER = re.compile(r"([?&][^\s=&#]+=)([^\s&#]*)")

STORES = "cas_ckpt.stores"
"""The group of entry points by which a package brings a store: the name is a scheme, the object opens its URLs."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,220}")


def without_secrets(text: str) -> str:
    """`text` without the passwords, keys and tokens of URLs in it: `***` stands in their place."""

    def shown(found: re.Match[str]) -> str:
        return found[1] + ("***" if SECRET.search(found[1]) else _PARAMETER.sub(shown, found[2]))

    return _PARAMETER.sub(shown, _PASSWORD.sub(r"\1***@", text))


@dataclass(frozen=True, slots=True)
class BucketUrl:
    """A parsed URL of a bucket.

    Attributes:
        prefix: Of every object's name: empty, or ends with "/".
        settings: From the query; all of them known.
    """

    scheme: str
    bucket: str
    prefix: str
    settings: Mapping[str, str]

    def __str__(self) -> str:
        query = urlencode(sorted(self.settings.items()), quote_via=quote, safe="/:")
        place = f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")
        return f"{place}?{query}" if query else place


def parse_bucket_url(url: str, *, known: Collection[str]) -> BucketUrl:
    """Parse `url`.

    Args:
        known: Names of settings that the vendor has.
    Raises:
        InvalidInputError: credentials in it, no bucket, a prefix that no key has, unknown or repeated settings.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidInputError(f"{url.partition('?')[0]!r:.100} cannot be read as a URL: {error}") from None
    scheme = parts.scheme
    if "@" in parts.netloc:
        raise InvalidInputError(
            f"a URL of {scheme}:// holds no credentials (something stands before an '@'): leave them to the vendor's "
            "own chain, environment, profile or instance"
        )
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    for name, _ in pairs:
        if _SECRET.search(name):
            raise InvalidInputError(
                f"a URL of {scheme}:// holds no credentials, found the setting {name!r:.40}: leave them to the "
                "vendor's own chain, environment, profile or instance"
            )
    names = [name for name, _ in pairs]
    unknown = sorted(set(names) - set(known))
    if unknown or parts.fragment:
        found = f"{unknown[0]!r:.40}" if unknown else "a '#'"
        raise InvalidInputError(f"a URL of {scheme}:// has no setting {found}; known are {', '.join(sorted(known))}")
    if len(set(names)) < len(names):
        raise InvalidInputError(f"a URL of {scheme}:// gives each setting once, found {', '.join(names)}")
    if not _BUCKET.fullmatch(parts.netloc):
        name, colon, _ = parts.netloc.partition(":")  # behind it may be a password
        found = f"{name!r:.80}, and a ':' after it" if colon else f"{name!r:.80}"
        raise InvalidInputError(f"{scheme}://bucket/prefix wanted, found the bucket {found}")
    prefix = unquote(parts.path).strip("/")
    if prefix:
        check_key(prefix)
        prefix += "/"
    return BucketUrl(scheme, parts.netloc, prefix, dict(pairs))


def whole_setting(url: BucketUrl, name: str, default: int, *, least: int, most: int) -> int:
    """A setting that is a whole number.

    Raises:
        InvalidInputError: it is none, or is not between `least` and `most`.
    """
    text = url.settings.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 18 or not least <= int(text) <= most:
        raise InvalidInputError(f"{name}={text!r:.40}: wanted a whole number from {least} to {most}")
    return int(text)


def flag_setting(url: BucketUrl, name: str) -> bool:
    """A setting that is true or false; false if it is not there.

    Raises:
        InvalidInputError: it is neither.
    """
    return choice_setting(url, name, ("false", "true")) == "true"


def choice_setting(url: BucketUrl, name: str, choices: tuple[str, ...]) -> str:
    """A setting that is one of `choices`; the first if it is not there.

    Raises:
        InvalidInputError: it is something else.
    """
    text = url.settings.get(name, choices[0])
    if text not in choices:
        raise InvalidInputError(f"{name}={text!r:.40}: wanted one of {', '.join(choices)}")
    return text


def endpoint_setting(url: BucketUrl) -> str | None:
    """The setting `endpoint`, without a "/" at its end.

    Raises:
        InvalidInputError: it is not the root of a service, or holds credentials, which are not repeated.
    """
    text = url.settings.get("endpoint")
    if text is None:
        return None
    parts = urlsplit(text)
    if "@" in parts.netloc:
        raise InvalidInputError("endpoint: a URL with something before an '@': no credentials belong there")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise InvalidInputError(f"endpoint={text!r:.100}: wanted https://host[:port]")
    return parts.geturl().rstrip("/")  # the scheme in small letters


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store at `url`: a path, or a URL of one of `SCHEMES`. Nothing is created or read. A `~` is the home.

    Raises:
        InvalidInputError: empty, malformed, or a scheme that neither this version nor an installed package has a store
            for.
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
    return SCHEMES[scheme](text) if scheme in SCHEMES else _store_of_package(scheme, text)


def _store_of_package(scheme: str, url: str) -> Store:
    """The store that an installed package has for `url`.

    Raises:
        InvalidInputError: no package has that scheme, or several have, it cannot be imported, or it opens no store.
    """
    shown, found = without_secrets(url), _of_packages(scheme)
    if not found:
        known = ", ".join(f"{each}://" for each in (*SCHEMES, *sorted({point.name for point in _of_packages()})))
        raise InvalidInputError(f"{shown}: no store for {scheme!r}; known are a path, {known}")
    packages = sorted({each.dist.name if each.dist else "?" for each in found})
    if len(packages) > 1:
        raise InvalidInputError(
            f"{shown}: the packages {' and '.join(packages)} have a store for {scheme!r}: leave one of them installed"
        )
    try:
        opener = found[0].load()
    except Exception as error:  # whatever a package raises as it is imported
        raise InvalidInputError(
            f"{shown}: the store of the package {packages[0]} cannot be imported: {error}"
        ) from error
    store: Store = opener(url)
    if not hasattr(store, "abilities"):
        raise InvalidInputError(f"{shown}: the package {packages[0]} opens a {type(store).__name__}, which is no store")
    return store


def _of_packages(scheme: str | None = None) -> list[EntryPoint]:
    """Entry points of installed packages that have a store for `scheme`, or for any."""
    from importlib.metadata import entry_points  # takes 15 ms

    return [point for point in entry_points(group=STORES) if scheme is None or point.name == scheme]


def reject_single_slash_url(text: str) -> None:
    """Refuse `s3:/bucket`: taken for a path, it would fill the local disk instead of the bucket.

    Raises:
        InvalidInputError: `text` is such a one.
    """
    scheme, _, rest = text.partition(":")
    if not rest.startswith("/") or rest.startswith("//"):
        return
    if scheme in SCHEMES or _of_packages(scheme):
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
