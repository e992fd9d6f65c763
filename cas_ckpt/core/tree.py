"""The tree of a commit: containers, stored tensors and their chunks, values; nothing decoded.

    whole trees   `load_tree`, and what is done with one: `select`, `decode_values`, `stored_tensors`
    parts         `find_entry`: one entry by its key; `reachable`: the ids of all that is below

The chunk table: from the cells of tensors to the ids of their chunks, and to where these are stored:

    1. `tensor_nodes`: how each tensor is cut, and its chunk ids or the ids of their pages
    2. `chunk_ids`: the ids of some cells of each, or of all; only the pages that hold them are read
    3. `place_chunks`: the chunks with their places, in the order in which they are stored

Invariant: nodes are read level by level, so that those of a level take few requests. A tensor node is of the spec that
its entry has, and a page has as many ids as it has cells, so that no id is ever taken for that of another cell.

Verbs that list, compare and find need no byte of what is stored, and ask the index:

    known_commit   the commit by its row; known_root: only which state it is of
    ask            a question about states, put to an index that is brought up to date first if it lacks rows

Such an answer is whole, or an error. What is missing in an index that agrees with the store is in no pack, which
is said as it is when nodes are read, or the index is damaged. Nothing is verified against its id here: whoever brings
bytes into memory or into files reads nodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from cas_ckpt.arguments import did_you_mean
from cas_ckpt.core.forgotten import forgotten_view
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import commit_of, node_children
from cas_ckpt.errors import CorruptionError, InternalError, NotFoundError
from cas_ckpt.index import contents, history
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.index.trees import RowsMissingError
from cas_ckpt.memory import check_entries, python_gc_paused
from cas_ckpt.objects.digest import LEAF_BYTES, Digest, ObjectKind, short
from cas_ckpt.objects.nodes import (
    PAGE_CHUNKS,
    ContainerEntry,
    Entry,
    PageEntry,
    TensorEntry,
    TensorNode,
    TreeNode,
    ValueEntry,
    decode_chunk_page,
    decode_tensor,
    decode_tree,
    name_order,
)
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import Grid, grid_for
from cas_ckpt.objects.state import (
    CONTAINER_KINDS,
    Container,
    EncodedValue,
    Flavor,
    Item,
    Name,
    Path,
    StoredTensor,
    ValueItem,
    is_order,
    parse_key,
    render_key,
    render_name,
    walk,
)
from cas_ckpt.objects.structures import STRUCTURE_KINDS, part_of_fields

if TYPE_CHECKING:  # brings numpy, which lists do not need
    from cas_ckpt.transfer.chunk_reader import StoredChunk

MAX_DEPTH = 200


@python_gc_paused()
def load_tree(handle: RepositoryHandle, root: Digest) -> Container:
    """The state below `root`: tensors as `StoredTensor`, values as `EncodedValue`.

    Raises:
        NotFoundError, CorruptionError: a node is missing (says if the commit was forgotten) or damaged.
    """
    from cas_ckpt.objects.values import decode_value  # brings numpy, which a log does not need

    with naming_forgotten(handle, root):
        trees = _read_trees(handle, root)
    top: dict[Any, Item] = {}
    waiting: list[tuple[dict[Any, Item], Any, Digest]] = [(top, "", root)]
    state = Container("dict", top)
    while waiting:
        below: list[tuple[dict[Any, Item], Any, Digest]] = []
        for siblings, name, digest in waiting:
            node, entries = trees[digest]
            children: dict[Any, Item] = {}
            made = Container(node.kind, children, None if node.attrs is None else decode_value(node.attrs))
            siblings[name] = made
            if siblings is top:
                state = made
            for entry in entries:
                if isinstance(entry, TensorEntry):
                    item: Item = StoredTensor(entry.spec, entry.flavor, entry.node, entry.inline, entry.single)
                elif isinstance(entry, ContainerEntry):
                    below.append((children, entry.name, entry.node))
                    item = made  # for the time being: it keeps the order of names
                else:
                    item = EncodedValue(entry.data)
                children[entry.name] = item
            if made.kind == "odict" and not is_order(made.attrs, children):
                raise CorruptionError(f"{name}: the order of an OrderedDict names other entries than it has")
        waiting = below
    return state


def _read_trees(handle: RepositoryHandle, root: Digest) -> dict[Digest, tuple[TreeNode, Sequence[Entry]]]:
    """Every tree below `root`, each read once, with its entries, those in pages included.

    Equal containers are one node: a few of them could stand for more entries than any memory
    holds, so they are counted before anything is made of them.
    """
    found: dict[Digest, tuple[TreeNode, Sequence[Entry]]] = {}
    level = {root: 1}
    total = 0
    for _ in range(MAX_DEPTH):
        if not level:
            return found
        wanted = [digest for digest in level if digest not in found]
        paged: dict[Digest, TreeNode] = {}
        for digest, data in (handle.read_nodes(ObjectKind.TREE, wanted) if wanted else {}).items():
            node = decode_tree(data)
            found[digest] = node, node.entries
            if node.height:
                paged[digest] = node
        if paged:
            found.update(paged_entries(handle, paged))
        below: dict[Digest, int] = {}
        for digest, times in level.items():
            entries = found[digest][1]
            total += times * len(entries)
            for entry in entries:
                if isinstance(entry, ContainerEntry):
                    below[entry.node] = below.get(entry.node, 0) + times
        check_entries(total, f"the tree of {root.hex()} stands")
        level = below
    raise CorruptionError(f"the tree of {root.hex()} is deeper than {MAX_DEPTH} containers: restore it from a copy")


def paged_entries(
    handle: RepositoryHandle, trees: dict[Digest, TreeNode]
) -> dict[Digest, tuple[TreeNode, Sequence[Entry]]]:
    """Trees whose entries are in pages, each with all its entries in order; pages are read level by level.

    Raises:
        NotFoundError, CorruptionError: a page is missing, damaged or in the wrong place.
    """
    gathered: dict[Digest, tuple[TreeNode, Sequence[Entry]]] = {}
    level = {digest: [node] for digest, node in trees.items()}
    while level:
        pages = list(dict.fromkeys(page.node for nodes in level.values() for node in nodes for page in node.pages))
        data = handle.read_nodes(ObjectKind.TREE_PAGE, pages) if pages else {}
        decoded = {digest: decode_tree(page, page=True) for digest, page in data.items()}
        deeper = {}
        for digest, nodes in level.items():
            if any(node.height for node in nodes):
                deeper[digest] = [lower(decoded[page.node], node, page) for node in nodes for page in node.pages]
                continue
            for before, after in pairwise(nodes):  # names ascend from page to page as they do within one
                if name_order(before.entries[-1].name) >= name_order(after.entries[0].name):
                    raise CorruptionError("the pages of a tree are out of order: restore an older commit")
            gathered[digest] = trees[digest], [entry for node in nodes for entry in node.entries]
        level = deeper
    return gathered


def lower(page: TreeNode, above: TreeNode, entry: PageEntry) -> TreeNode:
    """`page`, if it is a page that `entry` of `above` may name.

    Raises:
        CorruptionError: the wrong height, or another first name.
    """
    first = page.entries[0].name if page.entries else page.pages[0].first
    if page.height != above.height - 1 or name_order(first) != name_order(entry.first):
        raise CorruptionError("a page of a tree is in the wrong place: restore an older commit")
    return page


def select(tree: Container, patterns: KeyPatterns, *, into_live: bool = False) -> Container:
    """The part of `tree` whose keys match; containers that hold nothing of it are left out.

    Args:
        into_live: It is matched with a live state: what is left keeps its kind and its numbers.
    Raises:
        NotFoundError: a pattern matches nothing.
    """
    if not patterns:
        return tree
    chosen = _select(tree, (), patterns, into_live=into_live)
    patterns.require_used()
    return chosen or Container(tree.kind, {}, tree.attrs)


def _select(container: Container, path: Path, patterns: KeyPatterns, *, into_live: bool) -> Container | None:
    kept: dict[Any, Item] = {}
    for name, child in container.children.items():
        at = (*path, name)
        if isinstance(child, Container) and child.children and child.kind in CONTAINER_KINDS:
            inner = _select(child, at, patterns, into_live=into_live)
            if inner is not None:
                kept[name] = inner
        elif patterns.matches(render_key(at)):
            kept[name] = child
    if into_live or not kept:
        attrs = part_of_fields(container.attrs, kept) if container.kind in STRUCTURE_KINDS else container.attrs
        return Container(container.kind, kept, attrs) if kept else None
    # A list of which only some items are wanted would shift them: it becomes a dict by number.
    partial = container.kind in ("list", "tuple", *STRUCTURE_KINDS) and len(kept) < len(container.children)
    return Container("dict" if partial else container.kind, kept, container.attrs)


def decode_values(
    tree: Container, *, read_value: Callable[[str, StoredTensor], bytes], allow_pickle: bool = False, prefix: str = ""
) -> Container:
    """`tree` with every value decoded; tensors stay as they are.

    Args:
        read_value: Key and place of a long value -> its encoded bytes.
        prefix: The key of `tree` itself, and "/"; empty for the whole state.
    """
    from cas_ckpt.objects.values import decode_value

    children: dict[Any, Item] = {}
    for name, child in tree.children.items():
        if type(child) is StoredTensor and child.flavor != Flavor.VALUE:
            children[name] = child
        elif isinstance(child, Container):
            below = f"{prefix}{render_name(name)}/"
            children[name] = decode_values(child, read_value=read_value, allow_pickle=allow_pickle, prefix=below)
        elif isinstance(child, EncodedValue):
            key = prefix + render_name(name)
            children[name] = ValueItem(decode_value(child.data, key=key, allow_pickle=allow_pickle))
        elif isinstance(child, StoredTensor) and child.flavor == Flavor.VALUE:
            key = prefix + render_name(name)
            data = child.inline if child.inline is not None else read_value(key, child)
            children[name] = ValueItem(decode_value(data, key=key, allow_pickle=allow_pickle))
        else:
            children[name] = child
    return Container(tree.kind, children, tree.attrs)


def stored_tensors(tree: Container) -> Iterator[tuple[Path, StoredTensor]]:
    """All tensors of a loaded tree (long values too), with their paths."""
    for path, item in walk(tree):
        if isinstance(item, StoredTensor):
            yield path, item


def reachable(
    handle: RepositoryHandle, *roots: Digest, without: Callable[[Sequence[Digest]], Collection[Digest]] = lambda _: ()
) -> set[Digest]:
    """Ids of every node and chunk below these roots, themselves included; each node is read once.

    Args:
        without: Of objects that are in no pack, those that need not be: they are left out.
    Raises:
        NotFoundError: another one is in no pack.
    """
    seen = set(roots)
    level = list(seen)
    while level:
        try:
            located = handle.locate(level, here=True)
        except NotFoundError:
            found = handle.index.read(contents.locate, level)
            excused = set(without([digest for digest in level if not found.get(digest)]))
            level = [digest for digest in level if digest not in excused]
            seen -= excused
            located = handle.locate(level, here=True)
        kinds = {digest: ObjectKind(places[0].kind) for digest, places in located.items()}
        below: dict[Digest, None] = {}
        for kind in set(kinds.values()) - {ObjectKind.CHUNK}:
            nodes = handle.read_nodes(kind, [digest for digest in level if kinds[digest] == kind])
            below.update((child, None) for data in nodes.values() for child in node_children(kind, data))
        level = [digest for digest in below if digest not in seen]
        seen.update(level)
    return seen


def find_entry(handle: RepositoryHandle, root: Digest, key: str) -> Item:
    """The item under `key` of the state `root`, of which only the tree nodes that lead to it are read.

    A container comes with all that is below it.

    Raises:
        NotFoundError: there is no such entry; names the longest part of the key that is there.
        CorruptionError: a node on the way is damaged.
    """
    found = _entry_at(handle, root, key)
    if isinstance(found, TensorEntry):
        return StoredTensor(found.spec, found.flavor, found.node, found.inline, found.single)
    if isinstance(found, ValueEntry):
        return EncodedValue(found.data)
    return load_tree(handle, root if found is None else found.node)


def _entry_at(handle: RepositoryHandle, root: Digest, key: str) -> Entry | None:
    """The entry under `key`; None for the root itself."""
    path = parse_key(key)
    container, entry = root, None
    for depth, name in enumerate(path):
        with naming_forgotten(handle, root):
            entry = next((one for one in _page_for(handle, container, name) if one.name == name), None)
        if isinstance(entry, ContainerEntry):
            container = entry.node
        elif entry is None or depth + 1 < len(path):
            there = render_key(path[: depth if entry is None else depth + 1]) or "the root"
            names = () if entry is not None else _page_for(handle, container, name)
            similar = did_you_mean(key, (render_key((*path[:depth], each.name)) for each in names))
            raise NotFoundError(f"there is no entry {key!r}{similar} ({there} is there): repo.ls(ref) lists the keys")
    return entry


def _page_for(handle: RepositoryHandle, container: Digest, name: Name) -> Sequence[Entry]:
    """The entries of the one page of a container that holds `name`, if any does."""
    node = decode_tree(handle.read_node(ObjectKind.TREE, container))
    order = name_order(name)
    while node.height:
        at = bisect_right(node.pages, order, key=lambda page: name_order(page.first)) - 1
        if at < 0:
            return ()
        data = handle.read_node(ObjectKind.TREE_PAGE, node.pages[at].node)
        node = lower(decode_tree(data, page=True), node, node.pages[at])
    return node.entries


@contextmanager
def naming_forgotten(handle: RepositoryHandle, *roots: Digest) -> Iterator[None]:
    """Reading of the states `roots`: what is missing of a forgotten commit is said to be forgotten.

    Raises:
        NotFoundError: in place of the one raised inside.
    """
    try:
        yield
    except NotFoundError as error:
        forgotten = forgotten_view(handle)
        for root in roots if forgotten else ():
            commits = handle.index.read(history.commits_of_root, root)
            if commits and forgotten.issuperset(commits):
                raise NotFoundError(
                    f"commit {short(commits[0])} was forgotten, and gc has removed its data; only its record is left: "
                    "choose another commit, repo.log() marks the forgotten ones"
                ) from error
        raise


# --- states as the index knows them -------------------------------------------------------------


T = TypeVar("T")


def known_commit(handle: RepositoryHandle, digest: Digest) -> CommitRow:
    """The commit's row, as the index has it.

    Raises:
        NotFoundError: no such commit. CorruptionError: it may be in a pack that is damaged.
    """
    row = handle.index.read(history.read_commit, digest)
    if row is None:
        try:
            # Brings a commit that another process made, or says what is damaged.
            places = handle.locate([digest], here=True)[digest]
        except NotFoundError as error:
            raise NotFoundError(f"there is no commit {short(digest)} here: {error}") from error
        row = handle.index.read(history.read_commit, digest)
        if row is None and places[0].kind == ObjectKind.COMMIT:
            row = commit_of(handle, digest)  # hints told where it is: the index knows nothing of it yet
    if row is None:
        raise NotFoundError(f"{short(digest)} is not a commit: see repo.log()")
    return row


def known_root(handle: RepositoryHandle, digest: Digest) -> Digest:
    """The state of the commit; errors as for `known_commit`."""
    root = handle.index.read(history.read_root, digest)
    return Digest(known_commit(handle, digest).root if root is None else root)


def ask(handle: RepositoryHandle, question: Callable[..., T], *roots: Digest, **how: object) -> T:
    """The answer of the index to a question about the states `roots`, or one of its arguments about many.

    Args:
        question: A function over a connection, the roots, and `how`.
    Raises:
        NotFoundError: a node is in no pack; says so if its commit was forgotten.
        CorruptionError: a pack, or the index, is damaged.
    """
    with naming_forgotten(handle, *roots), python_gc_paused():
        try:
            return handle.index.read(question, *roots, **how)
        except RowsMissingError as error:
            missing = error
        while handle.bring(list(map(Digest, missing.digests))):
            try:
                return handle.index.read(question, *roots, **how)
            except RowsMissingError as error:
                missing = error
        handle.sync()
        while True:
            try:
                return handle.index.read(question, *roots, **how)
            except RowsMissingError as error:
                # Says what is in no pack, or in none that is intact; or brings a level of a tree from a tier.
                before = handle.elsewhere.num_packs
                for digest, places in handle.locate(list(map(Digest, error.digests))).items():
                    if places[0].kind not in (ObjectKind.TREE, ObjectKind.TREE_PAGE):
                        raise CorruptionError(
                            f"{short(digest)} is not a tree, and a tree names it as one of its containers or pages: "
                            "restore an older commit"
                        ) from error
                if handle.elsewhere.num_packs == before:
                    raise


# --- the chunk table ------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def whole_grid(shape: tuple[int, ...]) -> Grid:
    """The grid of a tensor that is one cell (the chunk's own header says how long its leaves are)."""
    return Grid(shape, tuple([size or 1 for size in shape]), LEAF_BYTES)


def tensor_nodes(handle: RepositoryHandle, tensors: Sequence[StoredTensor | TensorEntry]) -> list[TensorNode]:
    """How each tensor is cut into chunks; without chunks for those whose bytes are in their tree node.

    Raises:
        NotFoundError, CorruptionError.
    """
    wanted = dict.fromkeys([tensor.node for tensor in tensors if tensor.node is not None and not tensor.single])
    data = handle.read_nodes(ObjectKind.TENSOR, list(wanted)) if wanted else {}
    nodes = {digest: decode_tensor(node) for digest, node in data.items()}
    found = []
    for tensor in tensors:
        spec = tensor.spec
        if tensor.node is None:
            node = TensorNode(spec, whole_grid(spec.shape), (), ())
        elif tensor.single:
            node = TensorNode(spec, whole_grid(spec.shape), (tensor.node,), ())
        else:
            node = nodes[tensor.node]
            if node.spec != spec:
                raise CorruptionError(
                    f"a tensor node of {node.spec} is stored where one of {spec} should be: restore it from a copy"
                )
        found.append(node)
    return found


def chunk_ids(
    handle: RepositoryHandle, wanted: Sequence[tuple[TensorNode, Collection[int] | None]]
) -> list[Sequence[Digest]]:
    """The ids of the chunks in some cells of each tensor, in the order of the cells; None: in all of them.

    Raises:
        NotFoundError, CorruptionError.
    """
    paged: list[tuple[TensorNode, Iterable[int]]] = []
    for node, cells in wanted:
        if node.pages:
            numbers = range(len(node.pages)) if cells is None else dict.fromkeys(cell // PAGE_CHUNKS for cell in cells)
            paged.append((node, numbers))
    ids_of = page_ids(handle, paged) if paged else {}
    found: list[Sequence[Digest]] = []
    for node, cells in wanted:
        if not node.pages:
            found.append(node.chunks if cells is None else [node.chunks[cell] for cell in cells])
        elif cells is None:
            found.append([digest for page in node.pages for digest in ids_of[page]])
        else:
            found.append([ids_of[node.pages[cell // PAGE_CHUNKS]][cell % PAGE_CHUNKS] for cell in cells])
    return found


def page_ids(
    handle: RepositoryHandle, wanted: Sequence[tuple[TensorNode, Iterable[int]]]
) -> dict[Digest, tuple[Digest, ...]]:
    """The chunk ids in some pages (by number) of some tensors, by the id of the page.

    Raises:
        NotFoundError, CorruptionError: also for a page that is too short or too long, so that ids would shift.
    """
    pages = [(node, number, node.pages[number]) for node, numbers in wanted for number in numbers]
    data = handle.read_nodes(ObjectKind.CHUNK_PAGE, list(dict.fromkeys(page for _, _, page in pages)))
    found = {page: decode_chunk_page(each) for page, each in data.items()}
    for node, number, page in pages:
        expected = min(PAGE_CHUNKS, node.grid.num_cells - number * PAGE_CHUNKS)
        if len(found[page]) != expected:
            raise CorruptionError(
                f"page {number} of a tensor {node.spec} holds {len(found[page])} chunk ids, not {expected}"
            )
    return found


def planned_chunk_ids(
    handle: RepositoryHandle, wanted: Sequence[tuple[StoredTensor, Sequence[int]]]
) -> list[Sequence[Digest]]:
    """As `chunk_ids`, the cells being those of the canonical grid: what plans are made of that read no node.

    Raises:
        NotFoundError, CorruptionError: also for a tensor that was stored on another grid, whose cells
            hold other elements than the plan says.
    """
    nodes = tensor_nodes(handle, [tensor for tensor, _ in wanted])
    for node, (tensor, _) in zip(nodes, wanted, strict=True):
        grid = grid_for(node.spec)
        if tensor.node is None:
            raise InternalError("a tensor whose bytes are in its tree node has no chunks")
        if tensor.single and grid.num_cells != 1:
            raise CorruptionError(f"one chunk is named for {node.spec}, which needs more: restore it from a copy")
        if not tensor.single and node.grid != grid:
            raise CorruptionError(
                f"a tensor node of {node.spec} in cells of {node.grid.cell} is stored where cells of "
                f"{grid.cell} should be: restore it from a copy"
            )
    return chunk_ids(handle, [(node, cells) for node, (_, cells) in zip(nodes, wanted, strict=True)])


def place_chunks(handle: RepositoryHandle, chunks: Iterable[StoredChunk]) -> list[StoredChunk]:
    """The chunks with their places, in the order in which they are stored in the packs.

    Raises:
        NotFoundError: a chunk is stored nowhere; names the tensor. CorruptionError.
    """
    placed = list(chunks)
    digests = [chunk.digest for chunk in placed]
    lost: NotFoundError | None = None
    try:
        located = handle.locate(digests)
    except NotFoundError as error:
        lost, located = error, handle.index.read(contents.locate, digests)
    for chunk in placed:
        chunk.places = located.get(chunk.digest, ())
        if not chunk.places:
            why = f"chunk {chunk.digest.hex()} is in no pack" if lost is None else lost.args[0]
            raise NotFoundError(f"{chunk.key}: {why}") from lost
    placed.sort(key=lambda chunk: (chunk.places[0].pack, chunk.places[0].offset))
    return placed
