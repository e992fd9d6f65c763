"""A repository under any sequence of verbs, crashes and index losses is what a dict says it is."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cas_ckpt import CommitInfo, CommitOptions, Repository
from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import Head
from cas_ckpt.errors import ConflictError, InvalidInputError, MismatchError, NotFoundError
from cas_ckpt.storage.url import open_store
from tests.effects import CrashNow, Effects, FaultPlan, die_after, die_before
from tests.properties.states import account, blank, copied, leaves, mapped, states, ties, torch_tensor
from tests.searches import tries
from tests.wrapped_stores import FaultyStore

BRANCHES = st.sampled_from(["main", "exp", "a/b"])
TAGS = st.sampled_from(["t", "exp", "v/1"])
SMALL = st.builds(lambda seed, size: {"w": torch_tensor(torch.float32, (size,), seed), "seed": seed},
                  st.integers(0, 5), st.sampled_from([3, 700]))  # fmt: skip
STATES = SMALL | states()
DEATHS = st.builds(lambda kind, k: kind(k), st.sampled_from([die_before, die_after]), st.integers(1, 9))
_numbers = itertools.count()


@dataclass(frozen=True)
class Made:
    """A commit as the model knows it: `state` is a copy that nobody touches, `account` what it is."""

    id: str
    root: str
    state: dict[str, Any]
    account: Any
    parent: str | None


def commit_to(repo: Repository, state: dict[str, Any], **request: Any) -> CommitInfo:
    """Commit as a `repo` that was just opened: many live states in turn are not what HEAD is for."""
    repo._handle.head = Head(repo.default_branch)
    return repo.commit(state, options=CommitOptions(orphan=True, create=True), **request)


class RepositoryMachine(RuleBasedStateMachine):
    """The model: commits by id, branches and tags by name; two open repositories act on one place.

    `shares_index`: both have one index; else what one wrote is news to the other.
    """

    shares_index = False

    def __init__(self) -> None:
        super().__init__()
        self.commits: dict[str, Made] = {}
        self.branches: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.url = self.new_place()
        self.open: list[Repository] = []

    def new_place(self) -> str:
        return f"memory://machine-{next(_numbers)}"

    @initialize(encoding=st.sampled_from([None, "raw", "zstd", "planes", "auto"]))
    def init(self, encoding: str | None) -> None:
        self.open = [Repository.init(self.url, encoding=encoding, pack_bytes=1 << 20), Repository.open(self.url)]
        with pytest.raises(NotFoundError):
            self.open[0].load("main")
        assert self.open[1].log() == []
        for which in (False, True):
            self.commit(which, {"w": torch.ones(3), "step": which}, "main", None)

    def teardown(self) -> None:
        for made in self.commits.values():
            self.reads_back(self.open[0], made.id)
        self.shut()

    def shut(self) -> None:
        for repo in self.open:
            repo.close()

    # --- what the model says ---------------------------------------------------------------

    def history(self, head: str | None) -> list[Made]:
        found = []
        while head is not None:
            found.append(self.commits[head])
            head = found[-1].parent
        return found

    def remember(self, id: str, root: str, state: dict[str, Any], branch: str) -> None:  # noqa: A002
        self.commits[id] = Made(id, root, mapped(state, copied), account(state), self.branches.get(branch))
        self.branches[branch] = id

    def reads_back(self, repo: Repository, ref: str) -> None:
        made = self.commits[repo.resolve(ref)]
        loaded = repo.load(ref)
        assert (account(loaded), ties(loaded)) == (made.account, ties(made.state))

    # --- verbs ------------------------------------------------------------------------------

    # Several rules commit, because hypothesis leaves out some rules in most of its runs.

    @rule(which=st.booleans(), state=states(), branch=BRANCHES)
    def commit_anything(self, which: bool, state: dict[str, Any], branch: str) -> None:
        self.commit(which, state, branch, None)

    @rule(which=st.booleans(), state=SMALL, branch=BRANCHES, step=st.integers(0, 9))
    def commit_little(self, which: bool, state: dict[str, Any], branch: str, step: int) -> None:
        self.commit(which, state, branch, step)

    @rule(first=st.booleans(), state=SMALL)
    def commit_in_turn(self, first: bool, state: dict[str, Any]) -> None:
        for turn in range(3):
            self.commit(first ^ bool(turn % 2), state | {"turn": turn}, "main", turn)

    def commit(self, which: bool, state: dict[str, Any], branch: str, step: int | None) -> None:
        if branch in self.tags:
            with pytest.raises(ConflictError):
                commit_to(self.open[which], state, branch=branch)
            return
        parent = self.branches.get(branch)
        info = commit_to(self.open[which], state, branch=branch, step=step, message=f"to {branch}")
        assert (info.parents, info.step) == ((parent,) if parent else (), step)
        assert info.id not in self.commits
        self.remember(info.id, info.root, state, branch)

    @rule(which=st.booleans(), pick=st.integers(0, 99), branch=BRANCHES)
    def commit_again(self, which: bool, pick: int, branch: str) -> None:
        """A state that is stored already costs no chunk and has the same root."""
        made = list(self.commits.values())[pick % len(self.commits)]
        if branch not in self.tags:
            info = commit_to(self.open[which], mapped(made.state, copied), branch=branch)
            assert info.root == made.root
            assert info.stats.num_new_chunks == 0 or not self.shares_index
            self.remember(info.id, info.root, made.state, branch)

    @rule(which=st.booleans(), pick=st.integers(0, 99), name=BRANCHES, force=st.booleans())
    def branch(self, which: bool, pick: int, name: str, force: bool) -> None:
        self.point(self.open[which].branch, self.branches, self.tags, pick, name, force)

    @rule(which=st.booleans(), pick=st.integers(0, 99), name=TAGS, force=st.booleans())
    def tag(self, which: bool, pick: int, name: str, force: bool) -> None:
        self.point(self.open[which].tag, self.tags, self.branches, pick, name, force)

    def point(self, verb: Callable[..., str], mine: dict[str, str], others: dict[str, str],
              pick: int, name: str, force: bool) -> None:  # fmt: skip
        target = list(self.commits)[pick % len(self.commits)]
        start = {"start": target} if mine is self.branches else {}
        arguments = (name,) if mine is self.branches else (name, target)
        if name in others or (name in mine and not force):
            with pytest.raises(ConflictError):
                verb(*arguments, **start, force=force)
            return
        assert verb(*arguments, **start, force=force) == target
        mine[name] = target

    @precondition(lambda self: len(self.branches) > 1)
    @rule(which=st.booleans(), name=BRANCHES)
    def delete_branch(self, which: bool, name: str) -> None:
        if name in self.branches and name != "main":
            others = [head for refs in (self.branches, self.tags) for at, head in refs.items() if at != name]
            led_to = {made.id for head in others for made in self.history(head)}
            if self.branches[name] not in led_to:
                with pytest.raises(ConflictError, match="alone leads to"):
                    self.open[which].delete_branch(name)
        self.delete(partial(self.open[which].delete_branch, force=True), self.branches, name, fixed="main")

    @precondition(lambda self: self.tags)
    @rule(which=st.booleans(), name=TAGS)
    def delete_tag(self, which: bool, name: str) -> None:
        self.delete(self.open[which].delete_tag, self.tags, name, fixed="")

    def delete(self, verb: Callable[[str], str], refs: dict[str, str], name: str, fixed: str) -> None:
        if name == fixed or name not in refs:
            with pytest.raises(InvalidInputError if name == fixed else NotFoundError):
                verb(name)
            return
        assert verb(name) == refs.pop(name)

    # --- reading ----------------------------------------------------------------------------

    @rule(which=st.booleans(), data=st.data())
    def load(self, which: bool, data: st.DataObject) -> None:
        self.reads_back(self.open[which], data.draw(st.sampled_from([*self.commits, *self.branches, *self.tags])))

    @rule(which=st.booleans(), pick=st.integers(0, 99))
    def checkout(self, which: bool, pick: int) -> None:
        made = list(self.commits.values())[pick % len(self.commits)]
        into = mapped(made.state, blank)
        before = leaves(into)
        report = self.open[which].checkout(made.id, into=into)
        assert report.commit.root == made.root
        assert account(into) == made.account
        assert all(now is then for now, then in zip(leaves(into), before, strict=True))

    @rule(which=st.booleans(), pick=st.integers(0, 99))
    def checkout_into_another_state(self, which: bool, pick: int) -> None:
        made = list(self.commits.values())[pick % len(self.commits)]
        into = mapped(made.state, blank) | {"one more": torch.ones(3)}
        before = account(into)
        with pytest.raises(MismatchError, match="one more"):
            self.open[which].checkout(made.id, into=into)
        assert account(into) == before

    @precondition(lambda self: any(leaves(made.state) for made in self.commits.values()))
    @rule(which=st.booleans(), data=st.data())
    def read(self, which: bool, data: st.DataObject) -> None:
        made = data.draw(st.sampled_from([made for made in self.commits.values() if leaves(made.state)]))
        key, leaf = data.draw(st.sampled_from([pair for pair in keyed(made.state)]))
        region = tuple(slice(start, start + size) for start, size in (data.draw(part_of(n)) for n in leaf.shape))
        found = self.open[which].read(made.id, key, region)
        assert account(found) == account(np.asarray(leaf[region]) if isinstance(leaf, np.ndarray) else leaf[region])

    @rule(which=st.booleans())
    def look_back(self, which: bool) -> None:
        repo = self.open[which]
        for name, head in [*self.branches.items(), *self.tags.items()]:
            chain = [made.id for made in self.history(head)]
            assert [info.id for info in repo.log(name, limit=2)] == chain[:2]
            assert [repo.resolve(f"{name}~{back}") for back in range(len(chain))] == chain
            with pytest.raises(NotFoundError):
                repo.resolve(f"{name}~{len(chain)}")
        heads = [*self.branches.values(), *self.tags.values()]
        wanted = {made.id for head in heads for made in self.history(head)}
        assert sorted(info.id for info in repo.log(all_refs=True)) == sorted(wanted)

    @rule(which=st.booleans(), pick=st.integers(0, 99), digits=st.integers(12, 64))
    def prefix(self, which: bool, pick: int, digits: int) -> None:
        wanted = list(self.commits)[pick % len(self.commits)]
        assert self.open[which].resolve(wanted[:digits]) == wanted

    # --- bad luck ---------------------------------------------------------------------------

    @rule()
    def reopen(self) -> None:
        self.shut()
        self.open = [Repository.open(self.url), Repository.open(self.url)]

    @rule(which=st.booleans())
    def rebuild_index(self, which: bool) -> None:
        self.open[which].rebuild_index()

    def dying(self, plan: FaultPlan) -> Repository:
        """One more open repository, whose process is about to die."""
        store = FaultyStore(open_store(self.url), effects=Effects(plan))
        return Repository(RepositoryHandle.on_store(store, index_url=self.index_url()))

    def index_url(self) -> str:
        return ":memory:"

    @rule(state=STATES, branch=BRANCHES, plan=DEATHS)
    def crash_in_a_commit(self, state: dict[str, Any], branch: str, plan: FaultPlan) -> None:
        if branch in self.tags:
            return
        dying = self.dying(plan)
        try:
            info = commit_to(dying, state, branch=branch)
            self.remember(info.id, info.root, state, branch)
        except CrashNow:
            dying.close()
            self.reopen()
            self.accept_either(state, branch)

    def accept_either(self, state: dict[str, Any], branch: str) -> None:
        """The head is the old one, or a whole commit of `state` on top of it."""
        head = self.open[0].branches().get(branch)
        if head == self.branches.get(branch):
            return
        assert head is not None
        assert head not in self.commits
        info = self.open[0].log(head, limit=1)[0]
        assert info.parents == tuple(filter(None, [self.branches.get(branch)]))
        self.remember(head, info.root, state, branch)

    @rule(pick=st.integers(0, 99), name=TAGS, plan=DEATHS)
    def crash_in_a_tag(self, pick: int, name: str, plan: FaultPlan) -> None:
        target = list(self.commits)[pick % len(self.commits)]
        if name in self.branches:
            return
        dying = self.dying(plan)
        try:
            dying.tag(name, target, force=True)
            self.tags[name] = target
        except CrashNow:
            dying.close()
            found = self.open[0].tags().get(name)
            assert found in (self.tags.get(name), target)
            self.tags |= {name: found} if found else {}

    # --- always -----------------------------------------------------------------------------

    @invariant()
    def names_are_what_the_model_says(self) -> None:
        for repo in self.open:
            assert repo.branches() == self.branches
            assert repo.tags() == self.tags

    @invariant()
    def history_is_what_the_model_says(self) -> None:
        for repo in self.open:
            for name, head in self.branches.items():
                assert [info.id for info in repo.log(name)] == [made.id for made in self.history(head)]

    @invariant()
    def one_state_has_one_root(self) -> None:
        accounts = {made.root: made.account for made in self.commits.values()}
        assert all(made.account == accounts[made.root] for made in self.commits.values())
        assert len(set(accounts.values())) == len(accounts)


class RepositoryOnDiskMachine(RepositoryMachine):
    """The same on disk, where the index is a file that can be lost or brought back from a backup."""

    shares_index = True

    def new_place(self) -> str:
        self.folder = Path(tempfile.mkdtemp(prefix="machine-"))
        return str(self.folder / "repo")

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.folder)

    def index_url(self) -> str:
        return str(self.folder / "repo" / INDEX_PATH)

    @property
    def index(self) -> Path:
        return (self.folder / "repo" / INDEX_PATH).parent

    @rule()
    def lose_the_index(self) -> None:
        self.shut()
        shutil.rmtree(self.index)
        self.reopen()
        self.main_reads_back()

    @rule()
    def back_up_the_index(self) -> None:
        self.shut()
        shutil.copytree(self.index, self.folder / "backup", dirs_exist_ok=True)
        self.reopen()

    @precondition(lambda self: (self.folder / "backup").exists())
    @rule()
    def bring_the_index_back_from_a_backup(self) -> None:
        self.shut()
        shutil.rmtree(self.index)
        shutil.copytree(self.folder / "backup", self.index)
        self.reopen()
        self.main_reads_back()

    def main_reads_back(self) -> None:
        """Before anything else had reason to bring the index up to date."""
        self.reads_back(self.open[0], "main")


def keyed(value: Any, key: str = "") -> list[tuple[str, Any]]:
    """Every tensor and array with its key, as format.md writes keys."""
    if isinstance(value, dict):
        pairs = [(written(name), child) for name, child in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [(str(at), child) for at, child in enumerate(value)]
    else:
        return [(key, value)] if leaves(value) else []
    return [found for name, child in pairs for found in keyed(child, f"{key}/{name}" if key else name)]


def written(name: str | int) -> str:
    if isinstance(name, int):
        return str(name)
    escaped = name.replace("~", "~0").replace("/", "~1")
    return f"~={escaped}" if not name or name.lstrip("-").isdigit() else escaped


def part_of(size: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.integers(0, size).flatmap(lambda start: st.tuples(st.just(start), st.integers(0, size - start)))


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # a failure is made small before it is shown, which takes its time
]
_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
RepositoryMachine.TestCase.settings = settings(
    max_examples=tries(15, 60, 500), stateful_step_count=25, suppress_health_check=_CHECKS
)
RepositoryOnDiskMachine.TestCase.settings = settings(
    max_examples=tries(8, 30, 200), stateful_step_count=25, suppress_health_check=_CHECKS
)


class TestInMemory(RepositoryMachine.TestCase):  # type: ignore[misc,name-defined]
    """Any sequence of verbs in memory."""


class TestOnDisk(RepositoryOnDiskMachine.TestCase):  # type: ignore[misc,name-defined]
    """Any sequence of verbs on disk."""
