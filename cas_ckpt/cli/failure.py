"""What the command line says and returns when a verb fails.

Invariant: an error is one line on standard error, without control characters, and its exit
code is that of its kind (errors.py).
"""

from __future__ import annotations

import os
import re
import sys
import traceback

import click

from cas_ckpt.cli.output import escaped
from cas_ckpt.errors import CkptError, InternalError, PermissionDeniedError, StorageError

PROGRAM = "cas-ckpt"

INTERRUPTED = 130
BROKEN_PIPE = 141
"""As a shell counts a process that SIGPIPE ended."""


def report(error: BaseException, *, debug: bool) -> int:
    """Tell standard error what happened; the exit code. Raises what is no failure at all."""
    if isinstance(error, BrokenPipeError):
        return _broken_pipe()
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        _say("interrupted")
        return INTERRUPTED
    if not isinstance(error, Exception):
        raise error
    if debug:
        traceback.print_exception(error)
    _say(f"error: {one_line(error)}")
    return exit_code(error)


def exit_code(error: Exception) -> int:
    """The exit code for an error of any kind."""
    if isinstance(error, CkptError):
        return error.exit_code
    if isinstance(error, click.ClickException):
        return error.exit_code
    if isinstance(error, PermissionError):
        return PermissionDeniedError.exit_code
    return StorageError.exit_code if isinstance(error, OSError) else InternalError.exit_code


def one_line(error: Exception) -> str:
    """What went wrong, in one line that is safe to print."""
    return escaped(" ".join(_text(error).split()))


def _text(error: Exception) -> str:
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else PROGRAM
        return f"{error.format_message().rstrip('.')}: see {command} --help"
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, CkptError):
        return in_shell_words(str(error))
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    return f"unexpected {type(error).__name__}: {error}: this is a bug of cas_ckpt, --debug shows where"


_SHELL_WORDS = tuple(
    (re.compile(python), shell)
    for python, shell in (
        (r'repo\.branch\("?([^",()]+)"?, start="?([^",()]+)"?, force=True\)', r"cas-ckpt branch --force \1 \2"),
        (r'repo\.branch\("?([^",()]+)"?, start="?([^",()]+)"?\)', r"cas-ckpt branch \1 \2"),
        (r'repo\.branch\("([^"]+)"\)', r"cas-ckpt branch \1"),
        (r"repo\.branches\(\), repo\.tags\(\) and repo\.pins\(\) tell", "cas-ckpt branch, tag and pin list"),
        (r"repo\.branches\(\) and repo\.tags\(\) tell", "cas-ckpt branch and cas-ckpt tag tell"),
        (r"repo\.branches\(\) tells", "cas-ckpt branch lists"),
        (r"repo\.log\(keys='?([^')]+)'?\)", r"cas-ckpt log --key \1"),
        (r"repo\.set_policy\(Policy\(keep_daily=(\d+)\)\)", r"cas-ckpt policy set --keep-daily \1"),
        (r"repo\.policy\(\)", "cas-ckpt policy show"),
        (r'repo\.repair\("(\w+)", sources=\[OTHER\]\)', r"cas-ckpt fsck --repair \1 --from OTHER"),
        (r'repo\.repair\("(\w+)", refs=\{"(\w+)": (\w+)\}\)', r"cas-ckpt fsck --repair \1 --ref \2=\3"),
        (r'repo\.repair\("(\w+)"\)', r"cas-ckpt fsck --repair \1"),
        (r"repo\.rebuild_index\(\)", "cas-ckpt index rebuild"),
        (r"repo\.(ls|log|fsck)\((?:ref)?\)", r"cas-ckpt \1"),
        (r"Repository\.init\(path\)", "cas-ckpt init"),
        (r"with cas_ckpt\.limits\(max_entries=\.\.\.\)", "with --max-entries"),
        (r'\b(branch|onto|parents)="([^"]+)"', r"--\1 \2"),
        (r"\b(create|orphan|force|follow_links)=True", lambda found: f"--{found[1].replace('_', '-')}"),
        (r", or open it only to be read \(read_only=True\)", ""),
        (r"\bshapes=", "--shapes"),
        (r"\bon the command line[:,] ", ""),
    )
)
"""How what errors advise in Python is written in a shell, the first that fits first."""


def in_shell_words(text: str) -> str:
    """`text` of an error with its advice as command lines."""
    for python, shell in _SHELL_WORDS:
        text = python.sub(shell, text)
    return text


def _say(line: str) -> None:
    try:
        print(f"{PROGRAM}: {line}", file=sys.stderr)
    except OSError:
        pass  # nobody listens


def _broken_pipe() -> int:
    """The reader went away (`| head`): be quiet, also when Python flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE
