"""The order of an OrderedDict is part of a state, whatever it holds."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from cas_ckpt import CorruptionError, Repository
from cas_ckpt.objects.tree_node import ValueEntry, tree_nodes
from cas_ckpt.objects.values import encode_value
from cas_ckpt.ops.tree import load_tree
from cas_ckpt.transfer.peers import Peers
from cas_ckpt.transfer.thread_peers import run_ranks
from tests.builders import new_repository
from tests.core_review.test_hostile_repository import store_nodes


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
