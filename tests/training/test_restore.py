"""Restoring in place: what agrees is filled, what does not is told before anything is touched."""

from __future__ import annotations

import types
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from cas_ckpt.errors import InvalidInputError, MismatchError, NotFoundError, UnsupportedValueError
from cas_ckpt.objects.state import render_key
from cas_ckpt.training.restore.restore import plan_restore
from cas_ckpt.training.stateful import StateDict
from tests.training.roundtrip import checkout, commit, failure_of, fetch, same_state


def refused(target: dict[str, Any], source: dict[str, Any], **options: Any) -> str:
    """The message of the refusal; the target is as it was."""
    before = commit(target)
    error = failure_of(lambda: plan_restore(target, commit(source), **options))
    assert isinstance(error, MismatchError)
    assert commit(target) == before
    return str(error)


def test_planning_changes_nothing_and_finishing_sets_what_is_no_tensor() -> None:
    target = {"w": torch.zeros(2), "step": 1, "model": torch.nn.Linear(2, 2)}
    before = commit(target)
    tree = commit({"w": torch.ones(2), "step": 5, "model": torch.nn.Linear(2, 2)})
    plan = plan_restore(target, tree)
    assert commit(target) == before
    fetch(plan.copies)
    assert target["step"] == 1
    plan.finish()
    assert commit(target) == tree


def test_a_failing_fetch_leaves_values_and_objects_alone() -> None:
    target = {"w": torch.zeros(2), "step": 1, "p": StateDict(n=1)}
    tree = commit({"w": torch.ones(2), "step": 5, "p": StateDict(n=2)})
    plan_restore(target, tree)  # what a checkout does before a corrupt chunk stops it
    assert target["step"] == 1
    assert target["p"] == {"n": 1}


def test_tensors_and_containers_stay_the_same_objects() -> None:
    weight, inner, row = torch.zeros(2), {"a": torch.zeros(1), "n": 0}, [torch.zeros(1), "old"]
    target = {"w": weight, "inner": inner, "row": row, "o": OrderedDict(t=weight)}
    source = {"w": torch.ones(2), "inner": {"a": torch.ones(1), "n": 3}, "row": [torch.ones(1), "new"]}
    checkout(commit({**source, "o": OrderedDict(t=torch.ones(2))}), target)
    assert target["w"] is weight
    assert target["inner"] is inner
    assert target["row"] is row
    assert inner["n"] == 3
    assert row[1] == "new"
    assert weight.sum() == 2


def test_a_tuple_is_kept_if_only_its_tensors_change_and_rebuilt_in_its_parent_if_not() -> None:
    tensor = torch.zeros(1)
    target: dict[str, Any] = {"same": (tensor, 1), "other": (tensor, 1, [2, {}])}
    same = target["same"]
    checkout(commit({"same": (torch.ones(1), 1), "other": (torch.ones(1), 7, [2, {}])}), target)
    assert target["same"] is same
    assert target["other"] == (tensor, 7, [2, {}])
    assert target["other"][0] is tensor
    assert tensor == 1


def test_plain_parts_take_whatever_the_commit_holds() -> None:
    source = {
        "a": [1, {"b": 2}],
        "b": None,
        "c": torch.ones(2),
        "d": {"x": 1},
        "e": OrderedDict(z=1),
        "f": {"y": (1, 2)},
    }
    target: dict[str, Any] = {"a": [], "b": {}, "c": None, "d": 0, "e": {"old": 1}, "f": {"y": [{}]}}
    checkout(commit(source), target)
    assert same_state(target, source)
    assert type(target["e"]) is OrderedDict


def test_all_that_disagrees_is_told_at_once() -> None:
    target = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "gone": 1, "model": torch.nn.Linear(2, 2)}
    source = {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16), "c": 5, "new": 1}
    words = refused(target, {**source, "model": torch.nn.Linear(2, 2, bias=False)})
    assert "in the target but not in the commit (2):\n    gone\n    model/bias" in words
    assert "in the commit but not in the target (1):\n    new" in words
    assert "pass strict=False" in words
    assert "a: the target is float32[2], the commit holds float32[3]: give the target that shape" in words
    assert "b: the target is float32[2], the commit holds bfloat16[2]: give the target that dtype" in words
    assert "c: the target is float32[2], the commit holds a plain value of type int" in words


def test_long_lists_are_cut_and_counted() -> None:
    words = refused({f"k{i:03}": torch.ones(1) for i in range(25)}, {"other": torch.ones(1)})
    assert "not in the commit (25):" in words
    assert "k009\n    ... and 15 more" in words
    assert "k010" not in words


def test_without_strict_what_both_have_is_restored_and_the_rest_reported() -> None:
    kept = torch.zeros(1)
    target = {"both": torch.zeros(2), "gone": kept, "model": torch.nn.Linear(2, 2), "deep": {"old": 1}}
    source = {"both": torch.ones(2), "new": {"x": 1}, "model": torch.nn.Linear(2, 2, bias=False), "deep": {}}
    plan = checkout(commit(source), target, strict=False)
    assert plan.missing == ("gone", "model/bias", "deep/old")
    assert plan.unexpected == ("new",)
    assert target["both"].sum() == 2
    assert target["gone"] is kept
    assert "new" not in target
    assert torch.equal(target["model"].weight, source["model"].weight)


def test_without_strict_shapes_and_dtypes_still_have_to_agree() -> None:
    words = refused({"a": torch.ones(2), "m": torch.nn.Linear(2, 2)}, {"a": torch.ones(1), "m": torch.nn.Linear(3, 2)},
                    strict=False)  # fmt: skip
    assert "a: the target is float32[2], the commit holds float32[1]" in words
    assert "m/weight: the target is float32[2, 2], the commit holds float32[2, 3]" in words
    assert "strict=False" not in words


@pytest.mark.parametrize(
    ("target", "source"),
    [
        ({"x": torch.ones(2)}, {"x": {"a": 1}}),
        ({"x": {"a": torch.ones(2)}}, {"x": 1}),
        ({"x": {"a": torch.ones(2)}}, {"x": [torch.ones(2)]}),
        ({"x": [torch.ones(2)]}, {"x": [torch.ones(2), 1]}),
        ({"x": [torch.ones(2), 1]}, {"x": [torch.ones(2)]}),
        ({"x": np.ones(2)}, {"x": 1.0}),
        ({"x": torch.ones(1)}, {"x": torch.ones(())}),
        ({"x": torch.ones(2, dtype=torch.int32)}, {"x": torch.ones(2, dtype=torch.uint32)}),
        ({"0": torch.ones(1)}, {0: torch.ones(1)}),
        ({"x": torch.nn.Linear(1, 1)}, {"x": 1}),
    ],
    ids=str,
)
def test_other_structure_is_refused(target: Any, source: Any) -> None:
    refused(target, source)


def test_tied_targets_are_filled_once() -> None:
    weight, base = torch.nn.Parameter(torch.zeros(2)), np.zeros(3)
    tree = commit({"a": torch.ones(2), "b": torch.ones(2), "c": np.ones(3), "d": np.ones(3)})
    plan = checkout(tree, {"a": weight, "b": weight.detach(), "c": base, "d": base})
    assert [copy.path for copy in plan.copies] == [("a",), ("c",)]
    assert weight.sum() == 2
    assert base.sum() == 3


def test_tied_targets_with_two_contents_in_the_commit_are_refused() -> None:
    weight = torch.zeros(2)
    words = refused({"a": weight, "b": weight}, {"a": torch.ones(2), "b": torch.zeros(2)})
    assert "a and b are one tensor in the target but two different ones in the commit" in words


def tied_model(*, tied: bool) -> torch.nn.ModuleDict:
    """An embedding and a head, of one tensor or of two."""
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "head": torch.nn.Linear(2, 4, bias=False)})
    if tied:
        model["head"].weight = model["embed"].weight
    return model


def test_a_tied_tensor_that_the_commit_leaves_out_is_filled_under_its_other_key() -> None:
    source, target = tied_model(tied=True), tied_model(tied=True)
    left_out = commit({"model": {"embed.weight": source["embed"].weight}})
    plan = checkout(left_out, {"model": target})
    assert plan.missing == ()
    assert target["head"].weight is target["embed"].weight
    assert torch.equal(target["head"].weight, source["head"].weight)
    words = refused({"model": tied_model(tied=False)}, {"model": {"embed.weight": source["embed"].weight}})
    assert "in the target but not in the commit (1):\n    model/head.weight" in words
    words = refused({"model": target}, {"model": {"other.weight": torch.ones(4, 2)}})
    assert "in the target but not in the commit (2):" in words


def test_a_commit_of_tied_tensors_fills_a_model_that_has_two() -> None:
    source, target = tied_model(tied=True), tied_model(tied=False)
    checkout(commit({"model": source}), {"model": target})
    assert target["head"].weight is not target["embed"].weight
    assert torch.equal(target["head"].weight, source["embed"].weight)
    assert torch.equal(target["embed"].weight, source["embed"].weight)


def test_a_target_that_overlaps_itself_is_refused() -> None:
    for target in (torch.ones(1).expand(3), torch.arange(4.0).as_strided((2, 3), (1, 1))):
        words = refused({"x": target}, {"x": target.clone()})
        assert "x: elements of the target share memory" in words
    array = np.lib.stride_tricks.as_strided(np.zeros(4), (2, 3), (8, 8))
    assert "x: the target is a read-only or overlapping array" in refused({"x": array}, {"x": np.ones((2, 3))})


def test_targets_that_cannot_hold_anything_are_refused_before_anything_is_touched() -> None:
    first = torch.zeros(2)
    tree = commit({"first": torch.ones(2), "x": torch.ones(2)})
    with pytest.raises(UnsupportedValueError, match=r"^x: .*meta"):
        plan_restore({"first": first, "x": torch.ones(2, device="meta")}, tree)
    assert first.sum() == 0


def test_a_tensor_in_a_graph_is_filled_and_its_graph_notices() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    loss = (weight * weight).sum()
    checkout(commit({"w": torch.zeros(2)}), {"w": weight})
    assert weight.requires_grad
    assert weight.is_leaf
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_target_must_be_a_dict() -> None:
    for target in (types.MappingProxyType({"a": 1}), [1], None):
        with pytest.raises(InvalidInputError, match="a dict of names to objects"):
            plan_restore(target, commit({"a": 1}))  # type: ignore[arg-type]


def test_flavors_are_exchanged_when_their_specs_agree() -> None:
    array, tensor = np.zeros(2, np.float32), torch.zeros(2)
    checkout(commit({"x": torch.ones(2), "y": np.ones(2, np.float32)}), {"x": array, "y": tensor})
    assert array.sum() == tensor.sum() == 2


# --- keys= ------------------------------------------------------------------------------


def states() -> tuple[dict[str, Any], dict[str, Any]]:
    def make(value: float) -> dict[str, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        torch.nn.init.constant_(model[0].weight, value)
        torch.nn.init.constant_(model[1].weight, value)
        return {"model": model, "p": StateDict(step=value, loose=torch.full((2,), value)), "row": [value, {"a": value}]}

    return make(1.0), make(2.0)


def test_only_the_chosen_keys_are_restored() -> None:
    target, source = states()
    plan = checkout(commit(source), target, keys=["model/0.weight", "p/loose"])
    assert sorted(render_key(copy.path) for copy in plan.copies) == ["model/0.weight", "p/loose"]
    assert target["model"][0].weight.sum() == 8
    assert target["model"][1].weight.sum() == 4
    assert target["p"] == {"step": 1.0, "loose": target["p"]["loose"]}
    assert target["p"]["loose"].tolist() == [2, 2]
    assert target["row"] == [1.0, {"a": 1.0}]


def test_a_pattern_that_names_a_container_chooses_all_below_it() -> None:
    for keys in ("model", "model/*", "model/**"):
        target, source = states()
        checkout(commit(source), target, keys=keys)
        assert same_state({"m": target["model"]}, {"m": source["model"]})
        assert target["p"]["step"] == 1.0


def test_one_item_of_a_list_is_restored_in_its_place() -> None:
    target, source = states()
    checkout(commit(source), target, keys="row/1/a")
    assert target["row"] == [1.0, {"a": 2.0}]


def test_what_was_not_chosen_need_not_agree() -> None:
    target, source = {"a": torch.zeros(1), "b": torch.zeros(9)}, {"a": torch.ones(1), "b": torch.ones(2), "c": 1}
    checkout(commit(source), target, keys="a")
    assert target["a"] == 1
    assert "c: " not in refused(target, source, keys=["a", "b"])
    assert "not in the commit (1):\n    b" in refused(target, {"a": torch.ones(1), "bb": 1}, keys=["a", "b*"])


def test_a_part_of_an_optimizer_is_restored_and_the_rest_stays() -> None:
    def make(step: int) -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam([weight], lr=step)
        weight.grad = torch.full((2,), float(step))
        optimizer.step()
        return optimizer

    target, source = make(1), make(2)
    checkout(commit({"o": source}), {"o": target}, keys="o/state/0/exp_avg")
    (mine,), (theirs,) = target.state.values(), source.state.values()
    assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
    assert not torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"])
    assert target.param_groups[0]["lr"] == 1


def test_patterns_that_match_nothing_are_told() -> None:
    target, source = states()
    for keys in ("modle/*", ["model", "nope"]):
        with pytest.raises(NotFoundError, match=r"no entry matches (modle/\*|nope)"):
            plan_restore(target, commit(source), keys=keys)
    assert plan_restore(target, commit(source), keys=["model", "model/0.weight"]).copies


def test_a_plan_for_many_tensors_lists_each_once() -> None:
    state = {str(i): {"w": torch.zeros(2), "n": i} for i in range(2000)}
    plan = plan_restore(state, commit(state))
    assert len({copy.path for copy in plan.copies}) == len(plan.copies) == 2000
