"""A push (a pull, to the side that takes) dies at any effect: refs stay, and the next one goes on from there."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from cas_ckpt import Repository, limits
from cas_ckpt.core.config import Config
from cas_ckpt.core.create import write_config
from cas_ckpt.core.forgotten import RELEASED_PREFIX, read_released, write_released
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import read_graph
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.refs import RefKind
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import OutOfSpaceError, TransientStorageError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.refs import delete_branch
from cas_ckpt.ops.sync.send import RefUpdate, SendOptions, SyncReport, send
from cas_ckpt.storage.memory import MemoryStore
from tests.builders import commit, numbers, same_bytes, stored_arrays
from tests.crash.collecting import THOROUGH, World, history
from tests.effects import CrashNow, Effects, Fault, FaultPlan, die_after, die_before, lose_reply, no_space_from
from tests.processes import PIPE, Forked
from tests.wrapped_stores import FaultyStore

BRANCHES = ("main", "ft")


def items(step: int) -> dict[str, object]:
    """Two megabytes, half of which each step shares with all others."""
    return {"shared": numbers(500, 500), "own": numbers(500, 500, seed=step), "inner": {"step": step}}


def empty(store_id: str) -> MemoryStore:
    store = MemoryStore()
    write_config(store, Config(store_id, pack_bytes=1 << 20))
    return store


@cache
def template() -> tuple[MemoryStore, MemoryStore]:
    """Ours: main with four commits and ft with one more; theirs: the first of main's."""
    ours, theirs = empty("1" * 32), empty("2" * 32)
    handle = opened(ours)
    commit(handle, items(0))
    send_all(handle, opened(theirs), ["main"])
    for step in (1, 2, 3):
        commit(handle, items(step))
    commit(handle, items(4), branch="ft")
    return ours, theirs


def opened(store: object) -> RepositoryHandle:
    handle = RepositoryHandle.on_store(store, index_url=":memory:")  # type: ignore[arg-type]
    handle.sync()
    return handle


def send_all(ours: RepositoryHandle, theirs: RepositoryHandle, branches: list[str]) -> SyncReport:
    targets = {name: ours.refs.get(RefKind.BRANCH, name).target for name in branches}
    updates = [RefUpdate(RefKind.BRANCH, name, target) for name, target in targets.items()]
    with limits(num_threads=2):
        return send(ours, theirs, updates, SendOptions("push"), near=ours)


class Push:
    """One try."""

    def __init__(self) -> None:
        ours, theirs = template()
        self.ours = opened(ours)
        self.inner = World(theirs, {}).copy().inner
        self.effects = Effects()
        self.theirs = opened(FaultyStore(self.inner, effects=self.effects))

    def run(self, plan: FaultPlan | None = None) -> SyncReport:
        self.effects.plan = plan or FaultPlan()
        return send_all(self.ours, self.theirs, list(BRANCHES))

    def check(self) -> None:
        """Whatever a ref names there is whole, and is what it is here."""
        handle = opened(self.inner)
        for ref in handle.refs.list():
            assert ref.target is not None
            todo = [ref.target]
            while todo:
                row = commit_of(handle, todo.pop())
                todo += row.parents
                found, wanted = (stored_arrays(each, row.root.hex()) for each in (handle, self.ours))
                assert found.keys() == wanted.keys()
                assert all(same_bytes(found[key], wanted[key]) for key in wanted)

    def finish(self) -> SyncReport:
        """The next push; then all is there, and a collection finds nothing that is not needed."""
        handle = opened(self.inner)
        report = send_all(self.ours, handle, list(BRANCHES))
        for branch in BRANCHES:
            assert resolve(handle, branch) == resolve(self.ours, branch)
        self.check()
        collect_garbage(handle, THOROUGH)
        self.check()
        return report


def num_effects() -> int:
    push = Push()
    push.run()
    return push.effects.count


def test_a_whole_push_is_the_measure() -> None:
    push = Push()
    report = push.run()
    assert (report.num_commits, report.num_chunks) == (4, 4)
    assert not list(push.inner.list(RELEASED_PREFIX))
    assert push.finish().num_bytes == 0


@pytest.mark.parametrize("fate", [die_before, die_after])
def test_a_first_push_that_dies_leaves_what_fsck_and_collections_take_for_no_loss(
    fate: Callable[[int], FaultPlan],
) -> None:
    ours = opened(empty("1" * 32))
    commit(ours, {"w": numbers(40, 40)})
    effects = Effects()
    send_all(ours, opened(FaultyStore(empty("2" * 32), effects=effects)), ["main"])
    for k in range(1, effects.count + 1):
        inner = empty("2" * 32)
        with pytest.raises(CrashNow):
            send_all(ours, opened(FaultyStore(inner, fate(k))), ["main"])
        assert check_open(opened(inner)).problems == (), k
        collect_garbage(opened(inner), GcOptions(min_age_s=0))
        send_all(ours, opened(inner), ["main"])
        assert check_open(opened(inner)).ok


@pytest.mark.parametrize("fate", [die_before, die_after])
def test_dying_at_any_effect_leaves_refs_whole_and_the_next_push_copies_the_rest(
    fate: Callable[[int], FaultPlan],
) -> None:
    count, whole, copied = num_effects(), Push().run().num_bytes, []
    assert count > 20
    for k in range(1, count + 1, 2 if fate is die_before else 5):
        push = Push()
        with pytest.raises(CrashNow):
            push.run(fate(k))
        push.check()
        copied.append(push.finish().num_bytes)
    assert copied == sorted(copied, reverse=True)  # the later it died, the less is left to copy
    assert copied[0] == whole
    assert copied[-1] == 0


def test_what_a_push_that_died_left_is_collected_whole() -> None:
    for k in range(1, num_effects() + 1, 2):
        push = Push()
        with pytest.raises(CrashNow):
            push.run(die_before(k))
        handle = opened(push.inner)
        collect_garbage(handle, THOROUGH)
        push.check()
        left = collect_garbage(handle, THOROUGH, dry_run=True)
        assert (left.dead_objects, left.wasted_bytes) == (0, 0)
        assert {digest.hex() for digest in read_graph(handle).commits} == history(handle)


def test_a_full_disk_and_lost_replies_end_in_an_error_or_in_the_push() -> None:
    for k in range(1, num_effects(), 3):  # the last one is a deletion, which needs no space
        push = Push()
        with pytest.raises(OutOfSpaceError):
            push.run(no_space_from(k))
        push.check()
    for k in range(1, 9):
        push = Push()
        with suppress(TransientStorageError):
            push.run(lose_reply(k))
        push.check()
        push.finish()


def push_or_pull(deed: str, url: str) -> None:
    """In a process of its own."""
    with Repository.open(url) as repo:
        print("ready", flush=True)
        getattr(repo, deed)()


@pytest.mark.slow
@pytest.mark.parametrize("deed", ["push", "pull"])
def test_a_process_that_is_killed_is_gone_on_with(tmp_path: Path, deed: str) -> None:
    with Repository.init(tmp_path / "here") as here, Repository.init(tmp_path / "there") as there:
        giver, taker = (here, there) if deed == "push" else (there, here)
        for step in range(12):
            commit(giver._handle, {"own": numbers(700, 700, seed=step)})
        here.add_remote("origin", there.url)
        killed = 0
        for delay_s in (0.0, 0.005, 0.01, 0.02, 0.04):
            with Forked(push_or_pull, deed, here.url, stdout=PIPE) as child:
                child.stdout.readline()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(delay_s)
                child.kill()
                killed += child.wait() != 0
            for info in taker.log() if taker.branches() else []:
                stored_arrays(taker._handle, info.root)
        assert killed
        getattr(here, deed)()
        assert taker.resolve("main") == giver.resolve("main")
        assert taker.fsck(read_data=True).ok


def test_what_a_killed_push_left_recorded_as_released_is_taken_out_once_refs_lead_to_it() -> None:
    """A branch that is lost later on is missed like any other: its commits are orphans, and stay."""
    push = Push()
    with pytest.raises(CrashNow):
        push.run(FaultPlan(1, Fault.DIE_BEFORE, counted=frozenset({"delete"})))
    handle = opened(push.inner)
    heads = {ref.target for ref in handle.refs.list() if ref.target is not None}
    other = Digest(bytes(range(32)))  # of a push that is under way: no ref leads to it yet
    commit(handle, items(9), branch="side")
    waiting = handle.refs.get(RefKind.BRANCH, "side").target
    assert waiting is not None
    write_released(push.inner, [waiting, other])
    delete_branch(handle, "side", force=True)
    assert heads & read_released(push.inner)
    collect_garbage(handle, GcOptions())
    assert read_released(push.inner) == {waiting}
    assert len(list(push.inner.list(RELEASED_PREFIX))) == 1
