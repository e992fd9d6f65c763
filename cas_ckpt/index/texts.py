"""Text that a database can hold: of people, and what is kept as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_JSON = json.JSONDecoder()


def storable(text: str) -> str:
    """`text` without what no database takes (NUL, lone surrogates), each shown as U+FFFD."""
    if "\0" not in text and text.isascii():
        return text
    return text.replace("\0", "\ufffd").encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def json_of(values: Mapping[str, float]) -> str | None:
    """Numbers by name as JSON, those that are not finite as "nan", "inf" and "-inf", which it lacks; None: none."""
    if not values:
        return None
    plain = {name: value if math.isfinite(value) else repr(value) for name, value in values.items()}
    return json.dumps(plain, separators=(",", ":"))


def read_json(text: str | None) -> dict[str, Any]:
    """The mapping in `text`, as `json.loads` returns it, at half its cost for texts this short."""
    if not text:
        return {}
    values, end = _JSON.raw_decode(text)
    if end != len(text) or not isinstance(values, dict):
        raise ValueError(f"{text!r} is not a mapping")
    return values


_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def read_metrics(text: str | None) -> dict[str, float]:
    """The metrics that `json_of` made `text` of; `math.nan` itself, which equals itself inside of a mapping."""
    values = read_json(text)
    if text is not None and '":"' in text:
        values |= {name: _NOT_FINITE[value] for name, value in values.items() if isinstance(value, str)}
    return values
