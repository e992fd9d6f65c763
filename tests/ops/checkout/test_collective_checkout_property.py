"""Any shapes, any meshes, any placements: every rank gets exactly what it holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cas_ckpt.objects.spec import Box, BoxPlacement, Mesh, MeshPlacement, Placement, Split
from tests.builders import numbers
from tests.ops.checkout.rank_targets import Saved, restore, saved, saved_beside
from tests.searches import tries


@pytest.fixture(scope="module")
def state() -> Saved:
    return saved({})


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, dict[str, tuple[tuple[int, ...], str, Any]]]:
    size = draw(st.integers(1, 6))
    tensors = {}
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
        if draw(st.booleans()):
            shape = (draw(st.integers(1, 12)), draw(st.sampled_from([2048, 6000, 4096, 100_003])))
        dtype = draw(st.sampled_from(["float32", "int8", "complex128"]))
        tensors[f"t{number}"] = (shape, dtype, draw(placements(size, shape)))
    return size, tensors


@st.composite
def placements(draw: st.DrawFn, size: int, shape: tuple[int, ...]) -> Placement | None:
    kind = draw(st.sampled_from(["whole", "mesh", "mesh", "mesh", "boxes"]))
    if kind == "whole":
        return None
    ranks = draw(st.permutations(range(size)))
    if kind == "boxes":
        cut = draw(st.integers(0, shape[0]))
        rest = (0,) * (len(shape) - 1)
        parts = [Box((0, *rest), (cut, *shape[1:])), Box((cut, *rest), (shape[0] - cut, *shape[1:]))]
        return BoxPlacement(tuple((box, (ranks[at % size],)) for at, box in enumerate(parts)))
    first = draw(st.integers(1, size))
    second = draw(st.integers(1, size // first))
    dims = st.one_of(st.none(), st.integers(0, len(shape) - 1))
    splits = []
    for _ in range(2):
        dim = draw(dims)
        splits.append(Split(dim, 1 if dim is None else draw(st.sampled_from([1, 1, 2, 3]))))
    return MeshPlacement(Mesh(("a", "b"), (first, second), tuple(ranks[: first * second])), tuple(splits))


@settings(max_examples=tries(10, 40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_whatever_is_divided_over_whatever_mesh_arrives(state: Saved, case: tuple[int, dict[str, Any]]) -> None:
    size, tensors = case
    arrays = {key: numbers(*shape, seed=len(key)).astype(dtype) for key, (shape, dtype, _) in tensors.items()}
    restore(saved_beside(state, arrays), size, {key: placement for key, (_, _, placement) in tensors.items()})
