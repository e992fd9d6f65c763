"""forget: commits whose data may go; their own record stays readable in the log.

    f1  read the refs, then what is forgotten already, then the history behind the refs
    f2  decide (ops/retention/policy.py), or take the commits that were named; of what is to go, tiers are asked whether
        they still have it (core/live.py)
    f3  rules: read the refs again; one that leads elsewhere begins all over, for it may keep more (a dry run
        reads them once, and answers for that moment)
    f4  write one record of the commits that are forgotten now
    f5  read the refs again: a commit that is named by now is taken back out of the records (rules: all
        of them are, if a ref leads elsewhere, and it begins all over)
One look after f4 is enough. A branch that is made later is put there by `publish_ref`, which looks at
the records after its swap, finds ours, and takes its commit back itself. A tag or pin that is made
later keeps its commit by naming it: in garbage collection a ref's target wins over these records.
Nothing is deleted here; what was collected meanwhile stays forgotten (core/live.py).

Invariant: a commit that a ref named before f5 is not forgotten; one that a ref names is never chosen. Heads come from
the store; history that is not complete is refused, for its rules would choose among what is left.

What would be freed (`unique_to` of a ref, `freed_by` of commits, a dry run) is only asked, never changed: it is the
difference of what is dead afterwards and what is dead already, as garbage collection would see both: other refs and
their logs keep what they lead to, and a ref that names a commit keeps it although it is forgotten. The size of packs
does not enter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from cas_ckpt import clock
from cas_ckpt.arguments import did_you_mean, one_text
from cas_ckpt.core.forgotten import read_forgotten_leniently, write_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import LOOKS, LiveSets, graph_behind, live_sets, not_at_tiers, unforget, unpushed_by_tier
from cas_ckpt.core.protocol import read_gc_state
from cas_ckpt.core.records import Brief, CommitInfo, commit_of, info_from_row
from cas_ckpt.core.refs import Ref, RefKind, default_author
from cas_ckpt.core.revisions import HEAD_NAMES, Revision, current_branch, resolve
from cas_ckpt.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    TransientStorageError,
    shown_value,
)
from cas_ckpt.index import garbage, history, remembered
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.graph import CommitGraph
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.fsck.packs import DataOptions
from cas_ckpt.ops.gc.plan import GcOptions, GcReport
from cas_ckpt.ops.history.log import require_metric
from cas_ckpt.ops.retention.policy import Candidate, Line, Policy, Retention, decide, read_policy
from cas_ckpt.progress import SILENT, Progress


@dataclass(frozen=True, slots=True, repr=False)
class DecidedCommit(Brief):
    """A commit, whether it is kept, and why (of what is forgotten: why not)."""

    commit: CommitInfo
    keep: bool
    reasons: tuple[str, ...]


def leads_elsewhere(
    handle: RepositoryHandle, before: Iterable[Ref], now: Iterable[Ref], known: Collection[Digest]
) -> bool:
    """Whether a ref of `now` leads to some of `known` by a way that `before` did not have.

    A branch that only went on, with commits of its own, does not: its old head is all that it leads to.
    """
    old = {(ref.kind, ref.name): ref.target for ref in before}
    for ref in now:
        was = old.get((ref.kind, ref.name))
        if ref.target is None or ref.target == was:
            continue
        if was is None or not _went_on(handle, was, ref.target, known):
            return True
    return False


def _went_on(handle: RepositoryHandle, old: Digest, new: Digest, known: Collection[Digest]) -> bool:
    """Whether all ways from `new` into what is known go through `old`, and one does."""
    met, seen, todo = False, {new}, [new]
    while todo:
        digest = todo.pop()
        if digest == old:
            met = True
        elif digest in known:
            return False
        else:
            parents = {Digest(parent) for parent in commit_of(handle, digest).parents} - seen
            seen |= parents
            todo += parents
    return met


def naming(refs: Iterable[Ref]) -> dict[Digest, Candidate]:
    """Commit -> the refs that name it, in the form that the rules have them."""
    names: dict[Digest, dict[RefKind, list[str]]] = {}
    for ref in refs:
        if ref.target is not None:
            names.setdefault(ref.target, {}).setdefault(ref.kind, []).append(ref.name)
    return {
        digest: Candidate(
            digest,
            heads=tuple(kinds.get(RefKind.BRANCH, ())),
            tags=tuple(kinds.get(RefKind.TAG, ())),
            pins=tuple(kinds.get(RefKind.PIN, ())),
            remotes=tuple(kinds.get(RefKind.REMOTE, ())),
        )
        for digest, kinds in names.items()
    }


def _history(handle: RepositoryHandle, refs: Iterable[Ref]) -> dict[Digest, CommitRow]:
    """All commits that the refs lead to.

    Raises:
        CorruptionError: one of them is in no intact pack. TransientStorageError: the index changes all the time.
    """
    heads = list(dict.fromkeys(ref.target for ref in refs if ref.target is not None))
    for _ in range(LOOKS):
        try:
            return {Digest(row.digest): row for row in history.log(handle.index, heads, whole=True)}
        except NotFoundError as error:  # another process made commits since, or makes the index anew
            graph = graph_behind(handle, heads)
            if not graph.reached(heads) <= graph.commits.keys():
                what = f"{error}: nothing is forgotten while history has a hole, run repo.fsck()"
                raise CorruptionError(what) from error
    raise TransientStorageError(
        f"index {handle.index.place}: others change it while it is read; nothing was done, try again"
    )


def choose(
    handle: RepositoryHandle, refs: Sequence[Ref], retention: Retention, branches: Sequence[str], *,
    verify_tier: bool = False,
) -> list[DecidedCommit]:  # fmt: skip
    """Every commit that is not forgotten, whether it is kept, and why; arguments as for `forget_by_policy`.

    Raises:
        InvalidInputError: a pattern that matches no branch. CorruptionError: history has a hole.
    """
    before = read_forgotten_leniently(handle.store)
    named = naming(refs)
    rows = _history(handle, refs)
    restored = handle.index.read(remembered.proven_commits) if retention.asks_for_restores else {}
    known: dict[bytes, Candidate] = {}
    for digest, row in rows.items():
        # A forgotten commit that a ref names keeps its data, so it is a candidate like any other.
        known[digest] = replace(
            named.get(digest) or Candidate(digest, forgotten=digest in before), parents=tuple(map(Digest, row.parents)),
            time_us=row.time_us, step=row.step, metrics=row.metrics, restored=restored.get(digest),
        )  # fmt: skip
    lines = [*_branch_lines(refs, retention, branches), *(() if branches else _other_lines(refs, retention, known))]
    decisions = decide(known.values(), lines, now_us=int(clock.now_s() * 1e6))
    going = {decision.commit.id for decision in decisions if not decision.keep}
    waiting = _not_at_tiers(handle, refs, going, verify_tier=verify_tier)
    return [
        DecidedCommit(
            info_from_row(rows[decision.commit.id]),
            decision.keep or decision.commit.id in waiting,
            decision.reasons if decision.keep else waiting.get(decision.commit.id, decision.reasons),
        )
        for decision in decisions
    ]


def _not_at_tiers(
    handle: RepositoryHandle, refs: Sequence[Ref], going: Collection[Digest], *, verify_tier: bool
) -> dict[bytes, tuple[str, ...]]:
    """Commits of `going` that a tier does not have yet, or not any more -> why they stay, in words."""
    found: dict[bytes, tuple[str, ...]] = {}
    for name, commits in unpushed_by_tier(handle, refs).items():
        found |= dict.fromkeys(commits.intersection(going), (f"not at {name} yet",))
    asked = [digest for digest in going if digest not in found]
    lacking = not_at_tiers(handle, refs, asked, damaged=_damaged) if verify_tier else not_at_tiers(handle, refs, asked)
    return found | {one: (why,) for one, why in lacking.items()}


def _damaged(tier: RepositoryHandle) -> set[str]:
    """Ids of the commits that are damaged there; every byte is read."""
    return {hit.commit for each in check_open(tier, DataOptions()).problems for hit in each.hits}


def _branch_lines(refs: Iterable[Ref], retention: Retention, branches: Sequence[str]) -> Iterator[Line]:
    """The branches with their rules; those that were not asked for keep all that they lead to.

    Raises:
        InvalidInputError: a pattern that matches no branch.
    """
    heads = {ref.name: ref.target for ref in refs if ref.kind is RefKind.BRANCH and ref.target is not None}
    for pattern in branches:
        if not any(fnmatchcase(name, pattern) for name in heads):
            raise InvalidInputError(f"{pattern!r} matches no branch: see repo.branches()")
    for name, head in heads.items():
        asked = not branches or any(fnmatchcase(name, pattern) for pattern in branches)
        yield Line(name, head, retention.policy_for(name) if asked else None)


def _other_lines(refs: Sequence[Ref], retention: Retention, known: Mapping[bytes, Candidate]) -> Iterator[Line]:
    """Tags and pins that no branch leads to (theirs was deleted): what is behind them has rules, too."""
    heads = [ref.target for ref in refs if ref.kind is RefKind.BRANCH and ref.target is not None]
    on_branches = CommitGraph(known).ancestors(heads)
    for ref in refs:
        if ref.target is not None and ref.target not in on_branches:
            policy = None if retention.default.is_empty else retention.default
            yield Line(f"{ref.kind.label} {ref.name}", ref.target, policy)


MAX_LOOKS = 10
"""Times that it begins again because refs were made or moved meanwhile."""


@dataclass(frozen=True, slots=True, repr=False)
class ForgetReport(Brief):
    """Result of `forget`, or of its dry run.

    Attributes:
        decisions: The commits that were looked at, the youngest first; those that were forgotten
            earlier only if they were named.
        forgotten: Ids of the commits that are forgotten now and were not before.
        freed_bytes: Stored bytes that nothing needs any more because of it; None if they were not
            counted, because garbage is collected at once.
        dry_run: Nothing was written.
        collected: What the garbage collection did that followed.
    """

    decisions: tuple[DecidedCommit, ...]
    forgotten: tuple[str, ...]
    freed_bytes: int | None = None
    dry_run: bool = False
    collected: GcReport | None = None


def forget(
    handle: RepositoryHandle,
    policy: Policy | None = None,
    *,
    revisions: Sequence[Revision] = (),
    branches: Sequence[str] = (),
    dry_run: bool = False,
    gc: bool = False,
    verify_tier: bool = False,
    progress: Progress = SILENT,
) -> ForgetReport:
    """Forget what no rule of `policy` keeps, or the commits that `revisions` name.

    Args:
        verify_tier: Of commits that tiers are to have, read all that they hold; else sizes are looked at.
        gc: Collect garbage afterwards; not in a dry run, which says what would be freed instead.
            What is collected is all that nothing needs, not only what was forgotten now.
    Raises:
        InvalidInputError: neither, both; else as for the two functions below.
    """
    if policy is not None and not isinstance(policy, Policy):
        raise InvalidInputError(f"policy is {shown_value(policy)}: give rules such as Policy(keep_last=3)")
    if (policy is None) == (not revisions):
        raise InvalidInputError("forget by rules or by revisions: give a policy, or revisions, and not both")
    if revisions and branches:
        raise InvalidInputError("branches are for rules: a revision is forgotten wherever it is")
    rules = None if policy is None else Retention(policy)
    return _forget(
        handle, rules, revisions, branches, dry_run=dry_run, gc=gc, verify_tier=verify_tier, progress=progress
    )


def _forget(
    handle: RepositoryHandle, rules: Retention | None, revisions: Sequence[Revision], branches: Sequence[str], *,
    dry_run: bool, gc: bool, verify_tier: bool, progress: Progress,
) -> ForgetReport:  # fmt: skip
    collect = gc and not dry_run
    how = {"dry_run": dry_run, "measure": not collect, "verify_tier": verify_tier}
    if rules is None:
        report = forget_revisions(handle, revisions, **how)
    else:
        report = forget_by_policy(handle, rules, branches=branches, **how)
    if not collect:
        return report
    from cas_ckpt.ops.gc.gc import collect_garbage

    return replace(report, collected=collect_garbage(handle, progress=progress))


def apply_policy(
    handle: RepositoryHandle, *, branches: Sequence[str] = (), dry_run: bool = False, gc: bool = False,
    verify_tier: bool = False, progress: Progress = SILENT,
) -> ForgetReport:  # fmt: skip
    """Forget what the rules of the repository do not keep.

    Raises:
        InvalidInputError: it has none.
    """
    rules = read_policy(handle.store)
    if rules.is_empty:
        raise InvalidInputError(f"{handle.store.url} has no policy: repo.set_policy(Policy(keep_daily=7)) makes one")
    return _forget(handle, rules, (), branches, dry_run=dry_run, gc=gc, verify_tier=verify_tier, progress=progress)


def forget_by_policy(
    handle: RepositoryHandle,
    retention: Retention,
    *,
    branches: Sequence[str] = (),
    dry_run: bool = False,
    measure: bool = False,
    verify_tier: bool = False,
) -> ForgetReport:
    """Forget what no rule keeps.

    Args:
        branches: Patterns: apply them to these branches alone; whatever another branch has, too, stays.
        dry_run: Say what would be forgotten, and write nothing.
        measure: Find out what would be freed by it.
    Raises:
        InvalidInputError: no rules, or a pattern that matches no branch. ConflictError: refs were
            made or moved faster than they could be looked at. CorruptionError: history has a hole.
        NotFoundError: no commit has a metric that a rule names, or none was restored that the index knows of.
    """
    if retention.is_empty:
        raise InvalidInputError("a policy without rules would keep the heads alone: give at least one rule")
    for metric in retention.metrics:  # a name that is mistyped keeps nothing, and says nothing
        require_metric(handle, metric)
    if retention.asks_for_restores and not handle.index.read(remembered.proven_commits):
        raise NotFoundError(
            f"keep_last_restored would keep nothing: the index {handle.index.place} knows of no commit that was "
            "restored whole: apply the policy with the index that does, restore one first, or leave the rule out"
        )
    for _ in range(MAX_LOOKS):
        refs = list(handle.refs.every())  # also the deleted ones: their logs keep what nothing frees yet
        decided = choose(handle, refs, retention, branches, verify_tier=verify_tier)
        known = {_id_of(one) for one in decided}
        if not dry_run and leads_elsewhere(handle, refs, list(handle.refs.list()), known):
            continue
        state = read_gc_state(handle.store)
        report = _finish(handle, decided, refs=refs, dry_run=dry_run, measure=measure)
        if dry_run or not report.forgotten or not leads_elsewhere(handle, refs, list(handle.refs.list()), known):
            return report
        unforget(handle, {Digest(bytes.fromhex(one)) for one in report.forgotten}, seen=state)
    raise ConflictError(f"new refs were made or moved {MAX_LOOKS} times while commits were chosen: try again")


def forget_revisions(
    handle: RepositoryHandle, revisions: Sequence[Revision], *, dry_run: bool = False, measure: bool = False,
    verify_tier: bool = False,
) -> ForgetReport:  # fmt: skip
    """Forget these commits, wherever they are in the history; arguments as above.

    Raises:
        InvalidInputError: a ref names one of them; says which. NotFoundError: no such revision.
    """
    digests = list(dict.fromkeys(resolve(handle, revision) for revision in revisions))
    named = naming(handle.refs.list())
    for digest in digests:
        if digest in named:
            raise InvalidInputError(
                f"commit {short(digest)} is {' and '.join(named[digest].refs)}, so it stays: delete or move that first"
            )
    before = read_forgotten_leniently(handle.store)
    going = [digest for digest in digests if digest not in before]
    waiting = _not_at_tiers(handle, list(handle.refs.list()), going, verify_tier=verify_tier)
    for digest in digests:
        if digest in waiting:
            raise InvalidInputError(f"commit {short(digest)} stays: {waiting[digest][0]}; push it first")
    decided = []
    for digest in digests:
        why = "forgotten already" if digest in before else "asked for"
        decided.append(DecidedCommit(info_from_row(commit_of(handle, digest)), False, (why,)))
    state = read_gc_state(handle.store)
    report = _finish(handle, decided, before=before, dry_run=dry_run, measure=measure)
    if dry_run or not report.forgotten:
        return report
    named = naming(handle.refs.list())
    unforget(handle, named.keys() & set(digests), seen=state)
    return replace(
        report,
        decisions=tuple(
            replace(one, keep=True, reasons=named[_id_of(one)].refs) if _id_of(one) in named else one
            for one in report.decisions
        ),
        forgotten=tuple(one for one in report.forgotten if bytes.fromhex(one) not in named),
    )


def _id_of(decided: DecidedCommit) -> Digest:
    return Digest(bytes.fromhex(decided.commit.id))


def _finish(
    handle: RepositoryHandle,
    decided: Sequence[DecidedCommit],
    *,
    dry_run: bool,
    measure: bool,
    refs: Sequence[Ref] | None = None,
    before: Collection[Digest] = (),
) -> ForgetReport:
    """Write down what is forgotten, unless it is only asked for."""
    digests = [_id_of(one) for one in decided if not one.keep]
    new = [digest for digest in digests if digest not in before]
    if not dry_run:
        handle.require_writable()
    freed = 0 if measure else None
    if new and measure:
        now, then = _without(handle, new, list(handle.refs.every()) if refs is None else refs)
        freed = _difference(handle, now, then).stored_bytes
    if new and not dry_run:
        write_forgotten(handle.store, new, author=default_author())
    return ForgetReport(tuple(decided), tuple(digest.hex() for digest in new), freed, dry_run)


# --- what would be freed --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class Freed(Brief):
    """Objects and bytes that a collection would free.

    Attributes:
        commits: Ids of the commits whose data nothing would keep.
        num_chunks, num_bytes: Chunks, and their plain bytes.
        num_nodes: Other objects.
        stored_bytes: What all of it takes in packs.
        kept: Ids of commits that were asked for and would stay: a branch, tag or pin names them.
    """

    commits: tuple[str, ...]
    num_chunks: int
    num_bytes: int
    num_nodes: int
    stored_bytes: int
    kept: tuple[str, ...] = ()


def unique_to(handle: RepositoryHandle, name: str, *, with_remotes: bool = False) -> Freed:
    """Objects that only the branch, tag or pin `name` leads to, its log included.

    Args:
        with_remotes: What other remote-tracking branches lead to is not its own. Else these hold nothing, or a branch
            that was pushed would have nothing for itself.
    Raises:
        NotFoundError: no such ref.
    """
    one_text("name", name)
    refs = list(handle.refs.every())
    ours = _named(refs, current_branch(handle) if name in HEAD_NAMES else name)
    others = [ref for ref in refs if ref is not ours and (with_remotes or ref.kind is not RefKind.REMOTE)]
    return _difference(handle, live_sets(handle, refs=[ours, *others]), live_sets(handle, refs=others))


def _named(refs: Sequence[Ref], name: str) -> Ref:
    for kind in RefKind:
        for ref in refs:
            if ref.kind is kind and ref.target is not None and name in (ref.name, f"{kind.value}{ref.name}"):
                return ref
    similar = did_you_mean(name, (ref.name for ref in refs if ref.target is not None))
    raise NotFoundError(
        f"there is no branch, tag or pin {name!r}{similar}: see repo.branches(), repo.tags() and repo.pins()"
    )


def freed_by(handle: RepositoryHandle, revisions: Sequence[Revision]) -> Freed:
    """Objects that the next collection would free if these commits were forgotten.

    Raises:
        NotFoundError: no such revision. InvalidInputError: none was given.
    """
    if not revisions:
        raise InvalidInputError("what would be freed by forgetting nothing is nothing: give revisions")
    wanted = {resolve(handle, revision) for revision in revisions}
    refs = list(handle.refs.every())
    named = {ref.target for ref in refs if ref.target is not None}
    now, then = _without(handle, wanted, refs)
    return _difference(handle, now, then, kept=tuple(sorted(digest.hex() for digest in wanted & named)))


def _without(handle: RepositoryHandle, commits: Collection[Digest], refs: Sequence[Ref]) -> tuple[LiveSets, LiveSets]:
    """Live objects now, and if `commits` were forgotten."""
    expired_us = int((clock.now_s() - GcOptions().reflog_expire_s) * 1e6)
    forgotten = read_forgotten_leniently(handle.store)
    return (
        live_sets(handle, refs=refs, forgotten=forgotten, expire_before_us=expired_us),
        live_sets(handle, refs=refs, forgotten=forgotten.union(commits), expire_before_us=expired_us),
    )


def _difference(handle: RepositoryHandle, now: LiveSets, then: LiveSets, *, kept: tuple[str, ...] = ()) -> Freed:
    usage = garbage.freed(handle.index, (now.commits, now.roots), (then.commits, then.roots))
    lost = (now.commits - now.forgotten) - (then.commits - then.forgotten)
    return Freed(
        tuple(sorted(digest.hex() for digest in lost)), usage.num_chunks, usage.num_bytes, usage.num_nodes,
        usage.stored_bytes, kept,
    )  # fmt: skip
