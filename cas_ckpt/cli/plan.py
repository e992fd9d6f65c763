"""plan: how a commit would be restored into a layout of ranks that need not exist; restores: those that were made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cas_ckpt.cli.command import SIZE, Settings, flag, limit_option, verb
from cas_ckpt.cli.output import escaped, table, utc
from cas_ckpt.errors import ConflictError, InvalidInputError, NotFoundError
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.layout.plan_summary import PlanSummary, Spread
    from cas_ckpt.layout.target_layout import TargetLayout
    from cas_ckpt.ops.checkout.plan import PlanReport
    from cas_ckpt.ops.checkout.restores import RestoreInfo


@verb(
    "plan",
    examples=[
        "cas-ckpt plan main --world 768 --mesh dp=96,tp=8",
        "cas-ckpt plan main --mesh dp=96,tp=8 --mesh dp=768",
        "cas-ckpt plan v1 --mesh dp=64 --shapes placements.json --output plan.json",
        "cas-ckpt plan main --mesh dp=64 --compare plan.json",
        "cas-ckpt plan --list",
    ],
    also=[14, 15],
)
@click.argument("revision", default="HEAD")
@click.option("--world", type=click.IntRange(min=1), metavar="N", help="Number of ranks. Default: that of the mesh.")
@click.option(
    "--mesh", "meshes", multiple=True, metavar="DIM=N,...",
    help="Mesh dimensions, the last one fastest. Default: dp=WORLD. May be repeated: plans side by side.",
)  # fmt: skip
@click.option(
    "--shapes", metavar="FILE", help='JSON: {"KEY PATTERN": ["S(0)", "R"], ...}, one placement per dimension.'
)
@click.option("--storage-bandwidth", default="1GB", type=SIZE, show_default=True,
              help="Read per second and rank.")  # fmt: skip
@click.option("--network-bandwidth", default="3GB", type=SIZE, show_default=True,
              help="Sent per second and rank.")  # fmt: skip
@flag("-l", "--long", help="What was planned, shape by shape, too.")
@click.option("-o", "--output", metavar="FILE", help="Write the plan as JSON, too.")
@flag("-f", "--force", help="Replace FILE if it is there already.")
@click.option("--compare", metavar="FILE", help="Show beside it what --output wrote.")
@flag("--list", "listing", help="List the plans that the index keeps instead.")
@click.pass_obj
def plan(
    settings: Settings, revision: str, world: int | None, meshes: tuple[str, ...], shapes: str | None,
    storage_bandwidth: int, network_bandwidth: int, long: bool, output: str | None, force: bool,
    compare: str | None, listing: bool,
) -> None:  # fmt: skip
    """Show how REVISION would be restored into a mesh of ranks, none of which need exist.

    \b
    Dimensions named dp, fsdp or shard cut dimension 0 of every tensor, tp cuts q, k, v, gate, up
    and vocabularies by output, attention output and down by input; replicate and ddp keep
    replicas. --shapes says otherwise for single tensors:
        {"model/**/experts.*": ["S(0)", "S(1)"], "**/norm*": ["R", "R"]}
    R is a replica, S(dim) a cut, SS(dim,stride) a strided one.

    Plans are kept in the index and taken from there when they are asked for again.
    """  # noqa: D301  # click wants this very character
    from cas_ckpt.ops.checkout.plan import as_json, read_json

    others = read_json(_text(compare), compare) if compare else []
    targets = [] if listing else _targets(world, meshes, shapes)
    with settings.open() as repo:
        if listing:
            reports = repo.plans(None if revision == "HEAD" else revision)
        else:
            reports = [
                repo.plan(revision, one, storage_bandwidth=storage_bandwidth, network_bandwidth=network_bandwidth)
                for one in targets
            ]
    found: Any = [as_json(report) for report in reports]
    if output is not None:
        _write(Path(output), found[0] if len(found) == 1 else found, force=force)
    lines = _listed(reports) if listing else _shown(reports, others, long=long)
    settings.show(found[0] if len(found) == 1 and not listing else found, lines)


def _targets(world: int | None, meshes: Sequence[str], shapes: str | None) -> list[TargetLayout]:
    from cas_ckpt.layout.target_layout import parse_layout

    if not meshes and world is None:
        raise InvalidInputError("which ranks? give --world N, or --mesh such as dp=96,tp=8")
    rules = None if shapes is None else _rules(shapes)
    targets = [parse_layout(mesh, rules) for mesh in meshes or (f"dp={world}",)]
    for target in targets:
        if world is not None and target.world_size != world:
            raise InvalidInputError(f"mesh {target} has {target.world_size} ranks, --world says {world}")
    return targets


def _rules(name: str) -> Mapping[str, Sequence[str]]:
    try:
        found = json.loads(_text(name))
    except ValueError as error:
        raise InvalidInputError(f'{name}: no JSON ({error}); wanted {{"KEY PATTERN": ["S(0)", "R"]}}') from error
    if not isinstance(found, dict):
        raise InvalidInputError(f'{name}: wanted {{"KEY PATTERN": ["S(0)", "R"]}}')
    return found


def _text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"{name}: there is no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{name}: cannot be read ({error})") from error


def _write(path: Path, found: Any, *, force: bool) -> None:
    if path.exists() and not force:
        raise ConflictError(f"{path} is there already: choose another name, or --force")
    try:
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be written ({error.strerror})") from error


def _shown(reports: Sequence[PlanReport], others: Sequence[PlanReport], *, long: bool) -> Iterator[str]:
    columns = [*((report, "kept in the index" if report.reused else "new") for report in reports)]
    columns += [(report, "from the file") for report in others]
    rows = [("mesh", *(escaped(report.mesh) for report, _ in columns)), ("plan", *(origin for _, origin in columns))]
    figures = [dict(_figures(report.summary)) for report, _ in columns]
    rows += [(name, *(each[name] for each in figures)) for name in figures[0]]
    yield from table(rows)
    if long:
        for report in reports:
            yield ""
            yield from _planned(report)


def _figures(summary: PlanSummary) -> Iterator[tuple[str, str]]:
    yield "state", escaped(f"{human_bytes(summary.chunk_bytes)} in {summary.num_chunks} chunks")
    yield "ranks", str(summary.world_size)
    yield "tensors", f"{summary.num_tensors}, {summary.num_templates} different"
    yield "per rank", "min / mean / max"
    yield "  read", _bytes(summary.read_bytes)
    yield "  requests", _spread(summary.num_requests)
    yield "  sent", _bytes(summary.sent_bytes)
    yield "  received", _bytes(summary.received_bytes)
    yield "  metadata", _bytes(summary.metadata_bytes)
    yield "  in part", f"{_spread(summary.num_straddled)} chunks"
    yield "balance", f"{summary.read_bytes.balance:.3f} (most read over mean)"
    yield "amplification", f"{summary.read_amplification:.3f} (bytes read over bytes of the chunks wanted)"
    yield (
        "extents",
        "not looked up" if summary.extents_per_chunk is None else f"{summary.extents_per_chunk:.2f} a chunk",
    )
    yield "storage", f"{summary.storage_s:.3g} s at {human_bytes(round(summary.storage_bandwidth))}/s a rank"
    yield "network", f"{summary.network_s:.3g} s at {human_bytes(round(summary.network_bandwidth))}/s a rank"
    yield "estimated", f"{summary.estimated_s:.3g} s, one after the other"


def _bytes(spread: Spread) -> str:
    return " / ".join(human_bytes(round(value)) for value in (spread.least, spread.mean, spread.most))


def _spread(spread: Spread) -> str:
    return f"{spread.least} / {spread.mean:.1f} / {spread.most}"


def _planned(report: PlanReport) -> list[str]:
    rows = [("tensors", "chunks each", "dtype", "shape", escaped(report.mesh), "such as")]
    for each in report.shapes:
        shape, placements = f"[{', '.join(map(str, each.shape))}]", " ".join(each.placements)
        rows.append((str(each.num_tensors), str(each.num_chunks), each.dtype, shape, placements, escaped(each.key)))
    return table(rows, right=frozenset({0, 1}))


def _listed(reports: Sequence[PlanReport]) -> list[str]:
    rows = [("root", "ranks", "read at most", "balance", "mesh", "rules")]
    for report in reports:
        read, rules = report.summary.read_bytes, " ".join(report.rules)
        numbers = (str(report.summary.world_size), human_bytes(read.most), f"{read.balance:.3f}")
        rows.append((report.root[:SHORT_HEX], *numbers, escaped(report.mesh), escaped(rules)))
    return table(rows, right=frozenset({1, 2, 3}))


# --- restores that were made ------------------------------------------------------------------


@verb(
    "restores", examples=["cas-ckpt restores", "cas-ckpt restores main -n 5", "cas-ckpt restores v1 --json"], also=[15]
)
@click.argument("revision", required=False)
@limit_option("At most N restores.")
@click.pass_obj
def restores(settings: Settings, revision: str | None, limit: int | None) -> None:
    """Show the checkouts and loads that were made, the last one first; of the state of REVISION, or all.

    The index keeps them. "planned" is what a kept plan for the same ranks and placements says of it, with
    the bandwidths that cas-ckpt plan assumes.
    """
    with settings.open() as repo:
        found = repo.restores(revision, limit=limit)
    settings.page(found, table(_restored(found)) if found else ["no restores yet"])


def _restored(found: Sequence[RestoreInfo]) -> Iterator[tuple[str, ...]]:
    yield ("commit", "begun (UTC)", "verb", "ranks", "mesh", "took", "planned", "read", "by", "result")
    for each in found:
        planned = "" if each.estimated_s is None else f"{each.estimated_s:.3g} s"
        read = "" if each.num_bytes is None else human_bytes(each.num_bytes)
        result = escaped(each.error) if each.error is not None else "whole" if each.complete else "in part"
        yield (
            each.commit[:SHORT_HEX], utc(each.time_s), each.verb, str(each.world_size), escaped(each.mesh),
            f"{each.seconds:.3g} s", planned, read, escaped(f"{each.author} on {each.host}"), result,
        )  # fmt: skip
