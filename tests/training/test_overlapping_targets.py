"""Targets that share memory are refused before anything is touched, unless they are one tensor."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cas_ckpt import MismatchError, Repository, StateDict
from cas_ckpt.errors import PeerError
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.training.capture.tensors import overlaps_itself
from cas_ckpt.training.restore import draft
from cas_ckpt.training.restore.draft import memory_of_array, memory_of_tensor, overlapping
from cas_ckpt.training.restore.restore import plan_restore
from tests.thread_peers import run_ranks
from tests.training.roundtrip import checkout, commit, failure_of


def refused(target: dict[str, Any]) -> str:
    """The message of the refusal to restore random values into `target`, which stays as it was."""
    before = commit(target)
    values = {name: np.random.default_rng(0).random(np.shape(value)) for name, value in target.items()}
    source = {
        name: torch.from_numpy(values[name]).to(value.dtype) if isinstance(value, torch.Tensor)
        else values[name].astype(value.dtype)
        for name, value in target.items()
    }  # fmt: skip
    error = failure_of(lambda: plan_restore(target, commit(source)))
    assert isinstance(error, MismatchError)
    assert commit(target) == before
    return str(error)


def test_parts_of_one_buffer_that_overlap_are_refused() -> None:
    buffer = torch.zeros(1500)
    words = refused({"a": buffer[:1000], "b": buffer[500:]})
    assert "a and b overlap in the target's memory" in words


@pytest.mark.parametrize(
    "second",
    [
        lambda buffer: buffer.view(10, 100),
        lambda buffer: buffer.view(torch.int32),
        lambda buffer: buffer.flip(0).flip(0).set_(buffer.untyped_storage(), 0, (500,), (2,)),
        lambda buffer: buffer[999:],
        lambda buffer: buffer.view(10, 100).t(),
        lambda buffer: buffer.numpy()[::-1],
        lambda buffer: buffer.numpy().reshape(100, 10)[3:5, 2:4],
        lambda buffer: buffer.detach()[10:20],
    ],
    ids=["shape", "dtype", "every second", "last element", "transposed", "reversed", "tile", "inside"],
)
def test_other_views_of_the_same_memory_are_refused(second: Any) -> None:
    buffer = torch.zeros(1000)
    assert "a and b overlap" in refused({"a": buffer, "b": second(buffer)})


def test_one_memory_under_two_storages_is_one_tensor_if_the_commit_says_so() -> None:
    array = np.zeros(1000, np.float32)
    target = {"array": array, "tensor": torch.from_numpy(array)}
    with pytest.raises(MismatchError, match="array and tensor are one tensor in the target"):
        plan_restore(target, commit({"array": np.zeros(1000, np.float32), "tensor": torch.ones(1000)}))
    checkout(commit({"array": np.ones(1000, np.float32), "tensor": torch.ones(1000)}), target)
    assert array.sum() == 1000


def test_autograd_hears_of_a_restore_by_each_tensor_over_one_memory() -> None:
    array, weight = np.zeros(9, np.float32), torch.ones(9, requires_grad=True)
    target = {"array": array, "one": torch.from_numpy(array), "other": torch.from_numpy(array)}
    products = [(weight * target[name]).sum() for name in ("one", "other")]
    ones = torch.ones(9)
    checkout(commit({"array": ones.numpy(), "one": ones, "other": ones}), target)
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_views_that_interleave_without_sharing_an_element_are_filled() -> None:
    buffer, matrix = torch.zeros(1000), np.zeros((64, 64))
    target = {
        "even": buffer[::2], "odd": buffer[1::2], "upper": matrix[:32, :32], "right": matrix[:32, 32:],
        "columns": [matrix[32:, at] for at in range(0, 64, 2)], "others": [matrix[32:, at] for at in range(1, 64, 2)],
    }  # fmt: skip
    source = {name: value for name, value in zip(target, (torch.ones(500), torch.ones(500)), strict=False)}
    source |= {"upper": np.ones((32, 32)), "right": np.ones((32, 32))}
    source |= {name: [np.ones(32)] * 32 for name in ("columns", "others")}
    checkout(commit(source), target)
    assert buffer.sum() == 1000
    assert matrix.sum() == 64 * 64


def test_an_overlap_between_an_object_and_a_loose_tensor_is_refused() -> None:
    model = torch.nn.Linear(4, 4)
    target = {"model": model, "row": model.weight.detach()[1]}
    with pytest.raises(MismatchError, match="model/weight and row overlap"):
        plan_restore(target, commit({"model": torch.nn.Linear(4, 4), "row": torch.ones(4)}))
    shared = torch.zeros(8)
    objects = {"p": StateDict(a=shared[:5]), "q": StateDict(a=shared[3:])}
    with pytest.raises(MismatchError, match="p/a and q/a overlap"):
        plan_restore(objects, commit({"p": StateDict(a=torch.ones(5)), "q": StateDict(a=torch.ones(5))}))


def test_overlaps_are_refused_on_several_ranks_before_any_of_them_is_touched() -> None:
    url = "memory://overlapping-on-ranks"
    with Repository.init(url, group=None) as repo:
        repo.commit({"a": torch.ones(1000), "b": torch.full((1000,), 2.0)})

    def work(peers: Peers) -> Any:
        buffer = torch.zeros(2000)
        second = buffer[500:1500] if peers.rank == 1 else buffer[1000:]
        with Repository.open(url, group=peers) as repo:
            try:
                repo.checkout(into={"a": buffer[:1000], "b": second})
            except (MismatchError, PeerError) as error:
                return type(error).__name__, str(error), float(buffer.sum())
        return None

    found = run_ranks(3, work, timeout_s=20)
    assert [kind for kind, _, _ in found] == ["PeerError", "MismatchError", "PeerError"]
    assert all("a and b overlap" in words and total == 0 for _, words, total in found)


def test_every_overlap_is_found_and_nothing_else_and_what_is_restored_has_its_own_bytes() -> None:
    drawn, outcomes = random.Random(7), Counter[str]()
    for _ in range(150):
        buffer = np.zeros(drawn.choice((24, 64, 200)), np.uint8)
        views = _views(buffer, drawn)
        taken = [_bytes_of(view, buffer) for view in views]
        shared = [pair for pair in itertools.combinations(range(len(views)), 2) if taken[pair[0]] & taken[pair[1]]]
        memories = [each for at, view in enumerate(views) for each in _memory(view, str(at))]
        found = {int(each.name) for each in itertools.chain.from_iterable(overlapping(memories))}
        assert found == set(itertools.chain.from_iterable(shared))

        contents = [drawn.randbytes(view.nbytes) for view in views]
        if _reading(views[-1])[0] == _reading(views[0])[0] and drawn.random() < 0.6:
            contents[-1] = contents[0]
        source = [_filled(view, content) for view, content in zip(views, contents, strict=True)]
        may_be = all(_reading(views[a]) == _reading(views[b]) and contents[a] == contents[b] for a, b in shared)
        before = buffer.tobytes()
        try:
            checkout(commit({"views": dict(enumerate(source))}), {"views": dict(enumerate(views))})
        except MismatchError:
            assert not may_be
            assert buffer.tobytes() == before
            outcomes["refused"] += 1
        else:
            assert may_be
            assert [_content(view) for view in views] == contents
            outcomes["tied" if shared else "apart"] += 1
    assert min(outcomes[each] for each in ("refused", "tied", "apart")) > 10


_ARRAYS = ("u1", ">i2", "S3", "f4", "f8", "m8[s]")
_TENSORS = (torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.complex64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _views(buffer: Any, drawn: random.Random) -> list[Any]:
    """Arrays and tensors of any strides in `buffer`, none of which overlaps itself.

    The last may be the first once more, or its elements in another order.
    """
    views: list[Any] = []
    while len(views) < 2 or drawn.random() < 0.5:
        kind: Any = drawn.choice(_TENSORS) if drawn.random() < 0.5 else np.dtype(drawn.choice(_ARRAYS))
        shape = [drawn.choice((0, 1, 2, 2, 3, 5)) for _ in range(drawn.randint(0, 3))]
        steps = [drawn.choice((1, 2, 3, 4, 6)) * drawn.choice((1, kind.itemsize)) for _ in shape]
        if isinstance(kind, torch.dtype):
            tensor = torch.from_numpy(buffer).view(kind)
            steps = [-(-step // kind.itemsize) for step in steps]
            room = len(tensor) - sum(step * (size - 1) for step, size in zip(steps, shape, strict=True) if size)
            if room > 0 and not overlaps_itself(shape, steps):
                views.append(tensor.as_strided(shape, steps, drawn.randrange(room)))
            continue
        steps = [step * drawn.choice((1, -1)) for step in steps]
        reach = [step * (size - 1) for step, size in zip(steps, shape, strict=True) if size]
        below, above = -sum(each for each in reach if each < 0), sum(each for each in reach if each > 0) + kind.itemsize
        if below + above <= len(buffer) and not overlaps_itself(shape, steps, kind.itemsize):
            views.append(np.ndarray(shape, kind, buffer, drawn.randint(below, len(buffer) - above), steps))
    first = views[0]
    if drawn.random() < 0.4:
        again = first.T if first.ndim == 2 else first[...]
        if isinstance(again, torch.Tensor):
            again = again.numpy() if again.dtype in (torch.int16, torch.float32) else again
        elif again.ndim and drawn.random() < 0.3:
            again = again[::-1]
        views.append(again)
    return views


def _memory(view: Any, key: str) -> list[draft.Memory]:
    return memory_of_array(view, key) if isinstance(view, np.ndarray) else memory_of_tensor(view, key)


def _bits(view: Any) -> Any:
    """The elements of `view` as an array of raw items, the same memory."""
    if isinstance(view, torch.Tensor):
        view = view.view(_BITS[view.itemsize]).numpy()
    return view.view(f"V{view.itemsize}")


def _content(view: Any) -> bytes:
    return _bits(view).tobytes()


def _bytes_of(view: Any, buffer: Any) -> set[int]:
    """The places in `buffer` of the bytes of `view`, found by writing them."""
    buffer[:] = 0
    _bits(view)[...] = np.void(b"\xff" * view.itemsize)
    return set(np.flatnonzero(buffer).tolist())


def _filled(view: Any, content: bytes) -> Any:
    """A new array or tensor as `view`, that holds `content`."""
    made = (np if isinstance(view, np.ndarray) else torch).empty(tuple(view.shape), dtype=view.dtype)
    _bits(made)[...] = np.frombuffer(content, f"V{view.itemsize}").reshape(view.shape)
    return made


def _reading(view: Any) -> Any:
    """Equal for two views of the same elements in one order."""
    bits, name = _bits(view), str(view.dtype).removeprefix("torch.")
    steps = [step for step, size in zip(bits.strides, bits.shape, strict=True) if size > 1]
    return (bits.shape, name), steps, bits.__array_interface__["data"][0]


@pytest.mark.parametrize("kind", ["rows", "columns", "tiles", "even and odd", "of three dimensions"])
def test_many_targets_in_one_buffer_take_no_comparison_of_pairs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.zeros(2000, 2000)
    views = {
        "rows": list(matrix),
        "columns": list(matrix.t()),
        "tiles": [tile for band in matrix.split(50) for tile in band.split(50, dim=1)],
        "even and odd": [half for row in matrix for half in (row[::2], row[1::2])],
        "of three dimensions": list(torch.zeros(8, 50, 2000)[:, :20].unbind(2)),
    }[kind]
    monkeypatch.setattr(draft, "MAX_PAIRS", 0)  # what would be compared counts as overlapping
    assert not list(overlapping([each for view in views for each in memory_of_tensor(view, kind)]))


def test_an_expanded_view_takes_the_memory_of_its_element_alone() -> None:
    buffer = torch.zeros(9)
    views = {"expanded": buffer[4:5].expand(5, 3), "even": buffer[::2], "odd": buffer[1::2], "rest": buffer[5:]}
    pairs = overlapping([each for name, view in views.items() for each in memory_of_tensor(view, name)])
    assert {frozenset(each.name for each in pair) for pair in pairs} == {
        frozenset({"even", "expanded"}), frozenset({"even", "rest"}), frozenset({"odd", "rest"}),
    }  # fmt: skip


def test_each_of_many_windows_that_overlap_is_found_without_all_their_pairs() -> None:
    buffer = torch.zeros(20_000)
    windows = [buffer[at : at + 9_000] for at in range(1_000)]
    pairs = list(overlapping([each for at, view in enumerate(windows) for each in memory_of_tensor(view, str(at))]))
    assert len({each.name for pair in pairs for each in pair}) == len(windows)
    assert len(pairs) < 2 * len(windows)


def test_a_target_over_a_file_that_may_not_be_written_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(4096))
    mapped = np.memmap(tmp_path / "data", np.float32, "r")
    with pytest.warns(UserWarning, match="not writable"):
        tensor = torch.from_numpy(mapped)
    first = torch.zeros(2)
    tree = commit({"first": torch.ones(2), "w": torch.ones(1024)})
    for target in (tensor, torch.nn.Parameter(tensor), mapped):
        with pytest.raises(MismatchError, match="w: the .*read-only"):
            plan_restore({"first": first, "w": target}, tree)
    assert first.sum() == 0
    holder = StateDict(w=tensor)
    checkout(commit({"p": StateDict(w=torch.ones(1024))}), {"p": holder})
    assert holder["w"].sum() == 1024


def _shared_buffers() -> dict[str, Any]:
    buffer, matrix, tied = torch.zeros(8), np.zeros((4, 4)), torch.ones(3)
    module = torch.nn.Module()
    for name, part in {"all": buffer, "head": buffer[:4], "middle": buffer[2:6]}.items():
        module.register_buffer(name, part)
    apart = {"one": matrix[:2], "two": matrix[2:], "tied": tied, "again": tied, "view": tied.view(3)}
    even = torch.zeros(8)
    return {"m": module, "rows": matrix[1:3], "apart": apart, "even": even[::2], "odd": even[1::2]}


@pytest.mark.parametrize("verb", ["commit", "commit_async"])
def test_a_commit_warns_once_of_what_a_checkout_into_the_same_state_refuses(
    verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = {verb: _shared_buffers()}
    with Repository.init(f"memory://overlaps-{verb}") as repo, caplog.at_level(logging.WARNING, logger="cas_ckpt"):
        getattr(repo, verb)(state)
        getattr(repo, verb)(state)
        repo.drain()
        with pytest.raises(MismatchError) as refused:
            repo.checkout(into=state)
    warned = [record.getMessage() for record in caplog.records if "overlap in memory" in record.getMessage()]
    keys = [f"{verb}/{name}" for name in ("apart/one", "apart/two", "m/all", "m/head", "m/middle", "rows")]
    assert [words.partition(" overlap")[0] for words in warned] == [", ".join(keys)]
    assert all(key in str(refused.value) for key in keys)
    assert "tied" not in str(refused.value)


def test_a_commit_of_many_tensors_of_which_none_overlap_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    flat = torch.zeros(64)
    state = {"flat": list(flat.split(4)), "rng": np.arange(3), "more": [torch.zeros(2) for _ in range(9)]}
    with Repository.init("memory://no-overlaps") as repo, caplog.at_level(logging.WARNING, logger="cas_ckpt"):
        repo.commit(state)
        repo.checkout(into=state)
    assert "overlap" not in caplog.text
