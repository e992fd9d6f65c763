"""Complete programs of docs/, run as they stand; and killed inside one of their commits.

assert roots_of("integrations-hf.md", tmp_path / "a") == roots_of("integrations-hf.md", tmp_path / "b", kill_at=3)
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from cas_ckpt import Repository
from tests.processes import Forked

DOCS = Path(__file__).resolve().parents[2] / "docs"


def program(page: str) -> str:
    """The first block of Python of a page."""
    found = re.search(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def roots_of(page: str, folder: Path, *, kill_at: int | None = None) -> list[str]:
    """Run the program in `folder`; if asked for, first until it is killed inside its commit of that number, from 1.

    The roots of the commits that are in runs/ckpts then, the youngest first.
    """
    folder.mkdir()
    for number in [None] if kill_at is None else [kill_at, None]:
        with Forked(run, program(page), str(folder), number) as process:
            process.wait(60)
        assert process.returncode == (0 if number is None else -signal.SIGKILL)
    with Repository.open(folder / "runs" / "ckpts") as repository:
        return [each.root for each in repository.log()]


def run(text: str, folder: str, kill_at: int | None) -> None:
    os.chdir(folder)
    seen: list[str] = []

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.rename" and str(args[1]).endswith(".meta"):  # of a commit, before the branch leads to it
            seen.append(event)
            if len(seen) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    if kill_at is not None:
        sys.addaudithook(on_event)
    exec(compile(text, "<docs>", "exec"), {"__name__": "__main__"})
