"""A server on the device: requests of many clients, publications under load, several jurors, failures."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from tests.serving import START, RunningServer, serving, wait_until

from benchmarks.gpu.crowd import ClientFailed, Crowd, Sample, Window
from benchmarks.gpu.measure import Found, Setup
from benchmarks.gpu.models import heavy_state

_MIB = 1 << 20
_HEAVY = "benchmarks.gpu.models:heavy"
# For a heavy model, whose outputs are compared with the version of the answer.
_NO_DIFFERENCE = [Sample(np.zeros(4, np.float32), (np.zeros((), np.float32),) * 2, 0.0)]


@contextlib.contextmanager
def _server(at: Setup, models: dict[str, dict[str, object]], start: float = START) -> Iterator[RunningServer]:
    with serving(at.folder / f"server-{time.monotonic_ns()}", models, start=start, devices=[at.device]) as running:
        yield running


def _samples(name: str, quick: bool) -> list[Sample]:
    """Rows of the small network or the juror with the answers that this process's CPU gives."""
    import torch
    from tests.gpu import models

    served = getattr(models, name)()
    ((_, spec),) = served.inputs.items()
    rng, n = np.random.default_rng(0), 2 if quick else 8
    rows = (
        rng.integers(0, 256, (n, *spec.shape), np.uint8)
        if spec.dtype == "uint8"
        else rng.standard_normal((n, *spec.shape), np.float32)
    )
    with torch.inference_mode():
        outputs = served.module.eval()(torch.from_numpy(rows))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # TF32 and other kernels round differently; another row's answer is further away.
    return [Sample(rows[i], tuple(output[i].numpy() for output in outputs), 5e-3) for i in range(n)]


# ---- requests a second and latencies against clients


def _plain_zmq(name: str, device: str, address: str, most: int) -> None:
    """The process of the plain loop: receive all that waits, one forward, answer each; no deadlines, no restarts."""
    import torch
    import zmq
    from tests.gpu import models

    where, served = torch.device(device), getattr(models, name)()
    gpu = where.type == "cuda"
    module = served.module.eval().to(where)
    ((_, spec),) = served.inputs.items()
    staging = torch.zeros((most, *spec.shape), dtype=getattr(torch, spec.dtype), pin_memory=gpu)
    table, inputs = staging.numpy().view(np.uint8).reshape(most, -1), torch.zeros_like(staging, device=where)
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    copy = table.shape[1] < 65536
    with torch.inference_mode():
        while True:
            socket.poll()
            peers: list[Any] = []
            with contextlib.suppress(zmq.Again):
                while len(peers) < most:
                    peer, body = socket.recv_multipart(zmq.NOBLOCK, copy)
                    table[len(peers)] = np.frombuffer(body if isinstance(body, bytes) else body.buffer, np.uint8)
                    peers.append(peer)
            if not peers:
                continue
            rows = len(peers)
            inputs[:rows].copy_(staging[:rows], non_blocking=True)
            outputs = module(inputs[:rows])
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            packed = torch.cat([output.reshape(rows, -1) for output in outputs], 1).cpu().numpy()
            for i, peer in enumerate(peers):
                socket.send_multipart((peer, packed[i].data.cast("B")), copy=True)


@contextlib.contextmanager
def _zmq_server(at: Setup, name: str, most: int) -> Iterator[str]:
    address = f"ipc://{at.folder}/plain-{name}"
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=_plain_zmq, args=(name, at.device, address, most), daemon=True)
    process.start()
    try:
        yield address
    finally:
        process.kill()
        process.join(10.0)


def _rates(at: Setup, found: Found, name: str, most: int) -> None:
    """A crowd of each size at the server with graphs, at the one without, and at plain ZeroMQ."""
    samples, clients = _samples(name, at.quick), at.clients
    model: dict[str, object] = {
        "factory": f"tests.gpu.models:{name}",
        "max_batch": most,
        "rows": max(4 * max(clients), 2 * most),
        "lane_rows": 2,
    }
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(_server(at, {"graphs": model, "eager": {**model, "cuda_graphs": False}}))
        plain = stack.enter_context(_zmq_server(at, name, most))
        ways = {
            "graphs": ("served", running.address, "graphs"),
            "eager": ("served", running.address, "eager"),
            "zmq": ("zmq", plain, ""),
        }
        for label, (way, address, served) in ways.items():
            with Crowd(way, address, [served], samples, max(clients)) as crowd:
                crowd.window(1, min(0.5, at.window))  # the first requests meet cold code
                for n in clients:
                    figures = crowd.window(n, at.window).figures()
                    found.figures |= {f"{label}_{key}_{n}": value for key, value in figures.items()}
                    for key, title in (
                        ("requests_per_s", "requests a second"),
                        ("p50_us", "p50, us"),
                        ("p99_us", "p99, us"),
                    ):
                        curve = found.curves.setdefault(f"{name}: {title}", {}).setdefault(label, [])
                        curve.append((n, figures[key]))
        if at.gpu and "no CUDA graphs" in running.text():
            found.notes.append("the graphs could not be captured: see the log")
        if "not page-locked" in running.text():
            found.notes.append("the arena could not be page-locked")
    many = max(n for n in clients if n <= 16)
    for label in ("graphs", "eager"):
        found.figures[f"{label}_over_zmq_{many}"] = (
            found.figures[f"{label}_requests_per_s_{many}"] / found.figures[f"zmq_requests_per_s_{many}"]
        )
    found.figures["most_requests_per_s"] = max(
        value for key, value in found.figures.items() if key.startswith(("graphs_requests", "eager_requests"))
    )


def vector(at: Setup, found: Found) -> None:
    """float32[52] to logits[145] and value, one row a request."""
    _rates(at, found, "vector", 64)


def image(at: Setup, found: Found) -> None:
    """uint8[384,384,3] to a score, one row a request."""
    _rates(at, found, "image", 16)


# ---- weights


class _Learner:
    """Publishes version v as weights that are all v."""

    def __init__(self, running: RunningServer, model: str, megabytes: float) -> None:
        self._client = running.connect()
        self._publisher = self._client.publisher(model)
        self._state = {name: np.zeros(shape, np.float32) for name, shape in heavy_state(megabytes).items()}

    def publish(self) -> tuple[int, int, float]:
        """One more; gives its version, when it began (ns of CLOCK_MONOTONIC) and its milliseconds."""
        version = self._publisher.version + 1
        for array in self._state.values():
            array.fill(version)
        began = time.monotonic_ns()
        self._publisher.publish(self._state)
        return version, began, (time.monotonic_ns() - began) / 1e6

    def close(self) -> None:
        self._client.close()


def publication(at: Setup, found: Found) -> None:
    """Weights of 100 MB and of 1.2 GB published under load: the time, and the longest time without an answer."""
    smaller = 100 if at.quick else 1
    for label, nbytes, times, apart in (("100mb", 100e6, 8, 0.5), ("1200mb", 1200e6, 3, 1.5)):
        took = _published(at, nbytes / _MIB / smaller, 2 if at.quick else times, 0.3 if at.quick else apart)
        found.figures |= {f"{label}_{key}": value for key, value in took.items()}
    found.notes.append("a pause: the longest time in which nobody is answered around a change, less the usual")


def _published(at: Setup, megabytes: float, times: int, apart: float) -> dict[str, float]:
    """Publish so many times, `apart` seconds between, so that publications can be distinguished."""
    model: dict[str, object] = {
        "factory": _HEAVY,
        "args": {"megabytes": megabytes},
        "publish": "double_buffer",
        "max_batch": 16,
    }
    published: list[tuple[int, int, float]] = []
    with _server(at, {"heavy": model}) as running, contextlib.closing(_Learner(running, "heavy", megabytes)) as learner:

        def learn() -> None:
            for _ in range(times):
                published.append(learner.publish())
                time.sleep(apart)

        with Crowd("versions", running.address, ["heavy"], _NO_DIFFERENCE, 4) as crowd:
            quiet = crowd.window(4, at.window / 2)
            seen = crowd.window(4, times * (apart + 0.2 + megabytes / 1200), during=learn)
    return pauses(quiet, seen, published)


def pauses(quiet: Window, seen: Window, published: list[tuple[int, int, float]]) -> dict[str, float]:
    """Of publications (version, ns at which it began, its ms): medians and worst, in milliseconds.

    adopted: from the publication's begin to the first answer of its version.
    switch: the time between the last answer of an earlier version and the first of this one.
    pause: the longest time without an answer from the publication's begin to 50 ms after its adoption.
    """
    order = np.argsort(seen.answered, kind="stable")
    at, versions = seen.answered[order].astype(np.int64), seen.version[order]
    usual = float(np.median(np.diff(np.sort(quiet.answered).astype(np.int64)))) if len(quiet.answered) > 1 else 0.0
    adopted, switch, longest = [], [], []
    for version, began, _ in published:
        first = int(np.searchsorted(np.maximum.accumulate(versions), version))
        if first == 0 or first == len(at):
            continue  # never seen, or before any answer
        adopted.append((at[first] - began) / 1e6)
        switch.append(max(0.0, float(at[first] - at[first - 1]) - usual) / 1e6)
        low, high = np.searchsorted(at, began), np.searchsorted(at, at[first] + 50_000_000)
        gaps = np.diff(at[max(0, low - 1) : high])
        longest.append(max(0.0, float(gaps.max()) - usual) / 1e6 if len(gaps) else 0.0)
    if not adopted:
        raise ClientFailed(f"{len(published)} versions were published, and none was answered with")
    quiet_gaps = np.diff(np.sort(quiet.answered).astype(np.int64)) / 1e6
    return {
        "publish_ms": float(np.median([ms for _, _, ms in published])),
        "adopted_ms": float(np.median(adopted)),
        "switch_ms": float(np.median(switch)),
        "pause_ms": float(np.median(longest)),
        "pause_worst_ms": max(longest),
        "usual_gap_ms": usual / 1e6,
        "quiet_worst_gap_ms": float(quiet_gaps.max()) if len(quiet_gaps) else 0.0,
        "seen": len(adopted),
    }


def torn(at: Setup, found: Found) -> None:
    """A learner that publishes without a pause; every answer looks at every weight, and a mixture is a failure."""
    megabytes = 1.0 if at.quick else 32.0
    clients, seconds = 2 if at.quick else 8, at.window * (1 if at.quick else 4)
    model: dict[str, object] = {
        "factory": _HEAVY,
        "args": {"megabytes": megabytes, "every": 1},
        "publish": "double_buffer",
        "max_batch": 16,
    }
    made: list[tuple[int, int, float]] = []
    with _server(at, {"heavy": model}) as running, contextlib.closing(_Learner(running, "heavy", megabytes)) as learner:

        def hammer() -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                made.append(learner.publish())

        with Crowd("versions", running.address, ["heavy"], _NO_DIFFERENCE, clients) as crowd:
            window = crowd.window(clients, seconds, during=hammer)
    found.figures |= {
        "torn_reads": 0.0,  # a client that met one has failed above
        "publications": len(made),
        "versions_seen": len(np.unique(window.version)),
        "answers": len(window.answered),
    }
    if found.figures["versions_seen"] < 2:
        raise ClientFailed(f"{len(made)} versions were published, the answers are of one: nothing was proven")


# ---- several jurors on one device


def jurors(at: Setup, found: Found) -> None:
    """The same crowd at one juror, and spread over four of them on the same device."""
    samples, clients, n = _samples("image", at.quick), 4 if at.quick else 16, 2 if at.quick else 4
    model: dict[str, object] = {"factory": "tests.gpu.models:image", "max_batch": 16, "rows": 64, "lane_rows": 2}
    names = [f"juror{i}" for i in range(n)]
    with _server(at, dict.fromkeys(names, model)) as running:
        for label, asked in (("one", names[:1]), ("all", names)):
            with Crowd("served", running.address, asked, samples, clients) as crowd:
                window = crowd.window(clients, at.window)
            found.figures |= {f"{label}_{key}": value for key, value in window.figures().items()}
            counts = np.bincount(window.client % len(asked), minlength=len(asked))
            found.figures[f"{label}_least_share"] = float(counts.min() / counts.sum() * len(asked))
        with running.connect() as client:
            found.figures["device_mib"] = client.status()["memory"]["device_bytes"] / _MIB
    found.figures["jurors"] = n
    found.figures["all_over_one"] = found.figures["all_requests_per_s"] / found.figures["one_requests_per_s"]


# ---- failures


def memory(at: Setup, found: Found) -> None:
    """Batches that do not fit into the device's memory are halved until they do; all answers are right."""
    total = _device_memory()[1] if at.gpu else 64e9
    hunger = total / 6  # four rows fit into the free memory, sixteen do not
    asks = 16
    model: dict[str, object] = {
        "factory": "benchmarks.gpu.models:hungry", "args": {"enough": total * 0.8}, "cuda_graphs": False,
        "max_batch": asks, "min_batch": asks, "max_wait_us": 200_000, "lane_rows": 1, "rows": 2 * asks,
    }  # fmt: skip
    wrong, took = [], []
    with _server(at, {"hungry": model}) as running, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(running.connect()) for _ in range(asks)]
        handles = [client.model("hungry", rows=1) for client in clients]
        for round_ in range(2 if at.quick else 5):
            began = time.monotonic()
            rows = [np.array([[hunger, i, round_, 1]], np.float32) for i in range(asks)]
            tickets = [handle.submit(row, timeout=60.0) for handle, row in zip(handles, rows, strict=True)]
            for i, ticket in enumerate(tickets):
                got = float(np.asarray(ticket.result(timeout=60.0).outputs).reshape(-1)[0])
                if abs(got - (i + round_ + 1)) > 1e-3:
                    wrong.append((i, round_, got))
            took.append((time.monotonic() - began) * 1e3)
        halved = running.text().count("out of memory, batches halved")
    found.figures |= {"halved": halved, "wrong": len(wrong), "first_round_ms": took[0], "last_round_ms": took[-1]}
    if wrong:
        raise ClientFailed(f"answers of rows that were computed in halves are wrong: {wrong[:3]}")
    if not halved:
        raise ClientFailed("every batch fitted: no halving was proven")


def killed(at: Setup, found: Found) -> None:
    """kill -9 of the engine under load: every request is answered, rightly, and the device gets its memory back."""
    samples, clients = _samples("vector", at.quick), 2 if at.quick else 8
    model: dict[str, object] = {"factory": "tests.gpu.models:vector", "max_batch": 64, "lane_rows": 2}
    kills = 1 if at.quick else 3
    before = _device_memory()[0] if at.gpu else 0
    back: list[float] = []
    with (
        _server(at, {"vector": model}) as running,
        Crowd("served", running.address, ["vector"], samples, clients) as crowd,
    ):
        crowd.window(clients, min(1.0, at.window))
        first = _device_memory()[0] if at.gpu else 0

        def kill() -> None:
            pid = running.pids()["engine-0"]
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            with running.connect() as client:
                wait_until(lambda: running.pids().get("engine-0", pid) != pid, 60.0, "another engine")
                client.model("vector")(samples[0].inputs)  # waits for it
            back.append(time.monotonic() - began)

        for _ in range(kills):
            # Requests in flight outlast the window; each client's last one is answered by the next engine.
            crowd.window(clients, 1.0, during=kill, empty=True)
            crowd.window(clients, min(1.0, at.window))
        last = _device_memory()[0] if at.gpu else 0
    found.figures |= {"kills": kills, "back_s": float(np.median(back)), "back_worst_s": max(back)}
    if at.gpu:
        wait_until(
            lambda: before - _device_memory()[0] < 64 * _MIB, 30.0, "the device's memory back after the server's end"
        )
        found.figures |= {
            "held_by_server_mib": (before - first) / _MIB,
            "lost_by_kills_mib": (first - last) / _MIB,
            "lost_at_the_end_mib": (before - _device_memory()[0]) / _MIB,
        }


def _device_memory() -> tuple[int, int]:
    """Free and total bytes of the first device."""
    import torch

    return torch.cuda.mem_get_info(0)
