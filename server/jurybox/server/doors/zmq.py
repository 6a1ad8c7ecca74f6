"""The ZeroMQ door: tickets in protobuf frames on a ROUTER socket, for every language."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import zmq
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from jurybox.protocol.errors import Code
from jurybox.protocol.ticket_pb2 import Reply, Ticket
from jurybox.protocol.wire import PACK_TICKET, PREFIX, lane_identity, prefix_error

# A client's credit (the rows of its lane) bounds what waits for it; beyond that, replies to a peer that never
# reads are dropped.
_HIGH_WATER = 8192
_MAX_MESSAGE = 1 << 20  # a ticket has some sixty bytes


class ZmqDoor:
    """Receives tickets and sends replies on one ROUTER socket.

    Args:
        address: where to bind.
        epoch: of this life of the engine; every reply carries it.
        report: called with (event, fields) for what should be logged.
    """

    number = 0

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        epoch: int,
        report: Callable[..., None] = lambda event, **fields: None,
    ) -> None:
        self._epoch = epoch
        self._report = report
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a lane's holder that reconnects takes its name along
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
        self._socket.bind(address)

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def pending(self) -> bool:
        """Whether messages wait. To be asked before sleeping on `fileno`, which signals changes only."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def collect(self, out: NDArray[Any]) -> int:
        """As Door.collect; what is no ticket is answered with what was expected."""
        n = 0
        if not self.pending():
            return 0
        receive, pack = self._socket.recv_multipart, PACK_TICKET.pack_into
        records = out.data
        try:
            while n < len(out):
                frames = receive(zmq.NOBLOCK)
                body = frames[-1]
                if len(frames) != 2 or body[:2] != PREFIX:
                    self._complain(frames)
                    continue
                try:
                    t = Ticket.FromString(body[2:])
                    if t.epoch != self._epoch:
                        continue  # its sender has seen on the board that this engine is new, and sends again
                    pack(records, n * 64, t.sequence, t.lease, t.deadline_ns, t.submitted_ns, t.lane, t.first_row,
                         t.rows, 0, t.version, 0, 0)  # fmt: skip
                except (DecodeError, struct.error) as error:
                    self._complain(frames, f"not a ticket: {error}")
                    continue
                n += 1
        except zmq.Again:
            pass
        return n

    def reply(self, tickets: NDArray[Any], code: int, version: int, message: str) -> None:
        """As Door.reply. A reply to a peer that is gone is dropped by the socket."""
        epoch, send = self._epoch, self._socket.send_multipart
        for sequence, lease, lane in zip(
            tickets["sequence"].tolist(), tickets["lease"].tolist(), tickets["lane"].tolist(), strict=True
        ):
            reply = Reply(sequence=sequence, code=code, message=message, version=version, epoch=epoch)
            send((lane_identity(lane, lease), PREFIX + reply.SerializeToString()), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()

    def _complain(self, frames: list[bytes], what: str | None = None) -> None:
        """Tell the sender of bytes that are no ticket what was expected."""
        body = frames[1] if len(frames) > 1 else b""
        mismatch = prefix_error(body)
        message = mismatch or what or f"{len(frames) - 1} frames came, a ticket is one"
        code = Code.PROTOCOL_MISMATCH if mismatch else Code.MALFORMED
        self._report("bad message", error=message, bytes=sum(map(len, frames)))
        reply = Reply(code=code, message=message, epoch=self._epoch)
        try:
            self._socket.send_multipart((frames[0], PREFIX + reply.SerializeToString()), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._report("complaint not sent", error=str(error))
