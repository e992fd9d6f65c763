"""Hints of meta packs: a reader who knows nothing yet takes few requests, and a hint that is false costs only those."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from cas_ckpt.core import hints
from cas_ckpt.core.config import Config
from cas_ckpt.core.create import new_store_id, write_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import load_pack, pack_name
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.core.refs import Generation, RefKind
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.nodes import Node
from cas_ckpt.objects.pack import Hints, PageCommit, decode_hints, encode_hints, hints_bytes
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import REPACK, GcOptions
from cas_ckpt.ops.refs import create_branch
from cas_ckpt.repository import Repository
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.transfer.pack_writer import write_nodes
from tests.committing import commit
from tests.remote_store import RemoteStore

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket() -> MemoryStore:
    inner = MemoryStore(url="s3://bucket/llm")
    write_config(inner, Config(new_store_id()))
    return inner


@pytest.fixture
def writer(bucket: MemoryStore) -> Iterator[RepositoryHandle]:
    with closing(RepositoryHandle.on_store(RemoteStore(bucket), cache=None)) as handle:
        yield handle


def small(handle: RepositoryHandle, number: int, **more: object) -> CommitInfo:
    return commit(handle, {"w": np.full(300, number, np.float32)}, message=f"{number}", step=number, **more)


def cold(bucket: MemoryStore, cache: Path | None = None) -> tuple[Repository, RemoteStore]:
    store = RemoteStore(bucket)
    return Repository(RepositoryHandle.on_store(store, cache=cache, lazy=True)), store


def logged(bucket: MemoryStore, ref: str = "main") -> list[str]:
    repo, _ = cold(bucket)
    with repo:
        return [each.message for each in repo.log(ref)]


def as_cli(repo: Repository) -> list[CommitInfo]:
    """What `cas-ckpt log` asks."""
    with repo, repo.one_look():
        found = repo.log()
        repo.branches(), repo.tags(), repo.pins()
    return found


# --- budgets ---------------------------------------------------------------------------------


def test_a_log_of_a_thousand_commits_takes_eight_requests_and_then_two(
    writer: RepositoryHandle, bucket: MemoryStore, tmp_path: Path
) -> None:
    made = [small(writer, number).id for number in range(1000)]
    repo, store = cold(bucket, tmp_path)
    assert [each.id for each in as_cli(repo)] == made[::-1]
    assert store.requests <= 8, store.asked
    repo, store = cold(bucket, tmp_path)
    assert [each.id for each in as_cli(repo)] == made[::-1]
    assert store.requests <= 2, store.asked
    sizes = [size for key, size in bucket.list("packs/") if key.endswith(".meta")]
    assert sum(sizes) / len(sizes) < 10_000


def test_one_tensor_is_read_by_few_requests(writer: RepositoryHandle, bucket: MemoryStore, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state = {f"layer{number:03d}": rng.standard_normal(25_000).astype(np.float32) for number in range(60)}
    commit(writer, state)
    repo, store = cold(bucket, tmp_path)
    with repo:
        assert np.array_equal(repo.read("main", "layer017"), state["layer017"])
        assert store.requests <= 6, store.asked
        assert store.bytes_read < 160_000
    repo, store = cold(bucket, tmp_path)
    with repo:
        assert np.array_equal(repo.read("main", "layer017"), state["layer017"])
        assert store.requests <= 1, store.asked


def test_a_state_is_loaded_by_few_requests_however_many_commits_were_made_before(
    writer: RepositoryHandle, bucket: MemoryStore
) -> None:
    """The layout and what does not change are where the first commit has put them."""
    frozen = np.random.default_rng(0).standard_normal(25_000).astype(np.float32)
    for step in range(40):
        commit(writer, {"own": frozen + step, "frozen": {"w": frozen}})
    repo, store = cold(bucket)
    with repo:
        assert np.array_equal(repo.load("main")["frozen"]["w"], frozen)
    assert store.requests <= 12, store.asked


def test_what_is_read_besides_a_tensor_of_a_thousand_is_short(writer: RepositoryHandle, bucket: MemoryStore) -> None:
    """Of a commit of 1 GB in tensors of 1 MB: so one of them takes at most 1.2 MB."""
    rng = np.random.default_rng(0)
    state = {f"model/layers.{number}.attention.weight": rng.bytes(1100) for number in range(1000)}
    commit(writer, {key: np.frombuffer(data, np.uint8) for key, data in state.items()})
    repo, store = cold(bucket)
    with repo:
        found = repo.read("main", repo_key("model/layers.500.attention.weight"))
    assert found.tobytes() == state["model/layers.500.attention.weight"]
    assert store.bytes_read < 200_000 and store.requests <= 6, (store.bytes_read, store.asked)


def repo_key(name: str) -> str:
    """The key of an entry whose name has slashes."""
    return name.replace("/", "~1")


def test_a_tensor_that_an_earlier_commit_wrote_is_found_without_a_listing(
    writer: RepositoryHandle, bucket: MemoryStore
) -> None:
    rng = np.random.default_rng(0)
    state = {"model": {f"w{number}": rng.standard_normal(5_000).astype(np.float32) for number in range(4)}, "step": 0}
    for number in range(3):
        commit(writer, state | {"step": number})
    repo, store = cold(bucket)
    with repo:
        assert np.array_equal(repo.read("main", "model/w2"), state["model"]["w2"])  # type: ignore[index]
    assert store.tally("list").calls == 0 and store.requests <= 9, store.asked


def test_a_commit_takes_six_requests(writer: RepositoryHandle, bucket: MemoryStore) -> None:
    small(writer, 0)
    store = RemoteStore(bucket)
    with closing(RepositoryHandle.on_store(store, cache=None)) as handle:
        store.reset()
        commit(handle, {"w": np.full(300, 0, np.float32)})
        assert store.requests <= 10, store.asked  # lists the packs, and reads them
        for _ in range(3):
            store.reset()
            commit(handle, {"w": np.full(300, 0, np.float32)})
            assert store.requests <= 6, store.asked


def test_a_sync_reads_no_tail_of_a_data_pack_whose_directory_was_copied(
    writer: RepositoryHandle, bucket: MemoryStore
) -> None:
    for number in range(5):
        commit(writer, {"w": np.full(5000, number, np.float32)})
    store = RemoteStore(bucket)
    with closing(RepositoryHandle.on_store(store, cache=None)) as handle:
        store.reset()
        handle.sync()
        assert store.asked == {"get_range": 5, "list": 1}
        assert handle.index.packs() == dict(bucket.list("packs/"))
        copied = {key: handle.index.read(rows_of_pack, key) for key in handle.index.packs()}
    with closing(RepositoryHandle.on_store(bucket)) as local:  # reads tails
        local.sync()
        assert copied == {key: local.index.read(rows_of_pack, key) for key in local.index.packs()}


def rows_of_pack(connection: object, key: str) -> list[tuple[object, ...]]:
    from sqlalchemy import Connection, select

    from cas_ckpt.index.schema import LOCATIONS, OBJECTS, PACKS

    assert isinstance(connection, Connection)
    query = (
        select(OBJECTS.c.digest, LOCATIONS.c.offset, LOCATIONS.c.stored_bytes, LOCATIONS.c.kind, LOCATIONS.c.encoding)
        .join(LOCATIONS, LOCATIONS.c.object_id == OBJECTS.c.object_id)
        .join(PACKS, PACKS.c.pack_id == LOCATIONS.c.pack_id)
        .where(PACKS.c.name == key)
        .order_by(LOCATIONS.c.offset)
    )
    return [tuple(row) for row in connection.execute(query)]


# --- pages of any history ---------------------------------------------------------------------


def test_a_log_is_whole_however_long_the_history_is(
    writer: RepositoryHandle, bucket: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "NEAR", 4)
    monkeypatch.setattr(hints, "FAR", 16)
    for number in range(70):
        small(writer, number)
        repo, store = cold(bucket)
        with repo:
            assert [each.step for each in repo.log()] == list(range(number, -1, -1))
        assert store.tally("list").calls == 1  # of forgotten ones
        assert store.tally("get_tail").calls <= 3 + number // 16


def test_pages_go_on_behind_commits_of_other_processes(bucket: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "NEAR", 4)
    monkeypatch.setattr(hints, "FAR", 16)
    handles = [RepositoryHandle.on_store(RemoteStore(bucket), cache=None) for _ in range(2)]
    for number, handle in zip(range(40), itertools.cycle(handles), strict=False):
        small(handle, number)
    repo, store = cold(bucket)
    with repo:
        assert [each.step for each in repo.log()] == list(range(39, -1, -1))
    assert store.tally("get_tail").calls <= 6 and store.tally("list").calls == 1
    for handle in handles:
        handle.close()


def test_branches_and_merges_are_logged_whole(writer: RepositoryHandle, bucket: MemoryStore) -> None:
    for number in range(5):
        small(writer, number)
    create_branch(writer, "side", start="main~2")
    for number in range(10, 14):
        small(writer, number, branch="side")
    small(writer, 20, parents=["side"])
    for number in range(21, 24):
        small(writer, number)
    repo, store = cold(bucket)
    with repo:
        found = [each.step for each in repo.log()]
    assert sorted(found) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 20, 21, 22, 23]  # type: ignore[type-var]
    assert store.tally("list").calls == 1, store.asked
    with closing(RepositoryHandle.on_store(RemoteStore(bucket), cache=None)) as handle:
        handle.sync()
        with Repository(handle) as repo:
            assert [each.step for each in repo.log()] == found


def test_only_what_the_index_lacks_is_read(writer: RepositoryHandle, bucket: MemoryStore, tmp_path: Path) -> None:
    for number in range(20):
        small(writer, number)
    with closing(RepositoryHandle.on_store(RemoteStore(bucket), cache=tmp_path)) as handle:
        handle.sync()
    for number in range(20, 23):
        small(writer, number)
    repo, store = cold(bucket, tmp_path)
    with repo:
        assert [each.step for each in repo.log()] == list(range(22, -1, -1))
        assert [each.step for each in repo.log("main~1", limit=2)] == [21, 20]
    assert store.tally("get_tail").calls == 1, store.asked


def test_a_log_with_conditions_looks_at_all_packs(writer: RepositoryHandle, bucket: MemoryStore) -> None:
    for number in range(5):
        small(writer, number, metrics={"loss": float(number)})
    repo, _ = cold(bucket)
    with repo:
        assert [each.step for each in repo.log(where=["loss<2"])] == [1, 0]


def test_what_is_known_from_pages_never_enters_the_index(writer: RepositoryHandle, bucket: MemoryStore) -> None:
    for number in range(5):
        small(writer, number)
    store = RemoteStore(bucket)
    with closing(RepositoryHandle.on_store(store, cache=None)) as handle, Repository(handle) as repo:
        assert len(repo.log()) == 5
        repo.read("main", "w")
        assert handle.index.packs() == {}
        report = collect_garbage(handle, GcOptions(min_age_s=0))
        assert not report.deleted_packs and handle.index.packs() == dict(bucket.list("packs/"))
        assert handle.preview is None
        small(handle, 9)
        assert len(repo.log()) == 6


# --- hints that lead astray ---------------------------------------------------------------------


def test_hints_of_packs_that_were_rewritten_cost_a_look_at_all_packs(
    writer: RepositoryHandle, bucket: MemoryStore, tmp_path: Path
) -> None:
    for number in range(8):
        small(writer, number)
    warm, _ = cold(bucket, tmp_path)
    with warm:
        assert len(warm.log()) == 8
    collect_garbage(writer, REPACK)
    assert len([key for key, _ in bucket.list("packs/")]) == 2
    for cache in (None, tmp_path, tmp_path):
        repo, _ = cold(bucket, cache)
        with repo:
            assert [each.step for each in repo.log()] == list(range(7, -1, -1))
            assert repo.read("main", "w")[0] == 7
    small(writer, 8)
    assert logged(bucket) == [f"{number}" for number in range(8, -1, -1)]


def test_packs_that_a_collection_took_between_two_looks_are_not_missed(
    writer: RepositoryHandle, bucket: MemoryStore, tmp_path: Path
) -> None:
    first = small(writer, 0)
    create_branch(writer, "old")
    small(writer, 1)
    repo, _ = cold(bucket, tmp_path)
    with repo:
        repo.log(), repo.read("main", "w")
        collect_garbage(writer, REPACK)
        assert repo.read("main", "w")[0] == 1 and repo.read(first.id, "w")[0] == 0
        assert [each.step for each in repo.log()] == [1, 0]


def set_hint(bucket: MemoryStore, pack: bytes) -> None:
    """Let main say that its commit is in another pack."""
    with closing(RepositoryHandle.on_store(bucket)) as handle:
        ref = handle.refs.get(RefKind.BRANCH, "main")
        handle.refs.swap(ref, ref.target, generation=Generation(ref.generation.number, ref.generation.nonce), pack=pack)


def hinted_pack(bucket: MemoryStore) -> bytes:
    with closing(RepositoryHandle.on_store(bucket)) as handle:
        pack = handle.refs.get(RefKind.BRANCH, "main").pack
        assert pack is not None
        return pack


def put_hints(bucket: MemoryStore, made: Hints) -> bytes:
    """The name of a pack with these hints and the nodes of the one that main names."""
    loaded = load_pack(bucket, hinted_pack(bucket))
    nodes = [Node(entry.kind, entry.digest, loaded.nodes[entry.digest]) for entry in loaded.entries]
    return pack_name(write_nodes(bucket, nodes, hints=encode_hints(made)).key)


def test_a_hint_at_nothing_or_at_garbage_costs_a_look_at_all_packs(
    writer: RepositoryHandle, bucket: MemoryStore
) -> None:
    for number in range(3):
        small(writer, number)
    set_hint(bucket, bytes(16))
    assert logged(bucket) == ["2", "1", "0"]
    bucket.put(f"packs/00/{bytes(16).hex()}.meta", b"garbage" * 100)
    assert logged(bucket) == ["2", "1", "0"]


def test_a_page_of_another_history_is_not_believed(writer: RepositoryHandle, bucket: MemoryStore) -> None:
    for number in range(3):
        small(writer, number)
    create_branch(writer, "b", start="main~2")
    foreign = small(writer, 99, branch="b")
    name = hinted_pack(bucket)
    node = load_pack(bucket, pack_of(bucket, foreign.id)).nodes[Digest(bytes.fromhex(foreign.id))]
    set_hint(bucket, put_hints(bucket, Hints(7, (PageCommit(node, name), PageCommit(b"no node", name)))))
    assert logged(bucket) == ["2", "1", "0"]
    small(writer, 3)
    assert logged(bucket) == ["3", "2", "1", "0"]
    with closing(
        RepositoryHandle.on_store(RemoteStore(bucket), cache=None)
    ) as handle:  # writes a page after a false one
        small(handle, 4)
    assert logged(bucket) == ["4", "3", "2", "1", "0"]


def pack_of(bucket: MemoryStore, commit_id: str) -> bytes:
    with closing(RepositoryHandle.on_store(bucket)) as handle:
        return pack_name(handle.locate([Digest(bytes.fromhex(commit_id))])[bytes.fromhex(commit_id)][0].pack)


def test_a_page_that_names_packs_for_ever_is_given_up(
    writer: RepositoryHandle, bucket: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "MOST_LOADED", 8)
    for number in range(3):
        small(writer, number)
    page = load_pack(bucket, hinted_pack(bucket)).hints
    assert page is not None
    names = tuple(bytes([number]) * 16 for number in range(200))
    set_hint(bucket, put_hints(bucket, Hints(1, (), packs=names)))
    repo, store = cold(bucket)
    with repo:
        assert [each.step for each in repo.log()] == [2, 1, 0]
        repo.read("main", "w")
    assert store.requests < 30, store.asked


def test_a_directory_that_says_what_is_not_there_is_found_out(writer: RepositoryHandle, bucket: MemoryStore) -> None:
    commit(writer, {"w": np.full(5000, 1, np.float32), "v": np.full(5000, 2, np.float32)})
    other = commit(writer, {"w": np.full(5000, 3, np.float32), "v": np.full(5000, 4, np.float32)}, branch="other")
    theirs = load_pack(bucket, pack_of(bucket, other.id)).hints
    assert theirs is not None and theirs.directories
    moved = tuple((trailer, directory[::-1]) for trailer, directory in theirs.directories)
    set_hint(bucket, put_hints(bucket, Hints(0, directories=(*moved, *theirs.directories))))
    repo, _ = cold(bucket)
    with repo:
        assert repo.read("main", "w")[0] == 1 and repo.read("main", "v")[0] == 2


@pytest.mark.parametrize("at", [-1, -20, -36, 3, 40])
def test_damaged_hints_are_refused(at: int) -> None:
    data = bytearray(encode_hints(Hints(3, (PageCommit(bytes(100), bytes(16)),), packs=(bytes(16),))))
    assert decode_hints(bytes(data)).depth == 3 and hints_bytes(b"before" + data) == len(data)
    data[at] ^= 1
    if hints_bytes(bytes(data)) == len(data):
        with pytest.raises(Exception, match="hints"):
            decode_hints(bytes(data))


def test_damaged_hints_in_a_pack_cost_a_look_at_all_packs(writer: RepositoryHandle, bucket: MemoryStore) -> None:
    for number in range(3):
        small(writer, number)
    name = hinted_pack(bucket).hex()
    key = f"packs/{name[:2]}/{name}.meta"
    data = bytearray(bucket.get(key))
    at = data.index(b"CASCHINT")
    data[at - 10] ^= 1
    bucket.put(key, bytes(data))
    assert logged(bucket) == ["2", "1", "0"]
    with Repository(RepositoryHandle.on_store(RemoteStore(bucket), cache=None)) as repo:
        report = repo.fsck()
    assert not report.problems and any(note.where == key and "hints" in note.what for note in report.notes)
    small(writer, 3)
    assert logged(bucket) == ["3", "2", "1", "0"]
    collect_garbage(writer, REPACK)
    with Repository(RepositoryHandle.on_store(RemoteStore(bucket), cache=None)) as repo:
        assert not any("hints" in note.what for note in repo.fsck().notes) and len(repo.log()) == 4


def test_a_local_repository_has_no_hints(handle: RepositoryHandle) -> None:
    small(handle, 0)
    small(handle, 1)
    assert handle.refs.get(RefKind.BRANCH, "main").pack is None
    for key, _ in handle.store.list("packs/"):
        assert b"CASCHINT" not in handle.store.get(key)


def test_a_commit_that_was_put_on_top_of_another_is_read_without_a_listing(bucket: MemoryStore) -> None:
    """A commit that lost a race has its nodes in one pack and its commit node in another."""
    from tests.meddling import MeddledStore

    first = RepositoryHandle.on_store(RemoteStore(bucket), cache=None)
    small(first, 0)

    def between() -> None:
        with closing(RepositoryHandle.on_store(RemoteStore(bucket), cache=None)) as other:
            small(other, 1)

    meddled = MeddledStore(RemoteStore(bucket), between, before="compare_and_swap", key="refs/heads/*")
    with closing(RepositoryHandle.on_store(meddled, cache=None)) as handle:
        small(handle, 2)
    first.close()
    assert logged(bucket) == ["2", "1", "0"]
    repo, store = cold(bucket)
    with repo:
        assert repo.read("main", "w")[0] == 2
    assert store.tally("list").calls == 0, store.asked
