"""log and diff: the history as blocks, as lines, or as a graph of text; and how two commits differ.

The graph is in the manner of `git log --graph --oneline`. Every line of descent has a column of it that it keeps; a
column that is free is used again. A row without a mark in that column separates the first commit of a history from one
that does not lead to it.

    *    3c1f (ft) one more       before a commit, the columns that wait for it run into its own
    | *  9a22 (main) two          behind a merge, its further parents get columns
    |/
    *    77be one

Invariant: commits come children before parents, as `Repository.log` gives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from cas_ckpt.cli.command import Settings, flag, given_trust, keys_option, limit_option, trust_option, verb
from cas_ckpt.cli.output import cut, echo_json, escaped, number, plain, shown_metrics, subject, table, utc, verdict_text
from cas_ckpt.core.records import CONTINUED_FROM, LEFT_OUT
from cas_ckpt.objects.digest import SHORT_HEX
from cas_ckpt.ops.history.quick_log import quick_log
from cas_ckpt.progress import human_bytes

if TYPE_CHECKING:
    from cas_ckpt.core.records import CommitInfo
    from cas_ckpt.ops.diff.walk import Diff, DiffSums, EntryDiff, EntrySide, TensorNumbers
    from cas_ckpt.repository import Repository
    from cas_ckpt.signing import SignatureInfo


FORGOTTEN = "[forgotten]"
"""Printed behind a commit whose data nothing keeps."""


@verb(
    "log",
    examples=[
        "cas-ckpt log",
        "cas-ckpt log --oneline --graph --all",
        "cas-ckpt log -n 5 main~10 v1",
        "cas-ckpt log main..ft-math --grep warm-up --reverse",
        "cas-ckpt log --since 2d --metric 'loss<2.1' --metric 'acc>=0.5'",
        "cas-ckpt log --step 1000:2000 --author ann --key 'model/head/**'",
        "cas-ckpt log --world-size 8 --axis tp=2 --axis ep",
    ],
    also=[15],
)
@click.argument("revisions", nargs=-1, metavar="[REVISION]...")
@limit_option("At most N commits.")
@flag("--oneline", help="One line for each commit.")
@flag("--graph", help="Draw the history; one line for each commit.")
@flag("--all", "all_refs", help="Begin at every branch, tag and pin.")
@flag("--first-parent", help="Follow only the first parent of merges.")
@flag("--reverse", help="The eldest first, of those that -n leaves.")
@click.option("--since", metavar="TIME", help="Not older: 2026-11-21, 2026-11-21T14:30, 3h, '2 days ago'.")
@click.option("--until", metavar="TIME", help="Not younger; a day alone is taken whole.")
@click.option("--metric", "where", multiple=True, metavar="TEXT", help="'loss<2.1' (< <= > >= == !=); all hold.")
@click.option("--author", metavar="TEXT", help="A part of the author's name, or a pattern of the whole.")
@click.option("--grep", multiple=True, metavar="REGEX", help="Their message has a match; of one, if repeated.")
@click.option("--step", metavar="N|A:B", help="This step, or a range with both ends in it.")
@click.option("--world-size", type=click.IntRange(min=1), metavar="N", help="Made by N ranks.")
@click.option("--axis", "axes", multiple=True, metavar="NAME[=N]", help="Over a mesh with this dimension; all hold.")
@keys_option("Entries that match were changed.")
@flag("--show-signature", help="Say who signed each commit (see cas-ckpt verify).")
@trust_option("With --show-signature: whose signatures count; may be repeated.")
def log(
    settings: Settings, /, revisions: tuple[str, ...], limit: int | None, oneline: bool, graph: bool, all_refs: bool,
    first_parent: bool, reverse: bool, show_signature: bool, trust: tuple[str, ...], **conditions: Any,
) -> None:  # fmt: skip
    """Show the commits that the revisions lead to, the youngest first.

    Without a revision, those of the default branch. What ^REVISION leads to is left out; A..B is ^A B. Conditions
    leave commits out; -n counts those that are shown. Times are UTC unless they say another offset. An entry counts as
    changed if it is not what it was in the first parent. Forgotten commits, whose data is gone, are marked.
    """
    conditions["keys"] = conditions["keys"] or None
    if reverse and graph:
        raise click.UsageError("--reverse or --graph, not both")
    is_range = any(".." in revision or revision.startswith("^") for revision in revisions)
    limited = is_range or any(conditions.values())
    if not (len(revisions) > 1 or limited or reverse or all_refs or show_signature or settings.index):
        quick = quick_log(settings.place(), *revisions, limit=limit, first_parent=first_parent)
        if quick is not None:
            _show(settings, quick.commits, quick.names, {}, oneline=oneline, graph=graph)
            return
    with settings.open() as repo, repo.one_look():
        commits = repo.log(
            revisions, limit=limit, all_refs=all_refs, first_parent=first_parent, reverse=reverse, **conditions
        )
        names = names_of_commits(repo)
        failures = {} if settings.quiet else repo.push_failures()
        signed: dict[str, SignatureInfo] = {}
        if show_signature:
            from cas_ckpt.signing import Trust

            trusted = given_trust(settings, trust) or Trust()
            signed = {one.id: repo.verify(one.id, trust=trusted).commits[0].signature for one in commits}
        whole = None
        if graph and any(conditions.values()) and not settings.json:
            whole = repo.log(revisions, all_refs=all_refs, first_parent=first_parent)
    for tier, failure in failures.items():
        why = f"the push at {utc(failure.time_s)} UTC failed: {escaped(failure.reason)}"
        click.echo(f"cas-ckpt: commits are not at {escaped(tier)} yet: {why}", err=True)
    if not commits and limit != 0 and not settings.quiet and not settings.json:
        click.echo("no such commits" if limited else "no commits yet", err=True)
    if whole is not None:
        commits = thinned(whole, commits)
    _show(settings, commits, names, signed, oneline=oneline, graph=graph)


def _show(
    settings: Settings, commits: Sequence[CommitInfo], names: Mapping[str, Sequence[str]],
    signed: Mapping[str, SignatureInfo], *, oneline: bool, graph: bool,
) -> None:  # fmt: skip
    if settings.json:
        echo_json([
            plain(commit) | {"refs": list(names.get(commit.id, ()))}
            | ({"signature": plain(signed[commit.id])} if commit.id in signed else {})
            for commit in commits
        ])  # fmt: skip
    else:
        settings.page(None, _lines(settings, commits, names, signed, oneline=oneline, graph=graph))


def _lines(
    settings: Settings, commits: Sequence[CommitInfo], names: Mapping[str, Sequence[str]],
    signed: Mapping[str, SignatureInfo], *, oneline: bool, graph: bool,
) -> Iterator[str]:  # fmt: skip
    if graph:
        return render_log(commits, names, width=settings.width, colour=settings.colour)
    if oneline:
        return (
            line_of(commit, names.get(commit.id, ()), width=settings.width, colour=settings.colour)
            for commit in commits
        )
    return (  # an empty line between two commits
        "\n".join(
            [
                *([""] if at else []),
                *describe(commit, names.get(commit.id, ()), colour=settings.colour, signature=signed.get(commit.id)),
            ]
        )
        for at, commit in enumerate(commits)
    )


def names_of_commits(repo: Repository) -> dict[str, list[str]]:
    """Id of a commit -> names of its branches, tags ("tag: v1"), pins ("pin: paper") and branches of remotes."""
    names: dict[str, list[str]] = {}
    for name, digest in repo.branches().items():
        names.setdefault(digest, []).append(name)
    for name, digest in repo.tags().items():
        names.setdefault(digest, []).append(f"tag: {name}")
    for pin in repo.pins():
        names.setdefault(pin.commit, []).append(f"pin: {pin.name}")
    for name, digest in repo.remote_branches().items():
        names.setdefault(digest, []).append(name)
    for tier, waiting in repo.unpushed().items():
        for digest in waiting:
            names.setdefault(digest, []).append(f"not at {tier} yet")
    return names


def styled(text: str, colour: str, wanted: bool) -> str:
    """`text`, coloured if that is wanted."""
    return click.style(text, fg=colour) if wanted and text else text


def describe(
    commit: CommitInfo, names: Sequence[str], *, colour: bool = False, signature: SignatureInfo | None = None
) -> list[str]:
    """The lines that show a commit, as `git log` does. Plain list work: a log has thousands."""
    decoration = f" ({', '.join(map(escaped, names))})" if names else ""
    lines = [styled(f"commit {commit.id}", "yellow", colour) + styled(decoration, "green", colour)]
    if commit.forgotten:
        lines[0] += styled(f" {FORGOTTEN}", "red", colour)
    if len(commit.parents) > 1:
        lines.append(f"Merge:   {' '.join(parent[:SHORT_HEX] for parent in commit.parents)}")
    if signature is not None:
        lines.append(f"Signed:  {verdict_text(signature)}")
    lines.append(f"Author:  {escaped(commit.author)}")
    lines.append(f"Date:    {commit.time:%Y-%m-%d %H:%M:%S} UTC")
    if commit.step is not None:
        lines.append(f"Step:    {commit.step}")
    if commit.metrics:
        lines.append(f"Metrics: {shown_metrics(commit.metrics, ', ')}")
    for each in commit.lineage:
        meta = "" if each.meta is None else f" {escaped(repr(each.meta))}"
        lines.append(f"Lineage: {each.kind} {each.target[:SHORT_HEX]}{meta}")
    left_out = commit.meta.get(LEFT_OUT) if isinstance(commit.meta, dict) else None
    if isinstance(left_out, dict):
        lines.append(f"Left out: {escaped(', '.join(map(str, left_out)))}")
    lines.append(f"Size:    {human_bytes(commit.stats.total_bytes)}, {human_bytes(commit.stats.new_bytes)} new")
    if commit.restored_s is not None:
        lines.append(f"Restored: {utc(commit.restored_s)} UTC")
    if commit.message:
        lines.append("")
        lines += [f"    {escaped(line)}".rstrip() for line in commit.message.rstrip().split("\n")]
    return lines


# --- the graph ------------------------------------------------------------------------------


def render_log(
    commits: Iterable[CommitInfo],
    refs: Mapping[str, Sequence[str]] | None = None,
    *,
    width: int | None = None,
    colour: bool = False,
) -> Iterator[str]:
    """The lines of the graph.

    Args:
        refs: Id of a commit -> names of the refs that point at it.
        width: Characters that a line may have; None: as many as it needs.
    """
    names = refs or {}
    lanes: list[str | None] = []
    ended: int | None = None
    for commit in commits:
        waiting = [at for at, lane in enumerate(lanes) if lane == commit.id]
        for further in reversed(waiting[1:]):  # every further column that waits for it runs into the leftmost one
            lanes[further] = None
            yield from _edges(lanes, further, waiting[0])
        _trim(lanes)
        column = _column_of(lanes, commit.id)
        if column == ended and lanes[column] is None:
            yield _row(lanes)
        lanes[column] = commit.id
        row = _row(lanes, column)
        left = None if width is None else width - len(row) - 1
        yield f"{row} {line_of(commit, names.get(commit.id, ()), width=left, colour=colour)}"
        lanes[column] = commit.parents[0] if commit.parents else None  # the others get columns of their own
        for parent in commit.parents[1:]:
            known = parent in lanes
            target = _column_of(lanes, parent)
            yield from _edges(lanes, column, target)
            if not known:
                lanes[target] = parent
        _trim(lanes)
        ended = None if commit.parents else column


def thinned(whole: Sequence[CommitInfo], chosen: Sequence[CommitInfo]) -> list[CommitInfo]:
    """`chosen` with the nearest chosen ones in place of parents that were left out, so that lines meet.

    Args:
        whole: The log that `chosen` was chosen from, children before parents.
    """
    kept = {commit.id for commit in chosen}
    nearest: dict[str, tuple[str, ...]] = {}

    def ends(parents: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(end for parent in parents for end in nearest.get(parent, ())))

    for commit in reversed(whole):
        nearest[commit.id] = (commit.id,) if commit.id in kept else ends(commit.parents)
    return [replace(commit, parents=ends(commit.parents)) for commit in chosen]


def line_of(commit: CommitInfo, names: Sequence[str], *, width: int | None = None, colour: bool = False) -> str:
    """One commit in one line: id, names, step, message, metrics; cut at `width` characters."""
    parts = [(commit.short_id, "yellow")]
    if names:
        parts.append((f"({', '.join(map(escaped, names))})", "green"))
    behind = [edge.target[:SHORT_HEX] for edge in commit.lineage if edge.kind == CONTINUED_FROM]
    if behind:
        parts.append((f"(state from {', '.join(behind)})", "red"))
    if commit.step is not None:
        parts.append((f"[{commit.step}]", ""))
    if commit.message:
        parts.append((subject(commit.message), ""))
    if commit.metrics:
        parts.append((shown_metrics(commit.metrics, " "), ""))
    if commit.forgotten:
        parts.append((FORGOTTEN, "red"))
    shown, left = [], width
    for text, shade in parts:
        if left is not None:
            text = cut(text, left)
            left -= len(text) + 1
        shown.append(styled(text, shade, colour and bool(shade)))
        if left is not None and left <= 0:
            break  # as many as have room
    return " ".join(shown)


def _column_of(lanes: list[str | None], commit: str | None) -> int:
    """The leftmost column that waits for `commit`, else the first free one, else a new one."""
    for wanted in (commit, None):
        if wanted in lanes:
            return lanes.index(wanted)
    lanes.append(None)
    return len(lanes) - 1


def _edges(lanes: Sequence[str | None], start: int, end: int) -> Iterator[str]:
    """A line that runs from one column to another, a column per row."""
    step, mark = (1, "\\") if start < end else (-1, "/")
    for at in range(start, end, step):
        yield _row(lanes, edge=(2 * at + step, mark))


def _row(lanes: Sequence[str | None], column: int | None = None, edge: tuple[int, str] | None = None) -> str:
    row = [" "] * (2 * len(lanes))
    for at, lane in enumerate(lanes):
        row[2 * at] = "*" if at == column else " " if lane is None else "|"
    if edge is not None:
        row[edge[0]] = edge[1]
    return "".join(row).rstrip() if column is None else "".join(row).rstrip().ljust(2 * len(lanes) - 1)


def _trim(lanes: list[str | None]) -> None:
    while lanes and lanes[-1] is None:
        lanes.pop()


# --- diff: entry by entry or in sums ------------------------------------------------------------

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
    from cas_ckpt.core.revisions import split_range

    first, *rest = words or ("HEAD",)
    before, after = split_range(first) or (first, rest.pop(0) if rest else None)
    with settings.open() as repo, repo.one_look():
        found = repo.diff(
            before, after, (*rest, *keys) or None, numbers, values=not stat, progress=settings.show_progress()
        )
    if settings.json:
        whole: dict[str, Any] = plain(found) | {"sums": plain(found.sums), "by_name": plain(found.by_name)}
        echo_json({name: value for name, value in whole.items() if not (stat and name == "entries")})
    else:
        heads = [
            styled(f"--- {_commit(found.before)}", "red", settings.colour),
            styled(f"+++ {_commit(found.after)}", "green", settings.colour),
            *(f"{escaped(field.name)}: {_change(field.before, field.after)}" for field in found.fields),
        ]
        lines = _stat(found) if stat else _entries(found, numbers=numbers, colour=settings.colour)
        settings.page(None, [*heads, "", *lines])
    return DIFFERENT if as_exit_code and found.entries else 0


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
