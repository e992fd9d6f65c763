"""Commits and tags are signed and verified; branches that take signed commits only take no others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt import CommitOptions, ImportOptions, Repository, clock
from cas_ckpt.core.publish import publish_ref
from cas_ckpt.core.refs import RefKind, TagSignature, new_move
from cas_ckpt.core.signatures import SIGNERS_KEY, check_move, commit_signature, judge_commit, read_commit
from cas_ckpt.errors import CorruptionError, InvalidInputError, NotFoundError, SignatureError
from cas_ckpt.objects.digest import Digest, seal
from cas_ckpt.objects.nodes import commit_node, decode_commit, split_signature
from cas_ckpt.ops.refs import verify_revision
from cas_ckpt.repository.opened import Ranks
from cas_ckpt.signing import Verdict, as_trust
from tests.builders import commit
from tests.committing import TIMEOUT_S, new_store, on
from tests.effects import CrashNow, die_before
from tests.far import FarStore
from tests.signing.keys import key_file, public_line
from tests.thread_peers import run_ranks
from tests.wrapped_stores import FaultyStore

ANN, BOB = str(key_file("ed25519")), str(key_file("ecdsa256"))
BY_ANN, BY_BOB = [f"ann {public_line('ed25519')}"], [f"bob {public_line('ecdsa256')}"]


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": np.full(2000, float(value)), "step": 1}


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with Repository.init(tmp_path / "repo", group=None) as made:
        yield made


def digest_of(repo: Repository, ref: str = "main") -> Digest:
    return Digest(bytes.fromhex(repo.resolve(ref)))


def test_a_signature_changes_neither_root_nor_tensors(repo: Repository) -> None:
    plain = repo.commit(state())
    signed = repo.commit(state(), options=CommitOptions(sign=ANN))
    assert (signed.root, signed.stats.num_new_chunks) == (plain.root, 0)
    data = read_commit(repo._handle, digest_of(repo))
    message, blob = split_signature(data)
    assert blob is not None
    assert commit_node(replace(decode_commit(data), signature=None)).data == message
    assert split_signature(message) == (message, None)


def test_a_signed_commit_is_verified_by_those_who_trust_its_key(repo: Repository, tmp_path: Path) -> None:
    repo.commit(state(), message="unsigned")
    repo.commit(state(1), message="by ann", options=CommitOptions(sign=ANN))
    assert repo.verify(trust=BY_ANN).ok
    found = repo.verify("main~1", trust=BY_ANN)
    assert (found.ok, found.commits[0].signature.verdict) == (False, Verdict.UNSIGNED)
    found = repo.verify(trust=BY_BOB)
    assert (found.ok, found.commits[0].signature.verdict) == (False, Verdict.UNTRUSTED)
    found = repo.verify(trust=BY_ANN, history=True)
    assert [each.message for each in found.commits] == ["by ann", "unsigned"]
    assert [each.message for each in found.refused] == ["unsigned"]
    with pytest.raises(SignatureError, match="not signed"):
        found.require()
    revoked = tmp_path / "revoked"
    revoked.write_text(public_line())
    found = repo.verify(trust=BY_ANN, revoked=revoked)
    assert found.commits[0].signature.verdict is Verdict.REVOKED


def test_the_time_of_a_commit_decides_whether_its_key_was_valid(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    trust = [f'ann valid-before="20261123" {public_line()}']
    monkeypatch.setattr(clock, "now_s", lambda: 1_795_392_000.0)  # 2026-11-23, 00:00 UTC
    repo.commit(state(), options=CommitOptions(sign=ANN))
    assert repo.verify(trust=trust).ok
    monkeypatch.setattr(clock, "now_s", lambda: 1_795_392_001.0)
    repo.commit(state(), options=CommitOptions(sign=ANN))
    found = repo.verify(trust=trust).commits[0].signature
    assert (found.verdict, "key has expired" in found.reason) == (Verdict.EXPIRED, True)


@pytest.mark.parametrize("change", [
    {"message": "other"}, {"author": "bob"}, {"time_us": 1}, {"step": 7}, {"metrics": {"loss": 1.0}},
    {"root": Digest(bytes(32))}, {"parents": (Digest(bytes(32)),)}, {"stats": {}}, {"meta": b"\xc0"},
    {"provenance": b"\xc0"}, {"layout": Digest(bytes(32))},
])  # fmt: skip
def test_a_signature_on_another_commit_is_a_bad_one(repo: Repository, change: dict[str, Any]) -> None:
    repo.commit(state(), message="this", options=CommitOptions(sign=ANN))
    trust = as_trust(BY_ANN)
    data = read_commit(repo._handle, digest_of(repo))
    assert judge_commit(data, trust).is_good
    assert judge_commit(commit_node(replace(decode_commit(data), **change)).data, trust).verdict is Verdict.BAD


def test_a_commit_whose_signature_is_rubbish_is_read_and_badly_signed(repo: Repository) -> None:
    repo.commit(state(), options=CommitOptions(sign=ANN))
    commit = decode_commit(read_commit(repo._handle, digest_of(repo)))
    for blob in (b"rubbish", (commit.signature or b"")[:-1], (commit.signature or b"") * 2):
        made = commit_node(replace(commit, signature=blob)).data
        assert judge_commit(made, as_trust(BY_ANN)).verdict is Verdict.BAD
    for blob in (b"", bytes(20_000)):
        with pytest.raises(CorruptionError, match="signature"):
            decode_commit(commit_node(replace(commit, signature=blob)).data)


def test_a_commit_that_goes_on_top_of_another_after_all_is_signed_as_it_is(tmp_path: Path) -> None:
    store = new_store()
    slow, fast = on(store), on(store)
    commit(slow, {"a": np.zeros(3)}, sign=ANN)
    swap = slow.refs.swap
    moved = []

    def swap_late(*args: Any, **how: Any) -> Any:
        if not moved:
            moved.append(commit(fast, {"a": np.ones(3)}))
        return swap(*args, **how)

    slow.refs.swap = swap_late  # type: ignore[method-assign]
    made = commit(slow, {"a": np.full(3, 2.0)}, sign=ANN)
    assert made.parents == (moved[0].id,)
    assert commit_signature(slow, Digest(bytes.fromhex(made.id)), as_trust(BY_ANN)).is_good


def test_an_import_is_signed_too(repo: Repository, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.zeros(300)}, tmp_path / "m.safetensors")
    repo.import_file(tmp_path / "m.safetensors", options=ImportOptions(sign=ANN))
    assert repo.verify(trust=BY_ANN).ok


# --- tags -------------------------------------------------------------------------------------


def test_a_signed_tag_vouches_for_the_commit_that_it_names(repo: Repository) -> None:
    repo.commit(state())
    repo.tag("v1", message="as released", sign=ANN)
    report = repo.verify("v1", trust=BY_ANN)
    assert report.ok and report.tag is not None and report.tag.message == "as released"
    assert not repo.verify("main", trust=BY_ANN).ok
    assert not repo.verify("v1~0", trust=BY_ANN).ok  # no name of a tag, but of the commit that it leads to
    assert not repo.verify("v1", trust=BY_BOB).ok
    assert not repo.verify("v1", trust=BY_ANN, history=True).commits[0].signature.is_good
    assert np.array_equal(repo.load("v1", trust=BY_ANN)["w"], state()["w"])
    with pytest.raises(SignatureError):
        repo.load("main", trust=BY_ANN)


def test_a_tag_that_is_moved_renamed_or_given_another_message_loses_its_signature(repo: Repository) -> None:
    repo.commit(state())
    repo.tag("v1", message="one", sign=ANN)
    repo.delete_tag("v1")
    repo.undelete_tag("v1")
    assert repo.verify("v1", trust=BY_ANN).ok
    repo.gc(min_age_s=0)
    assert repo.verify("v1", trust=BY_ANN).ok
    repo.rename_tag("v1", "v2")
    assert repo.verify("v2", trust=BY_ANN).tag is None
    repo.tag("v2", message="one", force=True, sign=ANN)
    assert repo.verify("v2", trust=BY_ANN).ok
    repo.tag("v2", message="two", force=True)
    assert repo.verify("v2", trust=BY_ANN).tag is None


def test_a_signature_of_another_tag_commit_or_message_is_a_bad_one(repo: Repository) -> None:
    repo.commit(state())
    repo.tag("v1", message="one", sign=ANN)
    good = repo._handle.refs.get(RefKind.TAG, "v1").signature
    assert good is not None
    other = repo.commit(state(1))
    cases = [
        ("v2", "main~1", "one", good), ("v1", other.id, "one", good), ("v1", "main~1", "two", good),
        ("v1", "main~1", "one", TagSignature(good.time_us + 1, good.author, good.blob)),
        ("v1", "main~1", "one", TagSignature(good.time_us, "bob", good.blob)),
        ("v1", "main~1", "one", TagSignature(good.time_us, good.author, good.blob[:-1])),
    ]  # fmt: skip
    for name, revision, note, signature in cases:
        target = digest_of(repo, revision)
        move = new_move(None, target, "moved", "mallory")
        publish_ref(repo._handle, RefKind.TAG, name, target, move=move, force=True, note=note, signature=signature)
        found = repo.verify(name, trust=BY_ANN)
        assert (found.ok, found.tag and found.tag.signature.verdict) == (False, Verdict.BAD)


@pytest.mark.parametrize("asks", ["verify", "a branch that is moved"])
def test_commits_of_a_history_far_away_are_read_many_at_a_time(asks: str) -> None:
    store = new_store()
    repo = Repository(on(store))
    for step in range(6):
        repo.commit(state(step), options=CommitOptions(sign=ANN))
    repo.branch("old", start="main~5")
    repo.set_signers("old", BY_ANN)
    far = FarStore(store)
    handle = on(far, cache=None)
    handle.sync()
    second, met = threading.Event(), list[bool]()

    def meet(_: str, number: int) -> None:
        """The first read ends once another one has begun."""
        if number > 1:
            second.set()
        else:
            met.append(second.wait(5))

    far.reads.clear()
    far.before_read = meet
    if asks == "verify":
        assert verify_revision(handle, "main", as_trust(BY_ANN), history=True).ok
    else:
        old = repo._handle.refs.get(RefKind.BRANCH, "old")
        assert check_move(repo._handle, old, "old", digest_of(repo), source=handle)
    assert met == [True]


# --- what is restored -------------------------------------------------------------------------


def test_nothing_is_restored_that_nobody_trusted_signed(repo: Repository, tmp_path: Path) -> None:
    repo.commit(state(1))
    repo.commit(state(2), options=CommitOptions(sign=BOB))
    target = {"w": np.zeros(2000), "step": 0}
    for ref in ("main", "main~1"):
        for read in (
            lambda ref: repo.checkout(ref, into=target, trust=BY_ANN), lambda ref: repo.load(ref, trust=BY_ANN),
            lambda ref: repo.read(ref, "w", trust=BY_ANN),
            lambda ref: repo.export(ref, tmp_path / "out.safetensors", trust=BY_ANN),
        ):  # fmt: skip
            with pytest.raises(SignatureError, match="Nothing was read"):
                read(ref)
    assert not target["w"].any() and not (tmp_path / "out.safetensors").exists()
    repo.checkout("main", into=target, trust=BY_BOB)
    assert target["w"][0] == 2


def test_a_repository_that_is_opened_with_trust_reads_nothing_else(repo: Repository) -> None:
    repo.commit(state(1))
    repo.commit(state(2), options=CommitOptions(sign=ANN))
    with Repository.open(repo.url, trust=BY_ANN, group=None) as careful:
        assert careful.load()["w"][0] == 2
        with pytest.raises(SignatureError):
            careful.load("main~1")
        with pytest.raises(SignatureError):
            careful.load("main", trust=BY_BOB)  # what a call says goes before
    with pytest.raises(InvalidInputError):
        Repository.open(repo.url, trust=["nobody"], group=None)


# --- branches that take signed commits only -----------------------------------------------------


def test_a_branch_takes_only_what_its_signers_signed(repo: Repository) -> None:
    repo.commit(state(1))
    repo.set_signers("main", BY_ANN)
    for wrong in (None, BOB):
        with pytest.raises(SignatureError, match="takes signed commits only"):
            repo.commit(state(2), options=CommitOptions(sign=wrong))
    with pytest.raises(SignatureError):
        repo.load("main")  # its head is from before
    assert repo.load(repo.resolve("main"))["w"][0] == 1
    repo.commit(state(3), options=CommitOptions(sign=ANN))
    assert repo.load()["w"][0] == 3
    repo.commit(state(4), branch="other")  # any other branch takes any commit
    with pytest.raises(SignatureError):
        repo.branch("main", start="other", force=True)
    repo.clear_signers("main")
    repo.branch("main", start="other", force=True)
    assert repo.signers().branches == ()
    with pytest.raises(NotFoundError):
        repo.clear_signers("main")


def test_the_name_of_a_key_locks_no_branch(repo: Repository) -> None:
    for name in ("ssh-key-2023-05-01", "#1", "tab\tbed"):
        repo.set_signers("main", [f"{public_line()} {name}"])
        repo.commit(state(1), options=CommitOptions(sign=ANN))


def test_such_a_branch_is_not_read_while_its_head_is_not_signed(repo: Repository, tmp_path: Path) -> None:
    repo.commit(state(1))
    repo.commit(state(2))
    repo.set_signers("main", BY_ANN)
    target = {"w": np.zeros(2000), "step": 0}
    for read in (
        lambda: repo.checkout(into=target), lambda: repo.checkout("main", into=target), lambda: repo.load("main"),
        lambda: repo.read("main", "w"), lambda: repo.export("main", tmp_path / "out.safetensors"),
    ):  # fmt: skip
        with pytest.raises(SignatureError, match="Nothing was read"):
            read()
    assert not target["w"].any() and not (tmp_path / "out.safetensors").exists()
    repo.commit(state(3), options=CommitOptions(sign=ANN))
    repo.checkout("main", into=target)
    assert target["w"][0] == 3


def stored_packs(repo: Repository) -> dict[str, int]:
    return dict(repo._handle.store.list("packs/"))


@pytest.mark.parametrize("branch", ["main", "new"])
def test_a_commit_that_such_a_branch_would_not_take_is_refused_before_anything_is_written(
    repo: Repository, branch: str
) -> None:
    repo.commit(state(1))
    repo.set_signers("*", [*BY_ANN, f'bob valid-before="20200101" {public_line("ecdsa256")}'])
    packs = stored_packs(repo)
    for key, why in ((None, "not signed"), (key_file("rsa"), "of nobody who is trusted"), (BOB, "key has expired")):
        with pytest.raises(SignatureError, match=rf"{why}.*Nothing was written"):
            repo.commit(state(2), branch=branch, options=CommitOptions(sign=key))
    assert stored_packs(repo) == packs
    repo.commit(state(2), branch=branch, options=CommitOptions(sign=ANN))


def test_a_commit_that_was_begun_before_its_branch_took_signed_ones_only_is_refused_at_its_end(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = repo.commit(state(1)).id
    begin_writing = repo._handle.begin_writing

    def begin_late() -> Any:
        monkeypatch.undo()
        repo.set_signers("main", BY_ANN)
        return begin_writing()

    monkeypatch.setattr(repo._handle, "begin_writing", begin_late)
    with pytest.raises(SignatureError, match="not signed.*The branch was not moved"):
        repo.commit(state(2))
    assert repo.resolve("main") == head


def test_a_branch_that_is_begun_takes_what_its_pattern_says(repo: Repository) -> None:
    repo.commit(state(1))
    repo.set_signers("release/*", BY_ANN)
    with pytest.raises(SignatureError):
        repo.branch("release/1")
    with pytest.raises(SignatureError):
        repo.commit(state(2), branch="release/1")
    assert "release/1" not in repo.branches()
    repo.commit(state(2), branch="release/1", options=CommitOptions(sign=ANN))
    with pytest.raises(SignatureError):
        repo.commit(state(3), branch="release/1")
    repo.branch("plain", start="main")
    with pytest.raises(SignatureError):
        repo.rename_branch("plain", "release/2")
    assert "plain" in repo.branches()


def test_a_branch_moved_to_commits_of_others_is_looked_through(repo: Repository) -> None:
    """A signed head behind which there are commits that nobody signed."""
    repo.commit(state(1), options=CommitOptions(sign=ANN))
    repo.set_signers("main", BY_ANN)
    repo.commit(state(2), branch="work")
    repo.commit(state(3), branch="work", options=CommitOptions(sign=ANN))
    with pytest.raises(SignatureError, match="not signed"):
        repo.branch("main", start="work", force=True)


def test_the_first_pattern_counts_and_a_new_one_replaces_that_of_its_name(repo: Repository) -> None:
    repo.commit(state(1), options=CommitOptions(sign=ANN))
    repo.set_signers("ma*", BY_ANN)
    repo.set_signers("*", BY_BOB)
    repo.commit(state(2), options=CommitOptions(sign=ANN))
    repo.set_signers("ma*", [*BY_BOB, *BY_ANN])
    repo.commit(state(3), options=CommitOptions(sign=BOB))
    assert [each.pattern for each in repo.signers().branches] == ["ma*", "*"]
    for pattern in ("", "a\nb", "x" * 300):
        with pytest.raises(InvalidInputError):
            repo.set_signers(pattern, BY_ANN)


def test_a_process_that_opened_the_repository_before_obeys_too(repo: Repository) -> None:
    repo.commit(state(1))
    with Repository.open(repo.url, group=None) as other:
        repo.set_signers("main", BY_ANN)
        with pytest.raises(SignatureError):
            other.commit(state(2))
        other.commit(state(2), options=CommitOptions(sign=ANN))


def test_a_record_of_signers_that_is_damaged_or_lost_lets_nothing_through(repo: Repository) -> None:
    repo.commit(state(1))
    repo.set_signers("main", BY_ANN)
    store = repo._handle.store
    nonce = {"time_us": 1, "author": "x", "nonce": b"n"}
    for branches in ([["main", []]], [["main", ["x"]]], [[5, ["x"]]], "main", [["main", [5]]], [["main"]]):
        store.put(SIGNERS_KEY, seal("signers", 1, nonce | {"branches": branches}, key=SIGNERS_KEY))
        with pytest.raises(CorruptionError, match="signers"):
            repo.commit(state(2), options=CommitOptions(sign=ANN))
        assert repo.fsck().ok  # sealed, and its content is looked at when it is used
    store.put(SIGNERS_KEY, b"rubbish")
    with pytest.raises(CorruptionError):
        repo.commit(state(2), options=CommitOptions(sign=ANN))
    assert [problem.where for problem in repo.fsck().problems] == [SIGNERS_KEY]
    store.delete(SIGNERS_KEY)
    with pytest.raises(SignatureError, match="names nobody"):
        repo.commit(state(2), options=CommitOptions(sign=ANN))
    repo.set_signers("main", BY_ANN)
    repo.commit(state(2), options=CommitOptions(sign=ANN))


@pytest.mark.parametrize("dies_after", range(1, 4))
def test_dying_while_signers_are_set_leaves_a_branch_that_can_be_set_again(dies_after: int) -> None:
    store = new_store()
    repo = Repository(on(store))
    repo.commit(state(1))
    repo.branch("other")
    with pytest.raises(CrashNow):
        Repository(on(FaultyStore(store, die_before(dies_after)))).set_signers("*", BY_ANN)
    repo.set_signers("*", BY_ANN)
    for branch in ("main", "other"):
        with pytest.raises(SignatureError):
            repo.commit(state(2), branch=branch)


# --- ranks ------------------------------------------------------------------------------------


def test_rank_0_alone_needs_the_key() -> None:
    store = new_store()

    def work(peers: Any) -> Any:
        with Repository(on(store), Ranks(peers, TIMEOUT_S)) as repo:
            return repo.commit(state(1), options=CommitOptions(sign=ANN if peers.rank == 0 else None, author="one"))

    made = run_ranks(2, work, timeout_s=TIMEOUT_S)
    assert made[0] == made[1]
    with Repository(on(store)) as repo:
        assert repo.verify(trust=BY_ANN).ok


def test_a_key_that_rank_0_cannot_read_ends_the_commit_of_all(tmp_path: Path) -> None:
    store = new_store()

    def work(peers: Any) -> Any:
        with Repository(on(store), Ranks(peers, TIMEOUT_S)) as repo:
            return repo.commit(state(1), options=CommitOptions(sign=tmp_path / "none", author="one"))

    found = run_ranks(2, work, timeout_s=TIMEOUT_S, outcomes=True)
    assert all(isinstance(each, Exception) for each in found)
    assert "cannot be read" in str(found[0]) and "cannot be read" in str(found[1])


# --- other repositories -----------------------------------------------------------------------


def test_push_and_pull_move_such_a_branch_to_signed_commits_alone(repo: Repository, tmp_path: Path) -> None:
    repo.commit(state(1), options=CommitOptions(sign=ANN))
    there = Repository.clone(repo.url, tmp_path / "there")
    repo.set_signers("main", BY_ANN)
    there.commit(state(2))
    packs = len(list(Path(repo.url.removeprefix("file://")).glob("packs/*/*")))
    with pytest.raises(SignatureError, match="not signed"):
        there.push()
    assert len(list(Path(repo.url.removeprefix("file://")).glob("packs/*/*"))) == packs  # nothing was copied
    there.commit(state(3), options=CommitOptions(sign=ANN))
    with pytest.raises(SignatureError):  # the one before it is new there, too
        there.push()
    repo.clear_signers()
    there.push()
    there.set_signers("main", BY_ANN)
    repo.commit(state(4))
    head = there.resolve("main")
    for remote in ("origin", repo.url):
        with pytest.raises(SignatureError):
            there.pull(remote)
    assert there.resolve("main") == head
    assert there.remote_branches() == {"origin/main": repo.resolve("main")}  # fetched, for people to look at
    there.close()


def test_signed_commits_and_tags_stay_signed_on_their_way(repo: Repository, tmp_path: Path) -> None:
    repo.commit(state(1), options=CommitOptions(sign=ANN))
    repo.tag("v1", message="as released", sign=ANN)
    repo.tag("plain")
    with Repository.clone(repo.url, tmp_path / "there", tags=True) as there:
        assert there.verify("main", trust=BY_ANN).ok
        report = there.verify("v1", trust=BY_ANN)
        assert report.tag is not None and report.tag.signature.is_good
        there.tag("v2", message="next", sign=BOB)
        there.push(refs=["v2"])
        there.push(refs=["v2:v3"])
    assert repo.verify("v2", trust=BY_BOB).tag is not None
    assert repo.verify("v3", trust=BY_BOB).tag is None  # the signature is of the name v2


def test_what_came_by_fetch_or_in_a_bundle_is_read_only_if_somebody_trusted_signed_it(
    repo: Repository, tmp_path: Path
) -> None:
    repo.commit(state(1), options=CommitOptions(sign=ANN))
    repo.commit(state(2))
    repo.create_bundle(tmp_path / "one.bundle", ["main"])
    target = {"w": np.zeros(2000), "step": 0}
    with Repository.init(tmp_path / "there", group=None) as there:
        there.add_remote("origin", repo.url)
        there.fetch("origin")
        there.unbundle(tmp_path / "one.bundle", remote="usb")
        with Repository.open(there.url, trust=BY_ANN, group=None) as careful:
            for ref in ("origin/main", "usb/main"):
                for read in (
                    lambda ref: there.checkout(ref, into=target, trust=BY_ANN), lambda ref: careful.load(ref),
                    lambda ref: careful.checkout(ref, into=target), lambda ref: careful.read(ref, "w"),
                ):  # fmt: skip
                    with pytest.raises(SignatureError, match="Nothing was read"):
                        read(ref)
                assert not target["w"].any()
                assert careful.load(f"{ref}~1")["w"][0] == 1
                with pytest.raises(SignatureError):
                    careful.load(f"{ref}~1", trust=BY_BOB)


def test_a_bundle_moves_such_a_branch_to_signed_commits_alone(repo: Repository, tmp_path: Path) -> None:
    repo.commit(state(1), options=CommitOptions(sign=ANN))
    with Repository.clone(repo.url, tmp_path / "there") as there:
        assert there.signers().branches == ()  # whom to trust is for each to say
        there.set_signers("main", BY_ANN)
        head = there.resolve("main")
        repo.commit(state(2))
        repo.commit(state(3), options=CommitOptions(sign=ANN))
        repo.create_bundle(tmp_path / "bad.bundle", ["main"])
        packs = stored_packs(there)
        with pytest.raises(SignatureError, match="not signed"):
            there.unbundle(tmp_path / "bad.bundle")
        assert (there.resolve("main"), stored_packs(there)) == (head, packs)
        there.fetch("origin")  # remote-tracking branches take anything
        with pytest.raises(SignatureError):
            there.branch("main", start="origin/main", force=True)
        repo.branch("good", start="main~2")
        with Repository.open(repo.url, group=None) as fresh:
            fresh.commit(state(4), branch="good", options=CommitOptions(sign=ANN))
        repo.create_bundle(tmp_path / "good.bundle", ["good:main"])
        there.unbundle(tmp_path / "good.bundle")
        assert there.resolve("main") == repo.resolve("good")
        assert there.load()["w"][0] == 4
