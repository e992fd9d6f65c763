"""Tensors that are divided over ranks, in global coordinates: DTensor and the older ShardedTensor.

    1. What torch says of the division becomes a `Placement` of all ranks, by world rank.
    2. The pieces of it that this rank holds are looked for in the local tensors.
    3. Sources and targets take global boxes inside one piece and pass them to local tensors.

Invariant: nothing is sent, nothing is copied, and a local tensor that is not what its
placement says is refused. Modules of torch.distributed are never imported here: who has such
a tensor has imported them. Must not know commits.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from cas_ckpt.errors import InternalError, UnsupportedValueError
from cas_ckpt.layout.holdings import held_by
from cas_ckpt.objects.spec import Box, BoxPlacement, Mesh, MeshPlacement, Placement, Spec, Split, raw_dtype
from cas_ckpt.objects.state import Flavor, LeafHasher, Path, TensorItem, render_key
from cas_ckpt.training.capture.tensors import (
    DTYPE_NAMES,
    Array,
    CopiedTensor,
    HostTensor,
    Region,
    copyable_view,
    elements_of,
    is_kind,
    memory_of,
    spec_of,
)
from cas_ckpt.training.device.cells import DevicePart
from cas_ckpt.training.torch_internals import local_part, version_of

Check: TypeAlias = Callable[[torch.Tensor, Path], torch.Tensor]
"""Gives a local tensor as a plain one whose memory can be read, or raises naming the key."""

_SPLITTING = frozenset({"Shard", "_StridedShard"})
"""Placements of torch that cut; any other that is not Replicate is refused, not guessed at."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the tensor that this rank holds.

    Attributes:
        box: In the global tensor.
        offsets: Of its first element in the local tensor.
        local: Number of the local tensor.
    """

    box: Box
    offsets: tuple[int, ...]
    local: int


@dataclass(frozen=True, slots=True)
class Sharded:
    """A divided tensor, as one rank sees it.

    Attributes:
        spec: Of the global tensor.
        placement: What every rank holds.
        pieces: What this rank holds; empty on ranks outside the mesh and for empty shards.
        locals: This rank's memory, checked to be readable.
        owner: The DTensor whose version counter torch moves in place of the local one's.
    """

    spec: Spec
    placement: Placement
    pieces: tuple[Piece, ...]
    locals: tuple[torch.Tensor, ...]
    owner: torch.Tensor | None

    @property
    def region(self) -> Region | None:
        """Equal for tied tensors; None when this rank has no memory of it.

        Known for empty shards too: a tie must not depend on which rank looks at it.
        """
        if not self.locals:
            return None
        return (*map(memory_of, self.locals), self.placement, self.spec.shape)

    @property
    def version(self) -> tuple[int, ...] | None:
        """Counts of in-place changes through the owner and of the local tensors; None where torch does not count."""
        counted = self.locals if self.owner is None else (self.owner, *self.locals)
        versions = tuple(version for each in counted if (version := version_of(each)) is not None)
        return versions if len(versions) == len(counted) else None

    def elements(self) -> ShardElements:
        """The elements of this rank, as a source and as a target: boxes are global, and lie inside one piece."""
        return ShardElements(self.pieces, tuple(map(elements_of, self.locals)), self.spec.item_bytes, self.owner)

    def item(self) -> TensorItem:
        region = self.region
        identity = None if region is None else (region, self.version)
        return TensorItem(self.spec, self.elements(), Flavor.TORCH, identity, self.placement)


@dataclass(frozen=True, slots=True)
class ShardElements:
    """Elements of the pieces that this rank holds, as a source and as a target.

    Attributes:
        locals: Those of the local tensors.
        owner: See `Sharded`.
    """

    pieces: tuple[Piece, ...]
    locals: tuple[HostTensor | CopiedTensor, ...]
    item_bytes: int
    owner: torch.Tensor | None = None

    @property
    def is_private(self) -> bool:
        return all(isinstance(each, CopiedTensor) for each in self.locals)

    def read(self, box: Box) -> Array:
        if not box.num_elements:
            return np.empty(box.sizes, raw_dtype(self.item_bytes))
        piece, local = _locate(self.pieces, box)
        return self.locals[piece.local].read(local)

    def leaf_hasher(self) -> LeafHasher | None:
        hashers = {each.leaf_hasher() if isinstance(each, CopiedTensor) else None for each in self.locals}
        return hashers.pop() if len(hashers) == 1 else None

    def device_parts(self) -> tuple[DevicePart, ...]:
        """Where the elements of all pieces are, for `leaf_hasher`."""
        return tuple(
            DevicePart(copyable_view(self.locals[piece.local].tensor), piece.box, piece.offsets)
            for piece in self.pieces
        )

    def sums(self, box: Box) -> Array | None:
        piece, local = _locate(self.pieces, box)
        elements = self.locals[piece.local]
        return elements.sums(local) if isinstance(elements, CopiedTensor) else None

    def open(self, box: Box) -> Array:
        if not box.num_elements:
            return self.read(box)
        if self.owner is not None:
            # Autograd looks at the counter of the DTensor, not at its local tensor's.
            torch.autograd.graph.increment_version(self.owner)
        piece, local = _locate(self.pieces, box)
        return self.locals[piece.local].open(local)

    def done(self, box: Box, array: Array) -> None:
        if box.num_elements:
            piece, local = _locate(self.pieces, box)
            self.locals[piece.local].done(local, array)

    def by_pieces(self) -> Iterator[tuple[Box, ShardElements]]:
        """The box of each piece, and a target for it alone, whose own boxes begin at its corner."""
        for piece in self.pieces:
            order = range(len(piece.offsets))
            yield piece.box, self._alone(piece.local, Box(piece.offsets, piece.box.sizes).slices, order)

    def rearranged(self, index: Any, order: Sequence[int]) -> ShardElements:
        """Of one that `by_pieces` gave."""
        return self._alone(0, index, order)

    def _alone(self, number: int, index: Any, order: Sequence[int]) -> ShardElements:
        local = self.locals[number].rearranged(index, order)
        box = Box((0,) * local.tensor.dim(), tuple(local.tensor.shape))
        return ShardElements((Piece(box, box.offsets, 0),), (local,), self.item_bytes, self.owner)


def _locate(pieces: Iterable[Piece], box: Box) -> tuple[Piece, Box]:
    """The piece that `box` is inside of, and the box in its local tensor."""
    for piece in pieces:
        if piece.box.intersect(box) == box:
            inner = box.relative_to(piece.box)
            return piece, Box(tuple(a + b for a, b in zip(inner.offsets, piece.offsets, strict=True)), box.sizes)
    raise InternalError(f"{box} does not lie inside one piece that this rank holds: {[piece.box for piece in pieces]}")


def sharded(tensor: torch.Tensor, path: Path, check: Check) -> Sharded:
    """Spec and division of `tensor`, for which `is_sharded` holds.

    Raises:
        UnsupportedValueError: partial or unknown placements, a local tensor that is not what the
            placement says or cannot be read; names the key.
    """
    return (_of_dtensor if is_kind(tensor, "DTensor") else _of_sharded_tensor)(tensor, path, check)


def _of_dtensor(tensor: Any, path: Path, check: Check) -> Sharded:
    key, mesh = render_key(path), tensor.device_mesh
    local = check(local_part(tensor), path)
    _check_strided(local, key)
    spec = spec_of(tensor)
    placement = _mesh_placement(mesh, tuple(tensor.placements), len(spec.shape), key)
    _check_strides(placement, spec, key)
    rank = _own_rank(mesh, placement.mesh)
    pieces = tuple(Piece(box, offsets, 0) for box, offsets in held_by(rank, spec.shape, placement))
    _check_local(local, spec, pieces, key)
    return Sharded(spec, placement, pieces, (local,), tensor)


def _check_local(local: torch.Tensor, spec: Spec, pieces: Sequence[Piece], key: str) -> None:
    """The local tensor has the extent of its pieces laid side by side."""
    ends = [[at + size for at, size in zip(piece.offsets, piece.box.sizes, strict=True)] for piece in pieces]
    wanted = tuple(map(max, zip(*ends, strict=True))) if ends else None
    found = tuple(local.shape)
    if found != wanted if wanted is not None else local.numel():
        raise UnsupportedValueError(
            f"{key}: this rank's part of the DTensor {spec} has the shape {found}, but by its placements it is "
            f"{'empty' if wanted is None else wanted}: torch cuts as torch.chunk does; redistribute it, or give "
            "DTensor.from_local the right shape"
        )


_CUTS_STRIDES = torch.__version__ >= "2.10"
"""Whether torch cuts a _StridedShard as it says. Before, it is cut as the order of the mesh's dimensions would have it,
which is the same where the stride is that of the mesh and all parts are of one size; else nothing here could see it."""


def _check_strides(placement: MeshPlacement, spec: Spec, key: str) -> None:
    for at, split in enumerate(() if _CUTS_STRIDES else placement.splits):
        if split.dim is None or split.stride == 1:
            continue
        same = [place for place, other in enumerate(placement.splits) if other.dim == split.dim]
        sizes = placement.mesh.shape
        inner, parts = (math.prod(sizes[place] for place in same if place >= least) for least in (at + 1, 0))
        if split.stride != inner or spec.shape[split.dim] % parts:
            raise UnsupportedValueError(
                f"{key}: torch before 2.10 cuts dimension {split.dim} of this DTensor {spec} in another way than its "
                f"_StridedShard says: use torch 2.10 or newer, or FSDP over TP, and a multiple of {parts}"
            )


def _own_rank(mesh: Any, values: Mesh) -> int:
    """The world rank of this process; -1 when there is no world any more and it is not in the mesh."""
    rank = world_rank()
    if rank >= 0:
        # The mesh is not asked: torch caches results of operators together with their mesh, which
        # may be that of a former world in which this process had another rank.
        return rank
    place, number = mesh.get_coordinate(), 0
    for at, size in zip(place or (), values.shape, strict=place is not None):
        number = number * size + at
    return -1 if place is None else values.ranks[number]


def world_rank() -> int:
    """This process's number in the job; -1 when there is none, or no world any more."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else -1


_Known: TypeAlias = dict[tuple[Any, ...], MeshPlacement]
_meshes: weakref.WeakKeyDictionary[Any, dict[int, tuple[Mesh, _Known]]] = weakref.WeakKeyDictionary()
"""Meshes by torch's meshes and this process's rank: one object for all tensors that are divided alike.

Since torch 2.10 the groups that a mesh is cut into are one mesh (`mesh["tp"]` of all ranks are equal), and what its
`mesh` says depends on the rank that asks.
"""


def _mesh_placement(mesh: Any, placements: tuple[Any, ...], num_dims: int, key: str) -> MeshPlacement:
    by_rank, rank = _meshes.setdefault(mesh, {}), world_rank()
    entry = by_rank.get(rank)
    if entry is None:
        ranks, names = mesh.mesh, mesh.mesh_dim_names or ("",) * mesh.mesh.ndim
        entry = by_rank[rank] = (Mesh(tuple(names), tuple(ranks.shape), tuple(ranks.flatten().tolist())), {})
    values, known = entry
    found = known.get((num_dims, *placements))
    if found is None:
        splits = tuple(_split(placement, num_dims, key) for placement in placements)
        found = known.setdefault(splits, MeshPlacement(values, splits))
        known[num_dims, *placements] = found
    return found


def _split(placement: Any, num_dims: int, key: str) -> Split:
    if placement.is_replicate():
        return Split()
    if placement.is_partial():
        raise UnsupportedValueError(
            f"{key}: cannot store a DTensor with the placement {placement}: its sum is still to be made; "
            "redistribute it to Replicate or Shard first"
        )
    if type(placement).__name__ not in _SPLITTING:
        raise UnsupportedValueError(
            f"{key}: cannot store a DTensor with the placement {placement!r}: only Shard, Replicate and _StridedShard "
            "are known; redistribute it first"
        )
    return Split(placement.dim % num_dims, int(getattr(placement, "split_factor", 1)))


def _of_sharded_tensor(tensor: Any, path: Path, check: Check) -> Sharded:
    key, about = render_key(path), tensor.metadata()
    holders: dict[Box, set[int]] = {}
    for part in about.shards_metadata:
        rank = None if part.placement is None else part.placement.rank()
        if rank is None:
            raise UnsupportedValueError(
                f"{key}: a shard's metadata do not say which rank holds it: give it a placement"
            )
        holders.setdefault(_box_of(part), set()).add(int(rank))
    boxes = tuple((box, tuple(sorted(ranks))) for box, ranks in holders.items())
    pieces: list[Piece] = []
    local: list[torch.Tensor] = []
    for shard in tensor.local_shards():
        box, part = _box_of(shard.metadata), check(shard.tensor, path)
        _check_strided(part, key)
        if tuple(part.shape) != box.sizes:
            raise UnsupportedValueError(
                f"{key}: a local shard has the shape {tuple(part.shape)}, its metadata say {box.sizes}: "
                "make the ShardedTensor from the shards that it has"
            )
        if box.num_elements:
            pieces.append(Piece(box, (0,) * len(box.sizes), len(local)))
        local.append(part)
    dtype = DTYPE_NAMES.get(about.tensor_properties.dtype)
    if dtype is None:
        raise UnsupportedValueError(
            f"{key}: cannot store a ShardedTensor of {about.tensor_properties.dtype}: convert it to another dtype"
        )
    return Sharded(Spec(dtype, tuple(about.size)), BoxPlacement(boxes), tuple(pieces), tuple(local), None)


def _box_of(part: Any) -> Box:
    return Box(tuple(part.shard_offsets), tuple(part.shard_sizes))


def _check_strided(local: torch.Tensor, key: str) -> None:
    if local.layout != torch.strided or local.is_quantized:
        raise UnsupportedValueError(
            f"{key}: the local tensor of a {local.layout} DTensor cannot be read by boxes: make it dense"
        )
