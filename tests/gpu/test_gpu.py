"""What only a GPU can show; skipped where there is none. `python -m pytest --noconftest tests/gpu`
takes a minute, kernels are compiled in it.

The kernels themselves and all paths around them are tested without one, in tests/training/device/.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch

from cas_ckpt import InvalidInputError, Repository
from cas_ckpt.objects.digest import LEAF_BYTES
from cas_ckpt.objects.spec import Grid
from cas_ckpt.training.device import hasher as module
from cas_ckpt.training.device.hasher import Hasher
from tests.training.device.hashing import answers, dtypes, expected, random_bytes, random_tensor, request
from tests.training.device.paths import counted_reads, counted_waits, same_bits

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(600)]

LENGTHS = (
    1, 2, 3, 4, 5, 63, 64, 65, 1000, 1023, 1024, 1025, 2047, 2048, 2049, 3072, 3073, 65_535, 65_536, 65_537,
    LEAF_BYTES - 1024, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 2 * LEAF_BYTES, 4 << 20, (4 << 20) + 5,
)  # fmt: skip

_NUMBERS = count()


@pytest.fixture
def repo(caplog: pytest.LogCaptureFixture) -> Iterator[Repository]:
    """A repository in memory; nothing may fall back to the host."""
    with caplog.at_level(logging.WARNING, "cas_ckpt"), Repository.init(f"memory://gpu-{next(_NUMBERS)}") as made:
        yield made
    assert [record.getMessage() for record in caplog.records] == []


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def hasher() -> Hasher:
    from cas_ckpt.training.device import kernels

    return Hasher(gpu(), kernels)


def state(seed: int = 0) -> dict[str, Any]:
    weight = random_tensor(torch.float32, 3000, 2048, seed=seed).to(gpu())
    return {
        "model": {"weight": weight, "tied": weight, "transposed": weight.t(), "part": weight[3:900, 7:1900]},
        "half": random_tensor(torch.bfloat16, 4096, 4096, seed=seed).to(gpu()),
        "odd": random_bytes(5_000_001, seed).to(gpu())[1:], "few": torch.arange(5, device=gpu()),
        "host": random_tensor(torch.float32, 9000, seed=seed),
    }  # fmt: skip


def on_host(tree: Any) -> Any:
    return {name: on_host(each) for name, each in tree.items()} if isinstance(tree, dict) else tree.cpu()


def root_of(tree: Any) -> str:
    with Repository.init(f"memory://host-{next(_NUMBERS)}") as repo:
        return repo.commit(on_host({**tree, "model": {**tree["model"]}})).root


def test_leaves_of_all_lengths_have_the_digests_of_their_bytes() -> None:
    draw = random.Random(3)
    lengths = [*LENGTHS, *(draw.randrange(1, 3 * LEAF_BYTES) for _ in range(200))]
    data = random_bytes(max(lengths) + 32).to(gpu())
    for starts in (lambda: 0, lambda: draw.randrange(32)):
        requests = [
            request(data[(at := starts()) : at + length], Grid((length,), (length,), LEAF_BYTES), [0])
            for length in lengths
        ]
        assert answers(hasher(), requests) == expected(requests)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_every_dtype_and_stride_is_hashed_by_its_bytes(dtype: torch.dtype) -> None:
    matrix = random_tensor(dtype, 700, 2048, device=gpu())
    views = [matrix, matrix.t(), matrix[:, 5:1999], matrix[1:], matrix[::3], matrix.view(350, 2, 2048)[:, 1]]
    requests = [request(view) for view in views]
    assert answers(hasher(), requests) == expected(requests)


def test_the_same_state_has_the_same_id_on_the_device_and_comes_back(repo: Repository) -> None:
    made = state()
    commits = [repo.commit(made), repo.commit(made)]
    assert {each.root for each in commits} == {root_of(made)}
    assert repo.fsck().problems == ()
    target = state(1)
    target["model"] |= {name: target["model"][name].clone() for name in ("transposed", "part")}
    repo.checkout("main", into=target)
    assert all(same_bits(target["model"][name], made["model"][name]) for name in made["model"])
    loaded = repo.load("main", device=gpu())
    assert loaded["half"].device == gpu() and same_bits(loaded["half"], made["half"])


def test_an_unchanged_state_is_not_read(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AUDIT_SHARE", 0)
    made = {"x": random_tensor(torch.float32, 8192, 4096).to(gpu())}
    for _ in range(2):
        repo.commit(made)
    with counted_reads(monkeypatch) as reads:
        repo.commit(made)
        assert reads == []
        made["x"][5, 5] = 1.5
        repo.commit(made)
    assert len(reads) == 1


@pytest.mark.parametrize("in_background", [False, True], ids=["commit", "commit_async"])
def test_work_that_is_queued_before_the_call_is_in_the_commit_and_later_work_is_not(
    repo: Repository, in_background: bool
) -> None:
    x = random_tensor(torch.float32, 4096, 4096).to(gpu())
    repo.commit({"x": x})
    stream = torch.cuda.Stream()
    for queued_on in (torch.cuda.current_stream(), stream):
        queued_on.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(queued_on):
            torch.cuda._sleep(200_000_000)
            x.add_(1)
            wanted = x.clone()
            if in_background:
                pending = repo.commit_async({"x": x})
                x.zero_()
                commit = pending.result()
            else:
                commit = repo.commit({"x": x})
                x.zero_()
        torch.cuda.synchronize()
        assert same_bits(repo.load(commit.id)["x"], wanted)


def test_commits_in_the_background_are_those_of_the_host(repo: Repository) -> None:
    made = state()
    wanted = root_of(made)
    assert repo.commit_async(made).result().root == wanted
    pending = repo.commit_async(made)
    made["half"].zero_()
    assert pending.result().root == wanted
    assert repo.commit_async(made).result().root == root_of(made)


def test_many_small_tensors_come_to_the_host_together(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {
        f"x{number}": random_tensor(torch.float32, 1 + number % 5000, seed=number).to(gpu()) for number in range(3000)
    }
    with Repository.init(f"memory://host-{next(_NUMBERS)}") as other:
        wanted = other.commit(on_host(made)).root
    with counted_waits(monkeypatch) as waits:
        assert repo.commit(made).root == wanted
        assert repo.commit_async(made).result().root == wanted
    assert len(waits) < 60


@pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_quantized_tensors_are_committed_and_come_back(repo: Repository, dtype: torch.dtype) -> None:
    made = torch.quantize_per_tensor(torch.randn(300, 7, device=gpu()), 0.1, 3, dtype)
    repo.commit({"q": made})
    assert torch.equal(repo.load("main", device=gpu())["q"].int_repr(), made.int_repr())


def test_replays_of_a_graph_are_committed_and_a_capture_is_refused(repo: Repository) -> None:
    x = torch.zeros(1 << 20, device=gpu())
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        x.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.raises(InvalidInputError, match="graph is being captured"):
            repo.commit({"x": x})
    for _ in range(3):
        graph.replay()
        wanted = repo.commit({"x": x})
        assert same_bits(repo.load(wanted.id)["x"], x)
