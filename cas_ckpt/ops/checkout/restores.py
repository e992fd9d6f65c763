"""restores: the log of checkouts and loads, and what was planned for each.

    1. `logged` surrounds a restore, from the moment in which its commit is known
    2. rank 0 writes one row when it ends, well or badly; nothing waits for that row but rank 0
    3. of several ranks it keeps the plan too that they made, unless the index has one for the same wants

A restore and a plan belong together if they are of one state and of equal `wants_id`: then the same ranks want the same
elements of the same tensors, and the planner gives them the same work.

Invariant: a restore never fails because it cannot be logged, and waits a few seconds for it at most; a repository that
is read only logs nothing.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cas_ckpt import clock
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import Brief, commit_of
from cas_ckpt.core.refs import default_author
from cas_ckpt.core.revisions import Revision, resolve
from cas_ckpt.core.tree import stored_tensors
from cas_ckpt.index import restores
from cas_ckpt.index.restores import RestoreRow
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.layout.holdings import Shard, held_by, wants_id, whole
from cas_ckpt.layout.plan_summary import rank_totals, summarize
from cas_ckpt.layout.restore_plan import ReadPlan
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.spec import MeshPlacement, mesh_text
from cas_ckpt.objects.state import Container, StoredTensor, TensorCopy, render_key
from cas_ckpt.ops.checkout.plan import PlanReport, keep_plan, report_of, shapes_of

_LOGGER = logging.getLogger("cas_ckpt")

CHECKOUT = "checkout"
LOAD = "load"


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
    rows = handle.index.read(restores.read_restores, root, limit=limit)
    wanted = [(row.root, row.wants) for row in rows if row.wants is not None]
    planned = handle.index.read(restores.plans_for_wants, wanted) if wanted else {}
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
                    self._whole[shape] = whole(shape, [0])
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
            handle.index.write_soon(restores.write_restore, row)
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
    if plan is None or handle.index.read(restores.has_plan, root, wants):
        return
    splits_of = {
        render_key(copy.path): copy.placement.splits
        for copy in note.copies if isinstance(copy.placement, MeshPlacement)
    }  # fmt: skip
    totals = rank_totals(plan)
    shapes = shapes_of(plan, [splits_of.get(request.key, ()) if mesh else () for request in plan.requests])
    report = PlanReport(root.hex(), mesh, {}, summarize(plan, totals), shapes)
    keep_plan(handle, root, wants, wants, report, totals)
