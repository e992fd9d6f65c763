"""Schedules of writers, users and collections on hosts that share an index in PostgreSQL."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import psycopg
import pytest

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.index.index import Index
from cas_ckpt.index.postgres import schema_of
from cas_ckpt.index.schema import METADATA
from tests.schedule import play as playing
from tests.schedule.play import play
from tests.schedule.scenarios import random_decider, random_scenario
from tests.schedule.world import World
from tests.searches import tries

pytestmark = pytest.mark.slow

NUM_SCHEDULES = tries(6, 15)


@pytest.fixture
def _shared_on_postgres(server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that share an index share one on the server."""

    @contextmanager
    def shared_index(of: World) -> Iterator[Callable[[], Index]]:
        with ExitStack() as stack:

            def opened() -> Index:
                return stack.enter_context(Index.open(server_url, store_id=of.config.store_id))

            opened().close()
            _empty(server_url, of.config.store_id)
            RepositoryHandle(of.shelf, of.config, opened()).sync()
            yield opened

    monkeypatch.setattr(playing, "shared_index", shared_index)


def _empty(server_url: str, store_id: str) -> None:
    """What a schedule before left goes; making tables anew each time would take longer than the schedules."""
    kept = "key IN ('views', 'store_id')"
    with psycopg.connect(server_url.replace("+psycopg", "")) as connection:
        connection.execute(f'SET search_path TO "{schema_of(store_id)}"'.encode())
        for table in METADATA.sorted_tables:
            connection.execute(
                f"DELETE FROM {table.name} {f'WHERE NOT {kept}' if table.name == 't_meta' else ''}".encode()
            )


@pytest.mark.usefixtures("_shared_on_postgres")
def test_random_schedules_of_hosts_with_one_index_lose_nothing_and_leave_nothing() -> None:
    failed = []
    for seed in range(NUM_SCHEDULES):
        chance = random.Random(f"postgres {seed}")
        scenario = replace(random_scenario(chance, sql=True), shares_index=True)
        played = play(scenario, random_decider(chance), seed=seed)
        if played.failure is not None:
            failed.append(str(played))
    assert not failed, "\n\n".join(failed)
