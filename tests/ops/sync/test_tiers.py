"""Tiers: commits go to a slower store behind the back of who commits; nothing is given up here before it is there."""

from __future__ import annotations

import logging
import os
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cas_ckpt import Policy, Repository, clock
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.settings import MAX_REASON, TIERS_KEY, note_push, read_push_failures
from cas_ckpt.errors import (
    ConflictError,
    InvalidInputError,
    NoRepositoryError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from cas_ckpt.storage.url import open_store
from tests.builders import commit, weights
from tests.cli.running import call, ok
from tests.effects import Fault, FaultPlan
from tests.processes import Forked, run_program
from tests.wrapped_stores import FaultyStore


def opened(folder: Path) -> tuple[Repository, Repository]:
    there = Repository.init(folder / "there")
    here = Repository.init(folder / "here")
    here.add_remote("origin", there.url)
    return here, there


def state(step: int) -> dict[str, object]:
    return {"w": torch.full((3000,), float(step))}


def test_a_commit_is_pushed_behind_the_callers_back(tmp_path: Path) -> None:
    here, there = opened(tmp_path)
    for step in range(5):
        here.commit(state(step), step=step, push_to="origin")
    assert here.wait_pushed()
    assert there.resolve("main") == here.resolve("main")
    assert here.unpushed() == {"origin": []}
    assert [remote.tier for remote in here.remotes()] == [True]
    here.commit(state(9), push_to="origin")
    here.close()  # waits
    with Repository.open(tmp_path / "here") as again:
        assert there.resolve("main") == again.resolve("main")


def test_a_tier_that_is_not_there_is_an_error_before_the_commit(tmp_path: Path) -> None:
    here, _ = opened(tmp_path)
    with pytest.raises(NotFoundError, match="upstream"):
        here.commit(state(0), push_to="upstream")
    assert not here.branches()


def test_a_tier_that_cannot_be_reached_costs_no_commit_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = opened(tmp_path)
    there.close()
    shutil.move(tmp_path / "there", tmp_path / "away")
    with caplog.at_level(logging.WARNING, "cas_ckpt"):
        first = here.commit(state(0), push_to="origin")
        with pytest.raises(NoRepositoryError):
            here.wait_pushed()
    assert "not pushed to origin yet" in caplog.text
    assert here.unpushed() == {"origin": [first.id]}
    second = here.commit(state(1), push_to="origin")
    with pytest.raises(NoRepositoryError):
        here.close()
    shutil.move(tmp_path / "away", tmp_path / "there")
    with Repository.open(tmp_path / "here") as again:  # the next process
        assert sorted(again.unpushed()["origin"]) == sorted([first.id, second.id])
        again.commit(state(2), push_to="origin")
    with Repository.open(tmp_path / "there") as found:
        assert [info.id for info in found.log()][1:] == [second.id, first.id]


def test_closing_waits_for_every_tier_though_the_push_to_one_failed(tmp_path: Path) -> None:
    here, there = opened(tmp_path)
    here.add_remote("gone", str(tmp_path / "nowhere"))
    here.commit(state(0), push_to="gone")
    last = here.commit(state(1) | {"more": torch.randn(2_000_000)}, push_to="origin")
    with pytest.raises(NoRepositoryError):
        here.close()
    assert there.resolve("main") == last.id


def test_without_tiers_nobody_goes_through_history_for_what_was_not_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = opened(tmp_path)
    commit(here._handle, {"w": weights(1)})
    asked, read = list[object](), here._handle.index.read

    def noted(question: Callable[..., Any], *args: Any, **how: Any) -> Any:
        asked.append(question)
        return read(question, *args, **how)

    monkeypatch.setattr(here._handle.index, "read", noted)
    assert (here.unpushed(), here.push_failures()) == ({}, {})
    assert asked == []
    here.add_remote("tier", str(tmp_path / "there"), tier=True)
    assert here.unpushed() == {"tier": [here.resolve("main")]}
    assert asked


def test_why_the_last_push_failed_is_said_by_every_later_look_until_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = opened(tmp_path)
    commit(here._handle, {"w": weights(1)})
    monkeypatch.setattr(clock, "now_s", lambda: 1_795_392_000.0)  # 2026-11-23, 00:00 UTC
    shutil.move(tmp_path / "there", tmp_path / "away")
    with pytest.raises(NoRepositoryError):
        here.push_pending("origin")
    here.close()
    why = f"file://{tmp_path}/there holds no cas_ckpt repository"
    with Repository.open(tmp_path / "here") as again:
        failure = again.push_failures()["origin"]
        assert (failure.time_s, why in failure.reason) == (1_795_392_000.0, True)
        assert again.status().push_failures == {"origin": failure}
        assert again.fsck().ok and not again.fsck().notes
    said = ok("-C", tmp_path / "here", "status").splitlines()
    assert [line for line in said if line.startswith("Failed:")] == [
        f"Failed:   the push to origin at 2026-11-23 00:00:00 UTC: {failure.reason}"
    ]
    shown = call("-C", tmp_path / "here", "log")
    assert f"commits are not at origin yet: the push at 2026-11-23 00:00:00 UTC failed: {why}" in shown.err
    shutil.move(tmp_path / "away", tmp_path / "there")
    with Repository.open(tmp_path / "here") as again:
        again.push_pending("origin")
        assert again.push_failures() == {} == again.status().push_failures
        assert read_push_failures(again._handle.store) == {}
    assert call("-C", tmp_path / "here", "log").err == ""


def test_what_is_written_down_of_a_failed_push_holds_no_secret(tmp_path: Path) -> None:
    here, _ = opened(tmp_path)
    error = StorageError("no answer from https://me:hunter2@host/x?token=hunter2&page=1 " + "x" * 5000)
    note_push(here._handle.store, "origin", error)
    (failure,) = read_push_failures(here._handle.store).values()
    assert "hunter2" not in failure.reason and "page=1" in failure.reason and len(failure.reason) == MAX_REASON
    assert b"hunter2" not in here._handle.store.get(TIERS_KEY)
    here._handle.store.put(TIERS_KEY, b"rubbish")
    assert here.push_failures() == {}
    note_push(here._handle.store, "origin", error)
    here.remove_remote("origin")
    assert read_push_failures(here._handle.store) == {}


def test_what_is_not_there_yet_is_not_forgotten_and_not_collected(tmp_path: Path) -> None:
    here, _ = opened(tmp_path)
    here.set_remote("origin", tier=True)
    ids = [commit(here._handle, {"w": weights(step)}).id for step in range(5)]
    kept = here.forget(Policy(keep_last=2), gc=True)
    assert not kept.forgotten
    assert {one.commit.id: one.reasons for one in kept.decisions}[ids[0]] == ("not at origin yet",)
    with pytest.raises(InvalidInputError, match="not at origin yet"):
        here.forget(revisions=[ids[1]])
    here.gc(min_age_s=0)
    here.push_pending("origin")
    done = here.forget(Policy(keep_last=2))
    assert sorted(done.forgotten) == sorted(ids[:3])
    here.gc(min_age_s=0)
    assert here.fsck().ok
    last = commit(here._handle, {"w": weights(7)})
    assert here.unpushed() == {"origin": [last.id]}
    here.push_pending("origin")
    with Repository.open(tmp_path / "there") as there:
        assert there.fsck(read_data=True).ok
        assert not [info for info in there.log() if info.forgotten]


def test_a_branch_is_not_deleted_before_it_was_pushed_unless_somebody_insists(tmp_path: Path) -> None:
    here, there = opened(tmp_path)
    here.set_remote("origin", tier=True)
    commit(here._handle, {"w": weights(1)})
    here.push_pending("origin")
    here.branch("same")
    own = commit(here._handle, {"w": weights(2)}, branch="ft")
    here.delete_branch("same")  # it leads to nothing of its own
    with pytest.raises(ConflictError, match="1 commits that are not at origin yet"):
        here.delete_branch("ft")
    ran = call("-C", tmp_path / "here", "branch", "-d", "ft")
    assert (ran.code, "cas-ckpt watch --push origin --once), or give them up with --force" in ran.err) == (14, True)
    here.branch("copy", start="ft")
    here.delete_branch("ft")  # another branch leads there
    here.undelete_branch("ft")
    here.delete_branch("copy")
    here.push_pending("origin")
    here.delete_branch("ft")
    assert there.resolve("ft") == own.id
    commit(here._handle, {"w": weights(3)}, branch="no")
    assert ok("-C", tmp_path / "here", "branch", "-d", "--force", "no").startswith("Deleted branch no")


def test_what_a_branch_leaves_behind_that_was_not_pushed_is_said_when_it_is_moved_by_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here, _ = opened(tmp_path)
    here.set_remote("origin", tier=True)
    commit(here._handle, {"w": weights(1)})
    here.push_pending("origin")
    head = commit(here._handle, {"w": weights(2)})
    here.branch("main", start="main", force=True)
    assert not caplog.text
    here.branch("main", start="main~1", force=True)
    assert "1 commits that branch 'main' led to are not at origin and are not pushed any more" in caplog.text
    here.gc(min_age_s=0)
    assert here.load(head.id)["w"].tobytes() == weights(2).tobytes()  # its log keeps it


def test_a_branch_that_cannot_go_on_there_holds_up_no_other(tmp_path: Path) -> None:
    here, there = opened(tmp_path)
    for name in ("main", "ft"):
        commit(here._handle, {"w": weights(1)}, branch=name)
    commit(there._handle, {"w": weights(3)}, branch="main")
    with pytest.raises(ConflictError):
        here.push_pending("origin")
    assert there.resolve("ft") == here.resolve("ft")
    assert here.unpushed()["origin"] == [here.resolve("main")]


def test_only_branches_that_the_tier_wants_are_pushed(tmp_path: Path) -> None:
    here, there = opened(tmp_path)
    here.set_remote("origin", push="ft/*")
    for name in ("main", "ft/a"):
        commit(here._handle, {"w": weights(len(name))}, branch=name)
    here.push_pending("origin")
    assert list(there.branches()) == ["ft/a"]
    assert here.unpushed() == {"origin": []}


CHILD = """
    import os, sys, torch
    from cas_ckpt import Repository
    repo = Repository.open(sys.argv[1])
    for step in range(4):
        repo.commit({"w": torch.full((300_000,), float(step))}, step=step, push_to="origin")
    os._exit(9)  # in the middle of a push, or before it
"""


@pytest.mark.slow
def test_what_a_process_that_died_left_is_pushed_by_the_next(tmp_path: Path) -> None:
    here, there = opened(tmp_path)
    here.close()
    with Forked(run_program, textwrap.dedent(CHILD), str(tmp_path / "here")) as child:
        assert child.wait(60) == 9
    with Repository.open(tmp_path / "here") as again:
        assert len(again.log()) == 4
        again.push_pending("origin")
        assert there.resolve("main") == again.resolve("main")
    assert there.fsck(read_data=True).ok


def test_what_was_forgotten_here_comes_back_from_the_tier(tmp_path: Path) -> None:
    here, there = opened(tmp_path)
    here.set_remote("origin", tier=True)
    for step in range(4):
        commit(here._handle, {"w": weights(step)}, step=step)
    here.push_pending("origin")
    here.forget(Policy(keep_last=1), gc=True)
    here.gc(min_age_s=0)
    shutil.move(tmp_path / "there", tmp_path / "away")
    with pytest.raises(TransientStorageError, match="try again when it can be reached"):
        here.load("main~2")
    shutil.move(tmp_path / "away", tmp_path / "there")
    report = here.fetch("origin", commits="main~2")
    assert (report.num_commits, report.num_chunks) == (1, 1)
    assert here.load("main~2")["w"].tobytes() == weights(1).tobytes()
    assert [info.forgotten for info in here.log()] == [False, True, False, True]
    here.gc(min_age_s=0)
    assert here.load("main~2")
    assert here.fsck(read_data=True).ok
    assert there.fsck().ok


def _lose_packs(folder: Path, there: Repository) -> None:
    for pack in (folder / "there" / "packs").rglob("*.data"):
        pack.unlink()


def _cut_packs(folder: Path, there: Repository) -> None:
    for pack in (folder / "there" / "packs").rglob("*.data"):
        os.truncate(pack, pack.stat().st_size - 1)


def _replace(folder: Path, there: Repository) -> None:
    shutil.rmtree(folder / "there")
    Repository.init(folder / "there").close()


def _collect(folder: Path, there: Repository) -> None:
    there.forget(Policy(keep_last=1), gc=True)
    there.gc(min_age_s=0)


def _move_back(folder: Path, there: Repository) -> None:
    with Repository.open(folder / "there") as again:
        commit(again._handle, {"w": weights(9)}, branch="other")
        again.branch("main", start="other", force=True)


def _take_away(folder: Path, there: Repository) -> None:
    shutil.move(folder / "there", folder / "away")


def _put_here_in_its_place(folder: Path, there: Repository) -> None:
    shutil.rmtree(folder / "there")
    (folder / "there").symlink_to(folder / "here")


def _damage(folder: Path, there: Repository) -> None:
    for pack in (folder / "there" / "packs").rglob("*.data"):
        data = pack.read_bytes()
        for step in range(3):
            data = data.replace(weights(step).tobytes(), bytes(weights(step).nbytes))
        pack.write_bytes(data)


@pytest.mark.parametrize(
    ("lose", "why"),
    [
        (_lose_packs, "some of its data is gone at origin"),
        (_cut_packs, "some of its data is gone at origin"),
        (_replace, "another repository than when it was first asked"),
        (_collect, "forgotten at origin, too"),
        (_move_back, "no ref at origin leads to it any more"),
        (_take_away, "origin cannot be asked"),
        (_put_here_in_its_place, "origin is this repository itself"),
        (_damage, "damaged at origin"),
    ],
)
def test_what_a_tier_had_once_and_has_no_more_is_not_given_up_here(
    tmp_path: Path, lose: Callable[[Path, Repository], None], why: str
) -> None:
    here, there = opened(tmp_path)
    here.set_remote("origin", tier=True)
    ids = [commit(here._handle, {"w": weights(step)}).id for step in range(3)]
    here.push_pending("origin")
    lose(tmp_path, there)
    verify = {"verify_tier": True} if lose is _damage else {}
    report = here.forget(Policy(keep_last=1), gc=True, **verify)
    here.gc(min_age_s=0)
    for step, each in enumerate(ids):
        assert here.load(each)["w"].tobytes() == weights(step).tobytes()
    assert report.forgotten == ()
    said = {one.commit.id: one.reasons for one in report.decisions}
    assert all(why in said[each][0] for each in ids[:2]), said
    with pytest.raises(InvalidInputError, match=why):
        here.forget(revisions=[ids[0]], **verify)
    assert not here.fsck().problems


def test_commits_that_are_whole_at_the_tier_are_given_up_though_others_are_not(tmp_path: Path) -> None:
    here, there = opened(tmp_path)
    here.set_remote("origin", tier=True)
    ids = [commit(here._handle, {"w": weights(step)}).id for step in range(3)]
    here.push_pending("origin")
    there.forget(revisions=[ids[0]], gc=True)
    assert here.forget(Policy(keep_last=1), verify_tier=True).forgotten == (ids[1],)


def test_what_another_host_committed_on_top_hides_nothing_that_a_tier_lacks(tmp_path: Path) -> None:
    here, there = opened(tmp_path)
    here.set_remote("origin", tier=True)
    ids = [commit(here._handle, {"w": weights(step)}).id for step in range(3)]
    with Repository.open(tmp_path / "here", index_url=":memory:") as other:

        def refused(why: str) -> None:
            other.resolve(ids[2])  # its index has them, and not the next one
            commit(here._handle, {"w": weights(9)})
            with pytest.raises(InvalidInputError, match=why):
                other.forget(revisions=[ids[0]])

        refused("not at origin yet")
        commit(here._handle, {"w": weights(7)}, branch="ft")
        with pytest.raises(ConflictError, match="1 commits that are not at origin yet"):
            other.delete_branch("ft")
        here.push_pending("origin")
        _collect(tmp_path, there)
        refused("forgotten at origin, too")


def _put_another_in_its_place(here: Repository, folder: Path) -> None:
    """The tier is another repository from now on, with all that the former one had."""
    Repository.init(folder / "other").close()
    here.push(str(folder / "other"), "main")
    shutil.rmtree(folder / "there")
    shutil.move(folder / "other", folder / "there")


def test_another_repository_in_the_place_of_the_tier_is_not_taken_for_it(tmp_path: Path) -> None:
    here, _ = opened(tmp_path)
    here.set_remote("origin", tier=True)
    ids = [commit(here._handle, {"w": weights(step)}).id for step in range(3)]
    here.push_pending("origin")
    _put_another_in_its_place(here, tmp_path)
    kept = here.forget(Policy(keep_last=1), gc=True)
    assert not kept.forgotten
    assert "another repository than when it was first asked" in kept.decisions[-1].reasons[0]
    for meet in (here.fetch, here.pull, here.push, lambda: here.push(dry_run=True)):
        with pytest.raises(ConflictError, match="another repository than when it was first asked"):
            meet()
    ran = call("-C", tmp_path / "here", "fetch")
    assert (ran.code, "(cas-ckpt remote set-url origin URL, the same URL too)" in ran.err) == (14, True)
    here.set_remote("origin", url=tmp_path / "there")
    assert sorted(here.forget(Policy(keep_last=1)).forgotten) == sorted(ids[:2])  # it is asked, and has it
    here.fetch()
    with Repository.open(tmp_path / "there") as there:
        assert [one.repository for one in here.remotes()] == [there._handle.config.store_id]
    assert here.remote_branches() == {"origin/main": ids[2]}


def test_all_is_pushed_to_an_empty_repository_that_takes_the_place_of_the_tier(tmp_path: Path) -> None:
    here, there = opened(tmp_path)
    here.set_remote("origin", tier=True)
    commit(here._handle, {"w": weights(1)})
    own = commit(there._handle, {"w": weights(2)}, branch="theirs")
    here.push_pending("origin")
    here.fetch()
    _replace(tmp_path, there)
    here.set_remote("origin", url=tmp_path / "there")
    with pytest.raises(NotFoundError):
        here.pull()  # there is no branch: what was remembered of it is gone since
    assert here.remote_branches() == {"origin/theirs": own.id}  # nothing else keeps that here
    here.push_pending("origin")
    with Repository.open(tmp_path / "there") as again:
        assert again.resolve("main") == here.resolve("main")


def test_a_tier_that_was_moved_and_one_that_was_renamed_is_the_same(tmp_path: Path) -> None:
    here, there = opened(tmp_path)
    commit(here._handle, {"w": weights(1)})
    here.push()
    known = there._handle.config.store_id
    there.close()
    shutil.move(tmp_path / "there", tmp_path / "moved")
    here.set_remote("origin", url=tmp_path / "moved")
    here.rename_remote("origin", "tier")
    assert [one.repository for one in here.remotes()] == [known]
    here.fetch("tier")
    assert here.remote_branches() == {"tier/main": here.resolve("main")}
    here.create_bundle(tmp_path / "all.bundle", "main")
    here.add_remote("usb", tmp_path / "all.bundle")
    here.fetch("usb")
    commit(here._handle, {"w": weights(2)})
    (tmp_path / "all.bundle").unlink()
    here.create_bundle(tmp_path / "all.bundle", "main")
    here.fetch("usb")  # a bundle is made anew each time
    assert here.remote_branches()["usb/main"] == here.resolve("main")


def test_who_may_not_write_the_settings_pushes_and_fetches_all_the_same(tmp_path: Path) -> None:
    here, _ = opened(tmp_path)
    commit(here._handle, {"w": weights(1)})
    here.close()
    denied = FaultPlan(1, Fault.FAIL, frozenset({"compare_and_swap"}), error=PermissionDeniedError)
    for verb in (Repository.push, Repository.fetch):
        store = FaultyStore(open_store(tmp_path / "here"), denied)  # the settings are what is swapped first
        with Repository(RepositoryHandle.on_store(store, index_url=":memory:")) as again:
            verb(again)
            assert [one.repository for one in again.remotes()] == [""]
            assert again.remote_branches() == {"origin/main": again.resolve("main")}


@pytest.mark.parametrize("lose", [_lose_packs, _replace, _collect, _take_away])
def test_a_collection_asks_the_tier_for_what_was_forgotten_before(
    tmp_path: Path, lose: Callable[[Path, Repository], None]
) -> None:
    here, there = opened(tmp_path)
    here.set_remote("origin", tier=True)
    ids = [commit(here._handle, {"w": weights(step)}).id for step in range(3)]
    here.push_pending("origin")
    assert sorted(here.forget(Policy(keep_last=1)).forgotten) == sorted(ids[:2])
    shutil.copytree(tmp_path / "there", tmp_path / "copy")
    lose(tmp_path, there)
    foreseen, report = here.gc(min_age_s=0, dry_run=True), here.gc(min_age_s=0)
    for step, each in enumerate(ids):
        assert here.load(each)["w"].tobytes() == weights(step).tobytes()
    for one in (foreseen, report):
        assert sorted(commit for commit, _ in one.not_at_tiers) == sorted(ids[:2])
        assert not one.dead_objects
    assert "2 forgotten commits keep their data" in call("-C", tmp_path / "here", "gc", "--min-age", "0").err
    shutil.rmtree(tmp_path / "there", ignore_errors=True)
    shutil.move(tmp_path / "copy", tmp_path / "there")
    report = here.gc(min_age_s=0)
    assert report.dead_objects and not report.not_at_tiers
    assert here.fsck().ok
    _take_away(tmp_path, there)
    assert not here.gc(min_age_s=0).not_at_tiers  # nothing is left to ask for


def test_what_a_branch_led_to_that_is_gone_here_is_asked_for_too(tmp_path: Path) -> None:
    here, there = opened(tmp_path)
    here.set_remote("origin", tier=True)
    commit(here._handle, {"w": weights(1)})
    ids = [commit(here._handle, {"w": weights(step)}, branch="ft").id for step in (2, 3)]
    here.push_pending("origin")
    here.delete_branch("ft")
    _lose_packs(tmp_path, there)
    with pytest.raises(InvalidInputError, match="some of its data is gone at origin"):
        here.forget(revisions=[ids[0]], gc=True)
    here.gc(min_age_s=0, reflog_expire_s=0)
    assert here.load(ids[0])["w"].tobytes() == weights(2).tobytes()  # origin/ft keeps it
