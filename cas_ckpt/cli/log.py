"""log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from cas_ckpt.cli.command import verb
from cas_ckpt.cli.decoration import names_of_commits, styled
from cas_ckpt.cli.output import echo_json, escaped, plain, shown_metrics
from cas_ckpt.cli.settings import Settings
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.ops.records import CommitInfo, Lineage

FORGOTTEN = "[forgotten]"
"""Stands behind a commit whose data nothing keeps."""


@verb(
    "log",
    examples=[
        "cas-ckpt log",
        "cas-ckpt log --oneline --graph --all",
        "cas-ckpt log -n 5 main~10 v1",
        "cas-ckpt log --since 2d --metric 'loss<2.1' --metric 'acc>=0.5'",
        "cas-ckpt log --step 1000:2000 --author ann --key 'model/head/**'",
    ],
    also=[15],
)
@click.argument("revisions", nargs=-1, metavar="[REVISION]...")
@click.option("-n", "--max-count", "limit", type=click.IntRange(min=0), metavar="N", help="At most N commits.")
@click.option("--oneline", is_flag=True, help="One line for each commit.")
@click.option("--graph", is_flag=True, help="Draw the history; one line for each commit.")
@click.option("--all", "all_refs", is_flag=True, help="Begin at every branch, tag and pin.")
@click.option("--first-parent", is_flag=True, help="Follow only the first parent of merges.")
@click.option("--since", metavar="TIME", help="Not older: 2026-11-21, 2026-11-21T14:30, 3h, '2 days ago'.")
@click.option("--until", metavar="TIME", help="Not younger; a day alone is taken whole.")
@click.option("--metric", "where", multiple=True, metavar="TEXT", help="'loss<2.1' (< <= > >= == !=); all hold.")
@click.option("--author", metavar="TEXT", help="A part of the author's name, or a pattern of the whole.")
@click.option("--step", metavar="N|A:B", help="This step, or a range with both ends in it.")
@click.option("-k", "--key", "keys", multiple=True, metavar="PATTERN", help="Entries that match were changed.")
@click.pass_obj
def log(
    settings: Settings,
    /,
    revisions: tuple[str, ...],
    limit: int | None,
    oneline: bool,
    graph: bool,
    all_refs: bool,
    first_parent: bool,
    **conditions: Any,
) -> None:
    """Show the commits that the revisions lead to, the youngest first.

    Without a revision, those of the default branch. Conditions leave commits out; -n counts those
    that are shown. Times are UTC unless they say another offset. An entry counts as changed if it is
    not what it was in the first parent. Forgotten commits, whose data is gone, are marked.
    """
    conditions["keys"] = conditions["keys"] or None
    with settings.open() as repo:
        commits = repo.log(revisions, limit=limit, all_refs=all_refs, first_parent=first_parent, **conditions)
        names = names_of_commits(repo)
        whole = None
        if graph and any(conditions.values()) and not settings.json:
            whole = repo.log(revisions, all_refs=all_refs, first_parent=first_parent)
    if settings.json:
        echo_json([plain(commit) | {"refs": list(names.get(commit.id, ()))} for commit in commits])
        return
    if not commits and limit != 0 and not settings.quiet:
        click.echo("no such commits" if any(conditions.values()) else "no commits yet", err=True)
    if whole is not None:
        from cas_ckpt.cli.graph import thinned

        commits = thinned(whole, commits)
    settings.page(_lines(settings, commits, names, oneline=oneline, graph=graph))


def _lines(
    settings: Settings, commits: Sequence[CommitInfo], names: Mapping[str, Sequence[str]], *, oneline: bool, graph: bool
) -> Iterator[str]:
    from cas_ckpt.cli.graph import oneline as one_line
    from cas_ckpt.cli.graph import render_log

    if graph:
        return render_log(commits, names, width=settings.width, colour=settings.colour)
    if oneline:
        return (
            one_line(commit, names.get(commit.id, ()), width=settings.width, colour=settings.colour)
            for commit in commits
        )
    return _blocks(commits, names, colour=settings.colour)


def _blocks(commits: Sequence[CommitInfo], names: Mapping[str, Sequence[str]], *, colour: bool) -> Iterator[str]:
    """One text per commit, an empty line between two."""
    end = ""
    for commit in commits:
        yield end + "\n".join(describe(commit, names.get(commit.id, ()), colour=colour))
        end = "\n"


def describe(commit: CommitInfo, names: Sequence[str], *, colour: bool = False) -> list[str]:
    """The lines that show a commit, as `git log` does. Plain list work: a log has thousands."""
    decoration = f" ({', '.join(map(escaped, names))})" if names else ""
    lines = [styled(f"commit {commit.id}", "yellow", colour) + styled(decoration, "green", colour)]
    if commit.forgotten:
        lines[0] += styled(f" {FORGOTTEN}", "red", colour)
    if len(commit.parents) > 1:
        lines.append(f"Merge:   {' '.join(parent[:SHORT_HEX] for parent in commit.parents)}")
    lines.append(f"Author:  {escaped(commit.author)}")
    lines.append(f"Date:    {commit.time:%Y-%m-%d %H:%M:%S} UTC")
    if commit.step is not None:
        lines.append(f"Step:    {commit.step}")
    if commit.metrics:
        lines.append(f"Metrics: {shown_metrics(commit.metrics, ', ')}")
    lines += [f"Lineage: {lineage_line(each)}" for each in commit.lineage]
    lines.append(f"Size:    {human_bytes(commit.stats.total_bytes)}, {human_bytes(commit.stats.new_bytes)} new")
    if commit.message:
        lines.append("")
        lines += [f"    {escaped(line)}".rstrip() for line in commit.message.rstrip().split("\n")]
    return lines


def lineage_line(lineage: Lineage) -> str:
    """One edge: its kind, where it leads, and what the user said about it."""
    meta = "" if lineage.meta is None else f" {escaped(repr(lineage.meta))}"
    return f"{lineage.kind} {lineage.target[:SHORT_HEX]}{meta}"
