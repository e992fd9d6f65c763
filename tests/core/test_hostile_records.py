"""Records of a repository that somebody made who means harm: too long, too many, or small and costly to decode."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from cas_ckpt import Repository
from cas_ckpt.core import forgotten, protocol, ref_store
from cas_ckpt.core.config import CONFIG_KEY
from cas_ckpt.core.forgotten import merge_forgotten, read_forgotten, write_forgotten, write_released
from cas_ckpt.core.protocol import GC_STATE_KEY
from cas_ckpt.core.ref_store import RefStore
from cas_ckpt.core.refs import MAX_LOG, Generation, Move, RefKind, ref_key
from cas_ckpt.core.settings import SETTINGS_KEY
from cas_ckpt.errors import CkptError, CorruptionError, TooLargeError
from cas_ckpt.memory import limits
from cas_ckpt.objects import digest as digests
from cas_ckpt.objects.digest import MAGIC, Digest, object_id, pack_canonical, seal, unpack_canonical, unseal
from cas_ckpt.storage import store as stores
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import MOST_VALUE_BYTES
from tests.builders import commit, new_repository, numbers
from tests.remote_store import RemoteStore

pytestmark = pytest.mark.slow

FORGOTTEN_KEY = f"{forgotten.PREFIX}{'a' * 32}"
MAIN_KEY = ref_key(RefKind.BRANCH, "main")
READS_FORGOTTEN = ("log", "fetch", "clone", "push", "gc")

READ_BY = {
    CONFIG_KEY: ("open", "log", "fetch", "clone", "push", "gc"),
    MAIN_KEY: ("log", "fetch", "clone", "push", "gc"),
    GC_STATE_KEY: ("push", "gc"),
    FORGOTTEN_KEY: READS_FORGOTTEN,
}
"""Record -> the verbs that need it of the repository."""


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A repository that somebody has made."""
    with Repository.init(tmp_path / "there", group=None) as repo:
        commit(repo._handle, {"w": numbers(10)})
    return tmp_path / "there"


def verbs(there: Path) -> dict[str, Callable[[], object]]:
    """What people do with it."""
    here = there.parent / "here"
    if not here.exists():
        with Repository.init(here, group=None) as repo:
            commit(repo._handle, {"w": numbers(10, seed=1)})
            repo.add_remote("origin", there)

    def opened(path: Path, verb: Callable[[Repository], object]) -> Callable[[], object]:
        def run() -> object:
            with Repository.open(path, group=None) as repo:
                return verb(repo)

        return run

    return {
        "open": opened(there, lambda repo: None),
        "log": opened(there, lambda repo: repo.log()),
        "gc": opened(there, lambda repo: repo.gc()),
        "fetch": opened(here, lambda repo: repo.fetch()),
        "push": opened(here, lambda repo: repo.push("origin", ["main:other"])),
        "clone": lambda: Repository.clone(there, there.parent / "clone").close(),
    }


def peak_of(call: Callable[[], object]) -> tuple[int, CkptError | None]:
    """Bytes that a call took at its peak, and the error that it raised."""
    tracemalloc.start()
    try:
        call()
    except CkptError as error:
        return tracemalloc.get_traced_memory()[1], error
    else:
        return tracemalloc.get_traced_memory()[1], None
    finally:
        tracemalloc.stop()


def bomb(kind: str, key: str, size: int, *, item: bytes = b"\x80") -> bytes:
    """A record with an intact seal, of items that each take as much memory as can be had for a byte."""
    number = size // len(item)
    body = msgpack.packb([kind, 1, key])[1:] + b"\x81" + msgpack.packb("x") + b"\xdd" + number.to_bytes(4, "big")
    body = b"\x94" + body + item * number
    return MAGIC + object_id(f"record {kind}", body) + body


@pytest.mark.parametrize(("key", "verb"), [(key, verb) for key, verbs in READ_BY.items() for verb in verbs])
def test_a_record_longer_than_any_is_refused_before_memory_is_taken(
    there: Path, key: str, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = verbs(there)[verb]
    path = there / key
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    peak, error = peak_of(run)
    if key == FORGOTTEN_KEY and verb != "push":  # who needs no more than what is readable goes on
        assert error is None and key in caplog.text
    else:
        assert isinstance(error, CorruptionError) and key in str(error)
    assert peak < 32 << 20


@pytest.mark.parametrize("item", [b"\x80", b"\x91\xc0", b"\xa2ab", b"\xcb" + bytes(8), b"\xd4\x01x"], ids=bytes.hex)
def test_a_record_takes_little_memory_whatever_is_in_it(item: bytes) -> None:
    for size in (digests.most_bytes("ref") - 200, digests.most_bytes("ref") + 1):
        record = bomb("ref", "key", size, item=item)
        peak, error = peak_of(lambda record=record: unseal("ref", record, version=1, key="key"))  # type: ignore[misc]
        assert isinstance(error, CorruptionError)
        assert peak < 36 * digests.most_bytes("ref")  # the ExtType of three bytes: 34 on Python 3.14, else 31


def test_bytes_that_unfold_into_millions_of_maps_are_refused_before_there_are_so_many() -> None:
    number = 100_000
    data = b"\xdd" + number.to_bytes(4, "big") + b"\x80" * number
    with pytest.raises(CorruptionError, match="too many"):
        unpack_canonical(data)
    pairs = [[number, number + 1] for number in range(50_000)]
    assert unpack_canonical(pack_canonical(pairs)) == pairs


def test_a_writer_makes_no_record_that_readers_refuse() -> None:
    with pytest.raises(TooLargeError, match="refs/heads/x: a ref record of"):
        seal("ref", 1, {"target": bytes(1 << 20)}, key="refs/heads/x")


def test_a_store_answers_no_longer_value_than_any_record_has() -> None:
    assert max(digests.most_bytes(kind) for kind in digests.FIELDS) <= MOST_VALUE_BYTES
    store = MemoryStore()
    store.put("packs/a", bytes(MOST_VALUE_BYTES + 1))
    with pytest.raises(CorruptionError, match="packs/a"):
        store.get("packs/a")
    assert store.get_tail("packs/a", 5) == (MOST_VALUE_BYTES + 1, bytes(5))


class Endless(MemoryStore):
    """A store whose listing below a prefix does not end."""

    def __init__(self, inner: MemoryStore, prefix: str, suffix: str) -> None:
        super().__init__()
        self._values = inner._values
        self._prefix, self._suffix = prefix, suffix

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        if not self._prefix.startswith(prefix) and not prefix.startswith(self._prefix):
            yield from super().list(prefix)
            return
        for number in range(10**9):
            yield f"{self._prefix}{number:032x}{self._suffix}", 100


@pytest.mark.parametrize(
    "key",
    [
        "forgotten/zz", "forgotten/a/b", "released/zz", "names/zz", "names/heads/zz", "names/zz.ref", "sessions/zz",
        "refs/zz", "refs/heads/zz", "refs/odd/zz.ref", "packs/zz", "packs/ab/zz.data", "gc/zz", "zz", "tmp-zz",
    ],
)  # fmt: skip
def test_a_file_with_a_name_that_nothing_of_ours_has_stops_no_verb_and_is_reported(tmp_path: Path, key: str) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        first = repo.commit({"x": 1})
        FileStore(tmp_path / "repo").put(key, b"odd!")
    with Repository.open(tmp_path / "repo") as repo:
        assert [commit.id for commit in repo.log()] == [first.id]
        assert repo.commit({"x": 2}).parents == (first.id,)
        repo.gc()
        assert repo.du() and repo.stats() and repo.load() == {"x": 2}
        Repository.clone(tmp_path / "repo", tmp_path / "clone").close()
        found = repo.fsck()
    expected = [] if key.startswith("sessions/") else [key]  # which gc deletes
    assert found.ok and [note.where for note in found.notes] == expected


def test_a_damaged_record_of_forgotten_commits_stops_no_look_and_no_collection_and_all_is_kept(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        ids = [repo.commit({"x": numbers(300, 300, seed=at)}).id for at in range(3)]
        assert repo.forget(revisions=[ids[0]]).forgotten == (ids[0],)
        (record,) = (tmp_path / "repo" / "forgotten").iterdir()
        repo.forget(revisions=[ids[1]])
        record.write_bytes(b"damaged!")
    with Repository.open(tmp_path / "repo") as repo:
        assert [commit.forgotten for commit in repo.log()] == [False, True, False]
        assert repo.commit({"x": 3}).parents == (ids[2],)
        repo.gc(min_age_s=0)
        assert record.exists() and (repo.load(ids[0])["x"] == numbers(300, 300, seed=0)).all()
        assert repo.du() and repo.stats() and repo.status().num_forgotten == 1
        Repository.clone(tmp_path / "repo", tmp_path / "clone").close()
        for asked in (lambda: repo.branch("back", start=ids[0]), lambda: repo.fetch(tmp_path / "clone")):
            with pytest.raises(CorruptionError, match=record.name):  # else a copy of the record would forget it again
                asked()
        found = repo.fsck()
        assert [problem.where for problem in found.problems] == [f"forgotten/{record.name}"]
        (left,) = repo.repair("records").left  # with no copy of it; what this says can be done
        assert left.what.endswith("forget the same commits again (cas-ckpt forget), then delete this file")
        assert repo.forget(revisions=[ids[0]]).forgotten == (ids[0],)
        record.unlink()
        assert repo.fsck().ok and [commit.forgotten for commit in repo.log()] == [False, False, True, True]
        for record in (tmp_path / "repo" / "forgotten").iterdir():
            record.write_bytes(b"damaged!")
        with pytest.raises(CorruptionError, match="or forget the commit"):  # its data was collected above
            repo.gc(min_age_s=0)
        repo.forget(revisions=ids[:2])
        repo.gc(min_age_s=0)
        assert repo.load() == {"x": 3}


@pytest.mark.parametrize(
    ("prefix", "suffix", "read"),
    [
        (forgotten.PREFIX, "", read_forgotten),
        (forgotten.RELEASED_PREFIX, "", forgotten.read_released),
        (protocol.PREFIX, "", protocol.live_sessions),
        ("names/heads/", ".ref", lambda store: RefStore(store).announced()),
        ("refs/heads/", ".ref", lambda store: list(RefStore(store).list())),
    ],
    ids=["forgotten", "released", "sessions", "names", "refs"],
)
def test_a_listing_of_records_that_does_not_end_is_given_up(
    prefix: str, suffix: str, read: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "MOST_KEYS", 1000)
    store = Endless(MemoryStore(), prefix, suffix)
    placeholder = RefStore(MemoryStore())
    monkeypatch.setattr(RefStore, "get", lambda self, kind, name: made)
    made = placeholder.create_placeholder(RefKind.BRANCH, "x")
    with limits(max_refs=1000), pytest.raises(TooLargeError, match="more than [14]000"):
        read(store)


def test_refs_that_are_large_together_are_refused(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ref_store, "REF_BYTES", 100)
    with Repository.open(there, group=None) as repo:
        for number in range(10):
            repo.tag(f"t{number}", "main")
        with limits(max_refs=10), pytest.raises(TooLargeError, match="more than"):
            list(repo._handle.refs.list())


def busy(store: MemoryStore, number: int) -> None:
    """A branch with a log as full as it gets."""
    held, target = RefStore(store), ids(2)[1]
    ref = held.create_placeholder(RefKind.BRANCH, f"research/{number:05}-learning-rate-0.0003-batch-4096")
    at_us, author = 1_790_000_000_000_000, "ann@node-17.cluster.example.com"
    moves = [Move(at_us + at, target, target, "branch: set to main~12", author) for at in range(MAX_LOG)]
    for move in moves[:-1]:
        ref = replace(ref, log=(*ref.log, move))
    held.swap(ref, target, generation=Generation(), move=moves[-1])


def test_as_many_refs_as_are_allowed_may_all_have_full_logs() -> None:
    store = MemoryStore()
    for number in range(50):
        busy(store, number)
    with limits(max_refs=50):
        assert len(list(RefStore(store).every())) == len(list(RefStore(store).list())) == 50
    with limits(max_refs=49), pytest.raises(TooLargeError, match="max_refs"):
        list(RefStore(store).list())
    assert max(size for _, size in store.list("refs/")) < ref_store.REF_BYTES / 1.5


@pytest.mark.parametrize("far", [False, True], ids=["local", "far"])
def test_as_many_refs_of_each_kind_are_allowed_wherever_the_store_is(
    far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, kinds = MemoryStore(), (RefKind.BRANCH, RefKind.TAG)
    for kind in kinds:
        for number in range(40):
            held = RefStore(store)
            held.swap(held.create_placeholder(kind, f"{kind.label}-{number}"), ids(2)[1], generation=Generation())
    seen = RemoteStore(store) if far else store
    monkeypatch.setattr(ref_store, "REF_BYTES", max(size for _, size in store.list("refs/")))
    with limits(max_refs=40):
        assert len(list(RefStore(seen).list())) == 2 * len(list(RefStore(seen).list(RefKind.TAG))) == 80
        assert RefStore(seen).seen(kinds, "tag-7")
    for kind in kinds:
        with limits(max_refs=39), pytest.raises(TooLargeError, match="more than 39 refs of one kind"):
            list(RefStore(seen).list(kind))
    monkeypatch.setattr(ref_store, "REF_BYTES", 20)
    with limits(max_refs=40), pytest.raises(TooLargeError, match="MiB"):
        list(RefStore(seen).list(RefKind.TAG))


def test_files_beside_refs_of_a_store_far_away_do_not_fill_memory_either() -> None:
    store = MemoryStore()
    for number in range(60):
        store.put(f"refs/odd/{number}.ref", b"x")
    with limits(max_refs=50), pytest.raises(TooLargeError, match="more than 50"):
        list(RefStore(RemoteStore(store)).list())


def test_who_only_looks_at_refs_holds_neither_their_logs_nor_their_records() -> None:
    store = MemoryStore()
    for number in range(300):
        busy(store, number)
    held = sum(size for _, size in store.list("refs/"))
    for seen in (RemoteStore(store), store):
        looks = RefStore(seen, num_requests=4 if seen is not store else 1)
        tracemalloc.start()
        found = list(looks.list())
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(found) == 300 and found[0].target == ids(2)[1]
        assert taken < (held / 4 if seen is store else 1.5 * held)  # of a store far away records are remembered


def test_no_more_records_of_a_store_far_away_are_remembered_than_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    for number in range(30):
        busy(store, number)
    record = max(size for _, size in store.list("refs/"))
    monkeypatch.setattr(ref_store, "KNOWN_BYTES", 10 * record)
    monkeypatch.setattr(ref_store, "REFS_AT_ONCE", 3)
    far = RemoteStore(store)
    looks = RefStore(far)
    for _ in range(2):
        assert len(list(looks.list())) == 30
    assert 40 < far.asked["get"] <= 60 and len(looks._remembered()) <= 10


def test_commits_that_were_forgotten_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgotten, "MOST_IDS", 50)
    store = MemoryStore()
    write_forgotten(store, ids(40), author="me")
    assert len(read_forgotten(store)) == 40
    write_forgotten(store, ids(40), author="me")
    write_released(store, ids(60))
    for read in (read_forgotten, forgotten.read_released):
        with pytest.raises(TooLargeError, match="more than 50"):
            read(store)


def ids(number: int) -> list[Digest]:
    return [Digest(number.to_bytes(32, "big")) for number in range(number)]


def test_many_forgotten_commits_are_written_in_records_that_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgotten, "MOST_NAMED", 10)
    store = MemoryStore()
    assert len(write_forgotten(store, ids(95), author="me")) == 10
    assert len(write_released(store, ids(25))) == 3
    assert read_forgotten(store) == frozenset(ids(95))
    for _ in range(2):
        write_forgotten(store, ids(50), author="me")
    assert merge_forgotten(store, known=lambda: ids(95), author="me") == 20
    assert read_forgotten(store) == frozenset(ids(95))
    assert len(list(store.list(forgotten.PREFIX))) == 10


@pytest.mark.parametrize(
    "move",
    [[0, None, None, "x"], ["0", None, None, "x", "y"], [0, b"1", None, "x", "y"], [0, None, None, 5, "y"]],
    ids=str,
)
def test_a_log_of_odd_moves_is_refused(there: Path, move: list[object]) -> None:
    with Repository.open(there, group=None) as repo:
        payload = unseal("ref", repo._handle.store.get(MAIN_KEY), version=1, key=MAIN_KEY)
        repo._handle.store.put(MAIN_KEY, seal("ref", 1, payload | {"log": [move]}, key=MAIN_KEY))
        with pytest.raises(CorruptionError, match=MAIN_KEY):
            repo.log()
        long = [[0, None, None, "x", "y"]] * (MAX_LOG + 1)
        repo._handle.store.put(MAIN_KEY, seal("ref", 1, payload | {"log": long}, key=MAIN_KEY))
        with pytest.raises(CorruptionError, match="a log of"):
            repo.log()


def test_settings_that_are_too_long_are_refused_by_those_who_need_them(there: Path) -> None:
    verbs(there)
    (there.parent / "here" / SETTINGS_KEY).write_bytes(bytes(MOST_VALUE_BYTES + 1))
    with Repository.open(there.parent / "here", group=None) as repo, pytest.raises(CorruptionError, match="settings"):
        repo.fetch()


def test_a_collection_condemns_no_more_packs_than_a_record_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cas_ckpt.ops.gc import gc

    monkeypatch.setattr(gc, "MOST_NAMED", 3)
    handle = new_repository(tmp_path / "repo")
    for step in range(8):
        commit(handle, {"w": numbers(1000, seed=step)}, branch="side" if step else "main")
    handle.close()
    with Repository.open(tmp_path / "repo", group=None) as repo:
        gone = [info.id for info in repo.log("side")]
        repo.delete_branch("side", force=True)
        repo.forget(revisions=gone)
        deleted = [repo.gc(min_age_s=0).deleted_packs for _ in range(7)]
        assert max(deleted) == 3 and sum(deleted) > 6 and deleted[-1] == 0
        assert repo.fsck().ok


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store_id", 5), ("store_id", "\x1b]0;x\x07"), ("store_id", "a" * 300), ("store_id", ""),
        ("default_branch", 7), ("default_branch", "a b"), ("encoding", ["raw"]), ("encoding", "\n"),
        ("pack_bytes", "x"), ("pack_bytes", 0), ("pack_bytes", True), ("pack_bytes", 1 << 63),
    ],
)  # fmt: skip
def test_a_config_of_odd_fields_opens_nothing(there: Path, field: str, value: object) -> None:
    payload = unseal("config", (there / CONFIG_KEY).read_bytes(), version=1, key=CONFIG_KEY)
    (there / CONFIG_KEY).write_bytes(seal("config", 1, payload | {field: value}, key=CONFIG_KEY))
    for run in verbs(there).values():
        with pytest.raises(CorruptionError, match=CONFIG_KEY):
            run()


@pytest.mark.parametrize("number", [1 << 63, 1 << 62, -2])
def test_a_generation_that_no_collection_had_is_refused(there: Path, number: int) -> None:
    for kind, key, verb in (("gc-state", GC_STATE_KEY, "push"), ("ref", MAIN_KEY, "log")):
        record = (there / key).read_bytes()
        payload = unseal(kind, record, version=1, key=key)
        (there / key).write_bytes(seal(kind, 1, payload | {"generation": number}, key=key))
        with pytest.raises(CorruptionError, match=key):
            verbs(there)[verb]()
        (there / key).write_bytes(record)
