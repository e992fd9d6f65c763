"""Packs that were taken in by an older schema, and of whose nodes and commits rows are missing still.

Invariant: a pack is noted, or all rows of its nodes are there. New packs are never noted, for they bring their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from sqlalchemy import Connection, delete, select

from cas_ckpt.errors import CorruptionError
from cas_ckpt.index import manifests
from cas_ckpt.index.contents import rows_of_commit
from cas_ckpt.index.database import OBJECTS_BY_ID, insert_missing, rows_for, rows_of
from cas_ckpt.index.db_errors import REBUILD
from cas_ckpt.index.rows import PackRecord
from cas_ckpt.index.schema import COMMIT_TEXTS, PACKS, PENDING
from cas_ckpt.index.statements import KEYS_PER_QUERY, batches

T = TypeVar("T")

_ANY = select(PENDING.c.pack_id).limit(1)
_PACKS = select(PACKS.c.name, PACKS.c.size_bytes, PACKS.c.pack_id).join(PENDING, PENDING.c.pack_id == PACKS.c.pack_id)


def is_pending(connection: Connection) -> bool:
    """Whether rows of any pack are missing."""
    return bool(rows_of(connection, _ANY))


class RowsPendingError(Exception):
    """Rows of some pack are missing, so that a question was not asked."""


def answer(connection: Connection, question: Callable[..., T], /, *args: object, **kwargs: object) -> T:
    """The answer to a question about manifests, in one transaction with the look whether rows are missing.

    Raises:
        RowsPendingError: they are.
    """
    if is_pending(connection):
        raise RowsPendingError
    return question(connection, *args, **kwargs)


def pending_packs(connection: Connection) -> dict[str, int]:
    """The packs whose rows are missing -> their sizes, by name."""
    return {name: size for name, size, _ in sorted(rows_of(connection, _PACKS))}


def complete(connection: Connection, records: Sequence[PackRecord]) -> None:
    """Add the rows of the nodes of these packs, those that are still noted, and note them no longer.

    Raises:
        CorruptionError: the index lacks an object that a node names.
    """
    by_name = {record.name: record for record in records}
    noted = {row.name: row.pack_id for row in rows_for(connection, _PACKS, PACKS.c.name, by_name)}
    missing = [by_name[name] for name in noted]
    named = {digest for record in missing for digest, _ in record.contents}
    named.update(child for record in missing for _, children in record.edges for child in children)
    commits = [commit for record in missing for commit in record.commits]
    named.update(commit.digest for commit in commits)
    numbers = {digest: number for digest, number, _ in OBJECTS_BY_ID.rows(connection, named)}
    if len(numbers) < len(named):
        raise CorruptionError(f"the index lacks {len(named) - len(numbers)} objects that nodes name: {REBUILD}")
    manifests.add_contents(connection, missing, numbers)
    texts = [row for commit in commits for row in rows_of_commit(numbers[commit.digest], commit)[COMMIT_TEXTS]]
    insert_missing(connection, COMMIT_TEXTS, sorted(texts))
    for batch in batches(sorted(noted.values()), KEYS_PER_QUERY):
        connection.execute(delete(PENDING).where(PENDING.c.pack_id.in_(batch)))
