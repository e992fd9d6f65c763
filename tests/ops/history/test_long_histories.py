"""What verbs cost does not grow with what they need not look at: counted in requests and steps, without a clock."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import Lineage
from cas_ckpt.core.refs import RefKind
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import NotFoundError
from cas_ckpt.index import history
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.history.find import find_commits, find_request
from cas_ckpt.ops.history.lineage import is_ancestor, lineage_of, merge_bases
from cas_ckpt.ops.history.log import log_commits, show_commit
from cas_ckpt.ops.history.usage import usage_rows
from cas_ckpt.ops.refs import create_branch, create_pin, delete_branch, reflog, rename_ref
from cas_ckpt.ops.retention.forget import forget_by_policy, forget_revisions
from cas_ckpt.ops.retention.policy import Candidate, Line, Policy, Retention, decide
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, new_repository, numbers
from tests.wrapped_stores import CountingStore

AT_ONCE = GcOptions(min_age_s=0, reflog_expire_s=0)
STEPS = 50
"""Steps of SQLite that are counted as one."""


def long_history(path: Path, num_commits: int, num_refs: int) -> RepositoryHandle:
    """A collected repository: one more commit was forgotten, so that there is a record of it, and is gone."""
    handle = new_repository(path)
    for number in range(num_commits + 1):
        commit(handle, {"w": numbers(600, seed=number)})
    for number in range(num_refs):
        create_branch(handle, f"run-{number}", start=f"main~{number % num_commits}")
    forget_revisions(handle, [f"main~{num_commits}"])
    collect_garbage(handle, AT_ONCE)
    handle.close()
    index = str(path / INDEX_PATH)
    return RepositoryHandle.on_store(CountingStore(FileStore(path)), index_url=index)


@contextmanager
def counted(handle: RepositoryHandle) -> Iterator[dict[str, int]]:
    """Requests to the store and steps of SQLite inside the block."""
    found = {"requests": 0, "steps": 0}

    def step() -> None:
        found["steps"] += 1

    @event.listens_for(handle.index._database.engine, "before_cursor_execute")
    def watch(_: Any, cursor: Any, *__: Any) -> None:
        cursor.connection.set_progress_handler(step, STEPS)

    store: Any = handle.store
    before = store.num_calls
    yield found
    found["requests"] = store.num_calls - before
    event.remove(handle.index._database.engine, "before_cursor_execute", watch)


def branch_at_main(handle: RepositoryHandle) -> None:
    create_branch(handle, "new", start="main")


def branch_near_main(handle: RepositoryHandle) -> None:
    create_branch(handle, "new", start="main~3")


def branch_at_its_id(handle: RepositoryHandle) -> None:
    create_branch(handle, "new", start=resolve(handle, "main").hex())


def pin_of_a_branch(handle: RepositoryHandle) -> None:
    create_pin(handle, "run-2", name="new")


def rename_of_a_branch(handle: RepositoryHandle) -> None:
    rename_ref(handle, RefKind.BRANCH, "run-2", "new")


@pytest.mark.parametrize(
    "verb", [branch_at_main, branch_near_main, branch_at_its_id, pin_of_a_branch, rename_of_a_branch]
)
def test_naming_a_commit_near_a_head_looks_at_no_other_ref_and_no_other_commit(
    tmp_path: Path, verb: Callable[[RepositoryHandle], None]
) -> None:
    cost = []
    for name, num_commits, num_refs in (("short", 8, 4), ("long", 40, 60)):
        handle = long_history(tmp_path / name, num_commits, num_refs)
        handle.begin_writing()  # once a handle: compares the index with the packs
        with counted(handle) as found:
            verb(handle)
        cost.append(found)
    assert cost[0]["requests"] == cost[1]["requests"]
    assert cost[1]["steps"] <= cost[0]["steps"] + 5


def test_of_a_commit_far_from_all_heads_the_graph_is_read_once_a_handle(tmp_path: Path) -> None:
    handle = long_history(tmp_path / "repo", 90, 12)
    old = resolve(handle, "main~85").hex()
    create_branch(handle, "first", start=old)
    with counted(handle) as found:
        create_branch(handle, "second", start=old)
    with counted(handle) as near:
        create_branch(handle, "third", start="main")
    assert found["requests"] <= near["requests"] + 4  # the default branch and gc/state are read in vain


def test_what_was_kept_before_a_collection_is_not_believed_after_it(tmp_path: Path) -> None:
    handle = long_history(tmp_path / "repo", 3, 1)
    for number in range(3):
        commit(handle, {"w": numbers(600, seed=100 + number)}, branch="run-0")
    side = resolve(handle, "run-0~1").hex()
    create_branch(handle, "keeps", start=side)
    other = RepositoryHandle.open(tmp_path / "repo")
    delete_branch(other, "keeps", force=True)
    delete_branch(other, "run-0", force=True)
    collect_garbage(other, AT_ONCE)
    with pytest.raises(NotFoundError):
        create_branch(handle, "again", start=side)


LAST: dict[str, Callable[[RepositoryHandle], object]] = {
    "log of a key": lambda handle: list(log_commits(handle, ["main"], keys="w", limit=3)),
    "log of messages": lambda handle: list(log_commits(handle, ["main"], grep=["."], limit=3)),
    "reflog": lambda handle: reflog(handle, "main", limit=3),
    "find of a key": lambda handle: find_commits(handle, find_request(keys="w"), limit=3),
    "find of a dtype": lambda handle: find_commits(handle, find_request(dtype="float32"), limit=3),
    "merge base": lambda handle: merge_bases(handle, ["main~2", "main"]),
    "ancestor": lambda handle: (is_ancestor(handle, "main~3", "main"), is_ancestor(handle, "main", "main~3")),
}
"""Questions about the end of a history."""


def test_what_is_asked_of_the_end_of_a_history_costs_the_same_however_long_it_is(tmp_path: Path) -> None:
    new_repository(tmp_path / "repo").close()
    store = CountingStore(FileStore(tmp_path / "repo"))
    handle = RepositoryHandle.on_store(store, index_url=str(tmp_path / "repo" / INDEX_PATH))
    steps: dict[str, list[int]] = {name: [] for name in LAST}
    for num_commits in (150, 150):
        for number in range(num_commits):
            commit(handle, {"w": numbers(4, seed=number)}, message="m")
        for name, question in LAST.items():
            with counted(handle) as found:
                question(handle)
            steps[name].append(found["steps"])
    grown = {name: (short, long) for name, (short, long) in steps.items() if long > short + 20}
    assert grown == {}  # steps are of 50 of SQLite's; a row of the graph takes ten of these


def statements_of(handle: RepositoryHandle) -> list[str]:
    """What SQLite is asked from now on."""
    found: list[str] = []
    event.listen(handle.index._database.engine, "checkout", lambda driver, *_: driver.set_trace_callback(found.append))
    return found


def test_a_ref_far_behind_is_found_by_one_question(tmp_path: Path) -> None:
    handle = long_history(tmp_path / "repo", 40, 1)
    wanted = [row.digest for row in history.log(handle.index, [resolve(handle, "main")])]
    assert [resolve(handle, f"main~{back}") for back in range(41)] == wanted
    statements = statements_of(handle)
    resolve(handle, "main~39")
    assert len(statements) == 3  # BEGIN, the question, and the end
    with pytest.raises(NotFoundError, match="history begins after 40"):
        resolve(handle, "main~41")


def test_du_by_branch_asks_no_more_questions_for_more_branches(tmp_path: Path) -> None:
    counts = []
    for name, num_refs in (("few", 3), ("many", 40)):
        handle = long_history(tmp_path / name, 8, num_refs)
        statements = statements_of(handle)
        usage_rows(handle, "branch")
        counts.append(len(statements))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("measure", [True, False])
def test_a_dry_run_of_forget_reads_each_ref_once(tmp_path: Path, measure: bool) -> None:
    requests = []
    for name, num_refs in (("few", 3), ("many", 16)):
        handle = long_history(tmp_path / name, 20, num_refs)
        with counted(handle) as found:
            report = forget_by_policy(handle, Retention(Policy(keep_last=1)), dry_run=True, measure=measure)
        assert report.forgotten and bool(report.freed_bytes) == measure
        requests.append(found["requests"])
    assert requests[1] - requests[0] == 16 - 3


def calls_in(run: Callable[[], object]) -> int:
    """Calls of functions, and resumed generators, while it runs."""
    found = 0

    def watch(_: Any, event: str, __: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def test_lineage_is_followed_until_all_edges_are_found(tmp_path: Path) -> None:
    calls = []
    for num_commits in (20, 120):
        handle = new_repository(tmp_path / str(num_commits))
        for number in range(num_commits):
            commit(handle, {"w": number})
        commit(handle, {"w": -1}, lineage=[Lineage("merged-from", "main~2")])
        lineage_of(handle, "main")  # imports, and compiles its questions
        calls.append(calls_in(lambda handle=handle: lineage_of(handle, "main")))  # type: ignore[misc]
        assert len(lineage_of(handle, "main").origins) == len(lineage_of(handle, "main~3").descendants) == 1
    assert calls[1] - calls[0] < 100 * 10  # all commits are read: one of a pack that is not known may have an edge


def test_a_summary_of_a_state_reads_no_row_of_its_entries(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    for num_keys in (400, 4000):
        commit(handle, {"model": {f"layers.{number}": number for number in range(num_keys)}})
    show_commit(handle, "main")  # imports, and compiles its questions
    few, many = (calls_in(lambda name=name: show_commit(handle, name)) for name in ("main~1", "main"))  # type: ignore[misc]
    assert [part.num_entries for part in show_commit(handle, "main").parts] == [4000]
    assert many - few < 3600 / 2  # of some for each page


def test_one_more_branch_of_a_long_history_is_as_many_steps_of_forget_as_it_keeps_commits() -> None:
    ids = [Digest(number.to_bytes(32, "big")) for number in range(400)]
    parents = [(), *[(one,) for one in ids[:-1]]]
    commits = [Candidate(one, those, time_us=n) for n, (one, those) in enumerate(zip(ids, parents, strict=True))]
    calls = []
    for num_lines in (5, 105):
        lines = [Line(f"run-{number}", ids[-1 - number], Policy(keep_last=3)) for number in range(num_lines)]
        calls.append(calls_in(lambda lines=lines: decide(commits, lines, now_us=1000)))  # type: ignore[misc]
    assert calls[1] - calls[0] < 100 * 200  # 100 more lines; each led to 300 commits or more


def test_fsck_reads_a_small_pack_once(tmp_path: Path) -> None:
    costs = []
    for name, num_commits in (("short", 5), ("long", 25)):
        handle = long_history(tmp_path / name, num_commits, 3)
        for number in range(num_commits):
            commit(handle, {"w": numbers(600, seed=500 + number)})
        num_packs = sum(1 for _ in handle.store.list("packs/"))
        with counted(handle) as found:
            report = check_open(handle)
        assert not report.problems
        costs.append((num_packs, found["requests"]))
    assert costs[1][0] > costs[0][0] + 30
    assert costs[1][1] - costs[0][1] == costs[1][0] - costs[0][0]
