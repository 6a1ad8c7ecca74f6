"""The host: one process that starts a contender's server and its clients, and is told when to measure.

Run by the interpreter of the contender's environment, as a child of the benchmark, which reaches it through an
inherited socket. When the benchmark hangs up, everything here ends.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.serving import client
from benchmarks.serving.cases import case_named
from benchmarks.serving.contender import contender

_GRACE = 30.0  # seconds beyond a window's end in which clients have to report


class ClientFailed(Exception):
    """A client answered with an error, died, or said nothing in time."""


class Clients:
    """The clients of one contender; it only ever grows."""

    def __init__(self, name: str, case: str, samples: str) -> None:
        self._name, self._case, self._samples = name, case, samples
        self._context = multiprocessing.get_context("spawn")
        self._members: list[tuple[Any, Connection]] = []

    def grow(self, clients: int, endpoint: Any, timeout: float) -> list[int]:
        """Have so many clients, connected and ready; gives their process ids."""
        fresh = []
        for index in range(len(self._members), clients):
            ours, theirs = self._context.Pipe()
            arguments = (self._name, self._case, self._samples, index, endpoint(index), theirs)
            process = self._context.Process(target=client.run, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
            fresh.append(ours)
        self._answers(fresh, time.monotonic() + timeout)
        return [process.pid for process, _ in self._members]

    def prepare(self, clients: int, timeout: float) -> None:
        """Have every client get ready for windows with so many."""
        self._ask(("prepare", clients), time.monotonic() + timeout)

    def switch(self, case: str, timeout: float) -> None:
        """Have every client ask for another case from now on; it has to be prepared anew."""
        self._case = case
        self._ask(("switch", case), time.monotonic() + timeout)

    def window(self, begin: int, end: int) -> tuple[int, bytes, list[int]]:
        """One measurement: requests per call, all latencies together, and how many each client has."""
        answers = self._ask(("window", begin, end), end / 1e9 + _GRACE)
        return answers[0][0], b"".join(part for _, part in answers), [len(part) // 8 for _, part in answers]

    def dismiss(self) -> None:
        """Hang up on every client and wait a little for them to go."""
        for _, connection in self._members:
            try:
                connection.send(None)
            except OSError:
                continue
        until = time.monotonic() + 5.0
        for process, _ in self._members:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(1.0)

    def _ask(self, order: tuple[Any, ...], deadline: float) -> list[Any]:
        """The same order to every client, one answer from each."""
        connections = [connection for _, connection in self._members]
        for connection in connections:
            connection.send(order)
        return self._answers(connections, deadline)

    def _answers(self, connections: list[Connection], deadline: float) -> list[Any]:
        """One answer from each, in order."""
        found: dict[Connection, Any] = {}
        waiting = set(connections)
        while waiting:
            left = deadline - time.monotonic()
            ready = wait(list(waiting), max(0.0, left))
            if not ready:
                raise ClientFailed(f"{len(waiting)} of {len(connections)} clients said nothing in time")
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    found[connection] = connection.recv()
                except (EOFError, OSError):
                    found[connection] = "a client died without a word: see its log"
                waiting.discard(connection)
                if isinstance(found[connection], str) and found[connection] != "ready":
                    raise ClientFailed(found[connection])
        return [found[connection] for connection in connections]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--case", required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--samples", required=True)
    parser.add_argument("--orders", type=int, required=True)
    arguments = parser.parse_args()
    orders = Connection(arguments.orders)
    kind = contender(arguments.name)
    serving = kind(case_named(arguments.case), arguments.clients, arguments.folder)
    grown = Clients(arguments.name, arguments.case, arguments.samples)
    try:
        serving.start()
        orders.send(("ok", os.getpid()))
        while True:
            match orders.recv():
                case ("grow", clients, timeout):
                    members = grown.grow(1 if kind.one_process else clients, serving.endpoint, timeout)
                    grown.prepare(clients, timeout)
                    orders.send(("ok", members))
                case ("switch", case, clients, timeout):
                    grown.switch(case, timeout)
                    grown.prepare(clients, timeout)
                    orders.send(("ok", None))
                case ("window", begin, end):
                    orders.send(("ok", grown.window(begin, end)))
                case ("stop",):
                    break
        grown.dismiss()
        serving.stop()
        orders.send(("ok", None))
    except EOFError:
        grown.dismiss()
        serving.stop()
        return 1
    except Exception as error:  # noqa: BLE001  reported to the benchmark, which goes on with the others
        traceback.print_exc()
        orders.send(("failed", f"{type(error).__name__}: {error}"))
        grown.dismiss()
        serving.stop()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
