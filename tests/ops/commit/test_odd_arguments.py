"""Odd arguments of a commit are refused before anything is written, with a typed error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt.core.records import Lineage
from cas_ckpt.errors import InvalidInputError, NotFoundError
from cas_ckpt.ops.commit import request
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


def test_a_parent_that_is_not_there_is_reported_before_lineage_and_git_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = new_repository(tmp_path / "repo")
    monkeypatch.setattr(request, "git_state", lambda _: pytest.fail("git was asked for a commit that cannot be made"))
    with pytest.raises(NotFoundError, match="no-parent"):
        commit(handle, {"w": 1}, parents=["no-parent"], lineage=[Lineage("from", "no-origin")], provenance=True)


def test_an_item_that_is_too_long_for_a_leaf_is_refused_with_its_key(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    array = np.zeros(3, "S140000")
    from cas_ckpt.objects.spec import Spec
    from cas_ckpt.objects.state import Container, TensorItem
    from cas_ckpt.ops.commit.commit import commit_tree
    from cas_ckpt.ops.commit.request import CommitRequest
    from tests.builders import ArrayMemory

    item = TensorItem(Spec("np:|S140000", (3,)), ArrayMemory(array))
    with pytest.raises(InvalidInputError, match="deep/names"):
        commit_tree(handle, Container("dict", {"deep": Container("dict", {"names": item})}), CommitRequest())


def test_tied_tensors_under_names_that_are_no_unicode_are_committed(tmp_path: Path) -> None:
    array = numbers(900)
    item = tensor(array, identity=("one memory", 1))
    with_odd_name = new_repository(tmp_path / "repo")
    info = commit(with_odd_name, {"a\udc80": item, "b": item})
    assert same_bytes(stored_arrays(with_odd_name, info.root)["b"], array)
