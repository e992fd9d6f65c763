"""What is measured, in which order: chains of operations that share one scratch folder.

A chain is one peer on one size: its operations run one after another, each in its own process, and its
folder is removed at the end. Within a round all chains follow one another, and the order is turned from
round to round, so that no peer always has the same neighbour. Pure: knows names only, starts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatch

from benchmarks.harness.sizes import SIZES, TINY

DEFAULT_ROUNDS = 5
GPT = "gpt-1g"


@dataclass(frozen=True, slots=True)
class Step:
    """One operation, measured in a process of its own.

    Attributes:
        peer: Who does it, when not the chain's own peer (two ways to load one file).
        most_rounds: Rounds that it takes part in, at most: 5 where a target hangs on it, 3 where it also
            repeats inside its process, 1 for what is there for information.
    """

    operation: str
    most_rounds: int = DEFAULT_ROUNDS
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Chain:
    """Steps of one peer on one size that share a folder.

    Attributes:
        copies: Copies of the state that the hungriest step holds at once, for the check of room.
        keep: The folder stays (a history that takes minutes to write).
    """

    size: str
    peer: str
    steps: tuple[Step, ...]
    copies: float = 2.0
    keep: bool = False

    @property
    def name(self) -> str:
        """Size and peer, as people read it."""
        return f"{self.size}/{self.peer}"

    def doer(self, step: Step) -> str:
        """The peer that carries out `step`."""
        return step.peer or self.peer


def _steps(most_rounds: int, *operations: str, peer: str = "") -> tuple[Step, ...]:
    return tuple(Step(operation, most_rounds, peer) for operation in operations)


_LOADS = ("load-cold", "load-warm")
_SAVE_AND_LOADS = ("save", *_LOADS)

_CHAINS = (
    Chain("raw", "limit", _steps(5, "limits"), copies=0),
    Chain(
        GPT,
        "cas_ckpt",
        _steps(5, *_SAVE_AND_LOADS) + _steps(5, *_LOADS, peer="cas_ckpt-one-pass") + _steps(3, "recommit"),
        copies=1.2,
    ),
    Chain(GPT, "torch", _steps(5, "save") + _steps(5, *_LOADS, peer="torch-mmap") + _steps(1, *_LOADS)),
    Chain(GPT, "dcp", _steps(5, *_SAVE_AND_LOADS), copies=1.1),
    Chain(GPT, "torchsnapshot", _steps(5, "save") + _steps(1, *_LOADS), copies=3),
    Chain(GPT, "dcp-2t", _steps(1, "save"), copies=1.1),
    Chain(GPT, "safetensors", _steps(1, *_SAVE_AND_LOADS)),
    Chain(GPT, "torch_checkpointing", _steps(1, *_SAVE_AND_LOADS)),
    Chain(GPT, "moonclip", _steps(1, *_SAVE_AND_LOADS), copies=4),
    Chain(GPT, "cas_ckpt", _steps(3, "unchanged"), copies=1.2),
    Chain(GPT, "cas_ckpt", _steps(3, "changed"), copies=1.2),
    Chain("lora-1g", "cas_ckpt", _steps(3, "second")),
    Chain("lora-1g", "cas_ckpt-frozen", _steps(3, "second")),
    Chain("lora-1g", "dcp", _steps(3, "second")),
    Chain("lora-1g", "torch", _steps(1, "second")),
    Chain("lora-1g", "moonclip", _steps(1, "second")),
    Chain("frozen-90", "cas_ckpt", _steps(1, "second")),
    Chain("frozen-90", "cas_ckpt-frozen", _steps(1, "second")),
    Chain("frozen-90", "dcp", _steps(1, "second")),
    Chain("small-100k", "cas_ckpt", _steps(5, "save", "load-warm", "count", "one-entry")),
    Chain("small-100k", "torch", _steps(1, "save", "load-warm")),
    Chain("small-100k", "dcp", _steps(1, "save", "load-warm", "count")),
    Chain("small-100k", "torchsnapshot", _steps(1, "save", "count")),
    Chain("small-100k", "moonclip", _steps(1, "save")),
    Chain("small-100k", "torch_checkpointing", _steps(1, "save")),
    Chain("small-100k", "safetensors", _steps(1, "save")),
    Chain("one-1g", "cas_ckpt", _steps(3, "save", "slices")),
    Chain("one-1g", "safetensors", _steps(1, "save", "slices")),
    Chain("history-10k", "cas_ckpt", _steps(3, "write-history", "log"), keep=True),
)


def plan(*, gpt: str = GPT, only: str | None = None) -> tuple[Chain, ...]:
    """The chains of one round.

    Args:
        gpt: Size that takes the place of gpt-1g; "tiny" makes every size tiny.
        only: Pattern for "SIZE/PEER/OPERATION"; a chain keeps its operations up to the last match.
    """
    chains = (replace(chain, size=_size(chain.size, gpt)) for chain in _CHAINS)
    return tuple(cut for chain in chains if (cut := _cut(chain, only)).steps)


def _size(name: str, gpt: str) -> str:
    if gpt == "tiny":
        return TINY[name]
    return gpt if name == GPT else name


def _cut(chain: Chain, only: str | None) -> Chain:
    """The chain up to the last step that `only` names (a load needs the save before it)."""
    if only is None:
        return chain
    pattern = only if "*" in only else f"*{only}*"
    names = [f"{chain.size}/{chain.doer(step)}/{step.operation}" for step in chain.steps]
    hits = [at for at, name in enumerate(names) if fnmatch(name, pattern)]
    return replace(chain, steps=chain.steps[: hits[-1] + 1] if hits else ())


def rounds(chains: tuple[Chain, ...], num_rounds: int) -> tuple[tuple[Chain, ...], ...]:
    """The chains of each round; the order is turned by one place per round."""
    if num_rounds < 1:
        raise ValueError(f"wanted at least one round, got {num_rounds}")
    return tuple(
        tuple(cut for chain in _turned(chains, number) if (cut := _in_round(chain, number)).steps)
        for number in range(num_rounds)
    )


def _in_round(chain: Chain, number: int) -> Chain:
    return replace(chain, steps=tuple(step for step in chain.steps if number < step.most_rounds))


def _turned(chains: tuple[Chain, ...], places: int) -> tuple[Chain, ...]:
    places %= max(1, len(chains))
    return chains[places:] + chains[:places]


def fits(chain: Chain, memory_bytes: int, disk_bytes: int) -> bool:
    """Whether the chain has room: its copies in memory, and two saves on disk."""
    state_bytes = SIZES[chain.size].state_bytes
    return memory_bytes > chain.copies * state_bytes + (1 << 30) and disk_bytes > 2.5 * state_bytes + (1 << 30)
