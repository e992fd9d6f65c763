"""Nodes: small objects that are read from packs, verified; those that are stored near each other are read together.

Invariant: no node leaves this file whose bytes do not have its id; where nodes are stored, it knows only by asking.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError
from cas_ckpt.objects.digest import Digest, ObjectKind, object_id, short
from cas_ckpt.objects.pack import Location, coalesced
from cas_ckpt.storage.store import Store


class Whereabouts(Protocol):
    """A store, and who knows where objects are in it."""

    store: Store

    def locate(self, digests: Iterable[Digest]) -> Mapping[bytes, Sequence[Location]]: ...

    def relocate(self, digest: Digest, tried: Collection[str]) -> Sequence[Location]: ...


def read_nodes(source: Whereabouts, kind: ObjectKind, digests: Sequence[Digest]) -> dict[Digest, bytes]:
    """The bytes of many nodes of one kind, verified; near ones are read together.

    Raises:
        NotFoundError, CorruptionError.
    """
    located = source.locate(digests)
    wanted = [(located[digest][0].pack, located[digest][0], digest) for digest in digests]
    wanted.sort(key=lambda each: (each[0], each[1].offset))
    found: dict[Digest, bytes] = {}
    for span in coalesced(wanted):
        (pack_key, first, _), (_, last, _) = span[0], span[-1]
        stop = last.offset + last.header_bytes + last.stored_bytes
        try:
            data = memoryview(source.store.get_range(pack_key, first.offset, stop - first.offset))
            for _, place, digest in span:
                at = place.offset + place.header_bytes - first.offset
                node = bytes(data[at : at + place.stored_bytes])
                if object_id(kind.label, node) != digest:
                    raise _damaged(kind, digest, place)
                found[digest] = node
        except (CorruptionError, NotFoundError):
            # Another copy may be intact, and the others of the span certainly are.
            for _, _, digest in span:
                try:
                    found[digest] = read_copy(source.store, kind, digest, located[digest])
                except NotFoundError:
                    tried = [place.pack for place in located[digest]]
                    found[digest] = read_copy(source.store, kind, digest, source.relocate(digest, tried))
    return found


def read_copy(store: Store, kind: ObjectKind, digest: Digest, places: Sequence[Location]) -> bytes:
    """One node from the first of `places` that has it intact.

    Raises:
        CorruptionError, NotFoundError: none has; what was wrong first.
    """
    failure: CkptError | None = None
    for place in places:
        try:
            data = bytes(store.get_range(place.pack, place.offset + place.header_bytes, place.stored_bytes))
            if object_id(kind.label, data) == digest:
                return data
            failure = failure or _damaged(kind, digest, place)
        except (CorruptionError, NotFoundError) as error:
            failure = failure or error
    raise failure or NotFoundError(f"{kind.label} {short(digest)} is in no pack: it was collected, or never was here")


def _damaged(kind: ObjectKind, digest: Digest, place: Location) -> CorruptionError:
    return CorruptionError(
        f"{kind.label} {short(digest)} in {place.pack} at offset {place.offset}: "
        "the stored bytes do not have this id: restore it from a copy"
    )


@contextmanager
def python_gc_paused() -> Iterator[None]:
    """Python's cyclic garbage collector does not run inside the block (in any thread); afterwards all is as before.

    For blocks that make many small objects. What is built there is a tree without cycles: searching it again
    and again finds nothing and costs up to half of the time. Reference counting goes on as always.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
