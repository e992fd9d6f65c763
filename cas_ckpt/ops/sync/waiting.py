"""waiting: commits that tiers do not have yet. Apart from what pushes them, so that a log imports little."""

from __future__ import annotations

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import unpushed_by_tier
from cas_ckpt.core.push_failures import PushFailure, read_push_failures


def unpushed(handle: RepositoryHandle) -> dict[str, list[str]]:
    """Tier -> the commits of branches that it did not have when it was last asked, by id; tiers that have all, too.

    Of a repository that is not local this is not asked, as every log would take a request more for it: `status` says
    how many there are.
    """
    if not handle.store.abilities.local:
        return {}
    return {name: sorted(one.hex() for one in found) for name, found in unpushed_by_tier(handle).items()}


def push_failures(handle: RepositoryHandle) -> dict[str, PushFailure]:
    """Tier that lacks commits -> how the last push of what waits for it failed; without tiers where none did."""
    if not handle.store.abilities.local:
        return {}
    failures = read_push_failures(handle.store)
    waiting = unpushed(handle) if failures else {}
    return {name: failure for name, failure in failures.items() if waiting.get(name)}
