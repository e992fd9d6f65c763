"""How long work tells where it is. Implementations live in cli/; silence is the default."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives what a long operation did. May be called from several threads."""

    def start(self, phase: str, total_bytes: int | None) -> None:
        """A phase begins; `total_bytes` is what it will go through, if that is known."""
        ...

    def advance(self, num_bytes: int) -> None:
        """`num_bytes` more of the phase are done."""
        ...

    def finish(self) -> None:
        """The phase is over."""
        ...


class Silent:
    """A Progress that tells nobody."""

    def start(self, phase: str, total_bytes: int | None) -> None:
        """Nothing."""

    def advance(self, num_bytes: int) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""


SILENT = Silent()
