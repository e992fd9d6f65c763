"""A repair that dies at any effect leaves a repository that is no worse, and the next repair finishes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import GcPhase, read_gc_state
from cas_ckpt.errors import CorruptionError
from cas_ckpt.index import history
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.fsck.repair import repair_store
from cas_ckpt.ops.fsck.report import RepairRequest
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.refs import delete_branch
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, new_repository, numbers
from tests.effects import CrashNow, FaultPlan, die_after, die_before
from tests.ops.fsck.fsck_cases import READ_ALL, arrays, check, copy_of, flip, repair
from tests.wrapped_stores import FaultyStore

ALL = GcOptions(min_age_s=0, reflog_expire_s=0)
KINDS = frozenset({"chunks", "packs", "refs"})


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("crash") / "repo"
    handle = new_repository(path)
    for seed in (1, 2):
        commit(handle, {"a": numbers(40, 40, seed=9), "b": numbers(40, 40, seed=seed), "step": seed})
    handle.close()
    return path


def damaged(intact: Path, target: Path) -> Path:
    """Damage of several kinds at once: a payload, a directory, a ref."""
    copy_of(intact, target)
    data, meta = (sorted((target / "packs").glob(f"*/*.{kind}")) for kind in ("data", "meta"))
    flip(data[0], 3000)
    flip(data[1], data[1].stat().st_size - 150)
    flip(meta[0], meta[0].stat().st_size - 30)
    flip(target / "refs/heads/main.ref", 60)
    assert len(check(target).problems) == 4
    return target


def run_repair(path: Path, intact: Path, plan: FaultPlan | None = None) -> FaultyStore:
    store = FaultyStore(FileStore(path), plan)
    repair_store(store, RepairRequest(KINDS, (str(intact),)), index_url=str(path / "index" / "index.sqlite"))
    return store


def num_effects(intact: Path, target: Path) -> int:
    return run_repair(damaged(intact, target), intact).effects.count


@pytest.mark.parametrize("plan", [die_before, die_after])
def test_dying_at_any_effect_of_a_repair_is_no_worse_and_can_be_repaired(
    intact: Path, tmp_path: Path, plan: Callable[[int], FaultPlan]
) -> None:
    total = num_effects(intact, tmp_path / "count")
    ids = [one.hex() for one in RepositoryHandle.open(intact).index.read(history.read_links)]
    wanted = arrays(intact, ids)
    assert total > 20
    before = {problem.objects for problem in check(damaged(intact, tmp_path / "once")).problems}
    lost = {one for objects in before for one in objects}
    for k in range(1, total + 1, 2 if plan is die_after else 3):
        path = damaged(intact, tmp_path / "repo")
        with pytest.raises(CrashNow):
            run_repair(path, intact, plan(k))
        report = check(path)
        assert {one for problem in report.problems for one in problem.objects} <= lost, k
        assert repair(path, *KINDS, other=intact).ok, k
        assert check(path).problems == (), k
        assert read_gc_state(FileStore(path)).phase == GcPhase.IDLE
        assert arrays(path, ids) == wanted


def test_a_repair_that_died_while_packs_were_condemned_is_finished_by_a_repair_or_a_collection(
    intact: Path, tmp_path: Path
) -> None:
    path = damaged(intact, tmp_path / "count")
    log = run_repair(path, intact).effects.log
    swaps = [at for at, effect in enumerate(log, 1) if effect.where == "gc/state"]
    assert len(swaps) == 3
    for k in swaps[:2]:
        path = damaged(intact, tmp_path / "repo")
        with pytest.raises(CrashNow):
            run_repair(path, intact, die_after(k))
        assert read_gc_state(FileStore(path)).phase != GcPhase.IDLE
        assert repair(path, *KINDS, other=intact).ok
        assert check(path).ok


def test_a_repaired_repository_is_collected_and_committed_to_as_before(intact: Path, tmp_path: Path) -> None:
    path = damaged(intact, tmp_path / "repo")
    run_repair(path, intact)
    handle = RepositoryHandle.open(path)
    collect_garbage(handle)
    again = commit(handle, {"a": numbers(40, 40, seed=9), "b": numbers(40, 40, seed=2), "step": 3})
    assert again.stats.num_new_chunks == 0
    assert check_open(handle, READ_ALL).ok


def test_nothing_is_written_by_a_dry_run(intact: Path, tmp_path: Path) -> None:
    path = damaged(intact, tmp_path / "repo")
    before = {one: one.read_bytes() for one in path.rglob("*") if one.is_file() and "index" not in one.parts}
    done = repair(path, *KINDS, other=intact, dry_run=True)
    assert done.dry_run and len(done.actions) == 5
    assert {one: one.read_bytes() for one in path.rglob("*") if one.is_file() and "index" not in one.parts} == before


def test_intact_bytes_that_are_replaced_are_stored_elsewhere_first(intact: Path, tmp_path: Path) -> None:
    path = damaged(intact, tmp_path / "repo")
    log = run_repair(path, intact).effects.log
    deleted = [at for at, effect in enumerate(log) if effect.name == "delete"]
    written = [at for at, effect in enumerate(log) if effect.where.startswith(("packs/", "damaged/"))]
    assert deleted and max(at for at in written if log[at].name != "delete") < min(deleted)


@pytest.fixture
def without_dev(tmp_path: Path) -> tuple[Path, str]:
    """A repository that lost its index and the branch that alone keeps the commit whose id is given."""
    handle = new_repository(tmp_path / "lost")
    commit(handle, {"w": numbers(40, 40, seed=1)})
    commit(handle, {"w": numbers(40, 40, seed=3)}, branch="gone")
    delete_branch(handle, "gone", force=True)
    assert collect_garbage(handle, ALL).deleted_packs  # so that repairs look at what is there
    kept = commit(handle, {"w": numbers(40, 40, seed=2)}, branch="dev").id
    handle.close()
    for path in (tmp_path / "lost" / "index").glob("index.sqlite*"):
        path.unlink()
    (tmp_path / "lost" / "refs/heads/dev.ref").unlink()
    return tmp_path / "lost", kept


def missed(path: Path) -> list[str]:
    """Where fsck finds refs lost; a collection refuses to work if, and only if, it finds some."""
    found = [problem.where for problem in check(path).problems]
    handle = RepositoryHandle.open(path)
    if found:
        with pytest.raises(CorruptionError, match=r"dev\.ref is gone"):
            collect_garbage(handle, ALL)
    else:
        collect_garbage(handle, ALL)
    handle.close()
    return found


@pytest.mark.parametrize("plan", [die_before, die_after])
def test_a_ref_whose_repair_died_is_named_or_still_missed(
    without_dev: tuple[Path, str], tmp_path: Path, plan: Callable[[int], FaultPlan]
) -> None:
    intact, kept = without_dev
    wanted = arrays(intact, [kept])
    request = RepairRequest(frozenset({"refs"}), refs={"dev": kept})

    def repaired(path: Path, dying: FaultPlan | None = None) -> FaultyStore:
        store = FaultyStore(FileStore(path), dying)
        repair_store(store, request, index_url=str(path / "index" / "index.sqlite"))
        return store

    for k in range(1, repaired(copy_of(intact, tmp_path / "count")).effects.count + 1):
        path = copy_of(intact, tmp_path / "repo")
        with pytest.raises(CrashNow):
            repaired(path, plan(k))
        missed(path)
        assert arrays(path, [kept]) == wanted, k
        repaired(path)
        assert missed(path) == []
        assert arrays(path, [kept]) == wanted, k


def test_a_ref_whose_repair_failed_is_still_missed(without_dev: tuple[Path, str], tmp_path: Path) -> None:
    path, kept = without_dev
    (pack, *_) = sorted((path / "packs").glob("*/*.data"), key=lambda one: one.stat().st_mtime_ns)[1:]
    pack.rename(tmp_path / "away")
    done = repair(path, "refs", refs={"dev": kept})
    assert [action.where for action in done.left] == ["refs/heads/dev.ref"]
    (tmp_path / "away").rename(pack)
    assert missed(path) == ["refs/heads/dev.ref"]
    assert arrays(path, [kept])


def test_a_ref_that_was_cut_to_nothing_is_made_again(intact: Path, tmp_path: Path) -> None:
    path = copy_of(intact, tmp_path / "repo")
    (path / "refs/heads/main.ref").write_bytes(b"")
    assert repair(path, "refs", other=intact).ok
    assert check(path).ok
