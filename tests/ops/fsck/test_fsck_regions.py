"""Every kind of region of a repository is damaged: found, what it hits named exactly, repaired from a copy."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from cas_ckpt.objects.digest import ObjectKind
from cas_ckpt.ops.fsck.check import check_url
from cas_ckpt.ops.fsck.report import Effect, FsckReport, ProblemKind
from tests.builders import commit, new_repository
from tests.ops.fsck.fsck_cases import (
    Region,
    arrays,
    build,
    check,
    copy_of,
    expand,
    flip,
    needs,
    regions,
    repair,
    repair_as_told,
)

DICE = random.Random(7)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fsck") / "repo"
    build(path)
    return path


@pytest.fixture(scope="module")
def model(intact: Path) -> dict[str, dict[bytes, set[str]]]:
    return needs(intact)


@pytest.fixture
def repo(intact: Path, tmp_path: Path) -> Path:
    return copy_of(intact, tmp_path / "repo")


def kinds_of_regions() -> list[str]:
    nodes = [kind.label for kind in ObjectKind if kind is not ObjectKind.CHUNK_PAGE]
    packs = [f"{kind} {part}" for kind in ("data", "meta") for part in ("header", "directory", "trailer")]
    return [*packs, *(f"{node} {part}" for node in nodes for part in ("entry header", "payload"))]


def sampled(intact: Path, name: str, most: int) -> list[Region]:
    found = [region for region in regions(intact) if region.name == name]
    assert found, f"the repository has no {name}"
    return found if len(found) <= most else DICE.sample(found, most)


def wanted_hits(model: dict[str, dict[bytes, set[str]]], objects: set[bytes]) -> dict[str, set[str]]:
    """Commit -> keys that need one of `objects`, by the model."""
    hits = {one: {key for o in objects for key in needed.get(o, ())} for one, needed in model.items()}
    for one, keys in hits.items():
        if bytes.fromhex(one) in objects:
            keys.discard("(layout)")  # without the commit itself there is nothing: that is `**`
    return {one: keys for one, keys in hits.items() if keys}


def found_hits(report: FsckReport, model: dict[str, dict[bytes, set[str]]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for problem in report.problems:
        for hit in problem.hits:
            everything = {key for keys in model[hit.commit].values() for key in keys} - {"(layout)"}
            found.setdefault(hit.commit, set()).update(expand(hit.keys, everything))
    return found


@pytest.mark.parametrize("name", kinds_of_regions())
def test_a_flipped_bit_is_found_and_all_that_it_hits_is_named_exactly(
    repo: Path, intact: Path, model: dict[str, dict[bytes, set[str]]], name: str
) -> None:
    for region in sampled(intact, name, 3):
        at = DICE.randrange(region.start, region.stop)
        flip(repo / region.pack, at, bit=DICE.randrange(8))
        report = check(repo)
        assert [problem.where for problem in report.problems] == [str(region.pack)], (name, at)
        objects = {region.entry.digest} if region.entry else set()
        if region.name.endswith(("directory", "trailer")):
            objects = {other.entry.digest for other in regions(intact) if other.pack == region.pack and other.entry}
        assert found_hits(report, model) == wanted_hits(model, objects), (name, at)
        (repo / region.pack).write_bytes((intact / region.pack).read_bytes())
    assert check(repo).ok


@pytest.mark.parametrize("name", kinds_of_regions())
def test_a_check_of_structure_alone_finds_all_flipped_bits_but_those_of_data(
    repo: Path, intact: Path, name: str
) -> None:
    region = sampled(intact, name, 1)[0]
    flip(repo / region.pack, DICE.randrange(region.start, region.stop))
    wanted = [] if name.startswith("chunk ") else [str(region.pack)]
    assert [problem.where for problem in check_url(repo).problems] == wanted


@pytest.mark.parametrize("name", kinds_of_regions())
def test_a_flipped_bit_is_repaired_from_a_copy_by_the_printed_commands(repo: Path, intact: Path, name: str) -> None:
    region = sampled(intact, name, 1)[0]
    flip(repo / region.pack, DICE.randrange(region.start, region.stop))
    done = repair_as_told(repo, check(repo), other=intact)
    assert done.ok and done.actions
    assert check(repo).problems == ()
    assert not (repo / region.pack).exists()
    aside = repo / "damaged" / region.pack
    assert aside.stat().st_size == (intact / region.pack).stat().st_size


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.9999])
@pytest.mark.parametrize("kind", ["data", "meta"])
def test_a_truncated_pack_is_found_and_repaired(repo: Path, intact: Path, share: float, kind: str) -> None:
    path = max((repo / "packs").glob(f"*/*.{kind}"), key=lambda one: one.stat().st_size)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    report = check(repo)
    assert [(problem.kind, problem.where) for problem in report.problems] == [
        (ProblemKind.PACK, str(path.relative_to(repo)))
    ]
    assert repair_as_told(repo, report, other=intact).ok
    assert check(repo).problems == ()


@pytest.mark.parametrize("kind", ["data", "meta"])
def test_what_only_a_lost_pack_held_is_named_and_brought_back(
    repo: Path, intact: Path, model: dict[str, dict[bytes, set[str]]], kind: str
) -> None:
    paths = sorted((intact / "packs").glob(f"*/*.{kind}"))
    assert paths
    for path in paths:
        key = path.relative_to(intact)
        (repo / key).unlink()
        report = check(repo)
        objects = {region.entry.digest for region in regions(intact) if region.pack == key and region.entry}
        wanted = wanted_hits(model, objects)
        found = found_hits(report, model)
        assert found == wanted, key
        assert report.ok or repair_as_told(repo, report, other=intact).ok
        assert check(repo).problems == ()
        copy_of(intact, repo)


def test_every_checkout_is_bit_exact_after_all_packs_were_damaged_and_repaired(intact: Path, repo: Path) -> None:
    ids = [one for one, needed in needs(intact).items() if len(needed) > 1]
    for path in sorted((repo / "packs").glob("*/*")):
        size = path.stat().st_size
        for at in (70, size // 2, size - 150):
            flip(path, at)
    report = check(repo)
    assert len(report.problems) == len(list((intact / "packs").glob("*/*")))
    assert repair_as_told(repo, report, other=intact).ok
    assert check(repo).problems == ()
    assert arrays(repo, ids) == arrays(intact, ids)


def test_a_damaged_page_of_chunk_ids_names_the_tensor_and_is_repaired(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    zeros = np.broadcast_to(np.float32(0), (257, 1 << 20))
    info = commit(handle, {"zeros": zeros, "w": np.arange(900.0)})
    handle.close()
    intact = copy_of(tmp_path / "repo", tmp_path / "copy")
    pages = [region for region in regions(intact) if region.name == "chunk-page payload"]
    assert len(pages) == 2
    for page in pages:
        flip(tmp_path / "repo" / page.pack, page.start + 40)
    report = check(tmp_path / "repo")
    assert [(hit.commit, hit.keys) for problem in report.problems for hit in problem.hits] == [(info.id, ("zeros",))]
    assert repair_as_told(tmp_path / "repo", report, other=intact).ok
    assert check(tmp_path / "repo").ok


def test_damage_without_another_copy_stays_told_and_the_rest_is_saved(repo: Path, intact: Path) -> None:
    region = next(r for r in regions(intact) if r.name == "chunk payload" and r.stop - r.start > 1 << 20)
    flip(repo / region.pack, region.start)
    before = check(repo)
    done = repair(repo, "chunks", "packs")
    assert not done.ok and "no intact copy" in done.left[0].what
    after = check(repo)
    assert [problem.effect for problem in after.problems] == [Effect.LOST]
    assert {h.commit: h.keys for p in before.problems for h in p.hits} == {
        h.commit: h.keys for p in after.problems for h in p.hits
    }
    assert repair(repo, "chunks", other=intact).ok
    assert check(repo).ok
