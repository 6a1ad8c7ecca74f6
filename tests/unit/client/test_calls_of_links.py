"""A link's calls on its control connection: what each asks, who may make one, and what closing it leaves."""

from __future__ import annotations

import _thread
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from tests.serving import wait_until
from tests.unit.client.test_control import Server

from jurybox.client import Refused, ServerGone
from jurybox.client import control as control_module
from jurybox.client import link as link_module
from jurybox.client.control import Control, Wires, say_that_it_waits
from jurybox.client.link import ControlLink, Link, OneEngine, RowsHere, described, traced, wants_traces
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol import control_pb2 as pb
from jurybox.protocol.control_pb2 import ControlReply
from jurybox.protocol.errors import TooManyFiles
from jurybox.protocol.scoreboard import EngineState
from jurybox.protocol.wire import PREFIX, build_version

SPEC = ModelSpec("m", {"x": TensorSpec("float32", (2,))}, {"y": TensorSpec("float32")})


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever closes sockets waits for that, however busy the machine is."""
    monkeypatch.setattr(control_module, "_CLOSE", 60.0)


class Answering:
    """A control connection that answers each call alike; `asked` has the calls."""

    def __init__(self, wires: Wires) -> None:
        self.wires = wires
        self.asked: list[tuple[float, dict[str, Any]]] = []
        self.closed = 0
        self.reply = ControlReply()

    def call(self, timeout: float, **request: Any) -> ControlReply:
        self.asked.append((timeout, request))
        return self.reply

    def close(self, then: Callable[[], None] = lambda: None) -> None:
        self.closed += 1
        then()


class World:
    """A link and the control connections that it has opened."""

    def __init__(self) -> None:
        self.opened: list[Answering] = []
        self.link = ControlLink(self.open)  # type: ignore[arg-type]

    def open(self, wires: Wires) -> Answering:
        self.opened.append(Answering(wires))
        return self.opened[-1]

    def asked(self) -> dict[str, Any]:
        """The last call's request."""
        timeout, request = self.opened[-1].asked[-1]
        assert 0 < timeout <= 9.0
        return request


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.link.close()


LOAD = pb.LoadRequest(model="m", settings_json="{}", keep=2.5, remote=True)


@pytest.mark.parametrize(
    ("call", "request_"),
    [
        (lambda link: link.describe("m", 9.0), {"model": pb.ModelRequest(model="m")}),
        (lambda link: link.status(9.0), {"status": pb.StatusRequest()}),
        (lambda link: link.load("m", "{}", 9.0, keep=2.5, remote=True), {"load": LOAD}),
        (lambda link: link.keep("m", 7.5, 9.0), {"keep": pb.KeepRequest(model="m", keep=7.5)}),
        (lambda link: link.unload("m", 9.0), {"unload": pb.UnloadRequest(model="m")}),
        (lambda link: link.sleep("m", 9.0), {"sleep": pb.SleepRequest(model="m")}),
        (lambda link: link.wake("m", 9.0), {"wake": pb.WakeRequest(model="m")}),
        (lambda link: link.models(9.0), {"hello": pb.Hello(client=build_version())}),
    ],
    ids=["describe", "status", "load", "keep", "unload", "sleep", "wake", "models"],
)
def test_each_call_of_a_link_asks_the_server_for_what_it_is_called(
    world: World, call: Callable[[Any], Any], request_: dict[str, Any]
) -> None:
    if "hello" in request_:
        request_["hello"].pid = os.getpid()
    for _ in range(2):
        call(world.link)
        assert world.asked() == request_
    assert len(world.opened) == 1, "both calls use one connection"


def test_answers_are_given_to_the_caller_as_they_came(world: World) -> None:
    world.link.status(9.0)
    reply = world.opened[0].reply
    reply.status.json = '{"a": 1}'
    assert world.link.status(9.0) == '{"a": 1}'
    reply.server.models.extend(["m", "n"])
    assert world.link.models(9.0) == ["m", "n"]
    reply.model.name = "m"
    assert world.link.describe("m", 9.0).name == "m"


def test_a_link_that_was_closed_makes_no_call_and_opens_nothing(world: World) -> None:
    world.link.status(9.0)
    assert not world.link.closed and not world.opened[0].wires.context.closed
    for _ in range(2):
        world.link.close()
    assert world.link.closed and world.opened[0].closed == 1 and world.opened[0].wires.context.closed
    for ask in (lambda: world.link.status(9.0), lambda: world.link._context):
        with pytest.raises(Refused, match="this connection was closed: connect again"):
            ask()
    assert len(world.opened) == 1


def test_a_link_whose_server_does_not_greet_it_is_closed_and_says_why(world: World) -> None:
    def greet(timeout: float) -> None:
        world.link.status(timeout)
        raise ServerGone("no answer")

    world.link._greet = greet  # type: ignore[method-assign]
    with pytest.raises(ServerGone, match="no answer"):
        world.link._greet_first(9.0)
    assert world.link.closed and world.opened[0].closed == 1


def test_sockets_of_a_link_that_could_not_be_opened_are_closed(world: World) -> None:
    wires: list[Wires] = []

    def fail(made: Wires) -> None:
        wires.append(made)
        made.context.socket(zmq.DEALER)
        raise ServerGone("no such address")

    world.link._open_control = fail  # type: ignore[assignment]
    with pytest.raises(ServerGone, match="no such address"):
        world.link.status(9.0)
    wait_until(lambda: wires[0].context.closed, 30, "its end")
    world.link._open_control = world.open  # type: ignore[assignment]
    world.link.status(9.0)
    assert len(world.opened) == 1, "the next call opens them again"


def test_a_link_is_opened_only_if_there_are_files_left_for_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def require(count: int, purpose: str) -> None:
        raise TooManyFiles(f"{purpose} takes {count} files")

    monkeypatch.setattr(link_module, "require", require)
    with pytest.raises(TooManyFiles, match="connecting to a server takes 16 files"):
        world.link.status(9.0)
    assert not world.opened


def test_sockets_of_a_link_that_nobody_has_any_more_are_closed() -> None:
    world = World()
    world.link.status(9.0)
    (opened,) = world.opened
    gone = weakref.ref(world.link)
    del world
    gc.collect()
    assert gone() is None
    wait_until(lambda: opened.wires.context.closed, 30, "their end")


def test_a_child_that_was_forked_within_a_call_opens_a_connection_of_its_own(world: World) -> None:
    world.link.status(9.0)
    with world.link._lock.within(1.0):
        done = threading.Event()

        def call() -> None:
            world.link._after_fork_in_child()  # the lock stays the parent's
            world.link.status(9.0)
            done.set()

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        assert done.wait(30)
        thread.join(30)
    parents, childs = world.opened
    assert parents.closed == 0 and not parents.wires.context.closed and len(childs.asked) == 1
    parents.wires.close()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda link: link.pause(1.0),
            "engines can be paused only by processes on their own host: connect over ipc://",
        ),
        (lambda link: link.bind(pb.BindRequest(), 1.0), "device memory can be shared only on one host"),
        (lambda link: link.publisher("m", "exact", 1.0), "the weights of 'm' are not published over tcp://"),
        (lambda link: link.weights("m", 1.0), "the weights of 'm' are not published over tcp://"),
    ],
)
def test_what_a_link_cannot_do_is_refused_with_the_address_that_can(call: Callable[[Any], Any], told: str) -> None:
    class Far(Link):
        """What every link over a network is, without its calls."""

    far = Far()
    with pytest.raises(Refused, match=told):
        call(far)
    assert not far.closed and not far.waits


# ---- what links show to lanes and to callers


def test_a_far_servers_engine_serves_and_its_rows_are_dropped_when_they_are_closed() -> None:
    board = OneEngine()
    assert board.server_lives() and board.incarnation == 1 and board.engines["state"].tolist() == [EngineState.SERVING]
    rows = RowsHere(SPEC, 4)
    written = rows.columns.inputs["x"]
    assert rows.rows == 4 and written.shape == (4, 2) and rows.columns.outputs["y"].shape == (4,)
    written[:] = 3
    rows.close()
    assert not rows.columns.inputs and not rows.columns.outputs and rows.columns.spec == SPEC
    assert written.tolist() == [[3, 3]] * 4


def test_a_description_has_what_the_servers_message_says() -> None:
    message = pb.ModelMessage(
        name="m", state="ready", reason="why", settled=True, max_batch=9, arena_rows=90, digest="d", engines=[2, 3],
        max_lag=4,
    )  # fmt: skip
    of = described(message)
    assert of.spec is None and not of.takes_publications, "it was never loaded"
    for tensors in (message.inputs, message.outputs):
        tensors.add(name="x", dtype="float32", shape=[3])
    message.weights = "channel"
    of = described(message)
    assert of.spec is not None and of.spec.inputs == {"x": TensorSpec("float32", (3,))} == of.spec.outputs
    assert (of.name, of.state, of.reason, of.settled, of.max_batch, of.arena_rows) == ("m", "ready", "why", True, 9, 90)
    assert (of.digest, of.engines, of.takes_publications, of.max_lag) == ("d", (2, 3), True, 4)


def test_traces_without_opentelemetry_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JURYBOX_TRACES", raising=False)
    assert wants_traces() is False
    monkeypatch.setitem(sys.modules, "jurybox.client.tracing", None)
    with pytest.raises(
        Refused, match=r"JURYBOX_TRACES is true, but OpenTelemetry is missing .*: install it with .*otel"
    ):
        traced(None, "m")  # type: ignore[arg-type]


# ---- over real sockets


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Any, str]]:
    """A socket that stands for a server, and its address."""
    address = f"ipc://{tmp_path}/s"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        yield socket, address


def answer(socket: Any, reply: ControlReply) -> pb.ControlRequest:
    assert socket.poll(30_000)
    who, prefix, number, body = socket.recv_multipart()
    assert prefix == PREFIX
    socket.send_multipart([who, PREFIX, number, reply.SerializeToString()])
    return pb.ControlRequest.FromString(body)


def test_a_call_over_a_socket_is_numbered_and_answered(server: tuple[Any, str]) -> None:
    socket, address = server
    wires = Wires()
    control = Control(wires.context, address)
    asked: list[pb.ControlRequest] = []
    reply = ControlReply(status=pb.StatusMessage(json="told"))
    thread = threading.Thread(target=lambda: asked.extend(answer(socket, reply) for _ in range(2)))
    thread.start()
    for _ in range(2):
        assert control.call(30.0, status=pb.StatusRequest()).status.json == "told"
    thread.join(30)
    assert [request.HasField("status") for request in asked] == [True, True]
    sockets = list(wires.context.held.values())
    assert len(sockets) == 1 and not sockets[0].closed
    control.close()
    assert sockets[0].closed and not wires.context.held
    wires.close()
    assert wires.context.closed


def test_a_socket_to_this_host_drops_what_was_not_sent_and_takes_answers_up_to_64_mebibytes(
    server: tuple[Any, str],
) -> None:
    wires = Wires()
    control = Control(wires.context, server[1])
    (socket,) = wires.context.held.values()
    options = zmq.LINGER, zmq.MAXMSGSIZE, zmq.RECONNECT_IVL, zmq.RECONNECT_IVL_MAX
    assert [socket.getsockopt(option) for option in options] == [0, 64 << 20, 20, 500]
    control.close()
    wires.close()


def test_a_far_servers_connection_that_ends_closes_its_monitor() -> None:
    server = Server()
    control = Control(None, "tcp://there:1", server.open, far=lambda lease: None)  # type: ignore[arg-type]
    (line,) = server.lines
    line.lost.there = 1
    control.close()
    assert line.closed and not line.lost.there


def test_wires_close_every_socket_once_and_a_childs_are_the_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    wires, ended = Wires(), threading.Event()
    sockets = [wires.context.socket(zmq.DEALER) for _ in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)  # as in a forked child
        assert wires.leave(0, ended.set) is False
        wires.close()
    assert not any(socket.closed for socket in sockets) and not wires.context.closed
    assert wires.leave(0, ended.set) is True
    assert ended.wait(30) and all(socket.closed for socket in sockets) and wires.context.closed
    assert wires.leave(0, ended.set) is False, "another call has ended them"
    wires.close()


def test_wires_are_left_as_they_are_where_no_thread_can_be_started_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    wires = Wires()
    monkeypatch.setattr(
        control_module, "_thread", SimpleNamespace(allocate_lock=_thread.allocate_lock, start_new_thread=start)
    )
    assert wires.leave() is False and not wires.context.closed
    wires.context.destroy(0)


def test_sockets_of_one_link_are_no_others() -> None:
    first, second = Wires(), Wires()
    socket = first.context.socket(zmq.DEALER)
    assert list(first.context.held.values()) == [socket] and not second.context.held
    second.close()
    assert not socket.closed
    first.close()
    assert socket.closed


def test_a_wait_for_a_server_is_logged_only_where_none_listens(
    server: tuple[Any, str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    assert say_that_it_waits(server[1], 5.0) is False and not caplog.records
    assert say_that_it_waits(f"ipc://{tmp_path}/nobody", 5.0) is True
    (record,) = caplog.records
    assert "waiting up to 5.0 s for a server at ipc://" in record.getMessage() and "nobody" in record.getMessage()
