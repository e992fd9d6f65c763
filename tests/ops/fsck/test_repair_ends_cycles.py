"""repair beside a collection that died, or that is alive: nothing is lost, and neither waits for the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import GC_STATE_KEY, GcPhase, GcState, encode_gc_state, read_gc_state
from cas_ckpt.core.refs import Generation
from cas_ckpt.errors import ConflictError
from cas_ckpt.ops.fsck.repair import repair_store
from cas_ckpt.ops.fsck.report import RepairRequest
from cas_ckpt.ops.gc.gc import Collection
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.refs import delete_branch
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, new_repository, numbers, same_bytes, stored_arrays
from tests.meddling import MeddledStore
from tests.ops.fsck.fsck_cases import check, copy_of, flip, repair

EXPIRED = GcOptions(reflog_expire_s=0, max_unused=0, min_age_s=0)
STATE = {"w": numbers(64, 64, seed=1)}
CHUNKS = frozenset({"chunks", "packs"})


def data_packs(repo: Path) -> set[str]:
    return {key for key, _ in FileStore(repo).list("packs/") if key.endswith(".data")}


def set_state(repo: Path, number: int, phase: str, packs: tuple[str, ...]) -> None:
    generation = Generation(number, b"n" * 16)
    FileStore(repo).put(GC_STATE_KEY, encode_gc_state(GcState(generation, phase, packs)))


def intact_value(repo: Path, root: str) -> bool:
    with_own_index = RepositoryHandle.open(repo, index_url=":memory:")
    with_own_index.sync()
    return same_bytes(stored_arrays(with_own_index, root)["w"], STATE["w"])


@pytest.fixture
def twins(tmp_path: Path) -> tuple[Path, str, list[str]]:
    """A repository in which one chunk stands in two packs."""
    repo = tmp_path / "repo"
    new_repository(repo).close()
    handle, other = (RepositoryHandle.open(repo, index_url=place) for place in (None, ":memory:"))
    for one in (handle, other):
        one.begin_writing()
    info = commit(handle, STATE, branch="x")
    commit(other, STATE, branch="y")
    handle.sync()
    handle.close()
    assert len(data_packs(repo)) == 2
    return repo, info.root, sorted(data_packs(repo))


def test_what_is_intact_in_a_pack_that_is_being_deleted_is_copied_if_its_twin_was_damaged(
    twins: tuple[Path, str, list[str]],
) -> None:
    repo, root, (stays, goes) = twins
    flip(repo / stays, 3000)
    set_state(repo, 1, GcPhase.DELETING, (goes,))
    assert repair(repo, *CHUNKS, read_data=True).ok
    assert read_gc_state(FileStore(repo)).phase == GcPhase.IDLE
    assert data_packs(repo).isdisjoint({stays, goes})
    assert intact_value(repo, root) and check(repo).ok


def test_an_intact_copy_in_a_condemned_pack_counts_again_once_the_collection_is_given_up(
    twins: tuple[Path, str, list[str]],
) -> None:
    repo, root, (stays, goes) = twins
    flip(repo / stays, 3000)
    set_state(repo, 1, GcPhase.CONDEMNED, (goes,))
    done = repair(repo, *CHUNKS, read_data=True)
    assert done.ok and done.actions[0].where == GC_STATE_KEY
    assert data_packs(repo) == {goes} and intact_value(repo, root) and check(repo).ok


def test_a_dry_run_ends_no_collection(twins: tuple[Path, str, list[str]]) -> None:
    repo, _, (stays, goes) = twins
    flip(repo / stays, 3000)
    for phase in (GcPhase.CONDEMNED, GcPhase.DELETING):
        set_state(repo, 1, phase, (goes,))
        done = repair(repo, *CHUNKS, read_data=True, dry_run=True)
        assert done.ok and done.actions[0].where == GC_STATE_KEY
        assert read_gc_state(FileStore(repo)).phase == phase and data_packs(repo) == {stays, goes}


def test_a_collection_that_hinders_nobody_is_left_alone(twins: tuple[Path, str, list[str]]) -> None:
    repo, _, (_, goes) = twins
    set_state(repo, 1, GcPhase.CONDEMNED, (goes,))
    assert repair(repo, *CHUNKS).actions == ()
    assert read_gc_state(FileStore(repo)).condemned == (goes,)


@pytest.mark.parametrize("phase", [GcPhase.CONDEMNED, GcPhase.DELETING])
def test_what_is_lost_is_brought_although_a_collection_goes_on_and_relies_on_no_condemned_pack(
    twins: tuple[Path, str, list[str]], tmp_path: Path, phase: str
) -> None:
    repo, root, (stays, goes) = twins
    copy = copy_of(repo, tmp_path / "copy")
    flip(repo / stays, 3000)
    set_state(repo, 1, phase, (goes,))
    if phase == GcPhase.DELETING:
        (repo / goes).unlink()
    request = RepairRequest(CHUNKS, (str(copy),), read_data=True)
    inner = FileStore(repo)

    def goes_on() -> None:
        """A collector is alive: whenever repair wants to swap gc/state, it was faster."""
        state = read_gc_state(inner)
        inner.put(GC_STATE_KEY, encode_gc_state(GcState(state.generation, GcPhase.DELETING, state.condemned)))

    store = MeddledStore(inner, goes_on, before="compare_and_swap", key=GC_STATE_KEY, times=99)
    with pytest.raises(ConflictError, match="repair again"):
        repair_store(store, request, index_url=str(repo / "index" / "index.sqlite"))
    assert store.happened
    (repo / goes).unlink(missing_ok=True)  # the collector finishes
    set_state(repo, 1, GcPhase.IDLE, ())
    assert data_packs(repo) - {stays, goes}
    assert repair(repo, *CHUNKS, read_data=True).ok
    assert intact_value(repo, root) and check(repo).ok


def test_a_live_collection_that_repair_gave_up_deletes_nothing(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    info = commit(handle, STATE)
    before = data_packs(tmp_path / "repo")
    commit(handle, {"w": numbers(64, 64, seed=2)}, branch="side")
    [garbage] = data_packs(tmp_path / "repo") - before
    delete_branch(handle, "side", force=True)
    copy = copy_of(tmp_path / "repo", tmp_path / "copy")

    class Beside(Collection):
        def rescue(self, state: Any, heads: Any) -> Any:
            [kept] = before
            flip(tmp_path / "repo" / kept, (tmp_path / "repo" / kept).stat().st_size - 30)
            assert repair(tmp_path / "repo", *CHUNKS, other=copy).ok
            return super().rescue(state, heads)

    with pytest.raises(ConflictError):
        Beside(handle, EXPIRED).run()
    assert garbage in data_packs(tmp_path / "repo")
    assert intact_value(tmp_path / "repo", info.root)
    assert read_gc_state(handle.store).phase == GcPhase.IDLE
    assert Collection(RepositoryHandle.open(tmp_path / "repo"), EXPIRED).run().deleted_packs
    assert intact_value(tmp_path / "repo", info.root)
