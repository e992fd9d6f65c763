"""Divisions of tensors over ranks, drawn at random and of real jobs, for the tests of layouts."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from cas_ckpt.objects.layouts import Division
from cas_ckpt.objects.spec import Box, BoxPlacement, Mesh, MeshPlacement, Placement, Split

WORLD = 8
SHAPE = (12, 7)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """A mesh of some or all ranks, in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3).filter(lambda sizes: math.prod(sizes) <= WORLD)))
    ranks = draw(st.permutations(range(WORLD)))[: math.prod(shape)]
    if draw(st.booleans()):
        ranks = sorted(ranks)
    names = tuple(draw(st.sampled_from(["dp", "tp", ""])) for _ in shape)
    return Mesh(names, shape, tuple(ranks))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """A placement of a tensor of SHAPE over a mesh, or in boxes that follow no rule."""
    if draw(st.integers(0, 3)):
        mesh = draw(meshes())
        splits = st.builds(Split, st.sampled_from([None, 0, 1]), st.integers(1, 3))
        plain = st.builds(lambda split: split if split.dim is not None else Split(), splits)
        return MeshPlacement(mesh, tuple(draw(plain) for _ in mesh.shape))
    boxes = []
    for _ in range(draw(st.integers(1, 4))):
        starts = [draw(st.integers(0, size - 1)) for size in SHAPE]
        sizes = [draw(st.integers(0, size - start)) for size, start in zip(SHAPE, starts, strict=True)]
        ranks = draw(st.sets(st.integers(0, WORLD - 1), min_size=1))
        boxes.append((Box(tuple(starts), tuple(sizes)), tuple(sorted(ranks))))
    return BoxPlacement(tuple(boxes))


divisions = st.builds(
    lambda over, whole: Division(tuple(over), tuple(sorted(whole))),
    st.lists(placements(), max_size=3),
    st.sets(st.integers(0, WORLD - 1)),
).filter(lambda division: division.placements or division.everywhere)
