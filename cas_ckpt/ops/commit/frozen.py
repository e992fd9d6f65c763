"""Frozen tensors of a process: hashed once, afterwards every byte is compared by checksums.

Invariant: a frozen tensor keeps its chunk ids only if the checksums of all its bytes (transfer/hashing.py) are those
taken just before it was hashed; a random sample of its chunks is hashed all the same. `frozen_check="version"`
trusts the memory's address and torch's version counter instead, which fused optimizers, `.data`, numpy views and
writes to the storage leave alone. A difference raises, it is never stored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeAlias

from cas_ckpt.errors import ConflictError, FrozenChangedError, InvalidInputError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.nodes import TensorEntry
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import Box, Spec
from cas_ckpt.objects.state import Flavor, TensorItem
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.ops.commit.save import Draft, DraftTensor
from cas_ckpt.transfer.save import TensorWork

Regions: TypeAlias = Callable[[TensorWork], tuple[Box, ...]]
"""The boxes of a tensor that this process holds."""

Checksums: TypeAlias = Callable[[Sequence[tuple[TensorWork, Box]]], Sequence[bytes]]
"""The checksum of each of these regions as it is now; tied tensors share a work, which is summed once."""


@dataclass(frozen=True, slots=True)
class FrozenTensor:
    """A frozen tensor of one commit, as it was before anything was hashed.

    Attributes:
        regions: What this process holds of it.
        sums: The checksum of each region; None if nobody asked for them.
    """

    draft: DraftTensor
    regions: tuple[Box, ...]
    sums: tuple[bytes, ...] | None


@dataclass(frozen=True, slots=True)
class Frozen:
    """The frozen tensors of one commit: those in chunks, and by key those that stand in the tree itself."""

    tensors: tuple[FrozenTensor, ...] = ()
    inline: Mapping[str, TensorEntry] | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    """A frozen tensor as it was hashed by this process; cells that others hashed have no id."""

    identity: tuple[Any, ...] | None
    spec: Spec
    regions: tuple[Box, ...]
    sums: tuple[bytes, ...] | None
    chunks: tuple[Digest | None, ...]


Hashed: TypeAlias = Mapping[str, _Seen | TensorEntry]
"""Result of `FrozenMemory.check`: key -> the tensor as this process hashed it."""


class FrozenMemory:
    """Hashes and checksums of the tensors that a process declared frozen. One per open repository.

    Attributes:
        num_changes: How often a commit that was made has changed it.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self._seen: dict[str, _Seen | TensorEntry] = {}
        # Its own generator: committing must not move anybody's random state.
        self._random = random.Random()
        self._origin: FrozenMemory | None = None
        self._relied_on: set[str] = set()

    def now(self, pending: Sequence[KeyPatterns] = ()) -> FrozenMemory:
        """A snapshot for a commit that is made later; what that hashes is remembered here.

        Args:
            pending: What each commit that is made before that one declares frozen: `remember` will forget the rest.
        """
        copy = FrozenMemory()
        copy._seen = {key: seen for key, seen in self._seen.items() if all(each.matches(key) for each in pending)}
        copy._origin = self
        return copy

    def is_unchanged(self, key: str, item: TensorItem, regions: tuple[Box, ...], *, check: str) -> bool:
        """Whether `prepare` will let the frozen tensor keep the ids that it has, or raise: no copy of it is needed.

        If it has to be hashed all the same, in whole or in cells that this process has not named, that raises, too.

        Args:
            regions: What this process holds of it.
            check: The request's `frozen_check`.
        """
        seen = self._seen.get(key)
        if not isinstance(seen, _Seen) or seen.spec != item.spec or seen.regions != regions:
            return False
        if check == "checksum":
            found = seen.sums is not None
        else:
            found = item.identity is not None and item.identity[-1] is not None and seen.identity == item.identity
        if found:
            self._relied_on.add(key)
        return found

    def _relied_in_vain(self, key: str) -> ConflictError:
        """The error for a tensor that was not copied when it could be, and has to be hashed now."""
        if self._origin is not None:
            self._origin._seen.pop(key, None)  # the next commit copies it
        return ConflictError(
            f"{key}: declared frozen, and not copied, but what this rank has to hash of it is not what it had before: "
            "nothing was published; commit again"
        )

    def prepare(
        self,
        draft: Draft,
        request: CommitRequest,
        patterns: KeyPatterns,
        *,
        known: Callable[[Sequence[Digest]], Sequence[bool]],
        regions: Regions,
        checksums: Checksums,
    ) -> Frozen:
        """Let frozen tensors that are what was hashed before keep their ids; the frozen ones are the answer.

        Values that match are stored as they are: frozen is about tensors.

        Args:
            patterns: Those of `request`.
            known: Says for chunk ids whether a live copy is stored; what has none any more
                (it was collected since) is hashed and written again.
        Raises:
            InvalidInputError: a pattern that matches no tensor.
            FrozenChangedError: names the first tensor that is not what it was.
        """
        drafts = [each for each in draft.tensors if each.flavor != Flavor.VALUE and patterns.matches(each.key)]
        inline = {key: entry for key, entry in draft.inline_tensors() if patterns.matches(key)}
        if patterns.unused:
            raise InvalidInputError(f"frozen={patterns.unused!r} matches no tensor of the state: check the keys")
        for key, entry in inline.items():
            if not self._may_be(key, entry):
                raise _changed(key)
        held = [(each, regions(each.work)) for each in drafts]
        summed = request.frozen_check == "checksum"
        sums = iter(checksums([(each.work, box) for each, boxes in held for box in boxes]) if summed else ())
        tensors = tuple(
            FrozenTensor(each, boxes, tuple(next(sums) for _ in boxes) if summed else None) for each, boxes in held
        )
        trusted = []
        for each in tensors:
            seen = self._trusted(each)
            if seen is None and each.draft.key in self._relied_on:
                raise self._relied_in_vain(each.draft.key)
            if seen is not None:
                # Cells without an id (other ranks hashed them), and those whose chunk is stored no longer.
                named = [digest for digest in seen.chunks if digest is not None]
                stored = set(compress(named, known(named)))
                each.draft.work.chunks = list(seen.chunks)
                each.draft.work.cells = frozenset(at for at, one in enumerate(seen.chunks) if one not in stored)
                trusted.append(each.draft)
        cells = [(tensor, cell) for tensor in trusted for cell in range(tensor.work.grid.num_cells)]
        audit = request.frozen_audit
        count = min(len(cells), max(1, round(len(cells) * audit))) if audit else 0
        for tensor, cell in self._random.sample(cells, count):
            tensor.work.cells = (tensor.work.cells or frozenset()) | {cell}
        return Frozen(tensors, inline)

    def _trusted(self, tensor: FrozenTensor) -> _Seen | None:
        """The tensor as it was hashed, if it is that still; None: it has to be hashed.

        Raises:
            FrozenChangedError: it is certainly not.
        """
        seen, item = self._seen.get(tensor.draft.key), tensor.draft.item
        if not isinstance(seen, _Seen) or seen.spec != item.spec or seen.regions != tensor.regions:
            return None
        if tensor.sums is None:
            counted = item.identity is not None and item.identity[-1] is not None
            return seen if counted and seen.identity == item.identity else None
        if seen.sums is not None and seen.sums != tensor.sums:
            raise _changed(tensor.draft.key)
        return None if seen.sums is None else seen

    def _may_be(self, key: str, now: _Seen | TensorEntry) -> bool:
        """Whether `now` may be what was stored under `key`: nothing that is known speaks against it."""
        seen = self._seen.get(key)
        if seen is None:
            return True
        if isinstance(now, TensorEntry):
            return isinstance(seen, TensorEntry) and (seen.spec, seen.inline) == (now.spec, now.inline)
        if not isinstance(seen, _Seen) or len(seen.chunks) != len(now.chunks):
            return False
        pairs = zip(seen.chunks, now.chunks, strict=True)  # of each cell that this rank hashed both times
        return all(a == b for a, b in pairs if a is not None and b is not None)

    def check(self, frozen: Frozen) -> Hashed:
        """After hashing: every frozen tensor has the ids that it had before; what to `remember` of them.

        The answer holds what this process hashed, and stays as it is when ids of other ranks are
        filled in afterwards: memory is trusted only for the bytes that were hashed here.

        Raises:
            FrozenChangedError: names the first tensor that has not.
        """
        hashed: dict[str, _Seen | TensorEntry] = dict(frozen.inline or {})
        for each in frozen.tensors:
            key, item, chunks = each.draft.key, each.draft.item, tuple(each.draft.work.chunks)
            seen = self._seen.get(key)
            if key in self._relied_on and isinstance(seen, _Seen):
                pairs = zip(seen.chunks, chunks, strict=True)
                if any(before is None and now is not None for before, now in pairs):  # a cell was hashed now alone
                    raise self._relied_in_vain(key)
            hashed[key] = _Seen(item.identity, item.spec, each.regions, each.sums, chunks)
            if not self._may_be(key, hashed[key]):
                raise _changed(key)
        return hashed

    def remember(self, hashed: Hashed, draft: Draft) -> None:
        """The commit of `draft` is made: from now on these ids are trusted.

        What the commit holds and did not declare frozen is forgotten: it may have changed, rightly.
        """
        if self._origin is not None:
            self._origin.remember(hashed, draft)
            return
        self.num_changes += 1
        if self._seen:
            present = {tensor.key for tensor in draft.tensors} | {key for key, _ in draft.inline_tensors()}
            self._seen = {key: seen for key, seen in self._seen.items() if key not in present}
        self._seen.update(hashed)

    def forget(self) -> None:
        """Trust nothing any more: another process has made a commit, and knows what was frozen in it."""
        self.num_changes += 1
        self._seen = {}


def _changed(key: str) -> FrozenChangedError:
    return FrozenChangedError(
        f"{key}: declared frozen, but its bytes are not those that were committed before: "
        "find who writes it, or commit once without frozen= for it, which stores it as it is now"
    )
