"""The command line reads a plain log without SQLAlchemy: the same as the whole way, or it says that it cannot."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt import AmbiguousIdError, CommitOptions, Lineage, Repository, clock
from cas_ckpt.cli.log import names_of_commits
from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.ops.history.quick_log import quick_log
from tests.builders import commit, new_repository
from tests.cli.running import ROOT, call, environment

NOON = 1_795_262_400.0
LINES = ("log", "log --oneline", "log --graph", "log --json", "log -n 3", "log --first-parent -n 9", "log v1", "log b1")


def grown(folder: Path, seed: int, *, commits: int = 25, merges: bool = True) -> Path:
    """A repository with a random history: branches, merges, clocks that go back, tags, pins, forgotten commits."""
    rng = random.Random(seed)
    now = [NOON]
    with clock.fixed(lambda: now[0]), Repository.init(folder, group=None) as repo:
        handle = repo._handle
        for number in range(commits):
            now[0] = NOON + number * 60 - (rng.choice([0, 0, 500]) if merges else 0)
            heads = repo.branches()
            branch = rng.choice(["main", "main", "b1", "b2"]) if merges and heads else "main"
            others = [rng.choice(list(heads))] if merges and len(heads) > 1 and rng.random() < 0.3 else []
            step = number if rng.random() < 0.7 else None
            commit(
                handle, {"w": np.full(4, number, np.float32)}, branch=branch, step=step, message=f"number {number}\n",
                parents=[other for other in others if other != branch], metrics={"loss": 1.5} if number % 2 else {},
                meta={"n": number} if merges and number % 5 == 0 else None,
            )  # fmt: skip
            if branch == "main" and number < 3:
                repo.branch("b1", force=number > 0)
        repo.branch("b2", start="main", force=True)
        repo.tag("v1", "main~1")
        repo.pin("main~2", name="paper")
        repo.commit(
            {"w": np.zeros(3, np.float32)},
            branch="b1",
            options=CommitOptions(lineage=[Lineage("fine-tune-of", "main")]),
        )
        heads = {*repo.branches().values(), *repo.tags().values(), repo.log("main")[2].id}
        plain = [each.id for each in repo.log("main") if each.id not in heads]
        given_up = [one for one in plain[2:6:2] if one not in {pin.commit for pin in repo.pins()}]
        if given_up:
            repo.forget(revisions=given_up)
        for revision, keys in (("main", None), ("main", None), ("main~2", None), ("v1", "w")):
            now[0] += 7
            repo.load(revision, keys=keys)
    return folder


def agree(place: Path, *, limits: Sequence[int | None] = (None, 2, 7)) -> None:
    """Both ways say the same of every branch and tag."""
    with Repository.open(place, group=None) as repo:
        names = names_of_commits(repo)
        for name in [None, *repo.branches(), *repo.tags()]:
            for limit in limits:
                for first_parent in (False, True):
                    quick = quick_log(str(place), name, limit=limit, first_parent=first_parent)
                    assert quick is not None
                    assert quick.commits == repo.log(name or (), limit=limit, first_parent=first_parent)
                    assert quick.names == names


@pytest.mark.parametrize("seed", range(2))
def test_the_quick_way_and_the_whole_way_say_the_same(tmp_path: Path, seed: int) -> None:
    agree(grown(tmp_path / "repo", seed, merges=seed > 0))


@pytest.mark.parametrize("line", LINES)
def test_the_command_line_prints_the_same_either_way(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = grown(tmp_path / "repo", 1, commits=8)
    quick = call("-C", place, *line.split())
    monkeypatch.setattr("cas_ckpt.cli.log.quick_log", lambda *_, **__: None)
    assert quick == call("-C", place, *line.split()) and quick.code == 0 and quick.out


def lose_the_last_rows(place: Path) -> None:
    """Somebody commits, and dies before the index hears of it."""
    kept = place.with_name("kept.sqlite")
    shutil.copyfile(place / INDEX_PATH, kept)
    with Repository.open(place, group=None) as repo:
        commit(repo._handle, {"w": np.zeros(3, np.float32)})
    shutil.copyfile(kept, place / INDEX_PATH)


def run_sql(statement: str) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        with closing(sqlite3.connect(place / INDEX_PATH)) as raw, raw:
            raw.execute(statement)

    return run


def add_a_remote(place: Path) -> None:
    with Repository.open(place, group=None) as repo:
        repo.add_remote("origin", place.with_name("elsewhere"))


def damage(name: str | Path) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        (place / name).write_bytes(bytes(5000))

    return run


UNUSUAL: dict[str, Callable[[Path], None]] = {
    "the index lacks the head": lose_the_last_rows,
    "the index is gone": lambda place: (place / INDEX_PATH).unlink(),
    "the index is damaged": lambda place: ((place / INDEX_PATH).write_bytes(bytes(5000)) and None) or None,
    "the index is of another store": run_sql("UPDATE t_meta SET value = 'other' WHERE key = 'store_id'"),
    "the index is of another version": run_sql("UPDATE alembic_version SET version_num = '0003'"),
    "a parent is not known": run_sql("DELETE FROM t_commits WHERE message LIKE 'number 2%'"),
    "a row is damaged": run_sql("UPDATE t_commits SET stats = '[1' WHERE message LIKE 'number 2%'"),
    "there are settings": add_a_remote,
    "a ref is damaged": lambda place: ((place / "refs/heads/b1.ref").write_bytes(b"x") and None) or None,
    "the repository is gone": lambda place: (place / "config").unlink(),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_whatever_is_unusual_is_asked_the_whole_way(name: str, tmp_path: Path) -> None:
    place = grown(tmp_path / "repo", 3, commits=8, merges=False)
    with Repository.open(place, group=None) as repo:
        repo.branch("b1", force=True)
    assert quick_log(str(place)) is not None
    UNUSUAL[name](place)
    assert quick_log(str(place)) is None


def test_both_ways_say_when_a_state_was_last_restored_whole_and_in_order(tmp_path: Path) -> None:
    place = grown(tmp_path / "repo", 0, commits=8, merges=False)
    run_sql("UPDATE t_restores SET error = 'the disk is full' WHERE restore_id = 2")(place)
    agree(place)
    quick = quick_log(str(place))
    assert quick is not None
    restored = [each.restored_s for each in quick.commits]
    assert restored[0] is not None and restored[2] is not None and restored[0] + 14 == restored[2]
    assert not any(restored[1:2] + restored[3:])


def test_the_first_commits_of_a_log_cost_the_same_however_many_merges_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = grown(tmp_path / "repo", 0, commits=8, merges=False)
    connect, steps = sqlite3.connect, [0]

    def counted(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **options)
        connection.set_progress_handler(lambda: steps.append(steps.pop() + 1), 10)
        return connection

    def cost() -> int:
        steps[0] = 0
        with monkeypatch.context() as patch:
            patch.setattr("cas_ckpt.index.history.sqlite3.connect", counted)
            quick = quick_log(str(place), limit=3)
        assert quick is not None and len(quick.commits) == 3
        return steps[0]

    before = cost()
    run_sql(
        "INSERT INTO t_more_parents (object_id, position, parent) WITH RECURSIVE n(i) AS "
        "(SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000) SELECT 1000000 + i, 1, randomblob(32) FROM n"
    )(place)
    assert 0 < cost() <= before + 10


def test_of_a_branch_and_a_tag_of_one_name_both_ways_take_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = grown(tmp_path / "repo", 0, commits=8, merges=False)
    monkeypatch.setattr("cas_ckpt.core.publish.check_free", lambda *_: None)  # two writers at one moment
    with Repository.open(place, group=None) as repo:
        repo.tag("main", "main~3")
        repo.branch("v1", start="HEAD~4")
        name_of_id = repo.resolve("HEAD")[:4]
        repo.tag(name_of_id, "HEAD~1", force=True)
        for name in ("main", "v1"):
            assert quick_log(str(place), name) is None
            with pytest.raises(AmbiguousIdError, match=f"refs/tags/{name} and refs/heads/{name}"):
                repo.log(name)
        assert quick_log(str(place), name_of_id) is None
        quick = quick_log(str(place))
        assert quick is not None and quick.commits == repo.log()


def test_a_log_of_nothing_a_url_and_what_is_no_name_are_asked_the_whole_way(tmp_path: Path) -> None:
    place = grown(tmp_path / "repo", 0, commits=8, merges=False)
    RepositoryHandle.open(place).close()
    for revision in ("nothing", "main~1", "HEAD", "refs/heads/main"):
        assert quick_log(str(place), revision) is None
    assert quick_log(str(place), limit=0) is None and quick_log(place.as_uri()) is None
    assert quick_log(str(tmp_path / "none")) is None


def test_a_plain_log_imports_nothing_heavy_and_lists_of_refs_less(tmp_path: Path) -> None:
    place, new = grown(tmp_path / "repo", 0, commits=8, merges=False), tmp_path / "new"
    new_repository(new).close()
    sums = [f"-C {place} stats", f"-C {place} du"]  # for which the repository is opened
    logs = [f"-C {place} log", f"-C {place} log -n 2 main", "--version", *sums]
    of_refs = [*(f"-C {place} {line}" for line in ("resolve", "tag", "resolve main", "branch")), f"-C {new} tag"]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.cli.starting", tmp_path], input=json.dumps([*logs, *of_refs]), cwd=ROOT,
        env=environment(), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    for line, each in zip([*logs, *of_refs], json.loads(ran.stdout), strict=True):
        assert each["code"] == 0
        assert not {"numpy", "torch"}.intersection(each["modules"]), line
        assert line in sums or not {"sqlalchemy", "zstandard"}.intersection(each["modules"]), line
        assert line in logs or not {"sqlite3", "cas_ckpt.core.records", "cas_ckpt.objects.nodes"}.intersection(
            each["modules"]
        ), line


@pytest.mark.parametrize("is_new", [False, True])
def test_refs_are_the_same_whether_the_repository_is_opened_or_not(
    is_new: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cas_ckpt.core.publish.check_free", lambda *_: None)  # a branch and a tag of one name
    with Repository.init(tmp_path / "repo") as repo:
        for branch in () if is_new else ("main", "ft"):
            repo.commit({"w": branch}, branch=branch)
        for name in () if is_new else ("v1", "v0", "gone", "ft"):
            repo.tag(name, "main", message="as released" if name == "v1" else "", force=True)
        if not is_new:
            repo.delete_tag("gone")
            repo.set_default_branch("ft")
    resolved = ("main", "v1", "ft", "nothing", "main~1", "refs/heads/main", "origin/main", "abcd", "HEAD", "@")
    lines = ["branch", "tag", "--json branch", "--json tag", "resolve", *(f"resolve {name}" for name in resolved)]
    quick = [call("-C", tmp_path / "repo", *line.split()) for line in lines]
    for way in ("quick_refs", "quick_resolve"):
        monkeypatch.setattr(f"cas_ckpt.cli.refs.{way}", lambda *_: None)
    for line, found in zip(lines, quick, strict=True):
        assert found == call("-C", tmp_path / "repo", *line.split()), line


def test_a_plain_log_begins_at_the_branch_that_is_the_default_one_now(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"x": 1})
        repo.branch("ft")
        repo.commit({"x": 2})
        repo.set_default_branch("ft")
        quick = quick_log(str(tmp_path / "repo"))
        assert quick is not None and quick.commits[0].id == repo.resolve("ft")
