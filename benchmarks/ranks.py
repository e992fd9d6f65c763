"""Four real gloo processes on this machine: our commit and checkout against stock dcp.save and dcp.load.

    python -m benchmarks.ranks                 three rounds, docs/benchmarks/ranks.md
    python -m benchmarks.ranks --quick         one small round, printed only: does everything still run?
    python -m benchmarks.ranks --report        the page again, from the results that are there

Every operation is a launch of its own: fresh processes, started as torchrun would. An operation takes from the
first rank's start to the last rank's stop; ours and DCP alternate, round by round. Duty: launches and results;
the page is ranks_page.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import disk, machine
from benchmarks.ranks_page import page

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "ranks.md"
SIZE = 4
LAYERS = 6
TIMEOUT_S = 300
LAYOUTS = ("fsdp", "ddp")
STEPS = {"cas_ckpt": ("save", "unchanged", "load-cold", "load-warm"), "dcp": ("save", "load-cold", "load-warm")}

Record = dict[str, Any]


def launch(job: Record) -> Record:
    """Run one operation in SIZE processes; one record of all ranks' figures."""
    with tempfile.TemporaryDirectory() as answers:
        command = [sys.executable, "-m", "benchmarks.ranks_worker", json.dumps(job | {"answers": answers})]
        port = str(_free_port())
        processes = []
        for rank in range(SIZE):
            given = {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                     "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
            environment = {**os.environ, **given}
            processes.append(subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True))
        try:
            errors = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {TIMEOUT_S} s"}
        finally:
            for process in processes:
                process.kill()
        if any(process.returncode for process in processes):
            told = [error.strip().splitlines()[-1] for error in errors if error.strip()]
            return {"error": " | ".join(told)[:500], "stderr": errors[0][-3000:]}
        return _one([json.loads(Path(answers, str(rank)).read_text()) for rank in range(SIZE)])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _one(ranks: list[Record]) -> Record:
    """The job's figures from its ranks': times over all, peaks of the worst, bytes added up."""
    record: Record = {
        "seconds": max(each["stop"] for each in ranks) - min(each["start"] for each in ranks),
        "cpu_s": sum(each["cpu_s"] for each in ranks),
        "peak_bytes": max(each["peak_bytes"] for each in ranks),
        "peaks": [each["peak_bytes"] for each in ranks],
    }
    for name in ("wchar", "rchar", "hashed_bytes"):
        if name in ranks[0]:
            record[name] = sum(each[name] for each in ranks)
    return record | {name: ranks[0][name] for name in ("resident_before",) if name in ranks[0]}


def run_round(number: int, layers: int, scratch: Path) -> Iterator[Record]:
    """One round: per layout our operations and DCP's, the order changing from round to round."""
    for layout in LAYOUTS:
        peers = list(STEPS) if number % 2 == 0 else list(STEPS)[::-1]
        for peer in peers:
            yield from _chain(number, layout, peer, STEPS[peer], layers, scratch)
        yield from _chain(number, layout, "cas_ckpt", ("count",), layers, scratch)


def _chain(number: int, layout: str, peer: str, steps: tuple[str, ...], layers: int, scratch: Path) -> Iterator[Record]:
    folder = scratch / f"{layout}-{peer}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()
    for operation in steps:
        before = disk.length_bytes(folder)
        job = {"operation": operation, "layout": layout, "peer": peer, "layers": layers, "folder": str(folder)}
        figures = launch(job)
        figures["file_bytes"] = disk.length_bytes(folder) - before
        yield {"round": number, "layout": layout, "peer": peer, "operation": operation, **figures}
        if "error" in figures:
            break
    shutil.rmtree(folder, ignore_errors=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"of the GPT (default {LAYERS}: 0.97 GB)")
    parser.add_argument("--scratch", type=Path, default=ROOT / "bench-out" / "ranks")
    parser.add_argument("--quick", action="store_true", help="one small round, no page")
    parser.add_argument("--report", action="store_true", help="only write the page again")
    parser.add_argument("--note", default="", help="a sentence on how the run went, for the page")
    return parser.parse_args()


def main() -> int:
    """Run the rounds, write the page; 0 when every operation worked."""
    options = _arguments()
    if options.quick:
        options.layers, options.rounds = 1, 1
    results = options.scratch / "results.jsonl"
    failed = 0 if options.report else _run(options, results)
    records = [json.loads(line) for line in results.read_text().splitlines()]
    text = page(records, note=options.note)
    if options.quick:
        print(text)
    else:
        PAGE.write_text(text)
        print(PAGE)
    return failed


def _run(options: argparse.Namespace, results: Path) -> int:
    options.scratch.mkdir(parents=True, exist_ok=True)
    failed = 0
    about = {"machine": machine.describe(options.scratch), "layers": options.layers, "load": os.getloadavg()[0],
             "rounds": options.rounds, "date": time.strftime("%Y-%m-%d")}  # fmt: skip
    with results.open("w") as file:
        file.write(json.dumps(about) + "\n")
        for number in range(options.rounds):
            for record in run_round(number, options.layers, options.scratch):
                record["load"] = os.getloadavg()[0]
                file.write(json.dumps(record) + "\n")
                file.flush()
                failed += "error" in record
                told = record.get("error") or f"{record['seconds']:.3f} s  peak +{record['peak_bytes'] / 1e6:.0f} MB"
                place = f"{number + 1} {record['layout']:5} {record['peer']:9} {record['operation']:10}"
                print(place, told, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
