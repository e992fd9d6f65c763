"""stats, du and status: how many bytes there are, what they are there for, what a month costs, and the state of all.

    total    what a state holds, as its user sees it
    new      what the commit added when it was made
    unique   what is there for it alone: so much less would be needed without it
    shared   the rest: something else needs it as well

Invariant: every object counts once within a row, however many ways lead to it; an object is unique to one row at
most. All sums are made by SQL over the index. `unique` and `shared` are plain bytes of chunks and nodes; values and
tensors up to 1 KiB are stored in nodes and count there. `status` reads refs, records and one commit: no history is
followed, and the index is asked for the place of that one commit alone.

`stats --requests` is what a month of a run costs in requests and bytes, in a bucket of S3 or Cloud Storage:
    1. `run_facts`   what the repository's own commits say: new bytes as stored, bytes of a state, what is there now
    2. `plan_month`  pure: facts, and how often what is done, give requests and bytes
Requests of one commit, look, restore or collection are constants here, counted on the real code by
tests/ops/history/test_month.py. Classes of requests are those that vendors charge for: writes are PUT, POST and LIST
(class A), reads are GET and HEAD (class B), deletions cost nothing. Prices are not here: they depend on vendor, region
and contract.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice

from cas_ckpt import clock
from cas_ckpt.arguments import UsageBy, check_choice
from cas_ckpt.core.config import require_there
from cas_ckpt.core.forgotten import forgotten_view, read_forgotten_leniently
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import unpushed_by_tier
from cas_ckpt.core.protocol import live_sessions, read_gc_state
from cas_ckpt.core.records import Brief, CommitInfo, commit_of, info_from_row, log_rows
from cas_ckpt.core.refs import Head, RefKind
from cas_ckpt.core.revisions import Revision, resolve
from cas_ckpt.core.settings import PushFailure, read_push_failures
from cas_ckpt.core.tree import ask, known_commit
from cas_ckpt.errors import InvalidInputError, NotFoundError, shown_value
from cas_ckpt.index import entries, history, usage
from cas_ckpt.index.history import CommitSize
from cas_ckpt.index.rows import CommitRow, Usage
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.state import Flavor
from cas_ckpt.storage.store import sweep_temporaries

_REST = "\0rest"
"""Name of the group of everything else; no key, id or branch is called so."""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Bytes of one commit, branch, tensor or dtype; see the module for what the columns mean.

    Attributes:
        name: Hexadecimal id of the commit, name of the branch, key of the tensor, or the dtype.
        stored_bytes: Bytes in packs that are there for it alone (for tensors: of their chunks).
    """

    name: str
    total_bytes: int
    new_bytes: int
    unique_bytes: int
    shared_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class RepositoryStats:
    """A repository in numbers.

    Attributes:
        num_commits: Commits that a branch, tag or pin leads to.
        total_bytes: Sum of what their states hold: what storing each whole would take.
        unique_bytes: Plain bytes of everything that they lead to, each object once.
        pack_bytes: Bytes of all packs in the store, what nothing leads to included.
        num_chunks, num_nodes: What `unique_bytes` consists of.
        num_temporaries, temporary_bytes: Unfinished files that writers left when they died; `gc` removes them.
    """

    num_commits: int
    num_branches: int
    num_tags: int
    num_packs: int
    total_bytes: int
    unique_bytes: int
    pack_bytes: int
    num_chunks: int
    num_nodes: int
    num_temporaries: int = 0
    temporary_bytes: int = 0

    @property
    def ratio(self) -> float:
        """How many times larger the states are than what is stored for them."""
        return self.total_bytes / self.pack_bytes if self.pack_bytes else 1.0


@dataclass(frozen=True, slots=True)
class CommitUsage:
    """One commit and its row of `du`."""

    commit: CommitInfo
    usage: UsageRow


def repository_stats(handle: RepositoryHandle) -> RepositoryStats:
    """The repository in numbers.

    Raises:
        CorruptionError: a ref or the index is damaged.
    """
    handle.sync()
    refs = list(handle.refs.list())
    heads = [ref.target for ref in refs if ref.target is not None]
    forgotten = forgotten_view(handle, refs)
    rows = [row for row in _history_sizes(handle, heads) if row.digest not in forgotten]
    reached = handle.index.read(usage.reachable, [row.root for row in rows])
    index = handle.index.read(usage.read_stats)
    left = sweep_temporaries(handle.store, clock.now_s(), dry_run=True)
    return RepositoryStats(
        num_commits=len(rows),
        num_branches=sum(ref.kind is RefKind.BRANCH for ref in refs),
        num_tags=sum(ref.kind is RefKind.TAG for ref in refs),
        num_packs=index.num_packs,
        total_bytes=sum(row.total_bytes for row in rows),
        unique_bytes=_plain(reached),
        pack_bytes=index.pack_bytes,
        num_chunks=reached.num_chunks,
        num_nodes=reached.num_nodes,
        num_temporaries=left.num_files,
        temporary_bytes=left.num_bytes,
    )


def commit_stats(handle: RepositoryHandle, revision: Revision) -> CommitUsage:
    """Bytes that the commit `revision` holds, added, and has for itself.

    Raises:
        NotFoundError: no such commit.
    """
    handle.sync()
    digest = resolve(handle, revision)
    row = known_commit(handle, digest)
    return CommitUsage(info_from_row(row), _by_commit(handle, [row], list(_commits(handle)))[0])


def usage_rows(
    handle: RepositoryHandle,
    by: UsageBy = "commit",
    *,
    revision: Revision | None = None,
    keys: str | Sequence[str] | None = None,
    limit: int | None = None,
    with_remotes: bool = False,
) -> list[UsageRow]:
    """The rows of `du`.

    Args:
        by: "commit" (youngest first), "branch" (by name), "tensor" (in the order of the tree) or "dtype" (of
            tensors, the largest first).
        revision: For commits: those it leads to (default: all). For tensors and dtypes: the commit they
            are of (default: the default branch).
        keys: Patterns of the tensors wanted.
        limit: At most so many rows (of commits).
        with_remotes: Of branches: what a remote-tracking branch leads to is shared with it. Else these hold nothing,
            or a branch that was pushed would have nothing for itself.
    Raises:
        NotFoundError: no such commit or key. InvalidInputError: arguments that do not go together.
    """
    check_choice("by", by, UsageBy)
    of_content = by in ("tensor", "dtype")
    if (keys is not None and not of_content) or (revision is not None and by == "branch"):
        raise InvalidInputError(f"du by {by} takes no {'keys' if keys is not None else 'revision'}")
    if with_remotes and by != "branch":
        raise InvalidInputError(f"du by {by} takes no with_remotes: it is for branches")
    handle.sync()
    if of_content:
        return _by_content(handle, resolve(handle, revision or "HEAD"), by, keys)
    if by == "branch":
        return _by_branch(handle, with_remotes=with_remotes)
    every = list(_commits(handle))
    rows = every if revision is None else _commits(handle, revision)
    return _by_commit(handle, list(islice(rows, limit)), every)


def _commits(handle: RepositoryHandle, revision: Revision | None = None) -> Iterator[CommitRow]:
    """Commits that keep their data and that `revision` leads to; None: that any ref leads to."""
    refs = list(handle.refs.list())
    heads = [ref.target for ref in refs if ref.target is not None] if revision is None else [resolve(handle, revision)]
    forgotten = forgotten_view(handle, refs)
    return (row for row in log_rows(handle, heads) if row.digest not in forgotten)


def _history_sizes(handle: RepositoryHandle, heads: Collection[bytes]) -> list[CommitSize]:
    """All commits that `heads` lead to, a commit before its parents."""
    try:
        return handle.index.read(history.read_sizes, heads, whole=True)
    except NotFoundError:
        handle.sync()  # commits that another process made since
    handle.locate(list(map(Digest, heads)), here=True)  # says what is in no pack, or in none that is intact
    return handle.index.read(history.read_sizes, heads)


def _plain(held: Usage) -> int:
    return held.num_bytes + held.node_bytes


def _by_commit(handle: RepositoryHandle, rows: Sequence[CommitRow], every: Sequence[CommitRow]) -> list[UsageRow]:
    """The rows of some commits; `every` are those that count as other commits."""
    # Two commits of one state share all of it: each is there for itself only in its commit object.
    unique = handle.index.read(usage.exclusive, {row.digest.hex(): [row.root] for row in [*every, *rows]})
    under = handle.index.read(usage.under, [row.root for row in rows])
    found = []
    for row in rows:
        name, total, new = row.digest.hex(), row.stats.get("total_bytes", 0), row.stats.get("new_bytes", 0)
        own = _plain(unique[name])
        found.append(UsageRow(name, total, new, own, _plain(under[row.root]) - own, unique[name].stored_bytes))
    return found


def _by_branch(handle: RepositoryHandle, *, with_remotes: bool) -> list[UsageRow]:
    kept, names = _kept_by_branches(handle, with_remotes=with_remotes)
    holders: dict[bytes, int] = {}
    for row, held in kept:
        holders[row.root] = holders.get(row.root, 0) | held
    usages = handle.index.read(usage.by_holders, holders)
    sums: dict[int, tuple[int, int, int]] = {held: (0, 0, _plain(kept)) for held, kept in usages.items()}
    for row, held in kept:
        total, new, plain = sums.get(held, (0, 0, 0))
        sums[held] = (total + row.total_bytes, new + row.new_bytes, plain)
    found = []
    for number, name in enumerate(names):
        bit = 1 << number
        total, new, plain = map(sum, zip((0, 0, 0), *(each for held, each in sums.items() if held & bit), strict=True))
        alone = usages.get(bit, Usage())
        found.append(UsageRow(name, total, new, _plain(alone), plain - _plain(alone), alone.stored_bytes))
    return found


def _kept_by_branches(
    handle: RepositoryHandle, *, with_remotes: bool
) -> tuple[list[tuple[CommitSize, int]], list[str]]:
    """Commits that keep their data, each with the branches that keep it, as bits; and the names of the branches.

    The bit after those of the branches means all other refs. A commit that was forgotten is kept by what names it, and
    not by what leads to it.
    """
    refs = [ref for ref in handle.refs.list() if with_remotes or ref.kind is not RefKind.REMOTE]
    names = sorted(ref.name for ref in refs if ref.kind is RefKind.BRANCH)
    bits = {name: 1 << bit for bit, name in enumerate(names)}
    naming: dict[bytes, int] = {}
    for ref in refs:
        if ref.target is not None:
            bit = bits[ref.name] if ref.kind is RefKind.BRANCH else 1 << len(names)
            naming[ref.target] = naming.get(ref.target, 0) | bit
    forgotten = read_forgotten_leniently(handle.store)
    reaching = dict(naming)
    kept = []
    for row in _history_sizes(handle, naming):  # children come before their parents
        held = naming.get(row.digest, 0) if row.digest in forgotten else reaching[row.digest]
        if held:
            kept.append((row, held))
        for parent in row.parents:
            reaching[parent] = reaching.get(parent, 0) | reaching[row.digest]
    return kept, names


def _by_content(
    handle: RepositoryHandle, digest: Digest, by: UsageBy, keys: str | Sequence[str] | None
) -> list[UsageRow]:
    """The rows of a commit's tensors, in the order of the tree, or of their dtypes, the largest first."""
    commit = known_commit(handle, digest)
    patterns = KeyPatterns(keys)
    parts = ask(handle, entries.stored_parts, Digest(commit.root), keys=patterns)
    patterns.require_used()
    totals: dict[str, int] = {}
    first: dict[Digest, str] = {}
    for part in parts:
        if part.flavor != Flavor.VALUE:
            name = part.key if by == "tensor" else part.spec.dtype
            totals[name] = totals.get(name, 0) + part.spec.shown_bytes
            if part.node is not None:
                first.setdefault(part.node, name)
    # Each node goes to the first name that has it: what equal tensors hold is counted there alone.
    groups: dict[str, list[bytes]] = {}
    for node, name in first.items():
        groups.setdefault(name, []).append(node)
    others = [row.root for row in _commits(handle) if row.root != commit.root]
    parents = [known_commit(handle, Digest(parent)).root for parent in commit.parents]
    # What a name leads to, and neither other commits (or the parents) nor another name does.
    unique = handle.index.read(usage.exclusive, groups | {_REST: others})
    new = handle.index.read(usage.exclusive, groups | {_REST: parents})
    found = []
    for name, total in totals.items():
        own, added = unique.get(name, Usage()), new.get(name, Usage())
        found.append(UsageRow(name, total, added.num_bytes, own.num_bytes, total - own.num_bytes, own.stored_bytes))
    return found if by == "tensor" else sorted(found, key=lambda row: (-row.total_bytes, row.name))


# --- status -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LiveSession:
    """A commit that is being written somewhere.

    Attributes:
        host, process: Where it runs; "" and 0 if a later version of cas_ckpt wrote the record.
        started_s, heard_s: When it began, and when it was last heard of, in seconds since 1970.
    """

    host: str
    process: int
    started_s: float
    heard_s: float


@dataclass(frozen=True, slots=True, repr=False)
class RepositoryStatus(Brief):
    """The state of a repository.

    Attributes:
        head: Where the live state of this object came from; it belongs to one process and is stored nowhere.
        commit: The head commit of the default branch; None: it has none yet.
        branches, tags, pins: Name -> id of the commit, by name.
        num_unpushed: Tier -> how many commits of branches it did not have when it was last asked.
        push_failures: Tier that lacks commits -> when and why the last push of these failed, if it did.
        sessions: Commits under way, the oldest first. One is announced after half a minute; shorter ones are not.
        gc_phase: "idle"; or "condemned" or "deleting": a collection is at work, or was broken off, and the
            next one goes on with it.
        gc_generation: Number of the collection that began last.
        num_condemned: Packs that this collection may delete.
        num_forgotten: Commits that were forgotten and that no branch, tag or pin names.
        num_temporaries, temporary_bytes: Unfinished files that writers left when they died; `gc` removes them.
        conditional_writes: "honoured"; or "emulated": one process at a time may write, see `init(single_writer=True)`.
    """

    url: str
    default_branch: str
    head: Head
    commit: CommitInfo | None
    branches: Mapping[str, str]
    tags: Mapping[str, str]
    pins: Mapping[str, str]
    remote_branches: Mapping[str, str]
    num_unpushed: Mapping[str, int]
    push_failures: Mapping[str, PushFailure]
    sessions: tuple[LiveSession, ...]
    gc_phase: str
    gc_generation: int
    num_condemned: int
    num_forgotten: int
    num_temporaries: int
    temporary_bytes: int
    conditional_writes: str


def repository_status(handle: RepositoryHandle) -> RepositoryStatus:
    """The state of the repository now.

    Raises:
        CorruptionError: a ref, a record or the head commit of the default branch is damaged.
        NotFoundError: that commit is in no pack.
    """
    refs = list(handle.refs.list())
    if not refs:
        require_there(handle.store)
    named = {
        kind: {ref.name: ref.target for ref in refs if ref.kind is kind and ref.target is not None} for kind in RefKind
    }
    default = handle.default_branch
    target = named[RefKind.BRANCH].get(default)
    state = read_gc_state(handle.store)
    left = sweep_temporaries(handle.store, clock.now_s(), dry_run=True)
    live = sorted(live_sessions(handle.store), key=lambda one: (one.started_us, one.key))
    shown = {kind: {name: one.hex() for name, one in named[kind].items()} for kind in RefKind}
    waiting = {name: len(found) for name, found in unpushed_by_tier(handle, refs).items()}
    failures = read_push_failures(handle.store) if any(waiting.values()) else {}
    return RepositoryStatus(
        url=handle.store.url,
        default_branch=default,
        head=handle.head,
        commit=None if target is None else info_from_row(commit_of(handle, target)),
        branches=shown[RefKind.BRANCH],
        tags=shown[RefKind.TAG],
        pins=shown[RefKind.PIN],
        remote_branches=shown[RefKind.REMOTE],
        num_unpushed=waiting,
        push_failures={name: one for name, one in failures.items() if waiting.get(name)},
        sessions=tuple(LiveSession(one.host, one.process, one.started_us / 1e6, one.heard_us / 1e6) for one in live),
        gc_phase=state.phase.value,
        gc_generation=state.generation.number,
        num_condemned=len(state.condemned),
        num_forgotten=len(forgotten_view(handle, refs)),
        num_temporaries=left.num_files,
        temporary_bytes=left.num_bytes,
        conditional_writes=handle.config.conditional_writes,
    )


# --- what a month costs --------------------------------------------------------------------------

DAYS = 30.0
MOST_COMMITS = 100
"""Commits, the youngest of the repository, whose new bytes are averaged."""

PART_BYTES = 8 << 20
"""Of an upload in parts, as s3:// and gs:// send it; shorter values are one request."""

READ_BYTES = (72 << 20) // 16
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
            if value is None and each.name == "keep_days":
                continue
            if not (isinstance(value, (int, float)) and 0 <= value <= 1e9):
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
    commits, restores = rates.commits_per_day * DAYS, rates.restores_per_day * DAYS
    rows = [
        MonthRow(
            "commits", commits, commits * (COMMIT_WRITES + data_writes(facts.new_bytes, facts.pack_bytes)),
            commits * COMMIT_READS, commits * facts.new_bytes,
        ),
        replace(
            _simple("restores", restores, RESTORE_WRITES, RESTORE_READS + -(-facts.state_bytes // READ_BYTES)),
            read_bytes=restores * facts.state_bytes,
        ),
        _simple("looks", rates.looks_per_day * DAYS, LOOK_WRITES, LOOK_READS),
    ]  # fmt: skip
    # Bytes and packs that are there on average: half of the month's is new, or as much as is kept.
    each = 1 + (-(-facts.new_bytes // facts.pack_bytes) if facts.new_bytes else 0)
    if rates.keep_days is None:
        stored, packs = facts.stored_bytes + commits * facts.new_bytes / 2, facts.num_packs + commits * each / 2
    else:
        kept = rates.commits_per_day * rates.keep_days
        stored, packs = facts.state_bytes + kept * facts.new_bytes, kept * each
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


def _simple(what: str, times: float, writes: float, reads: float) -> MonthRow:
    return MonthRow(what, times, times * writes, times * reads)
