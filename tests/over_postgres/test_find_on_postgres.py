"""Searches in the history, with the index in PostgreSQL; what conditions mean: TestPostgresIndex."""

from tests.over_buckets.again import again

WANTED = {
    "test_equal_content_under_one_key_is_one_row_with_the_commits_that_have_it",
    "test_without_a_ref_all_branches_tags_and_pins_are_searched",
    "test_commits_that_hold_such_entries_come_in_the_order_of_the_log",
    "test_a_limit_takes_the_first_of_the_commits_that_are_found_without_one",
    "test_a_chunk_of_a_large_tensor_leads_to_what_holds_it",
    "test_dtypes_that_only_numpy_has_are_found_by_name_by_pattern_and_as_dtypes",
    "test_forgotten_commits_are_left_out_and_asked_for_by_name_they_say_so",
    "test_a_commit_that_another_process_made_is_found",
}
globals().update(again("tests.ops.history.test_find", WANTED.__contains__))
assert globals().keys() >= WANTED, "a test has another name now"
