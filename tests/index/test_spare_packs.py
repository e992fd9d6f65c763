"""Which packs an object can do without, counted leaf by leaf."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from cas_ckpt.index.garbage import Extent, covers, spare_packs

LEAVES = 4


@st.composite
def extents(draw: st.DrawFn) -> list[Extent]:
    """Extents of one chunk of four leaves, the last of them short."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        first = draw(st.integers(0, LEAVES - 1))
        count = draw(st.integers(1, LEAVES - first))
        found.append(Extent(7, draw(st.integers(1, 3)), first, count, 100, 100 * LEAVES - 30))
    return found


def _leaves(extents: list[Extent]) -> set[int]:
    return {leaf for each in extents for leaf in range(each.first_leaf, each.first_leaf + each.num_leaves)}


@given(extents())
def test_an_object_is_whole_when_every_leaf_is_there(extents: list[Extent]) -> None:
    assert covers(extents) == (_leaves(extents) == set(range(LEAVES)))


@given(extents())
@example([Extent(7, 1, 0, 4, 100, 370), Extent(7, 2, 0, 2, 100, 370), Extent(7, 3, 1, 3, 100, 370)])
def test_a_pack_is_spare_when_the_others_hold_every_leaf(extents: list[Extent]) -> None:
    packs = sorted({each.pack_id for each in extents})
    expected = [pack for pack in packs if len(_leaves([e for e in extents if e.pack_id != pack])) == LEAVES]
    assert spare_packs(extents) == expected


def test_a_node_is_whole_wherever_it_is_stored() -> None:
    nodes = [Extent(7, pack, 0, 0, 0, 1000) for pack in (1, 2)]
    assert covers(nodes[:1])
    assert not covers([])
    assert spare_packs(nodes[:1]) == []
    assert spare_packs(nodes) == [1, 2]
