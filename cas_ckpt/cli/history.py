"""merge-base, reflog, metrics, best, lineage, holders, unique, freed, nearest and sql: questions about history."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cas_ckpt.cli.command import Pair, Settings, flag, limit_option, verb
from cas_ckpt.cli.output import MOST_METRICS, echo, escaped, number, subject, summary, table, utc
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.core.records import CommitInfo
    from cas_ckpt.ops.history.lineage import LineageStep
    from cas_ckpt.ops.history.sql import SqlResult
    from cas_ckpt.ops.retention.forget import Freed


NO = 1
"""Exit code of a question whose answer is no."""

_NOTHING = "-"


@verb("merge-base", examples=["cas-ckpt merge-base main ft", "cas-ckpt merge-base --is-ancestor v1 main"], also=[15])
@click.argument("revisions", nargs=-1, required=True, metavar="REVISION REVISION...")
@flag("--all", "every", help="Print every best common ancestor, not one of them.")
@flag("--is-ancestor", help="Only ask whether the second leads to the first: exit code 0 or 1.")
def merge_base(settings: Settings, revisions: tuple[str, ...], every: bool, is_ancestor: bool) -> int:
    """Print where the histories of commits meet: the best common ancestor.

    With more than two, the first is compared with what a merge of the others would lead to, as in
    git. The exit code is 1 if there is none.
    """
    if len(revisions) < 2 or (is_ancestor and len(revisions) != 2):
        raise click.UsageError("wanted two revisions" if is_ancestor else "wanted two revisions or more")
    with settings.open() as repo:
        if is_ancestor:
            found = repo.is_ancestor(*revisions)
            settings.show({"is_ancestor": found}, ())
            return 0 if found else NO
        bases = repo.merge_base(*revisions)
    settings.show(bases, bases if every else bases[:1])
    return 0 if bases else NO


@verb("reflog", examples=["cas-ckpt reflog", "cas-ckpt reflog ft-math", "cas-ckpt reflog refs/tags/v1"], also=[15])
@click.argument("ref", required=False)
@limit_option()
def reflog(settings: Settings, ref: str | None, limit: int | None) -> None:
    """Show where a branch, tag or pin pointed and who moved it, the latest first; deleted ones too.

    Without REF, the default branch. A ref remembers its last 64 moves besides commits.
    """
    with settings.open() as repo:
        moves = repo.reflog(ref, limit=limit)
    rows = [
        (
            _NOTHING if move.new is None else move.new[:SHORT_HEX],
            utc(move.time_s),
            *map(escaped, (move.author, move.action)),
        )
        for move in moves
    ]
    settings.page(moves, table(rows, width=settings.width))


@verb("metrics", examples=["cas-ckpt metrics", "cas-ckpt metrics main ft --name loss --name acc -n 20"], also=[15])
@click.argument("revisions", nargs=-1, metavar="[REVISION]...")
@click.option("--name", "names", multiple=True, help="Only this metric; may be repeated.")
@flag("--all", "all_refs", help="Begin at every branch, tag and pin.")
@limit_option()
def metrics(
    settings: Settings, revisions: tuple[str, ...], names: tuple[str, ...], all_refs: bool, limit: int | None
) -> None:
    """Show the metrics of the commits that the revisions lead to, the youngest first.

    Commits without metrics are left out.
    """
    with settings.open() as repo:
        commits = repo.metrics(revisions, names, all_refs=all_refs, limit=limit)
    columns = names or tuple(sorted({name for commit in commits for name in commit.metrics}))
    _page_metrics(settings, commits, columns, shown=columns if names else columns[:MOST_METRICS])
    if not settings.json and not names and len(columns) > MOST_METRICS:
        click.echo(f"{len(columns) - MOST_METRICS} more metrics: --name NAME shows one, --json all", err=True)


@verb(
    "best",
    examples=["cas-ckpt best loss", "cas-ckpt best acc:max -n 3", "cas-ckpt best loss:min --branch ft-math"],
    also=[15],
)
@click.argument("metric", metavar="METRIC[:min|max]")
@limit_option("The N best.", default=1)
@click.option("-b", "--branch", "branch", metavar="REVISION", help="Only commits that this leads to. Default: all.")
def best(settings: Settings, metric: str, limit: int, branch: str | None) -> None:
    """Show the best commits by a metric: the smallest value, or with :max the largest.

    Nothing is guessed from the name: without :max, smaller is better. Equal values are in order of
    age. Forgotten commits do not count.
    """
    from cas_ckpt.core.units import parse_ranking

    name, largest = parse_ranking(metric)
    with settings.open() as repo:
        found = repo.best(name, largest=largest, limit=limit, ref=branch)
    _page_metrics(settings, [each.commit for each in found], (name,), shown=(name,))


def _page_metrics(
    settings: Settings, commits: Sequence[CommitInfo], names: Sequence[str], *, shown: Sequence[str]
) -> None:
    found = [
        summary(
            commit,
            time_s=commit.time_s,
            metrics={name: commit.metrics[name] for name in names if name in commit.metrics},
        )
        for commit in commits
    ]
    rows = [["commit", "step", *map(escaped, shown), "message"]] if commits else []
    rows += [_row(commit, shown) for commit in commits]
    settings.page(found, table(rows, right=frozenset(range(1, len(shown) + 2)), width=settings.width))


def _row(commit: CommitInfo, names: Sequence[str]) -> list[str]:
    values = [number(commit.metrics[name]) if name in commit.metrics else _NOTHING for name in names]
    step = _NOTHING if commit.step is None else str(commit.step)
    return [commit.short_id, step, *values, subject(commit.message)]


@verb("lineage", examples=["cas-ckpt lineage", "cas-ckpt lineage ft-math"], also=[15])
@click.argument("revision", default="HEAD")
def lineage(settings: Settings, revision: str) -> None:
    """Show what a state was made from, and what was made from it, step by step.

    Followed are the typed edges that commits were given (fine-tune-of, quantized-from, merged-from
    ...) and the history between them. A base that is in another repository ends a way.
    """
    with settings.open() as repo:
        found = repo.lineage(revision)
    short = found.commit[:SHORT_HEX]
    lines = (*_steps(f"{short} comes from", found.origins), *_steps(f"from {short} come", found.descendants))
    settings.show(found, lines)


def _steps(title: str, steps: Sequence[LineageStep]) -> Iterator[str]:
    yield f"{title}{':' if steps else ' nothing that is known'}"
    for step in steps:
        place = "" if step.is_here else " (not in this repository)"
        meta = "" if step.meta is None else f" {escaped(repr(step.meta))}"
        yield f"  {step.commit[:SHORT_HEX]} {step.kind} {step.target[:SHORT_HEX]}{place}{meta}"


@verb("holders", examples=["cas-ckpt holders main model/wte.weight", "cas-ckpt holders v1 model/head"], also=[15])
@click.argument("revision")
@click.argument("key")
def holders(settings: Settings, revision: str, key: str) -> None:
    """Show which commits hold the very content of the entry KEY of a commit, under whatever key.

    KEY may name a container: then the same names with the same content below it. What is smaller than
    1 KiB has no id of its own and cannot be asked for.
    """
    with settings.open() as repo:
        commits = repo.holders(revision, key)
    rows = [_row(commit, ()) for commit in commits]
    settings.page([summary(commit) for commit in commits], table(rows, right=frozenset({1}), width=settings.width))


@verb("unique", examples=["cas-ckpt unique ft-math", "cas-ckpt unique refs/pins/paper"], also=[15])
@click.argument("ref", default="HEAD")
@flag("--with-remotes", help="Remote-tracking branches (origin/main) hold what they lead to.")
def unique(settings: Settings, ref: str, with_remotes: bool) -> None:
    """Show what only one branch, tag or pin leads to.

    Remote-tracking branches do not count, or nothing were unique to a branch that was pushed. With
    --with-remotes they do: then it is what goes if the ref is deleted, at the first collection after
    its log has expired.
    """
    with settings.open() as repo:
        found = repo.unique(ref, with_remotes=with_remotes)
    _print_freed(settings, found, f"only {escaped(ref)} leads to")


@verb("freed", examples=["cas-ckpt freed main~10 main~11", "cas-ckpt freed 3fa9c1 --json"], also=[15])
@click.argument("revisions", nargs=-1, required=True, metavar="REVISION...")
def freed(settings: Settings, revisions: tuple[str, ...]) -> None:
    """Show what forgetting these commits would free at the next collection. Nothing is changed."""
    with settings.open() as repo:
        found = repo.freed(*revisions)
    _print_freed(settings, found, "forgetting would free")
    if not settings.json:
        echo(f"{digest[:SHORT_HEX]} would stay: a branch, tag or pin names it" for digest in found.kept)


def _print_freed(settings: Settings, found: Freed, title: str) -> None:
    line = (
        f"{title} {len(found.commits)} commits, {human_bytes(found.num_bytes)} in {found.num_chunks} chunks and "
        f"{found.num_nodes} nodes, {human_bytes(found.stored_bytes)} stored"
    )
    settings.show(found, [line])


@verb("nearest", examples=["cas-ckpt nearest ft-math", "cas-ckpt nearest --file tuned.safetensors -n 3"], also=[15])
@click.argument("revision", required=False)
@click.option("--file", "path", metavar="PATH", help="A file or folder, as for import, in place of a REVISION.")
@limit_option(default=5)
def nearest(settings: Settings, revision: str | None, path: str | None, limit: int) -> None:
    """Show which commits share most bytes with a commit or a file: where its base is.

    A sample is compared, nothing is written. Of a commit, those of its own history do not count.
    """
    if (revision is None) == (path is None):
        raise click.UsageError("wanted a REVISION, or --file PATH")
    with settings.open() as repo:
        found = repo.nearest(Path(path) if path is not None else str(revision), limit=limit)
    rows = [[each.commit.short_id, f"{100 * each.share:.1f} %", subject(each.commit.message)] for each in found]
    shared = [
        summary(each.commit, num_chunks=each.num_chunks, num_bytes=each.num_bytes, share=each.share) for each in found
    ]
    settings.show(shared, table(rows, right=frozenset({1})))


_STDIN = "-"


@verb(
    "sql",
    examples=[
        "cas-ckpt sql 'SELECT name, kind, commit_id FROM refs'",
        'cas-ckpt sql "SELECT key, num_bytes FROM refs r JOIN entries USING (commit_no) WHERE r.name = :r" -p r=main',
        "cas-ckpt sql --csv 'SELECT * FROM commits'",
        "cas-ckpt sql --views",
    ],
)
@click.argument("query", required=False)
@click.option(
    "-p",
    "--parameter",
    "parameters",
    type=Pair("NAME=VALUE"),
    multiple=True,
    metavar="NAME=VALUE",
    help='The value of :NAME in the query. JSON numbers, null and "text" are that, all else is text. May be repeated.',
)
@flag("--csv", "as_csv", help="Print CSV.")
@flag("--views", "list_views", help="Print the views and their columns instead; no repository is needed.")
@click.option("--max-rows", type=click.IntRange(min=1), default=1_000_000, metavar="N", help="More rows are an error.")
@click.option("--max-bytes", type=click.IntRange(min=1), default=1 << 28, metavar="N", help="So are more bytes.")
@click.option("--timeout", "timeout_s", type=float, default=60.0, metavar="SECONDS", help="And more time.")
def sql(
    settings: Settings, query: str | None, parameters: tuple[tuple[str, str], ...], as_csv: bool, list_views: bool,
    max_rows: int, max_bytes: int, timeout_s: float,
) -> None:  # fmt: skip
    """Ask the index in SQL: one query over its views, read-only. With - it is read from standard input.

    --views lists the views and their columns; docs/sql.md has questions to begin with. The dialect is that of the
    index: SQLite, or PostgreSQL where --index says so. With --json each row is an object. Bytes are shown in
    hexadecimal.
    """
    if as_csv and settings.json:
        raise click.UsageError("--csv or --json, not both")
    if list_views != (query is None):
        raise click.UsageError("wanted a QUERY, or --views")
    if query is None:
        _print_views(settings)
        return
    text = sys.stdin.read() if query == _STDIN else query
    given = {name: _value(value) for name, value in parameters}
    if len(given) < len(parameters):
        raise click.UsageError("a parameter is given twice")
    with settings.open() as repo:
        found = repo.sql(text, given, max_rows=max_rows, max_bytes=max_bytes, timeout_s=timeout_s)
    if as_csv:
        click.echo(_csv(found, is_terminal=settings.width is not None), nl=False)
        return
    rows = None
    if settings.json:  # bytes as a table and CSV show them
        rows = [
            {name: value.hex() if isinstance(value, bytes) else value for name, value in row.items()}
            for row in found.to_dicts()
        ]
    numbers = [at for at in range(len(found.columns)) if all(isinstance(row[at], (int, float)) for row in found)]
    cells = [tuple(map(escaped, found.columns)), *(tuple(map(_cell, row)) for row in found)]
    settings.page(rows, table(cells, right=frozenset(numbers if len(found) else ()), width=settings.width))


def _print_views(settings: Settings) -> None:
    from cas_ckpt.index.views import VIEWS

    shown = [
        {
            "view": view.name,
            "about": view.about,
            "columns": [{"name": each.name, "kind": each.kind, "about": each.about} for each in view.columns],
        }
        for view in VIEWS
    ]
    lines = [("view", "column", "kind", "what"), ("", "", "", "")]
    for view in VIEWS:
        lines += [(view.name, "", "", f"a row for {view.about}")]
        lines += [("", each.name, each.kind, each.about) for each in view.columns]
    settings.page(shown, table(lines, width=settings.width))


def _value(text: str) -> Any:
    """A parameter: a number, null or quoted text of JSON; all else is text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if value is None or isinstance(value, (int, float, str)) else text


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return value.hex() if isinstance(value, bytes) else escaped(str(value))


def _csv(found: SqlResult, *, is_terminal: bool) -> str:
    """The answer as CSV: nothing for null, bytes in hexadecimal. A terminal gets no control characters."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(found.columns)
    for row in found:
        writer.writerow([value.hex() if isinstance(value, bytes) else value for value in row])
    text = out.getvalue()
    return "\n".join(map(escaped, text.split("\n"))) if is_terminal else text
