"""The power fails at any moment: what commits, forget and gc told is still true, whatever was not synced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.refs import RefKind
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import REPACK, GcOptions
from cas_ckpt.ops.refs import delete_branch, rename_ref
from cas_ckpt.ops.retention.forget import forget_revisions
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.memory import MemoryStore
from tests.builders import commit, numbers, same_bytes, stored_arrays
from tests.effects import WatchedDisk, by_chance, keep_all, lose_all, watching

EAGER = GcOptions(min_age_s=0, reflog_expire_s=0)
SHARED = numbers(3000, seed=99)


def items(seed: int) -> dict[str, Any]:
    return {"own": numbers(3000, seed=seed), "shared": SHARED, "half": np.concatenate([SHARED[:1500], numbers(9)])}


@dataclass(frozen=True)
class Told:
    """What was true when `num_operations` were done: who is asked then may rely on it."""

    num_operations: int
    heads: dict[str, str]
    kept: dict[str, int]
    """Commit -> seed of its state."""


class History:
    """A small life of a repository, step by step, and what was true after each step."""

    def __init__(self, disk: WatchedDisk, folder: Path) -> None:
        self.disk = disk
        self.handle = init_repository(folder, pack_bytes=1 << 20)
        self.heads: dict[str, str] = {}
        self.kept: dict[str, int] = {}
        self.told = [Told(disk.num_operations, {}, {})]

    def live(self) -> None:
        self.commit("main", 1)
        self.commit("main", 2)
        self.commit("side", 3)
        self.commit("main", 4)
        self.step(lambda: self.delete("side"))
        self.step(lambda: self.forget("main~2", seed=1))
        self.step(lambda: self.collect(EAGER))
        self.commit("other", 5)
        self.step(lambda: self.rename("other", "renamed"))
        self.step(lambda: self.collect(replace(REPACK, min_age_s=0)))
        self.commit("main", 6)

    def step(self, work: Callable[[], object]) -> None:
        work()
        self.told.append(Told(self.disk.num_operations, dict(self.heads), dict(self.kept)))

    def commit(self, branch: str, seed: int) -> None:
        def work() -> None:
            info = commit(self.handle, items(seed), branch=branch)
            self.heads[branch] = info.id
            self.kept[info.id] = seed

        self.step(work)

    def collect(self, options: GcOptions) -> None:
        assert collect_garbage(self.handle, options).deleted_packs > 1

    def delete(self, branch: str) -> None:
        delete_branch(self.handle, branch, force=True)
        del self.kept[self.heads.pop(branch)]

    def forget(self, revision: str, *, seed: int) -> None:
        forget_revisions(self.handle, [revision])
        self.kept = {id_: other for id_, other in self.kept.items() if other != seed}

    def rename(self, old: str, new: str) -> None:
        rename_ref(self.handle, RefKind.BRANCH, old, new)
        self.heads[new] = self.heads.pop(old)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    folder = tmp_path_factory.mktemp("power") / "repo"
    with watching(folder) as disk:
        history = History(disk, folder)
        history.live()
    yield history
    history.handle.close()


def values_of(files: dict[str, bytes]) -> dict[str, bytes]:
    return {path: data for path, data in files.items() if not path.startswith(("tmp/", "index/"))}


def opened(files: dict[str, bytes]) -> RepositoryHandle:
    """The repository that these files are, its index lost."""
    store = MemoryStore()
    for path, data in values_of(files).items():
        store.put(path, data)
    return RepositoryHandle.on_store(store, index_url=":memory:")


def check(history: History, at: int, handle: RepositoryHandle) -> None:
    """All that was told before `at` is true, whether what was under way then came about or not."""
    before = [told for told in history.told if told.num_operations <= at][-1]
    after = next((told for told in history.told if told.num_operations > at), before)
    heads = {ref.name: ref.target.hex() for ref in handle.refs.list(RefKind.BRANCH) if ref.target}
    for name in before.heads.keys() & after.heads.keys():
        assert heads[name] in (before.heads[name], after.heads[name])
    assert set(heads) <= before.heads.keys() | after.heads.keys()
    assert set(heads.values()) >= set(before.heads.values()) & set(after.heads.values())
    sure = before.kept.keys() & after.kept.keys()
    seen = set()
    todo = list(heads.values())
    while todo:
        id_ = todo.pop()
        row = commit_of(handle, bytes.fromhex(id_))  # type: ignore[arg-type]
        seen.add(id_)
        todo.extend(parent.hex() for parent in row.parents if parent.hex() not in seen)
        if id_ in sure:
            found = stored_arrays(handle, row.root.hex())
            wanted = items(before.kept[id_])
            assert all(same_bytes(found[key], wanted[key]) for key in wanted)
    assert sure <= seen


def survive(history: History, at: int, files: dict[str, bytes]) -> None:
    handle = opened(files)
    handle.sync()
    check(history, at, handle)
    if at % 3:
        return
    collect_garbage(handle, EAGER)
    check(history, at, handle)
    assert same_bytes(stored_arrays(handle, commit(handle, items(50)).root)["own"], items(50)["own"])


def test_the_files_of_the_disk_are_those_that_survive_if_all_is_kept(history: History) -> None:
    assert isinstance(history.handle.store, FileStore)
    store = history.handle.store
    found = values_of(history.disk.survivors(history.disk.num_operations, keep_all))
    stored = {key: store.get(key) for key, _ in store.list("")}
    assert found == values_of(stored)


def test_nothing_depends_on_what_was_not_synced(history: History) -> None:
    last: object = None
    for at in range(history.told[0].num_operations, history.disk.num_operations + 1):
        files = values_of(history.disk.survivors(at, lose_all))
        case = files, [told.num_operations <= at for told in history.told]
        if case != last:  # most operations leave nothing new that is sure to survive
            survive(history, at, files)
        last = case


@pytest.mark.parametrize("seed", range(3))
def test_nothing_depends_on_the_order_in_which_changes_reach_the_medium(history: History, seed: int) -> None:
    for at in range(history.told[0].num_operations + seed, history.disk.num_operations + 1, 13):
        survive(history, at, history.disk.survivors(at, by_chance(1000 * seed + at)))
