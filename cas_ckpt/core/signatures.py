"""Signatures of commits and tags, and branches that take signed commits only: all that is asked of a signature.

    commit   is signed over its canonical bytes without the field `signature`: parents, root, message, author, time
    tag      over where it is stored, the commit, the message, the time and the signer (`tag_bytes` in core/refs.py)

Branches: one sealed record under `signers` has patterns of branches, and for each the lines of an allowed_signers
file. A branch that a pattern matches says in its own record that it takes signed commits only, so that a commit to any
other branch does not have to read `signers`: that is read for branches that say so, and for those that are begun.

    set     write the record, then let every branch that the pattern matches say so
    clear   take the pattern out of the record, then let the branches that no pattern matches say so no more

Dying in between leaves branches that say so without a pattern (they refuse every commit until one is set, or cleared
again) or a pattern whose branches do not say so yet (set it again).

Invariant: a signature is judged by bytes that were verified against their id, never by what the index says of them; a
branch moves to a commit that somebody in the record signed, or its record does not ask for it. This keeps those who
use cas_ckpt from mistakes; who can write to the store can change the record too, so whoever reads says by himself whom
to trust (`trust=`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from cas_ckpt import clock
from cas_ckpt.arguments import one_text
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import graph_with
from cas_ckpt.core.ref_store import change_record, read_record
from cas_ckpt.core.refs import NONCE_BYTES, Ref, RefKind, TagSignature, default_author, ref_key, tag_bytes
from cas_ckpt.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    SignatureError,
    shown_value,
)
from cas_ckpt.index.rows import batches
from cas_ckpt.objects.digest import Digest, ObjectKind, seal, short
from cas_ckpt.objects.nodes import decode_commit, split_signature
from cas_ckpt.signing import UNSIGNED, SignatureInfo, Trust, parse_signers, sign
from cas_ckpt.storage.store import Store

COMMITS_TOGETHER = 1024
"""Commits in memory at a time: some kilobytes each."""

VERSION = 1
SIGNERS_KEY = "signers"
MAX_PATTERNS = 100
MAX_SIGNERS = 1000
MAX_ATTEMPTS = 100

_SIGN_IT = "sign the commit with a key of repo.signers() (CommitOptions(sign=KEY))"
_PROBE = b"cas_ckpt: may this key sign for the branch?"
"""What a key signs before a commit is made, to see that it can and may."""


def judge_commit(data: bytes, trust: Trust) -> SignatureInfo:
    """What is known of the signature of the commit in `data`.

    Raises:
        CorruptionError: no commit.
    """
    message, blob = split_signature(data)
    return trust.verdict(blob, message, time_s=decode_commit(data).time_us / 1e6)


def commit_signature(handle: RepositoryHandle, digest: Digest, trust: Trust) -> SignatureInfo:
    """What is known of the signature of the commit `digest`.

    Raises:
        NotFoundError: no such commit. CorruptionError: its object is damaged.
    """
    return judge_commit(read_commit(handle, digest), trust)


def read_commit(handle: RepositoryHandle, digest: Digest) -> bytes:
    """The bytes of the commit, verified against its id.

    Raises:
        NotFoundError: no such commit. CorruptionError: its object is damaged.
    """
    try:
        return handle.read_node(ObjectKind.COMMIT, digest)
    except NotFoundError as error:
        raise NotFoundError(f"there is no commit {short(digest)} here: {error}") from error


def read_commits(handle: RepositoryHandle, digests: Sequence[Digest]) -> Iterator[tuple[Digest, bytes]]:
    """Each of these commits with its bytes, verified, in their order; many are read at a time.

    Raises:
        NotFoundError: one is not there. CorruptionError: one is damaged.
    """
    for part in batches(digests, COMMITS_TOGETHER):
        found = handle.read_nodes(ObjectKind.COMMIT, part)
        yield from ((digest, found[digest]) for digest in part)


def sign_tag(key: str, name: str, target: Digest, note: str) -> TagSignature:
    """The signature of the tag `name`, made now by the key in the file `key`."""
    time_us, author = int(clock.now_s() * 1e6), default_author()
    where = ref_key(RefKind.TAG, name)
    return TagSignature(time_us, author, sign(key, tag_bytes(where, target, note, time_us=time_us, author=author)))


def tag_message(ref: Ref) -> bytes | None:
    """What the signature of `ref` is of; None: it is not signed."""
    signature = ref.signature
    if signature is None or ref.target is None:
        return None
    return tag_bytes(ref.key, ref.target, ref.note, time_us=signature.time_us, author=signature.author)


def tag_signature(ref: Ref, trust: Trust) -> SignatureInfo:
    """What is known of the signature of a tag."""
    message = tag_message(ref)
    if message is None or ref.signature is None:
        return UNSIGNED
    return trust.verdict(ref.signature.blob, message, time_s=ref.signature.time_us / 1e6)


def require_trusted(handle: RepositoryHandle, digest: Digest, ref: Ref | None, trust: Trust | None) -> None:
    """Refuse a commit that nobody trusted signed, neither itself nor the tag that it was named by.

    Args:
        trust: None: those whose signatures the branch `ref` takes.
    Raises:
        SignatureError: says why.
    """
    if trust is None and ref is not None:
        trust = required_signers(handle, ref, ref.name)
    if trust is None:
        return
    found = commit_signature(handle, digest, trust)
    if found.is_good or (ref is not None and ref.kind is RefKind.TAG and tag_signature(ref, trust).is_good):
        return
    raise refusal(digest, found, advice="Nothing was read: ask who made it, or trust that key if you know whose it is")


def refusal(digest: Digest, found: SignatureInfo, *, where: str = "", advice: str = "") -> SignatureError:
    """The error for a commit whose signature is not good.

    Args:
        where: What asks for signatures, after the id.
        advice: What to do, after the reason.
    """
    return SignatureError(f"commit {short(digest)}{where}: {found.reason}{whose(found)}. {advice}")


def whose(found: SignatureInfo) -> str:
    """The key of a signature, as errors name it; empty if there is none."""
    return f" ({found.key_type} {found.fingerprint})" if found.fingerprint else ""


# --- branches that take signed commits only ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class BranchSigners:
    """Whose signatures branches take.

    Attributes:
        pattern: The branches; `*` matches "/" too.
        signers: Lines of an allowed_signers file.
    """

    pattern: str
    signers: tuple[str, ...]

    @property
    def trust(self) -> Trust:
        """The same, to judge by."""
        return Trust(parse_signers(self.signers, name=f"the signers of {self.pattern!r}"))


@dataclass(frozen=True, slots=True)
class SignedBranches:
    """The branches that take signed commits only.

    Attributes:
        branches: The first whose pattern matches a branch counts.
    """

    branches: tuple[BranchSigners, ...] = ()

    def for_branch(self, branch: str) -> BranchSigners | None:
        """Whose signatures `branch` takes; None: it takes any commit."""
        return next((each for each in self.branches if fnmatchcase(branch, each.pattern)), None)


def read_signers(store: Store) -> SignedBranches:
    """The branches that take signed commits only.

    Raises:
        CorruptionError: the record is damaged. UnsupportedVersionError: written by a newer version.
    """
    return _read(store)[0]


def required_signers(handle: RepositoryHandle, ref: Ref | None, branch: str) -> Trust | None:
    """Whose signature a commit needs before the branch may name it; None: anybody may commit.

    Args:
        ref: The branch as it is, if it `asks_signers`; None: it is not there.
    Raises:
        SignatureError: the branch takes signed commits only, and nothing says whose.
        CorruptionError: see `read_signers`.
    """
    found = read_signers(handle.store).for_branch(branch)
    if found is not None:
        return found.trust
    if ref is not None and ref.signed_only:
        raise SignatureError(
            f"branch {branch!r} takes signed commits only, and the record {SIGNERS_KEY!r} names nobody for it: set "
            f'its signers again (repo.set_signers("{branch}", trust)), or clear them (repo.clear_signers())'
        )
    return None


def require_signed(trust: Trust, branch: str, digest: Digest, data: bytes) -> None:
    """Refuse a commit, with these bytes, that no signer of the branch signed.

    Raises:
        SignatureError: says why.
    """
    found = judge_commit(data, trust)
    if not found.is_good:
        where = f" for branch {branch!r}, which takes signed commits only"
        raise refusal(digest, found, where=where, advice=f"The branch was not moved: {_SIGN_IT}")


def require_signer(handle: RepositoryHandle, ref: Ref | None, branch: str, key: str | None) -> None:
    """Refuse, before anything is made, a commit that the branch would not take; the key signs a few bytes to see.

    Args:
        ref: The branch as it is, if it `asks_signers`; None: it is not there.
        key: The file of the key by which the commit is going to be signed; None: it is not.
    Raises:
        SignatureError: says why. CorruptionError: see `read_signers`. InvalidInputError: the key does not sign.
    """
    trust = required_signers(handle, ref, branch)
    if trust is None:
        return
    found = trust.verdict(None if key is None else sign(key, _PROBE), _PROBE, time_s=clock.now_s())
    if not found.is_good:
        why = f"{found.reason}{whose(found)}"
        raise SignatureError(f"branch {branch!r} takes signed commits only: {why}. Nothing was written: {_SIGN_IT}")


def check_move(
    handle: RepositoryHandle, ref: Ref | None, branch: str, target: Digest, *, source: RepositoryHandle | None = None
) -> bool | None:
    """See that the branch may be moved to a commit that is made already; what its record is to say of that.

    Of a branch that is there, all commits are looked at that are new to it; of one that is begun, the first alone.

    Args:
        ref: The branch as it is; None: it is not there.
        source: Where the commits are, if not there yet.
    Returns:
        What `RefStore.swap` gets as `signed_only`: None leaves it as it is.
    Raises:
        SignatureError: one of them is not signed by a signer of the branch; names it.
    """
    signers = required_signers(handle, ref, branch) if ref is None or ref.asks_signers else None
    if signers is None:
        return None
    source = handle if source is None else source
    new = {bytes(target)}
    if ref is not None and ref.target is not None:
        graph = graph_with(source, [target])
        new |= graph.ancestors([target]) - graph.ancestors([ref.target])
    for digest, data in read_commits(source, [Digest(one) for one in sorted(new)]):
        require_signed(signers, branch, digest, data)
    return True


# --- the record -------------------------------------------------------------------------------


def set_signers(handle: RepositoryHandle, pattern: str, trust: Trust) -> SignedBranches:
    """Let the branches that `pattern` matches take commits only that somebody in `trust` signed; all that is set.

    Commits that are there already stay, signed or not.

    Raises:
        InvalidInputError: no pattern, or nobody to trust.
    """
    if not one_text("branch", pattern) or len(pattern) > 200 or not pattern.isprintable():
        raise InvalidInputError(f"{pattern[:80]!r} is not a pattern of branches: write e.g. 'main' or 'release/*'")
    if not 0 < len(trust.signers) <= MAX_SIGNERS:
        raise InvalidInputError(f"{len(trust.signers)} keys were given for {pattern!r}: give 1 to {MAX_SIGNERS}")
    if trust.revoked:
        raise InvalidInputError("signers of branches are kept without revoked keys: leave those out of what is given")
    wanted = BranchSigners(pattern, trust.signers)

    def changed(held: SignedBranches) -> SignedBranches:
        known = [each.pattern for each in held.branches]
        if pattern in known:
            return SignedBranches(tuple(wanted if each.pattern == pattern else each for each in held.branches))
        if len(known) >= MAX_PATTERNS:
            raise InvalidInputError(f"there are {MAX_PATTERNS} patterns of branches already: clear some first")
        return SignedBranches((*held.branches, wanted))

    return _change(handle, changed)


def clear_signers(handle: RepositoryHandle, pattern: str | None = None) -> SignedBranches:
    """Let the branches of `pattern`, or all, take any commit again; what is left.

    Raises:
        NotFoundError: no such pattern is set.
    """

    def changed(held: SignedBranches) -> SignedBranches:
        left = tuple(each for each in held.branches if pattern not in (None, each.pattern))
        if pattern is not None and left == held.branches:
            named = shown_value(pattern)
            raise NotFoundError(f"{handle.store.url} has no signers for the pattern {named}: see repo.signers()")
        return SignedBranches(left)

    return _change(handle, changed)


def _change(handle: RepositoryHandle, change: Callable[[SignedBranches], SignedBranches]) -> SignedBranches:
    handle.require_writable()
    wanted = change_record(handle.store, SIGNERS_KEY, _read, _encode, change)
    for ref in list(handle.refs.every()):  # also those that are just being begun
        if ref.kind is RefKind.BRANCH:
            _mark(handle, ref)
    return wanted


def _mark(handle: RepositoryHandle, ref: Ref) -> None:
    """Let a branch say whether it takes signed commits only, as the record has it now; it names what it named."""
    for _ in range(MAX_ATTEMPTS):
        wanted = read_signers(handle.store).for_branch(ref.name) is not None
        if ref.signed_only == wanted:
            return
        try:
            # Its own generation: whoever fenced it meanwhile has changed the record, and the swap is refused.
            handle.refs.swap(ref, ref.target, generation=ref.generation, signed_only=wanted)
            return
        except ConflictError:
            ref = handle.refs.get(RefKind.BRANCH, ref.name)
    raise ConflictError(f"branch {ref.name!r} moved {MAX_ATTEMPTS} times while its signers were set: set them again")


def _read(store: Store) -> tuple[SignedBranches, bytes | None]:
    return read_record(store, SIGNERS_KEY, _decode, SignedBranches(), version=VERSION)


def _encode(signed: SignedBranches) -> bytes:
    payload = {
        "branches": [[each.pattern, list(each.signers)] for each in signed.branches],
        "time_us": int(clock.now_s() * 1e6),
        "author": default_author(),
        "nonce": secrets.token_bytes(NONCE_BYTES),
    }
    return seal("signers", VERSION, payload, key=SIGNERS_KEY)


def _decode(payload: Mapping[str, Any]) -> SignedBranches:
    try:
        found = []
        for pattern, lines in payload["branches"]:
            if not isinstance(pattern, str) or not isinstance(lines, list) or not 0 < len(lines) <= MAX_SIGNERS:
                raise TypeError("its branches are not patterns with lists of signers")
            each = BranchSigners(pattern, tuple(lines))
            _ = each.trust
            found.append(each)
        return SignedBranches(tuple(found))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(
            f"{SIGNERS_KEY}: no signers that this version can read: {error}: upgrade, or set the signers anew after "
            "deleting this record"
        ) from error
