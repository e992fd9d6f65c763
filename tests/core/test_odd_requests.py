"""Odd arguments of a commit are refused before anything is written, with a typed error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.protocol import GC_STATE_KEY, GcState, Generation, encode_gc_state, read_gc_state
from cas_ckpt.core.refs import RefKind, check_name
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import ConflictError, InvalidInputError
from cas_ckpt.objects.state import parse_key
from cas_ckpt.storage.url import open_store
from tests.builders import commit, new_repository, numbers, same_bytes, stored_arrays, tensor


@pytest.mark.parametrize(
    "request_fields",
    [
        {"step": 1 << 63},
        {"metrics": {"loss": 10**400}},
        {"metrics": {"lo\ud800ss": 1.0}},
        {"message": 5},
        {"author": 5},
    ],
    ids=["step beyond 63 bits", "metric beyond floats", "metric name", "message", "author"],
)
def test_an_odd_field_is_refused_before_anything_is_written(tmp_path: Path, request_fields: dict[str, Any]) -> None:
    handle = new_repository(tmp_path / "repo")
    with pytest.raises(InvalidInputError):
        commit(handle, {"w": numbers(2000)}, **request_fields)
    assert not list(handle.store.list("packs/"))
    commit(handle, {"w": numbers(2000)})


def test_an_item_that_is_too_long_for_a_leaf_is_refused_with_its_key(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    array = np.zeros(3, "S70000")
    from cas_ckpt.objects.spec import Spec
    from cas_ckpt.objects.state import Container, TensorItem
    from cas_ckpt.ops.commit.commit import commit_tree
    from cas_ckpt.ops.commit.request import CommitRequest
    from tests.builders import ArrayMemory

    item = TensorItem(Spec("np:|S70000", (3,)), ArrayMemory(array))
    with pytest.raises(InvalidInputError, match="deep/names"):
        commit_tree(handle, Container("dict", {"deep": Container("dict", {"names": item})}), CommitRequest())


def test_a_refused_init_leaves_the_gc_state_of_the_repository_that_is_there() -> None:
    init_repository("memory://review-init").close()
    store = open_store("memory://review-init")
    store.put(GC_STATE_KEY, encode_gc_state(GcState(Generation(7))))
    with pytest.raises(ConflictError):
        init_repository("memory://review-init")
    assert read_gc_state(store).generation.number == 7


@pytest.mark.parametrize("name", ["DEADBEEF" * 8, "face" * 16, "HEAD"])
def test_a_name_that_would_not_resolve_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError):
        check_name(name)


def test_a_name_of_more_hexadecimal_digits_than_an_id_has_resolves(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    info = commit(handle, {"w": 1}, branch="a" * 70)
    assert resolve(handle, "a" * 70).hex() == info.id


def test_a_file_among_the_refs_that_is_no_ref_does_not_hide_the_others(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, {"w": 1})
    (tmp_path / "repo" / "refs" / "heads" / "main.ref.orig").write_bytes(b"left by an editor")
    assert [ref.name for ref in handle.refs.list(RefKind.BRANCH)] == ["main"]


def test_a_key_of_five_thousand_digits_is_not_read_as_a_number() -> None:
    assert parse_key("9" * 5000) == ("9" * 5000,)


def test_tied_tensors_under_names_that_are_no_unicode_are_committed(tmp_path: Path) -> None:
    array = numbers(900)
    item = tensor(array, identity=("one memory", 1))
    with_odd_name = new_repository(tmp_path / "repo")
    info = commit(with_odd_name, {"a\udc80": item, "b": item})
    assert same_bytes(stored_arrays(with_odd_name, info.root)["b"], array)
