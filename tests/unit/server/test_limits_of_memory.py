"""Memory that is left within the limits of control groups, and for how long a kill by the kernel explains a death."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from tests.unit.security.test_freed_memory import Process
from tests.unit.server.test_memory import MIB, Kernel

from jurybox.server import memory
from jurybox.server.memory import FreedMemory, MemoryKills, available_memory, memory_limit


def test_page_cache_of_a_container_counts_as_free_in_the_first_version_with_that_of_its_parts(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 1, 100 * MIB)
    group = kernel.limit.parent
    (group / "memory.usage_in_bytes").write_text(f"{90 * MIB}\n")
    stat = {"inactive_file": 1, "active_file": 1, "total_inactive_file": 8, "total_active_file": 4, "total_rss": 50}
    (group / "memory.stat").write_text("".join(f"{name} {size * MIB}\n" for name, size in stat.items()))
    assert available_memory(kernel.proc, kernel.groups) == (22 * MIB, f"the limit {kernel.limit}")


def test_a_machine_that_says_nothing_of_its_memory_has_no_limit(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "proc", tmp_path / "groups") == (1 << 62, "memory")
    assert memory_limit(tmp_path / "proc", tmp_path / "groups") is None


@pytest.mark.parametrize(("version", "path"), [(2, "0::/{}"), (1, "5:cpu:/other\n4:cpuset,memory:/{}")])
def test_the_smallest_limit_of_all_groups_around_a_process_is_its_limit(
    tmp_path: Path, version: int, path: str
) -> None:
    kernel = Kernel(tmp_path, version, None)
    top = kernel.groups if version == 2 else kernel.groups / "memory"
    inner = top / "outer" / "inner"
    inner.mkdir(parents=True)
    (kernel.proc / "self" / "cgroup").write_text(path.format("outer/inner") + "\n")
    name = kernel.limit.name
    for sizes, smallest in (((300, 200), inner.parent), ((100, 200), inner)):
        for folder, size in zip((inner, inner.parent), sizes, strict=True):
            (folder / name).write_text(f"{size * MIB}\n")
        assert memory_limit(kernel.proc, kernel.groups) == (min(sizes) * MIB, smallest / name)
    (top / name).write_text(f"{50 * MIB}\n")
    assert memory_limit(kernel.proc, kernel.groups) == (50 * MIB, top / name)
    (tmp_path / name).write_text(f"{MIB}\n")  # above the control groups
    assert memory_limit(kernel.proc, kernel.groups) == (50 * MIB, top / name)


@pytest.mark.parametrize(("short", "limited"), [(0, False), (1, True)])
def test_a_limit_that_the_machine_reaches_first_is_none(tmp_path: Path, short: int, limited: bool) -> None:
    kernel = Kernel(tmp_path, 2, (8_000_000 << 10) - short)
    assert (memory_limit(kernel.proc, kernel.groups) is not None) == limited


@pytest.mark.parametrize(("seconds", "explains"), [(5.0, True), (5.5, False)])
def test_a_second_kill_explains_a_death_for_five_seconds(tmp_path: Path, seconds: float, explains: bool) -> None:
    kernel, now = Kernel(tmp_path, 2), [100.0]
    kills = MemoryKills(kernel.proc, kernel.groups, lambda: now[0])
    kernel.killed(2, 2)
    assert kills.look()
    now[0] += seconds
    assert bool(kills.look()) == explains


def test_a_new_kill_explains_for_five_seconds_more_what_those_before_it_do(tmp_path: Path) -> None:
    kernel, now = Kernel(tmp_path, 2, None), [100.0]
    kills = MemoryKills(kernel.proc, kernel.groups, lambda: now[0])
    kernel.killed(0, 3)
    assert kills.look()
    for at, count in ((104.0, 4), (108.0, 5)):
        now[0] = at
        kernel.killed(0, count)
        assert kills.look()
    now[0] = 112.0
    assert kills.look()


def test_a_kill_outside_of_the_group_is_not_said_to_be_for_the_groups_limit(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 2)
    kills = MemoryKills(kernel.proc, kernel.groups, lambda: 0.0)
    kernel.killed(0, 1)
    assert "the kernel killed a process" in kills.look() and kills.look() == ""
    kernel.killed(1, 2)
    assert "the limit of 620 MiB" in kills.look() and kills.look() == ""


def test_counts_that_begin_anew_are_no_kills(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 2)
    kernel.killed(5, 5)
    kills = MemoryKills(kernel.proc, kernel.groups, lambda: 0.0)
    kernel.killed(1, 1)
    assert kills.look() == ""
    kernel.killed(2, 2)
    assert kills.look()


def test_a_machine_that_counts_no_kills_in_a_group_or_none_at_all_is_known(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 2)
    (kernel.limit.parent / "memory.events").unlink()
    assert MemoryKills(kernel.proc, kernel.groups).known
    (kernel.proc / "vmstat").unlink()
    assert not MemoryKills(kernel.proc, kernel.groups).known


def test_a_line_without_a_number_is_no_field(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 2, None)
    (kernel.proc / "meminfo").write_text("MemTotal: many\nHuge:\nMemAvailable: 3 kB\nSwapFree: 1 kB\n")
    assert available_memory(kernel.proc, kernel.groups) == (4096, "the machine's memory")


def test_the_memory_that_a_process_has_for_itself_grows_with_what_it_writes_to() -> None:
    freed = FreedMemory()
    before = freed._private()
    # Not the allocator's, which may have as much that was freed.
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
        taken.write(bytes(64 * MIB))
        assert 48 * MIB < freed._private() - before < 80 * MIB


def test_a_kill_in_a_group_without_a_limit_is_one_for_lack_of_memory_on_the_machine(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 2, None)
    kills = MemoryKills(kernel.proc, kernel.groups, lambda: 0.0)
    kernel.killed(1, 0)
    assert "the kernel killed a process for lack of it (see dmesg)" in kills.look()


@pytest.mark.parametrize("name", ["a:b", "system.slice/jurybox-a:b.service"])
def test_the_path_of_a_control_group_may_have_colons(tmp_path: Path, name: str) -> None:
    kernel = Kernel(tmp_path, 2, None)
    group = kernel.groups / name
    group.mkdir(parents=True)
    (kernel.proc / "self" / "cgroup").write_text(f"0::/{name}\n")
    (group / "memory.max").write_text(f"{5 * MIB}\n")
    assert memory_limit(kernel.proc, kernel.groups) == (5 * MIB, group / "memory.max")


def test_the_memory_of_a_process_that_cannot_be_read_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    freed = FreedMemory()
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / "nothing")
    assert freed._private() == 0
    freed.look(0, 0)


def test_freed_memory_is_returned_at_the_second_look_that_finds_a_process_at_rest() -> None:
    process = Process()
    process.take(60 * MIB)
    process.free(60 * MIB)
    process.look(0, 0)
    assert process.returned == []
    process.look(2 * MIB, 0)  # it works meanwhile
    process.look(0, 0)
    assert process.returned == []
    process.look(0, 0)
    assert process.returned == [(0, 60 * MIB)]
