"""Connections of gRPC over a transport without a socket, by a clock of the test's own: what each does, and when."""

from __future__ import annotations

import asyncio
import socket
import struct
from types import SimpleNamespace

import grpc
import pytest
from tests.http2_frames import DATA, GOAWAY, HEAD, HELLO, PING, RESET, SETTINGS, data_frame, frame, head
from tests.loops import turns
from tests.wires import Wire

from jurybox import native
from jurybox.server.gateway import grpc_calls
from jurybox.server.gateway.grpc_calls import Calls
from jurybox.server.gateway.grpc_connection import RpcConnection
from jurybox.server.security.access import Access
from jurybox.server.security.limits import ANSWERS, CALLS, RECEIVED, SILENCE, budget_of

if missing := native.nghttp2()[1]:
    pytest.skip(missing, allow_module_level=True)

MIB = 1 << 20


def asked(number):
    """A call of `keep` that is not complete."""
    return head(number, b"/t.T/keep")


class Clock:
    """The time and the timers of an event loop; its tasks are the loop's own."""

    def __init__(self):
        self.now, self.timers, self._loop = 100.0, [], asyncio.get_running_loop()

    def time(self):
        return self.now

    def call_later(self, seconds, call, *arguments):
        timer = SimpleNamespace(at=self.now + seconds, call=lambda: call(*arguments))
        timer.cancel = lambda: self.timers.remove(timer)
        self.timers.append(timer)
        return timer

    def passes(self, seconds):
        """Let so much time pass, and call what is due by then."""
        until = self.now + seconds
        while due := [timer for timer in self.timers if timer.at <= until]:
            timer = min(due, key=lambda one: one.at)
            self.timers.remove(timer)
            self.now = timer.at
            timer.call()
        self.now = until

    def __getattr__(self, name):
        return getattr(self._loop, name)


class Http2Wire(Wire):
    """A transport to a peer that reads frames."""

    @property
    def frames(self):
        """Kind, flags and call of each frame that was sent."""
        found, at = [], 0
        while at + 9 <= len(self.sent):
            size, call = (
                int.from_bytes(self.sent[at : at + 3], "big"),
                int.from_bytes(self.sent[at + 5 : at + 9], "big"),
            )
            found.append((self.sent[at + 3], self.sent[at + 4], call))
            at += 9 + size
        return found

    def answered(self):
        """The calls that were ended."""
        return [call for kind, flags, call in self.frames if kind == HEAD and flags & 1]


class Port:
    """A port with two methods: `keep`, which waits until the test answers it, and `Publish` with its streams."""

    def __init__(self, **options):
        self.kept = []
        options = {"access": Access(max_message=MIB), "budget": budget_of(MIB)} | options
        self.calls = Calls(direct={"/t.T/keep": self.keep}, **options)
        self.clock = self.calls.loop = Clock()
        as_it_is = {"request_deserializer": bytes, "response_serializer": bytes}
        handlers = {
            "keep": grpc.unary_unary_rpc_method_handler(None, **as_it_is),
            "Publish": grpc.stream_stream_rpc_method_handler(self.double, **as_it_is),
        }
        self.calls.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))

    def keep(self, content, call):
        self.kept.append((content, call))
        return True

    async def double(self, requests, _context):
        async for request in requests:
            yield 2 * request

    def connected(self, data=HELLO, peer=("127.0.0.1", 5000)):
        """Return a connection that has sent these bytes, and its transport."""
        connection, wire = RpcConnection(self.calls), Http2Wire(peer=peer)
        connection.connection_made(wire)
        if data:
            heard(connection, data)
        return connection, wire


def heard(connection, data):
    """Let a connection receive bytes."""
    connection.get_buffer(len(data))[: len(data)] = data
    connection.buffer_updated(len(data))


async def test_a_quiet_peer_is_pinged_and_ended_if_it_does_not_answer():
    port = Port()
    connection, wire = port.connected()
    port.clock.passes(19.9)
    assert PING not in [kind for kind, *_ in wire.frames]
    port.clock.passes(0.1)
    assert [kind for kind, *_ in wire.frames].count(PING) == 1
    port.clock.passes(19.9)
    assert not wire.aborted
    port.clock.passes(0.1)
    assert wire.aborted and [kind for kind, *_ in wire.frames].count(PING) == 1
    assert not port.clock.timers


async def test_a_peer_that_says_something_is_asked_after_it_was_quiet_again():
    port = Port()
    connection, wire = port.connected()
    port.clock.passes(15.0)
    heard(connection, frame(PING, 1, 0, bytes(8)))
    port.clock.passes(19.0)
    assert PING not in [kind for kind, *_ in wire.frames]
    port.clock.passes(1.0)
    assert [kind for kind, *_ in wire.frames].count(PING) == 1
    port.clock.passes(10.0)
    heard(connection, frame(PING, 1, 0, bytes(8)))  # its answer
    port.clock.passes(25.0)
    assert [kind for kind, *_ in wire.frames].count(PING) == 2 and not wire.aborted
    port.clock.passes(15.0)
    assert wire.aborted


@pytest.mark.parametrize(
    ("peer", "named"),
    [(("10.0.0.1", 7), "ipv4:10.0.0.1:7"), (("fe80::1", 7, 0, 0), "ipv6:[fe80::1]:7"), (None, "")],
)
async def test_a_peer_has_the_name_that_grpcio_gives_it(peer, named):
    connection, _ = Port().connected(peer=peer)
    assert connection.peer == named


async def test_the_end_of_a_connection_ends_all_that_belongs_to_it():
    port, gone = Port(), []
    connection, wire = port.connected(HELLO + asked(1) + data_frame(1, b"x") + head(3, b"/t.T/Publish"))
    ((content, call),) = port.kept
    assert content == b"x" and connection.busy and port.calls.busy and not connection.idle
    call.on_gone = lambda: gone.append("the call")
    call.farewells["mine"] = lambda: gone.append("the connection")
    wire.unsent = 1000
    connection.pause_writing()
    assert port.calls.budget.held(ANSWERS) == 1000
    waiting = asyncio.ensure_future(connection.taken_some())
    given_up = asyncio.ensure_future(connection.taken_some())
    await turns()
    given_up.cancel()
    await turns()
    assert not waiting.done()
    connection.connection_lost(None)
    await turns()
    assert gone == ["the call", "the connection"]
    assert waiting.done() and given_up.cancelled() and call.done()
    assert not port.calls.connections and not port.calls.busy and not port.clock.timers
    assert [port.calls.budget.held(kind) for kind in (RECEIVED, ANSWERS, CALLS)] == [0, 0, 0]
    call.reply(b"too late")
    connection.abort()
    connection.close()
    connection.go_on()
    connection.flush()
    assert not wire.aborted and not wire.closed


async def test_answers_wait_while_the_transport_is_full_and_are_counted():
    port = Port()
    connection, wire = port.connected(HELLO + asked(1) + data_frame(1, b"x"))
    wire.unsent = 1000
    connection.pause_writing()
    before = wire.sent
    port.kept[0][1].reply(b"answer")
    assert wire.sent == before and connection.full(1)
    waiting = asyncio.ensure_future(connection.taken_some())
    await turns()
    connection.resume_writing()
    await turns()
    assert waiting.done() and not connection.full(1)
    assert b"answer" in wire.sent and wire.answered() == [1]
    assert port.calls.budget.held(ANSWERS) == 0


async def test_bytes_that_are_no_http2_close_the_connection():
    port = Port()
    _, wire = port.connected(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
    assert wire.closed


async def test_many_calls_at_once_are_handled_in_turns_while_nothing_is_read(monkeypatch):
    now = [100.0]

    def monotonic():
        now[0] += 0.0011  # each look at the clock
        return now[0]

    port, queued = Port(), []
    monkeypatch.setattr(grpc_calls.Turns, "later", lambda _turns, who, _seconds: queued.append(who))
    connection, wire = port.connected()
    monkeypatch.setattr("jurybox.server.gateway.grpc_connection.time.monotonic", monotonic)
    heard(connection, b"".join(asked(number) + data_frame(number, b"x") for number in range(1, 41, 2)))
    sizes = [len(port.kept)]
    while queued:
        assert not wire.reads
        queued.pop().go_on()
        sizes.append(len(port.kept))
    assert wire.reads and sizes[-1] == 20
    assert sizes == sorted(set(sizes)) and len(sizes) > 2, sizes
    for _, call in port.kept:
        call.reply(b"y")
    assert wire.answered() == list(range(1, 41, 2))


async def test_a_connection_beyond_the_most_is_ended_unless_another_one_is_idle(monkeypatch):
    monkeypatch.setattr(grpc_calls, "GRPC_CONNECTIONS", 3)
    port = Port()
    works, quiet, later = (port.connected(data) for data in (HELLO + asked(1) + data_frame(1, b"x"), HELLO, HELLO))
    refused, wire = port.connected(b"")
    assert wire.aborted and not wire.sent, "the others have said something just now"
    assert refused not in port.calls.connections and len(port.clock.timers) == 3
    port.clock.passes(2.0)
    heard(quiet[0], frame(PING, 1, 0, bytes(8)))
    port.clock.passes(2.0)
    admitted, wire = port.connected()
    assert later[1].aborted and not wire.aborted, "it was quiet for longest"
    assert not works[1].aborted and not quiet[1].aborted
    port.connected()
    assert quiet[1].aborted and not works[1].aborted
    assert len(port.calls.connections) == 3 and admitted in port.calls.connections


async def test_idle_connections_are_found_behind_any_number_of_busy_ones(monkeypatch):
    monkeypatch.setattr(grpc_calls, "GRPC_CONNECTIONS", 65)
    port = Port()
    for _ in range(64):
        port.connected(HELLO + asked(1) + data_frame(1, b"x"))
    idle, beneath = port.connected()
    port.clock.passes(2.0)
    assert port.connected()[1].aborted, "the oldest ones are looked at first"
    assert not port.connected()[1].aborted and beneath.aborted
    assert len(port.calls.connections) == 65 and idle not in port.calls.connections


async def test_a_stop_refuses_calls_and_ends_when_the_last_connection_has_gone():
    port = Port()
    connection, wire = port.connected(HELLO + asked(1) + data_frame(1, b"x"))
    stopping = asyncio.ensure_future(port.calls.stop(60.0))
    await turns()
    assert wire.answered() == [1] and GOAWAY in [kind for kind, *_ in wire.frames] and wire.closed
    assert port.kept[0][1].done() and not stopping.done()
    connection.connection_lost(None)
    await turns()
    assert stopping.done()


async def test_a_port_without_connections_stops_at_once_and_takes_no_more():
    port, listener = Port(), socket.create_server(("127.0.0.1", 0))
    await port.calls.start(listener)
    where = listener.getsockname()
    _, writer = await asyncio.open_connection(*where)
    writer.close()
    stopping = asyncio.ensure_future(port.calls.stop(60.0))
    await asyncio.wait_for(stopping, 30)
    with pytest.raises(OSError):
        await asyncio.open_connection(*where)


async def test_a_stop_waits_no_longer_than_its_grace():
    port = Port()
    port.connected()
    await asyncio.wait_for(port.calls.stop(0.01), 30)
    assert len(port.calls.connections) == 1


async def test_a_message_that_does_not_go_on_is_ended_after_a_while():
    port = Port()
    connection, wire = port.connected(HELLO + asked(1))
    part = b"\0" + struct.pack(">I", 1000) + bytes(10)
    heard(connection, frame(DATA, 0, 1, part))
    began = asyncio.get_running_loop().time()
    connection.end_silent(began + SILENCE - 5)
    assert not wire.answered()
    connection.end_silent(began + SILENCE + 60)
    assert wire.answered() == [1] and port.calls.budget.held(RECEIVED) == 0
    assert not connection.calls


async def test_a_port_knows_the_methods_that_were_added_in_either_way():
    port = Port()
    handler = grpc.unary_unary_rpc_method_handler(None)
    port.calls.add_registered_method_handlers("u.U", {"one": handler})
    assert port.calls.found(b"/u.U/one") is handler
    found = port.calls.found(b"/t.T/Publish")
    assert found.request_streaming and port.calls.found(b"/t.T/Publish") is found
    assert port.calls.found(b"/t.T/Read") is port.calls.found(b"/u.U/two") is None
    port.calls.add_registered_method_handlers("u.U", {"two": handler})
    assert port.calls.found(b"/u.U/two") is handler, "what was not there may be there later"


async def test_a_method_is_looked_up_once_however_often_it_is_called():
    port, asked = Port(), []
    handler = grpc.unary_unary_rpc_method_handler(None)
    port.calls.add_generic_rpc_handlers(
        [SimpleNamespace(service=lambda details: asked.append(details.method) or handler)]
    )
    for _ in range(3):
        assert port.calls.found(b"/u.U/one") is handler
    assert asked == ["/u.U/one"]


async def test_a_call_that_could_not_even_begin_is_ended_and_the_others_go_on(monkeypatch):
    def fail(path):
        raise MemoryError("none left")

    port = Port()
    connection, wire = port.connected(HELLO + asked(1))
    found = port.calls.found
    monkeypatch.setattr(port.calls, "found", fail)
    heard(connection, asked(3) + data_frame(3, b"y"))
    assert wire.answered() == [3]
    monkeypatch.setattr(port.calls, "found", found)
    heard(connection, data_frame(1, b"x") + asked(5) + data_frame(5, b"z"))
    assert [content for content, _ in port.kept] == [b"x", b"z"]
    for _, call in port.kept:
        call.reply(b"r")
    assert wire.answered() == [3, 1, 5]


async def test_a_client_of_one_call_at_a_time_is_told_from_others():
    port = Port()
    connection, _ = port.connected(HELLO + asked(1) + data_frame(1, b"x"))
    first = port.kept[0][1]
    assert first.connection is connection.client is connection.alone is not None
    heard(connection, asked(3) + data_frame(3, b"y"))
    assert port.kept[1][1].connection is None and connection.alone is None
    first.reply(b"x")
    port.kept[1][1].reply(b"y")
    heard(connection, asked(5) + data_frame(5, b"z"))
    assert port.kept[2][1].connection is connection.client
    port.kept[2][1].reply(b"z")
    heard(connection, asked(7) + data_frame(7, b"x") + asked(9) + data_frame(9, b"x"))
    assert port.kept[3][1].connection is None, "two came at once"


async def test_a_reset_ends_only_its_own_call():
    port, gone = Port(), []
    connection, wire = port.connected(b"".join([HELLO, *(asked(n) + data_frame(n, b"x") for n in (1, 3))]))
    for number, (_, call) in zip((1, 3), port.kept, strict=True):
        call.on_gone = lambda number=number: gone.append(number)
    assert not connection.busy and not connection.idle, "they only read"
    heard(connection, frame(RESET, 0, 1, struct.pack(">I", 8)))
    assert gone == [1] and [call.done() for _, call in port.kept] == [True, False]
    port.kept[1][1].reply(b"y")
    assert wire.answered() == [3] and connection.idle


async def test_the_server_speaks_first_and_answers_all_that_came_at_once_with_one_write(monkeypatch):
    port, writes = Port(), []
    monkeypatch.setattr(Wire, "write", lambda wire, data: writes.append(data))
    monkeypatch.setattr("jurybox.server.gateway.grpc_connection.time.monotonic", lambda: 100.0)
    port.calls.direct[b"/t.T/keep"] = lambda content, call: call.reply(content) or True
    connection, wire = port.connected(b"")
    assert [data[3] for data in writes] == [SETTINGS]
    heard(connection, HELLO)
    writes.clear()
    heard(connection, b"".join(asked(number) + data_frame(number, b"x") for number in range(1, 41, 2)))
    assert len(writes) == 1, "no time has passed, so it was one turn, too"
    wire.sent = writes[0]
    assert wire.answered() == list(range(1, 41, 2)) and wire.reads


async def test_a_peer_that_says_farewell_is_disconnected_after_its_last_answer():
    port = Port()
    connection, wire = port.connected(HELLO + asked(1) + data_frame(1, b"x"))
    heard(connection, frame(GOAWAY, 0, 0, bytes(8)))
    assert not wire.closed
    port.kept[0][1].reply(b"y")
    assert wire.closed and wire.answered() == [1]


async def test_nothing_is_handled_of_a_connection_that_is_closing(monkeypatch):
    port, queued = Port(), []
    monkeypatch.setattr(grpc_calls.Turns, "later", lambda _turns, who, _seconds: queued.append(who))
    connection, wire = port.connected()
    ticks = iter(range(1000))
    monkeypatch.setattr("jurybox.server.gateway.grpc_connection.time.monotonic", lambda: float(next(ticks)))
    heard(connection, b"".join(asked(number) + data_frame(number, b"x") for number in range(1, 41, 2)))
    handled = len(port.kept)
    wire.close()
    queued.pop().go_on()
    assert len(port.kept) == handled and not queued
