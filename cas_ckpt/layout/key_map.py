r"""Key maps: the tree of a commit under other names, its tensors divided, joined, turned and cast. Nothing is read.

    1. The tree becomes its entries by key: tensors, values, and what is one tensor to people (sparse ones, generators).
    2. Each rule in its turn takes the entries whose keys match its pattern, as the rules before it left them.
    3. The entries become a tree again. A tensor that only has another name is the stored one; any other is a
       `DerivedTensor`, which says where each of its elements is stored.

Rules, as a file of JSON has them and as `KeyMap` takes them; patterns are regular expressions for whole keys, and `to`
may have `\1` for their groups:

    {"rename": PATTERN, "to": KEY}
    {"prefix": TEXT, "to": TEXT}                    keys that begin so begin otherwise
    {"drop": PATTERN}
    {"split": PATTERN, "to": [KEY, ...], "ratios": [1, ...], "dim": 0, "groups": 1}
    {"fuse": [PATTERN, ...], "to": KEY, "dim": 0, "groups": 1}
    {"transpose": PATTERN, "dims": [0, 1]}
    {"interleave": PATTERN, "shape": [N, 2, -1], "dim": 0}
    {"cast": PATTERN, "to": DTYPE}

Invariant: no entry is lost but by `drop`, and no two get one key. Must not know torch, or where bytes are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from cas_ckpt.arguments import check_whole, texts
from cas_ckpt.errors import InvalidInputError, UnsupportedValueError, shown_value
from cas_ckpt.layout.ready_maps import ready_rules
from cas_ckpt.objects.layouts import LayoutObject
from cas_ckpt.objects.spec import DTYPE_BYTES, Spec
from cas_ckpt.objects.state import (
    ORDER,
    RANKS,
    Cast,
    Container,
    DerivedTensor,
    Flavor,
    Item,
    Path,
    StoredTensor,
    Stretch,
    TensorPart,
    in_order,
    parse_key,
    render_key,
)

_OPEN = ("dict", "odict", "list", "tuple", RANKS)
"""Kinds of containers whose entries have keys of their own."""

_FLOATING = re.compile(r"b?float(16|32|64)|float8_.*")


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry while rules are applied.

    Attributes:
        sources: The keys in the commit that it is made of.
        is_taken: A rule took it.
    """

    item: Item
    sources: tuple[str, ...]
    is_taken: bool = False


Entries: TypeAlias = dict[str, Entry]
Rule: TypeAlias = Callable[[Entries], Entries]
"""The entries before it -> the entries after it."""


# --- the parts of derived tensors ------------------------------------------------------------


def within(stretch: Stretch, start: int, step: int, size: int) -> Stretch | None:
    """Of `stretch` what is at the elements start, start + step ... of the derived tensor, counted from there; or None.

    Args:
        size: How many elements there are.
    """
    first = max(0, -((stretch.at - start) // stretch.stride))
    hop = step // math.gcd(step, stretch.stride)
    for number in range(first, min(first + hop, stretch.size)):
        at, rest = divmod(stretch.at + number * stretch.stride - start, step)
        if rest == 0:
            stride = stretch.stride * hop // step
            count = min(-((number - stretch.size) // hop), -((at - size) // stride))
            begin = stretch.start + number * stretch.step
            return Stretch(stretch.dim, begin, stretch.step * hop, at, stride, count) if count > 0 else None
    return None


def _parts(tensor: StoredTensor) -> tuple[TensorPart, ...]:
    if isinstance(tensor, DerivedTensor):
        return tensor.parts
    if not tensor.spec.num_elements:
        return ()
    return (TensorPart(tensor, tuple(Stretch(dim, 0, 1, 0, 1, size) for dim, size in enumerate(tensor.spec.shape))),)


def _moved(tensor: StoredTensor, dim: int, taken: tuple[int, int, int], at: int, stride: int = 1) -> list[TensorPart]:
    """The elements `taken` (start, step, size) along `dim`, put at `at`, `stride` apart."""
    found = []
    for part in _parts(tensor):
        if (kept := within(part.stretches[dim], *taken)) is not None:
            put = replace(kept, at=at + kept.at * stride, stride=kept.stride * stride)
            found.append(TensorPart(part.stored, (*part.stretches[:dim], put, *part.stretches[dim + 1 :])))
    return found


def _derived(like: StoredTensor, shape: Sequence[int], parts: Iterable[TensorPart], dtype: str = "") -> DerivedTensor:
    return DerivedTensor(Spec(dtype or like.spec.dtype, tuple(shape)), like.flavor, None, None, parts=tuple(parts))


def _with_size(tensor: StoredTensor, dim: int, size: int) -> tuple[int, ...]:
    return (*tensor.spec.shape[:dim], size, *tensor.spec.shape[dim + 1 :])


def _tensor(item: Item, key: str, *dims: int) -> StoredTensor:
    """`item`, if it is a tensor that has these dimensions.

    Raises:
        UnsupportedValueError: it has not, or is something else than a dense tensor or an array.
    """
    if not isinstance(item, StoredTensor) or item.flavor == Flavor.VALUE:
        what = f"a {item.kind}" if isinstance(item, Container) else "a plain value"
        raise UnsupportedValueError(f"{key}: the key map changes a tensor, the commit holds {what}: only rename it")
    if any(dim >= len(item.spec.shape) for dim in dims):
        raise UnsupportedValueError(f"{key}: {item.spec} has no dimension {max(dims)}, which the key map names")
    return item


def _share(tensor: StoredTensor, dim: int, count: int, key: str) -> int:
    """The size of each of `count` equal pieces along `dim`."""
    size, rest = divmod(tensor.spec.shape[dim], count)
    if rest:
        raise InvalidInputError(f"{key}: dimension {dim} of {tensor.spec} is not {count} equal parts: see the key map")
    return size


# --- rules -----------------------------------------------------------------------------------


def _text(given: Any) -> str:
    if not isinstance(given, str) or any("\ud800" <= each <= "\udfff" for each in given):
        raise InvalidInputError(f"a key map has {shown_value(given)} for a pattern or a key: give text")
    return given


def _pattern(given: Any) -> re.Pattern[str]:
    try:
        return re.compile(_text(given))
    except re.error as error:
        raise InvalidInputError(f"a key map has the pattern {given!r}, which cannot be read: {error}") from error


def _numbers(name: str, given: Any, count: int, *, least: int = 0) -> list[int]:
    if not isinstance(given, (list, tuple)) or len(given) != count:
        raise InvalidInputError(f"a key map has {name} {shown_value(given)}: give {count} whole numbers")
    return [check_whole(name, each, least=least) for each in given]


def _expanded(match: re.Match[str], to: str) -> str:
    try:
        return match.expand(to)
    except (re.error, IndexError) as error:
        raise InvalidInputError(f"a key map has {to!r} for the pattern {match.re.pattern!r}: {error}") from error


def _put(entries: Entries, key: str, entry: Entry) -> None:
    if key in entries or not key:
        other = f"two entries get the key {key!r}" if key else "an entry gets an empty key"
        raise InvalidInputError(f"by the key map {other} (one is of {', '.join(entry.sources)}): drop one")
    entries[key] = entry


def _each(pattern: Any, change: Callable[[re.Match[str], Item], Iterable[tuple[str, Item]]]) -> Rule:
    """Replaces each entry that matches by what `change` gives."""
    compiled = _pattern(pattern)

    def applied(entries: Entries) -> Entries:
        found: Entries = {}
        for key, entry in entries.items():
            if (match := compiled.fullmatch(key)) is None:
                _put(found, key, entry)
                continue
            for name, item in change(match, entry.item):
                _put(found, name, Entry(item, entry.sources, is_taken=True))
        return found

    return applied


def _rename(pattern: Any, to: Any) -> Rule:
    name = _text(to)
    return _each(pattern, lambda match, item: [(_expanded(match, name), item)])


def _prefix(prefix: Any, to: Any) -> Rule:
    return _rename(f"{re.escape(_text(prefix))}(.*)", _text(to).replace("\\", r"\\") + r"\1")


def _drop(pattern: Any) -> Rule:
    return _each(pattern, lambda match, item: ())


def _split(pattern: Any, to: Any, ratios: Any = None, dim: Any = 0, groups: Any = 1) -> Rule:
    """Each of `groups` equal pieces along `dim` has a share of every new tensor, one after the other."""
    names, dim, groups = texts("to", to), check_whole("dim", dim), check_whole("groups", groups, least=1)
    if not names:
        raise InvalidInputError("a key map splits a tensor into nothing: drop it")
    shares = _numbers("ratios", [1] * len(names) if ratios is None else ratios, len(names), least=1)
    total = sum(shares)

    def change(match: re.Match[str], item: Item) -> Iterator[tuple[str, Item]]:
        tensor = _tensor(item, match[0], dim)
        unit, before = _share(tensor, dim, groups * total, match[0]), 0
        for name, share in zip(names, shares, strict=True):
            size, parts = share * unit, []
            for group in range(groups if unit else 0):  # of no elements there may be any number of groups
                parts += _moved(tensor, dim, (group * total * unit + before, 1, size), group * size)
            yield _expanded(match, name), _derived(tensor, _with_size(tensor, dim, groups * size), parts)
            before += size

    return _each(pattern, change)


def _fuse(patterns: Any, to: Any, dim: Any = 0, groups: Any = 1) -> Rule:
    """As `_split`, the other way."""
    compiled, name = list(map(_pattern, texts("fuse", patterns))), _text(to)
    dim, groups = check_whole("dim", dim), check_whole("groups", groups, least=1)

    def applied(entries: Entries) -> Entries:
        keys_of: dict[str, dict[int, str]] = {}
        made_of: dict[str, str] = {}
        for key in entries:
            for number, pattern in enumerate(compiled):
                if (match := pattern.fullmatch(key)) is not None:
                    made_of[key] = new = _expanded(match, name)
                    if (other := keys_of.setdefault(new, {}).setdefault(number, key)) != key:
                        raise InvalidInputError(f"by the key map {other} and {key} are the same part of {new}")
                    break
        found: Entries = {}
        for key, entry in entries.items():
            if key not in made_of:
                _put(found, key, entry)
            elif keys := keys_of.pop(made_of[key], None):
                lacking = [each.pattern for number, each in enumerate(compiled) if number not in keys]
                if lacking:
                    raise InvalidInputError(
                        f"the key map makes {made_of[key]} of {', '.join(keys.values())} and of what matches "
                        f"{', '.join(lacking)}, which is nothing: choose another map"
                    )
                given = {keys[number]: entries[keys[number]] for number in sorted(keys)}
                sources = tuple(source for each in given.values() for source in each.sources)
                tensors = {key: _tensor(each.item, key, dim) for key, each in given.items()}
                _put(found, made_of[key], Entry(_joined(tensors, dim, groups), sources, is_taken=True))
        return found

    return applied


def _joined(tensors: Mapping[str, StoredTensor], dim: int, groups: int) -> DerivedTensor:
    first, *_ = tensors.values()
    sizes = {key: _share(tensor, dim, groups, key) for key, tensor in tensors.items()}
    for key, tensor in tensors.items():
        if (tensor.spec.dtype, tensor.flavor, _with_size(tensor, dim, 0)) != (
            first.spec.dtype, first.flavor, _with_size(first, dim, 0)
        ):  # fmt: skip
            raise InvalidInputError(f"{key}: {tensor.spec} cannot be joined with {first.spec} along dimension {dim}")
    parts: list[TensorPart] = []
    at = 0
    for group in range(groups if any(sizes.values()) else 0):
        for key, tensor in tensors.items():
            parts += _moved(tensor, dim, (group * sizes[key], 1, sizes[key]), at)
            at += sizes[key]
    return _derived(first, _with_size(first, dim, at), parts)


def _transpose(pattern: Any, dims: Any = (0, 1)) -> Rule:
    one, other = _numbers("dims", dims, 2)

    def change(match: re.Match[str], item: Item) -> Iterator[tuple[str, Item]]:
        tensor = _tensor(item, match[0], one, other)
        order = list(range(len(tensor.spec.shape)))
        order[one], order[other] = other, one
        parts = (TensorPart(part.stored, tuple(part.stretches[at] for at in order)) for part in _parts(tensor))
        yield match[0], _derived(tensor, [tensor.spec.shape[at] for at in order], parts)

    return _each(pattern, change)


def _interleave(pattern: Any, shape: Any, dim: Any = 0) -> Rule:
    """Along `dim`, which is `shape` (three sizes) in one, the last two change places."""
    sizes, dim = _numbers("shape", shape, 3, least=-1), check_whole("dim", dim)
    known = -math.prod(sizes)
    if sizes.count(-1) != 1 or not known:
        raise InvalidInputError(f"a key map has shape {sizes}: give one -1, for the size that follows from the others")

    def change(match: re.Match[str], item: Item) -> Iterator[tuple[str, Item]]:
        tensor = _tensor(item, match[0], dim)
        rest, parts = _share(tensor, dim, known, match[0]), []
        outer, rows, columns = (rest if each == -1 else each for each in sizes)
        for start in range(0, outer * rows * columns, rows * columns or 1):
            if rows <= columns:  # by as few pieces as there can be
                for row in range(rows):
                    parts += _moved(tensor, dim, (start + row * columns, 1, columns), start + row, rows)
            else:
                for column in range(columns):
                    parts += _moved(tensor, dim, (start + column, columns, rows), start + column * rows)
        yield match[0], _derived(tensor, tensor.spec.shape, parts)

    return _each(pattern, change)


def _cast(pattern: Any, to: Any) -> Rule:
    """Dense tensors of floating-point numbers; others stay what they are. Of several casts the last one counts."""
    if _text(to) not in DTYPE_BYTES or not _FLOATING.fullmatch(to):
        raise InvalidInputError(f"a key map casts to {to!r}: give a floating-point dtype, e.g. 'bfloat16'")

    def change(match: re.Match[str], item: Item) -> Iterator[tuple[str, Item]]:
        if isinstance(item, StoredTensor) and item.flavor == Flavor.TORCH and item.spec.dtype != to:
            is_floating = _FLOATING.fullmatch(item.spec.dtype) is not None
            item = _derived(item, item.spec.shape, _parts(item), to) if is_floating else item
        yield match[0], item

    return _each(pattern, change)


_RULES: dict[str, Callable[..., Rule]] = {
    "rename": _rename, "prefix": _prefix, "drop": _drop, "split": _split, "fuse": _fuse, "transpose": _transpose,
    "interleave": _interleave, "cast": _cast,
}  # fmt: skip


def _rule(row: Any) -> Rule:
    kinds = [kind for kind in _RULES if kind in row] if isinstance(row, Mapping) else []
    if len(kinds) != 1:
        raise InvalidInputError(f"a key map has the rule {shown_value(row)}: give one of {', '.join(_RULES)}")
    try:
        return _RULES[kinds[0]](row[kinds[0]], **{name: row[name] for name in row if name != kinds[0]})
    except TypeError as error:
        raise InvalidInputError(f"a {kinds[0]} rule of a key map: {str(error).partition('() ')[2]}") from error


# --- maps ------------------------------------------------------------------------------------


class KeyMap:
    r"""Rules by which `checkout`, `load` and `export` give a commit other names, shapes and dtypes.

        KeyMap([
            {"prefix": "model/module.", "to": "model/"},
            {"fuse": [r"(.*)\.gate\.weight", r"(.*)\.up\.weight"], "to": r"\1.fc1.weight"},
            {"cast": r"model/.*", "to": "bfloat16"},
        ])

    Each rule takes the keys that its pattern, a regular expression, matches as a whole, as the rules before it left
    them. Keys that no rule takes stay as they are, and are reported. Tensors are not read to be mapped: every element
    goes from where it is stored to where it is wanted.

    Attributes:
        rules: As they were given.
    """

    def __init__(self, rules: Iterable[Mapping[str, Any]]) -> None:
        """Check the rules.

        Raises:
            InvalidInputError: a rule of no kind that there is, with other fields, or with a pattern that is none.
        """
        if not isinstance(rules, Iterable):
            raise InvalidInputError(f"a key map has the rules {shown_value(rules)}: give a list of dicts")
        self.rules: tuple[Mapping[str, Any], ...] = tuple(rules)
        self._rules = [_rule(row) for row in self.rules]

    def __repr__(self) -> str:
        return f"KeyMap({list(self.rules)!r})"

    @staticmethod
    def ready(name: str, **numbers: Any) -> KeyMap:
        """A map between the names of two frameworks, e.g. `KeyMap.ready("hf_to_megatron", num_heads=32)`.

        Args:
            name: llama3_hf_to_torchtitan, llama3_torchtitan_to_hf, qwen3_hf_to_torchtitan, qwen3_torchtitan_to_hf, and
                for Llama, Qwen2 and Qwen3: hf_to_megatron, megatron_to_hf.
            numbers: num_heads; num_kv_heads, if it differs; at, the key of both models ("model"). Of hf_to_megatron
                also fused_norms=True: the norms are parts of the linear layers behind them, as with TransformerEngine.
        Raises:
            InvalidInputError: no such map, or it takes other numbers.
        """
        return KeyMap(ready_rules(name, numbers))

    def applied(self, tree: Container, cast: Cast) -> MappedTree:
        """`tree` by this map.

        Args:
            cast: What casts elements that a rule casts.
        Raises:
            InvalidInputError: two entries of one key, a part of a fused tensor that is not there, a dimension that
                cannot be divided so. UnsupportedValueError: a rule changes what is no dense tensor.
        """
        containers: dict[Path, Container] = {}
        leaves = ((render_key(path), item) for path, item in _leaves(tree, (), containers))
        entries = {key: Entry(item, (key,)) for key, item in leaves}
        for rule in self._rules:
            entries = rule(entries)
        for entry in entries.values():
            if isinstance(entry.item, DerivedTensor):
                entry.item.cast = cast
        unmapped = tuple(key for key, entry in entries.items() if not entry.is_taken)
        return MappedTree(_tree_of(entries, containers), unmapped, entries)


@dataclass(frozen=True, slots=True)
class MappedTree:
    """A tree by a key map.

    Attributes:
        unmapped: The keys that no rule took, which are as they were.
        entries: What is in it by key; None: there is no map.
    """

    tree: Container
    unmapped: tuple[str, ...] = ()
    entries: Mapping[str, Entry] | None = None

    def layout(self, layout: LayoutObject) -> LayoutObject:
        """Ties and orders of the commit for the keys of `tree`; who held what is left out.

        Tensors that are made in one way of what was tied are tied. Of modules with other names the versions are lost.
        """
        if self.entries is None:
            return layout
        group_of = {key: number for number, group in enumerate(layout.aliases) for key in group}
        tied: dict[Any, list[str]] = {}
        orders = {}
        for key, entry in self.entries.items():
            first = entry.sources[0]
            if not isinstance(entry.item, StoredTensor):
                continue
            if any(source in group_of for source in entry.sources):
                made_of = tuple(group_of.get(source, source) for source in entry.sources)
                tied.setdefault((made_of, entry.item), []).append(key)
            if first in layout.orders and not isinstance(entry.item, DerivedTensor):
                orders[key] = layout.orders[first]
        aliases = sorted(tuple(sorted(keys)) for keys in tied.values() if len(keys) > 1)
        return LayoutObject(aliases=tuple(aliases), orders=orders, versions=layout.versions)


def _leaves(item: Container, path: Path, containers: dict[Path, Container]) -> Iterator[tuple[Path, Item]]:
    containers[path] = item
    for name in in_order(item):
        child, at = item.children[name], (*path, name)
        if isinstance(child, Container) and child.kind in _OPEN and child.children:
            yield from _leaves(child, at, containers)
        else:
            yield at, child


class _Names(dict[Any, Any]):
    """Entries of a container that is being made."""


def _named_before(entries: Entries) -> dict[Path, Path | None]:
    """Path of a container -> where all that is in it was, under the same names; None: in no one place."""
    found: dict[Path, Path | None] = {}
    for key, entry in entries.items():
        path, old = parse_key(key), parse_key(entry.sources[0])
        for size in range(len(path)):
            rest = len(path) - size
            above = old[:-rest] if len(entry.sources) == 1 and old[-rest:] == path[size:] else None
            if found.setdefault(path[:size], above) != above:
                found[path[:size]] = None
    return found


def _tree_of(entries: Entries, containers: Mapping[Path, Container]) -> Container:
    """The tree of `entries`; a container is of the kind that it had, also under another name."""
    named = {path: path if old is None else old for path, old in _named_before(entries).items()}
    containers = {path: containers[old] for path, old in named.items() if old in containers and path}
    top = _Names()
    for key, entry in entries.items():
        *above, name = parse_key(key)
        place = top
        for each in above:
            place = place.setdefault(each, _Names())
            if type(place) is not _Names:
                raise InvalidInputError(f"by the key map {key} is below another entry: drop one, or rename it")
        if name in place:
            raise InvalidInputError(f"by the key map other entries are below {key}: drop one, or rename it")
        place[name] = entry.item
    return _container(top, (), containers)


def _container(names: _Names, path: Path, containers: Mapping[Path, Container]) -> Container:
    """A list or tuple that has other items than before is a dict by number, as in a load of a part."""
    children = {
        name: _container(child, (*path, name), containers) if type(child) is _Names else child
        for name, child in names.items()
    }  # fmt: skip
    before = containers.get(path)
    if before is None or (before.kind in ("list", "tuple") and before.children.keys() != children.keys()):
        return Container("dict", children)
    attrs = {ORDER: list(children)} if before.kind == "odict" else before.attrs
    return Container(before.kind, children, attrs)
