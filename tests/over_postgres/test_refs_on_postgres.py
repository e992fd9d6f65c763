"""Branches and revisions, with the index in PostgreSQL: those that ask the index for more than what stands in refs."""

from tests.over_buckets.again import again

WANTED = {
    "test_a_deleted_branch_is_gone_and_its_commits_are_not",
    "test_a_branch_that_alone_leads_to_commits_is_deleted_only_by_force",
    "test_a_commit_that_arrives_while_its_branch_is_deleted_is_not_lost",
    "test_revisions_name_refs_ancestors_and_ids",
    "test_a_prefix_that_several_commits_share_is_ambiguous",
}
globals().update(again("tests.ops.refs.test_refs_verbs", WANTED.__contains__))
assert globals().keys() >= WANTED, "a test has another name now"
