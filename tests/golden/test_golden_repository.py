"""A repository of format 1, made once and frozen, is read by every later version."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.core.packs import read_directory
from cas_ckpt.objects.digest import ObjectKind
from cas_ckpt.storage.file import FileStore
from tests.golden import make_repository_v1
from tests.golden.manifest import described

HERE = Path(__file__).parent
MANIFEST: dict[str, Any] = json.loads((HERE / "repository-v1.json").read_text())
COMMITS: dict[str, Any] = MANIFEST["commits"]

ROOTS_WITH_LONGER_LEAVES = {
    "one chunk changed": "8ee01ed558ab20fdd1065583b2c031676cf4747d9c6ef2f54f79d427f5ba92e5",
    "all encodings": "751d2bbb905a2a2ffd4e508d50f0f034761d52563f68feaf4c1458b1e2e7d156",
    "on the side": "4883230315c4f4adb87c768950171382c754c78a23d6bcf4a143fa009d278e6b",
}
"""The repository was made when leaves had 64 KiB at most. It is read as it is, since each tensor says what its leaves
are; states with longer tensors have these roots now that leaves have up to 128 KiB (docs/decisions/012-leaves.md)."""


def unpacked(folder: Path, *, index: bool) -> Path:
    path = folder / "repo"
    with zipfile.ZipFile(HERE / "repository-v1.zip") as archive:
        archive.extractall(path)
    if not index:
        (path / INDEX_PATH).unlink()
    return path


@pytest.fixture(params=["with its index", "without an index"])
def repo(tmp_path: Path, request: pytest.FixtureRequest) -> Repository:
    return Repository.open(unpacked(tmp_path, index=request.param == "with its index"))


def commit_called(message: str) -> str:
    return next(commit for commit, told in COMMITS.items() if told["message"] == message)


def test_names_and_history_are_what_they_were(repo: Repository) -> None:
    assert (repo.default_branch, repo.branches(), repo.tags()) == (
        MANIFEST["default_branch"], MANIFEST["branches"], MANIFEST["tags"],
    )  # fmt: skip
    for name, ids in MANIFEST["log"].items():
        assert [info.id for info in repo.log(name)] == ids
    assert repo.resolve("trunk~2") == MANIFEST["tags"]["v1"]
    assert {info.id for info in repo.log(all_refs=True)} == set(COMMITS)


def test_every_commit_says_what_it_said(repo: Repository) -> None:
    infos = repo.log(all_refs=True)
    assert len(infos) == len(COMMITS) > 3
    for info in infos:
        told = COMMITS[info.id]
        assert (info.root, list(info.parents), info.message) == (told["root"], told["parents"], told["message"])
        assert (info.author, round(info.time_s * 1e6), info.step) == (told["author"], told["time_us"], told["step"])
        assert (dict(info.metrics), repr(info.meta)) == (told["metrics"], told["meta"])


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.ao.quantization", "ignore:.*uantiz")
def test_every_entry_of_every_commit_is_what_it_was(repo: Repository) -> None:
    for commit, told in COMMITS.items():
        assert described(repo.load(commit)) == told["entries"]


def test_tied_tensors_are_tied_still(repo: Repository) -> None:
    tied = repo.load("trunk~3", keys="tied")["tied"]
    assert tied["a"] is tied["b"] is tied["list"][0] is tied["list"][1][1]["deep"]


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.ao.quantization", "ignore:.*uantiz")
def test_an_old_state_committed_today_has_its_old_root_and_stores_nothing(repo: Repository) -> None:
    for number, (commit, told) in enumerate(COMMITS.items()):
        info = repo.commit(repo.load(commit), branch=f"again-{number}", options=CommitOptions(orphan=True))
        root = ROOTS_WITH_LONGER_LEAVES.get(told["message"])
        assert info.root == root or (root is None and (info.root, info.stats.num_new_chunks) == (told["root"], 0))


def test_the_states_that_were_committed_have_these_roots_today() -> None:
    repo = Repository.init("memory://golden")
    # Until optimizers were stored by names, a model was an OrderedDict and its optimizer had numbers.
    given = make_repository_v1.live(make_repository_v1.model(3))
    made = {message: repo.commit(state, branch="b").root for message, state in {
        "all encodings": make_repository_v1.encoded(1), "a model": given, "all kinds": make_repository_v1.kinds(),
    }.items()}  # fmt: skip
    roots = {message: COMMITS[commit_called(message)]["root"] for message in made}
    assert made == roots | {message: root for message, root in ROOTS_WITH_LONGER_LEAVES.items() if message in made}


def test_a_model_and_its_optimizer_by_names_have_this_root() -> None:
    root = Repository.init("memory://golden-names").commit(make_repository_v1.model(3)).root
    assert root == "ef35d0672cad3a72b23ea38177227d02f86bd46940ab567ddb582ab840c964b5"


def test_history_goes_on_where_it_ended(repo: Repository) -> None:
    state = {"w": torch.ones(2000), "step": 9}
    info = repo.commit(state, step=9)
    assert info.parents == (MANIFEST["branches"]["trunk"],)
    assert len(repo.log()) == len(MANIFEST["log"]["trunk"]) + 1
    again = Repository.open(repo.url)
    assert torch.equal(again.load()["w"], state["w"])
    repo.branch("gone", start="trunk~1")
    assert again.branches()["gone"] == MANIFEST["branches"]["trunk"]


def test_an_old_state_is_checked_out_in_place(repo: Repository) -> None:
    into = make_repository_v1.model(0)
    before = list(into["model"].parameters())
    with torch.no_grad():
        for parameter in before:
            parameter.zero_()
    repo.checkout(commit_called("a model"), into=into)
    assert described(make_repository_v1.live(into)) == COMMITS[commit_called("a model")]["entries"]
    assert all(now is then for now, then in zip(into["model"].parameters(), before, strict=True))


def test_the_frozen_repository_has_an_example_of_everything(tmp_path: Path) -> None:
    store = FileStore(unpacked(tmp_path, index=False))
    infos = [info for key, _ in store.list("packs/") for info in read_directory(store, key)[1]]
    assert {info.kind for info in infos} == set(ObjectKind) - {ObjectKind.CHUNK_PAGE}  # that needs a gigabyte
    assert {info.encoding for info in infos} == {0, 1, 2, 3, 4}, "the encodings of format 1 when it was frozen"


def test_the_frozen_repository_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "repository-v1.zip").write_bytes(b"frozen")
    with pytest.raises(SystemExit, match="never replaced"):
        make_repository_v1.main(tmp_path)
    assert (tmp_path / "repository-v1.zip").read_bytes() == b"frozen"
