"""The pages of docs/ read well: lines of 120 characters, links that lead to headings, glossaries in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_docs import from_root

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
ANCHOR = re.compile(r"\]\(([^)#\s]*)#([^)\s]+)\)")


def prose(page: Path) -> list[tuple[int, str]]:
    """The lines of a page outside of code blocks and tables, numbered."""
    inside, found = False, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside and not line.lstrip().startswith("|"):
            found.append((number, line))
    return found


def anchors(page: Path) -> set[str]:
    """What a link may have behind `#`: the headings as GitHub spells them."""
    headings = [line.lstrip("#").strip().lower() for _, line in prose(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


WRAPPED = [page for page in PAGES if page.parent.name != "benchmarks"]
"""Reports of benchmarks are written by programs."""


@pytest.mark.parametrize("page", WRAPPED, ids=from_root)
def test_lines_of_prose_have_at_most_120_characters(page: Path) -> None:
    long = [(number, line) for number, line in prose(page) if len(line) > 120]
    assert [each for each in long if not re.search(r"\]\(|://", each[1])] == []


@pytest.mark.parametrize("page", PAGES, ids=from_root)
def test_links_to_headings_lead_to_headings_that_are_there(page: Path) -> None:
    lost = []
    for target, anchor in ANCHOR.findall(page.read_text()):
        if "://" not in target and anchor not in anchors(page.parent / target if target else page):
            lost.append(f"{target}#{anchor}")
    assert lost == []


def test_the_words_of_the_glossary_are_in_order_and_explained_once() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    sections = [re.findall(r"^\| ([^|-][^|]*?) \|", part, re.MULTILINE)[1:] for part in text.split("\n## ")[1:]]
    assert all(words == sorted(words, key=str.lower) for words in sections)
    every = [word for words in sections for word in words]
    assert len(every) == len(set(every)) > 50


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=from_root)
def test_files_that_are_named_by_their_whole_path_are_there(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"\b(?:tests|cas_ckpt|benchmarks|examples|migrations)/[\w/]+\.py\b", text)
    new = re.findall(r"`(\S+\.py)` \(new\)", text)  # in a recipe
    assert [name for name in named if not (ROOT / name).exists() and name not in new] == []
