"""A clone with a filter has every name, and of the bytes those that match; the rest comes when it is read."""

from __future__ import annotations

import logging
import re
import shutil
import signal
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from cas_ckpt import Repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import read_directory
from cas_ckpt.errors import CorruptionError, NotFoundError, TransientStorageError
from cas_ckpt.index import contents
from cas_ckpt.objects.digest import Digest
from cas_ckpt.storage import disk
from cas_ckpt.storage.file import FileStore
from tests.cli.running import ok
from tests.effects import CrashNow, die_before, no_space_from
from tests.processes import Forked, run_program
from tests.servers import S3Server
from tests.wrapped_stores import FaultyStore

ROWS = 200_000


def state(step: int = 0) -> dict[str, object]:
    return {
        "model": {"w": torch.arange(ROWS, dtype=torch.float32) + step, "b": torch.ones(ROWS) * step},
        "optimizer": {"m": torch.arange(ROWS, dtype=torch.float32) * 2 + step},
    }


def made(folder: Path, commits: int = 2) -> None:
    with Repository.init(folder / "there") as there:
        for step in range(commits):
            there.commit(state(step), step=step)
    Repository.clone(folder / "there", folder / "here", filter="model/**").close()


def size_of(folder: Path) -> int:
    return sum(each.stat().st_size for each in (folder / "packs").rglob("*.data"))


def test_only_what_matches_comes(tmp_path: Path) -> None:
    made(tmp_path)
    assert 0 < size_of(tmp_path / "here") < 0.8 * size_of(tmp_path / "there")
    with Repository.open(tmp_path / "here") as here:
        (origin,) = here.remotes()
        assert origin.promisor and origin.filter == ("model/**",)
        assert len(here.ls("main")) == 3
    shutil.move(tmp_path / "there", tmp_path / "away")
    with Repository.open(tmp_path / "here") as here:
        found = here.load("main", keys="model/**")
        assert np.array_equal(np.asarray(found["model"]["w"]), state(1)["model"]["w"].numpy())  # type: ignore[index]
        with pytest.raises(TransientStorageError, match="'origin'.*try again"):
            here.load("main")


def test_the_rest_comes_when_it_is_read_and_is_here_then(tmp_path: Path) -> None:
    made(tmp_path)
    with Repository.open(tmp_path / "here") as here:
        found = here.load("main~1")
        assert np.array_equal(
            np.asarray(found["optimizer"]["m"]), state(0)["optimizer"]["m"].numpy()  # type: ignore[index]
        )  # fmt: skip
    shutil.move(tmp_path / "there", tmp_path / "away")
    with Repository.open(tmp_path / "here") as here:
        here.load("main~1")


def test_later_pulls_keep_the_filter(tmp_path: Path) -> None:
    made(tmp_path)
    before = size_of(tmp_path / "here")
    with Repository.open(tmp_path / "there") as there:
        there.commit(state(5), step=5)
    with Repository.open(tmp_path / "here") as here:
        here.pull()
        assert len(here.log()) == 3
    grown = size_of(tmp_path / "here") - before
    shutil.move(tmp_path / "there", tmp_path / "away")
    with Repository.open(tmp_path / "here") as here:
        here.load("main", keys="model/**")
        with pytest.raises(TransientStorageError):
            here.load("main")
    assert grown


def test_commits_on_top_are_whole_and_are_pushed(tmp_path: Path) -> None:
    made(tmp_path)
    with Repository.open(tmp_path / "here") as here:
        here.commit(state(1) | {"more": torch.ones(ROWS)})
        report = here.push()
        assert report.num_commits == 1
    shutil.copytree(tmp_path / "there", tmp_path / "copy")
    shutil.move(tmp_path / "there", tmp_path / "away")
    with Repository.open(tmp_path / "here") as here:
        here.load("main")  # nothing of it is only promised
    with Repository.open(tmp_path / "copy") as there:
        assert there.fsck(read_data=True).ok


def test_a_push_elsewhere_fetches_through(tmp_path: Path) -> None:
    made(tmp_path)
    with Repository.init(tmp_path / "third") as third, Repository.open(tmp_path / "here") as here:
        here.add_remote("third", tmp_path / "third")
        here.push("third")
        assert third.fsck(read_data=True).ok


def test_a_collection_knows_what_is_promised(tmp_path: Path) -> None:
    made(tmp_path)
    with Repository.open(tmp_path / "here") as here:
        here.gc(min_age_s=0)


def test_fsck_says_what_is_promised(tmp_path: Path) -> None:
    made(tmp_path)
    with Repository.open(tmp_path / "here") as here:
        assert here.fsck().ok


def test_a_branch_begins_at_a_promised_commit_after_a_collection(tmp_path: Path) -> None:
    made(tmp_path)
    with Repository.open(tmp_path / "here") as here:
        here.gc(min_age_s=0)
        here.branch("ft", start="main~1")


def test_a_clone_of_a_partial_clone_takes_the_rest_from_its_promisor(tmp_path: Path) -> None:
    made(tmp_path)
    before = size_of(tmp_path / "here")
    with Repository.clone(tmp_path / "here", tmp_path / "whole") as whole:
        assert whole.fsck(read_data=True).ok
    assert size_of(tmp_path / "here") == before
    shutil.move(tmp_path / "there", tmp_path / "away")
    with Repository.open(tmp_path / "whole") as whole:
        whole.load("main~1")
    with Repository.clone(tmp_path / "here", tmp_path / "same", filter="model/**") as same:
        same.load("main", keys="model/**")
    with pytest.raises(TransientStorageError, match="'origin'.*try again"):
        Repository.clone(tmp_path / "here", tmp_path / "other")


def test_a_bundle_of_a_partial_clone_is_whole(tmp_path: Path) -> None:
    made(tmp_path)
    with Repository.open(tmp_path / "here") as here:
        here.create_bundle(tmp_path / "all.bundle", "main")
    with Repository.init(tmp_path / "fresh") as fresh:
        fresh.unbundle(tmp_path / "all.bundle")
        assert fresh.fsck(read_data=True).ok


def test_a_diff_and_a_whole_checkout_bring_what_is_promised(tmp_path: Path) -> None:
    made(tmp_path)
    with Repository.open(tmp_path / "here") as here:
        assert here.diff("main~1", "main")
        assert here.du()


def test_who_may_only_read_reads_at_the_promisor_and_keeps_nothing(tmp_path: Path) -> None:
    made(tmp_path)
    before = size_of(tmp_path / "here")
    with Repository.open(tmp_path / "here", read_only=True) as here:
        wanted = state(1)["optimizer"]["m"]  # type: ignore[index]
        for _ in range(2):
            assert np.array_equal(np.asarray(here.load("main")["optimizer"]["m"]), wanted.numpy())  # type: ignore[index]
        assert np.asarray(here.read("main", "optimizer/m", slice(5, 7))).tolist() == wanted[5:7].tolist()
        assert here.diff("main~1", "main", values=True)
        live = {key: {name: torch.zeros(ROWS) for name in found} for key, found in state().items()}  # type: ignore[attr-defined]
        here.checkout("main", into=live)
        assert torch.equal(live["optimizer"]["m"], wanted)
        here.export("main", tmp_path / "out.safetensors")
        assert here.fsck().num_promised == 2
    assert size_of(tmp_path / "here") == before
    shutil.move(tmp_path / "there", tmp_path / "away")
    with Repository.open(tmp_path / "here", read_only=True) as here, pytest.raises(TransientStorageError):
        here.load("main")


def test_where_the_disk_is_full_it_is_read_at_the_promisor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made(tmp_path)
    before = size_of(tmp_path / "here")
    full = FaultyStore(FileStore(tmp_path / "here"), no_space_from(1))
    with Repository(RepositoryHandle.on_store(full, cache=None)) as here, caplog.at_level(logging.WARNING, "cas_ckpt"):
        found = here.load("main")
        assert np.array_equal(np.asarray(found["optimizer"]["m"]), state(1)["optimizer"]["m"].numpy())  # type: ignore[index]
    assert re.search("not kept here: .*no space left", caplog.text)
    assert size_of(tmp_path / "here") == before


def test_wrong_bytes_of_a_promisor_are_neither_taken_nor_shown(tmp_path: Path) -> None:
    made(tmp_path)
    for pack in (tmp_path / "there" / "packs").rglob("*.data"):
        pack.chmod(0o644)
        held = bytearray(pack.read_bytes())
        held[200:-4000:1000] = bytes(byte ^ 0xFF for byte in held[200:-4000:1000])
        pack.write_bytes(bytes(held))
    before = size_of(tmp_path / "here")
    for read_only in (True, False):
        with Repository.open(tmp_path / "here", read_only=read_only) as here:
            with pytest.raises((CorruptionError, NotFoundError)):
                here.load("main")
            here.load("main", keys="model/**")
    assert size_of(tmp_path / "here") == before


def test_who_dies_while_the_rest_comes_loses_nothing(tmp_path: Path) -> None:
    """At every effect on the store in turn, until one read ends."""
    made(tmp_path)
    for at in range(1, 50):
        shutil.rmtree(tmp_path / "try", ignore_errors=True)
        shutil.copytree(tmp_path / "here", tmp_path / "try")
        store = FaultyStore(FileStore(tmp_path / "try"), die_before(at))
        repo = Repository(RepositoryHandle.on_store(store, cache=None))
        try:
            repo.load("main")
            break
        except CrashNow:
            pass
        with Repository.open(tmp_path / "try") as again:
            assert again.fsck(read_data=True).ok
            assert np.array_equal(
                np.asarray(again.load("main")["optimizer"]["m"]), state(1)["optimizer"]["m"].numpy()  # type: ignore[index]
            )  # fmt: skip
            again.gc(min_age_s=0)
            assert again.fsck(read_data=True).num_promised == 1
    assert 1 < at < 49


def test_who_waits_for_the_rest_is_shown_how_far_it_is(tmp_path: Path) -> None:
    class Told:
        phases: list[tuple[str, int | None]] = []  # noqa: RUF012
        done = 0

        def start(self, phase: str, total_bytes: int | None) -> None:
            self.phases.append((phase, total_bytes))

        def advance(self, num_bytes: int) -> None:
            self.done += num_bytes

        def finish(self) -> None:
            self.phases.append(("", None))

    made(tmp_path)
    told = Told()
    with Repository.open(tmp_path / "here", progress=told) as here:
        here.load("main", keys="model/**")
        assert not told.phases
        here.load("main")
    (name, total), end = told.phases
    assert (name, end) == ("fetching what is missing", ("", None)) and total == told.done > 0


def test_several_who_read_at_once_bring_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "STUCK_S", 60.0)
    made(tmp_path)
    together = threading.Barrier(4)

    def read(number: int) -> None:
        with Repository.open(tmp_path / "here") as here:
            together.wait()
            here.load("main")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
    with Repository.open(tmp_path / "here") as here:
        packs = [pack for pack in here._handle.index.packs() if pack.endswith(".data")]
        entries = [entry.digest for pack in packs for entry in read_directory(here._handle.store, pack)[1]]
        assert len(entries) == len(set(entries))
        assert here.fsck().num_promised == 1


def test_a_process_that_is_killed_while_the_rest_comes_loses_nothing(tmp_path: Path) -> None:
    made(tmp_path, commits=4)
    text = f"""
        import os, signal
        from cas_ckpt import Repository
        from cas_ckpt.index.index import Index
        add = Index.add_packs
        def once(self, *args, **kwargs):
            if any(record.entries for record in args[0]) and self.place and "here" in str(self.place):
                os.kill(os.getpid(), signal.SIGKILL)
            return add(self, *args, **kwargs)
        Index.add_packs = once
        Repository.open({str(tmp_path / "here")!r}).load("main")
    """
    with Forked(run_program, textwrap.dedent(text)) as process:
        assert process.wait(60) == -signal.SIGKILL
    with Repository.open(tmp_path / "here") as here:
        assert here.fsck(read_data=True).ok
        for number in range(4):
            here.load(f"main~{number}")
        here.gc(min_age_s=0)
        report = here.fsck(read_data=True)
        assert report.ok and not report.num_promised


def test_a_clone_of_a_bucket_with_a_filter(tmp_path: Path, s3: S3Server) -> None:
    url = s3.url(s3.new_bucket())
    with Repository.init(url) as there:
        for step in range(3):
            there.commit(state(step), step=step)
    ok("clone", "--filter", "model/**", "--depth", "2", url, tmp_path / "here")
    assert "promisor  filter model/**" in ok("-C", tmp_path / "here", "remote", "list")
    with Repository.open(tmp_path / "here") as here:
        assert here.fsck(remote=True).num_promised == 2
        here.gc(min_age_s=0)
        assert np.asarray(here.read("main", "optimizer/m", slice(3, 5))).tolist() == [8.0, 10.0]
        assert here.fsck(read_data=True, remote=True).num_promised == 1
    ok("-C", tmp_path / "here", "fetch", "--filter", "**")
    ok("-C", tmp_path / "here", "remote", "set", "origin", "--no-promisor", "--no-filter")
    with Repository.open(tmp_path / "here") as here:
        assert here.fsck(read_data=True).ok and not here.fsck().num_promised


def test_a_promisor_whose_packs_have_names_of_ours_lends_none_of_them(tmp_path: Path) -> None:
    made(tmp_path)
    with Repository.open(tmp_path / "here", read_only=True) as here, Repository.open(tmp_path / "there") as there:
        handle, other = here._handle, there._handle
        own = next(iter(handle.index.packs()))
        digest = next(iter(other.index.read(contents.chunks_and_packs)[0]))
        (place,) = other.index.read(contents.locate, [digest])[digest]
        handle.elsewhere._lend(other, {digest: [place._replace(pack=own)]})
        assert not handle.elsewhere.lent([Digest(digest)])
        handle.elsewhere._lend(other, {digest: [place]})
        assert handle.elsewhere.lent([Digest(digest)])


def test_a_pattern_of_a_filter_that_matches_nothing_is_said_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Repository.init(tmp_path / "there") as there:
        there.commit(state())
    with caplog.at_level(logging.WARNING, "cas_ckpt"):
        Repository.clone(tmp_path / "there", tmp_path / "right", filter=["model/**", "optimizer/m"]).close()
        assert not caplog.records
        with Repository.clone(tmp_path / "there", tmp_path / "here", filter=["model/**", "optim/**"]) as here:
            (record,) = caplog.records
            assert "matches the filter 'optim/**'" in record.getMessage()
            caplog.clear()
            here.fetch(filter="modle/w")
            assert "matches the filter 'modle/w'" in caplog.records[0].getMessage()
            caplog.clear()
            with Repository.open(tmp_path / "there") as there:
                there.commit({"model": {"w": torch.zeros(3000)}})
            here.fetch()
            assert not caplog.records, "this commit has no optimizer, others had none either"
