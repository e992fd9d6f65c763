"""Types beyond Python's own: those that other rooms register, named tuples and dataclasses, and what stands for them.

    extension types   `register_value_type`: how instances turn into a plain value and back; `Opaque` where
                      the type is not registered
    structures        named tuples and dataclasses: their fields by name; `Named` where nobody registered the class
    enums             `EnumValue` where the class is not imported

Invariant: a class is never looked up by a stored name, except among those that this process
registered; no constructor runs. What is stored is all that an instance holds, or it is refused.
Knows no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from cas_ckpt.errors import CorruptionError, InvalidInputError, UnsupportedValueError
from cas_ckpt.objects.digest import ATOMS

NAMED_TUPLE = "namedtuple"
DATACLASS = "dataclass"
STRUCTURE_KINDS = frozenset({NAMED_TUPLE, DATACLASS})
"""Kinds of a `Named`; also the kinds of the containers that stand for one."""

_NONE_OF_THESE = frozenset({type(None), bool, int, float, complex, str, bytes, dict, list, tuple, set, frozenset})
_KEPT_APART = frozenset({"__dict__", "__weakref__"})


@dataclasses.dataclass(frozen=True, slots=True)
class Opaque:
    """A value of an extension type that is not registered here; encodes to the bytes it came from.

    Attributes:
        tag: Name of the extension type, e.g. "torch.dtype".
        payload: The value that stands for it, as `encode_value` wrote it.
    """

    tag: str
    payload: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class EnumValue:
    """An enum member whose class is not imported here (or lost the member); encodes as the member did."""

    module: str
    qualname: str
    value: Any

    def __hash__(self) -> int:
        # Members are hashable whatever their value is.
        return hash((self.module, self.qualname))


@dataclasses.dataclass(frozen=True, slots=True)
class ValueType:
    """How one extension type turns into a plain value and back."""

    tag: str
    python_type: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_type_by_class: dict[type, ValueType] = {}
_type_by_tag: dict[str, ValueType] = {}


def register_value_type(
    tag: str, python_type: type, *, encode: Callable[[Any], Any], decode: Callable[[Any], Any]
) -> None:
    """Teach this process the extension type `tag`: exact instances of `python_type`.

    Args:
        encode: Gives a plain value for an instance; equal instances give equal values.
        decode: Gives the instance back. Raises ValueError, TypeError, LookupError or
            AttributeError for a malformed value, UnsupportedValueError for one unknown here.

    Raises:
        InvalidInputError: the tag or the type is taken by another registration.
    """
    kind = ValueType(tag, python_type, encode, decode)
    for known in (_type_by_tag.get(tag), _type_by_class.get(python_type)):
        if known is not None and (known.tag, known.python_type) != (tag, python_type):
            raise InvalidInputError(
                f"value type {tag!r} for {python_type.__qualname__}: {known.tag!r} for "
                f"{known.python_type.__qualname__} is registered already; choose another tag"
            )
    _type_by_tag[tag] = _type_by_class[python_type] = kind


def type_of_instance(python_type: type) -> ValueType | None:
    """The registration for exact instances of `python_type`."""
    return _type_by_class.get(python_type)


def type_of_tag(tag: str) -> ValueType | None:
    """The registration of `tag`."""
    return _type_by_tag.get(tag)


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """A named tuple or a dataclass whose class is not registered here; is committed as the instance was.

    Attributes:
        kind: "namedtuple" or "dataclass".
        name: "module:qualified name" of the class, or the name that it was registered under.
        fields: Every field with its value, in the order of the class.
    """

    kind: str
    name: str
    fields: dict[str, Any]

    def __hash__(self) -> int:
        # Instances that were in a set or as a key were hashable, whatever their fields are.
        return hash((self.kind, self.name, tuple(self.fields)))


_name_of: dict[type, str] = {}
_class_of: dict[str, type] = {}


def register_type(python_type: type, *, name: str | None = None) -> type:
    """Give named tuples or dataclasses that commits call `name` back as `python_type`; answers `python_type`.

    Instances are committed under that name from then on. No constructor and no `__post_init__` runs
    when one is made: it gets the fields that it had. May be used as a decorator.

    Args:
        name: "module:qualified name" of the class if None; that of an old class, for one that was moved or renamed.

    Raises:
        InvalidInputError: neither a named tuple nor a dataclass, or the name is taken by another class.
    """
    if not isinstance(python_type, type) or kind_of(python_type) is None:
        raise InvalidInputError(f"{python_type!r:.80} is neither a named tuple nor a dataclass that has fields alone")
    wanted = default_name(python_type) if name is None else name
    known = _class_of.get(wanted)
    if known is not None and known is not python_type and default_name(known) != default_name(python_type):
        raise InvalidInputError(f"{wanted!r} is the name of {known!r}, which is registered: choose another name")
    if known is not None:
        del _name_of[known]  # the same class, defined once more (a cell of a notebook, a reloaded module)
    _class_of.pop(_name_of.pop(python_type, ""), None)
    _name_of[python_type], _class_of[wanted] = wanted, python_type
    return python_type


def default_name(python_type: type) -> str:
    """The name of a class that was registered without one."""
    return f"{python_type.__module__}:{python_type.__qualname__}"


def kind_of(python_type: type) -> str | None:
    """The kind of structure that the class makes, or None."""
    if python_type in (Named, Opaque, EnumValue) or type_of_instance(python_type) is not None:
        return None
    fields = getattr(python_type, "_fields", None)
    if issubclass(python_type, tuple):
        whole = type(fields) is tuple and hasattr(python_type, "_make") and all(type(name) is str for name in fields)
        return NAMED_TUPLE if whole else None
    # Another __new__ belongs to a class that holds more than attributes, e.g. a dict.
    return DATACLASS if dataclasses.is_dataclass(python_type) and python_type.__new__ is object.__new__ else None


def structure_of(value: Any) -> Named | None:
    """The fields of a named tuple or dataclass; None for anything else, and for what holds more than its fields."""
    if type(value) is Named:
        return value
    if type(value) in _NONE_OF_THESE:
        return None
    kind = kind_of(type(value))
    if kind is None or fault_of(value):
        return None
    names = field_names(type(value))
    values = value if kind == NAMED_TUPLE else [getattr(value, name) for name in names]
    return Named(kind, _name_of.get(type(value)) or default_name(type(value)), dict(zip(names, values, strict=True)))


def fault_of(value: Any) -> str:
    """Why an instance cannot be stored by its fields; empty if it can."""
    python_type = type(value)
    kind = kind_of(python_type)
    if kind is None:
        return "a value has no plain form"
    names = field_names(python_type)
    extra = sorted(set(_attributes(value)) - set(names))
    if extra:
        return f"a {kind} holds {', '.join(map(repr, extra[:3]))} besides its fields"
    if kind == NAMED_TUPLE:
        return "" if len(value) == len(names) else "a namedtuple has not as many items as fields"
    unset = [name for name in names if not hasattr(value, name)]
    return f"a dataclass has no value for its field {unset[0]!r}" if unset else ""


def _attributes(value: Any) -> Iterable[str]:
    python_type = type(value)
    for name in getattr(value, "__dict__", ()):
        if not isinstance(inspect.getattr_static(python_type, name, None), functools.cached_property):
            yield name
    if isinstance(value, tuple):
        return
    for base in python_type.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from ({slots} if isinstance(slots, str) else set(slots)) - _KEPT_APART


def field_names(python_type: type) -> tuple[str, ...]:
    """The fields of a class that has a kind, in order."""
    if issubclass(python_type, tuple):
        names: tuple[str, ...] = python_type._fields  # type: ignore[attr-defined]
        return names
    made: Any = python_type
    return tuple(field.name for field in dataclasses.fields(made))


def is_mutable(value: Any) -> bool:
    """Whether the fields of a structure may be set in place."""
    params: Any = getattr(type(value), "__dataclass_params__", None)
    return params is not None and not params.frozen


def made_like(value: Any, fields: Mapping[str, Any]) -> Any:
    """A new instance of the type of `value`, a structure with exactly these fields."""
    if type(value) is Named:
        return Named(value.kind, value.name, {name: fields[name] for name in value.fields})
    return _instance(type(value), fields)


def known_instance(found: Named, *, key: str) -> Any:
    """An instance of the class that is registered under the name of `found`; `found` itself if none is.

    Raises:
        UnsupportedValueError: that class has other fields, or is of the other kind.
    """
    python_type = _class_of.get(found.name)
    if python_type is None:
        return found
    if kind_of(python_type) != found.kind or set(field_names(python_type)) != set(found.fields):
        raise UnsupportedValueError(
            f"{key}: the commit holds a {found.kind} {found.name} with the fields {list(found.fields)}, the class that "
            f"is registered has {list(field_names(python_type))}: give the class these fields, register another one "
            "under that name, or choose keys"
        )
    return _instance(python_type, found.fields)


def _instance(python_type: type, fields: Mapping[str, Any]) -> Any:
    names = field_names(python_type)
    if issubclass(python_type, tuple):
        return tuple.__new__(python_type, [fields[name] for name in names])
    made = object.__new__(python_type)
    for name in names:
        object.__setattr__(made, name, fields[name])
    return made


def checked(kind: str, attrs: Any, names: Collection[Any], *, key: str) -> tuple[str, list[str]]:
    """Name and fields that the attributes of a container of `STRUCTURE_KINDS` give.

    Raises:
        CorruptionError: they do not belong to children of these names.
    """
    name, fields = (attrs.get("name"), attrs.get("fields")) if isinstance(attrs, dict) else (None, None)
    if type(name) is not str or type(fields) is not list or any(type(field) is not str for field in fields):
        raise CorruptionError(f"{key}: a {kind} does not have its name and its fields: restore it from a copy")
    if len(fields) != len(names) or set(fields) != set(names):
        raise CorruptionError(f"{key}: the fields of a {kind} are not those that it lists: restore it from a copy")
    return name, fields


def part_of_fields(attrs: Any, kept: Collection[Any]) -> Any:
    """`attrs` of a container of which only the children `kept` are left."""
    fields = attrs.get("fields") if isinstance(attrs, dict) else None
    return {**attrs, "fields": [name for name in fields if name in kept]} if type(fields) is list else attrs


def retyped(value: Any, types: Mapping[tuple[str, str], type]) -> Any:
    """`value` with every `Named` in its dicts, lists and tuples made an instance of one of `types`, where it fits."""
    if type(value) is Named:
        fields = {name: retyped(part, types) for name, part in value.fields.items()}
        python_type = types.get((value.kind, value.name))
        fits = python_type is not None and set(field_names(python_type)) == set(fields)
        return _instance(python_type, fields) if python_type and fits else Named(value.kind, value.name, fields)
    if type(value) in (list, tuple):
        return type(value)(retyped(part, types) for part in value)
    if isinstance(value, dict) and hasattr(value, "copy"):
        copied = value.copy()
        for name, part in value.items():  # one by one: `update` of a Counter adds
            copied[name] = retyped(part, types)
        return copied
    return value


def types_in(value: Any) -> dict[tuple[str, str], type]:
    """The classes of the structures at and inside `value`, by kind and name."""
    found: dict[tuple[str, str], type] = {}
    todo, seen = [value], {id(value): value}  # held, so that no other object gets their ids
    while todo:
        each = todo.pop()
        own = structure_of(each)
        if own is not None and type(each) is not Named:
            found[own.kind, own.name] = type(each)
        parts = own.fields if own is not None else each
        inside = parts.values() if isinstance(parts, dict) else parts if isinstance(parts, list | tuple) else ()
        for part in inside:
            if type(part) not in ATOMS and id(part) not in seen:
                seen[id(part)] = part
                todo.append(part)
    return found
