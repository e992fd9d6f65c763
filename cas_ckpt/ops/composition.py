"""From a hashed draft to what is published: nodes, layout, stats and the commit object.

Invariant: the root follows from the draft alone; everything else stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from cas_ckpt import clock
from cas_ckpt.objects.commit import CommitObject, LayoutObject, commit_node, layout_node
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.node import Node
from cas_ckpt.objects.state import Container, TensorItem, walk
from cas_ckpt.ops.draft import Draft, draft_nodes
from cas_ckpt.ops.publish import Publication
from cas_ckpt.ops.request import CommitFields, CommitRequest
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.transfer.pack_writer import WrittenPack


def plan_nodes(
    handle: RepositoryHandle,
    draft: Draft,
    publication: Publication,
    request: CommitRequest,
    fields: CommitFields,
    layout: LayoutObject,
    more_nodes: Sequence[Node] = (),
) -> None:
    """Give `publication` its nodes and its commit.

    Args:
        draft: Complete: every work of it is hashed.
        more_nodes: Nodes below the draft that were made elsewhere.
    """
    nodes, root = draft_nodes(draft)
    layout_object = layout_node(layout)
    nodes = list({node.digest: node for node in (*more_nodes, *nodes, layout_object)}.values())
    stored = handle.known([node.digest for node in nodes])
    publication.nodes = [node for node, there in zip(nodes, stored, strict=True) if not there]
    stats = _stats(draft, publication.nodes, publication.packs)
    time_us = int(clock.now_s() * 1e6)

    def make_commit(parents: tuple[Digest, ...]) -> Node:
        commit = CommitObject(
            root, parents, fields.message, fields.author, time_us, request.step, fields.metrics, fields.meta,
            layout_object.digest, stats,
        )  # fmt: skip
        return commit_node(commit)

    publication.make_commit = make_commit


def tensor_bytes(state: Container) -> int:
    """Plain bytes of all tensors, tied ones each time: what progress is measured against."""
    return sum(item.spec.num_bytes for _, item in walk(state) if isinstance(item, TensorItem))


def _stats(draft: Draft, nodes: Sequence[Node], packs: Sequence[WrittenPack]) -> dict[str, int]:
    entries = [entry for pack in packs for entry in pack.entries]
    node_bytes = sum(len(node.data) for node in nodes)
    return {
        "total_bytes": draft.total_bytes,
        "new_bytes": sum(entry.plain_bytes for entry in entries) + node_bytes,
        "stored_bytes": sum(pack.size_bytes for pack in packs) + node_bytes,
        "num_entries": draft.num_entries,
        "num_tensors": draft.num_tensors,
        "num_chunks": draft.num_chunks,
        "num_new_chunks": len({entry.digest for entry in entries}),
    }
