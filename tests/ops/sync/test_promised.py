"""What a remote promised is not lost, and nothing else is excused: gc, fsck and refs in a clone with a filter."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.errors import ConflictError, CorruptionError, InvalidInputError, NotFoundError
from cas_ckpt.index import contents
from cas_ckpt.objects.pack import PackKind
from cas_ckpt.ops.fsck.report import Effect, ProblemKind
from tests.builders import numbers
from tests.cli.running import call, ok
from tests.committing import new_store, on, together
from tests.divided import mesh, over, state_of
from tests.ops.sync.test_promised_races import flat
from tests.servers import S3Server

ROWS = 20_000


def state(step: int) -> dict[str, object]:
    return {
        "model": {"w": torch.arange(ROWS, dtype=torch.float32) + step, "b": torch.ones(ROWS) * step},
        "optimizer": {"m": torch.arange(ROWS, dtype=torch.float32) * 2 + step},
    }


def cloned(folder: Path, commits: int = 3, **given: object) -> tuple[Repository, Repository]:
    there = Repository.init(folder / "there")
    for step in range(commits):
        there.commit(state(step), step=step)
    return Repository.clone(folder / "there", folder / "here", filter="model/**", **given), there  # type: ignore[arg-type]


def packs(folder: Path, kind: PackKind) -> set[Path]:
    return set((folder / "packs").rglob(f"*.{kind.name.lower()}"))


def optimizer(repo: Repository, revision: str) -> np.ndarray:
    return np.asarray(repo.load(revision)["optimizer"]["m"])  # type: ignore[index]


def test_what_nobody_promised_is_lost_all_the_same(tmp_path: Path) -> None:
    here, _ = cloned(tmp_path)
    before = packs(tmp_path / "here", PackKind.DATA)
    here.commit(state(7), step=7)
    for pack in packs(tmp_path / "here", PackKind.DATA) - before:
        pack.unlink()
    here.close()
    with Repository.open(tmp_path / "here") as again:
        (problem,) = again.fsck().problems
        assert (problem.kind, problem.effect) == (ProblemKind.MISSING, Effect.LOST)
        assert [hit.commit for hit in problem.hits] == [again.resolve("main")]
        with pytest.raises(CorruptionError, match="no remote promised it"):
            again.gc(min_age_s=0)
        with pytest.raises(NotFoundError):
            again.branch("ft", start="main")


def test_a_node_is_never_promised(tmp_path: Path) -> None:
    here, _ = cloned(tmp_path)
    here.close()
    for pack in packs(tmp_path / "here", PackKind.META):
        pack.unlink()
    with Repository.open(tmp_path / "here") as again:
        assert not again.fsck().ok
        with pytest.raises(CorruptionError):
            again.gc(min_age_s=0)


def test_without_a_promisor_nothing_is_promised(tmp_path: Path) -> None:
    here, _ = cloned(tmp_path)
    assert here.fsck().ok
    here.set_remote("origin", promisor=False, filter=())
    assert [problem.effect for problem in here.fsck().problems] == [Effect.LOST]
    with pytest.raises(CorruptionError, match="no remote promised it"):
        here.gc(min_age_s=0)
    here.set_remote("origin", promisor=True)
    here.gc(min_age_s=0)


def test_fsck_counts_what_is_promised(tmp_path: Path) -> None:
    here, there = cloned(tmp_path)
    report = here.fsck(read_data=True)
    assert report.ok and report.num_promised == 3
    assert any("3 chunks are not here, and promised by origin" in note.what for note in report.notes)
    optimizer(here, "main")
    assert here.fsck().num_promised == 2
    assert there.fsck().num_promised == 0


def test_a_promise_that_is_not_kept_is_found_by_asking(tmp_path: Path) -> None:
    here, there = cloned(tmp_path)
    assert here.fsck(remote=True).ok
    there.branch("main", start="main~1", force=True)
    there.gc(min_age_s=0, reflog_expire_s=0)
    there.close()
    assert here.fsck().ok
    (problem,) = here.fsck(remote=True).problems
    assert (problem.effect, len(problem.objects)) == (Effect.LOST, 1)
    assert [(hit.commit, hit.keys) for hit in problem.hits] == [(here.resolve("main"), ("optimizer/m",))]
    said = call("-C", tmp_path / "here", "fsck", "--remote")
    assert said.code == 13 and "do not have them" in said.out
    shutil.move(tmp_path / "there", tmp_path / "away")
    report = here.fsck(remote=True)
    assert report.ok and any("cannot be asked" in note.what for note in report.notes)
    with Repository.init(tmp_path / "copy") as copy:
        copy.commit(state(2))
    here.close()
    ok("-C", tmp_path / "here", "fsck", "--repair", "chunks", "--from", tmp_path / "copy")
    with Repository.open(tmp_path / "here") as again:
        assert np.array_equal(optimizer(again, "main"), state(2)["optimizer"]["m"].numpy())  # type: ignore[index]


def test_what_was_given_up_here_is_collected_and_comes_again(tmp_path: Path) -> None:
    """A branch at a promised commit, of which chunks came and went."""
    here, there = cloned(tmp_path)
    optimizer(here, "main~1")
    here.commit(state(9), step=9)
    here.gc(min_age_s=0)
    assert here.fsck().ok and here.fsck().num_promised == 2
    here.branch("ft", start="main~2")
    here.branch("other", start="main~3")
    here.gc(min_age_s=0)
    assert here.fsck(read_data=True).ok
    for revision in ("main", "main~1", "ft", "other"):
        here.load(revision)
    assert np.array_equal(optimizer(here, "other"), optimizer(there, "main~2"))
    assert here.fsck(read_data=True).num_promised == 0


def test_pulls_and_collections_alternate(tmp_path: Path) -> None:
    here, there = cloned(tmp_path, commits=1)
    for step in range(1, 5):
        there.commit(state(step), step=step)
        here.pull()
        here.gc(min_age_s=0)
        assert here.fsck().ok
    assert len(here.log()) == 5
    assert here.fsck().num_promised == 5


def test_a_branch_that_the_origin_moved_back_stays_usable_here(tmp_path: Path) -> None:
    here, there = cloned(tmp_path)
    there.branch("main", start="main~1", force=True)
    there.commit(state(20), step=20)
    here.fetch()
    assert here.resolve("origin/main") == there.resolve("main")
    assert here.fsck().ok
    here.gc(min_age_s=0)
    optimizer(here, "main")


def test_a_branch_that_is_gone_at_the_origin_stays_usable_here(tmp_path: Path) -> None:
    there = Repository.init(tmp_path / "there")
    there.commit(state(0))
    there.branch("ft", start="main")
    there.commit(state(1), branch="ft")
    here = Repository.clone(tmp_path / "there", tmp_path / "here", filter="model/**")
    here.branch("ft", start="origin/ft")
    there.delete_branch("ft", force=True)
    here.fetch(prune=True)
    assert "origin/ft" not in here.remote_branches()
    assert here.fsck().ok
    here.gc(min_age_s=0)
    optimizer(here, "ft")


def test_a_tag_that_no_branch_leads_to_comes_whole(tmp_path: Path) -> None:
    there = Repository.init(tmp_path / "there")
    there.commit(state(0))
    there.branch("gone", start="main")
    there.commit(state(1), branch="gone")
    there.tag("v1", "gone")
    there.delete_branch("gone", force=True)
    here = Repository.clone(tmp_path / "there", tmp_path / "here", filter="model/**", tags=True)
    assert here.fsck().ok and here.fsck().num_promised == 1
    here.gc(min_age_s=0)
    shutil.move(tmp_path / "there", tmp_path / "away")
    assert np.array_equal(optimizer(here, "v1"), state(1)["optimizer"]["m"].numpy())  # type: ignore[index]


def test_what_another_remote_has_comes_whole(tmp_path: Path) -> None:
    """Its commits share chunks with promised ones: what is absent here comes with them."""
    here, there = cloned(tmp_path)
    with Repository.clone(tmp_path / "there", tmp_path / "third") as third:
        third.commit({**state(2), "more": torch.ones(9)})
    here.add_remote("third", tmp_path / "third")
    here.fetch("third")
    assert here.fsck().ok
    wanted = optimizer(there, "main")
    shutil.move(tmp_path / "there", tmp_path / "away")
    assert np.array_equal(optimizer(here, "third/main"), wanted)


def test_a_fetch_with_another_filter_brings_more_of_what_is_here(tmp_path: Path) -> None:
    here, there = cloned(tmp_path, commits=4, depth=3)
    there.forget(revisions=["main~2"])
    report = here.fetch(filter="optimizer/**", dry_run=True)
    assert (report.num_commits, report.num_chunks) == (0, 2)
    report = here.fetch(filter="optimizer/**")
    assert (report.num_commits, report.num_chunks, report.num_nodes) == (0, 2, 0)
    assert here.fetch(filter="**").num_chunks == 0
    assert here.fsck(read_data=True).num_promised == 1  # of the commit that was forgotten there meanwhile
    wanted = optimizer(there, "main")
    shutil.move(tmp_path / "there", tmp_path / "away")
    assert np.array_equal(optimizer(here, "main"), wanted)
    assert [info.forgotten for info in here.log()] == [False, False, False, True]


def test_a_promise_is_not_given_up_unknowingly(tmp_path: Path) -> None:
    here, _ = cloned(tmp_path)
    with pytest.raises(ConflictError, match="set_remote\\('origin', promisor=False, filter=\\(\\)\\)"):
        here.remove_remote("origin")
    here.rename_remote("origin", "upstream")
    assert here.fsck().num_promised == 3
    here.fetch("upstream", filter="**")
    here.remove_remote("upstream")
    assert here.fsck(read_data=True).ok


def test_settings_of_a_promise(tmp_path: Path) -> None:
    here, there = cloned(tmp_path)
    here.set_remote("origin", filter=["model/w"])
    here.add_remote("copy", tmp_path / "there")
    with pytest.raises(InvalidInputError, match="promisor"):
        here.set_remote("copy", filter="model/**")
    with pytest.raises(InvalidInputError, match="promisor"):
        here.fetch("copy", filter="model/**")
    here.set_remote("copy", promisor=True, filter="model/**")
    there.commit(state(8), step=8)
    here.pull()
    assert here.fsck().num_promised == 5
    here.set_remote("origin", filter=())
    there.commit(state(11), step=11)
    here.pull()
    assert here.fsck().num_promised == 5


def test_a_clone_with_a_filter_is_made_on_a_local_disk(tmp_path: Path, s3: S3Server) -> None:
    Repository.init(tmp_path / "there").close()
    url = s3.url(s3.new_bucket())
    with pytest.raises(InvalidInputError, match="not on a local disk"):
        Repository.clone(tmp_path / "there", url, filter="model/**")
    with Repository.init(url) as far, pytest.raises(InvalidInputError, match="not on a local disk"):
        far.add_remote("origin", tmp_path / "there", promisor=True)


def test_a_depth_and_a_filter_together(tmp_path: Path) -> None:
    here, there = cloned(tmp_path, commits=5, depth=2)
    assert here.fsck().ok and here.fsck().num_promised == 2
    here.gc(min_age_s=0)
    optimizer(here, "main~1")
    with pytest.raises(NotFoundError, match="forgotten"):
        here.branch("old", start="main~3")
    here.fetch(commits=["main~3"])
    here.gc(min_age_s=0)
    assert here.fsck().ok
    assert np.array_equal(optimizer(here, "main~3"), optimizer(there, "main~3"))


def test_parts_of_a_promised_chunk_that_somebody_left_here_change_nothing(tmp_path: Path) -> None:
    """As a commit of several ranks leaves them that died: they say no more than that something is not whole."""
    line, placements = numbers(1_000_000), {"line": over(mesh(3), "S(0)")}
    left = new_store()
    together(left, 3, lambda rank: state_of({"line": line}, placements, rank))
    dead = on(left)
    dead.sync()
    with Repository.init(tmp_path / "there") as there:
        there.commit({"model": torch.ones(3000), "line": torch.from_numpy(line)})
    here = Repository.clone(tmp_path / "there", tmp_path / "here", filter="model")
    whole = here.fsck().num_promised
    pack = min(dead.index.read(contents.packs_in_parts))
    here._handle.store.put(pack, left.get(pack))
    here._handle.sync()
    assert here._handle.index.read(contents.packs_in_parts)
    assert here.fsck(read_data=True).ok and here.fsck().num_promised == whole
    here.commit({"mine": torch.ones(4000)}, branch="mine", options=CommitOptions(orphan=True))
    here.delete_branch("mine", force=True)
    here.gc(min_age_s=0, reflog_expire_s=0)
    here.branch("ft", start="main")
    here.gc(min_age_s=0)
    assert np.array_equal(np.asarray(here.load("ft")["line"]), line)
    assert here.fsck(read_data=True).ok and not here.fsck().num_promised


@pytest.mark.parametrize("seed", range(6))
def test_a_random_history_through_a_random_filter_is_that_of_the_origin(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    there = Repository.init(tmp_path / "there")
    held: dict[str, np.ndarray] = {}
    for step in range(draw.randint(2, 6)):
        for name in draw.sample(["model/a", "model/b", "opt/a", "opt/b", "x"], draw.randint(1, 4)):
            held[name] = np.arange(draw.choice([10, 3000, 400_000]), dtype=np.float32) + draw.choice([0, step])
        if draw.random() < 0.3 and step:
            there.branch(f"b{step}", start="main")
            there.commit({f"only{step}": np.ones(3000), **held}, branch=f"b{step}", step=step)
        there.commit(dict(held), step=step)
    keys = draw.sample(["model/**", "opt/a", "x", "*/b", "nothing"], draw.randint(1, 3))
    here = Repository.clone(tmp_path / "there", tmp_path / "here", filter=keys)
    refs = {name: there.resolve(name) for name in there.branches()}
    for round_ in range(3):
        here.gc(min_age_s=0)
        assert here.fsck(read_data=True).ok
        for name in draw.sample(sorted(refs), max(1, len(refs) // 2)):
            here.load(refs[name])
        here.commit({"mine": np.ones(5000) * round_}, branch="mine", options=CommitOptions(orphan=not round_))
        there.commit({**held, "late": np.ones(4000) * round_}, branch="main", step=100 + round_)
        refs["main"] = there.resolve("main")
        here.fetch()
    for info in there.log(list(refs)):
        assert flat(here.load(info.id)) == flat(there.load(info.id))
    here.gc(min_age_s=0)
    assert here.fsck(read_data=True).ok
