"""import, export and checkout: between commits and files."""

from __future__ import annotations

from typing import Any, get_args

import click

from cas_ckpt.arguments import ExportFormat
from cas_ckpt.cli.command import (
    METRIC,
    SIZE,
    UNSIGNED,
    Pair,
    Settings,
    flag,
    given_trust,
    keys_option,
    memory_option,
    sign_option,
    trust_option,
    verb,
)
from cas_ckpt.cli.output import escaped, subject
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.progress import human_bytes

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

    PATH is a .pt, .pth, .bin or .safetensors file, the folder of a Hugging Face model, sharded or
    not, a checkpoint of its Trainer or of Accelerate, or a folder that torch.distributed.checkpoint
    saved, from however many ranks. The files are read in pieces. A pickle that would run code is
    refused, never run.

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


@verb(
    "export",
    examples=[
        "cas-ckpt export main model.safetensors --key model",
        "cas-ckpt export v1 folder/ --max-shard-size 5GB --key 'model/**'",
        "cas-ckpt export main~3 state.pt",
        "cas-ckpt export main checkpoint/ --format dcp --max-shard-size 5GB",
        "cas-ckpt export lora my-lora/ --adapter default",
    ],
    also=[14, 15, UNSIGNED],
)
@click.argument("revision")
@click.argument("path")
@click.option("--format", type=click.Choice(get_args(ExportFormat)), help="Default: by the end of the name.")
@click.option("--max-shard-size", "max_shard_bytes", type=SIZE, help="Length of a shard, e.g. 5GB.")
@click.option("--adapter", metavar="NAME", help="Write this adapter of a PeftModel, as a folder that PEFT opens.")
@_KEYS
@trust_option()
@memory_option
@_FORCE
def export(settings: Settings, /, revision: str, path: str, **options: Any) -> None:
    """Write a commit to PATH as safetensors, or as torch.save or torch.distributed.checkpoint would.

    A PATH that ends in .safetensors, .pt, .pth or .bin becomes that file; any other name a folder
    of safetensors, sharded and with its index, or with --format dcp one that dcp.load reads.
    Every byte is verified.
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
