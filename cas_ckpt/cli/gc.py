"""gc and repack: giving space back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from cas_ckpt.cli.arguments import AGE, SHARE, SIZE
from cas_ckpt.cli.command import verb
from cas_ckpt.cli.output import echo, echo_json, escaped, plain, table
from cas_ckpt.cli.settings import Settings
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.ops.gc_report import GcReport

PARTLY = 3


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    dry = click.option("-n", "--dry-run", is_flag=True, help="Change nothing, say what would be done.")
    limit = click.option("--max-repack-bytes", type=SIZE, metavar="SIZE", help="Copy at most so much, e.g. 20GB.")
    return dry(limit(command))


@verb("gc", examples=["cas-ckpt gc -n", "cas-ckpt gc", "cas-ckpt gc --expire-reflog now --min-age 0"], also=[3, 14])
@click.option("--min-age", default="1h", type=AGE, show_default=True, metavar="AGE",
              help="Spare packs younger than this that no commit uses yet.")  # fmt: skip
@click.option("--expire-reflog", default="30d", type=AGE, show_default=True, metavar="AGE",
              help="How long deleted and moved branches can be brought back.")  # fmt: skip
@click.option("--max-unused", default="5%", type=SHARE, show_default=True, metavar="SHARE",
              help="Waste that may stay inside packs that are needed in part.")  # fmt: skip
@_common
@click.pass_obj
def gc(
    settings: Settings, min_age: float, expire_reflog: float, max_unused: float, max_repack_bytes: int | None,
    dry_run: bool,
) -> int:  # fmt: skip
    """Delete what no branch, tag or pin needs.

    Safe beside any number of commits, checkouts and other collections. What a collection that
    died left is finished first. The exit code is 3 if a pack had to be left because it is damaged, or
    because there was no space to copy what is needed of it.
    """
    with settings.open() as repo:
        report = repo.gc(
            min_age_s=min_age, reflog_expire_s=expire_reflog, max_unused=max_unused,
            max_repack_bytes=max_repack_bytes,
            dry_run=dry_run, progress=settings.show_progress(),
        )  # fmt: skip
    return show_report(settings, report)


@verb("repack", examples=["cas-ckpt repack -n", "cas-ckpt repack --max-repack-bytes 50GB"], also=[3, 14])
@_common
@click.pass_obj
def repack(settings: Settings, max_repack_bytes: int | None, dry_run: bool) -> int:
    """Collect, and rewrite packs that are small, hold waste, or hold chunks in parts."""
    with settings.open() as repo:
        report = repo.repack(
            max_repack_bytes=max_repack_bytes,
            dry_run=dry_run, progress=settings.show_progress(),
        )  # fmt: skip
    return show_report(settings, report)


def show_report(settings: Settings, report: GcReport) -> int:
    """Print what a collection did; its exit code."""
    if settings.json:
        echo_json(plain(report))
    elif not settings.quiet:
        echo(table(_rows(report)))
    for _, problem in report.damaged:
        click.echo(f"cas-ckpt: left as it is: {escaped(problem)}", err=True)
    if report.full:
        click.echo("cas-ckpt: no space for copies: only packs without anything needed were deleted", err=True)
    return PARTLY if report.damaged or report.full else 0


def _rows(report: GcReport) -> Iterator[tuple[str, str]]:
    would = "would be " if report.dry_run else ""
    if report.took_over:
        yield "took over", f"a collection that was left while {report.took_over}"
    yield "not needed", f"{human_bytes(report.dead_bytes)} in {report.dead_objects} objects"
    yield f"{would}deleted", f"{human_bytes(report.deleted_bytes)} in {report.deleted_packs} packs"
    if report.copied_packs:
        yield f"{would}copied", f"{human_bytes(report.copied_bytes)} out of {report.copied_packs} of them"
    if report.rescued_packs:
        yield "kept", f"{report.rescued_packs} packs that a commit needed meanwhile"
    if report.young_packs:
        yield "spared", f"{report.young_packs} packs that a commit under way may need"
    if report.wasted_bytes:
        yield "waste left", human_bytes(report.wasted_bytes)
    if report.temporaries:
        yield f"{would}removed", f"{human_bytes(report.temporary_bytes)} in {report.temporaries} temporary files"
