"""The log of restores: which commits were restored, when, by whom, and how it ended.

A restore that read and verified all of a state, and raised nothing, proves that the state can be restored: `proven`
says when that was last so, by state, as commits of one state share their bytes.

Invariant: the log is bounded. Of each state the last `MOST_OF_A_STATE` restores are kept, and the last that proves it;
of all states together the last `MOST_RESTORES`, whatever they prove. Knows nothing of the store: restores of commits
that are gone stay in the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Column, Connection, Table, delete, func, select, text

from cas_ckpt.index.database import KeyQuery, execute, insert_missing, number_table, rows_of, scratch_tables
from cas_ckpt.index.schema import RESTORES
from cas_ckpt.index.texts import storable
from cas_ckpt.objects.digest import ObjectKind

MOST_RESTORES = 100_000
"""Some 30 MB."""

MOST_OF_A_STATE = 100

MOST_TEXT = 1000
"""Characters of a text that are kept."""

_LAST = select(func.max(RESTORES.c.restore_id))
_COUNT = select(func.count()).select_from(RESTORES)
_OF_STATE = KeyQuery(select(RESTORES.c.restore_id, RESTORES.c.complete, RESTORES.c.error.is_(None)), RESTORES.c.root)
_PROVES = (RESTORES.c.complete == 1) & RESTORES.c.error.is_(None)


@dataclass(frozen=True, slots=True)
class RestoreRow:
    """One restore; the columns of `t_restores` after its number."""

    commit_id: bytes
    root: bytes
    verb: str
    wants: bytes | None
    mesh: str
    world_size: int
    started_us: int
    seconds: float
    num_bytes: int | None
    author: str
    host: str
    complete: bool
    error: str | None


def write_restore(connection: Connection, row: RestoreRow) -> None:
    """Add a restore; what is more than is kept goes. Costs a few statements, whatever the length of the log."""
    number = int(rows_of(connection, _LAST)[0][0] or 0) + 1
    error = None if row.error is None else _text(row.error)
    insert_missing(connection, RESTORES, [(
        number, row.commit_id, row.root, row.verb, row.wants, _text(row.mesh), row.world_size, row.started_us,
        row.seconds, row.num_bytes, _text(row.author), _text(row.host), int(row.complete), error,
    )])  # fmt: skip
    of_state = sorted(_OF_STATE.rows(connection, [row.root]), reverse=True)
    proof = next((each[0] for each in of_state if each[1] and each[2]), None)
    gone = [each[0] for each in of_state[MOST_OF_A_STATE:] if each[0] != proof]
    if gone:
        connection.execute(delete(RESTORES).where(RESTORES.c.restore_id.in_(gone)))
    if number > MOST_RESTORES:  # else there cannot be too many
        _drop_oldest(connection)


def _drop_oldest(connection: Connection) -> None:
    """Drop what is more than `MOST_RESTORES`. Numbers do not tell how many there are: of most states many are gone."""
    more = int(rows_of(connection, _COUNT)[0][0]) - MOST_RESTORES
    if more > 0:
        oldest = select(RESTORES.c.restore_id).order_by(RESTORES.c.restore_id).limit(more)
        last = max(connection.execute(oldest).scalars())
        connection.execute(delete(RESTORES).where(RESTORES.c.restore_id <= last))


def _text(text: str) -> str:
    """`text` in one line that a database can hold."""
    line = " ".join(storable(text).split())
    return line if len(line) <= MOST_TEXT else f"{line[: MOST_TEXT - 3]}..."


def read_restores(connection: Connection, root: bytes | None = None, *, limit: int | None = None) -> list[RestoreRow]:
    """The restores of a state, or all there are, the last one first; at most `limit`."""
    columns = list(RESTORES.columns)[1:]
    query = select(*columns).order_by(RESTORES.c.restore_id.desc()).limit(limit)
    if root is not None:
        query = query.where(RESTORES.c.root == root)
    return [_row(row) for row in connection.execute(query)]


def _row(row: Any) -> RestoreRow:
    return RestoreRow(
        bytes(row.commit_id), bytes(row.root), row.verb, None if row.wants is None else bytes(row.wants), row.mesh,
        int(row.world_size), int(row.started_us), float(row.seconds),
        None if row.num_bytes is None else int(row.num_bytes), row.author, row.host, bool(row.complete), row.error,
    )  # fmt: skip


def proven_commits(connection: Connection) -> dict[bytes, int]:
    """Commit -> place in the log of the last restore of itself that proves it: the later, the higher; no clock counts.

    The cost is that of the log.
    """
    commit_id = RESTORES.c.commit_id
    query = select(commit_id, func.max(RESTORES.c.restore_id)).where(_PROVES).group_by(commit_id)
    return {bytes(commit): int(number) for commit, number in connection.execute(query)}


# --- what restores prove of packs ---------------------------------------------------------------


def _moments(name: str) -> Table:
    return number_table(name, Column("proven_us", BigInteger, nullable=False))


_RESTORED, _WAVE, _NEXT = _moments("restored"), _moments("restored_wave"), _moments("restored_next")

_BEGIN = """
    INSERT INTO restored_wave
    SELECT o.object_id, MAX(r.started_us) FROM t_restores r CROSS JOIN t_objects o
    WHERE r.complete = 1 AND r.error IS NULL AND o.digest = r.root GROUP BY o.object_id
"""
_SETTLE = """
    INSERT INTO restored SELECT object_id, proven_us FROM restored_wave WHERE true
    ON CONFLICT (object_id) DO UPDATE SET proven_us = excluded.proven_us
"""
_GO_ON = """
    INSERT INTO restored_next
    SELECT e.child_id, MAX(w.proven_us) FROM restored_wave w CROSS JOIN t_edges e
    LEFT JOIN restored k ON k.object_id = e.child_id
    WHERE e.parent_id = w.object_id AND (k.proven_us IS NULL OR k.proven_us < w.proven_us) GROUP BY e.child_id
"""
_OF_PACKS = """
    SELECT p.name, m.proven_us FROM (
        SELECT +l.pack_id AS pack_id, MIN(COALESCE(k.proven_us, 0)) AS proven_us
        FROM t_locations l LEFT JOIN restored k ON k.object_id = l.object_id
        WHERE l.kind = :chunk GROUP BY +l.pack_id
    ) m JOIN t_packs p ON p.pack_id = m.pack_id WHERE m.proven_us > 0
"""
"""Both tables are read in the order of objects: `+` keeps SQLite from reading locations pack by pack instead."""


def proven_packs(connection: Connection) -> dict[str, int]:
    """Pack -> when restores had last read all chunks in it, in microseconds; packs with any other are left out.

    That is the moment of the restore that is the longest ago among the last ones of each chunk. Restores read one copy
    of a chunk: of chunks that are in several packs all copies count. The cost is that of the edges below all states
    that were restored, each once or a few times, and of all chunk rows; nothing if there are no restores.
    """
    if rows_of(connection, _LAST)[0][0] is None:
        return {}
    with scratch_tables(connection, _RESTORED, _WAVE, _NEXT):
        reached = execute(connection, _BEGIN)
        while reached:
            execute(connection, _SETTLE)
            reached = execute(connection, _GO_ON)
            execute(connection, "DELETE FROM restored_wave")
            execute(connection, "INSERT INTO restored_wave SELECT object_id, proven_us FROM restored_next")
            execute(connection, "DELETE FROM restored_next")
        rows = connection.execute(text(_OF_PACKS), {"chunk": int(ObjectKind.CHUNK)}).all()
    return {name: int(proven_us) for name, proven_us in rows}
