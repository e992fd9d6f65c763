"""Durations, sizes and shares: one grammar, whichever verb reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas_ckpt.core.units import Duration, parse_duration, parse_moment, parse_period, parse_share, parse_size
from cas_ckpt.errors import InvalidInputError
from cas_ckpt.ops.fsck.packs import Subset, parse_subset
from tests.cli.running import call, ok

DAY_S = 86400


@pytest.mark.parametrize(("text", "wanted"), [
    ("90s", Duration(seconds=90)),
    ("3m", Duration(seconds=180)),
    ("3min", Duration(seconds=180)),
    ("3mo", Duration(months=3)),
    ("2 days", Duration(seconds=2 * DAY_S)),
    ("1d 12h", Duration(seconds=1.5 * DAY_S)),
    ("1d12h", Duration(seconds=1.5 * DAY_S)),
    ("1.5D", Duration(seconds=1.5 * DAY_S)),
    ("4w", Duration(seconds=28 * DAY_S)),
    ("1y6mo", Duration(months=18)),
    ("2 years", Duration(months=24)),
    ("0", Duration()),
    ("now", Duration()),
])  # fmt: skip
def test_a_duration_means_what_it_says(text: str, wanted: Duration) -> None:
    assert parse_duration(text) == wanted


@pytest.mark.parametrize("text", ["", "3", "m3", "3 m m", "1d2d", "2y5m7d", "3 parsecs", "0.5y", "-1d", "1 mo.", "١d"])
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="is not a duration"):
        parse_duration(text)


def test_three_minutes_are_three_minutes_for_every_verb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("cas_ckpt.clock.now_s", lambda: 10 * DAY_S)
    assert parse_moment("3m") == parse_moment("3 minutes ago") == (10 * DAY_S - 180) * 10**6
    assert parse_duration("3m").ago_s() == 180
    with pytest.raises(InvalidInputError, match="m is minutes, a month is mo"):
        parse_period("3m")
    ok("init", str(tmp_path / "repo"))
    repo = str(tmp_path / "repo")
    for words in ("gc --min-age", "gc --expire-reflog", "fsck --read-data --max-age", "log --since"):
        assert call("-C", repo, *words.split(), "3m").code == 0
        refused = call("-C", repo, *words.split(), "3 parsecs")
        assert refused.code == 2 and "'3 parsecs' is not a duration" in refused.err


@pytest.mark.parametrize(("text", "wanted"), [
    ("512", 512), ("512B", 512), ("10G", 10**10), ("10GB", 10**10), ("10GiB", 10 << 30), ("1ki", 1024),
    ("1.5 MB", 1_500_000), ("123456789012345678", 123456789012345678),
])  # fmt: skip
def test_a_size_means_the_same_for_every_verb(text: str, wanted: int) -> None:
    assert parse_size(text) == wanted
    assert parse_subset(text) == Subset(num_bytes=wanted)


@pytest.mark.parametrize("text", ["", "big", "-1", "1e9", "10iB", "10X", "1" * 30])
def test_another_form_of_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="is not a size"):
        parse_size(text)


def test_a_share_is_a_percentage() -> None:
    assert parse_share("5%") == 0.05
    for text in ("5", "101%", "-1%", "%"):
        with pytest.raises(InvalidInputError, match="is not a share"):
            parse_share(text)
