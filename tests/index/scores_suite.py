"""What every index answers about metrics, lineage and the conditions of a log."""

from __future__ import annotations

from cas_ckpt.index import history
from cas_ckpt.index.index import Index
from cas_ckpt.index.rows import CommitFilter, MetricBound
from cas_ckpt.objects.nodes import LineageEdge
from tests.index.building import commit_pack, digest

EDGES = (LineageEdge("fine-tune-of", digest("base"), b"\xc0"), LineageEdge("merged-from", digest("elsewhere")))


def fill(index: Index) -> None:
    """Four commits, each upon the one before."""
    said = [
        {"author": "Ann", "step": 1, "metrics": {"loss": 2.0, "acc": 0.1}},
        {"author": "bob", "metrics": {"loss": 1.0}},
        {"author": "Änne", "step": 3, "metrics": {"loss": 1.0, "acc": 0.9}, "lineage": EDGES},
        {"author": "bob", "step": 4},
    ]
    for number, fields in enumerate(said):
        parents = [f"c{number - 1}"] if number else []
        root = digest("same root") if number in (0, 3) else digest(number)
        index.add_packs([commit_pack(f"c{number}", parents, time_us=number * 10, root=root, **fields)])


def chosen(index: Index, **conditions: object) -> list[str]:
    wanted = CommitFilter(**conditions)  # type: ignore[arg-type]
    return [row.message for row in history.log(index, [digest("c3")], wanted=wanted)]


class ScoreTests:
    def test_a_log_leaves_out_what_does_not_meet_its_conditions(self, index: Index) -> None:
        fill(index)
        assert chosen(index) == ["c3", "c2", "c1", "c0"]
        assert chosen(index, since_us=10, until_us=20) == ["c2", "c1"]
        assert chosen(index, first_step=3) == ["c3", "c2"]
        assert chosen(index, last_step=3) == ["c2", "c0"]
        assert chosen(index, author="NN") == ["c2", "c0"]
        assert chosen(index, author="än*") == ["c2"]
        assert chosen(index, metrics=(MetricBound("loss", "<=", 1.0),)) == ["c2", "c1"]
        assert chosen(index, metrics=(MetricBound("loss", "==", 1.0), MetricBound("acc", ">", 0.5))) == ["c2"]
        assert chosen(index, metrics=(MetricBound("loss", "!=", 1.0),), author="bob") == []

    def test_a_limit_counts_what_is_left(self, index: Index) -> None:
        fill(index)
        rows = history.log(index, [digest("c3")], wanted=CommitFilter(author="nn"), limit=1)
        assert [row.message for row in rows] == ["c2"]

    def test_commits_are_ranked_by_value_then_age(self, index: Index) -> None:
        fill(index)
        among = {digest(f"c{number}") for number in range(4)}
        assert index.read(history.ranked, "loss", largest=False, among=among, limit=9) == [
            (digest("c1"), 1.0), (digest("c2"), 1.0), (digest("c0"), 2.0),
        ]  # fmt: skip
        assert index.read(history.ranked, "loss", largest=True, among=among - {digest("c0")}, limit=1) == [
            (digest("c1"), 1.0)
        ]
        assert index.read(history.ranked, "nothing", largest=False, among=among, limit=9) == []
        assert index.read(history.metric_names) == ["acc", "loss"]

    def test_lineage_is_read_back_with_its_commit_and_as_a_whole(self, index: Index) -> None:
        assert index.read(history.all_lineage) == []
        fill(index)
        assert [row.lineage for row in history.log(index, [digest("c3")])] == [(), EDGES, (), ()]
        assert index.read(history.all_lineage) == [(digest("c2"), edge) for edge in EDGES]

    def test_the_commits_of_a_root_are_found(self, index: Index) -> None:
        fill(index)
        assert index.read(history.commits_of_root, digest("same root")) == [digest("c0"), digest("c3")]
        assert index.read(history.commits_of_root, digest("other")) == []
