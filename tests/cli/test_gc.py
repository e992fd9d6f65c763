"""`cas-ckpt gc` and `cas-ckpt repack`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cas_ckpt.cli.retention import _rows
from cas_ckpt.ops.gc.plan import GcReport
from cas_ckpt.ops.refs import delete_branch
from tests.builders import commit, new_repository, numbers
from tests.cli.running import call


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A repository with one branch, and what is left of another."""
    with_waste = new_repository(tmp_path / "repo")
    commit(with_waste, {"w": numbers(64, 64, seed=1)})
    commit(with_waste, {"w": numbers(64, 64, seed=2)}, branch="side")
    delete_branch(with_waste, "side", force=True)
    with_waste.close()
    return tmp_path / "repo"


def stored(place: Path) -> int:
    return sum(1 for path in (place / "packs").rglob("*") if path.is_file())


def test_a_dry_run_says_what_would_go_and_nothing_goes(place: Path) -> None:
    ran = call("-C", place, "gc", "-n", "--min-age", "0", "--expire-reflog", "now")
    assert ran.code == 0 and "would be deleted" in ran.out and "2 packs" in ran.out
    assert stored(place) == 4


def test_what_nothing_needs_is_deleted_and_told(place: Path) -> None:
    ran = call("-C", place, "gc", "--min-age", "0", "--expire-reflog", "now", "--json")
    assert ran.code == 0
    assert ran.json["deleted_packs"] == 2 and ran.json["generation"] == 1 and not ran.json["dry_run"]
    assert stored(place) == 2


def test_what_is_only_merged_is_not_said_to_be_deleted(tmp_path: Path) -> None:
    with_many = new_repository(tmp_path / "repo")
    for seed in range(3):
        commit(with_many, {"w": numbers(64, 64, seed=seed)})
    with_many.close()
    for options, would in ((["-n"], "would be "), ([], "")):
        ran = call("-C", tmp_path / "repo", "repack", *options)
        said = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in ran.out.splitlines())
        assert said["not needed"] == "0 B in 0 objects"
        assert said[f"{would}deleted"] == "0 B in 0 packs"
        assert "in 6 small packs into few: 0 B lost" in said[f"{would}merged"]


def test_many_small_packs_that_stay_in_a_bucket_are_told_with_what_merging_them_costs() -> None:
    said = dict(_rows(GcReport(3, dry_run=True, unmerged_packs=600, unmerged_bytes=301_422_581)))
    assert said["not merged"].endswith(
        "in 600 small packs: --merge moves them once, in about 1500 requests, and spares each new host 600"
    )


def test_by_default_a_deleted_branch_can_still_be_brought_back(place: Path) -> None:
    ran = call("-C", place, "gc")
    assert ran.code == 0 and stored(place) == 4


def test_repacking_leaves_one_pack_of_each_kind(place: Path) -> None:
    ran = call("-C", place, "repack", "--json")
    assert ran.code == 0 and ran.json["copied_packs"] == 4
    assert stored(place) == 2


@pytest.mark.parametrize("option", [("--min-age", "soon"), ("--max-unused", "5"), ("--max-repack-bytes", "lots")])
def test_what_cannot_be_read_is_a_usage_error(place: Path, option: tuple[str, str]) -> None:
    ran = call("-C", place, "gc", *option)
    assert ran.code == 2 and option[1] in ran.err
    assert stored(place) == 4


def test_damage_ends_a_collection_with_its_own_exit_code(place: Path) -> None:
    odd = place / "packs" / "00" / f"{'0' * 32}.meta"
    odd.parent.mkdir(exist_ok=True)
    odd.write_bytes(b"no pack")
    ran = call("-C", place, "gc")
    assert ran.code == 13 and "cannot be read" in ran.err and "Traceback" not in ran.err
