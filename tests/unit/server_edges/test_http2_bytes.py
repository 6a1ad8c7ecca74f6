"""The HTTP/2 end of the gRPC door against peers that break the protocol, and peers that take their time."""

from __future__ import annotations

import asyncio
import os
import random
import socket

import grpc
import pytest

from jurybox.protocol.errors import Code, error_for
from jurybox.server.gateway.grpc_server import GrpcServer
from jurybox.server.gateway.http2 import frames

ECHO, FAIL, SLOW = "/test.Echo/Say", "/test.Echo/Fail", "/test.Echo/Wait"


async def ready() -> list[str]:
    return []


@pytest.fixture
async def server():
    cancelled = []

    async def echo(message, seconds):
        return message

    async def fail(message, seconds):
        raise error_for(Code.BUSY, "50 % of it: é")

    async def slow(message, seconds):
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            cancelled.append(message)
            raise

    handlers = {ECHO: echo, FAIL: fail, SLOW: slow}
    server = GrpcServer("127.0.0.1:0", [], ready, handlers=handlers, max_message_bytes=8 << 20)
    server.cancelled = cancelled
    await server.start()
    yield server
    await server.stop()


@pytest.mark.parametrize("size", [0, 1, 16_384, 65_536, 1 << 20, 7 << 20])
async def test_messages_of_every_size_go_both_ways(server, size):
    message = os.urandom(size)
    async with grpc.aio.insecure_channel(server.bound, [("grpc.max_receive_message_length", -1)]) as channel:
        answers = await asyncio.gather(*(channel.unary_unary(ECHO)(message, timeout=20) for _ in range(3)))
    assert all(answer == message for answer in answers)


async def test_a_message_beyond_the_bound_is_refused_and_the_connection_goes_on(server):
    async with grpc.aio.insecure_channel(server.bound) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(ECHO)(bytes(9 << 20), timeout=20)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await channel.unary_unary(ECHO)(b"small", timeout=20) == b"small"


async def test_an_error_carries_its_code_and_its_words(server):
    async with grpc.aio.insecure_channel(server.bound) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await channel.unary_unary(FAIL)(b"", timeout=20)
    assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "50 % of it: é")


async def test_a_call_that_is_given_up_is_cancelled(server):
    async with grpc.aio.insecure_channel(server.bound) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await channel.unary_unary(SLOW)(b"mine", timeout=0.2)
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        for _ in range(200):
            if server.cancelled:
                break
            await asyncio.sleep(0.01)
    assert server.cancelled == [b"mine"]


def talk(address: str, data: bytes) -> bytes:
    """Send bytes, and read until the peer closes or says nothing for a moment."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=0.3) as peer:
        got = b""
        try:
            peer.sendall(data)
            while more := peer.recv(65536):
                got += more
        except OSError:
            pass
        return got


HELLO = frames.PREFACE + frames.settings(())


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HELLO + frames.frame(frames.DATA, 0, 0, b"x"),
        HELLO + frames.frame(frames.DATA, 0, 7, b"x"),
        HELLO + frames.frame(frames.HEADERS, frames.END_HEADERS, 2, frames.header_block(((b":path", b"/a"),))),
        HELLO + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff\xff\xff"),
        HELLO + frames.frame(frames.HEADERS, 0, 1, b"") + frames.frame(frames.PING, 0, 0, bytes(8)),
        HELLO + frames.frame(frames.HEADERS, 0, 1, b"") + frames.frame(frames.CONTINUATION, 0, 1, bytes(1 << 16)) * 2,
        HELLO + frames.frame(frames.CONTINUATION, 0, 1, b""),
        HELLO + frames.frame(frames.PING, 0, 0, b"short"),
        HELLO + frames.frame(frames.WINDOW_UPDATE, 0, 0, bytes(4)),
        HELLO + frames.frame(frames.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff") * 2,
        HELLO + frames.settings(((frames.INITIAL_WINDOW, 2**32 - 1),)),
        HELLO + frames.settings(((frames.MAX_FRAME, 1),)),
        HELLO + frames.frame(frames.SETTINGS, 0, 0, b"odd"),
        HELLO + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
        HELLO + frames.frame(frames.PUSH_PROMISE, 0, 1, b""),
        HELLO + frames.frame(frames.DATA, frames.PADDED, 1, b"\xff"),
    ],
)
async def test_a_peer_that_breaks_the_protocol_is_told_and_hung_up_on(server, data):
    got = await asyncio.to_thread(talk, server.bound, data)
    assert bytes((frames.GOAWAY, 0, 0, 0, 0, 0)) in got
    async with grpc.aio.insecure_channel(server.bound) as channel:
        assert await channel.unary_unary(ECHO)(b"well", timeout=20) == b"well"


async def test_random_frames_end_nothing(server):
    chance = random.Random(5)
    call = frames.header_block(((b":method", b"POST"), (b":path", ECHO.encode()), (b"te", b"trailers")))

    def nonsense() -> bytes:
        parts = [HELLO]
        for _ in range(chance.randrange(1, 12)):
            payload = chance.choice((call, chance.randbytes(chance.randrange(40)), bytes(4), bytes(8)))
            kind, flags = chance.randrange(12), chance.randrange(256)
            parts.append(frames.frame(kind, flags, chance.choice((0, 1, 1, 3, 5)), payload))
        data = b"".join(parts)
        return data[: chance.randrange(len(data))] if chance.random() < 0.2 else data

    def many() -> None:
        host, _, port = server.bound.rpartition(":")
        for _ in range(500):
            with socket.create_connection((host, int(port)), timeout=5) as peer:
                peer.sendall(nonsense())

    await asyncio.to_thread(many)
    async with grpc.aio.insecure_channel(server.bound) as channel:
        assert await channel.unary_unary(ECHO)(b"well", timeout=20) == b"well"
