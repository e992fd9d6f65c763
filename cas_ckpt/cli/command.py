"""How a verb of the command line is declared, and how its help reads.

Invariant: every verb has a synopsis, a description, options, examples and exit codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from cas_ckpt.cli.settings import ProgressWhen, Settings

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
            ["--no-pager"], is_flag=True, help="Print long output straight to the terminal.", expose_value=False,
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
