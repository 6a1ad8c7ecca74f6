"""No process outlives its parent, and its end is seen at once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jurybox.processes import spawn


def test_a_child_whose_parent_died_early_ends_too():
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.processes.control_pipe_roles", "parent"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    child, end = Path(f"/proc/{int(done.stdout)}"), time.monotonic() + 20
    while child.exists() and (child / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end, "it outlived its parent"
        time.sleep(0.05)


def test_a_program_that_a_child_has_started_does_not_keep_its_pipe_open():
    process, pipe = spawn("tests.unit.processes.control_pipe_roles", ["helped"])
    helper = pipe.receive(60)["pid"]
    try:
        assert process.wait(60) == 0
        with pytest.raises(EOFError):
            pipe.receive(60)
    finally:
        os.kill(helper, signal.SIGKILL)
        pipe.close()
