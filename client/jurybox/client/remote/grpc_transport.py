"""The transport of a lane over gRPC: every ticket is a ModelInfer call of the Open Inference Protocol."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jurybox.client.remote.grpc_channel import Asker, failure
from jurybox.client.remote.rows_here import RowsHere
from jurybox.client.transports.transport import Answer, InFlight, Watching
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.errors import Code
from jurybox.protocol.scoreboard import ENGINE, EngineState
from jurybox.protocol.spec import OIP_NAMES, ModelSpec

if TYPE_CHECKING:
    import asyncio

_parents: list[Any] = []  # in a forked child: what gRPC would try to end in its parent's name, were it collected


class Gateway:
    """A lane's scoreboard with one engine: gRPC connects again by itself, and failures come as answers."""

    def __init__(self) -> None:
        self.engines = np.zeros(1, ENGINE)
        self.engines["state"], self.engines["incarnation"] = EngineState.SERVING, 1

    def server_lives(self) -> bool:
        """As Scoreboard.server_lives."""
        return True


class GrpcTransport:
    """As Transport.

    Args:
        asker: starts calls.
        method: the stub's ModelInfer.
        metadata: of every call.
        rows: where tickets find their inputs and answers leave their outputs.
    """

    def __init__(
        self, asker: Asker, method: Any, metadata: list[tuple[str, str]], spec: ModelSpec, rows: RowsHere
    ) -> None:
        self._asker = asker
        self._method = method
        self._metadata = metadata
        self._spec = spec
        self._rows = rows
        self._calls: dict[int, object] = {}  # by sequence; what is answered by any other is not wanted any more
        self._done: deque[tuple[object, InFlight, Any]] = deque()  # filled by gRPC's threads
        self._news = threading.Lock()  # released when something was put there; not an event, whose own lock a
        self._news.acquire()  # KeyboardInterrupt can leave taken
        self._watching: Watching | None = None

    def send(self, ticket: InFlight) -> None:
        """As Transport.send."""
        request = pb.ModelInferRequest(
            model_name=self._spec.name, model_version=str(ticket.version) if ticket.version else ""
        )
        for name, tensor in self._spec.inputs.items():
            rows = self._rows.columns.inputs[name][ticket.first : ticket.first + ticket.rows]
            request.inputs.add(name=name, datatype=OIP_NAMES[tensor.dtype], shape=rows.shape)
            request.raw_input_contents.append(rows.tobytes())
        seconds = max(0.001, (ticket.deadline - ticket.submitted) / 1e9)
        asked = object()
        self._asker.ask(self._method, request, seconds, self._metadata, lambda call: self._arrived(asked, ticket, call))
        self._calls[ticket.sequence] = asked

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
        """As Transport.exchange."""
        self.send(ticket)
        until = time.monotonic() + timeout
        while (left := until - time.monotonic()) > 0:
            for answer in self.receive(left):
                if answer.sequence == ticket.sequence:
                    return answer  # nothing else is waited for
        return None

    def caller(
        self,
        first: int,
        place: NDArray[Any],
        outputs: Any,
        engine: NDArray[Any],
        incarnation: int,
        length: NDArray[Any] | None = None,
    ) -> None:
        """As Transport.caller: a network call gains nothing by it."""

    def receive(self, timeout: float) -> Sequence[Answer]:
        """As Transport.receive."""
        until = time.monotonic() + timeout
        while not self._done and (left := until - time.monotonic()) > 0:
            self._news.acquire(timeout=left)
        answers: list[Answer] = []
        while self._done:
            asked, ticket, call = self._done[0]
            if self._calls.get(ticket.sequence) is asked:
                answers.append(self._read(ticket, call))
                del self._calls[ticket.sequence]
            self._done.popleft()
        return answers

    def holds(self, ticket: InFlight) -> bool:
        """As Transport.holds."""
        return ticket.sequence in self._calls

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        """As Transport.watch."""
        self._watching = Watching(loop, arrived)

    def close(self) -> None:
        """As Transport.close. Calls go on until they are answered or the channel ends: a garbage collector, which may
        close this in the midst of anything, must take none of gRPC's locks.
        """
        self._watching, self._calls = None, {}

    def forked(self) -> None:
        """As Transport.forked: gRPC's calls are the parent's."""
        _parents.append((self._method, self._calls, self._done))
        self._watching, self._calls, self._done = None, {}, deque()

    def _arrived(self, asked: object, ticket: InFlight, call: Any) -> None:
        """In one of gRPC's threads."""
        self._done.append((asked, ticket, call))
        with contextlib.suppress(RuntimeError):  # it is released
            self._news.release()
        if (watching := self._watching) is not None and watching.on:
            with contextlib.suppress(RuntimeError):  # its loop was closed just now
                watching.tell()

    def _read(self, ticket: InFlight, call: Any) -> Answer:
        def answer(code: int, message: str, version: int = 0) -> Answer:
            return Answer(ticket.sequence, code, message, version, ticket.incarnation)

        if call is None or call.cancelled():
            return answer(Code.SERVER_GONE, "the connection was closed")
        if (error := call.exception()) is not None:
            code, message = failure(error)
            late = (
                f"model {self._spec.name!r} did not answer in time ({message}): its server is busy, or the network "
                "to it is broken. Ask again: it is connected to again by itself"
            )
            return answer(code, late if code == Code.TIMEOUT else message)
        response: pb.ModelInferResponse = call.result()
        if wrong := self._take(response, ticket.first, ticket.rows):
            return answer(Code.PROTOCOL_MISMATCH, wrong)
        version = response.model_version
        return answer(Code.OK, "", int(version) if version.isdigit() else 0)

    def _take(self, response: pb.ModelInferResponse, first: int, rows: int) -> str | None:
        """Copy the outputs to their rows; returns what is wrong with them."""
        came = dict(zip((output.name for output in response.outputs), response.raw_output_contents, strict=False))
        for name, array in self._rows.columns.outputs.items():
            target = array[first : first + rows]
            if name not in came or len(came[name]) != target.nbytes:
                what = f"{len(came[name])} bytes" if name in came else "nothing"
                return f"output {name!r}: {target.nbytes} raw bytes were expected, came {what}"
            target[...] = np.frombuffer(came[name], array.dtype).reshape(target.shape)
        return None
