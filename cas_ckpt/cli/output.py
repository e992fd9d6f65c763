"""Text and JSON for people and programs, and what is said when a verb fails.

Invariant: no byte of a repository reaches a terminal as a control character. An error is one line on standard error,
and the exit code is that of its kind (errors.py).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import math
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from cas_ckpt.errors import CkptError, InternalError, PermissionDeniedError, StorageError

if TYPE_CHECKING:
    from cas_ckpt.core.records import CommitInfo
    from cas_ckpt.signing import SignatureInfo

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 controls, marks that turn the direction of text, and halves of surrogate pairs."""

LINES_PER_WRITE = 2000

MOST_METRICS = 20
"""In one line; --json has all."""


def escaped(text: str) -> str:
    """`text` with every control character written out."""
    if text.isprintable():
        return text
    return _CONTROL.sub(lambda it: f"\\x{ord(it[0]):02x}" if ord(it[0]) < 0x100 else f"\\u{ord(it[0]):04x}", text)


def utc(time_s: float) -> str:
    """Seconds since the epoch as date and time, in UTC; as a number, if no calendar has them."""
    try:
        return f"{datetime.datetime.fromtimestamp(time_s, datetime.UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return f"{time_s:.0f} s"


def subject(message: str) -> str:
    """The first line of a commit message, escaped."""
    return escaped(message.split("\n", 1)[0].rstrip())


def number(value: float) -> str:
    """A metric: short, and without losing that it is a number."""
    return f"{value:.6g}"


def summary(commit: CommitInfo, **more: Any) -> dict[str, Any]:
    """The JSON fields of a commit in a list, and `more`."""
    return {"commit_id": commit.id, "step": commit.step, "message": commit.message, **more}


def shown_metrics(metrics: Mapping[str, float], between: str) -> str:
    """The metrics as name=number, of many the first ones."""
    shown = [f"{escaped(name)}={number(value)}" for name, value in islice(metrics.items(), MOST_METRICS)]
    more = len(metrics) - len(shown)
    return between.join([*shown, f"({more} more)"] if more else shown)


def verdict_text(found: SignatureInfo) -> str:
    """A verdict in words."""
    whose = ", ".join(map(escaped, found.signers))
    key = f"{escaped(found.key_type)} {found.fingerprint}" if found.fingerprint else ""
    if found.is_good:
        return f"good signature of {whose} ({key})"
    words = f"{found.verdict.value}: {escaped(found.reason)}"
    return f"{words} ({', '.join(filter(None, (whose, key)))})" if key else words


def cut(text: str, width: int | None) -> str:
    """`text` in at most `width` characters, so that a terminal shows one line of it; None: no limit."""
    return text if width is None or len(text) <= width else text[: max(width - 1, 0)] + "…"


def table(rows: Iterable[Sequence[str]], *, right: frozenset[int] = frozenset(), width: int | None = None) -> list[str]:
    """Lines of aligned columns.

    Args:
        right: Columns that are aligned at their right side.
        width: Characters that a line may have; longer ones are cut.
    """
    cells = [tuple(row) for row in rows]
    return [cut(line, width) for line in _aligned(cells, [], right)]


def long_table(rows: Iterable[Sequence[str]], *, right: frozenset[int] = frozenset()) -> Iterator[str]:
    """Lines of aligned columns of any number of rows, as they come; columns grow wider where longer texts come."""
    rest = map(tuple, rows)
    widths: list[int] = []
    while some := list(islice(rest, LINES_PER_WRITE)):
        yield from _aligned(some, widths, right)


def _aligned(cells: Sequence[tuple[str, ...]], widths: list[int], right: frozenset[int]) -> Iterator[str]:
    """The lines of some rows; `widths`, those of the rows before, become those of these too."""
    before = widths or [0] * len(cells[0] if cells else ())
    widths[:] = [max(size, *map(len, column)) for size, column in zip(before, zip(*cells, strict=True), strict=True)]
    for row in cells:
        padded = (
            cell.rjust(size) if at in right else cell.ljust(size)
            for at, (cell, size) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(padded).rstrip()


def echo(lines: Iterable[str], *, colour: bool = False) -> None:
    """Print lines, many in one write; what makes them is not asked for all of them first."""
    rest = iter(lines)
    while some := list(islice(rest, LINES_PER_WRITE)):
        click.echo("\n".join(some), color=colour or None)


def echo_json(value: Any) -> None:
    """Print `value` as JSON."""
    click.echo(json.dumps(plain(value), ensure_ascii=True, indent=2))


def echo_json_rows(rows: Iterable[Any]) -> None:
    """Print `rows` as a JSON array, as they come."""
    texts = (textwrap.indent(json.dumps(plain(row), ensure_ascii=True, indent=2), "  ") for row in rows)
    first = next(texts, None)
    if first is None:
        click.echo("[]")
        return
    click.echo(f"[\n{first}", nl=False)
    while some := list(islice(texts, LINES_PER_WRITE)):
        click.echo("".join(f",\n{text}" for text in some), nl=False)
    click.echo("\n]")


JSON_NAMES: Mapping[str, Mapping[str, str]] = {
    "CommitInfo": {"id": "commit_id", "root": "root_id", "parents": "parent_ids"},
    "Lineage": {"target": "target_id"},
    "LineageStep": {"commit": "commit_id", "target": "target_id"},
    "CommitLineage": {"commit": "commit_id"},
    "Verified": {"commit": "commit_id"},
    "RestoreInfo": {"commit": "commit_id", "root": "root_id"},
    "Hit": {"commit": "commit_id"},
    "PinInfo": {"commit": "commit_id"},
    "RefMove": {"old": "old_commit_id", "new": "new_commit_id"},
    "MovedRef": {"old": "old_commit_id", "new": "new_commit_id"},
    "FoundEntry": {"first": "first_commit_id", "last": "last_commit_id"},
    "Freed": {"commits": "commit_ids", "kept": "kept_commit_ids"},
    "BundleInfo": {"prerequisites": "prerequisite_ids"},
}
"""Class -> field -> its name in JSON: an id of a commit is called as in the views of SQL, whatever holds it."""


def _json_name(kind: type, field: str) -> str:
    named = (JSON_NAMES[each.__name__] for each in kind.__mro__ if each.__name__ in JSON_NAMES)
    return next(named, {}).get(field, field)


def plain(value: Any) -> Any:
    """`value` as what JSON has; dataclasses and named tuples become objects, anything else its repr."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        return {_json_name(kind, each.name): plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain(item) for name, item in zip(value._fields, value, strict=True)}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else repr(value)


# --- failures -------------------------------------------------------------------------------

PROGRAM = "cas-ckpt"

INTERRUPTED = 130
BROKEN_PIPE = 141
"""As a shell counts a process that SIGPIPE ended."""


def report_error(error: BaseException, *, debug: bool, as_json: bool = False) -> int:
    """Write to standard error what happened, in one line; the exit code. Raises what is not a failure at all.

    Args:
        as_json: The line is an object of JSON: `error`, the kind of error; `message`; `exit_code`.
    """
    if isinstance(error, BrokenPipeError):  # the reader went away (`| head`): be quiet, also when Python flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        kind, line, code = "interrupted", "interrupted", INTERRUPTED
    elif isinstance(error, Exception):
        kind, line, code = type(error).__name__, one_line(error), exit_code(error)
    else:
        raise error
    trace = "".join(traceback.format_exception(error)).splitlines() if debug else []
    if as_json:
        told = {"error": kind, "message": line, "exit_code": code}
        _print(json.dumps(told | ({"traceback": trace} if debug else {})))
        return code
    for each in trace:
        _print(escaped(each))
    _print(f"{PROGRAM}: {line if kind == 'interrupted' else f'error: {line}'}")
    return code


def exit_code(error: Exception) -> int:
    """The exit code for an error of any kind."""
    if isinstance(error, (CkptError, click.ClickException)):
        return error.exit_code
    if isinstance(error, PermissionError):
        return PermissionDeniedError.exit_code
    return StorageError.exit_code if isinstance(error, OSError) else InternalError.exit_code


def one_line(error: Exception) -> str:
    """The error message in one line that is safe to print."""
    return escaped(" ".join(_text(error).split()))


def _text(error: Exception) -> str:
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else PROGRAM
        return f"{error.format_message().rstrip('.')}: see {command} --help"
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, CkptError):
        text = str(error)
        for python, shell in _SHELL_WORDS:
            text = python.sub(shell, text)
        return text
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    return f"unexpected {type(error).__name__}: {error}: this is a bug of cas_ckpt, --debug shows where"


_SHELL_WORDS = tuple(
    (re.compile(python), shell)
    for python, shell in (
        (r'repo\.branch\("?([^",()]+)"?, start="?([^",()]+)"?, force=True\)', r"cas-ckpt branch --force \1 \2"),
        (r'repo\.branch\("?([^",()]+)"?, start="?([^",()]+)"?\)', r"cas-ckpt branch \1 \2"),
        (r'repo\.branch\("([^"]+)"\)', r"cas-ckpt branch \1"),
        (r"repo\.branches\(\)", "cas-ckpt branch"),
        (r'repo\.add_remote\("([^"]+)", URL\)', r"cas-ckpt remote add \1 URL"),
        (r"repo\.fetch\('?([^',()]+)'?, filter='([^']+)'\)", r"cas-ckpt fetch \1 --filter '\2'"),
        (r"repo\.set_remote\('?([^',()]+)'?, promisor=True\)", r"cas-ckpt remote set \1 --promisor"),
        (r"repo\.set_remote\('?([^',()]+)'?, url=URL\)", r"cas-ckpt remote set-url \1 URL"),
        (
            r"repo\.set_remote\('?([^',()]+)'?, promisor=False, filter=\(\)\)",
            r"cas-ckpt remote set \1 --no-promisor --no-filter",
        ),
        (r"repo\.pull\(rebase=True\)", "cas-ckpt pull --rebase"),
        (r"repo\.create_bundle\b", "cas-ckpt bundle create"),
        (r'repo\.push_pending\("([^"]+)"\)', r"cas-ckpt watch --push \1 --once"),
        (r"repo\.merge_base\(A, B\)", "cas-ckpt merge-base A B"),
        (r"repo\.tags\(\)", "cas-ckpt tag"),
        (r"repo\.pins\(\)", "cas-ckpt pin"),
        (r"repo\.log\(keys='?([^')]+)'?\)", r"cas-ckpt log --key \1"),
        (r"repo\.set_policy\(Policy\(keep_daily=(\d+)\)\)", r"cas-ckpt policy set --keep-daily \1"),
        (r"repo\.policy\(\)", "cas-ckpt policy show"),
        (r"repo\.signers\(\)", "cas-ckpt signers show"),
        (r'repo\.set_signers\("([^"]+)", trust\)', r"cas-ckpt signers set \1 --trust FILE"),
        (r"repo\.clear_signers\(\)", "cas-ckpt signers clear"),
        (r"CommitOptions\(sign=KEY\)", "--sign KEYFILE"),
        (r'repo\.repair\("(\w+)", sources=\[(OTHER|"[^"]+")\]\)', r"cas-ckpt fsck --repair \1 --from \2"),
        (r'repo\.repair\("(\w+)", refs=\{"(\w+)": (\w+)\}\)', r"cas-ckpt fsck --repair \1 --ref \2=\3"),
        (r'repo\.repair\("(\w+)"\)', r"cas-ckpt fsck --repair \1"),
        (r"repo\.rebuild_index\(\)", "cas-ckpt index rebuild"),
        (r"repo\.fsck\(read_data=True\)", "cas-ckpt fsck --read-data"),
        (r"repo\.(ls|log|fsck)\((?:ref)?\)", r"cas-ckpt \1"),
        (r"repo\.holders\(ref, key\)", "cas-ckpt holders REF KEY"),
        (r"Repository\.init\(path\)", "cas-ckpt init"),
        (r"Repository\.init\(url, single_writer=True\)", "cas-ckpt init --single-writer URL"),
        (r"with cas_ckpt\.limits\(max_(entries|refs)=\.\.\.\)", r"with --max-\1"),
        (r'\b(branch|onto|parents)="([^"]+)"', r"--\1 \2"),
        (r"\b(create|orphan|force|follow_links)=True", lambda found: f"--{found[1].replace('_', '-')}"),
        (r", or open it only to be read \(read_only=True\)", ""),
        (r"open the repository with read_only=True, or with ", "use "),
        (r"open the repository with read_only=True, or name ", "name "),
        (r"\bat= says", "--at says"),
        (r"\bref=, world_size= and axes=", "--in, --world-size and --axis"),
        (r"\bshapes=", "--shapes"),
        (r"\bmax_(rows|bytes)=", r"--max-\1"),
        (r"\btimeout_s(=| is\b)", lambda found: f"--timeout{found[1].rstrip('=')}"),
        (r"give (\w+)=\.\.\. with it", r"give -p \1=..."),
        (r"\bon the command line[:,] ", ""),
    )
)
"""How what errors advise in Python is written in a shell, the first that fits first."""


class EscapedLines(logging.Formatter):
    """Formats log records as lines that are safe to print."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(escaped, super().format(record).splitlines()))


def _print(line: str) -> None:
    try:
        print(line, file=sys.stderr)
    except OSError:
        pass  # nobody listens
