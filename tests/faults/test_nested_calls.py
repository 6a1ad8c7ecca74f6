"""A call within a call of the same thread, as a signal handler or a destructor makes it: both get their own answers."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.collecting import collecting_often
from tests.moments import Moment
from tests.serving import wait_until

import jurybox.client
from jurybox.client import Busy, Refused
from jurybox.client.juror import Juror, Passing
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


def test_what_a_nested_call_received_for_an_interrupted_one_is_not_the_answer_to_the_next(client):
    """A signal handler asks, and receives the outer call's answer, too, and raises; the next call has the same rows."""
    model = client.model("moody", rows=ROWS)
    within = False

    def row(microseconds, value):
        return np.array([microseconds, value, 0, 0], np.float32)

    def handler(*_):
        if within:
            np.testing.assert_array_equal(model.infer(row(0, 7)[None]), row(0, 7)[None] + 1)
            raise KeyboardInterrupt

    def interrupted():
        nonlocal within
        main = threading.main_thread().ident
        timer = threading.Timer(0.02, lambda: signal.pthread_kill(main, signal.SIGUSR1))
        try:
            within = True
            timer.start()
            model(row(60_000, 1000))
            within = False
        except KeyboardInterrupt:
            within = False
            return True
        finally:
            timer.join()
        return False

    earlier = signal.signal(signal.SIGUSR1, handler)
    try:
        model(row(0, 1))
        wait_until(interrupted, 30, "the signal came within the call")
        late = row(250_000, 2000)
        np.testing.assert_array_equal(model(late), late + 1)
    finally:
        signal.signal(signal.SIGUSR1, earlier)


@pytest.mark.parametrize("stride", STRIDES)
def test_a_step_within_a_step_of_the_same_sessions_is_refused_at_once_and_spoils_none(client, stride):
    with client.model("sum", rows=1).sessions(3) as sessions:
        x, total = np.ones((3, 1), np.float32), 0
        told = []

        def nested():
            began = time.monotonic()
            try:
                sessions.infer(x)
            except Refused as error:
                assert "a signal handler or a destructor inside of it" in str(error)
                told.append(True)
            else:
                told.append(False)  # before the outer call, or after it
            assert time.monotonic() - began < PROMPT

        for number in itertools.count():
            with Moment(CODE, number * stride, nested, anywhere=True) as moment:
                came = sessions.infer(x)
            total += 1
            if moment.fell and not told[-1]:
                total += 1
                assert came[0] in (total - 1, total)
            else:
                assert came.tolist() == [total] * 3
            if not moment.fell:
                break
        assert sum(told) > 3


def test_a_loop_within_a_call_that_has_the_rows_is_told_so_at_once(client):
    model = client.model("affine", rows=2)
    x = np.ones((2, 4), np.float32)

    def nested():
        began = time.monotonic()
        with pytest.raises(Busy):
            asyncio.run(model.infer_async(x))
        assert time.monotonic() - began < PROMPT

    put = model.requests.lane.codec.put

    def within(*given):
        model.requests.lane.codec.put = put
        nested()
        put(*given)

    model.requests.lane.codec.put = within
    np.testing.assert_array_equal(model.infer(x), 2 * x + 1)


def test_a_call_within_one_that_has_received_an_answer_for_the_rows_is_told_so_at_once(reachable, monkeypatch):
    """A handler may run when pyzmq has taken a frame out of the socket and not returned it: nobody else gets it."""
    monkeypatch.setattr("jurybox.client.transports.engine_link.can_dial", lambda address: False)
    with jurybox.client.connect(reachable.address, transport="zmq", timeout=60) as client:
        model = client.model("affine", rows=ROWS)
        x = np.arange(180, dtype=np.float32).reshape(45, 4)
        model.infer(x)
        (engine,) = model.requests.lane._transport._engines.values()
        receive, told = engine.link._receive, []

        def then_nested(*given):
            frames = receive(*given)
            if not told:
                told.append(True)
                began = time.monotonic()
                with pytest.raises(Busy):
                    model(x[0])
                assert time.monotonic() - began < PROMPT, "it waited for what the call has that it is nested in"
            return frames

        engine.link._receive = then_nested
        np.testing.assert_array_equal(model.infer(x), 2 * x + 1)
        assert told
        all_rows_are_free(model)


def test_a_ticket_is_answered_or_refused_at_once_wherever_a_nested_call_asks_for_it(client, request):
    """Also where the call around it is copying its answer, and only that call can go on."""
    model = client.model("affine", rows=8)
    x = np.ones((2, 4), np.float32)
    carriers = tuple(f"{CODE[0]}/{folder}" for folder in ("remote", "transports"))
    stride = {"tcp": 13, "libtcp": 13, "grpc": 53}.get(request.node.callspec.params["client"], 23)
    for number in itertools.count(0, stride):
        tickets = {scale: model.submit(scale * x) for scale in (1, 3)}

        def ask(tickets=tickets):
            for scale in (3, 1):
                np.testing.assert_array_equal(tickets[scale].result().outputs, 2 * scale * x + 1)

        with Moment(carriers, number, promptly(ask, Busy), anywhere=True) as moment:
            for scale, ticket in tickets.items():
                np.testing.assert_array_equal(ticket.result().outputs, 2 * scale * x + 1)
        if not moment.fell:
            break


@pytest.mark.parametrize("panel", [False, True])
def test_a_hook_within_its_own_call_scores_or_is_refused_at_once_in_whatever_thread(reachable, panel):
    """The garbage collector also runs destructors in the threads that send a juror's calls: those must not wait."""
    length = {"weight": 1.0, "model": "length", "output": "score"}
    model = {"a": length, "b": length} if panel else "length"
    juror = Juror(model, output=None if panel else "score", address=reachable.address, timeout=60.0)
    times, seen, wrong = (2 if panel else 1), collections.Counter(), []

    def scores():
        """Whether there were scores: a call in whose midst this one is may have all of the lane's two rows."""
        came = juror.scores({"text": ["abc", "de"]}, 2)
        if came == [3.0 * times, 2.0 * times]:
            return True
        if not all(isinstance(each, Passing) and "are free" in each for each in came):
            wrong.append(came)
        return False

    class Destroyed:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            began, here = time.monotonic(), threading.current_thread() is threading.main_thread()
            try:
                seen[("main" if here else "sender") if scores() else "busy"] += 1
            except Refused as error:
                if here or not panel:
                    wrong.append(error)
                seen["refused"] += 1
            if time.monotonic() - began > PROMPT:
                wrong.append("it waited for itself")

    scores()
    with contextlib.closing(juror), collecting_often(19):
        for _ in range(200):
            Destroyed()
            scores()
    assert not wrong, wrong[:3]
    assert seen["refused" if panel else "sender"] and sum(seen.values()) > 20, seen


@pytest.mark.parametrize("to", ["out", "flat", "new"])
def test_a_read_within_a_read_fills_its_own_memory_and_both_are_whole(reachable, to):
    with reachable.connect() as connection, connection.publisher("learnt") as publisher:
        publisher.publish({"scale": np.float32(5), "offset": np.float32(6)}, {"n": 1})
        mine, other = connection.weights("learnt"), None

        def read():
            state = mine.buffers()
            for array in state.values():
                array[...] = np.nan
            if to == "flat":
                flat = np.full(mine.layout.nbytes, 0xFF, np.uint8)
                mine.read_flat(flat)
                state = mine.layout.views(flat)
            else:
                state = mine.read(out=state if to == "out" else None).state
            assert (float(state["scale"]), float(state["offset"])) == (5.0, 6.0)
            return state

        for number in itertools.count():
            with Moment((reader.__file__,), number, read, anywhere=True) as moment:
                other = read()
            if not moment.fell:
                break
        assert number > 20 and other is not None
        publisher.publish({"scale": np.float32(2), "offset": np.float32(1)}, {"value": 1.0})
