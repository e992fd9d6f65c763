"""Keys of SSH for tests, made once by ssh-keygen 9.2 (ssh-keygen.json): as files of this process."""

from __future__ import annotations

import atexit
import base64
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "ssh-keygen.json").read_text())
KEYS: dict[str, Any] = VECTORS["keys"]
MESSAGE: bytes = VECTORS["message"].encode()


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="cas_ckpt_keys_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def key_file(name: str = "ed25519", private: str = "") -> Path:
    """The file of a private key: of the one called so, or of this content."""
    path = _folder() / name
    path.touch(mode=0o600)
    path.write_text(private or KEYS[name]["private"])
    return path


def public_line(name: str = "ed25519") -> str:
    """The type and the base64 of its public key."""
    return " ".join(KEYS[name]["public"].split()[:2])


def blob_of(name: str, kind: str = "cas_ckpt") -> bytes:
    """A signature that ssh-keygen made of `MESSAGE`, as it is stored."""
    return base64.b64decode("".join(KEYS[name]["signatures"][kind].strip().splitlines()[1:-1]), validate=True)
