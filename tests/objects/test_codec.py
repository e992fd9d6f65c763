"""Encodings of extents: exact round trips, bounded decoders, frozen bytes."""

from __future__ import annotations

import importlib
import os
import random
import resource
import shutil
import struct
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.errors import CorruptionError, InvalidInputError, UnsupportedVersionError
from cas_ckpt.objects import codec
from cas_ckpt.objects.codec import (
    MIN_SAVING,
    Encoded,
    Encoding,
    EncodingPolicy,
    decode_extent,
    encode_extent,
    known_policy,
)
from tests.processes import PIPE, Forked
from tests.searches import tries

POLICIES = get_args(EncodingPolicy)
RAW, AUTO, ZSTD, PLANES = POLICIES


def noise(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def weights(num: int = 50_000) -> bytes:
    return np.random.default_rng(0).standard_normal(num).astype(np.float32).tobytes()


def mostly_zero(num_bytes: int = 200_000) -> bytes:
    return noise(num_bytes // 10) + bytes(num_bytes - num_bytes // 10)


def decoded(encoded: Encoded, num_bytes: int) -> bytes:
    return bytes(decode_extent(encoded.encoding, encoded.payload, num_bytes=num_bytes))


ITEMS = st.sampled_from([1, 2, 3, 4, 8, 16, 20])
EXTENTS = (
    st.binary(max_size=300)
    | st.builds(lambda item, n: item * n, st.binary(min_size=1, max_size=16), st.integers(0, 6000))
    | st.builds(
        lambda a, n, b: a + bytes(n) + b, st.binary(max_size=50), st.integers(0, 70_000), st.binary(max_size=50)
    )
    | st.builds(noise, st.integers(0, 70_000), st.integers(0, 5))
    | st.builds(lambda n: np.arange(n).tobytes(), st.integers(0, 9000))
    | st.just(weights())
)


@given(EXTENTS, st.sampled_from(POLICIES), ITEMS)
@settings(max_examples=tries(100, 400), deadline=None)
def test_any_extent_comes_back_under_every_policy(data: bytes, policy: EncodingPolicy, item_bytes: int) -> None:
    encoded = encode_extent(data, policy=policy, item_bytes=item_bytes)
    assert decoded(encoded, len(data)) == data
    assert len(encoded.payload) <= len(data)


@pytest.mark.parametrize("policy", POLICIES)
def test_zeros_and_constants_are_found_whatever_the_policy(policy: EncodingPolicy) -> None:
    assert encode_extent(bytes(200_000), policy=policy, item_bytes=4) == Encoded(Encoding.ZERO, b"")
    one = struct.pack("<f", 1.0)
    assert encode_extent(one * 50_000, policy=policy, item_bytes=4) == Encoded(Encoding.CONSTANT, one)
    assert encode_extent(memoryview(b"\1" * 70_001), policy=policy, item_bytes=1) == Encoded(Encoding.CONSTANT, b"\1")


@pytest.mark.parametrize("at", [0, 5, 4095, 4096, 65535, 65536, 99_999, 199_999])
@pytest.mark.parametrize("item", [bytes(4), b"abcd"])
def test_one_byte_of_difference_anywhere_makes_no_constant(item: bytes, at: int) -> None:
    data = bytearray(item * 50_000)
    data[at] ^= 1
    encoded = encode_extent(bytes(data), policy=RAW, item_bytes=4)
    assert encoded.encoding is Encoding.RAW
    assert decoded(encoded, len(data)) == data


def test_an_extent_of_nothing_is_raw() -> None:
    assert encode_extent(b"", policy=RAW, item_bytes=4) == Encoded(Encoding.RAW, b"")


def test_noise_stays_raw_and_is_not_copied() -> None:
    data = noise(100_000)
    for policy in POLICIES:
        encoded = encode_extent(data, policy=policy, item_bytes=4)
        assert encoded.encoding is Encoding.RAW
        assert encoded.payload is data
        view = decode_extent(Encoding.RAW, memoryview(data), num_bytes=len(data))
        assert isinstance(view, memoryview)
        assert view.obj is data


def test_weights_go_to_planes_only_where_that_was_asked_for() -> None:
    data = weights()
    assert encode_extent(data, policy=RAW, item_bytes=4).encoding is Encoding.RAW
    assert encode_extent(data, policy=AUTO, item_bytes=4).encoding is Encoding.RAW
    planes = encode_extent(data, policy=PLANES, item_bytes=4)
    assert planes.encoding is Encoding.PLANES_ZSTD
    assert len(planes.payload) < 0.9 * len(data)


def test_auto_compresses_what_halves_and_only_that() -> None:
    assert encode_extent(mostly_zero(), policy=AUTO, item_bytes=4).encoding is Encoding.ZSTD
    assert encode_extent(np.arange(9000).tobytes(), policy=AUTO, item_bytes=8).encoding is Encoding.PLANES_ZSTD
    assert encode_extent(mostly_zero(), policy=RAW, item_bytes=4).encoding is Encoding.RAW


def test_a_saving_of_less_than_three_percent_is_not_taken() -> None:
    nearly_noise = noise(98_500) + bytes(1_500)
    assert encode_extent(nearly_noise, policy=ZSTD, item_bytes=1).encoding is Encoding.RAW
    worth_it = noise(90_000) + bytes(10_000)
    encoded = encode_extent(worth_it, policy=ZSTD, item_bytes=1)
    assert encoded.encoding is Encoding.ZSTD
    assert len(encoded.payload) <= len(worth_it) * (1 - MIN_SAVING)


@pytest.mark.parametrize("item_bytes", [1, 3, 20])
def test_planes_of_elements_that_do_not_fit_fall_back_to_zstd(item_bytes: int) -> None:
    assert encode_extent(mostly_zero(), policy=PLANES, item_bytes=item_bytes).encoding is Encoding.ZSTD


def test_an_array_of_any_dtype_is_read_as_bytes() -> None:
    array = np.arange(6000, dtype=np.int32).reshape(60, 100)
    encoded = encode_extent(array.data, policy=PLANES, item_bytes=4)
    assert decoded(encoded, array.nbytes) == array.tobytes()


FORTY_A = "28b52ffd202845000010616101001f8005"
GOLDEN = [
    (Encoding.RAW, "0102", "0102"),
    (Encoding.ZERO, "", "00000000"),
    (Encoding.CONSTANT, "0000803f", "0000803f0000803f"),
    (Encoding.ZSTD, FORTY_A, "61" * 40),
    (Encoding.PLANES_ZSTD, "02" + "0002000000" + "0002000000" + "0103" + "0204", "01020304"),
    (Encoding.PLANES_ZSTD, "02" + "0028000000" + "0111000000" + bytes(range(40)).hex() + FORTY_A,
     "".join(f"{k:02x}61" for k in range(40))),
]  # fmt: skip


@pytest.mark.parametrize(("encoding", "payload", "plain"), GOLDEN)
def test_these_bytes_decode_to_those_for_ever(encoding: Encoding, payload: str, plain: str) -> None:
    got = decode_extent(encoding, bytes.fromhex(payload), num_bytes=len(plain) // 2)
    assert bytes(got).hex() == plain


def test_the_numbers_of_the_encodings_are_frozen() -> None:
    numbers = {encoding.name: encoding.value for encoding in Encoding}
    assert numbers == {"RAW": 0, "ZERO": 1, "CONSTANT": 2, "ZSTD": 3, "PLANES_ZSTD": 4}


PAYLOADS = [
    (encode_extent(data, policy=policy, item_bytes=item), len(data))
    for data, policy, item in [
        (noise(40), RAW, 1), (bytes(40), RAW, 4), (b"abcd" * 10, RAW, 4), (mostly_zero(2000), ZSTD, 1),
        (np.arange(500).tobytes(), PLANES, 8), (weights(2000), PLANES, 4),
    ]
]  # fmt: skip


@given(st.sampled_from(PAYLOADS), st.data())
@settings(max_examples=tries(150, 600), deadline=None)
def test_damaged_payloads_are_corrupt_or_decode_to_the_right_length(
    sample: tuple[Encoded, int], data: st.DataObject
) -> None:
    encoded, num_bytes = sample
    payload = bytearray(encoded.payload)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload)))
        payload[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    encoding = data.draw(st.sampled_from([*Encoding, encoded.encoding, encoded.encoding, encoded.encoding]))
    try:
        got = decode_extent(encoding, bytes(payload), num_bytes=num_bytes)
    except CorruptionError:
        return
    assert len(got) == num_bytes


def frame_without_size(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


def plane_heads(*heads: tuple[int, int]) -> bytes:
    return bytes([len(heads)]) + b"".join(struct.pack("<BI", *head) for head in heads)


PACKED = zstandard.ZstdCompressor().compress(bytes(100))
WRONG = {
    "raw, short": (Encoding.RAW, bytes(99)),
    "raw, long": (Encoding.RAW, bytes(101)),
    "zero with luggage": (Encoding.ZERO, b"\0"),
    "constant of nothing": (Encoding.CONSTANT, b""),
    "constant of 17": (Encoding.CONSTANT, bytes(17)),
    "constant that does not fit": (Encoding.CONSTANT, b"abc"),
    "zstd, nothing": (Encoding.ZSTD, b""),
    "zstd, no frame": (Encoding.ZSTD, b"x" * 50),
    "zstd, cut": (Encoding.ZSTD, PACKED[:-1]),
    "zstd, two frames": (Encoding.ZSTD, PACKED + PACKED),
    "zstd, more behind": (Encoding.ZSTD, PACKED + b"x"),
    "zstd of one more": (Encoding.ZSTD, zstandard.ZstdCompressor().compress(bytes(101))),
    "zstd of one less": (Encoding.ZSTD, zstandard.ZstdCompressor().compress(bytes(99))),
    "zstd without size": (Encoding.ZSTD, frame_without_size(bytes(100))),
    "zstd skippable": (Encoding.ZSTD, b"\x50\x2a\x4d\x18\x64\0\0\0" + bytes(100)),
    "planes, nothing": (Encoding.PLANES_ZSTD, b""),
    "planes, head cut": (Encoding.PLANES_ZSTD, plane_heads((0, 50), (0, 50))[:-1]),
    "planes of one": (Encoding.PLANES_ZSTD, plane_heads((0, 100)) + bytes(100)),
    "planes of three": (Encoding.PLANES_ZSTD, plane_heads((0, 34), (0, 33), (0, 33)) + bytes(100)),
    "planes, one short": (Encoding.PLANES_ZSTD, plane_heads((0, 50), (0, 49)) + bytes(99)),
    "planes, shifted": (Encoding.PLANES_ZSTD, plane_heads((0, 51), (0, 49)) + bytes(100)),
    "planes, more behind": (Encoding.PLANES_ZSTD, plane_heads((0, 50), (0, 50)) + bytes(101)),
    "planes, method 2": (Encoding.PLANES_ZSTD, plane_heads((0, 50), (2, 50)) + bytes(100)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_payload_for_another_length_is_corrupt(name: str) -> None:
    encoding, payload = WRONG[name]
    with pytest.raises(CorruptionError, match="copy"):
        decode_extent(encoding, payload, num_bytes=100)


@pytest.mark.parametrize("encoding", [Encoding.ZSTD, Encoding.PLANES_ZSTD])
def test_a_bomb_is_refused_before_anything_is_allocated(encoding: Encoding) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    payload = bomb if encoding is Encoding.ZSTD else plane_heads((1, len(bomb)), (0, 50)) + bomb + bytes(50)
    lying = bytearray(zstandard.ZstdCompressor().compress(bytes(1 << 28)))
    at = lying.index(struct.pack("<I", 1 << 28))
    lying[at : at + 4] = struct.pack("<I", 100)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError):
            decode_extent(encoding, payload, num_bytes=100)
        with pytest.raises(CorruptionError):
            decode_extent(Encoding.ZSTD, lying, num_bytes=100)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", [len(Encoding), 127, 256, -1])
def test_an_encoding_of_a_later_version_fails_for_its_entry_only(encoding: int) -> None:
    with pytest.raises(UnsupportedVersionError, match="upgrade"):
        decode_extent(encoding, b"", num_bytes=0)
    assert bytes(decode_extent(Encoding.RAW, b"x", num_bytes=1)) == b"x"


# --- encodings of packages --------------------------------------------------------------------


GOOD = "number = 130\ndef encode(extent, item): return zlib.compress(extent)\ndef decode(payload, size): "
BACK = GOOD + "return zlib.decompress(payload)"
REPEATED = bytes(range(100)) * 100


@pytest.fixture
def bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a package whose encodings are modules with this text."""
    monkeypatch.syspath_prepend(tmp_path)

    def brought(**texts: str) -> None:
        shutil.rmtree(tmp_path)
        folder = tmp_path / "toys-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(
            "\n".join([f"[{codec.ENCODINGS}]", *(f"{each} = {each}" for each in texts)])
        )
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(f"import zlib\n{text}")
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        codec._brought.cache_clear()

    yield brought
    codec._brought.cache_clear()


def test_an_encoding_of_a_package_is_used_by_name_and_number(bring: Callable[..., None]) -> None:
    bring(toy_a=BACK, toy_b=BACK.replace("130", "255"))
    for policy, number in (("toy_a", 130), ("toy_b", 255)):
        encoded = encode_extent(REPEATED, policy=known_policy(policy), item_bytes=4)
        assert encoded.encoding == number and len(encoded.payload) < 1000
        assert decoded(encoded, len(REPEATED)) == REPEATED
    with pytest.raises(
        UnsupportedVersionError, match=r"encoding 131 .* \(installed: 'toy_a' \(130\), 'toy_b' \(255\)\)"
    ):
        decode_extent(131, b"", num_bytes=1)
    with pytest.raises(UnsupportedVersionError, match="install the package"):
        known_policy("toy_c")


@pytest.mark.parametrize(
    ("decode", "told"),
    [
        ("return zlib.decompress(payload)[:-1]", "TOY_D, has a payload for 9999 bytes"),
        ("return [0] * size", "cannot decode"),
        ("return 'text'", "cannot decode"),
        ("payload[0] = 1", "cannot decode .*read-only"),
        ("raise OSError('broken')", r"cannot decode \(broken\)"),
    ],
)
def test_what_the_encoding_of_a_package_gives_back_is_not_believed(
    bring: Callable[..., None], decode: str, told: str
) -> None:
    bring(toy_d=GOOD + decode)
    with pytest.raises(CorruptionError, match=f"(?i){told}"):
        decode_extent(130, bytearray(zlib.compress(REPEATED)), num_bytes=len(REPEATED))
    with pytest.raises(InvalidInputError, match="'toy_d' .*does not give back"):
        encode_extent(REPEATED, policy=known_policy("toy_d"), item_bytes=4)


def test_memory_that_an_encoding_uses_again_is_copied(bring: Callable[..., None]) -> None:
    bring(
        toy_i="number = 132\nspace = bytearray(20000)\n"
        "def put(data): space[:len(data)] = data; return memoryview(space)[:len(data)]\n"
        "def encode(extent, item): return put(zlib.compress(extent))\n"
        "def decode(payload, size): return put(zlib.decompress(payload))"
    )
    extents = [REPEATED, REPEATED[::-1]]
    stored = [encode_extent(each, policy=known_policy("toy_i"), item_bytes=4) for each in extents]
    assert [zlib.decompress(each.payload) for each in stored] == extents
    found = [decode_extent(132, zlib.compress(each), num_bytes=len(each)) for each in extents]
    assert list(map(bytes, found)) == extents


def test_nor_are_other_bytes_of_that_length_stored(bring: Callable[..., None]) -> None:
    bring(
        toy_e=GOOD + "return bytes(size)",
        toy_f=BACK.replace("130", "131").replace("return zlib.c", "extent[0] = 1; zlib.c"),
    )
    for policy, told in (("toy_e", "does not give back"), ("toy_f", "cannot store an extent: .*read-only")):
        with pytest.raises(InvalidInputError, match=f"'{policy}' .*{told}"):
            encode_extent(bytearray(REPEATED), policy=known_policy(policy), item_bytes=4)


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ({"toy_g": "raise OSError('no driver')"}, "'toy_g' .*cannot be imported: no driver"),
        ({"toy_g": "number = 130"}, "cannot be imported: .*'encode'"),
        ({"toy_g": BACK.replace("130", "130.0")}, r"has the number 130\.0"),
        ({"toy_g": BACK.replace("130", "5")}, "has the number 5: 128 to 255 are free"),
        ({"toy_g": BACK.replace("130", "'256'")}, "has the number '256'"),
        ({"toy_g": BACK, "toy_h": BACK + "  # two"}, "toys and toys both have an encoding 130"),
    ],
)
def test_a_package_whose_encoding_cannot_be_is_told(bring: Callable[..., None], texts: Any, told: str) -> None:
    bring(**texts)
    for call in (lambda: known_policy("toy_g"), lambda: decode_extent(130, b"", num_bytes=1)):
        with pytest.raises(InvalidInputError, match=told):
            call()
    assert bytes(decode_extent(Encoding.RAW, b"x", num_bytes=1)) == b"x"


def test_entry_points_are_looked_up_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_brought", lambda: pytest.fail("looked up"))
    for policy in POLICIES:
        assert decoded(encode_extent(REPEATED, policy=known_policy(policy), item_bytes=4), len(REPEATED)) == REPEATED


def test_every_thread_has_contexts_of_its_own() -> None:
    # zstd contexts are not thread-safe; a race would show too rarely to be a test.
    seen = [codec._contexts.compressor, codec._contexts.decompressor]

    def work() -> None:
        seen.extend([codec._contexts.compressor, codec._contexts.decompressor])

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len({id(context) for context in seen}) == 6


def _with_little_memory(policy: str) -> None:
    """Print the kinds of errors that an encoder with new zstd contexts ends in, with this and that much memory left."""
    data = mostly_zero(1 << 20)
    encode_extent(data, policy=ZSTD, item_bytes=1)
    kinds, kept = set(), []
    for room in range(0, 4 << 20, 64 << 10):
        codec._contexts = codec._Contexts()
        kept.append(codec._contexts)  # so that none gets the memory of the one before
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + room, resource.RLIM_INFINITY))
        try:
            encode_extent(data, policy=known_policy(policy), item_bytes=4)
        except Exception as error:  # noqa: BLE001
            kinds.add(type(error).__name__)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(*sorted(kinds), flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["auto", "zstd", "planes"])
def test_an_encoder_that_gets_no_memory_raises_a_memory_error(policy: str) -> None:
    with Forked(_with_little_memory, policy, stdout=PIPE, stderr=PIPE) as process:
        out, err = process.communicate()
    assert out == "MemoryError\n", err
