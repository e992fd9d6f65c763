"""Every repository in a folder has its index in PostgreSQL: in a database of its own, as copies of a folder have too.

A database is made from a template that has the tables; migrations for each would take most of the time. A repository in
memory keeps its index in memory: tests that make such ones have no place here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import URL, Engine, event, make_url

from cas_ckpt.core import handle
from cas_ckpt.index import postgres, remembered
from cas_ckpt.index.index import Index
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.store import Store
from tests.index.conftest import server_url

__all__ = ["server_url"]

SCHEMA = "cas_ckpt_of_tests"
_numbers = itertools.count()


def _of_database(server_url: str, name: str) -> str:
    return make_url(server_url).set(database=name).render_as_string(hide_password=False)


@pytest.fixture(scope="session")
def template(server_url: str) -> str:
    """A database with tables that say nothing of a repository yet."""
    with psycopg.connect(server_url.replace("+psycopg", ""), autocommit=True) as server:
        server.execute("CREATE DATABASE template_of_tests")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(postgres, "schema_of", lambda store_id: SCHEMA)
        with Index.open(_of_database(server_url, "template_of_tests"), store_id="none") as index:
            index.write(
                lambda connection: connection.exec_driver_sql(f"DELETE FROM t_meta WHERE key = '{remembered.STORE}'")
            )
    return "template_of_tests"


@pytest.fixture(scope="module", autouse=True)
def databases(server_url: str, template: str) -> Iterator[Callable[[Path], str]]:
    """From a folder to the URL of its database, which is made when it is asked for first."""
    made: dict[Path, str] = {}

    with (
        psycopg.connect(server_url.replace("+psycopg", ""), autocommit=True) as server,
        pytest.MonkeyPatch.context() as patched,
        _closed(),  # those of repositories that a module shares
    ):

        def database(path: Path) -> str:
            if path not in made:
                made[path] = f"of_tests_{next(_numbers)}"
                server.execute(f"CREATE DATABASE {made[path]} TEMPLATE {template}".encode())
            return _of_database(server_url, made[path])

        usual = handle.index_place

        def place(store: Store, *kept: handle.RepositoryCache | None) -> str:
            return database(store.root.resolve()) if isinstance(store, FileStore) else usual(store, *kept)

        patched.setattr(handle, "index_place", place)
        patched.setattr(postgres, "schema_of", lambda store_id: SCHEMA)
        yield database
        for name in made.values():
            server.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """No connection stays open that a test left to Python's garbage collector, as it may with SQLite."""
    with _closed():
        yield


@contextmanager
def _closed() -> Iterator[None]:
    """At the end, the connections of engines made here are closed, also those that a traceback still holds.

    Each by itself: to look for them in everything that a process of tests has imported took a second a test.
    """
    connections: list[psycopg.Connection] = []
    open_engine = postgres.open_engine

    def noted(url: URL, schema: str) -> Engine:
        engine = open_engine(url, schema)
        event.listen(engine, "connect", lambda connection, record: connections.append(connection))
        return engine

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(postgres, "open_engine", noted)
        yield
    for connection in connections:
        connection.close()
