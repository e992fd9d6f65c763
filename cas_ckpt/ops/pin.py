"""pin: a commit that is to stay, whatever is forgotten.

Invariant: pins have names of their own, beside those of branches and tags; as a revision a pin
is written `refs/pins/NAME`.
"""

from __future__ import annotations

from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.ops.branch import delete_ref
from cas_ckpt.ops.names import PinInfo
from cas_ckpt.ops.publish import publish_ref
from cas_ckpt.ops.resolve import Revision, likely_refs, resolve, revision_text
from cas_ckpt.refs import RefKind, check_note, default_author, new_move
from cas_ckpt.repository import RepositoryHandle


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
    return delete_ref(handle, RefKind.PIN, name.removeprefix(RefKind.PIN.value))
