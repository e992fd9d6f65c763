"""Files that are no index, were cut, hit by flipped bits, restored from old copies, or cannot be written."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from cas_ckpt.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    OutOfSpaceError,
    PermissionDeniedError,
)
from cas_ckpt.index import contents, garbage, history, remembered, sqlite, usage
from cas_ckpt.index.index import Index
from cas_ckpt.index.rows import RefRow
from tests.index.building import STORE, commit_pack, data_pack, digest, meta_pack


def _filled(place: Path) -> Path:
    with Index.open(place, store_id=STORE) as index:
        names = [f"chunk {number}" for number in range(300)]
        index.add_packs([data_pack("d", names), meta_pack("m", {"root of c": names})])
        index.add_packs([commit_pack("c", ["b"], metrics={"loss": 1}), commit_pack("b", stats={"new_bytes": 1})])
        index.write(remembered.write_refs, [RefRow("heads/main", digest("c"), 0, 0.0)])
    return place


def _use_all(place: Path) -> None:
    with Index.open(place, store_id=STORE) as index:
        (
            index.packs(),
            index.read(remembered.read_refs),
            index.read(usage.read_stats),
            list(history.log(index, [digest("c")])),
        )
        (
            index.read(contents.locate, index.read(contents.chunk_digests)),
            index.read(contents.resolve_prefix, "a"),
            index.read(usage.under, [digest("root of c")]),
        )
        index.add_packs([data_pack("more", ["x", "y"])])
        index.drop_packs(["d"])


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: b"this is no database, whatever its name says" * 30,
        lambda data: data[: len(data) // 2],
        lambda data: data[:700],
        lambda data: data[:512] + bytes(len(data) - 512),
        lambda data: bytes(100) + data[100:],
    ],
    ids=["another file", "half of it", "its head", "zeros after the head", "zeros in the head"],
)
def test_a_damaged_file_is_named_with_the_cure(tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    place = _filled(tmp_path / "index.sqlite")
    place.write_bytes(harm(place.read_bytes()))
    with pytest.raises(CorruptionError, match=r"index\.sqlite.*cas-ckpt index rebuild"):
        _use_all(place)


def test_an_empty_file_becomes_an_empty_index(tmp_path: Path) -> None:
    place = tmp_path / "index.sqlite"
    place.touch()
    with Index.open(place, store_id=STORE) as index:
        assert index.packs() == {}


@pytest.mark.slow
def test_flipped_bits_never_raise_anything_but_corruption(tmp_path: Path) -> None:
    whole = _filled(tmp_path / "whole.sqlite").read_bytes()
    place, chance, caught = tmp_path / "index.sqlite", random.Random(7), 0
    for _round in range(100):
        Index.discard(place, store_id=STORE)
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 1, 3, 20))):
            damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        place.write_bytes(damaged)
        try:
            _use_all(place)
        except (CorruptionError, NotFoundError):  # a flipped id is an id that is not there
            caught += 1
    assert caught > 5


def test_a_schema_that_is_no_text_is_damage(tmp_path: Path) -> None:
    place = _filled(tmp_path / "index.sqlite")
    place.write_bytes(place.read_bytes().replace(b"CREATE TABLE", b"CREATE T\xd9BLE"))
    with pytest.raises(CorruptionError, match="index rebuild"):
        _use_all(place)


@pytest.mark.parametrize("stats", ['{"new', "{}}", "[]", 7])
def test_a_row_that_cannot_have_been_written_is_damage(tmp_path: Path, stats: object) -> None:
    place = _filled(tmp_path / "index.sqlite")
    with sqlite3.connect(place) as raw:
        raw.execute("UPDATE t_commits SET stats = ? WHERE message = 'b'", (stats,))
    raw.close()
    with Index.open(place, store_id=STORE) as index, pytest.raises(CorruptionError, match="index rebuild"):
        index.read(history.read_commit, digest("b"))


def test_a_row_that_the_examination_for_garbage_cannot_read_is_damage(tmp_path: Path) -> None:
    with Index.open(_filled(tmp_path / "index.sqlite"), store_id=STORE) as index:
        index.add_packs([data_pack("d2", ["chunk 1"])])
        with index.writing() as connection:
            connection.exec_driver_sql("UPDATE t_locations SET num_leaves = 'x' WHERE pack_id = 5")
        with pytest.raises(CorruptionError, match="index rebuild"):
            garbage.examine(index)


def test_a_name_that_no_row_can_have_is_the_callers_mistake(tmp_path: Path) -> None:
    with (
        Index.open(_filled(tmp_path / "index.sqlite"), store_id=STORE) as index,
        pytest.raises(InvalidInputError, match="surrogates"),
    ):
        index.read(history.ranked, "\ud800", largest=True, among={digest("c")}, limit=1)


def test_a_missing_table_is_damage(tmp_path: Path) -> None:
    place = _filled(tmp_path / "index.sqlite")
    with sqlite3.connect(place) as raw:
        raw.execute("DROP TABLE t_locations")
    raw.close()
    with Index.open(place, store_id=STORE) as index, pytest.raises(CorruptionError, match="index rebuild"):
        index.read(contents.locate, [digest("chunk 1")])


def test_a_file_that_is_no_index_is_not_kept_open_by_the_error_that_says_so(tmp_path: Path) -> None:
    for content in (b"nothing of use" * 500, None):
        place = tmp_path / f"{content is None}.sqlite"
        if content is None:
            with closing(sqlite3.connect(place)) as raw:
                raw.execute("CREATE TABLE somebodys (x)")
        else:
            place.write_bytes(content)
        with pytest.raises((sqlite3.DatabaseError, ConflictError)) as kept:  # with its traceback
            sqlite.writer(place)
        opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        assert str(place) not in opened, kept


def test_a_damaged_index_can_be_discarded_and_made_again(tmp_path: Path) -> None:
    place = _filled(tmp_path / "index.sqlite")
    place.write_bytes(b"nothing of use" * 100)
    Index.discard(place, store_id=STORE)
    _filled(place)
    _use_all(place)


def test_an_older_copy_says_what_it_knows_and_catches_up(tmp_path: Path) -> None:
    place = _filled(tmp_path / "index.sqlite")
    shutil.copy(place, tmp_path / "copy")
    later = [data_pack("d2", ["new", "chunk 1"]), commit_pack("later", ["c"])]
    with Index.open(place, store_id=STORE) as index:
        index.add_packs(later)
        index.drop_packs(["d"])
        index.add_packs([data_pack("d", [f"chunk {number}" for number in range(300)])])
        expected = index.read(usage.read_stats)
    shutil.copy(tmp_path / "copy", place)
    with Index.open(place, store_id=STORE) as index:
        assert index.packs().keys() == {"d", "m", "pack of b", "pack of c"}
        assert index.add_packs(later) == 2
        assert index.read(usage.read_stats) == expected


def test_a_full_disk_is_said_and_what_was_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = _filled(tmp_path / "index.sqlite")
    pages = place.stat().st_size // sqlite.PAGE_BYTES
    monkeypatch.setattr(sqlite, "_WRITER_PRAGMAS", (*sqlite._WRITER_PRAGMAS, f"max_page_count={pages + 8}"))
    with Index.open(place, store_id=STORE) as index:
        before = index.read(usage.read_stats)
        with pytest.raises(OutOfSpaceError, match="free some"):
            index.add_packs([data_pack("big", range(5000))])
        assert index.read(usage.read_stats) == before
        assert index.add_packs([data_pack("small", ["x"])]) == 1


def test_reading_needs_a_file_and_never_makes_one(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="index rebuild"):
        Index.open(tmp_path / "index.sqlite", store_id=STORE, read_only=True)
    (tmp_path / "index.sqlite").touch()
    with pytest.raises(NotFoundError):
        Index.open(tmp_path / "index.sqlite", store_id=STORE, read_only=True)
    assert [file.name for file in tmp_path.iterdir()] == ["index.sqlite"]


def test_the_database_itself_refuses_to_write_when_it_was_opened_for_reading(tmp_path: Path) -> None:
    with Index.open(_filled(tmp_path / "index.sqlite"), store_id=STORE, read_only=True) as index:
        with pytest.raises(PermissionDeniedError), index._database.writing() as connection:
            connection.exec_driver_sql("DELETE FROM t_packs")
        assert len(index.packs()) == 4


def test_a_folder_in_the_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PermissionDeniedError):
        Index.open(tmp_path, store_id=STORE)
