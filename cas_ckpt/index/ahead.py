"""What a walk of a state is about to make, counted before it is made.

Equal containers are one node: a few of them, each naming the next one twice, stand for more places than any memory
holds, and a walk that makes them level by level has made a million before it sees that there are too many.

Invariant: never more is counted than the walk would make, so what is refused would have been refused at its end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

from sqlalchemy import Connection

from cas_ckpt.errors import CorruptionError
from cas_ckpt.index.db_errors import REBUILD
from cas_ckpt.index.statements import rows_by_key
from cas_ckpt.index.trees import CONTAINER, PAGE
from cas_ckpt.objects.patterns import KeyPatterns

Place: TypeAlias = tuple[str, int]
"""A key, and the node of the container under it; "" is the root."""

_EDGES = f"""
    SELECT e.node_id, e.form, e.child_id FROM t_entries e
    WHERE e.node_id {{keys}} AND e.form IN ({CONTAINER}, {PAGE}) AND e.child_id IS NOT NULL
"""
_MANY_PLACES = 1024
"""Fewer are not worth a look ahead."""


class Ahead:
    """Counts the containers below places, where these are far more than their nodes; those nodes are read, each once.

    Elsewhere a walk is work that grows with what is stored, and nothing is counted.

    Args:
        keys: What the walk looks for; None, or no patterns: all.
        within: Nodes that it opens; None: any.
    """

    def __init__(
        self, connection: Connection, keys: KeyPatterns | None, *, within: Collection[int] | None = None
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._within = within
        self._sizes: dict[int, int] = {}

    def num_below(self, places: Collection[Place]) -> int:
        """Containers, at least, that the walk makes below these places, each as often as it occurs."""
        nodes = {node for _, node in places}
        if len(places) < max(_MANY_PLACES, 2 * len(nodes)):
            return 0
        self._count(nodes)
        largest: dict[str, int] = {}
        for key, node in places:
            if self._sizes[node] > largest.get(key, 0) and (not self._keys or self._keys.reaches_all(key)):
                largest[key] = self._sizes[node]  # several states may have all that is below one key in common
        return sum(largest.values())

    def _count(self, wanted: Collection[int]) -> None:
        edges: dict[int, list[tuple[int, int]]] = {}
        while wanted := {node for node in wanted if node not in edges and node not in self._sizes}:
            edges.update((node, []) for node in wanted)
            for node, form, child in rows_by_key(self._connection, _EDGES, wanted):
                if self._within is None or child in self._within:
                    edges[node].append((form, child))
            wanted = {child for node in wanted for _, child in edges[node]}
        below = {node: [child for _, child in named] for node, named in edges.items()}
        for node in children_first(below):
            if node in edges:
                self._sizes[node] = sum((form == CONTAINER) + self._sizes[child] for form, child in edges[node])


def children_first(below: Mapping[int, Sequence[int]]) -> list[int]:
    """Containers, each after those that are in it.

    Args:
        below: Node -> nodes that it names.
    Raises:
        CorruptionError: one is inside of itself.
    """
    try:
        return list(TopologicalSorter(below).static_order())
    except CycleError as error:
        raise CorruptionError(f"a container is inside of itself; {REBUILD}") from error
