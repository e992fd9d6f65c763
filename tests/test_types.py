"""What an editor is told: mypy refuses each of these calls, for the reason that is beside it, and takes the others.

Types are those of the installed package (py.typed). pyright is not run: its wrapper on PyPI downloads Node and itself
from elsewhere.
"""

from __future__ import annotations

import re
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
    ('Repository.init("runs", encoding="gzip")', '"encoding" to "init"'),
    ("Repository.open(\"runs\", group=3)", '"group" to "open"'),
    ('cas_ckpt.limits(memory_bytes="1 GB")', '"memory_bytes" to "limits"'),
    ("made.identity", '"CommitInfo" has no attribute "identity"'),
]  # fmt: skip


@pytest.mark.slow
def test_mypy_takes_what_is_right_and_says_of_each_wrong_call_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    program = tmp_path / "program.py"
    program.write_text(GOOD + "\n".join(call for call, _ in BAD) + "\n")
    told, errors, _ = api.run(["--no-error-summary", "--hide-error-codes", str(program)])
    first = GOOD.count("\n") + 1
    said = {int(line) - first: text for line, text in re.findall(r"program\.py:(\d+): error: (.*)", told)}
    assert not errors
    assert [at for at in said if at < 0] == [], told
    assert [(call, said.get(at, "")) for at, (call, why) in enumerate(BAD) if why not in said.get(at, "")] == []
