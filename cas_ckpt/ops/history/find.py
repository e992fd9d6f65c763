"""ls and find: the entries of a commit; and those of all of history, by key, dtype, shape, size or content.

    1. the commits: all that a branch, tag or pin leads to, or some, in the order of the log; those that were forgotten
       are left out
    2. the index walks their states at once (index/finding.py); no node is read
    3. what is the same in several commits is one row, with the first and the last of them

Invariant: lists come from the index and read no node (index/entries.py); an entry is found if, and only if, `ls` of its
commit shows it so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import EllipsisType, MappingProxyType
from typing import Any, TypeVar

from cas_ckpt.arguments import check_whole, one_text
from cas_ckpt.core.forgotten import forgotten_view
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import CommitInfo, info_from_row, log_rows, log_rows_in_pieces
from cas_ckpt.core.refs import MIN_PREFIX
from cas_ckpt.core.revisions import Revision, resolve, revision_texts
from cas_ckpt.core.tree import ask, known_commit, known_root, naming_forgotten
from cas_ckpt.core.units import commit_filter
from cas_ckpt.errors import AmbiguousIdError, InvalidInputError, NotFoundError, shown_value
from cas_ckpt.index import contents, entries, finding, history
from cas_ckpt.index.rows import CommitFilter, CommitRow, ListedEntry
from cas_ckpt.objects.digest import Digest, ObjectKind, short
from cas_ckpt.objects.nodes import name_order
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import DTYPE_BYTES, NUMPY_PREFIX
from cas_ckpt.objects.state import parse_key
from cas_ckpt.ops.history.log import start_of_log

T = TypeVar("T")


def list_commit(
    handle: RepositoryHandle, revision: Revision, *, keys: str | Sequence[str] | None = None
) -> list[ListedEntry]:
    """The entries of the commit `revision`; arguments and errors as for `list_entries`."""
    return list_entries(handle, known_root(handle, resolve(handle, revision)), keys=keys)


def list_one(handle: RepositoryHandle, revision: Revision, key: str) -> ListedEntry:
    """The entry `key` of the commit `revision`.

    Raises:
        NotFoundError: no such commit or key.
    """
    return ask(handle, entries.entry, known_root(handle, resolve(handle, revision)), key=key)


def list_entries(
    handle: RepositoryHandle, root: Digest, *, keys: str | Sequence[str] | None = None
) -> list[ListedEntry]:
    """The entries of the state `root`, those that match `keys`, in the order of the tree.

    Raises:
        NotFoundError: a pattern matches nothing. CorruptionError: the state, or the index, is damaged.
    """
    patterns = KeyPatterns(keys)
    found = ask(handle, entries.manifest, root, keys=patterns)
    patterns.require_used()
    return found


# --- of all of history ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundEntry:
    """An entry as it is in one or several commits.

    Attributes:
        kind, dtype, shape, num_bytes: As `ls` shows them.
        object_id: Of its tensor or chunk, or of a tensor in parts or empty container; None: so small that it has none.
        first, last: Ids of the first and the last commit that have it, in the order of the log, from its end.
        num_commits: How many have it.
    """

    key: str
    kind: str
    dtype: str | None
    shape: tuple[int, ...] | None
    num_bytes: int
    object_id: str | None
    first: str
    last: str
    num_commits: int


@dataclass(frozen=True, slots=True)
class FindRequest:
    """A search: which entries, and where to look for them.

    Attributes:
        entries: Conditions on them, but for their content.
        object_id: At least four digits of the id of a chunk, tensor or tensor in parts: what is it, or holds it.
        revisions: Commits that these lead to; none: that any branch, tag or pin leads to.
        at: Only these commits, and nothing that they lead to.
        commits: Only commits that meet this.
    """

    entries: finding.EntryFilter
    object_id: str | None
    revisions: Sequence[Revision]
    at: Sequence[Revision]
    commits: CommitFilter


def find_request(
    *,
    keys: str | Sequence[str] | None = None,
    dtype: Any = None,
    shape: Any = None,
    min_bytes: int | None = None,
    max_bytes: int | None = None,
    object_id: str | None = None,
    ref: Any = None,
    at: Any = None,
    world_size: int | None = None,
    axes: str | Sequence[str] | Mapping[str, int | None] = (),
) -> FindRequest:
    """The request, from what people write.

    Raises:
        InvalidInputError: a shape or dtype of another form; sizes that nothing has; revisions that are none; `at`
            beside other conditions on commits.
    """
    wanted = commit_filter(world_size=world_size, axes=axes)
    if at is not None and (ref is not None or wanted):
        raise InvalidInputError("at= says which commits are meant: give it without ref=, world_size= and axes=")
    least = None if min_bytes is None else check_whole("min_bytes", min_bytes)
    most = None if max_bytes is None else check_whole("max_bytes", max_bytes)
    if least is not None and most is not None and least > most:
        raise InvalidInputError(f"nothing has {least} bytes or more and {most} or fewer: give other sizes")
    conditions = finding.EntryFilter(
        KeyPatterns(keys), None if dtype is None else parse_dtype(dtype), None if shape is None else parse_shape(shape),
        least, most,
    )  # fmt: skip
    return FindRequest(conditions, object_id, _revisions("ref", ref), _revisions("at", at), wanted)


def _revisions(name: str, given: Any) -> tuple[str, ...]:
    """The revisions that were given; a list of none of them would mean all commits."""
    found = revision_texts(given)
    if given is not None and not found:
        raise InvalidInputError(f"{name}= names no commit: leave it out to search all of them")
    return found


def find_entries(handle: RepositoryHandle, request: FindRequest, *, limit: int | None = None) -> list[FoundEntry]:
    """Entries that meet the request, by key, of one key the one that was there first before others.

    Raises:
        NotFoundError: no such revision or object, or no tensor at all of this dtype.
        InvalidInputError: the object is a container of entries, and no part of one.
    """
    rows = list(_commits(handle, request))
    found = _ask(handle, finding.find_entries, rows, request)
    # Numbers count from the youngest commit, which is the last of a history.
    found.sort(key=lambda one: ([name_order(name) for name in parse_key(one.entry.key)], -one.last, -one.first))
    return [
        FoundEntry(
            *one.entry, None if one.content is None else one.content.hex(),
            rows[one.last].digest.hex(), rows[one.first].digest.hex(), one.num_states,
        )
        for one in found[:limit]
    ]  # fmt: skip


def find_commits(handle: RepositoryHandle, request: FindRequest, *, limit: int | None = None) -> list[CommitInfo]:
    """Commits that hold an entry that meets the request, in the order of the log; errors as for `find_entries`.

    With a limit, the first commits are searched, and all others only where these do not hold as many.
    """
    rows = _commits(handle, request, limit=limit)
    found: list[CommitRow] = []
    for most in (None,) if limit is None else (max(limit, finding.FEW_STATES), None):
        batch = list(islice(rows, most))
        holding = _ask(handle, finding.find_states, batch, request)
        found += [row for row in batch if row.root in holding]
        if most is None or len(batch) < most or (limit is not None and len(found) >= limit):
            break
    return [info_from_row(row) for row in found[:limit]]


def _commits(handle: RepositoryHandle, request: FindRequest, *, limit: int | None = None) -> Iterator[CommitRow]:
    """The commits that are searched, each once, in the order of the log; with a limit, few of them may be taken."""
    if request.at:
        named = {digest: known_commit(handle, digest) for digest in [resolve(handle, one) for one in request.at]}
        rows = list(named.values())
        if len(rows) > 1:
            order = handle.index.read(history.walk, named, first_parent=False)
            rows = [named[Digest(digest)] for _, digest in order if digest in named]
        return iter(rows)
    starts = start_of_log(handle, request.revisions, all_refs=not request.revisions)
    forgotten = forgotten_view(handle)
    if limit is None or request.commits:
        every = log_rows(handle, starts, wanted=request.commits)
    else:
        every = log_rows_in_pieces(handle, starts)
    return (row for row in every if row.digest not in forgotten)


def _ask(handle: RepositoryHandle, question: Callable[..., T], rows: Sequence[CommitRow], request: FindRequest) -> T:
    roots = [Digest(row.root) for row in rows]
    holding = None if request.object_id is None else _object(handle, request.object_id)
    wanted = replace(request.entries, holding=holding)
    with naming_forgotten(handle, *(roots if request.at else ())):
        found = ask(handle, question, roots=roots, wanted=wanted)
    if not found and holding is not None and ask(handle, entries.is_container, holding):
        raise InvalidInputError(
            f"{short(holding)} is a container, and find looks for entries: repo.holders(ref, key) says which "
            "commits hold it"
        )
    return found


def _object(handle: RepositoryHandle, text: str) -> Digest:
    """The object whose id begins with `text`."""
    if len(one_text("object_id", text)) < MIN_PREFIX:
        raise InvalidInputError(f"object {text!r}: give at least {MIN_PREFIX} digits of its id")
    kinds = (ObjectKind.CHUNK, ObjectKind.CHUNK_PAGE, ObjectKind.TENSOR, ObjectKind.TREE)
    found = handle.index.read(contents.resolve_prefix, text, kinds)
    if not found:
        handle.sync()
        found = handle.index.read(contents.resolve_prefix, text, kinds)
    if not found:
        raise NotFoundError(f"there is no chunk, tensor or container whose id begins with {text}")
    if len(found) > 1:
        shown = ", ".join(digest.hex()[: len(text) + 4] for digest in found[:5])
        raise AmbiguousIdError(f"{len(found)} objects begin with {text} ({shown} ...): give more digits")
    return Digest(found[0])


# --- what people write ----------------------------------------------------------------------------

_DTYPES = MappingProxyType({
    "f64": "float64", "fp64": "float64", "double": "float64", "f32": "float32", "fp32": "float32", "float": "float32",
    "f16": "float16", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2", "fp8": "float8_*", "i64": "int64", "long": "int64", "i32": "int32", "int": "int32",
    "i16": "int16", "short": "int16", "i8": "int8", "u8": "uint8", "byte": "uint8", "u16": "uint16", "u32": "uint32",
    "u64": "uint64", "c64": "complex64", "cfloat": "complex64", "c128": "complex128", "cdouble": "complex128",
})  # fmt: skip
"""Names of dtypes in torch, in safetensors and in speech, besides those that commits have."""


def parse_dtype(given: Any) -> str:
    """The name of a dtype in commits, or a pattern of names.

    Raises:
        InvalidInputError: neither text nor a dtype of torch or NumPy.
    """
    if not isinstance(given, str):
        if not any(kind in type(given).__name__ for kind in ("dtype", "DType")):
            raise InvalidInputError(f"dtype is {shown_value(given)}: give its name, or a dtype of torch or NumPy")
        if hasattr(given, "byteorder"):
            return _name_in_commits(given)
        given = str(given)
    name: str = given.strip().rpartition("torch.")[2]
    return _DTYPES.get(name.lower(), name.lower() if name.isupper() else name)


def _name_in_commits(dtype: Any) -> str:
    """Name of a NumPy dtype in commits."""
    if dtype.names is not None:
        return f"{NUMPY_PREFIX}|V{dtype.itemsize}"
    return str(dtype.name) if dtype.name in DTYPE_BYTES and dtype.isnative else f"{NUMPY_PREFIX}{dtype.str}"


_SHAPE = re.compile(r"\(?\[?\s*(.*?)\s*,?\s*\]?\)?\Z", re.DOTALL)
_SIZE = re.compile(r"[0-9]{1,19}\Z")
_ANY = MappingProxyType({"*": None, "?": None, "...": ...})


def parse_shape(given: Any) -> tuple[int | None | EllipsisType, ...]:
    """Sizes of dimensions: text such as "4096,*", "[8, 16]" or "...,64", or a sequence of them.

    Raises:
        InvalidInputError: another form.
    """
    wanted = "give sizes such as 4096,4096; * is any size, ... any number of dimensions"
    parts: Any = given
    if isinstance(given, str):
        match = _SHAPE.match(given.strip())
        inside = match[1] if match else given
        parts = [_ANY.get(part.strip(), part.strip()) for part in inside.split(",")] if inside else []
        parts = [int(part) if isinstance(part, str) and _SIZE.match(part) else part for part in parts]
    if not isinstance(parts, (list, tuple)) or sum(part is ... for part in parts) > 1:
        raise InvalidInputError(f"shape is {shown_value(given)}: {wanted}")
    for part in parts:
        if part is not None and part is not ... and not (type(part) is int and part >= 0):
            raise InvalidInputError(f"shape is {shown_value(given)}: {wanted}")
    return tuple(parts)
