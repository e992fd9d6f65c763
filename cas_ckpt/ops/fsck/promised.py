"""Chunks that are not here because remotes promised them: how many they are and, if asked for, whether they have them.

Invariant: what a promisor was not seen to lack is no problem: one that cannot be reached is noted. Nothing is brought.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import promisors
from cas_ckpt.errors import CkptError
from cas_ckpt.index import contents
from cas_ckpt.index.candidates import covers
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.ops.fsck.problems import ProblemFinder
from cas_ckpt.ops.fsck.report import Effect, Findings, ProblemKind, RepairKind
from cas_ckpt.storage.bucket_url import without_secrets
from cas_ckpt.storage.store import Store


def note_promised(store: Store, finder: ProblemFinder, findings: Findings) -> None:
    """Note how many chunks are not here because a remote keeps them."""
    names = ", ".join(remote.name for remote in promisors(store))
    findings.count("num_promised", len(finder.promised))
    findings.note(
        PACK_PREFIX,
        f"{len(finder.promised)} chunks are not here, and promised by {names}: they are brought when they are read; "
        "cas-ckpt fsck --remote asks whether they are still there",
    )


def ask_promisors(
    store: Store, finder: ProblemFinder, findings: Findings, *, cache: str | os.PathLike[str] | None
) -> None:
    """Add to `findings` what no promisor has any more of what was promised; whom nobody could ask is noted.

    Args:
        cache: As for `RepositoryHandle.open`, of the promisors.
    """
    numbers = {Digest(digest): number for number, digest in finder.integrity.digests(finder.promised).items()}
    left, unreached = set(numbers), False
    for remote in promisors(store) if left else ():
        try:
            left -= _there(remote.place(store), left, cache)
        except CkptError as error:
            unreached = True
            place = f"remote {remote.name} ({without_secrets(remote.url)})"
            findings.note(PACK_PREFIX, f"{place} cannot be asked for what it promised: {error}")
    if not left or unreached:
        return
    impact = finder.impact({numbers[digest] for digest in left})
    findings.problem(
        ProblemKind.MISSING, PACK_PREFIX,
        f"{len(left)} chunks that commits need are not here, and the remotes that promised them do not have them",
        effect=Effect.LOST, repair=RepairKind.CHUNKS, objects=impact.objects, hits=impact.hits, refs=impact.refs,
    )  # fmt: skip


def _there(place: str, digests: Collection[Digest], cache: str | os.PathLike[str] | None) -> set[Digest]:
    """Those of these objects that are whole in packs of the repository at `place`."""
    other = RepositoryHandle.open(place, read_only=True, cache=cache)
    try:
        other.sync()
        located = other.index.read(contents.locate, list(digests))
    finally:
        other.close()
    return {digest for digest in digests if covers(located.get(digest, ()))}
