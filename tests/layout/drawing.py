"""Random tensors divided over random worlds, for tests of planning."""

from __future__ import annotations

from hypothesis import strategies as st

from cas_ckpt.layout.holdings import Shard, holdings
from cas_ckpt.layout.restore_plan import RestoreRequest
from cas_ckpt.objects.spec import Box, BoxPlacement, Mesh, MeshPlacement, Placement, Spec, Split

_SHAPES: tuple[tuple[int, ...], ...] = (
    (), (0,), (1,), (7,), (400,), (3, 5), (512, 512), (700, 900), (129, 1030), (2, 0, 3), (3, 400, 500), (9, 2, 131),
    (2_000_000,),
)  # fmt: skip


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """One or two dimensions over some of up to 12 ranks, in any order."""
    shape = draw(st.sampled_from([(1,), (2,), (3,), (4,), (7,), (2, 2), (2, 3), (3, 2), (1, 4)]))
    size = 1
    for part in shape:
        size *= part
    ranks = draw(st.permutations(range(12)))[:size]
    return Mesh(tuple(f"d{at}" for at in range(len(shape))), shape, tuple(ranks))


@st.composite
def placements(draw: st.DrawFn, shape: tuple[int, ...]) -> Placement:
    """Shards, strided shards and replicas over a mesh; now and then boxes that follow no rule."""
    if shape and shape[0] > 1 and draw(st.integers(0, 4)) == 0:
        cut = draw(st.integers(1, shape[0] - 1))
        top = Box((0,) * len(shape), (cut, *shape[1:]))
        bottom = Box((cut, *(0,) * (len(shape) - 1)), (shape[0] - cut, *shape[1:]))
        return BoxPlacement(((top, (3,)), (bottom, (0, 3, 5))))
    mesh = draw(meshes())
    plain = st.just(Split())
    cuts = [st.builds(Split, st.just(dim), st.sampled_from([1, 1, 2, 3])) for dim in range(len(shape))]
    return MeshPlacement(mesh, tuple(draw(st.one_of(plain, *cuts)) for _ in mesh.shape))


@st.composite
def wants(draw: st.DrawFn) -> tuple[list[RestoreRequest], int]:
    """Tensors, some of them alike, and a world that is large enough."""
    found: list[RestoreRequest] = []
    for at in range(draw(st.integers(1, 3))):
        shape = draw(st.sampled_from(_SHAPES))
        dtype = draw(st.sampled_from(["float32", "bfloat16", "uint8", "complex128"]))
        shards: tuple[Shard, ...] = holdings(shape, [draw(placements(shape))])
        found += [RestoreRequest(f"{at}/{copy}", Spec(dtype, shape), shards) for copy in range(draw(st.integers(1, 5)))]
    return draw(st.permutations(found)), draw(st.integers(12, 14))
