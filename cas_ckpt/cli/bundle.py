"""bundle create, unbundle, verify and list: commits in one file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from cas_ckpt.cli.command import Settings, flag, verb, verb_group
from cas_ckpt.cli.output import escaped, table
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.ops.sync.bundle import BundleInfo


@verb_group("bundle")
def bundle() -> None:
    """One file that carries commits, for where no network goes."""


@verb(
    "create",
    examples=["cas-ckpt bundle create run.bundle main v1", "cas-ckpt bundle create week2.bundle main --since v1"],
    also=[14, 15],
)
@click.argument("file")
@click.argument("refs", nargs=-1, metavar="[REF...]")
@click.option("--since", multiple=True, metavar="REVISION", help="Without what this has; may be repeated.")
@flag("-f", "--force", help="Replace FILE.")
@click.pass_obj
def create(settings: Settings, file: str, refs: tuple[str, ...], since: tuple[str, ...], force: bool) -> None:
    """Write FILE with all that REFs (branches, tags, REVISION:BRANCH) need; without any, the default branch.

    With --since whoever takes it must have those commits.
    """
    with settings.open() as repo:
        made = repo.create_bundle(file, refs, since=since, force=force, progress=settings.show_progress())
    settings.say(made, f"Wrote {escaped(file)}: {made.num_commits} commits, {human_bytes(made.num_bytes)}")


@verb("unbundle", examples=["cas-ckpt bundle unbundle run.bundle"], also=[14, 15])
@click.argument("file")
@click.option("--remote", metavar="NAME", help="Its branches become NAME/BRANCH here.")
@flag("-n", "--dry-run", help="Only say what would be done.")
@click.pass_obj
def unbundle(settings: Settings, file: str, remote: str | None, dry_run: bool) -> None:
    """Bring the commits of FILE here; branches of the same names move forward, others begin."""
    from cas_ckpt.cli.remotes import show_report

    with settings.open() as repo:
        report = repo.unbundle(file, remote=remote, dry_run=dry_run, progress=settings.show_progress())
    show_report(settings, report, "From", "came")


@verb("verify", examples=["cas-ckpt bundle verify run.bundle"], also=[15])
@click.argument("file")
@click.pass_obj
def verify(settings: Settings, file: str) -> None:
    """Read and hash every byte of FILE, and see that it can be taken here."""
    with settings.open() as repo:
        found = repo.verify_bundle(file, progress=settings.show_progress())
    settings.show(found, [*_lines(found), f"{escaped(file)} is whole, and can be taken here"])


@verb("list", examples=["cas-ckpt bundle list run.bundle"], also=[15])
@click.argument("file")
@click.pass_obj
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


for _command in (create, unbundle, verify, list_):
    bundle.add_command(_command)
