"""The kernels, in Triton's interpreter, give what the package blake3 gives for the same bytes."""

from __future__ import annotations

import random

import pytest
import torch

from cas_ckpt import Repository
from cas_ckpt.objects.digest import LEAF_BYTES
from cas_ckpt.objects.spec import Grid
from cas_ckpt.training.device import hasher as module
from cas_ckpt.training.device.hasher import Hasher
from tests.training.device.hashing import CPU, answers, expected, one_cell, random_tensor, request
from tests.training.device.interpreted import interpreted_kernels, lowered
from tests.training.device.paths import counted_reads, hashed_on_device, same_bits

pytestmark = pytest.mark.slow


def hasher() -> Hasher:
    return Hasher(CPU, interpreted_kernels())


SHORT = (0, 1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 1000, 1023, 1024)
MIDDLE = (1025, 2047, 2048, 2049, 3072, 3073, 4095, 4096)
LONG = (LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1)


@pytest.mark.parametrize("lengths", [SHORT, MIDDLE, LONG], ids=["one chunk", "few chunks", "whole leaves"])
def test_leaves_of_every_class_of_lengths_have_the_digests_of_their_bytes(lengths: tuple[int, ...]) -> None:
    requests = [one_cell(length, LEAF_BYTES) for length in lengths]
    assert answers(hasher(), requests) == expected(requests)


def test_leaves_of_random_lengths_and_beginnings_have_the_digests_of_their_bytes() -> None:
    draw = random.Random(7)
    requests = [one_cell(draw.randrange(16 << 10), 16 << 10, start=draw.randrange(17)) for _ in range(40)]
    assert answers(hasher(), requests) == expected(requests)


def test_cells_that_are_rows_of_a_matrix_are_hashed_where_they_are() -> None:
    matrix = random_tensor(torch.float32, 32, 2048)
    whole = request(matrix, Grid((32, 2048), (16, 512), 8192))
    ragged = request(matrix[:, :2000], Grid((32, 2000), (7, 400), 4 * 1600))
    requests = [whole, ragged]
    assert answers(hasher(), requests) == expected(requests)


def test_a_state_that_the_kernels_hashed_is_committed_unread_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"weight": random_tensor(torch.float32, 64, 128), "bias": random_tensor(torch.float16, 777)}
    monkeypatch.setattr(module, "AUDIT_SHARE", 0)
    with Repository.init("memory://interpreted") as repo:
        on_host = repo.commit(state).root
        with hashed_on_device(interpreted_kernels()):
            assert repo.commit(state).root == on_host
            with counted_reads(monkeypatch) as reads:
                assert repo.commit(state).root == on_host
            assert reads == []
            target = {"weight": torch.zeros(64, 128), "bias": torch.zeros(777, dtype=torch.float16)}
            repo.checkout("main", into=target)
        assert all(same_bits(target[name], state[name]) for name in state)


@pytest.mark.parametrize("whole", [True, False])
def test_the_compiler_takes_what_the_interpreter_ran(whole: bool) -> None:
    words = dict.fromkeys(("base", "values"), "*u32") | dict.fromkeys(("num_leaves", "chunks_per_leaf"), "i32")
    tables = {"table": "*i64", "cell_of": "*i32", "counts": "*i32", "num_blocks": "i32"}
    text = lowered("chunk_values", words | tables, {"lanes": 128, "whole": whole, "rows": True})
    assert "tt.split" in text
    parents = {"values": "*u32", "counts": "*i32", "num_leaves": "i32", "chunks_per_leaf": "i32", "step": "i32"}
    assert "tt.store" in lowered("parent_values", parents, {"lanes": 128})
