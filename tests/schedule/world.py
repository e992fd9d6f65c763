"""Small repositories to begin with, and what actors do in them.

A state is told by letters: each is a container with one tensor that is a chunk of its own, so
that states share what their letters share. The message of a commit is its letters.
"""

from __future__ import annotations

import itertools
import random
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import ClassVar, Self
from unittest import mock

import numpy as np

from cas_ckpt import clock, limits
from cas_ckpt.core.config import Config, read_config
from cas_ckpt.core.create import write_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.tree import load_tree, stored_tensors
from cas_ckpt.index.database import IN_MEMORY
from cas_ckpt.index.index import Index
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.spec import raw_dtype
from cas_ckpt.objects.state import Container, TensorCopy
from cas_ckpt.ops.checkout.checkout import fetch_tensors
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.ops.refs import create_branch, delete_branch
from cas_ckpt.parallel.peers import SOLO, Peers
from cas_ckpt.storage.store import Store
from tests import builders
from tests.schedule.plain_index import PlainIndex
from tests.schedule.soundness import LossError, Shelf

START_S = 1_700_000_000.0
"""When the schedules play; the clock goes on by a second each time it is read."""

_NUM_FLOATS = 300  # more than stands inline


@cache
def letters(text: str) -> Container:
    """The state that is called `text`."""
    return builders.state({letter: {"w": builders.numbers(_NUM_FLOATS, seed=ord(letter))} for letter in text})


def commit(
    handle: RepositoryHandle, text: str, branch: str = "main", *, peers: Peers = SOLO,
    other_parents: Sequence[Digest] = (),
) -> str:  # fmt: skip
    """Commit the state `text`; the commit's id."""
    request = CommitRequest(branch=branch, message=text, author="test", other_parents=other_parents)
    with limits(num_threads=1):
        return commit_tree(handle, letters(text), request, peers=peers).id


@cache
def _bytes_of(letter: str) -> bytes:
    return builders.numbers(_NUM_FLOATS, seed=ord(letter)).tobytes()


def read_back(handle: RepositoryHandle, commit_id: Digest) -> None:
    """Check out a commit; raises LossError unless it is the state that its message names, bit for bit."""
    row = commit_of(handle, commit_id)
    copies, found = [], {}
    for path, stored in stored_tensors(load_tree(handle, Digest(row.root))):
        found[path] = np.empty(stored.spec.shape, raw_dtype(stored.spec.item_bytes))
        copies.append(TensorCopy(path, stored, builders.ArrayMemory(found[path])))
    with limits(num_threads=1):
        fetch_tensors(handle, copies)
    wanted = {(letter, "w"): _bytes_of(letter) for letter in row.message}
    if {path: array.tobytes() for path, array in found.items()} != wanted:
        raise LossError(f"commit {commit_id.hex()[:8]} is not {row.message!r} any more")


@dataclass(frozen=True)
class World:
    """A prepared repository: a store, and an index that agrees with it.

    Attributes:
        ids: Name of a commit -> its id, garbage included.
    """

    shelf: Shelf
    config: Config
    index: Index
    plain: PlainIndex
    ids: Mapping[str, str] = field(default_factory=dict)

    def process(self, store: Store, indexes: IndexPool | None = None) -> RepositoryHandle:
        """A process of its own: its index is a copy of the world's, in SQL if there is a pool of such."""
        index = self.plain.copy() if indexes is None else indexes.copy(self)
        return RepositoryHandle(store, self.config, index)  # type: ignore[arg-type]


class IndexPool:
    """Indexes in memory that are used again and again: an engine costs more than what a schedule does with it."""

    _free: ClassVar[list[Index]] = []

    def __init__(self) -> None:
        self._lent: list[Index] = []

    def copy(self, of: World) -> Index:
        """An index that knows what the world's does."""
        index = self._free.pop() if self._free else of.index.detached()
        self._lent.append(index)
        source, target = of.index._database, index._database
        with source.reading() as whole, target.engine.connect() as copy:
            whole.connection.driver_connection.backup(copy.connection.driver_connection)
        index.store_id = index._wanted = of.config.store_id
        return index

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._free.extend(self._lent)


@contextmanager
def fixed_chance(seed: object, *, start_s: float = START_S) -> Iterator[None]:
    """Names, nonces and the time are the same every time."""
    chance = random.Random(f"secrets of {seed}")
    now = itertools.count()
    with (
        mock.patch.object(secrets, "token_bytes", lambda size: chance.randbytes(size)),
        mock.patch.object(secrets, "token_hex", lambda size: chance.randbytes(size).hex()),
        clock.fixed(lambda: start_s + next(now)),
    ):
        yield


def _new_world(make: Callable[[Callable[[], RepositoryHandle]], dict[str, str]]) -> World:
    shelf = Shelf()
    with fixed_chance(make.__name__, start_s=START_S - 86400):
        config = Config("0" * 32)
        write_config(shelf, config)
        index = Index.open(IN_MEMORY, store_id=config.store_id)
        ids = make(lambda: RepositoryHandle(shelf, config, Index.open(IN_MEMORY, store_id=config.store_id)))
        plain = PlainIndex(config.store_id)
        for one in (index, plain):
            RepositoryHandle(shelf, read_config(shelf), one).sync()  # type: ignore[arg-type]
    return World(shelf, config, index, plain, ids)


def _plain(process: Callable[[], RepositoryHandle]) -> dict[str, str]:
    """`main` at a, `old` at b, each in packs of its own."""
    return {"a": commit(process(), "a"), "b": commit(process(), "b", "old")}


def _garbage(process: Callable[[], RepositoryHandle]) -> dict[str, str]:
    """The same, but `old` was deleted: b is garbage."""
    ids = _plain(process)
    delete_branch(process(), "old", force=True)
    return ids


def _double(process: Callable[[], RepositoryHandle]) -> dict[str, str]:
    """b is garbage, and a stands in two packs: one of them holds x, which is garbage, too."""
    first, second = process(), process()
    second.begin_writing()
    ids = {"a": commit(first, "a"), "ax": commit(second, "ax", "dup"), "b": commit(process(), "b", "old")}
    for name in ("dup", "old"):
        delete_branch(process(), name, force=True)
    return ids


def _history(process: Callable[[], RepositoryHandle]) -> dict[str, str]:
    """`main` at bc; a deleted branch whose tip (b) still is whole in packs that main needs, its parent (d) in none."""
    return {
        "d": commit(process(), "d", "old"),
        "b": commit(process(), "b", "old"),
        "c": commit(process(), "c"),
        "bc": commit(process(), "bc"),
        "gone": delete_branch(process(), "old", force=True).hex(),
    }


def _tall(process: Callable[[], RepositoryHandle]) -> dict[str, str]:
    """Three commits on `main`, a branch and a tag beside it, two commits of garbage."""
    ids = {text: commit(process(), text) for text in ("a", "ab", "abc")}
    ids["ad"] = commit(process(), "ad", "side")
    create_branch(process(), "old", start=ids["ab"])
    ids["be"] = commit(process(), "be", "old")
    ids["bef"] = commit(process(), "bef", "old")
    delete_branch(process(), "old", force=True)
    return ids


_MAKERS = {"plain": _plain, "garbage": _garbage, "double": _double, "history": _history, "tall": _tall}


@cache
def world(name: str) -> World:
    """The world of that name; made once, never changed."""
    return _new_world(_MAKERS[name])


@contextmanager
def shared_index(of: World) -> Iterator[Callable[[], Index]]:
    """Opens one file, as processes of one machine do: each call is one more process."""
    folder = Path(tempfile.mkdtemp(prefix="schedule-"))
    place = folder / "index.sqlite"
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)

        def opened() -> Index:
            return stack.enter_context(Index.open(place, store_id=of.config.store_id))

        RepositoryHandle(of.shelf, of.config, opened()).sync()
        yield opened
