"""Sealed records: the small mutable values of a repository (config, refs, gc state).

Invariant: a record is read whole and checked, or refused; a flipped bit is never obeyed, and neither
is an intact record that was put under another key than the one that it was written for.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cas_ckpt.errors import CorruptionError, UnsupportedVersionError
from cas_ckpt.objects.canonical import pack_canonical, unpack_canonical
from cas_ckpt.objects.digest import DIGEST_BYTES, object_id

MAGIC = b"CASCKREC"
_HEAD_BYTES = len(MAGIC) + DIGEST_BYTES

FIELDS: Mapping[str, frozenset[str]] = MappingProxyType({
    "config": frozenset({"store_id", "default_branch", "encoding", "pack_bytes", "conditional_writes", "nonce"}),
    "gc-state": frozenset({"generation", "generation_nonce", "phase", "condemned", "nonce"}),
    "ref": frozenset({"target", "generation", "generation_nonce", "log", "nonce"}),
    "name": frozenset(),
    "forgotten": frozenset({"commits", "time_us", "author"}),
    "released": frozenset({"commits"}),
    "session": frozenset({"host", "process", "started_us", "heard_us"}),
    "policy": frozenset({"default", "branches", "time_us", "author", "nonce"}),
})  # fmt: skip
"""Kind of record -> the fields that it has in version 1."""

OPTIONAL_FIELDS: Mapping[str, frozenset[str]] = MappingProxyType({"ref": frozenset({"note"})})

_REPAIRS = {"gc-state": "state", "ref": "refs"}
"""Kind of record -> what `repair` calls it; all others are "records"."""


def seal(kind: str, version: int, payload: dict[str, Any], *, key: str) -> bytes:
    """The bytes of the record that is to stand under `key`: magic, digest, canonical [kind, version, key, payload]."""
    body = pack_canonical([kind, version, key, payload])
    return MAGIC + object_id(f"record {kind}", body) + body


def unseal(kind: str, data: bytes, *, version: int, key: str) -> dict[str, Any]:
    """The payload of the record of `kind` that stands under `key`.

    Raises:
        CorruptionError: truncated, flipped, another kind of record, the record of another key, or one with
            other fields than its version has (what a writer meant is never passed over).
        UnsupportedVersionError: written in a newer version than `version`.
    """
    body = data[_HEAD_BYTES:]
    if data[: len(MAGIC)] != MAGIC or data[len(MAGIC) : _HEAD_BYTES] != object_id(f"record {kind}", body):
        raise CorruptionError(
            f"{key}: {len(data)} bytes that are not an intact {kind} record: restore it from a backup or another copy"
        )
    head = unpack_canonical(body)
    if not isinstance(head, list) or head[:1] != [kind] or len(head) < 2 or type(head[1]) is not int or head[1] < 1:
        raise CorruptionError(f"{key}: a sealed record, but of another kind than {kind}")
    if head[1] > version:
        raise UnsupportedVersionError(
            f"{key}: {kind} record of version {head[1]}, this cas_ckpt reads up to {version}: upgrade cas_ckpt"
        )
    if len(head) != 4 or not isinstance(head[2], str) or not isinstance(head[3], dict):
        raise CorruptionError(f"{key}: a {kind} record of odd form")
    if head[2] != key:
        raise _misplaced(kind, key, head[2])
    payload: dict[str, Any] = head[3]
    found = frozenset(payload)
    if not FIELDS[kind] <= found <= FIELDS[kind] | OPTIONAL_FIELDS.get(kind, frozenset()):
        odd = sorted(map(str, found ^ FIELDS[kind]))
        raise CorruptionError(f"{key}: a {kind} record has other fields than version {version} has: {', '.join(odd)}")
    return payload


def _repair(kind: str) -> str:
    if kind == "config":  # without it no Repository opens
        return "on the command line: cas-ckpt fsck --repair config --from OTHER"
    return f'repo.repair("{_REPAIRS.get(kind, "records")}")'


def _misplaced(kind: str, key: str, written_for: str) -> CorruptionError:
    return CorruptionError(
        f"{key} holds the {kind} record that was written for {written_for}: files were swapped or copied. Put back "
        f"the file that belongs there, or run {_repair(kind)}"
    )
