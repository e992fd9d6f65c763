"""The bytes of a signed commit and of a signed tag: never regenerated (see test_golden_bytes.py)."""

from __future__ import annotations

from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from cas_ckpt.core.refs import RefKind, ref_key, tag_bytes
from cas_ckpt.core.signatures import judge_commit
from cas_ckpt.objects.nodes import commit_node, decode_commit, split_signature
from cas_ckpt.signing import as_trust, sign
from tests.golden.fixed import COMMIT, an_id
from tests.golden.test_golden_bytes import VECTORS
from tests.signing.keys import key_file

VECTOR = VECTORS["signatures"]
PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(VECTOR["secret bytes of the key"]))
KEY = str(key_file("golden", PRIVATE.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode()))
TRUST = as_trust(VECTOR["public key"])


def test_a_signed_commit_has_these_bytes_and_this_id() -> None:
    unsigned = commit_node(COMMIT)
    made = commit_node(replace(COMMIT, signature=sign(KEY, unsigned.data)))
    assert unsigned.data.hex() == VECTOR["commit"]["signed bytes"]
    assert made.data.hex() == VECTOR["commit"]["bytes"]
    assert made.digest.hex() == VECTOR["commit"]["id"]


def test_a_signed_commit_is_read_and_verified_from_these_bytes() -> None:
    data = bytes.fromhex(VECTOR["commit"]["bytes"])
    message, blob = split_signature(data)
    assert (message.hex(), (blob or b"").hex()) == (VECTOR["commit"]["signed bytes"], VECTOR["commit"]["signature"])
    assert replace(decode_commit(data), signature=None) == COMMIT
    assert judge_commit(data, TRUST).is_good


def test_a_tag_is_signed_over_these_bytes() -> None:
    vector = VECTOR["tag"]
    key = ref_key(RefKind.TAG, "v1")
    message = tag_bytes(key, an_id(10), "as released ü", time_us=1_790_000_000_123_456, author="me@here")
    assert message.hex() == vector["signed bytes"]
    assert sign(KEY, message).hex() == vector["signature"]
    assert TRUST.verdict(bytes.fromhex(vector["signature"]), message, time_s=1_790_000_000).is_good
