"""Records, refs and the index: every flipped byte and every truncation is found, named and repaired."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from cas_ckpt import Policy, Repository
from cas_ckpt.core.config import read_config
from cas_ckpt.core.forgotten import read_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import GC_STATE_KEY, GcPhase, GcState, encode_gc_state, read_gc_state
from cas_ckpt.core.protocol import PREFIX as SESSIONS
from cas_ckpt.core.refs import Generation, RefKind
from cas_ckpt.core.tree import reachable
from cas_ckpt.errors import CorruptionError, NoRepositoryError, StorageError
from cas_ckpt.index import contents, history
from cas_ckpt.index.index import Index
from cas_ckpt.objects.digest import Digest, seal
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.fsck.records import check_records
from cas_ckpt.ops.fsck.repair import GENERATION_MARGIN, repair_open
from cas_ckpt.ops.fsck.report import Findings, FsckReport, Problem, ProblemKind, RepairRequest
from cas_ckpt.ops.refs import create_branch, create_tag, reflog
from cas_ckpt.ops.sync.fetch import FetchRequest, clone
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, new_repository, numbers
from tests.ops.fsck.fsck_cases import arrays, build, check, copy_of, flip, regions, repair, repair_as_told, states
from tests.signing.keys import key_file

DICE = random.Random(11)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fsck") / "repo"
    build(path)
    handle = RepositoryHandle.open(path)
    handle.store.put("policy", seal("policy", 1, {"nonce": b"x"}, key="policy"))
    for start in ("main~2", "main~1"):
        create_branch(handle, "old", start=start, force=True)
    handle.close()
    return path


@pytest.fixture
def repo(intact: Path, tmp_path: Path) -> Path:
    return copy_of(intact, tmp_path / "repo")


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_any(path: Path) -> None:
    flip(path, DICE.randrange(path.stat().st_size), bit=DICE.randrange(8))


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = [flip_any, cut_in_half, empty]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("config", ProblemKind.CONFIG),
        ("gc/state", ProblemKind.GC_STATE),
        ("refs/heads/main.ref", ProblemKind.REF),
        ("refs/heads/old.ref", ProblemKind.REF),
        ("refs/tags/v1.ref", ProblemKind.REF),
        ("forgotten/*", ProblemKind.RECORD),
        ("policy", ProblemKind.RECORD),
    ],
)
def test_a_damaged_record_is_found_and_repaired_from_a_copy(
    repo: Path, intact: Path, key: str, kind: ProblemKind, damage: Callable[[Path], None]
) -> None:
    path = next(repo.glob(key))
    damage(path)
    report = check(repo)
    assert [(p.kind, p.where) for p in report.problems] == [(kind, str(path.relative_to(repo)))]
    assert repair_as_told(repo, report, other=intact).ok
    assert check(repo).ok
    if kind is ProblemKind.CONFIG or kind is ProblemKind.RECORD:
        assert path.read_bytes() == (intact / path.relative_to(repo)).read_bytes()


def test_every_flipped_byte_of_a_ref_with_its_log_is_found(repo: Path) -> None:
    path = repo / "refs/heads/old.ref"
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        flip(path, at)
        assert [p.refs for p in check_records_only(repo)] == [("branch old",)], at
        path.write_bytes(whole)


def check_records_only(path: Path) -> list[Problem]:
    findings = Findings(FileStore(path))
    check_records(findings.store, findings)
    return list(findings.problems)


def test_a_repaired_ref_has_its_target_and_its_log_again(repo: Path, intact: Path) -> None:
    before = RepositoryHandle.open(intact).refs.get(RefKind.BRANCH, "old")
    flip(repo / "refs/heads/old.ref", 60)
    assert repair(repo, "refs", other=intact).ok
    handle = RepositoryHandle.open(repo)
    after = handle.refs.get(RefKind.BRANCH, "old")
    assert after.target == before.target
    assert after.log[: len(before.log)] == before.log
    assert "repaired" in after.log[-1].action
    assert reflog(handle, "old")


def test_a_ref_that_only_the_copy_has_is_brought_back(repo: Path, intact: Path) -> None:
    (repo / "refs/heads/old.ref").unlink()
    assert repair(repo, "refs", other=intact).ok
    target = RepositoryHandle.open(repo).refs.get(RefKind.BRANCH, "old").target
    assert target == RepositoryHandle.open(intact).refs.get(RefKind.BRANCH, "old").target


def test_without_a_copy_nothing_is_guessed_and_the_command_that_chooses_is_printed(repo: Path) -> None:
    head = RepositoryHandle.open(repo).refs.get(RefKind.BRANCH, "main").target
    assert head is not None
    flip(repo / "refs/heads/main.ref", 60)
    done = repair(repo, "refs")
    assert not done.actions
    assert head.hex()[:12] in done.left[0].what
    assert "--ref refs/heads/main=" in done.left[0].what
    assert repair(repo, "refs", refs={"main": head.hex()[:12]}).ok
    assert RepositoryHandle.open(repo).refs.get(RefKind.BRANCH, "main").target == head
    assert check(repo).ok


def test_a_ref_is_not_made_to_name_a_commit_that_is_not_whole(repo: Path, intact: Path) -> None:
    flip(repo / "refs/heads/main.ref", 60)
    for path in (repo / "packs").glob("*/*.data"):
        path.unlink()
    done = repair(repo, "refs", other=intact)
    assert not done.actions and "not whole" in done.left[0].what
    assert repair(repo, "chunks", "refs", other=intact).ok
    assert check(repo).ok


def test_the_config_of_another_repository_is_refused(repo: Path, tmp_path: Path) -> None:
    new_repository(tmp_path / "stranger").close()
    flip(repo / "config", 50)
    done = repair(repo, "config", other=tmp_path / "stranger")
    assert not done.ok and "another repository" in done.left[0].what


@pytest.mark.parametrize("lost_index", [False, True])
def test_a_lost_config_is_put_back_from_a_copy(repo: Path, intact: Path, lost_index: bool) -> None:
    (repo / "config").unlink()
    if lost_index:
        for path in (repo / "index").iterdir():
            path.unlink()
    report = check(repo)
    assert [problem.kind for problem in report.problems] == [ProblemKind.CONFIG]
    assert repair_as_told(repo, report, other=intact).ok
    assert read_config(RepositoryHandle.open(repo).store) == read_config(RepositoryHandle.open(intact).store)


def test_an_empty_folder_is_no_repository(tmp_path: Path) -> None:
    with pytest.raises(NoRepositoryError):
        check(tmp_path)


@pytest.mark.parametrize("damage", [*DAMAGES, Path.unlink])
def test_a_damaged_gc_state_is_made_anew_above_every_generation(repo: Path, damage: Callable[[Path], None]) -> None:
    handle = RepositoryHandle.open(repo)
    handle.store.put(GC_STATE_KEY, encode_gc_state(GcState(Generation(41))))
    writer = RepositoryHandle.open(repo)
    assert writer.begin_writing().number == 41
    damage(repo / "gc/state")
    report = check(repo)
    assert [problem.kind for problem in report.problems] == [ProblemKind.GC_STATE]
    assert repair_as_told(repo, report).ok
    state = read_gc_state(handle.store)
    assert (state.phase, state.condemned) == (GcPhase.IDLE, ())
    assert state.generation.number >= 41 + GENERATION_MARGIN
    assert commit(writer, states()[0]).stats.num_new_chunks == 0  # it noticed, looked again, and went on
    assert check(repo).ok


def test_gc_state_is_not_made_anew_while_the_index_cannot_say_what_it_has_seen(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = RepositoryHandle.open(repo)
    handle.index.set_generation(7 * GENERATION_MARGIN)  # refs have seen far less
    (repo / "gc/state").write_bytes(b"")

    def unreachable(index: Index) -> int:
        raise StorageError("the database does not answer")

    monkeypatch.setattr(Index, "generation", property(unreachable))
    with pytest.raises(StorageError, match="does not answer"):
        repair_open(handle, RepairRequest(frozenset({"state"})))
    assert (repo / "gc/state").read_bytes() == b""
    monkeypatch.undo()
    repair_open(handle, RepairRequest(frozenset({"state"})))
    assert read_gc_state(handle.store).generation.number > 7 * GENERATION_MARGIN


def odd(report: FsckReport) -> list[str]:
    """Where there are notes, but for the one on the forgotten commit's data, which nobody needs."""
    return sorted(note.where for note in report.notes if "hold nothing that a commit needs" not in note.what)


def test_a_damaged_session_is_no_damage(repo: Path) -> None:
    (repo / "sessions").mkdir(exist_ok=True)
    (repo / SESSIONS / "0123").write_bytes(b"CASCKREC nonsense")
    report = check(repo)
    assert report.ok
    assert odd(report) == [SESSIONS + "0123"]


def test_unknown_files_are_notes(repo: Path) -> None:
    (repo / "README.txt").write_text("mine")
    (repo / "packs" / "notes.txt").write_text("mine")
    (repo / "refs" / "heads" / "notes").write_text("mine")
    report = check(repo)
    assert report.ok
    assert odd(report) == ["README.txt", "packs/notes.txt", "refs/heads/notes"]


def test_a_condemned_pack_is_told_and_is_no_damage(repo: Path) -> None:
    handle = RepositoryHandle.open(repo)
    key = next(key for key, _ in handle.store.list("packs/"))
    handle.store.put(GC_STATE_KEY, encode_gc_state(GcState(Generation(1), "condemned", (key,))))
    report = check(repo)
    assert report.ok
    assert odd(report) == sorted([GC_STATE_KEY, key])


def test_repair_of_packs_gives_up_a_collection_that_only_condemned(repo: Path, intact: Path) -> None:
    handle = RepositoryHandle.open(repo)
    keys = [key for key, _ in handle.store.list("packs/")]
    handle.store.put(GC_STATE_KEY, encode_gc_state(GcState(Generation(1), "condemned", (keys[0],))))
    flip(repo / keys[1], 70)
    assert repair(repo, "chunks", other=intact, read_data=True).ok
    assert (repo / keys[0]).exists() and not (repo / keys[1]).exists()
    assert read_gc_state(handle.store).phase == GcPhase.IDLE and check(repo).ok


# --- the index ---------------------------------------------------------------------------


def index_file(path: Path) -> Path:
    return path / "index" / "index.sqlite"


def test_flipped_pages_of_the_index_are_found_or_do_not_matter_and_are_repaired(repo: Path, intact: Path) -> None:
    whole = index_file(repo).read_bytes()
    ids = sorted(RepositoryHandle.open(intact).index.read(history.read_links))
    found = 0
    for at in sorted(DICE.sample(range(100, len(whole)), 25)):
        flip(index_file(repo), at)
        report = check(repo)
        assert {problem.kind for problem in report.problems} <= {ProblemKind.INDEX}, at
        found += not report.ok
        assert repair(repo, "index").ok
        assert check(repo).ok, at
        assert sorted(RepositoryHandle.open(repo).index.read(history.read_links)) == ids
        copy_of(intact, repo)
    assert found >= 5


def test_a_damaged_page_of_what_the_index_remembers_of_refs_is_reported_and_repaired(repo: Path) -> None:
    with sqlite3.connect(index_file(repo)) as raw:
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        page_bytes = raw.execute("PRAGMA page_size").fetchone()[0]
        root = raw.execute("SELECT rootpage FROM sqlite_master WHERE type = 'table' AND name = 't_refs'").fetchone()[0]
    raw.close()
    flip(index_file(repo), (root - 1) * page_bytes)  # the kind of the page
    report = check(repo)
    assert [problem.kind for problem in report.problems] == [ProblemKind.INDEX]
    assert repair(repo, "index").ok
    assert check(repo).ok


def test_the_index_of_another_repository_is_reported_and_a_new_one_takes_nothing_over(
    repo: Path, tmp_path: Path
) -> None:
    other = new_repository(tmp_path / "other")
    commit(other, {"w": numbers(10, 10)}, branch="theirs")
    other.close()
    index_file(repo).write_bytes(index_file(tmp_path / "other").read_bytes())
    report = check(repo)
    assert [problem.kind for problem in report.problems] == [ProblemKind.INDEX]
    assert repair_as_told(repo, report).ok
    assert check(repo).ok


def test_a_name_that_no_ref_can_have_in_the_index_is_reported_and_repaired(repo: Path) -> None:
    with sqlite3.connect(index_file(repo)) as raw:
        raw.execute("UPDATE t_refs SET name = replace(name, 'heads', '`eads')")
    raw.close()
    report = check(repo)
    assert [problem.kind for problem in report.problems] == [ProblemKind.INDEX]
    assert repair(repo, "index").ok
    assert check(repo).ok


@pytest.mark.parametrize("name", [b"num_replicas", b"num_chunks,\n    (SELECT"])
def test_a_damaged_name_of_a_column_of_a_table_or_view_is_reported_and_repaired(repo: Path, name: bytes) -> None:
    flip(index_file(repo), index_file(repo).read_bytes().index(name))
    report = check(repo)
    assert [problem.kind for problem in report.problems] == [ProblemKind.INDEX]
    assert repair(repo, "index").ok
    assert check(repo).ok


@pytest.mark.parametrize("damage", [cut_in_half, lambda path: path.write_bytes(b"no database at all" * 100)])
def test_an_index_that_cannot_be_opened_hides_no_other_damage(
    repo: Path, intact: Path, damage: Callable[[Path], None]
) -> None:
    damage(index_file(repo))
    data = max((repo / "packs").glob("*/*.data"), key=lambda one: one.stat().st_size)
    flip(data, 70)
    report = check(repo)
    assert {problem.kind for problem in report.problems} == {ProblemKind.INDEX, ProblemKind.ENTRIES}
    assert all(problem.hits for problem in report.problems if problem.kind is ProblemKind.ENTRIES)
    assert repair_as_told(repo, report, other=intact).ok
    assert check(repo).ok


def test_rows_that_say_other_things_than_the_packs_are_found_and_put_right(repo: Path) -> None:
    statements = [
        'UPDATE t_locations SET "offset" = "offset" + 1 WHERE object_id = (SELECT max(object_id) FROM t_locations)',
        "DELETE FROM t_locations WHERE object_id = (SELECT max(object_id) FROM t_locations)",
        "DELETE FROM t_edges WHERE parent_id = (SELECT max(parent_id) FROM t_edges)",
        "INSERT INTO t_edges SELECT max(parent_id), (SELECT min(object_id) FROM t_objects WHERE object_id NOT IN "
        "(SELECT child_id FROM t_edges WHERE parent_id = (SELECT max(parent_id) FROM t_edges))) FROM t_edges",
        "UPDATE t_commits SET message = 'another'",
        "DELETE FROM t_commits WHERE object_id = (SELECT max(object_id) FROM t_commits)",
        "UPDATE t_packs SET num_entries = num_entries + 1",
        "UPDATE t_entries SET name = 'another' WHERE node_id = (SELECT max(node_id) FROM t_entries) AND position = 0",
        "DELETE FROM t_entries WHERE node_id = (SELECT min(node_id) FROM t_entries)",
        "INSERT INTO t_entries SELECT node_id, 200, 'more', form, spec_id, child_id, data FROM t_entries LIMIT 1",
        "UPDATE t_trees SET kind = 'list'",
        "DELETE FROM t_node_specs",
        "UPDATE t_node_specs SET num_entries = num_entries + 1",
        "UPDATE t_tensors SET cell = '[1]'",
        "UPDATE t_specs SET dtype = 'float16'",
        "DELETE FROM t_specs",
        "DELETE FROM t_layouts",
        "UPDATE t_layouts SET world_size = 7",
        "INSERT INTO t_metrics VALUES (987654, 'loss', 1.0)",  # of no commit
    ]
    for statement in statements:
        connection = sqlite3.connect(index_file(repo))
        with connection:
            assert connection.execute(statement).rowcount
        connection.close()
        report = check(repo)
        assert [problem.kind for problem in report.problems] == [ProblemKind.INDEX], statement
        assert repair_as_told(repo, report).ok
        assert check(repo).problems == (), statement


def test_an_index_that_lags_behind_is_no_damage(repo: Path, intact: Path) -> None:
    handle = RepositoryHandle.open(repo)
    info = commit(handle, {"w": numbers(90, 90, seed=77)})
    handle.close()
    index_file(repo).write_bytes(index_file(intact).read_bytes())
    report = check(repo)
    assert report.ok and "were not in it yet" in report.notes[0].what
    assert odd(check(repo)) == []
    assert arrays(repo, [info.id])


def test_of_a_damaged_pack_that_an_index_does_not_know_it_takes_nothing_in_before_the_pack_is_whole_again(
    repo: Path, intact: Path
) -> None:
    known = {pack.name for pack in (repo / "packs").glob("*/*.meta")}
    handle = RepositoryHandle.open(repo)
    info = commit(handle, {"w": numbers(90, 90, seed=77)})
    handle.close()
    index_file(repo).write_bytes(index_file(intact).read_bytes())
    new = next(one for one in regions(repo) if one.name == "commit payload" and one.pack.name not in known)
    whole = (repo / new.pack).read_bytes()
    flip(repo / new.pack, new.start + 20)
    assert not check(repo).ok
    (repo / new.pack).write_bytes(whole)
    with closing(RepositoryHandle.open(repo)) as again:
        again.sync()
        assert info.id in {digest.hex() for digest in again.index.read(history.read_links)}
    assert check(repo).ok


def test_an_open_repository_is_checked_and_repaired_in_place(repo: Path, intact: Path) -> None:
    handle = RepositoryHandle.open(repo)
    meta = next((repo / "packs").glob("*/*.meta"))
    flip(meta, 70)
    report = check_open(handle)
    assert not report.ok
    kinds = frozenset({"chunks", "index"})
    assert repair_open(handle, RepairRequest(kinds, (str(intact),))).ok
    assert check_open(handle).ok
    assert (
        handle.index.read(history.read_links).keys()
        == RepositoryHandle.open(intact).index.read(history.read_links).keys()
    )


def test_a_forgotten_commit_may_have_lost_its_data_but_not_its_record(repo: Path, intact: Path) -> None:
    handle = RepositoryHandle.open(repo)
    (gone,) = read_forgotten(handle.store)
    row = handle.index.read(history.read_commit, gone)
    assert row is not None
    located = handle.index.read(contents.locate, reachable(handle, Digest(row.root)))
    packs = {place.pack for places in located.values() for place in places}
    handle.close()
    held = {key for key in packs if key.endswith(".meta")}  # the commit's record stands there too
    for key in packs - held:
        (repo / key).unlink()
    assert check(repo).ok
    (repo / held.pop()).unlink()
    report = check(repo)
    assert [(hit.commit, hit.keys) for p in report.problems for hit in p.hits] == [(gone.hex(), ("(commit)",))]
    assert repair_as_told(repo, report, other=intact).ok
    assert check(repo).ok


@pytest.mark.parametrize("lost", ["one", "all"])
def test_a_clone_says_what_branches_named_when_it_last_fetched(repo: Path, tmp_path: Path, lost: str) -> None:
    handle = RepositoryHandle.open(repo)
    create_tag(handle, "said", message="the one of the paper", sign=str(key_file()))
    heads = {ref.name: ref.target for ref in handle.refs.list(RefKind.BRANCH)}
    tags = {ref.name: (ref.target, ref.note, ref.signature) for ref in handle.refs.list(RefKind.TAG)}
    handle.close()
    made, _ = clone(repo, tmp_path / "clone", FetchRequest())
    create_tag(made, "mine")  # of a commit that is here, too
    commit(made, {"own": numbers(4, 4)})  # the clone went on
    made.close()
    flip(repo / "refs/heads/main.ref", 60)
    (repo / "refs/heads/old.ref").unlink()
    (repo / "refs/tags/said.ref").unlink()
    if lost == "all":
        for place in ("refs", "names", "index"):
            shutil.rmtree(repo / place)
    assert repair(repo, "refs", other=tmp_path / "clone").ok
    handle = RepositoryHandle.open(repo)
    assert {ref.name: ref.target for ref in handle.refs.list(RefKind.BRANCH)} == heads
    assert {ref.name: (ref.target, ref.note, ref.signature) for ref in handle.refs.list(RefKind.TAG)} == tags
    handle.close()
    assert check(repo).ok


def test_the_policy_of_a_clone_is_not_taken_for_that_of_the_repository(repo: Path, tmp_path: Path) -> None:
    with Repository.clone(repo, tmp_path / "clone") as made:
        made.set_policy(Policy(keep_last=1))
    flip(repo / "policy", 60)
    report = repair(repo, "records", other=tmp_path / "clone")
    assert [(one.where, "a clone is none" in one.what) for one in report.left] == [("policy", True)]


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("refs/heads/main.ref", "folder"), ("refs/heads/main.ref", "link"), ("refs/heads/main.ref", "loop"),
        ("gc/state", "folder"), ("gc/state", "link"), ("config", "folder"), ("config", "link"),
        ("index/index.sqlite-wal", "folder"), ("policy", "folder"), ("policy", "link"), ("settings", "folder"),
        ("settings", "loop"), ("signers", "link"), ("tiers", "folder"),
    ],
)  # fmt: skip
def test_the_printed_repair_moves_away_what_is_no_file(
    repo: Path, intact: Path, tmp_path: Path, where: str, what: str
) -> None:
    (repo / where).unlink(missing_ok=True)
    if what != "folder":
        (repo / where).symlink_to((intact if what == "link" else repo) / where)
    else:
        (repo / where).mkdir()
        (repo / where / "file").write_bytes(b"own")
    report = check(repo)
    assert report.commands
    assert repair_as_told(repo, report, other=intact).ok
    assert check(repo).ok
    assert (repo / "damaged" / where).is_symlink() or (repo / "damaged" / where).is_dir()
    assert (repo / "policy").read_bytes() == (intact / "policy").read_bytes()


def test_a_write_of_a_record_says_that_a_folder_or_a_link_is_in_its_place(repo: Path, tmp_path: Path) -> None:
    (repo / "policy").unlink()
    (repo / "policy").mkdir()
    (repo / "settings").symlink_to(tmp_path)
    with Repository.open(repo) as opened:
        for write in (lambda: opened.set_policy(Policy(keep_last=1)), lambda: opened.add_remote("a", tmp_path)):
            with pytest.raises(CorruptionError, match=r"a folder or a link is in its place: .*fsck"):
                write()
