"""The choice of packs, on invented packs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt.index.garbage import PackLiveness
from cas_ckpt.objects.pack import PackKind
from cas_ckpt.ops.gc.plan import GcOptions, GcPlan, choose_packs

HOUR_US = 3_600_000_000
NOW_US = 1000 * HOUR_US
PACK_BYTES = 1_000_000


def pack(name: str, *, size: int = 900_000, dead: int = 0, entries: int = 10, **fields: object) -> PackLiveness:
    """A data pack of ten entries, of which `dead` are dead, all of one size."""
    made = PackLiveness(
        f"packs/{name}.data", PackKind.DATA, size, entries, NOW_US - 10 * HOUR_US, dead, size * dead // entries, 0,
        unpublished=False,
    )  # fmt: skip
    return replace(made, **fields)  # type: ignore[arg-type]


def choose(
    *packs: PackLiveness, others: int = 0, at_work: bool = False, local: bool = True, **options: object
) -> GcPlan:  # fmt: skip
    sizes = {each.name: each.size_bytes for each in packs} | {f"packs/o{n}.data": 900_000 for n in range(others)}
    return choose_packs(
        packs, sizes, options=GcOptions(**options), now_us=NOW_US, writers_at_work=at_work,  # type: ignore[arg-type]
        pack_bytes=PACK_BYTES, local=local,
    )  # fmt: skip


def names(choices: tuple[object, ...]) -> list[str]:
    return [getattr(choice, "name").removeprefix("packs/").removesuffix(".data") for choice in choices]  # noqa: B009


def test_a_pack_of_which_nothing_is_needed_goes_without_a_copy() -> None:
    plan = choose(pack("a", dead=10), pack("b", dead=1), max_unused=1.0)
    assert names(plan.dead) == ["a"] and not plan.copied
    assert plan.wasted_bytes == 90_000


def test_the_most_wasteful_packs_are_copied_until_the_waste_is_within_the_limit() -> None:
    plan = choose(pack("a", dead=2), pack("b", dead=8), pack("c", dead=5), others=7, max_unused=0.05)
    assert names(plan.copied) == ["b", "c"]
    assert [choice.copied_bytes for choice in plan.copied] == [180_000, 450_000]
    assert plan.wasted_bytes == 180_000


def test_duplicates_are_waste_too() -> None:
    plan = choose(pack("a", duplicate_bytes=800_000), others=3, max_unused=0.05)
    assert names(plan.copied) == ["a"]


def test_young_packs_that_nobody_published_are_spared_and_others_are_not() -> None:
    young = pack("young", dead=10, unpublished=True, first_seen_us=NOW_US - HOUR_US // 2)
    old = pack("old", dead=10, unpublished=True, first_seen_us=NOW_US - 2 * HOUR_US)
    published = pack("published", dead=10, first_seen_us=NOW_US - 1)
    plan = choose(young, old, published)
    assert names(plan.dead) == ["old", "published"] and names(plan.young) == ["young"]


def test_while_somebody_writes_nothing_unpublished_goes_whatever_its_age() -> None:
    plan = choose(pack("a", dead=10, unpublished=True), at_work=True)
    assert names(plan.young) == ["a"] and not plan.dead


def test_no_more_is_copied_than_the_budget_allows() -> None:
    plan = choose(pack("a", dead=5), pack("b", dead=6), max_unused=0.0, max_repack_bytes=400_000)
    assert names(plan.copied) == ["b"]


def test_small_packs_are_merged_when_there_are_many() -> None:
    small = [pack(f"s{n}", size=1000) for n in range(5)]
    assert not choose(*small, many_small=6).copied
    assert names(choose(*small, many_small=5).copied) == ["s0", "s1", "s2", "s3", "s4"]


def test_a_pack_with_parts_of_chunks_is_rewritten_when_asked_for() -> None:
    plan = choose_packs(
        [], {"packs/a.data": 900_000, "packs/b.data": 900_000}, options=GcOptions(), now_us=NOW_US,
        writers_at_work=False, pack_bytes=PACK_BYTES, in_parts={"packs/b.data"},
    )  # fmt: skip
    assert names(plan.copied) == ["b"]


def test_a_pack_that_is_not_in_the_store_is_never_chosen() -> None:
    gone = pack("gone", dead=10)
    plan = choose_packs(
        [gone], {}, options=GcOptions(), now_us=NOW_US, writers_at_work=False, pack_bytes=PACK_BYTES
    )  # fmt: skip
    assert plan == GcPlan((), (), (), (), 0)


@given(
    st.lists(st.tuples(st.integers(0, 10), st.booleans(), st.integers(0, 20)), max_size=12),
    st.floats(0, 1), st.integers(0, 4_000_000),
)  # fmt: skip
def test_whatever_is_chosen_is_chosen_once_and_within_the_budget(
    drawn: list[tuple[int, bool, int]], max_unused: float, budget: int
) -> None:
    packs = [
        pack(f"p{n}", dead=dead, unpublished=unpublished, first_seen_us=NOW_US - age * HOUR_US // 10)
        for n, (dead, unpublished, age) in enumerate(drawn)
    ]
    plan = choose(*packs, max_unused=max_unused, max_repack_bytes=budget)
    chosen = names(plan.dead) + names(plan.copied) + names(plan.young)
    assert len(chosen) == len(set(chosen))
    assert sum(choice.copied_bytes for choice in plan.copied) <= budget
    assert plan.wasted_bytes >= 0


def test_in_a_bucket_small_packs_are_merged_only_if_that_is_asked_for() -> None:
    small = [pack(f"s{n}", size=1000) for n in range(64)]
    assert len(choose(*small).merged) == 64
    left = choose(*small, local=False)
    assert not left.copied and len(left.unmerged) == 64  # gc says what merging them would cost
    assert not choose(*small[1:], local=False).unmerged
    for decided in (choose(*small, many_small=0), choose(*small, local=False, many_small=0)):
        assert not decided.copied and not decided.unmerged
    asked = choose(*small, local=False, many_small=64)
    assert len(asked.merged) == 64 and not asked.unmerged
