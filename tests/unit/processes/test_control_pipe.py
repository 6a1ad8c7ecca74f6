"""No process outlives its parent."""

import subprocess
import sys
import time
from pathlib import Path


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
