"""Cells that are named without being read: their leaves are hashed where the tensors are, on a GPU for one.

    1. Works whose source offers a `LeafHasher` are taken together, `NAMED_BYTES` at a time.
    2. It gives the digests of their leaves; they make the ids, and the index is asked which are stored, once.
    3. What is stored is named and done. Of the rest the bytes are copied, hashed on the host and written (save.py):
       nothing is ever written under an id that another's digests made.

Invariant: a work that nobody can hash comes out as it went in. Knows nothing of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from cas_ckpt.objects.digest import Digest, chunk_id
from cas_ckpt.objects.state import CellsToName, LeafHasher
from cas_ckpt.progress import Progress
from cas_ckpt.transfer.save import Claims, TensorWork

NAMED_BYTES = 4 << 30
"""Tensors that are hashed together: so many that starting a launch and asking the index cost little beside it."""


def named_in_place(
    works: Iterable[TensorWork], claims: Claims, progress: Progress, *, expect_new: bool
) -> Iterator[TensorWork]:
    """All works; of those that can be hashed where they are only the cells that are not stored are left to save.

    These are marked `is_new`. Works of other sources come in their order, the others when enough are together.

    Args:
        expect_new: Nothing is stored: nothing is hashed for this, but what was hashed before is named all the same, for
            of such a tensor single cells may be all that can be read.
    """
    waiting: list[tuple[LeafHasher, TensorWork]] = []
    num_bytes = 0
    for work in works:
        hasher = _hasher_of(work)
        if hasher is None or (expect_new and not hasher.has_hashed):
            yield work
            continue
        waiting.append((hasher, work))
        num_bytes += work.spec.num_bytes
        if num_bytes >= NAMED_BYTES:
            yield from _named(waiting, claims, progress)
            waiting, num_bytes = [], 0
    yield from _named(waiting, claims, progress)


def _hasher_of(work: TensorWork) -> LeafHasher | None:
    offer = getattr(work.source, "leaf_hasher", None)
    hasher: LeafHasher | None = None if offer is None else offer()
    return hasher


def _named(
    waiting: Sequence[tuple[LeafHasher, TensorWork]], claims: Claims, progress: Progress
) -> Iterator[TensorWork]:
    for _, found in groupby(sorted(waiting, key=lambda each: id(each[0])), key=lambda each: id(each[0])):
        pairs = list(found)
        works = [work for _, work in pairs]
        _name(pairs[0][0], works, claims, progress)
        yield from works


def _name(hasher: LeafHasher, works: Sequence[TensorWork], claims: Claims, progress: Progress) -> None:
    """Name the cells of `works` that are stored; leave to each work those that are not."""
    wanted = []
    for work in works:
        numbers = range(work.grid.num_cells) if work.cells is None else sorted(work.cells)
        wanted.append(CellsToName(work.source, work.grid, numbers, work.item_bytes))
    answer = hasher.cell_digests(wanted)
    if answer is None:
        return
    ids: list[Digest] = []
    cells: list[tuple[TensorWork, int, int]] = []
    for work, asked, digests in zip(works, wanted, answer, strict=True):
        work.chunks = work.chunks or [None] * work.grid.num_cells
        for number, joined in zip(asked.numbers, digests, strict=True):
            num_bytes = work.grid.cell_elements(number) * work.item_bytes
            digest = work.chunks[number] = chunk_id(num_bytes, joined)
            ids.append(digest)
            cells.append((work, number, num_bytes))
    missing: dict[int, set[int]] = {}
    num_bytes = sum(each for _, _, each in cells)
    for at in claims.unknown(ids):
        work, number, more = cells[at]
        missing.setdefault(id(work), set()).add(number)
        num_bytes -= more
    for work in works:
        work.cells, work.is_new = frozenset(missing.get(id(work), ())), True
    progress.advance(num_bytes)
