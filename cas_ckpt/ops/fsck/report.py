"""Checks and repairs as values: problems, the commits that each of them hits, the command that repairs it; repairs.

Invariant: a problem is damage; what is merely unusual is a note and never makes a check fail.
Pure: nothing here reads the store or an index.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import get_args

from cas_ckpt.arguments import RepairKind, check_choice, one_text
from cas_ckpt.core.records import Brief
from cas_ckpt.errors import InvalidInputError, shown_value
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.store import Store


class ProblemKind(StrEnum):
    """Kinds of damage."""

    CONFIG = "config"
    GC_STATE = "gc-state"
    RECORD = "record"
    REF = "ref"
    PACK = "pack"
    ENTRIES = "entries"
    MISSING = "missing"
    INDEX = "index"


class Effect(StrEnum):
    """Consequence of a problem.

    HARMLESS: nothing is lost: there is another copy, or it can be derived, or is not needed.
    AT_RISK: every byte can still be read, but only as long as the index lasts, or only by hand.
    LOST: something that is needed has no intact copy in this repository.
    """

    HARMLESS = "harmless"
    AT_RISK = "at risk"
    LOST = "lost"


@dataclass(frozen=True, slots=True, repr=False)
class Hit(Brief):
    """A commit that needs what is damaged.

    Attributes:
        commit: Its id.
        keys: Entries that cannot be restored. `a/**` is all below a, `**` everything,
            `a/[x..y)` the names from x up to y, `(layout)` the note of who held what.
    """

    commit: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Problem(Brief):
    """Something damaged.

    Attributes:
        where: Key of the store, or the index's place.
        objects: Ids of objects that have no intact copy here.
        hits: Commits that need them, or that would if the index were lost.
        refs: Branches, tags and pins that lead to such commits.
        repair: The command that repairs it.
    """

    kind: ProblemKind
    where: str
    what: str
    effect: Effect
    repair: str
    objects: tuple[str, ...] = ()
    hits: tuple[Hit, ...] = ()
    refs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Note:
    """A remark that is not damage."""

    where: str
    what: str


@dataclass(frozen=True, slots=True, repr=False)
class FsckReport(Brief):
    """Result of a check.

    Attributes:
        num_packs, num_entries, num_nodes, num_commits, num_refs: What was looked at.
        read_bytes, read_packs: What `read_data` read and verified.
        skipped_packs: Packs whose data was not read: too recently checked, not drawn, or no time left. Of a shard,
            packs of its share alone.
        shard: The job of many whose share was read, such as "2/7"; None: there is one job. From the second on, the
            other numbers are of its share, unless that is damaged.
        num_promised: Chunks that are not here and that a remote promised: they are no problem.
    """

    problems: tuple[Problem, ...] = ()
    notes: tuple[Note, ...] = ()
    num_packs: int = 0
    num_entries: int = 0
    num_nodes: int = 0
    num_commits: int = 0
    num_refs: int = 0
    read_bytes: int = 0
    read_packs: int = 0
    skipped_packs: int = 0
    shard: str | None = None
    num_promised: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.problems

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands that repair what was found, each once, in the order in which they are to be run."""
        found = dict.fromkeys(problem.repair for problem in self.problems if problem.repair)
        places = {text: at for at, text in enumerate(f"--repair {kind}" for kind in get_args(RepairKind))}
        return tuple(sorted(found, key=lambda command: min(at for text, at in places.items() if text in command)))


@dataclass(slots=True)
class Findings:
    """Problems and notes as they are gathered."""

    store: Store
    problems: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, number: int = 1) -> None:
        """Add to a number of the report."""
        self.counts[name] = self.counts.get(name, 0) + number

    def note(self, where: str, what: str) -> None:
        """Add a note."""
        self.notes.append(Note(where, what))

    def problem(
        self, kind: ProblemKind, where: str, what: str, *, effect: Effect, repair: RepairKind, options: str = "",
        objects: tuple[str, ...] = (), hits: tuple[Hit, ...] = (), refs: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Add a problem, and the command that repairs it; `options` are further ones of that command."""
        command = repair_command(self.store, repair, options)
        self.problems.append(Problem(kind, where, what, effect, command, objects, hits, refs))

    def index_problem(self, place: str, what: str) -> None:
        """Add, once, that the index is damaged."""
        if not any(problem.kind is ProblemKind.INDEX for problem in self.problems):
            self.problem(ProblemKind.INDEX, place, what, effect=Effect.HARMLESS, repair="index")

    def report(self) -> FsckReport:
        """All of it."""
        return FsckReport(tuple(self.problems), tuple(self.notes), shard=None, **self.counts)


def repair_command(store: Store, kind: RepairKind, options: str = "") -> str:
    """The exact command that repairs `kind` in this repository; OTHER is a copy that holds the same objects."""
    place = shlex.quote(str(store.root) if isinstance(store, FileStore) else store.url)
    if kind in ("config", "records", "chunks"):
        options = "--from OTHER"
    return f"cas-ckpt -C {place} fsck --repair {kind} {options}".rstrip()


# --- repairs --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RepairRequest:
    """Kinds of repairs, and the sources for them.

    Attributes:
        kinds: Only these; `chunks` takes damaged packs out of use as well.
        sources: Paths or URLs of repositories to take intact copies from: copies of this one, or any others.
        refs: Ref -> revision that it is to name, where nothing else says.
        read_data: Read all data, not only that of packs known to be damaged.
        dry_run: Report what would be done.
    """

    kinds: Collection[RepairKind]
    sources: Sequence[str] = ()
    refs: Mapping[str, str] = field(default_factory=dict)
    read_data: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        for kind in self.kinds:
            check_choice("what to repair", kind, RepairKind)
        if not isinstance(self.refs, Mapping):
            raise InvalidInputError(f"refs is {shown_value(self.refs)}: give a dict of names and revisions")
        for ref, revision in self.refs.items():
            one_text(f"refs[{one_text('a name in refs', ref)!r:.80}]", revision)


@dataclass(frozen=True, slots=True)
class RepairAction:
    """One thing that was done (or would be): which repair, where, and what."""

    kind: RepairKind
    where: str
    what: str


@dataclass(frozen=True, slots=True, repr=False)
class RepairReport(Brief):
    """Result of a repair.

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
