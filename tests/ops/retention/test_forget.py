"""Forgetting: what a policy does not keep, or what was named; the log goes on, refs win."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cas_ckpt import clock
from cas_ckpt.core.config import POLICY_KEY
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.forgotten import PREFIX, read_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import PLACEHOLDER_GENERATION, RefKind
from cas_ckpt.errors import ConflictError, CorruptionError, InvalidInputError, NotFoundError, PermissionDeniedError
from cas_ckpt.index import contents, remembered
from cas_ckpt.objects.digest import Digest, seal, unseal
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.history.log import log_commits
from cas_ckpt.ops.refs import create_branch, create_tag, delete_branch
from cas_ckpt.ops.retention import forget as forgetting
from cas_ckpt.ops.retention.forget import ForgetReport, apply_policy, forget
from cas_ckpt.ops.retention.policy import Policy, Retention, clear_policy, read_policy, set_policy
from tests.builders import commit, numbers, same_bytes, stored_arrays
from tests.index.restores_suite import restore

DAY_S = 86400
FIRST_DAY_S = 1_700_000_000 // DAY_S * DAY_S + 12 * 3600


@pytest.fixture
def repo() -> Iterator[RepositoryHandle]:
    """main: d0 - d1 - ... - d7, one a day; ft leaves it at d3 with f0 and f1 on the days after."""
    handle = init_repository(f"memory://forget-{secrets.token_hex(4)}")
    for number in range(8):
        on_day(handle, number, f"d{number}")
        if number == 3:
            create_branch(handle, "ft")
    for number in (4, 5):
        on_day(handle, number, f"f{number - 4}", branch="ft")
    with clock.fixed(lambda: FIRST_DAY_S + 30.0 * DAY_S):
        yield handle
    handle.close()


def on_day(handle: RepositoryHandle, day: int, message: str, state: Any = None, **request: Any) -> None:
    with clock.fixed(lambda: float(FIRST_DAY_S + day * DAY_S)):
        own = state or {"x": message}
        commit(handle, own, message=message, step=100 * day, metrics={"loss": float(10 - day)}, **request)


def gone(handle: RepositoryHandle) -> set[str]:
    """Messages of the commits that are forgotten."""
    forgotten = read_forgotten(handle.store)
    return {info.message for info in log_commits(handle, all_refs=True) if bytes.fromhex(info.id) in forgotten}


def chosen(report: ForgetReport) -> set[str]:
    return {one.commit.message for one in report.decisions if not one.keep}


# --- by rules -----------------------------------------------------------------------------------


def test_what_no_rule_of_any_branch_keeps_is_forgotten_in_one_record(repo: RepositoryHandle) -> None:
    report = forget(repo, Policy(keep_daily=3))
    assert chosen(report) == gone(repo) == {"d0", "d1", "d2", "d4"}
    assert len(report.decisions) == 10
    assert len(list(repo.store.list(PREFIX))) == 1
    assert set(report.forgotten) == {one.commit.id for one in report.decisions if not one.keep}


def test_the_reasons_name_rules_and_branches(repo: RepositoryHandle) -> None:
    create_tag(repo, "v1", "main~7")
    report = forget(repo, Policy(keep_daily=3, keep_best="loss:1"), dry_run=True)
    told = {one.commit.message: one.reasons for one in report.decisions if one.keep}
    assert told["d0"] == ("tag v1",)
    assert told["d3"] == ("daily of ft",)
    assert told["d7"] == ("head of main", "daily of main", "best loss (1 of 1) of main")
    assert all(bool(one.reasons) is one.keep for one in report.decisions)


def test_a_dry_run_says_the_same_and_writes_nothing(repo: RepositoryHandle) -> None:
    keys = set(repo.store.list(""))
    dry = forget(repo, Policy(keep_last=2), dry_run=True)
    assert set(repo.store.list("")) == keys
    real = forget(repo, Policy(keep_last=2))
    assert (dry.decisions, dry.forgotten, dry.dry_run) == (real.decisions, real.forgotten, not real.dry_run)


def test_applied_again_it_forgets_nothing_and_writes_nothing(repo: RepositoryHandle) -> None:
    forget(repo, Policy(keep_daily=3))
    keys = set(repo.store.list(""))
    again = forget(repo, Policy(keep_daily=3))
    assert again.forgotten == () and set(repo.store.list("")) == keys
    assert all(one.keep for one in again.decisions)


def test_the_log_goes_through_forgotten_commits_to_the_first_one(repo: RepositoryHandle) -> None:
    before = [info.id for info in log_commits(repo, ["main"])]
    forget(repo, Policy(keep_last=1))
    assert gone(repo) >= {"d0", "d6"}
    assert [info.id for info in log_commits(repo, ["main"])] == before


def test_rules_for_some_branches_leave_alone_what_others_have(repo: RepositoryHandle) -> None:
    assert chosen(forget(repo, Policy(keep_last=1), branches=["f*"])) == {"f0"}
    assert chosen(forget(repo, Policy(keep_last=1), branches=["main"])) == {"d4", "d5", "d6"}
    with pytest.raises(InvalidInputError, match="'nothing' matches no branch"):
        forget(repo, Policy(keep_last=1), branches=["main", "nothing"])


def test_what_only_a_tag_leads_to_has_rules_as_well(repo: RepositoryHandle) -> None:
    create_tag(repo, "v1", "ft")
    delete_branch(repo, "ft", force=True)
    report = forget(repo, Policy(keep_last=1), dry_run=True)
    assert chosen(report) == {"d0", "d1", "d2", "d3", "d4", "d5", "d6", "f0"}
    told = {one.commit.message: one.reasons for one in report.decisions}
    assert told["f1"] == ("tag v1", "last of tag v1")
    assert chosen(forget(repo, Policy(keep_last=2))) == {"d0", "d1", "d2", "d3", "d4", "d5"}


def test_a_tag_on_a_branch_keeps_its_own_commit_and_no_others(repo: RepositoryHandle) -> None:
    create_tag(repo, "v1", "main~5")
    assert chosen(forget(repo, Policy(keep_last=1))) == {"d0", "d1", "d3", "d4", "d5", "d6", "f0"}


def test_a_forgotten_commit_that_is_named_afterwards_is_judged_anew(repo: RepositoryHandle) -> None:
    forget(repo, Policy(keep_last=1))
    create_tag(repo, "back", "main~4")
    report = forget(repo, Policy(keep_last=1))
    assert {one.commit.message: one.reasons for one in report.decisions}["d3"] == ("tag back",)


def test_the_commits_that_were_restored_last_are_kept(repo: RepositoryHandle) -> None:
    with pytest.raises(NotFoundError, match="knows of no commit that was restored whole"):
        forget(repo, Policy(keep_last_restored=2))
    assert gone(repo) == set()
    by_message = {info.message: info for info in log_commits(repo, all_refs=True)}
    said: dict[str, dict[str, Any]] = {
        "d0": {}, "d1": {}, "f0": {}, "d2": {"complete": False}, "d3": {"error": "CorruptionError: x"}, "d5": {},
    }  # fmt: skip
    for at_s, (message, changes) in enumerate(said.items()):
        info = by_message[message]
        ids = {"commit_id": bytes.fromhex(info.id), "root": bytes.fromhex(info.root)}
        clock_s = at_s if message != "d0" else 10**9  # a clock that was ahead: the log's order counts
        repo.index.write(remembered.write_restore, restore(message, at_s=clock_s, **ids | changes))
    report = forget(repo, Policy(keep_last_restored=2))
    # Of main d5 and d1, of ft f0 and d1; heads stay.
    assert gone(repo) == {"d0", "d2", "d3", "d4", "d6"}
    reasons = {one.commit.message: one.reasons for one in report.decisions}
    assert reasons["d1"] == ("last restored of ft, main",)


def test_an_empty_policy_is_refused(repo: RepositoryHandle) -> None:
    with pytest.raises(InvalidInputError, match="without rules"):
        forget(repo, Policy(keep_last=0))
    with pytest.raises(InvalidInputError, match="give a policy, or revisions"):
        forget(repo)
    with pytest.raises(InvalidInputError, match="and not both"):
        forget(repo, Policy(keep_last=1), revisions=["main~1"])


def test_a_branch_that_is_made_meanwhile_keeps_what_its_rules_keep(
    repo: RepositoryHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = forgetting.choose
    made: list[str] = []

    def slowly(*args: Any, **how: Any) -> Any:
        found = decided(*args, **how)
        if not made:
            made.append("late")
            create_branch(repo, "late", start="main~4")
        return found

    monkeypatch.setattr(forgetting, "choose", slowly)
    assert gone(repo) == set()
    forget(repo, Policy(keep_last=2))
    assert gone(repo) & {"d2", "d3"} == set()


def test_refs_that_never_rest_are_a_conflict_and_nothing_is_written(
    repo: RepositoryHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = forgetting.choose

    def slowly(*args: Any, **how: Any) -> Any:
        create_tag(repo, f"t{secrets.token_hex(4)}x")
        return decided(*args, **how)

    monkeypatch.setattr(forgetting, "choose", slowly)
    with pytest.raises(ConflictError, match="new refs were made"):
        forget(repo, Policy(keep_last=2))
    assert read_forgotten(repo.store) == frozenset()


def test_history_with_a_hole_forgets_nothing(repo: RepositoryHandle) -> None:
    victim = repo.index.read(contents.locate, [Digest(bytes.fromhex(next(log_commits(repo, ["main~5"])).id))])
    pack = next(iter(victim.values()))[0].pack
    repo.store.delete(pack)
    repo.sync()
    with pytest.raises(CorruptionError, match="history has a hole"):
        forget(repo, Policy(keep_last=2))
    assert read_forgotten(repo.store) == frozenset()


def test_commits_of_another_process_are_seen(repo: RepositoryHandle) -> None:
    other = RepositoryHandle.on_store(repo.store)
    on_day(other, 9, "elsewhere")
    assert chosen(forget(repo, Policy(keep_last=1), branches=["main"])) == {"d4", "d5", "d6", "d7"}


def just_before(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, act: Callable[[], Any]) -> None:
    """Do `act` once, when `place.name` is called next."""
    real, done = getattr(place, name), []

    def later(*args: Any, **kwargs: Any) -> Any:
        if not done:
            done.append(True)
            act()
        return real(*args, **kwargs)

    monkeypatch.setattr(place, name, later)


def test_a_tag_that_comes_between_decision_and_record_saves_its_commit(
    repo: RepositoryHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_day(repo, 10, "w", state={"own": numbers(30_000)})
    on_day(repo, 11, "later")
    just_before(monkeypatch, forgetting, "write_forgotten", lambda: create_tag(repo, "wanted", "main~1"))
    report = forget(repo, Policy(keep_last=1), gc=True)
    assert "w" not in chosen(report) | gone(repo) and "d6" in chosen(report) & gone(repo)
    collect_garbage(repo, GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0))
    assert same_bytes(stored_arrays(repo, next(log_commits(repo, ["wanted"])).root)["own"], numbers(30_000))


def test_a_branch_that_is_moved_between_decision_and_record_keeps_what_its_rules_keep(
    repo: RepositoryHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved() -> None:
        create_branch(repo, "ft", start="main~2", force=True)

    just_before(monkeypatch, forgetting, "write_forgotten", moved)
    report = forget(repo, Policy(keep_last=2))
    assert chosen(report) == gone(repo) == {"d0", "d1", "d2", "d3"}
    assert {bytes.fromhex(one) for one in report.forgotten} == read_forgotten(repo.store)


def test_a_branch_that_only_goes_on_does_not_make_the_choice_begin_again(
    repo: RepositoryHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, choices = forgetting.choose, []

    def watched(*args: Any, **how: Any) -> Any:
        choices.append(args)
        return choose(*args, **how)

    monkeypatch.setattr(forgetting, "choose", watched)
    just_before(monkeypatch, forgetting, "write_forgotten", lambda: on_day(repo, 12, "next"))
    assert chosen(forget(repo, Policy(keep_last=2))) == gone(repo) == {"d0", "d1", "d2", "d3", "d4", "d5"}
    assert len(choices) == 1


# --- by name ------------------------------------------------------------------------------------


def test_single_commits_in_the_middle_are_forgotten(repo: RepositoryHandle) -> None:
    report = forget(repo, revisions=["main~2", "main~5", "main~2"])
    assert chosen(report) == gone(repo) == {"d5", "d2"}
    assert len(report.forgotten) == 2


def test_a_commit_that_is_forgotten_already_is_no_error_and_no_new_record(repo: RepositoryHandle) -> None:
    forget(repo, revisions=["main~2"])
    report = forget(repo, revisions=["main~2", "main~3"])
    assert [one.reasons for one in report.decisions] == [("forgotten already",), ("asked for",)]
    assert len(report.forgotten) == 1
    forget(repo, revisions=["main~2"])
    assert len(list(repo.store.list(PREFIX))) == 2


@pytest.mark.parametrize(("kind", "wanted"), [
    (RefKind.BRANCH, "head of ft"), (RefKind.TAG, "tag named"), (RefKind.PIN, "pin named")
])  # fmt: skip
def test_a_commit_that_a_ref_names_is_refused_with_its_name(repo: RepositoryHandle, kind: RefKind, wanted: str) -> None:
    revision = "ft" if kind is RefKind.BRANCH else "main~2"
    if kind is not RefKind.BRANCH:
        target = Digest(bytes.fromhex(next(log_commits(repo, [revision])).id))
        repo.refs.swap(repo.refs.create_placeholder(kind, "named"), target, generation=PLACEHOLDER_GENERATION)
    with pytest.raises(InvalidInputError, match=f"is {wanted}, so it stays"):
        forget(repo, revisions=["main~1", revision])
    assert read_forgotten(repo.store) == frozenset()


def test_the_first_commit_of_a_branch_can_be_forgotten(repo: RepositoryHandle) -> None:
    forget(repo, revisions=["main~7"])
    assert gone(repo) == {"d0"}
    assert [info.message for info in log_commits(repo, ["ft"])] == ["f1", "f0", "d3", "d2", "d1", "d0"]


def test_what_is_not_there_cannot_be_forgotten(repo: RepositoryHandle) -> None:
    with pytest.raises(NotFoundError):
        forget(repo, revisions=["main~1", "main~99"])
    with pytest.raises(InvalidInputError, match="wherever it is"):
        forget(repo, revisions=["main~1"], branches=["main"])
    assert read_forgotten(repo.store) == frozenset()


def test_nothing_is_forgotten_in_a_repository_that_was_opened_for_reading(repo: RepositoryHandle) -> None:
    reading = RepositoryHandle.on_store(repo.store, read_only=True)
    assert chosen(forget(reading, Policy(keep_last=1), dry_run=True))
    with pytest.raises(PermissionDeniedError):
        forget(reading, Policy(keep_last=1))
    with pytest.raises(PermissionDeniedError):
        set_policy(reading, Policy(keep_last=1))


# --- what it would free -------------------------------------------------------------------------


def test_what_would_be_freed_is_what_no_other_commit_has(repo: RepositoryHandle) -> None:
    base = numbers(5000, seed=1)
    for number in range(4):
        on_day(repo, 10 + number, f"w{number}", state={"base": base, "own": numbers(3000, seed=2 + number)})
    one = forget(repo, revisions=["main~1"], dry_run=True).freed_bytes
    two = forget(repo, revisions=["main~1", "main~2"], dry_run=True).freed_bytes
    assert one is not None and two is not None
    assert 12_000 <= one < 14_000 and 24_000 <= two < 28_000
    assert forget(repo, revisions=["main~1"]).freed_bytes == one
    assert forget(repo, revisions=["main~1"]).freed_bytes == 0
    rest = forget(repo, revisions=["main~1", "main~2"], dry_run=True).freed_bytes
    assert rest == two - one


def test_collected_at_once_the_space_is_given_back_and_the_log_stays(repo: RepositoryHandle) -> None:
    for number in range(4):
        on_day(repo, 10 + number, f"w{number}", state={"own": numbers(30_000, seed=2 + number)})
    wanted = [info.id for info in log_commits(repo, ["main"])]
    before = sum(size for _, size in repo.store.list(PACK_PREFIX))
    report = forget(repo, Policy(keep_last=1), gc=True)
    assert report.collected is not None and report.freed_bytes is None
    assert forget(repo, revisions=["main~1"], gc=True).freed_bytes is None
    assert before - sum(size for _, size in repo.store.list(PACK_PREFIX)) > 3 * 120_000 - 20_000
    assert [info.id for info in log_commits(repo, ["main"])] == wanted
    assert stored_arrays(repo, next(log_commits(repo, ["main"])).root)["own"].shape == (30_000,)


# --- the policy of the repository ---------------------------------------------------------------


def test_the_rules_of_the_repository_are_applied_branch_by_branch(repo: RepositoryHandle) -> None:
    set_policy(repo, Policy(keep_last=4))
    set_policy(repo, Policy(keep_last=1), branch="ft*")
    assert chosen(apply_policy(repo)) == {"d0", "d1", "d2", "d3", "f0"}


def test_without_rules_for_all_only_the_branches_that_match_are_touched(repo: RepositoryHandle) -> None:
    set_policy(repo, Policy(keep_last=1), branch="ft*")
    assert chosen(apply_policy(repo)) == {"f0"}


def test_rules_are_set_replaced_and_cleared_one_pattern_at_a_time(repo: RepositoryHandle) -> None:
    one, two, three = (Policy(keep_last=number) for number in (1, 2, 3))
    set_policy(repo, one)
    set_policy(repo, one, branch="a*")
    set_policy(repo, two, branch="b*")
    assert set_policy(repo, three, branch="a*") == Retention(one, (("a*", three), ("b*", two)))
    assert clear_policy(repo, branch="a*") == read_policy(repo.store) == Retention(one, (("b*", two),))
    assert clear_policy(repo).is_empty
    with pytest.raises(NotFoundError, match="has no policy"):
        clear_policy(repo)
    set_policy(repo, one)
    with pytest.raises(NotFoundError, match="for the pattern 'a"):
        clear_policy(repo, branch="a*")


def test_a_repository_without_rules_forgets_nothing_by_them(repo: RepositoryHandle) -> None:
    assert read_policy(repo.store).is_empty
    with pytest.raises(InvalidInputError, match="has no policy"):
        apply_policy(repo)
    with pytest.raises(InvalidInputError, match="without rules"):
        set_policy(repo, Policy())
    for pattern in ("", "x" * 300, "a\nb"):
        with pytest.raises(InvalidInputError, match="is not a pattern of branches"):
            set_policy(repo, Policy(keep_last=1), branch=pattern)


def test_two_who_change_the_rules_at_once_both_succeed(repo: RepositoryHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    set_policy(repo, Policy(keep_last=9))
    swap, others = repo.store.compare_and_swap, [Policy(keep_last=1)]

    def racing(key: str, expected: bytes, data: bytes) -> None:
        if others:
            set_policy(repo, others.pop(), branch="theirs")
        swap(key, expected, data)

    monkeypatch.setattr(repo.store, "compare_and_swap", racing)
    set_policy(repo, Policy(keep_last=2), branch="ours")
    assert [pattern for pattern, _ in read_policy(repo.store).branches] == ["theirs", "ours"]


def test_rules_that_are_damaged_or_newer_are_never_passed_over(repo: RepositoryHandle) -> None:
    set_policy(repo, Policy(keep_last=3))
    record = repo.store.get(POLICY_KEY)
    whole = unseal("policy", record, version=1, key=POLICY_KEY)
    odd: list[dict[str, Any]] = [{"default": {"keep_moonly": 3}}, {"branches": [["a"]]}, {"default": 3}]
    wrong = [seal("policy", 1, payload, key=POLICY_KEY) for payload in ({}, *(whole | one for one in odd))]
    for bad in (record[:-1], bytes([record[0] ^ 1, *record[1:]]), *wrong):
        repo.store.put(POLICY_KEY, bad)
        with pytest.raises(CorruptionError, match="policy"):
            apply_policy(repo)
    assert read_forgotten(repo.store) == frozenset()
