"""The state of all ranks together, from what each rank has.

    1. `describe`: what one rank has, in words that other ranks understand. Equal states under equal placements give
       equal bytes, so that ranks compare digests first; small whole tensors and values are in it, large ones are not
    2. `merge_states`: one state from all descriptions
       containers  are merged by name; their kind and attributes must agree
       values      must be equal wherever they are ("ranks" containers hold those that may differ)
       tensors     must agree in spec; what ranks hold of them is merged

Invariant: every rank makes the same merged state, or the same error. No byte of a large tensor is read.
"""

from __future__ import annotations

import logging
import re
from collections import ChainMap, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from cas_ckpt.errors import InternalError, PeerError
from cas_ckpt.layout.holdings import Shard, holdings
from cas_ckpt.objects.layouts import Division
from cas_ckpt.objects.nodes import INLINE_BYTES, name_order
from cas_ckpt.objects.spec import (
    Box,
    BoxPlacement,
    MeshPlacement,
    Placement,
    Spec,
    pack_placement,
    raw_dtype,
    unpack_placement,
)
from cas_ckpt.objects.state import (
    ORDER,
    RANKS,
    Container,
    EncodedValue,
    Flavor,
    Item,
    Path,
    TensorItem,
    ValueItem,
    render_key,
)
from cas_ckpt.objects.values import decode_value, encode_value
from cas_ckpt.parallel.peers import named

_LOGGER = logging.getLogger("cas_ckpt")

Ranks = tuple[int, ...]

_FIRST_NUMBER = re.compile(r"((?:[^.]*[^.0-9][^.]*\.)*?)\d+(?:\.|$)")
"""The part of a name before its first component that is a number."""


@dataclass(frozen=True, slots=True)
class DescribedContainer:
    """A container; its children follow. Those of kind "ranks" are not described.

    Attributes:
        length: Number of children of a list or tuple, which cannot be merged by name; else -1.
        versions: Of the state of a module; each rank may have other modules of it.
    """

    path: Path
    kind: str
    attrs: bytes | None
    length: int = -1
    versions: Mapping[str, int] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """A tensor.

    Attributes:
        tie: Key of the first tensor (in order) that is the same memory, its own if there is none.
        inline: The bytes of a small whole tensor.
        order: As `TensorItem` has it.
    """

    path: Path
    spec: Spec
    flavor: Flavor
    placement: Placement | None
    tie: str
    inline: bytes | None
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class DescribedValue:
    """A plain value, encoded."""

    path: Path
    data: bytes


Described = DescribedContainer | DescribedTensor | DescribedValue


def describe(state: Container, *, allow_pickle: bool = False) -> list[Described]:
    """Everything in `state`, parents before children, children by name.

    Raises:
        UnsupportedValueError: names the key of a value that cannot be expressed.
    """
    ties: dict[Any, str] = {}
    return list(_walk(state, (), allow_pickle, ties))


def _walk(item: Item, path: Path, allow_pickle: bool, ties: dict[Any, str]) -> Iterator[Described]:
    key = render_key(path)
    if isinstance(item, Container):
        length = len(item.children) if item.kind in ("list", "tuple") else -1
        attrs = None if item.attrs is None else encode_value(item.attrs, key=key, allow_pickle=allow_pickle)
        yield DescribedContainer(path, item.kind, attrs, length, item.versions)
        if item.kind != RANKS:
            for name in sorted(item.children, key=name_order):
                yield from _walk(item.children[name], (*path, name), allow_pickle, ties)
    elif isinstance(item, TensorItem):
        tie, inline = key, None
        if item.identity is not None and item.spec.num_bytes:
            tie = ties.setdefault((item.identity[0], item.spec), key)
        if item.placement is None and item.spec.num_bytes <= INLINE_BYTES:
            inline = item.source.read(item.spec.box).tobytes()
        yield DescribedTensor(path, item.spec, item.flavor, item.placement, tie, inline, item.order)
    elif isinstance(item, ValueItem):
        yield DescribedValue(path, encode_value(item.value, key=key, allow_pickle=allow_pickle))
    elif isinstance(item, EncodedValue):
        yield DescribedValue(path, item.data)
    else:
        raise InternalError(f"{key}: a {type(item).__name__} cannot be committed")


# --- bytes ---------------------------------------------------------------------------------


def pack_description(entries: list[Described]) -> tuple[bytes, bytes]:
    """`entries` as bytes: the placements, and everything else.

    Apart, because ranks often differ in the placements alone: groups of a tensor parallel job over
    meshes of their own, or ranks that name only their own boxes.
    """
    numbers: dict[Placement, int] = {}
    seen: dict[int, int] = {}
    rows: list[list[Any]] = []
    for entry in entries:
        if isinstance(entry, DescribedContainer):
            versions = None if entry.versions is None else dict(entry.versions)
            rows.append(["c", entry.path, entry.kind, entry.attrs, entry.length, versions])
        elif isinstance(entry, DescribedValue):
            rows.append(["v", entry.path, entry.data])
        else:
            placement, number = entry.placement, None
            if placement is not None:
                # Hashing one looks at every rank of its mesh: once per object, not per tensor.
                number = seen.get(id(placement))
                if number is None:
                    number = seen[id(placement)] = numbers.setdefault(placement, len(numbers))
            spec, flavor = entry.spec, str(entry.flavor)
            rows.append(["t", entry.path, spec.dtype, spec.shape, flavor, number, entry.tie, entry.inline, entry.order])
    placements = list(map(pack_placement, numbers))
    return msgpack.packb(placements), msgpack.packb(rows, use_bin_type=True, unicode_errors="surrogatepass")


def unpack_description(placements: bytes, rows: bytes) -> list[Described]:
    """Inverse of `pack_description`, on another rank of this job."""
    table = [unpack_placement(packed) for packed in msgpack.unpackb(placements)]
    found = msgpack.unpackb(rows, use_list=False, strict_map_key=False, unicode_errors="surrogatepass")
    return [_entry(row, table) for row in found]


def _entry(row: tuple[Any, ...], placements: list[Placement]) -> Described:
    kind, path, *rest = row
    if kind == "c":
        return DescribedContainer(path, *rest)
    if kind == "v":
        return DescribedValue(path, *rest)
    dtype, shape, flavor, number, tie, inline, order = rest
    placement = None if number is None else placements[number]
    return DescribedTensor(path, Spec(dtype, shape), Flavor(flavor), placement, tie, inline, order)


# --- merging ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MergedState:
    """One state of several ranks.

    Attributes:
        state: All containers, tensors and values; `ranks` containers are empty. Tensors that this
            rank does not hold have a source that refuses.
        shards: Key -> who holds what of that tensor.
        disjoint: Keys of which no two shards share an element, because one mesh divides them.
        divisions: Key -> how it is held, of every key that not every rank has whole. Keys that are held alike have
            the very same object. Placements are in the order in which they were reported, the lowest rank's first.
        ranks_paths: Where the containers of per-rank values are, in order.
        small: Tensors that are stored inline but are divided over ranks: their bytes are to be filled in.
    """

    state: Container
    shards: dict[str, tuple[Shard, ...]]
    disjoint: frozenset[str]
    divisions: dict[str, Division]
    ranks_paths: tuple[Path, ...]
    small: dict[Path, SmallTensor]

    def placements(self, key: str) -> tuple[Placement, ...]:
        """The placements of a tensor; none if all who hold it have it whole."""
        division = self.divisions.get(key)
        return () if division is None else division.placements


@dataclass(slots=True)
class _Found:
    """One path and what ranks say of it: (ranks, entry), the lowest ranks first."""

    reports: list[tuple[Ranks, Described]] = field(default_factory=list)

    @property
    def ranks(self) -> Ranks:
        return tuple(sorted(rank for ranks, _ in self.reports for rank in ranks))


def merge_states(
    described: Sequence[tuple[Ranks, Sequence[Described]]], own: Mapping[Path, TensorItem], *, warn: bool = False
) -> MergedState:
    """One state of what ranks have.

    Args:
        described: Each distinct description with the ranks that gave it.
        own: This rank's tensors.
        warn: Values that differ are logged, and the lowest rank's is kept; else they are an error.
    Raises:
        PeerError: ranks disagree; names the key and the ranks.
    """
    found: dict[Path, _Found] = {}
    for ranks, entries in sorted(described, key=lambda pair: pair[0]):
        for entry in entries:
            found.setdefault(entry.path, _Found()).reports.append((ranks, entry))
    world_size = sum(len(ranks) for ranks, _ in described)
    made = _Merge(own, warn, world_size)
    for path, each in found.items():
        made.add(path, each)
    return MergedState(
        made.root, made.shards, frozenset(made.disjoint), made.divisions, tuple(made.ranks_paths), made.small
    )


class _Merge:
    def __init__(self, own: Mapping[Path, TensorItem], warn: bool, world_size: int) -> None:
        self._own = own
        self._warn = warn
        self._world_size = world_size
        self.small: dict[Path, SmallTensor] = {}
        self._containers: dict[Path, Container] = {}
        self._held: dict[tuple[Any, ...], tuple[Division, tuple[Shard, ...]]] = {}
        self._divisions: dict[tuple[tuple[Placement, ...], Ranks], Division] = {}
        self.root = Container("dict", {})
        self.shards: dict[str, tuple[Shard, ...]] = {}
        self.disjoint: set[str] = set()
        self.divisions: dict[str, Division] = {}
        self.ranks_paths: list[Path] = []

    def add(self, path: Path, found: _Found) -> None:
        """Bring in one path; parents come first."""
        found.reports = _without_empty(found.reports)
        first = found.reports[0][1]
        for ranks, entry in found.reports[1:]:
            if type(entry) is not type(first):
                raise _disagreement(path, found.reports[0][0], _in_words(first), ranks, _in_words(entry))
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
        for ranks, entry in found.reports[1:]:
            same = isinstance(entry, DescribedContainer) and entry.kind == first.kind == "odict"
            if entry != first and not same:
                raise _disagreement(path, found.reports[0][0], _in_words(first), ranks, _in_words(entry))
        given = first.attrs if first.kind != "odict" else _joined_order([entry for _, entry in found.reports])
        attrs = None if given is None else EncodedValue(given)
        described = [entry for _, entry in found.reports if isinstance(entry, DescribedContainer)]
        told = [dict(entry.versions) for entry in described if entry.versions is not None]
        versions = dict(ChainMap(*told)) if told else None  # of the lowest rank that has the module
        made = self._containers[path] = Container(first.kind, {}, attrs, versions)
        if not path:
            self.root = made
        if first.kind == RANKS:
            self.ranks_paths.append(path)
        return made

    def _value(self, path: Path, found: _Found, first: DescribedValue) -> EncodedValue:
        if sum(len(ranks) for ranks, _ in found.reports) < self._world_size:
            self.divisions[render_key(path)] = self._division((), found.ranks)
        names = _joined_names(path, [entry.data for _, entry in found.reports if isinstance(entry, DescribedValue)])
        if names is not None:
            return EncodedValue(names)
        for ranks, entry in found.reports[1:]:
            if isinstance(entry, DescribedValue) and entry.data != first.data:
                self._diverged(path, found.reports[0][0], ranks, "the value differs")
        return EncodedValue(first.data)

    def _tensor(self, path: Path, found: _Found, first: DescribedTensor) -> TensorItem:
        key = render_key(path)
        reports = [(ranks, entry) for ranks, entry in found.reports if isinstance(entry, DescribedTensor)]
        for ranks, entry in reports[1:]:
            if (entry.spec, entry.flavor) != (first.spec, first.flavor):
                raise _disagreement(path, reports[0][0], _in_words(first), ranks, _in_words(entry))
            if entry.inline is not None and first.inline is not None and entry.inline != first.inline:
                self._diverged(path, reports[0][0], ranks, "the tensor differs")
        self._note_holders(key, found.ranks, reports)
        # Tied are only tensors that every rank has as one memory: parts of two may be one memory by chance.
        tie = first.tie if all(entry.tie == first.tie for _, entry in reports) else key
        own = self._own.get(path)
        # What ties tensors is equal on all ranks; what proves that memory is unchanged is this rank's own.
        identity = (tie, None) if own is None or own.identity is None else (tie, *own.identity)
        if first.spec.num_bytes <= INLINE_BYTES:
            small = SmallTensor(first.spec, first.inline)
            if first.inline is None:
                self.small[path] = small
            return TensorItem(first.spec, small, first.flavor, identity, order=first.order)
        source = _Elsewhere(key) if own is None else own.source
        return TensorItem(first.spec, source, first.flavor, identity, order=first.order)

    def _note_holders(self, key: str, holders: Ranks, reports: Sequence[tuple[Ranks, DescribedTensor]]) -> None:
        shape = reports[0][1].spec.shape
        placements = tuple(dict.fromkeys(entry.placement for _, entry in reports if entry.placement is not None))
        everywhere = [rank for ranks, entry in reports if entry.placement is None for rank in ranks]
        if len(placements) + bool(everywhere) == 1 and not any(isinstance(each, BoxPlacement) for each in placements):
            self.disjoint.add(key)
        like = (shape, placements, holders, tuple(everywhere))
        held = self._held.get(like)
        if held is None:  # tensors that are alike share one tuple: plans recognise them by it
            for placement in placements:
                by_placement = (
                    placement.mesh.ranks if isinstance(placement, MeshPlacement)
                    else [rank for _, ranks in placement.boxes for rank in ranks]
                )  # fmt: skip
                missing = tuple(sorted(set(by_placement).difference(holders)))
                if missing:
                    raise PeerError(
                        f"{key}: ranks {list(missing)} do not have this key, though they hold a part of it according "
                        f"to rank {reports[0][0][0]}: commit the same state on all of them", missing,
                    )  # fmt: skip
            division = self._division(placements, tuple(sorted(everywhere)))
            held = self._held[like] = (division, holdings(shape, division.placements, division.everywhere))
        division, self.shards[key] = held
        if placements or len(everywhere) < self._world_size:
            self.divisions[key] = division

    def _division(self, placements: tuple[Placement, ...], everywhere: Ranks) -> Division:
        """One object for tensors of every shape that are held alike."""
        return self._divisions.setdefault((placements, everywhere), Division(placements, everywhere))

    def _diverged(self, path: Path, one: Ranks, other: Ranks, what: str) -> None:
        message = (
            f"{render_key(path)}: {what} on {named(one)} and {named(other)}; if each rank is to keep its own, wrap "
            "it in PerRank (in dcp.save: put the rank into its key)"
        )
        if not self._warn:
            raise PeerError(message, (one[0], *other))
        _LOGGER.warning("%s; that of rank %d is kept", message, one[0])


def _joined_names(path: Path, reports: Sequence[bytes]) -> bytes | None:
    """The names of all parameters of an optimizer's group, where ranks (stages of a pipeline) have parts of them.

    The lowest rank's come first. None for any other value.
    """
    distinct = dict.fromkeys(reports)
    if len(path) < 3 or path[-1] != "params" or path[-3] != "param_groups" or len(distinct) == 1:
        return None
    lists = [decode_value(data) for data in distinct]
    if not all(isinstance(each, list) and all(isinstance(name, str) for name in each) for each in lists):
        return None
    names = list(dict.fromkeys(name for each in lists for name in each))
    return encode_value(_in_model_order(names), key="params")


def _joined_order(reports: Sequence[Any]) -> bytes | None:
    """The order of an OrderedDict of which ranks have other entries: that of the first, then what others add."""
    given = [decode_value(entry.attrs) for entry in reports if entry.attrs is not None]
    orders = [each.get(ORDER) if isinstance(each, dict) else None for each in given]
    if len(orders) < len(reports) or not all(isinstance(order, list) for order in orders):
        return None
    return encode_value({ORDER: list(dict.fromkeys(name for order in orders for name in order or ()))}, key=ORDER)


def _in_model_order(names: list[str]) -> list[str]:
    """Names whose first number tells layers apart are ordered by that number: stages may be interleaved."""
    families: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        if (found := _FIRST_NUMBER.match(name)) is not None:
            families.setdefault(found[1], []).append(at)
    ordered = list(names)
    for prefix, places in families.items():
        members = sorted((names[at] for at in places), key=lambda name: int(name[len(prefix) :].split(".", 1)[0]))
        for at, name in zip(places, members, strict=True):
            ordered[at] = name
    return ordered


def _without_empty(reports: list[tuple[Ranks, Described]]) -> list[tuple[Ranks, Described]]:
    """An OrderedDict that is empty on some ranks is a plain value there, which the others' containers stand for."""
    if len(reports) == 1 or not any(
        isinstance(entry, DescribedContainer) and entry.kind == "odict" for _, entry in reports
    ):
        return reports
    empty = encode_value(OrderedDict(), key="")
    return [(ranks, entry) for ranks, entry in reports if not isinstance(entry, DescribedValue) or entry.data != empty]


class SmallTensor:
    """A small tensor whose bytes were reported, or are filled in later where they are needed."""

    def __init__(self, spec: Spec, data: bytes | None) -> None:
        self.spec = spec
        self.data = data

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        data = bytes(self.spec.num_bytes) if self.data is None else self.data
        return np.frombuffer(data, raw_dtype(self.spec.item_bytes)).reshape(self.spec.shape)[box.slices]


class _Elsewhere:
    """A tensor of which this rank has nothing."""

    def __init__(self, key: str) -> None:
        self._key = key

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        raise InternalError(f"{self._key}: this rank was asked for {box}, which it does not hold")


def _in_words(entry: Described) -> str:
    if isinstance(entry, DescribedTensor):
        return f"{entry.flavor} tensor {entry.spec}"
    if isinstance(entry, DescribedValue):
        return "a plain value"
    return f"a {entry.kind}" if entry.length < 0 else f"a {entry.kind} of {entry.length}"


def _disagreement(path: Path, one: Ranks, wanted: str, other: Ranks, found: str) -> PeerError:
    return PeerError(
        f"{render_key(path) or '(root)'}: {named(one)}: {wanted}, {named(other)}: {found}: "
        "the same call needs the same state on all ranks", (one[0], *other),
    )  # fmt: skip
