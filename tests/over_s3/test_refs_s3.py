"""Branches, tags and pins, in a bucket."""

from tests.over_s3.again import again

OF_A_FOLDER = ("_becomes_the_default_branch", "_when_the_default_changes")
"""The default branch of a bucket stays: test_the_default_branch_of_what_hosts_remember_stays."""

globals().update(
    again("tests.ops.refs.test_refs_verbs", lambda name: "_file" not in name and not name.endswith(OF_A_FOLDER))
)
