"""What is read over a network: every wanted byte once, in few requests."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt.transfer.sources import ReadLimits, Span, Unit, Wanted, opening_first, plan_units

LIMITS = ReadLimits(gap_bytes=10, span_bytes=100)

lengths = st.lists(st.tuples(st.integers(0, 25), st.integers(1, 120)), min_size=1, max_size=30)


def spans_of(pack: str, steps: list[tuple[int, int]]) -> list[Span]:
    """Spans that do not touch one another's bytes: (gap before, length)."""
    found, at = [], 0
    for gap, length in steps:
        found.append(Span(pack, at + gap, at + gap + length))
        at += gap + length
    return found


def planned(*wanted: tuple[str, list[Span]]) -> list[Unit[str]]:
    return plan_units([Wanted(name, spans) for name, spans in wanted], LIMITS)


@given(st.lists(lengths, min_size=1, max_size=3), st.randoms(use_true_random=False), st.integers(1, 4))
def test_every_wanted_byte_is_in_the_unit_of_its_item_and_none_is_read_twice(
    packs: list[list[tuple[int, int]]], dice: object, most: int
) -> None:
    spans = [span for number, steps in enumerate(packs) for span in spans_of(f"p{number}", steps)]
    dice.shuffle(spans)  # type: ignore[attr-defined]
    wanted = [(str(at), sorted(spans[at : at + most])) for at in range(0, len(spans), most)]
    units = planned(*wanted)
    assert Counter(item for unit in units for item in unit.items) == Counter(name for name, _ in wanted)
    inside = {item: unit for unit in units for item in unit.items}
    for name, own in wanted:
        for span in own:
            assert any(
                each.pack == span.pack and each.offset <= span.offset and span.end <= each.end
                for each in inside[name].spans
            )
    read = sorted(span for unit in units for span in unit.spans)
    assert all(a.pack != b.pack or a.end <= b.offset for a, b in pairwise(read))
    alone = max(sum(span.end - span.offset for span in own) + most * LIMITS.gap_bytes for _, own in wanted)
    assert all(span.end - span.offset <= max(alone, LIMITS.span_bytes) for span in read)
    in_vain = sum(unit.num_bytes for unit in units) - sum(span.end - span.offset for span in spans)
    assert 0 <= in_vain <= LIMITS.gap_bytes * len(spans)


def test_what_is_near_is_read_together_up_to_a_length() -> None:
    units = planned(("a", [Span("p", 0, 40)]), ("b", [Span("p", 50, 90)]), ("c", [Span("p", 95, 120)]))
    assert [unit.spans for unit in units] == [(Span("p", 0, 90),), (Span("p", 95, 120),)]
    assert [unit.items for unit in units] == [("a", "b"), ("c",)]


def test_what_is_far_apart_or_in_another_pack_is_not() -> None:
    units = planned(("a", [Span("p", 0, 40)]), ("b", [Span("p", 51, 90)]), ("c", [Span("q", 0, 5)]))
    assert [unit.items for unit in units] == [("a",), ("b",), ("c",)]


def test_what_is_in_places_far_apart_is_read_by_itself_and_nothing_is_read_across_it() -> None:
    units = planned(
        ("a", [Span("p", 0, 10)]), ("parts", [Span("p", 12, 14), Span("p", 60, 70)]), ("b", [Span("p", 16, 20)])
    )
    assert {unit.items: unit.spans for unit in units} == {
        ("a",): (Span("p", 0, 10),),
        ("parts",): (Span("p", 12, 14), Span("p", 60, 70)),
        ("b",): (Span("p", 16, 20),),
    }


def test_what_is_nowhere_has_a_unit_too() -> None:
    assert [(unit.spans, unit.items) for unit in planned(("lost", []))] == [((), ("lost",))]


def test_reading_begins_at_every_pack_before_it_goes_on_in_any() -> None:
    units = [Unit((Span(pack, at, at + 10),), (f"{pack}{at}",)) for pack in "abc" for at in (0, 10, 20)]
    units.append(Unit((), ("nowhere",)))
    ordered = [unit.items[0] for unit in opening_first(units)]
    assert ordered == ["a0", "b0", "c0", "nowhere", "a10", "a20", "b10", "b20", "c10", "c20"]
