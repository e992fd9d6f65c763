"""cas-ckpt plan: asked, shown, written, compared, listed, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders import commit, new_repository, numbers, tensor
from tests.cli.running import call, ok


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan") / "repo"
    handle = new_repository(folder)
    weights = {"wq.weight": numbers(1024, 1024), "norm.weight": numbers(1024)}
    commit(handle, {"model": {key: tensor(each, flavor="torch") for key, each in weights.items()}}, message="first")
    handle.close()
    return folder


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(name))


def test_a_plan_is_shown_in_a_short_table_and_then_comes_from_the_index(place: Path) -> None:
    asked = ("-C", place, "plan", "main", "--world", "6", "--mesh", "dp=3,tp=2")
    first, again = ok(*asked), ok(*asked)
    assert row(first, "plan").split() == ["plan", "new"]
    assert row(again, "plan").split() == ["plan", "kept", "in", "the", "index"]
    assert row(first, "ranks").split() == ["ranks", "6"]
    assert row(first, "amplification").split()[1] == "1.000"
    assert first.splitlines()[2:] == again.splitlines()[2:]


def test_meshes_are_side_by_side(place: Path) -> None:
    shown = ok("-C", place, "plan", "--mesh", "dp=2", "--mesh", "dp=4", "-l")
    assert row(shown, "mesh").split() == ["mesh", "dp=2", "dp=4"]
    assert shown.count("model/wq.weight") == 2


def test_the_mesh_follows_from_the_world(place: Path) -> None:
    assert row(ok("-C", place, "plan", "--world", "5"), "mesh").split() == ["mesh", "dp=5"]


def test_a_plan_is_written_and_compared(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    ok("-C", place, "plan", "--mesh", "dp=2", "-o", file)
    found = json.loads(file.read_text())
    assert (found["mesh"], found["summary"]["world_size"]) == ("dp=2", 2)
    assert found["summary"]["read_bytes"]["balance"] >= 1
    shown = ok("-C", place, "plan", "--mesh", "dp=4", "--beside", file)
    assert row(shown, "mesh").split() == ["mesh", "dp=4", "dp=2"]
    assert row(shown, "plan").endswith("from the file")
    assert call("-C", place, "plan", "--mesh", "dp=2", "-o", file).code == 14
    ok("-C", place, "plan", "--mesh", "dp=8", "-o", file, "--force")
    assert json.loads(file.read_text())["mesh"] == "dp=8"


def test_bandwidths_change_the_estimate_alone(place: Path) -> None:
    usual = ok("-C", place, "plan", "--world", "2")
    slow = ok("-C", place, "plan", "--world", "2", "--storage-bandwidth", "1MB")
    assert "1.00 GB/s" in row(usual, "storage")
    assert "1.00 MB/s" in row(slow, "storage")
    assert row(usual, "read") == row(slow, "read")


def test_json_is_one_plan_or_a_list(place: Path) -> None:
    one = call("-C", place, "plan", "--world", "2", "--json").json
    two = call("-C", place, "plan", "--mesh", "dp=2", "--mesh", "tp=2", "--json").json
    assert one["mesh"] == two[0]["mesh"] == "dp=2"
    assert one["summary"]["read_amplification"] == 1


def test_rules_come_from_a_file(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    file.write_text('{"**/norm*": ["R"]}')
    found = call("-C", place, "plan", "--mesh", "dp=2", "--shapes", file, "--json").json
    placements = {shape["key"]: shape["placements"] for shape in found["shapes"]}
    assert placements == {"model/norm.weight": ["R"], "model/wq.weight": ["S(0)"]}
    assert found["rules"] == {"**/norm*": ["R"]}


def test_kept_plans_are_listed(place: Path) -> None:
    ok("-C", place, "plan", "--mesh", "dp=7")
    assert " dp=7" in ok("-C", place, "plan", "--list")
    assert "dp=7" in {plan["mesh"] for plan in call("-C", place, "plan", "main", "--list", "--json").json}


def test_kept_plans_are_listed_with_their_commit(place: Path) -> None:
    ok("-C", place, "plan", "dp=7")
    listed = next(line.split() for line in ok("-C", place, "plan", "--list").splitlines() if " dp=7 " in line)
    commit = call("-C", place, "log", "--json").json[0]
    assert listed[:4] == [commit["commit_id"][:12], commit["root_id"][:12], "dp=7", "7"]


def test_the_mesh_that_takes_the_least_time_comes_first(place: Path) -> None:
    meshes = ("dp=2", "ddp=9", "dp=8", "dp=2")
    alone = {mesh: call("-C", place, "plan", mesh, "--json").json["summary"]["estimated_s"] for mesh in meshes[1:]}
    assert len({*alone.values()}) == 3
    best = sorted(alone, key=lambda mesh: alone[mesh])
    rows = [line.split() for line in ok("-C", place, "plan", "--best-of", "main", *meshes).splitlines()]
    assert [row[0] for row in rows] == ["mesh", *best]
    assert rows[1][rows[1].index("x") - 1] == "1.00"
    found = call("-C", place, "plan", "main", "--best-of", *meshes, "--json").json
    assert [(each["mesh"], each["summary"]["estimated_s"]) for each in found] == [(mesh, alone[mesh]) for mesh in best]
    assert all(each["reused"] for each in found)
    side = ok("-C", place, "plan", "--compare", *meshes)
    assert [line.split()[0] for line in side.splitlines()] == ["mesh", "dp=2", "ddp=9", "dp=8"]


def test_the_best_of_those_that_fit_is_asked_of_the_index(place: Path) -> None:
    ok("-C", place, "plan", "dp=16")
    ok("-C", place, "plan", "dp=3")
    found = call("-C", place, "plan", "--best-of", "--most-ranks", "4", "--json").json
    assert found
    assert found[0]["summary"]["world_size"] <= 4
    assert "dp=3" in {each["mesh"] for each in found}
    seconds = [each["summary"]["estimated_s"] for each in call("-C", place, "plan", "--best-of", "--json").json]
    assert seconds == sorted(seconds)
    assert len(seconds) > len(found)
    nothing = call("-C", place, "plan", "--best-of", "dp=16", "--most-ranks", "1")
    assert (nothing.code, nothing.out) == (15, "")
    assert "no plan that fits 1 ranks" in nothing.err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "which ranks?"),
        (["--world", "4", "--mesh", "dp=2"], 2, "has 2 ranks, --world says 4"),
        (["--mesh", "nonsense"], 2, "write e.g. dp=96,tp=8"),
        (["--mesh", "pp=2"], 2, "--shapes"),
        (["--world", "2", "--shapes", "nowhere.json"], 15, "no such file"),
        (["--world", "2", "--shapes", "list.json"], 2, "wanted {"),
        (["--world", "2", "--shapes", "text.json"], 2, "no JSON"),
        (["--world", "2", "--shapes", "wide.json"], 2, "model/wq.weight"),
        (["--world", "2", "--beside", "list.json"], 2, "not a restore plan"),
        (["--world", "2", "--storage-bandwidth", "0MB"], 2, "above 0"),
        (["--world", "2", "--storage-bandwidth", "fast"], 2, "not a size"),
        (["nowhere", "--world", "2"], 15, "nowhere"),
        (["main", "other", "dp=2"], 2, "'other' is neither"),
        (["--list", "dp=2"], 2, "exclude one another"),
        (["--compare", "--best-of", "dp=2"], 2, "exclude one another"),
        (["--most-ranks", "4", "dp=2"], 2, "--most-ranks is for"),
        (["--best-of", "dp=2", "--beside", "list.json"], 2, "--beside is for"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_a_code(
    place: Path, tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "text.json").write_text("dp=2")
    (tmp_path / "wide.json").write_text('{"model/wq*": ["S(5)"]}')
    ran = call("-C", place, "plan", *words, cwd=tmp_path)
    assert (ran.code, ran.out) == (code, "")
    assert message in ran.err
