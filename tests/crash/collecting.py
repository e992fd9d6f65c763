"""A small repository in memory with garbage in it, to be copied, broken and looked at."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cas_ckpt.core.config import Config
from cas_ckpt.core.create import new_store_id, write_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import GcPhase, read_gc_state
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.refs import RefKind
from cas_ckpt.ops.gc.gc import GcReport, collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.refs import delete_branch
from cas_ckpt.ops.retention.forget import forget_revisions
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Store
from tests.builders import commit, numbers, same_bytes, stored_arrays
from tests.effects import Effects
from tests.wrapped_stores import FaultyStore

EAGER = GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=1.0)
"""Everything that is dead, at once; nothing is copied."""

THOROUGH = GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0.0, many_small=2, whole_chunks=True)
"""No waste stays."""


def items(seed: int) -> dict[str, Any]:
    """The state of commit number `seed`: its own tensor, one that all share, one that half of them share."""
    half = numbers(1200, seed=1000 + seed // 2)
    return {"own": numbers(1200, seed=seed), "shared": numbers(1200), "half": half, "inner": {"step": seed}}


class World:
    """A store, and which commits must be whole in it (id -> number of its state)."""

    def __init__(self, inner: Store, kept: dict[str, int]) -> None:
        self.inner = inner
        self.kept = kept

    def open(self, effects: Effects | None = None) -> RepositoryHandle:
        """The repository as a new process opens it, its index lost; with `effects` it may die."""
        store = self.inner if effects is None else FaultyStore(self.inner, effects=effects)
        handle = RepositoryHandle.on_store(store, index_url=":memory:")
        handle.sync()
        return handle

    def copy(self) -> World:
        """Another store with the same values."""
        inner = MemoryStore()
        for key, _ in self.inner.list(""):
            inner.put(key, self.inner.get(key))
        return World(inner, dict(self.kept))

    def packs(self) -> set[str]:
        return {key for key, _ in self.inner.list("packs/")}

    def check(self, handle: RepositoryHandle | None = None) -> None:
        """Every commit that must be whole can be read, and some ref leads to it."""
        handle = handle or self.open()
        reached = history(handle)
        for id_, seed in self.kept.items():
            assert id_ in reached
            check_commit(handle, id_, seed)

    def finish(self) -> GcReport:
        """What the next process finds, and collects: whatever must be whole is, and then no garbage is left."""
        handle = self.open()
        self.check(handle)
        done = collect_garbage(handle, THOROUGH)
        self.check(handle)
        assert read_gc_state(self.inner).phase == GcPhase.IDLE
        left = collect_garbage(handle, THOROUGH, dry_run=True)
        assert (left.dead_objects, left.wasted_bytes) == (0, 0)
        return done


def check_commit(handle: RepositoryHandle, id_: str, seed: int) -> None:
    found = stored_arrays(handle, commit_of(handle, bytes.fromhex(id_)).root.hex())  # type: ignore[arg-type]
    wanted = {key: value for key, value in items(seed).items() if isinstance(value, np.ndarray)}
    assert all(same_bytes(found[key], value) for key, value in wanted.items())


def history(handle: RepositoryHandle) -> set[str]:
    """Every commit that a ref leads to."""
    todo = [ref.target for kind in RefKind for ref in handle.refs.list(kind) if ref.target]
    seen: set[str] = set()
    while todo:
        target = todo.pop()
        if target.hex() not in seen:
            seen.add(target.hex())
            todo.extend(commit_of(handle, target).parents)  # type: ignore[arg-type]
    return seen


@cache
def _template() -> World:
    store = MemoryStore()
    write_config(store, Config(new_store_id(), pack_bytes=1 << 20))
    world = World(store, {})
    handle = world.open()
    for seed, branch in enumerate(["main", "main", "gone", "gone", "main", "side", "main"]):
        info = commit(handle, items(seed), branch=branch)
        if branch != "gone" and seed != 1:
            world.kept[info.id] = seed
    delete_branch(handle, "gone", force=True)
    forget_revisions(handle, ["main~2"])
    return world


def world() -> World:
    """Branches main (four commits, the second forgotten) and side (one), and a deleted branch of two."""
    return _template().copy()
