"""`CasStrategy`: what megatron.core.dist_checkpointing saves becomes commits, and its folders name them.

    strategy = CasStrategy("runs/ckpts")
    dist_checkpointing.save(state, "iter_0000100", sharded_strategy=strategy)
    state = dist_checkpointing.load(state, "iter_0000100")

A save goes, on all ranks,

    1. Megatron writes `common.pt`, what is equal on all ranks; rank 0 reads it again, as Megatron itself would.
    2. The main replica of each ShardedTensor and ShardedObject, and on rank 0 the common state, are committed together.
    3. Rank 0 writes the id of the commit into `cas_ckpt.json` and removes `common.pt`; Megatron writes `metadata.json`.

A load reads the commit that the folder names: every rank the boxes that it wants, in place, verified before.

A tensor is called by the `key` of its ShardedTensor, an object by its `unique_key`, the common state `common`, as an
import of Megatron's own folder calls them. How many ranks there were is nowhere in that.

Invariant: a folder names a commit that is whole; a save that fails lets it name the one before. Must not know private
names of Megatron, nor where bytes are stored.
"""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies import async_utils, base, checkpointable, common
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from cas_ckpt import CkptError, CommitInfo, Repository
from cas_ckpt.arguments import OnSaveError
from cas_ckpt.dcp import CasStorageReader, CasStorageWriter
from cas_ckpt.errors import InvalidInputError, MismatchError, NotFoundError, PeerError, UnsupportedValueError
from cas_ckpt.formats.folders import OutputFiles
from cas_ckpt.formats.pickles import restored, storable
from cas_ckpt.integrations.ranks import Ranks
from cas_ckpt.integrations.saves import Saves

_LOGGER = logging.getLogger("cas_ckpt")

BACKEND, VERSION = "cas_ckpt", 1
"""In `metadata.json` of a folder: who reads it."""

POINTER = "cas_ckpt.json"
"""The file of a folder that names the commit."""

COMMON = "common"
"""Key of what Megatron keeps in `common.pt`."""

_AS_IT_IS = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


class CasStrategy(Saves, base.AsyncSaveShardedStrategy, base.LoadShardedStrategy):
    """Saves to a repository and loads from it; all ranks make one, and call each method together.

    From then on Megatron loads every folder that names a commit from `repository`, without being told a strategy.

    Attributes:
        repository: The repository, open.
        last_commit: The commit of the last save or load that succeeded, or None.
        last_error: What the last save failed of; None if it did not.
    """

    def __init__(
        self,
        repository: Repository | str | os.PathLike[str],
        *,
        branch: str | None = None,
        on_save_error: OnSaveError = "warn",
    ) -> None:
        """Open the repository, or make it, and tell Megatron who loads its folders.

        Args:
            repository: A path, a URL or an open repository; all ranks must see it.
            branch: Where commits go; None: the default branch.
            on_save_error: "warn": what a save fails of is logged as an error, and the folder names the commit before.
                "raise": it is raised, of a save in the background when that is finalized.
        Raises:
            InvalidInputError: another word for `on_save_error`.
            CkptError: it cannot be opened; see `Repository.open`.
        """
        super().__init__(BACKEND, VERSION)
        self._on_error(on_save_error)
        self.repository = repository if isinstance(repository, Repository) else Repository.open(repository, create=True)
        self._branch = branch or self.repository.default_branch
        self._pending: Any = None
        self._left: str | None = None
        self._ranks = Ranks(dist.new_group(backend="gloo"))  # beside the collectives of the training
        for action in (base.StrategyAction.SAVE_SHARDED, base.StrategyAction.LOAD_SHARDED):
            base.register_default_strategy(action, BACKEND, VERSION, self)
        base.register_default_strategy(base.StrategyAction.LOAD_COMMON, "torch", 1, _CommonState(self.repository))

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Always: they are committed beside the tensors."""
        return True

    # ------------------------------------------------------------ saving

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Commit, and let the folder name the commit; collective.

        Raises:
            CkptError: it cannot be committed, and `on_save_error` is "raise".
        """
        with self._saving(Path(checkpoint_dir)) as folder:
            state, writer = self._begun(sharded_state_dict, folder)
            save(state, storage_writer=writer, planner=DefaultSavePlanner(**_AS_IT_IS), process_group=self._ranks.pg)
            self._made(writer, folder)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> async_utils.AsyncRequest:
        """Begin a commit in the background, and return when the state is copied; collective.

        The request has nothing to be run by another process (none is forked beside a thread that commits): what is
        called at the end, on all ranks, waits for the commit and lets the folder name it.

        Raises:
            CkptError: it cannot be begun, and `on_save_error` is "raise".
        """
        with self._saving(Path(checkpoint_dir)) as folder:
            state, writer = self._begun(sharded_state_dict, folder, copied=True)
            future: Any = async_save(
                state, storage_writer=writer, planner=DefaultSavePlanner(**_AS_IT_IS), process_group=self._ranks.pg,
                async_stager=_Copied(),
            )  # fmt: skip
            self._pending = future
            return async_utils.AsyncRequest(None, (), [partial(self._finalize, future, writer, folder)])
        return async_utils.AsyncRequest(None, (), [])  # the save failed, and was told of

    def _finalize(self, pending: Any, writer: CasStorageWriter, folder: Path) -> None:
        with self._saving(folder):
            pending.result()
            self._made(writer, folder)

    def _begun(self, sharded: Any, folder: Path, *, copied: bool = False) -> tuple[dict[str, Any], CasStorageWriter]:
        """What this rank commits, and the writer that does; as `copied`, it may change meanwhile."""
        if self._pending is not None:
            self._pending.exception()  # when it has ended, however it did
        state: dict[str, Any] = {}

        def collect() -> int | None:
            for key, parts in _by_key(sharded).items():
                main = [part for part in parts if is_main_replica(part.replica_id)]
                if main and isinstance(main[0], ShardedTensor):
                    state[key] = _as_tensor([_held(part, copied=copied) for part in main])
                elif main:  # in a list: so a tensor is an object, as Megatron means it
                    values = storable([part.data for part in main])
                    state[key] = copy.deepcopy(values) if copied else values
            if self._ranks.rank != 0:
                return None
            try:
                shared = storable(common.TorchCommonLoadStrategy().load_common(folder))
            except Exception as error:
                raise UnsupportedValueError(
                    f"{folder}: Megatron cannot load the common state again, call its register_safe_globals(), or keep "
                    f"to plain values: {error}"
                ) from error
            if state.setdefault(COMMON, shared) is not shared:
                raise InvalidInputError(f"a ShardedTensor or ShardedObject has the key {COMMON!r}: give it another")
            return shared["iteration"] if type(shared.get("iteration")) is int else None

        step = self._ranks.gather(collect)[0]
        return state, CasStorageWriter(
            self.repository, branch=self._branch, create=True, orphan=self.last_commit is None, message=folder.name,
            step=step, process_group=self._ranks.pg,
            lineage=self._ranks.on_top(self.repository, self._branch, self._left).lineage,
        )  # fmt: skip

    def _made(self, writer: CasStorageWriter, folder: Path) -> None:
        self._ranks.from_first(partial(_write_pointer, folder, writer.commit))
        self.last_commit, self.last_error, self._left = writer.commit, None, None

    @contextmanager
    def _saving(self, folder: Path) -> Iterator[Path]:
        """Raise what the block fails of, or log it and let the folder name the commit before."""
        try:
            with self._own_error():
                yield folder
        except Exception as error:  # noqa: BLE001
            self._failed(error, f"a save failed, {folder} names the commit before it")
            with suppress(CkptError):
                self._ranks.from_first(partial(_write_pointer, folder, self.last_commit, str(error)))

    # ------------------------------------------------------------ loading

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """The state with what was saved in place of each ShardedTensor and ShardedObject; collective.

        Tensors that there are already are filled in place.

        Raises:
            NotFoundError: the folder names no commit, or the commit lacks a key.
            MismatchError: another shape or dtype. CorruptionError: nothing was touched.
        """
        if self._pending is not None:
            self._pending.exception()  # when it has ended, however it did
        commit = self._ranks.from_first(lambda: _named(Path(checkpoint_dir)))
        reader = CasStorageReader(self.repository, ref=commit, flatten=False)
        state: dict[str, Any] = {}

        def prepare() -> None:
            stored = reader.read_metadata().state_dict_metadata
            for key, parts in _by_key(sharded_state_dict).items():
                about, is_tensor = stored.get(key), isinstance(parts[0], ShardedTensor)
                if about is None or isinstance(about, TensorStorageMetadata) != is_tensor:
                    raise NotFoundError(f"{key}: the commit {commit} has no such {'tensor' if is_tensor else 'object'}")
                if isinstance(about, TensorStorageMetadata):
                    held = [each for part in parts for each in _to_fill(part, tuple(about.size))]
                    state.update({key: _as_tensor(held)} if held else {})
                else:
                    state[key] = [part.data for part in parts]

        self._ranks.gather(prepare)
        with self._own_error():
            load(state, storage_reader=reader, planner=DefaultLoadPlanner(**_AS_IT_IS), process_group=self._ranks.pg)
        self.last_commit = self.repository.log(commit, limit=1)[0]
        self._left = commit
        return dict_list_map_inplace(
            lambda part: part.data if isinstance(part, ShardedTensor) else restored(state[part.unique_key][0]),
            sharded_state_dict,
        )

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
        """A ShardedTensor without data for each tensor of the commit, by key."""
        found = self.load_sharded_metadata(checkpoint_dir)
        return {key: each for key, each in found.items() if isinstance(each, ShardedTensor)}

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, ShardedTensor | ShardedObject]:
        """A ShardedTensor or ShardedObject without data for each in the commit, by key."""
        reader = CasStorageReader(self.repository, ref=_named(Path(checkpoint_dir)), flatten=False)
        found: dict[str, ShardedTensor | ShardedObject] = {}
        for key, about in reader.read_metadata().state_dict_metadata.items():
            if isinstance(about, TensorStorageMetadata):
                empty = torch.empty(about.size, dtype=about.properties.dtype, device="meta")
                found[key] = ShardedTensor.from_rank_offsets(key, empty).without_data()
            elif "/shard_" in key:  # beside them there are the common state and side files of an import
                found[key] = ShardedObject.empty_from_unique_key(key)
        return found

    def name_commit(self, checkpoint_dir: str | Path, ref: str) -> None:
        """Make a folder that Megatron loads the commit `ref` from; by one rank.

        Args:
            ref: A branch, a tag, an id, `main~2`.
        Raises:
            NotFoundError: no such commit. StorageError: the folder cannot be written.
        """
        folder = Path(checkpoint_dir)
        _write_pointer(folder, self.repository.log(ref, limit=1)[0])
        save_config(CheckpointingConfig(BACKEND, VERSION), str(folder))

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Nothing to say yet: `load` raises `NotFoundError` for a folder that names no commit."""

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Nothing to say: there is one version."""

    @contextmanager
    def _own_error(self) -> Iterator[None]:
        """Raise what this rank failed of, else a PeerError, in place of DCP's collection of both."""
        try:
            yield
        except CheckpointException as error:
            rank, (why, _) = next(iter(error.failures.items()))
            own, _ = error.failures.get(self._ranks.rank, (None, None))
            if isinstance(own, CkptError):
                raise own from error
            raise PeerError(f"rank {rank} failed: {type(why).__name__}: {why}", tuple(error.failures)) from error


class _CommonState(common.TorchCommonLoadStrategy):
    """Loads the common state of folders that name a commit; all others are Megatron's own."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        folder = Path(checkpoint_dir)
        if not (folder / POINTER).exists():
            return super().load_common(checkpoint_dir)
        return restored(self._repository.load(_named(folder), keys=COMMON)[COMMON])


# ------------------------------------------------------------ the state, as DCP sees it


def _by_key(sharded_state_dict: Any) -> dict[str, list[Any]]:
    """The ShardedTensors or ShardedObjects of each key."""
    found: dict[str, list[Any]] = {}
    for part in nested_values(sharded_state_dict):
        found.setdefault(part.key if isinstance(part, ShardedTensor) else part.unique_key, []).append(part)
    return found


def _held(shard: Any, *, copied: bool = False) -> Any:
    """`shard` with the axes that only the global tensor has."""
    data = shard.data.detach()[(None,) * shard.prepend_axis_num]
    data = data.to("cpu", copy=True) if copied else data
    return replace(shard, data=data, local_shape=tuple(data.shape), prepend_axis_num=0, axis_fragmentations=None)


def _to_fill(shard: Any, stored: tuple[int, ...]) -> Iterator[Any]:
    """What of `shard` is stored; where shapes may differ, the rest becomes 0, as Megatron has it.

    Raises:
        MismatchError: the shapes differ.
    """
    shard.init_data("cpu")
    held, wanted = _held(shard), tuple(shard.global_shape)
    if wanted != stored:
        if not shard.allow_shape_mismatch or len(wanted) != len(stored):
            raise MismatchError(f"{shard.key}: the commit has it in the shape {stored}, wanted is {wanted}")
        ends = (slice(max(0, end - start)) for start, end in zip(held.global_offset, stored, strict=True))
        data = held.data.zero_()[tuple(ends)]
        held = replace(held, data=data, local_shape=tuple(data.shape), global_shape=stored)
    if held.data.numel():
        yield held


def _as_tensor(held: list[Any]) -> Any:
    """What DCP takes for the tensor of which this rank holds these parts."""
    made = [checkpointable.CheckpointableShardedTensor.from_sh_ten(each) for each in held]
    return made[0] if len(made) == 1 else checkpointable.LocalShardsContainer(made)


class _Copied(BlockingAsyncStager):
    """For a state that is a copy already."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict


# ------------------------------------------------------------ folders


def _write_pointer(folder: Path, commit: CommitInfo | None, failed: str | None = None) -> None:
    """Let `folder` name a commit, or say that there is none, and remove what Megatron wrote of the common state."""
    content = {"commit": None if commit is None else commit.id, **({} if failed is None else {"failed": failed})}
    with OutputFiles(folder, [POINTER], force=True) as output, output.open(POINTER) as file:
        file.write(json.dumps(content, indent=1).encode())
    with suppress(OSError):
        (folder / common.COMMON_STATE_FNAME).unlink()


def _named(folder: Path) -> str:
    """The id of the commit that `folder` names.

    Raises:
        NotFoundError: it names none.
    """
    try:
        content = json.loads((folder / POINTER).read_text())
        commit, failed = content["commit"], content.get("failed")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise NotFoundError(f"{folder / POINTER} names no commit: load a folder that a CasStrategy saved") from error
    if failed is not None:
        _LOGGER.warning("%s: its save failed, it names the commit before it, %s: %s", folder, commit, failed)
    if not isinstance(commit, str):
        raise NotFoundError(f"{folder}: its save failed, and no commit came before it: {failed}")
    return commit
