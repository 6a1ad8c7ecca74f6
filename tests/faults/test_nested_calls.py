"""A call within a call of the same thread, as a signal handler or a destructor makes it: both get their own answers."""

from __future__ import annotations

import contextlib
import itertools
import time
from pathlib import Path

import numpy as np
import pytest
from tests.moments import Moment
from tests.serving import wait_until

import jurybox.client
from jurybox.client import Busy
from jurybox.protocol.weights import reader

ROWS = 20
CODE = (str(Path(jurybox.client.__file__).parent), reader.__file__)
PROMPT = 10.0  # seconds; a nested call that waits for the outer one takes its whole time-out of a minute


class Asker:
    """Ask in every way, with other rows each time, and check the answers."""

    def __init__(self, model) -> None:
        self.model = model
        self._numbers = itertools.count(1)
        self.left = []  # tickets that a nested call has left in flight, with their inputs

    def rows(self, n):
        return (next(self._numbers) + np.arange(4 * n, dtype=np.float32) / 64).reshape(n, 4).astype(np.float32)

    def call(self):
        x = self.rows(1)[0]
        np.testing.assert_array_equal(self.model(x), 2 * x + 1)

    def infer(self):
        x = self.rows(3)
        np.testing.assert_array_equal(self.model.infer(x), 2 * x + 1)

    def pieces(self):
        x = self.rows(45)
        np.testing.assert_array_equal(self.model.infer(x), 2 * x + 1)

    def submit(self):
        xs = [self.rows(n) for n in (1, 2)]
        tickets = [self.model.submit(x) for x in xs]
        for x, ticket in zip(xs, tickets, strict=True):
            np.testing.assert_array_equal(ticket.result().outputs, 2 * x + 1)

    def zero_copy(self):
        x = self.rows(2)
        with self.model.rows(2) as rows:
            rows.inputs["observation"][:] = x
            rows.infer()
            np.testing.assert_array_equal(rows.outputs["action"], 2 * x + 1)

    def leave(self):
        x = self.rows(1)
        self.left.append((x, self.model.submit(x)))

    def collect(self):
        while self.left:
            x, ticket = self.left.pop()
            np.testing.assert_array_equal(ticket.result().outputs, 2 * x + 1)

    def drop(self):
        self.model.submit(self.rows(2))


def at_every_moment(outer, nested, stride):
    """Call `outer` again and again, each time with the next of the nested calls at a later moment; return how often."""
    for number in itertools.count():
        with Moment(CODE, number * stride, nested[number % len(nested)], anywhere=True) as fallen:
            outer()
        if not fallen.fell:
            return number
    return None


def all_rows_are_free(model):
    def free():
        with model.requests.turns.lock:
            model.requests.give_up_kept()
            model.requests.usable().look_after()
            return model.requests.lane.free == ROWS

    wait_until(free, 30, "every row is free")


def promptly(action, *refused):
    """Return `action`; it must end at once, and may be refused with a sentence."""

    def run():
        began = time.monotonic()
        with contextlib.suppress(*refused):
            action()
        assert time.monotonic() - began < PROMPT, "it waited for the call that it is nested in"

    return run


STRIDES = [pytest.param(23, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("way", ["call", "infer", "pieces", "submit", "zero_copy"])
def test_a_call_within_a_call_gets_its_own_answer_wherever_it_falls(client, way, stride):
    model = client.model("affine", rows=ROWS)
    asker = Asker(model)
    refused = (Busy,) if way == "pieces" else ()  # it holds all the rows
    nested = [
        promptly(ask, *refused)
        for ask in (asker.infer, asker.call, asker.submit, asker.zero_copy, asker.leave, asker.pieces, asker.drop)
    ]

    def outer():
        getattr(asker, way)()
        asker.collect()

    outer()
    if way == "pieces" and stride > 1:
        stride *= 9  # it is long, and nested calls wait for the answers to its tickets before they are refused
    assert at_every_moment(outer, nested, stride) > 3
    all_rows_are_free(model)
