"""Training states of every size, deterministic and really random, without running a training step.

Each tensor is filled from a generator seeded by its own name: any process builds the same state, two
threads fill it, and a few tensors can be made again to check what a load brought back.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.gpt import GPT, GPTShape, LoraGPT
from benchmarks.harness.sizes import Size

_SMALL_LENGTHS = (16, 32, 64, 100, 128, 200, 256)
_ENTRIES_PER_GROUP = 1000
_FILL_THREADS = 2


@dataclass(frozen=True, slots=True)
class State:
    """Named parts of a training state: modules, optimizers, nested dicts of tensors and numbers.

    Attributes:
        trained: Names (see `tensors`) of what a training step changes.
        frozen: Glob or keys of what never changes, as `Repository.commit(frozen=)` takes it.
    """

    parts: dict[str, Any]
    trained: tuple[str, ...] = ()
    frozen: str | tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """The parts as nested dicts; tensors are the live ones."""
        return {name: _plain(part) for name, part in self.parts.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of at least one dimension by dotted name: the ones in place now."""
        leaves = flatten(self.plain())
        return {name: leaf for name, leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}

    def views(self) -> list[memoryview]:
        """The bytes of these tensors, in place."""
        return [memoryview(each.detach().view(-1).view(torch.uint8).numpy()) for each in self.tensors().values()]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())


def _plain(part: Any) -> Any:
    return part.state_dict() if hasattr(part, "state_dict") else part


def build(size: Size, *, blank: bool) -> State:
    """The state of `size`: random, or zeros in its place (the target of a load)."""
    return _BUILDERS[size.kind](size, blank)


def _gpt(size: Size, blank: bool) -> State:
    return _trained_module(_empty(lambda: GPT(_shape(size))), blank)


def _lora(size: Size, blank: bool) -> State:
    return _trained_module(_empty(lambda: LoraGPT(_shape(size), size.rank)), blank, frozen="model/base/**")


def _part(size: Size, blank: bool) -> State:
    model = _empty(lambda: GPT(_shape(size)))
    model.requires_grad_(False)
    for block in list(model.blocks)[-size.trained_layers :]:
        block.requires_grad_(True)
    frozen = tuple(f"model/{name}" for name, parameter in model.named_parameters() if not parameter.requires_grad)
    return _trained_module(model, blank, frozen=frozen)


def _trained_module(model: nn.Module, blank: bool, *, frozen: str | tuple[str, ...] = ()) -> State:
    learned = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW([model.get_parameter(name) for name in learned], lr=1e-4)
    for name in learned:
        optimizer.state[model.get_parameter(name)] = _slot(model.get_parameter(name), blank)
    trained = (*(f"model.{name}" for name in learned), "optim.state.")
    state = State({"model": model, "optim": optimizer}, trained, frozen)
    _fill_all(state.tensors(), blank)
    return state


def _slot(parameter: Tensor, blank: bool) -> dict[str, Tensor]:
    moments = {key: torch.empty_like(parameter, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.tensor(0.0 if blank else 1000.0), **moments}


def _shape(size: Size) -> GPTShape:
    return GPTShape(size.vocab, size.context, size.width, size.layers)


def _empty(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        model = make()
    return model.to_empty(device="cpu")


def _one(size: Size, blank: bool) -> State:
    tensors = {"weight": torch.empty(size.rows, size.width)}
    _fill_all(tensors, blank)
    return State({"model": tensors})


def _entries(size: Size, blank: bool) -> State:
    generator = torch.Generator().manual_seed(7)
    groups: dict[str, dict[str, Any]] = {}
    for index in range(size.num_entries):
        group = groups.setdefault(f"group{index // _ENTRIES_PER_GROUP:03d}", {})
        group[f"entry{index % _ENTRIES_PER_GROUP:03d}"] = _entry(index, generator, blank)
    return State({"entries": groups})


def _entry(index: int, generator: torch.Generator, blank: bool) -> Any:
    """One of: a 0-d tensor, a short vector, an int, a float."""
    if index % 4 == 0:
        return torch.zeros(()) if blank else torch.randn((), generator=generator)
    if index % 4 == 1:
        length = _SMALL_LENGTHS[index // 4 % len(_SMALL_LENGTHS)]
        return torch.zeros(length) if blank else torch.randn(length, generator=generator)
    if index % 4 == 2:
        return 0 if blank else index * 7919
    return 0.0 if blank else index / 7.0


_BUILDERS: dict[str, Callable[[Size, bool], State]] = {
    "gpt": _gpt, "lora": _lora, "part": _part, "one": _one, "entries": _entries,
    "none": lambda size, blank: State({}),
}  # fmt: skip


def _fill_all(tensors: dict[str, Tensor], blank: bool) -> None:
    fill = _zero if blank else _randomize
    with ThreadPoolExecutor(_FILL_THREADS) as pool:
        list(pool.map(fill, tensors.keys(), tensors.values()))


def _zero(name: str, tensor: Tensor) -> None:
    tensor.zero_()


def _randomize(name: str, tensor: Tensor) -> None:
    tensor.normal_(generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if name.endswith("exp_avg"):
        tensor.mul_(1e-3)
    elif name.endswith("exp_avg_sq"):
        tensor.square_().mul_(1e-6)
    else:
        tensor.mul_(0.02)


def step(state: State, number: int) -> int:
    """Change every trained tensor as a training step does; returns the bytes changed."""
    changed = 0
    with torch.no_grad():
        for name, leaf in flatten(state.plain()):
            if name.startswith(state.trained) and isinstance(leaf, Tensor):
                leaf.add_(1) if leaf.ndim == 0 else leaf.mul_(1.0 - 1e-4 * (number + 1))
                changed += leaf.nbytes
    return changed


def wrong_tensors(state: State, *, every: int = 7) -> list[str]:
    """Names of sampled tensors (each `every`-th and the last) that do not hold what `build` puts there."""
    tensors = state.tensors()
    names = list(tensors)
    return [name for name in {*names[::every], *names[-1:]} if not _as_built(name, tensors[name])]


def _as_built(name: str, tensor: Tensor) -> bool:
    fresh = torch.empty_like(tensor)
    _randomize(name, fresh)
    return torch.equal(fresh, tensor)


def flatten(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All leaves of nested dicts and lists by dotted path."""
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from flatten(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def copy_into(target: Any, source: Any) -> None:
    """Copy every tensor of the tree `source` over the tensor at the same place of `target`."""
    wanted = dict(flatten(target))
    with torch.no_grad():
        for path, value in flatten(source):
            if isinstance(value, Tensor):
                wanted[path].copy_(value)
