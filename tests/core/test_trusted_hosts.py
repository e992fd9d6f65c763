"""Hosts that only a repository's settings name get credentials if the settings are the user's own, or he said so."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import cas_ckpt
from cas_ckpt import CkptError, InvalidInputError, PermissionDeniedError, Repository
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.settings import Remote, trusted_hosts
from cas_ckpt.core.shared_index import set_shared_index
from cas_ckpt.ops.fsck.check import check_url
from cas_ckpt.ops.fsck.repair import rebuild_index
from cas_ckpt.storage.url import open_store
from tests.builders import commit, numbers
from tests.cli.running import call
from tests.listener import Listener

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")

STRANGER = 54321
HOST = "127.0.0.1"
DENIED = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Host:
    """A host that keeps what it was sent, and refuses it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.index_url = endpoint.replace("http://", "postgresql+psycopg://me@") + "/db"
        self.sent: list[bytes] = []


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATHEUSERS")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("PGPASSWORD", "secret")

    def serve(connection: socket.socket) -> None:
        with connection:
            found.sent.append(connection.recv(65536))
            connection.sendall(DENIED)

    listener = Listener(serve)
    found = Host(listener.endpoint)
    with listener:
        yield found


def repository(path: Path, host: Host, owner: int | None = STRANGER) -> Path:
    """One commit, and settings that name `host` for the index and for the remote `origin`."""
    with closing(init_repository(path)) as handle:
        commit(handle, {"w": numbers(8)})
    with Repository.open(path, group=None) as repo:
        repo.add_remote("origin", f"s3://bucket/x?endpoint={host.endpoint}&parallel=1")
    set_shared_index(path, host.index_url)
    if owner is not None:
        for each in (path, *path.rglob("*")):
            os.chown(each, owner, owner)
    return path


def test_to_read_a_strangers_folder_connects_to_no_database_that_its_settings_name(
    tmp_path: Path, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    path = repository(tmp_path / "theirs", host)
    with closing(RepositoryHandle.open(path, read_only=True)) as handle:
        assert not handle.index.is_shared
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert HOST in said and f"CAS_CKPT_TRUSTED_HOSTS={HOST}" in said and "index_url=" in said
    for verb in ("log", "status", "fsck"):
        assert call("-C", path, verb).code == 0
    assert check_url(path).ok
    assert host.sent == []


def test_to_write_into_it_is_refused_with_the_name_of_the_host_and_the_way_to_allow_it(
    tmp_path: Path, host: Host
) -> None:
    path = repository(tmp_path / "theirs", host)
    for use in (lambda: RepositoryHandle.open(path), lambda: Repository.open(path), lambda: rebuild_index(path)):
        with pytest.raises(PermissionDeniedError, match=f"name the host '{HOST}'.*CAS_CKPT_TRUSTED_HOSTS={HOST}"):
            use()
    assert host.sent == []


@pytest.mark.parametrize("who", ["the one who opens it", "its folder", "its settings"])
def test_settings_count_as_the_users_own_if_folder_and_record_are_his(tmp_path: Path, host: Host, who: str) -> None:
    path = repository(tmp_path / "mine", host, None)
    if who != "the one who opens it":
        os.chown(path if who == "its folder" else path / "settings", STRANGER, STRANGER)
    with pytest.raises(CkptError) as caught:
        RepositoryHandle.open(path)
    assert bool(host.sent) == (who == "the one who opens it") != isinstance(caught.value, PermissionDeniedError)


def test_a_host_that_the_user_names_is_connected_to(tmp_path: Path, host: Host) -> None:
    path = repository(tmp_path / "theirs", host)
    assert call("-C", path, "log", CAS_CKPT_TRUSTED_HOSTS=f"a.example,{HOST}").code != 0
    assert host.sent.pop()
    assert call("-C", path, "--index", host.index_url, "log").code != 0
    assert host.sent.pop()
    with cas_ckpt.trusted_hosts(HOST), pytest.raises(CkptError):
        Repository.open(path)
    assert host.sent.pop()
    with trusted_hosts("a.example"), pytest.raises(PermissionDeniedError, match="CAS_CKPT_TRUSTED_HOSTS"):
        Repository.open(path)
    assert host.sent == []


@pytest.mark.parametrize("odd", ["?host=a.example", "?hostaddr=1.2.3.4", "?host=/tmp/theirs", "?host=127.0.0.1,a"])
def test_no_option_of_the_url_gets_round_it(tmp_path: Path, host: Host, odd: str) -> None:
    path = tmp_path / "theirs"
    init_repository(path).close()
    set_shared_index(path, f"postgresql+psycopg:///db{odd}")
    os.chown(path, STRANGER, STRANGER)
    with trusted_hosts(HOST), pytest.raises(PermissionDeniedError, match="name the host"):
        RepositoryHandle.open(path)


def test_a_service_that_speaks_s3_is_sent_nothing_for_a_strangers_remote(tmp_path: Path, host: Host) -> None:
    path = repository(tmp_path / "theirs", host)
    with Repository.open(path, index_url=":memory:", group=None) as repo:
        for use in (repo.fetch, repo.push, repo.ls_remote):
            with pytest.raises(PermissionDeniedError, match=f"remote 'origin'.*'{HOST}'.*give its URL"):
                use()
        assert host.sent == []
        with trusted_hosts(HOST), pytest.raises(PermissionDeniedError):
            repo.fetch()
        assert b"AKIATHEUSERS" in host.sent.pop()
        host.sent.clear()
        with pytest.raises(PermissionDeniedError):
            repo.fetch(repo.remotes()[0].url)
        assert b"AKIATHEUSERS" in host.sent.pop()


def test_the_settings_of_a_bucket_name_its_own_endpoint_and_no_other() -> None:
    with closing(open_store("s3://bucket/x?endpoint=https://minio.example:9000")) as store:
        near, far = (Remote("o", f"s3://o/x?endpoint=https://{name}.example") for name in ("MINIO", "evil"))
        assert near.place(store) == near.url
        with pytest.raises(PermissionDeniedError, match=r"evil\.example"):
            far.place(store)
        assert Remote("o", "s3://bucket/of-aws").place(store) == "s3://bucket/of-aws"


def test_of_two_blocks_that_overlap_as_those_of_threads_do_each_ends_its_own_trust_alone() -> None:
    with closing(open_store("s3://bucket/x")) as store:

        def trusts(host: str) -> bool:
            try:
                return bool(Remote("o", f"s3://o/x?endpoint=https://{host}").place(store))
            except PermissionDeniedError:
                return False

        first, second = trusted_hosts("a.example", "both.example"), trusted_hosts("b.example", "both.example")
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert [trusts(host) for host in ("a.example", "b.example", "both.example")] == [False, True, True]
        second.__exit__(None, None, None)
        assert not any(map(trusts, ("a.example", "b.example", "both.example")))


def test_what_is_no_name_of_a_host_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"give its name, such as 'db\.example\.org'"), trusted_hosts(""):
        pass
