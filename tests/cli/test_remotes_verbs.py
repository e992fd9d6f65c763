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


def test_branches_status_and_pull_say_how_far_apart_the_two_sides_are(tmp_path: Path) -> None:
    there = made(tmp_path / "there", 0, 1)
    ok("clone", there, tmp_path / "clone")
    clone = str(tmp_path / "clone")
    assert ok("-C", clone, "status").splitlines()[0] == "On branch main, up to date with origin/main"
    assert ok("-C", clone, "pull") == "Everything up to date\n"
    with Repository.open(clone) as repo:
        commit(repo._handle, {"w": weights(5)}, message="of the clone")
    assert ok("-C", clone, "status").splitlines()[0] == "On branch main, ahead of origin/main by 1 commit"
    assert ok("-C", clone, "pull") == "Everything up to date\n"
    with Repository.open(there) as repo:
        commit(repo._handle, {"w": weights(6)})
        commit(repo._handle, {"w": weights(7)})
    ok("-C", clone, "fetch")
    apart = "diverged from origin/main: 1 commit here, 2 commits there"
    assert ok("-C", clone, "status").splitlines()[0] == f"On branch main, {apart}"
    listed = ok("-C", clone, "branch", "-a", "-v").splitlines()
    assert [line.split()[:2] for line in listed] == [["*", "main"], ["origin/main", listed[1].split()[1]]]
    assert f"[{apart}] of the clone" in listed[0]
    assert ok("-C", clone, "branch", "-r").split()[0] == "origin/main"
    ran = call("-C", clone, "pull")
    assert (ran.code, "cas-ckpt pull --rebase" in ran.err) == (14, True)
    assert call("-C", clone, "push").code == 14
    assert "rebased" in ok("-C", clone, "pull", "--rebase", "-n")
    assert ok("-C", clone, "pull", "--rebase").splitlines()[-2].split()[:2] == ["+", "main"]
    ok("-C", clone, "push")
    assert ok("-C", there, "log", "--oneline").splitlines()[0].endswith("of the clone")
    assert call("-C", clone, "branch", "-a", "new").code == 2


def test_ls_remote_lists_what_is_there_now(tmp_path: Path) -> None:
    there = made(tmp_path / "there", 0)
    here = made(tmp_path / "here")
    head = ok("-C", there, "resolve").strip()
    assert ok("-C", here, "ls-remote", there) == f"{head}  refs/heads/main\n"
    assert call("-C", here, "ls-remote").code == 15


def test_a_tag_that_moved_there_ends_a_pull_with_3(tmp_path: Path) -> None:
    there = made(tmp_path / "there", 0, 1)
    ok("-C", there, "tag", "v1", "main~1")
    ok("clone", there, tmp_path / "clone")
    ok("-C", there, "tag", "--force", "v1", "main")
    ran = call("-C", tmp_path / "clone", "pull")
    assert (ran.code, ran.out.splitlines()[1].split()[:3]) == (3, ["!", "tags/v1", "rejected:"])
    assert call("-C", tmp_path / "clone", "fetch", "--force").code == 0
