"""`Repository` does what its methods say, with live training state."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cas_ckpt
from cas_ckpt import CommitOptions, Repository, RNGState, StateDict
from cas_ckpt.errors import (
    ConflictError,
    CorruptionError,
    FrozenChangedError,
    InvalidInputError,
    MismatchError,
    NoRepositoryError,
    NotFoundError,
)


def training(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 20))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optim": optim, "progress": StateDict(step=0), "rng": RNGState()}


def train(state: dict[str, Any]) -> None:
    state["model"](torch.randn(4, 20)).square().mean().backward()
    state["optim"].step()
    state["optim"].zero_grad()
    state["progress"]["step"] += 1


@pytest.mark.slow
def test_training_goes_on_after_a_checkout_as_if_nothing_had_happened(tmp_path: Path) -> None:
    state = training()
    with Repository.init(tmp_path / "repo") as repo:
        train(state)
        middle = repo.commit(state, message="warm-up done", step=1, metrics={"loss": 2.31}, meta={"lr": 0.01})
        train(state)
        end = repo.commit(state, step=2)
        other = training(seed=5)
        weight = other["model"][0].weight
        report = repo.checkout("main~1", into=other)
        assert (report.commit, report.missing, report.unexpected) == (middle, (), ())
        assert other["model"][0].weight is weight
        assert other["progress"]["step"] == 1
        train(other)
        again = repo.commit(other, branch="again")
        assert (again.root, again.stats.num_new_chunks) == (end.root, 0)
        assert end.parents == (middle.id,)


def test_loading_needs_no_template(tmp_path: Path) -> None:
    state = training()
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit(state | {"table": np.arange(6).reshape(2, 3), "note": "hello"})
        loaded = repo.load()
        assert torch.equal(loaded["model"]["0.weight"], state["model"][0].weight)
        assert loaded["table"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert (loaded["note"], loaded["progress"]) == ("hello", {"step": 0})
        assert list(repo.load("main", keys="model/*")) == ["model"]
        with pytest.raises(NotFoundError, match="nothing"):
            repo.load("main", keys=["model/*", "nothing"])


def test_tied_tensors_are_loaded_tied(tmp_path: Path) -> None:
    tied = torch.randn(40, 40)
    with Repository.init(tmp_path / "repo") as repo:
        made = repo.commit({"head": tied, "embed": tied, "small": [tied[0, :2], tied[0, :2]]})
        loaded = repo.load()
        assert loaded["head"] is loaded["embed"]
        assert loaded["small"][0] is loaded["small"][1]
        assert made.stats.num_chunks == 1
        assert repo.show().aliases == (("embed", "head"), ("small/0", "small/1"))


def test_reading_gives_tensors_arrays_values_and_containers(tmp_path: Path) -> None:
    wide = torch.randn(300, 700).to(torch.bfloat16)
    state = {"w": wide, "a": np.arange(10.0), "v": {"x": (1, None)}, "s": torch.eye(3).to_sparse(), "l": "y" * 5000}
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit(state)
        assert torch.equal(repo.read("main", "w"), wide)
        assert torch.equal(repo.read("main", "w", np.s_[10:15, 600:664]), wide[10:15, 600:664])
        assert torch.equal(repo.read("main", "w", np.s_[299:]), wide[299:])
        assert repo.read("main", "a", np.s_[2:5]).tolist() == [2.0, 3.0, 4.0]
        assert repo.read("main", "v/x") == (1, None)
        assert repo.read("main", "v") == {"x": (1, None)}
        assert repo.read("main", "l") == "y" * 5000
        assert torch.equal(repo.read("main", "s").to_dense(), torch.eye(3))


def test_a_region_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"w": torch.zeros(30, 30), "x": 1})
        for region in [30, (0, -31), np.s_[:1, :1, :1], np.s_[::2], [(0, 1)], (None,)]:
            with pytest.raises(InvalidInputError, match="w: "):
                repo.read("main", "w", region)
        with pytest.raises(InvalidInputError, match="x: only tensors"):
            repo.read("main", "x", np.s_[0:1])
        with pytest.raises(NotFoundError, match=r"'w/x' \(w is there\)"):
            repo.read("main", "w/x")


def test_an_entry_is_found_in_a_container_of_many_pages(tmp_path: Path) -> None:
    many = {f"k{number}": torch.tensor(float(number)) for number in range(3000)}
    state = {"many": many, "ints": dict(enumerate("abc"))}
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit(state)
        assert [repo.read("main", f"many/k{number}").item() for number in (0, 7, 1234, 2999)] == [0, 7, 1234, 2999]
        assert repo.read("main", "ints/2") == "c"
        assert repo.entry("main", "many/k5").num_bytes == 4
        for key in ("many/a", "many/k3000", "many/zz", "ints/3"):
            with pytest.raises(NotFoundError, match="is there"):
                repo.read("main", key)


def test_entries_are_listed_with_what_they_are(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # torch means to drop quantized tensors
        quantized = torch.quantize_per_tensor(torch.randn(4, 5), 0.1, 0, torch.qint8)
    sparse = torch.eye(4).to_sparse()
    state = {"t": torch.zeros(2, 3), "s": sparse, "q": quantized, "e": {}, "v": 1.5, "a": np.int8([1])}
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit(state)
        found = {entry.key: (entry.kind, entry.dtype, entry.shape) for entry in repo.ls()}
        assert found == {
            "a": ("array", "int8", (1,)),
            "e": ("dict", None, None),
            "q": ("quantized", "qint8", (4, 5)),
            "s": ("sparse_coo", "float32", (4, 4)),
            "t": ("tensor", "float32", (2, 3)),
            "v": ("value", None, None),
        }
        assert [entry.key for entry in repo.ls("main", ["t", "e"])] == ["e", "t"]
        assert [part.name for part in repo.show().parts] == ["a", "e", "q", "s", "t", "v"]


def test_a_state_that_does_not_fit_is_not_touched(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"w": torch.ones(30, 30), "v": torch.ones(30)})
        target = {"w": torch.zeros(30, 30), "v": torch.zeros(31)}
        with pytest.raises(MismatchError, match="v: "):
            repo.checkout(into=target)
        assert not target["w"].any()


def test_keys_that_one_side_lacks_are_reported_if_they_may(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"w": torch.ones(30, 30), "old": torch.ones(3)})
        target = {"w": torch.zeros(30, 30), "new": torch.zeros(3)}
        with pytest.raises(MismatchError):
            repo.checkout(into=target)
        report = repo.checkout(into=target, strict=False)
        assert (report.missing, report.unexpected) == (("new",), ("old",))
        assert target["w"].all()


def test_frozen_tensors_are_watched_until_a_checkout_changes_them(tmp_path: Path) -> None:
    state = {"base": {"w": torch.randn(300, 300)}, "lora": torch.randn(40, 40)}
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"base": {"w": torch.randn(300, 300)}, "lora": torch.randn(40, 40)})
        repo.commit(state, frozen="base/**")
        state["lora"] += 1
        repo.commit(state, frozen="base/**", options=CommitOptions(frozen_audit=0))
        state["base"]["w"] += 1
        with pytest.raises(FrozenChangedError, match="base/w"):
            repo.commit(state, frozen="base/**")
        repo.checkout("main~2", into=state)
        assert repo.commit(state, frozen="base/**", branch="back").root == repo.log()[-1].root


def test_two_objects_on_one_repository_see_each_other(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as ours, Repository.open(tmp_path / "repo") as theirs:
        first = ours.commit({"x": 1})
        second = theirs.commit({"x": 2})
        assert second.parents == (first.id,)
        assert [info.id for info in ours.log()] == [second.id, first.id]
        assert ours.commit({"x": 3}).parents == (second.id,)


class Meddler:
    """Progress that lets somebody else commit in the middle of a commit."""

    def __init__(self, other: Repository) -> None:
        self.other = other

    def start(self, phase: str, total_bytes: int | None) -> None:
        self.other.commit({"x": "meanwhile"})

    def advance(self, num_bytes: int) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""


def test_a_commit_goes_on_top_of_what_came_meanwhile_or_raises_as_it_is_told(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo, Repository.open(tmp_path / "repo") as other:
        repo.commit({"x": 1})
        with pytest.raises(ConflictError, match="'main' moved"):
            repo.commit({"x": 2}, options=CommitOptions(on_conflict="raise"), progress=Meddler(other))
        assert [info.stats.num_entries for info in repo.log()] == [1, 1]
        made = repo.commit({"x": 2}, progress=Meddler(other))
        assert made.parents == (other.resolve("main~1"),)
        assert other.load("main~1") == {"x": "meanwhile"}


def test_a_repository_in_memory_is_shared_by_name() -> None:
    made = Repository.init("memory://face").commit({"w": torch.ones(50, 50)})
    with Repository.open("memory://face") as again:
        assert again.resolve("HEAD") == made.id
        assert again.load()["w"].all()
        assert again.stats().num_commits == 1


def test_opening_what_is_no_repository_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoRepositoryError, match=r"Repository\.init"):
        Repository.open(tmp_path)
    (tmp_path / "there.txt").write_text("x")
    with pytest.raises(ConflictError, match="not an empty folder"):
        Repository.init(tmp_path)


def test_the_index_can_be_made_anew_at_any_time(tmp_path: Path) -> None:
    state = training()
    with Repository.init(tmp_path / "repo") as repo:
        for _ in range(3):
            train(state)
            repo.commit(state)
        before = repo.log(), repo.stats(), repo.du("commit")
        report = repo.rebuild_index()
        assert (report.damaged, report.stats.num_commits) == ((), 3)
        assert (repo.log(), repo.stats(), repo.du("commit")) == before
        assert repo.commit(state).stats.num_new_chunks == 0


def test_a_lost_index_comes_back_by_itself(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        made = repo.commit({"w": torch.ones(50, 50)})
    for file in (tmp_path / "repo" / "index").iterdir():
        file.unlink()
    with Repository.open(tmp_path / "repo") as repo:
        assert repo.log() == [made]
        assert repo.load()["w"].all()


def test_a_damaged_index_says_what_to_do(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"w": torch.ones(50, 50)})
    index = tmp_path / "repo" / "index" / "index.sqlite"
    index.write_bytes(b"garbage" * 1000)
    with pytest.raises(CorruptionError, match="cas-ckpt index rebuild"):
        Repository.open(tmp_path / "repo")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("index", ["whole", "lost", "behind"])
def test_a_repository_that_is_only_read_is_not_written(tmp_path: Path, index: str) -> None:
    place = tmp_path / "repo"
    with Repository.init(place) as repo:
        repo.commit({"w": torch.ones(50, 50)})
    if index == "lost":
        for file in (place / "index").iterdir():
            file.unlink()
    if index == "behind":
        with Repository.open(place, index_url=str(tmp_path / "elsewhere.sqlite")) as other:
            other.commit({"w": torch.zeros(50, 50)})
    before = files_of(place)
    with Repository.open(place, read_only=True) as repo:
        newest = repo.log()[0]
        assert repo.load(newest.id[:8])["w"].all().item() is (index != "behind")
        assert (repo.stats().num_packs, len(repo.du())) == ((4, 2) if index == "behind" else (2, 1))
        assert repo.show().commit == newest
    assert {path: data for path, data in files_of(place).items() if not path.endswith(("-wal", "-shm"))} == before


def test_public_names_are_these() -> None:
    errors = {name for name in cas_ckpt.__all__ if name.endswith("Error")}
    assert set(cas_ckpt.__all__) - errors == {
        "CheckoutReport", "CommitInfo", "CommitOptions", "CommitStats", "Event", "Head", "ImportInfo", "ImportOptions",
        "KeyMap", "LeftOut", "Lineage", "Named", "PendingCommit", "PerRank",
        "Policy", "RNGState", "Repository", "RetentionHook", "StateDict", "Trust", "__version__",
        "limits", "on_event", "register_type", "trusted_hosts",
    }  # fmt: skip
    assert errors == {name for name in vars(cas_ckpt.errors) if name.endswith("Error")}
    assert all(getattr(cas_ckpt, name) is not None for name in cas_ckpt.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        cas_ckpt.nothing  # noqa: B018


def test_every_method_says_what_it_does() -> None:
    """Which ones there are, docs/reference.md says (tests/docs/test_reference.py)."""
    assert all(getattr(Repository, name).__doc__ for name in dir(Repository) if not name.startswith("_"))


@pytest.mark.slow
def test_the_log_is_read_without_torch(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"x": 1}, message="one")
    script = (
        "import sys; from cas_ckpt import Repository\n"
        f"repo = Repository.open({str(tmp_path / 'repo')!r})\n"
        "assert [info.message for info in repo.log()] == ['one']\n"
        "assert repo.branches() and repo.ls() and repo.show() and repo.stats() and repo.du('tensor') == []\n"
        "print([name for name in ('torch', 'alembic', 'rich', 'hypothesis') if name in sys.modules])"
    )
    root = str(Path(cas_ckpt.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.slow
def test_a_first_checkout_imports_nothing_that_the_opening_has_not(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"model": torch.nn.Linear(4, 4), "rows": torch.rand(300, 70), "text": "x" * 5000})
    script = (
        "import sys, torch; from cas_ckpt import Repository\n"
        f"repo = Repository.open({str(tmp_path / 'repo')!r})\n"
        "state = {'model': torch.nn.Linear(4, 4), 'rows': torch.rand(300, 70), 'text': ''}; before = set(sys.modules)\n"
        "repo.checkout('main', into=state)\n"
        "print(len(state['text']), sorted(each for each in set(sys.modules) - before if not each.startswith('enc')))"
    )
    root = str(Path(cas_ckpt.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("5000 []\n", "")


def test_what_is_shown_is_as_python_would_write_it(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo", group=None) as repo:
        repo.commit({"w": 1})
        assert "branches=('main',)" in repr(repo.show("main"))
        with pytest.raises(TypeError, match=r"^Repository\.checkout\(\) missing"):
            repo.checkout("main")  # type: ignore[call-arg]
    assert [name for name in dir(cas_ckpt) if not name.startswith("__")] == sorted(
        set(cas_ckpt.__all__) - {"__version__"}
    )
