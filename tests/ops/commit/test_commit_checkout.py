"""What is committed comes back bit for bit, is stored once, and has an id of its own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cas_ckpt import limits
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import RefKind
from cas_ckpt.core.tree import decode_values, find_entry, load_tree
from cas_ckpt.errors import ConflictError, FrozenChangedError, InvalidInputError, NotFoundError, UnsupportedValueError
from cas_ckpt.index import history
from cas_ckpt.objects.spec import Box, Spec
from cas_ckpt.objects.state import TensorItem, ValueItem, walk
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.frozen import FrozenMemory
from cas_ckpt.ops.commit.request import CommitRequest
from tests.builders import commit, new_repository, numbers, same_bytes, state, stored_arrays, tensor
from tests.searches import tries

STATE = {
    "model": {"w": numbers(600, 2048), "b": numbers(700), "tiny": numbers(3)},
    "step": 5,
    "name": "run",
    "deep": {1: {"x": numbers(40, 40, seed=2)}, "list": [1, 2.5, None]},
}


ANY_ARRAY = hnp.arrays(
    st.sampled_from([np.float32, np.int8, np.complex128, np.bool_]), hnp.array_shapes(max_dims=3, max_side=40)
)
TRICKS = [
    "", "..", "a/../b", "/a", "a//b", "a/", "-x", ".hidden", "a b", "a\nb", "a\x00", "é", "x" * 201, "a.lock",
    "deadbeef" * 8, "~1", "a.ref",
]  # fmt: skip


@pytest.fixture
def repo(tmp_path: Path) -> RepositoryHandle:
    return new_repository(tmp_path / "repo")


def test_what_is_committed_comes_back_bit_for_bit(repo: RepositoryHandle) -> None:
    info = commit(repo, STATE, message="first", step=3, metrics={"loss": 1.5})
    back = stored_arrays(repo, info.root)
    assert same_bytes(back["model/w"], STATE["model"]["w"])  # type: ignore[index]
    assert same_bytes(back["deep/1/x"], STATE["deep"][1]["x"])  # type: ignore[index]
    tree = decode_values(load_tree(repo, bytes.fromhex(info.root)), read_value=lambda key, stored: b"")
    assert dict(walk(tree))["deep", "list"] == ValueItem([1, 2.5, None])
    assert (info.message, info.step, info.metrics) == ("first", 3, {"loss": 1.5})


@settings(max_examples=tries(10, 30), deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=8), ANY_ARRAY, max_size=5))
def test_any_arrays_come_back_bit_for_bit(arrays: dict[str, Any]) -> None:
    repo = init_repository("memory://")
    info = commit(repo, arrays)
    tree = load_tree(repo, bytes.fromhex(info.root))
    assert set(tree.children) == set(arrays)
    back = list(stored_arrays(repo, info.root).values())
    wanted = [arrays[str(name)] for name in tree.children]
    assert all(same_bytes(a, b) for a, b in zip(back, wanted, strict=True))


def test_an_unchanged_state_is_stored_once_and_has_the_same_root(repo: RepositoryHandle) -> None:
    first, second = commit(repo, STATE), commit(repo, STATE, step=2)
    assert first.root == second.root and first.id != second.id
    assert (second.stats.new_bytes, second.stats.num_new_chunks) == (0, 0)
    assert second.parents == (first.id,)


def test_the_root_depends_on_content_alone(tmp_path: Path) -> None:
    roots = set()
    for number, encoding in enumerate(["raw", "zstd", "planes"]):
        other = new_repository(tmp_path / encoding, encoding=encoding, pack_bytes=1 << 20)
        commit(other, {"noise": numbers(number + 1, 3000, seed=number)})
        shuffled = {name: STATE[name] for name in reversed(list(STATE))}
        weights = STATE["model"]["w"]  # type: ignore[index]
        shuffled["model"] = {"tiny": numbers(3), "w": np.asfortranarray(weights), "b": numbers(700)}
        roots.add(commit(other, shuffled, message=str(number), branch=f"b-{number}").root)
    assert len(roots) == 1


@pytest.mark.parametrize("change", ["value", "dtype", "shape", "key", "int key to str key", "int to float"])
def test_the_root_changes_with_any_content(repo: RepositoryHandle, change: str) -> None:
    base = {"t": np.zeros((40, 40), np.float32), 1: 2}
    other = {
        "value": {"t": np.ones((40, 40), np.float32), 1: 2},
        "dtype": {"t": np.zeros((40, 40), np.int32), 1: 2},
        "shape": {"t": np.zeros((1600,), np.float32), 1: 2},
        "key": {"u": np.zeros((40, 40), np.float32), 1: 2},
        "int key to str key": {"t": np.zeros((40, 40), np.float32), "1": 2},
        "int to float": {"t": np.zeros((40, 40), np.float32), 1: 2.0},
    }[change]
    assert commit(repo, base).root != commit(repo, other).root


def test_one_changed_chunk_costs_one_chunk(repo: RepositoryHandle) -> None:
    big = numbers(4, 1 << 20)
    commit(repo, {"w": big})
    big[2, 77] += 1
    assert commit(repo, {"w": big}).stats.num_new_chunks == 1


def test_equal_chunks_of_one_state_are_stored_once(repo: RepositoryHandle) -> None:
    twice = {"a": numbers(1 << 20), "b": numbers(1 << 20), "zeros": np.zeros((5, 1 << 20), np.float32)}
    info = commit(repo, twice)
    assert info.stats.num_new_chunks == 2
    assert info.stats.stored_bytes < info.stats.total_bytes / 6


def test_tied_tensors_are_hashed_once_and_remembered_as_tied(repo: RepositoryHandle) -> None:
    weights = numbers(1 << 16)
    tied = {"a": tensor(weights, identity=(("here", 1), 0)), "b": tensor(weights, identity=(("here", 1), 0))}
    untied = {"a": weights, "b": weights.copy()}
    one, two = commit(repo, tied), commit(repo, untied)
    assert one.root == two.root
    assert one.stats.total_bytes * 2 == two.stats.total_bytes


def test_long_values_are_kept_as_chunks(repo: RepositoryHandle) -> None:
    info = commit(repo, {"text": "x" * 100_000, "n": 1})
    tree = load_tree(repo, bytes.fromhex(info.root))
    back = stored_arrays(repo, info.root)["text"].tobytes()
    assert decode_values(tree, read_value=lambda key, stored: back).children["text"] == ValueItem("x" * 100_000)


# --- bad requests -----------------------------------------------------------------------


@pytest.mark.parametrize("value", ["0.5", None, True])
def test_a_metric_that_is_no_number_is_refused(repo: RepositoryHandle, value: Any) -> None:
    with pytest.raises(InvalidInputError, match="loss"):
        commit(repo, {}, metrics={"loss": value})


@pytest.mark.parametrize("name", TRICKS)
def test_a_name_that_is_a_trick_is_refused(repo: RepositoryHandle, name: str) -> None:
    with pytest.raises(InvalidInputError):
        commit(repo, {}, branch=name)


def test_a_value_that_cannot_be_expressed_is_refused_by_name_and_nothing_is_committed(repo: RepositoryHandle) -> None:
    commit(repo, {"a": 1})
    head = repo.refs.get(RefKind.BRANCH, "main").target
    with pytest.raises(UnsupportedValueError, match="deep/bad"):
        commit(repo, {"deep": {"bad": object()}})
    assert repo.refs.get(RefKind.BRANCH, "main").target == head


def test_settings_that_cannot_work_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    for settings_ in ({"encoding": "brotli"}, {"pack_bytes": 5}, {"default_branch": ".."}):
        with pytest.raises(InvalidInputError):
            new_repository(tmp_path / "repo", **settings_)
    assert not (tmp_path / "repo").exists() or not any((tmp_path / "repo").iterdir())


def test_init_on_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ConflictError, match="not an empty folder"):
        new_repository(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


# --- conflicts --------------------------------------------------------------------------


def racing(repo: RepositoryHandle, path: Path) -> TensorItem:
    other = RepositoryHandle.open(path)
    done: list[bool] = []
    weights = numbers(2000)

    class Source:
        def read(self, box: Any) -> np.ndarray[Any, Any]:
            if not done:
                done.append(True)
                commit(other, {"theirs": 1}, message="theirs")
            return weights[box.slices]

    item = tensor(weights)
    return TensorItem(item.spec, Source(), "numpy")


def test_a_commit_that_meets_another_goes_on_top_of_it(repo: RepositoryHandle, tmp_path: Path) -> None:
    commit(repo, {"a": 1}, message="base")
    ours = commit(repo, {"w": racing(repo, tmp_path / "repo")}, message="ours")
    theirs = repo.index.read(history.read_commit, bytes.fromhex(ours.parents[0]))
    if theirs is None:
        repo.sync()
        theirs = repo.index.read(history.read_commit, bytes.fromhex(ours.parents[0]))
    assert theirs is not None and theirs.message == "theirs"


def test_a_commit_that_meets_another_is_refused_on_request(repo: RepositoryHandle, tmp_path: Path) -> None:
    commit(repo, {"a": 1}, message="base")
    with pytest.raises(ConflictError, match="moved"):
        commit(repo, {"w": racing(repo, tmp_path / "repo")}, message="ours", on_conflict="raise")
    head = RepositoryHandle.open(tmp_path / "repo").refs.get(RefKind.BRANCH, "main").target
    assert head is not None
    commit(repo, {"a": 2}, message="again")


# --- frozen -----------------------------------------------------------------------------


def frozen_commit(repo: RepositoryHandle, memory: FrozenMemory, items: dict[str, Any], **request: Any) -> Any:
    return commit_tree(repo, state(items), CommitRequest(frozen="base/**", **request), memory=memory)


def frozen_state(weights: np.ndarray[Any, Any], version: int = 0) -> dict[str, Any]:
    return {"base": {"w": tensor(weights, identity=(("mem", id(weights)), version))}, "lora": numbers(600)}


class CountingReads:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.num_bytes = 0

    def read(self, box: Any) -> np.ndarray[Any, Any]:
        part = self.array[box.slices]
        self.num_bytes += part.nbytes
        return part


def test_a_frozen_tensor_is_hashed_once_and_then_sampled(repo: RepositoryHandle) -> None:
    weights = numbers(20 << 20)
    memory, source = FrozenMemory(), CountingReads(weights)
    item = TensorItem(tensor(weights).spec, source, "torch", (("mem", 1), 0))
    first = frozen_commit(repo, memory, {"base": {"w": item}})
    assert source.num_bytes == 2 * weights.nbytes  # summed, then hashed
    second = frozen_commit(repo, memory, {"base": {"w": item}})
    assert source.num_bytes == 3 * weights.nbytes + weights.nbytes // 20
    third = frozen_commit(repo, memory, {"base": {"w": item}}, frozen_check="version")
    assert first.root == second.root == third.root
    assert source.num_bytes == 3 * weights.nbytes + 2 * (weights.nbytes // 20)


def test_a_frozen_tensor_that_was_written_is_found_by_its_version(repo: RepositoryHandle) -> None:
    weights, memory = numbers(3, 1 << 20), FrozenMemory()
    frozen_commit(repo, memory, frozen_state(weights))
    weights[1, 5] += 1
    with pytest.raises(FrozenChangedError, match="base/w"):
        frozen_commit(repo, memory, frozen_state(weights, version=1), frozen_check="version", frozen_audit=0)


@pytest.mark.parametrize("request_of", [{"frozen_check": "version", "frozen_audit": 1.0}, {"frozen_audit": 0}])
def test_a_frozen_tensor_that_was_written_behind_the_counter_is_found_by_its_bytes(
    repo: RepositoryHandle, request_of: dict[str, Any]
) -> None:
    weights, memory = numbers(3, 1 << 20), FrozenMemory()
    frozen_commit(repo, memory, frozen_state(weights))
    weights[1, 5] += 1
    with pytest.raises(FrozenChangedError, match="base/w"):
        frozen_commit(repo, memory, frozen_state(weights), **request_of)


def test_a_frozen_pattern_that_matches_nothing_is_refused(repo: RepositoryHandle) -> None:
    with pytest.raises(InvalidInputError, match="matches no tensor"):
        frozen_commit(repo, FrozenMemory(), {"lora": numbers(600)})


def test_the_key_that_is_missing_is_named(repo: RepositoryHandle) -> None:
    root = bytes.fromhex(commit(repo, STATE).root)
    with pytest.raises(NotFoundError, match="model/nope"):
        find_entry(repo, root, "model/nope")


class _NeverTheSame:
    """A tensor that somebody writes all the time: every look at it finds other numbers."""

    num_reads = 0

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        self.num_reads += 1
        return np.full(box.sizes, self.num_reads, np.float32)


@pytest.mark.parametrize("before", [{}, {"other": numbers(1 << 16)}], ids=["a first commit", "a later commit"])
def test_a_tensor_that_changes_during_the_commit_is_stored_under_the_id_of_what_was_stored(
    tmp_path: Path, before: dict[str, Any]
) -> None:
    handle = new_repository(tmp_path / "repo")
    if before:
        commit(handle, before)
    info = commit(handle, {"w": TensorItem(Spec("float32", (1 << 20,)), _NeverTheSame(), "numpy")})
    assert stored_arrays(handle, info.root)["w"].shape == (1 << 20,)


def test_chunks_that_turn_out_to_be_stored_give_their_buffers_back(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    same = numbers(2000)
    # New and known in turn: every known one is copied first, because the one before it was new.
    items = {f"{at:03}": same.copy() if at % 2 else numbers(2000, seed=at + 1) for at in range(60)}

    def alone() -> None:
        with limits(num_threads=1):
            commit(handle, items)

    committing = threading.Thread(target=alone, daemon=True)
    committing.start()
    committing.join(30)
    assert not committing.is_alive(), "the commit waits for a buffer that nobody gives back"
