"""clone, push, fetch, pull, watch, remote and bundle: commits travel between repositories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cas_ckpt import clock
from cas_ckpt.cli.command import (
    AGE,
    SIZE,
    Settings,
    VerbGroup,
    flag,
    memory_option,
    shard_option,
    threads_option,
    verb,
    verb_group,
)
from cas_ckpt.cli.output import escaped, report_error, table
from cas_ckpt.errors import CkptError, PartialRestoreError
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.ops.sync.bundle import BundleInfo
    from cas_ckpt.ops.sync.remotes import RemoteInfo
    from cas_ckpt.ops.sync.send import MovedRef, SyncReport


_F = TypeVar("_F", bound=Callable[..., Any])

_MARKS = {"new": "*", "forced": "+", "deleted": "-", "up to date": "=", "rebased": "+", "rejected": "!"}
"""As git marks them."""


def _speed(call: _F) -> _F:
    """How fast it may be, and with what."""
    limit = click.option("--max-bandwidth", type=SIZE, help="Bytes a second at most, e.g. 50MB.")
    return threads_option(limit(memory_option(call)))


_DRY = flag("-n", "--dry-run", help="Only say what would be done.")
_TAGS = click.option("--tags/--no-tags", default=None, help="All tags, or none. Default: those of commits that come.")


@verb(
    "clone",
    examples=[
        "cas-ckpt clone s3://bucket/runs ckpts",
        "cas-ckpt clone -b ft-math /data/runs",
        "cas-ckpt clone --filter 'model/**' --depth 5 s3://bucket/runs",
    ],
    also=[14, 15],
)
@click.argument("url", metavar="URL")
@click.argument("folder", required=False)
@click.option("-b", "--branch", metavar="NAME", help="The branch that begins here, as its default branch.")
@click.option("--only", "branches", multiple=True, metavar="PATTERN", help="Branches that come; may be repeated.")
@click.option("--depth", type=click.IntRange(min=1), metavar="N", help="Only the last N commits come with their data.")
@click.option("--filter", multiple=True, metavar="PATTERN", help="Only chunks of these keys come at once.")
@_TAGS
@_speed
def clone(settings: Settings, /, url: str, folder: str | None, **options: Any) -> None:
    """Make a new repository with the commits of the one at URL, which is its remote `origin`.

    FOLDER is a path or URL; without it, -C or else the last part of URL is taken. A clone that was broken off is gone
    on with.
    """
    from cas_ckpt.repository import Repository

    place = folder or settings.repo or url.partition("?")[0].rstrip("/").rpartition("/")[2]
    if not place:
        raise click.UsageError("where is the new repository to be? Give FOLDER")
    with Repository.clone(url, place, **options, progress=settings.show_progress()) as made:
        found = {"url": made.url, "branches": made.branches(), "remote_branches": made.remote_branches()}
    count = len(found["remote_branches"])
    settings.say(
        found, f"Cloned {escaped(url)} into {escaped(place)}: {count} {'branch' if count == 1 else 'branches'}"
    )


@verb(
    "push",
    examples=[
        "cas-ckpt push",
        "cas-ckpt push origin main v1",
        "cas-ckpt push s3://bucket/runs main~3:eval/run-7",
        "cas-ckpt push --all --tags",
        "cas-ckpt push --force-with-lease origin ft-math",
        "cas-ckpt push --delete origin ft-math",
        "cas-ckpt push -n",
    ],
    also=[14, 15],
)
@click.argument("remote", required=False)
@click.argument("refs", nargs=-1, metavar="[REF...]")
@flag("-d", "--delete", help="The REFs of the other repository are to go.")
@flag("--all", "all_branches", help="All branches.")
@flag("--tags", help="All tags.")
@flag("-f", "--force", help="Also where a ref would not move forward.")
@click.option(
    "--force-with-lease", "lease", is_flag=False, flag_value="", default=None, metavar="[COMMIT]",
    help="The same, but only where it is where it was when last asked, or at =COMMIT.",
)  # fmt: skip
@shard_option("Only copy the chunks of job I of N, from 1 on; a push without it, afterwards, moves the refs.")
@_DRY
@_speed
def push(
    settings: Settings, /, remote: str | None, refs: tuple[str, ...], delete: bool, lease: str | None, **options: Any
) -> None:
    """Send commits to the repository REMOTE (a name, URL or path; default: origin), and move its refs.

    A REF is a branch or tag, REVISION:BRANCH, or :BRANCH to delete; a + before it forces. Without any, what the
    remote's settings say, else the default branch. Only what is missing there is sent; one that was broken off is gone
    on with by the next.
    """
    if delete and not refs:
        raise click.UsageError("which refs are to be deleted?")
    with settings.open() as repo:
        report = repo.push(
            remote, () if delete else refs, delete=refs if delete else (),
            force_with_lease=lease or lease is not None, **options, progress=settings.show_progress(),
        )  # fmt: skip
    show_report(settings, report, "To", "sent")


@verb(
    "fetch",
    examples=[
        "cas-ckpt fetch",
        "cas-ckpt fetch --prune origin",
        "cas-ckpt fetch origin 'ft/*'",
        "cas-ckpt fetch --filter 'optimizer/**'",
        "cas-ckpt fetch /mnt/usb/week2.bundle main",
    ],
    also=[3, 15],
)
@click.argument("remote", required=False)
@click.argument("branches", nargs=-1, metavar="[PATTERN...]")
@_TAGS
@click.option("--commit", "commits", multiple=True, metavar="REVISION", help="Bring back its data; a pin keeps it.")
@click.option("--filter", multiple=True, metavar="PATTERN", help="Bring chunks of these keys, of all commits.")
@flag("-p", "--prune", help="Take away REMOTE/NAME where there is no such branch any more.")
@flag("-f", "--force", help="Tags come also where they differ here, or read as ids or branches of remotes.")
@_DRY
@_speed
def fetch(settings: Settings, /, remote: str | None, branches: tuple[str, ...], **options: Any) -> int:
    """Bring the commits of REMOTE (default: origin) here; its branch main is origin/main here.

    Of its branches those come that match PATTERN; without any, what the remote's settings say, else all. Of a URL, a
    path or a bundle that has no name here one branch comes (default: its default branch), which the revision
    FETCH_HEAD names from then on. A tag that names another commit here is rejected: the exit code is 3.
    """
    with settings.open() as repo:
        report = repo.fetch(remote, branches, **options, progress=settings.show_progress())
    return show_report(settings, report, "From", "came")


@verb(
    "pull",
    examples=[
        "cas-ckpt pull", "cas-ckpt pull origin ft-math", "cas-ckpt pull --rebase", "cas-ckpt pull /mnt/usb/runs",
    ],
    also=[3, 14, 15],
)  # fmt: skip
@click.argument("remote", required=False)
@click.argument("branch", required=False)
@flag("-r", "--rebase", help="Where both sides have commits of their own, put those here on top of theirs.")
@_TAGS
@_DRY
@_speed
def pull(settings: Settings, /, remote: str | None, branch: str | None, **options: Any) -> int:
    """Fetch from REMOTE (a name, URL or path; default: origin), then let BRANCH go forward to where it is there.

    Without BRANCH the default branch is meant. Where both sides have commits of their own, nothing moves, unless
    --rebase makes those here anew on top of theirs: with the same states, messages and metrics, without signatures.
    """
    with settings.open() as repo:
        report = repo.pull(remote, branch, **options, progress=settings.show_progress())
    return show_report(settings, report, "From", "came")


def show_report(settings: Settings, report: SyncReport, where: str, did: str) -> int:
    """Print what was copied, and which refs moved; the exit code."""
    code = PartialRestoreError.exit_code if any(ref.how == "rejected" for ref in report.refs) else 0
    moved = [ref for ref in report.refs if ref.how != "up to date"]
    if not moved and not report.num_packs:
        settings.say(report, "Everything up to date")
        return code
    done = {"sent": "would be sent", "came": "would come"}[did] if report.dry_run else did
    lines = [f"{where} {escaped(report.url)}", *table([_row(ref) for ref in moved])]
    lines.append(
        f"{report.num_commits} commits, {report.num_chunks} chunks, {human_bytes(report.num_bytes)} {done}"
        + (f"; {report.num_forgotten} commits without their data, which was forgotten" if report.num_forgotten else "")
    )
    settings.say(report, "\n".join(lines))
    return code


def _row(ref: MovedRef) -> tuple[str, str, str]:
    old, new = ((digest or "")[:SHORT_HEX] for digest in (ref.old, ref.new))
    name = ref.ref.removeprefix("refs/heads/").removeprefix("refs/remotes/").removeprefix("refs/")
    if ref.how == "rejected":
        here = f"it names {old} here" if old else "a branch here has its name, or it reads as something else"
        return " !", escaped(name), f"rejected: {here} (fetch --force takes it)"
    return f" {_MARKS.get(ref.how, ' ')}", escaped(name), f"{old}..{new}" if old and new else f"{ref.how}"


@verb(
    "watch",
    examples=[
        "cas-ckpt watch --push origin",
        "cas-ckpt watch --push origin --every 5m",
        "cas-ckpt watch --push s3 --once",
    ],
    also=[14, 15],
)
@click.option("--push", "remote", required=True, metavar="REMOTE", help="The remote that gets every commit.")
@click.option("--every", "every_s", type=AGE, default="30s", metavar="TIME", help="How often to look. Default: 30s.")
@flag("--once", help="Push what is missing there, and end.")
@click.option("--max-bandwidth", type=SIZE, help="Bytes a second at most, e.g. 50MB.")
def watch(settings: Settings, remote: str, every_s: float, once: bool, max_bandwidth: int | None) -> None:
    """Push every new commit of this repository to REMOTE, until interrupted.

    Each branch (those that match the remote's --push patterns, else all) is pushed by itself. What is not there yet
    cannot be forgotten here. An error is printed, and the next look tries again; with --once it ends the command.
    """
    with settings.open() as repo:
        while True:
            try:
                show = settings.show_progress()
                reports = repo.push_pending(remote, max_bandwidth=max_bandwidth, progress=show)
                for report in reports:
                    show_report(settings, report, "To", "sent")
                if once and not reports:
                    settings.say([], "Everything up to date")
            except CkptError as error:
                if once:
                    raise
                report_error(error, debug=settings.debug)
            if once:
                return
            clock.pause(every_s)


# --- remote ---------------------------------------------------------------------------------


@click.group("remote", cls=VerbGroup, invoke_without_command=True)
@flag("-v", "--verbose", help="As git has it; URLs are always shown.")
@click.pass_context
def remote(ctx: click.Context, verbose: bool) -> None:
    """Other repositories under short names; what is set is part of the repository, so no secret may be in a URL.

    Without a verb they are listed.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(remote_list)


@verb(
    "ls-remote", examples=["cas-ckpt ls-remote", "cas-ckpt ls-remote s3://bucket/runs", "cas-ckpt ls-remote x.bundle"],
    also=[15],
)  # fmt: skip
@click.argument("remote", required=False)
def ls_remote(settings: Settings, remote: str | None) -> None:
    """List the branches and tags of REMOTE (a name, URL, path or bundle; default: origin) as they are now there."""
    with settings.open() as repo:
        found = repo.ls_remote(remote)
    settings.show(found, (f"{digest}  {escaped(name)}" for name, digest in found.items()))


@remote.verb("list", examples=["cas-ckpt remote list", "cas-ckpt remote list --json"])
def remote_list(settings: Settings) -> None:
    """List the remotes, and where their branches were when they were last asked."""
    with settings.open() as repo:
        found = repo.remotes()
    settings.show(found, _listed(found))


def _listed(found: list[RemoteInfo]) -> Iterator[str]:
    for one in found:
        marks = "".join(f"  {name}" for name, wanted in (("tier", one.tier), ("promisor", one.promisor)) if wanted)
        keys = f"  filter {escaped(' '.join(one.filter))}" if one.filter else ""
        yield f"{escaped(one.name)}  {escaped(one.url)}{marks}{keys}"
        yield from table([("   ", escaped(name), digest[:SHORT_HEX]) for name, digest in one.branches.items()])


@remote.verb(
    "add",
    examples=["cas-ckpt remote add origin s3://bucket/runs", "cas-ckpt remote add usb /mnt/usb/runs --push 'ft/*'"],
    also=[14],
)
@click.argument("name")
@click.argument("url")
@click.option("--fetch", multiple=True, metavar="PATTERN", help="Branches that fetch brings. Default: all.")
@click.option("--push", multiple=True, metavar="PATTERN", help="Branches that push sends.")
@flag("--tier", help="It is to have every commit: what it lacks cannot be forgotten here.")
@flag("--promisor", help="It keeps what its branches lead to: chunks of that may be missing here.")
@click.option("--filter", multiple=True, metavar="PATTERN", help="Keys whose chunks fetch brings. Default: all.")
def remote_add(settings: Settings, /, name: str, url: str, **options: Any) -> None:
    """Let NAME mean the repository at URL, which need not be there yet."""
    with settings.open() as repo:
        repo.add_remote(name, url, **options)
    settings.say({"remote": name, "url": url}, f"remote {escaped(name)} is {escaped(url)}")


@remote.verb("remove", examples=["cas-ckpt remote remove usb"], also=[15])
@click.argument("name")
def remote_remove(settings: Settings, name: str) -> None:
    """Take the remote NAME away, and its branches here; the other repository is not touched."""
    with settings.open() as repo:
        repo.remove_remote(name)
    settings.say({"remote": name}, f"Removed remote {escaped(name)}")


@remote.verb("rename", examples=["cas-ckpt remote rename origin upstream"], also=[14, 15])
@click.argument("old")
@click.argument("new")
def remote_rename(settings: Settings, old: str, new: str) -> None:
    """Give the remote OLD, and its branches here, another name."""
    with settings.open() as repo:
        repo.rename_remote(old, new)
    settings.say({"remote": new, "was": old}, f"remote {escaped(old)} is {escaped(new)} now")


@remote.verb("set-url", examples=["cas-ckpt remote set-url origin s3://other/runs"], also=[15])
@click.argument("name")
@click.argument("url")
def remote_set_url(settings: Settings, name: str, url: str) -> None:
    """Let the remote NAME be at URL."""
    with settings.open() as repo:
        repo.set_remote(name, url=url)
    settings.say({"remote": name, "url": url}, f"remote {escaped(name)} is {escaped(url)}")


@remote.verb(
    "set",
    examples=[
        "cas-ckpt remote set origin --filter 'model/**'",
        "cas-ckpt remote set backup --promisor",
        "cas-ckpt remote set origin --no-filter --no-promisor",
    ],
    also=[15],
)
@click.argument("name")
@click.option("--promisor/--no-promisor", default=None, help="Whether chunks may be missing here that it keeps.")
@click.option("--filter", "keys", multiple=True, metavar="PATTERN", help="Keys whose chunks fetch brings from now on.")
@flag("--no-filter", help="Fetch brings all of what comes from now on.")
def remote_set(settings: Settings, name: str, promisor: bool | None, keys: tuple[str, ...], no_filter: bool) -> None:
    """Change what the remote NAME keeps for this repository, and what of it comes here.

    Of commits that are here already, fetch --filter brings more.
    """
    if keys and no_filter:
        raise click.UsageError("--filter or --no-filter?")
    with settings.open() as repo:
        repo.set_remote(name, promisor=promisor, filter=keys if keys or no_filter else None)
        (found,) = (one for one in repo.remotes() if one.name == name)
    settings.say(found, "\n".join(_listed([found])))


# --- bundle: commits in one file --------------------------------------------------------------


@verb_group("bundle")
def bundle() -> None:
    """One file that carries commits, for where no network goes."""


@bundle.verb(
    "create",
    examples=["cas-ckpt bundle create run.bundle main v1", "cas-ckpt bundle create week2.bundle main --since v1"],
    also=[14, 15],
)
@click.argument("file")
@click.argument("refs", nargs=-1, metavar="[REF...]")
@click.option("--since", multiple=True, metavar="REVISION", help="Without what this has; may be repeated.")
@flag("-f", "--force", help="Replace FILE.")
def create(settings: Settings, /, file: str, refs: tuple[str, ...], **options: Any) -> None:
    """Write FILE with all that REFs (branches, tags, REVISION:BRANCH) need; without any, the default branch.

    With --since the receiving repository must have those commits.
    """
    with settings.open() as repo:
        made = repo.create_bundle(file, refs, **options, progress=settings.show_progress())
    settings.say(made, f"Wrote {escaped(file)}: {made.num_commits} commits, {human_bytes(made.num_bytes)}")


@bundle.verb("unbundle", examples=["cas-ckpt bundle unbundle run.bundle"], also=[14, 15])
@click.argument("file")
@click.option("--remote", metavar="NAME", help="Its branches become NAME/BRANCH here.")
@flag("-n", "--dry-run", help="Only say what would be done.")
def unbundle(settings: Settings, /, file: str, **options: Any) -> None:
    """Bring the commits of FILE here; branches of the same names move forward, others begin."""
    with settings.open() as repo:
        report = repo.unbundle(file, **options, progress=settings.show_progress())
    show_report(settings, report, "From", "came")


@bundle.verb("verify", examples=["cas-ckpt bundle verify run.bundle"], also=[15])
@click.argument("file")
def verify(settings: Settings, file: str) -> None:
    """Read and hash every byte of FILE, and see that it can be taken here."""
    with settings.open() as repo:
        found = repo.verify_bundle(file, progress=settings.show_progress())
    settings.show(found, [*_lines(found), f"{escaped(file)} is whole, and can be taken here"])


@bundle.verb("list", examples=["cas-ckpt bundle list run.bundle"], also=[15])
@click.argument("file")
def list_(settings: Settings, file: str) -> None:
    """List the refs of FILE, and what it continues from. Needs no repository."""
    from cas_ckpt.ops.sync.bundle import read_bundle

    found = read_bundle(file)
    settings.show(found, _lines(found))


def _lines(found: BundleInfo) -> Iterator[str]:
    yield from table([(digest[:SHORT_HEX], escaped(name)) for name, digest in found.refs.items()])
    for digest in found.prerequisites:
        yield f"continues from {digest[:SHORT_HEX]}"
    yield f"{found.num_commits} commits, {found.num_packs} packs, {human_bytes(found.num_bytes)}"
