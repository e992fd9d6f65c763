"""What an editor is told: mypy and pyright refuse each of these calls, for the reason beside it, and take the others.

Types are those of the installed package (py.typed). pyright needs Node (200 MB): `make pyright` brings both.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).resolve().parents[1]

GOOD = """
import numpy as np
import torch

import cas_ckpt
from cas_ckpt import CommitOptions, ImportOptions, Policy, Repository

repo = Repository.open("runs", create=True, commit_options=CommitOptions(sign="key", on_conflict="raise"))
state = {"w": torch.zeros(3), "n": np.zeros(3)}
made = repo.commit(state, step=1, metrics={"loss": 0.5}, options=CommitOptions(orphan=True))
repo.commit_async(state, snapshot="lazy", worker="process").result(timeout_s=9.0).id.upper()
repo.import_file("w.pt", branch="base", options=ImportOptions(keep_names=True))
repo.checkout(made, into=state, keys=["w"]).missing.index("w")
repo.load("main", device=torch.device("cpu"), dtype=torch.bfloat16)
repo.find("w", dtype=torch.bfloat16, shape=(4, None, ...))
repo.find(dtype=np.float32, shape="4,*")
repo.export("main", "out", format="dcp")
repo.du("branch")
repo.repair("packs", "chunks")
repo.forget(Policy(keep_last=3)).forgotten
with cas_ckpt.limits(memory_bytes=10**9, num_threads=2):
    repo.load()
"""

BAD = [
    ('repo.commit(state, branches="main")', 'Unexpected keyword argument "branches"'),
    ('repo.commit(state, step="one")', '"step" to "commit"'),
    ("repo.commit(state, memory_bytes=1)", 'Unexpected keyword argument "memory_bytes"'),
    ('repo.commit(state, options={"orphan": True})', '"options" to "commit"'),
    ('CommitOptions(on_conflict="perhaps")', '"on_conflict" to "CommitOptions"'),
    ('CommitOptions(frozen_check="md5")', '"frozen_check" to "CommitOptions"'),
    ('CommitOptions().orphan = True', 'Property "orphan" defined in "CommitOptions" is read-only'),
    ('repo.commit_async(state, worker="thread pool")', '"worker" to "commit_async"'),
    ('repo.commit_async(state, snapshot="now")', '"snapshot" to "commit_async"'),
    ('repo.import_file("w.pt", options=CommitOptions())', '"options" to "import_file"'),
    ('repo.checkout("main")', 'Missing named argument "into"'),
    ('repo.checkout("main", into=[1])', '"into" to "checkout"'),
    ("repo.load(dtype=\"bfloat16\")", '"dtype" to "load"'),
    ("repo.load(device=1.5)", '"device" to "load"'),
    ("repo.find(shape=4)", '"shape" to "find"'),
    ('repo.export("main", "out", format="pickle")', '"format" to "export"'),
    ('repo.du("week")', 'Argument 1 to "du"'),
    ('repo.repair("everything")', 'Argument 1 to "repair"'),
    ("Repository.init(\"runs\", encoding=5)", '"encoding" to "init"'),
    ("Repository.open(\"runs\", group=3)", '"group" to "open"'),
    ('cas_ckpt.limits(memory_bytes="1 GB")', '"memory_bytes" to "limits"'),
    ("made.identity", '"CommitInfo" has no attribute "identity"'),
]  # fmt: skip


def faults(found: list[tuple[int, str]], reasons: list[str]) -> list[object]:
    """What is said of right calls, and the wrong ones of which the reason is not said; `found` has lines from 1 on."""
    first = GOOD.count("\n") + 1
    said = {line - first: text for line, text in reversed(found)}
    missed = [(call, said.get(at)) for at, (call, _) in enumerate(BAD) if reasons[at] not in said.get(at, "")]
    return [*(text for at, text in said.items() if at < 0), *missed]


@pytest.mark.slow
def test_mypy_takes_what_is_right_and_says_of_each_wrong_call_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    program = tmp_path / "program.py"
    program.write_text(GOOD + "\n".join(call for call, _ in BAD) + "\n")
    told, errors, _ = api.run(["--no-error-summary", "--hide-error-codes", str(program)])
    found = [(int(line), text) for line, text in re.findall(r"program\.py:(\d+): error: (.*)", told)]
    assert not errors
    assert faults(found, [why for _, why in BAD]) == [], told


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pyright") is None, reason="`make pyright` runs it")
def test_pyright_takes_what_is_right_and_refuses_each_wrong_call(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(GOOD + "\n".join(call for call, _ in BAD) + "\n")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    command = ["pyright", "--pythonpath", sys.executable, "--outputjson", "--project", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    told = [each for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    found = [(each["range"]["start"]["line"] + 1, each["message"]) for each in told]
    by_name = {'Argument 1 to "du"': '"by"', 'Argument 1 to "repair"': '"what"'}
    reasons = [by_name.get(why) or re.findall(r'"\w+"', why)[0] for _, why in BAD]  # what both checkers name
    assert faults(found, reasons) == [], done.stdout
