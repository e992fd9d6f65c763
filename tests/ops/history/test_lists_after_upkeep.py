"""What lists say from rows is what the nodes say, whatever was done to the packs in between."""

from __future__ import annotations

import warnings
from itertools import count
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings

from cas_ckpt import Repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import load_tree
from cas_ckpt.index.rows import ListedEntry
from cas_ckpt.objects.digest import Digest
from tests.index.tree_states import listed
from tests.properties.states import states
from tests.searches import tries

_NUMBERS = count()


def by_nodes(handle: RepositoryHandle, root: str) -> list[ListedEntry]:
    """The list of a state, made by reading its nodes."""
    return listed(load_tree(handle, Digest(bytes.fromhex(root))))


@settings(max_examples=tries(10, 25), deadline=None, suppress_health_check=list(HealthCheck))
@given(state=states())
def test_any_training_state_is_listed_as_its_nodes_say(state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Repository.init(f"memory://listed-{next(_NUMBERS)}") as repo:
            commit = repo.commit(state)
            every = repo.ls()
            assert every == by_nodes(repo._handle, commit.root)
            for entry in every[:5]:
                assert repo.entry("main", entry.key) == entry
                assert repo.ls("main", entry.key) == listed(_tree(repo, commit.root), entry.key)


def _tree(repo: Repository, root: str) -> Any:
    return load_tree(repo._handle, Digest(bytes.fromhex(root)))


def test_lists_stay_what_they_are_through_gc_repack_and_rebuild(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        shared = {f"layers.{at}.weight": torch.full((400,), float(at)) for at in range(400)}
        for step in range(6):
            shared = shared | {f"layers.{step}.weight": torch.full((400,), -1.0 - step)}
            repo.commit({"model": shared, "step": step, "emb": torch.eye(4).to_sparse()}, step=step)
        roots = {commit.id: commit.root for commit in repo.log()}

        def agree() -> None:
            for commit in repo.log():
                if not commit.forgotten:
                    assert repo.ls(commit) == by_nodes(repo._handle, roots[commit.id])
            assert [one.num_commits for one in repo.find("model/layers.9.weight")] == [
                sum(not commit.forgotten for commit in repo.log())
            ]

        agree()
        repo.forget(revisions=["main~2", "main~3"])
        agree()
        repo.gc(min_age_s=0, reflog_expire_s=0, max_unused=0)
        agree()
        repo.repack()
        agree()
        repo.commit({"model": shared, "step": 7})  # may get numbers that went
        roots = {commit.id: commit.root for commit in repo.log()}
        agree()
        repo.rebuild_index()
        agree()
        changed = [commit.step for commit in repo.log(keys="model/layers.4.weight")]
        assert changed == [4, 0]
