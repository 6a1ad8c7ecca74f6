"""Lanes over transports and engines that do what a test tells them, and calls of other threads."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace

import numpy as np

from jurybox.client.in_flight import Answer
from jurybox.client.lane import Lane
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.arena import Columns
from jurybox.protocol.errors import Code
from jurybox.protocol.scoreboard import ENGINE, EngineState
from jurybox.protocol.spec import VARIABLE

SERVING = int(EngineState.SERVING)
SPEC = ModelSpec("m", {"x": TensorSpec("float32", (2,))}, {"y": TensorSpec("float32", (2,))})
SIZES = ModelSpec(
    "m",
    {
        "x": TensorSpec("float32", (VARIABLE, 2), capacity=8),
        "t": TensorSpec("bytes", capacity=4),
        "z": TensorSpec("float32"),
    },
    {"y": TensorSpec("float32", (VARIABLE, 2), capacity=8)},
)


class Transport:
    """Keeps sent tickets; returns the answers in `there`."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.there: list[Answer] = []

    def send(self, ticket):
        self.sent.append((ticket.engine, ticket.incarnation))

    def receive(self, timeout):
        return list(self.there)

    def settled(self, answer):
        if answer in self.there:
            self.there.remove(answer)

    def holds(self, ticket):
        return True

    def close(self):
        pass


def serving_engine():
    """The record of one engine that serves, shape (1,)."""
    engine = np.zeros(1, ENGINE)
    engine["incarnation"], engine["state"] = 11, SERVING
    return engine


def lane_of(table, transport, spec=SPEC, **more):
    arena = SimpleNamespace(columns=Columns.here(spec, 8), close=lambda: None)
    scoreboard = SimpleNamespace(engines=table, server_lives=lambda: True)
    return Lane("m", scoreboard, arena, transport, 1, 0, 8, lambda: None, **more)


def compute(columns, first, rows):
    """Make the outputs of rows ten times their inputs: y of x, y2 of x2, with their sizes."""
    rows = slice(first, first + rows)
    for name, output in columns.outputs.items():
        of = name.replace("y", "x")
        output[rows] = columns.inputs[of][rows] * 10
        if name in columns.output_extents:
            columns.output_extents[name][rows] = columns.input_extents[of][rows]


class Engine(Transport):
    """Answers each ticket with ten times its rows; with other codes, or late, if it is told so."""

    def __init__(self, *codes, versions=()):
        super().__init__()
        self.codes, self.versions, self.late, self.columns = list(codes), list(versions), False, None
        self.seconds = []

    def _answer(self, ticket):
        self.sent.append((ticket.first, ticket.rows, ticket.version))
        compute(self.columns, ticket.first, ticket.rows)
        code = self.codes.pop(0) if self.codes else Code.OK
        version = self.versions.pop(0) if self.versions else 7
        return Answer(ticket.sequence, code, "what it said", version, ticket.incarnation)

    def send(self, ticket):
        self.there.append(self._answer(ticket))

    def exchange(self, ticket, timeout):
        self.seconds.append(timeout)
        answer = self._answer(ticket)
        if not self.late:
            return answer
        self.there.append(answer)
        return None

    def receive(self, timeout):
        if not self.late:
            return list(self.there)
        time.sleep(min(timeout, 0.01))
        return []

    def is_reading(self, ticket):
        return False


@contextlib.contextmanager
def another_threads_call(turns):
    """Within the ``with`` block another thread is within a call with this lock, until it ends or the event is set."""
    held, let_go = threading.Event(), threading.Event()

    def call():
        with turns.now:
            held.set()
            assert let_go.wait(60)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert held.wait(60)
        yield let_go
    finally:
        let_go.set()
        thread.join(60)
