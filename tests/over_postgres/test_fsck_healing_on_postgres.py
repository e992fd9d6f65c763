"""Healing from copies, with the index in PostgreSQL."""

from tests.over_buckets.again import again

# The others take the file of the index away.
globals().update(
    again("tests.ops.fsck.test_fsck_healing", lambda name: "damaged_itself" not in name and "lost_all" not in name)
)
