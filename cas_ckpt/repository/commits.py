"""What commits hold, how they follow one another, what they measured, and how they are restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from os import PathLike
from typing import TYPE_CHECKING, Any

from cas_ckpt.arguments import DtypePattern, Keys, ShapePattern, check_flags, check_limit, check_whole, one_text, texts
from cas_ckpt.errors import InvalidInputError, shown_value
from cas_ckpt.events import reported
from cas_ckpt.progress import Progress, shown
from cas_ckpt.repository.opened import Opened

if TYPE_CHECKING:
    from cas_ckpt.core.records import CommitInfo
    from cas_ckpt.core.revisions import Revision
    from cas_ckpt.core.units import Moment
    from cas_ckpt.index.rows import ListedEntry
    from cas_ckpt.layout.target_layout import TargetLayout
    from cas_ckpt.ops.checkout.restores import PlanReport, RestoreInfo
    from cas_ckpt.ops.diff.walk import Diff
    from cas_ckpt.ops.history.find import FoundEntry
    from cas_ckpt.ops.history.lineage import CommitLineage, NearCommit
    from cas_ckpt.ops.history.log import Ranked, ShownCommit
    from cas_ckpt.ops.history.shards import ShardRow
    from cas_ckpt.ops.history.sql import SqlResult


class CommitVerbs(Opened):
    """Contents of commits, their history, questions in SQL, and plans of restores."""

    @reported
    def show(self, ref: Revision = "HEAD") -> ShownCommit:
        """The commit, what names it, and a summary of its state."""
        from cas_ckpt.ops.history.log import show_commit

        return show_commit(self._handle, ref)

    @reported
    def ls(self, ref: Revision = "HEAD", keys: Keys = None) -> list[ListedEntry]:
        """The entries of the commit: key, kind, dtype, shape, bytes.

        Raises:
            NotFoundError: no entry matches a pattern.
        """
        from cas_ckpt.ops.history.find import list_commit

        return list_commit(self._handle, ref, keys=keys)

    @reported
    def entry(self, ref: Revision, key: str) -> ListedEntry:
        """The entry of one key; a container has the bytes of all tensors below it.

        Raises:
            NotFoundError: no such key.
        """
        from cas_ckpt.ops.history.find import list_one

        return list_one(self._handle, ref, one_text("key", key))

    def shards(self, ref: Revision = "HEAD", keys: Keys = None, *, rank: int | None = None) -> Iterator[ShardRow]:
        """Which ranks held which region of the entries of the commit, how many bytes, and who shared chunks.

        Rows come entry by entry, as they are asked for: a thousand ranks may have millions.

        Args:
            keys: Only entries that match.
            rank: Only what this rank held; `ShardRow.replica` says which replica that is.
        Raises:
            CorruptionError: the layout does not fit the entry. TooLargeError: more regions of one entry than
            `cas_ckpt.limits` allow.
            NotFoundError: no entry matches a pattern; or, while rows come, the commit does not say who held an entry.
            InvalidInputError: the commit is not by so many ranks.
        """
        from cas_ckpt.ops.history.shards import shards_of

        number = None if rank is None else check_whole("rank", rank)
        return shards_of(self._handle, ref, keys=keys, rank=number)

    @reported
    def find(
        self,
        keys: Keys = None,
        *,
        dtype: DtypePattern | None = None,
        shape: ShapePattern | None = None,
        min_bytes: int | None = None,
        max_bytes: int | None = None,
        object_id: str | None = None,
        ref: Revision | Sequence[Revision] | None = None,
        at: Revision | Sequence[Revision] | None = None,
        world_size: int | None = None,
        axes: str | Sequence[str] | Mapping[str, int | None] = (),
        limit: int | None = None,
    ) -> list[FoundEntry]:
        """Entries in all of history, each content under a key once, with the first and last commit that has it.

        All conditions must hold. A row is what several commits have under one key, content and all, with the first and
        the last commit that have it (in the order of `log`, from its end) and how many have it; rows come by key in the
        order of names. An entry is what `ls` shows: a sparse tensor is found by its own shape, not by those of its
        parts, and plain values have neither dtype nor shape.

        Args:
            keys: Only entries that match.
            dtype: Only tensors of this dtype: a name as torch, safetensors or commits write it ("bfloat16", "bf16"), a
                dtype of torch or NumPy, or a pattern ("float8_*").
            shape: Only tensors of this shape: (4096, None), "4096,*", "...,64"; None and * are any size, ... any
                number of dimensions.
            min_bytes, max_bytes: Only entries of so many plain bytes, both included.
            object_id: Only what is this chunk or tensor, or holds it: at least four digits of its id.
            ref: Only in commits that this leads to; all that a branch, tag or pin leads to, if not given.
                Forgotten commits are left out.
            at: Only in this commit (or these), and in nothing that it leads to; without other conditions on commits.
            world_size, axes: Only in commits of such a layout, as in `log`.
            limit: At most so many entries, the first by key.
        Raises:
            InvalidInputError: a condition of another form. NotFoundError: no tensor of this dtype, or no such object.
        """
        from cas_ckpt.ops.history.find import find_entries, find_request

        request = find_request(
            keys=keys, dtype=dtype, shape=shape, min_bytes=min_bytes, max_bytes=max_bytes, object_id=object_id,
            ref=ref, at=at, world_size=world_size, axes=axes,
        )  # fmt: skip
        return find_entries(self._handle, request, limit=check_limit(limit))

    @reported
    def find_commits(
        self,
        keys: Keys = None,
        *,
        dtype: DtypePattern | None = None,
        shape: ShapePattern | None = None,
        min_bytes: int | None = None,
        max_bytes: int | None = None,
        object_id: str | None = None,
        ref: Revision | Sequence[Revision] | None = None,
        at: Revision | Sequence[Revision] | None = None,
        world_size: int | None = None,
        axes: str | Sequence[str] | Mapping[str, int | None] = (),
        limit: int | None = None,
    ) -> list[CommitInfo]:
        """The commits that hold an entry of this kind, the youngest first; arguments and errors as for `find`."""
        from cas_ckpt.ops.history.find import find_commits, find_request

        request = find_request(
            keys=keys, dtype=dtype, shape=shape, min_bytes=min_bytes, max_bytes=max_bytes, object_id=object_id,
            ref=ref, at=at, world_size=world_size, axes=axes,
        )  # fmt: skip
        return find_commits(self._handle, request, limit=check_limit(limit))

    @reported
    def diff(
        self,
        a: Revision,
        b: Revision | None = None,
        keys: Keys = None,
        numbers: bool = False,
        *,
        values: bool = False,
        progress: Progress | bool = False,
    ) -> Diff:
        """Differences of the commit `b` from the commit `a`: entries, chunks, messages and metadata.

        Reads only what differs, and no chunk unless `numbers` asks for it.

        Args:
            b: If not given: `a` is compared with its first parent (the first commit of a history
                with nothing: all of it is new).
            keys: Only these; no difference is an answer, a pattern that no entry of either has is an error.
            numbers: Read the changed chunks of tensors of equal shape, and say how many elements
                changed and by how much: `TensorNumbers` says what is measured over what.
            values: Decode what changed of values, and show it (`EntrySide.text`); pickles are never loaded.
        Raises:
            NotFoundError: also if the data of a commit is gone because it was forgotten.
            CorruptionError: names the tensor.
        """
        check_flags(numbers=numbers, values=values)
        from cas_ckpt.ops.diff.diff import DiffRequest, diff_commits

        request = DiffRequest(keys, numbers, values)
        return diff_commits(self._handle, a, b, request, progress=shown(progress))

    @reported
    def log(
        self,
        ref: Revision | Sequence[Revision] | None = None,
        *,
        limit: int | None = None,
        all_refs: bool = False,
        first_parent: bool = False,
        since: Moment | None = None,
        until: Moment | None = None,
        step: int | str | tuple[int | None, int | None] | None = None,
        where: str | Sequence[str] | None = None,
        author: str | None = None,
        keys: Keys = None,
        world_size: int | None = None,
        axes: str | Sequence[str] | Mapping[str, int | None] = (),
        grep: str | Sequence[str] = (),
        reverse: bool = False,
    ) -> list[CommitInfo]:
        """The commits that `ref` (one revision or several) leads to, the youngest first.

        Args:
            ref: HEAD, if not given: the branch that was checked out, else the default branch. As in git, what "^A"
                leads to is left out, and "A..B" is "^A" and "B".
            all_refs: Begin at every branch, tag and pin.
            first_parent: Follow only the first parent of merges.
            since, until: Only commits of that time, both ends included: ISO text (UTC unless it says
                another offset; a day alone is taken whole), how long ago ("2d", "3h"), seconds or a datetime.
            step: Only this step, or first and last: "1000:2000", (1000, None).
            where: Only commits whose metrics meet this comparison, e.g. "loss<2.1", or all of several.
            author: Only by authors whose name has this in it, or matches the pattern.
            keys: Only commits in which an entry that matches is not what it was in their first parent.
            world_size: Only commits that so many ranks made.
            axes: Only commits of states that were divided over a mesh with this dimension, or over meshes with all of
                several: "tp=2", ["tp=2", "ep"], {"tp": 2, "ep": None} (of any size).
            grep: Only commits whose message has a match of this regular expression, or of one of several.
            reverse: The eldest first, of those that `limit` leaves.
        Raises:
            InvalidInputError: a condition of another form. NotFoundError: no commit has such a metric.
        """
        check_flags(all_refs=all_refs, first_parent=first_parent, reverse=reverse)
        from cas_ckpt.core.revisions import revision_texts
        from cas_ckpt.core.units import commit_filter
        from cas_ckpt.ops.history.log import log_commits

        revisions = revision_texts(ref)
        wanted = commit_filter(
            since=since, until=until, step=step, metrics=() if where is None else where, author=author,
            world_size=world_size, axes=axes,
        )  # fmt: skip
        found = log_commits(
            self._handle, revisions, limit=check_limit(limit), all_refs=all_refs, first_parent=first_parent,
            wanted=wanted, keys=keys, grep=texts("grep", grep),
        )  # fmt: skip
        return list(found)[:: -1 if reverse else 1]

    def resolve(self, ref: Revision) -> str:
        """The hexadecimal id of the commit that `ref` names.

        Raises:
            NotFoundError: nothing is called so.
            AmbiguousIdError: several ids begin like this.
        """
        from cas_ckpt.core.revisions import resolve

        return resolve(self._handle, ref).hex()

    def merge_base(self, *refs: Revision) -> list[str]:
        """Ids of the best common ancestors of the first of `refs` with the others; empty if there is none.

        As in git: several, where histories were joined crosswise, and more than two `refs` mean the
        first against a merge of the others.

        Raises:
            InvalidInputError: fewer than two revisions.
        """
        from cas_ckpt.ops.history.lineage import merge_bases

        return [digest.hex() for digest in merge_bases(self._handle, refs)]

    def is_ancestor(self, old: Revision, new: Revision) -> bool:
        """Whether the commit `new` leads to the commit `old`."""
        from cas_ckpt.ops.history.lineage import is_ancestor

        return is_ancestor(self._handle, old, new)

    @reported
    def lineage(self, ref: Revision = "HEAD") -> CommitLineage:
        """Ancestors and descendants of the state over typed edges and history, transitively."""
        from cas_ckpt.ops.history.lineage import lineage_of

        return lineage_of(self._handle, ref)

    @reported
    def holders(self, ref: Revision, key: str) -> list[CommitInfo]:
        """The commits that hold the very content of the entry `key` of `ref`, the youngest first.

        Raises:
            InvalidInputError: the entry is so small that it has no id of its own.
        """
        from cas_ckpt.ops.history.lineage import holders_of

        return holders_of(self._handle, ref, one_text("key", key))

    @reported
    def nearest(self, what: Revision | Mapping[str, Any] | PathLike[str], *, limit: int = 5) -> list[NearCommit]:
        """The commits that share most bytes with something: where the base of a fine-tune is found.

        Args:
            what: A revision (commits of its own history do not count), a state as for `commit`, or the
                path (a `Path`) of a file or folder as for `import_file`. A sample of it is compared, of a
                commit from the index alone, of a state or file it is hashed; nothing is written; of a state, tensors
                that are divided over ranks are left out.
        """
        from cas_ckpt.ops.history.lineage import nearest_to_commit, nearest_to_state

        most = check_whole("limit", limit)
        if isinstance(what, str) or not isinstance(what, (Mapping, PathLike)):
            return nearest_to_commit(self._handle, what, limit=most)
        if isinstance(what, PathLike):
            from cas_ckpt.formats.verbs import file_tree

            return nearest_to_state(self._handle, file_tree(what), limit=most)
        from cas_ckpt.training.capture.capture import capture_state

        return nearest_to_state(self._handle, capture_state(what), limit=most)

    @reported
    def metrics(
        self,
        ref: Revision | Sequence[Revision] | None = None,
        names: str | Sequence[str] = (),
        *,
        all_refs: bool = False,
        limit: int | None = None,
    ) -> list[CommitInfo]:
        """The commits that `ref` leads to and that have metrics, the youngest first.

        Args:
            names: Only commits that have one of these.
        """
        check_flags(all_refs=all_refs)
        from cas_ckpt.core.revisions import revision_texts
        from cas_ckpt.ops.history.log import metrics_table

        revisions, most = revision_texts(ref), check_limit(limit)
        return metrics_table(self._handle, revisions, names=texts("names", names), all_refs=all_refs, limit=most)

    @reported
    def best(
        self, metric: str, *, largest: bool = False, limit: int = 1, ref: Revision | Sequence[Revision] | None = None
    ) -> list[Ranked]:
        """The `limit` best commits by `metric`: the smallest value first, unless `largest`.

        Args:
            ref: Only commits that this leads to; None: all that a branch, tag or pin leads to. Forgotten
                ones do not count.
        Raises:
            NotFoundError: no commit has this metric.
        """
        check_flags(largest=largest)
        from cas_ckpt.core.revisions import revision_texts
        from cas_ckpt.ops.history.log import best_commits

        most, revisions = check_whole("limit", limit), revision_texts(ref)
        return best_commits(self._handle, one_text("metric", metric), largest=largest, limit=most, revisions=revisions)

    @reported
    def sql(
        self, query: str, parameters: Mapping[str, Any] | None = None, /, *, max_rows: int = 1_000_000,
        max_bytes: int = 1 << 28, timeout_s: float = 60.0, **named: Any,
    ) -> SqlResult:  # fmt: skip
        """The answer to one SQL query over the views of the index, which docs/sql.md describes. Read-only.

        The answer is iterated over, counted and indexed as its rows are.

            repo.sql("SELECT key, num_bytes FROM refs JOIN entries USING (commit_no) WHERE name = :ref", ref="main")

        Args:
            query: In the dialect of the database: SQLite, or PostgreSQL where `index_url` says so.
            parameters: Name -> value of every `:name` in it; those of other names than `max_rows` and the like may
                be given by name instead.
            max_rows: Of the answer.
            max_bytes: Of the answer: 8 of each value, and of texts, bytes and long integers their length.
            timeout_s: How long the database may work.
        Raises:
            InvalidInputError: it is not one query, changes something, or names what there is not, in the database's
            words; a parameter that is missing, or not in it.
            TooLargeError: more rows, bytes or time; never fewer rows than there are.
        """
        from cas_ckpt.index.query import QueryLimits
        from cas_ckpt.ops.history.sql import joined_parameters, query_index

        limits = QueryLimits(max_rows, max_bytes, timeout_s)
        return query_index(self._handle, one_text("query", query), joined_parameters(parameters, named), limits)

    @reported
    def plan(
        self,
        ref: Revision,
        target: str | int | TargetLayout,
        *,
        shapes: Mapping[str, Sequence[str]] | None = None,
        storage_bandwidth: float | None = None,
        network_bandwidth: float | None = None,
    ) -> PlanReport:
        """How `ref` would be restored into ranks that need not exist: exact, checked, kept in the index.

        Args:
            target: A mesh such as "dp=96,tp=8" (the last dimension fastest), or a number of ranks
                that shard dimension 0. Not collective.
            shapes: Pattern of keys -> one placement per mesh dimension ("S(0)", "R", "SS(0,8)"),
                where the usual ones are not meant.
            storage_bandwidth, network_bandwidth: Bytes per second and rank, for the estimates; what
                layout/restore_plan.py assumes, if not given.
        Raises:
            MismatchError: the commit cannot fill the target; names key and region.
        """
        from cas_ckpt.layout.target_layout import layout_of
        from cas_ckpt.ops.checkout.restores import plan_checkout

        return plan_checkout(
            self._handle, ref, layout_of(target, shapes), storage_bandwidth=storage_bandwidth,
            network_bandwidth=network_bandwidth,
        )  # fmt: skip

    @reported
    def compare_plans(
        self,
        ref: Revision,
        targets: Sequence[str | int | TargetLayout] | None = None,
        *,
        shapes: Mapping[str, Sequence[str]] | None = None,
        most_ranks: int | None = None,
        storage_bandwidth: float | None = None,
        network_bandwidth: float | None = None,
    ) -> list[PlanReport]:
        """How `ref` would be restored into each of several targets, the one that takes the least time first.

        Which is the best is asked of the index; each target is there once.

        Args:
            targets: As for `plan`, which is done for those that have no plan yet, and kept. None: those that have one.
                Not collective.
            most_ranks: Leave out targets of more ranks: which mesh that fits 384 GPUs restores this commit cheapest?
            shapes, storage_bandwidth, network_bandwidth: See `plan`.
        Raises:
            NotFoundError: nothing is left to compare.
            MismatchError: the commit cannot fill a target; names key and region.
        """
        from cas_ckpt.layout.target_layout import layout_of
        from cas_ckpt.ops.checkout.restores import compare_plans

        if targets is not None and not isinstance(targets, (Sequence, Set)):
            raise InvalidInputError(f"targets is {shown_value(targets)}: give a list of targets")
        layouts = None if targets is None else [layout_of(target, shapes) for target in targets]
        return compare_plans(
            self._handle, ref, layouts, most_ranks=most_ranks, storage_bandwidth=storage_bandwidth,
            network_bandwidth=network_bandwidth,
        )  # fmt: skip

    @reported
    def plans(self, ref: Revision | None = None) -> list[PlanReport]:
        """The plans that the index keeps, for one revision or all."""
        from cas_ckpt.ops.checkout.restores import kept_plans

        return kept_plans(self._handle, ref)

    @reported
    def restores(self, ref: Revision | None = None, *, limit: int | None = None) -> list[RestoreInfo]:
        """The checkouts and loads that were made, well or badly, the last one first; of one revision's state, or all.

        Logged in the index, by rank 0, where that can be written; beside each what a kept plan says of it.
        """
        from cas_ckpt.ops.checkout.restores import list_restores

        return list_restores(self._handle, ref, limit=check_limit(limit))
