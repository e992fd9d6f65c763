"""Commits and checkouts, in a bucket of Cloud Storage: the tests that run over S3."""

from tests.over_s3.again import again

globals().update(again("tests.over_s3.test_commit_checkout_s3"))
