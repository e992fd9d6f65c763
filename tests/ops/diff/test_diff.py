"""Two commits are compared by their ids: what differs is found, and nothing else is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.core.forgotten import write_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import read_directory
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import Node
from cas_ckpt.objects.state import Container, TensorItem, ValueItem
from cas_ckpt.objects.values import encode_value
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.ops.diff.diff import DiffRequest, diff_commits
from cas_ckpt.ops.diff.walk import Diff, EntryDiff
from cas_ckpt.storage.file import FileStore
from cas_ckpt.transfer.pack_writer import write_nodes
from tests.builders import commit, new_repository, numbers, state, tensor
from tests.wrapped_stores import CountingStore

LARGE = numbers(2100, 1000, seed=1)
"""Three chunks of 1024 rows; the last one is short."""


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[RepositoryHandle]:
    made = new_repository(tmp_path / "repo")
    yield made
    made.close()


def compare(handle: RepositoryHandle, a: Mapping[Any, Any], b: Mapping[Any, Any], **request: Any) -> Diff:
    """Commit both, and say what the second has otherwise."""
    old, new = commit(handle, a), commit(handle, b)
    return diff_commits(handle, old.id, new.id, DiffRequest(**request))


def shown(found: Diff) -> dict[str, str]:
    """Key -> what became of it, and what differs."""
    return {entry.key: " ".join((entry.change.value, *entry.differs)) for entry in found.entries}


def only(found: Diff) -> EntryDiff:
    assert len(found.entries) == 1, shown(found)
    return found.entries[0]


def edited(array: np.ndarray[Any, Any], *places: Any) -> np.ndarray[Any, Any]:
    copy = array.copy()
    for place in places:
        copy[place] += 1
    return copy


def test_entries_are_added_removed_and_changed_in_the_order_of_keys(repo: RepositoryHandle) -> None:
    small = numbers(10)
    a = {"model": {"kept": small, "gone": small + 1, "other": small}, "step": 1}
    b = {"model": {"kept": small, "new": small + 2, "other": small * 2}, "step": 2}
    found = compare(repo, a, b)
    assert shown(found) == {
        "model/gone": "removed",
        "model/new": "added",
        "model/other": "changed data",
        "step": "changed value",
    }
    assert [entry.key for entry in found.added + found.removed + found.changed] == [
        "model/new", "model/gone", "model/other", "step",
    ]  # fmt: skip
    added, other = found.added[0].after, found.changed[0]
    assert added is not None
    assert (added.kind, added.dtype, added.shape, added.num_bytes) == ("array", "float32", (10,), 40)
    assert found.added[0].before is None
    assert found.removed[0].after is None
    assert other.chunks is not None
    assert (other.chunks.num_changed, other.chunks.num_chunks, other.chunks.num_bytes) == (0, 0, 40)


def test_equal_states_do_not_differ_whatever_the_commits_say(repo: RepositoryHandle) -> None:
    a = commit(repo, {"w": LARGE}, message="a", step=1, metrics={"loss": 2.0, "acc": 0.5}, author="ann")
    b = commit(repo, {"w": LARGE}, message="b", step=2, metrics={"loss": 1.0, "new": 3.0}, author="ann")
    found = diff_commits(repo, a.id, b.id)
    assert found.entries == ()
    assert {(field.name, field.before, field.after) for field in found.fields} == {
        ("step", 1, 2), ("message", "a", "b"), ("metrics/loss", 2.0, 1.0), ("metrics/acc", 0.5, None),
        ("metrics/new", None, 3.0),
    }  # fmt: skip
    assert (found.before and found.before.id, found.after.id) == (a.id, b.id)


def test_one_revision_is_compared_with_its_first_parent_and_the_first_commit_with_nothing(
    repo: RepositoryHandle,
) -> None:
    commit(repo, {"step": 1, "e": {}, "w": numbers(5)})
    commit(repo, {"step": 2, "e": {}, "w": numbers(5)})
    assert shown(diff_commits(repo, "main")) == {"step": "changed value"}
    first = diff_commits(repo, "main~1")
    assert (first.before, first.fields) == (None, ())
    assert shown(first) == {"e": "added", "step": "added", "w": "added"}


def test_chunks_that_changed_are_counted_with_their_bytes_and_regions(repo: RepositoryHandle) -> None:
    entry = only(compare(repo, {"w": LARGE}, {"w": edited(LARGE, (3, 3), (2099, 0))}))
    chunks = entry.chunks
    assert chunks is not None
    assert (chunks.num_changed, chunks.num_chunks) == (2, 3)
    assert chunks.runs == ((0, 1), (2, 1))
    assert [(box.offsets, box.sizes) for box in chunks.regions()] == [((0, 0), (1024, 1000)), ((2048, 0), (52, 1000))]
    assert sum(box.num_elements for box in chunks.regions()) * 4 == chunks.num_bytes


def test_a_tensor_that_grew_shares_the_chunks_that_it_had(repo: RepositoryHandle) -> None:
    more = np.concatenate([LARGE, numbers(600, 1000, seed=5)])
    entry = only(compare(repo, {"w": LARGE}, {"w": more}))
    assert entry.differs == ("shape", "data")
    chunks = entry.chunks
    assert chunks is not None
    assert (chunks.num_changed, chunks.num_chunks, chunks.runs) == (1, 3, ((2, 1),))
    assert chunks.num_bytes == 652 * 4000


def test_a_tensor_may_move_between_its_tree_node_one_chunk_and_many(repo: RepositoryHandle) -> None:
    sizes = {"inline": 20, "single": 5000, "many": 2_500_000}
    for one, n in sizes.items():
        for other, m in sizes.items():
            if one == other:
                continue
            entry = only(compare(repo, {"w": numbers(n, seed=1)}, {"w": numbers(m, seed=2)}))
            assert entry.differs == ("shape", "data"), (one, other)
            chunks = entry.chunks
            assert chunks is not None
            assert chunks.num_bytes == 4 * m
            assert chunks.num_changed == chunks.num_chunks == {"inline": 0, "single": 1, "many": 3}[other]


def test_the_same_bytes_of_another_dtype_or_flavour_are_no_other_data(repo: RepositoryHandle) -> None:
    for n in (20, 5000, 2_500_000):
        array = numbers(n)
        entry = only(compare(repo, {"w": array}, {"w": array.view("int32")}))
        assert entry.differs == ("dtype",)
        assert entry.chunks is not None
        assert (entry.chunks.num_changed, entry.chunks.num_bytes) == (0, 0)
        entry = only(compare(repo, {"w": tensor(array)}, {"w": tensor(array, flavor="torch")}))
        assert entry.differs == ("kind",)
        assert [side and side.kind for side in (entry.before, entry.after)] == ["array", "tensor"]


def test_a_tensor_may_become_a_value_or_a_container_and_back(repo: RepositoryHandle) -> None:
    t, v, c = numbers(500), 5, {"x": 1, "y": numbers(3)}
    assert shown(compare(repo, {"a": t}, {"a": v})) == {"a": "changed kind"}
    assert shown(compare(repo, {"a": v}, {"a": t})) == {"a": "changed kind"}
    assert shown(compare(repo, {"a": t}, {"a": c})) == {"a": "removed", "a/x": "added", "a/y": "added"}
    assert shown(compare(repo, {"a": c}, {"a": v})) == {"a": "added", "a/x": "removed", "a/y": "removed"}
    assert shown(compare(repo, {"a": {}}, {"a": t})) == {"a": "changed kind"}
    assert shown(compare(repo, {"a": {}}, {"a": c})) == {"a/x": "added", "a/y": "added"}
    assert shown(compare(repo, {"a": v}, {"a": "v" * 5000})) == {"a": "changed value"}


def test_containers_differ_by_their_kind_and_attributes(repo: RepositoryHandle) -> None:
    children = {0: ValueItem(1), 1: ValueItem(2)}
    found = compare(repo, {"a": Container("list", children)}, {"a": Container("tuple", children)})
    assert shown(found) == {"a": "changed kind"}
    parts = {"indices": tensor(np.arange(8).reshape(2, 4)), "values": tensor(numbers(4))}
    small, wide = (Container("sparse_coo", parts, {"shape": shape}) for shape in ((9, 9), (9, 99)))
    found = compare(repo, {"s": small}, {"s": wide}, values=True)
    assert shown(found) == {"s": "changed attrs"}
    entry = only(found)
    assert entry.before is not None
    assert entry.after is not None
    assert (entry.before.text, entry.after.text) == ("{'shape': (9, 9)}", "{'shape': (9, 99)}")
    assert shown(compare(repo, {}, {"s": small})) == {"s": "added", "s/indices": "added", "s/values": "added"}
    assert shown(compare(repo, {"s": {"values": 1}}, {"s": small}))["s"] == "changed kind attrs"


def test_what_ranks_hold_for_themselves_is_compared_rank_by_rank(repo: RepositoryHandle) -> None:
    a, b = (Container("ranks", {0: ValueItem(1), 1: ValueItem(at)}) for at in (2, 3))
    assert shown(compare(repo, {"rng": a}, {"rng": b})) == {"rng/1": "changed value"}


def test_names_that_are_numbers_are_not_those_that_only_read_like_them(repo: RepositoryHandle) -> None:
    found = compare(repo, {"s": {1: 0, 10: 0, 2: 0}}, {"s": {"1": 0, 10: 1, 2: 0, -1: 0}})
    assert list(shown(found).items()) == [
        ("s/-1", "added"), ("s/1", "removed"), ("s/10", "changed value"), ("s/~=1", "added"),
    ]  # fmt: skip


def test_tied_tensors_are_told_under_each_of_their_keys(repo: RepositoryHandle) -> None:
    def tied(array: np.ndarray[Any, Any]) -> dict[str, TensorItem]:
        item = tensor(array, identity=("memory", array.ctypes.data))
        return {"emb": item, "head": item}

    found = compare(repo, tied(LARGE), tied(edited(LARGE, (0, 0))))
    assert shown(found) == {"emb": "changed data", "head": "changed data"}
    assert found.entries[0].chunks == found.entries[1].chunks
    untied = {"emb": LARGE, "head": edited(LARGE, (0, 0))}
    assert shown(compare(repo, tied(LARGE), untied)) == {"head": "changed data"}


def test_a_tensor_that_only_has_another_name_has_moved(repo: RepositoryHandle) -> None:
    layers = {f"fc{at}": {"weight": numbers(400, seed=at), "bias": np.zeros(5, "float32")} for at in range(3)}
    found = compare(repo, {"old": layers, "v": 1}, {"new": layers, "w": 1})
    assert {entry.key: entry.moved_from for entry in found.moved} == {
        f"new/fc{at}/{name}": f"old/fc{at}/{name}" for at in range(3) for name in ("weight", "bias")
    }
    assert {key: what for key, what in shown(found).items() if what != "moved"} == {"v": "removed", "w": "added"}
    copied = compare(repo, {"a": LARGE}, {"a": LARGE, "b": LARGE})
    assert shown(copied) == {"b": "added"}


def test_of_several_equal_tensors_the_one_whose_name_ends_alike_has_moved(repo: RepositoryHandle) -> None:
    zeros = np.zeros(5, "float32")
    found = compare(repo, {"old": {"a": zeros, "b": zeros, "c": zeros}}, {"new": {"b": zeros}, "xc": zeros})
    assert {entry.key: entry.moved_from for entry in found.moved} == {"new/b": "old/b", "xc": "old/c"}
    assert [entry.key for entry in found.removed] == ["old/a"]


def test_sums_are_told_for_each_top_level_name_and_all(repo: RepositoryHandle) -> None:
    a = {"model": {"w": LARGE, "gone": numbers(1000)}, "step": 1}
    b = {"model": {"w": edited(LARGE, (0, 0)), "x": numbers(50)}, "step": 2}
    found = compare(repo, a, b)
    model, step = found.by_name["model"], found.by_name["step"]
    assert (model.added, model.removed, model.changed, model.moved) == (1, 1, 1, 0)
    assert (model.added_bytes, model.removed_bytes) == (200, 4000)
    assert (model.changed_chunks, model.num_chunks, model.changed_bytes) == (1, 3, 1024 * 4000)
    assert (step.changed, step.changed_bytes) == (1, 1)
    assert found.sums.changed_bytes == model.changed_bytes + 1
    assert (found.sums.changed, found.sums.added) == (2, 1)


def test_values_are_shown_if_that_is_asked_for(repo: RepositoryHandle) -> None:
    a = {"lr": 0.1, "long": "x" * 5000, "huge": 10**5000, "very": "y" * 100_000, "t": (1, "a")}
    b = {"lr": 0.2, "long": "z" * 5000, "huge": 1, "very": "", "t": [1, "a"]}
    texts = {
        entry.key: (entry.before.text, entry.after.text)
        for entry in compare(repo, a, b, values=True).entries
        if entry.before and entry.after
    }
    assert texts["lr"] == ("0.1", "0.2")
    assert texts["t"] == ("(1, 'a')", "[1, 'a']")
    assert texts["long"] == ("'" + "x" * 196 + "...", "'" + "z" * 196 + "...")
    assert texts["very"] == (None, "''")
    assert texts["huge"][0] is not None
    assert texts["huge"][0].endswith("bytes that Python does not show)")
    sides = [side for entry in compare(repo, a, b).entries for side in (entry.before, entry.after)]
    assert {side and side.text for side in sides} == {None}


def test_a_pickle_is_never_loaded_to_be_shown(repo: RepositoryHandle, tmp_path: Path) -> None:
    made = tmp_path / "made by a pickle"
    data = encode_value(_Opens(str(made)), key="p", allow_pickle=True)
    assert data
    for value in (1, _Opens(str(made))):
        commit_tree(repo, state({"p": value}), CommitRequest(allow_pickle=True))
    entry = only(diff_commits(repo, "main", None, DiffRequest(values=True)))
    assert entry.after is not None
    assert entry.after.text == "(pickled)"
    assert not made.exists()


class _Opens:
    """What makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_only_what_matches_a_pattern_is_told_and_a_pattern_of_nothing_is_an_error(repo: RepositoryHandle) -> None:
    a = {"model": {"a.w": numbers(9), "b.w": numbers(9)}, "step": 1, "same": 1}
    b = {"model": {"a.w": numbers(9) + 1, "b.w": numbers(9) + 1}, "step": 2, "same": 1}
    assert set(shown(compare(repo, a, b, keys="model"))) == {"model/a.w", "model/b.w"}
    assert set(shown(compare(repo, a, b, keys=["model/a", "step"]))) == {"model/a.w", "step"}
    assert shown(compare(repo, a, b, keys="same")) == {}
    with pytest.raises(NotFoundError, match=r"modle/\*"):
        compare(repo, a, b, keys=["modle/*", "step"])


def test_a_container_that_needs_pages_is_compared_with_one_that_does_not(repo: RepositoryHandle) -> None:
    few = {"many": {f"name {at:04d}": at for at in range(3)}}
    many = {"many": {f"name {at:04d}": at for at in range(3000)}}
    assert shown(compare(repo, few, many)) == {f"many/name {at:04d}": "added" for at in range(3, 3000)}
    assert shown(compare(repo, many, few)) == {f"many/name {at:04d}": "removed" for at in range(3, 3000)}


def test_a_pattern_of_parts_of_a_tensor_is_no_mistake_whether_they_differ_or_not(repo: RepositoryHandle) -> None:
    parts = {"values": tensor(numbers(300)), "indices": tensor(numbers(9))}
    state = {"emb": Container("sparse_coo", parts, {"shape": (9, 9)})}
    other = {"emb": Container("sparse_coo", parts | {"values": tensor(numbers(300, seed=1))}, {"shape": (9, 9)})}
    for pattern in ("emb/values", "emb/indices", "emb", "*/indices"):
        assert shown(compare(repo, state, state | {"step": 1}, keys=pattern)) == {}
    assert shown(compare(repo, state, other, keys=["emb/values", "emb/indices"])) == {"emb/values": "changed data"}
    with pytest.raises(NotFoundError, match="no entry matches emb/scales"):
        compare(repo, state, state, keys="emb/scales")


def test_only_nodes_of_tensors_and_values_that_differ_are_read(tmp_path: Path) -> None:
    """A state of 3,000 names in pages: the list of what changed costs nothing, a value a page of each side."""
    path = tmp_path / "repo"
    with_many = {f"name {at}": at for at in range(3000)}
    kept = {f"kept {at}": numbers(300, seed=at) for at in range(40)}
    repo = new_repository(path)
    old = commit(repo, {"many": with_many, "kept": kept, "w": LARGE})
    new = commit(repo, {"many": with_many | {"name 77": -1}, "kept": kept, "w": edited(LARGE, (0, 0))})
    repo.close()
    store = CountingStore(FileStore(path))
    repo = RepositoryHandle.on_store(store, index_url=str(path / INDEX_PATH))
    store.reset()
    assert diff_commits(repo, old.id, old.id).entries == ()
    assert store.num_calls == 0
    several = {"many/name 77": "changed value", "w": "changed data"}
    assert shown(diff_commits(repo, old.id, new.id)) == several
    assert store.num_calls <= 2  # the tensor nodes of `w`
    tensors = store.bytes_read
    store.reset()
    assert shown(diff_commits(repo, old.id, new.id, DiffRequest(keys="many"))) == {"many/name 77": "changed value"}
    assert store.num_calls == 0
    assert shown(diff_commits(repo, old.id, new.id, DiffRequest(values=True))) == several
    assert store.num_calls <= 4  # and a page of each side, of at most 16 KiB
    assert store.bytes_read < tensors + 2 * 20_000
    repo.close()


def test_containers_of_any_number_of_pages_are_compared_name_by_name(repo: RepositoryHandle) -> None:
    few = {f"n{at}": at for at in range(10)}
    some = {f"n{at}": at for at in range(0, 3000, 3)}
    many = {f"n{at}": at + (at == 333) for at in range(9000)}
    for a, b in ((few, many), (many, few), (some, many), (many, some), (few, some), ({}, many)):
        found = compare(repo, {"c": a}, {"c": b})
        assert {entry.key for entry in found.added} - {"c"} == {f"c/{name}" for name in b.keys() - a.keys()}
        assert {entry.key for entry in found.removed} - {"c"} == {f"c/{name}" for name in a.keys() - b.keys()}
        both = {f"c/{name}" for name in a.keys() & b.keys() if a[name] != b[name]}
        assert {entry.key for entry in found.changed} == both


def test_containers_that_share_all_their_pages_differ_by_what_they_are(repo: RepositoryHandle) -> None:
    many = {at: ValueItem(at) for at in range(3000)}
    found = compare(repo, {"c": Container("dict", dict(many))}, {"c": Container("odict", dict(many))})
    assert shown(found) == {"c": "changed kind"}


def nodes_of(handle: RepositoryHandle, kind: ObjectKind, revision: str) -> list[bytes]:
    """Ids of the nodes of one kind that the youngest meta pack of a commit holds."""
    commit_id = resolve(handle, revision)
    pack = handle.locate([commit_id])[commit_id][0].pack
    return [info.digest for info in read_directory(handle.store, pack)[1] if info.kind == kind]


def damage(path: Path, handle: RepositoryHandle, digest: bytes) -> None:
    """Flip a bit in the middle of a stored object."""
    place = handle.locate([Digest(digest)])[digest][0]
    file = path / place.pack
    data = bytearray(file.read_bytes())
    data[place.offset + place.header_bytes + place.stored_bytes // 2] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("kind", "key"), [(ObjectKind.TENSOR, "m/w"), (ObjectKind.TREE, "step"), (ObjectKind.TREE_PAGE, "m/c/n7")]
)
def test_a_damaged_node_whose_bytes_are_shown_is_found_and_named(tmp_path: Path, kind: ObjectKind, key: str) -> None:
    path = tmp_path / "repo"
    repo = new_repository(path)
    names = {f"n{at}": at for at in range(1000)}
    commit(repo, {"m": {"w": LARGE, "c": names}, "step": 1})
    commit(repo, {"m": {"w": edited(LARGE, (0, 0)), "c": names | {"n7": -7}}, "step": 2})
    for digest in nodes_of(repo, kind, "main"):
        damage(path, repo, digest)
    repo.close()
    repo = RepositoryHandle.open(path)
    with pytest.raises(CorruptionError, match=f"^{key}: "):
        diff_commits(repo, "main", request=DiffRequest(values=True))
    if kind is not ObjectKind.TENSOR:
        assert shown(diff_commits(repo, "main"))[key] == "changed value"
    repo.close()


def test_a_node_that_says_something_else_than_its_rows_is_noticed_when_it_is_shown(repo: RepositoryHandle) -> None:
    commit(repo, {"x": "a text of some length", "w": numbers(50)})
    commit(repo, {"x": "a text of some other length", "w": numbers(50) + 1})
    with repo.index.writing() as connection:
        connection.exec_driver_sql("UPDATE t_entries SET data = x'00112233445566778899aabbccddeeff' WHERE name = 'x'")
    assert shown(diff_commits(repo, "main"))["x"] == "changed value"
    with pytest.raises(CorruptionError, match="^x: its node holds something else than the index says"):
        diff_commits(repo, "main", request=DiffRequest(values=True))


def without_its_data(handle: RepositoryHandle, digest: Digest) -> None:
    """Leave nothing of the packs of a commit but its own object, as a collection does."""
    data = handle.read_node(ObjectKind.COMMIT, digest)
    pack = handle.locate([digest])[digest][0].pack
    write_nodes(handle.store, [Node(ObjectKind.COMMIT, digest, data)])
    handle.store.delete(pack)
    handle.sync()


def test_the_data_of_a_forgotten_commit_may_be_gone_and_the_error_says_so(repo: RepositoryHandle) -> None:
    old = commit(repo, {"w": numbers(600), "step": 1})
    new = commit(repo, {"w": numbers(600) + 1, "step": 2})
    without_its_data(repo, Digest(bytes.fromhex(old.id)))
    with pytest.raises(NotFoundError, match=r"in no pack"):
        diff_commits(repo, old.id, new.id)
    write_forgotten(repo.store, [Digest(bytes.fromhex(old.id))], author="test")
    with pytest.raises(NotFoundError, match=f"commit {old.short_id} was forgotten"):
        diff_commits(repo, old.id, new.id)
    assert diff_commits(repo, old.id, old.id).entries == ()


def test_a_commit_that_is_not_there_is_named(repo: RepositoryHandle) -> None:
    commit(repo, {"w": 1})
    with pytest.raises(NotFoundError, match="nobody"):
        diff_commits(repo, "main", "nobody")
    with pytest.raises(NotFoundError, match="1234abcd"):
        diff_commits(repo, "1234abcd", "main")
