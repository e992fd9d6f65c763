"""What each rank has for itself: kept apart in a commit, and restored by as many ranks alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cas_ckpt.errors import CorruptionError, MismatchError
from cas_ckpt.objects.state import Container, Item, ValueItem
from cas_ckpt.training.capture.capture import capture_state
from cas_ckpt.training.per_rank import PerRank, RNGState
from cas_ckpt.training.restore.restore import RestorePlan
from tests.training.roundtrip import checkout, failure_of, load, same_state, store

Make = Callable[[int], dict[str, Any]]


class Loader:
    """Stateful, with a place in its data."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": torch.arange(3) + self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]
        assert state_dict["order"][0] == self.at


def united(parts: Sequence[Item]) -> Item:
    """One tree of what several ranks captured."""
    first = parts[0]
    if not isinstance(first, Container):
        return first
    assert all(isinstance(part, Container) and (part.kind, part.attrs) == (first.kind, first.attrs) for part in parts)
    trees = [part for part in parts if isinstance(part, Container)]
    names = list(dict.fromkeys(name for tree in trees for name in tree.children))
    below = {name: united([tree.children[name] for tree in trees if name in tree.children]) for name in names}
    return Container(first.kind, below, first.attrs)


def commit_of(world_size: int, make: Make) -> Container:
    """What a repository would hold of `make(rank)` on every rank."""
    parts = [store(capture_state(make(rank), rank=rank, world_size=world_size)) for rank in range(world_size)]
    tree = united(parts)
    assert isinstance(tree, Container)
    return tree


def restored(tree: Container, rank: int, world_size: int, state: dict[str, Any], **options: Any) -> RestorePlan:
    return checkout(tree, state, rank=rank, world_size=world_size, **options)


KINDS: dict[str, tuple[Make, Callable[[Any], Any]]] = {
    "a number": (lambda rank: {"x": PerRank(rank)}, lambda held: held),
    "a tuple": (lambda rank: {"x": PerRank((rank, "r"))}, lambda held: held[0]),
    "a dict": (lambda rank: {"x": PerRank({"epoch": rank, "deep": {"a": 1}})}, lambda held: held["epoch"]),
    "a tensor": (lambda rank: {"x": PerRank(torch.full((3,), rank))}, lambda held: int(held[1])),
    "an array": (lambda rank: {"x": PerRank(np.full(3, rank))}, lambda held: int(held[1])),
    "a Stateful": (lambda rank: {"x": PerRank(Loader(rank))}, lambda held: held.at),
    "a list of tensors": (lambda rank: {"x": PerRank([torch.full((2,), rank), 1])}, lambda held: int(held[0][0])),
    "a PerRank": (lambda rank: {"x": PerRank(PerRank(rank))}, lambda held: held.value),
    "something deep": (lambda rank: {"x": PerRank({"a": PerRank(rank)})}, lambda held: held["a"].value),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_gets_what_it_had(name: str, world_size: int) -> None:
    make, read = KINDS[name]
    tree = commit_of(world_size, make)
    for rank in range(world_size):
        state = make(7)
        held = state["x"].value
        plan = restored(tree, rank, world_size, state)
        assert read(state["x"].value) == rank
        assert plan.per_rank_skipped == ()
        if name in ("a dict", "a tensor", "an array", "a Stateful"):
            assert state["x"].value is held
        assert commit_of(1, lambda _, state=state: state).kind == "dict"


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("committed", "world_size"), [(3, 2), (2, 3), (1, 2), (2, 1)])
def test_with_another_number_of_ranks_it_is_left_untouched_and_listed(
    name: str, committed: int, world_size: int
) -> None:
    make, read = KINDS[name]
    tree = commit_of(committed, lambda rank: {**make(rank), "shared": 5})
    state = {**make(7), "shared": 0}
    held = state["x"].value
    plan = restored(tree, world_size - 1, world_size, state)
    assert plan.per_rank_skipped == ("x",)
    assert state["x"].value is held
    assert read(held) == 7
    assert state["shared"] == 5


def test_it_is_stored_by_rank_with_the_number_of_ranks() -> None:
    assert capture_state({"x": PerRank(5)}, rank=2, world_size=4).children["x"] == Container(
        "ranks", {2: ValueItem(5)}, {"world_size": 4}
    )
    assert capture_state({"x": PerRank(5)}).children["x"] == Container("ranks", {0: ValueItem(5)}, {"world_size": 1})


def test_loading_gives_a_dict_by_rank() -> None:
    assert load(commit_of(3, lambda rank: {"x": PerRank({"at": rank})}))["x"] == {
        0: {"at": 0},
        1: {"at": 1},
        2: {"at": 2},
    }


# --- random numbers --------------------------------------------------------------------------


def rng_commit(world_size: int, wrap: Callable[[RNGState], Any]) -> tuple[Container, list[list[float]]]:
    expected = []
    parts = []
    for rank in range(world_size):
        torch.manual_seed(100 + rank)
        parts.append(store(capture_state({"rng": wrap(RNGState())}, rank=rank, world_size=world_size)))
        expected.append(torch.rand(3).tolist())
    tree = united(parts)
    assert isinstance(tree, Container)
    return tree, expected


@pytest.mark.parametrize(
    "wrap", [lambda rng: rng, PerRank, lambda rng: PerRank({"in": rng})], ids=["bare", "held", "deep"]
)
def test_random_numbers_are_kept_per_rank_by_themselves(wrap: Callable[[RNGState], Any]) -> None:
    tree, expected = rng_commit(2, wrap)
    for rank in range(2):
        assert restored(tree, rank, 2, {"rng": wrap(RNGState())}).per_rank_skipped == ()
        assert torch.rand(3).tolist() == expected[rank]
    ranks = tree.children["rng"]
    assert isinstance(ranks, Container)
    kinds = [item.kind for item in containers(tree)]
    assert (ranks.kind, ranks.attrs, kinds.count("ranks")) == ("ranks", {"world_size": 2}, 1)


def containers(item: Item) -> list[Container]:
    if not isinstance(item, Container):
        return []
    return [item, *(found for child in item.children.values() for found in containers(child))]


def test_a_single_ranks_random_numbers_are_a_value_like_others() -> None:
    assert same_state({"rng": RNGState()}, {"rng": RNGState().state_dict()})


@pytest.mark.parametrize(("committed", "world_size"), [(1, 2), (2, 1), (3, 2)])
def test_random_numbers_of_another_number_of_ranks_change_no_generator(committed: int, world_size: int) -> None:
    tree, _ = rng_commit(committed, lambda rng: rng)
    torch.manual_seed(5)
    expected = torch.rand(3).tolist()
    torch.manual_seed(5)
    plan = restored(tree, 0, world_size, {"rng": RNGState({"more": torch.Generator()})})
    assert plan.per_rank_skipped == ("rng",)
    assert torch.rand(3).tolist() == expected


def test_a_generator_that_the_commit_has_not_is_refused_under_its_rank() -> None:
    tree, _ = rng_commit(2, lambda rng: rng)
    with pytest.raises(MismatchError, match=r"^rng/1: the commit holds the generators \[\], the target \['more'\]"):
        restored(tree, 1, 2, {"rng": RNGState({"more": torch.Generator()})})


def test_generators_come_last_although_they_are_inside_others() -> None:
    class Drawing(Loader):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            torch.rand(5)

    def make(at: int) -> dict[str, Any]:
        return {"a": PerRank(RNGState()), "b": PerRank(Drawing(at)), "c": Drawing(at)}

    torch.manual_seed(1)
    parts = [store(capture_state(make(3), rank=rank, world_size=2)) for rank in range(2)]
    expected = torch.rand(3).tolist()
    tree = united(parts)
    assert isinstance(tree, Container)
    restored(tree, 1, 2, make(3))
    assert torch.rand(3).tolist() == expected


# --- what does not fit -----------------------------------------------------------------------


@pytest.mark.parametrize("target", [Loader(1), {"at": 1}, torch.ones(3), 5, [1], torch.nn.Linear(1, 1)])
def test_a_target_that_is_not_per_rank_is_told_to_be(target: Any) -> None:
    tree = commit_of(2, lambda rank: {"x": PerRank(Loader(rank))})
    error = failure_of(lambda: restored(tree, 0, 2, {"x": target}))
    assert isinstance(error, MismatchError)
    assert f"x: the target is a {type(target).__name__}, the commit holds a value for each rank: give the" in str(error)


def test_a_per_rank_value_inside_of_what_an_object_is_given_is_refused_too() -> None:
    class Holder:
        def __init__(self, inside: Any) -> None:
            self.inside = inside

        def state_dict(self) -> dict[str, Any]:
            return {"inside": self.inside}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.inside = state_dict["inside"]

    tree = commit_of(2, lambda rank: {"x": Holder(PerRank(rank))})
    taken = Holder(PerRank(9))
    restored(tree, 1, 2, {"x": taken})
    assert taken.inside.value == 1
    for odd in (Holder(3), Holder({})):
        assert "x/inside: the target is a" in str(failure_of(lambda odd=odd: restored(tree, 1, 2, {"x": odd})))


def test_a_rank_that_the_commit_lacks_is_told() -> None:
    tree = Container("dict", {"x": Container("ranks", {0: ValueItem(1)}, {"world_size": 2})})
    assert "x: the commit lacks the value of rank 1" in str(failure_of(lambda: restored(tree, 1, 2, {"x": PerRank(0)})))


@pytest.mark.parametrize(
    "ranks",
    [
        Container("ranks", {0: ValueItem(1)}, None),
        Container("ranks", {0: ValueItem(1)}, {"world_size": "2"}),
        Container("ranks", {2: ValueItem(1)}, {"world_size": 2}),
        Container("ranks", {"0": ValueItem(1)}, {"world_size": 2}),
    ],
    ids=repr,
)
def test_ranks_that_no_commit_writes_are_damage(ranks: Container) -> None:
    error = failure_of(lambda: restored(Container("dict", {"x": ranks}), 0, 2, {"x": PerRank(0)}))
    assert isinstance(error, CorruptionError)
    assert str(error).startswith("x: ")


def test_keys_choose_a_ranks_value() -> None:
    tree = commit_of(2, lambda rank: {"x": PerRank({"at": rank, "more": rank}), "y": PerRank(rank)})
    state = {"x": PerRank({"at": 7, "more": 7}), "y": PerRank(7)}
    restored(tree, 1, 2, state, keys="x/*/at")
    assert (state["x"].value, state["y"].value) == ({"at": 1, "more": 7}, 7)
    restored(tree, 0, 2, state, keys="x/1/more")
    assert state["x"].value == {"at": 1, "more": 7}
    restored(tree, 0, 2, state, keys="y")
    assert state["y"].value == 0


def test_it_is_stateful_itself() -> None:
    for value, other in ((Loader(3), Loader(4)), (3, 4)):
        held = PerRank(other)
        held.load_state_dict(PerRank(value).state_dict())
        assert getattr(held.value, "at", held.value) == 3
    assert repr(PerRank(3)) == "PerRank(3)"
