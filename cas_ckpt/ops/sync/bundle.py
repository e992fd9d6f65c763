"""bundle: commits in one file, for where no network goes.

    create   a push into a file (bundle_file.py): all that the refs need, or, since some commits, what they do not have
    take     a fetch out of it: verified like anything that comes from elsewhere; refs move forward
    verify   every byte of it is read and hashed, and what it needs is looked for here

Invariant: as in send.py. A bundle that was cut short, or changed, is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from cas_ckpt.core.config import Config
from cas_ckpt.core.create import new_store_id, write_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import graph_with, read_graph
from cas_ckpt.core.packs import read_directory
from cas_ckpt.core.refs import RefKind
from cas_ckpt.core.revisions import Revision, resolve, revision_texts
from cas_ckpt.core.settings import check_remote_name
from cas_ckpt.errors import ConflictError, CorruptionError, InvalidInputError
from cas_ckpt.memory import limits
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.ops.sync.bundle_file import BundleStore, BundleWriter, handle_on, opened_bundle, require_prerequisites
from cas_ckpt.ops.sync.fetch import may_come
from cas_ckpt.ops.sync.push import PushRequest, updates_of
from cas_ckpt.ops.sync.send import RefUpdate, SendOptions, SyncReport, send
from cas_ckpt.parallel.workers import thread_count
from cas_ckpt.progress import SILENT, Progress, phase
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.scan import BadExtent, ScanUnit, scan_units, verify_units


@dataclass(frozen=True, slots=True)
class BundleInfo:
    """What is in a bundle; ids are whole.

    Attributes:
        refs: Whole name of each ref -> the commit that it names.
        prerequisites: Commits that whoever takes it must have.
        num_commits, num_packs, num_bytes: What it carries, and its length.
    """

    path: str
    refs: dict[str, str]
    prerequisites: tuple[str, ...]
    num_commits: int
    num_packs: int
    num_bytes: int


def create_bundle(
    handle: RepositoryHandle, path: str | os.PathLike[str], refs: Sequence[str] = (), *,
    since: Sequence[Revision] = (), force: bool = False, progress: Progress = SILENT,
) -> BundleInfo:  # fmt: skip
    """Write a bundle with all that `refs` need.

    Args:
        refs: Refspecs, as for a push; empty: the branch that is checked out.
        since: Without what these have, which whoever takes it must have.
        force: Replace a file that is there.
    Raises:
        ConflictError: the file is there. InvalidInputError: there is nothing in it. NotFoundError: no such ref.
    """
    place = Path(path)
    if os.path.exists(place) and not force:
        raise ConflictError(f"{place} exists already: choose another name, or replace it with force=True")
    updates = updates_of(handle, PushRequest(refs=refs))
    tips = [update.target for update in updates if update.target is not None]
    if not tips or len(tips) < len(updates):
        raise InvalidInputError("a bundle names commits: nothing is to be deleted by it")
    assumed = frozenset(resolve(handle, revision) for revision in revision_texts(since))
    graph = graph_with(handle, [*tips, *assumed])
    carried = graph.reached(tips, without=graph.ancestors(assumed))
    if not carried:
        raise InvalidInputError("there is nothing to bundle: what is assumed to be there has it all")
    needed = [Digest(parent) for parent in graph.parents(carried) if parent not in carried]
    writer = BundleWriter(place)
    try:
        config = Config(new_store_id(), handle.default_branch, handle.config.encoding, handle.config.pack_bytes)
        write_config(writer, config)
        options = SendOptions("bundle", progress=progress, assumed=assumed)
        with closing(handle_on(writer, config)) as target:
            with limits(num_threads=1):  # it is one file
                report = send(handle, target, updates, options, near=handle)
            num_bytes = writer.finish(needed)
    finally:
        writer.close()
    named = {ref.ref: ref.new for ref in report.refs if ref.new is not None}
    wanted = tuple(sorted(one.hex() for one in needed))
    return BundleInfo(str(place), named, wanted, report.num_commits, report.num_packs, num_bytes)


def read_bundle(path: str | os.PathLike[str]) -> BundleInfo:
    """What a bundle says that it carries.

    Raises:
        NotFoundError: there is no such file. CorruptionError: it is not a whole bundle.
    """
    with opened_bundle(path) as (store, source):
        return _info(store, source)


def _info(store: BundleStore, source: RepositoryHandle) -> BundleInfo:
    refs = {f"{ref.kind.value}{ref.name}": ref.target.hex() for ref in source.refs.list() if ref.target is not None}
    wanted = tuple(sorted(one.hex() for one in store.prerequisites))
    num_commits = len(read_graph(source).commits)
    return BundleInfo(
        store.url.removeprefix("bundle://"), refs, wanted, num_commits, len(source.present_packs()), store.size_bytes
    )


def take_bundle(
    handle: RepositoryHandle, path: str | os.PathLike[str], *, remote: str | None = None, dry_run: bool = False,
    progress: Progress = SILENT,
) -> SyncReport:  # fmt: skip
    """Bring the commits of a bundle here; its branches move those of the same names forward, or begin them.

    Args:
        remote: Its branches become branches of this remote (`NAME/main`) instead; it need not be set.
    Raises:
        NotFoundError: it needs commits that are not here. ConflictError: a branch here has commits of its own, or a
            tag names another commit. CorruptionError: it is damaged, or was changed.
    """
    with opened_bundle(path) as (store, source):
        require_prerequisites(handle, store)
        updates = []
        own = {(ref.kind, ref.name) for ref in handle.refs.list(RefKind.BRANCH, RefKind.TAG)}
        for ref in source.refs.list(RefKind.BRANCH, RefKind.TAG, RefKind.PIN):
            if remote is not None and ref.kind is RefKind.BRANCH:
                name = f"{check_remote_name(remote)}/{ref.name}"
                updates.append(RefUpdate(RefKind.REMOTE, name, ref.target, force=True))
            elif ref.kind is RefKind.PIN or (ref.kind, ref.name) in own or may_come(handle, source, ref):
                note = None if ref.kind is RefKind.BRANCH else ref.note
                updates.append(RefUpdate(ref.kind, ref.name, ref.target, note=note, signature=ref.signature))
        options = SendOptions("bundle", dry_run, progress=progress)
        return replace(send(source, handle, updates, options, near=handle), url=store.url)


def verify_bundle(handle: RepositoryHandle, path: str | os.PathLike[str], *, progress: Progress = SILENT) -> BundleInfo:
    """Read and hash every byte of a bundle, and see that it and this repository have all that its commits need.

    Raises:
        CorruptionError: it is damaged. NotFoundError: it needs commits that are not here, or lacks something.
    """
    with opened_bundle(path) as (store, source):
        require_prerequisites(handle, store)
        bad: list[BadExtent] = []
        with phase(progress, "verifying", store.size_bytes):
            verify_units(
                store, _units(store), done=lambda _, found: bad.extend(found), num_threads=thread_count(),
                progress=progress,
            )  # fmt: skip
        if bad:
            raise CorruptionError(f"{store.url}: {len(bad)} objects are damaged: {bad[0].what}: copy the file again")
        refs = [ref for ref in source.refs.list() if ref.target is not None]
        updates = [RefUpdate(RefKind.REMOTE, f"bundle/{ref.name}", ref.target, force=True) for ref in refs]
        send(source, handle, updates, SendOptions("verify", dry_run=True), near=handle)
        return _info(store, source)


def _units(store: Store) -> Iterator[ScanUnit]:
    for key, _ in store.list(PACK_PREFIX):
        yield from scan_units(key, read_directory(store, key)[1])
