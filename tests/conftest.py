"""How the tests run: the same examples every time, unless a search is asked for; and what many of them begin with.

`pytest --hypothesis-profile=search` looks for new counterexamples, `=full` searches as far as `make search` does.

Temporary folders are in memory (/dev/shm) where there is room for them: half of the time went into fsync. To run on a
disk: `PYTEST_DEBUG_TEMPROOT=/tmp make test`. Tests about files on a disk stay there (tests/storage/conftest.py).
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.host_cache import cache_at
from tests import quick_index
from tests.servers import GcsServer, S3Server, credentials, gcs_server, s3_server

TESTS = Path(__file__).parent
MEMORY = Path("/dev/shm")
MEMORY_NEEDED_BYTES = 12 << 30  # files of tests: 4 GB at most; the processes and their servers: 1.5 GB each


def _free_memory_bytes() -> int:
    """What the machine and the container of this process have left; what a tmpfs says of its size is only its limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(line for line in lines if line.startswith("MemAvailable:"))
    free = [shutil.disk_usage(MEMORY).free, int(available.split()[1]) << 10]
    group = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            free.append(int((group / limit).read_text()) - int((group / used).read_text()))
    return min(free)


if os.access(MEMORY, os.W_OK) and _free_memory_bytes() > MEMORY_NEEDED_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Several processes share the cores: threads of torch would only wait for one another. Before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

quick_index.install()

settings.register_profile("ci", max_examples=30, derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("full", settings.get_profile("ci"), max_examples=100)  # and all numbers of tests/searches.py
settings.register_profile(
    "search", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Each process of xdist collects the whole suite from another place on: what one compiled, the others load."""
    told = getattr(config, "workerinput", None)
    if told and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        parts = sorted(str(path) for path in TESTS.iterdir() if path.is_dir() or path.match("test_*.py"))
        first = len(parts) * int(told["workerid"].removeprefix("gw")) // told["workercount"]
        config.args = parts[first:] + parts[:first]


SERVERS = {"s3_process", "gcs", "server_url"}
"""Fixtures that start a server: the tests that ask for one are slow."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests begin, so that no process is left alone with one of them at the end."""
    for item in items:
        if not SERVERS.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, item.path))


def pytest_collection_finish() -> None:
    """Python's garbage collector has less to do.

    What was imported and collected stays to the end: looking for garbage in it took 0.4 s each time. And it looks when
    there are 20,000 new objects, not 700, which took 6 to 12 % of the time of three files of tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is kept in the home of whoever runs the tests, nor found there; processes that are started, too."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["CAS_CKPT_CACHE"] = str(folder)
    with cache_at(folder):
        yield


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[RepositoryHandle]:
    """An empty repository in `tmp_path / "repo"`."""
    made = init_repository(tmp_path / "repo")
    yield made
    made.close()


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    """One server for all tests of this process."""
    with credentials(), s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_process: S3Server) -> Iterator[S3Server]:
    """A server of S3 without a bucket; credentials for it are in the environment."""
    with credentials():
        yield s3_process
        s3_process.reset()


@pytest.fixture(scope="session")
def gcs() -> Iterator[GcsServer]:
    """A server of Cloud Storage for all tests of this process; each makes a bucket of its own."""
    with gcs_server() as server:
        yield server
