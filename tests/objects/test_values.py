"""Plain values: exact round trips, one form per value, refusals that say where and what."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import io
import math
import pathlib
import struct
import types
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.errors import UnsupportedValueError
from cas_ckpt.objects.values import EnumValue, Opaque, decode_value, encode_value, register_value_type
from tests.searches import tries


class Colour(enum.Enum):
    RED = 1
    PAIR = ("a", 2.0)


class Level(enum.IntEnum):
    LOW = 3


class Mode(enum.StrEnum):
    FAST = "fast"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


def round_trip(value: Any, **options: Any) -> Any:
    return decode_value(encode_value(value, key="k", **options), **options)


def exactly(value: Any) -> Any:
    """`value` as something that is equal only for equal types and bits, dict order apart."""
    kind = type(value)
    if isinstance(value, float) and kind is float:
        return kind, struct.pack(">d", value)
    if kind is complex:
        return kind, struct.pack(">dd", value.real, value.imag)
    if isinstance(value, np.generic):
        return kind, value.dtype, value.tobytes()
    if kind in (dict, collections.Counter, collections.defaultdict):
        pairs = [(exactly(key), exactly(item)) for key, item in value.items()]
        return kind, getattr(value, "default_factory", None), sorted(pairs, key=repr)
    if isinstance(value, dict):
        return kind, [(exactly(key), exactly(item)) for key, item in value.items()]
    if kind in (set, frozenset):
        return kind, sorted((exactly(item) for item in value), key=repr)
    if kind in (list, tuple, collections.deque):
        return kind, getattr(value, "maxlen", None), [exactly(item) for item in value]
    return (kind, value) if kind in (int, str, bytes) else (kind, repr(value))


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats() | st.complex_numbers() | st.text(st.characters()) | st.binary()
    | st.binary().map(bytearray) | st.decimals() | st.fractions() | st.uuids()
    | st.datetimes() | st.dates() | st.times() | st.timedeltas()
    | st.floats().map(np.float64) | st.integers(-(2**31), 2**31 - 1).map(np.int32)
    | st.sampled_from([Colour.RED, Colour.PAIR, Level.LOW, Mode.FAST, Rights.READ | Rights.WRITE])
)  # fmt: skip

HASHABLE = st.none() | st.booleans() | st.integers() | st.text(st.characters()) | st.binary() | st.tuples(st.integers())


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(st.characters()) | st.integers(), inner)
        | st.dictionaries(HASHABLE, inner)
        | st.dictionaries(st.text(), inner).map(collections.OrderedDict)
        | st.lists(inner).map(collections.deque)
        | st.sets(HASHABLE)
        | st.frozensets(HASHABLE)
    )


VALUES = st.recursive(SCALARS, nested, max_leaves=20)


@given(VALUES)
@settings(max_examples=tries(80, 300), deadline=None)
def test_any_value_comes_back_in_type_and_bits(value: Any) -> None:
    assert exactly(round_trip(value)) == exactly(value)


def named(values: list[Any]) -> list[str]:
    return [f"{number}-{type(value).__name__}" for number, value in enumerate(values)]


EXAMPLES = [
    2**64, 2**64 - 1, -(2**63), -(2**63) - 1, 2**3000, True, 1, 1.0, -0.0, math.inf, 5e-324,
    struct.unpack(">d", bytes.fromhex("7ff0000000000001"))[0],
    struct.unpack(">d", bytes.fromhex("fff8dead0000beef"))[0],
    complex(math.nan, -0.0), "", "\ud800", "a\ude00\ud83d", "\0", "ü\U0001f600", b"", bytearray(b"\0\xff"),
    [], (), {}, set(), frozenset(), [()], ((), [], {}), {"": {}}, {1: 1, "1": 2, b"1": 3}, {True: 1}, {2**70: "big"},
    {"\ud800": 1}, {(1, 2): 3, None: 4, 2.5: 5, frozenset({1}): 6}, {1, "1", b"1", None, (1,)}, [2**70, "\ud800"],
    collections.OrderedDict([("b", 1), ("a", 2)]), collections.Counter({30: 1, 80: 2}), collections.Counter("abca"),
    collections.defaultdict(list, a=[1]), collections.defaultdict(None, {1: 2}), collections.deque([1, 2], maxlen=2),
    collections.deque(), range(1, 10, 3), range(2**70), slice(None, 5, -1), ..., types.SimpleNamespace(a=(1,)),
    argparse.Namespace(lr=0.1), np.float32(1.5), np.float16("nan"), np.bool_(True), np.int64(-1), np.uint8(255),
    np.complex64(1 - 2j), np.datetime64("2026-01-01T00:00", "ns"), np.timedelta64(3, "D"), np.datetime64("NaT"),
    np.str_("text\ud800"), np.bytes_(b"raw"), np.dtype("float32"), np.dtype(">i4"), np.dtype("M8[25s]"),
    dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.UTC, fold=1), dt.datetime(1, 1, 1), dt.datetime.max, dt.date(9999, 12, 31),
    dt.datetime(2026, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")), dt.time(23, 59, fold=1), dt.timedelta.min,
    dt.time(1, tzinfo=dt.timezone(dt.timedelta(hours=-5, microseconds=1), "odd")), dt.timezone(dt.timedelta(0), "UTC"),
    zoneinfo.ZoneInfo("America/New_York"), pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("c:/x"),
    pathlib.Path("rel/\udcff"), uuid.UUID(int=7), decimal.Decimal("-0.00"), decimal.Decimal("sNaN123"),
    decimal.Decimal("1E+999999"), fractions.Fraction(-1, 3), Colour.RED, Colour.PAIR, Level.LOW, Mode.FAST,
    Rights.READ | Rights.WRITE, Rights(0), EnumValue("no.such.module", "Kind", [1]),
]  # fmt: skip


@pytest.mark.parametrize("value", EXAMPLES, ids=named(EXAMPLES))
def test_a_corner_of_a_type_comes_back_in_type_and_bits(value: Any) -> None:
    assert exactly(round_trip(value)) == exactly(value)


def test_values_of_different_types_or_bits_never_share_their_bytes() -> None:
    values = [0, False, 0.0, -0.0, 0j, "0", b"0", bytearray(b"0"), None, [0], (0,), {0}, frozenset({0}), {0: 0},
              np.int64(0), np.int32(0), np.float64(0), Level.LOW, 3, decimal.Decimal(0), decimal.Decimal("0.0"),
              fractions.Fraction(0), collections.OrderedDict({0: 0}), collections.Counter({0: 0}),
              range(0)]  # fmt: skip
    assert len({encode_value(value, key="k") for value in values}) == len(values)


@given(st.dictionaries(HASHABLE, st.integers()), st.randoms())
def test_the_order_of_a_dict_or_set_does_not_reach_its_bytes(value: dict[Any, int], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert encode_value(dict(items), key="k") == encode_value(value, key="k")
    assert encode_value(set(dict(items)), key="k") == encode_value(set(value), key="k")


def test_the_order_of_an_ordered_dict_is_part_of_it() -> None:
    ab = collections.OrderedDict(a=1, b=2)
    ba = collections.OrderedDict(b=2, a=1)
    assert encode_value(ab, key="k") != encode_value(ba, key="k")


class Bare:
    x = 1


@dataclasses.dataclass
class Plain:
    x: int = 1


class Text(str):
    __slots__ = ()


class Zone(dt.tzinfo):
    def utcoffset(self, when: dt.datetime | None) -> dt.timedelta:
        return dt.timedelta(0)

    def dst(self, when: dt.datetime | None) -> dt.timedelta:
        return dt.timedelta(0)

    def tzname(self, when: dt.datetime | None) -> str:
        return "Zone"


def local_enum() -> enum.Enum:
    class Inner(enum.Enum):
        A = 1

    return Inner.A


REFUSED = [
    Bare(), Text("t"), object(), len, int, local_enum(), Zone(),
    collections.defaultdict(lambda: 0), np.longdouble(1), np.zeros(1, "i4,f4")[0], np.dtype("O"), memoryview(b""),
    np.zeros(3),
]  # fmt: skip


@pytest.mark.parametrize("value", REFUSED, ids=named(REFUSED))
def test_what_has_no_plain_form_is_refused_by_key_type_and_remedy(value: Any) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        encode_value({"deep": [value]}, key="optim/param_groups")
    message = str(caught.value)
    assert message.startswith("optim/param_groups: ")
    assert type(value).__qualname__ in message
    assert "allow_pickle=True" in message
    assert "state_dict" in message


def test_a_time_in_a_zone_of_ones_own_is_refused_by_the_zone() -> None:
    for value in (dt.datetime(2026, 1, 1, tzinfo=Zone()), dt.time(1, tzinfo=Zone())):
        with pytest.raises(UnsupportedValueError, match="Zone"):
            encode_value(value, key="k")


def test_a_zone_without_a_name_is_refused() -> None:
    head = struct.pack(">4sc15x6l", b"TZif", b"\0", 0, 0, 0, 0, 1, 4)
    nameless = zoneinfo.ZoneInfo.from_file(io.BytesIO(head + struct.pack(">lbb", 0, 0, 0) + b"ABC\0"))
    with pytest.raises(UnsupportedValueError, match="ZoneInfo"):
        encode_value(nameless, key="k")


def test_a_list_or_dict_that_contains_itself_is_refused() -> None:
    ring: list[Any] = []
    ring.append(ring)
    snake: dict[str, Any] = {}
    snake["tail"] = (snake,)
    for value in (ring, snake):
        with pytest.raises(UnsupportedValueError, match="contains itself"):
            encode_value(value, key="k", allow_pickle=True)


WRAPS: dict[str, Callable[[Any], Any]] = {
    "list": lambda inner: [inner],
    "tuple": lambda inner: (inner,),
    "dict": lambda inner: {"a": inner},
    "pairs": lambda inner: {None: inner},
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS.keys())
def test_the_deepest_nesting_that_is_written_can_be_read(wrap: Callable[[Any], Any]) -> None:
    value: Any = 0
    for _ in range(100):
        value = wrap(value)
    assert round_trip(value) == value
    with pytest.raises(UnsupportedValueError, match="deeper than 100"):
        encode_value(wrap(value), key="k")


def test_the_depth_of_counters_and_namespaces_is_counted_alike_on_both_ways() -> None:
    value: Any = 0
    for _ in range(50):
        value = types.SimpleNamespace(v=value)
    assert round_trip(value) == value
    with pytest.raises(UnsupportedValueError, match="deeper than 100"):
        encode_value([value], key="k")


def test_an_enum_whose_class_is_not_imported_stays_a_value_and_imports_nothing() -> None:
    import sys

    stored = EnumValue("this", "Colour", 1)  # `import this` prints a poem: a stdlib module nobody imports
    assert "this" not in sys.modules
    data = encode_value(stored, key="k")
    assert decode_value(data) == stored
    assert encode_value(decode_value(data), key="k") == data
    assert "this" not in sys.modules


def test_an_enum_name_never_reaches_a_lazy_module_attribute() -> None:
    import sys

    asked = []
    lazy = types.ModuleType("lazy_module")
    lazy.__getattr__ = lambda name: asked.append(name) or Colour  # type: ignore[method-assign,func-returns-value]
    sys.modules["lazy_module"] = lazy
    try:
        stored = EnumValue("lazy_module", "Colour", 1)
        assert round_trip(stored) == stored
    finally:
        del sys.modules["lazy_module"]
    assert asked == []


@pytest.mark.parametrize("qualname", ["Plain", "round_trip", "Colour.RED.value", "Colour.Missing", "", "pytest.raises"])
def test_an_enum_name_that_is_no_enum_class_stays_a_value(qualname: str) -> None:
    stored = EnumValue(__name__, qualname, 1)
    assert round_trip(stored) == stored


class Called:
    calls: list[int]

    def __init__(self, value: int) -> None:
        self.calls.append(value)


def test_a_class_that_is_no_enum_is_never_called() -> None:
    Called.calls = []
    round_trip(EnumValue(__name__, "Called", 1))
    assert Called.calls == []


def test_an_enum_that_lost_the_member_stays_a_value() -> None:
    stored = EnumValue(__name__, "Colour", 99)
    assert round_trip(stored) == stored
    assert round_trip(EnumValue(__name__, "Colour", True)) == EnumValue(__name__, "Colour", True)


class Angle:
    def __init__(self, degrees: int) -> None:
        self.degrees = degrees


def test_an_unregistered_extension_is_opaque_and_keeps_its_bytes() -> None:
    register_value_type("test.angle", Angle, encode=lambda a: (a.degrees, "deg"), decode=lambda v: Angle(v[0]))
    data = encode_value([Angle(90)], key="k")
    assert decode_value(data)[0].degrees == 90
    other = data.replace(b"test.angle", b"test.other")
    (opaque,) = decode_value(other)
    assert opaque == Opaque("test.other", encode_value((90, "deg"), key="k"))
    assert decode_value(opaque.payload) == (90, "deg")
    assert encode_value([opaque], key="k") == other
    assert round_trip({opaque: 1}) == {opaque: 1}


def test_a_tag_or_type_is_registered_once_and_may_be_repeated() -> None:
    from cas_ckpt.errors import InvalidInputError

    for _ in range(2):
        register_value_type("test.plain", Plain, encode=lambda p: p.x, decode=Plain)
    assert round_trip(Plain(5)) == Plain(5)
    with pytest.raises(InvalidInputError, match=r"test\.plain"):
        register_value_type("test.plain2", Plain, encode=lambda p: p.x, decode=Plain)
    with pytest.raises(InvalidInputError, match=r"test\.plain"):
        register_value_type("test.plain", Text, encode=str, decode=Text)


def test_a_namespace_may_hold_any_attribute_name() -> None:
    for kind in (argparse.Namespace, types.SimpleNamespace):
        value = kind()
        vars(value).update({"self": 1, "not a name": 2})
        assert vars(round_trip(value)) == vars(value)
