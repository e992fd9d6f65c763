"""Reads nodes: small objects that stand near each other are read together, and each is verified.

Invariant: no node leaves this file whose bytes do not have its id. Knows where objects stand
only by asking.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError
from cas_ckpt.index.rows import Location
from cas_ckpt.objects.digest import Digest, object_id, short
from cas_ckpt.objects.kinds import ObjectKind
from cas_ckpt.objects.pack import coalesced
from cas_ckpt.storage.store import Store

if TYPE_CHECKING:
    from cas_ckpt.transfer.chunk_reader import Place


class Whereabouts(Protocol):
    """A store, and who knows where objects stand in it."""

    store: Store

    def locate(self, digests: Iterable[Digest]) -> Mapping[bytes, Sequence[Location]]: ...

    def relocate(self, digest: Digest, tried: Sequence[Place]) -> Sequence[Location]: ...


def read_nodes(source: Whereabouts, kind: ObjectKind, digests: Sequence[Digest]) -> dict[Digest, bytes]:
    """The bytes of many nodes of one kind, verified; near ones are read together.

    Raises:
        NotFoundError, CorruptionError.
    """
    located = source.locate(digests)
    found: dict[Digest, bytes] = {}
    for span in _spans({digest: located[digest][0] for digest in digests}):
        try:
            found.update(_read_span(source.store, kind, span))
        except (CorruptionError, NotFoundError):
            # Another copy may be intact, and the others of the span certainly are.
            found.update((digest, _read_any(source, kind, digest, located[digest])) for digest, _ in span)
    return found


def _read_span(store: Store, kind: ObjectKind, span: list[tuple[Digest, Location]]) -> dict[Digest, bytes]:
    first, last = span[0][1], span[-1][1]
    start, stop = first.offset, last.offset + last.header_bytes + last.stored_bytes
    data = memoryview(store.get_range(first.pack, start, stop - start))
    found = {}
    for digest, place in span:
        at = place.offset + place.header_bytes - start
        found[digest] = _checked(kind, digest, bytes(data[at : at + place.stored_bytes]), place)
    return found


def _read_any(source: Whereabouts, kind: ObjectKind, digest: Digest, places: Sequence[Location]) -> bytes:
    try:
        return read_copy(source.store, kind, digest, places)
    except NotFoundError:
        return read_copy(source.store, kind, digest, source.relocate(digest, places))


def read_copy(store: Store, kind: ObjectKind, digest: Digest, places: Sequence[Location]) -> bytes:
    """One node from the first of `places` that has it intact.

    Raises:
        CorruptionError, NotFoundError: none has; what was wrong first.
    """
    failure: CkptError | None = None
    for place in places:
        try:
            data = store.get_range(place.pack, place.offset + place.header_bytes, place.stored_bytes)
            return _checked(kind, digest, bytes(data), place)
        except (CorruptionError, NotFoundError) as error:
            failure = failure or error
    raise failure or NotFoundError(
        f"{kind.label} {short(digest)} is in no pack: it was collected, or never was here"
    )


def _checked(kind: ObjectKind, digest: Digest, data: bytes, place: Location) -> bytes:
    if object_id(kind.label, data) != digest:
        raise CorruptionError(
            f"{kind.label} {short(digest)} in {place.pack} at offset {place.offset}: "
            "the stored bytes do not have this id: restore it from a copy"
        )
    return data


def _spans(places: Mapping[Digest, Location]) -> list[list[tuple[Digest, Location]]]:
    """Objects grouped so that each group is one short read of one pack."""
    ordered = sorted(places.items(), key=lambda item: (item[1].pack, item[1].offset))
    by_pack = (list(group) for _, group in groupby(ordered, key=lambda item: item[1].pack))
    return [span for group in by_pack for span in coalesced(group, extent=lambda item: item[1])]
