"""The questions of docs/sql.md: an example repository, each query, and what it answers there.

The clock is fixed and authors are named, so that the repository has the same commits every time.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cas_ckpt import clock, limits
from cas_ckpt.cli.main import main
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import Lineage
from cas_ckpt.layout.target_layout import parse_layout
from cas_ckpt.objects.spec import Placement
from cas_ckpt.ops.checkout.restores import plan_checkout
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.ops.refs import create_branch, create_tag
from cas_ckpt.parallel.peers import SOLO, Peers
from cas_ckpt.repository import Repository
from tests.builders import numbers
from tests.divided import mesh, over, state_of
from tests.thread_peers import run_ranks

BEGUN_S = 1_790_000_000.0
DAY_S = 86_400.0

EIGHT = mesh(4, 2, names=("dp", "tp"))
FOUR = mesh(4, names=("dp",))
BY_ROWS = ("model/embed", "model/layers/0/wq", "model/layers/1/wq")

QUESTIONS: tuple[tuple[str, str], ...] = (
    ("What does main hold, the biggest first?", """
SELECT e.key, e.dtype, e.shape, e.num_bytes
FROM refs r JOIN entries e USING (commit_no)
WHERE r.name = 'main'
ORDER BY e.num_bytes DESC, e.key LIMIT 5"""),
    ("How many bytes of each dtype?", """
SELECT e.dtype, count(*) AS tensors, sum(e.num_bytes) AS bytes
FROM refs r JOIN entries e USING (commit_no)
WHERE r.name = 'main' AND e.dtype IS NOT NULL
GROUP BY e.dtype ORDER BY bytes DESC"""),
    ("Which entries differ between two commits?", """
WITH a AS (SELECT e.key, e.num_bytes, e.kind || coalesce(e.dtype || e.shape, '') || e.content AS what
           FROM refs r JOIN entries e USING (commit_no) WHERE r.name = 'v1'),
     b AS (SELECT e.key, e.num_bytes, e.kind || coalesce(e.dtype || e.shape, '') || e.content AS what
           FROM refs r JOIN entries e USING (commit_no) WHERE r.name = 'ft')
SELECT b.key, CASE WHEN a.key IS NULL THEN 'new' ELSE 'changed' END AS change, b.num_bytes
FROM b LEFT JOIN a ON a.key = b.key WHERE a.key IS NULL OR a.what <> b.what
UNION ALL
SELECT a.key, 'gone', a.num_bytes FROM a LEFT JOIN b ON b.key = a.key WHERE b.key IS NULL
ORDER BY 1"""),
    ("Which commits hold this very tensor?", """
WITH wanted AS (SELECT e.object_no FROM refs r JOIN entries e USING (commit_no)
                WHERE r.name = 'main' AND e.key = 'model/embed')
SELECT substr(c.commit_id, 1, 12) AS id, c.step, c.message
FROM wanted JOIN holders h USING (object_no) JOIN commits c USING (commit_no)
ORDER BY c.time"""),
    ("Which is the best checkpoint that is complete?", """
SELECT substr(c.commit_id, 1, 12) AS id, c.step, m.value AS loss
FROM metrics m JOIN commits c USING (commit_no) JOIN completeness k USING (commit_no)
WHERE m.name = 'loss' AND k.num_missing = 0
ORDER BY m.value LIMIT 3"""),
    ("Who else held rank 3's part of a tensor?", """
SELECT o.rank
FROM refs r JOIN commits c USING (commit_no)
JOIN shards m ON m.layout_no = c.layout_no
JOIN shards o ON o.layout_no = m.layout_no AND o.key = m.key AND o.position = m.position AND o.axis = m.axis
WHERE r.name = 'v1' AND m.key = 'model/layers/0/wq' AND m.rank = 3 AND o.rank <> 3
GROUP BY o.rank HAVING sum(CASE WHEN o.part <> m.part THEN 1 ELSE 0 END) = 0
ORDER BY o.rank"""),
    ("How much do branches have for themselves?", """
SELECT name, num_bytes, unique_bytes, shared_bytes FROM branch_bytes ORDER BY name"""),
    ("How much have branches for themselves, by the week in which it came?", """
WITH led AS MATERIALIZED (SELECT name, commit_no FROM history WHERE kind = 'branch'),
     parts AS MATERIALIZED (SELECT commit_no, object_no, num_bytes FROM gained),
     own AS (SELECT min(l.name) AS name, min(c.time_s) AS time_s, max(p.num_bytes) AS num_bytes
             FROM led l JOIN parts p USING (commit_no) JOIN commits c USING (commit_no)
             GROUP BY p.object_no HAVING min(l.name) = max(l.name))
SELECT name, CAST(time_s AS BIGINT) / 604800 AS week, CAST(sum(num_bytes) AS BIGINT) AS bytes
FROM own GROUP BY name, CAST(time_s AS BIGINT) / 604800 ORDER BY name, week"""),
    ("Which commits were saved by 8 ranks, 2 of them in tensor parallel?", """
SELECT substr(c.commit_id, 1, 12) AS id, c.step, c.mesh
FROM commits c
WHERE c.world_size = 8 AND c.layout_no IN (SELECT layout_no FROM layout_axes WHERE name = 'tp' AND size = 2)
ORDER BY c.time"""),
    ("Which mesh restores it fastest, at 1 GB/s from the store and 3 GB/s between ranks?", """
SELECT p.mesh, p.world_size, p.most_read_bytes, p.most_sent_bytes, p.most_received_bytes,
       p.most_read_bytes / 1000 + CASE WHEN p.most_sent_bytes > p.most_received_bytes
           THEN p.most_sent_bytes ELSE p.most_received_bytes END / 3000 AS microseconds
FROM refs r JOIN commits c USING (commit_no) JOIN plans p ON p.root_id = c.root_id
WHERE r.name = 'main' AND p.mesh <> ''
ORDER BY microseconds, p.world_size, p.mesh"""),
    ("When was each ref last proven restorable?", """
SELECT r.name, max(s.started) AS proven
FROM refs r JOIN commits c USING (commit_no)
LEFT JOIN restores s ON s.root_id = c.root_id AND s.is_whole = 1 AND s.error IS NULL
GROUP BY r.name ORDER BY r.name"""),
    ("How does it grow, day by day?", """
SELECT substr(time, 1, 10) AS day, count(*) AS commits,
       sum(new_bytes) AS new_bytes, sum(total_bytes) AS if_stored_whole
FROM commits GROUP BY substr(time, 1, 10) ORDER BY day"""),
    ("Which fine-tunes come from this commit?", """
SELECT f.message, f.author, f.step
FROM refs r JOIN lineage l ON l.target_no = r.commit_no JOIN commits f ON f.commit_no = l.commit_no
WHERE r.name = 'v1' AND l.kind = 'fine-tune-of' ORDER BY f.time"""),
    ("Which tensors of a commit are equal under several keys?", """
SELECT min(e.key) AS one, max(e.key) AS another, count(*) AS keys, sum(e.num_bytes) - min(e.num_bytes) AS saved
FROM refs r JOIN entries e USING (commit_no)
WHERE r.name = 'main' AND e.dtype IS NOT NULL
GROUP BY e.content, e.dtype, e.shape HAVING count(*) > 1 ORDER BY saved DESC, one"""),
    ("At which steps did the learning rate change?", """
WITH rates AS (
    SELECT c.step, e.value, e.content, lag(e.content) OVER (ORDER BY c.time) AS before
    FROM history h JOIN commits c USING (commit_no) JOIN entries e USING (commit_no)
    WHERE h.name = 'main' AND e.key = 'progress/lr')
SELECT step, value FROM rates WHERE before <> content ORDER BY step"""),
    ("How did the loss change from each commit to the next?", """
SELECT c.step, b.value AS before, m.value AS after
FROM history h JOIN commits c USING (commit_no) JOIN metrics m USING (commit_no)
JOIN parents p USING (commit_no) JOIN metrics b ON b.commit_no = p.parent_no AND b.name = m.name
WHERE h.name = 'main' AND m.name = 'loss' AND p.position = 0 ORDER BY c.step"""),
    ("Which three commits does main end with, the last first?", """
WITH RECURSIVE line(place, commit_no) AS (
    SELECT 0, commit_no FROM refs WHERE name = 'main'
    UNION ALL SELECT line.place + 1, p.parent_no FROM line JOIN parents p ON p.commit_no = line.commit_no
    WHERE p.position = 0 AND line.place < 2)
SELECT line.place, c.step, c.message FROM line JOIN commits c ON c.commit_no = line.commit_no ORDER BY line.place"""),
    ("What did each commit of main change?", """
SELECT c.step, k.changed, k.new_entries, k.gone_entries
FROM history h JOIN commits c USING (commit_no) JOIN changes k USING (commit_no)
WHERE h.name = 'main' ORDER BY c.step"""),
    ("Which keys did the head of ft change?", """
SELECT k.change, k.key
FROM refs r JOIN key_changes k USING (commit_no) WHERE r.name = 'ft' ORDER BY k.change, k.key"""),
    ("Who moved main, the last move first?", """
SELECT time, action, author
FROM reflog WHERE full_name = 'refs/heads/main' ORDER BY position DESC, number DESC"""),
    ("How many packs did fsck never read?", """
SELECT kind, count(*) AS packs
FROM packs WHERE read_s IS NULL GROUP BY kind ORDER BY kind"""),
)  # fmt: skip
"""Title, query."""


def _state(seed: int, lr: float) -> dict[str, Any]:
    def layer(number: int) -> dict[str, Any]:
        return {
            "wq": numbers(128, 64, seed=10 * seed + number), "wo": numbers(64, 128, seed=10 * seed + number + 5),
            "norm": np.ones(512, "float32"),
        }  # fmt: skip

    embed = numbers(512, 64, seed=0)
    return {
        "model": {"embed": embed, "head": embed, "layers": {0: layer(0), 1: layer(1)}},
        "optim": {"exp_avg": numbers(256, 64, seed=seed, dtype="float64")}, "progress": {"step": seed, "lr": lr},
    }  # fmt: skip


def make_example(path: Path, *, index_url: str | None = None) -> None:
    """The repository of the questions, at `path`; its index there or at `index_url`."""
    init_repository(path, encoding="raw").close()

    def save(size: int, items: dict[str, Any], placed: dict[str, Placement], at_s: float, **request: Any) -> None:
        def work(peers: Peers) -> None:
            with closing(RepositoryHandle.open(path, index_url=index_url)) as handle:
                asked = CommitRequest(author="ann", **request)
                with limits(num_threads=1):
                    commit_tree(handle, state_of(items, placed, peers.rank), asked, peers=peers)

        with clock.fixed(lambda: at_s):
            work(SOLO) if size == 1 else run_ranks(size, work, timeout_s=60)

    by_eight: dict[str, Placement] = dict.fromkeys(BY_ROWS, over(EIGHT, "R", "S(0)"))
    by_four: dict[str, Placement] = dict.fromkeys(BY_ROWS, over(FOUR, "S(0)"))
    save(8, _state(1, 3e-4), by_eight, BEGUN_S, step=1000, message="warm-up done", metrics={"loss": 2.31})
    save(8, _state(2, 3e-4), by_eight, BEGUN_S + 3600, step=2000, message="", metrics={"loss": 1.94})
    with closing(RepositoryHandle.open(path, index_url=index_url)) as handle, clock.fixed(lambda: BEGUN_S + 3700):
        base = create_branch(handle, "ft", start="main").hex()
        create_tag(handle, "v1", "main")
    save(8, _state(3, 1e-4), by_eight, BEGUN_S + DAY_S, step=3000, message="lower rate", metrics={"loss": 1.72})
    tuned = _state(2, 1e-5)
    del tuned["optim"]
    save(
        1, {**tuned, "adapter": numbers(64, 16, seed=99)}, {}, BEGUN_S + 1.5 * DAY_S, branch="ft", step=100,
        message="math", metrics={"loss": 0.88}, lineage=(Lineage("fine-tune-of", base),),
    )  # fmt: skip
    save(4, _state(4, 1e-4), by_four, BEGUN_S + 2 * DAY_S, step=4000, message="", metrics={"loss": 1.69})
    with clock.fixed(lambda: BEGUN_S + 2.5 * DAY_S), Repository.open(path, index_url=index_url, group=None) as repo:
        for target in ("dp=2", "dp=2,tp=2", "dp=8"):
            plan_checkout(repo._handle, "main", parse_layout(target, None))
        repo.load("v1")


def answer(path: Path, query: str, *words: str) -> str:
    """What `cas-ckpt sql` prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["-C", str(path), *words, "sql", query.strip()])
    assert code == 0, err.getvalue()
    return out.getvalue()


@contextmanager
def example() -> Iterator[Path]:
    """The repository, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="cas-ckpt-sql-") as folder:
        make_example(Path(folder) / "ckpts")
        yield Path(folder) / "ckpts"


def shown(ask: Callable[[str], str]) -> str:
    """The questions, each with its query and its answer."""
    parts = []
    for number, (title, query) in enumerate(QUESTIONS, 1):
        parts += [f"### {number}. {title}", f"```sql\n{query.strip()}\n```", f"```text\n{ask(query).rstrip()}\n```"]
    return "\n\n".join(parts)


OPENING = """
SELECT c.step, m.value AS loss, c.mesh, c.total_bytes, c.new_bytes, max(s.started) AS restored
FROM history h JOIN commits c USING (commit_no) JOIN metrics m USING (commit_no)
LEFT JOIN restores s ON s.root_id = c.root_id AND s.error IS NULL
WHERE h.name = 'main' AND m.name = 'loss' GROUP BY 1, 2, 3, 4, 5 ORDER BY loss"""
"""The first query of docs/sql.md."""


def opening() -> str:
    """The first part of docs/sql.md: a command, and what it prints for the same repository."""
    command = " \\\n    ".join(OPENING.strip().splitlines())
    with example() as path:
        return f'```console\n$ cas-ckpt sql "{command}"\n{answer(path, OPENING).rstrip()}\n```'


def questions() -> str:
    """The part of docs/sql.md."""
    with example() as path:
        return shown(lambda query: answer(path, query))
