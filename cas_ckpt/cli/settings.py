"""What holds for a whole run of the command line, and the repository that it is about.

Invariant: the environment is read here and nowhere else.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cas_ckpt.cli.output import echo
from cas_ckpt.errors import NoRepositoryError
from cas_ckpt.progress import SILENT, BarProgress, LineProgress, Progress

if TYPE_CHECKING:
    from cas_ckpt.face import Repository

MAGIC = b"CASCKREC"
"""How the config of a repository begins (objects/record.py)."""


LESS = "FRX"
"""How less is called where $LESS does not say, as by git: end if all fits, keep colours, do not clear the screen."""


class ProgressWhen(Enum):
    """When progress is shown: on a terminal as a bar, elsewhere as lines, or never."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(slots=True)
class Settings:
    """Options that every verb takes.

    Attributes:
        repo: Path or URL of the repository; None: search upwards from the working directory.
        index: Where the index is, if not in the repository.
        colour: Whether the terminal is to show colours.
        width: Characters in a line of the terminal; None where output goes elsewhere, and nothing is cut.
        pages: Whether long output goes through a pager.
    """

    repo: str | None = None
    index: str | None = None
    json: bool = False
    quiet: bool = False
    debug: bool = False
    colour: bool = False
    width: int | None = None
    pages: bool = False
    progress: ProgressWhen = ProgressWhen.AUTO

    def place(self) -> str:
        """Path or URL of the repository.

        Raises:
            NoRepositoryError: none was named, and there is none here or above.
        """
        return self.repo or str(find_upwards(Path.cwd()))

    def open(self, *, read_only: bool | None = None) -> Repository:
        """The repository, opened; `with settings.open() as repo:`. Where nothing may be written, only to be read."""
        from cas_ckpt.face import Repository

        return Repository.open(self.place(), index_url=self.index, read_only=read_only)

    def page(self, lines: Iterable[str]) -> None:
        """Print lines; on a terminal through $PAGER or less, which ends by itself if they fit on the screen."""
        if not self.pages or self.json:
            echo(lines, colour=self.colour)
            return
        os.environ.setdefault("LESS", LESS)
        click.echo_via_pager((f"{line}\n" for line in lines), color=self.colour)

    def show_progress(self) -> Progress:
        """Where a long verb tells how far it is; on standard error, so output stays clean."""
        if self.quiet or self.json or self.progress is ProgressWhen.NEVER:
            return SILENT
        return BarProgress() if sys.stderr.isatty() else LineProgress()


def settings_from_environment() -> Settings:
    """What CAS_CKPT_REPO, CAS_CKPT_INDEX, NO_COLOR, COLUMNS and PAGER say."""
    terminal = sys.stdout.isatty()
    return Settings(
        width=shutil.get_terminal_size().columns if terminal else None,
        pages=terminal and os.environ.get("PAGER") not in ("", "cat") and os.environ.get("TERM") != "dumb",
        repo=os.environ.get("CAS_CKPT_REPO") or None,
        index=os.environ.get("CAS_CKPT_INDEX") or None,
        colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR"),
    )


def asks_for_completion() -> bool:
    """Whether a shell wants to complete a command line (`eval "$(_CAS_CKPT_COMPLETE=bash_source cas-ckpt)"`)."""
    return "_CAS_CKPT_COMPLETE" in os.environ


def find_upwards(folder: Path) -> Path:
    """The nearest folder from `folder` upwards that is a repository.

    Raises:
        NoRepositoryError: there is none.
    """
    for candidate in (folder, *folder.parents):
        if _is_repository(candidate):
            return candidate
    raise NoRepositoryError(
        f"no cas_ckpt repository in {folder} or any folder above: cas-ckpt init makes one, -C REPO names one"
    )


def _is_repository(folder: Path) -> bool:
    try:
        with (folder / "config").open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
