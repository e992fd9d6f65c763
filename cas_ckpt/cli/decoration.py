"""The names that stand beside commits, and colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from cas_ckpt.face import Repository


def names_of_commits(repo: Repository) -> dict[str, list[str]]:
    """Id of a commit -> names of its branches, then its tags (as "tag: v1"), then its pins (as "pin: paper")."""
    names: dict[str, list[str]] = {}
    for name, digest in repo.branches().items():
        names.setdefault(digest, []).append(name)
    for name, digest in repo.tags().items():
        names.setdefault(digest, []).append(f"tag: {name}")
    for pin in repo.pins():
        names.setdefault(pin.commit, []).append(f"pin: {pin.name}")
    return names


def styled(text: str, colour: str, wanted: bool) -> str:
    """`text`, coloured if that is wanted."""
    return click.style(text, fg=colour) if wanted and text else text
