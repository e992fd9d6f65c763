"""Whatever two states are, their diff is what comparing them entry by entry gives."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cas_ckpt import limits
from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import load_tree, stored_tensors
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.nodes import Node, TensorEntry, tensor_nodes, tree_nodes
from cas_ckpt.objects.spec import Grid, Spec, raw_dtype
from cas_ckpt.objects.state import (
    CONTAINER_KINDS,
    Container,
    EncodedValue,
    Item,
    Path,
    StoredTensor,
    TensorCopy,
    ValueItem,
    render_key,
)
from cas_ckpt.ops.checkout.checkout import fetch_tensors
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.ops.diff.diff import DiffRequest, diff_commits
from cas_ckpt.ops.diff.walk import Change, Diff
from cas_ckpt.storage.file import FileStore
from tests.builders import ArrayMemory, numbers, publish_nodes, tensor
from tests.searches import tries
from tests.wrapped_stores import CountingStore

LEAVES: list[Item] = [
    ValueItem(0),
    ValueItem(1),
    ValueItem("long" * 400),
    ValueItem("LONG" * 400),
    tensor(numbers(4, seed=1)),
    tensor(numbers(4, seed=2)),
    tensor(numbers(4, seed=1).view("int32")),
    tensor(numbers(2, 2, seed=1)),
    tensor(numbers(400, seed=3)),
    tensor(numbers(400, seed=4)),
    tensor(numbers(400, seed=3), flavor="torch"),
    tensor(numbers(20, 20, seed=3)),
    tensor(numbers(0)),
]
NAMES = st.sampled_from(["a", "b", "c~/", "1", 1, 0, -3, "", "é\ud800"])


def _container(kind: str, children: dict[Any, Item], attrs: Any) -> Container:
    """A container whose attributes are those that its kind may have."""
    return Container(kind, children, ({"order": [*children][::-1]} if attrs else None) if kind == "odict" else attrs)


KINDS = st.sampled_from(["dict", "odict", "list", "ranks", "sparse_coo", "quantized"])


def containers(children: st.SearchStrategy[Item]) -> st.SearchStrategy[Item]:
    attrs = st.sampled_from([None, None, None, {"shape": (2, 2)}])
    return st.builds(_container, KINDS, st.dictionaries(NAMES, children, max_size=4), attrs)


STATES = st.builds(
    Container,
    st.just("dict"),
    st.dictionaries(NAMES, st.recursive(st.sampled_from(LEAVES), containers, max_leaves=10), max_size=4),
)


@st.composite
def edited(draw: st.DrawFn, item: Item) -> Item:
    """The same with a few things otherwise, at any depth."""
    if not isinstance(item, Container):
        return draw(st.one_of(st.just(item), st.sampled_from(LEAVES), containers(st.sampled_from(LEAVES))))
    children = dict(item.children)
    for name in list(children):
        what = draw(st.sampled_from(["keep", "keep", "keep", "edit", "drop", "rename"]))
        if what == "edit":
            children[name] = draw(edited(children[name]))
        elif what != "keep":
            child = children.pop(name)
            if what == "rename":
                children[draw(NAMES)] = child
    kind = draw(st.sampled_from([item.kind, item.kind, item.kind, "dict"]))
    return _container(kind, children, item.attrs)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Item, Item]:
    before = draw(STATES)
    after = draw(st.one_of(edited(before), STATES))
    assert isinstance(after, Container)
    return before, Container("dict", after.children)


def entries(item: Item, path: Path = ()) -> Iterator[tuple[str, Item]]:
    """Everything that people see as an entry, by key."""
    if not isinstance(item, Container):
        yield render_key(path), item
        return
    if not item.children or item.kind not in CONTAINER_KINDS:
        yield render_key(path), Container(item.kind, {}, item.attrs)
    for name, child in item.children.items():
        yield from entries(child, (*path, name))


def heads(item: Item, path: Path = ()) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Kind and attributes of every container, by key."""
    if isinstance(item, Container):
        yield render_key(path), (item.kind, item.attrs)
        for name, child in item.children.items():
            yield from heads(child, (*path, name))


class Loaded:
    """A state as it is read back: what stands under each key, and what it holds."""

    def __init__(self, handle: RepositoryHandle, root: str) -> None:
        tree = load_tree(handle, Digest(bytes.fromhex(root)))
        arrays = _arrays(handle, tree)
        self.heads = dict(heads(tree))
        self.items = {key: _held(item, arrays.get(key, b"")) for key, item in entries(tree)}


def _arrays(handle: RepositoryHandle, tree: Container) -> dict[str, bytes]:
    found = {path: np.empty(stored.spec.num_bytes, np.uint8) for path, stored in stored_tensors(tree)}
    copies = [
        TensorCopy(path, stored, ArrayMemory(_shaped(found[path], stored.spec)))
        for path, stored in stored_tensors(tree)
    ]
    with limits(num_threads=1):
        fetch_tensors(handle, copies)
    return {render_key(path): array.tobytes() for path, array in found.items()}


def _shaped(data: np.ndarray[Any, Any], spec: Spec) -> np.ndarray[Any, Any]:
    return data.view(raw_dtype(spec.item_bytes)).reshape(spec.shape)


def _held(item: Item, data: bytes) -> tuple[Any, ...]:
    if isinstance(item, Container):
        return "container", item.kind, repr(item.attrs)
    if isinstance(item, EncodedValue):
        return "value", item.data
    assert isinstance(item, StoredTensor)
    return ("value", data) if item.flavor == "value" else ("tensor", item.flavor, item.spec, data)


def expected(old: Loaded, new: Loaded) -> tuple[set[str], set[str], set[str]]:
    """Keys that were added, removed, changed; nothing is called moved here."""
    both_containers = old.heads.keys() & new.heads.keys()
    changed = {key for key in both_containers if old.heads[key] != new.heads[key]}
    a = {key: held for key, held in old.items.items() if key not in both_containers}
    b = {key: held for key, held in new.items.items() if key not in both_containers}
    changed |= {key for key in a.keys() & b.keys() if a[key] != b[key]}
    return set(b) - set(a), set(a) - set(b), changed


@pytest.fixture(scope="module")
def repo() -> Iterator[RepositoryHandle]:
    handle = init_repository("memory://diff-property")
    yield handle
    handle.close()


@given(pairs())
@settings(max_examples=tries(45, 150), deadline=None)
def test_a_diff_is_what_comparing_the_loaded_states_gives(
    repo: RepositoryHandle, states: tuple[Container, Container]
) -> None:
    commits = [commit_tree(repo, each, CommitRequest()) for each in states]
    found = diff_commits(repo, commits[0].id, commits[1].id, DiffRequest(numbers=True, values=True))
    old, new = (Loaded(repo, commit.root) for commit in commits)
    added, removed, changed = expected(old, new)
    moved = {entry.key: entry.moved_from or "" for entry in found.moved}
    assert {entry.key for entry in found.added} | moved.keys() == added
    assert {entry.key for entry in found.removed} | set(moved.values()) == removed
    assert {entry.key for entry in found.changed} == changed
    assert all(new.items[key] == old.items[source] for key, source in moved.items())
    assert {new.items[key][0] for key in moved} <= {"tensor"}
    assert not _contents(new, {entry.key for entry in found.added}) & _contents(
        old, {entry.key for entry in found.removed}
    )
    assert len(found.entries) == len({entry.key for entry in found.entries})
    back = diff_commits(repo, commits[1].id, commits[0].id)
    assert Counter(entry.change for entry in back.entries) == _turned(found)


def _contents(loaded: Loaded, keys: set[str]) -> Counter[Any]:
    """What would have been moved, had it been on both sides."""
    held = (loaded.items[key] for key in keys)
    return Counter(each for each in held if each[0] == "tensor" and each[3])


def _turned(found: Diff) -> Counter[Change]:
    other = {Change.ADDED: Change.REMOVED, Change.REMOVED: Change.ADDED}
    return Counter(other.get(entry.change, entry.change) for entry in found.entries)


CELL = 300
"""Elements of a chunk of the invented tensors."""


def publish(handle: RepositoryHandle, tensors: dict[str, list[int]]) -> str:
    """Commit tensors of invented chunks, each number another chunk; the commit's id."""
    nodes: list[Node] = []
    made = []
    for name, ids in tensors.items():
        shape = (len(ids) * CELL - 7,)
        spec = Spec("float32", shape)
        found = tensor_nodes(spec, Grid(shape, (CELL,), CELL * 4), [Digest(b"%032d" % number) for number in ids])
        nodes += found
        made.append(TensorEntry(name, spec, "torch", found[-1].digest, None))
    return publish_nodes(handle, [*nodes, *tree_nodes("dict", None, made)])


LENGTHS = st.sampled_from([2, 3, 255, 256, 257, 511, 513, 600])


@example([(600, 600, [0, 300, 599])])
@given(st.lists(st.tuples(LENGTHS, LENGTHS, st.lists(st.integers(0, 599), max_size=6)), min_size=1, max_size=4))
@settings(max_examples=tries(10, 40), deadline=None)
def test_the_chunks_that_changed_are_those_whose_ids_differ(
    repo: RepositoryHandle, cases: list[tuple[int, int, list[int]]]
) -> None:
    before = {f"t{at}": list(range(at, at + length)) for at, (length, _, _) in enumerate(cases)}
    after = {}
    for at, (length, longer, cells) in enumerate(cases):
        # Lengths differ in some of them; ids come from other tensors too, and are found twice.
        ids = list(range(at, at + (longer if len(cells) > 3 else length)))
        for cell in cells:
            if cell < len(ids):
                ids[cell] = 10_000 + cell if cell % 3 else at
        after[f"t{at}"] = ids
    found = diff_commits(repo, publish(repo, before), publish(repo, after))
    changed = {entry.key: entry.chunks for entry in found.entries}
    for key, ids in after.items():
        old = before[key]
        if ids == old:
            assert key not in changed
            continue
        chunks = changed[key]
        assert chunks is not None
        aligned = len(old) == len(ids)
        cells = [at for at, each in enumerate(ids) if (each != old[at] if aligned else each not in old)]
        assert list(chunks.cells()) == cells
        assert (chunks.num_changed, chunks.num_chunks) == (len(cells), len(ids))
        num_elements = sum(CELL - 7 if at + 1 == len(ids) else CELL for at in cells)
        assert chunks.num_bytes == 4 * num_elements == 4 * sum(box.num_elements for box in chunks.regions())


def test_only_pages_of_chunk_ids_that_differ_are_read(tmp_path: pathlib.Path) -> None:
    place, ids = tmp_path / "repo", list(range(256 * 20))
    handle = init_repository(place)
    old, new = publish(handle, {"t": ids}), publish(handle, {"t": [*ids[:700], -1, *ids[701:]]})
    handle.close()
    store = CountingStore(FileStore(place))
    handle = RepositoryHandle.on_store(store, index_url=str(place / INDEX_PATH))
    store.reset()
    (entry,) = diff_commits(handle, old, new).entries
    assert entry.chunks is not None
    assert entry.chunks.runs == ((700, 1),)
    assert store.bytes_read < 2 * 256 * 32 + 6000  # a page of each side, and the nodes above them
    handle.close()
