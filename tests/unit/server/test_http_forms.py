"""A connection whose request has a known head, while its body arrives."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
import uvicorn
from tests.wires import Wire
from uvicorn.server import ServerState

from jurybox import native
from jurybox.protocol.errors import Code, Refused
from jurybox.server.gateway.inference.forms import Form, Forms, Output
from jurybox.server.gateway.inference.http_forms import _Head, _written_heads, connection_of
from jurybox.server.security.limits import HTTP, RECEIVED

pytest.importorskip("httptools")
HEAD = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 418, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def budget():
    return native.Budget((600, 600, 9), (600, 600, 9))


@pytest.fixture
async def line(budget):
    config = uvicorn.Config(app, log_config=None, lifespan="off")
    config.load()
    kind = connection_of(None, 1 << 20)
    kind.budget = budget
    kind.known.heads[HEAD] = _Head("m", "", 1000, 10)

    def connect():
        made = kind(config=config, server_state=ServerState(), app_state={})
        made.connection_made(Wire(peer=("127.0.0.1", 1)))
        return made

    return connect


async def test_a_body_reserves_only_the_bytes_that_have_arrived(budget, line):
    many = [line() for _ in range(50)]
    for one in many:
        one.data_received(HEAD + b"x" * 10)
    other = native.Account(budget, HTTP)
    assert other.take(RECEIVED, 100) == 0 and other.take(RECEIVED, 1) == 2
    for one in many:
        one.connection_lost(None)
    assert other.take(RECEIVED, 500) == 0


async def test_a_request_with_a_known_head_is_being_received_until_all_of_it_is_here(line):
    one = line()
    assert not one.receiving and not one.in_progress
    one.data_received(HEAD + b"x" * 999)
    assert one.receiving and one.in_progress
    one.data_received(b"x")
    assert not one.receiving
    one.connection_lost(None)


async def test_a_body_for_which_there_is_no_room_goes_the_usual_way_and_holds_none(budget, line):
    one = line()
    one.data_received(HEAD + b"x" * 500)
    one.data_received(b"x" * 200)
    assert native.Account(budget, HTTP).take(RECEIVED, 600) == 0
    await asyncio.sleep(0.05)
    assert one.transport.sent.startswith(b"HTTP/1.1 418")
    one.connection_lost(None)


def test_requests_that_are_never_the_same_do_not_fill_the_memory_with_their_forms():
    forms = Forms(None, lambda parts: None, None)
    for number in range(3000):
        assert forms.get(b"%d" % number) is None and len(forms._forms) <= 1024


def test_a_request_whose_answer_has_no_room_fails_before_it_is_computed():
    form, failed, full = Form.__new__(Form), [], Refused("no room", Code.BUSY)
    form._answer_bytes, form.used = 100, 0

    def take(size):
        assert size == 100
        raise full

    room = SimpleNamespace(take=take, give=lambda: None)
    answer = form.ask({}, None, SimpleNamespace(fail=failed.append), room)
    assert (answer.given, failed, form.used) == (True, [full], 0)


def test_the_first_of_several_outputs_has_the_head_of_all():
    outputs = [Output("y", "FP32", (1, 2), None), Output("z", "UINT8", (1, 3), None)]
    first, *others = _written_heads("m", "3", outputs, [8, 3], {"a": 1})
    assert others == [b""]
    head, _, text = first.partition(b"\r\n\r\n")
    assert json.loads(text) == {
        "model_name": "m",
        "model_version": "3",
        "parameters": {"a": 1},
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
            {"name": "z", "datatype": "UINT8", "shape": [1, 3], "parameters": {"binary_data_size": 3}},
        ],
    }
    lines = head.decode().split("\r\n")
    assert f"content-length: {len(text) + 11}" in lines
    assert f"inference-header-content-length: {len(text)}" in lines
