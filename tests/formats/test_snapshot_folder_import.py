"""Folders of torchsnapshot come in whole, and nothing in them is run or believed."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cas_ckpt import CommitOptions, InvalidInputError, Repository, UnsupportedValueError
from cas_ckpt.torchsnapshot import RNGState, Snapshot, StateDict, close_repositories, import_snapshot
from tests.formats.snapshot_folders import Divided, SnapshotFolder, write_snapshot
from tests.torchsnapshot.states import same, trained


def one_state() -> dict[str, Any]:
    state = {key: each.state_dict() for key, each in trained(1, progress=7).items()}
    state["extra"] = {
        "number": 0.1, "text": "hi", "flag": True, "data": b"\x00x", "nothing": None, "pair": (1, "a"),
        "listed": [1, [2, {"x": None}]], "tensors": [torch.ones(2), [torch.zeros(1)]], "d/e": 43,
        "%x": {7: torch.ones(1)},
        "half": torch.arange(5).bfloat16(), "complex": torch.ones(2, dtype=torch.complex64),
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.5, 1, torch.qint8), "scalar": torch.tensor(3),
        "table": torch.randn(700, 300), "ordered": OrderedDict(b=torch.ones(1), a=2),
    }  # fmt: skip
    return state


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
@pytest.mark.parametrize("form", ["files", "batched", "chunked"])
def test_a_snapshot_of_one_rank_is_the_state_that_was_taken(tmp_path: Path, form: str) -> None:
    state = one_state()
    folder = write_snapshot(tmp_path / "old", state)
    if form == "batched":
        folder.batched()
    elif form == "chunked":
        folder.chunked("0/extra/table")
        folder.chunked("0/model/0.weight")
    with Repository.init(tmp_path / "repo") as repo:
        found = repo.import_file(folder.finish())
        assert found.left_out == ()
        loaded = repo.load(found)
        one, other = loaded["extra"].pop("quantized"), state["extra"].pop("quantized")
        assert torch.equal(one.int_repr(), other.int_repr()) and same(loaded, state)
        assert [*loaded["extra"]["ordered"]] == ["b", "a"]
        state["extra"]["quantized"] = other
        committed = repo.commit(state, branch="same", options=CommitOptions(orphan=True))
        assert found.root == committed.root


def two_states() -> tuple[dict[str, Any], dict[str, Any]]:
    shared, whole = trained(1)["model"].state_dict(), torch.arange(15.0).reshape(5, 3)
    made = [
        {
            "model": shared, "progress": {"step": 10 + rank, "history": [rank] * (rank + 1)},
            "mixed": {"table": Divided(whole, (3, 2)), "mine": torch.full((2,), float(rank))},
            "rng": {"rng_state": torch.get_rng_state()}, **({"only": {"x": 5}} if rank else {}),
        }
        for rank in range(2)
    ]  # fmt: skip
    return made[0], made[1]


@pytest.mark.parametrize("batched", [False, True])
def test_what_ranks_had_for_themselves_is_kept_by_rank(tmp_path: Path, batched: bool) -> None:
    folder = write_snapshot(tmp_path / "old", *two_states(), replicated=("model",))
    if batched:
        folder.batched()
    with Repository.init(tmp_path / "repo") as repo:
        loaded = repo.load(repo.import_file(folder.finish()))
    assert same(dict(loaded["model"]), dict(two_states()[0]["model"]))
    assert loaded["progress"] == {0: {"step": 10, "history": [0]}, 1: {"step": 11, "history": [1, 1]}}
    assert torch.equal(loaded["mixed"]["table"], torch.arange(15.0).reshape(5, 3))
    assert torch.equal(loaded["mixed"]["mine"][1], torch.ones(2)) and loaded["only"] == {1: {"x": 5}}


def test_an_imported_snapshot_is_restored_and_looked_into_like_one_that_was_taken(tmp_path: Path) -> None:
    drawn = torch.get_rng_state()
    old = write_snapshot(tmp_path / "old", *two_states(), replicated=("model",)).finish()
    snapshot = import_snapshot(old, str(tmp_path / "runs" / "step-10"))
    state = {**trained(3), "mixed": StateDict(table=torch.zeros(5, 3), mine=torch.zeros(2)), "rng": RNGState()}
    torch.rand(5)
    snapshot.restore({key: state[key] for key in ("model", "progress", "mixed", "rng")})
    assert same(state["model"], trained(1)["model"]) and state["progress"]["step"] == 10
    torch.set_rng_state(drawn)
    assert torch.equal(state["mixed"]["table"], torch.arange(15.0).reshape(5, 3)) and not state["mixed"]["mine"].any()
    manifest = snapshot.get_manifest()
    assert snapshot.metadata.world_size == 2 and manifest["0/model/0.weight"].replicated  # type: ignore[attr-defined]
    assert [snapshot.read_object(f"{rank}/progress/step") for rank in (0, 1)] == [10, 11]
    assert "1/model/0.weight" not in manifest and {"0/mixed/mine", "1/mixed/mine", "1/only/x"} <= manifest.keys()
    assert (old / ".snapshot_metadata").exists() and Snapshot(str(tmp_path / "runs" / "step-10")).get_manifest()
    close_repositories()


def test_names_of_wrappers_stay_in_a_snapshot_and_not_in_a_repository(tmp_path: Path) -> None:
    wrapped = torch.nn.DataParallel(torch.nn.Linear(2, 3))
    old = write_snapshot(tmp_path / "old", {"model": wrapped.state_dict()}).finish()
    other = torch.nn.DataParallel(torch.nn.Linear(2, 3))
    import_snapshot(old, str(tmp_path / "one")).restore({"model": other})
    assert same(other.module, wrapped.module)
    with Repository.init(tmp_path / "repo") as repo:
        found = repo.import_file(old)
        assert [entry.key for entry in repo.ls(found)] == ["model/bias", "model/weight"] and len(found.renamed) == 1
    close_repositories()


def test_what_else_is_in_the_folder_is_named(tmp_path: Path) -> None:
    old = write_snapshot(tmp_path / "old", {"x": {"y": torch.ones(2)}}).finish()
    (old / "notes.bin").write_text("x")
    with Repository.init(tmp_path / "repo") as repo:
        assert [each.name for each in repo.import_file(old).left_out] == ["notes.bin"]


# --- what is wrong ----------------------------------------------------------------------------


class _Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def _change(name: str, value: Any) -> Callable[[SnapshotFolder], None]:
    return lambda folder: folder.entries["0/x/t"].__setitem__(name, value)


def _entry(path: str, entry: Any) -> Callable[[SnapshotFolder], None]:
    return lambda folder: folder.entries.__setitem__(path, entry)


def _shard(name: str, value: Any, *, of: str = "") -> Callable[[SnapshotFolder], None]:
    def change(folder: SnapshotFolder) -> None:
        shard = folder.entries["1/x/d"]["shards"][0]
        (shard[of] if of else shard)[name] = value

    return change


BROKEN: dict[str, tuple[Callable[[SnapshotFolder], Any], str]] = {
    "code": (lambda folder: folder.saved("0/x/o", _Runs()), "posix.mkdir"),
    "no pickle": (lambda folder: folder.write("0/x/o", b"nothing"), "0/x/o"),
    "no bytes": (lambda folder: folder.write("0/x/o", b""), "0 bytes to be decoded"),
    "no file": (lambda folder: (folder.path / "0/x/t").unlink(), "no file can be opened"),
    "cut short": (lambda folder: folder.write("0/x/t", bytes(15)), "has 15 bytes, the tensor 16"),
    "too long": (lambda folder: folder.write("0/x/t", bytes(20)), "has 20 bytes, the tensor 16"),
    "out of the folder": (_change("location", "../beside"), "wanted the name of a file in the folder"),
    "another length": (_change("shape", [5]), "the tensor 20"),
    "a negative size": (_change("shape", [-4]), "shape is no list of sizes"),
    "no shape": (_change("shape", "4"), "shape is no list"),
    "many dimensions": (_change("shape", [1] * 100), "shape is no list of sizes"),
    "an unknown dtype": (_change("dtype", "torch.float31"), "the dtype 'float31'"),
    "an unknown serializer": (_change("serializer", "pickle"), "written by pickle"),
    "a range outside": (_change("byte_range", [4, 20]), "ends at byte 20 of 16"),
    "a range of another length": (_change("byte_range", [0, 12]), "the bytes 0 to 12 .* and has 16"),
    "a range backwards": (_change("byte_range", [20, 4]), "the bytes 20 to 4"),
    "shared bytes": (
        lambda folder: folder.entries["0/x/u"].update(location="0/x/t", byte_range=[0, 16]),
        "share bytes",
    ),
    "one path twice": (_entry("00/x/t", {"type": "list"}), "stands for two entries"),
    "sizes that no array has": (_change("shape", [0, 1 << 62, 1 << 62]), "sizes that no array can have"),
    "a rank with many digits": (_entry("0000000002/x/t", {"type": "list"}), "no path of one of 2 ranks"),
    "a rank too many": (_entry("2/x/t", {"type": "list"}), "no path of one of 2 ranks"),
    "no rank": (_entry("x/t", {"type": "list"}), "no path of one of 2 ranks"),
    "an unknown type": (_entry("0/x/v", {"type": "Secret", "serialized_value": "x"}), "'Secret', which is not known"),
    "no integer": (_entry("0/x/v", {"type": "int", "serialized_value": "x"}), "'x' is no int"),
    "no float": (_entry("0/x/v", {"type": "float", "serialized_value": "AAAA"}), "is no float"),
    "no truth": (_entry("0/x/v", {"type": "bool", "serialized_value": "yes"}), "is no bool"),
    "no entry": (_entry("0/x/v", 7), "type is no str"),
    "below a value": (_entry("0/x/t/more", {"type": "list"}), "has a value, and others below"),
    "below nothing": (_entry("0/nothing/more", {"type": "list"}), "leads through something that has no entry"),
    "a key that is not named": (_entry("0/x/more", {"type": "list"}), "has no key 'more'"),
    "too deep": (_entry("0/" + "x/" * 200, {"type": "list"}), "deeper than 90 levels"),
    "a list with a gap": (_entry("0/x/l/7", {"type": "int", "serialized_value": "1"}), "some places are not saved"),
    "a list with a name": (_entry("0/x/l/a", {"type": "int", "serialized_value": "1"}), "something without a number"),
    "shards that overlap": (_shard("offsets", [2, 0]), "two saved chunks hold"),
    "shards with a hole": (_shard("offsets", [4, 0]), "no saved chunk holds"),
    "a shard of another shape": (_shard("sizes", [1, 3]), "whose tensor has another shape"),
    "shards of two dtypes": (_shard("dtype", "torch.int32", of="tensor"), "do not belong together"),
    "shards of two dimensions": (
        lambda folder: folder.entries["1/x/d"]["shards"][0].update(
            offsets=[6], sizes=[6], tensor={**folder.entries["1/x/d"]["shards"][0]["tensor"], "shape": [6]}
        ),
        "do not belong together",
    ),
    "chunks of two dtypes": (
        lambda folder: (
            folder.chunked("0/x/t"),
            folder.entries["0/x/t"]["chunks"][0]["tensor"].update(dtype="torch.int32"),
        ),
        "pieces of several dtypes",
    ),
    "a dict with odd keys": (_entry("0/x", {"type": "dict", "keys": [1.5]}), "key of type float"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_or_hostile_folder_is_refused_and_nothing_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = Divided(torch.ones(5, 3), (3, 2))
    states = [
        {"x": {"t": torch.ones(4), "u": torch.ones(4), "o": (1, 2), "v": 3, "l": [1], "d": whole}} for _ in range(2)
    ]
    folder = write_snapshot(tmp_path / "old", *states)
    (tmp_path / "beside").write_bytes(bytes(16))
    change, said = BROKEN[how]
    change(folder)
    with Repository.init(tmp_path / "repo") as repo:
        with pytest.raises((InvalidInputError, UnsupportedValueError), match=said):
            repo.import_file(folder.finish())
        assert repo.latest() is None
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text",
    ["", "version: 0.0.3\nmanifest: {}\n", "[1]", "{}", '{"a":' * 5000, '{"world_size": 0}', "5", '["repository"]'],
)
def test_metadata_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / ".snapshot_metadata").write_text(text)
    with Repository.init(tmp_path / "repo") as repo, pytest.raises(InvalidInputError, match="snapshot_metadata"):
        repo.import_file(tmp_path / "old")


def test_a_snapshot_of_our_own_is_no_folder_to_import(tmp_path: Path) -> None:
    Snapshot.take(str(tmp_path / "one"), {"x": StateDict(y=1)})
    close_repositories()
    with Repository.open(tmp_path / ".cas_ckpt") as repo, pytest.raises(InvalidInputError, match="of cas_ckpt itself"):
        repo.import_file(tmp_path / "one", branch="other")


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = write_snapshot(tmp_path / "old", {"x": {"t": torch.ones(4)}})
    (tmp_path / "secret").write_bytes(bytes(16))
    (tmp_path / "old" / "0/x/t").unlink()
    (tmp_path / "old" / "0/x/t").symlink_to(tmp_path / "secret")
    with Repository.init(tmp_path / "repo") as repo, pytest.raises(InvalidInputError, match="outside the folder"):
        repo.import_file(folder.finish())
