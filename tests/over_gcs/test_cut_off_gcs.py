"""A commit whose credentials end for good at one of its requests: nothing is lost, and the next one works."""

from __future__ import annotations

import pytest

from cas_ckpt.storage import gcs as gcs_module
from cas_ckpt.storage import gcs_requests
from tests.over_s3.cut_off import PART, cut_off_at_any_request
from tests.proxy import status
from tests.servers import GcsServer


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True], ids=["refused", "the last reply lost"])
def test_a_commit_that_is_cut_off_at_any_request_loses_nothing(
    gcs: GcsServer, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    monkeypatch.setattr(gcs_requests, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(gcs_requests, "_LONGEST_PAUSE_S", 0.002)
    monkeypatch.setattr(gcs_module, "_MIN_PART_BYTES", PART)
    cut_off_at_any_request(gcs, status(403, b"denied from here on"), lost=lost)
