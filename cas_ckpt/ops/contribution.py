"""What each rank has done for a common commit, as rank 0 needs it to finish it.

Invariant: what is unpacked is what another rank of the same job packed; ids are checked for being
complete, never for being true (the chunks prove themselves when they are read).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import msgpack
import numpy as np

from cas_ckpt.objects.digest import DIGEST_BYTES, Digest
from cas_ckpt.objects.kinds import ObjectKind
from cas_ckpt.objects.node import Node
from cas_ckpt.objects.pack import ExtentInfo, PackKind
from cas_ckpt.transfer.pack_writer import WrittenPack


@dataclass(slots=True)
class Contribution:
    """One rank's part.

    Attributes:
        named: (tensor, cell) -> id of every chunk that this rank named.
        packs: Packs that it wrote, durable.
        own: For each container of per-rank values the nodes of this rank's child; the last one is
            a tree with that child alone.
        own_totals: (bytes, entries, tensors, chunks) of those children.
        own_aliases: Keys within those children that are one tensor.
    """

    named: dict[tuple[int, int], Digest] = field(default_factory=dict)
    packs: list[WrittenPack] = field(default_factory=list)
    own: list[list[Node]] = field(default_factory=list)
    own_totals: tuple[int, int, int, int] = (0, 0, 0, 0)
    own_aliases: tuple[tuple[str, ...], ...] = ()

    def pack(self) -> bytes:
        """As bytes."""
        places = np.array(list(self.named), np.uint64).tobytes()
        packs = [[pack.key, int(pack.kind), pack.size_bytes, [_row(e) for e in pack.entries]] for pack in self.packs]
        own = [[[int(node.kind), node.data, list(node.children), node.digest] for node in nodes] for nodes in self.own]
        ids = b"".join(self.named.values())
        packed: bytes = msgpack.packb(
            [places, ids, packs, own, list(self.own_totals), self.own_aliases], unicode_errors="surrogatepass"
        )
        return packed


def unpack_contribution(data: bytes) -> Contribution:
    """What `Contribution.pack` packed, on another rank of this job."""
    places, ids, packs, own, totals, aliases = msgpack.unpackb(data, unicode_errors="surrogatepass")
    pairs = np.frombuffer(places, np.uint64).reshape(-1, 2).tolist()
    digests = [Digest(ids[start : start + DIGEST_BYTES]) for start in range(0, len(ids), DIGEST_BYTES)]
    named = {(tensor, cell): digest for (tensor, cell), digest in zip(pairs, digests, strict=True)}
    written = [
        WrittenPack(key, PackKind(kind), size, tuple(_entry(row) for row in rows)) for key, kind, size, rows in packs
    ]
    nodes = [[_node(row) for row in rows] for rows in own]
    return Contribution(named, written, nodes, tuple(totals), tuple(map(tuple, aliases)))


def _row(entry: ExtentInfo) -> list[Any]:
    return [int(value) if isinstance(value, int) else value for value in astuple(entry)]


def _entry(row: Sequence[Any]) -> ExtentInfo:
    digest, kind, *rest = row
    return ExtentInfo(Digest(digest), ObjectKind(kind), *rest)


def _node(row: Sequence[Any]) -> Node:
    kind, data, children, digest = row
    return Node(ObjectKind(kind), Digest(digest), data, tuple(Digest(child) for child in children))
