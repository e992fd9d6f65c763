"""A collection beside commits, other collections and repairs: what each relies on stays; none waits for another."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from cas_ckpt import clock, limits
from cas_ckpt.core import handle as repository
from cas_ckpt.core import publish
from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.core.forgotten import read_forgotten, write_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import (
    GC_STATE_KEY,
    GcPhase,
    GcState,
    Session,
    encode_gc_state,
    read_gc_state,
    swap_gc_state,
)
from cas_ckpt.core.refs import Generation, RefKind
from cas_ckpt.errors import CkptError
from cas_ckpt.index import contents
from cas_ckpt.native import leaf_digests
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.layouts import LayoutObject, layout_node
from cas_ckpt.objects.state import RANKS, Container
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.ops.fsck.repair import repair_url
from cas_ckpt.ops.fsck.report import RepairRequest
from cas_ckpt.ops.gc.gc import Collection, collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.refs import create_branch, delete_branch, rename_ref
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.storage.file import FileStore
from cas_ckpt.transfer.pack_writer import ChunkSink, EncodedChunk, write_nodes
from tests.builders import (
    commit,
    leave_garbage,
    new_repository,
    numbers,
    same_bytes,
    stored_arrays,
    tensor,
    weights,
    with_new_index,
)
from tests.committing import TIMEOUT_S
from tests.index.building import all_commits
from tests.meddling import MeddledStore
from tests.thread_peers import run_ranks

EXPIRED = GcOptions(reflog_expire_s=0, max_unused=0)
NOW = GcOptions(reflog_expire_s=0, max_unused=0, min_age_s=0)


def test_a_commit_under_which_a_collection_began_relies_on_nothing_that_it_condemned(tmp_path: Path) -> None:
    old = numbers(1 << 18)
    first = new_repository(tmp_path / "repo")
    commit(first, {"w": old})
    first.close()
    inner = FileStore(tmp_path / "repo")
    condemned = tuple(key for key, _ in inner.list("packs/"))
    state = encode_gc_state(GcState(Generation(1), GcPhase.CONDEMNED, condemned))
    store = MeddledStore(inner, lambda: inner.put(GC_STATE_KEY, state), before="get", key="*main.ref")
    info = commit(RepositoryHandle.on_store(store, index_url=str(tmp_path / "repo" / INDEX_PATH)), {"w": old})
    assert store.happened and condemned
    for key in condemned:
        inner.delete(key)
    assert same_bytes(stored_arrays(RepositoryHandle.open(tmp_path / "repo"), info.root)["w"], old)


def test_chunks_of_per_rank_values_are_looked_for_again_when_a_collection_began(
    handle: RepositoryHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_garbage(handle)
    first = [True]

    def after_a_collection(store: Any) -> Any:
        if first and first.pop():
            with_own_index = RepositoryHandle.open(tmp_path / "repo", index_url=":memory:")
            report = collect_garbage(with_own_index, EXPIRED)
            assert report.deleted_packs
        return read_gc_state(store)

    monkeypatch.setattr(publish, "read_gc_state", after_a_collection)

    def work(peers: Peers) -> Any:
        mine = RepositoryHandle.open(tmp_path / "repo", index_url=str(tmp_path / f"index{peers.rank}"))
        own = Container(RANKS, {peers.rank: tensor(weights(2) if peers.rank else weights(3))})
        with limits(num_threads=1):
            return commit_tree(mine, Container("dict", {"own": own}), CommitRequest(), peers=peers)

    infos = run_ranks(2, work, timeout_s=TIMEOUT_S)
    arrays = stored_arrays(with_new_index(tmp_path / "repo"), infos[0].root)
    assert same_bytes(arrays["own/1"], weights(2))


def test_chunks_whose_rows_go_while_the_known_ones_are_read_are_not_relied_on(
    handle: RepositoryHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes share an index: the collector drops rows between two reads of a writer."""
    leave_garbage(handle)
    writer = RepositoryHandle.open(tmp_path / "repo")
    collection = Collection(handle, EXPIRED)
    seen: list[Any] = []
    delete = collection.delete

    def later(state: Any) -> Any:
        seen.append(state)
        return state

    collection.delete = later  # type: ignore[method-assign]
    collection.run()  # until before g8
    ids_of = contents.chunk_digests

    def then_they_go(connection: Any) -> set[bytes]:
        found = ids_of(connection)
        if seen:
            delete(seen.pop())
        return found

    monkeypatch.setattr(contents, "chunk_digests", then_they_go)
    info = commit(writer, {"w": weights(2)}, branch="again")
    assert not seen
    assert same_bytes(stored_arrays(with_new_index(tmp_path / "repo"), info.root)["w"], weights(2))


def test_a_thread_that_read_an_old_generation_brings_no_condemned_pack_back(
    handle: RepositoryHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three threads of one handle: A read gc/state before g4, then waited for B; D tells of its pack."""
    sink = ChunkSink(handle.store, pack_bytes=handle.config.pack_bytes)
    generation = handle.begin_writing()  # D's, which has written a pack and not told of it yet
    digest = Digest(b"d" * 32)
    plain = memoryview(bytearray(weights(5).tobytes()))
    found = leaf_digests(plain, 1 << 16)
    encoded = codec.encode_extent(plain, policy="raw", item_bytes=4)
    sink.put(EncodedChunk(digest, len(plain), 1 << 16, found, encoded.encoding, bytes(encoded.payload)))
    [pack] = sink.finish()

    before = read_gc_state(handle.store)

    def as_a_read_it(store: Any) -> Any:
        monkeypatch.setattr(repository, "read_gc_state", read_gc_state)
        swap_gc_state(
            handle.store, before, generation=before.generation.next(), phase=GcPhase.CONDEMNED, condemned=(pack.key,)
        )
        assert handle.begin_writing().number == 1  # B
        return before

    monkeypatch.setattr(repository, "read_gc_state", as_a_read_it)
    handle.begin_writing()  # A
    handle.add_written([pack], [], generation=generation)  # D, after it saw that the generation moved
    assert handle.known([digest]) == [False]  # asked by B, which commits under generation 1


def test_a_branch_that_is_renamed_by_a_slow_clock_between_the_fences_keeps_its_history(
    handle: RepositoryHandle, tmp_path: Path
) -> None:
    old = leave_garbage(handle)
    user = RepositoryHandle.open(tmp_path / "repo")
    slow = clock.now_s() - 7200

    class WithAUser(Collection):
        listings = 0

        def condemn(self, state: Any, packs: Any) -> Any:
            with clock.fixed(lambda: slow):
                create_branch(user, "a", start=old.id)
            return super().condemn(state, packs)

        def read_refs(self) -> Any:
            refs = super().read_refs()
            self.listings += 1
            if self.listings == 2:  # the fence has listed, and not swapped yet
                with clock.fixed(lambda: slow):
                    commit(user, {"w": weights(3)}, branch="a")
                    rename_ref(user, RefKind.BRANCH, "a", "b")
            return refs

    WithAUser(handle, EXPIRED).run()
    rows = {row.digest.hex(): row for row in all_commits(with_new_index(tmp_path / "repo").index)}
    head = with_new_index(tmp_path / "repo").refs.get(RefKind.BRANCH, "b").target
    assert head is not None and rows[head.hex()].parents[0].hex() == old.id
    assert same_bytes(stored_arrays(with_new_index(tmp_path / "repo"), old.root)["w"], weights(2))


def test_a_pack_that_is_collected_between_listing_and_reading_costs_no_commit(
    handle: RepositoryHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_garbage(handle)
    other = RepositoryHandle.open(tmp_path / "repo", index_url=":memory:")
    read_pack, done = repository.read_listed_pack, []

    def after_a_collection(store: Any, key: str, size: int) -> Any:
        if not done:
            done.append(key)
            with monkeypatch.context() as patch:
                patch.setattr(repository, "read_listed_pack", read_pack)
                collect_garbage(handle, EXPIRED)
        return read_pack(store, key, size)

    monkeypatch.setattr(repository, "read_listed_pack", after_a_collection)
    info = commit(other, {"w": weights(3)})
    assert done and handle.index.generation == 1
    assert same_bytes(stored_arrays(with_new_index(tmp_path / "repo"), info.root)["w"], weights(3))


def test_records_that_are_merged_while_they_are_read_are_read(handle: RepositoryHandle, tmp_path: Path) -> None:
    infos = [commit(handle, {"w": weights(seed)}) for seed in range(20)]
    ids = [Digest(bytes.fromhex(info.id)) for info in infos[:-1]]
    for one in ids:
        write_forgotten(handle.store, [one], author="me")
    inner = FileStore(tmp_path / "repo")
    collecting = RepositoryHandle.on_store(inner)  # it merges them at its end
    store = MeddledStore(inner, lambda: collect_garbage(collecting, NOW), before="get", key="forgotten/*")
    assert read_forgotten(store) == frozenset(ids)
    assert store.happened


def test_a_collection_beside_the_end_of_another_sees_no_damage(handle: RepositoryHandle, tmp_path: Path) -> None:
    infos = [commit(handle, {"w": weights(seed)}) for seed in range(20)]
    collect_garbage(handle, NOW)
    for info in infos[:-1]:
        write_forgotten(handle.store, [Digest(bytes.fromhex(info.id))], author="me")

    class Untidy(Collection):
        def tidy(self) -> None:
            """Later, at another one's expense."""

    first = Untidy(handle, NOW)
    first.run()

    repo = tmp_path / "repo"
    store = MeddledStore(FileStore(repo), lambda: Collection.tidy(first), before="get", key="forgotten/*")
    collect_garbage(RepositoryHandle.on_store(store, index_url=str(repo / INDEX_PATH)), NOW)
    assert store.happened


def test_a_session_of_a_clock_that_is_far_ahead_does_not_spare_garbage_for_ever(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1)})
    ahead = clock.now_s() + 5 * 365 * 86400
    session = Session(handle.store)
    with clock.fixed(lambda: ahead):
        session.beat()  # and dies
    write_nodes(handle.store, [layout_node(LayoutObject(aliases=(("a", "b"),)))])  # of a commit that died
    handle.sync()
    now = clock.now_s() + 30 * 86400
    with clock.fixed(lambda: now):
        assert collect_garbage(handle, GcOptions()).young_packs == 0


def test_a_hostile_gc_state_deletes_packs_alone(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1)})
    state = read_gc_state(handle.store)
    state = swap_gc_state(
        handle.store, state, generation=state.generation.next(), phase=GcPhase.CONDEMNED, condemned=()
    )
    swap_gc_state(handle.store, state, generation=state.generation, phase=GcPhase.DELETING, condemned=("config",))
    with pytest.raises(CkptError):
        collect_garbage(handle, NOW)
    assert handle.store.get("config")


def test_chunks_that_are_stored_twice_are_not_copied_again_and_again(handle: RepositoryHandle, tmp_path: Path) -> None:
    for seed in range(10, 40):
        commit(handle, {"w": weights(seed)}, branch=f"b{seed}")
    other = RepositoryHandle.open(tmp_path / "repo", index_url=":memory:")
    other.begin_writing()
    handle.begin_writing()
    commit(handle, {"w": weights(2)}, branch="x")
    commit(other, {"w": weights(2)}, branch="y")
    options = GcOptions(many_small=10_000)
    reports = [collect_garbage(handle, options) for _ in range(4)]
    assert [report.copied_bytes > 0 for report in reports[1:]] == [False] * 3, [r.copied_bytes for r in reports]


def test_repair_and_collection_do_not_wait_for_each_other(handle: RepositoryHandle, tmp_path: Path) -> None:
    """A collection died after g4, and a pack is damaged (one power cut does both)."""
    info = commit(handle, {"w": weights(1)})
    commit(handle, {"w": weights(2)}, branch="side")
    delete_branch(handle, "side", force=True)
    shutil.copytree(tmp_path / "repo", tmp_path / "copy")

    class Dies(Collection):
        def fence(self, state: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Dies(handle, EXPIRED).run()
    assert read_gc_state(handle.store).phase == GcPhase.CONDEMNED
    condemned = set(read_gc_state(handle.store).condemned)
    [data] = [key for key, _ in handle.store.list("packs/") if key.endswith(".data") and key not in condemned]
    path = tmp_path / "repo" / data
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-10])
    handle.close()
    request = RepairRequest(frozenset(["packs", "chunks"]), sources=[str(tmp_path / "copy")])
    for what in (lambda: collect_garbage(RepositoryHandle.open(tmp_path / "repo"), EXPIRED),
                 lambda: repair_url(tmp_path / "repo", request)) * 2:  # fmt: skip
        with contextlib.suppress(CkptError):
            what()
    assert same_bytes(stored_arrays(with_new_index(tmp_path / "repo"), info.root)["w"], weights(1))
    assert collect_garbage(with_new_index(tmp_path / "repo"), EXPIRED).generation
