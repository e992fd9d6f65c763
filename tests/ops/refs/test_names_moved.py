"""Names are renamed, brought back, annotated and pinned; the reflog tells what happened to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas_ckpt import clock
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import read_gc_state, swap_gc_state
from cas_ckpt.core.refs import PLACEHOLDER_GENERATION, RefKind
from cas_ckpt.core.revisions import resolve
from cas_ckpt.core.settings import Remote
from cas_ckpt.errors import ConflictError, InvalidInputError, NotFoundError, StorageError
from cas_ckpt.index import history
from cas_ckpt.ops.history.log import show_commit
from cas_ckpt.ops.refs import (
    create_branch,
    create_pin,
    create_tag,
    delete_branch,
    delete_pin,
    delete_ref,
    list_pins,
    named,
    reflog,
    rename_ref,
    tag_messages,
    undelete_ref,
)
from cas_ckpt.ops.sync.remotes import add_remote
from tests.builders import commit, new_repository, numbers
from tests.index.building import all_commits


@pytest.fixture
def repo(tmp_path: Path) -> RepositoryHandle:
    handle = new_repository(tmp_path / "repo")
    for number in range(3):
        commit(handle, {"x": number}, message=f"c{number}", author="ann")
    return handle


def branches(handle: RepositoryHandle) -> dict[str, str]:
    return named(handle, RefKind.BRANCH)


def actions(handle: RepositoryHandle, name: str | None = None) -> list[str]:
    return [move.action for move in reflog(handle, name)]


# --- rename ----------------------------------------------------------------------------------


def test_a_renamed_branch_names_what_it_named(repo: RepositoryHandle) -> None:
    made = create_branch(repo, "ft", start="main~1")
    assert rename_ref(repo, RefKind.BRANCH, "ft", "tuned") == made
    assert branches(repo) == {"main": resolve(repo, "main").hex(), "tuned": made.hex()}


def test_a_renamed_tag_keeps_its_message(repo: RepositoryHandle) -> None:
    create_tag(repo, "v1", "main~1", message="as released")
    rename_ref(repo, RefKind.TAG, "v1", "v1.0")
    assert tag_messages(repo) == {"v1.0": "as released"}
    assert named(repo, RefKind.TAG) == {"v1.0": resolve(repo, "main~1").hex()}


def test_a_name_that_is_taken_is_not_taken_away(repo: RepositoryHandle) -> None:
    create_branch(repo, "ft")
    create_branch(repo, "other", start="main~1")
    create_tag(repo, "v1")
    before = {ref.name: ref.target for ref in repo.refs.list()}
    for old, new in (("ft", "other"), ("ft", "v1"), ("ft", "main")):
        with pytest.raises(ConflictError):
            rename_ref(repo, RefKind.BRANCH, old, new)
    with pytest.raises(InvalidInputError, match="default branch"):
        rename_ref(repo, RefKind.BRANCH, "main", "trunk")
    with pytest.raises(InvalidInputError, match="that name already"):
        rename_ref(repo, RefKind.BRANCH, "ft", "ft")
    with pytest.raises(NotFoundError):
        rename_ref(repo, RefKind.BRANCH, "nothing", "something")
    assert {ref.name: ref.target for ref in repo.refs.list()} == before


@pytest.mark.parametrize("new", ["other", "up/main"])
def test_a_name_that_nothing_can_be_renamed_to_is_refused_without_a_way_to_force_it(
    repo: RepositoryHandle, new: str
) -> None:
    create_branch(repo, "ft")
    create_branch(repo, "other")
    add_remote(repo, Remote("up", "/mnt/up"))
    with pytest.raises(ConflictError, match="choose another name$"):
        rename_ref(repo, RefKind.BRANCH, "ft", new)


def test_whoever_lists_while_a_branch_is_renamed_sees_it(repo: RepositoryHandle) -> None:
    target = create_branch(repo, "ft", start="main~1")
    seen = []
    swap = repo.refs.swap

    def watched(*args: object, **options: object) -> object:
        done = swap(*args, **options)  # type: ignore[arg-type]
        seen.append([ref.name for ref in repo.refs.list() if ref.target == target])
        return done

    repo.refs.swap = watched  # type: ignore[method-assign,assignment]
    rename_ref(repo, RefKind.BRANCH, "ft", "tuned")
    assert seen == [["ft", "tuned"], ["tuned"]]


def test_a_commit_that_arrives_while_its_branch_is_renamed_is_not_lost(repo: RepositoryHandle) -> None:
    create_branch(repo, "ft")
    swap = repo.refs.swap
    arrived = []

    def late(ref: object, target: object, **options: object) -> object:
        if target is None and not arrived:
            arrived.append(None)
            arrived[0] = commit(repo, {"x": "late"}, branch="ft").id
        return swap(ref, target, **options)  # type: ignore[arg-type]

    repo.refs.swap = late  # type: ignore[method-assign,assignment]
    with pytest.raises(ConflictError, match="moved while it was renamed"):
        rename_ref(repo, RefKind.BRANCH, "ft", "tuned")
    assert branches(repo) == {"ft": arrived[0], "main": resolve(repo, "main").hex()}


def test_a_collection_that_begins_meanwhile_does_not_keep_a_name_from_going(repo: RepositoryHandle) -> None:
    target = create_branch(repo, "ft")
    fenced = repo.refs.get(RefKind.BRANCH, "ft")
    get = repo.refs.get

    def stale(kind: RefKind, name: str) -> object:
        found = get(kind, name)
        repo.refs.get = get  # type: ignore[method-assign]
        # The collector's fence: the same target, another record.
        repo.refs.swap(fenced, target, generation=PLACEHOLDER_GENERATION)
        return found

    repo.refs.get = stale  # type: ignore[method-assign,assignment]
    assert delete_branch(repo, "ft", force=True) == target
    assert "ft" not in branches(repo)


# --- undelete --------------------------------------------------------------------------------


def test_what_was_deleted_comes_back_as_it_was(repo: RepositoryHandle) -> None:
    create_branch(repo, "ft")
    own = commit(repo, {"x": "tuned"}, branch="ft")
    create_tag(repo, "v1", "main~1", message="as released")
    create_pin(repo, "main~2", name="first", reason="why")
    delete_branch(repo, "ft", force=True), delete_ref(repo, RefKind.TAG, "v1"), delete_pin(repo, "first")
    assert list(branches(repo)) == ["main"]
    assert undelete_ref(repo, RefKind.BRANCH, "ft").hex() == own.id == branches(repo)["ft"]
    assert undelete_ref(repo, RefKind.TAG, "v1") == resolve(repo, "refs/tags/v1") == resolve(repo, "main~1")
    assert undelete_ref(repo, RefKind.PIN, "first") == resolve(repo, "refs/pins/first")
    assert (tag_messages(repo), [pin.reason for pin in list_pins(repo)]) == ({"v1": "as released"}, ["why"])


def test_the_last_deletion_is_undone(repo: RepositoryHandle) -> None:
    for start in ("main~2", "main~1"):
        create_branch(repo, "ft", start=start)
        delete_branch(repo, "ft", force=True)
    assert undelete_ref(repo, RefKind.BRANCH, "ft") == resolve(repo, "main~1")


def test_what_was_never_deleted_cannot_come_back(repo: RepositoryHandle) -> None:
    create_branch(repo, "ft")
    repo.refs.create_placeholder(RefKind.BRANCH, "begun")
    with pytest.raises(ConflictError, match="is there"):
        undelete_ref(repo, RefKind.BRANCH, "ft")
    for name in ("nothing", "begun"):
        with pytest.raises(NotFoundError):
            undelete_ref(repo, RefKind.BRANCH, name)
    delete_branch(repo, "ft", force=True)
    create_tag(repo, "ft")
    with pytest.raises(ConflictError, match="'ft' is a tag already"):
        undelete_ref(repo, RefKind.BRANCH, "ft")


def test_what_was_collected_does_not_come_back(repo: RepositoryHandle) -> None:
    create_branch(repo, "ft")
    for number in range(2):
        commit(repo, {"w": numbers(5000, seed=number)}, branch="ft")
    delete_branch(repo, "ft", force=True)
    older = repo.index.read(history.read_commit, repo.refs.get(RefKind.BRANCH, "ft").log[-1].old or b"").parents[0]  # type: ignore[union-attr]
    packs = {
        place.pack
        for place in repo.locate([repo.index.read(history.read_commit, older).root])[
            repo.index.read(history.read_commit, older).root
        ]
    }  # type: ignore[union-attr,index]
    state = read_gc_state(repo.store)
    state = swap_gc_state(
        repo.store, state, generation=state.generation.next(), phase="deleting", condemned=tuple(sorted(packs))
    )
    with pytest.raises(NotFoundError, match="cannot be brought back.*removed by gc"):
        undelete_ref(repo, RefKind.BRANCH, "ft")
    assert state.generation.number == 1 and "ft" not in branches(repo)


# --- annotated tags and pins -----------------------------------------------------------------


def test_a_tag_that_is_moved_takes_its_new_message(repo: RepositoryHandle) -> None:
    create_tag(repo, "v1", message="one")
    create_tag(repo, "v1", "main~1", message="two", force=True)
    assert tag_messages(repo) == {"v1": "two"}
    create_tag(repo, "v1", "main~1", force=True)
    assert tag_messages(repo) == {}
    with pytest.raises(InvalidInputError, match="longer than"):
        create_tag(repo, "v2", message="x" * 5000)


def test_a_pin_has_a_name_of_its_own(repo: RepositoryHandle) -> None:
    create_branch(repo, "paper")
    with clock.fixed(lambda: 1000.0):
        made = create_pin(repo, "main~1", name="paper", reason="table 2")
    assert list_pins(repo) == [made]
    assert (made.commit, made.reason, made.time_s) == (resolve(repo, "main~1").hex(), "table 2", 1000.0)
    assert resolve(repo, "paper") == resolve(repo, "main")
    assert resolve(repo, "refs/pins/paper").hex() == made.commit
    assert create_pin(repo, "main").name == f"pin-{resolve(repo, 'main').hex()[:12]}"
    with pytest.raises(ConflictError, match="there is a pin 'paper' already"):
        create_pin(repo, name="paper")
    delete_pin(repo, "paper")
    with pytest.raises(NotFoundError, match="there is no pin 'paper'"):
        delete_pin(repo, "paper")


def test_show_tells_all_that_names_a_commit(repo: RepositoryHandle) -> None:
    create_tag(repo, "v1", message="as released")
    create_pin(repo, name="paper", reason="table 2")
    shown = show_commit(repo, "main")
    assert (shown.branches, shown.tags, shown.pins) == (("main",), ("v1",), ("paper",))
    assert shown.notes == {"refs/tags/v1": "as released", "refs/pins/paper": "table 2"}


# --- reflog ----------------------------------------------------------------------------------


def test_commits_on_top_are_told_by_first_parents(repo: RepositoryHandle) -> None:
    assert actions(repo) == ["commit: c2", "commit: c1", "commit: c0"]
    moves = reflog(repo, limit=2)
    assert [(move.old, move.new) for move in moves] == [
        (resolve(repo, "main~1").hex(), resolve(repo, "main").hex()),
        (resolve(repo, "main~2").hex(), resolve(repo, "main~1").hex()),
    ]
    assert {move.author for move in moves} == {"ann"}


def test_moves_and_commits_are_told_in_order(repo: RepositoryHandle) -> None:
    create_branch(repo, "ft", start="main~1")
    tuned = commit(repo, {"x": "tuned"}, branch="ft", message="tuned")
    create_branch(repo, "ft", start="main", force=True)
    commit(repo, {"x": "again"}, branch="ft", message="again")
    delete_branch(repo, "ft", force=True)
    undelete_ref(repo, RefKind.BRANCH, "ft")
    assert actions(repo, "ft") == [
        "undeleted", "deleted", "commit: again", "branch: set to main", "commit: tuned", "branch: set to main~1",
    ]  # fmt: skip
    assert reflog(repo, "ft")[3].old == tuned.id


def test_a_deleted_branch_still_tells_where_it_was(repo: RepositoryHandle) -> None:
    commit(repo, {"x": "alone"}, branch="alone", message="alone")
    delete_branch(repo, "alone", force=True)
    assert actions(repo, "alone") == ["deleted", "commit: alone"]
    with pytest.raises(NotFoundError, match="never was"):
        reflog(repo, "nothing")


def test_a_renamed_branch_tells_its_name(repo: RepositoryHandle) -> None:
    create_branch(repo, "ft")
    rename_ref(repo, RefKind.BRANCH, "ft", "tuned")
    assert actions(repo, "tuned") == ["renamed from ft"]
    assert actions(repo, "ft")[0] == "renamed to tuned"


def test_a_commit_that_was_never_published_is_not_told(repo: RepositoryHandle) -> None:
    def refused(*args: object, **options: object) -> object:
        raise StorageError("the medium refuses")

    swap, repo.refs.swap = repo.refs.swap, refused  # type: ignore[method-assign,assignment]
    with pytest.raises(StorageError):
        commit(repo, {"x": "lost"}, message="lost")
    repo.refs.swap = swap  # type: ignore[method-assign]
    assert "commit: lost" in {f"commit: {row.message}" for row in all_commits(repo.index)}
    assert actions(repo) == ["commit: c2", "commit: c1", "commit: c0"]
