"""find: entries of all of history, and the commits that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cas_ckpt import CommitOptions, InvalidInputError, NotFoundError, Repository
from cas_ckpt.index import entries
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import decode_tensor
from cas_ckpt.ops.history.find import parse_dtype, parse_shape
from tests.builders import numbers
from tests.cli.running import call, ok

LARGE = numbers(1024, 1024)
"""Four megabytes: more than one chunk."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three commits on main, one more on `ft`, one that only a tag names, one that was forgotten."""
    path = tmp_path_factory.mktemp("find") / "repo"
    with Repository.init(path) as repo:
        for step in range(3):
            model = {
                "w": torch.full((64, 64), float(step // 2)),
                "b": torch.zeros(64),
                "large": torch.from_numpy(LARGE),
            }
            repo.commit({"model": model, "step": step}, step=step, message=f"s{step}")
        repo.commit({"model": model | {"w": torch.ones(64, 64)}, "lora": torch.ones(700, 2).bfloat16()}, branch="ft")
        repo.commit({"extra": torch.ones(600, dtype=torch.int32)}, branch="side", options=CommitOptions(orphan=True))
        repo.tag("v0", "side")
        repo.delete_branch("side", force=True)
    return path


@pytest.fixture
def repo(place: Path) -> Iterator[Repository]:
    with Repository.open(place) as repo:
        yield repo


def keys_and_counts(found: Any) -> list[tuple[str, int]]:
    return [(one.key, one.num_commits) for one in found]


def test_equal_content_under_one_key_is_one_row_with_the_commits_that_have_it(repo: Repository) -> None:
    found = repo.find("model/w", ref="main")
    ids = {commit.message: commit.id for commit in repo.log("main")}
    assert [(one.first, one.last, one.num_commits) for one in found] == [
        (ids["s0"], ids["s1"], 2), (ids["s2"], ids["s2"], 1),
    ]  # fmt: skip
    assert (found[0].kind, found[0].dtype, found[0].shape, found[0].num_bytes) == ("tensor", "float32", (64, 64), 16384)
    assert found[0].object_id is not None
    assert repo.find("model/b", ref="main")[0].object_id is None


def test_without_a_ref_all_branches_tags_and_pins_are_searched(repo: Repository) -> None:
    assert keys_and_counts(repo.find("extra")) == [("extra", 1)]
    assert repo.find("extra", ref=["main", "ft"]) == []
    assert keys_and_counts(repo.find("model/w")) == [("model/w", 2), ("model/w", 2)]
    assert keys_and_counts(repo.find("model/w", at="main")) == [("model/w", 1)]
    assert keys_and_counts(repo.find("model/*", at=["main", "main~1"])) == [
        ("model/b", 2), ("model/large", 2), ("model/w", 1), ("model/w", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("conditions", "keys"),
    [
        ({"dtype": "bf16"}, ["lora"]),
        ({"dtype": torch.bfloat16}, ["lora"]),
        ({"dtype": np.dtype("int32")}, ["extra"]),
        ({"dtype": "*float*", "shape": "*,2"}, ["lora"]),
        ({"shape": (64,)}, ["model/b"]),
        ({"shape": torch.Size([64, 64])}, ["model/w", "model/w"]),
        ({"min_bytes": 1_000_000}, ["model/large"]),
        ({"max_bytes": 8}, ["step", "step", "step"]),
        ({"keys": ["lora", "extra"], "min_bytes": 2500}, ["lora"]),
        ({"keys": "nothing"}, []),
        ({"world_size": 1, "dtype": "int32"}, ["extra"]),
        ({"world_size": 2}, []),
        ({"axes": "tp"}, []),
    ],
)
def test_conditions_leave_entries_out(repo: Repository, conditions: dict[str, Any], keys: list[str]) -> None:
    assert [one.key for one in repo.find(**conditions)] == keys
    assert bool(repo.find_commits(**conditions)) == bool(keys)


def test_commits_that_hold_such_entries_come_in_the_order_of_the_log(repo: Repository) -> None:
    log = [commit.id for commit in repo.log(all_refs=True)]
    holding = [commit.id for commit in repo.find_commits("model/**", min_bytes=1_000_000)]
    assert holding == [one for one in log if one != repo.resolve("v0")]
    assert [commit.message for commit in repo.find_commits("model/w", ref="main", limit=2)] == ["s2", "s1"]
    assert [commit.id for commit in repo.find_commits(dtype="bfloat16", shape="700,2")] == [repo.resolve("ft")]


def test_commits_that_are_named_count_once_and_in_the_order_of_the_log(repo: Repository) -> None:
    named = ["main~2", "main", "main", "main~1", repo.resolve("main")]
    assert [commit.message for commit in repo.find_commits("model/w", at=named)] == ["s2", "s1", "s0"]
    assert [commit.message for commit in repo.find_commits("model/w", at=named, limit=1)] == ["s2"]
    found = repo.find("model/w", at=named)
    assert [(one.first, one.last, one.num_commits) for one in found] == [
        (repo.resolve("main~2"), repo.resolve("main~1"), 2), (repo.resolve("main"), repo.resolve("main"), 1),
    ]  # fmt: skip


def test_a_limit_takes_the_first_of_the_commits_that_are_found_without_one(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        for step in range(40):
            repo.commit({"step": step, **({"old": torch.ones(700, 2)} if step < 5 or step % 17 == 0 else {})})
        for conditions in ({"keys": "old"}, {"shape": "700,2"}, {"keys": "step"}, {"keys": "none"}, {"at": "main"}):
            every = repo.find_commits(**conditions)  # type: ignore[arg-type]
            for limit in (0, 1, 2, 5, 18, 100):
                assert repo.find_commits(**conditions, limit=limit) == every[:limit]  # type: ignore[arg-type]


def test_a_chunk_of_a_large_tensor_leads_to_what_holds_it(repo: Repository) -> None:
    (large,) = repo.find("model/large")
    assert large.object_id is not None
    node = decode_tensor(repo._handle.read_node(ObjectKind.TENSOR, Digest(bytes.fromhex(large.object_id))))
    assert len(node.chunks) > 1
    for prefix in (large.object_id, large.object_id[:12], node.chunks[1].hex(), node.chunks[1].hex()[:10].upper()):
        assert keys_and_counts(repo.find(object_id=prefix, ref="main")) == [("model/large", 3)]


def test_a_container_of_entries_is_refused_and_one_that_is_an_entry_is_found(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"model": {"w": torch.ones(64, 64)}, "none": {}, "emb": torch.eye(4).to_sparse()})
        root = Digest(bytes.fromhex(repo.log()[0].root))
        ids = {key: repo._handle.index.read(entries.object_of, root, key) for key in ("model", "none", "emb", "")}
        assert [repo.find(object_id=ids[key].hex())[0].key for key in ("none", "emb")] == ["none", "emb"]
        for key in ("model", ""):
            for verb in (repo.find, repo.find_commits):
                with pytest.raises(InvalidInputError, match=r"is a container.*repo.holders"):
                    verb(object_id=ids[key].hex())
        with pytest.raises(InvalidInputError, match="is a container"):
            repo.find("emb", object_id=ids["model"].hex())
        assert repo.find("model/w", object_id=ids["emb"].hex()) == []


def test_an_id_that_is_none_is_refused_and_says_why(repo: Repository) -> None:
    with pytest.raises(NotFoundError, match="whose id begins with"):
        repo.find(object_id="f" * 64)
    with pytest.raises(InvalidInputError, match="at least 4 digits"):
        repo.find(object_id="ab")
    with pytest.raises(InvalidInputError, match="hexadecimal"):
        repo.find(object_id="xyzz")


@pytest.mark.parametrize(
    "conditions",
    [{"shape": "4,x"}, {"shape": "4,-1"}, {"shape": 7}, {"shape": (True,)}, {"shape": "...,4,..."}, {"shape": [4, "4"]},
     {"dtype": 7}, {"dtype": torch.zeros(3)}, {"world_size": 0}, {"at": "main", "ref": "ft"},
     {"at": "main", "axes": "tp"}, {"shape": "9" * 5000}, {"at": []}, {"ref": []}, {"min_bytes": -1}, {"max_bytes": -1},
     {"min_bytes": 10, "max_bytes": 9}],
)  # fmt: skip
def test_conditions_of_another_form_are_refused(repo: Repository, conditions: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        repo.find(**conditions)


def test_a_dtype_that_no_tensor_has_names_those_that_there_are(repo: Repository) -> None:
    with pytest.raises(NotFoundError, match="no tensor has the dtype 'float8_\\*': there are bfloat16, float32, int32"):
        repo.find(dtype="fp8")


def test_what_is_written_for_a_dtype_or_shape_is_understood() -> None:
    names = {
        "bf16": "bfloat16", "torch.half": "float16", "F32": "float32", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
        "U8": "uint8", "BOOL": "bool", "float32": "float32", "float8_e5m2fnuz": "float8_e5m2fnuz",
    }  # fmt: skip
    assert {text: parse_dtype(text) for text in names} == names
    assert parse_dtype(torch.float8_e4m3fn) == "float8_e4m3fn"
    assert parse_dtype(np.dtype("float64")) == "float64"
    for text, shape in (
        ("4096,4096", (4096, 4096)), ("[4, 8]", (4, 8)), ("(4,)", (4,)), ("*,4", (None, 4)), ("...,4", (..., 4)),
        ("", ()), ("[]", ()), ("()", ()),
    ):  # fmt: skip
        assert parse_shape(text) == shape
    assert parse_shape([None, 3, ...]) == (None, 3, ...)


def test_dtypes_that_only_numpy_has_are_found_by_name_by_pattern_and_as_dtypes(tmp_path: Path) -> None:
    fields = np.dtype([("a", "<f4"), ("b", "<i8")])
    arrays: dict[str, Any] = {
        "time": np.arange(600).astype("<M8[ns]"), "big": np.arange(600, dtype=">i4"), "text": np.array(["abc"] * 600),
        "records": np.zeros(300, fields), "long": np.zeros(300, np.longdouble), "plain": np.zeros(300, "<i4"),
    }  # fmt: skip
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit(arrays)
        for entry in repo.ls():
            for given in (entry.dtype, arrays[entry.key].dtype):
                assert [one.key for one in repo.find(dtype=given)] == [entry.key]
                assert len(repo.find_commits(dtype=given)) == 1
        assert [one.key for one in repo.find(dtype="np:<[MU]*")] == ["text", "time"]


def test_forgotten_commits_are_left_out_and_asked_for_by_name_they_say_so(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        for step in range(3):
            repo.commit({"w": torch.full((64, 64), float(step))}, message=f"s{step}")
        first = repo.resolve("main~2")
        repo.forget(revisions=["main~2"])
        assert len(repo.find("w")) == 2
        assert len(repo.find("w", at=first)) == 1
        repo.gc(min_age_s=0, reflog_expire_s=0, max_unused=0)
        assert len(repo.find("w")) == 2
        with pytest.raises(NotFoundError, match="was forgotten"):
            repo.find("w", at=first)


def test_a_commit_that_another_process_made_is_found(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"w": 1})
        with Repository.open(tmp_path / "repo", index_url=str(tmp_path / "other.sqlite")) as other:
            assert len(other.find("w")) == 1
            repo.commit({"w": 2})
            assert len(other.find("w")) == 2
            assert [entry.key for entry in other.ls()] == ["w"]


def test_entries_come_in_the_order_of_names_and_limited(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"b": 1, "a": [10, 11, *range(12)], "a/x": 2})
        keys = [one.key for one in repo.find()]
        assert keys == [entry.key for entry in repo.ls()]
        assert [one.key for one in repo.find(limit=3)] == keys[:3]
        assert Repository.init(tmp_path / "empty").find() == []


def test_the_command_line_finds_the_same(place: Path, repo: Repository) -> None:
    rows = ok("-C", place, "find", "model/w", "--in", "main").splitlines()
    found = repo.find("model/w", ref="main")
    assert rows[0].split() == ["kind", "dtype", "shape", "size", "object", "commits", "first", "last", "key"]
    assert [row.split()[-1] for row in rows[1:]] == ["model/w"] * 2
    assert found[0].first[:12] in rows[1]
    as_json = call("-C", place, "find", "--dtype", "bf16", "--shape", "700,*", "--json")
    assert [(one["key"], one["shape"], one["num_commits"]) for one in as_json.json] == [("lora", [700, 2], 1)]
    lines = ok("-C", place, "find", "--min-size", "1MB", "--commits", "--in", "main", "-n", "2").splitlines()
    assert [line.split()[0] for line in lines] == [commit.id[:12] for commit in repo.log("main", limit=2)]
    nothing = call("-C", place, "find", "nothing/**")
    assert (nothing.code, nothing.out) == (0, "")
    assert call("-C", place, "find", "--dtype", "f4").code == 15
    assert call("-C", place, "find", "--shape", "a,b").code == 2


def test_a_condition_that_is_empty_or_zero_is_one(place: Path) -> None:
    for words in (["--max-size", "0"], ["--shape", ""]):
        found = call("-C", place, "find", *words)
        assert (found.code, found.out) == (0, "")
    assert call("-C", place, "find", "--dtype", "").code == 15
    assert call("-C", place, "find", "--object", "").code == 2
    both = call("-C", place, "find", "--at", "main", "--in", "main")
    assert both.code == 2
    assert "--at says which commits are meant: give it without --in, --world-size and --axis" in both.err
