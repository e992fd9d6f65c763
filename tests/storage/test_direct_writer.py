"""Large streams: any cut into pieces, any alignment, with and without O_DIRECT."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.errors import OutOfSpaceError, StorageError
from cas_ckpt.storage import file
from cas_ckpt.storage.disk import Descriptor, Temporary, TemporaryFolder
from cas_ckpt.storage.file import STRAIGHT_BYTES, DirectChoice, FileStore, FileWriter
from cas_ckpt.testing.store_values import noise
from tests.searches import tries

SIZES = st.sampled_from(
    [0, 1, 100, 4095, 4096, 4097, 8192, 20_000, 65_536, 300_000, STRAIGHT_BYTES, STRAIGHT_BYTES + 5]
)
SOURCE = memoryview(mmap.mmap(-1, 4 << 20))
SOURCE[:] = noise(4 << 20)


def written(root: Path, pieces: list[memoryview], *, choice: DirectChoice, buffer_bytes: int) -> bytes:
    temporaries = TemporaryFolder(root)
    path = root / "value"
    writer = FileWriter(
        "value",
        temporaries.create(),
        publish=lambda made: temporaries.publish(made, path),
        choice=choice,
        buffer_bytes=buffer_bytes,
    )
    with writer:
        for piece in pieces:
            writer.write(piece)
        writer.commit()
    assert os.listdir(temporaries.folder) == [], "a committed writer leaves no temporary"
    return path.read_bytes()


@settings(max_examples=tries(20, 60), deadline=None)
@given(
    cuts=st.lists(st.tuples(SIZES, st.sampled_from([0, 1, 64, 4096])), max_size=6),
    allowed=st.booleans(),
    buffer_bytes=st.sampled_from([4096, 16_384, 1 << 20]),
)
def test_the_value_is_the_pieces_however_they_are_cut_and_aligned(
    cuts: list[tuple[int, int]], allowed: bool, buffer_bytes: int
) -> None:
    pieces = [SOURCE[start : start + size] for size, start in cuts]
    with tempfile.TemporaryDirectory() as folder:
        found = written(Path(folder), pieces, choice=DirectChoice(allowed), buffer_bytes=buffer_bytes)
    assert found == b"".join(pieces)


def test_a_filesystem_that_refuses_direct_writes_is_written_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = DirectChoice()
    real = os.write

    def refusing(fd: int, data: memoryview) -> int:
        if choice.allowed:
            raise OSError(errno.EINVAL, "as a filesystem that does not know O_DIRECT says")
        return real(fd, data)

    monkeypatch.setattr(os, "write", refusing)
    monkeypatch.setattr(file, "_O_DIRECT", getattr(os, "O_DIRECT", 0) or pytest.skip("no O_DIRECT here"))
    pieces = [SOURCE[: 2 << 20], SOURCE[5:50_000]]
    assert written(tmp_path, pieces, choice=choice, buffer_bytes=4096) == b"".join(pieces)
    assert not choice.allowed, "the refusal is remembered for the next writer"


def test_unaligned_memory_does_not_cost_the_folder_its_direct_writes(tmp_path: Path) -> None:
    choice = DirectChoice()
    written(tmp_path / "aligned", [SOURCE[: 2 << 20]], choice=choice, buffer_bytes=4096)
    taken_here = choice.allowed
    written(tmp_path / "unaligned", [SOURCE[64 : 64 + (2 << 20)]], choice=choice, buffer_bytes=4096)
    assert choice.allowed == taken_here


def test_a_short_write_is_carried_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: max(1, len(data) // 3)]))
    pieces = [SOURCE[: 1 << 20], SOURCE[7:5000]]
    assert written(tmp_path, pieces, choice=DirectChoice(), buffer_bytes=65_536) == b"".join(pieces)


def full_device() -> Temporary:
    return Temporary(Path("/dev/shm/cas_ckpt-no-such-file"), Descriptor(os.open("/dev/full", os.O_WRONLY)))


def write_and_commit(writer: FileWriter, num_bytes: int) -> None:
    writer.write(noise(num_bytes))
    writer.commit()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
@pytest.mark.parametrize("num_bytes", [100, 20_000], ids=["found at commit", "found at the first write"])
def test_a_full_disk_poisons_the_writer_and_publishes_nothing(num_bytes: int) -> None:
    published: list[Temporary] = []
    writer = FileWriter("packs/p", full_device(), publish=published.append, choice=DirectChoice(), buffer_bytes=4096)
    with pytest.raises(OutOfSpaceError, match="packs/p"):
        write_and_commit(writer, num_bytes)
    with pytest.raises(StorageError, match="poisoned"):
        writer.write(b"x")
    with pytest.raises(StorageError, match="poisoned"):
        writer.commit()
    writer.abort()
    assert published == []


def test_a_failed_sync_poisons_the_writer_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    writer = store.open_writer("packs/p")
    writer.write(b"x")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _failing_sync)
        with pytest.raises(StorageError, match="packs/p"):
            writer.commit()
    # The second fsync would succeed: the kernel has dropped the pages that it could not write.
    with pytest.raises(StorageError, match="poisoned"):
        writer.commit()
    assert list(store.list("")) == []
    assert os.listdir(tmp_path / "tmp") == []


def _failing_sync(fd: int) -> None:
    raise OSError(errno.EIO, "input/output error")
