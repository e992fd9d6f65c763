"""`python -m cas_ckpt`: the command line."""

from __future__ import annotations

import sys

from cas_ckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
