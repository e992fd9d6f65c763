"""How long does a diff take? Commits of Llama 3 405B in training, from nodes alone.

    python -m benchmarks.diff               the table, and docs/benchmarks/diff.md, some minutes
    python -m benchmarks.diff --print       prints only
    python -m benchmarks.diff --model llama3-8B --print

The trees, tensor nodes and pages of chunk ids are those that a commit of the state would write, and are
written by the product's own writer and indexed by its own index; the chunks that they name are invented
and stand nowhere, as no diff reads them unless numbers are asked for.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.machine import describe
from benchmarks.scale_shapes import ALL_MODELS, keys_and_specs
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.publish import Destination, Publication, publish_commit
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest
from cas_ckpt.objects.layouts import LayoutObject, layout_node
from cas_ckpt.objects.nodes import (
    CommitObject,
    ContainerEntry,
    Entry,
    Node,
    TensorEntry,
    ValueEntry,
    tensor_nodes,
    tree_nodes,
)
from cas_ckpt.objects.spec import Spec, grid_for
from cas_ckpt.objects.values import encode_value
from cas_ckpt.repository import Repository

REPORT = Path(__file__).parent.parent / "docs" / "benchmarks" / "diff.md"
WANTED_MS = 20.0
TIMES = 21


@dataclass(slots=True)
class State:
    """A state of invented chunks.

    Attributes:
        chunks: Key -> ids of the tensor's chunks (or its inline bytes, alone, if it is small).
    """

    specs: Mapping[str, Spec]
    chunks: dict[str, list[bytes]]
    step: int = 0

    @classmethod
    def invent(cls, model: str) -> State:
        """Ids and bytes that nobody else has."""
        specs = {}
        for key, spec in keys_and_specs(model):
            specs[key] = Spec("bfloat16", spec.shape) if key.startswith("model/") else spec
            if key.startswith("model/"):
                specs[f"master/{key.removeprefix('model/')}"] = spec
        source = random.Random(0)
        counts = {key: grid_for(spec).num_cells for key, spec in specs.items()}
        return cls(specs, {key: [source.randbytes(DIGEST_BYTES) for _ in range(counts[key])] for key in specs})

    @property
    def num_chunks(self) -> int:
        """All chunks of all tensors."""
        return sum(map(len, self.chunks.values()))

    def changed(self, cells: Mapping[str, Sequence[int]]) -> State:
        """Another state, with other ids in these cells."""
        source = random.Random(self.step + 1)
        chunks = dict(self.chunks)
        for key, numbers in cells.items():
            ids = chunks[key] = list(chunks[key])
            for number in numbers:
                ids[number] = source.randbytes(DIGEST_BYTES)
        return State(self.specs, chunks, self.step + 1)

    def nodes(self) -> tuple[list[Node], Digest]:
        """All nodes of the state, and its root."""
        nodes: list[Node] = []
        tree: dict[str, object] = {"step": self.step}
        for key, spec in self.specs.items():
            *above, name = key.split("/")
            place = tree
            for part in above:
                place = place.setdefault(part, {})  # type: ignore[assignment]
            place[name] = self._tensor(name, key, spec, nodes)
        return nodes, _container(tree, nodes)

    def _tensor(self, name: str, key: str, spec: Spec, nodes: list[Node]) -> TensorEntry:
        ids = [Digest(each) for each in self.chunks[key]]
        if len(ids) == 1:
            return TensorEntry(name, spec, "torch", ids[0], None, True)
        made = tensor_nodes(spec, grid_for(spec), ids)
        nodes += made
        return TensorEntry(name, spec, "torch", made[-1].digest, None)


def _container(tree: Mapping[str, object], nodes: list[Node]) -> Digest:
    entries: list[Entry] = []
    for name, item in tree.items():
        if isinstance(item, dict):
            entries.append(ContainerEntry(name, _container(item, nodes)))
        elif isinstance(item, TensorEntry):
            entries.append(item)
        else:
            entries.append(ValueEntry(name, encode_value(item, key=name)))
    made = tree_nodes("dict", None, entries)
    nodes += made
    return made[-1].digest


def publish(handle: RepositoryHandle, state: State) -> None:
    """Commit the state to main."""
    generation = handle.begin_writing()
    nodes, root = state.nodes()
    layout = layout_node(LayoutObject())
    every = list({node.digest: node for node in (*nodes, layout)}.values())
    commit = CommitObject(root, (), "", "bench", state.step, state.step, {}, None, layout.digest)
    made = publish_commit(handle, Publication(commit, every, [], generation), Destination("main"))
    handle.add_written(made.packs, made.nodes, generation=generation)


@dataclass(slots=True)
class Case:
    """Two neighbouring commits, and how they differ.

    Attributes:
        revisions: Of the two commits.
        fresh_ms: Of the first diff of a repository that was just opened; `open_ms` is not in it.
        fresh_cpu_ms, warm_cpu_ms: Processor time of the same, which a busy machine does not stretch as much.
    """

    name: str
    revisions: tuple[str, str]
    num_changed: int = 0
    fresh_ms: list[float] = field(default_factory=list)
    warm_ms: list[float] = field(default_factory=list)
    open_ms: list[float] = field(default_factory=list)
    fresh_cpu_ms: list[float] = field(default_factory=list)
    warm_cpu_ms: list[float] = field(default_factory=list)

    def measure(self, place: Path, times: int) -> None:
        """Fill in the times."""
        for _ in range(times):
            start = time.perf_counter()
            with Repository.open(place, group=None) as repo:
                self.open_ms.append(_since(start))
                self._diff(repo, self.fresh_ms, self.fresh_cpu_ms)
        with Repository.open(place, group=None) as repo:
            for _ in range(times + 1):
                self._diff(repo, self.warm_ms, self.warm_cpu_ms)
        del self.warm_ms[0], self.warm_cpu_ms[0]

    def _diff(self, repo: Repository, times: list[float], cpu_times: list[float]) -> None:
        start, cpu_start = time.perf_counter(), time.process_time()
        found = repo.diff(*self.revisions)
        times.append(_since(start))
        cpu_times.append(1e3 * (time.process_time() - cpu_start))
        self.num_changed = found.sums.changed_chunks

    @property
    def line(self) -> tuple[str, ...]:
        """A line of the table."""
        times = self.open_ms, self.fresh_ms, self.fresh_cpu_ms, self.warm_ms, self.warm_cpu_ms
        return self.name, str(self.num_changed), *map(_shown, times)


HEAD = ("commits", "changed chunks", "open ms", "first diff ms", "its processor ms", "further diffs ms",
        "their processor ms")  # fmt: skip


def _since(start: float) -> float:
    return 1e3 * (time.perf_counter() - start)


def _shown(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.1f} ({min(times):.1f}-{max(times):.1f})"


def build(place: Path, model: str, show: Callable[[str], None]) -> tuple[list[Case], int]:
    """A repository of some commits of the model; its cases, and chunks per commit."""
    state = State.invent(model)
    large = sorted((key for key in state.specs if len(state.chunks[key]) > 1), key=lambda key: (key.count("/"), key))
    spread = [large[at * len(large) // 10] for at in range(10)]
    longest = max(large, key=lambda key: len(state.chunks[key]))
    changes: list[tuple[str, Callable[[State], Mapping[str, Sequence[int]]]]] = [
        ("10 chunks in 10 tensors", lambda now: {key: [len(now.chunks[key]) // 2] for key in spread}),
        ("10 chunks in 1 tensor", lambda now: {longest: [len(now.chunks[longest]) * at // 10 for at in range(10)]}),
        ("every chunk of one layer", lambda now: _all_cells(now, ".7.")),
        ("every chunk", lambda now: _all_cells(now, "")),
    ]  # fmt: skip
    with Repository.init(place, group=None) as repo:
        handle = repo._handle
        publish(handle, state)
        show(f"{model}: {len(state.specs)} tensors, {state.num_chunks} chunks")
        for _, cells in changes:
            state = state.changed(cells(state))
            publish(handle, state)
        ids = [commit.short_id for commit in reversed(repo.log())]
    cases = [Case(name, (ids[at], ids[at + 1])) for at, (name, _) in enumerate(changes)]
    return [Case("the same commit", ("main", "main")), *cases], state.num_chunks


def _all_cells(state: State, part: str) -> dict[str, Sequence[int]]:
    return {key: range(len(ids)) for key, ids in state.chunks.items() if part in key}


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A markdown table with aligned columns."""
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    body = [head, ["-" * width for width in widths], *lines]
    return "\n".join("| " + " | ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)) + " |" for line in body)


def report(cases: Sequence[Case], model: str, num_chunks: int) -> Iterator[str]:
    """The lines of the document."""
    machine = describe(Path())
    load = ", ".join(Path("/proc/loadavg").read_text().split()[:3])
    yield "# Diff of two commits"
    yield ""
    yield "Written by `python -m benchmarks.diff`, figures as they came; one process, one thread."
    yield (
        f"Machine: {machine['processor']}, {machine['memory']}, Python {machine['python']}; commit "
        f"{machine['commit']}. Load when it ended (1, 5, 15 minutes): {load}."
    )
    yield ""
    yield (
        f"{model}: bf16 weights, fp32 master copy and two moments: {num_chunks} chunks in each commit, none of them "
        "read (they are invented: the nodes and the index are as real commits leave them). `repo.diff(a, b)` end to "
        "end: both ids resolved, both commits, trees, tensor nodes and pages of chunk ids read and verified where they "
        f"differ. Median and range of {TIMES} (of 3 where every chunk changed). *First*: of a repository that was just "
        "opened, whose connections are not open yet; *further*: of the same object. Files in the page cache, modules "
        "imported."
    )
    yield ""
    for case in cases[1:3]:
        pairs = (("first", case.fresh_ms, case.fresh_cpu_ms), ("further", case.warm_ms, case.warm_cpu_ms))
        for what, times, cpu_times in pairs:
            found, busy = statistics.median(times), statistics.median(cpu_times)
            slow = "not met by the clock (see the load), met by processor time" if busy <= WANTED_MS else "**not met**"
            verdict = "met" if found <= WANTED_MS else slow
            yield (
                f"- {case.name}, {what}: wanted <= {WANTED_MS:.0f} ms, measured {found:.1f} ms "
                f"({busy:.1f} ms of one core): {verdict}"
            )
    yield ""
    yield table(HEAD, [case.line for case in cases])


def main(show: Callable[[str], None] = print) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Diff commits of a large model, from nodes alone.")
    parser.add_argument("--model", choices=sorted(ALL_MODELS), default="llama3-405B")
    parser.add_argument("--print", action="store_true", help="write no document")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cas-ckpt-diff-"))
    try:
        cases, num_chunks = build(folder / "repo", chosen.model, show)
        for case in cases:
            case.measure(folder / "repo", 3 if case.name == "every chunk" else TIMES)
            show(" | ".join(case.line))
        lines = list(report(cases, chosen.model, num_chunks))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if chosen.print:
        show("\n".join(lines))
    else:
        REPORT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
