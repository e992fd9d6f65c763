"""The root of a state depends on its keys, types, dtypes, shapes and bytes, and on nothing else."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from cas_ckpt import Repository, StateDict, limits
from tests.properties.states import (
    LARGE,
    NUMPY_DTYPES,
    SHAPES,
    TORCH_DTYPES,
    account,
    bits,
    copied,
    numpy_array,
    raw,
    states,
    torch_tensor,
)
from tests.searches import tries

_numbers = itertools.count()


def fresh(where: str | Path | None = None, **settings: Any) -> Repository:
    return Repository.init(where or f"memory://same-{next(_numbers)}", **settings)


PLAIN = fresh()
"""Everything is compared with what this repository says."""


def root_of(
    state: dict[str, Any], repo: Repository | None = None, *, num_threads: int | None = None, **how: Any
) -> str:
    with limits(num_threads=num_threads):
        return (repo or PLAIN).commit(state, **how).root


# --- other memory, same state ----------------------------------------------------------------


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Every other element of a longer last dimension."""
    if not tensor.dim():
        return copied(tensor)
    wide = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] * 2 + 3), dtype=raw(tensor).dtype)
    part = wide[..., 1 : 1 + 2 * tensor.shape[-1] : 2]
    part.copy_(raw(tensor))
    return part.view(tensor.dtype)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Last dimension first in memory."""
    return raw(tensor).movedim(-1, 0).contiguous().movedim(0, -1).view(tensor.dtype) if tensor.dim() > 1 else tensor


def offset(tensor: torch.Tensor) -> torch.Tensor:
    """Somewhere inside a longer storage."""
    longer = torch.full((tensor.numel() + 5,), 1, dtype=raw(tensor).dtype)
    part = longer[3 : 3 + tensor.numel()].view(tensor.shape)
    part.copy_(raw(tensor))
    return part.view(tensor.dtype)


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    """Stride 0 where all rows are equal."""
    rows = raw(tensor)
    if not rows.dim() or rows.shape[0] < 2 or not bool((rows == rows[:1]).all()):
        return tensor
    return rows[:1].clone().expand(rows.shape).view(tensor.dtype)


def parameter(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor, requires_grad=False)


MOVES: list[Callable[[torch.Tensor], torch.Tensor]] = [copied, strided, transposed, offset, expanded, parameter]


def array_moves(array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    wide = np.zeros((*array.shape, 2), array.dtype)
    wide[..., 1] = array
    return [array.copy(), array.copy(order="F"), wide[..., 1], np.require(array, requirements=[])]


class Rearranger:
    """Rebuilds a state in another order, in other memory, with other ties."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seen: dict[Any, torch.Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, dict):
            pairs = [(name, self(child)) for name, child in value.items()]
            if not isinstance(value, OrderedDict):  # its order is part of it
                self.random.shuffle(pairs)
            return type(value)(pairs)
        if isinstance(value, list | tuple):
            return type(value)(self(child) for child in value)
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        return self.random.choice(array_moves(value)) if isinstance(value, np.ndarray) else value

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = self.random.choice(MOVES)(tensor)
        known = self.seen.setdefault((tensor.dtype, tensor.shape, bits(tensor)), moved)
        return known if self.random.random() < 0.3 else moved


@given(state=states(), seed=st.integers(0, 10**6))
@settings(max_examples=tries(20, 60))
def test_order_memory_and_ties_do_not_reach_the_root(state: dict[str, Any], seed: int) -> None:
    other = Rearranger(seed)(state)
    assert account(other) == account(state)
    assert root_of(other) == root_of(state)


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype_in_every_layout_is_the_same_tensor(dtype: torch.dtype, move: Callable[..., torch.Tensor]) -> None:
    plain = {str(shape): torch_tensor(dtype, shape, 1) for shape in SHAPES}
    assert root_of({name: move(tensor) for name, tensor in plain.items()}) == root_of(plain)


def test_a_matrix_of_several_chunks_is_the_same_in_every_layout() -> None:
    plain = torch_tensor(torch.float32, LARGE, 5)
    assert {root_of({"w": move(plain)}) for move in MOVES} == {root_of({"w": plain})}
    rows = torch.arange(LARGE[1], dtype=torch.float32).expand(LARGE)
    assert root_of({"w": rows}) == root_of({"w": rows.clone()})


# --- other places, same state ----------------------------------------------------------------


@given(
    state=states(),
    encoding=st.sampled_from(["raw", "auto", "zstd", "planes"]),
    pack_bytes=st.sampled_from([1 << 20, 5 << 20, 1 << 29]),
    num_threads=st.integers(1, 4),
    earlier=st.none() | states(),
)
@settings(max_examples=tries(10, 40))
def test_encodings_packs_threads_and_history_do_not_reach_the_root(
    state: dict[str, Any], encoding: str, pack_bytes: int, num_threads: int, earlier: dict[str, Any] | None
) -> None:
    with fresh(encoding=encoding, pack_bytes=pack_bytes) as repo:
        if earlier is not None:
            root_of(earlier | {"some": torch.ones(LARGE)}, repo, num_threads=num_threads)
        assert root_of(state, repo, num_threads=num_threads) == root_of(state)
        assert root_of(state, repo, num_threads=1, message="again", step=7, metrics={"a": 1.0}) == root_of(state)


def test_a_state_of_many_chunks_has_one_root_whatever_the_number_of_threads(tmp_path: Path) -> None:
    state = {f"w{seed}": torch_tensor(torch.float32, (1024, 768), seed) for seed in range(4)}
    places: list[str | Path | None] = [None, tmp_path / "1", tmp_path / "2", None]
    roots = {root_of(state, fresh(place), num_threads=at + 1) for at, place in enumerate(places)}
    assert roots == {root_of(state)}


def test_folders_and_memory_give_the_same_root(tmp_path: Path) -> None:
    @given(state=states())
    @settings(max_examples=tries(5, 15))
    def check(state: dict[str, Any]) -> None:
        assert root_of(state, repo) == root_of(state)

    with fresh(tmp_path / "repo") as repo:
        check()


def test_what_was_loaded_is_the_state_that_was_committed() -> None:
    @given(state=states())
    @settings(max_examples=tries(10, 30))
    def check(state: dict[str, Any]) -> None:
        info = PLAIN.commit(state)
        assert root_of(PLAIN.load(info.id)) == info.root

    check()


# --- other objects, same state ---------------------------------------------------------------


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 40, bias=False))
    return model.append(torch.nn.Linear(2, 2).bfloat16())


def test_a_module_is_its_state_dict() -> None:
    model = small_model()
    assert root_of({"model": model}) == root_of({"model": model.state_dict()})


def test_stateful_wrappers_do_not_reach_the_root() -> None:
    progress = {"step": 3, "best": torch.ones(3)}
    assert root_of({"progress": StateDict(progress)}) == root_of({"progress": progress})


def test_an_imported_safetensors_file_is_the_module_that_was_saved(tmp_path: Path) -> None:
    model = small_model()
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    assert fresh().import_file(tmp_path / "m.safetensors").root == root_of({"model": model})


def test_an_imported_torch_file_is_the_state_that_was_saved(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 4}
    torch.save(state, tmp_path / "m.pt")
    assert fresh().import_file(tmp_path / "m.pt").root == root_of(state)


# --- another state, another root -------------------------------------------------------------


def other_leaf(value: Any, seed: int) -> Any:
    """A value or tensor that differs from `value` in one respect."""
    pick = random.Random(seed).choice
    if isinstance(value, np.ndarray):
        return pick(
            [np.expand_dims(value, 0), value.astype("V8") if value.dtype.itemsize != 8 else value.astype("S64")]
        )
    if isinstance(value, torch.Tensor):
        return pick([flipped, reinterpreted, reshaped, as_numpy])(value)
    return pick([[value], (value,), {"v": value}, repr(value) + "x", b"other"])


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """One bit of one element is another."""
    if not tensor.numel():
        return torch.zeros((1,), dtype=torch.uint8)
    data = copied(tensor)
    data.reshape(-1).view(torch.uint8)[-1] ^= 1
    return data


def reinterpreted(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes under another dtype of the same width."""
    same = [dtype for dtype in TORCH_DTYPES if dtype.itemsize == tensor.dtype.itemsize and dtype is not tensor.dtype]
    return tensor.view(next(dtype for dtype in same if dtype is not torch.bool))


def reshaped(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes in another shape."""
    return tensor.unsqueeze(0)


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The same bytes as an array of numpy."""
    return raw(tensor).numpy()


def edited(value: Any, seed: int) -> Any:
    """`value` with one leaf, name or container kind changed."""
    rng = random.Random(seed)
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        if rng.random() < 0.3:
            new = f"{name}'" if isinstance(name, str) else str(name)
            return type(value)((new if old == name and type(old) is type(name) else old, v) for old, v in value.items())
        return type(value)((old, edited(v, seed + 1) if old is name else v) for old, v in value.items())
    if isinstance(value, list | tuple) and value and rng.random() < 0.6:
        at = rng.randrange(len(value))
        return type(value)(edited(item, seed + 1) if number == at else item for number, item in enumerate(value))
    if isinstance(value, dict):
        return value | {"one more": None} if rng.random() < 0.5 else [value]
    if isinstance(value, list | tuple):
        return (list, tuple)[isinstance(value, list)](value)
    return other_leaf(value, seed)


@given(state=states(), seed=st.integers(0, 10**6))
@settings(max_examples=tries(35, 120))
def test_any_edit_changes_the_root(state: dict[str, Any], seed: int) -> None:
    other = {**state, "x": edited(state.get("x", 0), seed)}
    if account(other) != account(state):  # an edit of a NaN's repr, say, may come out the same
        assert root_of(other) != root_of(state)


PAIRS: list[tuple[Any, Any]] = [
    (1, 1.0), (1, True), (0, False), (0, None), (1, "1"), ("a", b"a"), (0.0, -0.0), (1, 1 + 0j), ([1], (1,)), ([], ()),
    ({}, []), ({"a": 1}, {"a": 1.0}), ({"1": 0}, {1: 0}), ({"a": {}}, {"a": None}), ([[]], [{}]),
    (OrderedDict(a=1), {"a": 1}), (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
    ({"a/b": 1}, {"a": {"b": 1}}), ({"~": 1}, {"~0": 1}), ({"": 1}, {"~=": 1}),
    (np.float32(1), 1.0), (np.ones(1), torch.ones(1, dtype=torch.float64)), (np.float64(1), np.ones(())),
    (torch.ones(()), 1.0), (torch.ones(1), torch.ones(())), (torch.zeros(0), torch.zeros(0, 0)),
    (torch.zeros(2), torch.zeros(2, dtype=torch.int32)), (torch.float32, "float32"), (torch.Size([1]), (1,)),
    (torch.zeros(300), torch.zeros(300, dtype=torch.int32)), (torch.zeros(10, 30), torch.zeros(30, 10)),
    (np.zeros(300, "<i4"), np.zeros(300, ">i4")), ("x" * 2000, b"x" * 2000), ("x" * 2000, "x" * 2001),
    (torch.zeros(2000, dtype=torch.uint8), b"\0" * 2000), (torch.zeros(300), torch.zeros(301)),
    (torch.zeros(300).to_sparse(), torch.zeros(300)), ([torch.ones(1)], (torch.ones(1),)),
    ({"a": torch.ones(1)}, OrderedDict(a=torch.ones(1))),
]  # fmt: skip


@pytest.mark.parametrize(("one", "two"), PAIRS, ids=lambda value: repr(value)[:24])
def test_values_that_python_may_call_equal_have_roots_of_their_own(one: Any, two: Any) -> None:
    assert root_of({"v": one}) != root_of({"v": two})


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7,), (600,)], ids=["inline", "chunk"])
def test_dtypes_of_one_width_have_roots_of_their_own(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch_tensor(dtype, shape, 3)
    others = [other for other in TORCH_DTYPES if other.itemsize == dtype.itemsize]
    assert len({root_of({"v": tensor.view(other)}) for other in others}) == len(others)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_every_element_of_an_array_counts(dtype: str) -> None:
    array = numpy_array(dtype, (41, 33), 1)
    roots = {root_of({"v": array})}
    for at in (0, 700, array.size - 1):
        other = array.copy()
        other.view(np.uint8).reshape(array.size, -1)[at, 0] ^= 1
        roots.add(root_of({"v": other}))
    assert len(roots) == 4


@given(position=st.integers(0, 4 * LARGE[0] * LARGE[1] - 1), bit=st.integers(0, 7))
@settings(max_examples=tries(10, 25))
def test_every_bit_of_a_large_tensor_counts(position: int, bit: int) -> None:
    tensor = torch_tensor(torch.float32, LARGE, 1)
    before = root_of({"w": tensor})
    tensor.view(torch.uint8).view(-1)[position] ^= 1 << bit
    assert root_of({"w": tensor}) != before
