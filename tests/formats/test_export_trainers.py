"""A commit of an imported checkpoint comes out as the files that its framework wrote, or a key without one is named."""

from __future__ import annotations

import json
import pickle
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.errors import InvalidInputError, NotFoundError, UnsupportedValueError
from cas_ckpt.objects.structures import EnumValue
from tests.cli.running import call
from tests.formats.dcp_folders import fake_rank, quietly, save_folder
from tests.formats.test_import_trainers import same
from tests.formats.trainer_folders import (
    accelerate_folder,
    deepspeed_folder,
    deepspeeds_classes,
    torch_checkpointing_folder,
    trainer_folder,
)


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    return Repository.init(tmp_path / "repo")


def content(folder: Path) -> dict[str, Any]:
    """What the files in and below a folder hold, by path."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            found[name] = load_file(path)
        elif path.name == "metadata.pkl":
            found[name] = pickle.loads(path.read_bytes())
        elif path.suffix in (".json", ".py", ""):
            found[name] = path.is_file() and path.read_bytes()
        else:
            found[name] = torch.load(path, weights_only=False)
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_of_trainer_comes_out_as_it_went_in(repo: Repository, tmp_path: Path, ranks: int) -> None:
    trainer_folder(tmp_path / "in", ranks=ranks, with_arguments=False)
    imported = repo.import_file(tmp_path / "in")
    info = repo.export(imported, tmp_path / "out", format="trainer", progress=True)
    before, after = content(tmp_path / "in"), content(tmp_path / "out")
    assert same(before, after)
    assert sorted(info.files) == sorted(str(path) for path in (tmp_path / "out").iterdir())
    assert info.total_bytes > sum(tensor.nbytes for tensor in after["model.safetensors"].values())


def test_a_save_of_accelerate_comes_out_as_it_went_in(repo: Repository, tmp_path: Path) -> None:
    accelerate_folder(tmp_path / "in")
    imported = repo.import_file(tmp_path / "in")
    repo.export(imported, tmp_path / "out", format="accelerate")
    assert same(content(tmp_path / "in"), content(tmp_path / "out"))


def test_parts_that_are_chosen_come_out_alone(repo: Repository, tmp_path: Path) -> None:
    trainer_folder(tmp_path / "in", ranks=2, with_arguments=False)
    repo.import_file(tmp_path / "in")
    repo.export("HEAD", tmp_path / "out", format="trainer", keys=["model", "rng/~=1"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors", "rng_state_1.pth"]
    repo.export("HEAD", tmp_path / "groups", format="trainer", keys="optim/param_groups")
    assert [*torch.load(tmp_path / "groups" / "optimizer.pt")] == ["param_groups"]
    repo.export("HEAD", tmp_path / "optimizer", format="trainer", keys="optim")
    assert [path.name for path in (tmp_path / "optimizer").iterdir()] == ["optimizer.pt"]


def test_a_key_that_no_file_is_for_is_named_and_nothing_is_written(repo: Repository, tmp_path: Path) -> None:
    repo.commit({"model": torch.nn.Linear(2, 2), "curve": np.zeros(3)})
    for framework in ("trainer", "accelerate"):
        with pytest.raises(UnsupportedValueError, match=f"curve: a folder of {framework} has no file for it"):
            repo.export("main", tmp_path / "out", format=framework)
    assert not (tmp_path / "out").exists()
    accelerate_folder(tmp_path / "in")
    repo.import_file(tmp_path / "in", onto="main")
    with pytest.raises(UnsupportedValueError, match="custom/~=0: a folder of trainer has no file"):
        repo.export("HEAD", tmp_path / "out", format="trainer")
    with pytest.raises(NotFoundError):
        repo.export("HEAD", tmp_path / "out", format="trainer", keys="nothing")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("state", [{"rng": {0: 1, "0": 2}}, {"rng/0": 1, "rng": {0: 2}}])
def test_two_entries_of_one_file_are_refused(repo: Repository, tmp_path: Path, state: dict[str, Any]) -> None:
    repo.commit(state)
    for framework in ("trainer", "accelerate"):
        with pytest.raises(UnsupportedValueError, match="another entry goes into r"):
            repo.export("main", tmp_path / "out", format=framework)
    assert not (tmp_path / "out").exists()


def test_digits_of_other_scripts_are_no_number_of_a_rank(repo: Repository, tmp_path: Path) -> None:
    repo.commit({"rng": {"٣": 1, "0": 2}})
    with pytest.raises(UnsupportedValueError, match="rng/٣: a folder of trainer has no file"):
        repo.export("main", tmp_path / "out", format="trainer")


def test_a_trainer_that_cannot_be_written_leaves_nothing(repo: Repository, tmp_path: Path) -> None:
    repo.commit({"model": {"a": torch.zeros(2), "b": 7}, "optim": {"lr": 0.1}})
    with pytest.raises(UnsupportedValueError, match="model/b"):
        repo.export("main", tmp_path / "out", format="trainer")
    with pytest.raises(InvalidInputError, match=r"checkpoint\.pt: a checkpoint of trainer is a folder"):
        repo.export("main", tmp_path / "checkpoint.pt", format="trainer", keys="optim")
    repo.commit({"optim": {"lr": 0.1}, "files": {"optimizer.pt": b"mine"}})
    with pytest.raises(InvalidInputError, match=r"files/optimizer\.pt: no file of the folder may be called so"):
        repo.export("main", tmp_path / "out", format="trainer")
    assert [path.name for path in tmp_path.iterdir()] == ["repo"]


def test_the_command_line_writes_them_too(repo: Repository, tmp_path: Path) -> None:
    trainer_folder(tmp_path / "in", with_arguments=False)
    repo.import_file(tmp_path / "in")
    call("-C", str(tmp_path / "repo"), "export", "HEAD", str(tmp_path / "out"), "--format", "trainer")
    assert same(content(tmp_path / "in"), content(tmp_path / "out"))


# --- DeepSpeed, torch_checkpointing, and what saves by DCP ------------------------------------


def test_a_folder_of_deepspeed_comes_out_as_it_went_in_though_its_classes_are_nowhere(
    repo: Repository, tmp_path: Path
) -> None:
    deepspeed_folder(tmp_path / "in")
    imported = repo.import_file(tmp_path / "in")
    assert imported.left_out == ()
    loaded = repo.load(imported)
    assert set(loaded) == {"model_states", "optim_states", "files"}
    assert set(loaded["optim_states"]) == {"bf16_dp_0_mp_00", "bf16_dp_1_mp_00"}
    repo.export(imported, tmp_path / "out", format="deepspeed")
    with deepspeeds_classes():
        before, after = content(tmp_path / "in"), content(tmp_path / "out")
        for rank in range(2):
            name = f"global_step3/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            scalers = [each[name]["optimizer_state_dict"].pop("loss_scaler") for each in (before, after)]
            assert type(scalers[0]) is type(scalers[1]) and vars(scalers[0]) == vars(scalers[1])
        assert same(before, after)


def test_the_folder_of_one_save_of_deepspeed_comes_in_by_its_own_path(repo: Repository, tmp_path: Path) -> None:
    deepspeed_folder(tmp_path / "in")
    repo.import_file(tmp_path / "in" / "global_step3")
    repo.export("main", tmp_path / "out", format="deepspeed")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in (tmp_path / "in" / "global_step3").iterdir()
    }


@pytest.mark.parametrize("framework", ["trainer", "accelerate"])
def test_a_trainer_over_deepspeed_has_both_in_its_folder(repo: Repository, tmp_path: Path, framework: Any) -> None:
    if framework == "trainer":
        trainer_folder(tmp_path / "in", with_arguments=False)
    else:
        accelerate_folder(tmp_path / "in")
    deepspeed_folder(tmp_path / "deepspeed")
    shutil.copytree(tmp_path / "deepspeed", tmp_path / "in", dirs_exist_ok=True)
    strange = [tmp_path / "in" / "global_step3" / "notes.xyz", tmp_path / "in" / "metadata.pkl"]
    for path in strange:
        path.write_text("?")
    imported = repo.import_file(tmp_path / "in")
    assert [each.name for each in imported.left_out] == ["global_step3/notes.xyz", "metadata.pkl"]
    repo.export(imported, tmp_path / "out.ckpt", format=framework)
    for path in strange:
        path.unlink()
    with deepspeeds_classes():
        assert content(tmp_path / "in").keys() == content(tmp_path / "out.ckpt").keys()


def test_an_object_of_another_class_keeps_its_file_out_and_is_named(repo: Repository, tmp_path: Path) -> None:
    deepspeed_folder(tmp_path / "in")
    torch.save({"args": Fraction(1, 3)}, tmp_path / "in" / "global_step3" / "mp_rank_01_model_states.pt")
    imported = repo.import_file(tmp_path / "in")
    ((name, reason),) = [(each.name, each.reason) for each in imported.left_out]
    assert name == "mp_rank_01_model_states.pt" and "fractions.Fraction" in reason
    assert repo.log()[0].meta["left_out"].keys() == {name}


@pytest.mark.parametrize("latest", ["..", "global_step3/..", "nothing", "", "\xff"])
def test_latest_names_nothing_but_a_folder_beside_it(repo: Repository, tmp_path: Path, latest: str) -> None:
    trainer_folder(tmp_path / "in", with_arguments=False)
    deepspeed_folder(tmp_path / "mp")
    shutil.copytree(tmp_path / "mp", tmp_path / "in", dirs_exist_ok=True)
    (tmp_path / "in" / "latest").write_bytes(latest.encode("latin-1"))
    assert [each.name for each in repo.import_file(tmp_path / "in").left_out] == ["global_step3"]
    state = {"model_states": {"mp_00": {"step": 1}}, "files": {"latest": latest.encode("latin-1")}}
    repo.export(
        repo.commit(state, branch="mine", options=CommitOptions(orphan=True)),
        tmp_path / "a" / "out",
        format="deepspeed",
    )
    (folder,) = (tmp_path / "a").iterdir()
    assert folder.name == "out" and (folder / "latest").read_bytes() == latest.encode("latin-1")


def test_a_folder_of_torch_checkpointing_comes_out_as_it_went_in(repo: Repository, tmp_path: Path) -> None:
    torch_checkpointing_folder(tmp_path / "in")
    imported = repo.import_file(tmp_path / "in")
    assert imported.left_out == ()
    assert repo.load(imported)["my_step"] == {"0": 0, "1": 1}
    repo.export(imported, tmp_path / "out", format="torch_checkpointing")
    assert same(content(tmp_path / "in"), content(tmp_path / "out"))


def test_a_part_that_a_rank_had_of_a_dtensor_comes_out_as_it_went_in(repo: Repository, tmp_path: Path) -> None:
    with fake_rank(1, 4):
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        part = DTensor.from_local(torch.randn(3, 2000), mesh, [Shard(0), Replicate()])
        torch.save({"w": part, "again": [part]}, tmp_path / "rank_1.pt")
    repo.export(repo.import_file(tmp_path / "rank_1.pt"), tmp_path / "out.pt")
    local = repo.load("main", keys="w/_local_tensor")["w"]["_local_tensor"]
    with fake_rank(1, 4):
        whole = torch.load(tmp_path / "out.pt", weights_only=False)
        for found in (whole["w"], *whole["again"]):
            assert (
                isinstance(found, DTensor) and found.shape == (6, 2000) and found.placements == (Shard(0), Replicate())
            )
            assert torch.equal(found.to_local(), part.to_local()) and found.device_mesh.mesh_dim_names == ("dp", "tp")
    assert torch.equal(local, part.to_local())


@pytest.mark.parametrize("item", ["../out", "a/b", "\n"])
def test_an_item_whose_name_is_that_of_no_file_is_refused(repo: Repository, tmp_path: Path, item: str) -> None:
    repo.commit({item: {"0": 1}})
    with pytest.raises(UnsupportedValueError, match="has no file for it"):
        repo.export("main", tmp_path / "in" / "out", format="torch_checkpointing")


@pytest.mark.parametrize("item", ["sharding", "files"])
def test_an_item_of_torch_checkpointing_that_is_called_as_what_an_import_puts_there_is_left_out(
    repo: Repository, tmp_path: Path, item: str
) -> None:
    torch_checkpointing_folder(tmp_path / "in")
    torch.save({"w": torch.ones(3)}, tmp_path / "in" / f"{item}_0.pt")
    imported = repo.import_file(tmp_path / "in")
    assert [each.name for each in imported.left_out] == [f"{item}_0.pt"]
    assert "world_size" in repo.load(imported)["sharding"]
    mine = repo.commit(
        {"files": {"0": torch.ones(3)}, "model": {"0": 1}}, branch="mine", options=CommitOptions(orphan=True)
    )
    with pytest.raises(UnsupportedValueError, match="files: holds other things"):
        repo.export(mine, tmp_path / "out", format="torch_checkpointing")


def test_metadata_of_torch_checkpointing_that_unfolds_without_end_is_refused(repo: Repository, tmp_path: Path) -> None:
    torch_checkpointing_folder(tmp_path / "in")
    bomb: list[Any] = [1]
    for _ in range(60):
        bomb = [bomb, bomb]
    (tmp_path / "in" / "metadata.pkl").write_bytes(pickle.dumps(bomb))
    with pytest.raises(InvalidInputError, match=r"metadata\.pkl: .* unfold"):
        repo.import_file(tmp_path / "in")


def test_metadata_of_torch_checkpointing_that_wants_to_run_code_is_left_out(repo: Repository, tmp_path: Path) -> None:
    torch_checkpointing_folder(tmp_path / "in")
    (tmp_path / "in" / "metadata.pkl").write_bytes(pickle.dumps({"evil": Path("/")}, protocol=4))
    assert [each.name for each in repo.import_file(tmp_path / "in").left_out] == ["metadata.pkl"]


def test_what_lightning_has_beside_dcp_is_beside_it_again(repo: Repository, tmp_path: Path) -> None:
    state = {"state_dict": {"w": torch.randn(30, 4)}, "optimizer_0": {"state": {"w": {"step": torch.tensor(3.0)}}}}
    save_folder(tmp_path / "in.ckpt", state)
    meta = {"epoch": 3, "loops": {"fit": {"at": (1, 2)}}}
    torch.save(meta, tmp_path / "in.ckpt" / "meta.pt")
    (tmp_path / "in.ckpt" / "hparams.json").write_text("{}")
    imported = repo.import_file(tmp_path / "in.ckpt")
    info = repo.export(imported, tmp_path / "out.ckpt", format="lightning")
    assert sorted(info.files) == sorted(str(path) for path in (tmp_path / "out.ckpt").iterdir())
    assert torch.load(tmp_path / "out.ckpt" / "meta.pt") == meta
    again = repo.import_file(tmp_path / "out.ckpt", branch="again")
    assert again.root == imported.root
    for name in ("../mine.json", "meta.pt", ".metadata", "__0_0.distcp"):
        bad = repo.commit(
            {"meta": meta, "files": {name: b"x"}},
            branch="b" + name[-5:].replace(".", ""),
            options=CommitOptions(orphan=True),
        )
        with pytest.raises(InvalidInputError, match="no file of the folder may be called so"):
            repo.export(bad, tmp_path / "bad" / "out", format="lightning")


# --- Megatron ---------------------------------------------------------------------------------

MEMBER = EnumValue("megatron.core.enums", "ModelType", 1)


def test_objects_of_megatron_stay_whole_with_tuples_as_keys(repo: Repository, tmp_path: Path) -> None:
    state = {
        "decoder.w": torch.randn(30, 4),
        "o.p/shard_0_1": [{("a", 1): {"n": (1, 2)}, "deep": [torch.ones(3)]}],
        "o.q/shard_0_1": [[1, {"b": {("c",): torch.zeros(2)}}]],
    }
    whole = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    save_folder(tmp_path / "in", state, planner=DefaultSavePlanner(**whole))
    torch.save({"iteration": 3, "groups": [{"lr": 0.1}]}, tmp_path / "in" / "common.pt")
    (tmp_path / "in" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    imported = repo.import_file(tmp_path / "in")
    assert imported.left_out == ()
    repo.export(imported, tmp_path / "out", format="megatron")
    names = [tmp_path / each / "metadata.json" for each in ("in", "out")]
    assert names[0].read_bytes() == names[1].read_bytes()
    assert torch.load(tmp_path / "out" / "common.pt") == torch.load(tmp_path / "in" / "common.pt")
    loaded: dict[str, Any] = {"decoder.w": torch.zeros(30, 4), "o.p/shard_0_1": [], "o.q/shard_0_1": []}
    with quietly():
        dcp.load(loaded, checkpoint_id=tmp_path / "out", planner=DefaultLoadPlanner(**whole), no_dist=True)
    assert same(loaded, state)
    assert repo.import_file(tmp_path / "out", branch="again").root == imported.root
    repo.export(imported, tmp_path / "out.pt", keys="o.*")
    assert same(torch.load(tmp_path / "out.pt"), {key: state[key] for key in state if key[0] == "o"})


def test_what_megatron_does_not_look_for_is_named(repo: Repository, tmp_path: Path) -> None:
    state = {"common": {"kind": MEMBER}, "w": torch.ones(3), "o/shard_0_1": [{"t": torch.ones(1), "kind": MEMBER}]}
    mine = [{"t": torch.ones(1), "kind": EnumValue("mine", "Kind", 1)}]
    for more, reason in (
        ({"rng": {"0": 1}}, "rng: neither a tensor nor an object of Megatron"),
        ({"model": {"w": torch.ones(1)}}, "model: neither"),
        ({"files": {"mine": 7}}, "files: holds other things than files"),
        ({"files": {"common.pt": b""}}, "files/common.pt: no file of the folder may be called so"),
        ({"p/shard_0_1": mine}, "p~1shard_0_1: a value of a class that is not known here"),
    ):
        repo.commit({**state, **more})
        with pytest.raises((UnsupportedValueError, InvalidInputError), match=reason):
            repo.export("main", tmp_path / "out", format="megatron")
    repo.commit({"w": torch.ones(3)})
    with pytest.raises(UnsupportedValueError, match="common: Megatron loads no folder without it"):
        repo.export("main", tmp_path / "out", format="megatron")
    assert not (tmp_path / "out").exists()
    made = repo.commit(state)
    repo.export(made, tmp_path / "out", format="megatron")
    assert json.loads((tmp_path / "out" / "metadata.json").read_bytes())["common_backend"] == "torch"
    (tmp_path / "out" / "metadata.json").unlink()
    assert repo.import_file(tmp_path / "out", branch="again").root == made.root
