"""From a hashed draft to a published commit: nodes, layout, stats and the commit object.

Invariant: the root follows from the draft alone; everything else stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from cas_ckpt import clock
from cas_ckpt.errors import CkptError, ConflictError
from cas_ckpt.objects.commit import CommitObject, LayoutObject, LineageEdge, commit_node, layout_node
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.kinds import ObjectKind
from cas_ckpt.objects.node import Node
from cas_ckpt.objects.pack import PackKind
from cas_ckpt.objects.state import Container, TensorItem, walk
from cas_ckpt.objects.tree_node import INLINE_BYTES
from cas_ckpt.ops.destination import CONTINUED_FROM, Destination
from cas_ckpt.ops.draft import Draft, draft_nodes
from cas_ckpt.ops.publish import MAX_ATTEMPTS, GenerationMoved, Publication, publish_commit
from cas_ckpt.ops.request import CommitFields, CommitRequest
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.transfer.pack_writer import WrittenPack


def publish_draft(
    handle: RepositoryHandle,
    draft: Draft,
    publication: Publication,
    request: CommitRequest,
    fields: CommitFields,
    layout: LayoutObject,
    destination: Destination,
    *,
    more_nodes: Sequence[Node] = (),
) -> Digest:
    """Make nodes and commit of a hashed draft, and publish them; the id of the commit.

    A garbage collection that begins meanwhile costs a look at the index, not the hashing: the ids
    are known, and what they name is usually still there.

    Args:
        publication: With the packs of the chunks, and the gc generation that these were deduplicated against.
        destination, more_nodes: As for `publish_commit` and `plan_nodes`.
    Raises:
        GenerationMoved: chunks of the state were condemned: save them again. ConflictError.
    """
    for _ in range(MAX_ATTEMPTS):
        referred = plan_nodes(handle, draft, publication, request, fields, layout, more_nodes)
        try:
            return publish_commit(
                handle, publication, destination, generation=publication.generation,
                other_parents=fields.ancestry.parents,
            )  # fmt: skip
        except GenerationMoved:
            # Told before the store is looked at again: what was collected since then drops out in that look.
            publication.tell(handle)
            publication.generation = handle.begin_writing()
            if not all(handle.known(referred)):
                raise
        except CkptError:
            # The packs are durable: the next commit need not write them again.
            publication.tell(handle)
            raise
        except BaseException:
            handle.forget_chunks()  # interrupted: the next commit looks for those packs
            raise
    raise ConflictError(f"garbage collections began {MAX_ATTEMPTS} times while this commit was made: try again")


def plan_nodes(
    handle: RepositoryHandle,
    draft: Draft,
    publication: Publication,
    request: CommitRequest,
    fields: CommitFields,
    layout: LayoutObject,
    more_nodes: Sequence[Node] = (),
) -> list[Digest]:
    """Give `publication` its nodes and its commit; what those nodes refer to that is none of them: all chunks.

    Args:
        draft: Complete: every work of it is hashed.
        more_nodes: Nodes below the draft that were made elsewhere, with their children.
    """
    nodes, root = draft_nodes(draft)
    layout_object = layout_node(layout)
    made = {node.digest: node for node in (*more_nodes, *nodes, layout_object)}
    nodes = list(made.values())
    stored = handle.known([node.digest for node in nodes])
    publication.nodes = [node for node, there in zip(nodes, stored, strict=True) if not there]
    written = [node for node in publication.written_nodes if node.kind != ObjectKind.COMMIT]
    stats = _stats(draft, [*written, *publication.nodes], [*publication.told, *publication.packs])
    time_us = int(clock.now_s() * 1e6)

    def make_commit(parents: tuple[Digest, ...], origin: Digest | None) -> Node:
        lineage = fields.ancestry.lineage
        if origin is not None:
            lineage = (*lineage, LineageEdge(CONTINUED_FROM, origin))
        commit = CommitObject(
            root, parents, fields.message, fields.author, time_us, fields.step, fields.metrics, fields.meta,
            layout_object.digest, stats, lineage, fields.ancestry.provenance,
        )  # fmt: skip
        return commit_node(commit)

    publication.make_commit = make_commit
    return list({child for node in nodes for child in node.children} - made.keys())


def tensor_bytes(state: Container) -> int:
    """Plain bytes of all tensors that are hashed, tied ones once: what progress is measured against."""
    tensors = [item for _, item in walk(state) if isinstance(item, TensorItem) and item.spec.num_bytes > INLINE_BYTES]
    tied = {(item.identity[0], item.spec.dtype): item.spec.num_bytes for item in tensors if item.identity is not None}
    return sum(tied.values()) + sum(item.spec.num_bytes for item in tensors if item.identity is None)


def _stats(draft: Draft, nodes: Sequence[Node], packs: Sequence[WrittenPack]) -> dict[str, int]:
    entries = [entry for pack in packs for entry in pack.entries if entry.kind == ObjectKind.CHUNK]
    node_bytes = sum(len(node.data) for node in nodes)
    return {
        "total_bytes": draft.total_bytes,
        "new_bytes": sum(entry.plain_bytes for entry in entries) + node_bytes,
        "stored_bytes": sum(pack.size_bytes for pack in packs if pack.kind == PackKind.DATA) + node_bytes,
        "num_entries": draft.num_entries,
        "num_tensors": draft.num_tensors,
        "num_chunks": draft.num_chunks,
        "num_new_chunks": len({entry.digest for entry in entries}),
    }
