"""Branches, tags and pins, what they named before, and who signed what."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from cas_ckpt.arguments import check_flags, check_limit
from cas_ckpt.core.refs import RefKind
from cas_ckpt.repository.opened import Opened, given_key

if TYPE_CHECKING:
    from cas_ckpt.core.revisions import Revision
    from cas_ckpt.core.signatures import SignedBranches
    from cas_ckpt.ops.refs import PinInfo, RefMove, SignedBytes, VerifyReport
    from cas_ckpt.signing import KeyFile, Trusted


class NameVerbs(Opened):
    """Names of commits, and signatures."""

    def branch(self, name: str, *, start: Revision = "HEAD", force: bool = False) -> str:
        """Make the branch `name` at the commit `start`; that commit's id.

        Args:
            force: Move a branch of that name that exists already.
        Raises:
            ConflictError: the name is taken (and `force` does not say to move the branch).
        """
        check_flags(force=force)
        from cas_ckpt.ops.refs import create_branch

        return create_branch(self._handle, name, start=start, force=force).hex()

    def branches(self) -> dict[str, str]:
        """Name -> id of the head of every branch, by name."""
        from cas_ckpt.ops.refs import named

        return named(self._handle, RefKind.BRANCH)

    def set_default_branch(self, name: str) -> str:
        """Let a branch that is there be the default branch; the id that it names.

        An object that has neither checked out nor committed anything is on it then.

        Others see it when they are opened, also on hosts that have the former one in their cache. The former default
        branch is a branch like others.

        Raises:
            NotFoundError: there is no such branch, or it has no commits. ConflictError: somebody else changed it at
            this moment.
        """
        from cas_ckpt.ops.refs import set_default_branch

        return set_default_branch(self._handle, name).hex()

    def delete_branch(self, name: str, *, force: bool = False) -> str:
        """Delete the branch; the id that it named. Its commits stay until they are collected.

        Args:
            force: Also if it alone leads to commits, or a tier does not have them yet; they are not pushed any more
                then.
        Raises:
            InvalidInputError: it is the default branch. ConflictError: it leads to what a tier does not have yet, or to
                commits that no other branch, tag, pin or branch of a remote leads to.
        """
        check_flags(force=force)
        from cas_ckpt.ops.refs import delete_branch

        return delete_branch(self._handle, name, force=force).hex()

    def rename_branch(self, old: str, new: str) -> str:
        """Give the branch another name; the id that it names. The default branch stays.

        Raises:
            ConflictError: the new name is taken.
        """
        from cas_ckpt.ops.refs import rename_ref

        return rename_ref(self._handle, RefKind.BRANCH, old, new).hex()

    def undelete_branch(self, name: str) -> str:
        """Bring the deleted branch back; the id that it names, as before.

        Raises:
            NotFoundError: there was none, or its commits were collected.
        """
        from cas_ckpt.ops.refs import undelete_ref

        return undelete_ref(self._handle, RefKind.BRANCH, name).hex()

    def tag(
        self, name: str, ref: Revision = "HEAD", *, message: str = "", force: bool = False, sign: KeyFile | None = None
    ) -> str:
        """Let the tag `name` name the commit `ref`; that commit's id.

        Args:
            message: Kept with the tag, which is an annotated one then.
            sign: The key that signs the tag: its name, the commit, the message, who and when. See `commit`.
        Raises:
            ConflictError: the name is taken (and `force` does not say to move the tag).
        """
        check_flags(force=force)
        from cas_ckpt.ops.refs import create_tag

        return create_tag(self._handle, name, ref, message=message, force=force, sign=given_key(sign)).hex()

    def tags(self) -> dict[str, str]:
        """Name -> id of the commit of every tag, by name."""
        from cas_ckpt.ops.refs import named

        return named(self._handle, RefKind.TAG)

    def tag_messages(self) -> dict[str, str]:
        """Name -> message of every annotated tag, by name."""
        from cas_ckpt.ops.refs import tag_messages

        return tag_messages(self._handle)

    def delete_tag(self, name: str) -> str:
        """Delete the tag; the id that it named.

        Raises:
            NotFoundError: there is none.
        """
        from cas_ckpt.ops.refs import delete_ref

        return delete_ref(self._handle, RefKind.TAG, name).hex()

    def rename_tag(self, old: str, new: str) -> str:
        """Give the tag another name; the id that it names.

        Raises:
            ConflictError: the new name is taken.
        """
        from cas_ckpt.ops.refs import rename_ref

        return rename_ref(self._handle, RefKind.TAG, old, new).hex()

    def undelete_tag(self, name: str) -> str:
        """Bring the deleted tag back, its message too; the id that it names, as before.

        Raises:
            NotFoundError: there was none, or its commit was collected.
        """
        from cas_ckpt.ops.refs import undelete_ref

        return undelete_ref(self._handle, RefKind.TAG, name).hex()

    def pin(self, ref: Revision = "HEAD", *, name: str | None = None, reason: str = "", force: bool = False) -> PinInfo:
        """Keep the commit, whatever is forgotten, until it is unpinned.

        Args:
            name: "pin-" and the first digits of the id, if not given. Pins have names of their own;
                as a revision, one is written refs/pins/NAME.
            force: Move a pin of that name that exists already.
        Raises:
            ConflictError: there is a pin of that name.
        """
        check_flags(force=force)
        from cas_ckpt.ops.refs import create_pin

        return create_pin(self._handle, ref, name=name, reason=reason, force=force)

    def pins(self) -> list[PinInfo]:
        """All pins, by name."""
        from cas_ckpt.ops.refs import list_pins

        return list_pins(self._handle)

    def unpin(self, name: str) -> str:
        """Take the pin away; the id that it named.

        Raises:
            NotFoundError: there is none.
        """
        from cas_ckpt.ops.refs import delete_pin

        return delete_pin(self._handle, name).hex()

    def undelete_pin(self, name: str) -> str:
        """Bring the pin back; the id that it names, as before.

        Raises:
            NotFoundError: there was none, or its commit was collected.
        """
        from cas_ckpt.ops.refs import undelete_ref

        return undelete_ref(self._handle, RefKind.PIN, name).hex()

    def reflog(self, ref: str | None = None, *, limit: int | None = None) -> list[RefMove]:
        """The moves of a branch, tag or pin, deleted ones too, the latest first.

        Args:
            ref: Its name; the branch that was checked out, else the default branch, if not given.
        Raises:
            NotFoundError: there never was such a ref.
        """
        from cas_ckpt.ops.refs import reflog

        return reflog(self._handle, ref, limit=check_limit(limit))

    def verify(
        self, ref: Revision = "HEAD", *, trust: Trusted, revoked: str | PathLike[str] | None = None,
        history: bool = False,
    ) -> VerifyReport:  # fmt: skip
        """Who signed the commit, and the tag that `ref` is; `ok` says whether somebody who is trusted did.

        It raises nothing for a signature that is not good.

        Args:
            trust: The path of an allowed_signers file as git uses it, or of a public key; a public key as text; a list
                of public keys or lines of such a file; or a `Trust`.
            revoked: A file of keys that count no more: public keys, one a line, or a KRL.
            history: Every commit that it leads to has to be signed as well.
        Raises:
            InvalidInputError: a line of `trust` that is not understood, or ssh-keygen is not installed. StorageError: a
            file cannot be read.
        """
        check_flags(history=history)
        from cas_ckpt.ops.refs import verify_revision
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
        from cas_ckpt.ops.refs import signed_bytes

        return signed_bytes(self._handle, ref)

    def signers(self) -> SignedBranches:
        """The branches that take signed commits only, by pattern, and whose; maybe none."""
        from cas_ckpt.core.signatures import read_signers

        return read_signers(self._handle.store)

    def set_signers(self, branch: str, trust: Trusted) -> SignedBranches:
        """Let branches that match the pattern `branch` take commits only that somebody in `trust` signed; all rules.

        Commits that are there already stay as they are. It keeps those who use cas_ckpt from mistakes; against those
        who can write to the store otherwise, readers have `trust=`.

        Args:
            branch: `main`, `release/*`; `*` matches `/` too. Of several patterns the first that was set counts.
            trust: See `verify`.
        Raises:
            InvalidInputError: no pattern, or no key.
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
