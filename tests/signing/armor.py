"""The blobs of signatures as text, as `ssh-keygen -Y sign` writes them: base64 between two lines."""

from __future__ import annotations

import base64


def unarmored(text: str) -> bytes:
    """The blob in such a text."""
    return base64.b64decode("".join(text.strip().splitlines()[1:-1]), validate=True)
