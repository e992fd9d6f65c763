"""Sparse and quantized tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cas_ckpt.errors import CorruptionError, MismatchError, UnsupportedValueError
from cas_ckpt.objects.state import Container
from cas_ckpt.training.capture.composites import compose
from cas_ckpt.training.capture.tensors import tensor_item
from tests.training.roundtrip import checkout, commit, failure_of, load, same_state, store


def coo(nnz: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    indices = torch.stack([torch.arange(nnz) % 3, torch.arange(nnz) % 4])
    return torch.sparse_coo_tensor(indices, torch.arange(1.0, nnz + 1).to(dtype), (3, 4), check_invariants=True)


def dense(shift: int = 0) -> torch.Tensor:
    return torch.eye(4).roll(shift, 0) * torch.arange(1.0, 5)


def per_channel(dtype: torch.dtype, *, float_points: bool = False) -> torch.Tensor:
    points = torch.rand(3) if float_points else torch.tensor([1, 2, 3])
    return torch.quantize_per_channel(torch.randn(3, 5), torch.rand(3) + 0.1, points, 0, dtype)


def make(name: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MAKERS[name]()


MAKERS: dict[str, Any] = {
    "coo": lambda: coo(5),
    "coo coalesced": lambda: coo(3).coalesce(),
    "coo hybrid": lambda: torch.sparse_coo_tensor([[0, 2]], torch.randn(2, 3), (4, 3), check_invariants=True),
    "coo empty": lambda: coo(0),
    "coo bf16": lambda: coo(4, torch.bfloat16),
    "coo parameter": lambda: torch.nn.Parameter(coo(4)),
    "csr": lambda: dense().to_sparse_csr(),
    "csr int32": lambda: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32), torch.ones(2), (2, 2),
        check_invariants=True),
    "csc": lambda: dense().to_sparse_csc(),
    "bsr": lambda: dense().to_sparse_bsr((2, 2)),
    "bsc": lambda: dense().to_sparse_bsc((2, 2)),
    "qint8": lambda: torch.quantize_per_tensor(torch.randn(3, 5), 0.1, 3, torch.qint8),
    "quint8": lambda: torch.quantize_per_tensor(torch.randn(3, 5), 0.1, 3, torch.quint8),
    "qint32": lambda: torch.quantize_per_tensor(torch.randn(3, 5), 0.1, 3, torch.qint32),
    "quint8 transposed": lambda: torch.quantize_per_tensor(torch.randn(3, 5), 0.1, 3, torch.quint8).t(),
    "quint8 0-d": lambda: torch.quantize_per_tensor(torch.randn(()), 0.1, 3, torch.quint8),
    "per channel": lambda: per_channel(torch.qint8),
    "per channel float": lambda: per_channel(torch.quint8, float_points=True),
    "quint4x2": lambda: per_channel(torch.quint4x2, float_points=True),
    "quint2x4": lambda: per_channel(torch.quint2x4, float_points=True),
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
def test_every_kind_comes_back_whole(name: str) -> None:
    tensor = make(name)
    made = load(commit({"x": tensor}))["x"]
    assert (made.layout, made.dtype, made.shape) == (tensor.layout, tensor.dtype, tensor.shape)
    assert same_state({"x": made}, {"x": tensor})
    if tensor.is_quantized:
        assert made.qscheme() == tensor.qscheme()
    if tensor.layout == torch.sparse_coo:
        assert made.is_coalesced() == tensor.is_coalesced()


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - {"quint4x2", "quint2x4"}))
def test_every_kind_is_restored_into_the_same_tensor(name: str) -> None:
    tensor, target = make(name), make(name)
    with torch.no_grad():
        if target.layout != torch.strided:
            target.values().zero_() if target.layout != torch.sparse_coo else target._values().zero_()
    state = {"x": target}
    checkout(commit({"x": tensor}), state)
    assert state["x"] is target
    assert same_state({"x": target}, {"x": tensor})


def test_packed_quantized_tensors_are_replaced_in_their_container() -> None:
    tensor, state = make("quint4x2"), {"x": make("quint4x2")}
    checkout(commit({"x": tensor}), state)
    assert same_state(state, {"x": tensor})


def test_a_quantized_tensor_that_torch_cannot_make_on_a_device_is_refused_by_name() -> None:
    parts = {"int_repr": torch.empty(4, dtype=torch.int8, device="meta")}
    attrs = {"dtype": "qint8", "scheme": "per_tensor_affine", "shape": (4,), "scale": 0.1, "zero_point": 0}
    with pytest.raises(UnsupportedValueError, match="model/q: torch .* cannot make a quantized tensor on meta"):
        compose("quantized", attrs, parts, key="model/q")  # type: ignore[arg-type]


def test_a_sparse_tensor_takes_another_number_of_elements() -> None:
    target = coo(1)
    checkout(commit({"x": coo(5)}), {"x": target})
    assert same_state({"x": target}, {"x": coo(5)})


@pytest.mark.parametrize(
    ("target", "source", "words"),
    [
        ("coo", "csr", "the target is a sparse_coo tensor, the commit holds a sparse_csr"),
        ("coo", "coo bf16", "dtype of the target is float32, in the commit it is bfloat16"),
        ("coo", "coo hybrid", "shape of the target"),
        ("csr", "csr int32", "shape of the target"),
        ("qint8", "quint8", "dtype of the target is qint8"),
        ("qint8", "per channel", "scheme of the target"),
        ("qint8", "coo", "the target is a quantized tensor, the commit holds a sparse_coo"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_touched(target: str, source: str, words: str) -> None:
    state = {"x": make(target)}
    before = commit(state)
    error = failure_of(lambda: checkout(commit({"x": make(source)}), state))
    assert isinstance(error, MismatchError)
    assert f"x: {words}" in str(error)
    assert commit(state) == before


def test_sparse_and_dense_are_not_exchanged() -> None:
    for state, other in (({"x": coo(2)}, torch.zeros(3, 4)), ({"x": torch.zeros(3, 4)}, coo(2))):
        with pytest.raises(MismatchError, match="x: the target is"):
            checkout(commit({"x": other}), state)


@pytest.mark.parametrize("name", ["coo", "csr", "bsc", "qint8", "per channel", "quint4x2"])
def test_parts_that_do_not_belong_together_are_corruption(name: str) -> None:
    tree = commit({"x": make(name)}).children["x"]
    assert isinstance(tree, Container)
    one = {"int_repr": torch.zeros(1, dtype=torch.uint8), "values": torch.zeros(1), "scales": torch.zeros(1)}
    bad_attrs = [None, {}, {**tree.attrs, "shape": (9, 9, 9)}, {**tree.attrs, "shape": "x"}]
    bad = [Container(tree.kind, tree.children, attrs) for attrs in bad_attrs]
    bad += [Container(tree.kind, {}, tree.attrs)]
    bad += [Container(tree.kind, {**tree.children, part: store(tensor_item(one[part]))}, tree.attrs)
            for part in one.keys() & tree.children.keys()]  # fmt: skip
    for container in bad:
        with pytest.raises(CorruptionError, match=r"^x: the parts of a"):
            load(Container("dict", {"x": container}))


def test_indices_that_point_outside_are_corruption_not_a_wild_read() -> None:
    parts = {"indices": torch.tensor([[0], [99]]), "values": torch.ones(1)}
    with pytest.raises(CorruptionError):
        compose("sparse_coo", {"shape": (3, 4), "coalesced": True}, parts, key="key")


def test_scales_of_another_axis_are_corruption() -> None:
    tree = commit({"x": make("per channel")}).children["x"]
    assert isinstance(tree, Container)
    for axis in (1, 7, -1, -2):
        bad = Container("quantized", tree.children, {**tree.attrs, "axis": axis})
        with pytest.raises(CorruptionError, match=r"^x: "):
            load(Container("dict", {"x": bad}))


@pytest.mark.parametrize("children", [{}, {"values": Container("dict", {})}], ids=["no values", "another kind of part"])
def test_a_stored_tensor_without_its_parts_does_not_fit_and_touches_nothing(children: Any) -> None:
    target = torch.eye(3).to_sparse_coo()
    tree = Container("dict", {"x": Container("sparse_coo", children, {"shape": (3, 3), "coalesced": True})})
    with pytest.raises(MismatchError, match="x: the commit holds a sparse_coo tensor of which parts are missing"):
        checkout(tree, {"x": target})
    assert torch.equal(target.to_dense(), torch.eye(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 9]]), torch.ones(2), (3,), check_invariants=False),
        lambda: torch.sparse_csr_tensor(
            torch.tensor([0, 1, 2]), torch.tensor([0, 9]), torch.ones(2), (2, 3), check_invariants=False
        ),
    ],
    ids=["coo", "csr"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_tensor_whose_indices_do_not_fit_it_is_not_committed(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(UnsupportedValueError, match="^x: cannot store a sparse tensor whose indices do not fit it: "):
        commit({"x": make()})


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_target_with_another_number_of_values_is_refused_with_what_to_do_and_that_works() -> None:
    stored, module = torch.eye(4).to_sparse_csr(), torch.nn.Module()
    module.register_buffer("b", torch.zeros(4, 4).to_sparse_csr())
    target = {"x": torch.zeros(4, 4).to_sparse_csr(), "parts": [torch.zeros(4, 4).to_sparse_csr()], "m": module}
    tree = commit({"x": stored, "parts": [stored], "m": {"b": stored}})
    with pytest.raises(MismatchError, match="put None in its place, .*; to a module assign what load"):
        checkout(tree, target)
    target |= {"x": None, "parts": [None]}
    module.b = load(tree)["m"]["b"]
    checkout(tree, target)
    assert all(torch.equal(each.to_dense(), torch.eye(4)) for each in (target["x"], target["parts"][0], module.b))
