"""Arguments that need reading: sizes, metrics, regions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from cas_ckpt.errors import InvalidInputError

if TYPE_CHECKING:
    from cas_ckpt.ops.records import Lineage

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?)(?P<binary>i?)b?\Z", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str | int) -> int:
    """Bytes with a unit: 512MB, 5GB (powers of 1000), 1GiB (powers of 1024).

    Raises:
        BadParameter: another form.
    """
    match = _SIZE.match(str(text).strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no size: write e.g. 512MB or 1GiB")
    base = 1024 if match["binary"] else 1000
    return int(float(match["number"]) * base ** _POWERS[match["unit"].lower()])


_AGE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>s|min|h|d|w)\Z", re.IGNORECASE)
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_age(text: str) -> float:
    """Seconds from a number with a unit: 90s, 15min, 2h, 30d, 4w; "now" and "0" are none.

    Raises:
        BadParameter: another form.
    """
    if text.strip().lower() in ("now", "0"):
        return 0.0
    match = _AGE.match(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no age: write e.g. 15min, 2h, 30d or now")
    return float(match["number"]) * _SECONDS[match["unit"].lower()]


def parse_share(text: str) -> float:
    """A share of one from a percentage: 5%.

    Raises:
        BadParameter: another form, or not between 0 and 100 %.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", text.strip())
    if match is None or float(match[1]) > 100:
        raise click.BadParameter(f"{text!r} is no share: write e.g. 5%")
    return float(match[1]) / 100


def parse_metrics(pairs: Sequence[str]) -> dict[str, float]:
    """The metrics in arguments of the form NAME=VALUE.

    Raises:
        InvalidInputError: another form, or no number.
    """
    metrics = {}
    for pair in pairs:
        name, equals, value = pair.rpartition("=")
        try:
            metrics[name] = float(value)
        except ValueError as error:
            raise InvalidInputError(f"metric {pair!r}: wanted NAME=NUMBER") from error
        if not equals or not name:
            raise InvalidInputError(f"metric {pair!r}: wanted NAME=NUMBER")
    return metrics


def parse_lineage(pairs: Sequence[str]) -> list[Lineage]:
    """The edges in arguments of the form KIND=REVISION.

    Raises:
        InvalidInputError: another form.
    """
    from cas_ckpt.ops.records import Lineage

    edges = []
    for pair in pairs:
        kind, equals, target = pair.partition("=")
        if not equals or not kind or not target:
            raise InvalidInputError(f"lineage {pair!r}: wanted KIND=REVISION, e.g. fine-tune-of=base")
        edges.append(Lineage(kind, target))
    return edges


def parse_region(text: str, shape: Sequence[int]) -> list[tuple[int, int]]:
    """The region that `text` means in a tensor of `shape`: (offset, size) per dimension.

    One part per dimension, with commas between: "2:10" from 2 up to 10, "2:" to the end, ":10",
    ":", or "5" alone (a size of one). Dimensions that are left out are taken whole.

    Raises:
        InvalidInputError: another form, or more parts than dimensions.
    """
    parts = text.split(",")
    if len(parts) > len(shape):
        raise InvalidInputError(f"region {text!r} has {len(parts)} parts, the tensor {len(shape)} dimensions")
    return [_parse_part(part.strip(), size) for part, size in zip(parts, shape, strict=False)]


def _parse_part(part: str, size: int) -> tuple[int, int]:
    match = re.fullmatch(r"(\d*)(:?)(\d*)", part)
    if match is None or not part:
        raise InvalidInputError(f"region part {part!r}: write START:STOP, START:, :STOP, : or a number from 0 on")
    start = int(match[1] or 0)
    stop = int(match[3] or size) if match[2] else start + 1
    if stop < start:
        raise InvalidInputError(f"region part {part!r} ends before it begins")
    return start, stop - start
