"""What a commit is asked to say: the request, and its checks.

Invariant: what passes here can be encoded; nothing of the state is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cas_ckpt.errors import InvalidInputError, shown_value
from cas_ckpt.objects.commit import LineageEdge, is_lineage_kind
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.values import encode_value
from cas_ckpt.ops.records import Lineage
from cas_ckpt.ops.resolve import Revision, revision_text
from cas_ckpt.ops.units import checked_step
from cas_ckpt.refs import Head, check_text, default_author

DEFAULT_AUDIT = 0.01
"""Share of frozen chunks, and of what several ranks hold, that is compared by BLAKE3 on top of the checksums."""

CHECKSUM, VERSION, SAMPLE = "checksum", "version", "sample"
REQUIRES_GRAD = "requires_grad"
"""As a pattern of `frozen=`: all parameters that require no gradient."""

_CHOICES = {
    "on_conflict": ("retry", "raise"),
    "on_divergence": ("raise", "warn"),
    "frozen_check": (CHECKSUM, VERSION),
    "replica_check": (CHECKSUM, SAMPLE),
}


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """What a commit is to say and how it is to be made.

    Attributes:
        branch: Name of the branch; None: where `head` says, or the default branch.
        head: Where the state came from, see destination.py; None: nobody follows that, and the commit goes on top
            of whatever the branch names, which it begins if need be.
        create: The branch may be begun though its name is nearly that of another.
        orphan: The branch may be begun without a parent.
        step: Training step. metrics: finite numbers by name.
        meta: A plain value of the user's.
        on_conflict: "retry" goes on top of whatever head is there; "raise" reports that the
            branch moved since the call began.
        frozen: Patterns of keys whose tensors do not change in this process.
        frozen_keys: Whole keys of more such tensors; may be empty, and may name what is not there.
        frozen_check: "checksum" compares every byte at each commit; "version" believes that memory whose
            version counter stands still is unchanged.
        frozen_audit: Share of the frozen chunks hashed all the same, 0..1.
        allow_pickle: Pickle values that cannot be expressed otherwise.
        other_parents: Commits that this one joins, after the branch's head.
        parents: The same as revisions, behind those.
        lineage: What the state was made from, apart from its parents.
        provenance: Keep where and by what the commit is made; a mapping is kept with it.
        replica_check: "checksum" compares every byte that several ranks hold; "sample" only `replica_audit`.
        replica_audit: Share of what several ranks hold that every one of them hashes to be
            compared, 0..1; of each tensor at least one stretch of 64 KiB.
        on_divergence: "raise" if replicas differ, or "warn" in the log and keep one replica of each such tensor.
        verb: What was called, as ranks that do not all call it are told.
        called_at: Where in the user's program, "train.py:120"; "" if nobody knows.
    """

    branch: str | None = None
    head: Head | None = None
    create: bool = False
    orphan: bool = False
    message: str | None = ""
    author: str | None = None
    step: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    meta: Any = None
    on_conflict: str = "retry"
    frozen: str | Sequence[str] | None = None
    frozen_keys: frozenset[str] = frozenset()
    frozen_check: str = CHECKSUM
    frozen_audit: float = DEFAULT_AUDIT
    allow_pickle: bool = False
    other_parents: Sequence[Digest] = ()
    parents: Sequence[Revision] = ()
    lineage: Sequence[Lineage] = ()
    provenance: bool | Mapping[str, Any] = False
    num_threads: int | None = None
    replica_check: str = CHECKSUM
    replica_audit: float = DEFAULT_AUDIT
    on_divergence: str = "raise"
    verb: str = "commit"
    called_at: str = ""


@dataclass(frozen=True, slots=True)
class Ancestry:
    """Where a commit comes from, resolved: only the process that publishes needs it."""

    parents: tuple[Digest, ...] = ()
    lineage: tuple[LineageEdge, ...] = ()
    provenance: bytes | None = None


@dataclass(frozen=True, slots=True)
class CommitFields:
    """The checked, encoded parts of a request that stand in the commit.

    Attributes:
        lineage: (kind, revision, encoded metadata) as they were asked for.
        provenance: The mapping that is to be kept with what is captured, encoded; None: keep nothing.
    """

    message: str
    author: str
    step: int | None
    metrics: dict[str, float]
    meta: bytes | None
    lineage: tuple[tuple[str, str, bytes | None], ...] = ()
    provenance: bytes | None = None
    parents: tuple[str, ...] = ()
    ancestry: Ancestry = Ancestry()


def checked_fields(request: CommitRequest) -> CommitFields:
    """The fields of `request`, checked and encoded.

    Raises:
        InvalidInputError: says which field cannot be stored.
    """
    for name, choices in _CHOICES.items():
        if getattr(request, name) not in choices:
            wanted = " or ".join(map(repr, choices))
            raise InvalidInputError(f"{name} is {wanted}, not {getattr(request, name)!r}")
    for what, share in (("frozen tensors", request.frozen_audit), ("replicas", request.replica_audit)):
        if not 0 <= share <= 1:
            raise InvalidInputError(f"the audited share of {what} is {share}: give a number from 0 to 1")
    author = request.author if request.author is not None else default_author()
    message = "" if request.message is None else request.message
    for name, text in (("message", message), ("author", author)):
        check_text(name, text)
    meta = None if request.meta is None else encode_value(request.meta, key="meta")
    if not isinstance(request.metrics, Mapping):
        raise InvalidInputError(
            f'metrics are {shown_value(request.metrics)}: give numbers by name, e.g. {{"loss": 2.3}}'
        )
    metrics = {k: _metric(k, v) for k, v in request.metrics.items()}
    lineage = tuple(map(_lineage, _listed("lineage", request.lineage)))
    parents = tuple(map(revision_text, _listed("parents", request.parents)))
    for revision in parents:
        check_text("name of a parent", revision)
    step = None if request.step is None else checked_step(request.step)
    return CommitFields(message, author, step, metrics, meta, lineage, _provenance(request.provenance), parents)


def _listed(name: str, given: Any) -> Sequence[Any]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidInputError(f"{name} is {shown_value(given)}: give a list")
    return given


def _lineage(given: Any) -> tuple[str, str, bytes | None]:
    if not isinstance(given, Lineage):
        raise InvalidInputError(f'lineage holds {shown_value(given)}: wanted e.g. Lineage("fine-tune-of", "base")')
    if not isinstance(given.kind, str) or not is_lineage_kind(given.kind):
        raise InvalidInputError(f"{shown_value(given.kind)} is no kind of lineage: use small letters, digits and '-'")
    target = revision_text(given.target)
    check_text("name of what a state was made from", target)
    note = None if given.meta is None else encode_value(given.meta, key=f"metadata of {given.kind}")
    return given.kind, target, note


def _provenance(given: Any) -> bytes | None:
    if given is False or given is None:
        return None
    if given is not True and not isinstance(given, Mapping):
        raise InvalidInputError(f"provenance is {shown_value(given)}: give True, False or a mapping")
    return encode_value({} if given is True else dict(given), key="provenance")


def _metric(name: str, value: Any) -> float:
    detach = getattr(value, "detach", None)  # a loss that still belongs to a graph
    try:
        number = float(detach() if callable(detach) else value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"metric {name!r} is no number that a float can be: {error}") from error
    check_text("name of a metric", name)
    if isinstance(value, (bool, str)) or not math.isfinite(number):
        raise InvalidInputError(
            f"metric {name!r} is {value!r}: wanted a finite number (leave a NaN out, or put it into meta=)"
        )
    return number
