"""The names that a repository gives to commits: branches, tags and pins, as the store has them now."""

from __future__ import annotations

from dataclasses import dataclass

from cas_ckpt.config import require_there
from cas_ckpt.refs import RefKind
from cas_ckpt.repository import RepositoryHandle


@dataclass(frozen=True, slots=True)
class PinInfo:
    """One pin.

    Attributes:
        commit: Whole id of the commit that it keeps.
        time_s: When it was set, from the epoch. author: By whom.
    """

    name: str
    commit: str
    reason: str = ""
    time_s: float = 0.0
    author: str = ""


def named(handle: RepositoryHandle, kind: RefKind) -> dict[str, str]:
    """Name -> hexadecimal id of the commit that it names, by name."""
    found = {ref.name: ref.target.hex() for ref in handle.refs.list(kind) if ref.target is not None}
    if not found:
        require_there(handle.store)
    return found


def list_pins(handle: RepositoryHandle) -> list[PinInfo]:
    """All pins, by name."""
    found = []
    for ref in handle.refs.list(RefKind.PIN):
        if ref.target is not None:
            set_by = next((move for move in reversed(ref.log) if move.new == ref.target), None)
            when, who = (set_by.time_us / 1e6, set_by.author) if set_by else (0.0, "")
            found.append(PinInfo(ref.name, ref.target.hex(), ref.note, when, who))
    if not found:
        require_there(handle.store)
    return found
