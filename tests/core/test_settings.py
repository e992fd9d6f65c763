"""The record of settings: remotes and the place of the index, changed by compare-and-swap, without secrets."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from cas_ckpt import Repository
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.settings import SETTINGS_KEY, Remote, Settings, change_settings, check_url, read_settings, stored_url
from cas_ckpt.errors import CorruptionError, InvalidInputError, NotFoundError, UnsupportedVersionError
from cas_ckpt.index.postgres import from_settings
from cas_ckpt.objects.digest import seal, unseal
from cas_ckpt.ops.sync.remotes import remote_named, rename_remote
from cas_ckpt.storage import url as schemes
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.object_store import ObjectStore
from cas_ckpt.storage.url import open_store, without_secrets
from tests.effects import FaultPlan, lose_reply
from tests.memory_bucket import MemoryBucket
from tests.wrapped_stores import FaultyStore

ORIGIN = Remote("origin", "s3://bucket/runs?region=eu-west-1")


def test_a_repository_without_the_record_has_no_remotes():
    assert read_settings(MemoryStore()) == Settings()


def test_what_was_set_is_read_back():
    store = MemoryStore()
    backup = Remote("backup", "/data/backup", fetch=("ft/*",), push=("main",), tier=True, promisor=True)
    change_settings(store, lambda held: held.with_remote(ORIGIN).with_remote(backup))
    made = change_settings(store, lambda held: Settings(held.remotes, "postgresql+psycopg://team@db/ckpt"))
    assert made == read_settings(store) == Settings((backup, ORIGIN), "postgresql+psycopg://team@db/ckpt")
    assert read_settings(store).remote("backup") == backup
    with pytest.raises(NotFoundError, match="backup, origin"):
        read_settings(store).remote("upstream")
    assert change_settings(store, lambda held: held.without_remote("backup")).remotes == (ORIGIN,)


def test_two_who_add_a_remote_at_once_both_find_theirs():
    store = MemoryStore()
    change_settings(store, lambda held: held)
    names = [f"r{number}" for number in range(8)]
    together = threading.Barrier(len(names))

    def add(name: str) -> None:
        together.wait()
        change_settings(store, lambda held: held.with_remote(Remote(name, "memory://x")))

    threads = [threading.Thread(target=add, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [remote.name for remote in read_settings(store).remotes] == names


@pytest.mark.parametrize("number", [1, 2])
def test_a_lost_reply_is_known_by_the_nonce(number: int):
    """1: of the creation, 2: of a swap."""
    store = MemoryStore()
    plan: FaultPlan = lose_reply(number)
    faulty = FaultyStore(store, plan)
    change_settings(faulty, lambda held: held.with_remote(ORIGIN))
    change_settings(faulty, lambda held: held.with_remote(Remote("b", "memory://b")))
    assert [remote.name for remote in read_settings(store).remotes] == ["b", "origin"]


SECRET_URLS = [
    "postgresql+psycopg://team:hunter2@db/ckpt",
    "s3://AKIAhunter2:hunter2@bucket/x",
    "s3://hunter2@bucket/x",
    "s3://bucket/x?secret_access_key=hunter2",
    "s3://bucket/x?X-Amz-Signature=hunter2",
    "s3://bucket/x?X-Amz-Security-Token=hunter2",
    "gs://bucket/x?access_token=hunter2",
    "s3://bucket/x?Password=hunter2",
    "postgresql+psycopg://db/ckpt?password=hunter2",
    "https://host/x?sig=hunter2",
    "s3://bucket/x#hunter2",
    "s3://[hunter2/x",
]


@pytest.mark.parametrize("url", SECRET_URLS)
def test_a_url_with_a_secret_is_refused_and_not_repeated(url: str):
    for check in (check_url, stored_url, lambda text: Remote("origin", text)):
        with pytest.raises(InvalidInputError) as caught:
            check(url)
        assert "hunter2" not in str(caught.value)
    store = MemoryStore()
    with pytest.raises(InvalidInputError):
        change_settings(store, lambda held: Settings(held.remotes, url))
    assert not list(store.list(""))


@pytest.mark.parametrize("url", [
    "s3://bucket/x?region=eu-west-1&endpoint=https://minio:9000&sse_kms_key_id=alias/x&profile=team",
    "gs://bucket/x?user_project=billing", "postgresql+psycopg://team@db:5432/ckpt?sslmode=require", "memory://x",
    "file:///data/x", "/data/passwords/tokens",
])  # fmt: skip
def test_a_url_without_one_is_kept_as_it_is(url: str):
    assert check_url(url) == stored_url(url) == url


def test_a_path_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert stored_url("runs/x") == str(tmp_path / "runs" / "x")


@pytest.mark.parametrize("name", ["", "a/b", "-x", ".x", "a b", "x" * 65, None, 3, "HEAD", "x.lock"])
def test_odd_names_of_remotes_are_refused(name):
    with pytest.raises(InvalidInputError):
        Remote(name, "memory://x")


@pytest.mark.parametrize("flag", ["tier", "promisor"])
def test_a_flag_of_a_remote_that_is_none_is_refused_before_it_is_written(flag: str) -> None:
    with Repository.init("memory://") as repo:
        for given in ("no", 1, None):
            with pytest.raises(InvalidInputError, match=f"{flag} is .*: give True or False"):
                repo.add_remote("far", "/far", **{flag: given})  # type: ignore[arg-type]
        repo.add_remote("far", "/far", **{flag: np.bool_(True)})  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match=f"{flag} is 'no': give True or False"):
            repo.set_remote("far", **{flag: "no"})  # type: ignore[arg-type]
        assert [getattr(remote, flag) for remote in repo.remotes()] == [True]


def test_a_record_that_was_not_written_by_this_is_refused():
    store = MemoryStore()
    change_settings(store, lambda held: held.with_remote(ORIGIN))
    whole = unseal("settings", store.get(SETTINGS_KEY), version=1, key=SETTINGS_KEY)
    one = {"name": "a", "url": "memory://a"}
    for odd in [
        {"remotes": 3}, {"remotes": [3]}, {"remotes": [one, one]}, {"remotes": [{"name": "b", "url": "u"}, one]},
        {"remotes": [one | {"more": 1}]}, {"remotes": [{"name": "a"}]}, {"remotes": [one | {"tier": False}]},
        {"remotes": [one | {"url": SECRET_URLS[0]}]}, {"remotes": [one | {"fetch": [3]}]}, {"index_url": None},
        {"index_url": SECRET_URLS[0]}, {"remotes": [{"name": f"r{i:03}", "url": "u"} for i in range(101)]},
    ]:  # fmt: skip
        store.put(SETTINGS_KEY, seal("settings", 1, whole | odd, key=SETTINGS_KEY))
        with pytest.raises(CorruptionError, match="settings"):
            read_settings(store)
    store.put(SETTINGS_KEY, b"")
    with pytest.raises(CorruptionError):
        read_settings(store)
    store.put(SETTINGS_KEY, seal("settings", 2, whole, key=SETTINGS_KEY))
    with pytest.raises(UnsupportedVersionError):
        read_settings(store)


def test_passwords_keys_and_tokens_of_urls_are_taken_out_of_a_text() -> None:
    for text, wanted in (
        ("postgresql+psycopg://me:pass/w%40rd@host/db", "postgresql+psycopg://me:***@host/db"),
        ("--index=postgresql://me:a@b:c@host/db?sslmode=on", "--index=postgresql://me:***@host/db?sslmode=on"),
        ("https://x/y?X-Amz-Signature=abc&b=1&token=t", "https://x/y?X-Amz-Signature=***&b=1&token=***"),
        ("postgresql://me@host/db?password=x", "postgresql://me@host/db?password=***"),
        ("s3://bucket/a?region=eu&profile=p", "s3://bucket/a?region=eu&profile=p"),
        ("train.py", "train.py"), ("user@host:path", "user@host:path"), ("http://h:80/x", "http://h:80/x"),
    ):  # fmt: skip
        assert without_secrets(text) == wanted


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket/x?endpoint=https://elsewhere.example", "s3://bucket/x?endpoint=https://elsewhere.example"),
        ("gs://bucket/x", "gs://bucket/x"),
        (
            "gs://b/x?endpoint=https://storage-me.p.googleapis.com",
            "gs://b/x?endpoint=https://storage-me.p.googleapis.com",
        ),
        ("gs://b/x?endpoint=https://a.example", "gs://b/x?endpoint=https://a.example&anonymous=true"),
        ("gs://b?anonymous=false&endpoint=https://a.example", "gs://b?endpoint=https://a.example&anonymous=true"),
        ("gs://b?endpoint=https://agoogleapis.com", "gs://b?endpoint=https://agoogleapis.com&anonymous=true"),
    ],
)
def test_a_token_goes_to_no_service_that_settings_alone_name(url: str, place: str) -> None:
    remote = Remote("origin", url)
    assert unquote(remote.place(MemoryStore())) == place and remote.url == url


def test_a_remote_that_is_named_is_opened_without_a_token_for_a_stranger(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "here", group=None) as repo:
        repo.add_remote("origin", "gs://bucket/x?endpoint=https://a.example")
        assert (
            unquote(remote_named(repo._handle, "origin")[1])
            == "gs://bucket/x?endpoint=https://a.example&anonymous=true"
        )
        assert remote_named(repo._handle, "gs://bucket/x?endpoint=https://a.example")[1].endswith("a.example")


PG = "postgresql+psycopg://me@db/x"


@pytest.mark.parametrize(
    "options",
    [
        "gssdelegation=1", "sslkeylogfile=/home/me/.bashrc", "passfile=/home/me/.pgpass", "service=prod",
        "oauth_issuer=https://a.example", "hostaddr=1.2.3.4&service=prod", "servicefile=/tmp/x",
    ],
)  # fmt: skip
def test_settings_give_no_database_what_is_ours(options: str) -> None:
    with pytest.raises(InvalidInputError, match="anybody may have written"):
        from_settings(f"{PG}?{options}")


@pytest.mark.parametrize("given", ["password", "md5", "!scram-sha-256", "scram-sha-256,password", "password,%20md5"])
def test_settings_do_not_choose_that_a_password_is_shown(given: str) -> None:
    assert unquote(from_settings(f"{PG}?require_auth={given}")).endswith("require_auth=!password,!md5")
    assert unquote(from_settings(f"{PG}?require_auth=none&require_auth={given}")).endswith("!password,!md5")


def test_settings_may_be_stricter_and_name_a_service() -> None:
    assert from_settings(f"{PG}?require_auth=scram-sha-256").endswith("require_auth=scram-sha-256")
    assert "service=team" in from_settings("postgresql+psycopg:///?service=team")


SECRET = "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        f"s3://bucket/x?endpoint=http://ann:{SECRET}@host:9000", f"s3://bucket/x?endpoint=https://{SECRET}@host",
        f"s3://bucket/x?endpoint=https://host/?token={SECRET}", f"gs://bucket/x?endpoint=https%3A%2F%2Fa%3A{SECRET}%40h",
        f"s3://bucket:{SECRET}/x", f"s3://ann%3A{SECRET}%40bucket/x", f"s3://bucket/x?sse_key={SECRET}",
    ],
)  # fmt: skip
def test_a_secret_inside_of_a_part_of_a_url_is_neither_stored_nor_said(url: str, tmp_path: Path) -> None:
    with Repository.init(tmp_path / "here", group=None) as repo:
        for call in (lambda: repo.add_remote("origin", url), lambda: repo.fetch(url), lambda: repo.push(url)):
            with pytest.raises(InvalidInputError) as caught:
                call()
            assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"https://ann:{SECRET}@host/x", f"ftp://ann:{SECRET}@host/x", f"file://ann:{SECRET}@host/x",
        f"s3:/ann:{SECRET}@bucket/x", f"s3://bucket:{SECRET}/x", f"s3://ann:{SECRET}%40bucket/x",
        f"https://[ann:{SECRET}@host/x", f"https://host/x?next=http://a/?token={SECRET}",
    ],
)  # fmt: skip
def test_a_place_that_is_none_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        open_store(url)
    assert SECRET not in str(caught.value)
    assert SECRET not in str(caught.value.__cause__)


def test_a_remote_that_was_noted_where_it_may_not_be_can_be_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a repository that was copied into a bucket, whose remote is a promisor: only its name changes."""
    bucket = ObjectStore(MemoryBucket(), "", url="s3://bucket")
    monkeypatch.setitem(schemes.SCHEMES, "s3", lambda text: bucket)
    with closing(init_repository("s3://bucket", cache=None)) as handle:
        noted = Remote("origin", "/data/base", promisor=True)
        change_settings(handle.store, lambda held: held.with_remote(noted))
        assert rename_remote(handle, "origin", "base").promisor
