"""status: where a repository stands."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import click

from cas_ckpt.cli.command import verb
from cas_ckpt.cli.graph import oneline
from cas_ckpt.cli.output import echo, echo_json, escaped, plain, table
from cas_ckpt.cli.settings import Settings
from cas_ckpt.config import CONDEMNED, DELETING
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.ops.status import RepositoryStatus

MOST_NAMES = 8
"""Names of one kind that a line lists; `cas-ckpt branch`, `tag` and `pin` list all of them."""

_PHASES = {CONDEMNED: "has chosen", DELETING: "is deleting"}


@verb("status", examples=["cas-ckpt status", "cas-ckpt status --json"], also=[15])
@click.pass_obj
def status(settings: Settings) -> None:
    """Show the default branch and its head, other names, commits under way, what gc has to do.

    What a training process has checked out is known to that process alone (repo.head in Python).
    A commit is listed as under way when it has taken half a minute.
    """
    with settings.open() as repo:
        found = repo.status()
    if settings.json:
        shown = plain(found)
        del shown["head"]  # of this process, which has no live state
        echo_json(shown)
        return
    width = None if settings.width is None else settings.width - len("Branches:  ")
    commit = "no commits yet" if found.commit is None else oneline(found.commit, (), width=width)
    echo([f"On branch {escaped(found.default_branch)}"])
    echo(table([("Head:", commit), *_lines(found)]))


def _lines(found: RepositoryStatus) -> Iterator[tuple[str, str]]:
    others = {name: commit for name, commit in found.branches.items() if name != found.default_branch}
    for label, names in (("Branches:", others), ("Tags:", found.tags), ("Pins:", found.pins)):
        if names:
            yield label, _listed(names)
    for session in found.sessions:
        began = datetime.datetime.fromtimestamp(session.started_s, datetime.UTC)
        where = f"process {session.process} on {escaped(session.host)}" if session.host else "a later version"
        yield "Writing:", f"{where}, since {began:%Y-%m-%d %H:%M:%S} UTC"
    if found.gc_phase in _PHASES:
        what = f"collection {found.gc_generation} {_PHASES[found.gc_phase]} {found.num_condemned} packs"
        yield "gc:", f"{what}; if its process died, cas-ckpt gc goes on with it"
    if found.num_forgotten:
        yield "Forgotten:", f"{found.num_forgotten} commits"
    if found.num_temporaries:
        left = f"{human_bytes(found.temporary_bytes)} in {found.num_temporaries} temporary files"
        yield "Left over:", f"{left} of killed commits, which cas-ckpt gc removes"


def _listed(names: Mapping[str, str]) -> str:
    """How many, and the first of them."""
    shown = ", ".join(map(escaped, list(names)[:MOST_NAMES]))
    more = len(names) - MOST_NAMES
    return f"{len(names)} ({shown}{f' and {more} more' if more > 0 else ''})"
