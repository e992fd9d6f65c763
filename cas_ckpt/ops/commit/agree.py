"""The beginning of a common commit: all ranks find out that they mean the same, and what they have together.

    1. every rank reports what it was asked to do and how it sees the repository; digests stand for what it holds
    2. all of them see one store, not copies of it (`prove_one_store`)
    3. descriptions are exchanged where they differ, each distinct one once, and merged (merge_states.py)

A copy (a disk of each node under one path, restored from one image) has the same store id and the same packs, so
nothing that was written before tells it apart; only what is written now does. The packs that ranks have written are
looked at again before rank 0 publishes (`missing_packs`).

Collective. Invariant: every rank comes to the same merged state, or all raise; a rank on a copy makes all ranks raise
before the branch moves.

Every `gather` of a commit is followed by one message of rank 0 (`Outcome`): continue, raise an error, or the commit is
made. So a rank that has given what rank 0 gathers can hear what came of it though it does nothing more itself
(worker.py: its worker died). Whoever hears a refusal raises it and reports nothing, since all ranks do.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgpack
import numpy as np
from blake3 import blake3

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import Session
from cas_ckpt.core.records import CommitInfo, commit_row, info_from_row
from cas_ckpt.core.refs import Generation
from cas_ckpt.errors import CorruptionError, NotFoundError, PeerError
from cas_ckpt.layout.holdings import one_replica
from cas_ckpt.memory import available_bytes, current_limits, default_budget
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.spec import raw_dtype
from cas_ckpt.objects.state import Container, Path, TensorItem, render_key, walk
from cas_ckpt.ops.commit.merge_states import (
    Described,
    DescribedContainer,
    DescribedTensor,
    MergedState,
    Ranks,
    SmallTensor,
    describe,
    merge_states,
    pack_description,
    unpack_description,
)
from cas_ckpt.ops.commit.request import CommitFields, CommitRequest
from cas_ckpt.parallel.peers import Call, Peers, compare_calls, distinct_messages, named
from cas_ckpt.parallel.workers import run_all
from cas_ckpt.storage.store import exists
from cas_ckpt.transfer.pack_writer import WrittenPack


class Outcome(IntEnum):
    """The report of rank 0 to the others."""

    COMMITTED = 0
    BEGIN_ANEW = 1
    REFUSED = 2
    GO_ON = 3


Made = tuple[CommitInfo, str]
"""A commit, and the branch that it went to."""


def simple_message(outcome: Outcome) -> bytes:
    """BEGIN_ANEW or GO_ON, with which nothing else is said."""
    message: bytes = msgpack.packb([outcome])
    return message


def refusal_message(refusal: PeerError) -> bytes:
    """All ranks are to raise this."""
    message: bytes = msgpack.packb([Outcome.REFUSED, str(refusal), refusal.ranks])
    return message


def made_message(digest: Digest, data: bytes, branch: str) -> bytes:
    """The commit is made: its id, its bytes, and the branch that names it."""
    message: bytes = msgpack.packb([Outcome.COMMITTED, digest, data, branch])
    return message


def read_outcome(message: bytes) -> Outcome | Made | PeerError:
    """Decode a message: the commit that is made, the error that all ranks raise, or BEGIN_ANEW or GO_ON.

    Raises:
        CorruptionError: it says nothing of that kind.
    """
    match msgpack.unpackb(message):
        case [Outcome.COMMITTED, digest, data, branch]:
            return info_from_row(commit_row(Digest(digest), data)), branch
        case [Outcome.REFUSED, text, ranks]:
            return PeerError(text, tuple(ranks))
        case [(Outcome.BEGIN_ANEW | Outcome.GO_ON) as outcome]:
            return Outcome(outcome)
    raise CorruptionError(
        "what rank 0 tells of the commit cannot be read: run the same version of cas_ckpt on all ranks"
    )


def broadcast_outcome(peers: Peers, message: bytes | None) -> bytes:
    """Broadcast `message` of rank 0; None on the others. Returns the message. Collective.

    Raises:
        PeerError: not all have heard it; says so if the commit is made.
    """
    try:
        return peers.broadcast(message)
    except PeerError as error:
        said = None if message is None else read_outcome(message)
        if isinstance(said, tuple):
            raise outcome_not_received(*said, error) from error
        raise


def outcome_not_received(made: CommitInfo, branch: str, lost: PeerError) -> PeerError:
    """Rank 0 has made a commit, and `lost` kept the others from hearing of it."""
    return PeerError(
        f"commit {short(bytes.fromhex(made.id))} is made and the branch {branch} names it, but not all ranks have "
        f"heard of it: {lost}; go on from there",
        lost.ranks,
    )


_LOGGER = logging.getLogger("cas_ckpt")

_THREADS = 8
"""Packs that are asked for at the same time."""

_SEED_BYTES = 16


@dataclass(frozen=True, slots=True)
class Agreement:
    """The facts on which all ranks agree before a commit.

    Attributes:
        generation: gc generation of every rank's index, or None: they differ, begin anew.
        seed: Random bytes, the same on every rank.
        shares_index: This rank's index is the very one that rank 0 writes.
        num_neighbours: Ranks on this machine, this one included: they share its cores.
        free_bytes: What the rank that has least free of its budget of memory has, beside what it holds throughout.
    """

    merged: MergedState
    generation: Generation | None
    seed: bytes
    shares_index: bool
    num_neighbours: int
    free_bytes: int


def agree(
    handle: RepositoryHandle, state: Container, request: CommitRequest, fields: CommitFields, peers: Peers,
    *, held_bytes: int,
) -> Agreement:  # fmt: skip
    """Bring all ranks' states together.

    Args:
        held_bytes: What this rank holds of its budget of memory throughout.
    Raises:
        PeerError: ranks disagree on the repository, the request or the state; names what and who.
    """
    described = describe(state, allow_pickle=request.allow_pickle)
    placements, rows = pack_description(described)
    begun = handle.begin_writing()
    header = {
        "store": handle.config.store_id,
        "handle": handle.instance,
        "seen_by": handle.seen_by,
        "called_at": request.called_at,
        "placements": blake3(placements).digest(),
        "state": blake3(rows).digest(),
        "generation": [begun.number, begun.nonce],
        "host": socket.gethostname(),
        "index": handle.index.place,
        "memory": [current_limits().memory_bytes, available_bytes(), held_bytes],
        "seed": secrets.token_bytes(_SEED_BYTES),
    }
    reports = compare_calls(peers, _call(request, fields), header)
    others = tuple(rank for rank, each in enumerate(reports) if each["store"] != reports[0]["store"])
    if others:
        raise PeerError(f"{named(others)} opened another repository than rank 0: open the same on all ranks", others)
    prove_one_store(handle, [(each["handle"], each["seen_by"]) for each in reports], peers)
    distinct = _exchange(reports, described, placements, rows, peers)
    if not _is_compared(distinct):
        _check_place(reports)
    tensors = {path: item for path, item in walk(state) if isinstance(item, TensorItem)}
    warn = request.on_divergence == "warn"
    merged = merge_states(distinct, tensors, warn=warn)
    _gather_small(merged, tensors, peers, warn=warn)
    generations = {Generation(*each["generation"]) for each in reports}
    own = reports[peers.rank]
    shares = (own["host"], own["index"]) == (reports[0]["host"], reports[0]["index"]) and not handle.index.in_memory
    on_host = Counter(each["host"] for each in reports)
    free_bytes = min(
        (default_budget(left, num_ranks=on_host[each["host"]]) if given is None else given) - held
        for each in reports
        for given, left, held in [each["memory"]]
    )
    generation = generations.pop() if len(generations) == 1 else None
    return Agreement(merged, generation, reports[0]["seed"], shares, on_host[own["host"]], free_bytes)


def _call(request: CommitRequest, fields: CommitFields) -> Call:
    """The part of the request that must be equal on all ranks; the author is rank 0's, threads are each rank's own."""
    frozen = request.frozen
    arguments = {
        "branch": request.branch,
        "create": request.create,
        "orphan": request.orphan,
        "message": fields.message,
        "step": fields.step,
        "metrics": sorted(fields.metrics.items()),
        "meta": fields.meta,
        "on_conflict": request.on_conflict,
        "parents": [*map(bytes, request.other_parents), *fields.parents],
        "came_from": fields.came_from,
        "lineage": fields.lineage,
        "provenance": fields.provenance,
        "frozen": [frozen] if isinstance(frozen, str) else frozen,
        "frozen_check": request.frozen_check,
        "frozen_audit": request.frozen_audit,
        "allow_pickle": request.allow_pickle,
        "replica_check": request.replica_check,
        "replica_audit": request.replica_audit,
        "on_divergence": request.on_divergence,
    }
    return Call(request.verb, arguments)


def _is_compared(distinct: Sequence[tuple[Ranks, Sequence[Described]]]) -> bool:
    """Whether every rank has the whole state, so that one which commits another state is found by its bytes."""
    return len(distinct) == 1 and not any(
        (isinstance(each, DescribedTensor) and each.placement is not None)
        or (isinstance(each, DescribedContainer) and each.kind == "ranks")
        for each in distinct[0][1]
    )


def _check_place(reports: Sequence[Mapping[str, Any]]) -> None:
    """Refuse commits from several places of the program: of two that one rank makes in another order, each is half."""
    places: dict[str, list[int]] = {}
    for rank, each in enumerate(reports):
        places.setdefault(each["called_at"], []).append(rank)
    if len(places) == 1:
        return
    usual = max(places, key=lambda place: len(places[place]))
    said = ", ".join(f"{named(ranks)}: {place}" for place, ranks in places.items())
    raise PeerError(
        f"commit is called from other lines of the program on some ranks ({said}), and the ranks do not all "
        "hold the whole state: if these are two commits, make them in the same order on all ranks; if they are one, "
        "call commit from one line",
        tuple(rank for rank, each in enumerate(reports) if each["called_at"] != usual),
    )


def _exchange(
    reports: Sequence[Mapping[str, Any]], described: Sequence[Described], placements: bytes, rows: bytes, peers: Peers
) -> list[tuple[Ranks, Sequence[Described]]]:
    """Each distinct description with the ranks that gave it."""
    by_digest: dict[tuple[bytes, bytes], list[int]] = {}
    for rank, each in enumerate(reports):
        by_digest.setdefault((each["placements"], each["state"]), []).append(rank)
    if len(by_digest) == 1:
        return [(tuple(range(peers.size)), described)]
    all_placements = distinct_messages([each["placements"] for each in reports], placements, peers)
    all_rows = distinct_messages([each["state"] for each in reports], rows, peers)
    return [
        (tuple(ranks), described if peers.rank in ranks else unpack_description(all_placements[one], all_rows[other]))
        for (one, other), ranks in by_digest.items()
    ]


def _gather_small(merged: MergedState, own: Mapping[Path, TensorItem], peers: Peers, *, warn: bool) -> None:
    """Fill in, on rank 0, the bytes of small tensors that are divided over ranks; replicas are compared.

    On the other ranks, where nobody looks at them, they stay zeros.
    """
    if not merged.small:
        return
    message = b"".join(
        np.ascontiguousarray(own[path].source.read(piece)).tobytes()
        for path in merged.small
        for shard in merged.shards[render_key(path)]
        if peers.rank in shard.ranks and path in own
        for piece in shard.pieces
    )
    gathered = peers.gather(message)
    told = None
    if gathered is not None:
        views = [memoryview(data) for data in gathered]
        faults: list[PeerError] = []
        for path, small in merged.small.items():
            small.data = _assemble(path, small, merged, views, faults, warn=warn)
        told = refusal_message(faults[0]) if faults else simple_message(Outcome.GO_ON)
    heard = read_outcome(broadcast_outcome(peers, told))
    if isinstance(heard, PeerError):
        raise heard


def _assemble(
    path: Path, small: SmallTensor, merged: MergedState, views: list[memoryview], faults: list[PeerError], *, warn: bool
) -> bytes:
    key, dtype = render_key(path), raw_dtype(small.spec.item_bytes)
    replica = one_replica(merged.placements(key))
    array = np.zeros(small.spec.shape, dtype)
    covered = np.zeros(small.spec.shape, bool)
    for shard in merged.shards[key]:
        kept = min(replica.intersection(shard.ranks), default=shard.ranks[0])
        for piece in shard.pieces:
            num_bytes = piece.num_elements * small.spec.item_bytes
            parts = {rank: bytes(views[rank][:num_bytes]) for rank in shard.ranks}
            for rank in shard.ranks:
                views[rank] = views[rank][num_bytes:]
            others = [rank for rank, part in parts.items() if part != parts[kept]]
            if others:
                text = f"{key}: {named(others)} hold other bytes than rank {kept}"
                _diverged(text, others, f"rank {kept}", faults, warn=warn)
            part, known = np.frombuffer(parts[kept], dtype).reshape(piece.sizes), covered[piece.slices]
            if part[known].tobytes() != array[piece.slices][known].tobytes():
                text = f"{key}: rank {kept} holds other bytes than a rank whose part overlaps with its own"
                _diverged(text, [kept], "that rank", faults, warn=warn)
            array[piece.slices][~known] = part[~known]
            covered[piece.slices] = True
    if not covered.all():
        faults.append(
            PeerError(f"{key}: the ranks do not hold all of {small.spec} between them: commit from every rank", ())
        )
    return array.tobytes()


def _diverged(text: str, ranks: list[int], kept: str, faults: list[PeerError], *, warn: bool) -> None:
    if warn:
        _LOGGER.warning("%s; the commit holds what %s has", text, kept)
    else:
        remedy = "wrap what each rank is to keep in PerRank (in dcp.save: put the rank into its key)"
        faults.append(PeerError(f"{text}: find out why, or {remedy}", tuple(ranks)))


# --- one store, not copies of it ---------------------------------------------------------------


def prove_one_store(handle: RepositoryHandle, handles: Sequence[tuple[bytes, bytes]], peers: Peers) -> None:
    """Rank 0 writes a record under a random name, and every rank sees it; once for the same handles.

    Args:
        handles: `RepositoryHandle.instance` and `.seen_by` of every rank, by rank.
    Raises:
        PeerError: on every rank; names those that do not see the record.
    """
    all_handles = blake3(b"".join(instance for instance, _ in handles)).digest()
    if peers.size == 1 or all(seen_by == all_handles for _, seen_by in handles):
        return
    with Session(handle.store) as session:  # its record does no harm should this process die
        if peers.rank == 0:
            session.announce()
        key, url = msgpack.unpackb(peers.broadcast(msgpack.packb([session.key, handle.store.url])))
        seen = peers.gather_all(b"1" if exists(handle.store, key) else b"")
    blind = tuple(rank for rank, sees in enumerate(seen) if not sees)
    if blind:
        raise PeerError(
            f"{named(blind)} {'does' if len(blind) == 1 else 'do'} not see what rank 0 writes to {url}: what is there "
            "under this path is a copy, such as a node's own disk. Nothing was committed; give all ranks a path on a "
            "file system that they share",
            blind,
        )
    handle.seen_by = all_handles


def missing_packs(handle: RepositoryHandle, packs: Sequence[Sequence[WrittenPack]]) -> PeerError | None:
    """Packs of any rank that are not here, whole: the commit must not be published then. One request a pack."""
    written = [(rank, pack) for rank, each in enumerate(packs) for pack in each]
    faults: dict[int, str] = {}

    def ask(at: int) -> None:
        rank, pack = written[at]
        try:
            size = handle.store.head(pack.key)
            fault = f"has {size} bytes in {handle.store.url}, not {pack.size_bytes}"
        except NotFoundError:
            size, fault = -1, f"({pack.size_bytes} bytes) is not in {handle.store.url} as rank 0 sees it"
        if size != pack.size_bytes:
            faults[at] = f"{pack.key} of rank {rank} {fault}"

    run_all(range(len(written)), lambda: ask, num_threads=min(_THREADS, max(1, len(written))))
    if not faults:
        return None
    ranks = tuple(sorted({written[at][0] for at in faults}))
    more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
    return PeerError(
        f"{faults[min(faults)]}{more}: nothing was committed. Do all ranks have a path on a file system that they "
        "share, and does nobody else delete files there?",
        ranks,
    )
