"""Commits and checkouts, in a bucket."""

import pytest

from tests.over_buckets.again import again

pytestmark = pytest.mark.usefixtures("in_buckets")

globals().update(again("tests.ops.commit.test_commit_checkout", lambda name: "folder" not in name))
