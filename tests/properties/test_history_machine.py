"""A repository whose history is cut, collected, checked and interrupted at any moment is what a dict says it is.

The model knows what is promised: every commit that a ref leads to reads back bit for bit unless it
was forgotten, and so does what a log remembers until a collection lets it expire. Everything else
may be gone, and then it is a NotFoundError; after a collection that spares nothing it is gone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cas_ckpt import clock, limits
from cas_ckpt.core.config import Config
from cas_ckpt.core.create import write_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.ref_store import RefStore
from cas_ckpt.core.refs import RefKind
from cas_ckpt.errors import ConflictError, InvalidInputError, NotFoundError
from cas_ckpt.index.database import IN_MEMORY
from cas_ckpt.index.index import Index
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.fsck.packs import DataOptions
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import REPACK, GcOptions
from cas_ckpt.ops.history.log import log_commits
from cas_ckpt.ops.refs import create_branch, create_pin, create_tag, delete_ref, rename_ref, undelete_ref
from cas_ckpt.ops.retention.forget import forget_revisions
from cas_ckpt.storage.store import Store
from tests.effects import CrashNow, Effects, FaultPlan, die_after, die_before
from tests.properties.history_model import HistoryModel, Name
from tests.schedule.plain_index import PlainIndex, rebuilt
from tests.schedule.soundness import Shelf, Soundness
from tests.schedule.world import commit, read_back
from tests.searches import tries
from tests.wrapped_stores import FaultyStore

TEXTS = st.text("abcdef", min_size=1, max_size=4).map(lambda text: "".join(sorted(set(text))))
BRANCHES = st.sampled_from(["main", "exp", "z/1"])
NAMES = st.one_of(
    st.tuples(st.just(RefKind.BRANCH), BRANCHES),
    st.tuples(st.just(RefKind.TAG), st.sampled_from(["t", "exp"])),
    st.tuples(st.just(RefKind.PIN), st.sampled_from(["p", "exp"])),
)
PICKS = st.integers(0, 99)
DEATHS = st.builds(lambda kind, k: kind(k), st.sampled_from([die_before, die_after]), st.integers(1, 14))
VERBS = st.sampled_from(["point", "delete", "undelete", "rename"])
DAY_S = 86400.0
OPTIONS = st.builds(
    GcOptions,
    min_age_s=st.sampled_from([0.0, 3600.0]),
    reflog_expire_s=st.sampled_from([0.0, 2 * DAY_S, 30 * DAY_S]),
    max_unused=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    max_repack_bytes=st.sampled_from([None, None, 2000]),
    many_small=st.sampled_from([2, 4, 64]),
)
NOTHING_SPARED = GcOptions(min_age_s=0.0, reflog_expire_s=0.0, max_unused=0.0)


class HistoryMachine(HistoryModel, RuleBasedStateMachine):
    """The model: commits with text and parents, refs with logs, the forgotten ones; two processes act on one store."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.stack.enter_context(clock.fixed(lambda: self.now_s))
        self.shelf = Shelf()
        self.open: list[RepositoryHandle] = []

    @initialize()
    def init(self) -> None:
        self.config = Config(secrets.token_hex(16))
        write_config(self.shelf, self.config)
        self.reopen()
        self.commit(which=False, text="ab", branch="main")
        self.commit(which=True, text="abc", branch="main")

    def new_index(self) -> Any:
        return PlainIndex(self.config.store_id)

    def process(self, store: Store) -> RepositoryHandle:
        return RepositoryHandle(store, self.config, self.new_index())

    def teardown(self) -> None:
        if self.open:
            self.collect_everything(which=False)
        self.shut()
        self.stack.close()

    def shut(self) -> None:
        for handle in self.open:
            handle.close()

    def reads(self, handle: RepositoryHandle, one: str) -> bool:
        """Whether the commit reads back; wrong bytes are worse than none."""
        try:
            read_back(handle, Digest(bytes.fromhex(one)))
        except NotFoundError:
            return False
        return True

    # --- what the verbs do, to the repository and to the model ---------------------------------

    def commit(self, which: bool, text: str, branch: str, other: str | None = None) -> None:
        self.made(commit(self.open[which], text, branch, other_parents=_parents(other)), text, branch, other)

    @rule(which=st.booleans(), text=TEXTS, branch=BRANCHES)
    def commit_something(self, which: bool, text: str, branch: str) -> None:
        if self.is_taken((RefKind.BRANCH, branch)):
            with pytest.raises(ConflictError):
                commit(self.open[which], text, branch)
            return
        self.commit(which, text, branch)

    @rule(which=st.booleans(), text=TEXTS, pick=PICKS)
    def merge(self, which: bool, text: str, pick: int) -> None:
        other = self.picked(pick)
        if not self.is_taken((RefKind.BRANCH, "main")):
            self.succeeds(partial(self.commit, which, text, "main", other), promised=other in self.promised())

    @rule(which=st.booleans(), name=NAMES, pick=PICKS, force=st.booleans())
    def point(self, which: bool, name: Name, pick: int, force: bool) -> None:
        target = self.picked(pick)
        act = partial(_point, self.open[which], name, target, force)
        if self.is_taken(name) or (self.named(name).target is not None and not force):
            with pytest.raises(ConflictError):
                act()
            return
        if self.succeeds(act, promised=target in self.promised()):
            self.move(name, target)

    def succeeds(self, act: Callable[[], object], *, promised: bool) -> bool:
        """Do it; only what is not promised may be said to be gone."""
        try:
            act()
        except NotFoundError:
            assert not promised
            return False
        return True

    @precondition(lambda self: len(self.targets) > 1)
    @rule(which=st.booleans(), name=NAMES)
    def delete(self, which: bool, name: Name) -> None:
        if self.named(name).target is None:
            with pytest.raises(NotFoundError):
                delete_ref(self.open[which], *name)
            return
        delete_ref(self.open[which], *name)
        self.move(name, None)

    @rule(which=st.booleans(), pick=PICKS)
    def one_name_is_left(self, which: bool, pick: int) -> None:
        """Everything else is deleted, and collected."""
        names = [name for name, named in self.refs.items() if named.target is not None]
        for name in names:
            if name != names[pick % len(names)]:
                self.delete(which, name)
        self.collect_everything(which)

    @rule(which=st.booleans(), name=NAMES)
    def undelete(self, which: bool, name: Name) -> None:
        named = self.named(name)
        act = partial(undelete_ref, self.open[which], *name)
        if named.target is not None or self.is_taken(name):
            with pytest.raises((ConflictError, NotFoundError)):
                act()
            return
        last = named.log[-1][1] if named.log else None
        if self.succeeds(act, promised=last in self.promised()):
            found = RefStore(self.shelf).get(*name).target
            assert found is not None
            assert last is None or found.hex() == last
            self.move(name, found.hex())

    @rule(which=st.booleans(), old=NAMES, new=NAMES)
    def rename(self, which: bool, old: Name, new: Name) -> None:
        new = (old[0], new[1])
        target = self.named(old).target
        act = partial(rename_ref, self.open[which], *old, new[1])
        if old == (RefKind.BRANCH, "main") or old == new or target is None:
            with pytest.raises((InvalidInputError, NotFoundError)):
                act()
        elif self.named(new).target is not None or self.is_taken(new):
            with pytest.raises(ConflictError):
                act()
        else:
            act()
            self.move(new, target)
            self.move(old, None)

    @rule(which=st.booleans(), pick=PICKS)
    def forget(self, which: bool, pick: int) -> None:
        one = self.picked(pick)
        if one in self.targets:
            with pytest.raises(InvalidInputError):
                forget_revisions(self.open[which], [one])
        elif self.succeeds(partial(forget_revisions, self.open[which], [one]), promised=one in self.promised()):
            self.forgotten.add(one)

    # --- collecting and checking -----------------------------------------------------------

    @rule(which=st.booleans(), options=OPTIONS)
    def collect(self, which: bool, options: GcOptions) -> None:
        collect_garbage(self.open[which], options)
        self.expire(options.reflog_expire_s)

    @rule(which=st.booleans())
    def repack(self, which: bool) -> None:
        collect_garbage(self.open[which], REPACK)
        self.expire(REPACK.reflog_expire_s)

    @rule(which=st.booleans())
    def collect_everything(self, which: bool) -> None:
        self.now_s += 1.0  # later than everything that happened
        collect_garbage(self.open[which], NOTHING_SPARED)
        self.expire(0.0)
        assert Soundness(self.shelf).unreachable() == set()
        kept = self.reached(self.targets)
        for one in self.texts:
            assert self.reads(self.open[which], one) == (one in self.promised()) or one in kept & self.forgotten
        self.texts = {one: text for one, text in self.texts.items() if one in kept}
        self.parents = {one: parents for one, parents in self.parents.items() if one in kept}

    @rule(which=st.booleans())
    def plan_a_collection(self, which: bool) -> None:
        before = dict(self.shelf.values)
        collect_garbage(self.open[which], NOTHING_SPARED, dry_run=True)
        assert self.shelf.values == before

    @rule(days=st.sampled_from([0.5, 3.0, 40.0]))
    def time_passes(self, days: float) -> None:
        self.now_s += days * DAY_S

    # --- bad luck --------------------------------------------------------------------------

    @rule(plan=DEATHS, options=OPTIONS)
    def crash_in_a_collection(self, plan: FaultPlan, options: GcOptions) -> None:
        self.dies_in(plan, lambda handle: collect_garbage(handle, options))
        self.expire(options.reflog_expire_s)

    @rule(plan=DEATHS, text=TEXTS, branch=BRANCHES)
    def crash_in_a_commit(self, plan: FaultPlan, text: str, branch: str) -> None:
        if self.is_taken((RefKind.BRANCH, branch)):
            return
        before = self.named((RefKind.BRANCH, branch)).target
        self.dies_in(plan, lambda handle: commit(handle, text, branch))
        after = self.stored((RefKind.BRANCH, branch))
        if after != before:
            assert after is not None
            self.made(after, text, branch, None)

    @rule(plan=DEATHS, old=NAMES, new=NAMES, pick=PICKS, verb=VERBS)
    def crash_in_a_move(self, plan: FaultPlan, old: Name, new: Name, pick: int, verb: str) -> None:
        if verb == "delete" and len(self.targets) < 2:
            return
        new = (old[0], new[1])
        verbs: dict[str, Callable[[RepositoryHandle], object]] = {
            "point": lambda handle: _point(handle, old, self.picked(pick), True),
            "delete": lambda handle: delete_ref(handle, *old),
            "undelete": lambda handle: undelete_ref(handle, *old),
            "rename": lambda handle: rename_ref(handle, *old, new[1]),
        }
        self.dies_in(plan, verbs[verb])
        for name in dict.fromkeys((new, old)):
            after = self.stored(name)
            if after != self.named(name).target:
                assert after is None or after in self.texts
                self.move(name, after)

    @rule(plan=DEATHS, pick=PICKS)
    def crash_in_forgetting(self, plan: FaultPlan, pick: int) -> None:
        self.dies_in(plan, lambda handle: forget_revisions(handle, [self.picked(pick)]))
        self.forgotten |= {digest.hex() for digest in Soundness(self.shelf).ever_forgotten()} & self.texts.keys()

    def dies_in(self, plan: FaultPlan, act: Callable[[RepositoryHandle], object]) -> None:
        """One more process does it, and dies, or is refused, or comes through."""
        handle = self.process(FaultyStore(self.shelf, effects=Effects(plan)))
        try:
            act(handle)
        except (CrashNow, NotFoundError, ConflictError, InvalidInputError):
            pass
        finally:
            handle.close()

    def stored(self, name: Name) -> str | None:
        try:
            target = RefStore(self.shelf).get(*name).target
        except NotFoundError:
            return None
        return None if target is None else target.hex()

    @rule()
    def reopen(self) -> None:
        self.shut()
        self.open = [self.process(self.shelf), self.process(self.shelf)]

    @rule(which=st.booleans())
    def rebuild_index(self, which: bool) -> None:
        rebuilt(self.open[which])

    # --- looking ----------------------------------------------------------------------------

    @rule(which=st.booleans(), pick=PICKS)
    def read(self, which: bool, pick: int) -> None:
        one = self.picked(pick)
        assert self.reads(self.open[which], one) or one not in self.promised()

    @invariant()
    def what_is_promised_is_whole(self) -> None:
        soundness = Soundness(self.shelf)
        soundness.check()
        present = soundness.present()
        assert all(bytes.fromhex(one) in present for one in self.promised())

    @invariant()
    def refs_are_what_the_model_says(self) -> None:
        wanted = {name: named.target for name, named in self.refs.items() if named.target is not None}
        for handle in self.open:
            found = {(ref.kind, ref.name): ref.target.hex() for ref in handle.refs.every() if ref.target is not None}
            assert found == wanted


class HistoryOverTheRealIndexMachine(HistoryMachine):
    """The same with the real index, of which both processes share one (in memory, as threads do)."""

    def new_index(self) -> Any:
        return Index.open(IN_MEMORY, store_id=self.config.store_id)

    @rule(which=st.booleans(), data=st.booleans())
    def check(self, which: bool, data: bool) -> None:
        with limits(num_threads=1):
            report = check_open(self.open[which], DataOptions() if data else None)
        assert report.ok, report.problems

    @rule(which=st.booleans())
    def look_back(self, which: bool) -> None:
        told = {info.id: info for info in log_commits(self.open[which], all_refs=True)}
        assert told.keys() == self.reached(self.targets)
        assert all(info.parents == self.parents[one] for one, info in told.items())
        gone = {one for one, info in told.items() if info.forgotten}
        assert gone == (self.forgotten & told.keys()) - self.targets


def _parents(other: str | None) -> list[Digest]:
    return [] if other is None else [Digest(bytes.fromhex(other))]


def _point(handle: RepositoryHandle, name: Name, target: str, force: bool) -> object:
    if name[0] is RefKind.BRANCH:
        return create_branch(handle, name[1], start=target, force=force)
    if name[0] is RefKind.TAG:
        return create_tag(handle, name[1], target, force=force)
    return create_pin(handle, target, name=name[1], force=force)


pytestmark = pytest.mark.timeout(600)  # a failure is made small before it is shown, which takes its time
_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
HistoryMachine.TestCase.settings = settings(
    max_examples=tries(20, 60, 2000), stateful_step_count=30, suppress_health_check=_CHECKS
)
HistoryOverTheRealIndexMachine.TestCase.settings = settings(
    max_examples=tries(5, 12, 200), stateful_step_count=25, suppress_health_check=_CHECKS
)


class TestHistory(HistoryMachine.TestCase):  # type: ignore[misc,name-defined]
    """Any sequence of verbs, over an index in plain dicts."""


class TestHistoryOverTheRealIndex(HistoryOverTheRealIndexMachine.TestCase):  # type: ignore[misc,name-defined]
    """Any sequence of verbs."""
