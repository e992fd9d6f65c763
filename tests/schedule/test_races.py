"""The races that people think of, one by one: a test each, on the real code.

Numbers are those of the table in docs/gc.md. `W` writes, `G0` and `G1` collect, `U` is the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import GcPhase, read_gc_state
from cas_ckpt.errors import ConflictError, NotFoundError, TransientStorageError
from tests.effects import Fault
from tests.index.building import empty
from tests.schedule.deciders import Go, Script, Together, all_of, some_of, through, to
from tests.schedule.play import Played, Scenario, collect_in_quiet, play
from tests.schedule.soundness import Soundness
from tests.schedule.world import IndexPool, commit, fixed_chance, read_back, world
from tests.searches import tries

_MAIN, _NEW = "refs/heads/main.ref", "refs/heads/new.ref"
_UPLOADED = to("W", f"get {_MAIN}", times=2)  # the first get is before the upload, for the branch's policy
_STATE = "compare_and_swap gc/state|put gc/state"
CONDEMN = through("G0", _STATE)
FENCE_MAIN = through("G0", f"compare_and_swap {_MAIN}")

MOST_REQUESTS = 160

EVERY = tries(3, 1)
"""Of the requests that an actor may be stopped after, every so manieth is tried."""


def well(text: str, *parts: Go | Together) -> Played:
    """The schedule, which must lose nothing and leave nothing."""
    played = play(Scenario.parse(text), Script(parts))
    assert played.failure is None, str(played)
    return played


def at_every_request(text: str, actor: str, *then: Go, first: Sequence[Go] = (), fault: Fault | None = None,
                     rest: bool = False) -> Iterator[Played]:  # fmt: skip
    """`actor` stops after its first request, its second, ...; then the others; with `rest`, then the actor again."""
    for count in range(1, MOST_REQUESTS, EVERY):
        last = (all_of(actor),) if rest else ()
        played = well(text, *first, some_of(actor, count, fault), *then, *last)
        yield played
        if sum(turn.actor == actor for turn in played.turns) < count:
            assert count > 1, f"{actor} asked for nothing"
            return
    pytest.fail(f"{actor} does not end within {MOST_REQUESTS} requests")


def asked(played: Played, request: str) -> int:
    """How often something was asked for."""
    return played.story.count(f": {request}")


# --- 1 to 3: when a commit lands -------------------------------------------------------------------


def test_1_a_writer_that_was_stopped_at_any_moment_goes_on_after_a_whole_collection() -> None:
    for played in at_every_request("garbage; W=commit ab; G0=gc", "W", all_of("G0"), rest=True):
        assert not played.errors
        assert played.results["W"]


def test_1_and_after_two_collections_with_another_commit_between_them() -> None:
    others = (all_of("G0"), all_of("V"), all_of("G1"))
    for played in at_every_request("garbage; W=commit ab; V=commit bc side; G0=gc; G1=gc", "W", *others, rest=True):
        assert not played.errors


def test_2_a_commit_that_lands_between_mark_and_fence_is_rescued() -> None:
    swap = to("W", f"compare_and_swap {_MAIN}")
    played = well("garbage; W=commit ab; G0=gc", swap, CONDEMN, all_of("W"), all_of("G0"))
    assert asked(played, "delete packs/") < 2  # b was condemned as a whole, and its chunk is kept
    assert not played.errors


@pytest.mark.parametrize("branch", ["main", "side"])
@pytest.mark.parametrize("fenced", ["main", "side"])
def test_3_a_commit_that_lands_between_the_fences_of_two_refs_is_not_lost(branch: str, fenced: str) -> None:
    ours = f"compare_and_swap refs/heads/{branch}.ref"
    first = through("G0", f"compare_and_swap refs/heads/{fenced}.ref")
    for start in (to("W", ours), to("W", f"get refs/heads/{branch}.ref"), some_of("W", 1)):
        played = well(f"tall; W=commit abe {branch}; G0=gc", start, CONDEMN, first, all_of("W"), all_of("G0"))
        assert not played.errors


# --- 4 to 6: names that come and go ------------------------------------------------------------------


@pytest.mark.parametrize("deed", ["branch new b", "branch main b force", "tag v1 b", "pin p b", "undelete old"])
def test_4_a_name_for_a_condemned_commit_is_refused_or_saves_it(deed: str) -> None:
    refused = []
    for played in at_every_request(f"garbage; W={deed}; G0=gc", "G0", all_of("W"), rest=True):
        refused.append("W" in played.errors)
        assert all(isinstance(error, NotFoundError) for error in played.errors.values())
    assert refused == sorted(refused)  # from the moment on that it is condemned
    assert set(refused) == {False, True}


@pytest.mark.parametrize("deed", ["branch new b", "branch main b force", "tag v1 b", "pin p b"])
def test_4_and_so_is_one_that_was_being_made_when_the_collection_came(deed: str) -> None:
    for played in at_every_request(f"garbage; W={deed}; G0=gc", "W", all_of("G0"), rest=True):
        assert all(isinstance(error, NotFoundError) for error in played.errors.values())


def test_4_a_lost_branch_that_is_named_again_beside_a_collection_is_refused_or_saves_its_commit() -> None:
    for played in at_every_request("garbage; W=name new b; G0=gc", "G0", all_of("W"), rest=True):
        assert all(isinstance(error, NotFoundError) for error in played.errors.values())
    missed = []
    for played in at_every_request("garbage; W=name new b; G0=gc", "W", all_of("G0"), rest=True):
        assert isinstance(played.errors.get("W", NotFoundError()), NotFoundError)
        missed.append("new.ref is gone" in str(played.errors.get("G0", "")))
    assert set(missed) == {False, True}


@pytest.mark.parametrize("new", ["aaa", "zzz"])
def test_5_a_branch_that_is_renamed_while_refs_are_scanned_keeps_its_commit(new: str) -> None:
    for played in at_every_request(f"tall paged; U=rename side {new}; G0=gc", "G0", all_of("U"), rest=True):
        assert not played.errors
    for played in at_every_request(f"tall paged; U=rename side {new}; G0=gc", "U", all_of("G0"), rest=True):
        assert not played.errors


def test_6_a_ref_that_is_created_around_the_listing_of_the_fence_is_fenced_or_refused() -> None:
    create, swap = f"put_if_absent {_NEW}", f"compare_and_swap {_NEW}"
    text = "garbage paged; W=commit b new; G0=gc"
    for first in (to("W", create), through("W", create), to("W", swap)):
        for played in at_every_request(text, "G0", all_of("W"), first=[first], rest=True):
            assert not played.errors


# --- 7 and 8: indexes that lag -----------------------------------------------------------------------


def test_7_a_client_that_was_idle_for_three_generations_relies_on_nothing_old() -> None:
    text = "tall; W=commit abe; U=delete side; V=commit abcd; G0=gc; G1=gc; X=branch main ab force; G2=gc"
    between = (all_of("G0"), all_of("U"), all_of("G1"), all_of("V"), all_of("X"), all_of("G2"))
    for played in at_every_request(text, "W", *between, rest=True):
        assert not played.errors


def test_8_one_process_commits_twice_across_a_cycle() -> None:
    for played in at_every_request("garbage; W=commit a,ab; G0=gc", "W", all_of("G0"), rest=True):
        assert not played.errors
    for played in at_every_request("garbage; W=commit a,ab; G0=gc", "G0", all_of("W"), rest=True):
        assert not played.errors


def test_8_also_if_the_first_commit_is_made_while_the_packs_are_condemned() -> None:
    begin = (_UPLOADED, CONDEMN)
    for played in at_every_request("garbage; W=commit a,ab; G0=gc", "W", all_of("G0"), first=begin, rest=True):
        assert not played.errors


# --- 9 to 11: collections that die, come back, and repack ---------------------------------------------


def test_9_a_collection_that_comes_back_after_another_took_over_deletes_nothing_of_the_next_cycle() -> None:
    text = "garbage; W=commit ab; V=commit b side; G0=gc; G1=gc"
    for played in at_every_request(text, "G0", all_of("G1"), all_of("W"), all_of("V"), rest=True):
        assert set(played.errors) <= {"G0"}
        assert isinstance(played.errors.get("G0", ConflictError()), ConflictError)


def test_9_a_collection_that_read_the_state_before_another_one_began_condemns_nothing() -> None:
    begin = (through("G1", "get gc/state"), CONDEMN, FENCE_MAIN, to("W", f"compare_and_swap {_MAIN}"))
    text = "garbage; W=commit ab; G0=gc; G1=gc"
    for played in at_every_request(text, "G1", all_of("W"), first=begin, rest=True):
        assert "W" not in played.errors


def test_10_a_collection_may_die_at_any_request_and_writers_go_on() -> None:
    phases = set()
    text = "garbage; W=commit ab; V=commit b fresh; G0=gc repack"
    for played in at_every_request(text, "G0", all_of("W"), all_of("V")):
        assert not played.errors
        phases.add(read_gc_state(played.before_quiet).phase)
    assert phases == {GcPhase.IDLE, GcPhase.CONDEMNED, GcPhase.DELETING}


@pytest.mark.parametrize("writer", ["commit ax", "commit abx fresh", "branch new ax", "read main"])
def test_11_a_chunk_in_two_sparse_packs_survives_repacking_beside_a_writer(writer: str) -> None:
    for played in at_every_request(f"double; W={writer}; G0=gc repack", "G0", all_of("W"), rest=True):
        assert all(isinstance(error, NotFoundError) for error in played.errors.values())
    for played in at_every_request(f"double; W={writer}; G0=gc repack", "W", all_of("G0"), rest=True):
        assert all(isinstance(error, NotFoundError) for error in played.errors.values())


def test_12_a_reader_of_packs_that_are_repacked_gets_what_it_wanted() -> None:
    for played in at_every_request("double; R=read main; G0=gc repack small", "R", all_of("G0"), rest=True):
        assert not played.errors


# --- 13 and 14: writers that die, replies that are lost -------------------------------------------------


@pytest.mark.parametrize("deed", ["commit abx", "commit bx fresh", "branch new b", "tag v1 b", "undelete old"])
def test_13_a_writer_may_die_at_any_request(deed: str) -> None:
    for _ in at_every_request(f"garbage; W={deed}; G0=gc", "W", all_of("G0")):
        pass


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.LOSE_REPLY])
@pytest.mark.parametrize("deed", ["commit abx", "branch new b", "gc repack"])
def test_14_any_request_may_fail_or_lose_its_reply(deed: str, fault: Fault) -> None:
    for played in at_every_request(f"garbage; W={deed}; G0=gc", "W", all_of("W"), all_of("G0"), fault=fault):
        assert set(played.errors) <= {"W"}


def test_14_a_commit_whose_swap_lost_its_reply_is_made_once_and_told_so() -> None:
    played = well("plain; W=commit ab", through("W", f"compare_and_swap {_MAIN}", fault=Fault.LOSE_REPLY), all_of("W"))
    assert not played.errors
    assert len(Soundness(played.before_quiet).history()) == 3  # a, b and ours


def test_14_also_if_somebody_has_built_on_it_already() -> None:
    played = well(
        "plain; W=commit ab; V=commit abc",
        to("W", f"compare_and_swap {_MAIN}"), to("V", f"get {_MAIN}", times=2),
        through("W", f"compare_and_swap {_MAIN}", fault=Fault.LOSE_REPLY), all_of("V"), all_of("W"),
    )  # fmt: skip
    assert len(Soundness(played.before_quiet).history()) == 4
    assert all(isinstance(error, TransientStorageError) for error in played.errors.values())  # it cannot know


# --- 15: trouble on the way ----------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["commit ab", "commit x fresh", "commit bx,ab side", "branch new a"])
def test_15_a_collection_whose_listings_are_of_no_one_moment_concludes_nothing_false(other: str) -> None:
    for place in ("garbage", "double"):
        for played in at_every_request(f"{place} paged; W={other}; G0=gc repack", "G0", all_of("W"), rest=True):
            assert "G0" not in played.errors


def test_15_a_request_of_a_collection_that_fails_ends_it_and_the_next_one_goes_on() -> None:
    for played in at_every_request("garbage; W=commit ab; G0=gc repack; G1=gc", "G0", all_of("G0"), all_of("W"),
                                   all_of("G1"), fault=Fault.FAIL):  # fmt: skip
        assert set(played.errors) <= {"G0"}


# --- 20 and 21: names that look the same, indexes that are not ours --------------------------------------


def test_20_a_branch_that_was_deleted_and_made_again_with_the_same_commit_is_another_one() -> None:
    ours = "compare_and_swap refs/heads/old.ref"
    played = well(
        "plain; W=commit bc old; U=delete old; V=branch old b",
        to("W", ours), all_of("U"), all_of("V"), all_of("W"),
    )  # fmt: skip
    assert played.story.count(f"W: {ours}") == 2
    assert not played.errors


def test_20_also_with_a_collection_while_it_was_deleted() -> None:
    for played in at_every_request(
        "plain; W=commit bc old; U=delete old; G0=gc; V=branch old b", "W",
        all_of("U"), all_of("G0"), all_of("V"), rest=True,
    ):  # fmt: skip
        assert set(played.errors) <= {"V"}


@pytest.mark.parametrize("index", ["lost", "older", "of another repository"])
def test_21_an_index_that_is_lost_older_or_not_ours_misleads_no_commit_and_no_collection(index: str) -> None:
    with IndexPool() as pool, fixed_chance(index):
        ours, theirs = world("garbage"), world("tall")
        shelf = ours.shelf.copy()
        handle = ours.process(shelf, pool)
        commit(handle, "abx")
        collect_in_quiet(ours.process(shelf, pool))
        found = pool.copy(theirs if index == "of another repository" else ours)
        if index == "lost":
            empty(found)
        handle = RepositoryHandle(shelf, ours.config, found)
        commit(handle, "be", "fresh")
        collect_in_quiet(handle)
        soundness = Soundness(shelf)
        soundness.check()
        assert soundness.unreachable() == set()
        for digest in soundness.history():
            read_back(handle, digest)


# --- 24 to 26: ranks, rebuilding, packs that nobody knows --------------------------------------------------


@pytest.mark.parametrize("victim", ["W0", "W1"])
def test_24_a_rank_that_dies_in_a_common_commit_beside_a_collection_takes_nothing_with_it(victim: str) -> None:
    text = "garbage; W0=rank 0 2 abxy; W1=rank 1 2 abxy; V=commit bx fresh; G0=gc"
    for count in range(1, MOST_REQUESTS, EVERY):
        played = well(text, Together((victim, "W1" if victim == "W0" else "W0"), count), all_of("G0"), all_of("V"))
        assert set(played.errors) <= {"W0", "W1"}
        if played.results["W0"] is not None and played.results["W1"] is not None:
            return
    pytest.fail("the ranks do not end")


def test_24_ranks_commit_together_whenever_a_collection_comes() -> None:
    text = "garbage; W0=rank 0 2 abxy; W1=rank 1 2 abxy; G0=gc"
    for count in range(1, MOST_REQUESTS, EVERY):
        played = well(text, Together(("W0", "W1"), count), all_of("G0"), Together(("W0", "W1"), MOST_REQUESTS))
        assert not played.errors
        assert played.results["W0"] == played.results["W1"] is not None
        if played.turns[-1].actor == "G0":
            return
    pytest.fail("the ranks do not end")


def test_25_an_index_that_is_rebuilt_beside_a_commit_and_a_collection_misleads_nobody() -> None:
    text = "garbage shares_index; R=rebuild; W=commit abx,bx; G0=gc"
    for played in at_every_request(text, "R", all_of("W"), all_of("G0"), rest=True):
        assert set(played.errors) <= {"R"}
    for played in at_every_request(text, "W", all_of("R"), all_of("G0"), rest=True):
        assert not played.errors
    for _ in at_every_request(text, "G0", all_of("R"), all_of("W"), rest=True):
        pass


def test_26_packs_that_no_index_knows_are_spared_while_they_are_young() -> None:
    upload = _UPLOADED
    spared = well("garbage; W=commit x; G0=gc lazy", upload, all_of("G0"), all_of("W"))
    assert asked(spared, "commit packs/") == 1
    again = well("garbage; W=commit x; G0=gc", upload, all_of("G0"), all_of("W"))
    assert asked(again, "commit packs/") == 2
    assert not spared.errors and not again.errors
