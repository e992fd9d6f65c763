"""Orphaned commits: those that were published, and that nothing leads to any more.

A ref that is lost, or that was put back from an older copy, leaves commits that no ref, log of a ref, record of
forgotten commits or of released ones (forgotten.py) leads to. So does a writer that dies before its swap: that one was
never acknowledged, and is garbage. They are told apart by what only an acknowledged commit has:

  - another commit follows it: a writer takes its parent from a ref; or
  - the index remembers that a ref named it: it is told so after the swap alone; or
  - it follows an orphan. It may have died before its swap all the same: which of the two, nobody can know.

Invariant: a commit without any of these is not an orphan, so that writers that are killed again and again fill
nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from cas_ckpt.index.graph import CommitLinks
from cas_ckpt.ops.merge_base import ancestors


def orphaned(
    links: Mapping[bytes, CommitLinks], known: Iterable[bytes], remembered: Collection[bytes],
    *, now: Mapping[bytes, CommitLinks] | None = None,
) -> frozenset[bytes]:  # fmt: skip
    """The orphaned commits of a graph.

    Args:
        known: What refs, logs and records name; what these lead to is no orphan.
        remembered: Commits that a ref named when the index last heard of it.
        now: The graph with all that `known` names. Give it where others commit meanwhile: `links` and `remembered`
            are read before `known`, so that what was published by then is named, and `now` after it.
    """
    unknown = links.keys() - ancestors(links if now is None else now, known)
    followed = {parent for digest in unknown for parent in links[digest].parents}
    proven = {digest for digest in unknown if digest in followed or digest in remembered}
    return frozenset(digest for digest in unknown if digest in proven or not proven.isdisjoint(links[digest].parents))


def tips(links: Mapping[bytes, CommitLinks], orphans: Collection[bytes]) -> list[bytes]:
    """The orphans that no other orphan follows: naming these keeps all of them."""
    followed = {parent for digest in orphans for parent in links[digest].parents}
    return sorted(digest for digest in orphans if digest not in followed)


def orphan_name(digest: bytes) -> str:
    """The branch that is proposed for an orphan."""
    return f"orphan-{digest.hex()[:8]}"
