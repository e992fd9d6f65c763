"""stats and du: bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from cas_ckpt.cli.command import verb
from cas_ckpt.cli.output import echo, echo_json, escaped, plain, subject, table
from cas_ckpt.cli.settings import Settings
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.face import Repository
    from cas_ckpt.ops.usage import CommitUsage, RepositoryStats, UsageRow

_BY = ("commit", "branch", "tensor")
_COLUMNS = ("total", "new", "unique", "shared")


@verb("stats", examples=["cas-ckpt stats", "cas-ckpt stats main~1"], also=[15])
@click.argument("revision", required=False)
@click.pass_obj
def stats(settings: Settings, revision: str | None) -> None:
    """Show how much the repository holds; or, with REVISION, one commit."""
    with settings.open() as repo:
        if revision is not None:
            _print_commit(settings, repo.commit_stats(revision))
            return
        found = repo.stats()
    if settings.json:
        echo_json(plain(found) | {"ratio": found.ratio})
    else:
        echo(table(_repository(found)))


def _repository(found: RepositoryStats) -> Iterator[tuple[str, str]]:
    yield "commits", str(found.num_commits)
    yield "branches", str(found.num_branches)
    yield "tags", str(found.num_tags)
    yield "states", f"{human_bytes(found.total_bytes)} (all commits, each whole)"
    yield "unique", f"{human_bytes(found.unique_bytes)} in {found.num_chunks} chunks and {found.num_nodes} nodes"
    yield "stored", f"{human_bytes(found.pack_bytes)} in {found.num_packs} packs"
    yield "ratio", f"{found.ratio:.1f} : 1"
    if found.num_temporaries:
        left = f"{human_bytes(found.temporary_bytes)} in {found.num_temporaries} temporary files"
        yield "left over", f"{left} of killed commits, which cas-ckpt gc removes"


def _print_commit(settings: Settings, found: CommitUsage) -> None:
    if settings.json:
        echo_json(found)
        return
    commit, usage = found.commit, found.usage
    echo(
        table(
            [
                ("commit", f"{commit.short_id} {subject(commit.message)}"),
                ("entries", f"{commit.stats.num_entries}, {commit.stats.num_tensors} of them tensors"),
                ("total", f"{human_bytes(usage.total_bytes)} (what the state holds)"),
                ("new", f"{human_bytes(usage.new_bytes)} (what the commit added)"),
                ("unique", f"{human_bytes(usage.unique_bytes)} (what no other commit needs)"),
                ("shared", f"{human_bytes(usage.shared_bytes)} (what others need too)"),
            ]
        )
    )


@verb(
    "du",
    examples=["cas-ckpt du", "cas-ckpt du --by branch", "cas-ckpt du --by tensor main -k 'model/**'"],
    also=[15],
)
@click.argument("revision", required=False)
@click.option("--by", type=click.Choice(_BY), default=_BY[0], show_default=True, help="What a row is.")
@click.option("-k", "--key", "keys", multiple=True, metavar="PATTERN", help="By tensor: only these; may be repeated.")
@click.option("-n", "--max-count", "limit", type=click.IntRange(min=0), metavar="N", help="By commit: at most N.")
@click.option("-b", "--bytes", "exact", is_flag=True, help="Print bytes, without units.")
@click.pass_obj
def du(
    settings: Settings, revision: str | None, by: str, keys: tuple[str, ...], limit: int | None, exact: bool
) -> None:
    """Show what each commit, branch or tensor costs.

    \b
    total   what its state holds
    new     what it added when it was committed
    unique  what is there for it alone
    shared  what something else needs too

    REVISION limits commits to those that it leads to, and says which commit's tensors are meant.
    """  # noqa: D301  # click wants this very character
    with settings.open() as repo:
        rows = repo.du(by, ref=revision, keys=keys or None, limit=limit)
        labels = _labels(repo, by)
    if settings.json:
        echo_json(rows)
    else:
        echo(_usage_table(rows, labels, exact=exact))


def _labels(repo: Repository, by: str) -> Mapping[str, str]:
    """What stands behind the numbers of a commit."""
    if by != "commit":
        return {}
    commits = repo.log(all_refs=True)
    return {commit.id: f"{commit.id[:SHORT_HEX]} {subject(commit.message)}" for commit in commits}


def _usage_table(rows: Sequence[UsageRow], labels: Mapping[str, str], *, exact: bool) -> list[str]:
    shown = str if exact else human_bytes
    lines: list[Sequence[str]] = [(*_COLUMNS, "name")]
    for row in rows:
        sizes = (row.total_bytes, row.new_bytes, row.unique_bytes, row.shared_bytes)
        lines.append((*map(shown, sizes), labels.get(row.name) or escaped(row.name)))
    return table(lines, right=frozenset(range(len(_COLUMNS))))
