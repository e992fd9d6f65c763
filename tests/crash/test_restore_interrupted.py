"""A checkout that is interrupted while it verifies has touched nothing; the next one completes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from cas_ckpt import Repository, limits
from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import CkptError, CorruptionError, InvalidInputError, StorageError, TooLargeError
from cas_ckpt.storage.file import FileStore
from tests.effects import CrashNow
from tests.properties.states import bits

SIZES = {"a": 800_000, "b": 2_000_000, "c": 40_000}


@cache
def noise(size: int, seed: int) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed))


def state(fill: int) -> dict[str, Any]:
    """Tensors large and small, a model, a value; all of them tell `fill`."""
    tensors = {name: noise(size, fill).clone() for name, size in SIZES.items()}
    module = torch.nn.Linear(30, 30)
    torch.nn.init.constant_(module.weight, fill)
    torch.nn.init.constant_(module.bias, fill)
    return {**tensors, "model": module, "small": torch.full((3,), fill), "step": fill}


def content(of: dict[str, Any]) -> list[Any]:
    flat = {**of, **(of["model"] if isinstance(of["model"], dict) else of["model"].state_dict())}
    del flat["model"]
    return [(name, bits(value) if isinstance(value, torch.Tensor) else value) for name, value in sorted(flat.items())]


class StoreThatFails(FileStore):
    """A folder whose medium lets `allowed` bulk reads pass; then `failure` is raised for good.

    Attributes:
        copying: A target was about to be filled when it failed.
    """

    def __init__(self, root: Path, allowed: int, failure: Callable[[], BaseException]) -> None:
        super().__init__(root)
        self.allowed, self.failure, self.reads, self.copying = allowed, failure, 0, False

    def _count(self) -> None:
        self.reads += 1
        if self.reads > self.allowed:
            raise self.failure()

    def get_range(self, key: str, offset: int, length: int) -> bytes | memoryview:
        self._count()
        return super().get_range(key, offset, length)

    def read_leaves(self, *asked: Any) -> int:
        self.copying |= asked[-1]
        self._count()
        return super().read_leaves(*asked)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with Repository.init(tmp_path / "repo", encoding="raw") as repo:
        repo.commit(state(1))
    return tmp_path / "repo"


def repository(store: FileStore) -> Repository:
    return Repository(RepositoryHandle.on_store(store, index_url=str(store.root / INDEX_PATH)))


def num_reads(place: Path) -> int:
    store = StoreThatFails(place, 10**9, CrashNow)
    with repository(store) as repo, limits(num_threads=1):
        repo.checkout(into=state(2))
    return store.reads


FAILURES: list[Callable[[], BaseException]] = [
    CrashNow,
    KeyboardInterrupt,
    MemoryError,
    lambda: StorageError("I/O error"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=["death", "ctrl-c", "memory", "medium"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_whatever_ends_the_reading_leaves_the_target_or_makes_it_whole_again(
    place: Path, failure: Callable[[], BaseException], num_threads: int
) -> None:
    verified = 0
    for allowed in range(0, num_reads(place), 1 if failure is CrashNow else 4):
        into = state(2)
        store = StoreThatFails(place, allowed, failure)
        raised = TooLargeError if failure is MemoryError else type(failure())
        with repository(store) as repo, pytest.raises(raised), limits(num_threads=num_threads):
            repo.checkout(into=into)
        if not store.copying:
            verified += 1
            assert content(into) == content(state(2))
        with Repository.open(place) as repo:
            repo.checkout(into=into)
        assert content(into) == content(state(1))
    if failure is CrashNow:  # four of metadata; four large chunks, three of them in two steps; two small ones
        assert verified >= 4 + 4 + 3 + 2


def test_a_failure_names_the_tensor_that_was_being_read(place: Path) -> None:
    with suppress(CkptError), repository(StoreThatFails(place, 10**9, CrashNow)) as repo:
        repo.checkout(into=state(2))
    messages = []
    for allowed in range(num_reads(place)):
        store = StoreThatFails(place, allowed, lambda: StorageError("I/O error"))
        with repository(store) as repo, pytest.raises(StorageError) as raised, limits(num_threads=1):
            repo.checkout(into=state(2))
        messages.append(str(raised.value))
    assert {message.split(":")[0] for message in messages} >= {"a", "b", "c", "model/weight"}


class Impatient:
    """Progress that presses Ctrl-C after so many bytes of a phase."""

    def __init__(self, phase: str, after: int) -> None:
        self.wanted, self.after, self.phase, self.done = phase, after, "", 0

    def start(self, phase: str, total_bytes: int | None) -> None:
        self.phase, self.done = phase, 0

    def advance(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self.phase == self.wanted and self.done > self.after:
            raise KeyboardInterrupt

    def finish(self) -> None:
        """Nothing to tell."""


def test_ctrl_c_while_verifying_leaves_every_tensor(place: Path) -> None:
    into = state(2)
    with Repository.open(place) as repo:
        with pytest.raises(KeyboardInterrupt):
            repo.checkout(into=into, progress=Impatient("verifying", 1_000_000))
        assert content(into) == content(state(2))
        repo.checkout(into=into)
    assert content(into) == content(state(1))


def test_ctrl_c_while_copying_leaves_objects_that_the_next_checkout_completes(place: Path) -> None:
    into = state(2)
    tensors = [value for value in into.values() if isinstance(value, torch.Tensor)]
    with Repository.open(place) as repo:
        with pytest.raises(KeyboardInterrupt):
            repo.checkout(into=into, progress=Impatient("restoring", 1_000_000))
        assert into["step"] == 2
        with pytest.raises(InvalidInputError, match="HEAD is not known since a checkout was broken off"):
            repo.checkout(into=into)
        repo.checkout("main", into=into)
    assert content(into) == content(state(1))
    assert all(any(now is then for now in into.values()) for then in tensors)


def test_ctrl_c_while_hashing_leaves_the_branch_and_no_lock(place: Path) -> None:
    with Repository.open(place) as repo:
        before = repo.log()
        with pytest.raises(KeyboardInterrupt):
            repo.commit(state(3), progress=Impatient("hashing", 1_000_000))
        assert repo.log() == before
        assert repo.commit(state(3), step=3).parents == (before[0].id,)
        assert content(repo.load()) == content(state(3))


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_pack_is_named_by_tensor_and_nothing_is_touched(place: Path, damage: str) -> None:
    path = max((place / "packs").glob("*/*.data"), key=lambda found: found.stat().st_size)
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:-9000] if damage == "cut" else whole[:-9000] + b"\0\1\2" + whole[-8997:])
    into = state(2)
    with Repository.open(place) as repo, pytest.raises(CkptError) as raised:
        repo.checkout(into=into)
    assert damage == "gone" or isinstance(raised.value, CorruptionError)
    assert any(str(raised.value).startswith(f"{name}:") for name in (*SIZES, "model/weight"))
    assert content(into) == content(state(2))
    path.write_bytes(whole)
    with Repository.open(place) as repo:
        repo.checkout(into=into)
    assert content(into) == content(state(1))
