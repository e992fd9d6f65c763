"""Runs a restore: first every byte is verified, then every byte is copied into place.

Invariant: no target is touched before all that is wanted was read and verified. Between the
two passes the operating system's page cache is the staging memory, so the model is never
held twice; what fell out of it is verified again on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from cas_ckpt.errors import CkptError, NotFoundError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.pack import Location
from cas_ckpt.objects.spec import Box
from cas_ckpt.objects.state import ArrayTarget
from cas_ckpt.progress import Progress, phase
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.chunk_reader import ChunkReader, Relocate, VerifiedExtent
from cas_ckpt.transfer.hashing import Array, as_raw, flat_bytes
from cas_ckpt.transfer.workers import run_all

LOOKAHEAD = 8
"""Chunks whose reading is announced to the store ahead of time."""


class StoredChunk(Protocol):
    """A chunk that is to be read: by whose name it is called in errors, where it stands, what was proven of it."""

    places: Sequence[Location]
    extents: list[VerifiedExtent]

    @property
    def key(self) -> str: ...
    @property
    def digest(self) -> Digest: ...
    @property
    def num_bytes(self) -> int: ...


C = TypeVar("C", bound=StoredChunk)


@dataclass(slots=True)
class CellCopy:
    """One cell of one tensor that wants a chunk's bytes."""

    key: str
    target: ArrayTarget
    box: Box
    item_bytes: int


@dataclass(slots=True)
class ChunkFetch:
    """A chunk, where it is stored, and every cell that wants it."""

    digest: Digest
    num_bytes: int
    copies: list[CellCopy] = field(default_factory=list)
    places: Sequence[Location] = ()
    extents: list[VerifiedExtent] = field(default_factory=list)

    @property
    def key(self) -> str:
        """The tensor that errors name."""
        return self.copies[0].key


def order_by_place(fetches: Iterable[C], located: Mapping[bytes, Sequence[Location]]) -> list[C]:
    """`fetches` with their places, in the order in which they stand in the packs.

    Raises:
        NotFoundError: a chunk is stored nowhere; names the tensor.
    """
    ordered = []
    for fetch in fetches:
        places = located.get(fetch.digest)
        if not places:
            raise NotFoundError(
                f"{fetch.key}: chunk {fetch.digest.hex()} is in no pack: repo.fsck() says which commits need it"
            )
        fetch.places = places
        ordered.append(fetch)
    return sorted(ordered, key=lambda fetch: (fetch.places[0].pack, fetch.places[0].offset))


def nothing() -> None:
    """Does nothing."""


def fetch_chunks(
    store: Store,
    fetches: Sequence[ChunkFetch],
    *,
    num_threads: int,
    progress: Progress,
    relocate: Relocate | None = None,
    on_verified: Callable[[], object] = nothing,
) -> None:
    """Verify all chunks, then fill all cells.

    Args:
        fetches: As `order_by_place` gives them.
        relocate: Asked when a pack was collected under the restore.
        on_verified: Called between the two.
    Raises:
        CorruptionError, NotFoundError: named by tensor; raised before any target was touched.
    """
    verify_chunks(store, fetches, num_threads=num_threads, progress=progress, relocate=relocate)
    on_verified()
    with phase(progress, "restoring", sum(fetch.num_bytes * len(fetch.copies) for fetch in fetches)):
        run_all(fetches, lambda: _filler(store, progress, relocate), num_threads=num_threads)


def verify_chunks(
    store: Store, fetches: Sequence[C], *, num_threads: int, progress: Progress, relocate: Relocate | None = None
) -> None:
    """Read and hash all chunks; each then has the `extents` that hold it.

    Args:
        fetches: As `order_by_place` gives them.
        relocate: Asked when a pack was collected under the restore.
    Raises:
        CorruptionError, NotFoundError: named by tensor.
    """
    with phase(progress, "verifying", sum(fetch.num_bytes for fetch in fetches)):
        run_all(_announced(store, fetches), lambda: _verifier(store, progress, relocate), num_threads=num_threads)


def _announced(store: Store, fetches: Sequence[C]) -> Iterable[C]:
    """The fetches in order, each announced to the store `LOOKAHEAD` chunks before its turn."""
    for at, fetch in enumerate(fetches):
        first = at + LOOKAHEAD if at else 0
        for ahead in fetches[first : at + LOOKAHEAD + 1]:
            place = ahead.places[0]
            store.prefetch(place.pack, place.offset, place.header_bytes + place.stored_bytes)
        yield fetch


def _verifier(store: Store, progress: Progress, relocate: Relocate | None) -> Callable[[StoredChunk], None]:
    reader = ChunkReader(store, relocate)

    def verify(fetch: StoredChunk) -> None:
        try:
            fetch.extents = reader.verify(fetch.digest, fetch.places, fetch.num_bytes)
        except CkptError as error:
            raise named(error, fetch.key) from error
        progress.advance(fetch.num_bytes)

    return verify


def named(error: CkptError, key: str) -> CkptError:
    """The same kind of error, its message headed by the tensor."""
    return type(error)(f"{key}: {error}")


def _filler(store: Store, progress: Progress, relocate: Relocate | None) -> Callable[[ChunkFetch], None]:
    reader = ChunkReader(store, relocate)
    space = np.empty(0, np.uint8)

    def fill(fetch: ChunkFetch) -> None:
        nonlocal space
        if len(space) < fetch.num_bytes:
            space = np.empty(fetch.num_bytes, np.uint8)
        for copy in fetch.copies:
            try:
                _fill_cell(reader, fetch, copy, space)
            except CkptError as error:
                raise named(error, copy.key) from error
            progress.advance(fetch.num_bytes)

    return fill


def _fill_cell(reader: ChunkReader, fetch: ChunkFetch, copy: CellCopy, space: Array) -> None:
    target = copy.target.open(copy.box)
    raw = as_raw(target, copy.item_bytes)
    if raw.flags.c_contiguous:
        reader.refill(fetch.extents, flat_bytes(raw))
    else:
        staged = space[: fetch.num_bytes]
        reader.refill(fetch.extents, staged.data)
        np.copyto(raw, staged.view(raw.dtype).reshape(raw.shape))
    copy.target.done(copy.box, target)
