"""What a model asks of a way to the engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from jurybox.client.in_flight import Answer, InFlight
from jurybox.protocol.errors import ProtocolMismatch
from jurybox.protocol.spec import TensorSpec
from jurybox.protocol.wire import PACK_REPLY, PREFIX, prefix_error

if TYPE_CHECKING:
    import asyncio

# What a Caller returns where there is no answer's code; the native core has the same.
NOT_SENT = -1
NOT_ANSWERED = -2
NOT_FIT = -3

_HEAD = len(PREFIX) + PACK_REPLY.size


def read_reply(frame: bytes, sender: str) -> Answer:
    """The answer in a frame of wire.PACK_REPLY. Raises ProtocolMismatch, naming the sender, where it is none."""
    if len(frame) < _HEAD or frame[: len(PREFIX)] != PREFIX:
        wrong = prefix_error(frame) or f"{len(frame)} bytes"
        raise ProtocolMismatch(f"{sender} answered what is no reply: {wrong}")
    sequence, version, incarnation, code = PACK_REPLY.unpack_from(frame, len(PREFIX))
    return Answer(sequence, code, frame[_HEAD:].decode(errors="replace") if code else "", version, incarnation)


class Watching:
    """An event loop that is told when answers may have come. Made in the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        self.loop = loop
        self._arrived = arrived
        self._thread = threading.get_ident()
        self._reader = -1

    @property
    def on(self) -> bool:
        """False once the loop has been closed: asyncio.run has returned, and the client goes on without it."""
        return not self.loop.is_closed()

    def tell(self) -> None:
        """Have the loop look for answers, from any thread."""
        if self._thread == threading.get_ident():
            self.loop.call_soon(self._arrived)
        elif self.on:
            self.loop.call_soon_threadsafe(self._arrived)

    def read(self, descriptor: int) -> None:
        """Tell the loop when the descriptor becomes readable."""
        self._do(lambda: self.loop.add_reader(descriptor, self._arrived))

    def unread(self, descriptor: int) -> None:
        """No longer, since it is about to be closed."""
        self._do(lambda: self.loop.remove_reader(descriptor))

    def _do(self, action: Callable[[], object]) -> None:
        if not self.on:
            return
        if self._thread == threading.get_ident():
            action()
        else:
            self.loop.call_soon_threadsafe(action)


class RowPlace(NamedTuple):
    """Rows of the arena that are kept from call to call, and the engine that is asked for them.

    Attributes:
        first, rows: their numbers.
        spec: of the model's only input; None where it has several.
        input: where its rows go; None where inputs are written before the call.
        extents: where the sizes of a row of any size go, int64 (k,); None where rows have one shape.
        outputs: the rows of the only output, or of all outputs by name; None where they are read after the call.
        engine: its record of scoreboard.ENGINE, shape (1,); `incarnation` is the life of it that is meant, and
            `number` its place on the scoreboard.
    """

    first: int
    rows: int
    spec: TensorSpec | None
    input: NDArray[Any] | None
    extents: NDArray[np.int64] | None
    outputs: NDArray[Any] | dict[str, NDArray[Any]] | None
    engine: NDArray[Any]
    incarnation: int = 0
    number: int = 0

    def write(self, row: NDArray[Any] | bytes) -> bool:
        """Copy what goes in; False where it does not fit."""
        if self.input is None or self.spec is None:
            return False
        array = np.frombuffer(row, self.input.dtype) if type(row) is bytes else np.asarray(row)
        if self.extents is None:
            if array.shape != self.input.shape:
                return False
            np.copyto(self.input, array)
            return True
        sizes = self.spec.extents_of(array.shape)
        if sizes is None:
            return False
        self.input[: array.size] = array.reshape(-1)
        self.extents[:] = sizes
        return True

    def copied(self) -> Any:
        """Copies of the outputs."""
        if type(self.outputs) is dict:
            return {name: array.copy() for name, array in self.outputs.items()}
        return None if self.outputs is None else self.outputs.copy()


class Caller(Protocol):
    """Copies rows in, sends their ticket and waits LOOK_AFTER at most, while nothing else is in flight on the lane."""

    def __call__(self, row: NDArray[Any] | bytes | None, sequence: int, seconds: float) -> Any:
        """Ask for the rows of a RowPlace.

        Args:
            row: C-contiguous, of the input's dtype; None where it is written already.

        Returns:
            As RowPlace.copied, or an int that says why there is nothing: a failure's code, NOT_FIT where the row does
            not fit its place, NOT_SENT where the engine serves no more, NOT_ANSWERED where no answer came in time.
        """

    @property
    def version(self) -> int:
        """Of the weights that answered last."""

    def message(self) -> str:
        """What the last failure said."""


class SocketCaller(Caller):
    """A caller that reads replies from a socket: the engine's record, and what the last reply was."""

    def __init__(self, place: RowPlace, engine: NDArray[Any]) -> None:
        self._place = place
        self._states = engine["state"]
        self._incarnations = engine["incarnation"]
        self._message = ""
        self._reply: bytes | Answer = b""  # the last one; parsed where somebody asks for its version

    @property
    def version(self) -> int:
        reply = self._reply
        return reply.version if isinstance(reply, Answer) else read_reply(reply, "an engine").version

    def message(self) -> str:
        return self._message


class Transport(Protocol):
    """Carries tickets of one lane to engines and answers back. Not thread-safe: the model sees to that.

    KeyboardInterrupt may leave any method at any point, and what was returned may be lost with it. Therefore `holds`:
    a transport always knows which tickets it has sent and not seen the answers of.

    `send`, `exchange` and `caller` raise TooManyFiles where the way to the engine has to be opened and cannot be.
    """

    def send(self, ticket: InFlight) -> None:
        """Send without waiting."""

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
        """Send a ticket while no other is waited for and wait for its answer; None when none came in time."""
        self.send(ticket)
        until = time.monotonic() + timeout
        while (left := until - time.monotonic()) > 0:
            for answer in self.receive(left):
                if answer.sequence in (ticket.sequence, 0):
                    return answer  # nothing else is waited for
        return None

    def caller(self, place: RowPlace) -> Caller | None:
        """What makes whole calls for these rows to the only engine there is.

        None where there are several, and where nothing would be gained by it, as over a network.
        """
        return None

    def receive(self, timeout: float) -> Sequence[Answer]:
        """Answers that came, after at most `timeout` seconds; empty when none did."""

    def holds(self, ticket: InFlight) -> bool:
        """Whether the ticket was sent to its engine, in its incarnation, and no answer was taken in yet."""

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        """Have `arrived` called in the loop's thread whenever answers may have come. Called in that thread."""

    def close(self) -> None:
        """Let go; tickets in flight stay unanswered."""

    def forked(self) -> None:
        """In a forked child: close inherited descriptors, and touch nothing that the parent uses."""
