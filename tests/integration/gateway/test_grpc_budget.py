"""What a gRPC connection may make the gateway hold and do: each test is an attack beside a client that behaves."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

import grpc
import pytest
from tests.http2_frames import PREFACE, WINDOW, frame, head
from tests.integration.gateway.test_grpc_http2 import MIB, Served
from tests.serving import wait_until

from jurybox import native
from jurybox.server.gateway import grpc_calls
from jurybox.server.security import limits
from jurybox.server.security.access import Access
from jurybox.server.security.limits import ANSWERS, CALLS, RECEIVED, Watch

pytestmark = pytest.mark.skipif(bool(native.nghttp2()[1]), reason="the system has no libnghttp2")
SETTINGS = frame(4, 0, 0)
NO_WINDOW = frame(4, 0, 0, struct.pack(">HI", 4, 0))  # SETTINGS: no byte of an answer may be sent


@pytest.fixture(scope="module")
def served():
    served = Served("nghttp2", access=Access(max_message=MIB))
    served.budget = served.server._budget
    yield served
    served.close()


def all_is_returned(budget):
    wait_until(lambda: [budget.held(kind) for kind in (RECEIVED, ANSWERS, CALLS)] == [0, 0, 0], 20, "all is returned")


@pytest.fixture
def echo(served):
    """A client that behaves: its call is answered before, during and after the attack."""
    with grpc.insecure_channel(served.bound, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.unary_unary("/t.T/echo")
        assert call(b"before", timeout=20) == b"before"
        yield call
        assert call(b"after", timeout=20) == b"after"
    all_is_returned(served.budget)


class Attacker:
    """A connection that reads and ignores what it is sent."""

    def __init__(self, served, settings=SETTINGS):
        host, port = served.bound.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        self.received = b""
        self.over = threading.Event()
        self.send(PREFACE + settings)
        threading.Thread(target=self._read, daemon=True).start()
        wait_until(lambda: b"\0\0\0\4\1" in self.received, 20, "the settings are accepted")
        self.send(frame(4, 1, 0))  # the server's are accepted, too: its windows count from now on

    def send(self, data):
        self.socket.sendall(data)

    def _read(self):
        try:
            while data := self.socket.recv(1 << 20):
                self.received += data
        except OSError:
            pass
        self.over.set()

    @property
    def ended(self):
        """The calls that were ended with an error: one head, and nothing else."""
        found, at = [], 0
        while at + 9 <= len(received := self.received):
            size, kind, flags = int.from_bytes(received[at : at + 3], "big"), received[at + 3], received[at + 4]
            if kind == 1 and flags & 1:
                found.append(int.from_bytes(received[at + 5 : at + 9], "big"))
            at += 9 + size
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # its reader is in the kernel, which would keep it open
        self.socket.close()


def data(call, content, *, ends=False):
    return frame(0, int(ends), call, content)


def message(size, content=b""):
    return b"\0" + struct.pack(">I", size) + content


def test_messages_that_never_end_are_refused_beyond_a_connections_share(served, echo):
    with Attacker(served) as attacker:
        for call in range(1, 41, 2):
            attacker.send(head(call, b"/t.T/echo") + data(call, message(MIB, b"x" * 16_000)))
            for _ in range(56):
                attacker.send(data(call, b"x" * 16_000))
        wait_until(lambda: len(attacker.ended) == 17, 20, "the calls are refused")
        assert 3 * MIB < served.budget.held(RECEIVED) <= 4 * MIB
        assert echo(bytes(MIB), timeout=20) == bytes(MIB)


def test_a_message_that_does_not_go_on_is_ended(served, echo):
    began = time.monotonic()
    with Attacker(served) as attacker:
        attacker.send(head(1, b"/t.T/echo") + data(1, message(MIB, b"x" * 1000)))
        wait_until(lambda: served.budget.held(RECEIVED) >= MIB, 20, "the message has begun")
        watch = Watch(served.budget, [served.server.connections])

        async def check(now):
            watch.check(now)

        served.run(check(began + limits.SILENCE - 1))
        assert served.budget.held(RECEIVED) >= MIB
        served.run(check(time.monotonic() + limits.SILENCE + 1))
        wait_until(lambda: attacker.ended == [1], 20, "it is told")
        wait_until(lambda: served.budget.held(RECEIVED) == 0, 20, "the memory is free")


def test_answers_that_nobody_reads_are_refused_beyond_a_connections_share(served, echo):
    with Attacker(served, NO_WINDOW) as attacker:
        for call in range(1, 101, 2):
            content = bytes([call]) * 300_000
            attacker.send(head(call, b"/t.T/echo"))
            for at in range(0, 300_000, 15_000):
                part = content[at : at + 15_000]
                attacker.send(data(call, part if at else message(300_000) + part, ends=at == 285_000))
        wait_until(lambda: len(attacker.ended) == 37, 20, "the others are refused")
        assert 3 * MIB < served.budget.held(ANSWERS) <= 4 * MIB
        assert echo(bytes(MIB), timeout=20) == bytes(MIB)
        for call in (0, 1):  # the connection's window, and the call's
            attacker.send(frame(WINDOW, 0, call, struct.pack(">I", 1 << 20)))
        wait_until(lambda: len(attacker.received) > 300_000, 20, "what is read leaves room")
        assert served.budget.held(ANSWERS) <= 13 * 300_005


def test_a_reader_that_leaves_no_room_for_others_is_ended(served, echo, monkeypatch):
    monkeypatch.setattr(limits, "UNREAD", 3.0)
    attackers = [Attacker(served, NO_WINDOW) for _ in range(2)]
    try:
        for attacker in attackers:
            for call in range(1, 9, 2):
                attacker.send(head(call, b"/t.T/echo"))
                for at in range(0, MIB - 6, 16_000):
                    part = bytes(min(16_000, MIB - 6 - at))
                    attacker.send(data(call, part if at else message(MIB - 6) + part, ends=at + 16_000 >= MIB - 6))
        wait_until(lambda: served.budget.held(ANSWERS) > 6 * MIB, 20, "nobody else has room")
        watch = Watch(served.budget, [served.server.connections])
        began = time.monotonic()

        async def check(seconds):
            watch.check(began + seconds)

        for seconds in (0, 1, 2):
            served.run(check(seconds))
        assert not any(attacker.over.is_set() for attacker in attackers)
        served.run(check(4))
        wait_until(lambda: sum(attacker.over.is_set() for attacker in attackers) == 1, 20, "one is ended")
        wait_until(lambda: served.budget.held(ANSWERS) <= 4 * MIB, 20, "its answers are dropped")
    finally:
        for attacker in attackers:
            attacker.close()


def test_calls_that_the_server_must_reset_end_their_connection(served, echo):
    with Attacker(served) as attacker:
        try:
            for call in range(1, 10_000, 2):
                attacker.send(head(call, b"/t.T/echo") + frame(WINDOW, 0, call, b"\x7f\xff\xff\xff"))
        except OSError:
            pass
        assert attacker.over.wait(20)
        assert b"1000 calls ended before their answer" in attacker.received


def test_empty_messages_are_read_in_turns_and_none_is_lost(served, echo):
    answered = []
    with grpc.insecure_channel(served.bound, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        double = channel.stream_stream("/t.T/double")
        thread = threading.Thread(target=lambda: answered.extend(double(iter([b"", b"x"] * 2_000), timeout=60)))
        thread.start()
        for _ in range(20):
            assert echo(b"meanwhile", timeout=20) == b"meanwhile"
        thread.join(60)
    assert answered == [b"", b"xx"] * 2_000


def test_a_cancelled_call_frees_what_was_kept_for_it(served):
    dropped = []

    def keep(content, call):
        call.on_gone = lambda: dropped.append(content)
        return True

    own = Served("nghttp2", access=Access(max_message=MIB), direct={"/t.T/echo": keep})
    try:
        with grpc.insecure_channel(own.bound, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            calls = [channel.unary_unary("/t.T/echo").future(b"%d" % i, timeout=60) for i in range(20)]
            wait_until(lambda: own.server._budget.held(CALLS) == 20, 20, "the calls have begun")
            for call in calls:
                call.cancel()
            wait_until(lambda: len(dropped) == 20, 20, "each is dropped")
            wait_until(lambda: own.server._budget.held(RECEIVED) == 0, 20, "and its message is free")
    finally:
        own.close()


def test_idle_connections_make_room_for_a_client(served, monkeypatch):
    monkeypatch.setattr(grpc_calls, "GRPC_CONNECTIONS", 8)
    monkeypatch.setattr(grpc_calls, "_LULL", 0.0)
    idle = [socket.create_connection(tuple(served.bound.rsplit(":", 1)), timeout=20) for _ in range(30)]
    try:
        with grpc.insecure_channel(served.bound, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            assert channel.unary_unary("/t.T/echo")(b"x", timeout=20) == b"x"
        assert len(tuple(served.server.connections())) <= 8
    finally:
        for one in idle:
            one.close()


def test_calls_in_flight_are_limited_in_all(served):
    own = Served("nghttp2", access=Access(max_message=MIB))
    each, in_all = own.server._budget.each, own.server._budget.in_all
    own.server._calls.budget = native.Budget((*each[:2], 3), (*in_all[:2], 4))
    try:
        with grpc.insecure_channel(own.bound, [("grpc.use_local_subchannel_pool", 1)]) as one:
            sleeping = [one.unary_unary("/t.T/sleep").future(b"30", timeout=60) for _ in range(3)]
            assert own.methods.began.wait(20)
            wait_until(lambda: own.server._calls.budget.held(CALLS) == 3, 20, "three calls")
            with pytest.raises(grpc.RpcError, match="this connection holds 3 calls") as caught:
                one.unary_unary("/t.T/echo")(b"x", timeout=20)
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            with grpc.insecure_channel(own.bound, [("grpc.use_local_subchannel_pool", 1)]) as other:
                last = other.unary_unary("/t.T/sleep").future(b"30", timeout=60)
                wait_until(lambda: own.server._calls.budget.held(CALLS) == 4, 20, "four calls")
                with pytest.raises(grpc.RpcError, match="the server holds 4 calls"):
                    other.unary_unary("/t.T/echo")(b"x", timeout=20)
                last.cancel()
            for call in sleeping:
                call.cancel()
    finally:
        own.close()
