"""What must hold after every request, seen from the stored bytes alone: no index is asked.

Invariant checked: whatever a ref names, and all that it follows, stands whole in packs that are
there. Objects are named by their content, so what was read once is true of every schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cas_ckpt.core.forgotten import PREFIX as FORGOTTEN
from cas_ckpt.core.forgotten import read_forgotten
from cas_ckpt.core.records import node_children
from cas_ckpt.core.ref_store import RefStore
from cas_ckpt.core.refs import RefKind
from cas_ckpt.objects import pack
from cas_ckpt.objects.digest import Digest, ObjectKind, object_id
from cas_ckpt.objects.nodes import decode_commit
from cas_ckpt.objects.pack import PACK_PREFIX, ExtentInfo
from cas_ckpt.storage.memory import MemoryStore

MOST_REMEMBERED = 20_000


class LossError(AssertionError):
    """Something that a ref leads to is not whole any more."""


@dataclass(frozen=True, slots=True)
class PackFacts:
    """What a pack holds: objects that are whole in it, and parts of chunks."""

    whole: frozenset[Digest]
    parts: tuple[ExtentInfo, ...]


@dataclass(frozen=True, slots=True)
class CommitFacts:
    """What a commit needs of its own, and what it follows."""

    root: Digest
    layout: Digest
    parents: tuple[Digest, ...]


_packs: dict[bytes, PackFacts] = {}
_children: dict[Digest, tuple[Digest, ...]] = {}
_commits: dict[Digest, CommitFacts] = {}
_closures: dict[Digest, frozenset[Digest]] = {}


class Shelf(MemoryStore):
    """A store in memory that can be copied whole."""

    @property
    def values(self) -> dict[str, bytes]:
        return self._values

    def copy(self) -> Shelf:
        other = Shelf(url=self.url)
        other._values = dict(self._values)
        return other


def read_facts(data: bytes) -> PackFacts:
    """What the pack in `data` holds; every node in it was hashed."""
    facts = _packs.get(data)
    if facts is None:
        if len(_packs) > MOST_REMEMBERED:
            _packs.clear()
        facts = _packs[data] = _parse(data)
    return facts


def _parse(data: bytes) -> PackFacts:
    trailer = pack.decode_trailer(data[-pack.TRAILER_BYTES :], size_bytes=len(data), key="a pack")
    infos = pack.decode_directory(data[trailer.directory_offset : -pack.TRAILER_BYTES], trailer, key="a pack")
    whole, parts = set(), []
    for info in infos:
        if info.num_leaves == info.chunk_leaves:
            whole.add(info.digest)
        else:
            parts.append(info)
        if info.kind == ObjectKind.CHUNK:
            _children[info.digest] = ()
        else:
            _learn(info, data[info.offset + info.header_bytes : info.end])
    return PackFacts(frozenset(whole), tuple(parts))


def _learn(info: ExtentInfo, data: bytes) -> None:
    if object_id(info.kind.label, data) != info.digest:
        raise LossError(f"a {info.kind.label} has other bytes than its id says")
    if info.kind == ObjectKind.COMMIT:
        commit = decode_commit(data)
        parents = tuple(map(Digest, commit.parents))
        _commits[info.digest] = CommitFacts(Digest(commit.root), Digest(commit.layout), parents)
    else:
        _children[info.digest] = () if info.kind == ObjectKind.LAYOUT else node_children(info.kind, data)


def _closure(root: Digest) -> frozenset[Digest]:
    """All that is below `root`, itself included, as far as it was ever seen."""
    found = _closures.get(root)
    if found is None:
        seen, level = {root}, [root]
        while level:
            level = [child for digest in level for child in _children.get(digest, ()) if child not in seen]
            seen.update(level)
        found = frozenset(seen)
        if found <= _children.keys():
            _closures[root] = found
    return found


@dataclass(frozen=True, slots=True)
class _Named:
    record: bytes
    target: Digest | None
    logged: tuple[Digest, ...]


class Soundness:
    """Looks at one store, again and again.

    Args:
        keeps_reflog: What refs named before counts as named, too (as long as it is in their logs).
    """

    def __init__(self, shelf: Shelf, *, keeps_reflog: bool = False) -> None:
        self._shelf = shelf
        self._keeps_reflog = keeps_reflog
        self._known: dict[str, _Named] = {}

    def check(self) -> None:
        """Raise LossError if anything that is live is not whole."""
        present = self.present()
        forgotten = self.forgotten()
        for digest, why in self.history().items():
            if digest not in present:
                raise LossError(f"{why}: commit {digest.hex()[:8]} is gone")
            if digest not in forgotten:
                self._require_whole(digest, why, present)

    def present(self) -> set[Digest]:
        """Every object that is whole in the packs that are there."""
        facts = [read_facts(data) for key, data in self._shelf.values.items() if key.startswith(PACK_PREFIX)]
        whole: set[Digest] = set().union(*(fact.whole for fact in facts))
        return whole | _joined(part for fact in facts for part in fact.parts)

    def forgotten(self) -> set[Digest]:
        """Commits of which nothing but their own objects need be there."""
        return self.ever_forgotten() - {ref.target for ref in self._refs().values() if ref.target}

    def ever_forgotten(self) -> set[Digest]:
        """Commits that were forgotten, those that a ref names again among them."""
        if not any(key.startswith(FORGOTTEN) for key in self._shelf.values):
            return set()
        return set(read_forgotten(self._shelf))

    def history(self) -> dict[Digest, str]:
        """Commits that refs lead to -> the ref."""
        found: dict[Digest, str] = {}
        waiting = [(target, key) for key, ref in self._refs().items() for target in self._targets(ref)]
        while waiting:
            digest, why = waiting.pop()
            if digest in found:
                continue
            found[digest] = why
            if digest in _commits:
                waiting += [(parent, f"{why}, before {digest.hex()[:8]}") for parent in _commits[digest].parents]
        return found

    def _targets(self, ref: _Named) -> list[Digest]:
        return [digest for digest in (ref.target, *(ref.logged if self._keeps_reflog else ())) if digest is not None]

    def _refs(self) -> dict[str, _Named]:
        found = {}
        for key, record in self._shelf.values.items():
            if key.startswith("refs/"):
                known = self._known.get(key)
                if known is None or known.record is not record:
                    known = self._known[key] = self._read(key, record)
                found[key] = known
        return found

    def _read(self, key: str, record: bytes) -> _Named:
        kind = next(kind for kind in RefKind if key.startswith(kind.value))
        ref = RefStore(self._shelf).get(kind, key.removeprefix(kind.value).removesuffix(".ref"))
        logged = tuple(digest for move in ref.log for digest in (move.old, move.new) if digest is not None)
        return _Named(record, ref.target, logged)

    def _require_whole(self, commit: Digest, why: str, present: set[Digest]) -> None:
        facts = _commits[commit]
        lost = ({facts.layout} | _closure(facts.root)) - present
        if lost:
            names = ", ".join(sorted(digest.hex()[:8] for digest in lost))
            raise LossError(f"{why}: commit {commit.hex()[:8]} lacks {names}")

    def unreachable(self) -> set[Digest]:
        """Objects that stand in packs, whole, and that nothing leads to."""
        history, forgotten = self.history(), self.forgotten()
        needed = set(history)
        for digest in history.keys() - forgotten:
            needed |= {_commits[digest].layout} | _closure(_commits[digest].root)
        return self.present() - needed


def _joined(parts: Iterable[ExtentInfo]) -> set[Digest]:
    """Chunks whose leaves are all there, in several packs together."""
    leaves: dict[Digest, set[int]] = {}
    counts: dict[Digest, int] = {}
    for part in parts:
        leaves.setdefault(part.digest, set()).update(range(part.first_leaf, part.first_leaf + part.num_leaves))
        counts[part.digest] = part.chunk_leaves
    return {digest for digest, found in leaves.items() if len(found) == counts[digest]}
