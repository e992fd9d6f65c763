"""The layout node of a commit: who held what.

Invariant: it stands beside the tree, so it never enters the root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from cas_ckpt.objects.commit import LayoutObject
from cas_ckpt.objects.placement import BoxPlacement, Mesh, MeshPlacement, Placement


def layout_of(
    placements: Mapping[str, Sequence[Placement]], aliases: tuple[tuple[str, ...], ...], world_size: int
) -> LayoutObject:
    """The layout of a state.

    The most common mesh is the commit's; a tensor over another one names that in front ("@dp=2,tp=4").
    Tensors that every holder has whole are left out.
    """
    meshes = Counter(
        placement.mesh for found in placements.values() for placement in found if isinstance(placement, MeshPlacement)
    )
    common = min(meshes, key=lambda mesh: (-meshes[mesh], mesh.shape, mesh.ranks)) if meshes else None
    named = () if common is None else tuple(zip(common.names, common.shape, strict=True))
    texts = {key: _texts(found[0], common) for key, found in placements.items() if found}
    return LayoutObject(world_size, named, texts, aliases)


def _texts(placement: Placement, common: Mesh | None) -> list[str]:
    if isinstance(placement, BoxPlacement):
        return ["boxes"]
    splits = [str(split) for split in placement.splits]
    if placement.mesh == common:
        return splits
    mesh = placement.mesh
    return ["@" + ",".join(f"{name}={size}" for name, size in zip(mesh.names, mesh.shape, strict=True)), *splits]
