"""Who signed what, and which branches take signed commits only."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from cas_ckpt.arguments import reads_arguments
from cas_ckpt.repository.given import Trusted
from cas_ckpt.repository.opened import Opened

if TYPE_CHECKING:
    from cas_ckpt.core.revisions import Revision
    from cas_ckpt.core.signatures import SignedBranches
    from cas_ckpt.ops.verify import SignedBytes, VerifyReport


@reads_arguments
class SignatureVerbs(Opened):
    """Who signed what, and which branches take signed commits only."""

    def verify(
        self, ref: Revision = "HEAD", *, trust: Trusted, revoked: str | PathLike[str] | None = None,
        history: bool = False,
    ) -> VerifyReport:  # fmt: skip
        """Who signed the commit, and the tag that `ref` is; `ok` says whether somebody who is trusted did.

        Args:
            trust: The path of an allowed_signers file as git uses it, or of a public key; a public key as text; a list
                of public keys or lines of such a file; or a `Trust`.
            revoked: A file of public keys that count no more.
            history: Every commit that it leads to has to be signed as well.
        Raises:
            InvalidInputError: a line of `trust` that is not understood. StorageError: a file cannot be read.
        """
        from cas_ckpt.ops.verify import verify_revision
        from cas_ckpt.signing import as_trust

        trusted = as_trust(trust)
        if revoked is not None:
            trusted = trusted.without(revoked)
        return verify_revision(self._handle, ref, trusted, history=history)

    def signed_bytes(self, ref: Revision = "HEAD") -> SignedBytes:
        """The signature of the commit, or of the tag that `ref` is, and the bytes that it is of: for other programs.

        Raises:
            NotFoundError: it is not signed.
        """
        from cas_ckpt.ops.verify import signed_bytes

        return signed_bytes(self._handle, ref)

    def signers(self) -> SignedBranches:
        """The branches that take signed commits only, by pattern, and whose; maybe none."""
        from cas_ckpt.core.signatures import read_signers

        return read_signers(self._handle.store)

    def set_signers(self, branch: str, trust: Trusted) -> SignedBranches:
        """Let branches that match the pattern `branch` take commits only that somebody in `trust` signed; all rules.

        Commits that are there already stay as they are. It keeps those who use cas_ckpt from mistakes; against those
        who can write to the store otherwise, readers have `trust=`.
        """
        from cas_ckpt.core.signatures import set_signers
        from cas_ckpt.signing import as_trust

        return set_signers(self._handle, branch, as_trust(trust))

    def clear_signers(self, branch: str | None = None) -> SignedBranches:
        """Let the branches of the pattern `branch`, or all, take any commit again; what is left.

        Raises:
            NotFoundError: no such pattern is set.
        """
        from cas_ckpt.core.signatures import clear_signers

        return clear_signers(self._handle, branch)
