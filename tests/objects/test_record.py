"""Sealed records: whole and checked, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from cas_ckpt.errors import CorruptionError, UnsupportedVersionError
from cas_ckpt.objects.digest import seal, unseal

KEY = "refs/heads/main.ref"
REF = {"target": b"x" * 32, "generation": 3, "generation_nonce": bytes(16), "log": [], "nonce": bytes(16)}


def test_every_flip_and_truncation_of_a_record_is_found() -> None:
    data = seal("ref", 1, REF, key=KEY)
    assert unseal("ref", data, version=1, key="refs/heads/main.ref")["generation"] == 3
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        for bad in (bytes(damaged), data[:at]):
            with pytest.raises(CorruptionError, match="refs/heads/main.ref"):
                unseal("ref", bad, version=1, key="refs/heads/main.ref")


def test_a_record_of_another_kind_is_refused() -> None:
    with pytest.raises(CorruptionError):
        unseal("config", seal("ref", 1, {}, key="config"), version=1, key="config")


def test_a_record_of_a_newer_version_is_refused_as_newer() -> None:
    with pytest.raises(UnsupportedVersionError, match="upgrade"):
        unseal("config", seal("config", 2, {}, key="config"), version=1, key="config")


def test_a_record_under_another_key_is_refused_and_both_keys_are_named() -> None:
    data = seal("ref", 1, {"generation": 3}, key="refs/heads/main.ref")
    with pytest.raises(CorruptionError, match=r"refs/heads/side\.ref .*refs/heads/main\.ref.*repo\.repair\(.refs.\)"):
        unseal("ref", data, version=1, key="refs/heads/side.ref")


@pytest.mark.parametrize("fields", [{"color": 1}, {"log": None}], ids=["one more", "one less"])
def test_a_record_with_other_fields_than_its_version_has_is_refused(fields: dict[str, Any]) -> None:
    other = {name: value for name, value in {**REF, **fields}.items() if value is not None}
    with pytest.raises(CorruptionError, match=f"other fields than version 1 has: {next(iter(fields))}"):
        unseal("ref", seal("ref", 1, other, key=KEY), version=1, key=KEY)
    noted = seal("ref", 1, {**REF, "note": "why"}, key=KEY)
    assert unseal("ref", noted, version=1, key=KEY)["note"] == "why"
