"""The beginning of common work: all ranks find out that they mean the same, and what they have together.

Ranks exchange digests first; whole descriptions only where they differ, each distinct one once.
Collective. Invariant: every rank comes to the same union, or all raise.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from blake3 import blake3

from cas_ckpt.errors import PeerError
from cas_ckpt.layout.holdings import Shard, holdings
from cas_ckpt.objects.spec import raw_dtype
from cas_ckpt.objects.state import Container, Path, TensorItem, render_key, walk
from cas_ckpt.ops.description import (
    Described,
    DescribedTensor,
    ValueEncoder,
    describe,
    pack_description,
    unpack_description,
)
from cas_ckpt.ops.request import CommitFields, CommitRequest
from cas_ckpt.ops.union import Ranks, Union, small_divided, unite
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.transfer.peers import Peers

_SEED_BYTES = 16


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know of the commit that they begin.

    Attributes:
        generation: gc generation of every rank's index, or None: they differ, begin anew.
        seed: Random bytes, the same on every rank.
        shares_index: This rank's index is the very one that rank 0 writes.
    """

    union: Union
    generation: int | None
    seed: bytes
    shares_index: bool


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
    meshes, rows = pack_description(described)
    asked = _asked(handle, request, fields)
    header = {
        "store": handle.config.store_id,
        "asked": _digest(asked),
        "meshes": _digest(meshes),
        "state": _digest(rows),
        "generation": handle.begin_writing(),
        "index": f"{socket.gethostname()} {handle.index.place}",
        "seed": secrets.token_bytes(_SEED_BYTES),
    }
    told = [msgpack.unpackb(data) for data in peers.gather_all(msgpack.packb(header))]
    _check_same(told, "store", "opened another repository than")
    _check_asked(told, asked, peers)
    distinct = _exchange(told, described, meshes, rows, peers)
    own = {path: item for path, item in walk(state) if isinstance(item, TensorItem)}
    union = unite(
        distinct, own, small=_gather_small(distinct, own, peers), warn=request.on_divergence == "warn"
    )
    generations = {each["generation"] for each in told}
    shared = told[peers.rank]["index"] == told[0]["index"] and ":memory:" not in handle.index.place
    same = shared and "in memory" not in handle.index.place
    return Agreement(union, generations.pop() if len(generations) == 1 else None, told[0]["seed"], same)


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
        "parents": [bytes(parent) for parent in request.other_parents],
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
    differing = next(name for name in fields[0] if fields[rank][name] != fields[0][name])
    raise PeerError(
        f"the ranks disagree on the {differing}: rank 0 says {fields[0][differing]!r:.200}, rank {rank} says "
        f"{fields[rank][differing]!r:.200}: call commit with the same arguments on all ranks", others,
    )  # fmt: skip


def _exchange(
    told: Sequence[Mapping[str, Any]], described: Sequence[Described], meshes: bytes, rows: bytes, peers: Peers
) -> list[tuple[Ranks, Sequence[Described]]]:
    """Each distinct description with the ranks that gave it."""
    by_digest: dict[tuple[bytes, bytes], list[int]] = {}
    for rank, each in enumerate(told):
        by_digest.setdefault((each["meshes"], each["state"]), []).append(rank)
    if len(by_digest) == 1:
        return [(tuple(range(peers.size)), described)]
    all_meshes = _distinct([each["meshes"] for each in told], meshes, peers)
    all_rows = _distinct([each["state"] for each in told], rows, peers)
    return [
        (tuple(ranks), described if peers.rank in ranks else unpack_description(all_meshes[one], all_rows[other]))
        for (one, other), ranks in by_digest.items()
    ]


def _distinct(digests: Sequence[bytes], own: bytes, peers: Peers) -> dict[bytes, bytes]:
    """Digest -> bytes, of what ranks have; the lowest rank that has it sends it."""
    if len(set(digests)) == 1:
        return {digests[0]: own}
    first = digests.index(digests[peers.rank]) == peers.rank
    sent = peers.gather_all(own if first else b"")
    return {digest: sent[digests.index(digest)] for digest in digests}


def _gather_small(
    distinct: Sequence[tuple[Ranks, Sequence[Described]]], own: Mapping[Path, TensorItem], peers: Peers
) -> dict[Path, bytes]:
    """The bytes of small tensors that are divided over ranks, on rank 0; zeros elsewhere, where nobody looks."""
    told: dict[Path, list[DescribedTensor]] = {}
    for _, described in distinct:
        for entry in small_divided(described):
            told.setdefault(entry.path, []).append(entry)
    if not told:
        return {}
    shards = {
        path: holdings(entries[0].spec.shape, [entry.placement for entry in entries if entry.placement])
        for path, entries in told.items()
    }
    message = b"".join(
        own[path].source.read(piece).tobytes()
        for path, found in shards.items()
        for shard in found
        if shard.ranks[0] == peers.rank and path in own
        for piece in shard.pieces
    )
    gathered = peers.gather(message)
    if gathered is None:
        return {path: bytes(entries[0].spec.num_bytes) for path, entries in told.items()}
    views = [memoryview(data) for data in gathered]
    return {path: _assemble(entries[0], shards[path], views) for path, entries in told.items()}


def _assemble(entry: DescribedTensor, shards: Sequence[Shard], views: list[memoryview]) -> bytes:
    dtype = raw_dtype(entry.spec.item_bytes)
    array = np.zeros(entry.spec.shape, dtype)
    covered = np.zeros(entry.spec.shape, bool)
    for shard in shards:
        for piece in shard.pieces:
            rank, num_bytes = shard.ranks[0], piece.num_elements * entry.spec.item_bytes
            part, views[rank] = views[rank][:num_bytes], views[rank][num_bytes:]
            array[piece.slices] = np.frombuffer(part, dtype).reshape(piece.sizes)
            covered[piece.slices] = True
    if not covered.all():
        key = render_key(entry.path)
        raise PeerError(f"{key}: the ranks do not hold all of {entry.spec} between them: commit from every rank")
    return array.tobytes()
