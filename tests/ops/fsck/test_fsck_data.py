"""Which packs --read-data reads: subsets, ages, durations; and what the scrub log remembers."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest

from cas_ckpt import Repository, clock
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.units import PackShard
from cas_ckpt.errors import InvalidInputError, StorageError
from cas_ckpt.index import integrity, remembered
from cas_ckpt.index.integrity import Scrub
from cas_ckpt.index.remembered import RestoreRow
from cas_ckpt.ops.fsck.check import check_open, check_url
from cas_ckpt.ops.fsck.packs import DataOptions, Subset, choose_packs, parse_subset
from cas_ckpt.ops.fsck.report import FsckReport
from cas_ckpt.ops.history.log import log_commits
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, new_repository, numbers
from tests.ops.fsck.fsck_cases import flip
from tests.wrapped_stores import FaultyStore

DAY_S = 86400.0
PACKS = {f"packs/{number:02x}/{number:02x}{number:030x}.data": 1000 + number for number in range(100)}


def chosen(options: DataOptions, scrubs: dict[str, Scrub] | None = None, now_us: int = 0) -> list[str]:
    return choose_packs(PACKS, options, scrubs or {}, now_us=now_us)


@pytest.mark.parametrize(
    ("text", "subset"),
    [
        ("5%", Subset(share=0.05)),
        ("100%", Subset(share=1.0)),
        ("0.5%", Subset(share=0.005)),
        ("2/7", Subset(part=2, parts=7)),
        ("10G", Subset(num_bytes=10**10)),
        ("1.5M", Subset(num_bytes=1_500_000)),
        ("700", Subset(num_bytes=700)),
        ("3kb", Subset(num_bytes=3000)),
    ],
)
def test_a_subset_is_a_share_a_part_or_a_size(text: str, subset: Subset) -> None:
    assert parse_subset(text) == subset


@pytest.mark.parametrize("text", ["", "0%", "101%", "0/3", "4/3", "1/0", "x", "-5%", "0", "1/2/3"])
def test_anything_else_is_not_a_subset(text: str) -> None:
    with pytest.raises(InvalidInputError, match="not a (part|share|size)"):
        parse_subset(text)


def test_the_parts_of_a_whole_are_all_of_it_and_the_same_every_time() -> None:
    parts = [chosen(DataOptions(Subset(part=part, parts=7))) for part in range(1, 8)]
    assert sorted(key for part in parts for key in part) == sorted(PACKS)
    assert parts[2] == chosen(DataOptions(Subset(part=3, parts=7)))


def test_a_share_or_a_size_is_drawn_by_chance() -> None:
    tenth = chosen(DataOptions(Subset(share=0.1), dice=random.Random(1)))
    assert len(tenth) == 10
    assert tenth != chosen(DataOptions(Subset(share=0.1), dice=random.Random(2)))
    some = chosen(DataOptions(Subset(num_bytes=5500), dice=random.Random(1)))
    assert sum(PACKS[key] for key in some) >= 5500 > sum(PACKS[key] for key in some[1:])
    assert len(chosen(DataOptions(Subset(share=0.0001)))) == 1


def test_packs_that_were_read_lately_and_found_intact_are_passed_over_and_the_oldest_come_first() -> None:
    keys = sorted(PACKS)
    now_us = int(100 * DAY_S * 1e6)
    ages = {keys[0]: 3, keys[1]: 40, keys[2]: 8, keys[3]: 1}
    scrubs = {key: Scrub(key, now_us - int(days * DAY_S * 1e6), 10) for key, days in ages.items()}
    scrubs[keys[3]] = Scrub(keys[3], now_us, 10, "a flipped bit")
    scrubs[keys[4]] = Scrub(keys[4], now_us + 10**12, 10)  # a clock that was wrong
    found = chosen(DataOptions(max_age_s=7 * DAY_S), scrubs, now_us)
    assert set(PACKS) - set(found) == {keys[0]}
    assert [key for key in found if key in ages] == [keys[1], keys[2], keys[3]]


def test_what_was_read_in_the_future_counts_as_never_read() -> None:
    keys = list(PACKS)
    now_us = 10**15
    scrubs = {key: Scrub(key, now_us, 10) for key in keys[2:]}
    scrubs[keys[0]] = Scrub(keys[0], now_us + 1, 10)
    proven = {keys[1]: now_us + 10**12, keys[2]: now_us + 10**12}
    options = DataOptions(subset=Subset(num_bytes=sum(PACKS[key] for key in keys[:2])))
    assert {*choose_packs(PACKS, options, scrubs, now_us=now_us, proven=proven)} == {*keys[:2]}
    assert choose_packs(PACKS, DataOptions(), scrubs, now_us=now_us, proven=proven)[:2] == sorted(keys[:2])


def test_what_restores_have_read_counts_for_the_order_and_not_for_the_age() -> None:
    keys = sorted(PACKS)
    scrubs = {key: Scrub(key, 5, 10) for key in keys[:50]} | {keys[1]: Scrub(keys[1], 9, 10)}
    proven = {keys[0]: 7, keys[1]: 2, keys[99]: 3, keys[98]: 4}
    found = choose_packs(PACKS, DataOptions(), scrubs, now_us=100, proven=proven)
    assert found == [*keys[50:98], keys[99], keys[98], *keys[2:50], keys[0], keys[1]]
    spared = choose_packs(PACKS, DataOptions(max_age_s=1), scrubs, now_us=100, proven=proven)
    assert spared == [*keys[50:98], keys[99], keys[98]]


@pytest.mark.parametrize("subset", [Subset(share=0.5), Subset(num_bytes=50_000)])
def test_a_share_is_taken_of_what_was_read_longest_ago_where_that_is_remembered(subset: Subset) -> None:
    keys = sorted(PACKS)
    scrubs = {key: Scrub(key, 5, 10) for key in keys[:60]}
    options = DataOptions(subset, dice=random.Random(3))
    found = choose_packs(PACKS, options, scrubs, now_us=100)
    assert {*keys[60:]} < {*found}
    assert 45 <= len(found) <= 55
    assert {*found} != {*choose_packs(PACKS, options, scrubs, now_us=100)}  # among equals chance decides
    assert not {*keys[60:]} <= {*choose_packs(PACKS, options, scrubs, now_us=100, remembers=False)}


def test_halves_of_the_data_that_are_read_in_turn_are_all_of_it(repo: Path) -> None:
    read_packs: list[set[str]] = []
    for turn in range(2):
        with clock.fixed(lambda turn=turn: 1e9 + turn * DAY_S):
            assert read(repo, subset=Subset(share=0.5)).read_packs == 4
        with closing(RepositoryHandle.open(repo)) as handle:
            scrubs = handle.index.read(integrity.read_scrubs)
            read_packs.append({key for key, scrub in scrubs.items() if scrub.checked_us == (1e9 + turn * DAY_S) * 1e6})
    assert len(read_packs[0] | read_packs[1]) == 8


def test_the_state_that_was_restored_last_is_read_last(repo: Path) -> None:
    with closing(RepositoryHandle.open(repo)) as handle:
        commits = list(log_commits(handle))
        for number in (1, 3):  # of the four, the youngest first
            row = RestoreRow(
                bytes.fromhex(commits[number].id), bytes.fromhex(commits[number].root), "load", None, "", 1,
                (10 - number) * 1_000_000, 1.0, 40_000, "ann", "here", True, None,
            )  # fmt: skip
            handle.index.write(remembered.write_restore, row)
        proven = handle.index.read(remembered.proven_packs)
        assert sorted(proven.values()) == [7_000_000, 9_000_000]
    with clock.fixed(lambda: 1e9):
        assert read(repo, subset=Subset(share=0.75)).read_packs == 6  # of four packs with data and four without
        with closing(RepositoryHandle.open(repo)) as handle:
            assert proven.keys().isdisjoint(handle.index.read(integrity.read_scrubs))
        assert read(repo, subset=Subset(share=0.01)).read_packs == 1
        with closing(RepositoryHandle.open(repo)) as handle:
            later = handle.index.read(integrity.read_scrubs).keys() & proven.keys()
    assert [proven[key] for key in later] == [7_000_000]  # of those two the one that was restored longer ago


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    handle = new_repository(tmp_path / "repo")
    for seed in range(4):
        commit(handle, {"w": numbers(100, 100, seed=seed)})
    handle.close()
    return tmp_path / "repo"


def read(path: Path, **options: object) -> FsckReport:
    return check_url(path, DataOptions(**options))  # type: ignore[arg-type]


def test_what_was_read_is_logged_and_spared_next_time(repo: Path) -> None:
    with clock.fixed(lambda: 1e9):
        assert read(repo).read_packs == 8
    with clock.fixed(lambda: 1e9 + 3 * DAY_S):
        spared = read(repo, max_age_s=7 * DAY_S)
        assert (spared.read_packs, spared.skipped_packs) == (0, 8)
        handle = RepositoryHandle.open(repo)
        commit(handle, {"w": numbers(100, 100, seed=9)})
        handle.close()
        assert read(repo, max_age_s=7 * DAY_S).read_packs == 2
    with clock.fixed(lambda: 1e9 + 8 * DAY_S):
        assert read(repo, max_age_s=7 * DAY_S).read_packs == 8


def test_damage_is_logged_and_read_again_however_young(repo: Path) -> None:
    pack = next((repo / "packs").glob("*/*.data"))
    flip(pack, 3000)
    with clock.fixed(lambda: 1e9):
        assert not read(repo).ok
        again = read(repo, max_age_s=7 * DAY_S)
    assert not again.ok and again.read_packs == 1
    index = RepositoryHandle.open(repo).index
    assert [scrub.pack for scrub in index.read(integrity.read_scrubs).values() if scrub.damage] == [
        str(pack.relative_to(repo))
    ]


def test_no_pack_is_begun_after_the_time_is_up(repo: Path) -> None:
    report = read(repo, max_duration_s=0.0)
    assert (report.read_packs, report.skipped_packs) == (0, 8)
    assert report.ok


def test_damage_in_a_part_that_is_not_read_is_not_found_and_in_the_other_it_is(repo: Path) -> None:
    pack = next((repo / "packs").glob("*/*.data"))
    flip(pack, 3000)
    found = [read(repo, subset=Subset(part=part, parts=3)).ok for part in (1, 2, 3)]
    assert sorted(found) == [False, True, True]


def test_all_bytes_are_told_to_the_progress(repo: Path) -> None:
    class Counting:
        def __init__(self) -> None:
            self.total: int | None = None
            self.done = 0
            self.phases: list[str] = []

        def start(self, phase: str, total_bytes: int | None) -> None:
            self.phases.append(phase)
            self.total, self.done = total_bytes, 0

        def advance(self, num_bytes: int) -> None:
            self.done += num_bytes

        def finish(self) -> None:
            """Nothing."""

    seen = Counting()
    report = check_url(repo, DataOptions(), progress=seen)
    assert seen.phases[-1] == "reading data"
    assert seen.done == report.read_bytes
    assert seen.total is not None and seen.done <= seen.total


def test_a_sector_that_cannot_be_read_is_damage_of_what_is_stored_there(repo: Path) -> None:
    pack = next((repo / "packs").glob("*/*.data"))
    key = str(pack.relative_to(repo))

    class BadSector(FaultyStore):
        def read_into(self, key_: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
            if key_ == key and offset <= 5000 < offset + len(target):
                raise StorageError(f"{key_}: input/output error")
            return super().read_into(key_, offset, target, cached_only=cached_only)

    store = BadSector(FileStore(repo))
    handle = RepositoryHandle.on_store(store, index_url=str(repo / "index" / "index.sqlite"))
    report = check_open(handle, DataOptions())
    assert [(problem.where, "input/output" in problem.what) for problem in report.problems] == [(key, True)]
    assert [hit.keys for hit in report.problems[0].hits] == [("w",)]


def test_shards_of_a_reading_are_all_of_it_and_meet_in_the_log(tmp_path: Path) -> None:
    shards = [chosen(DataOptions(shard=PackShard(part, 7))) for part in range(1, 8)]
    assert sorted(key for keys in shards for key in keys) == sorted(PACKS)
    half = chosen(DataOptions(Subset(share=0.5), shard=PackShard(2, 7), dice=random.Random(1)))
    assert set(half) < set(shards[1])
    with pytest.raises(InvalidInputError, match="give one of them"):
        DataOptions(Subset(part=1, parts=7), shard=PackShard(2, 7))
    with Repository.init(tmp_path / "repo", group=None) as repo:
        for seed in range(5):
            commit(repo._handle, {"w": numbers(64, 64, seed=seed)})
        read_packs = [repo.fsck(shard=f"{part}/3").read_packs for part in (1, 2, 3)]
        rows = repo.sql("SELECT count(*), count(read_s) FROM packs").rows
        assert sum(read_packs) == rows[0][0] == rows[0][1] == 10
        assert repo.fsck(read_data=True, max_age_s=3600).read_packs == 0
