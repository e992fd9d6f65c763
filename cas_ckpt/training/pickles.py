"""Pickles read as data: nothing in them is imported, called or built.

What a pickle would import becomes a `Named`, what it would call or construct a `Made`, so that
the reader of a known format finds its fields and a stranger's code finds nobody to run it.

Invariant: the only objects that come out are None, bool, int, float, str, bytes, tuple, list,
dict, OrderedDict, `Named` and `Made`; every name among them was allowed. Must not know what they mean.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from cas_ckpt.errors import CkptError, InvalidInputError

PERSISTENT = "persistent"
"""Name of the `Made` of a persistent id; its only argument is the id."""

_ORDERED = "collections.OrderedDict"
_SET = "builtins.set"
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


def check_calls(data: Any, *, max_bytes: int, num_pickles: int = 1, what: str) -> None:
    """See that what the pickles at the start of `data` would call makes no more than `max_bytes` of memory.

    A few bytes of pickle can ask for any length (`bytearray(1 << 30)`), or for thousands of copies of one long
    text. Whoever really loads the pickle decides which names may be called at all.

    Args:
        data: Bytes, or a mapped file.
        num_pickles: How many pickles follow one another.
    Raises:
        InvalidInputError: no pickle that torch writes, or one that asks for more.
    """
    at, left = 0, max_bytes
    for _ in range(num_pickles):
        if at >= len(data):
            return  # too few of them: the loader says so
        counter = _Counter(data, what, left)
        counter.at = at
        try:
            counter.run()
        except _UnknownOpcode:
            return  # nobody loads what follows
        except (IndexError, KeyError, TypeError, ValueError, struct.error, RecursionError) as error:
            raise InvalidInputError(f"{what}: torch has written no such pickle ({error}): fetch it again") from error
        at, left = counter.at, counter.left


class _UnknownOpcode(ValueError):
    """One that no state is written with; torch's loader stops there too."""


class _Machine:
    """The stack machine of pickle, without the parts that do anything.

    Args:
        allowed: See `read_pickle`; None: everything.
    """

    __slots__ = ("allowed", "at", "data", "marks", "memo", "stack", "what")
    max_int_bytes = 16

    def __init__(self, data: Any, allowed: Collection[str] | None, what: str) -> None:
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
                raise _UnknownOpcode(f"opcode {code:#x} at byte {self.at - 1} is none that state is written with")
            step(self)

    def take(self, length: int) -> bytes:
        """The next `length` bytes."""
        part: bytes = self.data[self.at : self.at + length]
        if len(part) < length:
            raise ValueError("it ends early")
        self.at += length
        return part

    def byte(self) -> int:
        """The next byte as a number."""
        self.at += 1
        value: int = self.data[self.at - 1]
        return value

    def number(self, length: int) -> int:
        """An unsigned number of so many bytes."""
        return int.from_bytes(self.take(length), "little")

    def line(self) -> str:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise ValueError("it ends early")
        return self.take(end - self.at + 1)[:-1].decode()

    def above_mark(self) -> list[Any]:
        """What was pushed since the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name that is not text")
        full = f"{module}.{name}"
        if self.allowed is not None and full not in self.allowed:
            raise InvalidInputError(
                f"{self.what}: wants to run {full[:200]!r}. Code in a file is never run: if you trust it, load it "
                "with torch yourself and commit what it gives"
            )
        self.stack.append(Named(full))

    def make(self) -> None:
        args, what = self.stack.pop(), self.stack.pop()
        if not isinstance(what, Named) or type(args) is not tuple:
            raise ValueError("it calls what cannot be called")
        self.stack.append(OrderedDict() if what.name == _ORDERED and not args else Made(what.name, args))

    def build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, OrderedDict) and type(state) is dict and all(type(name) is str for name in state):
            vars(made).update(state)  # as `Module.state_dict()` has its `_metadata`
            return
        if not isinstance(made, Made) or made.state is not None:
            raise ValueError("it gives a state to something that has none")
        made.state = state

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("it sets items of something that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in _KEYS and not isinstance(key, Made):  # tuples could nest deeper than hash can follow
                raise ValueError(f"a key of type {type(key).__name__}")
            target[key] = value

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("it appends to something that is not a list")
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
    if length > machine.max_int_bytes:
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
        b"U": _push(lambda m: m.take(m.number(1))),  # SHORT_BINSTRING
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
        b"\x8f": _push(lambda m: Made(_SET, ())),
        b"s": _set_item,
        b"u": lambda m: m.set_items(m.above_mark()),
        b"q": lambda m: m.put(m.byte()),
        b"r": lambda m: m.put(m.number(4)),
        b"\x94": lambda m: m.put(len(m.memo)),
        b"h": _push(lambda m: m.memo[m.byte()]),
        b"j": _push(lambda m: m.memo[m.number(4)]),
        b"c": lambda m: m.name(m.line(), m.line()),
        b"\x93": _stack_global,
        b"R": lambda m: m.make(),
        b"\x81": lambda m: m.make(),  # NEWOBJ
        b"b": lambda m: m.build(),
        b"Q": _push(lambda m: Made(PERSISTENT, (m.stack.pop(),))),
    }.items()
}


_COPIES = ("_codecs.encode", "builtins.", "collections.", "torch.Size")
"""Beginnings of the names that copy their arguments; what torch rebuilds shares memory with a storage."""

_CONVERTS = ("torch._utils._rebuild_device_tensor",)
"""Beginnings of the names that copy a tensor, however little memory it has, into as much as its shape says."""

_SIZED = ("bytearray", "Tensor", "Storage")
"""Ends of the names that take a length for an argument and make so much memory."""


class _Counter(_Machine):
    """Counts what calls would make, without keeping the content of dicts and objects."""

    __slots__ = ("left",)
    max_int_bytes = 255

    def __init__(self, data: Any, what: str, left: int) -> None:
        super().__init__(data, None, what)
        self.left = left

    def make(self) -> None:
        """See that the call is one that saved state needs, and count it."""
        args, called = self.stack[-1], self.stack[-2]
        name, given = (called.name, args) if isinstance(called, Named) and type(args) is tuple else ("", ())
        if name.endswith(_SIZED) and any(map(_is_length, given)):
            raise InvalidInputError(
                f"{self.what}: calls {name[:80]} with a length instead of content, which saved state never does: "
                "a bomb, fetch the file from somewhere else"
            )
        num_bytes = _made_bytes(name, given)
        self._count(num_bytes)
        super().make()
        if isinstance(self.stack[-1], Made):
            self.stack[-1].state = num_bytes

    def _count(self, num_bytes: int) -> None:
        self.left -= num_bytes
        if self.left < 0:
            raise InvalidInputError(f"{self.what}: a pickle that copies its own content without end: a bomb")

    def build(self) -> None:
        """States are counted where they are made."""
        self.stack.pop()

    def extend(self, items: list[Any]) -> None:
        """What is not a list (a deque) is refused by whoever loads it."""
        if type(self.stack[-1]) is list:
            super().extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Keys do not matter, only how many there are."""
        target = self.stack[-1]
        if isinstance(target, dict):
            target.update(enumerate(items, len(target)))


def _is_length(value: Any) -> bool:
    if type(value) in (tuple, list):
        return any(type(each) is int for each in value)
    return type(value) is int or (isinstance(value, Made) and value.name == "torch.Size")


def _made_bytes(name: str, args: Sequence[Any]) -> int:
    """Bytes that a call makes, about."""
    if name.startswith(_COPIES):
        return sum(map(_size, args))
    if name.startswith(_CONVERTS) and args and isinstance(args[0], Made) and len(args[0].args) > 2:
        shape = args[0].args[2]  # of torch's _rebuild_tensor: storage, offset, size, stride ...
        return 16 * math.prod(each for each in shape if type(each) is int) if type(shape) is tuple else _size(shape)
    return 0


def _size(value: Any) -> int:
    """Bytes of a copy of `value`, about."""
    if isinstance(value, Made):
        return value.state or 0
    if isinstance(value, (str, bytes)):
        return len(value)
    return 64 * len(value) if isinstance(value, (tuple, list, dict)) else 8
