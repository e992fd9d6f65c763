"""Which commits hold this, what is unique to a branch, what would be freed, which base is nearest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cas_ckpt import Repository
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.forgotten import write_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.revisions import resolve
from cas_ckpt.core.settings import Remote
from cas_ckpt.errors import InvalidInputError, NotFoundError
from cas_ckpt.index.query import QueryLimits
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.history.lineage import CELLS_PER_TENSOR, holders_of, nearest_to_commit, nearest_to_state
from cas_ckpt.ops.history.sql import query_index
from cas_ckpt.ops.history.usage import usage_rows
from cas_ckpt.ops.refs import create_branch, delete_branch
from cas_ckpt.ops.retention.forget import freed_by, unique_to
from cas_ckpt.ops.sync.push import PushRequest, push
from cas_ckpt.ops.sync.remotes import add_remote
from tests.builders import commit, new_repository, numbers, state

BODY = numbers(300, 700, seed=1)
HEAD = numbers(40, 70, seed=2)
OTHER = numbers(40, 70, seed=3)


@pytest.fixture
def repo(tmp_path: Path) -> RepositoryHandle:
    """base, tuned (another head), and a stranger on branches of their own; main has all that base has."""
    handle = new_repository(tmp_path / "repo")
    commit(handle, {"model": {"body": BODY, "head": HEAD}, "tiny": 1}, message="base")
    create_branch(handle, "ft")
    commit(handle, {"model": {"body": BODY, "head": OTHER}, "tiny": 2}, message="tuned", branch="ft")
    commit(handle, {"model": {"body": BODY, "head": HEAD}, "copy": OTHER, "tiny": 3}, message="main")
    commit(handle, {"w": numbers(300, 700, seed=9)}, message="stranger", branch="stranger")
    return handle


def holders(repo: RepositoryHandle, revision: str, key: str) -> list[str]:
    return [info.message for info in holders_of(repo, revision, key)]


def test_commits_that_hold_a_tensor_are_found_under_any_key(repo: RepositoryHandle) -> None:
    assert sorted(holders(repo, "main", "model/body")) == ["base", "main", "tuned"]
    assert sorted(holders(repo, "main", "copy")) == ["main", "tuned"]
    assert sorted(holders(repo, "main", "model")) == ["base", "main"]
    assert holders(repo, "stranger", "w") == ["stranger"]
    assert holders(repo, "ft", "") == ["tuned"]


def test_only_commits_that_a_ref_leads_to_hold_something(repo: RepositoryHandle) -> None:
    tuned = resolve(repo, "ft").hex()
    delete_branch(repo, "ft", force=True)
    assert sorted(holders(repo, tuned, "model/body")) == ["base", "main"]


def test_what_has_no_id_of_its_own_is_refused(repo: RepositoryHandle) -> None:
    with pytest.raises(InvalidInputError, match=r"repo\.log\(keys='tiny'\)"):
        holders(repo, "main", "tiny")
    for key in ("nothing", "model/nothing", "model/body/deeper"):
        with pytest.raises(NotFoundError, match="is there"):
            holders(repo, "main", key)


def packed_bytes(repo: RepositoryHandle) -> int:
    return sum(size for _, size in repo.store.list("packs/"))


def collect(repo: RepositoryHandle) -> int:
    """Bytes that went."""
    before = packed_bytes(repo)
    collect_garbage(repo, GcOptions(min_age_s=0, reflog_expire_s=0))
    return before - packed_bytes(repo)


def test_what_is_unique_to_a_branch_is_what_deleting_it_frees(repo: RepositoryHandle) -> None:
    stranger = unique_to(repo, "stranger")
    assert (stranger.commits, stranger.num_chunks) == ((resolve(repo, "stranger").hex(),), 1)
    assert stranger.num_bytes == 300 * 700 * 4
    tuned = unique_to(repo, "ft")
    assert tuned.commits == (resolve(repo, "ft").hex(),)
    assert (tuned.num_chunks, tuned.num_bytes) == (0, 0)  # its head is in main, as a copy
    delete_branch(repo, "stranger", force=True)
    gone = collect(repo)
    assert stranger.stored_bytes <= gone <= stranger.stored_bytes + 2000  # headers and directories of packs


def test_a_branch_that_was_pushed_still_has_bytes_of_its_own(repo: RepositoryHandle, tmp_path: Path) -> None:
    before = unique_to(repo, "stranger"), usage_rows(repo, "branch")
    assert before[0].stored_bytes and all(row.unique_bytes for row in before[1])
    init_repository(tmp_path / "tier").close()
    add_remote(repo, Remote("origin", str(tmp_path / "tier")))
    push(repo, PushRequest("origin", every_branch=True))
    assert (unique_to(repo, "stranger"), usage_rows(repo, "branch")) == before
    assert unique_to(repo, "stranger", with_remotes=True).stored_bytes == 0
    assert {row.unique_bytes for row in usage_rows(repo, "branch", with_remotes=True)} == {0}
    query = "SELECT r.name, r.full_name, b.unique_bytes FROM refs r JOIN branch_bytes b ON r.name = 'origin/' || b.name"
    limits = QueryLimits(100, 1 << 20, 20.0)
    assert query_index(repo, query + " WHERE r.kind = 'remote' ORDER BY 1", {}, limits).rows == tuple(
        (f"origin/{row.name}", f"refs/remotes/origin/{row.name}", row.unique_bytes) for row in before[1]
    )
    assert set(query_index(repo, "SELECT kind FROM history WHERE name = 'origin/ft'", {}, limits).rows) == {("remote",)}


def test_a_name_that_is_no_ref_has_nothing_of_its_own(repo: RepositoryHandle) -> None:
    for name in ("nothing", "main~1"):
        with pytest.raises(NotFoundError):
            unique_to(repo, name)


def test_what_would_be_freed_is_what_forgetting_frees(repo: RepositoryHandle) -> None:
    commit(repo, {"w": numbers(300, 700, seed=4)}, message="middle", branch="stranger")
    commit(repo, {"w": numbers(300, 700, seed=9)}, message="end", branch="stranger")
    found = freed_by(repo, ["stranger~1", "stranger"])
    assert found.commits == (resolve(repo, "stranger~1").hex(),)
    assert found.kept == (resolve(repo, "stranger").hex(),)
    assert found.num_bytes == 300 * 700 * 4
    assert freed_by(repo, ["stranger~2"]).num_bytes == 0  # the end is the same state
    write_forgotten(repo.store, [Digest(bytes.fromhex(each)) for each in found.commits], author="me")
    assert freed_by(repo, ["stranger~1"]).num_bytes == 0
    assert collect(repo) >= found.num_bytes // 2


def stored(repo: RepositoryHandle) -> dict[str, bytes]:
    return {key: repo.store.get(key) for key, _ in repo.store.list("") if not key.startswith("index/")}


def test_asking_changes_nothing(repo: RepositoryHandle) -> None:
    before = stored(repo)
    unique_to(repo, "ft"), freed_by(repo, ["ft"]), nearest_to_commit(repo, "ft"), holders_of(repo, "ft", "model")
    assert stored(repo) == before
    with pytest.raises(InvalidInputError):
        freed_by(repo, [])


def near(repo: RepositoryHandle, items: dict[str, object], **options: int) -> list[tuple[str, float]]:
    found = nearest_to_state(repo, state(items), **options)
    return [(each.commit.message, round(each.share, 2)) for each in found]


def test_the_base_of_a_state_is_found_without_committing_it(repo: RepositoryHandle) -> None:
    packs = list(repo.store.list("packs/"))
    tuned = {"renamed": BODY, "lora": numbers(10, 700, seed=7), "head": OTHER}
    found = near(repo, tuned)
    assert sorted(found) == [("base", 0.96), ("main", 0.97), ("tuned", 0.97)]
    assert found[-1][0] == "base"
    assert near(repo, {"w": numbers(300, 700, seed=9), "body": BODY}, limit=2)[0][1] == 0.5
    assert near(repo, {"w": numbers(5, 700, seed=5)}) == near(repo, {}) == near(repo, {"x": 1}) == []
    assert list(repo.store.list("packs/")) == packs


def test_a_tensor_of_many_cells_is_sampled(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    wide = numbers(5000, 1000)
    commit(handle, {"w": wide}, message="base")
    changed = wide.copy()
    changed[:1000] = 0
    ((name, share),) = near(handle, {"w": changed})
    assert name == "base" and 0.5 <= share < 1
    commit(handle, {"w": changed}, message="changed", branch="elsewhere")
    (found,) = nearest_to_commit(handle, "elsewhere")
    assert found.commit.message == "base" and 0.5 <= found.share < 1
    assert 1 < found.num_chunks < CELLS_PER_TENSOR


def test_the_base_of_a_commit_is_not_sought_in_its_own_history(repo: RepositoryHandle) -> None:
    commit(repo, {"model": {"body": BODY, "head": HEAD}}, message="imported", branch="elsewhere")
    found = [each.commit.message for each in nearest_to_commit(repo, "elsewhere")]
    assert found[0] in ("base", "main") and set(found) == {"base", "main", "tuned"}
    assert {each.commit.message for each in nearest_to_commit(repo, "ft")} == {"main", "imported"}


def test_a_live_state_and_a_file_are_compared_as_well(tmp_path: Path) -> None:
    weight = torch.arange(90_000.0).reshape(300, 300)
    torch.save({"model": {"w": weight}}, tmp_path / "base.pt")
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"model": {"w": weight}, "more": torch.ones(90_000)}, message="base")
        for what in ({"model": torch.nn.ParameterDict({"w": weight})}, tmp_path / "base.pt"):
            ((name, share),) = ((each.commit.message, each.share) for each in repo.nearest(what))
            assert (name, share) == ("base", 1.0)
        with pytest.raises(NotFoundError):
            repo.nearest("nothing")
