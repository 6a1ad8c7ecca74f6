"""The control door: requests in protobuf frames on a ROUTER socket, one handler a kind of request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import zmq
from google.protobuf.message import DecodeError, Message

from jurybox.protocol.control_pb2 import ControlReply, ControlRequest, Done, ErrorMessage
from jurybox.protocol.errors import Code, Error, plain, said
from jurybox.protocol.wire import MAX_CONTROL, PREFIX, prefix_error, require_name
from jurybox.server.endpoints import bind_for_own_user
from jurybox.server.logs import traced

_HIGH_WATER = 4096

Handler = Callable[[Any], Message | None]


class Desk:
    """Answers control requests.

    Args:
        address: where to bind.
        handlers: by the field of ControlRequest's oneof: takes that message, gives the reply's (None: Done). An
            `Error` it raises goes to whoever asked.
        report: called with (event, fields) for what should be logged.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        handlers: Mapping[str, Handler],
        report: Callable[..., None],
    ) -> None:
        self._handlers = handlers
        self._report = report
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        self.socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL)
        bind_for_own_user(self.socket, address)

    def answer_waiting(self, limit: int = 64) -> None:
        """Answer what has come, at most `limit` requests, so that children are heard in between."""
        for _ in range(limit):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(frames)

    def close(self) -> None:
        self.socket.close()

    def _answer(self, frames: list[bytes]) -> None:
        # identity, prefix, the caller's eight bytes, body
        number = frames[2] if len(frames) > 2 and len(frames[2]) == 8 else b""
        try:
            if wrong := prefix_error(frames[1] if len(frames) > 1 else b""):
                raise Error(wrong, Code.PROTOCOL_MISMATCH)
            if len(frames) != 4 or not number:
                raise Error(
                    f"a control message is 3 frames (prefix, 8 bytes, body), {len(frames) - 1} came", Code.MALFORMED
                )
            reply = self._handle(frames[3]).SerializeToString()
        except Error as error:
            reply = _failed(error.code, said(error))
        except Exception as error:  # noqa: BLE001  one request must not end the server; its sender and the log are told
            self._report("request failed", error=said(error), exception=traced(error))
            message = f"the server failed at this request ({said(error, 500)}); its log says more"
            reply = _failed(Code.REFUSED, message)
        try:
            self.socket.send_multipart((frames[0], PREFIX, number, reply), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._report("reply not sent", error=said(error))

    def _handle(self, body: bytes) -> ControlReply:
        try:
            request = ControlRequest.FromString(body)
        except DecodeError as error:
            raise Error(f"not a control request: {error}", Code.MALFORMED) from error
        kind = request.WhichOneof("request")
        if kind is None or kind not in self._handlers:
            raise Error(f"unknown control request {kind!r}: a newer client?", Code.MALFORMED)
        asked = getattr(request, kind)
        require_name(getattr(asked, "model", ""))
        result = self._handlers[kind](asked) or Done()
        field = next(item.name for item in ControlReply.DESCRIPTOR.fields if item.message_type is result.DESCRIPTOR)
        reply = ControlReply()
        getattr(reply, field).CopyFrom(result)
        # A message without content would otherwise not count as set.
        getattr(reply, field).SetInParent()
        return reply


def _failed(code: Code, message: str) -> bytes:
    return ControlReply(error=ErrorMessage(code=code, message=plain(message))).SerializeToString()
