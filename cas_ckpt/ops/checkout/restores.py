"""restores: how a commit would be restored into a layout, without restoring it; and the log of restores that were made.

A plan:

    1. load the tree: which tensors there are, and their specs (core/tree.py)
    2. target layout -> who wants what of each (layout/target_layout.py)
    3. plan, prove the cover, count (layout/restore_plan.py)
    4. keep it in the index as rows, by (root, layout); the next one who asks gets it from there (index/remembered.py)

What a layout says nothing about is planned as it is restored: arrays, and tensors that are parts of something (sparse
tensors, generators) by every rank whole; values that each rank has for itself by that rank, and by nobody where the
target has another number of ranks.

The log:

    1. `logged` surrounds a restore, from the moment in which its commit is known
    2. rank 0 writes one row when it ends, well or badly; nothing waits for that row but rank 0
    3. of several ranks it keeps the plan too that they made, unless the index has one for the same wants

A restore and a plan belong together if they are of one state and of equal `wants_id`: then the same ranks want the same
elements of the same tensors, and the planner gives them the same work.

Invariant: a plan follows from the root and the layout alone, so a kept one is as good as a new one; what depends on the
moment (extents, bandwidths) is looked up each time, and is not kept. A restore never fails because it cannot be logged,
and waits a few seconds for it at most; a repository that is read only logs nothing. Needs no torch.
"""

from __future__ import annotations

import json
import logging
import math
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from cas_ckpt import clock
from cas_ckpt.arguments import check_real, check_whole
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import Brief, commit_of
from cas_ckpt.core.refs import default_author
from cas_ckpt.core.revisions import Revision, resolve
from cas_ckpt.core.tree import load_tree, stored_tensors
from cas_ckpt.errors import CkptError, InvalidInputError, NotFoundError
from cas_ckpt.index import history, remembered, usage
from cas_ckpt.index.remembered import RANK_COLUMNS, KeptPlan, PlanRow, RestoreRow, ShapeRow
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.layout.holdings import PLANNER_VERSION, Shard, held_by, whole
from cas_ckpt.layout.restore_plan import (
    NETWORK_BYTES_PER_S,
    STORAGE_BYTES_PER_S,
    PlanSummary,
    RankTotals,
    ReadPlan,
    RestoreRequest,
    Spread,
    plan_restore_reads,
    rank_totals,
    summarize,
)
from cas_ckpt.layout.target_layout import MAX_RANKS, TargetLayout, check_splits
from cas_ckpt.memory import python_gc_paused
from cas_ckpt.objects.digest import Digest, leaf_digest, object_id, pack_atom, pack_canonical
from cas_ckpt.objects.patterns import compile_pattern
from cas_ckpt.objects.spec import MeshPlacement, Spec, Split, mesh_text
from cas_ckpt.objects.state import (
    CONTAINER_KINDS,
    RANKS,
    Container,
    Flavor,
    Item,
    Path,
    StoredTensor,
    TensorCopy,
    render_key,
    world_size_of,
)

_LOGGER = logging.getLogger("cas_ckpt")

CHECKOUT = "checkout"
LOAD = "load"

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
    kept = handle.index.read(remembered.read_plan, question.root, target.digest)
    if kept is not None:
        return question.answer(report_of(kept))
    tensors = chunked_tensors(handle, question.root)
    return question.answer(_planned(handle, question.root, target, tensors, keep=not handle.read_only)[0])


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
    missing = by_digest.keys() - handle.index.read(remembered.known_targets, question.root)
    tensors = chunked_tensors(handle, question.root) if missing else []
    can_keep = not handle.read_only
    for digest, target in by_digest.items():
        if digest in missing:
            made[digest], can_keep = _planned(handle, question.root, target, tensors, keep=can_keep)
    kept = handle.index.read(
        remembered.cheapest_plans, question.root, storage_bandwidth=question.storage_bandwidth,
        network_bandwidth=question.network_bandwidth, targets=None if targets is None else list(by_digest),
        most_ranks=most_ranks, planner_version=PLANNER_VERSION,
    )  # fmt: skip
    found = [question.answer(made.pop(Digest(plan.row.target), report_of(plan))) for plan in kept]
    if made:  # they could not be kept
        found = sorted(
            [*found, *map(question.answer, made.values())],
            key=lambda report: (report.summary.estimated_s, report.summary.world_size, report.mesh),
        )
    if not found:
        fit = "" if most_ranks is None else f" that fits {most_ranks} ranks"
        raise NotFoundError(f"there is no plan{fit} to compare: name meshes such as dp=96,tp=8, or plan for some first")
    return found


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
        storage, network = STORAGE_BYTES_PER_S, NETWORK_BYTES_PER_S
        if storage_bandwidth is not None:
            storage = check_real("storage_bandwidth", storage_bandwidth)
        if network_bandwidth is not None:
            network = check_real("network_bandwidth", network_bandwidth)
        if storage <= 0 or network <= 0:
            raise InvalidInputError("a bandwidth is a number of bytes per second above 0")
        commit = resolve(handle, revision)
        root = Digest(commit_of(handle, commit).root)
        num_chunks, num_extents = handle.index.read(usage.count_extents, root)
        return _Question(commit, root, storage, network, num_extents / num_chunks if num_chunks else None)

    def answer(self, report: PlanReport) -> PlanReport:
        """The report as the one who asks sees it."""
        summary = replace(
            report.summary,
            storage_bandwidth=self.storage_bandwidth,
            network_bandwidth=self.network_bandwidth,
            extents_per_chunk=self.extents_per_chunk,
        )
        return replace(report, summary=summary, commit=self.commit.hex())


def kept_plans(handle: RepositoryHandle, revision: Revision | None = None) -> list[PlanReport]:
    """The plans in the index that this version would make alike, for one commit or all; extents are not looked up."""
    root = None if revision is None else commit_of(handle, resolve(handle, revision)).root
    kept = handle.index.read(remembered.read_plans, root, planner_version=PLANNER_VERSION)
    found = list(map(report_of, kept))
    commits = handle.index.read(history.youngest_of_roots, {bytes.fromhex(report.root) for report in found})
    return [replace(each, commit=commits.get(bytes.fromhex(each.root), b"").hex()) for each in found]


@python_gc_paused()
def _planned(
    handle: RepositoryHandle, root: Digest, target: TargetLayout, tensors: Sequence[PlannedTensor], *, keep: bool
) -> tuple[PlanReport, bool]:
    """A new plan, and whether it is in the index now; one that cannot be kept is made again when it is asked for again.

    Args:
        keep: Whether to try.
    """
    wanted, splits = requests_for(tensors, target)
    plan = plan_restore_reads(wanted, target.world_size)
    plan.check()
    totals = rank_totals(plan)
    rules = {pattern: tuple(map(str, cuts)) for pattern, cuts in target.rules}
    report = PlanReport(root.hex(), str(target), rules, summarize(plan, totals), shapes_of(plan, splits))
    if not keep:
        return report, False
    node_of = {each.key: each.node for each in tensors}
    wants = wants_id(((node_of[each.key], each.shards) for each in wanted), target.world_size)
    try:
        keep_plan(handle, root, target.digest, wants, report, totals)
    except CkptError as error:
        _LOGGER.warning("the plan is not kept: %s", error)
        return report, False
    return report, True


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
    handle.index.write_soon(remembered.write_plan, row, totals.rows(), shapes)


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


# --- who wants what ------------------------------------------------------------------------------


def wants_id(wanted: Iterable[tuple[Digest, tuple[Shard, ...]]], world_size: int) -> Digest:
    """Digest of which ranks want which elements; independent of order and notation.

    Names of dimensions, keys and ways to write a placement are not part of it: FSDP over 8 ranks, and a mesh `dp=8`
    that somebody plans for, want the same. Nor are further keys of one and the same tensor.

    Args:
        wanted: Id of what is stored, and who wants what of it. Cost: distinct objects `shards`, and one step for each.
    """
    names: dict[int, bytes] = {}
    found = set()
    for digest, shards in wanted:
        name = names.get(id(shards))
        if name is None:
            name = names[id(shards)] = _shards_id(shards)
        found.add(digest + name)
    head = pack_canonical([PLANNER_VERSION, world_size])
    return object_id("restore wants", head + b"".join(sorted(found)))


def _shards_id(shards: Iterable[Shard]) -> Digest:
    """Digest of the shards, independent of order; ranks that hold the same pieces may be one shard or several."""
    ranks_of: dict[tuple[tuple[int, ...], ...], set[int]] = {}
    for shard in shards:
        pieces = tuple(sorted((*piece.offsets, *piece.sizes) for piece in shard.pieces))
        ranks_of.setdefault(pieces, set()).update(shard.ranks)
    rows = [[list(map(list, pieces)), sorted(ranks)] for pieces, ranks in sorted(ranks_of.items())]
    return leaf_digest(pack_atom(rows))


# --- the log of restores ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class RestoreInfo(Brief):
    """A restore that was made. Ids are hexadecimal.

    Attributes:
        verb: "checkout" or "load".
        mesh: Of the targets, as text; "" if they are over several, or over none.
        world_size: Ranks that restored together.
        time_s, seconds: When it began, from the epoch, and how long it took.
        num_bytes: Plain bytes of chunks that all ranks read and verified; None if it failed.
        author, host: Who did it, and on which machine (of rank 0).
        complete: All of the state was wanted, not only some keys.
        error: What went wrong, in one line; None: all was verified and is in place.
        estimated_s: What a kept plan for the same wants says of it, with the usual bandwidths; None: there is none.
    """

    commit: str
    root: str
    verb: str
    mesh: str
    world_size: int
    time_s: float
    seconds: float
    num_bytes: int | None
    author: str
    host: str
    complete: bool
    error: str | None
    estimated_s: float | None = None


def list_restores(
    handle: RepositoryHandle, revision: Revision | None = None, *, limit: int | None = None
) -> list[RestoreInfo]:
    """The restores of the state of a commit, or all in the log; the last one first.

    Raises:
        NotFoundError: no such commit.
    """
    root = None if revision is None else commit_of(handle, resolve(handle, revision)).root
    rows = handle.index.read(remembered.read_restores, root, limit=limit)
    wanted = [(row.root, row.wants) for row in rows if row.wants is not None]
    planned = handle.index.read(remembered.plans_for_wants, wanted) if wanted else {}
    estimates: dict[tuple[bytes, bytes | None], float] = {
        wants: report_of(plan).summary.estimated_s for wants, plan in planned.items()
    }
    return [
        RestoreInfo(
            row.commit_id.hex(), row.root.hex(), row.verb, row.mesh, row.world_size, row.started_us / 1e6, row.seconds,
            row.num_bytes, row.author, row.host, row.complete, row.error, estimates.get((row.root, row.wants)),
        )
        for row in rows
    ]  # fmt: skip


# --- a restore that is under way ----------------------------------------------------------------


@dataclass(slots=True)
class RestoreNote:
    """The state of a restore while it runs.

    Attributes:
        complete: All of the state is wanted.
        left_alone: And yet no rank wants some chunk of it, which is neither read nor verified.
        copies: What this rank wants, where its targets were there before.
        plan, stored: Of several ranks: what they do together, and the tensors that it is planned for.
        num_bytes: Plain bytes that were read and verified, by all ranks.
    """

    complete: bool
    copies: Sequence[TensorCopy] = ()
    plan: ReadPlan | None = None
    stored: Sequence[StoredTensor] = ()
    num_bytes: int = 0
    left_alone: bool = False
    _wanted: list[tuple[Digest, tuple[Shard, ...]]] = field(default_factory=list)
    _whole: dict[tuple[int, ...], tuple[Shard, ...]] = field(default_factory=dict)

    def planned(self, plan: ReadPlan, stored: Sequence[StoredTensor]) -> None:
        """Several ranks do what is in `plan`, whose requests are for `stored`."""
        self.plan, self.stored = plan, stored

    def add_alone(self, copies: Sequence[TensorCopy]) -> None:
        """This process, alone, wants all of each, or its own part. They are not kept: their memory may be needed."""
        for copy in copies:
            shape, part = copy.stored.spec.shape, copy.placement
            if part is not None and sum(box.num_elements for box, _ in held_by(0, shape, part)) < math.prod(shape):
                self.complete = False
            elif copy.stored.node is not None:
                if shape not in self._whole:
                    box = copy.stored.spec.box
                    self._whole[shape] = (Shard((box,), (box.offsets,), (0,)),)
                self._wanted.append((copy.stored.node, self._whole[shape]))

    def check_complete(self, tree: Container) -> None:
        """Find out whether there are chunks in the state `tree` that no rank wants.

        Such are those of values of single ranks, if there are more or fewer ranks now.
        """
        if self.plan is None:
            wanted = {node for node, _ in self._wanted}
        else:
            partly = {tensor for each in self.plan.templates if not all(each.touches) for tensor in each.members}
            wanted = {tensor.node for at, tensor in enumerate(self.stored) if tensor.node and at not in partly}
        nodes = {tensor.node for _, tensor in stored_tensors(tree) if tensor.node is not None}
        self.left_alone = not nodes <= wanted

    def wants(self, world_size: int) -> Digest | None:
        """Digest of which ranks want what; None if it failed before that was known."""
        if self.plan is not None:
            pairs = zip(self.stored, self.plan.requests, strict=True)
            wanted = [(tensor.node, request.shards) for tensor, request in pairs if tensor.node is not None]
            return wants_id(wanted, world_size)
        return wants_id(self._wanted, world_size) if self._wanted and world_size == 1 else None

    def mesh(self, world_size: int) -> str:
        """The one mesh of all ranks that the targets are divided over; "" if there is none, or several."""
        placements = {id(copy.placement): copy.placement for copy in self.copies if copy.placement is not None}
        meshes = {each.mesh if isinstance(each, MeshPlacement) else None for each in placements.values()}
        mesh = meshes.pop() if len(meshes) == 1 else None
        if mesh is None or len(mesh.ranks) != world_size:
            return ""
        return mesh_text(zip(mesh.names, mesh.shape, strict=True))


@contextmanager
def logged(
    handle: RepositoryHandle, commit: CommitRow, *, verb: str, complete: bool, rank: int = 0, world_size: int = 1
) -> Iterator[RestoreNote]:
    """A restore of `commit`, which is in the log when the block ends; an error goes on.

    Args:
        complete: All of the state is wanted, as far as is known at the beginning.
        rank: Only rank 0 writes. It must hear of what fails on others before its block ends.
    """
    note = RestoreNote(complete)
    if handle.read_only or rank:
        yield note
        return
    started_s, begun_s = clock.now_s(), clock.monotonic_s()

    def write(error: Exception | None) -> None:
        seconds = clock.monotonic_s() - begun_s
        try:
            wants, mesh = note.wants(world_size), note.mesh(world_size)
            row = RestoreRow(
                commit.digest, commit.root, verb, wants, mesh, world_size, int(started_s * 1e6), seconds,
                note.num_bytes if error is None else None, default_author(), socket.gethostname(),
                note.complete and not note.left_alone,
                None if error is None else f"{type(error).__name__}: {error}",
            )  # fmt: skip
            handle.index.write_soon(remembered.write_restore, row)
            if error is None and note.complete and note.plan is not None and wants is not None:
                _keep_plan(handle, note, Digest(commit.root), wants, mesh)
        except Exception as refused:  # noqa: BLE001  # the restore is what counts, and its own error
            _LOGGER.warning("this %s is not in the log of restores: %s", verb, refused)

    try:
        yield note
    except Exception as error:
        write(error)
        raise
    write(None)


def _keep_plan(handle: RepositoryHandle, note: RestoreNote, root: Digest, wants: Digest, mesh: str) -> None:
    """Keep the plan that several ranks made for a restore, unless there is one for the same wants."""
    plan = note.plan
    if plan is None or handle.index.read(remembered.has_plan, root, wants):
        return
    splits_of = {
        render_key(copy.path): copy.placement.splits
        for copy in note.copies if isinstance(copy.placement, MeshPlacement)
    }  # fmt: skip
    totals = rank_totals(plan)
    shapes = shapes_of(plan, [splits_of.get(request.key, ()) if mesh else () for request in plan.requests])
    report = PlanReport(root.hex(), mesh, {}, summarize(plan, totals), shapes)
    keep_plan(handle, root, wants, wants, report, totals)
