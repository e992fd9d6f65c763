"""Four processes with gloo between them commit to a bucket and restore from it: each byte goes once, over all ranks."""

from __future__ import annotations

import re
import signal
import time
from contextlib import ExitStack
from itertools import pairwise

import pytest

from cas_ckpt import Repository
from tests.over_buckets.rank_cases import PART_BYTES, VICTIM, whole_state
from tests.proxy import Fault, Proxy, edit
from tests.ranks import results, run_processes
from tests.servers import S3Server

CASES = "tests.over_buckets.rank_cases"
SIZE = 4
RESTORES = ("four ranks", "three ranks", "replicas", "no folder to stage in")


def new_repository(s3: S3Server) -> str:
    """A bucket of one commit; its branch is there before the ranks come."""
    bucket = s3.new_bucket()
    with Repository.init(s3.url(bucket), encoding="raw") as repo:
        repo.commit({"step": 0})
    return bucket


def data_bytes(s3: S3Server, bucket: str) -> int:
    """Bytes of all data packs."""
    listed = s3.client.list_objects_v2(Bucket=bucket)["Contents"]
    return sum(each["Size"] for each in listed if each["Key"].endswith(".data"))


def ranges(proxy: Proxy) -> list[tuple[str, int, int]]:
    """(pack, first, last) of all that was read of data packs, sorted."""
    found = []
    for request in proxy.requests:
        if request.method == "GET" and request.target.endswith(".data"):
            first, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
            found.append((request.target, int(first), int(last)))
    return sorted(found)


@pytest.mark.slow
def test_all_ranks_upload_one_swaps_the_ref_and_a_restore_reads_each_byte_once_over_all_ranks(s3: S3Server) -> None:
    bucket = new_repository(s3)
    with ExitStack() as stack:
        phases = [*(f"commit by {rank}" for rank in range(SIZE)), *RESTORES]
        proxies = {phase: stack.enter_context(Proxy(s3.endpoint)) for phase in phases}
        urls = {phase: S3Server(proxy.endpoint).url(bucket) for phase, proxy in proxies.items()}
        found = results(run_processes(SIZE, f"{CASES}:commits_and_restores", urls))
    assert len({each["commit"] for each in found}) == 1
    assert all(each[phase] for each in found for phase in RESTORES)

    commits = [proxies[f"commit by {rank}"] for rank in range(SIZE)]
    plain = sum(tensor.nbytes for tensor in whole_state().values())
    sent = [sum(each.sent_bytes for each in proxy.requests) for proxy in commits]
    assert plain < sum(sent) < 1.05 * plain
    assert all(num_bytes > plain / 10 for num_bytes in sent)
    assert [proxy.count("PUT", "refs/") for proxy in commits] == [1, 0, 0, 0]

    stored = data_bytes(s3, bucket)
    for phase in RESTORES[:3]:
        asked, proxy = ranges(proxies[phase]), proxies[phase]
        assert all(a[0] != b[0] or a[2] < b[1] for a, b in pairwise(asked)), "some bytes were read twice"
        assert sum(last - first + 1 for _, first, last in asked) > 0.99 * stored
        assert sum(each.received_bytes for each in proxy.requests) < 1.05 * stored
        assert len(asked) <= 4 * SIZE
        assert not proxy.count("GET", "packs%2F"), "no rank looks at all packs"
    unstaged = proxies[RESTORES[3]]
    assert sum(each.received_bytes for each in unstaged.requests) < 2.1 * stored, "once to verify, once to fill"
    assert len(ranges(unstaged)) <= 2 * 4 * SIZE


@pytest.mark.slow
def test_of_a_rank_that_is_killed_in_mid_upload_all_hear_and_a_later_gc_removes_its_parts(s3: S3Server) -> None:
    bucket = new_repository(s3)
    url = s3.url(bucket, part_bytes=PART_BYTES, parallel=1)
    outcomes = run_processes(SIZE, f"{CASES}:one_is_killed_while_it_uploads", url)
    assert outcomes[VICTIM].exit_code == -signal.SIGKILL
    for text, ranks in results([one for one in outcomes if one.rank != VICTIM]):
        assert text.startswith(f"PeerError: rank {VICTIM}"), text
        assert ranks == (VICTIM,)

    def uploads() -> list[str]:
        return [each["Key"][-5:] for each in s3.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]

    def begun_before(age_s: float) -> Fault:
        text = time.strftime("<Initiated>%Y-%m-%dT%H:%M:%SZ</Initiated>", time.gmtime(time.time() - age_s)).encode()
        return edit(lambda body: re.sub(rb"<Initiated>.*?</Initiated>", text, body))

    assert uploads() == [".data"], "what the others had begun, they took back"
    with Proxy(s3.endpoint) as proxy, Repository.open(S3Server(proxy.endpoint).url(bucket)) as repo:
        proxy.plan(begun_before(60), match="uploads")
        assert repo.gc(min_age_s=0).temporaries == 0, "a writer that lives may have it"
        assert uploads() == [".data"]
        proxy.plan(begun_before(3 * 3600), match="uploads")
        report = repo.gc()
        assert (report.temporaries, report.temporary_bytes, uploads()) == (1, PART_BYTES, [])
        assert repo.fsck(read_data=True).ok
        assert repo.load("main") == {"step": 0}
