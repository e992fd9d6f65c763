"""benchmarks/cores.py runs from end to end, on small states, and judges every figure of which something is wanted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks import cores
from benchmarks.harness.gpt import GPT, GPTShape

pytestmark = pytest.mark.slow


def cells(page: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_cores_measures_each_part_beside_its_limit_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = min(2, len(os.sched_getaffinity(0)))
    options = ["--quick", "--threads", str(threads), "--scratch", str(tmp_path), "--disk", str(tmp_path)]
    assert cores.main(options) == 0
    page = capsys.readouterr().out
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == [
        each for each, _ in cores.PARTS.values()
    ]
    rows = cells(page)
    for what, beside, wanted in cores.RATIOS:
        (found,) = (row[2] for row in rows if row[:2] == [what, beside])
        assert float(found.split()[0]) > 0
        assert found.partition(" ")[2].startswith(f"({wanted[threads]:.2f} m" if threads in wanted else "")
    judged = [row[0] for row in rows if row[-1].endswith((" met", " missed"))]
    assert judged == ["first commit", "Python", "small operators of torch", "commit, all changed", "checkout"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_bytes", [1.2e9, 3.3e9, 8e9])
def test_the_state_of_cores_is_about_as_large_as_was_asked_for(num_bytes: float) -> None:
    size = cores.gpt_of(num_bytes)
    with torch.device("meta"):
        model = GPT(GPTShape(size.vocab, size.context, size.width, size.layers))
    assert 3 * sum(each.nbytes for each in model.parameters()) == pytest.approx(num_bytes, rel=0.15)


def test_cores_writes_no_page_of_one_part_or_of_small_states(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--write", "--quick"], ["--write", "--only", "disk"]):
        with pytest.raises(SystemExit):
            cores.main(options)
        assert "what is written is measured in full" in capsys.readouterr().err
