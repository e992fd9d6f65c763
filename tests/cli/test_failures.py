"""Whatever fails ends in one clear line and the exit code of its kind."""

from __future__ import annotations

import ast
import ctypes
import re
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest

import cas_ckpt
from cas_ckpt import Repository, errors
from cas_ckpt.cli.output import exit_code, one_line, report_error
from cas_ckpt.objects.digest import seal
from tests.cli.running import Ran, call, command, environment, run

PACKAGE = Path(cas_ckpt.__file__).parent
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.CkptError)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"x": 1, "y": list(range(2000))}, message="one")
        repo.commit({"x": 2, "w": np.zeros((3, 4))}, message="two")
        repo.tag("v1")
    return tmp_path / "repo"


def fails(code: int, said: str, *words: str | Path, **env: str) -> None:
    ran = call(*words, **env)
    assert ran.err.startswith("cas-ckpt: error: ")
    assert ran.err.count("\n") == 1
    assert said in ran.err
    assert (ran.code, ran.out) == (code, "")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_error_is_one_line_and_its_exit_code(
    kind: type[errors.CkptError], capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_error(kind("wanted this,\n  found \x1b[31mthat"), debug=False) == kind.exit_code
    assert capsys.readouterr().err == "cas-ckpt: error: wanted this, found \\x1b[31mthat\n"


@pytest.mark.parametrize(
    ("python", "shell"),
    [
        ("no entry: repo.ls(ref) lists the keys", "no entry: cas-ckpt ls lists the keys"),
        ("repo.log() marks the forgotten ones", "cas-ckpt log marks the forgotten ones"),
        ("see repo.log(keys='m/w')", "see cas-ckpt log --key m/w"),
        ("repo.fsck() says why", "cas-ckpt fsck says why"),
        ("move it with force=True", "move it with --force"),
        ("pass follow_links=True if", "pass --follow-links if"),
        ('run repo.repair("refs")', "run cas-ckpt fsck --repair refs"),
        ('repo.repair("config", sources=[OTHER])', "cas-ckpt fsck --repair config --from OTHER"),
        ('repo.repair("refs", refs={"main": COMMIT})', "cas-ckpt fsck --repair refs --ref main=COMMIT"),
        ("repo.rebuild_index(), then collect", "cas-ckpt index rebuild, then collect"),
        ('repo.branch("b") makes another', "cas-ckpt branch b makes another"),
        ('repo.branch("b", start="1234", force=True)', "cas-ckpt branch --force b 1234"),
        ("repo.set_policy(Policy(keep_daily=7)) makes one", "cas-ckpt policy set --keep-daily 7 makes one"),
        ("raise it: with cas_ckpt.limits(max_entries=...)", "raise it: with --max-entries"),
        ("raise it: with cas_ckpt.limits(max_refs=...)", "raise it: with --max-refs"),
        ("on the command line, cas-ckpt index rebuild makes it", "cas-ckpt index rebuild makes it"),
        ('repo.add_remote("origin", URL) notes one', "cas-ckpt remote add origin URL notes one"),
        ("Repository.init(path) makes one", "cas-ckpt init makes one"),
    ],
)
def test_advice_in_python_is_said_as_a_command_line(python: str, shell: str) -> None:
    assert one_line(errors.CkptError(python)) == shell


def messages(tree: ast.AST) -> list[str]:
    """Texts of the source, docstrings aside, NAME where a value goes."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "NAME" for part in node.values)
        for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
    ]  # fmt: skip
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return found + [str(node.value) for node in constants if id(node) not in docstrings | inside]


PYTHON_ALONE = ("repo.checkout(REF, into=", "repo.commit(")
"""A live state is Python's: no command line has these."""


def test_no_call_that_a_message_advises_reaches_a_shell_as_python() -> None:
    texts = [
        text
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in ("cli", "testing")
        for text in messages(ast.parse(path.read_bytes()))
        if re.search(r"\brepo\.\w+\(|Repository\.\w+\(", text)
    ]
    assert len(texts) > 20
    told = [one_line(errors.CkptError(text)) for text in texts if not any(call in text for call in PYTHON_ALONE)]
    assert [text for text in told if re.search(r"\brepo\.\w+\(|Repository\.\w+\(", text)] == []


def test_what_nobody_expected_is_called_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(ZeroDivisionError("by zero"), debug=False) == 1
    assert "unexpected ZeroDivisionError: by zero: this is a bug of cas_ckpt" in capsys.readouterr().err


def test_debug_shows_where_it_failed(capsys: pytest.CaptureFixture[str]) -> None:
    report_error(errors.NotFoundError("gone"), debug=True)
    assert "NotFoundError: gone" in capsys.readouterr().err.splitlines()[0]


def test_errors_of_the_system_have_their_codes() -> None:
    assert exit_code(PermissionError(13, "denied")) == 12
    assert exit_code(OSError(28, "full")) == 1
    assert one_line(FileNotFoundError(2, "No such file", "a\nb")) == "a b: No such file"
    assert exit_code(click.UsageError("no")) == 2


def test_what_is_not_there_is_missing(place: Path) -> None:
    fails(15, "'nothing'", "-C", place, "log", "nothing")
    fails(15, "history begins after 1", "-C", place, "show", "main~9")
    fails(15, "no commit's id begins like this", "-C", place, "resolve", "0000000000")
    fails(15, "'z'", "-C", place, "read", "main", "z")
    fails(15, "no entry matches z*", "-C", place, "ls", "main", "z*")
    fails(15, "there is no branch 'ft'", "-C", place, "branch", "-d", "ft")


def test_a_folder_without_a_repository_is_said_to_be_one(tmp_path: Path) -> None:
    fails(10, "holds no cas_ckpt repository", "-C", tmp_path, "log")
    fails(10, "holds no cas_ckpt repository", "-C", tmp_path / "nowhere", "index", "rebuild")
    ran = call("log", cwd=tmp_path)
    assert (ran.code, "any folder above" in ran.err) == (10, True)


def test_what_is_there_already_is_a_conflict(place: Path) -> None:
    fails(14, "not an empty folder", "init", place)
    fails(14, "there is a tag 'v1' already", "-C", place, "tag", "v1")
    fails(14, "'v1' is a tag already", "-C", place, "branch", "v1")


def test_bad_calls_are_usage_errors(place: Path) -> None:
    fails(2, "there is no verb 'lgo' (did you mean 'log'?): see cas-ckpt --help", "lgo")
    fails(2, "see cas-ckpt log --help", "-C", place, "log", "--nothing")
    fails(2, "see cas-ckpt read --help", "-C", place, "read", "main")
    fails(2, "'a b' is not a name", "-C", place, "branch", "a b")
    fails(2, "'../x'", "-C", place, "resolve", "../x")
    fails(2, "'main' is the default branch", "-C", place, "branch", "-d", "main")
    fails(2, "region part 'x'", "-C", place, "read", "main", "w", "--region", "x")
    fails(2, "has 3 parts, the tensor 2 dimensions", "-C", place, "read", "main", "w", "--region", "0,0,0")
    fails(2, "w: dimension 0 is 3 long: 9 is outside", "-C", place, "read", "main", "w", "--region", "9")
    fails(2, "x: only tensors and arrays have regions", "-C", place, "read", "main", "x", "--region", ":")
    fails(2, "wanted NAME=NUMBER", "-C", place, "import", "x.pt", "--metric", "loss")
    fails(2, "is not a size", "-C", place, "export", "main", "out", "--max-shard-size", "big")
    fails(2, "holds no credentials", "-C", "gs://key@bucket/x", "log")
    fails(2, "encoding is 'gzip'", "init", place.parent / "new", "--encoding", "gzip")


def test_control_characters_of_an_argument_do_not_reach_the_terminal(place: Path) -> None:
    ran = call("-C", place, "resolve", "a\x1b[31mb")
    assert (ran.code, "\x1b" in ran.err) == (2, False)


def test_damage_is_told_from_other_failures(place: Path) -> None:
    (place / "refs" / "heads" / "main.ref").write_bytes(b"CASCKREC" + bytes(90))
    fails(13, "refs/heads/main.ref", "-C", place, "log")


def test_a_damaged_index_tells_the_remedy(place: Path) -> None:
    (place / "index" / "index.sqlite").write_bytes(b"\xff" * 5000)
    fails(13, "cas-ckpt index rebuild", "-C", place, "log")


def test_a_repository_of_a_newer_format_is_refused(place: Path) -> None:
    (place / "config").write_bytes(seal("config", 99, {}, key="config"))
    fails(16, "upgrade cas_ckpt", "-C", place, "log")
    fails(16, "upgrade cas_ckpt", "-C", place, "index", "rebuild")


def test_a_malformed_file_is_not_imported(place: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"\xff" * 100)
    fails(2, "bad.safetensors", "-C", place, "import", bad, "--onto", "main")
    with Repository.open(place) as repo:
        assert len(repo.log()) == 2


def without_root_powers() -> None:
    """Let permissions count for root too: take CAP_DAC_OVERRIDE away (others have none to lose)."""
    pr_capbset_drop, cap_dac_override = 24, 1
    ctypes.CDLL(None).prctl(pr_capbset_drop, cap_dac_override, 0, 0, 0)


def test_a_medium_that_may_not_be_written_is_read_and_not_written(place: Path) -> None:
    def restricted(*words: str) -> Ran:
        done = subprocess.run(
            command("-C", place, *words), env=environment(), preexec_fn=without_root_powers,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return Ran(done.returncode, done.stdout, done.stderr)

    paths = [place, *place.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        read, tagged = restricted("log", "--oneline"), restricted("tag", "v2")
    finally:
        for path in paths:
            path.chmod(0o755)
    assert (read.code, [line.split()[-1] for line in read.out.splitlines()], read.err) == (0, ["two", "one"], "")
    assert (tagged.code, tagged.out, tagged.err.count("\n")) == (12, "", 1)


def test_an_interruption_is_told_and_has_its_code(place: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background ignores it
        "from cas_ckpt.cli.main import main\n"
        "from cas_ckpt.repository import Repository\n"
        "Repository.show = lambda *args, **options: os.kill(os.getpid(), signal.SIGINT)\n"
        f"sys.exit(main(['-C', {str(place)!r}, 'show']))"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "cas-ckpt: interrupted\n")


def test_a_reader_that_goes_away_is_no_error(place: Path) -> None:
    with subprocess.Popen(
        command("-C", place, "log"), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_a_terminal_without_unicode_still_shows_the_log(place: Path) -> None:
    with Repository.open(place) as repo:
        repo.commit({"x": 3}, message="an umbrella ☂")
    ran = run("-C", place, "log", "--oneline", "-n", "1", PYTHONIOENCODING="latin-1")
    assert (ran.code, ran.err, ran.out.endswith("an umbrella \\u2602\n")) == (0, "", True)


def test_a_ctrl_c_while_the_program_is_loaded_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    ran = run("log", PYTHONPATH=path)
    assert (ran.code, ran.out, ran.err) == (130, "", "cas-ckpt: interrupted\n")


def test_a_thousand_metrics_make_no_line_and_no_error_that_nobody_reads(tmp_path: Path) -> None:
    metrics = {f"eval/task_{number:04}/acc": number / 7 for number in range(1000)}
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"x": 1}, metrics=metrics)
    for words in (["log"], ["log", "--oneline"], ["log", "--graph"], ["show"], ["metrics"], ["best", "loss"]):
        ran = call("-C", tmp_path / "repo", *words)
        assert max(map(len, (ran.out + ran.err).splitlines())) < 1000, words
        assert "980 more" in ran.out + ran.err, words
    assert len(call("-C", tmp_path / "repo", "metrics", "--json").json[0]["metrics"]) == 1000
    assert "eval/task_0999/acc" in call("-C", tmp_path / "repo", "metrics", "--name", "eval/task_0999/acc").out
