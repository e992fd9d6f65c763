"""A state as it is at one moment: its tree with staged sources in the place of live ones.

    1. `Snapshot` walks the captured tree, in the order in which a commit will: values are encoded, tensors get a
       `StagedTensor` each (tied ones share it); what is known to be unchanged stays as it is.
    2. `take_room` gets memory from a `StagingPool`, as much as the budget leaves.
    3. If there is room for all, `stage_all` copies all of it, and the commit begins after that.
       If not, the commit begins at once, from the front and on live memory, while `stage_from_back` copies what fits
       from the back; it returns when each tensor is staged or saved.
    4. When the commit has ended, `release` gives the memory back.

Invariant: once it is `settled`, nothing of the live state is read any more, but for what is known to be unchanged. What
was read of a tensor was either staged or live before that; if this cannot be said, reading it raises, or the save
step's `saved` does, before anything is published. Knows nothing of threads' order, of repositories, or of ranks but the
number of this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np

from cas_ckpt.errors import ConflictError
from cas_ckpt.layout.holdings import held_by
from cas_ckpt.memory import aligned
from cas_ckpt.objects.nodes import INLINE_BYTES
from cas_ckpt.objects.spec import Box, Spec, as_raw
from cas_ckpt.objects.state import (
    PLAIN_NAME,
    ArraySource,
    CellsToName,
    Container,
    EncodedValue,
    LeafHasher,
    TensorItem,
    ValueItem,
    render_name,
)
from cas_ckpt.objects.values import encode_value
from cas_ckpt.training.background.changes import Watch, Watched
from cas_ckpt.transfer.staging import Arena, Copy, StagingPool, copy_all, elements_of, new_copy

Array: TypeAlias = np.ndarray[Any, Any]
IsKnown: TypeAlias = Callable[[str, TensorItem, tuple[Box, ...]], bool]
"""Whether the tensor under this key, of which this rank holds these boxes, is known to be unchanged: not staged."""
Places: TypeAlias = tuple[tuple[int, int], ...]
"""Where each piece of a tensor is: number of the arena, -1 for memory of its own, and where it begins in it."""


class StagedTensor:
    """One tensor of a snapshot, a `StagedSource`: live at first, then staged, or saved from live memory.

    Attributes:
        boxes: What is staged, in global coordinates: the pieces that this rank holds, or the cells that are not stored.
        room: Bytes that it takes of an arena.
        places: Known once it is staged.
        digests: If only some cells are staged, the leaf digests of each cell of the tensor, joined.
    """

    __slots__ = (
        "_arrays", "_live", "_numbers", "_snapshot", "boxes", "digests", "item_bytes", "key", "num_bytes", "places",
        "room", "spec", "watched",
    )  # fmt: skip

    def __init__(
        self, snapshot: Snapshot, key: str, live: ArraySource, boxes: tuple[Box, ...], spec: Spec
    ) -> None:  # fmt: skip
        self._snapshot = snapshot
        self.key = key
        self.watched: Watched | None = None
        self._live: ArraySource | None = live
        self._arrays: tuple[Array, ...] | None = None
        self._numbers: dict[tuple[int, ...], int] | None = None
        self.boxes = boxes
        self.spec = spec
        self.item_bytes = spec.item_bytes
        self.num_bytes = self.room = 0
        for box in boxes:
            num_bytes = prod(box.sizes) * self.item_bytes
            self.num_bytes += num_bytes
            self.room += aligned(num_bytes)
        self.places: Places = ()
        self.digests: tuple[bytes, ...] = ()

    def leave_out(self, boxes: tuple[Box, ...], digests: tuple[bytes, ...]) -> None:
        """Stage only `boxes`: the chunks of all other cells are stored. Before anything of it is staged."""
        self.boxes, self.digests = boxes, digests
        self._numbers = {box.offsets: number for number, box in enumerate(boxes)}
        self.room = sum(aligned(box.num_elements * self.item_bytes) for box in boxes)

    def leaf_hasher(self) -> LeafHasher | None:
        """The hasher of cells that were hashed before they were staged."""
        return _RECORDED if self.digests else None

    @property
    def live(self) -> ArraySource | None:
        """Where it is read as long as it is neither staged nor saved."""
        return self._live

    @property
    def is_private(self) -> bool:
        return self._live is None

    def read(self, box: Box) -> Array:
        """The elements of `box`: of the live memory until they are staged, valid until this thread reads again.

        Raises:
            Whatever broke the snapshot. ConflictError: it is read once more after it was saved from live memory.
        """
        live = self._snapshot.live_for_reading(self)
        if live is not None:
            if self._snapshot.error is not None:
                raise self._snapshot.error
            return live.read(box)
        arrays = self._arrays
        if arrays is None:
            raise self._snapshot.error or ConflictError(
                "a garbage collection began under this commit, whose state did not fit staging_bytes and has changed "
                "since: nothing was published; commit again, or with more staging_bytes"
            )
        if self.digests:
            number = None if self._numbers is None else self._numbers.get(box.offsets)
            if number is None or self.boxes[number].sizes != box.sizes:
                raise ConflictError(
                    "a garbage collection took a chunk that the state had in common with the commit before: its bytes "
                    "were not staged, nothing was published; commit again"
                )
            return arrays[number]
        return elements_of(zip(self.boxes, arrays, strict=True), box, self.item_bytes)

    def saved(self) -> None:
        """Cells that were read from live memory, which are not read again."""
        error = self._snapshot.error
        if error is not None:
            raise error
        if self.watched is not None:
            self._snapshot.watch.look(self.watched)
        if self._live is not None:
            self.check()
        self._snapshot.note_saved(self)

    def plan(self, arena: Arena | None, number: int) -> tuple[list[Copy], Places]:
        """Plan the copies that stage it, and their place: in `arena`, or in memory of its own."""
        live, copies, places = self._live, list[Copy](), list[tuple[int, int]]()
        if live is None:
            return copies, ()
        for box in self.boxes:
            num_bytes = box.num_elements * self.item_bytes
            if arena is None:
                at, memory = 0, np.empty(num_bytes, np.uint8)
            else:
                at, memory = arena.room(num_bytes)
            copies.append(new_copy(live, box, self.item_bytes, memory))
            places.append((number, at))
        return copies, tuple(places)

    def copied(self, live: ArraySource) -> tuple[tuple[Array, ...], Places]:
        """Copies of all of it as `live` has it, in memory of their own, and where these are; for small ones.

        Raises:
            Whatever the source raised.
        """
        arrays = tuple([as_raw(live.read(box), self.item_bytes).copy() for box in self.boxes])
        return arrays, ((-1, 0),) * len(arrays)

    def defer(self, live: ArraySource, watched: Watched) -> None:
        """It is staged after the call has returned: from `live`, which `watched` watches."""
        self._live, self.watched = live, watched

    def check(self) -> None:
        """Return if it has not changed since the call, as far as that can be seen now.

        Raises:
            StateChangedError: names it.
        """
        if self.watched is not None:
            self._snapshot.watch.check(self.watched)

    def be_staged(self, arrays: tuple[Array, ...], places: Places) -> None:
        """The copies are made: it is read there from now on."""
        self._arrays, self.places = arrays, places
        self._live = None

    def forget(self) -> None:
        """Let go of live and of staged memory."""
        self._live = self._arrays = None


class _Recorded:
    """A `LeafHasher` that knows what was hashed on devices before anything was staged."""

    has_hashed = True

    def cell_digests(self, wanted: Sequence[CellsToName]) -> list[list[bytes]]:
        return [[each.source.digests[number] for number in each.numbers] for each in wanted]


_RECORDED = _Recorded()


class Snapshot:
    """The state of one moment, once it is settled.

    Attributes:
        tree: What a commit is made of.
        tensors: What has to be staged, tied ones once, in the order in which a commit reads them.
        num_bytes: Bytes of them.
        staged_bytes: How many of these are staged or saved.
        watch: What watches the tensors that are staged after the call (`snapshot="lazy"`).
        error: What broke the snapshot; reading it raises this.
        settled: All is staged or saved: the live state may change.
    """

    def __init__(self, state: Container, *, rank: int = 0, allow_pickle: bool = False, is_known: IsKnown | None = None):
        """Walk `state`, which becomes the tree: values are encoded, sources replaced, in place; nothing is copied.

        Raises:
            UnsupportedValueError: names the key of a value that cannot be expressed.
        """
        self.tensors: list[StagedTensor] = []
        self.error: BaseException | None = None
        self.settled = False
        self.staged_bytes = 0
        self.arenas: list[Arena] = []
        self.watch = Watch()
        self._taken_by = threading.get_ident()
        self._on_release: list[Callable[[], object]] = []
        self._changed = threading.Condition()
        self._pool: StagingPool | None = None
        self._rank, self._allow_pickle, self._is_known = rank, allow_pickle, is_known
        self._tied: dict[Any, StagedTensor] = {}
        self.tree = state
        self._walk(state)
        self._tied = {}
        self.num_bytes = sum(each.num_bytes for each in self.tensors)
        self._num_live = len(self.tensors)
        # What each thread of the commit looks at: the answer of `read` is valid until the same thread reads again.
        self._views: dict[int, StagedTensor] = {}

    def _walk(self, state: Container) -> None:
        waiting = [(state, "")]
        while waiting:
            container, prefix = waiting.pop()
            children = container.children
            for name, item in children.items():
                at = prefix + (name if type(name) is str and PLAIN_NAME.match(name) else render_name(name))
                if isinstance(item, TensorItem):
                    self._stand_in(item, at)
                elif isinstance(item, Container):
                    waiting.append((item, at + "/"))
                elif isinstance(item, ValueItem):
                    children[name] = EncodedValue(encode_value(item.value, key=at, allow_pickle=self._allow_pickle))

    def _stand_in(self, item: TensorItem, key: str) -> None:
        """Let `item` be read of a `StagedTensor`, if it is to be staged."""
        spec = item.spec
        boxes: tuple[Box, ...] = (spec.box,)
        if item.placement is not None:
            boxes = tuple(box for box, _ in held_by(self._rank, spec.shape, item.placement))
        # Hashed now: what the identity refers to may be gone when the commit looks at it, and has no hash then.
        tie = None if item.identity is None else (item.identity[0], spec.dtype)
        if self._is_known is not None and tie not in self._tied and self._is_known(key, item, boxes):
            return
        staged = StagedTensor(self, key, item.source, boxes, spec)
        first = staged if tie is None else self._tied.setdefault(tie, staged)
        if first is staged:
            self.tensors.append(staged)
        item.source = first

    # ------------------------------------------------------------ memory

    @property
    def room(self) -> int:
        """Bytes of arenas that all of it takes."""
        return sum(each.room for each in self.tensors)

    def take_room(self, pool: StagingPool, budget_bytes: int) -> bool:
        """Take memory from `pool`; whether all fits."""
        self._pool = pool
        wanted = self.room
        arena = pool.take(wanted, budget_bytes=budget_bytes) if wanted else None
        if arena is not None:
            self.arenas.append(arena)
        return sum(each.num_bytes for each in self.arenas) >= wanted

    def give_room(self) -> None:
        """Give the memory back: nobody reads what is in it any more. Idempotent."""
        arenas, self.arenas = self.arenas, []
        for arena in arenas:
            if self._pool is not None:
                self._pool.give(arena)

    def before_release(self, call: Callable[[], object]) -> None:
        """Have `call` called when the commit has ended, before memory is given back."""
        self._on_release.append(call)

    def release(self) -> None:
        """The commit has ended: nothing is read any more."""
        with self._changed:
            self.settled = True
            self._changed.notify_all()
        for call in self._on_release:
            call()
        for each in self.tensors:
            each.forget()
        self.give_room()

    # ------------------------------------------------------------ staging

    def stage_all(self, *, num_threads: int) -> None:
        """Copy everything, into memory that has room for it.

        Raises:
            Whatever a source raised; the snapshot is broken then.
        """
        self.stage(self.tensors, num_threads=num_threads)
        self.settle()

    def stage_small(self) -> None:
        """Copy the tensors that a commit stores in its tree; they need no room.

        Before the commit begins: it never reports them as saved.
        """
        small = [(each, each.live) for each in self.tensors if each.num_bytes <= INLINE_BYTES]
        made = [(each, *each.copied(live)) for each, live in small if live is not None]
        with self._changed:
            for each, arrays, places in made:
                each.be_staged(arrays, places)
                self._count(each)

    def stage_from_back(self, *, num_threads: int) -> None:
        """Copy what fits, from the back, while a commit saves from the front; returns when there is nothing live.

        Raises:
            Whatever a source raised; the snapshot is broken then.
        """
        for each in reversed(self.tensors):
            if each.live is not None and each.room <= sum(arena.left_bytes for arena in self.arenas[-1:]):
                self.stage([each], num_threads=num_threads)
        with self._changed:
            while (self._num_live or self._views) and not self.settled and self.error is None:
                self._changed.wait()
        self.settle()

    def stage(self, tensors: Sequence[StagedTensor], *, num_threads: int) -> None:
        """Copy these.

        Raises:
            Whatever a source raised, or StateChangedError: one has changed since the call.
        """
        arena = self.arenas[-1] if self.arenas else None
        number = len(self.arenas) - 1 if arena is not None else -1
        plans = [(each, *each.plan(arena, number)) for each in tensors]
        copy_all([copy for _, copies, _ in plans for copy in copies], num_threads=num_threads)
        for each in tensors:
            each.check()
        with self._changed:
            for each, copies, places in plans:
                if each.live is not None:  # else it was saved meanwhile
                    each.be_staged(tuple(copy.target for copy in copies), places)
                    self._count(each)

    def _count(self, tensor: StagedTensor) -> None:
        self.staged_bytes += tensor.num_bytes
        self._num_live -= 1
        if not self._num_live:
            self._changed.notify_all()

    def live_for_reading(self, tensor: StagedTensor) -> ArraySource | None:
        """The live source of `tensor`, which this thread looks at from now on until it reads again; None: staged."""
        if tensor.live is None and not self._views:
            return None
        own = threading.get_ident()
        with self._changed:
            live = tensor.live
            if live is not None:
                self._views[own] = tensor
            elif self._views.pop(own, None) is not None and not self._views:
                self._changed.notify_all()
            return live

    def settle(self) -> None:
        """Everything is staged or saved."""
        with self._changed:
            self.settled = True
            self._changed.notify_all()

    def note_saved(self, tensor: StagedTensor) -> None:
        """The commit has saved `tensor`, and looks at its live memory no more."""
        with self._changed:
            if tensor.live is not None:
                tensor.forget()
                self._count(tensor)
            for thread in [thread for thread, each in self._views.items() if each is tensor]:
                del self._views[thread]
            self._changed.notify_all()

    def abort(self, error: BaseException) -> None:
        """Break the snapshot: what is read of it, or was read and is not reported saved yet, raises `error`."""
        with self._changed:
            if self.error is None:
                self.error = error
            self._changed.notify_all()

    def check(self) -> None:
        """Return if nothing broke it.

        Raises:
            Whatever did. StateChangedError: a tensor has changed since the call, in a way that is seen only now.
        """
        if self.error is not None:
            raise self.error
        self.watch.look()

    def stop_watching(self) -> None:
        """Nothing is staged after the call: what changes then is not looked for."""
        for each in self.tensors:
            each.watched = None
        self.watch = Watch()

    @property
    def is_settled(self) -> bool:
        """Whether the live state may change; the thread that took the snapshot may change it then.

        Another thread that only looks on does not end the watch: the one that trains may be inside of an operation.
        """
        if threading.get_ident() == self._taken_by:
            return self.wait_settled(0)
        return self.settled or self.error is not None

    def wait_settled(self, timeout_s: float | None = None) -> bool:
        """Wait until the live state may change; whether it may.

        Changes that this thread has made before are noticed now, those that it makes from now on are its own business.
        """
        with self._changed:
            settled = self._changed.wait_for(lambda: self.settled or self.error is not None, timeout_s)
        if settled:
            self.watch.settle()
        return settled
