"""Takes damaged packs out of use: what is intact in them is written elsewhere, then they are moved aside.

    r1  gc/state is read, before anything else is looked at. A collection that is not idle is ended first:
        condemned: swap to deleting with an EMPTY list, then to idle. Nothing is deleted, so that needs no fence
        deleting: what is on the list is deleted. That was decided: fenced, rescued, or (by a repair) copied
    r2  every intact entry of the damaged packs whose object is not whole in an undamaged pack is copied
        into new packs; of a raw chunk with damaged leaves, the intact leaves
    r3  the copies are read back and verified, and the damaged packs copied to damaged/..., as they are
    r4  swap gc/state: idle g -> condemned g+1, the damaged packs        (fails if a collection began since r1)
    r5  fence the refs; swap gc/state -> deleting; delete the packs; swap -> idle

Invariant: nothing intact is ever gone: before r4 it stands in a new pack or in an undamaged one that no
collection condemned, because gc/state did not change since r1. Dying anywhere leaves the damaged packs
in place, or copies of all that is intact in them; the next repair goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from cas_ckpt.config import CONDEMNED, DELETING, IDLE, GcState, Generation, require_current, swap_gc_state
from cas_ckpt.errors import (
    ConflictError,
    CorruptionError,
    InternalError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from cas_ckpt.index.catalog import Index
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import Digest, leaf_digest, object_id
from cas_ckpt.objects.kinds import ObjectKind
from cas_ckpt.objects.node import Node
from cas_ckpt.objects.pack import ExtentInfo, decode_entry_header
from cas_ckpt.ops.fsck_records import ASIDE_PREFIX
from cas_ckpt.ops.repair_objects import PackSink, kept
from cas_ckpt.pack_index import read_pack
from cas_ckpt.refs import Ref, RefKind, RefStore
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.pack_writer import EncodedChunk, WrittenPack
from cas_ckpt.transfer.scan import ExtentScanner, ScanUnit

COPY_BYTES = 1024 * 1024
"""A damaged pack is copied aside in pieces of this size; a piece that cannot be read becomes zeros."""


@dataclass(slots=True)
class Salvage:
    """Copies what is intact of damaged packs into a sink.

    Attributes:
        wanted: Ids of the objects that have to be copied.
    """

    store: Store
    sink: PackSink
    wanted: set[bytes]
    num_copied: int = 0
    _covered: dict[bytes, set[int]] = field(default_factory=dict)

    def copy(self, pack: str, entries: Iterable[ExtentInfo]) -> None:
        """Copy the intact ones of `entries`."""
        for info in sorted(entries, key=lambda entry: entry.offset):
            if info.digest in self.wanted:
                try:
                    self._copy_entry(pack, info)
                except (CorruptionError, NotFoundError, StorageError):
                    continue  # damaged: what is lost with it was told

    def _copy_entry(self, pack: str, info: ExtentInfo) -> None:
        header = self.store.get_range(pack, info.offset, info.header_bytes)
        found, digests = decode_entry_header(header, offset=info.offset)
        payload = bytes(self.store.get_range(pack, info.offset + info.header_bytes, found.stored_bytes))
        if found.digest != info.digest:
            raise CorruptionError(f"{pack} at {info.offset}: another object than the directory says")
        if found.kind != ObjectKind.CHUNK:
            if object_id(found.kind.label, payload) != found.digest:
                raise CorruptionError(f"{pack} at {info.offset}: a damaged node")
            self.sink.add_node(Node(found.kind, found.digest, payload))
            self.wanted.discard(found.digest)
            self.num_copied += 1
            return
        covered = self._covered.setdefault(found.digest, set())
        for extent in _intact_parts(found, digests, payload, covered):
            self.num_copied += 1
            covered.update(range(extent.first, extent.first + extent.count))
            self.sink.add_chunk(
                EncodedChunk(
                    found.digest, found.num_bytes, found.leaf_bytes, digests, extent.encoding, extent.payload,
                    release=kept, leaves=(extent.first, extent.count),
                )
            )  # fmt: skip
        if len(covered) == found.chunk_leaves:
            self.wanted.discard(found.digest)
            del self._covered[found.digest]


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of intact leaves, as it is to be written."""

    first: int
    count: int
    encoding: int
    payload: bytes


def _intact_parts(
    info: ExtentInfo, digests: Sequence[Digest], payload: bytes, covered: Collection[int]
) -> list[_Part]:
    """The runs of leaves of an extent that are intact and not in `covered`; the whole of it, if that can be."""
    plain = memoryview(payload)
    if info.encoding != codec.RAW:
        plain = memoryview(codec.decode_extent(info.encoding, payload, num_bytes=info.plain_bytes))
    leaf, first = info.leaf_bytes, info.first_leaf
    good = [
        first + at not in covered and leaf_digest(plain[at * leaf : (at + 1) * leaf]) == digests[first + at]
        for at in range(info.num_leaves)
    ]
    if all(good):
        return [_Part(first, info.num_leaves, info.encoding, payload)]
    runs: list[list[int]] = []
    for at, intact in enumerate(good):
        if intact and runs and runs[-1][1] == at:
            runs[-1][1] = at + 1
        elif intact:
            runs.append([at, at + 1])
    return [
        _Part(first + start, stop - start, int(codec.RAW), bytes(plain[start * leaf : stop * leaf]))
        for start, stop in runs
    ]


def add_verified(store: Store, index: Index, written: Sequence[WrittenPack]) -> None:
    """Read back the packs that were written, every byte, and bring their rows into the index.

    Raises:
        CorruptionError: the medium gives other bytes than were written: nothing may be removed.
    """
    scanner = ExtentScanner(store)
    for pack in written:
        record = read_pack(store, pack.key)
        entries = sorted(record.entries, key=lambda entry: entry.offset)
        bad = scanner.check(ScanUnit(pack.key, entries))
        if bad:
            raise CorruptionError(f"{pack.key} was written a moment ago and is damaged already: {bad[0].what}")
        index.add_packs([record])


# --- out of the way -----------------------------------------------------------------------


def end_cycle(store: Store, state: GcState) -> GcState:
    """Bring gc/state from `state` to idle: what is only condemned stays, what is being deleted is deleted.

    A collector that is alive cannot go on from "condemned" after that, for the record that it expects is gone.

    Raises:
        ConflictError: somebody else goes on with it. StorageError: a pack cannot be deleted.
    """
    if state.phase == CONDEMNED:
        state = _swapped(store, state, state.generation, DELETING, ())
    return _finish(store, state) if state.phase == DELETING else state


def _exists(store: Store, key: str) -> bool:
    try:
        store.head(key)
        return True
    except NotFoundError:
        return False


def set_aside(store: Store, key: str, size: int) -> None:
    """Copy the pack `key`, as it is, to `damaged/...`; again if a copy was left unfinished. It is not deleted."""
    target = ASIDE_PREFIX + key
    try:
        if store.head(target) == size:
            return
        store.delete(target)
    except NotFoundError:
        pass  # no copy was begun yet
    with store.open_writer(target) as writer:
        for start in range(0, size, COPY_BYTES):
            length = min(COPY_BYTES, size - start)
            try:
                piece = bytes(store.get_range(key, start, length))
            except (CorruptionError, StorageError):
                piece = bytes(length)
            writer.write(piece)
        writer.commit()


def retire(store: Store, state: GcState, packs: Sequence[str]) -> None:
    """r4 and r5: condemn `packs`, fence, delete.

    Args:
        state: Idle, as it was before anything was copied.
    Raises:
        ConflictError: a garbage collection began meanwhile: nothing was deleted; repair again.
    """
    there = [pack for pack in packs if _exists(store, pack)]
    if there:
        state = _swapped(store, state, state.generation.next(), CONDEMNED, there)
        _fence(store, state)
        _finish(store, _swapped(store, state, state.generation, DELETING, there))


def _finish(store: Store, state: GcState) -> GcState:
    for pack in state.condemned:
        store.delete(pack)
        if _exists(store, pack):
            raise StorageError(f"{pack} is still there after it was deleted: allow deletion, then repair again")
    return _swapped(store, state, state.generation, IDLE, ())


def _swapped(store: Store, state: GcState, generation: Generation, phase: str, packs: Sequence[str]) -> GcState:
    try:
        return swap_gc_state(store, state, generation=generation, phase=phase, condemned=packs)
    except ConflictError as error:
        raise ConflictError(
            "a garbage collection went on while packs were repaired; nothing intact was removed: repair again"
        ) from error


def _fence(store: Store, state: GcState) -> None:
    """Bring every ref to the generation of `state`.

    One that is damaged stays as it is: whatever is swapped onto it needs nothing that the copies do not hold.
    """
    refs = RefStore(store)
    for kind in RefKind:
        for key in [key for key, _ in store.list(kind.value) if key.endswith(".ref")]:
            _fence_ref(refs, kind, key.removeprefix(kind.value).removesuffix(".ref"), state)


def _fence_ref(refs: RefStore, kind: RefKind, name: str, state: GcState) -> None:
    for _ in range(100):
        try:
            ref: Ref = refs.get(kind, name)
        except (CorruptionError, NotFoundError, InvalidInputError):
            return
        if ref.generation == state.generation:
            return
        require_current(state, ref.generation, key=ref.key)
        try:
            refs.fence(ref, generation=state.generation, log=ref.log)
            return
        except ConflictError:
            continue
    raise InternalError(f"{kind.label} {name!r} moved a hundred times while it was fenced")
