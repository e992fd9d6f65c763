"""Connections to PostgreSQL that are cut on their way, before the server has a message or before its answer comes."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import TransientStorageError
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.history.log import log_commits
from tests.builders import commit, numbers
from tests.cutting import Relay

pytestmark = pytest.mark.slow

NUM_COMMITS = 50


@pytest.fixture
def relay(server_url: str) -> Iterator[Relay]:
    with Relay(f"{make_url(server_url).query['host']}/.s.PGSQL.5432") as relay:
        yield relay


def _through(relay: Relay, server_url: str, **more: str) -> str:
    query = {"host": "127.0.0.1", "port": str(relay.port), "sslmode": "disable", "gssencmode": "disable", **more}
    return make_url(server_url).set(query=query).render_as_string(hide_password=False)


def _socket(handle: RepositoryHandle) -> socket.socket:
    with handle.index.reading() as connection:
        driver: Any = connection.connection.driver_connection
        return socket.fromfd(driver.fileno(), socket.AF_INET, socket.SOCK_STREAM)


def test_fifty_commits_over_connections_that_are_cut_are_made_once_each(
    tmp_path: Path, server_url: str, relay: Relay
) -> None:
    init_repository(tmp_path / "repo").close()
    chance, num_failed = random.Random("cut"), 0
    with closing(RepositoryHandle.open(tmp_path / "repo", index_url=_through(relay, server_url))) as handle:
        for step in range(NUM_COMMITS):
            made = None
            while made is None:
                if chance.random() < 0.5:
                    handle.forget_chunks()  # so that more is asked
                relay.cut_after(chance.randint(1, 25), lose_reply=chance.random() < 0.5)
                try:
                    made = commit(handle, {"w": numbers(64, 64, seed=step), "step": step}, message=f"step {step}")
                except TransientStorageError:
                    num_failed += 1
        relay.stop_cutting()
    assert relay.cuts > NUM_COMMITS / 2
    assert num_failed > 5
    with closing(RepositoryHandle.open(tmp_path / "repo", index_url=server_url)) as handle:
        assert [row.message for row in log_commits(handle)] == [f"step {step}" for step in range(NUM_COMMITS)][::-1]
        assert check_open(handle).ok


def test_a_server_that_is_gone_without_a_word_is_looked_for(tmp_path: Path, server_url: str, relay: Relay) -> None:
    init_repository(tmp_path / "repo").close()
    for more, idle_s in (({}, 30), ({"keepalives_idle": "77"}, 77)):
        url = _through(relay, server_url, **more)
        with (
            closing(RepositoryHandle.open(tmp_path / "repo", index_url=url)) as handle,
            closing(_socket(handle)) as one,
        ):
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == idle_s
