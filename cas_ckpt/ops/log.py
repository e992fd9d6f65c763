"""log: the commits that some refs lead to, children first, and those among them that are wanted.

Invariant: heads come from the store, which alone knows them; the history behind them comes
from the index, which is brought up to date when it does not know a head or a parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

from cas_ckpt.config import require_there
from cas_ckpt.errors import InvalidInputError, NoRepositoryError, NotFoundError
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.index.selection import CommitFilter
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.given_up import given_up
from cas_ckpt.ops.records import CommitInfo, commit_of, history, info_from_row
from cas_ckpt.ops.resolve import HEAD_NAMES, Revision, current_branch, nearly, resolve
from cas_ckpt.refs import RefKind, check_name
from cas_ckpt.repository import RepositoryHandle


def log_commits(
    handle: RepositoryHandle,
    revisions: Sequence[Revision] = (),
    *,
    limit: int | None = None,
    all_refs: bool = False,
    first_parent: bool = False,
    wanted: CommitFilter | None = None,
    keys: str | Sequence[str] | None = None,
) -> Iterator[CommitInfo]:
    """The commits that `revisions` lead to, a commit before its parents, the youngest first.

    Args:
        revisions: Where to begin; none of them means HEAD, if it has commits yet.
        limit: At most so many commits, of those that are wanted.
        all_refs: Begin at every branch, tag and pin too.
        first_parent: Follow only the first parent of merges.
        wanted: Leave out the others.
        keys: Only commits that changed an entry that matches, compared with their first parent.
    Raises:
        NotFoundError: a revision that is not there, or a metric that no commit has. InvalidInputError: a
            negative limit.
    """
    if limit is not None and limit < 0:
        raise InvalidInputError(f"a log of {limit} commits: give a number from 0 on")
    starts = start_of_log(handle, revisions, all_refs=all_refs)
    most = None if keys else limit
    rows = history(handle, starts, limit=most, first_parent=first_parent, wanted=wanted)
    if wanted is not None and wanted.metrics:
        rows = _some(handle, rows, wanted)
    forgotten = given_up(handle)
    if keys:
        from cas_ckpt.ops.key_changes import KeyHistory  # brings what reads trees, which most logs do not need

        rows = islice(KeyHistory(handle, keys, forgotten=forgotten).changed(rows), limit)
    return (info_from_row(row, forgotten=row.digest in forgotten) for row in rows)


def _some(handle: RepositoryHandle, rows: Iterator[CommitRow], wanted: CommitFilter) -> Iterator[CommitRow]:
    """`rows`; if there are none, the metrics that they were chosen by are known at least."""
    first = list(islice(rows, 1))
    if not first:
        for bound in wanted.metrics:
            require_metric(handle, bound.name)
    return chain(first, rows)


def require_metric(handle: RepositoryHandle, name: str) -> None:
    """Raise NotFoundError, with the names that there are, if no commit has a metric `name`."""
    known = handle.index.metric_names()
    if name not in known:
        raise NotFoundError(f"no commit has a metric {name!r}: there are {', '.join(known) or 'none'}")


def latest_of(handle: RepositoryHandle, branch: str | None) -> CommitInfo | None:
    """The commit that a branch names, None: HEAD; nothing if it has none."""
    wanted = current_branch(handle) if branch is None else branch
    ref = check_name(wanted)
    named = {each.name: each.target for each in handle.refs.list(RefKind.BRANCH)}
    if not named:
        require_there(handle.store)
    meant = None if ref in named else nearly(ref, named)
    if meant is not None:
        raise InvalidInputError(f"there is no branch {ref!r}: did you mean {meant!r}?")
    target = named.get(ref)
    return None if target is None else info_from_row(commit_of(handle, target))


def start_of_log(handle: RepositoryHandle, revisions: Sequence[Revision], *, all_refs: bool = False) -> list[Digest]:
    """The commits that a log of these revisions begins at."""
    starts = [resolve(handle, revision) for revision in revisions]
    if all_refs:
        named = [ref.target for ref in handle.refs.list() if ref.target is not None]
        if not named:
            require_there(handle.store)
        return starts + named
    return starts if revisions else _default_start(handle)


def _default_start(handle: RepositoryHandle) -> list[Digest]:
    """HEAD; nothing if it is a branch without commits."""
    try:
        return [resolve(handle, HEAD_NAMES[0])]
    except NoRepositoryError:
        raise
    except NotFoundError:
        return []
