"""At a million chunks, no question that people or verbs wait for reads a whole table of PostgreSQL.

The server says beforehand how it will go about each statement, with the rows and the statistics that it has then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import event

from cas_ckpt.index import contents, entries, finding, garbage, history, tree_diff, usage
from cas_ckpt.index.finding import EntryFilter
from cas_ckpt.index.index import Index
from cas_ckpt.index.postgres import schema_of
from cas_ckpt.index.rows import CommitRow, PackRecord
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.pack import PackKind
from cas_ckpt.objects.patterns import KeyPatterns
from tests.index.building import commit_row, data_pack, digest, extent

pytestmark = pytest.mark.slow

STORE = "million"
NUM_CHUNKS, PER_TENSOR, PER_PACK, NUM_COMMITS = 1_000_000, 400, 128, 10
NUM_TENSORS = NUM_CHUNKS // PER_TENSOR
SECONDARY = ("edges_by_child", "objects_by_number", "locations_by_pack", "packs_by_name")
FILL = f"""
    INSERT INTO t_packs SELECT n, 'packs/' || n || '.data', 1, 536870912, {PER_PACK}, 0
        FROM generate_series(1, {NUM_CHUNKS // PER_PACK + 1}) n;
    INSERT INTO t_objects SELECT sha256(('chunk ' || n)::bytea), n, 1 FROM generate_series(1, {NUM_CHUNKS}) n;
    INSERT INTO t_locations SELECT n, 1 + (n - 1) / {PER_PACK}, 0, 1, 4194304, 64, 65536, 64, 2000, 4000000, 3, NULL
        FROM generate_series(1, {NUM_CHUNKS}) n;
    INSERT INTO t_objects SELECT sha256(('tensor ' || n)::bytea), {NUM_CHUNKS} + n, 3
        FROM generate_series(1, {NUM_TENSORS}) n;
    INSERT INTO t_locations SELECT {NUM_CHUNKS} + n, 1, 0, 3, 9000, 0, 0, 64, 50, 9000, 0, NULL
        FROM generate_series(1, {NUM_TENSORS}) n;
    INSERT INTO t_edges SELECT {NUM_CHUNKS} + 1 + (n - 1) / {PER_TENSOR}, n FROM generate_series(1, {NUM_CHUNKS}) n;
"""
WHOLE_KEY = r"locations_pkey on t_locations\b.*\n *Index Cond: \(+pack_id = "  # its second column: all of it is read
LARGE = re.compile(rf"Seq Scan on (t_objects|t_locations|t_edges|t_entries)\b|{WHOLE_KEY}")


@pytest.fixture(scope="module")
def index(server_url: str) -> Iterator[Index]:
    Index.discard(server_url, store_id=STORE)
    with Index.open(server_url, store_id=STORE) as index:
        with psycopg.connect(server_url.replace("+psycopg", "")) as connection:
            connection.execute(f'SET search_path TO "{schema_of(STORE)}"'.encode())
            made = "SELECT indexdef FROM pg_indexes WHERE schemaname = current_schema() AND indexname = ANY(%s)"
            again = [definition for (definition,) in connection.execute(made, (list(SECONDARY),))]
            assert len(again) == len(SECONDARY)
            connection.execute(f"DROP INDEX {', '.join(SECONDARY)}; {FILL}; {'; '.join(again)}".encode())
        tensors = [_sha(f"tensor {number}") for number in range(1, NUM_TENSORS + 1)]
        for number in range(NUM_COMMITS):
            share = tensors[number::NUM_COMMITS] + tensors[:20]
            index.add_packs([_commit(f"c{number}", share, [f"c{number - 1}"] if number else [])])
        with psycopg.connect(server_url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute("ANALYZE")  # as the server does by itself, some time after so many rows came
        yield index
    Index.discard(server_url, store_id=STORE)


def _sha(text: str) -> Digest:
    import hashlib

    return Digest(hashlib.sha256(text.encode()).digest())


def _commit(name: str, tensors: list[Digest], parents: list[str]) -> PackRecord:
    row = commit_row(name, parents, metrics={"loss": 1.0})
    listed = [extent(row.root, ObjectKind.TREE), extent(row.digest, ObjectKind.COMMIT)]
    return PackRecord(f"packs/{name}.meta", PackKind.META, 5000, listed, [(row.root, tensors)], [row])


@contextmanager
def _scans(index: Index) -> Iterator[list[str]]:
    """Statements of the block for which the server would read all of a large table."""
    found: list[str] = []

    @event.listens_for(index._database.engine, "before_cursor_execute")
    def look(_: Any, cursor: Any, statement: str, values: Any, __: Any, many: bool) -> None:
        if statement.split()[0] in ("SELECT", "INSERT", "DELETE", "UPDATE", "WITH"):
            plan = cursor.connection.execute(f"EXPLAIN {statement}", values[0] if many else values).fetchall()
            lines = "\n".join(line for (line,) in plan)
            if LARGE.search(lines):
                found.append(f"{statement}\n{lines}")

    yield found
    event.remove(index._database.engine, "before_cursor_execute", look)


def _live(*, but: str | None = None) -> tuple[list[bytes], list[bytes]]:
    names = [f"c{number}" for number in range(NUM_COMMITS) if f"c{number}" != but]
    return [digest(name) for name in names], [digest(f"root of {name}") for name in names]


def _collect(index: Index) -> None:
    commits, roots = _live(but="c9")
    with garbage.living(index, commits=commits, roots=roots) as alive:
        condemned = [pack.name for pack in alive.packs()]
        assert condemned and alive.summary().num_objects > 90_000
        alive.missing()
        alive.needed(condemned[:100])
        alive.live_entries(condemned[:10])


def _commit_ten_chunks(index: Index) -> None:
    chunks = [f"new {number}" for number in range(10)]
    index.add_packs([data_pack("packs/new.data", chunks)])
    index.add_packs([_commit("new", [_sha(f"tensor {number}") for number in range(1, 50)], ["c9"])])


CHUNKS = [_sha(f"chunk {number}") for number in range(1, NUM_CHUNKS, 997)]
MANY_CHUNKS = [_sha(f"chunk {number}") for number in range(1, NUM_CHUNKS, 97)]  # as many as are asked for at once
QUESTIONS: dict[str, Callable[[Index], object]] = {
    "are these chunks known": lambda index: index.read(contents.known, [*CHUNKS, digest("unknown")]),
    "are ten thousand chunks known": lambda index: index.read(contents.known, MANY_CHUNKS),
    "where are these chunks": lambda index: index.read(contents.locate, CHUNKS),
    "where is one chunk": lambda index: index.read(contents.locate, CHUNKS[:1]),
    "what begins so": lambda index: index.read(contents.resolve_prefix, "abcd"),
    "what is the log": lambda index: list(history.log(index, [digest("c9")])),
    "which commits hold a chunk": lambda index: index.read(usage.commits_holding, CHUNKS[5]),
    "which states share most": lambda index: index.read(usage.nearest, CHUNKS[:200]),
    "how much is below a tensor": lambda index: index.read(usage.under, [_sha("tensor 7")]),
    "what would forgetting free": lambda index: garbage.freed(index, _live(), _live(but="c9")),
    "what may be collected": _collect,
    "a commit of ten chunks": _commit_ten_chunks,
    "a pack is gone": lambda index: index.drop_packs(["packs/77.data"]),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_at_a_million_chunks_no_whole_table_is_read(index: Index, question: str) -> None:
    with _scans(index) as found:
        QUESTIONS[question](index)
    assert not found, "\n\n".join(found)


# --- a million entries of states ----------------------------------------------------------------

ENTRIES_STORE = "million-entries"
NUM_STATES, NUM_GROUPS, PER_GROUP = 10, 1_000, 100
"""In each state containers of tensors; of each container one tensor differs from state to state."""

_CELLS = f"generate_series(0, {NUM_STATES - 1}) r, generate_series(0, {NUM_GROUPS - 1}) c"
_CHUNK = f"CASE p WHEN 0 THEN 100001 + r * {NUM_GROUPS} + c ELSE 1 + c * {PER_GROUP} + p END"
_POSITIONS = f"generate_series(0, {PER_GROUP - 1}) p"
FILL_ENTRIES = f"""
    INSERT INTO t_packs VALUES (1, 'packs/1.data', 1, 536870912, 110000, 0);
    INSERT INTO t_specs VALUES ('float32[64, 64]', 1, 'float32', '[64, 64]', 2, 16384);
    INSERT INTO t_objects SELECT sha256(('chunk ' || n)::bytea), n, 1 FROM generate_series(1, 110000) n;
    INSERT INTO t_objects SELECT sha256(('group ' || r || ' ' || c)::bytea), 200000 + r * {NUM_GROUPS} + c, 4
        FROM {_CELLS};
    INSERT INTO t_objects SELECT sha256(('state ' || r)::bytea), 300000 + r, 4
        FROM generate_series(0, {NUM_STATES - 1}) r;
    INSERT INTO t_locations SELECT object_id, 1, 0, kind, 16384, 1, 16384, 64, 100, 16384, 0, NULL FROM t_objects;
    INSERT INTO t_trees SELECT 200000 + r * {NUM_GROUPS} + c, 'dict', 0, {PER_GROUP}, NULL FROM {_CELLS};
    INSERT INTO t_trees SELECT 300000 + r, 'dict', 0, {NUM_GROUPS}, NULL FROM generate_series(0, {NUM_STATES - 1}) r;
    INSERT INTO t_entries SELECT 200000 + r * {NUM_GROUPS} + c, p, 'w' || lpad(p::text, 2, '0'), 2, 1, {_CHUNK}, NULL
        FROM {_CELLS}, {_POSITIONS};
    INSERT INTO t_entries SELECT 300000 + r, c, 'l' || lpad(c::text, 3, '0'), 0, NULL,
        200000 + r * {NUM_GROUPS} + c, NULL FROM {_CELLS};
    INSERT INTO t_node_specs SELECT 1, 200000 + r * {NUM_GROUPS} + c, {PER_GROUP} FROM {_CELLS};
    INSERT INTO t_edges SELECT node_id, child_id FROM t_entries;
"""
ROOTS = [_sha(f"state {number}") for number in range(NUM_STATES)]
COMMITS_OF_STATES = [
    CommitRow(digest(f"s{number}"), root, (digest(f"s{number - 1}"),) if number else (), time_us=number)
    for number, root in enumerate(ROOTS)
]


@pytest.fixture(scope="module")
def states(server_url: str) -> Iterator[Index]:
    Index.discard(server_url, store_id=ENTRIES_STORE)
    with Index.open(server_url, store_id=ENTRIES_STORE) as index:
        with psycopg.connect(server_url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(f'SET search_path TO "{schema_of(ENTRIES_STORE)}"'.encode())
            connection.execute(FILL_ENTRIES.encode())
            connection.execute("ANALYZE")
        for row in COMMITS_OF_STATES:
            pack = [extent(row.digest, ObjectKind.COMMIT)]
            index.add_packs([PackRecord(f"packs/{row.time_us}.meta", PackKind.META, 500, pack, [], [row])])
        yield index
    Index.discard(server_url, store_id=ENTRIES_STORE)


def _find(index: Index, keys: str | None = None, **conditions: Any) -> int:
    wanted = EntryFilter(KeyPatterns(keys), **conditions)
    return len(index.read(finding.find_entries, roots=ROOTS, wanted=wanted))


def _changed(index: Index, keys: str) -> int:
    asked = {"rows": COMMITS_OF_STATES, "keys": KeyPatterns(keys), "forgotten": ()}
    return len(index.read(lambda connection: tree_diff.changed_commits(connection, **asked)))


ABOUT_ENTRIES: dict[str, tuple[Callable[[Index], object], object]] = {
    "find --key": (lambda index: _find(index, "l07?/w00"), 10 * NUM_STATES),
    "find --key in all containers": (lambda index: _find(index, "*/w01"), NUM_GROUPS),
    "find --holding": (lambda index: _find(index, holding=_sha("chunk 1002")), 1),
    "find --dtype --key": (lambda index: _find(index, "l9*/w*2", dtype="float32"), 10 * NUM_GROUPS // 10),
    "find --shape of which there is none": (lambda index: _find(index, shape=(64, 65)), 0),
    "log --key": (lambda index: _changed(index, "l001/w00"), NUM_STATES),
    "log --key where nothing changed": (lambda index: _changed(index, "l?01/w01"), 1),
    "ls of a pattern": (lambda index: len(index.read(entries.manifest, ROOTS[3], KeyPatterns("l00?/w0?"))), 100),
    "ls of all": (lambda index: len(index.read(entries.manifest, ROOTS[3])), NUM_GROUPS * PER_GROUP),
    "one entry": (lambda index: index.read(entries.entry, ROOTS[3], "l500/w50").num_bytes, 16384),
    "holders": (lambda index: len(index.read(usage.commits_holding, _sha("chunk 1002"))), NUM_STATES),
    "diff": (lambda index: len(index.read(tree_diff.differences, ROOTS[3], ROOTS[7])), NUM_GROUPS),
}


@pytest.mark.parametrize("question", ABOUT_ENTRIES)
def test_at_a_million_entries_no_whole_table_is_read(states: Index, question: str) -> None:
    ask, wanted = ABOUT_ENTRIES[question]
    with _scans(states) as found:
        assert ask(states) == wanted
    assert not found, "\n\n".join(found)
