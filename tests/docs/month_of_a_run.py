"""The table of docs/remotes.md: what a month of a run costs in a bucket, by today's calculation.

The facts are those that a repository with a GPT of 100 million parameters and AdamW had, 1.2 GB of fp32, after three
commits that changed all of it. A test would take minutes to make that again.
"""

from __future__ import annotations

from cas_ckpt.cli.show import month_lines
from cas_ckpt.core.config import REMOTE_PACK_BYTES
from cas_ckpt.ops.history.usage import MonthRates, RunFacts, plan_month

FACTS = RunFacts(
    num_commits=3, new_bytes=963e6, state_bytes=960e6, stored_bytes=2_889_000_000, num_packs=27,
    pack_bytes=REMOTE_PACK_BYTES,
)  # fmt: skip


def month() -> str:
    """The part of the page: a command, and what it prints."""
    rates = MonthRates(commits_per_day=48, keep_days=14)
    told = "\n".join(line.rstrip() for line in month_lines(plan_month(FACTS, rates)))
    return f"```text\n$ cas-ckpt stats --requests --commits-per-day 48 --keep-days 14\n{told}\n```"
