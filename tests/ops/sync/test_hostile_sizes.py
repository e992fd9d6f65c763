"""A remote that claims sizes which no writer writes is refused before memory is taken for them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from cas_ckpt import Repository
from cas_ckpt.errors import CorruptionError, TooLargeError
from cas_ckpt.objects import codec, pack
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import Node
from cas_ckpt.objects.pack import ExtentInfo, PackKind
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.transfer.pack_writer import pack_key, write_nodes
from tests.builders import commit, weights
from tests.processes import ROOT

HUGE = 10 << 30
NAME = bytes(range(16))


def one_huge_node(path: Path, digest: Digest) -> None:
    """A pack with a commit of 10 GB, all of it a hole in the file, but for what says so."""
    header = pack.entry_header_bytes(0)
    info = ExtentInfo(digest, ObjectKind.COMMIT, codec.RAW, HUGE, HUGE, 0, 0, 0, pack.HEADER_BYTES, header)
    directory = pack.encode_directory([info])
    with path.open("wb") as file:
        file.write(pack.encode_header(NAME, PackKind.META) + pack.encode_entry_header(info, b""))
        file.seek(info.end)
        file.write(directory + pack.encode_trailer(NAME, PackKind.META, directory, directory_offset=info.end))


def one_huge_directory(path: Path, _: Digest) -> None:
    """A pack that says that it is all directory."""
    count = HUGE // pack.DIRECTORY_ENTRY_BYTES
    fields = (pack.TRAILER_MAGIC, pack.VERSION, PackKind.META, NAME, pack.HEADER_BYTES, count)
    size = pack.HEADER_BYTES + count * pack.DIRECTORY_ENTRY_BYTES + pack.TRAILER_BYTES
    with path.open("wb") as file:
        file.write(pack.encode_header(NAME, PackKind.META))
        file.seek(size - pack.TRAILER_BYTES)
        file.write(pack._sealed(pack._TRAILER.pack(*fields, size, bytes(32))))


CHILD = """
    import resource, sys
    resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))  # a failing test is not to take the machine's memory
    from cas_ckpt import Repository
    from cas_ckpt.errors import CkptError
    with Repository.open(sys.argv[1], group=None) as repo:
        try:
            repo.fetch("origin")
        except CkptError as error:
            print(type(error).__name__)
    lines = open("/proc/self/status").read().splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


@pytest.mark.parametrize("huge", [one_huge_node, one_huge_directory])
@pytest.mark.parametrize("believed", [False, True])
def test_a_fetch_takes_no_memory_for_a_size_that_is_claimed(
    tmp_path: Path, huge: Callable[[Path, Digest], None], believed: bool
) -> None:
    """`believed`: the index that the remote brings along says the same."""
    with Repository.init(tmp_path / "there", group=None) as there, Repository.init(tmp_path / "here") as here:
        made = commit(there._handle, {"w": weights(1)})
        here.add_remote("origin", there.url)
    digest = Digest(bytes.fromhex(made.id))
    metas = list((tmp_path / "there" / "packs").glob("*/*.meta"))
    path = tmp_path / "there" / pack_key(NAME, PackKind.META)
    path.parent.mkdir(exist_ok=True)
    huge(path, digest)
    assert path.stat().st_size > HUGE > 1000 * path.stat().st_blocks * 512
    if believed:
        import sqlite3

        with sqlite3.connect(tmp_path / "there" / "index" / "index.sqlite") as rows:
            rows.execute("UPDATE t_locations SET stored_bytes = ? WHERE 1", (HUGE,))
    else:
        for each in metas:
            each.unlink()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path / "here")], cwd=ROOT, timeout=60, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stdout.split()
    assert int(said[-1]) < 300_000, said


def test_a_node_that_no_reader_takes_is_not_written() -> None:
    store = MemoryStore()
    node = Node(ObjectKind.COMMIT, Digest(bytes(32)), bytes(pack.MAX_NODE_BYTES + 1))
    with pytest.raises(TooLargeError, match="meta="):
        write_nodes(store, [node])
    assert not list(store.list(""))


def test_sizes_in_a_directory_are_looked_at_before_anything_is_read() -> None:
    info = ExtentInfo(
        Digest(bytes(32)), ObjectKind.TREE, codec.RAW, HUGE, HUGE, 0, 0, 0, pack.HEADER_BYTES,
        pack.entry_header_bytes(0),
    )  # fmt: skip
    directory = pack.encode_directory([info])
    raw = pack.encode_trailer(NAME, PackKind.META, directory, directory_offset=info.end)
    size = info.end + len(directory) + len(raw)
    trailer = pack.decode_trailer(raw, size_bytes=size, key="packs/x")
    with pytest.raises(CorruptionError, match="which no writer writes"):
        pack.decode_directory(directory, trailer, key="packs/x")
