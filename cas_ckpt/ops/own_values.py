"""Values that every rank keeps for itself: one rank's children of the "ranks" containers.

Each rank makes the nodes of its own children, as a tree of one child; rank 0 puts the trees
together. Invariant: a child's node is the one that it would have anywhere else in a state.
"""

from __future__ import annotations

from collections.abc import Sequence

from cas_ckpt.errors import InternalError, UnsupportedValueError
from cas_ckpt.layout.holdings import held_by
from cas_ckpt.objects.node import Node
from cas_ckpt.objects.state import RANKS, Container, Item, Name, Path, TensorItem, render_key, walk
from cas_ckpt.ops.description import ValueEncoder
from cas_ckpt.ops.draft import VALUE_FLAVOR, Draft, draft_nodes
from cas_ckpt.ops.patterns import KeyPatterns
from cas_ckpt.transfer.save import TensorWork


class OwnValues:
    """What one rank keeps for itself of a state.

    Attributes:
        works: Tensors that this rank alone hashes.
    """

    def __init__(self, state: Container, paths: Sequence[Path], rank: int, encode_value: ValueEncoder) -> None:
        self._drafts: list[Draft] = []
        self._prefixes = [render_key(path) for path in paths]
        self.works: list[TensorWork] = []
        for path in paths:
            found = _at(state, path)
            children: dict[Name, Item] = {}
            if found is not None and rank in found.children:
                children[rank] = found.children[rank]
                _check_whole(children[rank], (*path, rank), rank)
            draft = Draft(Container(RANKS, children), encode_value=_prefixed(encode_value, render_key(path)))
            self.works.extend(draft.works())
            self._drafts.append(draft)

    @property
    def aliases(self) -> tuple[tuple[str, ...], ...]:
        """Groups of whole keys that are one tensor."""
        return tuple(
            tuple(f"{prefix}/{key}" for key in group)
            for prefix, draft in zip(self._prefixes, self._drafts, strict=True)
            for group in draft.aliases
        )

    def mark(self, patterns: KeyPatterns) -> None:
        """Let `patterns` see the tensors here, so that none is told to match nothing; all are stored each time."""
        for prefix, draft in zip(self._prefixes, self._drafts, strict=True):
            tensors = [tensor.key for tensor in draft.tensors if tensor.flavor != VALUE_FLAVOR]
            for key in (*tensors, *(key for key, _ in draft.inline_tensors())):
                patterns.matches(f"{prefix}/{key}")

    def nodes(self) -> list[list[Node]]:
        """For each path the nodes of this rank's child, last a tree of it alone; all works are hashed."""
        return [_nodes(draft) for draft in self._drafts]

    def totals(self) -> tuple[int, int, int, int]:
        """(bytes, entries, tensors, chunks) of all of them."""
        return (
            sum(draft.total_bytes for draft in self._drafts),
            sum(draft.num_entries for draft in self._drafts),
            sum(draft.num_tensors for draft in self._drafts),
            sum(work.grid.num_cells for work in self.works),
        )


def _check_whole(item: Item, path: Path, rank: int) -> None:
    for at, tensor in walk(item, path):
        if isinstance(tensor, TensorItem) and tensor.placement is not None and tensor.spec.num_elements:
            held = held_by(rank, tensor.spec.shape, tensor.placement)
            if [box for box, _ in held] != [tensor.spec.box]:
                raise UnsupportedValueError(
                    f"{render_key(at)}: a tensor that is divided over ranks cannot be one rank's own: take it out of "
                    "PerRank, or give PerRank its local part"
                )


def _nodes(draft: Draft) -> list[Node]:
    nodes, root = draft_nodes(draft)
    return [*(node for node in nodes if node.digest != root), *(node for node in nodes if node.digest == root)]


def _prefixed(encode_value: ValueEncoder, prefix: str) -> ValueEncoder:
    return lambda value, key: encode_value(value, f"{prefix}/{key}")


def _at(state: Container, path: Path) -> Container | None:
    item: Item | None = state
    for name in path:
        item = item.children.get(name) if isinstance(item, Container) else None
    if item is not None and not isinstance(item, Container):
        raise InternalError(f"{render_key(path)}: per-rank values that are no container")
    return item
