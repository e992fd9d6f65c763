"""clone, push, fetch, pull and remote on the command line."""

from __future__ import annotations

from pathlib import Path

from cas_ckpt import Repository
from tests.builders import commit, weights
from tests.cli.running import call, ok


def made(folder: Path, *steps: int) -> str:
    with Repository.init(folder) as repo:
        for step in steps:
            commit(repo._handle, {"w": weights(step)}, step=step)
    return str(folder)


def test_push_says_what_it_sent_and_what_moved(tmp_path: Path) -> None:
    here, there = made(tmp_path / "here", 0, 1), made(tmp_path / "there")
    assert ok("-C", here, "remote", "add", "origin", there) == f"remote origin is {there}\n"
    foreseen = ok("-C", here, "push", "-n").splitlines()
    assert foreseen[-1].endswith("would be sent")
    lines = ok("-C", here, "push").splitlines()
    assert lines[0] == f"To file://{there}"
    assert lines[1].split() == ["*", "main", "new"]
    assert lines[2].startswith("2 commits, 2 chunks, ")
    assert ok("-C", here, "push") == "Everything up to date\n"
    assert "origin/main" in ok("-C", here, "log")
    assert "origin/main" in ok("-C", here, "show")
    assert "Remotes:  1 (origin/main)" in ok("-C", here, "status")
    assert ok("-C", here, "remote", "list").splitlines()[0] == f"origin  {there}"
    assert call("-C", here, "remote", "list", "--json").json[0]["branches"].keys() == {"main"}


def test_a_push_that_would_not_move_forward_ends_with_14(tmp_path: Path) -> None:
    here, there = made(tmp_path / "here", 0), made(tmp_path / "there", 1)
    ran = call("-C", here, "push", there)
    assert ran.code == 14
    assert "--force" in ran.err
    assert ok("-C", here, "push", "--force", there).splitlines()[1].split()[:2] == ["+", "main"]
    assert call("-C", here, "push", "--force-with-lease=1234", there).code == 15
    ok("-C", here, "push", "--force-with-lease=main", there, "main")
    ok("-C", here, "push", there, "main:ft/x")
    assert ok("-C", here, "push", "--delete", there, "ft/x").splitlines()[1].split() == ["-", "ft/x", "deleted"]
    assert call("-C", here, "push", "--delete").code == 2
    assert call("-C", here, "push").code == 15


def test_clone_pull_and_fetch(tmp_path: Path) -> None:
    there = made(tmp_path / "there", 0, 1)
    assert "1 branch" in ok("clone", there, tmp_path / "clone")
    assert ok("-C", tmp_path / "clone", "resolve", "origin/main") == ok("-C", there, "resolve", "main")
    ok("clone", there, cwd=tmp_path / "clone")
    assert (tmp_path / "clone" / "there" / "config").exists()
    with Repository.open(there) as repo:
        commit(repo._handle, {"w": weights(5)})
    lines = ok("-C", tmp_path / "clone", "fetch", "--prune").splitlines()
    assert lines[0] == f"From file://{there}"
    assert lines[1].split()[0] == "origin/main"
    assert lines[-1].startswith("1 commits")
    ok("-C", tmp_path / "clone", "pull")
    assert ok("-C", tmp_path / "clone", "resolve", "main") == ok("-C", there, "resolve", "main")
    assert call("clone", tmp_path / "nothing", tmp_path / "x").code == 10
    assert call("clone", there, tmp_path / "there").code == 14


def test_remotes_are_changed_and_secrets_refused(tmp_path: Path) -> None:
    here = made(tmp_path / "here")
    ok("-C", here, "remote", "add", "origin", "s3://bucket/x")
    ok("-C", here, "remote", "rename", "origin", "up")
    ok("-C", here, "remote", "set-url", "up", "s3://bucket/y")
    assert ok("-C", here, "remote", "list") == "up  s3://bucket/y\n"
    ran = call("-C", here, "remote", "add", "bad", "s3://key:hunter2@bucket/y")
    assert ran.code == 2
    assert "hunter2" not in ran.out + ran.err
    ok("-C", here, "remote", "remove", "up")
    assert ok("-C", here, "remote", "list") == ""
    assert call("-C", here, "remote", "remove", "up").code == 15


def test_what_is_not_there_is_said_with_what_to_do(tmp_path: Path) -> None:
    here = made(tmp_path / "here", 0)
    assert "there is no remote 'origin': none is noted: cas-ckpt remote add origin URL" in call("-C", here, "push").err
    ok("-C", here, "remote", "add", "backup", made(tmp_path / "there"))
    assert "there is no remote 'origin': known are backup" in call("-C", here, "push").err
    missing = call("-C", here, "push", "backup", "nothing")
    assert missing.code == 15 and "nothing" in missing.err
    assert "is no branch or tag: say what to call it there, main~0:BRANCH" in call(
        "-C", here, "push", "backup", "main~0"
    ).err  # fmt: skip
    assert "run.bundle: there is no such file" in call("-C", here, "bundle", "list", tmp_path / "run.bundle").err
    assert "a URL has '://'" in call("-C", here, "remote", "add", "bucket", "s3:/bucket/run").err
    assert "nothing is kept of 's3://b/x'" in call("cache", "clear", "s3://b/x", CAS_CKPT_CACHE=str(tmp_path / "c")).err
