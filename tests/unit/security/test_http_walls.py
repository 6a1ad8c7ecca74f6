"""The walls before the HTTP application, each tried from outside."""

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from jurybox import native
from jurybox.protocol.errors import Code
from jurybox.server.security.access import Access
from jurybox.server.security.doors import Doors
from jurybox.server.security.http import BodyLimit, Doorkeeper, guarded

TOKEN = "0123456789abcdef"
MOST = 1 << 20


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


async def ill(request: Request) -> JSONResponse:
    return JSONResponse({"status": "unavailable", "reasons": ["model 'secret-project' failed"]}, 503)


async def page(request: Request) -> PlainTextResponse:
    return PlainTextResponse("page", headers={"Content-Security-Policy": "default-src 'self'"})


APP = Starlette(
    routes=[
        Route("/echo", echo, methods=["GET", "POST"]),
        Route("/health", ill),
        Route("/health/live", echo),
        Route("/page", page),
    ]
)


def client(secret=None, loopback=True):
    app = guarded(APP, Access(secret, max_message=MOST), loopback=loopback)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000")


def ask(method, path, *, secret=None, loopback=True, **request):
    async def go():
        async with client(secret, loopback) as http:
            return await http.request(method, path, **request)

    return asyncio.run(go())


def test_every_answer_carries_the_headers_refusals_too():
    for answer in (ask("GET", "/echo"), ask("GET", "/echo", secret=TOKEN), ask("GET", "/nothing")):
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; frame-ancestors 'none'")
        assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert ask("GET", "/page").headers["Content-Security-Policy"] == "default-src 'self'"  # its own policy


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "127.9.9.9:1"])
def test_this_hosts_names_are_answered(host):
    assert ask("GET", "/echo", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:1", "", "10.0.0.1", "[::", "127.0.0.1@evil"])
def test_a_name_bent_to_loopback_is_refused(host):
    assert ask("GET", "/echo", headers={"Host": host}).status_code == 421
    assert ask("GET", "/echo", headers={"Host": host}, loopback=False).status_code == 200


def test_a_foreign_page_cannot_post_in_a_users_name():
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9", "https://["):
        assert ask("POST", "/echo", headers={"Origin": origin}).status_code == 403
    assert ask("POST", "/echo", headers={"Origin": "http://127.0.0.1:8000"}).status_code == 200
    assert ask("POST", "/echo").status_code == 200  # no browser


def test_without_the_token_nothing_is_answered_but_health():
    for shown in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic eDp5"}):
        refused = ask("GET", "/echo", secret=TOKEN, headers=shown)
        assert refused.status_code == 401
        assert refused.json()["code"] == "UNAUTHENTICATED"
        assert refused.headers.get_list("www-authenticate")[0] == "Bearer"
    assert ask("GET", "/echo", secret=TOKEN, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert ask("GET", "/health/live", secret=TOKEN).status_code == 200
    assert ask("POST", "/health/live", secret=TOKEN).status_code == 401


def test_health_without_the_token_has_no_reasons():
    answer = ask("GET", "/health", secret=TOKEN)
    assert (answer.status_code, answer.json()["reasons"]) == (503, [])
    answer = ask("GET", "/health", secret=TOKEN, headers={"Authorization": f"Bearer {TOKEN}"})
    assert "secret-project" in answer.json()["reasons"][0]


def test_a_body_beyond_the_limit_is_refused_whatever_it_claims():
    assert ask("POST", "/echo", content=b"x" * MOST).text == str(MOST)
    assert ask("POST", "/echo", content=b"x" * (MOST + 1)).status_code == 413

    async def chunks():
        for _ in range(40):
            yield b"x" * (64 << 10)

    assert ask("POST", "/echo", content=chunks()).status_code == 413  # chunked: no length is claimed


def test_a_lying_length_changes_nothing():
    async def go():
        sent, parts = [], [b"x" * MOST, b"x"]

        async def receive():
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/echo", "raw_path": b"/echo", "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-length", b"10")], "http_version": "1.1", "scheme": "http",
            "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2), "root_path": "",
        }  # fmt: skip
        await guarded(APP, Access(max_message=MOST), loopback=True)(scope, receive, send)
        return [message["status"] for message in sent if message["type"] == "http.response.start"]

    assert asyncio.run(go()) == [413]


def pickled(error):
    return 503 if error.code == Code.BUSY else 413, [("Content-Type", "x/y"), ("Retry-After", "2")], b"as its clients"


def test_a_path_with_refusals_of_its_own_gets_them_for_bodies_that_are_refused():
    async def go(path, *contents):
        budget = native.Budget((1000, 1000, 9), (1000, 1000, 9))
        app = guarded(APP, Access(max_message=MOST), loopback=True, budget=budget, refusals={"/echo": pickled})
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as http:
            return [await http.post(path, content=content) for content in contents]

    async def pieces():
        for _ in range(17):
            yield b"x" * (64 << 10)

    large, endless, busy, small = asyncio.run(go("/echo", b"x" * (MOST + 1), pieces(), b"x" * 1001, b"x" * 1000))
    assert [answer.status_code for answer in (large, endless, busy, small)] == [413, 503, 503, 200]
    for answer in (large, busy):
        assert (answer.headers["content-type"], answer.content) == ("x/y", b"as its clients")
        assert answer.headers["retry-after"] == "2" and answer.headers["x-content-type-options"] == "nosniff"
    assert [answer.json()["code"] for answer in asyncio.run(go("/nothing", b"x" * (MOST + 1)))] == ["TOO_LARGE"]


@pytest.mark.parametrize(
    ("version", "headers", "status"),
    [("1.0", [], 200), ("1.0", [(b"accept", b"*/*")], 200), ("1.1", [], 421), ("1.0", [(b"host", b"")], 421)],
)
async def test_a_load_balancers_probe_of_http_1_0_needs_no_host(version, headers, status):
    sent = []
    scope = {
        "type": "http", "method": "GET", "path": "/echo", "raw_path": b"/echo", "query_string": b"",
        "root_path": "", "scheme": "http", "http_version": version, "headers": headers,
    }  # fmt: skip

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(told):
        sent.append(told)

    await guarded(APP, Access(None, max_message=MOST), loopback=True)(scope, receive, send)
    assert sent[0]["status"] == status


@pytest.mark.parametrize(
    ("closed", "begun", "status"), [(True, False, 503), (True, True, None), (False, False, None), (False, True, None)]
)
async def test_a_request_that_a_stop_ends_is_refused_unless_its_answer_has_begun(closed, begun, status):
    doors, sent = Doors(), []

    async def app(scope, receive, send):
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        if closed:
            doors.close()
        raise asyncio.CancelledError

    async def send(message):
        sent.append(message.get("status"))

    asked = Doorkeeper(app, doors, {})({"type": "http", "method": "POST", "path": "/echo"}, None, send)
    if status is None:
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert sent == [200] * begun
    else:
        await asked
        assert sent[0] == status


@pytest.mark.parametrize("claimed", [b"\xb2", b"-1", b"1e3", b"x", b"", b" 7"])
async def test_a_length_that_is_no_number_is_left_to_the_parser(claimed):
    answered = []

    async def app(scope, receive, send):
        answered.append((await receive())["type"])

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/echo", "headers": [(b"content-length", claimed)]}
    await BodyLimit(app, MOST, Access(max_message=MOST).budget(), {})(scope, receive, None)
    assert answered == ["http.request"]
