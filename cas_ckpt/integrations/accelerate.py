"""Accelerate: a loop of one's own saves and resumes by commits, and `save_state` without weights in its folder.

    checkpoints = CasCheckpoints(accelerator, "runs/ckpts", model=model, optimizer=optimizer)  # after prepare
    step = checkpoints.resume()
    for batch in checkpoints.batches(loader, epoch): ...
        checkpoints.save(step)

What it commits is `state`: what `prepare` gave, unwrapped; the gradient scaler, random states by rank, and how many
micro-batches were accumulated. It goes for one process, data parallel ranks and FSDP.

`commit_saves` is for programs that call `save_state` and `load_state`: weights become a commit and leave the folder.
Accelerate has no public hook for the rest: optimizers, schedulers and random states stay in its folder, pickled.

Invariant: weights leave a save only if the commit that has them is durable. Must not know Accelerate's private names.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import SeedableRandomSampler, get_sampler
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader, RandomSampler

from cas_ckpt import CommitInfo, InvalidInputError, PerRank, Repository, RNGState, StorageError
from cas_ckpt.arguments import OnSaveError
from cas_ckpt.integrations.ranks import Ranks
from cas_ckpt.integrations.saves import Saves

_LOGGER = logging.getLogger("cas_ckpt")

POINTER = "cas_ckpt.json"
"""A file in Accelerate's folder: which commit has the weights."""

LENGTH = "epoch_steps"
"""In the `meta` of each commit: how many steps an epoch had, so that another batch size is noticed."""


def state(accelerator: Accelerator, **objects: Any) -> dict[str, Any]:
    """What to commit of a training, and to check out into, by name; after `accelerator.prepare`.

    A checkout restores random states last. A data loader that is advanced to its place afterwards draws numbers:
    restore them again after that, as docs/integrations.md shows.

    Args:
        accelerator: Its gradient scaler and its count of accumulated micro-batches are added, and random states.
        objects: What `prepare` returned, by names of yours: models, optimizers, schedulers, data loaders that have a
            state (`use_stateful_dataloader`); and anything else that a commit takes.
    Raises:
        InvalidInputError: a data loader without a state, or a name that is taken.
    """
    own: dict[str, Any] = {"accelerator": _Progress(accelerator), "rng": RNGState()}
    if accelerator.scaler is not None:
        own["scaler"] = accelerator.scaler
    taken = own.keys() & objects.keys()
    if taken:
        raise InvalidInputError(f"state adds {sorted(taken)} itself: call yours another name")
    return {**{name: _unwrapped(name, each) for name, each in objects.items()}, **own}


class _Progress:
    """The one number that an Accelerator counts for itself."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        if not self._accelerator.sync_gradients:
            raise InvalidInputError(
                "gradients are being accumulated, and no commit holds them: commit where accelerator.sync_gradients"
            )
        return {"step": self._accelerator.step}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self._accelerator.step = state_dict["step"]


def _unwrapped(name: str, value: Any) -> Any:
    if isinstance(value, AcceleratedOptimizer):
        return value.optimizer
    if isinstance(value, AcceleratedScheduler):
        return value.scheduler
    if isinstance(value, DataLoader) or hasattr(value, "base_dataloader"):
        if not getattr(value, "use_stateful_dataloader", hasattr(value, "state_dict")):
            raise InvalidInputError(
                f"{name} is a data loader without a state: give DataLoaderConfiguration(use_stateful_dataloader=True) "
                "to the Accelerator, or leave it out and use skip_first_batches"
            )
        return PerRank(value)
    return value


class _Saves(Saves):
    """Where saves go, and what became of the last one."""

    def __init__(
        self, repository: Repository | str | os.PathLike[str], branch: str | None, on_save_error: OnSaveError
    ) -> None:
        self._on_error(on_save_error)
        if not isinstance(repository, Repository):
            repository = Repository.open(repository, create=True)
        self.repository = repository
        self._branch = branch or self.repository.default_branch

    def _saved(self, save: Callable[[], object], otherwise: str) -> bool:
        """Whether `save` succeeded; if it fails, `otherwise` is logged, unless it is to end the training."""
        self.last_error = None
        try:
            save()
        except Exception as error:  # noqa: BLE001
            self._failed(error, otherwise)
        return self.last_error is None


class CasCheckpoints(_Saves):
    """Commits a loop over Accelerate, and resumes it. On many ranks all of them make it, and call its methods.

    Attributes:
        repository: Open; give it options of yours by giving it open.
        last_commit: The commit of the last save that succeeded, or None.
        last_error: What the last save failed of; None if it did not.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        repository: Repository | str | os.PathLike[str],
        *,
        branch: str | None = None,
        on_save_error: OnSaveError = "warn",
        **objects: Any,
    ) -> None:
        """After `accelerator.prepare`. Nothing is restored yet.

        Args:
            repository: A path, a URL or an open repository.
            branch: Where commits go, and where it is resumed from; None: the default branch.
            on_save_error: "warn": what a commit fails of is logged as an error, and the training goes on. "raise": it
                ends the training.
            objects: As for `state`.
        Raises:
            InvalidInputError: as `state`.
        """
        self._state = state(accelerator, **objects)
        super().__init__(repository, branch, on_save_error)
        self._resumed: CommitInfo | None = None
        self._length: int | None = None

    def resume(self) -> int:
        """Restore the newest commit of the branch; the step that was saved. 0 if there is none: nothing was touched."""
        self._resumed = Ranks().from_first(lambda: self.repository.latest(self._branch))
        if self._resumed is None:
            return 0
        self.repository.checkout(self._resumed, into=self._state)
        return self._resumed.step or 0

    def batches(self, loader: Any, epoch: int) -> Iterator[Any]:
        """The batches of an epoch: all of them, or, of the one that was resumed, those that the state has not had.

        What a loader does on the way to its place draws random numbers: they are restored again after that.

        Args:
            loader: As `prepare` returned it, not part of the state.
            epoch: From 0; each has `len(loader)` steps.
        Raises:
            InvalidInputError: the loader has no length.
        """
        step = 0 if self._resumed is None else self._resumed.step or 0
        try:
            length = self._length = len(loader)
        except TypeError as error:
            raise InvalidInputError(
                "the dataset of this loader has no length: loop over the loader itself, with use_stateful_dataloader "
                "as part of the state, so that it goes on where it was"
            ) from error
        skipped = step % length if epoch == step // length else 0
        if self._resumed is not None and epoch == step // length:
            self._check_order(self._resumed, loader, length, is_inside=skipped > 0)
        rest = skip_first_batches(loader, skipped) if skipped else loader
        rest.set_epoch(epoch)
        for number, batch in enumerate(rest):
            if skipped and number == 0 and self._resumed is not None:
                self.repository.checkout(self._resumed, into={"rng": RNGState()}, keys="rng")
            yield batch

    def save(self, step: int) -> CommitInfo | None:
        """Commit the state; None: it failed, which was logged.

        Args:
            step: How many batches the training has had.
        """

        def commit() -> None:
            length = Ranks().from_first(lambda: self._length)
            options = Ranks().on_top(self.repository, self._branch)
            self.last_commit = self.repository.commit(
                self._state, step=step, branch=self._branch, frozen="requires_grad",
                meta=None if length is None else {LENGTH: length}, options=options,
            )  # fmt: skip

        return self.last_commit if self._saved(commit, f"step {step} was not committed") else None

    @staticmethod
    def _check_order(resumed: CommitInfo, loader: Any, length: int, *, is_inside: bool) -> None:
        """Warn where the batches are not those that an uninterrupted training would have had next."""
        before = resumed.meta.get(LENGTH, length) if isinstance(resumed.meta, dict) else length
        if before != length:
            _LOGGER.warning(
                "an epoch has %d steps, and had %s when step %s was saved (another batch size, number of ranks or "
                "dataset): some samples are left out or come twice; cas_ckpt.integrations.data.ElasticLoader counts "
                "samples instead", length, before, resumed.step,
            )  # fmt: skip
        sampler = get_sampler(loader)
        if is_inside and isinstance(sampler, RandomSampler) and not isinstance(sampler, SeedableRandomSampler):
            _LOGGER.warning(
                "the order of this epoch is drawn anew: some samples are left out, others come twice; give "
                "DataLoaderConfiguration(use_seedable_sampler=True) to the Accelerator"
            )


class SaveHooks(_Saves):
    """What `commit_saves` has registered.

    Attributes:
        repository: Where commits go.
        last_commit: The commit of the last save that succeeded, or None.
        last_error: What the last save failed of; None if it did not.
    """

    def __init__(
        self, accelerator: Accelerator, repository: Repository | str | os.PathLike[str], branch: str | None,
        on_save_error: OnSaveError,
    ) -> None:  # fmt: skip
        """Register both hooks."""
        super().__init__(repository, branch, on_save_error)
        self._accelerator = accelerator
        self._handles = [
            accelerator.register_save_state_pre_hook(self._save),
            accelerator.register_load_state_pre_hook(self._load),
        ]

    def remove(self) -> None:
        """Let Accelerate save and load weights itself again."""
        for handle in self._handles:
            handle.remove()

    def _save(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        def commit() -> None:
            self.last_commit = self.repository.commit(
                _named(models), message=os.path.basename(output_dir), branch=self._branch, frozen="requires_grad",
                options=Ranks().on_top(self.repository, self._branch),
            )  # fmt: skip
            found = {"repository": self.repository.url, "commit": self.last_commit.id, "branch": self._branch}
            Ranks().gather(lambda: self._point(Path(output_dir), found))

        if self._saved(commit, f"weights were not committed, they stay in {output_dir}"):
            weights.clear()

    def _point(self, folder: Path, found: dict[str, str]) -> None:
        """Let the folder name the commit; weights of an earlier save into it go, as Accelerate would replace them."""
        if not self._accelerator.is_local_main_process:
            return
        try:
            (folder / POINTER).write_text(json.dumps(found), encoding="utf-8")
            for path in _weights_in(folder):
                path.unlink()
        except OSError as error:
            raise StorageError(f"{folder} cannot name its commit: {error}") from error

    def _load(self, models: list[Any], input_dir: str) -> None:
        commit, branch = Ranks().from_first(lambda: self._pointed(Path(input_dir)))
        if commit is not None:
            self.repository.checkout(commit, into=_named(models))
            models.clear()
            self._branch = branch

    def _pointed(self, folder: Path) -> tuple[str | None, str]:
        """The commit that a folder names, and where what follows goes; None: it holds weights itself."""
        pointer = folder / POINTER
        if not pointer.exists() or any(_weights_in(folder)):  # which Accelerate wrote after the pointer
            return None, self._branch
        try:
            found = json.loads(pointer.read_text(encoding="utf-8"))
            commit, branch = str(found["commit"]), str(found.get("branch", self._branch))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInputError(f"{pointer} cannot be read: {error}") from error
        newest = self.repository.latest(branch)
        if newest is not None and newest.id == commit:
            return commit, branch
        # An earlier save: what follows is another line of history, on a branch that is free.
        taken, name, number = set(self.repository.branches()), f"{branch}-{commit[:8]}", 2
        while name in taken:
            name, number = f"{branch}-{commit[:8]}-{number}", number + 1
        return commit, name


def commit_saves(
    accelerator: Accelerator,
    repository: Repository | str | os.PathLike[str],
    *,
    branch: str | None = None,
    on_save_error: OnSaveError = "warn",
) -> SaveHooks:
    """From now on `save_state` commits weights and does not write them; `load_state` checks them out.

    On many ranks all call it. Folders that Accelerate wrote without it are loaded as ever.

    Args:
        accelerator: Whose saves.
        repository: A path, a URL or an open repository.
        branch: Where commits go; None: the default branch. After `load_state` of an earlier save they go to a branch
            of their own, which is called after that one.
        on_save_error: "warn": what a commit fails of is logged as an error, and Accelerate writes the weights itself.
            "raise": it ends the training.
    Raises:
        InvalidInputError: Accelerate saves models by other ways here (FSDP, DeepSpeed): commit `state` instead.
    """
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise InvalidInputError(f"save_state of {kind.value} gives weights to no hook: commit state(...) instead")
    return SaveHooks(accelerator, repository, branch, on_save_error)


def _weights_in(folder: Path) -> list[Path]:
    """Files of weights, by the names that `save_state` gives them."""
    names = ("model.safetensors", "model[-_][0-9]*.safetensors", "pytorch_model.bin", "pytorch_model[-_][0-9]*.bin")
    indexes = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
    return [path for name in (*names, *indexes) for path in folder.glob(name)]


def _named(models: list[Any]) -> dict[str, Any]:
    return {"model" if number == 0 else f"model_{number}": each for number, each in enumerate(models)}
