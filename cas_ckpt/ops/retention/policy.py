"""Retention: the rules for which commits are kept, as people write them down, and what they decide.

    1. a policy is made of people's words, every part of it read at once; the repository's is one sealed record
    2. commits are put into the order of the log: a commit before its parents, the youngest first
    3. every branch is a line: all commits that its head leads to; its policy is applied to those
       that are not forgotten yet
    4. a commit that any rule of any line keeps is kept; heads, tags and pins are kept always

Time buckets are those of restic (0.16 and later): the youngest commit of each of the last N
hours, days, ... that have one; while there are fewer of them than N, the oldest commit too.
"Youngest" means by the log's order, which is that of time wherever clocks agree; a clock that
was wrong puts a commit into a wrong bucket, but never before its own descendants.

Invariant: a policy that exists can be applied; rules that this version does not know are refused, never passed over.
The record is under `policy` and changed by compare-and-swap, so that of two people who change it at once neither undoes
the other. Deciding is pure: equal inputs, in whatever order, give equal decisions; applied twice, nothing new is
forgotten.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from heapq import heappop, heappush
from itertools import islice
from typing import Any

from cas_ckpt import clock
from cas_ckpt.arguments import one_text
from cas_ckpt.core.config import POLICY_KEY
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.ref_store import change_record, read_record
from cas_ckpt.core.refs import default_author
from cas_ckpt.core.units import BUCKETS, UNLIMITED, parse_period
from cas_ckpt.errors import CorruptionError, InvalidInputError, NotFoundError, shown_value
from cas_ckpt.objects.digest import Digest, seal
from cas_ckpt.objects.graph import CommitGraph
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
        flags = [  # as the command line takes them
            f"--{name.replace('_', '-').replace('tags', 'tag')} {'unlimited' if one == UNLIMITED else one}"
            for name, value in self.rules().items()
            for one in (value if isinstance(value, list) else [value])
        ]
        return " ".join(flags) or "no rules"


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
    if not one_text("branch", branch) or len(branch) > 200 or not branch.isprintable():
        raise InvalidInputError(f"{branch[:80]!r} is not a pattern of branches: write e.g. 'ft/*'")

    def with_branch(held: Retention) -> Retention:
        if branch in dict(held.branches):
            return replace(held, branches=tuple((p, policy if p == branch else old) for p, old in held.branches))
        if len(held.branches) >= MAX_TEXTS:
            raise InvalidInputError(f"there are {MAX_TEXTS} patterns of branches already: clear some first")
        return replace(held, branches=(*held.branches, (branch, policy)))

    return _change(handle, with_branch)


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


# --- what the rules decide --------------------------------------------------------------------------


SHOWN_LINES = 3
"""A reason names so many branches, then says how many more there are."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A commit as the rules see it.

    Attributes:
        restored: Its place among those that were restored whole, the later the higher; None: not that anybody knew.
        forgotten: It is only here to show how others follow one another.
        heads, tags, pins, remotes: Names of the refs that name it; any of them keeps it.
    """

    id: Digest
    parents: tuple[Digest, ...] = ()
    time_us: int = 0
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    forgotten: bool = False
    heads: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    restored: int | None = None
    remotes: tuple[str, ...] = ()

    @property
    def refs(self) -> tuple[str, ...]:
        """The refs that name it, in words."""
        words = (("head of", self.heads), ("tag", self.tags), ("pin", self.pins), ("remote branch", self.remotes))
        return tuple(f"{word} {name}" for word, names in words for name in sorted(names))


@dataclass(frozen=True, slots=True)
class Line:
    """All commits that `head` leads to, under one policy; with None all of them stay."""

    name: str
    head: Digest
    policy: Policy | None


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether one commit is kept, and why. What is not kept has no reasons."""

    commit: Candidate
    reasons: tuple[str, ...] = ()

    @property
    def keep(self) -> bool:
        """Whether anything keeps it."""
        return bool(self.reasons)


def decide(commits: Iterable[Candidate], lines: Iterable[Line], *, now_us: int) -> list[Decision]:
    """One decision per commit that a line leads to and that is not forgotten, the youngest first.

    Args:
        commits: All commits that the lines lead to, forgotten ones too; others are passed over.
        now_us: A commit that says it was made later says nothing of how old others are.
    """
    known: dict[bytes, Candidate] = {commit.id: commit for commit in commits}
    ordered = [known[digest] for digest in CommitGraph(known).log_order(known)]
    places = {commit.id: place for place, commit in enumerate(ordered)}
    behind = [sorted({places[parent] for parent in commit.parents if parent in places}) for commit in ordered]
    lines = sorted((line for line in lines if line.head in places), key=lambda line: (line.name, line.head))
    kept: dict[Digest, dict[str, list[str]]] = {
        ordered[place].id: {} for place in _walk(behind, {places[line.head] for line in lines})
        if not ordered[place].forgotten
    }  # fmt: skip
    for line in lines:
        members, latest_us = _members(line, ordered, _walk(behind, {places[line.head]}), now_us=now_us)
        for digest, why in _kept_by(line.policy, members, latest_us):
            kept[digest].setdefault(why, []).append(line.name)
    return [Decision(commit, (*commit.refs, *_with_lines(kept[commit.id]))) for commit in ordered if commit.id in kept]


def _walk(behind: Sequence[Sequence[int]], starts: Iterable[int]) -> Iterator[int]:
    """The starts and all that they lead to, each once, in the order of the log: a commit before its parents."""
    todo, last = sorted(starts), -1
    while todo:
        place = heappop(todo)
        while place != last:
            last = place
            yield place
            parents = behind[place]
            if len(parents) == 1 and not todo:  # nothing else waits: the history of a run is mostly one line
                place = parents[0]
                continue
            for parent in parents:
                heappush(todo, parent)


def _members(
    line: Line, ordered: Sequence[Candidate], reached: Iterable[int], *, now_us: int
) -> tuple[list[Candidate], int | None]:
    """The commits of a line that its rules are asked about, and when its last commit was made.

    Where the last commits alone are kept, no more than those are looked at: a thousand branches of one long
    history would else each be the whole of it.
    """
    policy = line.policy
    if policy is not None and policy.keep_last >= 0 and policy.rules().keys() <= {"keep_last"}:
        own = (ordered[place] for place in reached if not ordered[place].forgotten)
        return list(islice(own, policy.keep_last)), None
    commits = [ordered[place] for place in reached]
    latest_us = max((commit.time_us for commit in commits if commit.time_us <= now_us), default=None)
    return [commit for commit in commits if not commit.forgotten], latest_us


def _with_lines(reasons: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Each reason with the lines that it holds for."""
    for why, lines in reasons.items():
        more = f" and {len(lines) - SHOWN_LINES} more" if len(lines) > SHOWN_LINES else ""
        yield f"{why} of {', '.join(lines[:SHOWN_LINES])}{more}"


def _kept_by(
    policy: Policy | None, members: Sequence[Candidate], latest_us: int | None
) -> Iterator[tuple[Digest, str]]:
    """(commit, reason) for each of `members`, the youngest first, that a rule keeps.

    Args:
        latest_us: When the line's last commit was made, forgotten or not: durations reach back from there.
    """
    if policy is None:
        yield from ((commit.id, "all") for commit in members)
        return
    for commit in members if policy.keep_tags else ():
        for pattern in policy.keep_tags:
            if any(fnmatchcase(tag, pattern) for tag in commit.tags):
                yield commit.id, f"keep-tag {pattern}"
    last = members if policy.keep_last == UNLIMITED else members[: policy.keep_last]
    yield from ((commit.id, "last") for commit in last)
    for name in BUCKETS:
        yield from _buckets(members, name, getattr(policy, f"keep_{name}"))
    for commit in _within(members, policy.keep_within, latest_us) if policy.keep_within else ():
        yield commit.id, f"within {policy.keep_within}"
    for name in BUCKETS:
        yield from _buckets_within(members, name, getattr(policy, f"keep_within_{name}"), latest_us)
    yield from _every_steps(members, policy.keep_every_steps)
    for text in policy.keep_best:
        best = parse_best(text)  # among equals the older, so that a tie does not push out what was kept before
        ranked = [(rank, commit) for commit in reversed(members) if (rank := best.rank(commit.metrics)) is not None]
        ranked.sort(key=lambda pair: pair[0])
        for number, (_, commit) in enumerate(ranked[: best.count], start=1):
            yield commit.id, f"best {best.metric} ({number} of {best.count})"
    count = policy.keep_last_restored
    restored = sorted((-one.restored, place) for place, one in enumerate(members) if count and one.restored is not None)
    for _, place in restored if count == UNLIMITED else restored[:count]:  # of several at one place the younger
        yield members[place].id, "last restored"


def _youngest(members: Sequence[Candidate], name: str) -> dict[int, Candidate]:
    """Bucket -> the youngest commit in it, the latest bucket first."""
    found: dict[int, Candidate] = {}
    for commit in members:
        found.setdefault(BUCKETS[name](commit.time_us), commit)
    return dict(sorted(found.items(), reverse=True))


def _buckets(members: Sequence[Candidate], name: str, count: int) -> Iterator[tuple[Digest, str]]:
    if not count or not members:
        return
    chosen = list(_youngest(members, name).values())
    if count == UNLIMITED or len(chosen) < count:
        yield from _oldest(members, chosen, name)
    yield from ((commit.id, name) for commit in (chosen if count == UNLIMITED else chosen[:count]))


def _oldest(members: Sequence[Candidate], chosen: Sequence[Candidate], name: str) -> Iterator[tuple[Digest, str]]:
    """While buckets are missing, history is to reach back as far as it does."""
    if members[-1].id not in {commit.id for commit in chosen}:
        yield members[-1].id, f"oldest {name}"


def _within(members: Sequence[Candidate], duration: str, latest_us: int | None) -> list[Candidate]:
    if latest_us is None:  # all of them say that they are of the future: their age is not known
        return list(members)
    since_us = parse_period(duration).before_us(latest_us)
    return [commit for commit in members if commit.time_us > since_us]


def _buckets_within(
    members: Sequence[Candidate], name: str, duration: str, latest_us: int | None
) -> Iterator[tuple[Digest, str]]:
    recent = _within(members, duration, latest_us) if duration else []
    if not recent:
        return
    chosen = list(_youngest(recent, name).values())
    why = f"{name} within {duration}"
    if recent[-1] is members[-1]:
        yield from _oldest(recent, chosen, why)
    yield from ((commit.id, why) for commit in chosen)


def _every_steps(members: Sequence[Candidate], every: int) -> Iterator[tuple[Digest, str]]:
    """The first commit at or after each multiple; of several with that step, the youngest (it was done again).

    Before the first multiple above 0 only step 0 itself counts: a run that commits every 100
    steps is not to keep step 100 for "every 1000".
    """
    first: dict[int, Candidate] = {}
    for commit in members if every else ():
        step = commit.step
        if step is None or step < 0 or 0 < step < every:
            continue
        known = first.get(step // every)
        if known is None or known.step is None or step < known.step:
            first[step // every] = commit
    for multiple, commit in first.items():
        exact = commit.step == multiple * every
        yield commit.id, f"step {multiple * every}" if exact else f"first after step {multiple * every}"
