"""Questions about history, and names that move, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cas_ckpt import CommitOptions, Lineage, Repository, clock
from tests.cli.running import call, ok

NOON = 1_795_262_400.0
"""2026-11-21 12:00 UTC."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository that nobody changes: four commits on main, two on ft, joined by the last of main."""
    folder = tmp_path_factory.mktemp("read") / "repo"
    hour = [0]
    with clock.fixed(lambda: NOON + 3600 * hour[0]), Repository.init(folder) as repo:
        repo.commit(state(0), message="first", step=1, metrics={"loss": 2.5}, options=CommitOptions(author="ann"))
        repo.branch("ft")
        hour[0] = 1
        repo.commit(
            state(1), message="second", step=2, metrics={"loss": 1.5, "acc": 0.5}, options=CommitOptions(author="ann")
        )
        hour[0] = 2
        Repository.open(folder).commit(
            state(2), message="tuned", branch="ft", metrics={"loss": 1.0}, options=CommitOptions(
                author="bob", lineage=[Lineage("fine-tune-of", "main~1", {"data": "v2"})],
                provenance={"data_version": "v2"},
            ),
        )  # fmt: skip
        hour[0] = 3
        repo.commit(state(3), message="third", step=3, metrics={"loss": 1.25}, options=CommitOptions(author="ann"))
        hour[0] = 4
        repo.commit(state(4), message="joined", options=CommitOptions(author="bob", parents=["ft"]))
        repo.tag("v1", "main~1", message="as released\nwith more")
        repo.pin("main~2", name="paper", reason="table 2")
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A repository to change."""
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit(state(0), message="first")
        repo.commit(state(1), message="second")
    return tmp_path / "repo"


def test_a_log_of_a_range_goes_forward_too(place: Path) -> None:
    def said(*words: str) -> list[str]:
        return [commit["message"] for commit in call("--json", "-C", place, "log", *words).json]

    assert said("main~3..main", "--grep", "^(second|joined)$", "--reverse") == ["second", "joined"]
    assert said("^main~3", "main", "--first-parent", "--reverse") == ["second", "third", "joined"]
    assert call("-C", place, "log", "--graph", "--reverse").code == 2


def state(number: int) -> dict[str, object]:
    return {"model": {"w": torch.arange(3000.0), "b": torch.full((10,), float(number % 3))}, "step": number}


def ids(place: Path) -> dict[str, str]:
    with Repository.open(place) as repo:
        return {commit.message: commit.id for commit in repo.log(all_refs=True)}


def subjects(place: Path, *words: str) -> list[str]:
    return [commit["message"] for commit in json.loads(ok("-C", place, "log", "--json", *words))]


@pytest.mark.parametrize(("words", "wanted"), [
    (["--metric", "loss<1.5"], ["third", "tuned"]),
    (["--metric", "loss<=1.5", "--metric", "acc>0"], ["second"]),
    (["--author", "bob"], ["joined", "tuned"]),
    (["--step", "2"], ["second"]),
    (["--step", "2:"], ["third", "second"]),
    (["--key", "model/b", "--first-parent"], ["joined", "third", "second", "first"]),
    (["--key", "model/w"], ["first"]),
    (["--since", "2026-11-21T14:00"], ["joined", "third", "tuned"]),
    (["--until", "2026-11-21T13:00", "-n", "1"], ["second"]),
    (["--since", "9999d", "--author", "nobody"], []),
])  # fmt: skip
def test_a_log_shows_the_commits_that_meet_its_conditions(place: Path, words: list[str], wanted: list[str]) -> None:
    assert subjects(place, *words) == wanted


def test_a_log_without_a_hit_says_so(place: Path) -> None:
    assert call("-C", place, "log", "--author", "nobody").err == "no such commits\n"
    assert call("-C", place, "log", "main..main").err == "no such commits\n"


def test_a_condition_of_another_form_is_an_error_of_usage(place: Path) -> None:
    for words in (["--metric", "loss"], ["--since", "soon"], ["--step", "x"]):
        assert call("-C", place, "log", *words).code == 2


def test_a_graph_of_some_commits_joins_what_was_left_out(place: Path) -> None:
    found = ids(place)
    assert ok("-C", place, "log", "--graph", "--metric", "loss>1.25").splitlines() == [
        f"* {found['second'][:12]} (pin: paper) [2] second loss=1.5 acc=0.5",
        f"* {found['first'][:12]} [1] first loss=2.5",
    ]
    assert ok("-C", place, "log", "--graph", "--author", "bob", "--key", "step").splitlines() == [
        f"* {found['joined'][:12]} (main) joined",
        f"* {found['tuned'][:12]} (ft) tuned loss=1",
    ]


def test_show_tells_where_a_commit_comes_from_and_what_names_it(place: Path) -> None:
    found = ids(place)
    lines = ok("-C", place, "show", "ft").splitlines()
    assert f"Lineage: fine-tune-of {found['first'][:12]} {{'data': 'v2'}}" in lines
    assert "Made:    data_version v2" in lines
    assert "Ranks:   1" in lines
    tagged = ok("-C", place, "show", "v1").splitlines()
    assert tagged[0] == f"commit {found['third']} (tag: v1)"
    assert "Note:    refs/tags/v1: as released\\x0awith more" in tagged
    assert json.loads(ok("-C", place, "show", "ft", "--json"))["provenance"]["data_version"] == "v2"


def test_merge_base_prints_where_histories_meet(place: Path) -> None:
    found = ids(place)
    assert ok("-C", place, "merge-base", "main~1", "ft") == f"{found['first']}\n"
    assert json.loads(ok("-C", place, "merge-base", "main", "ft", "--json")) == [found["tuned"]]
    assert call("-C", place, "merge-base", "--is-ancestor", "ft", "main").code == 0
    assert call("-C", place, "merge-base", "--is-ancestor", "main", "ft").code == 1
    assert call("-C", place, "merge-base", "main").code == 2


def test_merge_base_of_strangers_is_empty(own: Path) -> None:
    with Repository.open(own) as repo:
        repo.commit(state(2), branch="alone", options=CommitOptions(orphan=True))
    assert call("-C", own, "merge-base", "alone", "main") == call("-C", own, "merge-base", "--all", "main", "alone")
    assert call("-C", own, "merge-base", "alone", "main").code == 1


def test_metrics_are_a_table(place: Path) -> None:
    found = ids(place)
    lines = [line.split() for line in ok("-C", place, "metrics").splitlines()]
    assert lines == [
        ["commit", "step", "acc", "loss", "message"],
        [found["third"][:12], "3", "-", "1.25", "third"],
        [found["tuned"][:12], "-", "-", "1", "tuned"],
        [found["second"][:12], "2", "0.5", "1.5", "second"],
        [found["first"][:12], "1", "-", "2.5", "first"],
    ]
    named = json.loads(ok("-C", place, "metrics", "--name", "acc", "--json"))
    assert [(each["commit_id"], each["metrics"]) for each in named] == [(found["second"], {"acc": 0.5})]


def test_metrics_that_are_not_finite_are_shown_and_are_text_in_json(own: Path) -> None:
    with Repository.open(own) as repo:
        repo.commit(state(2), message="away", metrics={"loss": float("nan"), "norm": float("inf")})
    assert "loss=nan norm=inf" in ok("-C", own, "log", "-n", "1", "--oneline")
    for verb in ("log", "metrics"):
        (shown,) = json.loads(ok("-C", own, verb, "-n", "1", "--json"), parse_constant=pytest.fail)
        assert shown["metrics"] == {"loss": "nan", "norm": "inf"}
    assert json.loads(ok("-C", own, "show", "--json"), parse_constant=pytest.fail)["commit"]["metrics"]["loss"] == "nan"


def test_best_prints_the_best_commits(place: Path) -> None:
    found = ids(place)
    assert ok("-C", place, "best", "loss").splitlines()[1].split() == [found["tuned"][:12], "-", "1", "tuned"]
    largest = ok("-C", place, "best", "loss:max", "-n", "2").splitlines()
    assert [line.split()[-1] for line in largest[1:]] == ["first", "second"]
    of_one = json.loads(ok("-C", place, "best", "loss:min", "-b", "v1", "--json"))
    assert [each["commit_id"] for each in of_one] == [found["third"]]
    assert call("-C", place, "best", "los").code == 15


def test_lineage_is_told_both_ways(place: Path) -> None:
    found = ids(place)
    edge = f"  {found['tuned'][:12]} fine-tune-of {found['first'][:12]} {{'data': 'v2'}}"
    first = found["first"][:12]
    assert ok("-C", place, "lineage", "ft").splitlines()[:2] == [f"{found['tuned'][:12]} comes from:", edge]
    assert ok("-C", place, "lineage", first).splitlines() == [
        f"{first} comes from nothing that is known", f"from {first} come:", edge,
    ]  # fmt: skip
    assert json.loads(ok("-C", place, "lineage", "ft", "--json"))["origins"][0]["meta"] == {"data": "v2"}


def test_a_branch_is_renamed_deleted_and_brought_back(own: Path) -> None:
    ok("-C", own, "branch", "ft")
    head = ok("-C", own, "resolve")[:12]
    assert ok("-C", own, "branch", "-m", "ft", "tuned") == f"branch ft is tuned now ({head})\n"
    assert ok("-C", own, "branch", "-d", "tuned") == f"Deleted branch tuned (was {head})\n"
    assert ok("-C", own, "branch", "--undelete", "tuned") == f"branch tuned is {head} again\n"
    assert list(json.loads(ok("-C", own, "branch", "--json"))) == ["main", "tuned"]
    moves = [line.split("  ")[-1] for line in ok("-C", own, "reflog", "tuned").splitlines()]
    assert moves == ["undeleted", "deleted", "renamed from ft"]
    assert call("-C", own, "branch", "-m", "tuned").code == 2
    assert call("-C", own, "branch", "-d", "--undelete", "tuned").code == 2
    assert call("-C", own, "branch", "--undelete", "nothing").code == 15


def test_a_branch_is_reset_by_force_and_the_reflog_tells(own: Path) -> None:
    before = ok("-C", own, "resolve").strip()
    ok("-C", own, "branch", "--force", "main", "main~1")
    moves = json.loads(ok("-C", own, "reflog", "--json"))
    assert [move["action"] for move in moves] == ["branch: set to main~1", "commit: second", "commit: first"]
    assert moves[0]["old_commit_id"] == before
    ok("-C", own, "branch", "--force", "main", before)
    assert ok("-C", own, "resolve").strip() == before


def test_tags_have_messages_and_names_that_can_be_changed(own: Path) -> None:
    head = ok("-C", own, "resolve")[:12]
    ok("-C", own, "tag", "-a", "v1", "-m", "as released")
    ok("-C", own, "tag", "v0", "main~1")
    assert ok("-C", own, "tag").splitlines()[1] == f"v1  {head}  as released"
    ok("-C", own, "tag", "--move", "v1", "v1.0")
    ok("-C", own, "tag", "-d", "v1.0")
    assert ok("-C", own, "tag", "--undelete", "v1.0") == f"tag v1.0 is {head} again\n"
    assert ok("-C", own, "tag").splitlines()[1] == f"v1.0  {head}  as released"
    assert call("-C", own, "tag", "-a", "v2").code == 2


def test_pins_are_set_listed_and_taken_away(own: Path) -> None:
    head = ok("-C", own, "resolve")[:12]
    assert ok("-C", own, "pin", "main", "--name", "paper", "--reason", "table 2") == f"pin paper is {head}\n"
    assert ok("-C", own, "pin") == f"paper  {head}  table 2\n"
    assert json.loads(ok("-C", own, "pin", "--json"))[0]["reason"] == "table 2"
    assert ok("-C", own, "log", "--oneline", "-n", "1") == f"{head} (main, pin: paper) second\n"
    assert ok("-C", own, "unpin", "paper") == f"Deleted pin paper (was {head})\n"
    assert (ok("-C", own, "pin"), call("-C", own, "unpin", "paper").code) == ("", 15)
    ok("-C", own, "pin", "--undelete", "paper")
    assert json.loads(ok("-C", own, "pin", "main~1", "--json"))["name"].startswith("pin-")


def test_a_dry_run_deletes_no_name(own: Path) -> None:
    head = ok("-C", own, "resolve")[:12]
    ok("-C", own, "branch", "ft"), ok("-C", own, "tag", "v1"), ok("-C", own, "pin", "--name", "p", "main")
    assert ok("-C", own, "branch", "-n", "-d", "ft") == f"Would delete branch ft ({head})\n"
    assert ok("-C", own, "tag", "-d", "--dry-run", "v1") == f"Would delete tag v1 ({head})\n"
    assert ok("-C", own, "unpin", "-n", "p") == f"Would delete pin p ({head})\n"
    assert call("-C", own, "branch", "-nd", "nothing").code == 15
    for name in ("ft", "v1", "refs/pins/p"):
        assert ok("-C", own, "resolve", name)[:12] == head


def test_an_import_says_what_it_comes_from(own: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "tuned.pt")
    words = ["--branch", "ft", "--lineage", "fine-tune-of=main~1", "--parent", "main", "--provenance", "--json"]
    made = json.loads(ok("-C", own, "import", tmp_path / "tuned.pt", *words))
    with Repository.open(own) as repo:
        assert made["parent_ids"] == [repo.resolve("main")]
        assert made["lineage"] == [{"kind": "fine-tune-of", "target_id": repo.resolve("main~1"), "meta": None}]
        assert "python" in repo.show("ft").provenance
    assert call("-C", own, "import", tmp_path / "tuned.pt", "--lineage", "fine-tune-of").code == 2


def test_what_commits_share_is_told(place: Path, tmp_path: Path) -> None:
    found = ids(place)
    held = [each["message"] for each in json.loads(ok("-C", place, "holders", "main", "model/w", "--json"))]
    assert sorted(held) == ["first", "joined", "second", "third", "tuned"]
    assert ok("-C", place, "holders", "main", "model").splitlines()[0].split()[2] == "joined"
    assert call("-C", place, "holders", "main", "step").code == 2
    assert ok("-C", place, "unique", "ft") == ("only ft leads to 0 commits, 0 B in 0 chunks and 0 nodes, 0 B stored\n")
    freed = ok("-C", place, "freed", "main", "ft~1").splitlines()
    assert freed[0].startswith("forgetting would free 1 commits, 0 B in 0 chunks and ")
    assert freed[1:] == [f"{found['joined'][:12]} would stay: a branch, tag or pin names it"]
    assert json.loads(ok("-C", place, "freed", "ft~1", "--json"))["commit_ids"] == [found["first"]]
    torch.save({"model": {"w": torch.arange(3000.0)}}, tmp_path / "w.pt")
    near = json.loads(ok("-C", place, "nearest", "--file", tmp_path / "w.pt", "-n", "1", "--json"))
    assert (near[0]["share"], near[0]["num_bytes"]) == (1.0, 12000)
    assert ok("-C", place, "nearest", "main") == ""
    assert call("-C", place, "nearest").code == 2
