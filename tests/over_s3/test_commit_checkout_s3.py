"""Commits and checkouts, in a bucket."""

from tests.over_s3.again import again

globals().update(again("tests.ops.commit.test_commit_checkout", lambda name: "folder" not in name))
