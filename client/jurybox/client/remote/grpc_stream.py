"""A gRPC stream of requests and ordered replies, with a timeout on every wait."""

from __future__ import annotations

import _thread
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

from jurybox.client.remote.grpc_channel import CODE
from jurybox.protocol import forks
from jurybox.protocol.errors import Busy, Code, Error, Refused, ServerGone, Timeout, error_for
from jurybox.protocol.locks import IN_SERVICE, is_serving, mark_serving
from jurybox.protocol.remote_weights_pb2 import WeightsRefusal

_AHEAD = 4  # requests that may wait to be sent
_SLICE = 0.1
_REFUSED = {
    grpc.StatusCode.UNAUTHENTICATED: Code.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: Code.REFUSED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Code.TOO_LARGE,
}
# Streams that a forked child inherited. They are kept alive: gRPC would end them with threads that the child lacks.
_left_to_parent: list[Any] = []


class RemoteStream:
    """A call of a bidirectional streaming method. It ends when the stream is closed or garbage-collected.

    In a forked child `close` does nothing, and the other methods raise Refused.

    Args:
        channel: channel to the gateway.
        method: "/package.Service/Method".
        message: the class of the replies.
        metadata: sent with the call, such as a token.
        timeout: default limit of each wait, in seconds.

    Attributes:
        refused: whether the last reply was a refusal. Both ends are then still in step, and the stream stays usable.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        method: str,
        message: Any,
        metadata: tuple[tuple[str, str], ...],
        timeout: float,
    ) -> None:
        self._timeout = timeout
        self.refused = False
        self._forked = False
        # The threads refer to the exchange, not to this object, so that it can be garbage-collected, which ends them.
        self._exchange = exchange = _Exchange()
        call = channel.stream_stream(method, lambda request: request.SerializeToString(), message.FromString)
        self._end = weakref.finalize(self, exchange.end)  # first: a handler may raise anywhere from here on
        exchange.begin(partial(call, metadata=metadata))
        forks.register(self)

    def send(self, request: Message, until: float | None = None) -> None:
        """Send a request; wait while _AHEAD requests are already queued.

        Args:
            until: deadline on the monotonic clock; default: the stream's timeout from now.

        Raises:
            Timeout: the queue stayed full until the deadline.
            Error: the stream has ended; see `receive`.
        """
        self._require_own()
        self.refused = False
        began = time.monotonic()
        until = began + self._timeout if until is None else until
        while not self._exchange.ended:
            try:
                self._exchange.requests.put(request, timeout=max(0.0, min(_SLICE, until - time.monotonic())))
                return
            except queue.Full:
                if time.monotonic() >= until:
                    raise Timeout(f"the gateway accepted no request for {time.monotonic() - began:.1f} s") from None
        while True:  # the stream has ended: raise a refusal that was received last, or the error that ended it
            self.receive(until)

    def receive(self, until: float | None = None) -> Any:
        """Return the next reply. Raises the error of a refusal or of the stream's end, or Timeout.

        Args:
            until: see `send`.
        """
        self._require_own()
        began = time.monotonic()
        wait = self._timeout if until is None else max(0.0, until - began)
        try:
            reply = self._exchange.replies.get(timeout=wait)
        except queue.Empty:
            raise Timeout(f"the gateway did not answer for {wait:.1f} s") from None
        if isinstance(reply, Exception):
            self._exchange.replies.put(reply)  # so that later calls raise it too
            raise reply
        if reply.WhichOneof("part") == "refusal":
            refusal: WeightsRefusal = reply.refusal
            self.refused = True
            raise error_for(refusal.code, refusal.message)
        return reply

    @property
    def alive(self) -> bool:
        return not self._exchange.ended

    def close(self) -> None:
        """End the stream. Closing it again has no effect."""
        if self._forked:
            return
        self._end()
        if not is_serving() and self._exchange.over.acquire(timeout=self._timeout):  # else it may be this thread
            self._exchange.over.release()  # others may wait, too

    def _require_own(self) -> None:
        if self._forked:
            raise Refused("this stream was opened before a fork: connect in the process that uses it")
        if is_serving():
            raise Refused(f"no weights can be sent or received here: {IN_SERVICE}")

    def _after_fork_in_child(self) -> None:
        self._forked = True
        self._end.detach()
        _left_to_parent.append(self._exchange)


class _Exchange:
    """Both directions of a stream, and the thread that receives the replies."""

    def __init__(self) -> None:
        self.requests: queue.Queue[Message] = queue.Queue(_AHEAD)
        self.replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ended = False  # not an Event: the thread that garbage-collects the stream could hold the Event's lock
        self.over = threading.Lock()  # released when the thread ends
        self.over.acquire()
        self._call: Any = None

    def begin(self, call: Callable[[Iterator[Message]], Any]) -> None:
        """Start the call, in the thread: a handler that raised in it could leave one of gRPC's locks held for ever."""
        # From _thread: a handler that raises within threading.Thread.start would break the thread.
        _thread.start_new_thread(self._listen, (call,))

    def end(self) -> None:
        self.ended = True
        if (call := self._call) is not None:
            call.cancel()

    def _outgoing(self) -> Iterator[Message]:
        while not self.ended:
            try:
                yield self.requests.get(timeout=_SLICE)
            except queue.Empty:
                continue

    def _listen(self, begin: Callable[[Iterator[Message]], Any]) -> None:
        mark_serving()
        try:
            self._receive(begin)
        finally:
            self.ended = True
            self.over.release()

    def _receive(self, begin: Callable[[Iterator[Message]], Any]) -> None:
        try:
            self._call = begin(self._outgoing())
        except ValueError as error:  # gRPC raises this for a closed channel
            self.replies.put(Refused(f"this connection was closed: connect again ({error})", Code.NOT_READY))
            return
        if self.ended:  # meanwhile
            self._call.cancel()
        try:
            for reply in self._call:
                self.replies.put(reply)
            self.replies.put(ServerGone("the gateway ended the stream: open it again"))
        except grpc.RpcError as error:
            self.replies.put(_error(error))
        except Exception as error:  # noqa: BLE001  (the bytes are not a reply: the waiting caller must get an error)
            self.replies.put(Error(f"the gateway's reply cannot be decoded: {error}", Code.MALFORMED))
            self._call.cancel()


def _error(error: Any) -> Error:
    code, details = error.code(), error.details()
    if dict(error.trailing_metadata() or ()).get(CODE) == str(int(Code.BUSY)):
        return Busy(f"the gateway refused: {details}")
    if code in _REFUSED:
        return Refused(f"the gateway refused: {details}", _REFUSED[code])
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return ServerGone(f"the stream to the gateway broke: {details}")
    return Error(f"the gateway failed: {code.name}: {details}")
