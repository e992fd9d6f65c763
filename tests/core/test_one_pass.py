"""In one pass: all that is brought back was verified, and an error says what was overwritten by then."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from cas_ckpt import Repository, limits
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import read_directory
from cas_ckpt.core.refs import UNKNOWN_HEAD
from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError, PeerError
from cas_ckpt.objects.pack import ExtentInfo
from cas_ckpt.objects.state import Container
from cas_ckpt.ops.checkout import checkout
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.storage.file import FileStore
from cas_ckpt.transfer import arrivals, fetch
from tests.builders import new_repository, numbers
from tests.divided import divided, mesh, over
from tests.thread_peers import run_ranks

pytestmark = pytest.mark.slow

STATE = {
    "square": torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024),
    "tall": torch.randn(30_000, 50, generator=torch.Generator().manual_seed(1)),
    "line": torch.arange(700_000, dtype=torch.int64),
    "zeros": torch.zeros(1 << 18),
    "inline": torch.arange(5.0),
}
ENCODINGS = ["raw", "zstd", "planes"]


@pytest.fixture(params=["through the page cache", "past it", "now so, now so"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How chunks are read; small packs are in memory, so nothing would be read past it."""
    way: str = request.param
    if way != "through the page cache":
        monkeypatch.setattr(fetch, "WORTH_BYTES", 0)
        monkeypatch.setattr(fetch, "packs_in_memory", lambda *_: set())
        monkeypatch.setattr(fetch, "TRIED_BYTES", 1 << 19 if way == "now so, now so" else 1 << 40)
    return way


def skip_without_direct_reads(made: Path) -> None:
    pack, _ = extents(made)[0]
    if FileStore(made).read_past_cache(str(pack.relative_to(made)), 0, memoryview(mmap.mmap(-1, 4096))) is None:
        pytest.skip("no O_DIRECT here")


@pytest.fixture
def made(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    encoding = getattr(request, "param", "raw")
    new_repository(tmp_path / "repo", encoding=encoding).close()
    with Repository.open(tmp_path / "repo", group=None) as repo:
        repo.commit(STATE)
    return tmp_path / "repo"


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 7) for name, tensor in STATE.items()}


def extents(path: Path) -> list[tuple[Path, ExtentInfo]]:
    store = FileStore(path)
    found = []
    for pack in sorted((path / "packs").glob("*/*.data")):
        _, infos = read_directory(store, str(pack.relative_to(path)))
        found += [(pack, info) for info in infos]
    return sorted(found, key=lambda each: (str(each[0]), each[1].offset))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("made", ENCODINGS, indirect=True)
def test_every_target_is_filled_whatever_its_strides(made: Path) -> None:
    target = blank()
    target["square"] = torch.full((1024, 1024), 7.0).t()
    target["tall"] = torch.full((30_000, 64), 7.0)[:, 3:53]
    with Repository.open(made, group=None) as repo:
        repo.checkout("main", into=target, atomic=False)
        assert repo.head.branch == "main"
        loaded = repo.load("main")
    for name, tensor in STATE.items():
        assert torch.equal(target[name], tensor) and torch.equal(loaded[name], tensor), name


def test_of_a_part_of_the_state_the_rest_stays(made: Path) -> None:
    target = blank()
    with Repository.open(made, group=None) as repo:
        repo.checkout("main", into=target, keys=["line", "inline"], atomic=False)
    assert torch.equal(target["line"], STATE["line"]) and torch.equal(target["inline"], STATE["inline"])
    assert all((target[name] == 7).all() for name in ("square", "tall", "zeros"))


@pytest.mark.parametrize("part", ["entry header", "leaf digests", "payload begin", "payload end"])
@pytest.mark.parametrize("made", ["raw", "planes"], indirect=True)
def test_a_flipped_bit_is_found_and_what_was_overwritten_is_named(made: Path, part: str) -> None:
    pack, info = max(extents(made), key=lambda each: each[1].stored_bytes)
    flip(pack, {
        "entry header": info.offset + 20,
        "leaf digests": info.offset + info.header_bytes - 20,
        "payload begin": info.offset + info.header_bytes,
        "payload end": info.end - 1,
    }[part])  # fmt: skip
    target = blank()
    with Repository.open(made, group=None) as repo:
        with pytest.raises(CorruptionError) as caught:
            repo.checkout("main", into=target, atomic=False)
        assert repo._handle.head == UNKNOWN_HEAD
        with pytest.raises(CorruptionError):
            repo.load("main")
    _check_overwritten(caught.value, target)


def test_a_damaged_chunk_that_is_decoded_before_it_is_put_in_place_leaves_its_tensor_alone(tmp_path: Path) -> None:
    new_repository(tmp_path / "repo", encoding="planes").close()
    target = {"a": torch.full((1 << 18,), 7.0)}
    with Repository.open(tmp_path / "repo", group=None) as repo:
        repo.commit({"a": torch.randn(1 << 18).bfloat16().float()})
    pack, info = max(extents(tmp_path / "repo"), key=lambda each: each[1].stored_bytes)
    flip(pack, info.end - 100)
    with Repository.open(tmp_path / "repo", group=None) as repo, pytest.raises(CorruptionError) as caught:
        repo.checkout("main", into=target, atomic=False)
    assert caught.value.overwritten == () and (target["a"] == 7).all()


def test_errors_that_are_not_ours_say_what_was_overwritten_too() -> None:
    chunk = Mock(touched=True, parts=[Mock(key="a")])
    with pytest.raises(MemoryError) as caught, checkout._naming_overwritten([chunk]):
        raise MemoryError
    assert vars(caught.value)["overwritten"] == ("a",)
    assert "overwritten by then, at least in part: a; check out again" in caught.value.__notes__[0]


class Interrupted:
    """An object whose state cannot be restored on rank 1."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.rank == 1:
            raise KeyboardInterrupt


def test_a_rank_is_told_that_its_targets_are_written_when_another_one_fails_after_that(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"w": torch.ones(1000), "o": Interrupted(0)})

    def work(peers: Peers) -> str:
        target = {"w": torch.zeros(1000), "o": Interrupted(peers.rank)}
        with Repository.open(tmp_path / "repo", group=peers) as repo:
            with pytest.raises(KeyboardInterrupt if peers.rank else PeerError) as caught:
                repo.checkout("main", into=target)
            assert target["w"].all() and repo.head == UNKNOWN_HEAD
        return str(caught.value)

    assert "the targets may be partly written: check out again" in run_ranks(2, work)[0]


def _check_overwritten(error: CkptError, target: Mapping[str, Any]) -> None:
    for name, tensor in target.items():
        assert name in error.overwritten or (tensor == 7).all(), name
    assert all(name in str(error) for name in error.overwritten)


def test_a_tensor_of_which_several_ranks_wrote_parts_is_named_if_one_part_is_damaged(tmp_path: Path) -> None:
    """Each part is put into place as it arrives."""
    rows = numbers(600, 300)
    new_repository(tmp_path / "repo").close()

    def work(peers: Peers) -> None:
        part = divided(rows, over(mesh(3), "S(0)"), peers.rank)
        with closing(RepositoryHandle.open(tmp_path / "repo")) as handle:
            commit_tree(handle, Container("dict", {"w": part}), CommitRequest(), peers=peers)

    run_ranks(3, work)
    found = extents(tmp_path / "repo")
    assert len(found) == 3 and len({info.digest for _, info in found}) == 1
    for pack, info in found:
        flip(pack, info.end - 1)
        target = {"w": np.full(rows.shape, 7, np.float32)}
        with (
            Repository.open(tmp_path / "repo", group=None) as repo,
            pytest.raises(CorruptionError) as caught,
            limits(num_threads=1),
        ):
            repo.checkout("main", into=target, atomic=False)
        _check_overwritten(caught.value, target)
        flip(pack, info.end - 1)


def test_no_more_than_two_blocks_are_on_their_way_at_a_time(
    made: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "past it":
        pytest.skip("the page cache reads ahead by itself")
    skip_without_direct_reads(made)
    read, third = FileStore.read_past_cache, threading.Barrier(3)

    def waiting(self: FileStore, key: str, offset: int, target: memoryview) -> int | None:
        with suppress(threading.BrokenBarrierError):
            third.wait(0.5)
        return read(self, key, offset, target)

    monkeypatch.setattr(FileStore, "read_past_cache", waiting)
    monkeypatch.setattr(arrivals, "BLOCK_BYTES", 1 << 20)
    with Repository.open(made, group=None) as repo, limits(num_threads=6):
        repo.checkout("main", into=(target := blank()), atomic=False)
    assert third.broken
    assert all(torch.equal(target[name], tensor) for name, tensor in STATE.items())


def test_a_pack_that_is_cut_short_or_gone_is_found(made: Path) -> None:
    pack, _ = extents(made)[-1]
    whole = pack.read_bytes()
    pack.write_bytes(whole[: len(whole) // 2])
    with Repository.open(made, group=None) as repo, pytest.raises(CorruptionError) as caught:
        repo.checkout("main", into=(target := blank()), atomic=False)
    _check_overwritten(caught.value, target)
    pack.unlink()
    with Repository.open(made, group=None) as repo, pytest.raises(NotFoundError) as gone:
        repo.checkout("main", into=(target := blank()), atomic=False)
    _check_overwritten(gone.value, target)


def test_what_is_damaged_in_one_pack_is_taken_from_another(made: Path, tmp_path: Path) -> None:
    new_repository(tmp_path / "other").close()
    with Repository.open(tmp_path / "other", group=None) as repo:
        repo.commit(STATE)
    for pack, _ in extents(tmp_path / "other"):
        copy = made / pack.relative_to(tmp_path / "other")
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(pack.read_bytes())
    pack, info = extents(made)[0]
    flip(pack, info.end - 1)
    target = blank()
    with Repository.open(made, group=None, index_url=":memory:") as repo:
        repo.checkout("main", into=target, atomic=False)
        loaded = repo.load("main", dtype=torch.float64)
    for name, tensor in STATE.items():
        assert torch.equal(target[name], tensor)
        assert np.array_equal(loaded[name].numpy(), tensor.numpy().astype(loaded[name].numpy().dtype))


def test_all_is_read_and_verified_again_that_is_not_in_memory_when_the_targets_are_filled(
    made: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "through the page cache":
        skip_without_direct_reads(made)
    counted = [0]
    read = FileStore.read_past_cache

    def counting(self: FileStore, key: str, offset: int, target: memoryview) -> int | None:
        got = read(self, key, offset, target)
        counted[0] += got or 0
        return got

    monkeypatch.setattr(FileStore, "read_past_cache", counting)
    target = blank()
    with Repository.open(made, group=None) as repo:
        repo.checkout("main", into=target)
    assert all(torch.equal(target[name], tensor) for name, tensor in STATE.items())
    num_bytes = sum(info.end - info.offset for _, info in extents(made))
    if way == "past it":
        assert 2 * num_bytes <= counted[0] <= 2.2 * num_bytes
    elif way == "now so, now so":
        assert 0 < counted[0] <= 2.2 * num_bytes
    else:
        assert not counted[0]


def test_a_medium_that_gives_other_bytes_the_second_time_is_found(
    made: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "past it":
        pytest.skip("tests/transfer/test_fetch.py has it")
    skip_without_direct_reads(made)
    read, calls = FileStore.read_past_cache, [0]
    intact = [1 << 40]

    def changing(self: FileStore, key: str, offset: int, target: memoryview) -> int | None:
        got = read(self, key, offset, target)
        calls[0] += 1
        if calls[0] > intact[0]:
            target[len(target) // 2] ^= 1
        return got

    monkeypatch.setattr(FileStore, "read_past_cache", changing)
    with Repository.open(made, group=None) as repo:
        repo.checkout("main", into=blank())
        calls[0], intact[0] = 0, calls[0] // 2  # the first pass
        with pytest.raises(CorruptionError) as caught:
            repo.checkout("main", into=(target := blank()))
        assert repo._handle.head == UNKNOWN_HEAD
    _check_overwritten(caught.value, target)


def test_a_checkout_that_is_atomic_touches_nothing_where_one_pass_does(made: Path) -> None:
    pack, info = extents(made)[-1]
    flip(pack, info.end - 1)
    target = blank()
    with Repository.open(made, group=None) as repo:
        with pytest.raises(CorruptionError) as caught:
            repo.checkout("main", into=target)
        assert not caught.value.overwritten and all((tensor == 7).all() for tensor in target.values())
        with pytest.raises(CorruptionError) as caught, limits(num_threads=1):
            repo.checkout("main", into=target, atomic=False)
    assert caught.value.overwritten
    _check_overwritten(caught.value, target)
