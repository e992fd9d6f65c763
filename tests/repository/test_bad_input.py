"""Bad input through the face: one clear typed error that names its subject, and nothing changed."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.errors import (
    CkptError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    MismatchError,
    NoRepositoryError,
    NotFoundError,
    UnsupportedValueError,
    UnsupportedVersionError,
)
from cas_ckpt.objects.digest import seal
from tests.properties.states import account, copied, mapped
from tests.searches import tries

Call = Callable[[Repository], Any]


def state(fill: float) -> dict[str, Any]:
    noise = torch.rand(50_000, generator=torch.Generator().manual_seed(round(fill * 10)))
    return {
        "w": noise,
        "b": torch.full((3,), fill),
        "nested": {"n": np.arange(500) + fill, "list": [1, 2]},
        "step": fill,
    }


class Odd:
    """An object that has no form."""


def endless() -> dict[str, Any]:
    loop: dict[str, Any] = {"in": {}}
    loop["in"]["out"] = loop
    return loop


def deep() -> Any:
    found: Any = torch.ones(1)
    for _ in range(5000):
        found = {"d": found}
    return found


def missing(into: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in into.items() if name not in names}


def changed(**changes: Any) -> Call:
    return lambda repo: repo.checkout(into=state(9) | changes)


CALLS: list[tuple[type[CkptError], str, Call]] = [
    # unknown and ambiguous revisions, keys and regions
    (NotFoundError, "nowhere", lambda repo: repo.load("nowhere")),
    (NotFoundError, "0123456789abcdef", lambda repo: repo.checkout("0123456789abcdef", into=state(9))),
    (NotFoundError, "main~7", lambda repo: repo.load("main~7")),
    (NotFoundError, "nested/none", lambda repo: repo.read("main", "nested/none")),
    (NotFoundError, "nothing", lambda repo: repo.load("main", keys="nothing/**")),
    (InvalidInputError, "w", lambda repo: repo.read("main", "w", 50_000)),
    (InvalidInputError, "w", lambda repo: repo.read("main", "w", -50_001)),
    (InvalidInputError, "main~x", lambda repo: repo.resolve("main~x")),
    # names
    *((InvalidInputError, "name", lambda repo, name=name: repo.branch(name)) for name in (
        "", "../up", "a//b", "/a", "a/", ".hidden", "a/../b", "new\nline", "nul\0", "es\x1bc", "ü", "a b",
        "abcdef01" * 8, "n" * 201,
        "a.lock", "a.ref", "a..b", "a.", "-option", "refs\\heads",
    )),
    *((InvalidInputError, "name", lambda repo, name=name: repo.tag(name)) for name in ("../../config", "x" * 10_000)),
    *((InvalidInputError, "name", lambda repo, name=name: repo.commit({}, branch=name)) for name in ("..", "a\0b", "")),
    (InvalidInputError, "name.*aaa|key.*aaa|aaa.*name", lambda repo: repo.commit({"a" * 5000: 1})),
    (InvalidInputError, "name", lambda repo: repo.commit({"a\0b": 1})),
    # a target that does not fit
    (MismatchError, "w.*float32.*float64|w.*float64.*float32", changed(w=torch.zeros(50_000, dtype=torch.float64))),
    (MismatchError, "w.*float16", changed(w=torch.zeros(50_000, dtype=torch.float16))),
    (MismatchError, "b", changed(b=torch.zeros(4))),
    (MismatchError, "b", changed(b=torch.zeros(1, 3))),
    (MismatchError, "nested/n", changed(nested={"n": np.zeros(500, np.float32), "list": [1, 2]})),
    (MismatchError, "more", changed(more=torch.zeros(1))),
    (MismatchError, "w", lambda repo: repo.checkout(into=missing(state(9), "w"))),
    (MismatchError, "(?s)b.*step", lambda repo: repo.checkout(into=missing(state(9), "b", "step") | {"x": 1})),
    (MismatchError, "w.*dtype", lambda repo: repo.checkout(into={"w": torch.zeros(50_000).half()}, strict=False)),
    (MismatchError, "w", changed(w=torch.zeros(1).expand(50_000))),
    (UnsupportedValueError, "w.*meta", changed(w=torch.zeros(50_000, device="meta"))),
    # what cannot be expressed
    (UnsupportedValueError, "a/odd.*Odd", lambda repo: repo.commit({"a": {"odd": Odd()}})),
    (UnsupportedValueError, "a/f.*function", lambda repo: repo.commit({"a": {"f": deep}})),
    (UnsupportedValueError, "m.*meta", lambda repo: repo.commit({"m": torch.empty(3, device="meta")})),
    (UnsupportedValueError, "o.*object", lambda repo: repo.commit({"o": np.array([Odd()])})),
    (UnsupportedValueError, "itself", lambda repo: repo.commit(endless())),
    (UnsupportedValueError, "deeper", lambda repo: repo.commit({"d": deep()})),
    (UnsupportedValueError, "tuple|key", lambda repo: repo.commit({"t": {(1, 2): torch.ones(1)}})),
    (InvalidInputError, "list", lambda repo: repo.commit([1, 2])),  # type: ignore[arg-type]
    (InvalidInputError, "loss", lambda repo: repo.commit({}, metrics={"acc": 1.0, "loss": "nan"})),
    (InvalidInputError, "step", lambda repo: repo.commit({}, step=-1)),
    (InvalidInputError, "on_conflict", lambda repo: repo.commit({}, options=CommitOptions(on_conflict="perhaps"))),
    (InvalidInputError, "message", lambda repo: repo.commit({}, message="m" * 100_000)),
    (UnsupportedValueError, "meta", lambda repo: repo.commit({}, meta=Odd())),
    # what is taken
    (ConflictError, "side", lambda repo: repo.branch("side")),
    (ConflictError, "v1", lambda repo: repo.commit({}, branch="v1")),
    (InvalidInputError, "main", lambda repo: repo.delete_branch("main")),
]  # fmt: skip


def snapshot(path: Path) -> dict[str, bytes]:
    """Every file of the truth: all but the derived index and temporaries."""
    files = (file for file in path.rglob("*") if file.is_file())
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in files
        if file.relative_to(path).parts[0] not in ("index", "tmp")
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad") / "repo"
    with Repository.init(path) as repo:
        repo.commit(state(1))
        repo.commit(state(2))
        repo.branch("side")
        repo.tag("v1")
    return path


@pytest.mark.parametrize(
    ("kind", "names", "call"), CALLS, ids=[f"{number}-{case[1][:20]!r}" for number, case in enumerate(CALLS)]
)
def test_a_bad_call_is_one_typed_error_that_names_its_subject_and_changes_nothing(
    place: Path, kind: type[CkptError], names: str, call: Call
) -> None:
    before = snapshot(place)
    with Repository.open(place) as repo:
        with pytest.raises(kind, match=names) as raised:
            call(repo)
        assert len(str(raised.value)) < 1000
        assert str(raised.value).replace("\n", "").isprintable()
        refs = {"refs/heads/main.ref", "refs/heads/side.ref", "refs/tags/v1.ref"}
        after = snapshot(place)
        assert {name for name in after if name.startswith("refs/")} == refs
        assert {name: after[name] for name in before} == before
        assert account(repo.load()) == account(state(2))


class Untouchable:
    """A target that tells whether anything of it was changed."""

    def __init__(self, **changes: Any) -> None:
        self.state = state(9) | changes
        self.copy = mapped(self.state, copied)

    @property
    def is_untouched(self) -> bool:
        return bool(account(self.state) == account(self.copy))


@pytest.mark.parametrize("name", ["w", "b", "nested", "step"])
@pytest.mark.parametrize("strict", [True, False])
def test_one_thing_that_does_not_fit_leaves_everything_else_untouched(place: Path, name: str, strict: bool) -> None:
    wrong = {"w": torch.zeros(50_000).double(), "b": torch.zeros(2), "nested": torch.zeros(2), "step": torch.zeros(2)}
    target = Untouchable(**{name: wrong[name]})
    with Repository.open(place) as repo, pytest.raises(MismatchError, match=name):
        repo.checkout(into=target.state, strict=strict)
    assert target.is_untouched


def test_without_strict_what_is_on_one_side_only_is_left_and_reported(place: Path) -> None:
    mine = torch.full((2,), 5.0)
    into = missing(state(9), "b") | {"mine": mine}
    with Repository.open(place) as repo:
        report = repo.checkout(into=into, strict=False)
    assert (report.missing, report.unexpected) == (("mine",), ("b",))
    assert torch.equal(mine, torch.full((2,), 5.0))
    assert torch.equal(into["w"], state(2)["w"])


# --- a repository that is damaged, new, or none ----------------------------------------------


def copy_of(place: Path, folder: Path) -> Path:
    for name, data in snapshot(place).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def spread(size: int, count: int) -> list[int]:
    return sorted({size * step // count for step in range(count)} | {size - 1})


def damaged(data: bytes, at: int, how: str) -> bytes:
    return data[:at] if how == "cut" else data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flip", "cut"])
def test_damage_anywhere_is_typed_or_harmless_and_never_reaches_a_target(place: Path, tmp_path: Path, how: str) -> None:
    path = copy_of(place, tmp_path / "repo")
    refused = 0
    for name, data in snapshot(path).items():
        for at in spread(len(data), tries(6, 12)):
            (path / name).write_bytes(damaged(data, at, how))
            target = Untouchable()
            try:
                with Repository.open(path) as repo:
                    repo.checkout(into=target.state)
                assert account(target.state) == account(state(2))
            except (CorruptionError, NotFoundError, UnsupportedVersionError):
                refused += 1
                assert target.is_untouched
            (path / name).write_bytes(data)
    assert refused > tries(15, 30)
    with Repository.open(path) as repo:
        assert account(repo.load()) == account(state(2))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flip", "cut"])
def test_a_damaged_index_is_said_or_harmless_and_can_be_made_anew(place: Path, tmp_path: Path, how: str) -> None:
    from cas_ckpt.ops.fsck.repair import rebuild_index

    path = copy_of(place, tmp_path / "repo")
    Repository.open(path).load()
    index = path / INDEX_PATH
    with Repository.open(path) as repo:
        repo.load()
    data = index.read_bytes()
    for at in spread(len(data), tries(14, 40)):
        for log in index.parent.iterdir():
            log.unlink()
        index.write_bytes(damaged(data, at, how))
        target = Untouchable()
        try:
            with Repository.open(path) as repo:
                repo.checkout(into=target.state)
            assert account(target.state) == account(state(2))
        except (CorruptionError, NotFoundError):  # a damaged id is an object that is in no pack
            assert target.is_untouched
            rebuild_index(path)
            with Repository.open(path) as repo:
                assert account(repo.load()) == account(state(2))


def test_a_pack_name_that_was_damaged_in_the_index_is_damage_and_not_a_bad_argument(
    place: Path, tmp_path: Path
) -> None:
    path = copy_of(place, tmp_path / "repo")
    with Repository.open(path) as repo:
        repo.load()
    with closing(sqlite3.connect(path / INDEX_PATH)) as database:
        database.execute("UPDATE t_packs SET name = replace(name, '/', char(15))")
        database.commit()
    target = Untouchable()
    with Repository.open(path) as repo, pytest.raises(CorruptionError, match="index rebuild"):
        repo.checkout(into=target.state)
    assert target.is_untouched


def test_a_newer_repository_is_refused_before_anything_else_is_read(place: Path, tmp_path: Path) -> None:
    path = copy_of(place, tmp_path / "repo")
    (path / "config").write_bytes(seal("config", 2, {"anything": "else"}, key="config"))
    (path / "refs/heads/main.ref").write_bytes(b"of another time")
    with pytest.raises(UnsupportedVersionError, match="config.*upgrade"):
        Repository.open(path)


def test_a_path_that_is_no_repository_is_said_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config").write_text("[core]\n")
    for name in ("nothing", "file"):
        with pytest.raises(NoRepositoryError, match=name):
            Repository.open(tmp_path / name)
    with pytest.raises(CorruptionError, match="config"):
        Repository.open(tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["config"]


def test_init_never_touches_what_is_there(place: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("text")
    before = snapshot(place)
    for path in (tmp_path, tmp_path / "mine", place):
        with pytest.raises(ConflictError, match=path.name):
            Repository.init(path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert snapshot(place) == before
