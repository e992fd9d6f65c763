"""The rows of a pack that a commit has just written are the same, brought into the index in parts or together."""

from __future__ import annotations

import pytest
import torch

from cas_ckpt import Repository
from cas_ckpt.core import records
from cas_ckpt.core.records import pack_record
from cas_ckpt.index.schema import LOCATIONS, OBJECTS
from cas_ckpt.objects.pack import PackKind


def rows(repo: Repository) -> list[tuple[object, ...]]:
    """Where every object is, apart from the names of packs and the numbers of objects."""
    query = OBJECTS.join(LOCATIONS, OBJECTS.c.object_id == LOCATIONS.c.object_id).select()
    names = ("digest", "kind", "first_leaf", "num_leaves", "num_bytes", "offset", "stored_bytes", "encoding")
    with repo._handle.index._database.reading() as connection:
        return sorted(tuple(getattr(row, name) for name in names) for row in connection.execute(query))


def test_a_commit_of_many_chunks_and_nodes_is_indexed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PART_ENTRIES", 7)
    monkeypatch.setattr(records, "OWN_PART_BYTES", 500)
    made = []
    monkeypatch.setattr("cas_ckpt.core.handle.pack_record", lambda *args: made.append(pack_record(*args)) or made[-1])
    state = {f"layers.{number}": {"w": torch.arange(number, number + 600)} for number in range(40)}
    with Repository.init("memory://rows-in-parts", group=None) as repo:
        repo.commit(state)
        assert {record.kind for record in made if record.parts is not None} == set(PackKind)
        assert all(len(part.entries) <= 7 for record in made if record.parts for part in record.parts())
        assert repo.fsck().ok
        found = repo.load("main")
        assert all(torch.equal(found[key]["w"], each["w"]) for key, each in state.items())
        before = rows(repo)
        repo.rebuild_index()
        assert rows(repo) == before
        assert len(before) > 80
