"""Client processes that send requests, check every answer and record the times. Without torch."""

from __future__ import annotations

import multiprocessing
import time
from array import array
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_START = 90.0  # seconds for a crowd; an interpreter takes its time on few cores
_GRACE = 50.0  # beyond a window's end
_TIMEOUT = 45.0  # of one request
_LARGE = 65536  # bytes; below it ZeroMQ's copying is cheaper than keeping track of who owns the memory

Outputs = Sequence[NDArray[Any]]
Ask = Callable[[NDArray[Any]], tuple[Outputs, int]]


class Sample(NamedTuple):
    """One row and its expected outputs; they may differ by `limit`."""

    inputs: NDArray[Any]
    expected: tuple[NDArray[Any], ...]
    limit: float


class Window(NamedTuple):
    """The answers of all clients in a window: ns of CLOCK_MONOTONIC, ns, versions; (n,) each.

    `client` is the number of the client; the answers of each are in order.
    """

    seconds: float
    answered: NDArray[np.uint64]
    latency: NDArray[np.uint64]
    version: NDArray[np.uint64]
    client: NDArray[np.int64]

    def figures(self) -> dict[str, float]:
        """Requests a second, and microseconds of the median and the 99th percentile."""
        p50, p99 = np.percentile(self.latency, [50, 99]) / 1e3
        return {"requests_per_s": len(self.latency) / self.seconds, "p50_us": float(p50), "p99_us": float(p99)}


class ClientFailed(Exception):
    """A client got a wrong answer, an error, or none."""


# ----
# Ways to ask: made in the client's process from an address and a model's name.


def _served(address: str, model: str) -> Ask:
    from jurybox.client import connect

    handle = connect(address, timeout=_TIMEOUT).model(model)

    def ask(row: NDArray[Any]) -> tuple[Outputs, int]:
        got = handle(row)
        return (tuple(got.values()) if isinstance(got, dict) else (got,)), 0

    return ask


def _versions(address: str, model: str) -> Ask:
    """For a heavy model: the weights in its output are compared with the version of the answer."""
    from jurybox.client import connect

    handle = connect(address, timeout=_TIMEOUT).model(model)

    def ask(row: NDArray[Any]) -> tuple[Outputs, int]:
        reply = handle.infer_reply(row[None])
        outputs = reply.outputs
        version = np.float32(reply.version)
        return (outputs["low"][0] - version, outputs["high"][0] - version), int(reply.version)

    return ask


def _zmq(address: str, model: str) -> Ask:
    """Payloads in the messages, to the plain loop of served.py; all outputs come as float32 in one piece."""
    import zmq

    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, int(_TIMEOUT * 1000))
    socket.connect(address)

    def ask(row: NDArray[Any]) -> tuple[Outputs, int]:
        socket.send(row.data, 0, row.nbytes < _LARGE)
        return (np.frombuffer(socket.recv(), np.float32),), 0

    return ask


_WAYS = {"served": _served, "versions": _versions, "zmq": _zmq}


def _client(way: str, address: str, model: str, samples: list[Sample], index: int, orders: Connection) -> None:
    try:
        ask = _WAYS[way](address, model)
        if way == "zmq":  # it packs the outputs
            samples = [
                Sample(inputs, (np.concatenate([each.reshape(-1) for each in expected]),), limit)
                for inputs, expected, limit in samples
            ]
        orders.send("ready")
        while (order := orders.recv()) is not None:
            orders.send(_window(ask, samples, index, *order))
    except (EOFError, ConnectionError):
        return  # the parent has ended
    except Exception as error:  # noqa: BLE001  whatever it is, it is the finding
        orders.send(f"client {index}: {type(error).__name__}: {error}")


def _window(ask: Ask, samples: list[Sample], index: int, begin: int, end: int) -> tuple[bytes, bytes, bytes]:
    """Send requests from now on; record answers from `begin` to `end`."""
    clock, number = time.monotonic_ns, index
    at, took, versions = array("Q"), array("Q"), array("Q")
    while True:
        inputs, expected, limit = samples[number % len(samples)]
        asked = clock()
        outputs, version = ask(inputs)
        answered = clock()
        for got, wanted in zip(outputs, expected, strict=True):
            if not np.abs(got - wanted).max() <= limit:  # so that NaN fails
                raise ClientFailed(f"sample {number % len(samples)}, version {version}: {got} is not {wanted}")
        if answered >= end:
            return at.tobytes(), took.tobytes(), versions.tobytes()
        if answered >= begin:
            at.append(answered)
            took.append(answered - asked)
            versions.append(version)
        number += 1


class Crowd:
    """A number of clients; use it in a ``with``. A window may use fewer of them.

    Args:
        way: "served", "versions" (of a heavy model) or "zmq".
        models: names; client i uses the one at i modulo their number.
    """

    def __init__(self, way: str, address: str, models: Sequence[str], samples: list[Sample], clients: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._members: list[tuple[Any, Connection]] = []
        for index in range(clients):
            ours, theirs = spawn.Pipe()
            arguments = (way, address, models[index % len(models)], samples, index, theirs)
            process = spawn.Process(target=_client, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def __enter__(self) -> Crowd:
        try:
            self._answers(len(self._members), time.monotonic() + _START)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def window(
        self,
        clients: int,
        seconds: float,
        warm_up: float = 0.3,
        during: Callable[[], Any] | None = None,
        *,
        empty: bool = False,
    ) -> Window:
        """Let the first `clients` send requests for so many seconds; `during` is called meanwhile, in this process.

        Raises:
            ClientFailed: an answer was wrong, or none came; no answer within the window, unless it may be `empty`.
        """
        begin = time.monotonic_ns() + int(warm_up * 1e9)
        end = begin + int(seconds * 1e9)
        for _, orders in self._members[:clients]:
            orders.send((begin, end))
        if during is not None:
            time.sleep(max(0.0, begin / 1e9 - time.monotonic()))
            during()
        found = self._answers(clients, end / 1e9 + _GRACE)
        columns = [np.concatenate([np.frombuffer(one[i], np.uint64) for one in found]) for i in range(3)]
        whose = np.repeat(np.arange(clients), [len(one[0]) // 8 for one in found])
        if not len(columns[0]) and not empty:
            raise ClientFailed(f"no request was answered in a window of {seconds} s")
        return Window(seconds, *columns, whose)

    def close(self) -> None:
        """Let them go; end those that do not."""
        for _, orders in self._members:
            try:
                orders.send(None)
            except OSError:
                continue
        until = time.monotonic() + 3.0
        for process, _ in self._members:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(5.0)
        self._members = []

    def _answers(self, clients: int, deadline: float) -> list[Any]:
        """One answer from each of the first clients, in order."""
        pipes = [orders for _, orders in self._members[:clients]]
        found: dict[Any, Any] = {}
        while len(found) < len(pipes):
            ready = wait([pipe for pipe in pipes if pipe not in found], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ClientFailed(f"{len(pipes) - len(found)} of {len(pipes)} clients said nothing in time")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    found[pipe] = pipe.recv()
                except (EOFError, OSError):
                    found[pipe] = "a client died without a word"
                if isinstance(found[pipe], str) and found[pipe] != "ready":
                    raise ClientFailed(found[pipe])
        return [found[pipe] for pipe in pipes]
