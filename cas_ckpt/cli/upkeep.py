"""init, status, index rebuild and store check: the repository as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import click

from cas_ckpt.cli.command import SIZE, Settings, verb
from cas_ckpt.cli.log import line_of
from cas_ckpt.cli.output import escaped, plain, table, utc
from cas_ckpt.cli.show import left_over
from cas_ckpt.core.protocol import GcPhase
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.ops.history.usage import RepositoryStatus


@verb("init", examples=["cas-ckpt init runs/ckpts", "cas-ckpt init --branch trunk /data/llm"], also=[14])
@click.argument("path", required=False, metavar="[REPO]")
@click.option("-b", "--branch", default="main", show_default=True, metavar="NAME", help="The default branch.")
@click.option("--encoding", metavar="NAME", help="How new chunks are stored; ids do not depend on it.")
@click.option("--pack-size", type=SIZE, help="Length at which a pack is closed, e.g. 512MB.")
@click.pass_obj
def init(settings: Settings, path: str | None, branch: str, encoding: str | None, pack_size: int | None) -> None:
    """Make a new, empty repository in a folder that is empty or not there yet.

    REPO is a path or a URL; without it, -C or the working directory is meant.
    """
    from cas_ckpt.repository import Repository

    place = path or settings.repo or "."
    with Repository.init(place, default_branch=branch, encoding=encoding, pack_bytes=pack_size) as repo:
        made = {"url": repo.url, "default_branch": repo.default_branch}
        settings.say(made, f"Made an empty repository in {place} (branch {branch})")


MOST_NAMES = 8
"""Names of one kind that a line lists; `cas-ckpt branch`, `tag` and `pin` list all of them."""

_PHASES: dict[str, str] = {GcPhase.CONDEMNED: "has chosen", GcPhase.DELETING: "is deleting"}


@verb("status", examples=["cas-ckpt status", "cas-ckpt status --json"], also=[15])
@click.pass_obj
def status(settings: Settings) -> None:
    """Show the default branch and its head, other names, commits under way, what gc has to do.

    What a training process has checked out is known to that process alone (repo.head in Python).
    A commit is listed as under way when it has taken half a minute.
    """
    with settings.open() as repo:
        found = repo.status()
    shown = plain(found)
    del shown["head"]  # of this process, which has no live state
    width = None if settings.width is None else settings.width - len("Branches:  ")
    commit = "no commits yet" if found.commit is None else line_of(found.commit, (), width=width)
    settings.show(shown, [f"On branch {escaped(found.default_branch)}", *table([("Head:", commit), *_lines(found)])])


def _lines(found: RepositoryStatus) -> Iterator[tuple[str, str]]:
    others = {name: commit for name, commit in found.branches.items() if name != found.default_branch}
    for label, names in (("Branches:", others), ("Tags:", found.tags), ("Pins:", found.pins)):
        if names:
            yield label, _listed(names)
    for session in found.sessions:
        where = f"process {session.process} on {escaped(session.host)}" if session.host else "a later version"
        yield "Writing:", f"{where}, since {utc(session.started_s)} UTC"
    if found.gc_phase in _PHASES:
        what = f"collection {found.gc_generation} {_PHASES[found.gc_phase]} {found.num_condemned} packs"
        yield "gc:", f"{what}; if its process died, cas-ckpt gc goes on with it"
    if found.num_forgotten:
        yield "Forgotten:", f"{found.num_forgotten} commits"
    if found.num_temporaries:
        yield "Left over:", left_over(found)


def _listed(names: Mapping[str, str]) -> str:
    """How many, and the first of them."""
    shown = ", ".join(map(escaped, list(names)[:MOST_NAMES]))
    more = len(names) - MOST_NAMES
    return f"{len(names)} ({shown}{f' and {more} more' if more > 0 else ''})"


PARTLY = 3
FAILED = 1


@click.group("index")
def index() -> None:
    """The index: a database of what is in the packs. It can always be made anew."""


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
    from cas_ckpt.ops.fsck.rebuild import rebuild_index

    report = rebuild_index(settings.place(), index_url=settings.index, progress=settings.show_progress())
    stats = report.stats
    numbers = ("num_packs", "pack_bytes", "num_commits", "num_missing")
    damaged = [{"pack": pack, "problem": problem} for pack, problem in report.damaged]
    found = {name: getattr(stats, name) for name in numbers} | {"damaged": damaged}
    size = human_bytes(stats.pack_bytes)
    settings.say(found, f"Indexed {stats.num_packs} packs ({size}) with {stats.num_commits} commits")
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
    found = [{"name": one.name, "outcome": one.outcome.value, "detail": one.detail} for one in results]
    settings.say(found, f"{len(results)} rules, {failed} broken")
    return FAILED if failed else 0


index.add_command(rebuild)
store.add_command(check)
