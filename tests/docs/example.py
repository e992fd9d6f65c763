"""The example of docs/format.md: a repository with one small commit, made by today's code, explained field by field.

Everything that is drawn by chance (names, nonces) is 00 01 02 ... here, and the clock is fixed: the bytes are the same
every time.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from unittest import mock
from uuid import uuid4

from cas_ckpt import clock
from cas_ckpt.storage import probe

PROGRAM = """
import torch
from cas_ckpt import CommitOptions, Repository

with Repository.init("memory://example", encoding="raw", group=None) as repo:
    state = {"step": 7, "w": torch.ones(300), "b": torch.tensor([1.0, -2.0])}
    repo.commit(state, step=7, message="first", options=CommitOptions(author="me"))
"""

Line = tuple[bytes, str]
"""Bytes, and what they mean."""


def values() -> dict[str, bytes]:
    """Key of the store -> bytes, of the repository that PROGRAM makes."""
    drawn = SimpleNamespace(token_bytes=secrets.token_bytes, token_hex=secrets.token_hex)
    with (
        mock.patch.object(probe, "secrets", drawn),  # it wants different values
        mock.patch("secrets.token_bytes", lambda size: bytes(range(size))),
        mock.patch("secrets.token_hex", lambda size: bytes(range(size)).hex()),
        clock.fixed(lambda: 1_790_000_000.5),
    ):
        names: dict[str, object] = {}
        program = PROGRAM.replace("    repo.commit", "    store = repo._handle.store\n    repo.commit")
        exec(program.replace("memory://example", f"memory://example-{uuid4()}"), names)
        store = names["store"]
        return {key: bytes(store.get(key)) for key, _ in store.list("")}  # type: ignore[attr-defined]


# ---------------------------------------------------------------- bytes -> lines


def block(lines: Iterable[Line], start: int = 0) -> str:
    """Offset, at most 16 bytes in hexadecimal, meaning."""
    shown = ["```text"]
    for data, meaning in lines:
        shown += [
            f"{start + at:04x}  {data[at : at + 16].hex():<32}  {meaning if at == 0 else ''}".rstrip()
            for at in range(0, len(data), 16)
        ]
        start += len(data)
    return "\n".join([*shown, "```"])


def fields(data: bytes, *layout: tuple[int, str]) -> list[Line]:
    """Fixed fields, each of so many bytes."""
    assert len(data) == sum(size for size, _ in layout), (len(data), layout)
    found, at = [], 0
    for size, meaning in layout:
        part = data[at : at + size]
        found.append((part, meaning.replace("#", str(int.from_bytes(part, "little")))))
        at += size
    return found


RECORD = ("kind: ", "version: ", "key: ", "payload: ")
NODE = ("label: ", "version: ", "payload: ")
TENSOR = ("name: ", "entry: ", "dtype: ", "shape: ", "flavor: ", "id, or the tensor inline: ")
VALUE = ("name: ", "entry: ", "value: ")


def items(data: bytes, labels: tuple[str, ...]) -> list[Line]:
    """Canonical msgpack, an item a line; the key of a map together with its value, if that is one item.

    Args:
        labels: What the items of the outermost array are.
    """
    found, end = _items(data, 0, 0, "", labels)
    assert end == len(data)
    return found


_SIZES = {0xC4: 1, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD9: 1, 0xDA: 2}


def _items(data: bytes, at: int, level: int, name: str, labels: tuple[str, ...] = ()) -> tuple[list[Line], int]:
    """The item at an offset, and where it ends; `name`: what the line says before the item."""
    kind, indent = data[at], "  " * level
    kinds = {0x80: "map", 0x90: "array"}
    if kind & 0xF0 in kinds:
        is_map, count = kind & 0xF0 == 0x80, kind & 0x0F
        word = f"{kinds[kind & 0xF0]} of {count}"
        found, end = [(data[at : at + 1], f"{indent}{name}{word}")], at + 1
        for number in range(count):
            inner, begin, key = labels[number] if labels else "", end, b""
            below: tuple[str, ...] = ()
            if is_map:
                (_, inner), *_ = _items(data, end, 0, "")[0]
                end = _items(data, end, 0, "")[1]
                key, inner = data[begin:end], f"{inner.strip(chr(34))}: "
            if "entries" in name:
                below = TENSOR if data[end] & 0x0F == len(TENSOR) else VALUE
            lines, end = _items(data, end, level + 1, inner, below)
            found += [(key + lines[0][0], lines[0][1]), *lines[1:]]
        return found, end
    size = _SIZES.get(kind, 0)
    head, number = 1 + size, int.from_bytes(data[at + 1 : at + 1 + size], "big")
    if kind < 0x80:
        text, length = str(kind), 0
    elif kind == 0xC0:
        text, length = "nil", 0
    elif kind >= 0xE0:
        text, length = str(kind - 256), 0
    elif kind in (0xCC, 0xCD, 0xCE, 0xCF):
        text, length = str(number), 0
    elif kind == 0xC4:
        text, length = f"{number} byte" + "s" * (number > 1), number
    else:
        length = kind & 0x1F if kind & 0xE0 == 0xA0 else number
        text = f'"{data[at + head : at + head + length].decode()}"'
    end = at + head + length
    return [(data[at:end], f"{indent}{name}{text}")], end


# ---------------------------------------------------------------- records and packs


def record(data: bytes) -> str:
    return block(
        [
            *fields(data[:40], (8, "magic CASCKREC"), (32, "seal: KDF(... record + kind, body)")),
            *items(data[40:], RECORD),
        ]
    )


def pack(data: bytes) -> Iterator[tuple[str, str]]:
    """The parts of a pack: what it is, its block."""
    number = {1: "data", 2: "meta"}
    yield "The header", block(fields(
        data[:64], (8, "magic CASCKPAK"), (2, "version #"), (2, f"kind #: {number[data[10]]} pack"), (4, "zero"),
        (16, "name of the pack"), (24, "zero"), (8, "check: B3(bytes 0 to 55)[:8]"),
    ))  # fmt: skip
    trailer = len(data) - 96
    directory = int.from_bytes(data[trailer + 32 : trailer + 40], "little")
    at, labels = 64, {1: "chunk", 4: "tree", 6: "layout", 7: "commit"}
    while at < directory:
        kind, length = labels[data[at + 4]], int.from_bytes(data[at + 8 : at + 12], "little")
        stored = int.from_bytes(data[at + 24 : at + 32], "little")
        yield (
            f"The {kind}",
            block([*entry_header(data[at : at + length], kind), *payload(data, at + length, stored, kind)], at),
        )
        at += length + stored
    more = (trailer - directory) // 112 - 1
    yield f"The directory, the first of its {more + 1} records" if more else "The directory", block(fields(
        data[directory : directory + 112], (32, "id"), (32, "no base"), (8, "offset of the entry: #"),
        (8, "plain length #"), (8, "stored length #"), (4, "length of the entry's header: #"), (4, "leaf_bytes #"),
        (4, "first leaf #"), (4, "leaves: #"), (2, "kind #"), (2, "encoding #"), (4, "zero"),
    ), directory)  # fmt: skip
    yield "The trailer", block(fields(
        data[trailer:], (8, "magic CASCKEND"), (2, "version #"), (2, "kind #"), (4, "zero"), (16, "name of the pack"),
        (8, "offset of the directory: #"), (8, "entries: #"), (8, "length of the pack: #"), (32, "B3(directory)"),
        (8, "check: B3(the 88 bytes before)[:8]"),
    ), trailer)  # fmt: skip


def entry_header(data: bytes, kind: str) -> list[Line]:
    leaves = (len(data) - 112) // 32
    return fields(
        data, (4, "magic CKE 01"), (2, f"kind #: {kind}"), (2, f"encoding #: {('RAW', 'ZERO', 'CONSTANT')[data[6]]}"),
        (4, "length of this header: #"), (4, "leaf_bytes #"), (8, "plain length #"), (8, "stored length #"),
        (4, "first leaf #"), (4, "leaves: #"), (32, f"id of the {kind}"), (32, "no base"),
        *[(32, f"digest of leaf {number}") for number in range(leaves)], (8, "check: B3(the header before)[:8]"),
    )  # fmt: skip


def payload(data: bytes, at: int, stored: int, kind: str) -> list[Line]:
    body = data[at : at + stored]
    return [(body, "payload: 1.0, repeated to 1,200 bytes")] if kind == "chunk" else items(body, NODE)


def example() -> str:
    """The text of docs/format.md."""
    made = values()
    parts = [f"```python\n{PROGRAM.strip()}\n```", "The values of the repository:"]
    parts.append(
        "\n".join(["| key | bytes |", "| --- | --- |", *(f"| `{key}` | {len(data):,} |" for key, data in made.items())])
    )
    for key in ("config", "refs/heads/main.ref"):
        parts += [f"### `{key}`", record(made[key])]
    for kind, title in (("data", "The data pack"), ("meta", "The meta pack")):
        key = next(key for key in made if key.endswith(f".{kind}"))
        parts += [f"### {title}, `{key}`"]
        for name, shown in pack(made[key]):
            parts += [f"{name}:", shown]
    return "\n\n".join(parts)
