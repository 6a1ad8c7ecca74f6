"""Where an engine's time goes around the forward of a lone client: each part of its loop, in us a request.

    python -m benchmarks.serving.engine_turn [--requests 10000] [--json]

The loop is the engine's own (jurybox.server.engine.process), in this process and thread, with real rings, a real
scoreboard and an arena. Only its wait for tickets is replaced: there the client reads its answer and posts its next
ticket. First the loop runs untouched, for its total; then every part stands in a clock, whose own cost is measured and
taken off. A part's time is without that of the parts it calls. All times are means of the nine shortest in ten, so that
other programs on the machine weigh little.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.serving.factories import model
from jurybox import native
from jurybox.processes import ControlPipe
from jurybox.protocol.arena import Arena, ArenaLayout
from jurybox.protocol.scoreboard import Scoreboard
from jurybox.protocol.segment import segment_name
from jurybox.protocol.shm_rings import ShmRings
from jurybox.server.engine.process import EngineProcess
from jurybox.server.engine.served import Served
from jurybox.server.supervisor.leases import Leases
from jurybox.server.supervisor.segment_server import SegmentServer

_clock = time.perf_counter_ns
# (part, where it is: names from the engine's process on, "" a callable of the process itself)
PARTS = (
    ("inbox: rings", "_engine.transports.0.collect"),
    ("inbox: ZeroMQ", "_engine.transports.1.collect"),
    ("admission", "_engine._admission.admit"),
    ("arrivals", "_engine._tracker.came"),
    ("queue", "queue.push"),
    ("queue", "queue.expired"),
    ("queue", "queue.take"),
    ("scoreboard: expected wait", "_engine._show_wait"),
    ("rows in and out", "served.run"),
    ("forward", "served.module.forward"),
    ("answer: leave the admission", "_engine._admission.leave"),
    ("answer: rings", "_engine.transports.0.reply"),
    ("arrivals", "_engine._tracker.answered"),
    ("counters", "counters.batch"),
    ("cost of batches", "cost.observe"),
    ("heartbeat", "_beat"),
    ("orders", "_obey"),
    ("before it sleeps", "_engine.ready_in"),
    ("ZeroMQ: is there anything", "_zmq.pending"),
    ("before it sleeps", "_zmq.may_sleep"),
    ("client", "_shm.wait"),
)


class Clock:
    """Times calls, each without the calls inside it."""

    def __init__(self) -> None:
        self.spent: dict[str, list[int]] = {}
        self._inside = 0

    def around(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, in the clock; several of one part are told apart by their number."""
        while part in self.spent:
            part += "+"
        spent = self.spent.setdefault(part, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inside = self._inside, 0
            began = _clock()
            try:
                return call(*args, **kwargs)
            finally:
                whole = _clock() - began
                spent.append(whole - self._inside)
                self._inside = outer + whole

        return timed

    @staticmethod
    def cost() -> tuple[float, float]:
        """Ns that a timed call adds to its own part, and to the one around it."""
        inner = Clock()
        empty = inner.around("empty", lambda: None)
        whole = []
        for _ in range(20_000):
            began = _clock()
            empty()
            whole.append(_clock() - began)
        own = _trimmed(inner.spent["empty"])
        return own, _trimmed(whole) - own


class _Stand:
    """In the place of a native object: its methods, some of them timed."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._other, name)
        if name != "away":  # which changes
            self.__dict__[name] = value
        return value


class Bench:
    """An engine's process around this thread, and lanes that ask."""

    def __init__(self) -> None:
        self._server_id = f"turn{secrets.token_hex(4)}"
        self._segments = SegmentServer(self._server_id)
        make = self._segments.create
        self._scoreboard = Scoreboard.create(segment_name(self._server_id, "scoreboard", 0), 1, time.time(), make)
        ours, theirs = socket.socketpair()
        self._supervisor = ControlPipe(ours.detach())
        self._rings = self._segments.create_rings(segment_name(self._server_id, "rings", 1), native.RINGS_BYTES)
        self._folder = tempfile.TemporaryDirectory(prefix="jurybox-turn-")
        orders = {
            "index": 0,
            "incarnation": 7,
            "scoreboard": self._scoreboard.segment.name,
            "rings": self._rings.segment.name,
            "timings": "",
            "spin_us": 200,
            "address": f"ipc://{Path(self._folder.name) / 'engine'}",
            "device": "cpu",
            "threads": 1,
            "device_memory_mib": 0,
            "memory": 0,
            "paused": False,
            "bindings": [],
            "log_level": "error",
            "log_format": "text",
            "folder": "",
            "factories": [],
            "models": [],
            "refused": [],
        }
        self.process: Any = EngineProcess(ControlPipe(theirs.detach()), orders)
        served_model = model("vector")
        spec = served_model.spec("vector")
        arena = Arena.create(segment_name(self._server_id, "arena", 0), ArenaLayout(spec, 256))
        self._arena = arena
        self.served = Served("vector", served_model, arena.inputs, arena.outputs, 64, columns=arena.columns)
        self.engine: Any = self.process._engine
        self.engine.install(0, self.served)
        self.slot: Any = self.engine.slots[0]
        leases = Leases(self._scoreboard, lambda lane: False, time.monotonic)
        attached = ShmRings.attach(self._rings.segment.name)
        self._attached = attached
        memory = attached.segment.array(np.uint8, (native.RINGS_BYTES,))
        lane = leases.grant(0, 1, arena.rows)
        self._first = lane.first
        self._client = native.ShmRingsClient(memory, lane.lane, lane.lease, attached.pipe, 0)
        self._asked = self._left = self._posted = 0
        self.turns: list[int] = []  # ns from one posting to the next look for its answer
        self.process._shm.wait = self._exchange  # type: ignore[assignment]

    def _exchange(self, _: float = 0.0) -> bool:
        """In the place of the engine's wait: read the answer, post a ticket."""
        came = _clock()
        if self._posted:
            self.turns.append(came - self._posted)
        if self._asked and len(self._client.receive(0.0)) != 1:
            raise RuntimeError("no answer")
        self._client.settled(self._asked)
        now = time.monotonic_ns()
        self._asked += 1
        self._client.submit(self._asked, self._first, 1, now, now + 10**10, 0, 7)
        self._left -= 1
        if self._left < 0:
            self.process._stopped = True
        self._posted = _clock()
        return True

    def requests(self, n: int) -> None:
        """Let the client ask n times."""
        self._left, self.process._stopped, self._posted = n, False, 0
        with torch.inference_mode():
            self.process._loop()

    def time_parts(self, clock: Clock) -> None:
        """From now on, every part stands in a clock."""
        engine, process = self.engine, self.process
        owner: Any
        slot = self.slot
        for owner, name in ((engine, "_admission"), (engine, "_tracker"), (slot, "cost")):
            setattr(owner, name, _Stand(getattr(owner, name)))
        engine._batches._tracker = engine._tracker
        roots = {"queue": slot.queue, "served": self.served, "counters": slot.counters, "cost": slot.cost}
        for part, path in PARTS:
            *owners, name = path.split(".")
            owner = process
            for step in owners:
                owner = owner[int(step)] if step.isdigit() else roots[step] if step in roots else getattr(owner, step)
            setattr(owner, name, clock.around(part, getattr(owner, name)))

    def close(self) -> None:
        self.process._zmq.close()
        self.process._shm.close()
        self.process._context.term()
        self._attached.close()
        self._arena.close()
        self._rings.close()
        self._scoreboard.close()
        self._segments.close()
        self._supervisor.close()
        self._folder.cleanup()


def measured(requests: int) -> tuple[float, float, dict[str, float]]:
    """Us of a turn untouched, of the forward alone in a loop, and of each part."""
    torch.set_num_threads(1)
    bench = Bench()
    bench.requests(requests)
    bench.turns.clear()
    bench.requests(requests)
    turn = _trimmed(bench.turns) / 1e3
    x = torch.zeros((1, 52))
    bare = []
    with torch.inference_mode():
        for _ in range(requests):
            began = _clock()
            bench.served.module(x)
            bare.append(_clock() - began)
    clock = Clock()
    bench.time_parts(clock)
    own, around = Clock.cost()
    bench.requests(requests)
    bench.close()
    turns = len(clock.spent["client"])
    parts: dict[str, float] = {}
    for name, spent in clock.spent.items():
        part = name.rstrip("+")
        us = (_trimmed(spent) - own) * len(spent) / turns / 1e3
        # The clocks of what a part calls are in it.
        inner = sum(len(clock.spent[other]) for other in _INSIDE.get(part, ())) / turns
        parts[part] = parts.get(part, 0.0) + us - around * inner / 1e3
    parts.pop("client")
    return turn, _trimmed(bare) / 1e3, parts


_INSIDE = {
    "rows in and out": ("forward",),
    "inbox: ZeroMQ": ("ZeroMQ: is there anything",),
}


def _trimmed(values: list[int]) -> float:
    """The mean of the nine shortest in ten."""
    return statistics.fmean(sorted(values)[: max(1, len(values) * 9 // 10)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    turn, bare, parts = measured(given.requests)
    parts["the rest of the loop"] = turn - sum(parts.values())
    if given.json:
        rounded = {part: round(us, 2) for part, us in parts.items()}
        print(json.dumps({"turn_us": round(turn, 2), "forward_us": round(bare, 2), "parts": rounded}))
        return 0
    print(f"a turn: {turn:.1f} us, {turn - parts['forward']:.1f} without the forward,")
    print(f"which takes {parts['forward']:.1f} here and {bare:.1f} alone in a loop\n")
    print("| part | us |\n| --- | ---: |")
    for part, us in parts.items():
        print(f"| {part} | {us:.1f} |")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
