"""What goes to a worker process: the tree of a commit, as items that can be pickled, and where their bytes are.

A tree is a list of (number of the parent, name, item), parents before their children, so that no depth is too deep.
What may hold anything of the user's is encoded. Sources are sent as

    LentSource   a few bytes
    Lent         staged: boxes whose elements are in lent memory, in C order
    Remote       not staged yet, or not at all: boxes are asked for

Invariant: what is received equals what was sent, but for sources, and for identities, which are numbers: equal for
tensors that are the same memory. What lent memory holds is of the moment of the snapshot, and nobody writes it while
the commit runs.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np

from cas_ckpt.core.refs import Head
from cas_ckpt.errors import InternalError, UnsupportedValueError
from cas_ckpt.memory import Limits
from cas_ckpt.objects.spec import Box, Spec, grid_for, raw_dtype
from cas_ckpt.objects.state import ArraySource, Container, EncodedValue, Item, TensorItem, ValueItem, render_key
from cas_ckpt.objects.values import decode_value, encode_value
from cas_ckpt.ops.commit.request import CommitFields, CommitRequest, checked_fields, decoded_lineage, working_folder
from cas_ckpt.parallel.child_process import Served
from cas_ckpt.transfer.staging import elements_of

Array: TypeAlias = np.ndarray[Any, Any]
Rows: TypeAlias = list[tuple[int, Any, Item]]

READ, SUMS, SAVED = "read", "sums", "saved"
"""What a worker asks of a source that is not staged."""


@dataclass(frozen=True, slots=True)
class Job:
    """One commit that a worker is to make.

    Attributes:
        repository: Its URL, the place of its index, and of its cache.
        fields: Those of `request` that are the user's values, encoded.
        ranks: This rank and how many there are; None: one process alone.
        epoch: Another one than before if what was frozen may hold other bytes now, rightly.
        core: Where the main thread of the trainer's process ran last.
    """

    repository: tuple[str, str | None, str | None]
    head: Head
    request: CommitRequest
    fields: CommitFields
    rows: Rows
    ranks: tuple[int, int] | None
    epoch: int
    core: int | None
    limits: Limits
    log_level: int


# --- requests ---------------------------------------------------------------------------------


def sent_request(request: CommitRequest) -> tuple[CommitRequest, CommitFields]:
    """`request` without what stays here, and what of it was encoded.

    Raises:
        InvalidInputError: as for `checked_fields`.
    """
    plain = replace(
        request, head=None, look=None, announce=None, step=None, metrics={}, meta=None, parents=(), came_from=None,
        lineage=(), provenance=False, command=list(map(str, sys.argv if request.command is None else request.command)),
        folder=working_folder() if request.folder is None else request.folder,
    )  # fmt: skip
    return plain, checked_fields(request)


def received_request(request: CommitRequest, fields: CommitFields, **own: Any) -> CommitRequest:
    """The request that `sent_request` was given, with the fields `own`."""
    provenance = None if fields.provenance is None else decode_value(fields.provenance)
    return replace(
        request, **own, message=fields.message, author=fields.author, step=fields.step, metrics=fields.metrics,
        meta=None if fields.meta is None else decode_value(fields.meta), lineage=decoded_lineage(fields.lineage),
        provenance=False if provenance is None else provenance, parents=fields.parents, came_from=fields.came_from,
    )  # fmt: skip


# --- trees ------------------------------------------------------------------------------------


class Identities:
    """Numbers in place of what says that tensors are the same memory; the same number in the next tree."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._seen: dict[Hashable, int] = {}
        self._next = 0

    def number(self, identity: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        """(memory, version) as numbers."""
        if identity is None:
            return None
        memory, version = identity[0], identity[-1] if len(identity) > 1 else None
        number = self._numbers.get(memory)
        if number is None:
            number, self._next = self._next, self._next + 1
        self._seen[memory] = number
        self._numbers[memory] = number
        return number, version

    def end_tree(self) -> None:
        """Forget memory that was not in the tree."""
        self._numbers, self._seen = self._seen, {}


def sent_tree(
    tree: Container, *, identities: Identities, sent_source: Callable[[TensorItem], ArraySource], allow_pickle: bool
) -> Rows:
    """`tree` as rows.

    Args:
        sent_source: What is sent in the place of the source of a tensor.
    Raises:
        UnsupportedValueError: names the key.
    """
    rows: Rows = []
    waiting: list[tuple[Item, int, Any, tuple[Any, ...]]] = [(tree, -1, "", ())]

    def encoded(value: Any, path: tuple[Any, ...]) -> bytes:
        return encode_value(value, key=render_key(path), allow_pickle=allow_pickle)

    while waiting:
        item, parent, name, path = waiting.pop()
        if isinstance(item, Container):
            below = reversed(item.children.items())
            waiting.extend((child, len(rows), name, (*path, name)) for name, child in below)
            attrs = item.attrs
            if attrs is not None and not isinstance(attrs, EncodedValue):
                attrs = encoded(attrs, path)
            item = Container(item.kind, {}, attrs, None if item.versions is None else dict(item.versions))
        elif isinstance(item, TensorItem):
            item = replace(item, identity=identities.number(item.identity), source=sent_source(item))
        elif isinstance(item, ValueItem):
            item = EncodedValue(encoded(item.value, path))
        elif not isinstance(item, EncodedValue):
            raise InternalError(f"{render_key(path)}: a {type(item).__name__} cannot be committed")
        rows.append((parent, name, item))
    identities.end_tree()
    return rows


def received_tree(served: Served, rows: Rows) -> Container:
    """The tree that `sent_tree` was given, with sources of this process."""
    items: list[Item] = []
    for parent, name, item in rows:
        if isinstance(item, Container) and isinstance(item.attrs, bytes):
            item = replace(item, attrs=_decoded(item.attrs))
        elif isinstance(item, TensorItem):
            item.source = _received_source(served, item)
        items.append(item)
        if parent >= 0:
            cast(Container, items[parent]).children[name] = item
    return cast(Container, items[0])


def _decoded(attrs: bytes) -> Any:
    try:
        return decode_value(attrs)
    except UnsupportedValueError:  # pickled: they are stored as they are
        return EncodedValue(attrs)


# --- sources ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LentSource:
    """A tensor, or a rank's pieces of it: the elements of each box, raw and in C order."""

    pieces: tuple[tuple[Box, Array], ...]
    item_bytes: int

    @property
    def is_private(self) -> bool:
        """See `StagedSource`."""
        return True

    def read(self, box: Box) -> Array:
        """See `ArraySource`."""
        return elements_of(self.pieces, box, self.item_bytes)

    def saved(self) -> None:
        """See `StagedSource`."""


@dataclass(frozen=True, slots=True)
class Lent:
    """Boxes, and where each begins in lent memory."""

    memory: int
    boxes: tuple[tuple[Box, int], ...]


@dataclass(frozen=True, slots=True)
class Remote:
    """A source that stays in the trainer's process: its number, and whether it sums."""

    number: int
    is_summing: bool


class RemoteSource:
    """A tensor that the trainer's process copies a box of whenever one is read."""

    def __init__(self, served: Served, number: int, spec: Spec) -> None:
        self._served, self._number = served, number
        self._spec = spec
        self._dtype = raw_dtype(spec.item_bytes)

    @property
    def read_bytes(self) -> int:
        """See `FileBackedSource`: what the trainer's process holds for a thread of the worker."""
        return math.prod(grid_for(self._spec).cell) * self._spec.item_bytes

    @property
    def is_private(self) -> bool:
        """See `StagedSource`: what is copied here is a copy already, but of a moment when it may be live."""
        return False

    def read(self, box: Box) -> Array:
        """See `ArraySource`."""
        name = self._served.ask(READ, self._number, box, threading.get_ident())
        return np.frombuffer(self._served.memory(name), self._dtype, box.num_elements).reshape(box.sizes)

    def saved(self) -> None:
        """See `StagedSource`."""
        self._served.ask(SAVED, self._number)


class SummedSource(RemoteSource):
    """One that the trainer's process sums where it is, such as on a device."""

    def sums(self, box: Box) -> Array | None:
        """See `SummingSource`."""
        found: Array | None = self._served.ask(SUMS, self._number, box)
        return found


def _received_source(served: Served, item: TensorItem) -> ArraySource:
    sent: Any = item.source
    if isinstance(sent, Remote):
        return (SummedSource if sent.is_summing else RemoteSource)(served, sent.number, item.spec)
    if not isinstance(sent, Lent):
        return item.source
    memory, dtype = served.memory(sent.memory), raw_dtype(item.spec.item_bytes)
    pieces = [(box, np.frombuffer(memory, dtype, box.num_elements, begin)) for box, begin in sent.boxes]
    return LentSource(tuple((box, each.reshape(box.sizes)) for box, each in pieces), item.spec.item_bytes)
