"""repo.sql: the repository as it is now, and answers as people use them."""

from __future__ import annotations

import builtins
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.errors import InvalidInputError, TooLargeError
from cas_ckpt.index import remembered
from tests.index.manifest_rows import make_older

ENTRIES = "SELECT key, num_bytes FROM refs r JOIN entries e USING (commit_no) WHERE r.name = :ref ORDER BY key"


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"w": torch.ones(1000), "n": 1}, step=1, metrics={"loss": 2.0})
        yield repo


def test_it_answers_what_was_committed_a_moment_ago(repo: Repository) -> None:
    assert repo.sql(ENTRIES, ref="main").rows == (("n", 1), ("w", 4000))
    commit = repo.commit({"w": torch.ones(1000), "m": torch.ones(500)}, step=2)
    assert [key for key, _ in repo.sql(ENTRIES, ref="main")] == ["m", "w"]
    assert repo.sql("SELECT step FROM commits WHERE commit_id = :c", c=commit).rows == ((2,),)


def test_commits_and_refs_of_another_process_are_known(repo: Repository, tmp_path: Path) -> None:
    with Repository.open(repo.url, index_url=str(tmp_path / "other.sqlite")) as other:
        other.commit({"w": torch.zeros(1000)}, branch="side", options=CommitOptions(orphan=True))
        other.tag("v1", "main")
        other.pin("side", name="kept")
    names = "SELECT kind, name FROM refs ORDER BY kind, name"
    assert repo.sql(names).rows == (("branch", "main"), ("branch", "side"), ("pin", "kept"), ("tag", "v1"))
    assert repo.sql(ENTRIES, ref="side").rows == (("w", 4000),)
    with Repository.open(repo.url, index_url=str(tmp_path / "other.sqlite")) as other:
        other.delete_branch("side", force=True)
        other.unpin("kept")
    assert repo.sql(names).rows == (("branch", "main"), ("tag", "v1"))


def test_an_index_that_may_not_be_written_answers_as_the_repository_is_now(repo: Repository, tmp_path: Path) -> None:
    older = tmp_path / "older.sqlite"
    repo.sql("SELECT 1")
    place = Path(repo.url.removeprefix("file://")) / INDEX_PATH
    shutil.copy(place, older)
    shutil.copy(f"{place}-wal", f"{older}-wal")
    repo.commit({"x": 1}, branch="late", options=CommitOptions(create=True))
    before = older.read_bytes()
    with Repository.open(repo.url, index_url=str(older), read_only=True) as again:
        assert again.sql("SELECT name FROM refs ORDER BY name").rows == (("late",), ("main",))
        assert again.sql(ENTRIES, ref="late").rows == (("x", 1),)
    assert older.read_bytes() == before


REFS = "SELECT r.name, m.name = 'main' FROM refs r LEFT JOIN refs m ON m.commit_no = r.commit_no AND m.name = 'main'"


def test_a_ref_that_others_moved_is_known_to_an_index_that_may_not_be_written(repo: Repository, tmp_path: Path) -> None:
    repo.commit({"n": 2})
    repo.tag("v1", "main~1")
    assert repo.sql(f"{REFS} ORDER BY 1").rows == (("main", 1), ("v1", None))
    with Repository.open(repo.url, index_url=str(tmp_path / "other.sqlite")) as other:
        other.tag("v2", "main")
        other.tag("v1", "main", force=True)
    with Repository.open(repo.url, read_only=True) as again:
        assert again.sql(f"{REFS} ORDER BY 1").rows == (("main", 1), ("v1", 1), ("v2", 1))
    assert repo.sql(f"{REFS} ORDER BY 1").rows == (("main", 1), ("v1", 1), ("v2", 1))


@pytest.mark.parametrize("step", ["sync", "refs"])
def test_a_commit_that_another_process_makes_meanwhile_hides_no_ref(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with Repository.open(repo.url, index_url=str(tmp_path / "other.sqlite")) as other:
        left = [1, 2]

        def followed_by_a_commit(work: Callable[[], Any]) -> Callable[[], Any]:
            def call() -> Any:
                found = work()
                if left:
                    other.commit({"n": left.pop()}, branch="main")
                return list(found) if step == "refs" else found

            return call

        handle = repo._handle
        if step == "sync":
            monkeypatch.setattr(handle, "sync", followed_by_a_commit(handle.sync))
        else:
            monkeypatch.setattr(handle.refs, "deleted_too", followed_by_a_commit(handle.refs.deleted_too))
        for _ in range(3):
            assert repo.sql("SELECT DISTINCT r.name FROM refs r JOIN entries USING (commit_no)").rows == (("main",),)
        assert left == []
        assert repo.sql("SELECT commit_id FROM refs").rows == ((other.resolve("main"),),)


def test_what_the_index_remembers_of_a_ref_stays_as_evidence(repo: Repository) -> None:
    """Where an older copy was put in the place of a ref, it alone knows that the newest commit was published."""
    place = Path(repo.url.removeprefix("file://")) / "refs" / "heads" / "main.ref"
    older = place.read_bytes()
    newest = repo.commit({"n": 2})
    place.chmod(0o600)
    place.write_bytes(older)
    assert repo.sql("SELECT commit_id FROM refs").rows == ((repo.resolve("main"),),)
    seen = repo._handle.index.read(remembered.read_refs)["refs/heads/main.ref"]
    assert seen.target.hex() == newest.id != repo.resolve("main")
    repo.branch("back", start=newest)
    assert repo.sql("SELECT name FROM refs WHERE commit_id = :c", c=newest).rows == (("back",),)


@pytest.mark.parametrize("revision", ["0003", "0006"])
def test_an_index_of_an_older_schema_answers_with_the_rows_that_it_lacked(repo: Repository, revision: str) -> None:
    repo.commit({"text": "x" * 40, "n": 1}, branch="ft", options=CommitOptions(create=True), meta={"a": 1})
    place, store_id = Path(repo.url.removeprefix("file://")) / INDEX_PATH, repo.sql("SELECT store_id FROM about")[0][0]
    repo.close()
    make_older(place, store_id, revision)
    with Repository.open(repo.url) as again:
        assert again.sql(ENTRIES, ref="main").rows == (("n", 1), ("w", 4000))
        texts = "SELECT value, meta FROM refs JOIN commits c USING (commit_no) JOIN entries USING (commit_no)"
        assert again.sql(f"{texts} WHERE name = 'ft' ORDER BY key").rows == (("1", '{"a": 1}'), ("x" * 40, '{"a": 1}'))


def test_a_repository_in_memory_can_be_asked() -> None:
    with Repository.init(f"memory://sql-{np.random.default_rng().bytes(8).hex()}") as repo:
        assert repo.sql("SELECT * FROM commits").rows == ()
        repo.commit({"a": 1})
        assert repo.sql("SELECT count(*) FROM commits").rows == ((1,),)


# ---------------------------------------------------------------- parameters


def test_parameters_may_have_any_name_if_they_come_as_a_dict(repo: Repository) -> None:
    given = {"query": 1, "max_rows": 2, "self": 3, "timeout_s": 4}
    assert repo.sql("SELECT :query, :max_rows, :self, :timeout_s", given).rows == ((1, 2, 3, 4),)
    assert repo.sql("SELECT :query, :parameters, :self", query="a", parameters="b", self="c").rows == (("a", "b", "c"),)
    assert repo.sql("SELECT :a, :b", {"a": 1}, b=2).rows == ((1, 2),)


@pytest.mark.parametrize("given", [[1], "a", {1: 2}, 7])
def test_parameters_that_are_no_dict_of_names_are_refused(repo: Repository, given: Any) -> None:
    with pytest.raises(InvalidInputError, match="the parameters are .*: give a dict"):
        repo.sql("SELECT 1", given)


def test_a_parameter_that_is_given_twice_is_refused(repo: Repository) -> None:
    with pytest.raises(InvalidInputError, match="'a' is given twice"):
        repo.sql("SELECT :a", {"a": 1}, a=2)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.int64(7), 7), (np.float32(0.5), 0.5), (torch.tensor(3), 3), (torch.tensor(1.5), 1.5), (np.bool_(True), 1),
        (np.str_("x"), "x"), (bytearray(b"ab"), b"ab"),
    ],
)  # fmt: skip
def test_numbers_of_numpy_and_torch_are_numbers(repo: Repository, value: Any, found: Any) -> None:
    ((given,),) = repo.sql("SELECT :value", value=value)
    assert (given, type(given)) == (found, type(found))


@pytest.mark.parametrize("value", [torch.ones(3), np.ones(2), torch.ones(1, device="meta")[0]])
def test_arrays_are_no_parameters(repo: Repository, value: Any) -> None:
    with pytest.raises((InvalidInputError, RuntimeError), match=r"the parameter value is|meta"):
        repo.sql("SELECT :value", value=value)


@pytest.mark.parametrize("limits", [{"max_rows": 0}, {"max_bytes": -1}, {"timeout_s": 0}, {"timeout_s": float("inf")}])
def test_limits_are_above_nothing(repo: Repository, limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=f"{next(iter(limits))} is .*: give a"):
        repo.sql("SELECT 1", **limits)


@pytest.mark.parametrize("query", [None, 7, b"SELECT 1", ["SELECT 1"]])
def test_a_query_is_text(repo: Repository, query: Any) -> None:
    with pytest.raises(InvalidInputError, match="query is .*: give text"):
        repo.sql(query)


def test_a_limit_that_is_reached_says_how_to_raise_it(repo: Repository) -> None:
    with pytest.raises(TooLargeError, match=r"more than 1 rows: ask for fewer \(LIMIT\), or give more with max_rows="):
        repo.sql(ENTRIES, ref="main", max_rows=1)


# ---------------------------------------------------------------- answers


def test_an_answer_is_iterated_counted_and_indexed_as_its_rows_are(repo: Repository) -> None:
    found = repo.sql(ENTRIES, ref="main")
    assert (len(found), found[1], list(found)) == (2, ("w", 4000), [("n", 1), ("w", 4000)])
    assert found.to_dicts() == [{"key": "n", "num_bytes": 1}, {"key": "w", "num_bytes": 4000}]
    assert found.columns == ("key", "num_bytes")


def test_an_answer_is_shown_as_a_table_that_fits_on_a_screen(repo: Repository) -> None:
    assert repr(repo.sql(ENTRIES, ref="main")) == "key  num_bytes\nn    1\nw    4000\nSqlResult(2 columns, 2 rows)"
    many = (
        "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 5000) SELECT n, :x AS x, NULL AS y FROM r"
    )
    lines = repr(repo.sql(many, x="a\n\x1b" * 500)).splitlines()
    assert len(lines) < 25
    assert max(map(len, lines)) < 100
    assert lines[-2:] == ["... 4980 more rows", "SqlResult(3 columns, 5000 rows)"]
    assert "\\n\\x1b" in lines[1] and "NULL" in lines[1]


def test_two_columns_of_one_name_are_no_dict(repo: Repository) -> None:
    found = repo.sql("SELECT 1 AS a, 2 AS a")
    assert found.rows == ((1, 2),)
    for convert in (found.to_dicts, found.to_pandas):
        with pytest.raises(InvalidInputError, match="two columns are called 'a': give one another name with AS"):
            convert()


MIXED = "SELECT 9007199254740993 AS big, 1.5 AS x, 'a' AS t, x'00ff' AS b UNION ALL SELECT NULL, NULL, NULL, NULL"


def test_pandas_gets_every_value_exactly(repo: Repository) -> None:
    frame = repo.sql(MIXED).to_pandas()
    assert list(frame.columns) == ["big", "x", "t", "b"]
    assert frame["big"][0] == 9007199254740993
    assert str(frame["big"].dtype) == "Int64"
    assert frame["big"].isna().tolist() == frame["x"].isna().tolist() == frame["t"].isna().tolist() == [False, True]
    assert (frame["x"][0], frame["t"][0], frame["b"][0]) == (1.5, "a", b"\0\xff")
    assert str(repo.sql("SELECT step FROM commits").to_pandas()["step"].dtype) == "int64"
    assert repo.sql("SELECT step FROM commits WHERE 1 = 0").to_pandas().shape == (0, 1)


def test_arrow_gets_every_value_exactly(repo: Repository) -> None:
    table = repo.sql(MIXED).to_arrow()
    assert table.to_pydict() == {
        "big": [9007199254740993, None], "x": [1.5, None], "t": ["a", None], "b": [b"\0\xff", None],
    }  # fmt: skip
    assert table.schema.types == [pyarrow.int64(), pyarrow.float64(), pyarrow.string(), pyarrow.binary()]
    assert repo.sql("SELECT 1 AS a, 2 AS a").to_arrow().column_names == ["a", "a"]


def test_a_column_of_several_kinds_is_said_to_be_one(repo: Repository) -> None:
    found = repo.sql("SELECT 1 AS a UNION ALL SELECT 'x'")
    with pytest.raises(InvalidInputError, match="the column a: .*CAST"):
        found.to_arrow()


@pytest.mark.parametrize(("name", "convert"), [("pandas", "to_pandas"), ("pyarrow", "to_arrow")])
def test_what_is_not_installed_is_named(
    repo: Repository, name: str, convert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = repo.sql("SELECT 1 AS a")
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(InvalidInputError, match=f"{name} is not installed: pip install {name}"):
        getattr(found, convert)()


def test_a_query_needs_neither_pandas_nor_pyarrow(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refused(name: str, *args: Any, **kwargs: Any) -> Any:
        assert name.partition(".")[0] not in ("pandas", "pyarrow")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refused)
    assert repr(repo.sql("SELECT 1 AS a"))
