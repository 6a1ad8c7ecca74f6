"""Requests of HTTP that do not wait for answers: their order, whose turn it is, and what is refused in which form."""

from __future__ import annotations

import pytest
from tests.loops import turns
from tests.paces import NotedTurns
from tests.unit.server.test_http_connections import clock, connect  # noqa: F401  fixtures
from tests.unit.server.test_http_pipelines import MIB, Port, kind, request  # noqa: F401  `kind` is a fixture

from jurybox import native
from jurybox.server.gateway.inference.http_forms import connection_of
from jurybox.server.gateway.inference.http_inference import Tensors
from jurybox.server.gateway.known_paths import HttpReply, to_json
from jurybox.server.security.http import ACCEPTED
from jurybox.server.security.limits import ANSWERS, HTTP


async def test_a_request_that_was_sent_before_an_answer_waits_for_its_turn_and_others_do_not(kind):  # noqa: F811
    port, noting = Port(kind), NotedTurns()
    port.kind.turns = noting
    connection, beneath = port.connected()
    for _ in range(2):
        connection.data_received(request())
        await turns()
    assert not noting.waits
    connection.data_received(request() + request())
    await turns()
    assert [who for who, _ in noting.waits] == [connection] and beneath.sent.count(b" 200 OK") == 4
    connection.data_received(request())
    await turns()
    assert [who for who, _ in noting.waits] == [connection]


def refuse(error):
    return 507, [("Content-Type", "text/x-form"), ("X-Why", "room")], str(error).encode()


async def learnt(answer):
    """A port, a connection to it and its transport: `answer` answers the bodies of requests to /x from now on."""
    port = Port(connection_of(None, MIB, {"/x": refuse}))
    port.app.answered = answer
    connection, beneath = port.connected()
    connection.data_received(request())
    await turns()
    assert beneath.sent.endswith(b"ok") and len(port.app.asked) == 1
    beneath.sent = b""
    return port, connection, beneath


async def test_a_request_with_a_known_head_is_not_answered_before_those_that_came_before_it():
    async def answer(body):
        return HttpReply(b"<" + body + b">", "text/plain")

    port, connection, beneath = await learnt(answer)
    port.app.go.clear()
    connection.data_received(request(b"/other", b"1"))
    await turns()
    connection.data_received(request(b"/x", b"2"))
    await turns()
    assert not beneath.sent
    port.app.go.set()
    await turns()
    first, second = beneath.sent.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert first.endswith(b"ok") and second.endswith((b"ok", b"<2>"))
    beneath.sent = b""
    connection.data_received(request(b"/x", b"3"))
    await turns()
    assert beneath.sent.endswith(b"<3>")


async def test_an_answer_for_which_there_is_no_room_is_refused_in_the_form_of_its_path():
    async def answer(_body):
        return HttpReply(bytes(1000), "text/plain")

    port, connection, beneath = await learnt(answer)
    others = native.Account(port.budget, HTTP)
    assert not others.take(ANSWERS, MIB - 8)
    connection.data_received(request(b"/x", b"2"))
    await turns()
    head, _, body = beneath.sent.partition(b"\r\n\r\n")
    fields = head.lower().split(b"\r\n")
    assert b" 507 " in fields[0] and {b"content-type: text/x-form", b"x-why: room", b"connection: close"} <= {*fields}
    assert b"ask again later" in body and beneath.closed


async def test_what_its_answer_leaves_to_the_layers_is_accepted_there_and_what_comes_anew_is_not():
    """Doors that have closed meanwhile refuse only what has not been accepted before."""

    async def leave(_body):
        return None

    port, connection, beneath = await learnt(leave)
    accepted, application = [], port.app

    async def noting(scope, receive, send):
        accepted.append((scope["path"], scope.get(ACCEPTED)))
        await application(scope, receive, send)

    connection.app = noting
    connection.data_received(request(b"/x", b"1"))
    await turns()
    connection.data_received(request(b"/y", b"2"))
    await turns()
    assert accepted == [("/x", True), ("/y", None)] and beneath.sent.count(b" 200 OK") == 2


async def test_what_waits_for_its_turn_is_not_asked_once_its_connection_is_closing():
    asked = []

    async def answer(body):
        asked.append(body)
        return HttpReply(b"", "text/plain")

    _, connection, beneath = await learnt(answer)
    later = []
    connection.turns.after = lambda _who, _seconds, call: later.append(call)
    connection.data_received(request(b"/x", b"1") + request(b"/x", b"2"))
    await turns()
    assert asked == [b"1"] and len(later) == 1
    beneath.close()
    later.pop()()
    await turns()
    assert asked == [b"1"]


def test_of_several_idle_connections_the_one_that_was_quiet_for_longest_makes_room(connect, clock):  # noqa: F811
    made = [connect(b"GET") for _ in range(3)]
    for i in (2, 0, 1):
        clock.now += 2.0
        made[i][0].data_received(b"GET")
    clock.now += 2.0
    _, beneath = connect()
    assert [one.aborted for _, one in made] == [False, False, True] and not beneath.sent


async def test_the_heads_of_requests_with_binary_tensors_are_kept_beside_each_other():
    port = Port(connection_of(None, MIB))
    port.app.answered = Tensors("m", "", 0)
    connection, _ = port.connected()
    for size in (1, 2, 3):
        connection.data_received(request(body=bytes(size)))
        await turns()
    assert [(known.model, known.length) for known in port.kind.known.heads.values()] == [("m", 1), ("m", 2), ("m", 3)]
    assert not port.kind.paths.heads, "they have more than a path"


@pytest.mark.parametrize(
    ("document", "written"),
    [("\u00e9", b'"\xc3\xa9"'), ("\ud800", b'"\\ud800"'), ({"a": [1, None]}, b'{"a":[1,null]}')],
)
def test_json_is_written_in_utf8_without_spaces(document, written):
    assert to_json(document) == written


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_json_has_no_number_for_is_not_written(number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json({"a": number})
