"""How much memory a call may take, by what the machine and its control groups say."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import numpy as np
import pytest

from cas_ckpt import MemoryBudgetError, memory
from cas_ckpt.memory import (
    DEFAULT_BYTES,
    LEAST_DEFAULT_BYTES,
    available_bytes,
    check_memory,
    current_limits,
    inheriting,
    limits,
    memory_budget,
    new_buffer,
)
from cas_ckpt.parallel.workers import map_all, one_ahead

GB, MB = 1000**3, 1000**2


class Machine:
    """A /proc, and folders of control groups beside it."""

    def __init__(self, folder: Path, *, available_bytes: int, cgroup: str = "", mounts: str = "") -> None:
        self.proc = folder / "proc"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_bytes // 1024} kB\n")
        (self.proc / "self" / "cgroup").write_text(cgroup)
        (self.proc / "self" / "mountinfo").write_text(mounts.format(folder=folder))
        self._folder = folder

    def group(self, path: str, **files: str | int) -> None:
        """A control group, by the files in its folder; `_` in their names stands for a dot."""
        place = self._folder / path
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name.replace("_", ".", 1)).write_text(f"{text}\n")

    def left(self) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "PROC", self.proc)
            return available_bytes()


V2 = "31 24 0:27 / {folder}/cg rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "40 35 0:30 / {folder}/mem rw - cgroup cgroup rw,memory\n41 35 0:31 / {folder}/cpu rw - cgroup cgroup rw,cpu\n"


def test_a_machine_without_control_groups_has_what_it_says_is_available(tmp_path: Path) -> None:
    assert Machine(tmp_path, available_bytes=3 * GB).left() == 3 * GB // 1024 * 1024


def test_the_lowest_limit_of_nested_groups_counts_less_what_is_used_there(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_bytes=64 * GB, cgroup="0::/job.slice/step\n", mounts=V2)
    machine.group("cg", memory_stat="anon 5")
    machine.group("cg/job.slice", memory_max=8 * GB, memory_high="max", memory_current=7 * GB, memory_stat="")
    machine.group("cg/job.slice/step", memory_max=4 * GB, memory_current=1 * GB, memory_stat="")
    assert machine.left() == 1 * GB, "the job has less left than the step"


def test_memory_high_limits_as_memory_max_does(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_bytes=64 * GB, cgroup="0::/job\n", mounts=V2)
    machine.group("cg/job", memory_max=4 * GB, memory_high=3 * GB, memory_current=1 * GB, memory_stat="")
    assert machine.left() == 2 * GB


def test_page_cache_of_a_group_can_be_dropped(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_bytes=64 * GB, cgroup="0::/job\n", mounts=V2)
    stat = f"anon 7\nactive_file {GB}\ninactive_file {GB // 2}\nunevictable 9"
    machine.group("cg/job", memory_max=4 * GB, memory_current=4 * GB, memory_stat=stat)
    assert machine.left() == GB + GB // 2


def test_groups_of_version_1_are_counted_with_those_below(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_bytes=64 * GB, cgroup="4:memory:/job\n3:cpu:/other\n0::/\n", mounts=V1)
    stat = f"inactive_file 5\ntotal_inactive_file {GB}\ntotal_active_file 0"
    machine.group("mem", memory_limit_in_bytes=2**63 - 4096, memory_usage_in_bytes=9 * GB, memory_stat="")
    machine.group("mem/job", memory_limit_in_bytes=4 * GB, memory_usage_in_bytes=3 * GB, memory_stat=stat)
    machine.group("cpu/other", memory_limit_in_bytes=1)
    assert machine.left() == 2 * GB


def test_a_container_that_sees_its_own_group_as_the_top_is_limited_by_it(tmp_path: Path) -> None:
    mounts = "40 35 0:30 /docker/abc {folder}/mem ro - cgroup cgroup rw,memory\n"
    for name, path in (("inside", "/docker/abc"), ("outside", "/../elsewhere")):
        machine = Machine(tmp_path / name, available_bytes=9 * GB, cgroup=f"4:memory:{path}\n", mounts=mounts)
        machine.group("mem", memory_limit_in_bytes=2 * GB, memory_usage_in_bytes=GB, memory_stat="")
        assert machine.left() == GB, name


def test_files_that_say_nonsense_limit_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_bytes=GB, cgroup="0::/job\nnonsense\n", mounts="nonsense\n - cgroup2\n" + V2)
    machine.group("cg/job", memory_max="-5", memory_high="", memory_current="x", memory_stat="nonsense\na b c")
    assert machine.left() == GB // 1024 * 1024


def test_the_default_is_divided_by_the_ranks_of_a_machine_and_never_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PROC", Machine(tmp_path / "large", available_bytes=64 * GB).proc)
    assert memory_budget() == memory_budget(num_ranks=8) == DEFAULT_BYTES == 300 * MB
    monkeypatch.setattr(memory, "PROC", Machine(tmp_path / "small", available_bytes=1024 * MB).proc)
    assert memory_budget(num_ranks=4) == 128 * MB
    assert memory_budget(num_ranks=64) == LEAST_DEFAULT_BYTES
    with limits(memory_bytes=5 * GB):
        assert memory_budget(num_ranks=64) == 5 * GB, "what is given is given"


def test_what_is_given_is_refused_if_it_is_too_little_and_the_default_never_is() -> None:
    wanted = "memory_bytes is 999: a commit needs 1000 at least"
    with pytest.raises(MemoryBudgetError, match=wanted) as caught, limits(memory_bytes=999):
        check_memory(1000, "a commit")
    assert caught.value.least_bytes == 1000
    with limits(memory_bytes=1000):
        check_memory(1000, "a commit")
    check_memory(10**18, "a commit")


def test_threads_that_work_for_a_call_have_its_limits_and_others_have_not() -> None:
    def seen(_: object = None) -> int | None:
        return current_limits().memory_bytes

    others: list[int | None] = []
    with limits(memory_bytes=7, num_threads=3):
        with limits(max_entries=5):
            assert map_all(seen, range(3), num_threads=3) == [7, 7, 7]
        assert list(one_ahead(seen, range(2))) == [7, 7]
        later = inheriting(seen)
        other = threading.Thread(target=lambda: others.append(seen()))
        other.start()
        other.join()
    assert (others, seen(), later()) == ([None], None, 7)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="large pages are Linux's")
def test_a_buffer_for_disks_is_of_large_pages_and_of_this_process_alone() -> None:
    buffer = new_buffer(8 << 20)
    address = np.frombuffer(buffer, np.uint8).ctypes.data
    mapping = flags = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = line.split()[0].split("-")
        if len(span) == 2:
            mapping = line.split()[1] if int(span[0], 16) <= address < int(span[1], 16) else ""
        elif mapping and line.startswith("VmFlags:"):
            assert mapping == "rw-p"
            flags = line
    assert flags.split()[1:].count("hg") == 1
