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
    shown = ok("-C", place, "plan", "--mesh", "dp=4", "--compare", file)
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
        (["--world", "2", "--compare", "list.json"], 2, "not a restore plan"),
        (["--world", "2", "--storage-bandwidth", "0MB"], 2, "above 0"),
        (["--world", "2", "--storage-bandwidth", "fast"], 2, "not a size"),
        (["nowhere", "--world", "2"], 15, "nowhere"),
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
