"""Random rules of key maps, the rules that take them back, and what numpy makes of tensors by them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cas_ckpt import KeyMap
from cas_ckpt.layout.key_map import MappedTree
from cas_ckpt.objects.spec import Spec
from cas_ckpt.objects.state import Container, Flavor, Item, StoredTensor

Array = np.ndarray[Any, Any]
Op = Mapping[str, Any]


def stored(array: Array) -> StoredTensor:
    return StoredTensor(Spec(array.dtype.name, array.shape), Flavor.TORCH, None, array.tobytes())


def tree(items: Mapping[Any, Any], kind: str = "dict") -> Container:
    made: dict[Any, Item] = {}
    for name, value in items.items():
        if isinstance(value, np.ndarray):
            made[name] = stored(value)
        else:
            made[name] = tree(value) if isinstance(value, dict) else value
    return Container(kind, made)


def applied(rules: list[Op], items: Mapping[Any, Any] | Container) -> MappedTree:
    return KeyMap(rules).applied(items if isinstance(items, Container) else tree(items), lambda array, *_: array)


def along(array: Array, dim: int, *sizes: int) -> Array:
    """`array` with dimension `dim` as several of these sizes."""
    return array.reshape(*array.shape[:dim], *sizes, *array.shape[dim + 1 :])


def split(array: Array, ratios: list[int], dim: int, groups: int) -> list[Array]:
    grouped = along(array, dim, groups, array.shape[dim] // groups)
    unit = grouped.shape[dim + 1] // sum(ratios)
    pieces = np.split(grouped, np.cumsum(ratios)[:-1] * unit, axis=dim + 1)
    return [each.reshape(*array.shape[:dim], -1, *array.shape[dim + 1 :]) for each in pieces]


def fuse(pieces: list[Array], dim: int, groups: int) -> Array:
    grouped = [along(each, dim, groups, each.shape[dim] // groups) for each in pieces]
    whole = np.concatenate(grouped, axis=dim + 1)
    return whole.reshape(*pieces[0].shape[:dim], -1, *pieces[0].shape[dim + 1 :])


def interleave(array: Array, shape: list[int], dim: int) -> Array:
    return along(array, dim, *shape).swapaxes(dim + 1, dim + 2).reshape(array.shape)


def divisors(size: int) -> st.SearchStrategy[int]:
    return st.sampled_from([each for each in range(1, size + 1) if size % each == 0])


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[str, Array], list[Op], list[Op], dict[str, Array]]:
    """Some tensors, rules, the rules that take them back, and what numpy makes of the tensors by the first."""
    shape = (draw(st.sampled_from([8, 12])), draw(st.sampled_from([1, 6, 8])))
    before = {"0": np.arange(math.prod(shape), dtype="int32").reshape(shape)}
    now, rules, back = dict(before), list[Op](), list[Op]()
    for number in range(1, draw(st.integers(1, 5)) + 1):
        key = draw(st.sampled_from(sorted(now)))
        array, dim, kind = now[key], draw(st.integers(0, 1)), draw(st.sampled_from(["split", "turn", "weave", "name"]))
        size = array.shape[dim]
        if kind == "split":
            groups = draw(divisors(size))
            total = draw(divisors(size // groups))
            first = draw(st.integers(1, max(1, total - 1)))
            ratios = [first, total - first] if total > 1 else [1]
            names = [f"{key}{letter}" for letter in "ab"[: len(ratios)]]
            how = {"dim": dim, "groups": groups}
            rules.append({"split": key, "to": names, "ratios": ratios, **how})
            back.append({"fuse": names, "to": key, **how})
            now |= dict(zip(names, split(now.pop(key), ratios, dim, groups), strict=True))
        elif kind == "turn":
            rules.append({"transpose": key})
            back.append({"transpose": key, "dims": [1, 0]})
            now[key] = array.T
        elif kind == "weave":
            outer = draw(divisors(size))
            rows = draw(divisors(size // outer))
            rules.append({"interleave": key, "shape": [outer, rows, -1], "dim": dim})
            back.append({"interleave": key, "shape": [outer, -1, rows], "dim": dim})
            now[key] = interleave(array, [outer, rows, size // outer // rows], dim)
        else:
            rules.append({"rename": f"({key})", "to": rf"\1_{number}"})
            back.append({"prefix": f"{key}_{number}", "to": key})
            now[f"{key}_{number}"] = now.pop(key)
    return before, rules, back[::-1], now
