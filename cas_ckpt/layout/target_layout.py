"""A layout to plan for: a mesh of ranks that need not exist, and a rule where each tensor goes.

Invariant: pure data; the same layout has the same digest everywhere. Rules are patterns over keys,
the first that matches decides. What none matches follows the usual names: FSDP cuts dimension 0,
tensor parallelism cuts q, k, v, gate, up and vocabularies by output, attention output and down by
input, and keeps replicas of the rest; moments of an optimizer go with their parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from cas_ckpt.arguments import one_text
from cas_ckpt.errors import InvalidInputError, MismatchError, shown_value
from cas_ckpt.layout.holdings import PLANNER_VERSION, Shard, holdings
from cas_ckpt.layout.restore_plan import region
from cas_ckpt.objects.digest import Digest, object_id, pack_canonical
from cas_ckpt.objects.spec import Mesh, MeshPlacement, Spec, Split, mesh_text, parse_split

MAX_RANKS = 1 << 20

REPLICATED = frozenset({"replicate", "dp_replicate", "hsdp", "ddp", "rep"})
SHARDED = frozenset({"dp", "fsdp", "shard", "dp_shard", "cp", "dp_cp", "dp_shard_cp"})
TENSOR = frozenset({"tp", "mp", "model"})
EXPERT = frozenset({"ep", "expert"})

_COLUMN = frozenset(
    {"wq", "wk", "wv", "wqkv", "w1", "w3", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_attn", "c_fc"}
)
_ROW = frozenset({"wo", "w2", "o_proj", "down_proj", "c_proj"})
_VOCABULARY = frozenset({"tok_embeddings", "embed_tokens", "embedding", "embeddings", "wte", "lm_head", "output"})
_EXPERTS = frozenset({"experts"})
_MESH = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([1-9][0-9]{0,6})")


@dataclass(frozen=True)
class TargetLayout:
    """A mesh and where tensors go on it.

    Attributes:
        names, shape: The mesh's dimensions, the last one running fastest over the ranks.
        rules: (pattern of keys, one split per mesh dimension); the first match decides.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    rules: tuple[tuple[str, tuple[Split, ...]], ...] = ()

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shape) or len(set(self.names)) != len(self.names) or not self.names:
            raise InvalidInputError(f"mesh {self}: wanted a name of its own and a size for each dimension")
        if any(size < 1 for size in self.shape) or self.world_size > MAX_RANKS:
            raise InvalidInputError(f"mesh {self}: wanted sizes of at least 1, and at most {MAX_RANKS} ranks")
        for pattern, splits in self.rules:
            if len(splits) != len(self.names):
                raise InvalidInputError(
                    f"rule {pattern!r}: {len(splits)} placements for a mesh of {len(self.names)} dimensions ({self})"
                )

    def __str__(self) -> str:
        return mesh_text(zip(self.names, self.shape, strict=True))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh with all ranks in order."""
        return Mesh(self.names, self.shape, tuple(range(self.world_size)))

    @cached_property
    def digest(self) -> Digest:
        """Digest of this layout: equal for equal layouts only."""
        rules = [[pattern, *map(str, splits)] for pattern, splits in self.rules]
        return object_id("target layout", pack_canonical([PLANNER_VERSION, list(self.names), list(self.shape), rules]))

    def usual(self, key: str, spec: Spec) -> tuple[Split, ...]:
        """Where a tensor goes by its name and shape.

        Raises:
            InvalidInputError: a mesh dimension has a name that says nothing.
        """
        cuts = [_usual_split(name, key, spec) for name in self.names]
        stacked = len(spec.shape) >= 3 and not _EXPERTS.isdisjoint(re.split(r"[/.]", key))
        shared = math.prod(size for size, cut in zip(self.shape, cuts, strict=True) if cut.dim == 0)
        if stacked and shared > spec.shape[0]:  # fewer experts than ranks that would divide them: FSDP cuts dimension 1
            cuts = [Split(1) if name in SHARDED else cut for name, cut in zip(self.names, cuts, strict=True)]
        return tuple(_strided(cuts, at, self.names, self.shape) for at in range(len(cuts)))

    def shards(self, shape: tuple[int, ...], splits: tuple[Split, ...]) -> tuple[Shard, ...]:
        """Who holds what of a tensor; one object for equal arguments, as plans like it."""
        found = self._shards.get((shape, splits))
        if found is None:
            found = self._shards[shape, splits] = holdings(shape, [MeshPlacement(self.mesh, splits)])
        return found

    @cached_property
    def _shards(self) -> dict[tuple[tuple[int, ...], tuple[Split, ...]], tuple[Shard, ...]]:
        return {}


def parse_layout(mesh: str, shapes: Mapping[str, Sequence[str]] | None = None) -> TargetLayout:
    """The layout that people write: "dp=96,tp=8", and {pattern: ["S(0)", "R"]} for what is not usual.

    Raises:
        InvalidInputError: neither can be read.
    """
    if not isinstance(mesh, str):
        raise InvalidInputError(f"the target is {shown_value(mesh)}: give a mesh such as 'dp=96,tp=8', or ranks")
    parts = [(text, _MESH.fullmatch(text.strip())) for text in mesh.split(",")]
    wrong = [text for text, found in parts if found is None]
    if wrong:
        raise InvalidInputError(f"mesh {mesh!r}: {wrong[0]!r} is not a dimension; write e.g. dp=96,tp=8")
    found = [(match[1], int(match[2])) for _, match in parts if match is not None]
    rules = []
    if shapes is not None and not isinstance(shapes, Mapping):
        raise InvalidInputError(f"shapes is {shown_value(shapes)}: give a dict of patterns and placements")
    for pattern, splits in ({} if shapes is None else shapes).items():
        one_text("a pattern of shapes", pattern)
        if isinstance(splits, str) or not isinstance(splits, Sequence) or not all(isinstance(s, str) for s in splits):
            raise InvalidInputError(f'rule {pattern!r}: wanted a list of placements such as ["S(0)", "R"]')
        rules.append((pattern, tuple(map(parse_split, splits))))
    return TargetLayout(tuple(name for name, _ in found), tuple(size for _, size in found), tuple(rules))


def layout_of(target: str | int | TargetLayout, shapes: Mapping[str, Sequence[str]] | None = None) -> TargetLayout:
    """The layout that is meant: a mesh as text, a number of ranks that shard dimension 0, or a layout as it is."""
    if isinstance(target, TargetLayout):
        return target
    return parse_layout(f"dp={target:d}" if isinstance(target, int) else target, shapes)


def check_splits(key: str, spec: Spec, splits: Sequence[Split]) -> None:
    """Refuse placements that cut a dimension which the tensor does not have.

    Raises:
        MismatchError: names key, region and dimension.
    """
    for split in splits:
        if split.dim is not None and split.dim >= len(spec.shape):
            raise MismatchError(
                f"{key}: placement {split} cuts dimension {split.dim}, but the stored {spec} has {len(spec.shape)} "
                f"(region {region(spec.box)}): give it another placement"
            )


def _usual_split(name: str, key: str, spec: Spec) -> Split:
    if name in REPLICATED or not spec.shape:
        return Split()
    if name in SHARDED:
        return Split(0)
    parts = frozenset(re.split(r"[/.]", key))
    if name in EXPERT:
        return Split(0)  # experts are stacked on dimension 0; all else is sharded over these ranks too
    if name in TENSOR:
        last = len(spec.shape) - 1
        if parts & (_COLUMN | _VOCABULARY):
            return Split(last - 1 if parts & _EXPERTS and last >= 2 else 0)
        return Split(last) if parts & _ROW and last >= 1 else Split()
    raise InvalidInputError(
        f"mesh dimension {name!r} says nothing about where tensors go: name it one of "
        f"{', '.join(sorted(SHARDED | REPLICATED | TENSOR | EXPERT))}, or give a rule for {key} (shapes=)"
    )


def _strided(cuts: Sequence[Split], at: int, names: Sequence[str], shape: Sequence[int]) -> Split:
    """FSDP cuts what tensor and expert parallelism left, although its mesh dimension may come first."""
    own = cuts[at]
    if own.dim is None or names[at] not in SHARDED:
        return own
    inner = [
        size
        for cut, name, size in zip(cuts[at + 1 :], names[at + 1 :], shape[at + 1 :], strict=True)
        if cut.dim == own.dim and name not in SHARDED
    ]
    return Split(own.dim, math.prod(inner))
