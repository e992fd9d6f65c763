"""The benchmark behind `make bench`: cas_ckpt and its peers on real sizes, one process per operation.

Reading order: `plan` (what is measured, in which order) -> `runner` (one process per operation, peers
interleaved round by round) -> `worker` -> `operations` (what one process does) -> `peers` and `ours`
-> `results`, `targets`, `report` (tables and plot from the raw JSON lines).

`page` is what the small benchmarks beside this package have in common.

Invariant: nothing is averaged or left out before it is written; `results.jsonl` holds every figure.
"""
