"""policy: the retention rules that a repository carries, in one sealed record under `policy`.

Invariant: the record is changed by compare-and-swap, so that of two people who change it at
once neither undoes the other; rules that this version does not know are refused, never passed over.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cas_ckpt import clock
from cas_ckpt.config import POLICY_KEY
from cas_ckpt.errors import ConflictError, CorruptionError, InvalidInputError, NotFoundError, StorageError, shown_value
from cas_ckpt.objects.record import seal, unseal
from cas_ckpt.ops.retention_policy import MAX_TEXTS, Policy, Retention, policy_from
from cas_ckpt.refs import default_author
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.storage.store import Store

VERSION = 1

MAX_ATTEMPTS = 100


def read_policy(store: Store) -> Retention:
    """The rules of the repository; empty ones if it has none.

    Raises:
        CorruptionError: the record is damaged, or has rules that nobody here knows.
        UnsupportedVersionError: written by a newer version.
    """
    return _read(store)[0]


def set_policy(handle: RepositoryHandle, policy: Policy, *, branch: str | None = None) -> Retention:
    """Let `policy` be the rules of all branches, or of those that match the pattern `branch`.

    Returns all rules as they are then. Of several patterns the one that was set first is tried first.

    Raises:
        InvalidInputError: a policy without rules.
    """
    if not isinstance(policy, Policy):
        raise InvalidInputError(f"policy is {shown_value(policy)}: give rules such as Policy(keep_last=3)")
    if policy.is_empty:
        raise InvalidInputError("a policy without rules would keep the heads alone: give at least one rule")
    if branch is None:
        return _change(handle, lambda held: replace(held, default=policy))
    _check_pattern(branch)
    return _change(handle, lambda held: _with_branch(held, branch, policy))


def clear_policy(handle: RepositoryHandle, *, branch: str | None = None) -> Retention:
    """Take the rules away, all of them or those for the pattern `branch`; what is left.

    Raises:
        NotFoundError: there are none to take away.
    """

    def without(held: Retention) -> Retention:
        left = tuple((pattern, policy) for pattern, policy in held.branches if branch not in (None, pattern))
        if held.is_empty or (branch is not None and left == held.branches):
            what = "has no policy" if branch is None else f"has no policy for the pattern {branch!r}"
            raise NotFoundError(f"{handle.store.url} {what}: repo.policy() tells what it has")
        return replace(held, default=held.default if branch is not None else Policy(), branches=left)

    return _change(handle, without)


def _check_pattern(pattern: str) -> None:
    if not pattern or len(pattern) > 200 or not pattern.isprintable():
        raise InvalidInputError(f"{pattern[:80]!r} is no pattern of branches: write e.g. 'ft/*'")


def _with_branch(held: Retention, pattern: str, policy: Policy) -> Retention:
    """In the place of the rules that the pattern has, or behind all others."""
    if pattern in dict(held.branches):
        return replace(held, branches=tuple((p, policy if p == pattern else old) for p, old in held.branches))
    if len(held.branches) >= MAX_TEXTS:
        raise InvalidInputError(f"there are {MAX_TEXTS} patterns of branches already: clear some first")
    return replace(held, branches=(*held.branches, (pattern, policy)))


def _change(handle: RepositoryHandle, change: Callable[[Retention], Retention]) -> Retention:
    handle.require_writable()
    for _ in range(MAX_ATTEMPTS):
        held, record = _read(handle.store)
        wanted = change(held)
        if _swapped(handle.store, record, _encode(wanted)):
            return wanted
    raise ConflictError(f"{POLICY_KEY} was changed {MAX_ATTEMPTS} times meanwhile: look at it, then try again")


def _swapped(store: Store, expected: bytes | None, record: bytes) -> bool:
    """Whether `record` took the place of what was read; a lost reply is asked again, the nonce tells."""
    try:
        if expected is None:
            store.put_if_absent(POLICY_KEY, record)
        else:
            store.compare_and_swap(POLICY_KEY, expected, record)
    except (ConflictError, StorageError) as error:
        if _read(store)[1] == record:
            return True
        if isinstance(error, StorageError):
            raise
        return False
    return True


def _read(store: Store) -> tuple[Retention, bytes | None]:
    try:
        record = store.get(POLICY_KEY)
    except NotFoundError:
        return Retention(), None
    return _decode(unseal("policy", record, version=VERSION, key=POLICY_KEY)), record


def _encode(retention: Retention) -> bytes:
    payload = {
        "default": retention.default.rules(),
        "branches": [[pattern, policy.rules()] for pattern, policy in retention.branches],
        "time_us": int(clock.now_s() * 1e6),
        "author": default_author(),
        "nonce": secrets.token_bytes(16),
    }
    return seal("policy", VERSION, payload, key=POLICY_KEY)


def _decode(payload: Mapping[str, Any]) -> Retention:
    try:
        branches = tuple((str(pattern), policy_from(rules)) for pattern, rules in payload["branches"])
        return Retention(policy_from(payload["default"]), branches)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(
            f"{POLICY_KEY}: no policy that this version can apply: {error}; upgrade, or set the policy anew after "
            "deleting this record"
        ) from error
