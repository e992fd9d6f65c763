"""The beginning of common work: all ranks find out that they mean the same, and what they have together.

Ranks exchange digests first; whole descriptions only where they differ, each distinct one once.
Collective. Invariant: every rank comes to the same union, or all raise.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from blake3 import blake3

from cas_ckpt.errors import PeerError
from cas_ckpt.layout.holdings import Shard
from cas_ckpt.objects.spec import raw_dtype
from cas_ckpt.objects.state import Container, Path, TensorItem, render_key, walk
from cas_ckpt.ops.description import (
    Described,
    ValueEncoder,
    describe,
    pack_description,
    unpack_description,
)
from cas_ckpt.ops.distinct import distinct_messages
from cas_ckpt.ops.request import CommitFields, CommitRequest
from cas_ckpt.ops.union import Ranks, SmallTensor, Union, unite
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.transfer.peers import Peers

_LOGGER = logging.getLogger("cas_ckpt")

_SEED_BYTES = 16


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know of the commit that they begin.

    Attributes:
        generation: gc generation of every rank's index, or None: they differ, begin anew.
        seed: Random bytes, the same on every rank.
        shares_index: This rank's index is the very one that rank 0 writes.
        num_neighbours: Ranks on this machine, this one included: they share its cores.
    """

    union: Union
    generation: int | None
    seed: bytes
    shares_index: bool
    num_neighbours: int


def agree(
    handle: RepositoryHandle,
    state: Container,
    request: CommitRequest,
    fields: CommitFields,
    peers: Peers,
    *,
    encode_value: ValueEncoder,
) -> Agreement:
    """Bring all ranks' states together.

    Raises:
        PeerError: ranks disagree on the repository, the request or the state; names what and who.
    """
    described = describe(state, encode_value)
    placements, rows = pack_description(described)
    asked = _asked(handle, request, fields)
    header = {
        "store": handle.config.store_id,
        "asked": _digest(asked),
        "placements": _digest(placements),
        "state": _digest(rows),
        "generation": handle.begin_writing(),
        "host": socket.gethostname(),
        "index": handle.index.place,
        "seed": secrets.token_bytes(_SEED_BYTES),
    }
    told = [msgpack.unpackb(data) for data in peers.gather_all(msgpack.packb(header))]
    _check_same(told, "store", "opened another repository than")
    _check_asked(told, asked, peers)
    distinct = _exchange(told, described, placements, rows, peers)
    tensors = {path: item for path, item in walk(state) if isinstance(item, TensorItem)}
    warn = request.on_divergence == "warn"
    union = unite(distinct, tensors, warn=warn)
    _gather_small(union, tensors, peers, warn=warn)
    generations = {each["generation"] for each in told}
    own = told[peers.rank]
    shares = (own["host"], own["index"]) == (told[0]["host"], told[0]["index"]) and not handle.index.in_memory
    neighbours = sum(1 for each in told if each["host"] == own["host"])
    generation = generations.pop() if len(generations) == 1 else None
    return Agreement(union, generation, told[0]["seed"], shares, neighbours)


def _digest(data: bytes) -> bytes:
    return blake3(data).digest()


def _asked(handle: RepositoryHandle, request: CommitRequest, fields: CommitFields) -> bytes:
    """What of the request must be the same everywhere; the author is rank 0's."""
    asked = {
        "branch": request.branch or handle.config.default_branch,
        "message": fields.message,
        "step": request.step,
        "metrics": sorted(fields.metrics.items()),
        "meta": fields.meta,
        "on_conflict": request.on_conflict,
        "parents": [*map(bytes, request.other_parents), *request.parents],
        "lineage": fields.lineage,
        "provenance": fields.provenance,
        "replica_audit": request.replica_audit,
        "on_divergence": request.on_divergence,
    }
    packed: bytes = msgpack.packb(asked, unicode_errors="surrogatepass")
    return packed


def _check_same(told: Sequence[Mapping[str, Any]], name: str, what: str) -> None:
    others = tuple(rank for rank, each in enumerate(told) if each[name] != told[0][name])
    if others:
        raise PeerError(f"ranks {list(others)} {what} rank 0: call with the same on all ranks", others)


def _check_asked(told: Sequence[Mapping[str, Any]], asked: bytes, peers: Peers) -> None:
    others = tuple(rank for rank, each in enumerate(told) if each["asked"] != told[0]["asked"])
    if not others:
        return
    fields = [msgpack.unpackb(data, unicode_errors="surrogatepass") for data in peers.gather_all(asked)]
    rank = others[0]
    # By their text, for -0.0 and 0.0 are equal and other numbers all the same.
    differing = next(name for name in fields[0] if repr(fields[rank][name]) != repr(fields[0][name]))
    raise PeerError(
        f"the ranks disagree on the {differing}: rank 0 says {fields[0][differing]!r:.200}, rank {rank} says "
        f"{fields[rank][differing]!r:.200}: call commit with the same arguments on all ranks", others,
    )  # fmt: skip


def _exchange(
    told: Sequence[Mapping[str, Any]], described: Sequence[Described], placements: bytes, rows: bytes, peers: Peers
) -> list[tuple[Ranks, Sequence[Described]]]:
    """Each distinct description with the ranks that gave it."""
    by_digest: dict[tuple[bytes, bytes], list[int]] = {}
    for rank, each in enumerate(told):
        by_digest.setdefault((each["placements"], each["state"]), []).append(rank)
    if len(by_digest) == 1:
        return [(tuple(range(peers.size)), described)]
    all_placements = distinct_messages([each["placements"] for each in told], placements, peers)
    all_rows = distinct_messages([each["state"] for each in told], rows, peers)
    return [
        (tuple(ranks), described if peers.rank in ranks else unpack_description(all_placements[one], all_rows[other]))
        for (one, other), ranks in by_digest.items()
    ]


def _gather_small(union: Union, own: Mapping[Path, TensorItem], peers: Peers, *, warn: bool) -> None:
    """Fill in, on rank 0, the bytes of small tensors that are divided over ranks; replicas are compared.

    On the other ranks, where nobody looks at them, they stay zeros.
    """
    if not union.small:
        return
    message = b"".join(
        np.ascontiguousarray(own[path].source.read(piece)).tobytes()
        for path in union.small
        for shard in union.shards[render_key(path)]
        if peers.rank in shard.ranks and path in own
        for piece in shard.pieces
    )
    gathered = peers.gather(message)
    faults: list[str] = []
    if gathered is not None:
        views = [memoryview(data) for data in gathered]
        for path, small in union.small.items():
            small.data = _assemble(render_key(path), small, union.shards[render_key(path)], views, faults, warn=warn)
    told = msgpack.unpackb(peers.broadcast(None if gathered is None else msgpack.packb(faults[:100])))
    if told:
        raise PeerError(told[0])


def _assemble(
    key: str, small: SmallTensor, shards: Sequence[Shard], views: list[memoryview], faults: list[str], *, warn: bool
) -> bytes:
    dtype = raw_dtype(small.spec.item_bytes)
    array = np.zeros(small.spec.shape, dtype)
    covered = np.zeros(small.spec.shape, bool)
    for shard in shards:
        for piece in shard.pieces:
            num_bytes = piece.num_elements * small.spec.item_bytes
            parts = {rank: bytes(views[rank][:num_bytes]) for rank in shard.ranks}
            for rank in shard.ranks:
                views[rank] = views[rank][num_bytes:]
            others = [rank for rank, part in parts.items() if part != parts[shard.ranks[0]]]
            if others:
                _diverged(f"{key}: ranks {others} hold other bytes than rank {shard.ranks[0]}", faults, warn=warn)
            array[piece.slices] = np.frombuffer(parts[shard.ranks[0]], dtype).reshape(piece.sizes)
            covered[piece.slices] = True
    if not covered.all():
        faults.append(f"{key}: the ranks do not hold all of {small.spec} between them: commit from every rank")
    return array.tobytes()


def _diverged(text: str, faults: list[str], *, warn: bool) -> None:
    if warn:
        _LOGGER.warning("%s; the commit holds what the lowest rank has", text)
    else:
        faults.append(f"{text}: find out why, or wrap what each rank is to keep in PerRank")
