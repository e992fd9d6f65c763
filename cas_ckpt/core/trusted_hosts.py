"""Which hosts get credentials of the user's when only the settings of a repository name them.

As with git's `safe.directory`, they count where the settings are the user's own: folder and record belong to whoever
asks. Elsewhere (another's folder, a bucket) a host counts only if the user named it: in the address that he opened, or
by `trusted_hosts`. A password is proven to a server in a way that it can try guesses on, and what S3 is sent shows the
key id and the token of a session; so no connection is made before this was asked. docs/decisions/015 has the reasons.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from cas_ckpt.errors import InvalidInputError, PermissionDeniedError, shown_value
from cas_ckpt.storage.store import Store

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
        return store.url.startswith("memory:")
    try:
        owners: Collection[int] = {os.stat(root).st_uid, os.stat(root / SETTINGS_KEY, follow_symlinks=False).st_uid}
    except OSError:
        return False
    return owners == {os.geteuid()}
