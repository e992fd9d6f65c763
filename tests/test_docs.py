"""README and docs/ are true to the code: every command and public name is there, every command line parses."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import cas_ckpt
from tests.docs.command_line import commands

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^[ ]*```(\w*)\n(.*?)^[ ]*```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def from_root(page: Path) -> str:
    """What a page is called in the name of a test: pages of several folders have one name."""
    return str(page.relative_to(ROOT))


@cache
def all_text() -> str:
    return "\n".join(page.read_text() for page in PAGES)


def command_line() -> click.Group:
    module = importlib.import_module("cas_ckpt.cli.main")
    return next(value for value in vars(module).values() if isinstance(value, click.Group))


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in _BLOCK.findall(page.read_text()) if language in languages]


def shown_command_lines(page: Path) -> list[str]:
    """The `cas-ckpt` command lines in the shell blocks of a page, backslash continuations joined."""
    lines = "\n".join(blocks(page, "console", "bash", "sh", "shell")).replace("\\\n", " ").splitlines()
    plain = [line.strip().removeprefix("$ ") for line in lines]
    return [line for line in plain if line.startswith("cas-ckpt ")]


def words_of(line: str) -> list[str]:
    """The arguments of a command line up to a pipe, a redirection or the next command."""
    words = shlex.split(line, comments=True)[1:]
    ends = [at for at, word in enumerate(words) if word in {"|", ">", ">>", "&&", ";", "<", "2>"}]
    return words[: ends[0]] if ends else words


def parse(command: click.Command, words: list[str], name: str, parent: click.Context | None = None) -> None:
    """Parse without running anything.

    Raises:
        click.UsageError: no such command, option, or a wrong number of arguments.
    """
    try:
        context = command.make_context(name, list(words), parent=parent)
    except click.exceptions.Exit:  # --help, --version
        return
    if isinstance(command, click.Group):
        held_back: list[str] = getattr(context, "_protected_args", None) or vars(context).get("protected_args", [])
        rest = [*held_back, *context.args]
        found, below, rest = command.resolve_command(context, rest)
        assert below is not None
        parse(below, rest, str(found), context)


def methods_of(cls: type) -> list[str]:
    return [name for name, _ in inspect.getmembers(cls) if not name.startswith("_") and callable(getattr(cls, name))]


def test_every_command_is_documented() -> None:
    calls = [" ".join(("cas-ckpt", *names)) for names, _ in commands(command_line())]
    assert [call for call in calls if call not in all_text()] == []


def test_every_public_name_is_documented() -> None:
    missing = [name for name in cas_ckpt.__all__ if not re.search(rf"\b{name}\b", all_text())]
    assert missing == []


def test_every_method_of_repository_is_documented() -> None:
    named = r"(?:repo|Repository)\.{}\b|`\.?{}\(`?"
    missing = [name for name in methods_of(cas_ckpt.Repository) if not re.search(named.format(name, name), all_text())]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=from_root)
def test_every_command_line_that_is_shown_parses(page: Path) -> None:
    refused = {}
    for line in shown_command_lines(page):
        try:
            parse(command_line(), words_of(line), "cas-ckpt")
        except click.UsageError as error:
            refused[line] = error.format_message()
    assert refused == {}


def test_a_command_line_with_an_unknown_option_would_be_found() -> None:
    with pytest.raises(click.UsageError):
        parse(command_line(), words_of("cas-ckpt log --no-such-option | head"), "cas-ckpt")


@pytest.mark.parametrize("page", PAGES, ids=from_root)
def test_every_python_block_is_python(page: Path) -> None:
    for text in blocks(page, "python", "py"):
        compile(inspect.cleandoc(text), str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=from_root)
def test_every_link_inside_the_repository_leads_somewhere(page: Path) -> None:
    targets = [target for target in _LINK.findall(page.read_text()) if "://" not in target and "@" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def run(*command: str, folder: Path) -> str:
    """What a command prints; it must succeed."""
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT), "PATH": scripts, "COLUMNS": "100"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_quickstart_of_the_readme_runs_and_runs_again(tmp_path: Path) -> None:
    """Again in another process: what it begins with `create=True` it must resume from; then the guide branches off."""
    program, guide = (blocks(ROOT / page, "python")[0] for page in ("README.md", "docs/guide.md"))
    for runs in (1, 2):
        run(sys.executable, "-c", program + guide * (runs - 1), folder=tmp_path)
        with cas_ckpt.Repository.open(tmp_path / "runs" / "ckpts") as repo:
            assert len(repo.log("main")) == runs
            assert len(repo.branches()) == runs


def test_the_loop_of_the_reference_that_is_preempted_keeps_the_last_step_though_an_earlier_commit_failed(
    tmp_path: Path,
) -> None:
    (program,) = [each for each in blocks(ROOT / "docs" / "reference.md", "python") if "SIGTERM" in each]
    state = {"w": torch.zeros(9)}

    def train(step: int) -> None:
        state["w"].fill_(step)
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    try:
        with cas_ckpt.Repository.init(tmp_path / "repo") as repo:
            nowhere = cas_ckpt.CommitOptions(parents=["0123456789"])  # there is no such commit
            repo.commit_async(state, step=5, options=nowhere)
            names = {"repo": repo, "state": state, "train": train, "step": 5, "num_steps": 200}
            exec(compile(program, "reference.md", "exec"), names)
            assert names["made"] is True and names["step"] == 7
    finally:
        signal.signal(signal.SIGTERM, before)
    with cas_ckpt.Repository.open(tmp_path / "repo") as repo:
        assert repo.latest("main").step == 7  # type: ignore[union-attr]
        assert repo.load("main")["w"].tolist() == [7] * 9


def test_the_map_of_the_source_names_every_room_and_files_that_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "cas_ckpt"
    diagram = page.partition("## The rooms")[2].partition("```mermaid")[2].partition("```")[0]
    boxes = re.findall(r'\["(.+?)(?:<br>.*)?"\]', diagram)
    listed = {name.removesuffix("/").removesuffix(".py") for box in boxes for name in box.split(", ")}
    folders = {folder.name for folder in package.iterdir() if (folder / "__init__.py").exists()}
    assert listed == {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"} | folders
    files = {path.relative_to(package) for path in package.rglob("*.py")}
    named = {Path(name) for name in re.findall(r"[a-z_/]+\.py\b", page)}
    lost = [name for name in named if not any(file.match(str(name)) for file in files) and not (ROOT / name).exists()]
    assert lost == []


def test_every_target_of_the_makefile_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)", all_text())) - targets == set()


# ---------------------------------------------------------------- sessions, as they are shown

_SHOWN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SESSIONS = [page for page in PAGES if blocks(page, "pycon")]


def run_sessions(page: Path, folder: Path) -> list[str]:
    """Run the Python and shell sessions of a page in order, in one process and one folder; what was not as shown."""
    names: dict[str, Any] = {}
    wrong: list[str] = []
    runner = doctest.DocTestRunner(optionflags=_SHOWN, verbose=False)
    for language, text in _BLOCK.findall(page.read_text()):
        if language == "pycon":
            session = doctest.DocTestParser().get_doctest(text, names, page.name, str(page), 0)
            runner.run(session, out=wrong.append, clear_globs=False)
            names = session.globs
        elif language == "console":
            wrong += not_as_shown(text, folder)
    return wrong


def not_as_shown(session: str, folder: Path) -> list[str]:
    """Commands of a shell session whose output is not what is shown below them; `...` matches anything."""
    found = []
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", session, re.MULTILINE):
        printed = run(*shlex.split(command), folder=folder)
        if not doctest.OutputChecker().check_output(shown, printed, _SHOWN):
            found.append(f"$ {command}\nis shown with\n{shown}\nand prints\n{printed}")
    return found


@pytest.mark.parametrize("page", SESSIONS, ids=from_root)
def test_sessions_print_what_is_shown(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_sessions(page, tmp_path) == []


def test_a_session_that_prints_something_else_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    python = "```pycon\n>>> 1 + 1\n3\n>>> x = 4\n```\n```pycon\n>>> x\n4\n```\n"
    page.write_text(f"{python}```console\n$ echo a b\nc ...\n```\n")
    in_python, in_shell = run_sessions(page, tmp_path)
    assert "Expected:\n    3\nGot:\n    2" in in_python
    assert "$ echo a b\nis shown with\nc ..." in in_shell


# ---------------------------------------------------------------- programs of docs/dcp.md

BEFORE_DCP = """
from pathlib import Path
import torch
from cas_ckpt import CommitOptions, Repository

state = {"w": torch.ones(100, 100), "step": 7}
with Repository.init("runs/ckpts") as repo:  # "The repository must exist"
    for step in (1, 2):
        repo.commit(state, step=step)
    repo.branch("run-7")

def train():  # as Accelerate saves
    dcp.save({"w": state["w"]}, checkpoint_id="outputs/step_5/pytorch_model_fsdp_0")
"""
AFTER_DCP = """
with Repository.open("runs/ckpts") as repo:
    assert len(repo.log("main")) == 3 and repo.log("main")[0].message == "warm-up done"
    assert list(repo.tags()) == ["step_5/pytorch_model_fsdp_0"], repo.tags()
    assert repo.log("run-7")[0].id == repo.tags()["step_5/pytorch_model_fsdp_0"]
"""


def test_the_programs_of_the_page_on_dcp_run(tmp_path: Path) -> None:
    programs = blocks(ROOT / "docs" / "dcp.md", "python")
    assert len(programs) == 2
    run(sys.executable, "-c", "\n".join([BEFORE_DCP, *programs, AFTER_DCP]), folder=tmp_path)
