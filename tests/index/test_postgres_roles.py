"""Roles of a shared index: each does its verbs, and no more. On a real server, with the SQL that is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url

from cas_ckpt import Repository
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.shared_index import shared_index_roles
from cas_ckpt.errors import InvalidInputError, PermissionDeniedError
from cas_ckpt.index.index import Index
from cas_ckpt.index.postgres import roles_sql, schema_of
from cas_ckpt.index.rows import REVISIONS
from cas_ckpt.ops.fsck.check import check_open, check_url
from cas_ckpt.ops.fsck.repair import rebuild_index
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.history.log import log_commits
from cas_ckpt.ops.refs import create_branch, delete_branch
from tests.builders import commit, leave_garbage, numbers
from tests.index.manifest_rows import make_older

pytestmark = pytest.mark.slow

NAMES = {"maintainer": "team's %I admin", "writer": 'the "writer"', "reader": "reader"}
EAGER = GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0)

As = Callable[[str], str]
"""The URL of the index for a role."""


@pytest.fixture
def admin(server_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(server_url.replace("+psycopg", ""), autocommit=True) as connection:
        yield connection
        for name in NAMES.values():
            if connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (name,)).fetchone():
                quoted = '"' + name.replace('"', '""') + '"'
                connection.execute(f"DROP OWNED BY {quoted} CASCADE")
                connection.execute(f"DROP ROLE {quoted}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    init_repository(tmp_path / "repo").close()
    return tmp_path / "repo"


@pytest.fixture
def url_of(path: Path, server_url: str, admin: psycopg.Connection[Any]) -> As:
    """Three roles, an index that the maintainer made, and a commit in it."""
    sql = shared_index_roles(path, **NAMES)
    admin.execute(sql.encode())  # the maintainer, and a schema that belongs to it
    for name in NAMES.values():
        admin.execute(("ALTER ROLE " + '"' + name.replace('"', '""') + '" LOGIN').encode())

    def url_of(role: str) -> str:
        return make_url(server_url).set(username=NAMES[role]).render_as_string(hide_password=False)

    with closing(RepositoryHandle.open(path, index_url=url_of("maintainer"))) as handle:
        commit(handle, {"w": numbers(64, 64)})
    admin.execute(sql.encode())
    return url_of


def test_a_reader_reads_everything_and_writes_nothing(path: Path, url_of: As) -> None:
    with Repository.open(path, index_url=url_of("reader"), read_only=None) as repo:
        (info,) = repo.log("main")
        assert [row.key for row in repo.ls("main")] == ["w"]
        assert repo.load("main")["w"].shape == (64, 64)
        assert not repo.diff(info.id, "main").entries
        assert repo.sql("SELECT count(*) FROM commits").rows == ((1,),)
        assert repo.du(by="dtype")
        assert repo.status().commit == info
        with pytest.raises(PermissionDeniedError):
            repo.tag("v1", "main")
    with pytest.raises(PermissionDeniedError, match=r"the role 'reader' may only read it.*read_only=True"):
        Repository.open(path, index_url=url_of("reader"))
    with pytest.raises(PermissionDeniedError):
        rebuild_index(path, index_url=url_of("reader"))


def test_a_writer_commits_and_branches_but_collects_rebuilds_and_upgrades_nothing(path: Path, url_of: As) -> None:
    with closing(RepositoryHandle.open(path, index_url=url_of("writer"))) as handle:
        info = commit(handle, {"w": numbers(64, 64, seed=2), "x": 1}, metrics={"loss": 1.0})
        create_branch(handle, "side", start="main")
        delete_branch(handle, "side", force=True)
        assert handle.index.packs().keys() == dict(handle.store.list("packs/")).keys()
        leave_garbage(handle)
        packs = dict(handle.store.list("packs/"))
        with pytest.raises(PermissionDeniedError, match="this role may not do that"):
            collect_garbage(handle, EAGER)
        assert dict(handle.store.list("packs/")) == packs
    with Repository.open(path, index_url=url_of("writer")) as repo:
        assert repo.load(info.id)["x"] == 1
        assert len(repo.restores()) == 1
        with pytest.raises(PermissionDeniedError):
            repo.rebuild_index()
    with pytest.raises(PermissionDeniedError):
        Index.discard(url_of("writer"), store_id=_store_id(path))


def test_a_writer_goes_on_beside_a_maintainer_who_collects(path: Path, url_of: As) -> None:
    with (
        closing(RepositoryHandle.open(path, index_url=url_of("writer"))) as writer,
        closing(RepositoryHandle.open(path, index_url=url_of("maintainer"))) as maintainer,
    ):
        leave_garbage(writer)
        assert collect_garbage(maintainer, EAGER).deleted_packs
        commit(writer, {"w": numbers(64, 64, seed=2), "x": 1})  # what was garbage, saved again
        assert check_open(maintainer).ok


def test_rows_of_packs_that_are_gone_do_not_keep_a_writer_from_committing(path: Path, url_of: As) -> None:
    with closing(RepositoryHandle.open(path)) as other:  # collects with an index of its own
        leave_garbage(other)
        with closing(RepositoryHandle.open(path, index_url=url_of("maintainer"))) as handle:
            handle.sync()
        assert collect_garbage(other, EAGER).deleted_packs
    with closing(RepositoryHandle.open(path, index_url=url_of("writer"))) as writer:
        info = commit(writer, {"w": numbers(64, 64, seed=2)})
        assert writer.index.packs().keys() > dict(writer.store.list("packs/")).keys()
    with closing(RepositoryHandle.open(path, index_url=url_of("maintainer"))) as handle:
        handle.sync()
        assert handle.index.packs().keys() == dict(handle.store.list("packs/")).keys()
        assert check_open(handle).ok
    with Repository.open(path, index_url=url_of("reader"), read_only=True) as repo:
        assert repo.load(info.id)["w"].shape == (64, 64)


def test_a_reader_whose_index_lags_behind_the_store_reads_the_packs_itself(path: Path, url_of: As) -> None:
    with closing(RepositoryHandle.open(path)) as other:
        info = commit(other, {"w": numbers(64, 64, seed=5)})
    with Repository.open(path, index_url=url_of("reader"), read_only=True) as repo:
        assert next(iter(repo.log("main"))).id == info.id
        assert repo.load("main")["w"].shape == (64, 64)


def test_only_a_maintainer_upgrades_an_index_and_everybody_goes_on(
    path: Path, url_of: As, server_url: str, admin: psycopg.Connection[Any]
) -> None:
    make_older(url_of("maintainer"), _store_id(path), REVISIONS[-2])
    with pytest.raises(PermissionDeniedError, match="must be owner|permission denied"):
        RepositoryHandle.open(path, index_url=url_of("writer"))
    with closing(RepositoryHandle.open(path, index_url=url_of("maintainer"))) as handle:
        assert rebuild_index(path, index_url=url_of("maintainer")).stats.num_commits == 1
        assert check_open(handle).ok
    admin.execute(shared_index_roles(path, **NAMES).encode())
    with closing(RepositoryHandle.open(path, index_url=url_of("writer"))) as writer:
        commit(writer, {"w": numbers(64, 64, seed=3)})
    with Repository.open(path, index_url=url_of("reader"), read_only=True) as repo:
        assert len(list(repo.log("main"))) == 2


def test_before_a_maintainer_fills_an_upgraded_index_everybody_goes_on_beside_it(
    path: Path, url_of: As, caplog: pytest.LogCaptureFixture
) -> None:
    make_older(url_of("maintainer"), _store_id(path), "0003")
    Index.open(url_of("maintainer"), store_id=_store_id(path)).close()  # a maintainer who dies after the upgrade
    with Repository.open(path, index_url=url_of("reader"), read_only=True) as repo:
        assert [row.key for row in repo.ls("main")] == ["w"]
        assert repo.sql("SELECT count(*) FROM entries").rows == ((1,),)
    with Repository.open(path, index_url=url_of("writer")) as repo:
        repo.commit({"w": numbers(64, 64), "x": 1})
        assert [row.key for row in repo.ls("main")] == ["w", "x"]
    assert "the maintainer" in caplog.text
    for role in ("reader", "writer"):
        report = check_url(path, index_url=url_of(role))
        assert report.problems == () and any("the maintainer" in note.what for note in report.notes)
    assert check_url(path, index_url=url_of("maintainer")).ok
    with closing(RepositoryHandle.open(path, index_url=url_of("reader"), read_only=True)) as handle:
        assert handle.index.is_shared and len(list(log_commits(handle))) == 2


def test_a_maintainer_makes_a_damaged_index_anew_in_the_schema_that_it_was_given(
    path: Path, url_of: As, admin: psycopg.Connection[Any]
) -> None:
    admin.execute(f'DROP TABLE "{schema_of(_store_id(path))}".t_locations CASCADE'.encode())
    assert rebuild_index(path, index_url=url_of("maintainer")).stats.num_commits == 1
    with Repository.open(path, index_url=url_of("reader"), read_only=True) as repo:  # rights outlive the tables
        assert len(list(repo.log("main"))) == 1


@pytest.mark.parametrize("wrong", [{"reader": ""}, {"reader": "r" * 64}, {"writer": "reader"}, {"writer": "a\nb"}])
def test_names_that_no_role_can_have_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidInputError, match="role"):
        roles_sql("0" * 32, **NAMES | wrong)


def _store_id(path: Path) -> str:
    with closing(RepositoryHandle.open(path)) as handle:
        return handle.config.store_id
