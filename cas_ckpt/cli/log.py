"""log: the history as blocks, as lines, or as a graph of text in the manner of `git log --graph --oneline`.

Every line of descent has a column of the graph that it keeps; a column that is free is used again. A row without a
mark in that column separates the first commit of a history from one that does not lead to it.

    *    3c1f (ft) one more       before a commit, the columns that wait for it run into its own
    | *  9a22 (main) two          behind a merge, its further parents get columns
    |/
    *    77be one

Invariant: commits come children before parents, as `Repository.log` gives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from cas_ckpt.cli.command import Settings, flag, given_trust, keys_option, limit_option, trust_option, verb
from cas_ckpt.cli.output import cut, echo_json, escaped, plain, shown_metrics, subject, utc, verdict_text
from cas_ckpt.core.records import CONTINUED_FROM, LEFT_OUT
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.ops.history.quick_log import quick_log
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.core.records import CommitInfo
    from cas_ckpt.repository import Repository
    from cas_ckpt.signing import SignatureInfo


FORGOTTEN = "[forgotten]"
"""Printed behind a commit whose data nothing keeps."""


@verb(
    "log",
    examples=[
        "cas-ckpt log",
        "cas-ckpt log --oneline --graph --all",
        "cas-ckpt log -n 5 main~10 v1",
        "cas-ckpt log main..ft-math --grep warm-up --reverse",
        "cas-ckpt log --since 2d --metric 'loss<2.1' --metric 'acc>=0.5'",
        "cas-ckpt log --step 1000:2000 --author ann --key 'model/head/**'",
        "cas-ckpt log --world-size 8 --axis tp=2 --axis ep",
    ],
    also=[15],
)
@click.argument("revisions", nargs=-1, metavar="[REVISION]...")
@limit_option("At most N commits.")
@flag("--oneline", help="One line for each commit.")
@flag("--graph", help="Draw the history; one line for each commit.")
@flag("--all", "all_refs", help="Begin at every branch, tag and pin.")
@flag("--first-parent", help="Follow only the first parent of merges.")
@flag("--reverse", help="The eldest first, of those that -n leaves.")
@click.option("--since", metavar="TIME", help="Not older: 2026-11-21, 2026-11-21T14:30, 3h, '2 days ago'.")
@click.option("--until", metavar="TIME", help="Not younger; a day alone is taken whole.")
@click.option("--metric", "where", multiple=True, metavar="TEXT", help="'loss<2.1' (< <= > >= == !=); all hold.")
@click.option("--author", metavar="TEXT", help="A part of the author's name, or a pattern of the whole.")
@click.option("--grep", multiple=True, metavar="REGEX", help="Their message has a match; of one, if repeated.")
@click.option("--step", metavar="N|A:B", help="This step, or a range with both ends in it.")
@click.option("--world-size", type=click.IntRange(min=1), metavar="N", help="Made by N ranks.")
@click.option("--axis", "axes", multiple=True, metavar="NAME[=N]", help="Over a mesh with this dimension; all hold.")
@keys_option("Entries that match were changed.")
@flag("--show-signature", help="Say who signed each commit (see cas-ckpt verify).")
@trust_option("With --show-signature: whose signatures count; may be repeated.")
def log(
    settings: Settings, /, revisions: tuple[str, ...], limit: int | None, oneline: bool, graph: bool, all_refs: bool,
    first_parent: bool, reverse: bool, show_signature: bool, trust: tuple[str, ...], **conditions: Any,
) -> None:  # fmt: skip
    """Show the commits that the revisions lead to, the youngest first.

    Without a revision, those of the default branch. What ^REVISION leads to is left out; A..B is ^A B. Conditions
    leave commits out; -n counts those that are shown. Times are UTC unless they say another offset. An entry counts as
    changed if it is not what it was in the first parent. Forgotten commits, whose data is gone, are marked.
    """
    conditions["keys"] = conditions["keys"] or None
    if reverse and graph:
        raise click.UsageError("--reverse or --graph, not both")
    is_range = any(".." in revision or revision.startswith("^") for revision in revisions)
    limited = is_range or any(conditions.values())
    if not (len(revisions) > 1 or limited or reverse or all_refs or show_signature or settings.index):
        quick = quick_log(settings.place(), *revisions, limit=limit, first_parent=first_parent)
        if quick is not None:
            _show(settings, quick.commits, quick.names, {}, oneline=oneline, graph=graph)
            return
    with settings.open() as repo, repo.one_look():
        commits = repo.log(
            revisions, limit=limit, all_refs=all_refs, first_parent=first_parent, reverse=reverse, **conditions
        )
        names = names_of_commits(repo)
        failures = {} if settings.quiet else repo.push_failures()
        signed = _signatures(settings, repo, commits, trust) if show_signature else {}
        whole = None
        if graph and any(conditions.values()) and not settings.json:
            whole = repo.log(revisions, all_refs=all_refs, first_parent=first_parent)
    for tier, failure in failures.items():
        why = f"the push at {utc(failure.time_s)} UTC failed: {escaped(failure.reason)}"
        click.echo(f"cas-ckpt: commits are not at {escaped(tier)} yet: {why}", err=True)
    if not commits and limit != 0 and not settings.quiet and not settings.json:
        click.echo("no such commits" if limited else "no commits yet", err=True)
    if whole is not None:
        commits = thinned(whole, commits)
    _show(settings, commits, names, signed, oneline=oneline, graph=graph)


def _show(
    settings: Settings, commits: Sequence[CommitInfo], names: Mapping[str, Sequence[str]],
    signed: Mapping[str, SignatureInfo], *, oneline: bool, graph: bool,
) -> None:  # fmt: skip
    if settings.json:
        echo_json([_as_json(commit, names, signed) for commit in commits])
    else:
        settings.page(None, _lines(settings, commits, names, signed, oneline=oneline, graph=graph))


def _as_json(
    commit: CommitInfo, names: Mapping[str, Sequence[str]], signed: Mapping[str, SignatureInfo]
) -> dict[str, Any]:
    found: dict[str, Any] = plain(commit) | {"refs": list(names.get(commit.id, ()))}
    return found | ({"signature": plain(signed[commit.id])} if commit.id in signed else {})


def _signatures(
    settings: Settings, repo: Repository, commits: Sequence[CommitInfo], trust: tuple[str, ...]
) -> dict[str, SignatureInfo]:
    """Id of each commit -> the verdict on its signature."""
    from cas_ckpt.signing import Trust

    trusted = given_trust(settings, trust) or Trust()
    return {commit.id: repo.verify(commit.id, trust=trusted).commits[0].signature for commit in commits}


def _lines(
    settings: Settings, commits: Sequence[CommitInfo], names: Mapping[str, Sequence[str]],
    signed: Mapping[str, SignatureInfo], *, oneline: bool, graph: bool,
) -> Iterator[str]:  # fmt: skip
    if graph:
        return render_log(commits, names, width=settings.width, colour=settings.colour)
    if oneline:
        return (
            line_of(commit, names.get(commit.id, ()), width=settings.width, colour=settings.colour)
            for commit in commits
        )
    return (  # an empty line between two commits
        "\n".join(
            [
                *([""] if at else []),
                *describe(commit, names.get(commit.id, ()), colour=settings.colour, signature=signed.get(commit.id)),
            ]
        )
        for at, commit in enumerate(commits)
    )


def names_of_commits(repo: Repository) -> dict[str, list[str]]:
    """Id of a commit -> names of its branches, tags ("tag: v1"), pins ("pin: paper") and branches of remotes."""
    names: dict[str, list[str]] = {}
    for name, digest in repo.branches().items():
        names.setdefault(digest, []).append(name)
    for name, digest in repo.tags().items():
        names.setdefault(digest, []).append(f"tag: {name}")
    for pin in repo.pins():
        names.setdefault(pin.commit, []).append(f"pin: {pin.name}")
    for name, digest in repo.remote_branches().items():
        names.setdefault(digest, []).append(name)
    for tier, waiting in repo.unpushed().items():
        for digest in waiting:
            names.setdefault(digest, []).append(f"not at {tier} yet")
    return names


def styled(text: str, colour: str, wanted: bool) -> str:
    """`text`, coloured if that is wanted."""
    return click.style(text, fg=colour) if wanted and text else text


def describe(
    commit: CommitInfo, names: Sequence[str], *, colour: bool = False, signature: SignatureInfo | None = None
) -> list[str]:
    """The lines that show a commit, as `git log` does. Plain list work: a log has thousands."""
    decoration = f" ({', '.join(map(escaped, names))})" if names else ""
    lines = [styled(f"commit {commit.id}", "yellow", colour) + styled(decoration, "green", colour)]
    if commit.forgotten:
        lines[0] += styled(f" {FORGOTTEN}", "red", colour)
    if len(commit.parents) > 1:
        lines.append(f"Merge:   {' '.join(parent[:SHORT_HEX] for parent in commit.parents)}")
    if signature is not None:
        lines.append(f"Signed:  {verdict_text(signature)}")
    lines.append(f"Author:  {escaped(commit.author)}")
    lines.append(f"Date:    {commit.time:%Y-%m-%d %H:%M:%S} UTC")
    if commit.step is not None:
        lines.append(f"Step:    {commit.step}")
    if commit.metrics:
        lines.append(f"Metrics: {shown_metrics(commit.metrics, ', ')}")
    for each in commit.lineage:
        meta = "" if each.meta is None else f" {escaped(repr(each.meta))}"
        lines.append(f"Lineage: {each.kind} {each.target[:SHORT_HEX]}{meta}")
    left_out = commit.meta.get(LEFT_OUT) if isinstance(commit.meta, dict) else None
    if isinstance(left_out, dict):
        lines.append(f"Left out: {escaped(', '.join(map(str, left_out)))}")
    lines.append(f"Size:    {human_bytes(commit.stats.total_bytes)}, {human_bytes(commit.stats.new_bytes)} new")
    if commit.restored_s is not None:
        lines.append(f"Restored: {utc(commit.restored_s)} UTC")
    if commit.message:
        lines.append("")
        lines += [f"    {escaped(line)}".rstrip() for line in commit.message.rstrip().split("\n")]
    return lines


# --- the graph ------------------------------------------------------------------------------


def render_log(
    commits: Iterable[CommitInfo],
    refs: Mapping[str, Sequence[str]] | None = None,
    *,
    width: int | None = None,
    colour: bool = False,
) -> Iterator[str]:
    """The lines of the graph.

    Args:
        refs: Id of a commit -> names of the refs that point at it.
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
        left = None if width is None else width - len(row) - 1
        yield f"{row} {line_of(commit, names.get(commit.id, ()), width=left, colour=colour)}"
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


def line_of(commit: CommitInfo, names: Sequence[str], *, width: int | None = None, colour: bool = False) -> str:
    """One commit in one line: id, names, step, message, metrics; cut at `width` characters."""
    parts = [(commit.short_id, "yellow")]
    if names:
        parts.append((f"({', '.join(map(escaped, names))})", "green"))
    behind = [edge.target[:SHORT_HEX] for edge in commit.lineage if edge.kind == CONTINUED_FROM]
    if behind:
        parts.append((f"(state from {', '.join(behind)})", "red"))
    if commit.step is not None:
        parts.append((f"[{commit.step}]", ""))
    if commit.message:
        parts.append((subject(commit.message), ""))
    if commit.metrics:
        parts.append((shown_metrics(commit.metrics, " "), ""))
    if commit.forgotten:
        parts.append((FORGOTTEN, "red"))
    shown, left = [], width
    for text, shade in parts:
        if left is not None:
            text = cut(text, left)
            left -= len(text) + 1
        shown.append(styled(text, shade, colour and bool(shade)))
        if left is not None and left <= 0:
            break  # as many as have room
    return " ".join(shown)


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
    step, mark = (1, "\\") if start < end else (-1, "/")
    for at in range(start, end, step):
        yield _row(lanes, edge=(2 * at + step, mark))


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
