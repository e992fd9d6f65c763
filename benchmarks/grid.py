"""Which grid rule? A simulation over real shapes and meshes.

    python -m benchmarks.grid       tables on the terminal and in docs/benchmarks/grid.md, about a minute

Every leaf of every kind of weight is counted, vectorised over the leaves of one column of cells.
What the columns mean stands at the head of the tables; the decision is docs/decisions/001-grid.md.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from benchmarks.shapes import MODELS, Weight, cuts, meshes_of
from cas_ckpt.objects.spec import Spec, grid_for

REPORT = Path(__file__).parent.parent / "docs" / "benchmarks" / "grid.md"
CELL_BYTES, LEAF_BYTES, KIB = 4 << 20, 128 << 10, 1 << 10
FAMILIES = ("FSDP 2^k", "FSDP 3*2^k", "TP", "FSDPxTP", "EP")
DTYPES = {4: "float32", 2: "bfloat16"}

LEAF_COST_BYTES = 64 * KIB * (1 / 0.88 - 1)
"""Cost of one more leaf, in bytes hashed meanwhile: leaves of 64 KiB ran at 0.88 of BLAKE3's own rate, 128 at 0.94, in
Python, when the grid was chosen. What the native core costs: benchmarks/cores.py."""

GATHER_COST = 1 / 0.745 - 1 / 0.88
"""Cost of gathering a byte, in bytes hashed meanwhile: gathered leaves of 64 KiB ran at 0.745, 128 at 0.78."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One candidate. `cut` tells which matrices are cut along columns: never, always, wide (last >= the
    one before), strict (last > the one before), square (cells about as many rows as columns), chosen
    (the product's own `grid_for`). `rows` and `leaf`: how many rows fill a cell and a leaf. `max_leaf`, `max_gathered`:
    the longest leaf where columns are whole, and where they are cut."""

    name: str
    cut: str
    min_run: int = KIB
    max_pieces: int = 8
    rows: str = "pow2"
    leaf: str = "pow2"
    max_leaf: int = LEAF_BYTES
    max_gathered: int = LEAF_BYTES


RULES = (
    Rule("rows only", "never"),
    *(Rule(f"always, runs >= {k} KiB", "always", k * KIB) for k in (1, 2, 4)),
    *(Rule(f"wide or square, runs >= {k} KiB", "wide", k * KIB) for k in (1, 2, 4)),
    Rule("wide or square, 16 pieces", "wide", max_pieces=16),
    Rule("strictly wide, runs >= 1 KiB", "strict"),
    Rule("squarish cells", "square"),
    Rule("wide or square, cells of 4 MiB exactly", "wide", rows="fill"),
    Rule("wide or square, rows a divisor", "wide", rows="divisor"),
    Rule("wide or square, leaves filled", "wide", leaf="fit"),
    *(
        Rule(f"wide or square, leaves <= {longest} KiB", "wide", max_leaf=longest * KIB, max_gathered=longest * KIB)
        for longest in (32, 64, 256)
    ),
    *(
        Rule(f"wide or square, leaves <= {a}, cut <= {b} KiB", "wide", max_leaf=a * KIB, max_gathered=b * KIB)
        for a, b in ((128, 64), (256, 64), (256, 128))
    ),
    Rule("wide or square, <= 64 gathered rows", "wide", leaf="64 rows"),
    Rule("chosen: grid_for", "chosen"),
)


@dataclass(frozen=True, slots=True)
class Cells:
    """How one matrix is cut: cells of `rows` x `columns`, leaves of `leaf` elements."""

    shape: tuple[int, int]
    rows: int
    columns: int
    leaf: int


def power_floor(number: int) -> int:
    """The largest power of two that is not above `number`."""
    return 1 << (max(1, number).bit_length() - 1)


def cells_of(rule: Rule, shape: tuple[int, ...], item: int) -> Cells:
    """The cut of one matrix of the tensor (leading dimensions count matrices; 1-D is one column)."""
    if rule.cut == "chosen":
        grid = grid_for(Spec(DTYPES[item], shape))
        rows, columns = grid.cell[-2:] if len(shape) > 1 else (grid.cell[0], 1)
        return Cells(_matrix(shape), rows, columns, grid.leaf_bytes // item)
    height, width = _matrix(shape)
    columns = _columns(rule, height, width, item)
    leaf_rows, leaf = _leaf(rule, columns, item, gathered=columns < width)
    rows = _rows(rule, height, columns * item, leaf_rows)
    return Cells((height, width), rows, columns, min(leaf, rows * columns))


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[-2], shape[-1]) if len(shape) > 1 else (shape[0], 1)


def _columns(rule: Rule, height: int, width: int, item: int) -> int:
    if rule.cut == "square":
        return min(width, power_floor(math.isqrt(CELL_BYTES // item)))
    applies = {"never": width < 0, "always": width > 1, "wide": width >= height, "strict": width > height}[rule.cut]
    most = min(rule.max_pieces, width * item // rule.min_run, height * width * item // (512 * KIB))
    return width // math.gcd(power_floor(most), width) if applies else width


def _leaf(rule: Rule, columns: int, item: int, *, gathered: bool) -> tuple[int, int]:
    row_bytes = columns * item
    longest = rule.max_gathered if gathered else rule.max_leaf
    if row_bytes <= longest:
        fit = longest // row_bytes
        rows = fit if rule.leaf == "fit" else power_floor(fit)
        rows = min(rows, 64) if rule.leaf == "64 rows" and gathered else rows
        return rows, rows * columns
    shares = next(n for n in range(-(-row_bytes // longest), columns + 1) if columns % n == 0)
    return 1, columns // shares


def _rows(rule: Rule, height: int, row_bytes: int, leaf_rows: int) -> int:
    fit = max(1, CELL_BYTES // row_bytes)
    if rule.rows == "divisor":
        return next(n for n in range(min(fit, height), 0, -1) if height % n == 0)
    if rule.rows == "fill":
        return min(height, max(1, fit // leaf_rows) * leaf_rows)
    return min(height, max(1, fit // leaf_rows) * leaf_rows if rule.leaf == "fit" else power_floor(fit))


@dataclass(frozen=True, slots=True)
class Leaves:
    """Leaves of one column of cells: first and last row, first and last column, elements."""

    top: np.ndarray
    bottom: np.ndarray
    left: np.ndarray
    right: np.ndarray
    size: np.ndarray


@lru_cache(maxsize=256)
def leaves_of(height: int, rows: int, columns: int, leaf: int) -> Leaves:
    """The leaves of all cells under one another that are `columns` wide; whole rows, or equal shares of a row."""
    full = _leaves_of_cell(rows, columns, leaf)
    tops = np.arange(height // rows)[:, None] * rows
    parts = [(full[0] + tops, full[1] + tops, *(np.broadcast_to(part, (len(tops), part.size)) for part in full[2:]))]
    if height % rows:
        last = _leaves_of_cell(height % rows, columns, leaf)
        parts.append((last[0] + height // rows * rows, last[1] + height // rows * rows, *last[2:]))
    return Leaves(*(np.concatenate([part[i].ravel() for part in parts]) for i in range(5)))


def _leaves_of_cell(rows: int, columns: int, leaf: int) -> tuple[np.ndarray, ...]:
    start = np.arange(0, rows * columns, leaf)
    last = np.minimum(start + leaf, rows * columns) - 1
    return start // columns, last // columns, start % columns, last % columns, last - start + 1


@dataclass(frozen=True, slots=True)
class Score:
    """Sums over the leaves and cells of one matrix, in elements."""

    straddled: int
    held: int
    cells: int
    extents: int


@lru_cache(maxsize=1 << 16)
def score(cells: Cells, row_cuts: tuple[int, ...], column_cuts: tuple[int, ...]) -> Score:
    """Leaves that several ranks hold, elements times holders, cells, and cells times holders."""
    height, width = cells.shape
    straddled = held = column_parts = 0
    for left in range(0, width, cells.columns):
        piece = min(cells.columns, width - left)
        inner = tuple(cut - left for cut in column_cuts if left < cut < left + piece)
        column_parts += len(inner) + 1
        a, b = _column_score(height, cells.rows, piece, cells.leaf, row_cuts, inner)
        straddled, held = straddled + a, held + b
    row_parts = -(-height // cells.rows) + sum(cut % cells.rows != 0 for cut in row_cuts)
    count = -(-height // cells.rows) * -(-width // cells.columns)
    return Score(straddled, held, count, row_parts * column_parts)


@lru_cache(maxsize=1 << 16)
def _column_score(
    height: int, rows: int, columns: int, leaf: int, row_cuts: tuple[int, ...], column_cuts: tuple[int, ...]
) -> tuple[int, int]:
    leaves = leaves_of(height, rows, columns, leaf)
    holders = _between(row_cuts, leaves.top, leaves.bottom) + 1
    if column_cuts:
        holders *= _between(column_cuts, leaves.left, leaves.right) + 1
    return int(leaves.size[holders > 1].sum()), int((leaves.size * holders).sum())


def _between(positions: tuple[int, ...], first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """How many cuts lie inside each of the ranges first..last."""
    edges = np.asarray(positions, dtype=np.int64)
    return np.searchsorted(edges, last, "right") - np.searchsorted(edges, first, "right")


@dataclass(slots=True)
class Totals:
    """What a rule scores for one model, item size and mesh; bytes."""

    num_bytes: int = 0
    straddled: int = 0
    held: int = 0
    cells: int = 0
    extents: int = 0

    def add(self, weight: Weight, part: Score, item: int) -> None:
        """Count `part`, the score of one matrix, for every matrix of the weight."""
        times = weight.copies * math.prod(weight.shape[:-2])
        self.num_bytes += weight.num_elements * item
        self.straddled += part.straddled * item * times
        self.held += part.held * item * times
        self.cells += part.cells * times
        self.extents += part.extents * times


def simulate(rule: Rule, item: int) -> Iterator[tuple[str, str, int, Totals]]:
    """(model, mesh family, ranks, totals) for every model on every mesh that suits it."""
    for model, weights in MODELS.items():
        for mesh in meshes_of(model):
            totals = Totals()
            for weight in weights:
                edges = cuts(weight, mesh)
                rows, columns = edges[-2:] if len(edges) > 1 else (edges[0], ())
                totals.add(weight, score(cells_of(rule, weight.shape, item), rows, columns), item)
            yield model, mesh.family, mesh.num_ranks, totals


def speed(rule: Rule, model: str, item: int) -> float:
    """Estimated hash rate of the whole model in one process, relative to BLAKE3 over 4 MiB pieces."""
    cost = total = 0.0
    for weight in MODELS[model]:
        cells = cells_of(rule, weight.shape, item)
        gathered = cells.columns < cells.shape[1]
        total += weight.num_elements
        cost += weight.num_elements * (1 + LEAF_COST_BYTES / (cells.leaf * item) + GATHER_COST * gathered)
    return total / cost


def shortest_run(rule: Rule, item: int) -> int:
    """Bytes of the shortest contiguous run of a matrix of at least 4 MiB."""
    found = (cells_of(rule, weight.shape, item) for weights in MODELS.values() for weight in weights)
    large = (cells for cells in found if cells.shape[1] > 1 and math.prod(cells.shape) * item >= CELL_BYTES)
    return min(cells.columns * item for cells in large)


def row_of(rule: Rule, item: int) -> list[str]:
    """One line of the table: means over (model, mesh) pairs, each pair counting the same."""
    shares: dict[str, list[float]] = defaultdict(list)
    worst: dict[bool, float] = defaultdict(float)
    holders, extents, cells = [], [], 0
    for model, family, ranks, totals in simulate(rule, item):
        shares[family].append(100 * totals.straddled / totals.num_bytes)
        holders.append(totals.held / totals.num_bytes)
        extents.append(totals.extents / totals.cells)
        tensor_parallel = family.endswith("TP")
        worst[tensor_parallel] = max(worst[tensor_parallel], totals.straddled / ranks / 2**20)
        cells = totals.cells if model == "llama3-8B" else cells
    means = [f"{np.mean(shares[family]):.1f}" for family in FAMILIES]
    per_rank = [f"{worst[False]:.0f}", f"{worst[True]:.0f}"]
    tail = [f"{np.mean(holders):.2f}", f"{np.mean(extents):.1f}", f"{shortest_run(rule, item) / KIB:.1f}", str(cells)]
    speeds = [f"{speed(rule, model, item):.2f}" for model in ("gpt2-124M", "gpt2-1.5B", "llama3-8B", "llama3-405B")]
    return [rule.name, *means, *per_rank, *tail, *speeds]


HEAD = (
    "rule", *(f"{family} %" for family in FAMILIES), "FSDP MiB", "TP MiB", "holders", "extents", "run KiB", "cells 8B",
    "124M", "1.5B", "8B", "405B",
)  # fmt: skip

LEGEND = """\
Models: {models}.
Meshes: {meshes}.

`... %`: share of bytes in leaves that several ranks hold, mean over models and meshes of the family. `FSDP MiB`,
`TP MiB`: straddled bytes per rank for one copy of the weights, the worst model and mesh without and with tensor
parallelism (weights + AdamW: three times that). `holders`: mean number of ranks that hold part of a byte's leaf, which
is what restoring reads and verifies per byte wanted. `extents`: mean number of ranks holding part of a chunk. `run`:
shortest contiguous run in matrices of 4 MiB or more. Last four: estimated hash rate of the model in one process,
relative to BLAKE3 over 4 MiB pieces: 1 / (1 + {leaf:.1f} KiB / leaf + {gather:.2f} if gathered). A tensor-parallel rank
whose shard is as wide as the cells gathers nothing.
"""


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A markdown table with aligned columns."""
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    body = [head, ["-" * width for width in widths], *lines]
    return "\n".join("| " + " | ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)) + " |" for line in body)


def report() -> str:
    """The whole document."""
    meshes = {str(mesh) for model in MODELS for mesh in meshes_of(model)}
    text = ["# Grid rules compared", "", "Made by `python -m benchmarks.grid`. Lower is better but for the rates."]
    legend = LEGEND.format(
        models=", ".join(MODELS), meshes=", ".join(sorted(meshes)), leaf=LEAF_COST_BYTES / KIB, gather=GATHER_COST
    )
    text += ["", legend]
    for item, name in DTYPES.items():
        text += [f"## {name}", "", table(HEAD, [row_of(rule, item) for rule in RULES]), ""]
    return "\n".join(text)


def main(show: Callable[[str], None] = print) -> None:
    """Run from the command line."""
    text = report()
    REPORT.write_text(text)
    show(text)


if __name__ == "__main__":
    main()
