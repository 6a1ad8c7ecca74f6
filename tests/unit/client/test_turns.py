"""Threads that share a model: one call at a time, and no call waits longer for others than its own time-out."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.open_models import NUMBER
from torch import nn

from jurybox.client import Refused, Timeout
from jurybox.protocol import TensorSpec
from jurybox.server.inproc import InprocServer
from jurybox.server.models import ServedModel

TEN = np.full((1, 1), 10, np.float32)


class Slow(nn.Module):
    """The number plus one, or the state plus the number; a ten takes until it is let go."""

    def __init__(self):
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def forward(self, x, total=None):
        if (x == 10).any():
            self.reached.set()
            assert self.go_on.wait(60)
        if total is None:
            return x[:, 0] + 1
        return (total + x[:, 0], total + x[:, 0])


@pytest.fixture
def shared():
    plain, keeping = Slow(), Slow()
    spec = {"x": TensorSpec("float32", (1,))}, {"y": NUMBER}
    models = {"plain": ServedModel(plain, *spec), "keeping": ServedModel(keeping, *spec, state={"total": NUMBER})}
    for module in (plain, keeping):  # warm-up does not need it
        module.go_on.clear()
    with InprocServer(models, rows=16) as server:
        yield server, plain, keeping


def ways(model, sessions):
    x = np.zeros((1, 1), np.float32)
    if model is None:
        return [
            lambda seconds: sessions.infer(x, [1], timeout=seconds),
            lambda seconds: sessions.infer(np.zeros((2, 1), np.float32), timeout=seconds),
            lambda seconds: sessions.submit(x, [1], timeout=seconds),
            lambda seconds: sessions.get_state([1], timeout=seconds),
        ]

    ticket, rows = model.submit(x), model.rows(1)
    return [
        lambda seconds: model(x[0], timeout=seconds),
        lambda seconds: model.infer(x, timeout=seconds),
        lambda seconds: model.submit(x, timeout=seconds),
        lambda seconds: ticket.result(timeout=seconds),
        lambda seconds: rows.infer(timeout=seconds),
        lambda seconds: asyncio.run(model.infer_async(x, timeout=seconds)),
    ]


@pytest.mark.parametrize("kind", ["plain", "sessions"])
def test_a_call_waits_for_another_threads_no_longer_than_its_own_time_out(shared, kind):
    server, plain, keeping = shared
    model = server.model("plain", rows=8) if kind == "plain" else None
    sessions = server.model("keeping", rows=1).sessions(2) if kind == "sessions" else None
    module = plain if model is not None else keeping
    if sessions is not None:
        sessions.infer(np.ones((2, 1), np.float32))
    asks = ways(model, sessions)
    with ThreadPoolExecutor(1) as other:
        long = other.submit(model.infer, TEN) if model is not None else other.submit(sessions.infer, TEN, [0])
        try:
            assert module.reached.wait(30)
            for ask in asks:
                with pytest.raises(Timeout, match="another thread's call"):
                    ask(0.2)
                assert not long.done(), "it ended before that call"
        finally:
            module.go_on.set()
        np.testing.assert_array_equal(long.result(30), [11])  # undisturbed
    for ask in asks:
        ask(30)  # no session and no row is lost
    del asks
    gc.collect()
    requests = sessions._requests if model is None else model.requests
    lane = requests.lane
    requests.give_up_kept()
    assert (lane.free, lane.in_flight) == (lane.rows, {})


def test_calls_wait_for_another_thread_no_longer_than_the_default_time_out(shared):
    server, plain, _ = shared
    busy = server.model("plain", rows=8)
    ticket = busy.submit(np.ones((1, 1), np.float32))
    ticket.result(timeout=30)
    busy.requests.turns.timeout = 0.2
    with ThreadPoolExecutor(1) as other:
        long = other.submit(busy.infer, TEN, timeout=60)
        try:
            assert plain.reached.wait(30)
            for call in (ticket.cancel, busy.look, busy.room, busy.close):
                with pytest.raises(Timeout, match="another thread's call"):
                    call()
                assert not long.done(), "it ended before that call"
        finally:
            plain.go_on.set()
        np.testing.assert_array_equal(long.result(30), [11])  # undisturbed
    busy.close()
    with pytest.raises(Refused, match="closed"):
        busy.infer(TEN)


def test_each_of_many_threads_is_answered_and_the_lane_is_whole_afterwards(shared):
    server, _, keeping = shared
    del keeping
    model = server.model("plain", rows=4)
    numbers = [n for n in range(300) if n % 10]

    def ask(n):
        return float(model(np.array([n], np.float32)) if n % 2 else model.infer(np.full((1, 1), n, np.float32))[0])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, numbers)) == [n + 1 for n in numbers]
    model.requests.give_up_kept()
    assert model.requests.lane.free == 4


def test_a_lock_that_is_given_up_on_stays_the_others():
    from jurybox.protocol.locks import LockTurn, Taken

    lock = threading.RLock()
    free = LockTurn(lock)
    taken, let_go = threading.Event(), threading.Event()

    def hold():
        with free:
            taken.set()
            let_go.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(30)
    for turn in (free, LockTurn(lock, 0.05)):
        with pytest.raises(Taken), turn:
            raise AssertionError("it is another's")
    let_go.set()
    thread.join(30)
    for _ in range(2):
        with free, free, LockTurn(lock, 1.0):  # by the same thread as often as it likes
            pass
