"""Command line: `python -m benchmarks.harness [run|report|list]`; `run` also writes the report."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.harness.plan import DEFAULT_ROUNDS, GPT, plan, rounds
from benchmarks.harness.sizes import SIZES

_ROOT = Path(__file__).resolve().parents[2]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness", description=__doc__)
    parser.add_argument("verb", nargs="?", choices=("run", "report", "list"), default="run")
    parser.add_argument("--scratch", type=Path, default=_ROOT / "bench-out", help="folder for all files and results")
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS, help=f"rounds at most (default {DEFAULT_ROUNDS})")
    parser.add_argument("--size", default=GPT, choices=[name for name, size in SIZES.items() if size.kind == "gpt"],
                        help="size that stands for the 1 GB GPT; tiny makes every size tiny")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round: does everything still run?")
    parser.add_argument("--only", help="run only SIZE/PEER/OPERATION that match this pattern, and what they need")
    parser.add_argument("--append", action="store_true", help="keep the results of earlier runs in the file")
    parser.add_argument("--docs", type=Path, help="folder of the report (default docs/benchmarks; tiny: the scratch)")
    parser.add_argument("--no-report", action="store_true", help="write no report after the run")
    return parser


def _run(options: argparse.Namespace) -> int:
    from benchmarks.harness.runner import Bench, run_rounds

    bench = Bench(options.scratch, run=time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()))
    if not options.append:
        bench.clear()
    failed = run_rounds(bench, rounds(plan(gpt=options.size, only=options.only), options.rounds))
    return 1 if failed else 0


def _report(options: argparse.Namespace) -> None:
    from benchmarks.harness.report import write_report

    folder = options.docs or (options.scratch if options.size == "tiny" else _ROOT / "docs" / "benchmarks")
    for path in write_report(options.scratch / "results.jsonl", folder, gpt=options.size):
        print(path)


def main(arguments: list[str] | None = None) -> int:
    """Run the verb; 0 when every operation worked."""
    options = _parser().parse_args(arguments)
    if options.quick:
        options.size, options.rounds = "tiny", 1
    if options.verb == "list":
        for chain in plan(gpt=options.size, only=options.only):
            steps = (f"{chain.doer(step)}:{step.operation} x{step.most_rounds}" for step in chain.steps)
            print(f"{chain.size:13} {', '.join(steps)}")
        return 0
    failed = _run(options) if options.verb == "run" else 0
    if not options.no_report:
        _report(options)
    return failed


if __name__ == "__main__":
    sys.exit(main())
