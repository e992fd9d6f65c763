"""Progress is lines or a bar on standard error, and never in the way."""

from __future__ import annotations

import threading

import pytest

from cas_ckpt import clock, progress
from cas_ckpt.cli.command import ProgressWhen, Settings
from cas_ckpt.cli.output import plain, table
from cas_ckpt.progress import SILENT, BarProgress, LineProgress, describe, human_bytes


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the clock tells; set its only item."""
    now = [100.0]
    monkeypatch.setattr(clock, "monotonic_s", lambda: now[0])
    return now


def test_a_line_comes_every_few_seconds_and_at_the_end(seconds: list[float]) -> None:
    lines: list[str] = []
    shown = LineProgress(lines.append)
    shown.start("hashing", 10_000_000)
    shown.advance(1_000_000)
    assert lines == []
    seconds[0] += progress.SECONDS_PER_LINE
    shown.advance(1_000_000)
    shown.advance(1_000_000)
    assert lines == ["hashing: 2.00 MB of 10.0 MB (20 %), 400 KB/s, 20 s left"]
    seconds[0] += 1
    shown.finish()
    assert lines[1:] == ["hashing: 3.00 MB of 10.0 MB (30 %), 500 KB/s, took 6.0 s"]


def test_a_short_phase_says_nothing(seconds: list[float]) -> None:
    lines: list[str] = []
    shown = LineProgress(lines.append)
    shown.start("hashing", 5)
    shown.advance(5)
    shown.finish()
    assert lines == []


def test_work_of_unknown_length_is_told_without_an_end() -> None:
    assert describe("reading", 5000, None, 2.0) == "reading: 5.00 KB, 2.50 KB/s"
    assert describe("reading", 0, 0, 0.0) == "reading: 0 B of 0 B"


def test_threads_may_advance_together(seconds: list[float]) -> None:
    lines: list[str] = []
    shown = LineProgress(lines.append)
    shown.start("hashing", 8000)
    threads = [threading.Thread(target=lambda: [shown.advance(1) for _ in range(1000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds[0] += progress.SECONDS_PER_LINE
    shown.advance(0)
    assert lines[0].startswith("hashing: 8.00 KB of 8.00 KB (100 %)")


def test_a_bar_goes_through_phases(capsys: pytest.CaptureFixture[str]) -> None:
    bar = BarProgress()
    for phase in ("hashing", "indexing"):
        bar.start(phase, 10)
        bar.advance(10)
        bar.finish()
    bar.advance(1)
    bar.finish()
    assert capsys.readouterr().out == ""


def test_quiet_and_json_are_silent() -> None:
    assert Settings(quiet=True).show_progress() is SILENT
    assert Settings(json=True).show_progress() is SILENT
    assert Settings(progress=ProgressWhen.NEVER).show_progress() is SILENT
    assert isinstance(Settings().show_progress(), LineProgress)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 KB"), (9999, "10.0 KB"), (12_345, "12.3 KB"), (99_960, "100 KB"),
     (999_400, "999 KB"), (999_500, "1.00 MB"), (5_000_000_000, "5.00 GB"), (7 * 10**18, "7000 PB")],
)  # fmt: skip
def test_bytes_are_told_in_three_digits(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_columns_are_aligned() -> None:
    assert table([("a", "10", "x"), ("long", "5", "")], right=frozenset({1})) == ["a     10  x", "long   5"]
    assert table([]) == []


def test_json_takes_what_states_hold() -> None:
    assert plain({1: (float("nan"), b"x", {2}), "s": object}) == {"1": ["nan", "b'x'", [2]], "s": "<class 'object'>"}
