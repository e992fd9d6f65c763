"""How many files and functions of the package do common calls run through?

    python -m benchmarks.path               the counts
    python -m benchmarks.path commit push   and, of these calls, every file with the functions that ran

Counted by `sys.setprofile`, threads included, in the second of two calls: what only the first one does is not part.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType

import torch
import torch.distributed.checkpoint as dist_checkpoint

import cas_ckpt
from cas_ckpt import Repository
from cas_ckpt.dcp import CasStorageWriter

PACKAGE = os.path.dirname(cas_ckpt.__file__) + os.sep


_seen: set[CodeType] = set()


def _note(frame: FrameType, event: str, _: object) -> None:
    if event == "call":
        _seen.add(frame.f_code)


def functions_of(call: Callable[[], object]) -> Mapping[str, list[str]]:
    """The functions that ran in `call`, in whatever thread, by file."""
    _seen.clear()
    call()
    found: dict[str, list[str]] = defaultdict(list)
    for code in tuple(_seen):
        if code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            found[code.co_filename.removeprefix(PACKAGE)].append(code.co_qualname)
    return found


def calls(folder: Path) -> dict[str, Callable[[], object]]:
    """The calls that are counted, on a state of one module that changes before each commit."""
    repo, model = Repository.init(folder / "repo"), torch.nn.Linear(64, 64)
    Repository.init(folder / "other").close()
    repo.add_remote("origin", str(folder / "other"))
    state = {"m": model}

    def changed() -> dict[str, torch.nn.Module]:
        torch.nn.init.normal_(model.weight)
        return state

    def push() -> object:
        repo.commit(changed(), message="to push")
        return functions_of(lambda: repo.push("origin"))

    def dcp_save() -> object:
        return dist_checkpoint.save({"m": changed()["m"].state_dict()}, storage_writer=CasStorageWriter(repo))

    return {
        "commit": lambda: functions_of(lambda: repo.commit(changed(), message="a commit")),
        "checkout": lambda: functions_of(lambda: repo.checkout("main", into=state)),
        "slice": lambda: functions_of(lambda: repo.read("main", "m/weight", slice(0, 2))),
        "commit_async": lambda: functions_of(lambda: repo.commit_async(changed(), message="behind").result()),
        "dcp.save": lambda: functions_of(dcp_save),
        "push": push,
    }


def main() -> None:
    threading.setprofile(_note)  # threads that are kept from call to call count, too
    sys.setprofile(_note)
    with tempfile.TemporaryDirectory() as folder:
        for name, call in calls(Path(folder)).items():
            call()
            found = call()
            assert isinstance(found, Mapping)
            print(f"{name:<14}{len(found):>4} files {sum(map(len, found.values())):>5} functions")
            if name in sys.argv[1:]:
                for file, functions in sorted(found.items()):
                    print(f"    {file}: {', '.join(sorted(functions))}")


if __name__ == "__main__":
    main()
