"""push: commits of this repository go to another one, or into a file, and refs there name them.

    push              1. which refs are meant: those that are named, else what the remote's settings say, else the
                         branch checked out
                      2. send.py copies what the other side lacks, and moves its refs
                      3. remote-tracking branches here name what those refs name now
    create_bundle     the same into a new file (bundle.py): all that the refs need, or, since some commits, what these
                      do not have
    push_pending      every branch of which a tier lacks something, each by itself, so that one that cannot go on holds
                      up no other
    BackgroundPushes  the same in threads, after a commit or on request. A process that died in between is caught up
                      with by the next one, which pushes whatever the tier lacks

A tier is a remote whose branches' commits cannot be forgotten here before they are there (ops/retention/forget.py), so
no collection takes their data.

Invariant: refs there move forward only, unless it is said otherwise; the commits that they named before stay there, in
their logs, for as long as any old target does. What is pending for a tier is what the store says: branches, and where
they were there when it was last asked. An error ends nothing but that push; it is logged at once, raised by whoever
waits, and written down for whoever looks later (core/settings.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from cas_ckpt import clock
from cas_ckpt.arguments import check_path
from cas_ckpt.core.config import Config
from cas_ckpt.core.create import new_store_id, write_config
from cas_ckpt.core.forgotten import read_forgotten_leniently
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import graph_with
from cas_ckpt.core.publish import ANY_HEAD, AnyHead, check_meaning
from cas_ckpt.core.refs import Ref, RefKind
from cas_ckpt.core.revisions import Revision, current_branch, named_ref, resolve, revision_texts
from cas_ckpt.core.settings import Remote, note_push, read_settings
from cas_ckpt.core.units import PackShard
from cas_ckpt.errors import AmbiguousIdError, CkptError, ConflictError, InvalidInputError, NotFoundError
from cas_ckpt.memory import limits
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.sync.bundle import BundleInfo, BundleWriter, handle_on
from cas_ckpt.ops.sync.remotes import (
    is_wanted,
    opened,
    parse_refspec,
    recognise,
    remember,
    remote_named,
    set_remote,
    whole_name,
)
from cas_ckpt.ops.sync.send import RefUpdate, SendOptions, SyncReport, send
from cas_ckpt.parallel.workers import Background
from cas_ckpt.progress import SILENT, Progress

_LOGGER = logging.getLogger("cas_ckpt")


@dataclass(frozen=True, slots=True)
class PushRequest:
    """Options of a push.

    Attributes:
        remote: A name, a URL, or a path; None: origin.
        refs: Refspecs; empty: see the story above.
        delete: Refs of the other side that are to go.
        every_branch, every_tag: All branches, all tags, besides `refs`.
        force: Also where a ref would not move forward.
        shard: Copy only chunks out of these packs, and move no ref.
        lease: With force, only where the ref still is where its remote-tracking branch says (True), or at this commit.
    """

    remote: str | os.PathLike[str] | None = None
    refs: Sequence[str] = ()
    delete: Sequence[str] = ()
    every_branch: bool = False
    every_tag: bool = False
    force: bool = False
    lease: bool | str = False
    dry_run: bool = False
    max_bandwidth: float | None = None
    progress: Progress = SILENT
    shard: PackShard | None = None


def push(handle: RepositoryHandle, request: PushRequest) -> SyncReport:
    """Send commits to another repository, and move its refs.

    Raises:
        ConflictError: a ref of the other side would not move forward, or moved meanwhile: nothing is lost there.
        NotFoundError: no such ref, remote or commit here. NoRepositoryError: there is none at the other side.
    """
    name, url, remote = remote_named(handle, request.remote)
    updates = updates_of(handle, request, () if remote is None else remote.push)
    updates = [_leased(handle, update, request, name) for update in updates]
    if not updates:
        raise InvalidInputError("nothing to push: there are no such branches or tags here")
    options = SendOptions("push", request.dry_run, request.max_bandwidth, request.progress, shard=request.shard)
    with opened(url, read_only=request.dry_run, cache=handle.cache_place) as other:
        if remote is not None:
            recognise(handle, other, remote, dry_run=request.dry_run)
        updates = [_as_there(other, update, request) for update in updates]
        default = other.default_branch
        if any(one.target is None and one.kind is RefKind.BRANCH and one.name == default for one in updates):
            raise InvalidInputError(f"{default!r} is the default branch of {other.store.url} and stays")
        new = [one for one in updates if one.kind is RefKind.TAG and one.target is not None and not one.force]
        there = {ref.name for ref in other.refs.list(RefKind.TAG)} if new else set()
        for update in new:
            if update.name not in there:
                check_meaning(other, update.kind, update.name, handle, unless="force=True")
        report = send(handle, other, updates, options, near=handle)
    if name is not None and not (request.dry_run or request.shard or handle.read_only):
        # Remote-tracking branches follow. What was pushed is there, whether or not this is written down here.
        heads = {f"{name}/{one.name}": one.target for one in updates if one.kind is RefKind.BRANCH}
        try:
            remember(handle, heads, "push")
        except CkptError as error:
            _LOGGER.warning("what was pushed to %s is not noted here, fetch does it: %s", name, error)
    return report


def updates_of(handle: RepositoryHandle, request: PushRequest, usual: Sequence[str] = ()) -> list[RefUpdate]:
    """Updates of the remote's refs that `request` asks for; `usual`: patterns of branches if it names none."""
    found: dict[str, RefUpdate] = {}
    for update in _each_update(handle, request, usual):
        known = found.setdefault(update.key, update)
        if known != update:
            raise InvalidInputError(f"{update.key} of the other side is to be two things at once: name it once")
    return list(found.values())


def _each_update(handle: RepositoryHandle, request: PushRequest, usual: Sequence[str]) -> Iterator[RefUpdate]:
    given = [parse_refspec(text) for text in request.refs]
    if not (given or request.delete or request.every_branch or request.every_tag):
        if usual:
            branches = [ref for ref in handle.refs.list(RefKind.BRANCH) if is_wanted(ref.name, usual)]
            yield from (RefUpdate.of(ref, force=request.force) for ref in branches)
            return
        given = [parse_refspec(RefKind.BRANCH.value + current_branch(handle))]
    for spec in given:
        if not spec.source:
            yield RefUpdate(*whole_name(spec.target, RefKind.BRANCH), None)
            continue
        ref = _local(handle, spec.source)
        kind = RefKind.BRANCH if ref is None else ref.kind
        if spec.target:
            kind, target = whole_name(spec.target, kind)
        elif ref is not None:
            target = ref.name
        else:
            resolve(handle, spec.source)  # what is not there at all needs no name
            raise InvalidInputError(
                f"{spec.source!r} is no branch or tag: say what to call it there, {spec.source}:BRANCH"
            )
        digest = None if ref is None else ref.target
        if digest is None:
            digest = resolve(handle, spec.source)
            if digest in read_forgotten_leniently(handle.store):
                raise NotFoundError(f"commit {digest.hex()[:12]} was forgotten: its data cannot be pushed")
        note = ref.note if ref is not None and kind is not RefKind.BRANCH else None
        same = ref is not None and (ref.kind, ref.name) == (kind, target)
        signature = ref.signature if ref is not None and same else None
        yield RefUpdate(kind, target, digest, request.force or spec.force, note=note, signature=signature)
    for text in request.delete:
        yield RefUpdate(*whole_name(text, RefKind.BRANCH), None)
    kinds = [*([RefKind.BRANCH] * request.every_branch), *([RefKind.TAG] * request.every_tag)]
    yield from (RefUpdate.of(ref, force=request.force) for ref in (handle.refs.list(*kinds) if kinds else ()))


def _local(handle: RepositoryHandle, name: str) -> Ref | None:
    """The branch, tag or pin of this name here; None: `name` is another revision."""
    try:
        ref = named_ref(handle, name)
    except AmbiguousIdError:
        raise
    except InvalidInputError:
        return None  # main~3, HEAD
    return None if ref is None or ref.kind is RefKind.REMOTE else ref


def _leased(handle: RepositoryHandle, update: RefUpdate, request: PushRequest, name: str | None) -> RefUpdate:
    if not request.lease:
        return update
    if not isinstance(request.lease, bool):
        expected: Digest | None | AnyHead = resolve(handle, request.lease)
    elif name is None:
        raise InvalidInputError("a lease needs a named remote, or the commit that the ref is expected to name")
    elif update.kind is not RefKind.BRANCH:
        expected = ANY_HEAD
    else:
        known = handle.refs.find(RefKind.REMOTE, f"{name}/{update.name}")
        expected = None if known is None else known.target
    return replace(update, force=True, expected=expected)


def _as_there(other: RepositoryHandle, update: RefUpdate, request: PushRequest) -> RefUpdate:
    """A deletion of a plain name is that of the branch or of the tag that is called so there, as in git.

    Raises:
        InvalidInputError: both are there.
    """
    if update.target is not None or not {update.name, f":{update.name}"} & {*request.delete, *request.refs}:
        return update
    refs = [other.refs.find(kind, update.name) for kind in (RefKind.BRANCH, RefKind.TAG)]
    kinds = [ref.kind for ref in refs if ref is not None and ref.target is not None]
    if len(kinds) > 1:
        raise InvalidInputError(
            f"{update.name!r} is a branch and a tag of {other.store.url}: say refs/heads/{update.name} or "
            f"refs/tags/{update.name}"
        )
    return replace(update, kind=kinds[0]) if kinds else update


# --- into a file ---------------------------------------------------------------------------------


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
    place = Path(check_path(path))
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


# --- to tiers ------------------------------------------------------------------------------------


def make_tier(handle: RepositoryHandle, name: str) -> Remote:
    """The remote `name`, marked as a tier.

    Raises:
        NotFoundError: there is none.
    """
    remote = read_settings(handle.store).remote(name)
    return remote if remote.tier else set_remote(handle, name, tier=True)


def pending_branches(handle: RepositoryHandle, tier: Remote) -> Mapping[str, str]:
    """Branch that the tier is to have -> its head here, where that differs from what the tier had when last asked."""
    refs = list(handle.refs.list(RefKind.BRANCH, RefKind.REMOTE))
    there = {ref.name: ref.target for ref in refs if ref.kind is RefKind.REMOTE}
    return {
        ref.name: ref.target.hex()
        for ref in refs
        if ref.kind is RefKind.BRANCH and ref.target is not None and is_wanted(ref.name, tier.push)
        and there.get(f"{tier.name}/{ref.name}") != ref.target
    }  # fmt: skip


def push_pending(
    handle: RepositoryHandle, name: str, *, max_bandwidth: float | None = None, progress: Progress = SILENT
) -> list[SyncReport]:
    """Push every branch of which the tier `name` lacks something; a report for each that was pushed.

    Raises:
        NotFoundError: there is no such remote. What the first push that failed raised, after all were tried.
    """
    tier = make_tier(handle, name)
    reports: list[SyncReport] = []
    failures: list[CkptError] = []
    for branch in pending_branches(handle, tier):
        request = PushRequest(name, [RefKind.BRANCH.value + branch], max_bandwidth=max_bandwidth, progress=progress)
        try:
            reports.append(push(handle, request))
        except CkptError as error:
            failures.append(error)
            if not isinstance(error, (ConflictError, InvalidInputError)):
                break  # the tier cannot be reached: the others would fare no better
    try:
        note_push(handle.store, name, failures[0] if failures else None)  # for `status` and `log`
    except CkptError as refused:  # no failure of the push
        _LOGGER.warning("how the push to %s ended is not noted here: %s", name, refused)
    if failures:
        raise failures[0]
    return reports


class BackgroundPushes:
    """The threads in which one handle pushes to its tiers, one for each. Threads may share it."""

    def __init__(self, handle: RepositoryHandle) -> None:
        self._handle = handle
        self._threads: dict[str, Background] = {}

    def wake(self, name: str) -> None:
        """Push to the tier `name` what it lacks, from now on. Returns at once."""
        try:
            made = Background(lambda: push_pending(self._handle, name), failed=lambda error: _log_failure(name, error))
            self._threads.setdefault(name, made).wake()
        except MemoryError as error:  # no thread can be had: the commit that is to be pushed is made
            _log_failure(name, error)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all of them have ended, for so long together; whether they have.

        Raises:
            What the last push to a tier raised, after all have ended; of several the first, the others were logged.
        """
        deadline_s = None if timeout_s is None else clock.monotonic_s() + timeout_s
        done, failures = True, list[Exception]()
        for each in list(self._threads.values()):
            left_s = None if deadline_s is None else max(deadline_s - clock.monotonic_s(), 0.0)
            try:
                done &= each.wait(left_s)
            except Exception as error:  # noqa: BLE001 - raised below, once the others have ended
                failures.append(error)
        if failures:
            raise failures[0]
        return done


def _log_failure(name: str, error: Exception) -> None:
    """Say at once what a push in the background failed of: training goes on, the commit is here."""
    _LOGGER.warning("not pushed to %s yet, the next commit tries again: %s", name, error)
