"""commit, checkout, load and read of live training state: what joins training/ with ops/commit and ops/checkout.

    commit     capture the state (no copy)  ->  ops/commit/commit.py hashes, packs, publishes
    checkout   load the tree -> plan against the live state -> verify and copy -> finish
    load       load the tree -> new objects -> verify and copy
    read       go down to one entry -> only the leaves of its region

Invariant: what a target gets was verified before any target was touched. Knows no URL.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import msgpack
import torch

from cas_ckpt.arguments import check_flags, texts
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import Brief, CommitInfo, commit_of, info_from_row, layout_of
from cas_ckpt.core.refs import UNKNOWN_HEAD, Head, head_with_part
from cas_ckpt.core.revisions import Revision, resolve_trusted, revision_text
from cas_ckpt.core.tree import find_entry, load_tree, naming_forgotten, select
from cas_ckpt.errors import CorruptionError, InvalidInputError, PeerError, UnsupportedValueError, shown_value
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.layout.key_map import KeyMap, MappedTree
from cas_ckpt.memory import limits, memory_budget, python_gc_paused
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import Box, BoxPlacement, Placement, Spec
from cas_ckpt.objects.state import (
    Container,
    EncodedValue,
    Flavor,
    Path,
    StoredTensor,
    TensorCopy,
    TensorItem,
    parse_key,
    render_key,
    walk,
    with_tensors,
)
from cas_ckpt.objects.values import decode_value
from cas_ckpt.ops.checkout.checkout import (
    Region,
    check_restore,
    fetch_on_ranks,
    fetch_tensors,
    part_of,
    read_array,
    with_values,
)
from cas_ckpt.ops.checkout.derived import without_derived
from cas_ckpt.ops.checkout.restores import CHECKOUT, LOAD, RestoreNote, logged
from cas_ckpt.ops.commit.commit import commit_live
from cas_ckpt.ops.commit.frozen import FrozenMemory
from cas_ckpt.ops.commit.request import REQUIRES_GRAD, CommitRequest
from cas_ckpt.parallel.peers import SOLO, Call, Peers, compare_calls
from cas_ckpt.parallel.workers import default_threads, thread_count
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.signing import Trust
from cas_ckpt.training.capture.capture import capture_state
from cas_ckpt.training.capture.sharded import ShardElements, world_rank
from cas_ckpt.training.capture.tensors import SPARSE_LAYOUTS, ArrayView, HostTensor, cast_items, overlaps_itself
from cas_ckpt.training.restore.draft import SHOWN, Memory, memory_of_array, memory_of_tensor, overlapping, overlaps_self
from cas_ckpt.training.restore.materialize import NewObjects, materialize
from cas_ckpt.training.restore.restore import RestorePlan, plan_restore, refuse_nothing_in_common, refuse_unexpected
from cas_ckpt.training.stateful import Names
from cas_ckpt.transfer.scatter import partly_written

_LOGGER = logging.getLogger("cas_ckpt")


@dataclass(frozen=True, slots=True, repr=False)
class CheckoutReport(Brief):
    """The commit that a checkout restored, and the keys that it left out.

    Attributes:
        commit: The commit that the state holds now.
        missing: Keys that the state has and the commit does not have (only when not strict).
        unexpected: Keys that the commit has and no rank's state has (only when not strict).
        per_rank_skipped: Values kept per rank that stay as they are, because the commit was made
            by another number of ranks.
        unmapped: Keys of the commit that no rule of the key map took; they are as they were.
    """

    commit: CommitInfo
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    per_rank_skipped: tuple[str, ...] = ()
    unmapped: tuple[str, ...] = ()


def commit_state(
    handle: RepositoryHandle,
    state: Mapping[str, Any],
    request: CommitRequest,
    *,
    memory: FrozenMemory | None = None,
    peers: Peers = SOLO,
    progress: Progress = SILENT,
) -> CommitInfo:
    """Commit `state` as it is now; collective, the caller is inside of `collective_errors`.

    Args:
        memory: What this process declared frozen before; None: nothing.
    Raises:
        As for `commit_tree` and `capture_state`.
    """
    tree, request = captured(state, request, peers)
    return commit_live(handle, tree, request, peers=peers, memory=memory, progress=progress)


def captured(state: Mapping[str, Any], request: CommitRequest, peers: Peers) -> tuple[Container, CommitRequest]:
    """`state` as a tree that reads live memory, in the numbers of the group; and `request` with the keys it stands for.

    Raises:
        As `capture_state`. UnsupportedValueError: a rank outside the group has a part of a tensor.
    """
    patterns = [] if request.frozen is None else list(texts("frozen", request.frozen))
    if REQUIRES_GRAD in patterns:
        others = [pattern for pattern in patterns if pattern != REQUIRES_GRAD]
        request = replace(request, frozen=others, frozen_keys=frozenset(Names(state).without_grad()))
    with python_gc_paused():
        tree = capture_state(state, allow_pickle=request.allow_pickle, rank=peers.rank, world_size=peers.size)
        _warn_of_overlaps(tree)
    numbers = numbers_of(peers)
    if numbers is not None:
        tree = with_tensors(tree, lambda item, path: replace(item, placement=_placement(item.placement, numbers, path)))
    return tree, request


@python_gc_paused()  # until the plan is gone: to search it once would cost a seventh of a checkout of small tensors
def checkout_state(
    handle: RepositoryHandle,
    revision: Revision,
    *,
    into: Mapping[str, Any],
    strict: bool = True,
    keys: str | Sequence[str] | None = None,
    allow_pickle: bool = False,
    peers: Peers = SOLO,
    progress: Progress = SILENT,
    trust: Trust | None = None,
    atomic: bool = True,
    key_map: KeyMap | None = None,
) -> CheckoutReport:
    """Make `into` what the commit holds, in place; collective, the caller is inside of `collective_errors`.

    Every rank gives what it has. `handle.head` follows, on all ranks; of a part (`keys`) as `head_with_part` says.

    Raises:
        MismatchError: keys, shapes, dtypes or ties do not agree. CorruptionError: stored bytes
            are damaged, names the tensor. In both cases `into` is untouched, unless the error has keys as
            `overwritten`, which it may if not `atomic`.
        PeerError: another rank failed; what `into` holds on every rank is untouched unless the
            message says otherwise.
        MemoryBudgetError: the limit of memory is too little.
    """
    check_flags(strict=strict, atomic=atomic, allow_pickle=allow_pickle)
    num_neighbours = 1
    if peers.size > 1:
        asked = {
            "revision": revision_text(revision), "strict": strict, "keys": [keys] if isinstance(keys, str) else keys,
            "allow_pickle": allow_pickle, "atomic": atomic, "key_map": key_map,
        }  # fmt: skip
        hosts = compare_calls(peers, Call("checkout", asked), socket.gethostname())
        num_neighbours = hosts.count(hosts[peers.rank])
    if peers.rank == 0:
        found, branch = resolve_trusted(handle, revision, trust)
    if peers.size > 1:
        named = msgpack.packb((found, branch, handle.refs.packs.get(found))) if peers.rank == 0 else None
        found, branch, pack = msgpack.unpackb(peers.broadcast(named))
        if pack is not None:  # so that no rank looks at all packs for what one of them has
            handle.refs.packs[Digest(found)] = pack
    row = commit_of(handle, Digest(found))
    rank, world_size = peers.rank, peers.size
    complete = keys is None and key_map is None
    with logged(handle, row, verb=CHECKOUT, complete=complete, rank=rank, world_size=world_size) as note:
        before = handle.head
        plan, unexpected, mapped = _restore(
            handle, row, note, into=into, strict=strict, keys=keys, allow_pickle=allow_pickle,
            num_neighbours=num_neighbours, peers=peers, progress=progress, atomic=atomic, key_map=key_map,
        )  # fmt: skip
    if keys is None:
        handle.head = Head(branch, Digest(found).hex())
    else:
        handle.head = head_with_part(
            before, Digest(found).hex(), branch, (keys,) if isinstance(keys, str) else keys,
            is_whole=lambda patterns: all(map(KeyPatterns(patterns).selects, (path for path, _ in walk(mapped.tree)))),
        )  # fmt: skip
    if plan.per_rank_skipped and rank == 0:
        _LOGGER.warning(
            "%s: left as they are, for the commit was made by another number of ranks than the %d of this checkout",
            ", ".join(plan.per_rank_skipped), world_size,
        )  # fmt: skip
    return CheckoutReport(info_from_row(row), plan.missing, unexpected, plan.per_rank_skipped, mapped.unmapped)


def _restore(
    handle: RepositoryHandle,
    row: CommitRow,
    note: RestoreNote,
    *,
    into: Mapping[str, Any],
    strict: bool,
    keys: str | Sequence[str] | None,
    allow_pickle: bool,
    num_neighbours: int,
    peers: Peers,
    progress: Progress,
    atomic: bool,
    key_map: KeyMap | None,
) -> tuple[RestorePlan, tuple[str, ...], MappedTree]:
    """Bring the commit into `into`, on all ranks; what was done, the keys that no rank wanted, and all of the commit.

    Ends together on all ranks: whoever fails is known everywhere.
    """
    root = Digest(row.root)
    mapped = mapped_tree(handle, root, key_map, keys, told=peers.rank == 0)
    tree = mapped.tree
    if keys is not None:
        tree = select(tree, KeyPatterns(keys), into_live=True)
    with naming_forgotten(handle, root):
        tree = with_values(handle, tree, allow_pickle=allow_pickle)
    plan = plan_restore(
        into, tree, strict=strict, keys=keys, layout=lambda: mapped.layout(layout_of(handle, row)), rank=peers.rank,
        world_size=peers.size,
    )  # fmt: skip
    unexpected, copies = plan.unexpected, plan.copies
    if peers.size > 1:
        reported = peers.gather_all(msgpack.packb(list(unexpected)))
        nobody = set(unexpected).intersection(*map(msgpack.unpackb, reported))  # what no other rank has either
        unexpected = tuple(key for key in unexpected if key in nobody)
        if strict:
            refuse_unexpected(unexpected)
    if not strict and (plan.missing or unexpected):
        refuse_nothing_in_common(tree, unexpected)
    numbers = numbers_of(peers)
    if numbers is not None:
        copies = tuple(replace(copy, placement=_placement(copy.placement, numbers, copy.path)) for copy in copies)
    note.copies, note.complete = copies, note.complete and not unexpected
    if peers.size == 1:
        copies = tuple(map(_own_part, copies))
    if key_map is not None:  # what it wants of which tensor is nothing that is planned without it
        copies = tuple(without_derived(copies))
    elif peers.size == 1:
        note.add_alone(copies)

    def on_verified() -> None:
        head = handle.head
        handle.head = UNKNOWN_HEAD if keys is None else replace(head, parts=(*head.parts, row.digest.hex()))

    check_restore(copies)
    # Ranks of one machine share its cores and its memory.
    num_threads = thread_count(most=default_threads() // num_neighbours)
    with (
        limits(memory_bytes=memory_budget(num_ranks=num_neighbours), num_threads=num_threads),
        naming_forgotten(handle, root),
    ):
        num_bytes = fetch_on_ranks(
            handle, copies, peers=peers, progress=progress, on_planned=note.planned, on_verified=on_verified,
            atomic=atomic,
        )  # fmt: skip
    plan.finish()
    note.num_bytes = num_bytes
    if peers.size > 1:
        try:
            done = peers.gather_all(msgpack.packb(num_bytes))  # whoever fails to finish is known everywhere
        except PeerError as error:
            raise partly_written(error) from error
        note.num_bytes = sum(map(msgpack.unpackb, done))
    if peers.rank == 0 and note.complete and (peers.size > 1 or plan.per_rank_skipped):  # else all of it was wanted
        note.check_complete(tree)
    return plan, unexpected, mapped


@python_gc_paused()
def load_state(
    handle: RepositoryHandle,
    revision: Revision,
    *,
    keys: str | Sequence[str] | None = None,
    device: Any = None,
    dtype: Any = None,
    allow_pickle: bool = False,
    progress: Progress = SILENT,
    trust: Trust | None = None,
    key_map: KeyMap | None = None,
) -> dict[str, Any]:
    """The state of the commit as new objects in nested dicts.

    Args:
        device: Where tensors of torch go; host memory if None.
        dtype: What dense floating-point tensors of torch become; what they were if None.
    Raises:
        InvalidInputError: no such device or dtype. TooLargeError: more bytes than there is memory.
        MemoryBudgetError: the limit of memory is too little.
        NotFoundError: no such commit, or a pattern that matches nothing. CorruptionError.
    """
    place = None if device is None else _device(device)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidInputError(
            f"dtype is {shown_value(dtype)}: give a floating-point dtype of torch, e.g. torch.bfloat16"
        )
    row = commit_of(handle, resolve_trusted(handle, revision, trust)[0])
    root = Digest(row.root)
    # By the number in the job: a load by each of a thousand ranks is in the log once.
    complete = keys is None and key_map is None
    with logged(handle, row, verb=LOAD, complete=complete, rank=max(world_rank(), 0)) as note:

        def fetch(copies: Sequence[TensorCopy]) -> None:
            if key_map is None:
                note.add_alone(copies)
            else:
                copies = without_derived(copies)
            check_restore(copies)
            note.num_bytes += fetch_tensors(handle, copies, progress=progress, unseen=True)

        mapped = mapped_tree(handle, root, key_map, keys)
        tree = select(mapped.tree, KeyPatterns(keys))
        with naming_forgotten(handle, root):
            tree = with_values(handle, tree, allow_pickle=allow_pickle)
            layout = mapped.layout(layout_of(handle, row))
            loaded: dict[str, Any] = materialize(tree, fetch, device=place, dtype=dtype, layout=layout)
    return loaded


def mapped_tree(
    handle: RepositoryHandle, root: Digest, key_map: KeyMap | None, keys: str | Sequence[str] | None,
    *, told: bool = True,
) -> MappedTree:  # fmt: skip
    """The tree of the state `root` by a key map, of which `keys` are wanted; as it is, without one.

    Args:
        told: Log what no rule took.
    Raises:
        As `KeyMap.applied` and `load_tree`.
    """
    tree = load_tree(handle, root)
    if key_map is None:
        return MappedTree(tree)
    if not isinstance(key_map, KeyMap):
        raise InvalidInputError(f"key_map is {shown_value(key_map)}: give a cas_ckpt.KeyMap")
    mapped = key_map.applied(tree, cast_items)
    selection = KeyPatterns(keys)
    mapped = replace(mapped, unmapped=tuple(key for key in mapped.unmapped if selection.selects(parse_key(key))))
    if mapped.unmapped and told:
        more = f" and {len(mapped.unmapped) - SHOWN} more" if len(mapped.unmapped) > SHOWN else ""
        _LOGGER.warning("no rule of the key map took %s: left as they are", ", ".join(mapped.unmapped[:SHOWN]) + more)
    return mapped


def _device(given: Any) -> torch.device:
    try:
        return torch.empty(0, device=given).device
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise InvalidInputError(
            f"no tensor can be put on the device {shown_value(given)} ({reason}): "
            "give the name of one, e.g. 'cpu' or 'cuda:0'"
        ) from error


def read_entry(
    handle: RepositoryHandle,
    revision: Revision,
    key: str,
    *,
    region: Region | None = None,
    allow_pickle: bool = False,
    progress: Progress = SILENT,
    trust: Trust | None = None,
) -> Any:
    """The entry under `key`, or one region of it: a tensor, an array, a value, or a container.

    Raises:
        NotFoundError: no such commit or key. InvalidInputError: a region outside the tensor,
            or of something that is not a tensor. CorruptionError: a leaf that it needs is damaged.
    """
    row = commit_of(handle, resolve_trusted(handle, revision, trust)[0])
    item = find_entry(handle, Digest(row.root), key)
    fetch = partial(fetch_tensors, handle, progress=progress, unseen=True)
    with naming_forgotten(handle, Digest(row.root)):
        if isinstance(item, StoredTensor) and item.flavor != Flavor.VALUE:
            wanted = part_of(item.spec, region, key=key)
            if wanted == part_of(item.spec, None, key=key):
                return NewObjects().filled(item, parse_key(key), fetch)
            # The part is made as a tensor of its own; its bytes come from the leaves that it touches.
            part = replace(item, spec=Spec(item.spec.dtype, wanted.shape))
            return NewObjects().filled(
                part, parse_key(key), lambda copies: _fetch_region(handle, item, wanted.box, copies)
            )
        if region is not None:
            raise InvalidInputError(f"{key}: only tensors and arrays have regions: read it whole")
        if isinstance(item, Container):
            return materialize(with_values(handle, item, allow_pickle=allow_pickle), fetch)
        if isinstance(item, EncodedValue):
            data = item.data
        elif isinstance(item, StoredTensor):
            data = item.inline if item.inline is not None else read_array(handle, item, item.spec.box).tobytes()
        else:
            raise CorruptionError(f"{key}: nothing can be read from this entry: restore it from a copy")
        return decode_value(data, key=key, allow_pickle=allow_pickle)


def _fetch_region(handle: RepositoryHandle, tensor: StoredTensor, box: Box, copies: Sequence[TensorCopy]) -> None:
    array = read_array(handle, tensor, box)
    for copy in copies:
        place = copy.target.open(copy.stored.spec.box)
        (place if place.dtype == array.dtype else place.view(array.dtype))[...] = array.reshape(place.shape)
        copy.target.done(copy.stored.spec.box, place)


# ------------------------------------------------------------ placements in the numbers of a group
# torch counts ranks in the world, `Peers` in the group. Who holds what stays; only the numbers of the ranks change.


def numbers_of(peers: Peers) -> Mapping[int, int] | None:
    """World rank -> rank in the group; None where they are the same."""
    members = getattr(peers, "members", None)
    if members is None or list(members) == list(range(peers.size)):
        return None
    return {world: own for own, world in enumerate(members)}


def _own_part(copy: TensorCopy) -> TensorCopy:
    """`copy` for a process that is alone in its group: what this process holds of the target is all that it is."""
    if not isinstance(copy.target, ShardElements):
        return copy
    return replace(copy, placement=BoxPlacement(tuple((piece.box, (0,)) for piece in copy.target.pieces)))


def _placement(placement: Placement | None, numbers: Mapping[int, int], path: Path) -> Placement | None:
    """`placement` in the group's numbers.

    Raises:
        UnsupportedValueError: a tensor that a rank outside the group has a part of; names its key.
    """
    if placement is None:
        return None
    try:
        if isinstance(placement, BoxPlacement):
            return BoxPlacement(tuple((box, tuple(numbers[rank] for rank in ranks)) for box, ranks in placement.boxes))
        ranks = tuple(numbers[rank] for rank in placement.mesh.ranks)
        return replace(placement, mesh=replace(placement.mesh, ranks=ranks))
    except KeyError as error:
        raise UnsupportedValueError(
            f"{render_key(path)}: rank {error} has a part of it and is not in the group: open the repository with a "
            "group of all ranks that the mesh has"
        ) from error


# --- what a checkout into the same state will refuse ------------------------------------------
# A state may hold `b`, `b[:4]` and `b[2:6]`: a commit stores each by itself, but to fill one is to overwrite another.


def _warn_of_overlaps(tree: Container) -> None:
    """Log a warning, once in a process for the same keys, of tensors in a captured `tree` that overlap in memory."""
    found = list(_storages(tree))
    counts = Counter(address for address, _, _ in found)
    if len(counts) == len(found):
        return
    # One of each that is tied: those are one tensor.
    shared = {item.identity and item.identity[0]: (source, item) for at, source, item in found if counts[at] > 1}
    item_of = {id(memory): (memory, item) for source, item in shared.values() for memory in _memory(source)}
    marked = set()
    for pair in overlapping([memory for memory, _ in item_of.values()]):
        (one, item), (other, other_item) = (item_of[id(each)] for each in pair)
        if item.spec != other_item.spec or one.same() != other.same():
            marked |= {id(item), id(other_item)}
    if marked:
        _warn(tuple(sorted(render_key(path) for path, item in walk(tree) if id(item) in marked)))


def _storages(tree: Container) -> Iterator[tuple[int, Any, TensorItem]]:
    """The address of the storage of each tensor and array, and what is read of it; several of a divided tensor."""
    for item in tree.children.values():
        if type(item) is Container:
            if item.kind not in SPARSE_LAYOUTS and item.kind != "quantized":  # those get new memory
                yield from _storages(item)
        elif type(item) is TensorItem and item.identity is not None:
            source: Any = item.source
            if type(source) is HostTensor:
                yield item.identity[0][1], source, item
            elif isinstance(source, ArrayView):
                owner = source.bits if source.bits.base is None else source.bits.base
                yield id(owner), source, item
            else:
                for part in source.locals if isinstance(source, ShardElements) else (source,):
                    yield part.tensor.untyped_storage().data_ptr(), part, item


def _memory(source: Any) -> list[Memory]:
    """Where it is, unless it overlaps itself: then a checkout does not fill it."""
    if isinstance(source, ArrayView):
        bits = source.bits
        return [] if overlaps_itself(bits.shape, bits.strides, bits.itemsize) else memory_of_array(bits, ())
    return [] if overlaps_self(source.tensor) else memory_of_tensor(source.tensor, ())


@lru_cache(maxsize=64)
def _warn(keys: tuple[str, ...]) -> None:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    _LOGGER.warning(
        "%s overlap in memory without being one tensor: each is committed, but a checkout into this state will refuse "
        "them, since one would overwrite the other: clone() one, or leave one out",
        ", ".join(keys[:SHOWN]) + more,
    )
