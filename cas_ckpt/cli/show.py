"""show, ls, read, find, shards, stats, du: what commits hold, how many bytes. import, export, checkout: their files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from cas_ckpt.arguments import ExportFormat, UsageBy
from cas_ckpt.cli.command import (
    METRIC,
    REGION,
    SIZE,
    UNSIGNED,
    Pair,
    Settings,
    Unit,
    flag,
    given_trust,
    keys_option,
    limit_option,
    memory_option,
    sign_option,
    trust_option,
    verb,
)
from cas_ckpt.cli.log import describe, line_of, names_of_commits
from cas_ckpt.cli.output import echo_json, escaped, long_table, plain, subject, table, verdict_text
from cas_ckpt.errors import ConflictError, InvalidInputError
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.layout.key_map import KeyMap
    from cas_ckpt.ops.checkout.checkout import Region
    from cas_ckpt.ops.history.find import FoundEntry
    from cas_ckpt.ops.history.log import ShownCommit
    from cas_ckpt.ops.history.shards import ShardRow
    from cas_ckpt.ops.history.usage import CommitUsage, MonthlyCost, RepositoryStats, RepositoryStatus


@verb("show", examples=["cas-ckpt show", "cas-ckpt show v1 --json"], also=[15])
@click.argument("revision", default="HEAD")
def show(settings: Settings, revision: str) -> None:
    """Show one commit, what names it, and what its state consists of."""
    with settings.open() as repo, repo.one_look():
        shown = repo.show(revision)
    settings.page(shown, _shown(shown, colour=settings.colour))


def _shown(shown: ShownCommit, *, colour: bool) -> Iterator[str]:
    commit = shown.commit
    names = [*shown.branches, *(f"tag: {name}" for name in shown.tags), *(f"pin: {name}" for name in shown.pins)]
    names += shown.remote_branches
    yield from describe(commit, names, colour=colour)
    yield ""
    yield f"Root:    {commit.root}"
    for parent in commit.parents:
        yield f"Parent:  {parent}"
    if shown.has_data:
        yield f"Ranks:   {shown.world_size}" + (f" ({escaped(shown.mesh)})" if shown.mesh else "")
    for name, note in shown.notes.items():
        yield f"Note:    {escaped(name)}: {escaped(note)}"
    for name, signature in shown.signatures.items():
        yield f"Signed:  {escaped(name)}: {verdict_text(signature)}"
    if commit.meta is not None:
        yield f"Meta:    {escaped(repr(commit.meta))}"
    made = shown.provenance if isinstance(shown.provenance, Mapping) else {"": shown.provenance}
    for name, value in made.items() if shown.provenance is not None else ():
        text = shlex.join(map(str, value)) if name == "command" and isinstance(value, list) else value
        yield f"Made:    {escaped(str(name))} {escaped(text if isinstance(text, str) else repr(text))}"
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


@verb(
    "ls",
    examples=["cas-ckpt ls", "cas-ckpt ls -l main~1 'model/*'", "cas-ckpt ls v1 'optim/state/**/exp_avg'"],
    also=[15],
)
@click.argument("revision", default="HEAD")
@click.argument("patterns", nargs=-1, metavar="[KEY]...")
@flag("-l", "--long", help="Kind, dtype, shape and size too.")
def ls(settings: Settings, revision: str, patterns: tuple[str, ...], long: bool) -> None:
    """List the keys of a commit, all of them or those that match a KEY.

    In a KEY, * and ? stay inside one component, ** crosses them; a key that names a container
    stands for all below it.
    """
    with settings.open() as repo, repo.one_look():
        entries = repo.ls(revision, patterns or None)
    if not long or settings.json:
        settings.page(entries, (escaped(entry.key) for entry in entries))
        return
    shapes = ("" if entry.shape is None else f"[{', '.join(map(str, entry.shape))}]" for entry in entries)
    rows = (
        (entry.kind, entry.dtype or "", shape, human_bytes(entry.num_bytes), escaped(entry.key))
        for entry, shape in zip(entries, shapes, strict=True)
    )
    settings.page(entries, table(rows, right=frozenset({3})))


@verb(
    "read",
    examples=[
        "cas-ckpt read main progress/step",
        "cas-ckpt read main model/wte.weight --region 0:10,0:64",
        "cas-ckpt read v1 model/head.weight --output head.npy",
    ],
    also=[14, 15, UNSIGNED],
)
@click.argument("revision")
@click.argument("key")
@click.option("--region", type=REGION, metavar="A:B,C:D", help="Only this part, as NumPy has it: 0:10,5 or ...,-64:.")
@click.option("-o", "--output", metavar="FILE", help="Write a .npy or .pt file instead of printing.")
@trust_option()
@flag("-f", "--force", help="Replace FILE if it is there already.")
def read(
    settings: Settings, revision: str, key: str, region: Region | None, output: str | None, trust: tuple[str, ...],
    force: bool,
) -> None:  # fmt: skip
    """Print the entry KEY of a commit, or a part of it.

    Only what the part touches is read and verified.
    """
    path = None if output is None else Path(output)
    if path is not None and path.suffix not in (".npy", ".pt"):
        raise InvalidInputError(f"{path}: the name of an output file ends in .npy or .pt")
    if path is not None and path.exists() and not force:
        raise ConflictError(f"{path} is there already: choose another name, or --force")
    with settings.open() as repo, repo.one_look():
        value = repo.read(revision, key, region, trust=given_trust(settings, trust))
    from cas_ckpt.formats.verbs import as_lists, write_value

    if path is not None:
        write_value(value, path)
        return
    dtype = str(value.dtype).removeprefix("torch.") if hasattr(value, "dtype") else None
    found = {"key": key, "dtype": dtype, "value": as_lists(value)} if settings.json else None
    # Keeps the line breaks that tensors are printed with; everything else is written out.
    lines = (repr(value) if dtype is None else str(value)).split("\n")
    settings.show(found, map(escaped, lines))


# --- bytes ----------------------------------------------------------------------------------

_COLUMNS = ("total", "new", "unique", "shared")


@verb(
    "stats",
    examples=[
        "cas-ckpt stats",
        "cas-ckpt stats main~1",
        "cas-ckpt stats --requests --commits-per-day 96 --keep-days 14",
    ],
    also=[15],
)
@click.argument("revision", required=False)
@flag("--requests", help="What a month of this run costs in a bucket: requests and bytes.")
@click.option("--commits-per-day", type=float, metavar="N", help="With --requests; default 48.")
@click.option("--restores-per-day", type=float, metavar="N", help="With --requests; default 1.")
@click.option("--looks-per-day", type=float, metavar="N", help="With --requests: log, ls and the like; default 100.")
@click.option("--collections-per-day", type=float, metavar="N", help="With --requests: gc; default 1.")
@click.option("--keep-days", type=float, metavar="N", help="With --requests: how long data is kept; default: for good.")
def stats(settings: Settings, /, revision: str | None, requests: bool, **month: Any) -> None:
    """Show how much the repository holds; or, with REVISION, one commit.

    With --requests: what 30 days cost in requests and bytes, computed from the repository's own commits.
    Writes are PUT, POST and LIST requests (class A), reads GET and HEAD (class B).
    """
    given = {name: value for name, value in month.items() if value is not None}
    if (given and not requests) or (requests and revision is not None):
        raise click.UsageError("rates are for --requests, which is about the whole repository")
    if requests:
        with settings.open() as repo:
            cost = repo.monthly_cost(**given)
        settings.show(cost, month_lines(cost))
        return
    with settings.open() as repo, repo.one_look():
        if revision is not None:
            of_commit = repo.commit_stats(revision)
            settings.show(of_commit, table(_commit_rows(of_commit)))
            return
        found = repo.stats()
    settings.show(plain(found) | {"ratio": found.ratio}, table(_repository_rows(found)))


def month_lines(cost: MonthlyCost) -> Iterator[str]:
    """The lines of `stats --requests`."""
    facts, rates = cost.facts, cost.rates
    kept = "for good" if rates.keep_days is None else f"for {rates.keep_days:g} days"
    yield (
        f"A commit adds {human_bytes(int(facts.new_bytes))} (mean of {facts.num_commits}), a state is "
        f"{human_bytes(int(facts.state_bytes))}, data is kept {kept}."
    )
    rows: list[Sequence[str]] = [("30 days", "times", "writes", "reads", "bytes in", "bytes out")]
    for row in cost.rows:
        amounts = [f"{number:,.0f}" for number in (row.times, row.writes, row.reads)]
        rows.append((row.what, *amounts, *(human_bytes(int(each)) for each in (row.written_bytes, row.read_bytes))))
    yield from table(rows, right=frozenset(range(1, 6)))
    yield f"stored on average: {human_bytes(int(cost.stored_bytes))}"


def _repository_rows(found: RepositoryStats) -> Iterator[tuple[str, str]]:
    yield "commits", str(found.num_commits)
    yield "branches", str(found.num_branches)
    yield "tags", str(found.num_tags)
    yield "states", f"{human_bytes(found.total_bytes)} (all commits, each whole)"
    yield "unique", f"{human_bytes(found.unique_bytes)} in {found.num_chunks} chunks and {found.num_nodes} nodes"
    yield "stored", f"{human_bytes(found.pack_bytes)} in {found.num_packs} packs"
    yield "ratio", f"{found.ratio:.1f} : 1"
    if found.num_temporaries:
        yield "left over", left_over(found)


def left_over(found: RepositoryStats | RepositoryStatus) -> str:
    """Size of what killed commits left behind, as text."""
    left = f"{human_bytes(found.temporary_bytes)} in {found.num_temporaries} temporary files"
    return f"{left} of killed commits, which cas-ckpt gc removes"


def _commit_rows(found: CommitUsage) -> Iterator[tuple[str, str]]:
    commit, usage = found.commit, found.usage
    yield "commit", f"{commit.short_id} {subject(commit.message)}"
    yield "entries", f"{commit.stats.num_entries}, {commit.stats.num_tensors} of them tensors"
    yield "total", f"{human_bytes(usage.total_bytes)} (what the state holds)"
    yield "new", f"{human_bytes(usage.new_bytes)} (what the commit added)"
    yield "unique", f"{human_bytes(usage.unique_bytes)} (what no other commit needs)"
    yield "shared", f"{human_bytes(usage.shared_bytes)} (what others need too)"


@verb(
    "du",
    examples=[
        "cas-ckpt du",
        "cas-ckpt du --by branch",
        "cas-ckpt du --by tensor main -k 'model/**'",
        "cas-ckpt du --by dtype v1",
    ],
    also=[15],
)
@click.argument("revision", required=False)
@click.option("--by", type=click.Choice(get_args(UsageBy)), default="commit", show_default=True, help="What a row is.")
@keys_option("By tensor or dtype: only these; may be repeated.")
@limit_option("By commit: at most N.")
@flag("--with-remotes", help="By branch: remote-tracking branches (origin/main) hold what they lead to.")
@flag("-b", "--bytes", "exact", help="Print bytes, without units.")
def du(
    settings: Settings, revision: str | None, by: UsageBy, keys: tuple[str, ...], limit: int | None, with_remotes: bool,
    exact: bool,
) -> None:  # fmt: skip
    """Show what each commit, branch, tensor or dtype costs.

    \b
    total   what its state holds
    new     what it added when it was committed
    unique  what is there for it alone
    shared  what something else needs too

    REVISION limits commits to those that it leads to, and says which commit's tensors are meant.
    """  # noqa: D301  # click wants this very character
    with settings.open() as repo, repo.one_look():
        rows = repo.du(by, ref=revision, keys=keys or None, limit=limit, with_remotes=with_remotes)
        commits = repo.log(all_refs=True) if by == "commit" else []
    labels = {commit.id: f"{commit.short_id} {subject(commit.message)}" for commit in commits}
    shown = str if exact else human_bytes
    lines: list[Sequence[str]] = [(*_COLUMNS, "name")]
    for row in rows:
        sizes = (row.total_bytes, row.new_bytes, row.unique_bytes, row.shared_bytes)
        lines.append((*map(shown, sizes), labels.get(row.name) or escaped(row.name)))
    found = [{"commit_id" if by == "commit" and key == "name" else key: value for key, value in plain(row).items()}
             for row in rows]  # fmt: skip
    settings.show(found, table(lines, right=frozenset(range(len(_COLUMNS)))))


_SHARD_COLUMNS = ("ranks", "replicas", "size", "chunks", "shared with", "region", "key")


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
def shards(settings: Settings, revision: str, patterns: tuple[str, ...], rank: int | None) -> None:
    """Show which ranks held which region of the entries of a commit, and who shared chunks.

    A row for each region: the ranks that held it (0-7, 16-64:8 in steps of 8), how many bytes and chunks
    it has, and which other ranks held another part of one of these chunks. KEYs are as for ls.
    """
    with settings.open() as repo:
        settings.page_rows(repo.shards(revision, patterns or None, rank=rank), _shard_lines)


def _shard_lines(rows: Iterator[ShardRow]) -> Iterator[str]:
    cells = (
        (
            str(row.ranks), str(len(row.ranks)), human_bytes(row.num_bytes), str(row.num_chunks),
            str(row.shared_with), row.region, escaped(row.key),
        )
        for row in rows
    )  # fmt: skip
    return long_table(chain([_SHARD_COLUMNS], cells), right=frozenset({1, 2, 3}))


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
    settings.page(found, table(_found_rows(found), right=frozenset({3, 5})))


_FOUND = ("kind", "dtype", "shape", "size", "object", "commits", "first", "last", "key")


def _found_rows(found: Sequence[FoundEntry]) -> Iterator[Sequence[str]]:
    if found:
        yield _FOUND
    for one in found:
        shape = "" if one.shape is None else f"[{', '.join(map(str, one.shape))}]"
        yield (
            one.kind, one.dtype or "", shape, human_bytes(one.num_bytes), (one.object_id or "-")[:SHORT_HEX],
            str(one.num_commits), one.first[:SHORT_HEX], one.last[:SHORT_HEX], escaped(one.key),
        )  # fmt: skip


# --- between commits and files ------------------------------------------------------------------

PARTLY = 3


@verb(
    "import",
    examples=[
        "cas-ckpt import model.safetensors -m 'the base model'",
        "cas-ckpt import checkpoints/step-1000.pt --branch old-run --step 1000 --metric loss=2.31",
        "cas-ckpt import ~/models/Llama-3.2-1B",
        "cas-ckpt import tuned.safetensors --branch ft --lineage fine-tune-of=main",
        "cas-ckpt import checkpoints/step-2000/ --onto old-run --step 2000",
        "cas-ckpt import output/checkpoint-500 --branch run --step 500",
        "cas-ckpt import pytorch_model.bin --prefix model",
        "cas-ckpt import my-lora/ --branch lora",
    ],
    also=[PARTLY, 14, UNSIGNED],
)
@click.argument("path")
@click.option("-m", "--message", help="The message. Default: what was imported.")
@click.option("-b", "--branch", metavar="NAME", help="The branch that it goes to; a new one begins without a parent.")
@click.option("--onto", metavar="REVISION", help="What it follows: a branch, or where --branch NAME begins.")
@flag("--create", help="Begin the branch though its name is nearly that of another.")
@click.option("--step", type=click.IntRange(min=0), help="The training step.")
@click.option("--metric", "metrics", multiple=True, type=METRIC, help="A metric; may be repeated.")
@click.option("--author", help="Who; default: user@host.")
@click.option("--parent", "parents", multiple=True, metavar="REVISION", help="A commit that it joins; may be repeated.")
@click.option("--lineage", multiple=True, type=Pair("KIND=REVISION"), help="E.g. fine-tune-of=base; may be repeated.")
@sign_option()
@flag("--provenance", help="Keep command line, host, versions and git commit.")
@click.option("--prefix", metavar="KEY", default="", help="The key under which it all goes; default: the top.")
@memory_option
@flag("--follow-links", help="Read what symbolic links in a folder lead to outside of it.")
@click.option("--adapter", metavar="NAME", default="default", help="What the live PeftModel calls a folder's adapter.")
@flag("--keep-names", help="Name tensors as the files do, and not as live objects.")
def import_(settings: Settings, /, path: str, **options: Any) -> int:
    """Commit what a file or a model folder holds.

    PATH is a .pt, .pth, .bin, .ckpt or .safetensors file, the folder of a Hugging Face model, sharded or
    not, a checkpoint of its Trainer, of Accelerate, DeepSpeed or torch_checkpointing, or a folder that
    torch.distributed.checkpoint or torchsnapshot saved, from however many ranks. The files are read in
    pieces. A pickle that would run code is refused, never run.

    Of a folder, the model goes under model/, the states beside it under optim/, scheduler/, scaler/,
    rng/RANK/ and the like, small files under files/. What is left out is named, and the exit code is 3 then.

    Tensors are named as in the live object: an adapter of PEFT has its name in them, and what torch.compile,
    DistributedDataParallel and Fabric put in front of names is left out. What was renamed is said.

    Into a repository that has commits it goes where you say: --onto main puts it on top of main,
    --branch NAME begins a branch with a history of its own, --branch NAME --onto REVISION one that begins there.
    """
    from cas_ckpt.core.records import Lineage
    from cas_ckpt.ops.commit.options import ImportOptions

    options["metrics"] = dict(options["metrics"])
    options["lineage"] = [Lineage(*edge) for edge in options["lineage"]]
    with settings.open() as repo:
        call = {name: options.pop(name) for name in ("message", "branch", "onto", "step", "metrics", "prefix")}
        commit = repo.import_file(path, **call, options=ImportOptions(**options), progress=settings.show_progress())
        name = call["branch"] or (call["onto"] or repo.default_branch).removeprefix("refs/heads/")
        follows = ", ".join(parent[:SHORT_HEX] for parent in commit.parents) or "nothing: a history of its own"
        total, new = human_bytes(commit.stats.total_bytes), human_bytes(commit.stats.new_bytes)
        settings.say(
            commit,
            f"[{escaped(name)} {commit.short_id}] {subject(commit.message)}\n"
            f" follows {follows}\n"
            f" {commit.stats.num_entries} entries, {total}, {new} of them new",
        )
        if not settings.json:
            for sentence in commit.renamed:
                click.echo(f"renamed: {escaped(sentence)}", err=True)
            for each in commit.left_out:
                click.echo(f"left out: {escaped(each.name)}: {escaped(each.reason)}", err=True)
    return PARTLY if commit.left_out else 0


_KEYS = keys_option("Only these keys; may be repeated.")
_FORCE = flag("-f", "--force", help="Replace files that are there already.")


def _read_key_map(text: str) -> KeyMap:
    """The map in a file of JSON, a list of rules; or a ready one, with what it asks for behind a colon."""
    from cas_ckpt.layout.key_map import KeyMap
    from cas_ckpt.layout.ready_maps import READY

    name, _, given = text.partition(":")
    if name in READY:
        pairs = (each.partition("=") for each in given.split(",") if each)
        return KeyMap.ready(name, **{key: int(value) if value.isdecimal() else value for key, _, value in pairs})
    try:
        rules = json.loads(Path(text).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{text}: no key map ({error}): give a file, or one of {', '.join(READY)}") from error
    if not isinstance(rules, list):
        raise InvalidInputError(f"{text}: holds no list of rules: write [{{...}}, ...]")
    return KeyMap(rules)


_KEY_MAP = click.option(
    "--key-map", type=Unit("MAP", _read_key_map),
    help="Other names, shapes and dtypes: a file of rules, or e.g. hf_to_megatron:num_heads=32,num_kv_heads=8.",
)  # fmt: skip


@verb(
    "export",
    examples=[
        "cas-ckpt export main model.safetensors --key model",
        "cas-ckpt export v1 folder/ --max-shard-size 5GB --key 'model/**'",
        "cas-ckpt export main~3 state.pt",
        "cas-ckpt export main checkpoint/ --format dcp --max-shard-size 5GB",
        "cas-ckpt export main checkpoint-500/ --format trainer",
        "cas-ckpt export lora my-lora/ --adapter default",
        "cas-ckpt export main hf/ --key-map llama3_torchtitan_to_hf:num_heads=32,num_kv_heads=8 --key model",
    ],
    also=[14, 15, UNSIGNED],
)
@click.argument("revision")
@click.argument("path")
@click.option("--format", type=click.Choice(get_args(ExportFormat)), help="Default: by the end of the name.")
@click.option("--max-shard-size", "max_shard_bytes", type=SIZE, help="Length of a shard, e.g. 5GB.")
@click.option("--adapter", metavar="NAME", help="Write this adapter of a PeftModel, as a folder that PEFT opens.")
@_KEYS
@_KEY_MAP
@trust_option()
@memory_option
@_FORCE
def export(settings: Settings, /, revision: str, path: str, **options: Any) -> None:
    """Write a commit to PATH as safetensors, or as torch.save or torch.distributed.checkpoint would.

    A PATH that ends in .safetensors, .pt, .pth or .bin becomes that file; any other name a folder
    of safetensors, sharded and with its index, or with --format dcp one that dcp.load reads. With the
    name of a framework as --format an imported checkpoint becomes the folder again that transformers'
    Trainer, Accelerate, DeepSpeed, Lightning, Megatron or torch_checkpointing resumes from. Every byte is
    verified.
    """
    _export(settings, revision, path, options)


@verb(
    "checkout",
    examples=["cas-ckpt checkout main --to state.pt", "cas-ckpt checkout v1 --to model.safetensors --key model"],
    also=[14, 15, UNSIGNED],
)
@click.argument("revision", default="HEAD")
@click.option("--to", "path", required=True, metavar="PATH", help="The file or folder to write.")
@_KEYS
@_KEY_MAP
@trust_option()
@memory_option
@_FORCE
def checkout(settings: Settings, /, revision: str, path: str, **options: Any) -> None:
    """Write the state of a commit to a file or folder (see cas-ckpt export).

    Into live training state, in place, a commit is checked out in Python: Repository.checkout.
    """
    _export(settings, revision, path, options)


def _export(settings: Settings, revision: str, path: str, options: dict[str, Any]) -> None:
    options["keys"] = options["keys"] or None
    options["trust"] = given_trust(settings, options["trust"])
    with settings.open() as repo:
        written = repo.export(revision, path, **options, progress=settings.show_progress())
    files = f"{len(written.files)} files" if len(written.files) != 1 else "1 file"
    size = human_bytes(written.total_bytes)
    settings.say(written, f"Wrote {written.num_tensors} tensors, {size}, in {files}: {escaped(path)}")
