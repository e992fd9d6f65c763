"""Shared by all commands: settings of a run, how a verb is declared, options and their types.

Invariant: every verb has a synopsis, a description, options, examples and exit codes. The environment is read here
and nowhere else. What people write is read by core/units.py alone.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cas_ckpt.arguments import did_you_mean
from cas_ckpt.cli.output import echo, echo_json, echo_json_rows
from cas_ckpt.core import units
from cas_ckpt.errors import CkptError, InvalidInputError, NoRepositoryError, SignatureError
from cas_ckpt.memory import MOST_THREADS, limits
from cas_ckpt.objects.digest import MAGIC
from cas_ckpt.progress import SILENT, BarProgress, LineProgress, Progress

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from cas_ckpt.repository import Repository
    from cas_ckpt.signing import Trust


LESS = "FRX"
"""How less is called where $LESS does not say, as by git: end if all fits, keep colours, do not clear the screen."""


# --- one run of the command line ------------------------------------------------------------


class ProgressWhen(StrEnum):
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
        cache: Where this host keeps what it read of remote repositories; None: where it is by itself; "": nowhere.
        trust: Whose signatures count by default: a file of allowed signers, or a public key.
        trusted_hosts: Hosts that get credentials though only a repository's settings name them.
        colour: Whether the terminal is to show colours.
        width: Characters in a line of the terminal; None where output goes elsewhere, and nothing is cut.
        pages: Whether long output goes through a pager.
    """

    repo: str | None = None
    index: str | None = None
    cache: str | None = None
    trust: str | None = None
    trusted_hosts: tuple[str, ...] = ()
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

        return Repository.open(self.place(), index_url=self.index, read_only=read_only, progress=self.show_progress())

    def say(self, found: Any, line: str) -> None:
        """Print what was done: `found` as JSON, or a line, which --quiet leaves out."""
        if self.json:
            echo_json(found)
        elif not self.quiet:
            click.echo(line)

    def show(self, found: Any, lines: Iterable[str]) -> None:
        """Print a result: `found` as JSON, or lines."""
        if self.json:
            echo_json(found)
        else:
            echo(lines)

    def page(self, found: Any, lines: Iterable[str]) -> None:
        """Print a long result: `found` as JSON, or lines, on a terminal through $PAGER or less.

        The pager ends by itself if the lines fit on the screen.
        """
        if self.json:
            echo_json(found)
        elif not self.pages:
            echo(lines, colour=self.colour)
        else:
            os.environ.setdefault("LESS", LESS)
            click.echo_via_pager((f"{line}\n" for line in lines), color=self.colour)

    def page_rows(self, found: Iterator[Any], lines: Callable[[Iterator[Any]], Iterable[str]]) -> None:
        """Print any number of results as they come: JSON objects in an array, or the lines that `lines` makes."""
        if self.json:
            echo_json_rows(found)
        else:
            self.page(None, lines(found))

    def show_progress(self) -> Progress:
        """The progress display of a long command, on standard error."""
        if self.quiet or self.json or self.progress is ProgressWhen.NEVER:
            return SILENT
        return BarProgress() if sys.stderr.isatty() else LineProgress()


def settings_from_environment() -> Settings:
    """Settings from CAS_CKPT_REPO, _INDEX, _CACHE, _TRUST, _TRUSTED_HOSTS, NO_COLOR, COLUMNS and PAGER."""
    terminal = sys.stdout.isatty()
    return Settings(
        width=shutil.get_terminal_size().columns if terminal else None,
        pages=terminal and os.environ.get("PAGER") not in ("", "cat") and os.environ.get("TERM") != "dumb",
        repo=os.environ.get("CAS_CKPT_REPO") or None,
        index=os.environ.get("CAS_CKPT_INDEX") or None,
        cache=os.environ.get("CAS_CKPT_CACHE"),
        trust=os.environ.get("CAS_CKPT_TRUST") or None,
        trusted_hosts=tuple(os.environ.get("CAS_CKPT_TRUSTED_HOSTS", "").replace(",", " ").split()),
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
        with suppress(OSError), (candidate / "config").open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return candidate
    raise NoRepositoryError(
        f"no cas_ckpt repository in {folder} or any folder above: cas-ckpt init makes one, -C REPO names one"
    )


# --- verbs ----------------------------------------------------------------------------------

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
    17: "nobody who is trusted signed it",
    130: "interrupted",
}
"""Meaning of each exit code; errors.py assigns them to kinds of errors."""

ALWAYS = (0, 1, 2, 10, 12, 13, 16, 130)
"""Codes that every verb on a repository may end with."""


class _Completed(click.types.StringParamType):
    """A text for which the shell is offered what the repository has; nothing where that cannot be read."""

    def __init__(self, found: Callable[[Repository, str, str], Iterable[str]]) -> None:
        self._found = found

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem  # of no use to verbs that run

        settings = ctx.ensure_object(Settings)
        settings.repo = ctx.find_root().params.get("repo") or settings.repo
        given = ctx.params.get("revision") or "HEAD"
        with suppress(CkptError, OSError), settings.open(read_only=True) as repo:
            return [CompletionItem(each) for each in self._found(repo, incomplete, given)]
        return []


def _refs(repo: Repository, begun: str, _: str) -> Iterable[str]:
    names = {*repo.branches(), *repo.tags(), *repo.remote_branches()}
    return sorted(name for name in names if name.startswith(begun))


def _keys(repo: Repository, begun: str, revision: str) -> Iterable[str]:
    """Keys, and beginnings of keys up to the next slash."""
    parts = (entry.key[: (entry.key.find("/", len(begun)) + 1) or None] for entry in repo.ls(revision))
    return dict.fromkeys(part for part in parts if part.startswith(begun))


COMPLETED = dict.fromkeys(("revision", "revisions", "ref", "refs"), _Completed(_refs)) | dict.fromkeys(
    ("key", "keys", "patterns"), _Completed(_keys)
)
"""Name of a parameter -> the type that completes it."""


class Verb(click.Command):
    """A command with examples and exit codes in its help, and the options that all share."""

    def __init__(
        self, *args: Any, examples: Sequence[str] = (), exit_codes: Sequence[int] = ALWAYS, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        self.exit_codes = tuple(sorted(exit_codes))
        for param in self.params:
            if param.name in COMPLETED and param.type is click.STRING:
                param.type = COMPLETED[param.name]
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


OTHER_NAMES = {
    "add": "commits are made in Python, by Repository.commit: there is nothing to add before",
    "backup": "commits are made in Python, by Repository.commit; cas-ckpt import commits a file",
    "blame": "see cas-ckpt log --key KEY",
    "cat": "see cas-ckpt read",
    "check": "see cas-ckpt fsck",
    "commit": "commits are made in Python, by Repository.commit; cas-ckpt import commits a file",
    "config": "see cas-ckpt status, remote, policy and signers",
    "copy": "see cas-ckpt push",
    "dump": "see cas-ckpt read",
    "grep": "see cas-ckpt find, and cas-ckpt log --grep",
    "merge": "states are joined in Python, by Repository.commit (CommitOptions.parents); cas-ckpt pull goes forward",
    "prune": "see cas-ckpt forget, and cas-ckpt gc",
    "rebase": "see cas-ckpt pull --rebase",
    "reset": "see cas-ckpt branch --force NAME REVISION",
    "restore": "see cas-ckpt checkout; a live state is restored in Python, by Repository.checkout",
    "rev-parse": "see cas-ckpt resolve",
    "save": "commits are made in Python, by Repository.commit; cas-ckpt import commits a file",
    "snapshots": "see cas-ckpt log",
    "switch": "see cas-ckpt checkout, and cas-ckpt branch --default NAME",
    "unlock": "there are no locks to take away: a process that died holds none",
}
"""Verbs of git and restic that are called otherwise here, and how."""


class NoSuchVerb(click.ClickException):
    """A verb is called otherwise here; says how."""

    exit_code = click.UsageError.exit_code


class VerbGroup(click.Group):
    """A group of commands that suggests the right name for an unknown one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that `args` begins with. Raises UsageError with advice if there is none."""
        name = args[0]
        if not name.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            advice = OTHER_NAMES.get(name) if ctx.parent is None else None
            if advice is None:
                similar = did_you_mean(name, self.list_commands(ctx))
                raise click.UsageError(f"there is no verb {name!r}{similar}", ctx)
            raise NoSuchVerb(f"there is no verb {name!r}: {advice}")
        return super().resolve_command(ctx, args)

    def verb(
        self, name: str, *, examples: Sequence[str] = (), also: Sequence[int] = ()
    ) -> Callable[[Callable[..., Any]], click.Command]:
        """Declare a verb of this group, as `verb` does."""

        def declare(function: Callable[..., Any]) -> click.Command:
            command = verb(name, examples=examples, also=also)(function)
            self.add_command(command)
            return command

        return declare


def verb_group(name: str) -> Callable[[Callable[[], None]], VerbGroup]:
    """Declare a verb that consists of others; its docstring is the description. By itself it prints its help."""

    def declare(described: Callable[[], None]) -> VerbGroup:
        @click.pass_context
        def show_help(ctx: click.Context) -> None:
            if ctx.invoked_subcommand is None:
                click.echo(ctx.get_help())

        return VerbGroup(name, callback=show_help, help=inspect.getdoc(described), invoke_without_command=True)

    return declare


def verb(
    name: str, *, examples: Sequence[str] = (), also: Sequence[int] = ()
) -> Callable[[Callable[..., Any]], click.Command]:
    """Declare a verb, a function of the `Settings` of the run and its options; its docstring is the description.

    Args:
        also: Exit codes besides `ALWAYS`.
    """
    declare = click.command(name, cls=Verb, examples=examples, exit_codes=(*ALWAYS, *also))
    return lambda function: declare(click.pass_obj(function))


def shared_options() -> list[click.Parameter]:
    """The options that may be given before or after any verb; they go into the settings."""

    def store(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        settings = ctx.ensure_object(Settings)
        if param.name == "no_pager":
            settings.pages = settings.pages and not value
        elif param.name == "progress":
            settings.progress = settings.progress if value is None else ProgressWhen(value)
        elif value:
            setattr(settings, str(param.name), True)

    def option(*names: str, **how: Any) -> click.Option:
        return click.Option(list(names), expose_value=False, callback=store, **how)

    return [
        option("--json", is_flag=True, help="Print JSON."),
        option("-q", "--quiet", is_flag=True, help="Print results and errors only."),
        option(
            "--progress",
            type=click.Choice([when.value for when in ProgressWhen]),
            help="Show progress: auto, always or never.",
        ),
        option("--no-pager", is_flag=True, help="Print long output straight to the terminal."),
        option("--debug", is_flag=True, help="Show the traceback of an error."),
    ]


# --- types of options -----------------------------------------------------------------------

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])


if TYPE_CHECKING:
    from click import ParamType as _ParamType
else:

    class _ParamType(click.ParamType):
        """That of click, which cannot be subscripted in all versions that pyproject.toml admits."""

        def __class_getitem__(cls, item: object) -> type:
            return cls


class Unit(_ParamType[_T]):
    """A type of option whose text is read by a function of core/units.py."""

    def __init__(self, name: str, parse: Callable[[str], _T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse `value`; a value that is not text is returned unchanged."""
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
SHARD = Unit("I/N", lambda text: str(units.parse_shard(text)))
REGION = Unit("region", units.parse_region)


class Pair(_ParamType[tuple[str, str]]):
    """A type of option of the form NAME=VALUE, with neither of them empty."""

    def __init__(self, form: str) -> None:
        self.name = self._form = form

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """(name, value)."""
        name, _, text = str(value).partition("=")
        if not name or not text:
            self.fail(f"{value!r}: wanted {self._form}", param, ctx)
        return name, text


# --- options of several verbs ---------------------------------------------------------------

UNSIGNED = SignatureError.exit_code


def flag(*names: str, help: str) -> Callable[[_F], _F]:  # noqa: A002  # as click calls it
    """An option that is given or not."""
    return click.option(*names, is_flag=True, help=help)


def keys_option(help: str = "Only these; may be repeated.") -> Callable[[_F], _F]:  # noqa: A002
    """Patterns of keys, as `keys`."""
    return click.option("-k", "--key", "keys", multiple=True, metavar="PATTERN", help=help)


def shard_option(help: str) -> Callable[[_F], _F]:  # noqa: A002
    """The packs that one job of several takes, as `shard`."""
    return click.option("--shard", type=SHARD, metavar="I/N", help=help)


def sign_option() -> Callable[[_F], _F]:
    """The key that signs, as `sign`."""
    return click.option("--sign", metavar="KEYFILE", help="Sign with this key of SSH, e.g. ~/.ssh/id_ed25519.")


def trust_option(
    help: str = "Only if somebody here signed it: allowed signers or a public key; may be repeated.",  # noqa: A002
) -> Callable[[_F], _F]:
    """Whose signatures count, as `trust`."""
    return click.option("--trust", multiple=True, metavar="FILE|KEY", help=f"{help} Default: $CAS_CKPT_TRUST.")


def given_trust(settings: Settings, given: tuple[str, ...], revoked: str | None = None) -> Trust | None:
    """The trusted signers from options and settings; None if there are none.

    Raises:
        InvalidInputError: something that is not understood. StorageError: a file cannot be read.
    """
    from cas_ckpt.signing import Trust, as_trust

    named = given or ((settings.trust,) if settings.trust else ())
    if not named:
        if revoked is not None:
            raise InvalidInputError("--revoked takes keys away from those that --trust names: give that too")
        return None
    found = Trust(tuple(line for each in named for line in as_trust(each).signers))
    return found if revoked is None else found.without(revoked)


def memory_option(call: _F) -> _F:
    """How much memory the verb may take: a limit of the call."""
    return click.option(
        "--memory", "memory_bytes", type=SIZE, help="Most memory it takes, e.g. 200MB.", expose_value=False,
        callback=_limit_call,
    )(call)  # fmt: skip


def threads_option(call: _F) -> _F:
    """How many threads the verb may take: a limit of the call."""
    return click.option(
        "-j", "--threads", "num_threads", type=click.IntRange(min=0, max=MOST_THREADS), metavar="N", help="Threads.",
        expose_value=False, callback=_limit_call,
    )(call)  # fmt: skip


def _limit_call(ctx: click.Context, parameter: click.Parameter, value: int | None) -> None:
    ctx.with_resource(limits(**{str(parameter.name): value}))


def limit_option(help: str = "At most N.", *, default: int | None = None) -> Callable[[_F], _F]:  # noqa: A002
    """How many to show, as `limit`."""
    number = click.IntRange(min=0)
    return click.option("-n", "--max-count", "limit", type=number, default=default, metavar="N", help=help)
