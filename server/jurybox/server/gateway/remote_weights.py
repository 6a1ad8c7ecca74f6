"""The gRPC service that connects learners and actors on other machines to the weights channels of this host.

A stream is a publisher or a reader of a model. It uses the ordinary client, so a remote publisher follows the rules of
a local one. The readers of one model share a connection and the publications in transit, so hundreds of readers need
little memory. Work that copies or blocks runs in threads; the gateway's event loop only transfers messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
import numpy as np

from jurybox.client import connect
from jurybox.protocol import remote_weights_pb2
from jurybox.protocol import remote_weights_pb2 as pb
from jurybox.protocol.errors import Busy, Code, Error, Refused, Timeout
from jurybox.protocol.weights.channel import decode_extra
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader
from jurybox.protocol.weights.transfer import (
    CHUNK_BYTES,
    PUBLISH,
    READ,
    Assembly,
    chunks,
    restored,
    transfer_layout,
)
from jurybox.protocol.wire import require_name
from jurybox.server.gateway.grpc_server import Service
from jurybox.server.security.doors import Doors, refusal
from jurybox.server.security.grpc import abort

_CONNECT = 5.0  # seconds
_STALL = 30.0  # seconds between two messages of one publication, in either direction
_THREADS = 8
_MOST_BYTES = 8 << 30  # of one model's weights
_MOST_STREAMS = 256  # of publishers, and of readers
_MOST_KEPT = 4  # publications of one model in transit to readers; beyond that, readers get the last one
_PIECE_BYTES = 256 << 10  # of a publication per message to a reader: as much is buffered for each that does not read
_MOST_SAID = 1000  # characters of an error message
_NAME = PUBLISH.rpartition("/")[0].lstrip("/")  # of the service
_T = TypeVar("_T")
_M = TypeVar("_M")


def service(address: str, doors: Doors | None = None) -> Service:
    """Return the service for a GrpcServer; `address` is the server's. Streams end when `doors` have closed."""
    servicer = RemoteWeights(address, doors=doors)
    return Service(_NAME, remote_weights_pb2.DESCRIPTOR, servicer, lambda servicer, server: servicer.add_to(server))


class RemoteWeights:
    """The service jurybox.RemoteWeights.

    Args:
        address: address of the server.
        stall: seconds after which a stream is ended that sent no first message, stopped within a publication, or does
            not receive one.
        most_bytes: largest weights of a model that are accepted, bytes.
        most_streams: largest number of publishers, and of readers; more are refused with RESOURCE_EXHAUSTED.
        doors: after they have closed, streams end between two publications.
    """

    def __init__(
        self,
        address: str,
        *,
        stall: float = _STALL,
        most_bytes: int = _MOST_BYTES,
        most_streams: int = _MOST_STREAMS,
        doors: Doors | None = None,
    ) -> None:
        self._doors = doors or Doors()
        self._address = address
        self._stall = stall
        self._most_bytes = most_bytes
        self._most_streams = most_streams
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="remote weights")
        # Used only in the event loop.
        self._streams = {"publishers": 0, "readers": 0}
        self._sources: dict[str, _Shared] = {}

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server, before it starts."""
        handlers = {
            PUBLISH.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(
                self.publish, pb.PublishRequest.FromString, pb.PublishReply.SerializeToString
            ),
            READ.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(
                self.read, pb.ReadRequest.FromString, _serialized
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_NAME, handlers),))

    async def publish(self, requests: AsyncIterator[pb.PublishRequest], context: Any) -> AsyncIterator[pb.PublishReply]:
        """Serve one publisher."""
        publisher: _Publisher | None = None
        opening: asyncio.Future[_Publisher] | None = None
        await self._come("publishers", context)
        try:
            while (request := await self._next(requests, publisher)) is not None:
                try:
                    if publisher is None:
                        work = self._in_thread(_Publisher, self._address, request, self._most_bytes)
                        opening = asyncio.ensure_future(work)
                        publisher = await asyncio.shield(opening)
                        reply: pb.PublishReply | None = pb.PublishReply(opened=publisher.opened())
                    else:
                        reply = await self._in_thread(publisher.take, request)
                except Error as error:
                    yield pb.PublishReply(refusal=_refusal(error))
                    if publisher is None or publisher.broken:
                        return
                else:
                    if reply is not None:
                        yield reply
            if self._doors.closed:
                raise refusal()
        finally:
            self._streams["publishers"] -= 1
            if opening is not None:
                opening.add_done_callback(self._close)  # not awaited: a stream that is cancelled must not wait

    async def read(self, requests: AsyncIterator[pb.ReadRequest], context: Any) -> AsyncIterator[pb.ReadReply | bytes]:
        """Serve one reader."""
        shared: _Shared | None = None
        source: _Source | None = None
        announced = False
        await self._come("readers", context)
        try:
            # An actor may take any time between requests; HTTP/2 pings detect whether it is still connected.
            while (request := await self._message(requests, self._stall if shared is None else None)) is not None:
                try:
                    if shared is None:
                        shared = self._join(request.model)
                    if source is None:
                        source = await asyncio.shield(shared.opening)
                    head, kept = await self._in_thread(source.answer, request)
                except Error as error:
                    yield pb.ReadReply(refusal=_refusal(error))
                    # A new stream may succeed, with the next server or with the model as it is then.
                    if source is None or error.code == Code.SERVER_GONE:
                        self._forget(shared)
                        return
                    continue
                if not announced:
                    head.layout, announced = source.layout, True
                yield pb.ReadReply(head=head)
                if kept is not None:
                    for piece in kept.pieces:
                        with self._stalling():
                            yield piece
                    kept, piece = None, b""  # release the memory now, not at the next request
            if self._doors.closed:
                raise refusal()
        finally:
            self._streams["readers"] -= 1
            self._leave(shared)

    async def _come(self, kind: str, context: Any) -> None:
        """Count a stream, or end it if there are too many."""
        if self._streams[kind] >= self._most_streams:
            await abort(
                context,
                Busy(
                    f"{self._most_streams} {kind} of weights are connected over gRPC, which is the maximum: close "
                    "those that are done, or read once per host and share the weights"
                ),
            )
        self._streams[kind] += 1

    async def _next(
        self, requests: AsyncIterator[pb.PublishRequest], publisher: _Publisher | None
    ) -> pb.PublishRequest | None:
        """Return the next message; None at the end of the stream, or if the rest of a publication does not arrive.

        A learner may take any time between publications; HTTP/2 pings detect whether it is still connected.
        """
        if publisher is not None and publisher.receiving:
            return await self._message(requests, self._stall, closes=False)
        return await self._message(requests, None if publisher is not None else self._stall)

    async def _message(self, requests: AsyncIterator[_M], seconds: float | None, *, closes: bool = True) -> _M | None:
        try:
            if not closes:
                return await asyncio.wait_for(anext(requests), seconds)
            return await self._doors.message(anext(requests), seconds)
        except (StopAsyncIteration, TimeoutError):
            return None

    @contextlib.contextmanager
    def _stalling(self) -> Iterator[None]:
        """Cancel the stream if the peer does not receive a message in time."""
        task = asyncio.current_task()
        assert task is not None
        handle = asyncio.get_running_loop().call_later(self._stall, task.cancel)
        try:
            yield
        finally:
            handle.cancel()

    async def _in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def _join(self, model: str) -> _Shared:
        """Return the model's source; the first reader opens it."""
        require_name(model)
        shared = self._sources.get(model)
        if shared is None:
            opening = asyncio.ensure_future(self._in_thread(_Source, self._address, model))
            shared = self._sources[model] = _Shared(model, opening)
        shared.readers += 1
        return shared

    def _forget(self, shared: _Shared | None) -> None:
        """Forget the source; the next reader opens a new one."""
        if shared is not None and self._sources.get(shared.model) is shared:
            del self._sources[shared.model]

    def _leave(self, shared: _Shared | None) -> None:
        """Release the source; the last reader closes it."""
        if shared is None:
            return
        shared.readers -= 1
        if shared.readers == 0:
            self._forget(shared)
            shared.opening.add_done_callback(self._close)  # not awaited: a stream that is cancelled must not wait

    def _close(self, opening: asyncio.Future[_Source] | asyncio.Future[_Publisher]) -> None:
        """Close a source or publisher once it is open, even if the stream was cancelled before."""
        if not opening.cancelled() and opening.exception() is None:
            self._threads.submit(opening.result().close)


def _serialized(reply: pb.ReadReply | bytes) -> bytes:
    return reply if isinstance(reply, bytes) else reply.SerializeToString()


def _refusal(error: Error) -> pb.WeightsRefusal:
    """Return an error as a message; characters that UTF-8 cannot encode are replaced."""
    message = str(error)[:_MOST_SAID].encode("utf-8", "replace").decode()
    return pb.WeightsRefusal(code=error.code, message=message)


class _Publisher:
    """A local publisher fed by chunks.

    Attributes:
        receiving: whether a publication is incomplete.
        broken: whether the peer violated the protocol, so that the stream must end.
    """

    def __init__(self, address: str, request: pb.PublishRequest, most_bytes: int) -> None:
        if request.WhichOneof("part") != "open":
            raise Error("expected 'open' as the first message of a publisher's stream", Code.MALFORMED)
        require_name(request.open.model)
        self._server = connect(address, timeout=_CONNECT)
        try:
            publisher = self._server.publisher(request.open.model)
            assert isinstance(publisher, Publisher)  # the gateway is on the server's host
            self._publisher = publisher
            self._layout = self._publisher.channel.layout
            if self._layout.nbytes > most_bytes:
                raise Refused(
                    f"the weights of {request.open.model!r} have {self._layout.nbytes} bytes, at most {most_bytes} are "
                    "accepted over gRPC: publish on the server's host",
                    Code.TOO_LARGE,
                )
        except BaseException:
            self._server.close()
            raise
        self._turn = threading.Lock()  # a cancelled stream may be closed while a thread still publishes
        self.receiving = False
        self.broken = False
        self._begin, self._sent = pb.BeginPublication(), self._layout
        self._assembly: Assembly | None = None
        # The last complete publication of the stream, by its `bfloat16`: changed chunks are applied to it.
        self._base: dict[bool, np.ndarray[Any, np.dtype[np.uint8]]] = {}

    def opened(self) -> pb.Opened:
        channel = self._publisher.channel
        return pb.Opened(
            layout=self._layout.to_json(),
            newest=channel.newest,
            extra_bytes=channel.extra_bytes,
            chunk_bytes=CHUNK_BYTES,
        )

    def take(self, request: pb.PublishRequest) -> pb.PublishReply | None:
        """Handle one message of a publication, and return the reply after the last. Raises Error."""
        kind = request.WhichOneof("part")
        try:
            with self._turn:
                if kind == "begin" and not self.receiving:
                    self._start(request.begin)
                    return None
                if kind == "chunk" and self._assembly is not None:
                    self._assembly.put(request.chunk)
                    return None
                if kind == "end" and self._assembly is not None:
                    return pb.PublishReply(published=self._finish(request.end.bytes))
        except Error as error:
            self.broken = error.code in (Code.MALFORMED, Code.TOO_LARGE)
            raise
        self.broken = True
        raise Error(f"unexpected message {kind!r}: expected begin, chunks, end", Code.MALFORMED)

    def _start(self, begin: pb.BeginPublication) -> None:
        layout = self._layout
        if begin.only:
            if len(begin.only) > len(layout.places) or not layout.places.keys() >= set(begin.only):
                raise Error("a part names tensors that the channel's layout does not have", Code.MALFORMED)
            layout = layout.only(begin.only)
        travelling = transfer_layout(layout, bfloat16=begin.bfloat16)
        if begin.layout_hash.hex() != travelling.hash:
            raise Error(
                f"the announced layout ({begin.layout_hash.hex()[:12]}) is not the channel's "
                f"({travelling.hash[:12]}): publish tensors with the model's names, shapes and dtypes",
                Code.MALFORMED,
            )
        if len(begin.extra) > self._publisher.channel.extra_bytes:
            raise Error(
                f"extra takes {len(begin.extra)} bytes, there is room for {self._publisher.channel.extra_bytes}",
                Code.TOO_LARGE,
            )
        # No base again until this publication is complete. A part is sent whole and leaves it.
        base = None if begin.only else self._base.pop(begin.bfloat16, None)
        if begin.changed_only and base is None:
            raise Error("changed chunks were announced before any complete publication of this stream", Code.MALFORMED)
        flat = np.zeros(travelling.nbytes, np.uint8) if base is None else base
        self._assembly = Assembly(flat, gaps=begin.changed_only)
        self._begin, self._sent, self.receiving = begin, layout, True

    def _finish(self, sent: int) -> int:
        assembly, begin = self._assembly, self._begin
        assert assembly is not None
        self._assembly, self.receiving = None, False
        assembly.finish(sent)
        if not begin.only:
            self._base[begin.bfloat16] = assembly.flat
        travelled = transfer_layout(self._sent, bfloat16=begin.bfloat16)
        return self._publisher.publish(
            restored(self._sent, travelled, assembly.flat),
            decode_extra(begin.extra),
            check_finite=begin.check_finite,
            version=begin.version or None,
            partial=bool(begin.only),
        )

    def close(self) -> None:
        with self._turn, contextlib.suppress(Error):
            self._server.close()


class _Shared:
    """A source, which may still be opening, and the number of its readers."""

    def __init__(self, model: str, opening: asyncio.Future[_Source]) -> None:
        self.model = model
        self.opening = opening
        self.readers = 0


class _Kept:
    """A publication as serialized messages, shared by all readers."""

    def __init__(self, version: int, extra: bytes, published: float, flat: np.ndarray[Any, Any]) -> None:
        self.version, self.extra, self.published = version, extra, published
        self.pieces = [pb.ReadReply(chunk=chunk).SerializeToString() for chunk in chunks(flat, size=_PIECE_BYTES)]


class _Source:
    """A local reader of one model's weights, shared by remote readers."""

    def __init__(self, address: str, model: str) -> None:
        self._server = connect(address, timeout=_CONNECT)
        try:
            reader = self._server.weights(model)
            assert isinstance(reader, WeightsReader)  # the gateway is on the server's host
            self._reader = reader
        except BaseException:
            self._server.close()
            raise
        self.layout = self._reader.layout.to_json()
        self._turn = threading.Lock()
        self._flat = np.zeros(self._reader.layout.nbytes, np.uint8)
        self._newest: _Kept | None = None
        self._alive: weakref.WeakSet[_Kept] = weakref.WeakSet()

    def answer(self, request: pb.ReadRequest) -> tuple[pb.WeightsHead, _Kept | None]:
        """Return the head of the answer, and the publication that follows it, if any. Raises Timeout, ServerGone."""
        reader = self._reader
        reader.require_owner()
        newer = reader.newer_than(request.newer_than)
        head = pb.WeightsHead(newest=reader.newest, max_lag=reader.max_lag)
        if request.look:
            return head, None
        if not head.newest:
            raise Timeout("nothing has been published yet: is the model's learner running?")
        if not newer or (kept := self._publication()).version <= request.newer_than:
            return head, None
        head.version, head.extra, head.age = kept.version, kept.extra, time.monotonic() - kept.published
        return head, kept

    def _publication(self) -> _Kept:
        """Return the newest publication, or a slightly older one if slow readers hold the maximum number."""
        with self._turn:
            newest = self._newest
            if newest is None or (self._reader.newer_than(newest.version) and len(self._alive) < _MOST_KEPT):
                try:
                    version, extra = self._reader.read_bytes(self._flat, timeout=1.0)
                except Timeout:
                    if newest is None:
                        raise
                    return newest  # a publisher is writing a snapshot; the last publication is complete
                published = time.monotonic() - self._reader.age_seconds
                newest = self._newest = _Kept(version, extra, published, self._flat)
                self._alive.add(newest)
            return newest

    def close(self) -> None:
        with contextlib.suppress(Error):
            self._server.close()
