"""Data of the index that packs do not hold: facts by name, and refs as they were last seen.

Invariant: facts (the store's id, the generation) and refs are a copy of what the store says, never the truth. Knows
nothing of objects. What records of refs say besides, and which commits are forgotten, is a copy too, for who asks in
SQL. Plans and restores are remembered too: restores.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sqlalchemy import Connection

from cas_ckpt.index.database import insert_missing, upsert
from cas_ckpt.index.rows import RefRow, RefState
from cas_ckpt.index.schema import FORGOTTEN, HEADS, META, REF_MOVES, REF_RECORDS, REFS
from cas_ckpt.index.statements import change, change_by_key, rows, rows_by_key
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


def read_meta(connection: Connection, key: str) -> str | None:
    """The value under `key`, or None."""
    return next((value for (value,) in rows(connection, "SELECT value FROM t_meta WHERE key = :key", key=key)), None)


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
    found = rows(connection, "SELECT name, target, generation, updated_s FROM t_refs")
    return {row[0]: RefRow(*row) for row in sorted(found)}


def known_refs(connection: Connection, names: Iterable[str]) -> set[str]:
    """Those of `names` that are remembered."""
    return {name for (name,) in rows_by_key(connection, "SELECT name FROM t_refs WHERE name {keys}", names)}


def read_heads(connection: Connection) -> dict[str, bytes]:
    """Name -> where the ref points, as far as the index knows; empty: it was deleted."""
    moved = {
        (name, before): now for name, before, now in rows(connection, "SELECT name, remembered, target FROM t_heads")
    }
    return {name: moved.get((name, ref.target), ref.target) for name, ref in read_refs(connection).items()}


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
    change_by_key(connection, "DELETE FROM t_refs WHERE name {keys}", names)


def read_records(connection: Connection) -> dict[str, bytes]:
    """Name -> hash of the record of the ref in the last call of `write_states`."""
    return dict(rows(connection, "SELECT name, record FROM t_ref_records"))


def write_states(connection: Connection, states: Iterable[RefState]) -> None:
    """Put what each of these records says in the place of what an earlier one said."""
    for state in states:
        upsert(connection, REF_RECORDS, (state.name, state.record, state.target, storable(state.note)))
        change(connection, "DELETE FROM t_ref_moves WHERE name = :name", name=state.name)
        insert_missing(connection, REF_MOVES, [
            (state.name, at, min(time_us, _MOST_US), old, new, storable(action), storable(author))
            for at, time_us, old, new, action, author in state.moves
        ])  # fmt: skip


_MOST_US = (1 << 63) - 1


def read_forgotten(connection: Connection) -> set[bytes]:
    """The ids of forgotten commits in the last call of `write_forgotten`."""
    return {digest for (digest,) in rows(connection, "SELECT digest FROM t_forgotten")}


def write_forgotten(connection: Connection, ids: Iterable[bytes]) -> None:
    """Let these be the forgotten commits."""
    known, now = read_forgotten(connection), set(ids)
    change_by_key(connection, "DELETE FROM t_forgotten WHERE digest {keys}", known - now)
    insert_missing(connection, FORGOTTEN, [(digest,) for digest in sorted(now - known)])
