"""URLs of buckets: `scheme://bucket/prefix?setting=value`, read and written again without secrets.

Invariant: what a URL must not hold (credentials) is refused without being repeated.
Must not know: vendors; which settings there are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.storage.store import check_key

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
