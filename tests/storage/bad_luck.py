"""What every object storage must come through, whoever's it is: cut connections, storms, lost replies, odd answers.

A vendor's test file has a fixture `place` and a class that inherits `BadLuck`; what only that vendor has is there too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import pytest

from cas_ckpt.errors import (
    ConflictError,
    CorruptionError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from cas_ckpt.storage.object_store import ObjectStore
from cas_ckpt.storage.url import open_store
from cas_ckpt.testing.store_values import noise
from tests.proxy import Fault, Proxy, Request, cut_head, cut_reply, cut_request, delay, drop_reply, edit, status

PART = 256 << 10
LONG = noise(2 * PART + 12_345)
"""A value of three parts."""


class Place:
    """A bucket behind a proxy, with a store that goes through it and a view that does not."""

    write: ClassVar[str]
    """The method of requests that write an object."""

    parts: ClassVar[str]
    """What the targets of requests that send a part hold."""

    completion: ClassVar[str]
    """What the targets of requests that complete an upload hold."""

    completed_before: ClassVar[Fault]
    """What the service answers to another request to complete an upload."""

    part_error: ClassVar[str]
    """What an error of such a request names."""

    version_header: ClassVar[dict[str, str]]

    def __init__(self, proxy: Proxy, behind: str, through: str) -> None:
        """The two are URLs of the same bucket."""
        self.proxy = proxy
        self.behind = self.opened(behind)
        self.store = self.opened(through)

    def opened(self, url: str) -> ObjectStore:
        store = open_store(url)
        assert isinstance(store, ObjectStore)
        return store

    def close(self) -> None:
        self.store.close()
        self.behind.close()

    def stream(self, key: str, value: bytes) -> None:
        with self.store.open_writer(key) as writer:
            for at in range(0, len(value), 100_000):
                writer.write(value[at : at + 100_000])
            writer.commit()

    def leftovers(self) -> list[str]:
        """Parts and uploads of values that are not there."""
        raise NotImplementedError

    def asks_for_a_version(self, request: Request) -> bool:
        raise NotImplementedError

    def refusal(self, code: int, name: str, message: str) -> Fault:
        """An error as the vendor words it."""
        raise NotImplementedError

    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let a reply be waited for 0.3 s."""
        raise NotImplementedError

    def small_pages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let a page of a listing have three objects."""
        raise NotImplementedError

    def when_the_rest_is_asked_for(self, work: Callable[[], object]) -> Callable[[Request], bool]:
        """For `Proxy.plan(when=...)`: no request, but `work` is done before those that go on with a read."""

        def when(request: Request) -> bool:
            if self.asks_for_a_version(request):
                work()
            return False

        return when


def is_write(request: Request) -> bool:
    return request.method in ("PUT", "POST")


def sits_out(place: Place, trouble: Fault, when: Callable[[Request], bool] = lambda request: True) -> None:
    """Every operation is done where `trouble` meets its first three requests."""
    for work in (
        lambda: place.store.put("a", b"x"),
        lambda: place.store.put_if_absent("b", b"x"),
        lambda: place.store.compare_and_swap("a", b"x", b"y"),
        lambda: place.stream("c", LONG),
        lambda: place.store.get("a"),
        lambda: place.store.get_tail("c", 10),
        lambda: place.store.head("a"),
        lambda: list(place.store.list("")),
        lambda: place.store.delete("b"),
        lambda: place.store.delete_many(["a", "b"]),
    ):
        place.proxy.plan(trouble, times=3, when=when)
        work()
        place.proxy.clear()
    assert [key for key, _ in place.behind.list("")] == ["c"]
    assert place.behind.get("c") == LONG


def is_refused(place: Place, refusal: Fault, kind: type, match: str) -> None:
    """Reads and writes raise `kind`, and never that there is no such key."""
    place.proxy.plan(refusal, times=1000)
    for call in (
        lambda: place.store.get("refs/main"),
        lambda: place.store.put("refs/main", b""),
        lambda: place.store.put_if_absent("refs/main", b""),
        lambda: place.store.delete("refs/main"),
    ):
        with pytest.raises(kind, match=match) as found:
            call()
        assert not isinstance(found.value, NotFoundError)


class BadLuck:
    # --- the connection is cut ------------------------------------------------------------------

    @pytest.mark.parametrize("at", [0, 1, 100_000])
    def test_an_upload_that_is_cut_in_the_middle_is_sent_again(self, place: Place, at: int) -> None:
        place.proxy.plan(cut_request(at), method=place.write)
        place.store.put("small", LONG[:PART])
        assert place.behind.get("small") == LONG[:PART]
        place.proxy.plan(cut_request(at), method=place.write, match=place.parts, times=3)
        place.stream("packs/long", LONG)
        assert place.behind.get("packs/long") == LONG
        assert place.leftovers() == []

    def test_an_upload_that_never_goes_through_leaves_nothing_and_says_so(self, place: Place) -> None:
        place.proxy.plan(cut_request(1000), method=place.write, match=place.parts, times=10_000, after=1)
        with pytest.raises(TransientStorageError, match=place.part_error):
            place.stream("packs/long", LONG)
        assert place.leftovers() == [], "its parts are not paid for"
        with pytest.raises(NotFoundError):
            place.behind.head("packs/long")

    @pytest.mark.parametrize("at", [0, 1, 70_000, 399_999])
    def test_a_read_that_breaks_off_goes_on_where_it_stopped(self, place: Place, at: int) -> None:
        value = LONG[:500_000]
        place.behind.put("value", value)
        target = bytearray(400_000)
        for read, wanted in (
            (lambda: place.store.get("value"), value),
            (lambda: bytes(place.store.get_range("value", 5, 400_000)), value[5:400_005]),
            (lambda: place.store.get_tail("value", 400_000), (len(value), value[-400_000:])),
            (lambda: (place.store.read_into("value", 7, memoryview(target)), bytes(target))[1], value[7:400_007]),
        ):
            place.proxy.clear()
            place.proxy.plan(cut_reply(at), method="GET", match="value")
            assert read() == wanted
            first, rest = [request for request in place.proxy.requests if request.method == "GET"]
            assert place.asks_for_a_version(rest), "the rest is asked of the same version"
            assert not at or rest.headers["range"] != first.headers.get("range"), "what came is not asked for again"

    def test_parts_of_a_long_range_break_off_and_go_on_by_themselves(self, place: Place) -> None:
        place.behind.put("value", LONG)
        place.proxy.plan(cut_reply(200_000), method="GET", match="value", times=3)
        assert place.store.get_range("value", 0, len(LONG)) == LONG

    def test_a_read_that_breaks_off_again_and_again_is_given_up(self, place: Place) -> None:
        place.behind.put("value", LONG[:500_000])
        place.proxy.plan(cut_reply(10), method="GET", match="value", times=1000)
        with pytest.raises(TransientStorageError, match="value"):
            place.store.get("value")
        assert place.proxy.count("GET", "value") < 10

    @pytest.mark.parametrize("size", [PART, len(LONG)], ids=["one request", "parts"])
    def test_two_values_are_never_mixed(self, place: Place, size: int) -> None:
        first, second = noise(size, seed=1), noise(size, seed=2)
        place.behind.put("value", first)
        replaced: list[bool] = []

        def replace(body: bytes) -> bytes:
            if not replaced:
                replaced.append(True)
                place.behind.put("value", second)
            return body

        # What came of the old value is whole (or cut, in the next test); what is asked for next is of the new one.
        place.proxy.plan(cut_reply(200_000), method="GET", match="value")
        place.proxy.plan(edit(replace), method="GET", match="value", times=1000)
        for _ in range(3):
            assert place.store.get_range("value", 0, size) in (first, second)
        assert place.store.get("value") == second
        assert place.behind.get("value") == second

    def test_a_value_replaced_between_the_break_and_the_rest_is_read_anew(self, place: Place) -> None:
        first, second = noise(400_000, seed=1), noise(400_000, seed=2)
        place.behind.put("value", first)
        replace = place.when_the_rest_is_asked_for(lambda: place.behind.put("value", second))
        place.proxy.plan(cut_reply(200_000), method="GET", match="value")
        place.proxy.plan(status(500), method="GET", match="value", when=replace)
        for read in (lambda: place.store.get("value"), lambda: bytes(place.store.get_range("value", 0, 400_000))):
            assert read() == second

    def test_a_value_deleted_between_the_break_and_the_rest_is_not_found(self, place: Place) -> None:
        place.behind.put("value", noise(400_000))
        delete = place.when_the_rest_is_asked_for(lambda: place.behind.delete("value"))
        place.proxy.plan(cut_reply(200_000), method="GET", match="value")
        place.proxy.plan(status(500), method="GET", match="value", when=delete)
        with pytest.raises(NotFoundError, match="value"):
            place.store.get("value")

    @pytest.mark.parametrize("at", [5, 40, 90, 150])
    def test_a_reply_that_is_cut_inside_its_headers_is_asked_for_again(self, place: Place, at: int) -> None:
        sits_out(place, cut_head(at))

    def test_a_slow_reply_is_waited_for_and_one_that_never_comes_is_asked_for_again(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place.impatient(monkeypatch)
        place.behind.put("a", b"value")
        place.proxy.plan(delay(0.1), method="GET")
        assert place.store.get("a") == b"value"
        place.proxy.plan(delay(1.0), method="GET")
        assert place.store.get("a") == b"value"
        place.proxy.plan(delay(1.0), method=place.write)
        place.store.put_if_absent("b", b"value")
        assert place.behind.get("b") == b"value"

    # --- replies that are lost ------------------------------------------------------------------

    def test_a_create_whose_reply_is_lost_is_known_to_be_ours(self, place: Place) -> None:
        place.proxy.plan(drop_reply(), method=place.write)
        place.store.put_if_absent("a", b"mine")
        assert place.behind.get("a") == b"mine"
        with pytest.raises(ConflictError):
            place.store.put_if_absent("a", b"mine")

    def test_a_swap_whose_reply_is_lost_is_known_to_be_ours(self, place: Place) -> None:
        place.behind.put("a", b"one")
        for before, after in ((b"one", b"two"), (b"two", b"three")):
            place.proxy.clear()
            place.proxy.plan(drop_reply(), method=place.write)
            place.store.compare_and_swap("a", before, after)
            assert place.behind.get("a") == after
        with pytest.raises(ConflictError):
            place.store.compare_and_swap("a", b"two", b"three")

    @pytest.mark.parametrize("there", [False, True])
    def test_a_lost_reply_with_anothers_write_behind_it_is_an_unknown_outcome(self, place: Place, there: bool) -> None:
        if there:
            place.behind.put("a", b"one")

        def overtaken(request: Request) -> bool:
            place.behind.put("a", b"of another")
            return False

        place.proxy.plan(drop_reply(), method=place.write)
        place.proxy.plan(status(500), method=place.write, when=overtaken)
        store = place.store
        write = partial(store.compare_and_swap, "a", b"one") if there else partial(store.put_if_absent, "a")
        with pytest.raises(TransientStorageError, match="a"):
            write(b"mine")
        assert place.behind.get("a") == b"of another"

    @pytest.mark.parametrize("write", ["create", "swap", "stream"])
    def test_a_lost_reply_of_a_server_that_then_answers_no_reads_is_an_unknown_outcome(
        self, place: Place, write: str
    ) -> None:
        place.behind.put("a", b"one")
        assert place.store.get("a") == b"one"
        if write == "stream":
            place.proxy.plan(drop_reply(), method="POST", match=place.completion)
            place.proxy.plan(place.completed_before, method="POST", match=place.completion)
        else:
            place.proxy.plan(drop_reply(), method=place.write)
        place.proxy.plan(status(403), times=10_000, when=lambda request: not is_write(request))
        calls: dict[str, Callable[[], object]] = {
            "create": lambda: place.store.put_if_absent("b", b"mine"),
            "swap": lambda: place.store.compare_and_swap("a", b"one", b"mine"),
            "stream": lambda: place.stream("packs/long", LONG),
        }
        with pytest.raises(TransientStorageError):
            calls[write]()

    def test_a_conflict_that_nobody_retried_is_a_conflict_and_costs_one_request(self, place: Place) -> None:
        place.behind.put("a", b"one")
        place.proxy.clear()
        with pytest.raises(ConflictError):
            place.store.put_if_absent("a", b"mine")
        assert [request.method for request in place.proxy.requests] == [place.write]

    def test_a_completion_that_is_refused_leaves_the_first_value_and_no_parts(self, place: Place) -> None:
        place.behind.put("packs/long", b"first")
        with pytest.raises(ConflictError, match="packs/long"):
            place.stream("packs/long", LONG)
        assert place.behind.get("packs/long") == b"first"
        assert place.leftovers() == []

    # --- odd answers and rights ----------------------------------------------------------------------------

    def test_what_a_server_says_moves_no_cursor(self, place: Place) -> None:
        for message in ("\x1b[2J\r\nrm -rf", "\x9b2J\x7f\x85\r\nrm -rf"):
            place.proxy.clear()
            place.proxy.plan(place.refusal(403, "AccessDenied", message), times=10)
            with pytest.raises(PermissionDeniedError) as found:
                place.store.get("a")
            assert str(found.value).isprintable()

    def test_a_page_that_fails_in_the_middle_of_a_listing_is_no_end(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place.small_pages(monkeypatch)
        wanted = [f"k{number}" for number in range(10)]
        for key in wanted:
            place.behind.put(key, b"")
        place.proxy.plan(status(500), method="GET", after=2)
        assert [key for key, _ in place.store.list("")] == wanted
        place.proxy.plan(status(500), method="GET", after=2, times=1000)
        with pytest.raises(TransientStorageError):
            list(place.store.list(""))

    def test_a_range_of_other_bytes_than_asked_for_is_refused(self, place: Place) -> None:
        place.behind.put("value", LONG[:1000])
        told = {"Content-Range": "bytes 0-9/1000", **place.version_header}
        place.proxy.plan(status(206, b"0123456789", **told), method="GET", times=1000)
        with pytest.raises(StorageError, match="value"):
            place.store.get_range("value", 5, 10)
        place.proxy.clear()
        place.proxy.plan(status(200, LONG[:1000], **place.version_header), method="GET", times=1000)
        with pytest.raises(StorageError, match="value"):
            place.store.get_range("value", 5, 10)

    def test_a_huge_claim_takes_no_memory(self, place: Place) -> None:
        place.behind.put("value", b"x")
        with pytest.raises(CorruptionError, match="ends at 1"):
            place.store.get_range("value", 0, 1 << 50)
