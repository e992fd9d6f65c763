"""A history of a thousand commits as packs that an index takes, without a tensor and without a store.

Duty: shapes alone. A state is 200 frozen tensors that all commits share, 4 that each commit changes
and 40 of which each commit changes one, so that a commit brings 2,000 new chunks; its root names all
of them. A data pack and a meta pack for each commit. Knows nothing of questions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from cas_ckpt.index.rows import CommitRow, PackRecord
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.pack import ExtentInfo, PackKind

FROZEN, FROZEN_CHUNKS = 200, 10
HOT, TURNING, CHUNKS = 4, 40, 400
PAGE_CHUNKS = 200
CHUNK_BYTES = 4 << 20
STORED_BYTES = 3 << 20


def digest(*names: object) -> Digest:
    """An id that is the same for the same names."""
    return Digest(hashlib.blake2b(repr(names).encode(), digest_size=32).digest())


@dataclass(frozen=True, slots=True)
class Tensor:
    """One version of one tensor: when it was last changed is all there is to it."""

    name: str
    version: int
    num_chunks: int

    @property
    def node(self) -> Digest:
        """Id of its node."""
        return digest("tensor", self.name, self.version)

    def chunks(self) -> list[Digest]:
        """Ids of its chunks."""
        return [digest("chunk", self.name, self.version, number) for number in range(self.num_chunks)]

    def pages(self) -> list[tuple[Digest, list[Digest]]]:
        """(page, its chunks)."""
        chunks = self.chunks()
        starts = range(0, len(chunks), PAGE_CHUNKS)
        return [(digest("page", self.name, self.version, at), chunks[at : at + PAGE_CHUNKS]) for at in starts]


def changed_by(number: int) -> list[Tensor]:
    """The tensors that commit `number` brings; the first one brings all."""
    hot = [Tensor(f"hot {each}", number, CHUNKS) for each in range(HOT)]
    if number:
        return [*hot, Tensor(f"turning {number % TURNING}", number, CHUNKS)]
    frozen = [Tensor(f"frozen {each}", 0, FROZEN_CHUNKS) for each in range(FROZEN)]
    return [*hot, *frozen, *(Tensor(f"turning {each}", 0, CHUNKS) for each in range(TURNING))]


def commit_id(number: int) -> Digest:
    """Id of a commit."""
    return digest("commit", number)


def root_id(number: int) -> Digest:
    """Id of its root."""
    return digest("root", number)


LAYOUT = digest("layout")


def packs_of(number: int) -> list[PackRecord]:
    """The data pack and the meta pack of a commit."""
    tensors = changed_by(number)
    return [_data_pack(number, tensors), _meta_pack(number, tensors)]


def state_of(number: int) -> list[Tensor]:
    """All tensors of a commit."""
    hot = [Tensor(f"hot {each}", number, CHUNKS) for each in range(HOT)]
    frozen = [Tensor(f"frozen {each}", 0, FROZEN_CHUNKS) for each in range(FROZEN)]
    changes = [number - (number - each) % TURNING for each in range(TURNING)]  # the last commit whose turn it was
    return [*hot, *frozen, *(Tensor(f"turning {each}", max(0, last), CHUNKS) for each, last in enumerate(changes))]


def _data_pack(number: int, tensors: list[Tensor]) -> PackRecord:
    chunks = [chunk for tensor in tensors for chunk in tensor.chunks()]
    entries = [
        ExtentInfo(chunk, ObjectKind.CHUNK, 3, CHUNK_BYTES, STORED_BYTES, 65_536, 0, 64, at * CHUNK_BYTES, 2_200)
        for at, chunk in enumerate(chunks)
    ]
    return PackRecord(f"packs/data-{number:05}", PackKind.DATA, len(chunks) * CHUNK_BYTES, entries)


def _meta_pack(number: int, tensors: list[Tensor]) -> PackRecord:
    edges: list[tuple[Digest, list[Digest]]] = [(root_id(number), [tensor.node for tensor in state_of(number)])]
    kinds = {root_id(number): ObjectKind.TREE}
    for tensor in tensors:
        pages = tensor.pages()
        edges += [(tensor.node, [page for page, _ in pages]), *pages]
        kinds |= {tensor.node: ObjectKind.TENSOR} | {page: ObjectKind.CHUNK_PAGE for page, _ in pages}
    if not number:
        kinds[LAYOUT] = ObjectKind.LAYOUT
    row = _commit(number)
    kinds[row.digest] = ObjectKind.COMMIT
    entries = [
        ExtentInfo(each, kind, 0, 8_000, 8_000, 0, 0, 0, at * 8_100, 90)
        for at, (each, kind) in enumerate(kinds.items())
    ]
    return PackRecord(f"packs/meta-{number:05}", PackKind.META, len(entries) * 8_100, entries, edges, [row])


def _commit(number: int) -> CommitRow:
    parents = (commit_id(number - 1),) if number else ()
    return CommitRow(
        commit_id(number), root_id(number), parents, LAYOUT, f"step {number}", "Ann <ann@example.com>",
        1_700_000_000_000_000 + number * 10**9, number, None, {"loss": 1 / (1 + number)}, None, {"new_bytes": 10**9},
    )  # fmt: skip
