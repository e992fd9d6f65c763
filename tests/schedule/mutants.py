"""The protocol broken in one place each: what every one of its steps is there for.

A mutant is a context manager that breaks the real code for as long as it lasts. The ten are those
of the model from which the protocol was taken: each of them loses data in some order of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from blake3 import blake3

from cas_ckpt.core import publish
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import GC_STATE_KEY, GcPhase, GcState, encode_gc_state, read_gc_state
from cas_ckpt.core.ref_store import RefStore
from cas_ckpt.core.refs import PLACEHOLDER_GENERATION, Generation, Move, Ref, RefKind, encode_ref, ref_key
from cas_ckpt.errors import ConflictError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.pack import NAME_BYTES
from cas_ckpt.ops.gc import gc
from cas_ckpt.ops.gc.gc import Collection
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer import pack_writer
from cas_ckpt.transfer.pack_writer import EncodedChunk, PackWriter, WrittenPack, pack_key

_Mutant = AbstractContextManager[object]


def time_only() -> _Mutant:
    """Nothing is condemned or fenced: what was garbage when it was looked at is deleted, as after any grace period."""
    return patch.multiple(
        Collection,
        condemn=lambda self, state, packs: replace(state, condemned=tuple(packs)),
        fence=lambda self, state: [],
        rescue=lambda self, state, heads: state,
    )


def no_fence() -> _Mutant:
    """Refs are read, not swapped: a commit that began before g4 lands after they were looked at."""

    def only_read(self: Collection, ref: Ref, state: GcState) -> Ref:
        expired = self._expired.get((ref.kind, ref.name), set())
        return replace(ref, log=tuple(move for move in ref.log if move not in expired))

    return patch.object(Collection, "fence_ref", only_read)


def no_rescue() -> _Mutant:
    """What was condemned is deleted, whatever the fenced heads need."""
    return patch.object(Collection, "needed", lambda self, condemned, sets: set())


@contextmanager
def _numbers_alone() -> Iterator[None]:
    """Generations are told apart by number alone, and none is refused: what would notice a broken step is off."""

    def nothing(state: GcState, seen: Generation, *, key: str) -> None:
        pass

    with (
        patch.object(Generation, "next", lambda self: Generation(self.number + 1, self.nonce)),
        patch.object(publish, "require_current", nothing),
        patch.object(gc, "require_current", nothing),
    ):
        yield


@contextmanager
def touch_before_publish() -> Iterator[None]:
    """Refs are fenced before gc/state says what is condemned; the plan appears in it when deleting begins."""

    def condemn(self: Collection, state: GcState, packs: Sequence[str]) -> GcState:
        return replace(state, generation=state.generation.next(), phase=GcPhase.CONDEMNED, condemned=tuple(packs))

    with _numbers_alone(), patch.object(Collection, "condemn", condemn):
        yield


@contextmanager
def no_cas_state() -> Iterator[None]:
    """gc/state is overwritten, whoever changed it meanwhile."""

    def swap(store: Store, state: GcState, *, generation: Generation, phase: str, condemned: Sequence[str]) -> GcState:
        new = GcState(generation, phase, tuple(condemned))
        record = encode_gc_state(new)
        store.put(GC_STATE_KEY, record)
        return replace(new, record=record)

    with _numbers_alone(), patch.object(gc, "swap_gc_state", swap):
        yield


@contextmanager
def gc_before_ref() -> Iterator[None]:
    """A writer reads gc/state, then the ref: the other way round than w2 and w3."""
    states: dict[Store, GcState] = {}
    ref_for_writing = publish.ref_for_writing

    def state_then_ref(handle: RepositoryHandle, kind: RefKind, name: str) -> Ref:
        states[handle.store] = read_gc_state(handle.store)
        return ref_for_writing(handle, kind, name)

    with (
        _numbers_alone(),
        patch.object(publish, "ref_for_writing", state_then_ref),
        patch.object(publish, "read_gc_state", lambda store: states[store]),
    ):
        yield


def stale_index() -> _Mutant:
    """A writer that finds a new generation goes on with the index that it has."""

    def begin_writing(self: RepositoryHandle) -> Generation:
        state = read_gc_state(self.store)
        if self._synced_generation is None:
            self.sync()
        self._synced_generation = state.generation
        return state.generation

    return patch.object(RepositoryHandle, "begin_writing", begin_writing)


def filter_only() -> _Mutant:
    """Condemned packs are left out as long as gc/state names them, instead of for good."""

    def begin_writing(self: RepositoryHandle) -> Generation:
        state = read_gc_state(self.store)
        self._condemned = set(state.condemned)
        if self._synced_generation != state.generation:
            self.sync()
            self._synced_generation = state.generation
        self._live = self.index.packs().keys() - self._condemned
        self._known = None
        return state.generation

    return patch.object(RepositoryHandle, "begin_writing", begin_writing)


class _NamedByContent(PackWriter):
    """Gathers a pack, and writes it under a name that follows from what is in it."""

    def __init__(self, stream: Callable[[str], Any], kind: Any) -> None:
        super().__init__(_Nowhere, kind)
        self._open = stream
        self._parts: list[tuple[Callable[..., None], Any]] = []
        self._ids: list[Digest] = []

    def add_chunk(self, chunk: EncodedChunk) -> None:
        copy = replace(chunk, payload=bytes(chunk.payload))
        self._remember(super().add_chunk, copy, chunk.digest)

    def add_node(self, node: Any) -> None:
        self._remember(super().add_node, node, node.digest)

    def _remember(self, add: Callable[[Any], None], part: Any, digest: Digest) -> None:
        self._parts.append((add, part))
        self._ids.append(digest)

    def finish(self, hints: bytes = b"") -> WrittenPack:
        name = blake3(b"".join(sorted(self._ids))).digest()[:NAME_BYTES]
        with patch.object(pack_writer.secrets, "token_bytes", lambda size: name):
            PackWriter.__init__(self, self._open, self._kind)
        for add, part in self._parts:
            add(part)
        with suppress(ConflictError):  # it is there already: so much the better, says the mutant
            return super().finish(hints)
        return WrittenPack(pack_key(name, self._kind), self._kind, self.size_bytes, tuple(self.entries))


class _Nowhere:
    def __init__(self, key: str) -> None:
        pass

    def write(self, data: object) -> None:
        pass

    def abort(self) -> None:
        pass


def content_names() -> _Mutant:
    """Packs are named by what they hold, so that a new one may have the name of a condemned one."""
    return patch.object(pack_writer, "PackWriter", _NamedByContent)


@contextmanager
def no_placeholder() -> Iterator[None]:
    """A new ref appears with its first target; before, there is nothing to fence."""
    swap = RefStore.swap

    def nothing_yet(self: RefStore, kind: RefKind, name: str) -> Ref:
        return Ref(kind, name, None, PLACEHOLDER_GENERATION, (), b"")

    def swap_or_create(
        self: RefStore, ref: Ref, target: Digest | None, *, generation: Generation, move: Move | None = None,
        note: str | None = None, **more: Any,
    ) -> Ref:  # fmt: skip
        if ref.record:
            return swap(self, ref, target, generation=generation, move=move, note=note, **more)
        log = () if move is None else (move,)
        made = replace(ref, target=target, generation=generation, log=log, note=note or "")
        record = encode_ref(made)
        self._store.put_if_absent(ref_key(ref.kind, ref.name), record)
        return replace(made, record=record)

    with patch.object(RefStore, "create_placeholder", nothing_yet), patch.object(RefStore, "swap", swap_or_create):
        yield


MUTANTS: dict[str, Callable[[], _Mutant]] = {
    mutant.__name__: mutant
    for mutant in (
        time_only, no_fence, no_rescue, gc_before_ref, touch_before_publish, stale_index, filter_only,
        content_names, no_cas_state, no_placeholder,
    )
}  # fmt: skip
