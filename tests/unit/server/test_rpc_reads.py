"""After how much of a read a connection of gRPC lets others come first, over a transport without a socket."""

from __future__ import annotations

import pytest
from tests.http2_frames import DATA, HELLO, frame, head
from tests.wires import Wire

from jurybox import native
from jurybox.server.gateway.grpc_calls import Calls
from jurybox.server.gateway.grpc_connection import RpcConnection
from jurybox.server.security.access import Access
from jurybox.server.security.limits import budget_of
from jurybox.server.security.pace import HEAP, Turns

if missing := native.nghttp2()[1]:
    pytest.skip(missing, allow_module_level=True)

MIB = 1 << 20


class Busy(Turns):
    """Turns while somebody else wants something, or nobody does."""

    def __init__(self, rests):
        super().__init__()
        self.rests, self.waiting = rests, []

    def rest(self, who, seconds):
        return self.rests

    def later(self, who, seconds):
        self.waiting.append(who)


@pytest.mark.parametrize(
    ("size", "rests", "waits"), [(HEAP, 1.0, True), (HEAP - 1, 1.0, False), (HEAP, 0.0, False), (HEAP + 1, 1.0, True)]
)
async def test_a_large_read_lets_others_come_first_if_somebody_wants_something(size, rests, waits):
    turns = Busy(rests)
    calls = Calls(Access(max_message=MIB), budget_of(MIB), {"/t.T/keep": lambda *_: True}, turns=turns)
    connection, wire = RpcConnection(calls), Wire(peer=("127.0.0.1", 5000))
    connection.connection_made(wire)
    sent = HELLO + head(1, b"/t.T/keep")
    parts = [b"\0" + MIB.to_bytes(4), *[bytes(16_000)] * 5]  # a message that goes on
    sent += b"".join(frame(DATA, 0, 1, part) for part in parts)[: size - len(sent)]
    connection.get_buffer(size)[: len(sent)] = sent
    connection.buffer_updated(len(sent))
    assert turns.waiting == [connection] * waits and wire.reads is not waits
    if waits:
        connection.go_on()
        assert wire.reads, "its turn has come"
    assert not wire.closed
    connection.connection_lost(None)
