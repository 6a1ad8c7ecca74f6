"""Ctrl-C at any point of a call: the client still works, its rows are returned, and answers are right."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import itertools
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from tests.moments import Moment
from tests.serving import wait_until

import jurybox.client
from jurybox.client import Busy, SessionLost

# A KeyboardInterrupt can fall into a destructor of pyzmq's, where nobody can raise it: Python tells of it, and the
# object is closed all the same, by __dealloc__ after __del__. This one report only.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:(?s)Exception ignored in.*zmq.*KeyboardInterrupt:pytest.PytestUnraisableExceptionWarning"
)
ROWS = 20
CLIENT = str(Path(jurybox.client.__file__).parent)


class Asker:
    """Send different rows with every method, and check the answers."""

    def __init__(self, model) -> None:
        self.model = model
        self.rng = np.random.default_rng(1)
        self.ways = [self.call, self.infer, self.pieces, self.submit, self.rows]

    def rows_of(self, n):
        return self.rng.standard_normal((n, 4)).astype(np.float32)

    def call(self):
        x = self.rows_of(1)[0]
        np.testing.assert_array_equal(self.model(x), 2 * x + 1)

    def infer(self):
        x = self.rows_of(3)
        np.testing.assert_array_equal(self.model.infer(x), 2 * x + 1)

    def pieces(self):
        x = self.rows_of(45)
        np.testing.assert_array_equal(self.model.infer(x), 2 * x + 1)

    def submit(self):
        xs = [self.rows_of(n) for n in (1, 2)]
        tickets = [self.model.submit(x) for x in xs]
        for x, ticket in zip(xs, tickets, strict=True):
            np.testing.assert_array_equal(ticket.result().outputs, 2 * x + 1)

    def rows(self):
        x = self.rows_of(2)
        with self.model.rows(2) as rows:
            rows.inputs["observation"][:] = x
            rows.infer()
            np.testing.assert_array_equal(rows.outputs["action"], 2 * x + 1)


def rows_come_back(model):
    def back():
        with model.requests.turns.lock:
            model.requests.give_up_kept()
            model.requests.usable().look_after()
            return model.requests.lane.free == ROWS

    wait_until(back, 30, "every row comes back")


def all_rows_come_back(model):
    rows_come_back(model)
    for ask in Asker(model).ways:
        ask()


def interrupted(work, seconds: float) -> bool:
    """Return whether a KeyboardInterrupt after so many seconds interrupted the work."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


@pytest.fixture
def alarms():
    def raises(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raises)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("times", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_ctrl_c_at_random_moments_leaves_a_client_that_answers_rightly(client, alarms, times):
    model = client.model("affine", rows=ROWS)
    asker, chance = Asker(model), random.Random(2)
    hits = 0
    for turn in range(times):
        try:
            hits += interrupted(asker.ways[turn % len(asker.ways)], 10 ** chance.uniform(-4.7, -2.3))
        except Busy:
            model.infer(asker.rows_of(1))  # waits for rows that are on their way back
    assert hits > times / 20
    all_rows_come_back(model)


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["call", "infer", "pieces", "submit", "rows"])
def test_ctrl_c_in_every_place_leaves_a_client_that_answers_rightly(client, way, stride):
    model = client.model("affine", rows=ROWS)
    asker = Asker(model)
    ask = getattr(asker, way)
    ask()
    if way == "call":
        stride = 1  # its few steps are all there is in Python: the rest is one native call
    number = 0
    while True:
        busy = False
        with Moment((CLIENT,), number, interrupt) as moment:
            try:
                ask()
            except KeyboardInterrupt:
                pass
            except Busy:
                busy = True
        if busy:  # outside the interrupted part
            rows_come_back(model)
            continue
        if not moment.fell:
            break
        if number % (stride * 10) == 0:
            rows_come_back(model)
            ask()
        number += stride
    assert number > 2 * stride
    all_rows_come_back(model)


def test_ctrl_c_while_the_model_computes_loses_no_rows(client, alarms):
    """As a user presses it: the call is waiting."""
    model = client.model("moody", rows=2)
    slow = np.full((2, 4), 50_000, np.float32)
    for work in (lambda: model(slow[0]), lambda: model.infer(slow), lambda: model.submit(slow).result()) * 4:
        until, fell = time.monotonic() + 30, False
        while not fell:  # again where it falls into a destructor, such as one of gRPC's: Python ignores it there
            assert time.monotonic() < until
            with contextlib.suppress(Busy):  # submit does not wait for rows
                fell = interrupted(work, 0.02)
    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(model(x[0]), x[0] + 1)
    np.testing.assert_array_equal(model.infer(x), x + 1)


async def test_cancelled_tasks_give_their_rows_back(client):
    model, chance = client.model("affine", rows=ROWS), random.Random(3)
    x = np.ones((5, 4), np.float32)

    async def ask():
        np.testing.assert_array_equal(await model.infer_async(x), 2 * x + 1)

    for _ in range(60):
        tasks = [asyncio.ensure_future(ask()) for _ in range(6)]
        await asyncio.sleep(chance.uniform(0, 0.003))
        for task in tasks[::2]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError | None) for end in done), done
    await asyncio.to_thread(all_rows_come_back, model)


def step_in_a_loop(sessions, x, came):
    async def ask():
        came.append(await sessions.infer_async(x))

    asyncio.run(ask())


def step_in_a_loop_with_version(sessions, x, came):
    async def ask():
        came.append((await sessions.infer_reply_async(x)).outputs)

    asyncio.run(ask())


def step_with_version(sessions, x, came):
    came.append(sessions.infer_reply(x).outputs)


def load(sessions, x, came):
    sessions.set_state({"total": np.full(2, 1000, np.float32)})
    came.append(None)


STEPS = {
    "infer": lambda sessions, x, came: came.append(sessions.infer(x)),
    "by number": lambda sessions, x, came: came.append(sessions.infer(x, session=[1, 0])),
    "infer_reply": step_with_version,
    "infer_async": step_in_a_loop,
    "infer_reply_async": step_in_a_loop_with_version,
    "submit": lambda sessions, x, came: came.append(sessions.submit(x)),
    "set_state": load,
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # where the interrupt fell
@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", STEPS)
def test_ctrl_c_in_every_place_of_a_step_makes_no_second_step_of_the_next(client, request, way, stride):
    """The caller has no answer: either its sessions are as before, or lost, and say so until they are reset."""
    x = np.ones((2, 1), np.float32)
    with client.model("sum", rows=1).sessions(2) as sessions:
        if way in ("infer", "infer_reply") and request.node.callspec.params["client"] in ("shm", "zmq"):
            stride = min(stride, 2)  # there are few
        ends = collections.Counter()
        for number in itertools.count(0, stride):
            begun = float(sessions.infer(x, reset=[True, True])[0])
            came = []
            with Moment((CLIENT,), number, interrupt) as moment, contextlib.suppress(KeyboardInterrupt):
                STEPS[way](sessions, x, came)
            if came:
                outputs = came[0].result().outputs if way == "submit" else came[0]
                assert outputs is None or outputs.tolist() == [begun + 1] * 2
            else:
                if way.endswith("async"):
                    gc.collect()  # a task keeps its error, and that the frames with their rows
                try:
                    now = sessions.infer(x).tolist()
                    assert now == [begun + 1] * 2 or (way == "set_state" and now == [1001] * 2)
                    ends["as before"] += 1
                except SessionLost:
                    ends["lost"] += 1
            if not moment.fell:
                break
        assert sum(ends.values()) > 5, ends
