"""Arguments that need reading: sizes, metrics, regions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.ops.units import parse_duration, parse_share, parse_size

if TYPE_CHECKING:
    from cas_ckpt.ops.read import Index, Region
    from cas_ckpt.ops.records import Lineage

_T = TypeVar("_T")


class Unit(click.ParamType[_T]):
    """A type of option whose text is read by a function of ops/units.py."""

    def __init__(self, name: str, parse: Callable[[str], _T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """What `value` means; values that are read already pass."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except InvalidInputError as error:
            self.fail(str(error), param, ctx)


SIZE = Unit("size", parse_size)
AGE = Unit("age", lambda text: parse_duration(text).ago_s())
"""Seconds; calendar months are reckoned back from now."""
SHARE = Unit("share", parse_share)


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


def parse_region(text: str) -> Region:
    """The region that `text` means, in NumPy's words: parts with commas between.

    "2:10" from 2 up to 10, "2:", ":10", ":", "5" (one element; the dimension is dropped), negative
    numbers count from the end, "..." stands for all dimensions that are left.

    Raises:
        InvalidInputError: another form.
    """
    return tuple(_parse_part(part.strip()) for part in text.split(","))


def _parse_part(part: str) -> Index:
    if part == "...":
        return Ellipsis
    match = re.fullmatch(r"(-?[0-9]{1,18})?(?:(:)(-?[0-9]{1,18})?)?", part)
    if match is None or not part:
        raise InvalidInputError(f"region part {part!r}: write START:STOP, START:, :STOP, :, a number or ...")
    if match[2] is None:
        return int(match[1])
    return slice(*(None if number is None else int(number) for number in (match[1], match[3])))
