"""What must be true before ranks publish together: all of them see one store, not copies of it.

A copy (a disk of each node under one path, restored from one image) has the same store id and the same
packs, so nothing that was written before tells it apart; only what is written now does.
Collective. Invariant: a rank on a copy makes all ranks raise before the branch moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgpack
from blake3 import blake3

from cas_ckpt.errors import NotFoundError, PeerError
from cas_ckpt.ops.contribution import Contribution
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.sessions import Session
from cas_ckpt.transfer.blame import named
from cas_ckpt.transfer.pack_writer import WrittenPack
from cas_ckpt.transfer.peers import Peers
from cas_ckpt.transfer.workers import run_all

_THREADS = 8
"""Packs that are asked for at the same time."""


def prove_one_store(handle: RepositoryHandle, told: Sequence[tuple[bytes, bytes]], peers: Peers) -> None:
    """Rank 0 writes a record under a random name, and every rank sees it; once for the same handles.

    Args:
        told: `RepositoryHandle.instance` and `.seen_by` of every rank, by rank.
    Raises:
        PeerError: on every rank; names those that do not see the record.
    """
    together = blake3(b"".join(instance for instance, _ in told)).digest()
    if peers.size == 1 or all(seen_by == together for _, seen_by in told):
        return
    with Session(handle.store) as session:  # its record is one that nobody minds should this process die
        if peers.rank == 0:
            session.announce()
        key, url = msgpack.unpackb(peers.broadcast(msgpack.packb([session.key, handle.store.url])))
        seen = peers.gather_all(b"1" if _is_there(handle, key) else b"")
    blind = tuple(rank for rank, sees in enumerate(seen) if not sees)
    if blind:
        raise PeerError(
            f"{named(blind)} {'does' if len(blind) == 1 else 'do'} not see what rank 0 writes to {url}: what is there "
            "under this path is a copy, such as a node's own disk. Nothing was committed; give all ranks a path on a "
            "file system that they share",
            blind,
        )
    handle.seen_by = together


def _is_there(handle: RepositoryHandle, key: str) -> bool:
    try:
        handle.store.head(key)
    except NotFoundError:
        return False
    return True


def missing_packs(handle: RepositoryHandle, contributions: Sequence[Contribution]) -> PeerError | None:
    """What must not be published: packs that a rank has written and that are not here, whole. One request a pack."""
    told = [(rank, pack) for rank, each in enumerate(contributions) for pack in each.packs]
    faults: dict[int, str] = {}

    def ask(at: int) -> None:
        rank, pack = told[at]
        fault = _fault_of(handle, pack)
        if fault:
            faults[at] = f"{pack.key} of rank {rank} {fault}"

    run_all(range(len(told)), lambda: ask, num_threads=min(_THREADS, max(1, len(told))))
    if not faults:
        return None
    ranks = tuple(sorted({told[at][0] for at in faults}))
    more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
    return PeerError(
        f"{faults[min(faults)]}{more}: nothing was committed. Do all ranks have a path on a file system that they "
        "share, and does nobody else delete files there?",
        ranks,
    )


def _fault_of(handle: RepositoryHandle, pack: WrittenPack) -> str:
    try:
        size = handle.store.head(pack.key)
    except NotFoundError:
        return f"({pack.size_bytes} bytes) is not in {handle.store.url} as rank 0 sees it"
    return "" if size == pack.size_bytes else f"has {size} bytes in {handle.store.url}, not {pack.size_bytes}"
