"""Patterns over keys mean what format and README say."""

from __future__ import annotations

import pytest

from cas_ckpt.objects.patterns import KeyPatterns


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
