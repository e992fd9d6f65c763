"""fsck: look for damage, and repair it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from cas_ckpt.cli.command import AGE, Pair, Settings, flag, verb
from cas_ckpt.cli.output import escaped, plain
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.ops.fsck.report import Effect, RepairKind
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.ops.fsck.report import FsckReport, Hit, Problem, RepairAction, RepairReport

DAMAGED = 13
PARTLY = 3

MOST_COMMITS = 10
MOST_KEYS = 8
"""Commits, and keys of each, that are named on a terminal; --json names all."""


@verb(
    "fsck",
    examples=[
        "cas-ckpt fsck",
        "cas-ckpt fsck --read-data --max-age 30d --max-duration 2h",
        "cas-ckpt fsck --read-data-subset 1/7",
        "cas-ckpt fsck --repair packs -n",
        "cas-ckpt fsck --repair chunks --from /backup/ckpts",
        "cas-ckpt fsck --repair refs --ref main=3fa9c1d2",
    ],
    also=[PARTLY, 14, 15],
)
@flag("--read-data", help="Read and verify every byte, not only the structure.")
@click.option("--read-data-subset", "subset", metavar="PART", help="Read a part: 5%, 2/7 (second of seven), 10GB.")
@click.option("--max-duration", type=AGE, help="Begin to read no pack after so long.")
@click.option("--max-age", type=AGE, help="Pass over packs that were read, and found intact, since then.")
@click.option(
    "--repair",
    "kinds",
    multiple=True,
    type=click.Choice([kind.value for kind in RepairKind]),
    help="Repair this. May be repeated.",
)
@click.option("--from", "sources", multiple=True, metavar="OTHER", help="Take what is lost from this repository.")
@click.option("--ref", "refs", multiple=True, type=Pair("NAME=REVISION"), help="What a damaged ref is to name.")
@flag("-n", "--dry-run", help="With --repair: say what would be done.")
@click.pass_obj
def fsck(
    settings: Settings, read_data: bool, subset: str | None, max_duration: float | None, max_age: float | None,
    kinds: tuple[str, ...], sources: tuple[str, ...], refs: tuple[tuple[str, str], ...], dry_run: bool,
) -> int:  # fmt: skip
    """Check that all that commits need is there and intact; name what damage hits, and repair it.

    Without options, the structure: records, packs, nodes, and that the index agrees. Each problem
    names the commits, refs and keys that it hits, and the command that repairs it; then the exit
    code is 13. Repairs write and verify before they move anything aside, into damaged/.
    """
    if kinds:
        if subset is not None or max_duration is not None or max_age is not None:
            raise click.UsageError("--repair reads what it needs: of the reading options it takes only --read-data")
        return _repair(settings, kinds, sources, dict(refs), read_data=read_data, dry_run=dry_run)
    if sources or refs or dry_run:
        raise click.UsageError("--from, --ref and --dry-run go with --repair")
    return _check(settings, read_data=read_data, subset=subset, max_duration=max_duration, max_age=max_age)


def _check(
    settings: Settings, *, read_data: bool, subset: str | None, max_duration: float | None, max_age: float | None
) -> int:
    from cas_ckpt.ops.fsck.check import check_url
    from cas_ckpt.ops.fsck.data import DataOptions, parse_subset

    part = None if subset is None else parse_subset(subset)
    data = DataOptions(part, max_duration, max_age) if read_data or subset is not None else None
    if data is None and (max_duration is not None or max_age is not None):
        raise click.UsageError("--max-duration and --max-age go with --read-data or --read-data-subset")
    progress = settings.show_progress()
    report = check_url(settings.place(), data, index_url=settings.index, progress=progress)
    found = {**plain(report), "ok": report.ok, "commands": report.commands}
    settings.show(found, _lines(report, quiet=settings.quiet))
    return 0 if report.ok else DAMAGED


def _lines(report: FsckReport, *, quiet: bool) -> Iterator[str]:
    for problem in report.problems:
        yield from _problem(problem)
    if report.commands:
        yield "To repair, in this order:"
        yield from (f"    {escaped(command)}" for command in report.commands)
    if quiet:
        return
    yield from (f"note: {escaped(note.where)}: {escaped(note.what)}" for note in report.notes)
    yield (
        f"{report.num_commits} commits, {report.num_refs} refs, {report.num_packs} packs with {report.num_entries} "
        f"entries, {report.num_nodes} nodes verified"
    )
    if report.read_packs or report.skipped_packs:
        skipped = f", {report.skipped_packs} not" if report.skipped_packs else ""
        yield f"{report.read_packs} packs read whole ({human_bytes(report.read_bytes)}){skipped}"
    found = len(report.problems)
    unread = "" if report.read_packs or report.skipped_packs else " (tensors' data was not read: --read-data does)"
    yield f"no damage found{unread}" if report.ok else f"{found} problem{'s' if found > 1 else ''} found{unread}"


def _problem(problem: Problem) -> Iterator[str]:
    yield f"{problem.kind}: {escaped(problem.where)}: {escaped(problem.what)}"
    yield f"    {_meaning(problem)}"
    if problem.refs:
        yield f"    under {', '.join(map(escaped, problem.refs))}"
    for hit in problem.hits[:MOST_COMMITS]:
        yield f"    commit {hit.commit[:SHORT_HEX]}: {_keys(hit)}"
    if len(problem.hits) > MOST_COMMITS:
        yield f"    and {len(problem.hits) - MOST_COMMITS} more commits (--json names all)"


def _meaning(problem: Problem) -> str:
    count = len(problem.hits)
    commits = f"{count} commit{'' if count == 1 else 's'}"
    if problem.effect is Effect.LOST:
        return f"LOST: no intact copy here of {len(problem.objects) or 'some'} objects; hits {commits}"
    if problem.effect is Effect.AT_RISK:
        return f"AT RISK: nothing is lost yet, repair it soon{f'; concerns {commits}' if count else ''}"
    return "harmless: nothing that is needed depends on it alone"


def _keys(hit: Hit) -> str:
    more = len(hit.keys) - MOST_KEYS
    return ", ".join(map(escaped, hit.keys[:MOST_KEYS])) + (f" and {more} more" if more > 0 else "")


def _repair(
    settings: Settings, kinds: Sequence[str], sources: Sequence[str], refs: dict[str, str], *, read_data: bool,
    dry_run: bool,
) -> int:  # fmt: skip
    from cas_ckpt.ops.fsck.repair import parse_kinds, repair_url
    from cas_ckpt.ops.fsck.report import RepairRequest

    request = RepairRequest(parse_kinds(kinds), tuple(sources), refs, read_data, dry_run)
    progress = settings.show_progress()
    report = repair_url(settings.place(), request, index_url=settings.index, progress=progress)
    settings.show({**plain(report), "ok": report.ok}, _repaired(report, quiet=settings.quiet))
    return 0 if report.ok else PARTLY


def _repaired(report: RepairReport, *, quiet: bool) -> Iterator[str]:
    would = "would be repaired" if report.dry_run else "repaired"
    if not quiet:
        yield from (f"{would}: {_described(action)}" for action in report.actions)
        if not report.actions and not report.left:
            yield "nothing to repair"
    yield from (f"not repaired: {_described(action)}" for action in report.left)


def _described(action: RepairAction) -> str:
    return f"{action.kind}: {escaped(action.where)}: {escaped(action.what)}"
