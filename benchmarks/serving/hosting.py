"""A contender's host, seen from the benchmark: start it, grow its crowd, measure windows, end it whatever it does."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving import machine
from benchmarks.serving.cases import Case
from benchmarks.serving.contender import contender
from benchmarks.serving.peers.install import python_of
from benchmarks.serving.results import Window

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT = 180.0
_STOP_TIMEOUT = 30.0
_GRACE = 45.0  # longer than the host's own, which can say more about what went wrong
_CLIENT_START = 60.0
_CLIENT_START_EACH = 3.0  # seconds; 256 processes on two cores take their time


class Failed(Exception):
    """A contender could not be started or measured; says why."""


@dataclass(frozen=True)
class Place:
    """Where things are: samples, environments of the peers."""

    samples: Path
    peers_dir: Path


class Host:
    """One contender, running, for one case. Use it in a ``with``."""

    def __init__(self, name: str, case: Case, clients: int, place: Place) -> None:
        self.name = name
        self.case = case
        self.kind = contender(name)
        self.notes: list[str] = []
        self.log = ""  # the end of what its processes printed, once it has ended
        self._clients: list[int] = []
        self._failed = self._hung = False
        self._shared_memory: set[Path] = set()
        self._folder = Path(tempfile.mkdtemp(prefix="jbench-"))
        self._log_file = self._folder / "log"
        ours, theirs = socket.socketpair()
        python = str(python_of(place.peers_dir, self.kind.peer)) if self.kind.peer else sys.executable
        with self._log_file.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.serving.host", "--name", name, "--case", case.name,
                 "--clients", str(clients), "--folder", str(self._folder), "--samples", str(place.samples),
                 "--orders", str(theirs.fileno())],
                cwd=ROOT, env=_environment(), pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        theirs.close()
        self._orders = Connection(ours.detach())

    def __enter__(self) -> Host:
        try:
            self._answer(START_TIMEOUT, "start")
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def grow(self, clients: int) -> None:
        """Have so many clients, ready for windows."""
        timeout = _CLIENT_START + clients * _CLIENT_START_EACH
        self._orders.send(("grow", clients, timeout))
        self._clients = self._answer(timeout + 10.0, f"start {clients} clients")

    def switch(self, case: Case) -> None:
        """Have the clients that there are ask for another case, where the contender serves several at once."""
        timeout = _CLIENT_START + len(self._clients) * _CLIENT_START_EACH
        self._orders.send(("switch", case.name, len(self._clients), timeout))
        self._answer(timeout + 10.0, f"switch {len(self._clients)} clients to {case.name}")
        self.case = case

    def window(self, seconds: float, warm_up: float, beside: Sequence[Host] = ()) -> Window:
        """Measure for `seconds`, after `warm_up` seconds of the same load.

        The CPU of hosts `beside` it, which only wait meanwhile, is not charged to this one.
        """
        begin = time.monotonic() + warm_up
        end = begin + seconds
        self._orders.send(("window", int(begin * 1e9), int(end * 1e9)))
        time.sleep(max(0.0, begin - time.monotonic()))
        first = machine.read()
        time.sleep(max(0.0, end - time.monotonic()))
        last = machine.read()
        weight, data, counts = self._answer(_GRACE, f"measure {len(self._clients)} clients")
        latencies = np.frombuffer(data, np.uint64)
        if not len(latencies):
            raise Failed(f"no request was answered in a window of {seconds} s")
        waiting = {pid for host in beside for pid in host.processes(last.table)}
        usage = machine.between(first, last, set(self._clients), waiting)
        requests = len(latencies) * weight
        # The bare model is not to be charged for the checking of its answers.
        spent = float(latencies.sum()) / 1e9 if self.kind.one_process else seconds
        self._shared_memory |= machine.shared_memory_of(set(last.ours) - set(self._clients[1:]) - waiting)
        p50, p99, p999 = (float(value) / 1e3 for value in np.percentile(latencies, [50, 99, 99.9]))
        # CPU was read over a stretch that differs from the window by the readings' own length.
        answered = requests * usage.seconds / seconds
        return Window(
            requests_per_s=requests / spent,
            rows_per_s=requests * self.case.rows / spent,
            p50_us=p50,
            p99_us=p99,
            p999_us=p999,
            server_cpu_us=usage.server / answered * 1e6,
            client_cpu_us=usage.clients / answered * 1e6,
            others_cores=usage.others,
            loudest=usage.loudest,
            least_of_a_client=min(counts),
            most_of_a_client=max(counts),
        )

    def unique_mib(self) -> float:
        """Median unique memory of up to eight clients."""
        sizes = [machine.unique_bytes(pid) for pid in self._clients[:8]]
        return float(np.median(sizes)) / 2**20

    def processes(self, table: dict[int, machine.Process]) -> set[int]:
        """The host, its clients and its server."""
        return machine.descendants(table, self._process.pid) | {self._process.pid}

    def memory_mib(self) -> tuple[float, float]:
        """Memory of the server's processes and of all clients', pages that several share counted once."""
        table = machine.processes()
        server = self.processes(table) - set(self._clients) - {self._process.pid}
        return (
            sum(machine.proportional_bytes(pid) for pid in server) / 2**20,
            sum(machine.proportional_bytes(pid) for pid in self._clients) / 2**20,
        )

    def end(self) -> None:
        """Stop the contender; kill what does not stop, remove what it leaves in shared memory, and note both."""
        if self._failed:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT)  # it ends by itself, having said why
        elif not self._hung and self._process.poll() is None:
            try:
                self._orders.send(("stop",))
                self._answer(_STOP_TIMEOUT, "stop")
                self._process.wait(_STOP_TIMEOUT)
            except (Failed, OSError, subprocess.TimeoutExpired) as error:
                self.notes.append(f"{self.name} did not stop by itself: {error}")
        self._orders.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if names := machine.end_descendants():
            self.notes.append(f"{self.name} left processes behind, now ended: {', '.join(names)}")
        left = [path for path in sorted(self._shared_memory) if path.exists()]
        for path in left:
            path.unlink()
        if left:
            self.notes.append(f"{self.name} left {len(left)} files in /dev/shm, now removed: {left[0].name}...")
        self.log = self.log_tail(80)
        shutil.rmtree(self._folder, ignore_errors=True)

    def log_tail(self, lines: int = 12) -> str:
        """The end of what the contender's processes printed."""
        return "\n".join(self._log_file.read_text(errors="replace").splitlines()[-lines:])

    def _answer(self, timeout: float, what: str) -> Any:
        until = time.monotonic() + timeout
        while not self._orders.poll(0.2):
            if self._process.poll() is not None and not self._orders.poll(0):
                raise Failed(f"its host ended with {self._process.returncode} before it could {what}: {self._said()}")
            if time.monotonic() > until:
                self._hung = True
                raise Failed(f"it did not {what} within {timeout:.0f} s: {self._said()}")
        try:
            verdict, value = self._orders.recv()
        except (EOFError, OSError):
            raise Failed(f"its host died when it should {what}: {self._said()}") from None
        if verdict != "ok":
            self._failed = True
            said = self._said()
            raise Failed(str(value) if said in str(value) else f"{value} ({said})")
        return value

    def _said(self) -> str:
        """The last line of its log that tells of an error, or the last of all."""
        lines = [line.strip() for line in self.log_tail(200).splitlines() if line.strip()]
        telling = [line for line in lines if re.search("error|fail|not found|cannot", line, re.IGNORECASE)]
        server = [
            line for line in telling if not line.startswith(("File ", "raise ", "RuntimeError: the server ended"))
        ]
        return (server or telling or lines or ["it printed nothing"])[-1][:300]


def _environment() -> dict[str, str]:
    """One thread for every mathematical library, and this project's benchmarks on the path."""
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("JURYBOX_", "PYTHON", "VIRTUAL_ENV"))
    }
    return {**kept, **single, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "BENCH_OUR_PYTHON": sys.executable}
