"""merge-base, reflog, metrics, best, lineage, holders, unique, freed and nearest: questions about history."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cas_ckpt.cli.command import Settings, verb
from cas_ckpt.cli.output import echo, echo_json, escaped, number, subject, table
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.core.records import CommitInfo
    from cas_ckpt.ops.gc.freed import Freed
    from cas_ckpt.ops.history.lineage import LineageStep, NearCommit

NO = 1
"""Exit code of a question whose answer is no."""

_COUNT = click.option("-n", "--max-count", "limit", type=click.IntRange(min=0), metavar="N", help="At most N.")
_NOTHING = "-"


@verb("merge-base", examples=["cas-ckpt merge-base main ft", "cas-ckpt merge-base --is-ancestor v1 main"], also=[15])
@click.argument("revisions", nargs=-1, required=True, metavar="REVISION REVISION...")
@click.option("--all", "every", is_flag=True, help="Print every best common ancestor, not one of them.")
@click.option("--is-ancestor", is_flag=True, help="Only ask whether the second leads to the first: exit code 0 or 1.")
@click.pass_obj
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
            if settings.json:
                echo_json({"is_ancestor": found})
            return 0 if found else NO
        bases = repo.merge_base(*revisions)
    if settings.json:
        echo_json(bases)
    else:
        echo(bases if every else bases[:1])
    return 0 if bases else NO


@verb("reflog", examples=["cas-ckpt reflog", "cas-ckpt reflog ft-math", "cas-ckpt reflog refs/tags/v1"], also=[15])
@click.argument("ref", required=False)
@_COUNT
@click.pass_obj
def reflog(settings: Settings, ref: str | None, limit: int | None) -> None:
    """Show where a branch, tag or pin pointed and who moved it, the latest first; deleted ones too.

    Without REF, the default branch. A ref remembers its last 64 moves besides commits.
    """
    with settings.open() as repo:
        moves = repo.reflog(ref, limit=limit)
    if settings.json:
        echo_json(moves)
        return
    rows = [(_short(move.new), _time(move.time_s), escaped(move.author), escaped(move.action)) for move in moves]
    settings.page(table(rows, width=settings.width))


@verb("metrics", examples=["cas-ckpt metrics", "cas-ckpt metrics main ft --name loss --name acc -n 20"], also=[15])
@click.argument("revisions", nargs=-1, metavar="[REVISION]...")
@click.option("--name", "names", multiple=True, help="Only this metric; may be repeated.")
@click.option("--all", "all_refs", is_flag=True, help="Begin at every branch, tag and pin.")
@_COUNT
@click.pass_obj
def metrics(
    settings: Settings, revisions: tuple[str, ...], names: tuple[str, ...], all_refs: bool, limit: int | None
) -> None:
    """Show the metrics of the commits that the revisions lead to, the youngest first.

    Commits without metrics are left out.
    """
    with settings.open() as repo:
        commits = repo.metrics(revisions, names, all_refs=all_refs, limit=limit)
    columns = names or tuple(sorted({name for commit in commits for name in commit.metrics}))
    if settings.json:
        echo_json([_measured(commit, columns) for commit in commits])
        return
    if commits:
        rows = [["commit", "step", *map(escaped, columns), "message"]]
        rows += [_row(commit, columns) for commit in commits]
        settings.page(table(rows, right=frozenset(range(1, len(columns) + 2)), width=settings.width))


@verb(
    "best",
    examples=["cas-ckpt best loss", "cas-ckpt best acc:max -n 3", "cas-ckpt best loss:min --branch ft-math"],
    also=[15],
)
@click.argument("metric", metavar="METRIC[:min|max]")
@click.option("-n", "--max-count", "limit", type=click.IntRange(min=0), default=1, metavar="N", help="The N best.")
@click.option("-b", "--branch", "branch", metavar="REVISION", help="Only commits that this leads to. Default: all.")
@click.pass_obj
def best(settings: Settings, metric: str, limit: int, branch: str | None) -> None:
    """Show the best commits by a metric: the smallest value, or with :max the largest.

    Nothing is guessed from the name: without :max, smaller is better. Equal values are in order of
    age. Forgotten commits do not count.
    """
    from cas_ckpt.core.units import parse_ranking

    name, largest = parse_ranking(metric)
    with settings.open() as repo:
        found = repo.best(name, largest=largest, limit=limit, ref=branch)
    if settings.json:
        echo_json([_measured(each.commit, (name,)) for each in found])
        return
    if found:
        rows = [["commit", "step", escaped(name), "message"], *(_row(each.commit, (name,)) for each in found)]
        settings.page(table(rows, right=frozenset({1, 2}), width=settings.width))


@verb("lineage", examples=["cas-ckpt lineage", "cas-ckpt lineage ft-math"], also=[15])
@click.argument("revision", default="HEAD")
@click.pass_obj
def lineage(settings: Settings, revision: str) -> None:
    """Show what a state was made from, and what was made from it, step by step.

    Followed are the typed edges that commits were given (fine-tune-of, quantized-from, merged-from
    ...) and the history between them. A base that is in another repository ends a way.
    """
    with settings.open() as repo:
        found = repo.lineage(revision)
    if settings.json:
        echo_json(found)
        return
    echo(_steps(f"{found.commit[:SHORT_HEX]} comes from", found.origins))
    echo(_steps(f"from {found.commit[:SHORT_HEX]} come", found.descendants))


@verb("holders", examples=["cas-ckpt holders main model/wte.weight", "cas-ckpt holders v1 model/head"], also=[15])
@click.argument("revision")
@click.argument("key")
@click.pass_obj
def holders(settings: Settings, revision: str, key: str) -> None:
    """Show which commits hold the very content of the entry KEY of a commit, under whatever key.

    KEY may name a container: then the same names with the same content below it. What is smaller than
    1 KiB has no id of its own and cannot be asked for.
    """
    with settings.open() as repo:
        commits = repo.holders(revision, key)
    if settings.json:
        echo_json([{"id": commit.id, "step": commit.step, "message": commit.message} for commit in commits])
    else:
        settings.page(table([_row(commit, ()) for commit in commits], right=frozenset({1}), width=settings.width))


@verb("unique", examples=["cas-ckpt unique ft-math", "cas-ckpt unique refs/pins/paper"], also=[15])
@click.argument("ref", default="HEAD")
@click.pass_obj
def unique(settings: Settings, ref: str) -> None:
    """Show what only one branch, tag or pin leads to.

    That is what goes if it is deleted, at the first collection after its log has expired.
    """
    with settings.open() as repo:
        found = repo.unique(ref)
    _print_freed(settings, found, f"only {escaped(ref)} leads to")


@verb("freed", examples=["cas-ckpt freed main~10 main~11", "cas-ckpt freed 3fa9c1 --json"], also=[15])
@click.argument("revisions", nargs=-1, required=True, metavar="REVISION...")
@click.pass_obj
def freed(settings: Settings, revisions: tuple[str, ...]) -> None:
    """Show what forgetting these commits would free at the next collection. Nothing is changed."""
    with settings.open() as repo:
        found = repo.freed(*revisions)
    _print_freed(settings, found, "forgetting would free")
    if not settings.json:
        echo(f"{digest[:SHORT_HEX]} would stay: a branch, tag or pin names it" for digest in found.kept)


def _print_freed(settings: Settings, found: Freed, title: str) -> None:
    if settings.json:
        echo_json(found)
        return
    size, stored = human_bytes(found.num_bytes), human_bytes(found.stored_bytes)
    echo(
        [
            f"{title} {len(found.commits)} commits, {size} in {found.num_chunks} chunks and "
            f"{found.num_nodes} nodes, {stored} stored"
        ]
    )


@verb("nearest", examples=["cas-ckpt nearest ft-math", "cas-ckpt nearest --file tuned.safetensors -n 3"], also=[15])
@click.argument("revision", required=False)
@click.option("--file", "path", metavar="PATH", help="A file or folder, as for import, in place of a REVISION.")
@click.option("-n", "--max-count", "limit", type=click.IntRange(min=0), default=5, metavar="N", help="At most N.")
@click.pass_obj
def nearest(settings: Settings, revision: str | None, path: str | None, limit: int) -> None:
    """Show which commits share most bytes with a commit or a file: where its base is.

    A sample is hashed, nothing is written. Of a commit, those of its own history do not count.
    """
    if (revision is None) == (path is None):
        raise click.UsageError("wanted a REVISION, or --file PATH")
    with settings.open() as repo:
        found = repo.nearest(Path(path) if path is not None else str(revision), limit=limit)
    if settings.json:
        echo_json([_near(each) for each in found])
        return
    rows = [[each.commit.short_id, f"{100 * each.share:.1f} %", subject(each.commit.message)] for each in found]
    echo(table(rows, right=frozenset({1})))


def _near(each: NearCommit) -> dict[str, Any]:
    commit = each.commit
    counts = {"num_chunks": each.num_chunks, "num_bytes": each.num_bytes, "share": each.share}
    return {"id": commit.id, "step": commit.step, "message": commit.message} | counts


def _steps(title: str, steps: Sequence[LineageStep]) -> Iterator[str]:
    yield f"{title}{':' if steps else ' nothing that is known'}"
    for step in steps:
        place = "" if step.is_here else " (not in this repository)"
        meta = "" if step.meta is None else f" {escaped(repr(step.meta))}"
        yield f"  {step.commit[:SHORT_HEX]} {step.kind} {step.target[:SHORT_HEX]}{place}{meta}"


def _measured(commit: CommitInfo, names: Sequence[str]) -> dict[str, Any]:
    shown = {name: commit.metrics[name] for name in names if name in commit.metrics}
    return {"id": commit.id, "step": commit.step, "time_s": commit.time_s, "message": commit.message, "metrics": shown}


def _row(commit: CommitInfo, names: Sequence[str]) -> list[str]:
    values = [number(commit.metrics[name]) if name in commit.metrics else _NOTHING for name in names]
    step = _NOTHING if commit.step is None else str(commit.step)
    return [commit.short_id, step, *values, subject(commit.message)]


def _short(digest: str | None) -> str:
    return _NOTHING if digest is None else digest[:SHORT_HEX]


def _time(time_s: float) -> str:
    return f"{datetime.datetime.fromtimestamp(time_s, datetime.UTC):%Y-%m-%d %H:%M:%S}"
