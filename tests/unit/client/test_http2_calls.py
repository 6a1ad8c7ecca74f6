"""Calls over HTTP/2 lines of our own, to a gateway that does what it is told."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tests.serving import wait_until
from tests.unit.client.played_gateway import BUSY, CUT, DRAIN, HOLD, MESSAGE, Fail, Started, ways

from jurybox import native
from jurybox.client.remote import http2_call, http2_calls, http2_line
from jurybox.client.remote.grpc_channel import failure
from jurybox.client.remote.http2_calls import Http2Calls, can_dial
from jurybox.client.remote.infer_calls import INFER, Failed
from jurybox.protocol.errors import Code, Refused

pytestmark = [
    pytest.mark.skipif(bool(native.nghttp2()[1]), reason="the system has no libnghttp2"),
    pytest.mark.usefixtures("short_pauses"),
]


def both_ways_are_answered(address: str) -> None:
    """Make a call in each way over a connection of its own."""
    calls = Http2Calls(address, ())
    other = Started(calls)
    for ask in ways(calls, other):
        assert ask(b"x") == b"to x"
    other.calls.close()
    calls.close()


def test_calls_one_after_the_other_share_a_line_and_bring_the_token(gateway, calls):
    for number in range(3):
        assert calls.ask(b"%d" % number, 30.0) == b"to %d" % number
    assert len(gateway.peers) == 1 and gateway.paths == [INFER] * 3
    assert all(one[b"authorization"] == b"Bearer me" for one in gateway.metadata)


def test_calls_at_the_same_time_have_lines_of_their_own_which_are_kept(gateway, calls):
    gateway.script = [HOLD, HOLD]
    came: dict[bytes, bytes] = {}
    threads = [
        threading.Thread(target=lambda each=each: came.__setitem__(each, calls.ask(each, 30.0)))
        for each in (b"a", b"b")
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(gateway.held) == 2)
    for peer, call, message in reversed(gateway.held):
        peer.answer(call, message)
    for thread in threads:
        thread.join(30)
    assert came == {b"a": b"to a", b"b": b"to b"} and len(gateway.peers) == 2
    assert calls.ask(b"c", 30.0) == b"to c" and len(gateway.peers) == 2


@pytest.mark.parametrize("size", [0, 1, 70_000, 20 << 20])
def test_messages_of_any_length_arrive_whole(gateway, calls, started, size):
    message = os.urandom(size)
    for ask in ways(calls, started):
        assert ask(message) == b"to " + message


def test_a_failed_call_has_the_status_the_words_and_the_code_of_the_gateway(gateway, calls, started):
    for ask in ways(calls, started):
        gateway.script = [Fail(9, "no: 100% full, ä", (("jurybox-code", str(int(Code.BUSY))),))]
        with pytest.raises(grpc.RpcError) as caught:
            ask(b"x")
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert failure(caught.value) == (Code.BUSY, "no: 100% full, ä")
        assert ask(b"y") == b"to y"
    assert len(gateway.peers) == 1, "the line was used again"


@pytest.mark.parametrize("what", [BUSY, CUT])
@pytest.mark.parametrize("times", [4, 5])
def test_a_call_is_made_again_while_the_gateway_is_unavailable_but_not_for_ever(gateway, calls, started, what, times):
    for ask in ways(calls, started):
        gateway.script, gateway.asked[:] = [what] * times, []
        if times < 5:
            assert ask(b"x") == b"to x"
        else:
            with pytest.raises(grpc.RpcError, match="not now" if what is BUSY else "closed|reset") as caught:
                ask(b"x")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert gateway.asked == [b"x"] * 5


def test_what_a_gateway_has_said_of_itself_outlives_its_connection(gateway, calls, started):
    for ask in ways(calls, started):
        gateway.script = [Fail(14, "it is stopping", (("jurybox-code", str(int(Code.DRAINING))),)), *[CUT] * 9]
        with pytest.raises(grpc.RpcError) as caught:
            ask(b"x")
        assert failure(caught.value) == (Code.DRAINING, "it is stopping") and len(gateway.script) < 6


def test_the_pauses_between_attempts_grow(gateway, calls, started, monkeypatch):
    monkeypatch.setattr(http2_call, "_FIRST_PAUSE", 0.02)
    for ask in ways(calls, started):
        gateway.script, at = [BUSY] * 4, time.monotonic()
        ask(b"x")
        assert time.monotonic() - at >= 0.02 * (1 + 2 + 4 + 8)


@pytest.mark.parametrize("asks", [False, True])
def test_a_line_that_was_closed_while_it_was_idle_is_replaced_without_a_pause(
    gateway, calls, started, endless_pauses, asks
):
    for ask in ways(calls, started):
        assert ask(b"x") == b"to x"
        gateway.give_up(asks=asks)
        assert ask(b"y") == b"to y" and len(gateway.peers) == 1


@pytest.mark.parametrize("asks", [False, True])
def test_many_lines_that_were_closed_while_they_were_idle_cost_a_call_no_attempts(
    gateway, calls, started, endless_pauses, asks
):
    for ask in ways(calls, started):
        gateway.script = [HOLD] * 15
        threads = [threading.Thread(target=calls.ask, args=(b"x", 30.0)) for _ in range(15)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(gateway.held) == 15)
        for peer, call, message in gateway.held:
            peer.answer(call, message)
        for thread in threads:
            thread.join(30)
        gateway.give_up(asks=asks)
        gateway.held.clear()
        assert ask(b"y") == b"to y" and len(gateway.peers) == 1 and len(calls._free) < 2


def test_a_gateway_that_leaves_answers_what_it_has_and_gets_nothing_new_there(gateway, calls, started):
    for ask in ways(calls, started):
        gateway.script = [DRAIN]
        assert ask(b"x") == b"to x"
        before = len(gateway.peers)
        assert ask(b"y") == b"to y" and len(gateway.peers) == before + 1


def test_a_call_in_flight_is_answered_by_a_gateway_that_leaves_and_the_next_goes_elsewhere(gateway, started):
    gateway.script = [HOLD, DRAIN]
    started.start(b"x")
    started.start(b"y")
    assert started.wait_for(b"y") == [b"to y"]
    started.start(b"z")
    assert started.wait_for(b"z") == [b"to z"]
    ((peer, call, message),) = gateway.held
    peer.answer(call, message)
    assert started.wait_for(b"x") == [b"to x"] and gateway.asked == [b"x", b"y", b"z"]


def test_where_nobody_listens_the_address_is_named(gateway, calls, started):
    gateway.deaf()
    for ask in ways(calls, started):
        with pytest.raises(grpc.RpcError, match=f"no connection to 127.0.0.1:{gateway.port}: .*refused") as caught:
            ask(b"x")
        assert failure(caught.value)[0] == Code.SERVER_GONE
    gateway.listen(gateway.port)
    assert calls.ask(b"x", 30.0) == b"to x"


def test_a_name_that_nobody_knows_is_a_gateway_that_is_unavailable(monkeypatch):
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(grpc.RpcError, match="no connection to nowhere:80: Name or service not known"):
        Http2Calls("grpc://nowhere:80", ()).ask(b"x", 30.0)


def test_the_addresses_of_a_host_are_tried_in_turn_without_a_pause(gateway, endless_pauses, monkeypatch):
    found = socket.getaddrinfo
    free = socket.create_server(("127.0.0.1", 0))
    dead = free.getsockname()[1]
    free.close()

    def here(*given: Any, **more: Any) -> list[Any]:
        return [*found("127.0.0.1", dead, **more), *found("127.0.0.1", gateway.port, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", here)
    both_ways_are_answered("grpc://two:1")


def test_an_address_to_which_there_is_no_way_is_named_and_another_one_tried(gateway, endless_pauses, monkeypatch):
    found = socket.getaddrinfo
    nowhere = ("255.255.255.255", 1)  # connecting fails at once
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **more: found(*nowhere, **more))
    line = http2_line.Line(Http2Calls("grpc://two:1", ())._target, 0)
    assert line.broken == f"no connection to two:1: {os.strerror(errno.ENETUNREACH)}"
    there = lambda *_, **more: [*found(*nowhere, **more), *found("127.0.0.1", gateway.port, **more)]  # noqa: E731
    monkeypatch.setattr(socket, "getaddrinfo", there)
    both_ways_are_answered("grpc://two:1")


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """An address that never answers who connects."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=0)
    address = listening.getsockname()
    with contextlib.ExitStack() as stack:
        stack.enter_context(listening)
        for _ in range(4):
            last = stack.enter_context(socket.socket())
            last.setblocking(False)
            last.connect_ex(address)
        if select.select([], [last], [], 0.1)[1]:
            pytest.skip("the system takes connections beyond the backlog")
        yield address


@pytest.fixture
def half_silent(gateway, silent, monkeypatch) -> Iterator[Http2Calls]:
    """To a host with two addresses, of which the first one never answers."""
    found = socket.getaddrinfo
    here = lambda *_, **more: [*found(*silent, **more), *found("127.0.0.1", gateway.port, **more)]  # noqa: E731
    monkeypatch.setattr(socket, "getaddrinfo", here)
    calls = Http2Calls("grpc://two:1", ())
    yield calls
    calls.close()


@pytest.mark.parametrize("way", [0, 1])
def test_an_address_that_does_not_answer_is_left_for_the_next_one(
    gateway, half_silent, way, endless_pauses, monkeypatch
):
    monkeypatch.setattr(http2_line, "_CONNECTING", 0.2)
    other = Started(half_silent)
    for message in (b"x", b"y"):
        assert ways(half_silent, other)[way](message) == b"to " + message
    with monkeypatch.context() as patched:
        patched.setattr(http2_line, "_CONNECTING", 1000.0)
        lines = [half_silent.take(looks=False) for _ in range(2)]
        for line in lines:
            if not line.was_ready:
                line.wait(30.0)
        assert all(line.was_ready for line in lines), "later lines begin with the address that answers"
    other.calls.close()


def test_a_call_that_was_late_to_connect_lets_the_next_one_try_another_address(half_silent):
    with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
        half_silent.ask(b"x", 0.1)
    assert half_silent.ask(b"y", 30.0) == b"to y"


def test_only_the_first_start_waits_for_a_connection_that_does_not_come_about(silent, monkeypatch):
    monkeypatch.setattr(http2_calls, "_PATIENCE", 0.05)
    calls = Http2Calls(f"grpc://127.0.0.1:{silent[1]}", ())
    waits: list[float] = []
    wait = http2_line.Line.wait

    def counted(line: http2_line.Line, seconds: float) -> None:
        waits.append(seconds)
        wait(line, seconds)

    monkeypatch.setattr(http2_line.Line, "wait", counted)
    started = Started(calls)
    started.start(b"x")
    assert waits and waits.pop() <= 0.05
    waits.clear()
    started.start(b"y")
    assert not waits
    started.calls.close()


def test_a_call_whose_time_is_over_ends_and_its_line_goes_on(gateway, calls, started):
    for number, ask in enumerate((lambda: calls.ask(b"x", 0.2), lambda: started.start(b"x", 0.2))):
        gateway.script = [HOLD]
        if number == 0:
            with pytest.raises(grpc.RpcError) as caught:
                ask()
            error = caught.value
        else:
            ask()
            (error,) = started.wait_for(b"x")
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert ways(calls, started)[number](b"y") == b"to y" and len(gateway.peers) == 1
        wait_until(lambda number=number: len(gateway.gone) == number + 1, what="the gateway is told")


def test_a_response_over_the_limit_is_refused_and_the_line_goes_on(gateway, monkeypatch):
    for module in (http2_call, http2_line):
        monkeypatch.setattr(module, "MOST_BYTES", 1000)
    calls = Http2Calls(gateway.address, ())
    with pytest.raises(grpc.RpcError, match="the response has 1003 bytes, more than 1000") as caught:
        calls.ask(bytes(1000), 30.0)
    assert failure(caught.value)[0] == Code.TOO_LARGE
    assert calls.ask(b"x", 30.0) == b"to x" and len(gateway.peers) == 1
    started = Started(calls)
    for ask in ways(calls, started):
        with pytest.raises(grpc.RpcError, match="the request has 1001 bytes, more than 1000") as caught:
            ask(bytes(1001))
        assert failure(caught.value)[0] == Code.TOO_LARGE
    assert len(gateway.asked) == 2
    started.calls.close()
    calls.close()


def test_calls_that_are_awaited_later_share_a_line_and_are_answered_in_any_order(gateway, started):
    gateway.script = [HOLD] * 20
    names = [b"%d" % number for number in range(20)]
    for name in names:
        started.start(name)
    wait_until(lambda: len(gateway.held) == 20, what="calls that nobody waits for yet")
    assert len(gateway.peers) == 1
    for number, (peer, call, message) in enumerate(reversed(gateway.held)):
        peer.answer(call, message)
        if number == 0:
            assert started.wait_for(names[-1]) == [b"to 19"] and len(started.ended) == 1
    assert started.wait_for(*names) == [b"to " + name for name in names]


def test_a_wait_ends_with_its_time_and_with_the_first_call_that_ends(gateway, started):
    gateway.script = [HOLD, HOLD]
    started.start(b"x")
    started.start(b"y")
    started.calls.wait(0.0)
    began = time.monotonic()
    started.calls.wait(0.3)
    assert time.monotonic() - began >= 0.3 and not started.ended
    wait_until(lambda: len(gateway.held) == 2)
    peer, call, message = gateway.held[1]
    threading.Timer(0.1, peer.answer, (call, message)).start()
    while not started.ended:
        started.calls.wait(1000.0)
    assert started.ended == {b"y": b"to y"}


def test_an_answer_that_came_in_time_is_read_although_nobody_waited_until_then(gateway, started, monkeypatch):
    monkeypatch.setattr(http2_line, "_CHUNK", 64)
    gateway.script = [None] * 19 + [HOLD]
    names = [b"%d" % number for number in range(20)]
    for name in names:
        started.start(name, 2.0)
    wait_until(lambda: len(gateway.asked) == 20)
    time.sleep(max(call.left for call in started.calls._under_way) + 0.01)
    started.calls.wait(0.0)
    assert [started.ended.pop(name) for name in names[:-1]] == [b"to " + name for name in names[:-1]]
    assert started.ended[names[-1]].code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_what_a_cut_line_carried_is_made_again(gateway, started):
    gateway.script = [HOLD, HOLD]
    for name in (b"x", b"y"):
        started.start(name)
    wait_until(lambda: len(gateway.held) == 2)
    gateway.cut()
    assert started.wait_for(b"x", b"y") == [b"to x", b"to y"]
    assert sorted(gateway.asked) == [b"x", b"x", b"y", b"y"]


def test_an_answer_that_came_before_the_gateway_gave_its_line_up_is_read(gateway, started):
    gateway.script = [HOLD]
    started.start(b"x")
    wait_until(lambda: len(gateway.held) == 1)
    peer, call, message = gateway.held[0]
    peer.answer(call, message)
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no orderly end
    peer.close()
    peer.thread.join(30)
    assert started.wait_for(b"x") == [b"to x"] and gateway.asked == [b"x"]


@pytest.mark.parametrize("how", ["within a message", "before it knew it"])
def test_what_a_torn_line_carried_is_made_again_at_once(gateway, started, endless_pauses, how):
    gateway.script = [HOLD]
    started.start(b"x")
    wait_until(lambda: len(gateway.held) == 1)
    (line,) = started.calls._lines
    if how == "within a message":

        def interrupt() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            started.calls._use(line, interrupt)
        assert not line.open
    else:
        line.user = lambda: None  # the claim of a call that is over
    assert started.wait_for(b"x") == [b"to x"] and len(gateway.peers) == 2
    assert line.descriptor == -1 and line not in started.calls._lines


def test_what_a_line_carried_that_was_heard_and_then_cut_pauses_first(gateway, started, endless_pauses):
    gateway.script = [None, HOLD, None, HOLD]
    for name in (b"a", b"b"):  # the line has served, and b is held
        started.start(name)
    started.wait_for(b"a")
    started.start(b"c")
    started.wait_for(b"c")
    started.start(b"d")
    wait_until(lambda: len(gateway.held) == 2)
    calls = list(started.calls._under_way)
    gateway.cut()
    until = time.monotonic() + 30
    while any(call.line is not None for call in calls) and time.monotonic() < until:
        started.calls.wait(0.05)
    assert [call.again_at > time.monotonic() + 500 for call in calls] == [True, True]


def test_a_request_goes_on_when_there_is_room_in_the_socket_again(gateway, calls, started):
    small = (socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
    message = os.urandom(1_500_000)  # less than the windows: nothing comes back before it is whole
    for ask in ways(calls, started):
        assert ask(b"x") == b"to x"
        for line in (*calls._free, *started.calls._lines):
            assert line._socket is not None
            line._socket.setsockopt(*small)
        assert ask(message) == b"to " + message


def test_many_bytes_to_send_use_the_same_memory_again_unless_somebody_has_it_still():
    head = [(":method", "POST"), (":scheme", "http"), (":path", INFER), (":authority", "here")]
    client, budget = native.GrpcClient(head, 1 << 30), native.Budget((1 << 30,) * 3, (1 << 30,) * 3)
    server = native.GrpcConnection(1 << 30, 1 << 16, 100, native.Account(budget, 0))

    def sent(request: bytes) -> Any:
        """What the client has to send for a request, which the server answers."""
        number = client.call(request, "1S")
        made = client.outgoing()
        for kind, call, message in server.feed(bytes(made), len(made)):
            if kind == MESSAGE:
                assert (call, bytes(message)) == (number, request)
                server.taken(call, len(message))
                server.answer(call, b"yes")
                server.finish(call, 0, "", [])
        assert client.receive(server.outgoing()) == [(number, b"yes")]
        return made

    settings = client.outgoing()
    assert server.feed(settings, len(settings)) == client.receive(server.outgoing()) == []  # it takes much at once
    first = sent(b"a" * 100_000)
    held, where = bytes(first), first.__array_interface__["data"]
    second = sent(b"b" * 200_000)
    assert second.__array_interface__["data"] != where and bytes(first) == held
    where = second.__array_interface__["data"]
    del first, second
    assert sent(b"c" * 150_000).__array_interface__["data"] == where


def test_a_call_ends_once_whatever_comes_later():
    told: list[Any] = []
    call = http2_call.LineCall(b"x", 30.0)
    call.done = told.append
    call.finish(b"first")
    call.late()
    assert (call.outcome, told) == (b"first", [b"first"])


def test_a_call_that_no_gateway_has_looked_at_is_made_again_at_once_but_not_for_ever(endless_pauses):
    call = http2_call.LineCall(b"x", 30.0)
    for _ in range(5):
        call.ended((2, 7, []))
        assert call.outcome is None and call.again_at == 0.0
    call.ended((2, 7, []))
    assert call.outcome is None and call.again_at > time.monotonic() + 500


def test_a_closed_connection_refuses_calls_and_ends_those_that_are_awaited(gateway, calls, started):
    assert calls.ask(b"x", 30.0) == b"to x"
    gateway.script = [HOLD]
    started.start(b"y")
    calls.close()
    (error,) = started.wait_for(b"y")
    assert failure(error) == (Code.SERVER_GONE, "the connection was closed")
    for ask in ways(calls, started):
        with pytest.raises(Refused, match="this connection was closed: connect again"):
            ask(b"z")
    started.calls.close()
    for peer in gateway.peers:
        peer.thread.join(30)
    assert len(gateway.peers) == 1 and not gateway.peers[0].thread.is_alive(), "no line stays open"


def test_a_call_under_way_is_answered_although_its_connection_is_closed_and_its_line_ends_then(gateway, calls):
    gateway.script, came = [HOLD], []
    thread = threading.Thread(target=lambda: came.append(calls.ask(b"x", 30.0)))
    thread.start()
    wait_until(lambda: len(gateway.held) == 1)
    calls.close()
    peer, call, message = gateway.held[0]
    peer.answer(call, message)
    thread.join(30)
    peer.thread.join(30)
    assert came == [b"to x"] and not peer.thread.is_alive()


def test_the_lines_of_a_lane_that_ends_are_kept_for_others_unless_a_call_is_under_way(gateway, calls):
    first, second = Started(calls), Started(calls)
    gateway.script = [None, HOLD]
    first.start(b"x")
    assert first.wait_for(b"x") == [b"to x"]
    second.start(b"y")
    wait_until(lambda: len(gateway.held) == 1)
    first.calls.close()
    second.calls.close()
    gateway.held[0][0].thread.join(30)
    assert len(calls._free) == 1 and calls.ask(b"z", 30.0) == b"to z" and len(gateway.peers) == 2


class Loop:
    """An event loop as `Watching` tells one: which descriptors it reads, and how often it was told."""

    def __init__(self) -> None:
        self.reads: set[int] = set()
        self.told = 0
        self.on = True

    def read(self, descriptor: int) -> None:
        self.reads.add(descriptor)

    def unread(self, descriptor: int) -> None:
        self.reads.discard(descriptor)

    def tell(self) -> None:
        self.told += 1


def test_an_event_loop_reads_one_descriptor_whichever_lines_there_are(gateway, calls):
    started, loop, later = Started(calls), Loop(), Loop()
    started.calls.watch(loop)
    (descriptor,) = loop.reads
    gateway.script = [CUT]
    started.start(b"x")
    until = time.monotonic() + 30
    while not started.ended and time.monotonic() < until:
        if select.select([descriptor], [], [], 0.05)[0] or True:
            started.calls.wait(0.0)
    assert started.ended == {b"x": b"to x"} and len(gateway.peers) == 2
    started.calls.watch(later)
    assert (loop.reads, later.reads) == (set(), {descriptor})
    started.calls.close()
    assert not later.reads


def test_a_loop_is_told_of_a_call_that_ends_while_another_one_is_started(gateway, calls):
    started, loop = Started(calls), Loop()
    gateway.script = [HOLD]
    started.start(b"x")
    (line,) = started.calls._lines
    wait_until(lambda: len(gateway.held) == 1)
    started.calls.wait(0.05)
    peer, call, message = gateway.held[0]
    peer.answer(call, message)
    wait_until(lambda: bool(select.select([line.descriptor], [], [], 0)[0]), what="its answer")
    started.calls.watch(loop)
    begin = line.begin

    def begins_and_reads(call: Any) -> None:
        begin(call)
        line.turn()

    line.begin = begins_and_reads
    started.start(b"y")
    assert b"x" in started.ended and loop.told == 1
    started.wait_for(b"y")
    started.calls.close()


def test_calls_leave_nothing_to_the_garbage_collector(gateway, calls, started):
    gc.collect()
    gc.disable()
    try:
        for number in range(100):
            for ask in ways(calls, started):
                ask(b"%d" % number)
        assert gc.collect() < 100  # those of the gateway's threads; a cycle in each call would be hundreds
    finally:
        gc.enable()


def test_a_line_that_nobody_has_any_more_is_closed(gateway):
    calls = Http2Calls(gateway.address, ())
    started = Started(calls)
    started.start(b"x")
    started.wait_for(b"x")
    calls.ask(b"y", 30.0)
    assert len(gateway.peers) == 2
    del calls, started
    gc.collect()
    for peer in gateway.peers:
        peer.thread.join(30)
    assert not any(peer.thread.is_alive() for peer in gateway.peers)


def test_a_forked_child_closes_its_copies_and_the_parent_goes_on(gateway, calls, started):
    gateway.script = [HOLD]
    started.start(b"y")
    wait_until(lambda: len(gateway.held) == 1)
    assert calls.ask(b"x", 30.0) == b"to x"
    lines = [*calls._free, *started.calls._lines]
    assert len(lines) == 2
    if (child := os.fork()) == 0:
        closed = not calls._free and all(line.descriptor == -1 for line in lines)
        started.calls.forked()
        os._exit(0 if closed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    peer, call, message = gateway.held[0]
    peer.answer(call, message)
    assert started.wait_for(b"y") == [b"to y"] and calls.ask(b"z", 30.0) == b"to z" and len(gateway.peers) == 2


def test_no_files_left_is_said_with_the_remedy_and_does_no_harm_to_what_is_under_way(
    gateway, calls, started, monkeypatch
):
    def full(*_: object) -> None:
        raise OSError(24, "Too many open files")

    gateway.script = [HOLD]
    started.start(b"x")
    wait_until(lambda: len(gateway.held) == 1)
    with monkeypatch.context() as patched:
        without = SimpleNamespace(**{**vars(socket), "socket": full})  # only here: the gateway has files
        patched.setattr(http2_line, "socket", without)
        with pytest.raises(http2_calls.TooManyFiles, match="ulimit"):
            calls.ask(b"y", 30.0)
        gateway.held[0][0].close()
        for _ in range(3):
            started.calls.wait(0.01)
    assert started.wait_for(b"x") == [b"to x"]
    with monkeypatch.context() as patched:
        patched.setattr(select, "epoll", full)
        other = Started(calls)
        with pytest.raises(http2_calls.TooManyFiles, match="no epoll descriptor.*ulimit"):
            other.start(b"y")
        other.calls.close()


@pytest.mark.parametrize(
    ("address", "authority", "may"),
    [
        ("grpc://127.0.0.1:1", None, True),
        ("grpcs://127.0.0.1:1", None, False),  # grpcio brings authorities along
        ("grpcs://127.0.0.1:1", b"a certificate", True),
        ("grpc://127.0.0.1", None, False),
        ("grpc://far.example:1", None, False),
    ],
)
def test_grpcio_makes_the_calls_that_a_line_cannot(monkeypatch, address, authority, may):
    monkeypatch.setenv("grpc_proxy", "http://proxy:1")
    monkeypatch.delenv("JURYBOX_TLS_CA", raising=False)
    assert can_dial(address, authority) == may
    monkeypatch.setattr(http2_line, "native", None)
    assert not can_dial(address, authority)
    monkeypatch.setattr(http2_line, "native", SimpleNamespace(nghttp2=lambda: ("", "it is missing")))
    assert not can_dial(address, authority)


def test_the_file_of_an_authority_may_hold_text_in_any_language():
    bundle = Path(grpc.__file__).parent / "_cython" / "_credentials" / "roots.pem"
    begin, end = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----\n"
    certificate = begin + bundle.read_bytes().split(begin)[1].split(end)[0] + end
    context = http2_calls._context("# Autorité\n".encode() + certificate)
    assert len(context.get_ca_certs()) == 1


def test_a_line_that_was_interrupted_before_it_began_can_be_dropped():
    line = http2_line.Line.__new__(http2_line.Line)
    line.close()
    assert line.descriptor == -1


NAMES = [(b":status", b"200"), (b"content-type", b"application/grpc")]


@pytest.mark.parametrize(
    ("ended", "status", "said"),
    [
        ((0, 0, [*NAMES, (b"grpc-status", b"x")]), "UNKNOWN", ""),
        ((0, 0, [*NAMES, (b"grpc-status", b"99")]), "UNKNOWN", ""),
        ((0, 0, [*NAMES, (b"grpc-status", b"0")]), "UNIMPLEMENTED", "without a response"),
        ((0, 0, [(b":status", b"404")]), "UNIMPLEMENTED", "HTTP status 404, not gRPC"),
        ((0, 0, [(b":status", b"503")]), "UNAVAILABLE", "HTTP status 503, not gRPC"),
        ((0, 0, [(b":status", b"200")]), "UNKNOWN", "HTTP status 200, not gRPC"),
        ((0, 0, []), "UNKNOWN", "HTTP status missing, not gRPC"),
        ((1, 8, []), "CANCELLED", "HTTP/2 error 8"),
        ((1, 2, []), "INTERNAL", "HTTP/2 error 2"),
        ((1, 11, []), "RESOURCE_EXHAUSTED", "HTTP/2 error 11"),
        ((2, 7, []), "UNAVAILABLE", "HTTP/2 error 7"),
        ((3, 77, NAMES), "RESOURCE_EXHAUSTED", "77 bytes"),
        ((4, 0, NAMES), "UNIMPLEMENTED", "compressed, incomplete or not a single one"),
    ],
)
def test_a_call_that_ends_otherwise_has_the_status_that_grpc_gives_it(ended, status, said):
    failed: Failed = http2_call.failure_of(ended)
    assert failed.code().name == status and said in failed.details()
