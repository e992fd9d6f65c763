"""plan: how a commit would be restored into a layout, without restoring it.

    1. load the tree: which tensors there are, and their specs (ops/tree.py)
    2. target layout -> who wants what of each (layout/target_layout.py)
    3. plan, prove the cover, count (layout/restore_plan.py, plan_check.py, plan_summary.py)
    4. keep the report in the index under (root, layout); the next one who asks gets it from there

Invariant: a plan follows from the root and the layout alone, so a kept one is as good as a new one;
what depends on the moment (extents, bandwidths) is looked up each time. Needs no torch and no ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from cas_ckpt.errors import CkptError, InvalidInputError
from cas_ckpt.index.plans import PlanRow
from cas_ckpt.layout.plan_summary import NETWORK_BYTES_PER_S, STORAGE_BYTES_PER_S, summarize
from cas_ckpt.layout.restore_plan import RestorePlan, Wanted, plan_restore_reads
from cas_ckpt.layout.target_layout import TargetLayout, check_splits
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.placement import Split
from cas_ckpt.objects.spec import Spec
from cas_ckpt.objects.state import StoredTensor, render_key, walk
from cas_ckpt.ops.patterns import compile_pattern
from cas_ckpt.ops.plan_report import PlannedShape, PlanReport, decode_report, encode_report
from cas_ckpt.ops.records import commit_of
from cas_ckpt.ops.resolve import Revision, resolve
from cas_ckpt.ops.tree import load_tree
from cas_ckpt.repository import RepositoryHandle

_LOGGER = logging.getLogger("cas_ckpt")


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
    kept = handle.index.plan(root, target.digest)
    if kept is not None:
        report = replace(decode_report(kept.report, root.hex()), reused=True)
    else:
        report = replace(plan_tensors(chunked_tensors(handle, root), target), root=root.hex())
        _keep(handle, report, root, target)
    num_chunks, num_extents = handle.index.count_extents(root)
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
    return [replace(decode_report(row.report, row.root.hex()), reused=True) for row in handle.index.plans(root)]


def plan_tensors(tensors: Iterable[tuple[str, Spec]], target: TargetLayout) -> PlanReport:
    """How tensors of these keys and specs would be restored; needs no commit.

    Raises:
        MismatchError, InvalidInputError: as for `plan_checkout`.
    """
    wanted, splits = wanted_by_layout(tensors, target)
    plan = plan_restore_reads(wanted, target.world_size)
    plan.check()
    rules = {pattern: tuple(map(str, cuts)) for pattern, cuts in target.rules}
    return PlanReport("", str(target), rules, summarize(plan), _shapes(plan, splits))


def wanted_by_layout(
    tensors: Iterable[tuple[str, Spec]], target: TargetLayout
) -> tuple[list[Wanted], list[tuple[Split, ...]]]:
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
        wanted.append(Wanted(key, spec, target.shards(spec.shape, splits)))
        placed.append(splits)
    if unused:
        raise InvalidInputError(f"rule {sorted(unused)[0]!r} matches no tensor: repo.ls(ref) lists the keys")
    return wanted, placed


def chunked_tensors(handle: RepositoryHandle, root: Digest) -> list[tuple[str, Spec]]:
    """Key and spec of every tensor of a state that is stored in chunks; the others need no plan."""
    found = walk(load_tree(handle, root))
    stored = ((path, item) for path, item in found if isinstance(item, StoredTensor) and item.node is not None)
    return sorted((render_key(path), item.spec) for path, item in stored)


def _shapes(plan: RestorePlan, splits: Sequence[tuple[Split, ...]]) -> tuple[PlannedShape, ...]:
    found = []
    for template in plan.templates:
        first = plan.wanted[template.members[0]]
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
        handle.index.keep_plan(PlanRow(root, target.digest, str(target), encode_report(report)))
    except CkptError as error:
        _LOGGER.warning("the plan is not kept: %s", error)
