"""States restored over ranks that are threads: a repository in memory, divided targets, what each must hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from cas_ckpt import limits
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import load_tree, stored_tensors
from cas_ckpt.layout.holdings import held_by
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.spec import Box, Mesh, MeshPlacement, Placement, Split, raw_dtype
from cas_ckpt.objects.state import StoredTensor, TensorCopy, render_key
from cas_ckpt.ops.checkout import checkout
from cas_ckpt.parallel.peers import Peers, collective_errors
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store
from tests.builders import commit
from tests.thread_peers import run_ranks

Array = np.ndarray[Any, Any]
Divided = Mapping[str, Placement | None]
"""Key -> how its target is divided; keys that are left out are not wanted."""

UNTOUCHED = 0x77
_OPENING = threading.Lock()
_names = count()


class DividedTarget:
    """The parts of a global array that a rank holds; asked for anything else, it objects."""

    def __init__(self, stored: StoredTensor, placement: Placement | None, rank: int) -> None:
        spec = stored.spec
        space = np.full(max(spec.num_bytes, 1), UNTOUCHED, np.uint8)[: spec.num_bytes]
        self.array: Array = space.view(raw_dtype(spec.item_bytes)).reshape(spec.shape)
        self.pieces = [spec.box] if placement is None else [box for box, _ in held_by(rank, spec.shape, placement)]
        self.opened: list[Box] = []

    def open(self, box: Box) -> Array:
        if not any(piece.intersect(box) == box for piece in self.pieces) and box.num_elements:
            raise AssertionError(f"{box} is in no piece of {self.pieces}")
        self.opened.append(box)
        return self.array[box.slices]

    def done(self, box: Box, array: Array) -> None:
        assert np.shares_memory(array, self.array) or not array.size

    def check(self, truth: Array) -> None:
        """Every element of the own pieces is right, every other one as it was."""
        expected = np.full(max(truth.nbytes, 1), UNTOUCHED, np.uint8)[: truth.nbytes]
        whole = expected.view(self.array.dtype).reshape(truth.shape)
        for piece in self.pieces:
            whole[piece.slices] = np.ascontiguousarray(truth).view(self.array.dtype)[piece.slices]
        assert whole.tobytes() == np.ascontiguousarray(self.array).tobytes()
        opened = sum(box.num_elements for box in self.opened)
        assert opened == sum(piece.num_elements for piece in self.pieces), "some elements were filled twice"


class StridedTarget(DividedTarget):
    """As above, in memory that is not contiguous."""

    def __init__(self, stored: StoredTensor, placement: Placement | None, rank: int) -> None:
        super().__init__(stored, placement, rank)
        self.array = np.asfortranarray(self.array)


@dataclass(frozen=True)
class Saved:
    """A committed state."""

    url: str
    root: Digest
    arrays: dict[str, Array]

    handle: RepositoryHandle

    def open(self, wrap: Callable[[Store], Store] | None = None) -> RepositoryHandle:
        """A handle of one rank's own if its store is to be wrapped, else the one that all share."""
        if wrap is None:
            return self.handle
        with _OPENING:  # the migrations of an index keep their state in a module
            return RepositoryHandle.on_store(wrap(open_store(self.url)))


def saved(arrays: Mapping[str, Array], *, folder: Path | None = None, **settings: Any) -> Saved:
    """`arrays` committed by one process into a repository in memory, or in a folder."""
    url = f"memory://ranks-{next(_names)}" if folder is None else str(folder)
    handle = init_repository(url, **settings)
    info = commit(handle, arrays)
    return Saved(url, Digest(bytes.fromhex(info.root)), dict(arrays), handle)


def saved_beside(other: Saved, arrays: Mapping[str, Array]) -> Saved:
    """`arrays` as one more commit in the same repository."""
    info = commit(other.handle, arrays)
    return Saved(other.url, Digest(bytes.fromhex(info.root)), dict(arrays), other.handle)


def targets_of(
    handle: RepositoryHandle, root: Digest, divided: Divided, rank: int, kind: type[DividedTarget] = DividedTarget
) -> dict[str, tuple[TensorCopy, DividedTarget]]:
    """The copies that `rank` wants, by key."""
    found = {}
    for path, stored in stored_tensors(load_tree(handle, root)):
        key = render_key(path)
        if key in divided:
            target = kind(stored, divided[key], rank)
            found[key] = (TensorCopy(path, stored, target, divided[key]), target)
    return found


def fetch_on_ranks(handle: RepositoryHandle, copies: Sequence[TensorCopy], *, peers: Peers, **options: Any) -> None:
    """As `Repository.checkout` calls it: what one rank raises makes all ranks raise."""
    with collective_errors(peers):
        checkout.fetch_on_ranks(handle, copies, peers=peers, **options)


def restore(
    state: Saved,
    size: int,
    divided: Divided | Sequence[Divided],
    *,
    wrap: Callable[[Store], Store] | None = None,
    kind: type[DividedTarget] = DividedTarget,
) -> None:
    """Restore on `size` ranks and check every element of every target; one `divided` for all, or one by rank."""

    def work(peers: Peers) -> None:
        mine = divided if isinstance(divided, Mapping) else divided[peers.rank]
        handle = state.open(wrap)
        found = targets_of(handle, state.root, mine, peers.rank, kind)
        with limits(num_threads=2):
            fetch_on_ranks(handle, [copy for copy, _ in found.values()], peers=peers)
        for key, (_, target) in found.items():
            target.check(state.arrays[key])

    run_ranks(size, work, timeout_s=30)


def mesh(*shape: int, ranks: Sequence[int] | None = None) -> Mesh:
    """A mesh over the ranks from 0, or over `ranks`."""
    total = int(np.prod(shape))
    return Mesh(("",) * len(shape), shape, tuple(ranks if ranks is not None else range(total)))


def divided_by(over: Mesh, *dims: int | None | tuple[int, int]) -> MeshPlacement:
    """One split per mesh dimension: a tensor dimension, None for replicas, (dim, stride) for strided parts."""
    return MeshPlacement(over, tuple(Split(*dim) if isinstance(dim, tuple) else Split(dim) for dim in dims))
