"""Forgotten commits stay in history, marked; asking for their data says that they were forgotten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.core.forgotten import write_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import read_gc_state, swap_gc_state
from cas_ckpt.core.refs import RefKind
from cas_ckpt.core.tree import reachable
from cas_ckpt.errors import NotFoundError
from cas_ckpt.index import history
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import Node
from cas_ckpt.ops.history.log import log_commits, show_commit
from cas_ckpt.ops.refs import create_tag, delete_branch, undelete_ref
from cas_ckpt.transfer.pack_writer import write_nodes
from tests.builders import commit, new_repository, numbers
from tests.index.building import all_commits


def with_three(path: Path) -> RepositoryHandle:
    handle = new_repository(path)
    for number in range(3):
        commit(handle, {"w": numbers(5000, seed=number), "x": number}, message=f"c{number}")
    return handle


def id_of(handle: RepositoryHandle, message: str) -> Digest:
    return next(Digest(row.digest) for row in all_commits(handle.index) if row.message == message)


def take_data(handle: RepositoryHandle, digest: Digest) -> None:
    """What a collection leaves of a forgotten commit: its own node, in another pack."""
    row = handle.index.read(history.read_commit, digest)
    assert row is not None
    node = Node(ObjectKind.COMMIT, digest, handle.read_node(ObjectKind.COMMIT, digest))
    gone = [digest, Digest(row.root)]
    packs = {place.pack for places in handle.locate(gone).values() for place in places}
    write_nodes(handle.store, [node])
    for pack in packs:
        handle.store.delete(pack)
    handle.sync()


def take_chunks(handle: RepositoryHandle, digest: Digest) -> None:
    """What a collection leaves that found a pack of nodes too well used to rewrite: the tree, and no chunk."""
    row = handle.index.read(history.read_commit, digest)
    assert row is not None
    found = list(reachable(handle, Digest(row.root)))
    nodes = [
        Node(kind, each, handle.read_node(kind, each))
        for each, places in handle.locate(found).items()
        if (kind := ObjectKind(places[0].kind)) is not ObjectKind.CHUNK
    ]
    layout = [] if row.layout is None else [Digest(row.layout)]
    nodes += [Node(ObjectKind.LAYOUT, each, handle.read_node(ObjectKind.LAYOUT, each)) for each in layout]
    nodes.append(Node(ObjectKind.COMMIT, digest, handle.read_node(ObjectKind.COMMIT, digest)))
    packs = {place.pack for places in handle.locate([digest, *found]).values() for place in places}
    write_nodes(handle.store, nodes)
    for pack in packs:
        handle.store.delete(pack)
    handle.sync()


def marks(handle: RepositoryHandle) -> list[tuple[str, bool]]:
    return [(info.message, info.forgotten) for info in log_commits(handle)]


def test_the_log_marks_forgotten_commits(tmp_path: Path) -> None:
    handle = with_three(tmp_path / "repo")
    write_forgotten(handle.store, [id_of(handle, "c1")], author="me")
    assert marks(handle) == [("c2", False), ("c1", True), ("c0", False)]
    assert show_commit(handle, "main~1").commit.forgotten
    assert not show_commit(handle, "main").commit.forgotten


def test_what_a_ref_names_is_not_given_up(tmp_path: Path) -> None:
    handle = with_three(tmp_path / "repo")
    write_forgotten(handle.store, [id_of(handle, "c1"), id_of(handle, "c2")], author="me")
    create_tag(handle, "v1", "main~1")
    assert marks(handle) == [("c2", False), ("c1", False), ("c0", False)]


def test_show_tells_what_is_left_of_a_commit_whose_data_is_gone(tmp_path: Path) -> None:
    handle = with_three(tmp_path / "repo")
    gone = id_of(handle, "c1")
    write_forgotten(handle.store, [gone], author="me")
    assert show_commit(handle, "main~1").has_data
    take_data(handle, gone)
    shown = show_commit(handle, "main~1")
    assert (shown.commit.message, shown.commit.forgotten, shown.has_data, shown.parts) == ("c1", True, False, ())
    assert marks(handle)[1] == ("c1", True)


ASKING: dict[str, Callable[[Repository], object]] = {
    "checkout": lambda repo: repo.checkout("main~1", into={"x": 1}, strict=False),
    "load": lambda repo: repo.load("main~1"),
    "read": lambda repo: repo.read("main~1", "w"),
    "ls": lambda repo: repo.ls("main~1"),
    "entry": lambda repo: repo.entry("main~1", "x"),
    "diff": lambda repo: repo.diff("main~1", "main"),
    "diff with patterns": lambda repo: repo.diff("main~1", "main", keys="x"),
    "nearest": lambda repo: repo.nearest("main~1"),
    "plan": lambda repo: repo.plan("main~1", "dp=2"),
    "holders": lambda repo: repo.holders("main~1", "w"),
    "export": lambda repo: repo.export("main~1", "never.safetensors"),
    "du": lambda repo: repo.du(by="tensor", ref="main~1"),
    "dcp": lambda repo: repo.export("main~1", "never", format="dcp"),
    "branch": lambda repo: repo.branch("new", start="main~1"),
    "tag": lambda repo: repo.tag("new", "main~1"),
    "pin": lambda repo: repo.pin("main~1"),
    "commit": lambda repo: repo.commit({"x": 5}, branch="new", options=CommitOptions(parents=["main~1"])),
}


@pytest.mark.parametrize("verb", ASKING)
def test_asking_for_data_that_is_gone_says_that_it_was_forgotten(tmp_path: Path, verb: str) -> None:
    handle = with_three(tmp_path / "repo")
    gone = id_of(handle, "c1")
    write_forgotten(handle.store, [gone], author="me")
    take_data(handle, gone)
    handle.close()
    with Repository.open(tmp_path / "repo") as repo:
        told = f"commit {gone.hex()[:12]} was forgotten, and gc has removed its data.*repo.log"
        with pytest.raises(NotFoundError, match=told):
            ASKING[verb](repo)
        assert repo.load("main")["x"] == 2


@pytest.mark.parametrize("verb", ["checkout", "load", "read", "diff with numbers", "export"])
def test_chunks_that_are_gone_while_the_tree_is_still_stored_are_said_to_be_forgotten(
    tmp_path: Path, verb: str
) -> None:
    handle = with_three(tmp_path / "repo")
    gone = id_of(handle, "c1")
    write_forgotten(handle.store, [gone], author="me")
    take_chunks(handle, gone)
    handle.close()
    asking = {
        **ASKING,
        "diff with numbers": lambda repo: repo.diff("main~1", "main", numbers=True),
        "checkout": lambda repo: repo.checkout("main~1", into=repo.load("main")),
        "export": lambda repo: repo.export("main~1", str(tmp_path / "out.safetensors"), keys="w"),
    }
    with Repository.open(tmp_path / "repo") as repo, pytest.raises(NotFoundError, match="was forgotten, and gc"):
        asking[verb](repo)


def test_a_pattern_without_an_entry_in_a_forgotten_commit_that_is_still_whole_is_a_mistake_of_the_pattern(
    tmp_path: Path,
) -> None:
    handle = with_three(tmp_path / "repo")
    write_forgotten(handle.store, [id_of(handle, "c1")], author="me")
    handle.close()
    with Repository.open(tmp_path / "repo") as repo, pytest.raises(NotFoundError, match=r"^no entry matches nothing"):
        repo.diff("main~1", "main", keys="nothing")


def test_a_commit_that_a_tag_keeps_is_not_called_forgotten_when_its_pack_is_lost(tmp_path: Path) -> None:
    handle = with_three(tmp_path / "repo")
    kept = id_of(handle, "c1")
    create_tag(handle, "v1", "main~1")
    write_forgotten(handle.store, [kept], author="me")
    take_data(handle, kept)
    handle.close()
    with Repository.open(tmp_path / "repo") as repo, pytest.raises(NotFoundError, match=r"repo\.fsck\(\) says"):
        repo.load("v1")


def test_data_that_is_gone_without_having_been_forgotten_is_called_missing(tmp_path: Path) -> None:
    handle = with_three(tmp_path / "repo")
    write_forgotten(handle.store, [id_of(handle, "c0")], author="me")
    take_data(handle, id_of(handle, "c1"))
    handle.close()
    with Repository.open(tmp_path / "repo") as repo, pytest.raises(NotFoundError, match="is in no pack"):
        repo.load("main~1")


def test_a_log_by_key_steps_over_commits_whose_data_is_gone(tmp_path: Path) -> None:
    handle = with_three(tmp_path / "repo")
    commit(handle, {"w": numbers(5000, seed=2), "x": 3}, message="c3")
    gone = id_of(handle, "c1")
    write_forgotten(handle.store, [gone], author="me")
    take_data(handle, gone)
    assert [info.message for info in log_commits(handle, keys="w")] == ["c2", "c0"]
    assert [info.message for info in log_commits(handle, keys="x")] == ["c3", "c2", "c0"]


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_branch_comes_back_over_a_commit_without_data_only_if_that_was_forgotten(
    tmp_path: Path, is_forgotten: bool
) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, {"x": 0}, message="kept")
    for number in range(3):
        commit(handle, {"w": numbers(5000, seed=number)}, message=f"ft{number}", branch="ft")
    middle = id_of(handle, "ft1")
    if is_forgotten:
        write_forgotten(handle.store, [middle], author="me")
    take_data(handle, middle)
    delete_branch(handle, "ft", force=True)
    state = read_gc_state(handle.store)
    swap_gc_state(handle.store, state, generation=state.generation.next(), phase="idle", condemned=())
    if is_forgotten:
        assert undelete_ref(handle, RefKind.BRANCH, "ft") == id_of(handle, "ft2")
    else:
        with pytest.raises(NotFoundError, match="cannot be brought back"):
            undelete_ref(handle, RefKind.BRANCH, "ft")
