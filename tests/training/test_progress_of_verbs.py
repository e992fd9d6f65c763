"""`progress=` means the same at every verb: True shows, False is silent, an object of one's own is told."""

from __future__ import annotations

import inspect
import io
import itertools
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cas_ckpt import CommitOptions, CorruptionError, InvalidInputError, Policy, Repository, clock
from cas_ckpt.progress import SILENT, BarProgress, LineProgress, shown
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.transfer import fetch

UNDER_WAY = re.compile(r"\w+: [\d.]+ [KM]?B of [\d.]+ [KM]B \(\d+ %\), [\d.]+ [KM]?B/s, \d+ s left\Z")
OVER = re.compile(r"\w+: ([\d.]+ [KM]B) of \1 \(100 %\), [\d.]+ [KM]?B/s, took \d+ s\Z")


def a_state(seed: int = 0) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    return {f"w{at}": torch.randn(64, 1024, generator=made) for at in range(4)}


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with Repository.init(tmp_path / "repo") as made:
        for seed in (1, 2):
            made.commit(a_state(seed), metrics={"loss": 1.0})
        yield made


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The log at INFO, while every look at the clock is six seconds after the one before."""
    caplog.set_level(logging.INFO, logger="cas_ckpt")
    seconds = itertools.count(0, 6)
    monkeypatch.setattr(clock, "monotonic_s", lambda: float(next(seconds)))
    return caplog


class Recorder:
    """A Progress of a user's."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.totals: list[int | None] = []
        self.open = 0
        self.done = 0

    def start(self, phase: str, total_bytes: int | None) -> None:
        self.phases.append(phase)
        self.totals.append(total_bytes)
        self.open += 1

    def advance(self, num_bytes: int) -> None:
        self.done += num_bytes

    def finish(self) -> None:
        self.open -= 1


VERBS: dict[str, Callable[[Repository, Path, Any], object]] = {
    "commit": lambda repo, path, progress: repo.commit(a_state(3), progress=progress),
    "commit_async": lambda repo, path, progress: repo.commit_async(a_state(3), progress=progress).result(),
    "checkout": lambda repo, path, progress: repo.checkout("main", into=a_state(4), progress=progress),
    "load": lambda repo, path, progress: repo.load("main", progress=progress),
    "read": lambda repo, path, progress: repo.read("main", "w1", progress=progress),
    "export": lambda repo, path, progress: repo.export("main", path / "out.safetensors", progress=progress),
    "import_file": lambda repo, path, progress: repo.import_file(a_file(path), onto="main", progress=progress),
    "diff": lambda repo, path, progress: repo.diff("main", numbers=True, progress=progress),
    "fsck": lambda repo, path, progress: repo.fsck(read_data=True, progress=progress),
    "repair": lambda repo, path, progress: repo.repair("packs", read_data=True, progress=progress),
    "rebuild_index": lambda repo, path, progress: repo.rebuild_index(progress=progress),
    "gc": lambda repo, path, progress: forgotten(repo).gc(min_age_s=0, reflog_expire_s=0, progress=progress),
    "repack": lambda repo, path, progress: forgotten(repo).repack(progress=progress),
    "forget": lambda repo, path, progress: repo.forget(Policy(keep_last=1), gc=True, progress=progress),
    "push": lambda repo, path, progress: repo.push(empty_one(path), progress=progress),
    "fetch": lambda repo, path, progress: beside(repo, path).fetch(progress=progress),
    "pull": lambda repo, path, progress: beside(repo, path).pull(progress=progress),
    "clone": lambda repo, path, progress: Repository.clone(repo.url, path / "clone", progress=progress).close(),
    "push_pending": lambda repo, path, progress: with_remote(repo, path).push_pending("slow", progress=progress),
    "create_bundle": lambda repo, path, progress: repo.create_bundle(path / "made.bundle", progress=progress),
    "verify_bundle": lambda repo, path, progress: repo.verify_bundle(a_bundle(repo, path), progress=progress),
    "unbundle": lambda repo, path, progress: beside(repo, path).unbundle(a_bundle(repo, path), progress=progress),
    "apply_policy": lambda repo, path, progress: with_policy(repo).apply_policy(gc=True, progress=progress),
}


def empty_one(folder: Path) -> Path:
    Repository.open(folder / "empty", create=True).close()
    return folder / "empty"


def beside(repo: Repository, folder: Path) -> Repository:
    """An empty repository whose origin is `repo`."""
    made = Repository.open(folder / "beside", create=True)
    if not made.remotes():
        made.add_remote("origin", repo.url)
    return made


def with_remote(repo: Repository, folder: Path) -> Repository:
    if not repo.remotes():
        repo.add_remote("slow", empty_one(folder))
    return repo


def a_bundle(repo: Repository, folder: Path) -> Path:
    repo.create_bundle(folder / "given.bundle", force=True)
    return folder / "given.bundle"


def a_file(folder: Path) -> Path:
    torch.save(a_state(5), folder / "state.pt")
    return folder / "state.pt"


def forgotten(repo: Repository) -> Repository:
    repo.forget(Policy(keep_last=1))
    return repo


def with_policy(repo: Repository) -> Repository:
    repo.set_policy(Policy(keep_last=1))
    return repo


def test_every_verb_that_takes_progress_is_tried_here() -> None:
    methods = inspect.getmembers(Repository, inspect.isfunction)
    taking = {name for name, method in methods if "progress" in inspect.signature(method).parameters}
    assert taking == set(VERBS) - {"clone"}  # which makes a repository


@pytest.mark.parametrize("verb", VERBS)
def test_true_shows_lines_in_the_log(
    verb: str, repo: Repository, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    VERBS[verb](repo, tmp_path, True)
    lines = [record.getMessage() for record in log.records if record.levelno == logging.INFO]
    assert lines and all(re.match(r"[\w ]+: [\d.]+ [KM]?B.*", line) for line in lines)
    assert ", took " in lines[-1]


def test_lines_have_bytes_rate_and_time_left_and_the_last_one_all_bytes(
    repo: Repository, log: pytest.LogCaptureFixture
) -> None:
    repo.commit({f"w{at}": torch.full((1024, 1024), float(at)) for at in range(3)}, progress=True)
    *under_way, _, last = [record.getMessage() for record in log.records]
    assert len(under_way) >= 2 and all(UNDER_WAY.match(line) for line in under_way)
    assert OVER.match(last)


def test_a_commit_ends_at_all_bytes_with_ties_and_small_tensors(
    repo: Repository, log: pytest.LogCaptureFixture
) -> None:
    one = torch.ones(64, 1024)
    repo.commit(
        {"a": one, "tied": one, "small": torch.ones(3)},
        options=CommitOptions(orphan=True),
        branch="ties",
        progress=True,
    )
    assert log.records[-1].getMessage().startswith("hashing: 262 KB of 262 KB (100 %)")


class Sums:
    """A Progress that adds up each phase."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int | None, int]] = []

    def start(self, phase: str, total_bytes: int | None) -> None:
        self.phases.append((phase, total_bytes, 0))

    def advance(self, num_bytes: int) -> None:
        phase, total, done = self.phases[-1]
        self.phases[-1] = phase, total, done + num_bytes

    def finish(self) -> None:
        """The next one has a sum of its own."""


RESTORES: dict[str, Callable[[Repository, dict[str, Any], Sums], object]] = {
    "load": lambda repo, into, told: repo.load("equal", progress=told),
    "checkout": lambda repo, into, told: repo.checkout("equal", into=into, progress=told),
    "one pass": lambda repo, into, told: repo.checkout("equal", into=into, atomic=False, progress=told),
}


@pytest.mark.parametrize("way", ["through the page cache", "past it", "from afar"])
@pytest.mark.parametrize("restore", RESTORES)
def test_a_restore_of_equal_tensors_ends_at_all_bytes(
    restore: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three that want one chunk: who only verifies counts it once, who fills counts what each target gets."""
    state = {name: torch.ones(1 << 18) for name in "abc"} | {"half": torch.ones(1 << 17)}
    url = "memory://" + tmp_path.name if way == "from afar" else str(tmp_path / "repo")
    if way == "from afar":
        monkeypatch.setattr(MemoryStore, "abilities", replace(MemoryStore.abilities, local=False))
    if way == "past it":
        monkeypatch.setattr(fetch, "WORTH_BYTES", 0)
        monkeypatch.setattr(fetch, "packs_in_memory", lambda *_: set())
        monkeypatch.setattr(fetch, "TRIED_BYTES", 1 << 40)
    told = Sums()
    with Repository.init(url) as repo:
        repo.commit(state, branch="equal", options=CommitOptions(orphan=True))
        RESTORES[restore](repo, {name: torch.zeros_like(tensor) for name, tensor in state.items()}, told)
    *verifying, (_, restored, _) = told.phases
    assert all(total == done for _, total, done in told.phases)
    assert restored == 3_670_016 and [(each, total) for each, total, _ in verifying] == (
        [("verifying", 1_572_864)] if restore == "checkout" else []
    )


def test_a_line_comes_only_every_few_seconds(
    repo: Repository, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="cas_ckpt")
    monkeypatch.setattr(clock, "monotonic_s", lambda: 7.0)
    repo.load("main", progress=True)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["restoring"]


@pytest.mark.parametrize("verb", VERBS)
def test_false_is_silent(
    verb: str, repo: Repository, tmp_path: Path, log: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    VERBS[verb](repo, tmp_path, False)
    assert [record for record in log.records if record.levelno == logging.INFO] == []
    assert capfd.readouterr() == ("", "")


def test_anything_else_is_refused_and_says_what_is_wanted(repo: Repository, tmp_path: Path) -> None:
    for verb, wrong in itertools.product(VERBS, [1, "yes", print, Recorder]):
        with pytest.raises(InvalidInputError, match=r"progress is .*: give True, False, or an object with start\("):
            VERBS[verb](repo, tmp_path, wrong)


@pytest.mark.parametrize("verb", VERBS)
def test_an_object_of_ones_own_is_told_and_every_phase_ends(verb: str, repo: Repository, tmp_path: Path) -> None:
    told = Recorder()
    VERBS[verb](repo, tmp_path, told)
    assert told.phases and told.open == 0 and told.done > 0


def damaged(repo: Repository) -> Repository:
    """A bit of every data pack turned over."""
    for pack in Path(repo.url.removeprefix("file://")).glob("packs/**/*"):
        if pack.is_file() and pack.stat().st_size > 1 << 18:
            data = bytearray(pack.read_bytes())
            data[len(data) // 2] ^= 1
            pack.chmod(0o600)
            pack.write_bytes(data)
    return repo


@pytest.mark.parametrize("verb", ["checkout", "load", "export", "diff"])
def test_an_error_leaves_no_phase_open(verb: str, repo: Repository, tmp_path: Path) -> None:
    told = Recorder()
    with pytest.raises(CorruptionError):
        VERBS[verb](damaged(repo), tmp_path, told)
    assert told.phases and told.open == 0


def test_two_verbs_at_once_show_two_sums(repo: Repository, log: pytest.LogCaptureFixture) -> None:
    def load() -> None:
        with Repository.open(repo.url) as own:
            own.load("main", progress=True)

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends = [record.getMessage() for record in log.records if ", took " in record.getMessage()]
    assert [end.split(",")[0] for end in ends] == ["restoring: 1.05 MB of 1.05 MB (100 %)"] * 2


class Terminal(io.StringIO):
    """Standard error of a person."""

    def isatty(self) -> bool:
        return True


@contextmanager
def a_terminal() -> Iterator[Terminal]:
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(Terminal()) as made:
        patch.setenv("TERM", "xterm")
        yield made


def test_on_a_terminal_a_line_is_rewritten(repo: Repository, log: pytest.LogCaptureFixture) -> None:
    with a_terminal() as terminal:
        repo.load("main", progress=True)
    text = terminal.getvalue()
    assert "restoring" in text and "MB" in text
    assert "\x1b[2K" in text  # the line is erased
    assert log.records == []


def test_bars_of_two_verbs_are_below_one_another() -> None:
    with a_terminal() as terminal:
        first, second = shown(True), shown(True)
        assert isinstance(first, BarProgress)
        first.start("verifying", 10)
        second.start("hashing", 10)
        first.advance(5)
        first.finish()
        first.advance(5)
        second.advance(10)
        second.finish()
        second.finish()
    assert BarProgress._display is None
    text = terminal.getvalue()
    assert "verifying" in text and "hashing" in text and text.endswith("\x1b[2K")


def test_an_error_takes_the_bar_from_the_terminal(repo: Repository) -> None:
    with a_terminal(), pytest.raises(CorruptionError):
        damaged(repo).load("main", progress=True)
    assert BarProgress._display is None


def test_a_terminal_that_is_gone_ends_the_display_and_not_the_work(repo: Repository) -> None:
    """A window that was closed: each write is refused with EIO."""
    ours, theirs = os.openpty()
    gone = os.fdopen(theirs, "w")
    with redirect_stderr(gone):
        bar = shown(True)
        assert isinstance(bar, BarProgress)
        os.close(ours)
        made = repo.commit(a_state(3), progress=bar)
        with pytest.raises(OSError, match="Input/output error"):
            print("anything", file=sys.stderr, flush=True)
    assert repo.head.commit == made.id
    assert BarProgress._display is None
    with suppress(OSError):
        gone.close()


def test_a_terminal_that_goes_between_two_phases_ends_the_display_and_not_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # else rich notices that nobody is there, and writes nothing
    ours, theirs = os.openpty()
    gone = os.fdopen(theirs, "w")
    with redirect_stderr(gone):
        bar, other = shown(True), shown(True)
        assert isinstance(bar, BarProgress)
        bar.start("verifying", 10)
        os.close(ours)
        other.start("hashing", 10)
        bar.start("restoring", 10)
        bar.advance(10)
        bar.finish()
        assert BarProgress._display is not None
        other.finish()
    assert BarProgress._display is None
    with suppress(OSError):
        gone.close()


def test_what_no_log_takes_goes_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger("cas_ckpt"), "propagate", False)
    told = shown(True)
    assert isinstance(told, LineProgress)
    told.start("hashing", 10)
    told.advance(10)
    told.finish()
    assert capsys.readouterr().err.startswith("hashing: 10 B of 10 B (100 %)")
    assert shown(False) is shown(None) is SILENT


@pytest.mark.parametrize("verb", ["push", "clone", "fetch"])
def test_copying_tells_how_much_there_is_to_copy(tmp_path: Path, verb: str) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit(a_state(1))
        told = Recorder()
        VERBS[verb](repo, tmp_path, told)
    totals = [total for phase, total in zip(told.phases, told.totals, strict=True) if phase == "copying"]
    assert None not in totals
    assert sum(filter(None, totals)) == told.done > 0
