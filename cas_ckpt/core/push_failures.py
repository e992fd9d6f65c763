"""The commits that tiers lack, and why the last push to one failed: a sealed record under `tiers`, for `status`.

Changed by compare-and-swap; absent until a push fails, and no decision depends on it: what waits is what the refs say.

Invariant: it holds no secret: URLs in what an error said are written down without their passwords, keys and tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cas_ckpt import clock
from cas_ckpt.core.ref_store import read_record, swap_record
from cas_ckpt.core.refs import NONCE_BYTES
from cas_ckpt.core.settings import MAX_REMOTES, check_remote_name
from cas_ckpt.errors import ConflictError, CorruptionError, InvalidInputError
from cas_ckpt.objects.digest import seal
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import without_secrets

if TYPE_CHECKING:
    from cas_ckpt.core.handle import RepositoryHandle

VERSION = 1
TIERS_KEY = "tiers"

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
        return _read(store)[0]
    except CorruptionError:
        return {}


def note_push(store: Store, remote: str, error: Exception | None) -> None:
    """Remember how the push to `remote` ended; None: well, or it is no remote any more.

    Raises:
        ConflictError: others note theirs all the time.
    """
    for _ in range(MAX_ATTEMPTS):
        try:
            held, record = _read(store)
        except CorruptionError:
            held, record = {}, store.get(TIERS_KEY)
        wanted = {name: failure for name, failure in held.items() if name != remote}
        if error is not None:
            wanted[remote] = PushFailure(clock.now_s(), without_secrets(str(error))[:MAX_REASON])
        elif wanted == held:
            return
        try:
            swap_record(store, TIERS_KEY, record, _encode(wanted))
            return
        except ConflictError:
            continue
    raise ConflictError(f"{TIERS_KEY} was changed {MAX_ATTEMPTS} times meanwhile: how the push ended is not noted")


def _read(store: Store) -> tuple[dict[str, PushFailure], bytes | None]:
    return read_record(store, TIERS_KEY, _decode, {}, version=VERSION)


def _encode(failures: Mapping[str, PushFailure]) -> bytes:
    payload = {
        "failures": [[name, int(one.time_s * 1e6), one.reason] for name, one in sorted(failures.items())],
        "nonce": secrets.token_bytes(NONCE_BYTES),
    }
    return seal("tiers", VERSION, payload, key=TIERS_KEY)


def _decode(payload: Mapping[str, Any]) -> dict[str, PushFailure]:
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


def unpushed(handle: RepositoryHandle) -> dict[str, list[str]]:
    """Tier -> the commits of branches that it did not have when it was last asked, by id; tiers that have all, too.

    Of a repository that is not local this is not asked, as every log would take a request more for it: `status` says
    how many there are.
    """
    if not handle.store.abilities.local:
        return {}
    from cas_ckpt.core.live import unpushed_by_tier  # brings SQLAlchemy, which a plain log does without

    return {name: sorted(one.hex() for one in found) for name, found in unpushed_by_tier(handle).items()}


def push_failures(handle: RepositoryHandle) -> dict[str, PushFailure]:
    """Tier that lacks commits -> how the last push of what waits for it failed; without tiers where none did."""
    if not handle.store.abilities.local:
        return {}
    failures = read_push_failures(handle.store)
    waiting = unpushed(handle) if failures else {}
    return {name: failure for name, failure in failures.items() if waiting.get(name)}
