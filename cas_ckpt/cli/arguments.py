"""Arguments that need reading: sizes, metrics, regions."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from cas_ckpt.errors import InvalidInputError

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
