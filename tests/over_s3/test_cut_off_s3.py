"""A commit whose connection ends for good at one of its requests: nothing is lost, and the next one works."""

from __future__ import annotations

import pytest
from botocore.retries import standard

from cas_ckpt.storage import s3 as s3_module
from tests.over_s3.cut_off import PART, cut_off_at_any_request
from tests.proxy import s3_error
from tests.servers import S3Server


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True], ids=["refused", "the last reply lost"])
def test_a_commit_that_is_cut_off_at_any_request_loses_nothing(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda self, context: 0.001)
    monkeypatch.setattr(s3_module, "_MIN_PART_BYTES", PART)
    cut_off_at_any_request(s3, s3_error(403, "ExpiredToken"), lost=lost)
