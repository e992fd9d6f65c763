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

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, Protocol, TypeAlias

from cas_ckpt.arguments import check_whole, texts
from cas_ckpt.errors import InvalidInputError, UnsupportedValueError, shown_value
from cas_ckpt.layout.ready_maps import READY, ready_rules
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


class Rule(Protocol):
    """One step of a map."""

    def applied(self, entries: Entries) -> Entries:
        """The entries after it."""
        ...


# --- the parts of derived tensors ------------------------------------------------------------

Parts: TypeAlias = Iterable[TensorPart]


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


def _moved(parts: Parts, dim: int, taken: tuple[int, int, int], at: int, stride: int = 1) -> Iterator[TensorPart]:
    """The elements `taken` (start, step, size) along `dim`, put at `at`, `stride` apart."""
    for part in parts:
        found = within(part.stretches[dim], *taken)
        if found is not None:
            put = replace(found, at=at + found.at * stride, stride=found.stride * stride)
            yield TensorPart(part.stored, (*part.stretches[:dim], put, *part.stretches[dim + 1 :]))


def _derived(like: StoredTensor, shape: Sequence[int], parts: Parts, dtype: str | None = None) -> DerivedTensor:
    return DerivedTensor(Spec(dtype or like.spec.dtype, tuple(shape)), like.flavor, None, None, parts=tuple(parts))


def _with_size(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _tensor(entry: Entry, key: str, *dims: int) -> StoredTensor:
    """The tensor of an entry, if it has these dimensions.

    Raises:
        UnsupportedValueError: it has not, or is something else than a dense tensor or an array.
    """
    item = entry.item
    if not isinstance(item, StoredTensor) or item.flavor == Flavor.VALUE:
        what = f"a {item.kind}" if isinstance(item, Container) else "a plain value"
        raise UnsupportedValueError(f"{key}: the key map changes a tensor, the commit holds {what}: only rename it")
    if any(dim >= len(item.spec.shape) for dim in dims):
        raise UnsupportedValueError(f"{key}: {item.spec} has no dimension {max(dims)}, which the key map names")
    return item


def _share(size: int, count: int, key: str, dim: int) -> int:
    if count < 1 or size % count:
        raise InvalidInputError(f"{key}: dimension {dim} of {size} is not {count} equal parts, as the key map says")
    return size // count


# --- rules -----------------------------------------------------------------------------------


def _pattern(given: Any) -> re.Pattern[str]:
    if not isinstance(given, str):
        raise InvalidInputError(f"a key map has the pattern {shown_value(given)}: give text")
    try:
        return re.compile(given)
    except re.error as error:
        raise InvalidInputError(f"a key map has the pattern {given!r}, which cannot be read: {error}") from error


def _name(given: Any) -> str:
    if not isinstance(given, str):
        raise InvalidInputError(f"a key map has the key {shown_value(given)}: give text")
    return given


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


def _each(
    entries: Entries, pattern: re.Pattern[str], change: Callable[[re.Match[str], Entry], Iterable[tuple[str, Item]]]
) -> Entries:
    """The entries, those that match replaced by what `change` gives."""
    found: Entries = {}
    for key, entry in entries.items():
        match = pattern.fullmatch(key)
        if match is None:
            _put(found, key, entry)
            continue
        for name, item in change(match, entry):
            _put(found, name, Entry(item, entry.sources, is_taken=True))
    return found


class _Rename:
    def __init__(self, pattern: Any, to: Any) -> None:
        self._pattern, self._to = _pattern(pattern), _name(to)

    def applied(self, entries: Entries) -> Entries:
        return _each(entries, self._pattern, lambda match, entry: [(_expanded(match, self._to), entry.item)])


class _Prefix(_Rename):
    def __init__(self, prefix: Any, to: Any) -> None:
        super().__init__(f"{re.escape(_name(prefix))}(.*)", _name(to).replace("\\", r"\\") + r"\1")


class _Drop:
    def __init__(self, pattern: Any) -> None:
        self._pattern = _pattern(pattern)

    def applied(self, entries: Entries) -> Entries:
        return _each(entries, self._pattern, lambda match, entry: ())


class _Split:
    """Each of `groups` equal pieces along `dim` has a share of every part, one after the other."""

    def __init__(self, pattern: Any, to: Any, ratios: Any = None, dim: Any = 0, groups: Any = 1) -> None:
        self._pattern, self._to = _pattern(pattern), texts("to", to)
        given = [1] * len(self._to) if ratios is None else ratios
        if not isinstance(given, (list, tuple)) or len(given) != len(self._to):
            raise InvalidInputError(f"a key map splits into {len(self._to)}, with ratios {shown_value(ratios)}")
        self._ratios = [check_whole("ratios", each, least=1) for each in given]
        self._dim, self._groups = check_whole("dim", dim), check_whole("groups", groups, least=1)

    def applied(self, entries: Entries) -> Entries:
        return _each(entries, self._pattern, self._pieces)

    def _pieces(self, match: re.Match[str], entry: Entry) -> Iterator[tuple[str, Item]]:
        key, dim = match[0], self._dim
        tensor = _tensor(entry, key, dim)
        shape, total = tensor.spec.shape, sum(self._ratios)
        unit = _share(shape[dim], self._groups * total, key, dim)
        before = 0
        for to, ratio in zip(self._to, self._ratios, strict=True):
            size = ratio * unit
            parts = [
                part
                for group in range(self._groups)
                for part in _moved(_parts(tensor), dim, (group * total * unit + before, 1, size), group * size)
            ]
            yield _expanded(match, to), _derived(tensor, _with_size(shape, dim, self._groups * size), parts)
            before += size


class _Fuse:
    """As `_Split`, the other way."""

    def __init__(self, patterns: Any, to: Any, dim: Any = 0, groups: Any = 1) -> None:
        self._patterns, self._to = [_pattern(each) for each in texts("fuse", patterns)], _name(to)
        self._dim, self._groups = check_whole("dim", dim), check_whole("groups", groups, least=1)

    def applied(self, entries: Entries) -> Entries:
        keys_of: dict[str, dict[int, str]] = {}
        made_of: dict[str, str] = {}
        for key in entries:
            for number, pattern in enumerate(self._patterns):
                if (match := pattern.fullmatch(key)) is not None:
                    made_of[key] = to = _expanded(match, self._to)
                    if keys_of.setdefault(to, {}).setdefault(number, key) != key:
                        raise InvalidInputError(
                            f"by the key map {keys_of[to][number]} and {key} are the same part of {to}"
                        )
                    break
        found: Entries = {}
        for key, entry in entries.items():
            if key not in made_of:
                _put(found, key, entry)
            elif (to := made_of[key]) in keys_of:
                keys = keys_of.pop(to)
                lacking = [each.pattern for at, each in enumerate(self._patterns) if at not in keys]
                if lacking:
                    raise InvalidInputError(
                        f"the key map makes {to} of {', '.join(keys.values())} and of what matches "
                        f"{', '.join(lacking)}, which is nothing: choose another map"
                    )
                given = [(keys[at], entries[keys[at]]) for at in sorted(keys)]
                sources = tuple(source for _, each in given for source in each.sources)
                _put(found, to, Entry(self._fused(given), sources, is_taken=True))
        return found

    def _fused(self, given: Sequence[tuple[str, Entry]]) -> Item:
        dim, tensors = self._dim, [_tensor(entry, key, self._dim) for key, entry in given]
        first = tensors[0]
        for (key, _), tensor in zip(given, tensors, strict=True):
            shape = _with_size(tensor.spec.shape, dim, first.spec.shape[dim])
            if (tensor.spec.dtype, shape, tensor.flavor) != (first.spec.dtype, first.spec.shape, first.flavor):
                raise InvalidInputError(
                    f"{key}: {tensor.spec} cannot be joined with {given[0][0]}, {first.spec}, along dimension {dim}"
                )
        sizes = [
            _share(each.spec.shape[dim], self._groups, key, dim)
            for (key, _), each in zip(given, tensors, strict=True)
        ]  # fmt: skip
        parts: list[TensorPart] = []
        for group in range(self._groups):
            at = group * sum(sizes)
            for tensor, size in zip(tensors, sizes, strict=True):
                parts += _moved(_parts(tensor), dim, (group * size, 1, size), at)
                at += size
        return _derived(first, _with_size(first.spec.shape, dim, self._groups * sum(sizes)), parts)


class _Transpose:
    def __init__(self, pattern: Any, dims: Any = (0, 1)) -> None:
        self._pattern = _pattern(pattern)
        if not isinstance(dims, (list, tuple)) or len(dims) != 2:
            raise InvalidInputError(f"a key map transposes dims {shown_value(dims)}: give two numbers")
        self._dims = [check_whole("dims", each) for each in dims]

    def applied(self, entries: Entries) -> Entries:
        return _each(entries, self._pattern, self._transposed)

    def _transposed(self, match: re.Match[str], entry: Entry) -> Iterator[tuple[str, Item]]:
        tensor = _tensor(entry, match[0], *self._dims)
        order = list(range(len(tensor.spec.shape)))
        one, other = self._dims
        order[one], order[other] = other, one
        parts = [
            TensorPart(part.stored, tuple(part.stretches[at] for at in order)) for part in _parts(tensor)
        ]  # fmt: skip
        yield match[0], _derived(tensor, [tensor.spec.shape[at] for at in order], parts)


class _Interleave:
    """Along `dim`, which is `shape` (three sizes) in one, the last two change places."""

    def __init__(self, pattern: Any, shape: Any, dim: Any = 0) -> None:
        self._pattern, self._dim = _pattern(pattern), check_whole("dim", dim)
        if not isinstance(shape, (list, tuple)) or len(shape) != 3 or list(shape).count(-1) > 1:
            raise InvalidInputError(f"a key map interleaves {shown_value(shape)}: give three sizes, at most one of -1")
        self._shape = [each if each == -1 else check_whole("shape", each, least=1) for each in shape]

    def applied(self, entries: Entries) -> Entries:
        return _each(entries, self._pattern, self._interleaved)

    def _interleaved(self, match: re.Match[str], entry: Entry) -> Iterator[tuple[str, Item]]:
        key, dim = match[0], self._dim
        tensor = _tensor(entry, key, dim)
        known = math.prod(each for each in self._shape if each != -1)
        rest = _share(tensor.spec.shape[dim], known, key, dim)
        if -1 not in self._shape and rest != 1:
            raise InvalidInputError(f"{key}: dimension {dim} of {tensor.spec} is not {self._shape}")
        outer, rows, columns = (rest if each == -1 else each for each in self._shape)
        parts: list[TensorPart] = []
        for start in range(0, outer * rows * columns, rows * columns):
            if rows <= columns:
                for row in range(rows):
                    parts += _moved(_parts(tensor), dim, (start + row * columns, 1, columns), start + row, rows)
            else:
                for column in range(columns):
                    parts += _moved(_parts(tensor), dim, (start + column, columns, rows), start + column * rows)
        yield key, _derived(tensor, tensor.spec.shape, parts)


class _Cast:
    """Dense tensors of floating-point numbers; others stay what they are. Of several casts the last one counts."""

    def __init__(self, pattern: Any, to: Any) -> None:
        self._pattern, self._to = _pattern(pattern), _name(to)
        if self._to not in DTYPE_BYTES or not _FLOATING.fullmatch(self._to):
            raise InvalidInputError(f"a key map casts to {self._to!r}: give a floating-point dtype, e.g. 'bfloat16'")

    def applied(self, entries: Entries) -> Entries:
        def change(match: re.Match[str], entry: Entry) -> Iterator[tuple[str, Item]]:
            item = entry.item
            if isinstance(item, StoredTensor) and item.flavor == Flavor.TORCH and item.spec.dtype != self._to:
                is_floating = _FLOATING.fullmatch(item.spec.dtype) is not None
                item = _derived(item, item.spec.shape, _parts(item), self._to) if is_floating else item
            yield match[0], item

        return _each(entries, self._pattern, change)


_RULES: dict[str, Callable[..., Rule]] = {
    "rename": _Rename, "prefix": _Prefix, "drop": _Drop, "split": _Split, "fuse": _Fuse, "transpose": _Transpose,
    "interleave": _Interleave, "cast": _Cast,
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

    @staticmethod
    def read(text: str) -> KeyMap:
        """The map in a file of JSON, a list of rules; or a ready one: `hf_to_megatron:num_heads=32,num_kv_heads=8`.

        Raises:
            InvalidInputError: neither.
        """
        name, _, given = text.partition(":")
        if name in READY:
            pairs = [each.partition("=") for each in given.split(",") if each]
            return KeyMap.ready(name, **{key: int(value) if value.isdecimal() else value for key, _, value in pairs})
        try:
            rules = json.loads(FilePath(text).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"{text}: no key map can be read ({error}): give a file, or one of {', '.join(READY)}"
            ) from error
        if not isinstance(rules, list):
            raise InvalidInputError(f"{text}: holds no list of rules: write [{{...}}, ...]")
        return KeyMap(rules)

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
            entries = rule.applied(entries)
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
        """Ties, orders and versions of the commit for the keys of `tree`; who held what is left out.

        Tensors that are made in one way of what was tied are tied.
        """
        if self.entries is None:
            return layout
        group_of = {key: number for number, group in enumerate(layout.aliases) for key in group}
        tied: dict[Any, list[str]] = {}
        orders = {}
        versions = {key: dict(of_modules) for key, of_modules in layout.versions.items()}
        for key, entry in self.entries.items():
            first = entry.sources[0]
            if not isinstance(entry.item, StoredTensor):
                continue
            if any(source in group_of for source in entry.sources):
                made_of = tuple(group_of.get(source, source) for source in entry.sources)
                tied.setdefault((made_of, entry.item), []).append(key)
            if first in layout.orders and not isinstance(entry.item, DerivedTensor):
                orders[key] = layout.orders[first]
            if versions:
                (of, module), (new_of, new_module) = map(_module_of, (first, key))
                if (version := layout.versions.get(of, {}).get(module)) is not None:
                    versions.setdefault(new_of, {})[new_module] = version
        aliases = sorted(tuple(sorted(keys)) for keys in tied.values() if len(keys) > 1)
        return LayoutObject(aliases=tuple(aliases), orders=orders, versions=versions)


def _module_of(key: str) -> tuple[str, str]:
    """The key of the state of a module, and the name in it of the module that has the tensor `key`."""
    *above, name = parse_key(key)
    return render_key(tuple(above)), str(name).rpartition(".")[0]


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


def _tree_of(entries: Entries, containers: Mapping[Path, Container]) -> Container:
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
