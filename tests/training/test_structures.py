"""Named tuples and dataclasses in a state: stored by their fields, no pickle."""

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt import Named, Repository, StateDict, errors, register_type
from cas_ckpt.objects import structures
from cas_ckpt.objects.state import Container, ValueItem
from cas_ckpt.objects.values import decode_value, encode_value
from tests.training.roundtrip import checkout, commit, load


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Progress:
    step: int = 0
    best: Any = None


@dataclass(frozen=True)
class Settings:
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass(slots=True)
class Slotted:
    weight: Any
    note: str = "n"


@dataclass
class Noted:
    """Whose constructor would change what it is given."""

    x: int
    ran: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.x += 1
        self.ran = True


def name_of(python_type: type) -> str:
    return structures.default_name(python_type)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`register_type`, forgotten after the test."""
    monkeypatch.setattr(structures, "_name_of", {})
    monkeypatch.setattr(structures, "_class_of", {})
    return register_type


# --- plain ones are values --------------------------------------------------------------------


@pytest.mark.parametrize("value", [Pair(1, (2,)), Progress(3, "x"), Settings(0.1), Slotted(None)])
def test_a_plain_structure_comes_back_as_a_record_that_commits_to_the_same_bytes(value: Any) -> None:
    data = encode_value(value, key="k")
    back = decode_value(data)
    assert isinstance(back, Named)
    assert back.name == name_of(type(value))
    assert back.fields == structures.structure_of(value).fields  # type: ignore[union-attr]
    assert encode_value(back, key="k") == data


@pytest.mark.parametrize("value", [Pair(1, Pair(2, 3)), Progress(3, Pair(1, 2)), Settings(0.1), Slotted(None)])
def test_a_registered_class_is_given_back(value: Any, register: Any) -> None:
    data = encode_value([value, {(value, 1) if isinstance(value, Settings) else 1}], key="k")
    for python_type in (Pair, Progress, Settings, Slotted):
        register(python_type)
    back = decode_value(data)[0]
    assert back == value
    assert type(back) is type(value)


def test_no_constructor_runs(register: Any) -> None:
    register(Noted)
    value = Noted(1)
    back = decode_value(encode_value(value, key="k"))
    assert (back.x, back.ran) == (2, True)


def test_a_name_never_reaches_a_class_that_nobody_registered() -> None:
    stored = Named("dataclass", name_of(Progress), {"step": 1, "best": None})
    assert decode_value(encode_value(stored, key="k")) == stored


def test_a_renamed_class_reads_and_writes_the_old_name(register: Any) -> None:
    old = encode_value(Settings(0.5), key="k")
    renamed = register(make_dataclass("Renamed", ["lr", "betas"]), name=name_of(Settings))
    back = decode_value(old)
    assert type(back) is renamed
    assert encode_value(back, key="k") == old


def test_a_class_that_is_defined_again_takes_the_place_of_the_old_one(register: Any) -> None:
    first, second = (make_dataclass("Cell", ["x"]) for _ in range(2))
    register(first)
    register(second)
    assert type(decode_value(encode_value(second(1), key="k"))) is second
    with pytest.raises(errors.InvalidInputError, match="is registered: choose"):
        register(Settings, name=name_of(second))


@pytest.mark.parametrize("wrong", [int, dict, torch.nn.Linear, Named, object(), "Pair"])
def test_only_named_tuples_and_dataclasses_are_registered(wrong: Any) -> None:
    with pytest.raises(errors.InvalidInputError, match="neither a named tuple nor a dataclass"):
        register_type(wrong)


def test_a_registered_class_with_other_fields_is_an_error_that_names_both(register: Any) -> None:
    data = encode_value(Settings(0.5), key="k")
    register(make_dataclass("Newer", ["lr", "decay"]), name=name_of(Settings))
    with pytest.raises(errors.UnsupportedValueError, match=r"some/key.*\['lr', 'betas'\].*\['lr', 'decay'\]"):
        decode_value(data, key="some/key")


def test_what_holds_more_than_its_fields_is_refused() -> None:
    extra = Progress()
    extra.other = 1  # type: ignore[attr-defined]
    with pytest.raises(errors.UnsupportedValueError, match="holds 'other' besides its fields"):
        encode_value(extra, key="k")


class WithRest(Pair):
    """A named tuple with a dict."""


class Based:
    __slots__ = ("hidden",)


@dataclass
class OfDict(dict[str, int]):
    x: int = 0


@dataclass(slots=True)
class Hiding(Based):
    x: int = 0


def unset() -> Any:
    made = object.__new__(Settings)
    object.__setattr__(made, "betas", ())
    return made


def with_rest() -> Any:
    made = WithRest(1, 2)
    made.c = 3  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("value", "why"),
    [(with_rest(), "'c' besides"), (OfDict(), "no plain form"), (Hiding(), "'hidden' besides"), (unset(), "'lr'")],
)
def test_nothing_that_an_instance_holds_is_lost_in_silence(value: Any, why: str) -> None:
    with pytest.raises(errors.UnsupportedValueError, match=why):
        encode_value(value, key="k")


class Cached(Settings):
    @functools.cached_property
    def twice(self) -> float:
        return 2 * self.lr


def test_a_cached_property_is_no_part_of_the_state() -> None:
    value, fresh = Cached(1.0), Cached(1.0)
    assert value.twice == 2.0
    assert encode_value(value, key="k") == encode_value(fresh, key="k")


@dataclass
class Doubled:
    weight: Any

    @functools.cached_property
    def twice(self) -> Any:
        return 2 * self.weight


@pytest.mark.parametrize("make", [float, lambda value: torch.full((1,), value)], ids=["value", "tensor"])
def test_what_a_dataclass_computed_of_its_fields_is_computed_anew_after_a_checkout(make: Any) -> None:
    target = Doubled(make(1.0))
    assert target.twice == 2.0
    checkout(commit({"d": Doubled(make(5.0))}), {"d": target})
    assert (target.weight, target.twice) == (5.0, 10.0)


# --- with tensors they are containers ---------------------------------------------------------


def test_a_structure_with_tensors_is_a_container_of_its_fields(register: Any) -> None:
    state = {"p": Pair(torch.ones(2), Progress(4, [torch.zeros(3)])), "s": Slotted(torch.ones(1))}
    tree = commit(state)
    kinds = [tree.children["p"], tree.children["p"].children["b"], tree.children["s"]]  # type: ignore[union-attr]
    assert [item.kind for item in kinds] == ["namedtuple", "dataclass", "dataclass"]  # type: ignore[union-attr]
    loose = load(tree)
    assert loose["p"].fields["b"].fields["step"] == 4
    assert commit(loose) == tree
    for python_type in (Pair, Progress, Slotted):
        register(python_type)
    back = load(tree)
    assert type(back["p"]) is Pair
    assert back["p"].b.best[0].tolist() == [0, 0, 0]
    assert (type(back["s"]), back["s"].note) == (Slotted, "n")


def test_a_dataclass_is_restored_in_place() -> None:
    weight, target = torch.zeros(2), Progress(0)
    target.best = weight
    kept = {"progress": target}
    checkout(commit({"progress": Progress(7, torch.ones(2))}), kept)
    assert kept["progress"] is target
    assert (target.step, target.best is weight, weight.tolist()) == (7, True, [1, 1])


def test_a_plain_dataclass_is_restored_in_place_too() -> None:
    target = Progress(0, Pair(0, [Settings(0.0)]))
    checkout(commit({"progress": Progress(7, Pair(1, [Settings(0.5), Settings(0.1)]))}), {"progress": target})
    assert target == Progress(7, Pair(1, [Settings(0.5), Settings(0.1)]))
    assert type(target.best) is Pair


def test_frozen_ones_and_named_tuples_are_replaced_in_what_holds_them() -> None:
    weight = torch.zeros(2)
    state: dict[str, Any] = {"p": Pair(weight, 1), "s": Settings(0.0), "same": Pair(weight, "x")}
    same = state["same"]
    checkout(commit({"p": Pair(torch.ones(2), 2), "s": Settings(0.5), "same": Pair(torch.ones(2), "x")}), state)
    assert (state["p"].b, state["p"].a is weight, state["s"]) == (2, True, Settings(0.5))
    assert state["same"].a is same.a


def test_a_class_that_was_moved_is_restored_by_its_fields() -> None:
    moved = make_dataclass("Elsewhere", ["step", "best"])
    target = moved(0, None)
    checkout(commit({"p": Progress(9, "b")}), {"p": target})
    assert (target.step, target.best) == (9, "b")


def test_fields_that_differ_are_named_and_nothing_is_touched() -> None:
    target = make_dataclass("Other", ["step", "worst"])(0, 1)
    tree = commit({"p": Progress(9, "b")})
    with pytest.raises(errors.MismatchError, match=r"p/worst[\s\S]*p/best"):
        checkout(tree, {"p": target})
    assert target.step == 0
    checkout(tree, {"p": target}, strict=False)
    assert (target.step, target.worst) == (9, 1)


def test_a_stateful_object_is_handed_the_classes_that_it_has() -> None:
    target = StateDict(config=Settings(0.0), pair=Pair(torch.zeros(2), 0), old=[Pair(0, 0)])
    weight = target["pair"].a
    committed = StateDict(config=Settings(0.5), pair=Pair(torch.ones(2), 3), old=[Pair(1, 2)])
    checkout(commit({"d": committed}), {"d": target})
    assert target["config"] == Settings(0.5)
    assert (target["pair"].a is weight, target["pair"].b, type(target["pair"])) == (True, 3, Pair)
    assert target["old"] == [Pair(1, 2)]


def test_one_field_is_restored_by_its_key() -> None:
    target = Progress(0, torch.zeros(2))
    checkout(commit({"p": Progress(5, torch.ones(2))}), {"p": target}, keys="p/best")
    assert (target.step, target.best.tolist()) == (0, [1, 1])


def test_an_optimizer_beside_its_module_in_a_dataclass_is_named() -> None:
    model = torch.nn.Linear(2, 2)
    holder = Progress(best=model)
    tree = commit({"h": holder, "o": torch.optim.SGD(model.parameters(), momentum=0.9)})
    params = tree.children["o"].children["param_groups"]  # type: ignore[union-attr]
    assert "weight" in repr(params)


# --- what a stranger wrote --------------------------------------------------------------------

ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["a", "b", "c", 0, 1])


@given(
    st.sampled_from(["namedtuple", "dataclass", "generator"]),
    ODD | st.fixed_dictionaries({"name": ODD, "fields": ODD | st.lists(FIELDS), "device": ODD}),
    st.sets(FIELDS | st.just("state"), max_size=3),
)
def test_odd_attributes_are_corrupt_or_make_a_record(kind: str, attrs: Any, names: set[Any]) -> None:
    tree = Container("dict", {"x": Container(kind, {name: ValueItem(1) for name in names}, attrs)})
    try:
        made = load(tree)["x"]
    except errors.CorruptionError:
        return
    assert isinstance(made, Named)
    assert list(made.fields) == attrs["fields"]


@given(st.binary(max_size=40), st.sampled_from([33, 34]))
def test_odd_bytes_of_a_structure_are_corrupt(payload: bytes, code: int) -> None:
    data = bytes([0xC7, len(payload), code]) + payload
    try:
        made = decode_value(data)
    except (errors.CorruptionError, errors.UnsupportedVersionError, errors.UnsupportedValueError):
        return
    assert encode_value(made, key="k") == data


# --- through a repository ---------------------------------------------------------------------


def test_a_repository_keeps_structures_and_generators(tmp_path: Path, register: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    state: dict[str, Any] = {
        "config": Settings(0.1), "progress": Progress(2, torch.arange(5000)), "g": generator,
        "rows": [Pair(torch.ones(2), 1)], "o": OrderedDict(z=Pair(1, 2)),
    }  # fmt: skip
    with Repository.init(tmp_path / "repo") as repo:
        first = repo.commit(state)
        assert repo.read("main", "progress/step") == 2
        assert repo.load("main", keys="progress/best").keys() == {"progress"}
        again = repo.commit(repo.load("main"))
        assert again.root == first.root
        state["progress"], state["config"] = Progress(0, torch.zeros(5000, dtype=torch.int64)), Settings(0.0)
        generator.manual_seed(9)
        repo.checkout("main", into=state)
        assert (state["progress"].step, state["config"]) == (2, Settings(0.1))
        assert torch.equal(generator.get_state(), torch.Generator().manual_seed(5).get_state())
        register(Settings)
        assert repo.load("main", keys="config") == {"config": Settings(0.1)}
        assert {"progress/step", "g"} <= {entry.key for entry in repo.ls("main")}
        assert not repo.fsck().problems
