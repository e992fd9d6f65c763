"""Snapshots by one process: what is taken comes back, as torchsnapshot would have it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cas_ckpt import CkptError, CorruptionError, MismatchError, Repository
from cas_ckpt.torchsnapshot import PendingSnapshot, RNGState, Snapshot, StateDict, Stateful
from cas_ckpt.torchsnapshot.failures import NotInSnapshotError, NotStatefulError
from cas_ckpt.torchsnapshot.manifest import (
    DictEntry,
    ListEntry,
    ObjectEntry,
    PrimitiveEntry,
    TensorEntry,
    is_container_entry,
)
from tests.torchsnapshot.states import same, trained


def test_a_restore_gives_what_was_taken_in_the_same_tensors(tmp_path: Path) -> None:
    taken, other = trained(1, progress=7), trained(2, steps=0)
    Snapshot.take(str(tmp_path / "step-7"), taken)
    weight = other["model"][0].weight
    Snapshot(str(tmp_path / "step-7")).restore(other)
    assert all(same(taken[key], other[key]) for key in taken)
    assert other["model"][0].weight is weight


def test_a_part_of_an_app_state_is_restored_by_itself(tmp_path: Path) -> None:
    taken, other = trained(1), trained(2)
    taken["model.ema"] = StateDict(x=1)  # which "model", as a pattern, would select too
    snapshot = Snapshot.take(str(tmp_path / "one"), taken)
    before = trained(2)
    snapshot.restore({"model": other["model"]})
    assert same(other["model"], taken["model"]) and same(other["optim"], before["optim"])


def test_values_come_back_as_what_they_were(tmp_path: Path) -> None:
    state = StateDict(
        integer=100, number=3.14, text="some", flag=True, data=b"\x00\x10", nothing=None, pair=(1, "a"),
        listed=[1, [2, {"x": None}]], ordered=OrderedDict(b=1, a=torch.ones(2)), numbers=np.arange(3),
    )  # fmt: skip
    state["d/e"], state["[@x]->&y^%"] = 43, {"(z)": 44, 7: torch.zeros(1)}
    other = StateDict(dict.fromkeys(state))
    snapshot = Snapshot.take(str(tmp_path / "one"), {"key": state})
    snapshot.restore({"key": other})
    assert same({**state, "numbers": 0}, {**other, "numbers": 0}) and (other["numbers"] == np.arange(3)).all()
    assert type(other["pair"]) is tuple and [*other["ordered"]] == ["b", "a"]
    assert snapshot.read_object("0/key/[@x]->&y^%25/(z)") == 44
    assert snapshot.read_object("0/key/d%2Fe") == 43


def test_a_state_dict_keeps_what_the_snapshot_has_not(tmp_path: Path) -> None:
    Snapshot.take(str(tmp_path / "one"), {"progress": StateDict(step=3)})
    progress = StateDict(step=0, added=5)
    Snapshot(str(tmp_path / "one")).restore({"progress": progress})
    assert progress == {"step": 3, "added": 5} and progress.data is progress.state_dict()


def test_an_object_is_given_whatever_was_taken_of_it(tmp_path: Path) -> None:
    class Grows(Stateful):
        def __init__(self, items: list[Any]) -> None:
            self.items = items

        def state_dict(self) -> dict[str, Any]:
            return {"items": self.items}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.items = state_dict["items"]

    taken, other = Grows([torch.rand(2), [torch.rand(3)]]), Grows([])
    Snapshot.take(str(tmp_path / "one"), {"grows": taken}).restore({"grows": other})
    assert same(taken, other)


def test_taking_draws_no_random_number_and_a_restore_repeats_them(tmp_path: Path) -> None:
    class Draws(StateDict):
        def state_dict(self) -> dict[str, Any]:
            torch.rand(2)
            return super().state_dict()

        def load_state_dict(self, state_dict: Any) -> None:
            torch.rand(3)

    app_state = {"a": Draws(x=1), "rng": RNGState(), "z": Draws(x=1)}
    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    snapshot = Snapshot.take(str(tmp_path / "one"), app_state)
    assert torch.equal(torch.rand(1), before)
    snapshot.restore(app_state)
    assert torch.equal(torch.rand(1), before)


def test_a_module_must_have_the_names_that_were_taken_unless_not_strict(tmp_path: Path) -> None:
    taken = torch.nn.Sequential(torch.nn.Linear(2, 2))
    snapshot = Snapshot.take(str(tmp_path / "one"), {"model": taken})
    for wrap in (lambda module: module, torch.nn.DataParallel):
        longer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        snapshot = Snapshot.take(str(tmp_path / "one"), {"model": wrap(taken)})
        before = [each.clone() for each in longer.state_dict().values()]
        with pytest.raises(MismatchError, match=r"1\.bias"):
            snapshot.restore({"model": wrap(longer)})
        assert same(before, [*longer.state_dict().values()])
        snapshot.restore({"model": wrap(longer)}, strict=False)
        assert same(longer[0], taken[0]) and same(
            longer[1].state_dict(), dict(zip(("weight", "bias"), before[2:], strict=True))
        )


def test_names_are_those_of_the_state_dicts_wrappers_and_all(tmp_path: Path) -> None:
    snapshot = Snapshot.take(str(tmp_path / "one"), {"model": torch.nn.DataParallel(torch.nn.Linear(2, 3))})
    assert "0/model/module.weight" in snapshot.get_manifest()
    other = torch.nn.DataParallel(torch.nn.Linear(2, 3))
    snapshot.restore({"model": other})
    assert torch.equal(snapshot.read_object("0/model/module.weight"), other.module.weight)


def test_the_manifest_names_all_that_is_there(tmp_path: Path) -> None:
    state = trained(1)
    state["progress"] = StateDict(step=3, loss=0.5, history=[1, {"x": None}], empty={})
    snapshot = Snapshot.take(str(tmp_path / "one"), state)
    manifest = snapshot.get_manifest()
    weight = manifest["0/model/0.weight"]
    assert isinstance(weight, TensorEntry) and (weight.dtype, weight.shape) == ("torch.float32", [4, 3])
    step = manifest["0/progress/step"]
    assert isinstance(step, PrimitiveEntry) and (step.type, step.get_value()) == ("int", 3)
    loss = manifest["0/progress/loss"]
    assert isinstance(loss, PrimitiveEntry) and (loss.get_value(), loss.readable) == (0.5, "0.5")
    assert isinstance(manifest["0/optim/param_groups"], ListEntry)
    assert isinstance(manifest["0/optim/param_groups/0/betas"], ObjectEntry)
    assert isinstance(manifest["0/optim/state"], DictEntry)
    assert manifest["0/optim/param_groups/0/params/3"].get_value() == 3  # type: ignore[attr-defined]
    assert isinstance(manifest["0/progress/history/1/x"], ObjectEntry)
    for path, entry in manifest.items():  # each can be read by its path
        value = snapshot.read_object(path)
        assert is_container_entry(entry) == (type(value) in (dict, list, OrderedDict))
    manifest.clear()
    assert snapshot.get_manifest() and snapshot.metadata.world_size == 1


def test_an_object_is_read_into_a_tensor_that_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = torch.randn(100, 50)
    app_state = {"state": StateDict(foo=42, table=table, nested=[{"t": (torch.ones(2), torch.zeros(2))}])}
    snapshot = Snapshot.take(str(tmp_path / "one"), app_state)
    assert snapshot.read_object("0/state/foo") == snapshot.read_object("0/state/foo", 777) == 42
    for budget in (None, 1, 1000, 1 << 30):
        out = torch.zeros(100, 50)
        assert snapshot.read_object("0/state/table", out, memory_budget_bytes=budget) is out
        assert torch.equal(out, table)
    for budget in (None, 1000, 1 << 30):
        parameter = torch.nn.Parameter(torch.zeros(100, 50))
        assert snapshot.read_object("0/state/table", parameter, memory_budget_bytes=budget) is parameter
        assert torch.equal(parameter, table)
    inner = torch.full((2,), 7.0)
    assert snapshot.read_object("0/state/nested/0/t/1", inner) is inner and not inner.any()
    caplog.set_level(logging.WARNING, "cas_ckpt")
    wrong = torch.zeros(100, 50, dtype=torch.float64)
    assert torch.equal(snapshot.read_object("0/state/table", wrong), table) and not wrong.any()
    assert "cannot be loaded into" in caplog.text


@pytest.mark.parametrize(
    "path",
    [
        "0/state/nothing",
        "state/foo",
        "0",
        "",
        "0/state/foo/deeper",
        "0/nothing",
        "0/state/empty/deeper",
        "0/" + "1" * 5000,
    ],
)
def test_a_path_that_is_not_there_is_an_error_of_both_worlds(tmp_path: Path, path: str) -> None:
    snapshot = Snapshot.take(str(tmp_path / "one"), {"state": StateDict(foo=42, empty={})})
    with pytest.raises(NotInSnapshotError) as raised:
        snapshot.read_object(path)
    assert isinstance(raised.value, CkptError) and isinstance(raised.value, RuntimeError)


def test_the_state_dict_of_one_key_is_read(tmp_path: Path) -> None:
    state = trained(1, progress=3)
    Snapshot.take(str(tmp_path / "one"), state)
    snapshot = Snapshot(str(tmp_path / "one"))
    assert all(same(snapshot.get_state_dict_for_key(key), state[key].state_dict()) for key in ("progress", "optim"))
    assert same(dict(snapshot.get_state_dict_for_key("model")), dict(state["model"].state_dict()))
    with pytest.raises(AssertionError, match="is absent in both manifest and flattened"):
        snapshot.get_state_dict_for_key("nothing")
    with pytest.raises(NotInSnapshotError):
        snapshot.restore({"nothing": StateDict()})


def test_what_is_no_app_state_is_refused(tmp_path: Path) -> None:
    for bad in ({"optim": 1}, {1: StateDict()}, [StateDict()]):
        with pytest.raises(NotStatefulError):
            Snapshot.take(str(tmp_path / "one"), bad)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            Snapshot(str(tmp_path / "one")).restore(bad)  # type: ignore[arg-type]


def test_a_snapshot_that_is_not_there_is_an_error_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(NotInSnapshotError, match="no snapshot"):
        Snapshot(str(tmp_path / "one")).restore({"x": StateDict()})
    assert [*tmp_path.iterdir()] == []


def test_an_asynchronous_snapshot_is_the_state_at_the_call(tmp_path: Path) -> None:
    state = StateDict(t=torch.ones(300_000), step=1)
    pending = Snapshot.async_take(str(tmp_path / "one"), {"state": state})
    state["t"].zero_()
    state["step"] = 2
    snapshot = pending.wait()
    assert isinstance(pending, PendingSnapshot) and pending.done()
    assert snapshot.read_object("0/state/t").all() and snapshot.read_object("0/state/step") == 1
    assert Snapshot(str(tmp_path / "one")).read_object("0/state/step") == 1


def test_an_asynchronous_snapshot_that_fails_says_so_and_the_next_one_works(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("a file, where the snapshot's folder is to be")
    failing = Snapshot.async_take(str(tmp_path / "one"), {"state": StateDict(step=1)})
    with pytest.raises(RuntimeError, match="was not taken") as raised:
        failing.wait()
    assert failing.done() and isinstance(raised.value, CkptError)
    assert (
        Snapshot.async_take(str(tmp_path / "two"), {"state": StateDict(step=2)}).wait().read_object("0/state/step") == 2
    )


def test_a_snapshot_stays_what_it_was_when_another_one_takes_its_path(tmp_path: Path) -> None:
    path = str(tmp_path / "one")
    first = Snapshot.take(path, {"state": StateDict(step=1)})
    second = Snapshot.take(path, {"state": StateDict(other=2)})
    state = StateDict()
    first.restore({"state": state})
    second.restore({"state": state})
    assert state == {"step": 1, "other": 2}
    assert Snapshot(path).get_state_dict_for_key("state") == {"other": 2}


def test_what_only_pickle_can_store_is_refused_unless_allowed(tmp_path: Path) -> None:
    state = StateDict(odd={1.5: complex})
    with pytest.raises(CkptError, match="state/odd"):
        Snapshot.take(str(tmp_path / "one"), {"state": state})
    options = {"allow_pickle": True}
    Snapshot.take(str(tmp_path / "one"), {"state": state}, storage_options=options)
    with pytest.raises(CkptError):
        Snapshot(str(tmp_path / "one")).read_object("0/state/odd")
    assert Snapshot(str(tmp_path / "one"), storage_options=options).read_object("0/state/odd") == {1.5: complex}


def test_tensors_are_prepared_before_they_are_stored(tmp_path: Path) -> None:
    state = StateDict(t=torch.full((3,), 0.5), n=[torch.ones(2)], x=1)
    snapshot = Snapshot.take(
        str(tmp_path / "one"), {"state": state},
        _custom_tensor_prepare_func=lambda path, tensor, _: tensor.half() if path == "state/t" else tensor,
    )  # fmt: skip
    assert snapshot.read_object("0/state/t").dtype == torch.float16 and snapshot.read_object("0/state/n/0").all()


def test_snapshots_of_one_run_follow_one_another(tmp_path: Path) -> None:
    def history(name: str) -> list[str]:
        with Repository.open(tmp_path / ".cas_ckpt") as repo:
            return [commit.message.removeprefix("snapshot ") for commit in repo.log(name)]

    state = {"state": StateDict(step=0)}
    for name in ("a", "b", "c"):
        Snapshot.take(str(tmp_path / name), state)
    assert history("c") == ["c", "b", "a"] == history("main")
    Snapshot(str(tmp_path / "c")).restore(state)  # resumed where it was
    Snapshot.take(str(tmp_path / "d"), state)
    assert history("main") == ["d", "c", "b", "a"]
    Snapshot(str(tmp_path / "b")).restore(state)  # rolled back
    Snapshot.async_take(str(tmp_path / "c2"), state)
    Snapshot.async_take(str(tmp_path / "d2"), state).wait()
    assert history("d2") == ["d2", "c2", "b", "a"] and history("main") == ["d", "c", "b", "a"]


def test_damage_is_found_before_anything_is_touched(tmp_path: Path) -> None:
    state = {"a": StateDict(t=torch.randn(200_000)), "b": StateDict(t=torch.randn(200_000))}
    snapshot = Snapshot.take(str(tmp_path / "one"), state)
    for pack in (tmp_path / ".cas_ckpt" / "packs").rglob("*"):
        if pack.is_file() and pack.stat().st_size > 1_000_000:
            data = bytearray(pack.read_bytes())
            data[len(data) // 2] ^= 1
            pack.chmod(0o600)
            pack.write_bytes(data)
    target = {key: StateDict(t=torch.zeros(200_000)) for key in state}
    with pytest.raises(CorruptionError):
        snapshot.restore(target)
    assert not any(each["t"].any() for each in target.values())
