"""The bytes of hints, made once and frozen: every later version reads them."""

from __future__ import annotations

from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.pack import Hints, PageCommit, decode_hints, encode_hints, hints_bytes

HINTS = Hints(
    33,
    (PageCommit(b"a node", bytes(range(16)), ((Digest(bytes(32)), bytes(16)),)), PageCommit(b"another", bytes(16))),
    ((Digest(b"\1" * 32), b"\2" * 16),),
    ((bytes(96), bytes(112)),),
    (b"\3" * 16,),
)

FROZEN = bytes.fromhex(
    "28b52ffd60b700150400740685a5646570746821a57061636b7391c41003a66f74686572739192c42001c41002a7636f6d6d6974739293c406"
    "61206e6f6465c410000102030405060708090a0b0c0d0e0f9192c42000c4100093c407616e90ab6469726563746f726965739192c460c47000"
    "000a000ba424b90902637f1c785eab4137029a023a071aaa03764341534348494e5401000300000000008c00000000000000b7010000000000"
    "00e5fcc21489bcd3d1"
)


def test_they_are_read_as_they_were_written() -> None:
    assert hints_bytes(b"an entry before" + FROZEN) == len(FROZEN)
    assert decode_hints(FROZEN) == HINTS


def test_what_is_written_now_is_read_alike() -> None:
    assert decode_hints(encode_hints(HINTS)) == HINTS
