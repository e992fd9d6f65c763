"""log and show: the commits that some refs lead to, children first, and one of them; metrics, ranked.

Invariant: heads come from the store, which alone knows them; the history behind them comes from the index, which is
brought up to date when it does not know a head or a parent. Of `show`, the commit itself and who held its state are
read, and verified. Ranked is what some ref leads to and still has its data; equal values by age.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from cas_ckpt.arguments import did_you_mean, some_of
from cas_ckpt.core.forgotten import forgotten_view
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import graph_with
from cas_ckpt.core.records import (
    Brief,
    CommitInfo,
    commit_of,
    commit_row,
    info_from_row,
    infos_of_log,
    layout_of,
    log_rows,
    log_rows_in_pieces,
)
from cas_ckpt.core.refs import Ref, RefKind, check_new_name
from cas_ckpt.core.revisions import HEAD_NAMES, Revision, current_branch, nearly, resolve, revision_text, split_range
from cas_ckpt.core.tree import ask, known_commit
from cas_ckpt.errors import InvalidInputError, NoRepositoryError, NotFoundError, shown_value
from cas_ckpt.index import entries, history, tree_diff
from cas_ckpt.index.rows import CommitFilter, CommitRow
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.layouts import LayoutObject
from cas_ckpt.objects.nodes import decode_commit
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import mesh_text
from cas_ckpt.signing import SignatureInfo, Verdict, described


def log_commits(
    handle: RepositoryHandle,
    revisions: Sequence[Revision] = (),
    *,
    limit: int | None = None,
    all_refs: bool = False,
    first_parent: bool = False,
    wanted: CommitFilter | None = None,
    keys: str | Sequence[str] | None = None,
    grep: Sequence[str] = (),
) -> Iterator[CommitInfo]:
    """The commits that `revisions` lead to, a commit before its parents, the youngest first.

    Args:
        revisions: Where to begin; none of them means HEAD, if it has commits yet. What `^A` leads to is left out;
            `A..B` is `^A B`.
        limit: At most so many commits, of those that are wanted.
        all_refs: Begin at every branch, tag and pin too.
        first_parent: Follow only the first parent of merges.
        wanted: Leave out the others.
        keys: Only commits that changed an entry that matches, compared with their first parent.
        grep: Regular expressions; only commits whose message has a match of one of them.
    Raises:
        NotFoundError: a revision that is not there, or a metric that no commit has.
        InvalidInputError: not a regular expression.
    """
    included: list[Revision] = []
    excluded: list[Revision] = []
    for revision in revisions:
        text = revision_text(revision)
        both = split_range(text)
        if both is not None:
            excluded.append(both[0])
            included.append(both[1])
        elif text.startswith("^"):
            excluded.append(text[1:])
        else:
            included.append(revision)
    starts = [] if excluded and not included and not all_refs else start_of_log(handle, included, all_refs=all_refs)
    try:
        messages = re.compile("|".join(f"(?:{each})" for each in grep)) if grep else None
    except re.error as error:
        raise InvalidInputError(f"{shown_value(tuple(grep))} is not a regular expression: {error}") from error
    patterns = KeyPatterns(keys)
    most = None if patterns or excluded or messages else limit
    if limit and most is None and not wanted and not excluded:
        rows = log_rows_in_pieces(handle, starts, first_parent=first_parent)
    else:
        rows = log_rows(handle, starts, limit=most, first_parent=first_parent, wanted=wanted) if starts else iter(())
    if excluded:
        rows = _without(handle, rows, starts, [resolve(handle, revision) for revision in excluded])
    if messages is not None:
        rows = (row for row in rows if messages.search(row.message))
    if wanted is not None and wanted.metrics:
        first = list(islice(rows, 1))
        for bound in () if first else wanted.metrics:  # an empty answer is one only if the metrics are known
            require_metric(handle, bound.name)
        rows = chain(first, rows)
    forgotten = forgotten_view(handle)
    if patterns:
        rows = _changed(handle, rows, patterns, forgotten)
    return infos_of_log(handle.index, islice(rows, limit), forgotten)


def _without(
    handle: RepositoryHandle, rows: Iterator[CommitRow], starts: Sequence[Digest], excluded: Sequence[Digest]
) -> Iterator[CommitRow]:
    """Those rows that the commits `excluded` do not lead to; what is behind the last of them is not read."""
    graph = graph_with(handle, [*starts, *excluded])
    wanted = graph.reached(starts, without=graph.reached(excluded))
    for row in rows if wanted else ():
        if row.digest in wanted:
            yield row
            wanted.discard(row.digest)
        if not wanted:
            return


def require_metric(handle: RepositoryHandle, name: str) -> None:
    """Raise NotFoundError, with the names that there are, if no commit has a metric `name`."""
    known = handle.index.read(history.metric_names)
    if name not in known:
        similar = did_you_mean(name, known)
        raise NotFoundError(f"no commit has a metric {name!r}{similar}: there are {some_of(known)}")


def latest_of(handle: RepositoryHandle, branch: str | None) -> CommitInfo | None:
    """The commit that a branch names, None: HEAD; nothing if it has none."""
    wanted = current_branch(handle) if branch is None else branch
    ref = check_new_name(wanted)
    named = {each.name: each.target for each in handle.refs.list(RefKind.BRANCH)}
    if not named:
        handle.refs.require_there()
    meant = None if ref in named else nearly(ref, named)
    if meant is not None:
        raise InvalidInputError(f"there is no branch {ref!r}: did you mean {meant!r}?")
    target = named.get(ref)
    return None if target is None else info_from_row(commit_of(handle, target))


def start_of_log(handle: RepositoryHandle, revisions: Sequence[Revision], *, all_refs: bool = False) -> list[Digest]:
    """The commits that a log of these revisions begins at; without any, HEAD, if it has commits yet."""
    starts = [resolve(handle, revision) for revision in revisions]
    if all_refs:
        named = [ref.target for ref in handle.refs.list() if ref.target is not None]
        if not named:
            handle.refs.require_there()
        return starts + named
    if revisions:
        return starts
    try:
        return [resolve(handle, HEAD_NAMES[0])]
    except NoRepositoryError:
        raise
    except NotFoundError:
        return []


# --- metrics ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ranked:
    """A commit and the metric that it was ranked by."""

    commit: CommitInfo
    value: float


def metrics_table(
    handle: RepositoryHandle,
    revisions: Sequence[Revision] = (),
    *,
    names: Sequence[str] = (),
    all_refs: bool = False,
    limit: int | None = None,
) -> list[CommitInfo]:
    """The commits of the log that have metrics (one of `names`, if given), the youngest first.

    Raises:
        NotFoundError: no such revision; no commit at all has one of `names`.
    """
    found: list[CommitInfo] = []
    for commit in log_commits(handle, revisions, all_refs=all_refs):
        if limit is not None and len(found) >= limit:
            break
        if any(name in commit.metrics for name in names) if names else commit.metrics:
            found.append(commit)
    for name in names:
        if not found:
            require_metric(handle, name)
    return found


def best_commits(
    handle: RepositoryHandle, metric: str, *, largest: bool = False, limit: int = 1, revisions: Sequence[Revision] = ()
) -> list[Ranked]:
    """Up to `limit` commits, the best by `metric` first; forgotten ones do not count.

    Args:
        largest: The largest value is best, not the smallest.
        revisions: Only commits that these lead to; none of them means all branches, tags and pins.
    Raises:
        NotFoundError: no such revision, or no commit has this metric.
    """
    starts: list[Digest] = start_of_log(handle, revisions, all_refs=not revisions)
    among = graph_with(handle, starts).ancestors(starts) - forgotten_view(handle)
    ranked = handle.index.read(history.ranked, metric, largest=largest, among=among, limit=limit)
    if not ranked and limit:
        require_metric(handle, metric)
    return [Ranked(info_from_row(known_commit(handle, Digest(digest))), value) for digest, value in ranked]


# --- commits that changed an entry ------------------------------------------------------------

_FIRST_COMMITS, _MOST_COMMITS = 128, 1024
"""Commits that are compared at a time: few at first, as a log may be asked for a few alone."""


def _changed(
    handle: RepositoryHandle, rows: Iterator[CommitRow], keys: KeyPatterns, forgotten: Collection[Digest]
) -> Iterator[CommitRow]:
    """Those commits that differ from their first parent in an entry that matches, in order; no node is read.

    Raises:
        NotFoundError, CorruptionError: a commit that was not forgotten has lost a part of its state.
    """
    count = _FIRST_COMMITS
    while batch := list(islice(rows, count)):
        yield from _changed_in(handle, batch, keys, forgotten)
        count = _MOST_COMMITS


def _changed_in(
    handle: RepositoryHandle, rows: Sequence[CommitRow], keys: KeyPatterns, forgotten: Collection[Digest]
) -> list[CommitRow]:
    try:
        return ask(handle, tree_diff.changed_commits, rows=rows, keys=keys, forgotten=forgotten)
    except tree_diff.TooManyRowsError:
        half = len(rows) // 2
        parts = rows[:half], rows[half:]
        return [row for part in parts for row in _changed_in(handle, part, keys, forgotten)]


# --- one commit -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """One top-level name of a state and what is below it.

    Attributes:
        num_bytes: Plain bytes; tensors that are tied count each time they are named.
    """

    name: str
    num_entries: int
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class ShownCommit(Brief):
    """A commit and a summary of its state.

    Attributes:
        branches, tags, pins: Names of the refs that name this very commit.
        notes: Whole name of a ref (refs/tags/v1) -> message of the annotated tag, or reason of the pin.
        parts: The top-level names of the state.
        aliases: Groups of keys that are one tensor.
        world_size: Ranks that held the state when it was committed.
        mesh: The mesh that most divided tensors were over, as dp=4,tp=2; "" if there was none.
        provenance: Where and by what it was made, if that was kept.
        signatures: Whose keys the commit ("commit") and the tags that name it (refs/tags/v1) claim to be signed by,
            not verified: see `Repository.verify`.
        has_data: False for a forgotten commit whose data is gone: nothing is known of its state then.
    """

    commit: CommitInfo
    branches: tuple[str, ...]
    tags: tuple[str, ...]
    parts: tuple[Part, ...]
    aliases: tuple[tuple[str, ...], ...]
    world_size: int
    pins: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    provenance: Any = None
    has_data: bool = True
    mesh: str = ""
    remote_branches: tuple[str, ...] = ()
    signatures: Mapping[str, SignatureInfo] = field(default_factory=dict)


def show_commit(handle: RepositoryHandle, revision: Revision) -> ShownCommit:
    """The commit that `revision` names, read from its own verified objects.

    Raises:
        NotFoundError: no such commit. CorruptionError: an object of it is damaged.
    """
    from cas_ckpt.objects.values import decode_value  # brings numpy, which a log does not wait for

    digest = resolve(handle, revision)
    data = handle.read_node(ObjectKind.COMMIT, digest)
    row, made = commit_row(digest, data), decode_commit(data)
    provenance = made.provenance
    forgotten = digest in forgotten_view(handle)
    layout, parts = _state(handle, row, forgotten=forgotten)
    refs = [ref for ref in handle.refs.list() if ref.target == digest]
    names = {kind: tuple(ref.name for ref in refs if ref.kind is kind) for kind in RefKind}
    restored = handle.index.read(history.proven, [row.root])
    return ShownCommit(
        info_from_row(row, forgotten=forgotten, restored_us=restored.get(row.root)),
        names[RefKind.BRANCH],
        names[RefKind.TAG],
        parts,
        layout.aliases if layout else (),
        layout.world_size if layout else 0,
        names[RefKind.PIN],
        {f"{ref.kind.value}{ref.name}": ref.note for ref in refs if ref.note},
        None if provenance is None else decode_value(provenance, key="provenance"),
        layout is not None,
        mesh_text(layout.mesh) if layout else "",
        names[RefKind.REMOTE],
        _signatures(made.signature, refs),
    )


def _signatures(signature: bytes | None, refs: Iterable[Ref]) -> dict[str, SignatureInfo]:
    found = {"commit": described(signature)}
    found |= {f"{ref.kind.value}{ref.name}": described(ref.signature.blob) for ref in refs if ref.signature is not None}
    return {name: info for name, info in found.items() if info.verdict is not Verdict.UNSIGNED}


def _state(
    handle: RepositoryHandle, row: CommitRow, *, forgotten: bool
) -> tuple[LayoutObject | None, tuple[Part, ...]]:
    """Layout and parts of a commit; of a forgotten one whose data is gone, nothing."""
    try:
        layout = layout_of(handle, row)
        sums = ask(handle, entries.summary, Digest(row.root))
        return layout, tuple(Part(name, *each) for name, each in sums)
    except NotFoundError:
        if not forgotten:
            raise
        return None, ()
