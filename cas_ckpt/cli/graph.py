"""The history as a graph of text, in the manner of `git log --graph --oneline`.

Every line of descent has a column that it keeps; a column that is free is used again. A row without a mark in
that column separates the first commit of a history from one that does not lead to it.

    *    3c1f (ft) one more       before a commit, the columns that wait for it run into its own
    | *  9a22 (main) two          behind a merge, its further parents get columns
    |/
    *    77be one

Invariant: commits come children before parents, as `log` gives them. Knows no repository.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from cas_ckpt.cli.decoration import styled
from cas_ckpt.cli.output import cut, escaped, shown_metrics, subject
from cas_ckpt.ops.records import CommitInfo


def render_log(
    commits: Iterable[CommitInfo],
    refs: Mapping[str, Sequence[str]] | None = None,
    *,
    describe: Callable[[CommitInfo, Sequence[str]], str] | None = None,
    width: int | None = None,
    colour: bool = False,
) -> Iterator[str]:
    """The lines of the graph.

    Args:
        refs: Id of a commit -> names of the refs that point at it.
        describe: Commit and its names -> the text behind it; `oneline`, if not given.
        width: Characters that a line may have; None: as many as it needs.
    """
    names = refs or {}
    lanes: list[str | None] = []
    ended: int | None = None
    for commit in commits:
        yield from _join(lanes, commit.id)
        column = _column_of(lanes, commit.id)
        if column == ended and lanes[column] is None:
            yield _row(lanes)
        lanes[column] = commit.id
        row = _row(lanes, column)
        named = names.get(commit.id, ())
        left = None if width is None else width - len(row) - 1
        yield f"{row} {describe(commit, named) if describe else oneline(commit, named, width=left, colour=colour)}"
        yield from _follow(lanes, column, commit.parents)
        ended = None if commit.parents else column


def thinned(whole: Sequence[CommitInfo], chosen: Sequence[CommitInfo]) -> list[CommitInfo]:
    """`chosen` with the nearest chosen ones in place of parents that were left out, so that lines meet.

    Args:
        whole: The log that `chosen` was chosen from, children before parents.
    """
    kept = {commit.id for commit in chosen}
    nearest: dict[str, tuple[str, ...]] = {}

    def ends(parents: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(end for parent in parents for end in nearest.get(parent, ())))

    for commit in reversed(whole):
        nearest[commit.id] = (commit.id,) if commit.id in kept else ends(commit.parents)
    return [replace(commit, parents=ends(commit.parents)) for commit in chosen]


def oneline(
    commit: CommitInfo, names: Sequence[str], *, width: int | None = None, colour: bool = False
) -> str:
    """One commit in one line: id, names, step, message, metrics; cut at `width` characters."""
    parts = [(commit.short_id, "yellow")]
    if names:
        parts.append((f"({', '.join(map(escaped, names))})", "green"))
    if commit.step is not None:
        parts.append((f"[{commit.step}]", ""))
    if commit.message:
        parts.append((subject(commit.message), ""))
    if commit.metrics:
        parts.append((shown_metrics(commit.metrics, " "), ""))
    if commit.forgotten:
        parts.append(("[forgotten]", "red"))
    return " ".join(_fitting(parts, width, colour=colour))


def _fitting(parts: Sequence[tuple[str, str]], width: int | None, *, colour: bool) -> Iterator[str]:
    """(text, colour) as text, as many as have room; the last one is cut."""
    left = width
    for text, shade in parts:
        shown = cut(text, left)
        yield styled(shown, shade, colour and bool(shade))
        if left is not None:
            left -= len(shown) + 1
            if left <= 0:
                return


def _column_of(lanes: list[str | None], commit: str | None) -> int:
    """The leftmost column that waits for `commit`, else the first free one, else a new one."""
    for wanted in (commit, None):
        if wanted in lanes:
            return lanes.index(wanted)
    lanes.append(None)
    return len(lanes) - 1


def _join(lanes: list[str | None], commit: str) -> Iterator[str]:
    """Lead every further column that waits for `commit` to the leftmost one."""
    waiting = [at for at, lane in enumerate(lanes) if lane == commit]
    for column in reversed(waiting[1:]):
        lanes[column] = None
        yield from _edges(lanes, column, waiting[0])
    _trim(lanes)


def _follow(lanes: list[str | None], column: int, parents: Sequence[str]) -> Iterator[str]:
    """Let the first parent have the commit's column; lead to columns for the others."""
    lanes[column] = parents[0] if parents else None
    for parent in parents[1:]:
        known = parent in lanes
        target = _column_of(lanes, parent)
        yield from _edges(lanes, column, target)
        if not known:
            lanes[target] = parent
    _trim(lanes)


def _edges(lanes: Sequence[str | None], start: int, end: int) -> Iterator[str]:
    """A line that runs from one column to another, a column per row."""
    if start > end:
        for at in range(start, end, -1):
            yield _row(lanes, edge=(2 * at - 1, "/"))
    else:
        for at in range(start, end):
            yield _row(lanes, edge=(2 * at + 1, "\\"))


def _row(lanes: Sequence[str | None], column: int | None = None, edge: tuple[int, str] | None = None) -> str:
    row = [" "] * (2 * len(lanes))
    for at, lane in enumerate(lanes):
        row[2 * at] = "*" if at == column else " " if lane is None else "|"
    if edge is not None:
        row[edge[0]] = edge[1]
    return "".join(row).rstrip() if column is None else "".join(row).rstrip().ljust(2 * len(lanes) - 1)


def _trim(lanes: list[str | None]) -> None:
    while lanes and lanes[-1] is None:
        lanes.pop()
