"""The sizes that are measured, by name. Plain numbers: knows nothing of torch, so that the runner stays light."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """What state to build.

    Attributes:
        kind: "gpt" (all trained), "lora" (frozen base, adapters trained), "part" (the last `trained_layers`
            blocks trained, the rest frozen), "entries" (many small ones), "one" (one large tensor), "none".
        state_bytes: About how large the state is, to see whether there is room.
    """

    name: str
    kind: str
    text: str
    state_bytes: int
    vocab: int = 32768
    context: int = 1024
    width: int = 0
    layers: int = 0
    rank: int = 8
    trained_layers: int = 0
    num_entries: int = 0
    rows: int = 0


_MB = 10**6
_TABLE = (
    Size("gpt-1g", "gpt", "GPT of 1.08 GB fp32 weights + AdamW, 3.24 GB in all", 3236 * _MB, width=1024, layers=16),
    Size("gpt-1g-total", "gpt", "GPT of 0.36 GB fp32 weights + AdamW, 1.08 GB in all", 1077 * _MB,
         vocab=16384, width=768, layers=9),
    Size("gpt-4g", "gpt", "GPT of 4.2 GB fp32 weights + AdamW, 12.5 GB in all", 12500 * _MB, width=2048, layers=18),
    Size("lora-1g", "lora", "GPT of 1.08 GB, all frozen, LoRA rank 8 + AdamW", 1096 * _MB, width=1024, layers=16),
    Size("frozen-90", "part", "GPT of 1.08 GB, 90 % frozen, 2 last blocks trained with AdamW", 1280 * _MB,
         width=1024, layers=16, trained_layers=2),
    Size("small-100k", "entries", "100,000 small entries", 25 * _MB, num_entries=100_000),
    Size("one-1g", "one", "one tensor, fp32[131072, 2048]", 1074 * _MB, rows=131_072, width=2048),
    Size("history-10k", "none", "10,000 commits of a tiny state", 0, num_entries=10_000),
    Size("raw", "none", "no state", 0),
    Size("tiny", "gpt", "GPT + AdamW, 55 MB in all", 55 * _MB, vocab=2048, context=128, width=384, layers=2),
    Size("tiny-lora", "lora", "tiny GPT, frozen, LoRA", 20 * _MB, vocab=2048, context=128, width=384, layers=2),
    Size("tiny-frozen", "part", "tiny GPT, half frozen", 40 * _MB, vocab=2048, context=128, width=384, layers=2,
         trained_layers=1),
    Size("tiny-entries", "entries", "2,000 small entries", _MB, num_entries=2_000),
    Size("tiny-one", "one", "one tensor, fp32[8192, 2048]", 67 * _MB, rows=8192, width=2048),
    Size("tiny-history", "none", "100 commits of a tiny state", 0, num_entries=100),
)  # fmt: skip

SIZES: dict[str, Size] = {size.name: size for size in _TABLE}

TINY = {
    "gpt-1g": "tiny", "gpt-1g-total": "tiny", "gpt-4g": "tiny", "lora-1g": "tiny-lora", "frozen-90": "tiny-frozen",
    "small-100k": "tiny-entries", "one-1g": "tiny-one", "history-10k": "tiny-history", "raw": "raw",
}  # fmt: skip
"""The stand-ins for a quick run of everything (`--size tiny`)."""
