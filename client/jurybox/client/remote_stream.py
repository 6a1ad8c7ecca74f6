"""A gRPC stream that is asked and answers in order, with a timeout on every wait."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import Message

from jurybox.protocol.errors import Code, Error, Refused, ServerGone, Timeout, error_for
from jurybox.protocol.remote_weights_pb2 import WeightsRefusal

_AHEAD = 4  # requests that may wait to be sent
_SLICE = 0.1
_REFUSED = {
    grpc.StatusCode.UNAUTHENTICATED: Code.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: Code.REFUSED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Code.TOO_LARGE,
}


class RemoteStream:
    """One call of a method that takes a stream and gives one.

    Args:
        channel: to the gateway.
        method: "/package.Service/Method".
        decode: makes a reply of its bytes.
        metadata: sent with the call, such as a token.
        timeout: seconds of every wait.
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
        self._requests: queue.Queue[Message | None] = queue.Queue(_AHEAD)
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended = threading.Event()
        call = channel.stream_stream(
            method, request_serializer=lambda message: message.SerializeToString(), response_deserializer=decode
        )
        self._call = call(self._outgoing(), metadata=metadata)
        self._thread = threading.Thread(target=self._listen, name="weights stream", daemon=True)
        self._thread.start()

    def send(self, request: Message) -> None:
        """Send a request; waits while many are on their way. Raises what ended the stream, or Timeout."""
        until = time.monotonic() + self._timeout
        while not self._ended.is_set():
            try:
                self._requests.put(request, timeout=_SLICE)
                return
            except queue.Full:
                if time.monotonic() > until:
                    raise Timeout(f"the gateway took nothing for {self._timeout:g} s") from None
        self.receive()

    def receive(self) -> Any:
        """The next reply. Raises what it refuses with, what ended the stream, or Timeout."""
        try:
            reply = self._replies.get(timeout=self._timeout)
        except queue.Empty:
            raise Timeout(f"the gateway did not answer for {self._timeout:g} s") from None
        if isinstance(reply, Exception):
            self._replies.put(reply)  # whoever asks again is told the same
            raise reply
        if reply.WhichOneof("part") == "refusal":
            refusal: WeightsRefusal = reply.refusal
            raise error_for(refusal.code, refusal.message)
        return reply

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    def close(self) -> None:
        """End the stream."""
        self._ended.set()
        self._call.cancel()
        self._thread.join(self._timeout)

    def _outgoing(self) -> Iterator[Message]:
        while not self._ended.is_set():
            try:
                request = self._requests.get(timeout=_SLICE)
            except queue.Empty:
                continue
            if request is None:
                return
            yield request

    def _listen(self) -> None:
        try:
            for reply in self._call:
                self._replies.put(reply)
            self._replies.put(ServerGone("the gateway ended the stream: open it again"))
        except grpc.RpcError as error:
            self._replies.put(_error(error))
        self._ended.set()


def _error(error: Any) -> Error:
    code, details = error.code(), error.details()
    if code in _REFUSED:
        return Refused(f"the gateway refused: {details}", _REFUSED[code])
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return ServerGone(f"the stream to the gateway broke: {details}")
    return Error(f"the gateway failed: {code.name}: {details}")
