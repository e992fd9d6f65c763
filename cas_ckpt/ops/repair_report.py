"""What a repair did, or would do, as values. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from cas_ckpt.ops.fsck_report import RepairKind
from cas_ckpt.ops.records import Brief


@dataclass(frozen=True, slots=True)
class RepairAction:
    """One thing that was done (or would be): which repair, where, and what."""

    kind: RepairKind
    where: str
    what: str


@dataclass(frozen=True, slots=True, repr=False)
class RepairReport(Brief):
    """What a repair did.

    Attributes:
        actions: In the order in which it was done.
        left: What could not be repaired, and what would help.
        dry_run: Nothing was done: `actions` says what would be.
    """

    actions: tuple[RepairAction, ...] = ()
    left: tuple[RepairAction, ...] = ()
    dry_run: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is left to repair, of what was asked for."""
        return not self.left


@dataclass(slots=True)
class RepairLog:
    """Actions as they are gathered."""

    dry_run: bool
    actions: list[RepairAction] = field(default_factory=list)
    left: list[RepairAction] = field(default_factory=list)

    def did(self, kind: RepairKind, where: str, what: str) -> None:
        """Add something that was done, or would be."""
        self.actions.append(RepairAction(kind, where, what))

    def leave(self, kind: RepairKind, where: str, what: str) -> None:
        """Add something that stays as it is, and why."""
        self.left.append(RepairAction(kind, where, what))

    def report(self) -> RepairReport:
        """All of it."""
        return RepairReport(tuple(self.actions), tuple(self.left), self.dry_run)
