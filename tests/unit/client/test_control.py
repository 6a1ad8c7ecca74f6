"""The control connection: whose answer a call returns, and when it sends its request again."""

from __future__ import annotations

import errno
import threading
import time
from types import SimpleNamespace

import pytest
import zmq
from tests.clocks import Clock, given

from jurybox.client import Busy, ModelNotFound, ServerGone, control
from jurybox.client.control import Control, new_socket
from jurybox.protocol import errors
from jurybox.protocol.control_pb2 import (
    ControlReply,
    ControlRequest,
    ErrorMessage,
    Lease,
    LoadRequest,
    ModelRequest,
    StatusMessage,
    StatusRequest,
)
from jurybox.protocol.errors import Code, ProtocolMismatch, Timeout, TooManyFiles
from jurybox.protocol.wire import MAX_CONTROL, PREFIX


class Refused(zmq.Socket):
    """A socket without a connection, like one after a handshake that was refused before the first message."""

    def send_multipart(self, *_, **__):
        raise zmq.Again()


@pytest.mark.parametrize("far", [None, lambda lease: None], ids=["local", "far"])
def test_a_connection_that_is_refused_at_once_is_server_gone(far):
    with zmq.Context() as context:
        control = Control(context, "ipc:///nowhere", lambda: Refused(context, zmq.DEALER), far=far)
        try:
            for _ in range(2):
                began = time.monotonic()
                with pytest.raises(ServerGone, match="no answer from ipc:///nowhere within 0.2 s"):
                    control.call(0.2, status=StatusRequest())
                assert time.monotonic() - began >= 0.2
        finally:
            control.close()


# ---- over sockets that are scripted


class Line:
    """A socket to the server of a test, or its monitor. `there` has what comes, or what happens when it is awaited."""

    def __init__(self, server):
        self.server, self.closed, self.sent, self.there, self.full = server, False, [], [], False
        self.monitored = False
        self.lost = SimpleNamespace(poll=lambda _: self.lost.there, recv_multipart=self.seen, close=self.seen, there=0)

    def seen(self):
        self.lost.there = 0

    def send_multipart(self, frames, flags):
        assert not self.closed and flags == zmq.NOBLOCK
        if self.full:
            raise zmq.Again
        self.sent.append(ControlRequest.FromString(frames[2]))
        self.number = frames[1]

    def poll(self, milliseconds):
        if not self.there:
            self.server.now += milliseconds / 1000
            self.server.polled.append(milliseconds)
        elif callable(self.there[0]):
            self.there.pop(0)()
            return False
        return bool(self.there)

    def recv_multipart(self):
        return self.there.pop(0)

    def get_monitor_socket(self, events):
        assert events == zmq.EVENT_DISCONNECTED
        self.monitored = True
        return self.lost

    def disable_monitor(self):
        assert not self.closed
        self.monitored = False

    def close(self):
        self.closed = True

    def answer(self, reply, number=None):
        """Let an answer come when the request has been sent."""
        self.there.append(lambda: self.there.insert(0, [PREFIX, self.number if number is None else number, reply]))


class Server(Clock):
    """The lines that a control connection has opened; its time passes only while somebody waits."""

    def __init__(self):
        super().__init__()
        self.lines, self.prepared, self.polled = [], [], []

    def open(self):
        self.lines.append(Line(self))
        if self.prepared:
            self.prepared.pop(0)(self.lines[-1])
        return self.lines[-1]


@pytest.fixture
def server(monkeypatch):
    return given(Server(), monkeypatch, control)


@pytest.fixture(params=["local", "far"])
def channel(request, server):
    """A control connection; `unwanted` has the leases that no call waits for."""
    unwanted = []
    made = Control(None, "tcp://there:1", server.open, far=unwanted.append if request.param == "far" else None)
    made.unwanted, made.is_far = unwanted, request.param == "far"
    return made


TOLD = ControlReply(status=StatusMessage(json="told")).SerializeToString()
LEASED = ControlReply(lease=Lease(lane=3, lease=70)).SerializeToString()


def ask(channel, timeout=9.0, **more):
    return channel.call(timeout, status=StatusRequest(), **more).status.json


def test_a_call_returns_its_own_answer_and_leaves_late_ones(server, channel):
    (line,) = server.lines
    line.answer(LEASED, number=b"earlier!")
    line.answer(TOLD)
    assert ask(channel) == "told" and len(line.sent) == 1 and line.sent[0].HasField("status")
    assert [lease.lease for lease in channel.unwanted] == ([70] if channel.is_far else [])
    line.answer(TOLD, number=b"earlier!")
    line.answer(TOLD, number=b"")
    assert ask(channel) == "told" and len(channel.unwanted) == channel.is_far
    assert not channel.under_way and len(server.lines) == 1


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ([b"JBX0", b"", TOLD], "tcp://there:1: "),
        ([PREFIX, TOLD], "a control reply is 3 frames, 2 came"),
        ([PREFIX, b"", TOLD, b""], "a control reply is 3 frames, 4 came"),
        ([PREFIX, b"", b"\xff"], "not a control reply"),
    ],
)
def test_what_is_no_answer_of_this_protocol_is_refused_with_the_address(server, channel, frames, told):
    server.lines[0].there = [frames]
    with pytest.raises(ProtocolMismatch, match=told) as caught:
        ask(channel)
    assert "tcp://there:1" in str(caught.value)
    server.lines[0].answer(TOLD)
    assert ask(channel) == "told" and len(server.lines) == 1, "the next call uses the same connection"


def test_an_error_of_the_server_is_raised_as_what_it_is(server, channel):
    reply = ControlReply(error=ErrorMessage(code=int(Code.BUSY), message="full"))
    server.lines[0].answer(reply.SerializeToString())
    with pytest.raises(Busy, match="^full$"):
        ask(channel)
    server.lines[0].answer(TOLD)
    assert ask(channel) == "told" and len(server.lines) == 1


def test_a_name_that_no_model_can_have_and_a_request_that_is_too_large_are_not_sent(server, channel):
    with pytest.raises((ModelNotFound, errors.Refused)):
        channel.call(9.0, model=ModelRequest(model="a" * 10_000))
    with pytest.raises(errors.Refused, match="a control request has at most"):
        channel.call(9.0, load=LoadRequest(model="m", settings_json="x" * (MAX_CONTROL + 1)))
    assert not server.lines[0].sent


@pytest.mark.parametrize("context", ["stands", "has ended"])
def test_a_connection_that_is_closed_leaves_neither_a_socket_nor_its_monitor(server, channel, context):
    (line,) = server.lines
    assert line.monitored == channel.is_far
    if context == "has ended":
        line.close()
    channel.close()
    assert line.closed and (context == "has ended" or not line.monitored)


@pytest.mark.parametrize("why", ["its time is over", "nobody is there"])
def test_a_call_without_an_answer_ends_and_the_next_has_another_connection(server, channel, why):
    there = iter([True, True, False])
    more = {} if why == "its time is over" else {"still_there": lambda: next(there)}
    with pytest.raises(ServerGone, match="no answer from tcp://there:1 within 1.0 s: is a server running there"):
        ask(channel, 1.0, **more)
    assert server.lines[0].closed and len(server.lines) == 2 and max(server.polled) == 100
    assert sum(server.polled) == pytest.approx(1000 if not more else 200, abs=2)
    server.lines[1].answer(TOLD)
    assert ask(channel) == "told"


def interrupt():
    raise KeyboardInterrupt


def test_a_call_after_an_interrupted_one_has_another_connection(server, channel):
    server.lines[0].there = [interrupt]
    with pytest.raises(KeyboardInterrupt):
        ask(channel)
    server.prepared = [lambda line: line.answer(TOLD)]
    assert ask(channel) == "told" and server.lines[0].closed and len(server.lines) == 2
    server.lines[1].answer(TOLD)
    assert ask(channel) == "told" and len(server.lines) == 2


def test_no_call_is_made_within_another_and_one_that_is_closed_within_is_so_at_its_end(server, channel):
    (line,), ended = server.lines, []

    def nested():
        assert channel.under_way
        with pytest.raises(errors.Refused, match="a call of the server at tcp://there:1 is under way in this thread"):
            ask(channel)
        channel.close(lambda: ended.append(line.closed))
        assert not line.closed and not ended

    line.there = [nested]
    line.answer(TOLD)
    assert ask(channel) == "told" and line.closed and ended == [True]
    with pytest.raises(errors.Refused, match="this connection was closed: connect again"):
        ask(channel)


def test_a_request_that_could_not_be_sent_is_sent_once_over_another_connection(server, channel):
    server.lines[0].full = True
    server.prepared = [lambda line: line.answer(TOLD)]
    assert ask(channel) == "told" and [len(line.sent) for line in server.lines] == [0, 1] and server.lines[0].closed
    assert server.slept == ([0.05] if channel.is_far else []), "a relay is to see the end of the first"


def test_a_request_whose_connection_was_lost_is_sent_again_to_a_far_server_alone(server, channel):
    (line,) = server.lines

    def lose():
        line.lost.there = 1

    line.there = [lose]
    if channel.is_far:
        server.prepared = [lambda following: following.answer(TOLD)]
        assert ask(channel) == "told" and [len(each.sent) for each in server.lines] == [1, 1] and line.closed
    else:
        line.answer(TOLD)
        assert ask(channel) == "told" and len(server.lines) == 1 == len(line.sent)


def test_a_connection_that_was_lost_between_two_calls_is_not_lost_again(server, channel):
    (line,) = server.lines
    line.lost.there = 1
    line.answer(TOLD)
    assert ask(channel) == "told" and len(server.lines) == 1


def test_a_far_server_that_is_not_heard_is_asked_again_every_five_seconds(server, channel):
    with pytest.raises(ServerGone):
        ask(channel, 12.0)
    assert [len(line.sent) for line in server.lines] == ([1, 1, 1, 0] if channel.is_far else [1, 0])


@pytest.mark.parametrize(("timeout", "times"), [(2.9, 0), (3.0, 1), (9.0, 1)])
def test_a_call_that_takes_longer_says_once_that_it_waits_where_nothing_listens(
    server, channel, monkeypatch, timeout, times
):
    said = []
    monkeypatch.setattr(control, "say_that_it_waits", lambda *given: said.append((server.now, *given)) or True)
    with pytest.raises(ServerGone):
        ask(channel, timeout)
    assert [one[1:] for one in said] == [("tcp://there:1", timeout)] * (0 if channel.is_far else times)
    assert not said or 101.0 < said[0][0] < 101.2


def test_a_call_waits_for_another_threads_only_as_long_as_it_may(server, channel):
    with channel._lock.within(1.0):
        raised = []

        def other():
            try:
                ask(channel, 0.01)
            except Timeout as error:
                raised.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)
    assert raised and not server.lines[0].sent


def test_a_far_servers_connection_is_opened_only_if_there_are_files_left_for_it(server, monkeypatch):
    def require(files, what):
        raise TooManyFiles(f"{what} needs {files} files")

    monkeypatch.setattr(control, "require", require)
    with pytest.raises(TooManyFiles, match="a connection to tcp://there:1 needs"):
        Control(None, "tcp://there:1", server.open, far=lambda _: None)
    assert not server.lines
    Control(None, "ipc://here", server.open)
    assert len(server.lines) == 1


@pytest.mark.parametrize(("number", "error"), [(errno.EMFILE, TooManyFiles), (zmq.ENOTSOCK, zmq.ZMQError)])
def test_a_process_without_files_left_for_a_socket_is_told_the_remedy(number, error):
    def socket(_):
        raise zmq.ZMQError(number)

    with pytest.raises(error):
        new_socket(SimpleNamespace(socket=socket))
