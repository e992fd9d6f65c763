"""The type of bulk bytes (`collections.abc.Buffer` exists from Python 3.12 only)."""

from __future__ import annotations

from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
