"""All objects of the client, over all transports, while other calls land in theirs at random moments.

Destructors and weakref callbacks that the garbage collector runs, a signal handler, one that raises, a second thread, a
fork and a cancelled task each make calls of their own. Every answer is checked, no call waits for the one that it is
nested in, and all rows are free afterwards.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import itertools
import random
import signal
import threading
import time
import weakref

import numpy as np
import pytest
from tests.collecting import collecting_often
from tests.forking import in_a_child
from tests.serving import wait_until

from jurybox.client import Busy, Refused, SessionLost
from jurybox.client.rewards import Juror

ROWS = 24
PROMPT = 20.0  # seconds; a call that waits for the one that it is nested in takes its whole time-out of a minute


class Interrupted(Exception):
    """What the handler raises that raises."""


class Calls:
    """A way to use each object of a connection, checked; `refused` has what a nested call may be told at once."""

    def __init__(self, client, address, remote: bool, grpc: bool) -> None:
        self.model = client.model("affine", rows=ROWS)
        self.sessions = client.model("sum", rows=1).sessions(3)
        self.juror = Juror("length", output="score", address=address, timeout=60.0)
        self.juror.scores({"text": ["a"]}, 1)
        self.left: list = []
        self.seen: collections.Counter = collections.Counter()
        self.wrong: list[str] = []
        self.slowest = 0.0
        self.interruptible = False
        self.entries, self.inside = itertools.count(), []
        self._numbers = random.Random(5)
        self.main = threading.get_ident()
        self.ways = [
            self.call,
            self.infer,
            self.pieces,
            self.submit,
            self.rows,
            self.several_loops,
            self.session,
            self.hook,
        ]
        if not remote or grpc:
            self.publisher = client.publisher("learnt")
            self.publisher.publish(self.state(1.0), {"value": 1.0})
            self.reader = client.weights("learnt")
            self.ways += [self.read, self.publish]
        self.grpc = grpc

    @staticmethod
    def state(value):
        return {"scale": np.float32(value), "offset": np.float32(value)}

    def x(self, n):
        return np.float32(self._numbers.random()) + np.arange(4 * n, dtype=np.float32).reshape(n, 4)

    def same(self, came, expected, what):
        if not (
            np.asarray(came) == expected
        ).all():  # np.array_equal would take the handler's exception for a difference
            self.wrong.append(f"{what}: {came} came, {expected} was expected")

    def call(self):
        x = self.x(1)[0]
        self.same(self.model(x), 2 * x + 1, "model(x)")

    def infer(self):
        x = self.x(3)
        self.same(self.model.infer(x), 2 * x + 1, "infer")

    def pieces(self):
        x = self.x(30)
        self.same(self.model.infer(x), 2 * x + 1, "infer of several batches")

    def submit(self):
        x, y = self.x(2), self.x(1)
        first, second = self.model.submit(x), self.model.submit(y)
        self.same(second.result().outputs, 2 * y + 1, "the second ticket")
        self.same(first.result().outputs, 2 * x + 1, "the first ticket")

    def rows(self):
        x = self.x(2)
        with self.model.rows(2) as rows:
            rows.inputs["observation"][:] = x
            rows.infer()
            self.same(rows.outputs["action"], 2 * x + 1, "rows")

    def several_loops(self):
        with contextlib.suppress(RuntimeError):  # this is a handler within a loop of this thread
            asyncio.get_running_loop()
            return
        x, y = self.x(2), self.x(1)

        async def ask():
            return await asyncio.gather(self.model.infer_async(x), self.model.infer_async(y))

        a, b = asyncio.run(ask())
        self.same(a, 2 * x + 1, "infer_async")
        self.same(b, 2 * y + 1, "infer_async")

    def session(self):
        x = self.x(3)[:, :1].copy()
        mine = next(self.entries)
        self.inside.append(mine)
        try:
            alone = self.inside == [mine]
            self.same(self.sessions.infer(x, reset=np.ones(3, bool)), x[:, 0], "sessions")
            came = self.sessions.infer(x)
            if alone and next(self.entries) == mine + 1:  # else another call has begun them anew
                self.same(came, x[:, 0] + x[:, 0], "the second step of sessions")
        finally:
            self.inside.remove(mine)

    def hook(self):
        texts = ["a" * self._numbers.randrange(1, 30) for _ in range(2)]
        self.same(list(self.juror.scores({"text": texts}, 2)), [float(len(text)) for text in texts], "scores")

    def read(self):
        if self.grpc:
            weights = self.reader.read(timeout=30.0)
        else:
            out = self.reader.buffers()
            for array in out.values():
                array[...] = np.nan
            weights = self.reader.read(timeout=30.0, out=out)
        value = weights.extra["value"]
        self.same([float(weights.state[name]) for name in ("scale", "offset")], [value, value], "read")

    def publish(self):
        value = float(self._numbers.randrange(1, 100))
        self.publisher.publish(self.state(value), {"value": value})

    def one(self, number: int, *refused: type[Exception]) -> None:
        """Make the call of this number; errors other than these are wrong."""
        way = self.ways[number % len(self.ways)]
        if Interrupted in refused and way == self.several_loops:
            return  # an exception within asyncio.run, or the start of a thread, breaks locks of their own
        began = time.monotonic()
        try:
            way()
            self.seen[way.__name__] += 1
        except Interrupted:
            raise
        except refused:
            self.seen["refused"] += 1
        except Exception as error:  # noqa: BLE001  it is reported at the end
            self.wrong.append(f"{way.__name__}: {type(error).__name__}: {error}")
        self.slowest = max(self.slowest, time.monotonic() - began)

    def nested(self) -> None:
        self.one(self._numbers.randrange(10**6), Busy, Refused, SessionLost)
        self.seen["nested"] += 1

    def close(self) -> None:
        self.juror.close()


class Destroyed:
    """In a cycle: the garbage collector finds it, at whatever allocation."""

    def __init__(self, calls: Calls) -> None:
        self.me, self.calls = self, calls

    def __del__(self) -> None:
        if threading.get_ident() == self.calls.main:
            self.calls.nested()


class Watched:
    def __init__(self) -> None:
        self.me = self


@contextlib.contextmanager
def destructors(calls):
    with collecting_often(23):
        yield lambda: Destroyed(calls)


@contextlib.contextmanager
def weakref_callbacks(calls):
    kept = []

    def watch():
        kept[:] = kept[-5:]
        kept.append(weakref.ref(Watched(), lambda _: threading.get_ident() == calls.main and calls.nested()))

    with collecting_often(23):
        yield watch


@contextlib.contextmanager
def signals(calls, *, raises=False):
    chance, busy = random.Random(7), []

    def handler(*_):
        if busy:
            return
        busy.append(1)
        try:
            calls.nested()
        finally:
            busy.clear()
        if raises and calls.interruptible:  # not between two calls, where nothing catches it
            calls.interruptible = False
            raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)

    def arm():
        signal.setitimer(signal.ITIMER_REAL, 10 ** chance.uniform(-4.6, -2.8))

    try:
        yield arm
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def raising_signals(calls):
    return signals(calls, raises=True)


@contextlib.contextmanager
def second_thread(calls):
    over = threading.Event()

    def ask():
        number = 0
        while not over.is_set():
            number += 1
            calls.one(number, Busy, SessionLost)
            time.sleep(0.001)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield lambda: None
    finally:
        over.set()
        thread.join(60)
        assert not thread.is_alive()


@contextlib.contextmanager
def forks(calls):
    count = iter(range(10**9))

    def fork():
        if calls.grpc or next(count) % 40:
            return

        def child():
            calls.wrong.clear()
            for way in (calls.call, calls.infer, calls.submit):
                way()
            return calls.wrong

        calls.wrong += in_a_child(child)

    yield fork


@contextlib.contextmanager
def cancelled_tasks(calls):
    chance = random.Random(8)

    async def cancel():
        x = calls.x(3)

        async def ask():
            calls.same(await calls.model.infer_async(x), 2 * x + 1, "a task among cancelled ones")

        tasks = [asyncio.ensure_future(ask()) for _ in range(4)]
        await asyncio.sleep(chance.uniform(0, 0.002))
        for task in tasks[::2]:
            task.cancel()
        for end in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(end, asyncio.CancelledError | None):
                calls.wrong.append(f"a task: {end!r}")

    yield lambda: asyncio.run(cancel()) if chance.random() < 0.1 else None


# What an outer call may be told: that nested ones, or those of a thread, have the rows, or began its sessions.
ALLOWED = {forks: (), raising_signals: (Busy, SessionLost, Interrupted), second_thread: (Busy, SessionLost)}
EVENTS = [destructors, weakref_callbacks, signals, raising_signals, second_thread, forks, cancelled_tasks]


@pytest.mark.parametrize(
    "times", [pytest.param(800, id="some"), pytest.param(100_000, id="all", marks=pytest.mark.slow)]
)
def test_no_call_gets_anothers_answer_or_waits_for_it_whatever_lands_in_it(client, request, reachable, times):
    way = request.node.callspec.params["client"].removeprefix("lib")
    remote = way in ("tcp", "grpc")
    address = f"{way}://{reachable.listening(way)}" if remote else reachable.address
    calls = Calls(client, address, remote, way == "grpc")
    for event in EVENTS:
        if calls.grpc and event is forks:
            continue  # gRPC survives no fork
        before = sum(calls.seen.values())
        with event(calls) as land:
            for number in range(times // len(EVENTS)):
                try:
                    calls.interruptible = True
                    land()
                    calls.one(number, *ALLOWED.get(event, (Busy,)))
                    calls.interruptible = False
                except Interrupted:
                    calls.seen["interrupted"] += 1
        assert not calls.wrong, (event.__name__, calls.wrong[:5])
        assert calls.slowest < PROMPT, (event.__name__, calls.slowest)
        assert sum(calls.seen.values()) > before
    for event in ("nested", "interrupted"):
        assert calls.seen[event] > times / 200, calls.seen
    requests = calls.model.requests

    def free():
        with requests.turns.lock:
            requests.give_up_kept()
            requests.usable().look_after()
            return requests.lane.free == ROWS and not requests.lane.in_flight

    gc.collect()
    wait_until(free, 30, "all rows are free")
    for number in range(len(calls.ways)):
        calls.one(number)
    assert not calls.wrong, calls.wrong
    print(f"{way}: {sum(calls.seen.values())} calls, the slowest {calls.slowest:.2f} s, {dict(calls.seen)}")
    calls.close()
