"""What the ranks of a job tell one another beside a commit or a checkout: what they found, and what they failed of.

Each exchange carries what a rank failed of, if it did: so every rank raises, the one that failed its own error, the
others a `PeerError` that names it. It goes over the process group of the caller, or the default one; a commit
has connections of its own.

Invariant: all ranks make the same exchanges in the same order, whatever happens on one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist

from cas_ckpt import CommitOptions, Lineage, Repository
from cas_ckpt.errors import PeerError

T = TypeVar("T")


class Ranks:
    """The ranks that save or restore together; one process alone, where there is no process group."""

    def __init__(self, pg: dist.ProcessGroup | None = None) -> None:
        """`pg` None means the default group, if there is one."""
        is_group = dist.is_available() and dist.is_initialized()
        self.pg = pg if pg is not None else (dist.group.WORLD if is_group else None)
        self.rank: int = dist.get_rank(self.pg) if self.pg is not None else 0
        self.size: int = dist.get_world_size(self.pg) if self.pg is not None else 1

    @property
    def group(self) -> dist.ProcessGroup | None:
        """As `Repository.open` takes it: None for one process alone."""
        return self.pg if self.size > 1 else None

    def gather(self, make: Callable[[], T]) -> list[T]:
        """What `make` gives on each rank, by rank.

        Raises:
            What `make` raises here. PeerError: it raised on another rank.
        """
        if self.size == 1:
            return [make()]
        error: Exception | None = None
        told: tuple[str, Any] = ("", None)
        try:
            told = ("", make())
        except Exception as raised:  # noqa: BLE001 - all ranks hear of it
            error, told = raised, (f"{type(raised).__name__}: {raised}", None)
        heard: list[Any] = [None] * self.size
        dist.all_gather_object(heard, told, group=self.pg)
        if error is not None:
            raise error
        failed = {rank: why for rank, (why, _) in enumerate(heard) if why}
        if failed:
            rank, why = next(iter(failed.items()))
            raise PeerError(f"rank {rank} failed: {why}", tuple(failed))
        return [made for _, made in heard]

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` gives on rank 0, where alone it is called; on every rank. Raises as `gather`."""
        made: Any = self.gather(lambda: make() if self.rank == 0 else None)[0]
        return made  # type: ignore[no-any-return]

    def on_top(self, repository: Repository, branch: str, origin: str | None = None) -> CommitOptions:
        """Options of a commit that goes on top of `branch`, whoever has committed there since the state was restored.

        As where a process that was thought dead had saved once more: the lineage says where the state came from then,
        `origin`, or what the repository has checked out.
        """

        def left() -> str | None:
            head, newest = repository.head, repository.latest(branch)
            commit = origin or (head.commit if head.branch is None else None)
            return None if newest is None or newest.id == commit else commit

        options, came_from = repository.commit_options, self.from_first(left)
        lineage = [] if came_from is None else [Lineage("continued-from", came_from)]
        return replace(options, lineage=[*options.lineage, *lineage])
