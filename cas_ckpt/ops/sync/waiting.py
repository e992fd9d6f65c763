"""waiting: commits that tiers do not have yet. Apart from what pushes them, so that a log imports little."""

from __future__ import annotations

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import read_graph, unpushed_commits
from cas_ckpt.core.push_failures import PushFailure, read_push_failures
from cas_ckpt.core.refs import RefKind
from cas_ckpt.core.settings import read_settings


def unpushed(handle: RepositoryHandle) -> dict[str, list[str]]:
    """Tier -> the commits of branches that it did not have when it was last asked, by id; tiers that have all too.

    A repository that is not local has none: what is far is not in front of anything slower.
    """
    if not handle.store.abilities.local:
        return {}
    tiers = [remote for remote in read_settings(handle.store).remotes if remote.tier]
    refs = list(handle.refs.list(RefKind.BRANCH, RefKind.REMOTE)) if tiers else []
    graph = read_graph(handle)
    return {tier.name: sorted(one.hex() for one in unpushed_commits(graph, refs, [tier])) for tier in tiers}


def push_failures(handle: RepositoryHandle) -> dict[str, PushFailure]:
    """Tier that lacks commits -> how the last push of what waits for it failed; without tiers where none did."""
    if not handle.store.abilities.local:
        return {}
    failures = read_push_failures(handle.store)
    waiting = unpushed(handle) if failures else {}
    return {name: failure for name, failure in failures.items() if waiting.get(name)}
