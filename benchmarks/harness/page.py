"""What small benchmarks have in common: their options, a folder to work in, and how a page begins.

1. `run` reads the options, makes a folder, and has the page made; it prints it, and writes it if asked to
2. `heading` is the beginning of a page: who wrote it, on which machine, under which load
3. `verdict` and `reached` are what a figure is judged to be
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness.machine import describe
from cas_ckpt import Policy, Repository

PAGES = Path(__file__).parents[2] / "docs" / "benchmarks"


def run(
    argv: Sequence[str] | None, doc: str | None, name: str, make: Callable[[Path, bool], str],
    *, scratch: str | None = None, own: Sequence[argparse.ArgumentParser] = (),
) -> int:  # fmt: skip
    """Measure and print; write the page `name`.md if asked to.

    Args:
        make: Measures in a folder, quickly or not, and returns the page.
        scratch: Where the folder is made unless an option says otherwise; the system's folder for these if None.
        own: Options that `make` reads itself.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, parents=own)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--scratch", type=Path, default=Path(scratch or tempfile.gettempdir()))
    options = parser.parse_args(argv)
    if options.write and options.quick:
        parser.error("--quick only prints: what is written is measured in full")
    folder = Path(tempfile.mkdtemp(prefix=f"cas-ckpt-{name}-", dir=options.scratch))
    try:
        made = make(folder, options.quick)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(made)
    if options.write:
        (PAGES / f"{name}.md").write_text(made)
    return 0


def heading(title: str, module: str, scratch: Path) -> list[str]:
    """The lines that a page of `benchmarks.module` begins with."""
    return [
        f"# {title}",
        "",
        f"Written by `python -m benchmarks.{module} --write`, figures as they came.",
        *machine_and_load(scratch),
        "",
    ]


def machine_and_load(scratch: Path) -> list[str]:
    """Two lines: what the figures were measured on, and what else went on there."""
    machine = describe(scratch)
    return [
        f"Machine: {machine['processor']}, {machine['memory']}, Python {machine['python']}, {machine['disk']}; "
        f"commit {machine['commit']}.",
        f"Load when it ended (1, 5, 15 minutes): {', '.join(f'{load:.2f}' for load in os.getloadavg())}.",
    ]


def verdict(found: float, at_most: float) -> str:
    """What was wanted of a figure that should be small, and whether it is met."""
    return f"{at_most:.2f} {'met' if found <= at_most else 'missed'}"


def reached(found: float, at_least: float) -> str:
    """What was wanted of a figure that should be large, and whether it is met."""
    return f"{at_least:.2f} {'met' if found >= at_least else 'missed'}"


def forget_all_but_one(*repos: Repository) -> None:
    """Let the disk not fill up with what was measured."""
    for repo in repos:
        repo.forget(Policy(keep_last=1), gc=True)
        repo.gc(min_age_s=0)
