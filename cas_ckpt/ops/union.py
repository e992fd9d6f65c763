"""The state of all ranks together, from what each rank has.

    containers  are united by name; their kind and attributes must agree
    values      must be equal wherever they are ("ranks" containers hold those that differ rightly)
    tensors     must agree in spec; their holdings are united

Invariant: every rank makes the same union, or the same error. No byte of a large tensor is read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cas_ckpt.errors import InternalError, PeerError
from cas_ckpt.layout.holdings import Shard, holdings, whole
from cas_ckpt.objects.placement import BoxPlacement, MeshPlacement, Placement
from cas_ckpt.objects.spec import Box, raw_dtype
from cas_ckpt.objects.state import Container, EncodedValue, Item, Path, TensorItem, render_key
from cas_ckpt.objects.values import decode_value, encode_value
from cas_ckpt.ops.description import Described, DescribedContainer, DescribedTensor, DescribedValue

_LOGGER = logging.getLogger("cas_ckpt")

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Union:
    """One state of several ranks.

    Attributes:
        state: All containers, tensors and values; `ranks` containers are empty. Tensors that this
            rank does not hold have a source that refuses.
        shards: Key -> who holds what of that tensor.
        disjoint: Keys of which no two shards share an element, because one mesh divides them.
        placements: Key -> the placements that were told, the lowest rank's first.
        ranks_paths: Where the containers of per-rank values are, in order.
    """

    state: Container
    shards: dict[str, tuple[Shard, ...]]
    disjoint: frozenset[str]
    placements: dict[str, tuple[Placement, ...]]
    ranks_paths: tuple[Path, ...]


@dataclass(slots=True)
class _Found:
    """One path and what ranks say of it: (ranks, entry), the lowest ranks first."""

    told: list[tuple[Ranks, Described]] = field(default_factory=list)

    @property
    def ranks(self) -> Ranks:
        return tuple(sorted(rank for ranks, _ in self.told for rank in ranks))


def unite(
    described: Sequence[tuple[Ranks, Sequence[Described]]],
    own: Mapping[Path, TensorItem],
    *,
    small: Mapping[Path, bytes],
    warn: bool = False,
) -> Union:
    """The union of what ranks have.

    Args:
        described: Each distinct description with the ranks that gave it.
        own: This rank's tensors.
        small: Bytes of small tensors that are divided over ranks, where they are known.
        warn: Values that differ are logged, and the lowest rank's is kept; else they are an error.
    Raises:
        PeerError: ranks disagree; names the key and the ranks.
    """
    found: dict[Path, _Found] = {}
    for ranks, entries in sorted(described, key=lambda pair: pair[0]):
        for entry in entries:
            found.setdefault(entry.path, _Found()).told.append((ranks, entry))
    made = _Union(own, small, warn)
    for path, each in found.items():
        made.add(path, each)
    return Union(made.root, made.shards, frozenset(made.disjoint), made.placements, tuple(made.ranks_paths))


def small_divided(described: Iterable[Described]) -> list[DescribedTensor]:
    """The tensors that stand inline but are divided over ranks: their bytes must be gathered."""
    from cas_ckpt.objects.tree_node import INLINE_BYTES

    return [
        entry
        for entry in described
        if isinstance(entry, DescribedTensor) and entry.placement and entry.spec.num_bytes <= INLINE_BYTES
    ]


class _Union:
    def __init__(self, own: Mapping[Path, TensorItem], small: Mapping[Path, bytes], warn: bool) -> None:
        self._own = own
        self._small = small
        self._warn = warn
        self._containers: dict[Path, Container] = {}
        self._shards: dict[tuple[Any, ...], tuple[Shard, ...]] = {}
        self.root = Container("dict", {})
        self.shards: dict[str, tuple[Shard, ...]] = {}
        self.disjoint: set[str] = set()
        self.placements: dict[str, tuple[Placement, ...]] = {}
        self.ranks_paths: list[Path] = []

    def add(self, path: Path, found: _Found) -> None:
        """Bring in one path; parents come first."""
        first = found.told[0][1]
        for ranks, entry in found.told[1:]:
            if type(entry) is not type(first):
                raise _disagreement(path, found.told[0][0], _in_words(first), ranks, _in_words(entry))
        item: Item
        if isinstance(first, DescribedContainer):
            item = self._container(path, found, first)
        elif isinstance(first, DescribedTensor):
            item = self._tensor(path, found, first)
        else:
            item = self._value(path, found, first)
        if path:
            self._containers[path[:-1]].children[path[-1]] = item

    def _container(self, path: Path, found: _Found, first: DescribedContainer) -> Container:
        for ranks, entry in found.told[1:]:
            if isinstance(entry, DescribedContainer) and (entry.kind, entry.attrs) != (first.kind, first.attrs):
                raise _disagreement(path, found.told[0][0], f"a {first.kind}", ranks, f"a {entry.kind}")
        attrs = None if first.attrs is None else EncodedValue(first.attrs)
        made = self._containers[path] = Container(first.kind, {}, attrs)
        if not path:
            self.root = made
        if first.kind == "ranks":
            self.ranks_paths.append(path)
        return made

    def _value(self, path: Path, found: _Found, first: DescribedValue) -> EncodedValue:
        names = _joined_names(path, [entry.data for _, entry in found.told if isinstance(entry, DescribedValue)])
        if names is not None:
            return EncodedValue(names)
        for ranks, entry in found.told[1:]:
            if isinstance(entry, DescribedValue) and entry.data != first.data:
                self._diverged(path, found.told[0][0], ranks, "the value differs")
        return EncodedValue(first.data)

    def _tensor(self, path: Path, found: _Found, first: DescribedTensor) -> TensorItem:
        key = render_key(path)
        told = [(ranks, entry) for ranks, entry in found.told if isinstance(entry, DescribedTensor)]
        for ranks, entry in told[1:]:
            if (entry.spec, entry.flavor) != (first.spec, first.flavor):
                raise _disagreement(path, told[0][0], _in_words(first), ranks, _in_words(entry))
            if entry.inline is not None and first.inline is not None and entry.inline != first.inline:
                self._diverged(path, told[0][0], ranks, "the tensor differs")
        self._note_holders(key, found.ranks, told)
        tie = min(entry.tie for _, entry in told)
        own = self._own.get(path)
        # What ties tensors must be equal on all ranks; what proves that memory is unchanged is this rank's own.
        identity = (tie,) if own is None or own.identity is None else (tie, *own.identity)
        if own is None or own.identity is None:
            identity = (tie, None)
        inline = first.inline if first.inline is not None else self._small.get(path)
        if inline is not None:
            return TensorItem(first.spec, _Bytes(inline, first), first.flavor, identity)
        return TensorItem(first.spec, _Elsewhere(key) if own is None else own.source, first.flavor, identity)

    def _note_holders(self, key: str, holders: Ranks, told: Sequence[tuple[Ranks, DescribedTensor]]) -> None:
        shape = told[0][1].spec.shape
        placements = tuple(dict.fromkeys(entry.placement for _, entry in told if entry.placement is not None))
        everywhere = [rank for ranks, entry in told if entry.placement is None for rank in ranks]
        self.placements[key] = placements
        if len(placements) + bool(everywhere) == 1 and not any(isinstance(each, BoxPlacement) for each in placements):
            self.disjoint.add(key)
        like = (shape, placements, holders, tuple(everywhere))
        shards = self._shards.get(like)
        if shards is None:  # tensors that are alike share one tuple: plans recognise them by it
            _check_holders(key, placements, holders, told[0][0][0])
            divided = holdings(shape, placements)
            shards = self._shards[like] = _merged(divided, whole(shape, everywhere) if everywhere else ())
        self.shards[key] = shards

    def _diverged(self, path: Path, one: Ranks, other: Ranks, what: str) -> None:
        message = (
            f"{render_key(path)}: {what} on {_named(one)} and {_named(other)}; if each rank is to keep its own, wrap "
            "it in PerRank"
        )
        if not self._warn:
            raise PeerError(message, (one[0], *other))
        _LOGGER.warning("%s; that of rank %d is kept", message, one[0])


def _joined_names(path: Path, told: Sequence[bytes]) -> bytes | None:
    """The names of all parameters of an optimizer's group, where ranks (stages of a pipeline) have parts of them.

    The lowest rank's come first. None for any other value.
    """
    distinct = dict.fromkeys(told)
    if len(path) < 3 or path[-1] != "params" or path[-3] != "param_groups" or len(distinct) == 1:
        return None
    lists = [decode_value(data) for data in distinct]
    names = [name for each in lists for name in each] if all(isinstance(each, list) for each in lists) else [None]
    if not all(isinstance(name, str) for name in names):
        return None
    return encode_value(list(dict.fromkeys(names)), key="params")


def _merged(shards: tuple[Shard, ...], complete: tuple[Shard, ...]) -> tuple[Shard, ...]:
    """Both, whole holders first; a shard that is whole anyway is one with them."""
    if not complete:
        return shards
    same = [shard for shard in shards if shard.pieces == complete[0].pieces]
    ranks = {*complete[0].ranks, *(rank for shard in same for rank in shard.ranks)}
    first = Shard(complete[0].pieces, complete[0].local, tuple(sorted(ranks)))
    return (first, *(shard for shard in shards if shard not in same))


def _check_holders(key: str, placements: Sequence[Placement], holders: Ranks, teller: int) -> None:
    for placement in placements:
        missing = tuple(sorted(_named_ranks(placement) - set(holders)))
        if missing:
            raise PeerError(
                f"{key}: ranks {list(missing)} do not have this key, though they hold a part of it according to rank "
                f"{teller}: commit the same state on all of them", missing,
            )  # fmt: skip


def _named_ranks(placement: Placement) -> set[int]:
    if isinstance(placement, MeshPlacement):
        return set(placement.mesh.ranks)
    return {rank for _, ranks in placement.boxes for rank in ranks}


class _Bytes:
    """A small tensor whose bytes were told."""

    def __init__(self, data: bytes, entry: DescribedTensor) -> None:
        self._array = np.frombuffer(data, raw_dtype(entry.spec.item_bytes)).reshape(entry.spec.shape)

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        return self._array[box.slices]


class _Elsewhere:
    """A tensor of which this rank has nothing."""

    def __init__(self, key: str) -> None:
        self._key = key

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        raise InternalError(f"{self._key}: this rank was asked for {box}, which it does not hold")


def _named(ranks: Ranks) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{' ...' if len(ranks) > 8 else ''}"


def _in_words(entry: Described) -> str:
    if isinstance(entry, DescribedTensor):
        return f"{entry.flavor} tensor {entry.spec}"
    return f"a {entry.kind}" if isinstance(entry, DescribedContainer) else "a plain value"


def _disagreement(path: Path, one: Ranks, wanted: str, other: Ranks, found: str) -> PeerError:
    return PeerError(
        f"{render_key(path) or '(root)'}: {_named(one)}: {wanted}, {_named(other)}: {found}: "
        "the same call needs the same state on all ranks", (one[0], *other),
    )  # fmt: skip
