"""Races, in a bucket of Cloud Storage: the tests that run over S3, and of pushes one."""

from tests.over_s3.again import again

SKIPPED = ("test_14_some", "test_19_a_push", "test_19_a_clone")

globals().update(again("tests.over_s3.test_schedules_s3", lambda name: not name.startswith(SKIPPED)))
