"""The machine of a result, and the C program that measures its memory."""

from __future__ import annotations

import atexit
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
CLOCK = "cpu" if os.environ.get("JURYBOX_BENCH_CLOCK") == "cpu" else "wall"


CLOCKS = {
    "wall": "rows per second",
    "cpu": "the machine was shared with other work: rows per second of CPU time, all threads' added up",
}


def description() -> str:
    return f"{os.cpu_count()}-core {platform.machine()} virtual machine, Linux, Python {platform.python_version()}"


@cache
def _program(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="jurybox-bench-"))
    atexit.register(shutil.rmtree, folder)
    path = folder / name
    subprocess.run(["cc", "-O3", "-pthread", "-o", path, HERE / f"{name}.c"], check=True)
    return path


def reference(row_bytes: int, capacity: int, seconds: float) -> dict[str, float]:
    """Rows/s that C copies and gathers, with one and two threads."""
    command = [str(_program("reference")), str(row_bytes), str(capacity), str(seconds), CLOCK]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def storage(shared: Path, folder: Path, size: int, memory: int = 0) -> dict[str, float]:
    """Seconds for `size` bytes: new shared memory touched, touched again, a file written, read cold.

    Args:
        memory: bytes of memory, if different from the file's.
    """
    command = [str(_program("storage")), str(shared), str(folder), str(memory or size), str(size)]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def remember(part: str, figures: Any) -> None:
    """Keep the results of a part, with date and machine, beside those of others."""
    known = remembered()
    # The load shows whether other programs ran: our two threads make it 2 at most.
    when = f"{time.strftime('%Y-%m-%d %H:%M')}, {description()}, load average {os.getloadavg()[0]:.0f} at the end"
    known[part] = {"when": f"{when}; {CLOCKS[CLOCK]}", "figures": figures}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "figures.json").write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def remembered() -> dict[str, dict[str, Any]]:
    """By part: "when", and "figures" as they were given to `remember`."""
    path = RESULTS / "figures.json"
    known: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return known


def keep(name: str, lines: list[str]) -> None:
    """Print a result and write it to its file."""
    text = "\n".join([f"# {name}", "", *lines, ""])
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
