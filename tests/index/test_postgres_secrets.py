"""Refusals of a server, each clear; and a password that is in none of them, nor anywhere else where people look."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from sqlalchemy import make_url

from cas_ckpt import Repository
from cas_ckpt.core.create import init_repository, open_or_init
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.settings import read_settings
from cas_ckpt.core.shared_index import set_shared_index
from cas_ckpt.errors import CkptError, InvalidInputError, PermissionDeniedError, TransientStorageError
from cas_ckpt.index.index import Index
from cas_ckpt.index.postgres import from_settings, schema_of
from tests.builders import commit, numbers
from tests.cli.running import call
from tests.index.conftest import Server, running_server

pytestmark = pytest.mark.slow

SECRET = "s3cr3t:w@rd/%"
ESCAPED = quote(SECRET, safe="")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that asks `ann` for her password."""
    with running_server() as server:
        with psycopg.connect(server.plain_url, autocommit=True) as admin:
            admin.execute(f"CREATE ROLE ann LOGIN PASSWORD '{SECRET}'".encode())
            admin.execute("CREATE ROLE bob LOGIN PASSWORD 'other'")
            admin.execute("GRANT CREATE ON DATABASE postgres TO ann")
        rules = server.folder / "pg_hba.conf"
        rules.write_text(f"local all ann,bob,nobody scram-sha-256\n{rules.read_text()}")
        server.restart()
        yield server


@pytest.fixture
def path(tmp_path: Path) -> Path:
    init_repository(tmp_path / "repo").close()
    return tmp_path / "repo"


def _url(server: Server, user: str = "ann", password: str | None = SECRET, **changes: str) -> str:
    url = make_url(server.url.replace("postgres:@", "postgres@")).set(username=user, password=password, **changes)
    return url.render_as_string(hide_password=False)


def _refusals(server: Server) -> dict[str, tuple[str, type[CkptError], str]]:
    """What is wrong -> URL, error, and what it says; in each URL is the password."""
    asked = make_url(_url(server))
    return {
        "wrong password": (_url(server, "bob"), PermissionDeniedError, "refused the role or its password"),
        "no such role": (_url(server, "nobody"), PermissionDeniedError, "refused the role or its password"),
        "no such database": (_url(server, database="nope"), InvalidInputError, "createdb"),
        "nobody listens": (
            str(asked.update_query_dict({"host": "/nowhere"}).render_as_string(hide_password=False)),
            TransientStorageError, "out of reach",
        ),
        "odd option": (
            asked.update_query_dict({"colour": "red"}).render_as_string(hide_password=False), CkptError, "colour",
        ),
        "not escaped": (f"postgresql+psycopg://ann:{SECRET}@host/db", InvalidInputError, "write @ .* as %40"),
        "behind a ?": ("postgresql+psycopg://ann:x?s3cr3t@y@host/db", InvalidInputError, "write .* as %3F"),
        "odd port": (f"postgresql+psycopg://ann:{ESCAPED}@host:port/db", InvalidInputError, "cannot be read"),
        "another driver": (f"postgresql+psycopg2://ann:{ESCAPED}@host/db", InvalidInputError, "psycopg2; wanted"),
        "another database": (f"mysql://ann:{ESCAPED}@host/db", InvalidInputError, "mysql; wanted"),
        "secret option": (
            asked.update_query_dict({"sslpassword": SECRET}).render_as_string(hide_password=False),
            InvalidInputError, "service file",
        ),
    }  # fmt: skip


def _hides(text: str) -> None:
    for form in (SECRET, ESCAPED, "s3cr3t", "w%40rd", "w@rd", "rd/%", "rd%2F"):
        assert form not in text, text


def test_what_a_server_refuses_is_said_clearly_and_never_with_the_password(
    path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for name, (url, error, words) in _refusals(server).items():
        with pytest.raises(error, match=words) as caught:
            RepositoryHandle.open(path, index_url=url)
        _hides(str(caught.value) + repr(caught.value))
        _hides("".join(traceback.format_exception(caught.value)))
        ran = call("-C", path, "--debug", "log", CAS_CKPT_INDEX=url)
        assert ran.code, name
        _hides(ran.out + ran.err)
    _hides(caplog.text)


def test_a_password_is_in_nothing_that_is_shown_or_stored(
    path: Path, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    in_query = make_url(_url(server, password=None)).update_query_dict({"password": SECRET})
    for url in (_url(server), in_query.render_as_string(hide_password=False)):
        with closing(RepositoryHandle.open(path, index_url=url)) as handle:
            commit(handle, {"w": numbers(8, 8)})
            _hides(repr(handle.index._database) + repr(handle.index._database.engine) + handle.index.place)
            schema = schema_of(handle.config.store_id)
        for verb in ("status", "log", "stats", "fsck"):
            for how in ((), ("--json",), ("--debug",)):
                ran = call("-C", path, verb, *how, CAS_CKPT_INDEX=url)
                assert ran.code == 0
                _hides(ran.out + ran.err)
    with Repository.init(tmp_path / "made", index_url=_url(server)) as repo:
        _hides(repr(repo))
    for root in (path, tmp_path / "made"):
        for file in root.rglob("*"):
            if file.is_file():
                _hides(file.read_bytes().decode("latin-1"))
    _hides(server.run("pg_dump", "-n", schema, server.plain_url))
    _hides(caplog.text)


def test_an_index_that_init_made_in_a_database_is_found_again_unless_another_is_named(
    server: Server, tmp_path: Path
) -> None:
    url = _url(server, "postgres", None)
    for place in ("made", "opened"):
        make = init_repository if place == "made" else open_or_init
        with closing(make(tmp_path / place, index_url=url)) as handle:
            info = commit(handle, {"w": numbers(8, 8)})
        assert read_settings(handle_store(tmp_path / place)).index_url == url
        with closing(RepositoryHandle.open(tmp_path / place)) as handle:
            assert handle.index.is_shared
        assert not (tmp_path / place / "index").exists()
        assert info.id in call("-C", tmp_path / place, "log").out
        with closing(RepositoryHandle.open(tmp_path / place, index_url=":memory:")) as handle:
            assert handle.index.in_memory
        assert call("-C", tmp_path / place, "index", "rebuild").code == 0
        assert call("-C", tmp_path / place, "fsck").code == 0
        assert not (tmp_path / place / "index").exists()
        assert call("-C", tmp_path / place, "index", "set", "--clear").code == 0
        with closing(RepositoryHandle.open(tmp_path / place)) as handle:
            assert not handle.index.is_shared


def test_no_repository_is_made_where_its_index_cannot_be(server: Server, tmp_path: Path) -> None:
    with pytest.raises(PermissionDeniedError):
        init_repository(tmp_path / "repo", index_url=_url(server, "bob"))
    init_repository(tmp_path / "repo", index_url=server.url).close()


def test_a_place_with_a_password_or_of_a_file_is_never_noted(path: Path, server: Server) -> None:
    for url in (_url(server), "/tmp/index.sqlite", "mysql://host/db", "postgresql+psycopg://host/db?password=x"):
        with pytest.raises(InvalidInputError) as caught:
            set_shared_index(path, url)
        _hides(str(caught.value))
    assert read_settings(handle_store(path)).index_url == ""


def test_a_server_that_settings_name_is_told_no_password_in_clear_text(path: Path, server: Server) -> None:
    rules = server.folder / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text(f"local all ann password\n{before}")
    server.restart()
    try:
        Index.open(_url(server), store_id="0" * 32).close()  # who names a server knows what it asks for
        with pytest.raises(CkptError, match="require_auth|authentication"):
            Index.open(from_settings(_url(server)), store_id="0" * 32)
    finally:
        rules.write_text(before)
        server.restart()


def handle_store(path: Path):  # type: ignore[no-untyped-def]
    from cas_ckpt.storage.url import open_store

    return open_store(path)
