"""verify: who signed a commit, the tag that names it, and the commits that it leads to.

    1. the revision becomes a commit and, where it is the name of one, a tag
    2. the commit's own bytes, verified against their id, are judged; of a tag its record        (core/signatures.py)
    3. with `history`, every commit that it leads to is judged in the same way

The state itself is not read: the signed bytes hold the ids of everything that a checkout reads and verifies.
Invariant: a report is made of whatever is found; only what cannot be read at all raises.
"""

from __future__ import annotations

from dataclasses import dataclass

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import graph_with
from cas_ckpt.core.records import Brief, log_rows
from cas_ckpt.core.refs import Ref, RefKind
from cas_ckpt.core.revisions import Revision, resolve_ref
from cas_ckpt.core.signatures import judge_commit, read_commit, read_commits, tag_message, tag_signature
from cas_ckpt.errors import NotFoundError, SignatureError
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.nodes import decode_commit, split_signature
from cas_ckpt.signing import NAMESPACE, SignatureInfo, Trust, armored


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
        tag = _verified_tag(ref, ref.signature.author, ref.signature.time_us, trust)
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


def _verified_tag(ref: Ref, author: str, time_us: int, trust: Trust) -> Verified:
    commit = "" if ref.target is None else ref.target.hex()
    return Verified("tag", ref.name, commit, author, time_us / 1e6, ref.note, tag_signature(ref, trust))


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
