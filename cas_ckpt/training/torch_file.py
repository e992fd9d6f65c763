"""Files of torch.save, in and out.

In:  1. a zip is looked through before torch sees it: nothing compressed, nothing that claims
        more bytes than the file has
     2. torch.load(weights_only=True): pickles that want to run code are refused, always
        NumPy arrays, which torch does not call weights, and newer pickles are read as data (torch_arrays.py)
     3. what came out is measured: references that unfold into more than any memory are refused
     4. captured like live state; tensors that lie in the file are read by offset when they are
        hashed, so that memory does not grow with the file
Out: the state is loaded (verified) and given to torch.save.

Invariant: nothing is ever unpickled that torch does not call weights. Must not know safetensors.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import LeftOut, commit_of
from cas_ckpt.core.revisions import Revision, resolve
from cas_ckpt.errors import CkptError, InvalidInputError, UnsupportedValueError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.state import Container, Item, TensorItem, with_tensors
from cas_ckpt.ops.files.export import ExportInfo
from cas_ckpt.ops.files.files import FileSource, InputFile, OutputFiles, ReadScratch
from cas_ckpt.ops.files.models import MODEL, ModelFiles, check_names, side_items
from cas_ckpt.ops.history.show import list_entries
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.storage.store import translated
from cas_ckpt.training.capture.capture import MAX_DEPTH, capture_state
from cas_ckpt.training.capture.tensors import HostTensor
from cas_ckpt.training.pickles import check_calls
from cas_ckpt.training.stateful import module_versions, set_versions
from cas_ckpt.training.torch_arrays import read_with_arrays
from cas_ckpt.training.verbs import load_state

VALUE = "value"
"""Where the content of a file that is not a mapping goes."""

MAX_ENTRIES = 20_000_000
"""Entries of a file, counted as often as they are referred to."""

MAX_GROWTH = 100
FREE_BYTES = 1 << 30
"""Tensors may stand for more bytes than the file has (expanded ones do): up to this, or this many times."""

ZIP_MAGIC = b"PK\x03\x04"
"""What a file of torch.save begins with, since torch 1.6."""

_READ_AS_DATA = ("numpy", "Unsupported operand")
"""What torch's refusals say of files that torch_arrays.py may read: NumPy's names, and pickles of protocol 3 to 5."""

_MAPS = "/proc/self/maps"

SMALL_BYTES = 4096
"""Smaller tensors are read where they are: they are on a page that torch's own reading touches."""

_ENCRYPTED = 1
_OLD_PICKLES = 5
"""Magic number, protocol, system, content, keys of the storages; their bytes follow."""


def torch_tree(files: ModelFiles, *, allow_pickle: bool = False) -> Container:
    """The state that the files hold; tensors are read when they are asked for.

    A file that holds a mapping is that state, anything else goes under "value"; the tensors of a
    folder go under "model", its other files under "files". Memory does not grow with the file,
    except for files of torch before 1.6, tensors that are not contiguous, and systems that
    are not Linux. The file must not be cut short meanwhile.

    Raises:
        InvalidInputError: malformed, or a pickle that wants to run code.
        UnsupportedValueError: an entry that cannot be expressed.
    """
    opened = [_Opened(file) for file in files.weights]
    content = {MODEL: _merged(files, opened)} if files.is_folder else opened[0].content
    tree = _tree(content if isinstance(content, Mapping) else {VALUE: content}, opened, allow_pickle=allow_pickle)
    return replace(tree, children={**tree.children, **side_items(files)})


def part_item(path: Path, *, allow_pickle: bool = False) -> Item | LeftOut:
    """What a file of torch.save beside a model holds, or why it cannot be taken.

    Raises:
        InvalidInputError: the file is damaged, or made to harm.
    """
    try:
        opened = _Opened(path)
        return _tree({VALUE: opened.content}, [opened], allow_pickle=allow_pickle).children[VALUE]
    except UnsupportedValueError as error:
        return LeftOut(path.name, f"holds what no commit can hold: {error}")
    except InvalidInputError as error:
        if not isinstance(error.__cause__, UnpicklingError):
            raise
        return LeftOut(path.name, refusal(error.__cause__))


def refusal(error: UnpicklingError) -> str:
    """Why a pickle was not loaded, in a few words."""
    wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
    return f"is a pickle that would run code ({wanted[1] if wanted else str(error)[:200]}); no code in a file is run"


def export_torch(
    handle: RepositoryHandle, revision: Revision, path: str | os.PathLike[str], *,
    keys: str | Sequence[str] | None = None, force: bool = False, progress: Progress = SILENT,
) -> ExportInfo:  # fmt: skip
    """Write the state of a commit to the file `path` with torch.save.

    The whole state is in memory meanwhile. Ties are kept.

    Raises:
        ConflictError: the file exists already. NotFoundError, CorruptionError, StorageError;
            nothing is left at `path` then.
    """
    place, digest = Path(path), resolve(handle, revision)
    entries = list_entries(handle, Digest(commit_of(handle, digest).root), keys=keys)
    tensors = [entry.num_bytes for entry in entries if entry.shape is not None]
    with OutputFiles(place.parent, [place.name], force=force) as output:
        state = load_state(handle, digest.hex(), keys=keys, progress=progress)
        with output.open(place.name) as file:
            save_torch(state, file, str(place))
    return ExportInfo((str(place),), len(tensors), sum(tensors))


def save_torch(state: Any, file: IO[bytes], name: str) -> None:
    """torch.save to an open file; what the disk refuses is a StorageError that names it."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        cause = error.__context__  # torch reports a failed write as a position that it did not expect
        if isinstance(cause, OSError):
            raise translated(cause, "writing", name) from error
        raise


# --- reading --------------------------------------------------------------------------------


class _Opened:
    """A file of torch.save and what it holds."""

    def __init__(self, path: Path) -> None:
        self.file = InputFile(path)
        is_zip = bytes(self.file.read(0, min(len(ZIP_MAGIC), self.file.size))) == ZIP_MAGIC
        self.is_mapped_as_it_is = False
        if is_zip:
            with open(self.file.fd, "rb", closefd=False) as raw:
                self.is_mapped_as_it_is = check_zip(raw, self.file.size, what=str(self.file.path))
        elif self.file.size:
            with mmap.mmap(self.file.fd, self.file.size, access=mmap.ACCESS_READ) as data:
                check_old_file(data, what=str(self.file.path))
        self.content = _load(self.file, is_mapped=is_zip)
        check_extent(self.content, self.file.size, what=str(self.file.path))


def _tree(state: Mapping[str, Any], opened: Sequence[_Opened], *, allow_pickle: bool) -> Container:
    """`state`, which is made of what the files hold, as a tree."""
    captured = capture_state(state, allow_pickle=allow_pickle)
    return read_by_offset(captured, [part.file for part in opened if part.is_mapped_as_it_is])


def _merged(files: ModelFiles, opened: Sequence[_Opened]) -> dict[str, Any]:
    """The tensors of all shards, checked against the index, with the versions of their modules."""
    model: dict[str, Any] = {}
    found: dict[str, Path] = {}
    versions: dict[str, int] | None = None
    for part in opened:
        path, content = part.file.path, part.content
        if not isinstance(content, Mapping):
            raise InvalidInputError(f"{path}: holds a {type(content).__name__}, wanted a mapping of names to tensors")
        for name, tensor in content.items():
            if name in found:
                raise InvalidInputError(f"{path}: {name!r} is in {found[name].name} too: remove one of them")
            found[name] = path
            model[name] = tensor
        told = module_versions(content)
        if told is not None:
            versions = {**(versions or {}), **told}
    check_names(files.weight_map, found, files.weights[0].parent)
    if versions is not None:
        model = OrderedDict(model)
        set_versions(model, versions, model)
    return model


def _load(file: InputFile, *, is_mapped: bool) -> Any:
    if not file.size:
        raise InvalidInputError(f"{file.path}: is empty: fetch or write it again")
    # A path of the very file that was checked, even if its name means another by now.
    same = f"/proc/self/fd/{file.fd}"
    try:
        return load_weights(same if os.path.exists(same) else str(file.path), what=str(file.path), is_mapped=is_mapped)
    except InvalidInputError as error:
        told = str(error.__cause__) if isinstance(error.__cause__, UnpicklingError) else ""
        if not is_mapped or not any(each in told for each in _READ_AS_DATA):
            raise
    with open(file.fd, "rb", closefd=False) as raw, opened_zip(raw, file.size, what=str(file.path)) as archive:
        if not is_our_byte_order(archive):
            raise InvalidInputError(f"{file.path}: NumPy arrays beside tensors of another byte order than this machine")
        return read_with_arrays(archive, file.fd, what=str(file.path))


def load_weights(source: str | IO[bytes], *, what: str, is_mapped: bool) -> Any:
    """What torch.load gives for plain weights.

    Raises:
        InvalidInputError: malformed, or it wants to run code (then caused by an UnpicklingError).
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)
    except CkptError:
        raise
    except Exception as error:  # a stranger's bytes can make torch raise anything
        raise InvalidInputError(
            f"{what}: torch cannot load it as plain weights: {_reason(error)}. Code in a file is never run: "
            "if you trust it, load it with torch yourself and save tensors and plain values alone"
        ) from error


def _reason(error: Exception) -> str:
    """The line of torch's message that says what is wrong; the others say how to trust the file."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    signs = ("WeightsUnpickler error", "Unsupported", "GLOBAL")
    telling = [line for line in lines if any(sign in line for sign in signs)]
    return f"{type(error).__name__}: {(telling or lines or [''])[0][:300]}"


# --- tensors read by offset ------------------------------------------------------------------
# Pages of a mapping that were touched count as memory of the process until it ends or the system needs them. Where
# the system tells what is mapped where (Linux), a tensor in a mapping is read with pread into one buffer per
# thread; elsewhere, as torch gave it. Only a tensor whose memory is inside a mapping of one of the given files is read
# from that file; the caller vouches that the mapping holds what the file holds.


@dataclass(frozen=True, slots=True)
class _Mapping:
    """Addresses [start, stop) are the file from `offset` on."""

    start: int
    stop: int
    offset: int
    file: InputFile


def read_by_offset(tree: Container, files: Sequence[InputFile]) -> Container:
    """`tree` with the source of every tensor that is in one of `files` replaced."""
    mappings, scratch = _mappings(files), ReadScratch()
    return with_tensors(tree, lambda item, _: _read_from_file(item, mappings, scratch)) if mappings else tree


def _read_from_file(item: TensorItem, mappings: Sequence[_Mapping], scratch: ReadScratch) -> TensorItem:
    num_bytes = item.spec.num_bytes
    if not isinstance(item.source, HostTensor) or num_bytes < SMALL_BYTES or not item.source.tensor.is_contiguous():
        return item
    address = item.source.tensor.data_ptr()
    for mapping in mappings:
        if mapping.start <= address and address + num_bytes <= mapping.stop:
            offset = address - mapping.start + mapping.offset
            return replace(item, source=_KeepingSource(mapping.file, offset, item.spec, scratch, item.source))
    return item


@dataclass(frozen=True, slots=True)
class _KeepingSource(FileSource):
    """A file source that keeps the tensor alive: what ties tensors refers to its storage."""

    kept: HostTensor


def _mappings(files: Sequence[InputFile]) -> list[_Mapping]:
    """Where in this process's memory each of `files` is mapped, as far as the system tells."""
    by_inode = {}
    for file in files:
        status = os.fstat(file.fd)
        by_inode[f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", str(status.st_ino)] = file
    by_path = {os.path.realpath(file.path): file for file in files}
    if not files or not os.path.exists(_MAPS):
        return []
    found = []
    with open(_MAPS, encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            # address           perms offset  dev   inode   path
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) < 6 or fields[4] == "0":
                continue
            mapped = by_inode.get((fields[3], fields[4])) or by_path.get(fields[5])
            if mapped is not None:
                start, stop = (int(address, 16) for address in fields[0].split("-"))
                found.append(_Mapping(start, stop, int(fields[2], 16), mapped))
    return found


# --- checking -------------------------------------------------------------------------------


def check_zip(raw: IO[bytes], num_bytes: int, *, what: str) -> bool:
    """See that a zip of `num_bytes` unpacks to no more bytes than it has; whether its byte order is ours.

    Raises:
        InvalidInputError: compressed, encrypted or overlapping members, or no zip at all.
    """
    with opened_zip(raw, num_bytes, what=what) as archive:
        for info in archive.infolist():
            if info.filename.endswith("/data.pkl"):
                check_calls(archive.read(info), max_bytes=_most_bytes(num_bytes), what=what)
        return is_our_byte_order(archive)


def check_old_file(data: Any, *, what: str) -> None:
    """The same for the bytes of a file of torch before 1.6, which are pickles one after another."""
    check_calls(data, max_bytes=_most_bytes(len(data)), num_pickles=_OLD_PICKLES, what=what)


def _most_bytes(file_bytes: int) -> int:
    return max(FREE_BYTES, MAX_GROWTH * file_bytes)


@contextmanager
def opened_zip(raw: IO[bytes], num_bytes: int, *, what: str) -> Iterator[zipfile.ZipFile]:
    """A zip of torch.save that unpacks to no more bytes than it has; raises as `check_zip`."""
    try:
        with zipfile.ZipFile(raw) as archive:
            members = archive.infolist()
            for info in members:
                shown = f"{what}: {info.filename[:80]!r}"
                if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                    raise InvalidInputError(f"{shown} is compressed, which torch.save never does")
                if info.flag_bits & _ENCRYPTED:
                    raise InvalidInputError(f"{shown} is encrypted, which torch.save never does")
            total = sum(info.file_size for info in members)
            if total > num_bytes or len({info.filename for info in members}) != len(members):
                raise InvalidInputError(f"{what}: members claim {total} of {num_bytes} bytes, or share names: no torch")
            yield archive
    except CkptError:
        raise
    except Exception as error:  # a stranger's bytes can make zipfile raise anything
        raise InvalidInputError(f"{what}: no readable zip, so nothing of torch.save: {error}") from error


def is_our_byte_order(archive: zipfile.ZipFile) -> bool:
    """Whether the storages of a checked archive hold what this machine's memory would."""
    members = archive.infolist()
    orders = [info for info in members if info.filename.endswith("/byteorder") and info.file_size <= 16]
    return all(archive.read(info) == sys.byteorder.encode() for info in orders)


def check_extent(content: Any, file_bytes: int, *, what: str) -> None:
    """See that following every reference ends, and before memory does.

    Raises:
        InvalidInputError: it does not.
    """
    try:
        num_entries, num_bytes = _extent(content, 0, {})
    except RecursionError as error:
        raise InvalidInputError(f"{what}: its content nests too deep to follow") from error
    if num_entries > MAX_ENTRIES or num_bytes > _most_bytes(file_bytes):
        raise InvalidInputError(
            f"{what}: {file_bytes} bytes unfold into {num_entries:.3e} entries and {num_bytes:.3e} bytes: "
            "a bomb, or state that should be saved without such repetition"
        )


def _extent(value: Any, depth: int, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Entries and tensor bytes at and below `value`; what is referred to twice is visited once, counted twice.

    Args:
        known: By id, of what was visited before.
    """
    if isinstance(value, torch.Tensor):
        return 1, value.numel() * value.element_size() if value.layout == torch.strided else 0
    if not isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return 1, 0
    if depth > MAX_DEPTH:
        raise RecursionError("deeper than any state")
    if id(value) not in known:
        parts = value.values() if isinstance(value, Mapping) else value
        pairs = [_extent(part, depth + 1, known) for part in parts]
        known[id(value)] = (1 + sum(entries for entries, _ in pairs), sum(size for _, size in pairs))
    return known[id(value)]
