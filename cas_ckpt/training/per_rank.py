"""Values that every rank has for itself: random numbers, positions of data loaders.

A per-rank value is in a commit as a container of kind "ranks": rank -> what that rank had,
with the number of ranks in its attrs.

**The rule of restoring.** A per-rank value is restored if and only if the commit was made by as
many ranks as the checkout has: rank r gets what rank r had. Else it is left untouched, and the
checkout's report lists it (`per_rank_skipped`): what was right for one of 8 ranks is right for
none of 6. A value that is in the commit as one for all counts as that of a single rank. A single rank's `RNGState`
is a value like others.

Invariant: which values are per rank depends on their types and the number of ranks alone; reading the state of a
generator draws no number and seeds nothing. Must not know process groups.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from cas_ckpt.errors import CorruptionError, MismatchError, UnsupportedValueError
from cas_ckpt.objects.state import RANKS, WORLD_SIZE, Container, Item, Name, TensorItem, ValueItem
from cas_ckpt.training.capture.tensors import tensor_item
from cas_ckpt.training.stateful import is_stateful

Generator: TypeAlias = torch.Generator | np.random.Generator


GENERATOR = "generator"
"""Kind of the container of one `torch.Generator`."""

OPTIONAL_PARTS = frozenset({"cuda", "generators"})
"""Parts that a state need not have; formats that drop empty dicts leave them out."""


class RNGState:
    """Torch's CPU generator and that of every CUDA device, NumPy's global one and Python's.

        state = {"model": model, "rng": RNGState({"shuffle": shuffle_generator})}

    A checkout loads it after everything else, since loading other parts may draw numbers.
    CUDA generators are restored device by device; where the commit and this machine have
    different numbers of devices, those in both are restored and a warning says so. It takes what an
    import has of a Trainer or of Accelerate, too.

    Args:
        generators: More generators by name: `torch.Generator` or `numpy.random.Generator`.
    """

    def __init__(self, generators: Mapping[str, Generator] | None = None) -> None:
        self.generators: dict[str, Generator] = dict(generators or {})

    def state_dict(self) -> dict[str, Any]:
        """Copies of the states; changes none of them."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {
            "torch": torch.get_rng_state(),
            "cuda": dict(enumerate(cuda)),
            "numpy": np.random.get_state(legacy=False),
            "python": random.getstate(),
            "generators": {
                name: each.get_state() if isinstance(each, torch.Generator) else each.bit_generator.state
                for name, each in self.generators.items()
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore every generator that the state and this process have in common.

        Raises:
            MismatchError: the names of the extra generators differ; nothing was restored.
        """
        check_generator_names(self, set(state_dict.get("generators", ())))
        torch.set_rng_state(state_dict["torch"].cpu())
        _load_cuda_states(state_dict.get("cuda", {}))
        np.random.set_state(state_dict["numpy"])
        random.setstate(state_dict["python"])
        for name, generator in self.generators.items():
            state = state_dict["generators"][name]
            if isinstance(generator, torch.Generator):
                generator.set_state(state.cpu())
            else:
                generator.bit_generator.state = state


_TRAINERS = (
    {"cpu": "torch", "numpy": "numpy", "python": "python", "cuda": "cuda"},  # Trainer of Hugging Face: rng_state.pth
    {"torch_manual_seed": "torch", "numpy_random_seed": "numpy", "random_state": "python",
     "torch_cuda_manual_seed": "cuda", "step": ""},  # Accelerate: random_states_0.pkl
)  # fmt: skip
"""Names of trainers for the parts of a random state -> the names of `RNGState`; "" is no part of one."""


def rng_item(item: Item) -> Item:
    """The stored item for a target of `RNGState`, in its form: of one rank, or of each.

    What a trainer has saved of a rank, or of the ranks "0", "1" ... as an import keeps it, is brought into that form;
    anything else is given back as it is.
    """
    if not isinstance(item, Container) or item.kind != "dict":
        return item
    ranks = [_of_trainer(item.children.get(str(rank))) for rank in range(len(item.children))]
    found: dict[Name, Item] = {rank: state for rank, state in enumerate(ranks) if state is not None}
    if found and len(found) == len(ranks):
        return Container(RANKS, found, {WORLD_SIZE: len(found)})
    return _of_trainer(item) or item


def _of_trainer(item: Item | None) -> Container | None:
    """A trainer's random state of one rank in the form of `RNGState`; None for anything else."""
    names = item.children if isinstance(item, Container) and item.kind == "dict" else {}
    for form in _TRAINERS:
        parts: dict[Name, Item] = {form[str(name)]: child for name, child in names.items() if form.get(str(name))}
        if names.keys() <= form.keys() and parts.keys() >= {"torch", "numpy", "python"}:
            cuda = parts.pop("cuda", None)  # a list of all devices, which is a plain value if empty; or of one alone
            if cuda is not None and not isinstance(cuda, ValueItem):
                parts["cuda"] = Container("dict", cuda.children if isinstance(cuda, Container) else {0: cuda})
            return Container("dict", parts)
    return None


def check_generator_names(rng: RNGState, stored: set[str], *, key: str = "RNGState") -> None:
    """Raise MismatchError unless `stored` names exactly the extra generators of `rng`."""
    if stored != set(rng.generators):
        raise MismatchError(
            f"{key}: the commit holds the generators {sorted(stored)}, the target {sorted(rng.generators)}: "
            "give RNGState generators of these names"
        )


def _load_cuda_states(states: Mapping[int, torch.Tensor]) -> None:
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in range(num_devices):
        if device in states:
            torch.cuda.set_rng_state(states[device].cpu(), device)
    if len(states) != num_devices:
        warnings.warn(
            f"the commit holds the random states of {len(states)} CUDA devices, here are {num_devices}: "
            f"{min(len(states), num_devices)} were restored, the rest stays as it was",
            stacklevel=2,
        )


def generator_item(generator: torch.Generator) -> Container:
    """A generator as a container: a copy of its state, and the kind of device that the state is for."""
    state = tensor_item(generator.get_state())
    # The copy is new each time: its address says nothing about what it holds.
    item = TensorItem(state.spec, state.source, state.flavor)
    return Container(GENERATOR, {"state": item}, {"device": generator.device.type})


def new_generator(attrs: Any, *, key: str, device: torch.device) -> torch.Generator:
    """A generator of the kind of device that `attrs` name, on `device` if that is of this kind.

    Raises:
        CorruptionError: `attrs` name no device. UnsupportedValueError: there is no such device here.
    """
    name = attrs.get("device") if isinstance(attrs, dict) else None
    try:
        wanted = torch.device(name) if type(name) is str else None
    except RuntimeError:
        wanted = None
    if wanted is None or wanted.index is not None:
        raise CorruptionError(f"{key}: a stored generator does not name its kind of device: restore it from a copy")
    try:
        return torch.Generator(device if device.type == wanted.type else wanted)
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedValueError(
            f"{key}: the commit holds the state of a generator of {name}, and a generator of {name} cannot be made "
            f"here: choose keys without it, or load on a machine that has {name}"
        ) from error


def set_generator(generator: torch.Generator, state: Any, *, key: str) -> torch.Generator:
    """`generator` with this state.

    Raises:
        CorruptionError: the state is of another form.
    """
    try:
        generator.set_state(state.cpu())
    except (RuntimeError, TypeError, AttributeError) as error:
        raise CorruptionError(f"{key}: the state of a generator cannot be set: {error}") from error
    return generator


class PerRank:
    """Holds a value that each rank keeps for itself; all others must be equal on all ranks.

        state = {"model": model, "loader": PerRank(loader), "position": PerRank({"epoch": 3, "at": 17})}

    A checkout restores it in place if the commit was made by as many ranks, see
    `cas_ckpt.training.per_rank`. `RNGState` is per rank by itself.

    Attributes:
        value: A Stateful object, tensor, array, plain value, or a dict, list or tuple of these.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"

    def state_dict(self) -> dict[str, Any]:
        """This rank's value."""
        return {"value": self.value.state_dict() if is_stateful(self.value) else self.value}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        if is_stateful(self.value):
            self.value.load_state_dict(state_dict["value"])
        else:
            self.value = state_dict["value"]
