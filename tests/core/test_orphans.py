"""Commits whose ref was lost or put back from an older copy: kept, reported, and given up by a person alone."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.ref_store import RefStore
from cas_ckpt.core.refs import MAX_LOG, Ref
from cas_ckpt.errors import CorruptionError
from cas_ckpt.index import history
from cas_ckpt.ops.fsck import check as fsck
from cas_ckpt.ops.fsck.check import check_open, check_url
from cas_ckpt.ops.fsck.repair import rebuild_index, repair_url
from cas_ckpt.ops.fsck.report import Effect, FsckReport, RepairReport, RepairRequest
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.refs import create_branch, create_tag, delete_branch
from cas_ckpt.ops.retention.forget import forget
from tests.builders import commit, new_repository, numbers, stored_arrays

NOW = GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0)
"""Spare nothing."""

SIDE = "refs/heads/side.ref"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "repo"


@pytest.fixture
def handle(path: Path) -> Iterator[RepositoryHandle]:
    made = new_repository(path)
    commit(made, {"w": numbers(64, 64, seed=1)})
    yield made
    made.close()


def line(handle: RepositoryHandle, branch: str, *seeds: int) -> list[str]:
    """Commits of these seeds on `branch`; their roots."""
    return [commit(handle, {"w": numbers(64, 64, seed=seed)}, branch=branch, orphan=True).root for seed in seeds]


def run(path: Path, report: FsckReport, *others: Path) -> list[RepairReport]:
    """Run the printed commands in their order, as they stand, OTHER filled in."""
    done = []
    for command in report.commands:
        words = shlex.split(command)
        kinds = [words[at + 1] for at, word in enumerate(words) if word == "--repair"]
        refs = dict(words[at + 1].split("=") for at, word in enumerate(words) if word == "--ref")
        done.append(repair_url(path, RepairRequest(frozenset(kinds), tuple(map(str, others)), refs=refs)))
    return done


def collect(path: Path) -> None:
    with_index = RepositoryHandle.open(path)
    collect_garbage(with_index, NOW)
    with_index.close()


def readable(path: Path, roots: list[str]) -> bool:
    handle = RepositoryHandle.open(path)
    try:
        return all(stored_arrays(handle, root)["w"].size for root in roots)
    finally:
        handle.close()


@pytest.mark.parametrize("index", ["kept", "deleted", "rebuilt"])
def test_a_lost_branch_is_missed_with_and_without_its_index(handle: RepositoryHandle, path: Path, index: str) -> None:
    roots = line(handle, "side", 2)
    handle.close()
    (path / SIDE).unlink()
    if index == "deleted":
        shutil.rmtree(path / "index")
    if index == "rebuilt":
        rebuild_index(path)
    with pytest.raises(CorruptionError, match=r"side\.ref is gone"):
        collect(path)
    assert readable(path, roots)


def test_the_printed_commands_lose_no_branch_whose_ref_and_index_are_lost(handle: RepositoryHandle, path: Path) -> None:
    roots = line(handle, "side", 2)
    tip = commit(handle, {"w": numbers(64, 64, seed=3)}, branch="side")
    handle.close()
    (path / SIDE).unlink()
    (path / "index" / "index.sqlite").write_bytes(b"no index")
    run(path, check_url(path))
    with pytest.raises(CorruptionError, match=r"side\.ref is gone"):
        collect(path)
    repair_url(path, RepairRequest(frozenset(["refs"]), refs={"side": tip.id}))
    assert check_url(path).ok
    collect(path)
    assert readable(path, [*roots, tip.root])


def test_commits_of_a_ref_that_was_put_back_are_reported_and_kept_until_a_person_decides(
    handle: RepositoryHandle, path: Path
) -> None:
    roots = line(handle, "side", 2)
    older = (path / SIDE).read_bytes()
    roots += line(handle, "side", 3, 4)
    handle.close()
    (path / SIDE).write_bytes(older)
    rebuild_index(path)
    collect(path)
    assert readable(path, roots)
    report = check_url(path)
    assert [problem.where for problem in report.problems] == ["refs/"]
    assert all(repaired.ok for repaired in run(path, report))
    assert check_url(path).ok
    collect(path)
    assert readable(path, roots)


def test_a_branch_that_was_put_back_by_one_commit_is_noticed_by_the_index(handle: RepositoryHandle, path: Path) -> None:
    line(handle, "side", 2)
    older = (path / SIDE).read_bytes()
    roots = line(handle, "side", 3)
    handle.close()
    (path / SIDE).write_bytes(older)
    collect(path)
    assert readable(path, roots) and not check_url(path).ok


def test_orphans_are_given_up_by_forgetting_the_last_of_them(handle: RepositoryHandle, path: Path) -> None:
    line(handle, "side", 2)
    older = (path / SIDE).read_bytes()
    line(handle, "side", 3)
    tip = commit(handle, {"w": numbers(64, 64, seed=4)}, branch="side")
    (path / SIDE).write_bytes(older)
    forget(handle, revisions=[tip.id])
    assert check_open(handle).ok
    assert collect_garbage(handle, NOW).deleted_packs == 4


@pytest.fixture
def hit(handle: RepositoryHandle, path: Path) -> list[tuple[str, str]]:
    """Ids and roots of three orphans of one line, of which the second lost its meta pack but for 100 bytes."""
    line(handle, "side", 2)
    older = (path / SIDE).read_bytes()
    made, packs = [], set(path.rglob("*.meta"))
    for seed in (3, 4, 5):
        info = commit(handle, {"w": numbers(64, 64, seed=seed)}, branch="side")
        made.append((info.id, info.root))
        if seed == 4:
            (cut,) = set(path.rglob("*.meta")) - packs
        packs = set(path.rglob("*.meta"))
    handle.close()
    shutil.copytree(path, path.with_name("intact"))
    (path / SIDE).write_bytes(older)
    os.truncate(cut, 100)
    return made


def test_damage_that_hits_orphans_is_lost_data_and_the_printed_commands_bring_it_back(
    hit: list[tuple[str, str]], path: Path
) -> None:
    report = check_url(path)
    (damage,) = [problem for problem in report.problems if problem.where.startswith("packs/")]
    assert (damage.effect, [one.commit for one in damage.hits]) == (Effect.LOST, [hit[1][0]])
    for _ in range(2):  # as one runs them: a branch may want what the first round brings
        run(path, check_url(path), path.with_name("intact"))
    assert check_url(path).ok
    collect(path)
    assert readable(path, [root for _, root in hit])


def test_orphans_behind_a_hole_are_kept_and_no_command_is_printed_that_cannot_go_on(
    hit: list[tuple[str, str]], path: Path
) -> None:
    run(path, check_url(path))
    with pytest.raises(CorruptionError, match=f"commit {hit[1][0][:12]}"):
        collect(path)
    report = check_url(path)
    assert [command for command in report.commands if "OTHER" not in command] == []
    assert f"cas-ckpt forget {hit[2][0][:12]}" in " ".join(problem.what for problem in report.problems)
    handle = RepositoryHandle.open(path)
    forget(handle, revisions=[hit[2][0]])
    handle.close()
    assert check_url(path).ok
    collect(path)
    assert readable(path, [hit[0][1]])


def test_orphans_behind_a_hole_are_missed_without_an_index_too_and_after_the_damaged_pack_was_set_aside(
    hit: list[tuple[str, str]], path: Path
) -> None:
    """Who follows the lost commit is the only proof of it that is left."""
    shutil.rmtree(path / "index")
    assert Effect.LOST in {problem.effect for problem in check_url(path).problems}
    run(path, check_url(path))  # with no copy at hand
    with pytest.raises(CorruptionError, match=f"commit {hit[1][0][:12]}"):
        collect(path)
    assert f"cas-ckpt forget {hit[2][0][:12]}" in " ".join(problem.what for problem in check_url(path).problems)
    for _ in range(2):
        run(path, check_url(path), path.with_name("intact"))
    assert check_url(path).ok
    collect(path)
    assert readable(path, [root for _, root in hit])


class Killed(BaseException):
    pass


def test_writers_that_die_before_their_swap_again_and_again_leave_no_orphans(
    handle: RepositoryHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise Killed

    for seed in range(20, 25):
        with monkeypatch.context() as patched:
            patched.setattr(RefStore, "swap", die)
            patched.setattr(RepositoryHandle, "add_written", die)
            with pytest.raises(Killed):
                commit(RepositoryHandle.open(handle.store.url), {"w": numbers(64, 64, seed=seed)})
    assert check_open(handle).ok
    assert collect_garbage(handle, NOW).deleted_packs == 10


def test_branches_that_were_deleted_or_moved_away_leave_no_orphans(handle: RepositoryHandle) -> None:
    line(handle, "side", 2, 3, 4)
    delete_branch(handle, "side", force=True)
    line(handle, "moved", 5, 6)
    for _at in range(MAX_LOG + 2):  # more moves than the log remembers
        create_branch(handle, "moved", start="main", force=True)
    assert check_open(handle).ok
    collect_garbage(handle, GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=1.0))
    assert check_open(handle).ok
    collect_garbage(handle, NOW)
    assert check_open(handle).ok and len(list(handle.store.list("packs/"))) == 2


def test_a_name_record_that_is_damaged_is_written_anew(handle: RepositoryHandle, path: Path) -> None:
    handle.store.put("names/heads/main.ref", b"rubbish")
    report = check_open(handle)
    assert [problem.where for problem in report.problems] == ["names/heads/main.ref"]
    run(path, report)
    assert check_open(handle).ok


def test_a_collection_writes_the_names_down_that_were_lost(handle: RepositoryHandle) -> None:
    handle.store.delete("names/heads/main.ref")
    collect_garbage(handle, NOW)
    assert handle.refs.was_announced("refs/heads/main.ref")


def test_a_lost_tag_is_not_made_again_by_its_name_alone(handle: RepositoryHandle, path: Path) -> None:
    create_tag(handle, "v1", "main")
    (path / "refs/tags/v1.ref").unlink()
    with pytest.raises(CorruptionError, match=r"v1\.ref is gone"):
        create_tag(handle, "v1", "main")
    assert [problem.where for problem in check_open(handle).problems] == ["refs/tags/v1.ref"]


def test_commits_that_come_while_orphans_are_looked_for_are_none(
    handle: RepositoryHandle, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commits after each look at the refs: the first of them has a follower, and the refs do not lead to it."""
    seeds = iter(range(100, 200))

    def then_commits(real: Callable[..., Any]) -> Callable[..., Any]:
        def look(*args: Any) -> Any:
            found = real(*args)
            line(handle, "main", next(seeds), next(seeds))
            return found

        return look

    for name in ("check_records", "reread_names"):
        monkeypatch.setattr(fsck, name, then_commits(getattr(fsck, name)))
    report = check_url(path)
    assert next(seeds) == 104
    assert report.ok, report.problems


def test_a_repair_beside_commits_proposes_none_of_them_as_an_orphan(
    handle: RepositoryHandle, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RefStore.every

    def every(refs: RefStore) -> Iterator[Ref]:
        line(handle, "main", 7, 8)
        return real(refs)

    line(handle, "main", 5, 6)
    monkeypatch.setattr(RefStore, "every", every)
    report = repair_url(path, RepairRequest(frozenset(["refs"])))
    assert report.left == ()
    assert len(handle.index.read(history.read_links)) == 5
