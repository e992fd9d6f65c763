"""The issue's targets, each as a question to the results with its own verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness.results import Key, Results
from benchmarks.harness.sizes import TINY

OURS = "cas_ckpt"
MISSING = "not measured"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row of the table of targets.

    Attributes:
        met: None when it was not measured.
        figures: The medians behind `measured`.
    """

    operation: str
    wanted: str
    measured: str
    figures: str
    met: bool | None

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        return MISSING if self.met is None else "met" if self.met else "**not met**"


@dataclass(frozen=True, slots=True)
class Judge:
    """Answers the targets for one file of results and one size of GPT."""

    results: Results
    gpt: str

    def verdicts(self) -> list[Verdict]:
        """All rows, in the order of the issue's table."""
        return [
            *self._first_commit(), *self._unchanged(), *self._changed(), *self._frozen(), *self._checkout(),
            *self._memory(), *self._slice(), *self._entries(), *self._log(),
        ]  # fmt: skip

    def _name(self, size: str) -> str:
        return TINY[size] if self.gpt == "tiny" else size

    def _key(self, peer: str, operation: str, size: str | None = None) -> Key:
        return (self._name(size) if size else self.gpt, peer, operation)

    def _faster(self, text: str, ours: Key, theirs: Key, wanted: float) -> Verdict:
        """Their time over ours, at least `wanted`."""
        ratio = self.results.ratio((theirs, "seconds"), (ours, "seconds"))
        figures = f"{self._seconds(ours)} against {self._seconds(theirs)}"
        return _at_least(text, f"{wanted:g}x {theirs[1]}", ratio, wanted, figures, "x")

    def _seconds(self, key: Key) -> str:
        return _text(self.results.median(key, "seconds"), lambda value: f"{value:.3f} s")

    def _below(self, text: str, key: Key, figure: str, most: float, show: Callable[[float], str]) -> Verdict:
        value = self.results.median(key, figure)
        met = None if value is None else value < most
        spread = self.results.spread(key, figure)
        range_ = MISSING if spread is None else f"{show(spread.least)} to {show(spread.most)}"
        return Verdict(text, f"< {show(most)}", _text(value, show), range_, met)

    def _share_of_hash(self, text: str, key: Key, wanted: float) -> Verdict:
        """BLAKE3's time over ours for the same bytes in the same process."""
        ratio = self.results.ratio((key, "blake3_s"), (key, "seconds"))
        hashed = _text(self.results.median(key, "blake3_s"), lambda value: f"{value:.3f} s")
        figures = f"{self._seconds(key)} against {hashed} of BLAKE3"
        return _at_least(text, f"{wanted:.0%} of BLAKE3, 2 threads", ratio, wanted, figures, "%")

    def _first_commit(self) -> list[Verdict]:
        ours = self._key(OURS, "save")
        peers = ("torch", "dcp", "torchsnapshot")
        return [self._faster("first commit, fsynced", ours, self._key(peer, "save"), 1.5) for peer in peers]

    def _unchanged(self) -> list[Verdict]:
        text, key = "commit of unchanged state", self._key(OURS, "unchanged")
        return [self._share_of_hash(text, key, 0.8), self._below(f"{text}: written", key, "wchar", 16 << 10, _kib)]

    def _changed(self) -> list[Verdict]:
        text, key = "commit when 1 % of the chunks changed", self._key(OURS, "changed")
        slower = self.results.ratio((key, "seconds"), (key, "unchanged_s"))
        bytes_ = self.results.ratio((key, "new_disk_bytes"), (key, "changed_bytes"))
        unchanged = _text(self.results.median(key, "unchanged_s"), lambda value: f"{value:.3f} s")
        touched = _text(self.results.median(key, "changed_bytes"), lambda value: f"{value / 1e6:.1f} MB changed")
        return [
            _at_most(f"{text}: time", "unchanged + 15 %", slower, 1.15, f"{self._seconds(key)} against {unchanged}"),
            _at_most(f"{text}: bytes", "changed + 5 %", bytes_, 1.05, touched),
        ]

    def _frozen(self) -> list[Verdict]:
        text, dcp = "frozen base + LoRA, second commit", self._key("dcp", "second", "lora-1g")
        ours = self._key(OURS, "second", "lora-1g")
        declared = self._key(f"{OURS}-frozen", "second", "lora-1g")
        smaller = self.results.ratio((dcp, "new_disk_bytes"), (ours, "new_disk_bytes"))
        sizes = (self.results.median(key, "new_disk_bytes") for key in (ours, dcp))
        figures = " against ".join(_text(size, lambda value: f"{value / 1e6:.1f} MB") for size in sizes)
        return [
            _at_least(f"{text}: size", "50x smaller than dcp", smaller, 50, figures, "x"),
            self._faster(f"{text}: everything hashed", ours, dcp, 4),
            self._faster(f"{text}: base declared frozen", declared, dcp, 20),
        ]

    def _checkout(self) -> list[Verdict]:
        cold, warm = self._key(OURS, "load-cold"), self._key(OURS, "load-warm")
        return [
            self._faster("checkout in place, cold", cold, self._key("torch-mmap", "load-cold"), 1.0),
            self._faster("checkout in place, cold", cold, self._key("dcp", "load-cold"), 1.0),
            self._share_of_hash("checkout in place, warm", warm, 0.5),
            self._share_of_hash("checkout in one pass, warm", self._key(f"{OURS}-one-pass", "load-warm"), 0.65),
            self._faster(
                "checkout in one pass, cold",
                self._key(f"{OURS}-one-pass", "load-cold"),
                self._key("torch-mmap", "load-cold"),
                1.0,
            ),
            self._faster("checkout in place, warm", warm, self._key("dcp", "load-warm"), 1.5),
        ]

    def _memory(self) -> list[Verdict]:
        named = {"commit": "save", "commit, unchanged": "unchanged", "checkout, cold": "load-cold",
                 "checkout, warm": "load-warm"}  # fmt: skip
        return [
            self._below(f"peak memory above the state: {text}", self._key(OURS, operation), "peak_bytes", 300e6, _mb)
            for text, operation in named.items()
        ]

    def _slice(self) -> list[Verdict]:
        text, key = "one 64 KB slice of a 1 GB tensor, warm", self._key(OURS, "slices", "one-1g")
        return [
            self._below(f"{text}: bytes read", key, "rchar", 300e3, _kib),
            self._below(f"{text}: time", key, "seconds", 0.010, _ms),
        ]

    def _entries(self) -> list[Verdict]:
        text = "100,000 entries"
        save, count, one = (self._key(OURS, name, "small-100k") for name in ("save", "count", "one-entry"))
        return [
            self._below(f"{text}: commit", save, "seconds", 1.5, _s),
            self._below(f"{text}: checkout", self._key(OURS, "load-warm", "small-100k"), "seconds", 1.5, _s),
            self._below(f"{text}: open and list", count, "seconds", 1, _s),
            self._below(f"{text}: one changed entry, written", one, "wchar", 64 << 10, _kib),
        ]

    def _log(self) -> list[Verdict]:
        text, key = "cas-ckpt log on 10,000 commits", self._key(OURS, "log", "history-10k")
        imported = self.results.median(key, "imports_torch")
        said = _text(imported, lambda value: "imported" if value else "not imported")
        return [
            self._below(text, key, "seconds", 0.35, _s),
            Verdict(f"{text}: torch", "not imported", said, "", None if imported is None else not imported),
        ]


def _at_least(text: str, wanted: str, ratio: float | None, least: float, figures: str, unit: str) -> Verdict:
    show = (lambda value: f"{value:.0%}") if unit == "%" else (lambda value: f"{value:.2f}x")
    return Verdict(text, wanted, _text(ratio, show), figures, None if ratio is None else ratio >= least)


def _at_most(text: str, wanted: str, ratio: float | None, most: float, figures: str) -> Verdict:
    measured = _text(ratio, lambda value: f"{value - 1:+.1%}")
    return Verdict(text, wanted, measured, figures, None if ratio is None else ratio <= most)


def _text(value: float | None, show: Callable[[float], str]) -> str:
    return MISSING if value is None else show(value)


def _s(value: float) -> str:
    return f"{value:.3g} s"


def _ms(value: float) -> str:
    return f"{value * 1e3:.2f} ms"


def _mb(value: float) -> str:
    return f"{value / 1e6:.0f} MB"


def _kib(value: float) -> str:
    return f"{value / 1024:.1f} KiB"
