"""How commits follow one another, what they measured, and questions in SQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from cas_ckpt.arguments import reads_arguments
from cas_ckpt.repository.given import Keys, texts
from cas_ckpt.repository.opened import Opened

if TYPE_CHECKING:
    from cas_ckpt.core.records import CommitInfo
    from cas_ckpt.core.revisions import Revision
    from cas_ckpt.core.units import Moment
    from cas_ckpt.ops.history.lineage import CommitLineage, NearCommit
    from cas_ckpt.ops.history.log import Ranked
    from cas_ckpt.ops.history.sql import SqlResult


@reads_arguments
class HistoryVerbs(Opened):
    """How commits follow one another, what they measured, and questions in SQL."""

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
        from cas_ckpt.core.revisions import revision_texts
        from cas_ckpt.core.units import commit_filter
        from cas_ckpt.ops.history.log import log_commits

        revisions = revision_texts(ref)
        wanted = commit_filter(
            since=since, until=until, step=step, metrics=where or (), author=author, world_size=world_size, axes=axes
        )
        found = log_commits(
            self._handle, revisions, limit=limit, all_refs=all_refs, first_parent=first_parent, wanted=wanted,
            keys=keys, grep=texts(grep),
        )  # fmt: skip
        return list(found)[:: -1 if reverse else 1]

    def resolve(self, ref: Revision) -> str:
        """The hexadecimal id of the commit that `ref` names.

        Raises:
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

    def lineage(self, ref: Revision = "HEAD") -> CommitLineage:
        """Ancestors and descendants of the state over typed edges and history, transitively."""
        from cas_ckpt.ops.history.lineage import lineage_of

        return lineage_of(self._handle, ref)

    def holders(self, ref: Revision, key: str) -> list[CommitInfo]:
        """The commits that hold the very content of the entry `key` of `ref`, the youngest first.

        Raises:
            InvalidInputError: the entry is so small that it has no id of its own.
        """
        from cas_ckpt.ops.history.lineage import holders_of

        return holders_of(self._handle, ref, key)

    def nearest(self, what: Revision | Mapping[str, Any] | PathLike[str], *, limit: int = 5) -> list[NearCommit]:
        """The commits that share most bytes with something: where the base of a fine-tune is found.

        Args:
            what: A revision (commits of its own history do not count), a state as for `commit`, or the
                path (a `Path`) of a file or folder as for `import_file`. A sample of it is compared, nothing is
                written; of a state, tensors that are divided over ranks are left out.
        """
        from cas_ckpt.ops.history.lineage import nearest_to_commit, nearest_to_state

        if isinstance(what, str) or not isinstance(what, (Mapping, PathLike)):
            return nearest_to_commit(self._handle, what, limit=limit)
        if isinstance(what, PathLike):
            from cas_ckpt.formats.verbs import file_tree

            return nearest_to_state(self._handle, file_tree(what), limit=limit)
        from cas_ckpt.training.capture.capture import capture_state

        return nearest_to_state(self._handle, capture_state(what), limit=limit)

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
        from cas_ckpt.core.revisions import revision_texts
        from cas_ckpt.ops.history.log import metrics_table

        wanted = (names,) if isinstance(names, str) else tuple(names)
        return metrics_table(self._handle, revision_texts(ref), names=wanted, all_refs=all_refs, limit=limit)

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
        from cas_ckpt.core.revisions import revision_texts
        from cas_ckpt.ops.history.log import best_commits

        return best_commits(self._handle, metric, largest=largest, limit=limit, revisions=revision_texts(ref))

    def sql(
        self, query: str, parameters: Mapping[str, Any] | None = None, /, *, max_rows: int = 1_000_000,
        max_bytes: int = 1 << 28, timeout_s: float = 60.0, **named: Any,
    ) -> SqlResult:  # fmt: skip
        """The answer to one SQL query over the views of the index, which docs/sql.md describes. Read-only.

        repo.sql("SELECT key, num_bytes FROM refs JOIN entries USING (commit_no) WHERE name = :ref", ref="main")

        Args:
            query: In the dialect of the database: SQLite, or PostgreSQL where `index_url` says so.
            parameters: Name -> value of every `:name` in it; those of other names than `max_rows` and the like may
                be given by name instead.
            max_rows, max_bytes: Of the answer; of values their length, 8 bytes of a number.
            timeout_s: How long the database may work.
        Raises:
            InvalidInputError: it is not one query, changes something, or names what there is not; the database's words.
            TooLargeError: more rows, bytes or time; never fewer rows than there are.
        """
        from cas_ckpt.index.query import QueryLimits
        from cas_ckpt.ops.history.sql import joined_parameters, query_index

        limits = QueryLimits(max_rows, max_bytes, timeout_s)
        return query_index(self._handle, query, joined_parameters(parameters, named), limits)
