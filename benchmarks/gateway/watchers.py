"""Do watchers slow an engine down?

Two clients send one row at a time over the shm transport, without a break (`full`) or with a pause after each answer
(`paced`). Windows with and without watchers take turns; with them, /metrics is scraped every 100 ms and the live page's
stream is read. The result is the clients' 99th percentile: the median over windows of either kind, and of ratios of
adjacent windows. The figures include the gateway's work for the watchers, but hardly the watchers themselves, which are
rarely on the server's host and run with nice 19.

    python -m benchmarks.gateway.watchers --seconds 100 --out benchmarks/gateway/results
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from jurybox.client import connect

CLIENTS = 2
SCRAPE = 0.1  # seconds
WARM_UP = 3.0
LOADS = {"paced": 0.001, "full": 0.0}  # seconds of pause after an answer
_START = 60.0


def ask(address: str, pause: float, until: float, answers: Any) -> None:
    """Run a client; return the start and the seconds of every call as two arrays."""
    asked, taken = [], []
    with connect(address, transport="shm", timeout=20) as server:
        model = server.model("double", rows=1)
        row = np.ones(4, np.float32)
        while (began := time.monotonic()) < until:
            model(row)
            asked.append(began)
            taken.append(time.monotonic() - began)
            if pause:
                time.sleep(pause)
    answers.send((np.array(asked), np.array(taken)))


def watch(host: str, on: Any, until: float, done: Any) -> None:
    """While `on` is set: a scrape every SCRAPE seconds and one reader of the stream. Sends back how many of each."""
    os.nice(19)  # Prometheus and a browser rarely run on the server's host
    counts = {"scrapes": 0, "samples": 0}

    def scrape() -> None:
        connection = http.client.HTTPConnection(host, timeout=10)
        while time.monotonic() < until:
            if not on.wait(0.2):
                continue
            began = time.monotonic()
            connection.request("GET", "/metrics")
            connection.getresponse().read()
            counts["scrapes"] += 1
            time.sleep(max(0.0, SCRAPE - (time.monotonic() - began)))

    def read() -> None:
        while time.monotonic() < until:
            if not on.wait(0.2):
                continue
            connection = http.client.HTTPConnection(host, timeout=10)
            connection.request("GET", "/events")
            answer = connection.getresponse()
            while on.is_set() and time.monotonic() < until:
                counts["samples"] += answer.readline().startswith(b"event: sample")
            connection.close()

    threads = [threading.Thread(target=target) for target in (scrape, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.send(counts)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A server with one small model; gives its address."""
    address = f"ipc://{folder}/engine"
    config = folder / "server.toml"
    config.write_text(
        f'[server]\naddress = "{address}"\nhttp = "127.0.0.1:0"\ngrpc = ""\ndevices = ["cpu"]\n'
        '[models.double]\nfactory = "benchmarks.gateway.models:double"\n'
    )
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "jurybox.server.cli", "serve", str(config)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with connect(address, timeout=_START) as server:
            server.model("double", timeout=_START).close()
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def measure(address: str, host: str, pause: float, seconds: float, window: float) -> dict[str, Any]:
    """One load: milliseconds at the 99th percentile and the median, with watchers and without."""
    spawn = multiprocessing.get_context("spawn")
    on, began = spawn.Event(), time.monotonic() + WARM_UP
    until = began + seconds
    processes, pipes = [], []
    for target, arguments in [(ask, (address, pause, until))] * CLIENTS + [(watch, (host, on, until))]:
        ours, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=target, args=(*arguments, theirs)))
        processes[-1].start()
        pipes.append(ours)
    windows: list[tuple[bool, float, float]] = []
    time.sleep(max(0.0, began - time.monotonic()))
    while time.monotonic() + window <= until:
        # Pairs begin with either kind in turn, so that drift affects both equally.
        watched = len(windows) % 4 in (1, 2)
        on.set() if watched else on.clear()
        time.sleep(0.3)  # until all have noticed
        start = time.monotonic()
        time.sleep(window - 0.3)
        windows.append((watched, start, time.monotonic()))
    results = [pipe.recv() if pipe.poll(seconds + 60) else None for pipe in pipes]
    for process in processes:
        process.join(20)
    *asked, counts = results
    when, taken = (np.concatenate([part[i] for part in asked]) for i in (0, 1))
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for watched, start, end in windows[: len(windows) // 2 * 2]:
        inside = taken[(when >= start) & (when < end)] * 1e3
        p50, p99 = np.percentile(inside, [50, 99])
        found[watched].append({"p50_ms": float(p50), "p99_ms": float(p99), "calls_per_s": len(inside) / (end - start)})
    ratios = [a["p99_ms"] / b["p99_ms"] for a, b in zip(found[True], found[False], strict=True)]
    return {
        "pairs": len(ratios),
        **counts,
        **{
            kind: {key: round(statistics.median(one[key] for one in found[watched]), 4) for key in found[watched][0]}
            for watched, kind in ((False, "alone"), (True, "watched"))
        },
        "p99_ratio_of_medians": round(
            statistics.median(one["p99_ms"] for one in found[True])
            / statistics.median(one["p99_ms"] for one in found[False]),
            3,
        ),
        "p99_median_of_ratios": round(statistics.median(ratios), 3),
        "p99_ratio_quartiles": [round(value, 3) for value in np.percentile(ratios, [25, 75]).tolist()],
    }


def main() -> None:
    """Measure every load, and print or write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=100.0, help="of each load")
    parser.add_argument("--window", type=float, default=2.0, help="seconds")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--out", type=Path, help="folder for a file watchers-DATE-TIME.json")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "when": datetime.now().isoformat(timespec="minutes"),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "kernel": platform.release()},
        "command": " ".join(["python", "-m", "benchmarks.gateway.watchers", *sys.argv[1:]]),
        "load_average_before": os.getloadavg(),
    }
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as address:
        with connect(address) as server:
            host = server.status()["server"]["http"]
        for load in options.loads:
            result[load] = measure(address, host, LOADS[load], options.seconds, options.window)
    result["load_average_after"] = os.getloadavg()
    text = json.dumps(result, indent=2) + "\n"
    sys.stdout.write(text)
    if options.out:
        (options.out / f"watchers-{result['when'].replace('T', '-').replace(':', '')}.json").write_text(text)


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
