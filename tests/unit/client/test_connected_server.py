"""A connection's methods over a scripted link: what is asked of it, what its answers mean, and what is closed."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
from tests.clocks import Clock, given

from jurybox.client import ModelFailed, Refused, ServerGone, Timeout, connect
from jurybox.client import server as server_module
from jurybox.client.link import POLL
from jurybox.client.server import Server
from jurybox.protocol.control_pb2 import ModelMessage
from jurybox.protocol.errors import Busy


class Link:
    """Notes what it is asked; `says` has a model's descriptions in order, of which the last one stays."""

    def __init__(self, *, waits=False):
        self.waits, self.closed, self.asked, self.says = waits, False, [], [ModelMessage(name="m", settled=True)]

    def describe(self, name, timeout):
        self.asked.append(("describe", name, timeout))
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if isinstance(said, Exception):
            raise said
        return said

    def close(self):
        self.closed = True

    def __getattr__(self, name):
        def call(*given, **more):
            self.asked.append((name, *given, more) if more else (name, *given))
            return self.returns[name]

        self.__dict__.setdefault("returns", dict.fromkeys(("models", "status", "publisher", "weights", "pause")))
        return call


@pytest.fixture
def clock(monkeypatch):
    return given(Clock(), monkeypatch, server_module)


def message(state="ready", reason="", *, settled=True, **more):
    return ModelMessage(name="m", state=state, reason=reason, settled=settled, **more)


LOADING = message("loading", settled=False)
ORDERS = {
    "load": lambda server, timeout: server.load("m", {"rows": 3}, keep=5.0, timeout=timeout),
    "sleep": lambda server, timeout: server.sleep("m", timeout=timeout),
    "wake": lambda server, timeout: server.wake("m", timeout=timeout),
}
DONE = {"load": message(), "sleep": message("sleeping"), "wake": message()}


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_an_order_is_given_and_its_end_is_waited_for(clock, order, waits):
    link = Link(waits=waits)
    link.returns = dict.fromkeys(("load", "sleep", "wake"))
    link.says = [LOADING, LOADING, DONE[order]]
    server = Server("ipc://here", link, 8.0)
    ORDERS[order](server, 60.0)
    given = 60.0 if waits else 8.0
    settings = {"load": ('{"rows": 3}', given, {"keep": 5.0, "remote": False})}
    assert link.asked[0] == (order, "m", *settings.get(order, (given,)))
    assert [one[:2] for one in link.asked[1:]] == [("describe", "m")] * 3 and len(clock.slept) == 2
    assert {one[2] for one in link.asked[1:]} == {8.0}


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_that_takes_longer_than_its_time_out_says_what_the_model_is_doing(clock, order):
    link = Link()
    link.returns, link.says = dict.fromkeys(("load", "sleep", "wake")), [LOADING]
    with pytest.raises(Timeout, match=r"^model 'm' is still loading after 1\.0 s$"):
        ORDERS[order](Server("ipc://here", link, 8.0), 1.0)
    assert 0.9999 < sum(clock.slept) < 1.15 and link.asked[0][-2 if order == "load" else -1] == 1.0
    left = [one[2] for one in link.asked[1:]]
    assert left == sorted(left, reverse=True) and left[0] == 1.0 and left[-1] == POLL


@pytest.mark.parametrize(
    ("order", "said", "told"),
    [
        ("load", message(reason="no file"), "model 'm' could not be loaded: no file"),
        ("sleep", message("ready", "no room"), "model 'm' is ready, not sleeping: no room"),
        ("wake", message("ready", "no room"), "model 'm' could not be woken and is ready: no room"),
        ("wake", message("sleeping"), "model 'm' could not be woken and is sleeping: "),
    ],
)
def test_an_order_that_failed_says_why(clock, order, said, told):
    link = Link()
    link.returns, link.says = dict.fromkeys(("load", "sleep", "wake")), [said]
    with pytest.raises(ModelFailed, match=f"^{told}$"):
        ORDERS[order](Server("ipc://here", link, 8.0), 60.0)


def test_a_server_that_goes_while_it_carries_out_an_order_is_gone_unless_its_time_was_over(clock):
    link, server = Link(), None
    link.returns = {"load": None}
    server = Server("ipc://here", link, 8.0)
    for says in ([ServerGone("gone")], [LOADING, ServerGone("gone")]):
        link.says = says
        with pytest.raises(ServerGone):
            server.load("m", timeout=60.0)

    def late(name, timeout):
        if len(link.asked) > before + 1:
            clock.now += 60.0
            raise ServerGone("no answer in time")
        link.asked.append(("describe", name, timeout))
        return LOADING

    link.describe, before = late, len(link.asked)
    with pytest.raises(Timeout, match="still loading after 1.0 s"):
        server.load("m", timeout=1.0)


def test_settings_and_keep_are_told_only_if_they_were_given(clock):
    link = Link()
    link.returns = dict.fromkeys(("load", "keep", "unload"))
    server = Server("ipc://here", link, 8.0)
    server.load("m")
    server.load("m", {}, remote=True)
    server.keep("m", 3.0)
    server.unload("m")
    assert [one for one in link.asked if one[0] != "describe"] == [
        ("load", "m", "", 8.0, {"keep": 0.0, "remote": False}),
        ("load", "m", "{}", 8.0, {"keep": 0.0, "remote": True}),
        ("keep", "m", 3.0, 8.0),
        ("unload", "m", 8.0),
    ]


@pytest.mark.parametrize(("engines", "count"), [([0, 2, 5], 3), ([], 2)])
def test_a_model_is_computed_by_its_own_engines_or_by_all(engines, count):
    link = Link()
    link.says, link.returns = [message(engines=engines)], {"status": '{"engines": [{}, {}]}', "models": ["m", "b"]}
    server = Server("ipc://here", link, 8.0)
    assert server.engines("m") == count and server.models() == ["m", "b"]
    told = server.describe("m")
    assert (told.name, told.spec, told.state, told.settled, told.engines) == ("m", None, "ready", True, tuple(engines))
    assert server.status() == {"engines": [{}, {}]}


def test_engines_go_on_after_a_pause_however_it_ended():
    link, ended = Link(), []
    link.returns = {"pause": lambda: ended.append(True)}
    server = Server("ipc://here", link, 8.0)
    with server.pause(timeout=3.0):
        assert not ended
    with pytest.raises(ValueError, match="odd"), server.pause():
        raise ValueError("odd")
    assert ended == [True, True] and link.asked == [("pause", 3.0), ("pause", 10.0)]


class End:
    """Requests, or a publisher: it notes that it is closed, or cannot be at first."""

    def __init__(self, *errors):
        self.errors, self.ended = list(errors), 0

    def end(self):
        if self.errors:
            raise self.errors.pop(0)
        self.ended += 1

    close = end


@pytest.mark.parametrize("error", [Timeout("in use"), Refused("within a call")])
@pytest.mark.parametrize("kind", ["lane", "publisher"])
def test_a_connection_in_use_is_closed_but_for_what_is_used_and_then_all_of_it(kind, error):
    link, used, others = Link(), End(error), [End(), End()]
    server = Server("ipc://here", link, 8.0)
    for publisher in (used, others[0]) if kind == "publisher" else (others[0],):
        link.returns = {"publisher": publisher}
        assert server.publisher("m", transfer="changed") is publisher
    for requests in (used, others[1]) if kind == "lane" else (others[1],):
        server._opened(requests)
    assert link.asked[-1] == ("publisher", "m", "changed", 8.0)
    with pytest.raises(type(error)):
        server.close()
    assert not link.closed and [one.ended for one in others] == [1, 1] and not used.ended
    with server:
        pass
    assert link.closed and used.ended == 1
    server.close()
    assert used.ended == 1, "it was closed already"
    for ask in (server.models, lambda: server.publisher("m"), lambda: server.weights("m"), lambda: server.model("m")):
        with pytest.raises(Refused, match="this connection was closed: connect again"):
            ask()


@pytest.mark.parametrize("kind", ["lane", "publisher"])
def test_what_opens_while_its_connection_closes_is_closed_at_once(kind):
    link, late = Link(), End()
    server = Server("ipc://here", link, 8.0)

    def publisher(*_):
        link.close()
        return late

    link.publisher = publisher
    with pytest.raises(Refused, match="this connection was closed"):
        if kind == "publisher":
            server.publisher("m")
        else:
            link.close()
            server._opened(late)
    assert late.ended == 1


def test_a_model_is_leased_with_what_was_asked_for_or_the_connections_own():
    link, asked = Link(), []

    def lease(name, rows, timeout, *, wait, priority):
        asked.append((name, rows, timeout, wait, priority))
        raise Busy("no rows")

    link.lease = lease
    server = Server("ipc://here", link, 8.0, priority=3)
    for more in ({}, {"rows": 5, "timeout": 2.0, "wait": False, "priority": 1}, {"timeout": 0}):
        with pytest.raises(Busy):
            server.model("m", **more)
    assert asked == [("m", 0, 8.0, True, 3), ("m", 5, 2.0, False, 1), ("m", 0, 0, True, 3)]
    for wrong in ({"rows": -1}, {"rows": 1.5}, {"priority": 0}, {"priority": 4}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            server.model("m", **wrong)
    assert len(asked) == 3


def test_a_connection_is_pickled_with_its_arguments_and_never_shown_with_a_token(monkeypatch):
    made = []
    monkeypatch.setattr(server_module, "connect", lambda *given, **more: made.append((given, more)))
    server = Server("grpc://here:1", Link(), 8.0, {"token": "secret", "timeout": 8.0})
    assert "secret" not in repr(server) and repr(server) == "<Server grpc://here:1>"
    pickle.loads(pickle.dumps(server))
    assert made == [(("grpc://here:1",), {"token": "secret", "timeout": 8.0})]


@pytest.mark.parametrize(
    ("address", "options", "told"),
    [
        ("http://127.0.0.1:8001", {}, "is no address: .*; HTTP is for other programs"),
        ("localhost:8001", {}, "is no address: .*; HTTP is for other programs"),
        ("tcp://127.0.0.1", {}, r"is no address: expected .*grpcs://host:port$"),
        ("tcp://127.0.0.1:123456", {}, "is no address"),
        ("tcp://a/b:1", {}, "is no address"),
        ("here", {}, "is no address"),
        ("tcp://127.0.0.1:1", {"transport": "shm"}, "transport='shm' is for ipc:// addresses: tcp://127.0.0.1:1"),
        ("grpc://127.0.0.1:1", {"transport": "zmq"}, "is for ipc:// addresses"),
        ("ipc://here", {"transport": "tcp"}, "transport='tcp': expected one of 'auto', 'zmq', 'shm'"),
        ("ipc://here", {"priority": 0}, "priority"),
        ("ipc://here", {"timeout": float("nan")}, "timeout=nan: expected seconds"),
    ],
)
def test_an_address_or_an_option_of_no_known_form_is_refused_with_words(address, options, told):
    with pytest.raises(ValueError, match=told):
        connect(address, **options)
    hinted = "HTTP is for" in told
    with pytest.raises(ValueError) as caught:
        connect(address, **options)
    assert ("HTTP" in str(caught.value)) == hinted


@pytest.mark.parametrize(
    ("options", "timeout", "wait"), [({}, 10.0, 10.0), ({"timeout": 4}, 4, 4), ({"start_timeout": 0}, 10.0, 0)]
)
def test_a_server_that_starts_is_waited_for_as_long_as_a_call_or_as_was_asked(monkeypatch, options, timeout, wait):
    links = []

    def noted(*given):
        links.append(given)
        return Link()

    for name in ("JURYBOX_SERVER_KEY", "JURYBOX_CLIENT_KEY"):
        monkeypatch.delenv(name, raising=False)
    for kind in ("local_link.LocalLink", "remote.tcp_link.TcpLink", "remote.grpc_link.GrpcLink"):
        monkeypatch.setattr(f"jurybox.client.{kind}", noted)
    for address in ("ipc://here", "tcp://[::1]:65535", "grpc://a:1", "grpcs://a:1"):
        server = connect(address, **options, priority=1)
        assert (server.address, server.timeout, server.priority) == (address, timeout, 1)
    assert links == [
        ("ipc://here", "auto", wait),
        ("tcp://[::1]:65535", None, wait),
        ("grpc://a:1", None, wait, None),
        ("grpcs://a:1", None, wait, None),
    ]


@pytest.mark.parametrize("kind", ["device", "bound"])
def test_the_model_of_rows_on_a_device_is_closed_if_they_cannot_be_bound(monkeypatch, kind):
    link, asked, closed, made = Link(), [], [], []

    def fail(*given):
        made.append(given)
        raise Refused("no peer access")

    for name in ("DeviceRows", "BoundRows"):
        monkeypatch.setattr(f"jurybox.client.device_rows.{name}", fail)
    monkeypatch.setattr("jurybox.protocol.device_memory.driver", lambda device: f"driver {device}")
    server, model = Server("ipc://here", link, 8.0), SimpleNamespace(close=lambda: closed.append(True))
    server.model = lambda *given, **more: asked.append((given, more)) or model
    link.bind = lambda *_: None
    with pytest.raises(Refused, match="no peer access"):
        if kind == "device":
            server.device_rows("m", 1, device=2)
        else:
            server.bound_rows("m", 1, {"x": (b"h", 0)}, {}, event=b"e")
    assert closed == [True] and asked == [(("m",), {"rows": 1, "timeout": 8.0})]
    of = ("driver 2",) if kind == "device" else ({"x": (b"h", 0)}, {}, b"e")
    assert made == [(model, 1, *of, link.bind, 8.0)]
    with pytest.raises(ValueError, match="rows"):
        server.device_rows("m", 0)


def test_a_server_on_this_host_is_reached_on_linux_alone(monkeypatch):
    monkeypatch.setattr(server_module, "sys", SimpleNamespace(platform="darwin"))
    with pytest.raises(Refused, match="^ipc://here is for clients on the server's own host: "):
        connect("ipc://here")
