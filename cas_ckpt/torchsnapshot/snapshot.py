"""`Snapshot` and `PendingSnapshot`: how snapshots are taken, restored and looked into.

A snapshot is taken by all ranks of a process group together (taking.py): one commit of all ranks, which the path names
then; nothing is named if it fails anywhere.

Invariant: a `Snapshot` that was taken, or has been looked into, stays the one of that moment, whatever is taken to its
path afterwards; it can be read until its path was taken to twice more. A path never names half a snapshot.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from cas_ckpt import CommitInfo, ImportOptions, NoRepositoryError, NotFoundError, PendingCommit, Repository, RNGState
from cas_ckpt.integrations.ranks import Ranks
from cas_ckpt.torchsnapshot.contents import Contents, Found
from cas_ckpt.torchsnapshot.failures import NotInSnapshotError, PendingSnapshotError
from cas_ckpt.torchsnapshot.manifest import Entry, SnapshotMetadata
from cas_ckpt.torchsnapshot.opened import forget, is_kept, new_branch, reader, together
from cas_ckpt.torchsnapshot.places import Place, place_of, write_file
from cas_ckpt.torchsnapshot.sharing import Prepare, is_sharded
from cas_ckpt.torchsnapshot.stateful import Stateful, check_app_state
from cas_ckpt.torchsnapshot.taking import Taking
from cas_ckpt.torchsnapshot.targets import Planned, plan_object

_LOGGER = logging.getLogger("cas_ckpt")


class Snapshot:
    """A snapshot: one that was taken to a path, here or by another process.

        snapshot = Snapshot.take("runs/a/step-10", {"model": model, "optim": optim})
        Snapshot("runs/a/step-10").restore({"model": model, "optim": optim})

    Attributes:
        path: Where it was taken to.
        pg: The process group whose ranks restore it together.
    """

    def __init__(
        self, path: str, pg: dist.ProcessGroup | None = None, storage_options: dict[str, Any] | None = None
    ) -> None:
        """Nothing is read yet.

        Args:
            path: A folder, "fs://" and a folder, or "s3://bucket/name", "gs://bucket/name".
            pg: None: the default process group, if there is one.
            storage_options: "repository": another one than that beside the snapshot, its path or URL; "allow_pickle":
                pickle, and unpickle, what cannot be stored otherwise; "on_divergence": "warn" keeps the lowest rank's
                of replicated values that differ, and logs which; "index_url", "cache", "timeout_s": as for
                `Repository.open`. Of URLs, all others are settings in the URL of the repository ("region", "endpoint").
        """
        self.path = path
        self.pg = pg
        self._storage_options = storage_options
        self._place: Place | None = None
        self._commit: str | None = None
        self._contents: Contents | None = None

    # ------------------------------------------------------------ take

    @classmethod
    def take(
        cls,
        path: str,
        app_state: Mapping[str, Stateful],
        pg: dist.ProcessGroup | None = None,
        replicated: Sequence[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        _custom_tensor_prepare_func: Prepare | None = None,
    ) -> Self:
        """Take a snapshot of the objects; it is there whole, and durable, when this returns.

        All ranks of the process group call it together. A snapshot that was at `path` is replaced, in one step.

        Args:
            path: Where; if the ranks differ, that of rank 0 counts.
            app_state: Names to objects with `state_dict` and `load_state_dict`.
            replicated: Globs of paths ("model/**") of what is the same on all ranks: stored once, and restored by any
                number of ranks. What differs is an error. DistributedDataParallel counts by itself.
        Raises:
            NotStatefulError: an object is none. PeerError: another rank failed, or holds something else under a path
            that is replicated. UnsupportedValueError: a value that only pickle could store.
        """
        taking = Taking(path, app_state, pg, replicated or (), storage_options, _custom_tensor_prepare_func)
        try:
            made = taking.opened.repo.commit(taking.state, **taking.how)
        except BaseException:
            taking.opened.branch = None  # another process may have gone on with it: the next one chooses anew
            raise
        taking.ranks.gather(lambda: taking.name(made))
        return cls._taken(taking, made)

    @classmethod
    def async_take(
        cls,
        path: str,
        app_state: Mapping[str, Stateful],
        pg: dist.ProcessGroup | None = None,
        replicated: Sequence[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        _custom_tensor_prepare_func: Prepare | None = None,
    ) -> PendingSnapshot:
        """Begin a snapshot of the objects as they are now; they may change as soon as this returns.

        Arguments as for `take`. What making it fails of is logged, and raised by `PendingSnapshot.wait`; what was at
        `path` stays then.
        """
        taking = Taking(path, app_state, pg, replicated or (), storage_options, _custom_tensor_prepare_func)
        pending = taking.opened.repo.commit_async(taking.state, **taking.how)
        return PendingSnapshot(pending, taking, cls)

    # ------------------------------------------------------------ restore

    def restore(self, app_state: Mapping[str, Stateful], strict: bool = True) -> None:
        """Make the objects what the snapshot has of them, in place where they allow it.

        All ranks call it together. Every byte is verified before any tensor is touched. Random states come last.

        Args:
            app_state: As for `take`, or a part of it.
            strict: The names in modules must agree.
        Raises:
            NotInSnapshotError: no such snapshot, or it has nothing for a key. MismatchError: an object does not agree
            with what the snapshot has for it. CorruptionError: stored bytes are damaged; nothing was touched.
        """
        ranks = Ranks(self.pg)

        def plan() -> tuple[bool, list[str], bool]:
            contents = self._looked_into()
            planned.update(
                (key, plan_object(value, key, contents, rank=ranks.rank, world_size=ranks.size, strict=strict))
                for key, value in sorted(app_state.items())
            )
            keys = [key for key, each in planned.items() if each.target is not None]
            return is_kept(self._where(), ranks), keys, _covers_more(contents, keys)

        planned: dict[str, Planned] = {}
        self._agree(ranks, app_state)
        heard = ranks.gather(plan)
        contents, place = self._looked_into(), self._where()
        if not all(kept for kept, _, _ in heard):
            forget(place)
        opened = together(place, ranks, create=False)
        keys = sorted({key for _, each, _ in heard for key in each})
        if keys:
            is_all = set(keys) == set(contents.root.children)
            opened.repo.checkout(
                contents.commit,
                into={key: each.target for key, each in planned.items() if each.target is not None},
                strict=strict and (is_all or not any(more for _, _, more in heard)),
                keys=None if is_all else [contents.of_key(key).key for key in keys],
                allow_pickle=place.allow_pickle,
            )
            opened.branch = None
        for each in planned.values():
            if each.left:
                _LOGGER.warning("%s: it stays as it is", each.left)
        later = [(app_state[key], each.later) for key, each in planned.items() if each.later is not None]
        for _, (target, state) in sorted(later, key=lambda pair: isinstance(pair[0], RNGState)):
            target.load_state_dict(state)

    # ------------------------------------------------------------ look into it

    def read_object(self, path: str, obj_out: Any = None, memory_budget_bytes: int | None = None) -> Any:
        """One object of the snapshot, read and verified; nothing else is read. Not collective.

        Args:
            path: "<rank>/<key>/<names>", as in the manifest.
            obj_out: A tensor to be filled and returned, if it has the shape and dtype that the snapshot has; also one
                that is divided over ranks, of which this rank's part is filled. Of anything else, a new object.
            memory_budget_bytes: Memory that reading may take beside the tensor, about; at least a few hundred
                kilobytes. With it `obj_out` is filled piece by piece: if damage is found, some of it is overwritten.
        Raises:
            NotInSnapshotError: there is no such path.
        """
        contents = self._looked_into()
        found = contents.find(path)
        node = found.node
        if obj_out is None or found.inside or not node.has_tensors or node.children:
            return contents.value(found)
        if is_sharded(obj_out):
            contents.repo.checkout(contents.commit, into=_nested(contents, found, obj_out), keys=node.key, strict=False)
            return obj_out
        fits = isinstance(obj_out, torch.Tensor) and node.dtype is not None and node.shape == tuple(obj_out.shape)
        if not fits or str(obj_out.dtype) != f"torch.{node.dtype}" or node.kind != "tensor":
            _LOGGER.warning(
                "%s: obj_out is a %s, which it cannot be loaded into; it is returned as a new object",
                path, type(obj_out).__name__,
            )  # fmt: skip
            return contents.value(found)
        if memory_budget_bytes is None:
            contents.repo.checkout(contents.commit, into=_nested(contents, found, obj_out), keys=node.key, strict=False)
        else:
            _fill(contents, node.key, obj_out.detach(), memory_budget_bytes)
        return obj_out

    def get_manifest(self) -> dict[str, Entry]:
        """The entries of the snapshot by "<rank>/<key>/<path>": a copy."""
        return copy.deepcopy(self.metadata.manifest)

    @property
    def metadata(self) -> SnapshotMetadata:
        """The manifest, and how many ranks took the snapshot."""
        return self._looked_into().metadata

    def get_state_dict_for_key(self, key: str) -> dict[str, Any]:
        """The state dict that was taken of one object, as new objects: this rank's own, and what is one for all.

        Raises:
            NotInSnapshotError: nothing was taken under this key.
        """
        state: dict[str, Any] = self._looked_into().state_of(key, Ranks(self.pg).rank)
        return state

    @classmethod
    def _taken(cls, taking: Taking, made: CommitInfo) -> Self:
        """The snapshot that a commit is."""
        snapshot = cls(taking.place.path, taking.pg, taking.storage_options)
        snapshot._place, snapshot._commit = taking.place, made.id
        return snapshot

    def _agree(self, ranks: Ranks, app_state: Mapping[str, Stateful]) -> None:
        """Let all ranks mean the snapshot that rank 0 finds: they may have looked at different moments."""

        def look() -> str | None:
            check_app_state(app_state)
            try:
                return self._looked_into().commit if ranks.rank == 0 else None
            except NotInSnapshotError:
                return None

        found = ranks.gather(look)[0]
        if found is None:
            raise _absent(self._where())
        if found != self._commit:
            self._commit, self._contents = found, None

    def _where(self) -> Place:
        if self._place is None:
            self._place = place_of(self.path, self._storage_options)
        return self._place

    def _looked_into(self) -> Contents:
        place = self._where()
        repo = self._reader(place)
        if self._contents is None or self._contents.repo is not repo:
            if self._commit is None:
                try:
                    self._commit = repo.resolve(place.commit or f"refs/tags/{place.tag}")
                except NotFoundError as error:
                    raise _absent(place) from error
            self._contents = Contents(repo, self._commit, allow_pickle=place.allow_pickle)
        return self._contents

    @staticmethod
    def _reader(place: Place) -> Repository:
        try:
            return reader(place)
        except NoRepositoryError as error:
            raise _absent(place) from error


class PendingSnapshot:
    """A snapshot that `Snapshot.async_take` began.

    Attributes:
        path: Where it is taken to.
        pg: The process group whose ranks take it.
    """

    def __init__(self, pending: PendingCommit, taking: Taking, kind: type[Snapshot]) -> None:
        """`Snapshot.async_take` makes it."""
        self.path = taking.place.path
        self.pg = taking.pg
        self._pending, self._taking, self._kind = pending, taking, kind
        self._ended = threading.Event()
        self._error: BaseException | None = None
        pending.add_done_callback(self._name)

    def wait(self) -> Snapshot:
        """The snapshot, once it is there whole, and durable.

        Raises:
            PendingSnapshotError: it was not taken; the cause says why.
        """
        self._pending.exception()
        self._ended.wait()
        if self._error is not None:
            raise PendingSnapshotError(f"{self.path}: the snapshot was not taken: {self._error}") from self._error
        return self._kind._taken(self._taking, self._pending.result())

    def done(self) -> bool:
        """Whether it has ended: taken, or failed."""
        return self._ended.is_set()

    def _name(self, pending: PendingCommit) -> None:
        """Name the commit, as soon as it is made; called by the thread that made it."""
        try:
            self._error = pending.exception()
            if self._error is not None:
                self._taking.opened.branch = None  # as in `take`
            else:
                name = self._taking.await_name if self._taking.ranks.rank else self._taking.name
                name(pending.result())
        except Exception as error:  # noqa: BLE001 - `wait` raises it
            self._error = error
            _LOGGER.error("%s: the snapshot was not taken: %s", self.path, error)  # noqa: TRY400
        finally:
            self._ended.set()


def import_snapshot(
    folder: str | os.PathLike[str], path: str, storage_options: dict[str, Any] | None = None
) -> Snapshot:
    """Make a snapshot at `path` of one that torchsnapshot wrote to `folder`, which stays as it is. On one rank alone.

    Nothing in the folder is run; the snapshot restores as it did there, into any number of ranks that it allowed.

    Raises:
        InvalidInputError: no folder of torchsnapshot, damaged, or it wants to run code. What `take` raises.
    """
    place = place_of(path, storage_options)
    with Repository.open(place.repository, create=True, group=None, **place.options) as repo:
        is_empty = repo.latest(repo.default_branch) is None
        made = repo.import_file(
            folder,
            branch=repo.default_branch if is_empty else new_branch(),
            options=ImportOptions(keep_names=True, allow_pickle=place.allow_pickle),
        )
        repo.tag(place.tag, made, force=True)
    write_file(place, made.id)
    return Snapshot(path, storage_options=storage_options)


def _absent(place: Place) -> NotInSnapshotError:
    return NotInSnapshotError(f"there is no snapshot at {place.path} (the tag {place.tag!r} in {place.repository})")


def _covers_more(contents: Contents, keys: Sequence[str]) -> bool:
    """Whether the keys as patterns select other keys of the app state, too: "a" selects "a.b"."""
    others = contents.root.children.keys() - set(keys)
    return any(str(other).startswith(f"{key}.") or "*" in key or "?" in key for other in others for key in keys)


def _nested(contents: Contents, found: Found, value: Any) -> dict[str, Any]:
    """`value` in the containers that lead to it."""
    names, nodes = found.node.path, [contents.root]
    for name in names:
        nodes.append(nodes[-1].children[name])
    for name, node in zip(reversed(names), reversed(nodes[:-1]), strict=True):
        if node.kind in ("list", "tuple"):
            filled = [None] * int(name) + [value]
            value = tuple(filled) if node.kind == "tuple" else filled
        else:
            value = {name: value}
    nested: dict[str, Any] = value
    return nested


def _fill(contents: Contents, key: str, out: torch.Tensor, budget_bytes: int) -> None:
    """Read a tensor into `out`, so many bytes at a time."""
    if out.dim() == 0 or out.nbytes <= budget_bytes:
        out.copy_(contents.repo.read(contents.commit, key))
        return
    row_bytes = max(1, out.nbytes // out.shape[0])
    rows = max(1, budget_bytes // row_bytes)
    for start in range(0, out.shape[0], rows):
        stop = min(start + rows, out.shape[0])
        out[start:stop].copy_(contents.repo.read(contents.commit, key, region=slice(start, stop)))
