"""diff: what one commit has that another has not, or has otherwise.

    1. resolve both revisions, read both commits
    2. ask the index where both trees differ                       (index/tree_diff.py)
    3. of tensors on both sides, find the changed chunks           (ops/diff/walk.py)
    4. pair what was removed with what was added of equal content: it was moved
    5. if asked: decode values, and stream the changed chunks      (ops/diff/numbers.py)

Invariant: work follows what differs; neither commit is ever loaded whole, unless a pattern of
keys matches no difference: only an entry somewhere shows that it is not a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import info_from_row
from cas_ckpt.core.revisions import Revision, resolve
from cas_ckpt.core.tree import known_commit, naming_forgotten
from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError, UnsupportedValueError, UnsupportedVersionError
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.memory import python_gc_paused
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import open_tree
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.state import KIND_OF_FLAVOR, Path, render_key
from cas_ckpt.objects.values import decode_value
from cas_ckpt.ops.checkout.checkout import read_array
from cas_ckpt.ops.diff.numbers import tensor_numbers
from cas_ckpt.ops.diff.walk import (
    Change,
    ChunkChange,
    ContainerHead,
    Diff,
    EntryDiff,
    EntrySide,
    Pair,
    Side,
    StoredSide,
    TensorNumbers,
    TensorPair,
    changed_chunks,
    changed_fields,
    differing,
    read_named,
    with_bytes,
)
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.transfer.chunk_reader import named

MOST_BYTES = 64 * 1024
"""Longer values are not read to be shown."""

MOST_CHARACTERS = 200
"""Longer texts are cut."""


@dataclass(frozen=True, slots=True)
class DiffRequest:
    """Options of a diff; without any, keys, sizes and changed chunks are compared.

    Attributes:
        keys: Patterns; only entries that match.
        numbers: Compare the elements of changed tensors.
        values: Decode values and the attributes of containers.
    """

    keys: str | Sequence[str] | None = None
    numbers: bool = False
    values: bool = False


@python_gc_paused()
def diff_commits(
    handle: RepositoryHandle,
    before: Revision,
    after: Revision | None = None,
    request: DiffRequest | None = None,
    *,
    progress: Progress = SILENT,
) -> Diff:
    """The differences from `before` to `after`; with one revision, from its first parent to it.

    Raises:
        NotFoundError: no such commit, or its data is gone; a pattern that matches nothing in either.
        CorruptionError: a node or chunk is damaged; names the tensor.
    """
    request = request or DiffRequest()
    old: CommitRow | None = None
    new = known_commit(handle, resolve(handle, before))
    if after is not None:
        old, new = new, known_commit(handle, resolve(handle, after))
    elif new.parents:
        old = known_commit(handle, Digest(new.parents[0]))
    roots = None if old is None else Digest(old.root), Digest(new.root)
    there = [root for root in roots if root is not None]
    patterns = KeyPatterns(request.keys)
    with naming_forgotten(handle, *there):
        pairs = [pair for pair in differing(handle, *roots) if not patterns or patterns.matches(render_key(pair.path))]
    if patterns.unused:  # without a difference, that is an answer; without an entry, a mistake
        unused = KeyPatterns(patterns.unused)
        for root in there:
            for pair in differing(handle, None, root):
                unused.matches(render_key(pair.path))
        unused.require_used()
    infos = None if old is None else info_from_row(old), info_from_row(new)
    with naming_forgotten(handle, *there):
        if request.values or request.numbers:
            pairs = with_bytes(handle, pairs)
        entries = _entries(handle, pairs, request, progress)
    return Diff(*infos, changed_fields(*infos), entries)


def _entries(
    handle: RepositoryHandle, pairs: Sequence[Pair], request: DiffRequest, progress: Progress
) -> tuple[EntryDiff, ...]:
    tensors = [tensors for pair in pairs if (tensors := _tensors(pair)) is not None]
    chunks = dict(zip((pair.path for pair in tensors), changed_chunks(handle, tensors), strict=True))
    numbers: dict[Path, TensorNumbers] = {}
    if request.numbers:
        wanted = [pair for pair in tensors if pair.before.spec.shape == pair.after.spec.shape]
        work = [(pair, chunks[pair.path]) for pair in wanted]
        found = tensor_numbers(handle, work, progress=progress)
        numbers = {pair.path: each for pair, each in zip(wanted, found, strict=True)}
    moved = _moved(pairs)
    sources = set(moved.values())
    return tuple(
        _entry(handle, pair, moved.get(pair.path), chunks, numbers, values=request.values)
        for pair in pairs
        if pair.path not in sources
    )


def _tensors(pair: Pair) -> TensorPair | None:
    """Both sides, if they are tensors."""
    old, new = pair.before, pair.after
    if not isinstance(old, StoredSide) or not isinstance(new, StoredSide) or old.is_value or new.is_value:
        return None
    if old.tensor is None or new.tensor is None:
        return None
    same = (old.content, old.num_bytes) == (new.content, new.num_bytes)
    return TensorPair(pair.path, old.tensor, new.tensor, same and (old.place is None) == (new.place is None))


def _moved(pairs: Sequence[Pair]) -> dict[Path, Path]:
    """New path -> old path of tensors whose content was under another key.

    Of several candidates the one whose name ends alike is taken, then the first by key.
    """
    gone: dict[object, list[Path]] = {}
    for pair in pairs:
        if pair.after is None and (content := _content(pair.before)) is not None:
            gone.setdefault(content, []).append(pair.path)
    found = {}
    for pair in pairs:
        candidates = gone.get(_content(pair.after), []) if pair.before is None else []
        if candidates:
            path = pair.path
            source = max(candidates, key=lambda old: _common_end(old, path))
            candidates.remove(source)
            found[path] = source
    return found


def _content(side: Side) -> object:
    """Identity of a tensor's content, whatever its key; None for values, empty tensors and containers."""
    if isinstance(side, StoredSide) and side.tensor is not None and not side.is_value and side.tensor.spec.num_elements:
        return side.tensor.spec, side.tensor.flavor, side.tensor.node, side.content
    return None


def _common_end(a: Path, b: Path) -> int:
    """Characters that two keys have in common at their ends."""
    one, other = render_key(a), render_key(b)
    ends = zip(reversed(one), reversed(other), strict=False)
    return next((at for at, (x, y) in enumerate(ends) if x != y), min(len(one), len(other)))


def _entry(
    handle: RepositoryHandle,
    pair: Pair,
    source: Path | None,
    chunks: Mapping[Path, ChunkChange],
    numbers: Mapping[Path, TensorNumbers],
    *,
    values: bool,
) -> EntryDiff:
    before, after = (_entry_side(handle, pair.path, side, values=values) for side in (pair.before, pair.after))
    key = render_key(pair.path)
    if source is not None:
        return EntryDiff(key, Change.MOVED, after, after, moved_from=render_key(source))
    if before is None or after is None:
        return EntryDiff(key, Change.ADDED if before is None else Change.REMOVED, before, after)
    differs = tuple(_differs(pair, before, after, chunks.get(pair.path)))
    return EntryDiff(key, Change.CHANGED, before, after, differs, None, chunks.get(pair.path), numbers.get(pair.path))


def _entry_side(handle: RepositoryHandle, path: Path, side: Side, *, values: bool) -> EntrySide | None:
    if side is None:
        return None
    if isinstance(side, ContainerHead):
        return EntrySide(side.kind, text=attrs_text(handle, path, side) if values else None)
    if side.tensor is not None and not side.is_value:
        spec = side.tensor.spec
        return EntrySide(KIND_OF_FLAVOR[side.tensor.flavor], spec.dtype, spec.shape, side.num_bytes)
    return EntrySide("value", None, None, side.num_bytes, value_text(handle, path, side) if values else None)


def _differs(pair: Pair, before: EntrySide, after: EntrySide, chunks: ChunkChange | None) -> Iterator[str]:
    if before.kind != after.kind:
        yield "kind"
    if isinstance(pair.before, ContainerHead) and isinstance(pair.after, ContainerHead):
        if pair.before.attrs != pair.after.attrs:
            yield "attrs"
    elif chunks is not None:
        if before.dtype != after.dtype:
            yield "dtype"
        if before.shape != after.shape:
            yield "shape"
        if chunks.num_bytes:
            yield "data"
    elif before.kind == after.kind == "value":
        yield "value"


# --- values as people are shown them: decoded without running anything, cut where they are long ---


def attrs_text(handle: RepositoryHandle, path: Path, head: ContainerHead) -> str | None:
    """The attributes of a container as Python shows them; None if it has none.

    Raises:
        CorruptionError, NotFoundError: names the key.
    """
    if head.attrs is None:
        return None
    attrs = open_tree(read_named(handle, ObjectKind.TREE, {head.node: path})[head.node]).attrs
    return None if attrs is None else text_of(attrs, render_key(path))


def value_text(handle: RepositoryHandle, path: Path, value: StoredSide) -> str | None:
    """The value as Python shows it; None if it is too long to be read for that.

    Raises:
        CorruptionError, NotFoundError: names the key.
    """
    key = render_key(path)
    if value.tensor is None:
        return None if value.data is None else text_of(value.data, key)
    if value.num_bytes > MOST_BYTES:
        return None
    try:
        data = read_array(handle, value.tensor, value.tensor.spec.box).tobytes()
    except (CorruptionError, NotFoundError) as error:
        raise named(error, key) from error
    return text_of(data, key)


def text_of(data: bytes, key: str) -> str:
    """The encoded value as Python shows it.

    Raises:
        CorruptionError: the bytes are not a value.
    """
    try:
        text = repr(decode_value(data, key=key))
    except UnsupportedValueError:
        return "(pickled)"
    except UnsupportedVersionError:
        return "(of a newer version)"
    except CkptError:
        raise
    except ValueError:  # an integer of more digits than Python writes out
        return f"({len(data)} bytes that Python does not show)"
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."
