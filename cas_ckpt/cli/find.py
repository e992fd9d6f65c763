"""find: entries and commits by key, dtype, shape, size, content and layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from cas_ckpt.cli.command import SIZE, Settings, flag, limit_option, verb
from cas_ckpt.cli.log import line_of, names_of_commits
from cas_ckpt.cli.output import echo_json, escaped, plain, table
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.ops.history.find import FoundEntry


@verb(
    "find",
    examples=[
        "cas-ckpt find 'model/layers.17.*'",
        "cas-ckpt find --dtype bf16 --shape '4096,*' --in main",
        "cas-ckpt find '**/lora_*' --min-size 1MB --commits",
        "cas-ckpt find --object 3fa9c1d2 --json",
        "cas-ckpt find 'optim/**' --at v1 --dtype float32",
    ],
    also=[15],
)
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@click.option("--dtype", metavar="NAME", help="Tensors of this dtype: bf16, bfloat16, or a pattern: 'float8_*'.")
@click.option("--shape", metavar="N,N", help="Tensors of this shape; * is any size, ... any number of dimensions.")
@click.option("--min-size", "min_bytes", type=SIZE, help="Of so many plain bytes or more, e.g. 1MB.")
@click.option("--max-size", "max_bytes", type=SIZE, help="Of so many plain bytes or fewer.")
@click.option("--object", "object_id", metavar="ID", help="What is this chunk or tensor, or holds it.")
@click.option("--in", "ref", multiple=True, metavar="REVISION", help="In commits that this leads to; may be repeated.")
@click.option("--at", multiple=True, metavar="REVISION", help="In this commit alone; may be repeated.")
@click.option("--world-size", type=click.IntRange(min=1), metavar="N", help="In commits made by N ranks.")
@click.option("--axis", "axes", multiple=True, metavar="NAME[=N]", help="In commits over a mesh with this dimension.")
@flag("--commits", "of_commits", help="Show the commits that hold such entries, as log --oneline does.")
@limit_option("At most N rows.")
@click.pass_obj
def find(settings: Settings, /, of_commits: bool, limit: int | None, **conditions: Any) -> None:
    """Find entries in all of history, or commits that hold them, by what they are.

    Without --in or --at, all commits are searched that a branch, tag or pin leads to; forgotten ones are left out.
    What several commits have in common is one row, with the number of commits, the first and the last of them.
    In a KEY, * and ? stay inside one component, ** crosses them.
    """
    given = {name: None if value == () else value for name, value in conditions.items()}
    wanted: dict[str, Any] = given | {"axes": conditions["axes"]}
    with settings.open() as repo:
        if of_commits:
            commits = repo.find_commits(**wanted, limit=limit)
            names = names_of_commits(repo)
            if settings.json:
                echo_json([plain(commit) | {"refs": list(names.get(commit.id, ()))} for commit in commits])
            else:
                width, colour = settings.width, settings.colour
                lines = (line_of(each, names.get(each.id, ()), width=width, colour=colour) for each in commits)
                settings.page(None, lines)
            return
        found = repo.find(**wanted, limit=limit)
    settings.page(found, table(_rows(found), right=frozenset({3, 5})))


_HEAD = ("kind", "dtype", "shape", "size", "object", "commits", "first", "last", "key")


def _rows(found: Sequence[FoundEntry]) -> Iterator[Sequence[str]]:
    if found:
        yield _HEAD
    for one in found:
        shape = "" if one.shape is None else f"[{', '.join(map(str, one.shape))}]"
        yield (
            one.kind, one.dtype or "", shape, human_bytes(one.num_bytes), (one.object_id or "-")[:SHORT_HEX],
            str(one.num_commits), one.first[:SHORT_HEX], one.last[:SHORT_HEX], escaped(one.key),
        )  # fmt: skip
