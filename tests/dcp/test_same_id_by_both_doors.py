"""One state, committed by `repo.commit` and by `dcp.save`: the same tree, and each reads what the other stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

from cas_ckpt import CommitInfo, Repository
from cas_ckpt.dcp import CasSavePlanner, CasStorageReader, CasStorageWriter, with_names
from cas_ckpt.errors import MismatchError
from tests.dcp.states import by_helper, load, same, save
from tests.training.test_optimizers import EXTRA, OPTIMIZERS, SCHEDULERS, Net, rates, seeded, train

Sizes = tuple[int, ...]
Pair = tuple[torch.nn.Module, torch.optim.Optimizer]


def made(
    kind: str = "AdamW", *, seed: int = 0, steps: int = 2, labels: bool = False, sizes: Sizes = (), turn: int = 1
) -> Pair:
    """A model and its optimizer (`labels`: with param_names), in groups of `sizes`; `turn` -1: the other way round."""
    model = seeded(lambda: Net(sparse=kind == "SparseAdam"), seed)
    every = list(model.named_parameters() if labels else model.parameters())[::turn]
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    groups = [
        {"params": every[end - size : end], "lr": 0.01 * (1 + at)}
        for at, (end, size) in enumerate(zip(ends, sizes, strict=True))
    ]
    optimizer = getattr(torch.optim, kind)(groups or every, **EXTRA.get(kind, {}))
    train(model, optimizer, steps)
    return model, optimizer


def live(pair: Pair) -> dict[str, Any]:
    return {"model": pair[0], "optim": pair[1]}


def plain(pair: Pair) -> dict[str, Any]:
    return {"model": pair[0].state_dict(), "optim": pair[1].state_dict()}


def by_dcp(repo: Repository, state: Any, **how: Any) -> CommitInfo:
    writer = CasStorageWriter(repo, branch="main")
    save(state, writer, **how)
    assert writer.commit is not None
    return writer.commit


def natively(repo: Repository, state: Any) -> CommitInfo:
    return repo.commit(state, branch="main")


def moments(pair: Pair) -> dict[str, Any]:
    """What an optimizer has, by the names of the parameters, which are asked for at the parameters themselves."""
    names = {param: name for name, param in pair[0].named_parameters()}
    groups = [[names[param] for param in group["params"]] for group in pair[1].param_groups]
    rate = {name: group["lr"] for group, each in zip(pair[1].param_groups, groups, strict=True) for name in each}
    return {"state": {names[param]: dict(state) for param, state in pair[1].state.items()}, "lr": rate}


def same_training(one: Pair, other: Pair) -> bool:
    return same(dict(one[0].state_dict()), dict(other[0].state_dict())) and same(moments(one), moments(other))


# --- the same tree --------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 2], ids=["without state", "with state"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_with_names_gives_the_id_of_the_live_objects(repo: Repository, kind: str, steps: int) -> None:
    pair = made(kind, steps=steps)
    wanted = natively(repo, live(pair)).root
    assert by_dcp(repo, with_names(live(pair))).root == wanted
    assert by_dcp(repo, with_names(live(pair)), planner=CasSavePlanner()).root == wanted


@pytest.mark.parametrize("sizes", [(), (1, 2)], ids=["one group", "two groups"])
@pytest.mark.parametrize("steps", [0, 2], ids=["without state", "with state"])
@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind not in ("LBFGS", "SparseAdam")])
def test_an_optimizer_that_has_param_names_gives_the_same_id_by_itself(
    repo: Repository, kind: str, steps: int, sizes: tuple[int, ...]
) -> None:
    pair = made(kind, steps=steps, labels=True, sizes=sizes)
    wanted = natively(repo, live(pair)).root
    planners = [None, CasSavePlanner(), DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)]
    assert {by_dcp(repo, live(pair), planner=planner).root for planner in planners} == {wanted}
    assert by_dcp(repo, plain(pair)).root == wanted


@pytest.mark.parametrize("labels", [False, True], ids=["by numbers", "with param_names"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_get_state_dict_gives_the_id_of_the_live_objects(repo: Repository, kind: str, labels: bool) -> None:
    pair = made(kind, labels=labels)
    wanted = natively(repo, live(pair)).root
    assert by_dcp(repo, by_helper(pair)).root == wanted == natively(repo, by_helper(pair)).root
    if kind != "LBFGS":  # whose state torch does not flatten
        flat = by_helper(pair, flat=True)
        assert by_dcp(repo, flat).root == natively(repo, flat).root != wanted


@pytest.mark.parametrize("steps", [0, 2], ids=["without state", "with state"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_dcp_is_given_by_numbers_is_what_a_commit_of_the_state_dicts_is(
    repo: Repository, kind: str, steps: int
) -> None:
    pair = made(kind, steps=steps)
    wanted = natively(repo, plain(pair)).root
    assert by_dcp(repo, live(pair)).root == by_dcp(repo, plain(pair)).root == wanted


def test_an_optimizer_without_its_module_keeps_its_numbers_by_both_doors(repo: Repository) -> None:
    _, optimizer = made(labels=True)
    assert by_dcp(repo, {"optim": optimizer}).root == natively(repo, {"optim": optimizer}).root
    assert set(repo.load("main", keys="optim")["optim"]["state"]) == {0, 1, 2}


def test_names_of_several_modules_have_the_modules_key_in_front_by_both_doors(repo: Repository) -> None:
    def state(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        parts = {name: torch.nn.Linear(2, 2) for name in ("disc", "gen")}
        named = [(f"{part}.{name}", param) for part in parts for name, param in parts[part].named_parameters()]
        optimizer = torch.optim.SGD(named, momentum=0.9)
        sum(module(torch.ones(1, 2)).sum() for module in parts.values()).backward()
        optimizer.step()
        return {**parts, "optim": optimizer}

    wanted = natively(repo, state(0))
    assert by_dcp(repo, state(0)).root == wanted.root
    assert "gen.weight" in repo.load("main", keys="optim")["optim"]["state"]


def test_names_that_no_module_of_the_state_has_are_not_used(repo: Repository) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([("one", model.weight), ("two", model.bias)], momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    by_dcp(repo, {"model": model, "optim": optimizer})
    loaded = repo.load("main")["optim"]
    assert set(loaded["state"]) == {0, 1} and loaded["param_groups"][0]["params"] == [0, 1]
    assert loaded["param_groups"][0]["param_names"] == ["one", "two"]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_beside_its_optimizer_gives_the_same_id(repo: Repository, name: str) -> None:
    model, optimizer = made("SGD")
    state = {"model": model, "optim": optimizer, "sched": SCHEDULERS[name](optimizer)}
    list(rates(optimizer, state["sched"], 3))
    wanted = natively(repo, state).root
    assert by_dcp(repo, with_names(state), planner=CasSavePlanner()).root == wanted
    if name != "MultiStepLR":  # its milestones have numbers as keys, which DCP's flat form turns into text
        assert by_dcp(repo, with_names(state)).root == wanted


def test_objects_below_the_top_of_a_state_give_the_same_id(repo: Repository) -> None:
    state = {"app": live(made())}
    assert by_dcp(repo, with_names(state)).root == by_dcp(repo, state).root == natively(repo, state).root


# --- what DCP stored, checked out into live objects -------------------------------------------

STORED: dict[str, Callable[[Pair], Any]] = {
    "live": live,
    "with_names": lambda pair: with_names(live(pair)),
    "get_state_dict": by_helper,
    "flattened": lambda pair: by_helper(pair, flat=True),
}


@pytest.mark.parametrize("form", STORED)
@pytest.mark.parametrize("labels", [False, True], ids=["by numbers", "with param_names"])
@pytest.mark.parametrize("steps", [0, 1], ids=["into a fresh one", "into a used one"])
@pytest.mark.parametrize("sizes", [(), (1, 2)], ids=["one group", "two groups"])
def test_what_dcp_stored_is_checked_out(
    repo: Repository, form: str, labels: bool, steps: int, sizes: tuple[int, ...]
) -> None:
    pair, other = made(labels=labels, sizes=sizes), made(seed=3, steps=steps, sizes=sizes)
    by_dcp(repo, STORED[form](pair))
    repo.checkout("main", into=live(other))
    assert same_training(other, pair)
    train(*pair)
    train(*other)
    assert same_training(other, pair)


@pytest.mark.parametrize("form", ["live", "plain, without the module's names", "flattened"])
def test_parameters_in_another_order_are_found_by_their_names(repo: Repository, form: str) -> None:
    pair, other = made(labels=True), made(labels=True, seed=3, turn=-1)
    if form == "flattened":
        by_dcp(repo, by_helper(pair, flat=True))
    elif form == "live":
        by_dcp(repo, live(pair))
    else:
        natively(repo, plain(pair))
    repo.checkout("main", into=live(other))
    assert same_training(other, pair)
    assert other[1].param_groups[0]["param_names"] == [name for name, _ in list(other[0].named_parameters())[::-1]]


def test_an_optimizer_alone_is_matched_by_its_own_param_names(repo: Repository) -> None:
    pair, other = made(labels=True), made(labels=True, seed=3, turn=-1)
    for state in (live(pair), plain(pair)):
        natively(repo, state)
        target = made(labels=True, seed=3, turn=-1)
        repo.checkout("main", into={"optim": target[1]}, keys="optim")
        assert same(moments(target), moments(pair)) and not same(moments(other), moments(pair))


def test_param_names_under_a_wrapper_are_the_same_names(repo: Repository) -> None:
    model, optimizer = pair = made(turn=-1)
    wrapped = torch.nn.Module()
    wrapped.module = model
    optimizer.param_groups[0]["param_names"] = [name for name, _ in list(wrapped.named_parameters())[::-1]]
    natively(repo, plain(pair))
    other = made(seed=3)
    repo.checkout("main", into=live(other))
    assert same_training(other, pair)


def test_other_param_names_are_refused_and_nothing_is_touched(repo: Repository) -> None:
    pair, other = made(labels=True), made(seed=3)
    state = plain(pair)
    state["optim"]["param_groups"][0]["param_names"] = ["a", "b", "c"]
    natively(repo, state)
    before = natively(repo, live(other)).root
    with pytest.raises(MismatchError, match="without 'embed.weight'.* but with 'a', 'b', 'c' as its param_names"):
        repo.checkout("main~1", into=live(other))
    assert natively(repo, live(other)).root == before


def test_a_flat_form_of_other_parameters_or_groups_is_refused(repo: Repository) -> None:
    pair = made(sizes=(1, 2))
    by_dcp(repo, by_helper(pair, flat=True))
    other = made(seed=3)
    with pytest.raises(MismatchError, match="optim/param_groups: the commit has another lr for 'first.weight' than"):
        repo.checkout("main", into=live(other))
    with pytest.raises(MismatchError, match="flat form of get_optimizer_state_dict: put the module into the target"):
        repo.checkout("main", into={"optim": other[1]}, keys="optim")
    part = torch.optim.AdamW(list(other[0].parameters())[:2])
    with pytest.raises(MismatchError, match="second.weight.*: of no parameter of the target"):
        repo.checkout("main", into={"model": other[0], "optim": part})


def test_a_commit_that_holds_no_optimizer_is_refused_where_the_target_has_one(repo: Repository) -> None:
    for stored in ({}, {"something": 1}):
        natively(repo, {"optim": stored})
        target = made()
        before = moments(target)
        with pytest.raises(MismatchError, match="optim: the target is an optimizer, the commit has neither state nor"):
            repo.checkout("main", into={"optim": target[1]})
        assert same(moments(target), before)


def test_moments_of_another_shape_are_refused_where_the_optimizer_has_none_yet(repo: Repository) -> None:
    def state(turn: int) -> dict[str, Any]:
        weights = [torch.nn.Parameter(torch.ones(size)) for size in (2, 3)][::turn]
        return {"optim": torch.optim.AdamW(weights), "weights": weights}

    first = state(1)
    sum(weight.sum() for weight in first["weights"]).backward()
    first["optim"].step()
    by_dcp(repo, {"optim": first["optim"]})
    target = state(-1)["optim"]
    with pytest.raises(MismatchError, match=r"optim/state/0/exp_avg: the parameter is \[3\], the commit holds .*\[2\]"):
        repo.checkout("main", into={"optim": target})
    assert not target.state


# --- what the repository holds, loaded by DCP -------------------------------------------------


@pytest.mark.parametrize("labels", [False, True], ids=["target by numbers", "target with param_names"])
@pytest.mark.parametrize("sizes", [(), (1, 2)], ids=["one group", "two groups"])
def test_live_objects_are_loaded_from_a_commit_by_names(repo: Repository, labels: bool, sizes: tuple[int, ...]) -> None:
    pair, other = made(sizes=sizes), made(seed=3, labels=labels, sizes=sizes)
    natively(repo, live(pair))
    load(live(other), CasStorageReader(repo))
    assert same_training(other, pair)


def test_state_dicts_are_loaded_by_numbers_and_stay_so(repo: Repository) -> None:
    pair, other = made(), made(seed=3)
    natively(repo, live(pair))
    target = plain(other)
    load(target, CasStorageReader(repo))
    assert same(target["optim"], pair[1].state_dict())


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "used"])
@pytest.mark.parametrize("form", ["live", "plain"])
def test_get_state_dict_loads_what_the_repository_holds(repo: Repository, form: str, steps: int, flat: bool) -> None:
    """The plain form is by numbers, but its param_names tell which is which."""
    pair, other = made(labels=True), made(seed=3, steps=steps, turn=1 if flat else -1)
    natively(repo, live(pair) if form == "live" else plain(pair))
    target = by_helper(other, flat=flat)
    load(target, CasStorageReader(repo))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_state_dict(*other, model_state_dict=target["model"], optim_state_dict=target["optim"], options=options)
    assert same_training(other, pair)


@pytest.mark.parametrize("turn", [1, -1], ids=["same order", "another order"])
def test_with_names_loads_a_commit_whatever_the_order_of_the_parameters(repo: Repository, turn: int) -> None:
    pair, other = made(), made(seed=3, turn=turn)
    natively(repo, live(pair))
    load(dict(with_names(live(other))), CasStorageReader(repo))
    assert same_training(other, pair)


def refused(repo: Repository, state: Any, match: str, **how: Any) -> None:
    before = {name: value.clone() for name, value in state["model"].state_dict().items()}
    with pytest.raises(CheckpointException, match=f"MismatchError: {match}"):
        load(state, CasStorageReader(repo), **how)
    assert same(dict(state["model"].state_dict()), before)


def test_an_optimizer_without_state_is_not_left_without_a_word(repo: Repository) -> None:
    pair = made()
    natively(repo, live(pair))
    for make in (live, lambda other: dict(with_names(live(other)))):
        target = make(made(seed=3, steps=0))
        wanted = "optim: the commit has the state of 3 parameters, the target's optimizer has none yet.*get_state_dict"
        before = {name: value.clone() for name, value in pair[0].state_dict().items()}
        with pytest.raises(CheckpointException, match=f"MismatchError: {wanted}"):
            load(target, CasStorageReader(repo))
        load(target, CasStorageReader(repo), planner=DefaultLoadPlanner(allow_partial_load=True))
        assert same(dict(target["model"].state_dict()), before)


def test_other_groups_are_refused_where_only_numbers_tell_the_parameters(repo: Repository) -> None:
    natively(repo, live(made()))
    wanted = r"optim: the target has the parameters by numbers and a group of the number 1, the commit by "
    refused(repo, live(made(seed=3, sizes=(1, 2))), wanted + r"names in groups of \[3\]: build")
    natively(repo, live(made(sizes=(2, 1))))
    wanted = "optim/param_groups: the target has 2 groups of 1, 2 parameters, the commit 2 groups of 2, 1 parameters: "
    refused(repo, live(made(seed=3, sizes=(1, 2))), wanted)


def test_numbers_of_parameters_in_another_order_are_refused_if_their_param_names_tell(repo: Repository) -> None:
    natively(repo, live(made()))
    model, _ = made(seed=3)
    embed, first, second = model.named_parameters()
    optimizer = torch.optim.AdamW([embed, second, first])
    train(model, optimizer)
    wanted = "optim: .* by numbers, and number 1 would get the state of 'first.weight' in place of that of 'second.weig"
    refused(repo, {"model": model, "optim": optimizer}, wanted)


def test_more_parameters_than_the_commit_has_are_refused(repo: Repository) -> None:
    model, optimizer = made()
    fewer = torch.optim.AdamW(list(model.parameters())[:2])
    train(model, fewer)
    natively(repo, {"model": model, "optim": fewer})
    wanted = "optim: the target has a parameter of the number 2, the commit has 2"
    refused(repo, {"model": model, "optim": optimizer}, wanted)


def test_names_are_refused_where_the_commit_has_numbers_alone(repo: Repository) -> None:
    natively(repo, plain(made()))
    other = made(seed=3)
    for planner in (DefaultLoadPlanner(), DefaultLoadPlanner(allow_partial_load=True)):
        target = {"optim": by_helper(other)["optim"], "model": other[0]}
        wanted = "optim: the target has the parameters by names, the commit by numbers without param_names"
        refused(repo, target, wanted, planner=planner)
    load(live(other), CasStorageReader(repo))
    assert same_training(other, made())


def test_groups_are_not_made_of_the_flat_form(repo: Repository) -> None:
    by_dcp(repo, by_helper(made(), flat=True))
    refused(repo, live(made(seed=3)), "optim.state.0.step: the commit has the flat form of get_optimizer_state_dict")


def test_metadata_lists_each_entry_once_and_knows_the_other_names(repo: Repository) -> None:
    natively(repo, live(made()))
    entries = CasStorageReader(repo).read_metadata().state_dict_metadata
    assert not any(name.startswith("optim.state.0.") for name in entries)
    assert "optim.state.0.exp_avg" in entries and "optim.state.0.nothing" not in entries
    assert entries["optim.state.0.exp_avg"] is entries["optim.state.embed.weight.exp_avg"]
