"""Views of an earlier version give way, those of a later one and those of others stay."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from blake3 import blake3

from cas_ckpt.errors import CorruptionError, UnsupportedVersionError
from cas_ckpt.index import views
from cas_ckpt.index.index import Change, Index, beside, replace_rows
from cas_ckpt.index.rows import REVISIONS
from cas_ckpt.index.schema import VIEWS_VERSION
from tests.index.building import STORE, commit_pack
from tests.index.manifest_rows import make_older
from tests.index.views_suite import COLUMNS, ask, rows


@pytest.fixture
def place(tmp_path: Path) -> Path:
    found = tmp_path / "index.sqlite"
    with Index.open(found, store_id=STORE) as index:
        index.add_packs([commit_pack("a")])
    return found


def change(place: Path, *statements: str) -> None:
    with closing(sqlite3.connect(place)) as raw, raw:
        for statement in statements:
            raw.execute(statement)


def view_names(place: Path) -> set[str]:
    with closing(sqlite3.connect(place)) as raw:
        return {name for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'view'")}


EARLIER = (
    "DROP VIEW commits",
    "CREATE VIEW commits AS SELECT 1 AS commit_id",
    "CREATE VIEW forgotten_idea AS SELECT 2 AS x",
    "CREATE VIEW mine AS SELECT 3 AS x",
    "UPDATE t_meta SET value = '0 commits forgotten_idea' WHERE key = 'views'",
)


def test_earlier_views_are_replaced_when_the_index_is_opened(place: Path) -> None:
    change(place, *EARLIER)
    with Index.open(place, store_id=STORE) as index:
        assert rows(index, "SELECT message FROM commits") == [("a",)]
        assert rows(index, "SELECT x FROM mine") == [(3,)]
    assert view_names(place) == {*COLUMNS, "mine"}


def test_views_that_are_missing_are_made(place: Path) -> None:
    change(place, *(f"DROP VIEW {name}" for name in COLUMNS), "DELETE FROM t_meta WHERE key = 'views'")
    with Index.open(place, store_id=STORE) as index:
        assert rows(index, "SELECT views_version FROM about") == [(VIEWS_VERSION,)]


def test_views_of_a_later_version_stay(place: Path) -> None:
    change(place, *EARLIER, f"UPDATE t_meta SET value = '{VIEWS_VERSION + 1} commits new' WHERE key = 'views'")
    before = place.read_bytes()
    with Index.open(place, store_id=STORE) as index:
        assert ask(index, "SELECT * FROM commits").columns == ("commit_id",)
    assert place.read_bytes() == before


def test_an_index_that_is_opened_to_be_read_keeps_its_views_and_says_that_they_are_old(place: Path) -> None:
    change(place, *EARLIER)
    with Index.open(place, store_id=STORE, read_only=True) as index:
        assert index.packs()
        with pytest.raises(UnsupportedVersionError, match="views are of an earlier version.*open it once for writing"):
            ask(index, "SELECT * FROM commits")


def test_views_are_made_again_after_a_migration(place: Path) -> None:
    with Index.open(place, store_id=STORE):
        pass
    make_older(place, STORE, "0003")
    assert view_names(place) == set()
    with Index.open(place, store_id=STORE) as index:
        assert rows(index, "SELECT views_version, schema_revision FROM about") == [(VIEWS_VERSION, REVISIONS[-1])]
    assert view_names(place) == set(COLUMNS)


def test_views_that_cannot_be_made_leave_those_that_were_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(place, *EARLIER)
    monkeypatch.setattr(views, "VIEWS", (*views.VIEWS[:-1], views.View("bad", "nothing", "(")))
    with pytest.raises(CorruptionError):
        Index.open(place, store_id=STORE)
    assert view_names(place) == {*COLUMNS, "mine", "forgotten_idea"}
    monkeypatch.undo()
    with Index.open(place, store_id=STORE) as index:
        assert rows(index, "SELECT message FROM commits") == [("a",)]


def test_several_that_open_an_older_index_at_once_make_its_views_once(place: Path) -> None:
    change(place, *EARLIER)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with Index.open(place, store_id=STORE) as index:
                assert rows(index, "SELECT count(*) FROM commits") == [(1,)]
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_rebuilt_index_has_its_views_and_a_copy_in_memory_too(place: Path) -> None:
    with Index.open(place, store_id=STORE) as index, beside(index) as made:
        replace_rows(index, made, lambda _: Change([commit_pack("b")]))
        assert rows(index, "SELECT message FROM commits") == [("b",)]
        with index.detached() as copy:
            copy.add_packs([commit_pack("c")])
            assert rows(copy, "SELECT message FROM commits ORDER BY 1") == [("b",), ("c",)]
        assert rows(index, "SELECT count(*) FROM commits") == [(1,)]


TEXTS = {
    1: "ccbf78da1637d51c", 2: "21e992b44119482c", 3: "1296efd7080a47fd", 4: "7f9d7c2e046d7ef0", 5: "e64d6cea9a9aa003",
    6: "843f74d21de94686",
}  # fmt: skip
"""Version of the views -> digest of their texts for both databases. What was released stays: a text that changes needs
a version of its own (schema.VIEWS_VERSION), or indexes that are there would keep the old one."""


def test_the_texts_of_views_change_with_their_version_alone() -> None:
    texts = "\n".join(view.text(dialect) for dialect in ("sqlite", "postgresql") for view in views.VIEWS)
    assert blake3(texts.encode()).hexdigest(length=8) == TEXTS[VIEWS_VERSION]
