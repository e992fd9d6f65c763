"""What a plan tells people and programs: the report, its bytes in the index, its JSON, and two compared.

Invariant: `decode_report(encode_report(report))` is the report; bandwidths and extents, which are
of the moment, are not part of the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cas_ckpt.errors import CkptError, CorruptionError, InvalidInputError
from cas_ckpt.layout.plan_summary import NETWORK_BYTES_PER_S, STORAGE_BYTES_PER_S, PlanSummary, Spread
from cas_ckpt.objects.canonical import pack_canonical, unpack_canonical
from cas_ckpt.ops.records import Brief

_SPREADS = ("read_bytes", "num_requests", "sent_bytes", "received_bytes")
_COUNTS = (
    "world_size", "num_tensors", "num_templates", "num_chunks", "chunk_bytes", "wanted_bytes", "metadata_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlannedShape:
    """Tensors that are planned alike.

    Attributes:
        key: Of the first of them.
        placements: One per mesh dimension, as in a rule.
        num_tensors: How many there are.
        num_chunks: Chunks of one of them.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[str, ...]
    num_tensors: int
    num_chunks: int


@dataclass(frozen=True, slots=True, repr=False)
class PlanReport(Brief):
    """How a state would be restored into a layout.

    Attributes:
        root: Id of the state, hexadecimal; "" for a plan from shapes alone.
        mesh: The target's mesh as text.
        rules: Its rules as text, by pattern.
        summary: The plan in numbers.
        shapes: What was planned.
        reused: It was planned before and came from the index.
    """

    root: str
    mesh: str
    rules: Mapping[str, tuple[str, ...]]
    summary: PlanSummary
    shapes: tuple[PlannedShape, ...]
    reused: bool = False


def encode_report(report: PlanReport) -> bytes:
    """The bytes that the index keeps."""
    summary = report.summary
    return pack_canonical(
        {
            "mesh": report.mesh,
            "rules": {pattern: list(placements) for pattern, placements in report.rules.items()},
            "counts": [getattr(summary, name) for name in _COUNTS],
            "spreads": [[each.least, each.mean, each.most] for each in (getattr(summary, name) for name in _SPREADS)],
            "shapes": [
                [each.key, list(each.shape), each.dtype, list(each.placements), each.num_tensors, each.num_chunks]
                for each in report.shapes
            ],
        }
    )


def decode_report(data: bytes, root: str) -> PlanReport:
    """The report that `encode_report` wrote, with the default bandwidths.

    Raises:
        CorruptionError: it did not.
    """
    try:
        found = unpack_canonical(data)
        return _report(found, root)
    except (CkptError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise CorruptionError(
            f"a plan in the index cannot be read ({error}): repo.rebuild_index() forgets it, then plan again"
        ) from error


def _report(found: Mapping[str, Any], root: str) -> PlanReport:
    counts: dict[str, Any] = dict(zip(_COUNTS, found["counts"], strict=True))
    spreads: dict[str, Any] = {name: Spread(*each) for name, each in zip(_SPREADS, found["spreads"], strict=True)}
    shapes = tuple(
        PlannedShape(key, tuple(shape), dtype, tuple(placements), num_tensors, num_chunks)
        for key, shape, dtype, placements, num_tensors, num_chunks in found["shapes"]
    )
    summary = PlanSummary(
        **counts,
        **spreads,
        extents_per_chunk=None,
        storage_bandwidth=STORAGE_BYTES_PER_S,
        network_bandwidth=NETWORK_BYTES_PER_S,
    )
    rules = {pattern: tuple(placements) for pattern, placements in found["rules"].items()}
    return PlanReport(root, found["mesh"], rules, summary, shapes)


def as_json(report: PlanReport) -> dict[str, Any]:
    """The report as what JSON has, derived figures included."""
    summary = report.summary
    derived = ("read_amplification", "storage_s", "network_s", "estimated_s")
    told = asdict(report) | {"rules": {pattern: list(cuts) for pattern, cuts in report.rules.items()}}
    told["summary"] |= {name: getattr(summary, name) for name in derived}
    for name in _SPREADS:
        told["summary"][name]["balance"] = getattr(summary, name).balance
    return told


def read_json(text: str, name: str) -> list[PlanReport]:
    """The reports that `as_json` wrote: one, or a list.

    Raises:
        InvalidInputError: there is something else in the file `name`.
    """
    try:
        found = json.loads(text)
        return [_from_json(each) for each in (found if isinstance(found, list) else [found])]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InvalidInputError(
            f"{name}: no restore plan ({type(error).__name__}: {error}): "
            "on the command line, cas-ckpt plan --output FILE writes one"
        ) from error


def _from_json(found: Mapping[str, Any]) -> PlanReport:
    told = found["summary"]
    names = (*_COUNTS, "extents_per_chunk", "storage_bandwidth", "network_bandwidth")
    spreads: dict[str, Any] = {
        name: Spread(*(told[name][part] for part in ("least", "mean", "most"))) for name in _SPREADS
    }
    shapes = tuple(
        PlannedShape(**each | {"shape": tuple(each["shape"]), "placements": tuple(each["placements"])})
        for each in found["shapes"]
    )
    rules = {pattern: tuple(cuts) for pattern, cuts in found["rules"].items()}
    summary = PlanSummary(**{name: told[name] for name in names}, **spreads)
    return PlanReport(found["root"], found["mesh"], rules, summary, shapes)
