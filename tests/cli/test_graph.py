"""The drawn history: every commit in a column, every line where it belongs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt.cli.log import line_of, render_log
from cas_ckpt.core.records import CommitInfo


def history(parents: Mapping[str, str]) -> list[CommitInfo]:
    """Commits called by letters: name -> letters of its parents."""
    return [
        CommitInfo(id=name, root="", parents=tuple(above), message="", author="", time_s=0.0)
        for name, above in parents.items()
    ]


def drawn(parents: Mapping[str, str], refs: Mapping[str, Sequence[str]] | None = None) -> str:
    return "\n".join(render_log(history(parents), refs))


def test_a_straight_history_is_one_column() -> None:
    assert drawn({"c": "b", "b": "a", "a": ""}) == "* c\n* b\n* a"


def test_branches_run_together_where_they_began() -> None:
    refs = {"d": ["main"], "x": ["ft", "tag: v1"]}
    assert drawn({"d": "c", "x": "b", "c": "b", "b": "a", "a": ""}, refs) == "\n".join(
        ["* d (main)", "| * x (ft, tag: v1)", "* | c", "|/", "* b", "* a"]
    )


def test_three_branches_of_one_base_keep_their_columns() -> None:
    assert drawn({"x": "a", "y": "a", "z": "a", "a": ""}) == "\n".join(
        ["* x", "| * y", "| | * z", "| |/", "|/|", "|/", "* a"]
    )


def test_a_merge_opens_a_column() -> None:
    assert drawn({"m": "bx", "x": "a", "b": "a", "a": ""}) == "\n".join(["* m", "|\\", "| * x", "* | b", "|/", "* a"])


def test_a_column_is_used_again() -> None:
    assert drawn({"x": "b", "r": "", "d": "b", "b": ""}).splitlines()[-4:] == ["|", "| * d", "|/", "* b"]


def test_histories_that_have_nothing_in_common_are_drawn_apart() -> None:
    assert drawn({"r": "", "d": "c", "c": "", "e": ""}) == "* r\n\n* d\n* c\n\n* e"


def test_a_history_that_begins_beside_another_is_drawn_apart_from_the_next() -> None:
    assert drawn({"m": "a", "r": "", "s": "", "a": ""}) == "* m\n| * r\n|\n| * s\n* a"


def test_a_history_that_is_cut_leaves_its_lines_open() -> None:
    assert drawn({"m": "bx", "b": "a"}) == "* m\n|\\\n* | b"


def test_one_line_tells_names_step_subject_and_metrics() -> None:
    commit = CommitInfo("ab" * 32, "", (), "first\nmore", "me", 0.0, step=7, metrics={"loss": 0.123456789})
    assert line_of(commit, ["main"]) == "abababababab (main) [7] first loss=0.123457"


def test_control_characters_are_written_out() -> None:
    commit = CommitInfo("ab" * 32, "", (), "\x1b[31mred\u202e\x07", "me", 0.0, metrics={"a\nb": 1.0})
    assert line_of(commit, []) == "abababababab \\x1b[31mred\\u202e\\x07 a\\x0ab=1"


@st.composite
def histories(draw: st.DrawFn) -> dict[str, str]:
    """Commits in an order in which a log may give them: parents after their children."""
    names = "zyxwvutsrqponm"[: draw(st.integers(1, 14))]
    chooser = random.Random(draw(st.integers(0, 1 << 30)))
    return {
        name: "".join(chooser.sample(names[at + 1 :], min(len(names) - at - 1, chooser.choice([0, 1, 1, 1, 2, 3]))))
        for at, name in enumerate(names)
    }


def follow(lines: Sequence[str]) -> dict[str, set[str]]:
    """What a person reads: from each commit along the lines to the commits below."""
    open_lines: dict[int, set[str]] = {}  # position in the row -> commits that the line comes from
    parents: dict[str, set[str]] = {}
    for line in lines:
        graph, name = (line[:-1], line[-1]) if line[-1:].isalpha() else (line, "")
        step: dict[int, set[str]] = {}
        for at, mark in enumerate(graph):
            come_from = {"|": (at,), "*": (at,), "/": (at + 1,), "\\": (at - 1,)}.get(mark, ())
            sources = set().union(*(open_lines.get(place, set()) for place in come_from))
            if mark == "*":
                for source in sources:
                    parents[source].add(name)
                parents.setdefault(name, set())
                step.setdefault(at, set()).add(name)
            elif mark in "|/\\":
                to = {"|": at, "/": at - 1, "\\": at + 1}[mark]
                step.setdefault(to, set()).update(sources)
        open_lines = step
    return parents


@given(histories())
def test_every_commit_is_drawn_once_and_its_lines_lead_to_its_parents(parents: dict[str, str]) -> None:
    lines = list(render_log(history(parents)))
    assert [line[-1] for line in lines if line[-1:].isalpha()] == list(parents)
    assert all(set(line) <= set("*|/\\ ") for line in lines if not line[-1:].isalpha())
    read = follow(lines)
    for name, wanted in parents.items():
        assert set(wanted) <= read[name]
        assert wanted or not read[name], "the first commit of a history leads nowhere"
