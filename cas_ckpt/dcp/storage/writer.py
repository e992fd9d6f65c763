"""`CasStorageWriter`: torch.distributed.checkpoint saves into a repository.

How a save goes (DCP calls, on all ranks unless said otherwise):

0. `stage` (async_save without a stager, in the caller's thread): waits for the saves before it and for the pending
   commits of an open repository, copies the state into memory of this save (dcp/storage/staging.py), and the save gets
   its number.
1. `set_up_storage_writer`: the repository is looked at, the turn is taken.
2. `prepare_local_plan`, and on the coordinator `prepare_global_plan`: plans pass unchanged;
   a plan for other ranks than the writer's is refused before anything is written.
3. `write_data`: this rank's tree is made (dcp/storage/tree.py) and committed together with the others.
4. `finish` on the coordinator: results are held against the plan, `metadata` is filled in.

Invariant: the commit is published inside step 3, by the collective commit, which succeeds on
all ranks or raises on all. It needs no `finish` to be whole: DCP calls that on one rank only,
skips it if any rank failed, and by then no rank may have failed that the commit does not know
of. What a save leaves in plans (which DCP caches and hands to later saves) is nothing.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from os import PathLike
from types import FrameType
from typing import Any, NoReturn

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.host_cache import AUTO
from cas_ckpt.core.publish import branch_target, check_meaning
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.core.refs import Head, RefKind, check_new_name
from cas_ckpt.dcp.storage.group import (
    BackgroundSave,
    RepositoryPlace,
    SharedGroup,
    Turns,
    branch_turn,
    forget_in_background,
    members_of,
    next_save,
    note_in_background,
    shared_group,
    translates_memory_errors,
    wait_for_saves,
    world_size,
)
from cas_ckpt.dcp.storage.names import MOST_FRAMES, module_states, state_given
from cas_ckpt.dcp.storage.staging import stage_state
from cas_ckpt.dcp.storage.tree import RankPart
from cas_ckpt.errors import ConflictError, InvalidInputError, MismatchError, PeerError
from cas_ckpt.objects.state import Path, render_key
from cas_ckpt.ops.commit.commit import commit_live
from cas_ckpt.ops.commit.request import DEFAULT_AUDIT, CommitRequest, ReplicaCheck, checked_fields
from cas_ckpt.ops.refs import create_tag
from cas_ckpt.training.stateful import module_versions
from cas_ckpt.training.torch_internals import ASYNC_SAVE, INNER_SAVE, SAVE, calling, checkpoint_id_of, variables
from cas_ckpt.transfer.peers import Peers, SoloPeers, collective_errors, error_text

_LOGGER = logging.getLogger("cas_ckpt")

DEFAULT_TIMEOUT_S = 300.0
"""How long a rank waits for the others."""

_MOST_FRAMES = 4
"""Calls between DCP, which has the planner or the future, and a writer's hook that looks for it."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """Where an item of a plan is: `storage_data` of DCP's results and metadata.

    Attributes:
        commit: Id of the commit.
        key: Of the entry, as `cas-ckpt ls` shows it.
    """

    commit: str
    key: str


class _Begun(threading.local):
    """What the save that begins in this thread was told before it comes to `set_up_storage_writer`.

    Attributes:
        given: The `checkpoint_id` that DCP was given for the save that begins next.
        tag: That of the one that has begun.
        number: Of the save, if it was staged before; None: it begins now.
        background: The same save, as it goes on in the background of this process.
    """

    def __init__(self) -> None:
        self.given: str | None = None
        self.tag: str | None = None
        self.number: int | None = None
        self.background: BackgroundSave | None = None


@dataclass(slots=True)
class _Save:
    """One save, as this rank's hooks see it.

    Attributes:
        versions: Of modules, by where DCP has their states; it does not look at them.
    """

    coordinates: bool
    collective: bool
    tag: str | None
    turns: Turns
    versions: Mapping[Path, Mapping[str, int]]
    num_plans: int | None = None
    commit: CommitInfo | None = None


class CasStorageWriter(StorageWriter, AsyncStager):
    """Commits what `dcp.save` and `dcp.async_save` are given; one commit per save.

        dcp.save(state, storage_writer=CasStorageWriter("runs/ckpts", branch="main", step=100))

    Make it on every rank that saves, after `init_process_group`, all in the same order: the
    first writer over a process group makes a gloo group over it, which is collective. A writer
    may save many times, always under the same message and step, or be made anew for each save,
    which costs nothing more. To one branch, and over one process group, a process saves once at a
    time: a save waits for those that `dcp.async_save` began before it, through whatever writer they go. One that
    it cannot know of (begun with another stager, or by another thread) raises `ConflictError`.

    `checkpoint_id=` of dcp.save names a tag that the commit gets; if it exists, nothing is saved.

    Attributes:
        commit: The last commit that was made through this object in this process, or None.
            (A process executor saves in another process: take `metadata.storage_meta.save_id`.)
    """

    commit: CommitInfo | None
    _group: SharedGroup | None

    def __init__(
        self,
        repository: Any,
        *,
        branch: str | None = None,
        create: bool = False,
        orphan: bool = False,
        message: str = "",
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        author: str | None = None,
        meta: Any = None,
        process_group: Any = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        no_dist: bool = False,
        index_url: str | None = None,
        cache: str | PathLike[str] | None = AUTO,
        on_conflict: str = "retry",
        allow_pickle: bool = False,
        num_threads: int | None = None,
        on_divergence: str = "raise",
        replica_check: str = ReplicaCheck.CHECKSUM,
        replica_audit: float = DEFAULT_AUDIT,
    ) -> None:
        """Nothing is opened yet.

        Args:
            repository: A path, a URL, or an open `Repository`.
            branch, create, orphan, message, step, metrics, author, meta, on_conflict, allow_pickle: As for
                `Repository.commit`. An open `Repository` goes on from what a reader that was given the same one
                loaded, and a save waits for the commits that its `commit_async` has begun; a path or URL knows of
                nothing that was loaded or begun, and goes on from the branch.
            process_group: The one that dcp.save is given; the default group if None.
            timeout_s: How long a rank waits for another before all of them give up.
            no_dist: As for dcp.save; needed here only if not all ranks make a writer.
            index_url, cache: As for `Repository.open`.
            on_divergence: "raise" if ranks hold different values under one key, or "warn" and keep the lowest rank's.
            replica_check, replica_audit: As for `Repository.commit`: how replicated tensors are compared.
        Raises:
            InvalidInputError: says which argument cannot be.
        """
        super().__init__()
        self._place = RepositoryPlace(repository, index_url, cache)
        self._request = CommitRequest(
            branch=branch, create=create, orphan=orphan, message=message, author=author, step=step,
            metrics={} if metrics is None else metrics, meta=meta,
            on_conflict=on_conflict, allow_pickle=allow_pickle, num_threads=num_threads,
            on_divergence=on_divergence, replica_check=replica_check, replica_audit=replica_audit, verb="dcp.save",
        )  # fmt: skip
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._no_dist = no_dist
        self._own_tag: str | None = None
        self._members = None if no_dist else members_of(process_group)
        self._begin_empty()
        if self._world_size() > 1:
            self._group = shared_group(process_group, timeout_s)
        checked_fields(self._request)  # after the group: its other ranks would wait for this one

    def _begin_empty(self) -> None:
        self.commit = None
        self._group = None
        self._saves: dict[int, _Save] = {}
        self._begun = _Begun()
        self._brought: int | None = None
        self._to_come: list[BackgroundSave] = []
        self._in_background: BackgroundSave | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Process executors send the writer to a process whose default group is ours over again.
        kept = ("_place", "_request", "_timeout_s", "_no_dist", "_own_tag", "_members")
        brought = self._to_come[-1].number if self._to_come else None
        return {name: getattr(self, name) for name in kept} | {"_process_group": None, "_brought": brought}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin_empty()
        self.__dict__.update(state)

    # --- what DCP calls -------------------------------------------------------------------

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it can name a tag."""
        try:
            check_new_name(str(checkpoint_id))
        except InvalidInputError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP was given a `checkpoint_id` (or none): the tag of the next commit of this thread, and of no other."""
        if calling(sys._getframe(1), SAVE, ASYNC_SAVE) != ASYNC_SAVE:  # which asks again in the thread that saves
            self._begun.given = None if checkpoint_id is None else self._tag_of(checkpoint_id)

    def _tag_of(self, checkpoint_id: str | os.PathLike[str]) -> str:
        """The tag that a `checkpoint_id` means."""
        return str(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """What DCP writes into its log."""
        return self._begun.given or self._begun.tag or self._own_tag or self._place.url

    @translates_memory_errors
    def storage_meta(self) -> StorageMeta | None:
        """Where it will be; the id of the commit is not known yet. DCP asks first of all, so a save begins here.

        It asks before it gives the state to the planner, which an earlier save may still use: that is waited for here.
        A save that was staged is known by its state, whatever else this writer saves meanwhile.
        """
        begun, frame = self._begun, sys._getframe(1)
        tag, begun.given = begun.given, None
        for given in checkpoint_id_of(frame, SAVE, INNER_SAVE):
            tag = None if given is None else self._tag_of(given)
        self._place.refuse_inside(frame)
        begun.tag = tag
        begun.background = self._staged_before(frame)
        number, self._brought = self._brought, None  # of a process, which saves nothing else
        if begun.background is not None:
            self._come(begun.background)
            begun.background.thread = threading.get_ident()
            number = begun.background.number
        begun.number = number
        if number is None:  # else `stage` has waited; what was begun since comes behind this save's number
            self._place.wait_for_commits()
        with ExitStack() as opened:
            wait_for_saves(
                self._place.url, lambda: self._turns(opened.enter_context(self._place.opened())), before=number
            )
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @translates_memory_errors
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Begin a save in the background: a copy of `state_dict` on the host, which belongs to this save alone.

        Waits for the saves before it to the same branch, or over the same process group.
        """
        self._place.refuse_inside(sys._getframe(1))
        self._place.wait_for_commits()
        with ExitStack() as opened:
            wait_for_saves(self._place.url, lambda: self._turns(opened.enter_context(self._place.opened())))
        staged = stage_state(state_dict)
        self._in_background = BackgroundSave(next_save(), self._place.url, staged=staged)
        self._to_come.append(self._in_background)
        note_in_background(self._in_background)
        return staged

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` has copied everything. DCP calls it when its executor has the save."""
        save, self._in_background = self._in_background, None
        if save is None:
            return
        future = _local(sys._getframe(1), "upload_future")
        if callable(getattr(future, "done", None)) and callable(getattr(future, "add_done_callback", None)):
            save.future = future
            future.add_done_callback(partial(_log_failure, self._request.step))
            future.add_done_callback(lambda _: self._come(save))  # also if it never came to the writer
            self._place.note(save)
        else:  # another version of torch: later saves cannot wait for this one, and are refused while it goes on
            forget_in_background(save)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Always: not to wait, but since DCP has the future of a save then."""
        return True

    def close(self) -> None:
        """Nothing is kept from a save to the next one."""

    @translates_memory_errors
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save on this rank.

        Raises:
            ConflictError: another one is under way, or the tag exists. NoRepositoryError.
        """
        begun = self._begun
        number, background, tag = begun.number, begun.background, begun.tag or self._own_tag
        begun.number = begun.background = begun.tag = None
        with self._place.opened() as handle:
            handle.require_writable()
            if tag is not None and check_new_name(tag) in {ref.name for ref in handle.refs.list(RefKind.TAG)}:
                raise ConflictError(f"checkpoint_id {tag!r} is a tag already: nothing is overwritten")
            if tag is not None:
                check_meaning(handle, RefKind.TAG, tag)
            turns = self._turns(handle)
        if background is not None:
            background.turns = turns
        states = module_states(state_given(sys._getframe(1)))
        versions = {path: found for path, state in states if (found := module_versions(state)) is not None}
        turns.plan(number)
        save = _Save(is_coordinator, bool(kwargs.get("use_collectives", True)), tag, turns, versions)
        self._saves[threading.get_ident()] = save
        watch_finish_plan(self, lambda error: self._report(save, error))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """`plan`, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """`plans`, unchanged.

        Raises:
            InvalidInputError: they are of other ranks than those of the writer.
        """
        save = self._save()
        save.num_plans = len(plans)
        if save.collective and len(plans) not in (1, self._world_size()):
            raise InvalidInputError(
                f"dcp.save plans for {len(plans)} ranks, this writer is for {self._world_size()}: "
                "give both the same process_group"
            )
        return plans

    @translates_memory_errors
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Commit the state together with the other ranks; collective.

        Raises:
            PeerError: another rank failed, died, or has a different state under the same key.
            UnsupportedValueError, ConflictError, StorageError, ...: as for `Repository.commit`.
        """
        save = self._save()
        try:
            save.turns.write()
            paths = self._commit(save, plan, planner)
        except PeerError as error:
            if save.collective and self._group is not None and self._group.peers.has_lost_ranks:
                raise RankLost(str(error), error.ranks) from error
            raise
        finally:
            save.turns.are_over = True
            if save.collective and not save.coordinates:  # no more calls come
                del self._saves[threading.get_ident()]
        done: Future[list[WriteResult]] = Future()
        results = []
        for item in plan.items:
            num_bytes = 0
            if item.tensor_data is not None:
                num_bytes = math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
            commit = save.commit.id if save.commit is not None else ""
            entry = StoredEntry(commit, render_key(paths[item.index.fqn]))
            results.append(WriteResult(item.index, num_bytes, entry))
        done.set_result(results)
        return done

    @translates_memory_errors
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Hold the results against the plan, and note in `metadata` what was made of it.

        Raises:
            MismatchError: a planned item was not written. ConflictError: somebody else made the tag meanwhile.
        """
        save = self._saves.pop(threading.get_ident())
        entries = {result.index: result.storage_data for rank in results for result in rank}
        missing = [index for index in _planned(metadata) if index not in entries]
        commits = {entry.commit for entry in entries.values()}
        if missing or len(commits) > 1 or save.commit is None:
            raise MismatchError(
                f"{len(missing)} planned items were written by no rank, such as {missing[:1]}; commits: {commits}"
            )
        # A new mapping: DCP may hand out one Metadata object for several saves.
        metadata.storage_data = entries
        metadata.storage_meta = StorageMeta(checkpoint_id=save.tag or self._place.url, save_id=save.commit.id)
        if save.tag is not None:
            with self._place.opened() as handle:
                create_tag(handle, save.tag, save.commit.id)

    def _staged_before(self, frame: FrameType | None) -> BackgroundSave | None:
        """The save whose state, as it was staged, DCP has in one of these frames, in the thread that saves it."""
        if not self._to_come:
            return None
        for state in variables(frame, "state_dict", most_frames=MOST_FRAMES):
            for each in list(self._to_come):
                if each.staged is state is not None:
                    return each
        return None

    def _come(self, save: BackgroundSave) -> None:
        """It has come to this writer, or never will: its state is not kept for that."""
        with suppress(ValueError):
            self._to_come.remove(save)
        save.staged = None

    # --- one save -------------------------------------------------------------------------

    def _world_size(self) -> int:
        return 1 if self._no_dist else world_size(self._process_group)

    def _turns(self, handle: RepositoryHandle) -> Turns:
        of_branch = branch_turn(handle, self._request.branch)
        return Turns(of_branch, None if self._group is None else self._group.turn)

    def _save(self) -> _Save:
        found = self._saves.get(threading.get_ident())
        if found is None:
            raise InvalidInputError("set_up_storage_writer was not called in this thread: DCP calls it for every save")
        return found

    def _peers(self, save: _Save) -> Peers:
        """Those who take part: with collectives, a plan of one rank is dcp.save(no_dist=True)."""
        if self._world_size() == 1 or (save.collective and save.num_plans == 1):
            return SoloPeers()
        self._group = self._group or shared_group(self._process_group, self._timeout_s)
        return self._group.peers

    def _commit(self, save: _Save, plan: SavePlan, planner: SavePlanner) -> dict[str, Path]:
        peers = self._peers(save)
        with collective_errors(peers), self._place.opened() as handle:
            part = RankPart(peers.rank, peers.size, self._members, allow_pickle=self._request.allow_pickle)
            tree, paths = part.tree_of(plan, planner, save.versions)
            branch = self._request.branch
            if self._place.brought is not None and branch is not None and branch_target(handle, branch) is not None:
                handle.head = Head(branch)  # saves of this process may have led there since
            save.commit = self.commit = commit_live(handle, tree, self._request, peers=peers)
        return paths

    def _report(self, save: _Save, error: BaseException) -> None:
        """Report to the other ranks, who are in the commit, that this one will not come to it."""
        try:
            # What is raised again, and what goes wrong in reporting it, is dropped: the caller raises `error`.
            with suppress(BaseException), collective_errors(self._peers(save)):
                raise error
        finally:
            save.turns.are_over = True


def _planned(metadata: Metadata) -> list[MetadataIndex]:
    """Every item that the ranks were to write between them."""
    indices: list[MetadataIndex] = []
    for name, about in metadata.state_dict_metadata.items():
        if isinstance(about, BytesStorageMetadata):
            indices.append(MetadataIndex(name))
        else:
            indices.extend(MetadataIndex(name, chunk.offsets) for chunk in about.chunks)
    return indices


# --- errors that DCP's protocol alone would let the other ranks wait for ----------------------
# DCP calls planners and writers on each rank and then gathers, over its own process group, what came of it. While
# the ranks commit together over ours, that leaves two gaps, and DCP offers no hook for either:
#
# - A planner that raises in `finish_plan` keeps its rank from ever coming to our commit. `watch_finish_plan` reports it
#   to the others, who are in it already.
# - After a rank has died, the others would go on to DCP's gather, which waits for the dead one until the timeout of the
#   process group (30 minutes unless said otherwise). `RankLost` ends the save instead.


class RankLost(PeerError):
    """A `PeerError` about a rank that is dead, as a writer raises it inside dcp.save.

    DCP takes whatever a writer raises, pickles it, and gathers it with what the other ranks have. Pickling this error
    raises it again: out of dcp.save, on every rank that is left, before anybody waits for the dead one.
    """

    def __reduce__(self) -> NoReturn:
        raise PeerError(str(self), self.ranks)


class _Watched:
    """Takes the place of the `finish_plan` of one planner during one save."""

    def __init__(self, planner: SavePlanner, writer: object, report: Callable[[BaseException], None]) -> None:
        before: Any = vars(planner).get("finish_plan")
        self._before: Any = before._before if isinstance(before, _Watched) else before
        self._planner = planner
        self._writer = writer
        self._report = report

    def __call__(self, new_plan: SavePlan) -> Any:
        is_ours = _local(sys._getframe(1), "storage_writer") is self._writer
        self._unwatch()
        try:
            return self._planner.finish_plan(new_plan)
        except BaseException as error:
            if is_ours:  # not a later save of this planner, with another writer
                self._report(error)
            raise

    def _unwatch(self) -> None:
        if self._before is None:
            vars(self._planner).pop("finish_plan", None)
        else:
            vars(self._planner)["finish_plan"] = self._before


def watch_finish_plan(writer: object, report: Callable[[BaseException], None]) -> None:
    """Have `report` called with what the planner of this save raises in `finish_plan`; for `set_up_storage_writer`.

    The planner is found in the frames of DCP, which gives it to writers only when the plan is final. Where it is not
    there (another version of torch), nothing is watched, and the others wait until their timeout.
    """
    planner = _local(sys._getframe(2), "planner")
    if isinstance(planner, SavePlanner) and hasattr(planner, "__dict__"):
        vars(planner)["finish_plan"] = _Watched(planner, writer, report)


def _log_failure(step: int | None, future: Any) -> None:
    """Say what a save in the background failed of: its future alone knows, and may never be asked."""
    try:
        future.result()
    except BaseException as error:  # noqa: BLE001 - it is the future that raises it
        of_step = "" if step is None else f" of step {step}"
        text = error_text(error)  # not with its traceback, which is that of DCP's thread
        _LOGGER.error("the save%s that dcp.async_save began failed: %s", of_step, text)  # noqa: TRY400


def _local(frame: FrameType | None, name: str) -> Any:
    """The variable of this name in a frame or in one of those that called it."""
    return next(variables(frame, name, most_frames=_MOST_FRAMES), None)
