"""What the ranks do together to take a snapshot, before its commit and after it.

    1. they agree where it goes (rank 0 says) and what is replicated
    2. each asks its objects for their state dicts, in the order of their keys; the random state is put back then
    3. they agree which values are one for all
    4. one commit of all ranks                              (snapshot.py)
    5. rank 0 moves the tag of the path to it, in one swap: that replaces the snapshot that was there, if one was
    6. rank 0 writes the file in the snapshot's folder
    7. of what was replaced, all but the last one is forgotten    (removal.py)

Invariant: a snapshot whose folder was renamed is not replaced: it keeps a tag.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from cas_ckpt import CommitInfo, CommitOptions, RNGState, StorageError
from cas_ckpt.integrations.ranks import Ranks
from cas_ckpt.torchsnapshot.opened import Opened, branch_for, forget, is_kept, together
from cas_ckpt.torchsnapshot.places import Place, moved_tag, named_by_file, place_of, write_file
from cas_ckpt.torchsnapshot.removal import TAG, collect
from cas_ckpt.torchsnapshot.sharing import (
    Prepare,
    agreed_globs,
    containers_of,
    divided,
    prepared,
    replicated_globs,
    replicated_paths,
    sharded_paths,
)
from cas_ckpt.torchsnapshot.stateful import Stateful, check_app_state

_LOGGER = logging.getLogger("cas_ckpt")

_POLL_S = 0.05
NAMED_WITHIN_S = 60.0
"""How long another rank waits for the first one to name what all have committed."""


class Taking:
    """What the ranks agreed on before one snapshot is committed.

    Attributes:
        state: What is committed, and `how`: further arguments of the commit.
    """

    def __init__(
        self, path: str, app_state: Mapping[str, Stateful], pg: dist.ProcessGroup | None, replicated: Sequence[str],
        storage_options: dict[str, Any] | None, prepare: Prepare | None,
    ) -> None:  # fmt: skip
        self.pg, self.storage_options = pg, storage_options
        self.ranks = ranks = Ranks(pg)

        def beginning() -> tuple[Place | None, str, list[str]]:
            check_app_state(app_state)
            place = place_of(path, storage_options) if ranks.rank == 0 else None
            return place, os.fspath(path), replicated_globs(replicated, app_state)

        heard = ranks.gather(beginning)
        place = heard[0][0]
        assert place is not None  # noqa: S101
        self.place: Place = place
        if heard[ranks.rank][1] != heard[0][1]:
            _LOGGER.warning("rank %d gave the path %s; that of rank 0 counts: %s", ranks.rank, path, heard[0][1])
        state = self._agreed(app_state, agreed_globs([globs for _, _, globs in heard]), prepare)
        self.opened: Opened = together(place, ranks, create=True)
        branch, begins = ranks.from_first(lambda: branch_for(self.opened))
        self.opened.branch = branch
        self.state = state
        self.how: dict[str, Any] = {
            "branch": branch,
            "message": f"snapshot {place.tag}",
            "meta": {TAG: place.tag},
            "options": CommitOptions(
                orphan=begins, create=True, allow_pickle=place.allow_pickle, on_divergence=place.on_divergence
            ),
        }

    def _agreed(self, app_state: Mapping[str, Stateful], globs: set[str], prepare: Prepare | None) -> dict[str, Any]:
        """The state of this rank, with what is its own marked."""
        ranks, state = self.ranks, dict[str, Any]()

        def captured() -> tuple[bool, bytes, set[str]]:
            state.update(_captured(app_state) if prepare is None else prepared(_captured(app_state), prepare))
            paths = "\0".join(replicated_paths(state, globs)) if ranks.size > 1 else ""
            digest = hashlib.sha256(paths.encode("utf-8", "surrogatepass")).digest()
            return is_kept(self.place, ranks), digest, containers_of(sharded_paths(state)) if ranks.size > 1 else set()

        heard = ranks.gather(captured)
        if not all(kept for kept, _, _ in heard):
            forget(self.place)
        if ranks.size == 1:
            return state
        replicated = set(replicated_paths(state, globs))
        if len({digest for _, digest, _ in heard}) > 1:
            replicated = set.intersection(*ranks.gather(lambda: replicated))
        shared = replicated.union(sharded_paths(state))
        opened = containers_of(replicated).union(*(containers for _, _, containers in heard))
        return divided(state, shared, opened)

    def name(self, made: CommitInfo) -> None:
        """Let the path name the commit; on rank 0."""
        if self.ranks.rank != 0:
            return
        repo, place = self.opened.repo, self.place
        tags, replaced = repo.tags(), named_by_file(place)
        old = tags.get(place.tag)
        if old is not None and old != replaced and place.file is not None:  # its folder has another name now
            repo.tag(moved_tag(old), old, force=True)
        repo.tag(place.tag, made, force=True)
        write_file(place, made.id)
        if replaced is not None and moved_tag(replaced) in tags:
            repo.delete_tag(moved_tag(replaced))
        if old is not None or replaced is not None:
            collect(repo)

    def await_name(self, made: CommitInfo) -> None:
        """On the other ranks, return when rank 0 has let the path name the commit, or a later one; without an exchange.

        Raises:
            StorageError: it has not done so in a minute.
        """
        repo, tag = self.opened.repo, self.place.tag
        for _ in range(int(NAMED_WITHIN_S / _POLL_S)):
            named = repo.tags().get(tag)
            if named == made.id or (named and made.id in {each.id for each in repo.log(named, limit=100)}):
                return
            threading.Event().wait(_POLL_S)
        raise StorageError(f"rank 0 has not named {made.short_id} within {NAMED_WITHIN_S:.0f} s: see the log there")


def _captured(app_state: Mapping[str, Stateful]) -> dict[str, Any]:
    """The state dicts by key, in its order, which is the same on all ranks; random states stay what they were."""
    random = {key: (each, each.state_dict()) for key, each in app_state.items() if isinstance(each, RNGState)}
    state = {key: each if key in random else each.state_dict() for key, each in sorted(app_state.items())}
    for each, before in random.values():  # another object's `state_dict` may have drawn numbers
        each.load_state_dict(before)
    return state
