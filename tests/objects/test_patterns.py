"""Patterns over keys mean what docs/format.md says."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.objects.nodes import name_order
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.state import Name, render_key, render_name
from tests.searches import tries


@pytest.mark.parametrize(
    ("pattern", "key", "expected"),
    [
        ("model/*", "model/layers.0.weight", True),
        ("a/*/c", "a/b/c", True),
        ("a/*/c", "a/b/x/c", False),
        ("a/**/c", "a/b/x/c", True),
        ("a/?", "a/b", True),
        ("a/?", "a/bb", False),
        ("model/base/**", "model/base.h.0.weight", True),
        ("model/base/**", "model/based.weight", False),
        ("model", "model/w", True),
        ("mod", "model/w", False),
    ],
)
def test_a_pattern_matches_what_it_should(pattern: str, key: str, expected: bool) -> None:
    assert KeyPatterns(pattern).matches(key) is expected


def test_patterns_that_matched_nothing_are_known() -> None:
    patterns = KeyPatterns(["a/*", "b/*"])
    patterns.matches("a/x")
    assert patterns.unused == ["b/*"]


_PATHS = st.lists(st.one_of(st.text("ab1.", min_size=1, max_size=5), st.integers(-1, 11)), min_size=1, max_size=3)


@st.composite
def patterns_of(draw: st.DrawFn, key: str) -> str:
    """The key with wildcards in place of some of its characters, and now and then something else behind it."""
    wild = st.lists(st.sampled_from(["", "", "", "?", "*", "**", "/", "b"]), min_size=len(key), max_size=len(key))
    return "".join(new or old for old, new in zip(key, draw(wild), strict=True)) + draw(st.sampled_from(["", "", "*"]))


@settings(max_examples=tries(80, 300))
@given(path=_PATHS, data=st.data())
def test_containers_are_left_out_only_if_nothing_in_them_matches(path: list[Name], data: st.DataObject) -> None:
    key = render_key(tuple(path))
    keys = KeyPatterns(data.draw(st.lists(patterns_of(key), min_size=1, max_size=2)))
    for depth in range(len(path)):
        container, name = render_key(tuple(path[:depth])), path[depth]
        if keys.covers(container):
            assert keys.matches(key)
        if not keys.matches(key):
            continue
        assert keys.reaches(container)
        names = keys.names_in(container)
        order = name_order(name)
        assert names.ranges is None or any(low <= order < high for low, high in names.ranges)
        # Only of what is no container names may be left out by what they look like.
        assert (
            depth < len(path) - 1 or not names.globs or any(_is_like(render_name(name), each) for each in names.globs)
        )


def _is_like(name: str, glob: str) -> bool:
    return re.fullmatch(re.escape(glob).replace(r"\*", ".*").replace(r"\?", "."), name) is not None


@pytest.mark.parametrize(
    ("pattern", "container", "covered"),
    [("model", "model", True), ("model", "model/a", True), ("model/*", "model", False), ("**", "", False)],
)
def test_a_container_that_matches_covers_all_that_is_in_it(pattern: str, container: str, covered: bool) -> None:
    assert KeyPatterns(pattern).covers(container) is covered


@pytest.mark.parametrize(
    ("patterns", "container", "globs"),
    [
        ("model/layers.7?.*.weight", "model", ("layers.7?.*.weight*",)),
        ("model/layers/7/w", "model", ("layers?7?w*",)),
        ("model/layers/7/w", "model/layers", ("7?w*",)),
        (["**/bias", "model/w"], "model", ("*bias*", "w*")),
        (["*/x*y", "*/m*/b*"], "model", ("*b*", "*x*y*")),
        (["**", "model/w"], "model", ()),
        ("model", "model", ()),
    ],
)
def test_names_are_narrowed_down_to_what_the_patterns_leave_open(
    patterns: str | list[str], container: str, globs: tuple[str, ...]
) -> None:
    assert KeyPatterns(patterns).names_in(container).globs == globs
