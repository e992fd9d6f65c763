"""Files of torch.save come in as the state that they hold; code in them is never run."""

from __future__ import annotations

import io
import os
import pickle
import signal
import tracemalloc
import zipfile
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy._core.multiarray import _reconstruct as np_reconstruct  # type: ignore[attr-defined]
from numpy._core.multiarray import scalar as np_scalar
from safetensors.torch import save_file

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import load_tree
from cas_ckpt.errors import InvalidInputError, UnsupportedValueError
from cas_ckpt.formats import pickles
from cas_ckpt.formats import torch_file as mapped
from cas_ckpt.formats.folders import FileSource
from cas_ckpt.objects.structures import DATACLASS, Named
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.training.capture.capture import capture_state
from cas_ckpt.training.verbs import load_state
from tests.builders import new_repository
from tests.formats.import_files import assert_refused, container_id, import_file, try_import, write_index
from tests.searches import tries


@pytest.fixture
def repo(tmp_path: Path) -> RepositoryHandle:
    return new_repository(tmp_path / "repo")


def training_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 5))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 300)).sum().backward()
    optim.step()
    return {"model": model.state_dict(), "optim": optim.state_dict(), "epoch": 3, "best": None, "names": ["a", "b"]}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_training_state_comes_in_as_if_it_had_been_committed(
    repo: RepositoryHandle, tmp_path: Path, protocol: int
) -> None:
    state = training_state()
    torch.save(state, tmp_path / "s.pt", pickle_protocol=protocol)
    imported = import_file(repo, tmp_path / "s.pt")
    live = commit_tree(repo, capture_state(state), CommitRequest(branch="live"))
    assert imported.root == live.root


def test_every_kind_of_tensor_comes_in_as_it_is(repo: RepositoryHandle, tmp_path: Path) -> None:
    wide = torch.randn(300, 400)
    state = {
        "transposed": wide.t(), "part": wide[10:200, 7:], "expanded": torch.ones(1, 5).expand(4000, 5),
        "scalar": torch.tensor(3), "empty": torch.empty(0, 3), "complex": torch.randn(50, 60, dtype=torch.complex64),
        "bits": torch.rand(99) > 0.5,
        "fp8": torch.randn(8192).to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(torch.randn(90, 90)),
    }  # fmt: skip
    torch.save(state, tmp_path / "s.pt")
    loaded = load_state(repo, import_file(repo, tmp_path / "s.pt").id)
    for name, tensor in state.items():
        same = loaded[name].view(torch.uint8) if name == "fp8" else loaded[name]
        assert torch.equal(same, tensor.detach().view(torch.uint8) if name == "fp8" else tensor.detach())


def test_tied_tensors_stay_tied(repo: RepositoryHandle, tmp_path: Path) -> None:
    shared = torch.randn(100, 100)
    torch.save({"a": shared, "b": [shared]}, tmp_path / "s.pt")
    loaded = load_state(repo, import_file(repo, tmp_path / "s.pt").id)
    assert loaded["a"] is loaded["b"][0]


def test_large_tensors_are_read_by_offset_and_give_what_torch_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.randn(3000, 500), "t": torch.randn(300, 500).t(), "small": torch.ones(3)}
    state["slice"] = torch.randn(9000)[1000:8000]
    torch.save(state, tmp_path / "s.pt")
    roots, seen = [], []

    def note(*args: Any) -> Any:
        seen.append(original(*args))
        return seen[-1]

    original = mapped._read_from_file
    monkeypatch.setattr(mapped, "_read_from_file", note)
    roots.append(import_file(init_repository("memory://"), tmp_path / "s.pt").root)
    monkeypatch.setattr(mapped, "SMALL_BYTES", 1 << 40)
    roots.append(import_file(init_repository("memory://"), tmp_path / "s.pt").root)
    assert [isinstance(item.source, FileSource) for item in seen] == [True, False, False, True] + [False] * 4
    assert roots[0] == roots[1]


def test_what_is_no_mapping_goes_under_value(repo: RepositoryHandle, tmp_path: Path) -> None:
    torch.save([torch.ones(3), 7], tmp_path / "s.pth")
    assert load_state(repo, import_file(repo, tmp_path / "s.pth").id)["value"][1] == 7


def test_files_of_old_torch_come_in_too(repo: RepositoryHandle, tmp_path: Path) -> None:
    state = {"w": torch.randn(200, 30)}
    torch.save(state, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    torch.save(state, tmp_path / "new.bin")
    assert import_file(repo, tmp_path / "old.bin").root == import_file(repo, tmp_path / "new.bin").root


def test_a_file_of_the_other_byte_order_is_read_from_memory(repo: RepositoryHandle, tmp_path: Path) -> None:
    state = {"w": torch.randn(100, 100)}
    torch.save(state, tmp_path / "s.pt")
    swapped = state["w"].numpy().byteswap().tobytes()
    change = {"/byteorder": b"big", "/data/0": swapped}
    rewrite_zip(tmp_path / "s.pt", tmp_path / "big.pt", lambda name, data: change.get(name[name.index("/") :], data))
    loaded = load_state(repo, import_file(repo, tmp_path / "big.pt").id)
    assert torch.equal(loaded["w"], state["w"])


def test_a_folder_of_torch_shards_is_the_model_of_a_safetensors_file(repo: RepositoryHandle, tmp_path: Path) -> None:
    model = {"a": torch.randn(80, 90), "b": torch.randn(3000), "c": torch.ones(2)}
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"a": model["a"], "c": model["c"]}, folder / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": model["b"]}, folder / "pytorch_model-00002-of-00002.bin")
    one, two = (f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2))
    write_index(folder, {"a": one, "b": two, "c": one}, "pytorch_model.bin.index.json")
    (folder / "config.json").write_text("{}")
    save_file(model, tmp_path / "m.safetensors")
    from_folder, from_file = import_file(repo, folder), import_file(repo, tmp_path / "m.safetensors")
    assert container_id(repo, from_folder.root, "model") == container_id(repo, from_file.root, "model")
    assert "files" in load_tree(repo, bytes.fromhex(from_folder.root)).children
    torch.save({"b": model["b"], "a": model["a"]}, folder / two)
    assert_refused(repo, folder, "too")
    torch.save([model["b"]], folder / two)
    assert_refused(repo, folder, "mapping")


# --- what is refused ------------------------------------------------------------------------


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("new", [True, False])
def test_code_in_a_file_is_never_run(repo: RepositoryHandle, tmp_path: Path, new: bool) -> None:
    torch.save({"w": torch.ones(3), "x": Bomb(tmp_path / "ran")}, tmp_path / "s.pt", _use_new_zipfile_serialization=new)
    assert_refused(repo, tmp_path / "s.pt", "never run")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    assert_refused(repo, tmp_path / "plain.pt", "never run")
    assert not (tmp_path / "ran").exists()


def rewrite_zip(
    source: Path, target: Path, change: Callable[[str, bytes], bytes] = lambda name, data: data, **how: Any
) -> None:
    """`source` again, its members changed or written otherwise."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", **how) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))


def test_a_compressed_zip_is_refused_before_it_unfolds(repo: RepositoryHandle, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1_000_000)}, tmp_path / "s.pt")
    rewrite_zip(tmp_path / "s.pt", tmp_path / "bomb.pt", compression=zipfile.ZIP_DEFLATED)
    assert (tmp_path / "bomb.pt").stat().st_size < 20_000
    assert_refused(repo, tmp_path / "bomb.pt", "compressed")


def test_a_zip_that_claims_more_than_it_has_is_refused(repo: RepositoryHandle, tmp_path: Path) -> None:
    torch.save({"w": torch.arange(100.0)}, tmp_path / "s.pt")
    data = bytearray((tmp_path / "s.pt").read_bytes())
    at = data.rindex(b"data/0")  # its entry in the central directory: sizes stand 26 bytes before the name
    start = data.rindex(b"PK\x01\x02", 0, at)
    data[start + 20 : start + 28] = (10_000_000).to_bytes(4, "little") * 2
    (tmp_path / "liar.pt").write_bytes(data)
    assert_refused(repo, tmp_path / "liar.pt", "claim")


def test_references_that_unfold_without_end_are_refused(repo: RepositoryHandle, tmp_path: Path) -> None:
    laughs: list[Any] = [torch.ones(1)]
    for _ in range(60):
        laughs = [laughs, laughs]
    torch.save({"x": laughs}, tmp_path / "laughs.pt")
    assert_refused(repo, tmp_path / "laughs.pt", "unfold")
    circle: dict[str, Any] = {}
    circle["x"] = circle
    torch.save(circle, tmp_path / "circle.pt")
    assert_refused(repo, tmp_path / "circle.pt", "deep")
    torch.save({"x": torch.zeros(1).expand(1 << 40)}, tmp_path / "wide.pt")
    assert_refused(repo, tmp_path / "wide.pt", "unfold")


def pickled(name: str, *args: bytes, times: int = 1) -> bytes:
    """A pickle of a dict of lists of what calling `name` gives; `args` are opcodes."""
    module, _, function = name.rpartition(".")
    call = f"c{module}\n{function}\n".encode() + b"(" + b"".join(args) + b"tR"
    return b"\x80\x02}X\x01\x00\x00\x00x](" + call * times + b"es."


@pytest.mark.parametrize("new", [True, False], ids=["zip", "old"])
@pytest.mark.parametrize(
    ("name", "args", "times"),
    [
        ("builtins.bytearray", [b"J\x00\x00\x00\x40"], 4),
        ("builtins.bytearray", [b"J\x00\x00\x00\x40"], 1),
        ("torch.Tensor", [b"J\x00\x00\x00\x40"], 1),
        ("torch.storage.UntypedStorage", [b"\x8a\x05\x00\x00\x00\x00\x01"], 1),
        ("torch.Tensor", [b"ctorch\nSize\n((J\x00\x00\x00\x10K\x10ttR"], 1),
        ("torch._tensor._rebuild_from_type_v2", [b"ctorch\nTensor\nctorch\nTensor\n(J\x00\x00\x00\x40tN"], 1),
        ("_codecs.encode", [b"X" + (1 << 20).to_bytes(4, "little") + b"a" * (1 << 20) + b"q\x010h\x01"], 1),
    ],
    ids=["four of 1 GiB", "one of 1 GiB", "tensor", "storage", "tensor of a size", "tensor of a type", "copies"],
)
def test_a_pickle_that_asks_for_memory_by_number_is_refused_before_it_is_loaded(
    repo: RepositoryHandle, tmp_path: Path, new: bool, name: str, args: list[bytes], times: int
) -> None:
    data = pickled(name, *args, times=times)
    if name == "_codecs.encode":
        again = b"c_codecs\nencode\n(h\x01tR" * 1500
        data = data[:-3] + again + b"es."
    torch.save({"x": 1}, tmp_path / "s.pt", _use_new_zipfile_serialization=new)
    if new:
        changed: Callable[[str, bytes], bytes] = lambda name, old: data if name.endswith("data.pkl") else old  # noqa: E731
        rewrite_zip(tmp_path / "s.pt", tmp_path / "bomb.pt", changed)
    else:
        content = pickle.dumps({"x": 1}, 2)
        (tmp_path / "bomb.pt").write_bytes((tmp_path / "s.pt").read_bytes().replace(content, data))
    tracemalloc.start()
    try:
        assert_refused(repo, tmp_path / "bomb.pt", "bomb")
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


WIDE = torch.zeros(1).expand(3000)
LONG = "a" * (1 << 20)


class Call:
    """Pickled as a call."""

    def __init__(self, call: Callable[..., Any], *args: Any, state: Any = None) -> None:
        self.parts = (call, args) if state is None else (call, args, state)

    def __reduce__(self) -> Any:
        return self.parts


def sparse(indices: torch.Tensor, values: torch.Tensor) -> Call:
    return Call(torch._utils._rebuild_sparse_tensor, torch.sparse_coo, (indices, values, (5,)))


LONGER_THAN_SAID: dict[str, Any] = {
    "set of a tensor": Call(set, WIDE),
    "OrderedDict of a tensor": Call(OrderedDict, torch.zeros(1, 1).expand(50, 2)),
    "OrderedDict of an array": Call(OrderedDict, np.zeros((50, 2))),
    "torch.Size of a tensor": Call(torch.Size, torch.zeros(1, dtype=torch.int64).expand(30)),
    "indices that are converted": sparse(torch.zeros(1, 3, dtype=torch.int32), torch.ones(3)),
    "indices that are expanded": sparse(torch.zeros(1, 1, dtype=torch.int64).expand(1, 3000), torch.ones(3000)),
    "values that are expanded": sparse(torch.zeros(1, 3000, dtype=torch.int64), WIDE),
    "parts in a list": Call(torch._utils._rebuild_sparse_tensor, torch.sparse_coo,
                            [torch.zeros(1, 3, dtype=torch.int64), torch.ones(3), (5,)]),
    "number of a tensor": Call(np_scalar, np.dtype("f4"), np.zeros(1, "f4")),
    "state in a list": Call(np_reconstruct, np.ndarray, (0,), b"b", state=[1, (3,), np.dtype("f4"), False, b"a" * 12]),
    "a path of a number": Call(PosixPath, 7),
    "a member of an enum that is a list": Call(signal.Signals, [15]),
    "a namespace with a number as a name": Call(Namespace, state={7: 1}),
    "a namespace that hides a method": Call(Namespace, state={"__reduce_ex__": 1}),
    "empty array of a shape": Call(np_reconstruct, np.ndarray, np.zeros(1, int), b"b"),
}  # fmt: skip


@pytest.mark.parametrize("name", LONGER_THAN_SAID)
def test_a_call_takes_nothing_that_is_longer_than_the_file(repo: RepositoryHandle, tmp_path: Path, name: str) -> None:
    torch.save([LONGER_THAN_SAID[name]], tmp_path / "s.pt")
    assert_refused(repo, tmp_path / "s.pt", "no pickle can be read|written as NumPy writes it")


REPEATED: dict[str, Any] = {
    "a set of a set": lambda: [Call(set, items) for items in [{*range(1000)}] * 40],
    "an OrderedDict of pairs": lambda: [
        Call(OrderedDict, pairs) for pairs in [{(each, 1) for each in range(1000)}] * 40
    ],
    "a namespace of names": lambda: [
        Call(Namespace, state=names) for names in [{str(each): 1 for each in range(1000)}] * 40
    ],
}


@pytest.mark.parametrize("name", REPEATED)
def test_elements_that_calls_copy_are_counted(
    repo: RepositoryHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(pickles, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(pickles, "MAX_GROWTH", 1)
    torch.save(REPEATED[name](), tmp_path / "s.pt")
    assert_refused(repo, tmp_path / "s.pt", "copies its own content")


def with_attributes(**attributes: Any) -> OrderedDict[str, Any]:
    made = OrderedDict({"x": [torch.zeros(1).expand(1 << 40)]})
    vars(made).update(attributes)
    return made


class Hidden(torch.nn.Parameter):
    """Pickled as a Parameter with attributes."""

    def __reduce_ex__(self, _protocol: Any) -> Any:
        hidden = {"numel": "x", "is_quantized": 1}
        return torch._utils._rebuild_parameter_with_state, (self.data, False, OrderedDict(), hidden)


def test_attributes_of_instances_hide_nothing(repo: RepositoryHandle, tmp_path: Path) -> None:
    torch.save([with_attributes(values="x", keys="x")], tmp_path / "s.pt")
    assert_refused(repo, tmp_path / "s.pt", "unfold")
    torch.save({"x": Hidden(torch.ones(3))}, tmp_path / "p.pt")
    assert torch.equal(load_state(repo, import_file(repo, tmp_path / "p.pt").id)["x"], torch.ones(3))


UNFOLDING: dict[str, Callable[[], Any]] = {
    "text": lambda: LONG,
    "bytes": LONG.encode,
    "bytearray": lambda: bytearray(1 << 20),
    "keys": lambda: {LONG: 1},
    "arrays": lambda: np.zeros(1 << 20, np.uint8),
    "namespace": lambda: Namespace(x=LONG),
    "instance": lambda: Named(DATACLASS, "a:b", {"x": LONG}),
    "sparse COO": lambda: torch.ones(1 << 16).to_sparse(),
    "sparse CSR": lambda: torch.ones(1 << 8, 1 << 8).to_sparse_csr(),
}


@pytest.mark.parametrize("name", UNFOLDING)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_all_that_has_a_length_is_counted_as_often_as_it_is_referred_to(name: str) -> None:
    value = UNFOLDING[name]()
    mapped.check_extent([value] * 4, 1 << 21, what="s.pt")
    with pytest.raises(InvalidInputError, match=r"s\.pt: .* unfold"):
        mapped.check_extent([value] * 1500, 1 << 21, what="s.pt")


def test_the_numbers_of_an_old_file_are_numbers(tmp_path: Path, repo: RepositoryHandle) -> None:
    torch.save([1], tmp_path / "s.pt", _use_new_zipfile_serialization=False)
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
    data = (tmp_path / "s.pt").read_bytes()
    assert data.startswith(magic)
    storage = b"(X\x07\0\0\0storagectorch\nByteStorage\nX\x01\0\0\0aX\x03\0\0\0cpuK\x01Nt\x51"
    size = b"J\0\0\0\x04\x85"  # 1 << 26 elements of one
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + size + b"K\0\x85\x89Ntq\x01R."
    (tmp_path / "s.pt").write_bytes(b"\x80\x02" + tensor + data[len(magic) :])
    assert_refused(repo, tmp_path / "s.pt", "no file of torch before 1.6")


DEEP = b")" + b"\x85" * 100_000
NESTED: dict[str, bytes] = {
    "dict": b"}" + DEEP + b"Ns",
    "set": b"c__builtin__\nset\n](" + DEEP + b"e\x85R",
    "items of a set": b"\x8f(" + DEEP + b"\x90",
    "Counter": b"ccollections\nCounter\n](" + DEEP + b"e\x85R",
    "OrderedDict": b"ccollections\nOrderedDict\n](" + DEEP + b"N\x86e\x85R",
    "layout": b"ctorch.serialization\n_get_layout\n" + DEEP + b"\x85R",
}


@pytest.mark.parametrize("name", NESTED)
def test_a_key_that_nests_deeper_than_hash_can_follow_is_refused(
    repo: RepositoryHandle, tmp_path: Path, name: str
) -> None:
    torch.save({"x": 1}, tmp_path / "s.pt")
    data = b"\x80\x04" + NESTED[name] + b"."
    rewrite_zip(tmp_path / "s.pt", tmp_path / "deep.pt", lambda _, old: data if old[:1] == b"\x80" else old)
    assert_refused(
        repo, tmp_path / "deep.pt", r"no pickle can be read there \((ValueError: a key of tuples|TypeError|KeyError)"
    )


def test_values_that_calls_make_come_in_as_they_are(repo: RepositoryHandle, tmp_path: Path) -> None:
    state = {
        "bytes": b"\x00\xff" * 300, "array": bytearray(b"ab" * 300), "empty": bytearray(), "set": {1, "b"}, "z": 1 + 2j,
        "ordered": OrderedDict([("b", [1]), ("a", torch.ones(2))]), "counter": Counter("abba"), "long": 1 << 200,
        "size": torch.Size([1 << 40, 2]), "args": Namespace(lr=0.1, more=SimpleNamespace(path=PosixPath("/a/b"))),
        "signal": signal.SIGTERM,
        "sparse": torch.eye(3).to_sparse(), "param": torch.nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    for new in (True, False):
        torch.save(state, tmp_path / "s.pt", _use_new_zipfile_serialization=new)
        found = load_state(repo, import_file(repo, tmp_path / "s.pt").id)
        for name in ("bytes", "array", "empty", "set", "z", "counter", "long", "size", "args", "signal"):
            assert found[name] == state[name]
            assert type(found[name]) is type(state[name])
        assert torch.equal(found["sparse"].to_dense(), torch.eye(3))


def test_a_tensor_longer_than_its_storage_is_refused(repo: RepositoryHandle, tmp_path: Path) -> None:
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "s.pt")
    longer = (b"M\xe8\x03", b"J\x40\x42\x0f\x00")  # the pickled number 1000 becomes 1000000
    rewrite_zip(tmp_path / "s.pt", tmp_path / "long.pt", lambda name, data: data.replace(*longer))
    assert_refused(repo, tmp_path / "long.pt")


def test_a_value_without_a_form_is_refused_by_key_and_file(repo: RepositoryHandle, tmp_path: Path) -> None:
    torch.save({"a": {"odd": {("x", 1): torch.ones(1)}}}, tmp_path / "s.pt")
    with pytest.raises(UnsupportedValueError, match=r"s\.pt: a/odd: "):
        import_file(repo, tmp_path / "s.pt")


def test_other_files_are_refused(repo: RepositoryHandle, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3000)}, tmp_path / "s.pt")
    whole = (tmp_path / "s.pt").read_bytes()
    empty_zip = io.BytesIO()
    zipfile.ZipFile(empty_zip, "w").close()
    made = {"empty.pt": b"", "text.pt": b"hello, world", "cut.pt": whole[:-30], "half.pt": whole[: len(whole) // 2],
            "zip.pt": empty_zip.getvalue(), "magic.pt": b"PK\x03\x04", "nul.bin": b"\0" * 64}  # fmt: skip
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
        assert_refused(repo, tmp_path / name)
    os.mkfifo(tmp_path / "fifo.pt")
    (tmp_path / "folder.pt").mkdir()
    for name in ("fifo.pt", "folder.pt", "gone.pt"):
        assert_refused(repo, tmp_path / name)


def seed_file() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(4.0), "n": [1, "x"]}, buffer)
    return buffer.getvalue()


SEED = seed_file()


@settings(max_examples=tries(45, 150))
@given(st.integers(0, len(SEED) - 1), st.binary(min_size=1, max_size=3))
def test_any_bytes_in_a_good_file_are_refused_or_imported(
    tmp_path_factory: pytest.TempPathFactory, at: int, patch: bytes
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "s.pt"
    path.write_bytes(SEED[:at] + patch + SEED[at + len(patch) :])
    found = try_import(init_repository("memory://"), path)
    assert not isinstance(found, str) or "s.pt" in found
