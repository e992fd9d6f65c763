"""What a commit says of where it comes from: further parents, lineage, provenance.

Invariant: revisions are resolved once, by one process, when the commit begins; what several
ranks agree on is the text that they were given.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cas_ckpt.errors import InvalidInputError, NotFoundError
from cas_ckpt.objects.commit import LineageEdge
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest, short
from cas_ckpt.objects.values import decode_value, encode_value
from cas_ckpt.ops.destination import ANY_HEAD, AnyHead, Destination, branch_target, check_free, precedence
from cas_ckpt.ops.provenance import capture_provenance
from cas_ckpt.ops.request import Ancestry, CommitFields, CommitRequest
from cas_ckpt.ops.resolve import nearly, resolve
from cas_ckpt.refs import Head, RefKind, check_name
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


def settle_destination(handle: RepositoryHandle, request: CommitRequest, ancestry: Ancestry) -> Destination:
    """The destination of a commit that is about to be made.

    Args:
        ancestry: That of `request`, resolved.
    Raises:
        InvalidInputError: no branch is known, or the branch may not be begun like this. ConflictError: as for
            `Destination.parents`, before anything is hashed. NotFoundError: a parent that is not there.
    """
    head = request.head
    if head is None:
        branch = check_name(handle.config.default_branch if request.branch is None else request.branch)
        retry = request.on_conflict == "retry"
        return Destination(branch, ANY_HEAD if retry else branch_target(handle, branch))
    branch = check_name(_branch_of(handle, head) if request.branch is None else request.branch)
    target = branch_target(handle, branch)
    origin = None if head.commit is None else Digest(bytes.fromhex(head.commit))
    attached = head.branch == branch and origin is not None
    if target is None and not attached:
        _check_beginning(handle, branch, request, known=origin is not None or bool(ancestry.parents))
    if target is None and request.orphan:
        origin = None
    expected: Digest | None | AnyHead = ANY_HEAD
    if request.on_conflict == "raise":
        expected = origin if attached and target is not None else target
    declared = origin in (*ancestry.parents, *(edge.target for edge in ancestry.lineage))
    settled = Destination(branch, expected, origin, attached, declared, target is None or attached)
    settled.parents(target, (), precedence(handle))
    return settled


def _branch_of(handle: RepositoryHandle, head: Head) -> str:
    if head.branch is not None:
        return head.branch
    if head.commit is None:
        raise InvalidInputError(
            "a checkout was broken off after it had written a part of the state: check out again, or commit what "
            'there is to a branch by name (branch="NAME")'
        )
    start = short(bytes.fromhex(head.commit))
    raise InvalidInputError(
        f"this state came from commit {start}, which was checked out by itself and not as a branch: commit it to a "
        f'new branch that begins there (branch="NAME"), or move a branch back and commit to that '
        f'(repo.branch("{handle.config.default_branch}", start="{start}", force=True), then '
        f'branch="{handle.config.default_branch}")'
    )


def _check_beginning(handle: RepositoryHandle, branch: str, request: CommitRequest, *, known: bool) -> None:
    """Refuse to begin a history that nobody meant to begin."""
    check_free(handle, RefKind.BRANCH, branch)
    names = [ref.name for ref in handle.refs.list(RefKind.BRANCH)]
    meant = None if request.create else nearly(branch, names)
    if meant is not None:
        raise InvalidInputError(
            f"there is no branch {branch!r}: did you mean {meant!r}? create=True begins {branch!r} all the same"
        )
    if known or request.orphan or not (names or _has_commits(handle)):
        return
    raise InvalidInputError(
        f"there is no branch {branch!r}, and this state was not checked out from here, so that its history is not "
        f'known: begin the branch at a commit (repo.branch("{branch}", start=REF)), check out first '
        "(repo.checkout(REF, into=state)), or begin a history of its own (orphan=True)"
    )


def _has_commits(handle: RepositoryHandle) -> bool:
    return any(True for _ in handle.refs.list(RefKind.TAG, RefKind.PIN))
