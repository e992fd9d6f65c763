"""`ElasticLoader`: batches of a dataset, resumed at any step by any number of data parallel ranks.

    loader = ElasticLoader(dataset, batch_size=8, seed=1)
    state = {"model": model, "optim": optim, "loader": loader, "rng": RNGState()}

The order of an epoch follows from the seed and the number of the epoch, and the position in it is counted in samples
of all ranks. So the state is the same on every rank, and whoever resumes takes the samples that nobody has had.

Invariant: what a batch holds is counted before it is handed out, so that a commit in the body of the loop is of the
state after it. Must not know who trains.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from cas_ckpt import InvalidInputError


def _generator(*numbers: int) -> torch.Generator:
    """Random numbers that follow from `numbers`: hashed, as torch takes no more than 32 bits of a seed."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


class ElasticLoader:
    """Batches of one rank: a loop over it goes from where the state is to the end of the epoch, the next from there.

    Each sample of an epoch is handed out once over all ranks. The last batch of an epoch may be smaller; what cannot be
    divided evenly over the ranks is left out, fewer samples than there are ranks. Iterating draws no random numbers of
    the process. Ranks must iterate alike: the position is that of all of them.

    Attributes:
        epoch: The epoch that the next batch is of, from 0; once the last batch of one was handed out, the next one.
        consumed: How many of its samples all ranks together have been given.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        """Begin with the first epoch.

        Args:
            dataset: Of the kind that has a length and an index.
            batch_size: Samples of a batch of one rank.
            seed: Of the order; the same on all ranks.
            rank: Which part this process takes, of `world_size` data parallel ranks. Neither given: its rank in the
                default process group when a loop begins, 0 of 1 without one.
            options: Further arguments of `torch.utils.data.DataLoader`, such as `num_workers` and `collate_fn`.
        Raises:
            InvalidInputError: numbers that make no sense; options that would take the order out of its hands.
        """
        self._given = rank, world_size
        if batch_size < 1 or (rank is None) != (world_size is None):
            raise InvalidInputError(
                f"batch_size={batch_size}, rank={rank}, world_size={world_size}: wanted a positive batch_size, and "
                "both rank and world_size or none of them"
            )
        self._ranks()
        own = sorted({"batch_sampler", "sampler", "drop_last", "generator", "in_order"} & options.keys())
        if own:
            raise InvalidInputError(f"{', '.join(own)}: ElasticLoader orders and divides the samples itself")
        try:
            seed = operator.index(seed)
        except TypeError as error:
            raise InvalidInputError(f"seed is {seed!r}: wanted a whole number") from error
        self._dataset, self._batch_size, self._options = dataset, batch_size, options
        self._seed, self._shuffle = seed, shuffle
        self.epoch = self.consumed = 0
        self._turn = 0

    def __len__(self) -> int:
        """How many batches each rank gets in a whole epoch."""
        _, world_size = self._ranks()
        whole, rest = divmod(len(self._dataset), self._batch_size * world_size)
        return whole + (rest >= world_size)

    def __iter__(self) -> Iterator[Any]:
        """The batches of this rank up to the end of the epoch.

        Raises:
            InvalidInputError: another loop over it was begun meanwhile, or it was put elsewhere by a checkout.
        """
        self._turn = turn = self._turn + 1
        rank, world_size = self._ranks()
        begun, order = self.consumed, self._order()
        if len(order) - begun < world_size:
            self.epoch, self.consumed = self.epoch + 1, 0
            return
        mine = (step[rank::world_size] for step in self._steps(order, begun, world_size))
        # A generator of its own: what seeds the workers is no number of the process.
        seeds = _generator(self._seed, self.epoch, begun)
        batches = DataLoader(self._dataset, batch_sampler=mine, generator=seeds, **self._options)
        for step, batch in zip(self._steps(order, begun, world_size), batches, strict=True):
            if turn != self._turn:
                raise InvalidInputError(
                    "this loop over the loader goes on where it was, and the loader is elsewhere: end a loop before "
                    "another one is begun, or before a checkout into the loader"
                )
            self.consumed += len(step)
            if len(order) - self.consumed < world_size:  # trainers do not ask for a batch after the last one
                self.epoch, self.consumed = self.epoch + 1, 0
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Where it is; the same on all ranks."""
        return {
            "epoch": self.epoch, "consumed": self.consumed, "seed": self._seed, "shuffle": self._shuffle,
            "num_samples": len(self._dataset),
        }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go where it was; the seed is that of the state, and whether samples are shuffled.

        Raises:
            InvalidInputError: the state is of a dataset of another length, in which its position means other samples.
        """
        if state_dict["num_samples"] != len(self._dataset):
            raise InvalidInputError(
                f"the state is of a dataset of {state_dict['num_samples']} samples, this one has {len(self._dataset)}: "
                "resume with the dataset that was trained on, or leave the loader out of the checkout"
            )
        self.epoch, self.consumed = state_dict["epoch"], state_dict["consumed"]
        self._seed, self._shuffle = state_dict["seed"], bool(state_dict["shuffle"])
        self._turn += 1

    def _order(self) -> torch.Tensor:
        """The samples of the epoch, by their numbers."""
        count = len(self._dataset)
        if not self._shuffle:
            return torch.arange(count)
        return torch.randperm(count, generator=_generator(self._seed, self.epoch))

    def _steps(self, order: torch.Tensor, begun: int, world_size: int) -> Iterator[list[int]]:
        """The samples that all ranks together take at each step from the position `begun` on, as many for each rank."""
        for first in range(begun, len(order), self._batch_size * world_size):
            step = order[first : first + self._batch_size * world_size].tolist()
            if even := len(step) // world_size * world_size:
                yield step[:even]

    def _ranks(self) -> tuple[int, int]:
        """Which of how many ranks this is; asked late, as the process group may be made after the loader."""
        rank, world_size = self._given
        if rank is None or world_size is None:
            is_in_group = dist.is_available() and dist.is_initialized()
            return (dist.get_rank(), dist.get_world_size()) if is_in_group else (0, 1)
        if not 0 <= rank < world_size:
            raise InvalidInputError(f"rank {rank} of {world_size}: wanted a rank from 0 to below the number of ranks")
        return rank, world_size
