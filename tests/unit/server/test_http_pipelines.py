"""Requests of one HTTP connection behind each other, without a socket: their order, their limits and their ends."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
import uvicorn
from tests.clocks import Clock, given
from tests.loops import turns
from tests.serving import connection_of_h11
from tests.wires import Wire
from uvicorn.server import ServerState

from jurybox import native
from jurybox.protocol.errors import Code, Refused
from jurybox.server.gateway import http_connection, http_parsers, known_paths
from jurybox.server.gateway.inference import http_forms
from jurybox.server.gateway.inference.http_forms import KnownHeads, _Head, _read_form, connection_of
from jurybox.server.gateway.known_paths import ANSWERED, MOST_BODY, MOST_HEAD, MOST_HEADS, HttpReply
from jurybox.server.security.limits import ANSWERS, HTTP, RECEIVED, SILENCE
from jurybox.server.security.pace import HEAVY, Turns

MIB = 1 << 20
POST = b"POST /x HTTP/1.1\r\nHost: here\r\n"


class App:
    """An application that notes its requests, and answers each as soon as it may.

    Attributes:
        asked: the path of each request, and the messages that it received.
    """

    def __init__(self):
        self.asked, self.reads, self.go = [], True, asyncio.Event()
        self.go.set()
        self.answered = None  # who answers the bodies behind the same head

    async def __call__(self, scope, receive, send):
        seen = []
        self.asked.append((scope["path"], seen))
        if self.answered is not None and ANSWERED in scope:
            scope[ANSWERED](self.answered)
        while self.reads:
            message = await receive()
            seen.append((message["type"], message.get("body")))
            if not message.get("more_body"):
                break
        await self.go.wait()
        closing = [] if self.reads else [(b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2"), *closing]})
        await send({"type": "http.response.body", "body": b"ok"})


class Port:
    """A port whose connections have no socket."""

    def __init__(self, kind=None, most=MIB):
        self.app, self.budget = App(), native.Budget((most, most, 9), (most, most, 9))
        self.kind = type("Port", (kind or connection_of(None, MIB),), {"budget": self.budget, "turns": Turns()})
        self.config = uvicorn.Config(self.app, log_config=None, lifespan="off", timeout_keep_alive=60)
        self.config.load()

    def connected(self):
        made, beneath = self.kind(config=self.config, server_state=ServerState(), app_state={}), Wire(can_end=True)
        made.connection_made(beneath)
        return made, beneath


def request(path=b"/x", body=b"", head=b"Host: here\r\n", version=b"1.1"):
    return b"POST %b HTTP/%b\r\n%bContent-Length: %d\r\n\r\n%b" % (path, version, head, len(body), body)


@pytest.fixture(params=["httptools", "h11"])
def kind(request):
    if request.param == "h11":
        return connection_of_h11()
    pytest.importorskip("httptools")
    return http_parsers.Connection


async def test_requests_that_wait_see_the_end_of_their_connection(kind):
    """Also the one that is answered while others were received behind it."""
    port = Port(kind)
    connection, beneath = port.connected()

    async def waits(scope, receive, send):
        seen = []
        port.app.asked.append((scope["path"], seen))
        seen += [(await receive())["type"], (await receive())["type"]]

    connection._app = waits
    connection.data_received(request(b"/a", b"1") + request(b"/b", b"2"))
    await turns()
    assert port.app.asked == [("/a", [])]
    connection.connection_lost(None)
    await turns()
    assert port.app.asked == [("/a", ["http.request", "http.disconnect"])], "nobody asks for the second any more"
    assert not beneath.sent


async def test_what_comes_behind_the_answer_to_a_part_of_a_request_is_dropped_until_its_end(kind):
    port = Port(kind)
    port.app.reads = False
    connection, beneath = port.connected()
    connection.data_received(POST + b"Content-Length: 1000\r\n\r\n" + b"x" * 10)
    await turns()
    assert beneath.sent.startswith(b"HTTP/1.1 200") and beneath.ended and not beneath.closed
    connection.data_received(b"x" * 989)
    assert not beneath.closed
    connection.data_received(b"x")
    assert beneath.closed and len(port.app.asked) == 1


async def test_nonsense_behind_the_answer_to_a_part_of_a_request_is_dropped_up_to_a_bound(kind):
    port = Port(kind)
    port.app.reads = False
    connection, beneath = port.connected()
    connection.data_received(POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
    await turns()
    assert beneath.sent.startswith(b"HTTP/1.1 200") and not beneath.closed
    connection.data_received(b"no chunk\r\n")
    for _ in range(8):
        connection.data_received(bytes(MIB))
    assert not beneath.closed
    connection.data_received(b"x")
    assert beneath.closed and len(port.app.asked) == 1


async def test_requests_that_come_at_once_are_answered_in_their_order(kind):
    port = Port(kind)
    connection, beneath = port.connected()
    connection.data_received(b"".join(request(b"/%d" % number, b"body") for number in range(3)))
    await turns(60)
    assert [path for path, _ in port.app.asked] == ["/0", "/1", "/2"]
    assert beneath.sent.count(b"HTTP/1.1 200") == 3 and not beneath.closed
    assert all(seen == [("http.request", b"body")] for _, seen in port.app.asked)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (request(head=b""), b"Invalid HTTP request received."),
        (request(head=b"Host: a\r\nHost: a\r\n"), b"Invalid HTTP request received."),
        (b"POST /x HTTP/1.1\r\nHost: here\r\nx: " + b"y" * (33 << 10), b"Headers too large."),
        (POST + b"x: y\r\n" * 5600 + b"Content-Length: 0\r\n\r\n", b"Headers too large."),
        (b"POST /" + b"x" * (32 << 10), b"Headers too large."),
        (b"nonsense\r\n\r\n", b"Invalid HTTP request received."),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nno chunk", b"Invalid HTTP request received."),
    ],
    ids=["no host", "two hosts", "a long header", "many headers", "a long path", "nonsense", "a broken body"],
)
async def test_what_is_no_request_is_refused_behind_those_before_it(wrong, said):
    pytest.importorskip("httptools")
    port = Port(http_parsers.Connection)
    port.app.go.clear()
    connection, beneath = port.connected()
    connection.data_received(request(b"/good"))
    connection.data_received(wrong)
    await turns()
    assert not beneath.sent
    connection.data_received(request(b"/late"))
    port.app.go.set()
    await turns()
    assert [path for path, _ in port.app.asked] == ["/good"]
    assert beneath.sent.startswith(b"HTTP/1.1 200") and beneath.sent.count(b"HTTP/1.1 400") == 1
    assert beneath.sent.endswith(said) and beneath.ended and not beneath.closed


async def test_heads_have_room_for_all_that_clients_send():
    pytest.importorskip("httptools")
    port = Port(http_parsers.Connection)
    connection, beneath = port.connected()
    connection.data_received(request(head=b"Host: here\r\nx: " + b"y" * (31 << 10) + b"\r\n"))
    await turns()
    connection.data_received(request(head=b"", version=b"1.0"))
    await turns()
    assert beneath.sent.count(b" 200 OK") == 2


async def test_a_body_in_pieces_may_be_larger_than_heads_may():
    pytest.importorskip("httptools")
    port = Port(http_parsers.Connection)
    connection, beneath = port.connected()
    connection.data_received(POST + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(5):
        connection.data_received(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
    assert not beneath.sent
    connection.data_received(b"1;" + b"y" * (33 << 10))
    assert b"Headers too large." in beneath.sent, "what is no part of the body is bounded"


@pytest.mark.parametrize(("number", "answered"), [(65, 65), (66, 0)])
async def test_so_many_requests_may_wait_behind_the_one_that_is_answered(number, answered):
    pytest.importorskip("httptools")
    port = Port(http_parsers.Connection)
    connection, beneath = port.connected()
    connection.data_received(b"".join(request(b"/%d" % at) for at in range(number)))
    await turns(2000)
    assert len(port.app.asked) == 65 and beneath.sent.count(b"HTTP/1.1 200") == 65
    assert beneath.sent.count(b"HTTP/1.1 400") == (number > 65)


class Asked:
    """A request of a form that was asked, and how its connection answers."""

    dropped = False

    def drop(self):
        self.dropped = True


class Form:
    """A form that leaves the answer to the test."""

    def __init__(self):
        self.sizes, self.asked = [4], []

    def rows(self, data, places):
        return [bytes(data[at : at + size]) for at, size in places]

    def ask(self, inputs, _seconds, responder, room):
        self.asked.append((inputs, responder, room))
        return Asked()


HEAD = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: here\r\nContent-Length: 10\r\n\r\n"


@pytest.fixture
async def formed():
    """A port that knows the head of a request with ten bytes of a body, four of them of a tensor, and its form."""
    pytest.importorskip("httptools")
    port = Port()
    port.form, known = Form(), port.kind.known
    known.heads[HEAD] = _Head("m", "", 10, 6)
    known.forms = SimpleNamespace(get=lambda parts: port.form if parts == b"m\0\0004\0" + b'{"a"}}' else None)
    return port


async def test_a_request_of_a_form_is_answered_as_the_form_says(formed):
    connection, beneath = formed.connected()
    for piece in (HEAD, b'{"a"}}', b"da", b"ta"):
        assert not formed.form.asked
        connection.data_received(piece)
    ((inputs, responder, _room),) = formed.form.asked
    assert inputs == [b"data"] and responder is connection and not responder.done()
    assert responder.connection is connection._client and formed.budget.held(RECEIVED) == 10
    connection.data_received(HEAD)
    assert responder.connection is None, "it has sent on"
    responder.reply([b"content-length: 3\r\n\r\n", b"yes"])
    assert beneath.sent == b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nyes" and not formed.app.asked
    assert formed.budget.held(ANSWERS) == 0
    connection.connection_lost(None)
    assert formed.budget.held(RECEIVED) == 0


@pytest.mark.parametrize("how", ["the form is stale", "there is no form", "its sizes differ", "there is no room"])
async def test_what_a_form_cannot_answer_goes_the_usual_way_once_with_what_came_behind_it(formed, how):
    connection, beneath = formed.connected()
    body = b'{"a"}}data' if how != "there is no form" else b'{"b"}}data'
    formed.form.sizes = [3] if how == "its sizes differ" else [4]
    if how == "there is no room":
        other = native.Account(formed.budget, HTTP)
        assert other.take(RECEIVED, MIB - 3) == 0
    connection.data_received(HEAD + body + request(b"/next"))
    if how == "the form is stale":
        formed.form.asked[0][1].fail(Refused("the lane is lost", Code.STALE_LEASE))
    assert not connection.done()
    await turns(60)
    assert formed.app.asked == [
        ("/v2/models/m/infer", [("http.request", body)]), ("/next", [("http.request", b"")]),
    ]  # fmt: skip
    assert beneath.sent.count(b"HTTP/1.1 200") == 2 and not connection._ahead


async def test_the_error_of_a_form_is_answered_and_the_connection_goes_on(formed):
    connection, beneath = formed.connected()
    for _ in range(2):
        connection.data_received(HEAD + b'{"a"}}data')
        formed.form.asked[-1][1].fail(Refused("too many", Code.BUSY))
    assert beneath.sent.count(b"HTTP/1.1 429") == 2
    assert beneath.sent.count(b"retry-after") == 2 and b'"code":"BUSY"' in beneath.sent and not beneath.closed


async def test_an_answer_of_a_form_for_which_there_is_no_room_is_refused(formed):
    connection, beneath = formed.connected()
    connection.data_received(HEAD + b'{"a"}}data')
    others = native.Account(formed.budget, HTTP)
    assert others.take(ANSWERS, MIB - 8) == 0
    formed.form.asked[0][1].reply([b"x" * (300 << 10)])
    assert beneath.sent.startswith(b"HTTP/1.1 429") and len(beneath.sent) < 1000 and not beneath.closed
    assert formed.budget.held(ANSWERS) == MIB - 8


async def test_a_request_of_a_form_whose_client_has_gone_is_dropped(formed):
    connection, _ = formed.connected()
    connection.data_received(HEAD + b'{"a"}}data')
    put = connection._put
    connection.connection_lost(None)
    assert put.dropped and formed.form.asked[0][1].done() and formed.budget.held(RECEIVED) == 0


def scope(length, *more):
    return {"headers": [(b"content-length", b"%d" % length), *more], "http_version": "1.1", "path": "/x"}


@pytest.mark.parametrize(
    ("head", "of_scope", "json", "known"),
    [
        (HEAD, scope(10), 6, True),
        (HEAD, scope(10, (b"connection", b"keep-alive")), 6, True),
        (HEAD, scope(10, (b"connection", b"close")), 6, False),
        (HEAD, scope(10, (b"transfer-encoding", b"gzip")), 6, False),
        (HEAD, scope(10, (b"content-length", b"10")), 6, False),
        (HEAD, {**scope(10), "http_version": "1.0"}, 6, False),
        (b"x" * MOST_HEAD, scope(10), 6, True),
        (b"x" * (MOST_HEAD + 1), scope(10), 6, False),
        (HEAD, scope(MOST_BODY), 6, True),
        (HEAD, scope(MOST_BODY + 1), 6, False),
        (HEAD, scope(2 * HEAVY), HEAVY - 1, True),
        (HEAD, scope(2 * HEAVY), HEAVY, False),
    ],
)
def test_a_head_of_tensors_is_kept_if_nothing_about_it_is_special(head, of_scope, json, known):
    heads = KnownHeads(None)
    heads.learn(head, of_scope, ("m", "3", json))
    assert heads.heads == ({head: ("m", "3", int(of_scope["headers"][0][1]), json)} if known else {})


def test_only_so_many_heads_are_kept():
    heads = KnownHeads(None)
    for number in range(MOST_HEADS + 1):
        heads.learn(b"%d" % number, scope(10), ("m", "", 6))
    assert [*heads.heads] == [b"%d" % MOST_HEADS]


@pytest.mark.parametrize(("seconds", "counted"), [(0.0, 0.0), (0.0005, 0.0005), (1.0, known_paths.TURN)])
async def test_an_answer_counts_as_the_work_that_it_took_before_the_next_request_comes(monkeypatch, seconds, counted):
    pytest.importorskip("httptools")
    clock, port, after = given(Clock(), monkeypatch, known_paths), Port(), []
    port.kind.turns = SimpleNamespace(after=lambda who, seconds, call: after.append((seconds, call)))

    async def answer(body):
        clock.now += seconds
        return HttpReply(b"<" + body + b">", "text/plain")

    port.app.answered = answer
    connection, beneath = port.connected()
    connection.data_received(request(body=b"first"))
    await turns()
    connection.data_received(request(body=b"second") + request(body=b"third"))
    await turns()
    assert len(port.app.asked) == 1 and beneath.sent.endswith(b"<second>")
    ((took, call),) = after
    assert took == pytest.approx(counted)
    call()
    await turns()
    assert beneath.sent.endswith(b"<third>") and len(port.app.asked) == 1 and len(after) == 1


async def test_a_body_behind_a_known_head_is_given_back_when_its_client_goes_before_its_end():
    pytest.importorskip("httptools")
    port = Port()

    async def answer(body):
        return HttpReply(body, "text/plain")

    port.app.answered = answer
    connection, beneath = port.connected()
    connection.data_received(request(body=b"first"))
    await turns()
    connection.data_received(request(body=bytes(1000))[:-10])
    assert connection.receiving and port.budget.held(RECEIVED) == 990 and beneath.sent.count(b" 200 OK") == 1
    connection.connection_lost(None)
    assert port.budget.held(RECEIVED) == 0 and not connection.in_progress


async def test_a_request_behind_a_known_head_that_is_cancelled_ends_its_connection():
    pytest.importorskip("httptools")
    port, began = Port(), []

    async def answer(body):
        began.append(body)
        await asyncio.get_running_loop().create_future()

    port.app.answered = answer
    connection, beneath = port.connected()
    connection.data_received(request(body=b"first"))
    await turns()
    connection.data_received(request(body=b"second"))
    await turns()
    assert began == [b"second"] and port.budget.held(RECEIVED) == 6
    (task,) = connection.tasks
    task.cancel()
    await turns()
    assert task.cancelled() and beneath.aborted and port.budget.held(RECEIVED) == 0 and not connection.tasks


@pytest.mark.parametrize("head", [HEAD, HEAD.replace(b"/v2/models/m/infer", b"/x")], ids=["of tensors", "of JSON"])
async def test_a_body_behind_a_known_head_that_goes_on_is_not_ended_as_silent(formed, monkeypatch, head):
    async def answer(body):
        return HttpReply(body, "text/plain")

    clock = given(Clock(), monkeypatch, http_connection, known_paths, http_forms)
    connection, beneath = formed.connected()
    formed.kind.paths.learn(head, scope(10), answer)
    connection.data_received(head)
    for _ in range(9):
        clock.now += SILENCE - 1.0
        connection.end_silent(clock.now)
        connection.data_received(b"x")
    assert not beneath.sent and not beneath.closed and connection.receiving
    connection.end_silent(clock.now + SILENCE)
    assert beneath.sent.startswith(b"HTTP/1.1 408") and beneath.ended


def form_key(document, size=4, version=b""):
    return b"m\0%b\0%d\0%b" % (version, size, json.dumps(document).encode())


X = {"name": "x", "shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": 4}}
Y = {"name": "y", "parameters": {"binary_data": True}}
Z = {"name": "z", "parameters": {"binary_data": False}}


@pytest.mark.parametrize(
    ("document", "size", "has_one"),
    [
        ({"inputs": [X], "outputs": [Y]}, 4, True),
        ({"inputs": [X], "parameters": {"binary_data_output": True}}, 4, True),
        ({"inputs": [X]}, 4, False),
        ({"inputs": [X], "outputs": [Z]}, 4, False),
        ({"inputs": [X], "outputs": [Y, Z]}, 4, False),
        ({"inputs": [X], "outputs": []}, 4, False),
        ({"inputs": [X], "outputs": [Y], "id": "3"}, 4, False),
        ({"inputs": [X, {"name": "k", "shape": [1], "datatype": "FP32", "data": [1]}], "outputs": [Y]}, 4, False),
        ({"inputs": [X], "outputs": [Y]}, 3, False),
        ({"inputs": [X], "outputs": [Y]}, 5, False),
        ({"inputs": 3}, 4, False),
    ],
)
def test_a_request_has_a_form_if_all_of_its_tensors_are_binary_and_it_has_no_name(document, size, has_one):
    found = _read_form(form_key(document, size, b"7"))
    assert (found is not None) == has_one
    if found is not None:
        assert (found.model, found.version, bytes(found.inputs[0].data)) == ("m", "7", bytes(4))


async def test_a_body_behind_a_known_head_for_which_there_is_no_room_goes_the_usual_way_and_holds_none():
    pytest.importorskip("httptools")
    port, bodies = Port(), []

    async def answer(body):
        bodies.append(len(body))
        return HttpReply(b"", "text/plain")

    port.app.answered = answer
    connection, beneath = port.connected()
    connection.data_received(request())
    await turns()
    others, whole = native.Account(port.budget, HTTP), request(body=bytes(300 << 10))
    assert others.take(RECEIVED, MIB - (200 << 10)) == 0
    connection.data_received(whole[: 150 << 10])
    connection.data_received(whole[150 << 10 :])
    await turns()
    assert [[len(body) for _, body in seen] for _, seen in port.app.asked] == [[0], [300 << 10]] and not bodies
    assert port.budget.held(RECEIVED) == MIB - (200 << 10) and not connection.in_progress
    others.give(RECEIVED, MIB - (200 << 10))
    connection.data_received(whole)
    await turns()
    assert bodies == [300 << 10] and beneath.sent.count(b" 200 OK") == 3


async def test_a_connection_is_between_requests_from_an_answer_to_the_first_byte_of_the_next(kind):
    port = Port(kind)
    port.app.go.clear()
    connection, _ = port.connected()
    assert connection.between and not connection.receiving and not connection.in_progress
    connection.data_received(POST)
    assert not connection.between and connection.receiving
    connection.data_received(b"Content-Length: 2\r\n\r\nx")
    await turns()
    assert not connection.between and connection.receiving and connection.in_progress
    connection.data_received(b"y")
    await turns()
    assert not connection.between and not connection.receiving and connection.in_progress
    port.app.go.set()
    await turns()
    assert connection.between and not connection.receiving and not connection.in_progress
    connection.data_received(b"GET /")
    assert not connection.between and connection.receiving and not connection.in_progress
