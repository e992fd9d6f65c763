"""Texts of a repository that somebody made who means harm: none reaches a terminal as a control character."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cas_ckpt import Repository
from cas_ckpt.cli.output import EscapedLines, utc
from cas_ckpt.core.refs import RefKind, ref_key
from cas_ckpt.core.settings import TIERS_KEY
from cas_ckpt.objects.digest import seal, unseal
from tests.builders import commit, numbers
from tests.cli.running import call

ODD = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\x08x"
VERBS = (
    ["status"], ["log"], ["log", "--all"], ["log", "--graph"], ["log", "--json"], ["show", "main"], ["show", "t"],
    ["ls", "main"], ["tag"], ["pin"], ["branch"], ["reflog", "main"], ["reflog", "t"], ["diff", "main", "main~1"],
    ["stats", "main"], ["du", "--by", "tensor"], ["find", "**"], ["metrics"], ["best", ODD], ["fsck"],
    ["remote", "list"], ["freed", "main"], ["lineage", "main"], ["nearest", "main"], ["unique", "main"],
    ["verify", "main"], ["show", ODD],
    ["resolve", ODD], ["read", "main", ODD], ["policy", "show"], ["restores"], ["--debug", "show", ODD],
    ["push", "origin"], ["fetch", "origin"], ["-C", ODD, "log"], ["watch", "--push", "origin", "--once"],
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    path = folder / "repo"
    with Repository.init(path, group=None) as repo:
        for number in range(2):
            about = {"message": f"{ODD}\n{ODD}", "author": ODD, "metrics": {ODD: 1.0}, "meta": {ODD: ODD}}
            commit(repo._handle, {ODD: numbers(10, seed=number), "x": ODD}, **about)
        repo.tag("t", "main", message=ODD)
        repo.pin("main", reason=ODD)
        repo.add_remote("origin", folder / "nowhere", tier=True)
        store = repo._handle.store
        key = ref_key(RefKind.BRANCH, "main")
        payload = unseal("ref", store.get(key), version=1, key=key)
        moves = [[time_us, None, payload["target"], ODD, ODD] for time_us in (0, 2**62, -(2**62))]
        store.put(key, seal("ref", 1, payload | {"log": moves}, key=key))
        store.put(TIERS_KEY, seal("tiers", 1, {"failures": [["origin", 0, ODD]], "nonce": bytes(16)}, key=TIERS_KEY))
    return path


@pytest.mark.parametrize("words", VERBS, ids=lambda words: " ".join(words).encode("ascii", "replace").decode()[:30])
def test_no_verb_writes_a_control_character(place: Path, words: list[str], tmp_path: Path) -> None:
    before = [] if words[0] == "-C" else ["-C", str(place)]
    ran = call(*before, *words, cwd=tmp_path)
    written = (ran.out + ran.err).replace("\n", "")
    assert not set("\x1b\x07\x9b\u202e\r\x08") & set(written), written
    assert "bug of cas_ckpt" not in written


def test_what_the_library_warns_of_is_escaped() -> None:
    record = logging.LogRecord("cas_ckpt", logging.WARNING, "", 0, "left out: %s", (ODD,), None)
    assert EscapedLines().format(record).isprintable() or "\n" in EscapedLines().format(record)
    assert "\x1b" not in EscapedLines().format(record)


def test_a_time_that_no_calendar_has_is_a_number() -> None:
    assert utc(0) == "1970-01-01 00:00:00"
    assert utc(2.0**62) == f"{2**62} s"
