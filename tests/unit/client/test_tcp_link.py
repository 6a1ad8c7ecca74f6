"""A connection to a tcp:// server whose calls a test answers: its leases, those it gives back, and how it greets."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
import zmq
from tests.clocks import Clock, given

from jurybox.client import Busy, ModelFailed, Refused, ServerGone, Timeout, link
from jurybox.client.remote import tcp_link
from jurybox.client.remote.keys import Keys
from jurybox.client.remote.tcp_link import TcpLink
from jurybox.protocol.control_pb2 import ControlReply, Lease, ModelMessage
from jurybox.protocol.errors import Code
from jurybox.protocol.locks import TimedLock


class Channel:
    """Answers each call by its kind: with what a list has, in order, whose last one stays."""

    def __init__(self):
        self.asked, self.answers, self.timeouts, self.under_way = [], {}, [], False

    def call(self, timeout, **request):
        ((kind, body),) = request.items()
        self.asked.append((kind, body))
        self.timeouts.append(timeout)
        said = self.answers.get(kind, [ControlReply()])
        answer = said.pop(0) if len(said) > 1 else said[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self, then=lambda: None):
        then()

    @property
    def kinds(self):
        return [kind for kind, _ in self.asked]

    @property
    def released(self):
        return [(body.lane, body.lease) for kind, body in self.asked if kind == "release"]


@pytest.fixture
def clock(monkeypatch):
    return given(Clock(), monkeypatch, tcp_link, link)


@pytest.fixture
def reached(clock, monkeypatch):
    made = TcpLink.__new__(TcpLink)
    made.channel = made._opened = Channel()
    made._address, made._keys, made._traces, made._left = "tcp://there:1", None, False, deque()
    made._lock, made._wires = TimedLock("a lease"), SimpleNamespace(context=SimpleNamespace(held={}), close=lambda _: 0)
    monkeypatch.setattr(tcp_link.Connection, "direct", lambda address: SimpleNamespace(address=address, way="direct"))
    monkeypatch.setattr(
        tcp_link.Connection, "over_libzmq", lambda _, address, keys: SimpleNamespace(address=address, way=keys)
    )
    monkeypatch.setattr(tcp_link, "TcpTransport", lambda *given: given)
    monkeypatch.setattr(tcp_link, "Lane", lambda *given, **more: SimpleNamespace(given=given, **more))
    return made


def lease(lane=3, priority=0, **more):
    granted = Lease(lane=lane, lease=70 + lane, rows=4, priority=priority, **more)
    granted.model.CopyFrom(ModelMessage(name="m", max_batch=9))
    for tensors in (granted.model.inputs, granted.model.outputs):
        tensors.add(name="x", dtype="float32")
    return ControlReply(lease=granted)


# ---- leases


@pytest.mark.parametrize("keys", [None, Keys(b"s", b"p", b"q")])
def test_a_lane_is_leased_and_reached_by_a_socket_of_its_own_unless_there_are_keys(reached, keys):
    reached._keys = keys
    reached.channel.answers["lease"] = [lease()]
    lane, spec, most = reached.lease("m", 5, 9.0)
    name, connection, memory, transport, number, slot, rows, _ = lane.given
    assert (name, number, slot, rows, lane.far, spec.name, most) == ("m", 73, 0, 4, True, "m", 9)
    assert transport == (connection, memory, 73) and (memory.rows, connection.address) == (4, "tcp://there:1")
    assert connection.way == (keys or "direct")
    ((_, asked),) = reached.channel.asked
    assert (asked.model, asked.rows, asked.priority) == ("m", 5, 0)


@pytest.mark.parametrize("closed", [False, True])
def test_a_lane_gives_its_lease_back_at_its_end_or_with_the_next_call(reached, closed):
    reached.channel.answers["lease"] = [lease(3)]
    lane, *_ = reached.lease("m", 5, 9.0)
    dropped, *_ = reached.lease("m", 5, 9.0)
    dropped.leave()
    assert not reached.channel.released
    reached._closed = closed
    lane.given[-1]()
    assert reached.channel.released == ([] if closed else [(3, 73)] * 2)
    assert len(reached._left) == (2 if closed else 0)


@pytest.mark.parametrize(
    ("error", "left", "asked"), [(Timeout("another call"), 1, 1), (ServerGone("gone"), 0, 2), (Refused("no"), 0, 2)]
)
def test_leases_that_could_not_be_given_back_are_kept_for_the_next_call_if_only_the_time_was_short(
    reached, error, left, asked
):
    reached.channel.answers["release"] = [error, ControlReply()]
    reached._left.append(tcp_link.ReleaseRequest(lane=4, lease=74))
    reached._give_back(tcp_link.ReleaseRequest(lane=3, lease=73))
    assert len(reached.channel.asked) == asked and len(reached._left) == (2 if left else 0)
    reached.channel.timeouts.clear()
    reached.models(9.0)
    assert not reached._left and reached.channel.timeouts == ([1.0, 1.0] if left else []) + [9.0]


def test_nothing_is_given_back_within_a_call(reached):
    reached._left.append(tcp_link.ReleaseRequest(lane=4, lease=74))
    reached.channel.under_way = True
    reached._release_left(1.0)
    assert not reached.channel.asked and len(reached._left) == 1


def test_a_short_call_leaves_half_of_its_time_to_itself(reached):
    reached._left.append(tcp_link.ReleaseRequest(lane=4, lease=74))
    reached.models(1.0)
    assert reached.channel.kinds == ["release", "hello"] and reached.channel.timeouts == [0.5, 1.0]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Refused("no files")])
def test_a_lease_whose_lane_could_not_be_made_is_given_back(reached, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(tcp_link.Connection, "direct", fail)
    reached.channel.answers["lease"] = [lease()]
    with pytest.raises(type(error)):
        reached.lease("m", 5, 9.0)
    assert [(one.lane, one.lease) for one in reached._left] == [(3, 73)]


@pytest.mark.parametrize("closed", [False, True])
def test_a_lane_that_opens_while_its_connection_closes_leaves_no_socket(reached, monkeypatch, closed):
    sockets = [SimpleNamespace(close=lambda linger: sockets.remove(sockets[0]))]
    reached._wires.context.held[1] = sockets[0]

    def fail(*_):
        reached._closed = closed
        raise zmq.ZMQError(zmq.ETERM)

    monkeypatch.setattr(tcp_link.Connection, "over_libzmq", fail)
    reached._keys = Keys(b"s", b"p", b"q")
    reached.channel.answers["lease"] = [lease()]
    with pytest.raises(Refused if closed else zmq.ZMQError, match="this connection was closed" if closed else None):
        reached.lease("m", 5, 9.0)
    assert len(sockets) == (not closed)


def test_a_lane_is_traced_if_traces_are_wanted(reached, monkeypatch):
    monkeypatch.setattr(tcp_link, "traced", lambda transport, name, lane: ("traced", name, lane))
    reached._traces = True
    reached.channel.answers["lease"] = [lease()]
    assert reached.lease("m", 5, 9.0)[0].given[3] == ("traced", "m", 3)


# ---- what is waited for (also on this host)


@pytest.mark.parametrize(
    ("said", "error", "told"),
    [
        (Busy("no rows are free"), Busy, "^no rows are free$"),
        (Refused("it is loading", Code.NOT_READY), Timeout, r"^it is loading after 1\.0 s$"),
    ],
)
def test_a_lease_is_asked_for_again_while_there_is_time(reached, clock, said, error, told):
    reached.channel.answers["lease"] = [said, said, lease()]
    assert reached.lease("m", 5, 1.0)[2] == 9 and clock.slept == [0.05] * 2
    clock.slept.clear()
    reached.channel.answers["lease"] = [said]
    with pytest.raises(error, match=told):
        reached.lease("m", 5, 1.0)
    assert 0.9999 < sum(clock.slept) < 1.15 and min(reached.channel.timeouts) == pytest.approx(0.1)
    clock.slept.clear()
    with pytest.raises(error, match=told.replace(r" after 1\.0 s", "")):
        reached.lease("m", 5, 1.0, wait=False)
    assert not clock.slept


@pytest.mark.parametrize("error", [ModelFailed("no file"), Refused("draining"), ServerGone("gone")])
def test_a_lease_that_will_not_come_is_not_waited_for(reached, clock, error):
    reached.channel.answers["lease"] = [error]
    with pytest.raises(type(error)):
        reached.lease("m", 5, 1.0)
    reached.channel.answers["lease"] = [Busy("full"), ServerGone("gone")]
    with pytest.raises(ServerGone):
        reached.lease("m", 5, 1.0)
    assert len(clock.slept) == 1


def test_a_server_that_had_no_time_to_say_again_that_it_is_busy_is_not_gone(reached, clock):
    def late(timeout, **_):
        clock.now += 60.0
        raise ServerGone("no answer in time")

    busy = [True]
    call = reached.channel.call
    reached.channel.answers["lease"] = [Busy("full")]
    reached.channel.call = lambda *given, **more: call(*given, **more) if busy and busy.pop() else late(*given, **more)
    with pytest.raises(Busy, match="full"):
        reached.lease("m", 5, 1.0)


@pytest.mark.parametrize("knows", [True, False])
def test_a_priority_that_the_server_does_not_know_is_refused_and_the_lease_given_back(reached, knows):
    reached.channel.answers["lease"] = [lease(priority=3 if knows else 0)]
    if knows:
        reached.lease("m", 5, 9.0, priority=3)
        assert reached.channel.asked[0][1].priority == 3 and reached.channel.kinds == ["lease"]
        return
    reached.channel.answers["release"] = [ServerGone("gone")]
    with pytest.raises(Refused, match="^priority=3: this server knows no priorities"):
        reached.lease("m", 5, 9.0, priority=3)
    assert reached.channel.released == [(3, 73)]


# ---- greeting


def test_a_server_that_starts_is_greeted_again_while_there_is_time(reached, clock, monkeypatch):
    said = []
    monkeypatch.setattr(tcp_link, "say_that_it_waits", lambda *given: said.append(given) or True)
    reached.channel.answers["hello"] = [ServerGone("gone"), ServerGone("gone"), ControlReply()]
    reached._greet(10.0)
    assert reached.channel.timeouts == [3.0] * 3 and said == [("tcp://there:1", 10.0)]
    reached._greet(1.0)
    assert reached.channel.timeouts[-1] == pytest.approx(1.0)
    reached._greet(0.0)
    assert reached.channel.timeouts[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("keys", "told"), [(None, "It was asked without keys: if the server has"), (Keys(b"", b"", b""), "with these keys")]
)
def test_a_server_that_never_answers_is_gone_and_the_error_says_which_keys_it_was_asked_with(reached, keys, told):
    reached._keys = keys
    reached.channel.answers["hello"] = [ServerGone("gone")]
    with pytest.raises(ServerGone, match=rf"^no answer from tcp://there:1 within 0\.0 s: .*{told}"):
        reached._greet(0.0)
    reached.channel.answers["hello"] = [Refused("another version")]
    with pytest.raises(Refused, match="another version"):
        reached._greet(10.0)


def test_a_link_that_is_closed_makes_no_more_calls(reached):
    reached.close()
    assert reached.closed
    for ask in (lambda: reached.models(1.0), lambda: reached.lease("m", 1, 1.0)):
        with pytest.raises(Refused, match="this connection was closed: connect again"):
            ask()
    assert not reached.channel.asked
