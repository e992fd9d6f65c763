"""One operation in its own process: `python -m benchmarks.harness.worker OP SIZE PEER FOLDER`.

Prints one JSON object as its last line. Exit codes: 0 measured, 3 the peer cannot do this (`reason`),
1 it failed (traceback on stderr).
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

from benchmarks.harness.operations import OPERATIONS, Task
from benchmarks.harness.peers import NotPossibleError
from benchmarks.harness.sizes import SIZES

NOT_POSSIBLE = 3


def main(arguments: list[str]) -> int:
    """Run one operation and print its figures."""
    operation, size, peer, folder = arguments
    warnings.simplefilter("ignore")
    try:
        figures = OPERATIONS[operation](Task(SIZES[size], peer, Path(folder)))
    except NotPossibleError as error:
        print(json.dumps({"reason": str(error)}))
        return NOT_POSSIBLE
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
