"""Who is let in: calls that show the token, requests after the doors have closed, and handshakes of TLS that go on."""

from __future__ import annotations

import asyncio
import errno
import json
from types import SimpleNamespace

import grpc
import pytest

from jurybox import native
from jurybox.protocol.errors import Busy, Code, ModelNotFound
from jurybox.server.security import grpc as guards
from jurybox.server.security import handshakes
from jurybox.server.security.access import Access, Token
from jurybox.server.security.doors import Doors
from jurybox.server.security.grpc import UNAUTHENTICATED, Guarding, TokenGuard, admitted, interceptors, limits, works
from jurybox.server.security.handshakes import HANDSHAKE, TlsServer, WithHandshakes
from jurybox.server.security.http import ACCEPTED, HEAD, Doorkeeper, Heads
from jurybox.server.security.limits import RECEIVED

SECRET = "a-token-of-more-than-sixteen-characters"
SHOWN = ("authorization", f"Bearer {SECRET}")
OPEN = "/inference.GRPCInferenceService/ServerLive"
CLOSED = "/inference.GRPCInferenceService/ModelInfer"
MIB = 1 << 20


class Ended(Exception):
    """What ends an aborted call."""


class Context:
    """A call's."""

    def set_trailing_metadata(self, trailing):
        self.trailing = trailing

    def time_remaining(self):
        return None

    async def abort(self, code, details):
        raise Ended(code, details)


@pytest.mark.parametrize(
    ("method", "metadata", "comes_in"),
    [
        (CLOSED, [SHOWN], True),
        (CLOSED, [("x", "y"), SHOWN], True),
        (CLOSED, [], False),
        (CLOSED, None, False),
        (CLOSED, [("authorization", "Bearer nonsense")], False),
        (CLOSED, [SHOWN, SHOWN], False),
        (CLOSED, [SHOWN, ("authorization", "Bearer nonsense")], False),
        (CLOSED, [("authorization", SHOWN[1].encode())], False),
        (OPEN, [], True),
        (OPEN, None, True),
        (OPEN + "x", [], False),
    ],
)
async def test_a_call_comes_in_with_the_token_or_to_what_is_open_to_all(method, metadata, comes_in):
    assert admitted(Token(SECRET), method, metadata or ()) == comes_in
    (guard,) = interceptors(Access(SECRET))
    assert isinstance(guard, TokenGuard) and not interceptors(Access())
    asked, handler = [], object()

    async def go_on(details):
        asked.append(details)
        return handler

    details = SimpleNamespace(method=method, invocation_metadata=metadata)
    found = await guard.intercept_service(go_on, details)
    assert asked == [details] * comes_in and (found is handler) == comes_in
    if not comes_in:
        assert found.request_streaming and found.response_streaming, "it refuses calls of every kind"
        with pytest.raises(Ended) as ended:
            await anext(found.stream_stream(None, Context()))
        assert ended.value.args == (grpc.StatusCode.UNAUTHENTICATED, UNAUTHENTICATED)


def test_grpcios_server_has_the_limits_of_the_settings():
    assert dict(limits(Access(max_message=3 * MIB))) == {
        "grpc.max_receive_message_length": 3 * MIB,
        "grpc.max_send_message_length": 3 * MIB,
        "grpc.max_metadata_size": 16 << 10,
        "grpc.max_concurrent_streams": guards.MOST_CALLS,
    }


@pytest.mark.parametrize(("tls", "port"), [(None, "insecure"), ((b"key", b"certificate"), "secure")])
def test_a_port_speaks_tls_if_a_certificate_is_set(tls, port, monkeypatch):
    opened = []
    server = SimpleNamespace(
        add_insecure_port=lambda where: opened.append(("insecure", where)) or 7,
        add_secure_port=lambda where, given: opened.append(("secure", where)) or 7,
    )
    assert guards.open_port(server, "h:1", SimpleNamespace(tls=lambda: tls)) == 7
    assert opened == [(port, "h:1")]


class Server:
    """Finds the methods that were added to it by their paths."""

    def add_registered_method_handlers(self, service, handlers):
        self.found = {f"/{service}/{name}": handler for name, handler in handlers.items()}


class Methods:
    """Methods of every kind, which note what is held while they run."""

    def __init__(self, budget=None, direct=None):
        self.held, self.budget, self.doors, server = [], budget, Doors(), Server()
        self.guarding = Guarding(server, budget, direct or {}, self.doors)
        kinds = {
            "ModelInfer": grpc.unary_unary_rpc_method_handler(self.one, len, None),
            "Publish": grpc.stream_stream_rpc_method_handler(self.many, len, None),
            "Read": grpc.unary_stream_rpc_method_handler(self.few, len, None),
            "SendObservations": grpc.stream_unary_rpc_method_handler(self.last, len, None),
            "Look": grpc.unary_unary_rpc_method_handler(self.one, len, str),
        }
        self.guarding.add_registered_method_handlers("t.T", kinds)
        self.found = server.found

    def note(self):
        self.held.append((self.guarding.in_progress, self.budget.held(RECEIVED) if self.budget else None))

    async def one(self, size, context):
        self.note()
        if size == 3:
            raise ModelNotFound("none is there")
        return size

    async def many(self, requests, context):
        async for size in requests:
            self.note()
            yield size

    async def few(self, size, context):
        for number in range(size):
            self.note()
            yield number

    async def last(self, requests, context):
        return [size async for size in requests][-1]


async def coming(handler, *messages):
    for message in messages:
        yield handler.request_deserializer(message)


async def test_calls_that_work_are_counted_while_they_run_whatever_their_kind():
    methods = Methods(native.Budget((MIB, MIB, 9), (MIB, MIB, 9)))
    one, many, few, last, look = methods.found.values()
    assert await one.unary_unary(one.request_deserializer(b"xx"), Context()) == 2
    assert methods.held == [(1, 2)]
    assert await look.unary_unary(look.request_deserializer(b"xx"), Context()) == 2
    assert methods.held.pop() == (0, 2), "it only reads"
    assert [size async for size in many.stream_stream(coming(many, b"x", b"xx"), Context())] == [1, 2]
    assert [size async for size in few.unary_stream(few.request_deserializer(b"xx"), Context())] == [0, 1]
    assert methods.held[1:] == [(1, 0)] * 4
    assert [size async for size in last.stream_stream(coming(last, b"x", b"xx"), Context())] == [2]
    assert methods.guarding.in_progress == methods.budget.held(RECEIVED) == 0
    with pytest.raises(Ended, match="none is there") as ended:
        await one.unary_unary(one.request_deserializer(b"xxx"), Context())
    assert ended.value.args[0] == grpc.StatusCode.NOT_FOUND
    assert methods.guarding.in_progress == methods.budget.held(RECEIVED) == 0


async def test_closed_doors_refuse_calls_that_work_and_no_others():
    methods = Methods()
    one, many, few, _, look = methods.found.values()
    methods.doors.close()
    with pytest.raises(Ended) as ended:
        await one.unary_unary(one.request_deserializer(b"x"), context := Context())
    assert ended.value.args[0] == grpc.StatusCode.UNAVAILABLE
    assert dict(context.trailing) == {"jurybox-code": str(int(Code.DRAINING)), "grpc-retry-pushback-ms": "-1"}
    for answers in (many.stream_stream(coming(many, b"x"), Context()), few.unary_stream(None, Context())):
        with pytest.raises(Ended):
            await anext(answers)
    assert await look.unary_unary(look.request_deserializer(b"x"), Context()) == 1
    assert methods.held == [(0, None)] and methods.guarding.in_progress == 0


@pytest.mark.parametrize("how", ["answers", "leaves it", "leaves it later", "fails", "no room", "gone"])
async def test_a_direct_method_answers_itself_or_leaves_the_call_to_the_ordinary_one(how):
    budget, gone, calls = native.Budget((MIB, MIB, 9), (MIB, MIB, 9)), [], []

    def direct(data, call):
        calls.append((data, budget.held(RECEIVED)))
        call.on_gone = lambda: gone.append("gone")
        assert call.connection is None and call.room() is None and not call.done()
        loop = asyncio.get_running_loop()
        if how == "answers":
            loop.call_soon(call.reply, b"directly")
        elif how == "leaves it later":
            loop.call_soon(call.as_usual)
        elif how == "fails":
            loop.call_soon(call.fail, Busy("not now"))
        return how != "leaves it"

    methods = Methods(budget, {"/t.T/Look": direct})
    look = methods.found["/t.T/Look"]
    other = native.Account(budget, 0)
    if how == "no room":
        assert other.take(RECEIVED, MIB) == 0
    asked = asyncio.ensure_future(look.unary_unary(b"xx", Context()))
    if how in ("fails", "no room"):
        with pytest.raises(Ended) as ended:
            await asked
        assert ended.value.args[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    elif how == "gone":
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    else:
        assert await asked == (b"directly" if how == "answers" else "2")
    assert calls == ([] if how == "no room" else [(b"xx", 2)])
    assert gone == ["gone"] * (how == "gone") and budget.held(RECEIVED) == MIB * (how == "no room")


def test_methods_that_do_more_than_read_are_known_by_their_last_name():
    assert works("/any.Package/ModelInfer") and works("/transport.AsyncInference/GetActions")
    assert not any(works(path) for path in (OPEN, "/a/ModelReady", "", "ModelInfer/x"))


@pytest.mark.parametrize(
    ("method", "accepted", "closed", "status"),
    [
        ("POST", False, False, 200),
        ("POST", False, True, 503),
        ("POST", True, True, 200),
        ("GET", False, True, 200),
        ("DELETE", False, True, 503),
    ],
)
async def test_closed_doors_refuse_requests_that_do_more_than_read_unless_they_were_accepted_before(
    method, accepted, closed, status
):
    doors, sent = Doors(), []
    if closed:
        doors.close()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": "/x", **({ACCEPTED: True} if accepted else {})}
    await Doorkeeper(app, doors, {})(scope, None, send)
    assert sent[0]["status"] == status and ((b"connection", b"close") in sent[0]["headers"]) == closed
    if status == 503:
        assert json.loads(sent[1]["body"])["code"] == "DRAINING"
    else:
        assert (b"x", b"y") in sent[0]["headers"]


async def test_what_is_no_request_passes_the_doors_and_a_head_is_asked_like_a_get():
    doors, seen = Doors(), []
    doors.close()

    async def app(scope, receive, send):
        seen.append(scope)

    for layer in (Doorkeeper(app, doors, {}), Heads(app)):
        await layer({"type": "lifespan"}, None, None)
    assert seen == [{"type": "lifespan"}] * 2
    for method in ("HEAD", "GET", "POST"):
        await Heads(app)({"type": "http", "method": method}, None, None)
    assert seen[2:] == [
        {"type": "http", "method": "GET", HEAD: True}, {"type": "http", "method": "GET"},
        {"type": "http", "method": "POST"},
    ]  # fmt: skip


class Made:
    """A connection that was accepted."""

    closed = slow = False

    def setblocking(self, _on):
        pass

    def setsockopt(self, *_):
        if self.slow:
            raise OSError(errno.EINVAL, "it is gone")

    def close(self):
        self.closed = True


class Listener:
    """A listening socket that gives out connections and errors in turn."""

    def __init__(self, *comes):
        self.comes, self.closed = list(comes), False

    def setblocking(self, on):
        assert not on

    def accept(self):
        one = self.comes.pop(0) if self.comes else BlockingIOError()
        if isinstance(one, Exception):
            raise one
        return one, None

    def close(self):
        self.closed = True


class Loop:
    """An event loop whose readers and timers a test sees; handshakes wait until the test says how they end."""

    def __init__(self):
        self.readers, self.timers, self.greeted = {}, [], []
        self._loop = asyncio.get_running_loop()
        self.create_task, self.create_future = self._loop.create_task, self._loop.create_future

    def add_reader(self, listener, call):
        self.readers[listener] = call

    def remove_reader(self, listener):
        self.readers.pop(listener, None)

    def call_later(self, seconds, call):
        timer = SimpleNamespace(seconds=seconds, call=call, cancelled=False)
        timer.cancel = lambda: setattr(timer, "cancelled", True)
        self.timers.append(timer)
        return timer

    async def connect_accepted_socket(self, factory, made, *, ssl, ssl_handshake_timeout):
        assert (factory, ssl, ssl_handshake_timeout) == ("factory", "context", HANDSHAKE)
        future = self._loop.create_future()
        self.greeted.append((made, future))
        await future


async def serving(*comes):
    loop, listener = Loop(), Listener(*comes)
    server = TlsServer(loop, "factory", listener, "context")
    assert not server.is_serving() and server.sockets == () and server.get_loop() is loop
    await server.start_serving()
    await server.start_serving()
    assert server.is_serving() and server.sockets == (listener,)
    return server, loop, listener


async def test_connections_are_accepted_a_few_at_a_time_though_some_are_gone_already():
    gone = Made()
    gone.slow = True
    some = [gone, OSError(errno.ECONNABORTED, "gone"), *(Made() for _ in range(20))]
    _, loop, listener = await serving(*some)
    for taken in (16, len(some), len(some)):
        loop.readers[listener]()
        assert len(listener.comes) == len(some) - taken
    await asyncio.sleep(0)
    assert len(loop.greeted) == 21 and loop.greeted[0][0] is gone and not loop.timers


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_without_descriptors_nothing_is_accepted_for_a_moment(number):
    server, loop, listener = await serving(OSError(number, "none left"), Made())
    loop.readers[listener]()
    assert not loop.readers and len(listener.comes) == 1
    (timer,) = loop.timers
    assert timer.seconds == handshakes._PAUSE
    timer.call()
    loop.readers[listener]()
    await asyncio.sleep(0)
    assert len(loop.greeted) == 1
    listener.comes = [OSError(number, "none left")]
    loop.readers[listener]()
    server.close()
    assert loop.timers[1].cancelled and listener.closed and not server.is_serving() and not timer.cancelled
    loop.timers[1].call()
    assert not loop.readers


async def test_of_too_many_handshakes_the_one_that_began_first_is_ended(monkeypatch):
    monkeypatch.setattr(handshakes, "MOST_HANDSHAKES", 2)
    made = [Made() for _ in range(4)]
    server, loop, listener = await serving(*made[:2])
    loop.readers[listener]()
    await asyncio.sleep(0)
    listener.comes = made[2:3]
    loop.readers[listener]()
    await asyncio.sleep(0)
    assert [one.closed for one in made] == [True, False, False, False]
    loop.greeted[1][1].set_result(None)
    for _ in range(3):
        await asyncio.sleep(0)
    listener.comes = made[3:]
    loop.readers[listener]()
    await asyncio.sleep(0)
    assert not any(one.closed for one in made[1:]), "one had ended before"
    server.close()
    await server.wait_closed()
    assert [one.closed for one in made] == [True, False, True, True] and not server._handshakes


@pytest.mark.parametrize("error", [OSError("no TLS"), TimeoutError()])
async def test_what_speaks_no_tls_is_closed_and_nobody_hears_of_it(error):
    failed = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failed.append(context))
    server, loop, listener = await serving(made := Made())
    loop.readers[listener]()
    await asyncio.sleep(0)
    loop.greeted[0][1].set_exception(error)
    for _ in range(3):
        await asyncio.sleep(0)
    assert made.closed and not failed
    await server.wait_closed()


class Usual:
    """An event loop as it was."""

    async def create_server(self, *arguments, **named):
        return arguments, named


@pytest.mark.parametrize("named", [{}, {"sock": "s"}, {"ssl": "c"}, {"sock": "s", "ssl": None}])
async def test_servers_without_tls_or_a_socket_are_the_loops_own(named):
    class Both(WithHandshakes, Usual):
        pass

    assert await Both().create_server("factory", **named) == (("factory",), named)


@pytest.mark.parametrize("starts", [None, True, False])
async def test_a_server_with_tls_serves_unless_it_is_to_start_later(starts):
    class Both(WithHandshakes, Loop):
        pass

    loop, listener = Both(), Listener()
    more = {} if starts is None else {"start_serving": starts}
    server = await loop.create_server("factory", sock=listener, ssl="context", **more)
    assert server.is_serving() == (listener in loop.readers) == (starts is not False)
    if not server.is_serving():
        waiting = asyncio.ensure_future(server.serve_forever())
        await asyncio.sleep(0)
        assert server.is_serving() and not waiting.done()
        waiting.cancel()
