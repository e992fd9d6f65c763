"""Looks for a schedule that loses something: many random ones, or one again.

    python -m tests.schedule.explore --count 100000 --seed 1 --jobs 2
    python -m tests.schedule.explore --scenario 'garbage; W0=commit ab; G0=gc' --turns 'W0*5 G0*8' --seed 7

Prints every schedule that fails, made smaller, with the command that plays it again; exits with 1
if there was one. The same seed is the same schedule on every machine.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from tests.schedule.deciders import Replay, lengthened
from tests.schedule.play import Played, Scenario, play
from tests.schedule.scenarios import play_random
from tests.schedule.scheduler import Turn

BATCH = 200


def smaller(turns: Sequence[Turn], fails: Callable[[Sequence[Turn]], bool]) -> list[Turn]:
    """A shorter list of turns that still fails: parts are left out while that is so."""
    left, size = list(turns), max(1, len(turns) // 2)
    while True:
        at = 0
        while at < len(left):
            without = left[:at] + left[at + size :]
            if fails(without):
                left = without
            else:
                at += size
        if size == 1:
            return left
        size //= 2


def shrunk(played: Played) -> Played:
    """The same failure with fewer turns, if it can be had."""
    best = played

    def fails(turns: Sequence[Turn]) -> bool:
        nonlocal best
        again = play(played.scenario, Replay(turns), seed=played.seed)
        if again.failure is None or type(again.failure) is not type(played.failure):
            return False
        best = again
        return True

    if fails(played.turns):
        smaller(played.turns, fails)
    return best


def failures_in(seeds: Sequence[int], *, sql: bool) -> list[str]:
    """Failing schedules among these seeds, told in words, small."""
    found = []
    for seed in seeds:
        played = play_random(seed, sql=sql)
        if played.failure is not None:
            found.append(f"seed {seed} of random schedules:\n{shrunk(played)}")
    return found


def explore(first: int, count: int, *, jobs: int, tell: Callable[[str], None], sql: bool = False) -> list[str]:
    """Play `count` random schedules; those that fail, in words.

    Args:
        sql: Over the real index, which takes ten times as long.
    """
    batches = [range(at, min(at + BATCH, first + count)) for at in range(first, first + count, BATCH)]
    found: list[str] = []
    began, done = time.monotonic(), 0
    for batch, failures in _results(batches, jobs, sql):
        done += len(batch)
        found += failures
        for failure in failures:
            tell(failure)
        tell(f"{done} of {count} schedules, {done / (time.monotonic() - began):.0f} a second, {len(found)} failed")
    return found


def _results(batches: Sequence[range], jobs: int, sql: bool) -> Iterator[tuple[range, list[str]]]:
    if jobs == 1:
        yield from ((batch, failures_in(batch, sql=sql)) for batch in batches)
        return
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(failures_in, batch, sql=sql): batch for batch in batches}
        for future in concurrent.futures.as_completed(waiting):
            yield waiting[future], future.result()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.schedule.explore", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="random schedules to play")
    parser.add_argument("--seed", type=int, default=0, help="number of the first; names of the one to be played again")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--sql", action="store_true", help="over the real index")
    parser.add_argument("--scenario", help="play one schedule again: its scenario")
    parser.add_argument("--turns", help="and its turns")
    return parser.parse_args()


def _tell(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    """See the module's docstring."""
    given = _arguments()
    if given.scenario:
        played = play(Scenario.parse(given.scenario), Replay(lengthened(given.turns or "")), seed=given.seed)
        print(played)
        return int(played.failure is not None)
    return int(bool(explore(given.seed, given.count, jobs=given.jobs, tell=_tell, sql=given.sql)))


if __name__ == "__main__":
    sys.exit(main())
