"""Which encoding for extents? Ratio and speed of each on the state of a model trained here.

    python -m benchmarks.codec      a table on the terminal and in docs/benchmarks/codec.md, under a minute

A small GPT learns Python's standard library, once in float32 and once in bfloat16, with
AdamW; its tokens are pairs of bytes, so that most rows of the embedding are never seen, as in
a real vocabulary. What the columns mean stands at the head of the table; the decision is
docs/decisions/002-encodings.md.
"""

from __future__ import annotations

import os
import platform
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import zstandard
from torch import nn

from cas_ckpt.objects import codec
from cas_ckpt.objects.codec import Encoded, EncodingPolicy, decode_extent, encode_extent

REPORT = Path(__file__).parent.parent / "docs" / "benchmarks" / "codec.md"
EXTENT_BYTES = 4 << 20
DISK_MB_S = 2500.0
STEPS, BATCH, CONTEXT, WIDTH, TOKEN_WIDTH, VOCABULARY = 60, 8, 128, 256, 64, 1 << 16
REPEATS = 5


HEAD = f"""# Encodings of extents

Written by `python -m benchmarks.codec` on {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__},
zstd {".".join(map(str, zstandard.ZSTD_VERSION))}. One thread's CPU time, the best of {REPEATS} runs;
extents of 4 MiB.

- **stored**: bytes in the pack over bytes of the state.
- **encode**, **decode**: MB of state per second and core; `raw` looks for zeros and constants only.
- **1 core**, **4 cores**: the pace of a commit in MB of state per second, if it only encoded on that
  many cores and wrote to a disk of {DISK_MB_S:.0f} MB/s: the slower of the two. Raw runs at {DISK_MB_S:.0f}.

| state | policy | encodings used | stored | encode | decode | 1 core | 4 cores |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True)
class Data:
    """One kind of state: its bytes in extents."""

    name: str
    item_bytes: int
    extents: tuple[memoryview, ...]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.extents))


@dataclass(frozen=True, slots=True)
class Way:
    """One encoding at one level of zstd."""

    name: str
    policy: EncodingPolicy
    level: int = codec.ZSTD_LEVEL


WAYS = (
    Way("raw", "raw"),
    Way("auto", "auto"),
    *(Way(f"zstd, level {level}", "zstd", level) for level in (-1, 1, 3)),
    *(Way(f"planes, level {level}", "planes", level) for level in (-1, 1, 3)),
)


class Model(nn.Module):
    """A causal transformer over pairs of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Sequential(nn.Embedding(VOCABULARY, TOKEN_WIDTH), nn.Linear(TOKEN_WIDTH, WIDTH))
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, dtype=hidden.dtype)
        logits: torch.Tensor = self.out(self.blocks(hidden, mask=mask, is_causal=True))
        return logits


def sources() -> torch.Tensor:
    """The bytes of Python's standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def trained(text: torch.Tensor, dtype: torch.dtype) -> tuple[Model, torch.optim.AdamW]:
    """The model and its optimizer after STEPS steps."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        starts = torch.randint(1, len(text) - CONTEXT - 1, (BATCH,))
        window = torch.stack([text[start - 1 : start + CONTEXT + 1] for start in starts])
        logits = model(window[:, :-2] * 256 + window[:, 1:-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 2:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def as_data(name: str, tensors: Sequence[torch.Tensor]) -> Data:
    """The tensors' bytes, one behind the other."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    view = flat.view(torch.uint8).numpy().data
    extents = tuple(view[start : start + EXTENT_BYTES] for start in range(0, len(view), EXTENT_BYTES))
    return Data(name, flat.element_size(), extents)


def states(text: torch.Tensor, dtype: torch.dtype) -> Iterator[Data]:
    """Weights and moments of one training run, the embedding's moments apart."""
    model, optimizer = trained(text, dtype)
    name = str(dtype).removeprefix("torch.")
    sparse, *dense = model.parameters()
    yield as_data(f"{name} weights", dense)
    for moment in ("exp_avg", "exp_avg_sq"):
        yield as_data(f"{name} {moment}", [optimizer.state[weight][moment] for weight in dense])
    yield as_data(f"{name} exp_avg of the embedding", [optimizer.state[sparse]["exp_avg"]])


def timed(work: Callable[[], None], num_bytes: int) -> float:
    """MB/s of the best of REPEATS runs."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.thread_time()  # what others do on the machine must not count
        work()
        best = min(best, time.thread_time() - start)
    return num_bytes / best / 1e6


def measured(data: Data, way: Way) -> str:
    """One row of the table."""
    codec._contexts.compressor = zstandard.ZstdCompressor(level=way.level)  # levels are no setting of the product
    encoded: list[Encoded] = []

    def encode() -> None:
        encoded[:] = [encode_extent(extent, policy=way.policy, item_bytes=data.item_bytes) for extent in data.extents]

    def decode() -> None:
        for extent, item in zip(data.extents, encoded, strict=True):
            decode_extent(item.encoding, item.payload, num_bytes=len(extent))

    encode_mb_s = timed(encode, data.num_bytes)
    decode_mb_s = timed(decode, data.num_bytes)
    stored = sum(len(item.payload) for item in encoded) / data.num_bytes
    used = ", ".join(sorted({item.encoding.name for item in encoded}))
    pace = [min(cores * encode_mb_s, DISK_MB_S / max(stored, 1e-9)) for cores in (1, 4)]
    figures = [_speed(encode_mb_s), _speed(decode_mb_s), *map(_speed, pace)]
    return f"| {data.name} | {way.name} | {used} | {stored:.3f} | {' | '.join(figures)} |"


def _speed(mb_s: float) -> str:
    return "> 20000" if mb_s > 20_000 else f"{mb_s:.0f}"


def report() -> Iterator[str]:
    """The lines of docs/benchmarks/codec.md."""
    yield from HEAD.splitlines()
    text = sources()
    kinds = [data for dtype in (torch.float32, torch.bfloat16) for data in states(text, dtype)]
    for data in [*kinds, as_data("int64 tokens", [text[: 1 << 21]])]:
        yield from (measured(data, way) for way in WAYS)


def main() -> None:
    torch.set_num_threads(1)  # two threads that wait for each other crawl on a busy machine
    lines = []
    for line in report():
        print(line, flush=True)
        lines.append(line)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
