"""cas_ckpt behind the peers' two calls, and the operations that only it has, through its public face."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.state import State


class CasCkpt:
    """One repository in one folder: commit, and checkout in place."""

    frozen = False

    def __init__(self, folder: Path) -> None:
        from cas_ckpt import Repository

        path = folder / "repo"
        self.repo: Any = Repository.open(path) if path.exists() else Repository.init(path)

    def save(self, state: State, step: int) -> Any:
        """Commits to main; returns what `Repository.commit` returns."""
        options = {"frozen": state.frozen} if self.frozen and state.frozen else {}
        return self.repo.commit(state.parts, message=f"step {step}", step=step, **options)

    def load(self, state: State) -> None:
        """Checks the head of main out into `state`."""
        self.repo.checkout("main", into=state.parts)

    def count(self, state: State) -> int:
        """Entries of the head of main, listed."""
        return sum(1 for _ in self.repo.ls("main"))


class CasCkptFrozen(CasCkpt):
    """The same with the frozen tensors declared (`frozen=`)."""

    frozen = True


class CasCkptOnePass(CasCkpt):
    """The same with checkouts that verify each byte where it is put (`atomic=False`)."""

    def load(self, state: State) -> None:
        """Checks the head of main out into `state`, in one pass."""
        self.repo.checkout("main", into=state.parts, atomic=False)


def touch_cells(state: State, share: float, seed: int) -> tuple[int, int]:
    """Change one element in `share` of all cells of the canonical grid, spread at random.

    Returns:
        How many cells were changed, and how many bytes those cells hold.
    """
    cells = [(tensor, box) for tensor in state.tensors().values() for box in _boxes(tensor)]
    large = [cell for cell in cells if cell[1].num_elements > 1024]
    chosen = random.Random(seed).sample(large, max(1, round(share * len(cells))))
    for tensor, box in chosen:
        with torch.no_grad():
            tensor[box.offsets] += 1.0
    return len(chosen), sum(box.num_elements * tensor.element_size() for tensor, box in chosen)


def _boxes(tensor: torch.Tensor) -> list[Any]:
    from cas_ckpt.objects.spec import Spec, grid_for

    grid = grid_for(Spec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
    return [grid.box(index) for index in range(grid.num_cells)]


def change_one_entry(state: State) -> None:
    """Set one entry in the middle of the small entries to another value."""
    groups = state.parts["entries"]
    middle = groups[f"group{len(groups) // 2:03d}"]
    middle["entry002"] = middle["entry002"] + 1


def write_history(repo: Any, num_commits: int) -> None:
    """Make `num_commits` commits of a tiny state on main."""
    weight = torch.zeros(4)
    for index in range(num_commits):
        weight += 1
        repo.commit({"w": weight}, message=f"commit {index}", step=index, metrics={"loss": 1.0 / (1 + index)})
