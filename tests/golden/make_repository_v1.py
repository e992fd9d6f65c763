"""Makes the repository that freezes format 1: run once, then never again.

    python -m tests.golden.make_repository_v1 [FOLDER]

Writes repository-v1.zip and repository-v1.json, and refuses to replace them: every later
version of cas_ckpt has to read the ones that are there.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cas_ckpt import CommitOptions, Repository, clock
from cas_ckpt.objects.spec import DTYPE_BYTES
from tests.golden.manifest import described

HERE = Path(__file__).parent
AUTHOR = "golden@example.org"


@dataclass
class Golden:
    """The repository in the making, and what is written down of it."""

    repo: Repository
    commits: dict[str, Any] = field(default_factory=dict)

    def commit(self, state: dict[str, Any], message: str, **request: Any) -> str:
        with Repository.open(self.repo.url) as repo:  # a fresh one: states here come from no commit
            info = repo.commit(state, message=message, options=CommitOptions(author=AUTHOR), **request)
        self.commits[info.id] = {
            "root": info.root, "parents": list(info.parents), "message": message, "author": AUTHOR,
            "time_us": round(info.time_s * 1e6), "step": info.step, "metrics": dict(info.metrics),
            "meta": repr(info.meta), "entries": described(live(state)),
        }  # fmt: skip
        return info.id


def live(value: Any) -> Any:
    """The state with Stateful objects replaced by what they give."""
    if isinstance(value, dict):
        return type(value)((name, live(child)) for name, child in value.items())
    if not hasattr(value, "state_dict"):
        return value
    given = value.state_dict()
    return OrderedDict(given) if isinstance(value, torch.nn.Module) else given


def ramp(*shape: int) -> torch.Tensor:
    return (torch.arange(int(np.prod(shape)), dtype=torch.float64).reshape(shape) / 7).to(torch.float32)


def noise(size: int, seed: int = 1) -> torch.Tensor:
    """Bytes that nothing compresses; from a sequence that no library changes."""
    state, found = seed, bytearray()
    for _ in range(size):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        found.append(state >> 56)
    return torch.frombuffer(found, dtype=torch.uint8)


def every_dtype(size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of each dtype of the format that strided tensors can have."""
    plain = (name for name in DTYPE_BYTES if not name.startswith(("q", "bits", "int1", "uint1")) or name.endswith("16"))
    for name in plain:
        dtype = getattr(torch, name, None)
        if dtype is None or (name.lstrip("u").startswith("int") and int(name.lstrip("uint")) < 8):
            continue
        raw = torch.arange(size * dtype.itemsize, dtype=torch.int64).remainder(2 if name == "bool" else 251)
        yield name, raw.to(torch.uint8).view(dtype)


def kinds() -> dict[str, Any]:
    """Everything that a state can hold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse CSR and quantized tensors announce themselves
        csr = torch.eye(5).to_sparse_csr()
        quantized = torch.quantize_per_tensor(ramp(6), 0.5, 3, torch.qint8)
    shared = ramp(50, 10)
    return {
        "dtypes": {"inline": dict(every_dtype(3)), "chunks": dict(every_dtype(1500))},
        "shapes": {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "view": ramp(20, 30).T},
        "sparse": {"coo": torch.eye(7).to_sparse().coalesce(), "csr": csr}, "quantized": quantized,
        "numpy": {
            "floats": np.arange(400, dtype=np.float32), "times": np.array(["2026-01-02"], "<M8[ns]"),
            "big": np.arange(3, dtype=">i4"), "text": np.array(["ab", "c"]), "bool": np.array([True, False]),
        },
        "tied": {"a": shared, "b": shared, "list": [shared, (ramp(2), {"deep": shared})]},
        "values": {
            "none": None, "flags": (True, False), "numbers": [0, -1, 2**63, 1.5, -0.0, 1e300], "text": "ü/~",
            7: {"1": 1, 1: "1"},
            "bytes": b"\0\xff", "set": {1, 2}, "ordered": OrderedDict(b=1, a=2), "empty": {}, "nothing": [],
            "dtype": torch.bfloat16, "size": torch.Size([2, 3]), "scalar": np.float32(0.1), "range": range(3),
            "long text": "many words " * 400, "long bytes": bytes(range(256)) * 9,
        },
    }  # fmt: skip


def encoded(step: int) -> dict[str, Any]:
    """Tensors that are stored in every encoding, one of several chunks among them."""
    large = torch.zeros(3000, 700)
    large[-1, 3] = step
    return {
        "zeros": large, "constant": torch.full((500, 500), 1.5), "integers": torch.arange(20_000) * 3 + step,
        "masks": torch.arange(9000).remainder(7).to(torch.uint8), "noise": noise(3000), "step": step,
    }  # fmt: skip


def model(step: int) -> dict[str, Any]:
    """A small model with its optimizer, and many small entries (a paged tree)."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.LayerNorm(40), torch.nn.Linear(40, 8))
    with torch.no_grad():
        for at, parameter in enumerate(module.parameters()):
            parameter.copy_(ramp(*parameter.shape) + at)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    return {
        "model": module, "optimizer": optimizer, "step": step,
        "many": {f"entry {number}": number if number % 3 else torch.tensor([number]) for number in range(300)},
    }  # fmt: skip


def fill(golden: Golden) -> None:
    golden.commit(kinds(), "all kinds")
    second = golden.commit(encoded(1), "all encodings", step=1, metrics={"loss": 2.5, "acc": 0.125})
    golden.commit(encoded(2), "one chunk changed", step=2, meta={"note": "ü", "lr": 0.1, "shape": (1, 2)})
    golden.commit(live(model(3)), "a model", step=3)  # an OrderedDict, and numbers in the optimizer
    golden.repo.branch("side/one", start=second)
    golden.commit({"lora": ramp(64, 8), **encoded(1)}, "on the side", branch="side/one", step=2)
    golden.repo.branch("gone")
    golden.repo.delete_branch("gone", force=True)
    golden.repo.tag("v1", "trunk~2")
    golden.repo.tag("best", "side/one")
    golden.commit({"alone": ramp(3)}, "", branch="orphan", options=CommitOptions(orphan=True))
    golden.commit(live(model(3)), "the same state again", branch="side/one", step=4)


def manifest(golden: Golden) -> dict[str, Any]:
    repo = golden.repo
    names = [*repo.branches(), *repo.tags()]
    return {
        "default_branch": repo.default_branch, "branches": repo.branches(), "tags": repo.tags(),
        "log": {name: [info.id for info in repo.log(name)] for name in names}, "commits": golden.commits,
    }  # fmt: skip


def pack_up(folder: Path, archive: Path) -> None:
    with zipfile.ZipFile(archive, "x", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.relative_to(folder).parts[0] != "tmp":
                file.write(path, path.relative_to(folder))


def main(target: Path) -> None:
    archive, text = target / "repository-v1.zip", target / "repository-v1.json"
    if archive.exists() or text.exists():
        sys.exit(f"{archive} is there and is never replaced: it stands for the repositories in the world")
    times = iter(range(1_790_000_000, 1_800_000_000))
    with tempfile.TemporaryDirectory() as folder, clock.fixed(lambda: float(next(times))):
        golden = Golden(
            Repository.init(Path(folder) / "repo", default_branch="trunk", encoding="auto", pack_bytes=1 << 20)
        )
        fill(golden)
        written = manifest(golden)
        golden.repo.close()
        pack_up(Path(folder) / "repo", archive)
    text.write_text(json.dumps(written, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
