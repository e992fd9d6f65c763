"""stats --requests: what a month of a run costs in requests and bytes, in a bucket of S3 or Cloud Storage.

    1. `run_facts`   what the repository's own commits say: new bytes as stored, bytes of a state, what is there now
    2. `plan_month`  pure: facts, and how often what is done, give requests and bytes

Requests of one commit, look, restore or collection are constants here, counted on the real code by
tests/ops/history/test_month.py. Classes of requests are those that vendors charge for: writes are PUT, POST and LIST
(class A), reads are GET and HEAD (class B), deletions cost nothing.
Invariant: the plan follows from its arguments alone. Prices are not here: they depend on vendor, region and contract.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import islice

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import Brief, log_rows
from cas_ckpt.core.refs import RefKind
from cas_ckpt.errors import InvalidInputError, NotFoundError, shown_value
from cas_ckpt.index import usage
from cas_ckpt.transfer.sources import IN_FLIGHT_BYTES

DAYS = 30.0
MOST_COMMITS = 100
"""Commits, the youngest of the repository, whose new bytes are averaged."""

PART_BYTES = 8 << 20
"""Of an upload in parts, as s3:// and gs:// send it; shorter values are one request."""

READ_BYTES = IN_FLIGHT_BYTES // 16
"""Of one read of a restore, from a store that has use for 16 requests at once."""

LISTED_KEYS = 1000
"""Keys of one page of a listing."""

COMMIT_READS, COMMIT_WRITES = 4, 2
"""Of a commit, but for its data packs: refs and gc/state are read, the meta pack and the ref are written."""

PACK_WRITES = 2
"""Of a data pack in parts, but for the parts: the upload is begun, and completed."""

LOOK_READS, LOOK_WRITES = 1, 1
"""Of a `log`, `ls` or `show` on a host that has looked before: a listing of refs, and what changed."""

RESTORE_READS, RESTORE_WRITES = 10, 1
"""Of a restore, but for the data: refs, nodes, directories of packs."""

GC_READS, GC_WRITES = 8, 16
"""Of a collection that finds little to do, but for the pages of its four listings of packs beyond the first."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Figures of a run from its repository; bytes are as stored.

    Attributes:
        num_commits: How many of its youngest commits the averages are of.
        new_bytes: That one commit adds. state_bytes: of one whole state.
        stored_bytes, num_packs: That are there now.
        pack_bytes: Length at which a data pack is closed.
    """

    num_commits: int
    new_bytes: float
    state_bytes: float
    stored_bytes: int
    num_packs: int
    pack_bytes: int


@dataclass(frozen=True, slots=True)
class MonthRates:
    """How often what is done.

    Attributes:
        commits_per_day, restores_per_day, looks_per_day, collections_per_day: Numbers from 0 on.
        keep_days: For how long commits keep their data; None: for good.
    """

    commits_per_day: float = 48.0
    restores_per_day: float = 1.0
    looks_per_day: float = 100.0
    collections_per_day: float = 1.0
    keep_days: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not (isinstance(value, (int, float)) and 0 <= value <= 1e9):
                raise InvalidInputError(f"{each.name} is {shown_value(value)}: give a number from 0 on")


@dataclass(frozen=True, slots=True)
class MonthRow:
    """One kind of work in a month: how often it is done, requests by class, bytes in and out."""

    what: str
    times: float
    writes: float
    reads: float
    written_bytes: float = 0.0
    read_bytes: float = 0.0


@dataclass(frozen=True, slots=True, repr=False)
class MonthlyCost(Brief):
    """A month of 30 days.

    Attributes:
        rows: Requests and bytes of commits, restores, looks and collections, and their sums ("all").
        stored_bytes: That are there on average.
        facts, rates: What it was computed from.
    """

    rows: tuple[MonthRow, ...]
    stored_bytes: float
    facts: RunFacts
    rates: MonthRates


def run_facts(handle: RepositoryHandle) -> RunFacts:
    """Figures from the youngest commits and the packs.

    Raises:
        NotFoundError: there is no commit yet.
    """
    handle.sync()
    heads = [ref.target for ref in handle.refs.list(RefKind.BRANCH) if ref.target is not None]
    rows = list(islice(log_rows(handle, heads), MOST_COMMITS + 1)) if heads else []
    if not rows:
        raise NotFoundError(f"{handle.store.url} has no commit yet: nothing says what a commit costs")
    following = [row for row in rows if row.parents][:MOST_COMMITS] or rows
    index = handle.index.read(usage.read_stats)
    plain = sum(int(row.stats.get("new_bytes", 0)) for row in rows)
    stored = sum(int(row.stats.get("stored_bytes", 0)) for row in rows)
    ratio = min(stored / plain, 1.0) if plain else 1.0
    return RunFacts(
        num_commits=len(following),
        new_bytes=sum(int(row.stats.get("stored_bytes", 0)) for row in following) / len(following),
        state_bytes=int(rows[0].stats.get("total_bytes", 0)) * ratio,
        stored_bytes=index.pack_bytes,
        num_packs=index.num_packs,
        pack_bytes=handle.config.pack_bytes,
    )


def plan_month(facts: RunFacts, rates: MonthRates) -> MonthlyCost:
    """Requests and bytes of 30 days; the module says what is counted."""
    commits = rates.commits_per_day * DAYS
    rows = [
        MonthRow(
            "commits", commits, commits * (COMMIT_WRITES + data_writes(facts.new_bytes, facts.pack_bytes)),
            commits * COMMIT_READS, commits * facts.new_bytes,
        ),
        _restores(facts, rates.restores_per_day * DAYS),
        _simple("looks", rates.looks_per_day * DAYS, LOOK_WRITES, LOOK_READS),
    ]  # fmt: skip
    stored, packs = _stored(facts, rates, commits)
    pages = 4 * (packs // LISTED_KEYS)
    rows.append(_simple("collections", rates.collections_per_day * DAYS, GC_WRITES + pages, GC_READS))
    total = MonthRow("all", sum(row.times for row in rows), *(
        sum(getattr(row, name) for row in rows) for name in ("writes", "reads", "written_bytes", "read_bytes")
    ))  # fmt: skip
    return MonthlyCost((*rows, total), stored, facts, rates)


def data_writes(num_bytes: float, pack_bytes: int) -> float:
    """Requests that data packs of so many bytes take."""
    if num_bytes <= 0:
        return 0.0
    whole, rest = divmod(num_bytes, pack_bytes)
    return whole * _pack_writes(pack_bytes) + (_pack_writes(rest) if rest else 0)


def _pack_writes(num_bytes: float) -> float:
    return 1 if num_bytes <= PART_BYTES else PACK_WRITES + -(-num_bytes // PART_BYTES)


def _restores(facts: RunFacts, times: float) -> MonthRow:
    reads = RESTORE_READS + -(-facts.state_bytes // READ_BYTES)
    return replace(_simple("restores", times, RESTORE_WRITES, reads), read_bytes=times * facts.state_bytes)


def _simple(what: str, times: float, writes: float, reads: float) -> MonthRow:
    return MonthRow(what, times, times * writes, times * reads)


def _stored(facts: RunFacts, rates: MonthRates, commits: float) -> tuple[float, float]:
    """Bytes and packs that are there on average: half of the month's is new, or as much as is kept."""
    data_packs = -(-facts.new_bytes // facts.pack_bytes) if facts.new_bytes else 0
    each = 1 + data_packs
    if rates.keep_days is None:
        return facts.stored_bytes + commits * facts.new_bytes / 2, facts.num_packs + commits * each / 2
    kept = rates.commits_per_day * rates.keep_days
    return facts.state_bytes + kept * facts.new_bytes, kept * each
