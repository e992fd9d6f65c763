"""plan: how a commit would be restored into a layout of ranks that need not exist; restores: those that were made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cas_ckpt.cli.command import SIZE, Settings, flag, limit_option, verb
from cas_ckpt.cli.output import echo, escaped, table, utc
from cas_ckpt.errors import ConflictError, InvalidInputError, NotFoundError
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.layout.restore_plan import PlanSummary, Spread
    from cas_ckpt.layout.target_layout import TargetLayout
    from cas_ckpt.ops.checkout.restores import PlanReport, RestoreInfo


@verb(
    "plan",
    examples=[
        "cas-ckpt plan main --world 768 --mesh dp=96,tp=8",
        "cas-ckpt plan main --mesh dp=96,tp=8 --mesh dp=768",
        "cas-ckpt plan main --best-of dp=48,tp=8 dp=96,tp=4",
        "cas-ckpt plan main --best-of --most-ranks 384",
        "cas-ckpt plan v1 --mesh dp=64 --shapes placements.json --output plan.json",
        "cas-ckpt plan main --mesh dp=64 --beside plan.json",
        "cas-ckpt plan --list",
    ],
    also=[14, 15],
)
@click.argument("words", nargs=-1, metavar="[REVISION] [MESH]...")
@click.option("--world", type=click.IntRange(min=1), metavar="N", help="Number of ranks. Default: that of the mesh.")
@click.option(
    "--mesh", "meshes", multiple=True, metavar="DIM=N,...",
    help="Mesh dimensions, the last one fastest. Default: dp=WORLD. The same as MESH; may be repeated.",
)  # fmt: skip
@click.option(
    "--shapes", metavar="FILE", help='JSON: {"KEY PATTERN": ["S(0)", "R"], ...}, one placement per dimension.'
)
@click.option("--storage-bandwidth", default="1GB", type=SIZE, show_default=True,
              help="Read per second and rank.")  # fmt: skip
@click.option("--network-bandwidth", default="3GB", type=SIZE, show_default=True,
              help="Sent per second and rank.")  # fmt: skip
@flag("--compare", help="A line for each mesh, in the order given.")
@flag("--best-of", help="A line for each mesh, the one that takes the least time first.")
@click.option("--most-ranks", type=click.IntRange(min=1), metavar="N", help="Leave out meshes of more ranks.")
@flag("--list", "listing", help="List the plans that the index keeps, of REVISION or all.")
@flag("-l", "--long", help="What was planned, shape by shape, too.")
@click.option("-o", "--output", metavar="FILE", help="Write the plan as JSON, too.")
@flag("-f", "--force", help="Replace FILE if it is there already.")
@click.option("--beside", metavar="FILE", help="Show beside it what --output wrote.")
def plan(
    settings: Settings, words: tuple[str, ...], world: int | None, meshes: tuple[str, ...], shapes: str | None,
    storage_bandwidth: int, network_bandwidth: int, compare: bool, best_of: bool, most_ranks: int | None,
    listing: bool, long: bool, output: str | None, force: bool, beside: str | None,
) -> None:  # fmt: skip
    """Show how REVISION would be restored into a mesh of ranks, none of which need exist.

    \b
    Dimensions named dp, fsdp or shard cut dimension 0 of every tensor, tp cuts q, k, v, gate, up
    and vocabularies by output, attention output and down by input; replicate and ddp keep
    replicas. --shapes says otherwise for single tensors:
        {"model/**/experts.*": ["S(0)", "S(1)"], "**/norm*": ["R", "R"]}
    R is a replica, S(dim) a cut, SS(dim,stride) a strided one.

    Several meshes are shown side by side, with --compare or --best-of a line for each; without any mesh these
    two take those for which there are plans. Plans are kept in the index and taken from there when they are
    asked for again.
    """  # noqa: D301  # click wants this very character
    from cas_ckpt.ops.checkout.restores import as_json, read_json

    revisions = [word for word in words if "=" not in word]  # no revision has a "=" in it
    if len(revisions) > 1:
        raise click.UsageError(f"one REVISION at most, and meshes such as dp=96,tp=8: {revisions[1]!r} is neither")
    revision = next(iter(revisions), None)
    meshes = (*meshes, *(word for word in words if "=" in word))
    lines = listing + compare + best_of
    if lines > 1 or (listing and (meshes or world)):
        raise click.UsageError("--list, --compare and --best-of exclude one another, and --list takes no mesh")
    if beside is not None and lines:
        raise click.UsageError("--beside is for plans that are shown in columns, without --list, --compare, --best-of")
    if most_ranks is not None and not (compare or best_of):
        raise click.UsageError("--most-ranks is for --compare and --best-of")
    others = read_json(_text(beside), beside) if beside else []
    targets = _targets(world, meshes, shapes) if meshes or world is not None or not lines else None
    bandwidths: Any = {"storage_bandwidth": storage_bandwidth, "network_bandwidth": network_bandwidth}
    with settings.open() as repo:
        if listing:
            reports = repo.plans(revision)
        elif compare or best_of:
            reports = repo.compare_plans(revision or "HEAD", targets, most_ranks=most_ranks, **bandwidths)
        else:
            reports = [repo.plan(revision or "HEAD", one, **bandwidths) for one in targets or ()]
    if compare and targets is not None:
        order = {mesh: at for at, mesh in reversed([*enumerate(map(str, targets))])}  # as the meshes were named
        reports = sorted(reports, key=lambda report: order[report.mesh])
    found: Any = [as_json(report) for report in reports]
    if len(found) == 1 and not lines:
        found = found[0]
    if output is not None:
        path = Path(output)
        if path.exists() and not force:
            raise ConflictError(f"{path} is there already: choose another name, or --force")
        try:
            path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidInputError(f"{path}: cannot be written ({error.strerror})") from error
    if not lines:
        settings.show(found, _shown(reports, others, long=long))
        return
    settings.show(found, _listed(reports) if listing else _compared(reports))
    if long and not settings.json:
        echo(line for report in reports for line in ("", *_planned(report)))


def _targets(world: int | None, meshes: Sequence[str], shapes: str | None) -> list[TargetLayout]:
    from cas_ckpt.layout.target_layout import parse_layout

    if not meshes and world is None:
        raise InvalidInputError("which ranks? give --world N, or a mesh such as dp=96,tp=8")
    rules = None
    if shapes is not None:
        try:
            rules = json.loads(_text(shapes))
        except ValueError as error:
            raise InvalidInputError(f'{shapes}: no JSON ({error}); wanted {{"KEY PATTERN": ["S(0)", "R"]}}') from error
        if not isinstance(rules, dict):
            raise InvalidInputError(f'{shapes}: wanted {{"KEY PATTERN": ["S(0)", "R"]}}')
    targets = [parse_layout(mesh, rules) for mesh in meshes or (f"dp={world}",)]
    for target in targets:
        if world is not None and target.world_size != world:
            raise InvalidInputError(f"mesh {target} has {target.world_size} ranks, --world says {world}")
    return targets


def _text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"{name}: there is no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{name}: cannot be read ({error})") from error


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
    rows: list[tuple[str, ...]] = [
        ("commit", "root", "mesh", "ranks", "state", "read at most", "balance", "estimated", "rules")
    ]
    for report in reports:
        ids = report.commit[:SHORT_HEX] or "gone", report.root[:SHORT_HEX]
        rows.append((*ids, *_line(report), " ".join(map(escaped, report.rules))))
    return table(rows, right=frozenset({3, 4, 5, 6, 7}))


def _compared(reports: Sequence[PlanReport]) -> list[str]:
    best = min(report.summary.estimated_s for report in reports)
    rows: list[tuple[str, ...]] = [
        ("mesh", "ranks", "state", "read at most", "balance", "estimated", "of the best", "sent at most", "plan")
    ]
    for report in reports:
        seconds, sent = report.summary.estimated_s, report.summary.sent_bytes.most
        ratio = f"{seconds / best:.2f} x" if best else ""
        rows.append((*_line(report), ratio, human_bytes(sent), "kept" if report.reused else "new"))
    return table(rows, right=frozenset({1, 2, 3, 4, 5, 6, 7}))


def _line(report: PlanReport) -> tuple[str, ...]:
    """The columns that both lists have."""
    summary = report.summary
    read = summary.read_bytes
    return (
        escaped(report.mesh) or "(of a checkout)", str(summary.world_size), human_bytes(summary.chunk_bytes),
        human_bytes(read.most), f"{read.balance:.3f}", f"{summary.estimated_s:.3g} s",
    )  # fmt: skip


# --- restores that were made ------------------------------------------------------------------


@verb(
    "restores", examples=["cas-ckpt restores", "cas-ckpt restores main -n 5", "cas-ckpt restores v1 --json"], also=[15]
)
@click.argument("revision", required=False)
@limit_option("At most N restores.")
def restores(settings: Settings, revision: str | None, limit: int | None) -> None:
    """Show the checkouts and loads that were made, the last one first; of the state of REVISION, or all.

    The index keeps them. "planned" is what a kept plan for the same ranks and placements says of it, with
    the bandwidths that cas-ckpt plan assumes.
    """
    with settings.open() as repo:
        found = repo.restores(revision, limit=limit)
    if not found and not settings.quiet and not settings.json:
        click.echo(f"no restores{f' of {escaped(revision)}' if revision else ''} yet", err=True)
    settings.page(found, table(_restored(found) if found else ()))


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
