"""gc, repack, forget, rename and rebuild die at any effect: nothing that is kept is lost, and the next gc goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import PLACEHOLDER_GENERATION, RefKind
from cas_ckpt.index.index import Index
from cas_ckpt.ops.fsck.repair import rebuild_index, refill_index
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.refs import rename_ref
from cas_ckpt.ops.retention.forget import forget_revisions
from tests.builders import commit
from tests.crash.collecting import EAGER, THOROUGH, World, check_commit, history, items, world
from tests.effects import CrashNow, Effects, FaultPlan, die_after, die_before

Verb = Callable[[RepositoryHandle], object]


def forget_more(handle: RepositoryHandle) -> None:
    forget_revisions(handle, ["main~3", "main~1"])


VERBS: dict[str, Verb] = {
    "gc": lambda handle: collect_garbage(handle, EAGER),
    "repack": lambda handle: collect_garbage(handle, THOROUGH),
    "forget": forget_more,
    "rename": lambda handle: rename_ref(handle, RefKind.BRANCH, "side", "renamed"),
}
SURE_EFFECTS = {"gc": 10, "repack": 14, "forget": 1, "rename": 3}
EVERY = {"gc": 1, "repack": 3, "forget": 1, "rename": 1}
"""To die after an effect is to die before the next one, but for what is done in between."""


def run(state: World, verb: str, plan: FaultPlan | None) -> bool:
    """Do `verb`; whether it died."""
    effects = Effects()
    handle = state.open(effects)
    effects.plan = plan or FaultPlan()
    try:
        VERBS[verb](handle)
    except CrashNow:
        return True
    return False


def num_effects(verb: str) -> int:
    effects = Effects()
    VERBS[verb](world().open(effects))
    return effects.count


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("fate", [die_before, die_after])
def test_dying_at_any_effect_loses_nothing_that_is_kept(verb: str, fate: Callable[[int], FaultPlan]) -> None:
    count = num_effects(verb)
    assert count >= SURE_EFFECTS[verb]
    for k in range(1, count + 1, EVERY[verb] if fate is die_before else 7):
        state = world()
        assert run(state, verb, fate(k)) or k > SURE_EFFECTS[verb]
        if verb == "forget":  # forgotten now, or not: both are right
            state.kept = {id_: seed for id_, seed in state.kept.items() if seed not in (0, 4)}
        state.finish()


def test_the_world_has_garbage_and_a_collection_leaves_none() -> None:
    state = world()
    before = state.packs()
    first = state.finish()
    assert first.deleted_packs > 5
    assert first.copied_packs > 1
    assert not before & state.packs()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_rename_that_dies_leaves_one_of_the_names_or_both(k: int) -> None:
    state = world()
    assert run(state, "rename", die_before(k))
    handle = state.open()
    named = {ref.name: ref.target for ref in handle.refs.list(RefKind.BRANCH) if ref.name in ("side", "renamed")}
    assert named and len(set(named.values())) == 1


def test_writers_go_on_while_a_dead_collection_left_packs_condemned() -> None:
    state, died = world(), 0
    for k in range(1, num_effects("gc") + 1, 3):
        state = world()
        died += run(state, "gc", die_after(k))
        handle = state.open()
        for seed in (2, 3, 20):  # what the condemned packs hold, and something new
            state.kept[commit(handle, items(seed), branch="later").id] = seed
        state.finish()
    assert died


def test_a_writer_that_was_there_before_goes_on_while_a_dead_collection_left_packs_condemned() -> None:
    for k in range(1, num_effects("gc") + 1, 4):
        state = world()
        handle = state.open()
        state.kept[commit(handle, items(2), branch="later").id] = 2
        assert run(state, "gc", die_after(k)) or k > SURE_EFFECTS["gc"]
        state.kept[commit(handle, items(3), branch="later").id] = 3
        state.finish()


def test_a_collection_that_nobody_takes_over_for_many_commits_costs_no_commit() -> None:
    state = world()
    assert run(state, "gc", FaultPlan(1, die_after(1).fault, counted=frozenset({"compare_and_swap"})))
    for seed in range(30, 36):
        state.kept[commit(state.open(), items(seed), branch="later").id] = seed
    first = state.finish()
    assert first.took_over == "condemned"


# --- with an index on disk ---------------------------------------------------------------------


class _Dying:
    """Counts the transactions of indexes, and dies in one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.at = 0, 0
        for name in ("add_packs", "drop_packs", "write"):
            monkeypatch.setattr(Index, name, self._wrapped(getattr(Index, name)))

    def _wrapped(self, method: Callable[..., object]) -> Callable[..., object]:
        def wrapped(index: Index, *args: object, **named: object) -> object:
            self.count += 1
            if self.count == self.at:
                raise CrashNow("died before this transaction")
            return method(index, *args, **named)

        return wrapped


INDEX_VERBS: dict[str, Callable[[Path, RepositoryHandle], object]] = {
    "gc": lambda path, handle: collect_garbage(handle, EAGER),
    "repack": lambda path, handle: collect_garbage(handle, THOROUGH),
    "rebuild": lambda path, handle: rebuild_index(path),
    "refill": lambda path, handle: refill_index(handle),
}


@pytest.mark.parametrize("verb", INDEX_VERBS)
def test_dying_at_any_transaction_of_the_index_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    deaths = 0
    for at in range(1, 4):
        path = tmp_path / f"repo-{at}"
        handle = init_repository(path)
        kept = {}
        for seed, branch in enumerate(["main", "gone", "main"]):
            id_ = commit(handle, items(seed), branch=branch).id
            kept.update({id_: seed} if branch == "main" else {})
        handle.refs.swap(handle.refs.get(RefKind.BRANCH, "gone"), None, generation=PLACEHOLDER_GENERATION)
        with monkeypatch.context() as patched:
            dying = _Dying(patched)
            dying.at = at
            try:
                INDEX_VERBS[verb](path, handle)
            except CrashNow:
                deaths += 1
        handle.close()
        again = RepositoryHandle.open(path)
        for _ in range(2):
            assert history(again) == kept.keys()
            for id_, seed in kept.items():
                check_commit(again, id_, seed)
            report = collect_garbage(again, THOROUGH)
        assert report.dead_objects == 0
        kept[commit(again, items(1)).id] = 1
        assert history(again) == kept.keys()
        again.close()
    assert deaths
