"""What limits the memory of a server, and whether the kernel has killed a process for lack of it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from jurybox.server.jurors.panels import example_images
from jurybox.server.memory import MemoryKills, bounded, memory_limit
from jurybox.server.supervisor.children import killed_from_outside

MIB = 1 << 20


class Kernel:
    """The files of a control group, of version 1 or 2, and of /proc."""

    def __init__(self, folder: Path, version: int, limit: int | None = 620 * MIB) -> None:
        self.proc, self.groups = folder / "proc", folder / "cgroup"
        group = self.groups / "box" if version == 2 else self.groups / "memory"
        for each in (self.proc / "self", group):
            each.mkdir(parents=True)
        line = "0::/box" if version == 2 else "4:memory:/docker/x"  # of a container, which sees its own group
        (self.proc / "self" / "cgroup").write_text(line + "\n")
        (self.proc / "meminfo").write_text("MemTotal: 8000000 kB\n")
        self.limit = group / ("memory.max" if version == 2 else "memory.limit_in_bytes")
        none = "max" if version == 2 else str(0x7FFFFFFFFFFFF000)
        self.limit.write_text(f"{none if limit is None else limit}\n")
        self._events = group / ("memory.events" if version == 2 else "memory.oom_control")
        self.killed(0, 0)

    def killed(self, here: int, anywhere: int) -> None:
        self._events.write_text(f"oom 0\noom_kill {here}\n")
        (self.proc / "vmstat").write_text(f"nr_free 1\noom_kill {anywhere}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_by_the_limit_of_a_container_names_the_limit(tmp_path, version):
    kernel = Kernel(tmp_path, version)
    now = [0.0]
    kills = MemoryKills(kernel.proc, kernel.groups, lambda: now[0])
    assert kills.known and kills.look() == ""
    kernel.killed(1, 1)
    why = kills.look()
    assert "out of memory: the limit of 620 MiB" in why and str(kernel.limit) in why and "MEMORY" in why
    assert kills.look() == "", "it is said once"
    kernel.killed(1, 2)
    assert "out of memory" in kills.look()
    kernel.killed(3, 4)  # two at once: each explains a death
    assert "the limit of 620 MiB" in kills.look() and "the limit of 620 MiB" in kills.look() and kills.look() == ""
    kernel.killed(5, 6)  # of processes that are not the server's: they explain nothing later
    assert "out of memory" in kills.look()
    now[0] = 60.0
    assert kills.look() == ""


@pytest.mark.parametrize("version", [1, 2])
def test_no_limit_is_none(tmp_path, version):
    kernel = Kernel(tmp_path, version, None)
    assert memory_limit(kernel.proc, kernel.groups) is None
    kills = MemoryKills(kernel.proc, kernel.groups)
    kernel.killed(1, 1)
    assert "dmesg" in kills.look()
    kernel.limit.write_text(f"{512 * MIB}\n")
    assert memory_limit(kernel.proc, kernel.groups) == (512 * MIB, kernel.limit)


def test_requests_get_an_eighth_of_a_containers_memory_at_most(tmp_path):
    kernel = Kernel(tmp_path, 2, 800 * MIB)
    assert bounded(512 * MIB, memory_limit(kernel.proc, kernel.groups)) == 100 * MIB
    assert bounded(8 * MIB, memory_limit(kernel.proc, kernel.groups)) == 8 * MIB
    assert bounded(512 * MIB, None) == 512 * MIB


def test_only_a_kill_that_is_not_for_memory_comes_from_outside(tmp_path):
    kernel = Kernel(tmp_path, 2)
    kills = MemoryKills(kernel.proc, kernel.groups)

    def outside(status: int, served: float = 10.0, short: str = "", by_supervisor: bool = False) -> bool:
        return killed_from_outside(status, served, by_supervisor=by_supervisor, memory=kills, short=short)

    assert outside(-signal.SIGKILL)
    assert not outside(-signal.SIGKILL, short="out of memory")
    assert not outside(-signal.SIGKILL, by_supervisor=True)
    assert not outside(-signal.SIGKILL, served=0.1)
    assert not outside(-signal.SIGSEGV)
    assert not killed_from_outside(
        -signal.SIGKILL, 10.0, by_supervisor=False, memory=MemoryKills(tmp_path / "no", tmp_path / "no"), short=""
    )


def test_counts_that_come_or_go_explain_no_death(tmp_path):
    kernel = Kernel(tmp_path, 2)
    kills = MemoryKills(kernel.proc, kernel.groups)
    (kernel.proc / "vmstat").unlink()
    assert kills.look() == "" and kills.known
    kernel.killed(0, 7)  # none of them is known to be new
    assert kills.look() == ""
    kernel.killed(0, 8)
    assert "dmesg" in kills.look()


def test_the_examples_of_the_jury_take_little_more_memory_than_they_have():
    def rss(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10

    example_images(2, 384)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except OSError:
        pytest.skip("this kernel has no clear_refs")
    before = rss("VmRSS")
    images = example_images(64, 384)
    assert images.nbytes == 64 * 384 * 384 * 3
    assert rss("VmHWM") - before < images.nbytes + 80 * MIB
