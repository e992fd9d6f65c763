"""The bytes of a commit that says where it comes from: never regenerated (see test_golden_bytes.py)."""

from __future__ import annotations

from cas_ckpt.objects.digest import object_id
from cas_ckpt.objects.nodes import CommitObject, LineageEdge, commit_node, decode_commit
from cas_ckpt.objects.values import encode_value
from tests.golden.fixed import an_id
from tests.golden.test_golden_bytes import VECTORS

COMMIT_WITH_LINEAGE = CommitObject(
    an_id(10), (an_id(11),), "tuned", "me", 1, 2, {}, None, an_id(13), {},
    lineage=(
        LineageEdge("fine-tune-of", an_id(14), encode_value({"data": "v2"}, key="")),
        LineageEdge("merged-from", an_id(15)),
    ),
    provenance=encode_value({"host": "node-1", "git": {"dirty": True}}, key=""),
)  # fmt: skip

VECTOR = VECTORS["nodes"]["commit with lineage"]
BYTES, IDENTITY = bytes.fromhex(VECTOR["bytes"]), VECTOR["id"]


def test_a_commit_with_lineage_has_these_bytes_and_this_id() -> None:
    made = commit_node(COMMIT_WITH_LINEAGE)
    assert made.data == BYTES
    assert made.digest.hex() == object_id("commit", BYTES).hex() == IDENTITY


def test_a_commit_with_lineage_is_read_from_these_bytes() -> None:
    assert decode_commit(BYTES) == COMMIT_WITH_LINEAGE
