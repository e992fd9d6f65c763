"""Folders and files whose names are not UTF-8, as an old disk has them: every verb that takes a path takes them."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from cas_ckpt import Repository
from tests.cli.running import call

NAME = os.fsdecode(b"caf\xe9")
"""What Python makes of the bytes of Latin-1."""


def test_a_repository_in_a_folder_whose_name_is_not_utf8_is_made_cloned_and_pushed_to(tmp_path: Path) -> None:
    first, second = tmp_path / NAME, tmp_path / f"{NAME}-2"
    with Repository.init(first, group=None) as repo:
        made = repo.commit({"w": torch.ones(300)})
    with Repository.open(first, group=None) as repo:
        assert repo.load("main")["w"].sum() == 300
        assert repo.url == f"file://{tmp_path}/caf%E9"
    with Repository.open(repo.url, group=None) as repo, Repository.clone(first, second) as clone:
        assert [each.id for each in clone.log()] == [made.id]
        assert [remote.url for remote in clone.remotes()] == [repo.url]
        again = clone.commit({"w": torch.zeros(300)})
        clone.push()
        clone.push(f"{first}", "main:other")
        assert [each.id for each in repo.log("other")] == [again.id, made.id]


def test_files_whose_names_are_not_utf8_are_written_and_read(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo", group=None) as repo:
        repo.commit({"w": torch.ones(300)})
        repo.export("main", tmp_path / f"{NAME}.safetensors")
        assert repo.import_file(tmp_path / f"{NAME}.safetensors", branch="back").message.endswith(
            "caf\\xe9.safetensors"
        )
        repo.create_bundle(tmp_path / f"{NAME}.bundle", "main")
    Repository.clone(tmp_path / f"{NAME}.bundle", tmp_path / "clone").close()


def test_the_command_line_takes_names_that_are_not_utf8(tmp_path: Path) -> None:
    runs = (
        ["init", NAME], ["-C", NAME, "status"], ["-C", NAME, "log"], ["-C", NAME, "fsck"], ["clone", NAME, f"{NAME}-2"],
        ["-C", f"{NAME}-2", "fetch"], ["-C", f"{NAME}-2", "remote"], ["-C", NAME, "index", "rebuild"],
    )  # fmt: skip
    ended = [call(*words, cwd=tmp_path) for words in runs]
    assert [ran.err for ran in ended if ran.code] == []
    assert "caf%E9" in ended[-2].out
