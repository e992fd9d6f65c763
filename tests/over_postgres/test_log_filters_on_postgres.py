"""Conditions on commits, with the index in PostgreSQL."""

import pytest

from tests.over_buckets.again import again

pytestmark = pytest.mark.slow

globals().update(again("tests.ops.history.test_log_filters"))
