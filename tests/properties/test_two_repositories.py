"""Whatever is committed, forgotten, collected, pushed and pulled: both sides agree on every commit that both have."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cas_ckpt import Repository
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import ConflictError, InvalidInputError, NotFoundError
from tests.builders import commit, numbers, same_bytes, stored_arrays
from tests.searches import tries

BRANCHES = ("main", "ft")


def items(number: int) -> dict[str, object]:
    """States that share what their numbers share."""
    return {
        "own": numbers(700, seed=number), "half": {"w": numbers(700, seed=100 + number // 2)}, "all": numbers(70_000),
        "nested": {f"n{bit}": {"w": numbers(600, seed=bit)} for bit in range(4) if number >> bit & 1}, "number": number,
    }  # fmt: skip


side = st.sampled_from(["here", "there"])
step = st.one_of(
    st.tuples(st.just("commit"), side, st.sampled_from(BRANCHES), st.integers(0, 15)),
    st.tuples(st.just("forget"), side, st.sampled_from(BRANCHES), st.integers(1, 3)),
    st.tuples(st.just("gc"), side),
    st.tuples(st.just("push"), st.booleans()),
    st.tuples(st.just("pull"), st.sampled_from(BRANCHES)),
    st.tuples(st.just("delete"), side),
)


def do(deed: tuple[object, ...], sides: dict[str, Repository]) -> None:
    here = sides["here"]
    match deed:
        case ("commit", str(name), str(branch), int(number)):
            commit(sides[name]._handle, items(number), branch=branch, create=True)
        case ("forget", str(name), str(branch), int(back)):
            sides[name].forget(revisions=[f"{branch}~{back}"])
        case ("gc", str(name)):
            sides[name].gc(min_age_s=0, reflog_expire_s=0)
        case ("push", bool(force)):
            here.push("origin", all_branches=True, force=force)
        case ("pull", str(branch)):
            here.pull("origin", branch)
        case ("delete", str(name)):
            sides[name].delete_branch("ft", force=True)


def require_agreement(sides: dict[str, Repository]) -> None:
    states: dict[str, dict[str, object]] = {}
    for repo in sides.values():
        for info in repo.log(all_refs=True) if repo.branches() else []:
            if info.forgotten:
                continue
            found = stored_arrays(repo._handle, info.root)
            before = states.setdefault(info.id, found)  # type: ignore[arg-type]
            assert found.keys() == before.keys()
            assert all(same_bytes(found[key], before[key]) for key in found)  # type: ignore[arg-type]
        assert repo.fsck().ok


@settings(max_examples=tries(10, 25), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(step, min_size=4, max_size=14))
def test_both_sides_agree_after_any_story(story: list[tuple[object, ...]]) -> None:
    with TemporaryDirectory() as folder:
        sides = {name: Repository.init(Path(folder) / name) for name in ("here", "there")}
        sides["here"].add_remote("origin", sides["there"].url)
        for deed in story:
            with suppress(ConflictError, NotFoundError, InvalidInputError):
                do(deed, sides)
        require_agreement(sides)
        here, there = (repo._handle for repo in sides.values())
        if sides["here"].branches():
            sides["here"].push("origin", all_branches=True, force=True)
            for name in sides["here"].branches():
                assert resolve(there, name) == resolve(here, name)
                assert commit_of(there, resolve(there, name)) == commit_of(here, resolve(here, name))
        require_agreement(sides)
        for repo in sides.values():
            repo.gc(min_age_s=0, reflog_expire_s=0)
        require_agreement(sides)
        for repo in sides.values():
            repo.close()
