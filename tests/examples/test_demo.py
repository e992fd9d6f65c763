"""The examples do what they say, the demo to its end included."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cas_ckpt import Repository
from examples.demo import __main__ as demo
from examples.demo import finetune, pretrain
from examples.demo.lora import LoraGPT
from examples.demo.model import GPT, Shape, make_deterministic, next_byte_loss
from examples.demo.reporting import WaitHalfWay, torch_save_bytes
from examples.demo.tables import size
from examples.demo.text import Corpus
from tests.processes import PIPE, ROOT, Forked, run_module

TINY = Shape(num_layers=1, num_heads=2, width=16, context=8)
SMALL = Shape(num_layers=2, num_heads=2, width=128, context=16)


@pytest.fixture(autouse=True)
def settings_of_torch_as_before() -> Iterator[None]:
    deterministic, num_threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(num_threads)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_quickstart_runs_twice_and_shows_its_history(tmp_path: Path) -> None:
    for _ in range(2):
        with Forked(run_module, "examples.quickstart", str(tmp_path / "repo"), stdout=PIPE, stderr=PIPE) as process:
            told, errors = process.communicate()
        assert (process.returncode, errors) == (0, "")
        assert told.endswith("history: ['after it', 'before the first step']\n")


def check_story(folder: Path, told: str) -> None:
    assert "SIGKILL" in told
    assert "Equal: weights, optimizer" in told
    repo = Repository.open(folder / "killed")
    retry, main = repo.log("retry"), repo.log("main")
    assert [commit.step for commit in retry] == [48, 36, 24, 12]
    assert retry[2:] == main[2:], "what was rolled back to is where the branch begins"
    assert retry[1].parents == (main[2].id,) and retry[0].root != main[0].root
    assert f"| * {retry[0].short_id} (retry)" in told or f"* {retry[0].short_id} (retry)" in told
    roots = [Repository.open(folder / name).log("main")[0].root for name in ("killed", "never-killed")]
    assert roots[0] == roots[1]


def small_child(module: str, *arguments: str) -> None:
    """What a training process of the demo does, with a small model."""
    pretrain.SHAPE = finetune.SHAPE = SMALL
    sys.argv = [module, *arguments]
    {"pretrain": pretrain, "finetune": finetune}[module].main()


@contextmanager
def forked_child(module: str, *arguments: str) -> Iterator[Forked]:
    process = Forked(small_child, module, *arguments, stdout=PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_demo_is_killed_inside_a_commit_and_resumes_to_an_equal_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "child", forked_child)
    monkeypatch.setattr(sys, "argv", ["demo", "--folder", str(tmp_path)])
    demo.main()
    check_story(tmp_path, capsys.readouterr().out)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_demo_in_full(tmp_path: Path) -> None:
    """As `make demo` runs it, in processes of Python's own."""
    done = run("examples.demo", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    check_story(tmp_path, done.stdout)


def test_text_comes_in_order_and_begins_again_at_the_end() -> None:
    text = Corpus("json/*.py", num_streams=2)
    first, position = text.batch(0, context=10)
    second, _ = text.batch(position, context=10)
    assert position == 10
    assert torch.equal(first[:, -1], second[:, 0])
    assert torch.equal(text.batch(10**9, context=10)[0], first)


def test_adapters_change_nothing_before_they_have_learned() -> None:
    make_deterministic(seed=3)
    base, batch = GPT(TINY).eval(), torch.randint(0, 256, (2, 9))
    before = next_byte_loss(base, batch)
    assert torch.equal(next_byte_loss(LoraGPT(base, rank=2), batch), before)


def test_only_adapters_learn() -> None:
    model = LoraGPT(GPT(TINY), rank=2)
    next_byte_loss(model, torch.randint(0, 256, (2, 9))).backward()
    learning = {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learning == {"adapters"}


def test_a_commit_waits_half_way_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    waits: list[str] = []
    progress = WaitHalfWay(step=7, wait=lambda: waits.append("for the end"))
    progress.start("hashing", 100)
    progress.advance(49)
    assert (capsys.readouterr().out, waits) == ("", [])
    progress.advance(1)
    assert waits == ["for the end"]
    assert json.loads(capsys.readouterr().out) == {
        "event": "committing", "step": 7, "done_bytes": 50, "total_bytes": 100,
    }  # fmt: skip


def test_torch_save_is_measured_and_not_guessed(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(100, 100)}
    torch.save({"model": state["model"].state_dict()}, tmp_path / "state.pt")
    assert torch_save_bytes(state) == pytest.approx((tmp_path / "state.pt").stat().st_size, rel=0.05)


def test_sizes_read_like_sizes() -> None:
    assert [size(0), size(999), size(1500), size(39_100_000)] == ["0 B", "999 B", "1.5 kB", "39.1 MB"]
