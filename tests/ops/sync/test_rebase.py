"""pull --rebase: the commits of this side are on top of theirs, with their states, and nothing is lost on the way."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from cas_ckpt import CommitOptions, Lineage, Repository
from cas_ckpt.core.config import Config
from cas_ckpt.core.create import write_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import ConflictError, NotFoundError
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.refs import create_branch
from cas_ckpt.ops.sync.fetch import rebase_branch
from cas_ckpt.ops.sync.send import Moved
from cas_ckpt.storage.memory import MemoryStore
from tests.builders import commit, stored_arrays, weights
from tests.crash.collecting import THOROUGH, World
from tests.effects import CrashNow, Effects, die_after, die_before
from tests.ops.sync.test_push_and_pull import Pair, items, require_sound


@pytest.fixture
def apart(tmp_path: Path) -> Pair:
    """Both have the first commit; then two more here, and one there."""
    pair = Pair(tmp_path)
    commit(pair.ours, items(0), message="base")
    pair.here.push()
    for step in (1, 2):
        lineage = [Lineage("fine-tune-of", "main")] if step == 2 else []
        pair.here.commit({"step": step, "w": weights(step)}, step=step, metrics={"loss": 0.5 * step},
                         message=f"ours {step}", meta={"note": step},
                         options=CommitOptions(lineage=lineage))  # fmt: skip
    commit(pair.theirs, items(3), message="theirs")
    return pair


def test_without_rebase_nothing_moves_and_the_advice_is_one_that_works(apart: Pair) -> None:
    before = apart.here.resolve("main")
    with pytest.raises(ConflictError, match=r"repo\.pull\(rebase=True\)"):
        apart.here.pull()
    with pytest.raises(ConflictError, match=r"repo\.pull\(rebase=True\)"):
        apart.here.push()
    assert apart.here.resolve("main") == before
    assert apart.here.resolve("origin/main") == apart.there.resolve("main")


def test_our_commits_are_made_anew_on_top_of_theirs(apart: Pair) -> None:
    before = apart.here.log("main", limit=2)
    foreseen = apart.here.pull(rebase=True, dry_run=True)
    assert foreseen.refs[-1].how is Moved.REBASED
    assert apart.here.resolve("main") == before[0].id
    report = apart.here.pull(rebase=True)
    after = apart.here.log("main")
    assert [info.message for info in after] == ["ours 2", "ours 1", "theirs", "base"]
    assert (report.refs[-1].old, report.refs[-1].new, report.refs[-1].how) == (
        before[0].id, after[0].id, Moved.REBASED,
    )  # fmt: skip
    for old, new in zip(before, after[:2], strict=True):
        same = ("root", "message", "author", "time", "step", "metrics", "meta", "stats")
        assert [getattr(old, name) for name in same] == [getattr(new, name) for name in same]
    assert after[1].parents == (apart.there.resolve("main"),)
    assert [(edge.kind, edge.target) for edge in after[1].lineage] == [("continued-from", before[1].parents[0])]
    assert [edge.kind for edge in after[0].lineage] == ["fine-tune-of"]  # its parent's state is what it came from
    apart.here.push()
    assert apart.there.resolve("main") == after[0].id
    require_sound(apart.here.url)
    require_sound(apart.there.url)
    assert apart.here.reflog("main")[0].action == "rebase: forced"


def test_training_goes_on_on_top_of_what_was_rebased(apart: Pair) -> None:
    apart.here.pull(rebase=True)
    head = apart.here.resolve("main")
    made = apart.here.commit({"step": 3}, message="ours 3")
    assert (made.parents, made.lineage) == ((head,), ())


def test_a_branch_that_is_ahead_or_behind_needs_no_rebase(apart: Pair) -> None:
    apart.here.pull(rebase=True)
    head = apart.here.resolve("main")
    assert [ref.how for ref in apart.here.pull(rebase=True).refs if ref.ref == "refs/heads/main"] == [Moved.SAME]
    assert apart.here.resolve("main") == head
    apart.here.push()
    commit(apart.theirs, items(5))
    assert apart.here.pull(rebase=True).refs[-1].how is Moved.FORWARD


def test_commits_without_data_are_not_made_anew(apart: Pair) -> None:
    apart.here.forget(revisions=["main~1"])
    before = apart.here.resolve("main")
    with pytest.raises(NotFoundError, match="was forgotten"):
        apart.here.pull(rebase=True)
    assert apart.here.resolve("main") == before


def test_a_merge_keeps_its_other_parent(apart: Pair) -> None:
    apart.here.commit({"x": 1}, branch="side", message="side", options=CommitOptions(parents=["main~1"]))
    apart.here.commit({"x": 2}, branch="main", message="merge", options=CommitOptions(parents=["side"]))
    side = apart.here.resolve("side")
    apart.here.pull(rebase=True)
    merge = apart.here.show("main")
    assert merge.commit.parents == (apart.here.resolve("main~1"), side)


def test_a_branch_that_moves_meanwhile_is_left_where_it_went(apart: Pair) -> None:
    apart.here.fetch()
    ours, theirs = resolve(apart.ours, "main"), resolve(apart.ours, "origin/main")
    commit(apart.ours, items(9), message="meanwhile")
    head = apart.here.resolve("main")
    with pytest.raises(ConflictError, match="somebody moved it"):
        rebase_branch(apart.ours, "main", ours, theirs)
    assert apart.here.resolve("main") == head


def test_commits_that_another_host_made_meanwhile_are_made_anew_too(apart: Pair) -> None:
    with Repository.open(apart.here.url, index_url=":memory:") as pulling:
        pulling.fetch()
        for step in (3, 4):
            commit(apart.ours, items(step), message=f"ours {step}")
        pulling.pull(rebase=True)
    messages = [info.message for info in apart.here.log("main")]
    assert messages == ["ours 4", "ours 3", "ours 2", "ours 1", "theirs", "base"]


def test_a_pull_from_a_place_without_a_name_is_rebased_too(apart: Pair) -> None:
    apart.here.pull(apart.there.url, rebase=True)
    assert [info.message for info in apart.here.log("FETCH_HEAD..main", reverse=True)] == ["ours 1", "ours 2"]
    assert apart.here.resolve("FETCH_HEAD") == apart.there.resolve("main")


def _world() -> World:
    store = MemoryStore()
    write_config(store, Config("3" * 32, pack_bytes=1 << 20))
    handle = RepositoryHandle.on_store(store, index_url=":memory:")
    commit(handle, items(0))
    create_branch(handle, "theirs")
    commit(handle, items(1))
    commit(handle, items(2))
    commit(handle, items(3), branch="theirs")
    return World(store, {})


def test_dying_at_any_effect_leaves_the_branch_at_one_or_the_other_and_all_of_it_whole() -> None:
    ends = set()
    for fate in (die_before, die_after):
        for k in range(1, 100):
            world = _world()
            faulty = world.open(Effects(fate(k)))
            ours, theirs = resolve(faulty, "main"), resolve(faulty, "theirs")
            with suppress(CrashNow):
                rebase_branch(faulty, "main", ours, theirs)
                break
            handle = world.open()
            collect_garbage(handle, THOROUGH)
            head = resolve(handle, "main")
            ends.add(head == ours)
            assert head == ours or resolve(handle, "main~2") == theirs
            for revision in ("main", "main~1", "theirs"):
                assert stored_arrays(handle, commit_of(handle, resolve(handle, revision)).root.hex())
        assert k > 2
    assert ends == {True, False}


def test_the_reflog_keeps_what_was_rebased(apart: Pair) -> None:
    before = apart.here.resolve("main")
    apart.here.pull(rebase=True)
    apart.here.gc()
    apart.here.branch("again", start=before)
    with Repository.open(apart.here.url) as again:
        assert again.load("again")["step"] == 2
