"""Processes that share the reading of a bucket as shards, each with an index of its own: every byte once, together."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cas_ckpt import Repository
from cas_ckpt.core.units import PackShard
from tests.builders import numbers
from tests.cli.running import call
from tests.processes import PIPE, Forked
from tests.proxy import Proxy
from tests.servers import S3Server, credentials

SIZE = 3


class Job:
    """What one of the shards was asked for, and said."""

    def __init__(self, proxy: Proxy, code: int | None, said: Any) -> None:
        self.code, self.said = code, said
        self.requests = list(proxy.requests)

    def read(self, suffix: str) -> dict[str, list[tuple[int, int]]]:
        """Pack -> (first, stop) of each range that was read of it."""
        found: dict[str, list[tuple[int, int]]] = {}
        for each in self.requests:
            if each.method == "GET" and each.target.endswith(suffix):
                first, _, last = each.headers.get("range", "").removeprefix("bytes=").partition("-")
                span = (int(first), int(last) + 1) if first else (-each.received_bytes, 0)
                found.setdefault(each.target.partition("some/where/")[2], []).append(span)
        return found


def run_shards(s3: S3Server, bucket: str, folder: Path) -> list[Job]:
    """`cas-ckpt fsck --shard I/3` in three processes at the same time; they share nothing of this host."""
    started, jobs = [], []
    with ExitStack() as stack:
        for part in range(1, SIZE + 1):
            proxy = stack.enter_context(Proxy(s3.endpoint))
            url, shard = S3Server(proxy.endpoint).url(bucket), f"{part}/{SIZE}"
            process = Forked(check_shard, url, shard, str(folder / str(part)), stdout=PIPE)
            started.append((proxy, process))
        for proxy, process in started:
            out, _ = process.communicate()
            jobs.append(Job(proxy, process.returncode, json.loads(out)))
    return jobs


def check_shard(url: str, shard: str, cache: str) -> None:
    """In a process of its own."""
    with credentials():
        ran = call("-C", url, "fsck", "--shard", shard, "--json", CAS_CKPT_CACHE=cache)
    print(ran.out)
    sys.exit(ran.code)


def covered(spans: list[tuple[int, int]]) -> int:
    """Bytes from the start of the first span on that are in some span, each counted once."""
    reached = total = 0
    for first, stop in sorted(spans):
        total += max(0, stop - max(first, reached))
        reached = max(reached, stop)
    return total


def test_shards_read_each_byte_once_together_and_the_one_that_has_it_finds_a_flipped_bit(
    s3: S3Server, tmp_path: Path
) -> None:
    bucket = s3.new_bucket()
    with Repository.init(s3.url(bucket), encoding="raw", cache=None) as repo:
        for step in range(12):
            repo.commit({"w": numbers(500, 401, seed=step), "step": step})
    sizes = {
        each["Key"].partition("some/where/")[2]: each["Size"]
        for each in s3.client.list_objects_v2(Bucket=bucket, Prefix="some/where/packs/")["Contents"]
    }
    data = sorted(key for key in sizes if key.endswith(".data"))
    victim = next(key for key in data if not PackShard(1, SIZE).has(key))
    body = bytearray(s3.client.get_object(Bucket=bucket, Key=f"some/where/{victim}")["Body"].read())
    body[len(body) // 2] ^= 1
    s3.client.put_object(Bucket=bucket, Key=f"some/where/{victim}", Body=bytes(body))

    jobs = run_shards(s3, bucket, tmp_path)
    for key in data:  # without headers, which are 64 bytes, and directories
        spans = [span for job in jobs for span in job.read(".data").get(key, ()) if span[0] >= 64]
        assert sum(stop - first for first, stop in spans) == covered(spans) > 0.99 * sizes[key], "once, and all of it"
    assert sum(job.said["read_packs"] for job in jobs) == len(sizes)
    assert sum(job.said["skipped_packs"] for job in jobs) == 0
    assert [job.said["shard"] for job in jobs] == ["1/3", "2/3", "3/3"]

    owner = next(job for part, job in enumerate(jobs, 1) if PackShard(part, SIZE).has(victim))
    assert [job.code for job in jobs] == [13 if job is owner else 0 for job in jobs]
    (problem,) = owner.said["problems"]
    assert (problem["where"], problem["effect"], problem["hits"][0]["keys"]) == (victim, "lost", ["w"])
    (other,) = [(part, job) for part, job in enumerate(jobs, 1) if part > 1 and job is not owner]
    assert all(PackShard(other[0], SIZE).has(key) for suffix in (".data", ".meta") for key in other[1].read(suffix))
    assert other[1].said["num_packs"] == other[1].said["read_packs"] < len(sizes)
    assert not [each for each in other[1].requests if "/refs/" in each.target]
