"""Nodes that no version writes: the index refuses them as whoever reads nodes does, or says the same of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cas_ckpt.core import tree as states
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import load_tree
from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.index import entries, tree_diff
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest, ObjectKind
from cas_ckpt.objects.nodes import Node, decode_tensor, decode_tree, make_node
from cas_ckpt.ops.fsck.check import check_url
from cas_ckpt.ops.fsck.report import ProblemKind
from cas_ckpt.transfer.pack_writer import write_nodes
from tests.builders import commit, new_repository

ABSENT = bytes([1]) * DIGEST_BYTES


def node(rows: Any, *, page: bool = False, height: int = 0, kind: str = "dict") -> Node:
    """A tree node, or a page, of whatever is in `rows`."""
    payload = {"height": height, "entries": rows} | ({} if page else {"kind": kind, "attrs": None})
    return make_node(ObjectKind.TREE_PAGE if page else ObjectKind.TREE, payload)


A_TREE = node([["a", 4, b"\x01"]])
A_PAGE, B_PAGE = (node([[name, 4, b"\x01"]], page=True) for name in "ab")
DEEP_PAGE = node([["a", 5, A_PAGE.digest], ["b", 5, B_PAGE.digest]], page=True, height=1)


def in_pages(*pages: tuple[str, Node]) -> Node:
    return node([[first, 5, page.digest] for first, page in pages], height=1)


@pytest.mark.parametrize(
    "malformed",
    [
        node([["x", 3, "", [], 0, b""]]),
        node([["x", 2, "", [4], 0, ABSENT]]),
        node([["x", 4, b"\x01"]], kind=""),
        node({}),
        node(""),
    ],
    ids=["no dtype", "no dtype of a chunk", "no kind", "a map of entries", "a text of entries"],
)
def test_what_no_version_writes_is_not_decoded_and_its_pack_is_left_out_and_reported(
    tmp_path: Path, malformed: Node
) -> None:
    with pytest.raises(CorruptionError):
        decode_tree(malformed.data)
    repo = new_repository(tmp_path / "repo")
    write_nodes(repo.store, [malformed])
    repo.sync()
    assert len(repo.damaged) == 1
    assert commit(repo, {"x": 1}).stats.num_entries == 1
    repo.close()
    assert [problem.kind for problem in check_url(tmp_path / "repo").problems] == [ProblemKind.ENTRIES]


def test_a_tensor_without_a_dtype_is_not_decoded() -> None:
    payload = {"dtype": "", "shape": [4], "cell": [2], "leaf": 2, "chunks": 2 * ABSENT}
    with pytest.raises(CorruptionError):
        decode_tensor(make_node(ObjectKind.TENSOR, payload).data)


WRONG: dict[str, Sequence[Node]] = {
    "a page for a container": [A_PAGE, node([["x", 0, A_PAGE.digest]])],
    "a page for the root": [A_PAGE],
    "containers for pages": [A_TREE, B_PAGE, in_pages(("a", A_TREE), ("b", B_PAGE))],
    "another first name": [A_PAGE, B_PAGE, in_pages(("A", A_PAGE), ("b", B_PAGE))],
    "one page twice": [A_PAGE, in_pages(("a", A_PAGE), ("b", A_PAGE))],
    "a page that is too high": [A_PAGE, B_PAGE, DEEP_PAGE, in_pages(("a", DEEP_PAGE), ("c", B_PAGE))],
    "a layout for a container": [
        layout := make_node(ObjectKind.LAYOUT, {"world_size": 1, "mesh": [], "placements": {}, "aliases": []}),
        node([["x", 0, layout.digest]]),
    ],
}


@pytest.mark.parametrize("nodes", WRONG.values(), ids=WRONG)
def test_nodes_of_the_wrong_kind_are_refused_by_the_index_as_by_whoever_reads_them(
    tmp_path: Path, nodes: Sequence[Node]
) -> None:
    repo, root = _stored(tmp_path, nodes)
    with pytest.raises(CorruptionError):
        load_tree(repo, root)
    with pytest.raises(CorruptionError) as caught:
        states.ask(repo, entries.manifest, root)
    assert "index rebuild" not in str(caught.value)  # which would not help
    with pytest.raises(CorruptionError):
        states.ask(repo, entries.entry, root, key="")
    repo.close()


@pytest.mark.parametrize("nodes", [[node([["x", 0, ABSENT]])], [A_PAGE, in_pages(("a", A_PAGE), ("b", B_PAGE))]])
def test_nodes_that_are_in_no_pack_are_said_to_be_missing(tmp_path: Path, nodes: Sequence[Node]) -> None:
    repo, root = _stored(tmp_path, nodes)
    for question in (lambda: load_tree(repo, root), lambda: states.ask(repo, entries.manifest, root)):
        with pytest.raises(NotFoundError, match="in no pack"):
            question()
    repo.close()


@pytest.mark.parametrize("name", [name for name in WRONG if name not in ("another first name", "one page twice")])
def test_a_comparison_refuses_nodes_of_the_wrong_kind(tmp_path: Path, name: str) -> None:
    *below, top = WRONG[name]
    other = node([["other", 4, b"\x01"]])
    repo, root = _stored(tmp_path, [*below, other, top])
    with pytest.raises(CorruptionError):
        states.ask(repo, tree_diff.differences, other.digest, root)
    repo.close()


def _stored(path: Path, nodes: Sequence[Node]) -> tuple[RepositoryHandle, Digest]:
    repo = new_repository(path / "repo")
    write_nodes(repo.store, list(nodes))
    repo.sync()
    assert not repo.damaged
    return repo, nodes[-1].digest
