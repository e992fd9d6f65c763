"""index rebuild and store check."""

from __future__ import annotations

import click

from cas_ckpt.cli.command import verb
from cas_ckpt.cli.output import echo_json, escaped
from cas_ckpt.cli.settings import Settings
from cas_ckpt.progress import human_bytes

PARTLY = 3
FAILED = 1


@click.group("index")
def index() -> None:
    """The index: a database of what lies in the packs. It can always be made anew."""


@click.group("store")
def store() -> None:
    """Storage: where the packs and refs of a repository are kept."""


@verb("rebuild", examples=["cas-ckpt index rebuild", "cas-ckpt -C /data/llm index rebuild"], also=[PARTLY])
@click.pass_obj
def rebuild(settings: Settings) -> int:
    """Drop the index, damaged or not, and make it anew from the packs.

    Nothing else is touched and nothing is lost: the index holds nothing that the packs do not
    hold. Packs that are damaged are named; then the exit code is 3.
    """
    from cas_ckpt.ops.rebuild import rebuild_index

    report = rebuild_index(settings.place(), index_url=settings.index, progress=settings.show_progress())
    stats = report.stats
    if settings.json:
        echo_json(
            {
                "num_packs": stats.num_packs,
                "pack_bytes": stats.pack_bytes,
                "num_commits": stats.num_commits,
                "num_missing": stats.num_missing,
                "damaged": [{"pack": pack, "problem": problem} for pack, problem in report.damaged],
            }
        )
    elif not settings.quiet:
        size = human_bytes(stats.pack_bytes)
        click.echo(f"Indexed {stats.num_packs} packs ({size}) with {stats.num_commits} commits")
    for _, problem in report.damaged:
        click.echo(f"cas-ckpt: damaged: {escaped(problem)}", err=True)
    return PARTLY if report.damaged else 0


@verb("check", examples=["cas-ckpt store check /mnt/nfs/try", "cas-ckpt store check memory://"])
@click.argument("url")
@click.pass_obj
def check(settings: Settings, url: str) -> int:
    """Try whether the storage at URL keeps the rules that commits rely on.

    Writes and deletes keys of its own there, and leaves all others alone. The exit code is 1 if a
    rule is broken.
    """
    from cas_ckpt.storage.url import open_store
    from cas_ckpt.testing import CheckResult, Outcome, run_store_checks

    def show(result: CheckResult) -> None:
        if not settings.json and not (settings.quiet and result.ok):
            detail = f": {escaped(result.detail)}" if result.detail else ""
            click.echo(f"{result.outcome.value:8}{result.name}{detail}")

    results = run_store_checks(open_store(url), progress=show)
    failed = sum(result.outcome is Outcome.FAILED for result in results)
    if settings.json:
        echo_json([{"name": r.name, "outcome": r.outcome.value, "detail": r.detail} for r in results])
    elif not settings.quiet:
        click.echo(f"{len(results)} rules, {failed} broken")
    return FAILED if failed else 0


index.add_command(rebuild)
store.add_command(check)
