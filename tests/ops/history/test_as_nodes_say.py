"""Random histories: whatever a verb answers from the index is what a walk over the nodes of all commits gives.

Merges, forgotten commits, tags, pins and deleted branches; lists of many pages, tensors in parts, values of ranks,
empty containers, every kind of name; in between gc, repack and rebuild; on SQLite and on PostgreSQL.

    SEEDS=20 FIRST=100 pytest tests/ops/history/test_as_nodes_say.py        # other histories than those of every run
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt import InvalidInputError, NotFoundError, Repository
from cas_ckpt.core.forgotten import read_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.nodes import INLINE_BYTES, name_order
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.state import Container, Item, Name, ValueItem, parse_key
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.ops.diff.walk import Diff
from tests.builders import new_repository, numbers, tensor
from tests.ops.history.walked import Leaf, Tree, Walked
from tests.searches import tries

FIRST, COUNT = int(os.environ.get("FIRST", "0")), int(os.environ.get("SEEDS", tries(1, 2)))

HOSTILE = ("", "~", "~=5", "a/b", "1", "-3", "x\0y", "x\ufffdy", "\ud800", "é\n'\"%_*?[", ";--", "a.b", "a")
PLAIN = ("model", "optim", "w", "bias", "layers", "layers.1", "layers.12.weight", "exp_avg", "state")
DTYPES = ("float32", "int64", "float16", "uint8", "bool", "complex64")
SHAPES = ((), (0,), (3,), (2, 0, 3), (300,), (600, 2), (64, 64), (64, 65), (2, 3, 100))
LARGE = ((700, 700), (512, 1024), (1024, 512))
VALUES = (0, 1, -5, 2**70, "text", "long " * 600, "LONG " * 600, float("nan"), None, [1, 2], b"x" * 20, True)
ATTRS = (None, {"shape": (3, 4)}, {"shape": ()}, {"scale": 1.0})


class Maker:
    """Random states, each made from one before."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def name(self) -> Name:
        kind = self.random.random()
        if kind < 0.3:
            return self.random.choice(HOSTILE)
        return self.random.randint(-12, 300) if kind < 0.5 else self.random.choice(PLAIN)

    def leaf(self) -> Item:
        r = self.random
        if r.random() < 0.2:
            return ValueItem(r.choice(VALUES))
        dtype, shape = (r.choice(DTYPES), r.choice(SHAPES)) if r.random() > 0.08 else ("float32", r.choice(LARGE))
        array = np.asarray(numbers(*shape, seed=r.randint(0, 3))).astype(dtype).reshape(shape)
        return tensor(array, flavor=r.choice(["numpy", "torch"]))

    def in_parts(self) -> Item:
        r = self.random
        names = r.sample(["values", "indices", "items", "int_repr", "scales"], r.randint(0, 3))
        parts: dict[Name, Item] = {name: self.leaf() for name in names}
        if r.random() < 0.3:
            parts["inner"] = Container("dict", {self.name(): self.leaf() for _ in range(r.randint(0, 2))})
        return Container(r.choice(["sparse_coo", "sparse_csr", "quantized"]), parts, r.choice(ATTRS))

    def many(self) -> Item:
        """Some of them need pages."""
        r, leaf = self.random, self.leaf()
        count = r.choice([5, 260, 700])
        if r.random() < 0.3:
            return Container("list", dict.fromkeys(range(count), leaf))
        begin = r.choice(["layers.{}.weight", "{}", "x/{}", "p{:04d}"])
        numbered: dict[Name, Item] = dict.fromkeys(range(-3, count, 3), leaf)
        return Container("dict", numbered | {begin.format(at): leaf for at in range(count)})

    def item(self, depth: int) -> Item:
        r = self.random
        kind = r.random()
        if depth <= 0 or kind < 0.5:
            return self.leaf()
        if kind < 0.7:
            return self.in_parts() if kind < 0.6 else self.many()
        if kind < 0.75:
            own: dict[Name, Item] = {rank: self.item(depth - 1) for rank in range(r.randint(1, 3))}
            return Container("ranks", own, {"world_size": 3})
        if kind < 0.82:
            return Container("list", {at: self.item(depth - 1) for at in range(r.randint(0, 3))})
        return Container("dict", {self.name(): self.item(depth - 1) for _ in range(r.randint(0, 4))})

    def state(self) -> Container:
        made = {self.name(): self.item(3) for _ in range(self.random.randint(0, 6))}
        for name, make in (("big", self.many), ("emb", self.in_parts)):
            if self.random.random() < 0.6:
                made[name] = make()
        return Container("dict", made)

    def changed(self, item: Item, rate: float) -> Item:
        r = self.random
        if not isinstance(item, Container):
            return item if r.random() > rate else self.leaf()
        if r.random() < rate / 2:
            return self.item(2)
        children = dict(item.children)
        for name in r.sample(list(children), min(len(children), r.randint(0, 3))):
            if r.random() < 0.5:
                children[name] = self.changed(children[name], 0.7)
            elif item.kind in ("dict", "ranks"):
                child = children.pop(name)
                if item.kind == "dict" and r.random() < 0.5:
                    children[self.name()] = child
        for name, child in children.items():
            if isinstance(child, Container) and r.random() < 0.5:
                children[name] = self.changed(child, rate)
        attrs = r.choice(ATTRS) if item.kind.startswith(("sparse", "quantized")) and r.random() < 0.5 else item.attrs
        return Container(item.kind, children, attrs)

    def after(self, before: Container) -> Container:
        made = self.changed(before, 0.1)
        if not isinstance(made, Container) or made.kind != "dict":
            return self.state()
        return made if self.random.random() < 0.7 else Container("dict", {**made.children, self.name(): self.item(2)})


def grow(repo: Repository, maker: Maker, states: dict[str, Container], count: int) -> None:
    """Add commits on random branches, some of them merges; `states` get theirs."""
    r = maker.random
    for _ in range(count):
        branches = repo.branches()
        branch = r.choice([*branches, "main", f"b{len(branches)}"])
        others = sorted(one for name, one in branches.items() if name != branch)
        is_orphan = branch not in branches and r.random() < 0.5
        if branch not in branches and branches and not is_orphan:
            repo.branch(branch, start=r.choice(others))
        head = repo.branches().get(branch)
        parents = [r.choice(others)] if head is not None and others and r.random() < 0.3 else []
        before = states[head] if head in states and r.random() < 0.9 else maker.state()
        made = before if r.random() < 0.1 else maker.after(before)
        request = CommitRequest(
            branch=branch, parents=parents, create=True, orphan=is_orphan, step=len(states), message=f"m{len(states)}"
        )
        states[commit_tree(repo._handle, made, request).id] = made


# --- comparisons ----------------------------------------------------------------------------------


def check(repo: Repository, r: random.Random) -> None:
    """Compare all verbs."""
    compared = Comparison(repo, r)
    compared.lists()
    compared.log()
    for _ in range(15):
        compared.find()
    for _ in range(4):
        compared.diff()
    compared.bytes_of_commits()
    compared.bytes_of_branches()
    compared.bytes_of_content("tensor")
    compared.bytes_of_content("dtype")
    for _ in range(6):
        compared.holders()
    compared.nearest()


class Comparison:
    """A repository as it is now: what verbs answer, and what the nodes say."""

    def __init__(self, repo: Repository, r: random.Random) -> None:
        self.repo, self.random, self.walked = repo, r, Walked(repo)
        self.history = repo.log(all_refs=True)
        self.alive = [commit for commit in self.history if not commit.forgotten]
        self.there = [commit for commit in self.history if self.walked.has_data(commit)]
        self.by_id = {commit.id: commit for commit in self.history}
        keys = {one.key for commit in self.there for one in (*self.tree(commit).leaves(), *self.tree(commit).trees())}
        self.keys = sorted(keys - {""})

    def tree(self, commit: CommitInfo) -> Tree:
        return self.walked.tree(commit.root)

    def below(self, *commits: CommitInfo) -> frozenset[Digest]:
        """Ids of all that these states consist of."""
        return frozenset().union(*(self.walked.below(commit.root) for commit in commits))

    def some(self, of: list[CommitInfo], most: int) -> list[CommitInfo]:
        return self.random.sample(of, min(most, len(of)))

    def patterns(self, keys: list[str] | None = None) -> list[str]:
        """Patterns made of keys that there are, with parts of them left open."""
        r, found = self.random, []
        for _ in range(r.randint(1, 2)):
            key = r.choice(keys or self.keys or ["a"])
            pieces = key.split("/")
            at = r.randrange(len(pieces))
            piece = pieces[at]
            opened = r.choice(["*", "?", "**", f"{piece[:2]}*", f"*{piece[-2:]}", f"{piece[:-1]}?"])
            found.append(
                r.choice([
                    key, "/".join([*pieces[:at], opened, *pieces[at + 1 :]]), "/".join(pieces[: at + 1]),
                    f"**/{pieces[-1]}", key.replace(".", "/"), f"{key[: r.randint(0, len(key))]}**",
                    r.choice(["**", "*", "*/*", "big/layers.1*", "big/1?", "big/-?", "x/1*/w", "nothing", "*.weight"]),
                ])
            )  # fmt: skip
        return [one for one in found if one.count("*") < 5] or ["**"]

    def lists(self) -> None:
        assert [one for one in self.alive if one not in self.there] == []
        for commit in self.history:
            if commit not in self.there:
                with pytest.raises(NotFoundError, match="forgotten"):
                    self.repo.ls(commit)
        for commit in self.some(self.there, 4):
            tree = self.tree(commit)
            every = [leaf.shown for leaf in tree.entries()]
            assert self.repo.ls(commit) == every
            for _ in range(4):
                keys = self.patterns()
                wanted = KeyPatterns(keys)
                expected = [one for one in every if wanted.matches(one.key)]
                if wanted.unused:
                    with pytest.raises(NotFoundError, match="no entry matches"):
                        self.repo.ls(commit, keys)
                else:
                    assert self.repo.ls(commit, keys) == expected, keys
            shown = {one.key: one.shown() for one in tree.trees()} | {leaf.key: leaf.shown for leaf in tree.leaves()}
            for key in self.random.sample(sorted(shown), min(6, len(shown))):
                assert self.repo.entry(commit, key) == shown[key]
                with pytest.raises(NotFoundError):
                    self.repo.entry(commit, f"{key}/nothing")
            parts = self.repo.show(commit).parts
            assert sum(part.num_entries for part in parts) == len(every)
            assert sum(part.num_bytes for part in parts) == sum(one.num_bytes for one in every)

    def log(self) -> None:
        ways: list[dict[str, Any]] = [{}, {"all_refs": True}, {"first_parent": True}, {"all_refs": True, "limit": 3}]
        for how in ways * 2:
            keys = self.patterns()
            expected = [
                commit for commit in self.repo.log(**how | {"limit": None})
                if commit in self.there and self.matched(commit, keys) != self.matched(self.before(commit), keys)
            ]  # fmt: skip
            assert self.repo.log(**how, keys=keys) == expected[: how.get("limit")], (keys, how)

    def before(self, commit: CommitInfo) -> CommitInfo | None:
        """The nearest first parent that has its data."""
        before = self.by_id[commit.parents[0]] if commit.parents else None
        return before if before is None or before in self.there else self.before(before)

    def matched(self, commit: CommitInfo | None, keys: list[str]) -> dict[str, Any]:
        return {} if commit is None else dict(contents(self.tree(commit), KeyPatterns(keys)))

    def find(self) -> None:
        among, how = self.scope()
        conditions = self.conditions()
        model: dict[Any, list[CommitInfo]] = {}
        commits = []
        for commit in among:
            found = [leaf for leaf in self.tree(commit).entries() if self.admits(leaf, conditions)]
            for leaf in found:
                model.setdefault((leaf.shown, leaf.object_id, leaf.content), []).append(commit)
            commits += [commit] if found else []
        expected = [
            (*shown, None if digest is None else digest.hex(), having[-1].id, having[0].id, len(having))
            for (shown, digest, _), having in model.items()
        ]
        given = conditions | how
        try:
            found = self.repo.find(**given)
        except (NotFoundError, InvalidInputError) as error:
            texts = ("no chunk, tensor", "no tensor has the dtype", "is a container, and find looks for entries")
            assert any(text in str(error) for text in texts) and not expected  # noqa: PT017
            return
        assert sorted(map(astuple, found), key=repr) == sorted(expected, key=repr), given
        order = [[name_order(name) for name in parse_key(one.key)] for one in found]
        assert order == sorted(order)
        assert self.repo.find_commits(**given) == commits, given

    def scope(self) -> tuple[list[CommitInfo], dict[str, Any]]:
        """Commits, and the arguments that mean them."""
        r = self.random
        if r.random() < 0.2:
            named = self.some(self.alive, 3)
            return [one for one in self.alive if one in named], {"at": named + named[:1]}
        if r.random() < 0.3:
            branch = r.choice(sorted(self.repo.branches()))
            return [one for one in self.repo.log(branch) if one in self.alive], {"ref": branch}
        size = r.choice([None, None, 1, 2])
        return self.alive if size != 2 else [], {"world_size": size}

    def conditions(self) -> dict[str, Any]:
        r, how = self.random, dict[str, Any]()
        leaves = [leaf for commit in self.alive for leaf in self.tree(commit).entries()]
        shape = list((r.choice(leaves).shown.shape if leaves else None) or ())
        shape = [None if r.random() < 0.3 else size for size in shape]
        if r.random() < 0.4:
            at = r.randint(0, len(shape))
            shape[at : r.randint(at, len(shape))] = [...]
        low, high = sorted(r.choice([0, 1, 24, 1200, 16384, 20000, 10**7]) for _ in range(2))
        objects = sorted(self.below(*self.alive))
        for chance, name, value in (
            (0.4, "keys", self.patterns([leaf.key for leaf in leaves])),
            (0.3, "dtype", r.choice([*DTYPES, "*", "*int*", "float*", "[fi]*", "bfloat16"])),
            (0.3, "shape", tuple(shape)),
            (0.25, "min_bytes", low),
            (0.25, "max_bytes", high),
            (0.3 if objects else 0, "object_id", r.choice(objects or [b""]).hex()),
        ):
            if r.random() < chance:
                how[name] = value
        return how

    def admits(self, leaf: Leaf, how: dict[str, Any]) -> bool:
        shown = leaf.shown
        if "keys" in how and not KeyPatterns(how["keys"]).matches(leaf.key):
            return False
        if "dtype" in how and not (shown.dtype and fnmatchcase(shown.dtype, how["dtype"])):
            return False
        if "shape" in how and (shown.shape is None or not fits(shown.shape, how["shape"])):
            return False
        if not how.get("min_bytes", 0) <= shown.num_bytes <= how.get("max_bytes", 1 << 40):
            return False
        if "object_id" not in how:
            return True
        return leaf.object_id is not None and bytes.fromhex(how["object_id"]) in self.walked.below(leaf.object_id.hex())

    def diff(self) -> None:
        a, b = self.random.choice(self.there), self.random.choice(self.there)
        before, after = ({leaf.key: leaf.content for leaf in self.tree(one).leaves()} for one in (a, b))
        old, new = ({tree.key: tree for tree in self.tree(one).trees()} for one in (a, b))
        expected = {key for key in before | after if before.get(key) != after.get(key)}
        for key in old | new:
            one, other = old.get(key), new.get(key)
            if one is None or other is None:
                expected |= {key} if (one or other).is_entry else set()  # type: ignore[union-attr]
            elif (one.kind, one.attrs) != (other.kind, other.attrs):
                expected.add(key)
        found = self.repo.diff(a, b)
        assert keys_of(found) == expected
        for entry in found.entries:
            if entry.moved_from is not None:
                assert before[entry.moved_from] == after[entry.key]
        keys = self.patterns(sorted(expected))
        wanted = KeyPatterns(keys)
        matching = {key for key in expected if wanted.matches(key)}
        for key in (*before, *after, *(key for key, tree in (old | new).items() if tree.is_entry)):
            wanted.matches(key)
        if wanted.unused:
            with pytest.raises(NotFoundError, match="no entry matches"):
                self.repo.diff(a, b, keys=keys)
        else:
            assert keys_of(self.repo.diff(a, b, keys=keys)) == matching, keys
        whole = self.repo.diff(a, b, values=True, numbers=True)
        assert [(one.key, one.change) for one in whole.entries] == [(one.key, one.change) for one in found.entries]

    def plain(self, digests: Iterable[Digest], *, chunks: bool = False) -> int:
        sizes = self.walked.sizes(list(digests))
        return sum(size for is_chunk, size, _ in sizes.values() if is_chunk or not chunks)

    def bytes_of_commits(self) -> None:
        rows = self.repo.du()
        assert [row.name for row in rows] == [commit.id for commit in self.alive]
        for row, commit in zip(rows, self.alive, strict=True):
            whole = self.below(commit)
            own = whole - self.below(*(one for one in self.alive if one is not commit))
            stored = sum(size for _, _, size in self.walked.sizes(own).values())
            assert (row.total_bytes, row.new_bytes) == (commit.stats.total_bytes, commit.stats.new_bytes)
            assert (row.unique_bytes, row.shared_bytes) == (self.plain(own), self.plain(whole) - self.plain(own))
            assert row.stored_bytes == stored

    def bytes_of_branches(self) -> None:
        branches = self.repo.branches()
        others = [*self.repo.tags().values(), *(pin.commit for pin in self.repo.pins())]
        # A forgotten commit is kept by what names it, and not by what leads to it.
        dropped = read_forgotten(self.repo._handle.store)
        kept = {
            name: [one for one in self.repo.log(heads) if one.id in heads or bytes.fromhex(one.id) not in dropped]
            for name, heads in [
                *((name, [head]) for name, head in branches.items()),
                *([("", others)] if others else []),
            ]
        }
        rows = self.repo.du("branch")
        assert [row.name for row in rows] == sorted(branches)
        for row in rows:
            whole = self.below(*kept[row.name])
            own = whole - self.below(*(one for name, held in kept.items() if name != row.name for one in held))
            assert row.total_bytes == sum(one.stats.total_bytes for one in kept[row.name])
            assert row.new_bytes == sum(one.stats.new_bytes for one in kept[row.name])
            assert (row.unique_bytes, row.shared_bytes) == (self.plain(own), self.plain(whole) - self.plain(own))

    def bytes_of_content(self, by: str) -> None:
        commit = self.random.choice(self.alive)
        parents = [self.by_id[one] for one in commit.parents]
        tree = self.tree(commit)
        keys = self.patterns([leaf.key for leaf in tree.entries()]) if self.random.random() < 0.5 else []
        wanted = KeyPatterns(keys)
        parts = [part for part in stored_parts(tree, wanted) if part.shown.dtype is not None]
        if wanted.unused:
            with pytest.raises(NotFoundError, match="no entry matches"):
                self.repo.du(by, ref=commit, keys=keys)
            return
        if not all(parent in self.there for parent in parents):
            return
        totals, owner = dict[str, int](), dict[Digest, str]()
        for part in parts:
            name = part.key if by == "tensor" else str(part.shown.dtype)
            totals[name] = totals.get(name, 0) + part.shown.num_bytes
            if part.object_id is not None:
                owner.setdefault(part.object_id, name)
        holding: dict[Digest, set[str]] = {}
        for node, name in owner.items():
            for digest in self.walked.below(node.hex()):
                holding.setdefault(digest, set()).add(name)
        elsewhere = self.below(*(one for one in self.alive if one.root != commit.root))
        expected = {}
        for name, total in totals.items():
            alone = {digest for digest, names in holding.items() if names == {name}}
            own = self.plain(alone - elsewhere, chunks=True)
            expected[name] = total, self.plain(alone - self.below(*parents), chunks=True), own, total - own
        rows = self.repo.du(by, ref=commit, keys=keys)
        assert {
            one.name: (one.total_bytes, one.new_bytes, one.unique_bytes, one.shared_bytes) for one in rows
        } == expected
        assert by == "dtype" or [one.name for one in rows] == list(expected)

    def holders(self) -> None:
        commit = self.random.choice(self.there)
        tree = self.tree(commit)
        known = [(one.key, one.digest) for one in tree.trees()] + [(one.key, one.object_id) for one in tree.leaves()]
        key, content = self.random.choice(known)
        if content is None:
            with pytest.raises(InvalidInputError, match="so small"):
                self.repo.holders(commit, key)
            return
        holding = {one.id for one in self.there if content in self.below(one)}
        assert {one.id for one in self.repo.holders(commit, key)} == holding

    def nearest(self) -> None:
        commit = self.random.choice(self.alive)
        nodes = {leaf.object_id for leaf in self.tree(commit).leaves() if leaf.content[0] == "tensor"} - {None}
        large = [leaf for leaf in self.tree(commit).leaves() if leaf.shown.num_bytes > INLINE_BYTES]
        if len(large) > 512 // 4:
            return  # a sample, which the walk does not know
        held = {digest for node in nodes for digest in self.walked.below(node.hex())}
        chunks = {digest for digest, (is_chunk, _, _) in self.walked.sizes(held).items() if is_chunk}
        related = {one.id for one in self.repo.log(commit)} | {
            one.id for one in self.history if commit.id in one.parents
        }
        common = {one.id: chunks & self.below(one) for one in self.alive if one.id not in related}
        assert {one.commit.id: (one.num_chunks, one.num_bytes) for one in self.repo.nearest(commit, limit=1000)} == {
            name: (len(digests), self.plain(digests)) for name, digests in common.items() if digests
        }


def fits(shape: tuple[int, ...], wanted: tuple[Any, ...]) -> bool:
    if ... in wanted:
        at, more = wanted.index(...), len(shape) - len(wanted) + 1
        wanted = (*wanted[:at], *[None] * more, *wanted[at + 1 :]) if more >= 0 else (-1,)
    return len(shape) == len(wanted) and all(size in (None, own) for size, own in zip(wanted, shape, strict=True))


def contents(tree: Tree, wanted: KeyPatterns) -> Iterator[tuple[str, Any]]:
    """What matches, and what it is; a tensor in parts matches as a whole or not at all."""
    for one in tree.inside:
        is_wanted = wanted.matches(one.key)
        if isinstance(one, Leaf):
            yield from [(one.key, one.content)] if is_wanted else []
            continue
        yield from [(one.key, (one.kind, one.attrs))] if is_wanted else []
        yield from contents(one, wanted) if is_wanted or not one.is_entry else ()


def keys_of(found: Diff) -> set[str]:
    return {key for entry in found.entries for key in (entry.key, entry.moved_from) if key is not None}


def stored_parts(tree: Tree, wanted: KeyPatterns) -> Iterator[Leaf]:
    """What is stored of the entries that match."""
    for one in tree.inside:
        if isinstance(one, Tree) and not one.is_entry:
            yield from stored_parts(one, wanted)
        elif not wanted or wanted.matches(one.key):
            yield from one.leaves() if isinstance(one, Tree) else [one]


# --- histories ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_what_verbs_answer_is_what_nodes_say(tmp_path: Path, seed: int) -> None:
    _compare(new_repository(tmp_path / "repo"), seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST + 50, FIRST + 50 + (COUNT + 1) // 2))
def test_what_verbs_answer_is_what_nodes_say_on_postgresql(tmp_path: Path, server_url: str, seed: int) -> None:
    new_repository(tmp_path / "repo").close()
    _compare(RepositoryHandle.open(tmp_path / "repo", index_url=server_url), seed)


def _compare(handle: RepositoryHandle, seed: int) -> None:
    maker, states = Maker(seed), dict[str, Container]()
    r = maker.random
    with Repository(handle) as repo:
        grow(repo, maker, states, 6)
        check(repo, r)
        for _ in range(tries(1, 2)):
            grow(repo, maker, states, 3)
            _rename_and_forget(repo, r)
            check(repo, r)
            r.choice([
                lambda: repo.gc(min_age_s=0, reflog_expire_s=0, max_unused=0), repo.repack, repo.rebuild_index,
            ])()  # fmt: skip
            check(repo, r)


def _rename_and_forget(repo: Repository, r: random.Random) -> None:
    log = [commit.id for commit in repo.log(all_refs=True) if not commit.forgotten]
    if r.random() < 0.4:
        repo.tag(f"t{len(log)}", r.choice(log), force=True)
    if r.random() < 0.3:
        repo.pin(r.choice(log), name=f"p{len(log)}", force=True)
    others = [name for name in repo.branches() if name != "main"]
    if others and r.random() < 0.3:
        repo.delete_branch(r.choice(others), force=True)
    heads = {*repo.branches().values(), *repo.tags().values(), *(pin.commit for pin in repo.pins())}
    old = [commit.id for commit in repo.log(all_refs=True) if not commit.forgotten and commit.id not in heads]
    if old and r.random() < 0.7:
        repo.forget(revisions=r.sample(old, min(2, len(old))))
