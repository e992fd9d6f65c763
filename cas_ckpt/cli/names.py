"""branch, tag and resolve: names of commits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import click

from cas_ckpt.cli.command import verb
from cas_ckpt.cli.output import echo, echo_json, escaped
from cas_ckpt.cli.settings import Settings
from cas_ckpt.objects.digest import SHORT_HEX

_DELETE = click.option("-d", "--delete", is_flag=True, help="Delete the names that follow.")
_FORCE = click.option("-f", "--force", is_flag=True, help="Move the name if it exists.")
_WORDS = click.argument("words", nargs=-1, metavar="[NAME [REVISION]]")


@verb(
    "branch",
    examples=["cas-ckpt branch", "cas-ckpt branch ft-math base", "cas-ckpt branch -d ft-math"],
    also=[14, 15],
)
@_WORDS
@_DELETE
@_FORCE
@click.pass_obj
def branch(settings: Settings, words: tuple[str, ...], delete: bool, force: bool) -> None:
    """List the branches; make the branch NAME at REVISION (default: HEAD); or delete branches.

    Deleting takes the name away and says which commit it named; commits stay until they are
    collected. The default branch cannot be deleted; it is marked with an asterisk.
    """
    with settings.open() as repo:
        if delete:
            _delete(settings, "branch", words, repo.delete_branch)
        elif words:
            name, revision = _name_and_revision(words)
            _made(settings, "branch", name, repo.branch(name, start=revision, force=force))
        else:
            _list(settings, repo.branches(), marked=repo.default_branch)


@verb(
    "tag",
    examples=["cas-ckpt tag", "cas-ckpt tag v1 main~2", "cas-ckpt tag --force best", "cas-ckpt tag -d v1"],
    also=[14, 15],
)
@_WORDS
@_DELETE
@_FORCE
@click.pass_obj
def tag(settings: Settings, words: tuple[str, ...], delete: bool, force: bool) -> None:
    """List the tags; let the tag NAME name REVISION (default: HEAD); or delete tags."""
    with settings.open() as repo:
        if delete:
            _delete(settings, "tag", words, repo.delete_tag)
        elif words:
            name, revision = _name_and_revision(words)
            _made(settings, "tag", name, repo.tag(name, revision, force=force))
        else:
            _list(settings, repo.tags(), marked=None)


@verb("resolve", examples=["cas-ckpt resolve main~2", "cas-ckpt resolve 3fa9"], also=[15])
@click.argument("revision", default="HEAD")
@click.pass_obj
def resolve(settings: Settings, revision: str) -> None:
    """Print the whole id of the commit that REVISION stands for."""
    with settings.open() as repo:
        digest = repo.resolve(revision)
    if settings.json:
        echo_json({"revision": revision, "id": digest})
    else:
        click.echo(digest)


def _name_and_revision(words: tuple[str, ...]) -> tuple[str, str]:
    if len(words) > 2:
        raise click.UsageError(f"wanted a name and a revision, found {len(words)} words")
    return words[0], words[1] if len(words) == 2 else "HEAD"


def _list(settings: Settings, names: Mapping[str, str], *, marked: str | None) -> None:
    if settings.json:
        echo_json(names)
        return
    width = max(map(len, names), default=0)
    echo(f"{_mark(name, marked)}{name.ljust(width)}  {digest[:SHORT_HEX]}" for name, digest in names.items())


def _mark(name: str, marked: str | None) -> str:
    return "" if marked is None else "* " if name == marked else "  "


def _made(settings: Settings, what: str, name: str, digest: str) -> None:
    if settings.json:
        echo_json({what: name, "id": digest})
    elif not settings.quiet:
        click.echo(f"{what} {escaped(name)} is {digest[:SHORT_HEX]}")


def _delete(settings: Settings, what: str, names: tuple[str, ...], delete: Callable[[str], str]) -> None:
    if not names:
        raise click.UsageError(f"which {what} is to be deleted?")
    deleted = {}
    for name in names:
        deleted[name] = delete(name)
        if not settings.json and not settings.quiet:
            click.echo(f"Deleted {what} {escaped(name)} (was {deleted[name][:SHORT_HEX]})")
    if settings.json:
        echo_json(deleted)
