"""A small repository with every kind of region, ways to damage it, and a model of what damage hits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cas_ckpt.arguments import RepairKind
from cas_ckpt.core.forgotten import read_forgotten, write_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import read_directory
from cas_ckpt.core.tree import load_tree, reachable
from cas_ckpt.index import history
from cas_ckpt.objects import pack
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import ContainerEntry, decode_tree
from cas_ckpt.objects.pack import ExtentInfo
from cas_ckpt.objects.state import StoredTensor, parse_key, render_key, walk
from cas_ckpt.ops.fsck.check import check_url
from cas_ckpt.ops.fsck.packs import DataOptions
from cas_ckpt.ops.fsck.repair import repair_url
from cas_ckpt.ops.fsck.report import FsckReport, RepairReport, RepairRequest
from cas_ckpt.ops.history.log import log_commits
from cas_ckpt.ops.refs import create_branch, create_tag
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, new_repository, numbers, stored_arrays

READ_ALL = DataOptions()


def states() -> list[dict[str, Any]]:
    """Three states of one model, with pages of a tree and a tensor of several chunks."""
    base: dict[str, Any] = {
        "model": {"big": numbers(1100, 1000, seed=1), "a": numbers(90, 90, seed=2), "b": numbers(80, 80, seed=3)},
        "many": {f"k{at}": at for at in range(400)},
        "step": 1,
    }
    second = base | {"model": base["model"] | {"a": numbers(90, 90, seed=4)}, "step": 2}
    third = second | {"model": second["model"] | {"b": numbers(80, 80, seed=5)}, "step": 3}
    return [base, second, third]


def build(path: Path) -> list[str]:
    """A repository of three commits, a branch, a tag and a forgotten commit; the ids of the commits."""
    handle = new_repository(path)
    ids = [commit(handle, state, message=f"commit {at}").id for at, state in enumerate(states())]
    create_branch(handle, "old", start="main~1")
    create_tag(handle, "v1", "main~2")
    lost = commit(handle, {"w": numbers(50, 50, seed=9)}, branch="side").id
    commit(handle, {"w": numbers(50, 50, seed=10)}, branch="side")
    write_forgotten(handle.store, [Digest(bytes.fromhex(lost))], author="test")
    handle.close()
    return ids


@dataclass(frozen=True)
class Region:
    """A run of bytes of a pack: what it is, and the entry that it belongs to."""

    pack: Path
    name: str
    start: int
    stop: int
    entry: ExtentInfo | None = None


def regions(path: Path) -> Iterator[Region]:
    """Every region of every pack."""
    store = FileStore(path)
    for key, size in store.list(pack.PACK_PREFIX):
        trailer, entries = read_directory(store, key)
        directory = size - pack.TRAILER_BYTES - len(entries) * pack.DIRECTORY_ENTRY_BYTES
        name = trailer.kind.name.lower()
        yield Region(Path(key), f"{name} header", 0, pack.HEADER_BYTES)
        yield Region(Path(key), f"{name} directory", directory, size - pack.TRAILER_BYTES)
        yield Region(Path(key), f"{name} trailer", size - pack.TRAILER_BYTES, size)
        for entry in entries:
            what = entry.kind.label
            start = entry.offset + entry.header_bytes
            yield Region(Path(key), f"{what} entry header", entry.offset, start, entry)
            if entry.stored_bytes:
                yield Region(Path(key), f"{what} payload", start, entry.end, entry)


def flip(path: Path, offset: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(bytes(data))


def copy_of(path: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(path, target)
    return target


def check(path: Path) -> FsckReport:
    return check_url(path, READ_ALL)


def repair(path: Path, *kinds: RepairKind, other: Path | None = None, **more: Any) -> RepairReport:
    return repair_url(path, RepairRequest(frozenset(kinds), () if other is None else (str(other),), **more))


def repair_as_told(path: Path, report: FsckReport, other: Path | None = None) -> RepairReport:
    """Run the printed commands, OTHER filled in."""
    kinds = [command.split(" --repair ")[1].split()[0] for command in report.commands]
    return repair(path, *kinds, other=other)


# --- the model ---------------------------------------------------------------------------


def needs(path: Path) -> dict[str, dict[bytes, set[str]]]:
    """Commit -> object -> keys of entries that cannot be read without it ("" for the commit and its layout)."""
    handle = RepositoryHandle.open(path)
    gone = read_forgotten(handle.store)
    found: dict[str, dict[bytes, set[str]]] = {}
    for info in log_commits(handle, (), all_refs=True):
        row = handle.index.read(history.read_commit, bytes.fromhex(info.id))
        assert row is not None
        if row.digest in gone:
            found[info.id] = {row.digest: {"(commit)"}}
            continue
        by_object: dict[bytes, set[str]] = {}
        tree = load_tree(handle, Digest(row.root))
        everything = {render_key(at) for at, _ in walk(tree)}
        for one in (row.digest, row.root):
            by_object[one] = everything
        by_object[row.layout or b""] = {"(layout)"}
        for at, item in walk(tree):
            if isinstance(item, StoredTensor) and item.node is not None:
                below = {item.node} if item.single else reachable(handle, item.node)
                for one in below:
                    by_object.setdefault(one, set()).add(render_key(at))
        _add_containers(handle, Digest(row.root), "", everything, by_object)
        found[info.id] = by_object
    handle.close()
    return found


def _add_containers(
    handle: RepositoryHandle, node: Digest, prefix: str, everything: set[str], found: dict[bytes, set[str]]
) -> None:
    """Nodes of containers and their pages -> the keys below them."""
    top = decode_tree(handle.read_node(ObjectKind.TREE, node))
    inside = {key for key in everything if key.startswith(prefix)}
    found.setdefault(node, set()).update(inside)
    entries = list(top.entries)
    for page in top.pages:
        held = decode_tree(handle.read_node(ObjectKind.TREE_PAGE, page.node), page=True)
        assert not held.pages, "the model knows pages of one level"
        names = {render_key((*parse_key(prefix.rstrip("/")), entry.name)) for entry in held.entries}
        found.setdefault(page.node, set()).update(names)
        entries += held.entries
    for entry in entries:
        if isinstance(entry, ContainerEntry):
            _add_containers(handle, entry.node, f"{prefix}{entry.name}/", everything, found)


def expand(keys: tuple[str, ...], everything: set[str]) -> set[str]:
    """The keys that the short forms of a report stand for."""
    found: set[str] = set()
    for key in keys:
        if key.endswith("**"):
            found |= {one for one in everything if one.startswith(key[:-2])}
        elif key.endswith(")") and "[" in key:
            prefix, _, span = key[:-1].rpartition("[")
            first, _, end = span.partition("..")
            inside = {one for one in everything if one.startswith(prefix) and "/" not in one[len(prefix) :]}
            found |= {one for one in inside if first <= one[len(prefix) :] and (not end or one[len(prefix) :] < end)}
        else:
            found.add(key)
    return found


def arrays(path: Path, ids: list[str]) -> dict[str, dict[str, bytes]]:
    """Commit -> key -> bytes, as a checkout gives them."""
    handle = RepositoryHandle.open(path)
    found = {}
    for one in ids:
        row = handle.index.read(history.read_commit, bytes.fromhex(one))
        if row is None:
            handle.sync()
            row = handle.index.read(history.read_commit, bytes.fromhex(one))
        assert row is not None
        found[one] = {key: array.tobytes() for key, array in stored_arrays(handle, row.root.hex()).items()}
    handle.close()
    return found
