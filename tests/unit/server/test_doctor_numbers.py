"""What the doctor asks its host, and what it says of each number: the limits, the remedies, and what it cannot find."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jurybox.server.doctor import checks, host
from jurybox.server.doctor.host import Level
from jurybox.server.security.limits import most_held

MIB = 1 << 20
count_devices = host.visible_cuda_devices.__wrapped__


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a program that is asked in place of this Python."""

    def written(shell: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{shell}\n")
        path.chmod(0o755)
        monkeypatch.setattr(host, "sys", SimpleNamespace(executable=str(path)))
        monkeypatch.setattr(host, "torch_has_cuda", lambda: True)

    return written


@pytest.mark.parametrize(
    ("shell", "devices"),
    [
        ('[ "$1 $2" = "-m jurybox.server.doctor.host" ] && echo 2', 2),
        ("echo 2; exit 1", 0),
        ("echo two", 0),
        ("echo noise >&2; echo 3", 3),
        ("true", 0),
    ],
)
def test_devices_are_counted_by_another_process(
    program: Callable[[str], None], capfd: pytest.CaptureFixture[str], shell: str, devices: int
) -> None:
    program(shell)
    assert count_devices() == devices
    assert capfd.readouterr() == ("", ""), "what it says is nobody's"


def test_a_driver_that_does_not_answer_has_no_devices_and_without_a_build_for_them_nobody_is_asked(
    program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, timeout: float, **__: object) -> None:
        asked.append(timeout)
        raise subprocess.TimeoutExpired("python", timeout)

    asked = list[float]()
    program("true")
    monkeypatch.setattr(host.subprocess, "run", run)
    assert count_devices() == 0 and len(asked) == 1
    monkeypatch.setattr(host, "torch_has_cuda", lambda: False)
    assert count_devices() == 0 and len(asked) == 1


@pytest.mark.parametrize(
    ("version", "built"),
    [
        ("cuda: Optional[str] = '12.8'\n", True),
        ('debug = False\ncuda = "11.8"\n', True),
        ("cuda: Optional[str] = None\n", False),
        ("no_cuda = '12.8'\n", False),
        (None, False),
    ],
)
def test_a_torch_is_built_for_cuda_if_its_version_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, built: bool
) -> None:
    if version is not None:
        (tmp_path / "version.py").write_text(version)
    origin = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: origin)
    assert host.torch_has_cuda() == built
    for spec in (None, SimpleNamespace(origin=None)):
        monkeypatch.setattr(host.importlib.util, "find_spec", lambda name, spec=spec: spec)
        assert not host.torch_has_cuda()


class Driver:
    """A CUDA driver whose calls return these statuses."""

    def __init__(self, init: int, count: int) -> None:
        self.cuInit = lambda flags: flags or init  # no flag is defined
        self._count = count

    def cuDeviceGetCount(self, into: Any) -> int:
        into._obj.value = 4
        return self._count


@pytest.mark.parametrize(("init", "count", "devices"), [(0, 0, 4), (100, 0, 0), (0, 3, 0)])
def test_the_driver_is_asked_for_its_devices(
    monkeypatch: pytest.MonkeyPatch, init: int, count: int, devices: int
) -> None:
    monkeypatch.setattr(host.ctypes, "CDLL", lambda name: Driver(init, count))
    assert host.ask_driver() == devices


def test_a_host_without_a_driver_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(host.ctypes, "CDLL", absent)
    assert host.ask_driver() == 0


def test_a_file_system_has_bytes_and_inodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = SimpleNamespace(f_blocks=1000, f_bavail=10, f_bfree=11, f_frsize=512, f_bsize=4096, f_files=99, f_favail=7)
    monkeypatch.setattr(host.os, "statvfs", lambda folder: found)
    assert host.room(tmp_path) == ((512_000, 5120), (99, 7))
    monkeypatch.undo()
    assert host.room(tmp_path / "absent") == ((0, 0), (0, 0))


def test_a_folder_without_room_for_files_says_how_many_fit() -> None:
    few, enough = host.check_inodes(1000, 63, Path("/x")), host.check_inodes(1000, 64, Path("/x"))
    assert (few.level, few.found, "remount,nr_inodes=1m /x" in few.remedy) == (
        Level.FAIL,
        "/x: 63 more files of 1000 fit",
        True,
    )
    assert (enough.level, enough.found) == (Level.OK, "64 more files fit")
    assert host.check_inodes(0, 0, Path("/x")).found == "as many files as fit"


def test_dead_sockets_are_told_by_their_first_three_and_those_of_other_addresses_left_alone(tmp_path: Path) -> None:
    for name in ("engine", "engine-0", "engine-1", "engine-2", "other"):
        with socket.socket(socket.AF_UNIX) as once:
            once.bind(str(tmp_path / name))
    dead = host.dead_sockets(f"ipc://{tmp_path}/engine")
    assert [path.name for path in dead] == ["engine", "engine-0", "engine-1", "engine-2"]
    found = host.check_sockets(dead, fix=False)
    assert found.found == f"4: {', '.join(map(str, dead[:3]))}" and found.level is Level.WARN
    assert host.dead_sockets("tcp://127.0.0.1:1") == host.dead_sockets(f"ipc://{tmp_path}/no/engine") == []
    dead[0].unlink()
    assert host.check_sockets(dead, fix=True).found == "4 removed" and (tmp_path / "other").exists()
    assert host.check_sockets([], fix=True).found == "none"


def test_a_look_for_dead_sockets_leaves_no_file_open(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine"
    with socket.socket(socket.AF_UNIX) as once:
        once.bind(str(tmp_path / "engine"))
    (tmp_path / "engine.lock").touch()
    assert host.dead_sockets(address) == [tmp_path / "engine"]
    there = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
    assert not [path for path in there if path.resolve() == tmp_path / "engine.lock"]


def test_a_socket_of_unknown_state_is_not_taken_for_a_dead_one(tmp_path: Path) -> None:
    path = tmp_path / "engine"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        assert host.dead_sockets(f"ipc://{path}") == [], "it speaks something else"


@pytest.mark.parametrize(
    ("release", "level"),
    [("3.16.9", "fail"), ("3.17.0", "warn"), ("5.13.19", "warn"), ("5.14", "ok"), ("10.0.1", "ok"), ("odd", "fail")],
)
def test_kernels_are_compared_by_their_numbers(release: str, level: str) -> None:
    assert host.check_kernel(release).level == level


def test_the_clock_source_is_the_kernels_and_unknown_without_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_CLOCK", tmp_path / "current")
    assert host.clock_source() == "" and "unknown source" in host.check_clock("").found
    (tmp_path / "current").write_text("hpet\n")
    assert host.clock_source() == "hpet"
    for slow in ("acpi_pm", "hpet", "pit", "jiffies"):
        found = host.check_clock(slow)
        assert found.level is Level.WARN and f"from {slow}" in found.found and "echo tsc > " in found.remedy


def test_a_daemon_that_runs_unasked_is_told_beside_the_instances(tmp_path: Path) -> None:
    (tmp_path / "control").touch()
    visible = {"CUDA_VISIBLE_DEVICES": "MIG-1"}
    assert host.check_gpu_sharing(visible, tmp_path, 2).found == f"MIG: MIG-1 of 2 instances; MPS in {tmp_path}"
    assert host.mps_folder({}) == Path("/tmp/nvidia-mps")
    assert host.check_gpu_sharing({}, tmp_path / "no", 0).found.startswith("none set up")
    found = host.check_gpu_sharing({}, tmp_path, 3)
    assert found.level is Level.WARN and "CUDA_VISIBLE_DEVICES=unset" in found.found


# ---- checks


@pytest.mark.parametrize("fix", [True, False])
def test_what_the_dead_left_is_removed_only_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, fix: bool) -> None:
    asked = list[object]()
    monkeypatch.setattr(host, "check_sockets", lambda dead, *, fix: asked.append(fix) or host.ok("sockets", "none"))
    monkeypatch.setattr(checks, "check_stale", lambda stale, remove: asked.append(remove) or host.ok("stale", "none"))
    checks.examine(fix=fix)
    assert asked == ([checks.sweep, True] if fix else [None, False])


def test_what_lacks_its_packages_is_not_checked_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jurybox.server.doctor.packages", None)
    monkeypatch.delattr("jurybox.server.doctor.packages", raising=False)
    found = checks._check_conflicts()
    assert found.level is Level.WARN and found.found.startswith("not checked: ") and found.remedy
    monkeypatch.setitem(sys.modules, "jurybox.server.security.limits", None)
    found = checks.check_clients("", 1 << 40)
    assert found.level is Level.WARN and found.found.startswith("not known: ") and found.remedy == "see above"
    monkeypatch.delattr("jurybox.native")
    monkeypatch.setitem(sys.modules, "jurybox.native", None)
    found = checks.check_native()
    assert found.level is Level.FAIL and "C++17 compiler" in found.remedy
    assert checks.check_http2(*checks._nghttp2()).found.endswith(": the native core cannot be imported")


@pytest.mark.parametrize(("found", "level"), [((3, 10, 99), "fail"), ((3, 11, 0), "ok"), ((4, 0, 0), "ok")])
def test_pythons_are_compared_by_their_numbers(found: tuple[int, int, int], level: str) -> None:
    assert checks.check_python(found, "linux").level == level
    assert checks.check_python(found, "darwin").level == "fail"
    assert checks.check_python(found, "linux").found == f"Python {'.'.join(map(str, found))} on linux"


def test_missing_packages_are_told_first_and_the_others_with_their_versions() -> None:
    found = checks.check_packages({"numpy": "2.0", "torch": None, "fastapi": None})
    assert found.found.startswith("torch, fastapi not installed; jurybox ") and found.found.endswith(", numpy 2.0")
    assert checks.check_packages({"numpy": "2.0"}).level is Level.OK


def test_http2_is_by_the_systems_library_or_slower() -> None:
    assert checks.check_http2("1.59", "").found == "HTTP/2 by libnghttp2 1.59"
    found = checks.check_http2("", "it is not there")
    assert found.level is Level.WARN and found.found.endswith(": it is not there") and "libnghttp2" in found.remedy


def test_memory_is_told_in_mib_and_in_arenas() -> None:
    scarce = checks.check_memory(500 * MIB, "RAM")
    assert scarce.found == "500 MiB left of RAM; enough for 3 models' arenas"
    assert checks.check_memory(100 * MIB, "RAM").found == "100 MiB left of RAM; one model's arena takes up to 128"
    assert checks.check_memory(1 << 40, "RAM").remedy == ""


def test_the_most_that_a_host_has_room_for_is_what_the_doctor_says_to_set() -> None:
    found = checks.check_clients("1024", 100 * MIB)
    assert found.level is Level.WARN and "; 100 MiB are left" in found.found
    told = int(found.remedy.split("max_message_mib to ")[1].split()[0])
    assert checks.check_clients(str(told), 100 * MIB).level is Level.OK
    assert "to 1 or less" in checks.check_clients("64", 1).remedy
    most = most_held(16 << 20)
    assert (
        checks.check_clients("16", most).level is Level.OK and checks.check_clients("16", most - 1).level is Level.WARN
    )


@pytest.mark.parametrize(
    ("free", "level"), [(MIB - 1, "fail"), (MIB, "warn"), (128 * MIB - 1, "warn"), (128 * MIB, "ok")]
)
def test_shared_memory_needs_room_for_trainings(free: int, level: str) -> None:
    assert checks.check_room(1 << 40, free, Path("/x")).level == level


@pytest.mark.parametrize(("n", "told"), [(1, "1: s0"), (3, "3: s0, s1, s2"), (4, "4: s0, s1, s2, ...")])
def test_stale_segments_are_named_and_counted(n: int, told: str) -> None:
    stale = [f"s{number}" for number in range(n)]
    assert checks.check_stale(stale, None).found == told
    assert checks.check_stale(stale, lambda: ["s0"]).found == "1 removed"
    assert checks.check_stale([], None).found == checks.check_stale([], list).found == "none"


@pytest.mark.parametrize(
    ("hard", "level", "clients"), [(255, "fail", 63), (256, "warn", 64), (4095, "warn", 1983), (4096, "ok", 1984)]
)
def test_open_files_are_told_in_clients(hard: int, level: str, clients: int) -> None:
    found = checks.check_files((100, hard))
    assert (found.level, found.found) == (
        level,
        f"a server may have {hard}, enough for {clients} clients; other processes 100",
    )
    assert checks.check_files((100, 3)).found == "a server may have 3, enough for 0 clients; other processes 100"
    assert checks.check_files((100, resource.RLIM_INFINITY)).found == "no limit of open files"


@pytest.mark.parametrize(
    ("cores", "environ", "level"),
    [
        (4.0, {}, "ok"),
        (2.0, {}, "ok"),
        (1.9, {}, "warn"),
        (4.0, {"OMP_NUM_THREADS": "4"}, "ok"),
        (4.0, {"OMP_NUM_THREADS": "5"}, "warn"),
        (4.0, {"OMP_NUM_THREADS": "", "MKL_NUM_THREADS": "8"}, "warn"),
        (4.0, {"OMP_NUM_THREADS": "many"}, "ok"),
    ],
)
def test_threads_beyond_the_cores_are_a_warning(cores: float, environ: dict[str, str], level: str) -> None:
    assert checks.check_cores(cores, environ).level == level
    assert "takes 2 threads by default" in checks.check_cores(5.0, {}).found
    assert "takes 1 threads by default" in checks.check_cores(2.0, {}).found


class Torch:
    def __init__(self, devices: list[str], cuda: str | None) -> None:
        self.__version__ = "2.9"
        self.version = SimpleNamespace(cuda=cuda)
        self.cuda = SimpleNamespace(
            is_available=lambda: bool(devices),
            device_count=lambda: len(devices),
            get_device_name=lambda n: devices[n],
        )


@pytest.mark.parametrize(
    ("devices", "cuda", "nodes", "level", "told"),
    [
        (["H200", "A100"], "12.8", 2, "ok", "torch 2.9, 2 CUDA devices: H200, A100"),
        ([], "12.8", 1, "warn", "torch 2.9 (built for CUDA 12.8) cannot use a GPU, although there are nvidia0; "),
        ([], None, 1, "warn", "torch 2.9 (a CPU build) cannot use a GPU, although there are nvidia0; "),
        ([], None, 0, "ok", "torch 2.9, no GPU: engines run on the CPU"),
    ],
)
def test_a_torch_that_cannot_use_the_hosts_gpus_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], cuda: str | None, nodes: int, level: str, told: str
) -> None:
    there = [Path(f"/dev/nvidia{number}") for number in range(nodes)]
    folder = SimpleNamespace(glob=lambda pattern: there)
    monkeypatch.setattr(checks, "Path", lambda path: folder)
    monkeypatch.setitem(sys.modules, "torch", Torch(devices, cuda))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    found = checks.check_torch()
    assert found.level == level and found.found.startswith(told)
    assert found.found.endswith("CUDA_VISIBLE_DEVICES=7") == (level == "warn")


def test_a_runtime_folder_that_is_not_there_is_made_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"ipc://{tmp_path}/a/b/engine"
    assert checks.check_runtime_folder(address).found == f"{tmp_path}/a/b will be created"
    monkeypatch.setattr(checks.os, "access", lambda path, mode: False)
    found = checks.check_runtime_folder(address)
    assert (found.level, found.found) == (Level.FAIL, f"{tmp_path}/a/b cannot be created in {tmp_path}")
    assert checks.check_runtime_folder("tcp://10.0.0.1:1").found == "none needed for tcp://10.0.0.1:1"


@pytest.mark.parametrize(
    ("owner", "mode", "enters", "said"),
    [
        (77, 0o700, True, ""),
        (0, 0o700, True, ""),
        (1, 0o700, True, "must be writable and belong to user 77"),
        (77, 0o700, False, "must be writable and belong to user 77"),
        (77, 0o710, True, "chmod 700"),
        (77, 0o701, True, "chmod 700"),
    ],
)
def test_a_runtime_folder_is_its_users_or_roots_and_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, enters: bool, said: str
) -> None:
    asked = list[int]()
    monkeypatch.setattr(checks.os, "getuid", lambda: 77)
    monkeypatch.setattr(checks.os, "access", lambda path, how: asked.append(how) or enters)
    monkeypatch.setattr(Path, "stat", lambda path, **_: SimpleNamespace(st_uid=owner, st_mode=0o40000 | mode))
    found = checks.check_runtime_folder(f"ipc://{tmp_path}/engine")
    assert (found.level is Level.FAIL) == bool(said) and said in found.remedy
    assert found.found == f"{tmp_path}, mode {mode:o}, user {owner}"
    assert asked in ([os.W_OK | os.X_OK], [])


def test_a_lock_that_keeps_nobody_out_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_locks().found.endswith(" has open-file-description locks")
    monkeypatch.setattr(checks, "is_locked", lambda *_: False)
    found = checks.check_locks()
    assert found.level is Level.FAIL and found.found.endswith(": a lock did not keep another out")


@pytest.mark.parametrize(
    ("limit", "has_gpu", "level", "told"),
    [
        (64 * MIB, True, "warn", "64 MiB of locked memory"),
        (64 * MIB, False, "ok", "64 MiB of locked memory"),
        (0, True, "warn", "0 MiB of locked memory"),
        (128 * MIB, True, "ok", "128 MiB of locked memory"),
        (resource.RLIM_INFINITY, True, "ok", "no limit of locked memory"),
    ],
)
def test_a_small_limit_of_locked_memory_slows_down_a_gpu(limit: int, has_gpu: bool, level: str, told: str) -> None:
    found = checks.check_memlock(limit, has_gpu=has_gpu)
    assert (found.level, found.found) == (level, told)


def test_cores_are_those_of_the_process_unless_a_quota_leaves_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks.os, "sched_getaffinity", lambda pid: {0, 3, 5})
    for text, cores in (("max 100000", 3.0), ("150000 100000", 1.5), ("900000 100000", 3.0), ("odd", 3.0)):
        (tmp_path / "cpu.max").write_text(f"{text}\n")
        assert checks.available_cores(tmp_path) == cores
    assert checks.available_cores(tmp_path / "absent") == 3.0
