"""The order of an OrderedDict is part of a state, whatever it holds; other mappings come back as they were, too."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from cas_ckpt import CorruptionError, Repository
from cas_ckpt.core.tree import load_tree
from cas_ckpt.objects.nodes import ValueEntry, tree_nodes
from cas_ckpt.objects.structures import default_name, types_in
from cas_ckpt.objects.values import encode_value
from cas_ckpt.parallel.peers import Peers
from tests.builders import new_repository
from tests.core.test_hostile_repository import store_nodes
from tests.thread_peers import run_ranks
from tests.training.roundtrip import checkout, commit


class Pair(NamedTuple):
    a: int
    b: int


def test_an_ordered_dict_with_tensors_keeps_its_order() -> None:
    state = {"o": OrderedDict([("z", torch.ones(3)), (5, 1), ("a", OrderedDict(y=torch.ones(1), b=2))])}
    with Repository.init("memory://ordered") as repo:
        first = repo.commit(state)
        assert list(repo.load()["o"]) == ["z", 5, "a"]
        assert list(repo.load()["o"]["a"]) == ["y", "b"]
        other = repo.commit({"o": OrderedDict(reversed(state["o"].items()))})
        assert other.root != first.root
        assert repo.commit(state).root == first.root
        assert [change.key for change in repo.diff(first.id, other.id).changed] == ["o"]
        target = {"o": OrderedDict([("a", OrderedDict(b=0, y=torch.zeros(1))), ("z", torch.zeros(3)), (5, 0)])}
        repo.checkout(first.id, into=target)
        assert (list(target["o"]), list(target["o"]["a"])) == (["z", 5, "a"], ["y", "b"])
        assert list(repo.load(first.id, keys=["o/a/b", "o/z"])["o"]) == ["z", "a"]


def test_a_part_of_an_ordered_dict_is_restored_without_moving_it() -> None:
    with Repository.init("memory://ordered-in-part") as repo:
        repo.commit({"o": OrderedDict([("z", torch.ones(3)), ("a", 2), ("q", torch.ones(2))])})
        for order in ("zaq", "qza"):
            values: dict[str, Any] = {"z": torch.zeros(3), "a": 0, "q": torch.zeros(2)}
            target = {"o": OrderedDict((name, values[name]) for name in order)}
            repo.checkout("main", into=target, keys="o/z")
            assert (list(target["o"]), target["o"]["z"].sum(), target["o"]["a"]) == (list(order), 3, 0)
            repo.checkout("main", into=target, keys="o")
            assert list(target["o"]) == ["z", "a", "q"]


def test_ranks_that_have_other_entries_of_an_ordered_dict_join_their_orders() -> None:
    url = "memory://ordered-on-ranks"
    Repository.init(url, group=None).close()

    def work(peers: Peers) -> None:
        own = OrderedDict([(f"stage{3 - peers.rank}", torch.full((3,), float(peers.rank))), ("shared", torch.ones(2))])
        with Repository.open(url, group=peers) as repo:
            repo.commit({"o": own})

    run_ranks(2, work, timeout_s=20)
    with Repository.open(url, group=None) as repo:
        assert list(repo.load()["o"]) == ["stage3", "shared", "stage2"]


@pytest.mark.parametrize("order", [["a"], ["a", "b", "c"], ["a", "a"], [True, "a"], "ab", [["a"], "b"], None])
def test_an_order_of_other_names_is_refused(tmp_path: Path, order: Any) -> None:
    handle = new_repository(tmp_path / "repo")
    entries = [ValueEntry(name, encode_value(1, key="")) for name in ("a", "b")]
    nodes = tree_nodes("odict", encode_value({"order": order} if order else {}, key=""), entries)
    with pytest.raises(CorruptionError, match="order"):
        load_tree(handle, store_nodes(handle, nodes))


def test_mappings_beside_a_structure_keep_their_counts_and_their_order() -> None:
    held = {"x": [Pair(1, 2), Counter(a=3, b=2), OrderedDict(z=1, y=Pair(3, 4)), defaultdict(list, k=[5])]}
    tree = commit(held)
    target: dict[str, Any] = {"x": [Pair(0, 0), Counter(), OrderedDict(), defaultdict(list)]}
    checkout(tree, target)
    assert target == held
    assert [type(each) for each in target["x"]] == [type(each) for each in held["x"]]
    assert list(target["x"][2]) == ["z", "y"]
    assert type(target["x"][2]["y"]) is Pair
    assert target["x"][3].default_factory is list


def test_a_target_that_holds_one_list_in_many_places_is_looked_into_once() -> None:
    many: list[Any] = [Pair(1, 2)]
    for _ in range(60):
        many = [many, many]
    assert types_in(many) == {("namedtuple", default_name(Pair)): Pair}
