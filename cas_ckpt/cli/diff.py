"""diff: how two commits differ, entry by entry or in sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from cas_ckpt.cli.command import Settings, flag, keys_option, verb
from cas_ckpt.cli.log import styled
from cas_ckpt.cli.output import echo_json, escaped, number, plain, subject, table
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.core.records import CommitInfo
    from cas_ckpt.ops.diff.walk import Diff, DiffSums, EntryDiff, EntrySide, TensorNumbers

_SIGNS = {"added": ("+", "green"), "removed": ("-", "red"), "changed": ("~", "yellow"), "moved": (">", "cyan")}

DIFFERENT = 1
"""Exit code of `--exit-code` if there are differences, as in git."""


@verb(
    "diff",
    examples=[
        "cas-ckpt diff main~1 main",
        "cas-ckpt diff v1..main --stat",
        "cas-ckpt diff main --numbers -k 'model/**'",
        "cas-ckpt diff base ft-math 'model/layers.0.*'",
    ],
    also=[15],
)
@click.argument("words", nargs=-1, metavar="[A [B] | A..B] [KEY]...")
@flag("--stat", help="Sums for each top-level name instead of entries.")
@flag("--numbers", help="Read what changed: elements, |delta|, norm, cosine, NaN.")
@keys_option()
@flag("--exit-code", "as_exit_code", help="End with 1 if entries differ, with 0 if not.")
def diff(
    settings: Settings, words: tuple[str, ...], stat: bool, numbers: bool, keys: tuple[str, ...], as_exit_code: bool
) -> int:
    """Show how two commits differ: what B has otherwise than A.

    A..B means the same as A B; a side that is left out (A.. or ..B) is HEAD. One revision alone, by
    default HEAD, is compared with its first parent; then keys are given with -k.

    \b
    + KEY   only B has it            - KEY   only A has it
    ~ KEY   it changed               > KEY   the tensor KEY was moved here

    Only what differs is read: nodes, and with --numbers the chunks that changed. Differences
    (|delta|) are of the whole tensor; relative norm, cosine, NaN and infinity of its changed chunks.
    """  # noqa: D301  # click wants this very character
    before, after, patterns = _asked(words)
    with settings.open() as repo, repo.one_look():
        found = repo.diff(
            before, after, (*patterns, *keys) or None, numbers, values=not stat, progress=settings.show_progress()
        )
    if settings.json:
        echo_json(_as_json(found, stat=stat))
    else:
        lines = _stat(found) if stat else _entries(found, numbers=numbers, colour=settings.colour)
        settings.page(None, [*_heads(found, colour=settings.colour), *lines])
    return DIFFERENT if as_exit_code and found.entries else 0


def _asked(words: tuple[str, ...]) -> tuple[str, str | None, tuple[str, ...]]:
    """The two revisions (or one), and patterns of keys."""
    from cas_ckpt.core.revisions import split_range

    first, *rest = words or ("HEAD",)
    both = split_range(first)
    if both is not None:
        return *both, tuple(rest)
    return first, rest[0] if rest else None, tuple(rest[1:])


def _as_json(found: Diff, *, stat: bool) -> dict[str, Any]:
    whole: dict[str, Any] = plain(found) | {"sums": plain(found.sums), "by_name": plain(found.by_name)}
    return {name: value for name, value in whole.items() if not (stat and name == "entries")}


def _heads(found: Diff, *, colour: bool) -> Iterator[str]:
    yield styled(f"--- {_commit(found.before)}", "red", colour)
    yield styled(f"+++ {_commit(found.after)}", "green", colour)
    for field in found.fields:
        yield f"{escaped(field.name)}: {_change(field.before, field.after)}"
    yield ""


def _commit(commit: CommitInfo | None) -> str:
    return "nothing" if commit is None else f"{commit.short_id} {subject(commit.message)}".rstrip()


def _change(before: Any, after: Any) -> str:
    """Both values, in as many digits, or with their types, as it takes to see that they differ."""

    def plainly(value: Any) -> str:
        if value is None:
            return "nothing"
        return number(value) if isinstance(value, float) else value if isinstance(value, str) else repr(value)

    for shown in (plainly, repr, lambda value: f"{type(value).__name__} {value!r}"):
        first, second = escaped(shown(before)), escaped(shown(after))
        if first != second:
            break
    return f"{first} -> {second}"


def _entries(found: Diff, *, numbers: bool, colour: bool) -> Iterator[str]:
    for entry in found.entries:
        sign, shade = _SIGNS[entry.change.value]
        key = escaped(entry.key) or "(root)"
        yield f"{styled(f'{sign} {key}', shade, colour)}  {_what(entry)}".rstrip()
        if entry.numbers is not None:
            yield f"    {', '.join(_measured(entry.numbers))}"
        elif numbers and "shape" in entry.differs:
            yield "    no numbers: the shapes differ"
    yield _total(found.sums)


def _what(entry: EntryDiff) -> str:
    before, after = entry.before, entry.after
    if entry.moved_from is not None:
        return f"from {escaped(entry.moved_from)}"
    if before is None or after is None:
        side = before or after
        return "" if side is None else ", ".join(filter(None, (_spec(side), _size(side), _text(side))))
    return ", ".join(_differences(entry, before, after))


def _differences(entry: EntryDiff, before: EntrySide, after: EntrySide) -> Iterator[str]:
    if {"kind", "dtype", "shape"} & set(entry.differs):
        same = before.kind == after.kind
        yield f"{_spec(before, kind=not same)} -> {_spec(after, kind=not same)}"
    elif after.is_tensor:
        yield _spec(after, kind=False)
    if "value" in entry.differs or "attrs" in entry.differs:
        first, second = _text(before) or _size(before), _text(after) or _size(after)
        yield f"{first} -> {second}" if first != second else f"{first}, with other bytes"
    if entry.chunks is not None and entry.chunks.num_chunks:
        yield f"{entry.chunks.num_changed} of {entry.chunks.num_chunks} chunks"
    if entry.chunks is not None and entry.chunks.num_bytes:
        yield human_bytes(entry.chunks.num_bytes)


def _spec(side: EntrySide, *, kind: bool = True) -> str:
    spec = f"{side.dtype}[{', '.join(map(str, side.shape or ()))}]" if side.is_tensor else ""
    return " ".join(filter(None, (side.kind if kind or not spec else "", spec)))


def _size(side: EntrySide) -> str:
    return human_bytes(side.num_bytes) if side.is_tensor or side.kind == "value" else ""


def _text(side: EntrySide) -> str:
    return escaped(side.text or "")


def _measured(found: TensorNumbers) -> Iterator[str]:
    yield f"{100 * found.changed_share:.3g} % of elements ({found.changed_elements})"
    if found.max_delta is None or found.mean_delta is None:
        yield "no numbers in this dtype"
        return
    yield f"|delta| max {number(found.max_delta)} mean {number(found.mean_delta)}"
    yield f"relative norm {_maybe(found.relative_norm)}"
    yield f"cosine {_maybe(found.cosine)}"
    if found.nan_before or found.nan_after:
        yield f"NaN {found.nan_before} -> {found.nan_after}"
    if found.inf_before or found.inf_after:
        yield f"infinite {found.inf_before} -> {found.inf_after}"


def _maybe(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.8g}"


def _total(sums: DiffSums) -> str:
    chunks = f"{sums.changed_chunks} of {sums.num_chunks} chunks, " if sums.num_chunks else ""
    parts = [
        f"{sums.added} added ({human_bytes(sums.added_bytes)})" if sums.added else "",
        f"{sums.removed} removed ({human_bytes(sums.removed_bytes)})" if sums.removed else "",
        f"{sums.changed} changed ({chunks}{human_bytes(sums.changed_bytes)})" if sums.changed else "",
        f"{sums.moved} moved" if sums.moved else "",
    ]
    return ", ".join(filter(None, parts)) or "no entry differs"


def _stat(found: Diff) -> list[str]:
    groups = [(escaped(name) or "(root)", sums) for name, sums in found.by_name.items()]
    rows: list[tuple[str, ...]] = [("name", "added", "removed", "changed", "moved", "chunks", "size")]
    for label, sums in (*groups, ("total", found.sums)):
        counts = sums.added, sums.removed, sums.changed, sums.moved
        chunks = f"{sums.changed_chunks}/{sums.num_chunks}"
        size = sums.added_bytes + sums.removed_bytes + sums.changed_bytes
        rows.append((label, *map(str, counts), chunks, human_bytes(size)))
    return table(rows, right=frozenset(range(1, 7)))
