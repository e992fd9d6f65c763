"""What can be asked of two commits: how they differ.

Invariant: as in browsing.py: nothing is decided here, and nothing here needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cas_ckpt.arguments import reads_arguments
from cas_ckpt.browsing import Keys
from cas_ckpt.progress import Progress, shown
from cas_ckpt.repository import RepositoryHandle

if TYPE_CHECKING:
    from cas_ckpt.ops.diff_answer import Diff
    from cas_ckpt.ops.resolve import Revision


@reads_arguments
class Comparing:
    """The part of `Repository` that compares commits; see there."""

    _handle: RepositoryHandle

    def diff(
        self,
        a: Revision,
        b: Revision | None = None,
        keys: Keys = None,
        numbers: bool = False,
        *,
        values: bool = False,
        num_threads: int | None = None,
        progress: Progress | bool = False,
    ) -> Diff:
        """What the commit `b` has otherwise than the commit `a`: entries, chunks, what they say of themselves.

        Reads only what differs, and no chunk unless `numbers` asks for it.

        Args:
            b: If not given: `a` is compared with its first parent (the first commit of a history
                with nothing: all of it is new).
            keys: Only these; no difference is an answer, a pattern that no entry of either has is an error.
            numbers: Read the changed chunks of tensors of equal shape, and say how many elements
                changed and by how much: `TensorNumbers` says what is measured over what.
            values: Decode what changed of values, and show it (`EntrySide.text`); pickles are never loaded.
            num_threads: For `numbers`.
        Raises:
            NotFoundError: also if the data of a commit is gone because it was forgotten.
            CorruptionError: names the tensor.
        """
        from cas_ckpt.ops.diff import DiffRequest, diff_commits

        request = DiffRequest(keys, numbers, values, num_threads)
        return diff_commits(self._handle, a, b, request, progress=shown(progress))
