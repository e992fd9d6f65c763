"""Builders of packs and histories for the tests of the index."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, select

from cas_ckpt.index import history, remembered
from cas_ckpt.index.index import Index
from cas_ckpt.index.rows import CommitRow, PackRecord
from cas_ckpt.index.schema import COMMITS, METADATA, REFS
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.pack import ExtentInfo, PackKind

STORE = "store-1"


def digest(*names: object) -> Digest:
    """An id that is the same for the same names."""
    return Digest(hashlib.sha256(repr(names).encode()).digest())


def extent(name: object, kind: ObjectKind = ObjectKind.CHUNK, **changes: Any) -> ExtentInfo:
    """An extent of 1000 plain and 400 stored bytes behind a header of 50."""
    fields: dict[str, Any] = {
        "digest": name if isinstance(name, bytes) else digest(name),
        "kind": kind,
        "encoding": 1,
        "num_bytes": 1000,
        "stored_bytes": 400,
        "leaf_bytes": 500,
        "first_leaf": 0,
        "num_leaves": 2,
        "offset": 64,
        "header_bytes": 50,
    }
    return ExtentInfo(**fields | changes)


def data_pack(name: str, chunks: Sequence[object]) -> PackRecord:
    """A data pack of one extent per chunk."""
    return PackRecord(name, PackKind.DATA, 10_000, [extent(chunk) for chunk in chunks])


def meta_pack(name: str, nodes: dict[object, Sequence[object]], *, commit: CommitRow | None = None) -> PackRecord:
    """A meta pack of tree nodes (name -> names of their children) and at most one commit."""
    entries = [extent(node, ObjectKind.TREE) for node in nodes]
    edges = [(digest(node), [digest(child) for child in children]) for node, children in nodes.items()]
    if commit:
        entries.append(extent(commit.digest, ObjectKind.COMMIT))
    return PackRecord(name, PackKind.META, 5_000, entries, edges, [commit] if commit else [])


def commit_row(name: str, parents: Sequence[str] = (), **fields: Any) -> CommitRow:
    """The row of the commit `name` on the tree `root of NAME`."""
    settings: dict[str, Any] = {"root": digest(f"root of {name}"), "message": name} | fields
    return CommitRow(digest(name), parents=tuple(digest(parent) for parent in parents), **settings)


def commit_pack(name: str, parents: Sequence[str] = (), **fields: Any) -> PackRecord:
    """The meta pack of a commit alone."""
    return meta_pack(f"pack of {name}", {}, commit=commit_row(name, parents, **fields))


def empty(index: Index) -> None:
    """Let `index` know nothing, as if it were new and of the store that it was opened for."""
    with index.writing() as connection:
        for table in METADATA.sorted_tables:
            connection.execute(delete(table))
        remembered.write_meta(connection, remembered.STORE, index._wanted)
    index.store_id = index._wanted


def all_commits(index: Index) -> list[CommitRow]:
    """Every commit that the index knows, oldest row first."""
    with index.reading() as connection:
        numbers = connection.execute(select(COMMITS.c.object_id).order_by(COMMITS.c.object_id)).scalars().all()
        return history.read_commits(connection, numbers)


def remove_ref(index: Index, name: str) -> None:
    """Let the index remember nothing of the ref called `name`."""
    with index.writing() as connection:
        connection.execute(delete(REFS).where(REFS.c.name == name))
