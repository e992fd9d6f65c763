"""The verbs of docs/command-line.md, from what the command line itself declares."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator

import click

from cas_ckpt.cli.command import ALWAYS, EXIT_CODES, Verb, shared_options
from cas_ckpt.cli.main import PLACES, SECTIONS, cli

WIDTH = 120
"""Characters in a line of prose."""

REVISIONS = ("REVISION", "[REVISION]", "REVISION...", "[REVISION]...", "REVISION REVISION...")

ARGUMENTS = {
    "[REPO]": "where: a path or URL; the working directory if not given",
    "PATH": "a file or folder",
    "FILE": "the file of the bundle",
    "[FOLDER]": "where the clone is to be: a path or URL",
    "KEY": "the key of an entry",
    "[KEY]...": "keys or patterns",
    "[REF]": "a branch, tag or pin",
    "[REF...]": "branches and tags, or REVISION:BRANCH",
    "URL": "a path or URL",
    "METRIC[:min|max]": "the name of a metric",
    "[NAME [REVISION]]": "the name, and the commit that it is to name",
    "NAME...": "names of pins",
    "[A [B] | A..B] [KEY]...": "one or two revisions; then keys or patterns",
    "[QUERY]": "one SELECT; - reads it from standard input",
    "[REVISION] [MESH]...": "a revision; then meshes to restore into, as dp=4,tp=2",
    "[REMOTE]": "a remote's name, a URL or a path; origin if not given",
    "[BRANCH]": "a branch there; the default branch if not given",
    "PATTERN": "a branch, or a pattern of branches",
    "[PATTERN]": "a branch, or a pattern of branches",
    "[PATTERN...]": "patterns of branches there",
    "NAME": "the name of a remote",
    "OLD": "the name that the remote has",
    "NEW": "the name that it gets",
    "[URL|ID]": "a repository's URL or id; all if not given",
    "[URL]": "the URL of a PostgreSQL database",
}
"""What arguments stand for that are not revisions."""

SHARED = {option.name for option in shared_options()}


def commands(group: click.Group, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command below a group with the words that call it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*names, name))
        else:
            yield (*names, name), command


def cell(text: str) -> str:
    """Text inside a table."""
    return " ".join(text.split()).replace("|", "\\|")


def row(parameter: click.Parameter, context: click.Context) -> str:
    """An argument or option: how it is written, its default, what it means."""
    default = parameter.get_default(context, call=False)
    shown = "" if default in (None, False, "", ()) or callable(default) or "UNSET" in repr(default) else f"`{default}`"
    if isinstance(parameter, click.Option):
        value = "" if parameter.is_flag else f" {re.sub('INTEGER( RANGE)?', 'N', parameter.make_metavar(context))}"
        names = ", ".join(f"`{cell(name + value)}`" for name in (*parameter.opts, *parameter.secondary_opts))
        return f"| {names} | {'required' if parameter.required else shown} | {cell(parameter.help or '')} |"
    written = parameter.make_metavar(context)
    meaning = ("revisions" if "..." in written else "a revision") if written in REVISIONS else ARGUMENTS[written]
    return f"| `{cell(written)}` | {'required' if parameter.required else shown} | {meaning} |"


def paragraph(text: str) -> str:
    """A paragraph of a description; one whose lines are to stay as they are begins with a backspace."""
    if text.startswith("\b\n"):
        return f"```text\n{text[2:]}\n```"
    return "\n".join(textwrap.wrap(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False))


def about(names: tuple[str, ...], command: click.Command) -> str:
    """One verb: what it does, its arguments, examples and exit codes of its own."""
    context = click.Context(command, info_name=" ".join(("cas-ckpt", *names)))
    parts = [f"### `cas-ckpt {' '.join(names)}`"]
    parts += [paragraph(part) for part in inspect.cleandoc(command.help or "").split("\n\n")]
    own = [parameter for parameter in command.params if parameter.name not in SHARED]
    if own:
        rows = [row(parameter, context) for parameter in own]
        parts.append("\n".join(["| argument | default | meaning |", "| --- | --- | --- |", *rows]))
    assert isinstance(command, Verb)
    if command.examples:
        parts.append("\n".join(["```bash", *command.examples, "```"]))
    if codes := [f"{code} ({EXIT_CODES[code]})" for code in command.exit_codes if code not in ALWAYS]:
        parts.append(paragraph(f"Exit codes of its own: {', '.join(codes)}."))
    return "\n\n".join(parts)


def verbs() -> str:
    """All verbs, in the sections of `cas-ckpt --help`."""
    context = click.Context(cli)
    shared = "\n".join(row(option, context) for option in cli.params)
    parts = ["## For every verb", f"| option | default | meaning |\n| --- | --- | --- |\n{shared}"]
    codes = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    usual = ", ".join(map(str, ALWAYS))
    parts += [
        f"| exit code | meaning |\n| --- | --- |\n{codes}",
        paragraph(
            f"Every verb may end with {usual}; others are listed with it. A list or search that finds nothing prints "
            "nothing and ends with 0; a name (revision, key, metric, remote) that is not there is an error, 15. A "
            "question that is answered by yes or no (`merge-base --is-ancestor`, `diff --exit-code`, `store check`) "
            "ends with 0 or 1."
        ),
    ]
    found: dict[str, list[str]] = {name: [] for name in PLACES}
    for names, command in commands(cli):
        found[names[0]].append(about(names, command))
    for section, places in SECTIONS.items():
        parts.append(f"## To {section.partition(' (')[0]}")
        for name in places:
            parts += found[name]
    return "\n\n".join(parts)
