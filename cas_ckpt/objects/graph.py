"""The commit graph: which commits are known, and which of them follow which.

    reached       some commits and all that they lead to, unknown parents included
    ancestors     the same, of what is known
    descendants   the other way: the commits that lead to some
    log_order     ancestors in the order of the log
    parents_first some commits, each after its parents
    merge_bases   where two histories meet
    tips          commits that no other one follows
    orphans       commits that were published, and that nothing leads to any more

A commit is its own ancestor and its own descendant, as in git.

Invariant: pure. Whoever asks has read the commits (`index/history.py` from the index, `ops/retention` from rows): a
parent that is not among them ends a way.
Must not know: where commits are stored, which refs there are, what was forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from cas_ckpt.objects.digest import Digest


class HasParents(Protocol):
    """The fields of a commit that the graph needs."""

    @property
    def parents(self) -> Sequence[bytes]: ...


class HasTime(HasParents, Protocol):
    """The fields of a commit that the order of the log needs."""

    @property
    def time_us(self) -> int: ...


Commit = TypeVar("Commit", bound=HasParents)
Timed = TypeVar("Timed", bound=HasTime)


class CommitGraph(Generic[Commit]):
    """Commits by id, and the ways from each to its parents.

    Attributes:
        commits: Id -> what is known of the commit.
    """

    def __init__(self, commits: Mapping[bytes, Commit]) -> None:
        self.commits = commits

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.commits

    def reached(self, starts: Iterable[bytes], *, without: Collection[bytes] = frozenset()) -> set[bytes]:
        """`starts` and all that they lead to; unknown commits too, at which a way ends.

        Args:
            without: A set of commits that the ways do not enter.
        """
        commits = self.commits
        found = set(starts).difference(without)
        todo = list(found)
        while todo:
            commit = commits.get(todo.pop())
            for parent in () if commit is None else commit.parents:
                if parent not in found and parent not in without:
                    found.add(parent)
                    todo.append(parent)
        return found

    def ancestors(self, starts: Iterable[bytes]) -> set[bytes]:
        """`starts` and all that they lead to, of what is known."""
        return {digest for digest in self.reached(starts) if digest in self.commits}

    def descendants(self, starts: Iterable[bytes], *, among: Iterable[bytes]) -> set[bytes]:
        """`starts`, and the commits of `among` that lead to them by ways inside of `among`."""
        children = self.children(among)
        found = set(starts)
        todo = list(found)
        while todo:
            for child in children.get(todo.pop(), ()):
                if child not in found:
                    found.add(child)
                    todo.append(child)
        return found

    def children(self, among: Iterable[bytes]) -> dict[bytes, list[bytes]]:
        """Commit -> those of `among`, which are known, that have it as a parent."""
        found: dict[bytes, list[bytes]] = {}
        for digest in among:
            for parent in self.commits[digest].parents:
                found.setdefault(parent, []).append(digest)
        return found

    def parents_of(self, digest: bytes) -> Sequence[bytes]:
        """The parents of a commit; none if it is not known."""
        commit = self.commits.get(digest)
        return () if commit is None else commit.parents

    def parents(self, among: Iterable[bytes]) -> set[bytes]:
        """All parents of these commits, which are known."""
        return {parent for digest in among for parent in self.commits[digest].parents}

    def unknown_parents(self, among: Iterable[bytes]) -> dict[bytes, bytes]:
        """Parent that is not known -> a commit of `among`, which are known, that has it."""
        commits = self.commits
        return {parent: digest for digest in among for parent in commits[digest].parents if parent not in commits}

    def log_order(self: CommitGraph[Timed], starts: Iterable[bytes]) -> list[bytes]:
        """`starts`, which are known, and all that they lead to, in the order of the log.

        A commit comes before its parents; of those that may come next the youngest does, of equals the one with the
        smaller id. (Kahn's algorithm with a heap.)
        """
        commits = self.commits
        children = dict.fromkeys(starts, 0)
        todo = list(children)
        while todo:
            for parent in set(commits[todo.pop()].parents):
                if parent in children:
                    children[parent] += 1
                elif parent in commits:
                    children[parent] = 1
                    todo.append(parent)
        ready = [(-commits[digest].time_us, digest) for digest, count in children.items() if not count]
        heapify(ready)
        order = []
        while ready:
            digest = heappop(ready)[1]
            order.append(digest)
            for parent in set(commits[digest].parents):
                if parent in children:
                    children[parent] -= 1
                    if not children[parent]:
                        heappush(ready, (-commits[parent].time_us, parent))
        return order

    def parents_first(self, among: Collection[bytes]) -> list[bytes]:
        """`among`, which are known, in an order in which each comes after its parents."""
        commits = self.commits
        waiting = {digest: len(set(commits[digest].parents).intersection(among)) for digest in among}
        children = self.children(among)
        ready = sorted((digest for digest, count in waiting.items() if not count), reverse=True)
        order = []
        while ready:
            digest = ready.pop()
            order.append(digest)
            for child in sorted(set(children.get(digest, ())), reverse=True):
                waiting[child] -= 1
                if not waiting[child]:
                    ready.append(child)
        return order

    def merge_bases(self, first: bytes, others: Iterable[bytes]) -> list[Digest]:
        """The best common ancestors of `first` and any of `others`, by id: no other common ancestor leads to them."""
        common = self.ancestors([first]) & self.ancestors(others)
        # Whatever a common ancestor leads to is common too, so one step is enough to know the worse ones.
        return [Digest(digest) for digest in sorted(common - self.parents(common))]

    def tips(self, among: Collection[bytes]) -> list[bytes]:
        """Those of `among` that no other of them follows, by id: naming these keeps all of them."""
        followed = self.parents(among)
        return sorted(digest for digest in among if digest not in followed)

    def orphans(
        self, named: Collection[bytes], remembered: Collection[bytes], *, now: CommitGraph[Commit] | None = None,
        packs_lost: bool = False,
    ) -> frozenset[bytes]:  # fmt: skip
        """Commits that were published, and that nothing leads to any more.

        A ref that is lost, or that was put back from an older copy, leaves them. So does a writer that dies
        before its swap: that one was never acknowledged, and is garbage. They are told apart by what only an
        acknowledged commit has:

          - another commit follows it: a writer takes its parent from a ref; or
          - the index remembers that a ref named it: it is told so after the swap alone; or
          - it follows an orphan. It may have died before its swap all the same: which of the two, nobody can know.
            A parent that is not there, and that nothing names, counts for one where packs were lost: it had a follower.

        A commit without any of these is not an orphan, so that writers that are killed again and again fill nothing.

        Args:
            named: What refs, their logs, and records of forgotten and of released commits name; what these lead to is
                not an orphan.
            remembered: Commits that a ref named when the index last heard of it.
            now: The graph with all that `named` has. Give it where others commit meanwhile: this graph and
                `remembered` are read before `named`, so that what was published by then is named, and `now` after it.
            packs_lost: Packs cannot be read, or were set aside by a repair; else what is not there was collected.
        """
        now = now or self
        unknown = self.commits.keys() - now.ancestors(named)
        followed = self.parents(unknown)
        proven = {digest for digest in unknown if digest in followed or digest in remembered}
        if packs_lost:
            proven |= {parent for parent in followed if parent not in now}.difference(named)
        return frozenset(
            digest for digest in unknown if digest in proven or not proven.isdisjoint(self.commits[digest].parents)
        )
