"""The relay forwards a remote client's tickets natively or not: the answers are the same."""

import asyncio
import contextlib
import gc
import os
import queue
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from tests.serving import serving, wait_until

from jurybox.client import ModelFailed, Timeout, connect
from jurybox.client.local_link import LocalLink
from jurybox.protocol.control_pb2 import ControlReply, ControlRequest, LeaseRequest
from jurybox.protocol.errors import Code
from jurybox.protocol.wire import PACK_REPLY, PACK_TICKET, PREFIX
from jurybox.server.relay.relay import Relay
from jurybox.server.relay.zmtp_listener import ZmtpListener

MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 256},
    "moody": {"factory": "tests.models:moody", "max_batch": 4, "rows": 64},
    "two": {"factory": "tests.models:two", "max_batch": 8, "rows": 64},
}
ROW = np.arange(4, dtype=np.float32)
SECOND = 1_000_000.0  # to moody


@pytest.fixture(scope="module", params=[1, 2], ids=["engine", "engines"])
def server(request, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), MODELS, replicas=request.param) as running:
        yield running


@pytest.fixture
def relay(server):
    """A relay in a thread of this process, so that tests can inspect its lanes."""
    addresses, stop, made = queue.Queue(), threading.Event(), SimpleNamespace(looks_after=True)

    async def run_relay():
        context = zmq.Context()
        front = ZmtpListener("127.0.0.1:0", 1 << 20)
        back = context.socket(zmq.DEALER)
        back.connect(server.address)
        link = await asyncio.to_thread(LocalLink, server.address, "shm", 20.0)
        made.relay = relay = Relay(front, back, link, lambda *_, **__: None)
        addresses.put(f"tcp://{front.bound}")
        while not stop.is_set():
            await asyncio.sleep(0.02)
            if made.looks_after:
                relay.look_after()
        relay.end()
        link.close()
        front.close()
        context.destroy(linger=0)

    thread = threading.Thread(target=lambda: asyncio.run(run_relay()))
    thread.start()
    try:
        made.address = addresses.get(timeout=30)
        yield made
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()


@contextlib.contextmanager
def stopped(pids):
    """Within the ``with`` block these processes do nothing."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def engines_of(server):
    return [pid for role, pid in server.pids().items() if role.startswith("engine")]


def natively(relay):
    """Return whether the only lane's tickets go natively now, and how many are in flight there."""
    (held,) = relay.relay._lanes.values()
    return held._native is not None and held._native.mine, 0 if held._native is None else held._native.in_flight


@contextlib.contextmanager
def goes_natively(relay):
    """A ticket that the ``with`` block sends is in flight natively at its end: nobody looks after it meanwhile."""
    relay.looks_after = False
    try:
        yield
        wait_until(lambda: natively(relay) == (True, 1), 20, "it is in flight natively")
    finally:
        relay.looks_after = True


class RawClient:
    """A client that sends raw messages, with a lane of four rows."""

    def __init__(self, context, address, model):
        self.socket = context.socket(zmq.DEALER)
        for name, value in {"LINGER": 0, "RCVTIMEO": 20_000}.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(address)
        request = ControlRequest(lease=LeaseRequest(model=model, rows=4))
        self.socket.send_multipart((PREFIX, b"12345678", request.SerializeToString()))
        self.lease = ControlReply.FromString(self._message()[2]).lease.lease
        self.sequence = 0

    def _message(self):
        while True:
            frames = self.socket.recv_multipart()
            if frames[:2] != [PREFIX, bytes(8)]:  # a probe
                return frames

    def send(self, first, rows, *frames, left=10**10, version=0, lease=None, sequence=None):
        self.sequence += sequence is None
        number = self.sequence if sequence is None else sequence
        ticket = PACK_TICKET.pack(number, lease or self.lease, left, 0, 0, first, rows, 0, version, 5)
        self.socket.send_multipart((PREFIX + ticket, *frames))
        return number

    def answer(self):
        """Return the sequence, the code, the text and the outputs."""
        frames = self._message()
        sequence, _, incarnation, code = PACK_REPLY.unpack_from(frames[0], len(PREFIX))
        assert incarnation == (5 if sequence else 0)
        return sequence, code, frames[0][len(PREFIX) + PACK_REPLY.size :], frames[1:]

    def ask(self, *what, **more):
        number = self.send(*what, **more)
        sequence, *rest = self.answer()
        assert sequence == number
        return rest


KINDS = {
    "a row": (0, 1, ROW.tobytes()),
    "all rows": (0, 4, np.arange(16, dtype=np.float32).tobytes()),
    "the last row": (3, 1, ROW.tobytes()),
    "a row that breaks the model": (1, 1, np.full(4, 666, np.float32).tobytes()),
    "no row": (0, 0, b""),
    "rows beyond the lane": (3, 2, bytes(32)),
    "rows beyond all": (2**32 - 1, 2**32 - 1, bytes(32)),
    "too few bytes": (0, 2, bytes(16)),
    "too many bytes": (0, 1, bytes(17)),
    "no frame": (0, 1),
    "a frame too many": (0, 1, bytes(16), b""),
}
MORE = {
    "weights that nobody has": {"version": 77},
    "a deadline that is over": {"left": -5},
    "another's lease": {"lease": 99},
}


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_each_kind_of_request_has_the_same_answer_both_ways(server, relay, kind):
    """A lane's first request never goes natively; one after an answered one does if any does."""
    what, more = KINDS.get(kind, KINDS["a row"]), MORE.get(kind, {})
    context = zmq.Context()
    try:
        client = RawClient(context, relay.address, "moody")
        first = client.ask(*what, **more)
        assert client.ask(0, 1, ROW.tobytes()) == [Code.OK, b"", [(ROW + 1).tobytes()]]
        wait_until(lambda: natively(relay) == (True, 0), 20, "the next goes natively")
        assert [client.ask(*what, **more) for _ in range(3)] == [first] * 3
        for _ in range(3):  # and it does not affect later ones
            assert client.ask(0, 4, bytes(64)) == [Code.OK, b"", [np.ones(16, np.float32).tobytes()]]
        wait_until(lambda: natively(relay) == (True, 0), 20, "it goes natively again")
    finally:
        context.destroy(linger=0)


def test_invalid_tickets_between_native_ones_are_answered_with_errors(server, relay):
    context = zmq.Context()
    try:
        client = RawClient(context, relay.address, "affine")
        for _ in range(3):
            assert client.ask(0, 1, ROW.tobytes())[2] == [(2 * ROW + 1).tobytes()]
            client.socket.send_multipart((b"J\x09what", b"ever"))
            sequence, code, text, _ = client.answer()
            assert (sequence, code) == (0, Code.PROTOCOL_MISMATCH)
            assert b"protocol version 9 came" in text
            client.socket.send(PREFIX + b"too short for a ticket")
            assert client.answer()[:2] == (0, Code.MALFORMED)
    finally:
        context.destroy(linger=0)


def test_a_ticket_for_rows_in_flight_is_refused_and_the_first_one_answered(server, relay):
    context = zmq.Context()
    other = 5 + ROW
    try:
        client = RawClient(context, relay.address, "moody")
        client.ask(0, 1, ROW.tobytes())
        wait_until(lambda: natively(relay) == (True, 0), 20, "the next goes natively")
        with stopped(engines_of(server)):
            with goes_natively(relay):
                number = client.send(0, 1, other.tobytes())
            again = client.send(0, 1, ROW.tobytes())
            sequence, code, _, _ = client.answer()
            assert (sequence, code) == (again, Code.BUSY)
            client.send(0, 1, other.tobytes(), sequence=number)  # the same once more, as if its answer was lost
            client.send(0, 2, bytes(32), sequence=number)
            sequence, code, text, _ = client.answer()
            assert (sequence, code) == (number, Code.MALFORMED)
            assert b"came again with other rows" in text
        assert client.answer()[::3] == (number, [(other + 1).tobytes()])
        assert client.ask(0, 1, ROW.tobytes())[2] == [(ROW + 1).tobytes()]
    finally:
        context.destroy(linger=0)


def test_a_late_answer_reaches_no_other_request(server, relay):
    with connect(relay.address, timeout=20) as client:
        model = client.model("moody", rows=3)
        for turn in range(4):
            row = np.full(4, 3.0 + turn, np.float32)
            np.testing.assert_array_equal(model(row), row + 1)
            with pytest.raises(Timeout):
                model(np.full(4, 0.2 * SECOND + turn, np.float32), timeout=0.05)
            for _ in range(3):
                np.testing.assert_array_equal(model(row, timeout=20), row + 1)


def test_many_concurrent_clients_get_their_own_answers(server, relay):
    """They send one row, several rows, several tickets or two tensors, with time-outs and failures."""
    failed = []

    def ask(number):
        rng = np.random.default_rng(number)
        try:
            with connect(relay.address, timeout=30) as client:
                model = client.model(("affine", "affine", "two", "moody")[number % 4], rows=4)
                for turn in range(60):
                    value = float(rng.integers(1, 200))
                    if number % 4 == 2:
                        image = np.full((2, 64, 64, 3), value, np.uint8)
                        out = model.infer({"image": image, "scale": np.full(2, number, np.float32)})
                        np.testing.assert_allclose(out["brightness"], value * number, rtol=1e-5)
                        assert (out["corner"] == value).all()
                    elif number % 4 == 3:
                        if turn % 20 == 7:
                            # In a batch with the other client's slow row, the model ignores and answers this one.
                            with contextlib.suppress(ModelFailed):
                                assert (model(np.full(4, 666, np.float32)) == 667).all()
                        if turn % 20 == 11:
                            with pytest.raises(Timeout):
                                model(np.full(4, 0.1 * SECOND, np.float32), timeout=0.01)
                        np.testing.assert_array_equal(model(np.full(4, value, np.float32)), np.full(4, value + 1))
                    elif number % 2:
                        tickets = [model.submit(np.full((1, 4), value + i, np.float32)) for i in range(4)]
                        for i, ticket in enumerate(tickets):
                            assert (ticket.result(timeout=30).outputs == 2 * (value + i) + 1).all()
                    else:
                        rows = np.full((turn % 4 + 1, 4), value, np.float32)
                        np.testing.assert_array_equal(model.infer(rows), 2 * rows + 1)
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed, failed
    assert not any(thread.is_alive() for thread in threads)


def test_a_native_ticket_whose_engine_dies_is_computed_by_the_next(server, relay):
    with connect(relay.address, timeout=60) as client:
        model = client.model("moody", rows=2)
        model(ROW)
        model(ROW)
        wait_until(lambda: natively(relay) == (True, 0), 20, "the next goes natively")
        doomed, *others = engines_of(server)
        for engine in (doomed, *others):  # or one might answer before it is killed
            os.kill(engine, signal.SIGSTOP)
        with goes_natively(relay):
            ticket = model.submit(ROW[None], timeout=60)
        os.kill(doomed, signal.SIGKILL)
        for engine in others:
            os.kill(engine, signal.SIGCONT)
        np.testing.assert_array_equal(ticket.result(timeout=60).outputs, ROW[None] + 1)
        for _ in range(3):
            np.testing.assert_array_equal(model(ROW, timeout=60), ROW + 1)
        # Asked again and again: a call whose answer is late on a busy machine is looked after, and not native.
        wait_until(lambda: (model(ROW), natively(relay))[1] == (True, 0), 20, "with the next engine it goes natively")


def test_a_broken_connection_loses_no_answer(server, relay):
    with connect(relay.address, timeout=60) as client:
        model = client.model("moody", rows=2)
        for _ in range(3):
            wait_until(lambda: (model(ROW), natively(relay))[1] == (True, 0), 20, "the next goes natively")
            with stopped(engines_of(server)):
                with goes_natively(relay):
                    ticket = model.submit(ROW[None], timeout=60)
                model.requests.lane._transport._connection.link.close()
            np.testing.assert_array_equal(ticket.result(timeout=60).outputs, ROW[None] + 1)


def test_a_lane_released_in_flight_is_not_written_to(server, relay):
    """Another client gets its rows, at once if they are the only ones."""
    with server.connect() as client:  # the relays of earlier tests may still have some
        wait_until(lambda: gc.collect() >= 0 and client.status()["lanes"]["rows"] == 0, 30, "all rows are free")
    for _ in range(3):
        with contextlib.ExitStack() as engines:
            with connect(relay.address, timeout=30) as client:
                model = client.model("moody", rows=64)
                wait_until(
                    lambda model=model: (model(ROW), natively(relay))[1] == (True, 0), 20, "the next goes natively"
                )
                engines.enter_context(stopped(engines_of(server)))
                with goes_natively(relay):
                    model.submit(ROW[None])
                (held,) = relay.relay._lanes.values()
                link = held._native_for[0]
            wait_until(lambda: not relay.relay._lanes, 20, "the release of the lane")
        assert not held.take_in() and not held._native.mine
        del link
        with connect(relay.address, timeout=30) as client:
            model = client.model("moody", rows=64)
            for _ in range(5):
                np.testing.assert_array_equal(model(ROW, timeout=20), ROW + 1)


def test_a_client_that_joins_while_the_relay_spins_for_another_is_answered(server, relay):
    stop, answer_times = threading.Event(), []

    def go_on():
        with connect(relay.address, timeout=30) as client:
            model = client.model("affine", rows=1)
            while not stop.is_set():
                np.testing.assert_array_equal(model(ROW), 2 * ROW + 1)
                answer_times.append(time.monotonic())

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        wait_until(lambda: len(answer_times) > 500, 60, "requests of the lone client")
        with connect(relay.address, timeout=30) as other:
            model = other.model("affine", rows=1)
            for _ in range(50):
                np.testing.assert_array_equal(model(-ROW, timeout=20), -2 * ROW + 1)
            other.status()
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
