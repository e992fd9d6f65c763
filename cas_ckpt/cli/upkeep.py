"""init, status, index rebuild, set and roles, store check, cache and fsck: the repository as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args

import click

from cas_ckpt.arguments import RepairKind
from cas_ckpt.cli.command import AGE, SIZE, Pair, Settings, flag, shard_option, verb, verb_group
from cas_ckpt.cli.log import line_of
from cas_ckpt.cli.output import escaped, plain, table, utc
from cas_ckpt.cli.refs import standing
from cas_ckpt.cli.show import left_over
from cas_ckpt.core.config import EMULATED
from cas_ckpt.core.host_cache import HostCache
from cas_ckpt.core.protocol import GcPhase
from cas_ckpt.core.units import parse_shard
from cas_ckpt.errors import NotFoundError
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.ops.fsck.report import Effect
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.ops.fsck.report import FsckReport, Problem, RepairAction, RepairReport
    from cas_ckpt.ops.history.usage import RepositoryStatus


PARTLY = 3
FAILED = 1
DAMAGED = 13


@verb("init", examples=["cas-ckpt init runs/ckpts", "cas-ckpt init --branch trunk /data/llm"], also=[14])
@click.argument("path", required=False, metavar="[REPO]")
@click.option(
    "-b", "--branch", "default_branch", default="main", show_default=True, metavar="NAME", help="The default branch."
)
@click.option("--encoding", metavar="NAME", help="How new chunks are stored; ids do not depend on it.")
@click.option("--pack-size", "pack_bytes", type=SIZE, help="Length at which a pack is closed, e.g. 512MB.")
@click.option("--single-writer", is_flag=True, help="Accept a store that ignores conditions: one writer at a time.")
def init(settings: Settings, /, path: str | None, **options: Any) -> None:
    """Make a new, empty repository in a folder that is empty or not there yet.

    REPO is a path or a URL; without it, -C or the working directory is meant.
    """
    from cas_ckpt.repository import Repository

    place = path or settings.repo or "."
    with Repository.init(place, **options, index_url=settings.index) as repo:
        made = {"url": repo.url, "default_branch": repo.default_branch}
        settings.say(made, f"Made an empty repository in {place} (branch {options['default_branch']})")


MOST_NAMES = 8
"""Names of one kind that a line lists; `cas-ckpt branch`, `tag` and `pin` list all of them."""

_PHASES: dict[str, str] = {GcPhase.CONDEMNED: "has chosen", GcPhase.DELETING: "is deleting"}


@verb("status", examples=["cas-ckpt status", "cas-ckpt status --json"], also=[15])
def status(settings: Settings) -> None:
    """Show the default branch and its head, other names, commits under way, what gc has to do.

    What a training process has checked out is known to that process alone (repo.head in Python).
    A commit is listed as under way when it has taken half a minute.
    """
    with settings.open() as repo:
        found = repo.status()
        tracked = repo.tracked_branches().get(found.default_branch)
    shown = plain(found) | {"tracked": plain(tracked)}
    del shown["head"]  # of this process, which has no live state
    width = None if settings.width is None else settings.width - len("Branches:  ")
    commit = "no commits yet" if found.commit is None else line_of(found.commit, (), width=width)
    rows = [("Head:", commit), *_status_rows(found)]
    where = "" if tracked is None else f", {standing(tracked)}"
    settings.show(shown, [f"On branch {escaped(found.default_branch)}{where}", *table(rows)])


def _status_rows(found: RepositoryStatus) -> Iterator[tuple[str, str]]:
    others = {name: commit for name, commit in found.branches.items() if name != found.default_branch}
    for label, names in (
        ("Branches:", others),
        ("Tags:", found.tags),
        ("Pins:", found.pins),
        ("Remotes:", found.remote_branches),
    ):
        if names:
            shown = ", ".join(map(escaped, list(names)[:MOST_NAMES]))
            more = len(names) - MOST_NAMES
            yield label, f"{len(names)} ({shown}{f' and {more} more' if more > 0 else ''})"
    for tier, count in found.num_unpushed.items():
        if count:
            yield "Waiting:", f"{count} commits are not at {escaped(tier)} yet (cas-ckpt watch --push {tier} --once)"
    for tier, failure in found.push_failures.items():
        yield "Failed:", f"the push to {escaped(tier)} at {utc(failure.time_s)} UTC: {escaped(failure.reason)}"
    if found.conditional_writes == EMULATED:
        yield "Writers:", "one at a time: the store ignores conditions, two would lose commits"
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


@verb_group("index")
def index() -> None:
    """The index: a database of what is in the packs. It can always be made anew."""


@verb_group("store")
def store() -> None:
    """Storage: where the packs and refs of a repository are kept."""


@index.verb("rebuild", examples=["cas-ckpt index rebuild", "cas-ckpt -C /data/llm index rebuild"], also=[PARTLY])
def rebuild(settings: Settings) -> int:
    """Drop the index, damaged or not, and make it anew from the packs.

    Nothing else is touched and nothing is lost: the index holds nothing that the packs do not
    hold. Packs that are damaged are named; then the exit code is 3.
    """
    from cas_ckpt.ops.fsck.repair import rebuild_index

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


@index.verb(
    "set",
    examples=["cas-ckpt index set postgresql+psycopg://db.example.org/ckpt", "cas-ckpt index set --clear"],
    also=[14],
)
@click.argument("url", required=False)
@flag("--clear", help="Let it be where it usually is.")
def set_place(settings: Settings, url: str | None, clear: bool) -> None:
    """Note in the repository which PostgreSQL database has its index.

    Everyone who opens it for writing, or from a disk, then uses that database unless --index is given. A URL with
    a password is rejected: everyone who can read the repository could read it.
    """
    from cas_ckpt.core.shared_index import set_shared_index

    if (url is None) != clear:
        raise click.UsageError("give the URL of a database, or --clear")
    found = set_shared_index(settings.place(), url or "")
    settings.say({"index_url": found}, f"The index is at {found}" if found else "The index is where it usually is")


@index.verb(
    "roles", examples=["cas-ckpt index roles --maintainer ckpt_admin --writer ckpt_writer --reader ckpt_reader"]
)
@click.option("--maintainer", required=True, metavar="NAME", help="Owns the tables: gc, rebuild, upgrades.")
@click.option("--writer", required=True, metavar="NAME", help="Commits, branches, tags.")
@click.option("--reader", required=True, metavar="NAME", help="Reads only.")
def roles(settings: Settings, maintainer: str, writer: str, reader: str) -> None:
    """Print the SQL that makes roles for an index in PostgreSQL, with the rights that each needs and no more.

    Let the maintainer make the index first, then run the SQL as a superuser in its database; and again
    after an upgrade of cas_ckpt. Nothing is asked of the database.
    """
    from cas_ckpt.core.shared_index import shared_index_roles

    sql = shared_index_roles(settings.place(), maintainer=maintainer, writer=writer, reader=reader)
    settings.show({"sql": sql}, sql.splitlines())


@store.verb("check", examples=["cas-ckpt store check /mnt/nfs/try", "cas-ckpt store check memory://"])
@click.argument("url")
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


# --- fsck: look for damage, and repair it ---------------------------------------------------

MOST_COMMITS = 10
MOST_KEYS = 8
"""Commits, and keys of each, that are named on a terminal; --json names all."""


@verb(
    "fsck",
    examples=[
        "cas-ckpt fsck",
        "cas-ckpt fsck --read-data --max-age 30d --max-duration 2h",
        "cas-ckpt fsck --read-data-subset 1/7",
        "cas-ckpt fsck --shard 3/16 --max-age 30d",
        "cas-ckpt fsck --remote",
        "cas-ckpt fsck --repair packs -n",
        "cas-ckpt fsck --repair chunks --from /backup/ckpts",
        "cas-ckpt fsck --repair refs --ref main=3fa9c1d2",
    ],
    also=[PARTLY, 14, 15],
)
@flag("--read-data", help="Read and verify every byte, not only the structure.")
@click.option("--read-data-subset", "subset", metavar="PART", help="Read a part: 5%, 2/7 (second of seven), 10GB.")
@shard_option("Read the packs of job I of N alone, from 1 on; implies --read-data.")
@click.option("--max-duration", type=AGE, help="Begin to read no pack after so long.")
@click.option("--max-age", type=AGE, help="Pass over packs that were read, and found intact, since then.")
@flag("--remote", help="Ask remotes whether they have the chunks that they promised.")
@click.option(
    "--repair", "kinds", multiple=True, type=click.Choice(get_args(RepairKind)), help="Repair this. May be repeated."
)
@click.option("--from", "sources", multiple=True, metavar="OTHER", help="Take what is lost from this repository.")
@click.option("--ref", "refs", multiple=True, type=Pair("NAME=REVISION"), help="What a damaged ref is to name.")
@flag("-n", "--dry-run", help="With --repair: say what would be done.")
def fsck(
    settings: Settings, read_data: bool, subset: str | None, shard: str | None, max_duration: float | None,
    max_age: float | None, remote: bool, kinds: tuple[RepairKind, ...], sources: tuple[str, ...],
    refs: tuple[tuple[str, str], ...], dry_run: bool,
) -> int:  # fmt: skip
    """Check that all that commits need is there and intact; name what damage hits, and repair it.

    Without options, the structure: records, packs, nodes, and that the index agrees. Each problem
    names the commits, refs and keys that it hits, and the command that repairs it; then the exit
    code is 13. Repairs write and verify before they move anything aside, into damaged/.
    """
    if kinds:
        if subset is not None or shard is not None or max_duration is not None or max_age is not None or remote:
            raise click.UsageError("--repair reads what it needs: of the reading options it takes only --read-data")
        from cas_ckpt.ops.fsck.repair import repair_url
        from cas_ckpt.ops.fsck.report import RepairRequest

        request = RepairRequest(kinds, sources, dict(refs), read_data, dry_run)
        done = repair_url(settings.place(), request, index_url=settings.index, progress=settings.show_progress())
        settings.show({**plain(done), "ok": done.ok}, _repaired(done, quiet=settings.quiet))
        return 0 if done.ok else PARTLY
    if sources or refs or dry_run:
        raise click.UsageError("--from, --ref and --dry-run go with --repair")
    from cas_ckpt.ops.fsck.check import check_url
    from cas_ckpt.ops.fsck.packs import DataOptions, parse_subset

    part = None if subset is None else parse_subset(subset)
    wanted = read_data or subset is not None or shard is not None
    job = None if shard is None else parse_shard(shard)
    data = DataOptions(part, max_duration, max_age, shard=job) if wanted else None
    if data is None and (max_duration is not None or max_age is not None):
        raise click.UsageError("--max-duration and --max-age go with --read-data, --read-data-subset or --shard")
    report = check_url(
        settings.place(), data, index_url=settings.index, remote=remote, progress=settings.show_progress()
    )
    found = {**plain(report), "ok": report.ok, "commands": report.commands}
    settings.show(found, _found(report, quiet=settings.quiet))
    return 0 if report.ok else DAMAGED


def _found(report: FsckReport, *, quiet: bool) -> Iterator[str]:
    for problem in report.problems:
        yield from _problem(problem)
    if report.commands:
        yield "To repair, in this order:"
        yield from (f"    {escaped(command)}" for command in report.commands)
    if quiet:
        return
    yield from (f"note: {escaped(note.where)}: {escaped(note.what)}" for note in report.notes)
    named = "" if report.shard is None else f"shard {report.shard}: "
    first = f"{report.num_commits} commits, {report.num_refs} refs, " if report.num_commits or not named else ""
    yield (
        f"{named}{first}{report.num_packs} packs with {report.num_entries} entries, {report.num_nodes} nodes verified"
    )
    if report.read_packs or report.skipped_packs:
        skipped = f", {report.skipped_packs} not" if report.skipped_packs else ""
        yield f"{report.read_packs} packs read whole ({human_bytes(report.read_bytes)}){skipped}"
    found = len(report.problems)
    unread = "" if report.read_packs or report.skipped_packs else " (tensors' data was not read: --read-data does)"
    yield f"no damage found{unread}" if report.ok else f"{found} problem{'s' if found > 1 else ''} found{unread}"


def _problem(problem: Problem) -> Iterator[str]:
    yield f"{problem.kind}: {escaped(problem.where)}: {escaped(problem.what)}"
    count = len(problem.hits)
    commits = f"{count} commit{'' if count == 1 else 's'}"
    if problem.effect is Effect.LOST:
        yield f"    LOST: no intact copy here of {len(problem.objects) or 'some'} objects; hits {commits}"
    elif problem.effect is Effect.AT_RISK:
        yield f"    AT RISK: nothing is lost yet, repair it soon{f'; concerns {commits}' if count else ''}"
    else:
        yield "    harmless: nothing that is needed depends on it alone"
    if problem.refs:
        yield f"    under {', '.join(map(escaped, problem.refs))}"
    for hit in problem.hits[:MOST_COMMITS]:
        keys, more = ", ".join(map(escaped, hit.keys[:MOST_KEYS])), len(hit.keys) - MOST_KEYS
        yield f"    commit {hit.commit[:SHORT_HEX]}: {keys}{f' and {more} more' if more > 0 else ''}"
    if count > MOST_COMMITS:
        yield f"    and {count - MOST_COMMITS} more commits (--json names all)"


def _repaired(report: RepairReport, *, quiet: bool) -> Iterator[str]:
    would = "would be repaired" if report.dry_run else "repaired"
    if not quiet:
        yield from (f"{would}: {_described(action)}" for action in report.actions)
        if not report.actions and not report.left:
            yield "nothing to repair"
    yield from (f"not repaired: {_described(action)}" for action in report.left)


def _described(action: RepairAction) -> str:
    return f"{action.kind}: {escaped(action.where)}: {escaped(action.what)}"


# --- cache: what this host keeps of remote repositories ---------------------------------------


@verb_group("cache")
def cache() -> None:
    """The local cache of remote repositories, which saves requests.

    It is in ~/.cache/cas_ckpt, or where $CAS_CKPT_CACHE says; nowhere if that is empty. Losing it loses time alone.
    """


@cache.verb("show", examples=["cas-ckpt cache show", "cas-ckpt cache show --max-size 20GB"])
@click.option("--max-size", type=SIZE, help="Keep at most so many bytes from now on. At first 10 GB.")
def cache_show(settings: Settings, max_size: int | None) -> None:
    """Show where it is, how large, and what is in it, the last used first.

    Beyond the limit, what was not used for longest is removed. Indexes count, and stay.
    """
    host = _host()
    if max_size is not None:
        host.set_limit(max_size)
    found = host.repositories()
    shown = {
        "folder": str(host.folder), "limit_bytes": host.limit_bytes,
        "repositories": [
            {"id": each.store_id, "url": each.url, "num_bytes": each.num_bytes, "used_s": each.used_s}
            for each in found
        ],
    }  # fmt: skip
    total = human_bytes(sum(each.num_bytes for each in found))
    rows = [
        (each.store_id[:12], human_bytes(each.num_bytes), utc(each.used_s), escaped(each.url or "")) for each in found
    ]
    head = f"{escaped(str(host.folder))}: {total} of at most {human_bytes(host.limit_bytes)}"
    settings.show(shown, [head, *table(rows, right=frozenset({1}))])


@cache.verb("clear", examples=["cas-ckpt cache clear", "cas-ckpt cache clear s3://bucket/llm"], also=[15])
@click.argument("repo", required=False, metavar="[URL|ID]")
def cache_clear(settings: Settings, repo: str | None) -> None:
    """Remove what is kept of one repository, or of all. An index that a process has open stays."""
    host = _host()
    freed, busy = host.clear(None if repo is None else _named(host, repo))
    in_use = f"; {len(busy)} indexes are in use and stay" if busy else ""
    settings.say({"freed_bytes": freed, "in_use": busy}, f"{human_bytes(freed)} removed{in_use}")


def _named(host: HostCache, repo: str) -> str:
    """The folder of the one repository that is meant."""
    found = [each.name for each in host.repositories() if repo == each.url or each.name.startswith(repo)]
    if not found:
        raise NotFoundError(f"nothing is kept of {repo!r}: cas-ckpt cache show lists URLs and ids")
    if len(found) > 1:
        raise NotFoundError(
            f"{repo!r} is the URL, or the beginning of the id, of {len(found)} repositories: write more"
        )
    return found[0]


def _host() -> HostCache:
    host = HostCache.open()
    if host is None:
        raise NotFoundError("there is no cache on this host: $CAS_CKPT_CACHE is empty, or the folder cannot be written")
    return host
