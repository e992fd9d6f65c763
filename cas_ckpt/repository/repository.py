"""`Repository`, the one class that people use: its own verbs are those that training state goes in and comes out by."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from types import FrameType
from typing import TYPE_CHECKING, Any

from cas_ckpt.arguments import (
    Device,
    ExportFormat,
    Keys,
    SnapshotKind,
    TorchDtype,
    WorkerKind,
    check_flags,
    check_path,
    one_text,
)
from cas_ckpt.errors import InvalidInputError, shown_value
from cas_ckpt.events import reported
from cas_ckpt.ops.commit.options import CommitOptions, ImportOptions
from cas_ckpt.progress import Progress, shown
from cas_ckpt.repository.commits import CommitVerbs
from cas_ckpt.repository.names import NameVerbs
from cas_ckpt.repository.opened import given_key, given_trust
from cas_ckpt.repository.upkeep import UpkeepVerbs

if TYPE_CHECKING:
    from cas_ckpt.core.records import CommitInfo, ImportInfo
    from cas_ckpt.core.revisions import Revision
    from cas_ckpt.formats.safetensors import ExportInfo
    from cas_ckpt.layout.key_map import KeyMap
    from cas_ckpt.ops.checkout.checkout import Region
    from cas_ckpt.ops.commit.request import CommitRequest
    from cas_ckpt.signing import Trusted
    from cas_ckpt.training.background.pending import PendingCommit
    from cas_ckpt.training.verbs import CheckoutReport


class Repository(CommitVerbs, NameVerbs, UpkeepVerbs):
    """An open repository.

    A revision is what people write for a commit: a branch or tag, at least four digits of an
    id, `HEAD` (what was checked out; of a fresh object the default branch), `step:3000`, with
    `~N` (N first parents back) or `^N` (N-th parent) behind it; a `CommitInfo` will do as well.
    Every method raises only `CkptError`s, but what Python itself raises of an argument of another type; in general
    `NotFoundError` for revisions and keys that are not there, `CorruptionError` for stored bytes that are not
    what was written, `StorageError` when the medium refuses. The methods below name what comes on top.

    An object follows one live state: `head` says where it came from, and `commit` goes on from there. Open
    another one for another state.

    `progress=True`: bytes, rate and time left, as a bar on a terminal, else as lines in the log `cas_ckpt` (INFO)
    or, where no log takes them, on standard error; or an object of your own with the methods of `Progress`.

    Threads may share an object; commits made through one object run one after another.
    Use it as a context manager, or call `close`.
    """

    @reported
    def commit(
        self, state: Mapping[str, Any], *, message: str | None = "", step: int | None = None,
        metrics: Mapping[str, float] | None = None, branch: str | None = None, meta: Any = None, frozen: Keys = None,
        push_to: str | None = None, progress: Progress | bool = False, options: CommitOptions | None = None,
    ) -> CommitInfo:  # fmt: skip
        """Commit `state` as it is now; the commit is there whole, and durable, when this returns.

        In a distributed job all ranks call it together, each with its own part of the state, and
        all get the same commit.

        Args:
            message: Text for people; None is the same as empty.
            step: The training step.
            metrics: Numbers by name; NaN and infinities too.
            state: Names to objects with state_dict/load_state_dict, nested dicts and lists of
                tensors and plain values. Nobody may change it during the call.
            branch: Where it goes: the branch that was checked out if not given, else the default branch. A new
                one begins at the commit that the state came from (`head`).
            meta: A plain value that is kept with the commit.
            frozen: Keys whose tensors do not change in this process: hashed once, then compared byte by byte with
                a checksum. "requires_grad": all parameters, of modules in the state, that require none.
            push_to: A remote that gets the commit, and all else that it lacks, in a thread behind the caller's back;
                until it has it, the commit cannot be forgotten here. What fails is logged, and tried again by the next.
            options: The rest, in place of the `commit_options` of the repository.
        Raises:
            PeerError: another rank failed, is gone, or disagrees; says who and what.
            UnsupportedValueError: something in the state cannot be expressed; names its key.
            FrozenChangedError: a frozen tensor is not what it was.
            InvalidInputError: no branch is checked out, or it may not be begun like this; says how.
            ConflictError: the branch leads elsewhere than to what the state came from, or has moved.
            OutOfSpaceError: nothing is lost; free some space and commit again.
            SignatureError: the branch takes signed commits only, and this is not signed as it wants.
            MemoryBudgetError: the limit of memory is too little; says how much is needed. Nothing was written.
        """
        from cas_ckpt.training.verbs import commit_state

        with self._turn_for("commit"), self._ranks.together():
            if self._background is not None:
                self._background.queue.raise_failure()
            request = self._request(
                sys._getframe(2), options, branch=branch, message=message, step=step, metrics=metrics, meta=meta,
                frozen=frozen,
            )  # fmt: skip
            push = self._pushing(push_to)
            made = commit_state(
                self._handle, state, request, memory=self._frozen, peers=self._ranks.peers, progress=shown(progress)
            )
            if push is not None:
                push()
            return made

    @reported
    def commit_async(
        self, state: Mapping[str, Any], *, message: str | None = "", step: int | None = None,
        metrics: Mapping[str, float] | None = None, branch: str | None = None, meta: Any = None, frozen: Keys = None,
        push_to: str | None = None, snapshot: SnapshotKind = "copy", worker: WorkerKind = "thread",
        progress: Progress | bool = False, options: CommitOptions | None = None,
    ) -> PendingCommit:  # fmt: skip
        """Begin a commit of `state` as it is now, and return while it goes on in the background.

        The commit is the state at the moment of the call, whatever becomes of the state afterwards. Commits of one
        object land in the order of the calls, those of `commit` among them; `commit`, `checkout` and `close` wait for
        what is pending, and all of them for saves that `dcp.async_save` began to this object. `head` moves when each is
        made. In a distributed job all ranks call it together; it goes on over connections of its own, and what one rank
        fails of fails the commit on all.

        What a commit fails of is logged at once, and raised by `result`; if nobody has asked for that, by the next
        `commit` or `commit_async` (as the cause of a BackgroundCommitError), or by `drain` or `close`.

        Args:
            state: As for `commit`, as are all arguments that are not named here. It may change as soon as the call
                returns. Tensors on a GPU are hashed there at the call, and what the last such commit stored of them is
                not staged; nor is what is `frozen`, and known.
            snapshot: "copy": the state is copied while the call lasts. "lazy": parameters and optimizer state are
                copied after it, while the next forward and backward run; the next step of an optimizer waits for
                that. Who changes them otherwise calls `wait_staged` first: else the commit fails (StateChangedError).
            worker: "thread": the commit is made by a thread of this process. "process": by a process of its own, so
                that hashing and encoding do not hold this interpreter; one for each repository, on Linux, and not for
                `memory://`. It ends with this process.
        Raises:
            BackgroundCommitError: an earlier commit failed, and nobody has heard of it yet; nothing was begun.
            UnsupportedValueError: something in the state cannot be expressed; names its key.
            InvalidInputError: an argument that cannot be read or stored.
            PermissionDeniedError: the repository was opened to be read.
            What only making the commit shows is raised by `result`: a branch that may not be begun, a detached head,
            `frozen` that matches nothing, a limit of memory that is too little, and whatever else `commit` raises.
        """
        self._refuse_inside("commit_async")
        background, peers = self._in_background(), self._ranks.background
        with background.calling(peers):
            request = self._request(
                sys._getframe(2), options, branch=branch, message=message, step=step, metrics=metrics, meta=meta,
                frozen=frozen, snapshot=snapshot, worker=worker,
            )  # fmt: skip
            push = self._pushing(push_to)
            return background.commit(
                state, request, peers=peers, num_neighbours=self._ranks.num_neighbours, memory=self._frozen,
                progress=shown(progress), on_made=push, after=self._in_flight(),
            )  # fmt: skip

    def _request(self, caller: FrameType, options: CommitOptions | None, **call: Any) -> CommitRequest:
        """The request of a commit; `caller` is the frame that called the method."""
        from cas_ckpt.ops.commit.request import CommitRequest

        if call["frozen"] is not None and self._frozen is None:
            from cas_ckpt.ops.commit.frozen import FrozenMemory

            self._frozen = FrozenMemory()
        options = self.commit_options if options is None else options
        if not isinstance(options, CommitOptions):
            raise InvalidInputError(f"options is {shown_value(options)}: give CommitOptions")
        sign = options.sign if self._ranks.peers.rank == 0 else None
        return CommitRequest.of(
            options, **call, sign=given_key(sign),
            called_at=f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}",
        )  # fmt: skip

    def _pushing(self, push_to: str | None) -> Callable[[], None] | None:
        """A function that begins a push to the remote `push_to` after a commit; None if there is none to begin."""
        if push_to is None or self._ranks.peers.rank != 0:
            return None
        from cas_ckpt.ops.sync.push import BackgroundPushes, make_tier

        make_tier(self._handle, push_to)
        pushes = self._pushes = self._pushes or BackgroundPushes(self._handle)
        return partial(pushes.wake, push_to)

    @reported
    def checkout(
        self,
        ref: Revision = "HEAD",
        *,
        into: Mapping[str, Any],
        strict: bool = True,
        keys: Keys = None,
        atomic: bool = True,
        allow_pickle: bool = False,
        trust: Trusted | None = None,
        progress: Progress | bool = False,
        key_map: KeyMap | None = None,
    ) -> CheckoutReport:
        """Make `into` what the commit holds, in place: the same objects, the same tensors.

        Everything is verified before the first tensor is touched, on any rank. In a distributed
        job all ranks call it together, each with what it wants to hold: any number of ranks,
        divided in any way, whatever the commit was made with.

        Args:
            ref: A branch is checked out as such: commits go to it. Anything else detaches `head`.
            strict: Keys must agree; otherwise what only one side has is left alone and reported.
            keys: Restore only these. Parts of one commit that are all of it are that commit; of another part `head`
                takes note, and the next commit's lineage (`partly-from`).
            atomic: False reads everything once instead of twice, and verifies it where it is put: if something is
                damaged, `overwritten` of the error names the tensors that may have been written into. Of several
                ranks everything is verified first all the same.
            allow_pickle: Unpickle what was pickled. Only for commits that you trust.
            trust: Whose signature the commit needs, or the tag that `ref` is; see `verify`. Rank 0 asks for it.
            key_map: By which names, shapes and dtypes `into` has what the commit holds. `keys` are names of `into`.
        Raises:
            SignatureError: nobody who is trusted signed it; `into` is untouched.
            MismatchError: keys, shapes, dtypes or ties do not agree; `into` is untouched.
            CorruptionError: names the tensor; `into` is untouched, if `atomic`.
            MemoryBudgetError: the limit of memory is too little; `into` is untouched.
            PartialRestoreError: a target's own `load_state_dict` raised.
            PeerError: another rank failed, is gone, or disagrees.
        """
        from cas_ckpt.training.verbs import checkout_state

        with self._turn_for("checkout"), self._ranks.together():
            self._frozen = None  # what was frozen may hold other bytes now, rightly
            return checkout_state(
                self._handle, ref, into=into, strict=strict, keys=keys, atomic=atomic, allow_pickle=allow_pickle,
                peers=self._ranks.peers, progress=shown(progress), trust=given_trust(trust), key_map=key_map,
            )  # fmt: skip

    @reported
    def load(
        self,
        ref: Revision = "HEAD",
        *,
        keys: Keys = None,
        device: Device | None = None,
        dtype: TorchDtype | None = None,
        map_location: Device | None = None,
        allow_pickle: bool = False,
        trust: Trusted | None = None,
        progress: Progress | bool = False,
        key_map: KeyMap | None = None,
    ) -> dict[str, Any]:
        """The state of the commit as new objects in nested dicts.

        Args:
            keys: Load only these; a list of which a part is left out becomes a dict by number.
            device: Where tensors of torch go, e.g. "cuda"; host memory if not given.
            dtype: What dense floating-point tensors of torch become, e.g. torch.bfloat16; what they were if not given.
            map_location: Another name of `device`, as in `torch.load`.
            allow_pickle: Unpickle what was pickled. Only for commits that you trust.
            trust: Whose signature the commit needs, or the tag that `ref` is; see `verify`.
            key_map: By which names, shapes and dtypes the state has what the commit holds. `keys` are those names.
        Raises:
            SignatureError: nobody who is trusted signed it.
            TooLargeError: more bytes than there is memory; see `cas_ckpt.limits`.
            MemoryBudgetError: the limit of memory is too little.
        """
        check_flags(allow_pickle=allow_pickle)
        from cas_ckpt.training.verbs import load_state

        if device is not None and map_location is not None:
            raise InvalidInputError("device= and map_location= are two names of one thing: give one of them")
        return load_state(
            self._handle, ref, keys=keys, device=map_location if device is None else device, dtype=dtype,
            allow_pickle=allow_pickle, progress=shown(progress), trust=given_trust(trust), key_map=key_map,
        )  # fmt: skip

    @reported
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
            NotFoundError: no such key.
            InvalidInputError: an integer outside the tensor, a step, or another kind of index.
        """
        check_flags(allow_pickle=allow_pickle)
        from cas_ckpt.training.verbs import read_entry

        return read_entry(
            self._handle, ref, one_text("key", key), region=region, allow_pickle=allow_pickle, progress=shown(progress),
            trust=given_trust(trust),
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

    @reported
    def import_file(
        self, path: str | PathLike[str], *, message: str | None = None, step: int | None = None,
        metrics: Mapping[str, float] | None = None, branch: str | None = None, onto: Revision | None = None,
        prefix: str = "", progress: Progress | bool = False, options: ImportOptions | None = None,
    ) -> ImportInfo:  # fmt: skip
        """Commit what a .pt, .pth, .bin or .safetensors file holds, or a folder.

        Folders are those of Hugging Face's models and Trainer, Accelerate, torch.distributed.checkpoint, torchsnapshot.

        The file is read in pieces, and no code in it is ever run. `message` says what was
        imported unless it is given; the other arguments are those of `commit`. What it follows is
        for the caller to say: the live state, and `head`, have nothing to do with it.

        Args:
            branch: Where it goes: on top of a branch that is there; a new one begins a history of its
                own, or at `onto`. The default branch, if that has no commit yet.
            onto: What it follows: a branch, or any revision beside `branch`.
            prefix: The key under which everything goes, e.g. "base"; the top if empty.
            options: The rest, in place of the `commit_options` of the repository.
        Returns:
            The commit; `renamed` says how names differ from those in the files. `left_out` names each file of a
            folder that is not in it, and why. So does its metadata, under "left_out" (a `meta` that is no dict is
            then under "meta"), and `cas-ckpt log`.
        Raises:
            InvalidInputError: not such a file, malformed, or a pickle that wants to run code.
        """
        from cas_ckpt.formats.models import request_on
        from cas_ckpt.formats.verbs import import_any
        from cas_ckpt.ops.commit.request import CommitRequest

        self._refuse_inside("import_file")
        if message is None:
            name = os.fsencode(check_path(path))
            message = f"import {name.decode(errors='backslashreplace')}"  # not all names are UTF-8
        common, reading = (self.commit_options, ImportOptions()) if options is None else (options, options)
        if not isinstance(reading, ImportOptions):
            raise InvalidInputError(f"options is {shown_value(options)}: give ImportOptions")
        if not isinstance(common, CommitOptions):
            raise InvalidInputError(f"commit_options is {shown_value(common)}: give CommitOptions")
        request = CommitRequest.of(
            common, branch=branch, message=message, step=step, metrics=metrics, meta=reading.meta,
            sign=given_key(common.sign),
        )  # fmt: skip
        with self._turn():
            request = request_on(self._handle, request, onto)
            return import_any(
                self._handle, path, request, prefix=prefix, follow_links=reading.follow_links, adapter=reading.adapter,
                keep_names=reading.keep_names, progress=shown(progress),
            )  # fmt: skip

    @reported
    def export(
        self, ref: Revision, path: str | PathLike[str], *, format: ExportFormat | None = None,  # noqa: A002
        max_shard_bytes: int | None = None, keys: Keys = None, adapter: str | None = None, force: bool = False,
        trust: Trusted | None = None, progress: Progress | bool = False, key_map: KeyMap | None = None,
    ) -> ExportInfo:  # fmt: skip
        """Write the commit to `path`, every byte verified.

        A process that is killed leaves nothing beside `path`, but for what comes after the first 200 files of one
        export, or where the system has no files without names: those are in the making under names like
        `.NAME.0123456789abcdef.tmp`. No later export removes them, as it cannot know that their writer is dead; delete
        them when no export is running.

        Args:
            format: "safetensors", "torch" or "dcp" (a folder for torch.distributed.checkpoint);
                by the end of the name if not given. A name without a known end becomes a
                folder of safetensors, as `save_pretrained` writes it. "trainer", "accelerate", "deepspeed", "lightning"
                (its folders of shards), "megatron" (of commits by CasStrategy, too) and "torch_checkpointing" write the
                folder that an import of such a folder read.
            max_shard_bytes: Length at which a file of a folder is closed; None: 5 GB.
            keys: Export only these.
            adapter: Write the adapter of a PeftModel that has this name, as a folder that PEFT opens. The commit has
                its adapter_config.json under "files", as an import puts it there, or `path` has it already.
            force: Replace files that are there already.
            trust: See `load`.
            key_map: By which names, shapes and dtypes the files have what the commit holds. `keys` are those names.
                For safetensors, torch and dcp.
        Raises:
            MemoryBudgetError: the limit of memory is too little.
            ConflictError: a file is there already. UnsupportedValueError: names the key that
                the format cannot hold. InvalidInputError: no such format.
        """
        check_flags(force=force)
        from cas_ckpt.formats.verbs import export_any

        return export_any(
            self._handle, ref, path, format=format, max_shard_bytes=max_shard_bytes, keys=keys, adapter=adapter,
            force=force, progress=shown(progress), trust=given_trust(trust), key_map=key_map,
        )  # fmt: skip
