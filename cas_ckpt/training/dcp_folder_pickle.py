"""Pickles read as data: nothing in them is imported, called or built.

What a pickle would import becomes a `Named`, what it would call or construct a `Made`, so that
the reader of a known format finds its fields and a stranger's code finds nobody to run it.

Invariant: the only objects that come out are None, bool, int, float, str, bytes, tuple, list,
dict, `Named` and `Made`; every name among them was allowed. Must not know what they mean.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from cas_ckpt.errors import CkptError, InvalidInputError

PERSISTENT = "persistent"
"""Name of the `Made` that stands for a persistent id; its only argument is the id."""

_ORDERED = "collections.OrderedDict"
_MAX_INT_BYTES = 16
_KEYS = (str, int)
_STOP = ord(".")


@dataclass(frozen=True, slots=True)
class Named:
    """Something that the pickle would import, e.g. `torch.float32`."""

    name: str


@dataclass(slots=True, eq=False)
class Made:
    """Something that the pickle would make: what was called, with what, and the state it was given."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


def read_pickle(data: bytes, *, allowed: Collection[str], what: str) -> Any:
    """What the pickle `data` describes.

    Args:
        allowed: "module.name" of everything that may be imported.
        what: What is being read, for messages.
    Raises:
        InvalidInputError: no pickle of protocol 2 to 5, or it names something that is not allowed.
    """
    try:
        return _Machine(data, allowed, what).run()
    except CkptError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise InvalidInputError(f"{what}: no pickle can be read there ({error}): fetch or write it again") from error


class _Machine:
    """The stack machine of pickle, without the parts that do anything."""

    __slots__ = ("allowed", "at", "data", "marks", "memo", "stack", "what")

    def __init__(self, data: bytes, allowed: Collection[str], what: str) -> None:
        self.data, self.allowed, self.what = data, allowed, what
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, table = self.data, _TABLE
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                return self.stack.pop()
            step = table.get(code)
            if step is None:
                raise ValueError(f"opcode {code:#x} at byte {self.at - 1} is none that state is written with")
            step(self)

    def take(self, length: int) -> bytes:
        """The next `length` bytes."""
        part = self.data[self.at : self.at + length]
        if len(part) < length:
            raise ValueError("it ends early")
        self.at += length
        return part

    def byte(self) -> int:
        """The next byte as a number."""
        self.at += 1
        return self.data[self.at - 1]

    def number(self, length: int) -> int:
        """An unsigned number of so many bytes."""
        return int.from_bytes(self.take(length), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        return self.take(end - self.at + 1)[:-1].decode()

    def above_mark(self) -> list[Any]:
        """What was pushed since the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name that is no text")
        full = f"{module}.{name}"
        if full not in self.allowed:
            raise InvalidInputError(
                f"{self.what}: wants to run {full[:200]!r}. Code in a file is never run: if you trust it, load it "
                "with torch yourself and commit what it gives"
            )
        self.stack.append(Named(full))

    def make(self) -> None:
        args, what = self.stack.pop(), self.stack.pop()
        if not isinstance(what, Named) or type(args) is not tuple:
            raise ValueError("it calls what cannot be called")
        self.stack.append({} if what.name == _ORDERED and not args else Made(what.name, args))

    def build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, Made) or made.state is not None:
            raise ValueError("it gives a state to something that has none")
        made.state = state

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("it sets items of something that is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in _KEYS and not isinstance(key, Made):  # tuples could nest deeper than hash can follow
                raise ValueError(f"a key of type {type(key).__name__}")
            target[key] = value

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("it appends to something that is no list")
        target.extend(items)


Step = Callable[[_Machine], None]


def _push(value: Callable[[_Machine], Any]) -> Step:
    return lambda machine: machine.stack.append(value(machine))


def _mark(machine: _Machine) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []


def _tuple_of(count: int) -> Step:
    def step(machine: _Machine) -> None:
        if len(machine.stack) < count:
            raise ValueError("a tuple of what is not there")
        machine.stack[-count:] = [tuple(machine.stack[-count:])]

    return step


def _tuple(machine: _Machine) -> None:
    items = machine.above_mark()
    machine.stack.append(tuple(items))


def _integer(machine: _Machine) -> int:
    length = machine.number(1)
    if length > _MAX_INT_BYTES:
        raise ValueError(f"an integer of {length} bytes")
    return int.from_bytes(machine.take(length), "little", signed=True)


def _text(width: int) -> Step:
    return _push(lambda machine: machine.take(machine.number(width)).decode("utf-8", "surrogatepass"))


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.name(module, name)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_items([key, value])


_TABLE: dict[int, Step] = {
    ord(code): step
    for code, step in {
        b"\x80": lambda m: m.take(1),  # PROTO; names of all opcodes: pickletools
        b"\x95": lambda m: m.take(8),  # FRAME
        b"N": _push(lambda m: None),
        b"\x88": _push(lambda m: True),
        b"\x89": _push(lambda m: False),
        b"J": _push(lambda m: struct.unpack("<i", m.take(4))[0]),
        b"K": _push(_Machine.byte),
        b"M": _push(lambda m: m.number(2)),
        b"\x8a": _push(_integer),
        b"G": _push(lambda m: struct.unpack(">d", m.take(8))[0]),
        b"\x8c": _text(1),
        b"X": _text(4),
        b"\x8d": _text(8),
        b"C": _push(lambda m: m.take(m.number(1))),
        b"B": _push(lambda m: m.take(m.number(4))),
        b"(": _mark,
        b"0": lambda m: m.stack.pop(),
        b"1": lambda m: m.above_mark(),
        b")": _push(lambda m: ()),
        b"\x85": _tuple_of(1),
        b"\x86": _tuple_of(2),
        b"\x87": _tuple_of(3),
        b"t": _tuple,
        b"]": _push(lambda m: []),
        b"a": lambda m: m.extend([m.stack.pop()]),
        b"e": lambda m: m.extend(m.above_mark()),
        b"}": _push(lambda m: {}),
        b"s": _set_item,
        b"u": lambda m: m.set_items(m.above_mark()),
        b"q": lambda m: m.put(m.byte()),
        b"r": lambda m: m.put(m.number(4)),
        b"\x94": lambda m: m.put(len(m.memo)),
        b"h": _push(lambda m: m.memo[m.byte()]),
        b"j": _push(lambda m: m.memo[m.number(4)]),
        b"c": lambda m: m.name(m.line(), m.line()),
        b"\x93": _stack_global,
        b"R": _Machine.make,
        b"\x81": _Machine.make,  # NEWOBJ
        b"b": _Machine.build,
        b"Q": _push(lambda m: Made(PERSISTENT, (m.stack.pop(),))),
    }.items()
}
