"""plan: how a commit would be restored into a layout, without restoring it.

    1. load the tree: which tensors there are, and their specs (core/tree.py)
    2. target layout -> who wants what of each (layout/target_layout.py)
    3. plan, prove the cover, count (layout/restore_plan.py, layout/plan_summary.py)
    4. keep the report in the index under (root, layout); the next one who asks gets it from there

Invariant: a plan follows from the root and the layout alone, so a kept one is as good as a new one;
what depends on the moment (extents, bandwidths) is looked up each time, and is not part of the bytes that
`decode_report(encode_report(report))` keeps. Needs no torch and no ranks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import Brief, commit_of
from cas_ckpt.core.revisions import Revision, resolve
from cas_ckpt.core.tree import load_tree, stored_tensors
from cas_ckpt.errors import CkptError, CorruptionError, InvalidInputError
from cas_ckpt.index import meta, usage
from cas_ckpt.index.meta import PlanRow
from cas_ckpt.layout.plan_summary import NETWORK_BYTES_PER_S, STORAGE_BYTES_PER_S, PlanSummary, Spread, summarize
from cas_ckpt.layout.restore_plan import ReadPlan, RestoreRequest, plan_restore_reads
from cas_ckpt.layout.target_layout import TargetLayout, check_splits
from cas_ckpt.objects.digest import Digest, pack_canonical, unpack_canonical
from cas_ckpt.objects.patterns import compile_pattern
from cas_ckpt.objects.spec import Spec, Split
from cas_ckpt.objects.state import render_key

_LOGGER = logging.getLogger("cas_ckpt")

_SPREADS = ("read_bytes", "num_requests", "sent_bytes", "received_bytes")
_COUNTS = (
    "world_size", "num_tensors", "num_templates", "num_chunks", "chunk_bytes", "wanted_bytes", "metadata_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlannedShape:
    """Tensors that are planned alike.

    Attributes:
        key: Of the first of them.
        placements: One per mesh dimension, as in a rule.
        num_tensors: How many there are.
        num_chunks: Chunks of one of them.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[str, ...]
    num_tensors: int
    num_chunks: int


@dataclass(frozen=True, slots=True, repr=False)
class PlanReport(Brief):
    """How a state would be restored into a layout.

    Attributes:
        root: Id of the state, hexadecimal; "" for a plan from shapes alone.
        mesh: The target's mesh as text.
        rules: Its rules as text, by pattern.
        summary: The plan in numbers.
        shapes: What was planned.
        reused: It was planned before and came from the index.
    """

    root: str
    mesh: str
    rules: Mapping[str, tuple[str, ...]]
    summary: PlanSummary
    shapes: tuple[PlannedShape, ...]
    reused: bool = False


def plan_checkout(
    handle: RepositoryHandle,
    revision: Revision,
    target: TargetLayout,
    *,
    storage_bandwidth: float | None = None,
    network_bandwidth: float | None = None,
) -> PlanReport:
    """How the commit `revision` would be restored into `target`; no rank of which need exist.

    Args:
        storage_bandwidth, network_bandwidth: Bytes per second and rank that the estimates assume; None: the usual ones.
    Raises:
        NotFoundError: no such commit.
        MismatchError: the commit cannot fill the target; names key and region.
        InvalidInputError: a rule matches no tensor, a mesh dimension has a name that says nothing, or
            a bandwidth is not above 0.
    """
    storage_bandwidth = STORAGE_BYTES_PER_S if storage_bandwidth is None else storage_bandwidth
    network_bandwidth = NETWORK_BYTES_PER_S if network_bandwidth is None else network_bandwidth
    if storage_bandwidth <= 0 or network_bandwidth <= 0:
        raise InvalidInputError("a bandwidth is a number of bytes per second above 0")
    root = Digest(commit_of(handle, resolve(handle, revision)).root)
    kept = handle.index.read(meta.read_plan, root, target.digest)
    if kept is not None:
        report = replace(decode_report(kept.report, root.hex()), reused=True)
    else:
        report = replace(plan_tensors(chunked_tensors(handle, root), target), root=root.hex())
        _keep(handle, report, root, target)
    num_chunks, num_extents = handle.index.read(usage.count_extents, root)
    summary = replace(
        report.summary,
        storage_bandwidth=storage_bandwidth,
        network_bandwidth=network_bandwidth,
        extents_per_chunk=num_extents / num_chunks if num_chunks else None,
    )
    return replace(report, summary=summary)


def kept_plans(handle: RepositoryHandle, revision: Revision | None = None) -> list[PlanReport]:
    """The plans in the index, those for one commit or all; extents are not looked up."""
    root = None if revision is None else commit_of(handle, resolve(handle, revision)).root
    return [
        replace(decode_report(row.report, row.root.hex()), reused=True)
        for row in handle.index.read(meta.read_plans, root)
    ]


def plan_tensors(tensors: Iterable[tuple[str, Spec]], target: TargetLayout) -> PlanReport:
    """How tensors of these keys and specs would be restored; needs no commit.

    Raises:
        MismatchError, InvalidInputError: as for `plan_checkout`.
    """
    wanted, splits = requests_for(tensors, target)
    plan = plan_restore_reads(wanted, target.world_size)
    plan.check()
    rules = {pattern: tuple(map(str, cuts)) for pattern, cuts in target.rules}
    return PlanReport("", str(target), rules, summarize(plan), _shapes(plan, splits))


def requests_for(
    tensors: Iterable[tuple[str, Spec]], target: TargetLayout
) -> tuple[list[RestoreRequest], list[tuple[Split, ...]]]:
    """What the ranks of `target` want of each tensor, and the placements that say so."""
    rules = [(compile_pattern(pattern), cuts) for pattern, cuts in target.rules]
    unused = {pattern for pattern, _ in target.rules}
    wanted, placed = [], []
    for key, spec in tensors:
        ruled = next(((at, cuts) for at, (regex, cuts) in enumerate(rules) if regex.fullmatch(key)), None)
        if ruled is not None:
            unused.discard(target.rules[ruled[0]][0])
        splits = target.usual(key, spec) if ruled is None else ruled[1]
        check_splits(key, spec, splits)
        wanted.append(RestoreRequest(key, spec, target.shards(spec.shape, splits)))
        placed.append(splits)
    if unused:
        raise InvalidInputError(f"rule {sorted(unused)[0]!r} matches no tensor: repo.ls(ref) lists the keys")
    return wanted, placed


def chunked_tensors(handle: RepositoryHandle, root: Digest) -> list[tuple[str, Spec]]:
    """Key and spec of every tensor of a state that is stored in chunks; the others need no plan."""
    stored = stored_tensors(load_tree(handle, root))
    return sorted((render_key(path), tensor.spec) for path, tensor in stored if tensor.node is not None)


def _shapes(plan: ReadPlan, splits: Sequence[tuple[Split, ...]]) -> tuple[PlannedShape, ...]:
    found = []
    for template in plan.templates:
        first = plan.requests[template.members[0]]
        placements = tuple(map(str, splits[template.members[0]]))
        num_chunks = sum(1 for shares in template.shares if shares)
        found.append(
            PlannedShape(first.key, first.spec.shape, first.spec.dtype, placements, len(template.members), num_chunks)
        )
    return tuple(found)


def _keep(handle: RepositoryHandle, report: PlanReport, root: Digest, target: TargetLayout) -> None:
    """Keep it if that can be done: a plan that is not kept is made again."""
    if handle.read_only:
        return
    try:
        handle.index.write(meta.write_plan, PlanRow(root, target.digest, str(target), encode_report(report)))
    except CkptError as error:
        _LOGGER.warning("the plan is not kept: %s", error)


# --- the report as bytes and as JSON ---------------------------------------------------------


def encode_report(report: PlanReport) -> bytes:
    """The bytes that the index keeps."""
    summary = report.summary
    return pack_canonical(
        {
            "mesh": report.mesh,
            "rules": {pattern: list(placements) for pattern, placements in report.rules.items()},
            "counts": [getattr(summary, name) for name in _COUNTS],
            "spreads": [[each.least, each.mean, each.most] for each in (getattr(summary, name) for name in _SPREADS)],
            "shapes": [
                [each.key, list(each.shape), each.dtype, list(each.placements), each.num_tensors, each.num_chunks]
                for each in report.shapes
            ],
        }
    )


def decode_report(data: bytes, root: str) -> PlanReport:
    """The report that `encode_report` wrote, with the default bandwidths.

    Raises:
        CorruptionError: it did not.
    """
    try:
        found = unpack_canonical(data)
        values = dict(zip(_COUNTS, found["counts"], strict=True))
        values |= {name: Spread(*each) for name, each in zip(_SPREADS, found["spreads"], strict=True)}
        values |= {
            "extents_per_chunk": None,
            "storage_bandwidth": STORAGE_BYTES_PER_S,
            "network_bandwidth": NETWORK_BYTES_PER_S,
        }
        shapes = [dict(zip(PlannedShape.__slots__, each, strict=True)) for each in found["shapes"]]
        return _report(root, found, values, shapes)
    except (CkptError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise CorruptionError(
            f"a plan in the index cannot be read ({error}): repo.rebuild_index() forgets it, then plan again"
        ) from error


def _report(
    root: str, found: Mapping[str, Any], values: Mapping[str, Any], shapes: Iterable[dict[str, Any]]
) -> PlanReport:
    """The report with the mesh and the rules of `found`; `values` are its summary, `shapes` have lists in them."""
    rules = {pattern: tuple(placements) for pattern, placements in found["rules"].items()}
    made = (
        PlannedShape(**each | {"shape": tuple(each["shape"]), "placements": tuple(each["placements"])})
        for each in shapes
    )
    return PlanReport(root, found["mesh"], rules, PlanSummary(**values), tuple(made))


def as_json(report: PlanReport) -> dict[str, Any]:
    """The report as what JSON has, derived figures included."""
    summary = report.summary
    derived = ("read_amplification", "storage_s", "network_s", "estimated_s")
    shown = asdict(report) | {"rules": {pattern: list(cuts) for pattern, cuts in report.rules.items()}}
    shown["summary"] |= {name: getattr(summary, name) for name in derived}
    for name in _SPREADS:
        shown["summary"][name]["balance"] = getattr(summary, name).balance
    return shown


def read_json(text: str, name: str) -> list[PlanReport]:
    """The reports that `as_json` wrote: one, or a list.

    Raises:
        InvalidInputError: there is something else in the file `name`.
    """
    try:
        found = json.loads(text)
        return [_from_json(each) for each in (found if isinstance(found, list) else [found])]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InvalidInputError(
            f"{name}: not a restore plan ({type(error).__name__}: {error}): "
            "on the command line, cas-ckpt plan --output FILE writes one"
        ) from error


def _from_json(found: Mapping[str, Any]) -> PlanReport:
    summary = found["summary"]
    names = (*_COUNTS, "extents_per_chunk", "storage_bandwidth", "network_bandwidth")
    values = {name: summary[name] for name in names}
    values |= {name: Spread(*(summary[name][part] for part in ("least", "mean", "most"))) for name in _SPREADS}
    return _report(found["root"], found, values, found["shapes"])
