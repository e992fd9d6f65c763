"""`cas-ckpt`: finds the verb, runs it, and turns what it raises into a line and an exit code.

Invariant: a verb's module is imported when that verb is asked for, so that none pays for
another; standard output carries results alone.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import click

import cas_ckpt
from cas_ckpt import native
from cas_ckpt.cli.command import (
    EXIT_CODES,
    Settings,
    VerbGroup,
    asks_for_completion,
    settings_from_environment,
    shared_options,
    write_exit_codes,
)
from cas_ckpt.cli.output import PROGRAM, EscapedLines, report_error
from cas_ckpt.memory import limits

OBJECTS_PER_COLLECTION = 100_000
"""A tenth of a long log's time went into looking for cycles that a command never makes."""


class Place(NamedTuple):
    """Where a verb is declared, and what the list of verbs says about it."""

    module: str
    attribute: str
    summary: str


SECTIONS: dict[str, dict[str, Place]] = {
    "start a repository": {
        "init": Place("upkeep", "init", "Make a new, empty repository"),
        "clone": Place("remotes", "clone", "Make a new repository with the commits of another one"),
    },
    "bring state in and out (commits of live state are made in Python: Repository.commit)": {
        "import": Place("show", "import_", "Commit a .pt, .safetensors, Hugging Face or DCP folder"),
        "export": Place("show", "export", "Write a commit as safetensors, torch.save or DCP"),
        "checkout": Place("show", "checkout", "Write a commit's state to a file or folder"),
        "read": Place("show", "read", "Print one entry, or a slice of it"),
    },
    "examine the history": {
        "status": Place("upkeep", "status", "Show the default branch, who commits, what gc has to do"),
        "log": Place("log", "log", "Show the commits that a ref leads to"),
        "reflog": Place("history", "reflog", "Show where a branch, tag or pin pointed, and who moved it"),
        "merge-base": Place("history", "merge_base", "Print where the histories of commits meet"),
        "lineage": Place("history", "lineage", "Show what a state was made from, and what from it"),
        "holders": Place("history", "holders", "Show which commits hold this very tensor"),
        "nearest": Place("history", "nearest", "Show which commits share most with a commit or file"),
        "unique": Place("history", "unique", "Show what only one branch, tag or pin leads to"),
        "freed": Place("history", "freed", "Show what forgetting these commits would free"),
        "metrics": Place("history", "metrics", "Show the metrics of commits"),
        "best": Place("history", "best", "Show the best commits by a metric"),
        "sql": Place("history", "sql", "Ask the index in SQL"),
        "verify": Place("refs", "verify", "Say who signed a commit or tag, by keys that you trust"),
        "show": Place("show", "show", "Show one commit and what its state consists of"),
        "diff": Place("log", "diff", "Show how two commits differ: entries, chunks, numbers"),
        "ls": Place("show", "ls", "List the entries of a commit"),
        "find": Place("show", "find", "Find entries, and commits that hold them, in all of history"),
        "shards": Place("show", "shards", "Show which ranks held which region of the entries"),
        "resolve": Place("refs", "resolve", "Print the id that a revision stands for"),
        "stats": Place("show", "stats", "Show how much the repository, or one commit, holds"),
        "plan": Place("plan", "plan", "Show how a commit would be restored into a mesh of ranks"),
        "restores": Place("plan", "restores", "Show which commits were restored, when, and how it ended"),
        "du": Place("show", "du", "Show bytes by commit, branch, tensor or dtype"),
    },
    "name commits": {
        "branch": Place("refs", "branch", "List, make, rename or delete branches"),
        "tag": Place("refs", "tag", "List, make, rename or delete tags"),
        "pin": Place("refs", "pin", "List pins; keep a commit whatever is forgotten"),
        "unpin": Place("refs", "unpin", "Take pins away"),
        "signers": Place("refs", "signers", "signers set, show, clear: branches that take signed commits only"),
    },
    "work with other repositories": {
        "push": Place("remotes", "push", "Send commits to another repository, and move its refs"),
        "pull": Place("remotes", "pull", "Fetch, then let a branch go forward to where it is there"),
        "fetch": Place("remotes", "fetch", "Bring the commits of another repository here"),
        "ls-remote": Place("remotes", "ls_remote", "List the refs of another repository as they are now"),
        "watch": Place("remotes", "watch", "Push every commit to a remote as it is made"),
        "bundle": Place("remotes", "bundle", "bundle create, unbundle, verify, list: commits in one file"),
        "remote": Place("remotes", "remote", "remote list, add, remove, rename, set-url"),
    },
    "maintain": {
        "forget": Place("retention", "forget", "Forget commits, by rules or by name; their data may go"),
        "policy": Place("retention", "policy", "policy set, show, clear: rules that the repository carries"),
        "gc": Place("retention", "gc", "Delete what no branch, tag or pin needs"),
        "repack": Place("retention", "repack", "Collect, and rewrite packs that are small or hold waste"),
        "fsck": Place("upkeep", "fsck", "Look for damage, name what it hits, repair it"),
        "index": Place("upkeep", "index", "index rebuild, set, roles: made anew; of a team in PostgreSQL"),
        "store": Place("upkeep", "store", "store check URL: does this storage keep the rules?"),
        "cache": Place("upkeep", "cache", "Show or clear what this host keeps of remote repositories"),
    },
}
"""The verbs in the order in which the help lists them."""

PLACES = {name: place for verbs in SECTIONS.values() for name, place in verbs.items()}


class Verbs(VerbGroup):
    """The group of all verbs, each imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all verbs."""
        return list(PLACES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb called `cmd_name`."""
        place = PLACES.get(cmd_name)
        if place is None:
            return None
        command = getattr(import_module(f"cas_ckpt.cli.{place.module}"), place.attribute)
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One list per section; nothing is imported for it."""
        for title, verbs in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, place.summary) for name, place in verbs.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Exit codes."""
        write_exit_codes(formatter, EXIT_CODES)


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"{PROGRAM} {cas_ckpt.__version__} ({native.STATE})")
        ctx.exit()


@click.group(cls=Verbs, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-C", "repo", metavar="REPO", help="The repository. Default: $CAS_CKPT_REPO, else here or above.")
@click.option("--index", metavar="URL", help="The index, if it is not in the repository. Default: $CAS_CKPT_INDEX.")
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version, and whether the native core is there.",
)
@click.option(
    "--max-entries", type=click.IntRange(min=1), metavar="N", help="Entries that a state may unfold into; 2^21."
)
@click.option("--max-refs", type=click.IntRange(min=1), metavar="N", help="Refs of a kind, deleted ones too; 100,000.")
@click.pass_context
def cli(ctx: click.Context, repo: str | None, index: str | None, max_entries: int | None, max_refs: int | None) -> None:
    """Git for PyTorch training state.

    A REVISION is a branch, a tag, at least four digits of an id, or HEAD (the default branch);
    ~N goes N commits back, ^N to the N-th parent.
    """
    settings = ctx.ensure_object(Settings)
    settings.repo = repo if repo is not None else settings.repo
    settings.index = index or settings.index
    ctx.with_resource(limits(max_entries=max_entries, max_refs=max_refs))
    if settings.trusted_hosts:
        from cas_ckpt.core.settings import trusted_hosts

        ctx.with_resource(trusted_hosts(*settings.trusted_hosts))
    if settings.cache is not None:
        from cas_ckpt.core.host_cache import cache_at

        ctx.with_resource(cache_at(settings.cache or None))
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        ctx.exit(0)


cli.params.extend(shared_options())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line, by default that of this process, which then ends; the exit code."""
    if argv is not None:
        return _guarded(list(argv))
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    code = _guarded(sys.argv[1:])
    gc.freeze()  # the process ends: that nothing is searched for cycles once more saves a sixth of a long log
    return code


def _guarded(arguments: list[str]) -> int:
    settings = settings_from_environment()
    if asks_for_completion():
        cli.main(prog_name=PROGRAM, obj=settings)  # click answers the shell and exits
    if logging.lastResort is not None:  # what prints warnings where nobody has set up logging
        logging.lastResort.setFormatter(EscapedLines())
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 is not an error
    try:
        try:  # not `cli.main`, which has words and codes of its own for failures
            with cli.make_context(PROGRAM, arguments, obj=settings) as context:
                result: Any = cli.invoke(context)
            code = result if isinstance(result, int) else 0
        except click.exceptions.Exit as done:
            code = done.exit_code
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001  # the border: everything becomes a line and a code
        as_json = settings.json or "--json" in arguments  # where what was written could not be read, too
        return report_error(error, debug=settings.debug, as_json=as_json)
    return code


if __name__ == "__main__":
    sys.exit(main())
