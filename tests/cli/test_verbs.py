"""The verbs of the command line on real repositories."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.core.records import CommitInfo
from tests.cli.running import Ran, call, ok, run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository that nobody changes: two commits on main, one on ft, a tag."""
    folder = tmp_path_factory.mktemp("read") / "repo"
    with Repository.init(folder) as repo:
        repo.commit(
            state(0), message="first\n\nat length", step=1, metrics={"loss": 2.5}, options=CommitOptions(author="ann")
        )
        repo.tag("v1")
        repo.branch("ft")
        repo.commit(state(1), message="second", options=CommitOptions(author="ann"))
    with Repository.open(folder) as other:
        other.commit(state(2), message="tuned", branch="ft", options=CommitOptions(author="bob"), meta={"lr": 0.1})
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A repository to change."""
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit(state(0), message="first")
        repo.commit(state(1), message="second")
    return tmp_path / "repo"


def state(number: int) -> dict[str, object]:
    weight = torch.arange(3000.0).reshape(30, 100)
    return {"model": {"w": weight, "b": torch.full((10,), float(number))}, "step": number}


def log_of(place: Path, ref: str = "main") -> list[CommitInfo]:
    with Repository.open(place) as repo:
        return repo.log(ref)


def test_init_makes_a_repository_where_it_is_told(tmp_path: Path) -> None:
    assert ok("init", "runs/ckpts", "-b", "trunk", cwd=tmp_path).startswith("Made an empty repository in runs/ckpts")
    with Repository.open(tmp_path / "runs" / "ckpts") as repo:
        assert repo.default_branch == "trunk"
    (tmp_path / "here").mkdir()
    assert ok("init", "-q", cwd=tmp_path / "here") == ""
    assert json.loads(ok("init", "--json", tmp_path / "j"))["default_branch"] == "main"


def test_a_repository_is_found_from_any_folder_below_it(place: Path) -> None:
    assert ok("resolve", cwd=place / "packs") == ok("-C", place, "resolve")


def test_a_repository_is_found_by_the_environment(place: Path, tmp_path: Path) -> None:
    wanted = ok("-C", place, "resolve")
    assert ok("resolve", cwd=tmp_path, CAS_CKPT_REPO=str(place)) == wanted
    assert ok("resolve", cwd=tmp_path, CAS_CKPT_REPO=place.as_uri()) == wanted
    index = tmp_path / "index.sqlite"
    assert ok("-C", place, "resolve", wanted[:9], CAS_CKPT_INDEX=str(index)) == wanted
    assert index.exists()


def test_the_log_reads_like_that_of_git(place: Path) -> None:
    second, first = log_of(place)
    lines = ok("-C", place, "log").splitlines()
    assert lines[0] == f"commit {second.id} (main)"
    assert lines[1] == "Author:  ann"
    assert "    second" in lines
    assert f"commit {first.id} (tag: v1)" in lines
    assert lines[-3:] == ["    first", "", "    at length"]
    assert {"Step:    1", "Metrics: loss=2.5"} < set(lines)


def test_the_log_has_one_line_for_each_commit_if_that_is_wanted(place: Path) -> None:
    second, first = log_of(place)
    wanted = [f"{second.short_id} (main) second", f"{first.short_id} (tag: v1) [1] first loss=2.5"]
    assert ok("-C", place, "log", "--oneline").splitlines() == wanted
    assert ok("-C", place, "log", "--oneline", "-n", "1").splitlines() == wanted[:1]
    assert ok("-C", place, "log", "--oneline", "main~1").splitlines() == wanted[1:]


def test_the_log_is_drawn_as_a_graph(place: Path) -> None:
    tuned, (second, first) = log_of(place, "ft")[0], log_of(place)
    assert ok("-C", place, "log", "--graph", "--all").splitlines() == [
        f"* {tuned.short_id} (ft) tuned",
        f"| * {second.short_id} (main) second",
        "|/",
        f"* {first.short_id} (tag: v1) [1] first loss=2.5",
    ]


def test_the_log_as_json_has_all_that_commits_say(place: Path) -> None:
    found = json.loads(ok("-C", place, "log", "--json", "ft"))
    assert [(c["message"], c["refs"], c["meta"]) for c in found] == [
        ("tuned", ["ft"], {"lr": 0.1}),
        ("first\n\nat length", ["tag: v1"], None),
    ]
    assert found[0]["parent_ids"] == [found[1]["commit_id"]]
    assert found[0]["stats"]["num_entries"] == 3


def test_a_repository_without_commits_has_an_empty_log(tmp_path: Path) -> None:
    ok("init", tmp_path / "repo")
    assert call("-C", tmp_path / "repo", "log") == Ran(0, "", "no commits yet\n")
    assert json.loads(ok("-C", tmp_path / "repo", "log", "--json")) == []


def test_show_tells_what_a_state_consists_of(place: Path) -> None:
    text = ok("-C", place, "show", "ft")
    assert text.startswith(f"commit {log_of(place, 'ft')[0].id} (ft)\nAuthor:  bob\n")
    assert "Meta:    {'lr': 0.1}" in text
    assert [line.split() for line in text.splitlines()[-3:]] == [
        ["name", "entries", "tensors", "size"],
        ["model", "2", "2", "12.0", "KB"],
        ["step", "1", "0", "1", "B"],
    ]
    assert json.loads(ok("-C", place, "show", "v1", "--json"))["tags"] == ["v1"]


def test_ls_lists_keys(place: Path) -> None:
    assert ok("-C", place, "ls").split() == ["model/b", "model/w", "step"]
    assert ok("-C", place, "ls", "ft", "model/w", "step").split() == ["model/w", "step"]
    assert ok("-C", place, "ls", "-l", "main", "model/*").splitlines() == [
        "tensor  float32  [10]          40 B  model/b",
        "tensor  float32  [30, 100]  12.0 KB  model/w",
    ]
    assert [entry["shape"] for entry in json.loads(ok("-C", place, "ls", "--json"))] == [[10], [30, 100], None]


def test_read_prints_a_part(place: Path) -> None:
    assert ok("-C", place, "read", "main", "step") == "1\n"
    assert ok("-C", place, "read", "main", "model/w", "--region", "2:4,:3") == (
        "tensor([[200., 201., 202.],\n        [300., 301., 302.]])\n"
    )
    found = json.loads(ok("-C", place, "read", "main", "model/w", "--region", "29,98:", "--json"))
    assert found == {"key": "model/w", "dtype": "float32", "value": [2998.0, 2999.0]}


def test_read_writes_a_file(place: Path, tmp_path: Path) -> None:
    for name in ("w.npy", "w.pt"):
        assert ok("-C", place, "read", "main", "model/w", "-o", tmp_path / name) == ""
    assert np.load(tmp_path / "w.npy").shape == (30, 100)
    assert torch.load(tmp_path / "w.pt", weights_only=True).shape == (30, 100)
    assert call("-C", place, "read", "main", "model/w", "-o", tmp_path / "w.npy").code == 14
    ok("-C", place, "read", "main", "model/b", "-f", "-o", tmp_path / "w.npy")
    assert np.load(tmp_path / "w.npy").shape == (10,)


def test_branches_are_made_listed_and_deleted(own: Path) -> None:
    second, first = log_of(own)
    assert ok("-C", own, "branch", "ft", "main~1") == f"branch ft is {first.short_id}\n"
    assert ok("-C", own, "branch") == f"  ft    {first.short_id}\n* main  {second.short_id}\n"
    assert json.loads(ok("-C", own, "branch", "--json")) == {"ft": first.id, "main": second.id}
    assert ok("-C", own, "branch", "-f", "ft") == f"branch ft is {second.short_id}\n"
    for name, shown in (("ft", "* ft"), ("main", "* main")):
        ok("-C", own, "branch", "--default", name)
        assert shown in ok("-C", own, "branch") and f"On branch {name}\n" in ok("-C", own, "status")
    assert call("-C", own, "branch", "--default", "ft", "main").code == 2
    assert ok("-C", own, "branch", "-d", "ft") == f"Deleted branch ft (was {second.short_id})\n"
    assert ok("-C", own, "branch") == f"* main  {second.short_id}\n"


def test_tags_are_made_listed_and_deleted(own: Path) -> None:
    second, first = log_of(own)
    assert ok("-C", own, "tag", "v1", "HEAD~1") == f"tag v1 is {first.short_id}\n"
    assert json.loads(ok("-C", own, "tag", "v2", "--json")) == {"tag": "v2", "commit_id": second.id}
    assert ok("-C", own, "tag").split() == ["v1", first.short_id, "v2", second.short_id]
    assert json.loads(ok("-C", own, "tag", "-d", "v1", "v2", "--json")) == {"v1": first.id, "v2": second.id}
    assert ok("-C", own, "tag") == ""


def test_stats_and_du_tell_sizes(place: Path) -> None:
    stats = json.loads(ok("-C", place, "stats", "--json"))
    assert (stats["num_commits"], stats["num_branches"], stats["num_tags"]) == (3, 2, 1)
    assert ok("-C", place, "stats").startswith("commits   3\n")
    assert "unique   " in ok("-C", place, "stats", "main")
    lines = [line.split() for line in ok("-C", place, "du", "-b", "--by", "tensor", "main").splitlines()]
    assert lines == [
        ["total", "new", "unique", "shared", "name"],
        ["40", "0", "0", "40", "model/b"],
        ["12000", "0", "0", "12000", "model/w"],
    ]
    assert [row["name"] for row in json.loads(ok("-C", place, "du", "--by", "branch", "--json"))] == ["ft", "main"]
    assert [line.split()[-1] for line in ok("-C", place, "du").splitlines()[1:]] == ["tuned", "second", "first"]


def test_export_gives_the_names_of_a_key_map_and_tells_which_it_took_not(own: Path, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(
        json.dumps([{"rename": "model/w", "to": "model/weight"}, {"cast": "model/weight", "to": "bfloat16"}])
    )
    ran = run(
        "-C", own, "export", "main", tmp_path / "x.safetensors", "-k", "model", "--key-map", tmp_path / "map.json"
    )
    assert (ran.code, "no rule of the key map took model/b: left as they are" in ran.err) == (0, True)
    found = load_file(tmp_path / "x.safetensors")
    assert torch.equal(found["weight"], torch.arange(3000.0).reshape(30, 100).bfloat16())
    assert found.keys() == {"weight", "b"}
    (tmp_path / "none.json").write_text('{"rename": "a"}')
    for text, message in [
        ("hf_to_torchtitan", "give a file, or one of llama3_hf_to_torchtitan"),
        ("hf_to_megatron:num_heads=5,num_kv_heads=2", "5 heads are not 2 groups"),
        (str(tmp_path / "none.json"), "holds no list of rules"),
    ]:
        ran = call("-C", own, "export", "main", tmp_path / "y.safetensors", "--key-map", text)
        assert (ran.code, message in ran.err.replace("\n", " ")) == (2, True)
    ready = "qwen3_torchtitan_to_hf:at=model"
    assert call("-C", own, "checkout", "--to", tmp_path / "y.safetensors", "-k", "model", "--key-map", ready).code == 0


def test_a_model_goes_out_and_comes_in_as_the_same_state(own: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    assert "Wrote 2 tensors, 12.0 KB" in ok("-C", own, "export", "main", file, "-k", "model")
    assert call("-C", own, "export", "main", file, "-k", "model").code == 14
    said = ok("-C", own, "import", file, "-m", "base", "-b", "in", "--step", "7", "--metric", "loss=0.5")
    (commit,) = log_of(own, "in")
    assert said.splitlines()[0] == f"[in {commit.short_id}] base"
    assert (commit.step, commit.metrics) == (7, {"loss": 0.5})
    with Repository.open(own) as repo:
        assert torch.equal(repo.read("in", "model/w"), repo.read("main", "model/w"))
    ok("-C", own, "checkout", "main", "--to", tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 1
    assert said.splitlines()[1] == " follows nothing: a history of its own"
    asks = call("-C", own, "import", tmp_path / "state.pt")
    assert asks.code == 2 and "--onto main" in asks.err and "--branch NAME" in asks.err
    head = log_of(own)[0]
    said = ok("-C", own, "import", tmp_path / "state.pt", "--onto", "main")
    assert log_of(own)[0].parents == (head.id,) and said.splitlines()[1] == f" follows {head.short_id}"
    made = json.loads(ok("-C", own, "import", tmp_path / "state.pt", "-b", "fork", "--onto", "main~1", "--json"))
    assert made["parent_ids"] == [head.id]
    assert "did you mean 'main'" in call("-C", own, "import", tmp_path / "state.pt", "-b", "mian").err


def test_a_damaged_index_is_made_anew(own: Path) -> None:
    before = ok("-C", own, "log")
    index = own / "index" / "index.sqlite"
    index.write_bytes(index.read_bytes()[:4096] + bytes(8192))
    assert ok("-C", own, "index", "rebuild").endswith("with 2 commits\n")
    assert ok("-C", own, "log") == before
    assert ok("-C", own, "index", "rebuild", "-q") == ""
    assert json.loads(ok("-C", own, "index", "rebuild", "--json"))["damaged"] == []


def test_a_rebuild_names_damaged_packs_and_keeps_the_rest(own: Path) -> None:
    pack = next(path for path in sorted(own.glob("packs/**/*")) if path.is_file())
    pack.write_bytes(pack.read_bytes()[:-10])
    ran = call("-C", own, "index", "rebuild")
    assert ran.code == 3
    assert pack.name in ran.err
    assert ran.out.startswith("Indexed ")


def test_a_store_is_checked() -> None:
    said = ok("store", "check", "memory://")
    assert said.splitlines()[-1].endswith(" rules, 0 broken")
    assert all(line.startswith(("passed ", "skipped ")) for line in said.splitlines()[:-1])
    assert ok("store", "check", "-q", "memory://") == ""
    outcomes = {check["outcome"] for check in json.loads(ok("store", "check", "--json", "memory://"))}
    assert outcomes <= {"passed", "skipped"}


def test_options_that_all_verbs_share_come_before_or_after_the_verb(place: Path) -> None:
    assert ok("-C", place, "--json", "branch") == ok("-C", place, "branch", "--json")


def test_folders_of_distributed_checkpoints_go_out_and_in(own: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    said = ok("-C", own, "export", "main", folder, "--format", "dcp", "--max-shard-size", "10KB")
    assert "Wrote 2 tensors, 12.0 KB, in 3 files" in said
    assert call("-C", own, "export", "main", folder, "--format", "dcp").code == 14
    ok("-C", own, "import", folder, "-b", "in")
    assert log_of(own, "in")[0].root == log_of(own)[0].root
    (folder / ".metadata").write_bytes(b"cposix\nsystem\n.")
    refused = call("-C", own, "import", folder, "--onto", "main")
    assert refused.code == 2 and "wants to run 'posix.system'" in refused.err
