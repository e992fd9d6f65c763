"""What a policy chooses in a repository: its refs and history, put before the rules.

Invariant: only read. A commit that a ref names is never chosen to be forgotten; heads come from the
store, and history that is not whole is refused, for its rules would choose among what is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from cas_ckpt import clock
from cas_ckpt.errors import CorruptionError, InvalidInputError, NotFoundError
from cas_ckpt.forgotten import read_forgotten
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.records import Brief, CommitInfo, commit_of, info_from_row
from cas_ckpt.ops.retention import Candidate, Line, decide, reached_from
from cas_ckpt.ops.retention_policy import Retention
from cas_ckpt.refs import Ref, RefKind
from cas_ckpt.repository import RepositoryHandle


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
        )
        for digest, kinds in names.items()
    }


def _history(handle: RepositoryHandle, refs: Iterable[Ref]) -> dict[Digest, CommitRow]:
    """All commits that the refs lead to.

    Raises:
        CorruptionError: one of them is in no intact pack.
    """
    heads = list(dict.fromkeys(ref.target for ref in refs if ref.target is not None))
    try:
        rows = handle.index.log(heads, whole=True)
    except NotFoundError:
        handle.sync()  # another process made commits since
        try:
            rows = handle.index.log(heads, whole=True)
        except NotFoundError as error:
            raise CorruptionError(
                f"{error}: nothing is forgotten while history has a hole, run repo.fsck()"
            ) from error
    return {Digest(row.digest): row for row in rows}


def choose(
    handle: RepositoryHandle, refs: Sequence[Ref], retention: Retention, branches: Sequence[str]
) -> list[DecidedCommit]:
    """Every commit that is not forgotten, whether it is kept, and why; arguments as for `forget_by_policy`.

    Raises:
        InvalidInputError: a pattern that matches no branch. CorruptionError: history has a hole.
    """
    before = read_forgotten(handle.store)
    named = naming(refs)
    rows = _history(handle, refs)
    known = {digest: _candidate(row, named.get(digest), digest in before) for digest, row in rows.items()}
    lines = [*_branch_lines(refs, retention, branches), *(() if branches else _other_lines(refs, retention, known))]
    decisions = decide(known.values(), lines, now_us=int(clock.now_s() * 1e6))
    return [
        DecidedCommit(info_from_row(rows[decision.commit.id]), decision.keep, decision.reasons)
        for decision in decisions
    ]


def _candidate(row: CommitRow, named: Candidate | None, forgotten: bool) -> Candidate:
    """A forgotten commit that a ref names keeps its data, so it is a candidate like any other."""
    candidate = named or Candidate(Digest(row.digest), forgotten=forgotten)
    parents = tuple(Digest(parent) for parent in row.parents)
    return replace(candidate, parents=parents, time_us=row.time_us, step=row.step, metrics=row.metrics)


def _branch_lines(refs: Iterable[Ref], retention: Retention, branches: Sequence[str]) -> Iterator[Line]:
    """The branches with their rules; those that were not asked for keep all that they lead to.

    Raises:
        InvalidInputError: a pattern that matches no branch.
    """
    heads = {ref.name: ref.target for ref in refs if ref.kind is RefKind.BRANCH and ref.target is not None}
    for pattern in branches:
        if not any(fnmatchcase(name, pattern) for name in heads):
            raise InvalidInputError(f"{pattern!r} matches no branch: repo.branches() tells what there is")
    for name, head in heads.items():
        asked = not branches or any(fnmatchcase(name, pattern) for pattern in branches)
        yield Line(name, head, retention.policy_for(name) if asked else None)


def _other_lines(
    refs: Sequence[Ref], retention: Retention, known: Mapping[Digest, Candidate]
) -> Iterator[Line]:
    """Tags and pins that no branch leads to (theirs was deleted): what lies behind them has rules, too."""
    heads = [ref.target for ref in refs if ref.kind is RefKind.BRANCH and ref.target is not None]
    on_branches = reached_from(known, heads)
    for ref in refs:
        if ref.target is not None and ref.target not in on_branches:
            policy = None if retention.default.is_empty else retention.default
            yield Line(f"{ref.kind.label} {ref.name}", ref.target, policy)
