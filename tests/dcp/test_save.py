"""dcp.save of one process: the commit is the one that repo.commit makes, and none of DCP's faults are in it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from cas_ckpt import Repository, limits
from cas_ckpt.core import host_cache
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.dcp import CasSavePlanner, CasStorageReader, CasStorageWriter, StoredEntry
from cas_ckpt.errors import InvalidInputError, MismatchError, NotFoundError
from cas_ckpt.storage.file import FileStore
from tests.dcp.states import awkward_state, load, plain_state, same, save
from tests.effects import no_space_from
from tests.servers import S3Server
from tests.wrapped_stores import FaultyStore


@pytest.fixture(autouse=True)
def _no_cached_plans() -> Iterator[None]:
    yield
    for cache in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan"):
        getattr(SavePlanner, cache).clear()
    SavePlanner._cached_metadata.clear()


def test_the_root_is_that_of_the_same_commit(repo: Repository) -> None:
    wanted = repo.commit(plain_state())
    writer = CasStorageWriter(repo, message="by DCP", step=7, metrics={"loss": 0.5}, author="me", meta={"a": 1})
    metadata = save(plain_state(), writer)
    made = writer.commit
    assert made is not None and made.root == wanted.root and made.parents == (wanted.id,)
    assert (made.message, made.step, dict(made.metrics), made.author, made.meta) == (
        "by DCP", 7, {"loss": 0.5}, "me", {"a": 1},
    )  # fmt: skip
    assert made.stats.num_new_chunks == 0
    assert metadata.storage_meta.save_id == made.id == repo.resolve("HEAD")
    assert metadata.storage_data[MetadataIndex("scalar", ())] == StoredEntry(made.id, "scalar")


@pytest.mark.parametrize("kept", [True, False])
def test_what_was_read_of_a_bucket_is_kept_where_the_caller_says_or_nowhere(
    tmp_path: Path, s3: S3Server, kept: bool
) -> None:
    url, place, usual = s3.url(s3.new_bucket()), tmp_path / "cache", tmp_path / "usual"
    cache = place if kept else None
    with host_cache.cache_at(usual):
        Repository.init(url, cache=None).close()
        writer = CasStorageWriter(url, cache=cache)
        save(plain_state(4), pickle.loads(pickle.dumps(writer)))
        target = plain_state(0)
        load(target, CasStorageReader(url, cache=cache))
        assert same(target, plain_state(4))
        with Repository.open(url, cache=cache) as opened:
            sent = pickle.loads(pickle.dumps(CasStorageReader(opened)))
        load(plain_state(0), sent)
    assert not usual.exists()
    assert place.exists() == kept


def test_ties_are_stored_once_and_known_as_ties(repo: Repository) -> None:
    save({"tied": plain_state()["tied"]}, CasStorageWriter(repo))
    loaded = repo.load("HEAD")
    assert loaded["tied"]["a"] is loaded["tied"]["b"]


def test_what_was_saved_is_checked_out_and_loaded(repo: Repository, tmp_path: Path) -> None:
    save(plain_state(3), CasStorageWriter(tmp_path / "repo", branch="other", orphan=True))
    checked_out, loaded = plain_state(1), plain_state(2)
    repo.checkout("other", into=checked_out)
    load(loaded, CasStorageReader(tmp_path / "repo", ref="other"))
    assert same(checked_out, plain_state(3))
    assert same(loaded, plain_state(3))


def test_what_the_flat_form_loses_is_kept_by_our_planner(repo: Repository) -> None:
    state = plain_state() | awkward_state()
    wanted = repo.commit(state)
    writer = CasStorageWriter(repo)
    for caching in (False, True, True):
        save(state, writer, planner=CasSavePlanner(enable_plan_caching=caching))
        assert writer.commit is not None and writer.commit.root == wanted.root


def test_a_planner_that_does_not_flatten_makes_the_same_commit(repo: Repository) -> None:
    state = plain_state() | awkward_state()
    wanted = repo.commit(state)
    writer = CasStorageWriter(repo)
    save(state, writer, planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    assert writer.commit is not None and writer.commit.root == wanted.root


def test_checkpoint_id_names_a_tag_that_is_never_overwritten(repo: Repository) -> None:
    save(plain_state(1), CasStorageWriter(repo), checkpoint_id="step-1")
    first = repo.resolve("step-1")
    with pytest.raises(CheckpointException, match="is a tag already: nothing is overwritten"):
        save(plain_state(2), CasStorageWriter(repo), checkpoint_id="step-1")
    assert repo.resolve("step-1") == first == repo.resolve("HEAD")
    loaded = plain_state(0)
    load(loaded, CasStorageReader(repo), checkpoint_id="step-1")
    assert same(loaded, plain_state(1))


def test_a_checkpoint_id_that_would_be_taken_for_something_else_is_refused_before_anything_is_saved(
    repo: Repository,
) -> None:
    repo.add_remote("origin", "/mnt/usb")
    before = repo.commit(plain_state(1))
    for name in ("refs/heads/main", "origin/step-1", before.id[:9]):
        with pytest.raises((CheckpointException, ValueError)):
            save(plain_state(2), CasStorageWriter(repo), checkpoint_id=name)
        assert [info.id for info in repo.log(all_refs=True)] == [before.id]


def test_a_checkpoint_id_is_that_of_one_save_and_of_one_load(repo: Repository) -> None:
    writer, reader = CasStorageWriter(repo, branch="main"), CasStorageReader(repo, ref="main")
    for number, name in ((1, "1000"), (2, None), (3, "2000")):
        save({"w": torch.tensor(number)}, writer, **({} if name is None else {"checkpoint_id": name}))
    with pytest.raises(CheckpointException):
        save({"a": {"b": 1}, "a.b": 2}, writer, checkpoint_id="failed")
    save({"w": torch.tensor(4)}, writer)
    assert list(repo.tags()) == ["1000", "2000"]
    assert [repo.resolve(name) for name in ("1000", "2000")] == [repo.resolve("main~3"), repo.resolve("main~1")]
    for name, wanted in (("1000", 1), (None, 4), ("2000", 3)):
        target = {"w": torch.tensor(0)}
        load(target, reader, **({} if name is None else {"checkpoint_id": name}))
        assert target["w"] == wanted
    for target, name in (({"w": torch.tensor(0)}, "no-such-tag"), ({"other": torch.tensor(0)}, "1000")):
        with pytest.raises((CheckpointException, NotFoundError)):
            load(target, reader, checkpoint_id=name)
        target = {"w": torch.tensor(0)}
        load(target, reader)
        assert target["w"] == 4


# --- faults that DCP has -------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 4])
def test_an_error_of_the_medium_fails_the_save_and_leaves_the_branch(tmp_path: Path, num_threads: int) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        save({"w": torch.zeros(1000)}, CasStorageWriter(repo))
        before = repo.resolve("HEAD")
    state = {f"w{n}": torch.full((3000,), n) for n in range(8)}
    for effects in range(1, 100, 2):
        store = FaultyStore(FileStore(tmp_path / "repo"), no_space_from(effects))
        handle = RepositoryHandle.on_store(store, index_url=":memory:")
        with limits(num_threads=num_threads):
            error = error_of_saving(state, CasStorageWriter(handle))
        handle.close()
        with Repository.open(tmp_path / "repo") as repo:
            if error is None:
                assert effects > 3
                assert same(repo.load("HEAD"), state)
                return
            assert "OutOfSpaceError" in error
            assert repo.resolve("HEAD") == before
    pytest.fail("never enough space")


def error_of_saving(state: dict[str, Any], writer: CasStorageWriter) -> str | None:
    try:
        save(state, writer)
    except CheckpointException as error:
        return str(error)
    return None


def test_results_that_do_not_cover_the_plan_are_refused(repo: Repository) -> None:
    class Forgets(CasStorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, [rank[1:] for rank in results])

    with pytest.raises(CheckpointException, match="1 planned items were written by no rank"):
        save({"a": torch.zeros(2), "b": 1}, Forgets(repo))


def test_plan_caching_mixes_up_neither_dtypes_nor_commits(repo: Repository) -> None:
    ids = []
    for dtype in (torch.float32, torch.float16, torch.float16):
        writer = CasStorageWriter(repo)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        metadata = save({"w": torch.ones(600, dtype=dtype)}, writer, planner=planner)
        assert repo.read("HEAD", "w").dtype == dtype
        ids.append((writer.commit.id if writer.commit else None, metadata.storage_meta.save_id))
        assert {entry.commit for entry in metadata.storage_data.values()} == {repo.resolve("HEAD")}
    assert all(one == other for one, other in ids) and len(set(ids)) == 3


def test_plans_carry_nothing_of_a_save(repo: Repository) -> None:
    seen: list[SavePlan] = []

    class Looks(CasStorageWriter):
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
            seen.append(plan)
            return super().write_data(plan, planner)

    save({"w": torch.ones(2)}, Looks(repo))
    assert [plan.storage_data for plan in seen] == [None]


class Halves(DefaultSavePlanner):
    """A planner that saves half precision."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - DCP calls it so
        found = super().transform_object(write_item, object)
        return found.half() if isinstance(found, torch.Tensor) else found


def test_a_planner_of_ones_own_is_asked_for_every_item(repo: Repository) -> None:
    writer = CasStorageWriter(repo)
    save({"m": {"w": torch.ones(600), "n": [1, 2]}, "o": {"state": {}, "x": None}}, writer, planner=Halves())
    assert same(repo.load("HEAD"), {"m": {"w": torch.ones(600).half(), "n": [1, 2]}, "o": {"x": None}})


def test_a_pickle_that_runs_code_is_refused(repo: Repository) -> None:
    class Opaque(Halves):
        """Hands out pickles of objects."""

    with pytest.raises(CheckpointException, match="o: the planner gives it as a pickle that is more than plain values"):
        save({"o": pytest.raises}, CasStorageWriter(repo), planner=Opaque())
    with pytest.raises(CheckpointException, match="o: .*cannot|UnsupportedValueError: o"):
        save({"o": pytest.raises}, CasStorageWriter(repo))
    with pytest.raises(NotFoundError):
        repo.resolve("main")


def test_a_writer_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="is not a repository"):
        CasStorageWriter(7)


def test_a_folder_without_a_repository_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="NoRepositoryError"):
        save({"a": 1}, CasStorageWriter(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_what_was_opened_for_a_save_or_load_is_closed_behind_it(tmp_path: Path) -> None:
    Repository.init(tmp_path / "repo").close()
    for number in range(3):
        save({"w": torch.full((600,), number)}, CasStorageWriter(tmp_path / "repo"), checkpoint_id=f"t{number}")
        load({"w": torch.zeros(600, dtype=torch.int64)}, CasStorageReader(tmp_path / "repo"))
    opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]
    assert [name for name in opened if name.startswith(str(tmp_path))] == []


def test_a_writer_is_true_and_pickles_without_a_handle(repo: Repository, tmp_path: Path) -> None:
    writer = CasStorageWriter(repo, branch="b", step=3)
    assert writer
    save({"a": 1}, writer)
    again = pickle.loads(pickle.dumps(writer))
    assert again.commit is None
    save({"a": 2}, again)
    assert repo.load("b") == {"a": 2}
    with Repository.init("memory://dcp-pickled") as volatile, pytest.raises(InvalidInputError, match="in this process"):
        pickle.dumps(CasStorageWriter(volatile))


def test_a_plan_that_the_mappings_do_not_name_is_refused(repo: Repository) -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner({"a": 1}, is_coordinator=True)
    plan = planner.create_local_plan()
    planner.mappings = {}
    planner.flatten_state_dict = True
    writer = CasStorageWriter(repo)
    writer.storage_meta()
    writer.set_up_storage_writer(is_coordinator=True)
    writer.prepare_global_plan([plan])
    planner.mappings = {"b": ("b",)}
    with pytest.raises(MismatchError, match="a: the plan names it"):
        writer.write_data(plan, planner)


def test_the_error_of_a_load_whose_planner_fails_over_it_is_not_that_of_the_next_one(repo: Repository) -> None:
    class Fails(DefaultLoadPlanner):
        def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError

    save({"w": torch.ones(2)}, CasStorageWriter(repo))
    reader, target = CasStorageReader(repo), {"w": torch.zeros(2)}
    with pytest.raises(CheckpointException, match="ZeroDivisionError"):
        load(target, reader, checkpoint_id="nothing", planner=Fails())
    load(target, reader)
    assert target["w"][0] == 1.0
