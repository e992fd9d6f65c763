"""Damage of any stored part is found, names the tensor, and leaves the target as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt import Repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import read_directory
from cas_ckpt.core.revisions import resolve
from cas_ckpt.core.tree import find_entry, load_tree, stored_tensors, tensor_nodes
from cas_ckpt.errors import CkptError, CorruptionError, NoRepositoryError, NotFoundError, UnsupportedVersionError
from cas_ckpt.index import history
from cas_ckpt.objects import pack
from cas_ckpt.objects.digest import seal
from cas_ckpt.objects.spec import Box, Spec
from cas_ckpt.objects.state import StoredTensor, TensorCopy
from cas_ckpt.ops.checkout.checkout import fetch_tensors, read_array
from tests.builders import ArrayMemory, commit, new_repository, numbers, stored_arrays

pytestmark = pytest.mark.slow

STATE = {"first": numbers(40, 4096, seed=1), "second": numbers(1 << 20, seed=2), "third": numbers(900, seed=3)}


@pytest.fixture(params=["raw", "planes"])
def repo(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RepositoryHandle]:
    made = new_repository(tmp_path / "repo", encoding=request.param)
    commit(made, STATE)
    yield made
    made.close()


def packs(path: Path, kind: str) -> list[Path]:
    return sorted((path / "packs").glob(f"*/*.{kind}"))


def reopened(path: Path) -> RepositoryHandle:
    return RepositoryHandle.open(path)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(bytes(data))


def restore_into(handle: RepositoryHandle) -> dict[str, np.ndarray[Any, Any]]:
    """Targets full of sevens, after a checkout that must have raised."""
    targets = {name: np.full_like(array, 7) for name, array in STATE.items()}
    tree = load_tree(handle, handle.index.read(history.read_commit, resolve(handle, "main")).root)  # type: ignore[union-attr]
    copies = [TensorCopy(path, stored, ArrayMemory(targets[str(path[0])])) for path, stored in stored_tensors(tree)]
    with pytest.raises(CorruptionError) as caught:
        fetch_tensors(handle, copies)
    assert any(name in str(caught.value) for name in STATE)
    assert len(copies) == len(targets) > 0
    return targets


@pytest.mark.parametrize("part", ["entry header", "leaf digests", "payload begin", "payload end"])
def test_a_flipped_bit_in_a_chunk_is_found_before_any_target_is_touched(
    repo: RepositoryHandle, tmp_path: Path, part: str
) -> None:
    path = packs(tmp_path / "repo", "data")[0]
    _, infos = read_directory(repo.store, str(path.relative_to(tmp_path / "repo")))
    info = max(infos, key=lambda entry: entry.offset)
    offset = {
        "entry header": info.offset + 20,
        "leaf digests": info.offset + info.header_bytes - 20,
        "payload begin": info.offset + info.header_bytes,
        "payload end": info.end - 1,
    }[part]
    flip(path, offset)
    handle = reopened(tmp_path / "repo")
    targets = restore_into(handle)
    assert all((target == 7).all() for target in targets.values())


def test_a_truncated_pack_is_found(repo: RepositoryHandle, tmp_path: Path) -> None:
    path = packs(tmp_path / "repo", "data")[0]
    path.write_bytes(path.read_bytes()[:-5000])
    targets = restore_into(reopened(tmp_path / "repo"))
    assert all((target == 7).all() for target in targets.values())


def test_a_missing_pack_is_reported_as_missing(repo: RepositoryHandle, tmp_path: Path) -> None:
    for path in packs(tmp_path / "repo", "data"):
        path.unlink()
    handle = reopened(tmp_path / "repo")
    root = handle.index.read(history.read_commit, resolve(handle, "main")).root.hex()  # type: ignore[union-attr]
    with pytest.raises(NotFoundError):
        stored_arrays(handle, root)


def test_a_commit_does_not_rely_on_a_pack_that_is_gone_or_cut(repo: RepositoryHandle, tmp_path: Path) -> None:
    path = packs(tmp_path / "repo", "data")[0]
    path.write_bytes(path.read_bytes()[:-5000])
    handle = reopened(tmp_path / "repo")
    info = commit(handle, STATE)
    assert info.stats.num_new_chunks == info.stats.num_chunks
    assert [str(path).endswith(key) for key in handle.damaged] == [True]
    path.unlink()
    assert len(stored_arrays(reopened(tmp_path / "repo"), info.root)) == len(STATE)


def test_what_only_a_damaged_pack_holds_is_reported_as_damaged(repo: RepositoryHandle, tmp_path: Path) -> None:
    path = packs(tmp_path / "repo", "meta")[0]
    path.write_bytes(path.read_bytes()[:-20])
    handle = reopened(tmp_path / "repo")
    handle.sync()
    with pytest.raises(CorruptionError, match=path.name):
        load_tree(handle, resolve(handle, "main"))


def test_every_flipped_byte_of_a_meta_pack_is_found_by_whoever_reads_it(repo: RepositoryHandle, tmp_path: Path) -> None:
    path = packs(tmp_path / "repo", "meta")[0]
    whole = path.read_bytes()
    root = repo.index.read(history.read_commit, resolve(repo, "main")).root  # type: ignore[union-attr]
    _, infos = read_directory(repo.store, str(path.relative_to(tmp_path / "repo")))
    payloads = [range(info.offset + info.header_bytes, info.end) for info in infos if info.digest == root]
    assert len(payloads[0]) > 20
    for at in payloads[0]:
        flip(path, at)
        with pytest.raises(CkptError):
            load_tree(reopened(tmp_path / "repo"), root)
        path.write_bytes(whole)


@pytest.mark.parametrize("key", ["refs/heads/main.ref", "config", "gc/state"])
def test_a_damaged_record_is_refused_and_named(repo: RepositoryHandle, tmp_path: Path, key: str) -> None:
    flip(tmp_path / "repo" / key, 50)
    with pytest.raises(CorruptionError, match=key):
        commit(reopened(tmp_path / "repo"), STATE)


def test_a_repository_of_a_newer_format_is_refused_as_newer(repo: RepositoryHandle, tmp_path: Path) -> None:
    (tmp_path / "repo" / "config").write_bytes(seal("config", 2, {"anything": 1}, key="config"))
    with pytest.raises(UnsupportedVersionError, match="upgrade"):
        reopened(tmp_path / "repo")


@pytest.mark.parametrize("what", ["nothing", "an empty folder", "a file"])
def test_a_path_that_is_no_repository_is_told_apart(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    if what == "an empty folder":
        path.mkdir()
    elif what == "a file":
        path.write_text("hello")
    with pytest.raises(NoRepositoryError):
        RepositoryHandle.open(path)


def test_an_intact_second_copy_is_used_when_the_first_is_damaged(tmp_path: Path) -> None:
    one, two = new_repository(tmp_path / "one"), new_repository(tmp_path / "two")
    info = commit(one, STATE)
    commit(two, STATE)
    source = packs(tmp_path / "two", "data")[0]
    damaged = packs(tmp_path / "one", "data")[0]
    target = tmp_path / "one" / source.relative_to(tmp_path / "two")
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(source.read_bytes())
    flip(damaged, pack.HEADER_BYTES + 30)
    handle = reopened(tmp_path / "one")
    handle.sync()
    assert len(stored_arrays(handle, info.root)) == len(STATE)


def test_an_index_of_another_repository_is_not_believed(tmp_path: Path) -> None:
    one, two = new_repository(tmp_path / "one"), new_repository(tmp_path / "two")
    commit(one, STATE)
    one.close()
    two.close()
    for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
        source, target = tmp_path / "one" / "index" / name, tmp_path / "two" / "index" / name
        target.unlink(missing_ok=True)
        if source.exists():
            target.write_bytes(source.read_bytes())
    handle = reopened(tmp_path / "two")
    info = commit(handle, STATE)
    assert info.stats.num_new_chunks == info.stats.num_chunks > 0
    assert len(stored_arrays(handle, info.root)) == len(STATE)


def test_an_index_that_was_rolled_back_is_caught_up(tmp_path: Path) -> None:
    repo = new_repository(tmp_path / "repo")
    repo.close()
    old = (tmp_path / "repo" / "index" / "index.sqlite").read_bytes()
    repo = reopened(tmp_path / "repo")
    info = commit(repo, STATE)
    repo.close()
    for leftover in (tmp_path / "repo" / "index").iterdir():
        leftover.unlink()
    (tmp_path / "repo" / "index" / "index.sqlite").write_bytes(old)
    handle = reopened(tmp_path / "repo")
    assert len(stored_arrays(handle, info.root)) == len(STATE)
    assert commit(handle, STATE).stats.num_new_chunks == 0


def test_a_tensor_node_of_another_spec_than_its_entry_is_refused(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    root = commit(handle, {"w": numbers(3000, 1000)}).root
    item = find_entry(handle, bytes.fromhex(root), "w")  # type: ignore[arg-type]
    assert isinstance(item, StoredTensor)
    other = replace(item, spec=Spec("float32", (1000, 3000)))
    with pytest.raises(CorruptionError, match="is stored where"):
        tensor_nodes(handle, [other])
    with pytest.raises(CorruptionError, match="is stored where"):
        read_array(handle, other, Box((0, 0), (2, 2)))


VERBS: dict[str, Callable[[Repository], Any]] = {
    "ls": lambda repo: repo.ls("main"),
    "entry": lambda repo: repo.entry("main", "first"),
    "log": lambda repo: repo.log(),
    "log of keys": lambda repo: repo.log(keys="first"),
    "find": lambda repo: repo.find("first"),
    "find at": lambda repo: repo.find("first", at="main"),
    "diff": lambda repo: repo.diff("main"),
    "holders": lambda repo: repo.holders("main", "first"),
    "nearest": lambda repo: repo.nearest("main"),
    "du by commit": lambda repo: repo.du(),
    "du by branch": lambda repo: repo.du("branch"),
    "du by tensor": lambda repo: repo.du("tensor"),
    "shards": lambda repo: list(repo.shards("main")),
    "stats": lambda repo: repo.stats(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_who_asks_a_new_index_for_a_commit_in_a_damaged_pack_hears_of_the_damage(tmp_path: Path, verb: str) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, {"first": numbers(400)})
    handle.close()
    (pack_path,) = packs(tmp_path / "repo", "meta")
    whole = pack_path.read_bytes()
    pack_path.write_bytes(whole[: len(whole) // 2])
    _raises(tmp_path / "repo", verb, CorruptionError, "1 packs are damaged")
    pack_path.unlink()
    _raises(tmp_path / "repo", verb, NotFoundError, "is in no pack of .* repo.fsck")


def test_the_log_of_a_ref_is_shown_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    made = commit(handle, {"first": numbers(400)})
    with Repository(handle) as repo:
        repo.branch("ft", start="main")
        before = packs(tmp_path / "repo", "meta")
        commit(handle, {"first": numbers(400, seed=1)}, branch="ft")
    (pack_path,) = set(packs(tmp_path / "repo", "meta")) - set(before)
    pack_path.write_bytes(pack_path.read_bytes()[:100])
    with Repository.open(tmp_path / "repo", index_url=":memory:") as repo:
        assert [move.new for move in repo.reflog("ft")] == [made.id]


def _raises(path: Path, verb: str, error: type[CkptError], text: str) -> None:
    with Repository.open(path, index_url=":memory:") as repo, pytest.raises(error, match=text):
        VERBS[verb](repo)
