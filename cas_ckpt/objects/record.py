"""Sealed records: the small mutable values of a repository (config, refs, gc state).

Invariant: a record is read whole and checked, or refused; a flipped bit is never obeyed.
"""

from __future__ import annotations

from typing import Any

from cas_ckpt.errors import CorruptionError, UnsupportedVersionError
from cas_ckpt.objects.canonical import pack_canonical, unpack_canonical
from cas_ckpt.objects.digest import DIGEST_BYTES, object_id

MAGIC = b"CASCKREC"
_HEAD_BYTES = len(MAGIC) + DIGEST_BYTES


def seal(kind: str, version: int, payload: dict[str, Any]) -> bytes:
    """The bytes of a record: magic, digest, canonical [kind, version, payload]."""
    body = pack_canonical([kind, version, payload])
    return MAGIC + object_id(f"record {kind}", body) + body


def unseal(kind: str, data: bytes, *, version: int, key: str) -> dict[str, Any]:
    """The payload of the record of `kind` that stands under `key`.

    Raises:
        CorruptionError: truncated, flipped, or another kind of record.
        UnsupportedVersionError: written in a newer version than `version`.
    """
    body = data[_HEAD_BYTES:]
    if data[: len(MAGIC)] != MAGIC or data[len(MAGIC) : _HEAD_BYTES] != object_id(f"record {kind}", body):
        raise CorruptionError(
            f"{key}: {len(data)} bytes that are not an intact {kind} record: restore it from a backup or another copy"
        )
    head = unpack_canonical(body)
    right = isinstance(head, list) and len(head) == 3 and head[0] == kind and type(head[1]) is int and head[1] >= 1
    if not right or not isinstance(head[2], dict):
        raise CorruptionError(f"{key}: a sealed record, but of another kind than {kind}")
    if head[1] > version:
        raise UnsupportedVersionError(
            f"{key}: {kind} record of version {head[1]}, this cas_ckpt reads up to {version}: upgrade cas_ckpt"
        )
    payload: dict[str, Any] = head[2]
    return payload
