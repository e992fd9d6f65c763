"""Containers under their keys, of many states at once: what `log --key` and `find` walk.

A place is a key and the node of the container under it. States that have the same container under the same key have
the place in common, which is opened once; so the work follows what differs between states.

Invariant: no state has two places of one key. What a container holds is told by the places of the level below, each
after all that lead to it. Knows nothing of commits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache

from sqlalchemy import Connection

from cas_ckpt.index.ahead import Place
from cas_ckpt.index.trees import Row, Tree, open_containers
from cas_ckpt.objects.patterns import ANY_NAME, KeyPatterns, Names


class Matcher:
    """`KeyPatterns` for keys that are asked for again and again: they are the same in most states. No patterns: any."""

    def __init__(self, keys: KeyPatterns) -> None:
        self.matches = cache(keys.matches) if keys else _always
        self.covers = cache(keys.covers) if keys else _always
        self.reaches = cache(keys.reaches) if keys else _always
        self.names_in = cache(keys.names_in) if keys else _any_name


def _always(_: str) -> bool:
    return True


def _any_name(_: str) -> Names:
    return ANY_NAME


def open_places(
    connection: Connection,
    places: Iterable[Place],
    trees: Mapping[int, Tree],
    matcher: Matcher,
    *,
    leaves: str = "",
    within: Collection[int] | None = None,
) -> Iterator[tuple[Place, Sequence[Row]]]:
    """Each place with the rows of its container that may match; arguments and errors as for `open_containers`."""
    groups: dict[Names, set[Place]] = {}
    for place in places:
        groups.setdefault(matcher.names_in(place[0]), set()).add(place)
    for names, group in groups.items():
        opened = open_containers(
            connection, {number: trees[number] for _, number in group}, names, leaves=leaves, within=within
        )
        for place in group:
            yield place, opened[place[1]]
