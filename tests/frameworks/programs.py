"""Complete programs of docs/integrations.md, run as they stand; and killed inside one of their commits.

assert roots_of("Accelerate", tmp_path / "a") == roots_of("Accelerate", tmp_path / "b", kill_at=3)
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

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"


def program(section: str, number: int = 0) -> str:
    """A block of Python in a section of the page, whose heading begins so; by its number, from 0."""
    text = PAGE.read_text().partition(f"\n## {section}")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[number]


def roots_of(section: str, folder: Path, *, kill_at: int | None = None) -> list[str]:
    """Run the program in `folder`; if asked for, first until it is killed inside its commit of that number, from 1.

    The roots of the commits that are in runs/ckpts then, the youngest first.
    """
    folder.mkdir()
    for number in [None] if kill_at is None else [kill_at, None]:
        with Forked(run, program(section), str(folder), number) as process:
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
