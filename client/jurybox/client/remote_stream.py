"""A gRPC stream that is asked and answers in order, with a timeout on every wait."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import Message

from jurybox.client.remote.grpc_channel import CODE
from jurybox.protocol import forks
from jurybox.protocol.errors import Busy, Code, Error, Refused, ServerGone, Timeout, error_for
from jurybox.protocol.remote_weights_pb2 import WeightsRefusal

_AHEAD = 4  # requests that may wait to be sent
_SLICE = 0.1
_REFUSED = {
    grpc.StatusCode.UNAUTHENTICATED: Code.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: Code.REFUSED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Code.TOO_LARGE,
}
# Of streams that a forked child inherited. What gRPC would do at their end belongs to threads that it has not.
_left_to_parent: list[Any] = []


class RemoteStream:
    """One call of a method that takes a stream and gives one. It ends when it is closed or dropped.

    A forked child has no part in it: all but `close`, which does nothing there, are refused.

    Args:
        channel: to the gateway.
        method: "/package.Service/Method".
        decode: makes a reply of its bytes.
        metadata: sent with the call, such as a token.
        timeout: seconds of every wait that is given none.

    Attributes:
        refused: the last reply was a refusal: both ends know where they are, and may go on.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        method: str,
        decode: Callable[[bytes], Any],
        metadata: tuple[tuple[str, str], ...],
        timeout: float,
    ) -> None:
        self._timeout = timeout
        self.refused = False
        self._forked = False
        # The threads hold the exchange, and not this object: it can be dropped, and then they end.
        self._exchange = exchange = _Exchange()
        call = channel.stream_stream(
            method, request_serializer=lambda message: message.SerializeToString(), response_deserializer=decode
        )
        exchange.begin(call, metadata)
        self._end = weakref.finalize(self, exchange.end)
        forks.register(self)

    def send(self, request: Message, until: float | None = None) -> None:
        """Send a request; waits while many are on their way. Raises what ended the stream, or Timeout.

        Args:
            until: on the monotonic clock; the stream's timeout from now on without it.
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
                    raise Timeout(f"the gateway took nothing for {time.monotonic() - began:.1f} s") from None
        while True:  # what it said last tells why, and else what ended it
            self.receive(until)

    def receive(self, until: float | None = None) -> Any:
        """The next reply. Raises what it refuses with, what ended the stream, or Timeout; `until` as for `send`."""
        self._require_own()
        began = time.monotonic()
        wait = self._timeout if until is None else max(0.0, until - began)
        try:
            reply = self._exchange.replies.get(timeout=wait)
        except queue.Empty:
            raise Timeout(f"the gateway did not answer for {wait:.1f} s") from None
        if isinstance(reply, Exception):
            self._exchange.replies.put(reply)  # whoever asks again is told the same
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
        """End the stream; harmless when done already."""
        if self._forked:
            return
        self._end()
        if self._exchange.thread is not threading.current_thread():
            self._exchange.thread.join(self._timeout)

    def _require_own(self) -> None:
        if self._forked:
            raise Refused("this stream was opened before a fork: connect in the process that uses it")

    def _after_fork_in_child(self) -> None:
        self._forked = True
        self._end.detach()
        _left_to_parent.append(self._exchange)


class _Exchange:
    """Both directions of a stream, and the thread that listens."""

    def __init__(self) -> None:
        self.requests: queue.Queue[Message] = queue.Queue(_AHEAD)
        self.replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ended = False  # no event: its lock could be held by the thread in which a dropped stream is collected
        self.thread = threading.Thread(target=self._listen, name="weights stream", daemon=True)
        self._call: Any = None

    def begin(self, call: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        try:
            self._call = call(self._outgoing(), metadata=metadata)
        except ValueError as error:  # gRPC's word for a channel that was closed
            raise Refused(f"this connection was closed: connect again ({error})", Code.NOT_READY) from error
        self.thread.start()

    def end(self) -> None:
        self.ended = True
        self._call.cancel()

    def _outgoing(self) -> Iterator[Message]:
        while not self.ended:
            try:
                yield self.requests.get(timeout=_SLICE)
            except queue.Empty:
                continue

    def _listen(self) -> None:
        try:
            for reply in self._call:
                self.replies.put(reply)
            self.replies.put(ServerGone("the gateway ended the stream: open it again"))
        except grpc.RpcError as error:
            self.replies.put(_error(error))
        except Exception as error:  # noqa: BLE001  (bytes that are no reply: whoever waits must be told)
            self.replies.put(Error(f"the gateway sent what is no reply: {error}", Code.MALFORMED))
            self._call.cancel()
        self.ended = True


def _error(error: Any) -> Error:
    code, details = error.code(), error.details()
    if dict(error.trailing_metadata() or ()).get(CODE) == str(int(Code.BUSY)):
        return Busy(f"the gateway refused: {details}")
    if code in _REFUSED:
        return Refused(f"the gateway refused: {details}", _REFUSED[code])
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return ServerGone(f"the stream to the gateway broke: {details}")
    return Error(f"the gateway failed: {code.name}: {details}")
