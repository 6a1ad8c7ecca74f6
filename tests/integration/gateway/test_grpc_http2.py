"""Calls over HTTP/2, served by libnghttp2 on our loop and by grpcio: both answer clients alike."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import itertools
import random
import socket
import struct
import threading
import time
import zlib
from types import SimpleNamespace

import grpc
import pytest
from google.protobuf import descriptor_pb2
from tests.collecting import collecting_often
from tests.http2_frames import DATA, HELLO, data_frame, frame, head
from tests.serving import wait_until

from jurybox import native
from jurybox.client.remote.grpc_channel import open_channel
from jurybox.protocol.errors import Code, error_for
from jurybox.server.gateway.grpc_server import GrpcServer, Service
from jurybox.server.security.access import Access
from jurybox.server.security.limits import GRPC, budget_of

MIB = 1 << 20


class Methods:
    """The served methods: bytes in, bytes out."""

    def __init__(self):
        self.cancelled = threading.Event()
        self.began = threading.Event()
        self.slept = 0
        self.refused = []

    async def echo(self, request, context):
        return request

    async def left(self, request, context):
        return str(context.time_remaining()).encode()

    async def fail(self, request, context):
        raise error_for(Code.BUSY, "no room: 100% full, ä")

    async def refuse(self, request, context):
        self.refused.append(Code[request.decode()])
        if self.refused.count(self.refused[-1]) == 1:
            raise error_for(self.refused[-1], "not now")
        return b"now"

    async def broken(self, request, context):
        raise KeyError

    async def sleep(self, request, context):
        self.began.set()
        try:
            await asyncio.sleep(float(request))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        self.slept += 1
        return b"slept"

    async def count(self, request, context):
        try:
            for i in range(int(request)):
                yield b"%d" % i * 1000
        finally:
            self.cancelled.set()

    async def double(self, requests, context):
        async for request in requests:
            yield 2 * request

    def add(self, _, server):
        as_it_is = {"request_deserializer": lambda data: data, "response_serializer": lambda data: data}
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(getattr(self, name), **as_it_is)
            for name in ("broken", "echo", "fail", "left", "refuse", "sleep")
        }
        handlers["count"] = grpc.unary_stream_rpc_method_handler(self.count, **as_it_is)
        handlers["double"] = grpc.stream_stream_rpc_method_handler(self.double, **as_it_is)
        for name in ("t.T", "inference.GRPCInferenceService"):  # our client repeats calls of the second
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


async def ready():
    return []


class Served:
    """A server in a thread of its own."""

    def __init__(self, http2, access=None, direct=None):
        self.methods = Methods()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        file = SimpleNamespace(name="t.proto", dependencies=[], serialized_pb=file_named("t.proto"))
        service = Service("t.T", file, self.methods, self.methods.add, direct or {})

        async def start():
            server = GrpcServer("127.0.0.1:0", [service], ready, access or Access(max_message=MIB), http2)
            await server.start()
            return server

        self.server = self.run(start())
        self.bound = self.server.bound

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def close(self):
        self.run(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)


def file_named(name):
    return descriptor_pb2.FileDescriptorProto(name=name).SerializeToString()


HTTP2 = ["nghttp2", "grpcio"]


def start(http2, **options):
    if http2 == "nghttp2" and (missing := native.nghttp2()[1]):
        pytest.skip(missing)
    return Served(http2, **options)


@pytest.fixture(scope="module", params=HTTP2)
def served(request):
    served = start(request.param)
    yield served
    served.close()


@pytest.fixture
def channel(served):
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(served.bound, [*options, ("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


def status(call, *arguments, **named):
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **{"timeout": 20, **named})
    return caught.value.code()


def test_the_server_names_its_library(served):
    assert served.server.http2.startswith(("libnghttp2 1.", "grpcio 1."))


def test_our_client_repeats_calls_only_if_the_reason_may_pass_by_itself(served):
    with open_channel(f"grpc://{served.bound}") as ours:
        call = ours.unary_unary("/inference.GRPCInferenceService/refuse")
        for code in (Code.SLEEPING, Code.DRAINING):
            assert status(call, code.name.encode()) == grpc.StatusCode.UNAVAILABLE
            assert served.methods.refused.count(code) == 1
        for code in (Code.NOT_READY, Code.SERVER_GONE):
            assert call(code.name.encode(), timeout=20) == b"now"


def test_messages_of_any_size_are_returned_unchanged(channel):
    for size in (0, 1, 16_384, 70_000, MIB):
        message = random.Random(size).randbytes(size)
        assert channel.unary_unary("/t.T/echo")(message, timeout=20) == message


def test_concurrent_calls_get_their_own_answers(channel):
    calls = [channel.unary_unary("/t.T/echo").future(b"%d" % i, timeout=20) for i in range(200)]
    assert [call.result() for call in calls] == [b"%d" % i for i in range(200)]


def test_a_stream_is_answered_in_its_order(channel):
    many = [b"%d" % i * (i % 7) * 1000 for i in range(300)]
    assert list(channel.stream_stream("/t.T/double")(iter(many), timeout=20)) == [2 * one for one in many]


def test_a_message_beyond_the_limit_is_refused_compressed_or_not(channel):
    echo = channel.unary_unary("/t.T/echo")
    for algorithm in (grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate):
        assert echo(bytes(MIB), timeout=20, compression=algorithm) == bytes(MIB)
        assert status(echo, bytes(MIB + 1), compression=algorithm) == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_errors_keep_their_messages(channel):
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/t.T/fail")(b"", timeout=20)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "no room: 100% full, ä"
    assert dict(caught.value.trailing_metadata())["jurybox-code"] == str(int(Code.BUSY))


def test_an_unknown_method_is_unimplemented(channel):
    for path in ("/t.T/nothing", "/nobody/echo", "/", "/t.T/échø"):
        assert status(channel.unary_unary(path), b"") in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)
    assert channel.unary_unary("/t.T/echo")(b"x", timeout=20) == b"x"


def test_a_deadline_ends_the_method(served, channel):
    served.methods.cancelled.clear()
    assert status(channel.unary_unary("/t.T/sleep"), b"600", timeout=0.2) == grpc.StatusCode.DEADLINE_EXCEEDED
    assert served.methods.cancelled.wait(60)


def test_a_method_is_told_how_much_time_is_left(served, channel):
    left = channel.unary_unary("/t.T/left")
    assert 0 < float(left(b"", timeout=200)) <= 201, "gRPC sends long times in whole seconds, rounded up"
    assert left(b"") == b"None"


@pytest.mark.parametrize("http2", HTTP2)
def test_a_server_is_busy_while_a_call_that_does_more_than_read_is_in_progress(http2, monkeypatch):
    monkeypatch.setattr("jurybox.server.security.grpc._WORK", {"sleep"})
    with contextlib.closing(start(http2)) as served, grpc.insecure_channel(served.bound) as channel:
        assert not served.server.busy
        call = channel.unary_unary("/t.T/sleep").future(b"30", timeout=60)
        assert served.methods.began.wait(20) and served.server.busy
        call.cancel()
        wait_until(lambda: not served.server.busy, 20, "the end of its call")


def test_cancelling_a_call_ends_its_method(served, channel):
    for call, message in (
        (channel.unary_unary("/t.T/sleep").future, b"60"),
        (channel.unary_stream("/t.T/count"), b"9999999"),
    ):
        served.methods.cancelled.clear(), served.methods.began.clear()
        running = call(message, timeout=60)
        if message == b"60":
            assert served.methods.began.wait(20)
        else:
            assert next(running) == b"0" * 1000
        running.cancel()
        assert served.methods.cancelled.wait(20)


def test_a_stream_without_a_reader_waits(served, channel):
    answers = channel.unary_stream("/t.T/count")(b"5000", timeout=60)
    assert next(answers) == b"0" * 1000
    time.sleep(0.3)  # the method runs ahead only as far as flow control allows
    assert sum(1 for _ in answers) == 4_999


def test_a_stop_ends_all_calls():  # after a drain, in which those that were accepted are answered
    for http2 in HTTP2:
        served = start(http2)
        with grpc.insecure_channel(served.bound) as channel:
            call = channel.unary_unary("/t.T/sleep").future(b"15", timeout=20)
            assert served.methods.began.wait(20)
            served.run(served.server.stop())
            with pytest.raises(grpc.RpcError) as ended:
                call.result()
            assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
            assert status(channel.unary_unary("/t.T/echo"), b"") == grpc.StatusCode.UNAVAILABLE
        served.loop.call_soon_threadsafe(served.loop.stop)


def test_the_token_is_checked_before_a_message_is_read():
    for http2 in HTTP2:
        served = start(http2, access=Access(secret="s3cret-s3cret-s3cret", max_message=MIB))
        with grpc.insecure_channel(served.bound) as channel:
            for method in (channel.unary_unary("/t.T/echo"), channel.unary_unary("/t.T/nothing")):
                assert status(method, b"x") == grpc.StatusCode.UNAUTHENTICATED
            right, wrong = (("authorization", f"Bearer s3cret-s3cret-s3cre{end}") for end in "tx")
            assert channel.unary_unary("/t.T/echo")(b"x", timeout=20, metadata=[right]) == b"x"
            for metadata in ([wrong], [right, right], [("Authorization".lower() + "-x", right[1])]):
                assert (
                    status(channel.unary_unary("/t.T/echo"), b"x", metadata=metadata) == grpc.StatusCode.UNAUTHENTICATED
                )
        served.close()


# ---- handwritten frames


def framed_call(stream, content, path=b"/t.T/echo", encoding=b""):
    more = [(b"grpc-encoding", encoding)] if encoding else []
    return head(stream, path, *more) + data_frame(stream, content, compressed=bool(encoding))


def connected(served):
    host, port = served.bound.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=20)


def received_frames(connection, wanted):
    """Return kind and flags of the frames received, up to one of the wanted kind or the end, which is None."""
    received, frames = b"", []
    while True:
        while len(received) >= 9 and len(received) >= (size := 9 + int.from_bytes(received[:3], "big")):
            frames.append((received[3], received[4]))
            if received[3] == wanted:
                return frames
            received = received[size:]
        try:
            chunk = connection.recv(65536)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            return [*frames, (None, 0)]
        received += chunk


def received_kinds(connection, wanted):
    return [kind for kind, _ in received_frames(connection, wanted)]


def test_frames_of_these_helpers_are_understood(served):
    with connected(served) as connection:
        connection.sendall(HELLO + framed_call(1, b"x"))
        assert 0 in received_kinds(connection, 0)


@pytest.mark.parametrize(("encoding", "compress"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
def test_a_compressed_message_ends_at_its_end_mark(served, encoding, compress):
    packed = compress(b"x")
    for message, answered in ((packed, True), (packed * 2, False), (packed + b"x", False), (packed[:-1], False)):
        with connected(served) as connection:
            connection.sendall(HELLO + framed_call(1, message, encoding=encoding))
            kind, flags = received_frames(connection, 1)[-1]
        assert kind == 1 and (flags & 1 == 0) == answered, message  # an error has nothing after its header


@pytest.mark.parametrize("messages", [b"", data_frame(1, b"x", ends=False) + data_frame(1, b"y")])
def test_a_call_of_one_message_that_brings_none_or_two_ends_with_an_error(messages):
    served = start("nghttp2")  # grpcio takes the first of two, and does not answer none
    with connected(served) as connection, contextlib.closing(served):
        connection.sendall(HELLO + head(1, b"/t.T/echo") + (messages or frame(DATA, 1, 1)))
        kind, flags = received_frames(connection, 1)[-1]
    assert (kind, flags & 1) == (1, 1), "an error has nothing after its header"


def test_a_client_that_dies_after_any_byte_affects_no_other(served, channel):
    whole = HELLO + framed_call(1, b"0.2", b"/t.T/sleep") + framed_call(3, bytes(5000))
    for cut in range(1, len(whole), max(1, len(whole) // 60)):
        with connected(served) as connection:
            connection.sendall(whole[:cut])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as kill -9 does
    assert channel.unary_unary("/t.T/echo")(b"x", timeout=20) == b"x"


def test_endless_cancelled_calls_end_only_their_connection(served, channel):
    with connected(served) as connection:
        connection.sendall(HELLO)
        try:
            for stream in range(1, 20_001, 2):
                connection.sendall(
                    framed_call(stream, b"60", b"/t.T/sleep") + frame(3, 0, stream, struct.pack(">I", 8))
                )
        except (ConnectionError, TimeoutError):
            pass
        else:
            if "nghttp2" in served.server.http2:
                assert 7 in received_kinds(connection, 7)
    assert channel.unary_unary("/t.T/echo")(b"x", timeout=20) == b"x"


def test_mutated_bytes_end_their_connection_or_are_read(served, channel):
    if "nghttp2" not in served.server.http2:
        pytest.skip("a path that is not UTF-8 ends grpcio's server")
    rng = random.Random(24)
    valid = HELLO + b"".join(framed_call(2 * i + 1, b"m" * i * 30) for i in range(6))
    for _ in range(300):
        mutated = bytearray(valid)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(mutated))
            match rng.randrange(3):
                case 0:
                    mutated[at] = rng.randrange(256)
                case 1:
                    del mutated[at : at + rng.randrange(30)]
                case _:
                    mutated[at:at] = frame(rng.randrange(11), rng.randrange(256), rng.randrange(14), rng.randbytes(8))
        with connected(served) as connection:
            connection.sendall(mutated)
    assert channel.unary_unary("/t.T/echo")(b"x", timeout=20) == b"x"


def test_a_path_that_is_not_text_stops_no_server_for_good():
    for http2 in HTTP2:
        served = start(http2)
        with connected(served) as connection:
            connection.sendall(HELLO + framed_call(1, b"x", b"/t.T/\x8e"))
            received_kinds(connection, 1)
        if http2 == "grpcio":  # its server ends, so the gateway's process ends and the supervisor starts another
            served.run(asyncio.wait_for(served.server.ended.wait(), 20))
        else:
            with grpc.insecure_channel(served.bound) as channel:
                assert channel.unary_unary("/t.T/echo")(b"x", timeout=20) == b"x"
            served.close()


def test_finalizers_may_use_a_connection_while_it_returns_events():
    """Creating the events may start the garbage collector, whose finalizers may run any code."""
    if missing := native.nghttp2()[1]:
        pytest.skip(missing)
    connection = native.GrpcConnection(MIB, 8192, 1000, native.Account(budget_of(MIB), GRPC))
    connection.feed(HELLO, len(HELLO))
    events = []
    calls = itertools.count(1, 2)
    from_finalizers = []

    class Dropped:
        def __init__(self):
            self.own = self  # a cycle: only the collector frees it

        def __del__(self):
            data = head(next(calls), b"/t.T/echo")
            from_finalizers.extend(connection.feed(data, len(data)))

    with collecting_often():
        for _ in range(10):
            gc.disable()
            for _ in range(5):
                Dropped()
            data = b"".join(head(next(calls), b"/t.T/echo") for _ in range(50))
            gc.enable()
            events.extend(connection.feed(data, len(data)))
    assert len(from_finalizers) == 50
    assert sorted(event[1] for event in events + from_finalizers) == list(range(1, next(calls), 2))


@pytest.mark.parametrize("http2", HTTP2)
def test_a_method_that_fails_unexpectedly_is_logged_and_ends_no_other_call(http2, caplog):
    def broken(message, call):
        raise ZeroDivisionError

    served = start(http2, direct={"/t.T/echo": broken})
    try:
        with grpc.insecure_channel(served.bound, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            other = channel.unary_unary("/t.T/sleep").future(b"0.5", timeout=20)
            assert served.methods.began.wait(20)
            for method in ("echo", "broken"):
                with pytest.raises(grpc.RpcError, match="its log says more") as caught:
                    channel.unary_unary(f"/t.T/{method}")(b"x", timeout=20)
                assert caught.value.code() == grpc.StatusCode.INTERNAL
            assert other.result() == b"slept"
    finally:
        served.close()
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError, KeyError]
