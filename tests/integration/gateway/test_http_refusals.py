"""A refusal arrives as an answer even if its client is still sending: a close with unread bytes would reset it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import shutil
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tests.serving import connection_of_h11, wait_until, walls

from jurybox import native
from jurybox.server.gateway import http_connection
from jurybox.server.gateway.http_server import HttpServer
from jurybox.server.gateway.process import _loop
from jurybox.server.security import limits
from jurybox.server.security.access import Access
from jurybox.server.security.doors import Doors
from jurybox.server.security.limits import Watch

MIB = 1 << 20
MOST = 2 * MIB  # bytes of a body
LARGE = 24 * MIB  # more than the kernel buffers between a client and the server


async def slow_echo(request: Request) -> Response:
    body = await request.body()
    await asyncio.sleep(0.05)
    return Response(f"{len(body)}")


async def deaf(_request: Request) -> Response:
    return Response("read nothing", headers={"Connection": "close"})


def pickled(error):
    return 503, [("Content-Type", "x/y"), ("Retry-After", "2")], f"of its own: {error}".encode()


class Served:
    """An HTTP server in a thread of its own, over TLS if there is a folder for its certificate."""

    def __init__(self, protocol, loop, folder, secret=None):
        self.verify, files = None, {}
        if folder is not None:
            files = {key: value for key, value in walls(folder, "-").items() if key.startswith("tls")}
            self.verify = ssl.create_default_context(cafile=folder / "cert.pem")
        self.budget = native.Budget((MOST, MOST, 9), (3 * MOST, 3 * MOST, 99))
        self.doors = Doors()
        routes = [Route("/echo", slow_echo, methods=["POST"]), Route("/own", slow_echo, methods=["POST"])]
        app = Starlette(routes=[*routes, Route("/deaf", deaf, methods=["POST"])])
        access = Access(secret=secret, max_message=MOST, **files)
        self.server = HttpServer(
            "127.0.0.1:0",
            app,
            access,
            protocol=protocol,
            budget=self.budget,
            refusals={"/own": pickled},
            doors=self.doors,
        )
        self.loop = loop
        self.thread = threading.Thread(target=lambda: self.loop.run_until_complete(self.server.run()), daemon=True)
        self.thread.start()
        self.watch = Watch(self.budget, [self.server.connections])

    def call(self, function, *arguments):
        async def called():
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result(20)

    def connected(self):
        connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=30)
        if self.verify is not None:
            connection = self.verify.wrap_socket(connection, server_hostname="localhost")
        return contextlib.closing(connection)

    def close(self):
        self.loop.call_soon_threadsafe(self.server.stop)
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture(params=["http", "https", "http asyncio", "https asyncio", "http h11", "https h11"])
def ways(request, tmp_path):
    """The arguments of `Served`: what the gateway uses, and what it has where uvloop or httptools are missing."""
    protocol, _, other = request.param.partition(" ")
    if protocol == "https" and shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    loop = asyncio.new_event_loop() if other == "asyncio" else _loop()
    return connection_of_h11() if other == "h11" else None, loop, tmp_path if protocol == "https" else None


@pytest.fixture
def served(ways):
    served = Served(*ways)
    yield served
    wait_until(lambda: served.budget.held(limits.RECEIVED) == 0, 20, "all is returned")
    served.close()


def head(path="/echo", size=LARGE, **headers):
    fields = {"Host": "localhost", "Content-Length": str(size), **headers}
    return "".join([f"POST {path} HTTP/1.1\r\n", *(f"{name}: {value}\r\n" for name, value in fields.items()), "\r\n"])


def answer_to(served, begins, *parts):
    """Send everything, and only then read, as most clients do; return the status, the headers and the text."""
    with served.connected() as connection:
        connection.sendall(begins.encode())
        for part in parts:
            connection.sendall(part)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.headers, answer.read().decode()


def chunks(size, piece=MIB):
    return (b"%x\r\n%b\r\n" % (piece, bytes(piece)) for _ in range(size // piece))


CHUNKED = head().replace(f"Content-Length: {LARGE}", "Transfer-Encoding: chunked")


@pytest.mark.parametrize(
    ("status", "begins", "parts", "says"),
    [
        (413, head(), [bytes(LARGE)], "may have at most 2097152 bytes"),
        (413, CHUNKED, [*chunks(LARGE), b"0\r\n\r\n"], "may have at most 2097152 bytes"),
        (400, CHUNKED, [b"no size\r\n", bytes(4 * MIB)], ""),
        (400, head(Host="localhost\r\nHost: another"), [bytes(4 * MIB)], ""),
        (421, head(Host="another.example"), [bytes(LARGE)], "is not this server"),
        (403, head(Origin="http://another.example"), [bytes(LARGE)], "may not send requests"),
        (200, head("/deaf", MOST), [bytes(MOST)], "read nothing"),
        (404, head("/nothing", MOST, Connection="close"), [bytes(MOST)], "Not Found"),
    ],
    ids=["length", "chunked", "chunk", "hosts", "host", "origin", "deaf", "path"],
)
def test_who_sends_all_before_reading_gets_the_refusal(served, status, begins, parts, says):
    found, _, text = answer_to(served, begins, *parts)
    assert found == status and says in text, text[:500]


def test_without_the_token_a_large_body_gets_its_refusal(ways):
    served = Served(*ways, secret="s3cret-s3cret")
    try:
        found, _, text = answer_to(served, head(), bytes(LARGE))
        assert found == 401 and "Authorization: Bearer TOKEN" in text
    finally:
        served.close()


@pytest.mark.parametrize("path", ["/echo", "/own"])
def test_bodies_that_have_no_room_together_are_answered_or_refused(served, path):
    with ThreadPoolExecutor(24) as crowd:
        asked = [crowd.submit(answer_to, served, head(path, MOST, Connection="close"), bytes(MOST)) for _ in range(24)]
        found = [each.result(60) for each in asked]
    refused = [each for each in found if each[0] != 200]
    assert 0 < len(refused) < 24, "some have room, and some have none"
    for status, headers, text in refused:
        assert (status, headers["retry-after"]) == (429 if path == "/echo" else 503, "2")
        assert "ask again later" in text


@pytest.mark.parametrize("path", ["/echo", "/own"])
def test_a_body_that_comes_after_the_doors_have_closed_gets_its_refusal(served, path):
    served.call(served.doors.close)
    status, headers, text = answer_to(served, head(path, MOST), bytes(MOST))
    assert (status, headers["retry-after"]) == (503, "2") and "the server is stopping" in text


def test_a_connection_too_many_gets_a_refusal(ways, monkeypatch):
    monkeypatch.setattr(http_connection, "HTTP_CONNECTIONS", 1)
    served = Served(*ways)
    try:
        with served.connected() as first:
            first.sendall(head("/echo", MOST).encode() + b"x")  # in the middle of its request, so that it makes no room
            wait_until(lambda: any(one.receiving for one in served.server.connections()), 20, "it has begun")
            status, _, _ = answer_to(served, head("/echo", MOST), bytes(MOST))
            assert status == 503
    finally:
        served.close()


def test_a_client_that_never_ends_sending_is_ended(served):
    def lingers():
        return [one for one in served.server.connections() if one.in_progress]

    with served.connected() as endless, served.connected() as silent:
        for connection in (endless, silent):
            connection.sendall(head(size=10**18).encode())
            assert b" 413 " in connection.recv(100)
        wait_until(lambda: len(lingers()) == 2, 20, "both are waited for")
        served.call(served.watch.check, time.monotonic() + http_connection.PAUSE / 2)
        assert len(lingers()) == 2
        endless.sendall(bytes(MIB))
        served.call(served.watch.check, time.monotonic() + http_connection.LINGER + 1)
        wait_until(lambda: not served.server.connections(), 20, "they are ended")
