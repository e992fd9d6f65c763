"""show, ls and read: what is in a commit."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cas_ckpt.cli.command import REGION, Settings, verb
from cas_ckpt.cli.log import describe
from cas_ckpt.cli.output import echo, echo_json, escaped, plain, subject, table
from cas_ckpt.errors import ConflictError, InvalidInputError
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.ops.checkout.read import Region
    from cas_ckpt.ops.history.show import ListedEntry, ShownCommit
    from cas_ckpt.ops.history.usage import CommitUsage, RepositoryStats, UsageRow
    from cas_ckpt.repository import Repository


@verb("show", examples=["cas-ckpt show", "cas-ckpt show v1 --json"], also=[15])
@click.argument("revision", default="HEAD")
@click.pass_obj
def show(settings: Settings, revision: str) -> None:
    """Show one commit, what names it, and what its state consists of."""
    with settings.open() as repo:
        shown = repo.show(revision)
    if settings.json:
        echo_json(shown)
    else:
        settings.page(_shown(shown, colour=settings.colour))


def _shown(shown: ShownCommit, *, colour: bool) -> Iterator[str]:
    commit = shown.commit
    names = [*shown.branches, *(f"tag: {name}" for name in shown.tags), *(f"pin: {name}" for name in shown.pins)]
    yield from describe(commit, names, colour=colour)
    yield ""
    yield f"Root:    {commit.root}"
    for parent in commit.parents:
        yield f"Parent:  {parent}"
    if shown.has_data:
        yield f"Ranks:   {shown.world_size}"
    for name, note in shown.notes.items():
        yield f"Note:    {escaped(name)}: {escaped(note)}"
    if commit.meta is not None:
        yield f"Meta:    {escaped(repr(commit.meta))}"
    if shown.provenance is not None:
        yield from _provenance(shown.provenance)
    if shown.aliases:
        yield f"Tied:    {'; '.join(' = '.join(map(escaped, group)) for group in shown.aliases)}"
    yield ""
    if not shown.has_data:
        yield "It was forgotten and its data is gone: only this record is left."
        return
    rows = [["name", "entries", "tensors", "size"]]
    rows += [
        [escaped(part.name), str(part.num_entries), str(part.num_tensors), human_bytes(part.num_bytes)]
        for part in shown.parts
    ]
    yield from table(rows, right=frozenset({1, 2, 3}))


def _provenance(found: Any) -> Iterator[str]:
    """One line for each thing that is known."""
    if not isinstance(found, Mapping):
        found = {"": found}
    for name, value in found.items():
        text = shlex.join(map(str, value)) if name == "command" and isinstance(value, list) else value
        yield f"Made:    {escaped(str(name))} {escaped(text if isinstance(text, str) else repr(text))}"


@verb(
    "ls",
    examples=["cas-ckpt ls", "cas-ckpt ls -l main~1 'model/*'", "cas-ckpt ls v1 'optim/state/**/exp_avg'"],
    also=[15],
)
@click.argument("revision", default="HEAD")
@click.argument("patterns", nargs=-1, metavar="[KEY]...")
@click.option("-l", "--long", is_flag=True, help="Kind, dtype, shape and size too.")
@click.pass_obj
def ls(settings: Settings, revision: str, patterns: tuple[str, ...], long: bool) -> None:
    """List the keys of a commit, all of them or those that match a KEY.

    In a KEY, * and ? stay inside one component, ** crosses them; a key that names a container
    stands for all below it.
    """
    with settings.open() as repo:
        entries = repo.ls(revision, patterns or None)
    if settings.json:
        echo_json(entries)
    elif long:
        settings.page(table(map(_long, entries), right=frozenset({3})))
    else:
        settings.page(escaped(entry.key) for entry in entries)


def _long(entry: ListedEntry) -> Sequence[str]:
    shape = "" if entry.shape is None else f"[{', '.join(map(str, entry.shape))}]"
    return entry.kind, entry.dtype or "", shape, human_bytes(entry.num_bytes), escaped(entry.key)


@verb(
    "read",
    examples=[
        "cas-ckpt read main progress/step",
        "cas-ckpt read main model/wte.weight --region 0:10,0:64",
        "cas-ckpt read v1 model/head.weight --output head.npy",
    ],
    also=[14, 15],
)
@click.argument("revision")
@click.argument("key")
@click.option("--region", type=REGION, metavar="A:B,C:D", help="Only this part, as NumPy has it: 0:10,5 or ...,-64:.")
@click.option("-o", "--output", metavar="FILE", help="Write a .npy or .pt file instead of printing.")
@click.option("-f", "--force", is_flag=True, help="Replace FILE if it is there already.")
@click.pass_obj
def read(settings: Settings, revision: str, key: str, region: Region | None, output: str | None, force: bool) -> None:
    """Print the entry KEY of a commit, or a part of it.

    Only what the part touches is read and verified.
    """
    if output is not None:
        _check_output(Path(output), force=force)
    with settings.open() as repo:
        value = repo.read(revision, key, region)
    from cas_ckpt.files import as_lists, write_value

    if output is not None:
        write_value(value, Path(output))
    elif settings.json:
        echo_json({"key": key, "dtype": _dtype(value), "value": as_lists(value)})
    else:
        # Keeps the line breaks that tensors are printed with; everything else is written out.
        echo(escaped(line) for line in _printed(value).split("\n"))


def _printed(value: Any) -> str:
    return str(value) if hasattr(value, "dtype") else repr(value)


def _dtype(value: Any) -> str | None:
    return str(value.dtype).removeprefix("torch.") if hasattr(value, "dtype") else None


def _check_output(path: Path, *, force: bool) -> None:
    if path.suffix not in (".npy", ".pt"):
        raise InvalidInputError(f"{path}: the name of an output file ends in .npy or .pt")
    if path.exists() and not force:
        raise ConflictError(f"{path} is there already: choose another name, or --force")


# DOC of cas_ckpt.cli.show:
# stats and du: bytes.

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
    "du", examples=["cas-ckpt du", "cas-ckpt du --by branch", "cas-ckpt du --by tensor main -k 'model/**'"], also=[15]
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
