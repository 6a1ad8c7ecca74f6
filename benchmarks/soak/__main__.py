"""Serve mixed load for as long as told, and say whether anything grew.

    python -m benchmarks.soak --seconds 1800 --out benchmarks/soak/results
    python -m benchmarks.soak --seconds 600 --kill-every 60        # an engine dies every minute

Through both transports of the host, ZeroMQ from elsewhere and HTTP come requests whose every answer is checked; a
learner publishes once a second; clients come, ask and leave, and some are killed with a request in flight. Some thirty
requests a second: what a soak looks for are leaks, which go by the number of things that happen, so a quiet machine
is not needed. The exit status is 0 where nothing was wrong, nothing grew and nothing was left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.serving import RunningServer, segments, serving

from benchmarks.soak.load import FIXED, PUBLISHED, ROLES
from benchmarks.soak.report import draw, tables, write_samples, write_windows
from benchmarks.soak.sampling import Sample, SharedSample, take
from benchmarks.soak.verdict import judge
from jurybox.protocol.segment import directory

_EVERY = 10.0  # seconds between two samples, at most
_SAMPLES = 60  # of a short run at least
_MODELS = {
    FIXED: {"factory": "benchmarks.soak.models:scaled", "max_batch": 16, "rows": 512},
    PUBLISHED: {"factory": "benchmarks.soak.models:scaled", "max_batch": 16, "rows": 512, "publish": "double_buffer"},
}


@contextmanager
def clients(server: RunningServer, folder: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """A process for every role, ended in order."""
    where = [server.address, server.listening("http"), f"tcp://{server.listening('tcp')}"]
    started = {}
    try:
        for role in ROLES:
            command = [sys.executable, "-m", "benchmarks.soak.load", role, *where, str(folder / f"{role}.jsonl")]
            started[role] = subprocess.Popen(command, stdin=subprocess.PIPE)
        yield started
    finally:
        for process in started.values():
            assert process.stdin is not None
            process.stdin.close()
        for role, process in started.items():
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                print(f"{role} did not end", flush=True)
                process.kill()
                process.wait()


def soak(seconds: float, kill_every: float, folder: Path) -> dict[str, Any]:
    """Run it; gives everything that was seen."""
    samples: list[Sample] = []
    shared: list[SharedSample] = []
    windows: dict[str, list[dict[str, Any]]] = {}
    kills = 0
    listening = {"http": "127.0.0.1:0", "tcp": "127.0.0.1:0"}
    with serving(folder, _MODELS, **listening) as server:
        with clients(server, folder) as running:
            began = time.monotonic()
            next_kill = began + kill_every if kill_every else float("inf")
            while (now := time.monotonic()) < began + seconds:
                processes, memory = take(server, began)
                samples += processes
                shared.append(memory)
                if dead := [role for role, process in running.items() if process.poll() is not None]:
                    raise RuntimeError(f"clients ended: {', '.join(dead)}; see {folder}")
                if now >= next_kill:
                    next_kill = now + kill_every * random.uniform(0.7, 1.3)
                    os.kill(server.pids()["engine-0"], signal.SIGKILL)
                    kills += 1
                time.sleep(min(_EVERY, seconds / _SAMPLES, max(0.0, began + seconds - time.monotonic())))
        status = server.stop()
        log = server.text()
    for role in ROLES:
        windows[role] = [json.loads(line) for line in (folder / f"{role}.jsonl").read_text().splitlines()]
    return {
        "samples": samples,
        "shared": shared,
        "windows": windows,
        "kills": kills,
        "status": status,
        "left": sorted(segments()),
        "deaths": log.count("child died"),
        "log": log,
    }


def complaints(seen: dict[str, Any], rows: list[Any]) -> list[str]:
    """What was not as it should be, in words."""
    found = [
        f"{row.of}: {row.quantity} grows by {row.trend.rise:.3g}" for row in rows if row.counts and row.trend.grows
    ]
    for role, lines in seen["windows"].items():
        if wrong := sum(line["wrong"] for line in lines):
            found.append(f"{role}: {wrong} wrong answers")
        if not sum(line["answered"] for line in lines):
            found.append(f"{role}: no answers at all")
        errors = [error for line in lines for error in line["errors"]]
        kinds = "; ".join(f"{count} x {text}" for text, count in Counter(errors).most_common(3))
        # While an engine is away the gateway says so, and HTTP has nobody who would ask again.
        if errors and not (seen["kills"] and role == "http"):
            found.append(f"{role}: {len(errors)} errors: {kinds}")
    if seen["deaths"] != seen["kills"]:
        found.append(f"{seen['deaths']} deaths of children, {seen['kills']} were meant")
    if seen["left"]:
        found.append(f"left in shared memory: {', '.join(seen['left'])}")
    if seen["status"]:
        found.append(f"the server ended with {seen['status']}")
    return found


def _cores(samples: list[Sample]) -> float:
    """Cores that the server's processes used."""
    lives: dict[int, list[Sample]] = {}
    for sample in samples:
        lives.setdefault(sample.pid, []).append(sample)
    seconds = max(sample.seconds for sample in samples)
    return sum(life[-1].cpu - life[0].cpu for life in lives.values()) / seconds


def _revision() -> str:
    if given := os.environ.get("JURYBOX_REVISION"):
        return given
    asked = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SOAK_SECONDS", "1800")))
    parser.add_argument(
        "--kill-every", type=float, default=0.0, help="seconds between two deaths of the engine; 0: none"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/soak/results"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that server and clients are ended in order
    options.out.mkdir(parents=True, exist_ok=True)
    date = datetime.now()
    with (
        tempfile.TemporaryDirectory(prefix="jurybox-soak-") as folder,
        tempfile.TemporaryDirectory(prefix="jurybox-soak-", dir=directory()) as memory,
    ):
        os.environ["JURYBOX_SHM_DIR"] = memory  # a folder of its own: what is left there is this server's
        began = os.times()
        seen = soak(options.seconds, options.kill_every, Path(folder))
        ended = os.times()
    rows = judge(seen["samples"], seen["shared"], seen["windows"])
    wrong = complaints(seen, rows)
    used = (ended.children_user + ended.children_system) - (began.children_user + began.children_system)
    every = min(_EVERY, options.seconds / _SAMPLES)
    facts = {
        "date": f"{date:%Y-%m-%d %H:%M}, {options.seconds:.0f} s, a sample every {every:.3g} s",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.release()}",
        "revision": _revision(),
        "command": f"`python -m benchmarks.soak --seconds {options.seconds:.0f} --kill-every {options.kill_every:.0f}`",
        "cores used": f"{_cores(seen['samples']):.2f} by the server, {used / (ended[4] - began[4]):.2f} in all",
        "engines killed": seen["kills"],
        "left behind": len(seen["left"]),
        "verdict": "; ".join(wrong) or "no wrong answer, no error, no growth beyond noise, nothing left behind",
    }
    name = f"{date:%Y-%m-%d-%H%M}"
    write_samples(options.out / f"{name}-samples.csv", seen["samples"], seen["shared"])
    write_windows(options.out / f"{name}-windows.csv", seen["windows"])
    if wrong:
        (options.out / f"{name}.log").write_text(seen["log"])
    text = tables(facts, rows, seen["windows"])
    (options.out / f"{name}.md").write_text(text)
    draw(
        options.out / f"{name}.svg",
        f"{facts['date']}: {facts['verdict']}",
        seen["samples"],
        seen["shared"],
        seen["windows"],
    )
    print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
