"""A commit that dies at any effect leaves the branch as it was, and the next one works."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import RefKind
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import CkptError, NotFoundError, OutOfSpaceError
from cas_ckpt.index import history
from cas_ckpt.index.index import Index
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Store
from tests.builders import commit, numbers, same_bytes, stored_arrays
from tests.effects import CrashNow, Effects, Fault, FaultPlan, die_after, die_before, lose_reply, no_space_from
from tests.wrapped_stores import FaultyStore

BEFORE = {"w": numbers(150_000, seed=1), "v": numbers(150_000, seed=2), "step": 1, "text": "a" * 3000}
AFTER = {"w": numbers(150_000, seed=3), "v": numbers(150_000, seed=4), "step": 2, "text": "b" * 3000}


class Rig:
    """A store with one commit in it, on which a second one is tried with a fault."""

    def __init__(self, folder: Path | None, *, branch: str = "main", pack_bytes: int = 1 << 20) -> None:
        self.branch = branch
        self.folder = folder
        self.inner: Store = MemoryStore() if folder is None else FileStore(folder)
        self.index_url = ":memory:" if folder is None else str(folder / "index" / "index.sqlite")
        if folder is None:
            self._init_in_memory(pack_bytes)
        else:
            init_repository(folder, pack_bytes=pack_bytes).close()
        handle = self.open()
        self.first = commit(handle, BEFORE)
        handle.close()

    def _init_in_memory(self, pack_bytes: int) -> None:
        from cas_ckpt.core.config import Config
        from cas_ckpt.core.create import new_store_id, write_config

        write_config(self.inner, Config(new_store_id(), pack_bytes=pack_bytes))

    def open(self, plan: FaultPlan | None = None) -> RepositoryHandle:
        self.effects = Effects(plan)
        return RepositoryHandle.on_store(FaultyStore(self.inner, effects=self.effects), index_url=self.index_url)

    def second(self, plan: FaultPlan | None = None) -> RepositoryHandle:
        handle = self.open(plan)
        commit(handle, AFTER, branch=self.branch)
        return handle

    def check(self) -> None:
        """Both the branch and what the next commit stores are whole."""
        handle = self.open()
        head = handle.refs.get(RefKind.BRANCH, "main").target
        assert head is not None
        row = handle.index.read(history.read_commit, head)
        if row is None:
            handle.sync()
            row = handle.index.read(history.read_commit, head)
        assert row is not None
        if self.branch == "main" and head.hex() != self.first.id:
            assert row.parents == (bytes.fromhex(self.first.id),)
            assert same_bytes(stored_arrays(handle, row.root.hex())["w"], AFTER["w"])
        else:
            assert head.hex() == self.first.id
            assert same_bytes(stored_arrays(handle, row.root.hex())["w"], BEFORE["w"])
        again = commit(handle, AFTER, branch=self.branch)
        fresh = self.open()
        assert resolve(fresh, self.branch).hex() == again.id
        assert same_bytes(stored_arrays(fresh, again.root)["w"], AFTER["w"])


def num_effects(branch: str) -> int:
    rig = Rig(None, branch=branch)
    rig.second()
    return rig.effects.count


SURE_EFFECTS, MOST_EFFECTS = 12, 26
"""How two writer threads share the packs varies: a commit has at least and at most so many effects."""

CASES = [(branch, k) for branch in ("main", "new-branch") for k in range(1, MOST_EFFECTS + 1)]
CONDITIONALS = [("main", 1), ("new-branch", 1), ("new-branch", 2)]


@pytest.mark.parametrize("branch", ["main", "new-branch"])
def test_the_cases_here_cover_every_effect_of_a_commit(branch: str) -> None:
    assert SURE_EFFECTS <= num_effects(branch) <= MOST_EFFECTS


@pytest.mark.parametrize(("branch", "k"), CASES)
@pytest.mark.parametrize("plan", [die_before, die_after])
def test_dying_at_any_effect_of_a_commit_loses_nothing(branch: str, k: int, plan: object) -> None:
    rig = Rig(None, branch=branch)
    with pytest.raises(CrashNow) if k <= SURE_EFFECTS else suppress(CrashNow):
        rig.second(plan(k))  # type: ignore[operator]
    rig.check()


@pytest.mark.parametrize(("branch", "k"), CASES)
def test_a_full_disk_at_any_effect_is_one_typed_error_and_loses_nothing(branch: str, k: int) -> None:
    rig = Rig(None, branch=branch)
    try:
        rig.second(no_space_from(k))
        assert rig.effects.count < k
    except OutOfSpaceError:
        assert rig.effects.count >= k
    rig.check()


@pytest.mark.parametrize(("branch", "k"), CONDITIONALS)
def test_a_lost_reply_of_any_conditional_write_is_an_error_or_a_whole_commit(branch: str, k: int) -> None:
    rig = Rig(None, branch=branch)
    with suppress(CkptError):
        rig.second(lose_reply(k))
    assert rig.effects.count >= k  # a reply was lost
    rig.check()


@pytest.mark.parametrize("k", range(1, MOST_EFFECTS + 1, 3))
def test_dying_on_a_real_disk_with_a_real_index_loses_nothing(tmp_path: Path, k: int) -> None:
    rig = Rig(tmp_path / "repo")
    with pytest.raises(CrashNow) if k <= SURE_EFFECTS else suppress(CrashNow):
        rig.second(die_before(k))
    rig.check()


def test_a_lost_reply_of_the_swap_itself_is_noticed_as_success() -> None:
    rig = Rig(None)
    handle = rig.second(lose_reply(1))
    assert [effect.name for effect in rig.effects.log] == ["compare_and_swap"]
    assert handle.refs.get(RefKind.BRANCH, "main").target != bytes.fromhex(rig.first.id)


def test_dying_between_the_commit_and_the_index_rows_only_costs_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path / "repo")

    def die(self: Index, records: object, **named: object) -> int:
        raise CrashNow

    with monkeypatch.context() as patched:
        patched.setattr(Index, "add_packs", die)
        with pytest.raises(CrashNow):
            rig.second()
    rig.check()


def test_a_branch_whose_creation_died_can_be_created_again() -> None:
    rig = Rig(None, branch="new-branch")
    with pytest.raises(CrashNow):
        rig.second(FaultPlan(1, Fault.DIE_AFTER, counted=frozenset({"put_if_absent"})))
    with pytest.raises(NotFoundError):
        resolve(rig.open(), "new-branch")
    rig.check()
