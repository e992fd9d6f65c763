"""The names that a repository gives to commits: branches, tags and pins, as the store has them now."""

from __future__ import annotations

from cas_ckpt.refs import Ref, RefKind
from cas_ckpt.repository import RepositoryHandle


def every_ref(handle: RepositoryHandle) -> list[Ref]:
    """All branches, then all tags, then all pins, each by name."""
    return [ref for kind in RefKind for ref in handle.refs.list(kind)]


def named(handle: RepositoryHandle, kind: RefKind) -> dict[str, str]:
    """Name -> hexadecimal id of the commit that it names, by name."""
    return {ref.name: ref.target.hex() for ref in handle.refs.list(kind) if ref.target is not None}
