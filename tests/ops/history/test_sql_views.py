"""What views say of commits and refs is what the verbs say, whoever changed it and however the index came to be."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.core.refs import MAX_LOG
from cas_ckpt.ops.diff.walk import Change
from tests.signing.keys import KEYS, key_file

ANN = key_file()
TEXTS = "SELECT message, meta, provenance, signed_by FROM commits ORDER BY message"


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with Repository.init(tmp_path / "repo", group=None) as made:
        yield made


def reflog_in_sql(repo: Repository, ref: str) -> list[tuple[Any, ...]]:
    query = """
        SELECT time_s, old_id, new_id, action, author FROM reflog
        WHERE full_name = :ref ORDER BY position DESC, number DESC
    """
    return [(pytest.approx(row[0], abs=1e-5), *row[1:]) for row in repo.sql(query, ref=ref)]


def test_the_reflog_of_every_ref_is_what_reflog_lists(repo: Repository) -> None:
    for step in range(4):
        repo.commit({"n": step}, message=f"step {step}\nmore" if step else "")
    repo.branch("ft", start="main~2")
    repo.commit({"n": 9}, branch="ft", message="math")
    repo.branch("main", start="ft", force=True)
    repo.commit({"n": 10}, branch="main", message="on top")
    repo.branch("gone", start="main")
    repo.delete_branch("gone")
    repo.branch("back", start="main~1")
    repo.delete_branch("back")
    repo.undelete_branch("back")
    repo.tag("v1", "main", message="released")
    repo.pin("ft", name="keep", reason="the paper")
    names = ["refs/heads/main", "refs/heads/ft", "refs/heads/gone", "refs/heads/back", "refs/tags/v1", "refs/pins/keep"]
    for name in names:
        listed = [(each.time_s, each.old, each.new, each.action, each.author) for each in repo.reflog(name)]
        assert reflog_in_sql(repo, name) == listed
        assert listed
    assert repo.sql("SELECT DISTINCT full_name FROM reflog ORDER BY 1").rows == tuple((name,) for name in sorted(names))
    notes = "SELECT name, message, reason FROM refs WHERE message IS NOT NULL OR reason IS NOT NULL ORDER BY 1"
    assert repo.sql(notes).rows == (("keep", None, "the paper"), ("v1", "released", None))


def test_a_log_that_is_full_says_nothing_of_what_was_before(repo: Repository) -> None:
    for step in range(3):
        repo.commit({"n": step})
    for at in range(MAX_LOG + 1):
        repo.branch("busy", start=f"main~{at % 2}", force=True)
    listed = [(each.time_s, each.old, each.new, each.action, each.author) for each in repo.reflog("busy")]
    assert reflog_in_sql(repo, "refs/heads/busy") == listed
    assert len(listed) == MAX_LOG + listed.count(None)


def test_who_forgets_and_who_remembers_is_seen_through_any_index(repo: Repository, tmp_path: Path) -> None:
    for step in range(4):
        repo.commit({"n": step}, step=step)
    forgotten = "SELECT step FROM commits WHERE is_forgotten = 1 ORDER BY step"
    assert repo.sql(forgotten).rows == ()
    with Repository.open(repo.url, index_url=str(tmp_path / "other.sqlite"), group=None) as other:
        other.forget(revisions=["step:1", "step:2"])
        assert other.sql(forgotten).rows == ((1,), (2,))
    assert repo.sql(forgotten).rows == ((1,), (2,))
    repo.tag("kept", "step:1")
    assert repo.sql(forgotten).rows == ((2,),)
    assert {row.step for row in repo.log() if row.forgotten} == {2}
    with Repository.open(repo.url, read_only=True, group=None) as reader:
        assert reader.sql(forgotten).rows == ((2,),)


def test_what_commits_say_is_json_wherever_they_came_from(repo: Repository, tmp_path: Path) -> None:
    given = {"lr": (1e-3, float("inf")), "run": {"name": "é", 7: None}, "data": Path("/data"), "n": np.int64(3)}
    said = {"lr": [1e-3, "inf"], "run": {"name": "é", "7": None}, "data": "/data", "n": 3}
    repo.commit({"n": 0}, message="a")
    repo.commit({"n": 1}, message="b", meta=given, options=CommitOptions(provenance={"queue": "long"}, sign=ANN))
    repo.commit({"n": 2}, message="c", meta="x" * 70_000)
    rows = repo.sql(TEXTS).rows
    assert rows[0] == ("a", None, None, None)
    (_, meta, provenance, signed_by), *rest = rows[1:]
    assert (json.loads(meta), signed_by) == (said, KEYS["ed25519"]["fingerprint"])
    assert json.loads(provenance) == repo.show("main~1").provenance
    assert rest == [("c", None, None, None)]
    with Repository.clone(repo.url, tmp_path / "clone") as clone:
        assert clone.sql(TEXTS).rows == rows
    repo.rebuild_index()
    assert repo.sql(TEXTS).rows == rows


# ---------------------------------------------------------------- what commits changed


def some_state(r: random.Random) -> dict[str, Any]:
    def leaf() -> Any:
        return r.choice([1, 2, "x" * 40, "y" * 40, 3.5, np.zeros(3), np.ones(3), np.arange(400), {}, [], [1, [2]]])

    def container(depth: int) -> Any:
        names = r.sample("abcdefgh", r.randint(0, 4))
        return {name: container(depth - 1) if depth and r.random() < 0.5 else leaf() for name in names}

    state = {"some": container(3), "list": [leaf() for _ in range(r.randint(0, 4))]}
    many = {f"layer {at}": r.randint(0, 9) for at in range(r.choice([0, 300, 700, 710]))}
    return state | {"many": many, "copy": r.choice([many, state["some"]])}


def test_the_keys_that_a_commit_changed_are_those_that_diff_finds(repo: Repository) -> None:
    r, state = random.Random(7), {}
    for _ in range(12):
        fresh = some_state(r)
        state = {name: r.choice([state.get(name, item), item]) for name, item in fresh.items() if r.random() < 0.9}
        repo.commit(state)
    repo.commit(state)
    words = {Change.ADDED: "new", Change.MOVED: "new", Change.CHANGED: "changed", Change.REMOVED: "gone"}
    kinds = set()
    for commit in repo.log():
        if not commit.parents:
            continue
        empty = {e.key for at in (commit.parents[0], commit) for e in repo.ls(at) if e.kind in ("dict", "list")}
        entries = repo.diff(commit.parents[0], commit).entries
        told = {(each.key, words[each.change]) for each in entries}
        told |= {(each.moved_from, "gone") for each in entries if each.moved_from is not None}
        found = repo.sql("SELECT key, change FROM key_changes WHERE commit_id = :c", c=commit).rows
        assert len(set(found)) == len(found)
        # Empty containers are entries, others are not; to diff an emptied container is what it was.
        containers = empty | {key[:at] for key, _ in found for at in range(len(key)) if key[at] == "/"}
        assert {row for row in found if row[0] not in containers} == {row for row in told if row[0] not in containers}
        kinds |= {change for _, change in found}
        counts = [sum(change == word for _, change in found) for word in ("changed", "new", "gone")]
        query = "SELECT changed, new_entries, gone_entries FROM changes WHERE commit_id = :c"
        assert repo.sql(query, c=commit).rows == (tuple(counts),)
    assert kinds == {"new", "changed", "gone"}


def test_what_a_collection_took_away_has_no_counts(repo: Repository) -> None:
    for step in range(3):
        repo.commit({f"k{step}": step, "n": step}, step=step)
    repo.forget(revisions=["step:0"])
    repo.gc(min_age_s=0, reflog_expire_s=0)
    query = "SELECT c.step, changed, new_entries, gone_entries FROM changes JOIN commits c USING (commit_no) ORDER BY 1"
    assert repo.sql(query).rows == ((0, None, None, None), (1, None, None, None), (2, 1, 1, 1))


def test_the_work_of_counting_follows_what_changed(tmp_path: Path) -> None:
    def steps(num_keys: int) -> int:
        state = {f"block {at}": {f"w{each}": each for each in range(30)} for at in range(num_keys // 30)}
        with Repository.init(tmp_path / str(num_keys), group=None) as repo:
            repo.commit(state)
            state["block 7"]["w3"] = -1
            repo.commit(state)
            assert repo.sql("SELECT changed, new_entries FROM refs JOIN changes USING (commit_no)").rows == ((1, 0),)
        taken = [0]

        def step() -> None:
            taken[0] += 1

        with closing(sqlite3.connect(tmp_path / str(num_keys) / "index" / "index.sqlite")) as raw:
            raw.set_progress_handler(step, 100)
            raw.execute("SELECT changed FROM refs JOIN changes USING (commit_no)").fetchall()
        return taken[0]

    assert steps(15_000) < 2 * steps(1_500) + 50
