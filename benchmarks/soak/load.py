"""One client of the soak, a process of its own: asks at a pace, checks every answer, tells how it went every window.

    python -m benchmarks.soak.load ROLE ADDRESS HTTP FILE

It runs until its standard input ends, and appends a line of JSON to FILE for each window.
"""

from __future__ import annotations

import http.client
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.soak.models import WIDTH
from jurybox.client import Error, connect

WINDOW = 20.0  # seconds
FIXED, PUBLISHED = "fixed", "published"  # models
_PATIENCE = 60.0  # seconds; an engine that was killed is back before
_rng = np.random.default_rng()

Call = Callable[[], bool]  # asks once; says whether the answer was right

VICTIM = """
import sys, numpy
from jurybox.client import connect
model = connect(sys.argv[1], transport=sys.argv[2], timeout=60).model("fixed", rows=8)
model.submit(numpy.ones((8, 64), numpy.float32))
print("here", flush=True)
sys.stdin.read()
"""


def scale_of(version: int) -> float:
    """Of the published model's weights: exact in float32, different for neighbouring versions."""
    return 2.0 if version == 0 else 1.0 + version % 1000


def _inputs(rows: int) -> np.ndarray:
    return _rng.integers(-1000, 1000, (rows, WIDTH)).astype(np.float32)


def asking(address: str, transport: str) -> Iterator[Call]:
    """Up to eight rows a call, of a fixed model and of one that is published all the time."""
    with connect(address, transport=transport, timeout=_PATIENCE) as server:
        fixed, published = server.model(FIXED, rows=8), server.model(PUBLISHED, rows=8)

        def call() -> bool:
            x = _inputs(int(_rng.integers(1, 9)))
            if not np.array_equal(fixed.infer(x), 2 * x + 1):
                return False
            reply = published.infer_reply(x)
            return np.array_equal(reply.outputs, np.float32(scale_of(reply.version)) * x + 1)

        yield call


def over_http(host: str) -> Iterator[Call]:
    """The Open Inference Protocol; the metrics now and then."""
    calls = 0

    def ask(path: str, body: str | None = None) -> bytes:
        connection = http.client.HTTPConnection(host, timeout=_PATIENCE)
        try:
            connection.request("POST" if body else "GET", path, body)
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                raise ConnectionError(f"{path}: {answer.status}: {content[:200]!r}")
            return content
        finally:
            connection.close()

    def call() -> bool:
        nonlocal calls
        calls += 1
        if calls % 20 == 0:
            return b"jurybox_requests_total" in ask("/metrics")
        x = _inputs(2)
        tensor = {"name": "observation", "datatype": "FP32", "shape": [2, WIDTH], "data": x.ravel().tolist()}
        answer = json.loads(ask(f"/v2/models/{FIXED}/infer", json.dumps({"inputs": [tensor]})))
        return bool(np.array_equal(np.array(answer["outputs"][0]["data"]), (2 * x + 1).ravel()))

    yield call


def publishing(address: str) -> Iterator[Call]:
    """A learner."""
    with connect(address, timeout=_PATIENCE) as server:
        publisher = server.publisher(PUBLISHED)

        def call() -> bool:
            following = publisher.version + 1
            state = {"scale": np.full(WIDTH, scale_of(following), np.float32)}
            return publisher.publish(state) == following

        yield call


def coming_and_going(addresses: list[tuple[str, str]]) -> Iterator[Call]:
    """Clients that connect, ask once and leave; now and then one that is killed with a request in flight."""
    visits = 0

    def call() -> bool:
        nonlocal visits
        visits += 1
        address, transport = addresses[visits % len(addresses)]
        if visits % 15 == 0:
            return _killed(address, transport)
        with connect(address, transport=transport, timeout=_PATIENCE) as server:
            x = _inputs(3)
            return bool(np.array_equal(server.model(FIXED, rows=4).infer(x), 2 * x + 1))

    yield call


def _killed(address: str, transport: str) -> bool:
    command = [sys.executable, "-c", VICTIM, address, transport]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        said = victim.stdout.readline()
        victim.kill()
        return said == "here\n"


def _calls(role: str, address: str, host: str, tcp: str) -> tuple[Iterator[Call], float]:
    """What a role does, and how often a second."""
    match role:
        case "shm" | "zmq":
            return asking(address, role), 15.0
        case "remote":
            return asking(tcp, "auto"), 10.0
        case "http":
            return over_http(host), 3.0
        case "publisher":
            return publishing(address), 1.0
        case "visitors":
            return coming_and_going([(address, "shm"), (address, "zmq"), (tcp, "auto")]), 1.0
    raise ValueError(f"no such role: {role}")


ROLES = ("shm", "zmq", "remote", "http", "publisher", "visitors")


def run(role: str, address: str, host: str, tcp: str, file: Path) -> None:
    calls, rate = _calls(role, address, host, tcp)
    call = next(calls)
    began = time.monotonic()
    with file.open("a") as out:
        while not _ended():
            out.write(json.dumps(_window(call, rate, began)) + "\n")
            out.flush()
    calls.close()  # type: ignore[attr-defined]


def _window(call: Call, rate: float, began: float) -> dict[str, object]:
    taken, wrong, errors = [], 0, []
    opened = following = time.monotonic()
    while time.monotonic() < opened + WINDOW and not _ended():
        start = time.monotonic()
        try:
            wrong += not call()
            taken.append(time.monotonic() - start)
        except (Error, OSError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        following = max(following + 1 / rate, time.monotonic())
        time.sleep(max(0.0, following - time.monotonic()))
    p50, p99 = np.percentile(taken, (50, 99)) * 1e3 if taken else (float("nan"),) * 2
    return {
        "seconds": round(opened - began, 1),
        "answered": len(taken),
        "wrong": wrong,
        "errors": errors,
        "p50_ms": round(float(p50), 4),
        "p99_ms": round(float(p99), 4),
    }


def _ended() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], Path(sys.argv[5]))
