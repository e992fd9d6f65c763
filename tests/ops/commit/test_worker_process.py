"""Commits made by a worker process are those that this process would have made; its death makes none of them half."""

from __future__ import annotations

import itertools
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt import limits
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import CommitInfo, Lineage
from cas_ckpt.core.refs import RefKind
from cas_ckpt.errors import (
    CkptError,
    ConflictError,
    CorruptionError,
    FrozenChangedError,
    InvalidInputError,
    MemoryBudgetError,
    PeerError,
    StorageError,
    WorkerError,
)
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.objects.spec import Box
from cas_ckpt.objects.state import Container
from cas_ckpt.ops.commit import worker
from cas_ckpt.ops.commit.commit import commit_live
from cas_ckpt.ops.commit.frozen import FrozenMemory
from cas_ckpt.ops.commit.request import CommitRequest, git_state
from cas_ckpt.ops.commit.worker import CommitWorker
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.fsck.packs import DataOptions
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.history.log import log_commits, show_commit
from cas_ckpt.parallel import child_process
from cas_ckpt.parallel.child_process import ChildProcess
from cas_ckpt.parallel.peers import Peers, collective_errors
from cas_ckpt.progress import SILENT
from cas_ckpt.signing import Verdict
from cas_ckpt.storage.memory import MemoryStore
from tests.builders import ArrayMemory, new_repository, numbers, same_bytes, state, stored_arrays, tensor
from tests.committing import new_store, on
from tests.crash.citizen import EAGER
from tests.divided import divided, mesh, over
from tests.ops.commit.worker_entries import MODULE
from tests.searches import tries
from tests.signing.keys import key_file, public_line
from tests.thread_peers import run_ranks

ROOM_BYTES = 12 << 20
"""What a worker without memory may map more than it has."""


@pytest.fixture
def commits(handle: RepositoryHandle) -> Iterator[CommitWorker]:
    made = CommitWorker(handle)
    yield made
    pid = made.pid
    made.close()
    assert made.pid is None
    assert pid is None or not Path(f"/proc/{pid}").exists(), "it was left behind"


def put(commits: CommitWorker, items: dict[Any, Any], **given: Any) -> CommitInfo:
    own = {name: given.pop(name) for name in ("memory", "progress", "check", "peers") if name in given}
    return commits.commit(state(items), CommitRequest(**given), **own)


def head_of(handle: RepositoryHandle) -> str | None:
    target = handle.refs.get(RefKind.BRANCH, "main").target
    return None if target is None else target.hex()


def require_whole(handle: RepositoryHandle) -> None:
    found = check_open(handle, DataOptions())
    assert not found.problems, found.problems


ITEMS = st.recursive(
    st.one_of(
        st.integers(), st.text(), st.binary(max_size=3000), st.none(), st.floats(allow_nan=False),
        st.lists(st.integers(0, 40), min_size=0, max_size=3).map(lambda shape: numbers(*shape, seed=len(shape))),
        st.just(numbers(300, 700, seed=1)), st.just(numbers(700, 300, seed=2).T), st.just(numbers(5_000, seed=3)[::2]),
    ),
    lambda inner: st.dictionaries(st.one_of(st.integers(0, 99), st.text(max_size=5)), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CommitWorker, RepositoryHandle]]:
    """A worker of one repository, and another repository in this process."""
    folder = tmp_path_factory.mktemp("beside")
    here, there = new_repository(folder / "here"), new_repository(folder / "there")
    commits = CommitWorker(there)
    yield commits, here
    commits.close()
    here.close()
    there.close()


@settings(max_examples=tries(10, 30))
@given(items=st.dictionaries(st.text(max_size=5), ITEMS, max_size=4))
def test_the_same_state_has_the_same_id(beside: tuple[CommitWorker, RepositoryHandle], items: dict[str, Any]) -> None:
    commits, here = beside
    assert put(commits, items).root == commit_live(here, state(items), CommitRequest()).root


def test_a_commit_says_what_it_was_asked_to_say(commits: CommitWorker, handle: RepositoryHandle) -> None:
    first = put(commits, {"a": 1}, message="one")
    assert handle.head.commit == first.id
    tied = numbers(300, 300)
    items = {"a": tensor(tied, identity=("here", 1)), "b": tensor(tied, identity=("here", 1)), "c": numbers(3)}
    made = put(
        commits, items, message="zwei\udc80 ✓".encode("utf-8", "replace").decode(), step=7,
        metrics={"loss": np.float32(0.5)}, author="somebody", meta={"x": (1, {2})}, provenance={"job": 3},
        lineage=[Lineage("fine-tune-of", "HEAD", [1])],
    )  # fmt: skip
    assert (made.step, made.metrics, made.author, made.meta) == (7, {"loss": 0.5}, "somebody", {"x": (1, {2})})
    assert made.parents == (first.id,)
    assert [(each.kind, each.target, each.meta) for each in made.lineage] == [("fine-tune-of", first.id, [1])]
    found = show_commit(handle, made.id).provenance
    assert (found["job"], found["command"]) == (3, sys.argv), "of this process, not of the worker"
    assert made.stats.num_tensors == 3 and made.stats.total_bytes == tied.nbytes + 12, "what is tied counts once"
    assert same_bytes(stored_arrays(handle, made.root)["a"], tied)
    require_whole(handle)


def test_ranks_of_several_machines_keep_the_provenance_of_the_rank_that_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = itertools.count()
    monkeypatch.setattr("socket.gethostname", lambda: f"host{next(machines)}")
    monkeypatch.setattr(sys, "argv", ["train.py", "--surrogate=\udc80"])
    new_repository(tmp_path / "repo").close()

    def work(peers: Peers) -> CommitInfo:
        handle = RepositoryHandle.open(tmp_path / "repo")
        commits = CommitWorker(handle)
        try:
            with collective_errors(peers):
                return commits.commit(state({"a": numbers(9)}), CommitRequest(provenance={"job": 3}), peers=peers)
        finally:
            commits.close()
            handle.close()

    first, second = run_ranks(2, work)
    assert first == second
    with closing(RepositoryHandle.open(tmp_path / "repo")) as handle:
        found = show_commit(handle, first.id).provenance
    assert (found["job"], found["command"]) == (3, ["train.py", "--surrogate=\\udc80"])


def test_provenance_is_of_the_folder_where_this_process_is(
    commits: CommitWorker, handle: RepositoryHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    for words in (
        ["init", "-q"],
        ["-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "-q", "--allow-empty", "-m", "one"],
    ):
        subprocess.run(["git", *words], cwd=folder, check=True)
    commits.start()
    monkeypatch.chdir(folder)
    wanted = git_state()
    assert wanted is not None
    assert show_commit(handle, put(commits, {"a": 1}, provenance=True).id).provenance["git"] == wanted
    shutil.rmtree(folder)
    assert "git" not in show_commit(handle, put(commits, {"a": 2}, provenance=True).id).provenance


def test_errors_are_raised_as_what_they_are_and_the_worker_goes_on(
    commits: CommitWorker, handle: RepositoryHandle, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "cas_ckpt")
    put(commits, {"a": 1})
    pid, head = commits.pid, handle.head
    with pytest.raises(InvalidInputError, match="matches no tensor"):
        put(commits, {"a": numbers(5)}, frozen="b")
    assert "in save_alone" in caplog.text, "where it was raised"
    with pytest.raises(InvalidInputError, match="on_conflict"):
        put(commits, {"a": 1}, on_conflict="perhaps")
    other = RepositoryHandle.open(handle.store.url)
    commit_live(other, state({"a": 2}), CommitRequest())
    other.close()
    with pytest.raises(ConflictError, match="moved"):
        put(commits, {"a": 1}, on_conflict="raise")
    assert handle.head == head, "nothing was committed"
    assert put(commits, {"a": 3}).lineage[0].kind == "continued-from"
    assert commits.pid == pid


def test_errors_keep_their_causes_and_what_they_hold(commits: CommitWorker, handle: RepositoryHandle) -> None:
    with pytest.raises(MemoryBudgetError) as here, limits(memory_bytes=1000):
        commit_live(handle, state({"a": numbers(1000, 1000)}), CommitRequest())
    with pytest.raises(MemoryBudgetError) as there, limits(memory_bytes=1000):
        put(commits, {"a": numbers(1000, 1000)})
    copied_bytes = 2 * 1000 * 1000  # the worker is shown copies of what is not staged, a cell at a time: half of it
    assert there.value.least_bytes == here.value.least_bytes + copied_bytes

    class Lost(ArrayMemory):
        def read(self, box: Box) -> np.ndarray[Any, Any]:
            try:
                raise OSError(28, "No space", "/x")
            except OSError as error:
                raise ConflictError("lost") from error

    item = tensor(numbers(300, 300))
    item.source = Lost(item.source.array)  # type: ignore[attr-defined]
    with pytest.raises(ConflictError, match="lost") as lost:
        put(commits, {"a": item})
    cause = lost.value.__cause__
    assert isinstance(cause, OSError) and (cause.errno, cause.filename) == (28, "/x")


def test_lines_of_the_log_and_bytes_come_here(
    commits: CommitWorker, handle: RepositoryHandle, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[Any, ...]] = []

    class Seen:
        def start(self, *given: Any) -> None:
            seen.append(("start", *given))

        def advance(self, *given: Any) -> None:
            seen.append(("advance", *given))

        def finish(self) -> None:
            seen.append(("finish",))

    put(commits, {"w": numbers(1000, 1000)})
    damaged = next(key for key, _ in handle.store.list(PACK_PREFIX))
    (Path(handle.store.url.removeprefix("file://")) / damaged).write_bytes(b"")
    commits._discard()  # the next worker looks at the packs anew
    items = {"w": numbers(1000, 1000), "v": numbers(500, 500)}
    put(commits, items, progress=Seen())
    assert any(each.pathname == "(worker process)" and "is left out" in each.getMessage() for each in caplog.records)
    assert seen[0] == ("start", "hashing", 5_000_000)
    assert sum(each[1] for each in seen if each[0] == "advance") == 5_000_000
    assert seen[-1] == ("finish",)


def test_what_is_frozen_is_trusted_across_commits_of_one_kind(commits: CommitWorker, handle: RepositoryHandle) -> None:
    memory, array = FrozenMemory(), numbers(300, 300)
    items = {"w": tensor(array, identity=(("w",), 1))}
    first = put(commits, items, frozen="w", memory=memory)
    assert put(commits, items, frozen="w", memory=memory).root == first.root
    array[5] += 1
    with pytest.raises(FrozenChangedError, match="w: "):
        put(commits, items, frozen="w", memory=memory)
    commit_live(handle, state(items), CommitRequest(), memory=memory)  # rightly, and here: the worker has to hear of it
    thawed = put(commits, items, frozen="w", memory=memory)
    assert thawed.root != first.root
    array[5] += 1
    put(commits, items, memory=memory)
    commit_live(handle, state(items), CommitRequest(frozen="w"), memory=memory)  # and the other way round
    array[5] += 1
    assert put(commits, items, frozen="w", memory=FrozenMemory()).root != thawed.root, "after a checkout"


def test_frozen_by_version_is_trusted_where_memory_is_the_same(commits: CommitWorker) -> None:
    memory, array = FrozenMemory(), numbers(300, 300)
    named: dict[str, Any] = {"frozen": "w", "frozen_check": "version", "frozen_audit": 0.0, "memory": memory}
    first = put(commits, {"w": tensor(array, identity=(("w",), 1))}, **named)
    array[5] += 1
    assert put(commits, {"w": tensor(array, identity=(("w",), 1))}, **named).root == first.root, (
        "it believed the counter"
    )
    with pytest.raises(FrozenChangedError):
        put(commits, {"w": tensor(array, identity=(("w",), 2))}, **named)
    with pytest.raises(FrozenChangedError):
        put(commits, {"w": tensor(array, identity=(("elsewhere",), 1))}, **named)


def test_it_signs_by_the_key_in_a_file(commits: CommitWorker, handle: RepositoryHandle) -> None:
    from cas_ckpt.core.signatures import commit_signature
    from cas_ckpt.signing import as_trust

    made = put(commits, {"a": 1}, sign=str(key_file()))
    assert commit_signature(handle, Digest(bytes.fromhex(made.id)), as_trust(public_line())).is_good


def test_what_is_asked_before_publishing_can_end_the_commit(commits: CommitWorker, handle: RepositoryHandle) -> None:
    put(commits, {"a": 1})
    head, times = head_of(handle), 0

    def refuse() -> None:
        raise CorruptionError("the snapshot does not hold")

    def refuse_at_the_end() -> None:
        nonlocal times
        times += 1
        if times == wanted:
            refuse()

    for wanted in range(1, 100):
        times = 0
        try:
            put(commits, {"a": wanted, "w": numbers(300, 300, seed=wanted)}, check=refuse_at_the_end)
        except CorruptionError:
            assert head_of(handle) == head
        else:
            break
    assert wanted > 1 and times < wanted
    assert head_of(handle) != head


def test_the_last_question_whether_a_commit_is_wanted_comes_when_all_is_saved(
    commits: CommitWorker, handle: RepositoryHandle
) -> None:
    """What has changed in the very end is not published."""
    put(commits, {"a": 1})
    head, finished = head_of(handle), threading.Event()

    def refuse_once_all_is_saved() -> None:
        if finished.is_set():
            raise CorruptionError("the snapshot does not hold")

    with pytest.raises(CorruptionError):
        put(
            commits, {"w": numbers(300, 300)}, check=refuse_once_all_is_saved,
            progress=Mock(wraps=SILENT, finish=finished.set),
        )  # fmt: skip
    assert finished.is_set() and head_of(handle) == head == handle.head.commit


def test_a_commit_that_is_not_wanted_is_broken_off_before_all_is_read(
    commits: CommitWorker, handle: RepositoryHandle
) -> None:
    put(commits, {"a": 1})
    head, pid, num_read = head_of(handle), commits.pid, 0

    class Counted(ArrayMemory):
        def read(self, box: Box) -> np.ndarray[Any, Any]:
            nonlocal num_read
            num_read += 1
            return super().read(box)

    def refuse() -> None:
        raise CorruptionError("nobody wants it")

    items = {str(number): tensor(numbers(300, 300, seed=number)) for number in range(30)}
    for each in items.values():
        each.source = Counted(each.source.array)
    with pytest.raises(CorruptionError, match="nobody wants it"), limits(num_threads=1):
        put(commits, items, check=refuse)
    assert num_read < len(items)
    assert head_of(handle) == head == handle.head.commit
    assert put(commits, {"a": 2}).parents == (head,) and commits.pid == pid


def test_a_commit_that_the_index_does_not_take_is_made_and_said_to_be(
    commits: CommitWorker, handle: RepositoryHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = commit_live(handle, state({"a": 1}), CommitRequest())
    monkeypatch.setattr(worker, "ENTRY", f"{MODULE}:full_index")
    meta = {"kind": Verdict.GOOD, "x": (1, {2})}
    made = put(
        commits, {"w": numbers(300, 300)}, meta=meta, metrics={"loss": 0.5}, lineage=[Lineage("like", "HEAD", meta)]
    )
    assert head_of(handle) == handle.head.commit == made.id
    assert made.parents == (first.id,)
    assert made == show_commit(handle, made.id).commit
    require_whole(handle)


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_commit_whose_worker_died_right_after_the_swap_moves_the_head(
    commits: CommitWorker, handle: RepositoryHandle, monkeypatch: pytest.MonkeyPatch, is_readable: bool
) -> None:
    commit_live(handle, state({"a": 1}), CommitRequest())
    monkeypatch.setattr(worker, "ENTRY", f"{MODULE}:die_once_published")
    if is_readable:
        made = put(commits, {"w": numbers(300, 300)})
        assert made.id == head_of(handle) == handle.head.commit
        assert next(iter(log_commits(handle))) == made
        return
    refused = StorageError("the medium does not answer")
    monkeypatch.setattr(worker, "was_published", Mock(side_effect=refused))
    with pytest.raises(WorkerError, match=r"not known.*SIGKILL.*does not answer.*look at it") as caught:
        put(commits, {"w": numbers(300, 300)})
    assert caught.value.__cause__ is refused


def test_a_collection_between_the_last_pack_and_the_swap_loses_nothing(
    commits: CommitWorker, handle: RepositoryHandle
) -> None:
    array = numbers(300, 300)
    put(commits, {"w": array}, branch="side", create=True)
    main = RepositoryHandle.open(handle.store.url)
    commit_live(main, state({"a": 1}), CommitRequest(branch="main", orphan=True))
    handle.head = main.head
    collected = 0

    def collect() -> None:
        nonlocal collected
        if collected:
            return
        collected = 1
        from cas_ckpt.ops.refs import delete_branch

        delete_branch(main, "side", force=True)
        collect_garbage(main, replace(EAGER, min_age_s=0))

    made = put(commits, {"w": array}, check=collect)
    assert collected
    require_whole(handle)
    assert same_bytes(stored_arrays(handle, made.root)["w"], array)
    main.close()


def test_ranks_commit_together_through_their_workers(tmp_path: Path) -> None:
    new_repository(tmp_path / "repo").close()
    shared = numbers(600, 700)

    def work(peers: Peers) -> tuple[Any, ...]:
        handle = RepositoryHandle.open(tmp_path / "repo")
        commits = CommitWorker(handle)
        try:
            items = {"shared": shared, f"own{peers.rank}": numbers(400, 400, seed=peers.rank)}
            with collective_errors(peers):
                first = commits.commit(state(items), CommitRequest(), peers=peers)
            items["shared"] = numbers(600, 700, seed=peers.rank)
            failed: Any = None
            try:
                with collective_errors(peers):
                    commits.commit(state(items), CommitRequest(), peers=peers)
            except PeerError as error:
                failed = error
            if peers.rank == 1:
                assert commits.pid is not None
                os.kill(commits.pid, signal.SIGKILL)
            items["shared"] = shared
            with collective_errors(peers):
                last = commits.commit(state(items), CommitRequest(), peers=peers)
            assert handle.head.commit == last.id
            return first, failed, last
        finally:
            commits.close()
            handle.close()

    outcomes = run_ranks(2, work)
    here = new_repository(tmp_path / "alone")
    alone = commit_live(
        here,
        state({"shared": shared, "own0": numbers(400, 400, seed=0), "own1": numbers(400, 400, seed=1)}),
        CommitRequest(),
    )
    here.close()
    for first, failed, last in outcomes:
        assert first.root == last.root == alone.root
        assert failed is not None and "shared" in str(failed), "replicas differ, and all ranks hear it"


def test_a_rank_whose_worker_dies_is_an_error_of_all(tmp_path: Path) -> None:
    new_repository(tmp_path / "repo").close()

    def work(peers: Peers) -> Any:
        handle = RepositoryHandle.open(tmp_path / "repo")
        commits = CommitWorker(handle)

        def check() -> None:
            if peers.rank == 1 and commits.pid is not None:
                os.kill(commits.pid, signal.SIGKILL)

        try:
            with collective_errors(peers):
                return commits.commit(
                    state({f"own{peers.rank}": numbers(400, 400)}), CommitRequest(), peers=peers, check=check
                )
        finally:
            commits.close()
            handle.close()

    found = run_ranks(2, work, outcomes=True)
    assert isinstance(found[0], PeerError) and isinstance(found[1], WorkerError)
    assert "SIGKILL" in str(found[0])


@pytest.mark.parametrize(
    ("unlucky", "entry"), [(0, "die_once_published"), (1, "die_once_published"), (1, "die_before_told")]
)
def test_a_commit_is_known_to_all_ranks_though_the_worker_of_one_died_around_it(
    tmp_path: Path, unlucky: int, entry: str
) -> None:
    new_repository(tmp_path / "repo").close()

    def work(peers: Peers) -> tuple[CommitInfo, CommitInfo]:
        handle = RepositoryHandle.open(tmp_path / "repo")
        commits = CommitWorker(handle)
        try:
            if peers.rank == unlucky:
                commits._child = ChildProcess(f"{MODULE}:{entry}")
            with collective_errors(peers):
                made = commits.commit(state({"own": numbers(400, 400)}), CommitRequest(), peers=peers)
            assert made.id == head_of(handle) == handle.head.commit
            with collective_errors(peers):
                after = commits.commit(state({"own": numbers(400, 401)}), CommitRequest(), peers=peers)
            require_whole(handle)
            return made, after
        finally:
            commits.close()
            handle.close()

    (made, after), others = run_ranks(2, work)
    assert (made, after) == others
    assert after.parents == (made.id,)


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "divided_as", "told"),
    [
        (None, "die_after_gather", "S(0)", WorkerError),  # rank 0 goes on, and waits for this rank
        (None, "die_after_gather", "R", PeerError),  # rank 0 finds that replicas differ
        ("refuse", "die_before_told", None, PeerError),
        ("fail_to_publish", "die_before_told", None, PeerError),
        ("fail_to_publish", "die_of_peer_error", None, PeerError),
    ],
)
def test_a_rank_whose_worker_dies_hears_that_no_commit_is_made_and_all_ranks_can_commit_again(
    tmp_path: Path, of_rank_0: str | None, of_rank_1: str, divided_as: str | None, told: type[CkptError]
) -> None:
    new_repository(tmp_path / "repo").close()

    def tree(rank: int) -> Container:
        if divided_as is None:
            return state({"own": numbers(400, 400)})
        small = numbers(8) + (rank if divided_as == "R" else 0)  # so small that rank 0 compares it
        return Container("dict", {"w": divided(small, over(mesh(2), divided_as), rank)})

    def work(peers: Peers) -> tuple[CkptError, CommitInfo]:
        handle = RepositoryHandle.open(tmp_path / "repo")
        commits = CommitWorker(handle)
        entry = of_rank_1 if peers.rank else of_rank_0
        try:
            if entry is not None:
                commits._child = ChildProcess(f"{MODULE}:{entry}")
            with pytest.raises(CkptError) as failed, collective_errors(peers):
                commits.commit(tree(peers.rank), CommitRequest(), peers=peers)
            assert handle.head.commit is None
            commits._discard()
            with collective_errors(peers):
                return failed.value, commits.commit(state({"own": numbers(300, 400)}), CommitRequest(), peers=peers)
        finally:
            commits.close()
            handle.close()

    (_, made), (failed, others) = run_ranks(2, work, timeout_s=20)
    assert made == others
    assert type(failed) is told
    assert (told is PeerError) or "not made" in str(failed)


@pytest.mark.slow
def test_a_worker_that_is_killed_after_any_effect_leaves_the_commit_made_or_not(
    commits: CommitWorker, handle: RepositoryHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_live(handle, state({"w": numbers(10)}), CommitRequest())
    outcomes = []
    for number in range(1, 40):
        monkeypatch.setattr(worker, "ENTRY", f"{MODULE}:die_after_{number}")
        before = head_of(handle)
        items = {"w": numbers(100, 100, seed=number)}  # all is new
        try:
            made = put(commits, items)
        except WorkerError:
            assert head_of(handle) == before == handle.head.commit
            outcomes.append("not made")
        else:
            assert head_of(handle) == made.id == handle.head.commit
            assert same_bytes(stored_arrays(handle, made.root)["w"], items["w"])
            if commits.pid is not None:
                break
            outcomes.append("made")
    assert sorted(outcomes, reverse=True) == outcomes and set(outcomes) == {"made", "not made"}
    monkeypatch.undo()
    commits._discard()
    put(commits, {"w": numbers(10)})
    require_whole(handle)


@pytest.mark.slow
def test_workers_that_are_killed_at_random_moments_leave_whole_commits(
    commits: CommitWorker, handle: RepositoryHandle
) -> None:
    rng, made = random.Random(1), [put(commits, {"w": numbers(10)})]
    failed = 0
    for number in range(5):
        array = numbers(2000, 500, seed=number)
        put(commits, {"w": numbers(10)})
        assert commits.pid is not None
        killer = threading.Timer(rng.uniform(0, 0.06), os.kill, (commits.pid, signal.SIGKILL))
        before = handle.head.commit
        killer.start()
        try:
            made.append(put(commits, {"w": array}))
            assert head_of(handle) == made[-1].id
        except WorkerError:
            failed += 1
            assert head_of(handle) == before == handle.head.commit
        killer.join()
    assert failed
    require_whole(handle)


def test_a_worker_without_memory_reports_it_and_goes_on(commits: CommitWorker, handle: RepositoryHandle) -> None:
    put(commits, {"a": numbers(300, 300)})
    pid = commits.pid
    assert pid is not None
    mapped = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.prlimit(pid, resource.RLIMIT_AS, (mapped + ROOM_BYTES, resource.RLIM_INFINITY))
    with pytest.raises(MemoryError), limits(num_threads=2):
        put(commits, {"a": numbers(5000, 5000)})
    resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert put(commits, {"a": numbers(300, 301)}).id == head_of(handle)
    assert commits.pid == pid
    require_whole(handle)


def test_a_worker_that_stays_stopped_in_a_commit_is_ended_and_the_error_says_so(
    commits: CommitWorker, handle: RepositoryHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = put(commits, {"a": 1})
    pid = commits.pid
    assert pid is not None
    monkeypatch.setattr(child_process, "STOPPED_S", 1.0)
    with pytest.raises(WorkerError, match=r"not made.*was stopped.*commit again"):
        put(commits, {"w": numbers(300, 300)}, check=lambda: os.kill(pid, signal.SIGSTOP))
    assert head_of(handle) == first.id == handle.head.commit
    put(commits, {"w": numbers(300, 300)})
    assert commits.pid not in (None, pid)


def test_a_worker_that_died_while_nobody_looked_is_replaced(commits: CommitWorker) -> None:
    put(commits, {"a": 1})
    pid = commits.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    put(commits, {"a": 2})  # whether or not it is known by now
    assert commits.pid not in (None, pid)


def test_after_a_fork_each_process_has_a_worker_of_its_own(commits: CommitWorker, handle: RepositoryHandle) -> None:
    first = put(commits, {"a": 1})
    pid = commits.pid
    fork = os.fork()
    if fork == 0:
        status = 1
        try:
            assert commits.pid is None
            commits.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0
    assert put(commits, {"a": 2}).parents == (first.id,)
    assert commits.pid == pid


def test_a_worker_that_was_closed_is_not_started_again(commits: CommitWorker) -> None:
    put(commits, {"w": numbers(10)})
    commits.close()
    with pytest.raises(InvalidInputError, match="was closed"):
        put(commits, {"w": numbers(10)})
    assert commits.pid is None


def test_two_repositories_have_two_workers(commits: CommitWorker, tmp_path: Path) -> None:
    other = new_repository(tmp_path / "other")
    more = CommitWorker(other)
    pids: list[int | None] = []

    def both(commits: CommitWorker, seed: int) -> Callable[[], None]:
        def work() -> None:
            for number in range(4):
                put(commits, {"w": numbers(300, 300, seed=seed + number)})
            pids.append(commits.pid)

        return work

    threads = [threading.Thread(target=both(each, seed)) for each, seed in ((commits, 0), (more, 100))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in pids and len(set(pids)) == 2
    require_whole(other)
    more.close()
    other.close()


def test_a_store_in_the_memory_of_this_process_is_refused() -> None:
    store = new_store()
    assert isinstance(store, MemoryStore)
    with pytest.raises(InvalidInputError, match='worker="thread"'):
        CommitWorker(on(store))
