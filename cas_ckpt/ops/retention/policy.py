"""Retention policies: which commits are to be kept, as people write it down, and the record that carries them.

Invariant: a policy that exists can be applied; all its parts were read when it was made. The repository's rules are one
sealed record under `policy`, changed by compare-and-swap, so that of two people who change it at once neither undoes
the other; rules that this version does not know are refused, never passed over.
Must not know: commits.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from cas_ckpt import clock
from cas_ckpt.arguments import one_text
from cas_ckpt.core.config import POLICY_KEY
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.ref_store import change_record, read_record
from cas_ckpt.core.refs import default_author
from cas_ckpt.core.units import BUCKETS, UNLIMITED, parse_period
from cas_ckpt.errors import CorruptionError, InvalidInputError, NotFoundError, shown_value
from cas_ckpt.objects.digest import seal
from cas_ckpt.storage.store import Store

MAX_COUNT = 2**31 - 1
MAX_TEXTS = 1000

_BEST = re.compile(r"(?P<metric>.+):(?P<count>[0-9]{1,10})(?::(?P<way>min|max))?\Z")

COUNTS = ("keep_last", *(f"keep_{name}" for name in BUCKETS), "keep_last_restored")
DURATIONS = ("keep_within", *(f"keep_within_{name}" for name in BUCKETS))


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the `count` commits whose `metric` is smallest, or largest."""

    metric: str
    count: int
    largest: bool = False

    def rank(self, metrics: Mapping[str, float]) -> float | None:
        """The better, the smaller; None without the metric, or if it is not finite."""
        value = metrics.get(self.metric)
        if value is None or not math.isfinite(value):
            return None
        return -value if self.largest else value


def parse_best(text: str) -> Best:
    """The rule that METRIC:N, METRIC:N:min or METRIC:N:max means; smallest is best if it does not say.

    Raises:
        InvalidInputError: another form.
    """
    match = _BEST.match(text)
    if match is None or not 0 < int(match["count"]) <= MAX_COUNT:
        raise InvalidInputError(
            f"{text[:80]!r}: wanted METRIC:N, METRIC:N:min or METRIC:N:max with N from 1 on, e.g. loss:3 or acc:1:max"
        )
    return Best(match["metric"], int(match["count"]), match["way"] == "max")


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules; a commit that any of them keeps is kept. Heads of branches, tags and pins are kept always.

    Counts are numbers from 0 (the rule is off), or -1 for all. Durations are text such as
    "2y5mo7d3h", reckoned back from the youngest commit of the branch. Days begin at 00:00 UTC,
    weeks on Mondays. Buckets without a commit do not count; while there are fewer buckets than
    asked for, the oldest commit is kept as well.

    Attributes:
        keep_last: The N youngest commits.
        keep_hourly, keep_daily, keep_weekly, keep_monthly, keep_yearly: The youngest commit of each of
            the last N hours, days, ... that have one.
        keep_within: All commits of this time.
        keep_within_hourly, ...: The youngest of each hour, ... of this time.
        keep_tags: Patterns of tags ("v*"); tagged commits are kept anyway, so this alone forgets all others.
        keep_every_steps: The first commit at or after each multiple of so many steps.
        keep_best: METRIC:N[:min|max], e.g. "loss:3": the N commits with the best metric.
        keep_last_restored: The N commits that were last restored whole and intact, as the log of restores has it.
    """

    keep_last: int = 0
    keep_hourly: int = 0
    keep_daily: int = 0
    keep_weekly: int = 0
    keep_monthly: int = 0
    keep_yearly: int = 0
    keep_within: str = ""
    keep_within_hourly: str = ""
    keep_within_daily: str = ""
    keep_within_weekly: str = ""
    keep_within_monthly: str = ""
    keep_within_yearly: str = ""
    keep_every_steps: int = 0
    keep_tags: Sequence[str] = ()
    keep_best: Sequence[str] = ()
    keep_last_restored: int = 0

    def __post_init__(self) -> None:
        for name in COUNTS:
            _check_count(name, getattr(self, name), least=UNLIMITED)
        _check_count("keep_every_steps", self.keep_every_steps, least=0)
        for name in DURATIONS:
            if (text := _checked_text(name, getattr(self, name))) != "":
                parse_period(text)
        for name in ("keep_tags", "keep_best"):
            given = getattr(self, name)
            object.__setattr__(self, name, _checked_texts(name, (given,) if isinstance(given, str) else given))
        for text in self.keep_best:
            parse_best(text)

    @property
    def is_empty(self) -> bool:
        """Whether no rule keeps anything."""
        return not self.rules()

    def rules(self) -> dict[str, Any]:
        """The rules that are on: name -> number, text or list of texts."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items() if value}

    def __str__(self) -> str:
        return " ".join(_flags(self.rules())) or "no rules"


def policy_from(rules: Mapping[str, Any]) -> Policy:
    """The policy of these rules, as `Policy.rules` gives them.

    Raises:
        InvalidInputError: an unknown rule (to pass over it could forget what it keeps), or a wrong value.
    """
    unknown = [str(name) for name in rules if name not in {one.name for one in fields(Policy)}]
    if unknown:
        raise InvalidInputError(f"unknown retention rules {', '.join(unknown)}: a newer cas_ckpt may know them")
    return Policy(**rules)


@dataclass(frozen=True, slots=True)
class Retention:
    """A policy for all branches, and others for those that match a pattern.

    Attributes:
        default: For branches that match no pattern; if it is empty, all of their commits stay.
        branches: (pattern, policy): the first that matches a branch is its policy. `*` matches "/" too.
    """

    default: Policy = field(default_factory=Policy)
    branches: tuple[tuple[str, Policy], ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is no rule for any branch."""
        return self.default.is_empty and not self.branches

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that rules name, each once."""
        policies = [self.default, *(policy for _, policy in self.branches)]
        return tuple(dict.fromkeys(parse_best(text).metric for policy in policies for text in policy.keep_best))

    @property
    def asks_for_restores(self) -> bool:
        """Whether a rule names commits that were restored."""
        return any(policy.keep_last_restored for policy in (self.default, *(policy for _, policy in self.branches)))

    def policy_for(self, branch: str) -> Policy | None:
        """The rules for `branch`; None: all of its commits stay."""
        own = next((policy for pattern, policy in self.branches if fnmatchcase(branch, pattern)), self.default)
        return None if own.is_empty else own


def _flags(rules: Mapping[str, Any]) -> Iterator[str]:
    """The rules as the command line takes them."""
    for name, value in rules.items():
        flag = "--" + {"keep_tags": "keep-tag"}.get(name, name).replace("_", "-")
        for one in value if isinstance(value, list) else [value]:
            yield f"{flag} {'unlimited' if one == UNLIMITED else one}"


def _check_count(name: str, value: object, *, least: int) -> None:
    if type(value) is not int or not least <= value <= MAX_COUNT:
        also = ", or -1 for all" if least < 0 else ""
        raise InvalidInputError(f"{name} is {value!r}: wanted a whole number from 0 to {MAX_COUNT}{also}")


def _checked_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise InvalidInputError(f"{name} is {shown_value(value)}: wanted printable text")
    return value


def _checked_texts(name: str, values: object) -> tuple[str, ...]:
    if not isinstance(values, (list, tuple)) or len(values) > MAX_TEXTS:
        raise InvalidInputError(f"{name} is {shown_value(values)}: wanted a list of up to {MAX_TEXTS} texts")
    if "" in values:
        raise InvalidInputError(f"{name} has an empty text: leave it out")
    return tuple(_checked_text(name, value) for value in values)


# --- the record of the repository -----------------------------------------------------------------

VERSION = 1


def read_policy(store: Store) -> Retention:
    """The rules of the repository; empty ones if it has none.

    Raises:
        CorruptionError: the record is damaged, or has unknown rules.
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
            what = "has no policy" if branch is None else f"has no policy for the pattern {shown_value(branch)}"
            raise NotFoundError(f"{handle.store.url} {what}: see repo.policy()")
        return replace(held, default=held.default if branch is not None else Policy(), branches=left)

    return _change(handle, without)


def _check_pattern(pattern: str) -> None:
    if not one_text("branch", pattern) or len(pattern) > 200 or not pattern.isprintable():
        raise InvalidInputError(f"{pattern[:80]!r} is not a pattern of branches: write e.g. 'ft/*'")


def _with_branch(held: Retention, pattern: str, policy: Policy) -> Retention:
    """In the place of the rules that the pattern has, or behind all others."""
    if pattern in dict(held.branches):
        return replace(held, branches=tuple((p, policy if p == pattern else old) for p, old in held.branches))
    if len(held.branches) >= MAX_TEXTS:
        raise InvalidInputError(f"there are {MAX_TEXTS} patterns of branches already: clear some first")
    return replace(held, branches=(*held.branches, (pattern, policy)))


def _change(handle: RepositoryHandle, change: Callable[[Retention], Retention]) -> Retention:
    handle.require_writable()
    return change_record(handle.store, POLICY_KEY, _read, _encode, change)


def _read(store: Store) -> tuple[Retention, bytes | None]:
    return read_record(store, POLICY_KEY, _decode, Retention(), version=VERSION)


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
