"""plan: how a commit would be restored into a layout, without restoring it.

    1. load the tree: which tensors there are, and their specs (core/tree.py)
    2. target layout -> who wants what of each (layout/target_layout.py)
    3. plan, prove the cover, count (layout/restore_plan.py, layout/plan_summary.py)
    4. keep it in the index as rows, by (root, layout); the next one who asks gets it from there (index/restores.py)

What a layout says nothing about is planned as it is restored: arrays, and tensors that are parts of something (sparse
tensors, generators) by every rank whole; values that each rank has for itself by that rank, and by nobody where the
target has another number of ranks.

Invariant: a plan follows from the root and the layout alone, so a kept one is as good as a new one;
what depends on the moment (extents, bandwidths) is looked up each time, and is not kept. Needs no torch and no ranks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from cas_ckpt import clock
from cas_ckpt.arguments import check_real, check_whole
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import Brief, commit_of
from cas_ckpt.core.revisions import Revision, resolve
from cas_ckpt.core.tree import load_tree
from cas_ckpt.errors import CkptError, InvalidInputError, NotFoundError
from cas_ckpt.index import history, restores, usage
from cas_ckpt.index.restores import RANK_COLUMNS, KeptPlan, PlanRow, ShapeRow
from cas_ckpt.layout.holdings import PLANNER_VERSION, wants_id, whole
from cas_ckpt.layout.plan_summary import (
    NETWORK_BYTES_PER_S,
    STORAGE_BYTES_PER_S,
    PlanSummary,
    RankTotals,
    Spread,
    rank_totals,
    summarize,
)
from cas_ckpt.layout.restore_plan import ReadPlan, RestoreRequest, plan_restore_reads
from cas_ckpt.layout.target_layout import MAX_RANKS, TargetLayout, check_splits
from cas_ckpt.memory import python_gc_paused
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.patterns import compile_pattern
from cas_ckpt.objects.spec import Spec, Split
from cas_ckpt.objects.state import (
    CONTAINER_KINDS,
    RANKS,
    Container,
    Flavor,
    Item,
    Path,
    StoredTensor,
    render_key,
    world_size_of,
)

_LOGGER = logging.getLogger("cas_ckpt")

_COUNTS = ("world_size", "num_tensors", "num_templates", "num_chunks", "chunk_bytes", "wanted_bytes")


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
        commit: The commit that was asked about; in a list of plans the youngest one with that state, "" if there is
            none any more.
    """

    root: str
    mesh: str
    rules: Mapping[str, tuple[str, ...]]
    summary: PlanSummary
    shapes: tuple[PlannedShape, ...]
    reused: bool = False
    commit: str = ""


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
    question = _Question.asked(handle, revision, storage_bandwidth, network_bandwidth)
    kept = handle.index.read(restores.read_plan, question.root, target.digest)
    if kept is None:
        tensors = chunked_tensors(handle, question.root)
        plan = _plan(tensors, target, question.root)
        if not handle.read_only:
            _keep(handle, question.root, target, tensors, plan)
        return question.answer(plan.report)
    return question.answer(report_of(kept))


def compare_plans(
    handle: RepositoryHandle,
    revision: Revision,
    targets: Sequence[TargetLayout] | None = None,
    *,
    most_ranks: int | None = None,
    storage_bandwidth: float | None = None,
    network_bandwidth: float | None = None,
) -> list[PlanReport]:
    """How the commit would be restored into each of `targets`, the one that takes the least time first.

    Those without a plan in the index are planned; which is the best is asked of the index.

    Args:
        targets: None: those for which there are plans.
        most_ranks: Leave out targets of more ranks.
    Raises:
        NotFoundError: no such commit, or nothing is left to compare. Else as for `plan_checkout`.
    """
    question = _Question.asked(handle, revision, storage_bandwidth, network_bandwidth)
    most = MAX_RANKS if most_ranks is None else check_whole("most_ranks", most_ranks)
    by_digest = {target.digest: target for target in targets or () if target.world_size <= most}
    made = {}
    missing = by_digest.keys() - handle.index.read(restores.known_targets, question.root)
    tensors = chunked_tensors(handle, question.root) if missing else []
    can_keep = not handle.read_only
    for digest, target in by_digest.items():
        if digest in missing:
            plan = _plan(tensors, target, question.root)
            made[digest] = plan.report
            can_keep = can_keep and _keep(handle, question.root, target, tensors, plan)
    kept = handle.index.read(
        restores.cheapest_plans, question.root, storage_bandwidth=question.storage_bandwidth,
        network_bandwidth=question.network_bandwidth, targets=None if targets is None else list(by_digest),
        most_ranks=most_ranks, planner_version=PLANNER_VERSION,
    )  # fmt: skip
    found = [question.answer(made.pop(Digest(plan.row.target), report_of(plan))) for plan in kept]
    if made:  # they could not be kept
        found = sorted([*found, *map(question.answer, made.values())], key=_cost)
    if not found:
        fit = "" if most_ranks is None else f" that fits {most_ranks} ranks"
        raise NotFoundError(f"there is no plan{fit} to compare: name meshes such as dp=96,tp=8, or plan for some first")
    return found


def _cost(report: PlanReport) -> tuple[float, int, str]:
    return report.summary.estimated_s, report.summary.world_size, report.mesh


@dataclass(frozen=True, slots=True)
class _Question:
    """The subject of a question, and the inputs of its answer besides the plan."""

    commit: Digest
    root: Digest
    storage_bandwidth: float
    network_bandwidth: float
    extents_per_chunk: float | None

    @staticmethod
    def asked(
        handle: RepositoryHandle, revision: Revision, storage_bandwidth: float | None, network_bandwidth: float | None
    ) -> _Question:
        bandwidths = _bandwidths(storage_bandwidth, network_bandwidth)
        commit = resolve(handle, revision)
        root = Digest(commit_of(handle, commit).root)
        num_chunks, num_extents = handle.index.read(usage.count_extents, root)
        return _Question(commit, root, *bandwidths, num_extents / num_chunks if num_chunks else None)

    def answer(self, report: PlanReport) -> PlanReport:
        """The report as the one who asks sees it."""
        summary = replace(
            report.summary,
            storage_bandwidth=self.storage_bandwidth,
            network_bandwidth=self.network_bandwidth,
            extents_per_chunk=self.extents_per_chunk,
        )
        return replace(report, summary=summary, commit=self.commit.hex())


def _bandwidths(storage: float | None, network: float | None) -> tuple[float, float]:
    """Those that are given, else the usual ones.

    Raises:
        InvalidInputError: one is not above 0.
    """
    storage = STORAGE_BYTES_PER_S if storage is None else check_real("storage_bandwidth", storage)
    network = NETWORK_BYTES_PER_S if network is None else check_real("network_bandwidth", network)
    if storage <= 0 or network <= 0:
        raise InvalidInputError("a bandwidth is a number of bytes per second above 0")
    return storage, network


def kept_plans(handle: RepositoryHandle, revision: Revision | None = None) -> list[PlanReport]:
    """The plans in the index that this version would make alike, for one commit or all; extents are not looked up."""
    root = None if revision is None else commit_of(handle, resolve(handle, revision)).root
    kept = handle.index.read(restores.read_plans, root, planner_version=PLANNER_VERSION)
    found = list(map(report_of, kept))
    commits = handle.index.read(history.youngest_of_roots, {bytes.fromhex(report.root) for report in found})
    return [replace(each, commit=commits.get(bytes.fromhex(each.root), b"").hex()) for each in found]


@dataclass(frozen=True, slots=True)
class _Made:
    """A plan that was just made: what it says, by rank, and who wants what."""

    report: PlanReport
    totals: RankTotals
    wanted: Sequence[RestoreRequest]


@python_gc_paused()
def _plan(tensors: Iterable[PlannedTensor], target: TargetLayout, root: bytes = b"") -> _Made:
    wanted, splits = requests_for(tensors, target)
    plan = plan_restore_reads(wanted, target.world_size)
    plan.check()
    totals = rank_totals(plan)
    rules = {pattern: tuple(map(str, cuts)) for pattern, cuts in target.rules}
    return _Made(
        PlanReport(root.hex(), str(target), rules, summarize(plan, totals), shapes_of(plan, splits)), totals, wanted
    )


def _keep(
    handle: RepositoryHandle, root: Digest, target: TargetLayout, tensors: Sequence[PlannedTensor], made: _Made
) -> bool:
    """Keep a new plan in the index; False: that cannot be done now, so it is made again when it is asked for again."""
    node_of = {each.key: each.node for each in tensors}
    wants = wants_id(((node_of[each.key], each.shards) for each in made.wanted), target.world_size)
    try:
        keep_plan(handle, root, target.digest, wants, made.report, made.totals)
    except CkptError as error:
        _LOGGER.warning("the plan is not kept: %s", error)
        return False
    return True


# --- what is planned --------------------------------------------------------------------------

EVERY_RANK = -1
"""Owner of a tensor that each rank wants whole, whatever the layout says of others."""


class PlannedTensor(NamedTuple):
    """A tensor that is stored in chunks.

    Attributes:
        node: Id of what is stored.
        owner: The rank that has it for itself, `EVERY_RANK`, or None: the layout says who wants what of it.
        owners: How many ranks had such values of their own; they are restored into as many.
    """

    key: str
    spec: Spec
    node: Digest = Digest(b"")
    owner: int | None = None
    owners: int = 0


def chunked_tensors(handle: RepositoryHandle, root: Digest) -> list[PlannedTensor]:
    """Every tensor of a state that is stored in chunks, by key; the others, and long values, need no plan."""
    return sorted(_chunked(load_tree(handle, root)))


def _chunked(tree: Container) -> Iterator[PlannedTensor]:
    todo: list[tuple[Path, Item, int | None, int]] = [((), tree, None, 0)]
    while todo:
        path, item, owner, owners = todo.pop()
        if isinstance(item, Container):
            by_rank = owner is None and item.kind == RANKS
            if by_rank:
                owners = world_size_of(item, path)
            elif owner is None and item.kind not in CONTAINER_KINDS:
                owner = EVERY_RANK
            for name, child in item.children.items():
                todo.append(((*path, name), child, int(name) if by_rank else owner, owners))
        elif isinstance(item, StoredTensor) and item.node is not None and item.flavor != Flavor.VALUE:
            whose = EVERY_RANK if owner is None and item.flavor == Flavor.NUMPY else owner
            yield PlannedTensor(render_key(path), item.spec, item.node, whose, owners)


def requests_for(
    tensors: Iterable[PlannedTensor], target: TargetLayout
) -> tuple[list[RestoreRequest], list[tuple[Split, ...]]]:
    """Requests of the ranks of `target` for each tensor that any of them wants, and their placements.

    A rule for a tensor that every rank has whole counts; values of single ranks have no placements.
    """
    rules = [(compile_pattern(pattern), cuts) for pattern, cuts in target.rules]
    unused = {pattern for pattern, _ in target.rules}
    wanted: list[RestoreRequest] = []
    placed: list[tuple[Split, ...]] = []
    for key, spec, _, owner, owners in tensors:
        ruled = next(((at, cuts) for at, (regex, cuts) in enumerate(rules) if regex.fullmatch(key)), None)
        if ruled is not None:
            unused.discard(target.rules[ruled[0]][0])
        if owner is not None and owner != EVERY_RANK:
            if owners == target.world_size:
                wanted.append(RestoreRequest(key, spec, whole(spec.shape, [owner])))
                placed.append(())
            continue
        usual = target.usual(key, spec) if owner is None else (Split(),) * len(target.names)
        splits = usual if ruled is None else ruled[1]
        check_splits(key, spec, splits)
        wanted.append(RestoreRequest(key, spec, target.shards(spec.shape, splits)))
        placed.append(splits)
    if unused:
        raise InvalidInputError(f"rule {sorted(unused)[0]!r} matches no tensor: repo.ls(ref) lists the keys")
    return wanted, placed


def shapes_of(plan: ReadPlan, splits: Sequence[tuple[Split, ...]]) -> tuple[PlannedShape, ...]:
    """The tensors that are planned alike; `splits` are the placements of each request."""
    found = []
    for template in plan.templates:
        first = plan.requests[template.members[0]]
        placements = tuple(map(str, splits[template.members[0]]))
        num_chunks = sum(1 for shares in template.shares if shares)
        found.append(
            PlannedShape(first.key, first.spec.shape, first.spec.dtype, placements, len(template.members), num_chunks)
        )
    return tuple(found)


# --- the report as rows of the index, and as JSON --------------------------------------------


def keep_plan(
    handle: RepositoryHandle, root: Digest, target: Digest, wants: Digest, report: PlanReport, totals: RankTotals
) -> None:
    """Write a plan into the index, under the digest of its target and of who wants what."""
    counts = {name: getattr(report.summary, name) for name in _COUNTS}
    made_us = int(clock.now_s() * 1e6)
    row = PlanRow(root, target, wants, PLANNER_VERSION, report.mesh, report.rules, **counts, made_us=made_us)
    shapes = [ShapeRow(**asdict(shape)) for shape in report.shapes]
    handle.index.write_soon(restores.write_plan, row, totals.rows(), shapes)


def report_of(kept: KeptPlan) -> PlanReport:
    """The report that was kept, with the default bandwidths."""
    row = kept.row
    known: dict[str, Any] = {name: getattr(row, name) for name in _COUNTS}
    for name, (least, total, most) in kept.totals.items():
        known[name] = Spread(least, total / row.world_size, most)
    summary = PlanSummary(
        **known, extents_per_chunk=None, storage_bandwidth=STORAGE_BYTES_PER_S, network_bandwidth=NETWORK_BYTES_PER_S
    )
    shapes = tuple(PlannedShape(**asdict(shape)) for shape in kept.shapes)
    return PlanReport(row.root.hex(), row.mesh, row.rules, summary, shapes, reused=True)


def as_json(report: PlanReport) -> dict[str, Any]:
    """The report as what JSON has, derived figures included."""
    summary = report.summary
    derived = ("read_amplification", "storage_s", "network_s", "estimated_s")
    shown = asdict(report) | {"rules": {pattern: list(cuts) for pattern, cuts in report.rules.items()}}
    shown["summary"] |= {name: getattr(summary, name) for name in derived}
    for name in RANK_COLUMNS:
        shown["summary"][name]["balance"] = getattr(summary, name).balance
    shown["commit_id"], shown["root_id"] = shown.pop("commit"), shown.pop("root")
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
    values = {name: summary[name] for name in (*_COUNTS, "extents_per_chunk", "storage_bandwidth", "network_bandwidth")}
    values |= {name: Spread(*(summary[name][part] for part in ("least", "mean", "most"))) for name in RANK_COLUMNS}
    rules = {pattern: tuple(placements) for pattern, placements in found["rules"].items()}
    shapes = (
        PlannedShape(**each | {"shape": tuple(each["shape"]), "placements": tuple(each["placements"])})
        for each in found["shapes"]
    )
    return PlanReport(
        found["root_id"], found["mesh"], rules, PlanSummary(**values), tuple(shapes), commit=found["commit_id"]
    )
