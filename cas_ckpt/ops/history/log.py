"""log: the commits that some refs lead to, children first; those that changed an entry; and metrics, ranked.

Invariant: heads come from the store, which alone knows them; the history behind them comes from the index, which is
brought up to date when it does not know a head or a parent. Ranked is what some ref leads to and still has its
data; equal values by age.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from blake3 import blake3

from cas_ckpt.core.backfill import complete_index
from cas_ckpt.core.config import require_there
from cas_ckpt.core.forgotten import forgotten_view
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import graph_with
from cas_ckpt.core.records import CommitInfo, commit_of, info_from_row, log_rows
from cas_ckpt.core.refs import RefKind, check_name
from cas_ckpt.core.revisions import HEAD_NAMES, Revision, current_branch, nearly, resolve
from cas_ckpt.core.tree import paged_entries
from cas_ckpt.errors import InvalidInputError, NoRepositoryError, NotFoundError
from cas_ckpt.index import contents, history, restores
from cas_ckpt.index.history import CommitFilter
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.objects.digest import Digest, ObjectKind, pack_canonical
from cas_ckpt.objects.limits import check_entries
from cas_ckpt.objects.nodes import ContainerEntry, Entry, TensorEntry, TreeNode, decode_tree
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.state import CONTAINER_KINDS, render_name


def log_commits(
    handle: RepositoryHandle,
    revisions: Sequence[Revision] = (),
    *,
    limit: int | None = None,
    all_refs: bool = False,
    first_parent: bool = False,
    wanted: CommitFilter | None = None,
    keys: str | Sequence[str] | None = None,
) -> Iterator[CommitInfo]:
    """The commits that `revisions` lead to, a commit before its parents, the youngest first.

    Args:
        revisions: Where to begin; none of them means HEAD, if it has commits yet.
        limit: At most so many commits, of those that are wanted.
        all_refs: Begin at every branch, tag and pin too.
        first_parent: Follow only the first parent of merges.
        wanted: Leave out the others.
        keys: Only commits that changed an entry that matches, compared with their first parent.
    Raises:
        NotFoundError: a revision that is not there, or a metric that no commit has.
    """
    starts = start_of_log(handle, revisions, all_refs=all_refs)
    if wanted is not None and (wanted.axes or wanted.world_size is not None):
        complete_index(handle)  # an index of an older schema has no rows of layouts yet
    most = None if keys else limit
    rows = log_rows(handle, starts, limit=most, first_parent=first_parent, wanted=wanted)
    if wanted is not None and wanted.metrics:
        first = list(islice(rows, 1))
        for bound in () if first else wanted.metrics:  # an empty answer is one only if the metrics are known
            require_metric(handle, bound.name)
        rows = chain(first, rows)
    forgotten = forgotten_view(handle)
    if keys:
        rows = islice(KeyHistory(handle, keys, forgotten=forgotten).changed(rows), limit)
    return _told(handle, rows, forgotten)


_COMMITS_PER_READ = 500


def _told(handle: RepositoryHandle, rows: Iterator[CommitRow], forgotten: Collection[Digest]) -> Iterator[CommitInfo]:
    """The commits, and what others than their records say of them: one question for some hundreds."""
    while batch := list(islice(rows, _COMMITS_PER_READ)):
        restored = handle.index.read(restores.proven, [row.root for row in batch])
        for row in batch:
            yield info_from_row(row, forgotten=row.digest in forgotten, restored_us=restored.get(row.root))


def require_metric(handle: RepositoryHandle, name: str) -> None:
    """Raise NotFoundError, with the names that there are, if no commit has a metric `name`."""
    known = handle.index.read(history.metric_names)
    if name not in known:
        raise NotFoundError(f"no commit has a metric {name!r}: there are {', '.join(known) or 'none'}")


def latest_of(handle: RepositoryHandle, branch: str | None) -> CommitInfo | None:
    """The commit that a branch names, None: HEAD; nothing if it has none."""
    wanted = current_branch(handle) if branch is None else branch
    ref = check_name(wanted)
    named = {each.name: each.target for each in handle.refs.list(RefKind.BRANCH)}
    if not named:
        require_there(handle.store)
    meant = None if ref in named else nearly(ref, named)
    if meant is not None:
        raise InvalidInputError(f"there is no branch {ref!r}: did you mean {meant!r}?")
    target = named.get(ref)
    return None if target is None else info_from_row(commit_of(handle, target))


def start_of_log(handle: RepositoryHandle, revisions: Sequence[Revision], *, all_refs: bool = False) -> list[Digest]:
    """The commits that a log of these revisions begins at; without any, HEAD, if it has commits yet."""
    starts = [resolve(handle, revision) for revision in revisions]
    if all_refs:
        named = [ref.target for ref in handle.refs.list() if ref.target is not None]
        if not named:
            require_there(handle.store)
        return starts + named
    if revisions:
        return starts
    try:
        return [resolve(handle, HEAD_NAMES[0])]
    except NoRepositoryError:
        raise
    except NotFoundError:
        return []


# --- metrics ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ranked:
    """A commit and the metric that it was ranked by."""

    commit: CommitInfo
    value: float


def metrics_table(
    handle: RepositoryHandle,
    revisions: Sequence[Revision] = (),
    *,
    names: Sequence[str] = (),
    all_refs: bool = False,
    limit: int | None = None,
) -> list[CommitInfo]:
    """The commits of the log that have metrics (one of `names`, if given), the youngest first.

    Raises:
        NotFoundError: no such revision; no commit at all has one of `names`.
    """
    found: list[CommitInfo] = []
    for commit in log_commits(handle, revisions, all_refs=all_refs):
        if limit is not None and len(found) >= limit:
            break
        if any(name in commit.metrics for name in names) if names else commit.metrics:
            found.append(commit)
    for name in names:
        if not found:
            require_metric(handle, name)
    return found


def best_commits(
    handle: RepositoryHandle, metric: str, *, largest: bool = False, limit: int = 1, revisions: Sequence[Revision] = ()
) -> list[Ranked]:
    """Up to `limit` commits, the best by `metric` first; forgotten ones do not count.

    Args:
        largest: The largest value is best, not the smallest.
        revisions: Only commits that these lead to; none of them means all branches, tags and pins.
    Raises:
        NotFoundError: no such revision, or no commit has this metric.
    """
    starts: list[Digest] = start_of_log(handle, revisions, all_refs=not revisions)
    among = graph_with(handle, starts).ancestors(starts) - forgotten_view(handle)
    ranked = handle.index.read(history.ranked, metric, largest=largest, among=among, limit=limit)
    if not ranked and limit:
        require_metric(handle, metric)
    return [Ranked(info_from_row(commit_of(handle, Digest(digest))), value) for digest, value in ranked]


# --- commits that changed an entry ------------------------------------------------------------

MOST_REMEMBERED = 100_000
"""Subtrees whose signature is kept: some 30 MB."""

_NOTHING = b""


class KeyHistory:
    """Tells which commits changed what `patterns` name, by tree nodes alone; no chunk is read.

    Two states have equal signatures if and only if the entries that match are the same: keys, specs and content ids. A
    subtree that was looked at once is not entered again, so that work follows what changes from commit to commit.
    """

    def __init__(
        self, handle: RepositoryHandle, patterns: str | Sequence[str], *, forgotten: Collection[Digest] = ()
    ) -> None:
        self._handle = handle
        self._forgotten = forgotten
        self._patterns = KeyPatterns(patterns)
        # What every match of a pattern begins with, with "/" for "." as the two are not told apart.
        self._heads = [re.split(r"[*?]", one, maxsplit=1)[0].replace(".", "/") for one in self._patterns.patterns]
        self._num_entries = 0
        self._nodes: dict[Digest, tuple[TreeNode, Sequence[Entry]]] = {}
        self._num_kept = 0
        self._signatures: OrderedDict[tuple[Digest, str], bytes] = OrderedDict()

    def changed(self, rows: Iterator[CommitRow]) -> Iterator[CommitRow]:
        """Those commits that differ from their first parent in an entry that matches, in order.

        A forgotten commit whose data is gone is left out; what follows it is compared with the
        nearest first parent that is still there.

        Raises:
            NotFoundError, CorruptionError: a node of a commit that was not forgotten.
        """
        for row in rows:
            own = self._signature_of(row)
            if own is None:
                continue
            before, parents = None, row.parents
            while before is None and parents:
                parent = self._handle.index.read(history.read_commit, parents[0])
                if parent is None:
                    break
                before, parents = self._signature_of(parent), parent.parents
            if own != (before or _NOTHING):
                yield row

    def _signature_of(self, row: CommitRow) -> bytes | None:
        """None: the commit was forgotten and its data is gone."""
        root = Digest(row.root)
        if row.digest not in self._forgotten:
            return self.signature(root)
        if not self._handle.index.read(contents.known, [root]):
            return None
        try:
            return self.signature(root)
        except NotFoundError:
            return None

    def signature(self, root: Digest) -> bytes:
        """A digest of the entries of the state `root` that match; empty if none does.

        Raises:
            NotFoundError, CorruptionError: a node is missing or damaged.
        """
        self._num_entries = 0
        return self._container(root, "")

    def _container(self, digest: Digest, key: str) -> bytes:
        known = self._signatures.get((digest, key))
        if known is not None:
            self._signatures.move_to_end((digest, key))
            return known
        found: list[bytes] = []
        node, entries = self._read(digest)
        self._num_entries += len(entries)
        check_entries(self._num_entries, "what matches in the tree of a commit stands")
        itself = node.kind not in CONTAINER_KINDS or not entries
        if itself and key and self._patterns.matches(key):
            found.append(_packed(key, "container", node.kind, node.attrs))
        for entry in entries:
            at = f"{key}/{render_name(entry.name)}" if key else render_name(entry.name)
            signature = self._entry(entry, at)
            if signature:
                found.append(signature)
        made = blake3(b"".join(found)).digest() if found else _NOTHING
        self._signatures[digest, key] = made
        if len(self._signatures) > MOST_REMEMBERED:
            self._signatures.popitem(last=False)
        return made

    def _read(self, digest: Digest) -> tuple[TreeNode, Sequence[Entry]]:
        """A container and its entries; one that is in many places is not read for each of them."""
        found = self._nodes.get(digest)
        if found is None:
            node = decode_tree(self._handle.read_node(ObjectKind.TREE, digest))
            found = paged_entries(self._handle, {digest: node})[digest] if node.height else (node, node.entries)
            self._num_kept += len(found[1])
            if self._num_kept > MOST_REMEMBERED:
                self._nodes.clear()
                self._num_kept = len(found[1])
            self._nodes[digest] = found
        return found

    def _entry(self, entry: Entry, key: str) -> bytes:
        if isinstance(entry, ContainerEntry):
            start = key.replace(".", "/") + "/"
            below = any(start.startswith(head) or head.startswith(start) for head in self._heads)
            return self._container(entry.node, key) if below else _NOTHING
        if not self._patterns.matches(key):
            return _NOTHING
        if isinstance(entry, TensorEntry):
            spec = entry.spec
            return _packed(key, entry.flavor, spec.dtype, list(spec.shape), entry.node or entry.inline)
        return _packed(key, "value", entry.data)


def _packed(*parts: object) -> bytes:
    """The parts as bytes of their own length; keys with lone surrogates too."""
    return blake3(
        pack_canonical([part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in parts])
    ).digest()
