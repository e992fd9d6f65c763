"""Collections of real repositories: what goes, what stays, what is told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cas_ckpt import clock
from cas_ckpt.core.forgotten import write_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import GcPhase, Session, read_gc_state, swap_gc_state
from cas_ckpt.core.publish import publish_ref
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.core.refs import RefKind, new_move
from cas_ckpt.core.units import PackShard
from cas_ckpt.errors import (
    ConflictError,
    CorruptionError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    UnsupportedVersionError,
)
from cas_ckpt.objects import pack
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.pack import ExtentInfo, PackKind
from cas_ckpt.ops.gc.gc import Collection, collect_garbage
from cas_ckpt.ops.gc.plan import REPACK, GcOptions
from cas_ckpt.ops.history.log import log_commits
from cas_ckpt.ops.refs import create_branch, create_tag, delete_branch
from cas_ckpt.storage.file import FileStore
from cas_ckpt.transfer.pack_writer import pack_key
from tests.builders import commit, new_repository, numbers, stored_arrays
from tests.effects import CrashNow, Fault, FaultPlan
from tests.wrapped_stores import FaultyStore

NOW = GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0)
"""Spare nothing."""


def packs(handle: RepositoryHandle) -> set[str]:
    return {key for key, _ in handle.store.list("packs/")}


def weights(seed: int) -> np.ndarray:
    return numbers(64, 64, seed=seed)


def is_whole(handle: RepositoryHandle, info: CommitInfo, seed: int) -> bool:
    return bool(np.array_equal(stored_arrays(handle, info.root)["w"].view("float32"), weights(seed)))


def test_a_repository_in_which_everything_is_needed_stays_as_it_is(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1)})
    commit(handle, {"w": weights(2)})
    before = packs(handle)
    report = collect_garbage(handle, NOW)
    assert (report.dead_objects, report.deleted_packs, report.generation) == (0, 0, 0)
    assert packs(handle) == before


def test_what_only_a_deleted_branch_needed_goes(handle: RepositoryHandle) -> None:
    kept = commit(handle, {"w": weights(1)})
    commit(handle, {"w": weights(2)}, branch="side")
    delete_branch(handle, "side", force=True)
    report = collect_garbage(handle, NOW)
    assert report.deleted_packs == 2 and report.deleted_bytes > 64 * 64 * 4
    assert len(packs(handle)) == 2
    assert is_whole(handle, kept, 1)
    assert read_gc_state(handle.store).phase == GcPhase.IDLE


def test_a_deleted_branch_is_remembered_for_as_long_as_its_log_says(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1)})
    side = commit(handle, {"w": weights(2)}, branch="side")
    delete_branch(handle, "side", force=True)
    remembering = replace(NOW, reflog_expire_s=3600)
    assert collect_garbage(handle, remembering).deleted_packs == 0
    create_branch(handle, "again", start=side.id)
    assert is_whole(handle, side, 2)
    delete_branch(handle, "again", force=True)
    later = clock.now_s() + 7200
    with clock.fixed(lambda: later):
        assert collect_garbage(handle, remembering).deleted_packs == 2


def test_a_forgotten_commit_keeps_its_record_and_loses_its_data(handle: RepositoryHandle) -> None:
    first = commit(handle, {"w": weights(1)}, message="first")
    middle = commit(handle, {"w": weights(2)}, message="middle")
    last = commit(handle, {"w": weights(3)}, message="last")
    write_forgotten(handle.store, [Digest(bytes.fromhex(middle.id))], author="tests")
    report = collect_garbage(handle, NOW)
    assert report.deleted_packs >= 1 and report.dead_bytes > 64 * 64 * 4
    assert [info.message for info in log_commits(handle)] == ["last", "middle", "first"]
    assert is_whole(handle, first, 1) and is_whole(handle, last, 3)
    with pytest.raises(NotFoundError):
        stored_arrays(handle, middle.root)


def test_a_tag_keeps_a_forgotten_commit_whole(handle: RepositoryHandle) -> None:
    first = commit(handle, {"w": weights(1)})
    commit(handle, {"w": weights(2)})
    create_tag(handle, "v1", first.id)
    write_forgotten(handle.store, [Digest(bytes.fromhex(first.id))], author="tests")
    assert collect_garbage(handle, NOW).deleted_packs == 0
    assert is_whole(handle, first, 1)


def test_a_pin_keeps_a_commit_that_no_branch_leads_to(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1)})
    side = commit(handle, {"w": weights(2)}, branch="side")
    target = Digest(bytes.fromhex(side.id))
    publish_ref(handle, RefKind.PIN, "paper", target, move=new_move(None, target, "pin", "tests"), note="table 3")
    delete_branch(handle, "side", force=True)
    assert collect_garbage(handle, NOW).deleted_packs == 0
    assert is_whole(handle, side, 2)
    assert handle.refs.get(RefKind.PIN, "paper").note == "table 3"


def test_data_that_another_commit_shares_stays(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1), "v": weights(9)}, branch="side")
    kept = commit(handle, {"w": weights(1)})
    delete_branch(handle, "side", force=True)
    collect_garbage(handle, NOW)
    assert is_whole(handle, kept, 1)


def test_a_sparse_pack_is_copied_and_then_deleted(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1), **{f"x{i}": weights(100 + i) for i in range(9)}}, branch="side")
    kept = commit(handle, {"w": weights(1)})
    delete_branch(handle, "side", force=True)
    before = sum(size for _, size in handle.store.list("packs/"))
    report = collect_garbage(handle, NOW)
    after = sum(size for _, size in handle.store.list("packs/"))
    assert report.copied_packs >= 1 and report.copied_bytes > 64 * 64 * 4
    assert after < before / 4
    assert is_whole(handle, kept, 1)
    assert collect_garbage(handle, NOW).dead_objects == 0


def test_waste_below_the_limit_stays(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1), "x": weights(2)}, branch="side")
    commit(handle, {"w": weights(1)})
    delete_branch(handle, "side", force=True)
    report = collect_garbage(handle, replace(NOW, max_unused=0.9))
    assert report.copied_packs == 0 and report.wasted_bytes > 64 * 64 * 4


def test_no_more_is_copied_than_was_allowed(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1), "x": weights(2)}, branch="side")
    commit(handle, {"w": weights(1)})
    delete_branch(handle, "side", force=True)
    report = collect_garbage(handle, replace(NOW, max_repack_bytes=1000))
    assert report.copied_bytes <= 1000 and report.wasted_bytes > 64 * 64 * 4


def test_a_dry_run_tells_and_changes_nothing(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1)})
    commit(handle, {"w": weights(2)}, branch="side")
    delete_branch(handle, "side", force=True)
    before = packs(handle)
    told = collect_garbage(handle, NOW, dry_run=True)
    assert packs(handle) == before and read_gc_state(handle.store).generation.number == 0
    done = collect_garbage(handle, NOW)
    assert told.dry_run and (told.deleted_packs, told.deleted_bytes) == (done.deleted_packs, done.deleted_bytes)


def test_packs_that_nobody_published_yet_are_spared_while_they_are_young(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1)})
    _orphan(handle, 7)
    spared = collect_garbage(handle, replace(NOW, min_age_s=3600))
    assert spared.deleted_packs == 0 and spared.young_packs == 1
    later = clock.now_s() + 7200
    with clock.fixed(lambda: later):
        assert collect_garbage(handle, replace(NOW, min_age_s=3600)).deleted_packs == 1


def test_a_session_that_is_heard_of_keeps_them_longer(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1)})
    _orphan(handle, 7)
    start = clock.now_s()
    session = Session(handle.store)
    with clock.fixed(lambda: start + 60):
        session.beat()
        assert collect_garbage(handle, NOW).young_packs == 1
    with clock.fixed(lambda: start + 7 * 3600):
        assert collect_garbage(handle, NOW).deleted_packs == 1
    with clock.fixed(lambda: start + 48 * 3600):
        collect_garbage(handle, NOW)
    assert not list(handle.store.list("sessions/"))


def _orphan(handle: RepositoryHandle, seed: int) -> None:
    """The data pack of a commit that died before it was published."""
    real = handle.store
    handle.store = FaultyStore(real, FaultPlan(1, Fault.DIE_BEFORE, frozenset({"put"})))
    with pytest.raises(CrashNow):
        commit(handle, {"w": weights(seed)}, branch="lost")
    handle.store = real


def test_a_commit_after_a_collection_writes_again_what_was_deleted(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1)})
    commit(handle, {"w": weights(2)}, branch="side")
    delete_branch(handle, "side", force=True)
    collect_garbage(handle, NOW)
    again = commit(handle, {"w": weights(2)})
    assert again.stats.num_new_chunks == 1 and is_whole(handle, again, 2)


def test_another_handle_that_slept_through_a_collection_writes_again_too(tmp_path: Path) -> None:
    first = new_repository(tmp_path / "repo")
    second = RepositoryHandle.open(tmp_path / "repo", index_url=":memory:")
    commit(first, {"w": weights(1)})
    commit(second, {"w": weights(2)}, branch="side")
    delete_branch(first, "side", force=True)
    collect_garbage(first, NOW)
    again = commit(second, {"w": weights(2)})
    assert is_whole(first, again, 2)


def test_a_collection_that_was_left_condemned_is_finished(handle: RepositoryHandle) -> None:
    kept = commit(handle, {"w": weights(1)})
    commit(handle, {"w": weights(2)}, branch="side")
    delete_branch(handle, "side", force=True)
    state = read_gc_state(handle.store)
    after = state.generation.next()
    swap_gc_state(handle.store, state, generation=after, phase=GcPhase.CONDEMNED, condemned=sorted(packs(handle)))
    report = collect_garbage(handle, NOW)
    # What is taken over lets no log entry expire; the collection after it does.
    assert report.took_over == GcPhase.CONDEMNED and report.rescued_packs == 4 and report.deleted_packs == 2
    assert is_whole(handle, kept, 1)


def test_a_collection_that_was_left_deleting_is_finished(handle: RepositoryHandle) -> None:
    kept = commit(handle, {"w": weights(1)})
    before = packs(handle)
    commit(handle, {"w": weights(2)}, branch="side")
    delete_branch(handle, "side", force=True)
    state = read_gc_state(handle.store)
    after = state.generation.next()
    swap_gc_state(
        handle.store, state, generation=after, phase=GcPhase.DELETING, condemned=sorted(packs(handle) - before)
    )
    report = collect_garbage(handle, NOW)
    assert report.took_over == GcPhase.DELETING and report.deleted_packs == 2
    assert packs(handle) == before and is_whole(handle, kept, 1)


def test_writers_go_on_while_a_dead_collection_leaves_packs_condemned(handle: RepositoryHandle) -> None:
    first = commit(handle, {"w": weights(1)})
    state = read_gc_state(handle.store)
    after = state.generation.next()
    swap_gc_state(handle.store, state, generation=after, phase=GcPhase.CONDEMNED, condemned=sorted(packs(handle)))
    again = commit(handle, {"w": weights(1)})
    assert again.stats.num_new_chunks == 1, "nothing condemned may be relied on"
    with pytest.raises(NotFoundError, match="removed by gc"):
        create_tag(RepositoryHandle.open(_root(handle), index_url=":memory:"), "v1", first.id)
    collect_garbage(handle, NOW)
    assert is_whole(handle, again, 1) and is_whole(handle, first, 1)


def _root(handle: RepositoryHandle) -> Path:
    assert isinstance(handle.store, FileStore)
    return handle.store.root


def test_of_two_collections_at_once_one_goes_on(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1)})
    commit(handle, {"w": weights(2)}, branch="side")
    delete_branch(handle, "side", force=True)

    class Overtaken(Collection):
        def condemn(self, state, packs):  # type: ignore[no-untyped-def]
            collect_garbage(RepositoryHandle.open(_root(handle)), NOW)
            return super().condemn(state, packs)

    with pytest.raises(ConflictError, match="another garbage collection"):
        Overtaken(handle, NOW).run()
    assert read_gc_state(handle.store).phase == GcPhase.IDLE and len(packs(handle)) == 2


def test_a_pack_that_cannot_be_deleted_ends_the_collection_and_the_next_one_goes_on(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, {"w": weights(1)})
    commit(handle, {"w": weights(2)}, branch="side")
    delete_branch(handle, "side", force=True)

    class Kept(FaultyStore):
        def delete(self, key: str) -> None:
            if not key.startswith("packs/"):
                super().delete(key)

    real, handle.store = handle.store, Kept(handle.store)
    with pytest.raises(StorageError, match="still there"):
        collect_garbage(handle, NOW)
    handle.store = real
    assert read_gc_state(real).phase == GcPhase.DELETING
    assert collect_garbage(handle, NOW).took_over == GcPhase.DELETING
    assert len(packs(handle)) == 2


def test_a_damaged_ref_ends_a_collection_before_anything_is_deleted(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1)})
    commit(handle, {"w": weights(2)}, branch="side")
    delete_branch(handle, "side", force=True)
    before = packs(handle)
    handle.store.put("refs/heads/odd.ref", b"not a record")
    with pytest.raises(CorruptionError, match="odd"):
        collect_garbage(handle, NOW)
    assert packs(handle) == before and read_gc_state(handle.store).phase == GcPhase.IDLE


def test_a_damaged_pack_ends_a_collection_before_anything_is_deleted(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1)})
    before = packs(handle)
    handle.store.put("packs/00/00000000000000000000000000000000.meta", b"not a pack")
    with pytest.raises(CorruptionError, match="cannot be read"):
        collect_garbage(handle, NOW)
    assert before <= packs(handle)


def test_a_needed_chunk_that_is_gone_ends_a_collection_before_anything_is_deleted(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1)})
    commit(handle, {"w": weights(2)}, branch="side")
    delete_branch(handle, "side", force=True)
    data = next(key for key in handle.index.packs() if key.endswith(".data"))
    lost = commit(handle, {"w": weights(3)})
    del lost
    newest = sorted(packs(handle) - {data})
    handle.store.delete(data)
    with pytest.raises(CorruptionError, match="in no pack"):
        collect_garbage(handle, NOW)
    assert set(newest) <= packs(handle)


def test_a_repository_that_was_opened_read_only_is_not_collected(tmp_path: Path) -> None:
    new_repository(tmp_path / "repo").close()
    handle = RepositoryHandle.open(tmp_path / "repo", read_only=True)
    with pytest.raises(PermissionDeniedError):
        collect_garbage(handle)


def test_repacking_merges_small_packs(handle: RepositoryHandle) -> None:
    made = [commit(handle, {"w": weights(seed)}) for seed in range(6)]
    report = collect_garbage(handle, REPACK)
    assert report.copied_packs == 12 and len(packs(handle)) == 2
    assert all(is_whole(handle, info, seed) for seed, info in enumerate(made))
    again = collect_garbage(handle, REPACK)
    assert again.copied_packs == 0 and again.deleted_packs == 0


def test_a_commit_may_not_follow_one_that_no_ref_keeps(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1)})
    side = commit(handle, {"w": weights(2)}, branch="side")
    delete_branch(handle, "side", force=True)
    later = clock.now_s() + 90 * 86400
    with clock.fixed(lambda: later):
        collect_garbage(handle, GcOptions(reflog_expire_s=30 * 86400))
    with pytest.raises(NotFoundError):
        commit(handle, {"w": weights(3)}, other_parents=(Digest(bytes.fromhex(side.id)),))


def test_what_a_later_version_wrote_is_not_collected_around(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1)})
    commit(handle, {"w": weights(2)}, branch="side")
    delete_branch(handle, "side", force=True)
    before = packs(handle)
    key, data = _pack_of_a_later_version()
    handle.store.put(key, data)
    with pytest.raises(UnsupportedVersionError, match="upgrade"):
        collect_garbage(handle, NOW)
    assert before <= packs(handle)


def _pack_of_a_later_version() -> tuple[str, bytes]:
    name, kind = bytes(range(16)), 99
    header = pack.encode_header(name, PackKind.META)
    size = pack.entry_header_bytes(0)
    entry = ExtentInfo(Digest(bytes(32)), kind, 0, 4, 4, 0, 0, 0, len(header), size)  # type: ignore[arg-type]
    body = header + pack.encode_entry_header(entry, b"") + b"what"
    directory = pack.encode_directory([entry])
    trailer = pack.encode_trailer(name, PackKind.META, directory, directory_offset=len(body))
    return pack_key(name, PackKind.META), body + directory + trailer


def test_a_first_commit_that_died_before_its_branch_named_it_is_garbage(handle: RepositoryHandle) -> None:
    _orphan(handle, 7)
    assert collect_garbage(handle, NOW).deleted_packs == 1


def test_shards_of_a_collection_together_do_what_one_does(tmp_path: Path) -> None:
    """One after the other, then at the same time: all waste goes, all that is needed stays, no shard gives up."""
    for at_once in (False, True):
        handle = new_repository(tmp_path / f"repo{at_once}")
        infos = [commit(handle, {"w": weights(seed), "x": weights(seed + 100)}) for seed in range(12)]
        delete_branch(handle, commit_elsewhere(handle), force=True)
        shards = [replace(NOW, shard=PackShard(part, 4), many_small=2) for part in range(1, 5)]

        def collect(options: GcOptions, url: str = handle.store.url) -> int:
            own = RepositoryHandle.open(url)
            try:
                return collect_garbage(own, options).deleted_packs
            finally:
                own.close()

        if at_once:
            with ThreadPoolExecutor(4) as pool:
                deleted = list(pool.map(collect, shards))
        else:
            deleted = list(map(collect, shards))
        assert sum(deleted) > 0
        handle.sync()
        assert all(is_whole(handle, info, seed) for seed, info in enumerate(infos))
        left = collect_garbage(handle, NOW)
        assert (left.dead_objects, left.wasted_bytes) == (0, 0)
        handle.close()


def commit_elsewhere(handle: RepositoryHandle) -> str:
    commit(handle, {"w": weights(50), "x": weights(1)}, branch="elsewhere")
    return "elsewhere"


def test_a_shard_touches_no_pack_of_another(handle: RepositoryHandle) -> None:
    for seed in range(10):
        commit(handle, {"w": weights(seed)})
    shard = PackShard(2, 3)
    others = {key for key in packs(handle) if not shard.has(key)}
    collect_garbage(handle, replace(REPACK, min_age_s=0, shard=shard))
    assert others <= packs(handle)
