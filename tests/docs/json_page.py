"""The objects that `--json` prints, from what the verbs print about a small repository."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cas_ckpt import CommitInfo, CommitOptions, Lineage, Repository
from cas_ckpt.cli.output import plain
from tests.cli.running import call

VERBS = [
    ["log"], ["show", "v1"], ["diff", "main~1", "main"], ["ls"], ["branch"], ["tag"], ["pin"], ["remote"],
    ["ls-remote", "."], ["status"], ["resolve"], ["reflog"], ["lineage", "ft"], ["holders", "main", "w"],
    ["unique", "ft"], ["freed", "main"], ["metrics"], ["best", "loss"], ["find", "w"],
    ["find", "--commits", "w"], ["shards"], ["du"], ["du", "--by", "branch"], ["stats"], ["restores"],
    ["plan", "--mesh", "dp=2"], ["fetch"], ["forget", "--keep-last", "1", "-n"], ["gc", "-n"], ["fsck"],
]  # fmt: skip
"""Verbs whose JSON is described, each with words that make it show something."""

MAPS = {
    "metrics", "provenance", "meta", "by_name", "notes", "signatures", "num_unpushed", "push_failures", "branches",
    "tags", "pins", "remote_branches",
}  # fmt: skip
"""Fields that hold an object with names of the user's, or that grow."""


def make(path: Path) -> None:
    """A repository about which every verb has something to say."""
    with Repository.init(path) as repo:
        for step in range(3):
            repo.commit({"w": np.arange(5000.0) + step}, message="m", step=step, metrics={"loss": float(step)})
        repo.commit(
            {"w": np.zeros(5000)},
            branch="ft",
            options=CommitOptions(parents=["main~1"], lineage=[Lineage("fine-tune-of", "main")]),
        )
        repo.load("main")
        repo.tag("v1", message="as released")
        repo.pin("main~1", name="paper")
        repo.add_remote("origin", path)
        repo.fetch()


COMMIT = {"commit_id", "root_id", "parent_ids"}


@cache
def commit_fields() -> frozenset[str]:
    return frozenset(plain(CommitInfo("", "", (), "", "", 0.0)))


def fields(value: Any, at: str = "") -> Iterator[str]:
    """Where each value of a JSON text is: `[]` is any element, `NAME` a name that is the user's."""
    if isinstance(value, dict):
        if at and value.keys() > COMMIT:
            yield f"{at} (a commit)"
            value = {key: each for key, each in value.items() if key not in commit_fields()}
            if not value:
                return
        names = value and at.rpartition(".")[2] in MAPS
        for key, each in value.items():
            yield from fields(each, f"{at}.NAME" if names else f"{at}.{key}".lstrip("."))
        if not value:
            yield at
    elif isinstance(value, list):
        if not value:
            yield f"{at}[]"
        for each in value:
            yield from fields(each, f"{at}[]")
    else:
        yield at


def objects() -> str:
    """The part of docs/command-line.md."""
    rows = [f"| a commit | {', '.join(f'`{name}`' for name in plain(CommitInfo('', '', (), '', '', 0.0)))} |"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "repo"
        make(path)
        for words in VERBS:
            ran = call("-C", path, "--json", *words, cwd=path)
            assert (ran.code, ran.err) == (0, ""), (words, ran)
            found = ran.json
            if words[0] in ("branch", "tag", "ls-remote"):
                shown = "an object from names to ids of commits"
            else:
                shown = ", ".join(f"`{each}`" for each in dict.fromkeys(fields(found)))
            rows.append(f"| `{' '.join(words)}` | {shown} |")
    return "\n".join(["| verb | fields |", "| --- | --- |", *rows])
