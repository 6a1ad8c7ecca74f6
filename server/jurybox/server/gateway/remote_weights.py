"""The gRPC service by which learners and actors on other machines reach the weights channels of this host.

A stream is a publisher, or a reader, of a model: it has a connection of its own to the server and goes through the
ordinary client, so whoever publishes from elsewhere has the place of a local publisher, with the same rules. Work that
copies or waits runs in threads; the gateway's event loop carries messages only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
import numpy as np

from jurybox.client import connect
from jurybox.client.publisher import Publisher
from jurybox.client.weights_reader import WeightsReader
from jurybox.protocol import remote_weights_pb2
from jurybox.protocol.errors import Code, Error, Refused, Timeout
from jurybox.protocol.remote_weights_pb2 import (
    BeginPublication,
    Opened,
    PublishReply,
    PublishRequest,
    ReadReply,
    ReadRequest,
    WeightsHead,
    WeightsRefusal,
)
from jurybox.protocol.weights.extra import decode, encode
from jurybox.protocol.weights.transfer import (
    CHUNK_BYTES,
    PUBLISH,
    READ,
    Assembly,
    chunks,
    restored,
    transfer_layout,
)
from jurybox.server.gateway.grpc_server import Service

_CONNECT = 5.0  # seconds
_STALL = 30.0  # seconds between two messages of one publication
_THREADS = 8
_MOST_BYTES = 8 << 30  # of one model's weights
_NAME = PUBLISH.rpartition("/")[0].lstrip("/")  # of the service
_T = TypeVar("_T")


def service(address: str) -> Service:
    """The service, for a GrpcServer; `address` is the server's."""
    servicer = RemoteWeights(address)
    return Service(_NAME, remote_weights_pb2.DESCRIPTOR, servicer, lambda servicer, server: servicer.add_to(server))


class RemoteWeights:
    """The service jurybox.RemoteWeights.

    Args:
        address: of the server.
        stall: seconds after which a publication that stopped in the middle is given up.
        most_bytes: larger weights are refused.
    """

    def __init__(self, address: str, *, stall: float = _STALL, most_bytes: int = _MOST_BYTES) -> None:
        self._address = address
        self._stall = stall
        self._most_bytes = most_bytes
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="remote weights")

    def add_to(self, server: grpc.aio.Server) -> None:
        """Offer the service on a server, before it starts."""
        handlers = {
            PUBLISH.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(
                self.publish, PublishRequest.FromString, PublishReply.SerializeToString
            ),
            READ.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(
                self.read, ReadRequest.FromString, ReadReply.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_NAME, handlers),))

    async def publish(self, requests: AsyncIterator[PublishRequest], _context: Any) -> AsyncIterator[PublishReply]:
        """One publisher, for as long as the stream lasts."""
        publisher: _Publisher | None = None
        try:
            while (request := await self._next(requests, publisher)) is not None:
                try:
                    if publisher is None:
                        publisher = await self._in_thread(_Publisher, self._address, request, self._most_bytes)
                        reply: PublishReply | None = PublishReply(opened=publisher.opened())
                    else:
                        reply = await self._in_thread(publisher.take, request)
                except Error as error:
                    yield PublishReply(refusal=WeightsRefusal(code=error.code, message=str(error)))
                    if publisher is None or publisher.broken:
                        return
                else:
                    if reply is not None:
                        yield reply
        finally:
            if publisher is not None:
                self._threads.submit(publisher.close)  # not awaited: a stream that is cancelled must not wait

    async def read(self, requests: AsyncIterator[ReadRequest], _context: Any) -> AsyncIterator[ReadReply]:
        """One reader, for as long as the stream lasts."""
        reader: _Reader | None = None
        try:
            async for request in requests:
                try:
                    if reader is None:
                        reader = await self._in_thread(_Reader, self._address, request.model)
                    head = await self._in_thread(reader.head, request)
                except Error as error:
                    yield ReadReply(refusal=WeightsRefusal(code=error.code, message=str(error)))
                    if reader is None:
                        return
                    continue
                yield ReadReply(head=head)
                if head.version:
                    for chunk in chunks(reader.flat):
                        yield ReadReply(chunk=chunk)
        finally:
            if reader is not None:
                self._threads.submit(reader.close)

    async def _next(
        self, requests: AsyncIterator[PublishRequest], publisher: _Publisher | None
    ) -> PublishRequest | None:
        """The next message; None at the end, and where a publication stops in the middle.

        Between publications a learner may take as long as it likes; HTTP/2's pings tell whether it is still there.
        """
        waits_long = publisher is not None and not publisher.receiving
        try:
            return await asyncio.wait_for(anext(requests), None if waits_long else self._stall)
        except (StopAsyncIteration, TimeoutError):
            return None

    async def _in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


class _Publisher:
    """A local publisher fed by chunks.

    Attributes:
        receiving: in the middle of a publication.
        broken: what came cannot be trusted; the stream must end.
    """

    def __init__(self, address: str, request: PublishRequest, most_bytes: int) -> None:
        if request.WhichOneof("part") != "open":
            raise Error("expected 'open' as the first message of a publisher's stream", Code.MALFORMED)
        self._server = connect(address, timeout=_CONNECT)
        try:
            publisher = self._server.publisher(request.open.model)
            assert isinstance(publisher, Publisher)  # the gateway is on the server's host
            self._publisher = publisher
            self._layout = self._publisher.channel.layout
            if self._layout.nbytes > most_bytes:
                raise Refused(
                    f"the weights of {request.open.model!r} have {self._layout.nbytes} bytes, at most {most_bytes} may "
                    "come from elsewhere: publish on the server's host",
                    Code.TOO_LARGE,
                )
        except BaseException:
            self._server.close()
            raise
        self.receiving = False
        self.broken = False
        self._begin = BeginPublication()
        self._assembly: Assembly | None = None
        # What came last, whole, by what it came as: changed chunks go on top of it.
        self._base: dict[bool, np.ndarray[Any, np.dtype[np.uint8]]] = {}

    def opened(self) -> Opened:
        channel = self._publisher.channel
        return Opened(
            layout=self._layout.to_json(),
            newest=channel.newest,
            extra_bytes=channel.extra_bytes,
            chunk_bytes=CHUNK_BYTES,
        )

    def take(self, request: PublishRequest) -> PublishReply | None:
        """One message of a publication; the reply where it was the last. Raises Error."""
        kind = request.WhichOneof("part")
        try:
            if kind == "begin" and not self.receiving:
                self._start(request.begin)
                return None
            if kind == "chunk" and self._assembly is not None:
                self._assembly.put(request.chunk)
                return None
            if kind == "end" and self._assembly is not None:
                return PublishReply(published=self._finish(request.end.bytes))
        except Error as error:
            self.broken = error.code in (Code.MALFORMED, Code.TOO_LARGE)
            raise
        self.broken = True
        raise Error(f"{kind!r} has no place here: expected begin, chunks, end", Code.MALFORMED)

    def _start(self, begin: BeginPublication) -> None:
        travelling = transfer_layout(self._layout, bfloat16=begin.bfloat16)
        if begin.layout_hash.hex() != travelling.hash:
            raise Error(
                f"the layout that was announced ({begin.layout_hash.hex()[:12]}) is not the channel's "
                f"({travelling.hash[:12]}): publish what the model was made with",
                Code.MALFORMED,
            )
        base = self._base.pop(begin.bfloat16, None)  # until the publication is whole, it is nobody's base
        if begin.changed_only and base is None:
            raise Error("changed chunks came before any whole publication of this stream", Code.MALFORMED)
        flat = np.zeros(travelling.nbytes, np.uint8) if base is None else base
        self._assembly = Assembly(flat, gaps=begin.changed_only)
        self._begin, self.receiving = begin, True

    def _finish(self, sent: int) -> int:
        assembly, begin = self._assembly, self._begin
        assert assembly is not None
        self._assembly, self.receiving = None, False
        assembly.finish(sent)
        self._base[begin.bfloat16] = assembly.flat
        travelled = transfer_layout(self._layout, bfloat16=begin.bfloat16)
        return self._publisher.publish(
            restored(self._layout, travelled, assembly.flat),
            decode(begin.extra),
            check_finite=begin.check_finite,
            version=begin.version or None,
        )

    def close(self) -> None:
        with contextlib.suppress(Error):
            self._server.close()


class _Reader:
    """A local reader, and the bytes of the publication it read last."""

    def __init__(self, address: str, model: str) -> None:
        self._server = connect(address, timeout=_CONNECT)
        try:
            reader = self._server.weights(model)
            assert isinstance(reader, WeightsReader)
            self._reader = reader
        except BaseException:
            self._server.close()
            raise
        self._told = False
        self.flat = np.zeros(self._reader.layout.nbytes, np.uint8)

    def head(self, request: ReadRequest) -> WeightsHead:
        """What to answer; where it has a version, `flat` holds it. Raises Timeout."""
        reader = self._reader
        head = WeightsHead(newest=reader.newest, max_lag=reader.max_lag)
        if not self._told:
            head.layout = reader.layout.to_json()
            self._told = True
        if not request.look and reader.newer_than(request.newer_than):
            version, extra = reader.read_flat(self.flat, timeout=1.0)
            head.version, head.extra, head.age = version, encode(extra), reader.age_seconds
        elif not request.look and not reader.newest:
            raise Timeout("nothing has been published yet: is the model's learner running?")
        return head

    def close(self) -> None:
        with contextlib.suppress(Error):
            self._server.close()
