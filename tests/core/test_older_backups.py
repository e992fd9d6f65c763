"""Any part of a repository is put back from an older backup: what is acknowledged afterwards stays readable.

Every kind of file, and every pair of kinds (in each run a third of them), is replaced by what it was before further
commits, forgetting and collections. Then people go on in one of two ways: as if nothing had happened, or by fsck and
the commands that it prints (every kind alone in both, pairs in one of them). Each verb may refuse; a commit that it
acknowledges is readable ever after, and what could be read before and was not given up still can be.
"""

from __future__ import annotations

import itertools
import shlex
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import CkptError
from cas_ckpt.ops.fsck.check import check_url
from cas_ckpt.ops.fsck.repair import repair_url
from cas_ckpt.ops.fsck.report import RepairRequest
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.refs import create_branch, delete_branch
from cas_ckpt.ops.retention.forget import forget
from cas_ckpt.ops.retention.policy import Policy, set_policy
from tests.builders import commit, new_repository, numbers, stored_arrays
from tests.searches import tries

pytestmark = pytest.mark.slow

NOW = GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0)
"""Spare nothing."""

KINDS = ("refs", "names", "gc", "packs", "index", "config", "forgotten", "released", "policy", "sessions")
SINGLE = [((kind,), repairs) for kind in KINDS for repairs in (False, True)]
PAIRS = [(pair, bool(at % 2)) for at, pair in enumerate(itertools.combinations(KINDS, 2))][:: tries(3, 1)]


def weights(seed: int) -> np.ndarray:
    return numbers(40, 40, seed=seed)


@dataclass(frozen=True)
class Ages:
    """Two ages of one repository; `live` tells commits of the younger one that nobody gave up: root -> seed."""

    older: Path
    younger: Path
    live: dict[str, int]


@pytest.fixture(scope="module")
def ages(tmp_path_factory: pytest.TempPathFactory) -> Ages:
    folder = tmp_path_factory.mktemp("ages")
    path = folder / "younger"
    repo = new_repository(path)
    live = {}
    first = commit(repo, {"w": weights(1)})
    for seed in (2, 3):
        live[commit(repo, {"w": weights(seed)}).root] = seed
    commit(repo, {"w": weights(4)}, branch="side", orphan=True)
    garbage(repo, 30)
    set_policy(repo, Policy(keep_last=9))
    repo.store.put("sessions/" + "0" * 32, b"rubbish")
    repo.close()
    shutil.copytree(path, folder / "older")
    repo = RepositoryHandle.open(path)
    for seed in (5, 6):
        live[commit(repo, {"w": weights(seed)}).root] = seed
    forget(repo, revisions=[first.id])
    delete_branch(repo, "side", force=True)
    garbage(repo, 31)
    garbage(repo, 32)
    live[commit(repo, {"w": weights(7)}).root] = 7
    live[commit(repo, {"w": weights(8)}, branch="new", orphan=True).root] = 8
    set_policy(repo, Policy(keep_last=8))
    repo.close()
    return Ages(folder / "older", path, live)


def garbage(repo: RepositoryHandle, seed: int) -> None:
    for at in (seed, seed + 100):
        commit(repo, {"w": weights(at)}, branch=f"garbage-{seed}", orphan=True)
    delete_branch(repo, f"garbage-{seed}", force=True)
    assert collect_garbage(repo, NOW).deleted_packs


def put_back(ages: Ages, kinds: tuple[str, ...], path: Path) -> Path:
    shutil.copytree(ages.younger, path)
    for kind in kinds:
        for place in (path / kind, ages.older / kind):
            if place.is_file():
                shutil.copy(ages.older / kind, path / kind)
                break
        else:
            shutil.rmtree(path / kind, ignore_errors=True)
            if (ages.older / kind).exists():
                shutil.copytree(ages.older / kind, path / kind)
    return path


def readable(path: Path, wanted: dict[str, int]) -> dict[str, int]:
    """Those of these states that can be read; none may be another than it was."""
    found = {}
    repo = RepositoryHandle.open(path)
    for root, seed in wanted.items():
        with suppress(CkptError):
            assert stored_arrays(repo, root)["w"].tobytes() == weights(seed).tobytes()
            found[root] = seed
    repo.close()
    return found


def go_on(path: Path, seeds: tuple[int, ...]) -> dict[str, int]:
    """Use the repository as if nothing had happened; what it acknowledged: root -> seed."""
    made: dict[str, int] = {}

    def use(verb: Callable[[RepositoryHandle], object]) -> None:
        with suppress(CkptError):
            repo = RepositoryHandle.open(path)
            try:
                verb(repo)
            finally:
                repo.close()

    def commits(branch: str, seed: int) -> None:
        use(lambda repo: made.update({commit(repo, {"w": weights(seed)}, branch=branch, orphan=True).root: seed}))

    for seed in seeds:  # states that are there, that were collected, and a new one
        commits("main", seed)
    use(lambda repo: create_branch(repo, f"again-{seeds[0]}", start="main~1"))
    use(lambda repo: collect_garbage(repo, NOW))
    commits("side", seeds[-1] + 1)
    use(lambda repo: collect_garbage(repo, NOW))
    commits("main", seeds[-1] + 2)
    use(lambda repo: collect_garbage(repo, NOW))
    return made


def repair_as_printed(path: Path) -> None:
    for _ in range(3):
        report = check_url(path)
        if not report.commands:
            return
        for command in report.commands:
            words = shlex.split(command)
            kinds = [words[at + 1] for at, word in enumerate(words) if word == "--repair"]
            refs = dict(words[at + 1].split("=") for at, word in enumerate(words) if word == "--ref")
            with suppress(CkptError):
                repair_url(path, RepairRequest(frozenset(kinds), refs=refs))


def told(one: tuple[str, ...] | bool) -> str:
    return "+".join(one) if isinstance(one, tuple) else ("as is", "repaired")[one]


@pytest.mark.parametrize(("kinds", "repairs"), [*SINGLE, *PAIRS], ids=told)
def test_what_is_acknowledged_after_a_part_was_put_back_is_readable(
    ages: Ages, tmp_path: Path, kinds: tuple[str, ...], repairs: bool
) -> None:
    path = put_back(ages, kinds, tmp_path / "repo")
    before = readable(path, ages.live)
    if repairs:
        repair_as_printed(path)
    made = go_on(path, (3, 30, 4, 60))
    assert readable(path, made) == made
    repair_as_printed(path)
    made |= go_on(path, (1, 31, 70))
    assert readable(path, made | before) == made | before
