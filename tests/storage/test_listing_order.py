"""A listing in either of two orders becomes one in order of code points; one in neither is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt.errors import StorageError
from cas_ckpt.storage import object_parts
from cas_ckpt.storage.bucket import Listed
from cas_ckpt.storage.object_parts import by_code_points

NAMES = st.lists(st.text("-./aZ", min_size=1, max_size=6).filter(lambda name: "//" not in name), unique=True)


def listed(names: list[str]) -> Iterator[Listed]:
    return (Listed(f"p/{name}", 0, "v") for name in names)


def by_folders(name: str) -> list[str]:
    return name.split("/")


@given(NAMES, st.sampled_from([by_folders, str]))
def test_both_orders_become_that_of_code_points(names: list[str], order: Callable[[str], str]) -> None:
    found = [item.name for item in by_code_points(listed(sorted(names, key=order)), "p/")]
    assert found == sorted(f"p/{name}" for name in names)


@pytest.mark.parametrize(
    "names", [["b", "a"], ["a", "a"], ["a/b", "a-b", "a/c"], ["c", "a/b", "a-b"], ["a-b", "a/b", "a-c"]]
)
def test_what_is_in_neither_order_is_an_error(names: list[str]) -> None:
    with pytest.raises(StorageError, match="out of order"):
        list(by_code_points(listed(names), "p/"))


def test_a_flat_listing_is_passed_on_as_it_comes() -> None:
    def endless() -> Iterator[Listed]:
        yield from listed(["a", "b"])
        raise AssertionError("asked for more than was wanted")

    found = by_code_points(endless(), "p/")
    assert [next(found).name, next(found).name] == ["p/a", "p/b"]


def test_what_is_held_back_of_a_listing_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_parts, "MOST_HELD_BYTES", 10_000)
    given = iter(f"f/{number:09}" for number in range(1_000_000))
    found = by_code_points(listed(given), "p/")  # type: ignore[arg-type]
    assert next(found).name == "p/f/000000000"
    assert int(next(given)[2:]) < 50
