"""The picture of a repository on disk in docs/format.md shows every file that one has, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from cas_ckpt import Policy, Repository
from cas_ckpt.core.protocol import Session
from tests.docs.pages import DOCS
from tests.signing.keys import public_line


def files_of_a_repository(folder: Path) -> set[str]:
    """Every file of a repository that has all that a repository can have, while it is open."""
    state = {"w": torch.arange(300.0)}
    with Repository.init(folder) as repo:
        for step in range(3):
            state["w"] += 1
            repo.commit(state, step=step)
        repo.tag("v1")
        repo.pin(name="paper")
        repo.branch("ft/math")
        repo.set_policy(Policy(keep_last=1))
        with Repository.init(f"{folder}-there") as there:
            repo.add_remote("origin", there.url)
            repo.push()
        repo.set_signers("release/*", [public_line()])
        for step in range(70):  # more moves than a log has room for: the first ones are released
            repo.branch("moved", start=f"main~{step % 2}", force=step > 0)
        repo.forget(revisions=["main~2"])
        damage(next(folder.glob("packs/*/*.data")))
        repo.repair("packs")
        Session(repo._handle.store).announce()
        assert repo.log()
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def damage(pack: Path) -> None:
    data = bytearray(pack.read_bytes())
    data[-100] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)


def with_names_left_out(path: str) -> str:
    """The path without what differs from repository to repository."""
    path = re.sub(r"\b(heads|tags|pins|remotes)/.*\.ref", r"\1/<name>.ref", path)
    path = re.sub(r"/[0-9a-f]{2}/", "/<nn>/", path)
    return re.sub(r"lock-[0-9]+", "lock-<number>", re.sub(r"[0-9a-f]{32}", "<32 hex digits>", path))


def drawn() -> set[str]:
    """The paths of the files in the picture."""
    picture = (DOCS / "format.md").read_text().partition("### A repository on disk")[2].split("```")[1]
    found, above = set(), []
    for line in picture.splitlines()[2:]:
        indent, name = re.match(r"((?:│   |    )*[├└]── )(\S+(?: hex digits>\S*)?)", line).groups()  # type: ignore[union-attr]
        above[len(indent) // 4 - 1 :] = [name.rstrip("/")]
        if not name.endswith("/"):
            found.add("/".join(above))
    return found


def test_the_picture_shows_the_files_of_a_repository(tmp_path: Path) -> None:
    files = {with_names_left_out(name) for name in files_of_a_repository(tmp_path / "ckpts")}
    assert files == drawn()
