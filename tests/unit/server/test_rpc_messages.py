"""Messages of gRPC calls over a transport without a socket: compressed ones, their limits, deadlines and tokens."""

from __future__ import annotations

import gzip
import random
import time
import zlib
from types import SimpleNamespace

import grpc
import pytest
from tests.http2_frames import DATA, HELLO, data_frame, frame, head
from tests.loops import turns
from tests.wires import Wire

from jurybox import native
from jurybox.protocol.errors import Busy, Code
from jurybox.server.gateway import grpc_connection
from jurybox.server.gateway.grpc_calls import Calls
from jurybox.server.gateway.grpc_connection import RpcConnection
from jurybox.server.security.access import Access
from jurybox.server.security.limits import ANSWERS, CALLS, OF_REQUEST, RECEIVED, SILENCE, budget_of

if missing := native.nghttp2()[1]:
    pytest.skip(missing, allow_module_level=True)

MIB = 1 << 20
STATUS = grpc.StatusCode
TOKEN = "thirty-two-characters-of-a-token"
SHOWN = (b"authorization", b"Bearer " + TOKEN.encode())
PACKED = {"gzip": gzip.compress, "deflate": zlib.compress}


class Noting:
    """The native part of a connection, which notes the forms that it may answer and the ends of its calls."""

    def __init__(self, native):
        self._native, self.forms, self.ends, self.trusted = native, [], {}, []
        self.sent, self.takes_answers, self.queue = {}, True, 0

    def feed(self, data, size, forms, connection):
        self.forms.append(forms)
        return self._native.feed(data, size, None, connection)

    def finish(self, number, code, details, trailing):
        self.ends[number] = (code, details, dict(trailing))
        self._native.finish(number, code, details, trailing)

    def answer(self, number, message):
        self.ends[number] = message
        self._native.answer(number, message)

    def send(self, number, message):
        self.sent.setdefault(number, []).append(message)
        return self.takes_answers and self._native.send(number, message)

    def queued(self, number):
        return self.queue

    def gone(self, _forms):
        self._native.gone(None)

    def trust(self, authorization):
        self.trusted.append(authorization)

    def __getattr__(self, name):
        return getattr(self._native, name)


class Clock:
    """The time and the timers of the event loop, as a test reads them."""

    def __init__(self, loop):
        self._loop, self.timers = loop, []

    def call_later(self, seconds, call, *arguments):
        timer = SimpleNamespace(seconds=seconds, call=lambda: call(*arguments))
        timer.cancel = lambda: timer in self.timers and self.timers.remove(timer)
        self.timers.append(timer)
        return timer

    def __getattr__(self, name):
        return getattr(self._loop, name)


class Port:
    """A connection to four methods: `keep` waits for the test's answer, `plain` is a coroutine, two have streams.

    Attributes:
        kept: the messages of `keep` and their calls.
        came, ended: the contexts of the calls of the others, and the streams that have ended.
        native: see `Noting`.
    """

    def __init__(self, *, most=MIB, budget=None, **options):
        self.kept, self.came, self.ended, self.takes = [], [], [], True
        self.budget = budget or budget_of(MIB)
        access = Access(max_message=most, **options)
        self.calls = Calls(access, self.budget, {"/t.T/keep": self.keep})
        self.clock = self.calls.loop = Clock(self.calls.loop)
        as_it_is = {"request_deserializer": bytes, "response_serializer": bytes}
        handlers = {
            "keep": grpc.unary_unary_rpc_method_handler(self.plain, **as_it_is),
            "plain": grpc.unary_unary_rpc_method_handler(self.plain, **as_it_is),
            "double": grpc.stream_stream_rpc_method_handler(self.double, **as_it_is),
            "count": grpc.unary_stream_rpc_method_handler(self.count, **as_it_is),
        }
        self.calls.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
        self.connection = RpcConnection(self.calls)
        self.native = self.connection.native = Noting(self.connection.native)
        self.wire = Wire(peer=("127.0.0.1", 5000))
        self.connection.connection_made(self.wire)
        self.hears(HELLO)

    def keep(self, content, call):
        self.kept.append((content, call))
        return self.takes

    async def plain(self, request, context):
        self.came.append(context)
        if request == b"fail":
            raise Busy("not now")
        if request == b"abort":
            context.set_trailing_metadata((("Why", 7),))
            await context.abort(STATUS.ABORTED, "as asked")
        return b"<" + request + b">"

    async def double(self, requests, context):
        self.came.append(context)
        self.held = OF_REQUEST.get()
        self.held.take(100)
        try:
            async for request in requests:
                if request == b"fail":
                    raise Busy("not now")
                yield 2 * request
        finally:
            self.held.give()
            self.ended.append("double")

    async def count(self, request, context):
        self.came.append(context)
        try:
            for number in range(int(request)):
                yield b"%d" % number
        finally:
            self.ended.append("count")

    def hears(self, data):
        self.connection.get_buffer(len(data))[: len(data)] = data
        self.connection.buffer_updated(len(data))

    def asks(self, number, content, *fields, method=b"keep", encoding=None):
        if encoding:
            fields = (*fields, (b"grpc-encoding", encoding.encode()))
        called = head(number, b"/t.T/" + method, *fields)
        self.hears(called + data_frame(number, content, compressed=encoding is not None))

    @property
    def deadlines(self):
        """The seconds of each timer of a call; the first timer is the connection's own."""
        return [timer.seconds for timer in self.clock.timers[1:]]


@pytest.mark.parametrize("encoding", PACKED)
@pytest.mark.parametrize("pieces", [1, 2, 5])
async def test_a_compressed_message_arrives_whole_whatever_number_of_pieces_it_takes(encoding, pieces, monkeypatch):
    message = bytes(range(250))
    monkeypatch.setattr(grpc_connection, "_PIECE", len(message) // pieces)
    port = Port()
    port.asks(1, PACKED[encoding](message), encoding=encoding)
    assert [content for content, _ in port.kept] == [message]


async def test_a_message_may_be_as_large_as_the_limit_after_decompression_and_no_larger():
    port = Port(most=1000)
    port.asks(1, gzip.compress(bytes(1000)), encoding="gzip")
    assert [len(content) for content, _ in port.kept] == [1000]
    port.asks(3, gzip.compress(bytes(1001)), encoding="gzip")
    said = "Received message larger than max (more than 1000 after decompression)"
    assert port.native.ends[3] == (STATUS.RESOURCE_EXHAUSTED.value[0], said, {}) and len(port.kept) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(b"message")[:-1], "it is truncated"),
        (gzip.compress(b"message") + b"12", "2 bytes came after its end: expected none"),
        (b"no gzip", "incorrect header check"),
        (b"", "it is truncated"),
    ],
    ids=["shortened", "with more behind it", "no gzip", "empty"],
)
async def test_a_message_that_cannot_be_decompressed_ends_its_call_and_says_why(content, said):
    port = Port()
    port.asks(1, content, encoding="gzip")
    code, details, _ = port.native.ends[1]
    assert code == STATUS.INTERNAL.value[0] and not port.kept
    assert details.startswith("a message with encoding 'gzip' cannot be decompressed: ") and said in details


@pytest.mark.parametrize("encoding", ["br", "identity"])
async def test_an_encoding_that_is_unknown_is_refused_with_those_that_are_known(encoding):
    port = Port()
    port.asks(1, b"x", encoding=encoding)
    code, details, trailing = port.native.ends[1]
    assert code == STATUS.UNIMPLEMENTED.value[0] and f"{encoding!r}: expected gzip or deflate" in details
    assert trailing == {"grpc-accept-encoding": "identity, deflate, gzip"} and not port.kept


async def test_what_a_compressed_message_becomes_is_counted_until_its_call_ends():
    port = Port()
    port.asks(1, gzip.compress(random.Random(0).randbytes(12_000)), encoding="gzip")
    held = port.budget.held(RECEIVED)
    assert 12_000 <= held < 15_000, "the compressed bytes, which are as many, are not held besides"
    port.kept[0][1].reply(b"")
    assert port.budget.held(RECEIVED) == port.budget.held(CALLS) == 0


async def test_a_compressed_message_for_which_there_is_no_room_is_refused_and_leaves_none():
    port = Port(budget=native.Budget((100_000, MIB, 9), (MIB, MIB, 9)))
    port.asks(1, gzip.compress(bytes(200_000)), encoding="gzip")
    assert port.native.ends[1][0] == STATUS.RESOURCE_EXHAUSTED.value[0]
    assert not port.kept and port.budget.held(RECEIVED) == 0 and not port.connection.calls


@pytest.mark.parametrize("how", ["answered", "failed", "refused", "gone"])
async def test_the_deadline_of_a_call_that_has_ended_is_not_awaited_any_longer(how):
    port = Port()
    port.takes = False
    gate = []

    async def waits(_request, context):
        gate.append(context)
        await context._connection.loop.create_future()

    handlers = {"keep": grpc.unary_unary_rpc_method_handler(waits, bytes, bytes)}
    port.calls._methods.clear()
    port.calls._generic.clear()
    port.calls.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port.asks(1, b"x", (b"grpc-timeout", b"60S"))
    (seconds,) = port.deadlines
    assert 0 < seconds <= 60
    (call,) = port.connection.calls.values()
    {
        "answered": lambda: call.reply(b"y"),
        "failed": lambda: call.fail(Busy("no")),
        "refused": lambda: call.refuse(STATUS.ABORTED, "no"),
        "gone": call.gone,
    }[how]()
    assert not port.deadlines and call.done() and not port.connection.calls
    call.gone()
    await turns()


async def test_a_call_that_is_not_answered_by_its_deadline_ends_then():
    port = Port()
    port.takes = False
    port.asks(1, b"x", (b"grpc-timeout", b"60S"), method=b"plain")
    ended, timer = port.native.ends, port.clock.timers[-1]
    assert not ended and len(port.deadlines) == 1, "one timer, though the call is watched twice"
    timer.call()
    assert ended[1][:2] == (STATUS.DEADLINE_EXCEEDED.value[0], "Deadline Exceeded")
    await turns()
    assert list(ended) == [1] and ended[1][:2] == (STATUS.DEADLINE_EXCEEDED.value[0], "Deadline Exceeded")


async def test_a_call_without_a_deadline_has_no_timer_and_one_far_away_is_shortened():
    port = Port()
    port.asks(1, b"x", method=b"plain")
    assert not port.deadlines and port.connection.calls[1].time_remaining() is None
    port.asks(3, b"x", (b"grpc-timeout", b"99999999H"), method=b"plain")
    (seconds,) = port.deadlines
    assert 1e7 < seconds <= 1e8
    await turns()
    assert port.native.ends == {1: b"<x>", 3: b"<x>"}


async def test_a_direct_method_that_leaves_a_call_to_the_ordinary_one_has_it_answered():
    port = Port()
    port.takes = False
    port.asks(1, b"x")
    await turns()
    assert port.native.ends == {1: b"<x>"} and len(port.kept) == 1


async def test_a_port_whose_doors_have_closed_asks_the_ordinary_methods_alone():
    port = Port()
    port.calls.doors.close()
    port.asks(1, b"x")
    await turns()
    assert port.native.ends == {1: b"<x>"} and not port.kept


async def test_a_unary_call_has_one_message():
    port = Port()
    called = head(1, b"/t.T/keep")
    port.hears(called + data_frame(1, b"x", ends=False))
    assert not port.native.ends
    port.hears(data_frame(1, b"y"))
    assert port.native.ends[1] == (STATUS.INTERNAL.value[0], "expected one request message, got more than one", {})
    port.hears(head(3, b"/t.T/keep") + b"\0\0\0\0\1\0\0\0\3")  # an end without a message
    assert port.native.ends[3] == (STATUS.INTERNAL.value[0], "expected one request message, got none", {})
    assert not port.kept and not port.connection.calls


async def test_a_methods_error_and_its_own_status_reach_the_caller():
    port = Port()
    port.asks(1, b"fail", method=b"plain")
    port.asks(3, b"abort", method=b"plain")
    await turns()
    code, details, trailing = port.native.ends[1]
    assert code == STATUS.RESOURCE_EXHAUSTED.value[0] and details == "not now"
    assert trailing["jurybox-code"] == str(int(Code.BUSY))
    assert port.native.ends[3] == (STATUS.ABORTED.value[0], "as asked", {"why": "7"})


async def test_a_method_that_is_unknown_is_refused():
    port = Port()
    port.asks(1, b"x", method=b"nothing")
    assert port.native.ends[1] == (STATUS.UNIMPLEMENTED.value[0], "Method not found!", {})


async def test_native_code_answers_once_a_connection_has_shown_the_token():
    port = Port(secret=TOKEN)
    forms = port.calls.forms = object()
    port.asks(1, b"x")
    code, details, _ = port.native.ends[1]
    assert code == STATUS.UNAUTHENTICATED.value[0] and "Bearer TOKEN" in details and not port.kept
    port.asks(3, b"x", (b"authorization", b"Bearer nonsense"))
    assert port.native.ends[3][0] == STATUS.UNAUTHENTICATED.value[0] and not port.kept
    assert set(port.native.forms) == {None} and not port.native.trusted
    port.asks(5, b"x", SHOWN)
    port.asks(7, b"x", SHOWN)
    assert port.native.forms[-2:] == [None, forms] and port.native.trusted == [SHOWN[1]]
    assert len(port.kept) == 2
    port.calls.doors.close()
    port.asks(9, b"x", SHOWN)
    assert port.native.forms[-1] is None, "closed doors refuse them"


async def test_a_port_without_a_token_lets_native_code_answer_at_once():
    port = Port()
    port.calls.forms = forms = object()
    port.asks(1, b"x")
    assert port.native.forms[-1] is forms and len(port.kept) == 1


def opened(method, number=1, *fields):
    return head(number, b"/t.T/" + method, *fields)


def part(content, number=1, *, ends=False):
    return data_frame(number, content, ends=ends)


ENDED = b"\0\0\0\0\1\0\0\0\1"  # an empty frame that ends the first call


async def test_a_stream_answers_each_message_when_it_comes_and_ends_with_the_last():
    port = Port()
    port.hears(opened(b"double") + part(b"a"))
    await turns()
    assert port.native.sent == {1: [b"aa"]} and not port.native.ends and b"aa" in port.wire.sent
    port.hears(part(b"b") + part(b"c"))
    await turns()
    assert port.native.sent == {1: [b"aa", b"bb", b"cc"]} and not port.native.ends
    port.hears(ENDED)
    await turns()
    assert port.native.ends == {1: (0, "", {})} and port.ended == ["double"] and not port.connection.calls
    assert port.budget.held(RECEIVED) == port.budget.held(CALLS) == 0


async def test_messages_of_a_stream_that_are_not_taken_yet_are_counted():
    port = Port()
    port.native.queue = 2 * MIB  # the peer takes no answers, so the method is not asked for more
    port.hears(opened(b"double") + part(b"a"))
    await turns()
    before = port.budget.held(RECEIVED)
    for _ in range(3):
        port.hears(part(b"x" * 1000))
    await turns()
    assert port.native.sent == {1: [b"aa"]} and port.budget.held(RECEIVED) >= before + 3000
    port.native.queue = 0
    port.connection.resume_writing()
    await turns()
    assert len(port.native.sent[1]) == 4 and port.budget.held(RECEIVED) == before
    port.connection.connection_lost(None)
    await turns()
    assert port.ended == ["double"] and port.budget.held(RECEIVED) == 0


@pytest.mark.parametrize("waits", ["for a message", "for its peer"])
@pytest.mark.parametrize("how", ["gone", "refused", "no room", "a deadline"])
async def test_a_stream_that_is_ended_ends_its_method_whatever_it_waits_for(how, waits):
    port = Port()
    port.native.queue = 2 * MIB if waits == "for its peer" else 0
    port.hears(opened(b"double", 1, (b"grpc-timeout", b"60S")) + part(b"a") + part(b"b"))
    await turns()
    call = port.connection.calls[1]
    assert not port.ended and len(port.deadlines) == 1 and call.done() is False
    {
        "gone": call.gone,
        "refused": lambda: call.refuse(STATUS.ABORTED, "no more"),
        "no room": lambda: call.no_room(Busy("full")),
        "a deadline": port.clock.timers[-1].call,
    }[how]()
    await turns()
    assert port.ended == ["double"] and call.done() and not port.connection.calls and not port.deadlines
    said = {"refused": "no more", "no room": "full", "a deadline": "Deadline Exceeded"}
    assert [details for _, details, _ in port.native.ends.values()] == ([said[how]] if how in said else [])
    assert len(port.native.sent[1]) == (1 if waits == "for its peer" else 2)


async def test_a_stream_whose_method_fails_ends_with_its_error():
    port = Port()
    port.hears(opened(b"double") + part(b"fail"))
    await turns()
    assert port.native.ends[1][:2] == (STATUS.RESOURCE_EXHAUSTED.value[0], "not now")
    assert port.ended == ["double"] and not port.connection.calls


async def test_a_method_that_is_cancelled_ends_its_call():
    port = Port()
    port.hears(opened(b"double"))
    await turns()
    port.connection.calls[1]._task.cancel()
    await turns()
    assert port.native.ends[1][:2] == (STATUS.CANCELLED.value[0], "the call was cancelled")
    assert not port.connection.calls


async def test_one_message_may_have_a_stream_of_answers():
    port = Port()
    port.asks(1, b"3", method=b"count")
    await turns()
    assert port.native.sent == {1: [b"0", b"1", b"2"]} and port.native.ends == {1: (0, "", {})}
    assert port.ended == ["count"] and all(b"%d" % number in port.wire.sent for number in range(3))


async def test_a_stream_that_native_code_takes_no_answer_of_ends():
    port = Port()
    port.native.takes_answers = False
    port.asks(1, b"3", method=b"count")
    await turns()
    assert port.native.sent == {1: [b"0"]} and not port.native.ends and not port.connection.calls
    assert port.ended == ["count"]


async def test_a_call_knows_its_connection_and_counts_its_answer_there():
    port = Port()
    port.asks(1, b"x")
    ((_, call),) = port.kept
    assert call.peer() == port.connection.peer == "ipv4:127.0.0.1:5000"
    assert call.account is port.connection.account and call.farewells is port.connection.farewells
    with_room = call.room()
    with_room.take(1000)
    assert port.budget.held(ANSWERS) == port.connection.account.held(ANSWERS) == 1000
    with_room.give()
    assert port.budget.held(ANSWERS) == 0


async def test_a_port_is_full_of_calls_when_all_of_its_budget_is_in_use():
    port = Port(budget=native.Budget((MIB, MIB, 9), (MIB, MIB, 2)))
    for number, full in ((1, False), (3, True)):
        port.asks(number, b"x")
        assert port.calls.calls_are_full == full
    port.asks(5, b"x")
    code, details, _ = port.native.ends[5]
    assert len(port.kept) == 2 and code == STATUS.RESOURCE_EXHAUSTED.value[0] and "calls" in details


@pytest.mark.parametrize("known", [True, False])
async def test_a_message_that_does_not_go_on_ends_its_call_also_if_native_code_would_have_answered_it(known):
    port = Port()
    port.hears(opened(b"keep") + frame(DATA, 0, 1, b"\0\0\0\0\x09part"))
    if not known:
        port.connection.calls.clear()
    before = len(port.wire.sent)
    port.connection.end_silent(time.monotonic() + SILENCE + 60)
    assert port.native.ends[1][:2] == (STATUS.DEADLINE_EXCEEDED.value[0], "no byte of the message has come for 30 s")
    assert len(port.wire.sent) > before and not port.kept


@pytest.mark.parametrize("timeout", [-1, 0, 60 * 10**9])
async def test_a_call_that_native_code_gives_back_is_answered_unless_it_is_too_late(timeout):
    port = Port()
    port.hears(opened(b"keep"))
    port.connection.calls.clear()
    port.calls.forms = SimpleNamespace(path=b"/t.T/keep")
    before = len(port.wire.sent)
    port.connection.take_back(1, timeout, b"x")
    if timeout <= 0:
        assert port.native.ends[1] == (STATUS.DEADLINE_EXCEEDED.value[0], "Deadline Exceeded", {})
        assert len(port.wire.sent) > before and not port.kept
    else:
        ((content, call),) = port.kept
        assert content == b"x" and 0 < call.time_remaining() <= 60
        call.reply(b"y")
        assert b"y" in port.wire.sent[before:]
    port.connection.connection_lost(None)
    port.connection.take_back(1, timeout, b"x")
    assert len(port.kept) == (timeout > 0)


async def test_a_port_that_closes_a_connection_refuses_its_calls():
    port = Port()
    port.asks(1, b"x")
    port.connection.close()
    assert port.native.ends[1][0] == STATUS.UNAVAILABLE.value[0] and port.wire.closed and port.kept[0][1].done()


async def test_a_port_that_drains_tells_its_peers_at_once_and_answers_what_has_begun():
    port = Port()
    port.asks(1, b"x")
    before = len(port.wire.sent)
    port.connection.drain()
    assert len(port.wire.sent) > before and not port.wire.closed
    port.kept[0][1].reply(b"y")
    assert port.native.ends == {1: b"y"} and b"y" in port.wire.sent[before:]
