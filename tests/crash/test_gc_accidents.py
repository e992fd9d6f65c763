"""Full disks, denied deletes, lost replies, short listings, sessions: a collection ends typed, and loses nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

import pytest

from cas_ckpt import clock
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import DEAD_S, QUIET_S, GcPhase, Session, read_gc_state
from cas_ckpt.errors import (
    CkptError,
    CorruptionError,
    OutOfSpaceError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.storage.memory import MemoryStore
from tests.builders import commit
from tests.crash.collecting import EAGER, THOROUGH, World, items, world
from tests.effects import CrashNow, Effects, Fault, FaultPlan, lose_reply, no_space_from


def planned(state: World, plan: FaultPlan) -> tuple[RepositoryHandle, Effects]:
    effects = Effects()
    handle = state.open(effects)
    effects.plan = plan
    return handle, effects


# --- space, permissions, replies ---------------------------------------------------------------


@pytest.mark.parametrize("k", range(1, 16, 4))
def test_a_disk_that_is_full_from_any_write_of_a_repack_on_loses_nothing(k: int) -> None:
    state = world()
    handle, effects = planned(state, no_space_from(k))
    try:
        assert collect_garbage(handle, THOROUGH).full or effects.count < k
    except OutOfSpaceError:
        assert effects.count >= k
    state.finish()


def test_a_collection_that_has_no_space_for_copies_still_deletes_what_is_dead() -> None:
    state = world()
    before = state.packs()
    no_data = FaultPlan(1, Fault.FAIL, frozenset({"write", "commit"}), lasting=True, error=no_space_from(1).error)
    handle, _ = planned(state, no_data)
    report = collect_garbage(handle, THOROUGH)
    assert report.full
    assert report.deleted_packs and report.copied_packs == 0
    assert before - state.packs()
    state.finish()


@pytest.mark.parametrize("options", [EAGER, THOROUGH], ids=["eager", "thorough"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_delete_that_is_denied_leaves_the_collection_to_the_next_one(k: int, options: GcOptions) -> None:
    state = world()
    refused = FaultPlan(k, Fault.FAIL, frozenset({"delete"}), lasting=True, error=PermissionDeniedError)
    handle, _ = planned(state, refused)
    report = collect_garbage(handle, options)
    assert report.denied and report.denied_packs and report.denied_bytes
    assert report.merged_packs + report.rewritten_packs <= report.deleted_packs
    assert report.merged_bytes + report.rewritten_bytes <= report.deleted_bytes
    assert len(state.packs() & set(read_gc_state(state.inner).condemned)) == report.denied_packs
    assert read_gc_state(state.inner).phase == GcPhase.DELETING
    state.kept[commit(state.open(), items(3)).id] = 3  # writers need not wait for permissions
    assert state.finish().took_over == GcPhase.DELETING


def test_a_store_that_deletes_nothing_and_says_it_did_is_found_out() -> None:
    class Locked(MemoryStore):
        def delete(self, key: str) -> None:
            """Leaves a marker, as a bucket with object lock does; the value is still there."""

    state = world()
    locked = Locked()
    locked.__dict__.update(state.inner.__dict__)
    with pytest.raises(StorageError, match="still there"):
        collect_garbage(World(locked, state.kept).open(), EAGER)
    assert read_gc_state(state.inner).phase == GcPhase.DELETING
    state.finish()


NUM_SWAPS = 6
"""Conditional writes of a collection of `world()`."""


@pytest.mark.parametrize("k", range(1, NUM_SWAPS + 1))
def test_a_lost_reply_of_any_conditional_write_is_success_or_a_typed_error(k: int) -> None:
    state = world()
    handle, effects = planned(state, lose_reply(k))
    try:
        collect_garbage(handle, THOROUGH)
    except CkptError:
        pass
    assert effects.count == NUM_SWAPS  # one reply of them was lost
    state.kept[commit(state.open(), items(2)).id] = 2
    state.finish()


def test_a_lost_reply_of_the_swaps_of_gc_state_is_noticed_as_success() -> None:
    state = world()
    handle, effects = planned(state, FaultPlan())
    collect_garbage(handle, EAGER)
    swaps = [effect.where for effect in effects.log if effect.name == "compare_and_swap"]
    of_state = [k for k, where in enumerate(swaps, 1) if where == "gc/state"]
    assert len(of_state) == 3, swaps  # condemned, deleting, idle
    for k in of_state:
        state = world()
        handle, _ = planned(state, lose_reply(k))
        assert collect_garbage(handle, EAGER).deleted_packs
        assert read_gc_state(state.inner).phase == GcPhase.IDLE


# --- while marking -----------------------------------------------------------------------------


class Unreliable(MemoryStore):
    """Fails, or says less than there is, where it is told to."""

    def __init__(self, state: World) -> None:
        super().__init__()
        self.__dict__.update(state.inner.__dict__)
        self.failing = ""
        self.after = 0
        self.silent = False
        self.deleted: list[str] = []

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        for number, found in enumerate(super().list(prefix)):
            if self.failing and found[0].startswith(self.failing) and number >= self.after:
                if self.silent:
                    return
                raise TransientStorageError(f"{prefix}: the listing broke off")
            yield found

    def get(self, key: str) -> bytes:
        if self.failing.startswith("get ") and key.startswith(self.failing[4:]):
            raise TransientStorageError(f"{key}: throttled")
        return super().get(key)

    def delete(self, key: str) -> None:
        self.deleted.append(key)
        super().delete(key)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("failing", ["refs/heads/", "packs/", "forgotten/", "sessions/", "get refs/", "get forgotten/"])
def test_any_error_while_marking_means_that_nothing_is_deleted(failing: str, after: int) -> None:
    state = world()
    if failing == "sessions/":
        for _ in range(2):
            announce(state, heard_s=clock.now_s())
    store = Unreliable(state)
    handle = World(store, state.kept).open()
    store.failing, store.after = failing, after if failing in ("refs/heads/", "packs/", "sessions/") else 0
    with pytest.raises(TransientStorageError):
        collect_garbage(handle, EAGER)
    assert not [key for key in store.deleted if key.startswith("packs/")]
    assert read_gc_state(state.inner).phase == GcPhase.IDLE
    state.finish()


@pytest.mark.parametrize("after", range(0, 12, 5))
def test_a_listing_of_packs_that_is_cut_short_without_a_word_is_refused_or_harmless(after: int) -> None:
    state = world()
    store = Unreliable(state)
    handle = World(store, state.kept).open()
    store.failing, store.after, store.silent = "packs/", after, True
    try:
        collect_garbage(handle, EAGER)
    except CorruptionError:
        assert not store.deleted
    state.finish()


def test_a_ref_that_is_damaged_means_that_nothing_is_deleted() -> None:
    state = world()
    before = state.packs()
    record = state.inner.get("refs/heads/side.ref")
    state.inner.put("refs/heads/side.ref", record[:-5] + b"12345")
    with pytest.raises(CorruptionError):
        collect_garbage(state.open(), EAGER)
    assert state.packs() == before
    state.inner.put("refs/heads/side.ref", record)
    state.finish()


# --- sessions and young packs ------------------------------------------------------------------


def announce(state: World, *, heard_s: float) -> None:
    """Leave the session of a writer that was heard of last at `heard_s`."""
    times = chain([heard_s - QUIET_S], repeat(heard_s))
    with clock.fixed(lambda: next(times)):
        Session(state.inner).beat()


def half_a_commit(state: World) -> set[str]:
    """The packs of a commit that died before its branch moved."""
    before = state.packs()
    handle, _ = planned(state, FaultPlan(1, Fault.DIE_BEFORE, frozenset({"compare_and_swap"})))
    with pytest.raises(CrashNow):
        commit(handle, items(40))
    return state.packs() - before


AGED = GcOptions(min_age_s=60, reflog_expire_s=0)


def collected_after(state: World, seconds: float, options: GcOptions = AGED) -> None:
    """A process that opened the repository now collects so many seconds later."""
    handle, now_s = state.open(), clock.now_s()
    with clock.fixed(lambda: now_s + seconds):
        collect_garbage(handle, options)


def test_packs_of_a_live_session_are_spared_however_old_they_are() -> None:
    state = world()
    made = half_a_commit(state)
    announce(state, heard_s=clock.now_s())
    collected_after(state, 3600)
    assert made <= state.packs()


def test_packs_of_a_dead_session_are_collected_once_they_are_old() -> None:
    state = world()
    made = half_a_commit(state)
    announce(state, heard_s=clock.now_s() - DEAD_S - 100)
    collected_after(state, 10)
    assert made <= state.packs()
    collected_after(state, 3600)
    assert not made & state.packs()
    state.finish()


def test_the_announcement_of_a_session_that_ended_long_ago_is_dropped() -> None:
    state = world()
    announce(state, heard_s=clock.now_s() - 5 * DEAD_S)
    collected_after(state, 0)
    assert not list(state.inner.list("sessions/"))


def test_a_commit_goes_on_where_its_packs_were_collected_under_it() -> None:
    state = world()
    made = half_a_commit(state)
    handle = state.open()  # knows those packs
    collect_garbage(state.open(), EAGER)
    assert not made & state.packs()
    state.kept[commit(handle, items(40)).id] = 40
    state.finish()
