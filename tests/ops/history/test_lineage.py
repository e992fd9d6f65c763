"""Commits say where their states come from: further parents, typed edges, provenance."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cas_ckpt
from cas_ckpt import Lineage
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import InvalidInputError, NotFoundError, PeerError, UnsupportedValueError
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest, capture_provenance, git_state
from cas_ckpt.ops.history.lineage import LineageStep, lineage_of
from cas_ckpt.ops.history.log import log_commits, show_commit
from cas_ckpt.ops.refs import create_branch
from cas_ckpt.parallel.peers import Peers
from tests.builders import commit, new_repository
from tests.committing import new_store, on
from tests.divided import state_of
from tests.index.building import empty
from tests.thread_peers import run_ranks

ELSEWHERE = "ab" * 32


@pytest.fixture
def repo(tmp_path: Path) -> RepositoryHandle:
    handle = new_repository(tmp_path / "repo")
    commit(handle, {"x": 0}, message="base", branch="base")
    return handle


def test_a_commit_tells_what_it_was_made_from(repo: RepositoryHandle) -> None:
    base = resolve(repo, "base").hex()
    made = commit(
        repo, {"x": 1}, lineage=[Lineage("fine-tune-of", "base", {"data": (1, 2)}), Lineage("merged-from", ELSEWHERE)]
    )
    assert made.lineage == (Lineage("fine-tune-of", base, {"data": (1, 2)}), Lineage("merged-from", ELSEWHERE))
    assert made.parents == ()
    assert list(log_commits(repo)) == [made]
    assert show_commit(repo, "main").commit == made
    empty(repo.index)
    repo.sync()
    assert list(log_commits(repo)) == [made]


def test_a_commit_without_lineage_is_what_it_was(repo: RepositoryHandle) -> None:
    plain = commit(repo, {"x": 1})
    assert (plain.lineage, show_commit(repo, "main").provenance) == ((), None)


def test_further_parents_are_named_by_revisions(repo: RepositoryHandle) -> None:
    commit(repo, {"x": 1})
    head = resolve(repo, "main").hex()
    create_branch(repo, "ft")
    tuned = commit(repo, {"x": 2}, branch="ft")
    merged = commit(repo, {"x": 3}, parents=["ft", "base", "main"])
    assert merged.parents == (head, tuned.id, resolve(repo, "base").hex())


@pytest.mark.parametrize("given", [{"parents": ["nothing"]}, {"parents": [ELSEWHERE]},
                                   {"lineage": [Lineage("fine-tune-of", "nothing")]},
                                   {"lineage": [Lineage("fine-tune-of", ELSEWHERE[:12])]}])  # fmt: skip
def test_what_is_not_here_is_refused_before_anything_is_written(repo: RepositoryHandle, given: dict[str, Any]) -> None:
    packs = list(repo.store.list("packs/"))
    with pytest.raises(NotFoundError):
        commit(repo, {"x": 1}, **given)
    assert list(repo.store.list("packs/")) == packs
    assert list(log_commits(repo)) == []


@pytest.mark.parametrize("given", [
    {"lineage": [Lineage("Fine tune", "base")]}, {"lineage": [("fine-tune-of", "base")]},
    {"lineage": Lineage("a", "b")}, {"parents": "base"}, {"parents": [b"base"]}, {"provenance": "yes"},
])  # fmt: skip
def test_what_cannot_be_lineage_is_refused(repo: RepositoryHandle, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        commit(repo, {"x": 1}, **given)


def test_metadata_that_cannot_be_kept_is_named(repo: RepositoryHandle) -> None:
    with pytest.raises(UnsupportedValueError, match="metadata of merged-from"):
        commit(repo, {"x": 1}, lineage=[Lineage("merged-from", "base", object())])
    with pytest.raises(UnsupportedValueError, match="provenance"):
        commit(repo, {"x": 1}, provenance={"config": object()})


# --- provenance ------------------------------------------------------------------------------


def test_provenance_is_kept_when_it_is_asked_for(repo: RepositoryHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1", "odd\udcff"])
    commit(repo, {"x": 1}, provenance={"data_version": "v3", "config": {"lr": 0.1}})
    found = show_commit(repo, "main").provenance
    assert found["command"] == ["train.py", "--lr", "0.1", "odd\\udcff"]
    assert (found["data_version"], found["config"]) == ("v3", {"lr": 0.1})
    assert (found["python"], found["cas_ckpt"]) == (sys.version.split()[0], cas_ckpt.__version__)
    assert found["torch"].startswith("2.")
    assert set(found) <= {"command", "host", "python", "torch", "cas_ckpt", "git", "data_version", "config"}


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("--api-key=X", "--api-key=***"),
        ("--password Y --lr 0.1", "--password *** --lr 0.1"),
        ("--db.passwd -Y", "--db.passwd ***"),
        ("logger.wandb_api_key=X", "logger.wandb_api_key=***"),
        ("+logger.wandb_api_key=X ++db.password=Y", "+logger.wandb_api_key=*** ++db.password=***"),
        ("--hf_token X", "--hf_token ***"),
        ("--use-token --lr 1", "--use-token --lr 1"),
        ("--run-with sk-proj-0123456789abcdef", "--run-with ***"),
        ("--header Authorization:Bearer\u00a0abcdefghijklmno", "--header Authorization:***"),
        ("--data s3://b/x?token=X", "--data s3://b/x?token=***"),
        ("--tokenizer gpt2 --max-tokens=4096 --num-tokens 5", "--tokenizer gpt2 --max-tokens=4096 --num-tokens 5"),
        ("--keys model token.py sk-small", "--keys model token.py sk-small"),
    ],
)
def test_what_reads_as_a_secret_on_the_command_line_is_not_kept(words: str, kept: str) -> None:
    assert capture_provenance({}, words.split(" "))["command"] == kept.split(" ")


def test_what_the_user_says_goes_over_what_is_found(repo: RepositoryHandle) -> None:
    commit(repo, {"x": 1}, provenance={"host": "secret", "command": None})
    found = show_commit(repo, "main").provenance
    assert (found["host"], found["command"]) == ("secret", None)


def git(folder: Path, *words: str) -> str:
    named = ["git", "-c", "user.name=ann", "-c", "user.email=ann@x", *words]
    return subprocess.run(named, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_the_git_commit_of_a_folder_is_told_and_whether_it_was_changed(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None
    (tmp_path / "train.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": head, "dirty": False}
    (tmp_path / "untracked").write_text("1")
    assert git_state(tmp_path) == {"commit": head, "dirty": False}
    (tmp_path / "train.py").write_text("2")
    assert git_state(tmp_path) == {"commit": head, "dirty": True}


def test_a_machine_without_git_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None


# --- several ranks ---------------------------------------------------------------------------


def on_ranks(size: int, request: dict[str, Any], *, differing: dict[str, Any] | None = None) -> list[Any]:
    store = new_store()
    base = commit(on(store), {"x": 0}, branch="base")

    def work(peers: Peers) -> CommitInfo:
        asked = request | (differing or {} if peers.rank else {})
        given = CommitRequest(**asked)
        return commit_tree(on(store), state_of({"w": 1}, {}, peers.rank), given, peers=peers)

    found = run_ranks(size, work, timeout_s=20, outcomes=True)
    if differing is None:
        assert all(info.parents == (base.id,) for info in found)
        assert all(info.lineage[0].target == base.id for info in found)
        assert show_commit(on(store), "main").provenance["data_version"] == "v3"
    return found


SAID = {"parents": ["base"], "lineage": [Lineage("fine-tune-of", "base")], "provenance": {"data_version": "v3"}}


def test_ranks_say_it_together() -> None:
    infos = on_ranks(3, SAID)
    assert len({info.id for info in infos}) == 1


@pytest.mark.parametrize("differing", [{"parents": ["main"]}, {"lineage": [Lineage("merged-from", "base")]},
                                       {"lineage": []}, {"provenance": True}])  # fmt: skip
def test_ranks_that_say_different_things_are_named(differing: dict[str, Any]) -> None:
    (field,) = differing
    found = on_ranks(2, SAID, differing=differing)
    assert all(isinstance(error, PeerError) and f"disagree on the {field}" in str(error) for error in found)


def test_a_revision_that_rank_0_does_not_find_fails_on_all_ranks() -> None:
    first, second = on_ranks(2, SAID | {"parents": ["nothing"]}, differing={})
    assert isinstance(first, NotFoundError) and isinstance(second, PeerError)


# --- lineage of lineage ----------------------------------------------------------------------


def test_lineage_is_followed_through_edges_and_history(repo: RepositoryHandle) -> None:
    """base <- ft (two commits) <- int8; other has nothing to do with it."""
    base = resolve(repo, "base").hex()
    tuned = commit(repo, {"x": 1}, branch="ft", lineage=[Lineage("fine-tune-of", "base", "v2")])
    commit(repo, {"x": 2}, branch="ft")
    small = commit(
        repo, {"x": 3}, branch="int8", lineage=[Lineage("quantized-from", "ft"), Lineage("calibrated-with", ELSEWHERE)]
    )
    commit(repo, {"x": 4}, branch="other", lineage=[Lineage("fine-tune-of", "ef" * 32)])
    of_small = lineage_of(repo, "int8")
    from_base = LineageStep(tuned.id, "fine-tune-of", base, True, "v2")
    quantized = LineageStep(small.id, "quantized-from", resolve(repo, "ft").hex(), True)
    assert of_small.origins == (quantized, LineageStep(small.id, "calibrated-with", ELSEWHERE, False), from_base)
    assert of_small.descendants == ()
    of_base = lineage_of(repo, "base")
    assert (of_base.origins, of_base.descendants) == ((), (from_base, quantized))
    assert lineage_of(repo, "ft~1").descendants == (quantized,)


def test_names_are_public() -> None:
    assert cas_ckpt.Lineage is Lineage
