"""Methods on the contents of commits: entries, shards, search, differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from cas_ckpt.arguments import reads_arguments
from cas_ckpt.progress import Progress, shown
from cas_ckpt.repository.given import DtypePattern, Keys, ShapePattern
from cas_ckpt.repository.opened import Opened

if TYPE_CHECKING:
    from cas_ckpt.core.records import CommitInfo
    from cas_ckpt.core.revisions import Revision
    from cas_ckpt.index.rows import ListedEntry
    from cas_ckpt.ops.diff.answer import Diff
    from cas_ckpt.ops.history.find import FoundEntry
    from cas_ckpt.ops.history.log import ShownCommit
    from cas_ckpt.ops.history.shards import ShardRow


@reads_arguments
class ContentVerbs(Opened):
    """Contents of commits: entries, shards, search, differences."""

    def show(self, ref: Revision = "HEAD") -> ShownCommit:
        """The commit, what names it, and a summary of its state."""
        from cas_ckpt.ops.history.log import show_commit

        return show_commit(self._handle, ref)

    def ls(self, ref: Revision = "HEAD", keys: Keys = None) -> list[ListedEntry]:
        """The entries of the commit: key, kind, dtype, shape, bytes."""
        from cas_ckpt.ops.history.find import list_commit

        return list_commit(self._handle, ref, keys=keys)

    def entry(self, ref: Revision, key: str) -> ListedEntry:
        """The entry of one key; a container has the bytes of all tensors below it."""
        from cas_ckpt.ops.history.find import list_one

        return list_one(self._handle, ref, key)

    def shards(self, ref: Revision = "HEAD", keys: Keys = None, *, rank: int | None = None) -> Iterator[ShardRow]:
        """Which ranks held which region of the entries of the commit, how many bytes, and who shared chunks.

        Rows come entry by entry, as they are asked for: a thousand ranks may have millions.

        Args:
            keys: Only entries that match.
            rank: Only what this rank held; `ShardRow.replica` says which replica that is.
        Raises:
            NotFoundError: no entry matches a pattern; or, while rows come, the commit does not say who held an entry.
            InvalidInputError: the commit is not by so many ranks.
        """
        from cas_ckpt.ops.history.shards import shards_of

        return shards_of(self._handle, ref, keys=keys, rank=rank)

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

        Args:
            keys: Only entries that match.
            dtype: Only tensors of this dtype: "bfloat16", "bf16", torch.bfloat16, or a pattern: "float8_*".
            shape: Only tensors of this shape: (4096, None), "4096,*", "...,64"; None and * are any size, ... any
                number of dimensions.
            min_bytes, max_bytes: Only entries of so many plain bytes, both included.
            object_id: Only what is this chunk or tensor, or holds it: at least four digits of its id.
            ref: Only in commits that this leads to; all that a branch, tag or pin leads to, if not given.
                Forgotten commits are left out.
            at: Only in this commit (or these), and in nothing that it leads to.
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
        return find_entries(self._handle, request, limit=limit)

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
        return find_commits(self._handle, request, limit=limit)

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
        from cas_ckpt.ops.diff.diff import DiffRequest, diff_commits

        request = DiffRequest(keys, numbers, values)
        return diff_commits(self._handle, a, b, request, progress=shown(progress))
