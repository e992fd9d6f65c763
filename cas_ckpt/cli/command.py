"""How a verb of the command line is declared, and how its help reads.

Invariant: every verb has a synopsis, a description, options, examples and exit codes.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cas_ckpt.cli.output import echo
from cas_ckpt.core import units
from cas_ckpt.errors import InvalidInputError, NoRepositoryError
from cas_ckpt.progress import SILENT, BarProgress, LineProgress, Progress

if TYPE_CHECKING:
    from cas_ckpt.repository import Repository


# DOC of cas_ckpt.cli.command:
# What holds for a whole run of the command line, and the repository that it is about.
#
# Invariant: the environment is read here and nowhere else.
#

MAGIC = b"CASCKREC"
"""How the config of a repository begins (objects/canonical.py)."""


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
        from cas_ckpt.repository import Repository

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


EXIT_CODES = {
    0: "it was done",
    1: "it failed: the environment, no space, a bug",
    2: "the command or its input cannot be accepted",
    3: "it was done in part",
    10: "there is no repository",
    12: "access was denied, or the medium is read-only",
    13: "stored bytes are damaged",
    14: "a ref moved, or something exists already",
    15: "no such commit, ref or key",
    16: "written by a newer version of cas_ckpt",
    130: "interrupted",
}
"""What each exit code means; errors.py assigns them to kinds of errors."""

ALWAYS = (0, 1, 2, 10, 12, 13, 16, 130)
"""Codes that every verb on a repository may end with."""


class Verb(click.Command):
    """A command with examples and exit codes in its help, and the options that all share."""

    def __init__(
        self, *args: Any, examples: Sequence[str] = (), exit_codes: Sequence[int] = ALWAYS, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        self.exit_codes = tuple(sorted(exit_codes))
        self.params.extend(shared_options())

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Examples and exit codes."""
        if self.examples:
            with formatter.section("Examples"):
                formatter.write_text("\b\n" + "\n".join(self.examples))
        write_exit_codes(formatter, {code: EXIT_CODES[code] for code in self.exit_codes})


def write_exit_codes(formatter: click.HelpFormatter, codes: Mapping[int, str]) -> None:
    """The section of exit codes."""
    with formatter.section("Exit codes"):
        formatter.write_dl([(str(code), meaning) for code, meaning in codes.items()])


_F = TypeVar("_F", bound=Callable[..., Any])


def verb(
    name: str, *, examples: Sequence[str] = (), also: Sequence[int] = ()
) -> Callable[[Callable[..., Any]], click.Command]:
    """Declare a verb; its docstring is the description.

    Args:
        also: Exit codes besides `ALWAYS`.
    """
    return click.command(name, cls=Verb, examples=examples, exit_codes=(*ALWAYS, *also))


def shared_options() -> list[click.Parameter]:
    """The options that stand before or behind any verb, as good as everywhere."""
    return [
        click.Option(["--json"], is_flag=True, help="Print JSON.", expose_value=False, callback=_store),
        click.Option(
            ["-q", "--quiet"], is_flag=True, help="Print results and errors only.", expose_value=False, callback=_store
        ),
        click.Option(
            ["--progress"],
            type=click.Choice([when.value for when in ProgressWhen]),
            help="Show progress: auto, always or never.",
            expose_value=False,
            callback=_store_progress,
        ),
        click.Option(
            ["--no-pager"],
            is_flag=True,
            help="Print long output straight to the terminal.",
            expose_value=False,
            callback=_store_no_pager,
        ),
        click.Option(
            ["--debug"], is_flag=True, help="Show the traceback of an error.", expose_value=False, callback=_store
        ),
    ]


def _store(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        setattr(ctx.ensure_object(Settings), str(param.name), True)


def _store_no_pager(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Settings).pages = False


def _store_progress(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.ensure_object(Settings).progress = ProgressWhen(value)


# --- types of options -----------------------------------------------------------------------

_T = TypeVar("_T")


class Unit(click.ParamType[_T]):
    """A type of option whose text is read by a function of core/units.py."""

    def __init__(self, name: str, parse: Callable[[str], _T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """What `value` means; values that are read already pass."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except InvalidInputError as error:
            self.fail(str(error), param, ctx)


SIZE = Unit("SIZE", units.parse_size)
AGE = Unit("AGE", lambda text: units.parse_duration(text).ago_s())
"""Seconds; calendar months are reckoned back from now."""
SHARE = Unit("SHARE", units.parse_share)
COUNT = Unit("N", units.parse_count)
METRIC = Unit("NAME=NUMBER", units.parse_metric)
REGION = Unit("region", units.parse_region)


class Pair(click.ParamType[tuple[str, str]]):
    """A type of option of the form NAME=VALUE, with neither of them empty."""

    def __init__(self, form: str) -> None:
        self.name = self._form = form

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """(name, value)."""
        name, _, text = str(value).partition("=")
        if not name or not text:
            self.fail(f"{value!r}: wanted {self._form}", param, ctx)
        return name, text
