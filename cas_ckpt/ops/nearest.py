"""nearest: which commits share most with a state, so that its base is found wherever it came from.

    1. choose a few cells of every tensor, the same ones wherever this tensor is met
    2. their chunk ids: hashed from the state, or read from the nodes of a commit
    3. ask the index which commits hold them

Invariant: nothing is written, and what is hashed is a sample: a share of the sample is an estimate of
the share of the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.layout.grid import grid_for
from cas_ckpt.objects.digest import Digest, chunk_id
from cas_ckpt.objects.spec import Grid, Spec
from cas_ckpt.objects.state import Container, StoredTensor, TensorItem, walk
from cas_ckpt.objects.tree_node import INLINE_BYTES
from cas_ckpt.ops.chunk_ids import chunk_ids
from cas_ckpt.ops.given_up import given_up
from cas_ckpt.ops.log import start_of_log
from cas_ckpt.ops.merge_base import ancestors, links_of
from cas_ckpt.ops.records import CommitInfo, commit_of, info_from_row
from cas_ckpt.ops.resolve import Revision, resolve
from cas_ckpt.ops.tree import load_tree, stored_tensors
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.transfer.hashing import CellHasher

MOST_CELLS = 512
"""Cells of a sample, about: 2 GB to hash at most, and a question that the index answers at once."""

CELLS_PER_TENSOR = 4
_EVERY_COMMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class NearCommit:
    """A commit, and how much of the sample it holds.

    Attributes:
        share: Of the sample's bytes, 0..1.
    """

    commit: CommitInfo
    num_chunks: int
    num_bytes: int
    share: float


@dataclass(frozen=True, slots=True)
class _Sample:
    ids: frozenset[Digest]
    num_bytes: int


def nearest_to_commit(handle: RepositoryHandle, revision: Revision, *, limit: int = 5) -> list[NearCommit]:
    """The commits that share most with `revision`, but for those of its own history.

    Raises:
        NotFoundError: no such revision.
    """
    digest = resolve(handle, revision)
    tree = load_tree(handle, Digest(commit_of(handle, digest).root))
    tensors = [tensor for _, tensor in stored_tensors(tree) if tensor.node is not None]
    links = links_of(handle, [digest])
    related = ancestors(links, [digest]) | {other for other in links if digest in links[other].parents}
    return _nearest(handle, _sampled_ids(handle, tensors), limit, without=related)


def nearest_to_state(handle: RepositoryHandle, state: Container, *, limit: int = 5) -> list[NearCommit]:
    """The commits that share most with `state`, which is not committed for that.

    Tensors that are divided over ranks are left out: no rank can hash their cells alone.

    Raises:
        InvalidInputError: a negative limit.
    """
    items = [item for _, item in walk(state) if isinstance(item, TensorItem) and item.placement is None]
    return _nearest(handle, _hashed(items), limit, without=set())


def _nearest(handle: RepositoryHandle, sample: _Sample, limit: int, *, without: set[bytes]) -> list[NearCommit]:
    if limit < 0:
        raise InvalidInputError(f"the nearest {limit} commits: give a number from 0 on")
    starts = start_of_log(handle, (), all_refs=True)
    wanted = ancestors(links_of(handle, starts), starts) - without - given_up(handle)
    found: list[NearCommit] = []
    for near in handle.index.nearest(sorted(sample.ids), limit=_EVERY_COMMIT):
        if len(found) >= limit:
            break
        if near.commit in wanted:
            info = info_from_row(commit_of(handle, Digest(near.commit)))
            found.append(NearCommit(info, near.num_chunks, near.num_bytes, near.num_bytes / max(sample.num_bytes, 1)))
    return found


def _cells(specs: Sequence[Spec]) -> Iterator[tuple[int, Grid, Sequence[int]]]:
    """(number of a tensor, its grid, cells to look at): spread over each, fewer each if tensors are many."""
    large = [at for at, spec in enumerate(specs) if spec.num_bytes > INLINE_BYTES]
    stride = max(1, -(-len(large) // MOST_CELLS))
    each = max(1, min(CELLS_PER_TENSOR, MOST_CELLS // max(len(large), 1)))
    ordered = sorted(large, key=lambda at: (-specs[at].num_bytes, specs[at].shape, specs[at].dtype))
    for at in ordered[::stride]:
        grid = grid_for(specs[at])
        count = min(each, grid.num_cells)
        yield at, grid, sorted({grid.num_cells * number // count for number in range(count)})


def _hashed(items: Sequence[TensorItem]) -> _Sample:
    hasher = CellHasher()
    sizes: dict[Digest, int] = {}
    for at, grid, cells in _cells([item.spec for item in items]):
        item = items[at]
        for cell in cells:
            num_bytes = grid.box(cell).num_elements * item.spec.item_bytes
            (leaves,) = hasher.group_digests(item.source, grid, range(cell, cell + 1), item.spec.item_bytes)
            sizes[chunk_id(num_bytes, leaves)] = num_bytes
    return _sample(sizes.items())


def _sampled_ids(handle: RepositoryHandle, tensors: Sequence[StoredTensor]) -> _Sample:
    wanted = list(_cells([tensor.spec for tensor in tensors]))
    found = chunk_ids(handle, [(tensors[at], cells) for at, _, cells in wanted])
    return _sample(
        (digest, grid.box(cell).num_elements * tensors[at].spec.item_bytes)
        for (at, grid, cells), ids in zip(wanted, found, strict=True)
        for cell, digest in zip(cells, ids, strict=True)
    )


def _sample(pairs: Iterable[tuple[Digest, int]]) -> _Sample:
    sizes = dict(pairs)
    return _Sample(frozenset(sizes), sum(sizes.values()))
