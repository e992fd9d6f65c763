"""Every verb explains itself: synopsis, description, options, examples, exit codes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click
import pytest

import cas_ckpt
from cas_ckpt import errors, native
from cas_ckpt.cli.command import ALWAYS, EXIT_CODES, Verb
from cas_ckpt.cli.main import PLACES, SECTIONS, cli, main


def commands(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Verb]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))
        else:
            assert isinstance(command, Verb)
            yield (*words, name), command


VERBS = dict(commands(cli))


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words, "--help"]) == 0
    return capsys.readouterr().out


def test_the_list_of_verbs_is_grouped_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys)
    assert [title for title in SECTIONS if f"{title}:\n" not in text] == []
    assert [name for name, place in PLACES.items() if f"{name} " not in text or place.summary not in text] == []
    assert {words[0] for words in VERBS} == set(PLACES)


def test_no_word_at_all_shows_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == help_of(capsys)


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_a_verb_has_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, *words)
    verb = VERBS[words]
    assert text.startswith(f"Usage: cas-ckpt {' '.join(words)} ")
    assert "\nOptions:\n" in text
    assert len(verb.examples) >= 1
    assert [example for example in verb.examples if f"\n  {example}\n" not in text] == []
    codes = text.split("Exit codes:\n")[1].split("\n")
    assert [line.split()[0] for line in codes if line.strip()] == [str(code) for code in verb.exit_codes]
    assert set(ALWAYS) <= set(verb.exit_codes) <= set(EXIT_CODES)
    undescribed = [param.name for param in verb.params if isinstance(param, click.Option) and not param.help]
    assert undescribed == []


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_the_examples_of_a_verb_parse(words: tuple[str, ...]) -> None:
    assert VERBS[words].examples
    for example in VERBS[words].examples:
        given = shlex.split(example)[1:]
        start = given.index(words[0])
        assert tuple(given[start : start + len(words)]) == words
        # Settings as they come from `cli`: a command keeps the option of help that its first context had.
        VERBS[words].make_context("x", given[start + len(words) :], **cli.context_settings)


def test_every_kind_of_error_has_an_exit_code_that_is_documented() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.CkptError)]
    assert {kind.exit_code for kind in kinds} <= set(EXIT_CODES)
    assert len(kinds) == 26


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cas-ckpt {cas_ckpt.__version__} ({native.STATE})\n"
