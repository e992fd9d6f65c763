"""tier: what is committed to a fast store is pushed to a slower one in the background.

    1. a remote is marked as a tier: commits of branches that are not there yet cannot be forgotten here
       (ops/retention/forget.py), so no collection takes their data
    2. after a commit, or on request, every branch of which the tier lacks something is pushed, each by itself,
       so that one that cannot go on holds up no other
    3. a process that died in between is caught up with by the next one, which pushes whatever the tier lacks

Invariant: what is pending is what the store says: branches, and where they were at the tier when it was last asked;
nothing is remembered elsewhere. An error ends nothing but that push; it is logged at once, raised by whoever waits, and
written down for whoever looks later (core/push_failures.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from cas_ckpt import clock
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.push_failures import note_push
from cas_ckpt.core.refs import RefKind
from cas_ckpt.core.settings import Remote, read_settings
from cas_ckpt.errors import CkptError, ConflictError, InvalidInputError
from cas_ckpt.ops.sync.push import PushRequest, push
from cas_ckpt.ops.sync.remotes import is_wanted, set_remote
from cas_ckpt.ops.sync.send import SyncReport
from cas_ckpt.parallel.workers import Background
from cas_ckpt.progress import SILENT, Progress

_LOGGER = logging.getLogger("cas_ckpt")


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
    _note(handle, name, failures[0] if failures else None)
    if failures:
        raise failures[0]
    return reports


def _note(handle: RepositoryHandle, name: str, error: CkptError | None) -> None:
    """Let `status` and `log` say how it ended. That this cannot be written down is no failure of the push."""
    try:
        note_push(handle.store, name, error)
    except CkptError as refused:
        _LOGGER.warning("how the push to %s ended is not noted here: %s", name, refused)


class BackgroundPushes:
    """The threads in which one handle pushes to its tiers, one for each. Threads may share it."""

    def __init__(self, handle: RepositoryHandle) -> None:
        self._handle = handle
        self._threads: dict[str, Background] = {}

    def wake(self, name: str) -> None:
        """Push to the tier `name` what it lacks, from now on. Returns at once."""
        try:
            self._threads.setdefault(name, self._background(name)).wake()
        except MemoryError as error:  # no thread can be had: the commit that is to be pushed is made
            _log_failure(name, error)

    def _background(self, name: str) -> Background:
        return Background(lambda: push_pending(self._handle, name), failed=lambda error: _log_failure(name, error))

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
