"""Data of the index that packs do not hold: facts by name, and refs as they were last seen.

Invariant: facts (the store's id, the generation) and refs are a copy of what the store says, never the truth. Knows
nothing of objects. What records of refs say besides, and which commits are forgotten, is a copy too, for who asks in
SQL. Plans and restores are remembered too: plans.py, restores.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sqlalchemy import Connection, delete, select

from cas_ckpt.index.database import KeyQuery, insert_missing, upsert
from cas_ckpt.index.rows import RefRow, RefState
from cas_ckpt.index.schema import FORGOTTEN, HEADS, META, REF_MOVES, REF_RECORDS, REFS
from cas_ckpt.index.statements import KEYS_PER_QUERY, batches
from cas_ckpt.index.texts import storable

STORE = "store_id"
GENERATION = "generation"
MADE = "made"
"""Changes whenever all rows are replaced, so that numbers which were read before mean something else."""

FOLDER = "folder"
"""The folder, as a URL, that a shared index is of; its copies have the same store id."""

BEHIND = "behind"
"""There when an older version made the index, and rows of packs that it knows are missing."""

VIEWS = "views"
"""The version of the views that are there, and their names."""

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


def made_views(connection: Connection) -> list[str]:
    """The version of the views that are there, and their names."""
    return (read_meta(connection, VIEWS) or "0").split()


def views_version(connection: Connection) -> int:
    """The version of the views that are there; 0: none."""
    return int(made_views(connection)[0])


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


def read_heads(connection: Connection) -> dict[str, bytes]:
    """Name -> where the ref points, as far as the index knows; empty: it was deleted."""
    moved = {row.name: row for row in connection.execute(select(HEADS))}
    found = {}
    for name, ref in read_refs(connection).items():
        row = moved.get(name)
        found[name] = ref.target if row is None or row.remembered != ref.target else row.target
    return found


def write_heads(connection: Connection, heads: Mapping[str, bytes]) -> None:
    """Say where refs point that `read_refs` knows, without a change to what it remembers of them."""
    known, now = read_refs(connection), read_heads(connection)
    for name, target in heads.items():
        if name in known and now[name] != target:
            upsert(connection, HEADS, (name, known[name].target, target))


def write_refs(connection: Connection, refs: Iterable[RefRow]) -> None:
    """Put each of `refs` in the place of the one that has its name."""
    for ref in refs:
        upsert(connection, REFS, ref)


def drop_refs(connection: Connection, names: Iterable[str]) -> None:
    """Forget these refs."""
    for name in names:
        connection.execute(delete(REFS).where(REFS.c.name == name))


def read_records(connection: Connection) -> dict[str, bytes]:
    """Name -> hash of the record of the ref in the last call of `write_states`."""
    return dict(map(tuple, connection.execute(select(REF_RECORDS.c.name, REF_RECORDS.c.record))))


def write_states(connection: Connection, states: Iterable[RefState]) -> None:
    """Put what each of these records says in the place of what an earlier one said."""
    for state in states:
        upsert(connection, REF_RECORDS, (state.name, state.record, state.target, storable(state.note)))
        connection.execute(delete(REF_MOVES).where(REF_MOVES.c.name == state.name))
        rows = [
            (state.name, at, min(time_us, _MOST_US), old, new, storable(action), storable(author))
            for at, time_us, old, new, action, author in state.moves
        ]
        insert_missing(connection, REF_MOVES, rows)


_MOST_US = (1 << 63) - 1


def read_forgotten(connection: Connection) -> set[bytes]:
    """The ids of forgotten commits in the last call of `write_forgotten`."""
    return set(connection.execute(select(FORGOTTEN.c.digest)).scalars())


def write_forgotten(connection: Connection, ids: Iterable[bytes]) -> None:
    """Let these be the forgotten commits."""
    known, now = read_forgotten(connection), set(ids)
    for batch in batches(sorted(known - now), KEYS_PER_QUERY):
        connection.execute(delete(FORGOTTEN).where(FORGOTTEN.c.digest.in_(batch)))
    insert_missing(connection, FORGOTTEN, [(digest,) for digest in sorted(now - known)])
