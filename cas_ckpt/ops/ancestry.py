"""What a commit says of where it comes from: further parents, lineage, provenance.

Invariant: revisions are resolved once, by one process, when the commit begins; what several
ranks agree on is the text that they were given.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cas_ckpt.errors import NotFoundError
from cas_ckpt.objects.commit import LineageEdge
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest
from cas_ckpt.objects.values import decode_value, encode_value
from cas_ckpt.ops.provenance import capture_provenance
from cas_ckpt.ops.request import Ancestry, CommitFields, CommitRequest
from cas_ckpt.ops.resolve import resolve
from cas_ckpt.repository import RepositoryHandle

_WHOLE_ID = re.compile(rf"[0-9a-fA-F]{{{2 * DIGEST_BYTES}}}\Z")


def settle_ancestry(handle: RepositoryHandle, request: CommitRequest, fields: CommitFields) -> Ancestry:
    """What `request` says, with ids in place of revisions.

    Raises:
        NotFoundError: a revision that is not there (a whole id may be that of another repository's commit, as
            the target of lineage; a parent has to be here).
    """
    parents = tuple(resolve(handle, revision) for revision in fields.parents)
    provenance = None
    if fields.provenance is not None:
        provenance = encode_value(capture_provenance(decode_value(fields.provenance)), key="provenance")
    return Ancestry((*request.other_parents, *parents), _edges(handle, fields.lineage), provenance)


def _edges(
    handle: RepositoryHandle, given: Sequence[tuple[str, str, bytes | None]]
) -> tuple[LineageEdge, ...]:
    return tuple(LineageEdge(kind, lineage_target(handle, revision), note) for kind, revision, note in given)


def lineage_target(handle: RepositoryHandle, revision: str) -> Digest:
    """The commit that `revision` names; a whole id is believed, whether or not that commit is here.

    Raises:
        NotFoundError: anything else that is not here.
    """
    if _WHOLE_ID.match(revision):
        return Digest(bytes.fromhex(revision))
    try:
        return resolve(handle, revision)
    except NotFoundError as error:
        raise NotFoundError(
            f"lineage from {revision!r}: {error} (for a commit of another repository give its whole id)"
        ) from error
