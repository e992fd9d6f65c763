"""What a repository promises, in dicts: commits by id, refs with their logs, the forgotten ones.

Promised is what refs lead to and what logs remember, apart from what was forgotten; the target of
a ref is promised in any case. Nothing here asks the repository.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cas_ckpt.core.refs import RefKind
from tests.schedule.world import START_S

Name = tuple[RefKind, str]

_RIVALS = {RefKind.BRANCH: RefKind.TAG, RefKind.TAG: RefKind.BRANCH}


@dataclass
class Named:
    """A ref in the model: what it names, and (time, commit) of what its log remembers."""

    target: str | None = None
    log: list[tuple[float, str]] = field(default_factory=list)


class HistoryModel:
    """The part of the state machine that is no repository.

    Attributes:
        texts, parents: Of every commit that is remembered, by id.
        forgotten: Ids of those that keep no data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = START_S
        self.texts: dict[str, str] = {}
        self.parents: dict[str, tuple[str, ...]] = {}
        self.refs: dict[Name, Named] = {}
        self.forgotten: set[str] = set()

    def reached(self, starts: set[str]) -> set[str]:
        found, todo = set(starts), list(starts)
        while todo:
            for parent in self.parents[todo.pop()]:
                if parent not in found:
                    found.add(parent)
                    todo.append(parent)
        return found

    @property
    def targets(self) -> set[str]:
        return {named.target for named in self.refs.values() if named.target is not None}

    def promised(self) -> set[str]:
        """Commits that must read back."""
        logged = {commit for named in self.refs.values() for _, commit in named.log}
        return (self.reached(self.targets | logged) - self.forgotten) | self.targets

    def named(self, name: Name) -> Named:
        return self.refs.setdefault(name, Named())

    def move(self, name: Name, new: str | None) -> None:
        """A move that the log of the ref remembers."""
        named = self.named(name)
        named.log += [(self.now_s, commit) for commit in (named.target, new) if commit is not None]
        named.target = new

    def is_taken(self, name: Name) -> bool:
        rival = _RIVALS.get(name[0])
        return rival is not None and (other := self.refs.get((rival, name[1]))) is not None and other.target is not None

    def picked(self, pick: int) -> str:
        return list(self.texts)[pick % len(self.texts)]

    def made(self, one: str, text: str, branch: str, other: str | None) -> None:
        named = self.named((RefKind.BRANCH, branch))
        self.texts[one] = text
        self.parents[one] = tuple(dict.fromkeys(parent for parent in (named.target, other) if parent is not None))
        named.target = one

    def expire(self, expire_s: float) -> None:
        """What a collection no longer promises; it may keep it all the same."""
        for named in self.refs.values():
            named.log = [entry for entry in named.log if entry[0] >= self.now_s - expire_s]
