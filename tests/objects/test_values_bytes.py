"""The bytes of plain values: frozen literals, damage, and pickles that nobody allowed."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import http
import pathlib
import pickle
import types
import uuid
import zoneinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.errors import CorruptionError, UnsupportedValueError, UnsupportedVersionError
from cas_ckpt.objects.digest import pack_canonical, pack_ext
from cas_ckpt.objects.structures import Named
from cas_ckpt.objects.values import EnumValue, Opaque, ValueCode, decode_value, encode_value
from tests.searches import tries

GOLDEN: list[tuple[Any, str]] = [
    (2**64, "c70901010000000000000000"),
    (-(2**63) - 1, "c70901ff7fffffffffffffff"),
    ("a\ud800", "d60261eda080"),
    (1 - 2j, "d8033ff0000000000000c000000000000000"),
    (bytearray(b"ab"), "d5046162"),
    ((1, (2.0,)), "c70f059201c70a0591cb4000000000000000"),
    ({3, "a", None}, "c705069303a161c0"),
    (frozenset({1}), "d5079101"),
    ({True: 1, (2,): 3}, "d70894c301d505910203"),
    ({2**64: 0}, "c70e0892c7090101000000000000000000"),
    (collections.OrderedDict(b=1, a=2), "c7070994a16201a16102"),
    (collections.Counter({30: 1, 80: 2}), "c7050a821e015002"),
    (collections.defaultdict(list, {"a": [1]}), "c70b0b92a46c69737481a1619101"),
    (collections.deque([1, 2], 5), "d60c93050102"),
    (range(0, 10, 2), "d60d93000a02"),
    (slice(None, 5), "d60e93c005c0"),
    (..., "c7000f"),
    (Opaque("other.dtype", b"\xa7float32"), "c7151092ab6f746865722e6474797065a7666c6f61743332"),
    (np.float32(1.5), "c70b1192a33c6634c4040000c03f"),
    (np.bool_(True), "d71192a37c6231c40101"),
    (np.str_("ü"), "c7061192a155a2c3bc"),
    (np.bytes_(b"\xff"), "c7061192a153c401ff"),
    (np.datetime64(1, "ns"), "c7131192a73c4d385b6e735dc4080100000000000000"),
    (np.dtype("float64"), "c703123c6638"),
    (dt.datetime(2026, 1, 2, 3, 4, 5, 6), "c70c1399cd07ea01020304050600c0"),
    (dt.datetime(2026, 1, 2, tzinfo=dt.UTC), "c7151399cd07ea01020000000000c7071791d61693000000"),
    (dt.date(2026, 1, 2), "c7061493cd07ea0102"),
    (dt.time(1, 2, 3, 4), "c70715960102030400c0"),
    (dt.timedelta(-1, 2, 3), "d61693ff0203"),
    (dt.timezone(dt.timedelta(hours=1), "MEZ"), "c70e1792c706169300cd0e1000a34d455a"),
    (dt.UTC, "c7071791d61693000000"),
    (zoneinfo.ZoneInfo("Europe/Berlin"), "c70f1891ad4575726f70652f4265726c696e"),
    (pathlib.PurePosixPath("/a/b"), "c7141992ad50757265506f73697850617468a42f612f62"),
    (pathlib.PureWindowsPath("c:/x"), "c7161992af5075726557696e646f777350617468a4633a5c78"),
    (pathlib.PosixPath("a"), "c70d1992a9506f73697850617468a161"),
    (uuid.UUID(int=1), "d81a00000000000000000000000000000001"),
    (decimal.Decimal("-1.50"), "c7051b2d312e3530"),
    (fractions.Fraction(1, 3), "c7031c920103"),
    (http.HTTPStatus.OK, "c7131d93a468747470aa48545450537461747573ccc8"),
    (EnumValue("m", "Q", 1), "c7061d93a16da15101"),
    (argparse.Namespace(lr=0.5), "c70d1e81a26c72cb3fe0000000000000"),
    (types.SimpleNamespace(a=1), "d61f81a16101"),
    (Named("namedtuple", "train:Pair", {"b": 1, "a": (2,)}), "c7152195aa747261696e3a50616972a16201a161d5059102"),
    (Named("dataclass", "train:Config", {"lr": 0.5}), "c71a2293ac747261696e3a436f6e666967a26c72cb3fe0000000000000"),
    (collections.UserList([1]), "c73a208004952f000000000000008c0b636f6c6c656374696f6e73948c08557365"
     "724c6973749493942981947d948c0464617461945d944b016173622e"),
]  # fmt: skip


def test_every_code_has_a_literal() -> None:
    written = {bytes.fromhex(literal)[2 if literal[:2] == "c7" else 1] for _, literal in GOLDEN}
    assert written >= set(ValueCode)


@pytest.mark.parametrize(("value", "literal"), GOLDEN, ids=[literal for _, literal in GOLDEN])
def test_the_bytes_of_a_value_are_these_for_ever(value: Any, literal: str) -> None:
    assert encode_value(value, key="k", allow_pickle=True).hex() == literal
    again = decode_value(bytes.fromhex(literal), allow_pickle=True)
    assert type(again) is type(value)
    assert again == value


@given(st.sampled_from(GOLDEN), st.data())
@settings(max_examples=tries(380, 1500), deadline=None)
def test_mutated_bytes_raise_only_typed_errors_or_have_one_form(golden: tuple[Any, str], data: Any) -> None:
    packed = bytearray.fromhex(golden[1])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(packed)))
        packed[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    assert_refused_or_canonical(bytes(packed))


@given(st.sampled_from(list(ValueCode)), st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.binary(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=5), max_leaves=8))  # fmt: skip
@settings(max_examples=tries(250, 1000), deadline=None)
def test_any_payload_under_any_code_raises_only_typed_errors(code: int, payload: Any) -> None:
    assert_refused_or_canonical(pack_ext(code, encode_value(payload, key="k")))


@given(st.sampled_from(list(ValueCode)), st.binary(max_size=12))
@settings(max_examples=tries(250, 1000), deadline=None)
def test_any_bytes_under_any_code_raise_only_typed_errors(code: int, payload: bytes) -> None:
    assert_refused_or_canonical(pack_ext(code, payload))


def assert_refused_or_canonical(data: bytes) -> None:
    try:
        value = decode_value(data)
    except (CorruptionError, UnsupportedVersionError, UnsupportedValueError):
        return
    assert encode_value(value, key="k") == data


def ext(code: ValueCode, *items: Any) -> bytes:
    return pack_ext(code, pack_canonical(list(items)))


WRONG = {
    "a set out of order": ext(ValueCode.SET, 2, 1),
    "a set with a double": ext(ValueCode.SET, 1, 1),
    "a set of lists": ext(ValueCode.SET, []),
    "pairs that are a plain dict": ext(ValueCode.PAIRS, 1, 2),
    "pairs out of order": ext(ValueCode.PAIRS, True, 1, None, 2),
    "pairs with equal keys": ext(ValueCode.PAIRS, True, 1, 1.0, 2),
    "half a pair": ext(ValueCode.ORDERED_DICT, 1),
    "a big int that is small": pack_ext(ValueCode.BIG_INT, b"\x05"),
    "a wide text that is not": pack_ext(ValueCode.WIDE_STR, b"abc"),
    "half a complex": pack_ext(ValueCode.COMPLEX, bytes(8)),
    "a full deque that overflows": ext(ValueCode.DEQUE, 1, 1, 2),
    "a range without step": ext(ValueCode.RANGE, 0, 1, 0),
    "a factory that runs code": ext(ValueCode.DEFAULT_DICT, "exec", {}),
    "a month 13": ext(ValueCode.DATE, 2026, 13, 1),
    "an unreduced fraction": ext(ValueCode.FRACTION, 2, 4),
    "a fraction over zero": ext(ValueCode.FRACTION, 1, 0),
    "a decimal with spaces": pack_ext(ValueCode.DECIMAL, b" 1"),
    "a dtype of objects": pack_ext(ValueCode.NUMPY_DTYPE, b"|O"),
    "a scalar of objects": ext(ValueCode.NUMPY_SCALAR, "|O", bytes(8)),
    "a bool scalar of 2": ext(ValueCode.NUMPY_SCALAR, "|b1", b"\x02"),
    "a big-endian scalar": ext(ValueCode.NUMPY_SCALAR, ">i4", bytes(4)),
    "a path that climbs out": ext(ValueCode.PATH, "Popen", "x"),
    "a path not normal": ext(ValueCode.PATH, "PurePosixPath", "a//b"),
    "a zone outside the zones": ext(ValueCode.ZONE_INFO, "../../etc/passwd"),
    "a tag that is no string": ext(ValueCode.EXTENSION, 5, 5),
    "an enum without name": ext(ValueCode.ENUM, 1, 2, 3),
    "a tuple that is a map": pack_ext(ValueCode.TUPLE, b"\x80"),
    "an ellipsis with luggage": pack_ext(ValueCode.ELLIPSIS, b"x"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bytes_that_no_encoder_writes_are_corrupt(name: str) -> None:
    with pytest.raises(CorruptionError):
        decode_value(WRONG[name])


def test_nesting_without_end_is_corrupt() -> None:
    data = b"\xc0"
    for _ in range(2000):
        data = pack_ext(ValueCode.TUPLE, b"\x91" + data)
    with pytest.raises(CorruptionError, match="deeper"):
        decode_value(data)


def test_a_code_of_a_later_version_says_upgrade_and_names_the_key() -> None:
    with pytest.raises(UnsupportedVersionError, match=r"loop/state.*100.*upgrade"):
        decode_value(pack_ext(100, b""), key="loop/state")


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (open, (self.marker, "w"))


def test_a_pickle_is_never_run_unless_it_is_allowed(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    data = encode_value({"a": [Trap(str(marker))]}, key="k", allow_pickle=True)
    with pytest.raises(UnsupportedValueError, match=r"optim/extra.*allow_pickle=True"):
        decode_value(data, key="optim/extra")
    assert not marker.exists()
    decode_value(data, allow_pickle=True)["a"][0].close()
    assert marker.exists()


def test_a_pickle_hidden_in_any_other_value_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    payload = pickle.dumps(Trap(str(marker)))
    hidden = pack_ext(ValueCode.PICKLE, payload)
    for wrapped in (
        pack_ext(ValueCode.TUPLE, b"\x91" + hidden),
        pack_ext(ValueCode.EXTENSION, b"\x92\xa3xyz" + hidden),
        pack_ext(ValueCode.ENUM, b"\x93\xa1m\xa1q" + hidden),
        pack_ext(ValueCode.DATETIME, b"\x99" + b"\x01" * 7 + b"\x00" + hidden),
    ):
        with pytest.raises(UnsupportedValueError, match="allow_pickle"):
            decode_value(wrapped)
    assert not marker.exists()


def test_only_the_part_without_a_plain_form_is_pickled() -> None:
    value = {"plain": (1, 2), "odd": collections.UserList([1])}
    data = encode_value(value, key="k", allow_pickle=True)
    assert b"\xa5plain" + encode_value((1, 2), key="k") in data
    assert decode_value(data, allow_pickle=True) == value


def test_what_cannot_be_pickled_is_refused_by_key() -> None:
    with pytest.raises(UnsupportedValueError, match=r"^hook: .*function"):
        encode_value(lambda: 0, key="hook", allow_pickle=True)


def test_a_pickle_that_cannot_be_loaded_is_refused_by_key() -> None:
    with pytest.raises(UnsupportedValueError, match="^hook: "):
        decode_value(pack_ext(ValueCode.PICKLE, b"\x80\x04cno.such\nthing\n."), key="hook", allow_pickle=True)


def test_a_time_zone_that_is_not_installed_says_so() -> None:
    with pytest.raises(UnsupportedValueError, match=r"Mars/Olympus.*tzdata"):
        decode_value(ext(ValueCode.ZONE_INFO, "Mars/Olympus"), key="k")
