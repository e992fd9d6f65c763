"""shards: which ranks held which region of the entries of a commit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import click

from cas_ckpt.cli.command import Settings, verb
from cas_ckpt.cli.output import escaped, long_table
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.ops.history.shards import ShardRow

_COLUMNS = ("ranks", "replicas", "size", "chunks", "shared with", "region", "key")


@verb(
    "shards",
    examples=[
        "cas-ckpt shards main 'model/**/attention.*'",
        "cas-ckpt shards main --rank 5",
        "cas-ckpt shards v1 model/head.weight --json",
    ],
    also=[15],
)
@click.argument("revision", default="HEAD")
@click.argument("patterns", nargs=-1, metavar="[KEY]...")
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Only what rank R held.")
@click.pass_obj
def shards(settings: Settings, revision: str, patterns: tuple[str, ...], rank: int | None) -> None:
    """Show which ranks held which region of the entries of a commit, and who shared chunks.

    A row for each region: the ranks that held it (0-7, 16-64:8 in steps of 8), how many bytes and chunks
    it has, and which other ranks held another part of one of these chunks. KEYs are as for ls.
    """
    with settings.open() as repo:
        settings.page_rows(repo.shards(revision, patterns or None, rank=rank), _lines)


def _lines(rows: Iterator[ShardRow]) -> Iterator[str]:
    cells = (
        (
            str(row.ranks), str(len(row.ranks)), human_bytes(row.num_bytes), str(row.num_chunks),
            str(row.shared_with), row.region, escaped(row.key),
        )
        for row in rows
    )  # fmt: skip
    return long_table(chain([_COLUMNS], cells), right=frozenset({1, 2, 3}))
