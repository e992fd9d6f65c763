"""What a restore will do and what speaks against it, collected before anything is touched.

Invariant: a ledger only reads the target; `raise_mismatch` comes before the first byte moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cas_ckpt.core.tree import KeyPatterns
from cas_ckpt.errors import InvalidInputError, MismatchError, NotFoundError, shown_value
from cas_ckpt.objects.spec import Box, Placement
from cas_ckpt.objects.state import (
    CONTAINER_KINDS,
    ArrayTarget,
    Container,
    Item,
    Name,
    Path,
    StoredTensor,
    TensorCopy,
    render_key,
    walk,
)
from cas_ckpt.objects.structures import STRUCTURE_KINDS, part_of_fields
from cas_ckpt.training.restore.materialize import NewObjects
from cas_ckpt.training.restore.memory import Memory, ReadOnlyMemory, overlapping

# DOC of cas_ckpt.training.restore.ledger:
# The entries of a stored state that a restore is asked for.
#
# The patterns are those of core/tree.py. Unlike `ops.tree.select`, what is left keeps its
# kind and its numbers, because it is matched with a live state. Must not know torch.
#


class Selection:
    """The keys that one or several patterns cover; all keys when there is no pattern."""

    def __init__(self, patterns: str | Sequence[str] | None = None) -> None:
        self._patterns = KeyPatterns(patterns)

    def covers(self, path: Path) -> bool:
        """Whether everything at and below `path` is selected."""
        return not self._patterns or self._patterns.matches(render_key(path))

    def prune(self, tree: Container) -> Container:
        """`tree` with nothing but the selected entries and the containers that lead to them.

        Raises:
            NotFoundError: a pattern matches no key.
        """
        if not self._patterns:
            return tree
        pruned = self._kept(tree, ())
        if self._patterns.unused or not isinstance(pruned, Container):
            raise NotFoundError(f"no entry matches {', '.join(self._patterns.unused)}: repo.ls(ref) lists the keys")
        return pruned

    def _kept(self, item: Item, path: Path) -> Item | None:
        if self.covers(path):
            for below, _ in walk(item, path):
                self.covers(below)  # so that a pattern which only matches in there counts as used
            return item
        if not isinstance(item, Container) or item.kind not in CONTAINER_KINDS:
            return None
        kept: dict[Name, Item] = {}
        for name, child in item.children.items():
            found = self._kept(child, (*path, name))
            if found is not None:
                kept[name] = found
        attrs = part_of_fields(item.attrs, kept) if item.kind in STRUCTURE_KINDS else item.attrs
        return Container(item.kind, kept, attrs) if kept else None


SHOWN = 10
"""Keys of each kind that a message names before it counts."""


@dataclass(frozen=True, slots=True)
class Load:
    """One call of a `load_state_dict`, or what stands for it."""

    target: Any
    path: Path
    run: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Written:
    """Memory that a restore writes, and what into it: a stored tensor and which part of it, if it is one.

    Attributes:
        key: Its name in messages.
        content: The stored tensor, and its placement or its box; None: something else.
    """

    memory: Memory
    key: str
    content: tuple[StoredTensor, Placement | Box | None] | None

    def is_tied(self, other: Written) -> bool:
        """Whether both are one tensor, in the target and in the commit."""
        if self.content is None or other.content is None or not self.memory.is_same(other.memory):
            return False
        (stored, part), (other_stored, other_part) = self.content, other.content
        return part == other_part and same_content(stored, other_stored)


def overlaps(written: Sequence[Written]) -> list[str]:
    """Faults of targets that share memory without being one tensor, a sentence each."""
    found = []
    for pair in overlapping([each.memory for each in written]):
        one, other = (written[at] for at in pair)
        if not one.is_tied(other):
            names = " and ".join(sorted((one.key, other.key)))
            found.append(f"{names} overlap in the target's memory: one would overwrite the other, clone() one")
    return found


class Ledger:
    """Collects copies, loads and mismatches of one restore.

    Attributes:
        made: New tensors for what the target does not have, and all copies.
        missing: Paths that the target has and the commit has not.
        unexpected: Paths that the commit has and the target has not.
        faults: Sentences, each naming a key, what was wanted and found, and what to do.
        loads: What Stateful objects are to be given, in the order of the state.
    """

    def __init__(self, selection: Selection, made: NewObjects, *, strict: bool) -> None:
        self.selection = selection
        self.made = made
        self.strict = strict
        self.missing: list[Path] = []
        self.unexpected: list[Path] = []
        self.faults: list[str] = []
        self.loads: list[Load] = []
        self.devices: set[torch.device] = set()
        self._filled: dict[Any, tuple[Path, StoredTensor]] = {}
        self._written: list[Written] = []

    def note_missing(self, path: Path) -> None:
        """The commit has nothing at `path`; only counts if it was asked for.

        Raises:
            InvalidInputError: the target has a name there that no key can hold.
        """
        if not isinstance(path[-1], (str, int)):
            if not self.selection.covers(path[:-1]):
                return
            where = render_key(path[:-1]) or "the target"
            raise InvalidInputError(f"{where} has the key {shown_value(path[-1])}: give text or integers as keys")
        if self.selection.covers(path):
            self.missing.append(path)

    def fill(
        self,
        path: Path,
        stored: StoredTensor,
        target: ArrayTarget,
        region: Any,
        placement: Placement | None = None,
        *,
        memories: Sequence[Memory],
    ) -> None:
        """Fill `target` with `stored`; memory that is tied is filled once.

        Args:
            region: Names the memory of the target, None if nothing else can share it.
            placement: How the target is divided over the ranks; None: all of it is wanted here.
            memories: Where the target lies, one for each of its parts in this process.
        """
        mine = (path, stored)
        first = mine if region is None else self._filled.setdefault(region, mine)
        if first is mine:
            self.made.copies.append(TensorCopy(path, stored, target, placement))
            self._written += [Written(memory, render_key(path), (stored, placement)) for memory in memories]
        elif not same_content(first[1], stored):
            names = f"{render_key(first[0])} and {render_key(path)}"
            self.faults.append(
                f"{names} are one tensor in the target but two different ones in the commit: untie the target"
            )

    def note_written(self, path: Path, memories: Sequence[Memory]) -> None:
        """These memories, of something that is no plain tensor, will hold what the commit has at `path`."""
        self._written += [Written(memory, render_key(path), None) for memory in memories]

    @cached_property
    def read_only(self) -> ReadOnlyMemory:
        """What the operating system does not let this process write."""
        return ReadOnlyMemory()

    def raise_mismatch(self) -> None:
        """Raise MismatchError if anything speaks against the restore."""
        self.faults += overlaps(self._written)
        self._written.clear()
        parts = []
        if self.strict and self.missing:
            parts.append(_counted("in the target but not in the commit", list(map(render_key, self.missing))))
        if self.strict and self.unexpected:
            parts.append(_counted("in the commit but not in the target", list(map(render_key, self.unexpected))))
        if parts:
            parts.append("pass strict=False to restore only what both have, or keys=... to choose")
        if self.faults:
            parts.append(_counted("do not fit", self.faults))
        if parts:
            raise MismatchError("target and commit do not agree; nothing was touched\n  " + "\n  ".join(parts))


def same_content(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two stored tensors have the same elements."""
    return a.spec == b.spec and a.node == b.node and a.inline == b.inline


def _counted(head: str, lines: Sequence[str]) -> str:
    shown = list(lines[:SHOWN])
    if len(lines) > SHOWN:
        shown.append(f"... and {len(lines) - SHOWN} more")
    return f"{head} ({len(lines)}):" + "".join(f"\n    {line}" for line in shown)
