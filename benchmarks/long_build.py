"""Writes a repository with a long history in minutes: 100,000 commits, 1,000 branches, 10 million chunks.

    python -m benchmarks.long_build PATH --commits 100000 --branches 1000 --chunks 100 [--seconds 120]

Nodes, meta packs, refs and rows are made and written by the code that commits use, many commits to a pack, as they
are once collections have merged small packs, and without waiting for the disk. Of a data pack there are the header,
the directory and the trailer, as long as they say; the bytes of its chunks are a hole in the file. So every verb goes
that reads no chunk. A build that was broken off, or that used up its `--seconds`, goes on where it stopped: what is
done is noted beside it in PATH.progress, that all is done in PATH.done. What is at PATH without
either of them is left alone.

A state is one tensor, of `--chunks` chunks that are new in each commit, and a step. Branch n begins at a commit of main
that is drawn from n and has one commit of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from blake3 import blake3

from cas_ckpt import limits
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import pack_name
from cas_ckpt.core.records import commit_of, pack_record
from cas_ckpt.core.refs import Ref, RefKind, new_move
from cas_ckpt.errors import NotFoundError
from cas_ckpt.index.rows import PackRecord
from cas_ckpt.objects import pack
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import CommitObject, Node, TensorEntry, ValueEntry, commit_node, tensor_nodes, tree_nodes
from cas_ckpt.objects.pack import ExtentInfo, PackKind
from cas_ckpt.objects.spec import Spec, grid_for
from cas_ckpt.objects.state import Container, Flavor, ValueItem
from cas_ckpt.objects.values import encode_value
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.transfer.pack_writer import WrittenPack, pack_key, write_nodes

ROWS, COLUMNS = 4096, 1024
"""Of each chunk, one byte an element."""

CHUNK_BYTES = ROWS * COLUMNS
STORED_BYTES = 3 << 20
COMMITS_PER_PACK = 20
FIRST_US = 1_700_000_000_000_000
_PACKS_PER_ADD = 10


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a repository is to be.

    Attributes:
        commits: On all branches together.
        branches: Besides main.
        chunks: New ones in each commit.
        moves: Entries in the log of each branch: 64 are as many as there can be.
    """

    commits: int
    branches: int
    chunks: int
    moves: int = 1

    @property
    def on_main(self) -> int:
        """Commits of main."""
        return self.commits - self.branches


@contextmanager
def unsynced() -> Iterator[None]:
    """Inside, files are not waited for: nobody needs them after a power failure."""
    with ExitStack() as stack:
        for name in ("disk.sync_file", "disk.sync_folder", "file.sync_file", "file.sync_folder"):
            stack.enter_context(mock.patch(f"cas_ckpt.storage.{name}"))
        yield


def is_built(path: Path) -> bool:
    """Whether the repository at `path` is done."""
    return path.with_suffix(".done").exists()


def build(path: Path, shape: Shape, *, seconds: float = float("inf")) -> bool:
    """Build the repository at `path`, or go on with it; whether it is done."""
    end_s = time.monotonic() + seconds
    progress = path.with_suffix(".progress")
    if is_built(path):
        progress.unlink(missing_ok=True)
        return True
    with unsynced():
        handle = _opened(path, progress)
        try:
            done, parent = json.loads(progress.read_text()) or (1, _head(handle).hex())
            head = Digest(bytes.fromhex(parent))
            layout = Digest(commit_of(handle, _head(handle)).layout or b"")
            while done < shape.on_main and time.monotonic() < end_s:
                upto = min(shape.on_main, done + COMMITS_PER_PACK * _PACKS_PER_ADD)
                head = _add_to_main(handle, shape, range(done, upto), head, layout)
                done = upto
                _note(progress, [done, head.hex()])
            if done < shape.on_main:
                return False
            _add_branches(handle, shape, head, layout)
        finally:
            handle.close()
    _note(path.with_suffix(".done"), [done, head.hex()])
    progress.unlink()
    return True


def _opened(path: Path, progress: Path) -> RepositoryHandle:
    """The repository as far as it is built; made anew if nothing of it was noted."""
    if progress.exists():
        if json.loads(progress.read_text()) is not None:
            return RepositoryHandle.open(path)
        shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        built = path.with_suffix(".done").name
        raise SystemExit(f"{path} is there, and no note of it: move it; or if it is built, make an empty {built}")
    path.parent.mkdir(parents=True, exist_ok=True)
    _note(progress, None)
    handle = init_repository(path)
    with limits(num_threads=1):
        commit_tree(handle, Container("dict", {"step": ValueItem(0)}), CommitRequest(step=0))
    return handle


def _note(file: Path, what: object) -> None:
    written = file.with_suffix(".new")
    written.write_text(json.dumps(what))
    written.replace(file)


def _head(handle: RepositoryHandle) -> Digest:
    found = handle.refs.get(RefKind.BRANCH, "main").target
    assert found is not None
    return found


def _add_to_main(
    handle: RepositoryHandle, shape: Shape, numbers: Sequence[int], parent: Digest, layout: Digest
) -> Digest:
    records: list[PackRecord] = []
    for start in range(0, len(numbers), COMMITS_PER_PACK):
        nodes: list[Node] = []
        chunks: list[Digest] = []
        for number in numbers[start : start + COMMITS_PER_PACK]:
            own, ids = commit_nodes(number, [parent], layout, shape.chunks)
            nodes += own
            chunks += ids
            parent = own[-1].digest
        records += [*data_packs(handle, chunks), pack_record(write_nodes(handle.store, nodes), nodes)]
    handle.index.add_packs(records)
    return parent


def commit_nodes(
    number: int, parents: list[Digest], layout: Digest, num_chunks: int
) -> tuple[list[Node], list[Digest]]:
    """The nodes of a commit, its own last, and the chunks of its state."""
    entries: list[TensorEntry | ValueEntry] = [ValueEntry("step", encode_value(number, key="step"))]
    nodes: list[Node] = []
    chunks = [Digest(blake3(b"%d/%d" % (number, at)).digest()) for at in range(num_chunks)]
    spec = Spec("uint8", (num_chunks * ROWS, COLUMNS))
    if num_chunks > 1:
        nodes = tensor_nodes(spec, grid_for(spec), chunks)
        entries.append(TensorEntry("w", spec, Flavor.TORCH, nodes[-1].digest, None))
    elif num_chunks:
        entries.append(TensorEntry("w", spec, Flavor.TORCH, chunks[0], None, single=True))
    nodes += tree_nodes("dict", None, entries)
    stats = {
        "total_bytes": num_chunks * CHUNK_BYTES,
        "new_bytes": num_chunks * CHUNK_BYTES,
        "num_entries": len(entries),
    }
    made = CommitObject(
        nodes[-1].digest, tuple(parents), f"step {number}", "Ann <ann@example.com>", FIRST_US + number * 60_000_000,
        number, {"loss": 1 / (1 + number)}, None, layout, stats,
    )  # fmt: skip
    return [*nodes, commit_node(made)], chunks


def data_packs(handle: RepositoryHandle, chunks: Sequence[Digest]) -> list[PackRecord]:
    """A data pack of these chunks, without their bytes; none if there are none."""
    if not chunks:
        return []
    grid = grid_for(Spec("uint8", (2 * ROWS, COLUMNS)))
    leaves = CHUNK_BYTES // grid.leaf_bytes
    header = pack.entry_header_bytes(leaves)
    each = header + STORED_BYTES
    entries = tuple(
        ExtentInfo(
            chunk, ObjectKind.CHUNK, 3, CHUNK_BYTES, STORED_BYTES, grid.leaf_bytes, 0, leaves,
            pack.HEADER_BYTES + at * each, header,
        ) for at, chunk in enumerate(chunks)
    )  # fmt: skip
    name = secrets.token_bytes(pack.NAME_BYTES)
    key = pack_key(name, PackKind.DATA)
    directory = pack.encode_directory(entries)
    offset = pack.HEADER_BYTES + len(chunks) * each
    trailer = pack.encode_trailer(name, PackKind.DATA, directory, directory_offset=offset)
    place = Path(handle.store.root) / key  # type: ignore[attr-defined]  # a FileStore
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place, "wb") as file:
        file.write(pack.encode_header(name, PackKind.DATA))
        file.seek(offset)
        file.write(directory + trailer)
        size = file.tell()
    return [pack_record(WrittenPack(key, PackKind.DATA, size, entries), ())]


def _add_branches(handle: RepositoryHandle, shape: Shape, head: Digest, layout: Digest) -> None:
    from cas_ckpt.index import history

    line = handle.index.read(history.read_line, head, most=shape.on_main)
    nodes: list[Node] = []
    targets: list[tuple[str, Digest]] = [("main", head)]
    for number in range(shape.branches):
        own, _ = commit_nodes(shape.on_main + number, [Digest(line[number * 7919 % len(line)])], layout, 0)
        nodes += own
        targets.append((f"run-{number:04}", own[-1].digest))
    packs: list[WrittenPack] = []
    if nodes:
        packs = [write_nodes(handle.store, nodes)]
        handle.index.add_packs([pack_record(packs[0], nodes)])
    generation = handle.begin_writing()
    swapped: list[Ref] = []
    for name, target in targets:
        try:
            ref = handle.refs.get(RefKind.BRANCH, name)
        except NotFoundError:
            ref = handle.refs.create_placeholder(RefKind.BRANCH, name)
        for at in range(sum(move.new == target for move in ref.log), shape.moves):  # others: by a build broken off
            old = None if not at else target
            move = new_move(old, target, "branch: set to main~12", "ann@example.com")
            hint = pack_name(packs[0].key) if packs and name != "main" else None
            ref = handle.refs.swap(ref, target, generation=generation, move=move, pack=hint)
        swapped.append(ref)
    handle.note_refs(swapped)


def main() -> None:
    """Build one."""
    parser = argparse.ArgumentParser(description="Build a repository with a long history.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--commits", type=int, default=100_000)
    parser.add_argument("--branches", type=int, default=1_000)
    parser.add_argument("--chunks", type=int, default=100, help="new ones in each commit")
    parser.add_argument("--moves", type=int, default=1, help="entries in the log of each branch")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then; go on with the next call")
    given = parser.parse_args()
    start, cpu = time.perf_counter(), time.process_time()
    done = build(given.path, Shape(given.commits, given.branches, given.chunks, given.moves), seconds=given.seconds)
    taken = f"{time.perf_counter() - start:.1f} s, {time.process_time() - cpu:.1f} of processor, process {os.getpid()}"
    print(f"{'done' if done else 'not done yet, call again'}: {taken}")


if __name__ == "__main__":
    main()
