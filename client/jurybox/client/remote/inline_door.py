"""The door of a remote lane: tickets with their rows behind them, answers with theirs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from jurybox.client.doors.door import Answer, CalledRow, Outgoing, Watching, read_reply, still
from jurybox.client.remote.connection import Connection
from jurybox.client.remote.rows_here import RowsHere
from jurybox.protocol.errors import Code, ProtocolMismatch
from jurybox.protocol.wire import PACK_TICKET, PREFIX


class InlineDoor:
    """As Door, to the relay of a tcp:// server.

    Args:
        rows: where tickets find their inputs and answers leave their outputs.
        lease: the relay's name for the lane.
    """

    def __init__(self, connection: Connection, rows: RowsHere, lease: int) -> None:
        self._connection = connection
        self._socket = connection.socket
        self._rows = rows
        self._lease = lease
        self._in_flight: dict[int, tuple[int, int]] = {}  # sequence -> (first row, rows), of this epoch
        self._epoch = connection.epoch
        self._watching: Watching | None = None

    def send(self, ticket: Outgoing) -> None:
        """As Door.send."""
        sequence, _, epoch, first, rows, now, deadline, version = ticket
        if epoch != self._epoch:  # what was sent over the broken connection may be answered, to rows that others hold
            self._in_flight.clear()
            self._epoch = epoch
        left = max(1, deadline - now)  # the clock of another host says nothing here
        record = PACK_TICKET.pack(sequence, self._lease, left, 0, 0, first, rows, 0, version, epoch)
        parts: list[Any] = [PREFIX + record]
        parts += [np.ascontiguousarray(array[first : first + rows]) for array in self._rows.inputs.values()]
        self._in_flight[sequence] = (first, rows)
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            del self._in_flight[sequence]  # nothing moves any more: the lane's next look finds the connection broken
        if (watching := still(self._watching)) is not None:
            # Sending reads the socket's signal, and with it perhaps the news of an answer.
            watching[0].call_soon(watching[1])

    def exchange(self, ticket: Outgoing, timeout: float) -> Answer | None:
        """As Door.exchange."""
        self.send(ticket)
        until = time.monotonic() + timeout
        while (left := until - time.monotonic()) > 0:
            if answers := self.receive(left):
                return answers[0]  # nothing else is in flight
        return None

    def caller(self, row: CalledRow, engine: NDArray[Any], epoch: int) -> None:
        """As Door.caller: a network call gains nothing by it."""

    def receive(self, timeout: float) -> Sequence[Answer]:
        """As Door.receive."""
        if timeout and not self._socket.poll(int(timeout * 1000 + 0.999)):
            return ()
        answers: list[Answer] = []
        try:
            while True:
                if (answer := self._read(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))) is not None:
                    answers.append(answer)
        except zmq.Again:
            return answers

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        """As Door.watch."""
        if self._watching is None or self._watching[0] is not loop:
            self._watching = (loop, arrived)
            loop.add_reader(int(self._socket.getsockopt(zmq.FD)), arrived)

    def close(self) -> None:
        """As Door.close."""
        if (watching := still(self._watching)) is not None:
            watching[0].remove_reader(int(self._socket.getsockopt(zmq.FD)))
        self._connection.close()

    def _read(self, frames: Sequence[zmq.Frame]) -> Answer | None:
        """The answer in these frames, its outputs copied to their rows; None when nobody waits for it any more."""
        answer = read_reply(frames[0].bytes, "the server")
        if answer.sequence == 0:
            return answer
        if answer.epoch != self._connection.epoch or (place := self._in_flight.pop(answer.sequence, None)) is None:
            return None
        if answer.code == Code.OK:
            self._take(frames[1:], *place)
        return answer

    def _take(self, frames: Sequence[zmq.Frame], first: int, rows: int) -> None:
        outputs = self._rows.outputs
        if len(frames) != len(outputs):
            raise ProtocolMismatch(f"{len(frames)} outputs came, {len(outputs)} were expected: {', '.join(outputs)}")
        for (name, array), frame in zip(outputs.items(), frames, strict=True):
            target = array[first : first + rows]
            if len(frame) != target.nbytes:
                raise ProtocolMismatch(f"output {name!r} came with {len(frame)} bytes, {target.nbytes} were expected")
            target[...] = np.frombuffer(frame.buffer, array.dtype).reshape(target.shape)
