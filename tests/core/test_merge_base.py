"""Merge bases are the best common ancestors, on any graph, as in git."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import InvalidInputError, NotFoundError
from cas_ckpt.index import history
from cas_ckpt.index.history import CommitLinks
from cas_ckpt.index.index import Index
from cas_ckpt.objects.graph import CommitGraph
from cas_ckpt.ops.history.lineage import is_ancestor, merge_bases
from cas_ckpt.ops.refs import create_branch
from tests.builders import commit, new_repository
from tests.index.building import STORE, commit_pack, digest
from tests.searches import tries


@st.composite
def graphs(draw: st.DrawFn) -> dict[bytes, CommitLinks]:
    """Up to twelve commits; each follows some of those before it."""
    count = draw(st.integers(2, 12))
    links = {}
    for number in range(count):
        parents = draw(st.lists(st.integers(0, number - 1), max_size=3, unique=True)) if number else []
        links[bytes([number])] = CommitLinks(b"", None, tuple(bytes([parent]) for parent in parents))
    return links


def paths_lead(links: dict[bytes, CommitLinks], start: bytes, end: bytes) -> bool:
    return start == end or any(paths_lead(links, parent, end) for parent in links[start].parents)


@given(graphs(), st.data())
def test_a_merge_base_is_common_and_no_other_common_one_leads_to_it(
    links: dict[bytes, CommitLinks], data: st.DataObject
) -> None:
    pick = st.sampled_from(sorted(links))
    first, others = data.draw(pick), data.draw(st.lists(pick, min_size=1, max_size=3))
    common = [
        digest for digest in links
        if paths_lead(links, first, digest) and any(paths_lead(links, other, digest) for other in others)
    ]  # fmt: skip
    best = [one for one in common if not any(other != one and paths_lead(links, other, one) for other in common)]
    assert CommitGraph(links).merge_bases(first, others) == sorted(best)


@settings(max_examples=tries(5, 20))
@given(graphs())
def test_where_two_lines_meet_is_what_the_graph_says(links: dict[bytes, CommitLinks]) -> None:
    names = {commit_digest(number): number for number in links}
    graph = CommitGraph(
        {name: CommitLinks(b"", None, tuple(map(commit_digest, links[at].parents))) for name, at in names.items()}
    )
    with Index.open(":memory:", store_id=STORE) as index:
        for number, link in links.items():
            index.add_packs([commit_pack(str(number), list(map(str, link.parents)))])
        for first in names:
            for other in names:
                found = index.read(history.meeting, first, other)
                assert found is None or [found] == graph.merge_bases(first, [other])
                merges = any(len(links[at].parents) > 1 for at in links)
                assert found is not None or merges or graph.merge_bases(first, [other]) == []


def commit_digest(number: bytes) -> bytes:
    return digest(str(number))


@pytest.fixture
def repo(tmp_path: Path) -> RepositoryHandle:
    """main: a - b - m (joins ft); ft: a - c - d; alone: another beginning."""
    handle = new_repository(tmp_path / "repo")
    commit(handle, {"x": 1}, message="a")
    create_branch(handle, "ft")
    commit(handle, {"x": 2}, message="b")
    commit(handle, {"x": 3}, message="c", branch="ft")
    commit(handle, {"x": 4}, message="m", other_parents=[resolve(handle, "ft")])
    commit(handle, {"x": 5}, message="d", branch="ft")
    commit(handle, {"x": 6}, message="alone", branch="alone")
    return handle


def test_two_branches_meet_at_their_last_common_commit(repo: RepositoryHandle) -> None:
    assert merge_bases(repo, ["main", "ft"]) == [resolve(repo, "ft~1")]
    assert merge_bases(repo, ["main~1", "ft"]) == [resolve(repo, "ft~2")]
    assert merge_bases(repo, ["ft", "ft~2"]) == [resolve(repo, "ft~2")]
    assert merge_bases(repo, ["alone", "main"]) == []


def test_several_others_count_as_one(repo: RepositoryHandle) -> None:
    assert merge_bases(repo, ["ft", "alone", "main~1"]) == [resolve(repo, "main~2")]


def test_a_commit_leads_to_itself_and_to_what_came_before(repo: RepositoryHandle) -> None:
    assert is_ancestor(repo, "main", "main") and is_ancestor(repo, "ft~1", "main") and is_ancestor(repo, "ft~2", "ft")
    assert not is_ancestor(repo, "ft", "main") and not is_ancestor(repo, "main", "ft~2")


def test_one_revision_has_no_merge_base(repo: RepositoryHandle) -> None:
    with pytest.raises(InvalidInputError, match="two revisions"):
        merge_bases(repo, ["main"])
    with pytest.raises(NotFoundError):
        merge_bases(repo, ["main", "nothing"])


def test_commits_of_another_process_are_found(repo: RepositoryHandle, tmp_path: Path) -> None:
    theirs = RepositoryHandle.open(tmp_path / "repo", index_url=str(tmp_path / "other.sqlite"))
    commit(theirs, {"x": 7}, message="e", branch="ft")
    assert merge_bases(repo, ["main", "ft"]) == [resolve(repo, "ft~2")]
