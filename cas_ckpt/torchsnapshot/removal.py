"""Snapshots that were replaced or deleted give their space back.

    a path that is taken to again     the commit before the replaced one is forgotten, and garbage is collected: whoever
                                      reads the replaced one has until the next snapshot to finish
    delete_snapshot                   the tag is deleted, the commit is forgotten, garbage is collected

A commit that is the head of a branch stays until another snapshot follows it there.

Invariant: only commits that snapshots made are forgotten, and none that a tag, a branch or a pin names. A failure is
logged, and costs nothing but space until the next one.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from cas_ckpt import CkptError, NoRepositoryError, NotFoundError, Repository
from cas_ckpt.torchsnapshot.failures import NotInSnapshotError
from cas_ckpt.torchsnapshot.places import moved_tag, place_of

_LOGGER = logging.getLogger("cas_ckpt")

TAG = "torchsnapshot"
"""What the metadata of commits that are snapshots has their tags under."""

_MOST = 1000
"""Commits that are looked at, the youngest first: what is older was dealt with before."""


def delete_snapshot(path: str, storage_options: dict[str, Any] | None = None) -> None:
    """Delete the snapshot at `path`, and its folder if nothing else is in it; its space is given back. On one rank.

    Of a copy of a snapshot's folder the folder alone goes.

    Raises:
        NotInSnapshotError: there is none.
    """
    place = place_of(path, storage_options)
    try:
        with Repository.open(place.repository, group=None, **place.options) as repo:
            commit = repo.resolve(place.commit or f"refs/tags/{place.tag}")
            for tag in (place.tag, moved_tag(commit)):
                if repo.tags().get(tag) == commit:
                    repo.delete_tag(tag)
            if place.file is not None:
                with suppress(OSError):  # something else is in the folder, or it is gone
                    Path(place.file).unlink(missing_ok=True)
                    os.rmdir(place.file.parent)
            collect(repo)
    except (NoRepositoryError, NotFoundError) as error:
        raise NotInSnapshotError(f"there is no snapshot at {place.path} to be deleted") from error


def collect(repo: Repository) -> None:
    """Forget snapshots that nothing names, but for the one that each path had last, and collect garbage."""
    try:
        tags = repo.tags()
        named = {*tags.values(), *repo.branches().values(), *(pin.commit for pin in repo.pins())}
        spared: set[str] = set()
        for commit in repo.log(all_refs=True, limit=_MOST):
            tag = commit.meta.get(TAG) if isinstance(commit.meta, dict) else None
            if not isinstance(tag, str) or commit.id in named or commit.forgotten:
                continue
            if tag in tags and tag not in spared:
                spared.add(tag)
                continue
            repo.forget(revisions=commit.id)
        repo.gc()
    except CkptError as error:
        _LOGGER.warning("space of snapshots that are gone was not given back, the next one tries again: %s", error)
