"""What a commit is asked to say: the request, and its checks.

Invariant: what passes here can be encoded; nothing of the state is looked at.
"""

from __future__ import annotations

import math
import os
import pwd
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.objects.commit import LineageEdge, is_lineage_kind
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.values import encode_value
from cas_ckpt.ops.frozen import DEFAULT_AUDIT
from cas_ckpt.ops.records import Lineage

MAX_MESSAGE_BYTES = 64 * 1024
MAX_NOTE_BYTES = 4 * 1024
"""A ref is read whole whenever refs are listed: what stands in it is short."""

MAX_STEP = 2**63 - 1
"""The largest step: what databases call a big integer."""


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """What a commit is to say and how it is to be made.

    Attributes:
        branch: Name of the branch; None is the default branch.
        step: Training step. metrics: finite numbers by name.
        meta: A plain value of the user's.
        on_conflict: "retry" goes on top of whatever head is there; "raise" reports that the
            branch moved since the call began.
        frozen: Patterns of keys that do not change in this process.
        frozen_audit: Share of the frozen chunks hashed all the same, 0..1.
        allow_pickle: Pickle values that cannot be expressed otherwise.
        other_parents: Commits that this one joins, after the branch's head.
        parents: The same as revisions, behind those.
        lineage: What the state was made from, apart from its parents.
        provenance: Keep where and by what the commit is made; a mapping is kept with it.
        replica_audit: Share of what several ranks hold that every one of them hashes to be
            compared, 0..1; of each tensor at least one stretch of 64 KiB.
        on_divergence: "raise" if replicas differ, or "warn" in the log and keep the lowest rank's.
        verb: What was called, as ranks that do not all call it are told.
        called_at: Where in the user's program, "train.py:120"; "" if nobody knows.
    """

    branch: str | None = None
    message: str = ""
    author: str | None = None
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    meta: Any = None
    on_conflict: str = "retry"
    frozen: str | Sequence[str] | None = None
    frozen_audit: float = DEFAULT_AUDIT
    allow_pickle: bool = False
    other_parents: Sequence[Digest] = ()
    parents: Sequence[str] = ()
    lineage: Sequence[Lineage] = ()
    provenance: bool | Mapping[str, Any] = False
    num_threads: int | None = None
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
    metrics: dict[str, float]
    meta: bytes | None
    lineage: tuple[tuple[str, str, bytes | None], ...] = ()
    provenance: bytes | None = None
    ancestry: Ancestry = Ancestry()


def checked_fields(request: CommitRequest) -> CommitFields:
    """The fields of `request`, checked and encoded.

    Raises:
        InvalidInputError: says which field cannot be stored.
    """
    if request.on_conflict not in ("retry", "raise"):
        raise InvalidInputError(f"on_conflict is 'retry' or 'raise', not {request.on_conflict!r}")
    if request.on_divergence not in ("raise", "warn"):
        raise InvalidInputError(f"on_divergence is 'raise' or 'warn', not {request.on_divergence!r}")
    if not 0 <= request.replica_audit <= 1:
        raise InvalidInputError(f"the audited share of replicas is {request.replica_audit}: give a number from 0 to 1")
    author = request.author if request.author is not None else default_author()
    for name, text in (("message", request.message), ("author", author)):
        _check_text(name, text)
    if request.step is not None and (type(request.step) is not int or not 0 <= request.step <= MAX_STEP):
        raise InvalidInputError(f"step {request.step!r} is not a whole number from 0 to {MAX_STEP}")
    meta = None if request.meta is None else encode_value(request.meta, key="meta")
    metrics = {k: _metric(k, v) for k, v in request.metrics.items()}
    lineage = tuple(map(_lineage, _listed("lineage", request.lineage)))
    for revision in _listed("parents", request.parents):
        _check_text("name of a parent", revision)
    return CommitFields(request.message, author, metrics, meta, lineage, _provenance(request.provenance))


def _listed(name: str, given: Any) -> Sequence[Any]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidInputError(f"{name} is {given!r:.80}: give a list")
    return given


def _lineage(given: Any) -> tuple[str, str, bytes | None]:
    if not isinstance(given, Lineage):
        raise InvalidInputError(f'lineage holds {given!r:.80}: wanted e.g. Lineage("fine-tune-of", "base")')
    if not isinstance(given.kind, str) or not is_lineage_kind(given.kind):
        raise InvalidInputError(f"{given.kind!r:.80} is no kind of lineage: use small letters, digits and '-'")
    _check_text("name of what a state was made from", given.target)
    note = None if given.meta is None else encode_value(given.meta, key=f"metadata of {given.kind}")
    return given.kind, given.target, note


def _provenance(given: Any) -> bytes | None:
    if given is False or given is None:
        return None
    if given is not True and not isinstance(given, Mapping):
        raise InvalidInputError(f"provenance is {given!r:.80}: give True, False or a mapping")
    return encode_value({} if given is True else dict(given), key="provenance")


def _check_text(name: str, text: str) -> None:
    if not isinstance(text, str):
        raise InvalidInputError(f"the {name} is a {type(text).__name__}, not text")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"the {name} cannot be written as UTF-8: {error}") from error
    if num_bytes > MAX_MESSAGE_BYTES:
        raise InvalidInputError(f"the {name} is longer than {MAX_MESSAGE_BYTES} bytes: put long text into meta=")


def check_note(name: str, text: str) -> None:
    """Refuse what a ref cannot carry as its message or reason.

    Raises:
        InvalidInputError: no text, or longer than a short letter.
    """
    _check_text(name, text)
    if len(text.encode()) > MAX_NOTE_BYTES:
        raise InvalidInputError(f"the {name} is longer than {MAX_NOTE_BYTES} bytes: shorten it")


def _metric(name: str, value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"metric {name!r} is no number that a float can be: {error}") from error
    _check_text("name of a metric", name)
    if isinstance(value, (bool, str)) or not math.isfinite(number):
        raise InvalidInputError(
            f"metric {name!r} is {value!r}: wanted a finite number (leave a NaN out, or put it into meta=)"
        )
    return number


def default_author() -> str:
    """Who commits when nobody says: user@host."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
