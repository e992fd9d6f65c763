"""Plans of commits for ranks that do not exist: made, proven, kept, and refused before any read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, update

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import CorruptionError, InvalidInputError, MismatchError, NotFoundError
from cas_ckpt.index.schema import PLAN_RANKS, PLANS
from cas_ckpt.layout.holdings import PLANNER_VERSION
from cas_ckpt.layout.restore_plan import PlanSummary
from cas_ckpt.layout.target_layout import TargetLayout, parse_layout
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.state import Container, TensorItem
from cas_ckpt.ops.checkout.restores import (
    EVERY_RANK,
    as_json,
    chunked_tensors,
    compare_plans,
    kept_plans,
    plan_checkout,
    read_json,
)
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, new_repository, numbers, tensor
from tests.wrapped_stores import CountingStore


def weight(*shape: int, seed: int = 0) -> TensorItem:
    """A tensor of torch."""
    return tensor(numbers(*shape, seed=seed), flavor="torch")


STATE: dict[str, Any] = {
    "model": {"wq.weight": weight(1024, 1024), "wo.weight": weight(1024, 1024, seed=1), "norm.weight": weight(1024)},
    "small": numbers(3),
    "step": 7,
}


@pytest.fixture
def handle(tmp_path: Path) -> RepositoryHandle:
    """A repository with one commit."""
    made = new_repository(tmp_path / "repo")
    commit(made, STATE, message="first")
    return made


def told(summary: PlanSummary) -> dict[str, Any]:
    return dataclasses.asdict(dataclasses.replace(summary, extents_per_chunk=None))


def test_a_plan_counts_what_is_stored_in_chunks(handle: RepositoryHandle) -> None:
    report = plan_checkout(handle, "main", parse_layout("dp=4,tp=2"))
    placements = {shape.key: " ".join(shape.placements) for shape in report.shapes}
    assert placements == {
        "model/norm.weight": "S(0) R",
        "model/wo.weight": "S(0) S(1)",
        "model/wq.weight": "SS(0,2) S(0)",
    }
    summary = report.summary
    assert (summary.world_size, summary.num_tensors, summary.num_templates) == (8, 3, 3)
    assert summary.chunk_bytes == 2 * 4 * 1024 * 1024 + 4096
    assert summary.wanted_bytes == summary.chunk_bytes + 4096  # the norm has replicas over tp
    assert summary.read_amplification == 1
    assert summary.extents_per_chunk == 1


def test_the_same_question_is_answered_from_the_index(handle: RepositoryHandle) -> None:
    target = parse_layout("dp=4,tp=2", {"**/norm*": ["R", "R"]})
    first = plan_checkout(handle, "main", target)
    again = plan_checkout(handle, "main", parse_layout("dp=4,tp=2", {"**/norm*": ["R", "R"]}))
    assert (first.reused, again.reused) == (False, True)
    assert dataclasses.replace(again, reused=False) == first
    assert not plan_checkout(handle, "main", parse_layout("dp=4,tp=2")).reused


def test_a_kept_plan_belongs_to_the_state_and_not_to_the_commit(handle: RepositoryHandle) -> None:
    plan_checkout(handle, "main", parse_layout("dp=2"))
    commit(handle, STATE, message="the same state again")
    assert plan_checkout(handle, "main", parse_layout("dp=2")).reused
    commit(handle, STATE | {"step": 8}, message="another state")
    assert not plan_checkout(handle, "main", parse_layout("dp=2")).reused


def test_kept_plans_are_listed_by_state(handle: RepositoryHandle) -> None:
    for mesh in ("dp=2", "dp=4"):
        plan_checkout(handle, "main", parse_layout(mesh))
    commit(handle, STATE | {"step": 8}, message="another state")
    plan_checkout(handle, "main", parse_layout("dp=8"))
    assert sorted(report.mesh for report in kept_plans(handle)) == ["dp=2", "dp=4", "dp=8"]
    assert [report.mesh for report in kept_plans(handle, "main~1")] == ["dp=2", "dp=4"]
    heads = [resolve(handle, revision).hex() for revision in ("main", "main~1")]
    assert {report.mesh: heads.index(report.commit) for report in kept_plans(handle)} == {
        "dp=2": 1,
        "dp=4": 1,
        "dp=8": 0,
    }


def test_several_targets_are_compared_and_planned_where_that_is_not_kept(handle: RepositoryHandle) -> None:
    targets = [parse_layout(mesh) for mesh in ("ddp=8", "dp=4", "dp=2,tp=2", "dp=4")]
    alone = plan_checkout(handle, "main", targets[1])
    found = compare_plans(handle, "main", targets)
    assert {report.mesh: report.reused for report in found} == {"dp=4": True, "ddp=8": False, "dp=2,tp=2": False}
    seconds = [report.summary.estimated_s for report in found]
    assert seconds == sorted(seconds)
    assert dataclasses.replace(alone, reused=True) in found
    again = compare_plans(handle, "main", targets)
    assert [dataclasses.replace(report, reused=True) for report in found] == again
    assert compare_plans(handle, "main") == again
    assert [report.mesh for report in compare_plans(handle, "main", most_ranks=4)] == [
        report.mesh for report in again if report.mesh != "ddp=8"
    ]
    slow = compare_plans(handle, "main", network_bandwidth=1.0, storage_bandwidth=1e15)
    assert [report.summary.network_bandwidth for report in slow] == [1.0] * 3
    assert slow == sorted(slow, key=lambda report: report.summary.network_s)


def test_nothing_to_compare_is_said(handle: RepositoryHandle) -> None:
    with pytest.raises(NotFoundError, match="there is no plan to compare: name meshes"):
        compare_plans(handle, "main")
    with pytest.raises(NotFoundError, match="no plan that fits 0 ranks"):
        compare_plans(handle, "main", [parse_layout("dp=2")], most_ranks=0)
    with pytest.raises(NotFoundError):
        compare_plans(handle, "nowhere", [parse_layout("dp=2")])
    with pytest.raises(InvalidInputError, match="above 0"):
        compare_plans(handle, "main", [parse_layout("dp=2")], network_bandwidth=-1)
    assert kept_plans(handle) == []


def test_plans_that_cannot_be_kept_are_compared_all_the_same(handle: RepositoryHandle) -> None:
    targets = [parse_layout(mesh) for mesh in ("dp=2", "ddp=8", "dp=8")]
    plan_checkout(handle, "main", targets[1])
    url = handle.store.url
    handle.close()
    reader = RepositoryHandle.open(url, read_only=True)
    found = compare_plans(reader, "main", targets)
    assert {report.mesh: report.reused for report in found} == {"dp=2": False, "ddp=8": True, "dp=8": False}
    assert found == sorted(found, key=lambda report: report.summary.estimated_s)
    assert [report.mesh for report in kept_plans(reader)] == ["ddp=8"]
    reader.close()


def test_bandwidths_are_of_the_question_and_not_of_the_kept_plan(handle: RepositoryHandle) -> None:
    slow = plan_checkout(handle, "main", parse_layout("dp=2"), storage_bandwidth=1e6, network_bandwidth=1e6)
    fast = plan_checkout(handle, "main", parse_layout("dp=2"), storage_bandwidth=1e9, network_bandwidth=1e9)
    assert fast.reused
    assert slow.summary.storage_s == pytest.approx(slow.summary.read_bytes.most / 1e6)
    assert slow.summary.estimated_s == pytest.approx(1000 * fast.summary.estimated_s)
    with pytest.raises(InvalidInputError, match="above 0"):
        plan_checkout(handle, "main", parse_layout("dp=2"), storage_bandwidth=0)


def test_a_plan_reads_no_chunk(tmp_path: Path) -> None:
    store = CountingStore(FileStore(tmp_path / "repo"))
    writer = new_repository(tmp_path / "repo")
    commit(writer, STATE, message="first")
    writer.close()
    handle = RepositoryHandle.on_store(store, index_url=str(tmp_path / "repo" / "index" / "index.sqlite"))
    store.reset()
    plan_checkout(handle, "main", parse_layout("dp=4"))
    assert 0 < store.bytes_read < 20_000


def test_a_read_only_repository_is_planned_without_keeping(handle: RepositoryHandle) -> None:
    url = handle.store.url
    handle.close()
    reader = RepositoryHandle.open(url, read_only=True)
    assert not plan_checkout(reader, "main", parse_layout("dp=2")).reused
    assert kept_plans(reader) == []
    reader.close()


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"model/wq*": ["S(2)", "R"]}, MismatchError, r"model/wq.weight: placement S\(2\).*\[0:1024, 0:1024\]"),
        ({"no/such/key": ["R", "R"]}, InvalidInputError, "no/such/key.*matches no tensor"),
        ({"model/**": ["R"]}, InvalidInputError, "1 placements for a mesh of 2"),
    ],
)
def test_a_target_that_cannot_be_is_refused(
    handle: RepositoryHandle, rules: dict[str, list[str]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_checkout(handle, "main", parse_layout("dp=2,tp=2", rules))
    assert kept_plans(handle) == []


def test_an_unknown_commit_is_refused(handle: RepositoryHandle) -> None:
    with pytest.raises(NotFoundError):
        plan_checkout(handle, "nowhere", parse_layout("dp=2"))


def test_a_report_goes_through_json(handle: RepositoryHandle) -> None:
    report = plan_checkout(handle, "main", parse_layout("dp=3", {"**/norm*": ["R"]}))
    text = json.dumps(as_json(report))
    assert read_json(text, "f") == [report]
    assert read_json(f"[{text}, {text}]", "f") == [report, report]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"summary": {}}', '{"summary": []}', "null"])
def test_a_file_that_holds_no_plan_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="plan.json: not a restore plan"):
        read_json(text, "plan.json")


def test_a_kept_plan_that_was_damaged_is_damage_of_the_index(handle: RepositoryHandle) -> None:
    target = TargetLayout(("dp",), (2,))
    plan_checkout(handle, "main", target)
    handle.index.write(lambda connection: connection.execute(update(PLANS).values(rules="[")))
    with pytest.raises(CorruptionError, match="index rebuild"):
        plan_checkout(handle, "main", target)


def test_a_kept_plan_that_lacks_rows_is_made_again(handle: RepositoryHandle) -> None:
    target = TargetLayout(("dp",), (2,))
    first = plan_checkout(handle, "main", target)
    handle.index.write(lambda connection: connection.execute(delete(PLAN_RANKS).where(PLAN_RANKS.c.rank == 1)))
    assert kept_plans(handle) == []
    assert plan_checkout(handle, "main", target) == first
    assert [report.mesh for report in kept_plans(handle)] == ["dp=2"]


def test_a_plan_of_another_planner_is_not_listed_nor_compared(handle: RepositoryHandle) -> None:
    old, new = parse_layout("dp=2"), parse_layout("dp=4")
    plan_checkout(handle, "main", old)
    other = update(PLANS).values(planner_version=PLANNER_VERSION - 1, target=b"of that version" + bytes(17))
    handle.index.write(lambda connection: connection.execute(other))
    assert kept_plans(handle) == kept_plans(handle, "main") == []
    with pytest.raises(NotFoundError, match="there is no plan to compare"):
        compare_plans(handle, "main")
    assert not plan_checkout(handle, "main", old).reused
    plan_checkout(handle, "main", new)
    assert [report.mesh for report in kept_plans(handle)] == ["dp=2", "dp=4"]
    assert [report.mesh for report in compare_plans(handle, "main")] == ["dp=4", "dp=2"]


@pytest.mark.parametrize("bandwidth", [0, -1, float("nan"), float("inf")])
def test_a_bandwidth_is_a_number_of_bytes(handle: RepositoryHandle, bandwidth: float) -> None:
    for name in ("storage_bandwidth", "network_bandwidth"):
        with pytest.raises(InvalidInputError, match="bandwidth is"):
            plan_checkout(handle, "main", parse_layout("dp=2"), **{name: bandwidth})


def test_what_a_layout_says_nothing_about_is_planned_as_it_is_restored(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    own = {rank: Container("dict", {"state": weight(2000, seed=rank)}) for rank in range(2)}
    state = {
        "array": numbers(4096), "weight": weight(4000), "long": "x" * 100_000,
        "rng": Container("ranks", own, {"world_size": 2}),
        "sparse": Container("sparse_coo", {"values": weight(3000)}, {"shape": [5000]}),
    }  # fmt: skip
    commit(handle, state, message="first")
    root = Digest(bytes.fromhex(plan_checkout(handle, "main", parse_layout("dp=2")).root))
    owners = {each.key: (each.owner, each.owners) for each in chunked_tensors(handle, root)}
    assert owners == {
        "array": (EVERY_RANK, 0), "rng/0/state": (0, 2), "rng/1/state": (1, 2), "sparse/values": (EVERY_RANK, 0),
        "weight": (None, 0),
    }  # fmt: skip
    placed = {shape.key: shape.placements for shape in plan_checkout(handle, "main", parse_layout("dp=2")).shapes}
    assert placed == {
        "array": ("R",),
        "rng/0/state": (),
        "rng/1/state": (),
        "sparse/values": ("R",),
        "weight": ("S(0)",),
    }
    other = plan_checkout(handle, "main", parse_layout("dp=4", {"array": ["S(0)"]}))
    assert {shape.key: shape.placements for shape in other.shapes} == {
        "array": ("S(0)",), "sparse/values": ("R",), "weight": ("S(0)",),
    }  # fmt: skip


def test_keys_that_are_not_unicode_are_planned(handle: RepositoryHandle) -> None:
    commit(handle, {"a\ud800\0": weight(4096)})
    assert plan_checkout(handle, "main", parse_layout("dp=2")).summary.metadata_bytes.most > 0
