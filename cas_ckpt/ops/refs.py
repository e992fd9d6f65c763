"""branch, tag, pin, rename, undelete, reflog: the names that a repository gives to commits. verify: who signed these.

    branch, tag  names that move with commits, and names that stay where they are, with a message or without
    pin          keeps a commit, whatever is forgotten; as a revision it is written `refs/pins/NAME`
    rename       1. the new name is published, like any ref onto an old commit
                 2. the old one is deleted, if it is still as it was read; else the new one is taken back
    undelete     a ref that was deleted names again what it named last, by its own log
    reflog       where a ref pointed, and who moved it: the moves that its record remembers (made, forced, deleted,
                 brought back), and between two of them the commits on top of the head, by first parents
    verify       1. the revision becomes a commit and, where it is the name of one, a tag
                 2. the commit's own bytes, verified against their id, are judged; of a tag its record
                 3. with `history`, every commit that it leads to is judged in the same way. The state is not read: the
                    signed bytes hold the ids of everything that a checkout reads and verifies

Invariant: a name is a branch or a tag, never both, so that a revision means one thing; pins have names of their own. A
branch is not deleted while a tier lacks commits that it alone leads to, without `force=True`, as `git branch -d`
does with what is not merged; where one is moved back by force, a warning says what is not there. A ref is deleted by
one compare-and-swap, so a commit that arrives meanwhile is not lost. A listing of refs during
a rename has at least one of the two names, so nothing that they keep is ever without one; dying between 1 and 2
leaves both. Nothing is brought back that garbage collection has taken a part of. Only what a ref led to is in its
reflog: a commit that was made and never published is in no answer. A report of signatures is made of whatever is
found; only what cannot be read at all raises.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

from cas_ckpt.arguments import did_you_mean, one_text
from cas_ckpt.core.config import read_config, require_there
from cas_ckpt.core.create import change_default_branch
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import graph_behind, graph_with, unpushed_commits
from cas_ckpt.core.publish import branch_target, check_meaning, publish_ref, take_away
from cas_ckpt.core.records import Brief, log_rows, log_rows_in_pieces
from cas_ckpt.core.refs import MAX_LOG, Ref, RefKind, check_new_name, check_note, default_author, new_move
from cas_ckpt.core.revisions import (
    HEAD_NAMES,
    Revision,
    current_branch,
    likely_refs,
    require_one,
    resolve,
    resolve_ref,
    revision_text,
    split_name,
)
from cas_ckpt.core.settings import Remote, read_settings
from cas_ckpt.core.signatures import judge_commit, read_commit, read_commits, sign_tag, tag_message, tag_signature
from cas_ckpt.errors import ConflictError, CorruptionError, InvalidInputError, NotFoundError, SignatureError
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.nodes import decode_commit, split_signature
from cas_ckpt.signing import NAMESPACE, SignatureInfo, Trust, armored

_LOGGER = logging.getLogger("cas_ckpt")


@dataclass(frozen=True, slots=True)
class PinInfo:
    """One pin.

    Attributes:
        commit: Whole id of the commit that it keeps.
        time_s: When it was set, from the epoch. author: By whom.
    """

    name: str
    commit: str
    reason: str = ""
    time_s: float = 0.0
    author: str = ""


def named(handle: RepositoryHandle, kind: RefKind) -> dict[str, str]:
    """Name -> hexadecimal id of the commit that it names, by name."""
    found = {ref.name: ref.target.hex() for ref in handle.refs.list(kind) if ref.target is not None}
    if not found:
        handle.refs.require_there()
    return found


def list_pins(handle: RepositoryHandle) -> list[PinInfo]:
    """All pins, by name."""
    found = []
    for ref in handle.refs.whole(RefKind.PIN):
        if ref.target is not None:
            set_by = next((move for move in reversed(ref.log) if move.new == ref.target), None)
            when, who = (set_by.time_us / 1e6, set_by.author) if set_by else (0.0, "")
            found.append(PinInfo(ref.name, ref.target.hex(), ref.note, when, who))
    if not found:
        handle.refs.require_there()
    return found


def create_branch(handle: RepositoryHandle, name: str, *, start: Revision = "HEAD", force: bool = False) -> Digest:
    """Make the branch `name` at the revision `start`; the commit that it names now.

    Args:
        force: Move the branch if it exists already.
    Raises:
        ConflictError: it exists, or is a tag. NotFoundError: no such revision.
    """
    if not force:
        return point(handle, RefKind.BRANCH, name, start, force=False)
    before = _seen_with(handle, name)
    target = point(handle, RefKind.BRANCH, name, start, force=True)
    for tier, count in _left_behind(handle, before, name, target).items():
        _LOGGER.warning(
            "%d commits that branch %r led to are not at %s and are not pushed any more: they stay until its log "
            "expires, its reflog shows them",
            count, name, tier,
        )  # fmt: skip
    return target


_Seen: TypeAlias = tuple[tuple[Remote, ...], list[Ref]]


def _seen_with(handle: RepositoryHandle, name: str) -> _Seen:
    """Tiers, and branches and remote-tracking branches as they are now, if there are tiers, and the branch `name`."""
    tiers = read_settings(handle.store).tiers
    refs = list(handle.refs.list(RefKind.BRANCH, RefKind.REMOTE)) if tiers else []
    return (tiers, refs) if any(ref.kind is RefKind.BRANCH and ref.name == name for ref in refs) else ((), [])


def _left_behind(handle: RepositoryHandle, seen: _Seen, name: str, target: Digest | None) -> dict[str, int]:
    """Tier -> how many commits it lacks that no branch leads to if `name` names `target`, or nothing, instead."""
    tiers, refs = seen
    if not tiers:
        return {}
    graph = graph_behind(handle, [ref.target for ref in refs if ref.kind is RefKind.BRANCH and ref.target is not None])
    after = [replace(ref, target=target) if ref.kind is RefKind.BRANCH and ref.name == name else ref for ref in refs]
    counts = {
        tier.name: len(unpushed_commits(graph, refs, [tier]) - unpushed_commits(graph, after, [tier])) for tier in tiers
    }
    return {tier: count for tier, count in counts.items() if count}


def point(
    handle: RepositoryHandle,
    kind: RefKind,
    name: str,
    revision: Revision,
    *,
    force: bool,
    note: str | None = None,
    sign: str | None = None,
) -> Digest:
    """Let the branch, tag or pin `name` name the commit `revision`.

    Args:
        note: Message of an annotated tag, reason of a pin; None leaves what there is.
        sign: The key that signs a tag.
    Raises:
        ConflictError: it exists and `force` is not given, or a branch or tag has the other's name.
        NotFoundError: no such revision. InvalidInputError: no possible name.
    """
    target = resolve(handle, revision)
    move = new_move(None, target, f"{kind.label}: set to {revision_text(revision)}", default_author())
    signature = None if sign is None else sign_tag(sign, name, target, note or "")
    publish_ref(
        handle, kind, name, target, move=move, force=force, note=note, likely=likely_refs(handle, revision),
        signature=signature,
    )  # fmt: skip
    return target


def delete_branch(handle: RepositoryHandle, name: str, *, force: bool = False) -> Digest:
    """Delete the branch; the commit that it named. The commit itself stays. A head on it is detached.

    Args:
        force: Also if it alone leads to commits: these are not pushed any more, and stay until its log expires.
    Raises:
        NotFoundError: no such branch. InvalidInputError: it is the default branch.
        ConflictError: a commit landed on it at the same time; or commits of it are not at a tier yet, or in no other
            branch, tag, pin or branch of a remote.
    """
    if _is_default(handle, name):
        raise InvalidInputError(
            f"{name!r} is the default branch of this repository and stays: "
            f'to let it name another commit, use repo.branch("{name}", start=REF, force=True)'
        )
    if not force:
        for tier, count in _left_behind(handle, _seen_with(handle, name), name, None).items():
            raise ConflictError(
                f"branch {name!r} leads to {count} commits that are not at {tier} yet: push them first "
                f'(repo.push_pending("{tier}")), or give them up with force=True'
            )
        alone = _num_unique_commits(handle, name)
        if alone:
            raise ConflictError(
                f"branch {name!r} alone leads to {alone} commits: merge, push or tag them, or delete it with force=True"
            )
    deleted = delete_ref(handle, RefKind.BRANCH, name)
    if handle.head.branch == name:
        handle.head = replace(handle.head, branch=None)
    return deleted


def _num_unique_commits(handle: RepositoryHandle, name: str) -> int:
    """How many commits no ref but the branch `name` leads to."""
    own, others = list[Digest](), set[Digest]()
    for ref in handle.refs.list():
        if ref.kind is RefKind.BRANCH and ref.name == name and ref.target is not None:
            own.append(ref.target)
        elif ref.target is not None:
            others.add(ref.target)
    if others.issuperset(own):
        return 0
    graph = graph_behind(handle, own)
    return len(graph.reached(own) - graph.reached(others))


def set_default_branch(handle: RepositoryHandle, name: str) -> Digest:
    """Let a branch that is there be the default branch; the commit that it names.

    Raises:
        NotFoundError: no such branch. ConflictError: the config was changed at the same time.
    """
    handle.require_writable()
    target = branch_target(handle, check_new_name(name))
    if target is None:
        similar = did_you_mean(name, (ref.name for ref in handle.refs.list(RefKind.BRANCH)))
        raise NotFoundError(f"there is no branch {name!r}{similar}: the default branch is one that has commits")
    change_default_branch(handle, name)
    return target


def _is_default(handle: RepositoryHandle, name: str) -> bool:
    """Whether the branch is the default branch now, which another process may have changed."""
    return one_text("name", name) == read_config(handle.store).default_branch


def delete_ref(handle: RepositoryHandle, kind: RefKind, name: str) -> Digest:
    """Delete a branch, tag or pin; the commit that it named.

    What stays is an empty record under the name: removing the file could take away a commit
    that another process puts there between our look and our deletion.

    Raises:
        NotFoundError: no such ref. ConflictError: it moved at this moment.
    """
    handle.require_writable()
    ref = handle.refs.get(kind, name)
    if ref.target is None:
        raise NotFoundError(f"there is no {kind.label} {name!r}")
    take_away(handle, ref, "deleted")
    return ref.target


def create_tag(
    handle: RepositoryHandle,
    name: str,
    revision: Revision = "HEAD",
    *,
    message: str = "",
    force: bool = False,
    sign: str | None = None,
) -> Digest:
    """Let the tag `name` name the commit `revision`; that commit's id.

    Args:
        message: What is kept with the tag; it makes it an annotated one.
        force: Move the tag if it exists already; its message and signature go, too.
        sign: The key that signs it: name, commit, message, who and when.
    Raises:
        ConflictError: it exists, or is a branch. NotFoundError: no such revision.
    """
    check_note("message of a tag", message)
    return point(handle, RefKind.TAG, name, revision, force=force, note=message, sign=sign)


def tag_messages(handle: RepositoryHandle) -> dict[str, str]:
    """Name -> message of every annotated tag, by name."""
    return {ref.name: ref.note for ref in handle.refs.list(RefKind.TAG) if ref.note}


def create_pin(
    handle: RepositoryHandle, revision: Revision = "HEAD", *, name: str | None = None, reason: str = "",
    force: bool = False,
) -> PinInfo:  # fmt: skip
    """Keep the commit `revision` until it is unpinned.

    Args:
        name: "pin-" and the first digits of the id, if not given.
        force: Move a pin of that name that exists already.
    Raises:
        ConflictError: there is a pin of that name. NotFoundError: no such revision.
    """
    check_note("reason of a pin", reason)
    target = resolve(handle, revision)
    name = f"pin-{short(target)}" if name is None else name
    move = new_move(None, target, f"pin: set to {revision_text(revision)}", default_author())
    likely = likely_refs(handle, revision)
    publish_ref(handle, RefKind.PIN, name, target, move=move, force=force, note=reason, likely=likely)
    return PinInfo(name, target.hex(), reason, move.time_us / 1e6, move.author)


def delete_pin(handle: RepositoryHandle, name: str) -> Digest:
    """Take the pin away; the commit that it named, which may be forgotten from now on.

    Raises:
        NotFoundError: no such pin.
    """
    return delete_ref(handle, RefKind.PIN, one_text("name", name).removeprefix(RefKind.PIN.value))


def rename_ref(handle: RepositoryHandle, kind: RefKind, old: str, new: str) -> Digest:
    """Let `new` be what `old` was; the commit that it names.

    Raises:
        NotFoundError: no such ref. InvalidInputError: the default branch, or no possible name.
        ConflictError: the new name is taken, or the old one was moved at the same time.
    """
    handle.require_writable()
    one_text("old", old)
    one_text("new", new)
    if kind is RefKind.BRANCH and _is_default(handle, old):
        raise InvalidInputError(
            f'{old!r} is the default branch of this repository and stays: repo.branch("{new}") makes another beside it'
        )
    if old == new:
        raise InvalidInputError(f"{old!r} has that name already: choose another name")
    ref = handle.refs.get(kind, old)
    if ref.target is None:
        raise NotFoundError(f"there is no {kind.label} {old!r}")
    if handle.refs.seen([kind], check_new_name(new)):
        raise ConflictError(f"there is a {kind.label} {new!r} already: choose another name")
    check_meaning(handle, kind, new)
    move = new_move(None, ref.target, f"renamed from {old}", default_author())
    made = publish_ref(handle, kind, new, ref.target, move=move, note=ref.note, likely=[(kind, old)])
    try:
        take_away(handle, ref, f"renamed to {new}")
    except ConflictError as error:
        with suppress(ConflictError):  # it moved on from there already: it stays
            take_away(handle, made, "not renamed")
        raise ConflictError(f"{kind.label} {old!r} moved while it was renamed: rename it again") from error
    if kind is RefKind.BRANCH and handle.head.branch == old:
        handle.head = replace(handle.head, branch=new)
    return ref.target


def undelete_ref(handle: RepositoryHandle, kind: RefKind, name: str) -> Digest:
    """Let `name` be again what it was when it was deleted; the commit that it names.

    Raises:
        NotFoundError: there was no such ref, or its commit was collected meanwhile.
        ConflictError: it is there, or the name was given to another kind of ref.
    """
    handle.require_writable()
    ref = handle.refs.get(kind, name)
    if ref.target is not None:
        raise ConflictError(f"the {kind.label} {name!r} is there: nothing is to be brought back")
    last = next((move.old for move in reversed(ref.log) if move.new is None and move.old is not None), None)
    if last is None:
        raise NotFoundError(f"the {kind.label} {name!r} never named a commit: nothing can be brought back")
    try:
        publish_ref(handle, kind, name, last, move=new_move(None, last, "undeleted", default_author()))
    except NotFoundError as error:
        raise NotFoundError(f"the {kind.label} {name!r} cannot be brought back: {error}") from error
    return last


@dataclass(frozen=True, slots=True)
class RefMove:
    """One move of a ref; ids are hexadecimal.

    Attributes:
        old, new: What it named before and after; None: nothing.
        action: "commit: ..." or what was done to the ref.
    """

    time_s: float
    old: str | None
    new: str | None
    action: str
    author: str


def reflog(handle: RepositoryHandle, name: str | None = None, *, limit: int | None = None) -> list[RefMove]:
    """The moves of a branch, tag or pin, deleted ones too, the latest first.

    Args:
        name: A branch, else a tag, else a pin, or a whole name such as refs/tags/v1; None: the branch that was
            checked out, else the default branch.
    Raises:
        NotFoundError: there never was such a ref.
    """
    ref = _ref(handle, current_branch(handle) if name is None or one_text("ref", name) in HEAD_NAMES else name)
    return list(islice(_moves(handle, ref), limit))


def _ref(handle: RepositoryHandle, name: str) -> Ref:
    whole, plain = split_name(name)
    kinds = RefKind if whole is None else [whole]
    found = [ref for kind in kinds if (ref := handle.refs.find(kind, plain)) is not None]
    require_one(name, [ref for ref in found if ref.target is not None and ref.kind is not RefKind.PIN])
    if not found:
        require_there(handle.store)
        similar = did_you_mean(plain, (ref.name for ref in handle.refs.list(*kinds)))
        raise NotFoundError(f"there never was a branch, tag or pin {name!r}{similar}: see repo.branches()")
    return next((ref for ref in found if ref.target is not None), found[0])


def _moves(handle: RepositoryHandle, ref: Ref) -> Iterator[RefMove]:
    """The moves of `ref`, latest first: between two logged ones, the commits that lead from one to the other."""
    head = ref.target
    for move in reversed(ref.log):
        if head is not None and head != move.new:
            yield from _commits(handle, head, move.new)
        old, new = (None if digest is None else digest.hex() for digest in (move.old, move.new))
        yield RefMove(move.time_us / 1e6, old, new, move.action, move.author)
        head = move.old
    if head is not None and len(ref.log) < MAX_LOG:
        yield from _commits(handle, head, None)


def _commits(handle: RepositoryHandle, head: Digest, stop: Digest | None) -> Iterator[RefMove]:
    """The commits from `head` back to `stop`, by first parents."""
    try:
        for row in log_rows_in_pieces(handle, [head], first_parent=True):
            if row.digest == stop:
                return
            subject = row.message.split("\n", 1)[0].rstrip()
            old = row.parents[0].hex() if row.parents else None
            action = f"commit: {subject}" if subject else "commit"
            yield RefMove(row.time_us / 1e6, old, row.digest.hex(), action, row.author)
    except NotFoundError:
        return  # collected: what led to it is not known any more
    except CorruptionError:
        if handle.damaged:
            return  # collected, or in a pack that is damaged: what was logged is shown all the same
        raise


# --- who signed a commit, the tag that names it, and the commits that it leads to --------------


@dataclass(frozen=True, slots=True, repr=False)
class Verified(Brief):
    """One commit or tag, and what is known of its signature.

    Attributes:
        what: "commit", or "tag".
        name: Whole id of the commit, or name of the tag.
        commit: Whole id of the commit that it is or names.
        author, time_s: By whom and when, as it says itself; signed with the rest.
        message: Of the commit or tag.
        signature: The verdict.
    """

    what: str
    name: str
    commit: str
    author: str
    time_s: float
    message: str
    signature: SignatureInfo


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Brief):
    """Result of `verify`.

    Attributes:
        commits: The commit that was asked for and, with `history`, all that it leads to, the youngest first.
        tag: The tag that it was named by, if that is signed.
    """

    commits: tuple[Verified, ...]
    tag: Verified | None = None

    @property
    def ok(self) -> bool:
        """Whether the commit, or the tag that names it, is signed by a trusted key; of a history, every commit."""
        if len(self.commits) == 1 and self.tag is not None and self.tag.signature.is_good:
            return True
        return all(each.signature.is_good for each in self.commits)

    @property
    def refused(self) -> tuple[Verified, ...]:
        """Commits and tags without a trusted signature."""
        found = (*self.commits, *([self.tag] if self.tag is not None else []))
        return tuple(each for each in found if not each.signature.is_good)

    def require(self) -> None:
        """Raise what is wrong, if anything is.

        Raises:
            SignatureError: see `ok`.
        """
        if not self.ok:
            first = self.refused[0]
            more = f", and {len(self.refused) - 1} more" if len(self.refused) > 1 else ""
            name = first.name if first.what == "tag" else short(bytes.fromhex(first.name))
            raise SignatureError(f"{first.what} {name}: {first.signature.reason}{more}")


def verify_revision(
    handle: RepositoryHandle, revision: Revision, trust: Trust, *, history: bool = False
) -> VerifyReport:
    """Judge the signatures of `revision` by `trust`.

    Args:
        history: Judge every commit that it leads to as well.
    Raises:
        NotFoundError: no such revision. CorruptionError: a commit is damaged.
    """
    digest, ref = resolve_ref(handle, revision)
    tag = None
    if ref is not None and ref.kind is RefKind.TAG and ref.signature is not None:
        signed, target = ref.signature, "" if ref.target is None else ref.target.hex()
        found = tag_signature(ref, trust)
        tag = Verified("tag", ref.name, target, signed.author, signed.time_us / 1e6, ref.note, found)
    digests = [digest]
    if history:
        graph_with(handle, [digest])
        digests = [Digest(row.digest) for row in log_rows(handle, [digest])]
    return VerifyReport(tuple(_verified(each, data, trust) for each, data in read_commits(handle, digests)), tag)


def _verified(digest: Digest, data: bytes, trust: Trust) -> Verified:
    commit = decode_commit(data)
    found = judge_commit(data, trust)
    name = digest.hex()
    return Verified("commit", name, name, commit.author, commit.time_us / 1e6, commit.message, found)


@dataclass(frozen=True, slots=True)
class SignedBytes:
    """A signature and what it is of, as other programs verify them.

    Attributes:
        message: The bytes that were signed.
        signature: As `ssh-keygen -Y verify -n cas_ckpt -s FILE` takes it.
        namespace: What it was made for.
    """

    message: bytes
    signature: str
    namespace: str = NAMESPACE


def signed_bytes(handle: RepositoryHandle, revision: Revision) -> SignedBytes:
    """The signature of a tag, if `revision` names a signed one, else of the commit, and the bytes that it is of.

    Raises:
        NotFoundError: no such revision, or it is not signed.
    """
    digest, ref = resolve_ref(handle, revision)
    if ref is not None and ref.kind is RefKind.TAG and ref.signature is not None:
        message = tag_message(ref)
        if message is not None:
            return SignedBytes(message, armored(ref.signature.blob))
    message, blob = split_signature(read_commit(handle, digest))
    if blob is None:
        raise NotFoundError(f"commit {short(digest)} is not signed")
    return SignedBytes(message, armored(blob))
