"""What the index remembers and packs do not hold: facts by name, refs as they were last seen, and restore plans.

Invariant: facts (the store's id, the generation) and refs are a copy of what the store says, never the truth. A plan is
kept by the root that it restores and the digest of the layout that it restores into, on which alone it depends. Knows
nothing of objects, or of what a plan says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, select

from cas_ckpt.index.database import KeyQuery, upsert
from cas_ckpt.index.rows import RefRow
from cas_ckpt.index.schema import META, PLANS, REFS

STORE = "store_id"
GENERATION = "generation"
MADE = "made"
"""Changes whenever all rows are replaced, so that numbers which were read before mean something else."""

NEWER = "newer"
"""Names of packs with objects of a later version, one a line: what those refer to is not known here."""

_VALUES = KeyQuery(select(META.c.value), META.c.key)
_NAMED = KeyQuery(select(REFS.c.name), REFS.c.name)


def read_meta(connection: Connection, key: str) -> str | None:
    """The value under `key`, or None."""
    return next((value for (value,) in _VALUES.rows(connection, [key])), None)


def write_meta(connection: Connection, key: str, value: str) -> None:
    """Put `value` under `key`."""
    upsert(connection, META, (key, value))


def generation(connection: Connection) -> int:
    """The generation of garbage collection that the rows are of; 0 before the first."""
    return int(read_meta(connection, GENERATION) or 0)


def newer_packs(connection: Connection) -> list[str]:
    """Packs with objects that only a later version knows."""
    return sorted((read_meta(connection, NEWER) or "").split())


def note_newer(connection: Connection, come: Iterable[str] = (), gone: Iterable[str] = ()) -> None:
    """Such packs came, or packs went, whatever they hold."""
    before = set(newer_packs(connection))
    after = (before | set(come)) - set(gone)
    if after != before:
        write_meta(connection, NEWER, "\n".join(sorted(after)))


def read_refs(connection: Connection) -> dict[str, RefRow]:
    """Name -> ref, sorted by name."""
    rows = connection.execute(select(REFS.c.name, REFS.c.target, REFS.c.generation, REFS.c.updated_s))
    return {row.name: RefRow(*row) for row in sorted(rows)}


def known_refs(connection: Connection, names: Iterable[str]) -> set[str]:
    """Those of `names` that are remembered."""
    return {name for (name,) in _NAMED.rows(connection, names)}


def write_refs(connection: Connection, refs: Iterable[RefRow]) -> None:
    """Put each of `refs` in the place of the one that has its name."""
    for ref in refs:
        upsert(connection, REFS, ref)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A restore plan as the index keeps it.

    Attributes:
        root: The state that is restored.
        layout: Digest of the target layout (and of the version of the planner).
        target: The target layout as text.
        report: What the planner had to say.
    """

    root: bytes
    layout: bytes
    target: str
    report: bytes


def write_plan(connection: Connection, row: PlanRow) -> None:
    """Keep `row` in the place of an older one for the same root and layout."""
    upsert(connection, PLANS, (row.root, row.layout, row.target, row.report))


def read_plan(connection: Connection, root: bytes, layout: bytes) -> PlanRow | None:
    """The plan for this root and layout, or None."""
    query = select(PLANS).where(PLANS.c.root == root, PLANS.c.layout == layout)
    row = connection.execute(query).one_or_none()
    return None if row is None else PlanRow(*row)


def read_plans(connection: Connection, root: bytes | None = None) -> list[PlanRow]:
    """All plans for `root`, or all there are, by (root, target)."""
    query = select(PLANS).order_by(PLANS.c.root, PLANS.c.target)
    if root is not None:
        query = query.where(PLANS.c.root == root)
    return [PlanRow(*row) for row in connection.execute(query)]
