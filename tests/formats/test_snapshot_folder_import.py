"""Folders of torchsnapshot come in whole, and nothing in them is run or believed."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cas_ckpt import CkptError, CommitOptions, InvalidInputError, Repository
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


def _shard(number: int, name: str, value: Any) -> Callable[[SnapshotFolder], None]:
    return lambda folder: folder.entries["1/x/d"]["shards"][number].__setitem__(name, value)


BROKEN: dict[str, Callable[[SnapshotFolder], Any]] = {
    "code": lambda folder: folder.saved("0/x/o", _Runs()),
    "no pickle": lambda folder: folder.write("0/x/o", b"nothing"),
    "no bytes": lambda folder: folder.write("0/x/o", b""),
    "no file": lambda folder: (folder.path / "0/x/t").unlink(),
    "cut short": lambda folder: folder.write("0/x/t", bytes(15)),
    "too long": lambda folder: folder.write("0/x/t", bytes(20)),
    "out of the folder": _change("location", "../x"),
    "absolute": _change("location", "/etc/passwd"),
    "another length": _change("shape", [5]),
    "a negative size": _change("shape", [-4]),
    "no shape": _change("shape", "4"),
    "many dimensions": _change("shape", [1] * 100),
    "an unknown dtype": _change("dtype", "torch.float31"),
    "an unknown serializer": _change("serializer", "pickle"),
    "a range outside": _change("byte_range", [4, 20]),
    "a range backwards": _change("byte_range", [20, 4]),
    "shared bytes": lambda folder: folder.entries["0/x/u"].update(location="0/x/t", byte_range=[0, 16]),
    "a rank too many": _entry("2/x/t", {"type": "list"}),
    "no rank": _entry("x/t", {"type": "list"}),
    "an unknown type": _entry("0/x/v", {"type": "Secret", "serialized_value": "x"}),
    "no integer": _entry("0/x/v", {"type": "int", "serialized_value": "x", "replicated": False}),
    "no float": _entry("0/x/v", {"type": "float", "serialized_value": "AAAA", "replicated": False}),
    "no truth": _entry("0/x/v", {"type": "bool", "serialized_value": "yes", "replicated": False}),
    "no entry": _entry("0/x/v", 7),
    "below a value": _entry("0/x/t/more", {"type": "list"}),
    "below nothing": _entry("0/nothing/more", {"type": "list"}),
    "a key that is not named": _entry("0/x/more", {"type": "list"}),
    "too deep": _entry("0/" + "x/" * 200, {"type": "list"}),
    "a list with a gap": _entry("0/x/l/7", {"type": "int", "serialized_value": "1", "replicated": False}),
    "a list with a name": _entry("0/x/l/a", {"type": "int", "serialized_value": "1", "replicated": False}),
    "shards that overlap": _shard(0, "offsets", [2, 0]),
    "shards with a hole": _shard(0, "offsets", [4, 0]),
    "a shard of another shape": _shard(0, "sizes", [1, 3]),
    "a dict with odd keys": _entry("0/x", {"type": "dict", "keys": [1.5]}),
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
    BROKEN[how](folder)
    with Repository.init(tmp_path / "repo") as repo:
        with pytest.raises(CkptError) as raised:
            repo.import_file(folder.finish())
        assert isinstance(raised.value, ValueError), raised.value  # InvalidInputError, and what is derived from it
        assert repo.latest() is None
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text", ["", "version: 0.0.3\nmanifest: {}\n", "[1]", "{}", '{"a":' * 5000, '{"world_size": 0}']
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
