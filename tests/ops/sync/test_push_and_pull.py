"""push, fetch, pull and clone: commits are the same commits at the other side, whole, and refs move forward only."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas_ckpt import Repository, limits
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.refs import RefKind
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import ConflictError, CorruptionError, InvalidInputError, NotFoundError
from cas_ckpt.index import contents
from cas_ckpt.ops.fsck.check import check_url
from cas_ckpt.ops.sync.send import Moved, RefUpdate, SendOptions, send
from tests.builders import commit, leave_garbage, numbers, same_bytes, stored_arrays, weights
from tests.committing import new_store, on, together
from tests.divided import mesh, over, state_of

BIG = numbers(600, 1000, seed=99)


def items(step: int) -> dict[str, object]:
    return {"frozen": BIG, "w": weights(step), "deep": {"er": {"w": weights(step % 2)}}, "step": step}


class Pair:
    """A repository of ours, and another one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.here = Repository.init(folder / "here")
        self.there = Repository.init(folder / "there")
        self.here.add_remote("origin", folder / "there")

    @property
    def ours(self) -> RepositoryHandle:
        return self.here._handle

    @property
    def theirs(self) -> RepositoryHandle:
        return self.there._handle


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def require_same(one: RepositoryHandle, other: RepositoryHandle, revision: str, as_revision: str = "") -> None:
    digest = resolve(one, revision)
    assert resolve(other, as_revision or revision) == digest
    rows = [commit_of(handle, digest) for handle in (one, other)]
    assert rows[0] == rows[1]
    states = [stored_arrays(handle, rows[0].root.hex()) for handle in (one, other)]
    assert states[0].keys() == states[1].keys()
    assert all(same_bytes(states[0][key], states[1][key]) for key in states[0])


def require_sound(url: str) -> None:
    report = check_url(url)
    assert report.ok, report


def test_a_push_makes_the_same_commits_there(pair: Pair) -> None:
    for step in range(5):
        commit(pair.ours, items(step), step=step)
    report = pair.here.push()
    assert [ref.how for ref in report.refs] == [Moved.NEW]
    assert report.num_commits == 5
    for step in range(5):
        require_same(pair.ours, pair.theirs, f"main~{step}")
    assert [info.id for info in pair.there.log()] == [info.id for info in pair.here.log()]
    assert pair.here.remote_branches() == {"origin/main": pair.here.resolve("main")}
    assert pair.here.resolve("origin/main~1") == pair.here.resolve("main~1")
    require_sound(pair.there.url)


def test_a_push_of_what_is_there_does_nothing(pair: Pair) -> None:
    commit(pair.ours, items(0))
    pair.here.push()
    before = sorted(pair.theirs.store.list(""))
    report = pair.here.push()
    assert [ref.how for ref in report.refs] == [Moved.SAME]
    assert (report.num_commits, report.num_bytes, report.num_packs) == (0, 0, 0)
    assert sorted(pair.theirs.store.list("")) == before


def test_only_what_changed_is_sent(pair: Pair) -> None:
    commit(pair.ours, items(0))
    pair.here.push()
    commit(pair.ours, items(1))
    changed = commit_of(pair.ours, resolve(pair.ours, "main")).stats
    report = pair.here.push()
    assert [ref.how for ref in report.refs] == [Moved.FORWARD]
    assert report.num_bytes < BIG.nbytes / 10
    assert report.num_bytes <= 1.05 * changed["stored_bytes"] + 2000  # the commit itself
    require_same(pair.ours, pair.theirs, "main")


def test_stored_bytes_are_copied_as_they_are(tmp_path: Path) -> None:
    here = Repository.init(tmp_path / "here", encoding="zstd")
    there = Repository.init(tmp_path / "there", encoding="raw")
    commit(here._handle, {"w": numbers(400, 400) * 0 + 3.5, "x": numbers(300, 300).astype("int64").astype("float32")})
    here.push(there.url)

    def payloads(handle: RepositoryHandle) -> dict[bytes, tuple[int, int]]:
        handle.sync()
        found = {}
        for key in handle.present_packs():
            if key.endswith(".data"):
                from cas_ckpt.core.packs import read_directory

                found |= {
                    info.digest: (info.encoding, info.stored_bytes) for info in read_directory(handle.store, key)[1]
                }
        return found

    assert payloads(here._handle) == payloads(there._handle)
    names = [{key for key, _ in each._handle.store.list("packs/")} for each in (here, there)]
    assert names[0].isdisjoint(names[1])


def test_garbage_is_not_sent(pair: Pair) -> None:
    garbage = leave_garbage(pair.ours)
    pair.here.push()
    with pytest.raises(NotFoundError):
        pair.there.show(garbage.id)


def test_a_branch_that_went_another_way_there_is_not_overwritten(pair: Pair, tmp_path: Path) -> None:
    commit(pair.ours, items(0))
    pair.here.push()
    commit(pair.theirs, items(7))
    commit(pair.ours, items(1))
    with pytest.raises(ConflictError, match="not known here"):
        pair.here.push()
    pair.here.fetch()
    with pytest.raises(ConflictError, match="does not follow"):
        pair.here.push()
    with pytest.raises(ConflictError, match="neither follows"):
        pair.here.pull()
    theirs = pair.there.resolve("main")
    report = pair.here.push(force=True)
    assert [ref.how for ref in report.refs] == [Moved.FORCED]
    require_same(pair.ours, pair.theirs, "main")
    assert theirs in [move.old for move in pair.there.reflog("main")]


def test_a_lease_allows_what_was_seen_and_nothing_else(pair: Pair) -> None:
    commit(pair.ours, items(0))
    pair.here.push()
    pair.here.branch("main", start=commit(pair.ours, items(3), branch="side", orphan=True).id, force=True)
    seen = pair.there.resolve("main")
    commit(pair.theirs, items(7))
    with pytest.raises(ConflictError, match="as expected"):
        pair.here.push(force_with_lease=True)
    pair.here.fetch()
    with pytest.raises(ConflictError, match="as expected"):
        pair.here.push(force_with_lease=seen)
    pair.here.push(force_with_lease=True)
    require_same(pair.ours, pair.theirs, "main")


def test_several_branches_and_tags_go_together_and_deleted_ones_go(pair: Pair) -> None:
    for name in ("main", "ft/a", "ft/b"):
        commit(pair.ours, items(len(name)), branch=name)
    pair.here.tag("v1", "ft/a", message="as released")
    pair.here.push(all_branches=True, tags=True)
    assert pair.there.branches() == pair.here.branches()
    assert pair.there.tag_messages() == {"v1": "as released"}
    pair.here.push(refs=[":ft/a"], delete="refs/tags/v1")
    assert list(pair.there.branches()) == ["ft/b", "main"]
    assert not pair.there.tags()
    assert "origin/ft/a" not in pair.here.remote_branches()
    with pytest.raises(NotFoundError, match="nothing is to be deleted"):
        pair.here.push(delete="ft/a")
    with pytest.raises(InvalidInputError, match="default branch"):
        pair.here.push(delete="main")
    commit(pair.theirs, items(9), branch="theirs")  # nobody else has it, and no branch but this leads to it
    alone = pair.there.resolve("theirs")
    pair.here.push(delete="theirs")
    assert "theirs" not in pair.there.branches()
    assert pair.there.undelete_branch("theirs") == alone


def test_a_revision_can_be_pushed_under_a_name(pair: Pair) -> None:
    for step in range(3):
        commit(pair.ours, items(step))
    pair.here.push(refs="main~1:eval/run-1")
    require_same(pair.ours, pair.theirs, "main~1", "eval/run-1")
    with pytest.raises(NotFoundError):
        pair.there.show(pair.here.resolve("main"))
    with pytest.raises(InvalidInputError, match="say what to call it there"):
        pair.here.push(refs="main~1")


def test_a_tag_that_names_another_commit_there_stays(pair: Pair) -> None:
    commit(pair.ours, items(0))
    pair.here.tag("v1")
    pair.here.push(refs=["main", "v1"])
    commit(pair.ours, items(1))
    pair.here.tag("v1", force=True)
    with pytest.raises(ConflictError, match="tags stay"):
        pair.here.push(refs="v1")
    pair.here.push(refs="+v1")
    require_same(pair.ours, pair.theirs, "v1")


def test_a_dry_run_says_what_would_be_sent_and_changes_nothing(pair: Pair) -> None:
    for step in range(3):
        commit(pair.ours, items(step))
    before = sorted(pair.theirs.store.list(""))
    foreseen = pair.here.push(dry_run=True)
    assert sorted(pair.theirs.store.list("")) == before
    assert not pair.here.remote_branches()
    done = pair.here.push()
    assert (foreseen.num_bytes, foreseen.num_nodes, foreseen.num_chunks, foreseen.num_commits) == (
        done.num_bytes, done.num_nodes, done.num_chunks, done.num_commits
    )  # fmt: skip
    assert foreseen.refs == done.refs


# --- the other way --------------------------------------------------------------------------------


def test_a_clone_has_it_all_and_goes_on(pair: Pair, tmp_path: Path) -> None:
    for step in range(3):
        commit(pair.ours, items(step))
    commit(pair.ours, items(9), branch="ft")
    pair.here.tag("v1", "main~1", message="first")
    with Repository.clone(pair.here.url, tmp_path / "clone") as made:
        handle = made._handle
        require_same(pair.ours, handle, "main")
        require_same(pair.ours, handle, "ft", "origin/ft")
        assert made.tag_messages() == {"v1": "first"}
        assert list(made.branches()) == ["main"]
        assert [remote.url for remote in made.remotes()] == [pair.here.url]
        before = commit(handle, items(4))
        assert before.parents == (pair.here.resolve("main"),)
        made.push()
    require_same(pair.ours, RepositoryHandle.open(tmp_path / "clone"), "main")
    require_sound(str(tmp_path / "clone"))
    require_sound(pair.here.url)


def test_a_pull_moves_the_branch_forward(pair: Pair) -> None:
    commit(pair.ours, items(0))
    pair.here.push()
    for step in (1, 2):
        commit(pair.theirs, items(step))
    pair.there.tag("v1", "main~1")
    report = pair.here.pull()
    assert {ref.ref: ref.how for ref in report.refs} == {
        "refs/remotes/origin/main": Moved.FORWARD, "refs/tags/v1": Moved.NEW, "refs/heads/main": Moved.FORWARD,
    }  # fmt: skip
    require_same(pair.ours, pair.theirs, "main")
    commit(pair.ours, items(3))
    head = pair.here.resolve("main")
    assert [ref.how for ref in pair.here.pull().refs] == [Moved.SAME, Moved.SAME]  # ahead: there is nothing to pull
    assert pair.here.resolve("main") == head


def test_a_place_without_a_name_is_fetched_into_fetch_head(pair: Pair) -> None:
    commit(pair.theirs, items(0))
    commit(pair.theirs, items(1), branch="ft")
    pair.there.tag("v1", "ft")
    with Repository.init(pair.folder / "third") as third:
        report = third.fetch(pair.folder / "there", "ft")
        assert [(ref.ref, ref.how) for ref in report.refs] == [
            ("refs/remotes/FETCH_HEAD", Moved.NEW), ("refs/tags/v1", Moved.NEW),
        ]  # fmt: skip
        assert third.resolve("FETCH_HEAD") == pair.there.resolve("ft")
        third.branch("mine", start="FETCH_HEAD")
        third.fetch(pair.there.url)
        assert third.resolve("FETCH_HEAD") == pair.there.resolve("main")
        require_same(third._handle, pair.theirs, "FETCH_HEAD", "main")
        with pytest.raises(NotFoundError, match=r"no branch 'mian' at .* \(did you mean 'main'\?\)"):
            third.fetch(pair.there.url, "mian")
        with pytest.raises(InvalidInputError, match="give it a name"):
            third.fetch(pair.there.url, ["main", "ft"])
    require_sound(str(pair.folder / "third"))


def test_a_tag_that_moved_there_is_rejected_and_the_rest_comes(pair: Pair) -> None:
    commit(pair.theirs, items(0))
    pair.there.tag("v1")
    pair.here.pull()
    was = pair.here.resolve("v1")
    commit(pair.theirs, items(1))
    pair.there.tag("v1", force=True)
    report = pair.here.pull()
    assert {ref.ref: ref.how for ref in report.refs}["refs/tags/v1"] is Moved.REJECTED
    assert (pair.here.resolve("v1"), pair.here.resolve("main")) == (was, pair.there.resolve("main"))
    assert [ref.how for ref in pair.here.fetch(force=True).refs if ref.ref == "refs/tags/v1"] == [Moved.FORCED]
    assert pair.here.resolve("v1") == pair.there.resolve("v1")
    assert "refs/tags/v1" not in {ref.ref for ref in pair.here.fetch().refs}


def test_a_tag_of_the_other_side_is_deleted_by_its_plain_name(pair: Pair) -> None:
    commit(pair.ours, items(0))
    pair.here.tag("v1")
    pair.here.tag("v2")
    pair.here.push(tags=True, all_branches=True)
    pair.here.push(delete="v1")
    pair.here.push("origin", ":v2")
    assert pair.there.tags() == {}
    with pytest.raises(NotFoundError, match="nothing is to be deleted"):
        pair.here.push(delete="v1")


def test_what_another_repository_has_now_is_listed_without_fetching(pair: Pair) -> None:
    commit(pair.theirs, items(0))
    pair.there.tag("v1")
    head = pair.there.resolve("main")
    assert pair.here.ls_remote() == {"refs/heads/main": head, "refs/tags/v1": head}
    assert pair.here.ls_remote(pair.there.url) == pair.here.ls_remote("origin")
    assert pair.here.remote_branches() == {}


def test_how_branches_stand_to_those_of_the_remote_is_counted(pair: Pair) -> None:
    for step in (0, 1):
        commit(pair.ours, items(step))
    pair.here.push()
    tracked = pair.here.tracked_branches()
    assert [(each.remote_branch, each.ahead, each.behind) for each in tracked.values()] == [("origin/main", 0, 0)]
    pair.here.branch("main", start="main~1", force=True)
    assert (pair.here.tracked_branches()["main"].ahead, pair.here.tracked_branches()["main"].behind) == (0, 1)
    commit(pair.ours, items(2))
    commit(pair.ours, items(3), branch="own")
    tracked = pair.here.tracked_branches()
    assert (tracked["main"].ahead, tracked["main"].behind) == (1, 1)
    assert list(tracked) == ["main"]


def test_a_fetch_brings_what_matches_and_prunes_what_is_gone(pair: Pair) -> None:
    for name in ("main", "ft/a", "ft/b"):
        commit(pair.theirs, items(len(name) + ord(name[-1])), branch=name)
    pair.here.fetch(branches="ft/*")
    assert list(pair.here.remote_branches()) == ["origin/ft/a", "origin/ft/b"]
    pair.there.delete_branch("ft/a", force=True)
    pair.here.fetch()
    assert list(pair.here.remote_branches()) == ["origin/ft/a", "origin/ft/b", "origin/main"]
    pair.here.fetch(prune=True)
    assert list(pair.here.remote_branches()) == ["origin/ft/b", "origin/main"]
    with pytest.raises(NotFoundError, match="nothing"):
        pair.here.fetch(branches="nothing")


def test_a_collection_keeps_what_a_remote_tracking_branch_names(pair: Pair) -> None:
    commit(pair.theirs, items(0))
    pair.here.fetch()
    pair.here.gc(min_age_s=0)
    require_same(pair.theirs, pair.ours, "main", "origin/main")
    pair.here.remove_remote("origin")
    assert not pair.here.remotes() and not pair.here.remote_branches()
    pair.here.gc(min_age_s=0, reflog_expire_s=0)
    assert not list(pair.ours.store.list("packs/"))


def test_remotes_are_renamed_with_their_branches(pair: Pair) -> None:
    commit(pair.ours, items(0))
    pair.here.push()
    pair.here.rename_remote("origin", "upstream")
    assert list(pair.here.remote_branches()) == ["upstream/main"]
    assert [remote.name for remote in pair.here.remotes()] == ["upstream"]
    with pytest.raises(NotFoundError, match="upstream"):
        pair.here.push()
    pair.here.set_remote("upstream", push="ft/*")
    commit(pair.ours, items(1), branch="ft/x")
    assert [ref.ref for ref in pair.here.push("upstream").refs] == ["refs/heads/ft/x"]
    with pytest.raises(ConflictError):
        pair.here.add_remote("upstream", "memory://x")


def test_forgotten_commits_travel_without_their_data(pair: Pair) -> None:
    for step in range(4):
        commit(pair.ours, items(step))
    forgotten = [pair.here.resolve("main~1"), pair.here.resolve("main~3")]
    pair.here.forget(revisions=forgotten)
    report = pair.here.push()
    assert (report.num_commits, report.num_forgotten) == (4, 2)
    assert [info.id for info in pair.there.log() if info.forgotten] == forgotten
    require_same(pair.ours, pair.theirs, "main")
    require_same(pair.ours, pair.theirs, "main~2")
    require_sound(pair.there.url)
    pair.there.gc(min_age_s=0)
    require_sound(pair.there.url)
    with pytest.raises(NotFoundError, match="forgotten"):
        pair.here.push(refs="main~1:x")


def test_a_damaged_chunk_is_never_passed_on(pair: Pair) -> None:
    commit(pair.ours, items(0))
    pack = next((pair.folder / "here" / "packs").glob("*/*.data"))
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    with pytest.raises(CorruptionError):
        pair.here.push()
    assert not pair.there.branches()
    assert not list(pair.theirs.store.list("packs/"))


def test_a_lost_chunk_that_the_other_side_has_is_no_obstacle(pair: Pair) -> None:
    """What both have is not read again."""
    commit(pair.ours, items(0))
    pair.here.push()
    commit(pair.ours, items(1))
    for pack in (pair.folder / "here" / "packs").glob("*/*.data"):
        if pack.stat().st_size > BIG.nbytes:
            pack.unlink()
    pair.here.push()
    assert pair.there.resolve("main") == pair.here.resolve("main")
    require_sound(pair.there.url)


def test_after_a_force_push_a_fetch_follows(pair: Pair) -> None:
    commit(pair.theirs, items(0))
    pair.here.fetch()
    pair.there.branch("main", start=commit(pair.theirs, items(5), branch="x", orphan=True).id, force=True)
    report = pair.here.fetch()
    assert {ref.ref: ref.how for ref in report.refs}["refs/remotes/origin/main"] is Moved.FORCED
    require_same(pair.theirs, pair.ours, "main", "origin/main")
    assert pair.ours.refs.get(RefKind.REMOTE, "origin/main").log


def test_a_clone_of_some_depth_has_the_data_of_the_last_commits_and_the_record_of_all(
    pair: Pair, tmp_path: Path
) -> None:
    for step in range(6):
        commit(pair.ours, items(step), step=step)
    pair.here.tag("v1", "main~4")
    with Repository.clone(pair.here.url, tmp_path / "clone", depth=2) as made:
        assert [info.id for info in made.log()] == [info.id for info in pair.here.log()]
        assert [info.forgotten for info in made.log()] == [False, False, True, True, False, False]  # v1, too
        require_same(pair.ours, made._handle, "main~1")
        require_same(pair.ours, made._handle, "v1")
        made.gc(min_age_s=0)
        commit(made._handle, items(9))
        made.push()
        with Repository.clone(made.url, tmp_path / "again") as again:
            assert [info.forgotten for info in again.log()][:4] == [False, False, False, True]
    require_same(RepositoryHandle.open(tmp_path / "clone"), pair.ours, "main")
    require_sound(str(tmp_path / "clone"))
    require_sound(str(tmp_path / "again"))
    require_sound(pair.here.url)
    with pytest.raises(InvalidInputError, match="depth"):
        Repository.clone(pair.here.url, tmp_path / "x", depth=0)


def test_a_repository_whose_index_knows_nothing_yet_is_pulled_from_and_its_tags_come(tmp_path: Path) -> None:
    """As of a bucket that this host has never seen: each look at memory:// begins with an empty index."""
    url = f"memory://{tmp_path.name}"
    with Repository.init(url) as there, Repository.init(tmp_path / "here") as here:
        commit(there._handle, items(0))
        there.tag("v1")
        with Repository.clone(url, tmp_path / "clone") as made:
            assert list(made.tags()) == ["v1"]
        here.pull(url)
        commit(there._handle, items(1))
        here.pull(url)  # not named: nothing was fetched before
        assert here.resolve("main") == there.resolve("main")
        here.add_remote("origin", url)
        there.tag("v2")
        here.pull()
        assert sorted(here.tags()) == ["v1", "v2"]


def test_jobs_share_the_copying_and_the_last_push_moves_the_refs(pair: Pair) -> None:
    for step in range(8):
        commit(pair.ours, items(step))
    whole = pair.here.push(dry_run=True)
    parts = [pair.here.push(shard=f"{part}/3") for part in (1, 2, 3)]
    assert not pair.there.branches()
    assert sum(part.num_chunks for part in parts) == whole.num_chunks
    assert [part.num_nodes for part in parts] == [0, 0, 0]
    last = pair.here.push()
    assert (last.num_chunks, last.num_nodes) == (0, whole.num_nodes)
    require_same(pair.ours, pair.theirs, "main~7")
    require_sound(pair.there.url)


def test_a_chunk_that_ranks_wrote_in_parts_is_pushed_whole() -> None:
    source, target = new_store(), new_store()
    placements, line = {"line": over(mesh(3), "S(0)")}, numbers(1_000_000)
    together(source, 3, lambda rank: state_of({"line": line}, placements, rank))
    ours, theirs = on(source), on(target)
    ours.sync()
    assert len(ours.index.read(contents.packs_in_parts)) > 1, "some chunk is in parts"
    update = RefUpdate(RefKind.BRANCH, "main", resolve(ours, "main"))
    with limits(num_threads=2):
        send(ours, theirs, [update], SendOptions("push"), near=ours)
    require_same(ours, theirs, "main")


def test_a_chunk_of_which_the_source_has_lost_a_part_is_not_pushed() -> None:
    source, target = new_store(), new_store()
    placements = {"line": over(mesh(3), "S(0)")}
    together(source, 3, lambda rank: state_of({"line": numbers(1_000_000)}, placements, rank))
    ours = on(source)
    ours.sync()
    parts = ours.index.read(contents.packs_in_parts)
    assert len(parts) > 1, "some chunk is in parts"
    source.delete(min(parts))
    ours, theirs = on(source), on(target)
    ours.sync()
    update = RefUpdate(RefKind.BRANCH, "main", resolve(ours, "main"))
    with pytest.raises(CorruptionError, match="do not cover"), limits(num_threads=2):
        send(ours, theirs, [update], SendOptions("push"), near=ours)
    assert not list(theirs.refs.list())


def test_a_clone_of_some_branches_takes_of_the_one_that_begins_here_no_more_than_asked(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "there") as there:
        for step in range(4):
            commit(there._handle, {"w": weights(step)}, step=step)
        there.branch("ft/x")
        commit(there._handle, {"w": weights(9)}, branch="ft/x")
        commit(there._handle, {"w": weights(8)}, branch="other", create=True)
    with Repository.clone(tmp_path / "there", tmp_path / "here", branches=["ft/*"], depth=1) as here:
        assert set(here.remote_branches()) == {"origin/ft/x", "origin/main"}
        assert [one.forgotten for one in here.log("main")] == [False, True, True, True]
    with pytest.raises(NotFoundError, match="no branch at .* matches 'x/"):
        Repository.clone(tmp_path / "there", tmp_path / "none", branches=["x/*"])
    with Repository.clone(tmp_path / "there", tmp_path / "none", branches=["ft/*"]) as again:
        assert again.resolve("main") == again.resolve("origin/main")


@pytest.mark.parametrize("way", ["clone", "fetch", "pull", "bundle"])
def test_a_tag_that_reads_as_a_branch_of_the_remote_or_as_an_id_does_not_come(
    pair: Pair, tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(2):
        commit(pair.theirs, {"step": step})
    digits = pair.there.resolve("main")[:12]
    for name in ("origin/main", digits):
        pair.there.tag(name, "main~1", force=True)
    pair.there.tag("v1", "main~1")
    if way == "clone":
        here = Repository.clone(pair.there.url, tmp_path / "clone", tags=True)
    else:
        here = pair.here
        if way == "bundle":
            pair.there.create_bundle(tmp_path / "b", ["main", "v1", "refs/tags/origin/main", f"refs/tags/{digits}"])
            here.unbundle(tmp_path / "b")
        else:
            getattr(here, way)()
    assert list(here.tags()) == ["v1"]
    assert all(repr(name) in caplog.text for name in ("origin/main", digits))
    if way != "bundle":
        assert here.resolve("origin/main") == here.resolve(digits) == pair.there.resolve("main")
        caplog.clear()
        here.fetch(force=True)
        assert list(here.tags()) == sorted(["v1", "origin/main", digits])
        assert "not taken" not in caplog.text


def test_a_tag_that_reads_as_an_id_there_or_as_a_branch_of_its_remotes_is_not_pushed_without_force(pair: Pair) -> None:
    commit(pair.ours, {"step": 0})
    pair.here.push()
    pair.there.add_remote("usb", "/mnt/usb")
    for name in (commit(pair.theirs, {"step": 1}).id[:12], "usb/main"):
        pair.here.tag(name)
        with pytest.raises(ConflictError, match=name):
            pair.here.push(refs=[name])
        assert pair.there.tags().get(name) is None
        pair.here.push(refs=[f"+{name}"])
        assert pair.there.tags()[name] == pair.here.resolve("main")


@pytest.mark.parametrize("given", ["lora", None])
def test_the_branch_that_a_clone_begins_with_is_its_default_branch(
    pair: Pair, tmp_path: Path, given: str | None
) -> None:
    made = commit(pair.theirs, items(0), branch="lora")  # main has no commit
    if given is not None:
        commit(pair.theirs, items(1), orphan=True, create=True, branch="main")
    with Repository.clone(pair.there.url, tmp_path / "clone", branch=given) as clone:
        assert (clone.default_branch, clone.head.branch, list(clone.branches())) == ("lora", "lora", ["lora"])
        assert clone.log()[0].id == made.id
    for branch in ("lora", None):
        with pytest.raises(ConflictError):
            Repository.clone(pair.there.url, tmp_path / "clone", branch=branch)
    with Repository.open(tmp_path / "clone") as again:
        assert again.commit({"x": 1}).parents == (made.id,)


def test_a_clone_that_cannot_begin_makes_nothing(pair: Pair, tmp_path: Path) -> None:
    for branch in ("lora", "ft"):
        commit(pair.theirs, items(0), branch=branch, orphan=True)
    wrong = [({"branch": "nope"}, "nope"), ({"branches": "no/*"}, "no/"), ({}, "-b.*'ft', 'lora'")]
    for given, said in wrong:
        with pytest.raises((NotFoundError, InvalidInputError), match=said):
            Repository.clone(pair.there.url, tmp_path / "clone", **given)
        assert not (tmp_path / "clone").exists()
    other = Repository.init(tmp_path / "other")
    commit(other._handle, items(1))
    with Repository.clone(other.url, tmp_path / "clone") as clone:
        assert list(clone.branches()) == ["main"]


def test_a_clone_that_was_broken_off_goes_on_with_another_branch(pair: Pair, tmp_path: Path) -> None:
    for branch in ("main", "ft"):
        commit(pair.theirs, items(0), branch=branch, orphan=True)
    half = Repository.init(tmp_path / "clone")
    half.add_remote("origin", pair.there.url)
    half.close()
    with Repository.clone(pair.there.url, tmp_path / "clone", branch="ft") as clone:
        assert (clone.default_branch, clone.head.branch, list(clone.branches())) == ("ft", "ft", ["ft"])
