"""The bytes of a commit that says where it comes from: never regenerated (see test_golden_bytes.py)."""

from __future__ import annotations

from cas_ckpt.objects.commit import CommitObject, LineageEdge, commit_node, decode_commit
from cas_ckpt.objects.digest import object_id
from cas_ckpt.objects.values import encode_value
from tests.golden.fixed import an_id

COMMIT_WITH_LINEAGE = CommitObject(
    an_id(10), (an_id(11),), "tuned", "me", 1, 2, {}, None, an_id(13), {},
    lineage=(
        LineageEdge("fine-tune-of", an_id(14), encode_value({"data": "v2"}, key="")),
        LineageEdge("merged-from", an_id(15)),
    ),
    provenance=encode_value({"host": "node-1", "git": {"dirty": True}}, key=""),
)  # fmt: skip

BYTES = bytes.fromhex(
    "93a6636f6d6d6974018ca46d657461c0a4726f6f74c4200a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a"
    "0aa47374657002a5737461747380a6617574686f72a26d65a66c61796f7574c4200d0d0d0d0d0d0d0d0d0d0d0d0d0d0d0d0d0d0d0d0d"
    "0d0d0d0d0d0d0d0d0d0d0da76c696e656167659293ac66696e652d74756e652d6f66c4200e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e0e"
    "0e0e0e0e0e0e0e0e0e0e0e0e0e0ec40981a464617461a2763293ab6d65726765642d66726f6dc4200f0f0f0f0f0f0f0f0f0f0f0f0f0f"
    "0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0fc0a76d657373616765a574756e6564a76d65747269637380a7706172656e747391c4200b"
    "0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0ba774696d655f757301aa70726f76656e616e6365c41982"
    "a367697481a56469727479c3a4686f7374a66e6f64652d31"
)
IDENTITY = "c733606ef3b57e70dbbf0aab422fe5b5ab5b253ade93023fdc6e8633a57e64ff"


def test_a_commit_with_lineage_has_these_bytes_and_this_id() -> None:
    made = commit_node(COMMIT_WITH_LINEAGE)
    assert made.data == BYTES
    assert made.digest.hex() == object_id("commit", BYTES).hex() == IDENTITY


def test_a_commit_with_lineage_is_read_from_these_bytes() -> None:
    assert decode_commit(BYTES) == COMMIT_WITH_LINEAGE
