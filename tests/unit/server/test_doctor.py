"""The doctor: each verdict on numbers of a host that lacks something, and the whole on this one."""

from __future__ import annotations

import fcntl
import os
import resource
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jurybox.protocol.revision import install_command
from jurybox.protocol.segment import Segment, segment_name
from jurybox.server.doctor import checks, host
from jurybox.server.doctor.checks import examine
from jurybox.server.doctor.host import Finding, Level

MIB = 1 << 20


def test_dockers_64_mib_of_shared_memory_do_for_a_server_and_the_flag_is_named_for_trainings():
    finding = checks.check_room(64 * MIB, 63 * MIB, Path("/dev/shm"))
    assert finding.level is Level.WARN
    assert "63 of 64 MiB free" in finding.found
    assert "--shm-size=1g" in finding.remedy


@pytest.mark.parametrize(("free", "level"), [(127, Level.FAIL), (128, Level.WARN), (511, Level.WARN), (512, Level.OK)])
def test_memory_is_checked_against_the_models_needs(free, level):
    finding = checks.check_memory(free * MIB, "the limit /sys/fs/cgroup/memory.max")
    assert finding.level is level
    assert "/sys/fs/cgroup/memory.max" in finding.found


def test_a_folder_that_is_not_there_has_no_room_and_no_segments(monkeypatch, tmp_path):
    monkeypatch.setenv("JURYBOX_SHM_DIR", str(tmp_path / "absent"))
    for finding in (checks.check_segment(), checks.check_locks(), _of("shared memory")):
        assert finding.level is Level.FAIL, finding
        assert finding.remedy


def _of(subject: str) -> Finding:
    return next(finding for finding in examine() if finding.subject == subject)


def test_a_file_system_without_locks_fails(monkeypatch):
    def refuse(*_: object, **__: object) -> bool:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(checks, "try_lock", refuse)
    assert checks.check_locks().level is Level.FAIL
    monkeypatch.setattr(checks, "try_lock", lambda *_: False)
    assert "did not keep another out" in checks.check_locks().found


@pytest.mark.parametrize(
    ("version", "platform", "level"),
    [((3, 11, 0), "linux", Level.OK), ((3, 10, 9), "linux", Level.FAIL), ((3, 12, 1), "darwin", Level.FAIL)],
)
def test_python_and_platform(version, platform, level):
    assert checks.check_python(version, platform).level is level


def test_a_package_that_is_missing_is_a_finding_and_stops_no_other(monkeypatch):
    monkeypatch.setattr(checks, "_PACKAGES", ("numpy", "jurybox-has-no-such-package"))
    (finding,) = [one for one in examine() if "jurybox-has-no-such-package" in one.found]
    assert finding.level is Level.FAIL and finding.found.startswith("jurybox-has-no-such-package not installed; ")


def test_a_missing_package_is_named_with_the_extra_that_brings_it():
    finding = checks.check_packages({"numpy": "2.0", "fastapi": None})
    assert finding.level is Level.FAIL
    assert finding.found.startswith("fastapi not installed")
    assert finding.remedy == install_command("server")


def test_a_missing_native_core_fails(monkeypatch):
    monkeypatch.setitem(sys.modules, "jurybox.native", None)
    assert checks.check_native().level is Level.FAIL


def test_a_missing_torch_fails_but_not_the_doctor(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    finding = checks.check_torch()
    assert finding.level is Level.FAIL
    assert "clients do without it" in finding.remedy


@pytest.mark.parametrize(
    ("hard", "level", "clients"), [(255, Level.FAIL, 63), (1024, Level.WARN, 448), (4096, Level.OK, 1984)]
)
def test_open_files_are_counted_in_clients(hard, level, clients):
    """By the hard limit: a server raises its own to that."""
    finding = checks.check_files((min(hard, 1024), hard))
    assert (finding.level, f"{clients} clients" in finding.found) == (level, True)
    assert "LimitNOFILE=65536" in finding.remedy or level is Level.OK


def test_no_limit_is_no_problem():
    assert checks.check_files((resource.RLIM_INFINITY, resource.RLIM_INFINITY)).level is Level.OK
    assert checks.check_memlock(resource.RLIM_INFINITY, has_gpu=True).level is Level.OK


def test_more_threads_than_cores_are_a_warning():
    assert checks.check_cores(4, {"OMP_NUM_THREADS": "4"}).level is Level.OK
    finding = checks.check_cores(4, {"OMP_NUM_THREADS": "64"})
    assert (finding.level, "unset OMP_NUM_THREADS" in finding.remedy) == (Level.WARN, True)
    assert checks.check_cores(1, {}).level is Level.WARN


def test_a_quota_of_the_control_group_counts_as_cores(tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert checks.available_cores(tmp_path) == min(1.5, len(os.sched_getaffinity(0)))
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert checks.available_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_locked_memory_matters_only_with_a_gpu():
    assert checks.check_memlock(8 * MIB, has_gpu=False).level is Level.OK
    finding = checks.check_memlock(8 * MIB, has_gpu=True)
    assert (finding.level, "memlock=-1" in finding.remedy) == (Level.WARN, True)


def test_a_runtime_folder_is_judged_by_owner_and_mode(tmp_path, monkeypatch):
    def found(folder: Path) -> Finding:
        return checks.check_runtime_folder(f"ipc://{folder}/engine")

    assert found(tmp_path / "new" / "deep").level is Level.OK
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert (found(tmp_path / "open").level, "chmod 700" in found(tmp_path / "open").remedy) == (Level.FAIL, True)
    (tmp_path / "mine").mkdir(mode=0o700)
    assert found(tmp_path / "mine").level is Level.OK
    owner = os.getuid()
    monkeypatch.setattr(checks.os, "getuid", lambda: owner + 1)
    os.chown(tmp_path / "mine", owner or 12345, -1)
    assert found(tmp_path / "mine").level is Level.FAIL


def test_segments_of_the_dead_are_found_and_fixed(monkeypatch, tmp_path):
    monkeypatch.setenv("JURYBOX_SHM_DIR", str(tmp_path))
    server = f"dead{secrets.token_hex(4)}"
    code = (
        "import os; from jurybox.protocol.segment import Segment, segment_name\n"
        f"Segment.create(segment_name({server!r}, 'scoreboard'), 4096); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with Segment.create(segment_name("alive", "scoreboard"), 4096):
        stale = [segment_name(server, "scoreboard")]
        assert checks.stale_segments() == stale
        warning = checks.check_stale(checks.stale_segments(), None)
        assert (warning.level, "--fix" in warning.remedy) == (Level.WARN, True)
        fixed = next(finding for finding in examine(fix=True) if finding.subject == "stale segments")
        assert (fixed.level, fixed.found) == (Level.OK, "1 removed")
        assert checks.stale_segments() == []
        assert (tmp_path / segment_name("alive", "scoreboard")).exists()


def test_this_host_can_run_a_server():
    findings = examine()
    assert len({finding.subject for finding in findings}) == len(findings)
    assert [finding for finding in findings if finding.level is Level.FAIL] == []
    assert all(finding.remedy for finding in findings if finding.level is not Level.OK)


def test_a_file_system_without_inodes_fails_and_one_without_bound_does_not():
    finding = host.check_inodes(1000, 3, Path("/dev/shm"))
    assert (finding.level, "nr_inodes" in finding.remedy) == (Level.FAIL, True)
    assert host.check_inodes(1000, 900, Path("/dev/shm")).level is Level.OK
    assert host.check_inodes(0, 0, Path("/dev/shm")).level is Level.OK


def test_sockets_of_the_dead_are_found_and_removed_and_those_of_the_living_are_not(tmp_path):
    address = f"ipc://{tmp_path}/engine"
    dead = tmp_path / "engine"
    with socket.socket(socket.AF_UNIX) as once:
        once.bind(str(dead))
        once.listen()
        assert host.dead_sockets(address) == [], "somebody listens"
    Path(f"{dead}.toml").write_text("a user's file with a similar name")
    assert host.dead_sockets(address) == [dead]
    with (tmp_path / "engine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert host.dead_sockets(address) == [], "a server that is just starting holds the address"
    assert host.check_sockets([dead], fix=False).level is Level.WARN
    assert "1 removed" in host.check_sockets([dead], fix=True).found
    assert not dead.exists()


def test_a_slow_clock_is_a_warning():
    assert host.check_clock("hpet").level is Level.WARN
    assert host.check_clock("tsc").level is Level.OK
    assert host.check_clock("").level is Level.OK


@pytest.mark.parametrize(
    ("release", "level"),
    [("3.10.0-1160.el7", Level.FAIL), ("4.18.0", Level.WARN), ("5.14.0-1", Level.OK), ("6.18.44-x", Level.OK)],
)
def test_the_kernel_is_checked_by_its_features(release, level):
    assert host.check_kernel(release).level is level


def sharing(tmp_path, instances=0, **environ):
    return host.check_gpu_sharing(environ, host.mps_folder({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}), instances)


def test_a_gpu_cut_up_without_a_choice_is_a_warning(tmp_path):
    assert sharing(tmp_path).level is Level.OK
    (tmp_path / "gpu0/mig/gi1").mkdir(parents=True)
    (tmp_path / "gpu0/mig/gi2").mkdir()
    instances = host.mig_instances(tmp_path)
    found = sharing(tmp_path, instances)
    assert (found.level, "2 MIG instances" in found.found) == (Level.WARN, True)
    assert sharing(tmp_path, instances, CUDA_VISIBLE_DEVICES="0").level is Level.WARN
    chosen = sharing(tmp_path, instances, CUDA_VISIBLE_DEVICES="MIG-1234")
    assert (chosen.level, "MIG-1234" in chosen.found) == (Level.OK, True)


def test_a_daemon_for_sharing_that_is_named_must_run(tmp_path):
    found = sharing(tmp_path, CUDA_MPS_PIPE_DIRECTORY=str(tmp_path))
    assert (found.level, "nvidia-cuda-mps-control" in found.remedy) == (Level.WARN, True)
    (tmp_path / "control").touch()
    found = sharing(tmp_path, CUDA_MPS_PIPE_DIRECTORY=str(tmp_path), CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="30")
    assert found.level is Level.OK and "MPS" in found.found and "30 %" in found.found


@pytest.mark.parametrize(
    ("setting", "free", "level", "told"),
    [
        ("", 4096, Level.OK, "at most 1024 MiB each in gateway and relay with max_message_mib = 64"),
        ("16", 4096, Level.OK, "at most 256 MiB each"),
        ("64", 512, Level.WARN, "512 MiB are left"),
        ("none", 4096, Level.OK, "max_message_mib = 64"),
    ],
)
def test_what_clients_may_make_a_server_hold_is_computed_from_its_setting(setting, free, level, told):
    finding = checks.check_clients(setting, free * MIB)
    assert (finding.level, told in finding.found) == (level, True)
    assert level is Level.OK or "max_message_mib to 32" in finding.remedy


@pytest.mark.parametrize(
    ("text", "environ", "setting"),
    [
        ("[server]\nmax_message_mib = 16\n", {}, "16"),
        ("[server]\nmax_message_mib = 16\n", {"JURYBOX_MAX_MESSAGE_MIB": "8"}, "8"),
        ("[models.a]\n", {}, ""),
        (None, {}, ""),
    ],
)
def test_the_limits_of_clients_are_those_of_the_configuration(tmp_path, text, environ, setting):
    file = None if text is None else tmp_path / "server.toml"
    if file is not None:
        file.write_text(text)
    assert checks._max_message_mib(file, environ) == setting
