"""Checkpoints of Lightning, imported and exported again: a Trainer resumes from what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision

from cas_ckpt import Repository
from tests.formats.test_import_trainers import same
from tests.frameworks.lightning_cases import Net, in_order, trainer_of
from tests.ranks import results, run_processes

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def through_a_repository(before: Path, after: Path, framework: Any = None) -> None:
    with Repository.init(after.parent / "repo") as repo:
        imported = repo.import_file(before)
        assert imported.left_out == imported.renamed == ()
        repo.export(imported, after, format=framework)


def train(folder: Path, resume: Path | None = None, *, seed: int, precision: str) -> dict[str, Any]:
    """Train for three epochs, from the beginning or a checkpoint; the last checkpoint without paths."""
    saves = ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1, filename="{epoch}", monitor="loss")
    stops = EarlyStopping("loss", patience=100, check_on_train_epoch_end=True)
    given: dict[str, Any] = {"max_epochs": 3, "max_steps": -1}
    if precision == "16-mixed":  # by itself Lightning takes no scaler on a CPU
        given["plugins"] = [MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu"))]
    model = Net(seed, {"in": seed})
    model.layers[2] = torch.nn.Identity()
    trainer_of(folder, saves, stops, **given).fit(model, in_order(), ckpt_path=resume)
    last: dict[str, Any] = torch.load(folder / "epoch=2.ckpt", weights_only=False)
    for name, state in last["callbacks"].items():
        if "ModelCheckpoint" in name:
            state.clear()
    del last["hyper_parameters"]
    return last


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_trainer_resumes_exactly_from_an_exported_file(tmp_path: Path, precision: str) -> None:
    whole = train(tmp_path / "whole", seed=1, precision=precision)
    saved, exported = tmp_path / "whole" / "epoch=0.ckpt", tmp_path / "epoch=0.ckpt"
    through_a_repository(saved, exported)
    content = torch.load(exported, weights_only=False)
    assert same(torch.load(saved, weights_only=False), content)
    assert content["hyper_parameters"]["sizes"] == {"in": 1}
    assert ("MixedPrecision" in content) == (precision == "16-mixed")
    assert same(whole, train(tmp_path / "resumed", exported, seed=9, precision=precision))


def test_a_trainer_of_two_ranks_resumes_exactly_from_an_exported_folder_of_shards(tmp_path: Path) -> None:
    case = "tests.frameworks.folders_cases:lightning_shards"
    whole = results(run_processes(2, case, str(tmp_path / "whole"), None, 1))[0]
    saved, exported = tmp_path / "whole" / "epoch=0.ckpt", tmp_path / "epoch=0.ckpt"
    through_a_repository(saved, exported, "lightning")
    assert sorted(path.name for path in exported.iterdir()) == [".metadata", "__0_0.distcp", "meta.pt"]
    resumed = results(run_processes(2, case, str(tmp_path / "resumed"), str(exported), 9))[0]
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
