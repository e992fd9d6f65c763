"""The schema that the migrations make, and databases of other versions."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

import cas_ckpt
from cas_ckpt.errors import CorruptionError, UnsupportedVersionError
from cas_ckpt.index import remembered
from cas_ckpt.index.database import open_database
from cas_ckpt.index.index import Index, ensure_schema, migrations_folder
from cas_ckpt.index.rows import REVISIONS
from cas_ckpt.index.schema import METADATA
from tests import quick_index
from tests.index.building import STORE, data_pack
from tests.index.plans_suite import SHAPES, loads, plan
from tests.quick_index import migrations_run


@pytest.fixture(autouse=True)
def _migrations_run() -> Iterator[None]:
    with migrations_run():
        yield


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    return config


def _tables(place: Path, *, views: bool = True) -> dict[str, str]:
    raw = sqlite3.connect(place)
    rows = raw.execute(
        "SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'alembic%' AND sql IS NOT NULL "
        f"AND (type <> 'view' OR {views:d})"
    )
    found = {name: " ".join(sql.replace('"', "").split()) for name, sql in rows}  # a renamed table is quoted
    raw.close()
    return found


def test_migrating_an_empty_database_makes_just_what_the_code_declares(tmp_path: Path) -> None:
    migrated, declared = tmp_path / "migrated.sqlite", tmp_path / "declared.sqlite"
    database = open_database(migrated, store_id=STORE, read_only=False)
    ensure_schema(database)
    with database.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    database.close()
    other = open_database(declared, store_id=STORE, read_only=False)
    with other.writing() as connection:
        METADATA.create_all(connection)
    other.close()
    assert _tables(migrated, views=False) == _tables(declared)


def test_who_logs_lines_of_information_sees_none_of_how_tables_are_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with Index.open(tmp_path / "index.sqlite", store_id=STORE):
        assert [each.message for each in caplog.records if each.name.startswith("alembic")] == []
    assert logging.getLogger("alembic").level == logging.NOTSET


def test_the_code_knows_every_revision_and_needs_the_last(tmp_path: Path) -> None:
    script = ScriptDirectory.from_config(_config())
    assert tuple(revision.revision for revision in script.walk_revisions())[::-1] == REVISIONS
    assert script.get_current_head() == REVISIONS[-1]


def test_migrations_go_down_to_nothing_and_up_again(tmp_path: Path) -> None:
    place = tmp_path / "index.sqlite"
    with Index.open(place, store_id=STORE) as index:
        index.add_packs([data_pack("d", ["a"])])
    before = _tables(place)
    database, config = open_database(place, store_id=STORE, read_only=False), _config()
    with database.writing() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    database.close()
    assert _tables(place) == {}
    with Index.open(place, store_id=STORE) as index:
        assert index.packs() == {}
    assert _tables(place) == before


def test_an_index_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "index.sqlite"
    Index.open(place, store_id=STORE).close()
    with sqlite3.connect(place) as raw:
        raw.execute("UPDATE alembic_version SET version_num = '9999'")
    raw.close()
    before = place.read_bytes()
    for read_only in (False, True):
        with pytest.raises(UnsupportedVersionError, match=r"9999.*upgrade cas_ckpt"):
            Index.open(place, store_id=STORE, read_only=read_only)
    assert place.read_bytes() == before


def test_tables_without_a_version_are_damage(tmp_path: Path) -> None:
    place = tmp_path / "index.sqlite"
    Index.open(place, store_id=STORE).close()
    with sqlite3.connect(place) as raw:
        raw.execute("DROP TABLE alembic_version")
    raw.close()
    with pytest.raises(CorruptionError, match=r"no schema version.*index rebuild"):
        Index.open(place, store_id=STORE)


def test_an_interrupted_migration_leaves_an_empty_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "index.sqlite"
    broken = tmp_path / "migrations" / "versions"
    broken.mkdir(parents=True)
    versions = sorted(path.name for path in (migrations_folder() / "versions").glob("0*.py"))
    for name in ("env.py", *(f"versions/{version}" for version in versions)):
        text = (migrations_folder() / name).read_text().replace("    _make_history()\n", "    raise OSError('cut')\n")
        (tmp_path / "migrations" / name).write_text(text)
    monkeypatch.setattr(cas_ckpt, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(OSError, match="cut"):
        Index.open(place, store_id=STORE)
    monkeypatch.undo()
    assert _tables(place) == {}
    Index.open(place, store_id=STORE).close()


def test_an_index_of_the_first_schema_is_upgraded_and_keeps_what_it_knows(tmp_path: Path) -> None:
    place = tmp_path / "index.sqlite"
    with Index.open(place, store_id=STORE) as index:
        index.add_packs([data_pack("d", ["a"])])
    database, config = open_database(place, store_id=STORE, read_only=False), _config()
    with database.writing() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
    database.close()
    assert "plans" not in _tables(place) and "t_plans" not in _tables(place)
    before = place.read_bytes()
    with Index.open(place, store_id=STORE, read_only=True) as index:
        assert index.packs() == {"d": 10_000} and index.in_memory
    assert place.read_bytes() == before
    with Index.open(place, store_id=STORE) as index:
        assert (index.packs(), index.read(remembered.read_plans)) == ({"d": 10_000}, [])
        row = plan("root", "dp=2")
        index.write(remembered.write_plan, row, loads(2), SHAPES)
        assert index.read(remembered.read_plan, row.root, row.target) is not None


def test_migrations_inside_the_package_are_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "cas_ckpt"
    for folder in (package / "migrations", package.parent / "migrations"):
        folder.mkdir(parents=True)
        (folder / "env.py").touch()
    monkeypatch.setattr(cas_ckpt, "__file__", str(package / "__init__.py"))
    assert migrations_folder() == package / "migrations"


def test_the_recorded_script_that_other_tests_begin_with_makes_the_same(tmp_path: Path) -> None:
    migrated, recorded = tmp_path / "migrated.sqlite", tmp_path / "recorded.sqlite"
    Index.open(migrated, store_id=STORE).close()
    quick_index.install()
    Index.open(recorded, store_id=STORE).close()
    assert _tables(recorded) == _tables(migrated)
    for place in (migrated, recorded):
        with sqlite3.connect(place) as raw:
            assert raw.execute("SELECT version_num FROM alembic_version").fetchall() == [(REVISIONS[-1],)]
        raw.close()
