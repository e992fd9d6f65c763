"""Signatures of commits and tags: what is signed, and what is known of who did.

    commit   its canonical bytes without the field `signature`: parents, root, message, author, time, all of it
    tag      where it is stored, the commit, the message, the time and the signer (`tag_bytes` in core/refs.py)

Invariant: a signature is judged by bytes that were verified against their id, never by what the index says of them.
Whose keys count is for the caller to say; what a repository says of that is in core/signed_branches.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cas_ckpt import clock
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import Ref, RefKind, TagSignature, default_author, ref_key, tag_bytes
from cas_ckpt.errors import NotFoundError, SignatureError
from cas_ckpt.index.statements import batches
from cas_ckpt.objects.digest import Digest, ObjectKind, short
from cas_ckpt.objects.nodes import decode_commit, split_signature
from cas_ckpt.signing.keys import SigningKey
from cas_ckpt.signing.trust import SignatureInfo, Trust, Verdict

COMMITS_TOGETHER = 1024
"""Commits in memory at a time: some kilobytes each."""


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


def sign_tag(key: SigningKey, name: str, target: Digest, note: str) -> TagSignature:
    """The signature of the tag `name`, made now."""
    time_us, author = int(clock.now_s() * 1e6), default_author()
    where = ref_key(RefKind.TAG, name)
    return TagSignature(time_us, author, key.sign(tag_bytes(where, target, note, time_us=time_us, author=author)))


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
        return SignatureInfo(Verdict.UNSIGNED, reason="it is not signed")
    return trust.verdict(ref.signature.blob, message, time_s=ref.signature.time_us / 1e6)


def require_trusted(handle: RepositoryHandle, digest: Digest, ref: Ref | None, trust: Trust) -> None:
    """Refuse a commit that nobody trusted signed, neither itself nor the tag that it was named by.

    Raises:
        SignatureError: says why.
    """
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
