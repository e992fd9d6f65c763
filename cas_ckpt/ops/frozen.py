"""What a process declared frozen: hashed once, afterwards audited by a random sample.

Invariant: a frozen tensor's ids are believed only for the very memory that was hashed, whose
version counter has not moved; a sample of its chunks is hashed all the same, because memory
can be written behind that counter's back. A difference raises, it is never stored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from cas_ckpt.errors import FrozenChangedError, InvalidInputError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.draft import Draft, DraftTensor
from cas_ckpt.ops.patterns import KeyPatterns

DEFAULT_AUDIT = 0.01
"""Share of the frozen chunks that is hashed again at every commit."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A frozen tensor as it was hashed."""

    identity: tuple[Any, ...] | None
    spec: Any
    chunks: tuple[Digest | None, ...]


Hashed: TypeAlias = Mapping[str, _Seen]
"""What `FrozenMemory.check` found: key -> the tensor as this process hashed it."""


class FrozenMemory:
    """What one process knows of the tensors that it declared frozen. One per open repository."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        # Its own generator: committing must not move anybody's random state.
        self._random = random.Random()

    def prepare(
        self,
        draft: Draft,
        patterns: KeyPatterns,
        *,
        audit: float,
        known: Callable[[Sequence[Digest]], Sequence[bool]],
    ) -> list[DraftTensor]:
        """Let frozen tensors that were hashed before keep their ids; the frozen ones are the answer.

        Args:
            known: Says for chunk ids whether a live copy is stored; what has none any more
                (it was collected since) is hashed and written again.
        Raises:
            InvalidInputError: a pattern that matches no tensor, or an audit outside 0..1.
        """
        if not 0 <= audit <= 1:
            raise InvalidInputError(f"the audited share of frozen tensors is {audit}: give a number from 0 to 1")
        frozen = [tensor for tensor in draft.tensors if patterns.matches(tensor.key)]
        if patterns.unused:
            raise InvalidInputError(
                f"frozen={patterns.unused!r} matches no tensor that is stored in chunks: check the keys"
            )
        trusted = [tensor for tensor in frozen if self._is_same_memory(tensor)]
        for tensor in trusted:
            tensor.work.chunks = list(self._seen[tensor.key].chunks)
            tensor.work.cells = frozenset(_unstored(tensor.work.chunks, known))
        self._choose_sample(trusted, audit)
        return frozen

    def _is_same_memory(self, tensor: DraftTensor) -> bool:
        seen = self._seen.get(tensor.key)
        identity = tensor.item.identity
        counted = identity is not None and identity[-1] is not None
        return seen is not None and counted and seen.identity == identity and seen.spec == tensor.item.spec

    def _choose_sample(self, trusted: Sequence[DraftTensor], audit: float) -> None:
        cells = [(tensor, cell) for tensor in trusted for cell in range(tensor.work.grid.num_cells)]
        count = min(len(cells), max(1, round(len(cells) * audit))) if audit else 0
        for tensor, cell in self._random.sample(cells, count):
            tensor.work.cells = (tensor.work.cells or frozenset()) | {cell}

    def check(self, frozen: Sequence[DraftTensor]) -> Hashed:
        """After hashing: every frozen tensor has the ids that it had before; what to `remember` of them.

        The answer holds what this process hashed, and stays as it is when ids of other ranks are
        filled in afterwards: memory is trusted only for the bytes that were hashed here.

        Raises:
            FrozenChangedError: names the first tensor that has not.
        """
        for tensor in frozen:
            seen = self._seen.get(tensor.key)
            if seen is not None and _differ(seen.chunks, tensor.work.chunks):
                raise FrozenChangedError(
                    f"{tensor.key}: declared frozen, but its bytes are not those that were committed before: "
                    "find who writes it, or commit without frozen= for it"
                )
        return {
            tensor.key: _Seen(tensor.item.identity, tensor.item.spec, tuple(tensor.work.chunks)) for tensor in frozen
        }

    def remember(self, hashed: Hashed) -> None:
        """The commit is made: from now on these ids are trusted."""
        self._seen.update(hashed)


def _unstored(chunks: Sequence[Digest | None], known: Callable[[Sequence[Digest]], Sequence[bool]]) -> Iterator[int]:
    """Cells without an id (other ranks hashed them), and those whose chunk is stored no longer."""
    named = [(cell, digest) for cell, digest in enumerate(chunks) if digest is not None]
    yield from (cell for cell, digest in enumerate(chunks) if digest is None)
    stored = known([digest for _, digest in named])
    yield from (cell for (cell, _), there in zip(named, stored, strict=True) if not there)


def _differ(before: Sequence[Digest | None], now: Sequence[Digest | None]) -> bool:
    """Whether a cell that this rank hashed both times has another id."""
    if len(before) != len(now):
        return True
    return any(a != b for a, b in zip(before, now, strict=True) if a is not None and b is not None)
