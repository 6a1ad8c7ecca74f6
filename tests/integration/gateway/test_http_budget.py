"""What HTTP connections may make the gateway hold: each test is an attack beside a client that behaves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import statistics
import threading
import time
import weakref

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tests.serving import connection_of_h11, wait_until

from jurybox.server.gateway import http_connection
from jurybox.server.gateway.http_parsers import MOST_HEADERS
from jurybox.server.gateway.http_server import HttpServer
from jurybox.server.security import limits
from jurybox.server.security.access import Access
from jurybox.server.security.limits import ANSWERS, HTTP, HTTP_CONNECTIONS, RECEIVED, Watch

MIB = 1 << 20
DONE = threading.Event()  # the slow answers are computed


async def large(request: Request) -> Response:
    return Response(bytes(int(request.query_params["n"])))


async def slow(_request: Request) -> Response:
    with limits.room_for_answer(3 * MIB + MIB // 4):
        while not DONE.is_set():  # noqa: ASYNC110  another thread sets it
            await asyncio.sleep(0.01)
    return Response("computed")


async def echo(request: Request) -> Response:
    return Response(await request.body())


class Served:
    """An HTTP server in a thread of its own."""

    def __init__(self, protocol):
        access = Access(max_message=MIB)
        self.budget = access.budget()
        app = Starlette(routes=[Route("/large", large), Route("/slow", slow), Route("/echo", echo, methods=["POST"])])
        self.server = HttpServer("127.0.0.1:0", app, access, protocol=protocol, budget=self.budget)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        self.watch = Watch(self.budget, [self.server.connections])

    def _serve(self):
        self.loop.run_until_complete(self.server.run())

    def check(self, later):
        async def check():
            self.watch.check(time.monotonic() + later)

        asyncio.run_coroutine_threadsafe(check(), self.loop).result(20)

    def connected(self):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", self.server.port))
        return connection

    def close(self):
        self.loop.call_soon_threadsafe(self.server.stop)
        self.thread.join(30)


@pytest.fixture(scope="module", params=["httptools", "h11"])
def protocol(request):
    return connection_of_h11() if request.param == "h11" else None


@pytest.fixture(scope="module")
def served(protocol):
    served = Served(protocol)
    yield served
    served.close()


@pytest.fixture
def client(served):
    """A client that behaves: it is answered before, during and after the attack."""
    with httpx.Client(base_url=f"http://127.0.0.1:{served.server.port}", timeout=20) as client:
        assert client.post("/echo", content=b"before").content == b"before"
        yield client
        assert client.post("/echo", content=b"after").content == b"after"
    wait_until(lambda: [served.budget.held(kind) for kind in (RECEIVED, ANSWERS)] == [0, 0], 20, "all is returned")


def asked(path, size=0, method="GET"):
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode()


def test_answers_that_nobody_reads_are_refused_beyond_the_budget(served, client):
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(contextlib.closing(served.connected()))
            connection.sendall(asked("/large?n=6000000") * 3)
        wait_until(
            lambda: sum(served.budget.refused(ANSWERS, reason, HTTP) for reason in (1, 2)) >= 10,
            20,
            "answers are refused",
        )
        assert served.budget.held(ANSWERS) <= 8 * MIB + 20 * (64 << 10)
        refused = client.get("/large?n=6000000")
        assert (refused.status_code, refused.json()["code"], refused.headers["retry-after"]) == (429, "BUSY", "2")
        assert client.post("/echo", content=bytes(60_000)).content == bytes(60_000)
    wait_until(lambda: served.budget.held(ANSWERS) == 0, 20, "what is left is dropped")
    assert len(client.get("/large?n=6000000").content) == 6_000_000


def test_a_connection_that_ends_is_freed_with_all_its_requests_and_not_by_the_collector(served, client):
    DONE.clear()
    gc.disable()
    try:
        earlier = set(served.server.connections())
        with contextlib.closing(served.connected()) as connection:
            connection.sendall(asked("/slow") + asked("/large?n=3") * 20)
            wait_until(lambda: served.budget.held(ANSWERS) > 3 * MIB, 20, "the first is being answered")
            (one,) = set(served.server.connections()) - earlier
            requests = [weakref.ref(cycle) for cycle in getattr(one, "_cycles", (one.cycle,))]
            freed = [weakref.ref(one), *requests]
            assert len(requests) in (1, 21)  # h11 parses one at a time
            del one
        DONE.set()
        wait_until(lambda: not any(ref() for ref in freed), 20, "nothing is left of it")
    finally:
        DONE.set()
        gc.enable()


def test_a_reader_that_leaves_no_room_for_others_is_ended(served, client):
    with contextlib.closing(served.connected()) as connection:
        connection.sendall(asked("/large?n=16000000"))
        wait_until(lambda: served.budget.held(ANSWERS) > 6 * MIB, 20, "it owes much")
        for later in (0, limits.UNREAD / 2):
            served.check(later)
        assert served.budget.held(ANSWERS) > 6 * MIB
        served.check(limits.UNREAD + 1)
        wait_until(lambda: served.budget.held(ANSWERS) == 0, 20, "it is ended")


def test_answers_that_take_long_to_compute_end_no_connection(served, client):
    DONE.clear()
    with contextlib.ExitStack() as stack:
        asking = [stack.enter_context(contextlib.closing(served.connected())) for _ in range(2)]
        for connection in asking:
            connection.sendall(asked("/slow"))
        wait_until(lambda: served.budget.held(ANSWERS) > 6 * MIB, 20, "there is no room for others")
        for later in (0, limits.UNREAD + 1, 2 * limits.UNREAD + 2):
            served.check(later)
        assert sum(one.account.held(ANSWERS) > 3 * MIB for one in served.server.connections()) == 2  # each its own
        DONE.set()
        for connection in asking:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_slow_reader_that_is_in_nobodys_way_is_not_ended(served, client):
    with contextlib.closing(served.connected()) as connection:
        connection.sendall(asked("/large?n=5000000"))
        wait_until(lambda: served.budget.held(ANSWERS) > MIB // 2, 20, "it owes something")
        for later in (0, limits.UNREAD * 2, limits.UNREAD * 4):
            served.check(later)
        received = 0
        while received < 5_000_000:
            received += len(connection.recv(1 << 20))


@pytest.mark.parametrize("part", [b"POST /ec", b"POST /echo HTTP/1.1\r\nHost: lo", asked("/echo", 9, "POST") + b"1234"])
def test_a_request_that_does_not_go_on_is_ended(served, client, part):
    with contextlib.closing(served.connected()) as connection:
        connection.sendall(part)
        wait_until(lambda: any(one.receiving for one in served.server.connections()), 20, "it has begun")
        served.check(limits.SILENCE - 5)
        assert any(one.receiving for one in served.server.connections())
        served.check(limits.SILENCE + 1)
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
        assert connection.recv(100) == b"" or connection.recv(100) == b""


def test_idle_connections_make_room_for_a_client(served, monkeypatch):
    monkeypatch.setattr(http_connection, "HTTP_CONNECTIONS", 8)
    monkeypatch.setattr(http_connection, "_LULL", 0.0)
    with contextlib.ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(contextlib.closing(served.connected()))
        with httpx.Client(base_url=f"http://127.0.0.1:{served.server.port}", timeout=20) as client:
            assert client.post("/echo", content=b"x").content == b"x"
        assert len(tuple(served.server.connections())) <= 8


def test_hundreds_of_connections_that_say_nothing_let_a_client_in_and_cost_nothing_afterwards(served, client):
    """Also if all of them came just now."""
    before = len(tuple(served.server.connections()))
    with contextlib.ExitStack() as stack:
        for _ in range(HTTP_CONNECTIONS + 90):
            stack.enter_context(contextlib.closing(served.connected()))
        with httpx.Client(base_url=f"http://127.0.0.1:{served.server.port}", timeout=20) as another:
            assert another.post("/echo", content=b"x").content == b"x"
        wait_until(lambda: len(tuple(served.server.connections())) <= HTTP_CONNECTIONS, 20, "the end of those too many")
    wait_until(lambda: len(tuple(served.server.connections())) <= before + 1, 20, "the end of all")
    assert client.post("/echo", content=b"x").content == b"x"


def test_a_connection_beyond_those_in_use_is_told_so(served, monkeypatch):
    monkeypatch.setattr(http_connection, "HTTP_CONNECTIONS", 8)
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(contextlib.closing(served.connected())).sendall(b"POST /echo HT")
        wait_until(lambda: sum(one.receiving for one in served.server.connections()) == 8, 20, "their bytes")
        peer, came = stack.enter_context(contextlib.closing(served.connected())), b""
        peer.settimeout(20)
        while part := peer.recv(1000):
            came += part
        assert came.startswith(b"HTTP/1.1 503 ") and b"connections are open and in use" in came
        assert b"\r\nretry-after: 2\r\n" in came


def test_requests_that_are_none_write_one_line_a_second_to_the_log(served, client, caplog):
    def lines():
        return [record for record in caplog.records if "Invalid HTTP request" in record.getMessage()]

    began, sent = time.monotonic(), 0
    while sent < 200 or (not lines() and time.monotonic() < began + 20):  # a test before may have had this second's
        with contextlib.closing(served.connected()) as connection:
            connection.sendall(b"no request\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
        sent += 1
    assert 1 <= len(lines()) <= 2 + time.monotonic() - began


def test_many_connections_that_pipeline_leave_half_of_the_time_to_one_that_waits_for_its_answers(protocol):
    """All in one event loop, so that what is counted are turns and not seconds."""
    others, asks = 60, 40
    done, between = [0], []

    async def count(_request: Request) -> Response:
        done[0] += 1
        return Response("x")

    async def flood(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while True:
            writer.write(asked("/count") * 20)
            for _ in range(20):
                await reader.readuntil(b"\r\n\r\nx")

    async def behave(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(asks):
            before = done[0]
            writer.write(asked("/mine"))
            await reader.readuntil(b"\r\n\r\nx")
            between.append(done[0] - before)
        writer.close()

    async def run():
        app = Starlette(routes=[Route("/count", count), Route("/mine", lambda _: Response("x"))])
        server = HttpServer("127.0.0.1:0", app, Access(max_message=MIB), protocol=protocol)
        serving = asyncio.create_task(server.run())
        floods = [asyncio.create_task(flood(server.port)) for _ in range(others)]
        while done[0] < 10 * others:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.wait_for(behave(server.port), 60)
        for one in floods:
            one.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
        server.stop()
        await serving

    asyncio.run(run())
    assert statistics.median(between) < others / 3, between


@pytest.mark.parametrize("behind", [b"\x00no request\r\n\r\n", asked("/echo", 5, "POST")[:-4] + b"\r\nHost: x\r\n\r\n"])
def test_requests_before_what_is_no_request_are_answered_first(served, client, behind):
    DONE.clear()
    with contextlib.closing(served.connected()) as connection:
        connection.sendall(asked("/slow") + asked("/large?n=3") + behind)
        wait_until(lambda: served.budget.held(ANSWERS) > 3 * MIB, 20, "the first is being answered")
        DONE.set()
        received = b""
        while part := connection.recv(1000):
            received += part
    assert received.count(b"HTTP/1.1 200 ") == 2
    first, _, rest = received.partition(b"computed")
    assert b" 400 " not in first and rest.count(b"HTTP/1.1 400 ") == 1
    assert rest.index(b"\r\n\r\n\0\0\0") < rest.index(b"HTTP/1.1 400 ")


@contextlib.asynccontextmanager
async def serving(protocol=None):
    """A server in this loop, which has stopped at the end."""
    app = Starlette(routes=[Route("/", lambda _: Response("x"))])
    server = HttpServer("127.0.0.1:0", app, Access(max_message=MIB), protocol=protocol)
    running = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        server.stop()
        assert await asyncio.wait_for(running, 60)


async def test_a_client_between_two_requests_is_told_when_the_server_stops(protocol):
    async with serving(protocol) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(asked("/"))
        await reader.readuntil(b"\r\n\r\nx")
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


@pytest.mark.parametrize(("more", "status"), [(0, b"200"), (1, b"400")])
async def test_a_head_may_have_as_many_bytes_as_the_limit_and_no_more(more, status):
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        fields = b"Host: localhost\r\nX: \r\n"
        length = MOST_HEADERS - len(b"/") - len(fields) + more
        head = b"GET / HTTP/1.1\r\n" + fields.replace(b"X: ", b"X: " + b"v" * length) + b"\r\n"
        writer.write(head[:-100])  # below the limit of what is no complete head yet
        writer.write(head[-100:])
        assert (await reader.readline()).split()[1] == status
        writer.close()
