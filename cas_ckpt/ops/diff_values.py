"""Values as people are shown them: decoded without running anything, and cut where they are long."""

from __future__ import annotations

from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError, UnsupportedValueError, UnsupportedVersionError
from cas_ckpt.objects.state import Path, StoredTensor, render_key
from cas_ckpt.objects.tree_node import TensorEntry, ValueEntry
from cas_ckpt.objects.values import decode_value
from cas_ckpt.ops.read import read_array
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.transfer.fetch import named

MOST_BYTES = 64 * 1024
"""Longer values are not read for being shown."""

MOST_CHARACTERS = 200
"""Longer texts are cut."""


def value_text(handle: RepositoryHandle, path: Path, value: ValueEntry | TensorEntry) -> str | None:
    """The value as Python shows it; None if it is too long to be read for that.

    Raises:
        CorruptionError, NotFoundError: names the key.
    """
    key = render_key(path)
    if isinstance(value, ValueEntry):
        return text_of(value.data, key)
    if value.spec.num_bytes > MOST_BYTES:
        return None
    stored = StoredTensor(value.spec, value.flavor, value.node, value.inline, value.single)
    try:
        data = read_array(handle, stored, value.spec.box).tobytes()
    except (CorruptionError, NotFoundError) as error:
        raise named(error, key) from error
    return text_of(data, key)


def text_of(data: bytes, key: str) -> str:
    """The encoded value as Python shows it.

    Raises:
        CorruptionError: the bytes are no value.
    """
    try:
        text = repr(decode_value(data, key=key))
    except UnsupportedValueError:
        return "(pickled)"
    except UnsupportedVersionError:
        return "(of a newer version)"
    except CkptError:
        raise
    except ValueError:  # an integer of more digits than Python writes out
        return f"({len(data)} bytes that Python does not show)"
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."
