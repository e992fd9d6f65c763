"""Whatever a user passes to a public verb by mistake: it works, or a `CkptError` says what is wanted."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cas_ckpt import CkptError, Policy, Repository
from cas_ckpt.errors import InternalError

WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "3": lambda: 3,
    "-1": lambda: -1,
    "True": lambda: True,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "-inf": lambda: -float("inf"),
    "10**30": lambda: 10**30,
    "-2**64": lambda: -(2**64),
    "complex": lambda: 1j,
    "nonsense": lambda: "nonsense",
    "empty": lambda: "",
    "blank": lambda: " \t",
    "NUL": lambda: "a\0b",
    "newline": lambda: "a\nb",
    "surrogate": lambda: "a\ud800b",
    "dots": lambda: "../..",
    "long": lambda: "x" * 5000,
    "bytes": lambda: b"main",
    "object": object,
    "class": lambda: dict,
    "function": lambda: print,
    "list": lambda: [3, None, object()],
    "lists": lambda: [["main"], [b"x"]],
    "None in a list": lambda: [None],
    "text in a list": lambda: ["a\0b", ""],
    "tuple": lambda: (object(), -1),
    "set": lambda: {3, "x"},
    "dict": lambda: {3: object(), "x": None},
    "nested": lambda: {"a": {None: [object()]}},
    "iterator": lambda: iter([object()]),
    "Path": lambda: Path("nowhere/at/all"),
    "tensor": lambda: torch.ones(2, 2),
    "0-d tensor": lambda: torch.tensor(float("nan")),
    "empty tensor": lambda: torch.empty(0),
    "meta": lambda: torch.empty(3, device="meta"),
    "meta in a dict": lambda: {"w": torch.empty(3, device="meta")},
    "freed": lambda: freed_tensor(),
    "freed in a dict": lambda: {"w": freed_tensor()},
    "freed as a key": lambda: {freed_tensor(): 1},
    "array": lambda: np.array([[1, 2], [3, 4]]),
    "array of objects": lambda: np.array([object()]),
    "np.nan": lambda: np.float64("nan"),
    "slice": lambda: slice(-3, "x"),
}


def freed_tensor() -> torch.Tensor:
    """A tensor whose memory was given back."""
    made = torch.ones(300, 100)
    made.untyped_storage().resize_(0)
    return made


NEEDED: dict[str, Callable[[Repository], Any]] = {
    "a": lambda repo: "main",
    "b": lambda repo: "main~1",
    "branch": lambda repo: "other",
    "key": lambda repo: "w",
    "into": lambda repo: a_state(3),
    "metric": lambda repo: "loss",
    "name": lambda repo: "other",
    "new": lambda repo: "renamed",
    "old": lambda repo: "other",
    "path": lambda repo: "out.safetensors",
    "policy": lambda repo: Policy(keep_last=1),
    "ref": lambda repo: "main",
    "remote": lambda repo: "nowhere",
    "sql(query)": lambda repo: "SELECT 1",
    "state": lambda repo: a_state(3),
    "target": lambda repo: 2,
    "trust": lambda repo: "ann@lab.org ssh-ed25519 " + KEY,
    "what": lambda repo: "main",
    "url": lambda repo: f"memory://new-{next(_NUMBERS)}",
    "rename_tag(old)": lambda repo: "v1",
}
"""What the methods need besides the argument that is wrong, by its name or, where one differs, by the method's too."""

KEY = "AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43

_NUMBERS = count()


def a_state(seed: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(300, 100, generator=made), "deep": {"v": torch.zeros(3)}, "n": seed}


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    monkeypatch.chdir(tmp_path)
    with Repository.init(f"memory://wrong-{next(_NUMBERS)}") as made:
        for seed in (1, 2):
            made.commit(a_state(seed), step=seed, metrics={"loss": 1.0 / seed})
        made.branch("other")
        made.tag("v1")
        yield made


def with_names(repo: Repository) -> Repository:
    """The repository with the branch and the tag that an earlier call may have renamed or deleted."""
    if "other" not in repo.branches():
        repo.branch("other", start="main")
    if "v1" not in repo.tags():
        repo.tag("v1", "main")
    return repo


def public_methods() -> list[str]:
    return sorted(
        name for name, value in inspect.getmembers(Repository)
        if not name.startswith("_") and callable(value) and name != "close"
    )  # fmt: skip


def parameters(method: str) -> list[inspect.Parameter]:
    return [each for each in inspect.signature(getattr(Repository, method)).parameters.values() if each.name != "self"]


def call(repo: Repository, method: str, wrong: inspect.Parameter, value: Any) -> None:
    """One call, in which everything else is as it should be."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for each in parameters(method):
        if each.kind is each.VAR_POSITIONAL:
            positional += [value] if each is wrong or each.name == wrong.name else []
        elif each.name == wrong.name and each.kind is not each.POSITIONAL_ONLY:
            named[each.name] = value
        elif each.kind is each.POSITIONAL_ONLY:
            needed = NEEDED.get(f"{method}({each.name})")
            positional.append(value if each.name == wrong.name else needed and needed(repo))
        elif each.kind is each.VAR_KEYWORD:
            continue
        elif each.default is each.empty:
            needed = NEEDED.get(f"{method}({each.name})", NEEDED.get(each.name))
            assert needed is not None, each
            named[each.name] = needed(repo)
    answer = getattr(repo, method)(*positional, **named)
    if isinstance(answer, Repository):
        answer.close()


@pytest.mark.parametrize("method", public_methods())
def test_what_is_passed_wrongly_gives_an_answer_or_a_ckpt_error(repo: Repository, method: str) -> None:
    fell = {}
    for parameter in parameters(method):
        for name, make in WRONG.items():
            try:
                call(with_names(repo), method, parameter, make())
            except CkptError as error:
                said = str(error)
                if isinstance(error, InternalError):
                    fell[f"{parameter.name}={name}"] = f"{error!r:.150}"
            except Exception as error:  # noqa: BLE001 - what must not come
                place = traceback.extract_tb(error.__traceback__)[-1]
                fell[f"{parameter.name}={name}"] = f"{error!r:.150} ({place.filename}:{place.lineno})"
                continue
            else:
                continue
            assert said
    assert fell == {}
