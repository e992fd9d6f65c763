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

from cas_ckpt.index import contents, history, liveness, usage
from cas_ckpt.index.index import Index
from cas_ckpt.index.postgres import schema_of
from cas_ckpt.index.rows import PackRecord
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.pack import PackKind
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
LARGE = re.compile(r"Seq Scan on (t_objects|t_locations|t_edges)\b")


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
    entries = [extent(row.root, ObjectKind.TREE), extent(row.digest, ObjectKind.COMMIT)]
    return PackRecord(f"packs/{name}.meta", PackKind.META, 5000, entries, [(row.root, tensors)], [row])


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
    with liveness.living(index, commits=commits, roots=roots) as alive:
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
    "what would forgetting free": lambda index: liveness.freed(index, _live(), _live(but="c9")),
    "what may be collected": _collect,
    "a commit of ten chunks": _commit_ten_chunks,
    "a pack is gone": lambda index: index.drop_packs(["packs/77.data"]),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_at_a_million_chunks_no_whole_table_is_read(index: Index, question: str) -> None:
    with _scans(index) as found:
        QUESTIONS[question](index)
    assert not found, "\n\n".join(found)
