"""Mutable settings of a repository: named remotes, and where its index is; and whether the hosts in them are trusted.

One sealed record under `settings`, changed by compare-and-swap, so that of two people who change it at once neither
undoes the other.

Invariant: no secret is ever written here. Every reader of the repository can read the record, and it travels with a
clone; so URLs that carry a password, a token or a signature are refused before anything is stored.

Hosts that only the settings name get credentials of the user's as follows. As with git's `safe.directory`, they count
where the settings are the user's own: folder and record belong to whoever asks. Elsewhere (another's folder, a bucket)
a host counts only if the user named it: in the address that he opened, or by `trusted_hosts`. A password is proven to a
server in a way that it can try guesses on, and what S3 is sent shows the key id and the token of a session; so no
connection is made before this was asked. docs/decisions/015 has the reasons.

How pushes in the background ended is a record of its own, `tiers`, for `status`: absent until one fails, and no
decision depends on it, as what waits is what the refs say. URLs in what an error said are written down without their
passwords, keys and tokens.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from cas_ckpt import clock
from cas_ckpt.arguments import check_flags, check_path, one_text
from cas_ckpt.core.config import SHORT
from cas_ckpt.core.ref_store import change_record, read_record, swap_record
from cas_ckpt.core.refs import NONCE_BYTES, check_name
from cas_ckpt.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    shown_value,
)
from cas_ckpt.objects.digest import seal
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import SECRET, reject_single_slash_url, without_secrets

SETTINGS_KEY = "settings"

_trusted: list[frozenset[str]] = []
"""Those of each block that has not ended."""


@contextmanager
def trusted_hosts(*hosts: str) -> Iterator[None]:
    """Let these hosts get credentials inside the block, in any thread, though only a repository's settings name them.

        with cas_ckpt.trusted_hosts("minio.example.org"):
            repo.fetch()

    Args:
        hosts: Names or addresses as the settings give them, without a port.
    Raises:
        InvalidInputError: one is not a text.
    """
    for host in hosts:
        if not isinstance(host, str) or not host:
            raise InvalidInputError(f"a trusted host is {shown_value(host)}: give its name, such as 'db.example.org'")
    own = frozenset(host.lower() for host in hosts)
    _trusted.append(own)
    try:
        yield
    finally:
        _trusted.remove(own)


def require_trusted(store: Store, hosts: Iterable[str], what: str, instead: str) -> None:
    """Raise PermissionDeniedError if the settings of the repository in `store` may not name one of these hosts.

    Args:
        what: What is at the hosts. instead: How the user can name it himself.
    """
    known = {endpoint_of(store.url)}.union(*_trusted)
    unknown = [host for host in hosts if host.lower() not in known]
    if unknown and not _is_own(store):
        host = unknown[0]
        raise PermissionDeniedError(
            f"{what}: only the settings of {store.url} name the host {host!r:.200}, which would get your credentials, "
            f"and these settings may be somebody else's: if you trust it, CAS_CKPT_TRUSTED_HOSTS={host:.200}, or "
            f"cas_ckpt.trusted_hosts({host!r:.200}); or {instead}"
        )


def endpoint_of(url: str) -> str:
    """The host of the endpoint that the URL of a bucket names, in small letters; "": none."""
    try:
        given = parse_qs(urlsplit(url).query).get("endpoint", [""])
        return urlsplit(given[-1]).hostname or ""
    except ValueError:
        return ""


def _is_own(store: Store) -> bool:
    """Whether the user wrote the settings: he has the folder and the record; or it is in this process's memory."""
    root: Path | None = getattr(store, "root", None)
    if root is None:
        return not store.abilities.durable
    try:
        owners: Collection[int] = {os.stat(root).st_uid, os.stat(root / SETTINGS_KEY, follow_symlinks=False).st_uid}
    except OSError:
        return False
    return owners == {os.geteuid()}


VERSION = 1

MAX_REMOTES = 100
MAX_URL_BYTES = 2048

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z")

_GOOGLE = "googleapis.com"


@dataclass(frozen=True, slots=True)
class Remote:
    """Another repository under a short name.

    Attributes:
        url: Where it is; credentials come from the environment of the process.
        fetch: Patterns of its branches that `fetch` brings ("ft/*"); empty: all.
        push: Branches that `push` sends when none are named; empty: the one that is checked out.
        tier: A slower copy of this repository: what is not there yet is never collected here.
        promisor: Chunks that are missing here are there, and are brought from there when they are wanted.
        filter: Patterns of keys ("model/**") whose chunks `fetch` brings; empty: all. Only of a promisor.
        repository: Id of the repository that was there when it was first asked; empty: it was not asked yet.
        moved: The URL was set since: another repository may be there.
    """

    name: str
    url: str
    fetch: tuple[str, ...] = ()
    push: tuple[str, ...] = ()
    tier: bool = False
    promisor: bool = False
    filter: tuple[str, ...] = ()
    repository: str = ""
    moved: bool = False

    def __post_init__(self) -> None:
        check_remote_name(self.name)
        check_url(self.url)
        check_flags(tier=self.tier, promisor=self.promisor)  # another value: a record that is not read any more
        for name in ("tier", "promisor"):
            object.__setattr__(self, name, bool(getattr(self, name)))
        for pattern in (*self.fetch, *self.push):
            if not isinstance(pattern, str) or not pattern or len(pattern) > 200 or not pattern.isprintable():
                raise InvalidInputError(f"{shown_value(pattern)} is not a pattern of branches: write e.g. 'ft/*'")
        for pattern in self.filter:
            if not isinstance(pattern, str) or not pattern or len(pattern) > 1000 or not pattern.isprintable():
                raise InvalidInputError(f"{shown_value(pattern)} is not a pattern of keys: write e.g. 'model/**'")
        if not isinstance(self.repository, str) or (self.repository and not SHORT.match(self.repository)):
            raise InvalidInputError(f"{shown_value(self.repository)} is not the id of a repository")
        if self.filter and not self.promisor:
            raise InvalidInputError(
                "a filter leaves a part of the bytes there: only of a promisor, which keeps them (promisor=True)"
            )

    def require_same(self, found: str) -> None:
        """Raise unless the repository of the id `found`, which is at the URL now, may be meant.

        Raises:
            ConflictError: it is another one than before, and the URL was not set since.
        """
        if self.repository and found != self.repository and not self.moved:
            raise ConflictError(
                f"remote {self.name!r} is another repository than when it was first asked: its id is {found[:12]}, it "
                f"was {self.repository[:12]}: put that one back, or, if another one is meant, say where it is "
                f"(repo.set_remote({self.name!r}, url=URL), the same URL too)"
            )

    def place(self, store: Store) -> str:
        """The URL to open for it: `url`, with no credentials for a service that the repository in `store` alone names.

        Google's tokens are good for whoever has them, so that none goes to another service, whoever named it. What S3
        is sent is signed, and good for one request to one host, but shows the key id and the token of a session.

        Raises:
            PermissionDeniedError: a service that speaks S3, and the settings may be somebody else's.
        """
        if self.url.startswith("s3://") and (host := endpoint_of(self.url)):
            require_trusted(store, [host], f"remote {self.name!r}", "give its URL in place of its name")
        parts = urlsplit(self.url) if self.url.startswith("gs://") else None
        pairs = [] if parts is None else parse_qsl(parts.query, keep_blank_values=True)
        host = endpoint_of(self.url) if any(name == "endpoint" for name, _ in pairs) else _GOOGLE
        if parts is None or host == _GOOGLE or host.endswith(f".{_GOOGLE}"):
            return self.url
        kept = [(name, value) for name, value in pairs if name != "anonymous"]
        return urlunsplit(parts._replace(query=urlencode([*kept, ("anonymous", "true")], safe="/:")))


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a repository.

    Attributes:
        remotes: By name, ascending.
        index_url: Where its index is, unless its opener says otherwise; empty: where the kind of store puts it.
    """

    remotes: tuple[Remote, ...] = ()
    index_url: str = ""

    @property
    def tiers(self) -> tuple[Remote, ...]:
        """Remotes that are to have every commit."""
        return tuple(remote for remote in self.remotes if remote.tier)

    def remote(self, name: str) -> Remote:
        """The remote called `name`.

        Raises:
            NotFoundError: there is none.
        """
        one_text("name", name)
        found = next((remote for remote in self.remotes if remote.name == name), None)
        if found is None:
            known = ", ".join(remote.name for remote in self.remotes)
            what = f"known are {known}" if known else f'none is noted: repo.add_remote("{name}", URL)'
            raise NotFoundError(f"there is no remote {shown_value(name)}: {what}")
        return found

    def with_remote(self, remote: Remote) -> Settings:
        """The same with `remote`, in the place of one of its name.

        Raises:
            InvalidInputError: too many.
        """
        others = [one for one in self.remotes if one.name != remote.name]
        if len(others) >= MAX_REMOTES:
            raise InvalidInputError(f"there are {MAX_REMOTES} remotes already: remove some first")
        return replace(self, remotes=tuple(sorted((*others, remote), key=lambda one: one.name)))

    def without_remote(self, name: str) -> Settings:
        """The same without the remote `name`.

        Raises:
            NotFoundError: there is none.
        """
        gone = self.remote(name)
        return replace(self, remotes=tuple(one for one in self.remotes if one is not gone))


def check_remote_name(name: object) -> str:
    """`name`, if a remote may have it.

    Raises:
        InvalidInputError: another type, empty, too long, or with odd characters.
    """
    if not isinstance(name, str) or not _NAME.match(name):
        raise InvalidInputError(
            f"{shown_value(name)} is not a name of a remote: give 1 to 64 of letters, digits, '.', '_' and '-'"
        )
    check_name(name)
    return name


def check_url(url: object) -> str:
    """`url`, if it may be written down where others read it. What is found is never part of the message.

    Raises:
        InvalidInputError: not a text that names a place, or one with a password, token, signature or user of a bucket.
    """
    if not isinstance(url, str) or not url.strip() or not url.isprintable() or len(url.encode()) > MAX_URL_BYTES:
        raise InvalidInputError(f"a URL is 1 to {MAX_URL_BYTES} bytes of printable text")
    if "://" not in url:
        return url
    try:
        parts = urlsplit(url)
        found = parts.password is not None
        if parts.scheme in ("s3", "gs"):
            found = found or not set(unquote(parts.netloc)).isdisjoint("@:")  # a bucket has no user and no port
        pairs = parse_qsl(parts.query, keep_blank_values=True)
        found = found or any(SECRET.search(name) for name, _ in pairs)
        for _, value in pairs:
            if "://" in value:  # an endpoint
                check_url(value)
                found = found or urlsplit(value).username is not None
    except ValueError as error:
        raise InvalidInputError("a URL that cannot be read as one: it is not stored") from error
    if found or parts.fragment:
        raise InvalidInputError(
            "this URL carries a password, a key, a token or a signature, and whoever reads the repository could read "
            "it: leave it out, and let the environment of each user say who they are (docs/remotes.md)"
        )
    return url


def stored_url(url: str | os.PathLike[str]) -> str:
    """`url` as it is kept: a path becomes absolute, as others open the repository from other folders.

    One that is no printable text, as of a name that is not UTF-8, becomes a file:// URL.

    Raises:
        InvalidInputError: no path; it carries a secret, or lacks a slash.
    """
    text = check_path(url)
    reject_single_slash_url(text)
    if "://" in text:
        return check_url(text)
    path = Path(text).expanduser().absolute()
    return check_url(str(path) if str(path).isprintable() else path.as_uri())


def read_settings(store: Store) -> Settings:
    """The settings of the repository; empty ones if it has none.

    Raises:
        CorruptionError: the record is damaged. UnsupportedVersionError: written by a newer version.
    """
    return _read(store)[0]


def change_settings(store: Store, change: Callable[[Settings], Settings]) -> Settings:
    """Put what `change` makes of the settings in their place; it is called again after a conflict.

    Raises:
        ConflictError: others change them all the time. Whatever `change` raises.
    """

    def changed(held: Settings) -> Settings:
        wanted = change(held)
        if wanted.index_url:
            check_url(wanted.index_url)
        return wanted

    return change_record(store, SETTINGS_KEY, _read, _encode, changed)


def _read(store: Store) -> tuple[Settings, bytes | None]:
    return read_record(store, SETTINGS_KEY, _decode, Settings(), version=VERSION)


def _encode(settings: Settings) -> bytes:
    payload = {
        "remotes": [_payload(remote) for remote in settings.remotes],
        "index_url": settings.index_url,
        "nonce": secrets.token_bytes(NONCE_BYTES),
    }
    return seal("settings", VERSION, payload, key=SETTINGS_KEY)


def _payload(remote: Remote) -> dict[str, Any]:
    """Encoded settings of `remote`."""
    found = {one.name: getattr(remote, one.name) for one in fields(remote)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items() if value}


def _decode(payload: Mapping[str, Any]) -> Settings:
    try:
        remotes = tuple(_decode_remote(dict(one)) for one in payload["remotes"])
        index_url = payload["index_url"]
        if index_url != "":
            check_url(index_url)
        names = [remote.name for remote in remotes]
        if names != sorted(set(names)) or len(names) > MAX_REMOTES:
            raise ValueError("its remotes are out of order, twice there, or too many")
        return Settings(remotes, index_url)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(
            f"{SETTINGS_KEY}: settings that this version cannot read: {error}: delete this record, then add the "
            "remotes again"
        ) from error


def _decode_remote(given: dict[str, Any]) -> Remote:
    for name in ("fetch", "push", "filter"):
        if name in given:
            given[name] = tuple(given[name])
    for name in ("tier", "promisor", "moved"):
        if given.get(name, True) is not True:
            raise ValueError(f"{name} is neither absent nor true")
    return Remote(**given)


# --- how the last push to each tier ended ------------------------------------------------------

TIERS_KEY = "tiers"
TIERS_VERSION = 1

MAX_REASON = 1000
"""Characters of what an error said that are kept."""

MAX_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class PushFailure:
    """The last push to a tier, which failed.

    Attributes:
        time_s: When, seconds since the epoch.
        reason: What the error said.
    """

    time_s: float
    reason: str


def read_push_failures(store: Store) -> dict[str, PushFailure]:
    """Remote -> its last push in the background, if that failed. What cannot be read says nothing: nothing needs it."""
    try:
        return _read_failures(store)[0]
    except CorruptionError:
        return {}


def note_push(store: Store, remote: str, error: Exception | None) -> None:
    """Remember how the push to `remote` ended; None: well, or it is no remote any more.

    Raises:
        ConflictError: others note theirs all the time.
    """
    for _ in range(MAX_ATTEMPTS):
        try:
            held, record = _read_failures(store)
        except CorruptionError:
            held, record = {}, store.get(TIERS_KEY)
        wanted = {name: failure for name, failure in held.items() if name != remote}
        if error is not None:
            wanted[remote] = PushFailure(clock.now_s(), without_secrets(str(error))[:MAX_REASON])
        elif wanted == held:
            return
        payload = {
            "failures": [[name, int(one.time_s * 1e6), one.reason] for name, one in sorted(wanted.items())],
            "nonce": secrets.token_bytes(NONCE_BYTES),
        }
        try:
            swap_record(store, TIERS_KEY, record, seal("tiers", TIERS_VERSION, payload, key=TIERS_KEY))
            return
        except ConflictError:
            continue
    raise ConflictError(f"{TIERS_KEY} was changed {MAX_ATTEMPTS} times meanwhile: how the push ended is not noted")


def _read_failures(store: Store) -> tuple[dict[str, PushFailure], bytes | None]:
    return read_record(store, TIERS_KEY, _decode_failures, {}, version=TIERS_VERSION)


def _decode_failures(payload: Mapping[str, Any]) -> dict[str, PushFailure]:
    try:
        found = {}
        for name, time_us, reason in payload["failures"]:
            if type(time_us) is not int or not isinstance(reason, str) or len(reason) > MAX_REASON:
                raise TypeError("a failure that is not a name, a time and a text")
            found[check_remote_name(name)] = PushFailure(time_us / 1e6, reason)
        if len(found) > MAX_REMOTES:
            raise ValueError("too many of them")
        return found
    except (KeyError, TypeError, ValueError, InvalidInputError) as error:
        raise CorruptionError(f"{TIERS_KEY}: not how pushes ended: {error}: delete this record") from error
