"""Packs as bytes: what is written is read back, and nothing damaged is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt.errors import CkptError, CorruptionError, UnsupportedVersionError
from cas_ckpt.native import leaf_digests
from cas_ckpt.objects import codec, pack
from cas_ckpt.objects.digest import LEAF_BYTES, Digest, ObjectKind, chunk_id
from cas_ckpt.objects.pack import ExtentInfo, PackKind
from tests.builders import numbers

NAME = bytes(range(16))
KEY = f"packs/00/{NAME.hex()}.data"


def chunk_entry(data: bytes, *, offset: int = pack.HEADER_BYTES, leaf_bytes: int = 16) -> tuple[ExtentInfo, bytes]:
    digests = leaf_digests(memoryview(data), leaf_bytes)
    info = ExtentInfo(
        chunk_id(len(data), digests), ObjectKind.CHUNK, 0, len(data), len(data), leaf_bytes,
        0, len(digests) // 32, offset, pack.entry_header_bytes(len(digests) // 32),
    )  # fmt: skip
    return info, pack.encode_entry_header(info, digests)


def whole_pack(*payloads: bytes) -> bytes:
    parts = [pack.encode_header(NAME, PackKind.DATA)]
    infos = []
    for payload in payloads:
        info, header = chunk_entry(payload, offset=sum(map(len, parts)))
        infos.append(info)
        parts += [header, payload]
    directory = pack.encode_directory(infos)
    offset = sum(map(len, parts))
    return b"".join([*parts, directory, pack.encode_trailer(NAME, PackKind.DATA, directory, directory_offset=offset)])


def read_whole(data: bytes) -> list[ExtentInfo]:
    pack.decode_header(data[: pack.HEADER_BYTES])
    trailer = pack.decode_trailer(data[-pack.TRAILER_BYTES :], size_bytes=len(data), key=KEY)
    infos = pack.decode_directory(data[trailer.directory_offset : -pack.TRAILER_BYTES], trailer, key=KEY)
    for info in infos:
        header = data[info.offset : info.offset + info.header_bytes]
        found, digests = pack.decode_entry_header(header, offset=info.offset)
        assert found == info
        payload = data[info.offset + info.header_bytes : info.end]
        if leaf_digests(memoryview(payload), info.leaf_bytes) != digests:
            raise CorruptionError("payload")
    return infos


@given(st.lists(st.binary(min_size=1, max_size=100), max_size=5, unique=True))
def test_a_pack_is_read_back_from_its_directory_sorted_by_id(payloads: list[bytes]) -> None:
    data = whole_pack(*payloads)
    infos = read_whole(data)
    assert [info.digest for info in infos] == sorted(info.digest for info in infos)
    assert sorted(data[info.offset + info.header_bytes : info.end] for info in infos) == sorted(payloads)


def test_every_flipped_bit_of_a_pack_is_found() -> None:
    data = whole_pack(b"first chunk of two leaves", b"second")
    for at in range(len(data)):
        for bit in (0, 7):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises((CorruptionError, UnsupportedVersionError)):
                read_whole(bytes(damaged))


def test_every_truncation_of_a_pack_is_found() -> None:
    data = whole_pack(b"a chunk", b"another")
    for length in range(len(data)):
        with pytest.raises(CkptError):
            read_whole(data[:length])


@given(st.binary(max_size=300))
def test_bytes_that_are_no_entry_are_refused_as_corrupt(data: bytes) -> None:
    with pytest.raises((CorruptionError, UnsupportedVersionError)):
        pack.decode_entry_header(pack.ENTRY_MAGIC + data, offset=0)


def test_a_pack_of_a_newer_format_is_refused_as_newer() -> None:
    header = bytearray(pack.encode_header(NAME, PackKind.META)[: -pack.CHECK_BYTES])
    header[8] = 2
    with pytest.raises(UnsupportedVersionError, match="upgrade"):
        pack.decode_header(pack._sealed(bytes(header)))


def test_leaf_digests_that_do_not_make_the_id_are_refused() -> None:
    info, _ = chunk_entry(b"x" * 40)
    other = leaf_digests(memoryview(b"y" * 40), 16)
    with pytest.raises(CorruptionError, match="do not make the id"):
        pack.decode_entry_header(pack.encode_entry_header(info, other), offset=0)


def test_an_entry_of_a_part_of_a_chunk_carries_all_leaf_digests() -> None:
    data = b"z" * 40
    digests = leaf_digests(memoryview(data), 16)
    info = ExtentInfo(chunk_id(40, digests), ObjectKind.CHUNK, 0, 40, 24, 16, 1, 2, 64, pack.entry_header_bytes(3))
    found, told = pack.decode_entry_header(pack.encode_entry_header(info, digests), offset=64)
    assert (found, told, found.plain_bytes) == (info, digests, 24)


def test_a_directory_that_points_outside_the_pack_is_refused() -> None:
    info, _ = chunk_entry(b"x" * 40, offset=10**9)
    directory = pack.encode_directory([info])
    trailer_bytes = pack.encode_trailer(NAME, PackKind.DATA, directory, directory_offset=200)
    size = 200 + len(directory) + pack.TRAILER_BYTES
    trailer = pack.decode_trailer(trailer_bytes, size_bytes=size, key=KEY)
    with pytest.raises(CorruptionError, match="outside the pack"):
        pack.decode_directory(directory, trailer, key=KEY)


def test_the_base_of_a_delta_survives_header_and_directory() -> None:
    info, _ = chunk_entry(b"x" * 40)
    based = ExtentInfo(*[getattr(info, name) for name in ExtentInfo.__slots__[:-1]], Digest(b"b" * 32))
    digests = leaf_digests(memoryview(b"x" * 40), 16)
    assert pack.decode_entry_header(pack.encode_entry_header(based, digests), offset=info.offset)[0] == based


DATA = numbers(512).tobytes()


LEAVES = leaf_digests(memoryview(DATA), LEAF_BYTES)


@pytest.mark.parametrize(("first_leaf", "num_leaves"), [(1, 1), (0, 2)])
def test_an_entry_that_claims_leaves_beyond_its_chunk_is_refused(first_leaf: int, num_leaves: int) -> None:
    info = ExtentInfo(
        chunk_id(len(DATA), LEAVES), ObjectKind.CHUNK, codec.RAW, len(DATA), len(DATA), LEAF_BYTES,
        first_leaf, num_leaves, pack.HEADER_BYTES, pack.entry_header_bytes(1),
    )  # fmt: skip
    with pytest.raises(CorruptionError, match="leaves that its chunk does not have"):
        pack.decode_entry_header(pack.encode_entry_header(info, LEAVES), offset=info.offset)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_trailer_that_tells_another_length_than_the_pack_has_is_refused(more: int) -> None:
    trailer = pack.encode_trailer(bytes(16), PackKind.DATA, b"", directory_offset=1000)
    size = 1000 + len(trailer)
    assert pack.decode_trailer(trailer, size_bytes=size, key="k").size_bytes == size
    with pytest.raises(CorruptionError, match="bytes long where its trailer says"):
        pack.decode_trailer(trailer, size_bytes=size + more, key="k")
