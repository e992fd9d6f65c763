"""Races, in a bucket of Cloud Storage: the tests that run over S3."""

from tests.over_s3.again import again

globals().update(again("tests.over_s3.test_schedules_s3"))
