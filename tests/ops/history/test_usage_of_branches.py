"""du by branch, against a model that knows packs, refs and forgotten commits alone: after forget, gc and repack."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from cas_ckpt.core.forgotten import read_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import read_pack
from cas_ckpt.core.refs import RefKind
from cas_ckpt.core.revisions import resolve
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.objects.digest import ObjectKind
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import REPACK, GcOptions
from cas_ckpt.ops.history.usage import UsageRow, usage_rows
from cas_ckpt.ops.refs import create_branch, create_pin, create_tag
from cas_ckpt.ops.retention.forget import forget_revisions
from tests.builders import commit, new_repository, numbers
from tests.index.building import empty

AT_ONCE = GcOptions(min_age_s=0, reflog_expire_s=0)


class Model:
    """What the packs and refs of a repository say, in sets."""

    def __init__(self, handle: RepositoryHandle) -> None:
        self.size: dict[bytes, int] = {}
        self.stored: dict[bytes, int] = {}
        self.children: dict[bytes, tuple[bytes, ...]] = {}
        self.commits: dict[bytes, CommitRow] = {}
        for key, _ in handle.store.list(PACK_PREFIX):
            record = read_pack(handle.store, key)
            self.children.update({parent: tuple(children) for parent, children in record.edges})
            self.commits.update({row.digest: row for row in record.commits})
            for entry in record.entries:
                self.size[entry.digest] = entry.num_bytes if entry.kind == ObjectKind.CHUNK else entry.stored_bytes
                taken = entry.header_bytes + entry.stored_bytes
                self.stored[entry.digest] = self.stored.get(entry.digest, 0) + taken
        self.refs = {(ref.kind, ref.name): ref.target for kind in RefKind for ref in handle.refs.list(kind)}
        self.forgotten = read_forgotten(handle.store)

    def rows(self) -> dict[str, UsageRow]:
        kept = {name: self._kept(target) for name, target in self.refs.items() if target is not None}
        reached = {name: self._objects(commits) for name, commits in kept.items()}
        rows = {}
        for (kind, name), commits in kept.items():
            if kind is RefKind.BRANCH:
                others = set().union(*(objects for other, objects in reached.items() if other != (kind, name)))
                unique = reached[kind, name] - others
                shared = reached[kind, name] & others
                total, new = (
                    sum(self.commits[one].stats[field] for one in commits) for field in ("total_bytes", "new_bytes")
                )
                stored = sum(map(self.stored.__getitem__, unique))
                rows[name] = UsageRow(name, total, new, self._bytes(unique), self._bytes(shared), stored)
        return rows

    def _kept(self, target: bytes) -> set[bytes]:
        """The commits whose data a ref keeps: all that it leads to but for forgotten ones, and the one it names."""
        reached, todo = {target}, [target]
        while todo:
            fresh = set(self.commits[todo.pop()].parents) - reached
            reached |= fresh
            todo += fresh
        return (reached - self.forgotten) | {target}

    def _objects(self, commits: set[bytes]) -> set[bytes]:
        found = {self.commits[one].root for one in commits}
        todo = list(found)
        while todo:
            fresh = set(self.children.get(todo.pop(), ())) - found
            found |= fresh
            todo += fresh
        return found

    def _bytes(self, objects: set[bytes]) -> int:
        return sum(map(self.size.__getitem__, objects))


def same_as_model(handle: RepositoryHandle) -> Mapping[str, UsageRow]:
    found = {row.name: row for row in usage_rows(handle, "branch")}
    assert found == Model(handle).rows()
    assert list(found) == sorted(found)
    return found


def grow(handle: RepositoryHandle, dice: random.Random, turns: int, *, first: int = 0) -> list[str]:
    """A history of branches, merges, tags and pins whose states share tensors; the ids of its commits."""
    branches, ids = ["main"], []
    for turn in range(first, first + turns):
        branch = dice.choice(branches)
        count = dice.randrange(1, 5)
        items = {f"w{n}": numbers(dice.choice((40, 700)), 3, seed=dice.randrange(6)) for n in range(count)}
        parents = [dice.choice(ids)] if ids and dice.random() < 0.2 else []
        ids.append(commit(handle, {"model": items}, branch=branch, message=f"c{turn}", parents=parents).id)
        if dice.random() < 0.3:
            branches.append(f"branch-{turn}")
            create_branch(handle, branches[-1], start=dice.choice(ids))
        if dice.random() < 0.15:
            create_tag(handle, f"tag-{turn}", dice.choice(ids))
        if dice.random() < 0.1:
            create_pin(handle, dice.choice(ids), name=f"pin-{turn}")
    return ids


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_those_of_a_model_before_and_after_forget_gc_and_repack(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    handle = new_repository(tmp_path / "repo")
    ids = grow(handle, dice, 14)
    same_as_model(handle)
    named = {ref.target.hex() for kind in RefKind for ref in handle.refs.list(kind) if ref.target is not None}
    unnamed = sorted(set(ids) - named)
    forget_revisions(handle, dice.sample(unnamed, len(unnamed) * 2 // 3))
    same_as_model(handle)
    for options in (AT_ONCE, REPACK):
        collect_garbage(handle, options)
        same_as_model(handle)
    grow(handle, dice, 4, first=14)
    empty(handle.index)
    same_as_model(handle)


def test_what_was_forgotten_and_collected_is_in_no_row(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    for number in range(20):
        commit(handle, {"w": numbers(1000, seed=number)})
    create_branch(handle, "ft")
    forget_revisions(handle, [f"main~{back}" for back in range(1, 19)])
    collect_garbage(handle, AT_ONCE)
    rows = same_as_model(handle)
    assert [row.total_bytes for row in rows.values()] == [2 * 4000, 2 * 4000]
    assert all(row.unique_bytes == 0 for row in rows.values())


def test_a_tag_or_pin_elsewhere_shares_what_it_keeps(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, {"w": numbers(1000, seed=1)})
    commit(handle, {"w": numbers(1000, seed=2)})
    alone = same_as_model(handle)["main"]
    create_tag(handle, "v1", "main~1")
    tagged = same_as_model(handle)["main"]
    assert alone.unique_bytes - tagged.unique_bytes == tagged.shared_bytes > 4000


def test_a_forgotten_commit_that_a_branch_names_is_that_branchs_alone(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    for number in range(3):
        commit(handle, {"w": numbers(1000, seed=number)})
    forget_revisions(handle, ["main~1"])
    create_tag(handle, "old", resolve(handle, "main~1").hex())
    assert same_as_model(handle)["main"].total_bytes == 2 * 4000
