"""The log of restores: in order, bounded, what it proves, whatever the database."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import func, select

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.index import history, remembered
from cas_ckpt.index.index import Index
from cas_ckpt.index.remembered import RestoreRow
from cas_ckpt.index.schema import RESTORES
from tests.index.building import data_pack, digest, meta_pack


def restore(commit: str, root: str = "root", *, at_s: int = 1, **changes: object) -> RestoreRow:
    row = RestoreRow(
        digest(commit), digest(root), "checkout", digest("wants"), "dp=4,tp=2", 8, at_s * 1_000_000, 2.5, 1 << 40,
        "ann", "node-7", True, None,
    )  # fmt: skip
    return replace(row, **changes)  # type: ignore[arg-type]


def write(index: Index, *rows: RestoreRow) -> None:
    for row in rows:
        index.write(remembered.write_restore, row)


DEEP = "a chunk of the first root itself, and far below the second one"
FAILED = {"num_bytes": None, "error": "CorruptionError: packs/ab.pack: byte 7"}


class RestoreTests:
    def test_restores_are_read_back_the_last_one_first(self, index: Index) -> None:
        rows = [restore("a"), restore("b", "other"), restore("a", wants=None, mesh="", complete=False, **FAILED)]
        write(index, *rows)
        assert index.read(remembered.read_restores) == rows[::-1]
        assert index.read(remembered.read_restores, limit=1) == rows[2:]
        assert index.read(remembered.read_restores, digest("root")) == [rows[2], rows[0]]
        assert index.read(remembered.read_restores, digest("nobody's")) == []

    def test_a_whole_restore_without_error_is_what_proves_a_state(self, index: Index) -> None:
        assert index.read(history.proven, [digest("root")]) == {}
        write(
            index,
            restore("a", "r", at_s=10), restore("b", "r", at_s=20), restore("b", "r", at_s=30, **FAILED),
            restore("b", "r", at_s=40, complete=False), restore("c", "part", at_s=50, complete=False),
            restore("d", "broken", at_s=60, **FAILED), restore("e", "older", at_s=5),
        )  # fmt: skip
        roots = list(map(digest, ("r", "part", "broken", "older", "never seen")))
        assert index.read(history.proven, roots) == {digest("r"): 20_000_000, digest("older"): 5_000_000}
        assert index.read(history.proven, roots[1:3]) == {}
        commits = {digest("a"): 1, digest("b"): 2, digest("e"): 7}  # by their place in the log
        assert index.read(remembered.proven_commits) == commits

    def test_the_log_is_bounded_and_the_last_proof_of_a_state_stays(
        self, index: Index, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remembered, "MOST_OF_A_STATE", 3)
        write(index, restore("a", at_s=1), restore("a", at_s=2))
        write(index, *(restore("a", at_s=at_s, **FAILED) for at_s in range(10, 16)))
        kept = [row.started_us // 1_000_000 for row in index.read(remembered.read_restores)]
        assert kept == [15, 14, 13, 2]
        assert index.read(history.proven, [digest("root")]) == {digest("root"): 2_000_000}
        monkeypatch.setattr(remembered, "MOST_RESTORES", 4)
        write(index, restore("b", "other", at_s=20), restore("c", "third", at_s=21))
        kept = [row.started_us // 1_000_000 for row in index.read(remembered.read_restores)]
        assert kept == [21, 20, 15, 14]

    def test_many_restores_of_one_state_leave_the_proof_of_another(
        self, index: Index, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remembered, "MOST_OF_A_STATE", 3)
        monkeypatch.setattr(remembered, "MOST_RESTORES", 8)
        write(index, restore("old", "proven once", at_s=1))
        write(index, *(restore("busy", at_s=at_s, complete=False) for at_s in range(2, 20)))
        assert index.read(remembered.proven_commits) == {digest("old"): 1}
        assert len(index.read(remembered.read_restores)) == 4

    def test_texts_are_kept_in_one_line_that_a_database_holds(self, index: Index) -> None:
        write(index, restore(
            "a", mesh="d\0p=2", author="Ann\ud800\nB", host="\u202e" * 2000, num_bytes=None,
            error="PeerError: rank 3:\n  'x'; DROP TABLE t_restores; --\0" + "\u00e9" * 5000,
        ))  # fmt: skip
        (found,) = index.read(remembered.read_restores)
        assert found.mesh == "d\ufffdp=2"
        assert found.author.startswith("Ann\ufffd")
        assert found.author.endswith(" B")
        assert found.error is not None
        assert found.error.startswith("PeerError: rank 3: 'x'; DROP TABLE t_restores; --\ufffd\u00e9")
        assert len(found.error) == len(found.host) == remembered.MOST_TEXT
        assert found.error.endswith("...")

    def test_numbers_that_no_database_holds_are_refused(self, index: Index) -> None:
        with pytest.raises(InvalidInputError):
            write(index, restore("a", num_bytes=1 << 63))
        assert index.read(remembered.read_restores) == []

    def test_numbers_of_restores_are_never_given_twice(self, index: Index) -> None:
        write(index, *(restore("a", at_s=at_s) for at_s in range(5)))
        query = select(func.count(), func.count(RESTORES.c.restore_id.distinct()), func.max(RESTORES.c.restore_id))
        assert tuple(index.read(lambda connection: connection.execute(query).one())) == (5, 5, 5)

    def test_a_pack_is_proven_when_all_of_its_chunks_were_read(self, index: Index) -> None:
        assert index.read(remembered.proven_packs) == {}
        index.add_packs([data_pack("old", ["base", "a"]), data_pack("new", ["b"]), data_pack("mixed", ["b", "c", "x"])])
        index.add_packs([data_pack("deep", [DEEP])])
        index.add_packs([
            meta_pack("m", {
                "root 1": ["tensor", "a", DEEP], "root 2": ["tensor", "other", "b", "c"], "tensor": ["base"],
                "other": ["page"], "page": [DEEP],
            }),
            meta_pack("n", {"root 3": ["x"]}),
        ])  # fmt: skip
        write(index, restore("1", "root 1", at_s=10), restore("2", "root 2", at_s=30))
        assert index.read(remembered.proven_packs) == {"old": 10_000_000, "new": 30_000_000, "deep": 30_000_000}
        write(index, restore("3", "root 3", at_s=50, complete=False), restore("3", "root 3", at_s=50, **FAILED))
        assert "mixed" not in index.read(remembered.proven_packs)
        write(index, restore("3", "root 3", at_s=20), restore("1", "root 1", at_s=40))
        assert index.read(remembered.proven_packs) == {
            "old": 40_000_000, "new": 30_000_000, "mixed": 20_000_000, "deep": 40_000_000,
        }  # fmt: skip
        write(index, restore("gone", "of a commit that is gone", at_s=60))
        assert index.read(remembered.proven_packs)["mixed"] == 20_000_000
