"""What the ranks want of a commit: told by each, united on all.

    1. every rank describes its copies: key, spec, id, placement
    2. digests of the descriptions go round; a description travels once for all ranks that have it
    3. every rank unites the descriptions, and so finds the same list

Invariant: equal descriptions in, equal lists out, on every rank; ranks that want different things
under one key are found here, before anything is read. What a rank wants follows from its own
description alone, so a placement need not name the boxes of other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from cas_ckpt.errors import CkptError, CorruptionError, InternalError, InvalidInputError, MismatchError
from cas_ckpt.layout.holdings import Shard, holdings, whole
from cas_ckpt.objects.canonical import pack_rows, unpack_canonical
from cas_ckpt.objects.digest import Digest, leaf_digest, short
from cas_ckpt.objects.placement import Placement, pack_placement, unpack_placement
from cas_ckpt.objects.spec import Box, Spec
from cas_ckpt.objects.state import StoredTensor, TensorCopy, render_key
from cas_ckpt.objects.tensor_node import checked_shape
from cas_ckpt.ops.distinct import distinct_messages, ranks_by_message
from cas_ckpt.transfer.blame import named
from cas_ckpt.transfer.peers import Peers

_INLINE, _SINGLE, _NODE = range(3)
"""What the id of a row is: of the bytes themselves, of the only chunk, of the tensor node."""


@dataclass(frozen=True, slots=True)
class Want:
    """A tensor that is stored in chunks, and who wants what of it."""

    key: str
    stored: StoredTensor
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    """A tensor as one description has it."""

    key: str
    spec: Spec
    kind: int
    digest: Digest
    placement: Placement | None

    def __str__(self) -> str:
        return f"{self.spec} stored as {short(self.digest)}"


def agree_on_wants(copies: Sequence[TensorCopy], peers: Peers) -> list[Want]:
    """What all ranks want together, by key; collective, and the same on every rank.

    Raises:
        MismatchError: ranks want different tensors under one key; raised on every rank.
    """
    own = describe(copies)
    digests = peers.gather_all(leaf_digest(own))
    told = distinct_messages(digests, own, peers)
    return unite([(told[digest], ranks) for digest, ranks in ranks_by_message(digests).items()])


def describe(copies: Sequence[TensorCopy]) -> bytes:
    """What this rank wants, in one form whatever the order of `copies`."""
    names: dict[Placement, int] = {}
    name_of: dict[int, int] = {}
    rows = []
    for copy in copies:
        placement = copy.placement
        # Hashing a placement looks at every rank of its mesh: once per object, not per tensor.
        name = None if placement is None else name_of.get(id(placement))
        if placement is not None and name is None:
            name = name_of[id(placement)] = names.setdefault(placement, len(names))
        kind, digest = _id_of(copy.stored)
        spec = copy.stored.spec
        rows.append([render_key(copy.path), spec.dtype, list(spec.shape), kind, digest, name])
    rows.sort(key=lambda row: str(row[0]))
    # Numbered again in the order of the keys, so that the order of `copies` shows nowhere.
    order = {name: at for at, name in enumerate(dict.fromkeys(row[-1] for row in rows if row[-1] is not None))}
    for row in rows:
        row[-1] = order.get(row[-1])
    placements = sorted(names, key=lambda placement: order[names[placement]])
    return pack_rows([list(map(pack_placement, placements)), rows])


def _id_of(stored: StoredTensor) -> tuple[int, Digest]:
    if stored.node is not None:
        return (_SINGLE if stored.single else _NODE), stored.node
    if stored.inline is None:
        raise InternalError("a tensor that is neither stored nor inline")
    return _INLINE, leaf_digest(stored.inline)


def unite(descriptions: Sequence[tuple[bytes, Sequence[int]]]) -> list[Want]:
    """What the ranks of all descriptions want, by key.

    Args:
        descriptions: Each with the ranks that sent it.
    Raises:
        MismatchError: two of them differ in the spec or the id of one key.
        CorruptionError: one of them cannot be read.
    """
    rows_of: dict[str, list[tuple[_Row, int]]] = {}
    for number, (data, ranks) in enumerate(descriptions):
        for row in _read(data, ranks):
            rows_of.setdefault(row.key, []).append((row, number))
    rank_sets = [frozenset(ranks) for _, ranks in descriptions]
    shards = _SharedShards(rank_sets)
    wants = []
    for key in sorted(rows_of):
        rows = rows_of[key]
        first = rows[0][0]
        if len(rows) > 1:
            _check_agreement(rows, rank_sets)
        if first.kind != _INLINE:
            stored = StoredTensor(first.spec, "torch", first.digest, None, single=first.kind == _SINGLE)
            wants.append(Want(key, stored, shards.of(first.spec.shape, rows)))
    return wants


def _check_agreement(rows: Sequence[tuple[_Row, int]], rank_sets: Sequence[frozenset[int]]) -> None:
    first, _ = rows[0]
    told: dict[str, set[int]] = {}
    for row, number in rows:
        told.setdefault(str(row), set()).update(rank_sets[number])
    if any((row.spec, row.kind, row.digest) != (first.spec, first.kind, first.digest) for row, _ in rows):
        parts = "; ".join(f"{named(sorted(ranks))}: {what}" for what, ranks in told.items())
        raise MismatchError(
            f"{first.key}: the ranks want different tensors under this key ({parts}): check out the same commit on all"
        )


class _SharedShards:
    """The shards of tensors, one tuple for all that are wanted alike: plans recognise them by it."""

    def __init__(self, rank_sets: Sequence[frozenset[int]]) -> None:
        self._rank_sets = rank_sets
        self._found: dict[tuple[Any, ...], tuple[Shard, ...]] = {}

    def of(self, shape: tuple[int, ...], rows: Sequence[tuple[_Row, int]]) -> tuple[Shard, ...]:
        """Who holds what of a tensor that these rows are about."""
        # Rows of one description share their placements, so these can be told apart by identity.
        alike = (shape, *[(id(row.placement), number) for row, number in rows])
        found = self._found.get(alike)
        if found is None:
            told = [(row.placement, self._rank_sets[number]) for row, number in rows]
            found = self._found[alike] = _shards(shape, told)
        return found


def _shards(shape: tuple[int, ...], told: Iterable[tuple[Placement | None, frozenset[int]]]) -> tuple[Shard, ...]:
    ranks_of: dict[tuple[Box, ...], set[int]] = {}
    for placement, ranks in told:
        for shard in whole(shape, ranks) if placement is None else holdings(shape, [placement]):
            mine = ranks.intersection(shard.ranks)
            if mine:
                ranks_of.setdefault(shard.pieces, set()).update(mine)
    # Where an element stands in a rank's own memory is its target's affair.
    nowhere = (0,) * len(shape)
    return tuple(
        Shard(pieces, (nowhere,) * len(pieces), tuple(sorted(ranks))) for pieces, ranks in ranks_of.items()
    )


def _read(data: bytes, ranks: Sequence[int]) -> list[_Row]:
    """The rows of a description, ascending by key."""
    try:
        packed, rows = unpack_canonical(data)
        placements = [unpack_placement(each) for each in packed]
        specs = _Specs()
        found = [_unpacked_row(row, placements, specs) for row in rows]
    except (CkptError, TypeError, ValueError, KeyError, IndexError) as error:
        raise CorruptionError(
            f"what {named(list(ranks))} wants cannot be read ({error!r}): run the same version of cas_ckpt on all ranks"
        ) from error
    for before, after in pairwise(found):
        if before.key >= after.key:
            raise InvalidInputError(f"{after.key}: {named(list(ranks))} wants it twice: give each key one target")
    return found


class _Specs(dict[tuple[Any, ...], Spec]):
    """One `Spec` for all tensors that are alike."""

    def __missing__(self, key: tuple[Any, ...]) -> Spec:
        made = self[key] = Spec(key[0], checked_shape(list(key[1:])))
        made.item_bytes  # noqa: B018 - raises for a dtype that is none
        return made


def _unpacked_row(row: Any, placements: Sequence[Placement], specs: Mapping[tuple[Any, ...], Spec]) -> _Row:
    key, dtype, shape, kind, digest, name = row
    if type(key) is not str or kind not in (_INLINE, _SINGLE, _NODE) or type(digest) is not bytes:
        raise CorruptionError("a row that is none")
    placement = None if name is None else placements[name]
    return _Row(key, specs[(dtype, *shape)], kind, Digest(digest), placement)

