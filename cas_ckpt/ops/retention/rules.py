"""Retention: which commits are kept, and why. Pure: commits and rules in, decisions out.

    1. commits are put into the order of the log: a commit before its parents, the youngest first
    2. every branch is a line: all commits that its head leads to; its policy is applied to those
       that are not forgotten yet
    3. a commit that any rule of any line keeps is kept; heads, tags and pins are kept always
Time buckets are those of restic (0.16 and later): the youngest commit of each of the last N
hours, days, ... that have one; while there are fewer of them than N, the oldest commit too.
"Youngest" means by the log's order, which is that of time wherever clocks agree; a clock that
was wrong puts a commit into a wrong bucket, but never before its own descendants.

Invariant: equal inputs, in whatever order, give equal decisions; applied twice, nothing new is
forgotten. Must not know: the store, the index, the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from heapq import heappop, heappush
from itertools import islice

from cas_ckpt.core.units import BUCKETS, UNLIMITED, parse_period
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.graph import CommitGraph
from cas_ckpt.ops.retention.policy import Best, Policy, parse_best

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
        yield from _best(members, parse_best(text))
    yield from _last_restored(members, policy.keep_last_restored)


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


def _best(members: Sequence[Candidate], best: Best) -> Iterator[tuple[Digest, str]]:
    """The best ones; among equals the older, so that a tie does not push out what was kept before."""
    ranked = [(rank, commit) for commit in reversed(members) if (rank := best.rank(commit.metrics)) is not None]
    ranked.sort(key=lambda pair: pair[0])
    for number, (_, commit) in enumerate(ranked[: best.count], start=1):
        yield commit.id, f"best {best.metric} ({number} of {best.count})"


def _last_restored(members: Sequence[Candidate], count: int) -> Iterator[tuple[Digest, str]]:
    """Those that were restored last; of several at one place the younger commit."""
    if not count:
        return
    ranked = sorted(((-commit.restored, place) for place, commit in enumerate(members) if commit.restored is not None))
    for _, place in ranked if count == UNLIMITED else ranked[:count]:
        yield members[place].id, "last restored"
