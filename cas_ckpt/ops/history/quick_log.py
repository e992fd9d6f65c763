"""The refs of a repository on local disk, and the log of one branch or tag, without what takes long to import.

SQLAlchemy and what rests on it take longer to import than a log of thousands of commits takes to read, and a command
line imports everything anew. So the plain cases are answered here; whatever is in the least unusual is None, and then
`Repository` is asked, which answers the same. Who only looks at refs imports nothing of commits and of the index.

Invariant: as for every log, heads come from the store, and history from an index that knows all that they lead to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cas_ckpt.core.config import INDEX_PATH, config_record, decode_config
from cas_ckpt.core.ref_store import RefStore
from cas_ckpt.core.refs import BY_NAME, Ref, RefKind, reads_as_id
from cas_ckpt.errors import CkptError
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.store import exists

if TYPE_CHECKING:
    from cas_ckpt.core.records import CommitInfo
    from cas_ckpt.objects.digest import Digest

_PREFIXES = {RefKind.TAG: "tag: ", RefKind.PIN: "pin: "}


@dataclass(frozen=True, slots=True)
class QuickLog:
    """The commits, the youngest first, and the refs that name each.

    Attributes:
        names: Id of a commit -> names of its branches, tags ("tag: v1"), pins ("pin: paper") and branches of remotes.
    """

    commits: list[CommitInfo]
    names: dict[str, list[str]] = field(default_factory=dict)


def quick_refs(place: str) -> tuple[str, list[Ref]] | None:
    """The default branch, and every ref that names a commit, by name; None: open the repository and ask it."""
    if "://" in place:
        return None
    store = FileStore(Path(place))
    try:
        default = decode_config(config_record(store)).default_branch
        refs = [ref for ref in RefStore(store).list() if ref.target is not None]
    except CkptError:
        return None
    finally:
        store.close()
    return default, sorted(refs, key=lambda ref: ref.name)


def quick_resolve(place: str, revision: str | None = None) -> Digest | None:
    """The commit that a branch or tag names, None: the default branch; None: open the repository and ask it."""
    if revision is not None and reads_as_id(revision):
        return None
    found = quick_refs(place)
    return None if found is None else _head(*found, revision)


def _head(default: str, refs: list[Ref], revision: str | None) -> Digest | None:
    """The commit that a name means, of one meaning; None: the default branch."""
    kinds, name = ((RefKind.BRANCH,), default) if revision is None else (BY_NAME, revision)
    found = [ref.target for ref in refs if ref.kind in kinds and ref.name == name]
    return found[0] if len(found) == 1 else None


def quick_log(
    place: str, revision: str | None = None, *, limit: int | None = None, first_parent: bool = False
) -> QuickLog | None:
    """The log of a branch or tag; None: open the repository and ask it, for the answer or for the error.

    Args:
        place: Path of the repository.
        revision: Name of a branch or tag; None: the default branch.
        limit: At most so many commits.
        first_parent: Follow only the first parent of merges.
    """
    if "://" in place or limit == 0 or (revision is not None and reads_as_id(revision)):
        return None
    from cas_ckpt.core.forgotten import read_forgotten_leniently
    from cas_ckpt.core.records import infos_of_log
    from cas_ckpt.core.settings import SETTINGS_KEY, TIERS_KEY
    from cas_ckpt.index import history

    store = FileStore(Path(place))
    try:
        config = decode_config(config_record(store))
        if exists(store, SETTINGS_KEY) or exists(store, TIERS_KEY):  # an index elsewhere, tiers, remotes
            return None
        refs = [ref for ref in RefStore(store).list() if ref.target is not None]
        head = _head(config.default_branch, refs, revision)
        if head is None:
            return None
        names: dict[str, list[str]] = {}
        targets: set[Digest] = set()
        for ref in refs:
            if ref.target is not None:
                targets.add(ref.target)
                names.setdefault(ref.target.hex(), []).append(_PREFIXES.get(ref.kind, "") + ref.name)
        forgotten = read_forgotten_leniently(store) - targets
        with history.plain_index(store.root / INDEX_PATH, store_id=config.store_id) as index:
            rows = history.log(index, [head], limit=limit, first_parent=first_parent, whole=True)
            return QuickLog(list(infos_of_log(index, rows, forgotten)), names)
    except CkptError:
        return None
    finally:
        store.close()
