"""Random histories of packs that come and go, played to an index and to the model, which must agree."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hypothesis import strategies as st

from cas_ckpt.index import garbage, usage
from cas_ckpt.index.index import Index
from cas_ckpt.index.rows import CommitRow, PackRecord
from cas_ckpt.objects.digest import ObjectKind
from cas_ckpt.objects.pack import ExtentInfo, PackKind
from tests.index.building import STORE, digest, empty, extent
from tests.index.history_model import Model

CHUNKS = [digest("chunk", number) for number in range(7)]
NODES = [digest("node", number) for number in range(7)]
LAYOUTS = [digest("layout", number) for number in range(2)]
COMMITS = [digest("commit", number) for number in range(5)]
EVERYTHING = [*CHUNKS, *NODES, *LAYOUTS, *COMMITS]
LEAVES = [(0, 3), (0, 3), (0, 3), (0, 1), (0, 2), (1, 2), (2, 1)]
"""(first leaf, how many) of extents; whole ones are the usual case."""

_FRESH = Index.open(":memory:", store_id=STORE)


Steps = list[tuple[str, object]]


class Universe:
    """What nodes and commits say, which is the same wherever they lie."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.children: dict[bytes, list[bytes]] = {}
        for number, node in enumerate(NODES):
            self.children[node] = draw(st.lists(st.sampled_from([*CHUNKS, *NODES[:number]]), max_size=4, unique=True))
        self.commits = {
            commit: CommitRow(
                commit, root=draw(st.sampled_from(NODES)), layout=draw(st.sampled_from([None, *LAYOUTS])), message="c"
            )
            for commit in COMMITS
        }

    def pack(self, name: str, draw: st.DrawFn) -> PackRecord:
        found: dict[tuple[bytes, int], ExtentInfo] = {}
        for each in draw(st.lists(st.sampled_from(EVERYTHING), min_size=1, max_size=8)):
            entry = self._entry(each, draw)
            found.setdefault((each, entry.first_leaf), entry)
        entries = [replace(entry, offset=64 + 500 * number) for number, entry in enumerate(found.values())]
        own = {entry.digest for entry in entries}
        edges = [(node, self.children[node]) for node in NODES if node in own]
        commits = [row for row in self.commits.values() if row.digest in own]
        return PackRecord(name, PackKind.DATA, 10_000, entries, edges, commits)

    def _entry(self, each: bytes, draw: st.DrawFn) -> ExtentInfo:
        stored = draw(st.integers(1, 400))
        if each in CHUNKS:
            number = CHUNKS.index(each)
            first, leaves = draw(st.sampled_from(LEAVES))
            base = draw(st.sampled_from([None, None, None, *CHUNKS[:number][:1]]))
            size = 1001 + number // 3  # three leaves, of chunks of several sizes
            leaf = {"leaf_bytes": 500, "first_leaf": first, "num_leaves": leaves}
            return extent(each, num_bytes=size, base=base, stored_bytes=stored, **leaf)
        kind = ObjectKind.TREE if each in NODES else ObjectKind.LAYOUT if each in LAYOUTS else ObjectKind.COMMIT
        return extent(each, kind, leaf_bytes=0, num_leaves=0, stored_bytes=stored)


@st.composite
def histories(draw: st.DrawFn) -> Steps:
    """Packs that are added and dropped, with questions in between and at the end."""
    universe = Universe(draw)
    steps: Steps = []
    names: list[str] = []
    for number in range(draw(st.integers(2, 9))):
        verb = draw(st.sampled_from(["add", "add", "add", "drop", "ask"]))
        if verb == "add":
            names.append(f"pack {number}")
            steps.append(("add", [universe.pack(names[-1], draw)]))
        elif verb == "drop" and names:
            steps.append(("drop", draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))))
        else:
            steps.append(("ask", _question(universe, draw)))
    steps.append(("ask", _question(universe, draw)))
    return steps


class Question:
    """Which commits live, which of them keep their data; and the same with less."""

    def __init__(self, universe: Universe, draw: st.DrawFn) -> None:
        self.now = self._live(universe, draw)
        self.then = self._live(universe, draw)
        self.published = draw(st.lists(st.sampled_from(COMMITS), unique=True))
        self.condemned = draw(st.lists(st.integers(0, 8), unique=True))
        self.sought = draw(st.lists(st.sampled_from(CHUNKS), min_size=1, unique=True))

    @staticmethod
    def _live(universe: Universe, draw: st.DrawFn) -> tuple[list[bytes], set[bytes]]:
        live = draw(st.lists(st.sampled_from(COMMITS), unique=True))
        kept = [universe.commits[each] for each in live if draw(st.booleans())]
        return live, {each for row in kept for each in (row.root, row.layout) if each}

    def __repr__(self) -> str:
        return f"Question({self.__dict__})"


def _question(universe: Universe, draw: st.DrawFn) -> Question:
    return Question(universe, draw)


def _guarded(live: tuple[list[bytes], set[bytes]]) -> set[bytes]:
    return {*live[0], *live[1]}


def _check_liveness(index: Index, model: Model, question: Question) -> None:
    guarded = _guarded(question.now)
    commits, roots = question.now
    with garbage.living(index, commits=commits, roots=roots, published=question.published) as living:
        rows = living.packs()
        found = {row.name: (row.dead_entries, row.dead_bytes, row.duplicate_bytes, row.unpublished) for row in rows}
        assert found == model.pack_rows(guarded, question.published)
        assert set(living.missing(1000)) == model.missing(guarded)
        assert living.summary().num_objects == len(model.dead(guarded))
        assert living.summary().stored_bytes == sum(row[1] for row in found.values())
        assert living.live_entries(model.packs) == {name: model.live_entries(guarded, name) for name in model.packs}
        condemned = {f"pack {number}" for number in question.condemned}
        assert living.needed(condemned) == model.needed(guarded, condemned)
        assert living.needed(model.packs.keys()) == model.needed(guarded, model.packs.keys())


def _check_upward(index: Index, model: Model, question: Question) -> None:
    assert garbage.freed(index, question.now, question.then) == model.freed(
        _guarded(question.now), _guarded(question.then)
    )
    known = model.commits()
    for each in EVERYTHING:
        assert set(index.read(usage.commits_holding, each)) == model.holding(each)
    found = index.read(usage.nearest, question.sought, limit=100)
    assert set(found) == model.shared(question.sought)
    assert [each.num_bytes for each in found] == sorted((each.num_bytes for each in found), reverse=True)
    now, then = ([each for each in live[0] if each in known] for live in (question.now, question.then))
    assert garbage.unique(index, now, then) == model.freed(_data(known, now), _data(known, then))


def _data(known: dict[bytes, CommitRow], commits: Collection[bytes]) -> set[bytes]:
    rows = [known[each] for each in commits]
    return {each for row in rows for each in (row.digest, row.root, row.layout) if each}


def play(index: Index, steps: Steps) -> None:
    """Do all of it to an emptied index, asking both."""
    model = Model()
    empty(index)
    for verb, what in steps:
        if isinstance(what, Question):
            _check_liveness(index, model, what)
            _check_upward(index, model, what)
        elif verb == "add":
            index.add_packs(what)  # type: ignore[arg-type]
            model.add(what[0])  # type: ignore[index]
        else:
            index.drop_packs(what)  # type: ignore[arg-type]
            model.drop(what)  # type: ignore[arg-type]
            _check_rows(index, model)


def _check_rows(index: Index, model: Model) -> None:
    """After a drop the index knows just what it would know had the packs never come."""
    empty(_FRESH)
    _FRESH.add_packs(list(model.packs.values()))
    assert index.read(usage.read_stats) == _FRESH.read(usage.read_stats)
