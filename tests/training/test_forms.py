"""What of a state is not in its root and comes back all the same: how tensors lie in memory, versions of modules."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from cas_ckpt import MismatchError, PerRank, Repository, StateDict
from cas_ckpt.core.records import commit_of
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.layouts import LayoutObject, decode_layout
from cas_ckpt.parallel.peers import Peers
from tests.thread_peers import run_ranks

NUMBERS = itertools.count()


class Doubling(torch.nn.Module):
    """A module whose version 1 stored half of its weight."""

    _version = 2

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((300,), value))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, local: Mapping[str, Any], *rest: Any) -> None:
        if local.get("version") is not None and local["version"] < 2:
            state[prefix + "weight"] = state[prefix + "weight"] * 2
        super()._load_from_state_dict(state, prefix, local, *rest)


class Old(Doubling):
    """The same before its version 2."""

    _version = 1


def repository() -> Repository:
    return Repository.init(f"memory://forms-{next(NUMBERS)}", group=None)


def conv_net(*, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8, generator=generator)).square().sum().backward()
        optimizer.step()


def test_a_fresh_fused_optimizer_of_channels_last_weights_goes_on_as_if_nothing_had_happened() -> None:
    model, optimizer = conv_net(steps=3)
    with repository() as repo:
        repo.commit({"model": model, "optim": optimizer})
        train(model, optimizer, 5)
        other, fresh = conv_net(steps=0)
        repo.checkout("main", into={"model": other, "optim": fresh})
    assert fresh.state[other.weight]["exp_avg"].stride() == other.weight.stride() == (27, 1, 9, 3)
    train(other, fresh, 5)
    assert torch.equal(other.weight, model.weight)


def test_state_that_was_contiguous_when_its_parameter_was_too_lies_as_the_parameter_does_now() -> None:
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 8, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    train(model, optimizer, 2)
    with repository() as repo:
        repo.commit({"model": model, "optim": optimizer})
        other, fresh = conv_net(steps=0)
        repo.checkout("main", into={"model": other, "optim": fresh})
    assert fresh.state[other.weight]["exp_avg"].stride() == (27, 1, 9, 3)


def test_state_of_a_parameter_that_was_channels_last_lies_as_a_contiguous_one_does_now() -> None:
    model, optimizer = conv_net(steps=2)
    with repository() as repo:
        repo.commit({"model": model, "optim": optimizer})
        other = torch.nn.Conv2d(3, 8, 3)
        fresh = torch.optim.AdamW(other.parameters(), lr=0.1, fused=True)
        repo.checkout("main", into={"model": other, "optim": fresh})
    assert fresh.state[other.weight]["exp_avg"].stride() == other.weight.stride() == (27, 9, 3, 1)
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


TENSORS = {
    "channels last": torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one channel": torch.arange(640.0).view(2, 1, 16, 20).to(memory_format=torch.channels_last),
    "transposed": torch.arange(600.0).view(20, 30).t(),
    "small": torch.arange(6).view(2, 3).t(),
    "bfloat16": torch.arange(600.0).view(20, 30).bfloat16().t(),
    "plain": torch.arange(600.0).view(20, 30),
}


def test_new_tensors_lie_in_memory_as_the_committed_ones_did() -> None:
    state = {"loose": dict(TENSORS), "listed": [TENSORS["transposed"], {"x": TENSORS["small"]}]}
    with repository() as repo:
        made = repo.commit(state)
        loaded = repo.load("main")
        holder = StateDict()
        repo.checkout("main", into={"loose": holder, "listed": state["listed"]})
        plain = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
        assert repo.commit({"loose": plain, "listed": state["listed"]}).root == made.root
    for name, tensor in TENSORS.items():
        assert loaded["loose"][name].stride() == holder[name].stride() == tensor.stride(), name
        assert torch.equal(loaded["loose"][name], tensor)
        assert torch.equal(holder[name], tensor)
    assert loaded["listed"][0].stride() == (1, 30)
    assert loaded["listed"][1]["x"].stride() == (1, 3)


def test_views_with_gaps_keep_the_order_of_their_dimensions_alone() -> None:
    with repository() as repo:
        repo.commit({"w": torch.arange(1200.0).view(20, 60)[:, ::2].t(), "one": torch.ones(1).expand(300)})
        loaded = repo.load("main")
    assert loaded["w"].stride() == (1, 30)
    assert loaded["one"].stride() == (1,)


@pytest.mark.parametrize("asynchronous", ["no", "thread", "process"])
def test_a_module_is_given_the_version_that_its_state_was_of(asynchronous: str, tmp_path: Path) -> None:
    with Repository.init(tmp_path / "ckpts", group=None) as repo:
        if asynchronous == "no":
            repo.commit({"model": torch.nn.Sequential(Old(1.0))})
        else:
            repo.commit_async({"model": torch.nn.Sequential(Old(1.0))}, worker=asynchronous).result(timeout_s=60)
        model = torch.nn.Sequential(Doubling())
        repo.checkout("main", into={"model": model})
        assert model[0].weight[0] == 2.0  # it was of version 1
        repo.commit({"model": model})
        repo.checkout("main", into={"model": model})
        assert model[0].weight[0] == 2.0  # it is of version 2 now


def test_a_wrapped_module_too() -> None:
    with repository() as repo:
        repo.commit({"model": torch.nn.DataParallel(Old(1.0))})
        for model in (torch.nn.DataParallel(Doubling()), Doubling()):
            repo.checkout("main", into={"model": model})
            assert next(model.parameters())[0] == 2.0


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize(("keys", "doubled"), [("**", {"", "0", "1"}), ("model/0.*", {"0"}), ("model/weight", {""})])
def test_a_module_of_which_nothing_is_restored_keeps_its_version(keys: str, doubled: set[str], version: int) -> None:
    class Older(Doubling):
        _version = version

    def nested(kind: type[Doubling]) -> torch.nn.Module:
        model = kind(1.0)
        for name in ("0", "1"):
            model.add_module(name, kind(1.0))
        return model

    model = nested(Doubling)
    with repository() as repo:
        repo.commit({"model": nested(Older)})
        repo.checkout("main", into={"model": model}, keys=keys)
    assert {name for name, each in model.named_modules() if each.weight[0] == 2.0} == doubled


def sequence(part: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.ReLU(), part)


WRAPPED: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "in it": lambda part: sequence(checkpoint_wrapper(part)),
    "around it": lambda part: checkpoint_wrapper(sequence(part)),
    "compiled": lambda part: torch.compile(sequence(part)),
    "both": lambda part: torch.compile(sequence(checkpoint_wrapper(part))),
    "no wrapper": lambda part: torch.nn.ModuleDict({"module": sequence(part)}),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # of torch.compile
@pytest.mark.parametrize("of", [lambda model: model, get_model_state_dict], ids=["module", "get_model_state_dict"])
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_wrappers_that_are_in_no_key_are_in_no_name_of_a_version(wrapped: str, of: Callable[[Any], Any]) -> None:
    """Neither are those that `get_model_state_dict` leaves out of the keys."""
    make = WRAPPED[wrapped]
    bare = make if wrapped == "no wrapper" else sequence
    with repository() as repo:
        for saved in (Old(1.0), Doubling(2.0)):
            repo.commit({"model": of(make(saved))})
            for target in (make(Doubling()), bare(Doubling())):
                repo.checkout("main", into={"model": target})
                assert next(target.parameters())[0] == 2.0
            target = bare(Doubling())
            target.load_state_dict(repo.load("main")["model"])
            assert next(target.parameters())[0] == 2.0


def test_ranks_say_of_their_own_modules_and_tensors_what_they_were(tmp_path: Path) -> None:
    Repository.init(tmp_path, group=None).close()

    def work(peers: Peers) -> tuple[float, tuple[int, ...]]:
        with Repository.open(tmp_path, group=peers) as repo:
            stage = torch.nn.ModuleDict({f"stage{peers.rank}": Old(1.0)})
            own = {"w": torch.arange(600.0).view(20, 30).t(), "m": Old(1.0)}
            repo.commit({"model": stage, "own": PerRank(own), "w": own["w"]})
            target = torch.nn.ModuleDict({f"stage{peers.rank}": Doubling()})
            mine = PerRank({"w": torch.ones(30, 20), "m": Doubling()})
            repo.checkout("main", into={"model": target, "own": mine, "w": torch.ones(30, 20)})
            assert mine.value["m"].weight[0] == 2.0
            peers.gather_all(b"")
            return next(target.parameters())[0].item(), repo.load("main")["own"][peers.rank]["w"].stride()

    assert run_ranks(2, work, timeout_s=30) == [(2.0, (1, 30))] * 2


def test_what_is_loaded_or_exported_has_the_versions_of_its_modules(tmp_path: Path) -> None:
    with repository() as repo:
        repo.commit({"old": Old(1.0), "new": Doubling(2.0)})
        loaded = repo.load("main")
        repo.export("main", tmp_path / "state.pt")
        live = {"old": Doubling().state_dict(), "new": Doubling().state_dict()}
        repo.checkout("main", into=live)
    for state in (loaded, torch.load(tmp_path / "state.pt", weights_only=True), live):
        for name in ("old", "new"):
            model = Doubling()
            model.load_state_dict(state[name])
            assert model.weight[0] == 2.0


@pytest.mark.parametrize("saved", ["alone", "with arrays", "legacy", "part", "folder"])
def test_an_imported_state_has_the_versions_of_its_modules(saved: str, tmp_path: Path) -> None:
    state, place = torch.nn.Sequential(Old(1.0), torch.nn.BatchNorm1d(3)).state_dict(), tmp_path / "state.pt"
    key, prefix = "model", ""
    if saved == "alone":
        torch.save(state, place)
        prefix = key
    elif saved == "with arrays":  # which torch does not load as weights
        torch.save({"model": state, "loss": np.ones(2)}, place)
    elif saved == "legacy":
        torch.save({"model": state}, place, _use_new_zipfile_serialization=False)
    else:
        place = tmp_path / "folder"
        place.mkdir()
        torch.save(state, place / "pytorch_model.bin")
        torch.save(state, place / "pytorch_model_1.bin")
        key = "model_1" if saved == "part" else key
    model = torch.nn.Sequential(Doubling(), torch.nn.BatchNorm1d(3))
    with repository() as repo:
        imported = repo.import_file(place, prefix=prefix)
        loaded = repo.load("main", keys=key)[key]
        repo.export("main", tmp_path / "again.pt", keys=key)
        repo.checkout("main", into={key: model}, keys=key)
        assert model[0].weight[0] == 2.0
        # The content is that of a state without versions.
        content = repo.load("main") | {key: dict(loaded)}
        assert repo.commit(content, branch="plain").root == imported.root
        repo.commit({key: model}, branch="new")
        repo.checkout("new", into={key: model})
        assert model[0].weight[0] == 2.0  # once
    for read in (loaded, torch.load(tmp_path / "again.pt", weights_only=True)[key]):
        assert dict(read._metadata) == dict(state._metadata)


def test_the_shards_of_an_imported_folder_have_the_versions_of_their_modules(tmp_path: Path) -> None:
    shards = {f"pytorch_model-0000{number}-of-00002.bin": Old(1.0).state_dict(prefix=f"{number}.") for number in (1, 2)}
    for name, state in shards.items():
        torch.save(state, tmp_path / name)
    where = {key: name for name, state in shards.items() for key in state}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    model = torch.nn.ModuleDict({"1": Doubling(), "2": Doubling()})
    with repository() as repo:
        repo.import_file(tmp_path)
        repo.checkout("main", into={"model": model})
    assert [each.weight[0] for each in model.values()] == [2.0, 2.0]


def test_what_is_loaded_commits_to_the_same_root_and_layout() -> None:
    with repository() as repo:
        first = repo.commit({"model": torch.nn.BatchNorm1d(3), "w": torch.arange(600.0).view(20, 30).t()})
        again = repo.commit(repo.load("main"))
        assert again.root == first.root
        assert (
            layout_of(repo, "main")
            == layout_of(repo, "main~1")
            == LayoutObject(orders={"w": (1, 0)}, versions={"model": {"": 2}})
        )


def test_a_commit_that_says_nothing_of_versions_is_restored_as_it_was_before() -> None:
    with repository() as repo:
        repo.commit({"model": dict(Old(1.0).state_dict())})
        model = Doubling()
        repo.checkout("main", into={"model": model})
        assert model.weight[0] == 1.0
        assert type(repo.load("main")["model"]) is dict


def layout_of(repo: Repository, revision: str) -> LayoutObject:
    row = commit_of(repo._handle, Digest(bytes.fromhex(repo.resolve(revision))))
    return decode_layout(repo._handle.read_node(ObjectKind.LAYOUT, Digest(row.layout or b"")))


class Reshaping(Doubling):
    """A module whose version 1 stored its weight as a column; refuses what is neither."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, local: Mapping[str, Any], *rest: Any) -> None:
        if local.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"].flatten()
        super()._load_from_state_dict(state, prefix, {"version": 2}, *rest)


class Column(torch.nn.Module):
    """`Reshaping` before its version 2."""

    def __init__(self, rows: int = 300) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(rows, 1))


def prepared(*, steps: int) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4)).train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    model = torch.ao.quantization.prepare_qat(model)
    for _ in range(steps):
        model(torch.ones(2, 3))
    return model


@pytest.mark.filterwarnings("ignore:.*(deprecated|reduce_range)")
@pytest.mark.parametrize("wrap", [lambda model: model, torch.nn.DataParallel], ids=["bare", "wrapped"])
def test_observers_of_quantization_take_the_shapes_that_a_trained_model_has(wrap: Any) -> None:
    trained, fresh = prepared(steps=1), prepared(steps=0)
    assert fresh[0].weight_fake_quant.scale.shape != trained[0].weight_fake_quant.scale.shape
    with repository() as repo:
        committed = repo.commit({"model": trained})
        repo.checkout(into={"model": wrap(fresh)})
        assert repo.commit({"model": fresh}).root == committed.root
        repo.checkout(into={"model": fresh})


def test_a_module_that_reshapes_what_an_earlier_version_saved_takes_it() -> None:
    target = {"model": torch.nn.ModuleDict({"old": Reshaping()})}
    with repository() as repo:
        repo.commit({"model": torch.nn.ModuleDict({"old": Column()})})
        repo.checkout(into=target)
    assert target["model"]["old"].weight.sum() == 300


class Migrating(Doubling):
    """A module whose version 1 stored its weight as a column; as torch has it, a state of no version is its own."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, local: Mapping[str, Any], *rest: Any) -> None:
        if local["version"] < 2:
            state[prefix + "weight"] = state[prefix + "weight"].flatten()
        torch.nn.Module._load_from_state_dict(self, state, prefix, local, *rest)


@pytest.mark.parametrize(
    ("stored", "target"),
    [
        (Column(299), Reshaping()),
        (torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(4)),
        (dict(Column().state_dict()), Migrating()),
    ],
    ids=["another size", "BatchNorm", "without a version"],
)
def test_a_module_that_loads_in_its_own_way_and_does_not_take_the_shape_is_refused_before_anything_is_touched(
    stored: Any, target: torch.nn.Module
) -> None:
    other = torch.zeros(2)
    before = {name: each.clone() for name, each in target.state_dict().items()}
    with repository() as repo:
        repo.commit({"model": stored, "other": torch.ones(2)})
        with pytest.raises(MismatchError, match="give the target that shape"):
            repo.checkout(into={"model": target, "other": other})
    assert other.sum() == 0
    assert all(torch.equal(each, before[name]) for name, each in target.state_dict().items())
