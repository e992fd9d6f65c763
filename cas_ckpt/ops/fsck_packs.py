"""fsck of packs: header, trailer and directory of each, and every node in it, verified by id.

Invariant: what a pack says is told as far as anything in it can be believed: where its directory is
lost, its entries are found again by their own headers. One pack at a time in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cas_ckpt.errors import CorruptionError, NotFoundError, PermissionDeniedError, StorageError, UnsupportedVersionError
from cas_ckpt.index.rows import CommitRow, PackRecord
from cas_ckpt.objects import pack
from cas_ckpt.objects.commit import decode_layout
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.kinds import ObjectKind
from cas_ckpt.objects.pack import ExtentInfo, PackKind
from cas_ckpt.pack_index import commit_row, node_children, read_directory
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.scan import BadExtent, ExtentScanner, ScanUnit, find_entries

_WITH_EDGES = (ObjectKind.TREE, ObjectKind.TREE_PAGE, ObjectKind.TENSOR, ObjectKind.CHUNK_PAGE)


@dataclass(slots=True)
class PackFinding:
    """What one pack holds and what is wrong with it.

    Attributes:
        broken: Why its structure (header, trailer, directory) cannot be relied on; None if it can.
        is_listed: Its directory is intact, so that a new index would know its entries.
        entries: What its directory names, or what was found in it without one.
        bad: Entries that are damaged: nodes only.
        edges, commits: What its intact nodes say.
    """

    key: str
    size_bytes: int
    kind: PackKind
    broken: str | None = None
    is_listed: bool = True
    entries: list[ExtentInfo] = field(default_factory=list)
    bad: list[BadExtent] = field(default_factory=list)
    edges: list[tuple[bytes, tuple[bytes, ...]]] = field(default_factory=list)
    commits: list[CommitRow] = field(default_factory=list)

    @property
    def num_nodes(self) -> int:
        """How many of its entries are nodes."""
        return sum(info.kind != ObjectKind.CHUNK for info in self.entries)

    @property
    def record(self) -> PackRecord:
        """The rows that the index should have of it."""
        return PackRecord(self.key, self.kind, self.size_bytes, self.entries, self.edges, self.commits)


def scan_packs(store: Store, packs: Iterable[tuple[str, int]]) -> Iterator[PackFinding]:
    """What each pack holds; packs that are gone meanwhile, or of a newer version, are left out."""
    scanner = ExtentScanner(store)
    held = MemoryStore(url=store.url)
    of_held = ExtentScanner(held)
    for key, size in packs:
        try:
            if size <= pack.TAIL_GUESS_BYTES and _hold(store, key, held):
                yield scan_pack(held, key, size, of_held)
                held.delete(key)
            else:
                yield scan_pack(store, key, size, scanner)
        except (NotFoundError, UnsupportedVersionError):
            held.delete(key)


def _hold(store: Store, key: str, held: MemoryStore) -> bool:
    """Put a small pack into memory by one read, where header, directory and nodes would take one each.

    False if the medium refuses, for parts of it may still be read, or if it is larger than was listed.
    """
    try:
        size, data = store.get_tail(key, pack.TAIL_GUESS_BYTES)
    except (NotFoundError, PermissionDeniedError):
        raise
    except StorageError:
        return False
    if len(data) == size:
        held.put(key, data)
    return len(data) == size


def scan_pack(store: Store, key: str, size: int, scanner: ExtentScanner) -> PackFinding:
    """What the pack `key` of `size` bytes holds.

    Raises:
        NotFoundError: it is gone. UnsupportedVersionError: it is of a newer version.
    """
    finding = PackFinding(key, size, kind_of_key(key))
    try:
        finding.kind, _, finding.entries = read_directory(store, key)
        finding.broken = _header_trouble(store, key, finding.kind)
    except (CorruptionError, StorageError) as error:
        _refuse_denied(error)
        finding.broken, finding.is_listed = str(error), False
        finding.entries = list(find_entries(store, key, size))
    _read_nodes(finding, scanner)
    return finding


def kind_of_key(key: str) -> PackKind:
    """The kind that a pack's key tells."""
    return PackKind.META if key.endswith(f".{PackKind.META.suffix}") else PackKind.DATA


def _refuse_denied(error: Exception) -> None:
    if isinstance(error, PermissionDeniedError):
        raise error


def _header_trouble(store: Store, key: str, kind: PackKind) -> str | None:
    try:
        name, told = pack.decode_header(store.get_range(key, 0, pack.HEADER_BYTES))
    except (CorruptionError, StorageError) as error:
        _refuse_denied(error)
        return f"its header: {error}"
    if name.hex() not in key or told is not kind:
        return f"its header says that it is {name.hex()}.{told.suffix}"
    return None


def _read_nodes(finding: PackFinding, scanner: ExtentScanner) -> None:
    nodes = sorted((info for info in finding.entries if info.kind != ObjectKind.CHUNK), key=lambda info: info.offset)
    malformed: list[BadExtent] = []

    def seen(info: ExtentInfo, data: bytes) -> None:
        try:
            _add_node(finding, info, data)
        except CorruptionError as error:
            malformed.append(BadExtent(finding.key, info, f"{info.kind.label} {info.digest.hex()[:12]}: {error}"))
        except UnsupportedVersionError:
            return

    finding.bad = scanner.check(ScanUnit(finding.key, nodes), seen=seen) + malformed


def _add_node(finding: PackFinding, info: ExtentInfo, data: bytes) -> None:
    if info.kind == ObjectKind.COMMIT:
        finding.commits.append(commit_row(info.digest, data))
    elif info.kind in _WITH_EDGES:
        children: tuple[Digest, ...] = node_children(info.kind, data)
        finding.edges.append((info.digest, children))
    elif info.kind == ObjectKind.LAYOUT:
        decode_layout(data)
