"""docs/troubleshooting.md quotes messages that the source has, and advises what can be done."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import cas_ckpt
from cas_ckpt import CkptError, Policy, Repository
from tests.test_docs import command_line, parse, words_of

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()
ROWS = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+) \|$", TEXT, re.MULTILINE)
QUOTES = [row[0] for row in ROWS]
GAP = "\0"


@cache
def texts() -> tuple[str, ...]:
    """Every text in the package, with a mark in place of what is filled in."""
    found = []
    for path in sorted((ROOT / "cas_ckpt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def pattern(quote: str) -> str:
    """What a message has to look like."""
    parts = [re.escape(part.strip()) for part in quote.split("…")]
    return ".*".join(parts)


def spans(begin: str) -> list[str]:
    """The code spans of the page that begin like this."""
    return sorted(
        {span for row in ROWS for cell in row[1:] for span in re.findall(r"`([^`]+)`", cell) if span.startswith(begin)}
    )


@pytest.mark.parametrize("quote", QUOTES)
def test_a_message_that_is_quoted_is_in_the_source(quote: str) -> None:
    parts = [part.strip() for part in quote.split("…")]
    candidates = [
        text for text in texts() if all(part in text for part in parts)
    ]  # a search costs a hundred times that
    assert any(re.search(pattern(quote), text, re.DOTALL) for text in candidates), quote


def test_no_message_is_quoted_twice_and_there_are_many() -> None:
    assert len(QUOTES) == len(set(QUOTES)) > 40


@pytest.mark.parametrize("line", spans("cas-ckpt "))
def test_a_command_that_is_advised_parses(line: str) -> None:
    parse(command_line(), words_of(line), "cas-ckpt")


@pytest.mark.parametrize("call", [*spans("repo."), *spans("Repository."), *spans("cas_ckpt.")])
def test_a_call_that_is_advised_exists_and_takes_its_arguments(call: str) -> None:
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    owner: Any = cas_ckpt if call.startswith("cas_ckpt.") else Repository
    signature = inspect.signature(getattr(owner, node.func.attr))
    given = [*[None] * call.startswith("repo."), *[None] * len(node.args)]
    signature.bind(*given, **{str(keyword.arg): None for keyword in node.keywords})


# ---------------------------------------------------------------- messages, as they are met


def committed(folder: Path) -> Repository:
    repo = Repository.init(folder / "ckpts")
    repo.commit({"w": torch.arange(1000.0), "step": 1}, step=1)
    repo.commit({"w": torch.arange(1000.0) + 1, "step": 2}, step=2)
    return repo


def damage(folder: Path, where: str, at: int) -> None:
    for path in (folder / "ckpts").glob(where):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.chmod(0o600)
        path.write_bytes(data)


def detached(repo: Repository) -> None:
    state = {"w": torch.zeros(1000), "step": 0}
    repo.checkout("main~1", into=state)
    repo.commit(state)


def forgotten(repo: Repository) -> None:
    repo.forget(Policy(keep_last=1))
    old = repo.log()[-1]
    repo.gc(min_age_s=0)
    repo.load(old)


def frozen(repo: Repository) -> None:
    state = {"w": torch.ones(1000)}
    repo.commit(state, frozen="w")
    state["w"][3] = 7
    repo.commit(state, frozen="w")


def rotten(repo: Repository) -> None:
    damage(Path(repo.url.removeprefix("file://")).parent, "packs/*/*.data", 300)
    with Repository.open(repo.url) as again:
        again.load("main")


def without_refs(repo: Repository) -> None:
    next(Path(repo.url.removeprefix("file://")).glob("refs/heads/main.ref")).unlink()
    with Repository.open(repo.url) as again:
        again.gc()


def damaged_ref(repo: Repository) -> None:
    damage(Path(repo.url.removeprefix("file://")).parent, "refs/heads/main.ref", 60)
    with Repository.open(repo.url) as again:
        again.log("main")


MET: dict[str, Callable[[Repository], object]] = {
    "… holds no cas_ckpt repository": lambda repo: Repository.open(repo.url + "/elsewhere"),
    "… exists and is not an empty folder": lambda repo: Repository.init(repo.url),
    "… was closed: open it again": lambda repo: (repo.close(), repo.log()),
    "a URL of … holds no credentials …": lambda repo: Repository.open("gs://key@bucket/ckpts"),
    "…Turn it into plain values, give its owner state_dict() and load_state_dict()…": (
        lambda repo: repo.commit({"a": object()})
    ),
    "this state came from commit …, which was checked out by itself and not as a branch": detached,
    "there is no branch …: did you mean …": lambda repo: repo.commit({}, branch="mian"),
    "… declared frozen, but its bytes are not those that were committed before": frozen,
    "there is a … already: choose another name, or move it": lambda repo: repo.branch("main"),
    "target and commit do not agree; nothing was touched…": (
        lambda repo: repo.checkout("main", into={"w": torch.ones(3), "step": 0})
    ),
    "target and commit have no key in common": (
        lambda repo: repo.checkout("main", into={"v": torch.ones(3)}, strict=False)
    ),
    "there is no entry … is there): …": lambda repo: repo.read("main", "v"),
    "no entry matches …": lambda repo: repo.ls("main", "model/*"),
    "there is no branch or tag …, and no commit's id begins like this": lambda repo: repo.resolve("abcdef"),
    "commit … was forgotten, and gc has removed its data…": forgotten,
    "a policy without rules would keep the heads alone": lambda repo: repo.set_policy(Policy()),
    "… the stored bytes do not have the hash that they were stored under…": rotten,
    "… is gone (… refs are), and was not deleted…": without_refs,
    "… bytes that are not an intact … record…": damaged_ref,
}


@pytest.mark.parametrize("quote", MET)
def test_a_message_is_met_as_it_is_quoted(quote: str, tmp_path: Path) -> None:
    assert quote in QUOTES
    with committed(tmp_path) as repo, pytest.raises(CkptError, match=f"(?s){pattern(quote)}"):
        MET[quote](repo)
