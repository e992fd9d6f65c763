"""The log of one branch or tag of a repository on local disk, without what takes long to import.

SQLAlchemy and what rests on it take longer to import than a log of thousands of commits takes to read, and a command
line imports everything anew. So the plain case is answered here; whatever is in the least unusual is None, and then
`Repository.log` is asked, which answers the same.

Invariant: as for every log, heads come from the store, and history from an index that knows all that they lead to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cas_ckpt.core.config import INDEX_PATH, config_record, decode_config
from cas_ckpt.core.forgotten import readable_forgotten
from cas_ckpt.core.push_failures import TIERS_KEY
from cas_ckpt.core.records import CommitInfo, info_from_row
from cas_ckpt.core.ref_store import RefStore
from cas_ckpt.core.refs import BY_NAME, RefKind, reads_as_id
from cas_ckpt.core.trusted_hosts import SETTINGS_KEY
from cas_ckpt.errors import CkptError
from cas_ckpt.index.log_reader import read_log
from cas_ckpt.objects.digest import Digest
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.store import exists

_PREFIXES = {RefKind.TAG: "tag: ", RefKind.PIN: "pin: "}


@dataclass(frozen=True, slots=True)
class QuickLog:
    """The commits, the youngest first, and the refs that name each.

    Attributes:
        names: Id of a commit -> names of its branches, tags ("tag: v1"), pins ("pin: paper") and branches of remotes.
    """

    commits: list[CommitInfo]
    names: dict[str, list[str]] = field(default_factory=dict)


def quick_tags(place: str) -> list[tuple[str, str, str]] | None:
    """Name, id of the commit and message of every tag, by name; None: open the repository and ask it."""
    if "://" in place:
        return None
    store = FileStore(Path(place))
    try:
        decode_config(config_record(store))
        refs = sorted(RefStore(store).list(RefKind.TAG), key=lambda ref: ref.name)
        return [(ref.name, ref.target.hex(), ref.note) for ref in refs if ref.target is not None] or None
    except CkptError:
        return None
    finally:
        store.close()


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
    store = FileStore(Path(place))
    try:
        config = decode_config(config_record(store))
        if exists(store, SETTINGS_KEY) or exists(store, TIERS_KEY):  # an index elsewhere, tiers, remotes
            return None
        names: dict[str, list[str]] = {}
        targets: set[Digest] = set()
        heads: dict[str, Digest] = {}
        for ref in RefStore(store).list():
            if ref.target is None:
                continue
            targets.add(ref.target)
            names.setdefault(ref.target.hex(), []).append(_PREFIXES.get(ref.kind, "") + ref.name)
            if ref.kind is RefKind.BRANCH or (revision is not None and ref.kind in BY_NAME):
                if ref.name == revision in heads:  # of two meanings
                    return None
                heads[ref.name] = ref.target
        head = heads.get(config.default_branch if revision is None else revision)
        if head is None:
            return None
        place_of_index = store.root / INDEX_PATH
        rows = read_log(place_of_index, head, store_id=config.store_id, limit=limit, first_parent=first_parent)
        if rows is None:
            return None
        forgotten = readable_forgotten(store) - targets
        commits = [
            info_from_row(row, forgotten=row.digest in forgotten, restored_us=restored_us) for row, restored_us in rows
        ]
        return QuickLog(commits, names)
    except CkptError:
        return None
    finally:
        store.close()
