"""A server of tests, which is forked with its imports done, is in every way that counts as one that a user starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults.conftest import MODELS, leaving_nothing
from tests.serving import RunningServer, line_of, serving, wait_until

from tests import preloaded

pytestmark = pytest.mark.skipif(not preloaded.wanted, reason="FRESH_SERVERS: all servers are started")

DOORS = dict.fromkeys(("http", "grpc", "tcp"), "127.0.0.1:0")
ANSWER = [3.0, 3.0, 3.0, 3.0]


def shown(server: RunningServer, role: str, pid: int) -> dict[str, Any]:
    """What the kernel and the log show of a process."""
    proc = Path(f"/proc/{pid}")
    status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines() if ":\t" in line)
    kinds = [str(each.readlink()).split(":")[0] for each in (proc / "fd").iterdir()]
    return {
        **{key: status[key] for key in ("SigBlk", "SigIgn", "Umask", "Cpus_allowed")},
        "handled": int(status["SigCgt"], 16) & 0x7FFFFFFF,  # above are the C library's own
        "folder": (proc / "cwd").readlink(),
        "files": sorted(kind for kind in kinds if kind in ("pipe", "/dev/null")),
        "output": (proc / "fd/1").readlink() == (proc / "fd/2").readlink() == server.log,
        "limits": (proc / "limits").read_text(),
        "session": os.getsid(pid) == server.process.pid == os.getpgid(pid),
        "nice": os.getpriority(os.PRIO_PROCESS, pid),
    }


def serves_and_ends(folder: Path, monkeypatch: pytest.MonkeyPatch, *, anew: bool) -> dict[str, dict[str, Any]]:
    monkeypatch.setattr(preloaded, "wanted", not anew)
    with leaving_nothing(), serving(folder, MODELS, **DOORS) as server, server.connect() as client:
        assert client.model("affine")(np.ones(4, np.float32)).tolist() == ANSWER
        processes = server.pids()
        programs = {role: line_of(pid) for role, pid in processes.items() if role != "supervisor"}
        assert all(f"jurybox.server.{role.split('-')[0]}".encode() in line for role, line in programs.items())
        found = {role: shown(server, role, pid) for role, pid in processes.items()}
        os.kill(processes["engine-0"], signal.SIGKILL)
        assert client.model("affine").infer(np.ones((1, 4), np.float32), timeout=60).tolist() == [ANSWER]
        assert server.pids()["engine-0"] != processes["engine-0"]
        assert "status=-9" in server.text()
        assert server.stop() == 0
    return found


@pytest.mark.runs
def test_a_preloaded_server_is_what_a_started_one_is(tmp_path, monkeypatch):
    started = serves_and_ends(tmp_path / "started", monkeypatch, anew=True)
    forked = serves_and_ends(tmp_path / "forked", monkeypatch, anew=False)
    assert sorted(started) == ["engine-0", "gateway", "relay", "supervisor"]
    started["supervisor"]["files"] += ["pipe"] * 3  # through each comes how a child has ended
    for role, each in started.items():
        assert forked[role] == each, role


def test_none_is_forked_with_variables_that_were_read_before():
    assert preloaded.may_start(sys.executable, {**os.environ, "JURYBOX_TOKEN": "other"}, [])
    for name in ("LD_PRELOAD", "PYTHONHASHSEED", "OMP_NUM_THREADS"):
        assert not preloaded.may_start(sys.executable, {**os.environ, name: "other"}, [])
    assert not preloaded.may_start("/usr/bin/python3", os.environ, [])
    assert not preloaded.may_start(sys.executable, os.environ, ["prlimit"])


def test_its_processes_find_what_is_on_its_pythonpath_in_that_order(tmp_path):
    first, second = folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    (first / "in_both.py").write_text("from tests.models import affine\n")
    (second / "in_both.py").write_text("")
    (second / "in_second.py").write_text("from tests.models import affine\n")
    models = {name: {"factory": f"{name}:affine"} for name in ("in_both", "in_second")}
    path = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    assert preloaded.may_start(sys.executable, {**os.environ, **path}, [])
    with serving(tmp_path / "server", models, path) as server, server.connect() as client:
        for name in models:
            assert client.model(name)(np.ones(4, np.float32)).tolist() == ANSWER


def test_a_server_that_does_not_start_ends_with_its_status_and_text(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)ended with 2:.*cannot-be"):
        with serving(tmp_path, MODELS, log_level="cannot-be"):
            pass


PROGRAM = """
import pathlib, sys
from tests import preloaded
from tests.serving import serving
preloaded.wanted = True
with serving(pathlib.Path(sys.argv[1]), {"affine": {"factory": "tests.models:affine"}}) as server:
    print(*server.pids().values(), flush=True)
    sys.stdin.read()
"""


def test_it_ends_with_the_process_that_has_started_it(tmp_path):
    line = [sys.executable, "-c", PROGRAM, tmp_path]
    program = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 2 and all(line_of(pid) for pid in pids)
    program.kill()
    program.communicate()
    wait_until(lambda: not any(line_of(pid) for pid in pids), 60, "the end of the server")
    assert "stopped" in next(tmp_path.glob("*.log")).read_text()


def test_servers_are_forked_although_a_package_changed_a_variable_when_it_was_imported(monkeypatch):
    monkeypatch.setattr(preloaded, "_at_start", {})
    monkeypatch.setattr(preloaded, "wanted", True)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/a/package")
    preloaded.collected()
    assert preloaded.may_start(sys.executable, dict(os.environ), ())
    assert not preloaded.may_start(sys.executable, {**os.environ, "LD_LIBRARY_PATH": "/of/a/test"}, ())
