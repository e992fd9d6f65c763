"""Branches, tags and pins, in a bucket."""

from tests.over_s3.again import again

globals().update(again("tests.ops.refs.test_refs_verbs", lambda name: "_file" not in name))
