"""Many command lines, each in a process of its own that has imported nothing but the command line's entry.

    python -m tests.cli.starting FOLDER [MODULE...] < lines.json      # prints how each of the lines ended

An interpreter takes as long to start as a verb to run: this one starts once and forks for each line. The modules named
are imported before that, for lines of which it does not matter what they import.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import cas_ckpt.cli.main


def started(folder: Path, number: int, line: str) -> dict[str, Any]:
    """Code, output, complaints and imported modules of `python -m cas_ckpt LINE`."""
    out, err, names = (folder / f"{number}.{name}" for name in ("out", "err", "modules"))
    child = os.fork()
    if child == 0:
        _become(line, out, err, names)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return {"code": code, "out": out.read_text(), "err": err.read_text(), "modules": names.read_text().split()}


def _become(line: str, out: Path, err: Path, names: Path) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), number)
    sys.argv = ["cas_ckpt", *line.split()]
    code: Any = 0
    try:
        runpy.run_module("cas_ckpt", run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code
    except BaseException as error:  # noqa: BLE001 - shown as Python would
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    names.write_text("\n".join(sys.modules))
    os._exit(code or 0)


if __name__ == "__main__":
    assert cas_ckpt.cli.main
    place = Path(sys.argv[1])
    for module in sys.argv[2:]:
        importlib.import_module(module)
    print(json.dumps([started(place, number, line) for number, line in enumerate(json.load(sys.stdin))]))
