"""Small value types of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cas_ckpt.errors import CkptError, CorruptionError, UnsupportedValueError
from cas_ckpt.objects.values import decode_value, encode_value
from cas_ckpt.training.capture import capture as torch_values

VALUES = [
    torch.Size([]),
    torch.Size([2, 3]),
    torch.float32,
    torch.float8_e5m2,
    torch.device("cpu"),
    torch.device("cuda", 3),
    torch.strided,
    torch.sparse_csr,
    torch.channels_last,
    torch.preserve_format,
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_of_torch_comes_back_with_its_type(value: Any) -> None:
    found = decode_value(encode_value({"deep": [value]}, key="x"))["deep"][0]
    assert found == value
    assert type(found) is type(value)


def test_registering_again_is_harmless() -> None:
    before = [encode_value(value, key="x") for value in VALUES]
    torch_values.register_torch_values()
    assert [encode_value(value, key="x") for value in VALUES] == before
    assert [decode_value(data) for data in before] == VALUES


@pytest.mark.parametrize("name", ["no_such_dtype", "load", "nn", "__class__"])
def test_a_name_never_selects_anything_but_its_kind(name: str) -> None:
    data = encode_value(torch.float32, key="x").replace(b"\xa7float32", bytes([0xA0 + len(name)]) + name.encode())
    with pytest.raises(CkptError):
        decode_value(data)
    with pytest.raises(UnsupportedValueError, match="has no dtype"):
        torch_values._named(name, torch.dtype)


def test_malformed_values_are_corruption() -> None:
    for tag, text in ((b"torch.device", b"cpu"), (b"torch.dtype", b"float32")):
        data = encode_value(torch.device("cpu") if tag.endswith(b"device") else torch.float32, key="x")
        assert text in data
        with pytest.raises((CorruptionError, UnsupportedValueError)):
            decode_value(data.replace(text, b"!" * len(text)))
