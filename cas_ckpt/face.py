"""`Repository`: the one class that people use; every method is one verb.

Invariant: nothing is decided here; a method hands its arguments to a function of ops/ (what
needs no torch) or training/ (what does), which it imports when it is called.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

from cas_ckpt.arguments import reads_arguments
from cas_ckpt.browsing import Browsing, Keys
from cas_ckpt.checking import Checking
from cas_ckpt.collecting import Collecting
from cas_ckpt.comparing import Comparing
from cas_ckpt.errors import InvalidInputError
from cas_ckpt.group import AUTO, TIMEOUT_S, Ranks
from cas_ckpt.keeping import Keeping
from cas_ckpt.lineage import Tracing
from cas_ckpt.ops.together import together
from cas_ckpt.progress import Progress, shown
from cas_ckpt.repository import RepositoryHandle

if TYPE_CHECKING:
    from cas_ckpt.ops.exporting import ExportInfo
    from cas_ckpt.ops.frozen import FrozenMemory
    from cas_ckpt.ops.read import Region
    from cas_ckpt.ops.records import CommitInfo, ImportInfo, Lineage
    from cas_ckpt.ops.resolve import Revision
    from cas_ckpt.training.verbs import CheckoutReport


@reads_arguments
class Repository(Browsing, Tracing, Comparing, Keeping, Collecting, Checking):
    """An open repository.

    A revision is what people write for a commit: a branch or tag, at least four digits of an
    id, `HEAD` (what was checked out; of a fresh object the default branch), `step:3000`, with
    `~N` (N first parents back) or `^N` (N-th parent) behind it; a `CommitInfo` will do as well.
    Every method raises only `CkptError`s; in general `NotFoundError` for revisions and keys that
    are not there, `CorruptionError` for stored bytes that are not what was written,
    `StorageError` when the medium refuses. The methods below name what comes on top.

    An object follows one live state: `head` says where it came from, and `commit` goes on from there. Open
    another one for another state.

    `progress=True`: bytes, rate and time left, as a bar on a terminal, else as lines in the log `cas_ckpt` (INFO)
    or, where no log takes them, on standard error; or an object of your own with the methods of `Progress`.

    Threads may share an object; commits made through one object run one after another.
    Use it as a context manager, or call `close`.
    """

    def __init__(
        self, handle: RepositoryHandle, *, group: Any = AUTO, timeout_s: float = TIMEOUT_S, ranks: Ranks | None = None
    ) -> None:
        """Take over `handle`, and `ranks` if the group is made already."""
        self._handle = handle
        self._ranks = ranks or Ranks(group, timeout_s)
        self._frozen: FrozenMemory | None = None
        self._committing = threading.Lock()

    @classmethod
    def init(
        cls,
        url: str | PathLike[str],
        *,
        default_branch: str = "main",
        encoding: str | None = None,
        pack_bytes: int | None = None,
        group: Any = AUTO,
        timeout_s: float = TIMEOUT_S,
    ) -> Repository:
        """A new repository at `url`, opened. In a distributed job all ranks call it together.

        Args:
            url: A path, `file:///path` or `memory://name`. A folder must be empty, or not there yet.
            default_branch: The branch that commits go to unless they say otherwise.
            encoding: How new chunks are stored ("raw", "zstd", ...); ids do not depend on it.
            pack_bytes: Length at which a data pack is closed.
            group, timeout_s: See `open`.
        Raises:
            ConflictError: there is a repository, or something else, already.
            InvalidInputError: impossible settings.
            PeerError: another rank could not; raised on all ranks at once.
        """
        from cas_ckpt.ops.init import init_repository
        from cas_ckpt.ops.together import Call

        ranks = Ranks(group, timeout_s)
        given = {"encoding": encoding, "pack_bytes": pack_bytes}
        settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        try:
            handle = ranks.open_in_turn(
                Call("init", {"default_branch": default_branch, **given}),
                lambda: init_repository(url, default_branch=default_branch, **settings),
                lambda: RepositoryHandle.open(url),
            )
        except BaseException:
            ranks.close()
            raise
        return cls(handle, ranks=ranks)

    @classmethod
    def open(
        cls,
        url: str | PathLike[str],
        *,
        create: bool = False,
        index_url: str | None = None,
        read_only: bool | None = False,
        group: Any = AUTO,
        timeout_s: float = TIMEOUT_S,
    ) -> Repository:
        """The repository at `url`.

        Args:
            index_url: Where the index is, if not inside the repository: a path, or a URL of
                SQLAlchemy (e.g. of a PostgreSQL that a team shares).
            create: Make an empty one if there is none. In a distributed job all ranks call it together then.
            read_only: Write nothing, not even the index. None: where nothing may be written, as it is.
            group: The ranks that commit and check out together: by itself all ranks of
                torch.distributed, where that is initialised. A ProcessGroup, a `Peers`, or
                None: this process alone.
            timeout_s: How long a rank waits for the others before it raises PeerError.
        Raises:
            NoRepositoryError: there is none. UnsupportedVersionError: of a newer format.
            InvalidInputError: `create` and `read_only` together.
            PermissionDeniedError: it may not be written, and `read_only` is False.
            CorruptionError: the config is damaged, or the index is: `rebuild_index` makes it anew.
        """
        from cas_ckpt.ops.init import open_or_init, require_rights
        from cas_ckpt.ops.together import Call

        if create and read_only:
            raise InvalidInputError("create=True makes a repository, read_only=True writes nothing: give one of them")
        ranks = Ranks(group, timeout_s)
        try:
            if create:
                handle = ranks.open_in_turn(
                    Call("open", {"create": True}),
                    lambda: open_or_init(url, index_url=index_url),
                    lambda: RepositoryHandle.open(url, index_url=index_url),
                )  # fmt: skip
            else:
                handle = RepositoryHandle.open(url, index_url=index_url, read_only=bool(read_only))
            if read_only is False:
                require_rights(handle)
        except BaseException:
            ranks.close()
            raise
        return cls(handle, ranks=ranks)

    @contextmanager
    def _common_work(self, verb: str) -> Iterator[None]:
        """Where a verb runs (see `reads_arguments`): one commit or checkout at a time, each one work of all ranks."""
        if verb not in ("commit", "checkout"):
            yield
            return
        with self._committing, together(self._ranks.peers):
            yield

    # --- work -----------------------------------------------------------------------------

    def commit(
        self, state: Mapping[str, Any], *, message: str | None = "", step: int | None = None,
        metrics: Mapping[str, float] | None = None, branch: str | None = None, create: bool = False,
        orphan: bool = False, author: str | None = None, meta: Any = None, parents: Sequence[Revision] = (),
        lineage: Sequence[Lineage] = (), provenance: bool | Mapping[str, Any] = False, frozen: Keys = None,
        frozen_check: str = "checksum", frozen_audit: float = 0.01, on_conflict: str = "retry",
        allow_pickle: bool = False, replica_check: str = "checksum", replica_audit: float = 0.01,
        on_divergence: str = "raise", num_threads: int | None = None, progress: Progress | bool = False,
    ) -> CommitInfo:  # fmt: skip
        """Commit `state` as it is now; the commit is there whole, and durable, when this returns.

        In a distributed job all ranks call it together, each with its own part of the state, and
        all get the same commit.

        Args:
            state: Names to objects with state_dict/load_state_dict, nested dicts and lists of
                tensors and plain values. Nobody may change it during the call.
            branch: Where it goes: the branch that was checked out if not given, else the default branch. A new
                one begins at the commit that the state came from (`head`).
            create, orphan: Begin `branch` though its name is nearly another's; or without a parent.
            meta: A plain value that is kept with the commit.
            parents: Revisions that this state joins, parents after the head of its branch.
            lineage: What the state was made from otherwise, e.g. `Lineage("fine-tune-of", "base")`;
                a commit of another repository by its whole id.
            provenance: Keep command line, host, versions and the git commit of the working directory; and a
                mapping that is given. No environment variables.
            frozen: Keys whose tensors do not change in this process: hashed once, then compared byte by byte with
                a checksum. "requires_grad": all parameters, of modules in the state, that require none.
            frozen_check: "version" believes torch's version counter instead, behind which fused optimizers,
                `.data` and numpy write.
            frozen_audit: Share (0..1) of the frozen chunks, chosen at random, that is hashed all the same.
            on_conflict: "retry" goes on top of whatever others committed meanwhile, "raise" does not.
            allow_pickle: Pickle values that cannot be expressed otherwise.
            replica_check: Every byte that several ranks hold is compared before one of them writes it;
                "sample": only `replica_audit`, the share (0..1) that all of them hash too.
            on_divergence: "raise" if replicas differ; "warn" keeps one replica of each, and logs whose.
        Raises:
            PeerError: another rank failed, is gone, or disagrees; says who and what.
            UnsupportedValueError: something in the state cannot be expressed; names its key.
            FrozenChangedError: a frozen tensor is not what it was.
            InvalidInputError: no branch is checked out, or it may not be begun like this; says how.
            ConflictError: the branch leads elsewhere than to what the state came from, or has moved.
            OutOfSpaceError: nothing is lost; free some space and commit again.
        """
        from cas_ckpt.ops.frozen import FrozenMemory
        from cas_ckpt.ops.request import CommitRequest
        from cas_ckpt.training.verbs import commit_state

        caller = sys._getframe(2)  # behind what reads the arguments
        request = CommitRequest(
            branch=branch, create=create, orphan=orphan, message=message, author=author, step=step,
            metrics={} if metrics is None else metrics, meta=meta, parents=parents, lineage=lineage,
            provenance=provenance, on_conflict=on_conflict, frozen=frozen, frozen_check=frozen_check,
            frozen_audit=frozen_audit, allow_pickle=allow_pickle, num_threads=num_threads,
            replica_check=replica_check, replica_audit=replica_audit, on_divergence=on_divergence,
            called_at=f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}",
        )  # fmt: skip
        self._frozen = self._frozen or FrozenMemory()
        return commit_state(
            self._handle, state, request, memory=self._frozen, peers=self._ranks.peers, progress=shown(progress)
        )

    def checkout(
        self,
        ref: Revision = "HEAD",
        *,
        into: Mapping[str, Any],
        strict: bool = True,
        keys: Keys = None,
        allow_pickle: bool = False,
        num_threads: int | None = None,
        progress: Progress | bool = False,
    ) -> CheckoutReport:
        """Make `into` what the commit holds, in place: the same objects, the same tensors.

        Everything is verified before the first tensor is touched, on any rank. In a distributed
        job all ranks call it together, each with what it wants to hold: any number of ranks,
        divided in any way, whatever the commit was made with.

        Args:
            ref: A branch is checked out as such: commits go to it. Anything else detaches `head`.
            strict: Keys must agree; otherwise what only one side has is left alone and reported.
            keys: Restore only these; `head` stays where it is.
            allow_pickle: Unpickle what was pickled. Only for commits that you trust.
        Raises:
            MismatchError: keys, shapes, dtypes or ties do not agree; `into` is untouched.
            CorruptionError: names the tensor; `into` is untouched.
        """
        from cas_ckpt.training.verbs import checkout_state

        self._frozen = None  # what was frozen may hold other bytes now, rightly
        return checkout_state(
            self._handle, ref, into=into, strict=strict, keys=keys, allow_pickle=allow_pickle,
            num_threads=num_threads, peers=self._ranks.peers, progress=shown(progress),
        )  # fmt: skip

    def close(self) -> None:
        """Release files and connections; idempotent."""
        self._ranks.close()
        super().close()

    def load(
        self,
        ref: Revision = "HEAD",
        *,
        keys: Keys = None,
        device: Any = None,
        dtype: Any = None,
        map_location: Any = None,
        allow_pickle: bool = False,
        num_threads: int | None = None,
        progress: Progress | bool = False,
    ) -> dict[str, Any]:
        """The state of the commit as new objects in nested dicts.

        Args:
            keys: Load only these; a list of which a part is left out becomes a dict by number.
            device: Where tensors of torch go, e.g. "cuda"; host memory if not given.
            dtype: What dense floating-point tensors of torch become, e.g. torch.bfloat16; what they were if not given.
            map_location: Another name of `device`, as in `torch.load`.
            allow_pickle: Unpickle what was pickled. Only for commits that you trust.
        Raises:
            TooLargeError: more bytes than there is memory; see `cas_ckpt.limits`.
        """
        from cas_ckpt.training.verbs import load_state

        if device is not None and map_location is not None:
            raise InvalidInputError("device= and map_location= are two names of one thing: give one of them")
        return load_state(
            self._handle, ref, keys=keys, device=map_location if device is None else device, dtype=dtype,
            allow_pickle=allow_pickle, num_threads=num_threads, progress=shown(progress),
        )  # fmt: skip

    def read(
        self, ref: Revision, key: str, region: Region | None = None, *, allow_pickle: bool = False,
        progress: Progress | bool = False,
    ) -> Any:  # fmt: skip
        """The tensor, array or value under `key`, or one region of it.

        Args:
            region: An index as NumPy has it: integers (the dimension is dropped), slices and `...`, e.g.
                np.s_[0:10, -64:]. Only the leaves that it touches are read and verified.
        Raises:
            InvalidInputError: an integer outside the tensor, a step, or another kind of index.
        """
        from cas_ckpt.training.verbs import read_entry

        return read_entry(
            self._handle, ref, key, region=region, allow_pickle=allow_pickle, progress=shown(progress)
        )

    # --- other formats --------------------------------------------------------------------

    def import_file(
        self, path: str | PathLike[str], *, message: str | None = None, step: int | None = None,
        metrics: Mapping[str, float] | None = None, branch: str | None = None, onto: Revision | None = None,
        create: bool = False, author: str | None = None, meta: Any = None, parents: Sequence[Revision] = (),
        lineage: Sequence[Lineage] = (), provenance: bool | Mapping[str, Any] = False, on_conflict: str = "retry",
        num_threads: int | None = None, prefix: str = "", follow_links: bool = False, progress: Progress | bool = False,
    ) -> ImportInfo:  # fmt: skip
        """Commit what a .pt, .pth, .bin or .safetensors file holds, or a folder of Hugging Face, Accelerate or DCP.

        The file is read in pieces, and no code in it is ever run. `message` says what was
        imported unless it is given; the other arguments are those of `commit`. What it follows is
        for the caller to say: the live state, and `head`, have nothing to do with it.

        Args:
            branch: Where it goes: on top of a branch that is there; a new one begins a history of its
                own, or at `onto`. The default branch, if that has no commit yet.
            onto: What it follows: a branch, or any revision beside `branch`.
            prefix: The key under which everything goes, e.g. "base"; the top if empty.
            follow_links: Read what symbolic links in a folder lead to outside of it. Those of the
                Hugging Face hub's cache (`snapshots/*/` into `blobs/`) are followed anyway.
        Returns:
            The commit; `left_out` names each file of a folder that is not in it, and why.
        Raises:
            InvalidInputError: not such a file, malformed, or a pickle that wants to run code.
        """
        from cas_ckpt.ops.importing import request_on
        from cas_ckpt.ops.request import CommitRequest
        from cas_ckpt.training.importing import import_any

        request = CommitRequest(
            branch=branch, create=create, message=f"import {path}" if message is None else message, author=author,
            step=step, metrics={} if metrics is None else metrics, meta=meta, parents=parents,
            lineage=lineage, provenance=provenance, on_conflict=on_conflict, num_threads=num_threads,
        )  # fmt: skip
        with self._committing:
            request = request_on(self._handle, request, onto)
            return import_any(
                self._handle, path, request, prefix=prefix, follow_links=follow_links, progress=shown(progress)
            )

    def export(
        self, ref: Revision, path: str | PathLike[str], *, format: str | None = None,  # noqa: A002
        max_shard_bytes: int | None = None, keys: Keys = None, force: bool = False, progress: Progress | bool = False,
    ) -> ExportInfo:  # fmt: skip
        """Write the commit to `path`, every byte verified.

        Args:
            format: "safetensors", "torch" or "dcp" (a folder for torch.distributed.checkpoint);
                by the end of the name if not given. A name without a known end becomes a
                folder of safetensors, sharded and with its index.
            max_shard_bytes: Length at which a file of a folder is closed.
            keys: Export only these.
            force: Replace files that are there already.
        Raises:
            ConflictError: a file is there already. UnsupportedValueError: names the key that
                the format cannot hold. InvalidInputError: no such format.
        """
        from cas_ckpt.training.exporting import export_any

        return export_any(
            self._handle, ref, path, format=format, max_shard_bytes=max_shard_bytes, keys=keys, force=force,
            progress=shown(progress),
        )  # fmt: skip
