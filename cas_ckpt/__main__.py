"""`python -m cas_ckpt`, and the program `cas-ckpt`: the command line.

What it is made of is imported inside of `main`, so that a Ctrl-C meanwhile ends it as one later does.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line of this process, which then ends; the exit code."""
    try:
        from cas_ckpt.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("cas-ckpt: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
