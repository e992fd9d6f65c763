"""Small repositories that unfold into more than any memory are refused in time; large honest ones are not."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cas_ckpt
from cas_ckpt import InvalidInputError, Repository, TooLargeError
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import load_tree
from cas_ckpt.index.tree_diff import number_states
from cas_ckpt.memory import available_bytes
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.nodes import ContainerEntry, Entry, ValueEntry, decode_tree
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.values import encode_value
from cas_ckpt.ops.diff.walk import differing
from tests.builders import doubling_nodes, new_repository, publish_nodes
from tests.cli.running import call
from tests.core.test_hostile_repository import store_nodes

pytestmark = pytest.mark.slow


def doubling(repo: RepositoryHandle, depth: int, leaf: Entry | None = None) -> Digest:
    """The root of a tree in which every level names the next one twice."""
    return store_nodes(repo, doubling_nodes(depth, leaf or ValueEntry("x", encode_value(depth, key=""))))


@pytest.mark.parametrize("depth", [22, 40])
def test_every_walk_of_a_tree_that_doubles_is_refused_within_bounds(tmp_path: Path, depth: int) -> None:
    repo = new_repository(tmp_path / "repo")
    one, other = doubling(repo, depth), doubling(repo, depth, ValueEntry("x", encode_value("other", key="")))
    tracemalloc.start()
    try:
        with cas_ckpt.limits(max_entries=20_000):
            for call in (
                lambda: load_tree(repo, one),
                lambda: differing(repo, one, other),
                lambda: repo.index.read(number_states, [one], KeyPatterns("**/x")),
            ):
                with pytest.raises(TooLargeError, match="max_entries"):
                    call()
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(TooLargeError, match="more than 2097152 entries"):
        load_tree(repo, one)


def test_every_verb_refuses_a_tree_that_doubles_before_it_makes_anything_of_it(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    for value in "ab":
        publish_nodes(handle, doubling_nodes(40, ValueEntry("x", encode_value(value, key=""))))
    handle.close()
    far = "a/" * 40 + "x"
    with Repository.open(tmp_path / "repo") as repo:
        calls: list[Callable[[], object]] = [
            repo.load, repo.ls, lambda: repo.ls(keys="**/x"), lambda: repo.entry("main", "a"), repo.shards,
            lambda: repo.find("**/x"), lambda: repo.find(min_bytes=1), lambda: repo.find_commits("**/x"),
            lambda: repo.diff("main~1", "main"), lambda: repo.diff("main", keys="**/y"),
            lambda: list(repo.log(keys="**/x")), lambda: repo.nearest("main"),
            lambda: repo.export("main", tmp_path / "out.pt"),
        ]  # fmt: skip
        tracemalloc.start()
        try:
            for number, call in enumerate(calls):
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                with pytest.raises(TooLargeError, match="max_entries"):
                    call()
                assert tracemalloc.get_traced_memory()[1] - before < 8 << 20, number
        finally:
            tracemalloc.stop()
        assert {entry.key for entry in repo.ls(keys=far)} == {found.key for found in repo.find(far)} == {far}
        assert len(list(repo.log(keys="a/b/**"))) == 2
        assert sum(part.num_entries for part in repo.show().parts) == 2**40  # counted, not made


def test_a_limit_can_be_raised_and_lowered() -> None:
    with Repository.init("memory://limits") as repo:
        repo.commit({"m": {f"{number}": number for number in range(300)}})
        with cas_ckpt.limits(max_entries=200), pytest.raises(TooLargeError):
            repo.load()
        with cas_ckpt.limits(max_entries=200), cas_ckpt.limits(max_entries=1000):
            assert len(repo.load()["m"]) == 300
        with pytest.raises(InvalidInputError, match="max_entries is 0"), cas_ckpt.limits(max_entries=0):
            pass


def test_a_state_of_many_entries_and_equal_parts_is_within_the_limits(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        part = {f"{number}": number for number in range(1000)}
        repo.commit({f"p{number}": part for number in range(100)})
        repo.commit({f"p{number}": {**part, "0": 7} for number in range(100)})
        assert len(repo.diff("main~1", "main").changed) == 100
        assert sum(map(len, repo.load().values())) == 100_000
        assert len(list(repo.log(keys="p5/*"))) == 2
        assert repo.fsck().ok


def test_more_bytes_than_there_is_memory_are_refused_before_they_are_taken() -> None:
    with Repository.init("memory://too-many-bytes") as repo:
        block = torch.zeros(1 << 16)
        repo.commit({"w": block, "tied": block, "n": np.zeros(1 << 14)})
        with cas_ckpt.limits(max_bytes=1 << 18), pytest.raises(TooLargeError, match="393216 bytes of tensors"):
            repo.load()
        with cas_ckpt.limits(max_bytes=1 << 19):
            assert repo.load()["w"].sum() == 0
        with cas_ckpt.limits(max_bytes=1 << 17):
            assert repo.load(keys="n")["n"].sum() == 0
            for key in ("w", "tied"):
                with pytest.raises(TooLargeError, match="262144 bytes of tensors"):
                    repo.load(keys=key)
    assert available_bytes() > 1 << 20


def test_a_tensor_that_no_memory_can_hold_is_a_typed_error(tmp_path: Path) -> None:
    """A tensor of zeros is small in a repository, whatever its size."""
    from cas_ckpt.objects.spec import Spec
    from cas_ckpt.objects.state import Container, StoredTensor
    from cas_ckpt.training.restore.materialize import materialize

    for flavor in ("torch", "numpy"):
        stored = StoredTensor(Spec("float32", (1 << 58,)), flavor, Digest(bytes(32)), None)
        with pytest.raises(TooLargeError, match="bytes of tensors"):
            materialize(Container("dict", {"w": stored}), lambda copies: None)
        with cas_ckpt.limits(max_bytes=1 << 62), pytest.raises(TooLargeError, match="w: .* cannot be had"):
            materialize(Container("dict", {"w": stored}), lambda copies: None)


def test_the_command_line_has_the_limit_too(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({f"{number}": number for number in range(300)})
    refused = call("-C", tmp_path / "repo", "--max-entries", "100", "export", "main", tmp_path / "out.pt")
    assert refused.code == 1
    assert "--max-entries" in refused.err


def test_fsck_names_a_container_of_too_many_damaged_keys_as_a_whole(tmp_path: Path) -> None:
    repo = new_repository(tmp_path / "repo")
    root = doubling(repo, 40)
    assert decode_tree(repo.read_node(_tree_kind(), root)).entries
    from cas_ckpt.ops.fsck.check import ALL_BELOW, KeyFinder

    affected: dict[bytes, bool] = {}
    at: Any = root
    while True:
        entries = decode_tree(repo.read_node(_tree_kind(), at)).entries
        affected[at] = not isinstance(entries[0], ContainerEntry)
        if affected[at]:
            break
        at = entries[0].node
    keys = KeyFinder(repo.store, repo.index, affected).keys(root)
    assert len(keys) <= 10_000
    assert all(key.endswith(ALL_BELOW) for key in keys)


def _tree_kind() -> Any:
    from cas_ckpt.objects.digest import ObjectKind

    return ObjectKind.TREE
