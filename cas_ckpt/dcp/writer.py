"""`CasStorageWriter`: torch.distributed.checkpoint saves into a repository.

How a save goes (DCP calls, on all ranks unless said otherwise):

0. `stage` (async_save without a stager, in the caller's thread): waits for the saves before it and for the pending
   commits of an open repository, and copies the state into memory of this save.
1. `storage_meta`: a save that was not staged waits likewise. `set_up_storage_writer`: the repository is looked at.
2. `prepare_local_plan`, and on the coordinator `prepare_global_plan`: plans pass unchanged;
   a plan for other ranks than the writer's is refused before anything is written.
3. `write_data`: this rank's tree is made (dcp/tree.py) and committed together with the others.
4. `finish` on the coordinator: results are held against the plan, `metadata` is filled in.

How a state is copied: `stage_state` takes one arena for all storages of the state's tensors. torch's own stager copies
the structure; the storages it copies go into the arena, and what it finds besides (tensors inside of objects) gets new
memory. When the last tensor over an arena is gone, the next call takes it back, warm.

Invariant: the commit is published inside step 3, by the collective commit, which succeeds on
all ranks or raises on all. It needs no `finish` to be whole: DCP calls that on one rank only,
skips it if any rank failed, and by then no rank may have failed that the commit does not know
of. What a save leaves in plans (which DCP caches and hands to later saves) is nothing. Memory that a save, a planner
or a failed save's error still refers to is never written again: two copies that overlap in time keep their own values,
however long DCP holds them.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from cas_ckpt.arguments import OnConflict, OnDivergence, ReplicaCheck
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.host_cache import AUTO
from cas_ckpt.core.publish import branch_target, check_meaning
from cas_ckpt.core.records import CommitInfo, Lineage
from cas_ckpt.core.refs import Head, RefKind, check_new_name
from cas_ckpt.dcp.group import (
    RepositoryPlace,
    Save,
    SharedGroup,
    Turn,
    branch_turn,
    members_of,
    shared_group,
    wait_for_saves,
    world_size,
)
from cas_ckpt.dcp.names import module_states
from cas_ckpt.dcp.tree import tree_of
from cas_ckpt.errors import ConflictError, InvalidInputError, MismatchError, translates_memory_errors
from cas_ckpt.held_signals import held_signals
from cas_ckpt.memory import aligned, current_limits, holding
from cas_ckpt.objects.state import Path, render_key
from cas_ckpt.ops.commit.commit import commit_live
from cas_ckpt.ops.commit.options import DEFAULT_AUDIT
from cas_ckpt.ops.commit.request import CommitRequest, checked_fields
from cas_ckpt.ops.refs import create_tag
from cas_ckpt.parallel.peers import Peers, SoloPeers, collective_errors, error_text
from cas_ckpt.training.capture.tensors import locals_of
from cas_ckpt.training.device.copies import pin, unpin
from cas_ckpt.training.stateful import module_versions
from cas_ckpt.training.torch_internals import stager_class
from cas_ckpt.transfer.staging import GRANULE_BYTES, Arena, StagingPool

# --- copies for async_save ---------------------------------------------------------------------

Storages: TypeAlias = dict[tuple[torch.device, int], torch.UntypedStorage]
"""By device and address."""


class _Arenas:
    """The arenas of all such copies of this process."""

    def __init__(self) -> None:
        # What is staged is the caller's, who may fork and read it there.
        self._pool = StagingPool(kept_by_children=True, prepare=pin, dismiss=unpin)
        self._lock = threading.RLock()
        self._taken_bytes = 0
        # Finalizers run wherever memory happens to be freed, also inside of the pool: they only note what is over.
        self._over: deque[Arena] = deque()

    def rooms(self, storages: Storages) -> Storages:
        """Memory for each of them, by the same keys; undefined bytes."""
        wanted = sum(aligned(storage.nbytes()) for storage in storages.values())
        if not wanted:
            return {}
        with held_signals(), self._lock:
            while self._over:
                arena = self._over.popleft()
                self._taken_bytes -= arena.num_bytes
                self._pool.give(arena)
            # As much as it takes: all of the state is copied. What is warm and free beyond that is unmapped.
            needed = -(-wanted // GRANULE_BYTES) * GRANULE_BYTES
            budget = max(self._taken_bytes + needed, self._pool.held_bytes)
            taken = self._pool.take(wanted, budget_bytes=budget)
            if taken is None:
                return {}
            self._taken_bytes += taken.num_bytes
            left = list(range(len(storages)))
            return {key: self._lent(taken, storage.nbytes(), left) for key, storage in storages.items()}

    def _lent(self, arena: Arena, num_bytes: int, left: list[int]) -> torch.UntypedStorage:
        """A storage in `arena`, which is over when all of `left` are gone."""
        _, memory = arena.room(num_bytes)
        weakref.finalize(memory, partial(self._gone, arena, left)).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def _gone(self, arena: Arena, left: list[int]) -> None:
        if left.pop() == 0:  # one step, which no other thread's comes between: the last one gets the 0
            self._over.append(arena)


_arenas = _Arenas()


def stage_state(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of `state` on the host: the same structure, other memory; what shared a storage shares one.

    Raises:
        UnsupportedVersionError: this version of torch has no stager.
    """
    storages: Storages = {}
    for tensor in _tensors_in(state):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.device, storage.data_ptr()] = storage
    rooms = _arenas.rooms(storages)

    def room_for(storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        room = rooms.get((storage.device, storage.data_ptr()))
        return room if room is not None and room.nbytes() == storage.nbytes() else None

    copier = stager_class()(room_for)
    try:
        staged: dict[str, Any] = copier.stage(state)
    finally:
        copier.close()
    return staged


def _tensors_in(value: Any, inside: frozenset[int] = frozenset()) -> Iterator[torch.Tensor]:
    """Strided tensors with memory, in dicts, lists and tuples; of divided ones the local parts."""
    if isinstance(value, torch.Tensor):
        yield from locals_of(value)
    elif isinstance(value, (dict, list, tuple)) and id(value) not in inside:
        for child in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(child, inside | {id(value)})


# --- saves --------------------------------------------------------------------------------------

_LOGGER = logging.getLogger("cas_ckpt")

DEFAULT_TIMEOUT_S = 300.0
"""How long a rank waits for the others."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """The place of an item of a plan: `storage_data` of DCP's results and metadata.

    Attributes:
        commit: Id of the commit.
        key: Of the entry, as `cas-ckpt ls` shows it.
    """

    commit: str
    key: str


class _Here(threading.local):
    """The saves of one thread.

    Attributes:
        given: The `checkpoint_id` that DCP was given for the save that begins next.
        save: The one that has begun.
        staged: The one that was staged, until DCP's executor has it.
    """

    given: str | None = None
    save: Save | None = None
    staged: Save | None = None


class CasStorageWriter(StorageWriter, AsyncStager):
    """Commits what `dcp.save` and `dcp.async_save` are given; one commit per save.

        dcp.save(state, storage_writer=CasStorageWriter("runs/ckpts", branch="main", step=100))

    Make it on every rank that saves, after `init_process_group`, all in the same order: the
    first writer over a process group makes a gloo group over it, which is collective. A writer
    may save many times, always under the same message and step, or be made anew for each save,
    which costs nothing more. To one branch, and over one process group, a process saves once at a
    time: a save waits for those that `dcp.async_save` began before it, through whatever writer they go. One that
    it cannot know of (begun with another stager, or by another thread) raises `ConflictError`. Threads that save at
    the same time need writers of their own.

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
        lineage: Sequence[Lineage] = (),
        process_group: Any = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        no_dist: bool = False,
        index_url: str | None = None,
        cache: str | PathLike[str] | None = AUTO,
        on_conflict: OnConflict = "retry",
        allow_pickle: bool = False,
        on_divergence: OnDivergence = "raise",
        replica_check: ReplicaCheck = "checksum",
        replica_audit: float = DEFAULT_AUDIT,
    ) -> None:
        """Nothing is opened yet.

        Args:
            repository: A path, a URL, or an open `Repository`.
            branch, create, orphan, message, step, metrics, author, meta, lineage, on_conflict, allow_pickle: As for
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
            metrics={} if metrics is None else metrics, meta=meta, lineage=lineage,
            on_conflict=on_conflict, allow_pickle=allow_pickle,
            on_divergence=on_divergence, replica_check=replica_check, replica_audit=replica_audit, verb="dcp.save",
        )  # fmt: skip
        self._limits = current_limits()
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._no_dist = no_dist
        self._own_tag: str | None = None
        self._tag_of: Callable[[str | PathLike[str]], str] = str
        self._members = None if no_dist else members_of(process_group)
        self._begin_empty()
        if self._world_size() > 1:
            self._group = shared_group(process_group, timeout_s)
        checked_fields(self._request)  # after the group: its other ranks would wait for this one

    def _begin_empty(self) -> None:
        self.commit = None
        self._group = None
        self._here = _Here()
        self._staged: Save | None = None
        self._versions: Mapping[Path, Mapping[str, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Process executors send the writer to a process whose default group is ours over again.
        save = self._coming()
        self._staged = None if save is not None else self._staged
        kept = ("_place", "_request", "_limits", "_timeout_s", "_no_dist", "_own_tag", "_tag_of", "_members")
        versions = self._versions if save is None else save.versions
        return {name: getattr(self, name) for name in kept} | {"_process_group": None, "_versions": versions}

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
        self._coming()
        self._here.given = None if checkpoint_id is None else self._tag_of(checkpoint_id)

    def _name_tags(self, tag_of: Callable[[str | PathLike[str]], str], own: str | PathLike[str]) -> None:
        """Let a `checkpoint_id` mean the tag that `tag_of` gives for it, and a save that has none that of `own`."""
        self._tag_of, self._own_tag = tag_of, tag_of(own)

    @property
    def checkpoint_id(self) -> str:
        """The tag of the commit, else the URL of the repository; DCP writes it into its log."""
        save = self._here.save
        return self._here.given or (save and save.tag) or self._own_tag or self._place.url

    @translates_memory_errors
    def storage_meta(self) -> StorageMeta | None:
        """Begin a save, as DCP asks for this first of all; the tag or URL, the id of the commit not being known yet.

        It asks before it gives the state to the planner, which an earlier save may still use: that is waited for here,
        but by a save that was staged, for `stage` has waited, and what was begun since comes behind it.
        """
        here, save = self._here, self._coming()
        if save is None:
            self._wait_for_earlier()
            save = Save(self._versions)
        else:
            self._staged = None
        here.save, save.tag, here.given = save, here.given or self._own_tag, None
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @translates_memory_errors
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Begin a save in the background: a copy of `state_dict` on the host, which belongs to this save alone.

        Waits for the saves before it to the same branch, or over the same process group.
        """
        self._wait_for_earlier()
        states = module_states(state_dict)
        versions = {path: found for path, state in states if (found := module_versions(state)) is not None}
        staged = stage_state(state_dict)
        self._here.given = None  # of an older DCP, which says it here as well as in the thread that saves
        self._here.staged = self._staged = Save(versions, frozenset(threading.enumerate()), self._timeout_s)
        return staged

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` has copied everything. DCP calls it when its executor has the save."""
        save, self._here.staged = self._here.staged, None
        if save is not None:
            self._place.note(save)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Always: not to wait, but since a save goes on by itself from then on."""
        return True

    def close(self) -> None:
        """Nothing is kept from a save to the next one."""

    @translates_memory_errors
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save on this rank.

        Raises:
            ConflictError: the tag exists. NoRepositoryError.
        """
        save = self._save()
        save.coordinates, save.collective = is_coordinator, bool(kwargs.get("use_collectives", True))
        with self._place.opened() as handle:
            handle.require_writable()
            if save.tag is not None and check_new_name(save.tag) in {ref.name for ref in handle.refs.list(RefKind.TAG)}:
                raise ConflictError(f"checkpoint_id {save.tag!r} is a tag already: nothing is overwritten")
            if save.tag is not None:
                check_meaning(handle, RefKind.TAG, save.tag)
            save.turns = self._turns(handle)

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
            for turn in save.turns:
                turn.take(save)
            paths = self._commit(save, plan, planner)
        except Exception as error:
            if save.before:  # its future alone raises it, and may never be asked
                step = self._request.step
                of_step = "" if step is None else f" of step {step}"
                text = error_text(error)  # not with its traceback, which is that of DCP's thread
                _LOGGER.error("the save%s that dcp.async_save began failed: %s", of_step, text)  # noqa: TRY400
            raise
        finally:
            save.is_over = True
            if save.collective and not save.coordinates:  # no more calls come
                self._here.save = None
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
        save, self._here.save = self._save(), None
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

    # --- one save -------------------------------------------------------------------------

    def _world_size(self) -> int:
        return 1 if self._no_dist else world_size(self._process_group)

    def _turns(self, handle: RepositoryHandle) -> tuple[Turn, ...]:
        of_branch = branch_turn(handle, self._request.branch)
        return (of_branch,) if self._group is None else (self._group.turn, of_branch)

    def _wait_for_earlier(self) -> None:
        self._place.begin()
        with ExitStack() as opened:
            wait_for_saves(lambda: self._turns(opened.enter_context(self._place.opened())))

    def _coming(self) -> Save | None:
        """The save that was staged, if this is the thread that DCP has started for it, which is noted."""
        save = self._staged
        if save is None or threading.current_thread() in save.before:
            return None
        save.come()
        return save

    def _save(self) -> Save:
        if self._here.save is None:
            raise InvalidInputError("storage_meta was not called in this thread: DCP calls it first in every save")
        return self._here.save

    def _peers(self, save: Save) -> Peers:
        """Those who take part: with collectives, a plan of one rank is dcp.save(no_dist=True)."""
        if self._world_size() == 1 or (save.collective and save.num_plans == 1):
            return SoloPeers()
        self._group = self._group or shared_group(self._process_group, self._timeout_s)
        return self._group.peers

    def _commit(self, save: Save, plan: SavePlan, planner: SavePlanner) -> dict[str, Path]:
        peers = self._peers(save)
        with collective_errors(peers), self._place.opened() as handle:
            tree, paths = tree_of(
                plan, planner, save.versions, rank=peers.rank, world_size=peers.size, members=self._members,
                allow_pickle=self._request.allow_pickle,
            )  # fmt: skip
            branch = self._request.branch
            if self._place.brought is not None and branch is not None and branch_target(handle, branch) is not None:
                handle.head = Head(branch)  # saves of this process may have led there since
            with holding(self._limits):  # an executor of DCP may run this in another thread, or in another process
                save.commit = self.commit = commit_live(handle, tree, self._request, peers=peers)
        return paths


def _planned(metadata: Metadata) -> list[MetadataIndex]:
    """Every item that the ranks were to write between them."""
    indices: list[MetadataIndex] = []
    for name, about in metadata.state_dict_metadata.items():
        if isinstance(about, BytesStorageMetadata):
            indices.append(MetadataIndex(name))
        else:
            indices.extend(MetadataIndex(name, chunk.offsets) for chunk in about.chunks)
    return indices
