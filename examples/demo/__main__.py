"""The main job of cas_ckpt, told as a story on real input. Run it with `make demo`.

    1. Two equal trainings of a small GPT begin side by side; each commits as it goes.
    2. One of them is killed with SIGKILL in the middle of a commit.
    3. It is started again, resumes from its last commit and goes to the end.
    4. Its root equals that of the run that was never killed: resume is bit-exact.
    5. Two LoRA fine-tunes branch from the result; the base is frozen, and stored once.
    6. The training is rolled back: an earlier commit is checked out, and what follows goes to a new branch that
       begins there.
    7. The history as a graph.
    8. What it all cost.

Exit status 0 only if all of that was so.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cas_ckpt import Repository
from examples.demo.children import ROOT, child, kill_inside_commit, lines_of
from examples.demo.pretrain import COMMIT_EVERY, NUM_STEPS
from examples.demo.tables import heading, say, size, table

KILLED_AT = 3 * COMMIT_EVERY
ROLLED_BACK_TO, RETRY, SKIPPED_BYTES = "main~2", "retry", 4096
FINE_TUNES = (("ft-asyncio", "asyncio/*.py"), ("ft-email", "email/*.py"))

Event = dict[str, Any]


def main() -> None:
    """Tell the story in a folder of its own."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "demo-out", help="emptied first (default: demo-out)")
    folder = parser.parse_args().folder
    began_s = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    paths = folder / "never-killed", folder / "killed"
    for path in paths:
        Repository.init(path).close()
    commits = run_story(*paths)
    print_history(paths[1])
    print_costs(paths[1], commits)
    say(f"All of this took {time.monotonic() - began_s:.0f} seconds. The repositories are in {folder}.")


def run_story(unbroken: Path, killed: Path) -> list[Event]:
    """Chapters 1 to 6; what each commit of the killed run's repository told."""
    with child("pretrain", str(unbroken)) as other:
        commits = train_and_kill(killed)
        check_last_commit(killed, commits[-1])
        commits += resume(killed)
        heading("4. The same state?")
        wanted = last_commit(list(lines_of(other)))
    compare_roots(wanted["root"], commits[-1]["root"])
    with Repository.open(killed) as repo:
        repo.tag("base", "main")
    for commit in commits:
        commit["branch"] = "main"
    heading("5. Branch twice from the base: LoRA fine-tunes, the base declared frozen")
    for name, pattern in FINE_TUNES:
        commits += finetune(killed, name, pattern)
    return commits + roll_back(killed)


def train_and_kill(path: Path) -> list[Event]:
    """Chapters 1 and 2; the commits that were made before the end."""
    heading(f"1. Train a small GPT on Python's own library, {NUM_STEPS} steps, a commit every {COMMIT_EVERY}")
    say("(the same training runs in a second process that nobody will kill)")
    commits: list[Event] = []
    with child("pretrain", str(path), "--wait-in-commit-at", str(KILLED_AT)) as process:
        for event in lines_of(process):
            if event["event"] == "committing":
                heading("2. Kill it in the middle of a commit")
                done, total = size(event["done_bytes"]), size(event["total_bytes"])
                say(f"step {event['step']}: the commit has hashed {done} of {total}. SIGKILL.")
                kill_inside_commit(process)
                return commits
            if event["event"] == "commit":
                print_commit(event)
                commits.append(event)
    sys.exit("the training ended before it could be killed")


def check_last_commit(path: Path, last: Event) -> None:
    """The branch still names the commit before the one that was cut off."""
    with Repository.open(path) as repo:
        head = repo.log("main")[0]
    if head.id != last["id"]:
        sys.exit(f"main is at {head.id}, wanted {last['id']}: a commit was lost, or half of one was published")
    say(f"main is still at the commit of step {head.step}, {head.short_id}.")
    say(f"Of the commit of step {KILLED_AT} nothing is to be seen.")


def resume(path: Path) -> list[Event]:
    """Chapter 3; the commits that followed."""
    heading("3. Start it again")
    commits: list[Event] = []
    with child("pretrain", str(path)) as process:
        for event in lines_of(process):
            if event["event"] == "resumed":
                say(f"checked out main: goes on after step {event['step']}, text position {event['position']:,}")
            elif event["event"] == "commit":
                print_commit(event)
                commits.append(event)
    return commits


def last_commit(told: list[Event]) -> Event:
    """The last commit among the events of a training."""
    return [event for event in told if event["event"] == "commit"][-1]


def compare_roots(wanted: str, found: str) -> None:
    """Equal roots prove that every weight, moment, random state and counter is equal to the last bit."""
    say(f"root of the run that was never killed  {wanted}")
    say(f"root of the run that was resumed       {found}")
    if wanted != found:
        sys.exit("the roots differ: resume was not bit-exact")
    say("Equal: weights, optimizer, schedule, random states and data position agree to the last bit.")


def finetune(path: Path, branch: str, pattern: str) -> list[Event]:
    """Chapter 5, one of the two."""
    say(f"branch {branch}, on {pattern}")
    with child("finetune", str(path), branch, pattern) as process:
        commits = [event | {"branch": branch} for event in lines_of(process)]
    for commit in commits:
        print_commit(commit)
    return commits


def roll_back(path: Path) -> list[Event]:
    """Chapter 6; the commits of the new branch.

    Raises:
        SystemExit: its history is not what happened, or main moved.
    """
    heading(f"6. Roll back to {ROLLED_BACK_TO}, leave a stretch of text out, and go on from there")
    with Repository.open(path) as repo:
        main, start = repo.log("main")[0], repo.log(ROLLED_BACK_TO)[0]
    arguments = ("--from", ROLLED_BACK_TO, "--branch", RETRY, "--skip", str(SKIPPED_BYTES))
    say(f"checkout({ROLLED_BACK_TO!r}, into=state) brings back step {start.step}; commit(state, branch={RETRY!r})")
    with child("pretrain", str(path), *arguments) as process:
        commits = [event | {"branch": RETRY} for event in lines_of(process) if event["event"] == "commit"]
    for commit in commits:
        print_commit(commit)
    with Repository.open(path) as repo:
        history, head = repo.log(RETRY), repo.log("main")[0]
    wanted = [*(commit["id"] for commit in reversed(commits)), start.id]
    if [commit.id for commit in history][: len(wanted)] != wanted or head != main:
        sys.exit(f"{RETRY} does not go on from {start.short_id}, or main is not at {main.short_id} any more")
    say(f"the parent of the first of them is {start.short_id}, step {start.step}; main is where it was")
    return commits


def print_commit(event: Event) -> None:
    """One line about a commit."""
    stored, total = size(event["stored_bytes"]), size(event["total_bytes"])
    what = f"step {event['step']:3}  loss {event['loss']:.3f}  commit {event['id'][:12]}"
    say(f"{what}  wrote {stored:>8} for {total} of state")


def print_history(path: Path) -> None:
    """The log as a graph, by the command that a person would use."""
    heading("7. The history: cas-ckpt log --graph --all --oneline")
    command = [sys.executable, "-m", "cas_ckpt", "-C", str(path), "log", "--graph", "--all", "--oneline"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if shown.returncode != 0:
        sys.exit(f"cas-ckpt log failed: {shown.stderr}")
    for line in shown.stdout.splitlines():
        say(line)


def print_costs(path: Path, commits: list[Event]) -> None:
    """What every commit cost, beside what torch.save wrote for the same state."""
    heading("8. What it cost")
    rows = [
        (c["branch"], c["step"], size(c["total_bytes"]), size(c["stored_bytes"]), size(c["torch_save_bytes"]),
         f"{c['torch_save_bytes'] / c['stored_bytes']:.0f} x" if c["branch"] != "main" else "")
        for c in commits
    ]  # fmt: skip
    table(("branch", "step", "state", "commit wrote", "torch.save", "smaller"), rows)
    say()
    on_disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    saved = sum(commit["torch_save_bytes"] for commit in commits)
    say(f"{len(commits)} commits, {size(on_disk)} on disk with index and the leavings of the killed process;")
    say(f"torch.save would have used {size(saved)}.")
    say("Pretraining changes every byte of weights and moments at every step, so there a commit costs what it holds.")
    say("The fine-tunes store what they learned, and the base once for all branches.")


if __name__ == "__main__":
    main()
