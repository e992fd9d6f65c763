"""`index rebuild` beside others: they see the old index or the new one, whatever they do and whatever dies."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select

from cas_ckpt.core import packs
from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import live_sets
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import ConflictError, CorruptionError, OutOfSpaceError
from cas_ckpt.index import history, integrity, remembered, usage
from cas_ckpt.index import index as index_module
from cas_ckpt.index.index import Index, disorder
from cas_ckpt.index.integrity import Scrub
from cas_ckpt.index.remembered import KeptPlan, RestoreRow
from cas_ckpt.index.rows import PackRecord
from cas_ckpt.index.schema import PLAN_RANKS, PLAN_SHAPES, PLANS, REFS
from cas_ckpt.ops.fsck.check import check_url
from cas_ckpt.ops.fsck.repair import rebuild_index, refill_index
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.history.log import log_commits
from cas_ckpt.ops.refs import create_branch, delete_branch
from cas_ckpt.ops.retention.forget import forget_by_policy
from cas_ckpt.ops.retention.policy import Policy, Retention
from cas_ckpt.storage.store import Store
from tests.builders import commit, leave_garbage, numbers
from tests.index.plans_suite import SHAPES, loads, plan
from tests.index.restores_suite import restore
from tests.processes import PIPE, Forked

NUM_COMMITS = 12
EAGER = GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0)
EXPIRED = GcOptions(reflog_expire_s=0, max_unused=0)


def _ids(handle: RepositoryHandle) -> list[str]:
    return [info.id for info in log_commits(handle)]


def _opened(path: Path, index_url: str | None = None) -> closing[RepositoryHandle]:
    return closing(RepositoryHandle.open(path, index_url=index_url))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with closing(init_repository(tmp_path / "repo")) as handle:
        for step in range(NUM_COMMITS):
            commit(handle, {"w": numbers(40, 40, seed=step)})
    return tmp_path / "repo"


@pytest.fixture
def handle(path: Path) -> Iterator[RepositoryHandle]:
    with _opened(path) as handle:
        yield handle


def _names_beside(path: Path) -> list[str]:
    names = os.listdir((path / INDEX_PATH).parent)
    return [name for name in names if not name.endswith((".lock", "-wal", "-shm")) and name != INDEX_PATH.name]


REBUILDS: dict[str, Callable[[Path, RepositoryHandle], Any]] = {
    "from nothing": lambda path, handle: rebuild_index(path),
    "of an open repository": lambda path, handle: refill_index(handle),
}


@pytest.mark.parametrize("how", REBUILDS)
def test_readers_see_a_whole_index_at_every_moment_of_a_rebuild(
    path: Path, handle: RepositoryHandle, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    expected, real, looked = _ids(handle), packs.read_pack, []
    with _opened(path) as reader:

        def read_pack(store: Any, key: str) -> Any:
            looked.append(key)
            assert len(reader.index.read(history.read_links)) == NUM_COMMITS
            assert _ids(reader) == expected
            return real(store, key)

        monkeypatch.setattr(packs, "read_pack", read_pack)
        report = REBUILDS[how](path, handle)
        assert report.stats.num_commits == NUM_COMMITS
        assert len(looked) == report.stats.num_packs
        assert _ids(reader) == expected
        assert reader.sync() == 0


@pytest.mark.parametrize("how", REBUILDS)
def test_what_is_committed_and_collected_during_a_rebuild_is_in_the_new_index(
    path: Path, handle: RepositoryHandle, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    create_branch(handle, "side", start="main~3")
    commit(handle, {"w": numbers(50, 50, seed=99)}, branch="side")
    real, made = packs.read_pack, []
    with _opened(path) as other:

        def read_pack(store: Any, key: str) -> Any:
            found = real(store, key)
            if not made:
                made.append(commit(other, {"w": numbers(30, 30, seed=77)}))
                delete_branch(other, "side", force=True)
                collect_garbage(other, EAGER)
            return found

        monkeypatch.setattr(packs, "read_pack", read_pack)
        REBUILDS[how](path, handle)
        stored = dict(other.store.list("packs/"))
        with _opened(path) as fresh:
            assert fresh.index.packs() == stored
            assert made[0].id == _ids(fresh)[0]
            assert len(_ids(fresh)) == NUM_COMMITS + 1
    assert check_url(path).ok


def test_a_log_that_is_being_read_goes_on_in_the_new_index(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebuild gives other numbers to commits: those that are still to be read must not be mixed up."""

    monkeypatch.setattr(history, "_COMMITS_PER_READ", 2)
    with _opened(path) as handle:
        expected = _ids(handle)
        names = sorted(handle.index.packs())
        handle.index.drop_packs(names[:7])
        handle.sync()  # adds them in another order, so that a rebuild numbers all of them anew
        log = log_commits(handle)
        found = [next(log).id]
        refill_index(handle)
        found += [info.id for info in log]
    assert found == expected


def test_what_packs_do_not_tell_outlives_a_rebuild(path: Path, handle: RepositoryHandle) -> None:
    pack = next(iter(handle.index.packs()))
    handle.index.write(integrity.write_scrub, Scrub(pack, 7, 8, "damaged as a test"))
    handle.index.set_generation(3)
    refs = handle.index.read(remembered.read_refs)
    assert refs
    for again in REBUILDS.values():
        again(path, handle)
        assert handle.index.read(remembered.read_refs) == refs
        assert handle.index.generation == 3
        assert handle.index.read(integrity.read_scrubs)[pack].damage == "damaged as a test"


def test_a_damaged_index_is_replaced_whole_and_keeps_what_can_be_read(path: Path) -> None:
    with _opened(path) as handle:
        refs, expected = handle.index.read(remembered.read_refs), _ids(handle)
    with sqlite3.connect(path / INDEX_PATH) as raw:
        raw.execute("DROP TABLE t_locations")
    raw.close()
    with _opened(path) as holder:  # nothing that it asked for so far is damaged
        with pytest.raises(ConflictError, match="a process has it open"):
            rebuild_index(path)
        assert holder.index.read(remembered.read_refs) == refs
    rebuild_index(path)
    with _opened(path) as handle:
        assert _ids(handle) == expected
        assert handle.index.read(remembered.read_refs) == refs
    assert check_url(path).ok


def test_plans_and_restores_outlive_a_rebuild_and_what_is_left_of_a_plan_does_not(path: Path) -> None:
    def what_is_kept(handle: RepositoryHandle) -> tuple[list[KeptPlan], list[RestoreRow]]:
        return handle.index.read(remembered.read_plans), handle.index.read(remembered.read_restores)

    with _opened(path) as handle:
        for number, mesh in enumerate(("dp=2", "dp=4")):
            handle.index.write(remembered.write_plan, plan("root", mesh, 2 + 2 * number), loads(2 + 2 * number), SHAPES)
            handle.index.write(remembered.write_restore, restore("commit", at_s=number))
        before = what_is_kept(handle)
        for again in REBUILDS.values():
            again(path, handle)
            assert what_is_kept(handle) == before
    with sqlite3.connect(path / INDEX_PATH) as raw:
        raw.execute("DROP TABLE t_locations")
        raw.execute("DELETE FROM t_plan_ranks WHERE plan_id = 1 AND rank = 1")
        raw.execute("DELETE FROM t_plans WHERE plan_id = 2")
    raw.close()
    rebuild_index(path)
    with _opened(path) as handle:
        assert what_is_kept(handle) == ([], before[1])
        with handle.index.reading() as connection:
            assert [connection.execute(select(table)).all() for table in (PLANS, PLAN_RANKS, PLAN_SHAPES)] == [
                [],
                [],
                [],
            ]


def test_a_damaged_index_stays_while_there_is_no_space_for_what_packs_do_not_tell(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sqlite3.connect(path / INDEX_PATH) as raw:
        raw.execute("DROP TABLE t_locations")
    raw.close()
    before = (path / INDEX_PATH).read_bytes()
    real = index_module.insert_missing

    def insert(connection: Any, table: Any, rows: Any) -> int:
        if table is REFS:
            raise OutOfSpaceError("no space left")
        return real(connection, table, rows)

    monkeypatch.setattr(index_module, "insert_missing", insert)
    with pytest.raises(OutOfSpaceError):
        rebuild_index(path)
    assert (path / INDEX_PATH).read_bytes() == before
    monkeypatch.undo()
    rebuild_index(path)
    with _opened(path) as handle:
        assert handle.index.read(remembered.read_refs)


def test_a_file_of_somebody_else_is_never_taken_for_a_damaged_index(path: Path, tmp_path: Path) -> None:
    notes, database = tmp_path / "notes.txt", tmp_path / "runs.db"
    notes.write_text("not yours" * 100)
    with sqlite3.connect(database) as raw:
        raw.execute("CREATE TABLE runs (id int)")
        raw.execute("CREATE TABLE alembic_version (version_num text)")
        raw.execute("INSERT INTO alembic_version VALUES ('f5a4f2784254')")
    raw.close()
    for place, why in ((notes, "is not a database"), (database, "cas_ckpt did not make")):
        before = place.read_bytes()
        with pytest.raises(ConflictError, match=why):
            rebuild_index(path, index_url=str(place))
        assert place.read_bytes() == before
    with pytest.raises(CorruptionError):
        RepositoryHandle.open(path, index_url=str(notes))


def test_two_repositories_that_use_one_file_are_told(path: Path, tmp_path: Path) -> None:
    init_repository(tmp_path / "second").close()
    shared = str(tmp_path / "shared.sqlite")
    with closing(RepositoryHandle.open(path, index_url=shared)) as first:
        expected = _ids(first)
        with pytest.raises(ConflictError, match="no two repositories share one file"):
            RepositoryHandle.open(tmp_path / "second", index_url=shared)
        assert _ids(first) == expected
    with closing(RepositoryHandle.open(tmp_path / "second", index_url=shared)) as second:
        assert second.index.matches
        assert second.index.packs() == {}


def _die_in_a_rebuild(path: Path, at_pack: int, in_transaction: bool) -> None:
    """Rebuild, and die at the pack of that number (0: at none), or before the transaction ends."""
    real_read, real_replace = packs.read_pack, index_module._replace
    keys: list[str] = []

    def read_pack(store: Store, key: str) -> PackRecord:
        keys.append(key)
        if len(keys) == at_pack:
            os._exit(9)
        return real_read(store, key)

    def replace(*args: Any) -> None:
        real_replace(*args)
        os._exit(9)

    packs.read_pack = read_pack  # type: ignore[assignment]
    if in_transaction:
        index_module._replace = replace  # type: ignore[assignment]
    rebuild_index(path)


@pytest.mark.parametrize(("at_pack", "in_transaction"), [(1, False), (9, False), (0, True)])
def test_a_rebuild_that_dies_changes_nothing_and_the_next_one_cleans_up(
    path: Path, at_pack: int, in_transaction: bool
) -> None:
    with _opened(path) as handle:
        stats, expected = handle.index.read(usage.read_stats), _ids(handle)
        assert Forked(_die_in_a_rebuild, path, at_pack, in_transaction).wait(timeout=100) == 9
        assert (handle.index.read(usage.read_stats), _ids(handle)) == (stats, expected)
    with _opened(path) as handle:
        assert (handle.index.read(usage.read_stats), _ids(handle), handle.index.read(disorder)) == (stats, expected, [])
    assert len(_names_beside(path)) == 1
    rebuild_index(path)
    assert _names_beside(path) == []


def test_the_commit_graph_is_of_one_moment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody drops rows between the look at the store and the look at the graph."""
    with _opened(path) as handle, _opened(path) as other:
        names, real, dropped = sorted(handle.index.packs()), RepositoryHandle.sync, []
        other.index.drop_packs(names)

        def sync(self: RepositoryHandle) -> int:
            changed = real(self)
            if len(dropped) < 2:
                dropped.append(other.index.drop_packs(names))
            return changed

        monkeypatch.setattr(RepositoryHandle, "sync", sync)
        assert len(live_sets(handle).commits) == NUM_COMMITS
        assert len(dropped) == 2


@pytest.mark.parametrize("comes", ["while the packs are compared", "after they were"])
def test_a_pack_that_the_index_takes_in_during_a_check_is_not_called_wrong(
    path: Path, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    """Another process rebuilt the index, or synced it, between the comparison and the look at what it knows."""
    with _opened(path) as other:
        names, real = sorted(other.index.packs()), integrity.differences

        def differences(connection: Connection, records: Any) -> dict[str, str]:
            other.index.drop_packs(names)
            found = real(connection, records)
            assert set(names) <= found.keys()
            if comes == "while the packs are compared":
                other.sync()
            return found

        monkeypatch.setattr(integrity, "differences", differences)
        report = check_url(path)
        assert report.ok, report.problems
        assert sorted(other.index.packs()) == names


def _rebuild(path: Path, index_url: str | None = None) -> None:
    for _ in range(12 if index_url is None else 5):  # over PostgreSQL each takes two to three times as long
        rebuild_index(path, index_url=index_url)


def _look(path: Path, index_url: str | None = None) -> None:
    with _opened(path, index_url) as handle:
        for _ in range(25):
            assert len(_ids(handle)) >= NUM_COMMITS
            assert len(handle.index.read(history.read_links)) >= NUM_COMMITS
            resolve(handle, "main~7")


def _check(path: Path, index_url: str | None = None) -> None:
    for _ in range(6):
        report = check_url(path, index_url=index_url)
        assert report.ok, report.problems


def _forget(path: Path, index_url: str | None = None) -> None:
    with _opened(path, index_url) as handle:
        for step in range(6):
            commit(handle, {"w": numbers(20, 20, seed=step)}, branch="scratch")
            forget_by_policy(handle, Retention(Policy(keep_last=2)), branches=["scratch"])
            collect_garbage(handle, EAGER)


WORKS = {"rebuild": _rebuild, "look": _look, "check": _check, "forget": _forget}


def _work_when_told(work: str, path: Path, *index_url: str) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    WORKS[work](path, *index_url)


def work_beside_rebuilds(path: Path, *index_url: str) -> None:
    """A loop of rebuilds, and three processes beside it that must not notice."""
    with ExitStack() as ended:
        workers = {
            work: ended.enter_context(
                Forked(_work_when_told, work, path, *index_url, stdin=PIPE, stdout=PIPE, stderr=PIPE)
            )
            for work in WORKS
        }
        for worker in workers.values():
            ended.callback(worker.kill)  # before it is waited for; nothing if it has ended
            assert worker.stdout.readline() == "ready\n"
        for worker in workers.values():
            worker.stdin.write("go\n")
        done = {work: (worker.communicate()[1], worker.returncode) for work, worker in workers.items()}
    assert done == dict.fromkeys(WORKS, ("", 0))
    with _opened(path, *index_url) as handle:
        assert len(_ids(handle)) == NUM_COMMITS
        assert handle.sync() == 0
        assert isinstance(handle.index, Index)


def test_other_processes_never_notice_a_loop_of_rebuilds(path: Path) -> None:
    work_beside_rebuilds(path)


def test_a_rebuild_beside_a_collection_ends_well(
    handle: RepositoryHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_garbage(handle)
    read_pack, done = packs.read_pack, []

    def after_a_collection(store: Any, key: str) -> Any:
        if not done:
            done.append(key)
            collect_garbage(handle, EXPIRED)
        return read_pack(store, key)

    before = {key for key, _ in handle.store.list("packs/")}
    monkeypatch.setattr(packs, "read_pack", after_a_collection)
    rebuild_index(str(tmp_path / "repo"), index_url=str(tmp_path / "other.sqlite"))
    stored = {key for key, _ in handle.store.list("packs/")}
    assert before - stored  # the collection deleted packs that the rebuild had listed
    with _opened(tmp_path / "repo", str(tmp_path / "other.sqlite")) as rebuilt:
        assert rebuilt.index.packs().keys() == stored
        assert _ids(rebuilt) == _ids(handle)
