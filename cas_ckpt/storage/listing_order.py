"""A listing in order of code points, whichever of two orders a service answers in.

S3 promises code points: `ft-b` before `ft/a`. Services that keep objects in folders (SeaweedFS) list folder by folder:
all of `ft/` first, since `ft` is less than `ft-b`. Then what is in a folder is held back until no name that belongs
before it can follow: of packs one folder in 256. What is beside folders is passed on as it comes.

Invariant: each name comes after the one before it in one of the two orders, the same throughout the listing.
Must not know: pages, prefixes of stores, vendors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cas_ckpt.errors import StorageError
from cas_ckpt.storage.bucket import Listed

MOST_HELD_BYTES = 64 << 20
"""What is held back; where it is more, the order is taken for that of code points: a listing may be without end."""

_ITEM_BYTES = 400
"""An object of a listing in memory, besides the characters of its name."""


def by_code_points(listed: Iterable[Listed], prefix: str) -> Iterator[Listed]:
    """`listed`, whose names start with `prefix`, in order of code points.

    Raises:
        StorageError: they are in neither order.
    """
    folders: list[tuple[str, list[Listed]]] = []  # held back, each until a name comes that is past its end
    held_bytes, last = 0, ""
    points = paths = True
    for item in listed:
        place = _in_folders(item.name)
        points = points and item.name > last
        paths = paths and place > _in_folders(last) and held_bytes <= MOST_HELD_BYTES
        if not points and not paths:
            raise StorageError(f"listing {prefix}: {item.name!r:.200} comes after {last!r:.200}: out of order")
        last = item.name
        while folders and (place > folders[-1][0] or not paths):
            yield from sorted(folders.pop()[1], key=_name)
            held_bytes = held_bytes if folders else 0
        folder, slash, _ = item.name[len(prefix) :].partition("/")
        if not slash or not paths:
            yield item
            continue
        end = _in_folders(prefix) + folder + "/"  # "-" and "." come before it, all else that is in names after it
        if not folders or folders[-1][0] != end:
            folders.append((end, []))
        folders[-1][1].append(item)
        held_bytes += _ITEM_BYTES + len(item.name)
    while folders:
        yield from sorted(folders.pop()[1], key=_name)


def _in_folders(name: str) -> str:
    """What orders names folder by folder."""
    return name.replace("/", "\0")


def _name(item: Listed) -> str:
    return item.name
