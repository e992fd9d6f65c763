"""What is lost or damaged here is brought from a tier when it is read."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import torch

from cas_ckpt import Policy, Repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import CorruptionError, NotFoundError, TransientStorageError
from cas_ckpt.index import contents
from cas_ckpt.objects.digest import Digest
from cas_ckpt.storage.file import FileStore
from tests.cli.running import call
from tests.remote_store import RemoteStore

ROWS = 20_000


def state(number: int = 3) -> dict[str, object]:
    return {f"w{at}": torch.arange(ROWS, dtype=torch.float32) + 1000 * at for at in range(number)}


def data_packs(folder: Path) -> list[Path]:
    return sorted((folder / "packs").rglob("*.data"))


def with_tier(folder: Path, number: int = 3, commits: int = 1) -> None:
    """A repository `here`, all of which is at its tier `there`, too."""
    with Repository.init(folder / "there"), Repository.init(folder / "here") as here:
        here.add_remote("origin", folder / "there", tier=True)
        for at in range(commits):
            here.commit(state(number) | {"step": torch.full((ROWS,), float(at))})
            here.push_pending("origin")


def lose_data(folder: Path) -> None:
    for pack in data_packs(folder / "here"):
        pack.unlink()


def spoil_data(folder: Path) -> None:
    for pack in data_packs(folder / "here"):
        pack.chmod(0o644)
        held = bytearray(pack.read_bytes())
        for at in range(200, len(held) - 2000, 1000):
            held[at] ^= 0xFF
        pack.write_bytes(bytes(held))


def read_all(folder: Path, number: int = 3) -> None:
    with Repository.open(folder / "here") as here:
        found = here.load("main")
        for key, tensor in state(number).items():
            assert np.array_equal(np.asarray(found[key]), tensor.numpy())  # type: ignore[attr-defined]


def test_a_pack_that_is_lost_here_is_brought_from_the_tier_when_it_is_read(tmp_path: Path) -> None:
    with_tier(tmp_path)
    lose_data(tmp_path)
    read_all(tmp_path)
    shutil.move(tmp_path / "there", tmp_path / "away")
    read_all(tmp_path)  # it is here now
    with Repository.open(tmp_path / "here") as here:
        assert here.fsck(read_data=True).ok


def test_a_collection_that_lacks_what_a_tier_has_names_the_repair_that_brings_it(tmp_path: Path) -> None:
    with_tier(tmp_path)
    lose_data(tmp_path)
    with Repository.open(tmp_path / "here") as here:
        with pytest.raises(CorruptionError, match="Nothing is collected") as caught:
            here.gc()
        (advised,) = re.findall(r"(repo\.repair\(.*?\)) takes it from origin", str(caught.value))
        assert f'cas-ckpt fsck --repair chunks --from "{there_of(here)}"' in call("-C", tmp_path / "here", "gc").err
        eval(advised, {"repo": here})
        here.gc()
    shutil.move(tmp_path / "there", tmp_path / "away")
    read_all(tmp_path)


def there_of(here: Repository) -> str:
    (remote,) = here.remotes()
    return remote.url


def test_chunks_that_are_damaged_here_are_brought_from_the_tier_when_they_are_read(tmp_path: Path) -> None:
    with_tier(tmp_path)
    spoil_data(tmp_path)
    read_all(tmp_path)
    shutil.move(tmp_path / "there", tmp_path / "away")
    read_all(tmp_path)


def test_a_part_of_a_tensor_that_is_damaged_here_is_brought_from_the_tier(tmp_path: Path) -> None:
    with_tier(tmp_path)
    spoil_data(tmp_path)
    with Repository.open(tmp_path / "here") as here:
        assert np.asarray(here.read("main", "w1", slice(5, 9))).tolist() == [1005.0, 1006.0, 1007.0, 1008.0]


def test_nothing_is_brought_from_a_remote_that_is_no_tier(tmp_path: Path) -> None:
    with_tier(tmp_path)
    with Repository.open(tmp_path / "here") as here:
        here.set_remote("origin", tier=False)
    lose_data(tmp_path)
    with Repository.open(tmp_path / "here") as here, pytest.raises(NotFoundError, match="in no pack"):
        here.load("main")


def test_a_tier_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    with_tier(tmp_path)
    lose_data(tmp_path)
    shutil.move(tmp_path / "there", tmp_path / "away")
    with Repository.open(tmp_path / "here") as here:
        with pytest.raises(
            TransientStorageError, match=r"remote 'origin' \(.*there\).*try again when it can be reached"
        ):
            here.load("main")
        shutil.move(tmp_path / "away", tmp_path / "there")
        here.load("main")


def test_what_is_lost_at_the_tier_too_is_said_to_be(tmp_path: Path) -> None:
    with_tier(tmp_path)
    lose_data(tmp_path)
    for pack in data_packs(tmp_path / "there"):
        pack.unlink()
    with Repository.open(tmp_path / "here") as here:  # noqa: SIM117
        with pytest.raises(NotFoundError, match=r"remote 'origin' .*(does not have it|in no pack)"):
            here.load("main")


def test_wrong_bytes_of_a_tier_are_not_taken(tmp_path: Path) -> None:
    with_tier(tmp_path)
    lose_data(tmp_path)
    (tmp_path / "here").rename(tmp_path / "kept")
    (tmp_path / "there").rename(tmp_path / "here")
    spoil_data(tmp_path)
    (tmp_path / "here").rename(tmp_path / "there")
    (tmp_path / "kept").rename(tmp_path / "here")
    with Repository.open(tmp_path / "here") as here, pytest.raises((CorruptionError, NotFoundError), match="origin"):
        here.load("main")
    assert not data_packs(tmp_path / "here")


def test_who_may_only_read_is_told_where_it_may_be(tmp_path: Path) -> None:
    with_tier(tmp_path)
    lose_data(tmp_path)
    with Repository.open(tmp_path / "here", read_only=True) as here:  # noqa: SIM117
        with pytest.raises(NotFoundError, match="it may be at origin: open this repository to write"):
            here.load("main")
    assert not data_packs(tmp_path / "here")


def test_many_chunks_are_brought_by_few_requests(tmp_path: Path) -> None:
    with_tier(tmp_path, number=200)
    lose_data(tmp_path)
    there = RemoteStore(FileStore(tmp_path / "there"))
    with Repository.open(tmp_path / "here") as here:
        other = RepositoryHandle.on_store(there, read_only=True, cache=None)
        here._handle.elsewhere._opened[str(tmp_path / "there")] = other
        there.reset()
        here.load("main")
        assert there.requests <= 12, there.asked
        there.reset()
        here.load("main")
        assert there.requests == 0


def test_nodes_that_are_lost_here_are_brought_from_the_tier(tmp_path: Path) -> None:
    with_tier(tmp_path)
    shutil.copytree(tmp_path / "here" / "packs", tmp_path / "saved")
    for pack in sorted((tmp_path / "here" / "packs").rglob("*.meta")):
        pack.chmod(0o644)
        held = pack.read_bytes()
        at = held.index(b"w1")
        pack.write_bytes(held[:at] + b"w2" + held[at + 2 :])
    read_all(tmp_path)
    shutil.move(tmp_path / "there", tmp_path / "away")
    read_all(tmp_path)


def test_what_a_broken_off_reader_brought_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_tier(tmp_path)
    lose_data(tmp_path)
    with Repository.open(tmp_path / "here") as here:
        with monkeypatch.context() as patched:
            patched.setattr(here._handle.index, "add_packs", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):  # between the pack and its rows
                here.load("main")
        assert data_packs(tmp_path / "here")
    shutil.move(tmp_path / "there", tmp_path / "away")
    read_all(tmp_path)  # the pack is found by a look at the store


def test_a_collection_at_the_tier_meanwhile_moves_what_is_brought(tmp_path: Path) -> None:
    with_tier(tmp_path, commits=3)
    lose_data(tmp_path)
    with Repository.open(tmp_path / "here") as here, Repository.open(tmp_path / "there") as there:
        other = RepositoryHandle.open(str(tmp_path / "there"), read_only=True)
        other.sync()  # knows the packs of before
        here._handle.elsewhere._opened[str(tmp_path / "there")] = other
        before = data_packs(tmp_path / "there")
        there.repack()
        assert before != data_packs(tmp_path / "there")
        here.load("main")


def test_what_was_brought_is_kept_by_collections(tmp_path: Path) -> None:
    with_tier(tmp_path)
    lose_data(tmp_path)
    read_all(tmp_path)
    shutil.move(tmp_path / "there", tmp_path / "away")
    with Repository.open(tmp_path / "here") as here:
        here.gc(min_age_s=0)
        assert here.fsck(read_data=True).ok
    read_all(tmp_path)


def test_a_lost_tensor_is_written_again_by_a_commit_that_has_it(tmp_path: Path) -> None:
    with_tier(tmp_path)
    lose_data(tmp_path)
    shutil.move(tmp_path / "there", tmp_path / "away")
    with Repository.open(tmp_path / "here") as here:
        here.commit(state() | {"step": torch.full((ROWS,), 0.0)})
        here.load("main")


def test_a_commit_that_is_forgotten_here_is_read_from_the_tier(tmp_path: Path) -> None:
    with_tier(tmp_path, commits=4)
    with Repository.open(tmp_path / "here") as here:
        here.forget(Policy(keep_last=1), gc=True)
        here.gc(min_age_s=0)
        here.repack()
    with Repository.open(tmp_path / "here") as here:
        assert float(np.asarray(here.load("main~2")["step"])[0]) == 1  # type: ignore[arg-type]
        assert len(here.ls("main~1")) == 4
        assert [one.forgotten for one in here.log()] == [False, True, True, True]
        here.gc(min_age_s=0)
        assert here.fsck(read_data=True).ok
    shutil.move(tmp_path / "there", tmp_path / "away")
    read_all(tmp_path)


def test_a_repository_far_away_opens_no_remote_because_something_is_missing(tmp_path: Path) -> None:
    with_tier(tmp_path)
    lose_data(tmp_path)
    far = RepositoryHandle.on_store(RemoteStore(FileStore(tmp_path / "here")), cache=None)
    with Repository.open(tmp_path / "here", read_only=True) as here:
        chunks = sorted(Digest(one) for one in here._handle.index.read(contents.chunk_digests))
    with pytest.raises(NotFoundError, match="in no pack"):
        far.locate(chunks)
    assert not far.elsewhere._opened


def test_who_is_asked_for_what_is_missing_gets_no_token_that_the_repository_alone_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_tier(tmp_path)
    lose_data(tmp_path)
    with Repository.open(tmp_path / "here") as here:
        here.set_remote("origin", url="gs://bucket/x?endpoint=https://a.example", promisor=True)
        opened: list[str] = []

        def refuse(url: str, **given: object) -> RepositoryHandle:
            opened.append(unquote(url))
            raise TransientStorageError("nobody answers")

        monkeypatch.setattr(RepositoryHandle, "open", staticmethod(refuse))
        with pytest.raises(TransientStorageError, match="nobody answers"):
            here.load("main")
        here.fsck(remote=True)
        assert set(opened) == {"gs://bucket/x?endpoint=https://a.example&anonymous=true"}
