"""What a connection of gRPC does while others wait: bytes behind its turn, streams of a full peer, and refusals."""

from __future__ import annotations

import gzip
from types import SimpleNamespace

import pytest
from tests.http2_frames import PING, data_frame, frame, head
from tests.loops import turns
from tests.unit.server.test_rpc_messages import ENDED, Port, opened

from jurybox import native
from jurybox.server.gateway import grpc_connection
from jurybox.server.security.limits import RECEIVED

MIB = 1 << 20


async def test_what_arrives_while_received_events_wait_for_their_turn_is_parsed_with_it(monkeypatch):
    """A transport may still have bytes that it read before it was paused."""
    now, queued, port = [100.0], [], Port()

    def monotonic():
        now[0] += 0.0011  # each look at the clock
        return now[0]

    monkeypatch.setattr(port.calls.turns, "later", lambda who, _seconds: queued.append(who))
    monkeypatch.setattr(grpc_connection, "time", SimpleNamespace(monotonic=monotonic))
    first, last = range(1, 41, 2), range(41, 61, 2)
    for numbers in (first, last):
        port.hears(b"".join(head(n, b"/t.T/keep") + data_frame(n, b"%d" % n) for n in numbers))
    assert queued and not port.wire.reads
    while queued:
        queued.pop().go_on()
    assert [content for content, _ in port.kept] == [b"%d" % n for n in (*first, *last)]
    assert port.wire.reads


async def test_a_read_takes_no_longer_than_what_it_brought(monkeypatch):
    looks, port = [], Port()

    def monotonic():
        looks.append(None)
        return 100.0 + 0.0001 * len(looks)

    monkeypatch.setattr(grpc_connection, "time", SimpleNamespace(monotonic=monotonic))
    port.hears(frame(PING, 1, 0, bytes(8)))
    assert len(looks) < 6, "it does not look for more until its turn is over"


async def test_a_stream_goes_on_when_its_peer_has_room_again():
    """The peer says so by a frame; the transport was never full."""
    port = Port()
    port.native.queue = 2 * MIB
    port.asks(1, b"3", method=b"count")
    await turns()
    assert port.native.sent == {1: [b"0"]}
    port.native.queue = 0
    port.hears(frame(PING, 1, 0, bytes(8)))
    await turns()
    assert port.native.sent == {1: [b"0", b"1", b"2"]} and port.native.ends == {1: (0, "", {})}


async def test_a_connection_is_busy_with_calls_that_native_code_answers():
    port = Port()
    assert not port.connection.busy
    port.native.calls = 1
    assert not port.connection.calls and port.connection.busy
    port.native.calls = 0
    assert not port.connection.busy


async def test_an_ordinary_call_whose_message_does_not_come_ends_at_its_deadline():
    port = Port()
    port.hears(opened(b"plain", 1, (b"grpc-timeout", b"60S")))
    (seconds,) = port.deadlines
    assert 0 < seconds <= 60
    port.clock.timers[-1].call()
    assert port.native.ends[1][1] == "Deadline Exceeded" and not port.connection.calls


@pytest.mark.parametrize(
    ("each", "in_all", "says"),
    [
        ((1000, MIB, 9), (MIB, MIB, 9), "this connection holds requests of"),
        ((MIB, MIB, 9), (1000, MIB, 9), "the server holds requests of"),
        ((MIB, MIB, 1), (MIB, MIB, 9), "this connection holds 1 calls, of at most 1 at once"),
        ((MIB, MIB, 9), (MIB, MIB, 1), "the server holds 1 calls, of at most 1 at once"),
    ],
)
async def test_a_refusal_for_want_of_room_names_what_there_is_too_much_of_and_whose(each, in_all, says):
    port = Port(budget=native.Budget(each, in_all))
    port.asks(1, b"x")
    if "calls" in says:
        port.asks(3, b"x")
    else:
        port.asks(3, bytes(5000))
    assert says in port.native.ends[3][1]


async def test_messages_of_a_stream_that_wait_count_as_much_compressed_as_not():
    """Each takes some memory beside its bytes, until it is taken."""
    held = []
    for compressed in (False, True):
        port, content = Port(), b"a" * 100
        port.hears(head(1, b"/t.T/double", (b"grpc-encoding", b"gzip")))
        call = port.budget.held(RECEIVED)
        sent = gzip.compress(content) if compressed else content
        for _ in range(20):
            port.hears(data_frame(1, sent, compressed=compressed, ends=False))
        held.append(port.budget.held(RECEIVED) - call)
        await turns(100)
        assert port.native.sent[1] == [2 * content] * 20
        assert port.budget.held(RECEIVED) == call + 100, "what the method holds itself"
        port.hears(ENDED)
        await turns()
        assert port.native.ends == {1: (0, "", {})} and port.budget.held(RECEIVED) == 0
    assert held[0] == held[1] > 20 * 100
