"""What packs do not hold: facts by name, refs as they were last seen; restores, planned and made.

Facts (the store's id, the generation), what records of refs say, and which commits are forgotten are a copy of what the
store says, never the truth.

A plan of a restore is kept by the state that it restores and by what names its target, on which alone it depends. What
it says of all ranks together (least, sum, most) is summed up from their rows when it is asked for. A restore that read
and verified all of a state, and raised nothing, proves that the state can be restored: `history.proven` says when that
was last so, by state, as commits of one state share their bytes.

Invariant: plans and restores are bounded. A plan is there with all of its rows, or not at all: one whose rows are not
all there is passed over, and may be made again. The youngest are kept: at most `MOST_PLANS`, and `MOST_RANK_ROWS` rows
of ranks. Of each state the last `MOST_OF_A_STATE` restores are kept, and the last that proves it; of all states
together the last `MOST_RESTORES`, whatever they prove. Knows no objects, no layouts, and nothing of the store: restores
of commits that are gone stay in the log.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Column, Connection, Table

from cas_ckpt.index.database import columns_of, insert_missing, number_table, scratch_tables, upsert
from cas_ckpt.index.rows import RefRow, RefState, change, change_by_key, rows, rows_by_key, storable
from cas_ckpt.index.schema import (
    FORGOTTEN,
    HEADS,
    META,
    PLAN_RANKS,
    PLAN_SHAPES,
    PLANS,
    REF_MOVES,
    REF_RECORDS,
    REFS,
    RESTORES,
)
from cas_ckpt.objects.digest import ObjectKind

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


# --- restores, planned and made ---------------------------------------------------------------

MOST_PLANS = 1000

MOST_RANK_ROWS = 1 << 20
"""Some 50 MB on SQLite; as many ranks as a target may have, so that the youngest plan always fits."""

MOST_RESTORES = 100_000
"""Some 30 MB."""

MOST_OF_A_STATE = 100

MOST_TEXT = 1000
"""Characters of a text that are kept."""

RANK_COLUMNS = tuple(column.name for column in PLAN_RANKS.columns)[2:]
"""Names of the numbers that are known of each rank, in the order of `KeptPlan.totals` and of rows that are written."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A plan without its ranks and shapes; the columns of `t_plans`, `rules` as what the JSON says."""

    root: bytes
    target: bytes
    wants: bytes
    planner_version: int
    mesh: str
    rules: Mapping[str, tuple[str, ...]]
    world_size: int
    num_tensors: int
    num_templates: int
    num_chunks: int
    chunk_bytes: int
    wanted_bytes: int
    made_us: int


@dataclass(frozen=True, slots=True)
class ShapeRow:
    """Tensors that are planned alike; the columns of `t_plan_shapes`."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    placements: tuple[str, ...]
    num_tensors: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class KeptPlan:
    """A plan that was read.

    Attributes:
        totals: Name of a column of `t_plan_ranks` -> its least value, the sum over all ranks, its most.
    """

    row: PlanRow
    totals: Mapping[str, tuple[int, int, int]]
    shapes: tuple[ShapeRow, ...]


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


# --- plans ------------------------------------------------------------------------------------


def write_plan(
    connection: Connection, row: PlanRow, ranks: Sequence[Sequence[int]], shapes: Iterable[ShapeRow]
) -> None:
    """Keep a plan in the place of what was kept for the same state and target.

    One that a checkout kept is replaced by one with the same wants that was requested.

    Args:
        ranks: For each rank, in order, the values of `RANK_COLUMNS`.
    """
    known = "SELECT plan_id FROM t_plans WHERE root = :root AND target IN (:target, :wants)"
    same = rows(connection, known, root=row.root, target=row.target, wants=row.wants)
    _drop_plans(connection, [number for (number,) in same])
    number = int(rows(connection, "SELECT max(plan_id) FROM t_plans")[0][0] or 0) + 1
    rules = json.dumps({pattern: list(placements) for pattern, placements in row.rules.items()})
    insert_missing(connection, PLANS, [(
        number, row.root, row.target, row.wants, row.planner_version, storable(row.mesh), rules, row.world_size,
        row.num_tensors, row.num_templates, row.num_chunks, row.chunk_bytes, row.wanted_bytes, row.made_us,
    )])  # fmt: skip
    insert_missing(connection, PLAN_RANKS, [(number, rank, *values) for rank, values in enumerate(ranks)])
    insert_missing(connection, PLAN_SHAPES, [(
        number, position, storable(shape.key), storable(shape.dtype), json.dumps(shape.shape),
        json.dumps(shape.placements), shape.num_tensors, shape.num_chunks,
    ) for position, shape in enumerate(shapes)])  # fmt: skip
    _drop_oldest(connection)


def _drop_oldest(connection: Connection) -> None:
    """Drop what is more than `MOST_PLANS` and `MOST_RANK_ROWS`; the later a plan was kept, the higher its number."""
    sum_of_ranks, gone = 0, []
    sizes = rows(connection, "SELECT plan_id, world_size FROM t_plans ORDER BY plan_id DESC")
    for place, (number, world_size) in enumerate(sizes):
        sum_of_ranks += world_size
        if place >= MOST_PLANS or sum_of_ranks > MOST_RANK_ROWS:
            gone.append(number)
    _drop_plans(connection, gone)


def _drop_plans(connection: Connection, numbers: Iterable[int]) -> None:
    for table in _TABLES_OF_PLANS:
        change_by_key(connection, f"DELETE FROM {table} WHERE plan_id {{keys}}", numbers)


def drop_incomplete(connection: Connection) -> None:
    """Drop plans whose rows are not all there, and rows without a plan: what a copy of a damaged index may leave."""
    whole = {number for number, *_ in rows(connection, _SUMMED.format(where="true"))}
    for table in _TABLES_OF_PLANS:
        found = rows(connection, f"SELECT DISTINCT plan_id FROM {table}")
        _drop_plans(connection, {number for (number,) in found} - whole)


_TABLES_OF_PLANS = (PLAN_RANKS.name, PLAN_SHAPES.name, PLANS.name)
_SUMMED = f"""
    SELECT {", ".join(f"p.{column.name}" for column in PLANS.columns)},
           {", ".join(f"min(r.{name}), sum(r.{name}), max(r.{name})" for name in RANK_COLUMNS)}
    FROM t_plans p JOIN t_plan_ranks r ON r.plan_id = p.plan_id WHERE {{where}}
    GROUP BY p.plan_id HAVING count(*) = p.world_size
"""
"""Plans whose rows are all there, and the least, sum and most of what their ranks do."""


def known_targets(connection: Connection, root: bytes) -> set[bytes]:
    """The targets that there are plans for, of this state."""
    return {plan.row.target for plan in read_plans(connection, root)}


def read_plan(connection: Connection, root: bytes, target: bytes) -> KeptPlan | None:
    """The plan for this state and target, or None."""
    where = "p.root = :root AND p.target = :target"
    return next(iter(_plans(connection, rows(connection, _SUMMED.format(where=where), root=root, target=target))), None)


def read_plans(
    connection: Connection, root: bytes | None = None, *, planner_version: int | None = None
) -> list[KeptPlan]:
    """All plans for `root`, or all there are, by (root, mesh, target); of one version of the planner, or any."""
    where = "true" if root is None else "p.root = :root"
    found = _plans(connection, rows(connection, _SUMMED.format(where=where), root=root))
    found = [plan for plan in found if planner_version in (None, plan.row.planner_version)]
    return sorted(found, key=lambda plan: (plan.row.root, plan.row.mesh, plan.row.target))


def has_plan(connection: Connection, root: bytes, wants: bytes) -> bool:
    """Whether there is a plan of this state for these wants."""
    query = "SELECT 1 FROM t_plans WHERE root = :root AND wants = :wants LIMIT 1"
    return bool(rows(connection, query, root=root, wants=wants))


def plans_for_wants(
    connection: Connection, wants: Iterable[tuple[bytes, bytes]]
) -> dict[tuple[bytes, bytes], KeptPlan]:
    """(state, wants) -> the youngest plan for it; where there is none, it is left out."""
    wanted = set(wants)
    found = rows_by_key(connection, _SUMMED.format(where="p.wants {keys}"), [each for _, each in wanted])
    kept = {(plan.row.root, plan.row.wants): plan for plan in _plans(connection, sorted(found))}
    return {each: plan for each, plan in kept.items() if each in wanted}


def cheapest_plans(
    connection: Connection,
    root: bytes,
    *,
    storage_bandwidth: float,
    network_bandwidth: float,
    targets: Sequence[bytes] | None = None,
    most_ranks: int | None = None,
    planner_version: int | None = None,
) -> list[KeptPlan]:
    """The plans for `root`, the one that takes the least time first; of equals the one of fewer ranks.

    Args:
        storage_bandwidth, network_bandwidth: Bytes per second and rank; the time is that of the rank that reads most,
            and of the one that sends or receives most, one after the other.
        targets: Only plans for these.
        most_ranks: Only plans for so many ranks at most.
        planner_version: Only plans by this version of the planner.
    """

    def seconds(plan: KeptPlan) -> float:
        read, sent, received = (plan.totals[name][2] for name in ("read_bytes", "sent_bytes", "received_bytes"))
        return read / storage_bandwidth + max(sent, received) / network_bandwidth

    found = [
        plan
        for plan in read_plans(connection, root, planner_version=planner_version)
        if (targets is None or plan.row.target in targets) and (most_ranks is None or plan.row.world_size <= most_ranks)
    ]
    return sorted(found, key=lambda plan: (seconds(plan), plan.row.world_size))


def _plans(connection: Connection, summed: Sequence[tuple[Any, ...]]) -> list[KeptPlan]:
    """Rows of `_SUMMED` as plans, with the shapes of each."""
    asked = f"SELECT {columns_of(PLAN_SHAPES)} FROM t_plan_shapes WHERE plan_id {{keys}} ORDER BY plan_id, position"
    shapes: dict[int, list[ShapeRow]] = {}
    for number, _, key, dtype, shape, placements, *counts in rows_by_key(connection, asked, [row[0] for row in summed]):
        sizes, placed = tuple(map(int, json.loads(shape))), tuple(map(str, json.loads(placements)))
        shapes.setdefault(number, []).append(ShapeRow(key, dtype, sizes, placed, *map(int, counts)))
    found, num_columns = [], len(PLANS.columns)
    for number, root, target, wants, version, mesh, text, *values in summed:
        rules = {str(pattern): tuple(map(str, placements)) for pattern, placements in json.loads(text).items()}
        counts = list(map(int, values))
        own, sums = counts[: num_columns - 7], counts[num_columns - 7 :]
        totals = {name: (sums[3 * at], sums[3 * at + 1], sums[3 * at + 2]) for at, name in enumerate(RANK_COLUMNS)}
        row = PlanRow(root, target, wants, int(version), mesh, rules, *own)
        found.append(KeptPlan(row, totals, tuple(shapes.get(number, ()))))
    return found


# --- the log of restores --------------------------------------------------------------------------


def write_restore(connection: Connection, row: RestoreRow) -> None:
    """Add a restore; what is more than is kept goes. Costs a few statements, whatever the length of the log."""
    number = int(rows(connection, _LAST)[0][0] or 0) + 1
    error = None if row.error is None else _line(row.error)
    insert_missing(connection, RESTORES, [(
        number, row.commit_id, row.root, row.verb, row.wants, _line(row.mesh), row.world_size, row.started_us,
        row.seconds, row.num_bytes, _line(row.author), _line(row.host), int(row.complete), error,
    )])  # fmt: skip
    proves = "CASE WHEN complete = 1 AND error IS NULL THEN 1 ELSE 0 END"
    of_state = rows(
        connection,
        f"SELECT restore_id, {proves} FROM t_restores WHERE root = :root ORDER BY restore_id DESC",
        root=row.root,
    )
    proof = next((restore for restore, is_proof in of_state if is_proof), None)
    gone = [restore for restore, _ in of_state[MOST_OF_A_STATE:] if restore != proof]
    change_by_key(connection, "DELETE FROM t_restores WHERE restore_id {keys}", gone)
    if number > MOST_RESTORES:  # else there cannot be too many; of most states many are gone
        more = max(int(rows(connection, "SELECT count(*) FROM t_restores")[0][0]) - MOST_RESTORES, 0)
        oldest = f"SELECT restore_id FROM t_restores ORDER BY restore_id LIMIT {more}"
        change(connection, f"DELETE FROM t_restores WHERE restore_id IN ({oldest})")


_LAST = "SELECT max(restore_id) FROM t_restores"


def _line(text: str) -> str:
    """`text` in one line that a database can hold."""
    line = " ".join(storable(text).split())
    return line if len(line) <= MOST_TEXT else f"{line[: MOST_TEXT - 3]}..."


def read_restores(connection: Connection, root: bytes | None = None, *, limit: int | None = None) -> list[RestoreRow]:
    """The restores of a state, or all there are, the last one first; at most `limit`."""
    where = "" if root is None else "WHERE root = :root"
    most = "" if limit is None else f"LIMIT {int(limit)}"
    asked = f"SELECT {columns_of(RESTORES)} FROM t_restores {where} ORDER BY restore_id DESC {most}"
    found = rows(connection, asked, root=root)
    return [RestoreRow(*(*row[:11], bool(row[11]), row[12])) for _, *row in found]


def proven_commits(connection: Connection) -> dict[bytes, int]:
    """Commit -> place in the log of the last restore of itself that proves it: the later, the higher; no clock counts.

    The cost is that of the log.
    """
    asked = "SELECT commit_id, max(restore_id) FROM t_restores WHERE complete = 1 AND error IS NULL GROUP BY commit_id"
    return dict(rows(connection, asked))


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
    if rows(connection, _LAST)[0][0] is None:
        return {}
    with scratch_tables(connection, _RESTORED, _WAVE, _NEXT):
        reached = change(connection, _BEGIN)
        while reached:
            change(connection, _SETTLE)
            reached = change(connection, _GO_ON)
            change(connection, "DELETE FROM restored_wave")
            change(connection, "INSERT INTO restored_wave SELECT object_id, proven_us FROM restored_next")
            change(connection, "DELETE FROM restored_next")
        return dict(rows(connection, _OF_PACKS, chunk=int(ObjectKind.CHUNK)))
