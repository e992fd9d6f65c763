"""Random states as they are stored: containers of tensors and values that need no bytes; their packs; what lists show.

The list is made by walking the state itself, as the program did before the index had rows of entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from hypothesis import strategies as st

from cas_ckpt.core.records import WITH_EDGES, node_content
from cas_ckpt.index.rows import CommitRow, ListedEntry, PackRecord
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import ContainerEntry, Entry, Node, TensorEntry, ValueEntry, name_order, tree_nodes
from cas_ckpt.objects.pack import PackKind
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import Spec
from cas_ckpt.objects.state import (
    CONTAINER_KINDS,
    KIND_OF_FLAVOR,
    Container,
    EncodedValue,
    Flavor,
    Item,
    Name,
    Path,
    StoredTensor,
    render_key,
    walk,
)
from cas_ckpt.objects.values import encode_value
from tests.index.building import digest, extent

HOSTILE = (
    "",
    "~",
    "~=5",
    "a/b",
    "1",
    "-3",
    "x\0y",
    "x\ufffdy",
    "\ud800",
    "é\n'\"%_*?[",
    "ü.weight",
    ";--",
    "\U0001f600",
)
"""Names that are written otherwise than they are, or that no database holds."""

NAMES: st.SearchStrategy[Name] = st.one_of(
    st.sampled_from(["model", "optim", "layers.1", "layers.12.weight", "layers.12.bias", "w", "bias", "0", "state"]),
    st.sampled_from(HOSTILE),
    st.integers(-12, 12),
    st.text(max_size=5),
)
SPECS = st.builds(
    Spec, st.sampled_from(["float32", "bfloat16", "int64"]), st.sampled_from([(4096,), (64, 300), (3, 2, 400)])
)
LONG = "n" * 6_000
"""Names with this in them need pages of two or three, and pages of pages."""


def tensor(name: object, spec: Spec | None = None, flavor: Flavor = Flavor.TORCH) -> StoredTensor:
    """A tensor of one chunk, whose id follows from `name`."""
    return StoredTensor(spec or Spec("float32", (4096,)), flavor, digest("chunk", name), None, single=True)


def inline(data: bytes) -> StoredTensor:
    """A tensor that is stored in the node that lists it."""
    return StoredTensor(Spec("uint8", (len(data),)), Flavor.NUMPY, None, data)


LEAVES: st.SearchStrategy[Item] = st.one_of(
    st.builds(tensor, st.integers(0, 5), SPECS, st.sampled_from([Flavor.TORCH, Flavor.NUMPY])),
    st.builds(tensor, st.integers(0, 5), st.just(Spec("uint8", (2000,))), st.just(Flavor.VALUE)),
    st.binary(max_size=40).map(inline),
    st.builds(
        EncodedValue, st.one_of(st.integers(), st.text(max_size=40)).map(lambda value: encode_value(value, key=""))
    ),
)


@st.composite
def composites(draw: st.DrawFn) -> Container:
    """A tensor in parts, as `training` stores them, or as nobody should."""
    parts: dict[Name, Item] = {
        name: draw(LEAVES) for name in draw(st.sets(st.sampled_from(["values", "indices", "items", "int_repr"])))
    }
    if draw(st.booleans()):
        parts["inner"] = draw(st.builds(Container, st.just("dict"), st.dictionaries(NAMES, LEAVES, max_size=2)))
    kind = draw(st.sampled_from(["sparse_coo", "quantized", "structured"]))
    return Container(kind, parts, draw(st.sampled_from([None, {"shape": (3, 4)}, {"shape": ()}, {"scale": 1.0}])))


def _containers(children: st.SearchStrategy[Item]) -> st.SearchStrategy[Container]:
    dicts = st.builds(Container, st.sampled_from(["dict", "odict"]), st.dictionaries(NAMES, children, max_size=4))
    lists = st.builds(_list, st.lists(children, max_size=4))
    large = st.builds(_large, LEAVES, st.integers(30, 150), st.sampled_from(["", "layers.", LONG]))
    return st.one_of(dicts, dicts, lists, large)


def _list(items: list[Item]) -> Container:
    return Container("list", dict(enumerate(items)))


def _large(item: Item, count: int, begin: str) -> Container:
    """So many entries, some of them numbers, that they need pages."""
    count = min(count, 40) if begin == LONG else count
    children: dict[Name, Item] = {
        f"{begin}{number}.{'bias' if number % 7 == 0 else 'weight'}": item for number in range(count)
    }
    return Container("dict", children | dict.fromkeys(range(count // 10), item))


@cache
def states() -> st.SearchStrategy[Container]:
    """Nested containers, small and large, of all that can be in a state."""
    items = st.recursive(st.one_of(LEAVES, LEAVES, composites()), _containers, max_leaves=8)
    return st.builds(Container, st.just("dict"), st.dictionaries(NAMES, items, max_size=4))


# --- states as packs ----------------------------------------------------------------------------


def nodes_of(state: Container) -> list[Node]:
    """Its nodes, the root last."""
    made: list[Node] = []
    _add_nodes(state, made)
    return made


def _add_nodes(container: Container, made: list[Node]) -> Digest:
    entries = [_entry(name, item, made) for name, item in container.children.items()]
    attrs = None if container.attrs is None else encode_value(container.attrs, key="")
    made += tree_nodes(container.kind, attrs, entries)
    return made[-1].digest


def _entry(name: Name, item: Item, made: list[Node]) -> Entry:
    if isinstance(item, Container):
        return ContainerEntry(name, _add_nodes(item, made))
    if isinstance(item, StoredTensor):
        return TensorEntry(name, item.spec, item.flavor, item.node, item.inline, item.single)
    assert isinstance(item, EncodedValue)
    return ValueEntry(name, item.data)


def pack_of(name: str, nodes: Iterable[Node], commits: Iterable[CommitRow] = ()) -> PackRecord:
    """The meta pack of some nodes and commits."""
    unique = {node.digest: node for node in nodes}
    rows = list(commits)
    contents = [(node.digest, node_content(node.kind, node.data)[1]) for node in unique.values()]
    return PackRecord(
        name,
        PackKind.META,
        10_000,
        [extent(node.digest, node.kind) for node in unique.values()]
        + [extent(row.digest, ObjectKind.COMMIT) for row in rows],
        [(node.digest, node.children) for node in unique.values() if node.kind in WITH_EDGES],
        rows,
        contents=[(digest, content) for digest, content in contents if content is not None],
    )


# --- what lists show of a state -----------------------------------------------------------------


def sorted_state(container: Container) -> Container:
    """The same with everything in the order of names, as a stored tree is read."""
    children = {
        name: sorted_state(child) if isinstance(child, Container) else child
        for name, child in sorted(container.children.items(), key=lambda item: name_order(item[0]))
    }
    return Container(container.kind, children, container.attrs)


def listed(state: Container, patterns: str | list[str] | None = None) -> list[ListedEntry]:
    """What a list of the state shows."""
    keys = KeyPatterns(patterns)
    found: list[ListedEntry] = []
    for path, item in _entries(sorted_state(state), ()):
        key = render_key(path)
        if not keys or keys.matches(key):
            found.append(_shown(key, item))
    return found


def _entries(container: Container, path: Path) -> Iterable[tuple[Path, Item]]:
    for name, child in container.children.items():
        if isinstance(child, Container) and child.children and child.kind in CONTAINER_KINDS:
            yield from _entries(child, (*path, name))
        else:
            yield (*path, name), child


def _shown(key: str, item: Item) -> ListedEntry:
    if isinstance(item, EncodedValue):
        return ListedEntry(key, "value", None, None, len(item.data))
    if isinstance(item, StoredTensor):
        dtype, shape = (None, None) if item.flavor == Flavor.VALUE else (item.spec.dtype, item.spec.shape)
        return ListedEntry(key, KIND_OF_FLAVOR[item.flavor], dtype, shape, item.spec.shown_bytes)
    assert isinstance(item, Container)
    parts = [part for _, part in walk(item) if isinstance(part, StoredTensor)]
    shape = (item.attrs or {}).get("shape")
    items = next((item.children[name] for name in ("values", "int_repr", "items") if name in item.children), None)
    is_tensor = isinstance(items, StoredTensor) and items.flavor != Flavor.VALUE and item.kind not in CONTAINER_KINDS
    dtype = items.spec.dtype if is_tensor else None
    shape = items.spec.shape if shape is None and is_tensor else shape
    return ListedEntry(key, item.kind, dtype, shape, sum(part.spec.shown_bytes for part in parts))


def shown_entries(state: Container) -> list[tuple[ListedEntry, Item]]:
    """What lists show of the state, each with what it is."""
    return [(_shown(render_key(path), item), item) for path, item in _entries(sorted_state(state), ())]


def matched(container: Container, keys: KeyPatterns, path: Path = ()) -> dict[str, object]:
    """Key -> content of what matches: of tensors and values all of it, of containers what holds their entries together.

    A tensor in parts matches as a whole or not at all.
    """
    found: dict[str, object] = {}
    for name, child in container.children.items():
        at = (*path, name)
        is_wanted = keys.matches(render_key(at))
        if not isinstance(child, Container):
            found |= {render_key(at): child} if is_wanted else {}
            continue
        if is_wanted:
            found[render_key(at)] = child.kind, child.attrs
        if is_wanted or child.kind in CONTAINER_KINDS:
            found |= matched(child, keys, at)
    return found
