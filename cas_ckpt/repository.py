"""`Repository`: the one class that people use, every method one verb; and `Ranks`, those it works together with.

Invariant: nothing is decided here; a method hands its arguments to a function of ops/ (what needs no torch) or
training/ (what does), which it imports when it is called, so that reading the log costs neither torch nor numpy.
torch is looked at only by a process that has it imported already.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from cas_ckpt.arguments import reads_arguments
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import Head, RefKind
from cas_ckpt.errors import InvalidInputError, PermissionDeniedError, shown_value
from cas_ckpt.progress import Progress, shown
from cas_ckpt.transfer.peers import SOLO, Call, Peers, collective_errors, compare_calls

if TYPE_CHECKING:
    from cas_ckpt.core.push_failures import PushFailure
    from cas_ckpt.core.records import CommitInfo, ImportInfo, Lineage
    from cas_ckpt.core.revisions import Revision
    from cas_ckpt.core.signed_branches import SignedBranches
    from cas_ckpt.core.units import Moment
    from cas_ckpt.index.rows import ListedEntry
    from cas_ckpt.layout.target_layout import TargetLayout
    from cas_ckpt.ops.checkout.plan import PlanReport
    from cas_ckpt.ops.checkout.read import Region
    from cas_ckpt.ops.checkout.restores import RestoreInfo
    from cas_ckpt.ops.commit.frozen import FrozenMemory
    from cas_ckpt.ops.diff.answer import Diff
    from cas_ckpt.ops.files.export import ExportInfo
    from cas_ckpt.ops.fsck.rebuild import RebuildReport
    from cas_ckpt.ops.fsck.report import FsckReport, RepairReport
    from cas_ckpt.ops.gc.freed import Freed
    from cas_ckpt.ops.gc.plan import GcReport
    from cas_ckpt.ops.history.find import FoundEntry
    from cas_ckpt.ops.history.lineage import CommitLineage, NearCommit
    from cas_ckpt.ops.history.log import Ranked
    from cas_ckpt.ops.history.month import MonthlyCost
    from cas_ckpt.ops.history.shards import ShardRow
    from cas_ckpt.ops.history.show import ShownCommit
    from cas_ckpt.ops.history.sql import SqlResult
    from cas_ckpt.ops.history.usage import CommitUsage, RepositoryStats, RepositoryStatus, UsageRow
    from cas_ckpt.ops.refs import PinInfo, RefMove
    from cas_ckpt.ops.retention.forget import ForgetReport
    from cas_ckpt.ops.retention.policy import Policy, Retention
    from cas_ckpt.ops.sync.bundle import BundleInfo
    from cas_ckpt.ops.sync.remotes import RemoteInfo
    from cas_ckpt.ops.sync.send import SyncReport
    from cas_ckpt.ops.verify import SignedBytes, VerifyReport
    from cas_ckpt.signing.keys import SigningKey
    from cas_ckpt.signing.trust import Trust
    from cas_ckpt.training.verbs import CheckoutReport
    from cas_ckpt.transfer.background import Background


AUTO = "auto"
"""All ranks of torch.distributed where that is initialised, else this process alone."""

TIMEOUT_S = 300.0


class Ranks:
    """This process and those that it commits and checks out with."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise InvalidInputError(f"timeout_s is {timeout_s!r}: give the seconds that a rank waits for the others")
        # A ProcessGroup is known by the name of its class: torch is not imported for it.
        is_group = hasattr(group, "gather_all") or any(each.__name__ == "ProcessGroup" for each in type(group).__mro__)
        if not (group is None or (isinstance(group, str) and group == AUTO) or is_group):
            raise InvalidInputError(f"group is {shown_value(group)}: give {AUTO!r}, None, a ProcessGroup or Peers")
        self.group = group
        self._timeout_s = timeout_s
        self._own: Peers | None = None
        self._closed = False

    @property
    def peers(self) -> Peers:
        """The ranks; making the group, the first time, is collective."""
        if self._closed:
            raise InvalidInputError("this repository was closed: open it again")
        if self.group is None:
            return SOLO
        if hasattr(self.group, "gather_all"):
            found: Peers = self.group
            return found
        if self._own is None:
            distributed = sys.modules.get("torch.distributed")
            is_named = isinstance(self.group, str)
            if distributed is None or (is_named and not (distributed.is_available() and distributed.is_initialized())):
                return SOLO  # for now: it may still be initialised
            if is_named and distributed.get_world_size() == 1:
                return SOLO
            from cas_ckpt.training.process_group import GroupPeers

            self._own = GroupPeers(None if is_named else self.group, timeout_s=self._timeout_s)
        return self._own

    def open_in_turn(
        self, call: Call, first: Callable[[], RepositoryHandle], others: Callable[[], RepositoryHandle]
    ) -> RepositoryHandle:
        """What rank 0 opens by `first` and, once that is done, the other ranks by `others`. Collective.

        Args:
            call: What this is done for; all ranks must say the same.

        A rank that cannot makes all ranks raise before any of them goes on; what was opened is closed.
        """
        peers = self.peers
        made: RepositoryHandle | None = None
        try:
            with collective_errors(peers):
                compare_calls(peers, call)
                if peers.rank == 0:
                    made = first()
                peers.broadcast(b"" if peers.rank == 0 else None)
                made = made or others()
                peers.gather_all(b"")
        except BaseException:
            if made is not None:
                made.close()
            raise
        return made

    def close(self) -> None:
        """Leave the group that was made here; no work together is begun any more. Idempotent."""
        self._closed = True
        if self._own is not None:
            self._own.close()
            self._own = None


Trusted: TypeAlias = "str | PathLike[str] | Sequence[str] | Trust"
"""Whose signatures count: a file of allowed signers or public keys, a public key, several, or a `Trust`."""


def _trust(given: Any) -> Trust | None:
    if given is None:
        return None
    from cas_ckpt.signing.trust import as_trust

    return as_trust(given)


def _key(given: Any) -> SigningKey | None:
    if given is None:
        return None
    from cas_ckpt.signing.keys import signing_key

    return signing_key(given)


Keys: TypeAlias = str | Sequence[str] | None
"""Patterns of keys: `*` and `?` inside a component, `**` across; a container stands for all below it."""


@reads_arguments
class Repository:
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
        self._pushing: dict[str, Background] = {}
        self._committing = threading.Lock()

    @classmethod
    def init(
        cls,
        url: str | PathLike[str],
        *,
        default_branch: str = "main",
        encoding: str | None = None,
        pack_bytes: int | None = None,
        single_writer: bool = False,
        index_url: str | None = None,
        cache: str | PathLike[str] | None = AUTO,
        group: Any = AUTO,
        timeout_s: float = TIMEOUT_S,
    ) -> Repository:
        """A new repository at `url`, opened. In a distributed job all ranks call it together.

        Args:
            url: A path, `file:///path`, `memory://name`, `s3://bucket/prefix` or `gs://bucket/prefix`. A folder must
                be empty, or not there yet.
            default_branch: The branch that commits go to unless they say otherwise.
            encoding: How new chunks are stored ("raw", "zstd", ...); ids do not depend on it. None: "auto", and
                "planes" on object storage.
            pack_bytes: Length at which a data pack is closed. None: 512 MiB, and 128 MiB on object storage.
            single_writer: An object storage that ignores conditional writes will do. You see to it that one process at
                a time writes (commits, collects, pushes); a second one would lose commits.
            index_url: As for `open`. The URL of a database without a password is noted in the repository, so that
                whoever opens it for writing need not give it.
            cache, group, timeout_s: See `open`.
        Raises:
            ConflictError: there is a repository, or something else, already.
            InvalidInputError: impossible settings.
            StorageError: the store ignores conditional writes, and `single_writer` is False.
            PeerError: another rank could not; raised on all ranks at once.
        """
        from cas_ckpt.core.create import init_repository

        ranks = Ranks(group, timeout_s)
        given = {"encoding": encoding, "pack_bytes": pack_bytes, "single_writer": single_writer}
        try:
            handle = ranks.open_in_turn(
                Call("init", {"default_branch": default_branch, **given}),
                lambda: init_repository(
                    url,
                    default_branch=default_branch,
                    encoding=encoding,
                    pack_bytes=pack_bytes,
                    single_writer=single_writer,
                    index_url=index_url,
                    cache=cache,
                ),
                lambda: RepositoryHandle.open(url, index_url=index_url, cache=cache),
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
        cache: str | PathLike[str] | None = AUTO,
        group: Any = AUTO,
        timeout_s: float = TIMEOUT_S,
        progress: Progress | bool = False,
        trust: Trusted | None = None,
    ) -> Repository:
        """The repository at `url`.

        Args:
            index_url: Where the index is, if not inside the repository: a path, or a URL of
                SQLAlchemy (e.g. of a PostgreSQL that a team shares).
            create: Make an empty one if there is none. In a distributed job all ranks call it together then.
            read_only: Write nothing, not even the index. None: where nothing may be written, as it is.
            cache: A folder where this host keeps what it has read of repositories on stores that are not local, so
                that the next look costs few requests; processes share it. "auto": `~/.cache/cas_ckpt`. None: nowhere,
                the index is in memory then. It holds too for remotes that are pushed to and fetched from.
            group: The ranks that commit and check out together: by itself all ranks of
                torch.distributed, where that is initialised. A ProcessGroup, a `Peers`, or
                None: this process alone.
            timeout_s: How long a rank waits for the others before it raises PeerError.
            progress: Of what an index of an older version lacks, which the first question that needs it reads.
            trust: Whose signature a commit needs before `checkout`, `load`, `read` and `export` give its state: the
                path of an allowed_signers file, public keys, or a `Trust`. See `verify`.
        Raises:
            NoRepositoryError: there is none. UnsupportedVersionError: of a newer format.
            InvalidInputError: `create` and `read_only` together.
            PermissionDeniedError: it may not be written, and `read_only` is False.
            CorruptionError: the config is damaged, or the index is: `rebuild_index` makes it anew.
        """
        from cas_ckpt.core.create import open_or_init, require_rights

        if create and read_only:
            raise InvalidInputError("create=True makes a repository, read_only=True writes nothing: give one of them")
        ranks = Ranks(group, timeout_s)
        try:
            if create:
                handle = ranks.open_in_turn(
                    Call("open", {"create": True}),
                    lambda: open_or_init(url, index_url=index_url, cache=cache),
                    lambda: RepositoryHandle.open(url, index_url=index_url, cache=cache),
                )  # fmt: skip
            else:
                lazy = read_only is not False
                try:
                    handle = RepositoryHandle.open(
                        url, index_url=index_url, read_only=bool(read_only), cache=cache, lazy=lazy
                    )
                except PermissionDeniedError:
                    if read_only is not None:
                        raise
                    handle = RepositoryHandle.open(url, index_url=index_url, read_only=True, cache=cache, lazy=lazy)
            handle.progress = shown(progress)
            handle.trust = _trust(trust)
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
        with self._committing, collective_errors(self._ranks.peers):
            yield

    def close(self) -> None:
        """Wait for what `commit(push_to=)` left to be pushed, then release files and connections. Idempotent.

        Raises:
            Whatever the last push raised; all is released, and the next process pushes what is missing there.
        """
        try:
            self.wait_pushed()
        finally:
            self._release()

    def _release(self) -> None:
        self._ranks.close()
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc_info: object) -> None:
        if kind is None:
            self.close()
        else:
            self._release()  # nobody waits for a push while an error is on its way; the next process pushes it

    def __repr__(self) -> str:
        return f"Repository({self.url!r})"

    @property
    def url(self) -> str:
        """Where the repository is."""
        return self._handle.store.url

    @property
    def head(self) -> Head:
        """Where the live state came from, and where the next `commit` goes; the same on all ranks.

        `checkout` and `commit` move it; loading and reading do not, nor does checking out a part (`keys=`).
        """
        return self._handle.head

    @property
    def default_branch(self) -> str:
        """The branch that a fresh object is on."""
        return self._handle.config.default_branch

    @contextmanager
    def one_look(self) -> Iterator[Repository]:
        """Inside the block, branches, tags and pins that are only looked at are all of one moment.

        That is the moment of the first look, and on a store that is not local it takes one request for all of them.
        Commits see what is there now, as always. For this thread alone.
        """
        with self._handle.refs.one_look():
            yield self

    # --- training state -----------------------------------------------------------------------

    def commit(
        self, state: Mapping[str, Any], *, message: str | None = "", step: int | None = None,
        metrics: Mapping[str, float] | None = None, branch: str | None = None, create: bool = False,
        orphan: bool = False, author: str | None = None, meta: Any = None, parents: Sequence[Revision] = (),
        lineage: Sequence[Lineage] = (), provenance: bool | Mapping[str, Any] = False, frozen: Keys = None,
        frozen_check: str = "checksum", frozen_audit: float = 0.01, on_conflict: str = "retry",
        allow_pickle: bool = False, replica_check: str = "checksum", replica_audit: float = 0.01,
        on_divergence: str = "raise", sign: Any = None, push_to: str | None = None, num_threads: int | None = None,
        progress: Progress | bool = False,
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
            push_to: A remote that gets the commit, and all else that it lacks, in a thread behind the caller's back;
                until it has it, the commit cannot be forgotten here. What fails is logged, and tried again by the next.
            sign: The key that signs the commit: the path of a private key of SSH that is not encrypted, or a
                `SigningKey`. In a distributed job rank 0 signs, and the others may leave it out.
        Raises:
            PeerError: another rank failed, is gone, or disagrees; says who and what.
            UnsupportedValueError: something in the state cannot be expressed; names its key.
            FrozenChangedError: a frozen tensor is not what it was.
            InvalidInputError: no branch is checked out, or it may not be begun like this; says how.
            ConflictError: the branch leads elsewhere than to what the state came from, or has moved.
            OutOfSpaceError: nothing is lost; free some space and commit again.
            SignatureError: the branch takes signed commits only, and this is not signed as it wants.
        """
        from cas_ckpt.ops.commit.request import CommitRequest
        from cas_ckpt.training.verbs import commit_state

        caller = sys._getframe(2)  # behind what reads the arguments
        request = CommitRequest(
            branch=branch, create=create, orphan=orphan, message=message, author=author, step=step,
            metrics={} if metrics is None else metrics, meta=meta, parents=parents, lineage=lineage,
            provenance=provenance, on_conflict=on_conflict, frozen=frozen, frozen_check=frozen_check,
            frozen_audit=frozen_audit, allow_pickle=allow_pickle, num_threads=num_threads,
            replica_check=replica_check, replica_audit=replica_audit, on_divergence=on_divergence,
            sign=_key(sign) if self._ranks.peers.rank == 0 else None,
            called_at=f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}",
        )  # fmt: skip
        if frozen is not None and self._frozen is None:
            from cas_ckpt.ops.commit.frozen import FrozenMemory

            self._frozen = FrozenMemory()
        if push_to is not None and self._ranks.peers.rank == 0:
            from cas_ckpt.ops.sync.tier import make_tier

            make_tier(self._handle, push_to)
        made = commit_state(
            self._handle, state, request, memory=self._frozen, peers=self._ranks.peers, progress=shown(progress)
        )
        if push_to is not None and self._ranks.peers.rank == 0:
            self._background(push_to).wake()
        return made

    def _background(self, remote: str) -> Background:
        """The thread that pushes to `remote` what it lacks."""
        if remote not in self._pushing:
            from cas_ckpt.ops.sync.tier import log_failure, push_pending
            from cas_ckpt.transfer.background import Background

            handle = self._handle
            self._pushing[remote] = Background(
                lambda: push_pending(handle, remote), failed=lambda error: log_failure(remote, error)
            )
        return self._pushing[remote]

    def checkout(
        self,
        ref: Revision = "HEAD",
        *,
        into: Mapping[str, Any],
        strict: bool = True,
        keys: Keys = None,
        allow_pickle: bool = False,
        trust: Trusted | None = None,
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
            trust: Whose signature the commit needs, or the tag that `ref` is; see `verify`. Rank 0 asks for it.
        Raises:
            SignatureError: nobody who is trusted signed it; `into` is untouched.
            MismatchError: keys, shapes, dtypes or ties do not agree; `into` is untouched.
            CorruptionError: names the tensor; `into` is untouched.
        """
        from cas_ckpt.training.verbs import checkout_state

        self._frozen = None  # what was frozen may hold other bytes now, rightly
        return checkout_state(
            self._handle, ref, into=into, strict=strict, keys=keys, allow_pickle=allow_pickle,
            num_threads=num_threads, peers=self._ranks.peers, progress=shown(progress), trust=_trust(trust),
        )  # fmt: skip

    def load(
        self,
        ref: Revision = "HEAD",
        *,
        keys: Keys = None,
        device: Any = None,
        dtype: Any = None,
        map_location: Any = None,
        allow_pickle: bool = False,
        trust: Trusted | None = None,
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
            trust: Whose signature the commit needs, or the tag that `ref` is; see `verify`.
        Raises:
            SignatureError: nobody who is trusted signed it.
            TooLargeError: more bytes than there is memory; see `cas_ckpt.limits`.
        """
        from cas_ckpt.training.verbs import load_state

        if device is not None and map_location is not None:
            raise InvalidInputError("device= and map_location= are two names of one thing: give one of them")
        return load_state(
            self._handle, ref, keys=keys, device=map_location if device is None else device, dtype=dtype,
            allow_pickle=allow_pickle, num_threads=num_threads, progress=shown(progress), trust=_trust(trust),
        )  # fmt: skip

    def read(
        self, ref: Revision, key: str, region: Region | None = None, *, allow_pickle: bool = False,
        trust: Trusted | None = None, progress: Progress | bool = False,
    ) -> Any:  # fmt: skip
        """The tensor, array or value under `key`, or one region of it.

        Args:
            region: An index as NumPy has it: integers (the dimension is dropped), slices and `...`, e.g.
                np.s_[0:10, -64:]. Only the leaves that it touches are read and verified.
            trust: See `load`.
        Raises:
            InvalidInputError: an integer outside the tensor, a step, or another kind of index.
        """
        from cas_ckpt.training.verbs import read_entry

        return read_entry(
            self._handle, ref, key, region=region, allow_pickle=allow_pickle, progress=shown(progress),
            trust=_trust(trust),
        )  # fmt: skip

    def latest(self, branch: str | None = None) -> CommitInfo | None:
        """The latest commit of a branch, or None if there is none yet: what a run resumes from, if anything.

            if repo.latest():
                repo.checkout("main", into=state)

        Args:
            branch: The one that is checked out, else the default branch, if not given.
        Raises:
            InvalidInputError: there is no such branch, and the name is nearly that of another.
        """
        from cas_ckpt.ops.history.log import latest_of

        return latest_of(self._handle, branch)

    # --- files --------------------------------------------------------------------------------

    def import_file(
        self, path: str | PathLike[str], *, message: str | None = None, step: int | None = None,
        metrics: Mapping[str, float] | None = None, branch: str | None = None, onto: Revision | None = None,
        create: bool = False, author: str | None = None, meta: Any = None, parents: Sequence[Revision] = (),
        lineage: Sequence[Lineage] = (), provenance: bool | Mapping[str, Any] = False, on_conflict: str = "retry",
        sign: Any = None, num_threads: int | None = None, prefix: str = "", follow_links: bool = False,
        progress: Progress | bool = False,
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
        from cas_ckpt.files import import_any
        from cas_ckpt.ops.commit.request import CommitRequest
        from cas_ckpt.ops.files.models import request_on

        request = CommitRequest(
            branch=branch, create=create, message=f"import {path}" if message is None else message, author=author,
            step=step, metrics={} if metrics is None else metrics, meta=meta, parents=parents,
            lineage=lineage, provenance=provenance, on_conflict=on_conflict, num_threads=num_threads, sign=_key(sign),
        )  # fmt: skip
        with self._committing:
            request = request_on(self._handle, request, onto)
            return import_any(
                self._handle, path, request, prefix=prefix, follow_links=follow_links, progress=shown(progress)
            )

    def export(
        self, ref: Revision, path: str | PathLike[str], *, format: str | None = None,  # noqa: A002
        max_shard_bytes: int | None = None, keys: Keys = None, force: bool = False, trust: Trusted | None = None,
        progress: Progress | bool = False,
    ) -> ExportInfo:  # fmt: skip
        """Write the commit to `path`, every byte verified.

        Args:
            format: "safetensors", "torch" or "dcp" (a folder for torch.distributed.checkpoint);
                by the end of the name if not given. A name without a known end becomes a
                folder of safetensors, sharded and with its index.
            max_shard_bytes: Length at which a file of a folder is closed.
            keys: Export only these.
            force: Replace files that are there already.
            trust: See `load`.
        Raises:
            ConflictError: a file is there already. UnsupportedValueError: names the key that
                the format cannot hold. InvalidInputError: no such format.
        """
        from cas_ckpt.files import export_any

        return export_any(
            self._handle, ref, path, format=format, max_shard_bytes=max_shard_bytes, keys=keys, force=force,
            progress=shown(progress), trust=_trust(trust),
        )  # fmt: skip

    # --- what commits hold --------------------------------------------------------------------

    def show(self, ref: Revision = "HEAD") -> ShownCommit:
        """The commit, what names it, and a summary of its state."""
        from cas_ckpt.ops.history.show import show_commit

        return show_commit(self._handle, ref)

    def ls(self, ref: Revision = "HEAD", keys: Keys = None) -> list[ListedEntry]:
        """The entries of the commit: key, kind, dtype, shape, bytes."""
        from cas_ckpt.ops.history.show import list_commit

        return list_commit(self._handle, ref, keys=keys)

    def entry(self, ref: Revision, key: str) -> ListedEntry:
        """What is under one key; a container has the bytes of all tensors below it."""
        from cas_ckpt.ops.history.show import list_one

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
        dtype: Any = None,
        shape: Any = None,
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
        dtype: Any = None,
        shape: Any = None,
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
        from cas_ckpt.ops.diff.diff import DiffRequest, diff_commits

        request = DiffRequest(keys, numbers, values, num_threads)
        return diff_commits(self._handle, a, b, request, progress=shown(progress))

    # --- history ------------------------------------------------------------------------------

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
    ) -> list[CommitInfo]:
        """The commits that `ref` (one revision or several) leads to, the youngest first.

        Args:
            ref: HEAD, if not given: the branch that was checked out, else the default branch.
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
            self._handle, revisions, limit=limit, all_refs=all_refs, first_parent=first_parent, wanted=wanted, keys=keys
        )
        return list(found)

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
        """What the state came from and what came from it, over typed edges and history, transitively."""
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
            from cas_ckpt.files import file_tree

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

    # --- branches, tags and pins --------------------------------------------------------------

    def branch(self, name: str, *, start: Revision = "HEAD", force: bool = False) -> str:
        """Make the branch `name` at the commit `start`; that commit's id.

        Raises:
            ConflictError: the name is taken (and `force` does not say to move the branch).
        """
        from cas_ckpt.ops.refs import create_branch

        return create_branch(self._handle, name, start=start, force=force).hex()

    def branches(self) -> dict[str, str]:
        """Name -> id of the head of every branch, by name."""
        from cas_ckpt.ops.refs import named

        return named(self._handle, RefKind.BRANCH)

    def delete_branch(self, name: str, *, force: bool = False) -> str:
        """Delete the branch; the id that it named. Its commits stay until they are collected.

        Args:
            force: Also if a tier does not have yet what it alone leads to.
        Raises:
            InvalidInputError: it is the default branch. ConflictError: it leads to what a tier does not have yet.
        """
        from cas_ckpt.ops.refs import delete_branch

        return delete_branch(self._handle, name, force=force).hex()

    def rename_branch(self, old: str, new: str) -> str:
        """Give the branch another name; the id that it names. The default branch stays.

        Raises:
            ConflictError: the new name is taken.
        """
        from cas_ckpt.ops.refs import rename_ref

        return rename_ref(self._handle, RefKind.BRANCH, old, new).hex()

    def undelete_branch(self, name: str) -> str:
        """Bring the deleted branch back; the id that it names, as before.

        Raises:
            NotFoundError: there was none, or its commits were collected.
        """
        from cas_ckpt.ops.refs import undelete_ref

        return undelete_ref(self._handle, RefKind.BRANCH, name).hex()

    def tag(
        self, name: str, ref: Revision = "HEAD", *, message: str = "", force: bool = False, sign: Any = None
    ) -> str:
        """Let the tag `name` name the commit `ref`; that commit's id.

        Args:
            message: Kept with the tag, which is an annotated one then.
            sign: The key that signs the tag: its name, the commit, the message, who and when. See `commit`.
        Raises:
            ConflictError: the name is taken (and `force` does not say to move the tag).
        """
        from cas_ckpt.ops.refs import create_tag

        return create_tag(self._handle, name, ref, message=message, force=force, sign=_key(sign)).hex()

    def tags(self) -> dict[str, str]:
        """Name -> id of the commit of every tag, by name."""
        from cas_ckpt.ops.refs import named

        return named(self._handle, RefKind.TAG)

    def tag_messages(self) -> dict[str, str]:
        """Name -> message of every annotated tag, by name."""
        from cas_ckpt.ops.refs import tag_messages

        return tag_messages(self._handle)

    def delete_tag(self, name: str) -> str:
        """Delete the tag; the id that it named."""
        from cas_ckpt.ops.refs import delete_ref

        return delete_ref(self._handle, RefKind.TAG, name).hex()

    def rename_tag(self, old: str, new: str) -> str:
        """Give the tag another name; the id that it names.

        Raises:
            ConflictError: the new name is taken.
        """
        from cas_ckpt.ops.refs import rename_ref

        return rename_ref(self._handle, RefKind.TAG, old, new).hex()

    def undelete_tag(self, name: str) -> str:
        """Bring the deleted tag back, its message too; the id that it names, as before.

        Raises:
            NotFoundError: there was none, or its commit was collected.
        """
        from cas_ckpt.ops.refs import undelete_ref

        return undelete_ref(self._handle, RefKind.TAG, name).hex()

    def pin(self, ref: Revision = "HEAD", *, name: str | None = None, reason: str = "", force: bool = False) -> PinInfo:
        """Keep the commit, whatever is forgotten, until it is unpinned.

        Args:
            name: "pin-" and the first digits of the id, if not given. Pins have names of their own;
                as a revision, one is written refs/pins/NAME.
            force: Move a pin of that name that exists already.
        Raises:
            ConflictError: there is a pin of that name.
        """
        from cas_ckpt.ops.refs import create_pin

        return create_pin(self._handle, ref, name=name, reason=reason, force=force)

    def pins(self) -> list[PinInfo]:
        """All pins, by name."""
        from cas_ckpt.ops.refs import list_pins

        return list_pins(self._handle)

    def unpin(self, name: str) -> str:
        """Take the pin away; the id that it named."""
        from cas_ckpt.ops.refs import delete_pin

        return delete_pin(self._handle, name).hex()

    def undelete_pin(self, name: str) -> str:
        """Bring the pin back; the id that it names, as before.

        Raises:
            NotFoundError: there was none, or its commit was collected.
        """
        from cas_ckpt.ops.refs import undelete_ref

        return undelete_ref(self._handle, RefKind.PIN, name).hex()

    # --- other repositories -------------------------------------------------------------------

    @classmethod
    def clone(
        cls,
        url: str | PathLike[str],
        target: str | PathLike[str],
        *,
        branch: str | None = None,
        branches: str | Sequence[str] = (),
        depth: int | None = None,
        tags: bool | None = None,
        num_threads: int | None = None,
        max_bandwidth: float | None = None,
        cache: str | PathLike[str] | None = AUTO,
        progress: Progress | bool = False,
    ) -> Repository:
        """A new repository at `target` with the commits of the one at `url`, which is its remote `origin`; opened.

        One that was broken off is gone on with. In a distributed job call it on one rank.

        Args:
            branch: The branch that begins here; the default branch there, if not given.
            branches: Patterns of its branches that come ("ft/*"); all, if none is given.
            depth: Only so many commits on every way back from a head come with their data; of those before them the
                record alone, as of forgotten ones.
            tags: All (True), none (False), or those of commits that come.
            max_bandwidth: Bytes a second at most.
            cache: See `open`; of both.
        Raises:
            ConflictError: something else is at `target`. NoRepositoryError: there is none at `url`.
        """
        from cas_ckpt.ops.sync.fetch import FetchRequest, clone

        if depth is not None and depth < 1:
            raise InvalidInputError(f"depth is {depth}: give a number from 1 on")
        request = FetchRequest(
            branches=_texts(branches), tags=tags, num_threads=num_threads, max_bandwidth=max_bandwidth,
            progress=shown(progress), depth=depth,
        )  # fmt: skip
        handle, _ = clone(url, target, request, branch=branch, cache=cache)
        return cls(handle)

    def push(
        self,
        remote: str | PathLike[str] | None = None,
        refs: str | Sequence[str] = (),
        *,
        delete: str | Sequence[str] = (),
        all_branches: bool = False,
        tags: bool = False,
        force: bool = False,
        force_with_lease: bool | str = False,
        shard: str | None = None,
        dry_run: bool = False,
        num_threads: int | None = None,
        max_bandwidth: float | None = None,
        progress: Progress | bool = False,
    ) -> SyncReport:
        """Send commits to another repository: what it lacks of them, then its refs move.

        Args:
            remote: A remote's name, a URL or a path; `origin`, if not given.
            refs: Branches and tags, or `REVISION:BRANCH`, as git has them; if nothing is given, what the remote's
                settings say, else the branch that is checked out.
            delete: Refs of the other repository that are to go.
            all_branches, tags: All branches, all tags.
            force: Also where a ref would not move forward.
            force_with_lease: The same, but only where it is where it was when it was last asked (True), or at this
                commit.
            shard: Only copy the chunks of one of several jobs, "2/7": the second of seven, which may run at the same
                time; no ref moves. A push without it, when all have ended, finds what they copied, and moves the refs.
            dry_run: Change nothing; the report says what would be done.
            max_bandwidth: Bytes a second at most.
        Raises:
            ConflictError: a ref would not move forward, or moved meanwhile.
        """
        from cas_ckpt.core.pack_shards import parse_shard
        from cas_ckpt.ops.sync.push import PushRequest, push

        request = PushRequest(
            remote, _texts(refs), _texts(delete), all_branches, tags, force, force_with_lease, dry_run, num_threads,
            max_bandwidth, shown(progress), None if shard is None else parse_shard(shard),
        )  # fmt: skip
        return push(self._handle, request)

    def fetch(
        self,
        remote: str | None = None,
        branches: str | Sequence[str] = (),
        *,
        commits: str | Sequence[str] = (),
        tags: bool | None = None,
        prune: bool = False,
        dry_run: bool = False,
        num_threads: int | None = None,
        max_bandwidth: float | None = None,
        progress: Progress | bool = False,
    ) -> SyncReport:
        """Bring the commits of a remote here; its branch `main` is `origin/main` here.

        Args:
            remote: Its name; `origin`, if not given.
            branches: Patterns of its branches; if none is given, what its settings say, else all.
            commits: Revisions whose data was forgotten here, and comes back; a pin keeps each until it is unpinned.
            tags: All (True), none (False), or those of commits that are here then.
            prune: Take away `origin/NAME` where there is no such branch any more.
            dry_run: Change nothing; the report says what would be done.
            max_bandwidth: Bytes a second at most.
        Raises:
            NotFoundError: there is no such remote, or no branch that matches.
        """
        from cas_ckpt.ops.sync.fetch import FetchRequest, fetch

        request = FetchRequest(
            remote, _texts(branches), tags, prune, dry_run, num_threads, max_bandwidth, shown(progress),
            commits=_texts(commits),
        )  # fmt: skip
        return fetch(self._handle, request)

    def pull(
        self,
        remote: str | PathLike[str] | None = None,
        branch: str | None = None,
        *,
        tags: bool | None = None,
        dry_run: bool = False,
        num_threads: int | None = None,
        max_bandwidth: float | None = None,
        progress: Progress | bool = False,
    ) -> SyncReport:
        """Fetch, then let a branch here go forward to where it is there. No live state changes: check it out.

        Args:
            remote: A remote's name, a URL or a path; `origin`, if not given.
            branch: Which; the one that is checked out, else the default branch, if not given.
            tags: All (True), none (False), or those of commits that are here then.
            dry_run: Change nothing; the report says what would be done.
            max_bandwidth: Bytes a second at most.
        Raises:
            ConflictError: each side has commits that the other has not; says what helps.
            NotFoundError: there is no such remote, or no such branch there.
        """
        from cas_ckpt.ops.sync.fetch import FetchRequest, pull

        request = FetchRequest(remote, (), tags, False, dry_run, num_threads, max_bandwidth, shown(progress))
        return pull(self._handle, request, branch=branch)

    def create_bundle(
        self, path: str | PathLike[str], refs: str | Sequence[str] = (), *, since: Sequence[Revision] = (),
        force: bool = False, progress: Progress | bool = False,
    ) -> BundleInfo:  # fmt: skip
        """Write one file that carries commits, for where no network goes.

        Args:
            refs: Branches and tags, or `REVISION:BRANCH`; the branch that is checked out, if nothing is given.
            since: Revisions that whoever takes it has: what these have is left out.
            force: Replace a file that is there.
        Raises:
            ConflictError: the file is there. InvalidInputError: nothing would be in it.
        """
        from cas_ckpt.ops.sync.bundle import create_bundle

        return create_bundle(self._handle, path, _texts(refs), since=since, force=force, progress=shown(progress))

    def unbundle(
        self, path: str | PathLike[str], *, remote: str | None = None, dry_run: bool = False,
        progress: Progress | bool = False,
    ) -> SyncReport:  # fmt: skip
        """Bring the commits of a bundle here; branches move forward, or begin, tags come along.

        Args:
            remote: Its branches become branches of this remote here (`NAME/main`) instead.
            dry_run: Change nothing; the report says what would be done.
        Raises:
            NotFoundError: it continues from commits that are not here. ConflictError: a branch here has commits of its
                own. CorruptionError: the file is damaged.
        """
        from cas_ckpt.ops.sync.bundle import take_bundle

        return take_bundle(self._handle, path, remote=remote, dry_run=dry_run, progress=shown(progress))

    def verify_bundle(
        self, path: str | PathLike[str], *, num_threads: int | None = None, progress: Progress | bool = False
    ) -> BundleInfo:
        """Read and hash every byte of a bundle, and see that it can be taken here.

        Raises:
            CorruptionError: it is damaged. NotFoundError: it needs commits that are not here.
        """
        from cas_ckpt.ops.sync.bundle import verify_bundle

        return verify_bundle(self._handle, path, num_threads=num_threads, progress=shown(progress))

    def push_pending(
        self, remote: str, *, max_bandwidth: float | None = None, progress: Progress | bool = False
    ) -> list[SyncReport]:
        """Push every branch of which a remote lacks something, and mark the remote as a tier.

        Each branch is pushed by itself: one that cannot move forward there holds up no other.

        Args:
            remote: Its name. Which branches: those that match its `push` patterns, else all.
            max_bandwidth: Bytes a second at most.
        Raises:
            ConflictError: a branch there went another way; the others were pushed.
        """
        from cas_ckpt.ops.sync.tier import push_pending

        return push_pending(self._handle, remote, max_bandwidth=max_bandwidth, progress=shown(progress))

    def unpushed(self) -> dict[str, list[str]]:
        """Tier -> ids of the commits of branches that it did not have when it was last asked."""
        from cas_ckpt.ops.sync.waiting import unpushed

        return unpushed(self._handle)

    def push_failures(self) -> dict[str, PushFailure]:
        """Tier that lacks commits -> when and why the last push of these failed, if it did."""
        from cas_ckpt.ops.sync.waiting import push_failures

        return push_failures(self._handle)

    def wait_pushed(self, timeout_s: float | None = None) -> bool:
        """Wait until what `commit(push_to=)` left to be pushed is pushed; whether it is.

        Args:
            timeout_s: Wait no longer than this.
        Raises:
            Whatever the last push raised.
        """
        done = [each.wait(timeout_s) for each in list(self._pushing.values())]
        return all(done)

    def remotes(self) -> list[RemoteInfo]:
        """The other repositories that have names here, by name."""
        from cas_ckpt.ops.sync.remotes import list_remotes

        return list_remotes(self._handle)

    def remote_branches(self) -> dict[str, str]:
        """Name (`origin/main`) -> id of the commit that a branch of a remote named when it was last asked."""
        from cas_ckpt.ops.refs import named

        return named(self._handle, RefKind.REMOTE)

    def add_remote(
        self, name: str, url: str | PathLike[str], *, fetch: str | Sequence[str] = (),
        push: str | Sequence[str] = (), tier: bool = False,
    ) -> None:  # fmt: skip
        """Let `name` mean the repository at `url`, which need not be there yet.

        Args:
            url: A path or URL without passwords or keys: those come from the environment of each user.
            fetch: Patterns of its branches that `fetch` brings; all, if none is given.
            push: Patterns of branches that `push` sends; the one that is checked out, if none is given.
            tier: It is to have every commit of these branches: what it lacks cannot be forgotten here.
        Raises:
            ConflictError: there is a remote of that name. InvalidInputError: the URL carries a secret.
        """
        from cas_ckpt.ops.sync.remotes import add_remote

        add_remote(self._handle, name, url, fetch=_texts(fetch), push=_texts(push), tier=tier)

    def set_remote(
        self, name: str, *, url: str | PathLike[str] | None = None, fetch: str | Sequence[str] | None = None,
        push: str | Sequence[str] | None = None, tier: bool | None = None,
    ) -> None:  # fmt: skip
        """Change what is given of a remote."""
        from cas_ckpt.ops.sync.remotes import set_remote

        fetched, pushed = (None if given is None else _texts(given) for given in (fetch, push))
        set_remote(self._handle, name, url=url, fetch=fetched, push=pushed, tier=tier)

    def remove_remote(self, name: str) -> None:
        """Take the remote away, and its branches here; the other repository is not touched."""
        from cas_ckpt.ops.sync.remotes import remove_remote

        remove_remote(self._handle, name)

    def rename_remote(self, old: str, new: str) -> None:
        """Give a remote, and its branches here, another name.

        Raises:
            ConflictError: there is one of that name.
        """
        from cas_ckpt.ops.sync.remotes import rename_remote

        rename_remote(self._handle, old, new)

    # --- what refs were -----------------------------------------------------------------------

    def reflog(self, ref: str | None = None, *, limit: int | None = None) -> list[RefMove]:
        """The moves of a branch, tag or pin, deleted ones too, the latest first.

        Args:
            ref: Its name; the branch that was checked out, else the default branch, if not given.
        Raises:
            NotFoundError: there never was such a ref.
        """
        from cas_ckpt.ops.refs import reflog

        return reflog(self._handle, ref, limit=limit)

    # --- signatures ---------------------------------------------------------------------------

    def verify(
        self, ref: Revision = "HEAD", *, trust: Trusted, revoked: str | PathLike[str] | None = None,
        history: bool = False,
    ) -> VerifyReport:  # fmt: skip
        """Who signed the commit, and the tag that `ref` is; `ok` says whether somebody who is trusted did.

        Args:
            trust: The path of an allowed_signers file as git uses it, or of a public key; a public key as text; a list
                of public keys or lines of such a file; or a `Trust`.
            revoked: A file of public keys that count no more.
            history: Every commit that it leads to has to be signed as well.
        Raises:
            InvalidInputError: a line of `trust` that is not understood. StorageError: a file cannot be read.
        """
        from cas_ckpt.ops.verify import verify_revision
        from cas_ckpt.signing.trust import as_trust

        trusted = as_trust(trust)
        if revoked is not None:
            trusted = trusted.without(revoked)
        return verify_revision(self._handle, ref, trusted, history=history)

    def signed_bytes(self, ref: Revision = "HEAD") -> SignedBytes:
        """The signature of the commit, or of the tag that `ref` is, and the bytes that it is of: for other programs.

        Raises:
            NotFoundError: it is not signed.
        """
        from cas_ckpt.ops.verify import signed_bytes

        return signed_bytes(self._handle, ref)

    def signers(self) -> SignedBranches:
        """The branches that take signed commits only, by pattern, and whose; maybe none."""
        from cas_ckpt.core.signed_branches import read_signers

        return read_signers(self._handle.store)

    def set_signers(self, branch: str, trust: Trusted) -> SignedBranches:
        """Let branches that match the pattern `branch` take commits only that somebody in `trust` signed; all rules.

        Commits that are there already stay as they are. It keeps those who use cas_ckpt from mistakes; against those
        who can write to the store otherwise, readers have `trust=`.
        """
        from cas_ckpt.core.signed_branches import set_signers
        from cas_ckpt.signing.trust import as_trust

        return set_signers(self._handle, branch, as_trust(trust))

    def clear_signers(self, branch: str | None = None) -> SignedBranches:
        """Let the branches of the pattern `branch`, or all, take any commit again; what is left.

        Raises:
            NotFoundError: no such pattern is set.
        """
        from cas_ckpt.core.signed_branches import clear_signers

        return clear_signers(self._handle, branch)

    # --- restore plans ------------------------------------------------------------------------

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
                layout/plan_summary.py assumes, if not given.
        Raises:
            MismatchError: the commit cannot fill the target; names key and region.
        """
        from cas_ckpt.layout.target_layout import layout_of
        from cas_ckpt.ops.checkout.plan import plan_checkout

        return plan_checkout(
            self._handle, ref, layout_of(target, shapes), storage_bandwidth=storage_bandwidth,
            network_bandwidth=network_bandwidth,
        )  # fmt: skip

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

        Args:
            targets: As for `plan`, which is done for those that have no plan yet. None: those that have one.
            most_ranks: Leave out targets of more ranks: which mesh that fits 384 GPUs restores this commit cheapest?
            shapes, storage_bandwidth, network_bandwidth: See `plan`.
        Raises:
            NotFoundError: nothing is left to compare.
            MismatchError: the commit cannot fill a target; names key and region.
        """
        from cas_ckpt.layout.target_layout import layout_of
        from cas_ckpt.ops.checkout.plan import compare_plans

        layouts = None if targets is None else [layout_of(target, shapes) for target in targets]
        return compare_plans(
            self._handle, ref, layouts, most_ranks=most_ranks, storage_bandwidth=storage_bandwidth,
            network_bandwidth=network_bandwidth,
        )  # fmt: skip

    def plans(self, ref: Revision | None = None) -> list[PlanReport]:
        """The plans that the index keeps, for one revision or all."""
        from cas_ckpt.ops.checkout.plan import kept_plans

        return kept_plans(self._handle, ref)

    def restores(self, ref: Revision | None = None, *, limit: int | None = None) -> list[RestoreInfo]:
        """The checkouts and loads that were made, well or badly, the last one first; of one revision's state, or all.

        Logged in the index, by rank 0, where that can be written; beside each what a kept plan says of it.
        """
        from cas_ckpt.ops.checkout.restores import list_restores

        return list_restores(self._handle, ref, limit=limit)

    # --- bytes --------------------------------------------------------------------------------

    def status(self) -> RepositoryStatus:
        """Where the repository stands: its names, who writes to it, whether a collection is under way.

        Cheap: refs and records are read, no history is followed.
        """
        from cas_ckpt.ops.history.usage import repository_status

        return repository_status(self._handle)

    def stats(self) -> RepositoryStats:
        """The whole repository in numbers."""
        from cas_ckpt.ops.history.usage import repository_stats

        return repository_stats(self._handle)

    def monthly_cost(
        self,
        *,
        commits_per_day: float = 48.0,
        restores_per_day: float = 1.0,
        looks_per_day: float = 100.0,
        collections_per_day: float = 1.0,
        keep_days: float | None = None,
        egress: float = 0.0,
        prices: str = "s3",
        changed_prices: Mapping[str, float] | None = None,
    ) -> MonthlyCost:
        """What a month of this run costs in a bucket: requests, bytes and dollars, from its own commits.

        Args:
            commits_per_day, restores_per_day, looks_per_day, collections_per_day: How often what is done.
            keep_days: For how long commits keep their data; None: for good.
            egress: Share (0 to 1) of what is restored that leaves the vendor's network.
            prices: "s3" or "gs": list prices, which the answer says the date of.
            changed_prices: Others than these, in dollars: "writes" and "reads" (a thousand), "storage" (a GB for a
                month), "egress" (a GB).
        Raises:
            NotFoundError: there is no commit yet. InvalidInputError: a number or name of another kind.
        """
        from cas_ckpt.ops.history.month import MonthRates, monthly_cost, prices_named

        rates = MonthRates(commits_per_day, restores_per_day, looks_per_day, collections_per_day, keep_days, egress)
        return monthly_cost(self._handle, rates, prices_named(prices, {} if changed_prices is None else changed_prices))

    def commit_stats(self, ref: Revision = "HEAD") -> CommitUsage:
        """What one commit holds, added, and has for itself alone."""
        from cas_ckpt.ops.history.usage import commit_stats

        return commit_stats(self._handle, ref)

    def du(
        self, by: str = "commit", *, ref: Revision | None = None, keys: Keys = None, limit: int | None = None
    ) -> list[UsageRow]:
        """Total, new, unique and shared bytes by "commit", "branch", "tensor" or "dtype".

        Args:
            ref: By commit: those it leads to (default: all). By tensor or dtype: the commit they are of.
            keys: By tensor or dtype: only these.
            limit: By commit: at most so many, the youngest.
        """
        from cas_ckpt.ops.history.usage import usage_rows

        return usage_rows(self._handle, by, revision=ref, keys=keys, limit=limit)

    def unique(self, name: str = "HEAD") -> Freed:
        """What only this branch, tag or pin leads to: what goes if it is deleted and its log has expired."""
        from cas_ckpt.ops.gc.freed import unique_to

        return unique_to(self._handle, name)

    def freed(self, *refs: Revision) -> Freed:
        """What forgetting these commits would free at the next collection; nothing is changed.

        Those that a branch, tag or pin names would stay: they are listed in `kept`.
        """
        from cas_ckpt.ops.gc.freed import freed_by

        return freed_by(self._handle, refs)

    # --- retention and collection -------------------------------------------------------------

    def forget(
        self,
        policy: Policy | None = None,
        *,
        revisions: Sequence[Revision] = (),
        branches: Sequence[str] = (),
        dry_run: bool = False,
        gc: bool = False,
        progress: Progress | bool = False,
    ) -> ForgetReport:
        """Forget commits: what no rule of `policy` keeps, or those that `revisions` name.

        A forgotten commit stays in the log; its data is deleted by the next garbage collection,
        unless another commit has it too. Heads of branches, tags and pins are never forgotten. In a
        distributed job call it on one rank.

        Args:
            policy: E.g. `Policy(keep_last=3, keep_daily=7, keep_best="loss:3")`.
            branches: Patterns: apply the rules to these branches alone.
            dry_run: Write nothing; the report says what would be forgotten, and why the rest is kept.
            gc: Collect garbage afterwards.
            progress: Of that collection.
        Raises:
            InvalidInputError: neither rules nor revisions, both, or a revision that a ref names.
            ConflictError: refs were made faster than they could be looked at: try again.
        """
        from cas_ckpt.ops.retention.forget import forget

        return forget(
            self._handle, policy, revisions=revisions, branches=branches, dry_run=dry_run, gc=gc,
            progress=shown(progress),
        )  # fmt: skip

    def apply_policy(
        self, *, branches: Sequence[str] = (), dry_run: bool = False, gc: bool = False,
        progress: Progress | bool = False,
    ) -> ForgetReport:  # fmt: skip
        """Forget what the policy of the repository does not keep; arguments and errors as for `forget`.

        Raises:
            InvalidInputError: the repository has no policy.
        """
        from cas_ckpt.ops.retention.forget import apply_policy

        return apply_policy(self._handle, branches=branches, dry_run=dry_run, gc=gc, progress=shown(progress))

    def policy(self) -> Retention:
        """The rules that the repository carries, for all branches and by pattern; maybe none."""
        from cas_ckpt.ops.retention.policy import read_policy

        return read_policy(self._handle.store)

    def set_policy(self, policy: Policy, *, branch: str | None = None) -> Retention:
        """Let `policy` be the rules of all branches, or of those that match the pattern `branch`; all rules.

        Raises:
            InvalidInputError: a policy without rules.
        """
        from cas_ckpt.ops.retention.policy import set_policy

        return set_policy(self._handle, policy, branch=branch)

    def clear_policy(self, *, branch: str | None = None) -> Retention:
        """Take all rules away, or those for the pattern `branch`; what is left.

        Raises:
            NotFoundError: there are none to take away.
        """
        from cas_ckpt.ops.retention.policy import clear_policy

        return clear_policy(self._handle, branch=branch)

    def gc(
        self,
        *,
        min_age_s: float = 3600.0,
        reflog_expire_s: float = 30 * 86400.0,
        max_unused: float = 0.05,
        max_repack_bytes: int | None = None,
        shard: str | None = None,
        dry_run: bool = False,
        progress: Progress | bool = False,
    ) -> GcReport:
        """Delete what no branch, tag or pin needs. Safe beside any number of writers and readers.

        Args:
            min_age_s: Packs that no published commit used yet are spared for so long: a commit may be under way.
            reflog_expire_s: For so long a deleted or moved branch can be brought back.
            max_unused: Share of the stored bytes that may stay wasted inside packs that hold needed bytes too.
            max_repack_bytes: At most so many bytes are copied out of such packs; None: no limit.
            shard: Only the second seventh of the packs: "2/7"; others collect the rest, at the same time if they like.
            dry_run: Change nothing, tell what would be done.

        Several collections at once do no harm: one goes on, the others raise ConflictError. In a
        distributed job call it on one rank.

        Raises:
            CorruptionError: something that is needed is missing or damaged; nothing was deleted.
            ConflictError: another collection is at work. StorageError: the medium refused; the next
                collection goes on from there.
        """
        from cas_ckpt.core.pack_shards import parse_shard
        from cas_ckpt.ops.gc.gc import collect_garbage
        from cas_ckpt.ops.gc.plan import GcOptions

        own = None if shard is None else parse_shard(shard)
        options = GcOptions(min_age_s, reflog_expire_s, max_unused, max_repack_bytes, shard=own)
        return collect_garbage(self._handle, options, dry_run=dry_run, progress=shown(progress))

    def repack(
        self, *, max_repack_bytes: int | None = None, shard: str | None = None, dry_run: bool = False,
        progress: Progress | bool = False,
    ) -> GcReport:  # fmt: skip
        """Collect, and rewrite every pack that is small, wastes anything or holds parts of chunks.

        Arguments and errors as for `gc`.
        """
        from cas_ckpt.core.pack_shards import parse_shard
        from cas_ckpt.ops.gc.gc import collect_garbage
        from cas_ckpt.ops.gc.plan import REPACK

        own = None if shard is None else parse_shard(shard)
        options = replace(REPACK, max_repack_bytes=max_repack_bytes, shard=own)
        return collect_garbage(self._handle, options, dry_run=dry_run, progress=shown(progress))

    # --- checking and repair ------------------------------------------------------------------

    def fsck(
        self,
        *,
        read_data: bool = False,
        subset: str | None = None,
        shard: str | None = None,
        max_duration_s: float | None = None,
        max_age_s: float | None = None,
        num_threads: int | None = None,
        progress: Progress | bool = False,
    ) -> FsckReport:
        """Look for damage; each problem names the commits, refs and keys that it hits, and the command that repairs it.

        Args:
            read_data: Read and verify every byte, not only the structure.
            subset: Only this part of the data: "5%", "2/7" or "10G" (implies `read_data`).
            shard: Only the second seventh of the packs: "2/7" (implies `read_data`).
            max_duration_s: Begin no pack after so many seconds.
            max_age_s: Pass over packs that were read, and found intact, since then.
        """
        from cas_ckpt.core.pack_shards import parse_shard
        from cas_ckpt.ops.fsck.check import check_open
        from cas_ckpt.ops.fsck.data import DataOptions, parse_subset

        wanted = read_data or subset is not None or shard is not None
        part = None if subset is None else parse_subset(subset)
        own = None if shard is None else parse_shard(shard)
        data = DataOptions(part, max_duration_s, max_age_s, num_threads, shard=own) if wanted else None
        return check_open(self._handle, data, progress=shown(progress))

    def repair(
        self,
        *what: str,
        sources: Sequence[str] = (),
        refs: Mapping[str, str] | None = None,
        read_data: bool = False,
        dry_run: bool = False,
        progress: Progress | bool = False,
    ) -> RepairReport:
        """Repair what `fsck` found; everything is written and verified before anything is moved aside.

        Args:
            what: "packs", "chunks", "refs", "records", "index"; "config" and "state" (see docs/fsck.md first).
            sources: Paths or URLs of other repositories: what is lost here is taken from there, by id.
            refs: Ref ("main", "refs/tags/v1") -> revision that it is to name, where nothing else tells.
            read_data: Read all data, not only packs that the last reading found damaged.
            dry_run: Say what would be done.
        Raises:
            ConflictError: a garbage collection is at work.
        """
        from cas_ckpt.ops.fsck.repair import parse_kinds, repair_open
        from cas_ckpt.ops.fsck.report import RepairRequest

        request = RepairRequest(parse_kinds(what), tuple(sources), dict(refs or {}), read_data, dry_run)
        return repair_open(self._handle, request, progress=shown(progress))

    def rebuild_index(self, *, progress: Progress | bool = False) -> RebuildReport:
        """Make the index anew from the packs; nothing else is touched, and nothing can be lost.

        For an index that is so damaged that `open` refuses it: `cas-ckpt index rebuild`.
        """
        from cas_ckpt.ops.fsck.rebuild import refill_index

        return refill_index(self._handle, progress=shown(progress))


def _texts(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
