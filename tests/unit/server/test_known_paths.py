"""A dialect's requests with a known head: answered like the first, with the same access checks and limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest
import uvicorn
from uvicorn.server import ServerState

from jurybox import native
from jurybox.server.gateway.dialects.router import DialectPaths
from jurybox.server.gateway.inference.http_forms import connection_of
from jurybox.server.gateway.known_paths import Endpoint, HttpReply, KnownPaths
from jurybox.server.security.access import Access
from jurybox.server.security.http import guarded
from jurybox.server.security.limits import ANSWERS, HTTP, RECEIVED
from jurybox.server.security.pace import Turns

MOST = 1 << 20
HEAD = "POST /dialects/x HTTP/1.1\r\nHost: localhost\r\n"


def request(body: bytes, more: str = "", head: str = HEAD) -> bytes:
    return f"{head}{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Gateway:
    """One port with one dialect that returns the body, in the event loop of the client."""

    def __init__(self) -> None:
        self.by_layers = 0  # requests that went through them
        self.bodies: list[bytes] = []
        self.go = asyncio.Event()
        self.go.set()
        self.budget = native.Budget((4 * MOST, 4 * MOST, 9), (4 * MOST, 4 * MOST, 9))
        self.paths: KnownPaths | None = None
        self.state = ServerState()
        self.more: tuple[tuple[str, str], ...] = ()
        self.others: dict[str, Endpoint] = {}

    @property
    def held(self) -> int:
        return self.budget.held(RECEIVED)

    async def echo(self, body: bytes) -> HttpReply:
        self.bodies.append(body)
        await self.go.wait()
        told = b"<" + body[:100] + b">" if body != b"much" else b"m" * (32 << 20)
        return HttpReply(told, "text/x-echo", 418 if body == b"bad" else 200, 7, self.more)

    async def app(self, scope, receive, send) -> None:
        self.by_layers += 1
        await DialectPaths(self.nowhere, {"/dialects/x": self.echo, **self.others})(scope, receive, send)

    async def nowhere(self, _scope, receive, send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    @contextlib.asynccontextmanager
    async def listening(self):
        access = Access(max_message=MOST)
        shared = {"budget": self.budget, "turns": Turns()}
        protocol = type("Port", (connection_of(None, MOST),), shared)
        self.paths = protocol.paths
        config = uvicorn.Config(
            guarded(self.app, access, loopback=True, budget=self.budget), http=protocol, lifespan="off",
            log_config=None, access_log=False, limit_concurrency=50, timeout_keep_alive=60,
        )  # fmt: skip
        config.load()
        self.state.default_headers = [(b"date", b"now")]
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: protocol(config=config, server_state=self.state, app_state={}, _loop=loop), "127.0.0.1", 0
        )
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()


class Web:
    """One connection."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def __aenter__(self) -> Web:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.gateway.port)
        self.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0.01)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        line = await asyncio.wait_for(self.reader.readline(), 20)
        headers = {}
        while (field := (await asyncio.wait_for(self.reader.readline(), 20)).decode().strip()) != "":
            name, _, value = field.partition(": ")
            assert name not in headers
            headers[name] = value
        length = int(headers.get("content-length", 0))
        return int(line.split()[1]), headers, await asyncio.wait_for(self.reader.readexactly(length), 20)

    async def ask(self, *pieces: bytes) -> tuple[int, dict[str, str], bytes]:
        await self.send(*pieces)
        return await self.answer()


def run(test) -> None:
    """Run a test of one gateway and one connection on it."""

    async def go() -> None:
        async with Gateway().listening() as gateway, Web(gateway) as web:
            await test(gateway, web)
            for _ in range(500):
                if not gateway.held and not gateway.state.tasks:
                    break
                await asyncio.sleep(0.01)
            assert gateway.held == 0 and not gateway.state.tasks  # every byte of budget was given back

    asyncio.run(go())


async def learnt(web: Web, more: str = "") -> None:
    assert (await web.ask(request(b"first", more)))[2] == b"<first>"
    assert len(web.gateway.paths.heads) > 0


def test_a_known_head_is_answered_like_the_first_for_any_body_length():
    async def test(gateway, web):
        first = await web.ask(request(b"a"))
        for body in (b"a", b"", b"bc", b"d" * 5000, b"e" * 700_000):
            status, headers, told = await web.ask(request(body))
            assert (status, told) == (200, b"<" + body[:100] + b">")
            assert headers | {"content-length": ""} == first[1] | {"content-length": ""}
        assert gateway.by_layers == 1
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
        assert headers["date"] == "now" and headers["x-jurybox-weights-version"] == "7"
        assert (await web.ask(request(b"bad")))[0] == 418
        assert (await web.ask(request(b"good")))[0] == 200

    run(test)


def test_a_body_in_pieces_is_put_together():
    async def test(gateway, web):
        await learnt(web)
        whole = request(b"0123456789")
        at = len(whole) - 10
        for cuts in ([at], [at + 3], [at, at + 1, at + 9], list(range(at, at + 10))):
            pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
            assert (await web.ask(*pieces))[2] == b"<0123456789>"
        assert gateway.by_layers == 1
        assert (await web.ask(whole[:20], whole[20:]))[2] == b"<0123456789>"  # a head in pieces is parsed as usual
        assert gateway.by_layers == 2

    run(test)


def test_a_request_is_being_received_until_its_body_is_here_and_in_progress_until_its_answer():
    async def test(gateway, web):
        await learnt(web)
        (connection,) = gateway.state.connections
        assert not connection.receiving and not connection.in_progress
        whole = request(b"0123456789")
        gateway.go.clear()
        await web.send(whole[:-1])
        assert connection.receiving and connection.in_progress
        await web.send(whole[-1:])
        assert not connection.receiving and connection.in_progress
        gateway.go.set()
        assert (await web.answer())[2] == b"<0123456789>"
        assert not connection.receiving and not connection.in_progress and gateway.by_layers == 1

    run(test)


def test_requests_that_come_at_once_are_answered_in_their_order():
    async def test(gateway, web):
        await learnt(web)
        gateway.go.clear()
        other = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nno"
        await web.send(request(b"1") + request(b"22"), request(b"333") + other + request(b"4444"))
        gateway.go.set()
        assert [(await web.answer())[::2] for _ in range(5)] == [
            (200, b"<1>"), (200, b"<22>"), (200, b"<333>"), (404, b""), (200, b"<4444>"),
        ]  # fmt: skip

    run(test)


def test_a_head_is_known_for_its_own_request_if_another_arrived_with_it():
    """Of one length and another path: the first must not be answered as the second was."""

    async def test(gateway, web):
        async def why(body: bytes) -> HttpReply:
            return HttpReply(b"y", "text/x-echo", 200, 7)

        gateway.others["/dialects/y"] = why
        two = request(b"2", head=HEAD.replace("/dialects/x", "/dialects/y"))
        await web.send(request(b"1") + two)
        assert [(await web.answer())[2] for _ in range(2)] == [b"<1>", b"y"]
        assert [(await web.ask(one))[2] for one in (request(b"3"), two, request(b"4"))] == [b"<3>", b"y", b"<4>"]

    run(test)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HEAD.replace("localhost", "example.org"), 421),
        (HEAD + "Origin: http://example.org\r\n", 403),
        (HEAD + "Host: localhost\r\n", 400),
        (HEAD.replace("Host: localhost\r\n", ""), 400),
        (HEAD.replace("/dialects/x", "/dialects/y"), 404),
        (HEAD + "Content-Length: 3\r\n", 400),
        (HEAD + "Transfer-Encoding: chunked\r\n", 400),
    ],
)
def test_no_wall_is_passed_by_a_head_that_resembles_a_known_one(head, status):
    async def test(gateway, web):
        await learnt(web)
        known = len(gateway.paths.heads)
        for _ in range(2):
            async with Web(gateway) as stranger:
                assert (await stranger.ask(request(b"other\r\n", head=head)))[0] == status
        assert gateway.bodies == [b"first"] and len(gateway.paths.heads) == known
        assert (await web.ask(request(b"mine")))[2] == b"<mine>"

    run(test)


@pytest.mark.parametrize(
    ("more", "head"),
    [
        ("Connection: close\r\n", HEAD),
        ("Expect: 100-continue\r\n", HEAD),
        ("Content-Encoding: identity\r\n", HEAD),
        ("Connection: keep-alive\r\n", HEAD.replace("1.1", "1.0")),
    ],
)
def test_a_request_with_anything_special_about_it_goes_the_usual_way(more, head):
    async def test(gateway, web):
        for times in (1, 2):
            async with Web(gateway) as other:
                await other.send(request(b"first", more, head))
                assert b"<first>" in await asyncio.wait_for(other.reader.readuntil(b">"), 20)
            assert gateway.by_layers == times and not gateway.paths.heads

    run(test)


def test_a_body_that_is_too_large_is_refused_as_ever():
    async def test(gateway, web):
        await learnt(web)
        async with Web(gateway) as large:
            assert (await large.ask(f"{HEAD}Content-Length: {MOST + 1}\r\n\r\n".encode()))[0] == 413
        async with Web(gateway) as lying:
            assert (await lying.ask(f"{HEAD}Content-Length: 99999999\r\n\r\n".encode()))[0] == 413
        assert gateway.bodies == [b"first"]

    run(test)


def test_a_client_gets_an_error_if_there_is_no_memory_for_its_body():
    async def test(gateway, web):
        await learnt(web)
        others = native.Account(gateway.budget, HTTP)
        others.take(RECEIVED, 4 * MOST - 100)
        assert (await web.ask(request(b"s" * 50)))[0] == 200
        async with Web(gateway) as large:
            assert (await large.ask(request(b"l" * 50)[:-1], b"l"))[0] == 200
            assert (await large.ask(request(b"l" * 5000)))[0] == 429
        others.give(RECEIVED, 4 * MOST - 100)
        assert (await web.ask(request(b"s" * 5000)))[0] == 200

    run(test)


def test_a_client_that_announces_a_body_and_sends_none_reserves_no_memory():
    async def test(gateway, web):
        await learnt(web)
        async with Web(gateway) as slow:
            await slow.send(request(b"x" * 1000)[:-990])
            assert gateway.held == 10
        for _ in range(500):
            if not gateway.held:
                break
            await asyncio.sleep(0.01)
        assert gateway.held == 0 and gateway.bodies == [b"first"]

    run(test)


def test_the_body_of_a_client_that_left_keeps_its_room_until_it_is_done_with():
    async def test(gateway, web):
        await learnt(web)
        gateway.go.clear()
        async with Web(gateway) as gone:
            await gone.send(request(b"x" * 1000))
        for _ in range(500):
            if len(gateway.state.connections) == 1:
                break
            await asyncio.sleep(0.01)
        assert gateway.held == 1000  # it is still computed
        gateway.go.set()
        await asyncio.gather(*gateway.state.tasks)
        assert gateway.state.total_requests == 1  # the other had no client left

    run(test)


def test_a_reply_that_ends_its_connection_ends_it():
    async def test(gateway, web):
        gateway.more = (("connection", "close"),)
        async with Web(gateway) as first:
            await first.ask(request(b"first"))
        status, headers, _ = await web.ask(request(b"second") + request(b"never"))
        assert status == 200 and headers["connection"] == "close"
        assert await asyncio.wait_for(web.reader.read(), 20) == b"" and b"never" not in gateway.bodies
        assert gateway.by_layers == 1

    run(test)


def test_an_answer_that_does_not_go_at_once_is_sent_whole():
    async def test(gateway, web):
        await learnt(web)
        await web.send(request(b"much"), request(b"next"))
        await asyncio.sleep(0.1)  # nothing is read meanwhile
        assert (await web.answer())[2] == b"m" * (32 << 20)
        assert (await web.answer())[2] == b"<next>"

    run(test)


def test_the_answer_of_a_client_that_left_goes_to_no_other():
    async def test(gateway, web):
        await learnt(web)
        for i in range(5):
            gateway.go.clear()
            async with Web(gateway) as gone:
                await gone.send(request(b"secret"))
            for _ in range(500):
                if len(gateway.state.connections) == 1:
                    break
                await asyncio.sleep(0.01)
            async with Web(gateway) as other:
                await other.send(request(b"%d" % i))
                gateway.go.set()
                assert (await other.answer())[2] == b"<%d>" % i
                assert (await other.ask(request(b"more")))[2] == b"<more>"
        assert (await web.ask(request(b"mine")))[2] == b"<mine>"

    run(test)


def test_a_connection_that_is_to_end_answers_what_it_has_begun():
    async def test(gateway, web):
        await learnt(web)
        gateway.go.clear()
        await web.send(request(b"last"))
        for connection in list(gateway.state.connections):
            connection.shutdown()
        assert gateway.state.tasks  # which uvicorn waits for
        gateway.go.set()
        assert (await web.answer())[2] == b"<last>"
        assert await asyncio.wait_for(web.reader.read(), 20) == b""

    run(test)


def test_requests_given_up_at_the_end_get_no_answer_and_release_their_memory():
    async def test(gateway, web):
        await learnt(web)
        gateway.go.clear()
        await web.send(request(b"last"))
        for task in list(gateway.state.tasks):
            task.cancel()
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(web.reader.read(), 20) == b""

    run(test)


@pytest.mark.parametrize("n", [1, 3])
def test_requests_that_come_at_once_let_others_go_first(monkeypatch, n):
    turns = []
    after = Turns.after

    def noted(self, who, seconds, call):
        turns.append(seconds)
        after(self, who, seconds, call)

    monkeypatch.setattr(Turns, "after", noted)

    async def test(gateway, web):
        await learnt(web)
        turns.clear()
        await web.send(request(b"x") * n)
        assert [(await web.answer())[2] for _ in range(n)] == [b"<x>"] * n
        assert len(turns) == n - 1
        assert all(0 <= seconds <= 0.002 for seconds in turns)

    run(test)


def test_a_body_that_its_answer_leaves_to_the_layers_is_answered_by_them_with_what_came_behind_it():
    async def test(gateway, web):
        async def none(body: bytes) -> None:
            assert body in (b"1", b"22")

        await learnt(web)
        ((parts, path),) = gateway.paths.heads.items()
        gateway.paths.heads[parts] = path._replace(answer=none)
        await web.send(request(b"1") + request(b"22"))
        assert [(await web.answer())[2] for _ in range(2)] == [b"<1>", b"<22>"]
        assert gateway.by_layers >= 2 and gateway.bodies == [b"first", b"1", b"22"]
        (connection,) = gateway.state.connections
        assert not connection.in_progress and not connection.receiving

    run(test)


def test_an_answer_for_which_there_is_no_room_is_refused_as_the_layers_refuse_it():
    async def test(gateway, web):
        await learnt(web)
        async with Web(gateway) as layers:
            others = native.Account(gateway.budget, HTTP)
            assert not others.take(ANSWERS, 4 * MOST - 8)
            told = [await web.ask(request(b"much")), await layers.ask(request(b"much", "X-Once: 1\r\n"))]
            known, first = [(status, headers["retry-after"], json.loads(body)) for status, headers, body in told]
            assert known == first and known[0] == 429
            others.give(ANSWERS, 4 * MOST - 8)
        assert (await web.ask(request(b"a")))[2] == b"<a>"

    run(test)
