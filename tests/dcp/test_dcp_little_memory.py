"""A process that is allowed no more memory gets errors of ours out of DCP, too."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from cas_ckpt import CkptError, Repository, TooLargeError
from cas_ckpt.dcp import CasStorageReader, CasStorageWriter
from tests.dcp.states import alone
from tests.processes import PIPE, Forked

MIB = 1 << 20


def _limited(path: Path) -> None:
    state = {"w": torch.arange(2 * MIB), "b": b"x" * MIB}
    writer, reader = CasStorageWriter(path), CasStorageReader(path)
    works = (
        lambda: dcp.save(state, storage_writer=writer, no_dist=True),
        lambda: dcp.async_save(state, storage_writer=writer, no_dist=True).result(),  # type: ignore[union-attr]
        lambda: dcp.load(state, storage_reader=reader, no_dist=True),
    )
    refused = 0
    with alone():
        little = CasStorageWriter(path, branch="little")  # what this frees would be room for what comes
        dcp.save({"w": torch.arange(5000)}, storage_writer=little, no_dist=True)
        for room in (-64, 1, 2, 4):  # less than is mapped, too: threads that end give some of it back
            for work in works:
                mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
                resource.setrlimit(resource.RLIMIT_AS, (mapped + room * MIB, resource.RLIM_INFINITY))
                try:
                    work()
                except (CkptError, CheckpointException) as error:
                    is_dcps = isinstance(error, CheckpointException)
                    found = [each[0] for each in error.failures.values()] if is_dcps else [error]
                    refused += sum(isinstance(each, TooLargeError) for each in found)
                    print(*(repr(each) for each in found if not isinstance(each, CkptError)), end="")
                finally:
                    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        works[0]()
    print("refused" if refused > 1 else "never refused")
    sys.stdout.flush()


def test_under_a_limit_of_the_address_space_every_failure_of_ours_in_dcp_is_one_of_ours(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo", group=None) as repo:
        repo.commit({"w": torch.arange(2 * MIB), "b": b"x" * MIB})
        repo.branch("little")
    with Forked(_limited, tmp_path / "repo", stdout=PIPE, stderr=PIPE) as process:
        out, err = process.communicate()
    assert out == "refused\n", err
