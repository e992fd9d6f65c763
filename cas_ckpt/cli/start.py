"""init."""

from __future__ import annotations

import click

from cas_ckpt.cli.arguments import SIZE
from cas_ckpt.cli.command import verb
from cas_ckpt.cli.output import echo_json
from cas_ckpt.cli.settings import Settings


@verb(
    "init",
    examples=["cas-ckpt init runs/ckpts", "cas-ckpt init --branch trunk /data/llm"],
    also=[14],
)
@click.argument("path", required=False, metavar="[REPO]")
@click.option("-b", "--branch", default="main", show_default=True, metavar="NAME", help="The default branch.")
@click.option("--encoding", metavar="NAME", help="How new chunks are stored; ids do not depend on it.")
@click.option("--pack-size", type=SIZE, metavar="SIZE", help="Length at which a pack is closed, e.g. 512MB.")
@click.pass_obj
def init(settings: Settings, path: str | None, branch: str, encoding: str | None, pack_size: int | None) -> None:
    """Make a new, empty repository in a folder that is empty or not there yet.

    REPO is a path or a URL; without it, -C or the working directory is meant.
    """
    from cas_ckpt.face import Repository

    place = path or settings.repo or "."
    with Repository.init(place, default_branch=branch, encoding=encoding, pack_bytes=pack_size) as repo:
        if settings.json:
            echo_json({"url": repo.url, "default_branch": repo.default_branch})
        elif not settings.quiet:
            click.echo(f"Made an empty repository in {place} (branch {branch})")
