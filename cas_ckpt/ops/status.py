"""status: where a repository stands: its names, who writes to it, what waits for a collection.

Invariant: reads refs, records and one commit; no history is followed, nothing is written, and the index is asked
for the place of that one commit alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cas_ckpt import clock
from cas_ckpt.config import read_gc_state, require_there
from cas_ckpt.ops.given_up import given_up
from cas_ckpt.ops.records import Brief, CommitInfo, commit_of, info_from_row
from cas_ckpt.refs import Head, RefKind
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.sessions import live_sessions
from cas_ckpt.storage.store import sweep_temporaries


@dataclass(frozen=True, slots=True)
class LiveSession:
    """A commit that is being written somewhere.

    Attributes:
        host, process: Where it runs; "" and 0 if a later version of cas_ckpt wrote the record.
        started_s, heard_s: When it began, and when it was last heard of, in seconds since 1970.
    """

    host: str
    process: int
    started_s: float
    heard_s: float


@dataclass(frozen=True, slots=True, repr=False)
class RepositoryStatus(Brief):
    """Where a repository stands.

    Attributes:
        head: Where the live state of this object came from; it belongs to one process and is stored nowhere.
        commit: The head commit of the default branch; None: it has none yet.
        branches, tags, pins: Name -> id of the commit, by name.
        sessions: Commits under way, the oldest first. One tells of itself after half a minute; shorter ones do not.
        gc_phase: "idle"; or "condemned" or "deleting": a collection is at work, or was broken off, and the
            next one goes on with it.
        gc_generation: Number of the collection that began last.
        num_condemned: Packs that this collection may delete.
        num_forgotten: Commits that were forgotten and that no branch, tag or pin names.
        num_temporaries, temporary_bytes: Unfinished files that writers left when they died; `gc` removes them.
    """

    url: str
    default_branch: str
    head: Head
    commit: CommitInfo | None
    branches: Mapping[str, str]
    tags: Mapping[str, str]
    pins: Mapping[str, str]
    sessions: tuple[LiveSession, ...]
    gc_phase: str
    gc_generation: int
    num_condemned: int
    num_forgotten: int
    num_temporaries: int
    temporary_bytes: int


def repository_status(handle: RepositoryHandle) -> RepositoryStatus:
    """Where the repository stands now.

    Raises:
        CorruptionError: a ref, a record or the head commit of the default branch is damaged.
        NotFoundError: that commit is in no pack.
    """
    refs = list(handle.refs.list())
    if not refs:
        require_there(handle.store)
    named = {
        kind: {ref.name: ref.target for ref in refs if ref.kind is kind and ref.target is not None}
        for kind in RefKind
    }
    default = handle.config.default_branch
    target = named[RefKind.BRANCH].get(default)
    state = read_gc_state(handle.store)
    left = sweep_temporaries(handle.store, clock.now_s(), dry_run=True)
    branches, tags, pins = ({name: one.hex() for name, one in named[kind].items()} for kind in RefKind)
    return RepositoryStatus(
        url=handle.store.url,
        default_branch=default,
        head=handle.head,
        commit=None if target is None else info_from_row(commit_of(handle, target)),
        branches=branches,
        tags=tags,
        pins=pins,
        sessions=_sessions(handle),
        gc_phase=state.phase,
        gc_generation=state.generation.number,
        num_condemned=len(state.condemned),
        num_forgotten=len(given_up(handle, refs)),
        num_temporaries=left.num_files,
        temporary_bytes=left.num_bytes,
    )


def _sessions(handle: RepositoryHandle) -> tuple[LiveSession, ...]:
    found = sorted(live_sessions(handle.store), key=lambda one: (one.started_us, one.key))
    return tuple(LiveSession(one.host, one.process, one.started_us / 1e6, one.heard_us / 1e6) for one in found)
